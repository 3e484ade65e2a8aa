"""Products of single blocks, cut into parts for several threads: how they are cut, and their values in kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import cpu as plcpu
from palladion.compiler.cpu import matmul, matmul_spread, runtime
from palladion.compiler.cpu.matmul_plan import MatmulSpec

NATIVE: dict[str, Any] = dict(compiler_params=plcpu.CompilerParams())


def spec_of(m, n, k, batch=1, how="nn"):
    a = (k, 1) if how[0] == "n" else (1, m)
    b = (n, 1) if how[1] == "n" else (1, k)
    return MatmulSpec(m, n, k, a, b, (n, 1), batch=batch, batch_strides=(m * k, k * n, m * n))


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        ((1024, 1024, 1024), "n"),
        ((512, 512, 512), "n"),
        ((1000, 1003, 777), "n"),
        ((8192, 64, 512), "m"),
        ((64, 8192, 512), "n"),
        ((128, 128, 128, 32), "batch"),
        ((128, 128, 128, 33), "batch"),
        ((700, 300, 200, 2), "n"),
        ((1, 4096, 4096), "n"),
    ],
)
@pytest.mark.parametrize("how", ["nn", "nt", "tn"])
def test_parts_make_up_the_product(sizes, axis, how):
    spec = spec_of(*sizes, how=how)
    cut = matmul_spread.split(spec)
    assert cut is not None
    if how == "nn":
        assert cut.axis == axis
    total = getattr(spec, cut.axis)
    parts = [cut.part(spec, i == cut.count - 1) for i in range(cut.count)]
    assert sum(getattr(p, cut.axis) for p in parts) == total and all(getattr(p, cut.axis) > 0 for p in parts)
    assert 2 <= cut.count <= matmul_spread.PARTS
    for p in parts:  # nothing else of it changes
        assert dataclasses.replace(p, **{cut.axis: total}) == spec
        assert matmul.workspace_bytes(p) <= matmul_spread.workspace_bytes(spec)


@pytest.mark.parametrize("sizes", [(0, 512, 512), (512, 512, 0), (200, 200, 199), (4, 4, 10**6)])
def test_what_stays_whole(sizes):
    spec = spec_of(*sizes)
    assert matmul_spread.split(spec) is None
    assert matmul_spread.workspace_bytes(spec) == matmul.workspace_bytes(spec)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def run(kernel, out, *args, **options):
    """The result, and whether the kernel shared a product among threads."""
    before = set(runtime._kernels)
    shape = jax.ShapeDtypeStruct(out, jnp.float32)
    result = np.asarray(pl.pallas_call(kernel, shape, **NATIVE, **options)(*args), np.float64)
    return result, any(runtime._kernels[key].description.spread for key in set(runtime._kernels) - before)


def close(result, expected, k):
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * k**0.5)


@pytest.mark.parametrize("sizes", [(300, 500, 200), (2048, 33, 260), (257, 513, 129)])
def test_a_product_amid_other_statements(sizes):
    m, n, k = sizes
    x, y = draw(m, k), draw(k, n)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...] * 2, y_ref[...], preferred_element_type=jnp.float32) + x_ref[:, :1]

    result, shared = run(kernel, (m, n), x, y)
    close(result, 2 * x.astype(float) @ y + x[:, :1], k)
    assert shared


def test_transposed_operands():
    x, y = draw(200, 300), draw(500, 200)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = lax.dot_general(x_ref[...], y_ref[...], (((0,), (1,)), ((), ())))

    result, shared = run(kernel, (300, 500), x, y)
    close(result, x.T.astype(float) @ y.T, 200)
    assert shared


def test_a_batch():
    x, y = draw(9, 128, 128), draw(9, 128, 128)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.matmul(x_ref[...], y_ref[...])

    result, shared = run(kernel, (9, 128, 128), x, y)
    close(result, x.astype(float) @ y, 128)
    assert shared


def test_in_loops_and_branches():
    x, y = draw(256, 768), draw(768, 256)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def step(i, carry):
            part = pl.ds(i * 256, 256)

            @pl.when(i != 1)
            def _():
                o_ref[...] += jnp.dot(x_ref[:, part], y_ref[part, :])

            return carry

        lax.fori_loop(0, 3, step, None)

    result, shared = run(kernel, (256, 256), x, y)
    keep = np.r_[0:256, 512:768]
    close(result, x[:, keep].astype(float) @ y[keep], 512)
    assert shared


def test_one_block_summed_over_the_grid_and_under_vmap():
    x, y = draw(3, 256, 512), draw(3, 512, 256)

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...])

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((256, 256), lambda k: (0, k)), pl.BlockSpec((256, 256), lambda k: (k, 0))],
        out_specs=pl.BlockSpec((256, 256), lambda k: (0, 0)),
        **NATIVE,
    )
    close(call(x[0], y[0]), x[0].astype(float) @ y[0], 512)
    close(jax.jit(jax.vmap(call))(x, y), x.astype(float) @ y, 512)


def test_a_grid_with_a_program_for_each_thread_forms_its_products_whole():
    x, y = draw(512, 256), draw(256, 256)
    rows = pl.BlockSpec((256, 256), lambda i: (i, 0))

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    whole = pl.BlockSpec((256, 256), lambda i: (0, 0))
    result, shared = run(kernel, (512, 256), x, y, grid=(2,), in_specs=[rows, whole], out_specs=rows)
    close(result, x.astype(float) @ y, 256)
    assert not shared
