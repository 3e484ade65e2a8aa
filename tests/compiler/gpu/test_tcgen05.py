"""Blackwell's matrix products, compiled: what they compute on the emulator, and the machine code that they become."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import dtypes, lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu.generate import generate
from simulator.gpu.kernels import CORPUS
from simulator.gpu.kernels.blackwell import pipelined_matmul
from simulator.gpu.kernels.common import off_by, struct, tiled_smem

from .products import (
    Layout,
    Product,
    bf16,
    built,
    e2m1,
    e4m3,
    e5m2,
    e8m0,
    f16,
    f32,
    f64,
    i8,
    i32,
    machine_code,
    needs_nvrtc,
    numbers,
    on_blackwell,
    params_of,
)
from .sources import needs_nvdisasm

BLACKWELL = plgpu.EmulateParams(arch="sm_100a")
NATIVE, USUAL = Layout.TCGEN05_TMEM_NATIVE, Layout.TCGEN05

PRODUCTS = {
    "bf16": Product(128, 64, 128, bf16, f32),
    "both turned": Product(128, 64, 64, f16, f32, a_turned=True, b_turned=False),
    "loaded row by row": Product(128, 64, 64, f16, f32, layout=NATIVE),
    "loaded as wgmma has it": Product(128, 64, 64, f16, f32, layout=USUAL),
    "64 rows": Product(64, 64, 64, bf16, f32),
    "64 rows, an odd width": Product(64, 128, 96, bf16, f32, b_turned=False),
    "accumulator of 16 bits": Product(128, 64, 64, f16, f16),
    "floats of 8 bits": Product(128, 128, 64, e4m3, f32, b_dtype=e5m2),
    "floats of 8 bits, turned": Product(128, 128, 64, e5m2, f32, a_turned=True, b_turned=False),
    "integers": Product(128, 128, 64, i8, i32),
    "512 columns": Product(128, 64, 512, bf16, f32, parts=4),
    "A in tensor memory": Product(128, 64, 64, bf16, f32, a_in="tmem"),
    "A of 8 bits in tensor memory": Product(128, 64, 64, e4m3, f32, a_in="tmem"),
    "few columns": Product(128, 32, 8, f16, f32),
    "twice": Product(128, 128, 48, f16, f32, twice=True),
}


@needs_nvrtc
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    p = PRODUCTS[name]
    a, b = p.operands()
    np.testing.assert_array_equal(f64(on_blackwell(p, BLACKWELL)(a, b)), p.expected(a, b))


@needs_nvrtc
@pytest.mark.parametrize("name", ["blackwell_collective", "blackwell_warps"])
def test_kernels(name):
    case = CORPUS[name]
    with plgpu.force_gpu_interpret_mode(BLACKWELL):
        actual, expected, _ = case.run()
    assert off_by(actual, expected) == 0


def half_collective(a, b, interpret=None):
    """A collective product with 64 rows in each of two blocks."""
    (m, k), n = a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, acc, loaded, done):
        block = lax.axis_index("pair")
        for source, target, axis in ((a_gmem, a_smem, 0), (b_gmem, b_smem, 1)):
            half = plgpu.CopyPartition.PARTITIONED(axis)
            plgpu.copy_gmem_to_smem(source, target, loaded, collective_axes="pair", leader_tracked=half)

        @pl.when(block == 0)
        def _():
            plgpu.barrier_wait(loaded)
            plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False, collective_axis="pair")

        plgpu.barrier_wait(done)
        o_gmem[pl.ds(block * (m // 2), m // 2), :] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    scratch = [tiled_smem((m // 2, k), a.dtype), tiled_smem((k, n // 2), b.dtype)]
    scratch += [plgpu.TMEM((m // 2, n), f32, collective=True, layout=plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT(n))]
    scratch += [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(orders_tensor_core=True)]
    call = plgpu.kernel(
        kernel, out_type=struct((m, n)), cluster=(2,), cluster_names=("pair",), scratch_types=scratch,
        interpret=interpret,
    )  # fmt: skip
    return call(a, b)


@needs_nvrtc
def test_a_collective_product_of_64_rows_a_block():
    a, b = numbers(2, (128, 64), f16), numbers(3, (64, 128), f16)
    np.testing.assert_array_equal(f64(half_collective(a, b, BLACKWELL)), f64(a) @ f64(b))


def block_scaled(m, k, n, dtype, scale, block, interpret=None):
    """A kernel that multiplies matrices of narrow floats with a scale for each `block` elements of K."""

    def kernel(a_gmem, b_gmem, a_scales, b_scales, o_gmem, a, b, a_scale, b_scale, a_tmem, b_tmem, acc, loaded, done):
        for source, target in ((a_gmem, a), (b_gmem, b), (a_scales, a_scale), (b_scales, b_scale)):
            plgpu.copy_gmem_to_smem(source, target, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.async_copy_scales_to_tmem(a_scale, a_tmem)
        plgpu.async_copy_scales_to_tmem(b_scale, b_tmem)
        turned = plgpu.transpose_ref(b, (1, 0))
        plgpu.tcgen05_mma(acc, a, turned, done, a_scale=a_tmem, b_scale=b_tmem, accumulate=False)
        plgpu.barrier_wait(done)
        o_gmem[...] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    layout = plgpu.TMEMLayout.SCALES_LAYOUT
    transforms = (plgpu.TilingTransform((8, 1024 // dtypes.itemsize_bits(dtype))), plgpu.SwizzleTransform(128))
    scratch = [plgpu.SMEM((rows, k), dtype, transforms=transforms) for rows in (m, n)]
    scratch += [plgpu.SMEM((rows // 128, k // block // 4, 32, 16), scale) for rows in (m, n)]
    scratch += [plgpu.TMEM((rows, k // block), scale, layout=layout) for rows in (m, n)]
    scratch += [plgpu.TMEM((m, n), f32), plgpu.Barrier(num_arrivals=4), plgpu.Barrier(orders_tensor_core=True)]
    return plgpu.kernel(kernel, out_type=struct((m, n)), scratch_types=scratch, interpret=interpret)


def as_blocks(scales):
    """Scales (R, C) in the order in which they are copied to tensor memory, (R // 128, C // 4, 32, 16)."""
    rows, columns = scales.shape
    parts = scales.reshape(rows // 128, 4, 32, columns // 4, 4)
    return jnp.asarray(parts.transpose(0, 3, 2, 1, 4).reshape(rows // 128, columns // 4, 32, 16))


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "scale", "block", "k"),
    [(e4m3, e8m0, 32, 256), (e2m1, e8m0, 32, 512), (e2m1, e4m3, 16, 256)],
)
def test_block_scaled_products(dtype, scale, block, k):
    m, n = 128, 128
    a, b = numbers(4, (m, k), dtype), numbers(5, (n, k), dtype)
    draw = np.random.default_rng(6)
    powers = [2.0 ** draw.integers(-2, 3, size=(rows, k // block)) for rows in (m, n)]
    given = [as_blocks(jnp.asarray(p, f32).astype(scale)) for p in powers]
    left, right = (f64(x) * np.repeat(p, block, 1) for x, p in zip((a, b), powers))
    call = block_scaled(m, k, n, dtype, scale, block, BLACKWELL)
    np.testing.assert_array_equal(f64(call(a, b, *given)), left @ right.T)


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "out"), [(f16, f32), (i8, i32), (e4m3, f32)])
def test_a_sparse_operand(dtype, out):
    m, k, n = 128, 256, 64

    def kernel(a_gmem, b_gmem, meta_gmem, o_gmem, a, b, meta, meta_tmem, acc, loaded, done):
        for source, target in ((a_gmem, a), (b_gmem, b), (meta_gmem, meta)):
            plgpu.copy_gmem_to_smem(source, target, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.async_copy_sparse_metadata_to_tmem(meta, meta_tmem)
        turned = plgpu.transpose_ref(b, (1, 0))
        plgpu.tcgen05_mma(acc, a, turned, done, a_sparse_metadata=meta_tmem, accumulate=False)
        plgpu.barrier_wait(done)
        o_gmem[...] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    draw = np.random.default_rng(11)
    places = np.sort(np.argsort(draw.random((m, k // 4, 4)), axis=2)[:, :, :2], axis=2)  # two of four, in order
    a, b = numbers(12, (m, k // 2), dtype), numbers(13, (n, k), dtype)
    full = np.zeros((m, k // 4, 4))
    np.put_along_axis(full, places, f64(a).reshape(m, k // 4, 2), 2)
    meta = plgpu.format_tcgen05_sparse_metadata(jnp.asarray(places, jnp.uint2), dtype)
    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    scratch = [tiled_smem((m, k // 2), dtype), tiled_smem((n, k), dtype), plgpu.SMEM(meta.shape, jnp.uint2)]
    scratch += [plgpu.TMEM((m, k // 2), jnp.uint2, layout=layout), plgpu.TMEM((m, n), out)]
    scratch += [plgpu.Barrier(num_arrivals=3), plgpu.Barrier(orders_tensor_core=True)]
    call = plgpu.kernel(kernel, out_type=struct((m, n), out), scratch_types=scratch, interpret=BLACKWELL)
    np.testing.assert_array_equal(f64(call(a, b, meta)), full.reshape(m, k) @ f64(b).T)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_copies_and_reductions(dtype):
    def kernel(x_gmem, o_gmem, most_gmem, x_smem, x_tmem, loaded, done):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.async_copy_smem_to_tmem(x_smem, x_tmem)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        value, most = plgpu.async_load_tmem(x_tmem, reduce="absmax")
        o_gmem[...], most_gmem[...] = value, most
        plgpu.wait_load_tmem()

    x = numbers(7, (128, 64), dtype)
    packed: dict[str, Any] = {} if dtype is f32 else {"packed": True}
    scratch = [tiled_smem((128, 64), dtype), plgpu.TMEM((128, 64), dtype, **packed), plgpu.Barrier()]
    scratch += [plgpu.Barrier(orders_tensor_core=True)]
    out = [struct((128, 64), dtype), struct((128,), dtype)]
    same, most = plgpu.kernel(kernel, out_type=out, scratch_types=scratch, interpret=BLACKWELL)(x)
    np.testing.assert_array_equal(f64(same), f64(x))
    np.testing.assert_array_equal(f64(most), np.abs(f64(x)).max(1))


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "packed"), [(f32, None), (bf16, True), (f16, False), (i8, True)])
def test_stores_and_loads(dtype, packed):
    def kernel(x_gmem, o_gmem, x_tmem):
        plgpu.async_store_tmem(x_tmem, plgpu.load(x_gmem, layout=NATIVE))
        plgpu.commit_tmem()
        o_gmem[...] = plgpu.async_load_tmem(x_tmem.at[:, 32:64], layout=NATIVE)
        plgpu.wait_load_tmem()

    x = numbers(8, (128, 96), dtype)
    scratch = [plgpu.TMEM((128, 96), dtype, packed=packed)]
    got = plgpu.kernel(kernel, out_type=struct((128, 32), dtype), scratch_types=scratch, interpret=BLACKWELL)(x)
    np.testing.assert_array_equal(f64(got), f64(x)[:, 32:64])


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_hopper_has_no_tensor_memory():
    p = PRODUCTS["bf16"]
    with pytest.raises(NotImplementedError, match="is in TMEM, which sm_90a does not have"):
        generate(params_of(on_blackwell(p), *p.operands()), "sm_90a")


def test_more_columns_than_there_are_are_refused():
    def kernel(x_gmem, o_gmem, one, two):
        o_gmem[...] = plgpu.async_load_tmem(one)

    scratch = [plgpu.TMEM((128, 384), f32), plgpu.TMEM((128, 256), f32)]
    call = plgpu.kernel(kernel, out_type=struct((128, 384)), scratch_types=scratch)
    with pytest.raises(NotImplementedError, match="needs 256 columns of TMEM, of which 128 are free"):
        generate(params_of(call, numbers(0, (8,), f32)), "sm_100a")


# --- machine code -----------------------------------------------------------------------------------------------------
@needs_nvdisasm
def test_one_thread_issues_without_a_loop_over_lanes():
    a, b = numbers(9, (256, 256), bf16), numbers(10, (256, 256), bf16)
    made = built(pipelined_matmul, "sm_100a", a, b)
    code = machine_code(made)
    assert sum(x.base == "UTCHMMA" for x in code) == 4
    assert sum(x.base == "UTMALDG" for x in code) == 2
    assert not any(x.opcode.endswith(".U.ANY") and x.base == "BRA" for x in code)
    assert not made.resources.spills
    assert made.generated.tmem_columns == 128
