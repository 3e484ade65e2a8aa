"""Collectives of two devices, which write to each other's GMEM and tell each other by semaphores."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import HOPPER, Table, f32, f64, ints, struct

DEVICES = Table()


def over_two_devices(f, x):
    """A function of one device's rows of `x`, on each of two devices."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(x)


def all_gather(x, tile=16):
    """All rows of `x` on each device. A block copies one tile to the other device and to its own."""
    rows, n = x.shape

    def kernel(x_gmem, o_gmem, smem, loaded, arrived):
        me, i = lax.axis_index("x"), lax.axis_index("tile")
        other = 1 - me
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * tile, tile)], smem, loaded)
        plgpu.barrier_wait(loaded)
        place = pl.ds(me * rows + i * tile, tile)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(o_gmem, other).at[place])
        plgpu.copy_smem_to_gmem(smem, o_gmem.at[place])
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(arrived, device_id=other)
        pl.semaphore_wait(arrived)

    return plgpu.kernel(
        kernel,
        out_type=struct((2 * rows, n), x.dtype),
        grid=(rows // tile,),
        grid_names=("tile",),
        scratch_types=dict(
            smem=plgpu.SMEM((tile, n), x.dtype), loaded=plgpu.Barrier(), arrived=plgpu.SemaphoreType.REGULAR
        ),
    )(x)


@DEVICES.case(all_gather, HOPPER, devices=2)
def all_gather_2_devices():
    x = ints(90, (64, 128), f32)
    gathered = over_two_devices(all_gather, x).reshape(2, 64, 128)
    return gathered, f64(x)[None].repeat(2, 0), 0.0


def reduce_scatter(x, tile=16):
    """The sum over devices of their x, of which a device gets its half of the rows.

    A block sends its tile of the other's half to the other's inbox, and adds what comes to its own.
    """
    rows, n = x.shape[0] // 2, x.shape[1]

    def kernel(x_gmem, o_gmem, inbox, smem, mine, loaded, arrived):
        me, i = lax.axis_index("x"), lax.axis_index("tile")
        other, here = 1 - me, pl.ds(i * tile, tile)
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(other * rows + i * tile, tile)], smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(inbox, other).at[here])
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(me * rows + i * tile, tile)], mine, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(arrived.at[i], device_id=other)
        pl.semaphore_wait(arrived.at[i])
        mine[...] = mine[...] + inbox[here]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, o_gmem.at[here])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[struct((rows, n), x.dtype)] * 2,
        grid=(rows // tile,),
        grid_names=("tile",),
        scratch_types=dict(
            smem=plgpu.SMEM((tile, n), x.dtype),
            mine=plgpu.SMEM((tile, n), x.dtype),
            loaded=plgpu.Barrier(),
            arrived=plgpu.SemaphoreType.REGULAR((rows // tile,)),
        ),
    )(x)[0]


@DEVICES.case(reduce_scatter, HOPPER, devices=2)
def reduce_scatter_2_devices():
    x = ints(91, (2, 64, 128), f32)
    scattered = over_two_devices(lambda x: reduce_scatter(x[0]), x)
    return scattered, f64(x).sum(0), 0.0
