"""Parts of Refs: a chain of views becomes memrefs as long as Mosaic can slice, and operations on values after that.

Slices of one stride, reshapes and bitcasts are memrefs (`tpu.memref_slice` …). A transposed view, or one with a
stride, is what a value is made of after loading, and undone before storing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mosaic.python import tpu

from palladion import jaxlink
from palladion.compiler.tpu.build import as_i32, constant
from palladion.compiler.tpu.emit import Ref
from palladion.compiler.tpu.kinds import Refusal, bits_of, memory_element, memref_type


@dataclasses.dataclass(frozen=True)
class Window:
    """A rectangular part of a memref.

    Attributes:
      starts: for each dimension an int, or an integer value.
      sizes, strides: in elements.
      dropped: dimensions that an integer indexes, which the result has not.
    """

    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for d, n in enumerate(self.sizes) if d not in self.dropped)

    @property
    def is_strided(self) -> bool:
        return any(s != 1 and n > 1 for s, n in zip(self.strides, self.sizes))


def window_of(indexer: Any) -> Window:
    """What an indexer selects.

    Raises: Refusal: index arrays.
    """
    starts, sizes, strides, dropped = [], [], [], []
    if indexer.int_indexer_shape != ():
        raise Refusal(
            "index arrays cannot address a Ref on TPU.",
            "loop over the rows with lax.fori_loop and x_ref[pl.ds(i, 1)], or copy them by DMA",
        )
    for d, (index, extent) in enumerate(zip(indexer.indices, indexer.shape)):
        if isinstance(index, jaxlink.Slice):
            start, size, stride = index.start, index.size, index.stride
        else:
            start, size, stride = index, 1, 1
            dropped.append(d)
        if isinstance(start, (int, np.integer)):
            start = int(start) + extent * (int(start) < 0)
        elif isinstance(start, (np.ndarray, np.generic)):
            start = int(start)
        starts.append(start)
        sizes.append(size)
        strides.append(stride)
    return Window(tuple(starts), tuple(sizes), tuple(strides), tuple(dropped))


def whole(shape: Sequence[int]) -> Window:
    n = len(shape)
    return Window((0,) * n, tuple(shape), (1,) * n, ())


def shape_after(shape: tuple[int, ...], dtype: Any, transform: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of one view of a Ref of this shape and dtype."""
    match transform:
        case jaxlink.NDIndexer():
            return tuple(transform.get_indexer_shape()), dtype
        case jaxlink.ReshapeTransform():
            return tuple(transform.shape), dtype
        case jaxlink.TransposeTransform():
            return tuple(shape[d] for d in transform.permutation), dtype
        case jaxlink.BitcastTransform():
            new = jnp.dtype(transform.dtype)
            rows = shape[-2] * bits_of(dtype) // bits_of(new)
            return (*shape[:-2], rows, shape[-1]), new
    raise Refusal(f"the view {transform} is not known to the TPU compiler.")


def slice_memref(memref: ir.Value, window: Window) -> ir.Value:
    """A window of stride 1 as a memref."""
    kind: Any = memref.type
    element, space = kind.element_type, kind.memory_space
    if tuple(kind.shape) != window.sizes:
        target = ir.MemRefType.get(window.sizes, element, memory_space=space)
        memref = tpu.memref_slice(target, memref, [as_i32(s) for s in window.starts], [])
    if window.dropped:
        kind = memref.type
        target = ir.MemRefType.get(window.shape, element, memory_space=space)
        memref = tpu.memref_squeeze(target, memref)
    return memref


def compose(outer: Window, inner: Window) -> Window:
    """The window of a window: `ref.at[outer].at[inner]`."""
    starts, sizes, strides, dropped = [], [], [], list(outer.dropped)
    rest = iter(range(len(inner.sizes)))
    for d, (start, stride) in enumerate(zip(outer.starts, outer.strides)):
        if d in outer.dropped:
            k = None
        else:
            k = next(rest)
        starts.append(start if k is None else plus(start, times(inner.starts[k], stride)))
        sizes.append(1 if k is None else inner.sizes[k])
        strides.append(1 if k is None else stride * inner.strides[k])
        if k in inner.dropped:
            dropped.append(d)
    return Window(tuple(starts), tuple(sizes), tuple(strides), tuple(sorted(dropped)))


def memref_of(ref: Ref, transforms: Sequence[Any], what: str) -> ir.Value:
    """A chain of views as a memref, for copies and semaphores.

    Raises: Refusal: a view that is no memref.
    """
    place = follow(ref, transforms)
    if place.rest or place.window.is_strided:
        view = _words(place.rest[0]) if place.rest else "a view with a stride"
        raise Refusal(
            f"{what} of {ref.label} is {view}, which a TPU's copies cannot address.",
            "copy a contiguous part, and reorder the value: x_ref[...].T",
        )
    return slice_memref(place.memory, place.window)


def _words(transform: Any) -> str:
    if isinstance(transform, jaxlink.TransposeTransform):
        return "a transposed view"
    return "a view with a stride" if isinstance(transform, jaxlink.NDIndexer) else f"the view {transform}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a chain of views leads.

    Attributes:
      memory: a memref; window: the part of it.
      rest: the views that are left, which Mosaic has no memrefs for.
      dtype: of the elements.
    """

    memory: ir.Value
    window: Window
    rest: tuple[Any, ...]
    dtype: Any


def follow(ref: Ref, transforms: Sequence[Any]) -> Place:
    """Views taken from the front of a chain, as long as they are windows of memrefs."""
    memory, rest, dtype = ref.value, list(transforms), ref.aval.dtype
    window = dataclasses.replace(whole(tuple(ir.MemRefType(memory.type).shape)), dropped=ref.squeezed)
    while rest:
        transform, shape = rest[0], window.shape
        if isinstance(transform, jaxlink.NDIndexer):
            window = compose(window, window_of(transform))
        elif (
            isinstance(transform, jaxlink.TransposeTransform) or window.is_strided or not _keeps_tiles(shape, transform)
        ):
            break
        else:
            memory = slice_memref(memory, window)
            shape, dtype = shape_after(shape, dtype, transform)
            target = memref_type(shape, memory_element(dtype), ref.space)
            take = tpu.memref_reshape if isinstance(transform, jaxlink.ReshapeTransform) else tpu.memref_bitcast
            memory = memory if target == memory.type else take(target, memory)
            window = whole(shape)
        rest.pop(0)
    return Place(memory, window, tuple(rest), dtype)


def _keeps_tiles(shape: tuple[int, ...], transform: Any) -> bool:
    """Whether a reshaped view leaves the tiles of the last two dimensions where they are; others become values."""
    if not isinstance(transform, jaxlink.ReshapeTransform):
        return True
    new = tuple(transform.shape)
    if len(shape) < 2 or len(new) < 2 or shape[-1] != new[-1]:
        return False
    return shape[-2] == new[-2] or (shape[-2] % 8 == 0 and new[-2] % 8 == 0)


def plus(a: Any, b: Any) -> Any:
    """The sum of two starts, ints or integer values."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(b, int):
        a, b = b, a
    return b if isinstance(a, int) and a == 0 else arith.addi(as_i32(a), as_i32(b))


def times(a: Any, b: int) -> Any:
    """A start in elements of a stride."""
    if isinstance(a, int):
        return a * b
    return a if b == 1 else arith.muli(as_i32(a), constant(b))
