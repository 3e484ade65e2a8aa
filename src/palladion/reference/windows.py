"""Reading and writing the window of an array that one program sees.

An interior window is one dynamic slice. A window that hangs over the edge (a ragged last block, an `Element` in its
padding, the unused tail of a `BoundedSlice`) reads uninitialised values there, and what is written there is
dropped (tutorial 3.2). Arrays are never padded as a whole: the slice is taken where it fits and shifted into place
block by block, so that a call needs no second copy of its operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.language.blocks import BoundedSlice, Element, Indirect, Squeezed, squeezed
from palladion.language.grid import BlockMapping
from palladion.reference.evaluate import pad, uninitialized

Starts = Sequence[tuple[Any, Any]]  # element (start, size or None) for each dimension, clamped


@dataclasses.dataclass(frozen=True)
class Window:
    """A block mapping with what is known about where its windows fall.

    Attributes:
      low, high: for each dimension, whether a window may start before, or end after, the array.
    """

    mapping: BlockMapping
    low: tuple[bool, ...]
    high: tuple[bool, ...]

    @classmethod
    def make(cls, mapping: BlockMapping, table: Sequence[tuple[np.ndarray, Any]] | None = None) -> Window:
        """Arguments: a mapping, and the clamped starts of all programs where they are known beforehand."""
        low, high = [], []
        for d, (b, n) in enumerate(zip(mapping.block_shape, mapping.array.shape)):
            size = mapping.sizes[d]
            if table is not None and len(table[d][0]):
                low.append(bool(table[d][0].min() < 0))
                high.append(bool(table[d][0].max() + size > n))
            elif isinstance(b, Element):
                low.append(b.padding[0] > 0)
                high.append(True)
            elif isinstance(b, (Squeezed, Indirect)):
                low.append(False)
                high.append(n == 0)
            else:
                low.append(False)
                high.append(isinstance(b, BoundedSlice) or _may_be_ragged(n, size))
        return cls(mapping, tuple(low), tuple(high))

    @property
    def is_array(self) -> bool:
        """Whether every window is the whole array."""
        return self.mapping.covers_array

    def load(self, array: jax.Array, starts: Starts) -> jax.Array:
        """The kernel's view of the window: squeezed dimensions gone, uninitialised outside the array."""
        if self.mapping.indirect is not None:
            row, axis = self._row()
            return jax.vmap(lambda i: row.load(array, self._row_starts(starts, i)), out_axes=axis)(self._rows(starts))
        if not self.is_array:
            fits, places = self._fit(starts)
            array = _slice(array, places, fits)
            for d, (start, size) in enumerate(starts):
                if self.low[d] or self.high[d]:
                    array = self._shift_in(array, d, start - places[d], fits[d])
                if size is not None:
                    array = jnp.where(_iota(array.shape, d) < size, array, uninitialized((), array.dtype))
        return lax.squeeze(array, self.mapping.squeezed)

    def store(self, array: jax.Array, starts: Starts, block: jax.Array) -> jax.Array:
        """`array` with the window replaced by what the kernel left in it; the outside part is dropped."""
        if self.mapping.indirect is not None:
            row, axis = self._row()
            rows = self._rows(starts)

            def one(k, array):
                part = lax.dynamic_index_in_dim(block, k, axis, keepdims=False)
                return row.store(array, self._row_starts(starts, rows[k]), part)

            return lax.fori_loop(0, block.shape[axis], one, array)
        block = lax.expand_dims(block, self.mapping.squeezed)
        if self.is_array:
            return block
        fits, places = self._fit(starts)
        if any(isinstance(f, int) and f == 0 for f in fits):
            return array
        if any(self.low) or any(self.high) or any(s is not None for _, s in starts):
            old = _slice(array, places, fits)
            keep = None
            for d, (start, size) in enumerate(starts):
                if self.low[d] or self.high[d] or size is not None:
                    block, inside = self._shift_out(block, d, start - places[d], fits[d], size)
                    keep = inside if keep is None else keep & inside
            block = block if keep is None else jnp.where(keep, block, old)
        if block.shape == array.shape:
            return block
        return lax.dynamic_update_slice(array, block, _int32(places), allow_negative_indices=False)

    def _row(self) -> tuple[Window, int]:
        """One row of an Indirect block: its window, and the axis of the kernel's Ref that counts rows."""
        d = self.mapping.indirect
        assert d is not None
        block = tuple(squeezed if k == d else b for k, b in enumerate(self.mapping.block_shape))
        axis = sum(not isinstance(b, Squeezed) for b in self.mapping.block_shape[:d])
        return dataclasses.replace(self, mapping=dataclasses.replace(self.mapping, block_shape=block)), axis

    def _rows(self, starts: Starts) -> Any:
        return starts[self.mapping.indirect or 0][0]

    def _row_starts(self, starts: Starts, index: Any) -> Starts:
        return [(index, None) if d == self.mapping.indirect else s for d, s in enumerate(starts)]

    def _fit(self, starts: Starts) -> tuple[list[int], list[Any]]:
        """The largest slice that always fits the array: its sizes, and its starts moved inside."""
        fits = [jaxlink.min_dim(b, n) for b, n in zip(self.mapping.sizes, self.mapping.array.shape)]
        places = [
            _clip(start, n - fit) if low or high else start
            for (start, _), n, fit, low, high in zip(starts, self.mapping.array.shape, fits, self.low, self.high)
        ]
        return fits, places

    def _shift_in(self, x: jax.Array, d: int, shift: Any, fit: int) -> jax.Array:
        """From the slice that fits to the block: `shift` elements further on, uninitialised around."""
        size = self.mapping.sizes[d]
        before, after = size * self.low[d], 2 * size - fit if self.high[d] else 0
        padded = _padded(x, d, before, after)
        # A window further below the array than its own size is all padding; a negative start would count from the end.
        first = shift + before
        first = max(int(first), 0) if isinstance(first, (int, np.integer)) else jnp.maximum(first, 0)
        return lax.dynamic_slice_in_dim(padded, first, size, d)

    def _shift_out(self, block: jax.Array, d: int, shift: Any, fit: int, size: Any) -> tuple[jax.Array, jax.Array]:
        """From the block to the slice that fits, and which of its elements the block covers."""
        extent = self.mapping.sizes[d]
        before, after = extent * self.high[d], extent * self.low[d]
        padded = _padded(block, d, before, after)
        moved = lax.dynamic_slice_in_dim(padded, before - shift, fit, d)
        position = _iota(moved.shape, d) - shift
        inside = (position >= 0) & (position < (extent if size is None else size))
        shape = [1] * block.ndim
        shape[d] = fit
        return moved, inside if inside.shape == moved.shape else inside.reshape(shape)


def _may_be_ragged(n: Any, size: int) -> bool:
    """Whether blocks of `size` may fail to tile `n` elements; always, for a symbolic size."""
    return jaxlink.is_symbolic_dim(n) or n < size or (size > 0 and n % size != 0)


def _iota(shape: Sequence[int], d: int) -> jax.Array:
    return lax.broadcasted_iota(np.int32, tuple(n if i == d else 1 for i, n in enumerate(shape)), d)


def _padded(x: jax.Array, d: int, before: int, after: int) -> jax.Array:
    """`x` with uninitialised elements before and after it in dimension `d`."""
    return pad(x, [(before, after) if i == d else (0, 0) for i in range(x.ndim)])


def _clip(start: Any, high: int) -> Any:
    if isinstance(start, (int, np.integer)) and isinstance(high, int):
        return min(max(int(start), 0), high)
    return jnp.clip(start, 0, high)


def _slice(x: jax.Array, starts: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    if tuple(sizes) == x.shape:
        return x
    if all(isinstance(s, (int, np.integer)) for s in starts):
        return lax.slice(x, starts, [s + n for s, n in zip(starts, sizes)])
    return lax.dynamic_slice(x, _int32(starts), sizes, allow_negative_indices=False)


def _int32(starts: Sequence[Any]) -> list[Any]:
    """Starts of one type, whatever x64 makes of Python integers."""
    return [np.int32(s) if isinstance(s, int) else s for s in starts]
