"""Which loops run a vector at a time, which do not, and why: the emitter's decision, and what reports say of it.

    note = of_loop(s, shortest, step)            # note.reason is None: run it in vectors

`step(buf, index, var)` is how far an access moves in memory when the variable grows by one (None: no constant).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from palladion.compiler.cpu import ir

Step = Callable[[ir.Buf, tuple[ir.Expr, ...], ir.Var], int | None]

REASONS = {
    "outer": "it holds the loops that are",
    "recurrence": "each round needs the one before",
    "short": "it has fewer elements than a vector",
    "strided": "no access to memory is contiguous along it",
    "run-time": "its length is known at run time only",
    "control": "it holds a branch, a product, a sort or a call",
    "reduction": "the reduction inside it is the better one to run in vectors",
}


@dataclasses.dataclass(frozen=True)
class Note:
    """What became of one loop.

    Attributes:
      kind: "loop", or "reduction".
      extent: rounds; None where only run time knows.
      reason: why it runs one element at a time, a key of `REASONS`; None: it runs in vectors.
      by_element: how many accesses of a vector loop take their lanes one by one, not being contiguous.
      eqns: the equations that it computes.
    """

    kind: str
    extent: int | None
    reason: str | None
    by_element: int
    eqns: tuple[Any, ...]


def of_loop(s: ir.For, shortest: int, step: Step) -> Note:
    """Whether a loop can, and should, run a vector at a time; `shortest`: the least extent that is worth a vector."""
    reason, far = _judge(s, shortest, step)
    return Note("loop", s.extent if isinstance(s.extent, int) else None, reason, far, s.where)


def _judge(s: ir.For, shortest: int, step: Step) -> tuple[str | None, int]:
    if any(isinstance(t, ir.For) for t in s.body):
        return "outer", 0
    if s.ordered or s.reverse:
        return "recurrence", 0
    if not isinstance(s.extent, int):
        return "run-time", 0
    if not all(isinstance(t, (ir.Store, ir.Define)) for t in s.body):
        return "control", 0
    if s.extent < shortest:
        return "short", 0
    if any(isinstance(t, ir.Store) and _accumulates(t, s.var, step) for t in s.body):
        return "recurrence", 0
    near = far = 0
    for t in s.body:
        for node in (n for e in ir.stmt_exprs(t) for n in ir.walk(e)):
            if isinstance(node, ir.Reduce) and _contiguous(node.body, node.var, step) > _contiguous(
                node.body, s.var, step
            ):
                return "reduction", 0
        assert isinstance(t, (ir.Store, ir.Define))
        written = [(t.buf, t.index)] if isinstance(t, ir.Store) else []
        for buf, index in [*written, *((n.buf, n.index) for n in loads(t.value))]:
            n = step(buf, index, s.var)
            near, far = near + (n in (-1, 1)), far + (n not in (-1, 0, 1))
    return (None if near or not far else "strided"), far


def _accumulates(t: ir.Store, var: ir.Var, step: Step) -> bool:
    """Whether a store may add to what an earlier round has stored in the same place."""
    return step(t.buf, t.index, var) in (None, 0) and any(n.buf.memory == t.buf.memory for n in loads(t.value))


def of_reduction(e: ir.Reduce, lanes: int, step: Step, inside_vector: bool) -> Note:
    """Whether a reduction runs in vectors along its own variable (or for a vector of results at once)."""
    far = sum(step(n.buf, n.index, e.var) not in (-1, 0, 1) for n in loads(e.body))
    if inside_vector:
        reason = None
    elif any(isinstance(n, ir.Reduce) for n in ir.walk(e.body)):
        reason = "outer"
    elif e.extent < lanes:
        reason = "short"
    else:
        reason = "strided" if far else None
    return Note("reduction", e.extent, reason, 0, e.where)


def loads(e: ir.Expr) -> list[ir.Load]:
    """The reads in an expression."""
    return [n for n in ir.walk(e) if isinstance(n, ir.Load)]


def _contiguous(e: ir.Expr, var: ir.Var, step: Step) -> int:
    return sum(step(n.buf, n.index, var) == 1 for n in loads(e))
