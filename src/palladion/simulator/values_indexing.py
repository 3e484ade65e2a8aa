"""NumPy rules: slices at dynamic places, and gathers.

Places out of range are clamped, or give the fill value, as the primitive's mode says. `Addressing` holds what a
gather and a scatter share: the dimensions that index arrays pick from, and the order of the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion.simulator.values_table import (
    ARRAYS,
    dtype_out,
    is_int,
    is_signed,
    shape_in,
    shape_out,
    words,
)


# --- dynamic slices -------------------------------------------------------------------------------------------
def _window(extents: Sequence[int], sizes: Sequence[int]) -> Callable[[Sequence[Any]], tuple]:
    """A function from starts to the slices of a window of `sizes`, moved to lie within `extents`."""
    limits = [(n, e - n) for n, e in zip(sizes, extents)]
    if all(room == 0 for _, room in limits):
        return lambda starts: ()

    def slices(starts):
        picks = []
        for start, (size, room) in zip(starts, limits):
            start = int(start)
            start = 0 if start < 0 or room == 0 else min(start, room)
            picks.append(slice(start, start + size))
        return tuple(picks)

    return slices


@ARRAYS.rule(lax.dynamic_slice_p)
def _dynamic_slice(eqn):
    slices = _window(shape_in(eqn), [int(n) for n in eqn.params["slice_sizes"]])
    return lambda x, *starts: x[slices(starts)]


@ARRAYS.rule(lax.dynamic_update_slice_p)
def _dynamic_update_slice(eqn):
    slices = _window(shape_in(eqn), shape_in(eqn, 1))

    def update(x, new, *starts):
        out = np.array(x)
        out[slices(starts)] = new
        return out

    return update


# --- what gather and scatter share ----------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Addressing:
    """Windows of an operand at places that an array of indices gives.

    Attributes:
      shape: the operand's.
      sizes: of a window, a number for each dimension of the operand.
      mapped: the operand's dimensions that components of an index vector stand for.
      batching: (dimension of the operand, dimension of the indices without the vector) that go together.
      batch: the shape of the indices without the vector.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    mapped: tuple[int, ...]
    batching: tuple[tuple[int, int], ...]
    batch: tuple[int, ...]

    @property
    def picked(self) -> tuple[int, ...]:
        """The dimensions of which less than the whole is taken, or that go with one of the indices."""
        paired = {d for d, _ in self.batching}
        return tuple(d for d, n in enumerate(self.shape) if self.sizes[d] != n or d in paired)

    @property
    def whole(self) -> tuple[int, ...]:
        """The other dimensions."""
        return tuple(d for d in range(len(self.shape)) if d not in self.picked)

    @property
    def spread(self) -> tuple[int, ...]:
        """The picked dimensions of which more than one element is taken."""
        return tuple(d for d in self.picked if self.sizes[d] != 1)

    def indexer(self, clip: bool) -> Callable[[np.ndarray], tuple[tuple, np.ndarray | None]]:
        """A function from indices to NumPy index arrays for the picked dimensions.

        Each has the shape of the batch, then of the spread dimensions. Windows out of range are moved inside.

        Arguments:
          clip: False to also get a mask, over the batch, of the windows that lie within; None if all do.
        """
        spread = self.spread
        component = {d: i for i, d in enumerate(self.mapped)}
        pairs = dict(self.batching)
        extra = (np.newaxis,) * len(spread)
        plans = []
        for d in self.picked:
            offsets = 0
            if d in spread:
                along = [-1 if s == d else 1 for s in spread]
                offsets = np.arange(self.sizes[d]).reshape([1] * len(self.batch) + along)
            fixed = None
            if d in pairs:
                line = [-1 if i == pairs[d] else 1 for i in range(len(self.batch))]
                fixed = np.arange(self.shape[d]).reshape(line + [1] * len(spread))
            elif d not in component:
                fixed = np.zeros([1] * (len(self.batch) + len(spread)), np.intp)
            plans.append((component.get(d), self.shape[d] - self.sizes[d], offsets, fixed))
        rooms = np.array([self.shape[d] - self.sizes[d] for d in self.mapped], np.intp)

        def index(indices):
            starts = indices.astype(np.intp)
            within = None
            if not clip:
                inside = ((starts >= 0) & (starts <= rooms)).all(-1)
                within = None if inside.all() else inside
            picks = []
            for which, room, offsets, fixed in plans:
                if fixed is not None:
                    picks.append(fixed + offsets)
                    continue
                start = np.minimum(np.maximum(starts[..., which], 0), room)
                picks.append(start[(..., *extra)] + offsets)
            return tuple(picks), within

        return index

    def axes(self, window: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
        """How batch, spread and whole dimensions, in this order, lie in an array of windows.

        Arguments:
          window: for each dimension of the operand, its dimension in that array, or -1 if it has none.
          rank: of that array.

        Returns:
          the array's dimensions in the order batch, spread, whole, then those of size 1 that are left.
        """
        taken = {d for d in window if d >= 0}
        batch = [d for d in range(rank) if d not in taken]
        moved = [*batch, *[window[d] for d in (*self.spread, *self.whole) if window[d] >= 0]]
        return moved, [d for d in range(rank) if d not in moved]


def window_dims(rank: int, removed: Sequence[int], positions: Sequence[int]) -> list[int]:
    """For each dimension of an operand, its dimension among windows at `positions`; -1 for the removed ones."""
    kept = iter(positions)
    return [-1 if d in removed else int(next(kept)) for d in range(rank)]


# --- gather ---------------------------------------------------------------------------------------------------
def default_fill(dtype: Any) -> Any:
    """What a gather gives out of range where no value is stated: NaN, the least or the largest integer, True."""
    if dtype == np.bool_:
        return True
    if is_int(dtype):
        info = jax.numpy.iinfo(dtype)
        return info.min if is_signed(dtype) else info.max
    return np.nan


@ARRAYS.rule(lax.gather_p)
def _gather(eqn):
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    trailing = words(eqn.invars[0].aval.dtype)
    shape, after, dtype = shape_in(eqn), shape_out(eqn), dtype_out(eqn)
    sizes = (*map(int, eqn.params["slice_sizes"]), *trailing)
    offsets = (*numbers.offset_dims, *range(len(after) - len(trailing), len(after)))
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    at = Addressing(
        shape,
        sizes,
        tuple(numbers.start_index_map),
        tuple(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims)),
        shape_in(eqn, 1)[:-1],
    )
    moved, left = at.axes(window_dims(len(shape), removed, offsets), len(after))
    order = np.argsort([*moved, *left])
    order = None if (order == np.arange(len(after))).all() else tuple(order)
    middle = tuple(after[d] for d in (*moved, *left))
    front = (*at.picked, *at.whole)
    front = None if front == tuple(range(len(shape))) else front
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    index = at.indexer(clip=not fills)
    fill = eqn.params.get("fill_value")
    fill = default_fill(dtype) if fill is None else fill
    fill = np.asarray(fill).astype(dtype)[()]
    behind = (np.newaxis,) * (len(middle) - len(at.batch))
    if 0 in shape:  # nothing can be read
        return lambda x, indices: np.full(after, fill, dtype)

    def gather(x, indices):
        if front is not None:
            x = x.transpose(front)
        picks, within = index(indices)
        out = (x.take(picks[0], 0) if len(picks) == 1 else x[picks]).reshape(middle)
        if within is not None:
            out = np.where(within[(..., *behind)], out, fill)
        return out if order is None else out.transpose(order)

    if not at.picked:  # whole operand at each place of the batch
        lead = (1,) * len(at.batch)

        def gather_whole(x, indices):
            out = np.broadcast_to(x.reshape(lead + x.shape), at.batch + x.shape).reshape(middle)
            within = index(indices)[1]
            if within is not None:
                out = np.where(within[(..., *behind)], out, fill)
            return out if order is None else out.transpose(order)

        return gather_whole
    return gather


def scatter_addressing(eqn: Any) -> tuple[Addressing, list[int]]:
    """The addressing of a scatter equation, and the dimension of the updates that each operand dimension has."""
    numbers = eqn.params["dimension_numbers"]
    trailing = words(eqn.invars[0].aval.dtype)
    shape, updates = shape_in(eqn), shape_in(eqn, 2)
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    positions = (*numbers.update_window_dims, *range(len(updates) - len(trailing), len(updates)))
    window = window_dims(len(shape), removed, positions)
    at = Addressing(
        shape,
        tuple(1 if d < 0 else updates[d] for d in window),
        tuple(numbers.scatter_dims_to_operand_dims),
        tuple(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)),
        shape_in(eqn, 1)[:-1],
    )
    return at, window
