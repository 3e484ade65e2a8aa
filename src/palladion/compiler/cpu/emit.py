"""Loop nests to LLVM: scalars or vectors of the host's width, with loop-invariant parts hoisted.

Every expression is emitted at the outermost loop in which it is defined: an index term of the outer loop, a read of a
scalar, is computed once before the inner loop. An innermost loop without order runs a vector at a time, several
vectors in a round where it is long, then what is left one element at a time. In a vector loop an expression is a
vector if it depends on the loop variable and a scalar (spread when needed) otherwise; memory with a step of one is
read and written as vectors, anything else lane by lane.

No optimiser pass follows, so what is written here is what runs (spikes/cpu_ffi.md, section 4).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from palladion.compiler.cpu import dtypes, ir, operations
from palladion.compiler.cpu.builder import (
    const,
    extract,
    gep,
    i64,
    iota,
    lanes_of,
    like,
    load,
    loop,
    reduce_values,
    reduce_vector,
    repeat_while,
    splat,
    store,
    undef,
    vec,
)

UNROLL = 4  # vectors in one round of a long vector loop


@dataclasses.dataclass
class _Level:
    """A loop that is being emitted, or the function around all loops.

    Attributes:
      before: the block that runs before the loop, where what it does not change is computed.
      writes: the memories that its body writes.
      memo: values known at this level, by node and mode, with the memories that they were read from.
    """

    before: Any
    writes: frozenset
    memo: dict[tuple[int, bool], tuple[Any, frozenset]]


@dataclasses.dataclass
class _Vector:
    """The vector loop that is being emitted: its variable, and its width."""

    var: ir.Var
    lanes: int


class Emitter:
    """Emits statements into a function.

    Arguments:
      b: a builder at the place to start.
      lanes: f32 lanes of a vector.
      pointer: gives the address of a buffer's first element.
      special: emits statements that are not loops over scalars (products, sorts, host calls).
    """

    def __init__(
        self, b: Any, lanes: int, pointer: Callable[[ir.Buf], Any], special: Callable[[Emitter, ir.Stmt], None]
    ) -> None:
        self.b, self.lanes, self._pointer, self._special = b, lanes, pointer, special
        self._levels = [_Level(None, frozenset(), {})]
        self._vars: dict[str, tuple[Any, int]] = {}  # value, level
        self._vector: _Vector | None = None
        self._facts: dict[int, tuple[Any, int, frozenset]] = {}
        self._keep: list[Any] = []  # nodes whose ids are keys

    # --- statements -----------------------------------------------------------------------------------------------
    def define(self, var: ir.Var, value: Any) -> None:
        """Give a variable that no loop binds its value (a program id)."""
        self._vars[var.name] = (value, len(self._levels) - 1)

    def block(self, stmts: Sequence[ir.Stmt]) -> None:
        """Emit statements in order."""
        for s in stmts:
            self._statement(s)

    def _statement(self, s: ir.Stmt) -> None:
        if isinstance(s, ir.Store):
            self._store(s)
        elif isinstance(s, ir.For):
            self._for(s)
        elif isinstance(s, ir.If):
            self._if(s)
        elif isinstance(s, ir.While):
            self._while(s)
        elif isinstance(s, ir.Define):
            self.define(s.var, self.value(s.value))
        else:
            self._special(self, s)
            self._forget(frozenset(m.memory for m in ir.writes([s])))

    @contextlib.contextmanager
    def _level(self, stmts: Sequence[ir.Stmt], before: Any):
        """A loop's body: a level of its own."""
        writes = frozenset(buf.memory for buf in ir.writes(stmts))
        self._levels.append(_Level(before, writes, {}))
        self._facts.clear()
        try:
            yield
        finally:
            self._levels.pop()
            self._facts.clear()
            self._forget(writes)

    def _forget(self, memories: frozenset) -> None:
        """After a write: values read from these memories are no longer known."""
        for level in self._levels:
            for key in [k for k, (_, reads) in level.memo.items() if reads & memories]:
                del level.memo[key]

    @contextlib.contextmanager
    def branch(self):
        """Code that may not run: what it computes at the current level is not known afterwards."""
        level = self._levels[-1]
        saved = dict(level.memo)
        try:
            yield
        finally:
            level.memo = {k: v for k, v in level.memo.items() if k in saved and saved[k] is v}

    def _store(self, s: ir.Store) -> None:
        value = self.value(s.value)
        place, step = self._address(s.buf, s.index)
        if self._vector is not None and step != 0:
            value = splat(self.b, value, self._vector.lanes)
            value = self._to_memory(value, s.buf)
            if step == 1:
                store(self.b, value, place)
            else:
                for k, p in enumerate(self._lane_addresses(s.buf, s.index, place, step)):
                    store(self.b, extract(self.b, value, k), p)
        else:
            if lanes_of(value.type) > 1:  # every lane writes one place: the last one stays
                value = extract(self.b, value, lanes_of(value.type) - 1)
            store(self.b, self._to_memory(value, s.buf), place)
        self._forget(frozenset([s.buf.memory]))

    def _to_memory(self, value: Any, buf: ir.Buf) -> Any:
        ty = like(dtypes.stored(buf.dtype), value.type)
        return value if value.type == ty else self.b.zext(value, ty)

    def _for(self, s: ir.For) -> None:
        extent = s.extent if isinstance(s.extent, int) else self.value(s.extent)
        vector = isinstance(s.extent, int) and self._vectorises(s)
        start = 0
        if vector:
            assert isinstance(extent, int)
            start = extent // self.lanes * self.lanes
            per_round = UNROLL * self.lanes
            main = start // per_round * per_round if start >= 2 * per_round else 0
            if main:
                self._vector_loop(s, 0, main, per_round)
            if start > main:
                self._vector_loop(s, main, start, self.lanes)
        if vector and start == extent:
            return
        before = self.b.block
        with loop(self.b, start, extent) as L, self._level(s.body, before):
            i = L.i
            if s.reverse:
                last = const(extent - 1) if isinstance(extent, int) else self.b.sub(extent, const(1))
                i = self.b.sub(last, i)
            self._vars[s.var.name] = (i, len(self._levels) - 1)
            self.block(s.body)

    def _vector_loop(self, s: ir.For, start: int, stop: int, step: int) -> None:
        before = self.b.block
        with loop(self.b, start, stop, step) as L, self._level(s.body, before):
            self._vector = _Vector(s.var, self.lanes)
            for u in range(step // self.lanes):
                i = self.b.add(L.i, const(u * self.lanes)) if u else L.i
                self._vars[s.var.name] = (i, len(self._levels) - 1)
                self._levels[-1].memo.clear()
                self.block(s.body)
            self._vector = None

    def _vectorises(self, s: ir.For) -> bool:
        """Whether a loop can, and should, run a vector at a time."""
        if s.ordered or s.reverse or self._vector is not None or not isinstance(s.extent, int):
            return False
        if s.extent < self.lanes or not all(isinstance(t, (ir.Store, ir.Define)) for t in s.body):
            return False
        near = far = 0
        for t in s.body:
            for node in (n for e in ir.stmt_exprs(t) for n in ir.walk(e)):
                if isinstance(node, ir.Reduce) and self._contiguous_in(node.body, node.var) > self._contiguous_in(
                    node.body, s.var
                ):
                    return False  # the reduction is the better loop to vectorise
            assert isinstance(t, (ir.Store, ir.Define))
            written = [(t.buf, t.index)] if isinstance(t, ir.Store) else []
            for buf, index in [*written, *((n.buf, n.index) for n in _loads(t.value))]:
                step = self._step(buf, index, s.var)
                near, far = near + (step == 1), far + (step not in (0, 1))
        return near > 0 or far == 0

    def _contiguous_in(self, e: ir.Expr, var: ir.Var) -> int:
        return sum(self._step(n.buf, n.index, var) == 1 for n in _loads(e))

    def _if(self, s: ir.If) -> None:
        which = self.value(s.which)
        after = self.b.append_basic_block("after")
        cases = [self.b.append_basic_block(f"case{k}") for k in range(len(s.branches))]
        chosen = self.b.switch(which, cases[-1])
        for k, case in enumerate(cases[:-1]):
            chosen.add_case(const(k), case)
        for case, stmts in zip(cases, s.branches):
            self.b.position_at_end(case)
            with self.branch():
                self.block(stmts)
            self.b.branch(after)
        self.b.position_at_end(after)
        self._forget(frozenset(buf.memory for buf in ir.writes([s])))

    def _while(self, s: ir.While) -> None:
        before = self.b.block
        with repeat_while(self.b, []) as W, self._level((*s.before, *s.body), before):
            self.block(s.before)
            W.test(self.value(s.cond))
            self.block(s.body)

    # --- expressions ----------------------------------------------------------------------------------------------
    def value(self, e: ir.Expr) -> Any:
        """An expression's value: a vector in a vector loop if it depends on the loop's variable, else a scalar."""
        return self._emit(e, lane0=False)

    def scalar(self, e: ir.Expr) -> Any:
        """An index at the first lane of a vector loop."""
        return self._emit(e, lane0=True)

    def _emit(self, e: ir.Expr, lane0: bool) -> Any:
        if isinstance(e, ir.Const):
            return dtypes.constant(e.value, e.dtype, dtypes.held(e.dtype))
        if isinstance(e, ir.Reduce):
            return self._reduce(e)
        depth, reads = self._where(e)
        varying = not lane0 and self._vector is not None and self._depends(e, self._vector.var)
        key = (id(e), varying)
        level = self._levels[depth]
        if key in level.memo:
            return level.memo[key][0]
        with self._at(depth):
            value = self._compute(e, varying, lane0)
        level.memo[key] = (value, reads)
        self._keep.append(e)
        return value

    @contextlib.contextmanager
    def _at(self, depth: int):
        """Emit where loop number `depth` computes what its inner loops do not change."""
        if depth == len(self._levels) - 1:
            yield
            return
        b, block = self.b, self._levels[depth + 1].before
        home, at_end = b.block, b.block.terminator is None
        b.position_before(block.terminator) if block.terminator is not None else b.position_at_end(block)
        yield
        b.position_at_end(home) if at_end else b.position_before(home.terminator)

    def _compute(self, e: ir.Expr, varying: bool, lane0: bool) -> Any:
        if isinstance(e, ir.Var):
            value = self._vars[e.name][0]
            if isinstance(e, ir.Local):
                return extract(self.b, value, 0) if lane0 else value
            if not varying:
                return value
            assert self._vector is not None
            ty = vec(i64, self._vector.lanes)
            return self.b.add(splat(self.b, value, self._vector.lanes), iota(ty))
        if isinstance(e, ir.Load):
            return self._load(e, varying)
        assert isinstance(e, ir.Op)
        values = [self._emit(a, lane0) for a in e.args]
        if varying:
            assert self._vector is not None
            values = [splat(self.b, v, self._vector.lanes) for v in values]
        return operations.emit(self.b, e, values)

    def _load(self, e: ir.Load, varying: bool) -> Any:
        ty = dtypes.stored(e.buf.dtype)
        place, step = self._address(e.buf, e.index)
        if not varying or step == 0:
            return self._from_memory(load(self.b, ty, place), e.buf)
        assert self._vector is not None
        wide = vec(ty, self._vector.lanes)
        if step == 1:
            return self._from_memory(load(self.b, wide, place), e.buf)
        value = undef(wide)
        for k, p in enumerate(self._lane_addresses(e.buf, e.index, place, step)):
            value = self.b.insert_element(value, load(self.b, ty, p), const(k, dtypes.i32))
        return self._from_memory(value, e.buf)

    def _from_memory(self, value: Any, buf: ir.Buf) -> Any:
        ty = like(dtypes.held(buf.dtype), value.type)
        return value if value.type == ty else self.b.icmp_unsigned("!=", value, const(0, value.type))

    def place(self, buf: ir.Buf, index: tuple[ir.Expr, ...]) -> Any:
        """The address of an element."""
        return self._address(buf, index)[0]

    # --- addresses ------------------------------------------------------------------------------------------------
    def _linear(self, buf: ir.Buf, index: tuple[ir.Expr, ...]) -> ir.Expr:
        total: ir.Expr = ir.index(0)
        for i, s in zip(index, buf.strides):
            total = ir.add(total, ir.mul(i, s))
        return total

    def _address(self, buf: ir.Buf, index: tuple[ir.Expr, ...]) -> tuple[Any, int | None]:
        """The address of an element (of the first lane), and the step from lane to lane (None: any)."""
        step = 0 if self._vector is None else self._step(buf, index, self._vector.var)
        place = gep(self.b, self._pointer(buf), self.scalar(self._linear(buf, index)), dtypes.stored(buf.dtype))
        return place, step

    def _lane_addresses(self, buf: ir.Buf, index: tuple, place: Any, step: int | None) -> list[Any]:
        assert self._vector is not None
        ty = dtypes.stored(buf.dtype)
        if step is not None:
            return [gep(self.b, place, k * step, ty) for k in range(self._vector.lanes)]
        linear = splat(self.b, self.value(self._linear(buf, index)), self._vector.lanes)
        base = self._pointer(buf)
        return [gep(self.b, base, extract(self.b, linear, k), ty) for k in range(self._vector.lanes)]

    def _step(self, buf: ir.Buf, index: tuple[ir.Expr, ...], var: ir.Var) -> int | None:
        total = 0
        for i, s in zip(index, buf.strides):
            c = _coefficient(i, var)
            if c is None:
                return None
            total += c * s
        return total

    # --- what an expression depends on -----------------------------------------------------------------------------
    def _where(self, e: ir.Expr) -> tuple[int, frozenset]:
        """The level at which an expression is to be computed, and the memories that it reads."""
        if id(e) in self._facts:
            return self._facts[id(e)][1:]
        depth, reads = 0, frozenset()
        if isinstance(e, ir.Var):
            depth = self._vars[e.name][1] if e.name in self._vars else len(self._levels) - 1
        for child in ir.children(e):
            child_depth, child_reads = self._where(child)
            depth, reads = max(depth, child_depth), reads | child_reads
        if isinstance(e, ir.Load):
            reads |= {e.buf.memory}
            for k in range(len(self._levels) - 1, depth, -1):
                if e.buf.memory in self._levels[k].writes:
                    depth = k
                    break
        if isinstance(e, ir.Reduce) or (isinstance(e, ir.Op) and operations.branches(e)):
            depth = len(self._levels) - 1  # more than one block: it cannot stand in a loop's header
        self._facts[id(e)] = (e, depth, reads)
        return depth, reads

    def _depends(self, e: ir.Expr, var: ir.Var) -> bool:
        return any(n is var or isinstance(n, ir.Local) for n in ir.walk(e))

    # --- reductions -----------------------------------------------------------------------------------------------
    def _reduce(self, e: ir.Reduce) -> Any:
        """All values of `e.var` combined; in vectors along the reduction, or for a vector of results at once."""

        def combine(x, y):
            return operations.emit(self.b, ir.Op(e.dtype, e.op, (e.body, e.body)), [x, y])

        ty = dtypes.held(e.dtype)
        along = (
            self._vector is None
            and e.extent >= self.lanes
            and not any(isinstance(n, ir.Reduce) for n in ir.walk(e.body))
            and all(self._step(n.buf, n.index, e.var) in (0, 1) for n in _loads(e.body))
        )
        if not along:
            lanes = self._vector.lanes if self._vector is not None and self._depends(e.body, self._vector.var) else 1
            first = dtypes.constant(e.init, e.dtype, vec(ty, lanes))
            return self._reduce_loop(e, 0, 1, 1, [first], combine, lanes)[0]
        wide = vec(ty, self.lanes)
        count = UNROLL if e.extent >= 2 * UNROLL * self.lanes else 1
        start = dtypes.constant(e.init, e.dtype, wide)
        main = e.extent // (count * self.lanes) * count * self.lanes
        sums = self._reduce_vectors(e, 0, main, count, [start] * count, combine)
        rest = e.extent // self.lanes * self.lanes
        if rest > main:
            sums[:1] = self._reduce_vectors(e, main, rest, 1, sums[:1], combine)
        total = reduce_vector(self.b, reduce_values(sums, combine), combine)
        if rest < e.extent:
            total = self._reduce_loop(e, rest, 1, 1, [total], combine, 1)[0]
        return total

    def _reduce_loop(self, e, start, step, count, carry, combine, lanes) -> list[Any]:
        before = self.b.block
        with loop(self.b, start, e.extent, step, carry=carry) as L, self._level((), before):
            self._vars[e.var.name] = (L.i, len(self._levels) - 1)
            body = self.value(e.body)
            L.next = [combine(L.v[0], splat(self.b, body, lanes))]
        return L.out

    def _reduce_vectors(self, e, start, stop, count, carry, combine) -> list[Any]:
        before = self.b.block
        with loop(self.b, start, stop, count * self.lanes, carry=carry) as L, self._level((), before):
            self._vector = _Vector(e.var, self.lanes)
            L.next = []
            for u in range(count):
                i = self.b.add(L.i, const(u * self.lanes)) if u else L.i
                self._vars[e.var.name] = (i, len(self._levels) - 1)
                self._levels[-1].memo.clear()
                L.next.append(combine(L.v[u], splat(self.b, self.value(e.body), self.lanes)))
            self._vector = None
        return L.out


def _loads(e: ir.Expr) -> list[ir.Load]:
    return [n for n in ir.walk(e) if isinstance(n, ir.Load)]


def _coefficient(e: ir.Expr, var: ir.Var) -> int | None:
    """How much an index grows when a loop variable grows by one; None if that is not constant."""
    if e is var:
        return 1
    if isinstance(e, ir.Op) and e.dtype == ir.INDEX:
        if e.name == "add":
            parts = [_coefficient(a, var) for a in e.args]
            return None if None in parts else sum(p or 0 for p in parts)
        if e.name == "mul" and isinstance(e.args[1], ir.Const):
            part = _coefficient(e.args[0], var)
            return None if part is None else part * e.args[1].value
    return 0 if not any(n is var or isinstance(n, ir.Local) for n in ir.walk(e)) else None
