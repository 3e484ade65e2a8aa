"""Indices of Refs: what a user writes between the brackets becomes one int, Slice or array for each dimension.

Masks become index arrays, negative and out-of-range integers are looked at, and what cannot work is refused with the
way round it. Constant index arrays are rebuilt inside the kernel from `iota`, since a kernel must not capture arrays.

Source: NumPy's indexing rules; tutorial 2.1; fault kinds 5 and 7.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames
from palladion.language.dtypes import SemaphoreDType

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


def refusal[E: Exception](kind: type[E], headline: str, hint: str) -> E:
    """A mistake at the user's line."""
    return mistake(kind, headline, hint=hint)


def is_array(item: Any) -> bool:
    return isinstance(item, jax.Array) and item.ndim > 0


def is_run_time(x: Any) -> bool:
    """Whether a value is known at run time only. Where the kernel's own Python runs, that is every JAX array."""
    return isinstance(x, jaxlink.Tracer) or (isinstance(x, jax.Array) and runs_eagerly())


def runs_eagerly() -> bool:
    frame = frames.current()
    return frame is not None and frame.eager is not None


def is_bool(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_)) or (hasattr(x, "dtype") and x.dtype == np.bool_)


def run_time_mask(target: Any, idx: Any) -> Any:
    """The mask, when the index is one boolean array whose values are known only at run time."""
    idx = idx[0] if isinstance(idx, tuple) and len(idx) == 1 else idx
    return idx if is_run_time(idx) and is_bool(idx) and idx.ndim else None


def one_each(target: Any, idx: Any, verb: str) -> list[Any]:
    """The index as a list: None for a new axis, else one int, Slice or integer array for each dimension."""
    root = target.ref if isinstance(target, jaxlink.TransformedRef) else target
    if verb in ("read", "write") and hasattr(ref_type := jaxlink.typeof(root), "check_access"):
        ref_type.check_access(target, verb)
    if isinstance(target.dtype, SemaphoreDType) and verb in ("read", "write"):
        raise refusal(
            TypeError,
            f"Cannot {verb} {label_of(target)}: it is a semaphore, not data.",
            "pl.semaphore_read(sem), pl.semaphore_signal(sem, n), pl.semaphore_wait(sem, n); sems.at[i] picks one",
        )
    shape = tuple(target.shape)
    given = list(idx) if isinstance(idx, tuple) else [idx]
    given = [_from_list(i) if isinstance(i, list) else i for i in given]
    width = sum(_consumes(i) for i in given)
    if width > len(shape):
        raise refusal(
            IndexError,
            f"Too many indices: cannot {verb} {label_of(target)} of shape {shape} with {width} of them.",
            "give at most one for each dimension; squeezed block dimensions (None) are not dimensions of the Ref",
        )
    if (dots := sum(i is Ellipsis for i in given)) > 1:
        raise refusal(
            IndexError, f"An index of {label_of(target)} can have only one `...`.", "write : for one dimension"
        )
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
    return max(np.ndim(item), 1) if is_bool(item) else 1


def _one(target: Any, item: Any, dim: int, verb: str) -> list[Any]:
    size, name = target.shape[dim], label_of(target)
    if isinstance(item, slice):
        return [_from_slice(name, item, size)]
    if isinstance(item, Slice):
        return [_checked_slice(name, item, dim, size)]
    if is_bool(item):
        return _from_mask(target, item, dim, verb)
    if is_run_time(item):
        if is_ref(item):
            raise refusal(
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
    return refusal(
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
    if any(is_run_time(b) for b in (item.start, item.stop, item.step)):
        raise refusal(
            IndexError,
            f"A slice of {name} has bounds known only at run time.",
            "sizes are static: write x_ref[pl.ds(start, size)] for x_ref[start:start + size]",
        )
    try:
        start, stop, step = item.indices(size)
    except (TypeError, ValueError):
        text = ":".join("" if b is None else repr(b) for b in (item.start, item.stop, item.step))
        raise refusal(
            TypeError,
            f"A slice of {name} has bounds that are not integers: {text.removesuffix(':')}.",
            "i // n stays an integer, i / n does not",
        ) from None
    if step < 1:
        raise refusal(
            IndexError,
            f"A slice of {name} has step {step}; Refs take positive steps.",
            "read forwards, then jnp.flip(value, axis)",
        )
    length = len(range(start, stop, step))
    return Slice(start if length else 0, length, step)  # x_ref[9:9] of 8 is empty, as in NumPy


def _checked_slice(name: str, item: Slice, dim: int, size: int) -> Slice:
    start, length, step = item.start, item.size, item.stride
    if item.is_dynamic_size or is_run_time(length):
        raise refusal(
            IndexError,
            f"A slice of {name} has a size known only at run time.",
            "sizes are static: take the largest, pl.ds(start, largest), and mask the rest with jnp.where",
        )
    last = (max(int(length), 1) - 1) * step
    if not item.is_dynamic_start:
        if is_run_time(start):  # the running program may be asked to clamp it
            start = frames.required("pl.ds").eager.start_of(start, last + 1, size)
        start = int(start) + (size if start < 0 else 0)
    text = "…" if item.is_dynamic_start else f"start={item.start}"
    text = f"pl.ds({text}, size={length}{f', stride={step}' if step != 1 else ''})"
    if int(length) < 0 or step < 1:
        raise refusal(
            IndexError, f"{text} of {name} is not a slice.", "sizes are not negative, and strides are positive"
        )
    if (last >= size > 0 and length) or (not item.is_dynamic_start and not 0 <= start <= max(size - last - 1, 0)):
        most = f"a start of at most {size - last - 1}" if last < size else f"a size of at most {-(-size // step)}"
        headline = f"{text} runs past dimension {dim} of {name}, which has {count_of(size, 'element')}."
        raise refusal(IndexError, headline, f"{most} fits; a ragged tail needs a mask")
    return Slice(start, int(length), int(step))


def _from_mask(target: Any, mask: Any, dim: int, verb: str) -> list[Any]:
    name = label_of(target)
    if isinstance(mask, jaxlink.Tracer):
        raise refusal(
            IndexError,
            f"Cannot {verb} {name} under a boolean mask known only at run time: the shape would depend on its values.",
            "read all and choose: jnp.where(mask, x_ref[...], other)",
        )
    mask = np.asarray(mask)
    part = tuple(target.shape)[dim : dim + mask.ndim]
    if mask.ndim == 0:
        raise refusal(
            IndexError, f"Cannot index {name} with the single bool {bool(mask)}.", "choose with @pl.when or jnp.where"
        )
    if mask.shape != part:
        raise refusal(
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
    if runs_eagerly():
        return jnp.asarray(values)
    flat = values.ravel()
    runs = np.split(flat, np.flatnonzero(np.diff(flat) != 1) + 1)
    parts = [lax.iota(np.int32, len(run)) + np.int32(run[0]) for run in runs if len(run)]
    whole = lax.concatenate(parts, 0) if parts else lax.iota(np.int32, 0)
    return lax.reshape(whole, values.shape)
