"""Reductions and scans in LLVM: several vectors of partial results, combined at the end.

A reduction over contiguous memory runs along it, UNROLL vectors at a time, so that one addition does not wait for the
one before. Inside a loop that runs in vectors it makes one result in each lane. A scan combines the lanes of a vector
among themselves and then with what came before: of its steps only one waits for the previous vector.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.cpu import affine, dtypes, ir, loopnotes, operations, vectors
from palladion.compiler.cpu.builder import (
    const,
    extract,
    loop,
    reduce_values,
    reduce_vector,
    splat,
    vec,
)

UNROLL = 4  # vectors of partial results


def _combiner(em: Any, e: ir.Reduce | ir.Scan, dtype: Any) -> Any:
    body = e.body if isinstance(e, ir.Reduce) else e.value

    def combine(x: Any, y: Any) -> Any:
        return operations.emit(em.b, ir.Op(dtype, e.op, (body, body)), [x, y])

    return combine


def emit(em: Any, e: ir.Reduce) -> Any:
    """The value of a reduction."""
    combine, ty = _combiner(em, e, e.dtype), dtypes.held(e.dtype)
    note = loopnotes.of_reduction(e, em.lanes, affine.step, em.vector is not None)
    em.note(e, note)
    along = em.vector is None and note.reason is None
    if not along:
        v = em.vector
        lanes = v.lanes if v is not None and affine.depends(e.body, v.var) else 1
        first = dtypes.constant(e.init, e.dtype, vec(ty, lanes))
        return _one_by_one(em, e, 0, first, combine, lanes)
    wide = vec(ty, em.lanes)
    count = UNROLL if e.extent >= 2 * UNROLL * em.lanes else 1
    start = dtypes.constant(e.init, e.dtype, wide)
    main = e.extent // (count * em.lanes) * count * em.lanes
    sums = _in_vectors(em, e, 0, main, [start] * count, combine)
    rest = e.extent // em.lanes * em.lanes
    if rest > main:
        sums[:1] = _in_vectors(em, e, main, rest, sums[:1], combine)
    if rest < e.extent and em.masks:
        sums[-1:] = _in_vectors(em, e, rest, e.extent, sums[-1:], combine)
        rest = e.extent
    total = reduce_vector(em.b, reduce_values(sums, combine), combine)
    return _one_by_one(em, e, rest, total, combine, 1) if rest < e.extent else total


def _one_by_one(em: Any, e: ir.Reduce, start: int, first: Any, combine: Any, lanes: int) -> Any:
    before = em.b.block
    with loop(em.b, start, e.extent, carry=[first]) as L, em.level((), before):
        em.bind(e.var, L.i)
        L.next = [combine(L.v[0], splat(em.b, em.value(e.body), lanes))]
    return L.out[0]


def _in_vectors(em: Any, e: ir.Reduce, start: int, stop: int, carry: list[Any], combine: Any) -> list[Any]:
    before, count = em.b.block, len(carry)
    valid = min(em.lanes, stop - start)
    whole = loop(em.b, start, stop, count * em.lanes, carry=carry)
    with whole as L, em.level((), before), em.vectors_along(e.var, valid):
        L.next = []
        for u in range(count):
            em.next_round(e.var, em.b.add(L.i, const(u * em.lanes)) if u else L.i)
            value = splat(em.b, em.value(e.body), em.lanes)
            neutral = dtypes.constant(e.init, e.dtype, value.type)
            L.next.append(combine(L.v[u], vectors.where_valid(em.b, value, valid, neutral)))
    return L.out


def emit_scan(em: Any, s: ir.Scan) -> None:
    """Store the combinations of the first, the first two, … values of a row (from its end, if reversed)."""
    combine = _combiner(em, s, s.value.dtype)
    ty, step = dtypes.held(s.value.dtype), affine.step(s.buf, s.index, s.var)
    reads = affine.loads(s.value)
    near = step in (-1, 1) and all(affine.step(n.buf, n.index, s.var) in (-1, 0, 1) for n in reads)
    wide = em.masks and near and s.extent >= em.lanes and not any(isinstance(n, ir.Reduce) for n in ir.walk(s.value))
    em.note(s, loopnotes.Note("loop", s.extent, None if wide else "recurrence", 0, s.where))
    lanes = em.lanes if wide else 1
    main = s.extent // lanes * lanes
    carry = dtypes.constant(s.init, s.value.dtype, vec(ty, lanes))
    for start, stop in ((0, main), (main, s.extent)):
        if start == stop:
            continue
        before = em.b.block
        with loop(em.b, start, stop, lanes, carry=[carry]) as L, em.level((s,), before):
            valid = min(lanes, stop - start)
            if lanes == 1:
                em.bind(s.var, L.i)
                total = combine(L.v[0], em.value(s.value))
                em.put(s.buf, s.index, total)
                L.next = [total]
                continue
            with em.vectors_along(s.var, valid, end=stop):
                em.next_round(s.var, L.i)
                value = splat(em.b, em.value(s.value), lanes)
                value = vectors.prefixes(em.b, value, combine, dtypes.constant(s.init, s.value.dtype, value.type))
                em.put(s.buf, s.index, combine(L.v[0], value))
                last = splat(em.b, extract(em.b, value, valid - 1), lanes)
                L.next = [combine(L.v[0], last)]
        carry = L.out[0]
