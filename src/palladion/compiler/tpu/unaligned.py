"""Reading and writing VMEM at a run-time place that is not on a tile.

Mosaic wants proof that a run-time index in the last two dimensions is a multiple of the tile (8 rows of 32 bits, 128
lanes). Where there is none, the tiles around the window are read and rotated; a store reads them, replaces the window
and writes them back. That costs a few registers more than an aligned access, so `pl.multiple_of` is worth writing.
"""

from __future__ import annotations

import math
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mosaic.python import tpu

from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import as_i32, constant, cut, full, index, iota, shape_of
from palladion.compiler.tpu.kinds import typed
from palladion.compiler.tpu.rules_elementwise import choose

_LARGE = 1 << 30


def factor(value: Any) -> int:
    """An integer that divides a run-time integer, read off the operations that made it."""
    if isinstance(value, int):
        return abs(value) or _LARGE
    owner = value.owner
    if isinstance(owner, ir.Block):
        return 1
    op = owner.opview if hasattr(owner, "opview") else owner
    name, operands = op.operation.name, list(op.operation.operands)
    if name == "arith.constant":
        return abs(int(ir.IntegerAttr(op.operation.attributes["value"]).value)) or _LARGE
    if name == "tpu.assume_multiple":
        return math.lcm(int(ir.IntegerAttr(op.operation.attributes["multiple"]).value), factor(operands[0]))
    if name in ("arith.index_cast",):
        return factor(operands[0])
    if name == "arith.muli":
        return min(factor(operands[0]) * factor(operands[1]), _LARGE)
    if name == "arith.shli" and isinstance(operands[1].owner, ir.Operation | ir.OpView):
        by = operands[1].owner
        if by.operation.name == "arith.constant":
            return min(factor(operands[0]) << int(ir.IntegerAttr(by.operation.attributes["value"]).value), _LARGE)
    if name in ("arith.addi", "arith.subi", "arith.minsi", "arith.maxsi"):
        return math.gcd(factor(operands[0]), factor(operands[1]))
    if name == "arith.select":
        return math.gcd(factor(operands[1]), factor(operands[2]))
    return 1


def bits(element: ir.Type) -> int:
    """Bits of an element."""
    return element.width if isinstance(element, (ir.IntegerType, ir.FloatType)) else 32


def tile(rank: int, element: ir.Type) -> tuple[int, ...]:
    """For each dimension, what a run-time index must be a multiple of."""
    packing = max(32 // bits(element), 1)
    if rank == 1:
        return (128 * packing,)
    return (1,) * (rank - 2) + (8 * packing, 128)


def plan(memory: ir.Value, starts: list[Any], sizes: tuple[int, ...]) -> list[int]:
    """The dimensions at whose run-time start the window cannot be accessed directly; proofs are added to `starts`."""
    kind: Any = memory.type
    wanted, found = tile(len(sizes), kind.element_type), []
    for d, (start, unit) in enumerate(zip(starts, wanted)):
        if isinstance(start, int) or unit == 1:
            continue
        if factor(start) % unit == 0:
            starts[d] = tpu.assume_multiple(as_i32(start), unit)
        elif not (d == len(sizes) - 2 and sizes[d] == 1 and unit == 8):  # one row of 32 bits needs no proof
            found.append(d)
    return found


def _around(memory: ir.Value, starts: list[Any], sizes: tuple[int, ...], dims: list[int]) -> tuple[list, list, dict]:
    """The tiles around a window: their starts and sizes, and where the window begins in them."""
    kind: Any = memory.type
    units = tile(len(sizes), kind.element_type)
    begin, extent, inside = list(starts), list(sizes), {}
    for d in dims:
        n, unit = kind.shape[d], units[d]
        width = -(-(sizes[d] + unit - 1) // unit) * unit
        if width >= n or n % unit:
            begin[d], extent[d], inside[d] = 0, n, as_i32(starts[d])
            continue
        start = as_i32(starts[d])
        base = arith.muli(arith.divsi(start, constant(unit)), constant(unit))
        base = tpu.assume_multiple(arith.minsi(base, constant(n - width)), unit)
        begin[d], extent[d], inside[d] = base, width, arith.subi(start, base)
    return begin, extent, inside


def load(memory: ir.Value, starts: list[Any], sizes: tuple[int, ...], dims: list[int]) -> ir.Value:
    """A window of a memref that is not on tiles along `dims`."""
    kind: Any = memory.type
    begin, extent, inside = _around(memory, starts, sizes, dims)
    value = vector.load(typed(extent, kind.element_type), memory, [index(s) for s in begin])
    for d, at in inside.items():
        value = build.rotate(value, arith.subi(constant(extent[d]), at), d)
    return cut(value, [0] * len(sizes), sizes)


def store(memory: ir.Value, starts: list[Any], value: ir.Value, dims: list[int], mask: ir.Value | None) -> None:
    """Write a window of a memref that is not on tiles along `dims`."""
    kind: Any = memory.type
    sizes = shape_of(value)
    begin, extent, inside = _around(memory, starts, sizes, dims)
    places = [index(s) for s in begin]
    old = vector.load(typed(extent, kind.element_type), memory, places)
    here = None
    for d, at in inside.items():
        value = build.rotate(widened(value, d, extent[d]), at, d)
        mask = None if mask is None else build.rotate(widened(mask, d, extent[d]), at, d)
    for d, at in inside.items():
        place = arith.subi(iota(extent, d), build.splat(at, extent))
        within = arith.cmpi(arith.CmpIPredicate.ult, place, full(place.type, sizes[d]))
        here = within if here is None else arith.andi(here, within)
    assert here is not None  # there is at least one dimension
    here = here if mask is None else arith.andi(here, mask)
    vector.store(choose(here, value, old), memory, places)


def widened(x: ir.Value, axis: int, size: int) -> ir.Value:
    """`x` with zeros after it along an axis."""
    if build.is_mask(x):
        return build.as_mask(widened(build.as_words(x), axis, size))
    shape = list(shape_of(x))
    if shape[axis] == size:
        return x
    shape[axis] = size - shape[axis]
    return build.concatenate([x, full(typed(shape, build.element_of(x)), 0)], axis)
