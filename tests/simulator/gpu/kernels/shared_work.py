"""Kernels whose parts meet in memory: accumulators in turn, sums of several blocks, scales in TMEM."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import BLACKWELL, HOPPER, Table, f32, f64, ints, struct, tiled_smem

SHARED_WORK = Table()


def overlapped_matmul(a, b, tile_m=128, tile_n=64, tile_k=64, buffers=2):
    """Persistent, on Blackwell: thread 0 copies, thread 1 multiplies, thread 2 stores, each as far ahead as it can.

    There are two accumulators in TMEM: one is read and stored while the next tile goes to the other. `full` and `empty`
    say which; both order the tensor core. A block has a row of tiles of the result.
    """
    m, k, n = *a.shape, b.shape[1]
    steps, tiles = k // tile_k, n // tile_n
    total = steps * tiles

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc, loaded, consumed, full, empty):
        thread = lax.axis_index("thread")
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)

        @pl.when(thread == 0)
        def memory_thread():
            @pl.loop(0, total)
            def _(i):
                slot, part = lax.rem(i, buffers), pl.ds(lax.rem(i, steps) * tile_k, tile_k)
                columns = pl.ds(lax.div(i, steps) * tile_n, tile_n)

                @pl.when(i >= buffers)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot])

            for i in range(max(total - buffers, 0), total):
                plgpu.barrier_wait(consumed.at[i % buffers])

        @pl.when(thread == 1)
        def product_thread():
            @pl.loop(0, tiles)
            def _(tile):
                which = lax.rem(tile, 2)

                @pl.when(tile >= 2)
                def _():
                    plgpu.barrier_wait(empty.at[which])

                @pl.loop(0, steps)
                def _(ki):
                    slot = lax.rem(tile * steps + ki, buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.tcgen05_mma(
                        acc.at[:, pl.ds(which * tile_n, tile_n)],
                        a_smem.at[slot],
                        b_smem.at[slot],
                        consumed.at[slot],
                        accumulate=ki > 0,
                    )

                plgpu.tcgen05_commit_arrive(full.at[which])

            for tile in range(max(tiles - 2, 0), tiles):
                plgpu.barrier_wait(empty.at[tile % 2])

        @pl.when(thread == 2)
        def store_thread():
            @pl.loop(0, tiles)
            def _(tile):
                which = lax.rem(tile, 2)
                plgpu.barrier_wait(full.at[which])
                result = plgpu.async_load_tmem(acc.at[:, pl.ds(which * tile_n, tile_n)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = result
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(empty.at[which])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, pl.ds(tile * tile_n, tile_n)])

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m,),
        grid_names=("m",),
        num_threads=3,
        thread_name="thread",
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k)),
            b_smem=tiled_smem((buffers, tile_k, tile_n)),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            acc=plgpu.TMEM((tile_m, 2 * tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
            full=plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
            empty=plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        ),
    )(a, b)


@SHARED_WORK.case(overlapped_matmul, BLACKWELL)
def blackwell_overlapped():
    a, b = ints(100, (256, 192)), ints(101, (192, 256))
    return overlapped_matmul(a, b), f64(a) @ f64(b), 0.0


def split_k_matmul(a, b, parts=2, tile_m=64, tile_n=64, tile_k=64):
    """Each block has a part of k, and the TMA engine adds its tile to what the others have stored."""
    m, k, n = *a.shape, b.shape[1]
    share = k // parts

    def kernel(a_gmem, b_gmem, o_gmem):
        def scope(a_smem, b_smem, o_smem, loaded):
            rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
            columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

            def compute(acc):
                @pl.loop(0, share // tile_k)
                def _(ki):
                    part = pl.ds(lax.axis_index("k") * share + ki * tile_k, tile_k)
                    plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem, loaded)
                    plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem, loaded)
                    plgpu.barrier_wait(loaded)
                    plgpu.wgmma(acc, a_smem, b_smem)
                    plgpu.wgmma_wait(0)

                return acc[...]

            o_smem[...] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns], reduction_op="add")
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            scope,
            tiled_smem((tile_m, tile_k)),
            tiled_smem((tile_k, tile_n)),
            tiled_smem((tile_m, tile_n), f32),
            plgpu.Barrier(num_arrivals=2),
        )

    mesh = plgpu.Mesh(grid=(m // tile_m, n // tile_n, parts), grid_names=("m", "n", "k"))
    run = pl.run_state(lambda refs: pl.core_map(mesh)(lambda: kernel(*refs)))
    return run((a, b, jnp.zeros((m, n), f32)))[2]


@SHARED_WORK.case(split_k_matmul, HOPPER)
def hopper_split_k():
    a, b = ints(102, (128, 512)), ints(103, (512, 128))
    return split_k_matmul(a, b, parts=4), f64(a) @ f64(b), 0.0


def softmax_rows(x, rows=64, columns=128):
    """Softmax of rows that are spread over the two blocks of a cluster, which send each other maxima and sums."""
    m, n = x.shape
    assert n == 2 * columns

    def kernel(x_gmem, o_gmem, x_smem, o_smem, theirs, loaded, arrived, read):
        block = lax.axis_index("cluster")
        here = pl.ds(lax.axis_index("m") * rows, rows), pl.ds(block * columns, columns)
        plgpu.copy_gmem_to_smem(x_gmem.at[here], x_smem, loaded)
        plgpu.barrier_wait(loaded)
        x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)

        def exchange(mine):
            plgpu.async_store_smem(mine, theirs, arrived, cluster_idx=1 - block, cluster_dim="cluster")
            plgpu.barrier_wait(arrived)
            other = plgpu.load(theirs, layout=plgpu.Layout.WGMMA.reduce(1))
            plgpu.barrier_arrive(read)  # neither sends again before both have read
            plgpu.barrier_wait(read)
            return other

        top = x.max(axis=1)
        top = jnp.maximum(top, exchange(top))
        p = jnp.exp(x - lax.broadcast_in_dim(top, x.shape, (0,)))
        total = p.sum(axis=1)
        total = total + exchange(total)
        o_smem[...] = p / lax.broadcast_in_dim(total, p.shape, (0,))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[here])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // rows,),
        grid_names=("m",),
        cluster=(2,),
        cluster_names=("cluster",),
        scratch_types=dict(
            x_smem=tiled_smem((rows, columns), f32),
            o_smem=tiled_smem((rows, columns), f32),
            theirs=plgpu.SMEM((rows,), f32),
            loaded=plgpu.Barrier(),
            arrived=plgpu.Barrier(),
            read=plgpu.ClusterBarrier(collective_axes=("cluster",)),
        ),
    )(x)


@SHARED_WORK.case(softmax_rows, HOPPER)
def hopper_cluster_softmax():
    x = ints(104, (128, 256), f32)
    p = np.exp(f64(x) - f64(x).max(1, keepdims=True))
    return softmax_rows(x), p / p.sum(1, keepdims=True), 1e-6


def scaled_matmul(a, b, a_scales, b_scales, tile=128, tile_k=128):
    """Blackwell's block-scaled product: float8 operands, of which 32 elements along k share a power of two.

    b is (n, k). Scales go from SMEM to TMEM by the tensor core itself, in order with its products.
    """
    (m, k), n = a.shape, b.shape[0]

    def grouped(scales):  # (rows, k // 32) as the tensor core wants them: row 32 * i + j at [j, 4 * i …]
        r, c = scales.shape
        return scales.reshape(r // 128, 4, 32, c // 4, 4).transpose(0, 3, 2, 1, 4).reshape(r // 128, c // 4, 32, 16)

    def kernel(a_gmem, b_gmem, sa_gmem, sb_gmem, o_gmem, operands, scales, scales_tmem, acc, loaded, done):
        mi, ni = lax.axis_index("m"), lax.axis_index("n")
        (a_smem, b_smem), (sa_smem, sb_smem), (sa_tmem, sb_tmem) = operands, scales, scales_tmem

        @pl.loop(0, k // tile_k)
        def _(ki):
            part, one = pl.ds(ki * tile_k, tile_k), pl.ds(ki, 1)
            plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(mi * tile, tile), part], a_smem, loaded)
            plgpu.copy_gmem_to_smem(b_gmem.at[pl.ds(ni * tile, tile), part], b_smem, loaded)
            plgpu.copy_gmem_to_smem(sa_gmem.at[pl.ds(mi, 1), one], sa_smem, loaded)
            plgpu.copy_gmem_to_smem(sb_gmem.at[pl.ds(ni, 1), one], sb_smem, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.async_copy_scales_to_tmem(sa_smem, sa_tmem)
            plgpu.async_copy_scales_to_tmem(sb_smem, sb_tmem)
            plgpu.tcgen05_mma(
                acc,
                a_smem,
                plgpu.transpose_ref(b_smem, (1, 0)),
                done,
                a_scale=sa_tmem,
                b_scale=sb_tmem,
                accumulate=ki > 0,
            )
            plgpu.barrier_wait(done)

        o_gmem[pl.ds(mi * tile, tile), pl.ds(ni * tile, tile)] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    scale, layout = jnp.float8_e8m0fnu, plgpu.TMEMLayout.SCALES_LAYOUT
    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile, n // tile),
        grid_names=("m", "n"),
        scratch_types=dict(
            operands=[tiled_smem((tile, tile_k), a.dtype)] * 2,
            scales=[plgpu.SMEM((1, 1, 32, 16), scale)] * 2,
            scales_tmem=[plgpu.TMEM((tile, 4), scale, layout=layout)] * 2,
            acc=plgpu.TMEM((tile, tile), f32),
            loaded=plgpu.Barrier(num_arrivals=4),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )(a, b, grouped(a_scales), grouped(b_scales))


@SHARED_WORK.case(scaled_matmul, BLACKWELL)
def blackwell_scaled():
    a, b = ints(105, (256, 256), jnp.float8_e4m3fn), ints(106, (256, 256), jnp.float8_e4m3fn)
    scales = [jnp.asarray(2.0 ** np.asarray(ints(s, (256, 8), f32)), jnp.float8_e8m0fnu) for s in (107, 108)]
    left, right = (f64(x) * f64(s).repeat(32, 1) for x, s in zip((a, b), scales))
    return scaled_matmul(a, b, *scales), left @ right.T, 0.0
