"""What tcgen05.mma computes: operands out of shared and Tensor Memory, the product, and the accumulator's
place.

All functions are over arrays; who issues, when the result appears and which thread may look at it is
`tcgen05`'s matter. The placement of D (and of A in Tensor Memory) is a list of `Segment`s, rectangles of
lanes and columns that hold a rectangle of D, from the layouts A to G of the PTX manual (facts file 8.7).
Scales and sparsity metadata: facts file 8.8; the places that it marks as known from one source only (sparse
metadata, B scales of M = 128 in pairs) are followed as given. Sums are float32 (float64 before one rounding
for block-scaled kinds), see `numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from palladion.emulator.descriptors import IllegalDescriptor, MatrixDescriptor, gather
from palladion.emulator.numbers import FORMATS, elements, from_f16, slots, table, to_f16, to_s32
from palladion.emulator.tcgen05_kinds import Instruction
from palladion.emulator.tmem import Region, TensorMemory, split

Array = np.ndarray


@dataclass(frozen=True)
class Segment:
    """D[row : row + rows, column : column + columns] in lanes from `lane` and columns from `at`, in CTA `cta`
    of the pair."""

    cta: int
    row: int
    rows: int
    column: int
    columns: int
    lane: int
    at: int = 0


@cache
def placement(m: int, n: int, group: int, ws: bool, sparse: bool, lane: int) -> tuple[Segment, ...]:
    """Where D lives; `lane` is the lane field of its address (0, or 16 for the layouts that use half of the lanes).

    Raises: IllegalDescriptor where that lane is not legal for the layout.
    """
    halves = (group == 1 and m == 64 and not ws) or (group == 2 and m == 128 and sparse)
    if lane not in ((0, 16) if halves else (0,)):
        legal = "0 or 16" if halves else "0"
        raise IllegalDescriptor(f"D of M = {m} starts in lane {lane}; it must be lane {legal}")
    if halves:  # layouts F and C: 16 rows in every 32 lanes
        return tuple(Segment(cta, 64 * cta + 16 * w, 16, 0, n, 32 * w + lane) for cta in range(group) for w in range(4))
    if group == 2 and m == 128:  # layout B
        return tuple(Segment(cta, 64 * cta, 64, h * (n // 2), n // 2, 64 * h) for cta in range(2) for h in range(2))
    if ws and m < 128:  # layouts E and G
        parts = 128 // m
        return tuple(Segment(0, 0, m, h * (n // parts), n // parts, m * h) for h in range(parts))
    return tuple(Segment(cta, 128 * cta, 128, 0, n, 0) for cta in range(group))  # layouts D and A


@dataclass(frozen=True)
class Job:
    """One tcgen05.mma, with everything that it reads by value except memory."""

    instruction: Instruction
    group: int
    ws: bool
    d: int
    a: MatrixDescriptor | int  # a descriptor, or a Tensor Memory address
    b: MatrixDescriptor
    accumulate: bool
    scale_a: int = 0
    scale_b: int = 0
    scales: int = 0  # per row; 0 where the kind has none
    metadata: int = 0
    disabled: tuple[int, ...] = ()  # 32-bit masks of D lanes not to write
    scale_d: int = 0

    def segments(self) -> tuple[Segment, ...]:
        i = self.instruction
        return placement(i.m, i.n, self.group, self.ws, i.sparse, split(self.d)[0])

    def output_regions(self) -> list[tuple[int, Region]]:
        """(CTA of the pair, region) that are written."""
        at = split(self.d)[1]
        return [(s.cta, Region(s.lane, s.rows, at + s.at, s.columns)) for s in self.segments()]

    def input_regions(self) -> list[tuple[int, Region]]:
        """(CTA of the pair, region) that are read besides D: A, scales, metadata."""
        out: list[tuple[int, Region]] = []
        if isinstance(self.a, int):
            at = split(self.a)[1]
            out += [(s.cta, Region(s.lane, s.rows, at, 8)) for s in self.segments()]
        i = self.instruction
        for cta in range(self.group):
            if self.scales:
                out.append((cta, Region(0, 128, split(self.scale_a)[1], -(-min(i.m, 128) // 32))))
                out.append((cta, Region(0, 128, split(self.scale_b)[1], -(-i.n // 32))))
            if i.sparse:
                out.append((cta, Region(0, 128, split(self.metadata)[1], 2 if FORMATS[i.a].bits <= 8 else 1)))
        return out


# ---- operands


def _shared(
    memory: Array, where: MatrixDescriptor, mn_major: bool, rows: int, depth: int, name: str, packed: bool
) -> Array:
    """An operand from shared memory as float32 (rows, depth)."""
    form = FORMATS[name]
    item = max(1, form.bits // 8)
    if mn_major:
        atom = where.swizzle.low == 5
        if (form.bits == 32) != atom:
            raise IllegalDescriptor(
                f"{where}: MN-major {name} {'needs' if form.bits == 32 else 'excludes'} the 32-byte atom"
            )
        raw = gather(memory, where, True, rows, depth, item)
        return form.decode(elements(np.ascontiguousarray(raw), 8 * item)).T
    width = depth // 2 if packed else depth * item
    if where.swizzle.span and width > max(32, where.swizzle.span):
        raise IllegalDescriptor(f"{where}: {width} bytes of K in a row do not fit its swizzle")
    raw = gather(memory, where, False, rows, width, item)
    if packed:
        return form.decode(elements(raw, 4))
    return form.decode(slots(raw, form.bits) if form.bits < 8 else elements(raw, 8 * item))


def _tensor_a(memory: TensorMemory, lanes: slice, column: int, name: str, packed: bool) -> Array:
    """A from Tensor Memory, 8 columns of the given lanes, as float32 (rows, K)."""
    form = FORMATS[name]
    raw = np.ascontiguousarray(memory.cells[lanes, column : column + 8]).view(np.uint8)
    if packed:
        return form.decode(elements(raw, 4))
    if form.bits < 8:  # a container a byte: 4-bit types in bits 5:2, 6-bit types in bits 5:0
        return form.decode((raw >> 2) & 15 if form.bits == 4 else raw & 63)
    return form.decode(elements(raw, form.bits))


def expand_sparse(values: Array, words: Array, bits: int) -> Array:
    """Compressed rows (m, k / 2) to (m, k): each 4-bit index places two neighbours among four (32-bit: one among two).

    `words`: index nibbles (m, k / 4), or (m, k / 2) for 32-bit types.
    """
    rows, half = values.shape
    out = np.zeros((rows, 2 * half), values.dtype)
    row = np.arange(rows)[:, None]
    if bits == 32:
        np.put_along_axis(out, 2 * np.arange(half)[None, :] + (words >> 1 & 1), values, axis=1)
        return out
    group = 4 * np.arange(half // 2)[None, :]
    out[row, group + (words & 3)] = values[:, 0::2]
    out[row, group + (words >> 2 & 3)] = values[:, 1::2]
    return out


def _metadata(memory: TensorMemory, job: Job, rows: int, lanes: list[int]) -> Array:
    """Index nibbles of a CTA's rows; `lanes`: first lane of each block of 16 rows."""
    i = job.instruction
    column = split(job.metadata)[1]
    bits = FORMATS[i.a].bits
    m = np.arange(rows)[:, None]
    start = np.array(lanes)[m // 16]
    if bits <= 8:  # one lane a row, 64 bits in two columns
        lane = start + m % 16
        nibble = np.arange(i.depth // 4)[None, :]
        return memory.cells[lane, column + nibble // 8] >> (4 * (nibble % 8)).astype(np.uint32) & 15
    if i.selector > 1:
        raise IllegalDescriptor(f"instruction descriptor {i.raw:#010x}: sparsity selector {i.selector} is not 0 or 1")
    column = (column & ~1) + i.selector
    k = np.arange(0, i.depth, 4 if bits == 16 else 2)[None, :]
    span = 16 if bits == 16 else 8  # k in one lane
    lane = start + m % 8 + 8 * (k // span)
    shift = 16 * ((m // 8) % 2) + (k % span) * (1 if bits == 16 else 2)
    return memory.cells[lane, column] >> shift.astype(np.uint32) & 15


def _cells(memory: TensorMemory, column: int, count: int, lane: int, copies: int, what: str) -> Array:
    """`count` scale words from 32 lanes, several columns; the copies in the following quarters must agree."""
    columns = -(-count // 32)
    block = memory.cells[lane : lane + 32 * copies, column : column + columns].reshape(copies, 32, columns)
    words = block.transpose(0, 2, 1).reshape(copies, -1)[:, :count]
    if copies > 1 and (words != words[0]).any():
        raise IllegalDescriptor(
            f"scales of {what} at columns {column}..{column + columns - 1} differ between the quarters of 32 lanes "
            "(each needs a copy: tcgen05.cp.32x128b.warpx4)"
        )
    return words[0]


def _scale_values(words: Array, number: int, count: int, form: str) -> Array:
    """(rows, count) float64 scales: bytes `number` .. of each word."""
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4)[:, number : number + count]
    return table(form)[codes].astype(np.float64)


def _scaled(values: Array, scales: Array) -> Array:
    return values.astype(np.float64) * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)


def _b_scales(memory: TensorMemory, job: Job) -> Array:
    i = job.instruction
    column = split(job.scale_b)[1]
    if job.group == 2 and i.m == 128:
        halves = [_cells(memory, column, i.n // 2, 64 * h, 2, "B") for h in range(2)]
        words = np.concatenate(halves)
    else:
        words = _cells(memory, column, i.n, 0, 4, "B")
    return _scale_values(words, i.scale_b_id, job.scales, i.scale)


# ---- the product


def perform(job: Job, shared: list[Array], tensor: list[TensorMemory]) -> None:
    """Computes one tcgen05.mma and writes D.

    Arguments: shared: uint8 shared memory of the CTA, or of both of the pair (even rank first); tensor: likewise.
    Raises: IllegalDescriptor.
    """
    i = job.instruction
    packed = i.kind.name in ("mxf4", "mxf4nvf4")
    b = np.concatenate([_shared(m, job.b, i.b_mn_major, i.n // job.group, i.depth, i.b, packed) for m in shared])
    if i.negate_b:
        b = -b
    segments = job.segments()
    for cta in range(job.group):
        mine = [s for s in segments if s.cta == cta]
        rows = i.m // job.group
        here = b
        if job.scales:
            here = _scaled(b, _b_scales(tensor[cta], job))
        whole = None
        if not isinstance(job.a, int):
            depth = i.depth // (2 if i.sparse else 1)
            a = _shared(shared[cta], job.a, i.a_mn_major, rows, depth, i.a, packed)
            whole = _prepared(a, job, tensor[cta], cta, mine) @ here.T
        for segment in mine:
            if whole is not None:
                first = segment.row - cta * rows
                part = whole[first : first + segment.rows, segment.column : segment.column + segment.columns]
            else:
                lanes = slice(segment.lane, segment.lane + segment.rows)
                a = _tensor_a(tensor[cta], lanes, split(job.a)[1], i.a, packed)  # type: ignore[arg-type]
                part = _prepared(a, job, tensor[cta], cta, [segment])
                part = part @ here[segment.column : segment.column + segment.columns].T
            _write(job, tensor[cta], segment, part)


def _prepared(a: Array, job: Job, memory: TensorMemory, cta: int, segments: list[Segment]) -> Array:
    """A with its sign, sparsity and scales applied. `segments`: those whose rows `a` holds."""
    i = job.instruction
    if i.negate_a:
        a = -a
    if i.sparse:
        lanes = [s.lane + 16 * n for s in segments if s.column == 0 for n in range(max(1, s.rows // 16))]
        a = expand_sparse(a, _metadata(memory, job, a.shape[0], lanes), FORMATS[i.a].bits)
    if job.scales:
        words = _cells(memory, split(job.scale_a)[1], a.shape[0], 0, 4, "A")
        a = _scaled(a, _scale_values(words, i.scale_a_id, job.scales, i.scale))
    return a


def _write(job: Job, memory: TensorMemory, segment: Segment, part: Array) -> None:
    i = job.instruction
    at = split(job.d)[1] + segment.at
    cells = memory.cells[segment.lane : segment.lane + segment.rows, at : at + segment.columns]
    if i.d == "s32":
        total = part.astype(np.int64)
        if job.accumulate:
            total += cells.view(np.int32)
        words = to_s32(total, i.saturate).view(np.uint32)
    else:
        value = part.astype(np.float32)
        if job.accumulate:
            old = from_f16((cells & 0xFFFF).astype(np.uint16)) if i.d == "f16" else cells.view(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                value = value + (old * np.float32(2.0**-job.scale_d) if job.scale_d else old)
        words = to_f16(value).astype(np.uint32) if i.d == "f16" else value.view(np.uint32)
    if not any(job.disabled):
        cells[...] = words
        return
    masks = np.array(job.disabled[4 * segment.cta : 4 * segment.cta + 4], np.uint32)
    off = np.unpackbits(masks.view(np.uint8), bitorder="little").astype(bool)[
        segment.lane : segment.lane + segment.rows
    ]
    cells[~off] = words[~off]
