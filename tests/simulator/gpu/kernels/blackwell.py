"""Blackwell matrix products: tcgen05 accumulates in TMEM, and only barriers tell that it has done."""

from __future__ import annotations

from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import BLACKWELL, Table, bf16, f32, f64, ints, struct, tiled_smem

BLACKWELL_MATMULS = Table()


def simple_matmul(a, b, tile_m=128, tile_n=128, tile_k=64):
    """A block owns a tile of the result, and goes along k one step after the other."""
    m, k, n = *a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc, loaded, done):
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        @pl.loop(0, k // tile_k)
        def _(ki):
            part = pl.ds(ki * tile_k, tile_k)
            plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem, loaded)
            plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=ki > 0)
            plgpu.barrier_wait(done)

        o_smem[...] = plgpu.async_load_tmem(acc)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
        plgpu.wait_load_tmem()
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        scratch_types=dict(
            a_smem=tiled_smem((tile_m, tile_k), a.dtype),
            b_smem=tiled_smem((tile_k, tile_n), a.dtype),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            acc=plgpu.TMEM((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )(a, b)


@BLACKWELL_MATMULS.case(simple_matmul, BLACKWELL)
def blackwell_simple():
    a, b = ints(60, (256, 128)), ints(61, (128, 256))
    return simple_matmul(a, b), f64(a) @ f64(b), 0.0


def pipelined_matmul(a, b, tile_m=128, tile_n=128, tile_k=64, buffers=2):
    """Thread 0 copies, thread 1 issues products; the tensor core itself says which buffers it has read."""
    m, k, n = *a.shape, b.shape[1]
    steps = k // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc, loaded, consumed, done):
        thread = lax.axis_index("thread")
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        @pl.when(thread == 0)
        def memory_thread():
            @pl.loop(0, steps)
            def _(ki):
                slot, part = lax.rem(ki, buffers), pl.ds(ki * tile_k, tile_k)

                @pl.when(ki >= buffers)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot])

            for ki in range(max(steps - buffers, 0), steps):
                plgpu.barrier_wait(consumed.at[ki % buffers])

        @pl.when(thread == 1)
        def compute_thread():
            @pl.loop(0, steps)
            def _(ki):
                slot = lax.rem(ki, buffers)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.tcgen05_mma(acc, a_smem.at[slot], b_smem.at[slot], consumed.at[slot], accumulate=ki > 0)

            plgpu.tcgen05_commit_arrive(done)
            plgpu.barrier_wait(done)
            o_smem[...] = plgpu.async_load_tmem(acc)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
            plgpu.wait_load_tmem()
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        num_threads=2,
        thread_name="thread",
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k), a.dtype),
            b_smem=tiled_smem((buffers, tile_k, tile_n), a.dtype),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            acc=plgpu.TMEM((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )(a, b)


@BLACKWELL_MATMULS.case(pipelined_matmul, BLACKWELL)
def blackwell_pipelined():
    a, b = ints(62, (256, 256), bf16), ints(63, (256, 256), bf16)
    return pipelined_matmul(a, b), f64(a) @ f64(b), 0.0


def warp_matmul(a, b, tile_m=128, tile_n=128, tile_k=64, buffers=2):
    """One thread, whose first warp copies while its second issues products."""
    m, k, n = *a.shape, b.shape[1]
    steps = k // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc, loaded, consumed, done):
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")

            @pl.when(warp == 0)
            def memory_warp():
                @pl.loop(0, steps)
                def _(ki):
                    slot, part = lax.rem(ki, buffers), pl.ds(ki * tile_k, tile_k)

                    @pl.when(ki >= buffers)
                    def _():
                        plgpu.barrier_wait(consumed.at[slot])

                    plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[slot], loaded.at[slot])
                    plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot])

                for ki in range(max(steps - buffers, 0), steps):
                    plgpu.barrier_wait(consumed.at[ki % buffers])

            @pl.when(warp == 1)
            def product_warp():
                @pl.loop(0, steps)
                def _(ki):
                    slot = lax.rem(ki, buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.tcgen05_mma(acc, a_smem.at[slot], b_smem.at[slot], consumed.at[slot], accumulate=ki > 0)

                plgpu.tcgen05_commit_arrive(done)

        plgpu.barrier_wait(done)
        o_smem[...] = plgpu.async_load_tmem(acc)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
        plgpu.wait_load_tmem()
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k), a.dtype),
            b_smem=tiled_smem((buffers, tile_k, tile_n), a.dtype),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            acc=plgpu.TMEM((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )(a, b)


@BLACKWELL_MATMULS.case(warp_matmul, BLACKWELL)
def blackwell_warps():
    a, b = ints(64, (256, 256)), ints(65, (256, 256))
    return warp_matmul(a, b), f64(a) @ f64(b), 0.0


def collective_matmul(a, b, tile_m=256, tile_n=128, tile_k=64, tiles_each=1, buffers=2):
    """Two blocks of a cluster compute one tile together: each holds half of A's rows and half of B's columns.

    The first block waits for the copies of both and issues the products for both; both wait for the products before
    they overwrite what those read. With several tiles for a cluster the accumulators are reused, when both blocks have
    read them.
    """
    m, k, n = *a.shape, b.shape[1]
    steps = k // tile_k
    half = tile_m // 2

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc, loaded, consumed, done, read):
        block = lax.axis_index("pair")
        leader = block == 0

        def tile(number):
            mi, ni = lax.axis_index("m"), lax.axis_index("n") * tiles_each + number
            columns = pl.ds(ni * tile_n, tile_n)

            def fetch(ki, slot):
                part = pl.ds(ki * tile_k, tile_k)
                plgpu.copy_gmem_to_smem(
                    a_gmem.at[pl.ds(mi * tile_m, tile_m), part],
                    a_smem.at[slot],
                    loaded.at[slot],
                    collective_axes="pair",
                    leader_tracked=plgpu.CopyPartition.PARTITIONED(0),
                )
                plgpu.copy_gmem_to_smem(
                    b_gmem.at[part, columns],
                    b_smem.at[slot],
                    loaded.at[slot],
                    collective_axes="pair",
                    leader_tracked=plgpu.CopyPartition.PARTITIONED(1),
                )

            for slot in range(min(buffers, steps)):
                fetch(slot, slot)

            @pl.loop(0, steps)
            def _(ki):
                slot = lax.rem(ki, buffers)

                @pl.when(leader)
                def _():
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.tcgen05_mma(
                        acc,
                        a_smem.at[slot],
                        b_smem.at[slot],
                        consumed.at[slot],
                        accumulate=ki > 0,
                        collective_axis="pair",
                    )

                plgpu.barrier_wait(consumed.at[slot])

                @pl.when(ki + buffers < steps)
                def _():
                    fetch(ki + buffers, slot)

            @pl.when(leader)
            def _():
                plgpu.tcgen05_commit_arrive(done, collective_axis="pair")

            plgpu.barrier_wait(done)
            result = plgpu.async_load_tmem(acc)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_smem[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(mi * tile_m + block * half, half), columns])
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(read)
            plgpu.barrier_wait(read)

        for number in range(tiles_each):
            tile(number)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n // tiles_each),
        grid_names=("m", "n"),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=dict(
            a_smem=tiled_smem((buffers, half, tile_k), a.dtype),
            b_smem=tiled_smem((buffers, tile_k, tile_n // 2), a.dtype),
            o_smem=tiled_smem((half, tile_n), f32),
            acc=plgpu.TMEM((half, tile_n), f32, collective=True),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
            done=plgpu.Barrier(orders_tensor_core=True),
            read=plgpu.ClusterBarrier(collective_axes=("pair",), orders_tensor_core=True),
        ),
    )(a, b)


@BLACKWELL_MATMULS.case(collective_matmul, BLACKWELL)
def blackwell_collective():
    a, b = ints(66, (512, 256)), ints(67, (256, 256))
    return collective_matmul(a, b), f64(a) @ f64(b), 0.0


@BLACKWELL_MATMULS.case(collective_matmul, BLACKWELL)
def blackwell_collective_two_tiles():
    a, b = ints(68, (256, 192)), ints(69, (192, 256))
    return collective_matmul(a, b, tiles_each=2), f64(a) @ f64(b), 0.0


def dynamic_matmul(a, b, tile_m=128, tile_n=128, tile_k=64, buffers=2):
    """The grid is the work, and a block that has done with its tile takes one from a block that has not started.

    Thread 0 copies, thread 1 multiplies and stores. At the end of a tile thread 0 has seen all buffers free.
    """
    m, k, n = *a.shape, b.shape[1]
    steps = k // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc, loaded, consumed, done):
        thread = lax.axis_index("thread")

        @plgpu.dynamic_scheduling_loop(grid_names=("m", "n"), thread_axis="thread")
        def _(loop_info):
            mi, ni = loop_info.index
            rows, columns = pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)

            @pl.when(thread == 0)
            def memory_thread():
                @pl.loop(0, steps)
                def _(ki):
                    slot, part = lax.rem(ki, buffers), pl.ds(ki * tile_k, tile_k)

                    @pl.when(ki >= buffers)
                    def _():
                        plgpu.barrier_wait(consumed.at[slot])

                    plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[slot], loaded.at[slot])
                    plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot])

                for ki in range(max(steps - buffers, 0), steps):
                    plgpu.barrier_wait(consumed.at[ki % buffers])

            @pl.when(thread == 1)
            def compute_thread():
                @pl.loop(0, steps)
                def _(ki):
                    slot = lax.rem(ki, buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.tcgen05_mma(acc, a_smem.at[slot], b_smem.at[slot], consumed.at[slot], accumulate=ki > 0)

                plgpu.tcgen05_commit_arrive(done)
                plgpu.barrier_wait(done)
                result = plgpu.async_load_tmem(acc)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = result
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
                plgpu.wait_load_tmem()

        @pl.when(thread == 1)
        def _():
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        num_threads=2,
        thread_name="thread",
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k), a.dtype),
            b_smem=tiled_smem((buffers, tile_k, tile_n), a.dtype),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            acc=plgpu.TMEM((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )(a, b)


@BLACKWELL_MATMULS.case(dynamic_matmul, BLACKWELL, num_sms=2)
def blackwell_dynamic():
    a, b = ints(70, (512, 192)), ints(71, (192, 256))
    return dynamic_matmul(a, b), f64(a) @ f64(b), 0.0
