"""The GMEM end of a TMA copy: a box that may reach outside its array, rows that are gathered, or windows of images.

The hardware computes addresses from coordinates of the whole array, so that a slice of a slice is one box: what counts
as outside is what lies outside the array, not outside the first slice. Loads fill what is outside, stores drop it.

Sources: the Mosaic GPU reference, "Asynchronous copies"; CUDA driver API, cuTensorMapEncodeTiled and -Im2col.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.errors import explain
from palladion.language.gpu.memory import TilingTransform
from palladion.language.gpu.refs import storage_of
from palladion.language.gpu.views import Im2Col, is_gather, split_view
from palladion.language.refs import RefView
from palladion.simulator.clocks import Actor
from palladion.simulator.code import location
from palladion.simulator.gpu.chip import TMA_LATENCY, copy_seconds
from palladion.simulator.gpu.departure import note_foreign
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import Thread
from palladion.simulator.gpu.views import End
from palladion.simulator.memory import Region

Starts = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a buffer, and how much of it exists.

    Attributes:
      region: the elements that exist; None: none does.
      inside: where these are in the part, an index; None: the part exists as a whole.
      shape: of the part.
      starts: where it begins along the dimensions of the array that it keeps, for alignment; None: it is gathered.
    """

    region: Region | None
    inside: tuple[Any, ...] | None
    shape: tuple[int, ...]
    starts: Starts = ()

    def get(self, buffer: Buffer, fill: Any) -> Any:
        """A copy of the part, with `fill` where there is nothing."""
        if self.inside is None:
            assert self.region is not None
            return np.array(self.region.get(buffer.data))
        value = np.full(self.shape, fill, buffer.data.dtype)
        if self.region is not None:
            value[self.inside] = self.region.get(buffer.data)
        return value

    def share(self, axis: int, start: int, stop: int) -> Box:
        """What is from `start` to `stop` along a dimension."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        if self.region is None:
            return Box(None, (), shape)
        everything = (slice(None),) * axis
        if self.inside is None:
            return Box(self.region.then(("index", (*everything, slice(start, stop)))), None, shape)
        here = self.inside[axis]
        if isinstance(here, slice):
            first, last = max(here.start, start), min(here.stop, stop)
            kept: Any = slice(first - here.start, last - here.start)
            moved: Any = slice(first - start, last - start)
            empty = last <= first
        else:
            kept = np.flatnonzero((here >= start) & (here < stop))
            moved, empty = here[kept] - start, not kept.size
        if empty:
            return Box(None, (), shape)
        inside = (*self.inside[:axis], moved, *self.inside[axis + 1 :])
        return Box(self.region.then(("index", (*everything, kept))), inside, shape)


class GmemEnd(End):
    """A Ref operand in GMEM of a copy. Attributes: is_gather: rows are gathered by an index array."""

    def __init__(self, eqn: Any, ref_view: Any) -> None:
        where, transforms = split_view(ref_view)
        self.windows = next((t for t in transforms if isinstance(t, Im2Col)), None)
        if self.windows is not None:
            transforms = transforms[transforms.index(self.windows) + 1 :]
        super().__init__(eqn, RefView(ref_view.ref, (*where, *transforms)))
        self.is_gather = is_gather(ref_view)
        self._known: tuple[Any, Box] | None = None

    def box(self, operands: Sequence[Any], buffer: Buffer) -> Box:
        """The part for these operands."""
        if self.windows is not None:
            return self._windowed(self.region(operands), buffer)
        if self.view.fixed is None:
            return self._composed(self.region(operands), buffer.shape)
        if self._known is None or self._known[0] != buffer.shape:
            self._known = buffer.shape, self._composed(self.view.fixed, buffer.shape)
        return self._known[1]

    # --- boxes --------------------------------------------------------------------------------------------------------
    def _composed(self, region: Region, shape: Sequence[int]) -> Box:
        """All indices of a chain as one index of the array."""
        before: tuple[Any, ...] = ()  # views that make the array of which the rest is a part
        dims: list[Any] = [_Range(0, n, 1) for n in shape]  # of the array: a range, an index, or an array of them
        order = list(range(len(dims)))  # the array's dimensions that the view keeps, in its order
        for k, (kind, how) in enumerate(region.views):
            if kind == "transpose":
                order = [order[i] for i in how]
            elif kind == "index":
                for d, i in zip(order, how):
                    dims[d] = dims[d].at(i) if isinstance(dims[d], _Range) else dims[d][i]
                order = [d for d in order if not isinstance(dims[d], int)]
            else:
                if any(_clipped(i, n) is None or _clipped(i, n)[1] is not None for i, n in zip(dims, shape)):  # pyright: ignore[reportOptionalSubscript]
                    self._refuse_reshaped()
                before = region.views[: k + 1]
                shape = np.shape(Region(before).get(np.broadcast_to(np.zeros((), self.aval.dtype), self.aval.shape)))
                dims = [_Range(0, n, 1) for n in shape]
                order = list(range(len(dims)))
        kept = tuple(len(dims[d]) for d in order)
        starts = tuple(dims[d].start if isinstance(dims[d], _Range) else None for d in order)
        clipped = [_clipped(i, n) for i, n in zip(dims, shape)]
        found = [c for c in clipped if c is not None]
        if len(found) < len(clipped):
            return Box(None, (), kept, starts)
        if all(inside is None for _, inside in found):
            plain = (("index", tuple(_as_index(i) for i in dims)),) if dims else ()
            part = Region((*before, *plain))
            inside = None
        else:
            part = Region((*before, ("index", tuple(index for index, _ in found))))
            inside = tuple(slice(0, len(dims[d])) if found[d][1] is None else found[d][1] for d in order)
        if order != (ascending := sorted(order)):
            part = part.then(("transpose", tuple(ascending.index(d) for d in order)))
        return Box(part, inside, kept, starts)

    def _refuse_reshaped(self) -> None:
        raise NotImplementedError(
            explain(
                f"A copy of {self.aval.label} reaches outside of it, and is reshaped after that.",
                where=location(self.eqn),
                hint="reshape the whole Ref first, then take the part: x_ref.reshape(…).at[…]",
            )
        )

    # --- windows ------------------------------------------------------------------------------------------------------
    def _windowed(self, region: Region, buffer: Buffer) -> Box:
        """Rows of `im2col_ref`: positions of the window, of which one pixel is taken."""
        windows = self.windows
        assert windows is not None
        ((_, (rows, *pixel, channels)),) = region.views
        images, *sizes, depth = buffer.shape
        positions = [n + sum(p) - w + 1 for n, p, w in zip(sizes, windows.padding, windows.window_shape)]
        numbers = np.arange(rows.start, rows.stop, rows.step)
        valid = (numbers >= 0) & (numbers < images * math.prod(positions))
        image, *corner = np.unravel_index(np.where(valid, numbers, 0), (images, *positions))
        places = [c - before + d for c, (before, _), d in zip(corner, windows.padding, pixel)]
        for place, size in zip(places, sizes):
            valid = valid & (place >= 0) & (place < size)
        shape = len(numbers), len(range(channels.start, channels.stop, channels.step))
        columns = _clipped(_Range(channels.start, shape[1], channels.step), depth)
        if columns is None or not valid.any():
            return Box(None, (), shape)
        index = (image[valid], *(p[valid] for p in places), columns[0])
        inside = (np.flatnonzero(valid), slice(0, shape[1]) if columns[1] is None else columns[1])
        return Box(Region([("index", index)]), inside, shape)


@dataclasses.dataclass(frozen=True)
class _Range:
    """Indices start, start + step, …, so many."""

    start: int
    count: int
    step: int

    def __len__(self) -> int:
        return self.count

    def at(self, index: Any) -> Any:
        """What an index of this range selects, as indices of the array."""
        if isinstance(index, slice):
            step = index.step or 1
            count = len(range(index.start, index.stop, step))
            return _Range(self.start + index.start * self.step, count, self.step * step)
        if isinstance(index, np.ndarray) and index.ndim:
            return self.start + index.astype(np.int64) * self.step
        return self.start + int(index) * self.step


def _clipped(index: Any, size: int) -> tuple[Any, Any] | None:
    """What exists of an index, and where that is in it (None: all exists); None: nothing exists."""
    if isinstance(index, int):
        return (index, None) if 0 <= index < size else None
    if isinstance(index, _Range):
        first = max(-(index.start // index.step), 0)
        last = min(-((index.start - size) // index.step), index.count)
        if last <= first:
            return None if index.count else (slice(0, 0), None)
        start = index.start + first * index.step
        found = slice(start, start + (last - first - 1) * index.step + 1, index.step)
        return found, None if last - first == index.count else slice(first, last)
    inside = (index >= 0) & (index < size)
    if inside.all():
        return index, None
    return (index[inside], np.flatnonzero(inside)) if inside.any() else None


def _as_index(index: Any) -> Any:
    if isinstance(index, _Range):
        return slice(index.start, index.start + (index.count - 1) * index.step + 1 if index.count else index.start,
                     index.step)  # fmt: skip
    return index


# --- what copies in both directions share -----------------------------------------------------------------------------
def note_copy(
    thread: Thread, eqn: Any, site: int, source: Buffer, box: Box, goal: Buffer, part: Region, who: str, actor: Actor,
    view: int,
) -> None:  # fmt: skip
    """Check what a copy reads and writes against the history; unwritten elements stay unwritten."""
    machine = thread.machine
    if source.writes is not None and box.region is not None:
        note_foreign(thread, source, actor, site)
        if conflict := source.read_by(actor, box.region, site, view):
            machine.race(thread, source, "read", who, conflict, eqn, actor, view, box.region)
    if goal.writes is not None:
        if conflict := goal.written_by(actor, part, site, view):
            machine.race(thread, goal, "write", who, conflict, eqn, actor, view, part)
        if machine.uninitialized != "allow" and box.region is not None:
            filled = part if box.inside is None else part.then(("index", box.inside))
            goal.copied_from(filled, source, box.region)


def engine_time(thread: Thread, size: int, name: str, eqn: Any) -> tuple[float, float]:
    """When a copy of so many bytes is read, and when it is done: the block's copies come one after the other."""
    machine, block = thread.machine, thread.block
    if machine.timeline is None:
        return 0.0, 0.0
    now = thread.agent.time
    seconds = copy_seconds(size, machine.chip)
    begin = block.tma.gap(now, seconds)
    block.tma.take(begin, seconds)
    end = begin + seconds
    machine.span(thread, "TMA", name, "copy", begin, end + TMA_LATENCY, location(eqn))
    return end - now, end + TMA_LATENCY - now


def tile_of(end: End, ref_view: Any) -> tuple[int, ...]:
    """The tile in which a buffer in SMEM lies, for the last dimensions of the view; (): none, or the view turns it."""
    first = next(iter(storage_of(end.aval).transforms), None)
    if not isinstance(first, TilingTransform) or not all(
        isinstance(t, jaxlink.NDIndexer) for t in split_view(ref_view)[1]
    ):
        return ()
    return tuple(first.tiling)


def check_aligned(thread: Thread, eqn: Any, label: str, tile: Sequence[int], box: Box) -> None:
    """A copy to or from a tiled buffer must begin at a tile of it."""
    for back, (size, start) in enumerate(zip(reversed(tile), reversed(box.starts)), 1):
        if start is not None and start % size:
            thread.machine.found(
                "misaligned",
                f"{label} is copied from index {start} of dimension {len(box.starts) - back} on, no multiple of "
                f"the tile's {size}: the buffer in SMEM lies in tiles of {tuple(tile)}.",
                where=location(eqn),
                when=thread.when(),
                operand=label,
                hint=f"copies to and from a buffer with a TilingTransform begin at multiples of its tile: {size}, here",
            )
