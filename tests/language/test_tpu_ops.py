"""pltpu's operations on plain arrays and Refs: bitcast, roll, reciprocal, masked load and store, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu


def call(function, *operands, interpret=True):
    """`function` on the values of whole operands, inside a kernel."""

    def kernel(*refs):
        refs[-1][...] = function(*(r[...] for r in refs[:-1]))

    out = jax.eval_shape(function, *operands)
    return np.asarray(pl.pallas_call(kernel, out, interpret=interpret)(*operands))


def rows_packed(x, dtype):
    """What bitcast does, in NumPy: bytes of neighbouring rows are neighbours in an element, lowest first."""
    raw = np.ascontiguousarray(np.moveaxis(np.asarray(x), -2, -1)).view(dtype)
    return np.moveaxis(raw, -1, -2)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.float32, np.int32),
        (np.float32, np.int16),
        (np.float32, np.int8),
        (np.int16, np.float32),
        (np.int8, np.uint32),
        (np.uint8, np.int16),
        (np.int32, np.float32),
    ],
)
def test_bitcast(source, target):
    bits = np.random.default_rng(0).integers(0, 256, (2, 8, 4 * np.dtype(source).itemsize), np.uint8)
    x = bits.view(source)
    x = np.where(np.isnan(x), 1, x).astype(source) if np.issubdtype(source, np.floating) else x
    got = call(lambda v: pltpu.bitcast(v, target), x)
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(rows_packed(x, target)).view(np.uint8))
    last = call(lambda v: pltpu.bitcast(v, target, dim=-1), x)
    np.testing.assert_array_equal(last.view(np.uint8), x.view(target).view(np.uint8))


def test_bitcast_of_one_dimension_along_the_last():
    x = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(call(lambda v: pltpu.bitcast(v, jnp.int16, dim=-1), x), x.view(np.int16))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shift", [0, 1, 5, 11])
def test_roll(axis, shift):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(call(lambda v: pltpu.roll(v, shift, axis), x), np.roll(x, shift, axis))
    for s in (shift, -shift):
        got = call(lambda v, s: pltpu.roll(v, s[0], axis), x, np.array([s], np.int32))
        np.testing.assert_array_equal(got, np.roll(x, s, axis))


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_roll_with_a_stride(stride):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    got = call(lambda v: pltpu.roll(v, 2, 1, stride=stride, stride_axis=0), x)
    np.testing.assert_array_equal(got, np.stack([np.roll(row, 2 + r * stride) for r, row in enumerate(x)]))


@pytest.mark.parametrize("approx", [False, True])
def test_reciprocal(approx):
    x = np.array([1, 3, -0.5, np.inf], np.float32)
    np.testing.assert_allclose(call(lambda v: pltpu.reciprocal(v, approx=approx), x), 1 / x, rtol=1e-7)


@pytest.mark.parametrize("interpret", [True, pl.EagerParams()], ids=["reference", "eager"])
def test_masked_load_and_store(interpret):
    def kernel(x_ref, a_ref, b_ref):
        mask = jax.lax.broadcasted_iota(jnp.int32, (2, 4), 1) < 3
        a_ref[...] = pltpu.load(x_ref, mask=mask)
        b_ref[...] = jnp.zeros((2, 4))
        pltpu.store(b_ref, x_ref[...], mask=mask)
        pltpu.store(b_ref.at[0, 0:2], pltpu.load(x_ref.at[1, 0:2]))

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    a, b = pl.pallas_call(kernel, (jax.ShapeDtypeStruct((2, 4), jnp.float32),) * 2, interpret=interpret)(x)
    np.testing.assert_array_equal(a, [[0, 1, 2, np.nan], [4, 5, 6, np.nan]])
    np.testing.assert_array_equal(b, [[4, 5, 2, 0], [4, 5, 6, 0]])


def naive_conv(x, w, strides, pads):
    """NHWC with HWIO, no dilation, in float64."""
    x = np.pad(x.astype(np.float64), ((0, 0), *pads, (0, 0)))
    h, k = w.shape[:2]
    rows, columns = (x.shape[1] - h) // strides[0] + 1, (x.shape[2] - k) // strides[1] + 1
    out = np.zeros((len(x), rows, columns, w.shape[3]))
    for i in range(rows):
        for j in range(columns):
            part = x[:, i * strides[0] : i * strides[0] + h, j * strides[1] : j * strides[1] + k]
            out[:, i, j] = np.einsum("nhwc,hwco->no", part, w)
    return out


@pytest.mark.parametrize("strides", [None, (2, 1)])
@pytest.mark.parametrize("pads", [None, ((1, 2), (0, 1))])
@pytest.mark.parametrize("reversal", [None, (True, False), (True, True)])
def test_conv(strides, pads, reversal):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 7, 6, 3)).astype(np.float32), rng.normal(size=(3, 2, 3, 4)).astype(np.float32)
    flipped = np.flip(w, [d for d, r in enumerate(reversal or ()) if r])
    expected = naive_conv(x, flipped, strides or (1, 1), pads or ((0, 0), (0, 0)))
    acc = rng.normal(size=expected.shape).astype(np.float32)
    options = dict(window_strides=strides, padding=pads, window_reversal=reversal)

    def conv(x, w, *acc):
        return pltpu.conv(x, w, *acc, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    np.testing.assert_allclose(call(conv, x, w), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(call(conv, x, w, acc), expected + acc, rtol=1e-4, atol=1e-4)


def test_conv_accumulates_in_the_accumulators_dtype():
    x, w = jnp.ones((1, 4, 4, 2), jnp.bfloat16), jnp.ones((3, 3, 2, 2), jnp.bfloat16)
    numbers = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert pltpu.conv(x, w, **numbers).dtype == jnp.bfloat16
    got = pltpu.conv(x, w, jnp.full((1, 2, 2, 2), 0.125), **numbers)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.full((1, 2, 2, 2), 18.125))


def test_annotations_change_nothing():
    def kernel(x_ref, o_ref):
        view = pltpu.annotate(x_ref.at[1:3], no_store=True, no_bank_conflict=True)
        pltpu.annotate(o_ref, no_hazard_no_deps=True)[...] = view[...] + pltpu.annotate(x_ref)[0:2]

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    got = pl.pallas_call(kernel, jax.ShapeDtypeStruct((2, 6), jnp.float32), interpret=True)(x)
    np.testing.assert_array_equal(got, x[1:3] + x[:2])


REF = jax.new_ref(jnp.zeros((4, 6)))
NUMBERS = ("NHWC", "HWIO", "NHWC")
X = jnp.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("function", "kind", "line"),
    [
        (
            lambda: pltpu.bitcast(X[:3].astype(jnp.int16), jnp.int32),
            ValueError,
            "3 elements of 16 bits along dimension 0 are no whole number of 32 bits.",
        ),
        (
            lambda: pltpu.bitcast(X[0], jnp.int16),
            ValueError,
            "pltpu.bitcast changes widths along the last or the last but one dimension, not -2 of 1.",
        ),
        (
            lambda: pltpu.bitcast(X[None], jnp.int16, dim=0),
            ValueError,
            "pltpu.bitcast changes widths along the last or the last but one dimension, not 0 of 3.",
        ),
        (lambda: pltpu.bitcast(X > 3, jnp.int8), ValueError, "pltpu.bitcast has no meaning for bool"),
        (lambda: pltpu.roll(X, -1, 1), ValueError, "shift must be non-negative."),
        (lambda: pltpu.roll(X, 1, -1), ValueError, "axis is out of range"),
        (lambda: pltpu.roll(X, 1, 2), ValueError, "axis is out of range"),
        (lambda: pltpu.roll(X, 1, 1, stride=1), ValueError, "stride and stride_axis must be both specified or not."),
        (lambda: pltpu.roll(X, 1, 1, stride=-1, stride_axis=0), ValueError, "stride must be non-negative."),
        (
            lambda: pltpu.roll(X, 1, 1, stride=1, stride_axis=1),
            ValueError,
            "stride_axis must be another dimension than axis 1, not 1.",
        ),
        (
            lambda: pltpu.reciprocal(jnp.arange(3)),
            TypeError,
            "pltpu.reciprocal takes floating-point arrays, not int32.",
        ),
        (lambda: pltpu.load(X), TypeError, "pltpu.load takes a Ref or a view of one"),
        (
            lambda: pltpu.conv(
                X[None, ..., None], X[None, :, :1, None].astype(jnp.bfloat16), dimension_numbers=NUMBERS
            ),
            TypeError,
            "pltpu.conv takes two arrays of one dtype, not float32[1, 4, 6, 1] and bfloat16[1, 4, 1, 1].",
        ),
        (
            lambda: pltpu.conv(
                jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)), dimension_numbers=NUMBERS, window_reversal=(True,)
            ),
            ValueError,
            "pltpu.conv: window_reversal has 1 entry for 2 spatial dimensions.",
        ),
        (
            lambda: pltpu.conv(
                jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)), jnp.ones((1, 2, 2, 3)), dimension_numbers=NUMBERS
            ),
            ValueError,
            "pltpu.conv gives float32[1, 2, 2, 2], which cannot be added to acc, float32[1, 2, 2, 3].",
        ),
        (lambda: pltpu.annotate(X), TypeError, "pltpu.annotate takes a Ref or a view of one, not float32[4, 6]."),
        (
            lambda: pltpu.annotate(REF, no_store=True, no_hazard=True),
            ValueError,
            "pltpu.annotate: no_store and no_hazard contradict each other.",
        ),
    ],
)
def test_mistakes(function, kind, line):
    with pytest.raises(kind) as error:
        function()
    assert str(error.value).splitlines()[0].startswith(line)
