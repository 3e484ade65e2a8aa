"""NumPy rules: matrix products, convolutions, Fourier transforms.

Products of floats narrower than 32 bits are accumulated in float32, as matrix units do, and rounded once. Products
of integers are exact modulo their width: in float64 where every sum fits its 53 bits, which BLAS does fast, else in
NumPy's integer loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from palladion.simulator.values_casts import conversion
from palladion.simulator.values_shapes import padding
from palladion.simulator.values_table import ARRAYS, bits_of, dtype_in, dtype_out, is_float, is_int, shape_in, shape_out


def accumulator(left: np.dtype, right: np.dtype, out: np.dtype, depth: int) -> np.dtype:
    """The dtype in which a product is computed; `depth` is the number of terms of a sum."""
    dtypes = (left, right, out)
    if any(d.kind == "c" for d in dtypes):
        return np.result_type(*[d if d.kind == "c" or d.itemsize >= 4 else np.float32 for d in dtypes])
    if any(is_float(d) for d in dtypes):
        return np.dtype(np.float64 if any(d == np.float64 for d in dtypes) else np.float32)
    if not all(is_int(d) for d in dtypes):
        return np.dtype(np.bool_)
    bits = bits_of(left) + bits_of(right) + math.ceil(math.log2(max(depth, 1)))
    if bits <= 24:
        return np.dtype(np.float32)
    return np.dtype(np.float64) if bits <= 53 else out if bits_of(out) >= 8 else np.dtype(np.int32)


def _rounding(inner: np.dtype, out: np.dtype) -> Callable[[Any], Any] | None:
    """From the accumulator to the result; None if there is nothing to do."""
    if inner == out:
        return None
    if is_int(out) and is_float(inner):  # exact, and wraps where the result is narrower than its sums
        return lambda x: x.astype(np.int64).astype(out)
    return conversion(inner, out)


# --- dot_general ----------------------------------------------------------------------------------------------
def _arrange(shape: tuple[int, ...], order: list[int], matrix: tuple[int, ...]) -> Callable[[Any], Any] | None:
    """An operand's dimensions in order, as a (stack of a) matrix; None if it is that already."""
    reshape = tuple(shape[d] for d in order) != matrix
    if order == list(range(len(order))):
        return (lambda x: x.reshape(matrix)) if reshape else None
    places = tuple(order)
    return (lambda x: x.transpose(places).reshape(matrix)) if reshape else lambda x: x.transpose(places)


@ARRAYS.rule(lax.dot_general_p)
def _dot_general(eqn):
    (lc, rc), (lb, rb) = [[list(map(int, d)) for d in pair] for pair in eqn.params["dimension_numbers"]]
    left, right, after = shape_in(eqn, 0), shape_in(eqn, 1), shape_out(eqn)
    depth = math.prod(left[d] for d in lc)
    out = dtype_out(eqn)
    inner = accumulator(dtype_in(eqn, 0), dtype_in(eqn, 1), out, depth)
    plain = not lb and inner == out == dtype_in(eqn, 0) == dtype_in(eqn, 1)
    if plain and (len(left), len(right)) == (2, 2) and (lc, rc) in (([1], [0]), ([1], [1])):
        return np.matmul if rc == [0] else lambda x, y: np.matmul(x, y.T)

    def rest(shape, contracted, batch):
        return [d for d in range(len(shape)) if d not in contracted and d not in batch]

    def count(shape, dims):
        return math.prod(shape[d] for d in dims)

    lf, rf = rest(left, lc, lb), rest(right, rc, rb)
    batch = (count(left, lb),) if lb else ()
    x_matrix = (*batch, count(left, lf), depth)
    y_matrix = (*batch, depth, count(right, rf))
    arrange_x = _arrange(left, [*lb, *lf, *lc], x_matrix)
    arrange_y = _arrange(right, [*rb, *rc, *rf], y_matrix)
    result = (*batch, x_matrix[-2], y_matrix[-1])
    to_x = _none_if_same(dtype_in(eqn, 0), inner)
    to_y = _none_if_same(dtype_in(eqn, 1), inner)
    finish, reshape = _rounding(inner, out), result != after

    def product(x, y):
        if arrange_x is not None:
            x = arrange_x(x)
        if arrange_y is not None:
            y = arrange_y(y)
        if to_x is not None:
            x = to_x(x)
        if to_y is not None:
            y = to_y(y)
        z = np.matmul(x, y)
        if finish is not None:
            z = finish(z)
        return z.reshape(after) if reshape else z

    return product


def _none_if_same(dtype: np.dtype, to: np.dtype) -> Callable[[Any], Any] | None:
    return None if dtype == to else conversion(dtype, to)


# --- convolution ----------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.conv_general_dilated_p)
def _conv_general_dilated(eqn):
    """A matrix product for each element of the window; groups are a batch dimension of it."""
    p = eqn.params
    numbers = p["dimension_numbers"]
    x_order, w_order = tuple(numbers.lhs_spec), tuple(numbers.rhs_spec)
    out, back = dtype_out(eqn), tuple(np.argsort(numbers.out_spec))
    x_shape = [shape_in(eqn, 0)[d] for d in x_order]
    w_shape = [shape_in(eqn, 1)[d] for d in w_order]
    (batch, channels), (features, inputs), window = x_shape[:2], w_shape[:2], w_shape[2:]
    space = [shape_out(eqn)[d] for d in numbers.out_spec[2:]]
    by_feature, by_batch = int(p["feature_group_count"]), int(p["batch_group_count"])
    inner = accumulator(dtype_in(eqn, 0), dtype_in(eqn, 1), out, inputs * math.prod(window))
    convert_x = conversion(dtype_in(eqn, 0), inner)
    convert_w = conversion(dtype_in(eqn, 1), inner)
    config = [(0, 0, 0), (0, 0, 0)]
    config += [(int(a), int(b), int(d) - 1) for (a, b), d in zip(p["padding"], p["lhs_dilation"])]
    pad = padding(config, x_shape, inner)
    cuts = []
    for offset in itertools.product(*map(range, window)):
        starts = [o * int(d) for o, d in zip(offset, p["rhs_dilation"])]
        cuts.append((offset, tuple(slice(a, a + (n - 1) * int(s) + 1, int(s)) if n else slice(0, 0)
                                   for a, n, s in zip(starts, space, p["window_strides"]))))  # fmt: skip
    groups = max(by_feature, by_batch)
    zero, finish = inner.type(0), _rounding(inner, out)
    rows, columns = batch // by_batch, math.prod(space)

    def convolve(x, w):
        x = pad(convert_x(x.transpose(x_order)), zero)
        w = convert_w(w.transpose(w_order)).reshape(groups, features // groups, inputs, *window)
        total = np.zeros((rows, groups, features // groups, columns), inner)
        for offset, cut in cuts:
            part = x[(slice(None), slice(None), *cut)]
            if by_batch > 1:
                part = part.reshape(groups, rows, channels, columns).swapaxes(0, 1)
            else:
                part = part.reshape(rows, groups, inputs, columns)
            total += np.matmul(w[(slice(None), slice(None), slice(None), *offset)], part)
        total = total.reshape(rows, features, *space)
        return (total if finish is None else finish(total)).transpose(back)

    return convolve


# --- Fourier transforms ---------------------------------------------------------------------------------------
@ARRAYS.rule(lax.fft_p)
def _fft(eqn):
    kind, lengths, out = eqn.params["fft_type"], tuple(map(int, eqn.params["fft_lengths"])), dtype_out(eqn)
    axes = tuple(range(-len(lengths), 0))
    function = {
        lax.FftType.FFT: np.fft.fftn,
        lax.FftType.IFFT: np.fft.ifftn,
        lax.FftType.RFFT: np.fft.rfftn,
        lax.FftType.IRFFT: np.fft.irfftn,
    }[lax.FftType(kind)]
    return lambda x: function(x, lengths, axes).astype(out)
