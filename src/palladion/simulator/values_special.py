"""Special functions that NumPy lacks, of float64 arrays, to a few units in the last place of float64.

Each is computed for all elements by every formula and chosen by range, with no branch on values.

Sources: erf and erfc, the rational approximations of Sun's fdlibm (s_erf.c, free to use); erf_inv, a first guess of
M. Giles ("Approximating the erfinv function", 2010) polished by Halley's method; gamma functions, Stirling's series
after shifting the argument (Abramowitz and Stegun 6.1.40, 6.3.18).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def _horner(x: Array, coefficients: Sequence[float]) -> Array:
    """The polynomial with coefficients from the lowest degree up."""
    result = np.full_like(x, coefficients[-1])  # an array too where x is a scalar
    for c in coefficients[-2::-1]:
        result *= x
        result += c
    return result


# --- error functions ----------------------------------------------------------------------------------------------
_ERX = 8.45062911510467529297e-01
_PP = (
    1.28379167095512558561e-01,
    -3.25042107247001499370e-01,
    -2.84817495755985104766e-02,
    -5.77027029648944159157e-03,
    -2.37630166566501626084e-05,
)
_QQ = (
    1.0,
    3.97917223959155352819e-01,
    6.50222499887672944485e-02,
    5.08130628187576562776e-03,
    1.32494738004321644526e-04,
    -3.96022827877536812320e-06,
)
_PA = (
    -2.36211856075265944077e-03,
    4.14856118683748331666e-01,
    -3.72207876035701323847e-01,
    3.18346619901161753674e-01,
    -1.10894694282396677476e-01,
    3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)
_QA = (
    1.0,
    1.06420880400844228286e-01,
    5.40397917702171048937e-01,
    7.18286544141962662868e-02,
    1.26171219808761642112e-01,
    1.36370839120290507362e-02,
    1.19844998467991074170e-02,
)
_RA = (
    -9.86494403484714822705e-03,
    -6.93858572707181764372e-01,
    -1.05586262253232909814e01,
    -6.23753324503260060396e01,
    -1.62396669462573470355e02,
    -1.84605092906711035994e02,
    -8.12874355063065934246e01,
    -9.81432934416914548592e00,
)
_SA = (
    1.0,
    1.96512716674392571292e01,
    1.37657754143519042600e02,
    4.34565877475229228821e02,
    6.45387271733267880336e02,
    4.29008140027567833386e02,
    1.08635005541779435134e02,
    6.57024977031928170135e00,
    -6.04244152148580987438e-02,
)
_RB = (
    -9.86494292470009928597e-03,
    -7.99283237680523006574e-01,
    -1.77579549177547519889e01,
    -1.60636384855821916062e02,
    -6.37566443368389627722e02,
    -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)
_SB = (
    1.0,
    3.03380607434824582924e01,
    3.25792512996573918826e02,
    1.53672958608443695994e03,
    3.19985821950859553908e03,
    2.55305040643316442583e03,
    4.74528541206955367215e02,
    -2.24409524465858183362e01,
)


def _erf_near_zero(x: Array) -> Array:
    """erf for |x| < 0.84375."""
    z = x * x
    return x + x * (_horner(z, _PP) / _horner(z, _QQ))


def _erf_near_one(size: Array) -> Array:
    """erf less `_ERX`, for sizes from 0.84375 to 1.25."""
    s = size - 1
    return _horner(s, _PA) / _horner(s, _QA)


def _erfc_far(size: Array) -> Array:
    """erfc for sizes from 1.25 on."""
    size = np.minimum(np.maximum(size, 1.0), 28.0)
    s = 1 / (size * size)
    ratio = np.where(size < 1 / 0.35, _horner(s, _RA) / _horner(s, _SA), _horner(s, _RB) / _horner(s, _SB))
    # exp(-x^2) loses digits for large x, so x is split: z has no lower half, and its square no error
    z = (size.view(np.int64) & np.int64(-0x100000000)).view(np.float64)
    return np.exp(-z * z - 0.5625) * np.exp((z - size) * (z + size) + ratio) / size


def erf(x: Array) -> Array:
    """The error function."""
    x = np.asarray(x)
    size = np.abs(x)
    outer = np.where(size < 1.25, _ERX + _erf_near_one(np.minimum(size, 1.25)), 1 - _erfc_far(size))
    near = _erf_near_zero(np.minimum(np.maximum(x, -0.84375), 0.84375))
    return np.where(size < 0.84375, near, np.copysign(outer, x))


# erf(x) / x as a rational function of x^2 up to 16, fitted by us: relative error 2.1e-9
_TOP = (
    1.1283791693586303,
    0.18520530580399006,
    0.05431702513294691,
    0.0038496768236117107,
    0.00037960337714325256,
    4.684575359652917e-06,
    -1.3201313242262728e-08,
)
_BELOW = (
    1.0,
    0.49746734231560014,
    0.11395913365144189,
    0.015462199956437854,
    0.0013075760013714368,
    6.310869851062626e-05,
)


def erf_short(x: Array) -> Array:
    """The error function to 2.1e-9, for results of at most 32 bits; beyond 4 it rounds to 1 there.

    In float64 a quarter of the time of `erf`; in float32 within 7 ulp.
    """
    x = np.minimum(np.maximum(x, -4), 4)
    z = x * x
    return x * (_horner(z, _TOP) / _horner(z, _BELOW))


def erfc(x: Array) -> Array:
    """1 - erf(x), to full precision where that is small."""
    x = np.asarray(x)
    size = np.abs(x)
    middle = _erf_near_one(np.minimum(size, 1.25))
    far = np.where(size > 28, 0.0, _erfc_far(size))
    positive = np.where(size < 1.25, 1 - _ERX - middle, far)
    outer = np.where(x > 0, positive, 2 - positive)
    near = 1 - _erf_near_zero(np.minimum(np.maximum(x, -0.84375), 0.84375))
    return np.where(np.isnan(x), x, np.where(size < 0.84375, near, outer))


_GILES_CENTRE = (
    1.50140941,
    0.246640727,
    -0.00417768164,
    -0.00125372503,
    0.00021858087,
    -4.39150654e-06,
    -3.5233877e-06,
    3.43273939e-07,
    2.81022636e-08,
)
_GILES_TAIL = (
    2.83297682,
    1.00167406,
    0.00943887047,
    -0.0076224613,
    0.00573950773,
    -0.00367342844,
    0.00134934322,
    0.000100950558,
    -0.000200214257,
)


def erf_inv(x: Array) -> Array:
    """The inverse of erf; infinite at -1 and 1, NaN beyond."""
    x = np.asarray(x)
    size = np.abs(x)
    w = -np.log1p(-size) - np.log1p(size)
    finite = np.minimum(w, 50.0)
    guess = np.where(w < 5, _horner(finite - 2.5, _GILES_CENTRE), _horner(np.sqrt(finite) - 3, _GILES_TAIL))
    tail = 0.693147180559945309 + w  # of 1 - size; beyond the fit's range, from erfc's leading term
    y = np.where(w < 16, guess * size, np.sqrt(np.minimum(tail - 0.5 * np.log(math.pi * tail), 800.0)))
    for _ in range(3):
        miss = np.where(size < 0.5, erf(y) - size, (1 - size) - erfc(y))
        step = miss * (math.sqrt(math.pi) / 2) * np.exp(y * y)
        y = y - step / (1 + y * step)
    return np.copysign(np.where(size < 1, y, np.where(size == 1, np.inf, np.nan)), x)


# --- gamma functions ----------------------------------------------------------------------------------------------
_SHIFT = 10  # below it an argument is shifted up
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)


def _lgamma_positive(x: Array) -> Array:
    product, shifted = np.ones_like(x), np.array(x)
    for _ in range(_SHIFT):
        low = shifted < _SHIFT
        product *= np.where(low, shifted, 1.0)
        shifted += low
    inverse = 1 / shifted
    series = inverse * _horner(inverse * inverse, _STIRLING)
    result = (shifted - 0.5) * np.log(shifted) - shifted + 0.5 * math.log(2 * math.pi) + series - np.log(product)
    result = np.where((x == 1) | (x == 2), 0.0, result)
    return np.where(np.isinf(x), np.inf, result)


def lgamma(x: Array) -> Array:
    """The logarithm of |Γ(x)|; infinite at 0 and the negative integers."""
    x = np.asarray(x)
    below = x < 0.5
    positive = _lgamma_positive(np.where(below, 1 - x, x))
    part = np.abs(x - np.rint(x))  # |sin πx| from the distance to the nearest integer keeps its digits
    reflected = math.log(math.pi) - np.log(np.sin(math.pi * part)) - positive
    return np.where(np.isinf(x), np.inf, np.where(below, reflected, positive))


def digamma(x: Array) -> Array:
    """The derivative of log Γ; NaN at the negative integers, -inf at 0."""
    x = np.asarray(x)
    below = x < 0.5
    shifted = np.where(below, 1 - x, x)
    total = np.zeros_like(shifted)
    for _ in range(_SHIFT):
        low = shifted < _SHIFT
        total -= np.where(low, 1 / shifted, 0.0)
        shifted = shifted + low
    square = 1 / (shifted * shifted)
    result = np.log(shifted) - 0.5 / shifted - square * _horner(square, _DIGAMMA) + total
    part = x - np.rint(x)
    reflected = result - math.pi / np.tan(math.pi * part)
    poles = np.where(x == 0, -np.inf, np.nan)
    return np.where(below, np.where(part == 0, poles, reflected), result)
