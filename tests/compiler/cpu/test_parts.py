"""Complex numbers and PRNG keys in native kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())
rng = np.random.default_rng(0)


def complex_array(*shape, dtype=np.complex64):
    return jnp.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape), dtype)


FUNCTIONS = dict(
    arithmetic=lambda a, b: (a + b, a - b, a * b, a / b, -a, a * 2.5),
    parts=lambda a, b: (a.real, b.imag, jnp.conj(a), jnp.abs(a), jnp.angle(b), lax.complex(a.real, b.real)),
    powers=lambda a, b: (a**3, a**-2, a**b, jnp.square(a), jnp.sqrt(a), lax.rsqrt(b)),
    exponentials=lambda a, b: (jnp.exp(a), jnp.log(b), jnp.expm1(a), jnp.log1p(b), jax.nn.sigmoid(a)),
    trigonometry=lambda a, b: (jnp.sin(a), jnp.cos(b), jnp.tan(a), jnp.sinh(a), jnp.cosh(b), jnp.tanh(a)),
    comparisons=lambda a, b: (a == b, a != a, jnp.isfinite(a), jnp.isnan(b), a.astype(bool), jnp.sign(a)),
    reductions=lambda a, b: (a.sum(0), jnp.mean(b, 1), jnp.prod(a, 1), jnp.cumsum(a, 1), jnp.nansum(b)),
    products=lambda a, b: (a @ b.T, jnp.vdot(a, b), jnp.einsum("ij,kj->ik", a, b.conj()), jnp.convolve(a[0], b[0])),
    moves=lambda a, b: (
        a.T, a[::-1, ::2], jnp.concatenate([a, b]), jnp.where(a.real > 0, a, b), jnp.pad(a, 1), jnp.roll(a, 2, 1)
    ),
    indexing=lambda a, b: (a.at[2].set(b[0]), a.at[1].add(b[0]), jnp.take(a, jnp.arange(3) * 2, axis=0)),
    control=lambda a, b: (
        lax.cond(a[0, 0].real > 0, lambda u, v: u * v, lambda u, v: u, a, b),
        lax.fori_loop(0, 3, lambda i, c: c * a + b, a),
        lax.scan(lambda c, x: (c + x, c * x), jnp.zeros(7, a.dtype), a)[1],
        jax.vmap(lambda r: lax.while_loop(lambda c: jnp.abs(c).max() < 9, lambda c: c * (1.5 + 0.5j), r))(a),
    ),
)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_functions(name):
    a, b = complex_array(6, 7), complex_array(6, 7)
    function = FUNCTIONS[name]

    def kernel(a_ref, b_ref, *o_refs):
        for o_ref, value in zip(o_refs, function(a_ref[...], b_ref[...])):
            o_ref[...] = value

    got = pl.pallas_call(kernel, list(jax.eval_shape(function, a, b)), **NATIVE)(a, b)
    for g, w in zip(got, function(a, b), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_refs_blocks_scratch_and_aliases(dtype):
    def kernel(i_ref, a_ref, o_ref, s_ref):
        s_ref[...] = a_ref[...] * 2
        o_ref[...] = a_ref[...]
        o_ref[...] = o_ref[...] * s_ref[...] + jnp.conj(o_ref[...])  # each part needs both old parts
        o_ref[i_ref[0]] = a_ref[i_ref[1]] * 1j

    with jax.enable_x64(dtype == np.complex128):
        a, i = complex_array(6, 7, dtype=dtype), jnp.array([1, 0], jnp.int32)
        spec = pl.BlockSpec((2, 4), lambda r, c: (r, c))
        call = pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(a.shape, a.dtype), grid=(3, 2), input_output_aliases={1: 0},
            in_specs=[pl.BlockSpec((2,), lambda r, c: (0,)), spec], out_specs=spec,
            scratch_shapes=[pltpu.VMEM((2, 4), dtype)], **NATIVE,
        )  # fmt: skip
        want = np.asarray(a) ** 2 * 2 + np.conj(a)
        want[1::2] = np.asarray(a)[::2] * 1j
        np.testing.assert_allclose(call(i, a), want, rtol=1e-5 if dtype == np.complex64 else 1e-12)


def test_what_complex_numbers_have_no_rule_for_is_refused_by_name():
    def kernel(a_ref, o_ref):
        o_ref[...] = jnp.sort(a_ref[...])

    with pytest.raises(pl.UnsupportedPrimitive, match="`sort` is not supported in a kernel on native CPU"):
        pl.pallas_call(kernel, jax.ShapeDtypeStruct((4,), np.complex64), **NATIVE)(complex_array(4))


def test_keys_in_blocks_and_out():
    keys = jax.random.split(jax.random.key(3), 6)

    def kernel(k_ref, o_ref, u_ref):
        u_ref[...] = jnp.broadcast_to(jax.random.normal(k_ref[0], (5,)), (1, 5))
        o_ref[...] = jax.vmap(lambda k: jax.random.fold_in(k, 7))(k_ref[...])

    smem = pl.BlockSpec((1,), lambda i: (i,), memory_space=pltpu.SMEM)
    out, values = pl.pallas_call(
        kernel, [jax.ShapeDtypeStruct(keys.shape, keys.dtype), jax.ShapeDtypeStruct((6, 5), jnp.float32)],
        grid=6, in_specs=[smem], out_specs=[smem, pl.BlockSpec((1, 5), lambda i: (i, 0))], **NATIVE,
    )(keys)  # fmt: skip
    np.testing.assert_allclose(values, jax.vmap(lambda k: jax.random.normal(k, (5,)))(keys), rtol=1e-5, atol=1e-6)
    want = jax.vmap(lambda k: jax.random.fold_in(k, 7))(keys)
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(want))


def test_keys_in_loops_and_under_vmap_inside_the_kernel():
    keys = jax.random.split(jax.random.key(5), 4)

    def draw(key):
        def body(i, state):
            key, total = state
            key, sub = jax.random.split(key)
            return key, total + jax.random.uniform(sub, (3,))

        return lax.fori_loop(0, 3, body, (key, jnp.zeros(3)))[1]

    def kernel(k_ref, o_ref, p_ref):
        o_ref[...] = jax.vmap(draw)(k_ref[...])
        p_ref[...] = jax.random.permutation(k_ref[1], 10)

    outs = [jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((10,), jnp.int32)]
    drawn, order = pl.pallas_call(kernel, outs, **NATIVE)(keys)
    np.testing.assert_allclose(drawn, jax.vmap(draw)(keys), rtol=1e-6)
    np.testing.assert_array_equal(order, jax.random.permutation(keys[1], 10))
