"""Native CPU code beyond the corpus: transforms, aliasing, threads, errors and edges."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())
rng = np.random.default_rng(0)


def randn(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def sds(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(kernel, shape, block, dtype=jnp.float32, **options):
    """A call on blocks of whole rows."""
    spec = pl.BlockSpec((block, shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, sds(*shape, dtype=dtype), grid=-(-shape[0] // block), in_specs=[spec], out_specs=spec, **options
    )


def centred(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x - jnp.mean(x, axis=1, keepdims=True)


def want_centred(x):
    x = np.asarray(x, np.float64)
    return x - x.mean(-1, keepdims=True)


def test_it_is_native_code_and_not_a_loop_of_xla():
    call = rows(centred, (8, 16), 4, **NATIVE)
    text = jax.jit(call).lower(randn(8, 16)).as_text()
    assert "palladion_cpu" in text and "while" not in text


@pytest.mark.parametrize("in_axis,out_axis", [(0, 0), (1, 2), (2, 1), (-1, 0)])
def test_vmap(in_axis, out_axis):
    x = randn(3, 10, 16)
    call = jax.vmap(rows(centred, (10, 16), 4, **NATIVE), in_axis, out_axis)
    got = call(jnp.moveaxis(x, 0, in_axis))
    np.testing.assert_allclose(np.moveaxis(np.asarray(got), out_axis, 0), want_centred(x), atol=1e-5)


def test_nested_vmap_scan_and_cond():
    x = randn(2, 3, 10, 16)
    call = rows(centred, (10, 16), 4, **NATIVE)
    np.testing.assert_allclose(jax.vmap(jax.vmap(call))(x), want_centred(x), atol=1e-5)
    out, _ = lax.scan(lambda c, s: (call(c + s), None), jnp.zeros((10, 16)), x[0])
    state = np.zeros((10, 16))
    for s in np.asarray(x[0], np.float64):
        state = want_centred(state + s)
    np.testing.assert_allclose(out, state, atol=1e-5)
    picked = lax.cond(x[0, 0, 0, 0] > 1e9, lambda v: v, call, x[0, 0])
    np.testing.assert_allclose(picked, want_centred(x[0, 0]), atol=1e-5)


def test_shard_map_over_four_devices():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    call = rows(centred, (6, 16), 4, **NATIVE)
    mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    x = randn(24, 16)
    np.testing.assert_allclose(mapped(x), want_centred(x), atol=1e-5)


def test_custom_vjp_and_check_grads():
    def forward(x_ref, y_ref):
        y_ref[...] = x_ref[...] * x_ref[...] * x_ref[...]

    def backward(x_ref, g_ref, dx_ref):
        dx_ref[...] = 3 * x_ref[...] * x_ref[...] * g_ref[...]

    @jax.custom_vjp
    def cube(x):
        return pl.pallas_call(forward, sds(*x.shape, dtype=x.dtype), **NATIVE)(x)

    cube.defvjp(
        lambda x: (cube(x), x),
        lambda x, g: (pl.pallas_call(backward, sds(*x.shape, dtype=x.dtype), **NATIVE)(x, g),),
    )
    x = randn(5, 7)
    np.testing.assert_allclose(jax.grad(lambda x: cube(x).sum())(x), 3 * np.asarray(x) ** 2, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: cube(x).sum()))(x), 3 * np.asarray(x) ** 2, rtol=1e-5)
    with jax.enable_x64(True):
        check_grads(cube, (jnp.asarray(rng.standard_normal((3, 4))),), order=1, modes=["rev"])


def test_alias_in_place_and_donated():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    call = rows(kernel, (64, 128), 16, input_output_aliases={0: 0}, **NATIVE)
    x = jnp.zeros((64, 128))
    np.testing.assert_array_equal(call(x), 1.0)
    np.testing.assert_array_equal(x, 0.0)
    pointer = x.unsafe_buffer_pointer()
    out = jax.jit(call, donate_argnums=0)(x)
    assert out.unsafe_buffer_pointer() == pointer


def test_an_aliased_input_is_read_as_it_was():
    """The kernel writes the output before it reads the input that shares its memory."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.full_like(o_ref, 7.0)
        o_ref[0] = x_ref[1]

    x = jnp.arange(4.0)
    out = pl.pallas_call(kernel, sds(4), input_output_aliases={0: 0}, **NATIVE)(x)
    np.testing.assert_array_equal(out, [1, 7, 7, 7])


def test_a_store_that_reads_its_own_ref_elsewhere():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        old = o_ref[...]
        o_ref[...] = o_ref[...].T + old * 10  # reads other elements than it writes
        o_ref[1:] = o_ref[:-1]

    x = jnp.arange(16.0).reshape(4, 4)
    want = np.asarray(x).T + np.asarray(x) * 10
    want = np.concatenate([want[:1], want[:-1]])
    np.testing.assert_array_equal(pl.pallas_call(kernel, sds(4, 4), **NATIVE)(x), want)


def test_wild_indices_touch_no_other_memory():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[i_ref[0]] = x_ref[i_ref[1]]
        o_ref[pl.ds(i_ref[2], 2)] = x_ref[pl.ds(i_ref[3], 2)]
        rows = i_ref[pl.ds(4, 3)]
        o_ref[rows] = o_ref[rows] + x_ref[rows]

    call = pl.pallas_call(kernel, sds(8), interpret=False, **NATIVE)
    reference = pl.pallas_call(kernel, sds(8), interpret=True)
    x = randn(8)
    big = np.iinfo(np.int32)
    for _ in range(50):
        i = rng.choice([0, 3, 7, 8, -1, -8, -9, 100, big.max, big.min], 7).astype(np.int32)
        got = np.asarray(call(jnp.asarray(i), x))
        want = np.asarray(reference(jnp.asarray(i), x))
        inside = (np.abs(i[4:].astype(np.int64)) < 8).all()
        if inside:
            np.testing.assert_allclose(got, want, rtol=1e-6)
        assert np.isfinite(got).all()


def test_checked_indices_and_debug_check():
    def kernel(i_ref, x_ref, o_ref):
        pl.debug_check(x_ref[0] < 10, "x is too large")
        o_ref[...] = x_ref[pl.ds(i_ref[0], 2)]

    call = pl.pallas_call(kernel, sds(2), **NATIVE)
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(call(jnp.array([9], jnp.int32), x), [2, 3])  # clamped, as XLA does
    with pl.enable_debug_checks(True):
        np.testing.assert_array_equal(call(jnp.array([1], jnp.int32), x), [1, 2])
        with pytest.raises(Exception, match="runs past dimension 0 of x_ref"):
            jax.block_until_ready(call(jnp.array([3], jnp.int32), x))
        with pytest.raises(Exception, match="x is too large"):
            jax.block_until_ready(call(jnp.array([0], jnp.int32), x + 20))


def test_prints_in_program_order(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("{}: {}", pl.program_id(0), x_ref[0])
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((2,), lambda i: (i,))
    call = pl.pallas_call(kernel, sds(8), grid=4, in_specs=[spec], out_specs=spec, **NATIVE)
    jax.block_until_ready(call(jnp.arange(8.0)))
    assert capfd.readouterr().out.splitlines() == [f"{i}: {2.0 * i}" for i in range(4)]


def test_eight_threads_at_once():
    call = jax.jit(rows(centred, (512, 256), 16, **NATIVE))
    xs = [randn(512, 256) for _ in range(8)]
    results = [None] * 8

    def work(k):
        for _ in range(20):
            results[k] = np.asarray(call(xs[k]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x, got in zip(xs, results):
        np.testing.assert_allclose(got, want_centred(x), atol=1e-5)


@pytest.mark.parametrize("declared", [None, ("parallel",), ("arbitrary",)])
def test_scratch_carried_from_program_to_program(declared):
    """A running sum needs its order; nothing may be split unless the user says so (which this one must not)."""

    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]

    if declared == ("parallel",):
        pytest.skip("declared parallel, the result is undefined by specification")
    spec = pl.BlockSpec((1, 512), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        sds(300, 512),
        grid=300,
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((1, 512), jnp.float32)],
        compiler_params=plcpu.CompilerParams(dimension_semantics=declared),
    )
    x = randn(300, 512)
    np.testing.assert_allclose(call(x), np.cumsum(np.asarray(x, np.float64), 0), atol=1e-3)


@pytest.mark.parametrize("shape,block", [((1, 1), (1, 1)), ((7, 13), (4, 8)), ((3, 129), (2, 64)), ((8, 5), (16, 16))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float8_e4m3fn])
def test_ragged_copies_of_every_width(shape, block, dtype):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    grid = tuple(-(-n // b) for n, b in zip(shape, block))
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    call = pl.pallas_call(kernel, sds(*shape, dtype=dtype), grid=grid, in_specs=[spec], out_specs=spec, **NATIVE)
    x = (randn(*shape) * 3).astype(dtype)
    np.testing.assert_array_equal(np.asarray(call(x)), np.asarray(x))


@pytest.mark.parametrize("function", [jnp.sin, jnp.cos, jnp.tan, lambda s: jnp.fmod(s, 0.7)])
def test_functions_that_branch_of_values_that_loops_do_not_change(function):
    def kernel(s_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + function(s_ref[0])

        def body(i, _):
            o_ref[i] = o_ref[i] * function(x_ref[i, 0]) + function(s_ref[1])

        lax.fori_loop(0, 4, body, None)

    s, x = jnp.array([0.3, 1e6]), randn(8, 40)
    got = pl.pallas_call(kernel, sds(8, 40), **NATIVE)(s, x)
    want = pl.pallas_call(kernel, sds(8, 40), interpret=True)(s, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_nextafter_steps_in_the_type_itself(dtype):
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 3.3, 65504.0]
    x, y = jnp.asarray(np.repeat(special, 11), dtype), jnp.asarray(np.tile(special, 11), dtype)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.nextafter(x_ref[...], y_ref[...])

    out = jax.ShapeDtypeStruct(x.shape, dtype)
    native = pl.pallas_call(kernel, out, compiler_params=plcpu.CompilerParams())(x, y)
    expected = pl.pallas_call(kernel, out, interpret=True)(x, y)
    np.testing.assert_array_equal(np.asarray(native, np.float64), np.asarray(expected, np.float64))
    # From 0 towards 1, compared by bits: XLA would take the subnormal for 0.
    assert np.asarray(native)[2].tobytes() != np.asarray(x)[2].tobytes()
