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

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.language.blocks import BoundedSlice, Buffered, Element, Indirect, Squeezed
from palladion.language.grid import BlockMapping
from palladion.language.index_maps import hint
from palladion.simulator.code import Compiler
from palladion.simulator.memory import WHOLE, Buffer, Region
from palladion.simulator.tpu import chip
from palladion.simulator.tpu.machine import Core, Machine

KEPT = 1 << 16  # places of blocks that a plan remembers
Place = tuple[Any, ...]  # one slice or int for each dimension


def _clip(x: Any, low: Any, high: Any) -> Any:
    if isinstance(x, np.ndarray) and x.ndim:
        return np.clip(x, low, high)
    return min(max(int(x), low), high)


class Plan:
    """What is known of an operand's windows before a call.

    Attributes:
      mapping: how the operand is cut. count: buffers in VMEM.
      number: its place among the inputs or outputs. is_output: whether it is an output.
      is_read: whether blocks are copied in: of inputs, and of outputs that are an input's memory (fault kind 15).
      outside: of the indices met so far, those that lie outside the array: in which dimension, and what is asked for.
    """

    def __init__(
        self, mapping: BlockMapping, number: int, is_output: bool, compiler: Compiler, aliased: bool = False
    ) -> None:
        self.mapping, self.number, self.is_output = mapping, number, is_output
        self.is_read = aliased or not is_output
        count = mapping.pipeline_mode.buffer_count if isinstance(mapping.pipeline_mode, Buffered) else 2
        self.count: int = count[int(is_output)] if isinstance(count, tuple) else count
        self._at: dict[tuple[Any, ...], tuple[Place, Place, bool]] = {}
        self.outside: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.index_map = compiler.code(mapping.index_map)
        self.picks = self._picks(mapping.index_map)
        self.squeezed = (*(0 if isinstance(b, Squeezed) else slice(None) for b in mapping.block_shape), ...)
        self.has_squeezed = any(isinstance(b, Squeezed) for b in mapping.block_shape)

    def _picks(self, jaxpr: Any) -> list[Any] | None:
        """Where the index map only picks grid indices and constants: how."""
        if jaxpr.eqns:
            return None
        place = {v: k for k, v in enumerate(jaxpr.invars)}
        result = []
        for v in jaxpr.outvars:
            if isinstance(v, jaxlink.Literal):
                result.append((None, int(v.val)))
            elif v in place:
                result.append((place[v], 0))
            else:
                return None
        return result

    def indices(self, agent: Any, ids: Sequence[int], prefetch: Sequence[Any]) -> tuple[Any, ...]:
        """The index map's results at a grid point."""
        if self.picks is not None:
            return tuple([value if k is None else ids[k] for k, value in self.picks])
        flat = self.index_map(agent, [*map(np.int32, ids), *prefetch])
        return tuple([int(x) if np.ndim(x) == 0 else tuple(map(int, x)) for x in flat])

    def at(self, flat: tuple[Any, ...]) -> tuple[Place, Place, bool]:
        """`places` of an index; kept from one program, and one call, to the next."""
        found = self._at.get(flat)
        if found is None:
            if len(self._at) >= KEPT:
                self._at.clear()
            found = self._at[flat] = self.places(self.starts(flat))
            if bad := self._outside(flat):
                self.outside[flat] = bad
        return found

    def _outside(self, flat: tuple[Any, ...]) -> tuple[int, int] | None:
        """None, or the first dimension in which an index leaves the array, and that index."""
        pairs = self.mapping.indices(flat)
        for d, ((index, size), (low, high)) in enumerate(zip(pairs, self.mapping.extents)):
            asked = index if isinstance(index, tuple) else (index,)
            wrong = next((i for i in asked if not low <= i <= high), None)
            if wrong is not None and size != 0 and self.mapping.array.shape[d]:
                return d, wrong
        return None

    @property
    def side_by_side(self) -> bool:
        """Whether the array is cut into blocks that do not overlap, numbered along each dimension."""
        return not any(isinstance(b, (Element, BoundedSlice, Indirect)) for b in self.mapping.block_shape)

    @property
    def divides(self) -> bool:
        """Whether the array is cut into blocks that all lie inside it."""
        pairs = zip(self.mapping.array.shape, self.mapping.sizes)
        return self.side_by_side and all(size and n % size == 0 for n, size in pairs)

    def blocks(self) -> list[tuple[int, ...]]:
        """Every index that the index map may give, where blocks lie side by side."""
        return list(itertools.product(*[range(high + 1) for _, high in self.mapping.extents]))

    def starts(self, flat: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Where the window begins in each dimension, clamped into the array as the reference says."""
        flat = [np.asarray(x) if isinstance(x, tuple) else x for x in flat]
        return self.mapping.window(self.mapping.indices(flat), _clip)

    def places(self, starts: Sequence[tuple[Any, Any]]) -> tuple[Place, Place, bool]:
        """The window in the array, its part of the block (squeezed dimensions included), and whether that is all."""
        outside: list[Any] = []
        inside: list[Any] = []
        whole = True
        for (start, size), b, n, extent in zip(
            starts, self.mapping.block_shape, self.mapping.array.shape, self.mapping.sizes
        ):
            if isinstance(b, Indirect):
                outside.append(start)
                inside.append(slice(None))
                continue
            extent_here = extent if size is None else min(int(size), extent)
            first, last = max(start, 0), min(start + extent_here, n)
            last = max(first, last)
            whole = whole and first == start and last == start + extent
            outside.append(slice(first, last))
            inside.append(slice(first - start, last - start))
        return tuple(outside), tuple(inside), whole


def refuse_outside(plan: Plan, core: Core, flat: tuple[Any, ...]) -> None:
    """The index map asks for a block that is not there.

    Raises:
      KernelFinding: always.
    """
    machine, mapping = core.machine, plan.mapping
    d, index = plan.outside[flat]
    low, high = mapping.extents[d]
    unit = "element" if isinstance(mapping.block_shape[d], (Element, BoundedSlice, Indirect)) else "block"
    axis = plan.picks[d][0] if plan.picks is not None and len(plan.picks) == len(mapping.block_shape) else None
    axis = None if axis is None else axis - machine.vmapped
    index_of_all = np.array([index])
    ids = [np.array([], int)] * len(core.sizes)
    if axis is not None and axis >= 0:
        index_of_all = ids[axis] = np.arange(core.sizes[axis])
    machine.found(
        "out-of-bounds",
        f"Out of bounds block: the index map of {mapping.origin} asks for {unit} {index} in dimension {d}, and "
        f"there are the {unit}s {low}..{high}.",
        where=mapping.map_location,
        when=core.when(),
        operand=mapping.origin,
        hint=hint(mapping, d, index_of_all, ids),
    )


class InPlace:
    """An operand that stays where it is: each program sees its block of it (after vmap, its element of the batch).

    Attributes:
      view: that block, in the program that runs.
    """

    def __init__(self, plan: Plan, whole: Buffer, key: Any) -> None:
        self.plan, self.whole = plan, whole
        self.view = Buffer(whole.data, whole.label, whole.space, whole.place, key)

    def enter(self, agent: Any, ids: tuple[int, ...], prefetch: Sequence[Any]) -> None:
        """Take the block of a grid point."""
        plan = self.plan
        flat = plan.indices(agent, ids, prefetch)
        outside = plan.at(flat)[0]
        if flat in plan.outside:
            refuse_outside(plan, agent.place, flat)
        index = [o.start if all_of == 0 else o for o, all_of in zip(outside, plan.squeezed)]
        self.view.lie_in(self.whole, tuple(index))


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
                refuse_outside(plan, self.core, flat)
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
