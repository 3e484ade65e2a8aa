"""NumPy rules: elementary and special functions.

NumPy's own f32 functions (vectorised, at most 4 ulp) serve for float32; bf16, f16 and the 8-bit floats are computed
in float32 and rounded once. What NumPy lacks is in `values_special.py` and `values_incomplete.py`: float64, rounded
once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from palladion.rules import present
from palladion.simulator import values_incomplete as incomplete
from palladion.simulator import values_special as special
from palladion.simulator.values_casts import conversion
from palladion.simulator.values_table import ARRAYS, all_scalar, dtype_in, dtype_out, wide, widened


def _logistic(x):
    return 1 / (1 + np.exp(-x))


def _rsqrt(x):
    return 1 / np.sqrt(x)


def _register(primitive: Any, function: Callable[..., Any]) -> None:
    @ARRAYS.rule(primitive)
    def rule(eqn):
        return widened(function, eqn, out=dtype_out(eqn))


for _primitive, _function in {
    lax.exp_p: np.exp,
    lax.exp2_p: np.exp2,
    lax.expm1_p: np.expm1,
    lax.log_p: np.log,
    lax.log1p_p: np.log1p,
    lax.log2_p: np.log2,
    lax.sin_p: np.sin,
    lax.cos_p: np.cos,
    lax.tan_p: np.tan,
    lax.asin_p: np.arcsin,
    lax.acos_p: np.arccos,
    lax.atan_p: np.arctan,
    lax.atan2_p: np.arctan2,
    lax.sinh_p: np.sinh,
    lax.cosh_p: np.cosh,
    lax.tanh_p: np.tanh,
    lax.asinh_p: np.arcsinh,
    lax.acosh_p: np.arccosh,
    lax.atanh_p: np.arctanh,
    lax.sqrt_p: np.sqrt,
    lax.rsqrt_p: _rsqrt,
    lax.cbrt_p: np.cbrt,
    lax.logistic_p: _logistic,
}.items():
    _register(_primitive, _function)


def _register_float64(primitive: Any, function: Callable[..., Any]) -> None:
    """A rule in float64, whose result is rounded once."""

    @ARRAYS.rule(primitive)
    def rule(eqn):
        out = dtype_out(eqn)
        if len(eqn.invars) == 1:
            return lambda x: function(np.asarray(x, np.float64)).astype(out)
        return lambda *xs: function(*np.broadcast_arrays(*[np.asarray(x, np.float64) for x in xs])).astype(out)


for _primitive, _function in {
    lax.erfc_p: special.erfc,
    lax.erf_inv_p: special.erf_inv,
    lax.lgamma_p: special.lgamma,
    lax.digamma_p: special.digamma,
    lax.igamma_p: incomplete.igamma,
    lax.igammac_p: incomplete.igammac,
    lax.bessel_i0e_p: incomplete.bessel_i0e,
    lax.bessel_i1e_p: incomplete.bessel_i1e,
    lax.zeta_p: incomplete.zeta,
    lax.polygamma_p: incomplete.polygamma,
    lax.regularized_incomplete_beta_p: incomplete.betainc,
}.items():
    _register_float64(_primitive, _function)


@ARRAYS.rule(lax.erf_p)
def _erf(eqn):
    dtype = dtype_in(eqn)
    if dtype == np.float64:
        return lambda x: special.erf(x).astype(dtype)
    inner = np.float64 if dtype == np.float32 else np.float32
    return lambda x: special.erf_short(x.astype(inner)).astype(dtype)


# --- powers --------------------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.pow_p)
def _pow(eqn):
    dtype, other = dtype_in(eqn), dtype_in(eqn, 1)
    if dtype == other:
        if all_scalar(eqn) and wide(dtype) == dtype:
            return operator.pow
        return widened(np.power, eqn, out=dtype)
    convert, to = conversion(other, wide(dtype)), wide(dtype)
    return lambda x, y: np.power(x.astype(to), convert(y)).astype(dtype)


@ARRAYS.rule(lax.integer_pow_p)
def _integer_pow(eqn):
    """Repeated squaring, as JAX lowers it."""
    exponent = int(eqn.params["y"])
    if exponent == 2:
        return widened(np.square, eqn, out=dtype_in(eqn))

    def power(x):
        if exponent == 0:
            return np.ones_like(x)
        factor, left = x, abs(exponent)
        while not left & 1:
            factor, left = factor * factor, left >> 1
        result = factor
        while left := left >> 1:
            factor = factor * factor
            if left & 1:
                result = result * factor
        return 1 / result if exponent < 0 else result

    return widened(power, eqn, out=dtype_in(eqn))


@ARRAYS.rule(*present("polynomial_p"))
def _polynomial(eqn):
    """Horner's scheme: a_0 + x (a_1 + x (a_2 + …))."""

    def evaluate(x, *coefficients):
        result = np.zeros_like(x)
        for c in reversed(coefficients):
            result = result * x + c
        return result

    return widened(evaluate, eqn, out=dtype_out(eqn))
