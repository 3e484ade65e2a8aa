"""Rounding, remainders and the neighbourhood of a number: exact functions.

round_away (ties away from zero), round_even, floor, ceil, sign, is_finite, nextafter and rem.

rem is C's fmod, exact for all numbers. With q = round(r / y), r - q y is a floating-point number: a multiple
of the last place of y, and smaller than y or than half a unit of q times y. So each fma takes away the
leading 23 (f64: 52) bits of the quotient without error, and a few steps at most leave a remainder below y
(Muller et al., Handbook of Floating-Point Arithmetic, 2nd ed., on exact remainders). The loop
ends when no lane needs another step.
"""

from __future__ import annotations

import math

from palladion.compiler.cpu import builder
from palladion.compiler.cpu.math.core import V, anywhere, fma, unordered, where


def floor(x: V) -> V:
    """The largest integer not above x."""
    return x.floor()


def ceil(x: V) -> V:
    """The smallest integer not below x."""
    return x.ceil()


def round_even(x: V) -> V:
    """The nearest integer, ties to even."""
    return x.rint()


def round_away(x: V) -> V:
    """The nearest integer, ties away from zero."""
    # One half less an ulp: with 0.5 the sum would round up for the number just below 0.5.
    half = 0.5 - x.format.epsilon / 4
    return (x + x.like(half).copysign(x)).trunc()


def sign(x: V) -> V:
    """-1, 0 or 1; zeros keep their sign, NaN stays NaN."""
    return where(x > 0.0, 1.0, where(x < 0.0, -1.0, x))


def is_finite(x: V) -> V:
    """Lanes (i1) that are neither infinite nor NaN."""
    return abs(x) < math.inf


def nextafter(x: V, y: V) -> V:
    """The number next to x in the direction of y; y itself if they are equal."""
    bits = x.bits
    # Bits grow with the magnitude. From zero, the smallest number of y's sign.
    away = (x < y) ^ (bits < 0)
    step = where(away, bits.like(1), -1)
    moved = where(x.eq(0.0), x.like(0.0).copysign(y).bits | 1, bits + step).real
    return where(unordered(x, y), x + y, where(x.eq(y), y, moved))


def rem(x: V, y: V) -> V:
    """The remainder of x / y with the quotient truncated, of x's sign. NaN for infinite x or y = 0."""
    b, d = x.b, abs(y)
    left = fma(-(x / d).rint(), d, x)
    more = anywhere(~(abs(left) < d))
    (merged,) = builder.branch(b, more.v, lambda: [_long_division(x, d).v], lambda: [left.v], likely=False)
    left = V(b, merged)
    # The quotients were rounded to nearest: a remainder of the other sign is one d off. Zero takes the sign
    # of x.
    fixed = where((left.bits ^ x.bits) < 0, d - abs(left), abs(left))
    fixed = where(left.eq(0.0), 0.0, fixed)
    return where(abs(x) < d, abs(x), fixed).copysign(x)


def _long_division(x: V, d: V) -> V:
    """x less multiples of d > 0 until no lane is larger than d."""
    b, (near, far) = x.b, ((60, 90) if x.format.bits == 32 else (512, 600))
    before, (body, after) = b.block, builder.blocks(b, "rem", "rem.done")
    b.branch(body)
    b.position_at_end(body)
    phi = b.phi(x.v.type)
    r = V(b, phi)
    # Where r / d could overflow, divide by a multiple of d first.
    unit = d
    for power in (near, far):
        unit = where(abs(r) * 2.0**-power > unit, unit * 2.0**power, unit)
    left = fma(-(r / unit).rint(), unit, r)
    phi.add_incoming(x.v, before)
    phi.add_incoming(left.v, b.block)
    b.cbranch(anywhere(abs(left) >= d).v, body, after)
    b.position_at_end(after)
    return left
