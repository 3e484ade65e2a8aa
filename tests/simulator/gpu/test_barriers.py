"""Barriers of the simulated GPU: what each rule of the reference's "Barrier" finds, and a near twin that is silent."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet, warned

X = numbers(4, 128)


def two_threads(schedule, body, *, arrivals=1, barriers=2, **more):
    """A kernel of two threads: body(thread, x, y, smem, barriers)."""

    def kernel(x_ref, y_ref, smem, barrier):
        body(lax.axis_index("t"), x_ref, y_ref, smem, barrier)

    call = plgpu.kernel(
        kernel, out_shape=X, num_threads=2, thread_name="t", interpret=params(schedule=schedule, **more),
        scratch_shapes=[plgpu.SMEM(X.shape, X.dtype), plgpu.Barrier(num_arrivals=arrivals, num_barriers=barriers)],
    )  # fmt: skip
    return lambda: call(X)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_that_exchange_data(schedule):
    def body(t, x, y, smem, bars):
        smem[t] = x[t] * 2
        plgpu.barrier_arrive(bars.at[0])
        plgpu.barrier_wait(bars.at[0])
        y[t] = smem[1 - t] + 1

        @pl.when(t == 0)
        def _():
            y[2] = x[2]
            y[3] = x[3]

    got = quiet(two_threads(schedule, body, arrivals=2))
    expected = np.array(X)
    expected[:2] = 2 * expected[:2][::-1] + 1
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_that_do_not_wait_race(schedule):
    def body(t, x, y, smem, bars):
        smem[t] = x[t] * 2
        y[t] = smem[1 - t] + 1

    finding(two_threads(schedule, body, uninitialized_reads="allow"), "race", "nothing orders the two")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pressure", [True, False])
def test_a_completion_that_was_not_waited_for(schedule, pressure):
    def body(t, x, y, smem, bars):
        @pl.when(t == 0)
        def _():
            for i in range(4):
                smem[i] = x[i]
                plgpu.barrier_arrive(bars.at[0])
                if pressure:
                    plgpu.barrier_wait(bars.at[1])

        @pl.when(t == 1)
        def _():
            for i in range(4):
                plgpu.barrier_wait(bars.at[0])
                y[i] = smem[i]
                if pressure:
                    plgpu.barrier_arrive(bars.at[1])

    call = two_threads(schedule, body)
    if pressure:
        np.testing.assert_array_equal(quiet(call), X)
    else:
        finding(call, "barrier-double-completion", "completes for the 2nd time")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_that_happens_to_come_in_time_is_not_enough(schedule):
    """The consumer frees the slots in the wrong order: the producer knows of the wait for the other one only."""

    def body(t, x, y, smem, bars):
        @pl.when(t == 0)
        def _():
            plgpu.barrier_arrive(bars.at[0])
            plgpu.barrier_wait(bars.at[1])  # says nothing of bars[0]
            plgpu.barrier_arrive(bars.at[0])

        @pl.when(t == 1)
        def _():
            plgpu.barrier_arrive(bars.at[1])
            plgpu.barrier_wait(bars.at[0])
            plgpu.barrier_wait(bars.at[0])

    finding(two_threads(schedule, body), "barrier-double-completion")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("every", [1, 2])
def test_a_thread_that_skips_a_completion(schedule, every):
    def kernel(y_ref, go, back):
        t = lax.axis_index("t")

        @pl.when(t == 0)
        def _():
            for i in range(4):
                plgpu.barrier_arrive(go)
                plgpu.barrier_wait(back)
            y_ref[...] = jnp.ones_like(y_ref)

        @pl.when(t == 1)
        def _():
            for i in range(4):
                plgpu.barrier_wait(go)
                plgpu.barrier_arrive(back)

        @pl.when(t == 2)
        def _():
            for i in range(0, 4, every):
                plgpu.barrier_wait(go)
                plgpu.barrier_arrive(back)

        if every == 2:

            @pl.when(t == 3)
            def _():
                for _ in range(2):
                    plgpu.barrier_arrive(back)

    call = plgpu.kernel(
        kernel, out_shape=numbers(128), num_threads=4, thread_name="t", interpret=params(schedule=schedule),
        scratch_shapes=[plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)],
    )  # fmt: skip
    if every == 1:
        np.testing.assert_array_equal(quiet(call), np.ones(128))
    else:
        found = finding_of_either(call)
        assert found in ("barrier-partial-waits", "barrier-double-completion")


def finding_of_either(call):
    with pytest.raises(KernelFinding) as error:
        call()
    return error.value.finding.kind


@pytest.mark.parametrize("waits", [1, 2])
def test_completions_are_waited_for_before_a_scope_ends(waits):
    @functools.partial(plgpu.kernel, out_shape=numbers(128), interpret=params())
    def kernel(y_ref):
        @functools.partial(pl.run_scoped, barrier=plgpu.Barrier())
        def _(barrier):
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            plgpu.barrier_arrive(barrier)
            if waits == 2:
                plgpu.barrier_wait(barrier)

        y_ref[...] = jnp.ones_like(y_ref)

    if waits == 2:
        quiet(kernel)
    else:
        finding(kernel, "barrier-unwaited-completion", "completed twice")


@pytest.mark.parametrize("strict", [False, True])
def test_completions_of_a_kernels_own_barrier_are_a_warning(strict):
    @functools.partial(
        plgpu.kernel, out_shape=numbers(128), interpret=params(strict=strict), scratch_shapes=[plgpu.Barrier()]
    )
    def kernel(y_ref, barrier):
        y_ref[...] = jnp.ones_like(y_ref)
        plgpu.barrier_arrive(barrier)

    if strict:
        finding(kernel, "barrier-unwaited-completion")
    else:
        np.testing.assert_array_equal(warned(kernel, "barrier-unwaited-completion"), np.ones(128))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_deadlock_names_the_threads_and_the_arrivals(schedule):
    def body(t, x, y, smem, bars):
        plgpu.barrier_arrive(bars.at[0], predicate=t == 0)
        plgpu.barrier_wait(bars.at[0])

    found = finding(two_threads(schedule, body, arrivals=2), "deadlock", "1 of 2 arrivals")
    assert "thread t=0" in found.when and "thread t=1" in found.when
    assert "the last arrival" in found.hint


def test_a_barrier_that_nobody_arrives_on():
    def body(t, x, y, smem, bars):
        plgpu.barrier_wait(bars.at[t])

    assert "nobody ever arrived" in finding(two_threads("lazy", body), "deadlock").hint


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cluster", [True, False])
def test_blocks_of_a_cluster(schedule, cluster):
    """Each block writes into the other one's SMEM; only a cluster barrier says when."""

    def kernel(x_ref, y_ref, smem, barrier):
        me = lax.axis_index("c")
        plgpu.cluster_ref(smem, {"c": 1 - me})[...] = x_ref[me]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        y_ref[me] = smem[...] + 1

    kind = plgpu.ClusterBarrier(collective_axes=("c",)) if cluster else plgpu.Barrier()
    x = numbers(2, 128)
    call = plgpu.kernel(
        kernel, out_shape=x, cluster=(2,), cluster_names=("c",), interpret=params(schedule=schedule),
        scratch_shapes=[plgpu.SMEM((128,), jnp.float32), kind],
    )  # fmt: skip
    if cluster:
        np.testing.assert_array_equal(quiet(lambda: call(x)), np.array(x)[::-1] + 1)
    else:
        assert finding_of_either(lambda: call(x)) in ("race", "uninitialized-read")


def test_testing_a_barrier_waits_for_nothing():
    def kernel(x_ref, y_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        count = lax.while_loop(lambda n: ~plgpu.barrier_test(barrier) & (n < 100), lambda n: n + 1, 0)
        plgpu.barrier_wait(barrier)
        y_ref[...] = smem[...] + (count < 100)

    x = numbers(128)
    call = plgpu.kernel(
        kernel, out_shape=x, interpret=params(), scratch_shapes=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    )
    np.testing.assert_array_equal(quiet(lambda: call(x)), np.array(x) + 1)
