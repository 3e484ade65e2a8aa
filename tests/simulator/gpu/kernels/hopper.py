"""Hopper matrix products in which a block is one thread: wgmma on tiles that TMA brings."""

from __future__ import annotations

import jax
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import HOPPER, Table, f16, f32, f64, ints, mma_transforms, struct, tiled_smem

HOPPER_MATMULS = Table()


def simple_matmul(a, b, tile_m=64, tile_n=64, tile_k=64):
    """A block owns a tile of the result, and goes along k one step after the other."""
    m, k, n = *a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, loaded):
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        def compute(acc):
            def step(ki, _):
                part = pl.ds(ki * tile_k, tile_k)
                plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem, loaded)
                plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem, loaded)
                plgpu.barrier_wait(loaded)
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            lax.fori_loop(0, k // tile_k, step, None)
            return acc[...]

        o_smem[...] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        scratch_types=dict(
            a_smem=tiled_smem((tile_m, tile_k)),
            b_smem=tiled_smem((tile_k, tile_n)),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2),
        ),
    )(a, b)


@HOPPER_MATMULS.case(simple_matmul, HOPPER)
def hopper_simple():
    a, b = ints(0, (128, 192)), ints(1, (192, 128))
    return simple_matmul(a, b), f64(a) @ f64(b), 0.0


def pipelined_matmul(a, b, tile_m=64, tile_n=64, tile_k=64, buffers=3):
    """The loads of later steps are under way while wgmma works: the pipelined loop of the reference."""
    m, k, n = *a.shape, b.shape[1]
    steps = k // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, loaded):
        rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        def fetch(ki, slot):
            part = pl.ds(ki * tile_k, tile_k)
            plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot])

        def compute(acc):
            for slot in range(min(buffers, steps)):
                fetch(slot, slot)

            def step(i, _):
                slot = lax.rem(i, buffers)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                # Only this wgmma is running, so the buffers of the one before it are free.
                ahead = i + buffers - 1

                @pl.when((ahead >= buffers) & (ahead < steps))
                def _():
                    fetch(ahead, lax.rem(ahead, buffers))

            lax.fori_loop(0, steps, step, None)
            return acc[...]

        o_smem[...] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k)),
            b_smem=tiled_smem((buffers, tile_k, tile_n)),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
        ),
    )(a, b)


@HOPPER_MATMULS.case(pipelined_matmul, HOPPER)
def hopper_pipelined_3_buffers():
    a, b = ints(2, (128, 320)), ints(3, (320, 128))
    return pipelined_matmul(a, b), f64(a) @ f64(b), 0.0


@HOPPER_MATMULS.case(pipelined_matmul, HOPPER)
def hopper_pipelined_2_buffers():
    a, b = ints(4, (128, 256)), ints(5, (256, 128))
    return pipelined_matmul(a, b, buffers=2), f64(a) @ f64(b), 0.0


def emitted_matmul(a, b, tile_m=64, tile_n=64, tile_k=64, steps_at_once=3):
    """As `pipelined_matmul`, by `plgpu.emit_pipeline`; a block may be read for one step longer."""
    m, k, n = *a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, o_smem):
        mi, ni = lax.axis_index("m"), lax.axis_index("n")

        def compute(acc):
            def step(_, a_smem, b_smem):
                plgpu.wgmma(acc, a_smem, b_smem)

            plgpu.emit_pipeline(
                step,
                grid=(k // tile_k,),
                in_specs=[
                    plgpu.BlockSpec(
                        (tile_m, tile_k),
                        lambda ki: (mi, ki),
                        transforms=mma_transforms((tile_m, tile_k), f16),
                        delay_release=1,
                    ),
                    plgpu.BlockSpec(
                        (tile_k, tile_n),
                        lambda ki: (ki, ni),
                        transforms=mma_transforms((tile_k, tile_n), f16),
                        delay_release=1,
                    ),
                ],
                max_concurrent_steps=steps_at_once,
            )(a_gmem, b_gmem)
            return acc[...]

        o_smem[...] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        scratch_types=dict(o_smem=tiled_smem((tile_m, tile_n), f32)),
    )(a, b)


@HOPPER_MATMULS.case(emitted_matmul, HOPPER)
def hopper_emit_pipeline():
    a, b = ints(6, (128, 320)), ints(7, (320, 128))
    return emitted_matmul(a, b), f64(a) @ f64(b), 0.0


def multicast_matmul(a, b, tile_m=64, tile_n=64, tile_k=64):
    """The two blocks of a cluster have different rows and the same columns: B comes to both by multicast.

    A copy to both blocks overwrites buffers of both, so a cluster barrier says that both have done with them.
    """
    m, k, n = *a.shape, b.shape[1]
    steps, buffers = k // tile_k, 2

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, loaded, consumed):
        mi = lax.axis_index("m") * 2 + lax.axis_index("cluster")
        rows = pl.ds(mi * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        def fetch(ki, slot):
            part = pl.ds(ki * tile_k, tile_k)
            plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(
                b_gmem.at[part, columns], b_smem.at[slot], loaded.at[slot], collective_axes="cluster"
            )

        def compute(acc):
            for slot in range(min(buffers, steps)):
                fetch(slot, slot)

            def step(i, _):
                slot = lax.rem(i, buffers)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.barrier_wait(consumed.at[slot])

                @pl.when(i + buffers < steps)
                def _():
                    fetch(i + buffers, slot)

            lax.fori_loop(0, steps, step, None)
            return acc[...]

        o_smem[...] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m // 2, n // tile_n),
        grid_names=("m", "n"),
        cluster=(2,),
        cluster_names=("cluster",),
        scratch_types=dict(
            a_smem=tiled_smem((buffers, tile_m, tile_k)),
            b_smem=tiled_smem((buffers, tile_k, tile_n)),
            o_smem=tiled_smem((tile_m, tile_n), f32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            consumed=plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=buffers),
        ),
    )(a, b)


@HOPPER_MATMULS.case(multicast_matmul, HOPPER)
def hopper_cluster_multicast():
    a, b = ints(8, (256, 256)), ints(9, (256, 128))
    return multicast_matmul(a, b), f64(a) @ f64(b), 0.0


def persistent_matmul(a, b, tile_m=64, tile_n=64, tile_k=64, sms=3, strip=2):
    """Few blocks, each for many tiles, which come in strips that snake over the result.

    The result of one tile is stored while the next is computed: two buffers in turn, and at most one store in flight.
    """
    m, k, n = *a.shape, b.shape[1]
    tiles = (m // tile_m, n // tile_n)

    def kernel(a_gmem, b_gmem, o_gmem, o_smem):
        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="sm")
        def _(loop_info):
            mi, ni = plgpu.planar_snake(loop_info.index[0], tiles, 1, strip)
            slot = lax.rem(loop_info.local_index, 2)

            def compute(acc):
                def step(_, a_smem, b_smem):
                    plgpu.wgmma(acc, a_smem, b_smem)

                specs = [
                    plgpu.BlockSpec(shape, index, transforms=mma_transforms(shape, f16), delay_release=1)
                    for shape, index in [
                        ((tile_m, tile_k), lambda ki: (mi, ki)),
                        ((tile_k, tile_n), lambda ki: (ki, ni)),
                    ]
                ]
                plgpu.emit_pipeline(step, grid=(k // tile_k,), in_specs=specs, max_concurrent_steps=2)(a_gmem, b_gmem)
                return acc[...]

            result = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            o_smem[slot] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[slot], o_gmem.at[pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(sms,),
        grid_names=("sm",),
        scratch_types=dict(o_smem=tiled_smem((2, tile_m, tile_n), f32)),
    )(a, b)


@HOPPER_MATMULS.case(persistent_matmul, HOPPER)
def hopper_persistent():
    a, b = ints(10, (192, 192)), ints(11, (192, 192))
    return persistent_matmul(a, b), f64(a) @ f64(b), 0.0


def tiled_grid_matmul(a, b, tile_m=64, tile_n=64, tile_k=64, rows_at_once=2):
    """The grid as (m // rows, n, rows), so that blocks that run at the same time share operands in the L2 cache."""
    m, k, n = *a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
        mi = lax.axis_index("m") * rows_at_once + lax.axis_index("row")
        rows = pl.ds(mi * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("n") * tile_n, tile_n)

        def compute(acc):
            @pl.loop(0, k // tile_k)
            def _(ki):
                part = pl.ds(ki * tile_k, tile_k)
                plgpu.copy_gmem_to_smem(a_gmem.at[rows, part], a_smem, loaded)
                plgpu.copy_gmem_to_smem(b_gmem.at[part, columns], b_smem, loaded)
                plgpu.barrier_wait(loaded)
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        o_gmem[rows, columns] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(m // tile_m // rows_at_once, n // tile_n, rows_at_once),
        grid_names=("m", "n", "row"),
        scratch_types=dict(
            a_smem=tiled_smem((tile_m, tile_k)),
            b_smem=tiled_smem((tile_k, tile_n)),
            loaded=plgpu.Barrier(num_arrivals=2),
        ),
    )(a, b)


@HOPPER_MATMULS.case(tiled_grid_matmul, HOPPER)
def hopper_tiled_grid():
    a, b = ints(12, (256, 128)), ints(13, (128, 128))
    under_jit = jax.jit(lambda a, b: tiled_grid_matmul(a, b))  # a function of this call, so that nothing is cached
    return under_jit(a, b), f64(a) @ f64(b), 0.0
