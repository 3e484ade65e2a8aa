"""Arithmetic on complex numbers, spelled out in real numbers: the rules of parts.py for it.

Division scales by the larger part of the divisor (Smith, 1962), abs by the larger part, and the square root is taken
of half of what is largest, so that nothing overflows before its time; the formulas are those of Kahan, "Branch cuts
for complex elementary functions" (1987), without his care for signed zeros on the cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.cpu.boundary import part_dtypes
from palladion.compiler.cpu.lower.parts import Parts, bind, each_part, rule

Pair = tuple[Any, Any]


def add(x: Pair, y: Pair) -> Pair:
    return x[0] + y[0], x[1] + y[1]


def sub(x: Pair, y: Pair) -> Pair:
    return x[0] - y[0], x[1] - y[1]


def mul(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def div(x: Pair, y: Pair) -> Pair:
    """x / y; by zero: each part of x by zero."""
    (a, b), (c, d) = x, y
    wide = jnp.abs(c) >= jnp.abs(d)
    top, low = jnp.where(wide, c, d), jnp.where(wide, d, c)
    ratio = jnp.where(top == 0, 0, low / jnp.where(top == 0, 1, top))
    scale = top + low * ratio
    real = jnp.where(wide, a + b * ratio, a * ratio + b)
    imag = jnp.where(wide, b - a * ratio, b * ratio - a)
    return real / scale, imag / scale


def magnitude(x: Pair) -> Any:
    a, b = jnp.abs(x[0]), jnp.abs(x[1])
    top, low = jnp.maximum(a, b), jnp.minimum(a, b)
    ratio = low / jnp.where((top == 0) | jnp.isinf(top), 1, top)
    size = top * jnp.sqrt(1 + ratio * ratio)
    return jnp.where(jnp.isinf(a) | jnp.isinf(b), np.inf, size)


def exp(x: Pair) -> Pair:
    size = jnp.exp(x[0])
    return size * jnp.cos(x[1]), jnp.where(x[1] == 0, x[1], size * jnp.sin(x[1]))


def log(x: Pair) -> Pair:
    return jnp.log(magnitude(x)), jnp.arctan2(x[1], x[0])


def sqrt(x: Pair) -> Pair:
    size = jnp.sqrt((magnitude(x) + jnp.abs(x[0])) * 0.5)
    other = jnp.where(size == 0, 0, x[1] / jnp.where(size == 0, 1, 2 * size))
    right = x[0] >= 0
    return jnp.where(right, size, jnp.abs(other)), jnp.where(right, other, jnp.copysign(size, x[1]))


def sin(x: Pair) -> Pair:
    return jnp.sin(x[0]) * jnp.cosh(x[1]), jnp.cos(x[0]) * jnp.sinh(x[1])


def cos(x: Pair) -> Pair:
    return jnp.cos(x[0]) * jnp.cosh(x[1]), -jnp.sin(x[0]) * jnp.sinh(x[1])


def sinh(x: Pair) -> Pair:
    return jnp.sinh(x[0]) * jnp.cos(x[1]), jnp.cosh(x[0]) * jnp.sin(x[1])


def cosh(x: Pair) -> Pair:
    return jnp.cosh(x[0]) * jnp.cos(x[1]), jnp.sinh(x[0]) * jnp.sin(x[1])


def tanh(x: Pair) -> Pair:
    """By the hyperbolic tangent of the real part, so that it does not overflow."""
    t, (s, c) = jnp.tanh(x[0]), (jnp.sin(x[1]), jnp.cos(x[1]))
    gap = (1 - t) * (1 + t)
    size = c * c + t * t * s * s
    return t / size, s * c * gap / size


def sign(x: Pair) -> Pair:
    size = magnitude(x)
    safe = jnp.where(size == 0, 1, size)
    return x[0] / safe, x[1] / safe


def power(x: Pair, y: Pair) -> Pair:
    real, imag = exp(mul(y, log(x)))
    zero = (x[0] == 0) & (x[1] == 0)
    one = zero & (y[0] == 0) & (y[1] == 0)
    return jnp.where(zero, one.astype(real.dtype), real), jnp.where(zero, 0, imag)


def integer_power(x: Pair, n: int) -> Pair:
    result: Pair = _one(x)
    base, left = x, abs(n)
    while left:
        result = mul(result, base) if left & 1 else result
        base, left = mul(base, base), left >> 1
    return div(_one(x), result) if n < 0 else result


def logistic(x: Pair) -> Pair:
    real, imag = exp((-x[0], -x[1]))
    return div(_one(x), (1 + real, imag))


def log1p(x: Pair) -> Pair:
    """The modulus of 1 + x from what it differs from 1 by, so that it is exact for small x."""
    excess = x[0] * (2 + x[0]) + x[1] * x[1]
    size = jnp.where(jnp.abs(excess) < 0.5, 0.5 * jnp.log1p(excess), jnp.log(magnitude((1 + x[0], x[1]))))
    return size, jnp.arctan2(x[1], 1 + x[0])


def expm1(x: Pair) -> Pair:
    half = jnp.sin(x[1] * 0.5)
    return jnp.expm1(x[0]) * jnp.cos(x[1]) - 2 * half * half, jnp.exp(x[0]) * jnp.sin(x[1])


def _one(x: Pair) -> Pair:
    return jnp.ones_like(x[0]), jnp.zeros_like(x[1])


_PAIRS: dict[Any, Callable[..., Pair]] = {
    lax.add_p: add, jaxlink.add_any_p: add, lax.sub_p: sub, lax.mul_p: mul, lax.div_p: div, lax.exp_p: exp,
    lax.log_p: log, lax.sqrt_p: sqrt, lax.sin_p: sin, lax.cos_p: cos, lax.sinh_p: sinh, lax.cosh_p: cosh,
    lax.tanh_p: tanh, lax.sign_p: sign, lax.pow_p: power, lax.square_p: lambda x: mul(x, x),
    lax.neg_p: lambda x: (-x[0], -x[1]), lax.conj_p: lambda x: (x[0], -x[1]),
    lax.rsqrt_p: lambda x: div(_one(x), sqrt(x)), lax.tan_p: lambda x: div(sin(x), cos(x)), lax.log1p_p: log1p,
    lax.expm1_p: expm1, lax.logistic_p: logistic,
}  # fmt: skip


def _arithmetic(formula: Callable[..., Pair]) -> Callable:
    def apply(eqn, *inputs):
        if not any(isinstance(x, Parts) for x in inputs) and not part_dtypes(eqn.outvars[0].aval.dtype):
            return bind(eqn, inputs)
        pairs = [x.parts if isinstance(x, Parts) else (x, jnp.zeros_like(x)) for x in inputs]
        return Parts(eqn.outvars[0].aval.dtype, formula(*pairs))

    return apply


for _primitive, _formula in _PAIRS.items():
    rule(_primitive)(_arithmetic(_formula))


@rule(lax.integer_pow_p)
def _integer_pow(eqn, x):
    if not isinstance(x, Parts):
        return bind(eqn, [x])
    return Parts(x.dtype, integer_power((x.parts[0], x.parts[1]), eqn.params["y"]))


@rule(lax.complex_p)
def _complex(eqn, real, imag):
    return Parts(eqn.outvars[0].aval.dtype, (real, imag))


rule(lax.real_p)(lambda eqn, x: x.parts[0])
rule(lax.imag_p)(lambda eqn, x: x.parts[1])


@rule(lax.abs_p)
def _abs(eqn, x):
    return magnitude((x.parts[0], x.parts[1])) if isinstance(x, Parts) else bind(eqn, [x])


@rule(lax.is_finite_p)
def _is_finite(eqn, x):
    return lax.is_finite(x.parts[0]) & lax.is_finite(x.parts[1]) if isinstance(x, Parts) else bind(eqn, [x])


@rule(lax.eq_p, lax.ne_p)
def _compare(eqn, x, y):
    if not isinstance(x, Parts):
        return bind(eqn, [x, y])
    each = [bind(eqn, [p, q]) for p, q in zip(x.parts, y.parts)]
    combine = jnp.logical_and if eqn.primitive is lax.eq_p else jnp.logical_or
    result = each[0]
    for other in each[1:]:
        result = combine(result, other)
    return result


@rule(lax.convert_element_type_p)
def _convert(eqn, x):
    new = eqn.params["new_dtype"]
    dtypes = part_dtypes(new)
    if not dtypes and not isinstance(x, Parts):
        return bind(eqn, [x])
    parts = x.parts if isinstance(x, Parts) else (x, jnp.zeros_like(x))
    if dtypes:
        return Parts(jnp.dtype(new), tuple(lax.convert_element_type(p, d) for p, d in zip(parts, dtypes)))
    return (parts[0] != 0) | (parts[1] != 0) if new == np.bool_ else lax.convert_element_type(parts[0], new)


@rule(lax.reduce_sum_p, lax.cumsum_p, lax.reduce_precision_p)
def _linear(eqn, x, *rest):
    return each_part(eqn, [x, *rest]) if isinstance(x, Parts) else bind(eqn, [x, *rest])


@rule(lax.reduce_prod_p)
def _reduce_prod(eqn, x):
    if not isinstance(x, Parts):
        return bind(eqn, [x])
    one = tuple(np.asarray(v, x.parts[0].dtype) for v in (1, 0))
    return Parts(x.dtype, tuple(lax.reduce(x.parts, one, mul, eqn.params["axes"])))


@rule(lax.scatter_add_p)
def _scatter_add(eqn, x, indices, updates):
    if not isinstance(x, Parts):
        return bind(eqn, [x, indices, updates])
    function = lax.scatter_add
    dn, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    outs = [function(p, indices, u, dn, mode=mode) for p, u in zip(x.parts, updates.parts)]
    return Parts(x.dtype, tuple(outs))


@rule(lax.dot_general_p)
def _dot_general(eqn, x, y):
    whole = part_dtypes(eqn.outvars[0].aval.dtype)
    if not whole:
        return bind(eqn, [x, y])
    (a, b), (c, d) = (v.parts if isinstance(v, Parts) else (v, None) for v in (x, y))

    def dot(p, q):
        return 0 if p is None or q is None else bind(eqn, [p, q], preferred_element_type=whole[0])

    return Parts(eqn.outvars[0].aval.dtype, (dot(a, c) - dot(b, d), dot(a, d) + dot(b, c)))


@rule(lax.conv_general_dilated_p)
def _conv(eqn, x, y):
    whole = part_dtypes(eqn.outvars[0].aval.dtype)
    if not whole:
        return bind(eqn, [x, y])

    def conv(p, q):
        return bind(eqn, [p, q], preferred_element_type=whole[0])

    (a, b), (c, d) = x.parts, y.parts
    return Parts(eqn.outvars[0].aval.dtype, (conv(a, c) - conv(b, d), conv(a, d) + conv(b, c)))
