"""NumPy rules: conversions among dtypes, and values read as other bits.

XLA's conversions: floats to integers truncate, saturate, and send NaN to 0; integers to narrower ones wrap;
anything to bool asks whether it is not zero; complex to real drops the imaginary part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion.simulator.values_table import (
    ARRAYS,
    bits_of,
    dtype_in,
    dtype_out,
    is_float,
    is_int,
    is_signed,
    shape_out,
    wide,
)


def _same(x):
    return x


def conversion(dtype: np.dtype, to: np.dtype) -> Callable[[Any], Any]:
    """The function that converts values of `dtype` to `to` as XLA does."""
    if dtype == to:
        return _same
    if dtype.kind == "c" and to.kind != "c":
        part = np.float32 if dtype.itemsize == 8 else np.float64
        onward = conversion(np.dtype(part), to)
        return lambda x: onward(np.real(x))
    if to == np.bool_:
        if is_float(dtype) and wide(dtype) != dtype:
            return lambda x: x.astype(np.float32) != 0
        return lambda x: x != 0
    if is_float(dtype) and is_int(to):
        return _saturating(dtype, to)
    if wide(to) != to and to.kind != "c" and is_float(to) and dtype.itemsize > 2 and not is_float(dtype):
        return lambda x: x.astype(np.float32).astype(to)  # as XLA: an integer becomes f32 first
    if bits_of(dtype) < 8 and not is_float(to):
        # ml_dtypes converts its integers to a byte and back only
        byte = wide(dtype)
        return lambda x: x.astype(byte).astype(to)
    return lambda x: x.astype(to)


def _saturating(dtype: np.dtype, to: np.dtype) -> Callable[[Any], Any]:
    bits, signed, wider = bits_of(to), is_signed(to), wide(dtype)
    low = -(2.0 ** (bits - 1)) if signed else 0.0
    beyond = 2.0 ** (bits - 1 if signed else bits)
    top, below = to.type(int(beyond) - 1), np.nextafter(beyond, 0)
    # NumPy's own conversion is right within the bounds; ml_dtypes' sub-byte integers go through a byte
    step = wide(to)

    def saturate(x):
        x = x.astype(np.float64)  # which holds the bounds, unlike f32
        inside = np.where(x == x, np.minimum(np.maximum(x, low), below), 0).astype(step).astype(to)
        return np.where(x >= beyond, top, inside)

    def convert(x):
        x = x.astype(wider)
        if not x.size:
            return x.astype(to)
        if np.minimum.reduce(x, None) >= low and np.maximum.reduce(x, None) < beyond:  # not so with a NaN
            return x.astype(step).astype(to)
        return saturate(x)

    return convert


@ARRAYS.rule(lax.convert_element_type_p)
def _convert_element_type(eqn):
    return conversion(dtype_in(eqn), dtype_out(eqn))


# --- bits ----------------------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.bitcast_convert_type_p)
def _bitcast_convert_type(eqn):
    dtype, to = dtype_in(eqn), dtype_out(eqn)
    return bitcast(dtype, to, shape_out(eqn))


def bitcast(dtype: np.dtype, to: np.dtype, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """The function that reads values of `dtype` as `to`, as `lax.bitcast_convert_type`; `shape` is the result's.

    A wider element becomes a trailing dimension of narrower ones, lowest bits first, and back.
    """
    before, after = bits_of(dtype), bits_of(to)
    if dtype == to:
        return _same
    if before >= 8 and after >= 8:
        if before == after:
            return lambda x: x.view(to)
        if before > after:
            split = shape[:-1]
            return lambda x: np.array(x, order="C").reshape((*split, 1)).view(to)
        return lambda x: np.array(x, order="C").view(to).reshape(shape)
    unpack, pack = _unpacker(dtype), _packer(to)
    return lambda x: pack(unpack(x), shape)


def _unpacker(dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """A function from values to their bits, one a byte, along a new last axis."""
    bits = bits_of(dtype)

    def unpack(x):
        x = np.array(x, order="C")
        data = x.astype(wide(dtype)) if bits < 8 else x
        spread = np.unpackbits(data.reshape((*x.shape, 1)).view(np.uint8), axis=-1, bitorder="little")
        return spread[..., :bits]

    return unpack


def _packer(dtype: np.dtype) -> Callable[[np.ndarray, tuple[int, ...]], np.ndarray]:
    """A function from bits along the last axis to values of `dtype` in a shape."""
    bits = bits_of(dtype)

    def pack(spread, shape):
        # a dimension of parts and the one of their bits are one
        data = np.packbits(spread.reshape((*shape, bits)), axis=-1, bitorder="little")
        return (data.view(wide(dtype)) if bits < 8 else data.view(dtype)).astype(dtype).reshape(shape)

    return pack


@ARRAYS.rule(lax.reduce_precision_p)
def _reduce_precision(eqn):
    dtype = dtype_in(eqn)
    if dtype.kind == "c":
        raise ARRAYS.unsupported(eqn)
    return reduce_precision(dtype, eqn.params["exponent_bits"], eqn.params["mantissa_bits"])


def reduce_precision(dtype: np.dtype, exponent_bits: int, mantissa_bits: int) -> Callable[[Any], Any]:
    """The function that rounds values of `dtype` to a float of so many bits: to even, no subnormal numbers.

    XLA's algorithm on the bits: add half of the last place kept (less one, plus the last bit kept), cut, then send
    exponents out of range to infinity or zero.
    """
    info = jax.numpy.finfo(dtype)
    bits = np.dtype(f"uint{dtype.itemsize * 8}")
    mantissa, exponent = info.nmant, info.nexp
    cut = max(mantissa - mantissa_bits, 0)
    sign = bits.type(1 << (mantissa + exponent))
    infinity = bits.type(((1 << exponent) - 1) << mantissa)
    bias, small = (1 << (exponent - 1)) - 1, (1 << (exponent_bits - 1)) - 1
    narrower = exponent_bits < exponent
    largest, least = [bits.type(e << mantissa) for e in ((bias + small, bias - small) if narrower else (0, 0))]
    half, one = bits.type((1 << cut >> 1) - 1 if cut else 0), bits.type(1)
    kept, shift = bits.type((1 << (mantissa + exponent + 1)) - (1 << cut)), bits.type(cut)

    def reduce(x):
        u = x.view(bits)
        if cut:
            u = (u + half + ((u >> shift) & one)) & kept
        if narrower:
            size = u & infinity
            u = np.where(size > largest, (u & sign) | infinity, np.where(size <= least, u & sign, u))
        return np.where(np.isnan(x), x, u.view(dtype))

    return reduce
