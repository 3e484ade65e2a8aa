"""Primitives that move elements without computing: broadcasts, reshapes, slices, concatenation, padding, iota.

Most become index arithmetic on a Lazy. What would need a choice for every element (concatenate, pad, updates of
slices) is written piece by piece into a temporary instead, so that each piece is a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import convert
from palladion.compiler.cpu.lower.values import (
    RULES,
    Affine,
    Index,
    Lazy,
    Lowering,
    as_index,
    clamp_index,
    derived,
    of_buffer,
    of_const,
)


@RULES.rule(lax.broadcast_in_dim_p)
def _broadcast_in_dim(ctx: Lowering, eqn, x: Lazy, *_) -> Lazy:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def at(index):
        return x.at(tuple(ir.index(0) if n == 1 else index[d] for d, n in zip(dims, x.shape)))

    affine = None
    if x.affine is not None:
        strides = [0] * len(shape)
        for d, n, s in zip(dims, x.shape, x.affine.strides):
            strides[d] = 0 if n == 1 and shape[d] != 1 else s
        affine = Affine(x.affine.buf, x.affine.base, tuple(strides))
    if x.cost > 1 and math.prod(shape) > x.size:
        ctx.materialise(x)
    return derived(shape, x.dtype, [x], at, affine=affine)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [d for d, n in enumerate(shape) if n != 1]


@RULES.rule(lax.reshape_p)
def _reshape(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    return reshape(ctx, x, eqn.params["new_sizes"])


@RULES.rule(lax.squeeze_p)
def _squeeze(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    return reshape(ctx, x, eqn.outvars[0].aval.shape)


def reshape(ctx: Lowering, x: Lazy, shape: Sequence[int]) -> Lazy:
    """The same elements in row-major order under another shape."""
    shape = tuple(shape)
    if shape == x.shape:
        return x
    old, new = _without_ones(x.shape), _without_ones(shape)
    if [x.shape[d] for d in old] == [shape[d] for d in new]:  # only dimensions of one come or go
        place = dict(zip(old, new))

        def at(index):
            return x.at(tuple(index[place[d]] if d in place else ir.index(0) for d in range(len(x.shape))))

        affine = None
        if x.affine is not None:
            strides = [0] * len(shape)
            for d, e in place.items():
                strides[e] = x.affine.strides[d]
            affine = Affine(x.affine.buf, x.affine.base, tuple(strides))
        return derived(shape, x.dtype, [x], at, affine=affine)
    if (split := _split(x.shape, shape)) is not None:

        def at_split(index):
            parts = []
            for group in split:
                i: ir.Expr = ir.index(0)
                for d in group:
                    i = ir.add(ir.mul(i, shape[d]), index[d])
                parts.append(i)
            return x.at(tuple(parts))

        return derived(shape, x.dtype, [x], at_split)
    buf = ctx.materialise(x)
    if buf.strides != ir.row_major(buf.shape):  # a window with gaps: copy it
        copy = ir.temp(x.shape, x.dtype)
        ctx.fill(copy, of_buffer(buf))
        buf = copy
    again = ir.Buf(buf.name, shape, buf.dtype, ir.row_major(shape), buf.kind, buf.memory, buf.root or buf)
    return of_buffer(again)


def _split(old: Sequence[int], new: Sequence[int]) -> list[list[int]] | None:
    """For each old dimension, the new ones that it is cut into; None if any are merged."""
    groups: list[list[int]] = []
    d = 0
    for n in old:
        group: list[int] = []
        size = 1
        while d < len(new) and (size < n or (size == n and new[d] == 1 and not group)):
            size *= new[d]
            group.append(d)
            d += 1
        if size != n:
            return None
        groups.append(group)
    if d < len(new):
        if not groups or any(new[k] != 1 for k in range(d, len(new))):
            return None
        groups[-1] += range(d, len(new))
    return groups


@RULES.rule(lax.transpose_p)
def _transpose(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    return transpose(x, eqn.params["permutation"])


def transpose(x: Lazy, permutation: Sequence[int]) -> Lazy:
    """Dimensions in another order."""
    inverse = [int(p) for p in np.argsort(permutation)]

    def at(index):
        return x.at(tuple(index[p] for p in inverse))

    affine = None
    if x.affine is not None:
        affine = Affine(x.affine.buf, x.affine.base, tuple(x.affine.strides[p] for p in permutation))
    return derived([x.shape[p] for p in permutation], x.dtype, [x], at, affine=affine)


def window(x: Lazy, starts: Sequence[ir.Expr], sizes: Sequence[int], strides: Sequence[int]) -> Lazy:
    """x[start : start + size * stride : stride] in each dimension; starts are indices that fit."""

    def place(index: Index) -> Index:
        return tuple(ir.add(ir.mul(i, s), b) for i, s, b in zip(index, strides, starts))

    affine = None
    if x.affine is not None and x.affine.strides == x.affine.buf.strides and len(x.affine.base) == len(starts):
        base = tuple(ir.add(b, s) for b, s in zip(x.affine.base, starts))
        affine = Affine(x.affine.buf, base, tuple(s * t for s, t in zip(x.affine.strides, strides)))
    return derived(sizes, x.dtype, [x], lambda index: x.at(place(index)), affine=affine)


@RULES.rule(lax.slice_p)
def _slice(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    starts = [ir.index(s) for s in eqn.params["start_indices"]]
    return window(x, starts, eqn.outvars[0].aval.shape, eqn.params["strides"] or (1,) * len(starts))


@RULES.rule(lax.dynamic_slice_p)
def _dynamic_slice(ctx: Lowering, eqn, x: Lazy, *starts: Lazy) -> Lazy:
    sizes = eqn.params["slice_sizes"]
    at = [clamp_index(as_index(ctx.scalar(s)), 0, n - k) for s, n, k in zip(starts, x.shape, sizes)]
    return window(x, at, sizes, (1,) * len(sizes))


@RULES.rule(lax.dynamic_update_slice_p)
def _dynamic_update_slice(ctx: Lowering, eqn, x: Lazy, update: Lazy, *starts: Lazy) -> Lazy:
    at = [clamp_index(as_index(ctx.scalar(s)), 0, n - k) for s, n, k in zip(starts, x.shape, update.shape)]
    buf = ir.temp(x.shape, x.dtype)
    ctx.fill(buf, x)
    ctx.store(buf, update.shape, lambda index: tuple(map(ir.add, index, at)), update)
    return of_buffer(buf)


@RULES.rule(lax.rev_p)
def _rev(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    dims = eqn.params["dimensions"]

    def at(index):
        flipped = [ir.add(ir.mul(i, -1), n - 1) if d in dims else i for d, (i, n) in enumerate(zip(index, x.shape))]
        return x.at(tuple(flipped))

    return derived(x.shape, x.dtype, [x], at)


@RULES.rule(lax.concatenate_p)
def _concatenate(ctx: Lowering, eqn, *parts: Lazy) -> Lazy:
    d, start = eqn.params["dimension"], 0
    buf = ir.temp(eqn.outvars[0].aval.shape, parts[0].dtype)
    for part in parts:
        offset = start
        ctx.store(buf, part.shape, lambda index, o=offset: (*index[:d], ir.add(index[d], o), *index[d + 1 :]), part)
        start += part.shape[d]
    return of_buffer(buf)


@RULES.rule(lax.stack_p)
def _stack(ctx: Lowering, eqn, *parts: Lazy) -> Lazy:
    d = eqn.params["axis"] % len(eqn.outvars[0].aval.shape)
    buf = ir.temp(eqn.outvars[0].aval.shape, parts[0].dtype)
    for k, part in enumerate(parts):
        ctx.store(buf, part.shape, lambda index, k=k: (*index[:d], ir.index(k), *index[d:]), part)
    return of_buffer(buf)


@RULES.rule(lax.unstack_p)
def _unstack(ctx: Lowering, eqn, x: Lazy) -> list[Lazy]:
    d = eqn.params["axis"] % len(x.shape)
    shape = (*x.shape[:d], *x.shape[d + 1 :])

    def part(k: int) -> Lazy:
        return derived(shape, x.dtype, [x], lambda index: x.at((*index[:d], ir.index(k), *index[d:])))

    return [part(k) for k in range(x.shape[d])]


@RULES.rule(lax.tile_p)
def _tile(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    shape = eqn.outvars[0].aval.shape
    lead = len(shape) - len(x.shape)

    def at(index):
        parts = [
            i if n == m else ir.Op(ir.INDEX, "rem", (i, ir.index(n))) if n != 1 else ir.index(0)
            for i, n, m in zip(index[lead:], x.shape, shape[lead:])
        ]
        return x.at(tuple(ir.index(p.value % n) if isinstance(p, ir.Const) else p for p, n in zip(parts, x.shape)))

    return derived(shape, x.dtype, [x], at, 1)


@RULES.rule(jaxlink.empty_p)
def _empty(ctx: Lowering, eqn) -> Lazy:
    return of_const(0, eqn.params["dtype"], eqn.params["shape"])


@RULES.rule(lax.split_p)
def _split_rule(ctx: Lowering, eqn, x: Lazy) -> list[Lazy]:
    axis, start, parts = eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        starts = [ir.index(start if d == axis else 0) for d in range(len(x.shape))]
        sizes = [size if d == axis else n for d, n in enumerate(x.shape)]
        parts.append(window(x, starts, sizes, (1,) * len(sizes)))
        start += size
    return parts


@RULES.rule(lax.pad_p)
def _pad(ctx: Lowering, eqn, x: Lazy, fill: Lazy) -> Lazy:
    config, shape = eqn.params["padding_config"], eqn.outvars[0].aval.shape
    buf = ir.temp(shape, x.dtype)
    value = ctx.scalar(fill)
    ctx.fill(buf, derived(shape, x.dtype, [fill], lambda index: value))
    first, counts = [], []
    for (low, _, gap), n, m in zip(config, x.shape, shape):
        begin = -(-max(-low, 0) // (gap + 1))  # operand elements cut off at the low end
        last = min(n - 1, (m - 1 - low) // (gap + 1)) if m else -1
        first.append(begin)
        counts.append(max(last - begin + 1, 0))
    inner = window(x, [ir.index(b) for b in first], counts, (1,) * len(counts))

    def place(index):
        return tuple(
            ir.add(ir.mul(i, gap + 1), low + b * (gap + 1)) for i, b, (low, _, gap) in zip(index, first, config)
        )

    ctx.store(buf, counts, place, inner)
    return of_buffer(buf)


@RULES.rule(lax.iota_p)
def _iota(ctx: Lowering, eqn, *_) -> Lazy:
    dtype, d = jnp.dtype(eqn.params["dtype"]), eqn.params["dimension"]
    return Lazy(eqn.params["shape"], dtype, lambda index: from_index(index[d], dtype), cost=1)


def from_index(i: ir.Expr, dtype) -> ir.Expr:
    """An index as a number of some dtype."""
    if isinstance(i, ir.Const):
        return ir.Const(jnp.dtype(dtype), np.asarray(i.value).astype(dtype).item())
    narrow = ir.Op(jnp.dtype("int32"), "convert", (i,))
    return convert(narrow, dtype)
