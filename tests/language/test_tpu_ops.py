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
    ],
)
def test_mistakes(function, kind, line):
    with pytest.raises(kind) as error:
        function()
    assert str(error.value).splitlines()[0].startswith(line)
