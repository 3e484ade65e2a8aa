"""Packing, bits of bytes and stochastic rounding against NumPy on the raw bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu

RNG = np.random.default_rng(0)


def in_kernel(function, *operands):
    def kernel(*refs):
        refs[-1][...] = function(*(r[...] for r in refs[:-1]))

    out = jax.eval_shape(function, *operands)
    return np.asarray(pl.pallas_call(kernel, out, interpret=True)(*operands))


# --- packing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "narrow"),
    [(w, n) for w in ("int32", "uint32") for n in ("int16", "uint8", "int8", "int4", "int2")]
    + [("int16", n) for n in ("uint8", "int8", "int4")],
)
def test_packed_integers_lie_lowest_first(word, narrow):
    bits, width = np.dtype(word).itemsize * 8, jnp.iinfo(narrow).bits
    xs = RNG.integers(-(2**15), 2**15, (bits // width, 4, 8)).astype(word)
    packed = in_kernel(lambda *v: pltpu.pack_elementwise(v, packed_dtype=narrow), *xs)
    expected = sum((x.astype(object) % 2**width) << (i * width) for i, x in enumerate(xs))
    assert packed.dtype == f"uint{bits}"
    np.testing.assert_array_equal(packed.astype(object), expected)
    for i, x in enumerate(xs):
        got = pltpu.unpack_elementwise(packed, index=i, packed_dtype=narrow, unpacked_dtype=word)
        low = x.astype(object) % 2**width
        signed = np.where(low >= 2 ** (width - 1), low - 2**width, low) if narrow[0] == "i" else low
        np.testing.assert_array_equal(got, (signed % 2**bits).astype(f"uint{bits}").view(word))


def test_floats_pack_as_bfloat16():
    a, b = RNG.normal(size=(2, 4, 8)).astype(np.float32)
    packed = in_kernel(lambda *v: pltpu.pack_elementwise(v, packed_dtype=jnp.bfloat16), a, b)
    halves = [x.astype(ml_dtypes.bfloat16) for x in (a, b)]
    expected = halves[0].view(np.uint16).astype(np.uint32) | halves[1].view(np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(packed, expected)
    for i, half in enumerate(halves):
        got = pltpu.unpack_elementwise(packed, index=i, packed_dtype=jnp.bfloat16, unpacked_dtype=jnp.float32)
        np.testing.assert_array_equal(got, half.astype(np.float32))


def test_unpacking_is_a_strided_bitcast():
    x = RNG.integers(-(2**15), 2**15, (8, 128)).astype(np.int16)
    bytes_ = np.asarray(pltpu.bitcast(x, jnp.int8))
    for i in range(2):
        got = pltpu.unpack_elementwise(x, index=i, packed_dtype=jnp.int8, unpacked_dtype=jnp.int16)
        np.testing.assert_array_equal(got, bytes_[i::2].astype(np.int16))


# --- bits of a byte ---------------------------------------------------------------------------------------------------
BYTES = np.arange(256).astype(np.uint8).reshape(2, 128)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("widths", [(4, 2), (2, 4), (4, 4), (2, 2, 2, 2), (4,), ()])
def test_split_bits(dtype, widths):
    parts = pltpu.split_bits(BYTES.view(dtype), widths)
    assert [p.dtype for p in parts] == [jnp.dtype(f"int{w}") for w in widths]
    for i, (part, w) in enumerate(zip(parts, widths)):
        np.testing.assert_array_equal(np.asarray(part).astype(np.int8) % 2**w, (BYTES >> sum(widths[:i])) % 2**w)


def test_join_bits_and_fp6():
    two, four = in_kernel(lambda x: pltpu.pack_fp6(x)[0], BYTES), in_kernel(lambda x: pltpu.pack_fp6(x)[1], BYTES)
    assert (two.dtype, four.dtype) == (jnp.int2, jnp.int4)
    np.testing.assert_array_equal(pltpu.unpack_fp6(two, four), BYTES & 63)
    np.testing.assert_array_equal(pltpu.join_bits(four_bits=four), BYTES & 15)
    np.testing.assert_array_equal(pltpu.join_bits(two_bits=jnp.asarray(two).astype(jnp.uint2)), BYTES >> 4 & 3)
    assert pltpu.join_bits(four_bits=four).dtype == jnp.int8


# --- stochastic rounding ----------------------------------------------------------------------------------------------
TARGETS = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz"]


def neighbours(x, target):
    """The next representable numbers below and above |x|, in float64, from the table of all finite ones."""
    bits = jnp.finfo(target).bits
    with np.errstate(invalid="ignore"):  # some are NaN
        table = np.arange(2 ** (bits - 1)).astype(f"uint{bits}").view(jnp.dtype(target)).astype(np.float64)
    table = np.unique(table[np.isfinite(table)])
    at = np.searchsorted(table, np.abs(x), side="right") - 1
    return table[at], table[np.minimum(at + (table[at] < np.abs(x)), len(table) - 1)]


@pytest.mark.parametrize("target", TARGETS)
def test_rounds_to_a_neighbour_with_the_right_chance(target):
    x = np.concatenate([RNG.normal(size=300), 2.0 ** RNG.uniform(-20, 3, 300), [0.0, 1.0, -0.125]]).astype(np.float32)
    bits = RNG.integers(0, 2**32, x.shape, np.uint32)
    got = in_kernel(lambda x, r: pltpu.stochastic_round(x, r, target_dtype=target), x, bits).astype(np.float64)
    low, high = neighbours(x.astype(np.float64), target)
    part = np.where(high > low, (np.abs(x.astype(np.float64)) - low) / np.where(high > low, high - low, 1), 0)
    away = bits / 2**32 >= 1 - part
    sure = np.abs(bits / 2**32 - (1 - part)) > 2**-15  # a draw at the very edge may go either way
    expected = np.copysign(np.where(away, high, low), x)
    np.testing.assert_array_equal(got[sure], expected[sure])
    assert sure.mean() > 0.99
    assert set(np.where(away, 1, 0)) == {0, 1}


def test_what_is_not_finite_stays():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4028235e38], np.float32)
    got = np.asarray(pltpu.stochastic_round(x, np.full(6, 2**32 - 1, np.uint32), target_dtype=jnp.bfloat16))
    np.testing.assert_array_equal(got.astype(np.float32), [np.nan, np.inf, -np.inf, 0, 0, np.inf])
    np.testing.assert_array_equal(np.signbit(got[3:5].astype(np.float32)), [False, True])


@pytest.mark.parametrize(
    ("function", "first_line"),
    [
        (
            lambda: pltpu.pack_elementwise([jnp.zeros(4, jnp.int32)] * 3, packed_dtype=jnp.int16),
            "pltpu.pack_elementwise got 3 arrays, but 2 int16 fill one int32.",
        ),
        (
            lambda: pltpu.pack_elementwise([jnp.zeros(4), jnp.zeros(5)], packed_dtype=jnp.bfloat16),
            "pltpu.pack_elementwise packs arrays of one shape and dtype, not float32[4], float32[5].",
        ),
        (
            lambda: pltpu.pack_elementwise([jnp.zeros(4)] * 2, packed_dtype=jnp.float16),
            "pltpu.pack_elementwise pairs integers with integers and float32 with bfloat16, not float32 with float16.",
        ),
        (
            lambda: pltpu.unpack_elementwise(
                jnp.zeros(4, jnp.int32), index=2, packed_dtype=jnp.bfloat16, unpacked_dtype=jnp.float32
            ),
            "pltpu.unpack_elementwise: index is 2 (int), but a float32 holds 2 bfloat16.",
        ),
        (
            lambda: pltpu.unpack_elementwise(
                jnp.zeros(4), index=0, packed_dtype=jnp.bfloat16, unpacked_dtype=jnp.float32
            ),
            "pltpu.unpack_elementwise to float32 takes words of 32 bits, not float32[4].",
        ),
        (
            lambda: pltpu.unpack_elementwise(
                jnp.zeros(4, jnp.int16), index=0, packed_dtype=jnp.int16, unpacked_dtype=jnp.int16
            ),
            "pltpu.unpack_elementwise: int16 is not narrower than int16.",
        ),
        (lambda: pltpu.split_bits(BYTES, (4, 4, 2)), "pltpu.split_bits splits a byte into parts of 2 or 4 bits"),
        (
            lambda: pltpu.split_bits(jnp.zeros(4, jnp.int16), (4,)),
            "pltpu.split_bits takes int8 or uint8, not int16[4].",
        ),
        (lambda: pltpu.join_bits(), "pltpu.join_bits got neither two_bits nor four_bits."),
        (
            lambda: pltpu.join_bits(four_bits=jnp.zeros(4, jnp.int8)),
            "pltpu.join_bits: four_bits must be int4 or uint4, not int8[4].",
        ),
        (
            lambda: pltpu.unpack_fp6(jnp.zeros(4, jnp.int2), jnp.zeros(5, jnp.int4)),
            "pltpu.join_bits: four_bits of (5,) and two_bits of (4,) differ.",
        ),
        (
            lambda: pltpu.stochastic_round(jnp.zeros(4), jnp.zeros(4, jnp.int32), target_dtype=jnp.bfloat16),
            "pltpu.stochastic_round of float32[4] takes uint32 bits of its shape, not int32[4].",
        ),
        (
            lambda: pltpu.stochastic_round(jnp.zeros(4), jnp.zeros(4, jnp.uint32), target_dtype=jnp.float16),
            "pltpu.stochastic_round rounds float32 to bfloat16, float8_e5m2, float8_e4m3fn",
        ),
    ],
)
def test_mistakes(function, first_line):
    with pytest.raises(ValueError) as error:
        function()
    assert str(error.value).startswith(first_line)
