"""`pltpu.emit_pipeline`: a loop over a grid inside a kernel, whose blocks are fetched and written back meanwhile.

A pipeline is described once and called with Refs. Calling it makes the buffers of each operand (`buffered.py`), takes
this core's part of the grid (`cores.py`), and traces the loop into the kernel (`schedule.py`).

Source: tutorial 4.1; the public documentation of `jax.experimental.pallas.tpu.emit_pipeline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames, ops
from palladion.language.blocks import BlockSpec, NoBlockSpec, RevisitMode
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import MemorySpace as AnySpace
from palladion.language.tpu.allocation import allocate
from palladion.language.tpu.block_copies import BlockWindow
from palladion.language.tpu.buffered import BufferedRef, BufferType
from palladion.language.tpu.cores import split_over_cores
from palladion.language.tpu.memory import HBM, VMEM
from palladion.language.tpu.params import GridDimensionSemantics, Tiling
from palladion.language.tpu.schedule import Operand, Schedule

__all__ = ["emit_pipeline", "emit_pipeline_with_allocations", "emit_pipeline_with_async_prefetch"]


# --- the pipeline -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """A pipeline as the user describes it; see `emit_pipeline`."""

    body: Callable[..., None]
    grid: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    tiling: Tiling | None = None
    core_axis: Any = None
    core_axis_name: Any = None
    dimension_semantics: Any = None
    trace_scopes: bool = True
    no_pipelining: bool = False
    explicit_indices: bool = False

    # --- what it works on ---------------------------------------------------------------------------------------------
    def allocations(self, *refs: Any) -> tuple[BufferedRef, ...]:
        """The buffers that the pipeline needs for these operands.

        Raises:
          TypeError, ValueError: the operands do not fit the specs.
        """
        return tuple(o.buffered for o in self._operands(refs))

    def _operands(self, refs: Sequence[Any], buffers: Sequence[BufferedRef] = ()) -> list[Operand]:
        """The operands, with buffers that are given for the first of them and types of buffers for the others."""
        specs = [*self.in_specs, *self.out_specs]
        if len(refs) != len(specs):
            ins, outs = count_of(len(self.in_specs), "input"), count_of(len(self.out_specs), "output")
            raise mistake(
                TypeError,
                f"The pipeline has specs for {ins} and {outs}, but it is called with {count_of(len(refs), 'Ref')}.",
                hint="pltpu.emit_pipeline(…)(*input_refs, *output_refs)",
            )
        operands = []
        for n, (spec, ref) in enumerate(zip(specs, refs)):
            is_output = n >= len(self.in_specs)
            role = f"output {n - len(self.in_specs)}" if is_output else f"input {n}"
            if not is_ref(ref):
                headline = f"The {role} of the pipeline is {kind_of(ref)}; it must be a Ref."
                raise mistake(TypeError, headline, hint="pass x_ref, or x_ref.at[…] for a part of it")
            window = BlockWindow.make(spec, ref.shape, f"{role} of the pipeline ({label_of(ref)})")
            buffered = buffers[n] if n < len(buffers) else self._buffered(spec, ref, window, is_output)
            operands.append(Operand(ref, buffered, window))
        return operands

    def _buffered(self, spec: Any, ref: Any, window: BlockWindow, is_output: bool) -> BufferedRef:
        spec = BlockSpec() if spec is None or isinstance(spec, NoBlockSpec) else spec
        mode, kind = spec.pipeline_mode, BufferType.OUTPUT if is_output else BufferType.INPUT
        count = mode.buffer_count if mode else 1 if window.is_all else 2
        if isinstance(count, tuple):
            hint = "give pltpu.BufferedRef.input_output(spec, dtype, (in, out)) as one of the allocations"
            headline = f"The {window.label} has a pair of buffer counts, {count}, but the pipeline only "
            raise mistake(ValueError, f"{headline}{'writes' if is_output else 'reads'} it.", hint=hint)
        if is_output and mode and mode.revisit is RevisitMode.ANY:  # what an earlier visit wrote is read back
            kind, count = BufferType.INPUT_OUTPUT, (1, 1)
        elif self.no_pipelining:
            count = 1
        in_place = spec.memory_space in (HBM, AnySpace.ANY)
        if in_place and window.may_be_partial:
            raise mistake(
                ValueError,
                f"The blocks of the {window.label} stay in {spec.memory_space}, but some lie over its edge.",
                hint="choose a block shape that divides the array, or let the pipeline copy blocks: memory_space=None",
            )
        buffered = BufferedRef.create(
            dataclasses.replace(spec, block_shape=window.block),
            ref.dtype,
            kind,
            count,
            grid_rank=len(self.grid),
            source_memory_space=HBM if window.may_be_partial else _space_of(ref),
            tiling=self.tiling,
            is_trivial_windowing=window.is_all,
            prefetched_count=mode.prefetched_count if mode else 0,
        )
        parts = {"window_ref": "buffers", "sem_recvs": "fetch semaphores", "sem_sends": "write semaphores"}
        types = {field: getattr(buffered, field) for field in parts}
        named = {
            field: type_ and dataclasses.replace(type_, label=f"the {parts[field]} of {window.label}")
            for field, type_ in types.items()
        }
        return dataclasses.replace(buffered, **named)

    # --- running it ---------------------------------------------------------------------------------------------------
    def __call__(self, *refs: Any, scratches: Any = (), allocations: Any = None) -> None:
        """Run the pipeline on these Refs, inputs first.

        Arguments:
          *refs: the operands, where they are.
          scratches: further Refs for the body, after those of the blocks.
          allocations: a BufferedRef for each operand, or for each input: from `emit_pipeline_with_allocations`, from a
            prefetch, or one's own. By default the pipeline allocates its buffers.

        Raises:
          TypeError, ValueError: the Refs do not fit the specs; outside a kernel.
        """
        frames.required("A pipeline (pltpu.emit_pipeline)")
        scratches = () if scratches is None else tuple(scratches)
        given = jax.tree.leaves(allocations, is_leaf=lambda x: isinstance(x, BufferedRef))
        counts = (0, len(self.in_specs), len(refs))
        if len(given) not in counts or not all(isinstance(b, BufferedRef) for b in given):
            headline = f"The allocations of a pipeline of {count_of(len(refs), 'operand')} are {kind_of(allocations)}."
            raise mistake(TypeError, headline, hint="one pltpu.BufferedRef for each operand, or for each input")
        others = self._operands(refs, given)[len(given) :]
        for operand in others:
            if operand.buffered.prefetched_count:
                raise mistake(
                    ValueError,
                    f"The {operand.window.label} has prefetched blocks, but the pipeline makes its buffers itself.",
                    hint="run it with allocations=…, from pltpu.emit_pipeline_with_async_prefetch for one",
                )
        own = tuple(o.buffered for o in others)

        def run(own):
            self._schedule(self._operands(refs, [*given, *own]), *self._split(), scratches).run()

        ops.run_scoped(run, own) if jax.tree.leaves(own) else run(own)

    def prefetch(self, *inputs: Any) -> tuple[BufferedRef, ...]:
        """Start to fetch the first blocks of the inputs, as many as their `pl.Buffered(…, prefetched_count=n)` says.

        Arguments:
          *inputs: the Refs of the inputs.

        Returns:
          their buffers, for `allocations=` of the pipeline, which goes on with these blocks.

        Raises:
          TypeError, ValueError: the Refs do not fit the specs; outside a kernel.
        """
        frames.required("The prefetch of a pipeline")
        inputs_only = dataclasses.replace(self, out_specs=())
        buffers = [
            jax.tree.map(allocate, b, is_leaf=lambda x: hasattr(x, "shape")) for b in inputs_only.allocations(*inputs)
        ]
        schedule = self._schedule(inputs_only._operands(inputs, buffers), *self._split(), ())
        schedule.prefetch()
        return tuple(dataclasses.replace(b, await_prefetch=b.prefetched_count > 0) for b in buffers)

    def _split(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return split_over_cores(self.grid, self.core_axis, self.core_axis_name, self.dimension_semantics)

    def _schedule(self, operands: list[Operand], grid: Any, offsets: Any, scratches: tuple[Any, ...]) -> Schedule:
        how = self.trace_scopes, self.no_pipelining, self.explicit_indices
        return Schedule(self.body, operands, scratches, self.grid, grid, offsets, *how)


def _space_of(ref: Any) -> Any:
    space = ref.memory_space if isinstance(ref, jaxlink.TransformedRef) else jaxlink.typeof(ref).memory_space
    return VMEM if space is None or space is AnySpace.DEFAULT else space


# --- what users call --------------------------------------------------------------------------------------------------
def _pipeline(body: Callable[..., None], grid: Any, in_specs: Any, out_specs: Any, **options: Any) -> _Pipeline:
    """The description of a pipeline, checked."""
    if not callable(body):
        headline = f"The body of a pipeline is a function of Refs, not {kind_of(body)}."
        raise mistake(
            TypeError, headline, hint="pltpu.emit_pipeline(body, grid=…, in_specs=…, out_specs=…)(x_ref, o_ref)"
        )
    return _Pipeline(body, _grid(grid), _specs(in_specs), _specs(out_specs), **options)


def _specs(specs: Any) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: x is None or isinstance(x, (BlockSpec, NoBlockSpec)))
    return tuple(leaves)


def _grid(grid: Any) -> tuple[Any, ...]:
    """Sizes as np.int32, or int32 scalars known at run time."""
    sizes = []
    for size in tuple(grid) if isinstance(grid, (tuple, list)) else (grid,):
        if not ops.is_integer(size) or isinstance(size, bool):
            hint = "grid=(4, n_ref[0]): integers, or integer scalars known at run time"
            raise mistake(TypeError, f"An axis of a pipeline's grid is {kind_of(size)}.", hint=hint)
        if isinstance(size, jaxlink.Tracer):
            sizes.append(lax.convert_element_type(size, np.int32))
        elif size < 0:
            raise mistake(ValueError, f"The grid of a pipeline, {grid}, has a negative size.", hint="sizes are counts")
        else:
            sizes.append(np.int32(size))
    return tuple(sizes)


def emit_pipeline(
    body: Callable[..., None],
    *,
    grid: tuple[int | jax.Array, ...],
    in_specs: Any = (),
    out_specs: Any = (),
    tiling: Tiling | None = None,
    core_axis: tuple[int, ...] | int | None = None,
    core_axis_name: tuple[str, ...] | str | None = None,
    dimension_semantics: tuple[GridDimensionSemantics, ...] | None = None,
    trace_scopes: bool = True,
    no_pipelining: bool = False,
    output_wait_read_only: bool = False,
    _explicit_indices: bool = False,
) -> Callable[..., None]:
    """A software pipeline inside a kernel: `pallas_call`'s grid and blocks, over Refs that stay where they are.

        def kernel(x_hbm, o_hbm):
            def body(x_ref, o_ref):
                o_ref[...] = x_ref[...] + 1

            spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
            pltpu.emit_pipeline(body, grid=(4,), in_specs=[spec], out_specs=[spec])(x_hbm, o_hbm)

    Blocks of operands in HBM (or `pl.ANY`) are copied to VMEM, or to the memory that their BlockSpec names, and back,
    while the body works on others; `pl.Buffered(n)` sets how many are held at once. Of an operand that is in that
    memory already, or whose BlockSpec says `pl.ANY`, the body gets a view. In the body and in index maps
    `pl.program_id` and `pl.num_programs` are those of the pipeline's grid. Index maps may read the kernel's Refs.
    Pipelines nest.

    Arguments:
      body: called with a Ref of the block of each input, of each output, then with the scratch Refs.
      grid: sizes; integers, or integer scalars known at run time.
      in_specs, out_specs: a BlockSpec (or None: the whole array) for each operand.
      tiling: the layout of the buffers; nothing here depends on it.
      core_axis: the axis (or axes) of the kernel's grid that the cores are along: each runs a part of the pipeline.
      core_axis_name: the same, for the axes of a core mesh.
      dimension_semantics: for each axis of the grid, `pltpu.PARALLEL` if it may be split over cores.
      trace_scopes: name the parts of the pipeline in profiles (`jax.named_scope`).
      no_pipelining: make every copy wait at once, to see whether a bug is one of overlap.
      output_wait_read_only: allow the end of a write to go unawaited; here it is always awaited.
      _explicit_indices: give the body a `PipelineStep` first.

    Returns:
      a function of the operands' Refs, inputs first; it also takes `scratches=` (Refs for the body) and `allocations=`.

    Raises:
      TypeError, ValueError: the grid or, when the pipeline is called, its operands are not as described.
    """
    pipeline = _pipeline(
        body, grid, in_specs, out_specs, tiling=tiling, core_axis=core_axis, core_axis_name=core_axis_name,
        dimension_semantics=dimension_semantics, trace_scopes=trace_scopes, no_pipelining=no_pipelining,
        explicit_indices=_explicit_indices,
    )  # fmt: skip
    return pipeline.__call__


def emit_pipeline_with_allocations(
    body: Callable[..., None], *, grid: Any, in_specs: Any = (), out_specs: Any = ()
) -> tuple[Callable[..., None], Callable[..., tuple[BufferedRef, ...]]]:
    """A pipeline, and a function that says what buffers it needs, so that several runs of it can share them.

        pipeline, allocations = pltpu.emit_pipeline_with_allocations(body, grid=(4,), in_specs=[spec], out_specs=[spec])
        pl.run_scoped(lambda buffers: pipeline(x_hbm, o_hbm, allocations=buffers), allocations(x_hbm, o_hbm))

    Arguments:
      body, grid, in_specs, out_specs: as `emit_pipeline`.

    Returns:
      (pipeline, allocations): `allocations(*refs)` gives a `BufferedRef` for each operand, for `run_scoped`.
    """
    pipeline = _pipeline(body, grid, in_specs, out_specs)
    return pipeline.__call__, pipeline.allocations


def emit_pipeline_with_async_prefetch(
    body: Callable[..., None],
    *,
    grid: tuple[int | jax.Array, ...],
    in_specs: Any = (),
    out_specs: Any = (),
    mesh: Any,
    tiling: Tiling | None = None,
    core_axis: tuple[int, ...] | int | None = None,
    core_axis_name: tuple[str, ...] | str | None = None,
    dimension_semantics: tuple[GridDimensionSemantics, ...] | None = None,
    trace_scopes: bool = True,
    no_pipelining: bool = False,
    _explicit_indices: bool = False,
) -> tuple[Callable[..., None], Callable[..., tuple[BufferedRef, ...]]]:
    """A pipeline, and a function that starts its first fetches ahead of it.

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(2, prefetched_count=1))
        pipeline, prefetch = pltpu.emit_pipeline_with_async_prefetch(body, grid=(4,), in_specs=[spec], …, mesh=mesh)
        buffers = prefetch(x_hbm)
        ...  # other work, while the first block comes
        pipeline(x_hbm, o_hbm, allocations=buffers)

    Arguments:
      body, grid, in_specs, out_specs, tiling, core_axis, core_axis_name, dimension_semantics, trace_scopes,
        no_pipelining, _explicit_indices: as `emit_pipeline`.
      mesh: the cores of the kernel. The buffers of the inputs are each core's own, until the kernel ends.

    Returns:
      (pipeline, prefetch): `prefetch(*inputs)` gives buffers for the pipeline's `allocations=`. Every prefetch is to be
      followed by a run of the pipeline with its buffers, which waits for it.
    """
    pipeline = _pipeline(
        body, grid, in_specs, out_specs, tiling=tiling, core_axis=core_axis, core_axis_name=core_axis_name,
        dimension_semantics=dimension_semantics, trace_scopes=trace_scopes, no_pipelining=no_pipelining,
        explicit_indices=_explicit_indices,
    )  # fmt: skip
    return pipeline.__call__, pipeline.prefetch
