"""Section "Blackwell (tcgen05)": tensor memory, and products that complete on barriers."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from ..kernels.common import bf16, f16, f32, f64, i8, i32, ints, struct, tiled_smem
from .spelling import Spelling, fragment

e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@fragment("Blackwell: allocating the accumulator, using TMEM", "sm_100a")
def tmem_by_run_scoped(s: Spelling):
    """128 or 64 rows, in a scope."""
    results = []
    for rows in (128, 64):
        x = ints(40, (rows, 128), f32)

        @s.kernel(out_shape=struct(x.shape))
        def kernel(x_ref, y_ref, shape=x.shape):
            @functools.partial(pl.run_scoped, tmem_ref=plgpu.TMEM(shape, jnp.float32))
            def barrier_scope(tmem_ref):
                plgpu.async_store_tmem(tmem_ref, x_ref[...])
                plgpu.commit_tmem()
                y_ref[...] = plgpu.async_load_tmem(tmem_ref)
                plgpu.wait_load_tmem()

        results.append((kernel(x), f64(x), 0.0))
    return results


@fragment("Blackwell: allocating the accumulator, using TMEM", "sm_100a")
def packed_operand_and_accumulator_that_is_not(s: Spelling):
    """The left operand in TMEM is packed, a float16 accumulator is not."""
    a, b = ints(41, (128, 64), f16, -2, 3), ints(42, (64, 128), f16, -2, 3)

    @s.kernel(
        out_shape=struct((128, 128), f16),
        scratch_shapes=[tiled_smem(b.shape), plgpu.Barrier(), plgpu.Barrier(orders_tensor_core=True)],
    )
    def kernel(a_gmem, b_gmem, o_gmem, rhs_smem_ref, loaded, done):
        @functools.partial(
            pl.run_scoped,
            acc_ref=plgpu.TMEM((128, 128), jnp.float16, packed=False),
            lhs_ref=plgpu.TMEM((128, 64), jnp.float16, packed=True),
        )
        def barrier_scope(acc_ref, lhs_ref):
            plgpu.copy_gmem_to_smem(b_gmem, rhs_smem_ref, loaded)
            plgpu.async_store_tmem(lhs_ref, a_gmem[...])
            plgpu.commit_tmem()
            plgpu.barrier_wait(loaded)
            plgpu.tcgen05_mma(acc_ref, lhs_ref, rhs_smem_ref, done, accumulate=False)
            plgpu.barrier_wait(done)
            o_gmem[...] = plgpu.async_load_tmem(acc_ref)
            plgpu.wait_load_tmem()

    return kernel(a, b), f64(a) @ f64(b), 0.0


@fragment("Blackwell: load", "sm_100a")
def load_then_overwrite(s: Spelling):
    """The result can be used at once; the TMEM is written again only after `wait_load_tmem`."""
    x = ints(43, (128, 64), f32)

    @s.kernel(
        out_shape=[struct(x.shape)] * 2,
        scratch_shapes=[plgpu.SMEM(x.shape, f32), plgpu.TMEM(x.shape, f32)],
    )
    def kernel(x_ref, gmem_ref, gmem_ref2, smem_ref, tmem_ref):
        for target, times in ((gmem_ref, 1), (gmem_ref2, 2)):
            plgpu.async_store_tmem(tmem_ref, x_ref[...] * times)
            plgpu.commit_tmem()
            smem_ref[...] = plgpu.async_load_tmem(tmem_ref)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem_ref, target)
            plgpu.wait_smem_to_gmem(0)
            plgpu.wait_load_tmem()  # the reads are complete before tmem_ref is overwritten

    y, z = kernel(x)
    return [(y, f64(x), 0.0), (z, 2 * f64(x), 0.0)]


@fragment("Blackwell: store", "sm_100a")
def store_commit_load(s: Spelling):
    x = ints(44, (64, 128), f32)

    @s.kernel(
        out_shape=struct(x.shape),
        scratch_shapes=[plgpu.SMEM(x.shape, f32)] * 2 + [plgpu.TMEM(x.shape, f32), plgpu.Barrier()],
    )
    def kernel(x_ref, y_ref, smem_ref, smem_ref2, tmem_ref, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem_ref, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.async_store_tmem(tmem_ref, smem_ref[...])
        plgpu.commit_tmem()
        smem_ref2[...] = plgpu.async_load_tmem(tmem_ref)  # now it is safe to read tmem_ref
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem_ref2, y_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel(x), f64(x), 0.0


def product(s: Spelling, a, b, acc=f32, transposed=False):
    """a @ b (b @ as (N, K) if transposed) by one product, with the barrier passed to it."""
    m, n = a.shape[0], b.shape[0] if transposed else b.shape[1]

    @s.kernel(
        out_shape=struct((m, n), acc),
        scratch_shapes=dict(
            lhs_ref=tiled_smem(a.shape, a.dtype),
            rhs_ref=tiled_smem(b.shape, b.dtype),
            acc_tmem=plgpu.TMEM((m, n), acc, packed=None if jnp.dtype(acc).itemsize == 4 else False),
            loaded=plgpu.Barrier(num_arrivals=2),
        ),
    )
    def kernel(a_gmem, b_gmem, o_gmem, lhs_ref, rhs_ref, acc_tmem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, lhs_ref, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, rhs_ref, loaded)
        plgpu.barrier_wait(loaded)  # needs no orders_tensor_core: TMA completed it

        @functools.partial(pl.run_scoped, barrier_ref=plgpu.Barrier(orders_tensor_core=True))
        def barrier_scope(barrier_ref):
            rhs = s.transpose_ref(rhs_ref, (1, 0)) if transposed else rhs_ref
            plgpu.tcgen05_mma(acc_tmem, lhs_ref, rhs, barrier_ref, accumulate=False)
            plgpu.barrier_wait(barrier_ref)
            result = plgpu.async_load_tmem(acc_tmem)
            o_gmem[...] = result
            plgpu.wait_load_tmem()

    return kernel(a, b)


@fragment("Blackwell: issuing the operation", "sm_100a")
def shapes_of_tcgen05(s: Spelling):
    """M 64 or 128, N a multiple of 8 and at most 512, K of the swizzle."""
    results = []
    for m, n, k in [(64, 8, 64), (128, 512, 64), (128, 136, 32), (64, 256, 16)]:
        a, bt = ints(45, (m, k)), ints(46, (n, k))
        results.append((product(s, a, bt, transposed=True), f64(a) @ f64(bt).T, 0.0))
    return results


@fragment("Blackwell: issuing the operation", "sm_100a")
def dtypes_of_tcgen05(s: Spelling):
    results = []
    for dtype, acc in [(bf16, f32), (f16, f32), (f16, f16), (e5m2, f32), (e4m3, f32), (e4m3, f16), (i8, i32)]:
        a, bt = ints(47, (128, 128), dtype, -2, 3), ints(48, (128, 128), dtype, -2, 3)
        results.append((product(s, a, bt, acc, transposed=True), f64(a) @ f64(bt).T, 0.0))
    return results


@fragment("Blackwell: waiting for the operation to complete", "sm_100a")
def barrier_of_the_product(s: Spelling):
    a, b = ints(49, (128, 64)), ints(50, (64, 128))
    return product(s, a, b), f64(a) @ f64(b), 0.0


@fragment("Blackwell: waiting for the operation to complete", "sm_100a")
def commit_of_two_products(s: Spelling):
    """Without a barrier products are tracked by `tcgen05_commit`."""
    a, a2, b, b2 = ints(51, (128, 64)), ints(52, (128, 64)), ints(53, (64, 128)), ints(54, (64, 128))

    @s.kernel(
        out_shape=struct((128, 128)),
        scratch_shapes=dict(
            operands=[tiled_smem(x.shape) for x in (a, a2, b, b2)],
            acc_tmem=plgpu.TMEM((128, 128), f32),
            loaded=plgpu.Barrier(num_arrivals=4),
        ),
    )
    def kernel(*refs, operands, acc_tmem, loaded):
        *sources, o_gmem = refs
        for source, target in zip(sources, operands):
            plgpu.copy_gmem_to_smem(source, target, loaded)
        plgpu.barrier_wait(loaded)
        lhs_ref, lhs_ref2, rhs_ref, rhs_ref2 = operands

        @functools.partial(pl.run_scoped, barrier_ref=plgpu.Barrier(orders_tensor_core=True))
        def barrier_scope(barrier_ref):
            plgpu.tcgen05_mma(acc_tmem, lhs_ref, rhs_ref, accumulate=False)
            plgpu.tcgen05_mma(acc_tmem, lhs_ref2, rhs_ref2)
            s.tcgen05_commit(barrier_ref)
            plgpu.barrier_wait(barrier_ref)
            o_gmem[...] = plgpu.async_load_tmem(acc_tmem)
            plgpu.wait_load_tmem()

    return kernel(a, a2, b, b2), f64(a) @ f64(b) + f64(a2) @ f64(b2), 0.0


def collective(s: Spelling, m, n, k, commit=False):
    a, b = ints(55, (m, k)), ints(56, (k, n))

    @s.kernel(
        out_shape=struct((m, n)),
        cluster=(2,),
        cluster_names=("x",),
        scratch_shapes=dict(
            a_smem=tiled_smem((m // 2, k)),
            b_smem=tiled_smem((k, n // 2)),
            acc_tmem=plgpu.TMEM((m // 2, n), f32, collective=True),
            a_tma_barrier=plgpu.Barrier(),
            b_tma_barrier=plgpu.Barrier(),
            mma_barrier=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, acc_tmem, a_tma_barrier, b_tma_barrier, mma_barrier):
        plgpu.copy_gmem_to_smem(
            a_gmem,  # [M, K]
            a_smem,  # [M // 2, K]
            a_tma_barrier,
            collective_axes="x",
            leader_tracked=plgpu.CopyPartition.PARTITIONED(0),
        )
        plgpu.copy_gmem_to_smem(
            b_gmem,  # [K, N]
            b_smem,  # [K, N // 2]
            b_tma_barrier,
            collective_axes="x",
            leader_tracked=plgpu.CopyPartition.PARTITIONED(1),
        )

        @pl.when(lax.axis_index("x") == 0)
        def _():
            plgpu.barrier_wait(a_tma_barrier)
            plgpu.barrier_wait(b_tma_barrier)
            barrier = None if commit else mma_barrier
            plgpu.tcgen05_mma(acc_tmem, a_smem, b_smem, barrier, accumulate=False, collective_axis="x")
            if commit:
                s.tcgen05_commit(mma_barrier, collective_axis="x")

        plgpu.barrier_wait(mma_barrier)
        o_gmem[pl.ds(lax.axis_index("x") * (m // 2), m // 2)] = plgpu.async_load_tmem(acc_tmem)
        plgpu.wait_load_tmem()

    return kernel(a, b), f64(a) @ f64(b), 0.0


@fragment("Collective MMA", "sm_100a")
def collective_products(s: Spelling):
    """M 256 or 128, N at most 256: stacked accumulators are the product."""
    return [collective(s, 256, 256, 64), collective(s, 128, 128, 128), collective(s, 256, 32, 64, commit=True)]
