"""Packing: copies of matrix operands in the order, and in the element type, in which the tile kernel reads them.

A packed operand is made of *lanes*: 32- or 64-bit units that hold one element, or a group of 2 or 4 elements that
follow each other along k (for the instructions that multiply pairs of bf16 or int16, or fours of int8). A operand is
seen here as a list of lines along k: rows of A, columns of B. Two orders exist:

    rows    lanes[line][step]                 a copy of the lines, close together; A is read by broadcast
    steps   lanes[panel][step][line]          lines side by side; B is read a vector at a time

Narrow types are converted on the way, so that each element is converted once and not once a tile. What lies past the
operand's edges is not read: it is packed as zeros. The order is that of BLIS (Van Zee and van de Geijn, "BLIS: A
Framework for Rapidly Instantiating BLAS Functionality", 2015).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import target
from palladion.compiler.cpu.builder import (
    Type,
    Value,
    add_up,
    const,
    define,
    f16,
    f32,
    f64,
    gep,
    i8,
    i16,
    i32,
    i64,
    intrinsic,
    lanes_of,
    like,
    load,
    loop,
    masked_load,
    ptr,
    scalar_of,
    select,
    shuffle,
    size_of,
    store,
    vec,
    void,
)

STORED: dict[str, Type] = {
    "float64": f64,
    "float32": f32,
    "bfloat16": i16,
    "float16": i16,
    "float8_e4m3fn": i8,
    "float8_e5m2": i8,
    **{f"{sign}int{n}": ty for n, ty in ((8, i8), (16, i16), (32, i32), (64, i64)) for sign in ("", "u")},
}
"""The LLVM type in which elements of each dtype lie in memory; types that LLVM's x86 code generator does not compute
with are their bits."""


# ---------------------------------------------------------------------------------------------- conversions
def widen(b: ir.IRBuilder, x: Value, dtype: str, to: Type, host: target.Host) -> Value:
    """Stored elements as the type to compute with, exactly.

    Arguments: x: a value or vector of `STORED[dtype]`; to: f32 or f64 for floats, an integer type for integers; the
      stored type itself leaves x as it is.
    """
    if to == STORED[dtype]:
        return x
    if dtype in ("int8", "int16", "int32"):
        return b.sext(x, like(to, x.type))
    if dtype.startswith("uint"):
        return b.zext(x, like(to, x.type))
    wide_int, wide = like(i32, x.type), like(f32, x.type)
    if dtype == "bfloat16":  # the upper half of an f32
        x = b.bitcast(b.shl(b.zext(x, wide_int), const(16, wide_int)), wide)
    elif dtype == "float16":
        x = _half_to_float(b, x, host)
    elif dtype == "float8_e5m2":  # the upper half of an f16
        half = like(i16, x.type)
        x = _half_to_float(b, b.shl(b.zext(x, half), const(8, half)), host)
    elif dtype == "float8_e4m3fn":
        # Its fields moved into an f16 give the value over 2**8; all ones is its one NaN.
        half = like(i16, x.type)
        y = b.zext(x, half)
        magnitude = b.shl(b.and_(y, const(0x7F, half)), const(7, half))
        sign = b.shl(b.and_(y, const(0x80, half)), const(8, half))
        value = b.fmul(_half_to_float(b, b.or_(sign, magnitude), host), const(256.0, wide))
        is_nan = b.icmp_unsigned("==", b.and_(y, const(0x7F, half)), const(0x7F, half))
        x = select(b, is_nan, const(float("nan"), wide), value)
    return b.fpext(x, like(to, x.type)) if to == f64 and scalar_of(x.type) == f32 else x


def narrow(b: ir.IRBuilder, x: Value, dtype: str, host: target.Host) -> Value:
    """f32, f64 or integers as stored elements of `dtype`: floats rounded to nearest even, integers cut off."""
    to = like(STORED[dtype], x.type)
    if x.type == to:
        return x
    if isinstance(scalar_of(x.type), ir.IntType):
        return b.trunc(x, to)
    if dtype == "float32":
        return b.fptrunc(x, to)
    if scalar_of(x.type) == f64:
        x = _to_odd(b, x)
    if dtype == "float16":
        return _float_to_half(b, x, host)
    if dtype != "bfloat16":
        raise ValueError(f"no conversion from {x.type} to {dtype} here")
    wide = like(i32, x.type)
    bits = b.bitcast(x, wide)
    odd = b.and_(b.lshr(bits, const(16, wide)), const(1, wide))
    rounded = b.lshr(b.add(bits, b.add(odd, const(0x7FFF, wide))), const(16, wide))
    quiet = b.or_(b.lshr(bits, const(16, wide)), const(0x40, wide))
    return b.trunc(select(b, b.fcmp_unordered("uno", x, x), quiet, rounded), to)


def _to_odd(b: ir.IRBuilder, x: Value) -> Value:
    """f64 to f32 so that a second rounding gives what one would have: inexact results get an odd last bit."""
    bits = like(i32, x.type)
    near = b.fptrunc(x, like(f32, x.type))
    back = b.fpext(near, x.type)
    fabs = lambda value: intrinsic(b, x.type, "fabs", value)
    up = b.fcmp_ordered("<", fabs(back), fabs(x))
    down = b.fcmp_ordered(">", fabs(back), fabs(x))
    change = select(b, up, const(1, bits), select(b, down, const(-1, bits), const(0, bits)))
    near = b.bitcast(near, bits)
    odd = b.icmp_unsigned("!=", b.and_(near, const(1, bits)), const(0, bits))
    return b.bitcast(select(b, odd, near, b.add(near, change)), like(f32, x.type))


def _has_half(host: target.Host) -> bool:
    return host.arch == "aarch64" or host.has("f16c")


def _half_to_float(b: ir.IRBuilder, x: Value, host: target.Host) -> Value:
    """f16 bits (i16) to f32. In integers where LLVM would call a library function for each lane."""
    wide, bits = like(f32, x.type), like(i32, x.type)
    if _has_half(host):
        return b.fpext(b.bitcast(x, like(f16, x.type)), wide)
    k = lambda value: const(value, bits)
    x = b.zext(x, bits)
    magnitude = b.and_(x, k(0x7FFF))
    normal = b.add(b.shl(magnitude, k(13)), k(112 << 23))
    special = b.or_(b.shl(magnitude, k(13)), k(0x7F800000))
    tiny = b.bitcast(b.fmul(b.sitofp(magnitude, wide), const(2.0**-24, wide)), bits)
    value = select(b, b.icmp_signed("<", magnitude, k(0x400)), tiny, normal)
    value = select(b, b.icmp_signed(">=", magnitude, k(0x7C00)), special, value)
    return b.bitcast(b.or_(value, b.shl(b.and_(x, k(0x8000)), k(16))), wide)


def _float_to_half(b: ir.IRBuilder, x: Value, host: target.Host) -> Value:
    """f32 to f16 bits (i16), to nearest even."""
    half = like(i16, x.type)
    if _has_half(host):
        return b.bitcast(b.fptrunc(x, like(f16, x.type)), half)
    wide, ty = like(i32, x.type), x.type
    k = lambda value: const(value, wide)
    bits = b.bitcast(x, wide)
    size = b.and_(bits, k(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, k(13)), k(1))
    normal = b.lshr(b.add(b.sub(size, k(112 << 23)), b.add(odd, k(0xFFF))), k(13))
    # Added to 0.5, whose last bit is 2**-24, a small value rounds to a multiple of that, the smallest f16.
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(size, ty), const(0.5, ty)), wide), k(0x3F000000))
    value = select(b, b.icmp_signed("<", size, k(0x38800000)), tiny, normal)
    value = select(b, b.icmp_signed(">=", size, k(0x47800000)), k(0x7C00), value)
    value = select(b, b.icmp_signed(">", size, k(0x7F800000)), k(0x7E00), value)
    return b.trunc(b.or_(value, b.lshr(b.and_(bits, k(-0x80000000)), k(16))), half)


# -------------------------------------------------------------------------------------------------- packing
@dataclasses.dataclass(frozen=True)
class Operand:
    """How lines along k lie in memory, and what they become.

    dtype: of the elements in memory; line, element: strides, in elements, from line to line and along k; stored: LLVM
    type of a packed element; group: elements in a lane; lanes: lanes in a vector; flip: bytes have their top bit
    flipped, which turns int8 into uint8 plus 128 and back; host: the machine.
    """

    dtype: str
    line: int
    element: int
    stored: Type
    group: int
    lanes: int
    flip: bool
    host: target.Host

    @property
    def raw(self) -> Type:
        """The LLVM type of an element in memory."""
        return STORED[self.dtype]

    @property
    def lane(self) -> Type:
        """The LLVM type of a packed lane."""
        return self.stored if self.group == 1 else ir.IntType(8 * self.group * size_of(self.stored))

    def converted(self, b: ir.IRBuilder, x: Value) -> Value:
        """Raw elements as packed elements."""
        x = widen(b, x, self.dtype, self.stored, self.host)
        return b.xor(x, const(0x80, x.type)) if self.flip else x

    def at(self, b: ir.IRBuilder, base: Value, line: Any, element: Any) -> Value:
        """The address of an element; indices are ints or i64 values."""
        return gep(b, base, add_up(b, (line, self.line), (element, self.element)), self.raw)


def load_first(b: ir.IRBuilder, elem: Type, address: Value, count: int, lanes: int) -> Value:
    """The first `count` elements at an address in a vector of `lanes`, and zeros; the rest is not read."""
    if count >= lanes:
        return load(b, vec(elem, lanes), address)
    if lanes == 1 or count <= 0:
        return const(0, vec(elem, lanes))
    mask = const([lane < count for lane in range(lanes)], vec(ir.IntType(1), lanes))
    return masked_load(b, vec(elem, lanes), address, mask)


def pack_rows(b: ir.IRBuilder, op: Operand, src: Value, dst: Value, lines: int, count: int, stride: int) -> None:
    """Copy `lines` lines of `count` elements that are contiguous along k in the order "rows".

    Arguments: src: the first element; dst: the first lane; stride: lanes from line to line, a multiple of a vector
      and enough for `count` rounded up to whole vectors, all of which are written.
    """
    width = op.lanes * op.group
    whole = count // width * width

    def column(start: Any, valid: int) -> None:
        for line in range(lines):
            x = op.converted(b, load_first(b, op.raw, op.at(b, src, line, start), valid, width))
            store(b, x, gep(b, dst, add_up(b, line * stride * op.group, start), op.stored))

    if whole:
        with loop(b, 0, whole, width) as L:
            column(L.i, width)
    if count > whole:
        column(whole, count - whole)


def pack_elements(
    b: ir.IRBuilder, op: Operand, src: Value, dst: Value, lines: int, count: int, line: int, step: int
) -> None:
    """Pack lines of any strides one element at a time: slow, for what the faster ways do not know.

    Arguments: line, step: strides of the packed operand in lanes. Zeros fill the last group of each line.
    """
    padded = -(-count // op.group) * op.group

    def put(i: Value, k: Value, value: Value) -> None:
        if op.group == 1:
            index = add_up(b, (i, line), (k, step))
        else:
            lane, part = b.sdiv(k, const(op.group)), b.srem(k, const(op.group))
            index = add_up(b, (i, line * op.group), (lane, step * op.group), part)
        store(b, value, gep(b, dst, index, op.stored))

    with loop(b, 0, lines) as i:
        with loop(b, 0, count) as k:
            put(i.i, k.i, op.converted(b, load(b, op.raw, op.at(b, src, i.i, k.i))))
        with loop(b, count, padded) as k:
            put(i.i, k.i, const(0, op.stored))


def pack_side_by_side(
    b: ir.IRBuilder, op: Operand, src: Value, dst: Value, columns: Sequence[tuple[int, int, int, int]], count: int
) -> None:
    """Pack lines that lie side by side in memory (`op.line == 1`) in the order "steps".

    Arguments: columns: for each vector of lines: the first line, how many of its lines exist (the others become
      zeros), the offset in lanes where it goes, and the lanes from step to step there; count: elements along k.
    All vectors advance together: many cache lines side by side are read several times faster than one.
    """
    whole = count // op.group

    def step(index: Any, group: int) -> None:
        for first, valid, offset, stride in columns:
            lane = None
            for part in range(group):
                element = add_up(b, (index, op.group), part)
                x = op.converted(b, load_first(b, op.raw, op.at(b, src, first, element), valid, op.lanes))
                if op.group > 1:  # each element in its part of the lane
                    wide = vec(op.lane, op.lanes)
                    x = b.shl(b.zext(x, wide), const(part * 8 * size_of(op.stored), wide))
                lane = x if lane is None else b.or_(lane, x)
            store(b, lane, gep(b, dst, add_up(b, (index, stride), offset), op.lane))

    if whole:
        with loop(b, 0, whole) as L:
            step(L.i, op.group)
    if count % op.group:
        step(whole, count % op.group)


def transposer(module: Any, name: str, op: Operand, stride: int) -> Callable[..., None]:
    """How to pack lines that are contiguous along k in the order "steps", in square blocks of vectors.

    Arguments: stride: lanes from step to step of the packed operand.
    Returns: `pack(b, src, dst, lines, count)` that emits the packing of up to `op.lanes` lines of `count` elements;
      lanes of lines that do not exist become zeros. Blocks go through functions in the module, made when needed.
    """
    width = op.lanes * op.group

    def block(lines: int, count: int) -> Any:
        full = f"{name}_{lines}x{count}"
        if full in module.globals:
            return module.globals[full]
        function, b = define(module, full, void, ptr, ptr, internal=True)
        src, dst = function.args
        rows = []
        for line in range(op.lanes):
            valid = count if line < lines else 0
            x = op.converted(b, load_first(b, op.raw, op.at(b, src, line, 0), valid, width))
            rows.append(b.bitcast(x, vec(op.lane, op.lanes)))
        for step, column in enumerate(transpose(b, rows)[: -(-count // op.group)]):
            store(b, column, gep(b, dst, step * stride, op.lane))
        b.ret_void()
        return function

    def pack(b: ir.IRBuilder, src: Value, dst: Value, lines: int, count: int) -> None:
        whole = count // width * width
        if whole:
            with loop(b, 0, whole // width) as L:
                to = gep(b, dst, add_up(b, (L.i, op.lanes * stride)), op.lane)
                b.call(block(lines, width), [op.at(b, src, 0, add_up(b, (L.i, width))), to])
        if count > whole:
            to = gep(b, dst, whole // op.group * stride, op.lane)
            b.call(block(lines, count - whole), [op.at(b, src, 0, whole), to])

    return pack


def transpose(b: ir.IRBuilder, rows: Sequence[Value]) -> list[Value]:
    """The columns of a square matrix of lanes given by its rows, as many as a vector has lanes.

    First within pieces of 128 bits, where x86 shuffles are cheapest, then the pieces; one instruction each.
    """
    n = lanes_of(rows[0].type)
    if n == 1:
        return list(rows)
    w = min(n, 16 // size_of(scalar_of(rows[0].type)))  # lanes in a piece
    rows = list(rows)
    # Unpack: after it, row i of each piece and row i + d of it are interleaved, d lanes at a time.
    d = 1
    while d < w:
        for i in range(n):
            if not i & d:
                low, high = [], []
                for piece in range(0, n, w):
                    for lane in range(piece, piece + w // 2, d):
                        for half, out in ((0, low), (w // 2, high)):
                            for source in (0, n):
                                out += range(source + lane + half, source + lane + half + d)
                rows[i], rows[i + d] = shuffle(b, rows[i], rows[i + d], low), shuffle(b, rows[i], rows[i + d], high)
        d *= 2
    # Row i of a group of w now holds, in piece q, that group's elements of column q * w + order[i].
    order = [int(f"{i:0{w.bit_length() - 1}b}"[::-1], 2) if w > 1 else 0 for i in range(w)]
    columns: list[Any] = [None] * n
    for i in range(w):
        for q, column in enumerate(_transpose_pieces(b, rows[i::w], w)):
            columns[q * w + order[i]] = column
    return columns


def _transpose_pieces(b: ir.IRBuilder, rows: Sequence[Value], w: int) -> list[Value]:
    """Transpose as `transpose` does, with pieces of w lanes as the elements."""
    count = len(rows)
    if count == 1:
        return list(rows)

    def pick(x: Value, y: Value, first: int) -> Value:  # every other piece of x, then of y
        return shuffle(b, x, y, [p * w + lane for p in range(first, 2 * count, 2) for lane in range(w)])

    half = [[pick(x, y, first) for x, y in zip(rows[::2], rows[1::2])] for first in (0, 1)]
    if count == 2:
        return [half[0][0], half[1][0]]
    even, odd = half
    return [pick(x, y, first) for first in (0, 1) for x, y in (even, odd)]
