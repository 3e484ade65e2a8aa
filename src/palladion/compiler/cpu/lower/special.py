"""Special functions that JAX itself spells out in simpler ones: its own series and continued fractions, lowered.

They loop until every element has converged, so they cost more than the functions of `math/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import convert, element, scalar_op
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, derived, op
from palladion.rules import present


def run_function(ctx: Lowering, function: Callable, *values: Lazy) -> list[Any]:
    """Lower what a JAX function of arrays does."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values))
    for v in values:
        ctx.keep(v)
    return ctx.run(getattr(jaxpr, "jaxpr", jaxpr), list(values))


def _spelled_out(function: Callable) -> Callable:
    return lambda ctx, eqn, *values: run_function(ctx, function, *values)[0]


for _primitive, _function in jaxlink.special_functions().items():
    RULES.rule(_primitive)(_spelled_out(_function))


@RULES.rule(*present("polynomial_p"))
def _polynomial(ctx: Lowering, eqn, x: Lazy, *coefficients: Lazy) -> Lazy:
    """By Horner's rule; the coefficients begin with that of the lowest power."""
    aval = eqn.outvars[0].aval

    def at(index):
        base = element(x, index)
        total = element(coefficients[-1], index)
        for c in reversed(coefficients[:-1]):
            total = scalar_op("add", aval.dtype, scalar_op("mul", aval.dtype, total, base), element(c, index))
        return total

    return derived(aval.shape, aval.dtype, [x, *coefficients], at, 2 * len(coefficients))


@RULES.rule(*present("one_minus_square_p"))
def _one_minus_square(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    """(1 + x)(1 - x), which is exact near 1."""
    one = ir.Const(x.dtype, jnp.ones((), x.dtype).item())

    def at(index):
        e = x.at(index)
        return scalar_op("mul", x.dtype, *(scalar_op(name, x.dtype, one, e) for name in ("add", "sub")))

    return derived(x.shape, x.dtype, [x], at, 3)


@RULES.rule(lax.mulhi_p)
def _mulhi(ctx: Lowering, eqn, x: Lazy, y: Lazy) -> Lazy:
    """The upper half of a product."""
    aval, bits = eqn.outvars[0].aval, x.dtype.itemsize * 8
    if bits > 32:
        raise RULES.unsupported(eqn)
    wide = np.dtype(np.int64 if jnp.issubdtype(x.dtype, jnp.signedinteger) else np.uint64)

    def at(index):
        product = op("mul", wide, *(convert(element(v, index), wide) for v in (x, y)))
        return convert(op("shift_right_logical", wide, product, ir.Const(wide, bits)), x.dtype)

    return derived(aval.shape, aval.dtype, [x, y], at, 4)
