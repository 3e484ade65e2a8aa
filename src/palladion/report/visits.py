"""Which blocks the programs of a grid visit, as NumPy arrays over the whole grid.

An index map is evaluated once for all grid points, and each block gets one number, so that every question (which
blocks are never visited, which are left and visited again, which are shared by several programs, how often a block
is copied) is a few vector operations: 100,000 programs take milliseconds.

A grid of more than `index_maps.MAX_POINTS` programs is cut down to a sub-grid from its origin, inner axes whole as
far as they fit. Its programs run in the same order as in the full grid, so that a block that is revisited, or
shared, in the sub-grid is so in the full one; that a block is never visited cannot be told from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.language.blocks import BoundedSlice, Element, Indirect, Squeezed
from palladion.language.dtypes import element_bits
from palladion.language.grid import BlockMapping
from palladion.language.index_maps import MAX_POINTS, evaluate, grid_points


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The grid points that are looked at.

    Attributes:
      sizes: the whole grid.
      points: int32 [axes, points], in program order.
    """

    sizes: tuple[int, ...]
    points: np.ndarray

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Grid:
        """All points of a grid, or those of a sub-grid when there are more than `MAX_POINTS`."""
        sizes = tuple(sizes)
        return cls(sizes, grid_points(sizes if math.prod(sizes) <= MAX_POINTS else _sub_grid(sizes)))

    @property
    def programs(self) -> int:
        return math.prod(self.sizes)

    @property
    def sampled(self) -> bool:
        return self.points.shape[1] < self.programs

    def point(self, number: Any) -> tuple[int, ...]:
        """The grid point of a column of `points`."""
        return tuple(int(i) for i in self.points[:, number])


def _sub_grid(sizes: tuple[int, ...]) -> tuple[int, ...]:
    room, result = MAX_POINTS, []
    for axis in reversed(range(len(sizes))):
        outer = sum(n > 1 for n in sizes[:axis])  # at least two points are left for each of these
        result.append(min(sizes[axis], max(room >> outer, 1)))
        room //= result[-1]
    return tuple(reversed(result))


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """The blocks of one operand that the programs visit, clamped into the array as an executor clamps them.

    Attributes:
      mapping: the operand.
      grid: the grid points.
      columns: for each result of the index map, int64 [points] ([points, n] for an `Indirect(n)` dimension).
      extents: the number of values that each column can have.
      outside: how many points asked for a block outside the array.
    """

    mapping: BlockMapping
    grid: Grid
    columns: tuple[np.ndarray, ...]
    extents: tuple[int, ...]
    outside: int

    @classmethod
    def of(cls, mapping: BlockMapping, grid: Grid, prefetch: Sequence[np.ndarray] = ()) -> Visits:
        """Evaluate the index map of an operand at all points of the grid."""
        columns, extents = [], []
        outside = np.zeros(grid.points.shape[1], bool)
        pairs = mapping.indices(evaluate(mapping, grid.points, prefetch))
        for (index, size), block, (low, high) in zip(pairs, mapping.block_shape, mapping.extents):
            bad = (index < low) | (index > high)
            outside |= bad if bad.ndim == 1 else bad.any(axis=1)
            columns.append(np.clip(index, low, high))
            extents.append(high + 1)
            if size is not None:
                columns.append(np.clip(size, 0, block.block_size))
                extents.append(block.block_size + 1)
        return cls(mapping, grid, tuple(columns), tuple(extents), int(outside.sum()))

    @functools.cached_property
    def blocks(self) -> np.ndarray:
        """One number for each block: int64 [points]."""
        number = np.zeros(self.grid.points.shape[1], np.int64)
        for column, extent in zip(self.columns, self.extents):
            if column.ndim > 1:  # a list of indices: equal lists are one block
                lists, column = np.unique(column, axis=0, return_inverse=True)
                column, extent = column.reshape(-1), len(lists)
            number = number * extent + column
        return number

    def block_name(self, point: Any) -> tuple[Any, ...]:
        """The block that a point visits, as the index map gives it (clamped)."""
        return tuple(column[point].tolist() for column in self.columns)

    @functools.cached_property
    def runs(self) -> np.ndarray:
        """The points at which a block other than the one before is visited: int64 [runs]."""
        changed = self.blocks[1:] != self.blocks[:-1]
        return np.flatnonzero(np.concatenate([[True], changed])) if self.blocks.size else np.zeros(0, np.int64)

    @functools.cached_property
    def copies(self) -> int:
        """How often a block is copied between HBM and chip: programs in a row with the same block share it."""
        runs, seen = len(self.runs), max(self.grid.points.shape[1], 1)
        return round(runs * self.grid.programs / seen) if self.grid.sampled else runs

    @functools.cached_property
    def moved_bytes(self) -> int:
        """Bytes that those copies move; the part of a block outside the array is not moved."""
        elements = np.ones(len(self.runs), np.float64)  # float64: a product may pass 2^63
        for start, stop in self.windows(self.runs):
            elements *= (stop - start) if start.ndim == 1 else (stop - start).sum(axis=1)
        total = float(elements.sum()) * element_bits(self.mapping.array.dtype) / 8
        return round(total * self.grid.programs / max(self.grid.points.shape[1], 1))

    def windows(self, points: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(start, stop) in elements of the array, for each dimension, of the blocks at some points.

        For an `Indirect(n)` dimension these are [points, n]: n windows of one element.
        """
        columns, result = iter(self.columns), []
        for block, size, n in zip(self.mapping.block_shape, self.mapping.sizes, self.mapping.array.shape):
            start: Any = next(columns)[points]
            if isinstance(block, BoundedSlice):
                size = next(columns)[points]
            elif isinstance(block, Element):
                start = start - block.padding[0]
            elif isinstance(block, Indirect):
                size = 1
            elif not isinstance(block, Squeezed):
                start = start * size
            result.append((np.clip(start, 0, n), np.clip(start + size, 0, n)))
        return result


@dataclasses.dataclass(frozen=True)
class Revisit:
    """An output block that is left and visited again.

    Attributes:
      count: how many blocks are.
      block: the first of them.
      point: where it is visited again.
      first, last: the grid points of its previous visit.
    """

    count: int
    block: tuple[int, ...]
    point: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


def find_revisit(visits: Visits) -> Revisit | None:
    """The first block that programs visit again after other blocks, or None."""
    runs, blocks = visits.runs, visits.blocks[visits.runs]
    order = np.argsort(blocks, kind="stable")
    again = np.flatnonzero(blocks[order][1:] == blocks[order][:-1]) + 1
    if not again.size:
        return None
    which = again[np.argmin(order[again])]
    now, before = order[which], order[which - 1]
    point = visits.grid.point
    return Revisit(
        count=len(np.unique(blocks[order[again]])),
        block=visits.block_name(runs[now]),
        point=point(runs[now]),
        first=point(runs[before]),
        last=point(runs[before + 1] - 1),
    )


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Output blocks that belong to several programs.

    Attributes:
      count, total: how many blocks are shared, and how many are visited.
      axes: the grid axes along which programs share a block.
      programs: how many programs share the first such block.
      block: that block.
      points: the first two of those programs.
    """

    count: int
    total: int
    axes: tuple[int, ...]
    programs: int
    block: tuple[int, ...]
    points: tuple[tuple[int, ...], tuple[int, ...]]


def find_sharing(visits: Visits) -> Sharing | None:
    """The blocks that several programs visit, or None."""
    if not visits.blocks.size:
        return None
    order = np.argsort(visits.blocks, kind="stable")
    sorted_blocks = visits.blocks[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_blocks[1:] != sorted_blocks[:-1]]))
    counts = np.diff(np.append(starts, len(order)))
    shared = counts > 1
    if not shared.any():
        return None
    varies = []
    for coordinate in visits.grid.points:
        ordered = coordinate[order]
        varies.append((np.maximum.reduceat(ordered, starts) > np.minimum.reduceat(ordered, starts)).any())
    first = np.flatnonzero(shared)[np.argmin(order[starts[shared]])]
    a, b = order[starts[first]], order[starts[first] + 1]
    return Sharing(
        count=int(shared.sum()),
        total=len(starts),
        axes=tuple(axis for axis, yes in enumerate(varies) if yes),
        programs=int(counts[first]),
        block=visits.block_name(a),
        points=(visits.grid.point(a), visits.grid.point(b)),
    )


@dataclasses.dataclass(frozen=True)
class Unvisited:
    """A part of an output that no program visits.

    Attributes:
      count, total: how many blocks (or elements) of how many.
      first: the first of them.
      unit: "blocks", or "elements" where blocks may overlap.
    """

    count: int
    total: int
    first: tuple[int, ...]
    unit: str


MAX_ELEMENTS = 1 << 24  # of an output whose elements are marked one by one


def find_unvisited(visits: Visits) -> Unvisited | None:
    """The blocks that no program visits, or None. Outputs with overlapping blocks are looked at by element.

    Raises:
      OverflowError: such an output has more than `MAX_ELEMENTS` elements.
    """
    array, dims = visits.mapping.array, visits.mapping.block_shape
    if not math.prod(array.shape):
        return None
    if any(isinstance(b, (Element, BoundedSlice, Indirect)) for b in dims):
        return _unvisited_elements(visits)
    total = math.prod(visits.extents)
    visited = np.unique(visits.blocks)
    if len(visited) == total:
        return None
    gaps = np.flatnonzero(visited != np.arange(len(visited)))
    first = int(gaps[0]) if gaps.size else len(visited)
    name = tuple(int(i) for i in np.unravel_index(first, visits.extents))
    return Unvisited(total - len(visited), total, name, "blocks")


def _unvisited_elements(visits: Visits) -> Unvisited | None:
    """Marks the windows by their corners and sums up (a difference array): no loop over windows."""
    shape = visits.mapping.array.shape
    if math.prod(shape) > MAX_ELEMENTS:
        raise OverflowError
    windows = visits.windows(np.unique(visits.blocks, return_index=True)[1])
    many = max((start.shape[1] for start, _ in windows if start.ndim > 1), default=1)
    windows = [[np.repeat(x, many) if x.ndim == 1 else x.reshape(-1) for x in window] for window in windows]
    marks = np.zeros([n + 1 for n in shape], np.int32)
    for corner in np.ndindex(*[2] * len(shape)):
        np.add.at(marks, tuple(w[side] for w, side in zip(windows, corner)), (-1) ** sum(corner))
    for axis in range(len(shape)):
        np.cumsum(marks, axis=axis, out=marks)
    missing = np.flatnonzero(marks[tuple(slice(n) for n in shape)] == 0)
    if not missing.size:
        return None
    first = tuple(int(i) for i in np.unravel_index(missing[0], shape))
    return Unvisited(len(missing), math.prod(shape), first, "elements")
