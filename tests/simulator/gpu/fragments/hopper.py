"""Sections "MMA (TensorCore)" and "Hopper (wgmma)"."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import mosaic_gpu as plgpu

from ..kernels.common import bf16, f16, f32, f64, i8, i32, ints, struct, tiled_smem
from .spelling import Spelling, fragment


def mma_transforms(shape_dtype: jax.ShapeDtypeStruct, swizzles=(128, 64, 32)):
    """The reference's helper; with a choice of swizzles."""
    assert len(shape_dtype.shape) == 2
    if shape_dtype.shape[0] % 8:
        raise ValueError("Number of rows must be divisible by 8")
    for swizzle_bytes in swizzles:
        swizzle_elems = swizzle_bytes // shape_dtype.dtype.itemsize
        if shape_dtype.shape[-1] % swizzle_elems == 0:
            return (plgpu.TilingTransform((8, swizzle_elems)), plgpu.SwizzleTransform(swizzle_bytes))
    raise ValueError("Failed to find transforms for the specified window type")


def product(s: Spelling, a, b, acc=f32, a_view=lambda s, a: a, b_view=lambda s, b: b, a_smem=None, b_smem=None):
    """a @ b by one wgmma: operands come by TMA, to buffers of the types given, and are seen through the views."""
    a_type, b_type = a_smem or tiled_smem(a.shape, a.dtype), b_smem or tiled_smem(b.shape, b.dtype)
    m, n = a_view(s, a).shape[0], b_view(s, b).shape[1]

    def body(a_gmem, b_gmem, o_gmem, a_ref, b_ref, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_ref, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_ref, barrier)
        plgpu.barrier_wait(barrier)

        def compute(acc_ref):
            plgpu.wgmma(acc_ref, a_view(s, a_ref), b_view(s, b_ref))
            return acc_ref[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((m, n), acc))

    scratch = [a_type, b_type, plgpu.Barrier(num_arrivals=2)]
    return s.kernel(body, out_shape=struct((m, n), acc), scratch_shapes=scratch)(a, b)


def transposed(s: Spelling, x):
    return x.T if isinstance(x, jax.Array) else s.transpose_ref(x, (1, 0))


@fragment("Memory spaces of the A and B operands")
def operands_of_every_swizzle(s: Spelling):
    results = []
    for swizzle in (128, 64, 32):
        a, b = ints(20, (64, 64)), ints(21, (64, 128))
        types = [
            plgpu.SMEM(x.shape, x.dtype, transforms=mma_transforms(struct(x.shape, x.dtype), (swizzle,)))
            for x in (a, b)
        ]
        results.append((product(s, a, b, a_smem=types[0], b_smem=types[1]), f64(a) @ f64(b), 0.0))
    return results


@fragment("Transposed operands")
def transposed_operands(s: Spelling):
    """a_ref is (K, M), b_ref (N, K): the tensor core transposes 16-bit operands."""
    at, bt = ints(22, (64, 128)), ints(23, (64, 64))
    return [
        (product(s, at, bt, a_view=transposed), f64(at).T @ f64(bt), 0.0),
        (product(s, bt, at.T, b_view=transposed), f64(bt) @ f64(at), 0.0),
        (product(s, at, bt, a_view=transposed, b_view=transposed), f64(at).T @ f64(bt).T, 0.0),
    ]


@fragment("Hopper: allocating the accumulator")
def accumulator_in_a_scope(s: Spelling):
    """It begins as zeros, and reading it waits for all products."""
    a, b = ints(24, (64, 128)), ints(25, (128, 96))
    m, n = 64, 96

    @s.kernel(
        out_shape=[struct((m, n))] * 2,
        scratch_shapes=[tiled_smem(a.shape), tiled_smem(b.shape), plgpu.Barrier(num_arrivals=2)],
    )
    def kernel(a_gmem, b_gmem, zero_ref, o_gmem, a_smem, b_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def compute(acc_ref):
            zero_ref[...] = acc_ref[...]
            for part in (pl.ds(0, 64), pl.ds(64, 64)):
                plgpu.wgmma(acc_ref, a_smem.at[:, part], b_smem.at[part])
            return acc_ref[...]

        output = pl.run_scoped(compute, plgpu.ACC((m, n), jnp.float32))
        o_gmem[...] = output

    zero, output = kernel(a, b)
    return [(zero, 0 * f64(zero), 0.0), (output, f64(a) @ f64(b), 0.0)]


@fragment("Hopper: allocating the accumulator")
def accumulator_of_run_state(s: Spelling):
    """It begins as an array, and its final value is what `pl.run_state` gives."""
    a, b, c = ints(26, (64, 64)), ints(27, (64, 64)), ints(28, (64, 64), f32)

    @s.kernel(
        out_shape=struct((64, 64)),
        scratch_shapes=[tiled_smem((64, 64)), tiled_smem((64, 64)), plgpu.Barrier(num_arrivals=2)],
    )
    def kernel(a_gmem, b_gmem, c_gmem, o_gmem, a_smem, b_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)
        init_array = s.load(c_gmem, layout=plgpu.Layout.WGMMA)

        def compute(acc_ref):
            plgpu.wgmma(acc_ref, a_smem, b_smem)
            plgpu.wgmma(acc_ref, b_smem, a_smem)
            return  # pl.run_state only gives the final value

        output = pl.run_state(compute)(plgpu.ACC.init(init_array))
        o_gmem[...] = output

    return kernel(a, b, c), f64(c) + f64(a) @ f64(b) + f64(b) @ f64(a), 0.0


@fragment("Hopper: preparing the A and B operands")
def a_in_registers(s: Spelling):
    a, b = ints(29, (64, 64)), ints(30, (64, 128))

    @s.kernel(out_shape=struct((64, 128)), scratch_shapes=[tiled_smem(b.shape), plgpu.Barrier()])
    def kernel(a_gmem, b_gmem, o_gmem, b_smem, barrier):
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        a_regs = s.load(a_gmem, layout=plgpu.Layout.WGMMA)
        plgpu.barrier_wait(barrier)

        def compute(acc_ref):
            plgpu.wgmma(acc_ref, a_regs, b_smem)
            return acc_ref[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 128), f32))

    return kernel(a, b), f64(a) @ f64(b), 0.0


@fragment("Hopper: issuing the operation")
def shapes_of_wgmma(s: Spelling):
    """M a multiple of 64, N of 8 and at most 256, K of the swizzle."""
    results = []
    for m, n, k in [(64, 8, 64), (192, 24, 64), (64, 256, 16), (128, 40, 32)]:
        a, b = ints(31, (m, k)), ints(32, (k, n))
        results.append((product(s, a, transposed(s, b), b_view=transposed), f64(a) @ f64(b), 0.0))
    return results


@fragment("Hopper: issuing the operation")
def dtypes_of_wgmma(s: Spelling):
    """float32 (which takes B with K last), bfloat16, float16; accumulators of float32, and float16 of float16."""
    results = []
    for dtype, acc in [(f32, f32), (bf16, f32), (f16, f32), (f16, f16), (i8, i32)]:
        a, bt = ints(33, (64, 128), dtype), ints(34, (64, 128), dtype)
        results.append((product(s, a, bt, acc, b_view=transposed), f64(a) @ f64(bt).T, 0.0))
    return results


def k_loop(s: Spelling, buffers, num_steps, m=64, k=64, n=64):
    """The pipelined loop of the reference, which means `load_slot` where it prints `slot`."""
    a, b = ints(35, (m, k * num_steps)), ints(36, (k * num_steps, n))

    @s.kernel(
        out_shape=struct((m, n)),
        scratch_shapes=dict(
            a_smem=tiled_smem((buffers, m, k)),
            b_smem=tiled_smem((buffers, k, n)),
            a_loaded=plgpu.Barrier(num_barriers=buffers),
            b_loaded=plgpu.Barrier(num_barriers=buffers),
        ),
    )
    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, a_loaded, b_loaded):
        def compute(acc_ref):
            assert a_smem.shape == (buffers, m, k)
            assert b_smem.shape == (buffers, k, n)
            assert acc_ref.shape == (m, n)

            def fetch_a_b(ki, slot):
                a_slice = (slice(None), pl.ds(ki * k, k))
                b_slice = (pl.ds(ki * k, k), slice(None))
                plgpu.copy_gmem_to_smem(a_gmem.at[a_slice], a_smem.at[slot], a_loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[b_slice], b_smem.at[slot], b_loaded.at[slot])

            def loop_body(i, _):
                slot = jax.lax.rem(i, buffers)
                plgpu.barrier_wait(a_loaded.at[slot])
                plgpu.barrier_wait(b_loaded.at[slot])
                plgpu.wgmma(acc_ref, a_smem.at[slot], b_smem.at[slot])
                # Only the last wgmma is running, so another buffer can be loaded.
                load_i = i + buffers - 1
                load_slot = jax.lax.rem(load_i, buffers)

                @pl.when(jnp.logical_and(load_i >= buffers, load_i < num_steps))
                def _do_fetch():
                    fetch_a_b(load_i, load_slot)

            for slot in range(buffers):
                fetch_a_b(slot, slot)
            jax.lax.fori_loop(0, num_steps, loop_body, None)
            return acc_ref[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((m, n), f32))

    return kernel(a, b), f64(a) @ f64(b), 0.0


@fragment("Hopper: waiting for the operation to complete")
def pipelined_k_loop(s: Spelling):
    return [k_loop(s, buffers, steps) for buffers, steps in [(3, 7), (2, 5)]]


@fragment("Hopper: waiting for the operation to complete")
def all_but_the_last_are_complete(s: Spelling):
    """When a wgmma has been issued, the buffers of the one before it can be written again; all by `wgmma_wait(0)`."""
    a, b = ints(37, (64, 64)), ints(38, (3, 64, 64))

    @s.kernel(
        out_shape=struct((64, 64)),
        scratch_shapes=[tiled_smem((64, 64)), tiled_smem((2, 64, 64)), plgpu.Barrier(), plgpu.Barrier(num_barriers=2)],
    )
    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, a_loaded, b_loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, a_loaded)
        for i in range(2):
            plgpu.copy_gmem_to_smem(b_gmem.at[i], b_smem.at[i], b_loaded.at[i])
        plgpu.barrier_wait(a_loaded)

        def compute(acc_ref):
            for i in range(2):
                plgpu.barrier_wait(b_loaded.at[i])
                plgpu.wgmma(acc_ref, a_smem, b_smem.at[i])
            plgpu.copy_gmem_to_smem(b_gmem.at[2], b_smem.at[0], b_loaded.at[0])
            plgpu.barrier_wait(b_loaded.at[0])
            plgpu.wgmma(acc_ref, a_smem, b_smem.at[0])
            plgpu.wgmma_wait(0)
            return acc_ref[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 64), f32))

    return kernel(a, b), f64(a) @ f64(b).sum(0), 0.0
