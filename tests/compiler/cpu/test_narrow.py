"""Integers and floats of less than a byte, the 8-bit floats, and bit casts: as XLA has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())
INTEGERS = ["int4", "uint4", "int2", "uint2"]
FLOATS = [
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip
rng = np.random.default_rng(0)


def sds(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def both(kernel, outs, *args, **options):
    """Results of native code and of the reference interpreter, as NumPy arrays."""
    run = lambda **how: jax.tree.map(np.asarray, pl.pallas_call(kernel, outs, **options, **how)(*args))
    return run(**NATIVE), run(interpret=True)


def same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(v).astype(np.float64) for v in (g, w))
        np.testing.assert_array_equal(g, w)
        np.testing.assert_array_equal(np.signbit(g) & ~np.isnan(g), np.signbit(w) & ~np.isnan(w))


def every(dtype):
    """All values of a small integer type, paired with each other."""
    info = jnp.iinfo(dtype)
    v = np.arange(int(info.min), int(info.max) + 1)
    return (jnp.asarray(f(v, len(v)), jnp.int32).astype(dtype) for f in (np.repeat, np.tile))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arithmetic_of_small_integers_wraps(dtype):
    x, y = every(dtype)
    ops = [
        jnp.add, jnp.subtract, jnp.multiply, jnp.minimum, jnp.maximum, jnp.bitwise_and, jnp.bitwise_xor,
        lax.div, lax.rem, lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic, jnp.less, jnp.equal,
    ]  # fmt: skip

    def kernel(x_ref, y_ref, *o_refs):
        for op, o_ref in zip(ops, o_refs):
            o_ref[...] = op(x_ref[...], y_ref[...])

    outs = [jax.eval_shape(op, x, y) for op in ops]
    got, want = both(kernel, outs, x, y)
    for op, g, w in zip(ops, got, want):
        assert (g == w).all(), op
    wrapped = (np.asarray(x).astype(np.int32) * np.asarray(y).astype(np.int32)).astype(np.asarray(x).dtype)
    np.testing.assert_array_equal(got[2], wrapped)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_casts_of_small_integers(dtype):
    x, _ = every(dtype)
    wide = ["int8", "uint8", "int32", "float32", "bfloat16", "bool", *INTEGERS]
    given = [jnp.asarray(np.linspace(-40, 40, 161)).astype(w) for w in wide]

    def kernel(x_ref, *refs):
        for w, g_ref, o_ref, b_ref in zip(wide, *(refs[k * len(wide) :] for k in range(3))):
            o_ref[...] = x_ref[...].astype(w)
            b_ref[...] = g_ref[...].astype(dtype)

    outs = [sds(x, w) for w in wide] + [sds(g, dtype) for g in given]
    same(*both(kernel, outs, x, *given))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_small_integers_in_ragged_blocks_scratch_aliases_and_vmap(dtype):
    info = jnp.iinfo(dtype)
    x = jnp.asarray(rng.integers(int(info.min), int(info.max) + 1, (3, 7, 13)), jnp.int32).astype(dtype)

    def kernel(x_ref, o_ref, s_ref):
        s_ref[...] = x_ref[...]
        o_ref[...] = s_ref[...] + x_ref[...] * x_ref[...]

    spec = pl.BlockSpec((3, 5), lambda i, j: (i, j))
    call = pl.pallas_call(
        kernel, sds(x[0]), grid=(3, 3), in_specs=[spec], out_specs=spec, input_output_aliases={0: 0},
        scratch_shapes=[pltpu.VMEM((3, 5), dtype)], **NATIVE,
    )  # fmt: skip
    wide = np.asarray(x).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(x), (wide + wide * wide).astype(np.asarray(x).dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_floats_widen_and_round_as_xla_does(dtype):
    bits = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8)
    x = jnp.asarray(bits.view(jnp.dtype(dtype)))
    special = [0, -0.0, np.nan, np.inf, -np.inf, 3, 6, 5, 1.5, 448, 464, 465, 57344, 61440, 240, 248, 30, 31]
    f = jnp.asarray(
        np.concatenate([rng.standard_normal(999) * np.exp(rng.standard_normal(999) * 8), special]), "float32"
    )

    def kernel(x_ref, f_ref, wide_ref, narrow_ref, moved_ref, larger_ref):
        wide_ref[...] = x_ref[...].astype(jnp.float32)
        narrow_ref[...] = f_ref[...].astype(dtype)
        moved_ref[...] = x_ref[...][::-1]
        larger_ref[...] = jnp.maximum(x_ref[...], x_ref[...][::-1])

    got, want = both(kernel, [sds(x, "float32"), sds(f, dtype), sds(x), sds(x)], x, f)
    same(got, want)
    finite = got[0][np.isfinite(got[0])]
    assert len(np.unique(finite)) > len(bits) * 0.8


@pytest.mark.parametrize("dtype", [d for d in FLOATS if "e8m0" not in d])
def test_nextafter_of_small_floats(dtype):
    values = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8)[:: 1 if "float4" in dtype else 5]
    values = np.concatenate([values, values ^ (8 if "float4" in dtype else 0x80)]).view(jnp.dtype(dtype))
    x, y = (jnp.asarray(f(values, len(values))) for f in (np.repeat, np.tile))

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.nextafter(x_ref[...], y_ref[...])

    got, want = both(kernel, sds(x), x, y)
    if dtype.endswith("fnuz"):  # XLA steps from the smallest negative number to NaN, as there is no -0
        keep = ~(np.isnan(want.astype(np.float32)) & (got.astype(np.float32) == 0))
        assert (~keep).sum() < len(keep) // 50
        got, want = got[keep], want[keep]
    same(got, want)


@pytest.mark.parametrize("old,new", [("int4", "int8"), ("int8", "int4"), ("float32", "uint8"), ("uint8", "float32"),
                                     ("bfloat16", "float32"), ("uint4", "int16"), ("float16", "int16")])  # fmt: skip
def test_bit_casts_of_any_width(old, new):
    ratio = max(1, jax.dtypes.itemsize_bits(jnp.dtype(new)) // jax.dtypes.itemsize_bits(jnp.dtype(old)))
    x = jnp.asarray(rng.integers(0, 3, (5, ratio)), jnp.int32).astype(old)
    x = x if ratio > 1 else x[:, 0]
    out = jax.eval_shape(lambda v: lax.bitcast_convert_type(v, jnp.dtype(new)), x)

    def kernel(x_ref, o_ref):
        o_ref[...] = lax.bitcast_convert_type(x_ref[...], jnp.dtype(new))

    same(*both(kernel, out, x))


def test_a_ref_of_small_integers_seen_as_bytes():
    x = jnp.asarray(rng.integers(-8, 8, (16, 24)), jnp.int32).astype(jnp.int4)

    def kernel(x_ref, o_ref, p_ref):
        o_ref[...] = x_ref.bitcast(jnp.int8)[...]
        p_ref.bitcast(jnp.int8)[...] = o_ref[...]

    got, want = both(kernel, [jax.ShapeDtypeStruct((8, 24), jnp.int8), sds(x)], x)
    same(got, want)
    np.testing.assert_array_equal(got[1], np.asarray(x))
