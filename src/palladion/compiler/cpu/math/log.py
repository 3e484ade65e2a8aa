"""Logarithms: log, log2, log1p, and what the inverse hyperbolic functions need of them.

x = 2**e (1 + f) with 2/3 <= 1 + f < 4/3, so that e = 0 around 1 and nothing cancels. In f32 log(1 + f) is a
polynomial in f; in f64 the series of log((1 + s) / (1 - s)) in s = f / (2 + f), which needs a division and a
third of the terms. log1p splits 1 + x in the same way but takes f from x itself: f = 2**-e x + (2**-e - 1),
in one fma.

Sources: fdlibm (Ng, 1993), e_log.c, for the f64 scheme; Muller, Elementary Functions, 3rd ed., on range reduction.
Coefficients: our own, by Remez (coefficients.py).
"""

from __future__ import annotations

import math

from palladion.compiler.cpu.math.coefficients import LN2_HIGH, LN2_LOW, POLYNOMIALS
from palladion.compiler.cpu.math.core import V, fma, horner, where

TWO_THIRDS = {"f32": 0x3F2AAAAB, "f64": 0x3FE5555555555555}  # bits of 2/3


def split(x: V) -> tuple[V, V]:
    """x = m * 2**e for positive finite normal x, 2/3 <= m < 4/3. Returns: m, and e as an integer times
    2**mantissa."""
    t = x.format
    e = (x.bits - TWO_THIRDS[t.name]) & -(1 << t.mantissa)
    return (x.bits - e).real, e


def exponent(e: V, t_name: str) -> V:
    """The e of `split` as a float."""
    if t_name == "f32":
        return e.to_float() * 2.0**-23
    # Without AVX-512 there is no conversion from i64: put the integer into the low bits of 1.5 * 2**52
    # instead.
    magic = 1.5 * 2.0**52
    return ((e >> 52) + e.real.like(magic).bits).real - magic


def lifted(x: V) -> tuple[V, V]:
    """Subnormal x brought among the normal numbers. Returns: the number, and what to add to its exponent."""
    t = x.format
    tiny = x < t.min_normal
    return where(tiny, x * 2.0 ** (t.mantissa + 2), x), where(tiny, x.like(-float(t.mantissa + 2)), 0.0)


def log1p_reduced(f: V) -> V:
    """log(1 + f) for -1/3 <= f < 1/3."""
    if f.format.bits == 32:
        square = f * f
        return fma(square, fma(f, horner(f, POLYNOMIALS["log1p", "f32"]), -0.5), f)
    half_square = f * f * 0.5
    s = f / (f + 2.0)
    z = s * s
    return f - (half_square - s * (half_square + z * horner(z, POLYNOMIALS["log1p", "f64"])))


def combine(e: V, y: V) -> V:
    """e ln 2 + y."""
    name = y.format.name
    return fma(e, LN2_HIGH[name], fma(e, LN2_LOW[name], y))


def special(x: V, y: V) -> V:
    """y = log(x) where x is positive and finite, and what is due elsewhere: log(inf) = inf, log(0) = -inf,
    else NaN."""
    y = where(x < math.inf, y, x)
    return where(x > 0.0, y, where(x.eq(0.0), x.like(-math.inf), math.nan))


def log(x: V) -> V:
    """The natural logarithm."""
    normal, more = lifted(x)
    m, e = split(normal)
    return special(x, combine(exponent(e, x.format.name) + more, log1p_reduced(m - 1.0)))


def log2(x: V) -> V:
    """The logarithm to base 2."""
    normal, more = lifted(x)
    m, e = split(normal)
    f = m - 1.0
    if x.format.bits == 32:
        y = fma(f, horner(f, POLYNOMIALS["log2_1p", "f32"]), f)
    else:
        # log2(e) = 1 + c: the product by c is small beside the rest, and so is its rounding.
        z = log1p_reduced(f)
        y = fma(z, 1 / math.log(2) - 1, z)
    return special(x, y + (exponent(e, x.format.name) + more))


def log_positive(x: V, more: V | None = None, small: V | None = None) -> V:
    """log(x) + more * ln 2 + small for normal finite x > 0; `more` is a whole number. Elsewhere anything."""
    m, e = split(x)
    e = exponent(e, x.format.name)
    y = log1p_reduced(m - 1.0)
    return combine(e if more is None else e + more, y if small is None else y + small)


def log1p_positive(x: V, more: V | None = None) -> V:
    """log(1 + x) + more * ln 2 for finite x > -1. Elsewhere anything."""
    _, e = split(x + 1.0)
    scale = (x.like(4.0).bits - e).real  # 4 * 2**-e: a normal number for every e
    f = fma(x * 0.25, scale, fma(scale, 0.25, -1.0))
    e = exponent(e, x.format.name)
    return combine(e if more is None else e + more, log1p_reduced(f))


def log1p(x: V) -> V:
    """log(1 + x), precise near zero."""
    y = where(abs(x) < x.format.epsilon / 4, x, log1p_positive(x))  # keeps -0 and subnormal numbers
    y = where(x < math.inf, y, x)
    return where(x > -1.0, y, where(x.eq(-1.0), x.like(-math.inf), math.nan))
