"""The mbarrier instructions, on `barrier.Barrier` objects kept by CTA and offset.

Each CTA keeps its barriers in a slot, by offset; shared memory holds the word of each, so that bytes that
something else overwrites, or a use without `mbarrier.init`, are faults and not silence. Waiting parks the group
until the barrier's phase is over: `try_wait` therefore never gives false here, which its time limit allows, and
`test_wait` polls. Facts file, section 1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.emulator.barrier import Barrier, BarrierError
from palladion.emulator.faults import EmulationFault
from palladion.emulator.registry import Wait, operation


class Told:
    """Words about a wait that are found when they are shown, in the report of a deadlock, not when it began."""

    def __init__(self, tell: Callable[[], str]):
        self._tell = tell

    def __str__(self) -> str:
        return self._tell()


def barriers(cta) -> dict[int, Barrier]:
    """The initialised barriers of a CTA by offset in its shared window."""
    return cta.slot("mbarrier", dict)


def store(cta, barrier: Barrier) -> None:
    cta.view(barrier.offset, 8, 8, write=True).view(np.uint64)[0] = barrier.word


def find(group, address: int, lane: int | None = None, own: bool = False):
    """The CTA and the barrier at a shared or generic address, for an instruction that one lane executes.

    Arguments: own: the instruction takes only barriers of the executing CTA.
    Raises: EmulationFault if the address is misaligned, holds no barrier, or the wrong CTA's."""
    cta, offset = group.locate_shared(int(address))
    if offset % 8:
        group.fault("misaligned", f"mbarrier address {int(address):#x} is not a multiple of 8 bytes", lane=lane)
    if cta is not group.cta:
        if own:
            group.fault(
                "barrier-remote",
                f"this instruction works on the executing CTA's own mbarriers only, and {int(address):#x} is of "
                f"CTA {cta.rank} of the cluster (executing: {group.cta.rank})",
                lane=lane,
            )
        check_alive(group, cta, lane)
    barrier = barriers(cta).get(offset)
    if barrier is None:
        near = [f"{o:#x}" for o in sorted(barriers(cta))][:8]
        raise group.fault(
            "barrier-uninitialized",
            f"no mbarrier was initialised at shared byte {offset:#x} of CTA {cta.rank} (initialised there: "
            f"{', '.join(near) or 'none'}); mbarrier.init comes first, and a barrier other threads can see it by",
            lane=lane,
        )
    check_intact(group, cta, barrier, lane)
    if cta is not group.cta and not barrier.published:
        group.fault(
            "missing-fence",
            f"{barrier} of CTA {cta.rank} is used from CTA {group.cta.rank}, and nothing made its initialisation "
            "visible to the cluster: fence.mbarrier_init.release.cluster (or barrier.cluster.arrive with release) "
            "by the thread that initialised it, then a cluster barrier",
            lane=lane,
        )
    return cta, barrier


def check_alive(group, cta, lane: int | None = None) -> None:
    """Fault if a CTA of the cluster, whose shared memory is about to be used from another, has exited."""
    if not cta.live.any():
        group.fault(
            "race",
            f"shared memory of CTA {cta.rank} of the cluster is used by CTA {group.cta.rank} after that CTA has "
            "exited; a cluster barrier before the exit keeps it alive",
            lane=lane,
        )


def check_intact(group, cta, barrier: Barrier, lane: int | None = None) -> None:
    """Fault if something else wrote over a barrier's eight bytes."""
    if int(cta.view(barrier.offset, 8, 8).view(np.uint64)[0]) != barrier.word:
        group.fault(
            "barrier-overwritten",
            f"the bytes of the {barrier} (CTA {cta.rank}) were overwritten; mbarrier.inval must come before its "
            "memory is used for anything else",
            lane=lane,
        )


def arrived(cta, barrier: Barrier, count: int = 1) -> None:
    """An asynchronous arrival (of `tcgen05.commit`, say) of `count`, for use in an event.

    Raises: EmulationFault, which the machine completes with the instruction that queued the event."""
    check_current(cta, barrier)
    try:
        barrier.arrive(count)
    except BarrierError as error:
        raise EmulationFault(error.kind, str(error)) from None
    store(cta, barrier)


def completed(cta, barrier: Barrier, count: int, phase: int, what: str) -> None:
    """`complete_tx` by an asynchronous operation that was issued in phase `phase`, for use in an event.

    Raises: EmulationFault if the phase has ended without waiting for these bytes."""
    check_current(cta, barrier)
    if barrier.phase != phase:
        raise EmulationFault(
            "barrier-bytes",
            f"phase {phase} ended before the {count} bytes of a {what} issued in it had landed: the bytes "
            f"expected by arrive.expect_tx are fewer than the copies move ({barrier})",
        )
    try:
        barrier.complete(count)
    except BarrierError as error:
        raise EmulationFault(error.kind, f"{what}: {error}") from None
    store(cta, barrier)


def check_current(cta, barrier: Barrier) -> None:
    """Raise if a barrier that an operation in flight is to signal was invalidated or overwritten meanwhile."""
    if barriers(cta).get(barrier.offset) is not barrier:
        raise EmulationFault(
            "barrier-uninitialized", f"{barrier} was invalidated while an operation in flight was to signal it"
        )
    if int(cta.view(barrier.offset, 8, 8).view(np.uint64)[0]) != barrier.word:
        raise EmulationFault("barrier-overwritten", f"the bytes of the {barrier} (CTA {cta.rank}) were overwritten")


def by_address(group, *values):
    """The active lanes' values by distinct barrier address: yields (indices of lanes, values of the first)."""
    address = group.array(values[0])
    active = group.active_indices()
    if not len(active):
        return
    own = address[active]
    if (own == own[0]).all():
        yield active, int(own[0])
        return
    for one in dict.fromkeys(own.tolist()):
        yield active[own == one], int(one)


def _guarded(group, lane, action, *arguments, **options):
    try:
        return action(*arguments, **options)
    except BarrierError as error:
        raise group.fault(error.kind, str(error), lane=int(lane)) from None


# ------------------------------------------------------------------------------------------------ the instructions


@operation("mbarrier.init")
def init(group, instr, address, count) -> None:
    """`mbarrier.init.b64 [a], n`."""
    counts = group.array(count)
    for lanes, at in by_address(group, address):
        cta, offset = group.locate_shared(at)
        lane = int(lanes[0])
        if offset % 8:
            group.fault("misaligned", f"mbarrier address {at:#x} is not a multiple of 8 bytes", lane=lane)
        if cta is not group.cta:
            group.fault(
                "barrier-remote", f"mbarrier.init of CTA {cta.rank}'s memory by CTA {group.cta.rank}", lane=lane
            )
        table = barriers(cta)
        if len(lanes) > 1 or offset in table:
            again = f"{table[offset]} is initialised again" if offset in table else "several threads initialise it"
            group.fault(
                "barrier-reinitialized",
                f"mbarrier at shared byte {offset:#x}: {again}; one thread initialises a barrier once, and "
                "mbarrier.inval comes before a second time",
                lane=lane,
            )
        by = int(group.threads[lane])
        table[offset] = _guarded(group, lane, Barrier, offset, int(counts[lane]), by)
        store(cta, table[offset])


@operation("mbarrier.inval")
def inval(group, instr, address) -> None:
    """`mbarrier.inval.b64 [a]`: the memory is free for other uses."""
    for lanes, at in by_address(group, address):
        cta, barrier = find(group, at, int(lanes[0]), own=True)
        del barriers(cta)[barrier.offset]


def _arrive(group, instr, address, count, drop: bool):
    bytes_expected = instr.has("expect_tx")
    partial = instr.has("noComplete")
    counts = group.array(1 if count is None else count)
    tokens = np.zeros(group.n, np.uint64)
    if not instr.has("relaxed"):
        # Whoever waits on the barrier learns of what these threads stored before.
        if group.cta.unfenced is not None:
            group.cta.unfenced.passed_on(group.threads[group.active])
    for lanes, at in by_address(group, address):
        cta, barrier = find(group, at, int(lanes[0]), own=partial)
        values = counts[lanes].astype(np.int64)
        together = not bytes_expected and len(lanes) > 1 and not partial and int(values.sum()) <= barrier.pending
        if together:
            before = np.cumsum(values) - values
            tokens[lanes] = np.uint64(barrier.token) - before.astype(np.uint64)
            _guarded(group, lanes[0], barrier.arrive, int(values.sum()), drop)
        else:
            for lane, value in zip(lanes.tolist(), values.tolist()):
                tokens[lane] = barrier.token
                if bytes_expected:
                    _guarded(group, lane, barrier.expect, value)
                    value = 1
                _guarded(group, lane, barrier.arrive, value, drop, not partial)
        store(cta, barrier)
    return tokens


@operation("mbarrier.arrive", out=1)
def arrive(group, instr, address, count=None):
    """`mbarrier.arrive{.expect_tx}{.noComplete}.b64 state|_, [a]{, n}`, also on a remote barrier."""
    return _arrive(group, instr, address, count, drop=False)


@operation("mbarrier.arrive_drop", out=1)
def arrive_drop(group, instr, address, count=None):
    """`mbarrier.arrive_drop{.expect_tx}.b64 state|_, [a]{, n}`: later phases expect fewer arrivals."""
    return _arrive(group, instr, address, count, drop=True)


@operation("mbarrier.expect_tx")
def expect_tx(group, instr, address, count) -> None:
    """`mbarrier.expect_tx.b64 [a], bytes`."""
    counts = group.array(count)
    for lanes, at in by_address(group, address):
        cta, barrier = find(group, at, int(lanes[0]))
        for lane in lanes:
            _guarded(group, lane, barrier.expect, int(counts[lane]))
        store(cta, barrier)


@operation("mbarrier.complete_tx")
def complete_tx(group, instr, address, count) -> None:
    """`mbarrier.complete_tx.b64 [a], bytes`, as an asynchronous engine would do it."""
    counts = group.array(count)
    for lanes, at in by_address(group, address):
        cta, barrier = find(group, at, int(lanes[0]))
        for lane in lanes:
            _guarded(group, lane, barrier.complete, int(counts[lane]))
        store(cta, barrier)


def by_parity(instr) -> bool:
    """Whether a wait names its phase by parity; else by the token of an arrival."""
    return instr.has("parity")


def _states(group, instr, address, phase):
    """Per active lane whether its phase is over, and the barriers with what is awaited."""
    done = np.zeros(group.n, bool)
    awaited = []
    phases = group.array(phase)
    for lanes, at in by_address(group, address):
        cta, barrier = find(group, at, int(lanes[0]), own=True)
        ask = barrier.parity_done if by_parity(instr) else barrier.token_done
        for value in set(phases[lanes].tolist()):
            over = ask(int(value))
            done[lanes[phases[lanes] == value]] = over
            if not over:
                awaited.append((cta, barrier, ask, int(value)))
    return done, awaited


@operation("mbarrier.test_wait", out=1)
def test_wait(group, instr, address, phase):
    """`mbarrier.test_wait{.parity}.b64 p, [a], phase`: one look."""
    done, awaited = _states(group, instr, address, phase)
    if awaited:
        group.poll()
    return done


@operation("mbarrier.try_wait", out=1, parks=True)
def try_wait(group, instr, address, phase, hint=None):
    """`mbarrier.try_wait{.parity}.b64 p, [a], phase{, ns}`: parks until the phase is over."""
    done, awaited = _states(group, instr, address, phase)
    if not awaited:
        return done
    kind = "parity" if by_parity(instr) else "token"
    reason: Any = Told(lambda: "; ".join(f"{b} (waiting for the phase of {kind} {v})" for _, b, _, v in awaited[:3]))

    def until():
        return any(barriers(cta).get(b.offset) is not b or ask(value) for cta, b, ask, value in awaited)

    ready = done & group.active
    if ready.any():
        raise Wait(until, reason, ready=ready)
    raise Wait(until, reason)


@operation("mbarrier.pending_count", out=1)
def pending_count(group, instr, state):
    """`mbarrier.pending_count.b64 r, state`: the arrivals that were pending when the state was taken."""
    return (group.array(state) & np.uint64(0xFFFFF)).astype(np.uint32)
