"""State spaces: global, shared (of all CTAs of a cluster), local; generic addresses; bounds and alignment.

Global memory is one array of bytes with a table of allocations, and gaps between them; constants and kernel parameters
live there, too, so that their generic addresses are their addresses. Shared memory of the CTA with rank r in its
cluster begins at `r << 24` of the shared window; its first KiB is reserved, as on hardware. Local memory has a row a
thread.
Source: PTX ISA manual, "State spaces", "Generic addressing"; facts file, 6.2.
"""

from __future__ import annotations

import bisect
import mmap
from typing import Any

import numpy as np

from palladion.emulator import proxies
from palladion.emulator.runtime import DTYPES

Array = np.ndarray

GLOBAL_BASE = 1 << 40
SHARED_WINDOW = 2 << 40
LOCAL_WINDOW = 3 << 40
RESERVED = 1024
"""Bytes at the beginning of each CTA's shared memory that belong to the system."""
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}
_GLOBAL, _SHARED, _LOCAL = np.uint64(GLOBAL_BASE), np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW)
_WINDOW = np.uint64(40)


class Global:
    """Global memory of a device.

    Attributes:
      bytes: all of it; address GLOBAL_BASE + i is bytes[i]. It never moves: the operating system provides pages of it
      when they are touched.
    """

    def __init__(self, limit: int = 1 << 35) -> None:
        while True:
            try:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
                self._pages = mmap.mmap(-1, limit, flags=flags)
                break
            except OSError:
                limit //= 2
                if limit < 1 << 26:
                    raise
        self.bytes = np.frombuffer(self._pages, np.uint8)
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.used = 4096
        self.typed = Views(self.bytes).typed

    def alloc(self, size: int, align: int = 256) -> int:
        """Address of `size` new bytes of zeros."""
        start = -(-self.used // align) * align
        if start + size + 256 > len(self.bytes):
            raise MemoryError(f"{size} bytes do not fit into the emulated device's {len(self.bytes)} bytes.")
        self.used = start + size + 256
        self.starts.append(start)
        self.ends.append(start + size)
        return GLOBAL_BASE + start

    def free(self, address: int) -> None:
        """Give an allocation back; later accesses to it are faults."""
        start = address - GLOBAL_BASE
        k = bisect.bisect_left(self.starts, start)
        if k == len(self.starts) or self.starts[k] != start:
            raise ValueError(f"{address:#x} is not the address of an allocation.")
        self.bytes[start : self.ends[k]] = 0
        del self.starts[k], self.ends[k]
        last = self.ends[-1] + 256 if self.ends else 4096
        if last < self.used:  # what comes last is used again, so that a long run does not fill the memory
            self.used = last

    def bounds(self, offset: int) -> tuple[int, int]:
        """The allocation around an offset: (start, end), or (0, 0)."""
        k = bisect.bisect_right(self.starts, offset) - 1
        return (self.starts[k], self.ends[k]) if k >= 0 and offset < self.ends[k] else (0, 0)


class Views:
    """Bytes of a memory, and the same as items of other types."""

    def __init__(self, data: Array) -> None:
        self.bytes = data
        self._views: dict[tuple[str, int], Array] = {}

    def typed(self, code: str, vector: int) -> Array:
        """All of it as items, or vectors of items."""
        found = self._views.get((code, vector))
        if found is None:
            found = _typed(self.bytes, code, vector)
            self._views[code, vector] = found
        return found


def _typed(data: Array, code: str, vector: int) -> Array:
    found = data.view(DTYPES[code])
    if code == "x":
        vector *= 2
    return found.reshape(-1, vector) if vector > 1 else found


# --- fast paths of generated code: one space, whole vectors -------------------------------------------------
def global_index(g: Any, addresses: Any, m: Any, nbytes: int, write: bool) -> Array:
    """Indices of checked accesses of `nbytes`, as int64; lanes that are off get another lane's."""
    offset = addresses - _GLOBAL
    if np.ndim(offset) == 0:
        offset = np.full(g.n, offset)
    if m is not None:
        first = int(m.argmax())
        if not m[first]:
            return None  # type: ignore[return-value]
        offset = np.where(m, offset, offset[first])
    memory = g.machine.memory
    start, end = memory.bounds(int(offset[0]))
    if end - start < nbytes or (offset - np.uint64(start) > np.uint64(end - start - nbytes)).any():
        _check_global(g, memory, offset, m, nbytes, write)
    if nbytes > 1 and int(np.bitwise_or.reduce(offset)) & (nbytes - 1):
        _misaligned(g, offset, m, nbytes, "global")
    return (offset >> np.uint64(SHIFT[nbytes])).view(np.int64)


def _check_global(g: Any, memory: Global, offset: Array, m: Any, nbytes: int, write: bool) -> None:
    starts, ends = np.array(memory.starts, np.uint64), np.array(memory.ends, np.uint64)
    k = np.searchsorted(starts, offset, "right") - 1
    bad = k < 0
    if len(starts):
        end = ends[np.maximum(k, 0)]
        bad = bad | (offset >= end) | (end - offset < np.uint64(nbytes))
    if bad.any():
        lane = first_of(bad, m)
        outside(g, "global", int(offset[lane]) + GLOBAL_BASE & (1 << 64) - 1, nbytes, write, lane)


def first_of(bad: Array, m: Any) -> int:
    """The first lane to blame: lanes that are off have been given the address of another one."""
    return int((bad if m is None else bad & m).argmax())


def outside(g: Any, space: str, address: int, nbytes: int, write: bool, lane: int | None) -> None:
    """Raise the fault of an access that is nowhere, with the nearest allocation if one is near."""
    does, hint = "writes" if write else "reads", None
    if space == "global":
        memory, offset = g.machine.memory, address - GLOBAL_BASE
        k = bisect.bisect_right(memory.starts, offset) - 1
        if address < 1 << 20:
            hint = "the address is almost zero: a null pointer, or a shared address without cvta"
        elif k >= 0 and offset - memory.ends[k] < 1 << 16 and offset >= memory.starts[k]:
            past = offset + nbytes - memory.ends[k]
            size = memory.ends[k] - memory.starts[k]
            hint = f"{past} bytes past the end of the allocation of {size} bytes at {memory.starts[k] + GLOBAL_BASE:#x}"
            if k + 1 < len(memory.starts) and memory.starts[k + 1] - offset < past:
                before, size = memory.starts[k + 1] - offset, memory.ends[k + 1] - memory.starts[k + 1]
                at = memory.starts[k + 1] + GLOBAL_BASE
                hint += f"; {before} bytes before the beginning of the one of {size} bytes at {at:#x}"
    elif space == "shared":
        hint = f"the CTA has {len(g.cta.shared) - RESERVED} bytes of shared memory, from {RESERVED:#x} on"
    message = f"A thread {does} {nbytes} bytes at {space} address {address:#x}, which is not there."
    g.fault("out-of-bounds", message, lane, hint)


def _misaligned(g: Any, offset: Array, m: Any, nbytes: int, space: str) -> None:
    lane = first_of((offset & offset.dtype.type(nbytes - 1)) != 0, m)
    base = GLOBAL_BASE if space == "global" else 0
    where = f"{space} address {int(offset[lane]) + base:#x}"
    message = f"A thread accesses {nbytes} bytes at {where}, not a multiple of {nbytes}."
    g.fault("misaligned", message, lane)


def shared_index(g: Any, addresses: Any, m: Any, nbytes: int, write: bool) -> tuple[Views, Array] | None:
    """(bytes of the memory, offsets) of checked accesses to this CTA's shared memory, or to its cluster's."""
    if np.ndim(addresses) == 0:
        addresses = np.full(g.n, addresses)
    if m is not None:
        first = int(m.argmax())
        if not m[first]:
            return None
        addresses = np.where(m, addresses, addresses[first])
    kind = addresses.dtype.type
    cta = g.cta
    offset = addresses - kind(cta.shared_base)
    room = len(cta.shared) - RESERVED - nbytes
    if room < 0 or (offset - kind(RESERVED) > kind(room)).any():
        return _remote_index(g, addresses, m, nbytes, write)
    if nbytes > 1 and int(np.bitwise_or.reduce(offset)) & (nbytes - 1):
        _misaligned(g, offset, m, nbytes, "shared")
    return cta.views, offset


def _remote_index(g: Any, addresses: Array, m: Any, nbytes: int, write: bool) -> tuple[Views, Array]:
    """Addresses some of which are in another CTA's window: all windows of a cluster lie in one array."""
    cluster = g.cta.cluster
    addresses = addresses.astype(np.uint64)
    rank, offset = addresses >> np.uint64(24), addresses & np.uint64(0xFFFFFF)
    bad = (rank >= len(cluster.ctas)) | (offset < RESERVED) | (offset + np.uint64(nbytes) > g.machine.window)
    if bad.any():
        lane = first_of(bad, m)
        outside(g, "shared", int(addresses[lane]), nbytes, write, lane)
    for r in np.unique(rank):
        if cluster.ctas[int(r)].ended:
            lane = first_of(rank == r, m)
            message = f"A thread accesses shared memory of CTA {int(r)} of the cluster, which has exited."
            g.fault("out-of-bounds", message, lane, "a cluster barrier before the CTAs exit")
    if nbytes > 1 and int(np.bitwise_or.reduce(offset)) & (nbytes - 1):
        _misaligned(g, offset, m, nbytes, "shared")
    return cluster.views, rank * np.uint64(g.machine.window_stride) + offset


def local_index(g: Any, addresses: Any, m: Any, nbytes: int, write: bool) -> Array:
    """Offsets in local memory of all threads."""
    if np.ndim(addresses) == 0:
        addresses = np.full(g.n, addresses)
    offset = addresses.astype(np.int64)
    if m is not None:
        offset = np.where(m, offset, 0)
    size = g.cta.local.shape[1]
    bad = (offset < 0) | (offset + nbytes > size)
    if bad.any():
        lane = first_of(bad, m)
        outside(g, "local", int(offset[lane]), nbytes, write, lane)
    if nbytes > 1 and int(np.bitwise_or.reduce(offset)) & (nbytes - 1):
        _misaligned(g, offset, m, nbytes, "local")
    return g.shape.threads * size + offset


def spaces_of(g: Any, addresses: Any, m: Any) -> list[tuple[str, Any, Any]]:
    """Generic addresses by space: (space, addresses in it, mask or None for all)."""
    if np.ndim(addresses) == 0:
        addresses = np.full(g.n, addresses, np.uint64)
    window = addresses >> _WINDOW
    first = int(window[0 if m is None else int(m.argmax())])
    same = window == np.uint64(first)
    if same.all() or (m is not None and same[m].all()):
        return [_in_window(g, first, addresses, m)]
    found = []
    for w in np.unique(window if m is None else window[m]):
        found.append(_in_window(g, int(w), addresses, (window == w) if m is None else m & (window == w)))
    return found


def _in_window(g: Any, window: int, addresses: Array, m: Any) -> tuple[str, Any, Any]:
    if window == SHARED_WINDOW >> 40:
        return "shared", addresses - _SHARED, m
    if window == LOCAL_WINDOW >> 40:
        return "local", addresses - _LOCAL, m
    return "global", addresses, m


# --- any space, bytes: what operations use ------------------------------------------------------------------
def places(
    g: Any, space: str, addresses: Any, nbytes: int, align: int, mask: Array, write: bool
) -> list[tuple[Array, Array, Array]]:
    """Where the lanes' accesses are: (bytes of a memory, offset of each chosen lane, chosen lanes), for each memory."""
    addresses = np.asarray(addresses)
    if addresses.ndim == 0:
        addresses = np.full(g.n, addresses)
    if not mask.any():
        return []
    found = []
    where = spaces_of(g, addresses.astype(np.uint64), mask) if space == "generic" else [(space, addresses, mask)]
    for name, local, chosen in where:
        chosen = mask if chosen is None else chosen
        buffer, offset = place(g, name, local, chosen, nbytes, align, write)
        found.append((buffer, offset[chosen], np.flatnonzero(chosen)))
    return found


def place(g: Any, space: str, addresses: Array, m: Any, nbytes: int, align: int, write: bool) -> tuple[Array, Array]:
    """(bytes of the memory, offsets as int64) for accesses of any size in one space; lanes that are off get any."""
    if space.startswith("shared"):
        found = shared_index(g, addresses, m, 1, write)
        assert found is not None
        last = shared_index(g, addresses + addresses.dtype.type(nbytes - 1), m, 1, write)
        views, offset = found
        assert last is not None and last[0] is views
        offset = offset.astype(np.int64)
        _align(g, offset, m, align, "shared")
        if write:
            written(g, views, offset, m, nbytes)
        return views.bytes, offset
    if space == "local":
        offset = local_index(g, addresses, m, 1, write)
        local_index(g, addresses + addresses.dtype.type(nbytes - 1), m, 1, write)
        return g.cta.local.reshape(-1), offset
    addresses = addresses.astype(np.uint64)
    global_index(g, addresses, m, 1, write)
    global_index(g, addresses + np.uint64(nbytes - 1), m, 1, write)
    offset = (addresses - _GLOBAL).view(np.int64)
    _align(g, offset, m, align, "global")
    return g.machine.memory.bytes, offset


def _align(g: Any, offset: Array, m: Any, align: int, space: str) -> None:
    offset = offset if m is None else np.where(m, offset, 0)
    if align > 1 and int(np.bitwise_or.reduce(offset)) & (align - 1):
        _misaligned(g, offset, m, align, space)


def written(g: Any, views: Any, offset: Array, m: Any, nbytes: int) -> None:
    """Tell those who keep account of what ordinary code writes to shared memory."""
    machine = g.machine
    if not machine.accounts:
        return
    chosen = slice(None) if m is None else m
    offset, threads = offset[chosen].astype(np.int64), g.shape.threads[chosen]
    if views is g.cta.views:
        _still_read(g, g.cta, offset, nbytes)
        g.cta.note_written(offset, nbytes, threads)
        return
    ranks, inner = np.divmod(offset, machine.window_stride)
    for cta in g.cta.cluster.ctas:
        mine = ranks == cta.rank
        if mine.any():
            who = threads[mine] if cta is g.cta else np.full(int(mine.sum()), proxies.FOREIGN)
            _still_read(g, cta, inner[mine], nbytes)
            cta.note_written(inner[mine], nbytes, who)


def _still_read(g: Any, cta: Any, offset: Array, nbytes: int) -> None:
    """Fault if a tensor-core operation under way may still read what is written."""
    under_way = cta.known_slot("operands")
    if under_way is not None and under_way.readers:
        from palladion.emulator.operands import check_overwrite

        if nbytes > 16:
            offset = np.concatenate([offset + k for k in range(0, nbytes, 16)])
        check_overwrite(g, cta, offset, "an ordinary store")


def locate_shared(g: Any, address: int) -> tuple[Any, int]:
    """The CTA and offset of a shared or generic address."""
    if address >= 1 << 40:
        if address >> 40 != SHARED_WINDOW >> 40:
            g.fault("out-of-bounds", f"Address {address:#x} is not in shared memory.")
        address -= SHARED_WINDOW
    rank, offset = address >> 24, address & 0xFFFFFF
    if rank >= len(g.cta.cluster.ctas) or not RESERVED <= offset < g.machine.window:
        outside(g, "shared", address, 1, False, g.first_active())
    return g.cta.cluster.ctas[rank], offset


def view(g: Any, space: str, address: int, nbytes: int, align: int, write: bool) -> Array:
    """The bytes at an address, checked."""
    if address % align:
        g.fault("misaligned", f"Address {address:#x} is not a multiple of {align} bytes.")
    if space == "generic":
        window = address >> 40
        space = {SHARED_WINDOW >> 40: "shared", LOCAL_WINDOW >> 40: "local"}.get(window, "global")
        if space == "local":
            address -= LOCAL_WINDOW
    if space.startswith("shared"):
        cta, offset = locate_shared(g, address)
        if offset + nbytes > g.machine.window:
            outside(g, "shared", address, nbytes, write, g.first_active())
        return cta.view(offset, nbytes, 1, write)
    if space == "local":
        lane = g.first_active()
        row = g.cta.local[int(g.threads[lane or 0])]
        if address + nbytes > len(row):
            outside(g, "local", address, nbytes, write, lane)
        return row[address : address + nbytes]
    start, end = g.machine.memory.bounds(address - GLOBAL_BASE)
    if address - GLOBAL_BASE + nbytes > end or end == 0:
        outside(g, "global", address, nbytes, write, g.first_active())
    del start
    return g.machine.memory.bytes[address - GLOBAL_BASE : address - GLOBAL_BASE + nbytes]
