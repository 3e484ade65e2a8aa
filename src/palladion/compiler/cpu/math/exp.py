"""Exponentials: exp, exp2, expm1 and logistic.

exp and exp2 reduce by *even* multiples of ln 2: x = 2m ln 2 + r with |r| <= ln 2, so that
exp(x) = (exp(r) 2^m) 2^m. Here 2^m is always a normal number, and the two products overflow to infinity and round
into the subnormal numbers by themselves: two more polynomial terms replace all the bit work that a single 2^n
needs at both ends of the range. Products by a power of two are exact until the last, so that the result is
rounded once there.

Sources: Cody and Waite, Software Manual for the Elementary Functions (1980), for the reduction in two steps;
Muller, Elementary Functions, 3rd ed., on range reduction. Coefficients: our own, by Remez (coefficients.py).
"""

from __future__ import annotations

from palladion.compiler.cpu.math.coefficients import LN2_HIGH, LN2_LOW, POLYNOMIALS, TWO_LN2_HIGH, TWO_LN2_LOW
from palladion.compiler.cpu.math.core import V, clamp, fma, horner, where

LOG2_E = 1.4426950408889634


def nearest(x: V, scale: float, more: int = 0) -> tuple[V, V]:
    """n = round(x * scale) as a number, and 2**(n + more), which must be a normal number."""
    # Adding a number whose last bit counts 1 rounds to an integer, and leaves it in the low bits, here with
    # the bias of the exponent; a shift brings it into place and drops the rest.
    t = x.format
    rounder = t.magic + t.bias + more
    shifted = fma(x, scale, rounder)
    return shifted - rounder, (shifted.bits << t.mantissa).real


def exp(x: V) -> V:
    """e**x."""
    t = x.format
    low, high = (-104.0, 89.0) if t.bits == 32 else (-746.0, 710.0)
    x = clamp(x, low, high)
    m, s = nearest(x, LOG2_E / 2)
    r = fma(m, -TWO_LN2_LOW[t.name], fma(m, -TWO_LN2_HIGH[t.name], x))
    return horner(r, [1.0, 1.0, *POLYNOMIALS["exp", t.name]]) * s * s


def exp2(x: V) -> V:
    """2**x."""
    t = x.format
    low, high = (-151.0, 129.0) if t.bits == 32 else (-1076.0, 1025.0)
    x = clamp(x, low, high)
    m, s = nearest(x, 0.5)
    r = fma(m, -2.0, x)
    return horner(r, [1.0, *POLYNOMIALS["exp2", t.name]]) * s * s


def reduce(x: V, more: int = 0) -> tuple[V, V]:
    """x = n ln 2 + r with |r| <= ln(2) / 2. Returns: r and 2**(n + more), which must be a normal number."""
    t = x.format
    n, s = nearest(x, LOG2_E, more)
    return fma(n, -LN2_LOW[t.name], fma(n, -LN2_HIGH[t.name], x)), s


def expm1_reduced(r: V) -> V:
    """e**r - 1 for |r| <= ln(2) / 2."""
    return fma(r * r, horner(r, POLYNOMIALS["expm1", r.format.name]), r)


def expm1(x: V) -> V:
    """e**x - 1, precise near zero."""
    # With p = e**r - 1 and s = 2**n: e**x - 1 = s p + (s - 1). Computed by halves, as s may be 2**128;
    # doubling them overflows where it must. Below -60 the result is -1.
    r, h = reduce(clamp(x, -60.0, 89.0 if x.format.bits == 32 else 710.0), -1)
    y = fma(h, expm1_reduced(r), h - 0.5) * 2.0
    return where(abs(x) < x.format.epsilon / 4, x, y)  # also keeps -0, and the last bit of subnormal numbers


def logistic(x: V) -> V:
    """1 / (1 + e**-x)."""
    # With e = e**-|x| and q = e / (1 + e), the result is 1 - q or, for negative x, e - e q: then the
    # rounding of 1 + e, which a plain e / (1 + e) inherits, hardly counts. e is kept times 2**scale, above the
    # subnormal numbers.
    t = x.format
    scale, low = (32, -104.0) if t.bits == 32 else (64, -746.0)
    r, s = reduce(clamp(-abs(x), low, None), scale)
    e = horner(r, [1.0, 1.0, *POLYNOMIALS["expm1", t.name]]) * s
    q = e / (e + 2.0**scale)
    a = where(x < 0.0, e, 2.0**scale)
    return fma(-a, q, a) * 2.0**-scale
