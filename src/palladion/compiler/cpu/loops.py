"""The order of loops: which one runs in vectors, which ones are one loop, and which two run in tiles.

A store comes from lowering as a loop for each dimension, in the order of the dimensions, and fusion leaves it so. Here
every innermost nest of independent loops is arranged anew:

- a reduction of a few elements is written out;
- an index that is divided by a constant (a reshape) splits its loop, so that its parts are plain again;
- loops that walk through all their memory without a gap become one, so that (128, 3) is one loop of 384;
- the loop in which most of the memory is contiguous becomes the innermost, which the emitter runs in vectors;
- where the store is contiguous along one loop and a read along another, the two run in tiles (tiles.py);
- a sum down the columns adds up whole rows, several at a time, instead of walking down each column.

Loops may change places as their rounds are independent: no two store to one place, which is checked here, and none
reads what another stores, which lowering and fusion see to. Interchange and strip-mining: Allen and Kennedy,
Optimizing Compilers, chapters 5 and 8.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from palladion.compiler.cpu import affine, ir, target, tiles, vectors
from palladion.compiler.cpu import math as vector_math
from palladion.compiler.cpu.fuse import Rewriter

FEW = 4  # a reduction of so many elements is written out
ROWS = 8  # that a sum down the columns takes at a time
DENSE = 80  # instructions, roughly, of a body that is repeated for each row of a tile

Loops = list[ir.For]
Body = tuple[ir.Stmt, ...]


def arrange(block: Sequence[ir.Stmt]) -> Body:
    """Arrange every nest of loops in a block."""
    return tuple(t for s in block for t in _statement(s))


def _statement(s: ir.Stmt) -> Body:
    if isinstance(s, ir.For):
        loops, body = _nest(s)
        if loops and all(isinstance(t, (ir.Store, ir.Define)) for t in body):
            return _leaf(loops, body)
        return (dataclasses.replace(s, body=arrange(s.body)),)
    if isinstance(s, ir.If):
        return (dataclasses.replace(s, branches=tuple(map(arrange, s.branches))),)
    if isinstance(s, ir.While):
        return (dataclasses.replace(s, before=arrange(s.before), body=arrange(s.body)),)
    return (s,)


def _nest(s: ir.For) -> tuple[Loops, Body]:
    """The loops that stand directly in each other, if their rounds are independent, and the body of the last one."""
    loops: Loops = []
    body: Body = (s,)
    while len(body) == 1 and isinstance(t := body[0], ir.For):
        if t.ordered or t.reverse or not isinstance(t.extent, int):
            return [], body
        loops.append(t)
        body = t.body
    return loops, body


def _wrapped(loops: Loops, body: Body) -> Body:
    for loop in reversed(loops):
        body = (dataclasses.replace(loop, body=body),)
    return body


def _leaf(loops: Loops, body: Body) -> Body:
    body = tuple(_written_out(s) for s in body)
    loops, body = _split(loops, body)
    loops, body = _collapsed(loops, body)
    loops = _ordered(loops, body)
    if (columns := _by_rows(loops, body)) is not None:
        return columns
    if len(loops) < 2 or not _tiles(loops[-2], loops[-1], body):
        return _wrapped(loops, body)
    if _size(body) > DENSE:
        first, body = _turned(loops, body)
        return (*first, *_wrapped(loops, body))
    return _tiled(loops, body)


def _tiled(loops: Loops, body: Body) -> Body:
    return _wrapped([*loops[:-2], dataclasses.replace(loops[-2], tiled=True), loops[-1]], body)


def _size(body: Body) -> int:
    """Instructions of a body, roughly; addresses do not count."""

    def of(e: ir.Expr) -> int:
        if id(e) in seen or isinstance(e, (ir.Load, ir.Const, ir.Var)):
            return 1
        seen.add(id(e))
        elementary = isinstance(e, ir.Op) and e.name in vector_math.RULES
        return (20 if elementary else 2) + sum(map(of, ir.children(e)))

    seen: set[int] = set()
    return sum(of(s.value) for s in body if isinstance(s, (ir.Store, ir.Define)))


def _turned(loops: Loops, body: Body) -> tuple[Body, Body]:
    """Statements that transpose what is read along the outer loop into temporaries, and the body that reads those."""
    first: Body = ()
    changes: dict[int, ir.Expr] = {}
    for n in tiles.across(body, loops[-2].var, loops[-1].var):
        copy = ir.temp([x.extent for x in loops if isinstance(x.extent, int)], n.dtype, "turned")
        index = tuple(x.var for x in loops)
        first += _tiled(loops, (ir.Store(copy, index, n),))
        changes[id(n)] = ir.Load(n.dtype, copy, index)
    return first, Rewriter(changes, {}).block(body)


# --- what a body does -----------------------------------------------------------------------------------------------
def _accesses(body: Body) -> Iterator[tuple[ir.Buf, tuple[ir.Expr, ...], bool]]:
    """What is read and written: buffer, index, whether it is written."""
    for s in body:
        if isinstance(s, ir.Store):
            yield s.buf, s.index, True
        for e in ir.stmt_exprs(s):
            for n in affine.loads(e):
                yield n.buf, n.index, False


def _used_as_number(body: Body, var: ir.Var) -> bool:
    """Whether a loop variable is used other than to pick an element."""

    def inside(e: ir.Expr) -> bool:
        if e is var:
            return True
        return not isinstance(e, ir.Load) and any(map(inside, ir.children(e)))

    return any(inside(s.value) for s in body if isinstance(s, (ir.Store, ir.Define)))


def _independent(loops: Loops, body: Body) -> bool:
    """Whether every store goes to another place in every round, whatever the order."""
    for buf, index, stores in _accesses(body):
        if not stores:
            continue
        reach = 0
        steps = [(affine.step(buf, index, loop.var), loop.extent) for loop in loops]
        if any(step is None for step, _ in steps):
            return False
        for step, extent in sorted((abs(step or 0), extent) for step, extent in steps):
            assert isinstance(extent, int)
            if step <= reach:
                return False
            reach += step * (extent - 1)
    return True


# --- small reductions, split and collapsed loops ---------------------------------------------------------------------
def _terms(e: ir.Reduce, values: Sequence[ir.Expr]) -> list[ir.Expr]:
    """The body of a reduction for some values of its variable."""
    return [Rewriter({id(e.var): v}, {}).expr(e.body) for v in values]


def _tree(name: str, dtype: object, terms: Sequence[ir.Expr]) -> ir.Expr:
    terms = list(terms)
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        terms = [ir.Op(dtype, name, pair) for pair in zip(terms[::2], terms[1::2])] + odd
    return terms[0]


def _written_out(s: ir.Stmt) -> ir.Stmt:
    """The statement with its reductions of a few elements as plain expressions."""
    assert isinstance(s, (ir.Store, ir.Define))
    value = s.value
    while small := next((n for n in ir.walk(value) if isinstance(n, ir.Reduce) and n.extent <= FEW), None):
        first = ir.Const(small.dtype, small.init)
        total = _tree(small.op, small.dtype, [first, *_terms(small, [ir.index(k) for k in range(small.extent)])])
        value = Rewriter({id(small): total}, {}).expr(value)
    return dataclasses.replace(s, value=value)


def _split(loops: Loops, body: Body) -> tuple[Loops, Body]:
    """Loops whose variable is divided by a constant become two, with quotient and remainder as their variables."""
    for k, loop in enumerate(loops):
        assert isinstance(loop.extent, int)
        divided = {
            n.args[1].value: n
            for s in body
            for e in ir.stmt_exprs(s)
            for n in ir.walk(e)
            if isinstance(n, ir.Op) and n.name in ("div", "rem") and n.dtype == ir.INDEX
            if n.args[0] is loop.var and isinstance(n.args[1], ir.Const)
        }
        by = next((by for by in divided if 1 < by < loop.extent and loop.extent % by == 0), None)
        if by is None:
            continue
        high, low = ir.new_var(), ir.new_var()
        changes: dict[int, ir.Expr] = {id(loop.var): ir.add(ir.mul(high, by), low)}
        for s in body:
            for e in ir.stmt_exprs(s):
                for n in ir.walk(e):
                    if isinstance(n, ir.Op) and n.name in ("div", "rem") and n.args[0] is loop.var:
                        if isinstance(n.args[1], ir.Const) and n.args[1].value == by:
                            changes[id(n)] = high if n.name == "div" else low
        parts = [dataclasses.replace(loop, var=v, extent=n) for v, n in ((high, loop.extent // by), (low, by))]
        return _split([*loops[:k], *parts, *loops[k + 1 :]], Rewriter(changes, {}).block(body))
    return loops, body


def _collapsed(loops: Loops, body: Body) -> tuple[Loops, Body]:
    """Pairs of loops through gapless memory become one."""
    for outer in loops:
        for inner in loops:
            if outer is inner or any(_used_as_number(body, loop.var) for loop in (outer, inner)):
                continue
            assert isinstance(inner.extent, int) and isinstance(outer.extent, int)
            steps = [(affine.step(b, i, outer.var), affine.step(b, i, inner.var)) for b, i, _ in _accesses(body)]
            if all(a is not None and b is not None and a == b * inner.extent for a, b in steps):
                body = Rewriter({id(outer.var): ir.index(0)}, {}).block(body)
                whole = dataclasses.replace(inner, extent=outer.extent * inner.extent)
                return _collapsed([whole if x is inner else x for x in loops if x is not outer], body)
    return loops, body


# --- which loop is the innermost --------------------------------------------------------------------------------------
def _filled(extent: int, lanes: int) -> float:
    """How much of its vectors a loop fills."""
    return extent / (-(-extent // lanes) * lanes)


def _price(loop: ir.For, body: Body) -> float:
    """Roughly what an element costs when this loop is the innermost."""
    host = target.host()
    assert isinstance(loop.extent, int)
    lanes = host.LANES_F32
    filled = _filled(loop.extent, lanes)
    wide = loop.extent >= lanes or host.vector_bytes == 64
    total = 0.0
    for buf, index, stores in _accesses(body):
        step = affine.step(buf, index, loop.var)
        if step == 0:
            total += 0.02
        elif step in (1, -1) and wide:
            total += 1 / lanes / filled
        elif step is not None and 1 < step <= vectors.FEW and wide and loop.extent >= lanes:
            total += 2 * step / lanes
        else:
            total += 1.5 if stores else 1.2
    return total


def _tile_price(outer: ir.For, inner: ir.For, body: Body) -> float:
    """The same for two loops in tiles."""
    side = tiles.lanes_for(tiles.buffers(body))
    assert isinstance(outer.extent, int) and isinstance(inner.extent, int)
    wide = _filled(inner.extent, side)
    turned = {id(n) for n in tiles.across(body, outer.var, inner.var)}
    total = 0.0
    for s in body:
        total += 1 / side / wide
        for n in (n for e in ir.stmt_exprs(s) for n in affine.loads(e)):
            if id(n) in turned:
                total += 6 / side / wide / _filled(outer.extent, side)
            else:
                step = affine.step(n.buf, n.index, inner.var)
                total += 0.02 if step == 0 else 1 / side / wide if step in (1, -1) else 1.2
    return total


def _can_tile(outer: ir.For, inner: ir.For, body: Body) -> bool:
    turned = tiles.across(body, outer.var, inner.var)
    written = {buf.memory for buf in ir.writes(body)}
    nodes = [n for s in body for e in ir.stmt_exprs(s) for n in ir.walk(e)]
    if not turned or any(n.buf.memory in written for n in turned):
        return False
    if any(isinstance(n, ir.Reduce) for n in nodes):
        return False
    side = tiles.lanes_for(tiles.buffers(body))
    assert isinstance(outer.extent, int) and isinstance(inner.extent, int)
    if target.host().vector_bytes != 64 and (outer.extent % side or inner.extent % side):
        return False
    return all(affine.step(buf, index, inner.var) == 1 for buf, index, stores in _accesses(body) if stores)


def _tiles(outer: ir.For, inner: ir.For, body: Body) -> bool:
    """Whether two loops, the innermost ones, are to run in tiles."""
    return _can_tile(outer, inner, body) and _tile_price(outer, inner, body) < _price(inner, body)


def _ordered(loops: Loops, body: Body) -> Loops:
    """The loops in the best order."""
    if len(loops) < 2 or not _independent(loops, body):
        return loops
    best, order = _price(loops[-1], body), loops
    for inner in reversed(loops):
        rest = [x for x in loops if x is not inner]
        if (price := _price(inner, body)) < best * 0.99:
            best, order = price, [*rest, inner]
        for outer in reversed(rest):
            if _can_tile(outer, inner, body) and (price := _tile_price(outer, inner, body)) < best * 0.99:
                best, order = price, [*(x for x in rest if x is not outer), outer, inner]
    return order


# --- sums down the columns ------------------------------------------------------------------------------------------
def _by_rows(loops: Loops, body: Body) -> Body | None:
    """A nest whose reductions run across the innermost loop's memory, with that loop inside the reductions'."""
    if not loops:
        return None
    column = loops[-1]
    found = {id(n): n for s in body if isinstance(s, (ir.Store, ir.Define)) for n in _outermost(s.value)}
    if not found or not all(_runs_down(n, column.var) for n in found.values()):
        return None
    assert isinstance(column.extent, int)
    parts: list[ir.Stmt] = []
    changes: dict[int, ir.Expr] = {}
    for n in found.values():
        acc = ir.temp((column.extent,), n.dtype, n.op)
        start = (ir.Store(acc, (column.var,), ir.Const(n.dtype, n.init)),)
        parts += _wrapped([column], start)
        parts += _summed(n, acc, column)
        changes[id(n)] = ir.Load(n.dtype, acc, (column.var,))
    parts += _wrapped([column], Rewriter(changes, {}).block(body))
    return _wrapped(loops[:-1], tuple(parts))


def _outermost(e: ir.Expr) -> Iterator[ir.Reduce]:
    if isinstance(e, ir.Reduce):
        yield e
        return
    for child in ir.children(e):
        yield from _outermost(child)


def _chain(e: ir.Reduce) -> tuple[list[ir.Reduce], ir.Expr]:
    """Reductions that are each other's whole body, and the body of the last one."""
    chain = [e]
    while isinstance(chain[-1].body, ir.Reduce) and chain[-1].body.op == e.op and chain[-1].body.dtype == e.dtype:
        chain.append(chain[-1].body)
    return chain, chain[-1].body


def _runs_down(e: ir.Reduce, column: ir.Var) -> bool:
    chain, body = _chain(e)
    reads = affine.loads(body)
    if any(isinstance(n, (ir.Reduce, ir.Local)) for n in ir.walk(body)) or math.prod(n.extent for n in chain) < ROWS:
        return False
    along = sum(affine.step(n.buf, n.index, chain[-1].var) == 1 for n in reads)
    return sum(affine.step(n.buf, n.index, column) == 1 for n in reads) > along


def _summed(e: ir.Reduce, acc: ir.Buf, column: ir.For) -> Body:
    """Statements that add each row of a reduction to the sums so far, ROWS of them at a time."""
    chain, _ = _chain(e)
    last = chain[-1]
    held = ir.Load(acc.dtype, acc, (column.var,))

    def add(rows: Sequence[ir.Expr]) -> Body:
        value = ir.Op(e.dtype, e.op, (held, _tree(e.op, e.dtype, _terms(last, rows))))
        return _wrapped([column], (ir.Store(acc, (column.var,), value),))

    several, rest = last.extent // ROWS, last.extent % ROWS
    block: Body = ()
    if several:
        r = ir.new_var("r")
        rows = add([ir.add(ir.mul(r, ROWS), k) for k in range(ROWS)])
        block = (ir.For(r, several, rows, ordered=True, where=e.where),)
    if rest:
        block += add([ir.index(several * ROWS + k) for k in range(rest)])
    for n in reversed(chain[:-1]):
        block = (ir.For(n.var, n.extent, block, ordered=True, where=e.where),)
    return block
