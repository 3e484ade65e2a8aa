"""NumPy rules: JAX's counter-based random bits, and typed keys, which are held as their uint32 words.

Of Pallas keys (`pltpu.to_pallas_key`) `language/tpu/random.py` says what they draw.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Threefry-2x32 with 20 rounds; how JAX
counts was taken from its threefry implementation (jax/_src/random/threefry2x32.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palladion import jaxlink
from palladion.language.tpu import random as tpu_random
from palladion.simulator.values_table import ARRAYS, dtype_in, dtype_out, shape_out

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_U32 = np.uint32


def threefry(k1: Any, k2: Any, x1: Any, x2: Any) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32: a block of two uint32 words for each counter (x1, x2), which broadcast with the keys."""
    keys = (k1, k2, k1 ^ k2 ^ _U32(0x1BD11BDA))
    shape = np.broadcast_shapes(np.shape(k1), np.shape(x1))
    a, b, upper = (np.empty(shape, _U32) for _ in range(3))
    np.add(x1, k1, out=a)
    np.add(x2, k2, out=b)
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            a += b
            np.left_shift(b, _U32(rotation), out=upper)
            b >>= _U32(32 - rotation)
            b |= upper
            b ^= a
        a += keys[(i + 1) % 3]
        b += keys[(i + 2) % 3] + _U32(i + 1)
    return a, b


def _counters(shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The position of each element as the upper and the lower word of a 64-bit number."""
    count = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return (count >> np.uint64(32)).astype(_U32), count.astype(_U32)


def _halves(keys: np.ndarray, count: int) -> np.ndarray:
    """`count` words for each key, as JAX's older scheme draws them: counters cut into two halves."""
    low = np.zeros(count + count % 2, _U32)
    low[:count] = np.arange(count, dtype=_U32)
    first, second = low.reshape(2, -1)
    return np.concatenate(threefry(keys[..., :1], keys[..., 1:], first, second), -1)[..., :count]


def _check(eqn: Any, dtype: Any) -> bool:
    """Whether keys are those of `pltpu.to_pallas_key`; all others must be threefry's."""
    impl = getattr(dtype, "_impl", None) or eqn.params["impl"]
    if impl.name not in ("threefry2x32", tpu_random.pallas_keys):
        raise ARRAYS.unsupported(eqn)
    return impl.name == tpu_random.pallas_keys


def _each_pallas_key(function: Callable[..., Any], after: tuple[int, ...]) -> Callable[..., Any]:
    """A function of the words of one key, uint32[1, 2], and of further scalars, for each key of an array."""

    def run(keys, *scalars):
        shape = keys.shape[:-2]
        columns = [np.broadcast_to(x, shape).reshape(-1) for x in scalars]
        return np.stack([function(k, *x) for k, *x in zip(keys.reshape(-1, 1, 2), *columns)]).reshape(after)

    return run


def _per_key(x: np.ndarray, word: int, rank: int) -> np.ndarray:
    """One word of each key, with `rank` more dimensions to broadcast over."""
    return x[(..., word, *(np.newaxis,) * rank)]


@ARRAYS.rule(jaxlink.threefry2x32_p)
def _threefry2x32(eqn):
    return lambda k1, k2, x1, x2: threefry(k1, k2, x1, x2)


@ARRAYS.rule(jaxlink.random_wrap_p)
def _random_wrap(eqn):
    _check(eqn, eqn.outvars[0].aval.dtype)
    return lambda x: x


@ARRAYS.rule(jaxlink.random_unwrap_p)
def _random_unwrap(eqn):
    return lambda x: x


def _seed(seeds: Any, dtype: np.dtype) -> np.ndarray:
    """The upper and the lower 32 bits of each seed; the upper ones of a narrower seed are 0."""
    bits = np.asarray(seeds)
    low = bits.astype(np.int64 if dtype.kind == "i" else np.uint64).astype(_U32)
    high = (bits.view(np.uint64) >> np.uint64(32)).astype(_U32) if dtype.itemsize == 8 else np.zeros_like(low)
    return np.stack([high, low], -1)


@ARRAYS.rule(jaxlink.random_seed_p)
def _random_seed(eqn):
    if _check(eqn, eqn.outvars[0].aval.dtype):
        raise ARRAYS.unsupported(eqn)
    dtype = dtype_in(eqn)
    return lambda seeds: _seed(seeds, dtype)


@ARRAYS.rule(jaxlink.random_fold_in_p)
def _random_fold_in(eqn):
    if _check(eqn, eqn.invars[0].aval.dtype):
        after = (*eqn.outvars[0].aval.shape, 1, 2)
        return _each_pallas_key(lambda key, data: tpu_random.key_fold_in(key, data, np), after)

    def fold(keys, data):
        words = _seed(np.asarray(data).astype(_U32), np.dtype(_U32))
        return np.stack(threefry(keys[..., 0], keys[..., 1], words[..., 0], words[..., 1]), -1)

    return fold


@ARRAYS.rule(jaxlink.random_split_p)
def _random_split(eqn):
    if _check(eqn, eqn.invars[0].aval.dtype):
        raise ARRAYS.unsupported(eqn)
    shape, after = tuple(map(int, eqn.params["shape"])), shape_out(eqn)
    if not jax.config.jax_threefry_partitionable:
        count = 2 * math.prod(shape)
        return lambda keys: _halves(keys, count).reshape(after)
    high, low = _counters(shape)
    rank = len(shape)
    return lambda keys: np.stack(threefry(_per_key(keys, 0, rank), _per_key(keys, 1, rank), high, low), -1)


@ARRAYS.rule(jaxlink.random_bits_p)
def _random_bits(eqn):
    shape, after, dtype = tuple(map(int, eqn.params["shape"])), shape_out(eqn), dtype_out(eqn)
    width, size, rank = int(eqn.params["bit_width"]), math.prod(shape), len(shape)
    if _check(eqn, eqn.invars[0].aval.dtype):
        return _each_pallas_key(lambda key: tpu_random.key_bits(key, width, shape, np), after)
    if not jax.config.jax_threefry_partitionable:
        count = -(-width * size // 32)

        def halves(keys):
            bits = _halves(keys, count)
            if width == 64:
                bits = np.concatenate([bits, bits[..., :0]], -1)
                high, low = np.split(bits.astype(np.uint64), 2, -1)
                bits = (high << np.uint64(32)) | low
            return np.ascontiguousarray(bits).view(dtype)[..., :size].reshape(after)

        return halves
    high, low = _counters(shape)

    def draw(keys):
        a, b = threefry(_per_key(keys, 0, rank), _per_key(keys, 1, rank), high, low)
        if width == 64:
            return (a.astype(np.uint64) << np.uint64(32)) | b
        return (a ^ b).astype(dtype)

    return draw


@ARRAYS.rule(jaxlink.iota_2x32_shape_p)
def _iota_2x32_shape(eqn):
    words = _counters(shape_out(eqn))
    return lambda: words
