"""Reductions, their running forms, and the places of extremes.

Mosaic has sums, maxima and minima of floats and 32-bit integers. Products are put together of halves; masks are
reduced as integers.
"""

from __future__ import annotations

import functools
import math as pymath
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from palladion import jaxlink
from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import constant, full, iota, like, reshape, shape_of
from palladion.compiler.tpu.emit import RULES, Emitter, Empty
from palladion.compiler.tpu.kinds import i32, is_bool, is_float, is_unsigned, typed, value_type
from palladion.compiler.tpu.rules_casts import convert
from palladion.compiler.tpu.rules_elementwise import choose, narrowed, widened, widened_type
from palladion.compiler.tpu.rules_shapes import strided


def _limit(dtype: Any, low: bool) -> Any:
    """The lowest or highest number of a dtype, at the width that it is computed in."""
    if is_float(dtype):
        return -np.inf if low else np.inf
    if is_unsigned(dtype):
        return 0 if low else (1 << 32) - 1
    return -(1 << 31) if low else (1 << 31) - 1


_START: dict[str, Callable[[Any], Any]] = {
    "add": lambda dtype: 0,
    "mul": lambda dtype: 1,
    "max": lambda dtype: _limit(dtype, low=True),
    "min": lambda dtype: _limit(dtype, low=False),
}


def _combine(kind: str, dtype: Any) -> Callable:
    floats = {"add": arith.addf, "mul": arith.mulf, "max": arith.maximumf, "min": arith.minimumf}
    signed = {"add": arith.addi, "mul": arith.muli, "max": arith.maxsi, "min": arith.minsi}
    unsigned = {**signed, "max": arith.maxui, "min": arith.minui}
    return (floats if is_float(dtype) else unsigned if is_unsigned(dtype) else signed)[kind]


_KINDS = {
    "add": ("add", "add"),
    "max": ("maximumf", "maxsi"),
    "min": ("minimumf", "minsi"),
}


def reduce(x: ir.Value, dtype: Any, kind: str, axes: Sequence[int]) -> ir.Value:
    """A reduction of a value that `widened` gave."""
    shape = shape_of(x)
    axes = [a for a in axes if shape[a] != 1]
    kept = [n for d, n in enumerate(shape) if d not in axes]
    if not axes:
        return x
    if kind == "mul":
        for axis in axes:
            x = _halved(x, dtype, kind, axis)
        return reshape(x, kept)
    if is_unsigned(dtype) and kind != "add":  # the order of unsigned numbers is that of signed ones, turned round
        turned = arith.xori(x, full(x.type, 1 << 31))
        result = reduce(turned, jnp.dtype("int32"), kind, axes)
        return arith.xori(result, full(result.type, 1 << 31))
    if len(shape) == 1:
        x, axes, shape = reshape(x, (1, *shape)), [1], (1, *shape)
        kept = [1]
    element, wide = build.element_of(x), None
    if isinstance(element, ir.BF16Type):
        wide = arith.extf(like(x, ir.F32Type.get()), x)
        x = wide
    floats, ints = _KINDS[kind]
    name = floats if is_float(dtype) else ints
    whole = not kept
    start = full(typed(kept, build.element_of(x)), _START[kind](dtype))
    result = vector.multi_reduction(build.attr(f"#vector.kind<{name}>"), x, start, sorted(axes))
    if whole and build.is_vector(result):
        result = build.extract(result)
    return arith.truncf(like(result, element), result) if wide is not None else result


def _halved(x: ir.Value, dtype: Any, kind: str, axis: int) -> ir.Value:
    """Halves along an axis combined until one element is left."""
    n, combine = shape_of(x)[axis], _combine(kind, dtype)
    while n > 1:
        half, odd = n // 2, n % 2
        left, right = strided(x, axis, 0, half, 1), strided(x, axis, half, half, 1)
        rest = strided(x, axis, 2 * half, 1, 1) if odd else None
        x = combine(left, right)
        if rest is not None:
            x = build.concatenate([x, rest], axis) if half > 1 else combine(x, rest)
        n = half + (odd if half > 1 else 0)
    return x


def _reduction(kind: str) -> Callable:
    def rule(ev: Emitter, eqn, x):
        aval, dtype = eqn.outvars[0].aval, eqn.invars[0].aval.dtype
        if is_bool(dtype) and kind in ("max", "min") and not isinstance(x, Empty):
            return _mask_reduction(kind)(ev, eqn, x)
        if isinstance(x, Empty):
            return narrowed(full(typed(aval.shape, widened_type(dtype)), _START[kind](dtype)), aval)
        result = reduce(widened(x, dtype), dtype, kind, eqn.params["axes"])
        return narrowed(reshape(result, aval.shape), aval)

    return rule


def _mask_reduction(kind: str) -> Callable:
    def rule(ev: Emitter, eqn, x):
        dtype = eqn.invars[0].aval.dtype
        if not is_bool(dtype):
            raise ev.refuse(eqn, f"{eqn.primitive} of {dtype}")
        if isinstance(x, Empty):
            return full(value_type(eqn.outvars[0].aval), kind == "min")
        words = reduce(build.as_words(x), jnp.dtype("int32"), kind, eqn.params["axes"])
        return build.as_mask(reshape(words, eqn.outvars[0].aval.shape))

    return rule


for _primitive, _kind in (
    (lax.reduce_sum_p, "add"),
    (lax.reduce_prod_p, "mul"),
    (lax.reduce_max_p, "max"),
    (lax.reduce_min_p, "min"),
):
    RULES.rule(_primitive)(_reduction(_kind))
RULES.rule(lax.reduce_or_p)(_mask_reduction("max"))
RULES.rule(lax.reduce_and_p)(_mask_reduction("min"))


# --- places of extremes -----------------------------------------------------------------------------------------------
def _arg_reduction(kind: str) -> Callable:
    """The lowest index at which the extreme stands; NaN is the extreme of floats, as in lax."""

    def rule(ev: Emitter, eqn, x):
        aval, dtype = eqn.outvars[0].aval, eqn.invars[0].aval.dtype
        (axis,) = eqn.params["axes"]
        shape = shape_of(x)
        kept = [1 if d == axis else n for d, n in enumerate(shape)]
        if is_bool(dtype):
            x, dtype = build.as_words(x), jnp.dtype("int32")
        if isinstance(build.element_of(x), ir.BF16Type):
            x, dtype = arith.extf(like(x, ir.F32Type.get()), x), jnp.dtype("float32")
        x = widened(x, dtype)
        best = build.broadcast(reshape(reduce(x, dtype, kind, [axis]), kept), shape, range(len(shape)))
        if is_float(dtype):
            number = arith.cmpf(arith.CmpFPredicate.OEQ, x, x)
            nan = arith.xori(number, full(number.type, 1))
            here = arith.ori(nan, arith.cmpf(arith.CmpFPredicate.OEQ, x, best))  # with a NaN, all of `best` is NaN
        else:
            here = arith.cmpi(arith.CmpIPredicate.eq, x, best)
        places = choose(here, iota(shape, axis), full(typed(shape, i32()), shape[axis]))
        first = reduce(places, jnp.dtype("int32"), "min", [axis])
        return convert(reshape(first, aval.shape), jnp.dtype("int32"), aval.dtype)

    return rule


RULES.rule(lax.argmax_p)(_arg_reduction("max"))
RULES.rule(lax.argmin_p)(_arg_reduction("min"))


# --- running forms ----------------------------------------------------------------------------------------------------
def _cumulative(kind: str) -> Callable:
    """log2(n) rounds, each of which adds what lies 1, 2, 4 … elements before."""

    def rule(ev: Emitter, eqn, x):
        dtype, axis, backwards = eqn.invars[0].aval.dtype, eqn.params["axis"], eqn.params["reverse"]
        x, shape = widened(x, dtype), shape_of(x)
        n, where, combine = shape[axis], iota(shape, axis), _combine(kind, dtype)
        for k in range(pymath.ceil(pymath.log2(n)) if n > 1 else 0):
            distance = 1 << k
            moved = build.rotate(x, constant(n - distance if backwards else distance), axis)
            limit = full(where.type, n - distance if backwards else distance)
            inside = arith.CmpIPredicate.slt if backwards else arith.CmpIPredicate.sge
            moved = choose(arith.cmpi(inside, where, limit), moved, full(x.type, _START[kind](dtype)))
            x = combine(x, moved)
        return narrowed(x, eqn.outvars[0].aval)

    return rule


for _primitive, _kind in ((lax.cumsum_p, "add"), (lax.cumprod_p, "mul"), (lax.cummax_p, "max"), (lax.cummin_p, "min")):
    RULES.rule(_primitive)(_cumulative(_kind))


# --- any other reduction ----------------------------------------------------------------------------------------------
@RULES.rule(lax.reduce_p)
def _reduce(ev: Emitter, eqn, *operands):
    """Halves are combined by the function that `lax.reduce` was given, until one element is left."""
    combine, axes, n = eqn.params["jaxpr"], eqn.params["dimensions"], len(operands) // 2
    combine = getattr(combine, "jaxpr", combine)

    def run(*values):
        xs, starts = list(values[:n]), values[n:]

        def pairs(left, right):
            together = functools.partial(jaxlink.eval_jaxpr, combine, ())
            for _ in range(left[0].ndim):
                together = jax.vmap(together)
            return together(*left, *right)

        for axis in axes:
            while (size := xs[0].shape[axis]) > 1:
                half = size // 2
                parts = [[lax.slice_in_dim(x, k * half, (k + 1) * half, axis=axis) for x in xs] for k in range(2)]
                rest = [lax.slice_in_dim(x, 2 * half, size, axis=axis) for x in xs]
                xs = pairs(*parts)
                if size % 2:
                    xs = [lax.concatenate([x, r], axis) for x, r in zip(xs, rest)]
        xs = [lax.squeeze(x, axes) for x in xs]
        return pairs([lax.full_like(x, 0) + s for x, s in zip(xs, starts)], xs)

    return ev.inline(run, *operands, avals=[v.aval for v in eqn.invars])
