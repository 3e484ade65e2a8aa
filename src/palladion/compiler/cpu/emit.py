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

from palladion.compiler.cpu import affine, arena, dtypes, ir, loopnotes, operations, reductions, target, tiles, vectors
from palladion.compiler.cpu.builder import (
    const,
    extract,
    gep,
    i64,
    iota,
    lanes_of,
    load,
    loop,
    repeat_while,
    splat,
    store,
    vec,
)

UNROLL = 4  # vectors in one round of a long vector loop
SHORT = 3  # from this extent on a loop runs in vectors, where part of one can be read and written


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
class Vector:
    """The vector loop that is being emitted.

    Attributes:
      var, lanes: its variable, and its width.
      valid: how many lanes count.
      end: the number of rounds, where the last lane that counts is the last of them; else None.
    """

    var: ir.Var
    lanes: int
    valid: int
    end: int | None = None


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
        self.vector: Vector | None = None
        self.masks = target.host().vector_bytes == 64  # parts of vectors are read and written in one instruction
        self.given: dict[int, Any] = {}  # vectors that loads are known to give (tiles)
        self._facts: dict[int, tuple[Any, int, frozenset]] = {}
        self._keep: list[Any] = []  # nodes whose ids are keys
        self.notes: dict[int, loopnotes.Note] = {}  # by id, what became of each loop

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
            self.put(s.buf, s.index, self.value(s.value))
        elif isinstance(s, ir.For):
            self._for(s)
        elif isinstance(s, ir.If):
            self._if(s)
        elif isinstance(s, ir.While):
            self._while(s)
        elif isinstance(s, ir.Define):
            self.define(s.var, self.value(s.value))
        elif isinstance(s, ir.Scan):
            reductions.emit_scan(self, s)
        else:
            self._special(self, s)
            self._forget(frozenset(m.memory for m in ir.writes([s])))

    @contextlib.contextmanager
    def level(self, stmts: Sequence[ir.Stmt], before: Any):
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

    def put(self, buf: ir.Buf, index: tuple[ir.Expr, ...], value: Any) -> None:
        """Store a value that has been computed: a vector in a vector loop, or a scalar."""
        place, step = self._address(buf, index)
        v = self.vector
        if v is not None and step != 0:
            value = dtypes.to_memory(self.b, splat(self.b, value, v.lanes), buf.dtype)
            if step == 1:
                fills = v.end == buf.shape[-1]
                vectors.write(self.b, value, place, self._valid(buf, index) if fills else v.valid)
            elif step == -1:
                first = gep(self.b, place, 1 - v.valid, dtypes.stored(buf.dtype))
                vectors.write(self.b, vectors.flipped(self.b, value, v.valid), first, v.valid)
            elif self.masks and step is not None and 1 < step <= vectors.FEW and v.valid == v.lanes:
                vectors.write_apart(self.b, value, place, step)
            else:
                vectors.write_each(self.b, value, self._lane_addresses(buf, index, place, step))
        else:
            if v is not None and lanes_of(value.type) > 1:  # every lane writes one place: the last one stays
                value = extract(self.b, value, v.valid - 1)
            store(self.b, dtypes.to_memory(self.b, value, buf.dtype), place)
        self._forget(frozenset([buf.memory]))

    def _for(self, s: ir.For) -> None:
        if s.tiled:
            tiles.emit(self, s)
            return
        extent = s.extent if isinstance(s.extent, int) else self.value(s.extent)
        start = 0
        if self._vectorises(s):
            assert isinstance(extent, int)
            start = extent // self.lanes * self.lanes
            per_round = UNROLL * self.lanes
            main = start // per_round * per_round if start >= 2 * per_round else 0
            if main:
                self._vector_loop(s, 0, main, per_round)
            if start > main:
                self._vector_loop(s, main, start, self.lanes)
            if start < extent and self.masks:
                self._vector_loop(s, start, extent, self.lanes)
                start = extent
            if start == extent:
                return
        before = self.b.block
        with loop(self.b, start, extent) as L, self.level(s.body, before):
            i = L.i
            if s.reverse:
                last = const(extent - 1) if isinstance(extent, int) else self.b.sub(extent, const(1))
                i = self.b.sub(last, i)
            self.bind(s.var, i)
            self.block(s.body)

    def _vector_loop(self, s: ir.For, start: int, stop: int, step: int) -> None:
        before, valid = self.b.block, min(self.lanes, stop - start)
        with (
            loop(self.b, start, stop, step) as L,
            self.level(s.body, before),
            self.vectors_along(s.var, valid, end=stop),
        ):
            for u in range(step // self.lanes):
                self.next_round(s.var, self.b.add(L.i, const(u * self.lanes)) if u else L.i)
                self.block(s.body)

    @contextlib.contextmanager
    def vectors_along(self, var: ir.Var, valid: int, lanes: int | None = None, end: int | None = None):
        """What is emitted inside computes a vector of values of a loop variable at once, of which `valid` count."""
        outer, self.vector = self.vector, Vector(var, lanes or self.lanes, valid, end)
        try:
            yield
        finally:
            self.vector = outer

    def bind(self, var: ir.Var, value: Any) -> None:
        """Give the innermost loop's variable its value."""
        self._vars[var.name] = (value, len(self._levels) - 1)

    def next_round(self, var: ir.Var, value: Any) -> None:
        """Another round of the innermost loop in the same piece of code."""
        self.bind(var, value)
        self._levels[-1].memo.clear()

    def _vectorises(self, s: ir.For) -> bool:
        """Whether a loop runs a vector at a time."""
        if self.vector is not None:
            return False
        note = loopnotes.of_loop(s, SHORT if self.masks else self.lanes, affine.step)
        self.note(s, note)
        return note.reason is None

    def note(self, node: Any, note: loopnotes.Note) -> None:
        """Remember, for reports, what becomes of a loop or reduction."""
        self.notes.setdefault(id(node), note)
        self._keep.append(node)

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
        with repeat_while(self.b, []) as W, self.level((*s.before, *s.body), before):
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
            return reductions.emit(self, e)
        depth, reads = self._where(e)
        varying = not lane0 and self.vector is not None and affine.depends(e, self.vector.var)
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
            assert self.vector is not None
            ty = vec(i64, self.vector.lanes)
            return self.b.add(splat(self.b, value, self.vector.lanes), iota(ty))
        if isinstance(e, ir.Load):
            return self._load(e, varying)
        assert isinstance(e, ir.Op)
        values = [self._emit(a, lane0) for a in e.args]
        if varying:
            assert self.vector is not None
            values = [splat(self.b, v, self.vector.lanes) for v in values]
        return operations.emit(self.b, e, values)

    def _load(self, e: ir.Load, varying: bool) -> Any:
        ty, v = dtypes.stored(e.buf.dtype), self.vector
        if varying and id(e) in self.given:
            return dtypes.from_memory(self.b, self.given[id(e)], e.buf.dtype)
        place, step = self._address(e.buf, e.index)
        if not varying or step == 0:
            return dtypes.from_memory(self.b, load(self.b, ty, place), e.buf.dtype)
        assert v is not None
        if step == 1:
            value = vectors.read(self.b, ty, place, v.lanes, self._valid(e.buf, e.index))
        elif step == -1:
            value = vectors.read(self.b, ty, gep(self.b, place, 1 - v.valid, ty), v.lanes, v.valid)
            value = vectors.flipped(self.b, value, v.valid)
        elif step is not None and 1 < step <= vectors.FEW and v.valid == v.lanes:
            value = vectors.read_apart(self.b, ty, place, v.lanes, step)
        else:
            value = vectors.read_each(self.b, ty, self._lane_addresses(e.buf, e.index, place, step), v.lanes)
        return dtypes.from_memory(self.b, value, e.buf.dtype)

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
        step = 0 if self.vector is None else affine.step(buf, index, self.vector.var)
        place = gep(self.b, self._pointer(buf), self.scalar(self._linear(buf, index)), dtypes.stored(buf.dtype))
        return place, step

    def _valid(self, buf: ir.Buf, index: tuple[ir.Expr, ...]) -> int:
        """How many lanes may be accessed (for writes, where the loop goes to the end of the row).

        A row in the arena has room for whole vectors: what was written in part would have to reach memory before it
        can be read again.
        """
        v = self.vector
        assert v is not None
        row = buf.kind == "temp" and buf.root is None and len(buf.shape) == 1 and index[0] is v.var
        return v.lanes if row and v.lanes * buf.dtype.itemsize <= arena.ALIGN else v.valid

    def _lane_addresses(self, buf: ir.Buf, index: tuple, place: Any, step: int | None) -> list[Any]:
        """The address of each lane that counts."""
        v, ty = self.vector, dtypes.stored(buf.dtype)
        assert v is not None
        if step is not None:
            return [gep(self.b, place, k * step, ty) for k in range(v.valid)]
        linear = splat(self.b, self.value(self._linear(buf, index)), v.lanes)
        base = self._pointer(buf)
        return [gep(self.b, base, extract(self.b, linear, k), ty) for k in range(v.valid)]

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
