"""`plgpu.emit_pipeline`: a software pipeline inside one thread of a kernel.

The pipeline is kernel-level code: a loop over the grid's steps around asynchronous copies. With n buffers for the
blocks of each operand (`max_concurrent_steps`), the blocks of the first n steps are fetched before the loop, and step t

    wait    for its blocks (a barrier for each buffer, with an arrival for each input); an output whose block is a new
            one waits until the buffer it is about to use has been read by the copy that wrote it back
    body    gets the grid indices, a Ref for each operand, and the carry
    write   an output whose next step has another block, or none, starts the copy back
    fetch   an input starts to fetch the block of step t + n - delay_release, into the buffer that step
            t - delay_release had

so that an output accumulates over a run of steps with the same block, and asynchronous matrix products may go on
reading a block for `delay_release` steps. What threads read or wrote by hand is committed before a copy reads or
overwrites it. With `collective_axes` a copy writes buffers in several blocks of a cluster, which tell each other by a
cluster barrier that they have done a step. After the loop nothing is left running.

Source: tutorial 6.2; the public "Software Pipelining" page for Mosaic GPU; section "ClusterBarrier" of the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import frames, ops
from palladion.language.gpu import pipeline_blocks as blocks
from palladion.language.gpu.barriers import Barrier, ClusterBarrier, barrier_arrive, barrier_wait
from palladion.language.gpu.carry import Carry
from palladion.language.gpu.copies import commit_smem, commit_smem_to_gmem_group, wait_smem_to_gmem
from palladion.language.gpu.loops import grid_point, grid_sizes, int32, is_known, product, rem
from palladion.language.gpu.mma import wgmma_wait
from palladion.language.gpu.pipeline_blocks import Facts, Operand
from palladion.language.tpu.block_copies import all_of, any_of, differs

__all__ = ["emit_pipeline"]

OWNER = "plgpu.emit_pipeline"


def emit_pipeline(
    body: Callable[..., Any],
    *,
    grid: tuple[int | jax.Array, ...],
    in_specs: Any = (),
    out_specs: Any = (),
    max_concurrent_steps: int = 1,
    init_carry: Any = None,
) -> Callable[..., Any]:
    """A software pipeline in a thread of a kernel: blocks of GMEM come to SMEM, and go back, while it works on others.

        def kernel(x_gmem, o_gmem):
            def body(indices, x_smem, o_smem):
                o_smem[...] = x_smem[...] + 1

            spec = plgpu.BlockSpec((64, 64), lambda i: (i, 0))
            plgpu.emit_pipeline(body, grid=(8,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2)(
                x_gmem, o_gmem)

    Arguments:
      body: called as `body(indices, *input_refs, *output_refs)`, with the carry last if there is one; `indices` is a
        tuple of int32 scalars. Without a carry it returns None.
      grid: sizes; integers, or int scalars known at run time. A size of zero is no step.
      in_specs, out_specs: a BlockSpec for each operand. Of a `plgpu.BlockSpec`, `transforms` say how its buffers lie in
        SMEM, `delay_release` for how many further steps the body's asynchronous operations may read a block,
        `collective_axes` which blocks of a cluster share a copy, and `memory_space=plgpu.GMEM` that the body gets a
        view of the block in GMEM instead of a copy. Blocks may lie over the edge of the array.
      max_concurrent_steps: how many buffers each operand has; more than every delay_release.
      init_carry: a pytree carried from step to step. Refs in it must come back as they are.

    Returns:
      a function of the operands' Refs, inputs first, that runs the pipeline and gives the last carry (None if none).

    Raises:
      TypeError, ValueError: an argument is not as described; when it is called, the operands do not fit the specs.
    """
    if not callable(body):
        hint = "plgpu.emit_pipeline(body, grid=…, in_specs=…)(x_gmem)"
        raise mistake(TypeError, f"The body of {OWNER} is {kind_of(body)}; it must be a function.", hint=hint)
    sizes = grid_sizes(grid, OWNER)
    ins, outs = blocks.as_specs(in_specs), blocks.as_specs(out_specs)
    most = blocks.check_steps(ins, max_concurrent_steps, OWNER)
    steps = product(sizes)

    def pipeline(*refs: Any) -> Any:
        frames.required(OWNER)
        operands = blocks.operands_of(ins, outs, refs, OWNER)
        carry = Carry.of(init_carry, OWNER)
        check_body(body, OWNER, len(operands), carry)
        if is_known(steps) and steps == 0:
            return init_carry
        count = blocks.buffers_for(most, steps)
        fetched = [o for o in operands if o.is_copied and not o.is_output]
        types: dict[str, Any] = dict(
            buffers=[o.buffer(count) if o.is_copied else None for o in operands],
            ready=Barrier(num_arrivals=len(fetched), num_barriers=count) if fetched else None,
        )
        axes = blocks.collective_axes(operands)
        types["done"] = ClusterBarrier(collective_axes=axes, num_barriers=count) if axes else None

        def run(buffers, ready, done):
            return _Pipeline(body, operands, sizes, steps, count, buffers, ready, done).run(carry)

        return carry.value(ops.run_scoped(run, **types))

    return pipeline


def check_body(body: Callable[..., Any], owner: str, refs: int, carry: Carry) -> None:
    """Raise TypeError when a body cannot be called as it will be."""
    carried = bool(carry.tree.num_leaves)

    def message(takes: str) -> str:
        what = f"the grid indices, {count_of(refs, 'Ref')}" + (" and the carry" if carried else "")
        return explain(
            f"The body of {owner} takes {takes}, but it gets {what}.",
            where=locations.defined_at(body),
            hint="`def body(indices, x_smem, …)`: the tuple of grid indices comes first",
        )

    frames.check_arity(body, 1 + refs + carried, message)


# --- outputs ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a pipeline that are copied back, and their buffers.

    Their state is, for each of those whose block changes, how many blocks it has finished.

    Attributes:
      operands, buffers: the outputs, and `count` buffers of each in one Ref.
      sizes, steps: the grid, and how many points it has.
      count: how many buffers there are.
    """

    operands: Sequence[Operand]
    buffers: Sequence[Any]
    sizes: Sequence[Any]
    steps: Any
    count: int

    def start(self) -> tuple[Any, ...]:
        """The state before the first step."""
        return (np.int32(0),) * len(self.operands)

    def await_buffers(self) -> None:
        """Wait until no copy reads the buffers that the step will write: each step has committed one group."""
        if self.operands:
            wait_smem_to_gmem(self.count - 1, wait_read_only=True)

    def views(self, state: Sequence[Any]) -> list[Any]:
        """The Refs that the body gets."""
        return [b.at[rem(n, np.int32(self.count))] for b, n in zip(self.buffers, state)]

    def write(self, t: Any, state: Sequence[Any]) -> tuple[Any, ...]:
        """Start to copy back the blocks that step t leaves; the next state."""
        if not self.operands:
            return ()
        commit_smem()
        here, one = grid_point(t, self.sizes), np.int32(1)
        last = t == self.steps - one
        after = grid_point(lax.min(t + one, self.steps - one) if isinstance(t, jax.Array) else t, self.sizes)
        new = []
        for o, view, n in zip(self.operands, self.views(state), state):
            leaves = any_of(last, differs(o.window.index(here), o.window.index(after)))
            o.write_back(here, view, bool(leaves) if is_known(leaves) else leaves)
            new.append(
                n + (lax.convert_element_type(leaves, np.int32) if isinstance(leaves, jax.Array) else np.int32(leaves))
            )
        commit_smem_to_gmem_group()
        return tuple(new)

    def finish(self) -> None:
        """Wait until everything has been written."""
        if self.operands:
            wait_smem_to_gmem(0)


# --- the steps --------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """A pipeline on its operands; `run` traces it.

    Attributes:
      body, operands: the user's function, and what it works on.
      sizes, steps: the grid, and how many points it has.
      count: how many buffers each copied operand has.
      buffers: for each operand its buffers in one Ref, or None.
      ready: a barrier for each buffer, which completes when the inputs of a step are there; None without inputs.
      done: a cluster barrier for each, which completes when all blocks have done with a step; None if they share none.
    """

    body: Callable[..., Any]
    operands: list[Operand]
    sizes: tuple[Any, ...]
    steps: Any
    count: int
    buffers: list[Any]
    ready: Any
    done: Any

    @property
    def inputs(self) -> list[tuple[Operand, Any]]:
        """The operands that are fetched, with their buffers."""
        return [(o, b) for o, b in zip(self.operands, self.buffers) if o.is_copied and not o.is_output]

    def run(self, carry: Carry) -> list[Any]:
        """Trace the pipeline; the last values of what goes round."""
        written = [(o, b) for o, b in zip(self.operands, self.buffers) if o.is_copied and o.is_output]
        outputs = Outputs([o for o, _ in written], [b for _, b in written], self.sizes, self.steps, self.count)
        facts = Facts()

        def step(t, state):
            nonlocal facts
            t = int32(t)
            written, leaves = state
            slot = rem(t, np.int32(self.count))
            if self.ready is not None:
                barrier_wait(self.ready.at[slot])
            outputs.await_buffers()
            refs = self._refs(t, slot, outputs.views(written))

            def call():
                rest = (carry.value(leaves),) if carry.tree.num_leaves else ()
                return carry.leaves(self.body(grid_point(t, self.sizes), *refs, *rest), self.body)

            leaves, facts = blocks.traced(call)
            written = outputs.write(t, written)
            self._release(t, facts, committed=bool(outputs.operands))
            return written, leaves

        for n in range(self.count if self.inputs else 0):
            inside = True if is_known(self.steps) else np.int32(n) < self.steps
            ops.when(inside)(lambda n=n: self._fetch(np.int32(n), n, self.inputs))
        state = outputs.start(), carry.start
        if is_known(self.steps) and self.steps == 1:
            _, leaves = step(np.int32(0), state)
        else:
            _, leaves = lax.fori_loop(np.int32(0), self.steps, step, state)
        if self._delays and facts.has_wgmma:
            wgmma_wait(0)  # the buffers that it reads are about to go
        self._await_others()
        outputs.finish()
        return leaves

    @property
    def _delays(self) -> list[int]:
        return sorted({o.spec.delay_release for o, _ in self.inputs if o.spec.delay_release})

    def _refs(self, t: Any, slot: Any, outputs: Sequence[Any]) -> list[Any]:
        """What the body gets for each operand in step t."""
        written, refs = iter(outputs), []
        for o, buffer in zip(self.operands, self.buffers):
            if not o.is_copied:
                refs.append(o.view(grid_point(t, self.sizes)))
            else:
                refs.append(next(written) if o.is_output else buffer.at[slot])
        return refs

    def _fetch(self, t: Any, slot: Any, inputs: Sequence[tuple[Operand, Any]]) -> None:
        for o, buffer in inputs:
            o.fetch(grid_point(t, self.sizes), buffer.at[slot], self.ready.at[slot])

    def _release(self, t: Any, facts: Facts, committed: bool) -> None:
        """Fetch into the buffers that are free after step t: its own, or that of the step `delay_release` before."""
        if not self.inputs:
            return
        if self.done is not None:
            self._tell_others(t, facts)
        if is_known(self.steps) and self.steps <= self.count:
            return
        by_delay: dict[int, list[tuple[Operand, Any]]] = {}
        for o, buffer in self.inputs:
            delay = self._largest_delay if self.done is not None else o.spec.delay_release
            by_delay.setdefault(delay, []).append((o, buffer))
        commits = facts.by_threads and not committed and self.done is None
        if commits and len(by_delay) > 1:
            commit_smem()
        for delay, inputs in by_delay.items():
            ahead = t + np.int32(self.count - delay)
            slot = rem(ahead, np.int32(self.count))

            def fetch(ahead=ahead, slot=slot, inputs=inputs):
                if commits and len(by_delay) == 1:
                    commit_smem()  # what threads have read, the copy overwrites
                if self.done is not None:
                    barrier_wait(self.done.at[slot])
                self._fetch(ahead, slot, inputs)

            ops.when(_plain(all_of(t >= np.int32(delay) if delay else True, ahead < self.steps)))(fetch)

    # --- other blocks of the cluster ----------------------------------------------------------------------------------
    @property
    def _largest_delay(self) -> int:
        return max(self._delays, default=0)

    def _tell_others(self, t: Any, facts: Facts) -> None:
        """Say that a step has been done with: the one that the largest delay ago was."""
        if facts.by_threads:
            commit_smem()
        before = t - np.int32(self._largest_delay)
        slot = rem(before + np.int32(self.count), np.int32(self.count))
        ops.when(t >= np.int32(self._largest_delay) if self._largest_delay else True)(
            lambda: barrier_arrive(self.done.at[slot])
        )

    def _await_others(self) -> None:
        """Take the completions that no fetch has waited for, so that nobody leaves while others write its buffers."""
        if self.done is None:
            return
        for delay in range(self._largest_delay, 0, -1):
            t = self.steps - np.int32(delay)
            slot = rem(t + np.int32(self.count), np.int32(self.count))
            ops.when(_plain(t >= 0))(lambda slot=slot: barrier_arrive(self.done.at[slot]))
        for back in range(self.count, 0, -1):
            t = self.steps - np.int32(back)
            slot = rem(t + np.int32(self.count), np.int32(self.count))
            ops.when(_plain(t >= 0))(lambda slot=slot: barrier_wait(self.done.at[slot]))


def _plain(condition: Any) -> Any:
    return condition if isinstance(condition, jax.Array) else bool(condition)
