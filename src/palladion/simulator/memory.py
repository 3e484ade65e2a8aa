"""Buffers of a simulated machine: contents, poison, bounds, and per element who last wrote and read it.

A `Region` says which part of a buffer an access touches: a chain of views, as NumPy operations. The same region is
applied to the contents and to the history, which has the buffer's shape: an int64 stamp (clocks.py) for the last
write and for the last read of each element. A read by somebody who does not know of the last read (two cores that
read the same weights, say) goes into a further array for its component, so that a later write is checked against
every reader.

A view that bitcasts to another width has another number of elements; its history is that of the elements before the
bitcast. Not optimal: memory that is tracked takes 16 further bytes an element.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.simulator.clocks import Actor, stamp

ALIGNMENT = 64
GIVEN = stamp(0, 0, 1)  # a write that everybody knows of
POOLED, POOL_BYTES = 1 << 18, 1 << 27  # smallest piece of memory that is kept for another call; all of them together
IN_POOL_ONLY = 2  # references to a piece that only the pool holds: the list's, and that of the call that counts them
Index = tuple[Any, ...]
Conflict = tuple[str, int] | None  # what an earlier access did ("read", "wrote"), and its stamp


class Region:
    """A part of a buffer: a chain of views.

    Attributes:
      views: ("index", tuple) with ints, slices and integer arrays as in NumPy, ("reshape", shape),
        ("transpose", permutation) and ("bitcast", dtype).
    """

    __slots__ = ("views",)

    def __init__(self, views: Sequence[tuple[str, Any]] = ()) -> None:
        self.views = tuple(views)

    def get(self, array: np.ndarray) -> Any:
        """What the region selects: a view where NumPy can make one."""
        for kind, value in self.views:
            array = _GET[kind](array, value)
        return array

    def put(self, array: np.ndarray, value: Any) -> None:
        """Replace what the region selects."""
        _put(array, self.views, value)

    def before_bitcast(self) -> Region:
        """The region without its bitcasts and what follows, for arrays of another dtype than the buffer's."""
        for k, (kind, _) in enumerate(self.views):
            if kind == "bitcast":
                return Region(self.views[:k])
        return self

    def then(self, *views: tuple[str, Any]) -> Region:
        """A part of this region."""
        return Region((*self.views, *views))


WHOLE = Region()


_pool: list[np.ndarray] = []  # large pieces of memory, to be used again: fresh pages cost more than most kernels
_pool_lock = threading.Lock()


def aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Memory that holds anything, aligned as JAX wants an array to take it over without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8) if size < POOLED else _pooled(size + ALIGNMENT)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _pooled(size: int) -> np.ndarray:
    """A piece of the pool that nobody holds a view of any more, or a new one."""
    with _pool_lock:
        for k in range(len(_pool)):
            if len(_pool[k]) == size and sys.getrefcount(_pool[k]) <= IN_POOL_ONLY:
                return _pool[k]
        raw = np.empty(size, np.uint8)
        while _pool and sum(map(len, _pool)) + size > POOL_BYTES:
            del _pool[0]
        if size <= POOL_BYTES:
            _pool.append(raw)
        return raw


def bitcast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array's bits as another dtype. The second-last dimension takes up a change of width, as in a TPU's tiles."""
    dtype = np.dtype(dtype)
    old, new = array.dtype.itemsize, dtype.itemsize
    if old == new:
        return np.ascontiguousarray(array).view(dtype).reshape(array.shape)
    if old > new:
        parts = np.ascontiguousarray(array)[..., None].view(dtype)  # (..., rows, columns, ratio)
        return np.moveaxis(parts, -1, -2).reshape(*array.shape[:-2], -1, array.shape[-1])
    ratio = new // old
    *outer, rows, columns = array.shape
    parts = np.moveaxis(array.reshape(*outer, rows // ratio, ratio, columns), -2, -1)
    return np.ascontiguousarray(parts).view(dtype)[..., 0]


_GET = {
    "index": lambda a, index: a[index],
    "reshape": lambda a, shape: a.reshape(shape),
    "transpose": lambda a, permutation: a.transpose(permutation),
    "bitcast": bitcast,
}


def _put(array: np.ndarray, views: tuple[tuple[str, Any], ...], value: Any) -> None:
    if not views:
        array[...] = value
        return
    (kind, how), rest = views[0], views[1:]
    if kind == "index":
        if not rest:
            array[how] = value
        elif (part := array[(*how, ...)]).base is None:  # index arrays select a copy
            _put(part, rest, value)
            array[how] = part
        else:
            _put(part, rest, value)
        return
    part = _GET[kind](array, how)
    if np.shares_memory(part, array) if kind != "bitcast" else False:
        _put(part, rest, value)
        return
    part = part.copy()
    _put(part, rest, value)
    if kind == "bitcast":
        part = bitcast(part, array.dtype)
    elif kind == "transpose":
        part = part.transpose(np.argsort(how))
    array[...] = part.reshape(array.shape)


class Buffer:
    """Memory of a simulated machine.

    Attributes:
      data: its contents. label: how messages call it.
      space: the memory it lies in. place: the device and core, or None.
      key: the same for the buffers that correspond to each other on different devices and cores.
      writes, reads: for each element the stamp of the last write and read (0: none), or None if not tracked.
      readers: further reads, by component: arrays of epochs' stamps.
      whole, index: of a buffer that is a part of another one: which, and what part; else None.
    """

    __slots__ = ("data", "index", "key", "label", "place", "readers", "reads", "space", "whole", "writes")

    def __init__(
        self, data: np.ndarray, label: str, space: Any = None, place: Any = None, key: Any = None, tracked: bool = False
    ) -> None:
        self.data, self.label, self.space, self.place, self.key = data, label, space, place, key
        self.writes = np.zeros(data.shape, np.int64) if tracked else None
        self.reads = np.zeros(data.shape, np.int64) if tracked else None
        self.readers: dict[int, np.ndarray] = {}
        self.whole: Buffer | None = None
        self.index: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def as_it_is(self) -> Buffer:
        """The memory that it stands for now: the Ref of a block is other memory in the next program."""
        if self.key is None or self.key[0] != "window":
            return self
        still = Buffer(self.data, self.label, self.space, self.place, self.key)
        still.writes, still.reads, still.readers = self.writes, self.reads, self.readers
        still.whole, still.index = self.whole, self.index
        return still

    def lie_in(self, whole: Buffer, index: Index) -> Buffer:
        """Stand for a part of another buffer from now on."""
        self.whole, self.index = whole, (*index, ...)
        self.data = whole.data[self.index]
        if whole.writes is not None and whole.reads is not None:
            self.writes, self.reads = whole.writes[self.index], whole.reads[self.index]
        return self

    def part(self, index: Index) -> Buffer:
        """A part of this buffer."""
        return Buffer(self.data, self.label, self.space, self.place, self.key).lie_in(self, index)

    def _own_reads(self, component: int) -> np.ndarray:
        if self.whole is not None:
            return self.whole._own_reads(component)[self.index]
        if component not in self.readers:
            self.readers[component] = np.zeros(self.shape, np.int64)
        return self.readers[component]

    def _further_reads(self) -> Sequence[np.ndarray]:
        if self.whole is not None:
            return [stamps[self.index] for stamps in self.whole._further_reads()]
        return list(self.readers.values())

    def given(self) -> Buffer:
        """The buffer, its contents taken as written before everything else."""
        if self.writes is not None:
            self.writes[...] = GIVEN
        return self

    def read_by(self, actor: Actor, region: Region, site: int, view: int = 0) -> Conflict:
        """Note a read; None, or a write that nothing orders before it."""
        writes, reads = self.writes, self.reads
        assert writes is not None and reads is not None
        region = region.before_bitcast()
        clock, own = actor.clock, stamp(actor.component, actor.epoch, site)
        conflict = conflict_of("wrote", clock, view, region.get(writes))
        if clock.knows(view, one_stamp(region.get(reads))):
            region.put(reads, own)
        else:
            region.put(self._own_reads(actor.component), own)
        return conflict

    def written_by(self, actor: Actor, region: Region, site: int, view: int = 0) -> Conflict:
        """Note a write; None, or an access that nothing orders before it."""
        writes, reads = self.writes, self.reads
        assert writes is not None and reads is not None
        region = region.before_bitcast()
        conflict = conflict_of("wrote", actor.clock, view, region.get(writes))
        for stamps in (reads, *self._further_reads()):
            conflict = conflict or conflict_of("read", actor.clock, view, region.get(stamps))
        region.put(writes, stamp(actor.component, actor.epoch, site))
        return conflict

    def unwritten(self, region: Region) -> bool:
        """Whether an element of the region was never written."""
        assert self.writes is not None
        return bool((np.asarray(region.before_bitcast().get(self.writes)) == 0).any())

    def copied_from(self, region: Region, source: Buffer, part: Region) -> None:
        """What a copy brought of another buffer is as unwritten as it was there."""
        if self.writes is None or source.writes is None or not source.unwritten(part):
            return
        here, there = region.before_bitcast(), np.asarray(part.before_bitcast().get(source.writes))
        stamps = np.array(here.get(self.writes))
        if stamps.shape == there.shape:  # another shape: one of the views is a bitcast
            here.put(self.writes, np.where(there == 0, 0, stamps))


def one_stamp(stamps: Any) -> Any:
    """One stamp, where all are the same."""
    if isinstance(stamps, np.ndarray):
        if not stamps.size:
            return 0
        first = stamps.flat[0]
        if (stamps == first).all():
            return first
    return stamps


def conflict_of(verb: str, clock: Any, view: int, stamps: Any) -> Conflict:
    stamps = one_stamp(stamps)
    if clock.knows(view, stamps):
        return None
    if isinstance(stamps, np.ndarray):
        stamps = stamps[clock.unknown(view, stamps)].flat[0]
    return verb, int(stamps)


# --- bounds --------------------------------------------------------------------------------------------------------
def index_fits(index: Index, shape: Sequence[int]) -> int | None:
    """None, or the first dimension in which an index leaves a shape (a slice's whole length counts)."""
    for d, (i, n) in enumerate(zip(index, shape)):
        if isinstance(i, slice):
            if i.start < 0 or i.stop > n:
                return d
        elif isinstance(i, np.ndarray):
            if i.size and (i.min() < 0 or i.max() >= n):
                return d
        elif not 0 <= i < n:
            return d
    return None


def read_outside(array: np.ndarray, index: Index, fill: Any) -> Any:
    """What an index selects, with `fill` for elements that are not there."""
    places, inside = [], np.bool_(True)
    flat = [np.arange(i.start, i.stop, i.step) if isinstance(i, slice) else np.asarray(i) for i in index]
    for i, n in zip(flat, array.shape):
        places.append(np.clip(i, 0, max(n - 1, 0)))
    result = np.full(_shape_of(index, flat), fill, array.dtype)
    if 0 in array.shape:
        return result
    position, sizes = 0, result.ndim
    if all(f.ndim == 0 or isinstance(i, slice) for i, f in zip(index, flat)):
        grids = []
        for i, f, p, n in zip(index, flat, places, array.shape):
            shape = [1] * sizes
            if isinstance(i, slice):
                shape[position] = len(f)
                position += 1
            grids.append(p.reshape(shape))
            inside = inside & ((f >= 0) & (f < n)).reshape(shape)
        return np.where(inside, array[tuple(grids)], result)
    inside = math.prod(result.shape) > 0
    picked = array[tuple(p if not isinstance(i, slice) else i for i, p in zip(index, places))]
    valid = np.bool_(inside)
    for f, i, n in zip(flat, index, array.shape):
        if not isinstance(i, slice):
            valid = valid & ((f >= 0) & (f < n))
    valid = np.asarray(valid).reshape(np.shape(valid) + (1,) * (result.ndim - np.ndim(valid)))
    return np.where(valid, picked, result)


def _shape_of(index: Index, flat: Sequence[np.ndarray]) -> tuple[int, ...]:
    lengths = [len(f) for i, f in zip(index, flat) if isinstance(i, slice)]
    arrays = [f.shape for i, f in zip(index, flat) if not isinstance(i, slice) and f.ndim]
    return (*(np.broadcast_shapes(*arrays) if arrays else ()), *lengths)
