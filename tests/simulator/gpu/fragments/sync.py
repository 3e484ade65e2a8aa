"""Sections "Synchronization structures and primitives" and "Cluster launch control"."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from ..kernels.common import f32, f64, i8, i32, ints, struct, tiled_smem
from ..kernels.devices import over_two_devices
from .spelling import Spelling, fragment


@fragment("commit_smem")
def ordinary_reads_follow_ordinary_writes(s: Spelling):
    x = ints(70, (64, 64), f32)

    @s.kernel(out_shape=struct(x.shape), scratch_shapes=[plgpu.SMEM(x.shape, f32)])
    def kernel(x_ref, y_ref, ref):
        value = x_ref[...] * 2
        ref[...] = value
        value2 = ref[...]
        y_ref[...] = value - value2

    return kernel(x), 0 * f64(x), 0.0


@fragment("commit_smem")
def commit_before_a_copy(s: Spelling):
    x = ints(71, (64, 64), f32)

    @s.kernel(out_shape=struct(x.shape), scratch_shapes=[plgpu.SMEM(x.shape, f32)])
    def kernel(x_ref, y_ref, smem_ref):
        smem_ref[...] = x_ref[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem_ref, y_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel(x), f64(x) + 1, 0.0


@fragment("commit_smem")
def commit_before_a_product(s: Spelling):
    a, b = ints(72, (64, 64)), ints(73, (64, 64))

    @s.kernel(out_shape=struct((64, 64)), scratch_shapes=[tiled_smem((64, 64))] * 2)
    def kernel(a_ref, b_ref, y_ref, a_smem, b_smem):
        a_smem[...] = a_ref[...] * 2
        b_smem[...] = b_ref[...]
        plgpu.commit_smem()

        def compute(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        y_ref[...] = pl.run_scoped(compute, plgpu.ACC((64, 64), f32))

    return kernel(a, b), 2 * f64(a) @ f64(b), 0.0


@fragment("commit_smem")
def commit_before_a_copy_overwrites(s: Spelling):
    """The reverse direction: read into registers, then overwritten by a copy."""
    x = ints(74, (2, 64, 64), f32)

    @s.kernel(out_shape=struct(x.shape), scratch_shapes=[plgpu.SMEM(x.shape[1:], f32), plgpu.Barrier()])
    def kernel(x_ref, y_ref, smem_ref, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[0], smem_ref, barrier)
        plgpu.barrier_wait(barrier)
        v = s.load(smem_ref, ())
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x_ref.at[1], smem_ref, barrier)
        plgpu.barrier_wait(barrier)
        y_ref[0] = v
        y_ref[1] = s.load(smem_ref, ())

    return kernel(x), f64(x), 0.0


@fragment("Barrier")
def barrier_of_an_array(s: Spelling):
    """`barriers.at[index]` is one barrier; it completes after a fixed number of arrivals, whoever they come from."""
    x = ints(75, (3, 64), f32)

    @s.kernel(
        out_shape=struct(x.shape),
        num_threads=3,
        thread_name="t",
        scratch_shapes=[
            plgpu.SMEM((3, 64), f32), plgpu.SMEM((64,), f32), plgpu.Barrier(num_arrivals=3, num_barriers=(2, 2)),
        ],
    )  # fmt: skip
    def kernel(x_ref, y_ref, smem, copied, barriers):
        t = lax.axis_index("t")
        barrier = barriers.at[1, 0]

        @pl.when(t < 2)
        def _():
            smem[t] = x_ref[t] * 2
            plgpu.barrier_arrive(barrier)

        @pl.when(t == 2)
        def _():
            plgpu.copy_gmem_to_smem(x_ref.at[2], copied, barrier)  # the third arrival is that of a copy

        plgpu.barrier_wait(barrier)
        y_ref[t] = jnp.where(t == 2, copied[...], smem[lax.rem(t, 2)])

    e = f64(x) * np.array([[2], [2], [1]])
    return kernel(x), e, 0.0


def producer_consumer(s: Spelling, way, steps=7, buffering=3):
    """Triple buffering, with barriers in both directions; as many waits as completions."""
    x = ints(76, (steps, 128), f32)

    @s.kernel(
        out_shape=struct(x.shape),
        num_threads=2,
        thread_name="thread",
        scratch_shapes=dict(
            queue=plgpu.SMEM((buffering, 128), f32),
            produced=plgpu.Barrier(num_barriers=buffering),
            consumed=plgpu.Barrier(num_barriers=buffering),
        ),
    )
    def kernel(x_ref, y_ref, queue, produced, consumed):
        tid = jax.lax.axis_index("thread")
        assert queue.shape == (buffering, 128)
        assert produced.shape == consumed.shape == (buffering,)

        def thread0_body(i, _):
            slot = jax.lax.rem(i, buffering)

            @pl.when(i >= buffering)
            def _await_consumed():
                plgpu.barrier_wait(consumed.at[slot])

            if way == 1:
                queue[slot] = x_ref[i] * 2
                plgpu.barrier_arrive(produced.at[slot])
            else:
                plgpu.copy_gmem_to_smem(x_ref.at[i], queue.at[slot], barrier=produced.at[slot])

        @pl.when(tid == 0)
        def _():
            jax.lax.fori_loop(0, steps, thread0_body, None)
            for i in range(steps - buffering, steps):
                plgpu.barrier_wait(consumed.at[i % buffering])

        def thread1_body(i, _):
            slot = jax.lax.rem(i, buffering)
            plgpu.barrier_wait(produced.at[slot])
            y_ref[i] = queue[slot] + 1
            if way == 2:
                plgpu.commit_smem()  # read by hand, and written next by a copy
            plgpu.barrier_arrive(consumed.at[slot])

        pl.when(tid == 1)(lambda: jax.lax.fori_loop(0, steps, thread1_body, None))

    return kernel(x), (2 if way == 1 else 1) * f64(x) + 1, 0.0


@fragment("Explicit arrival")
def producer_that_computes(s: Spelling):
    return producer_consumer(s, way=1)


@fragment("Explicit arrival")
def producer_that_copies(s: Spelling):
    return producer_consumer(s, way=2)


@fragment("Awaiting tcgen05 TensorCore instructions", "sm_100a")
def barriers_order_the_tensor_core(s: Spelling):
    """Thread 0 writes the left operand to TMEM, thread 1 multiplies, thread 0 reads the result."""
    a, b = ints(77, (128, 64)), ints(78, (64, 128))

    @s.kernel(
        out_shape=struct((128, 128)),
        num_threads=2,
        thread_name="t",
        scratch_shapes=dict(
            rhs_ref=tiled_smem(b.shape),
            lhs_ref=plgpu.TMEM(a.shape, a.dtype, packed=True),
            acc_tmem=plgpu.TMEM((128, 128), f32),
            loaded=plgpu.Barrier(),
            stored=plgpu.Barrier(orders_tensor_core=True),
            barrier_ref=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(a_gmem, b_gmem, o_gmem, rhs_ref, lhs_ref, acc_tmem, loaded, stored, barrier_ref):
        @pl.when(lax.axis_index("t") == 0)
        def _():
            plgpu.async_store_tmem(lhs_ref, a_gmem[...])
            plgpu.commit_tmem()
            plgpu.barrier_arrive(stored)
            plgpu.barrier_wait(barrier_ref)
            result = plgpu.async_load_tmem(acc_tmem)
            o_gmem[...] = result
            plgpu.wait_load_tmem()

        @pl.when(lax.axis_index("t") == 1)
        def _():
            plgpu.copy_gmem_to_smem(b_gmem, rhs_ref, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.barrier_wait(stored)
            plgpu.tcgen05_mma(acc_tmem, lhs_ref, rhs_ref, barrier_ref, accumulate=False)

    return kernel(a, b), f64(a) @ f64(b), 0.0


@fragment("ClusterBarrier: reusing SMEM for collective async copies")
def collective_smem_reuse(s: Spelling):
    x, x2 = ints(79, (64, 64), f32), ints(80, (64, 64), f32)

    @s.kernel(
        out_shape=struct((2, 2, 64, 64)),
        cluster=(2,),
        cluster_names=("cluster",),
        scratch_shapes=[
            plgpu.SMEM((64, 64), f32), plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("cluster",)),
        ],
    )  # fmt: skip
    def kernel(x_gmem, x_gmem2, o_gmem, x_smem, local_barrier, cluster_barrier):
        y_gmem = o_gmem.at[lax.axis_index("cluster")]
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, local_barrier, collective_axes="cluster")
        plgpu.barrier_wait(local_barrier)
        y_gmem[0] = x_smem[...]
        plgpu.commit_smem()  # read by hand, and written next by a copy
        s.meet(cluster_barrier)
        plgpu.copy_gmem_to_smem(x_gmem2, x_smem, local_barrier, collective_axes="cluster")
        plgpu.barrier_wait(local_barrier)
        y_gmem[1] = x_smem[...]

    return kernel(x, x2), np.stack([[f64(x), f64(x2)]] * 2), 0.0


@fragment("ClusterBarrier: reusing TMEM for collective MMA on Blackwell", "sm_100a")
def collective_tmem_reuse(s: Spelling):
    """The axis is called "cluster" in one place of the reference and "x" in another."""
    m, n, k = 256, 128, 64
    a, b = ints(81, (2, m, k)), ints(82, (2, k, n))

    @s.kernel(
        out_shape=struct((2, m, n)),
        cluster=(2,),
        cluster_names=("x",),
        scratch_shapes=dict(
            lhs_ref=tiled_smem((2, m // 2, k)),
            rhs_ref=tiled_smem((2, k, n // 2)),
            acc_tmem=plgpu.TMEM((m // 2, n), f32, collective=True),
            loaded=plgpu.Barrier(num_arrivals=4),
            mma_barrier=plgpu.Barrier(orders_tensor_core=True),
            cluster_barrier=plgpu.ClusterBarrier(collective_axes=("x",), orders_tensor_core=True),
        ),
    )
    def kernel(a_gmem, b_gmem, o_gmem, lhs_ref, rhs_ref, acc_tmem, loaded, mma_barrier, cluster_barrier):
        block = lax.axis_index("x")
        leader_block = block == 0
        for source, target, axis in ((a_gmem, lhs_ref, 0), (b_gmem, rhs_ref, 1)):
            for i in range(2):
                plgpu.copy_gmem_to_smem(
                    source.at[i],
                    target.at[i],
                    loaded,
                    collective_axes="x",
                    leader_tracked=plgpu.CopyPartition.PARTITIONED(axis),
                )
        pl.when(leader_block)(lambda: plgpu.barrier_wait(loaded))

        def turn(i):
            @pl.when(leader_block)
            def _do_mma():
                plgpu.tcgen05_mma(
                    acc_tmem, lhs_ref.at[i], rhs_ref.at[i], mma_barrier, accumulate=False, collective_axis="x"
                )

            plgpu.barrier_wait(mma_barrier)
            o_gmem[i, pl.ds(block * (m // 2), m // 2)] = plgpu.async_load_tmem(acc_tmem)
            plgpu.wait_load_tmem()

        turn(0)
        s.meet(cluster_barrier)  # both have read acc_tmem
        turn(1)

    return kernel(a, b), f64(a) @ f64(b), 0.0


@fragment("Semaphore")
def exchange_shards_by_stores(s: Spelling):
    """Ordinary stores to a remote Ref; needs two devices."""

    def exchange_shards(x_ref, y_ref, done_sem):
        other_dev_id = 1 - lax.axis_index("x")
        neighbor_ref = plgpu.remote_ref(y_ref, other_dev_id)
        neighbor_ref[...] = x_ref[...]
        pl.semaphore_signal(done_sem, device_id=other_dev_id)
        pl.semaphore_wait(done_sem)

    x = ints(83, (2, 128), f32)
    y = over_two_devices(lambda x: s.kernel(exchange_shards, out_shape=x, scratch_shapes=[s.Semaphore.REGULAR])(x), x)
    return y, f64(x)[::-1], 0.0


@fragment("Semaphore")
def waits_that_do_not_decrement(s: Spelling):
    """Blocks 1 to 3 wait for block 0; the value stays until one of them takes it."""

    @s.kernel(out_shape=struct((4,), i32), grid=(4,), grid_names=("b",), scratch_shapes=[s.Semaphore.REGULAR] * 2)
    def kernel(y_ref, ready, seen):
        b = lax.axis_index("b")

        @pl.when(b == 0)
        def _():
            pl.semaphore_signal(ready, 5)
            pl.semaphore_wait(seen, 3)
            pl.semaphore_wait(ready, 5)

        @pl.when(b > 0)
        def _():
            pl.semaphore_wait(ready, 4, decrement=False)
            pl.semaphore_signal(seen)

        y_ref[b] = b * 10

    return kernel(), np.arange(4.0) * 10, 0.0


@fragment("Using the cluster launch control API directly", "sm_100a", num_sms=1)
def cancel_and_query(s: Spelling):
    """Each block does its own work and what it takes over; two results and barriers in turn."""
    grid, grid_names = (3, 4), ("a", "b")

    @s.kernel(
        out_shape=struct((3, 4, 128)),
        grid=grid,
        grid_names=grid_names,
        scratch_shapes=dict(
            result_refs=[s.TryCancelResultRef(), s.TryCancelResultRef()],
            barrier_ref=plgpu.Barrier(num_barriers=2),
            room=plgpu.SMEM((60 * 1024,), i8),  # few blocks at once: some are left to take over
        ),
    )
    def kernel(y_ref, result_refs, barrier_ref, room):
        def turn(k, carry):
            a, b, _ = carry
            plgpu.try_cluster_cancel(result_refs[k], barrier_ref.at[k])
            y_ref[a, b] = jnp.full((128,), 10 * a + b, f32)
            plgpu.barrier_wait(barrier_ref.at[k])
            (a2, b2), success = plgpu.query_cluster_cancel(result_refs[k], grid_names)
            plgpu.commit_smem()
            return jnp.where(success, a2, a), jnp.where(success, b2, b), success

        def two_turns(carry):
            carry = turn(0, carry)
            return lax.cond(carry[2], functools.partial(turn, 1), lambda c: c, carry)

        start = (lax.axis_index("a"), lax.axis_index("b"), jnp.bool_(True))
        lax.while_loop(lambda carry: carry[2], two_turns, start)

    e = np.add.outer(10 * np.arange(3.0), np.arange(4.0))
    return kernel(), np.repeat(e[..., None], 128, -1), 0.0


@fragment("Using the plgpu.dynamic_scheduling_loop helper", "sm_100a", num_sms=1)
def dynamic_scheduling(s: Spelling):
    """All tiles are done once; two threads; the carry counts what a block did."""
    grid, grid_names, thread_name = (3, 4), ("a", "b"), "wg"

    @s.kernel(
        out_shape=[struct((3, 4, 2, 128)), struct((3, 4), i32)],
        grid=grid,
        grid_names=grid_names,
        num_threads=2,
        thread_name=thread_name,
        scratch_shapes=[plgpu.SMEM((100 * 1024,), i8)],
    )
    def kernel(y_ref, order_ref, room):
        wg = lax.axis_index(thread_name)

        @plgpu.dynamic_scheduling_loop(
            grid_names=grid_names, thread_axis=thread_name, init_carry=jnp.zeros((), jnp.int32)
        )
        def body(loop_info, carry):
            a, b = loop_info.index
            y_ref[a, b, wg] = jnp.full((128,), 100 * wg + 10 * a + b, f32)

            @pl.when(wg == 0)
            def _():
                order_ref[a, b] = jnp.where(loop_info.local_index == carry, 1, -1)

            return carry + 1

    y, order = kernel()
    e = np.add.outer(np.add.outer(10 * np.arange(3.0), np.arange(4.0)), 100 * np.arange(2.0))
    return [(y, np.repeat(e[..., None], 128, -1), 0.0), (order, np.ones((3, 4)), 0.0)]


@fragment("Cluster launch control", "sm_100a", num_sms=2)
def dynamic_scheduling_in_clusters(s: Spelling):
    """Both blocks of a cluster take over the same work: they share a tile, and say which cluster did it."""

    @s.kernel(
        out_shape=struct((7, 2), i32),
        grid=(7,),
        grid_names=("g",),
        cluster=(2,),
        cluster_names=("x",),
        scratch_shapes=dict(
            room=plgpu.SMEM((150 * 1024,), i8),
            seen=plgpu.SMEM((128,), i32),
            barrier=plgpu.ClusterBarrier(collective_axes=("x",)),
        ),
    )
    def kernel(y_ref, room, seen, barrier):
        x = lax.axis_index("x")

        @plgpu.dynamic_scheduling_loop(grid_names=("g",))
        def body(loop_info):
            (g,) = loop_info.index
            seen[...] = jnp.full((128,), g, i32)
            s.meet(barrier)
            theirs = plgpu.cluster_ref(seen, {"x": 1 - x})[...]
            s.meet(barrier)
            y_ref[g, x] = 10 * theirs[0] + g

    return kernel(), np.repeat(11 * np.arange(7.0)[:, None], 2, 1), 0.0
