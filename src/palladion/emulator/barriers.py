"""Named barriers of a CTA: `bar`, `barrier`, `barrier.cta` with sync, arrive and red.

A warp counts with all of its 32 threads once those of them that have not exited are there. Aligned forms (and all of
`bar`) need the warp together, so that the machine gathers it first; with the others lanes come as they like, and
are kept until their warp is complete. A barrier of the whole CTA does not wait for warps that have exited.
Source: PTX ISA manual, "bar, barrier".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator.ptx import Instruction
from palladion.emulator.registry import Wait, operation

Array = np.ndarray
COUNT = 16
"""Barriers of a CTA."""


@dataclass
class Named:
    """One of the barriers.

    Attributes:
      phase: how often it has completed.
      arrived: threads that count: 32 of each warp that has come.
      here: those that came, for reports and for the accounts of the proxies.
      early: by warp, lanes that came before the rest of their warp.
      wanted: threads that complete it; 0: all of the CTA that have not exited.
      votes: (number, how many) of predicates that hold, of `red`; result: those of the last phase.
    """

    phase: int = 0
    arrived: int = 0
    here: list[Array] = field(default_factory=list)
    early: dict[int, Array] = field(default_factory=dict)
    wanted: int | None = None
    votes: list[int] = field(default_factory=lambda: [0, 0])
    result: tuple[int, int] = (0, 0)


def _barriers(cta: Any) -> list[Named]:
    return cta.slot("named barriers", lambda: [Named() for _ in range(COUNT)])


def _number(group: Any, barrier: Any, lane: int) -> int:
    """The barrier that a lane names."""
    number = int(group.array(barrier)[lane])
    if not 0 <= number < COUNT:
        group.fault("out-of-bounds", f"There is no barrier {number}: a CTA has {COUNT}.", lane)
    return number


def _next(group: Any, barrier: Any, count: Any, lanes: Array) -> Array:
    """Those of some lanes that come to a barrier first: they name the same one, and it has room for their warps."""
    for operand in (barrier, count):
        if isinstance(operand, np.ndarray):
            lanes = lanes & (operand == operand[lanes.argmax()])
    if count is None:
        return lanes
    first = int(lanes.argmax())
    found = _barriers(group.cta)[_number(group, barrier, first)]
    room = (int(group.array(count)[first]) - found.arrived) // 32
    warps = lanes.reshape(-1, 32).any(1)
    return lanes & np.repeat(warps.cumsum() <= max(room, 1), 32)


def _one_at_a_time(group: Any, barrier: Any, count: Any) -> None:
    """Where the warps of a group come to different barriers, they go on apart."""
    lanes = _next(group, barrier, count, group.active)
    if (lanes == group.active).all():
        return
    first = _barriers(group.cta)[_number(group, barrier, int(lanes.argmax()))]
    before = (first.phase, len(first.here))
    raise Wait(lambda: (first.phase, len(first.here)) != before, "waits for its turn", ready=lanes)


def _wanted(group: Any, barrier: Named, number: int, count: Any, lane: int) -> None:
    """Note how many threads complete a barrier, 0 for all; it must be the same for everybody."""
    wanted = 0 if count is None else int(group.array(count)[lane])
    if count is not None and (wanted % 32 or wanted <= 0):
        message = f"Barrier {number} is given {wanted} threads, which is no number of whole warps."
        group.fault("barrier-arrivals", message, lane)
    if barrier.wanted is None:
        barrier.wanted = wanted
    elif barrier.wanted != wanted:
        have = barrier.wanted or "all"
        message = f"Barrier {number} waits for {have} threads, and a thread arrives that says {wanted or 'all'}."
        group.fault("barrier-arrivals", message, lane, "every thread that takes part gives the same number")


def arrive(group: Any, number: int, count: Any, active: Array, vote: Any = None) -> Named:
    """Some lanes have come to a barrier."""
    cta = group.cta
    barrier = _barriers(cta)[number]
    _wanted(group, barrier, number, count, int(active.argmax()))
    threads = group.threads[active]
    if vote is not None:
        holds = np.asarray(group.array(vote, bool))[active]
        barrier.votes[0] += int(holds.sum())
        barrier.votes[1] += len(holds)
    barrier.here.append(threads)
    rows = active.reshape(-1, 32)
    if not barrier.early and (active == cta.live[group.threads]).all():  # the usual case: all warps are complete
        barrier.arrived += 32 * int(np.count_nonzero(rows.any(1)))
    else:
        for warp, lanes in zip(group.warps.tolist(), rows, strict=True):
            if lanes.any():
                early = barrier.early.pop(warp, None)
                barrier.early[warp] = lanes if early is None else lanes | early
    _complete(group, cta, barrier, number)
    return barrier


def _complete(group: Any, cta: Any, barrier: Named, number: int) -> None:
    """Count the warps that are complete; start the next phase if they are enough."""
    live = cta.live.reshape(-1, 32)
    for warp in [w for w, lanes in barrier.early.items() if not (live[w] & ~lanes).any()]:
        del barrier.early[warp]
        barrier.arrived += 32
    if barrier.wanted is None:
        return
    wanted = barrier.wanted or 32 * cta.live_warps()
    if barrier.wanted and barrier.arrived > wanted:
        message = f"{barrier.arrived} threads have arrived at barrier {number}, which waits for {wanted}."
        group.fault("barrier-arrivals", message)
    if barrier.arrived < wanted:
        return
    if cta.unfenced is not None:
        cta.unfenced.passed_on(np.concatenate(barrier.here))
    barrier.result = (barrier.votes[0], barrier.votes[1])
    barrier.phase += 1
    barrier.arrived, barrier.here, barrier.wanted, barrier.votes = 0, [], None, [0, 0]


class _Reason:
    """What a group waits for, with the counts of the moment when it is reported."""

    def __init__(self, cta: Any, barrier: Named, number: int) -> None:
        self.cta, self.barrier, self.number = cta, barrier, number

    def __str__(self) -> str:
        have = self.barrier.arrived + sum(int(lanes.sum()) for lanes in self.barrier.early.values())
        wanted = self.barrier.wanted or 32 * self.cta.live_warps()
        return f"waits at barrier {self.number}, where {have} of {wanted} threads are"


def _wait(group: Any, barrier: Named, phase: int, number: int, finish: Callable[[], Any]) -> None:
    cta = group.cta

    def over() -> bool:
        if barrier.phase == phase:  # threads that have exited meanwhile are not waited for
            _complete(group, cta, barrier, number)
        return barrier.phase != phase

    raise Wait(over, _Reason(cta, barrier, number), finish=finish)  # type: ignore[arg-type]


def _gathers(instr: Instruction) -> str | None:
    return "warp" if instr.name == "bar" or instr.has("aligned") else None


def _forms(what: str) -> tuple[str, ...]:
    return f"bar.{what}", f"bar.cta.{what}", f"barrier.{what}", f"barrier.cta.{what}"


@operation(*_forms("sync"), parks=True, collective=_gathers)
def _sync(group: Any, instr: Instruction, barrier: Any = 0, count: Any = None) -> None:
    _one_at_a_time(group, barrier, count)
    number = _number(group, barrier, group.first_active())
    phase = _barriers(group.cta)[number].phase
    found = arrive(group, number, count, group.active)
    if found.phase == phase:
        _wait(group, found, phase, number, lambda: ())


@operation(*_forms("arrive"), parks=True, collective=_gathers)
def _arrive(group: Any, instr: Instruction, barrier: Any, count: Any = None) -> None:
    rest = group.active
    while rest.any():
        lanes = _next(group, barrier, count, rest)
        arrive(group, _number(group, barrier, int(lanes.argmax())), count, lanes)
        rest = rest & ~lanes


@operation(*_forms("red"), out=1, parks=True, collective=_gathers)
def _red(group: Any, instr: Instruction, barrier: Any, *rest: Any) -> Any:
    """The predicates of all threads at the barrier: how many hold, whether all or some do."""
    count, vote = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0])
    _one_at_a_time(group, barrier, count)
    number = _number(group, barrier, group.first_active())
    phase = _barriers(group.cta)[number].phase
    found = arrive(group, number, count, group.active, vote)

    def result() -> Any:
        holds, voted = found.result
        if instr.has("popc"):
            return np.uint32(holds)
        return np.bool_(holds == voted if instr.has("and") else holds > 0)

    if found.phase == phase:
        _wait(group, found, phase, number, result)
    return result()
