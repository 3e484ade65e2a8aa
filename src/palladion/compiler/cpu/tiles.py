"""Two loops in square tiles: what is contiguous along the outer loop is transposed in registers.

For `o[i, j] = x[j, i]` neither loop order is good: one reads, the other writes one element at a time. In a tile of as
many rounds of each loop as a vector has lanes, the vectors of x along i are read and transposed by shuffles, and o is
written in whole vectors along j. Tiles are taken in blocks of a few, so that few pages and cache lines are in use at
once. The last tiles of a loop are parts of tiles. The shuffles are those of pack.py.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.cpu import affine, dtypes, ir, loopnotes, pack, target, vectors
from palladion.compiler.cpu.builder import const, gep, loop, smin, vec

BLOCK = 4  # tiles of a block along either loop
MOST = 32  # lanes; larger tiles would not fit the registers


def lanes_for(bufs: Any) -> int:
    """The side of a tile in which elements of these buffers are moved."""
    return min(MOST, target.host().lanes(max(buf.dtype.itemsize for buf in bufs)))


def across(body: Any, outer: ir.Var, inner: ir.Var) -> list[ir.Load]:
    """The reads of a tiled loop's body that run along the outer loop."""
    found = {}
    for s in body:
        for e in ir.stmt_exprs(s):
            for n in affine.loads(e):
                if affine.step(n.buf, n.index, outer) == 1 and affine.step(n.buf, n.index, inner) not in (0, 1, None):
                    found[id(n)] = n
    return list(found.values())


def buffers(body: Any) -> list[ir.Buf]:
    """The buffers that the statements of a loop read and write."""
    return [*ir.reads(body), *ir.writes(body)]


def emit(em: Any, s: ir.For) -> None:
    """Emit a tiled loop and the loop in it."""
    (inner,) = s.body
    assert isinstance(inner, ir.For) and isinstance(s.extent, int) and isinstance(inner.extent, int)
    em.note(s, loopnotes.Note("loop", s.extent, "outer", 0, s.where))
    em.note(inner, loopnotes.Note("loop", inner.extent, None, 0, inner.where))
    side = lanes_for(buffers(inner.body))
    moved = across(inner.body, s.var, inner.var)
    b, before = em.b, em.b.block
    rows, columns = s.extent // side * side, inner.extent // side * side

    def tile(i: Any, j: Any, height: int, width: int) -> None:
        em.next_round(s.var, i)
        em.bind(inner.var, j)
        turned = {id(e): _turned(em, e, inner.var, side, height, width) for e in moved}
        for u in range(height):
            em.next_round(s.var, b.add(i, const(u)) if u else i)
            em.bind(inner.var, j)
            em.given = {key: columns[u] for key, columns in turned.items()}
            with em.vectors_along(inner.var, width, side):
                em.block(inner.body)
            em.given = {}

    def strip(first: Any, end: Any, left: Any, right: Any) -> None:
        with loop(b, first, end, side) as I, loop(b, left, right, side) as J:
            tile(I.i, J.i, side, side)

    with em.level(inner.body, before):
        step = BLOCK * side
        if rows > step and columns > step:
            with loop(b, 0, rows, step) as I, loop(b, 0, columns, step) as J:
                ends = (smin(b, b.add(x.i, const(step)), const(n)) for x, n in ((I, rows), (J, columns)))
                bottom, right = ends
                strip(I.i, bottom, J.i, right)
        elif rows and columns:
            strip(0, rows, 0, columns)
        if rows and columns < inner.extent:
            with loop(b, 0, rows, side) as I:
                tile(I.i, const(columns), side, inner.extent - columns)
        if rows < s.extent:
            if columns:
                with loop(b, 0, columns, side) as J:
                    tile(const(rows), J.i, s.extent - rows, side)
            if columns < inner.extent:
                tile(const(rows), const(columns), s.extent - rows, inner.extent - columns)


def _turned(em: Any, e: ir.Load, inner: ir.Var, side: int, height: int, width: int) -> list[Any]:
    """What a read along the outer loop gives, as a vector along the inner loop for each round of the outer one."""
    b, ty = em.b, dtypes.stored(e.buf.dtype)
    place, step = em.place(e.buf, e.index), affine.step(e.buf, e.index, inner)
    assert step is not None
    rows = [vectors.read(b, ty, gep(b, place, v * step, ty), side, height) for v in range(width)]
    rows += [const(0, vec(ty, side))] * (side - width)
    return pack.transpose(b, rows)[:height]
