"""Gather and scatter, as `jnp` indexing makes them.

Indices outside the operand follow the mode of the operation: clamped, or (FILL_OR_DROP) filled and dropped. Memory
outside the operand is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import scalar_op
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, as_index, derived, of_array, of_buffer

_BOOL = np.dtype(np.bool_)


def _both(a: ir.Expr | None, b: ir.Expr) -> ir.Expr:
    return b if a is None else ir.Op(_BOOL, "and", (a, b))


def _place(rank: int, batching: Iterable, starts: dict, window: Iterable) -> tuple[ir.Expr, ...]:
    """The operand element of a gather or scatter: batch indices, starts, and the offsets of the window from there."""
    place: list[ir.Expr] = [ir.index(0)] * rank
    for d, e in (*batching, *starts.items()):
        place[d] = e
    for d, e in window:
        place[d] = ir.add(place[d], e)
    return tuple(place)


def _starts(indices: Lazy, batch: tuple, index_map, limits: dict[int, int]):
    """Clamped start in each indexed operand dimension, and whether all of them fit as they are."""
    starts: dict[int, ir.Expr] = {}
    inside: ir.Expr | None = None
    for k, d in enumerate(index_map):
        e = as_index(indices.at((*batch, ir.index(k))))
        high = limits[d]
        starts[d] = ir.Op(ir.INDEX, "clamp", (ir.index(0), e, ir.index(high)))
        for name, bound in (("ge", 0), ("le", high)):
            inside = _both(inside, ir.Op(_BOOL, name, (e, ir.index(bound))))
    return starts, inside


def _fill(dtype: Any, value: Any) -> ir.Const:
    dtype = jnp.dtype(dtype)
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif dtype == _BOOL:
            value = True
        else:
            value = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    return ir.Const(dtype, np.asarray(value).astype(dtype).item())


@RULES.rule(lax.gather_p)
def _gather(ctx: Lowering, eqn, x: Lazy, indices: Lazy) -> Lazy:
    p, out = eqn.params, eqn.outvars[0].aval
    dn, sizes = p["dimension_numbers"], p["slice_sizes"]
    for v in (indices, x):
        ctx.keep(v)
    batch_dims = [d for d in range(len(out.shape)) if d not in dn.offset_dims]
    hidden = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    offset_dims = [d for d in range(len(x.shape)) if d not in hidden]
    limits = {d: x.shape[d] - sizes[d] for d in range(len(x.shape))}
    fills = p["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    fill = _fill(out.dtype, p["fill_value"])

    def at(index):
        batch = tuple(index[d] for d in batch_dims)
        starts, inside = _starts(indices, batch, dn.start_index_map, limits)
        batching = zip(dn.operand_batching_dims, (batch[b] for b in dn.start_indices_batching_dims))
        window = zip(offset_dims, (index[o] for o in dn.offset_dims))
        value = x.at(_place(len(x.shape), batching, starts, window))
        return ir.Op(value.dtype, "select", (inside, value, fill)) if fills and inside is not None else value

    return derived(out.shape, out.dtype, [x, indices], at, 3)


def _scatter(combine: str | None):
    def rule(ctx: Lowering, eqn, x: Lazy, indices: Lazy, updates: Lazy) -> Lazy:
        p = eqn.params
        dn = p["dimension_numbers"]
        for v in (indices, updates):
            ctx.keep(v)
        buf = ir.temp(x.shape, x.dtype, "scattered")
        ctx.fill(buf, x)
        window = dn.update_window_dims
        batch_dims = [d for d in range(len(updates.shape)) if d not in window]
        hidden = (*dn.inserted_window_dims, *dn.operand_batching_dims)
        window_dims = [d for d in range(len(x.shape)) if d not in hidden]
        extent = {d: updates.shape[w] for d, w in zip(window_dims, window)}
        limits = {d: x.shape[d] - extent.get(d, 1) for d in range(len(x.shape))}
        clips = p["mode"] == lax.GatherScatterMode.CLIP

        def one(index):
            batch = tuple(index[d] for d in batch_dims)
            starts, inside = _starts(indices, batch, dn.scatter_dims_to_operand_dims, limits)
            batching = zip(dn.operand_batching_dims, (batch[b] for b in dn.scatter_indices_batching_dims))
            offsets = zip(window_dims, (index[w] for w in window))
            place = _place(len(x.shape), batching, starts, offsets)
            value = updates.at(index)
            old = ir.Load(x.dtype, buf, place)
            if combine is not None:
                value = scalar_op(combine, x.dtype, old, value)
            elif p["update_jaxpr"] is not None:
                value = _applied(ctx, p["update_jaxpr"], p["update_consts"], old, value)
            store = ir.Store(buf, place, value)
            if clips or inside is None:
                ctx.emit(store)
            else:
                ctx.emit(ir.If(ir.Op(ir.INDEX, "convert", (inside,)), ((), (store,))))

        order = [*batch_dims, *window]
        shape = [updates.shape[d] for d in order]
        back = [order.index(d) for d in range(len(order))]
        with ctx.nested() as block:
            ctx.loops(shape, lambda index: one(tuple(index[b] for b in back)))
        for s in block:
            ctx.emit(_in_order(s))
        return of_buffer(buf)

    return rule


def _applied(ctx: Lowering, jaxpr: Any, consts: Any, old: ir.Expr, new: ir.Expr) -> ir.Expr:
    """What a user's function (`x.at[i].apply(f)`) makes of an element and its update."""
    values = [Lazy((), e.dtype, lambda _, e=e: e, cost=1) for e in (old, new)]
    (result,) = ctx.run(jaxpr, [*map(of_array, consts), *values])
    return ctx.scalar(result)


def _in_order(s: ir.Stmt) -> ir.Stmt:
    """Repeated indices count one after the other, so these loops are not vectorised."""
    if isinstance(s, ir.For):
        return ir.For(s.var, s.extent, tuple(map(_in_order, s.body)), ordered=True, where=s.where)
    return s


for _primitive, _name in {
    lax.scatter_p: None,
    lax.scatter_add_p: "add",
    lax.scatter_sub_p: "sub",
    lax.scatter_mul_p: "mul",
    lax.scatter_min_p: "min",
    lax.scatter_max_p: "max",
}.items():
    RULES.rule(_primitive)(_scatter(_name))
