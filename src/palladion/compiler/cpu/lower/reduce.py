"""Reductions, cumulative operations, argmax, and sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import convert, is_narrow_float, scalar_op
from palladion.compiler.cpu.lower.shapes import from_index, transpose
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, derived, of_buffer, op


def identity(name: str, dtype: Any) -> Any:
    """The value that a reduction starts from."""
    dtype = jnp.dtype(dtype)
    if name in ("add", "or", "xor"):
        return False if dtype == np.bool_ else 0
    if name == "mul":
        return 1
    if name == "and":
        return True if dtype == np.bool_ else -1 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    low = name == "max"
    if dtype == np.bool_:
        return not low
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if low else np.inf
    return int(jnp.iinfo(dtype).min if low else jnp.iinfo(dtype).max)


def _reduction(name: str) -> Callable:
    def rule(ctx: Lowering, eqn, x: Lazy) -> Lazy:
        axes = eqn.params["axes"]
        return reduce_axes(ctx, name, x, axes, eqn.outvars[0].aval.dtype)

    return rule


def reduce_axes(ctx: Lowering, name: str, x: Lazy, axes, dtype: Any) -> Lazy:
    """Combine the elements along some axes; narrow floats are accumulated in f32 and rounded once."""
    axes = sorted(axes)
    kept = [d for d in range(len(x.shape)) if d not in axes]
    wide = jnp.dtype(jnp.float32) if is_narrow_float(x.dtype) else x.dtype
    start = identity(name, wide)

    def at(index):
        place: dict[int, ir.Expr] = dict(zip(kept, index))
        variables = {d: ir.new_var("r") for d in axes}
        place.update({d: ir.index(0) if x.shape[d] == 1 else variables[d] for d in axes})
        e = convert(x.at(tuple(place[d] for d in range(len(x.shape)))), wide)
        for d in reversed(axes):
            if x.shape[d] != 1:
                e = ir.Reduce(wide, name, variables[d], x.shape[d], start, e)
        return convert(e, dtype)

    if any(x.shape[d] == 0 for d in axes):
        node = ir.Const(wide, start)
        return Lazy([x.shape[d] for d in kept], dtype, lambda index: convert(node, dtype))
    value = derived([x.shape[d] for d in kept], dtype, [x], at, 100)
    ctx.materialise(value, name)
    return value


for _primitive, _name in {
    lax.reduce_sum_p: "add",
    lax.reduce_prod_p: "mul",
    lax.reduce_max_p: "max",
    lax.reduce_min_p: "min",
    lax.reduce_and_p: "and",
    lax.reduce_or_p: "or",
    lax.reduce_xor_p: "xor",
}.items():
    RULES.rule(_primitive)(_reduction(_name))


@RULES.rule(lax.reduce_p)
def _reduce_any(ctx: Lowering, eqn, *operands: Lazy) -> list[Lazy]:
    """A reduction by a function of the user's, one element after the other."""
    n = len(operands) // 2
    values, inits = operands[:n], operands[n:]
    axes, jaxpr = eqn.params["dimensions"], eqn.params["jaxpr"]
    for v in values:
        ctx.keep(v)
    shape = values[0].shape
    kept = [d for d in range(len(shape)) if d not in axes]
    outs = [ir.temp([shape[d] for d in kept], v.dtype, "reduced") for v in values]
    for out, init in zip(outs, inits):
        first = ctx.scalar(init)
        ctx.fill(out, Lazy(out.shape, out.dtype, lambda index, e=first: e))

    def body(index):
        variables = {d: ir.new_var("r") for d in axes}
        rest = iter(index)
        place = tuple(variables[d] if d in variables else next(rest) for d in range(len(shape)))
        with ctx.nested() as inner:
            held = [Lazy((), o.dtype, lambda _, o=o: ir.Load(o.dtype, o, index), cost=1) for o in outs]
            fresh = [Lazy((), v.dtype, lambda _, v=v: v.at(place), cost=v.cost) for v in values]
            for out, new in zip(outs, [ctx.scalar(x) for x in ctx.run(jaxpr, [*held, *fresh])]):
                ctx.emit(ir.Store(out, index, new))
        block = tuple(inner)
        for d in reversed(axes):
            block = (ir.For(variables[d], shape[d], block, ordered=True),)
        for s in block:
            ctx.emit(s)

    if 0 not in shape:
        ctx.loops([shape[d] for d in kept], body)
    return [of_buffer(o) for o in outs]


# --- argmax, argmin -------------------------------------------------------------------------------------------------
def _arg_reduction(beats: str) -> Callable:
    """The index of the extreme element, the first of equals; NaN beats everything, as in XLA."""

    def rule(ctx: Lowering, eqn, x: Lazy) -> Lazy:
        (axis,) = eqn.params["axes"]
        dtype, n = eqn.params["index_dtype"], x.shape[axis]
        ctx.keep(x)
        shape = tuple(m for d, m in enumerate(x.shape) if d != axis)
        best, where = ir.temp(shape, x.dtype, "best"), ir.temp(shape, dtype, "where")

        def element(index, r):
            return x.at((*index[:axis], r, *index[axis:]))

        def body(index):
            ctx.emit(ir.Store(best, index, element(index, ir.index(0))))
            ctx.emit(ir.Store(where, index, ir.Const(jnp.dtype(dtype), 0)))
            if n == 1:
                return
            r = ir.new_var("r")
            here = ir.add(r, 1)
            value, top = element(index, here), ir.Load(x.dtype, best, index)
            wins = scalar_op(beats, np.bool_, value, top)
            if jnp.issubdtype(x.dtype, jnp.floating):
                nan, has_nan = (scalar_op("ne", np.bool_, v, v) for v in (value, top))
                wins = op("or", np.bool_, wins, op("and", np.bool_, nan, op("not", np.bool_, has_nan)))
            kept = ir.Load(where.dtype, where, index)
            stores = (
                ir.Store(where, index, op("select", dtype, wins, from_index(here, dtype), kept)),
                ir.Store(best, index, op("select", x.dtype, wins, value, top)),
            )
            ctx.emit(ir.For(r, n - 1, stores, ordered=True))

        ctx.loops(shape, body)
        return of_buffer(where)

    return rule


RULES.rule(lax.argmax_p)(_arg_reduction("gt"))
RULES.rule(lax.argmin_p)(_arg_reduction("lt"))


# --- cumulative -----------------------------------------------------------------------------------------------------
def _combine_logsumexp(dtype: Any, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    top = scalar_op("max", dtype, a, b)
    safe = scalar_op("select", dtype, scalar_op("is_finite", np.bool_, top), top, ir.Const(jnp.dtype(dtype), 0.0))
    total = scalar_op("add", dtype, *(scalar_op("exp", dtype, scalar_op("sub", dtype, v, safe)) for v in (a, b)))
    return scalar_op("add", dtype, scalar_op("log", dtype, total), safe)


def _cumulative(combine: Callable[[Any, ir.Expr, ir.Expr], ir.Expr]) -> Callable:
    def rule(ctx: Lowering, eqn, x: Lazy) -> Lazy:
        axis, backwards = eqn.params["axis"], eqn.params["reverse"]
        n = x.shape[axis]
        out = ir.temp(x.shape, x.dtype, "cum")
        if 0 in x.shape:
            return of_buffer(out)
        before, after = x.shape[:axis], x.shape[axis + 1 :]

        def line(outer):
            def at(r):
                return ir.add(ir.mul(r, -1), n - 1) if backwards else r

            def first(inner):
                place = (*outer, at(ir.index(0)), *inner)
                ctx.emit(ir.Store(out, place, x.at(place)))

            def following(r):
                def one(inner):
                    place, last = (*outer, at(ir.add(r, 1)), *inner), (*outer, at(r), *inner)
                    value = combine(x.dtype, ir.Load(x.dtype, out, last), x.at(place))
                    ctx.emit(ir.Store(out, place, value))

                return one

            ctx.loops(after, first)
            if n > 1:
                r = ir.new_var("r")
                with ctx.nested() as body:
                    ctx.loops(after, following(r))
                ctx.emit(ir.For(r, n - 1, tuple(body), ordered=True))

        ctx.loops(before, line)
        return of_buffer(out)

    return rule


for _primitive, _name in {
    lax.cumsum_p: "add",
    lax.cumprod_p: "mul",
    lax.cummax_p: "max",
    lax.cummin_p: "min",
}.items():
    RULES.rule(_primitive)(_cumulative(lambda dtype, a, b, name=_name: scalar_op(name, dtype, a, b)))
RULES.rule(lax.cumlogsumexp_p)(_cumulative(_combine_logsumexp))


# --- sorting --------------------------------------------------------------------------------------------------------
def sort_rows(ctx: Lowering, values: list[Lazy], axis: int, keys: int, descending: bool = False) -> list[Lazy]:
    """Sort arrays of one shape in step along an axis by the first `keys` of them, stably."""
    order = [*(d for d in range(len(values[0].shape)) if d != axis), axis]
    bufs, spare = [], []
    for v in values:
        rows = transpose(v, order)
        for group, name in ((bufs, "sorted"), (spare, "spare")):
            group.append(ir.temp(rows.shape, rows.dtype, name))
        ctx.fill(bufs[-1], rows)
    if values[0].size:
        ctx.emit(ir.Sort(tuple(bufs), tuple(spare), keys, descending))
    inverse = [int(i) for i in np.argsort(order)]
    return [transpose(of_buffer(b), inverse) for b in bufs]


@RULES.rule(lax.sort_p)
def _sort(ctx: Lowering, eqn, *values: Lazy) -> list[Lazy]:
    return sort_rows(ctx, list(values), eqn.params["dimension"], eqn.params["num_keys"])


@RULES.rule(lax.top_k_p)
def _top_k(ctx: Lowering, eqn, x: Lazy) -> list[Lazy]:
    axis = eqn.params.get("axis", -1) % len(x.shape)
    numbers = Lazy(x.shape, np.int32, lambda index: from_index(index[axis], np.int32), cost=1)
    sorted_values, where = sort_rows(ctx, [x, numbers], axis, 1, descending=True)

    def head(v: Lazy) -> Lazy:
        shape = [eqn.params["k"] if d == axis else n for d, n in enumerate(x.shape)]
        return derived(shape, v.dtype, [v], v.at)

    return [head(sorted_values), head(where)]
