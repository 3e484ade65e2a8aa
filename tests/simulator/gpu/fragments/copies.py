"""Section "Asynchronous copies"."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from ..kernels.common import f16, f32, f64, i32, ints, struct, tiled_smem
from ..kernels.devices import over_two_devices
from .spelling import Spelling, fragment


@fragment("GMEM to SMEM copies")
def one_copy_on_a_barrier(s: Spelling):
    x = ints(90, (64, 64), f32)

    def body(in_gmem_ref, out_gmem_ref, smem_ref, barrier):
        plgpu.copy_gmem_to_smem(in_gmem_ref, smem_ref, barrier)
        plgpu.barrier_wait(barrier)
        out_gmem_ref[...] = smem_ref[...] + 1

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    return s.kernel(body, out_shape=struct(x.shape), scratch_shapes=scratch)(x), f64(x) + 1, 0.0


@fragment("GMEM to SMEM copies")
def two_copies_on_a_barrier(s: Spelling):
    """A barrier of two arrivals (the text calls them arrival_count, the code num_arrivals)."""
    x, x2 = ints(91, (64, 64), f32), ints(92, (32, 64), f32)

    def body(in_gmem_ref, in_gmem_ref2, out_gmem_ref, smem_ref, smem_ref2, barrier):
        plgpu.copy_gmem_to_smem(in_gmem_ref, smem_ref, barrier)
        plgpu.copy_gmem_to_smem(in_gmem_ref2, smem_ref2, barrier)
        plgpu.barrier_wait(barrier)
        out_gmem_ref[pl.ds(0, 64)] = smem_ref[...]
        out_gmem_ref[pl.ds(64, 32)] = smem_ref2[...]

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.SMEM(x2.shape, x2.dtype), plgpu.Barrier(num_arrivals=2)]
    y = s.kernel(body, out_shape=struct((96, 64)), scratch_shapes=scratch)(x, x2)
    return y, np.concatenate([f64(x), f64(x2)]), 0.0


@fragment("Collective copies")
def collective_and_own_copies(s: Spelling):
    """The same data for both blocks by a collective copy, slices of their own by another one."""
    x, x2 = ints(93, (64, 64), f32), ints(94, (2, 64, 64), f32)

    def body(in_gmem_ref, in_gmem_ref2, out_gmem_ref, smem_ref, smem_ref2, barrier):
        block_id = lax.axis_index("cluster")
        plgpu.copy_gmem_to_smem(in_gmem_ref, smem_ref, barrier, collective_axes="cluster")
        plgpu.copy_gmem_to_smem(in_gmem_ref2.at[block_id], smem_ref2, barrier)
        plgpu.barrier_wait(barrier)
        out_gmem_ref[block_id] = smem_ref[...] + 10 * smem_ref2[...]

    y = s.kernel(
        body,
        out_shape=struct(x2.shape),
        cluster=(2,),
        cluster_names=("cluster",),
        scratch_shapes=[plgpu.SMEM(x.shape, x.dtype), plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_arrivals=2)],
    )(x, x2)
    return y, f64(x) + 10 * f64(x2), 0.0


def leader_tracked(s: Spelling, partition, x, shape):
    """Only the first block waits for the copy; it tells the second by a cluster barrier."""

    @s.kernel(
        out_shape=struct((2, *shape)),
        cluster=(2,),
        cluster_names=("x",),
        scratch_shapes=[plgpu.SMEM(shape, f32), plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("x",))],
    )
    def kernel(x_gmem, o_gmem, x_smem, tma_barrier, cluster_barrier):
        block = lax.axis_index("x")
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, tma_barrier, collective_axes="x", leader_tracked=partition)

        @pl.when(block == 0)
        def _():
            plgpu.barrier_wait(tma_barrier)

        s.meet(cluster_barrier)
        o_gmem[block] = x_smem[...]

    return kernel(x)


@fragment("Leader-tracked collective copies: CopyPartition.PARTITIONED(axis)", "sm_100a")
def leader_tracked_partitioned(s: Spelling):
    """The first block gets the first half along the axis, the second the second."""
    x = ints(95, (64, 128), f32)
    parts = plgpu.CopyPartition.PARTITIONED
    columns, rows = leader_tracked(s, parts(1), x, (64, 64)), leader_tracked(s, parts(0), x, (32, 128))
    return [
        (columns, np.stack([f64(x)[:, :64], f64(x)[:, 64:]]), 0.0),
        (rows, f64(x).reshape(2, 32, 128), 0.0),
    ]


@fragment("Leader-tracked collective copies: CopyPartition.REPLICATED", "sm_100a")
def leader_tracked_replicated(s: Spelling):
    x = ints(96, (64, 64), f32)
    return leader_tracked(s, plgpu.CopyPartition.REPLICATED, x, (64, 64)), np.stack([f64(x)] * 2), 0.0


@fragment("SMEM to GMEM copies")
def waits_for_the_latest_but_n(s: Spelling):
    """What each wait of the reference's copy_out tells is made use of; without copies a wait returns at once."""
    x, y = ints(97, (64, 64), f32), ints(98, (64, 64), f32)

    @s.kernel(
        out_shape=[struct(x.shape)] * 4, scratch_shapes=[plgpu.SMEM(x.shape, f32)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    )
    def copy_out(x_in, y_in, x_gmem, y_gmem, x_again, y_again, x_smem, y_smem, barrier):
        plgpu.wait_smem_to_gmem(0)
        plgpu.copy_gmem_to_smem(x_in, x_smem, barrier)
        plgpu.copy_gmem_to_smem(y_in, y_smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(x_smem, x_gmem)
        plgpu.copy_smem_to_gmem(y_smem, y_gmem)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        x_smem[...] = jnp.zeros(x.shape, f32)  # x_smem has been read
        plgpu.wait_smem_to_gmem(1)
        x_again[...] = x_gmem[...] + 1  # x_gmem has been written
        plgpu.wait_smem_to_gmem(0)
        y_again[...] = y_gmem[...] + y_smem[...] + x_smem[...]  # both copies are complete
        plgpu.wait_smem_to_gmem(0)

    results = copy_out(x, y)
    return [(r, e, 0.0) for r, e in zip(results, (f64(x), f64(y), f64(x) + 1, 2 * f64(y)))]


@fragment("Awaiting SMEM reads only")
def a_buffer_used_again(s: Spelling):
    """One buffer for all tiles: the next may be written as soon as the copy has read it."""
    x = ints(99, (4, 64, 64), f32)

    @s.kernel(out_shape=struct(x.shape), scratch_shapes=[plgpu.SMEM(x.shape[1:], f32)])
    def kernel(x_gmem, y_gmem, smem):
        @pl.loop(0, 4)
        def _(i):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem[...] = x_gmem[i] * 3
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y_gmem.at[i])

        plgpu.wait_smem_to_gmem(0)

    return kernel(x), 3 * f64(x), 0.0


@fragment("Grouping multiple copies")
def copies_in_groups(s: Spelling):
    """A group is closed by a copy that commits, or by `commit_group`."""
    x = ints(100, (4, 128), f32)

    @s.kernel(
        out_shape=[struct((4, 128)), struct((2, 128))], scratch_shapes=[plgpu.SMEM((4, 128), f32), plgpu.Barrier()]
    )
    def copy_out(x_gmem, y_gmem, again, smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem.at[0], y_gmem.at[0], commit_group=False)
        plgpu.copy_smem_to_gmem(smem.at[1], y_gmem.at[1])  # commits both
        plgpu.wait_smem_to_gmem(1)  # nothing but these two can be under way
        plgpu.copy_smem_to_gmem(smem.at[2], y_gmem.at[2], commit_group=False)
        plgpu.copy_smem_to_gmem(smem.at[3], y_gmem.at[3], commit_group=False)
        s.commit_group()
        plgpu.wait_smem_to_gmem(1)  # the first group is complete
        again[...] = y_gmem[pl.ds(0, 2)] + 1
        plgpu.wait_smem_to_gmem(0)

    y, again = copy_out(x)
    return [(y, f64(x), 0.0), (again, f64(x)[:2] + 1, 0.0)]


@fragment("Async gather", "sm_100a")
def gather_in_a_pallas_call(s: Spelling):
    x = ints(101, (128, 64))
    indices = np.random.default_rng(102).integers(0, 128, 64)
    transforms = (s.TileTransform((8, 64)), plgpu.SwizzleTransform(128))

    @functools.partial(
        pl.pallas_call,
        out_shape=struct((64, 64), f16),
        out_specs=plgpu.BlockSpec(memory_space=plgpu.SMEM, transforms=transforms),
        in_specs=(pl.BlockSpec(memory_space=plgpu.GMEM), pl.BlockSpec(memory_space=plgpu.SMEM)),
        scratch_shapes=[plgpu.Barrier()],
    )
    def kernel(x_ref_gmem, idx_ref, o_ref, barrier_ref):
        idxs = s.load(idx_ref, (), layout=s.TMA_GATHER_INDICES)
        plgpu.copy_gmem_to_smem(x_ref_gmem.at[idxs], o_ref, barrier_ref)
        plgpu.barrier_wait(barrier_ref)

    return kernel(x, jnp.asarray(indices, i32)), f64(x)[indices], 0.0


@fragment("Async gather", "sm_100a")
def gather_in_a_kernel(s: Spelling):
    x = ints(103, (256, 128))
    indices = np.random.default_rng(104).permutation(256)[:64]

    @s.kernel(out_shape=struct((64, 64), f16), scratch_shapes=[tiled_smem((64, 64)), plgpu.Barrier()])
    def kernel(x_gmem, idx_gmem, o_gmem, smem, barrier):
        idxs = s.load(idx_gmem, layout=s.TMA_GATHER_INDICES)
        plgpu.copy_gmem_to_smem(x_gmem.at[idxs, pl.ds(64, 64)], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    return kernel(x, jnp.asarray(indices, i32)), f64(x)[indices, 64:], 0.0


@fragment("NVLINK transfers")
def exchange_shards_by_copies(s: Spelling):
    """The operand itself is the type of the SMEM buffer; 0.12 wants a buffer type."""

    def exchange_shards(x_ref, y_ref, smem_ref, local_barrier, done_sem):
        plgpu.copy_gmem_to_smem(x_ref, smem_ref, local_barrier)
        plgpu.barrier_wait(local_barrier)
        other_dev_id = 1 - lax.axis_index("x")
        neighbor_ref = s.peer_ref(y_ref, other_dev_id)
        plgpu.copy_smem_to_gmem(smem_ref, neighbor_ref)
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(done_sem, device_id=other_dev_id)
        pl.semaphore_wait(done_sem)

    def exchange(x):
        buffer = x if s.old else plgpu.SMEM(x.shape, x.dtype)
        return s.kernel(exchange_shards, out_shape=x, scratch_shapes=[buffer, plgpu.Barrier(), s.Semaphore.REGULAR])(x)

    x = ints(105, (2, 128), f32)
    y = over_two_devices(exchange, x)
    return y, f64(x)[::-1], 0.0


@fragment("NVLINK transfers")
def copies_from_a_peer(s: Spelling):
    """The other direction: from the other device's GMEM to one's own SMEM. No device ends while it is still read."""

    def fetch(x_ref, y_ref, smem_ref, barrier, done_sem):
        other_dev_id = 1 - lax.axis_index("x")
        plgpu.copy_gmem_to_smem(s.peer_ref(x_ref, other_dev_id), smem_ref, barrier)
        plgpu.barrier_wait(barrier)
        pl.semaphore_signal(done_sem, device_id=other_dev_id)
        y_ref[...] = smem_ref[...] + x_ref[...]
        pl.semaphore_wait(done_sem)

    x = ints(106, (2, 128), f32)
    scratch = [plgpu.SMEM((1, 128), f32), plgpu.Barrier(), s.Semaphore.REGULAR]
    y = over_two_devices(lambda x: s.kernel(fetch, out_shape=x, scratch_shapes=scratch)(x), x)
    return y, np.stack([f64(x).sum(0)] * 2), 0.0
