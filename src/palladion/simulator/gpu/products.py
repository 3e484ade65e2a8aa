"""The numbers of tensor cores: what a matrix product gives for operands of each dtype.

Floats are widened to float32, so that products of 16-bit and narrower operands are exact; sums are float32. Of float32
operands (tf32) only the top 19 bits count. A float16 accumulator is rounded once at the end of each product. Integers
are exact, and wrap at 32 bits. The order of a sum is that of the host's BLAS: hardware's is not specified either.

Sources: PTX ISA, wgmma and tcgen05.mma: numerics, block scaling, sparse matrices (the facts file, sections 4.1 and 8);
"tf32 inputs: low 13 mantissa bits are ignored", so they are cut off, not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.simulator.values_casts import conversion
from palladion.simulator.values_products import accumulator

_TF32 = np.uint32(0xFFFFE000)  # sign, exponent and ten bits of the fraction

Product = Callable[[Any, np.ndarray, np.ndarray], np.ndarray]


def widening(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """From an operand to what the tensor core multiplies, as float32."""
    dtype = np.dtype(dtype)
    if dtype == np.float32:
        return lambda x: (np.ascontiguousarray(x).view(np.uint32) & _TF32).view(np.float32)
    return conversion(dtype, np.dtype(np.float32))


def product(left: Any, right: Any, out: Any, depth: int, *, skip_floats: bool = False) -> Product:
    """`f(acc, a, b)`: acc + a @ b as a tensor core computes it.

    Arguments:
      left, right, out: dtypes of a (M, K), b (K, N) and acc (M, N). depth: K.
      skip_floats: give NaN instead of computing floats.

    Returns:
      a function; its acc may be None, for zeros.
    """
    left, right, out = np.dtype(left), np.dtype(right), np.dtype(out)
    if out.kind == "i":
        inner = accumulator(left, right, out, depth)
        to_left, to_right = conversion(left, inner), conversion(right, inner)

        def integers(acc: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
            sums = np.matmul(to_left(a), to_right(b)).astype(np.int64).astype(out)
            return sums if acc is None else acc + sums

        return integers
    if skip_floats:
        return lambda acc, a, b: np.full((a.shape[0], b.shape[1]), np.nan, out)
    to_left, to_right = widening(left), widening(right)

    def floats(acc: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return added(acc, np.matmul(to_left(a), to_right(b)), out)

    return floats


def added(acc: Any, sums: np.ndarray, out: np.dtype) -> np.ndarray:
    """An accumulator of a dtype, or None, plus float32 sums."""
    if acc is not None:
        sums += acc
    return sums if out == np.float32 else sums.astype(out)


def scaled(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """An operand with a scale for each of equal blocks of K.

    Arguments:
      x: (lines, K). scales: (lines, K // block).

    Returns:
      float32 (lines, K).
    """
    lines, count = scales.shape
    wide = x.astype(np.float32).reshape(lines, count, -1) * scales.astype(np.float32)[:, :, None]
    return wide.reshape(x.shape)


def unpacked(a: np.ndarray, metadata: np.ndarray, bits: int) -> np.ndarray:
    """A sparse operand with its zeros.

    Arguments:
      a: (M, K // 2): of each four elements of a row, two.
      metadata: (M, K // 2) as it lies in TMEM: where these two are. bits: of an element.

    Returns:
      (M, K).
    """
    m, half = a.shape
    places = places_of(metadata, bits).reshape(m, half // 2, 2)
    full = np.zeros((m, half // 2, 4), a.dtype)
    np.put_along_axis(full, places, a.reshape(m, half // 2, 2), 2)
    return full.reshape(m, half * 2)


def places_of(metadata: np.ndarray, bits: int) -> np.ndarray:
    """Metadata in the order of a row's elements, from how it lies in TMEM (the inverse of
    `plgpu.format_tcgen05_sparse_metadata`): of 16-bit operands, rows m and m + 8 share a cell, and the halves of an
    instruction's K lie eight lanes apart."""
    m, half = metadata.shape
    places = metadata.astype(np.int64)
    if bits == 8:
        return places
    return places.reshape(m // 16, 2, 8, half // 64, 4, 2, 8).transpose(0, 5, 2, 3, 4, 1, 6).reshape(m, half)
