"""Copies that the blocks of a cluster make together (TMA multicast), on the simulated GPU.

Every block along the collective axes issues the same copy. Each brings a share of the data and writes it to the SMEM
of all of them, when it likes: an early block writes while another one may still read, which is why such buffers need a
ClusterBarrier before they are used again. A block's barrier gets its arrival when all shares have landed. The k-th
collective copy of a block on a barrier belongs to the k-th of the others.

With `leader_tracked` only the first block's barrier is told; the other block cannot wait for the copy.

Source: the Mosaic GPU reference, "Collective copies", "Leader-tracked collective copies" and "ClusterBarrier".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from palladion.language.gpu.partition import CopyPartition
from palladion.simulator.clocks import Actor, Clock
from palladion.simulator.code import location
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.barriers import Barrier, Barriers, partners
from palladion.simulator.gpu.boxes import Box, note_copy
from palladion.simulator.gpu.chip import TMA_LATENCY
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import ASYNC, Block, Thread, Who
from palladion.simulator.gpu.views import in_block
from palladion.simulator.memory import Region


@dataclasses.dataclass
class Copy:
    """A copy that a block issues. Attributes: who and which line; from where to where, in its own block; how long."""

    thread: Thread
    eqn: Any
    site: int
    name: Who
    source: Buffer
    box: Box
    goal: Buffer
    part: Region
    fill: Any
    duration: float

    def what(self) -> Any:
        """What must be the same in all blocks."""
        source = self.source.key, getattr(self.source.place, "id", None)
        region = None if self.box.region is None else shown(self.box.region)
        return source, region, self.box.shape, self.goal.key, shown(self.part)


def shown(region: Region) -> str:
    """A region as a text that is the same for the same region."""
    return repr([(kind, [i.tolist() if isinstance(i, np.ndarray) else i for i in how] if kind == "index" else how)
                 for kind, how in region.views])  # fmt: skip


@dataclasses.dataclass
class Request:
    """A request for another cluster that a block makes. Attributes: who and which line; where its result goes;
    `write(actor, results)` makes the request."""

    thread: Thread
    eqn: Any
    site: int
    name: Who
    result: Buffer
    part: Region
    write: Callable[[Actor | None, list[Buffer]], None]

    def what(self) -> Any:
        """What must be the same in all blocks."""
        return self.result.key, shown(self.part)


class Meeting:
    """One collective copy, from the first block that issues it until its last share has landed. To the engine it is
    what the shares signal; it arrives on the barriers in turn.

    Attributes:
      first: the first copy that was issued. group: the blocks. came: the ranks of those that issued it.
      barriers: that get an arrival. coming: operations in flight.
    """

    def __init__(self, first: Copy | Request, group: Sequence[Block], mode: Any, barriers: Sequence[Barrier]) -> None:
        self.first, self.group, self.mode, self.barriers = first, group, mode, barriers
        self.came: set[int] = set()
        self.coming: dict[int, Any] = {}
        self._landed, self._clock, self._latest = 0, None, 0.0

    @property
    def eqn(self) -> Any:
        """The line of the first."""
        return self.first.eqn

    @property
    def signals(self) -> list[Any]:
        """What its operations signal: the barriers too, so that a wait on one completes what it waits for."""
        return [*((barrier, 0) for barrier in self.barriers), (self, 1)]

    def incomplete(self) -> str | None:
        """A sentence about blocks that did not issue the copy, or None."""
        missing = [b.name for b in self.group if b.rank not in self.came]
        if not missing:
            return None
        return f"{self.first.name} is collective, and {', '.join(missing)} did not issue it."

    def add(self, amount: int, clock: Clock | None, time: float = 0.0, where: Any = None) -> None:
        """A share has landed."""
        self._landed += amount
        self._latest = max(self._latest, time)
        if clock is not None:
            if self._clock is None:
                self._clock = clock.copy()
            else:
                self._clock.join(clock)
        if self._landed == len(self.group):
            for barrier in self.barriers:
                barrier.add(1, self._clock, self._latest, where)


def start(agent: Agent, copy: Copy, barriers: Barriers, which: Region, axes: Sequence[Any], mode: Any) -> None:
    """Issue a block's part of a collective copy.

    Arguments:
      barriers, which: its barrier. axes: the cluster axes along which blocks copy together.
      mode: a `CopyPartition`, where only the first block's barrier is told; else None.
    """
    meeting, group = _meet(agent, copy, barriers, which, axes, mode)
    goals, box, part = _share(agent, copy, group, mode)

    def effect(actor: Actor | None) -> None:
        if box is None:
            return
        if actor is not None:
            for goal in goals:
                note_copy(copy.thread, copy.eqn, copy.site, copy.source, box, goal, part, copy.name, actor, ASYNC)
        value = box.get(copy.source, copy.fill)
        for goal in goals:
            part.put(goal.data, value)

    copy.thread.machine.engine.start(
        agent, copy.name, effect, meeting.signals, site=copy.site, home=ASYNC, duration=copy.duration, views=2
    )


def ask(agent: Agent, request: Request, barriers: Barriers, which: Region, axes: Sequence[Any]) -> None:
    """Make a block's part of a collective request for another cluster: the first block asks for all of them."""
    meeting, group = _meet(agent, request, barriers, which, axes, None)
    results = [in_block(agent, request.result, b, request.eqn) for b in group]
    leads = request.thread.block is group[0]

    def effect(actor: Actor | None) -> None:
        if leads:
            request.write(actor, results)

    request.thread.machine.engine.start(
        agent, request.name, effect, meeting.signals, site=request.site, home=ASYNC, duration=TMA_LATENCY, views=2
    )


def _meet(
    agent: Agent, copy: Copy | Request, barriers: Barriers, which: Region, axes: Sequence[Any], mode: Any
) -> tuple[Meeting, list[Block]]:
    """The collective operation that a block's belongs to, and its blocks."""
    block, cluster = copy.thread.block, copy.thread.block.cluster
    group = partners(block, (tuple(axes),))
    key = tuple(b.rank for b in group), barriers.key, shown(which)
    turn = cluster.turns.get((block.rank, key), 0)
    cluster.turns[block.rank, key] = turn + 1
    told = group if mode is None else group[:1]
    if mode is not None and block is not group[0]:
        told_by = f"the copy at {location(copy.eqn)} is leader_tracked={mode}"
        barriers.one(which).ignored = f"{told_by}, and tells only {group[0].name}."
    if (key, turn) not in cluster.collectives:
        found = [in_block(agent, barriers, b, copy.eqn).one(which) for b in told]  # others may come meanwhile
        cluster.collectives.setdefault((key, turn), Meeting(copy, group, mode, found))
    meeting = cluster.collectives[key, turn]
    _check_same(meeting, copy, mode)
    copy.name.came = meeting.came
    meeting.came.add(block.rank)
    if len(meeting.came) == len(group):
        del cluster.collectives[key, turn]
    return meeting, group


def _share(agent: Agent, copy: Copy, group: Sequence[Block], mode: Any) -> tuple[list[Buffer], Box | None, Region]:
    """What a block brings, and to where: None, if the data cannot be divided and another one brings all."""
    block, n = copy.thread.block, len(group)
    me = group.index(block)
    if isinstance(mode, CopyPartition.PARTITIONED):
        axis = mode.axis % len(copy.box.shape)
        size = copy.box.shape[axis] // n
        return [copy.goal], copy.box.share(axis, me * size, (me + 1) * size), copy.part
    goals = [in_block(agent, copy.goal, b, copy.eqn) for b in group]
    axis = next((d for d, size in enumerate(copy.box.shape) if size % n == 0), None)
    if axis is None:
        return goals, copy.box if me == 0 else None, copy.part
    size = copy.box.shape[axis] // n
    here = slice(me * size, (me + 1) * size)
    part = copy.part.then(("index", (*(slice(None),) * axis, here)))
    return goals, copy.box.share(axis, here.start, here.stop), part


def _check_same(meeting: Meeting, copy: Copy | Request, mode: Any) -> None:
    first = meeting.first
    if copy is first or (first.what() == copy.what() and meeting.mode == mode):
        return
    lines = dict.fromkeys(filter(None, [location(copy.eqn), location(first.eqn)]))
    copy.thread.machine.found(
        "collective-mismatch",
        f"Blocks of a cluster issue different collective operations: {first.name}{_box(first)}, but {copy.name}"
        f"{_box(copy)}.",
        where="; the other copy at ".join(lines),
        when=f"{copy.thread.when()}; {first.thread.when()}",
        operand=copy.source.label if isinstance(copy, Copy) else copy.result.label,
        hint="every block along the collective axes must issue the same copies in the same order; a copy of a part "
        "that depends on the block is not collective",
    )


def _box(copy: Copy | Request) -> str:
    if isinstance(copy, Request):
        return ""
    starts = ", ".join("…" if s is None else str(s) for s in copy.box.starts)
    return f" (a box of {copy.box.shape} at ({starts}))"
