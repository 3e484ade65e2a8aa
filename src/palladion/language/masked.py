"""Loads and stores under a mask, and atomic updates: what lanes that are off ask for is never touched.

A mask lets a block run past the end of what it indexes: lanes that are off read `other` and write nothing, wherever
their index points. That is more than `jnp.where` round an ordinary load: the indices of lanes that are off may leave
the Ref, a slice under a mask never moves back inside, and a lane that is off never undoes what a lane that is on has
stored at the same index. So each is a primitive of its own.

Both dialects that have masks (`pltriton.load/store`, `pltpu.load/store`) are thin layers on this module.

Source: public documentation of the two; the meaning of masks in the Triton language reference.
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
from palladion.language import indexing
from palladion.language.refs import KernelRef

_READ, _WRITE = jaxlink.state_types.ReadEffect(0), jaxlink.state_types.WriteEffect(0)

# masked_load ref *(transforms, mask, other): `mask` and `other` may be None. `hints` are for compilers.
masked_load_p = jaxlink.Primitive("masked_load")
# masked_store ref value *(transforms, mask)
masked_store_p = jaxlink.Primitive("masked_store")
masked_store_p.multiple_results = True
# atomic_update ref *(values, transforms, mask): what each lane found; `op` is a key of ATOMICS
atomic_update_p = jaxlink.Primitive("atomic_update")

# What a lane leaves in memory, given what it found there and its own values.
ATOMICS = {
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "xchg": lambda found, value: value,
    "cas": lambda found, expected, value: jnp.where(found == expected, value, found),
}


@masked_load_p.def_effectful_abstract_eval
def _masked_load_type(ref, *flat, tree, shape, dtype, hints):
    return jaxlink.ShapedArray(shape, dtype), {_READ}


@masked_store_p.def_effectful_abstract_eval
def _masked_store_type(ref, value, *flat, tree, hints):
    return [], {_WRITE}


@atomic_update_p.def_effectful_abstract_eval
def _atomic_update_type(ref, *flat, tree, op, shape, dtype):
    return jaxlink.ShapedArray(shape, dtype), {_READ, _WRITE}


# --- what dialects call -----------------------------------------------------------------------------------------------
def load(name: str, ref: Any, mask: Any, other: Any, hints: dict[str, Any]) -> jax.Array:
    """What a Ref or view holds, `other` (uninitialised without one) in the lanes where the mask is off.

    Arguments:
      name: the function the user called, for messages.
      ref: a Ref or a view of one.
      mask: None, or a boolean array or scalar that broadcasts to the view.
      other: None, or a value that broadcasts to the view; it is converted to the view's dtype.
      hints: for compilers; values must be hashable.

    Raises:
      TypeError: `ref` is no Ref, or the mask is not boolean.
      ValueError: mask or other do not fit, or there is an other without a mask.
    """
    shape = _shape_of_ref(name, ref)
    hints = {k: v for k, v in hints.items() if v}
    if mask is None:
        if other is not None:
            raise ValueError(_message(f"{name} got other={other!r} without a mask, so no lane could take it."))
        if not hints:
            return indexing.read(ref, ...)
    else:
        mask = _broadcast(name, "mask", _as_mask(name, mask), shape)
        if other is not None:
            other = _broadcast(name, "other", jnp.asarray(other).astype(ref.dtype), shape)
    root, transforms = _parts(ref)
    flat, tree = jax.tree.flatten((transforms, mask, other))
    hints_key = tuple(sorted(hints.items()))
    return masked_load_p.bind(root, *flat, tree=tree, shape=shape, dtype=ref.dtype, hints=hints_key)


def store(name: str, ref: Any, value: Any, mask: Any, hints: dict[str, Any]) -> None:
    """Store in the lanes of a Ref or view where the mask is on; the others keep what they hold.

    Arguments:
      name, ref, mask, hints: as in `load`.
      value: an array of the view's shape and dtype (or a Python scalar's kind of dtype).

    Raises:
      TypeError, ValueError: as in `load`; also a value of another shape or dtype.
    """
    shape = _shape_of_ref(name, ref)
    hints = {k: v for k, v in hints.items() if v}
    if mask is None and not hints:
        indexing.write(ref, ..., value)
        return
    value = indexing.as_stored(ref, value, shape)
    if mask is not None:
        mask = _broadcast(name, "mask", _as_mask(name, mask), shape)
    root, transforms = _parts(ref)
    flat, tree = jax.tree.flatten((transforms, mask))
    masked_store_p.bind(root, value, *flat, tree=tree, hints=tuple(sorted(hints.items())))


def atomic(name: str, op: str, ref: Any, values: Sequence[Any], mask: Any) -> jax.Array:
    """Update the lanes of a Ref or view one after the other, so that repeated indices all count.

    Arguments:
      name, ref, mask: as in `load`.
      op: a key of `ATOMICS`.
      values: one value (two for "cas": the expected one and the new one) that broadcasts to the view.

    Returns:
      what each lane found before its own update; uninitialised where the mask is off.
    """
    shape = _shape_of_ref(name, ref)
    if op in ("and", "or", "xor") and not jnp.issubdtype(ref.dtype, jnp.integer):
        raise TypeError(_message(f"{name} works on integers; {indexing.label_of(ref)} holds {ref.dtype}."))
    arrays = [indexing.as_stored(ref, _broadcast(name, "value", jnp.asarray(v), shape), shape) for v in values]
    if mask is not None:
        mask = _broadcast(name, "mask", _as_mask(name, mask), shape)
    root, transforms = _parts(ref)
    flat, tree = jax.tree.flatten((tuple(arrays), transforms, mask))
    return atomic_update_p.bind(root, *flat, tree=tree, op=op, shape=shape, dtype=ref.dtype)


def _message(headline: str, hint: str | None = None) -> str:
    return explain(headline, where=locations.current_location(), hint=hint)


def _shape_of_ref(name: str, ref: Any) -> tuple[int, ...]:
    is_view = isinstance(ref, jaxlink.TransformedRef)
    if not is_view and not (isinstance(ref, jaxlink.Tracer) and isinstance(ref.aval, KernelRef)):
        raise TypeError(_message(f"{name} takes a Ref or a view of one, such as x_ref.at[i], not {ref!r}."))
    return tuple(int(n) for n in ref.shape)


def _as_mask(name: str, mask: Any) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(_message(f"The mask of {name} has dtype {mask.dtype}; masks are boolean.", "mask != 0"))
    return mask


def _broadcast(name: str, what: str, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    try:
        fits = np.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(_message(f"The {what} of {name} has shape {value.shape}; it is to cover shape {shape}."))
    return value if value.shape == shape else jnp.broadcast_to(value, shape)


def _parts(ref: Any) -> tuple[Any, tuple[Any, ...]]:
    return (ref.ref, tuple(ref.transforms)) if isinstance(ref, jaxlink.TransformedRef) else (ref, ())


# --- derivatives --------------------------------------------------------------------------------------------------
def _tangent(tangent: Any, primal: Any) -> Any:
    return jnp.zeros_like(primal) if isinstance(tangent, jaxlink.ad.Zero) else tangent


def _load_jvp(primals, tangents, *, tree, **params):
    out = masked_load_p.bind(*primals, tree=tree, **params)
    (ref_dot, *flat_dots), (_, *flat) = tangents, primals
    if isinstance(ref_dot, jaxlink.ad.Zero):
        return out, jaxlink.ad.Zero(jaxlink.typeof(out).to_tangent_aval())
    transforms, mask, other = jax.tree.unflatten(tree, flat)
    if other is not None:  # the last leaf
        flat[-1] = _tangent(flat_dots[-1], other)
    elif mask is not None:  # a lane that is off is a constant, whatever it reads
        flat, tree = jax.tree.flatten((transforms, mask, jnp.zeros_like(out)))
    return out, masked_load_p.bind(ref_dot, *flat, tree=tree, **params)


def _store_jvp(primals, tangents, **params):
    masked_store_p.bind(*primals, **params)
    (_, value, *flat), (ref_dot, value_dot, *_) = primals, tangents
    if not isinstance(ref_dot, jaxlink.ad.Zero):
        masked_store_p.bind(ref_dot, _tangent(value_dot, value), *flat, **params)
    return [], []


jaxlink.ad.primitive_jvps[masked_load_p] = _load_jvp
jaxlink.ad.primitive_jvps[masked_store_p] = _store_jvp


# --- vmap inside a kernel -------------------------------------------------------------------------------------------
def _batching(primitive: Any) -> Any:
    """One equation for each element of the batch, in order, on the same Refs."""

    def rule(args, dims, **params):
        if dims[0] is not None:
            raise NotImplementedError(f"{primitive} on a Ref that vmap has batched is not supported.")
        size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)

        def at(i):
            return [x if d is None else lax.index_in_dim(x, i, d, keepdims=False) for x, d in zip(args, dims)]

        outs = [primitive.bind(*at(i), **params) for i in range(size)]
        return ([], []) if primitive.multiple_results else (jnp.stack(outs), 0)

    return rule


for _primitive in (masked_load_p, masked_store_p, atomic_update_p):
    jaxlink.batching.primitive_batchers[_primitive] = _batching(_primitive)
