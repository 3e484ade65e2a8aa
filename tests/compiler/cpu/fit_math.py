"""Minimax polynomials for the elementary functions of the CPU compiler: derives `math/coefficients.py`.

    python tests/compiler/cpu/fit_math.py            # all, printed as the file
    python tests/compiler/cpu/fit_math.py exp erf    # those whose name starts so, with their errors

Each `Fit` asks for P of a given degree that makes base(x) + factor(x) * P(variable(x)) the best approximation of f(x)
on an interval, in the sense of the largest error times a weight (usually 1/f: relative error). The Remez exchange runs
in 60-digit arithmetic on a grid (Muller, Elementary Functions, 3rd ed., ch. 3). Coefficients are then rounded to the
format one by one from the lowest power up, the rest being fitted again each time, so that rounding costs almost nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 60
Real = mp.mpf


@dataclasses.dataclass(frozen=True)
class Fit:
    """One approximation: see the module's text. `kind` is the format, "f32" or "f64"."""

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
    note: str = ""

    def size(self, x: Real) -> Real:
        """The weight of an error at x."""
        return 1 / abs(self.f(x)) if self.weight is None else self.weight(x)


def rounded(x: Real, kind: str) -> float:
    """x in the format, to nearest."""
    if kind == "f64":
        return float(x)
    return struct.unpack("f", struct.pack("f", float(x)))[0]


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
        errors = [(t - mp.polyval(c[::-1], v)) * w for v, t, w in zip(variable, target, weight)]
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
    return done, float(max(abs(t - mp.polyval(done[::-1], u)) * w for t, u, w in zip(full, v, scale)))
