"""Buffers, barriers and semaphores of a simulated GPU: those of the whole kernel, and those of scopes.

What lies in SMEM or TMEM belongs to the block: all of its threads come to the `run_scoped` that allocates it, get the
same buffers, and leave together. Accumulators belong to the thread. Semaphores lie in GMEM, and belong to the whole
call: a scratch semaphore is one for all blocks of the grid.

Source: the Mosaic GPU reference, "Collective allocations in pl.run_scoped", "Global allocations using pl.get_global".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from palladion.language.dtypes import SemaphoreDType
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.refs import BarrierDType, storage_of
from palladion.simulator.clocks import Clock
from palladion.simulator.code import location
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.barriers import Barriers
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import GENERIC, Block, Machine, Semaphores, Thread
from palladion.simulator.gpu.memory import BARRIER_BYTES, smem_bytes, tmem_columns
from palladion.simulator.gpu.unions import allocate_all
from palladion.simulator.waits import Elsewhere


def is_private(aval: Any) -> bool:
    """Whether a thread has such a buffer for itself: an accumulator."""
    return aval.memory_space is MemorySpace.REGS


def allocate(thread: Thread, aval: Any, key: Any, where: str | None) -> tuple[Any, int | None]:
    """Make a buffer, or barriers, of a block, or semaphores; and where it begins in SMEM (None: it is not there)."""
    block, machine, label = thread.block, thread.machine, aval.label
    if isinstance(aval.dtype, BarrierDType):
        block.memory.take_smem(BARRIER_BYTES * math.prod(aval.shape), label, where)
        return Barriers(aval.shape, aval.dtype, label, block, key), None
    if isinstance(aval.dtype, SemaphoreDType):
        buffers = block.device.buffers
        if key not in buffers:
            buffers[key] = Semaphores(aval.shape, label, block.device, key)
        return buffers[key], None
    if is_private(aval):
        _check_registers(thread, aval, where)
        made = Buffer(machine.empty(aval.shape, aval.dtype), label, aval.memory_space, thread, key, machine.tracking)
        made.given().data[...] = 0
        return made, None
    start = None
    if aval.memory_space is MemorySpace.TMEM:
        block.memory.take_tmem(tmem_columns(aval.shape, aval.dtype, storage_of(aval).packed), label, where)
    elif aval.memory_space is not MemorySpace.GMEM:
        start = block.memory.take_smem(smem_bytes(aval.shape, aval.dtype), label, where)
    made = Buffer(machine.empty(aval.shape, aval.dtype), label, aval.memory_space, block, key, machine.tracking)
    if start is not None:
        block.memory.haunt(made, start)
    return made, start


def _check_registers(thread: Thread, aval: Any, where: str | None) -> None:
    machine = thread.machine
    registers = -(-aval.shape[0] * aval.shape[1] * aval.dtype.itemsize // 4 // 128)
    limit = machine.chip.registers_per_thread
    others, thread.accumulators = thread.accumulators, thread.accumulators + registers
    if thread.accumulators > limit:
        more = f" beside the {others} of other accumulators" if others else ""
        machine.found(
            "register-overflow",
            f"Register overflow: {aval.label}, an accumulator of shape {aval.shape}, takes {registers} registers of "
            f"each CUDA thread{more}, and there are {limit}.",
            where=where,
            when=thread.when(),
            operand=aval.label,
            hint="a smaller accumulator, or several threads that have a part of it each",
        )


def allocate_global(thread: Thread, what: Any, eqn: Any) -> Any:
    """What `pl.get_global` gives: one for all threads of a device, another one for each equation."""
    key, device, machine = ("global", id(eqn)), thread.block.device, thread.machine
    if key not in device.buffers:
        label = f"the global at {location(eqn)}"
        if isinstance(what.dtype, SemaphoreDType):
            device.buffers[key] = Semaphores(what.shape, label, device, key)
        else:
            data = machine.empty(what.shape, what.dtype)
            device.buffers[key] = Buffer(data, label, what.memory_space, device, key, machine.tracking)
    return device.buffers[key]


# --- where the threads of a block meet ----------------------------------------------------------------------------
@dataclasses.dataclass
class Meeting:
    """Threads of a block that wait for each other. Attributes: who came; what they know; the latest of them."""

    came: list[Thread] = dataclasses.field(default_factory=list)
    clock: Clock | None = None
    time: float = 0.0


def meet(agent: Agent, key: Any, text: str, eqn: Any) -> None:
    """Wait until all threads of the block have come here."""
    thread: Thread = agent.place
    machine, block = thread.machine, thread.block
    if machine.num_threads == 1:
        return
    meeting = block.meetings.setdefault(key, Meeting())
    meeting.came.append(thread)
    meeting.time = max(meeting.time, agent.time)
    if machine.tracking:
        clock = agent.actor.publish()
        if meeting.clock is None:
            meeting.clock = clock
        else:
            meeting.clock.join(clock)
    count = machine.num_threads
    machine.engine.wait(agent, lambda: len(meeting.came) >= count, (), Together(text, meeting, block, eqn))
    if meeting.clock is not None:
        agent.actor.clock.join(meeting.clock)
    agent.time = meeting.time


class Together(Elsewhere):
    """Says which threads have not come to where all must; `eqn` is the line."""

    def __init__(self, text: str, meeting: Meeting, block: Block, eqn: Any) -> None:
        super().__init__(text, eqn)
        self.meeting, self.block = meeting, block

    def __call__(self) -> str:
        missing = [t.name for t in self.block.threads if t not in self.meeting.came]
        return f"{self.text}, which {', '.join(missing)} did not come to"


class Scope:
    """One execution of a `run_scoped` by a thread.

    Arguments:
      agent: the thread's. eqn: the equation. avals: the buffers' types. axes: its collective axes.
      shared: whether any buffer is the block's. last: whether the kernel ends with it.
    """

    def __init__(
        self, agent: Agent, eqn: Any, avals: Sequence[Any], axes: tuple[Any, ...], *, shared: bool, last: bool
    ) -> None:
        self.agent, self.eqn, self.avals, self.axes, self.shared, self.last = agent, eqn, avals, axes, shared, last
        self.thread: Thread = agent.place
        self.machine: Machine = self.thread.machine
        self.where = location(eqn)
        self.key: Any = None
        self.made: list[Any] = []
        self.accumulators = self.thread.accumulators

    def enter(self) -> list[Any]:
        """Allocate."""
        if not self.shared:
            self.made = [allocate(self.thread, a, None, self.where)[0] for a in self.avals]
            return self.made
        self._check_collective()
        block = self.thread.block
        self.key = ("scoped", id(self.eqn), self.thread.visit(self.eqn))
        meet(self.agent, (self.key, "enter"), f"the collective pl.run_scoped at {self.where}", self.eqn)
        if self.key not in block.buffers:
            marks = block.memory.marks()
            made = allocate_all(
                block.memory,
                self.avals,
                lambda k, a: None if is_private(a) else allocate(self.thread, a, (*self.key, k), self.where),
            )
            block.buffers[self.key] = marks, made
            for k, pair in enumerate(made):
                if pair is not None:
                    block.buffers[*self.key, k] = pair[0]
        _, made = block.buffers[self.key]
        self.made = [
            allocate(self.thread, a, None, self.where)[0] if pair is None else pair[0]
            for a, pair in zip(self.avals, made)
        ]
        return self.made

    def _check_collective(self) -> None:
        machine, thread = self.machine, self.thread
        if thread.warp is not None or (machine.num_threads > 1 and machine.thread_name not in self.axes):
            names = ", ".join(a.label for a in self.avals if not is_private(a))
            machine.found(
                "collective-mismatch",
                f"{thread.name} allocates {names} for itself, but what lies in SMEM or TMEM belongs to all threads of "
                "a block.",
                where=self.where,
                when=thread.when(),
                operand=names,
                hint=f"let all threads run it: pl.run_scoped(…, collective_axes={machine.thread_name!r}), outside of "
                "conditions on the thread",
            )

    def leave(self) -> None:
        """Check what is left over, and free."""
        self.thread.accumulators = self.accumulators
        if not self.shared:
            return
        block, machine = self.thread.block, self.machine
        meet(self.agent, (self.key, "leave"), f"the end of the collective pl.run_scoped at {self.where}", self.eqn)
        if self.key not in block.buffers:
            return
        if machine.tracking:  # what still writes here is noted
            while machine.engine.flying:
                machine.engine.complete(machine.engine.flying[0])
        marks, made = block.buffers.pop(self.key)
        block.left.add(self.key)
        for thread in block.threads:  # what they still read is noted when it is done
            reads = [read for group in [*thread.groups, thread.open] for read, _ in group]
            for operation in [*thread.wgmmas, *thread.fetches, *reads]:
                if not operation.done:
                    machine.engine.complete(operation)
        for k, pair in enumerate(made):
            if pair is None:
                continue
            del block.buffers[*self.key, k]
            self._end_of(pair[0])
        block.memory.release(marks, [(b, start) for b, start in filter(None, made) if start is not None])
        if machine.num_threads > 1:  # this thread knows what all of them did here
            block.meetings.pop((self.key, "enter"), None)

    def _end_of(self, thing: Any) -> None:
        if isinstance(thing, Barriers):
            thing.check_end(self.machine.engine, self.where, warn=self.last)
        elif isinstance(thing, Buffer) and thing.writes is not None and not self.last:
            # Nobody may write it any more. Who still reads it is noted with the memory, for whoever gets that next.
            conflict = thing.written_before(self.agent.actor, GENERIC)
            if conflict is not None:
                end = f"the end of the scope at {self.where}"
                self.machine.race(self.thread, thing, "free", self.agent.name, conflict, end)
