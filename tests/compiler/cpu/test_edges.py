"""Nothing to do, several callers at once, and loops over more than memory could hold."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import cpu as plcpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())


def sds(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int4, jnp.complex64, jnp.bool_])
def test_operands_without_elements(dtype):
    def kernel(x_ref, y_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...]
        p_ref[...] = y_ref[...]

    x, y = jnp.zeros((0, 4), dtype), jnp.ones((3,), dtype)
    outs = [sds(0, 4, dtype=dtype), sds(3, dtype=dtype)]
    empty, full = jax.jit(pl.pallas_call(kernel, outs, **NATIVE))(x, y)
    assert empty.shape == (0, 4)
    np.testing.assert_array_equal(full, y)


def test_reductions_and_products_over_nothing():
    def kernel(x_ref, o_ref, p_ref):
        o_ref[...] = jnp.sum(x_ref[...], axis=0)
        p_ref[...] = x_ref[...].T @ x_ref[...]

    got = pl.pallas_call(kernel, [sds(4), sds(4, 4)], **NATIVE)(jnp.zeros((0, 4)))
    for g in got:
        np.testing.assert_array_equal(g, 0)


def test_a_grid_without_programs_leaves_the_result_as_the_reference_does():
    spec = pl.BlockSpec((2,), lambda i: (i,))
    options = dict(grid=(0,), in_specs=[spec], out_specs=spec)
    got, want = (
        pl.pallas_call(double, sds(4), **options, **how)(jnp.ones(4)) for how in (NATIVE, dict(interpret=True))
    )
    np.testing.assert_array_equal(got, want)
    alias = pl.pallas_call(double, sds(4), input_output_aliases={0: 0}, **options, **NATIVE)
    np.testing.assert_array_equal(alias(jnp.arange(4.0)), np.arange(4.0))


def test_threads_compile_and_call_the_same_and_other_kernels():
    calls = []
    for k in range(4):

        def kernel(x_ref, o_ref, k=k):
            o_ref[...] = x_ref[...] * (k + 2) + jnp.sum(x_ref[...], axis=1, keepdims=True)

        spec = pl.BlockSpec((8, 64), lambda i: (i, 0))
        calls.append(pl.pallas_call(kernel, sds(256, 64), grid=32, in_specs=[spec], out_specs=spec, **NATIVE))
    x = np.random.default_rng(0).integers(-3, 4, (256, 64)).astype(np.float32)
    wrong: list[int] = []

    def work(n):
        for j in range(12):  # the first round compiles: the same kernel twice, and others at once
            k = (n // 2 + j) % 4
            if not np.array_equal(calls[k](x), x * (k + 2) + x.sum(1, keepdims=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_value_of_more_than_2_to_the_31_elements_that_are_nowhere():
    """The value has 2^32 elements; they are never in memory, and their number does not fit in 32 bits."""
    rows = 1 << 20

    def kernel(x_ref, o_ref):
        wide = jnp.broadcast_to(x_ref[...][None, :], (rows, x_ref.shape[0]))
        o_ref[...] = wide[rows - 1 :, :]

    x = jnp.arange(4096.0)
    got = pl.pallas_call(kernel, sds(1, 4096), **NATIVE)(x)
    np.testing.assert_array_equal(got[0], x)
