"""Copies that the blocks of a cluster make together: values, and what their rules find."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet

X = numbers(8, 128)
SMEM = plgpu.SMEM(X.shape, X.dtype)
OUT = jax.ShapeDtypeStruct((2, *X.shape), X.dtype)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def cluster(body, out=OUT, scratch=(SMEM, plgpu.Barrier()), given=(X,), schedule="lazy", arch=None, **more):
    """A call of a kernel body(me, *operands, *results, *scratch) of a cluster of two blocks."""

    def kernel(*refs):
        body(lax.axis_index("c"), *refs)

    call = plgpu.kernel(
        kernel, out_shape=out, cluster=(2,), cluster_names=("c",), scratch_shapes=list(scratch),
        interpret=params(schedule=schedule, arch=arch, **more),
    )  # fmt: skip
    return lambda: call(*given)


@schedules
@pytest.mark.parametrize("rows", [8, 3])  # 3: no dimension of (3, 128) but the second can be divided
def test_every_block_gets_the_data(schedule, rows):
    def body(me, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(1, rows)], smem, barrier, collective_axes="c")
        plgpu.barrier_wait(barrier)
        y[me] = smem[...]

    x = numbers(9, 128)
    out = jax.ShapeDtypeStruct((2, rows, 128), X.dtype)
    call = cluster(body, out, [plgpu.SMEM((rows, 128), X.dtype), plgpu.Barrier()], (x,), schedule)
    np.testing.assert_array_equal(quiet(call), np.stack([x[1 : 1 + rows]] * 2))


@schedules
def test_what_lies_outside_is_filled_for_every_block(schedule):
    def body(me, n, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(n[0], 8)], smem, barrier, collective_axes="c")
        plgpu.barrier_wait(barrier)
        y[me] = smem[...]

    for start in (-6, 3, 6):
        got = quiet(cluster(body, given=(jnp.array([start], jnp.int32), X), schedule=schedule))
        wanted = np.stack([X[start + i] if 0 <= start + i < 8 else np.zeros(128) for i in range(8)])
        np.testing.assert_array_equal(got, np.stack([wanted] * 2))


@schedules
@pytest.mark.parametrize("meet", [True, False])
def test_smem_of_a_collective_copy_is_used_again_after_a_cluster_barrier(schedule, meet):
    def body(me, x, x2, y, smem, barrier, cluster_barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier, collective_axes="c")
        plgpu.barrier_wait(barrier)
        y[me, 0] = smem[...]
        plgpu.commit_smem()
        if meet:
            plgpu.barrier_arrive(cluster_barrier)
            plgpu.barrier_wait(cluster_barrier)
        plgpu.copy_gmem_to_smem(x2, smem, barrier, collective_axes="c")
        plgpu.barrier_wait(barrier)
        y[me, 1] = smem[...]

    out = jax.ShapeDtypeStruct((2, 2, *X.shape), X.dtype)
    scratch = [SMEM, plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("c",))]
    call = cluster(body, out, scratch, (X, X + 1), schedule)
    if meet:
        np.testing.assert_array_equal(quiet(call), np.stack([np.stack([X, X + 1])] * 2))
    else:
        finding(call, "race", "a ClusterBarrier (blocks of a cluster)")


@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_a_collective_copy_that_one_block_does_not_issue(schedule, waits):
    def body(me, x, y, smem, barrier):
        @pl.when(me == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, smem, barrier, collective_axes="c")
            if waits:
                plgpu.barrier_wait(barrier)

        y[me] = x[...]

    found = finding(cluster(body, schedule=schedule), "collective-mismatch", "block c=1 did not issue it")
    assert "test_collective" in found.where


@schedules
def test_collective_copies_of_different_data(schedule):
    def body(me, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x.at[me], smem, barrier, collective_axes="c")
        plgpu.barrier_wait(barrier)
        y[me] = smem[...]

    found = finding(cluster(body, given=(numbers(2, 8, 128),), schedule=schedule), "collective-mismatch", "different")
    assert "c=0" in found.when and "c=1" in found.when


@schedules
def test_collective_copies_in_another_order(schedule):
    def body(me, x, x2, y, smem, barrier):
        def both(first, second):
            plgpu.copy_gmem_to_smem(first, smem.at[0], barrier, collective_axes="c")
            plgpu.copy_gmem_to_smem(second, smem.at[1], barrier, collective_axes="c")

        pl.when(me == 0)(lambda: both(x, x2))
        pl.when(me == 1)(lambda: both(x2, x))
        plgpu.barrier_wait(barrier)
        y[me] = smem[0]

    scratch = [plgpu.SMEM((2, *X.shape), X.dtype), plgpu.Barrier(num_arrivals=2)]
    finding(cluster(body, OUT, scratch, (X, X + 1), schedule), "collective-mismatch", "different")


# --- leader-tracked copies --------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("mode", [plgpu.CopyPartition.PARTITIONED(1), plgpu.CopyPartition.REPLICATED])
@pytest.mark.parametrize("second_waits", [False, True])
def test_only_the_first_block_is_told(schedule, mode, second_waits):
    parts = isinstance(mode, plgpu.CopyPartition.PARTITIONED)
    x = numbers(8, 256) if parts else X

    def body(me, x, y, smem, barrier, cluster_barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier, collective_axes="c", leader_tracked=mode)
        if second_waits:
            plgpu.barrier_wait(barrier)
        else:
            pl.when(me == 0)(lambda: plgpu.barrier_wait(barrier))
        plgpu.barrier_arrive(cluster_barrier)
        plgpu.barrier_wait(cluster_barrier)
        y[me] = smem[...]

    scratch = [SMEM, plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("c",))]
    call = cluster(body, OUT, scratch, (x,), schedule, arch="sm_100a")
    if second_waits:
        finding(call, "deadlock", "leader_tracked")
    else:
        wanted = [x[:, :128], x[:, 128:]] if parts else [x, x]
        np.testing.assert_array_equal(quiet(call), np.stack(wanted))


@schedules
def test_the_second_block_may_not_use_the_data_before_the_first_has_told_it(schedule):
    def body(me, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(
            x, smem, barrier, collective_axes="c", leader_tracked=plgpu.CopyPartition.PARTITIONED(1)
        )
        pl.when(me == 0)(lambda: plgpu.barrier_wait(barrier))
        y[me] = smem[...]

    call = cluster(body, given=(numbers(8, 256),), schedule=schedule, arch="sm_100a")
    finding(call, "missing-wait", "smem")


def test_leader_tracked_copies_are_for_blackwell():
    def body(me, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier, collective_axes="c", leader_tracked=plgpu.CopyPartition.REPLICATED)

    with pytest.raises(NotImplementedError, match="leader_tracked"):
        cluster(body, arch="sm_90a")()


# --- other blocks' memory ---------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("atomic", [None, "add"])
def test_a_store_to_another_block(schedule, waits, atomic):
    def body(me, x, y, smem, barrier, ready):
        smem[...] = jnp.full_like(X, 5)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        plgpu.async_store_smem(x[...] + me, smem, barrier, cluster_idx=1 - me, cluster_dim="c", atomic=atomic)
        if waits:
            plgpu.barrier_wait(barrier)
        y[me] = smem[...]
        if not waits:
            plgpu.barrier_wait(barrier)

    scratch = [SMEM, plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("c",))]
    call = cluster(body, OUT, scratch, schedule=schedule)
    if waits:
        base = 5 if atomic else 0
        np.testing.assert_array_equal(quiet(call), np.stack([X + 1 + base, X + base]))
    else:
        finding(call, "race", "the store by")


@schedules
@pytest.mark.parametrize("meet", [True, False])
def test_reading_the_memory_of_another_block(schedule, meet):
    def body(me, x, y, smem, done):
        smem[...] = x[...] + me
        if meet:
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
        y[me] = plgpu.cluster_ref(smem, {"c": 1 - me})[...]
        if meet:  # nobody ends while its memory is read
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

    call = cluster(body, OUT, [SMEM, plgpu.ClusterBarrier(collective_axes=("c",))], schedule=schedule)
    if meet:
        np.testing.assert_array_equal(quiet(call), np.stack([X + 1, X]))
    else:
        call = cluster(body, OUT, [SMEM, plgpu.ClusterBarrier(collective_axes=("c",))], schedule=schedule,
                       uninitialized_reads="allow")  # fmt: skip
        finding(call, "race", "nothing orders the two")


@schedules
def test_reading_a_collective_copy_before_it_has_landed(schedule):
    def body(me, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier, collective_axes="c")
        y[me] = smem[...]
        plgpu.barrier_wait(barrier)

    # what is read is there or not, by the schedule; not even started, if it is the other block's share
    with pytest.raises(KernelFinding, match=r"missing-wait|uninitialized-read"):
        cluster(body, schedule=schedule)()
