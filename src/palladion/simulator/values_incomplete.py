"""Incomplete gamma and beta functions, zeta, polygamma and Bessel functions, of float64 arrays.

Series and continued fractions are run until every element has converged.

Sources: Abramowitz and Stegun 6.5.29 and 6.5.31 (gamma), 26.5.8 (beta), 9.6.10 and 9.7.1 (Bessel), 6.4.10
(polygamma), 23.2.5 with the formula of Euler and Maclaurin (zeta); the continued fractions by Lentz's method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from palladion.simulator.values_special import digamma, lgamma

Array = np.ndarray

_TINY = 1e-300
_STEPS = 20000  # enough for parameters to a million


def _converged(change: Array, total: Array) -> bool:
    with np.errstate(all="ignore"):
        return not (np.abs(change) > 1e-16 * np.abs(total)).any()


# --- continued fractions ------------------------------------------------------------------------------------------
def _lentz(first: Array, terms: Iterator[tuple[Array, Array]]) -> Array:
    """first + a1/(b1 + a2/(b2 + …)) for terms (a, b)."""
    value = np.where(first == 0, _TINY, first)
    c, d = np.array(value), np.zeros_like(value)
    for a, b in terms:
        d = b + a * d
        d = 1 / np.where(d == 0, _TINY, d)
        c = b + a / c
        c = np.where(c == 0, _TINY, c)
        value = value * c * d
        if not (np.abs(c * d - 1) > 1e-15).any():
            break
    return value


def _gamma_series(a: Array, x: Array) -> Array:
    """The lower function P(a, x) for x < a + 1."""
    term = np.ones_like(x)
    total, n = np.array(term), np.array(a)
    for _ in range(_STEPS):
        n = n + 1
        term = term * x / n
        total = total + term
        if _converged(term, total):
            break
    return total * np.exp(a * np.log(x) - x - lgamma(a + 1))


def _gamma_fraction(a: Array, x: Array) -> Array:
    """The upper function Q(a, x) for x >= a + 1."""

    def terms():
        for i in range(1, _STEPS):
            yield -i * (i - a), x + 2 * i + 1 - a

    return np.exp(a * np.log(x) - x - lgamma(a)) / _lentz(x + 1 - a, terms())


def _gamma(a: Array, x: Array, upper: bool) -> Array:
    inside = (a > 0) & (x > 0) & np.isfinite(x) & np.isfinite(a)
    series = inside & (x < a + 1)
    lower = _gamma_series(np.where(series, a, 1.0), np.where(series, x, 0.5))
    rest = _gamma_fraction(np.where(inside & ~series, a, 1.0), np.where(inside & ~series, x, 3.0))
    result = np.where(series, 1 - lower if upper else lower, rest if upper else 1 - rest)
    ends = np.where(x == 0, float(upper), np.where(x == np.inf, float(not upper), np.nan))
    return np.where(inside, result, np.where(a > 0, ends, np.nan))


def igamma(a: Array, x: Array) -> Array:
    """The regularised lower incomplete gamma function P(a, x)."""
    return _gamma(a, x, False)


def igammac(a: Array, x: Array) -> Array:
    """The regularised upper incomplete gamma function Q(a, x)."""
    return _gamma(a, x, True)


def betainc(a: Array, b: Array, x: Array) -> Array:
    """The regularised incomplete beta function I_x(a, b)."""
    inside = (a > 0) & (b > 0) & (x > 0) & (x < 1)
    p, q, t = np.where(inside, a, 1.0), np.where(inside, b, 1.0), np.where(inside, x, 0.5)
    swap = t > (p + 1) / (p + q + 2)
    p, q, t = np.where(swap, q, p), np.where(swap, p, q), np.where(swap, 1 - t, t)

    def terms():
        one = np.ones_like(t)
        for m in range(1, _STEPS):
            half = m // 2
            if m % 2:
                top = -(p + half) * (p + q + half) * t / ((p + 2 * half) * (p + 2 * half + 1))
            else:
                top = half * (q - half) * t / ((p + 2 * half - 1) * (p + 2 * half))
            yield top, one

    front = np.exp(p * np.log(t) + q * np.log1p(-t) + lgamma(p + q) - lgamma(p) - lgamma(q)) / p
    result = front / _lentz(np.ones_like(t), terms())
    result = np.where(swap, 1 - result, result)
    ends = np.where(x == 0, 0.0, np.where(x == 1, 1.0, np.nan))
    return np.where(inside, result, np.where((a > 0) & (b > 0), ends, np.nan))


# --- zeta and polygamma -------------------------------------------------------------------------------------------
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798)
_DIRECT = 12  # terms of zeta summed one by one


def zeta(s: Array, q: Array) -> Array:
    """The Hurwitz zeta function, the sum of (q + k)^-s over k >= 0; for s > 1."""
    total = np.zeros_like(s)
    for k in range(_DIRECT):
        total = total + np.power(q + k, -s)
    far = q + _DIRECT
    power = np.power(far, -s)
    total = total + power * far / (s - 1) + 0.5 * power
    rising = s
    for j, bernoulli in enumerate(_BERNOULLI, 1):
        total = total + bernoulli / math.factorial(2 * j) * rising * power * np.power(far, 1.0 - 2 * j)
        rising = rising * (s + 2 * j - 1) * (s + 2 * j)
    pole = (q <= 0) & (q == np.floor(q))
    return np.where(s > 1, np.where(pole, np.inf, total), np.where(s == 1, np.inf, np.nan))


def polygamma(n: Array, x: Array) -> Array:
    """The n-th derivative of digamma."""
    order = np.where(n == 0, 1.0, n)
    sign = np.where(order % 2 == 0, -1.0, 1.0)
    whole = (n >= 0) & (n == np.floor(n))
    value = sign * np.exp(lgamma(order + 1)) * zeta(order + 1, x)
    return np.where(whole, np.where(n == 0, digamma(x), value), np.nan)


# --- Bessel functions ---------------------------------------------------------------------------------------------
def _bessel(order: int) -> Callable[[Array], Array]:
    """exp(-|x|) I_order(x): the power series to 20, the asymptotic one from there."""

    def evaluate(x: Array) -> Array:
        size = np.abs(x)
        near, far = np.minimum(size, 20.0), np.maximum(size, 20.0)
        term = (near / 2) ** order / math.factorial(order)
        total = np.array(term)
        for k in range(1, 70):
            term = term * (near * near / 4) / (k * (k + order))
            total = total + term
        series = np.exp(-near) * total
        term = np.ones_like(far)
        total = np.array(term)
        for k in range(1, 30):
            term = term * ((2 * k - 1) ** 2 - 4 * order**2) / (8 * k * far)
            total = total + term
        result = np.where(size <= 20, series, total / np.sqrt(2 * math.pi * far))
        return np.copysign(result, x) if order % 2 else result

    return evaluate


bessel_i0e = _bessel(0)
bessel_i1e = _bessel(1)
