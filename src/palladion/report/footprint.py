"""What a call moves, computes and holds on chip: the numbers of its table.

- **Copies.** A pipeline copies an input block from HBM when the next program needs another block than this one, and
  an output block back when it is left: programs in a row with the same block share a copy (tutorial 6.1).
- **Arithmetic intensity** is flops over bytes moved (tutorial 6.3). Flops are counted from the kernel's jaxpr by the
  rules of `language/cost.py`, for every program, a `pl.when` body as if it always ran.
- **On chip** there are two buffers for each block (double buffering; `pl.Buffered` says otherwise, and a call with a
  single program needs one), the scratch, and the largest `run_scoped`. In VMEM the last two dimensions of a buffer
  are rounded up to whole tiles of 8x128, which is the least that a TPU does; narrow dtypes may take more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from palladion import jaxlink
from palladion.language import cost
from palladion.language.blocks import BoundedSlice, Element, Indirect, Squeezed
from palladion.language.dtypes import element_bits
from palladion.language.grid import BlockMapping
from palladion.language.ops import run_scoped_p
from palladion.report.calls import Call
from palladion.report.targets import TPUS, Limit, Target, limits, on_chip
from palladion.report.visits import Grid, Visits


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One row of a call's table: an operand, an output or a scratch buffer.

    Attributes:
      role: "prefetch", "input", "output" or "scratch".
      name: the kernel's parameter, or its number.
      array: the type of the whole array.
      block: see `block_shape`; None for scratch and scalar prefetch.
      memory_space: as jaxprs print it.
      block_bytes: bytes of one block.
      buffers: how many of them there are on chip (0: it stays off chip).
      copies: how often a block moves between HBM and chip; None when that is not known, or left to the kernel.
      moved_bytes: bytes of those copies.
      index_map: `file:line (name)` of the index map, None for the default one.
    """

    role: str
    name: str
    array: Any
    block: tuple[Any, ...] | None
    memory_space: str
    block_bytes: int
    buffers: int
    copies: int | None
    moved_bytes: int | None
    index_map: str | None


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The numbers of a call's table.

    Attributes:
      buffers: its rows.
      programs: of the grid; None when that is known only at run time.
      flops, transcendentals: of all programs; None when the grid is not known, or the kernel not traced.
      moved_bytes: between HBM and chip; None when a block index is not known.
      moves_more: whether the kernel moves further bytes itself (operands that stay in HBM).
      vector_bytes: on chip, blocks with their buffers and scratch.
      vmem_bytes: the same in a TPU's tiles.
      scalar_bytes: in the scalar memory of a TPU (SMEM).
      spare_vector_bytes, spare_vmem_bytes: of these, the second buffers of blocks that never change.
      sampled: whether copies and moved bytes are scaled up from a part of a large grid.
      limits: the on-chip memories it is measured against.
    """

    buffers: tuple[Buffer, ...]
    programs: int | None
    flops: int | None
    transcendentals: int | None
    moved_bytes: int | None
    moves_more: bool
    vector_bytes: int
    vmem_bytes: int
    scalar_bytes: int
    spare_vector_bytes: int
    spare_vmem_bytes: int
    sampled: bool
    limits: tuple[Limit, ...]

    @property
    def intensity(self) -> float | None:
        """Flops for each byte moved, or None."""
        if self.flops is None or not self.moved_bytes or self.moves_more:
            return None
        return self.flops / self.moved_bytes


def footprint(call: Call, target: Target, grid: Grid | None, visits: Sequence[Visits | None]) -> Footprint:
    """Measure a call.

    Arguments:
      call: the call.
      target: what it is written for.
      grid: its grid, or None when that is known only at run time.
      visits: for each input and output, the blocks that are visited, or None.
    """
    programs = None if grid is None else grid.programs
    mapping = call.grid_mapping
    names = [ref.label for ref in call.kernel_refs]
    rows, space, spare = [], _Space(target), _Space(target)
    for m, label in zip(mapping.prefetch_mappings, names):
        size = _bytes(m.array.shape, m.array.dtype)
        space.add(m.array, m.memory_space, 1, scalar=True)
        rows.append(Buffer("prefetch", _short(label), m.array, None, "smem", size, 1, 1, size, None))
    for number, (m, seen) in enumerate(zip(mapping.block_mappings, visits)):
        is_input = number < mapping.num_inputs
        count = buffers_of(call, m, target, programs, is_input)
        space.add(_Shape(m.ref_shape, m.array.dtype), m.memory_space, count)
        if count > 1 and seen is not None and seen.copies == 1:
            spare.add(_Shape(m.ref_shape, m.array.dtype), m.memory_space, count - 1)
        rows.append(
            Buffer(
                role="input" if is_input else "output",
                name=_short(m.origin),
                array=m.array,
                block=block_shape(m),
                memory_space=str(m.memory_space),
                block_bytes=_bytes(m.ref_shape, m.array.dtype),
                buffers=count,
                copies=seen.copies if seen is not None and count else None,
                moved_bytes=seen.moved_bytes if seen is not None and count else None,
                index_map=m.map_location,
            )
        )
    for ref in call.scratch_refs:
        held = on_chip(ref.memory_space, target) is not None
        space.add(ref, ref.memory_space, int(held))
        size = _bytes(ref.shape, ref.dtype)
        rows.append(
            Buffer("scratch", _short(ref.label), ref, None, str(ref.memory_space), size, int(held), None, None, None)
        )
    if call.jaxpr is not None:
        for ref in _largest_scope(call.jaxpr):
            space.add(ref, ref.memory_space, 1)
    moved = [row.moved_bytes for row in rows if row.role != "scratch" and row.buffers]
    work = None if call.jaxpr is None or programs is None else cost._count(call.jaxpr)
    return Footprint(
        buffers=tuple(rows),
        programs=programs,
        flops=None if work is None else work.flops * (programs or 0),
        transcendentals=None if work is None else work.transcendentals * (programs or 0),
        moved_bytes=None if programs is None or None in moved else sum(x for x in moved if x is not None),
        moves_more=any(row.role in ("input", "output") and not row.buffers for row in rows),
        vector_bytes=space.vector,
        vmem_bytes=space.tiled,
        scalar_bytes=space.scalar,
        spare_vector_bytes=spare.vector,
        spare_vmem_bytes=spare.tiled,
        sampled=grid is not None and grid.sampled,
        limits=tuple(limits(space.tiled, space.vector, target)),
    )


def buffers_of(call: Call, mapping: BlockMapping, target: Target, programs: int | None, is_input: bool) -> int:
    """How many blocks of an operand are on chip at once; 0 for an operand that stays off chip."""
    if on_chip(mapping.memory_space, target) is None or (target.is_gpu and mapping.is_default_map):
        return 0  # a GPU kernel gets an operand without a BlockSpec where it is, in global memory
    if mapping.pipeline_mode is not None:
        count = mapping.pipeline_mode.buffer_count
        return count if isinstance(count, int) else count[0 if is_input else 1]
    if target is Target.MOSAIC_GPU:
        return getattr(call.params["compiler_params"], "max_concurrent_steps", 1)
    return 1 if programs == 1 or target is Target.TRITON else 2


@dataclasses.dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: Any


class _Space:
    """Adds up what the buffers take in each on-chip memory."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.vector = self.tiled = self.scalar = 0

    def add(self, array: Any, memory_space: Any, count: int, scalar: bool = False) -> None:
        kind = "scalar" if scalar else on_chip(memory_space, self.target)
        size = _bytes(array.shape, array.dtype) * count
        if kind == "scalar":
            self.scalar += size
        elif kind == "vector":
            self.vector += size
            self.tiled += _bytes(_in_tiles(array.shape), array.dtype) * count


def _in_tiles(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with its last two dimensions rounded up to whole tiles."""
    *lead, columns = shape or (1,)
    if not lead:
        return (-(-columns // 128) * 128,)
    return (*lead[:-1], -(-lead[-1] // 8) * 8, -(-columns // 128) * 128)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return -(-math.prod(shape) * element_bits(dtype) // 8)


def block_shape(mapping: BlockMapping) -> tuple[Any, ...]:
    """The block shape as a user writes it: ints, "None" for squeezed dimensions, "Element(4)" and the like."""

    def dimension(block, size):
        if isinstance(block, (Element, BoundedSlice, Indirect)):
            return repr(block)
        return "None" if isinstance(block, Squeezed) else size

    return tuple(map(dimension, mapping.block_shape, mapping.sizes))


def _short(label: str) -> str:
    """x_ref of "x_ref (input 0)"; "input 0" stays."""
    return label.partition(" (")[0]


def _largest_scope(jaxpr: Any) -> list[Any]:
    """The Refs that `run_scoped` calls hold at once, in the costliest place of a kernel."""
    best: list[Any] = []
    for eqn in jaxpr.eqns:
        own = []
        if eqn.primitive is run_scoped_p:
            own = [v.aval for v in eqn.params["jaxpr"].invars[-eqn.params["num_scoped"] :]]
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            held = own + _largest_scope(getattr(inner, "jaxpr", inner))
            best = max(best, held, key=lambda refs: sum(_bytes(r.shape, r.dtype) for r in refs))
    return best


def compute_bound(intensity: float) -> list[str]:
    """The TPUs whose matrix units, not whose HBM, limit a bf16 kernel of this intensity (the ridge, tutorial 6.3)."""
    return [str(i.chip_version) for i in TPUS if intensity >= i.bf16_ops_per_second / i.mem_bw_bytes_per_second]
