"""Reductions, cumulative operations, argmax, and sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import convert, is_narrow_float
from palladion.compiler.cpu.lower.shapes import from_index, transpose
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, as_index, derived, of_buffer, op


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
                e = ir.Reduce(wide, name, variables[d], x.shape[d], start, e, ctx.here)
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
            block = (ir.For(variables[d], shape[d], block, ordered=True, where=ctx.here),)
        for s in block:
            ctx.emit(s)

    if 0 not in shape:
        ctx.loops([shape[d] for d in kept], body)
    return [of_buffer(o) for o in outs]


# --- argmax, argmin -------------------------------------------------------------------------------------------------
def _arg_reduction(extreme: str) -> Callable:
    """The index of the extreme element, the first of equals; NaN beats everything, as in XLA.

    Two reductions, each in vectors: the extreme, which is NaN if any element is, then the least index of an element
    that equals it or is NaN.
    """

    def rule(ctx: Lowering, eqn, x: Lazy) -> Lazy:
        (axis,) = eqn.params["axes"]
        dtype, n = jnp.dtype(eqn.params["index_dtype"]), x.shape[axis]
        ctx.keep(x)
        wide = jnp.dtype(jnp.float32) if is_narrow_float(x.dtype) else x.dtype
        best = reduce_axes(ctx, extreme, derived(x.shape, wide, [x], lambda i: convert(x.at(i), wide), 1), [axis], wide)

        def at(index):
            value = convert(x.at(index), wide)
            wins = op("eq", np.bool_, value, best.at((*index[:axis], *index[axis + 1 :])))
            if jnp.issubdtype(wide, jnp.floating):
                wins = op("or", np.bool_, wins, op("ne", np.bool_, value, value))
            return op("select", np.int32, wins, from_index(index[axis], np.int32), ir.Const(jnp.dtype(np.int32), n - 1))

        where = reduce_axes(ctx, "min", derived(x.shape, np.int32, [x, best], at, 4), [axis], np.int32)
        return derived(where.shape, dtype, [where], lambda index: convert(where.at(index), dtype), 1)

    return rule


RULES.rule(lax.argmax_p)(_arg_reduction("max"))
RULES.rule(lax.argmin_p)(_arg_reduction("min"))


# --- cumulative -----------------------------------------------------------------------------------------------------
def _cumulative(name: str) -> Callable:
    """Running results; narrow floats are accumulated in f32, as in reductions."""

    def rule(ctx: Lowering, eqn, x: Lazy) -> Lazy:
        axis, backwards = eqn.params["axis"], eqn.params["reverse"]
        n, before, after = x.shape[axis], x.shape[:axis], x.shape[axis + 1 :]
        wide = jnp.dtype(jnp.float32) if is_narrow_float(x.dtype) else x.dtype
        out = ir.temp(x.shape, wide, "cum")

        def place(outer, r, inner):
            return (*outer, ir.add(ir.mul(r, -1), n - 1) if backwards else r, *inner)

        def along(outer):
            r = ir.new_var("r") if n > 1 else ir.index(0)
            index = place(outer, r, tuple(ir.index(0) for _ in after))
            value = convert(x.at(index), wide)
            if isinstance(r, ir.Var):
                ctx.emit(ir.Scan(name, r, n, _before_all(name, wide), out, index, value, ctx.here))
            else:
                ctx.emit(ir.Store(out, index, value))

        def across(outer):
            """Row by row: each is the one before it, combined with the row of x."""

            def row(r, last=None):
                def one(inner):
                    value = convert(x.at(place(outer, r, inner)), wide)
                    if last is not None:
                        value = op(name, wide, ir.Load(wide, out, place(outer, last, inner)), value)
                    ctx.emit(ir.Store(out, place(outer, r, inner), value))

                ctx.loops(after, one)

            row(ir.index(0))
            if n > 1:
                r = ir.new_var("r")
                with ctx.nested() as body:
                    row(ir.add(r, 1), r)
                ctx.emit(ir.For(r, n - 1, tuple(body), ordered=True, where=ctx.here))

        if 0 not in x.shape:
            ctx.loops(before, along if all(m == 1 for m in after) else across)
        result = of_buffer(out)
        if wide == x.dtype:
            return result
        return derived(x.shape, x.dtype, [result], lambda index: convert(result.at(index), x.dtype), 1)

    return rule


def _before_all(name: str, dtype: Any) -> Any:
    """What changes nothing when combined with a value, not even the sign of a zero."""
    if name == "logaddexp":
        return -np.inf
    return -0.0 if name == "add" and jnp.issubdtype(dtype, jnp.floating) else identity(name, dtype)


for _primitive, _name in {
    lax.cumsum_p: "add",
    lax.cumprod_p: "mul",
    lax.cummax_p: "max",
    lax.cummin_p: "min",
    lax.cumlogsumexp_p: "logaddexp",
}.items():
    RULES.rule(_primitive)(_cumulative(_name))


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
    axis, k = eqn.params.get("axis", -1) % len(x.shape), eqn.params["k"]
    if 0 < k <= _FEW and x.size and (is_narrow_float(x.dtype) or x.dtype in _KEYED):
        return _top_few(ctx, x, axis, k)
    numbers = Lazy(x.shape, np.int32, lambda index: from_index(index[axis], np.int32), cost=1)
    sorted_values, where = sort_rows(ctx, [x, numbers], axis, 1, descending=True)

    def head(v: Lazy) -> Lazy:
        shape = [k if d == axis else n for d, n in enumerate(x.shape)]
        return derived(shape, v.dtype, [v], v.at)

    return [head(sorted_values), head(where)]


_FEW = 16  # up to so many elements are found one after the other instead of sorting all
_KEYED = tuple(map(jnp.dtype, (jnp.float32, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)))
_INT32 = jnp.dtype(jnp.int32)


def _key(e: ir.Expr) -> ir.Expr:
    """An int32 above the lowest one, in the order of the values: zeros are equal, NaN is above everything."""
    if not jnp.issubdtype(e.dtype, jnp.floating):
        return convert(e, _INT32)
    value = convert(e, jnp.float32)
    zero = ir.Const(jnp.dtype(jnp.float32), 0.0)
    bits = op("bitcast", _INT32, op("add", jnp.float32, value, zero))  # -0 + 0 is 0
    flipped = op("xor", _INT32, bits, ir.Const(_INT32, 0x7FFFFFFF))  # negative numbers: the larger, the smaller
    negative = op("lt", np.bool_, bits, ir.Const(_INT32, 0))
    key = op("select", _INT32, negative, flipped, bits)
    return op("select", _INT32, op("ne", np.bool_, value, value), ir.Const(_INT32, 2**31 - 1), key)


def _top_few(ctx: Lowering, x: Lazy, axis: int, k: int) -> list[Lazy]:
    """The largest of each row, k times, each time without those found before; the first of equals."""
    order = [*(d for d in range(len(x.shape)) if d != axis), axis]
    rows = transpose(x, order)
    ctx.keep(rows)
    (*outer, n), lowest = rows.shape, ir.Const(_INT32, -(2**31))
    keys = ir.temp(rows.shape, _INT32, "keys")
    best, values, where = ir.temp(outer, _INT32, "best"), ir.temp((*outer, k), x.dtype), ir.temp((*outer, k), _INT32)
    ctx.fill(keys, derived(rows.shape, _INT32, [rows], lambda index: _key(rows.at(index)), 5))

    def one(index):
        t, r, s = ir.new_var(), ir.new_var("r"), ir.new_var("r")
        top, last = ir.Load(_INT32, best, index), ir.Const(_INT32, n - 1)
        found = op("eq", np.bool_, ir.Load(_INT32, keys, (*index, s)), top)
        first = op("select", _INT32, found, from_index(s, np.int32), last)
        place = as_index(ir.Load(_INT32, where, (*index, t)))
        body = (
            ir.Store(best, index, ir.Reduce(_INT32, "max", r, n, lowest.value, ir.Load(_INT32, keys, (*index, r)))),
            ir.Store(where, (*index, t), ir.Reduce(_INT32, "min", s, n, 2**31 - 1, first)),
            ir.Store(values, (*index, t), rows.at((*index, place))),
            ir.Store(keys, (*index, place), lowest),
        )
        ctx.emit(ir.For(t, k, body, ordered=True, where=ctx.here))

    ctx.loops(outer, one)
    inverse = [int(i) for i in np.argsort(order)]
    return [transpose(of_buffer(b), inverse) for b in (values, where)]
