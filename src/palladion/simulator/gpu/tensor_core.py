"""What operations of the tensor core have in common: their operands, the order they complete in, the time they take.

Accesses of such an operation are checked when it is issued, with what the issuing thread knows then: so findings do not
depend on when the schedule lets it complete. Data moves when it completes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from palladion import jaxlink
from palladion.simulator.clocks import Actor, Clock
from palladion.simulator.code import location
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu import rules
from palladion.simulator.gpu.barriers import partners
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import Block, Thread, Who
from palladion.simulator.gpu.views import End, in_block
from palladion.simulator.shared_rules import read_partly_outside


class By(NamedTuple):
    """Who accesses memory: an operation that a thread started at an equation, whose number is `site`."""

    thread: Thread
    eqn: Any
    site: int
    operation: Operation


class Part:
    """A part of a buffer that an operation uses.

    Attributes: buffer; region; inside: whether all of it is there (reads outside may be allowed); machine.
    """

    __slots__ = ("buffer", "inside", "machine", "region")

    def __init__(self, agent: Agent, end: End, operands: Sequence[Any], block: Block, access: str = "read") -> None:
        buffer: Buffer = in_block(agent, end.of(agent, operands), block, end.eqn)
        self.machine = agent.place.machine
        self.inside = end.check(agent, operands, buffer, access)
        self.buffer, self.region = buffer.as_it_is(), end.region(operands)

    def get(self) -> np.ndarray:
        """What is there now."""
        if self.inside:
            return self.region.get(self.buffer.data)
        return read_partly_outside(self.machine, self.buffer, self.region, self.buffer.data.dtype)

    def put(self, value: Any) -> None:
        """Replace it."""
        self.region.put(self.buffer.data, value)

    def note(self, access: str, by: By, view: int) -> None:
        """Check and note an access to it, through a view of memory."""
        actor = by.operation.actor
        if actor is not None and self.inside:
            note = rules.note_read if access == "read" else rules.note_write
            note(by.thread, by.eqn, by.site, self.buffer, self.region, by.operation.name, actor, view)


class InOrder:
    """Operations of one thread that complete in the order in which they were issued.

    Each knows what those before it did. Attributes: pending: that are not complete, oldest first; last.
    """

    def __init__(self) -> None:
        self.pending: collections.deque[Operation] = collections.deque()
        self.last: Operation | None = None
        self._issued = self._done = 0

    def start(
        self, agent: Agent, who: Who, effect: Callable[[Actor | None], None], signals: Sequence[Any], **how: Any
    ) -> Operation:
        """Start an operation after those before it (see `Engine.start`)."""
        engine = agent.place.machine.engine
        number, before = self._issued, _knowledge(self.last)
        self._issued += 1

        def run(actor: Actor | None) -> None:
            while self._done < number:
                engine.complete(self.pending[0])
            if self.pending:
                self.pending.popleft()  # this one
            self._done += 1
            if actor is not None and before is not None:
                actor.clock.join(before)
            effect(actor)

        operation = engine.start(agent, who, run, signals, **how)
        if not operation.done:
            self.pending.append(operation)
            if operation.actor is not None:
                operation.actor.complete()  # it goes through several views, and knows its own accesses in each
                if before is not None:
                    operation.actor.clock.join(before)
        self.last = operation
        return operation


def _knowledge(operation: Operation | None) -> Clock | None:
    """What is known once an operation is complete."""
    if operation is None or operation.actor is None:
        return None
    clock = object.__new__(Clock)
    clock.known = operation.actor.known_at_completion()
    return clock


def queue_of(thread: Thread) -> InOrder:
    """The operations of a thread, or of one of its warps, that run in order; a warp is the same in each `warp_map`."""
    root = thread.parent or thread
    return root.tensor.setdefault(thread.warp or 0, InOrder())


def busy(agent: Agent, blocks: Sequence[Block], seconds: float) -> tuple[float, float]:
    """Take the tensor cores of these blocks' SMs: when an operation issued now begins, and when it ends."""
    units = [b.tensor_core for b in blocks]
    begins = agent.time
    while any(later := [t for u in units if (t := u.gap(begins, seconds)) > begins]):
        begins = max(later)
    for unit in units:
        unit.take(begins, seconds)
    return begins, begins + seconds


def dtype_of(given: Any, end: End) -> np.dtype:
    """The dtype that a view has; `given` is the operand with its transforms."""
    dtype = end.aval.dtype
    for transform in given.transforms:
        if isinstance(transform, jaxlink.BitcastTransform):
            dtype = transform.dtype
    return np.dtype(dtype)


def together(agent: Agent, axis: Any, eqn: Any, what: str) -> list[Block]:
    """The blocks that do an operation: the thread's own, or both along a cluster axis.

    Raises:
      KernelFinding: the thread's block is not the first of the two ("collective-mismatch").
    """
    thread: Thread = agent.place
    block = thread.block
    if axis is None:
        return [block]
    both = partners(block, [axis])
    if len(both) != 2 or both[0] is not block:
        message = f"{thread.name} issues a collective {what} along {axis!r}, "
        message += (
            "but it is not the first of the two blocks."
            if len(both) == 2
            else f"an axis of {len(both)} blocks, and two blocks do it together."
        )
        thread.machine.found(
            "collective-mismatch",
            message,
            where=location(eqn),
            when=thread.when(),
            hint=f"the first block issues it for both: @pl.when(lax.axis_index({axis!r}) == 0)",
        )
    return both


__all__ = ["By", "InOrder", "Part", "busy", "dtype_of", "queue_of", "together"]
