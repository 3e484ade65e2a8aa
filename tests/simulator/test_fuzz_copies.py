"""Random programs of copies and semaphores, against a model that does one thing after the other.

A program is a list of steps on a few buffers: start a copy on a free semaphore, wait for one, add to a buffer. The
model runs copies at their start. A program is right if no buffer is touched while a copy that writes it, or reads what
is to be written, is under way; the simulator must then give the model's values under every schedule, and be silent. A
program that is not right must be called a race.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

BUFFERS, SEMS, ROWS = 3, 2, 8
HALVES = ((0, 4), (4, 4), (0, 8), (2, 4))  # rows of a buffer: start, size

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("start"), st.integers(0, SEMS - 1), st.integers(0, BUFFERS - 1), st.integers(0, BUFFERS - 1),
            st.sampled_from(HALVES),
        ),
        st.tuples(st.just("wait"), st.integers(0, SEMS - 1)),
        st.tuples(st.just("add"), st.integers(0, BUFFERS - 1), st.sampled_from(HALVES)),
    ),
    min_size=1, max_size=9,
)  # fmt: skip


def tidy(program):
    """The program with waits only where something flies, starts only on free semaphores, and all waited for."""
    flying, result = {}, []
    for step in program:
        if step[0] == "start" and step[1] in flying:
            continue
        if step[0] == "start" and step[2] == step[3]:
            continue
        if step[0] == "wait" and step[1] not in flying:
            continue
        if step[0] == "start":
            flying[step[1]] = step
        if step[0] == "wait":
            del flying[step[1]]
        result.append(step)
    return [*result, *[("wait", sem) for sem in flying]]


def overlap(a, b):
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def is_race(program):
    """Whether a step touches what a copy under way writes, or writes what it reads."""
    flying = {}
    for step in program:
        if step[0] == "start":
            _, sem, src, dst, rows = step
            touched = [(src, rows, False), (dst, rows, True)]
        elif step[0] == "add":
            touched = [(step[1], step[2], True)]
        else:
            del flying[step[1]]
            continue
        for buffer, rows, writes in touched:
            for _, _, src, dst, other in flying.values():
                if overlap(rows, other) and (buffer == dst or (writes and buffer == src)):
                    return True
        if step[0] == "start":
            flying[step[1]] = step
    return False


def model(program, x):
    buffers = [x + 100 * k for k in range(BUFFERS)]
    for step in program:
        if step[0] == "start":
            _, _, src, dst, (at, n) = step
            buffers[dst][at : at + n] = buffers[src][at : at + n]
        elif step[0] == "add":
            buffers[step[1]][step[2][0] : sum(step[2])] += 1
    return np.stack(buffers)


def kernel_of(program):
    def kernel(x_ref, o_ref, *rest):
        buffers, sems = rest[:BUFFERS], rest[BUFFERS]
        for k, buffer in enumerate(buffers):
            buffer[...] = x_ref[...] + 100.0 * k
        copies = {}
        for step in program:
            if step[0] == "start":
                _, sem, src, dst, rows = step
                at = pl.ds(*rows)
                copies[sem] = pltpu.make_async_copy(buffers[src].at[at], buffers[dst].at[at], sems.at[sem])
                copies[sem].start()
            elif step[0] == "wait":
                copies[step[1]].wait()
            else:
                at = pl.ds(*step[2])
                buffers[step[1]][at, :] = buffers[step[1]][at, :] + 1.0
        for k, buffer in enumerate(buffers):
            o_ref[k] = buffer[...]

    return kernel


def check(program, schedule):
    program = tidy(program)
    x = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    call = pl.pallas_call(
        kernel_of(program),
        jax.ShapeDtypeStruct((BUFFERS, ROWS, 4), jnp.float32),
        scratch_shapes=[pltpu.VMEM((ROWS, 4), jnp.float32)] * BUFFERS + [pltpu.SemaphoreType.DMA((SEMS,))],
        interpret=pltpu.InterpretParams(detect_races=True, schedule=schedule),
    )
    if is_race(program):
        with pytest.raises(KernelFinding) as caught:
            call(x)
        assert caught.value.finding.kind == "race"
    else:
        np.testing.assert_array_equal(call(x), model(program, x))


COMMON = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
schedules = st.sampled_from(["eager", "lazy", 0, 1, 2])


@settings(max_examples=120, derandomize=True, **COMMON)
@given(steps, schedules)
def test_random_programs(program, schedule):
    check(program, schedule)


@pytest.mark.slow
@settings(max_examples=2000, **COMMON)
@given(steps, schedules)
def test_many_random_programs(program, schedule):
    check(program, schedule)
