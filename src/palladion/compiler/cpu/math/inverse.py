"""Inverse trigonometric functions: atan, atan2, asin, acos.

atan reduces |x| > 1 by pi/2 - atan(1 / x); asin reduces |x| > 9/16 by pi/2 - 2 asin(sqrt((1 - x) / 2)), a
threshold a little above one half so that twice the asin stays in the binade where its rounding is half as
large. Multiples of pi are subtracted in two parts.

Sources: fdlibm (Sun Microsystems, 1993), s_atan.c and e_asin.c, for the reductions; Muller, Elementary
Functions, 3rd ed. Coefficients: our own, by Remez (coefficients.py).
"""

from __future__ import annotations

import math

from palladion.compiler.cpu.math.coefficients import HALF_PI, POLYNOMIALS
from palladion.compiler.cpu.math.core import V, fma, horner, larger, smaller, unordered, where, xor_sign

THRESHOLD = 0.5625


def _odd(name: str, t: V, z: V) -> V:
    """t + t**3 P(t**2); z is t * t."""
    return fma(t * z, horner(z, POLYNOMIALS[name, t.format.name]), t)


def _half_pi(t: V, y: V, times: float = 1.0) -> V:
    """times * pi/2 - y."""
    high, low, _ = HALF_PI[t.format.name]
    return times * high - (y - times * low)


def atan(x: V) -> V:
    """Inverse tangent, from -pi/2 to pi/2."""
    a = abs(x)
    big = a > 1.0
    t = where(big, 1.0 / a, a)
    y = _odd("atan", t, t * t)
    return where(big, _half_pi(t, y), y).copysign(x)


def atan2(y: V, x: V) -> V:
    """The angle of the point (x, y), from -pi to pi; signs of zeros and infinities as in C99."""
    ax, ay = abs(x), abs(y)
    low, high = smaller(ax, ay), larger(ax, ay)
    t = low / high
    t = where(low.eq(math.inf), 1.0, t)  # both infinite
    t = where(high.eq(0.0), high, t)  # both zero
    angle = _odd("atan", t, t * t)
    angle = where(ay > ax, _half_pi(t, angle), angle)
    angle = where(x.bits < 0, _half_pi(t, angle, 2.0), angle)
    return where(unordered(x, y), x + y, angle.copysign(y))


def _asin_parts(x: V) -> tuple[V, V]:
    """Whether |x| is above the threshold, and asin(sqrt((1 - |x|) / 2)) if so, else asin(|x|)."""
    a = abs(x)
    big = a > THRESHOLD
    z = where(big, fma(a, -0.5, 0.5), a * a)
    s = where(big, z.sqrt(), a)
    return big, _odd("asin", s, z)


def asin(x: V) -> V:
    """Inverse sine, from -pi/2 to pi/2; NaN outside [-1, 1]."""
    big, y = _asin_parts(x)
    return where(big, _half_pi(y, y + y), y).copysign(x)


def acos(x: V) -> V:
    """Inverse cosine, from 0 to pi; NaN outside [-1, 1]."""
    big, y = _asin_parts(x)
    high, low, _ = HALF_PI[x.format.name]
    # Small: pi/2 - asin(x). Big: 2 y, or pi - 2 y where x is negative.
    negative = x < 0.0
    twice = y + y
    of_big = where(negative, _half_pi(y, twice, 2.0), twice)
    return where(big, of_big, high - (xor_sign(y, x) - low))
