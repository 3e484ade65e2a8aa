"""Sections "Memory spaces" to "Array layout": where data are, and how they lie there."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from ..kernels.common import f32, f64, i32, ints, reals, struct
from .spelling import Spelling, fragment


@fragment("Memory spaces", "sm_100a")
def through_every_memory(s: Spelling):
    """GMEM, SMEM, registers, TMEM, and back."""
    x = ints(0, (128, 64), f32)

    @s.kernel(
        out_shape=struct(x.shape),
        scratch_shapes=[plgpu.SMEM(x.shape, f32), plgpu.TMEM(x.shape, f32), plgpu.Barrier()],
    )
    def kernel(x_ref, y_ref, smem, tmem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.async_store_tmem(tmem, smem[...] + 1)
        plgpu.commit_tmem()
        smem[...] = plgpu.async_load_tmem(tmem) * 2
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel(x), 2 * (f64(x) + 1), 0.0


@fragment("Allocating memory in a specific memory space")
def inputs_in_smem_by_default(s: Spelling):
    x = reals(1, (64, 64))

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    return pl.pallas_call(body, out_shape=struct(x.shape))(x), 2 * f64(x), 0.0


@fragment("Allocating memory in a specific memory space")
def whole_arrays_in_gmem(s: Spelling):
    """`BlockSpec(memory_space=plgpu.GMEM)` and SMEM in `scratch_shapes`."""
    x = ints(2, (128, 128))

    def body(x_gmem, y_gmem, smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, y_gmem)
        plgpu.wait_smem_to_gmem(0)

    spec = plgpu.BlockSpec if s.old else pl.BlockSpec
    y = pl.pallas_call(
        body,
        out_shape=struct(x.shape, x.dtype),
        in_specs=[spec(memory_space=plgpu.GMEM)],
        out_specs=spec(memory_space=plgpu.GMEM),
        scratch_shapes=[plgpu.SMEM((128, 128), jnp.float16), plgpu.Barrier()],
    )(x)
    return y, f64(x), 0.0


@fragment("Allocating memory in a specific memory space")
def smem_by_run_scoped(s: Spelling):
    x = ints(3, (128, 128))

    @s.kernel(out_shape=struct(x.shape, x.dtype))
    def kernel(x_ref, y_ref):
        def double(smem, barrier):
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            return smem[...] * 2

        y_ref[...] = pl.run_scoped(double, plgpu.SMEM((128, 128), jnp.float16), plgpu.Barrier())

    return kernel(x), 2 * f64(x), 0.0


@fragment("Taking advantage of the L2 cache", num_sms=1)
def programs_start_in_row_major_order(s: Spelling):
    """One block fits at a time, and each waits for all before it: only in row-major order do they all end."""
    shape = (3, 4)

    @s.kernel(
        out_shape=struct(shape, i32),
        grid=shape,
        grid_names=("a", "b"),
        scratch_shapes=[plgpu.SMEM((200 * 1024,), jnp.int8), s.Semaphore.REGULAR],
    )
    def kernel(y_ref, smem, sem):
        a, b = lax.axis_index("a"), lax.axis_index("b")
        number = a * shape[1] + b
        smem[pl.ds(0, 128)] = jnp.zeros((128,), jnp.int8)
        last = number == shape[0] * shape[1] - 1

        @pl.when((number > 0) & ~last)
        def _():
            pl.semaphore_wait(sem, number, decrement=False)

        @pl.when(last)
        def _():
            pl.semaphore_wait(sem, number)

        y_ref[a, b] = number
        pl.when(~last)(lambda: pl.semaphore_signal(sem))

    return kernel(), np.arange(12.0).reshape(shape), 0.0


@fragment("Taking advantage of the L2 cache")
def grid_in_bands(s: Spelling):
    """(m, n) rearranged as (m // mt, n, mt), with program ids put together again."""
    m, n, mt = 4, 3, 2
    x, y = ints(4, (m * 8, 32), f32), ints(5, (32, n * 32), f32)

    def row(i, j, k):
        return i * mt + k

    def kernel(x_ref, y_ref, o_ref, id_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...])
        mine = pl.program_id(0) * mt + pl.program_id(2)
        id_ref[...] = jnp.full(id_ref.shape, mine * n + pl.program_id(1), i32)

    o, ids = pl.pallas_call(
        kernel,
        out_shape=[struct((m * 8, n * 32)), struct((m * 8, n * 32), i32)],
        grid=(m // mt, n, mt),
        in_specs=[
            pl.BlockSpec((8, 32), lambda i, j, k: (row(i, j, k), 0)),
            pl.BlockSpec((32, 32), lambda i, j, k: (0, j)),
        ],
        out_specs=[pl.BlockSpec((8, 32), lambda i, j, k: (row(i, j, k), j))] * 2,
    )(x, y)
    wanted = np.arange(float(m * n)).reshape(m, n).repeat(8, 0).repeat(32, 1)
    return [(o, f64(x) @ f64(y), 0.0), (ids, wanted, 0.0)]


@fragment("Memory reference transforms")
def transforms_of_scratch(s: Spelling):
    """The second way, and the fragment before it: a copy formats the data as wgmma wants them."""
    x, w = ints(6, (128, 128)), ints(7, (128, 128))
    transforms = (s.TileTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, w_ref, y_ref, x_smem, scratch_ref, barrier):
        plgpu.copy_gmem_to_smem(x_ref, x_smem, barrier)
        plgpu.copy_gmem_to_smem(w_ref, scratch_ref, barrier)
        plgpu.barrier_wait(barrier)

        def compute(acc):
            plgpu.wgmma(acc, x_smem, scratch_ref)
            return acc[...]

        y_ref[...] = pl.run_scoped(compute, plgpu.ACC((128, 128), f32))

    f = pl.pallas_call(
        body,
        out_shape=struct((128, 128)),
        in_specs=[plgpu.BlockSpec(memory_space=plgpu.GMEM)] * 2,
        out_specs=plgpu.BlockSpec(memory_space=plgpu.GMEM),
        scratch_shapes=[
            plgpu.SMEM((128, 128), jnp.float16, transforms=transforms),
            plgpu.SMEM((128, 128), jnp.float16, transforms=transforms),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    return f(x, w), f64(x) @ f64(w), 0.0


@fragment("Memory reference transforms")
def transforms_of_block_specs(s: Spelling):
    """The first way: BlockSpecs of a pipelined kernel."""
    x = ints(8, (256, 256))
    transforms = (s.TileTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] + 1

    spec = plgpu.BlockSpec((128, 128), lambda i, j: (i, j), transforms=transforms)
    f = pl.pallas_call(
        body, grid=(2, 2), in_specs=[spec], out_specs=spec, out_shape=struct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(max_concurrent_steps=2),
    )  # fmt: skip
    return f(x), f64(x) + 1, 0.0


@fragment("Memory reference transforms")
def every_transform_keeps_the_values(s: Spelling):
    """Tiles, and swizzles of 128, 64, 32 and (in the reference) 16 bytes: indexing is that of the logical shape."""
    widths = (128, 64, 32, 16) if s.old else (128, 64, 32)
    x = ints(9, (64, 128))
    kinds = [()] + [(s.TileTransform((8, w // 2)), plgpu.SwizzleTransform(w)) for w in widths]
    kinds += [(s.TileTransform((8, 64)),)]

    def through(transforms):
        @s.kernel(
            out_shape=[struct(x.shape, x.dtype), struct((16, 64), x.dtype)],
            scratch_shapes=[plgpu.SMEM(x.shape, x.dtype, transforms=transforms), plgpu.Barrier()],
        )
        def kernel(x_ref, y_ref, z_ref, smem, barrier):
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            z_ref[...] = smem[pl.ds(24, 16), pl.ds(64, 64)]
            plgpu.copy_smem_to_gmem(smem, y_ref)
            plgpu.wait_smem_to_gmem(0)

        y, z = kernel(x)
        return [(y, f64(x), 0.0), (z, f64(x)[24:40, 64:], 0.0)]

    return [result for transforms in kinds for result in through(transforms)]


@fragment("Memory reference transforms")
def transposed_storage(s: Spelling):
    """A copy that permutes all dimensions but the last on its way: TransposeTransform, or 0.12's transposed view."""
    x = ints(10, (4, 8, 64))

    @s.kernel(
        out_shape=struct((8, 4, 64), x.dtype),
        scratch_shapes=[
            plgpu.SMEM((4, 8, 64), x.dtype, transforms=(s.TransposeTransform((1, 0, 2)),))
            if s.old
            else plgpu.SMEM((8, 4, 64), x.dtype),
            plgpu.Barrier(),
        ],
    )
    def kernel(x_ref, y_ref, smem, barrier):
        logical = smem if s.old else s.transpose_ref(smem, (1, 0, 2))
        plgpu.copy_gmem_to_smem(x_ref, logical, barrier)
        plgpu.barrier_wait(barrier)
        for i in range(4):
            y_ref[:, i] = logical[i] if s.old else smem[:, i]

    return kernel(x), f64(x).transpose(1, 0, 2), 0.0


@fragment("Memory reference transforms")
def offsets_in_whole_tiles(s: Spelling):
    """The Note: offsets in GMEM that are multiples of the tile."""
    x = ints(11, (64, 256))
    transforms = (s.TileTransform((8, 64)), plgpu.SwizzleTransform(128))

    @s.kernel(
        out_shape=struct((32, 128), x.dtype),
        scratch_shapes=[plgpu.SMEM((32, 128), x.dtype, transforms=transforms), plgpu.Barrier()],
    )
    def kernel(x_ref, y_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(8, 32), pl.ds(64, 128)], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, y_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel(x), f64(x)[8:40, 64:192], 0.0


@fragment("Array layouts")
def rows_and_columns_of_wgmma(s: Spelling):
    """WGMMA, its reductions of rows (1) and columns (0), and both broadcast again."""
    x, w = reals(12, (128, 64)), reals(13, (64,))
    transforms = (s.TileTransform((8, 32)), plgpu.SwizzleTransform(128))

    @s.kernel(
        out_shape=struct(x.shape),
        scratch_shapes=[
            plgpu.SMEM(x.shape, f32, transforms=transforms), plgpu.SMEM((64,), f32), plgpu.Barrier(num_arrivals=2),
        ],
    )  # fmt: skip
    def kernel(x_ref, w_ref, y_ref, x_smem, w_smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, x_smem, barrier)
        plgpu.copy_gmem_to_smem(w_ref, w_smem, barrier)
        plgpu.barrier_wait(barrier)
        v = s.load(x_smem, layout=plgpu.Layout.WGMMA)
        w = s.load(w_smem, layout=plgpu.Layout.WGMMA.reduce(0))
        rows = lax.broadcast_in_dim(v.max(axis=1), v.shape, (0,))
        columns = lax.broadcast_in_dim(v.sum(axis=0), v.shape, (1,))
        y_ref[...] = v - rows + columns * lax.broadcast_in_dim(w, v.shape, (1,))

    v = f64(x)
    return kernel(x, w), v - v.max(1, keepdims=True) + v.sum(0) * f64(w), 1e-5


@fragment("Array layouts")
def strided_and_splat(s: Spelling):
    """WG_STRIDED for what has nothing to do with the tensor core; constants go with any layout."""
    x = reals(14, (16, 128))

    @s.kernel(out_shape=[struct(x.shape)] * 2)
    def kernel(x_ref, y_ref, z_ref):
        strided = plgpu.Layout.WG_STRIDED(x.shape, vec_size=4)
        v = s.load(x_ref, layout=strided)
        y_ref[...] = v * 3.0 + jnp.full(x.shape, 0.5, f32)
        splat = plgpu.layout_cast(jnp.full(x.shape, 2.0, f32), plgpu.Layout.WG_SPLAT(x.shape))
        z_ref[...] = v + plgpu.layout_cast(splat, strided)

    y, z = kernel(x)
    return [(y, f64(x) * 3 + 0.5, 1e-6), (z, f64(x) + 2, 1e-6)]


@fragment("Array layouts")
def layouts_change_through_smem(s: Spelling):
    """Two arrays of different layouts are not added; one of them goes through SMEM first."""
    x = reals(15, (64, 64))

    @s.kernel(out_shape=struct(x.shape), scratch_shapes=[plgpu.SMEM(x.shape, f32)])
    def kernel(x_ref, y_ref, smem):
        v = s.load(x_ref, layout=plgpu.Layout.WG_STRIDED(x.shape, vec_size=2))
        smem[...] = v * 2
        y_ref[...] = s.load(x_ref, layout=plgpu.Layout.WGMMA) + s.load(smem, layout=plgpu.Layout.WGMMA)

    return kernel(x), 3 * f64(x), 1e-6
