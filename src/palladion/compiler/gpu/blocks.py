"""Calls with a grid (`pl.pallas_call`): which programs a CUDA block runs, and how blocks of operands get to the kernel.

A program is a CUDA block of one Pallas thread, but along "sequential" grid axes one CUDA block runs the programs in
order, as the steps of a loop. An operand's block is

    in place   where it is in global memory, if it cannot hang over the array's edge and nothing needs a copy: the
               kernel's loads and stores go there directly, 16 bytes a thread where they can
    fetched    by the TMA engine, `max_concurrent_steps` blocks ahead, each in a buffer of its own in shared memory; a
               buffer is used again `delay_release` steps after the last one that reads it
    staged     in one buffer of shared memory, filled and written back by the threads: outputs, what the TMA engine
               cannot copy, aliased operands

Operands of kernels that start copies or products, blocks that may hang over the edge and blocks with transforms have
buffers; others are in place. Outside the array a fetched block is zero, a staged one NaN (integers: zero); what an
output has there is dropped. An output whose block is the same in all steps is written back after the last.

Source: the Mosaic GPU reference, "Memory spaces"; tutorial 2.2, 3.2 and 6.2 (blocks, ragged edges, pipelines).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.compiler.gpu import block_stages as stages
from palladion.compiler.gpu import memory, rules_barriers, rules_copies
from palladion.compiler.gpu.block_stages import Operand
from palladion.compiler.gpu.dtypes import NoSuchType, kind
from palladion.compiler.gpu.generated import Pointer
from palladion.compiler.gpu.unit import Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import Index, resolve
from palladion.errors import explain
from palladion.language.gpu.arch import equations
from palladion.language.gpu.barriers import Barrier
from palladion.language.gpu.memory import GMEM, SMEM
from palladion.language.gpu.params import CompilerParams
from palladion.language.gpu.primitives import on_gpu
from palladion.language.grid import GridMapping

I32 = np.dtype(np.int32)


def known(n: int) -> Scalar:
    """A number as a scalar."""
    return Scalar(str(n), I32, n)


def write(unit: Unit, params: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Write a call's kernel; how many CUDA blocks it has, and the shape of a cluster (none)."""
    gm: GridMapping = params["grid_mapping"]
    if gm.num_dynamic:
        raise NotImplementedError(
            explain(
                "The grid has a size that is known only at run time, which the Mosaic GPU compiler does not take.",
                hint="make the sizes Python integers, or loop inside the kernel",
            )
        )
    grid = [int(n or 0) for n in gm.grid]
    unit.sizes = [known(n) for n in gm.kernel_ids(grid)]
    if 0 in grid:
        return 0, ()
    given = params["compiler_params"]
    given = given if isinstance(given, CompilerParams) else CompilerParams()
    return _Writer(unit, params, grid, given).write(), ()


def _can_be_copied(m: Any) -> None:
    """Raises: NoSuchType: threads would copy an operand's blocks, of a dtype that they have no values of."""
    try:
        kind(m.array.dtype)
    except NoSuchType:
        headline = (
            f"{m.origin} has blocks of {m.array.dtype} that hang over its edge, which threads would have to copy."
        )
        raise NoSuchType(explain(headline, hint="blocks that divide the array, or wider elements")) from None


class _Writer:
    """Writes one call.

    Attributes: operands: inputs, then outputs. prefetch: Refs of prefetched scalars. steps: programs of a CUDA block.
      count: buffers of each fetched operand.
    """

    def __init__(self, unit: Unit, params: dict[str, Any], grid: list[int], given: CompilerParams) -> None:
        self.unit, self.params, self.grid = unit, params, grid
        self.gm: GridMapping = params["grid_mapping"]
        self.jaxpr = params["jaxpr"]
        self.sequential = given.sequential_axes(self.gm, params["name"])
        self.steps = math.prod(grid[a] for a in self.sequential)
        self.count = max(min(given.max_concurrent_steps, self.steps), 1)
        self.machine = any(on_gpu in e.effects for e in equations(self.jaxpr))
        self.operands: list[Operand] = []
        self.prefetch: list[Any] = []
        self.ready: Any = None

    def write(self) -> int:
        """Write the kernel; the number of its CUDA blocks."""
        unit, gm = self.unit, self.gm
        first = gm.num_prefetch + len(gm.block_mappings)
        self._find_operands()
        own = range(first, len(self.jaxpr.invars))
        scratch = memory.scratch_all(unit, [self.jaxpr.invars[k].aval for k in own], list(own))
        blocks, ids = self._parallel_ids()
        self._make_buffers(ids)
        fetched = [o for o in self.operands if o.fetched]
        for k in range(self.count if fetched else 0):
            self._fetch(fetched, ids, known(k), known(k))
        self._fill([o for o in self.operands if self._stays(o)], ids, known(0))
        if self.steps == 1:
            self._step(ids, known(0), scratch)
        else:
            name = unit.name("step")
            unit.line("#pragma unroll 1")
            with unit.block(f"for (int {name} = 0; {name} < {self.steps}; ++{name})"):
                self._step(ids, Scalar(name, I32), scratch)
        self._write_back([o for o in self.operands if o.staged and self._stays(o)], ids, known(0))
        return blocks

    # --- before the steps --------------------------------------------------------------------------------------------
    def _find_operands(self) -> None:
        unit, gm = self.unit, self.gm
        first = gm.num_prefetch + gm.num_inputs
        aliases = {i: first + o for i, o in self.params["input_output_aliases"]}
        for k, m in enumerate([*gm.prefetch_mappings, *gm.block_mappings]):
            array = memory.operand(unit, stages.whole(m), Pointer(aliases.get(k, k)), None)
            array = dataclasses.replace(array, facts=memory.usage(unit).of(k))
            if k < gm.num_prefetch:
                self.prefetch.append(array)
                continue
            aliased = k in aliases or k in aliases.values()
            asked = self.jaxpr.invars[k].aval.memory_space is SMEM or bool(
                m.options is not None and m.options.transforms
            )
            inside = stages.always_inside(m)
            if not inside:
                _can_be_copied(m)
            buffered = not inside or (m.memory_space is not GMEM and (self.machine or aliased or asked))
            self.operands.append(Operand(m, k, k >= first, k < first or aliased, buffered, array))

    def _parallel_ids(self) -> tuple[int, list[Scalar]]:
        parallel = [a for a in range(len(self.grid)) if a not in self.sequential]
        blocks = math.prod(self.grid[a] for a in parallel)
        ids, below = [known(0) for _ in self.grid], 1
        for a in reversed(parallel):
            if self.grid[a] > 1:
                text = "blockIdx.x" if below == 1 else f"blockIdx.x / {below}"
                text = text if below * self.grid[a] == blocks else f"{text} % {self.grid[a]}"
                ids[a] = self.unit.scalar(np.int32, f"(int)({text})", f"i{a}")
            below *= self.grid[a]
        return blocks, ids

    def _make_buffers(self, ids: list[Scalar]) -> None:
        unit = self.unit
        for o in self.operands:
            if o.staged:
                aval = self.jaxpr.invars[o.number].aval
                o.fetched = self._can_be_fetched(o, aval, ids)
                o.buffer, o.pitch = stages.make_buffer(unit, aval, o.number, self.count if o.fetched else 1)
        fetched = sum(o.fetched for o in self.operands)
        if fetched:
            barrier = Barrier(num_arrivals=fetched, num_barriers=self.count).get_ref_aval("ready")
            self.ready = rules_barriers.make(unit, barrier)

    def _can_be_fetched(self, o: Operand, aval: Any, ids: list[Scalar]) -> bool:
        if o.output or o.filled_from_output(self.params, self.gm) or 0 in o.mapping.array.shape or not aval.shape:
            return False
        if not stages.is_plain(o.mapping):
            return False
        unit = self.unit
        with unit.trial():
            buffer, _ = stages.make_buffer(unit, aval, o.number, 1)
            source = stages.block_view(
                unit, o, stages.start_of(unit, o, self._ids(ids, Scalar("step", I32)), self.prefetch)
            )
            return rules_copies.planned(source, resolve(unit, buffer, ())) is not None

    # --- a step ------------------------------------------------------------------------------------------------------
    def _ids(self, ids: Sequence[Scalar], step: Scalar) -> list[Scalar]:
        """The program's index along each grid axis in a step."""
        found, below = list(ids), 1
        for a in reversed(self.sequential):
            n = self.grid[a]
            if step.value is not None:
                found[a] = known(int(step.value) // below % n)
            elif n > 1:
                text = step.text if below == 1 else f"{step.text} / {below}"
                found[a] = Scalar(f"({text if below * n == self.steps else f'{text} % {n}'})", I32)
            below *= n
        return found

    def _fetch(
        self, operands: Sequence[Operand], ids: Sequence[Scalar], step: Scalar, slot: Scalar, happens: str | None = None
    ) -> None:
        """Start to copy the blocks of a step."""
        unit = self.unit
        barrier = rules_barriers.One(unit, stages.element_view(unit, self.ready, [Index(slot)]))
        for o in operands:
            source = stages.block_view(unit, o, stages.start_of(unit, o, self._ids(ids, step), self.prefetch))
            rules_copies.copy_in(unit, source, resolve(unit, o.slot(slot), ()), barrier, happens)

    def _step(self, ids: Sequence[Scalar], step: Scalar, scratch: Sequence[Any]) -> None:
        unit = self.unit
        here = self._ids(ids, step)
        slot = (
            known(int(step.value) % self.count)
            if step.value is not None
            else Scalar(f"({step.text} % {self.count})", I32)
        )
        slot = known(0) if self.count == 1 else slot
        starts = {o.number: stages.start_of(unit, o, here, self.prefetch) for o in self.operands}
        self._fill([o for o in self.operands if not self._stays(o)], here, step)
        if self.ready is not None:
            rules_barriers.wait(unit, rules_barriers.One(unit, stages.element_view(unit, self.ready, [Index(slot)])))
        refs: list[Any] = list(self.prefetch)
        for o in self.operands:
            aval = self.jaxpr.invars[o.number].aval
            in_place = not o.staged
            refs.append(stages.in_place(unit, o, starts[o.number], aval) if in_place else o.slot(slot))
        unit.ids = self.gm.kernel_ids(here)
        unit.run(self.jaxpr, [*refs, *scratch])
        self._write_back([o for o in self.operands if o.output and o.staged and not self._stays(o)], here, step)
        if self.steps > 1:
            self._refill(ids, step)

    def _fill(self, operands: Sequence[Operand], ids: Sequence[Scalar], step: Scalar) -> None:
        """Read the blocks of a step that threads have to read; of an output that stays, the kernel's own is newer."""
        mine = [o for o in operands if o.staged and o.filled and not o.fetched]
        for o in mine:
            stages.fill(self.unit, o, stages.start_of(self.unit, o, self._ids(ids, step), self.prefetch))
        if mine:
            self._publish()

    def _publish(self) -> None:
        """What threads have stored in buffers is there for all, copy engines and tensor cores too."""
        if self.machine:
            self.unit.line('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
        self.unit.sync()

    def _refill(self, ids: Sequence[Scalar], step: Scalar) -> None:
        """Start the copies of later steps into the buffers that are free after this one."""
        unit = self.unit
        unit.line('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
        unit.sync()  # all have read what is about to be overwritten
        by_delay: dict[int, list[Operand]] = {}
        for o in self.operands:
            if o.fetched:
                by_delay.setdefault(o.delay, []).append(o)
        for delay, operands in by_delay.items():
            if self.steps <= self.count - delay:
                continue
            ahead = Scalar(f"({step.text} + {self.count - delay})", I32)
            slot = known(0) if self.count == 1 else Scalar(f"({ahead.text} % {self.count})", I32)
            happens = f"{ahead.text} < {self.steps}" + (f" && {step.text} >= {delay}" if delay else "")
            self._fetch(operands, ids, ahead, slot, happens)

    # --- outputs -----------------------------------------------------------------------------------------------------
    def _stays(self, o: Operand) -> bool:
        """Whether an output's block is the same in all steps of a CUDA block."""
        return o.output and self.steps > 1 and not stages.depends_on(o.mapping.index_map, self.sequential)

    def _write_back(self, outputs: Sequence[Operand], ids: Sequence[Scalar], step: Scalar) -> None:
        if not outputs:
            return
        self.unit.sync()
        for o in outputs:
            stages.drain(self.unit, o, stages.start_of(self.unit, o, self._ids(ids, step), self.prefetch))
