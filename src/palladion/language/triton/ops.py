"""The operations of the Triton dialect that mean something on every target: masks, atomics, products, hints.

Source: public documentation of `jax.experimental.pallas.triton` and of the Triton language that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import explain
from palladion.language import masked


def load(
    ref: Any,
    *,
    mask: jax.Array | None = None,
    other: Any = None,
    cache_modifier: str | None = None,
    eviction_policy: str | None = None,
    volatile: bool = False,
) -> jax.Array:
    """What a Ref or view holds; lanes where the mask is off read `other`, wherever their index points.

        row = pltriton.load(x_ref.at[cols], mask=cols < n, other=-jnp.inf)

    Arguments:
      ref: a Ref or a view of one.
      mask: boolean, broadcasts to the view; None for all lanes.
      other: broadcasts to the view; without it, lanes that are off are uninitialised (NaN in interpreters).
      cache_modifier, eviction_policy, volatile: hints for the compiler ("" or None for none).

    Returns:
      an array of the view's shape and dtype.

    Raises:
      TypeError, ValueError: not a Ref; a mask that is not boolean or does not fit; other without mask.
    """
    hints = dict(cache_modifier=cache_modifier, eviction_policy=eviction_policy, volatile=volatile)
    return masked.load("pltriton.load", ref, mask, other, hints)


def store(ref: Any, val: jax.Array, *, mask: jax.Array | None = None, eviction_policy: str | None = None) -> None:
    """Store in a Ref or view; lanes where the mask is off write nothing, wherever their index points.

    Arguments:
      ref: a Ref or a view of one.
      val: an array of the view's shape and dtype.
      mask: boolean, broadcasts to the view; None for all lanes.
      eviction_policy: a hint for the compiler.

    Raises:
      TypeError, ValueError: as `load`; also a value of another shape or dtype.
    """
    masked.store("pltriton.store", ref, val, mask, dict(eviction_policy=eviction_policy))


# --- atomics --------------------------------------------------------------------------------------------------------
def _read_modify_write(op: str, meaning: str) -> Any:
    def atomic(x_ref_or_view: Any, idx: Any, val: Any, *, mask: Any = None) -> jax.Array:
        ref = x_ref_or_view.at[idx]
        return masked.atomic(f"pltriton.atomic_{op}", op, ref, [val], mask)

    atomic.__name__ = atomic.__qualname__ = f"atomic_{op}"
    atomic.__doc__ = f"""{meaning}, as one step that no other program can come between.

    Lanes take their turns in order, so that repeated indices all count.

    Arguments:
      x_ref_or_view: a Ref or a view of one.
      idx: what `x_ref_or_view.at[idx]` takes.
      val: an array or scalar of the Ref's dtype, broadcast to the indexed part.
      mask: boolean, broadcasts to the indexed part; lanes that are off do nothing.

    Returns:
      what each lane found; uninitialised where the mask is off.

    Raises:
      TypeError, ValueError: not a Ref; a value or mask that does not fit; bits of a floating-point Ref.
    """
    return atomic


atomic_add = _read_modify_write("add", "Add `val`")
atomic_max = _read_modify_write("max", "Keep the larger of the element and `val`")
atomic_min = _read_modify_write("min", "Keep the smaller of the element and `val`")
atomic_and = _read_modify_write("and", "Keep the bits that `val` has too")
atomic_or = _read_modify_write("or", "Set the bits of `val`")
atomic_xor = _read_modify_write("xor", "Flip the bits of `val`")
atomic_xchg = _read_modify_write("xchg", "Put `val` in place of the element")


def atomic_cas(ref: Any, cmp: Any, val: Any) -> jax.Array:
    """Put `val` in place of the element if that equals `cmp`, as one step.

    Arguments:
      ref: a Ref or view, usually of one element.
      cmp, val: of the Ref's dtype, broadcast to its shape.

    Returns:
      what was found: equal to `cmp` where the exchange took place.
    """
    return masked.atomic("pltriton.atomic_cas", "cas", ref, [cmp, val], None)


# --- products and functions ---------------------------------------------------------------------------------------
def dot(
    a: jax.Array,
    b: jax.Array,
    trans_a: bool = False,
    trans_b: bool = False,
    allow_tf32: bool | None = None,
    precision: Any = None,
) -> jax.Array:
    """The matrix product of two blocks, accumulated in float32 (int32 for integers), which is also its dtype.

    Arguments:
      a, b: two-dimensional blocks.
      trans_a, trans_b: take the transpose of that block first.
      allow_tf32: True for the hardware's fastest product of float32 blocks, False for full float32.
      precision: as in `jax.lax.dot`; not together with allow_tf32.

    Raises:
      ValueError: a block is not two-dimensional, both allow_tf32 and precision are given, or the inner sizes differ.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"`a` and `b` must be 2D arrays; pltriton.dot got shapes {a.shape} and {b.shape}.")
    if allow_tf32 is not None:
        if precision is not None:
            raise ValueError("Only one of allow_tf32 and precision can be specified")
        precision = lax.Precision.DEFAULT if allow_tf32 else lax.Precision.HIGHEST
    contracted = (0 if trans_a else 1, 1 if trans_b else 0)
    if a.shape[contracted[0]] != b.shape[contracted[1]]:
        raise ValueError(
            explain(
                f"pltriton.dot: the inner sizes differ, {a.shape[contracted[0]]} and {b.shape[contracted[1]]}.",
                where=locations.current_location(),
                shapes=f"{a.shape} and {b.shape}, trans_a={trans_a}, trans_b={trans_b}",
            )
        )
    integers = jnp.issubdtype(a.dtype, jnp.integer) and jnp.issubdtype(b.dtype, jnp.integer)
    return lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )


def approx_tanh(x: jax.Array) -> jax.Array:
    """tanh; a GPU may use its approximate instruction (relative error about 2**-11), interpreters compute it exactly.

    Raises:
      TypeError: `x` is not floating-point.
    """
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(f"approx_tanh takes floating-point arrays, not {jnp.result_type(x)}.")
    return _approx_tanh(x)


APPROX_TANH = "pltriton.approx_tanh"  # by this name of a jitted function the Triton compiler knows it


def _tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


_tanh.__name__ = _tanh.__qualname__ = APPROX_TANH
_approx_tanh = jax.jit(_tanh)
max_contiguous_p = jaxlink.Primitive("max_contiguous")
max_contiguous_p.def_abstract_eval(lambda x, *, values: jaxlink.ShapedArray(x.shape, x.dtype))


def max_contiguous(x: jax.Array, values: int | Sequence[int]) -> jax.Array:
    """Promise that `x` counts up in runs of `values`; a compiler reads them with wide loads, others pass `x` on.

    Arguments:
      x: an integer array, such as indices.
      values: the length of a run, or one for each dimension.

    Raises:
      ValueError: a value is not a positive integer.
    """
    lengths = (values,) if isinstance(values, (int, np.integer)) else tuple(values)
    if not lengths or any(not isinstance(n, (int, np.integer)) or n < 1 for n in lengths):
        raise ValueError(f"max_contiguous takes positive integers, not {values!r}.")
    return max_contiguous_p.bind(x, values=tuple(int(n) for n in lengths)) if isinstance(x, jaxlink.Tracer) else x
