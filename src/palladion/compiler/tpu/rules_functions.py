"""Functions that Mosaic has not, spelled out in those that it has, in float32 (bfloat16 goes through it).

Formulas: expm1 and log as W. Kahan's; erfc, erf_inv (M. Giles, "Approximating the erfinv function", single precision)
and the gamma functions (Lanczos; asymptotic series) good to a few units in the last place of float32 or so. What JAX
spells out itself (Bessel functions, the incomplete gamma function) is taken from there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import element_bits
from palladion.rules import present


def _where(condition, yes, no):
    return lax.select(condition, yes, no)


def _like(x, number):
    return lax.full_like(x, number)


def _expm1(x):
    u = jnp.exp(x)
    exact = (u - 1) * x / jnp.log(u)
    large = _where(jnp.abs(x) > 1, u - 1, exact)
    return _where(u == 1, x, large)


def _sinh(x):
    e = _expm1(jnp.abs(x))
    small = 0.5 * (e + e / (e + 1))
    large = jnp.exp(jnp.abs(x) - np.float32(math.log(2)))
    return jnp.sign(x) * _where(jnp.abs(x) < 40, small, large)


def _cosh(x):
    e = jnp.exp(jnp.abs(x) - np.float32(math.log(2)))
    return e + 0.25 / e


def _asin(x):
    return lax.atan2(x, jnp.sqrt((1 - x) * (1 + x)))


def _acos(x):
    return lax.atan2(jnp.sqrt((1 - x) * (1 + x)), x)


def _atan(x):
    return lax.atan2(x, _like(x, 1))


def _asinh(x):
    a = jnp.abs(x)
    usual = jnp.log1p(a + a * a / (1 + jnp.sqrt(a * a + 1)))
    return jnp.sign(x) * _where(a < 1e9, usual, jnp.log(a) + np.float32(math.log(2)))


def _acosh(x):
    usual = jnp.log1p((x - 1) + jnp.sqrt((x - 1) * (x + 1)))
    return _where(x < 1e9, usual, jnp.log(x) + np.float32(math.log(2)))


def _atanh(x):
    return 0.5 * (jnp.log1p(x) - jnp.log1p(-x))


def _cbrt(x):
    a = jnp.abs(x)
    root = jnp.exp(jnp.log(a) * np.float32(1 / 3))
    root = root - (root * root * root - a) / (3 * root * root)  # one step of Newton's
    return _where((a == 0) | ~(a < jnp.inf), x, jnp.sign(x) * root)


_ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587,
         -0.82215223, 0.17087277)  # fmt: skip


def _polynomial(coefficients, x):
    """Lowest power first."""
    total = _like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + np.float32(c)
    return total


def _erfc(x):
    a = jnp.abs(x)
    t = 1 / (1 + 0.5 * a)
    tail = t * jnp.exp(-a * a + _polynomial(_ERFC, t))
    return _where(a < 0.5, 1 - lax.erf(x), _where(x < 0, 2 - tail, tail))


_ERF_INV_NEAR = (1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06,
                 -3.5233877e-06, 3.43273939e-07, 2.81022636e-08)  # fmt: skip
_ERF_INV_FAR = (2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
                0.000100950558, -0.000200214257)  # fmt: skip


def _erf_inv(x):
    w = -jnp.log1p(-x * x)
    near = _polynomial(_ERF_INV_NEAR, w - 2.5)
    far = _polynomial(_ERF_INV_FAR, jnp.sqrt(w) - 3)
    inside = x * _where(w < 5, near, far)
    return _where(jnp.abs(x) == 1, x * np.float32(np.inf), inside)


_LANCZOS = (0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
            12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7)  # fmt: skip


def _lgamma(x):
    reflected = x < 0.5
    z = _where(reflected, -x, x - 1)
    total = _like(x, _LANCZOS[0])
    for i, c in enumerate(_LANCZOS[1:]):
        total = total + np.float32(c) / (z + np.float32(i + 1))
    t = z + 7.5
    value = np.float32(0.5 * math.log(2 * math.pi)) + (z + 0.5) * jnp.log(t) - t + jnp.log(total)
    sine = jnp.abs(jnp.sin(np.float32(math.pi) * (x - jnp.floor(x))))
    flipped = np.float32(math.log(math.pi)) - jnp.log(sine) - value
    return _where(jnp.abs(x) == jnp.inf, jnp.abs(x), _where(reflected, flipped, value))


def _digamma(x):
    reflected = x < 0.5
    z, total = _where(reflected, 1 - x, x), _like(x, 0)
    for _ in range(8):
        small = z < 8
        total = total - _where(small, 1 / z, _like(z, 0))
        z = z + _where(small, _like(z, 1), _like(z, 0))
    r = 1 / (z * z)
    series = jnp.log(z) - 0.5 / z - r * (np.float32(1 / 12) - r * (np.float32(1 / 120) - r * np.float32(1 / 252)))
    value = series + total
    angle = np.float32(math.pi) * (x - jnp.floor(x))
    return _where(reflected, value - np.float32(math.pi) * jnp.cos(angle) / jnp.sin(angle), value)


_SPELLED = {
    lax.expm1_p: _expm1,
    lax.sinh_p: _sinh,
    lax.cosh_p: _cosh,
    lax.asin_p: _asin,
    lax.acos_p: _acos,
    lax.atan_p: _atan,
    lax.asinh_p: _asinh,
    lax.acosh_p: _acosh,
    lax.atanh_p: _atanh,
    lax.cbrt_p: _cbrt,
    lax.erfc_p: _erfc,
    lax.erf_inv_p: _erf_inv,
    lax.lgamma_p: _lgamma,
    lax.digamma_p: _digamma,
}


def _spelled(function: Callable) -> Callable:
    @functools.wraps(function)
    def wide(*xs):
        return function(*(x.astype(jnp.float32) for x in xs)).astype(xs[0].dtype)

    def rule(ev: Emitter, eqn, *inputs):
        avals = [v.aval for v in eqn.invars]
        return ev.inline(wide, *inputs, avals=avals)[0]

    return rule


for _primitive, _function in _SPELLED.items():
    RULES.rule(_primitive)(_spelled(_function))


def _plain(function: Callable) -> Callable:
    return lambda ev, eqn, *inputs: ev.inline(function, *inputs, avals=[v.aval for v in eqn.invars])[0]


for _primitive, _function in jaxlink.special_functions().items():
    RULES.rule(_primitive)(_plain(_function))


# --- other primitives that are short programs -------------------------------------------------------------------------
def _nextafter(x, y):
    bits = element_bits(x.dtype)
    word = jnp.dtype(f"int{bits}")
    sign = np.array(-(1 << (bits - 1)), word)
    a, b = (lax.bitcast_convert_type(v, word) for v in (x, y))
    away = a + _where((x < y) == (a >= 0), _like(a, 1), _like(a, -1))
    least = (b & sign) | _like(a, 1)
    moved = _where(x == 0, least, away)
    bad = ~(x == x) | ~(y == y)
    result = lax.bitcast_convert_type(moved, x.dtype)
    return _where(bad, _like(x, np.nan), _where(x == y, y, result))


RULES.rule(lax.nextafter_p)(_plain(_nextafter))
RULES.rule(*present("one_minus_square_p"))(_plain(lambda x: (1 - x) * (1 + x)))


def _horner(x, *coefficients):
    total = coefficients[-1] + jnp.zeros_like(x)
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


RULES.rule(*present("polynomial_p"))(_plain(_horner))


@functools.cache
def _logsumexp_scan(axis: int, reverse: bool) -> Callable:
    def run(x):
        n, shape = x.shape[axis], x.shape
        where, distance = lax.broadcasted_iota(jnp.int32, shape, axis), 1
        while distance < n:
            shift = n - distance if reverse else distance
            ends = ((n - shift, n), (0, n - shift))
            moved = jnp.concatenate([lax.slice_in_dim(x, low, high, axis=axis) for low, high in ends], axis)
            inside = where < n - distance if reverse else where >= distance
            moved = _where(inside, moved, _like(x, -np.inf))
            top = jnp.maximum(x, moved)
            summed = top + jnp.log1p(jnp.exp(jnp.minimum(x, moved) - top))
            x, distance = _where(jnp.abs(top) == jnp.inf, top, summed), distance * 2
        return x

    return run


@RULES.rule(lax.cumlogsumexp_p)
def _cumlogsumexp(ev: Emitter, eqn, x):
    run = _logsumexp_scan(eqn.params["axis"], eqn.params["reverse"])
    return ev.inline(run, x, avals=[eqn.invars[0].aval])[0]
