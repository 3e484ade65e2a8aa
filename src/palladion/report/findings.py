"""What can be wrong with a call before it meets hardware: a table of small checks.

Each check takes an `Analysis` and yields `Finding`s. Levels: "error" is wrong on a target that the call is, or may
be, meant for; "warning" is wrong on a target that the call does not name; "note" is worth knowing.

| check | kind | what must hold | source |
|---|---|---|---|
| out_of_bounds | out-of-bounds | block indices lie in the array | tutorial 2.2 |
| unwritten | uninitialized-read | every output block is visited, every output written | tutorial 2.1, 3.2 |
| revisited | revisited-block | programs that share an output block run one after another | tutorial 4.4 |
| shared | race | programs that run in parallel do not share output blocks | tutorial 3.1, 6.2 |
| tpu_shapes | illegal-shape | the last two block dimensions suit a TPU | tutorial 6.1 |
| triton_shapes | illegal-shape | block dimensions are powers of two in Triton | tutorial 6.2 |
| overflow | vmem-overflow, smem-overflow | buffers fit on the chip | tutorial 6.3 |
| unchecked | not-checked | (says what could not be looked at) | |
| gpu_advice.advice | performance | (what costs time in a Mosaic GPU kernel) | see there |

What a TPU and Triton refuse beyond the tutorial's words (squeezed dimensions count as 1, bool as 32 bits in the rule
for one dimension, operands left in HBM are not cut into blocks) was measured by lowering with JAX 0.12.0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from palladion.errors import Finding
from palladion.language.dtypes import element_bits
from palladion.language.grid import BlockMapping
from palladion.language.index_maps import MAX_POINTS, reads_prefetch
from palladion.report import access, gpu_advice
from palladion.report.analysis import Analysis
from palladion.report.calls import MAX_VALUES, short_type
from palladion.report.footprint import block_shape
from palladion.report.targets import (
    LARGEST_SCALAR_MEMORY,
    LARGEST_VMEM,
    SHARED_MEMORY_BYTES,
    Target,
    axis_semantics,
    on_chip,
)
from palladion.report.text import bytes_text, listing, plural, tuple_text
from palladion.report.visits import find_revisit, find_sharing, find_unvisited


def _map_location(a: Analysis, mapping: BlockMapping) -> str | None:
    """The line of an operand's index map; for a default one, the kernel's."""
    return mapping.map_location or _kernel_location(a)


def _kernel_location(a: Analysis) -> str | None:
    return f"{a.call.kernel_at} ({a.call.name})" if a.call.kernel_at else None


# --- which blocks ---------------------------------------------------------------------------------------------------
def out_of_bounds(a: Analysis) -> Iterator[Finding]:
    """Executors clamp a block index outside the array, so that the program gets another block than it asked for."""
    for item in a.out_of_range:
        low, high = item.extent
        visits = next((v for v in a.visits if v is not None and v.mapping is item.mapping), None)
        count = 0 if visits is None or visits.grid.sampled else visits.outside
        yield Finding(
            kind="out-of-bounds",
            level="error",
            message=f"{item.mapping.origin} is asked for block {item.index} in dimension {item.dimension}, outside the "
            f"valid range {low}..{high}.",
            where=_map_location(a, item.mapping),
            when=f"program {tuple_text(item.point)}" + (f", the first of {count}" if count > 1 else ""),
            hint=item.hint,
            operand=item.mapping.origin,
        )


def unwritten(a: Analysis) -> Iterator[Finding]:
    """What no program writes holds whatever was in memory; an aliased output starts as its operand."""
    variables, by_blocks = a.call.output_vars, {number: visits for number, _, visits in a.outputs}
    for number, mapping in enumerate(a.call.grid_mapping.outputs):
        if number in a.call.aliased_outputs or not math.prod(mapping.array.shape):
            continue
        if variables and not access.is_written(a.call.jaxpr, variables[number]):
            yield Finding(
                kind="uninitialized-read",
                level="error",
                message=f"The kernel never writes {mapping.origin}: its caller reads uninitialised memory.",
                where=_kernel_location(a),
                hint="assign to the output Ref (o_ref[...] = value), or alias it to an operand with "
                "input_output_aliases",
                operand=mapping.origin,
            )
            continue
        visits = by_blocks.get(number)
        if visits is None or visits.grid.sampled:
            continue
        try:
            missing = find_unvisited(visits)
        except OverflowError:
            yield _not_checked(f"{mapping.origin} has too many elements to find those that are never written.", mapping)
            continue
        if missing is not None:
            yield Finding(
                kind="uninitialized-read",
                level="error",
                message=f"Output block never written: {missing.count} of {missing.total} {missing.unit} of "
                f"{mapping.origin}, first {tuple_text(missing.first)}.",
                where=_map_location(a, mapping),
                hint=f"no program of the grid {tuple_text(visits.grid.sizes)} visits them: make the grid larger "
                "(pl.cdiv(size, block)) or change the output's index map",
                operand=mapping.origin,
            )


def revisited(a: Analysis) -> Iterator[Finding]:
    """A TPU writes an output block back when it is left, and does not read it again when it is revisited."""
    if a.target.is_gpu:
        return
    for _, mapping, visits in a.outputs:
        if visits is None or _leaves_range(a, mapping):  # out of range: what follows from clamping is no news
            continue
        revisit = find_revisit(visits)
        if revisit is None:
            continue
        sharing = find_sharing(visits)
        axes = () if sharing is None else sharing.axes
        yield Finding(
            kind="revisited-block",
            level="error",
            message=f"Revisited block {tuple_text(revisit.block)} of {mapping.origin} in iteration "
            f"{tuple_text(revisit.point)}, previously visited in iterations {tuple_text(revisit.first)} through "
            f"{tuple_text(revisit.last)}.",
            where=_map_location(a, mapping),
            when=f"program {tuple_text(revisit.point)}; {plural(revisit.count, 'block')} in all",
            hint=f"put {_axes(axes)}, along which the block repeats, last in the grid. A TPU writes a block back when "
            "it is left, and does not read it again: what was accumulated is lost",
            operand=mapping.origin,
        )


def shared(a: Analysis) -> Iterator[Finding]:
    """Programs of a GPU, and along a TPU's parallel axes, run at once; on a shared block the last one wins."""
    for number, mapping, visits in a.outputs:
        if visits is None or _leaves_range(a, mapping) or (sharing := find_sharing(visits)) is None:
            continue
        in_parts = bool(a.call.output_vars) and not access.writes_whole(a.call.jaxpr, a.call.output_vars[number])
        level, why, hint = _judge_sharing(a, sharing.axes, in_parts)
        if level is None:
            continue
        yield Finding(
            kind="race",
            level=level,
            message=f"Programs {tuple_text(sharing.points[0])} and {tuple_text(sharing.points[1])} share block "
            f"{tuple_text(sharing.block)} of {mapping.origin}: {why}.",
            where=_map_location(a, mapping),
            when=f"along {_axes(sharing.axes)}, for {sharing.count} of {plural(sharing.total, 'block')}",
            hint=hint,
            operand=mapping.origin,
        )


def _judge_sharing(a: Analysis, axes: tuple[int, ...], in_parts: bool) -> tuple[str | None, str, str]:
    """(level, what it means, hint) of output blocks that repeat along these grid axes; level None: all is well."""
    semantics = axis_semantics(a.call, a.target, len(a.values.grid))
    parallel = [axis for axis in axes if semantics[axis] == "parallel"]
    loop = "loop over that axis inside the kernel (lax.fori_loop)"
    if parallel and getattr(a.call.params["compiler_params"], "dimension_semantics", None) is not None:
        why = f"{_axes(parallel)} is declared parallel"
        return "error", why, "declare an axis along which output blocks repeat 'arbitrary' ('sequential' on a GPU)"
    if in_parts:  # of each block, a program writes what it computed the place of: nothing says that places overlap
        why = "a race where programs run in parallel (GPU), if the parts that they write overlap"
        return None if a.target is Target.TPU else "note", why, "give each program its own block"
    if parallel:
        return "error", "programs of a GPU run in parallel", f"give each program its own block, and {loop}"
    if any(semantics[axis] == "unknown" for axis in axes):
        hint = f"{loop}; for a TPU alone, declare it 'arbitrary' in pltpu.CompilerParams(dimension_semantics=...)"
        return "warning", "a race on a GPU, where programs run in parallel", hint
    # Every axis is run in order: on a TPU by default, on a GPU because the call declares it sequential.
    level = None if a.target is Target.MOSAIC_GPU else "note"
    return level, "in order on a TPU, a race on a GPU", f"nothing on a TPU; on a GPU, {loop}"


def _leaves_range(a: Analysis, mapping: BlockMapping) -> bool:
    return any(item.mapping is mapping for item in a.out_of_range)


def _axes(axes: tuple[int, ...] | list[int]) -> str:
    return f"grid ax{'i' if len(axes) == 1 else 'e'}s {listing([str(axis) for axis in axes])}"


# --- block shapes ---------------------------------------------------------------------------------------------------
def tpu_shapes(a: Analysis) -> Iterator[Finding]:
    """The shapes that the Mosaic TPU compiler takes: vector registers have 8 x 128 elements."""
    if a.target.is_gpu:
        return
    level, verb = ("error", "refuses") if a.target is Target.TPU else ("warning", "would refuse")
    for legal, rule in (
        (_suits_two_dimensions, "the last two dimensions of a block must be divisible by 8 and 128, or be the array's"),
        (
            _suits_one_dimension,
            "a block of one dimension must be the whole array, a multiple of 1024, or a power of two of at least "
            "128 * (32 / bits of the dtype)",
        ),
        (_suits_memory, "an operand in pl.ANY or HBM is passed whole: give it no block shape, and copy parts of it"),
    ):
        refused = [m for m in a.call.grid_mapping.block_mappings if math.prod(m.array.shape) and not legal(m, a.target)]
        if refused:
            yield _shapes(a, level, f"A TPU {verb}", refused, rule)


def _suits_two_dimensions(m: BlockMapping, target: Target) -> bool:
    if len(m.sizes) < 2 or on_chip(m.memory_space, target) is None:
        return True
    rows, columns = (size == n or size % by == 0 for size, n, by in zip(m.sizes[-2:], m.array.shape[-2:], (8, 128)))
    return rows and columns


def _suits_one_dimension(m: BlockMapping, target: Target) -> bool:
    if len(m.sizes) != 1 or on_chip(m.memory_space, target) is None:
        return True
    size = m.sizes[0]
    bits = 32 if m.array.dtype == np.bool_ else element_bits(m.array.dtype)
    return size == m.array.shape[0] or size % 1024 == 0 or (_is_power_of_two(size) and size * bits >= 128 * 32)


def _suits_memory(m: BlockMapping, target: Target) -> bool:
    return on_chip(m.memory_space, target) is not None or m.covers_array


def triton_shapes(a: Analysis) -> Iterator[Finding]:
    """Triton's arrays have power-of-two dimensions; an operand with no BlockSpec may be read in such parts."""
    if a.target not in (Target.TRITON, Target.ANY):
        return
    refused = []
    mapping = a.call.grid_mapping
    for number, m in enumerate(mapping.block_mappings, mapping.num_prefetch):
        if all(_is_power_of_two(n) for n in m.ref_shape) or not math.prod(m.array.shape):
            continue
        jaxpr = a.call.jaxpr
        if m.is_default_map and (jaxpr is None or not access.uses_whole(jaxpr, jaxpr.invars[number])):
            continue
        refused.append(m)
    if refused:
        level, verb = ("error", "refuses") if a.target is Target.TRITON else ("note", "would refuse")
        yield _shapes(a, level, f"Triton {verb}", refused, "every dimension of a block must be a power of two")


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _shapes(a: Analysis, level: str, subject: str, refused: list[BlockMapping], rule: str) -> Finding:
    blocks = [f"{tuple_text(block_shape(m))} of {m.origin} {short_type(m.array)}" for m in refused]
    shown = listing(blocks) if len(blocks) <= 3 else f"{', '.join(blocks[:2])} and {len(blocks) - 2} more"
    return Finding(
        kind="illegal-shape",
        level=level,
        message=f"{subject} the block{'' if len(blocks) == 1 else 's'} {shown}.",
        where=_map_location(a, refused[0]),
        hint=rule,
        operand=", ".join(m.origin for m in refused),
    )


# --- memory ---------------------------------------------------------------------------------------------------------
def overflow(a: Analysis) -> Iterator[Finding]:
    """Buffers that no chip of the kind can hold; the table shows the smaller chips too."""
    size = a.footprint
    one_buffer = ", or hold one buffer of a block that never changes: pipeline_mode=pl.Buffered(1)"
    limit = getattr(a.call.params["compiler_params"], "vmem_limit_bytes", None)
    tpu, gpu = Target.TPU, Target.MOSAIC_GPU
    cases = [
        # kind, targets and levels, bytes taken, those of them to spare, bytes there, words
        ("vmem-overflow", {tpu: "error", Target.ANY: "warning"}, size.vmem_bytes, size.spare_vmem_bytes, LARGEST_VMEM,
         "VMEM, more than any TPU has"),
        ("vmem-overflow", {tpu: "error"}, size.vmem_bytes, size.spare_vmem_bytes, limit or LARGEST_VMEM,
         "VMEM, more than vmem_limit_bytes allows"),
        ("smem-overflow", {tpu: "error"}, size.scalar_bytes, 0, LARGEST_SCALAR_MEMORY,
         "SMEM (scalar memory), more than any TPU has"),
        ("smem-overflow", {gpu: "error", Target.TRITON: "warning", Target.ANY: "note"}, size.vector_bytes,
         size.spare_vector_bytes, SHARED_MEMORY_BYTES, "shared memory, more than an SM of an H100 or B200 has"),
    ]  # fmt: skip
    for kind, levels, taken, spare, there, words in cases:
        if a.target in levels and taken > there:
            yield Finding(
                kind=kind,
                level=levels[a.target],
                message=f"Blocks and scratch take {bytes_text(taken)} of {words} ({bytes_text(there)}).",
                where=_kernel_location(a),
                hint="make the blocks smaller" + (one_buffer if spare and taken - spare <= there else ""),
            )


# --- what could not be looked at ------------------------------------------------------------------------------------
def unchecked(a: Analysis) -> Iterator[Finding]:
    """Notes on what this check does not know."""
    if a.grid is None:
        yield _not_checked("Blocks are not checked: the size of the grid is known only at run time (under jit).")
        return
    if a.grid.sampled:
        yield _not_checked(
            f"The grid has {a.grid.programs:,} programs, more than {MAX_POINTS:,}: {a.grid.points.shape[1]:,} of them "
            "are looked at, and not whether every output block is written."
        )
    for mapping, visits in zip(a.call.grid_mapping.block_mappings, a.visits):
        if visits is None and reads_prefetch(mapping):
            yield _not_checked(
                f"The blocks of {mapping.origin} are not checked: they depend on run-time values (scalar prefetch "
                "under jit).",
                mapping,
            )
    if a.call.values_left_out:
        yield _not_checked(f"The call was made with more than {MAX_VALUES} sets of run-time values; those are checked.")


def _not_checked(message: str, mapping: BlockMapping | None = None) -> Finding:
    location, operand = (None, None) if mapping is None else (mapping.map_location, mapping.origin)
    return Finding("not-checked", "note", message, where=location, operand=operand)


CHECKS: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
    out_of_bounds,
    unwritten,
    revisited,
    shared,
    tpu_shapes,
    triton_shapes,
    overflow,
    unchecked,
    gpu_advice.advice,
)
