"""The blocks of one operand of a running CUDA block: buffers in SMEM, and TMA copies to and from GMEM.

A *visit* is a run of steps with the same block. Visit v lies in buffer v % count; a block that stays is not copied
again. Inputs are fetched ahead, as far as there are free buffers; a buffer is free `delay_release` steps after the last
step of its visit. An output leaves after the last step of its visit, and its buffer is used again when it has left.

Where the kernel itself starts nothing asynchronous, these copies are right by construction and are made at once, in
program order; where it does, they are operations of their own, through the async proxy, so that a product which still
reads a block is found when the pipeline refills it. Where nothing can tell the difference (no history is kept, a whole
block of memory that nobody else writes), the buffer in SMEM is the array itself.

Source: the Mosaic GPU reference, "Memory spaces" and the section on software pipelining.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion.language.blocks import Squeezed
from palladion.language.gpu.params import OOBFillMode
from palladion.simulator.blocks import KEPT, Plan, refuse_outside
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu.chip import TMA_LATENCY, copy_seconds
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import ASYNC, GENERIC, Machine, Thread, Who
from palladion.simulator.gpu.memory import smem_bytes
from palladion.simulator.gpu.rules import join
from palladion.simulator.memory import WHOLE, Region
from palladion.simulator.values_table import held_dtype, held_shape

Flat = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a block lies.

    Attributes:
      array: the part of the operand. block: the part of the buffer. whole: whether that is all of it.
      empty: whether no element of the array is in the block.
    """

    array: Region
    block: Region
    whole: bool
    empty: bool


class Operand:
    """What is known of an operand's blocks before a call.

    Attributes:
      plan: its windows. number: among the kernel's Refs. name: "x_ref".
      count: buffers in SMEM. delay: steps for which a block stays after its own.
      site: of its copies, in the history. shape, dtype: of a buffer. bytes: of one, in SMEM.
      in_gmem: whether blocks stay there; whole_in_gmem: as one; in_place: the kernel sees them where they lie.
      known: indices that were found to be right.
    """

    def __init__(self, plan: Plan, number: int, count: int, site: int) -> None:
        self.plan, self.number, self.site, self.count = plan, number, site, count
        mapping = plan.mapping
        options = mapping.options
        self.name = mapping.origin.split(" (")[0]
        self.delay = 0 if options is None or plan.is_output else options.delay_release
        self.oob = OOBFillMode.ZEROS if options is None else options.oob_fill_mode
        self.in_gmem = getattr(mapping.memory_space, "name", "") in ("ANY", "GMEM", "HBM")
        self.whole_in_gmem = self.in_gmem and mapping.covers_array
        self.in_place = self.in_gmem and plan.divides
        block = jax.ShapeDtypeStruct(mapping.ref_shape, mapping.array.dtype)
        self.shape, self.dtype = held_shape(block), held_dtype(block)
        self.bytes = 0 if self.in_gmem else smem_bytes(self.shape, self.dtype)
        self.known: set[Flat] = set()
        self._places: dict[Flat, Place] = {}

    def place(self, flat: Flat) -> Place:
        """Where the block of an index lies."""
        found = self._places.get(flat)
        if found is None:
            if len(self._places) >= KEPT:
                self._places.clear()
            found = self._places[flat] = self._place(flat)
        return found

    def _place(self, flat: Flat) -> Place:
        plan = self.plan
        outside, inside, whole = plan.at(flat)
        views: list[tuple[str, Any]] = [("index", outside)] if outside else []  # () would select a number, not a view
        if plan.has_squeezed:
            views.append(("index", plan.squeezed[:-1]))
        kept = tuple([i for i, b in zip(inside, plan.mapping.block_shape) if not isinstance(b, Squeezed)])
        empty = any(isinstance(o, slice) and o.stop <= o.start for o in outside)
        return Place(Region(views), WHOLE if whole else Region([("index", kept)]), whole, empty)


class Window:
    """One operand of a running block: its buffers, and what is under way.

    Arguments:
      operand: what was known before. pipeline: the call's. thread: the block's.
      gmem: the whole operand. flats: the index at each step, in order.
    """

    def __init__(self, operand: Operand, pipeline: Any, thread: Thread, gmem: Buffer, flats: Sequence[Flat]) -> None:
        self.operand, self.pipeline, self.thread, self.gmem = operand, pipeline, thread, gmem
        self.plan = operand.plan
        machine = thread.machine
        # visits: [index, first step, last step]
        self.visits: list[list[Any]] = []
        for t, flat in enumerate(flats):
            if self.visits and self.visits[-1][0] == flat:
                self.visits[-1][2] = t
            else:
                self.visits.append([flat, t, t])
        self.count = min(operand.count, len(self.visits))
        origin = self.plan.mapping.origin
        thread.block.memory.take_smem(operand.bytes * self.count, origin, self.plan.mapping.map_location)
        unseen = not (machine.tracking or pipeline.asynchronous)
        # An input that nobody writes, an output of this block alone.
        self.direct = unseen and not (self.plan.is_read if self.plan.is_output else gmem.data.flags.writeable)
        self.own: list[Buffer | None] = [None] * self.count  # buffers in SMEM, made when they are needed
        self.slots: list[Buffer] = [gmem] * self.count  # what the kernel sees: those, or parts of the array
        self.flights: dict[int, Operation | float] = {}
        self.now = -1  # the visit of this step
        self.fetched = self.released = 0

    # --- buffers ------------------------------------------------------------------------------------------------------
    def _slot(self, visit: int) -> Buffer:
        k = visit % self.count
        slot = self.own[k]
        if slot is None:
            operand, machine, block = self.operand, self.thread.machine, self.thread.block
            mapping, key = self.plan.mapping, ("window", operand.name, k)
            data = machine.empty(operand.shape, operand.dtype)
            slot = Buffer(data, mapping.origin, mapping.memory_space, block, key, machine.tracking)
            self.own[k] = slot
        self.slots[k] = slot
        return slot

    # --- steps --------------------------------------------------------------------------------------------------------
    def begin(self, agent: Agent) -> None:
        """Before the first step: fetch as many blocks ahead as there are buffers."""
        if not self.plan.is_output:
            self._fetch(agent, self.operand.count - 1)

    def _fetch(self, agent: Agent, last: int) -> None:
        """Fetch further blocks for the steps up to `last`, where buffers are free."""
        limit = min(len(self.visits), self.released + self.count)
        while self.fetched < limit and self.visits[self.fetched][1] <= last:
            self._load(agent, self.fetched)
            self.fetched += 1

    def enter(self, agent: Agent, t: int) -> Buffer:
        """What the kernel sees at step t."""
        if self.now < 0 or t > self.visits[self.now][2]:
            self.now += 1
            if self.plan.is_output:
                self._open(agent)
            else:
                self._wait(agent, self.now)
        return self.slots[self.now % self.count]

    def _open(self, agent: Agent) -> None:
        """An output's buffer is taken for another block."""
        visit = self.now
        self._wait(agent, visit - self.count)
        place = self.operand.place(self.visits[visit][0])
        if self._is_direct(place):
            self._see(visit)
            return
        slot = self._slot(visit)
        if slot.writes is not None:
            slot.forget(WHOLE)  # what another block left there is not this block's
        if self.plan.is_read:
            self._load(agent, visit)
            self._wait(agent, visit)

    def leave(self, agent: Agent, t: int) -> None:
        """After step t: an output that is done is stored; buffers of inputs that are free are filled again."""
        if self.plan.is_output:
            if t == self.visits[self.now][2]:
                self._store(agent, self.now)
            return
        done = t - self.operand.delay
        while self.released <= self.now and self.visits[self.released][2] <= done:
            self.released += 1
        if self.fetched < len(self.visits):
            self._fetch(agent, t + self.operand.count - self.operand.delay)

    def end(self, agent: Agent) -> None:
        """After the last step: stores are waited for."""
        if self.plan.is_output:
            for visit in sorted(self.flights):
                self._wait(agent, visit)

    # --- copies -------------------------------------------------------------------------------------------------------
    def _is_direct(self, place: Place) -> bool:
        return self.direct and place.whole and self.plan.mapping.indirect is None

    def _see(self, visit: int) -> None:
        """The buffer is the array itself."""
        mapping = self.plan.mapping
        data = self.gmem.data[(*self.plan.at(self.visits[visit][0])[0], ...)]
        if self.plan.has_squeezed:
            data = data[self.plan.squeezed]
        self.slots[visit % self.count] = Buffer(
            data, mapping.origin, mapping.memory_space, self.thread.block, ("window", self.operand.name, 0)
        )

    def _load(self, agent: Agent, visit: int) -> None:
        flat = self.visits[visit][0]
        place = self.operand.place(flat)
        if self._is_direct(place):
            self._see(visit)
            self.flights[visit] = self._arrives(agent, "in")
            return
        slot = self._slot(visit)
        if not place.whole and self.operand.oob is OOBFillMode.PROMISE_IN_BOUNDS:
            self._broken_promise(flat)

        def move(actor: Any, who: str, view: int) -> None:
            gmem = self.gmem
            self._note(gmem, gmem.read_by, place.array, "read", actor, who, view, place)
            self._note(slot, slot.written_by, WHOLE, "write", actor, who, view, place)
            if not place.whole:
                zeros = self.operand.oob is not OOBFillMode.UNDEFINED
                slot.data[...] = 0 if zeros else self.thread.machine.fill(slot.data.dtype)
            if not place.empty:
                place.block.put(slot.data, place.array.get(gmem.data))
                slot.copied_from(place.block, gmem, place.array)

        self.flights[visit] = self._start(agent, "copy", move)

    def _store(self, agent: Agent, visit: int) -> None:
        place = self.operand.place(self.visits[visit][0])
        slot = self.slots[visit % self.count]
        if self._is_direct(place):
            self.flights[visit] = self._arrives(agent, "out")
            return

        def move(actor: Any, who: str, view: int) -> None:
            if place.empty:
                return
            gmem = self.gmem
            self._note(slot, slot.read_by, place.block, "read", actor, who, view, place)
            self._note(gmem, gmem.written_by, place.array, "write", actor, who, view, place)
            place.array.put(gmem.data, place.block.get(slot.data))
            gmem.copied_from(place.array, slot, place.block)

        self.flights[visit] = self._start(agent, "store", move)

    def _start(self, agent: Agent, kind: str, move: Callable[[Any, str, int], None]) -> Operation | float:
        """Let a copy happen: at once, or as an operation of its own."""
        ends = self._arrives(agent, "in" if kind == "copy" else "out")
        pipeline = f"the pipeline of {agent.name}"
        if not self.pipeline.asynchronous:
            move(agent.actor, pipeline, GENERIC)
            return ends
        name = f"the copy of a block of {self.operand.name}" if kind == "copy" else f"the store of {self.operand.name}"
        who = Who(f"{name} by {pipeline}", kind)
        return self.thread.machine.engine.start(
            agent,
            who,
            lambda actor: move(actor, who, ASYNC),
            [],
            site=self.operand.site,
            home=ASYNC,
            duration=ends - agent.time,
            views=2,
        )

    def _arrives(self, agent: Agent, way: str) -> float:
        """When a copy that starts now is done."""
        machine: Machine = self.thread.machine
        if machine.timeline is None:
            return agent.time
        ends = agent.time + TMA_LATENCY + copy_seconds(self.plan.mapping.block_bytes, machine.chip)
        machine.span(self.thread, "TMA", f"{self.operand.name} {way}", "copy", agent.time, ends)
        return ends

    def _wait(self, agent: Agent, visit: int) -> None:
        flight = self.flights.pop(visit, None)
        if flight is None:
            return
        before, machine = agent.time, self.thread.machine
        if isinstance(flight, Operation):
            join(agent, flight, machine.engine)
        elif flight > agent.time:
            agent.time = flight
        machine.span(self.thread, None, f"wait for {self.operand.name}", "wait", before, agent.time)

    # --- findings -----------------------------------------------------------------------------------------------------
    def _note(
        self, buffer: Buffer, note: Any, region: Region, access: str, actor: Any, who: str, view: int, place: Place
    ) -> None:
        if buffer.writes is None or actor is None or (buffer is self.gmem and place.empty):
            return
        if conflict := note(actor, region, self.operand.site, view):
            where = self.plan.mapping.map_location
            self.thread.machine.race(self.thread, buffer, access, who, conflict, where, actor, view, region)

    def _broken_promise(self, flat: Flat) -> None:
        mapping = self.plan.mapping
        self.thread.machine.found(
            "out-of-bounds",
            f"Block {flat} of {mapping.origin} reaches beyond the array of shape {mapping.array.shape}, which "
            "oob_fill_mode=PROMISE_IN_BOUNDS says that no block does.",
            where=mapping.map_location,
            when=self.thread.when(),
            operand=mapping.origin,
            hint="oob_fill_mode=plgpu.OOBFillMode.ZEROS, the default, reads zeros there",
        )


def check_index(operand: Operand, thread: Thread, flat: Flat, vmapped: int) -> None:
    """Refuse a block outside of the array; of an input it may be allowed.

    Raises:
      KernelFinding: "out-of-bounds".
    """
    plan = operand.plan
    plan.at(flat)
    if plan.outside and flat in plan.outside:
        if plan.is_output or thread.machine.params.out_of_bounds_reads == "raise":
            refuse_outside(plan, thread, vmapped, flat)
    if len(operand.known) < KEPT:
        operand.known.add(flat)
