"""Cluster barriers that blocks allocate in `pl.run_scoped`: the blocks of a cluster enter and leave on their own."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet

X = numbers(2, 128)
BARRIER = plgpu.ClusterBarrier(collective_axes=("c",))


def call(body, schedule):
    """A kernel body(rank, x, y) of a cluster of two blocks."""
    kernel = plgpu.kernel(
        lambda *refs: body(lax.axis_index("c"), *refs), out_shape=X, cluster=(2,), cluster_names=("c",),
        interpret=params(schedule=schedule),
    )  # fmt: skip
    return lambda: kernel(X)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_arrives_before_the_other_has_entered(schedule):
    def body(me, x, y):
        y[me] = x[me] + 1

        def scope(barrier):
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            y[me] = y[me] + x[1 - me]

        pl.run_scoped(scope, BARRIER)
        pl.run_scoped(scope, BARRIER)

    np.testing.assert_array_equal(quiet(call(body, schedule)), X + 1 + 2 * jnp.flip(X, 0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_arrives_after_the_other_has_left(schedule):
    def body(me, x, y):
        left = pl.get_global(plgpu.SemaphoreType.REGULAR)

        def scope(barrier):
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

            @pl.when(me == 1)
            def _():
                pl.semaphore_wait(left)
                plgpu.barrier_arrive(barrier)

        pl.run_scoped(scope, BARRIER)
        pl.when(me == 0)(lambda: pl.semaphore_signal(left))
        y[me] = x[me]

    finding(call(body, schedule), "barrier-unwaited-completion", "has left the scope")
