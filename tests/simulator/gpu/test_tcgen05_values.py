"""Numbers of tcgen05 on the simulated Blackwell GPU: each dtype, A in TMEM, block-scaled and sparse operands."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from palladion import mosaic_gpu as plgpu
from simulator.gpu.tensor_calls import SCHEDULES, K, M, N, buffers, fill, found, load, operands, run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulate", [True, False])
def test_two_products_and_a_commit(schedule, accumulate):
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s, acc, bar):
        fill(a, b, a_s, b_s)
        plgpu.tcgen05_mma(acc, a_s, b_s, accumulate=False)
        plgpu.tcgen05_mma(acc, a_s, b_s, accumulate=jnp.bool_(accumulate))
        plgpu.tcgen05_commit_arrive(bar)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    got = run(body, a, b, scratch=buffers(a, b), schedule=schedule)
    np.testing.assert_array_equal(got, wanted * (2 if accumulate else 1))


@pytest.mark.parametrize(
    "dtype, out",
    [(jnp.bfloat16, jnp.float32), (jnp.float8_e5m2, jnp.float32), (jnp.float8_e4m3fn, jnp.float32),
     (jnp.int8, jnp.int32), (jnp.float16, jnp.float16)],
)  # fmt: skip
def test_a_product_of_each_dtype(dtype, out):
    a, b, wanted = operands(dtype)

    def body(a, b, o, a_s, b_s, acc, bar):
        fill(a, b, a_s, b_s)
        plgpu.tcgen05_mma(acc, a_s, plgpu.transpose_ref(b_s, (1, 0)), bar, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    got = run(body, a, b.T, scratch=buffers(a, b.T, out), out=out)
    np.testing.assert_array_equal(got.astype(np.float64), wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_in_tensor_memory(schedule):
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s, acc, bar, a_t):
        fill(a, b, a_s, b_s)
        plgpu.async_store_tmem(a_t, a_s[...])
        plgpu.commit_tmem()
        plgpu.tcgen05_mma(acc, a_t, b_s, bar, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    scratch = buffers(a, b) | dict(a_t=plgpu.TMEM((M, K), jnp.float16, packed=True))
    np.testing.assert_array_equal(run(body, a, b, scratch=scratch, schedule=schedule), wanted)


def smem_scales(scales):
    """(R, C) scales as `async_copy_scales_to_tmem` wants them: row 32 * i + j, column c at [j, 4 * i + c]."""
    rows, columns = scales.shape
    parts = scales.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)
    return parts.reshape(rows // 128, columns // 4, 32, 16)


@pytest.mark.parametrize("copied", [True, False])
def test_block_scaled_operands(copied):
    k, n = 128, 128
    a, b, _ = operands(jnp.float8_e4m3fn, n=n, k=k)
    draw = np.random.default_rng(1).integers
    a_scale, b_scale = (2.0 ** draw(-2, 3, (128, k // 32)) for _ in range(2))
    wide = [np.asarray(x, np.float64) for x in (a, b)]
    wanted = (wide[0] * np.repeat(a_scale, 32, 1)) @ (wide[1] * np.repeat(b_scale.T, 32, 0))

    def body(a, b, sa, sb, o, a_s, b_s, acc, bar, sa_s, sb_s, sa_t, sb_t):
        fill(a, b, a_s, b_s)
        sa_s[...], sb_s[...] = sa[...], sb[...]
        plgpu.commit_smem()
        plgpu.async_copy_scales_to_tmem(sa_s, sa_t)
        if copied:
            plgpu.async_copy_scales_to_tmem(sb_s, sb_t)
        b_t = plgpu.transpose_ref(b_s, (1, 0))
        plgpu.tcgen05_mma(acc, a_s, b_t, bar, a_scale=sa_t, b_scale=sb_t, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    e8 = jnp.float8_e8m0fnu
    scales = [jnp.asarray(smem_scales(s), e8) for s in (a_scale, b_scale)]
    tmem = plgpu.TMEM((128, k // 32), e8, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
    scratch = buffers(a, b.T, n=n) | dict(
        sa_s=plgpu.SMEM(scales[0].shape, e8), sb_s=plgpu.SMEM(scales[1].shape, e8), sa_t=tmem, sb_t=tmem
    )
    how: Any = dict(scratch=scratch, shape=(M, n), uninitialized_reads="raise")
    if copied:
        np.testing.assert_array_equal(run(body, a, b.T, *scales, **how), wanted)
    else:
        finding = found(body, a, b.T, *scales, **how)
        assert finding.kind == "uninitialized-read" and "sb_t" in finding.message


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8])
def test_a_sparse_operand(dtype):
    k, out = 256, jnp.int32 if dtype == jnp.int8 else jnp.float32
    rng = np.random.default_rng(3)
    places = np.stack([np.sort(rng.choice(4, 2, replace=False)) for _ in range(M * k // 4)]).reshape(M, k // 4, 2)
    a, b, _ = operands(dtype, k=k)
    half = np.asarray(rng.integers(-2, 3, (M, k // 2)), dtype)
    full = np.zeros((M, k // 4, 4))
    np.put_along_axis(full, places, half.reshape(M, k // 4, 2).astype(np.float64), 2)
    wanted = full.reshape(M, k) @ np.asarray(b, np.float64)
    meta = plgpu.format_tcgen05_sparse_metadata(jnp.asarray(places, jnp.uint2), dtype)

    def body(a, b, meta, o, a_s, b_s, acc, bar, m_s, m_t):
        fill(a, b, a_s, b_s)
        m_s[...] = meta[...]
        plgpu.commit_smem()
        plgpu.async_copy_sparse_metadata_to_tmem(m_s, m_t)
        b_t = plgpu.transpose_ref(b_s, (1, 0))
        plgpu.tcgen05_mma(acc, a_s, b_t, bar, a_sparse_metadata=m_t, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    scratch = buffers(half, b.T, out) | dict(
        m_s=plgpu.SMEM(meta.shape, jnp.uint2), m_t=plgpu.TMEM((M, k // 2), jnp.uint2, layout=layout)
    )
    got = run(body, jnp.asarray(half), b.T, meta, scratch=scratch, out=out)
    np.testing.assert_array_equal(got, wanted)


def test_a_load_with_a_reduction():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(M, N)), jnp.float32)

    def body(x, o, acc):
        plgpu.async_store_tmem(acc, x[...])
        plgpu.commit_tmem()
        value, most = plgpu.async_load_tmem(acc, reduce="absmax")
        plgpu.wait_load_tmem()
        o[...] = value + lax.broadcast_in_dim(most, (M, N), (0,))

    got = run(body, x, scratch=dict(acc=plgpu.TMEM((M, N), jnp.float32)))
    np.testing.assert_array_equal(got, np.asarray(x) + np.abs(x).max(1)[:, None])
