"""Registers, cluster launch control and single warps on the simulated GPU, and what their rules find."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet

X = numbers(4, 128)
SMEM = plgpu.SMEM(X.shape, X.dtype)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def kernel(body, out=X, scratch=(), given=(X,), schedule="lazy", arch=None, **options):
    call = plgpu.kernel(
        body, out_shape=out, scratch_shapes=list(scratch), interpret=params(schedule=schedule, arch=arch), **options
    )
    return lambda: call(*given)


# --- registers --------------------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("compute, fits", [(232, True), (240, True), (248, False)])
def test_the_registers_of_all_threads(schedule, compute, fits):
    def body(x, y):
        t = lax.axis_index("t")
        pl.when(t == 0)(lambda: plgpu.set_max_registers(24, action="decrease"))
        pl.when(t > 0)(lambda: plgpu.set_max_registers(compute, action="increase"))
        y[t] = x[t]

    call = kernel(body, jax.ShapeDtypeStruct((3, 128), X.dtype), schedule=schedule, num_threads=3, thread_name="t")
    if fits:
        np.testing.assert_array_equal(quiet(call), X[:3])
    else:
        finding(call, "register-overflow", "65,536")


def test_dependent_launches_change_nothing():
    def body(x, y):
        plgpu.griddepcontrol_wait()
        y[...] = x[...]
        plgpu.griddepcontrol_launch_dependents()

    np.testing.assert_array_equal(quiet(kernel(body)), X)


# --- cluster launch control -------------------------------------------------------------------------------------------
POINTS = 300  # more than there are SMs


def steal(schedule):
    """Each block counts at its own point, and at those of blocks that did not start; and how many it did."""

    def body(count, ran, result, barrier, large):
        def turn(carry):
            point, taken, _ = carry
            plgpu.try_cluster_cancel(result, barrier)
            plgpu.atomic_add(count.at[point], jnp.ones((1,), jnp.int32))
            plgpu.barrier_wait(barrier)
            (following,), more = plgpu.query_cluster_cancel(result, ("i",))
            plgpu.commit_smem()
            return jnp.where(more, following, point), taken + 1, more

        me = lax.axis_index("i")
        _, taken, _ = lax.while_loop(lambda c: c[2], turn, (me, jnp.int32(0), jnp.bool_(True)))
        ran[me] = jnp.broadcast_to(taken, (1,))

    large = plgpu.SMEM((128, 1024), jnp.int8)  # one block an SM

    @jax.jit
    def run(count, ran):
        def inner(refs):
            @pl.core_map(plgpu.Mesh(grid=(POINTS,), grid_names=("i",)), interpret=params(schedule=schedule))
            def _():
                scratch = plgpu.TryClusterCancelResult(), plgpu.Barrier(), large
                pl.run_scoped(lambda *scratch: body(*refs, *scratch), *scratch)

        return pl.run_state(inner)((count, ran))

    return run(*2 * [jnp.zeros((POINTS, 1), jnp.int32)])


@pytest.mark.parametrize("schedule", ["lazy", 1])
def test_the_work_of_blocks_that_did_not_start(schedule):
    count, ran = map(np.asarray, steal(schedule))
    np.testing.assert_array_equal(count, 1)
    assert ran.sum() == POINTS
    assert (ran > 0).sum() == 148
    assert ran.max() > 1


@schedules
@pytest.mark.parametrize("waits, commits, found", [
    (True, True, None), (False, True, "missing-wait"), (True, False, "missing-fence"),
])  # fmt: skip
def test_what_a_cancellation_needs(schedule, waits, commits, found):
    def body(x, y, result, barrier):
        for _ in range(2):
            plgpu.try_cluster_cancel(result, barrier)
            if waits:
                plgpu.barrier_wait(barrier)
            _, more = plgpu.query_cluster_cancel(result, ("i",))
            if not waits:
                plgpu.barrier_wait(barrier)
            if commits:
                plgpu.commit_smem()
        y[...] = x[...] + jnp.where(more, 1.0, 0.0)

    scratch = [plgpu.TryClusterCancelResult(), plgpu.Barrier()]
    call = kernel(body, scratch=scratch, schedule=schedule, grid=(1,), grid_names=("i",))
    if found:
        finding(call, found)
    else:
        np.testing.assert_array_equal(quiet(call), X)


def test_cluster_launch_control_is_for_blackwell():
    def body(x, y, result, barrier):
        plgpu.try_cluster_cancel(result, barrier)

    scratch = [plgpu.TryClusterCancelResult(), plgpu.Barrier()]
    with pytest.raises(NotImplementedError, match="try_cluster_cancel"):
        kernel(body, scratch=scratch, arch="sm_90a", grid=(1,), grid_names=("i",))()


@schedules
@pytest.mark.parametrize("meet", [True, False])
def test_the_blocks_of_a_cluster_get_the_same_result(schedule, meet):
    def body(y, result, barrier, seen):
        me = lax.axis_index("c")
        for k in range(2):
            plgpu.try_cluster_cancel(result, barrier, collective_axes="c")
            plgpu.barrier_wait(barrier)
            _, more = plgpu.query_cluster_cancel(result, ("i",))
            y[lax.axis_index("i"), me, k] = jnp.broadcast_to(more, (128,)).astype(jnp.int32)
            plgpu.commit_smem()
            if meet:
                plgpu.barrier_arrive(seen)
                plgpu.barrier_wait(seen)

    out = jax.ShapeDtypeStruct((1, 2, 2, 128), jnp.int32)
    scratch = [plgpu.TryClusterCancelResult(), plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("c",))]
    call = kernel(body, out, scratch, (), schedule, grid=(1,), grid_names=("i",), cluster=(2,), cluster_names=("c",))
    if meet:
        np.testing.assert_array_equal(quiet(call), 0)
    else:
        finding(call, "race", "ClusterBarrier")


@schedules
@pytest.mark.parametrize("threads, cluster", [(None, None), (2, None), (None, 2), (2, 2)])
def test_the_dynamic_scheduling_loop(schedule, threads, cluster):
    points = 160

    def body(y):
        @plgpu.dynamic_scheduling_loop(
            grid_names="i", thread_axis="t" if threads else None, cluster_axes=("c",) if cluster else ()
        )
        def _(loop):
            (i,) = loop.index
            t = lax.axis_index("t") if threads else 0
            c = lax.axis_index("c") if cluster else 0
            y[i, c, t] = jnp.broadcast_to(i, (16,)).astype(jnp.int32)

    more = dict(num_threads=threads, thread_name="t") if threads else {}
    more |= dict(cluster=(cluster,), cluster_names=("c",)) if cluster else {}
    out = jax.ShapeDtypeStruct((points, cluster or 1, threads or 1, 16), jnp.int32)
    got = quiet(
        kernel(body, out, given=(), schedule=schedule, arch="sm_100a", grid=(points,), grid_names=("i",), **more)
    )
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(points)[:, None, None, None], out.shape))


# --- single warps -----------------------------------------------------------------------------------------------------
@schedules
def test_warps_run_together_and_are_waited_for(schedule):
    def body(x, y, smem, barrier):
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                plgpu.copy_gmem_to_smem(x, smem, barrier.at[0])

            @pl.when(warp == 1)
            def _():
                plgpu.barrier_wait(barrier.at[0])
                plgpu.barrier_arrive(barrier.at[1])

        plgpu.barrier_wait(barrier.at[1])
        y[...] = smem[...]

    call = kernel(body, scratch=[SMEM, plgpu.Barrier(num_barriers=2)], schedule=schedule)
    np.testing.assert_array_equal(quiet(call), X)


@schedules
@pytest.mark.parametrize("ordered", [True, False])
def test_warps_race_with_each_other(schedule, ordered):
    def body(x, y, smem, barrier):
        smem[...] = x[...]
        plgpu.commit_smem()

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                plgpu.copy_smem_to_gmem(smem, y)
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_arrive(barrier.at[1])

            @pl.when(warp == 3)
            def _():
                if ordered:
                    plgpu.barrier_wait(barrier.at[1])
                plgpu.copy_gmem_to_smem(x, smem, barrier.at[0])
                plgpu.barrier_wait(barrier.at[0])
                if not ordered:
                    plgpu.barrier_wait(barrier.at[1])

    call = kernel(body, scratch=[SMEM, plgpu.Barrier(num_barriers=2)], schedule=schedule)
    if ordered:
        np.testing.assert_array_equal(quiet(call), X)
    else:
        finding(call, "missing-wait", "warp")


@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_a_store_that_a_warp_started_is_the_threads_afterwards(schedule, waits):
    def body(x, y, smem):
        def step(i, _):
            smem[...] = x[...] + i
            plgpu.commit_smem()

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 2)(lambda: plgpu.copy_smem_to_gmem(smem, y.at[i]))

            if waits:
                plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, 3, step, None)
        plgpu.wait_smem_to_gmem(0)

    call = kernel(body, jax.ShapeDtypeStruct((3, *X.shape), X.dtype), [SMEM], schedule=schedule)
    if waits:
        np.testing.assert_array_equal(quiet(call), X + np.arange(3)[:, None, None])
    else:
        finding(call, "missing-wait", "smem")


@schedules
def test_a_barrier_that_a_thread_and_its_warps_wait_on(schedule):
    def body(x, y, smem, barrier):
        for k in range(3):
            plgpu.copy_gmem_to_smem(x.at[k], smem, barrier)
            if k == 1:

                @plgpu.warp_map
                def _(warp):
                    plgpu.barrier_wait(barrier)
            else:
                plgpu.barrier_wait(barrier)
            y[k] = smem[...]
            plgpu.commit_smem()
        y[3] = x[3]

    call = kernel(body, scratch=[plgpu.SMEM((128,), X.dtype), plgpu.Barrier()], schedule=schedule)
    np.testing.assert_array_equal(quiet(call), X)


def test_warps_that_wait_forever():
    def body(x, y, smem, barrier):
        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 1)(lambda: plgpu.barrier_wait(barrier))

    found = finding(kernel(body, scratch=[SMEM, plgpu.Barrier()]), "deadlock", "warp 1")
    assert "test_control" in found.where


@schedules
def test_a_completion_that_only_one_warp_waited_for(schedule):
    def body(x, y, smem, barrier):
        for k in range(3):
            plgpu.copy_gmem_to_smem(x.at[k], smem, barrier)
            if k == 1:

                @plgpu.warp_map
                def _(warp):
                    pl.when(warp == 0)(lambda: plgpu.barrier_wait(barrier))
            else:
                plgpu.barrier_wait(barrier)
            y[k] = smem[...]
            plgpu.commit_smem()

    scratch = [plgpu.SMEM((128,), X.dtype), plgpu.Barrier()]
    finding(kernel(body, scratch=scratch, schedule=schedule), "barrier-partial-waits")
