"""Kernels whose data decide what they touch: a grouped matrix product, and a gather."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import BLACKWELL, HOPPER, Table, f16, f32, f64, i32, ints, mma_transforms, struct, tiled_smem

IRREGULAR = Table()


@functools.partial(jax.jit, static_argnums=(1, 2))
def work_of(group_sizes, rows, tile_m):
    """The pieces of a grouped product: for each pair of a group and a tile of rows that meet (group, tile, first, end).

    There are at most rows // tile_m + groups - 1; pieces beyond those that exist have no rows.
    """
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    tiles = jnp.where(group_sizes > 0, (ends - 1) // tile_m - starts // tile_m + 1, 0)
    last = jnp.cumsum(tiles)
    number = jnp.arange(rows // tile_m + group_sizes.shape[0] - 1)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right"), group_sizes.shape[0] - 1)
    tile = starts[group] // tile_m + number - (last - tiles)[group]
    first = jnp.maximum(starts[group], tile * tile_m)
    end = jnp.where(number < last[-1], jnp.minimum(ends[group], (tile + 1) * tile_m), first)
    tile = jnp.minimum(tile, rows // tile_m - 1)
    return jnp.stack([group, tile, first, end], axis=1).astype(i32)


def grouped_matmul(x, weights, group_sizes, tile_m=64, tile_n=64, tile_k=64):
    """Rows of `x`, sorted by group, times the matrix of their group; a tile of rows may belong to several groups.

    A block computes a tile with one group's matrix, and stores the rows of that group: as copies of sizes that are
    powers of two, since the size of a copy is static.
    """
    m, k = x.shape
    n = weights.shape[2]
    work = work_of(group_sizes, m, tile_m)

    def kernel(x_gmem, w_gmem, work_gmem, o_gmem, o_smem):
        piece, ni = lax.axis_index("piece"), lax.axis_index("n")
        group, tile, first, end = (work_gmem[piece, i] for i in range(4))
        columns = pl.ds(ni * tile_n, tile_n)

        @pl.when(end > first)
        def _():
            def compute(acc):
                def step(_, x_smem, w_smem):
                    plgpu.wgmma(acc, x_smem, w_smem.at[0])

                plgpu.emit_pipeline(
                    step,
                    grid=(k // tile_k,),
                    in_specs=[
                        plgpu.BlockSpec(
                            (tile_m, tile_k),
                            lambda ki: (tile, ki),
                            transforms=mma_transforms((tile_m, tile_k), f16),
                            delay_release=1,
                        ),
                        plgpu.BlockSpec(
                            (1, tile_k, tile_n),
                            lambda ki: (group, ki, ni),
                            transforms=mma_transforms((tile_k, tile_n), f16),
                            delay_release=1,
                        ),
                    ],
                    max_concurrent_steps=2,
                )(x_gmem, w_gmem)
                return acc[...]

            o_smem[...] = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), f32))
            plgpu.commit_smem()
            rows, size = end - first, tile_m
            while size:
                start = first + (rows // (2 * size)) * (2 * size)

                @pl.when(rows & size != 0)
                def _(start=start, size=size):
                    plgpu.copy_smem_to_gmem(
                        o_smem.at[pl.ds(start - tile * tile_m, size)],
                        o_gmem.at[pl.ds(start, size), columns],
                        commit_group=False,
                    )

                size //= 2
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((m, n)),
        grid=(work.shape[0], n // tile_n),
        grid_names=("piece", "n"),
        scratch_types=dict(o_smem=plgpu.SMEM((tile_m, tile_n), f32)),
    )(x, weights, work)


@IRREGULAR.case(grouped_matmul, HOPPER)
def hopper_grouped():
    x, weights = ints(80, (192, 192)), ints(81, (4, 192, 128))
    sizes = np.array([70, 0, 31, 91])
    expected = np.concatenate([f64(part) @ f64(w) for part, w in zip(np.split(x, sizes.cumsum()[:-1]), weights)])
    return grouped_matmul(x, weights, jnp.asarray(sizes)), expected, 0.0


def gather_rows(x, indices, tile_m=32, tile_n=64):
    """x[indices], by the TMA engine's gather: rows in any order, and as often as one wants."""
    rows, n = indices.shape[0], x.shape[1]

    def kernel(x_gmem, i_gmem, o_gmem, i_smem, o_smem, barrier):
        here = pl.ds(lax.axis_index("row") * tile_m, tile_m)
        columns = pl.ds(lax.axis_index("column") * tile_n, tile_n)
        plgpu.copy_gmem_to_smem(i_gmem.at[here], i_smem, barrier)
        plgpu.barrier_wait(barrier)
        wanted = plgpu.load(i_smem, layout=plgpu.Layout.TMA_INDICES)
        plgpu.copy_gmem_to_smem(x_gmem.at[wanted, columns], o_smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[here, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct((rows, n), x.dtype),
        grid=(rows // tile_m, n // tile_n),
        grid_names=("row", "column"),
        scratch_types=dict(
            i_smem=plgpu.SMEM((tile_m,), i32), o_smem=tiled_smem((tile_m, tile_n), x.dtype), barrier=plgpu.Barrier()
        ),
    )(x, indices)


@IRREGULAR.case(gather_rows, BLACKWELL)
def blackwell_gather():
    x = ints(82, (256, 128))
    indices = np.random.default_rng(83).integers(0, 256, 96)
    return gather_rows(x, jnp.asarray(indices, i32)), f64(x)[indices], 0.0
