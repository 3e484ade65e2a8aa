"""How far apart in memory an access is from one round of a loop to the next: the question behind every loop order."""

from __future__ import annotations

from palladion.compiler.cpu import ir


def coefficient(e: ir.Expr, var: ir.Var) -> int | None:
    """How much an index grows when a loop variable grows by one; None if that is not constant."""
    if e is var:
        return 1
    if isinstance(e, ir.Op) and e.dtype == ir.INDEX:
        if e.name == "add":
            parts = [coefficient(a, var) for a in e.args]
            return None if None in parts else sum(p or 0 for p in parts)
        if e.name == "mul" and isinstance(e.args[1], ir.Const):
            part = coefficient(e.args[0], var)
            return None if part is None else part * e.args[1].value
    return None if depends(e, var) else 0


def depends(e: ir.Expr, var: ir.Var) -> bool:
    """Whether an expression may change with a loop variable (a value that the loop's body defines does)."""
    return any(n is var or isinstance(n, ir.Local) for n in ir.walk(e))


def step(buf: ir.Buf, index: tuple[ir.Expr, ...], var: ir.Var) -> int | None:
    """Elements from the place that a loop accesses in one round to that in the next; None if that is not constant."""
    total = 0
    for i, s in zip(index, buf.strides):
        c = coefficient(i, var)
        if c is None:
            return None
        total += c * s
    return total


def loads(e: ir.Expr) -> list[ir.Load]:
    """The reads in an expression."""
    return [n for n in ir.walk(e) if isinstance(n, ir.Load)]
