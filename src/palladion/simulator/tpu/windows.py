"""The pipeline that a TPU kernel call has around its programs: blocks travel between HBM and VMEM.

Each input has a few buffers in VMEM (two, or what `pl.Buffered` says). When a program's block is another than the last
program's, it is copied into the next buffer; a block that stays is not copied again. Each output likewise: when its
block changes, what the kernel left in the buffer is copied to HBM, and the next buffer is whatever it was before: a
block that is visited again, after others, has lost what was accumulated in it. That is the finding "revisited-block"
(tutorial 4.1, 4.4).

The pipeline's own copies are right by construction, so they are made at once, in program order. Where nothing can tell
the difference (an input that nothing writes, an inner block, no race detection) the buffer in VMEM is the array itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.language.blocks import Squeezed
from palladion.simulator.blocks import Place, Plan, refuse_outside
from palladion.simulator.memory import WHOLE, Buffer, Region
from palladion.simulator.tpu import chip
from palladion.simulator.tpu.machine import Core, Machine


class Window:
    """One operand of a running core: its buffers in VMEM and where they stand.

    Attributes:
      plan: what was known before. hbm: the whole operand. view: what the kernel sees now.
    """

    def __init__(self, plan: Plan, core: Core, hbm: Buffer, key: Any, direct: bool) -> None:
        self.plan, self.core, self.hbm, self.direct = plan, core, hbm, direct
        machine: Machine = core.machine
        mapping = plan.mapping
        self.label = mapping.origin.split(" ")[0]
        single = all(n == 1 for n in core.sizes)
        core.hold(mapping.ref_aval(), 1 if single else plan.count, mapping.origin)
        self.view = Buffer(np.empty(0), mapping.origin, mapping.memory_space, core, key, False)
        self.slots: list[Buffer] = []
        if not direct:
            for k in range(plan.count):
                data = machine.empty(mapping.sizes, mapping.array.dtype)
                self.slots.append(
                    Buffer(data, mapping.origin, mapping.memory_space, core, (key, k), machine.track_vmem)
                )
        self.turn = -1
        self.now: tuple[Any, ...] | None = None
        self.at: Any = None
        self.seen: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.free: list[float] = []  # when buffers that were left are free again
        self.ragged_fill = machine.fill(mapping.array.dtype)

    def enter(self, agent: Any, ids: tuple[int, ...], prefetch: Sequence[Any]) -> None:
        """Bring the block of a program into VMEM, unless it is there."""
        plan = self.plan
        flat = plan.indices(agent, ids, prefetch)
        if flat == self.now:
            if plan.is_output:
                self.seen[flat] = (self.seen[flat][0], ids)
            return
        if plan.is_output:
            self.leave(agent)
            if flat in self.seen:
                self._revisited(flat, ids)
            self.seen[flat] = (ids, ids)
        self.now = flat
        outside, inside, whole = self.at = plan.at(flat)
        if plan.outside and flat in plan.outside:
            if plan.is_output or self.core.machine.params.out_of_bounds_reads == "raise":
                refuse_outside(plan, self.core, self.core.machine.vmapped, flat)
            self._next_slot()
            slot = self.slots[self.turn]
            slot.data[...] = self.ragged_fill
            if slot.writes is not None and self.core.machine.params.uninitialized_reads != "allow":
                slot.writes[...] = 0
            return
        if plan.is_read and self.core.machine.timeline is not None:
            self._arrive(agent)
        if self.direct and whole and plan.mapping.indirect is None:
            if self.hbm.writes is not None:
                self._note(agent, self.hbm.read_by, Region([("index", outside)]), self.hbm, "read")
            data = self.hbm.data[outside]
            self.view.data = data[plan.squeezed] if plan.has_squeezed else data
            return
        self._next_slot()
        if plan.is_read:
            self._copy_in(agent, outside, inside, whole)

    def _next_slot(self) -> None:
        if not self.slots:  # a ragged block of an operand that is otherwise seen in place
            mapping = self.plan.mapping
            data = self.core.machine.empty(mapping.sizes, mapping.array.dtype)
            self.slots = [Buffer(data, mapping.origin, mapping.memory_space, self.core, (self.view.key, 0))]
        self.turn = (self.turn + 1) % len(self.slots)
        slot, view, squeezed = self.slots[self.turn], self.view, self.plan.squeezed
        view.data, view.readers = slot.data[squeezed], slot.readers
        if slot.writes is not None and slot.reads is not None:
            if self.plan.is_output and self.core.machine.params.uninitialized_reads != "allow":
                slot.writes[...] = 0  # what another block left there is not this block's
            view.writes, view.reads = slot.writes[squeezed], slot.reads[squeezed]

    def _copy_in(self, agent: Any, outside: Place, inside: Place, whole: bool) -> None:
        slot = self.slots[self.turn]
        if not whole:
            slot.data[...] = self.ragged_fill
        if self.hbm.writes is not None:
            self._note(agent, self.hbm.read_by, Region([("index", outside)]), self.hbm, "read")
        if slot.writes is not None:
            self._note(agent, self.view.written_by, WHOLE, slot, "write")
        slot.data[inside] = self.hbm.data[outside]

    def leave(self, agent: Any) -> None:
        """Write an output's block back to HBM."""
        if self.now is None:
            return
        outside, inside, _ = self.at
        slot = self.slots[self.turn]
        if self.core.machine.timeline is not None:
            self._depart(agent)
        if slot.writes is not None:
            seen = [i for i, all_of in zip(inside, self.plan.squeezed) if all_of != 0]
            self._note(agent, self.view.read_by, Region([("index", tuple(seen))]), slot, "read")
        if self.hbm.writes is not None:
            self._note(agent, self.hbm.written_by, Region([("index", outside)]), self.hbm, "write")
        self.hbm.data[outside] = slot.data[inside]
        self.now = None

    # --- simulated time -----------------------------------------------------------------------------------------------
    def _arrive(self, agent: Any) -> None:
        """A block was asked for when the last program began; the next one waits until it is there."""
        core, machine = self.core, self.core.machine
        start, end = core.device.move(self._bytes(), core.before, machine.info)
        machine.span(core, "copies", f"{self.label} in", "copy", start, end)
        there = end + chip.LATENCY
        machine.span(core, f"core {core.index}", f"wait for {self.label}", "wait", agent.time, there)
        agent.time = max(agent.time, there)

    def _depart(self, agent: Any) -> None:
        """A block leaves now; its buffer is free again when it is gone."""
        core, machine = self.core, self.core.machine
        start, end = core.device.move(self._bytes(), agent.time, machine.info)
        machine.span(core, "copies", f"{self.label} out", "copy", start, end)
        self.free.append(end)
        if len(self.free) >= max(self.plan.count, 1):
            agent.time = max(agent.time, self.free.pop(0))

    def _bytes(self) -> int:
        return self.plan.mapping.block_bytes

    def _note(self, agent: Any, note: Any, region: Region, buffer: Buffer, access: str) -> None:
        conflict = note(agent.actor, region, self.core.machine.pipeline_site)
        if conflict:
            self.core.machine.race(
                self.core, buffer, access, f"the pipeline of {agent.name}", conflict, self.plan.mapping.map_location
            )

    def _revisited(self, flat: tuple[Any, ...], ids: tuple[int, ...]) -> None:
        first, last = self.seen[flat]
        plan = self.plan
        places = [
            slice(start, start + size, 1) if not isinstance(b, Squeezed) else start
            for (start, _), size, b in zip(plan.starts(flat), plan.mapping.sizes, plan.mapping.block_shape)
        ]
        self.core.machine.found(
            "revisited-block",
            f"Revisited block {tuple(places)} of output {plan.number} in iteration {ids}. The block was previously "
            f"visited in iterations {first} through {last} .",
            where=plan.mapping.map_location,
            when=self.core.when(),
            operand=plan.mapping.origin,
            hint="a block leaves VMEM when the next program has another one, and is not read back: programs that share "
            "an output block must follow each other, so put the reduction axes last in the grid",
        )
