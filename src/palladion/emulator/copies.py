"""`cp.async` (not the bulk kind): each lane copies 4, 8 or 16 bytes from global to shared memory, some time later.

Global memory is read when the copy is issued and shared memory written when it is performed, which a program can
only tell from a race. Facts file 2.9 and 1.6.
"""

import numpy as np

from palladion.emulator.async_groups import AsyncGroups
from palladion.emulator.mbarrier import arrived, by_address, find, store
from palladion.emulator.registry import Wait, operation


def groups(cta) -> AsyncGroups:
    """The cp.async groups of a CTA's threads."""
    return cta.slot("cp.async", lambda: AsyncGroups(len(cta.live)))


@operation("cp.async")
def cp_async(group, instr, target, source, size, *rest) -> None:
    """`cp.async.{ca|cg}.shared.global [dst], [src], size{, srcSize | ignoreSrc}{, policy};`"""
    width = int(size)
    if width not in (4, 8, 16) or (instr.has("cg") and width != 16):
        group.fault("illegal-shape", f"cp.async of {width} bytes: .ca copies 4, 8 or 16, .cg 16")
    mask = group.active.copy()
    lengths = np.full(group.n, width, np.int64)
    if (rest and not instr.has("L2::cache_hint")) or len(rest) > 1:
        given = group.array(rest[0])
        lengths = np.where(given, 0, width) if given.dtype == bool else given.astype(np.int64)
    if (lengths[mask] > width).any():
        group.fault("illegal-shape", f"cp.async: srcSize {lengths[mask].max()} is more than the {width} bytes copied")
    data = np.zeros((group.n, width), np.uint8)
    for length in np.unique(lengths[mask]).tolist():
        if length:
            some = mask & (lengths == length)
            data[some, :length] = group.read("global", source, length, mask=some, align=width)[some]
    address = group.array(target).copy()
    # Where the bytes go is checked now, as the lanes are known here.
    group.read("shared", address, width, mask=mask, align=width)
    cta, offsets = group.cta, (address[mask].astype(np.int64) & 0xFFFFFF)
    threads = group.threads[mask].copy()

    def run():
        cta.shared[offsets[:, None] + np.arange(width)] = data[mask]
        cta.note_written(offsets, width, threads)

    event = group.machine.queue(run, f"cp.async of {width} bytes a thread", group)
    groups(cta).issued(threads, event)


@operation("cp.async.commit_group")
def commit_group(group, instr) -> None:
    """`cp.async.commit_group;`"""
    groups(group.cta).commit(group.threads[group.active])


def _wait(group, what: str, allowed: int | None) -> None:
    events = groups(group.cta).unfinished(group.threads[group.active], allowed)
    if events:
        raise Wait(lambda: all(e.done for e in events), f"{len(events)} cp.async operations ({what})")


@operation("cp.async.wait_group", parks=True)
def wait_group(group, instr, allowed) -> None:
    """`cp.async.wait_group N;`: at most the N latest groups unfinished."""
    _wait(group, f"wait_group {int(allowed)}", int(allowed))


@operation("cp.async.wait_all", parks=True)
def wait_all(group, instr) -> None:
    """`cp.async.wait_all;`"""
    _wait(group, "wait_all", None)


@operation("cp.async.mbarrier.arrive")
def mbarrier_arrive(group, instr, address) -> None:
    """`cp.async.mbarrier.arrive{.noinc}.b64 [a];`: arrive once the thread's earlier copies are done."""
    earlier = groups(group.cta).unfinished(group.threads[group.active], None)
    for lanes, at in by_address(group, address):
        cta, barrier = find(group, at, int(lanes[0]), own=True)
        if not instr.has("noinc"):
            for _ in lanes:
                barrier.pledge()
            store(cta, barrier)
        count = len(lanes)
        group.machine.queue(
            lambda cta=cta, barrier=barrier, count=count: arrived(cta, barrier, count),
            "cp.async.mbarrier.arrive",
            group,
            after=tuple(earlier),
        )
