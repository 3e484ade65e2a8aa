"""Kernels with a grid of programs (`pl.pallas_call`) on a simulated GPU.

A program is a CUDA block of one Pallas thread, but along "sequential" grid axes one block does the programs in order,
as a software pipeline. Parallel programs run at the same time: two of them that have one output block race, whatever
they write, since each stores its own copy of the block when it ends.

Source: the Mosaic GPU reference, "Memory spaces" and "Using core_map"; plgpu.CompilerParams.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from palladion.errors import count_of, mistake
from palladion.language.blocks import Buffered
from palladion.language.gpu.arch import equations
from palladion.language.gpu.params import CompilerParams
from palladion.language.gpu.primitives import on_gpu
from palladion.language.grid import GridMapping
from palladion.language.semaphores import semaphore_read_p, semaphore_signal_p, semaphore_wait_p
from palladion.simulator.blocks import Plan
from palladion.simulator.code import Compiler
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import ASYNC, GENERIC, Block, Device, Thread
from palladion.simulator.gpu.windows import Flat, Operand, Window, check_index

_SEMAPHORES = (semaphore_signal_p, semaphore_wait_p, semaphore_read_p)
Point = tuple[int, ...]


def uses_machine(jaxpr: Any) -> bool:
    """Whether a kernel starts copies or products, or synchronises, by itself."""
    return any(on_gpu in e.effects or e.primitive in _SEMAPHORES for e in equations(jaxpr))


class Pipeline:
    """A call's grid and operands, prepared.

    Attributes:
      sequential: the grid axes that a block walks along by itself.
      operands: inputs, then outputs. smem: bytes of their buffers.
      asynchronous: whether the pipeline's copies are operations in flight; else they are made at once.
    """

    def __init__(self, params: dict[str, Any], compiler: Compiler, setting: Any) -> None:
        self.gm: GridMapping = params["grid_mapping"]
        self.jaxpr, gm = params["jaxpr"], self.gm
        given = params["compiler_params"]
        given = given if isinstance(given, CompilerParams) else CompilerParams()
        self.vmapped = len(gm.vmapped_dims)
        self.sequential = tuple(given.sequential_axes(self.gm, params["name"]))
        aliased = {o for _, o in params["input_output_aliases"]}
        started = uses_machine(self.jaxpr)
        self.asynchronous = started or bool(aliased and self.sequential)
        prefetch = gm.prefetch_mappings if self.vmapped else ()
        self.prefetch = [Operand(Plan(m, k, False, compiler), k, 1, 0) for k, m in enumerate(prefetch)]
        self.operands: list[Operand] = []
        for is_output, mappings in ((False, gm.inputs), (True, gm.outputs)):
            for k, m in enumerate(mappings):
                plan = Plan(m, k, is_output, compiler, is_output and k in aliased)
                buffered = isinstance(m.pipeline_mode, Buffered)
                count = (plan.count if buffered else given.max_concurrent_steps) if self.sequential else 1
                site = setting.site_of(m.map_location or f"the pipeline's copy of {m.origin}")
                operand = Operand(plan, gm.num_prefetch + len(self.operands), count, site)
                self._check(operand)
                self.operands.append(operand)
        self.smem = sum(o.bytes * o.count for o in self.operands)

    def _check(self, operand: Operand) -> None:
        origin = operand.plan.mapping.origin
        options = operand.plan.mapping.options
        if self.sequential and operand.delay >= operand.count:
            raise mistake(
                ValueError,
                f"{origin} has delay_release={operand.delay}, but only {count_of(operand.count, 'buffer')}: the "
                "block of the next step would have none.",
                hint=f"plgpu.CompilerParams(max_concurrent_steps={operand.delay + 1}), or more",
            )
        if options is not None and options.collective_axes:
            raise mistake(
                ValueError,
                f"{origin} has collective_axes={options.collective_axes}, but a pallas_call has no clusters.",
                hint="plgpu.kernel(…, cluster=…) with plgpu.emit_pipeline inside",
            )

    # --- the grid -----------------------------------------------------------------------------------------------------
    def grid(self, run: Any, device: int = 0) -> list[int]:
        """The sizes of the grid's axes."""
        sizes = iter(run.sizes[device])
        return [next(sizes) if n is None else n for n in self.gm.grid]

    def blocks(self, run: Any, device: int = 0) -> list[Point]:
        """The first program of each block, in the order in which they start."""
        grid = self.grid(run, device)
        if 0 in grid:
            return []
        ranges = [range(1 if a in self.sequential else n) for a, n in enumerate(grid)]
        return list(itertools.product(*ranges))

    def _steps(self, first: Point, grid: Sequence[int]) -> list[Point]:
        """The programs of a block, in order."""
        if not self.sequential:
            return [first]
        ranges = [range(n) if a in self.sequential else (first[a],) for a, n in enumerate(grid)]
        return list(itertools.product(*ranges))

    # --- one block ----------------------------------------------------------------------------------------------------
    def run(self, run: Any, agent: Agent, scratch: Sequence[Any]) -> None:
        """Run the programs of a block."""
        thread: Thread = agent.place
        block, gm, machine = thread.block, self.gm, thread.machine
        device = block.device
        grid = self.grid(run, device.id)
        thread.sizes = tuple(gm.kernel_ids(grid))
        points = self._steps(block.ids, grid)
        prefetch = [device.buffers["prefetch", k] for k in range(gm.num_prefetch)]
        for k, operand in enumerate(self.prefetch):
            if not operand.plan.mapping.covers_array:
                flat = operand.plan.indices(agent, block.ids, prefetch)
                prefetch[k] = prefetch[k].part(_index(operand, flat))
        refs: list[Any] = [*prefetch, *[None] * len(self.operands)]
        windows: list[Window] = []
        in_place: list[tuple[Operand, Buffer, list[Flat]]] = []
        for operand in self.operands:
            kind = "output" if operand.plan.is_output else "input"
            gmem = device.buffers[kind, operand.plan.number]
            if operand.whole_in_gmem:
                refs[operand.number] = gmem
                continue
            flats = [self._index(agent, operand, p, prefetch) for p in points]
            if operand.in_place:
                in_place.append((operand, gmem, flats))
                continue
            window = Window(operand, self, thread, gmem, flats)
            if operand.plan.is_output:
                self._claim(device, block, window, points)
            windows.append(window)
        windows.sort(key=lambda w: not w.plan.is_output)  # after a step blocks leave before others come
        for window in windows:
            window.begin(agent)
        code, several = run.prepared.code, len(points) > 1
        for t, point in enumerate(points):
            self._enter(thread, point)
            for window in windows:
                refs[window.operand.number] = window.enter(agent, t)
            for operand, gmem, flats in in_place:
                refs[operand.number] = gmem.part(_index(operand, flats[t]))
            code(agent, [*refs, *scratch])
            if machine.tracking:
                agent.actor.fence(GENERIC, ASYNC)  # before the pipeline's copies
            for window in windows:
                window.leave(agent, t)
            if several:
                machine.engine.pause(agent)
        for window in windows:
            window.end(agent)

    def _enter(self, thread: Thread, point: Point) -> None:
        thread.ids = tuple(self.gm.kernel_ids(point)) if self.vmapped else point
        if self.sequential:
            thread.step = f"program {thread.ids} of "

    def _index(self, agent: Agent, operand: Operand, point: Point, prefetch: Sequence[Any]) -> Flat:
        thread: Thread = agent.place
        flat = operand.plan.indices(agent, point, prefetch)
        if flat not in operand.known:
            self._enter(thread, point)
            check_index(operand, thread, flat, self.vmapped)
        return flat

    # --- findings -----------------------------------------------------------------------------------------------------
    def _claim(self, device: Device, block: Block, window: Window, points: Sequence[Point]) -> None:
        """Note which blocks of an output a CUDA block stores: each belongs to one of them, and comes once."""
        plan = window.plan
        if not plan.side_by_side or 0 in plan.mapping.array.shape:
            return
        seen: dict[Flat, int] = {}
        for flat, first, last in window.visits:
            owner = device.written.setdefault((plan.number, flat), block.ids)
            if owner is not block.ids:
                window.direct = False  # another block's values are not in this one's buffer
                self._shared(block, owner, window, flat)
            elif flat in seen:
                self._revisited(block, window, flat, points[seen[flat]], points[first])
            seen[flat] = last

    def _shared(self, block: Block, owner: Point, window: Window, flat: Flat) -> None:
        machine, mapping = block.machine, window.plan.mapping
        shape = ", ".join(map(str, flat))
        machine.found(
            "race",
            f"Race on {mapping.origin}: block {owner} and {block.name} both write its block ({shape}), and nothing "
            "orders the two.",
            where=mapping.map_location,
            when=block.name,
            operand=mapping.origin,
            hint="the programs of a GPU's grid run at the same time, each with an output block of its own: accumulate "
            'along a sequential axis (plgpu.CompilerParams(dimension_semantics=("parallel", "sequential"))), in '
            "a loop inside the kernel, or add up partial results afterwards",
            warn=machine.params.on_race == "warn",
        )

    def _revisited(self, block: Block, window: Window, flat: Flat, before: Point, now: Point) -> None:
        mapping = window.plan.mapping
        block.machine.found(
            "revisited-block",
            f"Revisited block {tuple(flat)} of {mapping.origin} in program {now}: it left SMEM after program {before}.",
            where=mapping.map_location,
            when=block.name,
            operand=mapping.origin,
            hint="a block leaves SMEM when the next program has another one, and is not read back: programs that share "
            "an output block must follow each other, so put the reduction axes last in the grid",
        )


def _index(operand: Operand, flat: Flat) -> tuple[Any, ...]:
    """The index of a block in the array, squeezed dimensions taken away."""
    outside = operand.plan.at(flat)[0]
    return tuple([o.start if all_of == 0 else o for o, all_of in zip(outside, operand.plan.squeezed)])


__all__ = ["Pipeline", "uses_machine"]
