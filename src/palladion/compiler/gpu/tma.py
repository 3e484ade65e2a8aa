"""Copies by the TMA engine: from a view of an array and one of a buffer to boxes of a tensor map.

The engine moves boxes: up to five dimensions, steps of each in global memory as a tensor map says, dense in shared
memory, the first dimension contiguous in both. A buffer in tiles takes more dimensions than the array has: an array's
dimension of 128 rows, stored in tiles of 8, is two (`Piece`), 8 rows and 16 steps of 8 rows. Where the map cannot say
so (the array's size or the start is no multiple of 8, so that the engine could not tell what lies outside), or where a
box would be too large, several instructions bring a box each.

Sources: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, "cp.async.bulk.tensor"; facts file, section 2.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp

from palladion.compiler.gpu.generated import TensorMap
from palladion.compiler.gpu.views import Axis, Term, View
from palladion.language.dtypes import element_bits
from palladion.language.gpu.refs import storage_of

MOST_DIMS, MOST_BOX, CHUNK, ALIGNED = 5, 256, 16, 128
MOST_STEP = 8
MOST_BYTES = 1 << 40  # of a stride


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a dimension of the view, of size `size`.

    Attributes:
      dim: of the array (its root). weight: coordinates of the dimension that a step is. stride: bytes in shared memory.
      step: the view's.
    """

    dim: int
    size: int
    weight: int
    stride: int
    step: int = 1


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """A box's place along a dimension of the map: constant, terms, and what loops add (loop number, times what)."""

    constant: int
    terms: tuple[Term, ...]
    divisor: int = 1
    loops: tuple[tuple[int, int], ...] = ()

    def text(self) -> str:
        """C++; loop k counts `k{k}`."""
        parts = [str(t) for t in self.terms]
        start = " + ".join(parts + ([str(self.constant)] if self.constant or not parts else []))
        if self.divisor > 1:
            exact = all(t.factor % self.divisor == 0 for t in self.terms) and self.constant % self.divisor == 0
            if exact:
                small = [dataclasses.replace(t, factor=t.factor // self.divisor) for t in self.terms]
                c = self.constant // self.divisor
                start = " + ".join([*map(str, small), *([str(c)] if c or not small else [])])
            else:
                start = f"{start} / {self.divisor}" if start.isidentifier() else f"({start}) / {self.divisor}"
        added = [f"k{k}" if n == 1 else f"k{k} * {n}" for k, n in self.loops]
        return " + ".join([*([] if start == "0" and added else [start]), *added])


@dataclasses.dataclass(frozen=True)
class Plan:
    """A copy as boxes.

    Attributes:
      map: the tensor map. coordinates: of a box, innermost first. loops: the counts of loops around the instruction.
      strides: bytes of shared memory that each loop moves on. box_bytes: of one box.
    """

    map: TensorMap
    coordinates: tuple[Coordinate, ...]
    loops: tuple[int, ...]
    strides: tuple[int, ...]
    box_bytes: int


def plan(source: View, buffer: View, fill: str = "zeros") -> Plan | None:
    """The boxes of a copy between an array and a buffer; None: the engine cannot make it.

    Arguments:
      source: the view of the array, in global memory.
      buffer: the folded view of the buffer, of the same shape. fill: as of `TensorMap`.
    """
    if source.ref.operand is None or source.floating or source.windows is not None or source.gathers:
        return None
    if any(a.terms or a.coords is not None for a in buffer.axes) or buffer.gathers:
        return None
    if any(len(digits) > 1 for _, digits in source.root):
        return None
    pieces = _pieces(source, buffer)
    if pieces is None:
        return None
    return _fitted(source, buffer, pieces, fill)


def _pieces(source: View, buffer: View) -> list[Piece] | None:
    found = []
    for mine, theirs in zip(source.axes, buffer.axes, strict=True):
        if mine.n != theirs.n or mine.dim is None or mine.coords is not None:
            return None
        weight = 1
        for size, stride in reversed(theirs.digits):
            found.append(Piece(mine.dim, size, weight, stride, mine.step))
            weight *= size
    return sorted(found, key=lambda p: p.stride)


def _fitted(source: View, buffer: View, pieces: list[Piece], fill: str) -> Plan | None:
    es = source.itemsize
    starts = _starts(source)
    strides = [digits[0][1] if digits else CHUNK for _, digits in source.root]  # with one element any stride will do
    extents = [extent for extent, _ in source.root]
    swizzle = buffer.ref.swizzle
    inside, looped = _boxed(pieces, es, swizzle)
    if not inside or inside[0].size * es % CHUNK:
        return None
    if strides[inside[0].dim] != es or inside[0].weight != 1 or inside[0].step != 1:
        return None
    # Which dimensions of the array the map can take apart.
    whole = {d for d in range(len(extents)) if _divides(source, d, inside, extents[d], starts[d])}
    kept, moved = [], []
    for p in inside:
        lowest = p.weight == min(q.weight for q in inside if q.dim == p.dim)
        kept.append(p) if lowest or p.dim in whole else moved.append(p)
    if moved:  # what is kept must be dense without them
        first = min(inside.index(p) for p in moved)
        kept, looped = inside[:first], [*inside[first:], *looped]
        whole = {d for d in whole if _divides(source, d, kept, extents[d], starts[d])}
    used = {p.dim for p in kept}
    while True:
        rest = [d for d in range(len(extents)) if d not in used and not _is_static(starts[d], extents[d], looped, d)]
        if len(kept) + len(rest) <= MOST_DIMS or len(kept) <= 1:
            break
        looped = [kept[-1], *looped]
        kept = kept[:-1]
        used = {p.dim for p in kept}
    if len(kept) + len(rest) > MOST_DIMS:
        return None
    return _map(source, buffer, kept, looped, rest, starts, strides, extents, whole, fill)


def _boxed(pieces: list[Piece], es: int, swizzle: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces that are dense in shared memory, each small enough; the others are for loops."""
    inside: list[Piece] = []
    queue, looped, dense = list(pieces), [], es
    while queue:
        p = queue.pop(0)
        if p.stride != dense:
            looped.append(p)
            continue
        most = MOST_BOX if inside or not swizzle else min(MOST_BOX, swizzle // es)
        most = max(1, (most - 1) // p.step + 1) if p.step > 1 else most
        size = _largest_divisor(p.size, most, CHUNK // math.gcd(CHUNK, es) if not inside else 1)
        if p.step > MOST_STEP or size == 1:  # no part of it fits into a box: one at a time
            looped.append(p)
            continue
        if size < p.size:
            queue.insert(0, dataclasses.replace(p, size=p.size // size, weight=p.weight * size, stride=p.stride * size))
        inside.append(dataclasses.replace(p, size=size))
        dense = p.stride * size
    return inside, looped


def _largest_divisor(n: int, most: int, multiple: int) -> int:
    good = [k for k in range(1, min(n, most) + 1) if n % k == 0 and (k % multiple == 0 or k == n)]
    return max(good, default=1)


def _starts(source: View) -> list[tuple[int, tuple[Term, ...]]]:
    """Along each dimension of the root: where the view begins."""
    found: list[tuple[int, tuple[Term, ...]]] = [(0, ())] * len(source.root)
    for d, first, terms in source.fixed:
        found[d] = first, terms
    for axis in source.axes:
        if axis.dim is not None:
            found[axis.dim] = axis.first, axis.terms
    return found


def _divides(source: View, d: int, inside: list[Piece], extent: int, start: Any) -> bool:
    """Whether the map can have a dimension of its own for each piece of an array's dimension."""
    mine = sorted((p for p in inside if p.dim == d), key=lambda p: p.weight)
    if len(mine) <= 1:
        return True
    top, (first, terms) = mine[-1].weight, start
    if any(p.step != 1 for p in mine) or mine[0].weight != 1 or extent % top or first % top:
        return False
    if any(q.weight != p.weight * p.size for p, q in itertools.pairwise(mine)):
        return False
    return all(t.divisor % top == 0 for t in terms)


def _is_static(start: Any, extent: int, looped: list[Piece], d: int) -> bool:
    """Whether a dimension without pieces in the box is a constant offset of the map."""
    first, terms = start
    return not terms and 0 <= first < extent and not any(p.dim == d for p in looped)


def _map(
    source: View, buffer: View, kept: list[Piece], looped: list[Piece], rest: list[int], starts: Any,
    strides: list[int], extents: list[int], whole: set[int], fill: str,
) -> Plan | None:  # fmt: skip
    es = source.itemsize
    dims, steps, box, element_strides, coordinates = [], [], [], [], []
    offset = source.origin
    loops = [p for p in looped if p.size > 1]
    for d, (first, _) in enumerate(starts):
        if d not in rest and not any(p.dim == d for p in kept):
            offset += first * strides[d]
    for p in [*kept, *(Piece(d, 1, 1, 0) for d in rest)]:
        d = p.dim
        mine = sorted((q for q in kept if q.dim == d), key=lambda q: q.weight) or [p]
        top = mine[-1]
        first, terms = starts[d]
        split = len(mine) > 1
        added = tuple((k, q.weight * q.step) for k, q in enumerate(loops) if q.dim == d)
        if not split:
            if p.weight * p.step > MOST_STEP:
                return None
            dims.append(extents[d])
            coordinates.append(Coordinate(first, terms, 1, added))
        elif p is not top:
            dims.append(p.size)
            coordinates.append(Coordinate(0, ()))
        else:
            dims.append(extents[d] // p.weight)
            if any(n % p.weight for _, n in added):
                return None
            coordinates.append(Coordinate(first, terms, p.weight, tuple((k, n // p.weight) for k, n in added)))
        each = 1 if split else p.weight * p.step
        steps.append(strides[d] * (p.weight if split else 1))
        box.append((p.size - 1) * each + 1)
        element_strides.append(each)
    aligned = all(s % CHUNK == 0 and 0 < s < MOST_BYTES for s in steps[1:]) and offset % CHUNK == 0
    if not aligned or any(b > MOST_BOX for b in box) or not _lands_aligned(buffer, loops):
        return None
    tensor_map = TensorMap(
        source.ref.operand, dtype_of(source.dtype), offset, tuple(dims), tuple(steps[1:]), tuple(box),
        tuple(element_strides), buffer.ref.swizzle, fill,
    )  # fmt: skip
    size = math.prod(p.size for p in kept) * es
    return Plan(tensor_map, tuple(coordinates), tuple(p.size for p in loops), tuple(p.stride for p in loops), size)


def dtype_of(dtype: Any) -> str:
    """The name of a dtype for the engine: what it has no name for it copies as bytes."""
    return "uint8" if element_bits(dtype) == 8 else str(jnp.dtype(dtype))


def _lands_aligned(buffer: View, loops: list[Piece]) -> bool:
    """Whether every box begins at a multiple of 128 bytes of shared memory."""
    start = buffer.offset + sum(int(a.places()[0]) for a in buffer.axes)
    at = buffer.ref.at
    many = [t.divisor for t in buffer.terms] + [p.stride for p in loops]
    return (at + start) % ALIGNED == 0 and all(n % ALIGNED == 0 for n in many)


def promised(source: View, buffer: View) -> View:
    """The source with its run-time starts taken for multiples of the buffer's tiles, as the kernel promises.

    The reference: where the buffer has a TilingTransform, offsets in global memory must be aligned to the tile size.
    """
    if not storage_of(buffer.ref.aval).transforms:
        return source
    axes = []
    for mine, theirs in zip(source.axes, buffer.axes):
        axes.append(_multiples_of(mine, math.prod(size for size, _ in theirs.digits[1:]) if theirs.digits else 1))
    return dataclasses.replace(source, axes=tuple(axes))


def _multiples_of(axis: Axis, tile: int) -> Axis:
    terms = tuple(
        t if t.divisor % tile == 0 else dataclasses.replace(t, multiple=math.lcm(t.divisor, tile) // t.factor)
        if t.factor and math.lcm(t.divisor, tile) % t.factor == 0 else t
        for t in axis.terms
    )  # fmt: skip
    return dataclasses.replace(axis, terms=terms)
