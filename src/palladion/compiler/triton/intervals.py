"""Between which numbers the results of an index map lie, so that no clamp is emitted where none can act.

A clamp costs two instructions, but it also hides from Triton that a block begins at a multiple of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from palladion import jaxlink

Interval = tuple[int, int]
ANY: Interval = (-(1 << 31), (1 << 31) - 1)


def _corners(function: Callable[[int, int], int]) -> Callable[..., Interval]:
    def rule(eqn: Any, a: Interval, b: Interval) -> Interval:
        found = [function(x, y) for x in a for y in b]
        return min(found), max(found)

    return rule


def _div(eqn: Any, a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 or a[0] < 0:
        return ANY
    return a[0] // b[1], a[1] // b[0]


def _rem(eqn: Any, a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 or a[0] < 0:
        return ANY
    return a if a[1] < b[0] else (0, min(a[1], b[1] - 1))


def _called(eqn: Any, *args: Interval) -> list[Interval]:
    return of_jaxpr(eqn.params[jaxlink.CALLED[eqn.primitive]], args)


_RULES: dict[Any, Callable[..., Any]] = {
    lax.add_p: _corners(lambda x, y: x + y),
    lax.sub_p: _corners(lambda x, y: x - y),
    lax.mul_p: _corners(lambda x, y: x * y),
    lax.min_p: _corners(min),
    lax.max_p: _corners(max),
    lax.div_p: _div,
    lax.rem_p: _rem,
    lax.convert_element_type_p: lambda eqn, a: a,
    lax.clamp_p: lambda eqn, low, x, high: (max(low[0], min(x[0], high[0])), min(max(x[1], low[1]), high[1])),
    lax.select_n_p: lambda eqn, which, *cases: (min(c[0] for c in cases), max(c[1] for c in cases)),
    lax.sign_p: lambda eqn, a: ((a[0] > 0) - (a[0] < 0), (a[1] > 0) - (a[1] < 0)),
    **dict.fromkeys(jaxlink.CALLED, _called),
}


def of_jaxpr(jaxpr: Any, args: Sequence[Interval]) -> list[Interval]:
    """The intervals of a jaxpr's results, from those of its arguments."""
    env: dict[Any, Interval] = dict(zip(jaxpr.invars, args))

    def read(v: Any) -> Interval:
        if isinstance(v, jaxlink.Literal):
            return (int(v.val), int(v.val)) if getattr(v.aval, "shape", ()) == () else ANY
        return env.get(v, ANY)

    for eqn in jaxpr.eqns:
        rule = _RULES.get(eqn.primitive)
        if rule is None:
            continue
        found = rule(eqn, *map(read, eqn.invars))
        for v, interval in zip(eqn.outvars, found if isinstance(found, list) else [found]):
            low, high = interval
            env[v] = interval if ANY[0] <= low and high <= ANY[1] else ANY  # else it may have wrapped round
    return [read(v) for v in jaxpr.outvars]


def of_results(index_map: Any, grid: Sequence[int | None]) -> list[Interval]:
    """The intervals of an index map's results over a grid; scalar-prefetch values may be anything."""
    ids = [(0, n - 1) if n else ANY if n is None else (0, 0) for n in grid]
    return of_jaxpr(index_map, [*ids, *[ANY] * (len(index_map.invars) - len(ids))])
