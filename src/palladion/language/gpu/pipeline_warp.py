"""`plgpu.emit_pipeline_warp_specialized`: a software pipeline whose copies are started by a thread of their own.

One thread of the block, the memory thread, fetches the blocks of each step; the others, the compute threads, run the
body on them. They meet on two sets of barriers, with one for each buffer:

    produced    completes when the blocks of a step have arrived (an arrival for each input); compute threads wait
    consumed    completes when all compute threads have done with them; the memory thread waits before it overwrites

With `delay_release` a compute thread says so that many steps later; what is left to say after the last step it says
when `compute_context` has ended, since asynchronous operations may still read the blocks until then. Before the memory
thread overwrites what threads have read by hand, it commits: it has learnt of these reads by the consumed barrier. Each
completion is waited for, so that the barriers can be used again; between `PipelinePipeline.START` and `STOP` that is
left to the next pipeline on the same buffers, which then begins to fetch while this one's last blocks are worked on.

Source: tutorial 6.2; the public "Software Pipelining" page for Mosaic GPU; PTX ISA, setmaxnreg. The order of the body's
arguments and the numbers of registers are those that JAX 0.12 was seen to use.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames, ops
from palladion.language.gpu import pipeline_blocks as blocks
from palladion.language.gpu.barriers import Barrier, ClusterBarrier, barrier_arrive, barrier_wait
from palladion.language.gpu.carry import Carry
from palladion.language.gpu.control import set_max_registers
from palladion.language.gpu.copies import commit_smem
from palladion.language.gpu.loops import grid_point, grid_sizes, int32, is_known, minimum, product, rem
from palladion.language.gpu.mma import wgmma_wait
from palladion.language.gpu.pipeline import Outputs, check_body
from palladion.language.gpu.pipeline_blocks import Facts, Operand
from palladion.language.tpu.block_copies import any_of

__all__ = ["PipelinePipeline", "WarpSpecializedPipeline", "emit_pipeline_warp_specialized"]

OWNER = "plgpu.emit_pipeline_warp_specialized"
_REGISTERS = 65536 // 128  # of a block, for each CUDA thread of one warpgroup
_MOST_REGISTERS = 256


class PipelinePipeline(enum.IntEnum):
    """Where a pipeline stands in a row of pipelines on the same buffers: first, in between, or last."""

    START = 0
    STEADY = 1
    STOP = 2


def emit_pipeline_warp_specialized(
    body: Callable[..., Any],
    *,
    grid: tuple[int | jax.Array, ...],
    memory_registers: int,
    in_specs: Any = (),
    out_specs: Any = (),
    max_concurrent_steps: int = 2,
    wg_axis: str,
    num_compute_wgs: int,
    pipeline_state: jax.Array | PipelinePipeline | None = None,
    manual_produced_barriers: bool = False,
    manual_consumed_barriers: bool = False,
    compute_context: Callable[[Callable[[Any], Any]], Any] | None = None,
    memory_thread_idx: int | None = None,
) -> WarpSpecializedPipeline:
    """A software pipeline whose copies are started by a thread that does nothing else.

        def kernel(a_gmem, b_gmem, o_gmem):                     # num_threads=3, thread_name="wg"
            def body(indices, a_smem, b_smem, acc):
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)
                return acc

            def compute_context(pipeline):                      # in each compute thread
                def compute(acc):
                    pipeline(acc)
                    return acc[...]
                result = pl.run_scoped(compute, plgpu.ACC((64, 64)))
                …

            plgpu.emit_pipeline_warp_specialized(
                body, grid=(8,), memory_registers=40, wg_axis="wg", num_compute_wgs=2, in_specs=[…],
                compute_context=compute_context)(a_gmem, b_gmem)

    All threads of the block make this call. The memory thread gives registers back, down to `memory_registers` for each
    CUDA thread; the compute threads share them.

    Arguments:
      body: called by each compute thread in each step, as `body(indices, *input_refs, *output_refs, *produced,
        *consumed, carry)`; `indices` is a tuple of int32 scalars, the barriers are there if they are manual, and the
        carry if there is a `compute_context`. It returns the next carry, or None.
      grid: sizes; integers, or int scalars known at run time.
      memory_registers: for each CUDA thread of the memory thread, a multiple of 8 from 24 on.
      in_specs, out_specs: pytrees of BlockSpecs, as for `plgpu.emit_pipeline`. There can be outputs where there is one
        compute thread.
      max_concurrent_steps: how many buffers each operand has; more than every delay_release.
      wg_axis: the axis of the kernel's threads.
      num_compute_wgs: how many of them compute: all but one.
      pipeline_state: None for a pipeline by itself. In a row of pipelines on the same buffers (`allocations=`) the
        first has `PipelinePipeline.START`, the last `STOP` and others `STEADY`, so that each begins to fetch while the
        one before it is still worked on; or an int32 scalar of the run with that value. All have the same grid.
      manual_produced_barriers: the body itself waits for its blocks: it gets a barrier for each input.
      manual_consumed_barriers: the body itself arrives when it has done with a block: it gets a barrier for each input.
      compute_context: what each compute thread runs, around the pipeline: `compute_context(pipeline)` calls
        `pipeline(carry)` once, which runs the steps and gives the last carry. Asynchronous operations on the blocks
        must have been waited for when it ends. Refs in a carry must come back as they are.
      memory_thread_idx: the number of the memory thread; None: the last.

    Returns:
      a `WarpSpecializedPipeline`, to be called with the operands' Refs.

    Raises:
      TypeError, ValueError: an argument is not as described. NotImplementedError: outputs of several compute threads.
    """
    for what, function in (("body", body), ("compute_context", compute_context)):
        if not callable(function) and not (function is None and what == "compute_context"):
            headline = f"The {what} of {OWNER} is {kind_of(function)}; it must be a function."
            raise mistake(TypeError, headline, hint=f"{OWNER}(body, grid=…, in_specs=…, …)(a_gmem)")
    threads = _count("num_compute_wgs", num_compute_wgs, 1)
    memory_thread = threads if memory_thread_idx is None else _count("memory_thread_idx", memory_thread_idx, 0)
    if memory_thread > threads:
        headline = f"The memory_thread_idx of {OWNER} is {memory_thread}, but there are {threads + 1} threads."
        raise mistake(ValueError, headline, hint=f"from 0 to {threads}; None is the last")
    registers = _registers(_count("memory_registers", memory_registers, 24), threads)
    ins, outs = blocks.as_specs(in_specs), blocks.as_specs(out_specs)
    most = blocks.check_steps(ins, max_concurrent_steps, OWNER)
    if manual_consumed_barriers and any(getattr(s, "delay_release", 0) for s in ins):
        headline = f"{OWNER} got a delay_release and manual_consumed_barriers."
        hint = "the body says by itself when it has done with a block: leave delay_release out"
        raise mistake(ValueError, headline, hint=hint)
    return WarpSpecializedPipeline(
        body, grid_sizes(grid, OWNER), ins, outs, most, wg_axis, threads, memory_thread, registers,
        _state(pipeline_state), bool(manual_produced_barriers), bool(manual_consumed_barriers), compute_context,
    )  # fmt: skip


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise mistake(TypeError, f"The {name} of {OWNER} is {kind_of(value)}; it must be a Python integer.")
    if value < least:
        raise mistake(ValueError, f"The {name} of {OWNER} is {value}; it must be at least {least}.")
    return int(value)


def _registers(memory: int, threads: int) -> tuple[int, int]:
    """Registers for each CUDA thread of the memory thread, and of a compute thread."""
    at_start = _REGISTERS // (threads + 1) // 8 * 8
    if memory % 8 or memory > at_start:
        headline = (
            f"The memory_registers of {OWNER} are {memory}, of {at_start} that each of {threads + 1} threads has."
        )
        raise mistake(ValueError, headline, hint=f"a multiple of 8, from 24 to {at_start}: 40 is enough for most")
    return memory, min((_REGISTERS - memory) // threads // 8 * 8, _MOST_REGISTERS)


def _state(state: Any) -> Any:
    if state is None or isinstance(state, PipelinePipeline):
        return state
    if isinstance(state, bool) or not ops.is_integer(state):
        headline = f"The pipeline_state of {OWNER} is {kind_of(state)}."
        raise mistake(TypeError, headline, hint="plgpu.PipelinePipeline.START, .STEADY or .STOP, or an int32 scalar")
    if is_known(state):
        return PipelinePipeline(int(state))
    return int32(state)


@dataclasses.dataclass(frozen=True)
class WarpSpecializedPipeline:
    """What `plgpu.emit_pipeline_warp_specialized` gives; its fields are that function's arguments, checked.

    Call it with the Refs of the operands, inputs first; with `allocations=` it uses buffers and barriers that were made
    before: `pl.run_scoped(f, allocs=pipeline.get_allocations(a_gmem, b_gmem), collective_axes="wg")`.
    """

    body: Callable[..., Any]
    sizes: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    max_concurrent_steps: int
    wg_axis: str
    num_compute_wgs: int
    memory_thread: int
    registers: tuple[int, int]
    pipeline_state: Any
    manual_produced: bool
    manual_consumed: bool
    compute_context: Callable[..., Any] | None

    def get_allocations(self, *gmem_refs: Any) -> dict[str, Any]:
        """The types of the buffers and barriers that the pipeline needs, for `pl.run_scoped`.

        Arguments:
          *gmem_refs: the operands; only their shapes and dtypes matter.

        Raises:
          TypeError, ValueError: they do not fit the specs.
        """
        operands, steps = self._operands(gmem_refs), product(self.sizes)
        inputs = [o for o in operands if o.is_copied and not o.is_output]
        count = blocks.buffers_for(self.max_concurrent_steps, steps)
        axes = blocks.collective_axes(operands)

        def consumed():
            if axes:
                return ClusterBarrier(collective_axes=axes, num_arrivals=self.num_compute_wgs, num_barriers=count)
            return Barrier(num_arrivals=self.num_compute_wgs, num_barriers=count)

        return dict(
            buffers=[o.buffer(count) if o.is_copied else None for o in operands],
            produced=[
                Barrier(num_arrivals=len(g), num_barriers=count) for g in _together(inputs, self.manual_produced)
            ],
            consumed=[consumed() for _ in _by_delay(inputs, self.manual_consumed)],
        )

    def _operands(self, refs: Sequence[Any]) -> list[Operand]:
        operands = blocks.operands_of(self.in_specs, self.out_specs, refs, OWNER)
        if self.num_compute_wgs > 1 and any(o.is_output and o.is_copied for o in operands):
            raise mistake(
                NotImplementedError,
                f"The pipeline of {OWNER} has outputs in SMEM and {self.num_compute_wgs} compute threads.",
                hint="write results in the compute_context, with copies of one's own; or num_compute_wgs=1",
            )
        return operands

    def __call__(self, *gmem_refs: Any, allocations: Any = None) -> None:
        """Run the pipeline; all threads of the block call it.

        Arguments:
          *gmem_refs: the Refs of the operands, inputs first.
          allocations: buffers and barriers, of the types that `get_allocations` gives; None: the pipeline's own.

        Raises:
          TypeError, ValueError: the operands do not fit the specs, or the threads of the kernel are others; outside a
            kernel.
        """
        threads = frames.required(OWNER).cores.get(self.wg_axis)
        if threads != self.num_compute_wgs + 1:
            has = "has no such axis" if threads is None else f"has {count_of(threads, 'thread')} along it"
            raise mistake(
                ValueError,
                f"{OWNER} wants {self.num_compute_wgs + 1} threads along {self.wg_axis!r}, but the kernel {has}.",
                hint=f"num_threads={self.num_compute_wgs + 1}, thread_name={self.wg_axis!r}: those that compute, and "
                "one for the copies",
            )
        operands = self._operands(gmem_refs)
        if allocations is None:
            if self.pipeline_state is not None:
                raise mistake(
                    ValueError,
                    f"{OWNER} got a pipeline_state, but it makes its buffers itself.",
                    hint="a row of pipelines shares buffers: pl.run_scoped(f, pipeline.get_allocations(…), "
                    "collective_axes=…), and allocations=… in the call",
                )

            def run(**allocated):
                _Run(self, operands, allocated).run()

            ops.run_scoped(run, **self.get_allocations(*gmem_refs), collective_axes=self.wg_axis)
        else:
            _Run(self, operands, allocations).run()


def _together(inputs: Sequence[Operand], manual: bool) -> list[list[int]]:
    """Which inputs share a produced barrier."""
    numbers = list(range(len(inputs)))
    return [[n] for n in numbers] if manual else [numbers] if numbers else []


def _by_delay(inputs: Sequence[Operand], manual: bool) -> list[list[int]]:
    """Which inputs share a consumed barrier: those that are released together."""
    if manual:
        return [[n] for n in range(len(inputs))]
    groups: dict[int, list[int]] = {}
    for n, o in enumerate(inputs):
        groups.setdefault(o.spec.delay_release, []).append(n)
    return list(groups.values())


class _Run:
    """A pipeline on its operands, with buffers and barriers; `run` traces it."""

    def __init__(self, pipeline: WarpSpecializedPipeline, operands: list[Operand], allocations: Any) -> None:
        self.pipeline, self.operands, self.sizes = pipeline, operands, pipeline.sizes
        self.buffers = allocations["buffers"]
        self.steps = product(pipeline.sizes)
        self.count = blocks.buffers_for(pipeline.max_concurrent_steps, self.steps)
        pairs = list(zip(operands, self.buffers))
        self.inputs = [(o, b) for o, b in pairs if o.is_copied and not o.is_output]
        written = [(o, b) for o, b in pairs if o.is_copied and o.is_output]
        self.outputs = Outputs([o for o, _ in written], [b for _, b in written], self.sizes, self.steps, self.count)
        ins = [o for o, _ in self.inputs]
        groups = _together(ins, pipeline.manual_produced)
        self.produced = [(b, numbers) for b, numbers in zip(allocations["produced"], groups)]
        groups = _by_delay(ins, pipeline.manual_consumed)
        self.consumed = [(b, ins[numbers[0]].spec.delay_release, numbers)
                         for b, numbers in zip(allocations["consumed"], groups)]  # fmt: skip
        self.facts = Facts()

    def run(self) -> None:
        thread = lax.axis_index(self.pipeline.wg_axis)
        memory = thread == np.int32(self.pipeline.memory_thread)
        ops.when(lax.bitwise_not(memory))(
            self._compute
        )  # traced first: the memory thread depends on what the body does
        ops.when(memory)(self._copy)

    def _slot(self, t: Any) -> Any:
        return rem(t, np.int32(self.count))

    # --- the memory thread --------------------------------------------------------------------------------------------
    def _copy(self) -> None:
        set_max_registers(self.pipeline.registers[0], action="decrease")
        first = minimum(np.int32(self.count), self.steps)
        state = self.pipeline.pipeline_state
        resumes = _is(state, PipelinePipeline.STEADY, PipelinePipeline.STOP)
        ends = True if state is None else _is(state, PipelinePipeline.STOP)
        _each(np.int32(0), first, lambda t: self._fetch(t, resumes))
        _each(first, self.steps, lambda t: self._fetch(t, True))

        def finish():
            _each(self.steps - first, self.steps, self._await_consumed)
            if self.facts.by_threads:
                commit_smem()  # the next pipeline on these buffers overwrites what threads have read

        ops.when(ends)(finish)

    def _fetch(self, t: Any, overwrites: Any) -> None:
        slot, point = self._slot(t), grid_point(t, self.sizes)
        ops.when(overwrites)(lambda: self._await_consumed(t, self.facts.by_threads))
        for barrier, numbers in self.produced:
            for n in numbers:
                o, buffer = self.inputs[n]
                o.fetch(point, buffer.at[slot], barrier.at[slot])

    def _await_consumed(self, t: Any, commits: bool = False) -> None:
        for barrier, _, _ in self.consumed:
            barrier_wait(barrier.at[self._slot(t)])
        if commits:
            commit_smem()  # compute threads have read the blocks by hand; copies overwrite them

    # --- compute threads ----------------------------------------------------------------------------------------------
    def _compute(self) -> None:
        set_max_registers(self.pipeline.registers[1], action="increase")
        calls = []

        def pipeline(carry: Any = None) -> Any:
            calls.append(True)
            if len(calls) > 1:
                hint = "make a pipeline for each, on the same allocations"
                raise mistake(ValueError, f"The compute_context of {OWNER} runs its pipeline twice.", hint=hint)
            return self._steps(Carry.of(carry, OWNER))

        if self.pipeline.compute_context is None:
            pipeline()
        else:
            self.pipeline.compute_context(pipeline)
        if not calls:
            hint = "def compute_context(pipeline): last = pipeline(first)"
            raise mistake(ValueError, f"The compute_context of {OWNER} does not run its pipeline.", hint=hint)
        self._release_rest()

    def _steps(self, carry: Carry) -> Any:
        manual_produced, manual_consumed = self.pipeline.manual_produced, self.pipeline.manual_consumed
        body = self.pipeline.body
        barriers = len(self.inputs) * (manual_produced + manual_consumed)
        check_body(body, OWNER, len(self.operands) + barriers, carry)

        def step(t, state):
            t = int32(t)
            written, leaves = state
            slot, point = self._slot(t), grid_point(t, self.sizes)
            if not manual_produced:
                for barrier, _ in self.produced:
                    barrier_wait(barrier.at[slot])
            self.outputs.await_buffers()
            views = iter(self.outputs.views(written))
            args: list[Any] = [point]
            for o, buffer in zip(self.operands, self.buffers):
                args.append(o.view(point) if not o.is_copied else next(views) if o.is_output else buffer.at[slot])
            args += [b.at[slot] for b, _ in self.produced] if manual_produced else []
            args += [b.at[slot] for b, _, _ in self.consumed] if manual_consumed else []

            def call():
                rest = (carry.value(leaves),) if carry.tree.num_leaves else ()
                return carry.leaves(body(*args, *rest), body)

            leaves, self.facts = blocks.traced(call)
            written = self.outputs.write(t, written)
            if not manual_consumed:
                for barrier, delay, _ in self.consumed:
                    if delay:
                        self._release(barrier, t - np.int32(delay), t >= np.int32(delay))
                    else:
                        barrier_arrive(barrier.at[slot])
            return written, leaves

        _, leaves = lax.fori_loop(np.int32(0), self.steps, step, (self.outputs.start(), carry.start))
        self.outputs.finish()
        return carry.value(leaves)

    def _release(self, barrier: Any, t: Any, condition: Any) -> None:
        """Say that step t, which is not before step -count, has been done with."""
        slot = self._slot(t + np.int32(self.count))
        ops.when(condition)(lambda: barrier_arrive(barrier.at[slot]))

    def _release_rest(self) -> None:
        """Say so of the last steps, which were not old enough."""
        if self.pipeline.manual_consumed or not any(delay for _, delay, _ in self.consumed):
            return
        if self.facts.has_wgmma:
            wgmma_wait(0)
        for barrier, delay, _ in self.consumed:
            for back in range(delay, 0, -1):
                t = self.steps - np.int32(back)
                self._release(barrier, t, bool(t >= 0) if is_known(t) else t >= np.int32(0))


def _is(state: Any, *values: PipelinePipeline) -> Any:
    if state is None or isinstance(state, PipelinePipeline):
        return state in values
    return any_of(*(state == np.int32(v) for v in values))


def _each(first: Any, end: Any, act: Callable[[Any], None]) -> None:
    """Trace a loop over steps, if there may be any."""
    if is_known(first, end) and first >= end:
        return

    def one(t, _):
        act(int32(t))

    lax.fori_loop(first, end, one, None)
