"""Loop fusion: neighbouring loops over the same range become one, and temporaries shrink to what one round needs.

A softmax over the rows of a block is lowered to a loop for the maxima, one for the exponentials, one for the sums and
one for the quotients, each over all rows. Fused, one row is finished before the next, and the exponentials of a row
stay in the L1 cache.

Two loops may be fused when every memory that one of them writes and the other touches is only accessed, in both, at
the element that the loop variable picks. A temporary that is only used inside one loop, at that element, loses the
dimension. Source: loop fusion and array contraction as in Allen and Kennedy, Optimizing Compilers, chapter 8.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from palladion.compiler.cpu import ir

Access = tuple[ir.Buf, tuple[ir.Expr, ...] | None]  # None: all of the buffer, in some order


def fuse(block: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
    """Fuse the loops of a block, and of the blocks inside it; then shrink temporaries."""
    fused: list[ir.Stmt] = []
    for s in block:
        if fused and isinstance(s, ir.For) and isinstance(fused[-1], ir.For) and _may_fuse(fused[-1], s):
            a = fused[-1]
            body = Rewriter({id(s.var): a.var}, {}).block(s.body)
            fused[-1] = dataclasses.replace(a, body=(*a.body, *body), where=(*a.where, *s.where))
        else:
            fused.append(s)
    return tuple(_inside(s) for s in fused)


def _inside(s: ir.Stmt) -> ir.Stmt:
    if isinstance(s, ir.For):
        return dataclasses.replace(s, body=fuse(s.body))
    if isinstance(s, ir.If):
        return dataclasses.replace(s, branches=tuple(fuse(b) for b in s.branches))
    if isinstance(s, ir.While):
        return dataclasses.replace(s, before=fuse(s.before), body=fuse(s.body))
    return s


def _accesses(block: Sequence[ir.Stmt]) -> Iterator[tuple[Access, bool]]:
    """What a block reads and writes: (access, whether it writes)."""
    for s in ir.statements(block):
        for e in ir.stmt_exprs(s):
            for node in ir.walk(e):
                if isinstance(node, ir.Load):
                    yield (node.buf, node.index), False
        if isinstance(s, (ir.Store, ir.Scan)):
            yield (s.buf, s.index), True
        elif isinstance(s, (ir.MatMul, ir.Sort, ir.HostCall)):
            for buf in (*ir.reads([s]), *ir.writes([s])):
                yield (buf, None), True


def _may_fuse(a: ir.For, b: ir.For) -> bool:
    if a.extent != b.extent or not isinstance(a.extent, int) or a.ordered or b.ordered or a.reverse or b.reverse:
        return False
    if any(isinstance(s, (ir.HostCall, ir.While)) for s in ir.statements((*a.body, *b.body))):
        return False
    touched: dict[Any, list[tuple[Access, ir.Var]]] = {}
    written: list[set] = [set(), set()]
    for side, loop in enumerate((a, b)):
        for access, writes in _accesses(loop.body):
            touched.setdefault(access[0].memory, []).append((access, loop.var))
            if writes:
                written[side].add(access[0].memory)
    memories = [{access[0].memory for access, _ in _accesses(loop.body)} for loop in (a, b)]
    shared = (written[0] & memories[1]) | (written[1] & memories[0])
    return all(_picked(touched[m]) is not None for m in shared)


def _picked(accesses: Sequence[tuple[Access, ir.Var]]) -> int | None:
    """The dimension that the loop variable picks in every access, of one and the same buffer; None if there is none."""
    bufs = {id(buf) for (buf, _), _ in accesses}
    if len(bufs) != 1:
        return None
    buf = accesses[0][0][0]
    for d in range(len(buf.shape)):
        if all(index is not None and index[d] is var for (_, index), var in accesses):
            return d
    return None


# --- smaller temporaries --------------------------------------------------------------------------------------------
def shrink(block: Sequence[ir.Stmt], foreign: frozenset = frozenset()) -> tuple[ir.Stmt, ...]:
    """Take away the dimensions of temporaries that a loop variable alone picks.

    Arguments:
      foreign: memories that are used outside the block too.
    """
    users: dict[Any, list[int]] = {}
    for k, s in enumerate(block):
        for buf in {*ir.reads([s]), *ir.writes([s])}:
            if users.setdefault(buf.memory, [k])[-1] != k:
                users[buf.memory].append(k)
    result = []
    for k, s in enumerate(block):
        if isinstance(s, ir.For):
            mine: dict[Any, list[tuple[Access, ir.Var]]] = {}
            for access, _ in _accesses(s.body):
                memory = access[0].memory
                if access[0].kind == "temp" and users[memory] == [k] and memory not in foreign:
                    mine.setdefault(access[0].memory, []).append((access, s.var))
            smaller: dict[int, tuple[ir.Buf, int]] = {}
            for accesses in mine.values():
                if (d := _picked(accesses)) is not None:
                    buf = accesses[0][0][0]
                    shape = (*buf.shape[:d], *buf.shape[d + 1 :])
                    smaller[id(buf)] = ir.temp(shape, buf.dtype, buf.name), d
            simple = all(isinstance(t, ir.Store) for t in s.body)
            single = {k: buf for k, (buf, _) in smaller.items() if simple and math.prod(buf.shape) == 1}
            smaller = {} if simple else smaller  # such a loop runs in vectors: its lanes need places of their own
            body = Rewriter({}, smaller).block(s.body) if smaller else s.body
            body = _in_registers(body, single) if single else body
            elsewhere = foreign | {m for m, where in users.items() if where != [k]}
            s = dataclasses.replace(s, body=shrink(body, elsewhere))
        result.append(s)
    return tuple(result)


def _in_registers(body: Sequence[ir.Stmt], bufs: dict[int, ir.Buf]) -> tuple[ir.Stmt, ...]:
    """The body of an innermost loop with the elements of temporaries held as values instead of in memory."""
    values: dict[int, ir.Expr] = {}
    result: list[ir.Stmt] = []
    for s in body:
        assert isinstance(s, ir.Store)
        value = Rewriter({}, {}, values).expr(s.value)
        if id(s.buf) in bufs:
            local = ir.Local(s.buf.dtype, bufs[id(s.buf)].name)
            values[id(s.buf)] = local
            result.append(ir.Define(local, value))
        else:
            index = tuple(Rewriter({}, {}, values).expr(i) for i in s.index)
            result.append(ir.Store(s.buf, index, value))
    return tuple(result)


class Rewriter:
    """Rebuilds statements with variables renamed and buffers exchanged; shared expressions stay shared."""

    def __init__(
        self,
        variables: dict[int, ir.Expr],
        bufs: dict[int, tuple[ir.Buf, int]],
        values: dict[int, ir.Expr] | None = None,
    ) -> None:
        self._variables, self._bufs, self._values = (
            variables,
            bufs,
            values or {},
        )  # values: what reads of a buffer become
        self._done: dict[int, tuple[ir.Expr, ir.Expr]] = {}

    def block(self, block: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
        return tuple(self._stmt(s) for s in block)

    def _place(self, buf: ir.Buf, index: tuple[ir.Expr, ...]) -> tuple[ir.Buf, tuple[ir.Expr, ...]]:
        index = tuple(self.expr(i) for i in index)
        if id(buf) in self._bufs:
            buf, d = self._bufs[id(buf)]
            index = (*index[:d], *index[d + 1 :])
        return buf, index

    def _view(self, v: ir.View) -> ir.View:
        return dataclasses.replace(v, base=tuple(self.expr(i) for i in v.base))

    def _stmt(self, s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.Store):
            buf, index = self._place(s.buf, s.index)
            return ir.Store(buf, index, self.expr(s.value))
        if isinstance(s, ir.Scan):
            buf, index = self._place(s.buf, s.index)
            return dataclasses.replace(s, buf=buf, index=index, value=self.expr(s.value))
        if isinstance(s, ir.For):
            extent = s.extent if isinstance(s.extent, int) else self.expr(s.extent)
            return dataclasses.replace(s, extent=extent, body=self.block(s.body))
        if isinstance(s, ir.If):
            return ir.If(self.expr(s.which), tuple(map(self.block, s.branches)))
        if isinstance(s, ir.While):
            return ir.While(self.block(s.before), self.expr(s.cond), self.block(s.body))
        if isinstance(s, ir.MatMul):
            return dataclasses.replace(s, out=self._view(s.out), a=self._view(s.a), b=self._view(s.b))
        if isinstance(s, ir.Define):
            return ir.Define(s.var, self.expr(s.value))
        if isinstance(s, ir.Point):
            return dataclasses.replace(s, index=tuple(map(self.expr, s.index)))
        return s

    def expr(self, e: ir.Expr) -> ir.Expr:
        if id(e) in self._variables:
            return self._variables[id(e)]
        if id(e) not in self._done:
            self._done[id(e)] = e, self._rebuilt(e)
        return self._done[id(e)][1]

    def _rebuilt(self, e: ir.Expr) -> ir.Expr:
        if isinstance(e, ir.Load):
            if id(e.buf) in self._values:
                return self._values[id(e.buf)]
            return ir.Load(e.dtype, *self._place(e.buf, e.index))
        if isinstance(e, ir.Op):
            args = tuple(map(self.expr, e.args))
            if e.dtype == ir.INDEX and e.name == "add":
                return ir.add(*args)
            if e.dtype == ir.INDEX and e.name == "mul" and isinstance(args[1], ir.Const):
                return ir.mul(args[0], args[1].value)
            return dataclasses.replace(e, args=args)
        if isinstance(e, ir.Reduce):
            return dataclasses.replace(e, body=self.expr(e.body))
        return e
