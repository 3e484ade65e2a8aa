"""Hopper matrix products in which the threads of a block have different work: to copy, or to compute."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import HOPPER, Table, bf16, f16, f32, f64, i8, ints, mma_transforms, reals, struct, tiled_smem

THREADED_MATMULS = Table()


def warp_specialised_matmul(a, b, tile_m=64, tile_n=64, tile_k=64, steps_at_once=3):
    """Two compute threads share a tile of B; a memory thread copies, by `plgpu.emit_pipeline_warp_specialized`."""
    m, k, n = *a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, o_smem):
        mi, ni, wg = lax.axis_index("m"), lax.axis_index("n"), lax.axis_index("wg")
        mine = pl.ds(wg * tile_m, tile_m)

        def step(_, a_smem, b_smem, acc):
            plgpu.wgmma(acc, a_smem.at[mine], b_smem)
            return acc

        def compute_context(pipeline):
            def compute(acc):
                pipeline(acc)
                return acc[...]

            o_smem[mine] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
            plgpu.commit_smem()
            rows = pl.ds(mi * 2 * tile_m + wg * tile_m, tile_m)
            plgpu.copy_smem_to_gmem(o_smem.at[mine], o_gmem.at[rows, pl.ds(ni * tile_n, tile_n)])
            plgpu.wait_smem_to_gmem(0)

        a_block, b_block = (2 * tile_m, tile_k), (tile_k, tile_n)
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // tile_k,),
            memory_registers=40,
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=steps_at_once,
            in_specs=[
                plgpu.BlockSpec(a_block, lambda ki: (mi, ki), transforms=mma_transforms(a_block, f16), delay_release=1),
                plgpu.BlockSpec(b_block, lambda ki: (ki, ni), transforms=mma_transforms(b_block, f16), delay_release=1),
            ],
            compute_context=compute_context,
        )(a_gmem, b_gmem)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m // 2, n // tile_n),
        grid_names=("m", "n"),
        num_threads=3,
        thread_name="wg",
        scratch_types=dict(o_smem=tiled_smem((2 * tile_m, tile_n), f32)),
    )(a, b)


@THREADED_MATMULS.case(warp_specialised_matmul, HOPPER)
def hopper_warp_specialised():
    a, b = ints(20, (256, 320)), ints(21, (320, 128))
    return warp_specialised_matmul(a, b), f64(a) @ f64(b), 0.0


def ping_pong_matmul(a, b, tile_m=64, tile_n=64, tile_k=64, buffers=2):
    """Two compute threads take turns at the tensor core: one multiplies while the other stores its result.

    A block has a column of tiles; compute thread w has tiles w, w + 2 … of it. `turn[w]` lets thread w begin its
    product; it is completed by the other one at the end of its own. A third thread copies for both, to buffers and
    barriers of their own, since a thread must see every completion of a barrier that it waits on.
    """
    m, k, n = *a.shape, b.shape[1]
    steps, rounds = k // tile_k, m // tile_m // 2

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, loaded, consumed, turn):
        wg = lax.axis_index("wg")
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        @pl.when(wg == 2)
        def memory_thread():
            plgpu.set_max_registers(40, action="decrease")

            def copy_tile(i, w):
                rows = pl.ds((2 * i + w) * tile_m, tile_m)

                @pl.loop(0, steps)
                def _(ki):
                    number = i * steps + ki
                    slot, part = lax.rem(number, buffers), pl.ds(ki * tile_k, tile_k)

                    @pl.when(number >= buffers)
                    def _():
                        plgpu.barrier_wait(consumed.at[w, slot])

                    plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[w, slot], loaded.at[w, slot])
                    plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[w, slot], loaded.at[w, slot])

            @pl.loop(0, rounds)
            def _(i):
                copy_tile(i, 0)
                copy_tile(i, 1)

            for number in range(max(rounds * steps - buffers, 0), rounds * steps):  # as many waits as completions
                for w in range(2):
                    plgpu.barrier_wait(consumed.at[w, number % buffers])

        @pl.when(wg < 2)
        def compute_thread():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, rounds)
            def _(i):
                @pl.when((wg > 0) | (i > 0))
                def _():
                    plgpu.barrier_wait(turn.at[wg])

                def compute(acc):
                    @pl.loop(0, steps)
                    def _(ki):
                        number = i * steps + ki
                        slot = lax.rem(number, buffers)
                        plgpu.barrier_wait(loaded.at[wg, slot])
                        plgpu.wgmma(acc, a_smem.at[wg, slot], b_smem.at[wg, slot])

                        @pl.when(ki > 0)  # the wgmma before this one has ended
                        def _():
                            plgpu.barrier_arrive(consumed.at[wg, lax.rem(number - 1, buffers)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(consumed.at[wg, lax.rem(i * steps + steps - 1, buffers)])
                    return acc[...]

                result = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))

                @pl.when((wg == 0) | (i < rounds - 1))
                def _():
                    plgpu.barrier_arrive(turn.at[1 - wg])

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[wg] = result
                plgpu.commit_smem()
                rows = pl.ds((2 * i + wg) * tile_m, tile_m)
                plgpu.copy_smem_to_gmem(o_smem.at[wg], o_gmem.at[rows, columns])

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(n // tile_n,),
        grid_names=("n",),
        num_threads=3,
        thread_name="wg",
        scratch_types=dict(
            a_smem=tiled_smem((2, buffers, tile_m, tile_k)),
            b_smem=tiled_smem((2, buffers, tile_k, tile_n)),
            o_smem=tiled_smem((2, tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=(2, buffers)),
            consumed=plgpu.Barrier(num_barriers=(2, buffers)),
            turn=plgpu.Barrier(num_barriers=2),
        ),
    )(a, b)


@THREADED_MATMULS.case(ping_pong_matmul, HOPPER)
def hopper_ping_pong():
    a, b = ints(22, (256, 192)), ints(23, (192, 128))
    return ping_pong_matmul(a, b), f64(a) @ f64(b), 0.0


@THREADED_MATMULS.case(ping_pong_matmul, HOPPER)
def hopper_ping_pong_3_buffers():
    """As many buffers as steps: nothing but `consumed` orders a copy after the product that read the buffer."""
    a, b = ints(27, (256, 192)), ints(28, (192, 128))
    return ping_pong_matmul(a, b, buffers=3), f64(a) @ f64(b), 0.0


def mixed_precision_matmul(weights, scales, x, tile_m=64, tile_n=64, tile_k=64, buffers=2):
    """int8 weights with a scale for each row: dequantised in registers, which hold the A operand of wgmma.

    One compute thread and one memory thread. The weights are read from SMEM by the thread and then overwritten by a
    copy, so a `commit_smem` is between the two.
    """
    m, k, n = *weights.shape, x.shape[1]
    steps = k // tile_k

    def kernel(w_gmem, s_gmem, x_gmem, o_gmem, w_smem, s_smem, x_smem, o_smem, loaded, consumed, scales_loaded):
        thread = lax.axis_index("thread")
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        @pl.when(thread == 1)
        def memory_thread():
            plgpu.copy_gmem_to_smem(s_gmem.at[rows], s_smem, scales_loaded)

            @pl.loop(0, steps)
            def _(ki):
                slot, part = lax.rem(ki, buffers), pl.ds(ki * tile_k, tile_k)

                @pl.when(ki >= buffers)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(w_gmem.at[rows, part], w_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(x_gmem.at[part, columns], x_smem.at[slot], loaded.at[slot])

            for ki in range(max(steps - buffers, 0), steps):
                plgpu.barrier_wait(consumed.at[ki % buffers])

        @pl.when(thread == 0)
        def compute_thread():
            def compute(acc):
                @pl.loop(0, steps)
                def _(ki):
                    slot = lax.rem(ki, buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    w = plgpu.load(w_smem.at[slot], layout=plgpu.Layout.WGMMA_UPCAST_2X)
                    w = plgpu.layout_cast(w.astype(bf16), plgpu.Layout.WGMMA)
                    plgpu.commit_smem()  # read by hand; a copy writes it next
                    plgpu.wgmma(acc, w, x_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(consumed.at[slot])

                return acc[...]

            result = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
            plgpu.barrier_wait(scales_loaded)
            scale = plgpu.load(s_smem, layout=plgpu.Layout.WGMMA.reduce(1))
            o_smem[...] = result * lax.broadcast_in_dim(scale, result.shape, (0,))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        num_threads=2,
        thread_name="thread",
        scratch_types=dict(
            w_smem=tiled_smem((buffers, tile_m, tile_k), i8),
            s_smem=plgpu.SMEM((tile_m,), f32),
            x_smem=tiled_smem((buffers, tile_k, tile_n), bf16),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.Barrier(num_barriers=buffers),
            scales_loaded=plgpu.Barrier(),
        ),
    )(weights, scales, x)


@THREADED_MATMULS.case(mixed_precision_matmul, HOPPER)
def hopper_mixed_precision():
    weights, x = ints(24, (128, 192), i8, -100, 100), ints(25, (192, 128), bf16)
    scales = jnp.abs(reals(26, (128,)))
    return mixed_precision_matmul(weights, scales, x), f64(scales)[:, None] * (f64(weights) @ f64(x)), 1e-6
