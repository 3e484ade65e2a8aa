"""NumPy indexing of Refs: what a user writes between the brackets becomes one JAX indexer, or a clear refusal.

    x_ref[...]            the whole block            x_ref[-1]              negative integers count from the end
    x_ref[2:, 0]          static slices              x_ref[i, pl.ds(j, 8)]  run-time starts (static sizes)
    x_ref[None, :]        new axes (reads)           x_ref[[0, 3]]          integer arrays, constant or traced
    x_ref[mask]           constant masks; as the target of a store also masks known only at run time

Constant index arrays are rebuilt inside the kernel from `iota`, since a kernel must not capture arrays. What cannot
work (a read whose shape depends on run-time values, a slice with traced bounds) is refused with the way round it.

Source: NumPy's indexing rules; tutorial 2.1; fault kinds 5 and 7.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames

Slice = jaxlink.Slice


def is_ref(x: Any) -> bool:
    """Whether a value is a Ref or a view of one, not an array."""
    if isinstance(x, (jax.Array, jaxlink.Tracer)):
        return isinstance(jaxlink.typeof(x), jaxlink.AbstractRef)
    return isinstance(x, (jaxlink.TransformedRef, jax.Ref))


def label_of(target: Any) -> str:
    """How messages call a Ref or view: its parameter name and role."""
    if isinstance(target, jaxlink.TransformedRef):
        return f"a view of {label_of(target.ref)}" if target.transforms else label_of(target.ref)
    return getattr(jaxlink.typeof(target), "label", "the Ref")


def _fail[E: Exception](kind: type[E], headline: str, hint: str) -> E:
    return mistake(kind, headline, hint=hint)


def full_shape(dims: tuple[int, ...], view: Any) -> tuple[int, ...]:
    """The shape of a reshaped view, with -1 filled in."""
    total = math.prod(view.shape)
    if dims.count(-1) == 1:
        rest = math.prod(d for d in dims if d != -1)
        if rest and total % rest == 0:
            dims = tuple(total // rest if d == -1 else d for d in dims)
    if any(d < 0 for d in dims) or math.prod(dims) != total:
        raise _fail(
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
        raise _fail(
            ValueError,
            f"{label_of(view)} has {count_of(len(shape), 'dimension')}; a bitcast from {view.dtype} to {dtype} changes "
            "the width and needs two.",
            "reshape it to two dimensions first; the second-to-last one is scaled",
        )
    if old != new and shape[-2] * old % new:
        raise _fail(
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
    items = _items(target, idx, "read")
    in_result = [i for i in items if i is None or isinstance(i, Slice) or _is_array(i)]
    new_axes = [d for d, i in enumerate(in_result) if i is None]
    if new_axes and any(_is_array(i) for i in items):
        raise _fail(
            NotImplementedError,
            f"A new axis (None) beside index arrays in a read of {label_of(target)} is not supported.",
            "read first, then expand: x_ref[idx][:, None]",
        )
    value = _get(target, _indexer(target, [i for i in items if i is not None]))
    return lax.expand_dims(value, new_axes) if new_axes else value


def write(target: Any, idx: Any, value: Any) -> None:
    """`target[idx] = value`: no broadcasting, no conversion of dtype, except for masks and Python scalars."""
    mask = _run_time_mask(target, idx)
    if mask is not None and not _fits_selection(target, mask, value):
        _masked_store(target, mask, value)
        return
    items = _items(target, idx, "write")
    if any(i is None for i in items):
        raise _fail(
            IndexError,
            f"A write to {label_of(target)} cannot use new axes (None).",
            "leave None out, and give the value the shape of what is indexed: value[0], value.reshape(…)",
        )
    indexer = _indexer(target, items)
    shape = tuple(target.shape) if indexer is None else tuple(indexer.get_indexer_shape())
    _set(target, indexer, as_stored(target, value, shape))


def as_stored(target: Any, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """`value` ready to be stored in `shape` elements of `target`, or a refusal that says how to convert it."""
    if is_ref(value):
        raise _fail(
            ValueError,
            f"Cannot store the Ref {label_of(value)} in {label_of(target)}: a Ref is not a value.",
            "read it first: o_ref[...] = x_ref[...]",
        )
    try:
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise _fail(
            TypeError,
            f"Cannot write {kind_of(value)} to {label_of(target)}: it is not an array.",
            "Refs take arrays and numbers",
        ) from error
    if tuple(value.shape) != tuple(shape):
        whole = tuple(shape) == tuple(target.shape)
        part = f"which has shape {shape}" if whole else f"where the index selects shape {shape}"
        raise _fail(
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
            raise _fail(
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
        raise _fail(
            IndexError,
            f"A mask of shape {tuple(mask.shape)} does not fit {label_of(target)} of shape {shape}.",
            "a mask has the shape of the Ref, or of its leading dimensions",
        )
    if jnp.ndim(value) and tuple(jnp.shape(value)) != shape:
        raise _fail(
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
    items = _items(target, idx, verb)
    if any(i is None for i in items):
        raise _fail(IndexError, f"A view of {label_of(target)} cannot add axes with None.", "use .reshape(...)")
    return _indexer(target, items)


# --- from what the user wrote to one item a dimension ---------------------------------------------------------------
def _is_array(item: Any) -> bool:
    return isinstance(item, jax.Array) and item.ndim > 0


def _is_run_time(x: Any) -> bool:
    """Whether a value is known at run time only. Where the kernel's own Python runs, that is every JAX array."""
    return isinstance(x, jaxlink.Tracer) or (isinstance(x, jax.Array) and _runs_eagerly())


def _runs_eagerly() -> bool:
    frame = frames.current()
    return frame is not None and frame.eager is not None


def _is_bool(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_)) or (hasattr(x, "dtype") and x.dtype == np.bool_)


def _run_time_mask(target: Any, idx: Any) -> Any:
    """The mask, when the index is one boolean array whose values are known only at run time."""
    idx = idx[0] if isinstance(idx, tuple) and len(idx) == 1 else idx
    return idx if _is_run_time(idx) and _is_bool(idx) and idx.ndim else None


def _items(target: Any, idx: Any, verb: str) -> list[Any]:
    """The index as a list: None for a new axis, else one int, Slice or integer array for each dimension."""
    shape = tuple(target.shape)
    given = list(idx) if isinstance(idx, tuple) else [idx]
    given = [_from_list(i) if isinstance(i, list) else i for i in given]
    width = sum(_consumes(i) for i in given)
    if width > len(shape):
        raise _fail(
            IndexError,
            f"Too many indices: cannot {verb} {label_of(target)} of shape {shape} with {width} of them.",
            "give at most one for each dimension; squeezed block dimensions (None) are not dimensions of the Ref",
        )
    if (dots := sum(i is Ellipsis for i in given)) > 1:
        raise _fail(IndexError, f"An index of {label_of(target)} can have only one `...`.", "write : for one dimension")
    if not dots:
        given.append(Ellipsis)
    items: list[Any] = []
    dim = 0
    for item in given:
        if item is Ellipsis:
            for _ in range(len(shape) - width):
                items.append(Slice(0, shape[dim], 1))
                dim += 1
        elif item is None:
            items.append(None)
        else:
            items += _one(target, item, dim, verb)
            dim += _consumes(item)
    return items


def _from_list(item: list[Any]) -> Any:
    """A list of indices as an array: constant, or traced if one of its entries is."""
    traced = any(isinstance(x, jaxlink.Tracer) for x in jax.tree.leaves(item))
    return jnp.asarray(item) if traced else np.asarray(item)


def _consumes(item: Any) -> int:
    """How many dimensions of the Ref an item indexes."""
    if item is None or item is Ellipsis:
        return 0
    return max(np.ndim(item), 1) if _is_bool(item) else 1


def _one(target: Any, item: Any, dim: int, verb: str) -> list[Any]:
    size, name = target.shape[dim], label_of(target)
    if isinstance(item, slice):
        return [_from_slice(name, item, size)]
    if isinstance(item, Slice):
        return [_checked_slice(name, item, dim, size)]
    if _is_bool(item):
        return _from_mask(target, item, dim, verb)
    if _is_run_time(item):
        if is_ref(item):
            raise _fail(
                TypeError,
                f"The index of {name} is a Ref, {label_of(item)}.",
                "read it first: x_ref[i_ref[0]] for a number, x_ref[i_ref[...]] for an array of them",
            )
        if not jnp.issubdtype(item.dtype, jnp.integer):
            raise _bad_index(name, item)
        return [item]
    if isinstance(item, (np.ndarray, jax.Array)) and np.ndim(item):
        return [_constant_array(name, np.asarray(item), dim, size)]
    try:
        index = operator.index(item if not hasattr(item, "item") else item.item())
    except TypeError:
        raise _bad_index(name, item) from None
    if not -size <= index < size:
        raise out_of_range(name, index, dim, size)
    return [index % size]


def _bad_index(name: str, item: Any) -> Exception:
    return _fail(
        TypeError,
        f"Cannot index {name} with {kind_of(item)}.",
        "indices are integers, slices, pl.ds(start, size), masks and integer arrays; i // n stays an integer, and "
        ".astype(jnp.int32) makes one",
    )


def out_of_range(name: str, index: int, dim: int, size: int, where: str | None = None) -> IndexError:
    """The mistake of a static index outside its Ref."""
    return mistake(
        IndexError,
        f"Index {index} is out of range for dimension {dim} of {name}, which has {count_of(size, 'element')}.",
        where=where,
        hint=f"valid indices are {-size}..{size - 1}, within the block" if size else "the dimension is empty",
    )


def _from_slice(name: str, item: slice, size: int) -> Slice:
    if any(_is_run_time(b) for b in (item.start, item.stop, item.step)):
        raise _fail(
            IndexError,
            f"A slice of {name} has bounds known only at run time.",
            "sizes are static: write x_ref[pl.ds(start, size)] for x_ref[start:start + size]",
        )
    try:
        start, stop, step = item.indices(size)
    except (TypeError, ValueError):
        text = ":".join("" if b is None else repr(b) for b in (item.start, item.stop, item.step))
        raise _fail(
            TypeError,
            f"A slice of {name} has bounds that are not integers: {text.removesuffix(':')}.",
            "i // n stays an integer, i / n does not",
        ) from None
    if step < 1:
        raise _fail(
            IndexError,
            f"A slice of {name} has step {step}; Refs take positive steps.",
            "read forwards, then jnp.flip(value, axis)",
        )
    length = len(range(start, stop, step))
    return Slice(start if length else 0, length, step)  # x_ref[9:9] of 8 is empty, as in NumPy


def _checked_slice(name: str, item: Slice, dim: int, size: int) -> Slice:
    start, length, step = item.start, item.size, item.stride
    if item.is_dynamic_size or _is_run_time(length):
        raise _fail(
            IndexError,
            f"A slice of {name} has a size known only at run time.",
            "sizes are static: take the largest, pl.ds(start, largest), and mask the rest with jnp.where",
        )
    last = (max(int(length), 1) - 1) * step
    if not item.is_dynamic_start:
        start = int(start) + (size if start < 0 else 0)
    text = "…" if item.is_dynamic_start else f"start={item.start}"
    text = f"pl.ds({text}, size={length}{f', stride={step}' if step != 1 else ''})"
    if int(length) < 0 or step < 1:
        raise _fail(IndexError, f"{text} of {name} is not a slice.", "sizes are not negative, and strides are positive")
    if (last >= size > 0 and length) or (not item.is_dynamic_start and not 0 <= start <= max(size - last - 1, 0)):
        fits = (
            f"a start of at most {size - last - 1} fits"
            if last < size
            else f"a size of at most {-(-size // step)} fits"
        )
        raise _fail(
            IndexError, f"{text} runs past dimension {dim} of {name}, which has {count_of(size, 'element')}.", fits
        )
    return Slice(start, int(length), int(step))


def _from_mask(target: Any, mask: Any, dim: int, verb: str) -> list[Any]:
    name = label_of(target)
    if isinstance(mask, jaxlink.Tracer):
        raise _fail(
            IndexError,
            f"Cannot {verb} {name} under a boolean mask known only at run time: the shape would depend on its values.",
            "read all and choose: jnp.where(mask, x_ref[...], other)",
        )
    mask = np.asarray(mask)
    part = tuple(target.shape)[dim : dim + mask.ndim]
    if mask.ndim == 0:
        raise _fail(
            IndexError, f"Cannot index {name} with the single bool {bool(mask)}.", "choose with @pl.when or jnp.where"
        )
    if mask.shape != part:
        raise _fail(
            IndexError,
            f"A mask of shape {mask.shape} does not fit dimensions of shape {part} of {name}.",
            "a mask has the shape of what it indexes",
        )
    return [_constant_array(name, i, dim + d, part[d]) for d, i in enumerate(np.nonzero(mask))]


def _constant_array(name: str, values: np.ndarray, dim: int, size: int) -> jax.Array:
    """An integer array built inside the kernel, from runs of consecutive numbers."""
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise _bad_index(name, values)
    if values.size and not (-size <= values.min() and values.max() < size):
        raise out_of_range(name, int(values[(values < -size) | (values >= size)].flat[0]), dim, size)
    values = np.where(values < 0, values + size, values).astype(np.int32)
    if _runs_eagerly():
        return jnp.asarray(values)
    flat = values.ravel()
    runs = np.split(flat, np.flatnonzero(np.diff(flat) != 1) + 1)
    parts = [lax.iota(np.int32, len(run)) + np.int32(run[0]) for run in runs if len(run)]
    whole = lax.concatenate(parts, 0) if parts else lax.iota(np.int32, 0)
    return lax.reshape(whole, values.shape)


# --- the equations ---------------------------------------------------------------------------------------------
def _indexer(target: Any, items: list[Any]) -> Any:
    shape = tuple(target.shape)
    whole = all(
        isinstance(i, Slice) and not i.is_dynamic_start and (i.start, i.size, i.stride) == (0, n, 1)
        for i, n in zip(items, shape)
    )
    return None if whole else jaxlink.NDIndexer.from_indices_shape(tuple(items), shape)


def _parts(target: Any, indexer: Any) -> tuple[Any, tuple]:
    ref, transforms = (target.ref, target.transforms) if isinstance(target, jaxlink.TransformedRef) else (target, ())
    return ref, transforms if indexer is None else (*transforms, indexer)


def _get(target: Any, indexer: Any) -> jax.Array:
    ref, transforms = _parts(target, indexer)
    flat, tree = jax.tree.flatten(transforms)
    return jaxlink.get_p.bind(ref, *flat, tree=tree)


def _set(target: Any, indexer: Any, value: Any) -> None:
    ref, transforms = _parts(target, indexer)
    flat, tree = jax.tree.flatten(transforms)
    jaxlink.swap_p.bind(ref, value, *flat, tree=tree)
