"""Powers and roots: pow, integer_pow, sqrt, rsqrt, cbrt.

pow(x, y) = 2**(y log2 |x|). The logarithm needs about 12 bits more than the result, as the exponent's integer
part costs that many. For f32 it is simply taken in f64; for f64 as a pair of numbers, from s = f / (2 + f)
with |f| <= 1/3: log2(1 + f) = s (C0 + s**2 (C1 + s**2 R(s**2))), where only R may be a plain number.

Sources: C99 annex F.9.4.4 for the special cases; Muller, Elementary Functions, 3rd ed., and Dekker, A
floating-point technique for extending the available precision (1971), for pairs. Coefficients: our own, by
Remez (coefficients.py).
"""

from __future__ import annotations

import math

from palladion.compiler.cpu.math.coefficients import POLYNOMIALS, POW_FIRST, POW_SECOND
from palladion.compiler.cpu.math.core import (
    V,
    clamp,
    constants,
    fast_two_sum,
    fma,
    horner,
    two_product,
    where,
)
from palladion.compiler.cpu.math.exp import nearest
from palladion.compiler.cpu.math.log import exponent, lifted, split


def pow(x: V, y: V) -> V:
    """x to the power y, special cases as in C99."""
    magnitude = (_pow_f32 if x.format.bits == 32 else _pow_f64)(abs(x), y)
    whole = y.trunc().eq(y)
    half = y * 0.5
    odd = whole & half.trunc().ne(half)
    negative = x.bits < 0
    result = where(negative & odd, -magnitude, magnitude)
    result = where((x < 0.0) & (x > -math.inf) & ~whole & y.eq(y), math.nan, result)
    return where(x.eq(1.0) | y.eq(0.0), 1.0, result)


def _log2_special(a: V, y: V) -> V:
    """y = log2(a) for finite a > 0; -inf for 0, a itself for inf and NaN."""
    return where(a < math.inf, where(a.eq(0.0), -math.inf, y), a)


def _pow_f32(a: V, y: V) -> V:
    """a**y for a >= 0, f32: in f64, where subnormal numbers of f32 are normal and nothing overflows."""
    wide = a.f64()
    m, e = split(wide)
    f = m - 1.0
    s = f / (f + 2.0)
    log2 = fma(s, horner(s * s, POLYNOMIALS["pow_log2", "f64"]), exponent(e, "f64"))
    # A bounded y: an infinite one would make NaN of log2(1) = 0. No other |log2| is less than 2**-25.
    power = clamp(y, -(2.0**40), 2.0**40).f64() * _log2_special(wide, log2)
    n, scale = nearest(clamp(power, -200.0, 200.0), 1.0)
    r = clamp(power, -200.0, 200.0) - n
    return (horner(r, POLYNOMIALS["pow_exp2", "f64"]) * scale).f32()


def _pow_f64(a: V, y: V) -> V:
    """a**y for a >= 0, f64."""
    normal, more = lifted(a)
    m, e = split(normal)
    # s + s_low = f / (2 + f)
    f = m - 1.0
    d, d_low = fast_two_sum(f.like(2.0), f)
    inverse = 1.0 / d
    s = f * inverse
    s_low = fma(-s, d_low, fma(-s, d, f)) * inverse
    # log2(1 + f) as a pair
    z, z_low = two_product(s, s)
    z_low = fma(s + s, s_low, z_low)
    u, u_low = fast_two_sum(z.like(POW_SECOND[0]), z * horner(z, POLYNOMIALS["pow_log2_tail", "f64"]))
    u_low = u_low + POW_SECOND[1]
    v, v_low = two_product(z, u)
    v_low = v_low + fma(z, u_low, z_low * u)
    k, k_low = fast_two_sum(v.like(POW_FIRST[0]), v)
    k_low = k_low + (v_low + POW_FIRST[1])
    high, low = two_product(s, k)
    low = low + fma(s, k_low, s_low * k)
    high, rest = fast_two_sum(exponent(e, "f64") + more, high)
    high, low = fast_two_sum(high, rest + low)
    # times y, bounded as in f32: no |log2| is less than 2**-53 but that of 1
    y = clamp(y, -(2.0**65), 2.0**65)
    power, error = two_product(y, _log2_special(a, high))
    error = fma(y, low, error)
    bounded = clamp(power, -1100.0, 1100.0)
    error = where(abs(power) < 1100.0, error, 0.0)
    # 2**bounded as in exp.py
    half, scale = nearest(bounded, 0.5)
    r = fma(half, -2.0, bounded) + error
    return horner(r, [1.0, *POLYNOMIALS["exp2", "f64"]]) * scale * scale


def integer_pow(x: V, n: int) -> V:
    """x to the integer power n, by squaring and multiplying; for n < 0 the reciprocal of that."""
    if n == 0:
        return x.like(1)
    result, square, left = None, x, abs(n)
    while True:
        if left & 1:
            result = square if result is None else result * square
        left >>= 1
        if not left:
            break
        square = square * square
    assert result is not None
    return 1.0 / result if n < 0 else result


def sqrt(x: V) -> V:
    """The square root, correctly rounded."""
    return x.sqrt()


def rsqrt(x: V) -> V:
    """1 / sqrt(x)."""
    return 1.0 / x.sqrt()


def cbrt(x: V) -> V:
    """The cube root."""
    # |x| = M 8**k with M = m 2**j, j in {-1, 0, 1}. A polynomial and one step of a third-order iteration,
    # whose residual is accurate enough for the last rounding to be the only one of weight.
    a = abs(x)
    normal, more = lifted(a)
    m, e = split(normal)
    e = exponent(e, x.format.name) + more
    k, scale = nearest(e, 1 / 3)
    j = fma(k, -3.0, e)
    guess = horner(m, POLYNOMIALS["cbrt", x.format.name])
    low, high = j < 0.0, j > 0.0
    guess = guess * where(low, x.like(0.5 ** (1 / 3)), constants(high, x, 2.0 ** (1 / 3), 1.0))
    m = m * where(low, x.like(0.5), constants(high, x, 2.0, 1.0))
    h = fma(-guess * guess, guess, m) / m
    y = fma(guess * h, horner(h, [1 / 3, 2 / 9]), guess) * scale
    y = where(a < math.inf, where(a.eq(0.0), a, y), a)
    return y.copysign(x)
