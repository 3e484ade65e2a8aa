"""Reductions over sliding windows (pooling), and the approximate top-k, which is exact here.

A window is a few more dimensions behind those of the result: the elements of each window are a value of that larger
shape, with the start value of the reduction where a window hangs over the edge or falls between dilated elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from jax import lax

from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower import reduce
from palladion.compiler.cpu.lower.elementwise import as_number
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, derived

_BOOL = np.dtype(np.bool_)


def _windows(ctx: Lowering, eqn, x: Lazy, outside: Any) -> Lazy:
    """The elements of every window: dimensions of the result, then of the window."""
    p, shape = eqn.params, eqn.outvars[0].aval.shape
    ctx.keep(x)
    rank = len(shape)

    def at(index):
        inside: ir.Expr = ir.Const(_BOOL, True)
        place = []
        for d, (out, tap) in enumerate(zip(index[:rank], index[rank:])):
            n, gap = x.shape[d], p["base_dilation"][d]
            position = ir.add(ir.mul(out, p["window_strides"][d]), -p["padding"][d][0])
            position = ir.add(position, ir.mul(tap, p["window_dilation"][d]))
            highest = (n - 1) * gap
            for name, bound in (("ge", 0), ("le", highest)):
                inside = _both(inside, ir.Op(_BOOL, name, (position, ir.index(bound))))
            position = ir.Op(ir.INDEX, "clamp", (ir.index(0), position, ir.index(max(highest, 0))))
            if gap > 1:
                between = ir.Op(ir.INDEX, "rem", (position, ir.index(gap)))
                inside = _both(inside, ir.Op(_BOOL, "eq", (between, ir.index(0))))
                position = ir.Op(ir.INDEX, "div", (position, ir.index(gap)))
            place.append(position)
        return ir.Op(x.dtype, "select", (inside, x.at(tuple(place)), outside))

    return derived((*shape, *p["window_dimensions"]), x.dtype, [x], at, 4)


def _both(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    return b if isinstance(a, ir.Const) else ir.Op(_BOOL, "and", (a, b))


def _reduction(name: str) -> Callable:
    def rule(ctx: Lowering, eqn, x: Lazy) -> Lazy:
        aval = eqn.outvars[0].aval
        if 0 in x.shape:
            return Lazy(aval.shape, aval.dtype, lambda _: _start(name, aval.dtype))
        values = _windows(ctx, eqn, x, _start(name, x.dtype))
        return reduce.reduce_axes(ctx, name, values, range(len(aval.shape), len(values.shape)), aval.dtype)

    return rule


def _start(name: str, dtype: Any) -> ir.Const:
    return ir.Const(np.dtype(dtype), reduce.identity(name, dtype))


for _primitive, _name in {
    lax.reduce_window_sum_p: "add",
    lax.reduce_window_max_p: "max",
    lax.reduce_window_min_p: "min",
}.items():
    RULES.rule(_primitive)(_reduction(_name))


@RULES.rule(lax.reduce_window_p)
def _reduce_window(ctx: Lowering, eqn, *operands: Lazy) -> list[Lazy]:
    """By a function of the user's, one element after the other."""
    n = len(operands) // 2
    if any(0 in x.shape for x in operands[:n]) or eqn.params["consts"]:
        raise RULES.unsupported(eqn)
    rank = len(eqn.outvars[0].aval.shape)
    inits = [ctx.scalar(x) for x in operands[n:]]
    values = [_windows(ctx, eqn, x, start) for x, start in zip(operands[:n], inits)]
    axes: Sequence[int] = range(rank, 2 * rank)
    params = dict(dimensions=tuple(axes), jaxpr=eqn.params["jaxpr"])
    starts = [Lazy((), x.dtype, lambda _, e=e: e) for x, e in zip(values, inits)]
    return RULES.get(lax.reduce_p)(ctx, SimpleNamespace(params=params), *values, *starts)  # pyright: ignore[reportOptionalCall]


@RULES.rule(lax.approx_top_k_p)
def _approx_top_k(ctx: Lowering, eqn, x: Lazy) -> list[Lazy]:
    p = eqn.params
    axis = p["reduction_dimension"] % len(x.shape)
    shapes = [v.aval.shape for v in eqn.outvars]
    if shapes[0][axis] != p["k"]:
        raise RULES.unsupported(eqn)  # aggregate_to_topk=False: as many as the machine finds useful
    numbers = Lazy(x.shape, np.int32, lambda index: as_number(index[axis]), cost=1)
    ordered = reduce.sort_rows(ctx, [x, numbers], axis, 1, descending=p["is_max_k"])
    return [derived(shape, v.dtype, [v], v.at) for v, shape in zip(ordered, shapes)]
