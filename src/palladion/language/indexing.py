"""Reading and writing Refs: what a user writes between the brackets becomes one JAX indexer, or a clear refusal.

    x_ref[...]            the whole block            x_ref[-1]              negative integers count from the end
    x_ref[2:, 0]          static slices              x_ref[i, pl.ds(j, 8)]  run-time starts (static sizes)
    x_ref[None, :]        new axes (reads)           x_ref[[0, 3]]          integer arrays, constant or traced
    x_ref[mask]           constant masks; as the target of a store also masks known only at run time

`indices.py` turns the index into one entry for each dimension. Stores neither broadcast nor convert, as in Pallas.

Source: NumPy's indexing rules; tutorial 2.1; fault kinds 5 and 7.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, kind_of
from palladion.language.indices import (
    is_array,
    is_ref,
    label_of,
    one_each,
    refusal,
    run_time_mask,
    runs_eagerly,
)
from palladion.language.indices import out_of_range as out_of_range

Slice = jaxlink.Slice


def full_shape(dims: tuple[int, ...], view: Any) -> tuple[int, ...]:
    """The shape of a reshaped view, with -1 filled in."""
    total = math.prod(view.shape)
    if dims.count(-1) == 1:
        rest = math.prod(d for d in dims if d != -1)
        if rest and total % rest == 0:
            dims = tuple(total // rest if d == -1 else d for d in dims)
    if any(d < 0 for d in dims) or math.prod(dims) != total:
        raise refusal(
            ValueError,
            f"{label_of(view)} of shape {tuple(view.shape)} cannot be seen as shape {dims}.",
            f"a reshaped view has the same number of elements, {total}",
        )
    return dims


def check_bitcast(view: Any, dtype: Any) -> None:
    """A bitcast view keeps the bytes: another width scales the second-to-last dimension (Pallas:TPU's rule)."""
    old, new = _bits(view.dtype), _bits(dtype)
    shape = tuple(view.shape)
    if old != new and len(shape) < 2:
        raise refusal(
            ValueError,
            f"{label_of(view)} has {count_of(len(shape), 'dimension')}; a bitcast from {view.dtype} to {dtype} changes "
            "the width and needs two.",
            "reshape it to two dimensions first; the second-to-last one is scaled",
        )
    if old != new and shape[-2] * old % new:
        raise refusal(
            ValueError,
            f"{label_of(view)} of shape {shape} and dtype {view.dtype} cannot be seen as {dtype}: "
            f"{shape[-2]} rows of {old} bits are not a whole number of rows of {new} bits.",
            f"make the second-to-last dimension a multiple of {new // math.gcd(old, new)}",
        )


def _bits(dtype: Any) -> int:
    dtype = jnp.dtype(dtype)
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else dtype.itemsize * 8


# --- reading and writing ----------------------------------------------------------------------------------------
def read(target: Any, idx: Any) -> jax.Array:
    """`target[idx]`."""
    items = one_each(target, idx, "read")
    in_result = [i for i in items if i is None or isinstance(i, Slice) or is_array(i)]
    new_axes = [d for d, i in enumerate(in_result) if i is None]
    if new_axes and any(is_array(i) for i in items):
        raise refusal(
            NotImplementedError,
            f"A new axis (None) beside index arrays in a read of {label_of(target)} is not supported.",
            "read first, then expand: x_ref[idx][:, None]",
        )
    value = _get(target, _indexer(target, [i for i in items if i is not None]))
    return lax.expand_dims(value, new_axes) if new_axes else value


def write(target: Any, idx: Any, value: Any) -> None:
    """`target[idx] = value`: no broadcasting, no conversion of dtype, except for masks and Python scalars."""
    mask = run_time_mask(target, idx)
    if mask is not None and not _fits_selection(target, mask, value):
        _masked_store(target, mask, value)
        return
    _set(target, *_place(target, idx, value))


def swap(target: Any, idx: Any, value: Any) -> jax.Array:
    """Store as `target[idx] = value` does, and give what was there."""
    return _set(target, *_place(target, idx, value))


def accumulate(target: Any, idx: Any, value: Any) -> None:
    """Add `value` to `target[idx]`; an index that comes twice counts twice, unlike in `target[idx] += value`."""
    indexer, value = _place(target, idx, value)
    ref, transforms = _parts(target, indexer)
    flat, tree = jax.tree.flatten(transforms)
    jaxlink.addupdate_p.bind(ref, value, *flat, tree=tree)


def _place(target: Any, idx: Any, value: Any) -> tuple[Any, jax.Array]:
    """Where a value goes, and the value as it is stored there."""
    items = one_each(target, idx, "write")
    if any(i is None for i in items):
        raise refusal(
            IndexError,
            f"A write to {label_of(target)} cannot use new axes (None).",
            "leave None out, and give the value the shape of what is indexed: value[0], value.reshape(…)",
        )
    indexer = _indexer(target, items)
    shape = tuple(target.shape) if indexer is None else tuple(indexer.get_indexer_shape())
    return indexer, as_stored(target, value, shape)


def as_stored(target: Any, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """`value` ready to be stored in `shape` elements of `target`, or a refusal that says how to convert it."""
    if is_ref(value):
        raise refusal(
            ValueError,
            f"Cannot store the Ref {label_of(value)} in {label_of(target)}: a Ref is not a value.",
            "read it first: o_ref[...] = x_ref[...]",
        )
    try:
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise refusal(
            TypeError,
            f"Cannot write {kind_of(value)} to {label_of(target)}: it is not an array.",
            "Refs take arrays and numbers",
        ) from error
    if tuple(value.shape) != tuple(shape):
        whole = tuple(shape) == tuple(target.shape)
        part = f"which has shape {shape}" if whole else f"where the index selects shape {shape}"
        raise refusal(
            ValueError,
            f"Cannot write a value of shape {tuple(value.shape)} to {label_of(target)}, {part}.",
            "stores do not broadcast: write jnp.full(shape, number) or jnp.broadcast_to(value, shape), or index the "
            "part that is meant",
        )
    if value.dtype != target.dtype:
        same_kind = any(
            jnp.issubdtype(value.dtype, k) and jnp.issubdtype(target.dtype, k) for k in (jnp.floating, jnp.integer)
        )
        if not (jaxlink.is_weak(value) and same_kind):
            raise refusal(
                ValueError,
                f"Cannot write a value of dtype {value.dtype} to {label_of(target)}, which holds {target.dtype}.",
                "stores do not convert: write value.astype(o_ref.dtype)",
            )
        value = lax.convert_element_type(value, target.dtype)
    return value


def _fits_selection(target: Any, mask: Any, value: Any) -> bool:
    """Whether a value has one row for each that the mask selects; unknown, so False, for a traced mask."""
    if isinstance(mask, jaxlink.Tracer):
        return False
    return jnp.shape(value) == (np.count_nonzero(mask), *target.shape[mask.ndim :])


def _masked_store(target: Any, mask: Any, value: Any) -> None:
    """`ref[mask] = value` with a mask known at run time: lanes that are off keep what they hold."""
    shape = tuple(target.shape)
    if tuple(mask.shape) != shape[: mask.ndim]:
        raise refusal(
            IndexError,
            f"A mask of shape {tuple(mask.shape)} does not fit {label_of(target)} of shape {shape}.",
            "a mask has the shape of the Ref, or of its leading dimensions",
        )
    if jnp.ndim(value) and tuple(jnp.shape(value)) != shape:
        raise refusal(
            ValueError,
            f"A store to {label_of(target)} under a run-time mask takes a scalar or a value of shape {shape}, "
            f"not {tuple(jnp.shape(value))}: how many elements the mask selects is not known.",
            "o_ref[...] = jnp.where(mask, value, o_ref[...])",
        )
    mask = lax.broadcast_in_dim(jnp.asarray(mask), shape, tuple(range(mask.ndim)))
    new = as_stored(target, value, jnp.shape(value))
    _set(target, None, jnp.where(mask, new, _get(target, None)))


def make_indexer(target: Any, idx: Any, verb: str) -> Any:
    """The JAX indexer of a view, or None for the whole Ref."""
    items = one_each(target, idx, verb)
    if any(i is None for i in items):
        raise refusal(IndexError, f"A view of {label_of(target)} cannot add axes with None.", "use .reshape(...)")
    return _indexer(target, items)


# --- the equations ---------------------------------------------------------------------------------------------
def _indexer(target: Any, items: list[Any]) -> Any:
    shape = tuple(target.shape)
    whole = all(
        isinstance(i, Slice) and not i.is_dynamic_start and (i.start, i.size, i.stride) == (0, n, 1)
        for i, n in zip(items, shape)
    )
    if whole:
        return None
    if runs_eagerly() and not any(is_array(i) for i in items):  # run-time integers are looked at when they are used
        return jaxlink.NDIndexer(tuple(items), shape, ())
    return jaxlink.NDIndexer.from_indices_shape(tuple(items), shape)


def _parts(target: Any, indexer: Any) -> tuple[Any, tuple]:
    ref, transforms = (target.ref, target.transforms) if isinstance(target, jaxlink.TransformedRef) else (target, ())
    return ref, transforms if indexer is None else (*transforms, indexer)


def _get(target: Any, indexer: Any) -> jax.Array:
    ref, transforms = _parts(target, indexer)
    flat, tree = jax.tree.flatten(transforms)
    return jaxlink.get_p.bind(ref, *flat, tree=tree)


def _set(target: Any, indexer: Any, value: Any) -> jax.Array:
    ref, transforms = _parts(target, indexer)
    flat, tree = jax.tree.flatten(transforms)
    return jaxlink.swap_p.bind(ref, value, *flat, tree=tree)
