"""log |Gamma| and its derivative: lgamma, digamma. In f64 throughout; f32 is widened.

Both shift the argument into one interval where a polynomial keeps the zeros of the function: lgamma into
[1.25, 2.25) with the factor (x - 2), digamma into [1, 2) with the factor (x - x0). The former shifts by the
logarithm of a product; for 1/4 < x < 5/4 that leaves -(1 - 0.42) t plus smaller terms, t = x - 1, so that the
zero at 1 is kept, too. From 6.25 and 7 on, Stirling's series with minimax coefficients. Negative arguments by
reflection, with sin(pi x) from the distance to the nearest integer.

Near the zeros of either function on the negative axis the error is a few ulp of the terms that cancel, not of
the result.

Source: Abramowitz and Stegun, 6.1 and 6.3. Coefficients: our own, by Remez (coefficients.py).
"""

from __future__ import annotations

import math

from palladion.compiler.cpu.math.coefficients import DIGAMMA_ZERO, POLYNOMIALS
from palladion.compiler.cpu.math.core import V, fma, horner, where
from palladion.compiler.cpu.math.log import log, log_positive


def lgamma(x: V) -> V:
    """log |Gamma(x)|; infinite at zero and the negative integers."""
    return _lgamma(x) if x.format.bits == 64 else _lgamma(x.f64()).f32()


def digamma(x: V) -> V:
    """The derivative of lgamma; -inf at zero and NaN at the negative integers."""
    return _digamma(x) if x.format.bits == 64 else _digamma(x.f64()).f32()


def _polynomial(name: str, x: V) -> V:
    return horner(x, POLYNOMIALS[name, "f64"])


def _sin_pi(r: V) -> V:
    """sin(pi r) for |r| <= 1/2."""
    return r * _polynomial("sinpi", r * r)


def _lgamma(x: V) -> V:
    z = abs(x)
    # z = 2 + t, the product of what the shift passes, and the sign of its logarithm.
    tiny, small, large = z < 0.25, z < 1.25, z >= 6.25
    t = where(tiny, z, where(small, z - 1.0, z - 2.0))
    product = where(tiny, fma(z, z, z), where(small, z, 1.0))
    for step in (1.0, 2.0, 3.0, 4.0):
        passed = z >= step + 1.25
        product = where(passed, product * (z - step), product)
        t = where(passed, z - (step + 2.0), t)
    near = fma(t * t, _polynomial("lgamma_near", t), t * (1 - 0.57721566490153286))
    logarithm = log(where(large, z, product))
    u = 1.0 / z
    tail = fma(u, _polynomial("lgamma_far", u * u), math.log(2 * math.pi) / 2 - 0.5)
    far = fma(z - 0.5, logarithm - 1.0, tail)
    y = where(large, far, near + where(small, -logarithm, logarithm))
    y = where(z < math.inf, y, z)  # not inf - inf
    # log |Gamma(-z)| = log(pi / (z |sin pi z|)) - log |Gamma(z)|. Not for tiny z, where the two sides hardly
    # differ.
    sine = abs(_sin_pi(z - z.rint()))
    reflected = where(sine > 0.0, -log(z * sine * (1 / math.pi)) - y, math.inf)
    return where(x < -(2.0**-60), reflected, y)


def _digamma(x: V) -> V:
    negative = x < 0.0
    z = where(negative, 1.0 - x, abs(x))
    # z = t plus a shift, 1 <= t < 2; the sum of the reciprocals that it passes is n / d.
    small = z < 1.0
    t = where(small, z + 1.0, z)
    n, d = where(small, z.like(-1.0), 0.0), where(small, z, 1.0)
    for step in (1.0, 2.0, 3.0, 4.0, 5.0):
        passed, factor = z >= step + 1.0, z - step
        t = where(passed, factor, t)
        n = where(passed, fma(n, factor, d), n)
        d = where(passed, d * factor, d)
    near = ((t - DIGAMMA_ZERO[0]) - DIGAMMA_ZERO[1]) * _polynomial("digamma_near", t - 1.5) + n / d
    u = 1.0 / z
    w = u * u
    far = log_positive(z) - fma(w, _polynomial("digamma_far", w), u * 0.5)
    y = where(z < 7.0, near, where(z < math.inf, far, z))
    # psi(x) = psi(1 - x) - pi cot(pi x)
    r = x - x.rint()
    cotangent = math.pi * fma(r * r, _polynomial("cospi", r * r), 1.0) / _sin_pi(r)
    reflected = where(r.eq(0.0), math.nan, y - cotangent)
    return where(negative, reflected, y)
