"""Section "Using core_map": blocks, threads, clusters, and what they share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from ..kernels.common import f32, f64, i32, ints, mma_transforms, struct, tiled_smem
from .spelling import Spelling, fragment


@fragment("Using pl.core_map or plgpu.kernel instead of pl.pallas_call")
def add_one_by_pallas_call(s: Spelling):
    @functools.partial(
        pl.pallas_call,
        grid=(2,),
        in_specs=[pl.BlockSpec(block_shape=(128,), index_map=lambda i: (i,))],
        out_specs=pl.BlockSpec(block_shape=(128,), index_map=lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((256,), jnp.float32),
    )
    def run_kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] + 1

    x = jnp.arange(256, dtype=jnp.float32)
    return run_kernel(x), f64(x) + 1, 0.0


@fragment("Using pl.core_map or plgpu.kernel instead of pl.pallas_call")
def add_one_by_core_map(s: Spelling):
    @pl.run_state
    def run_kernel(refs):
        x_ref, y_ref = refs
        mesh = plgpu.Mesh(grid=(2,), grid_names=("x",))

        @pl.core_map(mesh)
        def kernel_body():
            block_slice = pl.ds(jax.lax.axis_index("x") * 128, 128)
            y_ref[block_slice] = x_ref[block_slice] + 1

    x = jnp.arange(256, dtype=jnp.float32)
    y_init = jnp.zeros_like(x)
    _, y = run_kernel((x, y_init))
    return y, f64(x) + 1, 0.0


@fragment("Using pl.core_map or plgpu.kernel instead of pl.pallas_call")
def add_one_by_kernel(s: Spelling):
    @s.kernel(out_shape=jax.ShapeDtypeStruct((256,), jnp.float32), grid=(2,), grid_names=("x",))
    def run_kernel(x_ref, y_ref):
        block_slice = pl.ds(jax.lax.axis_index("x") * 128, 128)
        y_ref[block_slice] = x_ref[block_slice] + 1

    x = jnp.arange(256, dtype=jnp.float32)
    return run_kernel(x), f64(x) + 1, 0.0


@fragment("Using pl.core_map or plgpu.kernel instead of pl.pallas_call")
def coordinates_by_named_axes(s: Spelling):
    """Any rank of grid; `axis_index` of the grid's, the cluster's and the threads' names."""
    sizes = dict(a=2, b=1, c=3, d=2, cl=2, wg=2)
    shape = tuple(sizes.values())

    @s.kernel(
        out_shape=struct(shape, i32),
        grid=shape[:4],
        grid_names=("a", "b", "c", "d"),
        cluster=(2,),
        cluster_names=("cl",),
        num_threads=2,
        thread_name="wg",
    )
    def kernel(y_ref):
        index = tuple(lax.axis_index(name) for name in sizes)
        number = jnp.int32(0)
        for i, n in zip(index, shape):
            number = number * n + i
        y_ref[index] = number

    return kernel(), np.arange(float(np.prod(shape))).reshape(shape), 0.0


@fragment("Multiple Pallas threads in each CUDA block")
def two_threads(s: Spelling):
    """The reference's `out_ref` is `y_ref`."""
    x = jnp.arange(128, dtype=jnp.float32)

    @s.kernel(
        out_shape=x,
        scratch_shapes=dict(smem_ref=plgpu.SMEM(x.shape, x.dtype), barrier_ref=plgpu.Barrier()),
        num_threads=2,
        thread_name="pallas_thread",
    )
    def run_kernel(x_ref, y_ref, smem_ref, barrier_ref):
        thread_id = jax.lax.axis_index("pallas_thread")

        @pl.when(thread_id == 0)
        def producer_thread():
            smem_ref[...] = x_ref[...] + 1
            plgpu.barrier_arrive(barrier_ref)

        @pl.when(thread_id == 1)
        def consumer_thread():
            plgpu.barrier_wait(barrier_ref)
            y_ref[...] = smem_ref[...] + 1

    return run_kernel(x), f64(x) + 2, 0.0


@fragment("Multiple Pallas threads in each CUDA block")
def warp_specialised_pipeline(s: Spelling):
    """`plgpu.emit_pipeline_warp_specialized`: one compute thread, and a thread that copies."""
    x = ints(60, (64, 256), f32)

    @s.kernel(out_shape=struct(x.shape), num_threads=2, thread_name="wg")
    def kernel(x_gmem, o_gmem):
        def body(_, x_smem, o_smem):
            o_smem[...] = x_smem[...] * 2

        spec = plgpu.BlockSpec((64, 64), lambda i: (0, i))
        plgpu.emit_pipeline_warp_specialized(
            body, grid=(4,), memory_registers=40, wg_axis="wg", num_compute_wgs=1, in_specs=[spec], out_specs=[spec]
        )(x_gmem, o_gmem)

    return kernel(x), 2 * f64(x), 0.0


@fragment("Multiple Pallas threads in each CUDA block")
def pipeline_in_a_kernel(s: Spelling):
    """`plgpu.emit_pipeline`, which the section before names: copies that core_map does not make by itself."""
    x, w = ints(61, (128, 128)), ints(62, (128, 64))

    @s.kernel(out_shape=struct((128, 64)), grid=(2,), grid_names=("m",), scratch_shapes=[tiled_smem((64, 64), f32)])
    def kernel(x_gmem, w_gmem, o_gmem, o_smem):
        m = lax.axis_index("m")

        def compute(acc):
            def body(_, x_smem, w_smem):
                plgpu.wgmma(acc, x_smem, w_smem)

            t = mma_transforms((64, 64), x.dtype)
            plgpu.emit_pipeline(
                body,
                grid=(2,),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda k: (m, k), transforms=t, delay_release=1),
                    plgpu.BlockSpec((64, 64), lambda k: (k, 0), transforms=t, delay_release=1),
                ],
                max_concurrent_steps=2,
            )(x_gmem, w_gmem)
            return acc[...]

        o_smem[...] = pl.run_scoped(compute, plgpu.ACC((64, 64), f32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(m * 64, 64)])
        plgpu.wait_smem_to_gmem(0)

    return kernel(x, w), f64(x) @ f64(w), 0.0


@fragment("Using CUDA block clusters")
def multicast_to_a_cluster(s: Spelling):
    """The reference's `o_ref` is `y_ref`."""

    @s.kernel(
        out_shape=jax.ShapeDtypeStruct((2, 128), jnp.float32),
        scratch_shapes=dict(smem_ref=plgpu.SMEM((128,), jnp.float32), barrier_ref=plgpu.Barrier()),
        cluster=(2,),
        cluster_names=("cluster",),
    )
    def run_kernel(x_ref, y_ref, smem_ref, barrier_ref):
        plgpu.copy_gmem_to_smem(x_ref, smem_ref, barrier_ref, collective_axes="cluster")
        plgpu.barrier_wait(barrier_ref)
        plgpu.copy_smem_to_gmem(smem_ref, y_ref.at[jax.lax.axis_index("cluster")])
        plgpu.wait_smem_to_gmem(0)

    x = jnp.arange(128, dtype=jnp.float32)
    return run_kernel(x), np.stack([f64(x), f64(x)]), 0.0


@fragment("Collective allocation by pl.run_scoped")
def one_allocation_for_all_threads(s: Spelling):
    """All threads get the same SMEM and barriers, also in a second scope."""
    x = ints(63, (2, 128), f32)

    @s.kernel(out_shape=struct(x.shape), num_threads=2, thread_name="wg")
    def kernel(x_ref, y_ref):
        wg = lax.axis_index("wg")

        def exchange(smem, barrier):
            smem[wg] = x_ref[wg] * 10
            s.meet(barrier)
            return smem[1 - wg]

        types = plgpu.SMEM((2, 128), f32), plgpu.Barrier(num_arrivals=2)
        other = pl.run_scoped(exchange, *types, collective_axes="wg")

        def again(smem, barrier):
            smem[wg] = other + 1
            s.meet(barrier)
            y_ref[wg] = smem[1 - wg]

        pl.run_scoped(again, *types, collective_axes="wg")

    return kernel(x), f64(x) * 10 + 1, 0.0


@fragment("Global allocation by pl.get_global")
def semaphore_of_the_grid(s: Spelling):
    def body(out_ref):
        sem_ref = pl.get_global(plgpu.SemaphoreType.REGULAR)
        block_id = lax.axis_index("x")

        @pl.when(block_id == 0)
        def _():
            pl.semaphore_signal(sem_ref)

        @pl.when(block_id == 1)
        def _():
            pl.semaphore_wait(sem_ref)
            out_ref[...] = jnp.ones_like(out_ref)

    out_shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    return s.kernel(body, out_shape=out_shape, grid=(2,), grid_names=("x",))(), np.ones(128), 0.0


@fragment("Calling kernels from PyTorch")
def the_kernel_that_pytorch_calls(s: Spelling):
    """Without PyTorch: the kernel of the section."""

    @functools.partial(pl.pallas_call, out_shape=jax.ShapeDtypeStruct([128], jnp.int32))
    def add_kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    x = jnp.arange(128, dtype=jnp.int32)
    return add_kernel(x, x * x), f64(x) + f64(x) ** 2, 0.0
