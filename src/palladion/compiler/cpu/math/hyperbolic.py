"""Hyperbolic functions and their inverses: tanh, sinh, cosh, asinh, acosh, atanh.

All by exponentials and logarithms of |x|. In f32, where two ulp are the aim, polynomials take over near zero
for the functions whose formula cancels or adds up roundings there; in f64 the formulas with log1p do.

Sources: fdlibm (Sun Microsystems, 1993), s_tanh.c, s_asinh.c, e_acosh.c and e_atanh.c, for the formulas;
Muller, Elementary Functions, 3rd ed. Coefficients: our own, by Remez (coefficients.py).
"""

from __future__ import annotations

import math

from palladion.compiler.cpu.math.coefficients import POLYNOMIALS
from palladion.compiler.cpu.math.core import V, clamp, fast_two_sum, fma, horner, where
from palladion.compiler.cpu.math.exp import expm1_reduced, reduce
from palladion.compiler.cpu.math.log import log1p_positive, log_positive


def tanh(x: V) -> V:
    """Hyperbolic tangent."""
    # (1 - e) / (1 + e) with e = exp(-2 |x|) = s (1 + p): numerator and denominator from p, rounded once each.
    a = abs(x)
    r, s = reduce(clamp(a * -2.0, -60.0, None))
    p = expm1_reduced(r)
    y = fma(-s, p, 1.0 - s) / fma(s, p, 1.0 + s)
    if x.format.bits == 32:
        y = where(a < 0.625, _odd("tanh", a), y)
    return y.copysign(x)


def _half_exp(a: V) -> V:
    """exp(a) / 2 for a >= 0, which overflows only where sinh and cosh do."""
    # By quarters: 2**n itself may be beyond the largest number.
    r, s = reduce(clamp(a, None, 90.0 if a.format.bits == 32 else 711.0), -2)
    return horner(r, [1.0, 1.0, *POLYNOMIALS["expm1", a.format.name]]) * s * 2.0


def sinh(x: V) -> V:
    """Hyperbolic sine."""
    a = abs(x)
    h = _half_exp(a)
    large = h - 0.25 / h
    return where(a < 1.0, _odd("sinh", a), large).copysign(x)


def cosh(x: V) -> V:
    """Hyperbolic cosine."""
    h = _half_exp(abs(x))
    return h + 0.25 / h


def _odd(name: str, x: V) -> V:
    """x + x**3 P(x**2)."""
    z = x * x
    return fma(x * z, horner(z, POLYNOMIALS[name, x.format.name]), x)


def asinh(x: V) -> V:
    """Inverse hyperbolic sine."""
    a = abs(x)
    huge = a > 1 / x.format.epsilon  # there asinh(a) = log(2 a)
    more = where(huge, x.like(1.0), 0.0)
    root = fma(a, a, 1.0).sqrt()
    if x.format.bits == 32:
        # The rounding of the sum, times the derivative 1 / (a + root) = root - a.
        total, low = fast_two_sum(root, a)
        large = log_positive(where(huge, a, total), more, where(huge, 0.0, low * (root - a)))
        y = where(a < 1.0, _odd("asinh", a), large)
    else:
        y = log1p_positive(where(huge, a, a + a * a / (root + 1.0)), more)
        y = where(a < x.format.epsilon, a, y)
    return where(a < math.inf, y, a).copysign(x)


def acosh(x: V) -> V:
    """Inverse hyperbolic cosine; NaN below 1."""
    t = x - 1.0
    huge = x > 1 / x.format.epsilon
    more = where(huge, x.like(1.0), 0.0)
    if x.format.bits == 32:
        root = fma(x, x, -1.0).sqrt()
        total, low = fast_two_sum(x, root)
        large = log_positive(where(huge, x, total), more, where(huge, 0.0, low * (x - root)))
        near = (t + t).sqrt()
        near = fma(near, t * horner(t, POLYNOMIALS["acosh", "f32"]), near)
        y = where(x < 2.0, near, large)
    else:
        y = log1p_positive(where(huge, x, t + fma(t, t, t + t).sqrt()), more)
    y = where(x < math.inf, y, x)
    return where(x < 1.0, math.nan, y)


def atanh(x: V) -> V:
    """Inverse hyperbolic tangent; NaN outside [-1, 1]."""
    a = abs(x)
    if x.format.bits == 32:
        y = where(a < 0.5, _odd("atanh", a), log_positive((1.0 + a) / (1.0 - a)) * 0.5)
    else:
        y = log1p_positive((a + a) / (1.0 - a)) * 0.5
        y = where(a < x.format.epsilon, a, y)
    y = where(a < 1.0, y, where(a.eq(1.0), a.like(math.inf), math.nan))
    return y.copysign(x)
