"""The error function and its relatives: erf, erfc, erf_inv.

erf is a polynomial in x**2 near zero; further out another one in f32, and 1 - exp(x P(x)) in f64. erfc(x) is
exp(-x**2) t P(t) with t = 1 / (1 + x / 2), where x**2 is taken exactly, as two numbers, and t corrected by
its residual. erf_inv(x) is x P(w) with w = -log(1 - x**2), or x P(sqrt(w)) for larger w.

Sources: Giles, Approximating the erfinv function (GPU Computing Gems, 2011), for the variable w; Cody,
Rational Chebyshev approximations for the error function (1969), for the shape of erfc. Coefficients: our own,
by Remez (coefficients.py).
"""

from __future__ import annotations

import math

from palladion.compiler.cpu.math.coefficients import LN2_HIGH, LN2_LOW, POLYNOMIALS
from palladion.compiler.cpu.math.core import V, clamp, fast_two_sum, fma, horner, where
from palladion.compiler.cpu.math.exp import LOG2_E, exp, expm1_reduced, nearest
from palladion.compiler.cpu.math.log import combine, exponent, log1p_reduced, split


def _erf_near(x: V) -> V:
    """erf(x) for |x| up to 1.12 (f64: 1)."""
    return fma(x, horner(x * x, POLYNOMIALS["erf_near", x.format.name]), x)


def erf(x: V) -> V:
    """The error function."""
    t, a = x.format, abs(x)
    near = _erf_near(a)
    if t.bits == 32:
        # Beyond 3.92 the result rounds to 1.
        u = clamp(a, None, 3.93) - 2.5
        y = where(a < 1.12, near, 1.0 + horner(u, POLYNOMIALS["erf_far", "f32"]))
    else:
        a = clamp(a, None, 5.95)
        y = where(a < 1.0, near, 1.0 - exp(a * horner(a, POLYNOMIALS["erf_far", "f64"])))
    return y.copysign(x)


def erfc(x: V) -> V:
    """1 - erf(x), precise for large x."""
    # From 1/2, erfc(a) = exp(-a**2) w with w = u P(u), u = 1 / (1 + a / 2). The roundings of u, P and their
    # product are collected in `lost`, and those of a * a put back into the reduced argument: each alone may
    # cost a whole ulp.
    t = x.format
    near = 1.0 - _erf_near(x)
    a = clamp(abs(x), None, 10.1 if t.bits == 32 else 27.3)
    half = a * 0.5
    u = 1.0 / (half + 1.0)
    rest, rest_low = fast_two_sum(u.like(1.0), -u)
    residual = fma(-u, half, rest) + rest_low
    first, *others = POLYNOMIALS["erfcx", t.name]
    v = u - 0.5
    inner = horner(v, others)
    p = fma(v, inner, first)
    w = u * p
    # d(u P) = (P + u P') du with du = u * residual; `inner` is near enough to P'.
    lost = fma(u, fma(residual, fma(u, inner, p), fma(v, inner, first - p)), fma(u, p, -w))
    # exp(-a**2) = (1 + q) 2**n, kept times 2**scale: above the subnormal numbers until the end.
    scale = 64 if t.bits == 32 else 128
    square = a * a
    n, s = nearest(square, -LOG2_E, scale)
    r = fma(n, -LN2_HIGH[t.name], -square) - fma(n, LN2_LOW[t.name], fma(a, a, -square))
    y = fma(w, expm1_reduced(r), lost) + w
    y = y * s * 2.0**-scale
    return where(abs(x) < 0.5, near, where(x < 0.0, 2.0 - y, y))


def erf_inv(x: V) -> V:
    """The inverse of erf; infinite at -1 and 1, NaN outside."""
    t = x.format
    rest = fma(-x, x, 1.0)
    m, e = split(rest)
    w = -combine(exponent(e, t.name), log1p_reduced(m - 1.0))
    s = w.sqrt()
    if t.bits == 32:
        # x P as x (P - c) + c x with c = 1 or 2, so that only the last rounding counts.
        small = w < 5.0
        low = horner(w, POLYNOMIALS["erf_inv_low", "f32"])
        high = horner(s - 3.0, POLYNOMIALS["erf_inv_high", "f32"])
        y = fma(x, where(small, low, high), where(small, x, x + x)).copysign(x)
    else:
        middle = horner(s - 3.25, POLYNOMIALS["erf_inv_middle", "f64"])
        high = horner(s - 5.0, POLYNOMIALS["erf_inv_high", "f64"])
        low = horner(w - 2.5, POLYNOMIALS["erf_inv_low", "f64"])
        y = x * where(w < 5.0, low, where(w < 16.0, middle, high))
    a = abs(x)
    return where(a < 1.0, y, where(a.eq(1.0), x * math.inf, math.nan))
