"""Trigonometric functions: sin, cos and tan.

The sign of x is set aside first: sin and tan are odd, so that signed zeros come out right by themselves. Then
x = q pi/2 + r (reduction.py), and a polynomial of r**2 for sin r or cos r, or both; q says which of them and
with which sign.

Source: Muller, Elementary Functions, 3rd ed. Coefficients: our own, by Remez
(coefficients.py).
"""

from __future__ import annotations

from palladion.compiler.cpu.math.coefficients import POLYNOMIALS
from palladion.compiler.cpu.math.core import V, fma, horner, where, xor_sign
from palladion.compiler.cpu.math.reduction import reduced


def sin_reduced(r: V, z: V) -> V:
    """sin(r) for |r| <= pi/4; z is r * r."""
    return fma(r * z, horner(z, POLYNOMIALS["sin", r.format.name]), r)


def cos_reduced(z: V) -> V:
    """cos(r) for |r| <= pi/4; z is r * r."""
    return horner(z, [1.0, -0.5, *POLYNOMIALS["cos", z.format.name]])


def _either(r: V, q: V) -> V:
    """sin(r + q pi/2)."""
    z = r * r
    y = where((q & 1).eq(0), sin_reduced(r, z), cos_reduced(z))
    return xor_sign(y, q << (r.format.bits - 2))


def sin(x: V) -> V:
    """Sine of x in radians."""
    q, r = reduced(abs(x))
    return xor_sign(_either(r, q), x)


def cos(x: V) -> V:
    """Cosine of x in radians."""
    q, r = reduced(abs(x))
    return _either(r, q + 1)


def tan(x: V) -> V:
    """Tangent of x in radians."""
    if x.format.bits == 64:
        q, r = reduced(abs(x))
        z = r * r
        s, c = sin_reduced(r, z), cos_reduced(z)
        even = (q & 1).eq(0)
        return xor_sign(where(even, s, c) / where(even, c, -s), x)
    # tan(r + low) = r + (r**3 P + low (1 + tan(r)**2)): the last sum is the only rounding of weight.
    q, r, low = reduced(abs(x), pair=True)
    z = r * r
    cube, p = z * r, horner(z, POLYNOMIALS["tan", "f32"])
    y = fma(cube, p, r)
    y = r + fma(cube, p, fma(y * y, low, low))
    y = where((q & 1).eq(0), y, -1.0 / y)
    return xor_sign(y, x)
