"""Matrix products of blocks, as LLVM functions.

    spec = MatmulSpec(256, 256, 512, a=(1024, 1), b=(1024, 1), c=(1024, 1), accumulate=True)
    product = emit_matmul(module, spec)               # void product(ptr A, ptr B, ptr C, ptr workspace)
    b.call(product, [a, b, c, workspace])             # with workspace_bytes(spec) bytes, of one thread's own

One function for each shape; a grid's programs call it from any thread. matmul_plan.py decides how, pack.py copies and
converts, matmul_tile.py multiplies; here are the loops around them:

    for each slice of k:
      for each block of columns of B:          pack it (it stays in the L2 cache)
        for each panel of rows of A:           pack it (it stays in the L1 cache)
          for each tile:                       multiply, and add to C

Nothing outside the operands is read or written: edges are packed with zeros, read and stored under masks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import target
from palladion.compiler.cpu.builder import (
    Value,
    add_up,
    const,
    define,
    gep,
    i64,
    loop,
    ptr,
    size_of,
    store,
    vec,
    void,
)
from palladion.compiler.cpu.matmul_plan import MatmulSpec, Plan, plans
from palladion.compiler.cpu.matmul_tile import Result, column_sums, emit_dots, emit_tile, kinds, write_tile
from palladion.compiler.cpu.pack import (
    STORED,
    load_first,
    pack_elements,
    pack_rows,
    pack_side_by_side,
    transposer,
)

__all__ = ["MatmulSpec", "emit_matmul", "workspace_bytes"]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
TOGETHER = 16  # vectors of B that are packed side by side

Index = Any  # an int or an i64 value


def workspace_bytes(spec: MatmulSpec, host: target.Host | None = None) -> int:
    """The bytes of workspace that the product's function needs; 0 if none. Any alignment will do, 64 is best."""
    plan = _best(spec, host or target.host())
    return 0 if plan is None else max(offset + size for offset, size in plan.areas().values())


def emit_matmul(module: Any, spec: MatmulSpec, host: target.Host | None = None, plan: Plan | None = None) -> Any:
    """Emit an internal function `void (ptr A, ptr B, ptr C, ptr workspace)` that forms the product.

    Arguments:
      module: an ir.Module; the same spec emitted twice into it is one function.
      spec: the product. The pointers are to element [0, 0] of the batch's first A, B and C.
      host: the machine to compile for (default: this one).
      plan: how to form it, one of `matmul_plan.plans(spec, host)` (default: the first).
    Returns: the function.
    Raises: ValueError: a size is negative, or no product of these dtypes exists.
    """
    host = host or target.host()
    plan = plan or _best(spec, host)
    way = "" if plan is None else (plan.swapped, plan.kind.name, plan.dots, plan.a_mode, plan.b_mode, host.vector_bytes)
    digest = hashlib.sha256(repr((spec, way)).encode()).hexdigest()
    name = f"matmul_{spec.m}x{spec.n}x{spec.k}_{digest[:12]}"
    if name in module.globals:
        return module.globals[name]
    function, b = define(module, name, void, ptr, ptr, ptr, ptr, internal=True)
    function.attributes.add("noinline")
    a, bb, c, workspace = function.args
    if spec.m and spec.n and spec.batch:
        with loop(b, 0, spec.batch) as L:
            operands = zip((a, bb, c), spec.batch_strides, (spec.a_dtype, spec.b_dtype, spec.c_dtype))
            a, bb, c = (gep(b, base, add_up(b, (L.i, stride)), STORED[dtype]) for base, stride, dtype in operands)
            if plan is None:
                _emit_zeros(b, spec, c, host)
            else:
                a, bb = (bb, a) if plan.swapped else (a, bb)
                (_dots_nest if plan.dots else _tile_nest)(b, module, name, plan, a, bb, c, workspace)
    b.ret_void()
    return function


def _best(spec: MatmulSpec, host: target.Host) -> Plan | None:
    """The plan to use; None if there is nothing to multiply."""
    if min(spec.m, spec.n, spec.k, spec.batch) < 0:
        raise ValueError(f"a matrix product has sizes of at least 0, not {spec}")
    unknown = {spec.a_dtype, spec.b_dtype, spec.c_dtype} - set(STORED) | {spec.c_dtype} & {*FLOAT8}
    if unknown:
        raise ValueError(f"no matrix product with elements or results of {', '.join(sorted(unknown))}")
    known = kinds(spec.a_dtype, spec.b_dtype, spec.c_dtype, host)  # raises for dtypes that do not go together
    return plans(spec, host)[0] if known and spec.m * spec.n * spec.k * spec.batch else None


def _sections(b: ir.IRBuilder, total: int, size: int, body: Callable[[Index, int], None]) -> None:
    """body(start, width) for parts of `size` of a range and, if there is one, the smaller part at the end. Emits the
    body once or twice; `start` is an int where that is known."""
    whole = total // size
    if whole == 1:
        body(0, size)
    elif whole:
        with loop(b, 0, whole * size, size) as L:
            body(L.i, size)
    if total % size:
        body(whole * size, total % size)


def _panels(b: ir.IRBuilder, total: int, most: int, body: Callable[[Index, int], None]) -> None:
    """body(start, width) for the fewest parts of a range of widths that differ by one at most, the wider ones first."""
    count = -(-total // most)
    narrow, wider = total // count, total % count
    if wider:
        _sections(b, wider * (narrow + 1), narrow + 1, body)
    first = wider * (narrow + 1)
    _sections(b, total - first, narrow, lambda start, width: body(add_up(b, start, first), width))


def _emit_zeros(b: ir.IRBuilder, spec: MatmulSpec, c: Value, host: target.Host) -> None:
    """C = 0, the sum of nothing, or C += 0."""
    if spec.accumulate:
        return
    elem = STORED[spec.c_dtype]
    with loop(b, 0, spec.m) as i, loop(b, 0, spec.n) as j:
        store(b, const(0, elem), gep(b, c, add_up(b, (i.i, spec.c[0]), (j.i, spec.c[1])), elem))


def _dots_nest(
    b: ir.IRBuilder, module: Any, name: str, plan: Plan, a: Value, bb: Value, c: Value, workspace: Value
) -> None:
    """Rows and columns in twos and fours."""
    spec, op_a, op_b = plan.spec, plan.a, plan.b
    if plan.a_mode != "direct":  # a column: make it contiguous once, and convert when it is read as ever
        raw = dataclasses.replace(op_a, stored=op_a.raw, group=1)
        a_at = gep(b, workspace, plan.areas()["a"][0])
        pack_elements(b, raw, a, a_at, spec.m, spec.k, spec.k, 1)
        a, op_a = a_at, dataclasses.replace(op_a, line=spec.k, element=1)
    result = Result(spec.c_dtype, *spec.c, spec.accumulate)
    functions: dict[tuple[int, int], Any] = {}

    def tile(i: Index, rows: int, j: Index, columns: int) -> None:
        if (rows, columns) not in functions:
            full = f"{name}_dots_{rows}x{columns}"
            functions[rows, columns] = emit_dots(
                module, full, plan.kind, plan.host, op_a, op_b, result, rows, columns, spec.k
            )
        to = gep(b, c, add_up(b, (i, spec.c[0]), (j, spec.c[1])), STORED[spec.c_dtype])
        b.call(functions[rows, columns], [op_a.at(b, a, i, 0), op_b.at(b, bb, j, 0), to])

    def block(j: Index, columns: int) -> None:  # columns outermost: each is read from memory once
        _panels(b, spec.m, plan.rows, lambda i, rows: tile(i, rows, j, columns))

    _sections(b, spec.n, plan.vectors, block)


def _tile_nest(
    b: ir.IRBuilder, module: Any, name: str, plan: Plan, a: Value, bb: Value, c: Value, workspace: Value
) -> None:
    """The loops around the tiles."""
    spec, kind, op_a, op_b, lanes = plan.spec, plan.kind, plan.a, plan.b, plan.lanes
    space = {part: gep(b, workspace, offset) for part, (offset, _) in plan.areas().items()}
    nr = plan.vectors * lanes
    target_c, to = Result(spec.c_dtype, *spec.c, spec.accumulate or None if plan.depth < spec.k else spec.accumulate), c
    if plan.partial:
        acc = {4: "float32", 8: "float64"}[size_of(kind.acc)]
        target_c, to = Result(acc, spec.n, 1, None), space["c"]
    a_row, a_step = plan.a_stride
    a_read = dataclasses.replace(op_a, line=a_row, element=a_step)
    tiles: dict[tuple[int, int], Any] = {}

    def tile(rows: int, columns: int) -> Any:
        if (rows, columns) not in tiles:
            padded = -(-columns // lanes) * lanes
            side = (spec.b_dtype, spec.b[0]) if plan.b_mode == "direct" else ("", padded)
            full = f"{name}_{rows}x{columns}"
            prefetch = spec.k >= 128
            tiles[rows, columns] = emit_tile(
                module, full, kind, plan.host, a_read, side, target_c, rows, columns, prefetch
            )
        return tiles[rows, columns]

    def slice_of_k(k0: Index, depth: int) -> None:
        steps = -(-depth // kind.group)
        is_first = const(int(k0 == 0)) if isinstance(k0, int) else b.zext(b.icmp_signed("==", k0, const(0)), i64)

        def block_of_columns(j0: Index, columns: int) -> None:
            panel = (steps + bool(kind.correction)) * nr  # lanes
            b_at = op_b.at(b, bb, j0, k0)
            if plan.b_mode != "direct":
                _pack_b(b, module, f"{name}_pack", plan, b_at, space["b"], columns, depth)

            def panel_of_rows(i: Index, rows: int) -> None:
                a_at = op_a.at(b, a, i, k0)
                if plan.a_mode != "direct":
                    _pack_a(b, plan, a_at, space["a"], rows, depth)
                    a_at = space["a"]

                def one(j: Index, width: int) -> None:
                    if plan.b_mode == "direct":
                        panel_at = op_b.at(b, b_at, j, 0)
                    else:
                        number = j // nr if isinstance(j, int) else b.sdiv(j, const(nr))
                        start = -(-width // lanes) * lanes if kind.correction else 0
                        panel_at = gep(b, space["b"], add_up(b, (number, panel), start), kind.lane)
                    index = add_up(b, (i, target_c.row), (j0, target_c.col), (j, target_c.col))
                    c_at = gep(b, to, index, STORED[target_c.dtype])
                    b.call(tile(rows, width), [a_at, panel_at, c_at, const(steps), is_first])

                _sections(b, columns, nr, one)

            _panels(b, spec.m, plan.rows, panel_of_rows)

        _sections(b, spec.n, plan.columns, block_of_columns)

    _sections(b, spec.k, plan.depth, slice_of_k)
    if plan.partial:
        _round_partial(b, plan, space["c"], c)


def _pack_a(b: ir.IRBuilder, plan: Plan, src: Value, dst: Value, rows: int, depth: int) -> None:
    """Pack a panel of rows of A."""
    line, step = plan.a_stride
    if plan.a_mode == "rows":
        pack_rows(b, plan.a, src, dst, rows, depth, line)
    elif plan.a_mode == "side":
        vectors = range(0, rows, plan.lanes)
        columns = [(first, min(plan.lanes, rows - first), first, step) for first in vectors]
        pack_side_by_side(b, plan.a, src, dst, columns, depth)
    else:
        pack_elements(b, plan.a, src, dst, rows, depth, line, step)


def _pack_b(
    b: ir.IRBuilder, module: Any, name: str, plan: Plan, src: Value, dst: Value, width: int, depth: int
) -> None:
    """Pack a block of `width` columns of B, panel after panel, each after its correction if there is one."""
    op, kind, lanes = plan.b, plan.kind, plan.lanes
    steps, nr = -(-depth // kind.group), plan.vectors * lanes
    head = bool(kind.correction)
    panel = (steps + head) * nr

    def some(j: Index, columns: int) -> None:
        """Panels from column j; `columns` is a multiple of nr, or less than nr."""
        number = j // nr if isinstance(j, int) else b.sdiv(j, const(nr))
        start = gep(b, dst, add_up(b, (number, panel)), op.lane)
        stride = min(nr, -(-columns // lanes) * lanes)
        vectors = []  # first column, valid columns, offset in lanes
        for first in range(0, columns, lanes):
            offset = first // nr * panel + head * stride + first % nr
            vectors.append((first, min(lanes, columns - first), offset))
        from_ = op.at(b, src, j, 0)
        if plan.b_mode == "side":
            pack_side_by_side(b, op, from_, start, [(f, v, o, stride) for f, v, o in vectors], depth)
        for first, valid, offset in vectors:
            here, there = op.at(b, from_, first, 0), gep(b, start, offset, op.lane)
            if plan.b_mode == "transpose":
                transposer(module, f"{name}_{stride}", op, stride)(b, here, there, valid, depth)
            elif plan.b_mode == "elements":
                if valid < lanes:  # columns that do not exist: zeros
                    with loop(b, 0, steps) as L:
                        store(b, const(0, vec(op.lane, lanes)), gep(b, there, add_up(b, (L.i, stride)), op.lane))
                pack_elements(b, op, here, there, valid, depth, 1, stride)
            if head:
                sums = column_sums(b, kind, plan.host, there, steps, stride)
                store(b, sums, gep(b, start, first // nr * panel + first % nr, op.lane))

    whole = width // nr * nr
    if whole:
        together = max(1, TOGETHER // plan.vectors) if plan.b_mode == "side" else 1
        _sections(b, whole, min(together * nr, whole), some)
    if width > whole:
        some(whole, width - whole)


def _round_partial(b: ir.IRBuilder, plan: Plan, sums: Value, c: Value) -> None:
    """C (=|+=) the sums of all slices, which lie row after row."""
    spec, lanes, acc = plan.spec, plan.lanes, plan.kind.acc
    result = Result(spec.c_dtype, *spec.c, spec.accumulate)
    with loop(b, 0, spec.m) as i:

        def part(j: Index, width: int) -> None:
            value = load_first(b, acc, gep(b, sums, add_up(b, (i.i, spec.n), j), acc), width, lanes)
            to = gep(b, c, add_up(b, (i.i, spec.c[0]), (j, spec.c[1])), STORED[spec.c_dtype])
            write_tile(b, plan.host, result, to, [[value]], width, lanes, spec.accumulate)

        _sections(b, spec.n, lanes, part)
