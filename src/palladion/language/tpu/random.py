"""Random numbers in TPU kernels: the stateful generator of a core, Pallas keys, and block-invariant sampling.

A TensorCore has a sequential generator: `prng_seed` sets its state, each draw moves it on. What numbers come is the
chip's affair and differs between generations; here it is Threefry-2x32 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) of the mixed seed words and the number of draws since, so that every executor gives the same
numbers for the same seeds. `mix` and `random_bits` are that generator in whichever of NumPy and jax.numpy an executor
works with; the machine keeps the state, three 32-bit words, between programs. A generator that was never seeded is that
of seed 0.

A key made by `to_pallas_key` draws from the same generator, but without its state: `jax.random` functions work on it.

Source: the public documentation on random numbers in Pallas TPU; the order of draws in a tile (`sample_block`) is the
one JAX 0.12 gives.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames, ops
from palladion.rules import only_on

__all__ = [
    "prng_random_bits",
    "prng_seed",
    "sample_block",
    "stateful_bernoulli",
    "stateful_bits",
    "stateful_normal",
    "stateful_uniform",
    "to_pallas_key",
]


# --- the generator ----------------------------------------------------------------------------------------------------
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: Sequence[Any], counter: Sequence[Any]) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds: two uint32 words of key and of counter (arrays that broadcast) to two of bits."""
    k = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    a, b = counter[0] + k[0], counter[1] + k[1]
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            a = a + b
            b = ((b << np.uint32(r)) | (b >> np.uint32(32 - r))) ^ a
        a = a + k[(group + 1) % 3]
        b = b + k[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


def mix(seeds: Sequence[Any], xp: Any = jnp) -> Any:
    """The generator's state after `prng_seed(*seeds)`: two words that depend on every seed, and no draws made yet.

    Arguments:
      seeds: 32-bit integer scalars.
      xp: `jax.numpy` or `numpy`.

    Returns:
      uint32[3].
    """
    state = xp.zeros(1, np.uint32), xp.zeros(1, np.uint32)  # one element, for NumPy warns when scalars wrap around
    for i, seed in enumerate(seeds):
        word = xp.reshape(xp.asarray(seed), (1,)).astype(np.uint32)
        state = threefry(state, (word, xp.full(1, i, np.uint32)))
    return xp.concatenate([*state, xp.zeros(1, np.uint32)])


def random_bits(state: Any, shape: Sequence[int], xp: Any = jnp) -> tuple[Any, Any]:
    """One draw of the generator.

    Arguments:
      state: uint32[3], from `mix` or an earlier draw.
      shape: of the bits.
      xp: `jax.numpy` or `numpy`.

    Returns:
      uint32 bits of that shape, and the state after the draw.
    """
    size = math.prod(shape)
    half = -(-size // 2)
    places = xp.arange(half, dtype=np.uint32), xp.broadcast_to(state[2:], (half,))
    bits = xp.concatenate(threefry((state[0:1], state[1:2]), places))[:size]
    return bits.reshape(tuple(shape)), xp.concatenate([state[:2], state[2:] + np.uint32(1)])


# --- the primitives ---------------------------------------------------------------------------------------------------
class RandomEffect(jaxlink.KernelEffect):
    """Draws and seeds keep their order, and stay though nobody uses the numbers."""

    def __str__(self) -> str:
        return "Random"


_effect = RandomEffect()

prng_seed_p = jaxlink.Primitive("prng_seed")  # operands: int32 or uint32 scalars, any number of them; no results
prng_seed_p.multiple_results = True
prng_seed_p.def_effectful_abstract_eval(lambda *seeds: ([], {_effect}))

prng_random_bits_p = jaxlink.Primitive("prng_random_bits")  # no operands; param shape; the bits as int32
prng_random_bits_p.def_effectful_abstract_eval(
    lambda *, shape: (jaxlink.ShapedArray(shape, jnp.dtype("int32")), {_effect})
)


only_on("the simulated TPU", prng_seed_p, prng_random_bits_p)


def uses_generator(jaxpr: Any) -> bool:
    """Whether a kernel draws from the core's generator, or seeds it."""
    return any(isinstance(e, RandomEffect) for e in jaxpr.effects)


def prng_seed(*seeds: int | jax.Array) -> None:
    """Set the core's random generator.

    In a kernel with a grid, seed in the first program only, or make the seed depend on the program id: each seeding
    starts the sequence anew.

    Arguments:
      *seeds: 32-bit integer scalars, all of which count; none is the same as 0.

    Raises:
      ValueError: outside a kernel. TypeError: a seed is not one 32-bit integer. OverflowError: it does not fit.
    """
    frames.required("pltpu.prng_seed")
    prng_seed_p.bind(*[_seed(s, n) for n, s in enumerate(seeds or (0,))])


def _seed(seed: Any, number: int) -> Any:
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, (bool, np.bool_)):
        if not -(2**31) <= seed < 2**32:
            raise mistake(
                OverflowError,
                f"Seed {number} of pltpu.prng_seed is {seed}, which does not fit 32 bits.",
                hint="pass its halves as two seeds: pltpu.prng_seed(n >> 32, n & 0xffffffff)",
            )
        return np.int32(seed) if seed < 2**31 else np.uint32(seed)
    if isinstance(seed, (jax.Array, np.ndarray, jaxlink.Tracer)) and seed.dtype in (np.int32, np.uint32):
        if seed.shape == ():
            return seed
    raise mistake(
        TypeError,
        f"Seed {number} of pltpu.prng_seed is {kind_of(seed)}, not one 32-bit integer.",
        hint="pltpu.prng_seed(seed_ref[0], pl.program_id(0)): scalars, as many as you like",
    )


def prng_random_bits(shape: Sequence[int]) -> jax.Array:
    """Random bits from the core's generator.

    Arguments:
      shape: of the result, in elements.

    Returns:
      int32 bits; `pltpu.bitcast(bits, jnp.uint32)` sees them as unsigned.

    Raises:
      ValueError: outside a kernel. TypeError: the shape is not of integers.
    """
    frames.required("pltpu.prng_random_bits")
    return prng_random_bits_p.bind(shape=_shape(shape, "prng_random_bits"))


def _shape(shape: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in ((shape,) if isinstance(shape, (int, np.integer)) else shape))
    except TypeError:
        hint = f"pltpu.{name}((8, 128)): Python integers; x_ref.shape is such a tuple"
        raise mistake(TypeError, f"The shape of pltpu.{name} is {kind_of(shape)}.", hint=hint) from None


# --- sampling without a key -------------------------------------------------------------------------------------------
def stateful_bits(shape: Sequence[int] = (), dtype: Any = jnp.uint32) -> jax.Array:
    """Uniform bits from the core's generator, as `jax.random.bits` gives them from a key.

    Arguments:
      shape: of the result.
      dtype: uint8, uint16 or uint32 (or uint64, which takes two draws).

    Raises:
      ValueError: outside a kernel. TypeError: another dtype.
    """
    dtype = jaxlink.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.unsignedinteger) or jnp.iinfo(dtype).bits < 8:
        hint = "jnp.uint8, jnp.uint16, jnp.uint32; pltpu.bitcast sees the bits as another type"
        raise mistake(TypeError, f"pltpu.stateful_bits gives unsigned integers, not {dtype}.", hint=hint)
    return _bits(shape, jnp.iinfo(dtype).bits, "stateful_bits")


def _bits(shape: Any, width: int, name: str) -> jax.Array:
    frames.required(f"pltpu.{name}")
    shape = _shape(shape, name)

    def draw():
        return lax.bitcast_convert_type(prng_random_bits_p.bind(shape=shape), jnp.uint32)

    if width == 64:
        return draw().astype(jnp.uint64) << 32 | draw().astype(jnp.uint64)
    return draw() if width == 32 else draw().astype(f"uint{width}")


def _floating(dtype: Any, name: str) -> Any:
    dtype = jaxlink.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        hint = "draw jnp.float32 and convert: .astype(…)"
        raise mistake(TypeError, f"pltpu.{name} gives float32, bfloat16, float16 or float64, not {dtype}.", hint=hint)
    return dtype


def _unit(shape: Any, dtype: Any, name: str) -> jax.Array:
    """Uniform in [0, 1): as many random bits as the significand holds, over their number."""
    info = jnp.finfo(dtype)
    bits = _bits(shape, max(info.bits, 32), name)
    return (bits >> (jnp.iinfo(bits.dtype).bits - info.nmant - 1)).astype(dtype) * dtype.type(2.0 ** -(info.nmant + 1))


def stateful_uniform(
    shape: Sequence[int] = (), dtype: Any = jnp.float32, minval: Any = 0.0, maxval: Any = 1.0
) -> jax.Array:
    """Uniform numbers in [minval, maxval) from the core's generator.

    Arguments:
      shape: of the result.
      dtype: a floating-point dtype of 16 bits or more.
      minval, maxval: the range; numbers or arrays that broadcast to the shape.

    Raises:
      ValueError: outside a kernel. TypeError: another dtype.
    """
    dtype = _floating(dtype, "stateful_uniform")
    low, high = jnp.asarray(minval, dtype), jnp.asarray(maxval, dtype)
    x = low + _unit(shape, dtype, "stateful_uniform") * (high - low)
    inside = jnp.nextafter(high, low)  # rounding may reach `high`
    return jnp.maximum(low, jnp.minimum(x, inside))


def stateful_normal(shape: Sequence[int] = (), dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal numbers from the core's generator.

    Arguments:
      shape: of the result.
      dtype: a floating-point dtype of 16 bits or more.

    Raises:
      ValueError: outside a kernel. TypeError: another dtype.
    """
    dtype = _floating(dtype, "stateful_normal")
    wide = dtype if jnp.finfo(dtype).bits > 16 else jnp.dtype(jnp.float32)
    unit = _unit(shape, wide, "stateful_normal")
    half = wide.type(jnp.finfo(wide).eps / 4)  # the middle of the unit's step: never -1, where erf_inv is infinite
    return (lax.erf_inv((unit + half) * 2 - 1) * wide.type(math.sqrt(2))).astype(dtype)


def stateful_bernoulli(p: Any = 0.5, shape: Sequence[int] | None = None) -> jax.Array:
    """Booleans that are True with probability `p`, from the core's generator.

    Arguments:
      p: a number or an array of float32 or float64.
      shape: of the result, to which `p` broadcasts; None is the shape of `p`.

    Raises:
      ValueError: outside a kernel; `p` does not broadcast.
    """
    p = jnp.asarray(p, jnp.result_type(float) if isinstance(p, (int, float)) else None)
    p = p.astype(jnp.promote_types(p.dtype, jnp.float32))
    shape = p.shape if shape is None else _shape(shape, "stateful_bernoulli")
    return _unit(shape, p.dtype, "stateful_bernoulli") < jnp.broadcast_to(p, shape)


# --- keys -------------------------------------------------------------------------------------------------------------
def key_bits(key: Any, bit_width: int, shape: Sequence[int], xp: Any = jnp) -> Any:
    """What `jax.random.bits` gives for a Pallas key.

    Arguments:
      key: its words, uint32[1, 2].
      bit_width: of the result: 8, 16, 32 or 64.
      shape: of the result.
      xp: `jax.numpy` or `numpy`.
    """
    bits, state = random_bits(mix([key[0, 0], key[0, 1]], xp), shape, xp)
    if bit_width == 64:
        return bits.astype(np.uint64) << np.uint64(32) | random_bits(state, shape, xp)[0].astype(np.uint64)
    return bits if bit_width == 32 else bits.astype(f"uint{bit_width}")


def key_fold_in(key: Any, data: Any, xp: Any = jnp) -> Any:
    """The words of `jax.random.fold_in(key, data)` for a Pallas key; arguments as `key_bits`, and a 32-bit integer."""
    return mix([key[0, 0], key[0, 1], data], xp)[:2].reshape(1, 2)


def _key_split(key: Any, shape: Any) -> Any:
    hint = "jax.random.fold_in(key, number), with another number for each key"
    raise mistake(NotImplementedError, "A Pallas key cannot be split.", hint=hint)


pallas_keys = jaxlink.register_keys(
    name="palladion_tpu",
    tag="pl",
    key_shape=(1, 2),
    seed=lambda seed: mix([seed])[:2].reshape(1, 2),
    split=_key_split,
    random_bits=key_bits,
    fold_in=key_fold_in,
)


def to_pallas_key(key: jax.Array) -> jax.Array:
    """A key for the TPU's own generator, for `jax.random` functions in kernels; `jax.random.fold_in` derives others.

    It holds its two words as uint32[1, 2] and is passed to a kernel in SMEM.

    Arguments:
      key: a key, or an array of keys, of any kind (typed, or the old uint32 arrays); a Pallas key stays as it is.

    Returns:
      Pallas keys of the same shape.

    Raises:
      TypeError: not a key.
    """
    key = jnp.asarray(key) if isinstance(key, np.ndarray) else key
    typed = hasattr(key, "dtype") and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and jax.random.key_impl(key) == pallas_keys:
        return key
    if not typed:
        try:
            key = jax.random.wrap_key_data(key)
        except (TypeError, ValueError, AttributeError):
            hint = "pltpu.to_pallas_key(jax.random.key(0))"
            raise mistake(TypeError, f"pltpu.to_pallas_key takes a key, not {kind_of(key)}.", hint=hint) from None
    words = jax.vmap(lambda k: jax.random.bits(k, (1, 2), jnp.uint32))(key.reshape(-1))
    return jax.random.wrap_key_data(words.reshape(*key.shape, 1, 2), impl=pallas_keys)


# --- block-invariant sampling -----------------------------------------------------------------------------------------
def sample_block(
    sampler_fn: Callable[..., jax.Array],
    global_key: jax.Array,
    block_size: Sequence[int],
    tile_size: Sequence[int],
    total_size: Sequence[int],
    block_index: Sequence[Any] | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Random numbers for one block of an array, the same however the array is cut into blocks.

    The array is made of tiles, numbered in row-major order; each draws with the global key folded with its number.

    Arguments:
      sampler_fn: called as `sampler_fn(key, tile_size, **kwargs)`, such as `jax.random.uniform`.
      global_key: one key for all blocks.
      block_size: the shape of this block.
      tile_size: the shape of a tile; it divides every block size that is to give the same numbers.
      total_size: the shape of the whole array.
      block_index: which block this is; by default the program ids of the first grid axes.
      **kwargs: further arguments of the sampler.

    Returns:
      an array of shape `block_size`.

    Raises:
      ValueError: the sizes have different lengths, or the tile does not divide the block.
    """
    block, tile, total = (_shape(s, "sample_block") for s in (block_size, tile_size, total_size))
    index = tuple(block_index) if block_index is not None else tuple(ops.program_id(a) for a in range(len(block)))
    lengths = {"tile_size": len(tile), "total_size": len(total), "block_index": len(index)}
    for name, length in lengths.items():
        if length != len(block):
            raise mistake(
                ValueError,
                f"pltpu.sample_block: {name} has {count_of(length, 'dimension')}, but block_size has {len(block)}.",
                hint="give one number for each dimension of the block",
            )
    if any(t < 1 or b % t for b, t in zip(block, tile)):
        raise mistake(
            ValueError,
            f"pltpu.sample_block: a tile of {tile} does not divide a block of {block}.",
            hint="take the greatest common divisor of all the block sizes in use",
        )
    tiles = [b // t for b, t in zip(block, tile)]  # in a block
    across = [-(-n // t) for n, t in zip(total, tile)]  # in the whole array

    def one(offset):
        number = 0
        for n, i, inside, count in zip(across, index, offset, tiles):
            number = number * n + i * count + inside
        return sampler_fn(jax.random.fold_in(global_key, number), tile, **kwargs)

    samples = jnp.stack([one(o) for o in itertools.product(*map(range, tiles))]).reshape(*tiles, *tile)
    rank = len(block)
    return samples.transpose([d for pair in zip(range(rank), range(rank, 2 * rank)) for d in pair]).reshape(block)
