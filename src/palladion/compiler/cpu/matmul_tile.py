"""The innermost kernels of a matrix product, and the instructions they are made of.

    tile    mr x (nv vectors) of C are held in registers; each step along k broadcasts a lane of each row of A and
            multiplies it with nv vectors of B. An outer product, for operands packed or lying as B[k, n] (BLIS).
    dots    a few rows of A times a few columns of B, both contiguous along k: inner products, a vector of k at a time,
            each summed over the lanes at the end. For a few rows, where packing B would cost more than the product.

A `Kind` says what a step is: one fused multiply-add, or an instruction that multiplies groups of 2 or 4 narrow
elements and adds them to a 32-bit lane: vdpbf16ps, vpdpwssd, pmaddwd, vpdpbusd (Intel SDM; LLVM calls them by the
names in `step`). The last multiplies unsigned with signed bytes. When both operands are signed, or neither is, the
top bit of A's bytes is flipped, which adds or subtracts 128, and 128 times the column sums of B put it right.
vdpbf16ps rounds as two fused multiply-adds do, and takes subnormal numbers as zeros, as XLA's threads do everywhere.
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
    f32,
    f64,
    fma,
    gep,
    i8,
    i16,
    i32,
    i64,
    intrinsic,
    is_float,
    load,
    loop,
    masked_store,
    on_stack,
    ptr,
    reduce_values,
    reduce_vector,
    scalar_of,
    size_of,
    splat,
    store,
    vec,
    void,
)
from palladion.compiler.cpu.pack import STORED, Operand, load_first, narrow, widen


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks; only to spell the operands of vdpbf16ps."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How products are formed.

    name: "fma" (any element type that the CPU multiplies itself), "bf16", "i16" or "i8"; stored: LLVM type of packed
    elements; acc: of the sums; group: elements that share a lane; flip_a: the bytes of A have their top bit flipped;
    a_unsigned: A's bytes are the unsigned operand; correction: what the column sums of B are multiplied by to make up
    for the flip.
    """

    name: str
    stored: Type
    acc: Type
    group: int = 1
    flip_a: bool = False
    a_unsigned: bool = False
    correction: int = 0

    @property
    def lane(self) -> Type:
        """The LLVM type of a lane: of what A broadcasts, and of the elements of B's vectors."""
        return self.stored if self.group == 1 else i32


def kinds(a: str, b: str, c: str, host: target.Host) -> list[Kind]:
    """The ways to multiply elements of dtypes a and b for a result of dtype c, on that machine.

    Raises: ValueError: one operand is an integer and the other a float, or the result is not of their sort.
    """
    sorts = {is_float(STORED[x]) or "float" in x for x in (a, b, c)}
    if len(sorts) != 1:
        raise ValueError(
            f"no matrix product of {a} and {b} gives {c}: convert the operands to one sort of number first"
        )
    bits = 8 * host.vector_bytes
    found = []
    if sorts == {True}:
        if "float64" in (a, b, c):
            return [Kind("fma", f64, f64)]
        if a == b == "bfloat16" and host.has("avx512bf16") and (bits == 512 or host.has("avx512vl")):
            found.append(Kind("bf16", i16, f32, 2))
        return [*found, Kind("fma", f32, f32)]
    if max(size_of(STORED[x]) for x in (a, b, c)) > 4:
        return [Kind("fma", i64, i64)]
    vnni = (host.has("avx512vnni") and (bits == 512 or host.has("avx512vl"))) or (host.has("avxvnni") and bits < 512)
    if vnni and {a, b} <= {"int8", "uint8"}:
        flip = a == b
        correction = 0 if not flip else -128 if a == "int8" else 128
        found.append(Kind("i8", i8, i32, 4, flip, (a == "uint8") != flip, correction))
    if host.arch == "x86_64" and {a, b} <= {"int8", "uint8", "int16"}:
        found.append(Kind("i16", i16, i32, 2))
    return [*found, Kind("fma", i32, i32)]


def step(b: ir.IRBuilder, kind: Kind, host: target.Host, acc: Value, x: Value, y: Value) -> Value:
    """acc + x * y, lane by lane; x is of operand A."""
    lanes = acc.type.count
    bits = 8 * host.vector_bytes
    if kind.name == "bf16":
        pairs = vec(_Bfloat(), 2 * lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{bits}"
        return intrinsic(b, acc.type, name, acc, b.bitcast(x, pairs), b.bitcast(y, pairs))
    if kind.name == "i8":
        first, second = (x, y) if kind.a_unsigned else (y, x)
        return intrinsic(b, acc.type, f"llvm.x86.avx512.vpdpbusd.{bits}", acc, first, second)
    if kind.name == "i16":
        if host.has("avx512vnni") and (bits == 512 or host.has("avx512vl")):
            return intrinsic(b, acc.type, f"llvm.x86.avx512.vpdpwssd.{bits}", acc, x, y)
        name = {512: "avx512.pmaddw.d.512", 256: "avx2.pmadd.wd", 128: "sse2.pmadd.wd"}[bits]
        pairs = vec(i16, 2 * lanes)
        return b.add(acc, intrinsic(b, acc.type, f"llvm.x86.{name}", b.bitcast(x, pairs), b.bitcast(y, pairs)))
    if not is_float(acc.type):
        return b.add(acc, b.mul(x, y))
    if not host.fma:  # the library call that stands in for the instruction would cost a hundred times more
        return b.fadd(acc, b.fmul(x, y))
    return fma(b, x, y, acc)


def column_sums(b: ir.IRBuilder, kind: Kind, host: target.Host, panel: Value, steps: int, stride: int) -> Value:
    """The correction for one vector of packed columns of B: their sums times `kind.correction`."""
    ty = vec(i32, host.lanes(4))
    ones = const(0x01010101, ty)
    zero = const(0, ty)
    with loop(b, 0, steps, 1, [zero]) as L:
        column = load(b, ty, gep(b, panel, add_up(b, (L.i, stride)), i32))
        L.next = [step(b, kind, host, L.v[0], ones, column)]
    return b.mul(L.out[0], const(kind.correction, ty))


@dataclasses.dataclass(frozen=True)
class Result:
    """Where C lies and how it is written.

    dtype: of C; row, col: strides in elements; add: True: C += the product; False: C = the product; None: the
      kernel's last argument says it (nonzero: overwrite).
    """

    dtype: str
    row: int
    col: int
    add: bool | None


def emit_tile(
    module: Any,
    name: str,
    kind: Kind,
    host: target.Host,
    a: Operand,
    b_side: tuple[str, int],
    c: Result,
    rows: int,
    columns: int,
    prefetch: bool,
) -> Any:
    """A function `void tile(ptr A, ptr B, ptr C, i64 steps, i64 first)` for rows x columns of C.

    Arguments: a: strides of A's lanes in units of `kind.lane`: `a.line` from row to row, `a.element` along k; b_side:
      dtype in which B lies ("" for packed lanes) and its elements from step to step; first: nonzero to overwrite C.
    """
    lanes = host.lanes(size_of(kind.acc))
    nv = -(-columns // lanes)
    function, b = define(module, name, void, ptr, ptr, ptr, i64, i64, internal=True)
    function.attributes.add("noinline")
    a0, b0, c0, steps, first = function.args
    b_dtype, b_stride = b_side
    b_elem = STORED[b_dtype] if b_dtype else kind.lane
    valid = [min(lanes, columns - h * lanes) if b_dtype else lanes for h in range(nv)]
    acc_ty = vec(kind.acc, lanes)
    if prefetch and c.col == 1:
        for r in range(rows):
            for h in range(nv):  # the rows of C are far apart: fetch them while the sums are formed
                address = gep(b, c0, r * c.row + h * lanes, STORED[c.dtype])
                intrinsic(b, void, "prefetch", address, *(const(v, i32) for v in (1, 3, 1)), types=(ptr,))
    # Few sums would wait for each other: form several sets of them, each from every so-maniest step.
    sets = max(1, min(8, 8 // (rows * nv)))
    start = [const(0, acc_ty)] * (rows * nv)
    if kind.correction:  # stored before the panel
        sums = [load(b, acc_ty, gep(b, b0, (h - nv) * lanes, i32)) for h in range(nv)]
        start = [sums[h] for _ in range(rows) for h in range(nv)]

    def advance(a_at: Value, b_at: Value, u: int, acc: Sequence[Value]) -> list[Value]:
        columns_b = []
        for h in range(nv):
            x = load_first(b, b_elem, gep(b, b_at, u * b_stride + h * lanes, b_elem), valid[h], lanes)
            columns_b.append(widen(b, x, b_dtype, kind.stored, host) if b_dtype else x)
        new = []
        for r in range(rows):
            x = splat(b, load(b, kind.lane, gep(b, a_at, u * a.element + r * a.line, kind.lane), 1), lanes)
            new += [step(b, kind, host, acc[r * nv + h], x, columns_b[h]) for h in range(nv)]
        return new

    def sweep(a_at: Value, b_at: Value, count: Value, acc: Sequence[Value], unroll: int) -> Any:
        size = rows * nv
        with loop(b, const(0), count, unroll, [a_at, b_at, *acc]) as L:
            a_i, b_i, *sums = L.v
            for u in range(unroll):
                at = slice(u % sets * size, (u % sets + 1) * size)
                sums[at] = advance(a_i, b_i, u, sums[at])
            L.next = [gep(b, a_i, unroll * a.element, kind.lane), gep(b, b_i, unroll * b_stride, b_elem), *sums]
        return L.out

    acc = start + [const(0, acc_ty)] * ((sets - 1) * rows * nv)
    if sets == 1:
        acc = sweep(a0, b0, steps, acc, 1)[2:]
    else:
        whole = b.and_(steps, const(-sets))
        a_at, b_at, *acc = sweep(a0, b0, whole, acc, sets)
        acc = sweep(a_at, b_at, b.sub(steps, whole), acc, 1)[2:]
        plus = b.fadd if is_float(kind.acc) else b.add
        acc = [reduce_values(acc[q :: rows * nv], plus) for q in range(rows * nv)]

    def write(add: bool) -> None:
        values = [acc[r * nv : (r + 1) * nv] for r in range(rows)]
        write_tile(b, host, c, c0, values, columns, lanes, add)

    if c.add is None:
        with b.if_else(b.icmp_signed("!=", first, const(0))) as sides:
            for side, add in zip(sides, (False, True)):
                with side:
                    write(add)
    else:
        write(c.add)
    b.ret_void()
    return function


def _combined(
    b: ir.IRBuilder, host: target.Host, c: Result, value: Value, old: Callable[[], Value], add: bool
) -> Value:
    """The new stored value(s) of C."""
    if add:
        before = widen(b, old(), c.dtype, scalar_of(value.type), host)
        value = b.fadd(before, value) if is_float(value.type) else b.add(before, value)
    return narrow(b, value, c.dtype, host)


def write_tile(
    b: ir.IRBuilder,
    host: target.Host,
    c: Result,
    c0: Value,
    rows: Sequence[Sequence[Value]],
    columns: int,
    lanes: int,
    add: bool,
) -> None:
    """Store the sums of a tile: by (masked) vectors, or through the stack one by one if columns are not contiguous."""
    elem = STORED[c.dtype]
    if c.col == 1:
        for r, values in enumerate(rows):
            for h, value in enumerate(values):
                address, count = gep(b, c0, r * c.row + h * lanes, elem), min(lanes, columns - h * lanes)
                old = lambda address=address, count=count: load_first(b, elem, address, count, lanes)
                value = _combined(b, host, c, value, old, add)
                if count == lanes:
                    store(b, value, address)
                else:
                    mask = const([lane < count for lane in range(lanes)], vec(ir.IntType(1), lanes))
                    masked_store(b, value, address, mask)
        return
    acc = scalar_of(rows[0][0].type)
    width = len(rows[0]) * lanes
    spill = on_stack(b, acc, len(rows) * width, 64)
    for r, values in enumerate(rows):
        for h, value in enumerate(values):
            store(b, value, gep(b, spill, r * width + h * lanes, acc))
    with loop(b, 0, len(rows)) as r, loop(b, 0, columns) as j:
        value = load(b, acc, gep(b, spill, add_up(b, (r.i, width), j.i), acc))
        address = gep(b, c0, add_up(b, (r.i, c.row), (j.i, c.col)), elem)
        store(b, _combined(b, host, c, value, lambda: load(b, elem, address), add), address)


def emit_dots(
    module: Any,
    name: str,
    kind: Kind,
    host: target.Host,
    a: Operand,
    b_op: Operand,
    c: Result,
    rows: int,
    columns: int,
    count: int,
) -> Any:
    """A function `void dots(ptr A, ptr B, ptr C)`: rows x columns inner products of `count` elements.

    Arguments: a, b_op: operands contiguous along k; `line` is the stride between rows of A, between columns of B. They
      are converted as they are read.
    """
    function, b = define(module, name, void, ptr, ptr, ptr, internal=True)
    function.attributes.add("noinline")
    a0, b0, c0 = function.args
    lanes = host.lanes(size_of(kind.acc))
    width = lanes * kind.group

    def read(op: Operand, base: Value, line: int, start: Any, valid: int) -> Value:
        x = op.converted(b, load_first(b, op.raw, op.at(b, base, line, start), valid, width))
        return b.bitcast(x, vec(kind.lane, lanes))

    def advance(start: Any, valid: int, acc: Sequence[Value]) -> list[Value]:
        # The fewer lines are kept in registers, the other side's are read one by one.
        x = [read(a, a0, r, start, valid) for r in range(rows)]
        new: list[Any] = [None] * (rows * columns)
        for j in range(columns):
            y = read(b_op, b0, j, start, valid)
            for r in range(rows):
                new[r * columns + j] = step(b, kind, host, acc[r * columns + j], x[r], y)
        return new

    size = rows * columns
    sets = max(1, min(4, 8 // size))
    acc: list[Any] = [const(0, vec(kind.acc, lanes))] * (size * sets)
    done = 0
    for unroll in (sets, 1) if sets > 1 else (1,):
        whole = done + (count - done) // (unroll * width) * unroll * width
        if whole > done:
            with loop(b, done, whole, unroll * width, acc) as L:
                L.next = list(L.v)
                for u in range(unroll):
                    at = slice(u * size, (u + 1) * size)
                    L.next[at] = advance(add_up(b, L.i, u * width), width, L.v[at])
            acc, done = L.out, whole
    if count > done:
        acc[:size] = advance(done, count - done, acc[:size])
    plus = b.fadd if is_float(kind.acc) else b.add
    elem = STORED[c.dtype]
    for q in range(size):
        total = reduce_vector(b, reduce_values(acc[q::size], plus), plus)
        address = gep(b, c0, q // columns * c.row + q % columns * c.col, elem)

        def write(add: bool, total: Value = total, address: Value = address) -> None:
            store(b, _combined(b, host, c, total, lambda: load(b, elem, address), add), address)

        write(bool(c.add))
    b.ret_void()
    return function
