"""Hopper's matrix products, compiled: what they compute on the emulator, and the machine code that they become."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu.generate import generate
from simulator.gpu.kernels.common import struct, tiled_smem

from .products import (
    Layout,
    Product,
    bf16,
    built,
    e4m3,
    e5m2,
    f16,
    f32,
    f64,
    i8,
    i32,
    innermost_loop,
    machine_code,
    needs_nvrtc,
    numbers,
    on_hopper,
    params_of,
    u8,
)
from .sources import needs_nvdisasm

HOPPER = plgpu.EmulateParams(arch="sm_90a")

PRODUCTS = {
    "bf16": Product(64, 64, 128, bf16, f32),
    "B with K first": Product(64, 64, 64, bf16, f32, b_turned=False),
    "both turned": Product(128, 64, 64, f16, f32, a_turned=True, b_turned=False),
    "two parts of rows": Product(128, 128, 64, bf16, f32, twice=True),
    "accumulator of 16 bits": Product(64, 64, 128, f16, f16),
    "A in registers": Product(64, 64, 128, bf16, f32, a_in="regs", b_turned=False),
    "A in registers, twice": Product(128, 64, 64, f16, f16, a_in="regs", twice=True),
    "tf32": Product(64, 64, 64, f32, f32),
    "tf32 from registers": Product(64, 32, 16, f32, f32, a_in="regs"),
    "floats of 8 bits": Product(64, 128, 64, e4m3, f16, b_dtype=e5m2),
    "floats of 8 bits from registers": Product(64, 64, 64, e5m2, f32, a_in="regs"),
    "integers": Product(64, 64, 32, i8, i32),
    "unsigned integers": Product(64, 64, 32, u8, i32),
    "integers from registers": Product(64, 64, 64, i8, i32, a_in="regs"),
    "few columns": Product(64, 64, 8, bf16, f32),
    "many columns": Product(64, 64, 256, bf16, f32, twice=True),
    "a swizzle of 64": Product(64, 32, 32, bf16, f32, b_turned=False),
    "a swizzle of 32": Product(64, 16, 16, bf16, f32, b_turned=False),
}


@needs_nvrtc
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    p = PRODUCTS[name]
    a, b = p.operands()
    np.testing.assert_array_equal(f64(on_hopper(p, HOPPER)(a, b)), p.expected(a, b))


@needs_nvrtc
def test_buffers_without_a_swizzle():
    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        def compute(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 32)))

    a, b = numbers(2, (64, 32), f16), numbers(3, (32, 32), f16)
    plain = (plgpu.TilingTransform((8, 8)),)
    scratch = [plgpu.SMEM((64, 32), f16, transforms=plain), plgpu.SMEM((32, 32), f16, transforms=plain)]
    scratch += [plgpu.Barrier(num_arrivals=2)]
    call = plgpu.kernel(kernel, out_type=struct((64, 32)), scratch_types=scratch, interpret=HOPPER)
    np.testing.assert_array_equal(f64(call(a, b)), f64(a) @ f64(b))


@needs_nvrtc
def test_what_was_read_of_an_accumulator_stays_as_it_was():
    def kernel(a_gmem, b_gmem, once, twice, a_smem, b_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        def compute(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            first = acc[...]
            plgpu.wgmma(acc, a_smem, b_smem)
            return first, plgpu.wgmma_accumulator_load(acc), acc[:, 8:24]

        first, second, part = pl.run_scoped(compute, plgpu.ACC((64, 64)))
        once[...], twice[...] = first, second + jnp.pad(part, ((0, 0), (0, 48)))

    a, b = numbers(4, (64, 64), f16), numbers(5, (64, 64), f16)
    scratch = [tiled_smem((64, 64)), tiled_smem((64, 64)), plgpu.Barrier(num_arrivals=2)]
    out = [struct((64, 64)), struct((64, 64))]
    once, twice = plgpu.kernel(kernel, out_type=out, scratch_types=scratch, interpret=HOPPER)(a, b)
    expected = f64(a) @ f64(b)
    np.testing.assert_array_equal(f64(once), expected)
    np.testing.assert_array_equal(f64(twice), 2 * expected + np.pad(2 * expected[:, 8:24], ((0, 0), (0, 48))))


@needs_nvrtc
def test_an_accumulator_that_begins_as_an_array():
    def kernel(a_gmem, b_gmem, c_gmem, o_gmem, a_smem, b_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        begin = plgpu.load(c_gmem, layout=Layout.WGMMA)
        o_gmem[...] = pl.run_state(lambda acc: plgpu.wgmma(acc, a_smem, b_smem))(plgpu.ACC.init(begin))

    a, b, c = numbers(6, (64, 64), f16), numbers(7, (64, 64), f16), numbers(8, (64, 64), f32)
    scratch = [tiled_smem((64, 64)), tiled_smem((64, 64)), plgpu.Barrier(num_arrivals=2)]
    call = plgpu.kernel(kernel, out_type=struct((64, 64)), scratch_types=scratch, interpret=HOPPER)
    np.testing.assert_array_equal(f64(call(a, b, c)), f64(c) + f64(a) @ f64(b))


@needs_nvrtc
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "out"),
    [(64, 32, 16, bf16, f32), (128, 16, 8, f16, f16), (64, 64, 16, i8, i32), (64, 16, 16, f32, f32)],
)
def test_products_of_arrays(m, k, n, dtype, out):
    def kernel(a_gmem, b_gmem, c_gmem, o_gmem):
        a = plgpu.load(a_gmem, layout=Layout.MMA_LHS)
        b = plgpu.load(b_gmem, layout=Layout.MMA_RHS)
        o_gmem[...] = plgpu.mma(plgpu.load(c_gmem, layout=Layout.MMA_ACC), a, b)

    a, b, c = numbers(9, (m, k), dtype), numbers(10, (k, n), dtype), numbers(11, (m, n), out)
    call = plgpu.kernel(kernel, out_type=struct((m, n), out), interpret=HOPPER)
    np.testing.assert_array_equal(f64(call(a, b, c)), f64(c) + f64(a) @ f64(b))


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_blackwell_has_no_wgmma():
    p = PRODUCTS["bf16"]
    with pytest.raises(NotImplementedError, match=r"plgpu\.wgmma is Hopper's"):
        generate(params_of(on_hopper(p), *p.operands()), "sm_100a")


def test_operands_within_tiles_are_refused():
    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem):
        def compute(acc):
            plgpu.wgmma(acc, a_smem.at[pl.ds(4, 64)], b_smem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 64)))

    scratch = [tiled_smem((72, 64)), tiled_smem((64, 64))]
    call = plgpu.kernel(kernel, out_type=struct((64, 64)), scratch_types=scratch)
    with pytest.raises(NotImplementedError, match="begins within a tile of 8 rows"):
        generate(params_of(call, numbers(0, (64, 64), f16), numbers(1, (64, 64), f16)), "sm_90a")


# --- machine code -----------------------------------------------------------------------------------------------------
def large_tiles(a, b, tile_m=128, tile_n=256, tile_k=64, buffers=4):
    """One thread copies; two multiply, each half of the rows of a tile."""
    m, k, n = *a.shape, b.shape[1]
    steps = k // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, consumed):
        thread = lax.axis_index("thread")
        mi, ni = lax.axis_index("m"), lax.axis_index("n")
        columns = pl.ds(ni * tile_n, tile_n)
        half = tile_m // 2
        mine = pl.ds(thread * half, half)

        @pl.when(thread < 2)
        def multiply():
            plgpu.set_max_registers(232, action="increase")

            def compute(acc):
                def step(i, _):
                    slot = lax.rem(i, buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot, mine], b_smem.at[slot])

                    @pl.when(i > 0)
                    def _():
                        plgpu.barrier_arrive(consumed.at[lax.rem(i + buffers - 1, buffers)])

                lax.fori_loop(0, steps, step, None)
                return acc[...]

            result = pl.run_scoped(compute, plgpu.ACC((half, tile_n))).astype(a.dtype)
            o_gmem[pl.ds(mi * tile_m + thread * half, half), columns] = result

        @pl.when(thread == 2)
        def copy():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def _(i):
                slot, part = lax.rem(i, buffers), pl.ds(i * tile_k, tile_k)

                @pl.when(i >= buffers)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(mi * tile_m, tile_m), part], a_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot])

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n), a.dtype),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        num_threads=3,
        thread_name="thread",
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k), a.dtype),
            b_smem=tiled_smem((buffers, tile_k, tile_n), a.dtype),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
        ),
    )(a, b)


@needs_nvdisasm
def test_machine_code_of_a_large_product():
    made = built(large_tiles, "sm_90a", jnp.zeros((256, 1024), bf16), jnp.zeros((1024, 512), bf16))
    loop = innermost_loop(machine_code(made), "HGMMA")
    products = sum(x.base == "HGMMA" for x in loop)
    assert products == 16  # 4 steps of 64 of K, since there are 4 buffers
    assert len(loop) - products <= 24 * 4
    assert made.resources.registers <= 168
    assert "C7510" not in made.binary.log and "C7517" not in made.binary.log


@needs_nvdisasm
@pytest.mark.parametrize("name", ["two parts of rows", "A in registers, twice", "many columns"])
def test_the_assembler_does_not_serialise_products(name):
    p = PRODUCTS[name]
    made = built(on_hopper(p), "sm_90a", *p.operands())
    assert sum(x.base == "HGMMA" for x in machine_code(made)) == p.m // 64 * (p.k // 16) * 2
    assert "C7510" not in made.binary.log and "C7517" not in made.binary.log
    assert not made.resources.spills
