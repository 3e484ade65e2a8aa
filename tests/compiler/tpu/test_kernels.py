"""Kernels that the corpus has not, their Mosaic modules run in NumPy: run-time places off the tiles, aliases, copies,
pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from compiler.tpu import mosaic_run
from compiler.tpu.calls import module_of, sds
from compiler.tpu.mosaic_run import MosaicInNumPy
from palladion import tpu as pltpu

SMEM, HBM = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)


@pytest.fixture(autouse=True)
def in_numpy():
    with mosaic_run.installed():
        yield


def run(kernel, out, *args, **options):
    return np.asarray(pl.pallas_call(kernel, out, interpret=MosaicInNumPy(), **options)(*args))


def numbers(rng, shape, dtype):
    return jnp.asarray(rng.integers(-100, 100, shape), dtype)


# --- places off the tiles ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(24))
def test_windows_at_run_time_places(seed):
    rng = np.random.default_rng(seed)
    dtype = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32)[seed % 4]
    shape = tuple(int(n) for n in (rng.choice([24, 40, 64, 37]), rng.choice([128, 200, 384, 512])))
    size = tuple(int(rng.integers(1, min(n, 40) + 1)) for n in shape)
    start = [int(rng.integers(0, n - s + 1)) for n, s in zip(shape, size)]
    x, new = numbers(rng, shape, dtype), numbers(rng, size, dtype)

    def kernel(at_ref, x_ref, new_ref, part_ref, o_ref):
        place = pl.ds(at_ref[0], size[0]), pl.ds(at_ref[1], size[1])
        part_ref[...] = x_ref[place]
        o_ref[...] = x_ref[...]
        o_ref[place] = new_ref[...]

    outs = (sds(*size, dtype=dtype), sds(*shape, dtype=dtype))
    call = pl.pallas_call(kernel, outs, in_specs=[SMEM, pl.BlockSpec(), pl.BlockSpec()], interpret=MosaicInNumPy())
    part, whole = call(jnp.asarray(start, jnp.int32), x, new)
    window = tuple(slice(s, s + n) for s, n in zip(start, size))
    want = np.array(x)
    np.testing.assert_array_equal(part, want[window])
    want[window] = new
    np.testing.assert_array_equal(whole, want)


def test_what_is_plainly_on_tiles_is_accessed_directly():
    def kernel(at_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(at_ref[0] * 8, 8), pl.ds(pl.multiple_of(at_ref[1], 128), 128)]

    call = pl.pallas_call(kernel, sds(8, 128), in_specs=[SMEM, pl.BlockSpec()])
    text = module_of(call, sds(2, dtype=jnp.int32), sds(64, 512))
    assert "dynamic_rotate" not in text and text.count("tpu.assume_multiple") >= 2

    def off_tiles(at_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(at_ref[0] * 4, 8), :]

    call = pl.pallas_call(off_tiles, sds(8, 512), in_specs=[SMEM, pl.BlockSpec()])
    assert "dynamic_rotate" in module_of(call, sds(2, dtype=jnp.int32), sds(64, 512))


@pytest.mark.parametrize("axis", [0, 1])
def test_gathers(axis):
    rng = np.random.default_rng(axis)
    x, places = numbers(rng, (8, 128), jnp.float32), rng.integers(-3, (8, 128)[axis] + 3, (8, 128)).astype(np.int32)

    def kernel(x_ref, i_ref, along_ref, rows_ref):
        along_ref[...] = jnp.take_along_axis(x_ref[...], i_ref[...], axis)
        rows_ref[...] = jnp.take(x_ref[...], i_ref[:, 0], axis=0, mode="clip")

    outs = pl.pallas_call(kernel, (sds(8, 128), sds(8, 128)), interpret=MosaicInNumPy())(x, places)
    np.testing.assert_array_equal(outs[0], jnp.take_along_axis(x, jnp.asarray(places), axis))
    np.testing.assert_array_equal(outs[1], np.take(x, places[:, 0], axis=0, mode="clip"))


def test_sorts_are_stable_with_nan_last():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 5, (8, 100)).astype(np.float32)
    keys[:, ::9] = np.nan
    values = np.broadcast_to(np.arange(100, dtype=np.int32), (8, 100))

    def kernel(k_ref, v_ref, ks_ref, vs_ref):
        ks_ref[...], vs_ref[...] = lax.sort((k_ref[...], v_ref[...]), dimension=1, num_keys=1, is_stable=True)

    call = pl.pallas_call(kernel, (sds(8, 100), sds(8, 100, dtype=jnp.int32)), interpret=MosaicInNumPy())
    order = np.argsort(keys, axis=1, kind="stable")
    got = call(keys, values)
    np.testing.assert_array_equal(got[0], np.take_along_axis(keys, order, 1))
    np.testing.assert_array_equal(got[1], order)


# --- loops ------------------------------------------------------------------------------------------------------------
def test_loops_are_loops():
    def kernel(n_ref, x_ref, o_ref):
        total = lax.fori_loop(0, n_ref[0], lambda i, t: t + x_ref[pl.ds(i, 1), :], jnp.zeros((1, 128), jnp.float32))
        half = lax.while_loop(lambda s: s[0] < 40.0, lambda s: (s[0] * 2, s[1] + 1), (total[0, 0], 0))
        three = lax.fori_loop(0, 7, lambda i, t: t + i, 0, unroll=3)
        o_ref[...] = total + half[1].astype(jnp.float32) + lax.convert_element_type(three, jnp.float32)

    x = numbers(np.random.default_rng(0), (16, 128), jnp.float32).at[:, 0].set(1)
    got = run(kernel, sds(1, 128), jnp.array([5], jnp.int32), x, in_specs=[SMEM, pl.BlockSpec()])
    np.testing.assert_array_equal(got, np.asarray(x)[:5].sum(0, keepdims=True) + 3 + 21)
    call = pl.pallas_call(kernel, sds(1, 128), in_specs=[SMEM, pl.BlockSpec()])
    text = module_of(call, sds(1, dtype=jnp.int32), sds(16, 128))
    assert text.count("scf.for") == 2 and text.count("scf.while") == 1


# --- aliases ----------------------------------------------------------------------------------------------------------
def test_what_is_not_written_of_an_aliased_output_is_the_operands():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[0:1] = x_ref[0:1] * 2

        @pl.when(pl.program_id(1) == 1)
        def _():
            o_ref[1:2] += 1

    spec = pl.BlockSpec((8, 128), lambda i, j: (i, 0))
    options = dict(grid=(4, 3), in_specs=[spec, spec], out_specs=spec, input_output_aliases={1: 0})
    rng = np.random.default_rng(0)
    x, y = numbers(rng, (32, 128), jnp.float32), numbers(rng, (32, 128), jnp.float32)
    want = np.array(y).reshape(4, 8, 128)
    want[:, 0] = np.asarray(x).reshape(4, 8, 128)[:, 0] * 2
    want[:, 1] += 1
    np.testing.assert_array_equal(run(kernel, sds(32, 128), x, y, **options), want.reshape(32, 128))

    def writes_all(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    text = module_of(pl.pallas_call(writes_all, sds(32, 128), **options), sds(32, 128), sds(32, 128))
    assert "scf.if" not in text  # nothing to copy first


def test_an_aliased_output_with_other_blocks():
    def kernel(x_ref, o_ref):
        o_ref[0:1] = x_ref[0:1]

    specs = (pl.BlockSpec((n, 128), lambda i: (i, 0)) for n in (16, 8))
    call = pl.pallas_call(
        kernel, sds(32, 128), grid=(2,), in_specs=[next(specs)], out_specs=next(specs), input_output_aliases={0: 0}
    )
    with pytest.warns(pl.PalladionWarning, match="a TPU does not fetch blocks of outputs"):
        module_of(call, sds(32, 128))


# --- copies -----------------------------------------------------------------------------------------------------------
def test_rows_by_copies():
    def kernel(ids_ref, table_ref, o_ref, sems):
        def copy(i):
            return pltpu.make_async_copy(table_ref.at[pl.ds(ids_ref[i], 1)], o_ref.at[pl.ds(i, 1)], sems.at[i % 2])

        copy(0).start()
        for i in range(8):
            if i < 7:
                copy(i + 1).start()
            copy(i).wait()

    rng = np.random.default_rng(0)
    table, ids = numbers(rng, (32, 128), jnp.float32), rng.integers(0, 32, 8).astype(np.int32)
    options = dict(in_specs=[SMEM, HBM], scratch_shapes=[pltpu.SemaphoreType.DMA((2,))])
    got = run(kernel, sds(8, 128), ids, table, **options)
    np.testing.assert_array_equal(got, np.asarray(table)[ids])


def matmul_by_a_pipeline(m, n, k, block, **options):
    def inner(a_ref, b_ref, o_ref, acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == k // block - 1)
        def _():
            o_ref[...] = acc[...]

    def kernel(a_ref, b_ref, o_ref, acc):
        pltpu.emit_pipeline(
            lambda a, b, o: inner(a, b, o, acc),
            grid=(m // block, n // block, k // block),
            in_specs=[
                pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
                pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((block, block), lambda i, j, k: (i, j))],
        )(a_ref, b_ref, o_ref)

    return pl.pallas_call(
        kernel, sds(m, n), in_specs=[HBM, HBM], out_specs=HBM, scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
        **options,
    )  # fmt: skip


def test_a_pipeline_inside_a_kernel():
    rng = np.random.default_rng(0)
    a, b = numbers(rng, (32, 48), jnp.float32), numbers(rng, (48, 32), jnp.float32)
    got = matmul_by_a_pipeline(32, 32, 48, 16, interpret=MosaicInNumPy())(a, b)
    np.testing.assert_array_equal(got, np.asarray(a) @ np.asarray(b))


def test_scoped_buffers_and_results():
    def kernel(x_ref, o_ref):
        def body(tmp, sem):
            pltpu.async_copy(x_ref, tmp, sem).wait()
            return tmp[...] * 2, jnp.sum(tmp[...]) > 0

        doubled, positive = pl.run_scoped(body, pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA)
        o_ref[...] = jnp.where(positive, doubled, 0)

    x = np.ones((8, 128), np.float32)
    np.testing.assert_array_equal(run(kernel, sds(8, 128), x, in_specs=[HBM]), 2 * x)
    np.testing.assert_array_equal(run(kernel, sds(8, 128), -x, in_specs=[HBM]), 0 * x)


def test_refs_that_the_kernel_makes():
    def kernel(x_ref, o_ref):
        total, count = jax.new_ref(x_ref[...]), jax.new_ref(jnp.int32(0))

        @pl.loop(0, 4)
        def _(i):
            total[...] += x_ref[...]
            count[...] += i

        o_ref[...] = total[...] * count[...].astype(jnp.float32)

    x = np.ones((8, 128), np.float32)
    np.testing.assert_array_equal(run(kernel, sds(8, 128), x), 30 * x)


def test_dtypes_of_products():
    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = lax.dot_general(
            a_ref[...], b_ref[...], (((0,), (1,)), ((), ())), preferred_element_type=o_ref.dtype
        )

    rng = np.random.default_rng(0)
    for dtype, out in ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.int8, jnp.int32)):
        a, b = (jnp.asarray(rng.integers(-4, 5, s), dtype) for s in ((16, 8), (24, 16)))
        got = run(kernel, sds(8, 24, dtype=out), a, b)
        np.testing.assert_array_equal(got.astype(np.float64), np.asarray(a, np.float64).T @ np.asarray(b, np.float64).T)
    high = jax.jit(lambda a, b: pl.pallas_call(
        lambda a, b, o: o.__setitem__(..., jnp.dot(a[...], b[...], precision="highest")), sds(8, 8))(a, b))  # fmt: skip
    assert "contract_precision<fp32>" in module_of(high, sds(8, 16), sds(16, 8))
