"""Buffers of the simulated GPU, with a history that is as fine as the accesses were.

`simulator.memory.Buffer` keeps a stamp for each element. Kernels for tensor cores move tiles, and always the same ones,
so this buffer cuts each dimension where an access began or ended and keeps one stamp for each cell of that grid: a
(128, 64) tile that is always copied as a whole is one cell. An access by an index array, or with a stride, cuts its
dimensions into single elements. What is found is the same as element by element.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.language.dtypes import unwritten
from palladion.simulator import memory
from palladion.simulator.clocks import Actor, component_of, epoch_of, stamp
from palladion.simulator.memory import GIVEN, Conflict, Index, Region, conflict_of, one_stamp

Cells = tuple[slice, ...]
MANY = 64  # cuts of a dimension, after which they are made in advance


class Buffer(memory.Buffer):
    """Memory of a simulated GPU, as `memory.Buffer`; `writes` only says whether there is a history (None: no).

    Attributes:
      cuts: of each dimension, where its cells begin, and its end.
      readers: further reads, by component: stamps of cells. Under -component atomic updates by it that were
        overwritten by further ones; updated: whether there are any.
      rivals: buffers in the same memory, which a `RefUnion` has; used: whether this one was used since.
    """

    __slots__ = ("_found", "_reads", "_writes", "cuts", "rivals", "updated", "used")

    def __init__(
        self, data: np.ndarray, label: str, space: Any = None, place: Any = None, key: Any = None, tracked: bool = False
    ) -> None:
        super().__init__(data, label, space, place, key)
        self.cuts = [[0, n] for n in data.shape]
        self.updated = False
        self.rivals: list[Buffer] = []
        self.used = False
        self._found: dict[Any, Cells | None] = {}  # of views that were seen: their cells, until something is cut
        if tracked:
            self._writes = np.zeros((1,) * data.ndim, np.int64)
            self._reads = np.zeros((1,) * data.ndim, np.int64)
            self.writes = self._writes  # pyright: ignore[reportAttributeAccessIssue]

    def part(self, index: Index) -> Buffer:
        """A part of this buffer, whose history is this one's."""
        made = Buffer(self.data[(*index, ...)], self.label, self.space, self.place, self.key)
        made.whole, made.index, made.writes = self, (*index, ...), self.writes
        return made

    def as_it_is(self) -> Buffer:
        """The buffer: what a name stands for does not change here."""
        return self

    # --- which cells an access touches ------------------------------------------------------------------------------
    def _cells(self, region: Region) -> tuple[Buffer, Cells | None, Region | None]:
        """Whose cells; which of them, or None for none; or, where they are no box, the region of single elements."""
        if self.whole is not None:
            assert isinstance(self.whole, Buffer) and self.index is not None
            return self.whole._cells(Region((("index", self.index[:-1]), *region.views)))
        if self.rivals:
            self._take_over()
        try:
            return self, self._found[region.views], None
        except (KeyError, TypeError):  # an index array has no hash
            return self._search(region)

    def _search(self, region: Region) -> tuple[Buffer, Cells | None, Region | None]:
        shape = self.data.shape
        box = [(0, n) for n in shape]
        order = list(range(len(shape)))
        views = region.views
        for number, (kind, how) in enumerate(views):
            if kind == "transpose":
                order = [order[p] for p in how]
            elif kind == "index":
                kept = []
                for axis, i in zip(order, how):
                    low, high = box[axis]
                    if isinstance(i, slice):
                        start, stop, step = i.indices(high - low)
                        if step != 1:
                            return self, None, self._single(region)
                        box[axis] = low + start, low + max(stop, start)
                        kept.append(axis)
                    elif isinstance(i, np.ndarray):
                        return self, None, self._single(region)
                    else:
                        i = int(i)
                        low = low + i if i >= 0 else high + i
                        box[axis] = low, low + 1
                order = [*kept, *order[len(how) :]]
            elif any(k == "index" for k, _ in views[number:]):  # a part of another shape
                return self, None, self._single(region)
            else:
                break
        if any(low >= high for low, high in box):
            return self, None, None
        cells = tuple([self._between(axis, low, high) for axis, (low, high) in enumerate(box)])
        self._found[views] = cells
        return self, cells, None

    def _between(self, axis: int, low: int, high: int) -> slice:
        cuts = self.cuts[axis]
        if low == 0 and high == cuts[-1]:
            return slice(0, len(cuts) - 1)
        for where in (low, high):
            position = bisect.bisect_left(cuts, where)
            if position == len(cuts) or cuts[position] != where:
                self._cut(axis, position, where)
                cuts = self.cuts[axis]
        return slice(bisect.bisect_left(cuts, low), bisect.bisect_left(cuts, high))

    def _cut(self, axis: int, position: int, where: int) -> None:
        """Cut the cells of a dimension before `where`; all parts keep what the cell had."""
        cuts = self.cuts[axis]
        if len(cuts) < MANY:
            self._cut_at(axis, [*cuts[:position], where, *cuts[position:]])
        else:  # a regular pattern is being cut out, most likely: all of it at once
            self._cut_at(axis, list(range(0, cuts[-1] + 1, math.gcd(where, *cuts))))

    def _cut_at(self, axis: int, cuts: list[int]) -> None:
        self._found.clear()
        counts = np.diff(np.searchsorted(cuts, self.cuts[axis]))
        self._spread(lambda stamps: np.repeat(stamps, counts, axis))
        self.cuts[axis] = cuts

    def _spread(self, spread: Callable[[np.ndarray], np.ndarray]) -> None:
        self._writes, self._reads = spread(self._writes), spread(self._reads)
        self.readers = {component: spread(stamps) for component, stamps in self.readers.items()}

    def _single(self, region: Region) -> Region:
        """Cut everything into single elements."""
        for axis, n in enumerate(self.data.shape):
            if len(self.cuts[axis]) != n + 1:
                self._cut_at(axis, list(range(n + 1)))
        return region.before_bitcast()

    def _take_over(self) -> None:
        """This buffer is used: what its rivals held is gone, and who accessed them must be done."""
        for rival in self.rivals:
            if rival.used:
                stamps = rival.stamps()
                for other in rival.rivals:
                    for each in stamps:
                        other.note_earlier(each)
                rival.used = False
                rival._writes[...] = rival._reads[...] = 0
                rival.readers.clear()
                rival.data[...] = unwritten(rival.data.dtype)
        self.used = True

    # --- noting and checking ------------------------------------------------------------------------------------------
    def _own_reads(self, component: int) -> np.ndarray:
        if component not in self.readers:
            self.readers[component] = np.zeros_like(self._writes)
        return self.readers[component]

    def given(self) -> Buffer:
        """The buffer, its contents taken as written before everything else."""
        if self.writes is not None:
            self._writes[...] = GIVEN
        return self

    def forget(self, region: Region) -> None:
        """What lies there counts as never written."""
        owner, cells, single = self._cells(region)
        _set(owner._writes, cells, single, 0)

    def read_by(self, actor: Actor, region: Region, site: int, view: int = 0) -> Conflict:
        """Note a read; None, or a write that nothing orders before it."""
        owner, cells, single = self._cells(region)
        own = stamp(actor.component, actor.epoch, site)
        conflict = conflict_of("wrote", actor.clock, view, _get(owner._writes, cells, single))
        if owner.updated:  # by several, one after the other
            for component, stamps in owner.readers.items():
                if component < 0:
                    conflict = conflict or conflict_of("wrote", actor.clock, view, _get(stamps, cells, single))
        reads = _get(owner._reads, cells, single)
        known = actor.clock.knows(view, one_stamp(reads))
        _set(owner._reads if known else owner._own_reads(actor.component), cells, single, own)
        return conflict

    def written_by(self, actor: Actor, region: Region, site: int, view: int = 0) -> Conflict:
        """Note a write; None, or an access that nothing orders before it."""
        owner, cells, single = self._cells(region)
        conflict = conflict_of("wrote", actor.clock, view, _get(owner._writes, cells, single))
        for stamps in (owner._reads, *owner.readers.values()):
            conflict = conflict or conflict_of("read", actor.clock, view, _get(stamps, cells, single))
        _set(owner._writes, cells, single, stamp(actor.component, actor.epoch, site))
        return conflict

    def updated_by(
        self, actor: Actor, region: Region, site: int, view: int, exempt: Callable[[np.ndarray], np.ndarray]
    ) -> Conflict:
        """Note an atomic update; None, or an access that nothing orders before it and that is not `exempt`.

        Arguments:
          exempt: of an array of stamps, which are other atomic updates.
        """
        owner, cells, single = self._cells(region)
        conflict = None
        before = np.asarray(_get(owner._writes, cells, single))
        reads = [("read", _get(stamps, cells, single)) for stamps in (owner._reads, *owner.readers.values())]
        for verb, stamps in (("wrote", before), *reads):
            stamps = np.asarray(one_stamp(stamps))
            late = stamps[actor.clock.unknown(view, stamps)]
            late = late[~exempt(late)] if late.size else late
            if conflict is None and late.size:
                conflict = verb, int(late.flat[0])
        own = stamp(actor.component, actor.epoch, site)
        others = exempt(before)
        for earlier in np.unique(before[~others | actor.clock.unknown(view, before)]):  # later accesses are checked
            if (component := int(component_of(earlier))) != 0:  # against these writes, too
                owner.updated = True
                mine = owner._own_reads(-component)  # apart from its updates
                there = np.array(_get(mine, cells, single))
                newer = (before == earlier) & (epoch_of(there) < epoch_of(earlier))
                _set(mine, cells, single, np.where(newer, earlier, there))
        _set(owner._writes, cells, single, own)
        _set(owner._own_reads(actor.component), cells, single, own)
        return conflict

    def written_before(self, actor: Actor, view: int = 0) -> Conflict:
        """None, or a write that nothing orders before now."""
        conflict = conflict_of("wrote", actor.clock, view, self._writes)
        for component, stamps in self.readers.items():
            if component < 0:
                conflict = conflict or conflict_of("wrote", actor.clock, view, stamps)
        return conflict

    def note_earlier(self, earlier: int) -> None:
        """Note that an access of another buffer, whose memory this one takes over, touched all of it."""
        stamps = self._own_reads(int(component_of(earlier)))
        np.copyto(stamps, earlier, where=epoch_of(stamps) < epoch_of(earlier))

    def stamps(self) -> set[int]:
        """Of all accesses that are remembered."""
        if self.writes is None:
            return set()
        arrays = (self._writes, self._reads, *self.readers.values())
        return {int(s) for a in arrays for s in set(a.flat)} - {0}

    # --- what was never written -----------------------------------------------------------------------------------
    def unwritten(self, region: Region) -> bool:
        """Whether an element of the region was never written."""
        owner, cells, single = self._cells(region)
        return bool((np.asarray(_get(owner._writes, cells, single)) == 0).any())

    def gaps(self, region: Region) -> np.ndarray | None:
        """Which elements of a region were never written, in the region's shape before its bitcasts; None: all were."""
        if not self.unwritten(region):
            return None
        owner, single = self._as_single(region)
        return np.asarray(single.get(owner._writes)) == 0

    def unmark(self, region: Region, gaps: np.ndarray | None) -> None:
        """Elements of a region count as never written: they got what was never written elsewhere."""
        if self.writes is None or gaps is None or not gaps.any():
            return
        owner, single = self._as_single(region)
        stamps = np.array(single.get(owner._writes))
        if stamps.shape == gaps.shape:  # another shape: one of the views is a bitcast
            single.put(owner._writes, np.where(gaps, 0, stamps))

    def copied_from(self, region: Region, source: memory.Buffer, part: Region) -> None:
        """What a copy brought of another buffer is as unwritten as it was there."""
        if isinstance(source, Buffer) and source.writes is not None and self.writes is not None:
            self.unmark(region, source.gaps(part))

    def _as_single(self, region: Region) -> tuple[Buffer, Region]:
        if self.whole is not None:
            assert isinstance(self.whole, Buffer) and self.index is not None
            return self.whole._as_single(Region((("index", self.index[:-1]), *region.views)))
        return self, self._single(region)


def _get(stamps: np.ndarray, cells: Cells | None, single: Region | None) -> Any:
    if cells is not None:
        return stamps[cells]
    return single.get(stamps) if single is not None else _NOTHING


def _set(stamps: np.ndarray, cells: Cells | None, single: Region | None, value: Any) -> None:
    if cells is not None:
        stamps[cells] = value
    elif single is not None:
        single.put(stamps, value)


_NOTHING = np.zeros(0, np.int64)
