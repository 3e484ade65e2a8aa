"""NumPy rules: arithmetic, comparison, logic, bits, and choosing, element by element.

The best function is a ufunc itself, and on scalars Python's operator, which on a NumPy scalar costs a twentieth of
the ufunc. XLA's meaning where NumPy's differs: integer division truncates and by zero gives -1 (the remainder: the
dividend); a shift too far gives 0, or copies of the sign; the sign of -0 is -0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.rules import present
from palladion.simulator.values_table import (
    ARRAYS,
    all_scalar,
    bits_of,
    dtype_in,
    dtype_out,
    is_float,
    is_int,
    is_signed,
    literal,
    shape_in,
    total_order,
    wide,
    widened,
    words,
)


def _register(primitive: Any, ufunc: Callable[..., Any], operate: Callable[..., Any] | None, *, same: bool) -> None:
    """The rule of a primitive that a ufunc computes.

    Arguments:
      operate: the same on scalars of NumPy's own dtypes, or None.
      same: whether the result has the operands' dtype (comparisons have not).
    """

    def rule(eqn):
        if operate is not None and all_scalar(eqn) and wide(dtype_in(eqn)) == dtype_in(eqn):
            return operate
        return widened(ufunc, eqn, out=dtype_out(eqn) if same else None)

    ARRAYS.rule(primitive)(rule)


for _primitive, _ufunc, _operate in (
    (lax.add_p, np.add, operator.add),
    (jaxlink.add_any_p, np.add, operator.add),
    (lax.sub_p, np.subtract, operator.sub),
    (lax.mul_p, np.multiply, operator.mul),
    (lax.neg_p, np.negative, operator.neg),
    (lax.abs_p, np.absolute, abs),
    (lax.and_p, np.bitwise_and, operator.and_),
    (lax.or_p, np.bitwise_or, operator.or_),
    (lax.xor_p, np.bitwise_xor, operator.xor),
    (lax.not_p, np.invert, operator.invert),
    (lax.square_p, np.square, lambda x: x * x),
    (lax.floor_p, np.floor, None),
    (lax.ceil_p, np.ceil, None),
    *[(p, lambda x: 1 - x * x, None) for p in present("one_minus_square_p")],
):
    _register(_primitive, _ufunc, _operate, same=True)

for _primitive, _ufunc, _operate in (
    (lax.eq_p, np.equal, operator.eq),
    (lax.ne_p, np.not_equal, operator.ne),
    (lax.lt_p, np.less, operator.lt),
    (lax.le_p, np.less_equal, operator.le),
    (lax.gt_p, np.greater, operator.gt),
    (lax.ge_p, np.greater_equal, operator.ge),
):
    _register(_primitive, _ufunc, _operate, same=False)


@ARRAYS.rule(lax.max_p)
def _max(eqn):
    if all_scalar(eqn) and wide(dtype_in(eqn)) == dtype_in(eqn) and is_int(dtype_in(eqn)):
        return lambda x, y: x if x >= y else y
    return widened(np.maximum, eqn, out=dtype_out(eqn))


@ARRAYS.rule(lax.min_p)
def _min(eqn):
    if all_scalar(eqn) and wide(dtype_in(eqn)) == dtype_in(eqn) and is_int(dtype_in(eqn)):
        return lambda x, y: x if x <= y else y
    return widened(np.minimum, eqn, out=dtype_out(eqn))


# --- division ----------------------------------------------------------------------------------------------------
def _truncating(x, y):
    """Integer division as XLA's, where `y` has no zeros."""
    return np.floor_divide(x - np.fmod(x, y), y)


def _divide_ints(x, y):
    return np.where(y == 0, y.dtype.type(-1) if y.dtype.kind == "i" else ~y.dtype.type(0), _truncating(x, y))


def _divide_int_scalars(x, y):
    if y == 0:
        return ~y
    return (x if x >= 0 and y > 0 else x - np.fmod(x, y)) // y


@ARRAYS.rule(lax.div_p)
def _div(eqn):
    dtype = dtype_in(eqn)
    if not is_int(dtype):
        scalar = all_scalar(eqn) and wide(dtype) == dtype
        return operator.truediv if scalar else widened(np.divide, eqn, out=dtype)
    divisor = literal(eqn, 1)
    if all_scalar(eqn) and wide(dtype) == dtype:
        return _divide_int_scalars
    if divisor is None or divisor == 0:
        return widened(_divide_ints, eqn, out=dtype)
    return widened(_truncating if is_signed(dtype) else np.floor_divide, eqn, out=dtype)


@ARRAYS.rule(lax.rem_p)
def _rem(eqn):
    dtype = dtype_in(eqn)
    divisor = literal(eqn, 1)
    if not is_int(dtype) or (divisor is not None and divisor != 0):
        return widened(np.fmod, eqn, out=dtype)
    if all_scalar(eqn) and wide(dtype) == dtype:
        return lambda x, y: np.fmod(x, y) if y else x
    return widened(lambda x, y: np.where(y == 0, x, np.fmod(x, y)), eqn, out=dtype)


@ARRAYS.rule(*present("mulhi_p"))
def _mulhi(eqn):
    """The upper half of the product of two integers."""
    dtype, bits = dtype_in(eqn), bits_of(dtype_in(eqn))
    if bits < 64:
        double = np.int64 if is_signed(dtype) else np.uint64
        return lambda x, y: ((x.astype(double) * y.astype(double)) >> double(bits)).astype(dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)

    def unsigned(x, y):
        x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
        middle = x1 * y0 + ((x0 * y0) >> half)
        return x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)

    if not is_signed(dtype):
        return unsigned

    def signed(x, y):
        high = unsigned(x.astype(np.uint64), y.astype(np.uint64)).astype(np.int64)
        return high - np.where(x < 0, y, 0) - np.where(y < 0, x, 0)

    return signed


# --- sign and rounding ---------------------------------------------------------------------------------------------
def _keeping_zeros_sign(x):
    return np.copysign(np.sign(x), x)


@ARRAYS.rule(lax.sign_p)
def _sign(eqn):
    function = _keeping_zeros_sign if is_float(dtype_in(eqn)) else np.sign
    return widened(function, eqn, out=dtype_in(eqn))


def _half_away_from_zero(x):
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x).astype(x.dtype)


@ARRAYS.rule(lax.round_p)
def _round(eqn):
    even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return widened(np.rint if even else _half_away_from_zero, eqn, out=dtype_in(eqn))


@ARRAYS.rule(lax.is_finite_p)
def _is_finite(eqn):
    return np.isfinite


@ARRAYS.rule(lax.nextafter_p)
def _nextafter(eqn):
    return np.nextafter  # ml_dtypes has its own for each of its floats


# --- bits --------------------------------------------------------------------------------------------------------
def _unsigned(dtype: np.dtype) -> Callable[[Any], Any]:
    """A function from integers to their bits in an unsigned dtype."""
    bits = bits_of(dtype)
    if bits < 8:
        byte, mask = wide(dtype), np.uint8((1 << bits) - 1)
        return lambda x: x.astype(byte).view(np.uint8) & mask
    to = np.dtype(f"uint{bits}")
    return (lambda x: x) if to == dtype else lambda x: x.view(to)


def _signed(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"int{dtype.itemsize * 8}")


@ARRAYS.rule(lax.shift_left_p)
def _shift_left(eqn):
    return widened(np.left_shift, eqn, out=dtype_in(eqn))  # NumPy too gives 0 for shifts too far


@ARRAYS.rule(lax.shift_right_logical_p)
def _shift_right_logical(eqn):
    dtype = dtype_in(eqn)
    if bits_of(dtype) < 8:
        unsigned = _unsigned(dtype)
        return lambda x, y: np.right_shift(unsigned(x), unsigned(y)).astype(dtype)
    if not is_signed(dtype):
        return np.right_shift
    to = np.dtype(f"uint{bits_of(dtype)}")
    return lambda x, y: np.right_shift(x.view(to), y.view(to)).view(dtype)


@ARRAYS.rule(lax.shift_right_arithmetic_p)
def _shift_right_arithmetic(eqn):
    dtype = dtype_in(eqn)
    if is_signed(dtype):
        return widened(np.right_shift, eqn, out=dtype)
    if bits_of(dtype) < 8:
        unsigned, up = _unsigned(dtype), np.uint8(8 - bits_of(dtype))

        def shift(x, y):  # with the sign at the top of a byte, and back
            value = (unsigned(x) << up).view(np.int8) >> np.int8(up)
            return np.right_shift(value, unsigned(y).view(np.int8)).view(np.uint8).astype(dtype)

        return shift
    to = _signed(dtype)
    return lambda x, y: np.right_shift(x.view(to), y.view(to)).view(dtype)


@ARRAYS.rule(lax.population_count_p)
def _population_count(eqn):
    dtype = dtype_in(eqn)
    unsigned = _unsigned(dtype)
    return lambda x: np.bitwise_count(unsigned(x)).astype(dtype)


@ARRAYS.rule(lax.clz_p)
def _clz(eqn):
    dtype, bits = dtype_in(eqn), bits_of(dtype_in(eqn))
    unsigned = _unsigned(dtype)
    if bits <= 32:
        # the exponent of an integer that float64 holds exactly is its length
        return lambda x: (bits - np.frexp(unsigned(x).astype(np.float64))[1]).astype(dtype)

    def long(x):
        x = unsigned(x)
        high, low = x >> np.uint64(32), x & np.uint64(0xFFFFFFFF)
        length = np.where(high != 0, np.frexp(high.astype(float))[1] + 32, np.frexp(low.astype(float))[1])
        return (64 - length).astype(dtype)

    return long


# --- complex numbers -----------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.real_p)
def _real(eqn):
    return np.real


@ARRAYS.rule(lax.imag_p)
def _imag(eqn):
    return np.imag


@ARRAYS.rule(lax.conj_p)
def _conj(eqn):
    dtype = dtype_out(eqn)
    return np.conjugate if dtype == dtype_in(eqn) else lambda x: x.astype(dtype)


@ARRAYS.rule(lax.complex_p)
def _complex(eqn):
    dtype = dtype_out(eqn)

    def join(x, y):
        out = np.empty(np.broadcast(x, y).shape, dtype)
        out.real, out.imag = x, y
        return out

    return join


# --- choosing ------------------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.select_n_p)
def _select_n(eqn):
    count = len(eqn.invars) - 1
    boolean = dtype_in(eqn) == np.bool_
    if not shape_in(eqn):
        if boolean:
            return lambda which, no, yes=None: yes if which else no
        last = count - 1
        return lambda which, *cases: cases[min(max(int(which), 0), last)]
    extra = (np.newaxis,) * len(words(eqn.invars[1].aval.dtype))
    if count == 1:
        return lambda which, only: only
    if boolean and not extra:
        return lambda which, no, yes: np.where(which, yes, no)

    def choose(which, *cases):
        if extra:
            which = which[(..., *extra)]
        result = cases[-1]
        for i in range(count - 2, -1, -1):
            result = np.where(which <= i, cases[i], result)
        return result

    return choose


@ARRAYS.rule(lax.clamp_p)
def _clamp(eqn):
    return widened(lambda low, x, high: np.minimum(np.maximum(low, x), high), eqn, out=dtype_out(eqn))


# --- total order ---------------------------------------------------------------------------------------------------
for _primitive, _compare in ((lax.eq_to_p, np.equal), (lax.lt_to_p, np.less), (lax.le_to_p, np.less_equal)):

    def _total(eqn, compare=_compare):
        if not is_float(dtype_in(eqn)):
            return widened(compare, eqn)
        key = total_order(dtype_in(eqn))
        return lambda x, y: compare(key(x), key(y))

    ARRAYS.rule(_primitive)(_total)
