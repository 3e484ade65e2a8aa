"""Where values and Refs of a TPU are, and marks that a machine or compiler may record; others pass over them.

Equations:

    with_memory_space_constraint  operand: an array                params: memory_space    gives the array
    has_memory_space              operands: a view in `pl.ANY`     params: tree, memory_space    gives a bool scalar
    touch                         operands: a view                 params: tree
    trace_value                   operand: an int or float scalar  params: label

A view is flattened as in `language/semaphores.py`: the leaves of `(RefView,)`.

Source: public API reference of Pallas TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language import frames, refs
from palladion.language.indices import is_ref, label_of
from palladion.language.semaphores import as_view
from palladion.language.tpu.memory import HBM, SMEM, VMEM, MemorySpace

__all__ = ["has_memory_space", "touch", "trace_value", "with_memory_space_constraint"]


# --- values -----------------------------------------------------------------------------------------------------------
with_memory_space_constraint_p = jaxlink.Primitive("with_memory_space_constraint")
with_memory_space_constraint_p.def_abstract_eval(lambda x, *, memory_space: x)
with_memory_space_constraint_p.def_impl(lambda x, *, memory_space: x)
jaxlink.mlir.register_lowering(with_memory_space_constraint_p, lambda ctx, x, *, memory_space: [x])
jaxlink.ad.deflinear2(with_memory_space_constraint_p, lambda ct, _, *, memory_space: [ct])
jaxlink.batching.defvectorized(with_memory_space_constraint_p)


def with_memory_space_constraint(x: jax.Array, memory_space: Any) -> jax.Array:
    """`x`, which a TPU is to keep in a given memory; elsewhere arrays have one memory, and `x` stays where it is.

    Arguments:
      x: an array.
      memory_space: `pltpu.HBM`, `pltpu.VMEM`, `pltpu.SMEM`, `pl.HOST`; `pl.ANY` leaves the choice.

    Raises:
      NotImplementedError: another memory. TypeError: `x` is a Ref.
    """
    if is_ref(x):
        raise refs.not_a_value(x, "constrain")
    if memory_space is refs.MemorySpace.ANY:
        return x
    if memory_space not in (HBM, VMEM, SMEM, jax.memory.Space.Host):
        raise mistake(
            NotImplementedError,
            f"pltpu.with_memory_space_constraint takes HBM, VMEM, SMEM and HOST, not {kind_of(memory_space)}.",
            hint="pltpu.with_memory_space_constraint(x, pltpu.HBM)",
        )
    return with_memory_space_constraint_p.bind(jnp.asarray(x), memory_space=memory_space)


# --- Refs -------------------------------------------------------------------------------------------------------------
class _MarkEffect(jaxlink.KernelEffect):
    """The effect of a mark: it stays where it is."""


_mark = _MarkEffect()
jaxlink.register_effect(_MarkEffect, lowerable=True)

has_memory_space_p = jaxlink.Primitive("has_memory_space")
has_memory_space_p.def_effectful_abstract_eval(
    lambda *avals, tree, memory_space: (jaxlink.ShapedArray((), np.dtype(bool)), set())
)
touch_p = jaxlink.Primitive("touch")
touch_p.multiple_results = True
touch_p.def_effectful_abstract_eval(lambda *avals, tree: ([], {jaxlink.state_types.ReadEffect(0), _mark}))


def _a_ref(function: str, ref: Any) -> Any:
    frames.required(function)
    if not is_ref(ref):
        headline = f"{function} takes a Ref or a view of one, not {kind_of(ref)}."
        raise mistake(TypeError, headline, hint="x_ref, or x_ref.at[pl.ds(i, 8)]")
    return as_view(ref)


def has_memory_space(ref: Any, memory_space: Any) -> jax.Array | np.bool_:
    """Whether a Ref lies in a memory: a bool scalar, known at once unless the Ref is in `pl.ANY`.

    Arguments:
      ref: a Ref or view.
      memory_space: a `pltpu.MemorySpace`.

    Raises:
      ValueError: `memory_space` is no memory of a TPU. TypeError: `ref` is no Ref.
    """
    view = _a_ref("pltpu.has_memory_space", ref)
    if not isinstance(memory_space, MemorySpace):
        headline = f"pltpu.has_memory_space takes a memory of a TPU, not {kind_of(memory_space)}."
        raise mistake(ValueError, headline, hint="pltpu.HBM, pltpu.VMEM, pltpu.SMEM …")
    space = jaxlink.typeof(view.ref).memory_space
    if space is not refs.MemorySpace.ANY:
        blocks = memory_space is VMEM and space in (None, refs.MemorySpace.DEFAULT)
        return np.bool_(space is memory_space or blocks)
    flat, tree = jaxlink.flatten_views((view,))
    return has_memory_space_p.bind(*flat, tree=tree, memory_space=memory_space)


def touch(ref: Any) -> None:
    """Keep a Ref: to a compiler this is a use of it, and nothing that uses it moves past this place.

    Arguments:
      ref: a Ref or view.

    Raises:
      TypeError: `ref` is no Ref. ValueError: outside a kernel.
    """
    flat, tree = jaxlink.flatten_views((_a_ref("pltpu.touch", ref),))
    touch_p.bind(*flat, tree=tree)


# --- traces -----------------------------------------------------------------------------------------------------------
trace_value_p = jaxlink.Primitive("trace_value")
trace_value_p.multiple_results = True
trace_value_p.def_effectful_abstract_eval(lambda value, *, label: ([], {_mark}))
trace_value_p.def_impl(lambda value, *, label: [])
jaxlink.mlir.register_lowering(trace_value_p, lambda ctx, value, *, label: [])


def trace_value(label: str, value: Any) -> None:
    """Put a number into the profile of a run, where there is one.

    Arguments:
      label: what it is called there.
      value: an integer or floating-point scalar.

    Raises:
      TypeError: the label is no string, or the value a Ref or no number. ValueError: the value is no scalar.
    """
    if not isinstance(label, str):
        headline = f"The label of pltpu.trace_value is {kind_of(label)}; it must be a string."
        raise mistake(TypeError, headline, hint='pltpu.trace_value("step", i)')
    if is_ref(value):
        headline = f"The value of pltpu.trace_value is a Ref, {label_of(value)}."
        raise mistake(TypeError, headline, hint="read it: n_ref[0]")
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    if not isinstance(value, numbers) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        headline = f"The value of pltpu.trace_value is {kind_of(value)}; it must be a number."
        raise mistake(TypeError, headline, hint='pltpu.trace_value("step", i)')
    if np.ndim(value):
        headline = f"pltpu.trace_value takes a scalar, not shape {np.shape(value)}."
        raise mistake(ValueError, headline, hint="jnp.sum(x), x[0]")
    if not isinstance(value, jax.Array):
        value = np.asarray(value, jax.dtypes.canonicalize_dtype(jnp.result_type(value)))[()]
    trace_value_p.bind(value, label=label)
