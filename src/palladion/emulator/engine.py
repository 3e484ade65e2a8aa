"""What the asynchronous copy engines share: spans of shared memory, signals to mbarriers, bulk groups, leak checks.

Checks are made when an instruction is issued, where the lane is known; bytes move when the machine performs the
event. A store is two events, the reading of its source and the writing of its destination, because programs may
wait for either (`cp.async.bulk.wait_group.read`). Facts file 2.4 to 2.7.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from palladion.emulator.async_groups import AsyncGroups
from palladion.emulator.barrier import Barrier
from palladion.emulator.faults import EmulationFault
from palladion.emulator.mbarrier import check_alive, completed, find
from palladion.emulator.operands import check_overwrite
from palladion.emulator.proxies import check_async_read
from palladion.emulator.sources import sources


def stores(cta) -> AsyncGroups:
    """The bulk groups of a CTA's threads."""

    def make() -> AsyncGroups:
        cta.on_exit.append(_no_store_reads)
        return AsyncGroups(len(cta.live))

    return cta.slot("bulk", make)


def _incoming(cta) -> list:
    """Copies into a CTA's shared memory, by whomever."""

    def make() -> list:
        cta.on_exit.append(_nothing_arrives)
        return []

    return cta.slot("incoming", make)


def _no_store_reads(cta) -> None:
    pending = [r for r in stores(cta).records if not r.reads.done]
    if pending:
        threads = sorted({int(t) for r in pending for t in r.threads})[:4]
        raise EmulationFault(
            "missing-wait",
            f"the CTA exits while {len(pending)} bulk stores of thread {', '.join(map(str, threads))} may still read "
            "its shared memory",
            hint="cp.async.bulk.commit_group and cp.async.bulk.wait_group.read 0 come before the exit",
        )


def _nothing_arrives(cta) -> None:
    pending = [e for e in _incoming(cta) if not e.done]
    if pending:
        raise EmulationFault(
            "missing-wait",
            f"the CTA exits while {len(pending)} copies into its shared memory are in flight: {pending[0].what}",
            hint="wait on the copy's mbarrier before the exit",
        )


def shared_span(group, address: int, size: int, align: int, lane: int, what: str, own: bool = False):
    """The CTA and offset of `size` bytes of shared memory that a copy reads or writes.

    Raises: EmulationFault: "misaligned", "out-of-bounds", or another CTA's where `own` is demanded."""
    cta, offset = group.locate_shared(int(address))
    if offset % align:
        group.fault("misaligned", f"{what}: shared address {offset:#x} is not a multiple of {align} bytes", lane=lane)
    if cta is not group.cta:
        if own:
            group.fault(
                "out-of-bounds",
                f"{what}: the shared memory is of CTA {cta.rank} of the cluster, and this form takes only the "
                f"executing CTA's ({group.cta.rank})",
                lane=lane,
            )
        check_alive(group, cta, lane)
    check_room(group, cta, offset, size, lane, what)
    return cta, offset


def check_room(group, cta, offset: int, size: int, lane: int, what: str) -> None:
    """Fault if `size` bytes from `offset` are not all in a CTA's shared memory."""
    if size and offset + size > len(cta.shared):
        group.fault(
            "out-of-bounds",
            f"{what}: {size} bytes at shared byte {offset:#x} pass the end of the CTA's shared memory "
            f"({len(cta.shared):#x})",
            lane=lane,
        )


def multiple_of_16(group, value: int, name: str, lane: int, what: str) -> None:
    """Fault unless a global address or a size is a multiple of 16 bytes."""
    if value % 16:
        group.fault("misaligned", f"{what}: {name} {value:#x} is not a multiple of 16 bytes", lane=lane)


def scatter(cta, offsets: np.ndarray, data: np.ndarray) -> None:
    """The asynchronous proxy writes bytes `data` at byte `offsets` of a CTA's shared memory."""
    cta.shared[offsets] = data
    if cta.initialized is not None:
        cta.initialized[offsets] = True
    if cta.unfenced is not None:
        cta.unfenced.overwritten(offsets)


@dataclass(frozen=True)
class Signal:
    """A barrier to be told of bytes, and the phase it was in when the copy was issued."""

    cta: Any
    barrier: Barrier
    phase: int

    def send(self, count: int, what: str) -> None:
        """`complete_tx` of `count` bytes."""
        completed(self.cta, self.barrier, count, self.phase, what)


def signal(group, address: int, lane: int) -> Signal:
    """The signal to the mbarrier at an address of the cluster's shared memory."""
    cta, barrier = find(group, address, lane)
    return Signal(cta, barrier, barrier.phase)


def signal_at(group, cta, offset: int, lane: int) -> Signal:
    """The signal to the mbarrier at an offset of a CTA of the cluster."""
    return signal(group, cta.shared_address(offset), lane)


def multicast_targets(group, mask: int, lane: int, what: str) -> list:
    """The CTAs of the cluster that a multicast mask names."""
    ctas = group.cluster.ctas
    mask &= 0xFFFF
    if mask == 0 or mask >> len(ctas):
        group.fault(
            "out-of-bounds",
            f"{what}: the multicast mask {mask:#06x} names CTAs that are not among the {len(ctas)} of the cluster",
            lane=lane,
        )
    chosen = [cta for rank, cta in enumerate(ctas) if mask >> rank & 1]
    for cta in chosen:
        check_alive(group, cta, lane)
    return chosen


def load(group, lane: int, what: str, fetch, places, signals, count: int):
    """Queue a copy into shared memory.

    Arguments: fetch: () -> uint8 data; places: [(cta, byte offsets)], each given the data; signals: told of
        `count` bytes each when the data is there."""

    for cta, offsets in places:
        check_overwrite(group, cta, offsets, what, lane)
        sources(cta).check(offsets, what)

    def run():
        data = fetch()
        for cta, offsets in places:
            scatter(cta, offsets, data)
        for one in signals:
            one.send(count, what)

    event = group.machine.queue(run, what, group)
    for cta, _ in places:
        arriving = _incoming(cta)
        arriving[:] = [e for e in arriving if not e.done]
        arriving.append(event)
    return event


def store(group, lane: int, what: str, offsets: np.ndarray, put) -> None:
    """Queue a copy out of the executing CTA's shared memory, in the thread's open bulk group.

    Arguments: offsets: bytes of shared memory that it reads; put: (data) -> None, writes the destination."""
    cta, thread = group.cta, int(group.threads[lane])
    check_async_read(group, cta, offsets, what, lane)
    sources(cta).begin(thread, int(stores(cta).committed[thread]), offsets, what)
    taken = []
    reads = group.machine.queue(lambda: taken.append(cta.shared[offsets]), f"{what} (reading)", group)
    event = group.machine.queue(lambda: put(taken[0]), what, group, after=(reads,))
    stores(cta).issued(group.threads[lane : lane + 1].copy(), event, reads)
