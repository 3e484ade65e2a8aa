"""Floats: fused multiply-add, minima, functions, and the rounding modes that NumPy has not.

Everything that PTX defines exactly is exact to the last bit; approximate functions are computed in double and rounded.
A result that has to be rounded once is first found in double, "rounded to odd" (its last bit is set where it is not
exact), from which any rounding to a narrower format gives what the exact number would (Boldo, Melquiond 2008).
Source: PTX ISA manual, "Floating Point Instructions", "Half Precision Floating Point Instructions"; facts file 9.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from palladion.emulator.lane_types import NAN, Array, bf, f2, f4, f8, i8, u8

_HALF = u8(0x10000000)
_LOW28, _LOW29 = u8(0x0FFFFFFF), u8(0x1FFFFFFF)
_SPLIT = 134217729.0


# --- sums and products with what they lack ------------------------------------------------------------------
def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """A double sum and its error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """A double product and its error (Dekker); for numbers far from overflow and underflow."""
    p = a * b
    x = _SPLIT * a
    x = x - (x - a)
    y = _SPLIT * b
    y = y - (y - b)
    return p, ((x * y - p) + x * (b - y) + (a - x) * y) + (a - x) * (b - y)


def odd(s: Array, error: Array) -> Array:
    """Doubles rounded to odd: `s` is the nearest one, and the exact number is `s + error`."""
    bits = s.view(i8)
    move = np.where((error > 0) == (s > 0), i8(1), i8(-1))
    change = (error != 0) & (bits & 1 == 0) & np.isfinite(s)
    return (bits + np.where(change, move, i8(0))).view(f8)


# --- fused multiply-add -------------------------------------------------------------------------------------
def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once."""
    if a.dtype == f8:
        return fma_double(a, b, c)
    p, z = a.astype(f8) * b.astype(f8), c.astype(f8)  # the product is exact
    s = p + z
    if a.dtype == f2:  # 53 bits are enough: where the sum is not exact, the halves are no ties
        return s.astype(f2)
    if a.dtype == bf:
        return from_double(odd(*two_sum(p, z)), bf, "rn")
    bits = s.view(u8)
    if ((bits & _LOW28) == 0).any():  # perhaps half between two float32 numbers, normal or subnormal
        tie = ((bits & _LOW29) == _HALF) | ((np.abs(s) < 2.0**-125) & (s != 0))
        if tie.any():
            s = odd(*two_sum(p, z))
    return s.astype(f4)


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """The same of doubles, whose products are not exact (Boldo, Melquiond 2008)."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = two_product(a, b)
    t, t_low = two_sum(c, low)
    v, v_low = two_sum(high, t)
    found = v + odd(*two_sum(t_low, v_low))
    sizes = np.abs(np.stack([a, b, a * b, c]))
    good = ((sizes > 2.0**-450) & (sizes < 2.0**450)).all(0)
    if good.all():
        return found
    flat = [np.ravel(x).tolist() for x in (a, b, c)]
    exact = [_fma_exact(x, y, z) for x, y, z in zip(*flat, strict=True)]
    return np.where(good, found, np.array(exact).reshape(np.shape(a)))


def _fma_exact(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)) or a == 0 or b == 0:
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:  # of two signs: +0
        return float(np.float64(a) * np.float64(b) + np.float64(c)) if c == 0 else 0.0
    return _nearest(exact)


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf  # copysign would make a float of it


# --- rounding modes -----------------------------------------------------------------------------------------
def from_double(x: Array, dtype: Any, mode: str) -> Array:
    """Doubles (rounded to odd, if they are not exact) as a narrower float type; mode rn, rz, rm, rp or rna."""
    if dtype == bf:
        near = x.astype(f4)
        # bfloat16 from float32 that is rounded to odd in its turn
        wide = near.astype(f8)
        bits = near.view(np.uint32)
        inexact = (wide != x) & np.isfinite(x) & np.isfinite(near)
        toward = np.where(np.abs(wide) > np.abs(x), bits - np.uint32(1), bits)
        single = np.where(inexact, toward | np.uint32(1), bits).astype(np.uint32).view(f4)
        over = np.isinf(near) & np.isfinite(x)
        single = np.where(over, np.copysign(f4(3.4028235e38), x.astype(f4)), single).astype(f4)
        got = single.astype(bf)
    else:
        got = x.astype(dtype)
    return got if mode in ("", "rn") else directed(x, got, mode)


def directed(exact: Array, near: Array, mode: str) -> Array:
    """The neighbour of the nearest numbers that the rounding mode wants.

    Arguments:
      exact: doubles. near: them, rounded to the nearest number of a narrower type.
    """
    got = near.astype(f8)
    if mode == "rz":
        wrong, up = np.abs(got) > np.abs(exact), np.signbit(got)
    elif mode == "rm":
        wrong, up = got > exact, np.zeros(np.shape(got), bool)
    elif mode == "rp":
        wrong, up = got < exact, np.ones(np.shape(got), bool)
    else:  # rna: of two that are equally near the one away from zero
        return _ties_away(exact, near)
    return np.where(wrong, _neighbour(near, up), near).astype(near.dtype)


def _neighbour(x: Array, up: Array) -> Array:
    """The next number up or down."""
    raw = {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    bits = x.view(raw)
    one = raw(1)
    step = np.where(np.signbit(x) == up, bits - one, bits + one)
    least = np.where(up, one, one | raw(1 << (8 * x.dtype.itemsize - 1)))
    return np.where(x == 0, least, step).astype(raw).view(x.dtype)


def _ties_away(exact: Array, near: Array) -> Array:
    larger = _neighbour(near, ~np.signbit(exact))
    a, b = np.abs(near.astype(f8)), np.abs(larger.astype(f8))
    tie = (np.abs(exact) - a == b - np.abs(exact)) & np.isfinite(b)
    return np.where(tie, larger, near).astype(near.dtype)


def rounded(name: str, mode: str, *given: Array) -> Array:
    """`add`, `sub`, `mul`, `fma`, `div`, `rcp` and `sqrt` with the roundings rz, rm and rp."""
    if name == "rcp":
        name, given = "div", (np.ones_like(given[0]), *given)
    if name == "sub":
        name, given = "add", (given[0], -given[1])
    dtype = given[0].dtype
    if dtype == f8:
        return _rounded_double(name, mode, *np.broadcast_arrays(*given))
    wide = [x.astype(f8) for x in given]
    if name == "add":
        exact = odd(*two_sum(wide[0], wide[1]))
    elif name == "mul":
        exact = wide[0] * wide[1]
    elif name == "fma":
        exact = odd(*two_sum(wide[0] * wide[1], wide[2]))
    elif name == "div":
        q = wide[0] / wide[1]
        p, error = two_product(q, wide[1])
        rest = ((wide[0] - p) - error) * np.where(wide[1] < 0, -1.0, 1.0)
        exact = odd(q, np.where(np.isfinite(rest), rest, 0))
    else:
        q = np.sqrt(wide[0])
        p, error = two_product(q, q)
        exact = odd(q, np.where(np.isfinite(p), (wide[0] - p) - error, 0))
    found = from_double(exact, dtype, mode)
    if mode == "rm" and name in ("add", "fma"):  # x - x is -0
        zero = (found == 0) & (exact == 0)
        same = np.signbit(wide[0] if name == "add" else wide[0] * wide[1]) == np.signbit(wide[-1])
        found = np.where(zero & ~same, dtype.type(-0.0), found).astype(dtype)
    return found


_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}


def _rounded_double(name: str, mode: str, *given: Array) -> Array:
    """Doubles with a rounding mode, one by one in exact fractions."""
    near = {"add": np.add, "mul": np.multiply, "div": np.divide, "fma": fma_double, "sqrt": np.sqrt}[name](*given)
    result = np.array(near, f8)
    for k in np.ndindex(result.shape):
        values = [float(x[k]) for x in given]
        got = float(result[k])
        if not all(map(math.isfinite, values)) or math.isnan(got) or (name == "div" and values[1] == 0):
            continue
        if name == "sqrt":
            gap = -1 if math.isinf(got) else Fraction(values[0]) - Fraction(got) ** 2
        else:
            exact = _EXACT[name](*map(Fraction, values))
            gap = math.copysign(1, -got) if math.isinf(got) else exact - Fraction(got)
            if exact == 0 and name in ("add", "fma") and mode == "rm" and (got == 0) and not math.copysign(1, got) < 0:
                first = values[0] if name == "add" else values[0] * values[1]
                result[k] = -0.0 if math.copysign(1, first) != math.copysign(1, values[-1]) else got
        step = {"rz": gap != 0 and (gap < 0) == (math.copysign(1, got) > 0), "rm": gap < 0, "rp": gap > 0}[mode]
        if step:
            result[k] = math.nextafter(got, {"rz": 0.0, "rm": -math.inf, "rp": math.inf}[mode])
    return result


# --- minima, clamps, functions ------------------------------------------------------------------------------
def minimum(a: Array, b: Array) -> Array:
    """Of integers; of floats a number before a NaN, and -0 below +0."""
    return np.minimum(a, b) if a.dtype.kind in "iu" else _extreme(a, b, np.fmin, np.logical_or)


def maximum(a: Array, b: Array) -> Array:
    return np.maximum(a, b) if a.dtype.kind in "iu" else _extreme(a, b, np.fmax, np.logical_and)


def _extreme(a: Array, b: Array, function: Any, negative: Any) -> Array:
    if a.dtype == bf:
        return _extreme(a.astype(f4), b.astype(f4), function, negative).astype(bf)
    found = function(a, b)
    zero = found == 0
    if zero.any():
        zero = zero & (a == 0) & (b == 0)
        sign = negative(np.signbit(a), np.signbit(b))
        found = np.where(zero, np.where(sign, a.dtype.type(-0.0), a.dtype.type(0)), found)
    return found


def with_nan(function: Callable) -> Callable:
    """`min.NaN`, `max.NaN`: a NaN gives NaN."""

    def result(a: Array, b: Array) -> Array:
        found = function(a, b)
        return np.where(np.isnan(a) | np.isnan(b), NAN[found.dtype], found)

    return result


def with_sign(function: Callable) -> Callable:
    """`.xorsign.abs`: of the magnitudes, with the product of the signs."""

    def result(a: Array, b: Array) -> Array:
        return np.copysign(
            function(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype)
        )

    return result


def saturate(x: Array) -> Array:
    """Clamped to [0, 1]; NaN gives 0."""
    kind = x.dtype.type
    return np.where(x > kind(0), np.where(x < kind(1), x, kind(1)), kind(0))


def relu(x: Array) -> Array:
    """Negative numbers as zero; NaN stays."""
    return np.where((x < 0) | (x == 0), x.dtype.type(0), x)


def _in_double(function: Callable) -> Callable[[Array], Array]:
    return lambda x: function(x.astype(f8)).astype(x.dtype)


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": lambda x: -x,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rcp": lambda x: x.dtype.type(1) / x,
    "rsqrt": _in_double(lambda x: 1 / np.sqrt(x)),
    "ex2": _in_double(np.exp2),
    "lg2": _in_double(np.log2),
    "sin": _in_double(np.sin),
    "cos": _in_double(np.cos),
    "tanh": _in_double(np.tanh),
}
