"""Minimax polynomials for the elementary functions of the CPU compiler: derives `math/coefficients.py`.

python tests/compiler/cpu/fit_math.py > src/palladion/compiler/cpu/math/coefficients.py     # two minutes
python tests/compiler/cpu/fit_math.py erf log2                 # only these, to look at

Each `Fit` asks for P of a given degree that makes base(x) + factor(x) * P(variable(x)) the best approximation
of f(x) on an interval: its largest error times a weight, by default 1 / |f| (relative error), is the least
possible. The Remez exchange runs in 60-digit arithmetic on a grid (Muller, Elementary Functions, 3rd ed., ch.
3). Coefficients are then rounded to the format one by one from the lowest power up, the rest being fitted
again each time, so that rounding costs almost nothing. test_math.py checks that the file is what this script
makes.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import sys
from collections.abc import Callable, Iterable

import mpmath as mp
import numpy as np

mp.mp.dps = 60
Real = mp.mpf


@dataclasses.dataclass(frozen=True)
class Fit:
    """One approximation: see the module's text.

    kind: the format, "f32" or "f64"; low, high: the interval of x, where low = 0 means that everything is
    even or odd.
    """

    name: str
    kind: str
    f: Callable
    low: float
    high: float
    degree: int
    base: Callable = lambda x: mp.mpf(0)
    factor: Callable = lambda x: mp.mpf(1)
    variable: Callable = lambda x: x
    weight: Callable | None = None

    def size(self, x: Real) -> Real:
        """The weight of an error at x."""
        return 1 / abs(self.f(x)) if self.weight is None else self.weight(x)


def rounded(x: Real, kind: str) -> float:
    """x in the format, to nearest."""
    if kind == "f64":
        return float(x)
    return struct.unpack("f", struct.pack("f", float(x)))[0]


def evaluate(c: list, x: Real) -> Real:
    """c[0] + c[1] x + c[2] x**2 + …"""
    y = mp.mpf(0)
    for a in reversed(c):
        y = y * x + a
    return y


def remez(variable: list, target: list, weight: list, degree: int, start: list[int] | None = None) -> tuple:
    """The polynomial of best weighted approximation on a grid.

    Arguments: variable, target, weight: a number for each grid point; start: a guess of the extrema.
    Returns: the coefficients, the largest weighted error, and the extrema.
    """
    n, m = degree + 2, len(variable)
    points = start or [round((m - 1) * (1 - mp.cos(mp.pi * i / (n - 1))) / 2) for i in range(n)]
    best = None
    for _ in range(40):
        rows = mp.matrix(n, n)
        for r, i in enumerate(points):
            power = mp.mpf(1)
            for c in range(degree + 1):
                rows[r, c] = power * weight[i]
                power *= variable[i]
            rows[r, degree + 1] = (-1) ** r
        solved = mp.lu_solve(rows, mp.matrix([target[i] * weight[i] for i in points]))
        c, level = list(solved)[:-1], abs(solved[n - 1])
        errors = [(t - evaluate(c, v)) * w for v, t, w in zip(variable, target, weight)]
        worst = max(abs(e) for e in errors)
        if best is None or worst < best[1]:
            best = (c, worst, points)
        if worst <= level * mp.mpf("1.003"):
            break
        # One extremum a run of equal sign, then the best n consecutive ones.
        peaks: list[int] = []
        for i, e in enumerate(errors):
            if peaks and (e > 0) == (errors[peaks[-1]] > 0):
                if abs(e) > abs(errors[peaks[-1]]):
                    peaks[-1] = i
            else:
                peaks.append(i)
        if len(peaks) < n:
            break
        while len(peaks) > n:
            if len(peaks) == n + 1 or (len(peaks) - n) % 2:
                peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
            else:  # drop the smallest with its smaller neighbour, which keeps the signs alternating
                i = min(range(len(peaks)), key=lambda k: abs(errors[peaks[k]]))
                around = [k for k in (i - 1, i + 1) if 0 <= k < len(peaks)]
                j = min(around, key=lambda k: abs(errors[peaks[k]]))
                if i in (0, len(peaks) - 1):
                    peaks.pop(i)
                else:
                    for k in sorted((i, j), reverse=True):
                        peaks.pop(k)
        points = peaks
    assert best is not None
    return best


def solve(fit: Fit, density: int = 24) -> tuple[list[float], float]:
    """The rounded coefficients from the lowest power up, and the largest weighted error that they leave."""
    m = density * (fit.degree + 2)
    m += m % 2  # no grid point in the middle, where a symmetric interval has its zero
    low, high = mp.mpf(fit.low), mp.mpf(fit.high)
    steps = [(i + mp.mpf(1) / 2) / m for i in range(m)]
    if low:
        xs = [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * s) for s in steps]
    else:  # half of a symmetric interval
        xs = [high * mp.sin(mp.pi / 2 * s) for s in steps]
    v = [mp.mpf(fit.variable(x)) for x in xs]
    factor = [mp.mpf(fit.factor(x)) for x in xs]
    full = [(fit.f(x) - fit.base(x)) / g for x, g in zip(xs, factor)]
    scale = [abs(g) * fit.size(x) for x, g in zip(xs, factor)]
    target, weight, done, points = full, scale, [], None
    for degree in range(fit.degree, -1, -1):
        if degree == 0 and done:
            c = [remez(v, target, weight, 0)[0][0]]
        else:
            c, _, points = remez(v, target, weight, degree, points and points[: degree + 2])
        done.append(rounded(c[0], fit.kind))
        target = [(t - mp.mpf(done[-1])) / u for t, u in zip(target, v)]
        weight = [w * abs(u) for w, u in zip(weight, v)]
    return done, float(max(abs(t - evaluate(done, u)) * w for t, u, w in zip(full, v, scale)))


# ------------------------------------------------------------------------------------------------ what to fit
def one(x: Real) -> Real:
    """1, for a base or a weight (absolute error)."""
    return mp.mpf(1)


def same(x: Real) -> Real:
    """x."""
    return x


def power(n: int) -> Callable:
    """x**n."""
    return lambda x: x**n


def atanh_series(s: Real) -> Real:
    """log((1 + s) / (1 - s))."""
    return mp.log((1 + s) / (1 - s))


def erfcx(u: Real) -> Real:
    """exp(a**2) erfc(a) with u = 1 / (1 + a / 2)."""
    a = (1 / u - 1) * 2
    return mp.exp(a * a) * mp.erfc(a)


@functools.cache
def erf_inv_of_w(w: Real) -> Real:
    """erf_inv(x) / x with w = -log(1 - x**2)."""
    if w < mp.mpf(10) ** -20:
        return mp.sqrt(mp.pi) / 2
    x = mp.sqrt(-mp.expm1(-w))
    return mp.erfinv(x) / x


def stirling_rest(u: Real) -> Real:
    """What Stirling's formula lacks of log Gamma(z), times z; u = 1 / z."""
    z = 1 / u
    return (mp.loggamma(z) - ((z - mp.mpf(1) / 2) * mp.log(z) - z + mp.log(2 * mp.pi) / 2)) / u


LOG2_E = 1 / mp.log(2)
HALF_LN2 = mp.log(2) / 2 * mp.mpf("1.0003")  # a little more: the reduction rounds
# f32 reduces by a rounded 2/pi: at 2**20 that is off by 0.03.
QUARTER_PI = {"f32": mp.mpf("0.82"), "f64": mp.pi / 4 * mp.mpf("1.0002")}
DIGAMMA_ZERO = mp.findroot(mp.digamma, 1.46)
ODD = dict(base=same, factor=power(3), variable=power(2))  # x + x**3 P(x**2)


def fits() -> Iterable[Fit]:
    """All approximations, in the order of the file."""
    for kind, exp, exp2, expm1, sin in (("f32", 5, 6, 4, 2), ("f64", 11, 12, 9, 5)):
        yield Fit("exp", kind, mp.exp, -2 * HALF_LN2, 2 * HALF_LN2, exp, base=lambda x: 1 + x, factor=power(2))
        yield Fit("exp2", kind, lambda x: mp.power(2, x), -1.0001, 1.0001, exp2, base=one, factor=same)
        yield Fit("expm1", kind, mp.expm1, -HALF_LN2, HALF_LN2, expm1, base=same, factor=power(2))
        yield Fit("sin", kind, mp.sin, 0, QUARTER_PI[kind], sin, **ODD)
        yield Fit(
            "cos",
            kind,
            mp.cos,
            0,
            QUARTER_PI[kind],
            sin,
            base=lambda x: 1 - x * x / 2,
            factor=power(4),
            variable=power(2),
        )
    yield Fit("tan", "f32", mp.tan, 0, QUARTER_PI["f32"], 6, **ODD)
    yield Fit("log1p", "f32", mp.log1p, -0.3335, 0.3335, 7, base=lambda x: x - x * x / 2, factor=power(3))
    yield Fit("log1p", "f64", atanh_series, 0, 0.2002, 6, base=lambda x: 2 * x, factor=power(3), variable=power(2))
    yield Fit("log2_1p", "f32", lambda x: mp.log1p(x) * LOG2_E, -0.3335, 0.3335, 8, base=same, factor=same)
    yield from _of_inverses()
    yield from _of_powers()
    yield from _of_erf()
    yield from _of_gamma()


def _of_inverses() -> Iterable[Fit]:
    for kind, atan, asin, sinh in (("f32", 8, 5, 3), ("f64", 19, 13, 7)):
        yield Fit("atan", kind, mp.atan, 0, 1, atan, **ODD)
        yield Fit("asin", kind, mp.asin, 0, 0.5626, asin, **ODD)
        yield Fit("sinh", kind, mp.sinh, 0, 1, sinh, **ODD)
    yield Fit("tanh", "f32", mp.tanh, 0, 0.625, 4, **ODD)
    yield Fit("asinh", "f32", mp.asinh, 0, 1, 8, **ODD)
    yield Fit("atanh", "f32", mp.atanh, 0, 0.5, 5, **ODD)
    yield Fit("acosh", "f32", lambda t: mp.acosh(1 + t) / mp.sqrt(2 * t), 1e-12, 1, 6, base=one, factor=same)


def _of_powers() -> Iterable[Fit]:
    yield Fit("cbrt", "f32", mp.cbrt, 0.6666, 1.3334, 3)
    yield Fit("cbrt", "f64", mp.cbrt, 0.6666, 1.3334, 5)

    def log2(s: Real) -> Real:
        return atanh_series(s) * LOG2_E

    yield Fit("pow_log2", "f64", log2, 0, 0.2002, 5, factor=same, variable=power(2))
    yield Fit("pow_exp2", "f64", lambda x: mp.power(2, x), -0.50001, 0.50001, 6)
    yield Fit(
        "pow_log2_tail",
        "f64",
        log2,
        0,
        0.2002,
        6,
        base=lambda s: s * (2 + s * s * 2 / 3) * LOG2_E,
        factor=power(5),
        variable=power(2),
    )


def _of_erf() -> Iterable[Fit]:
    even = dict(base=same, factor=same, variable=power(2))
    yield Fit("erf_near", "f32", mp.erf, 0, 1.12, 6, **even)
    yield Fit("erf_near", "f64", mp.erf, 0, 1, 11, **even)
    yield Fit("erf_far", "f32", mp.erf, 1.119, 3.93, 12, base=one, variable=lambda x: x - 2.5, weight=one)
    yield Fit(
        "erf_far",
        "f64",
        lambda x: mp.log(mp.erfc(x)),
        0.99,
        5.96,
        17,
        factor=same,
        weight=lambda x: mp.erfc(x) / mp.erf(x),
    )
    for kind, last, degree in (("f32", 10.11, 8), ("f64", 27.31, 20)):
        low, high = 1 / (1 + mp.mpf(last) / 2), 1 / (1 + mp.mpf(0.2499))
        yield Fit("erfcx", kind, erfcx, low, high, degree, factor=same, variable=lambda u: u - 0.5)
    root, half = mp.sqrt(5) - 0.0001, mp.mpf(5) / 2

    def of_root(s: Real) -> Real:
        return erf_inv_of_w(s * s)

    yield Fit("erf_inv_low", "f32", erf_inv_of_w, 1e-30, 5, 9, base=one)
    yield Fit("erf_inv_high", "f32", of_root, root, 4.09, 9, base=lambda s: mp.mpf(2), variable=lambda s: s - 3)
    yield Fit("erf_inv_low", "f64", erf_inv_of_w, 1e-30, 5, 21, variable=lambda w: w - half)
    yield Fit("erf_inv_middle", "f64", of_root, root, 4.0001, 22, variable=lambda s: s - 3.25)
    yield Fit("erf_inv_high", "f64", of_root, 3.9999, 6.08, 18, variable=lambda s: s - 5)


def _of_gamma() -> Iterable[Fit]:
    def log_gamma(t: Real) -> Real:
        return mp.loggamma(2 + t)

    def digamma_rest(u: Real) -> Real:
        return (mp.log(1 / u) - u / 2 - mp.digamma(1 / u)) / u**2

    even = dict(variable=power(2))
    yield Fit("lgamma_near", "f64", log_gamma, -0.75, 0.25, 17, base=lambda t: t * (1 - mp.euler), factor=power(2))
    size = lambda u: u / abs(mp.loggamma(1 / u))
    yield Fit("lgamma_far", "f64", stirling_rest, 1e-8, 1 / mp.mpf(6.25), 5, weight=size, **even)
    size = lambda u: u * u / abs(mp.digamma(1 / u))
    yield Fit("digamma_far", "f64", digamma_rest, 1e-6, 1 / mp.mpf(7), 6, weight=size, **even)
    shift = dict(factor=lambda x: x - DIGAMMA_ZERO, variable=lambda x: x - 1.5)
    yield Fit("digamma_near", "f64", mp.digamma, 0.99999, 2.00001, 22, **shift)
    yield Fit("sinpi", "f64", lambda x: mp.sin(mp.pi * x), 0, 0.5, 8, factor=same, **even)
    yield Fit("cospi", "f64", lambda x: mp.cos(mp.pi * x), 0, 0.5, 8, base=one, factor=power(2), weight=one, **even)


# --------------------------------------------------------------------------------------------------- the file
def parts(x: Real, kind: str, count: int) -> tuple[float, ...]:
    """x as a sum of numbers of the format, each the nearest to what is left."""
    found = []
    for _ in range(count):
        found.append(rounded(x, kind))
        x -= mp.mpf(found[-1])
    return tuple(found)


def shown(x: float, kind: str) -> str:
    """The shortest decimal that rounds to x in the format."""
    return repr(float(str(np.float32(x)))) if kind == "f32" else repr(x)


def text() -> str:
    """The contents of coefficients.py."""
    lines = [HEADER, "# fmt: off", "POLYNOMIALS: dict[tuple[str, str], tuple[float, ...]] = {"]
    for fit in fits():
        c, error = solve(fit)
        lines.append(f'    ("{fit.name}", "{fit.kind}"): (  # {error:.1e}')
        items = [f"{shown(x, fit.kind)}," for x in c]
        lines += ["        " + " ".join(items[k : k + 4]) for k in range(0, len(items), 4)] + ["    ),"]
    lines += ["}", ""]
    for name, value in (("LN2", mp.log(2)), ("TWO_LN2", 2 * mp.log(2))):
        for k, part in enumerate(("HIGH", "LOW")):
            shorts = [f'"{kind}": {shown(parts(value, kind, 2)[k], kind)}' for kind in ("f32", "f64")]
            lines.append(f"{name}_{part} = {{{', '.join(shorts)}}}")
    with mp.workdps(500):
        halves = {kind: ", ".join(shown(p, kind) for p in parts(mp.pi / 2, kind, 3)) for kind in ("f32", "f64")}
        bits = int(mp.floor(2 / mp.pi * mp.mpf(2) ** (20 * 64)))
    lines += ["HALF_PI = {"] + [f'    "{kind}": ({three}),' for kind, three in halves.items()] + ["}"]
    for name, value in (
        ("POW_FIRST", 2 * LOG2_E),
        ("POW_SECOND", 2 * LOG2_E / 3),
        ("DIGAMMA_ZERO", DIGAMMA_ZERO),
    ):
        lines.append(f"{name} = {parts(value, 'f64', 2)}")
    words = [0] + [bits >> (64 * (19 - k)) & (2**64 - 1) for k in range(20)]
    words = [f"0x{w:016X}," for w in words]
    lines += ["TWO_OVER_PI_WORDS = ("] + ["    " + " ".join(words[k : k + 3]) for k in range(0, 21, 3)] + [")", ""]
    return "\n".join(lines)


HEADER = '''"""Coefficients of the elementary functions: made by tests/compiler/cpu/fit_math.py, which says of what.

POLYNOMIALS[name, format] are given from the lowest power up; the comment is the largest weighted error, that
is the relative one for most. The other numbers are parts of constants: x_HIGH + x_LOW, or the entries of a
tuple, add up to the constant in about twice (HALF_PI: three times) the precision of the format.
TWO_OVER_PI_WORDS are the bits of 2 / pi after the binary point, 64 a word, after a word of zeros.
"""
'''


if __name__ == "__main__":
    if wanted := sys.argv[1:]:
        for each in fits():
            if each.name in wanted:
                print(each.name, each.kind, *solve(each))
    else:
        print(text(), end="")
