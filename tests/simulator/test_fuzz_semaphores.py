"""Random programs on two cores that hand a turn to each other by semaphores, against one thing after the other.

A program is a list of turns; in a turn one core adds to rows of a shared array, and then signals the other one. All
turns are ordered, so that every schedule must give the model's values, with nothing found. Without one of the signals
(and its wait) just two turns are not ordered: that is a race if, and only if, they touch a row in common.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

ROWS, LANES = 4, 8
MESH = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

turns = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=2), min_size=2, max_size=5)


def kernel_of(program, missing):
    def kernel(x_ref, o_ref, row, turn):
        me = lax.axis_index("core")

        def add(r, amount):
            pltpu.sync_copy(o_ref.at[r], row)
            row[...] = row[...] * 2 + amount
            pltpu.sync_copy(row, o_ref.at[r])

        for core in range(2):

            @pl.when(me == core)
            def _(core=core):
                if core == 0:
                    for r in range(ROWS):
                        pltpu.sync_copy(x_ref.at[r], o_ref.at[r])
                    pl.semaphore_signal(turn, 1, device_id={"core": 1})
                else:
                    pl.semaphore_wait(turn, 1)
                for number, rows in enumerate(program):
                    if number % 2 != core:
                        continue
                    if number and number - 1 != missing:
                        pl.semaphore_wait(turn, 1)
                    for r in rows:
                        add(r, number + 1.0)
                    if number + 1 < len(program) and number != missing:
                        pl.semaphore_signal(turn, 1, device_id={"core": 1 - core})

    return kernel


def model(program, x):
    x = x.copy()
    for number, rows in enumerate(program):
        for r in rows:
            x[r] = x[r] * 2 + number + 1
    return x


def check(program, missing, schedule):
    x = np.arange(ROWS * LANES, dtype=np.float32).reshape(ROWS, LANES)
    call = pl.kernel(
        kernel_of(program, missing),
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        mesh=MESH,
        scratch_types=(pltpu.VMEM((LANES,), jnp.float32), pltpu.SemaphoreType.REGULAR),
        interpret=pltpu.InterpretParams(detect_races=True, schedule=schedule),
    )
    common = missing is not None and set(program[missing]) & set(program[missing + 1])
    if common:
        with pytest.raises(KernelFinding) as caught:
            call(x)
        assert caught.value.finding.kind == "race"
    else:
        got = np.asarray(call(x))
        if missing is None:
            np.testing.assert_array_equal(got, model(program, x))


@settings(max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(turns, st.sampled_from(["lazy", "eager", 0, 1, 2]), st.data())
def test_random_turns(program, schedule, data):
    missing = data.draw(st.one_of(st.none(), st.integers(0, len(program) - 2)))
    check(program, missing, schedule)
