"""Semaphores, atomics and multimem on the simulated GPU: values, and what their rules find."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.simulator.gpu.atomics import REDUCTIONS
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet, warned

X = numbers(4, 128)
SEM = plgpu.SemaphoreType.REGULAR
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def blocks(body, out=X, scratch=(SEM,), given=(X,), schedule="lazy", count=2, **more):
    """A call of a kernel body(me, *operands, *results, *scratch) of so many blocks."""

    def kernel(*refs):
        body(lax.axis_index("i"), *refs)

    call = plgpu.kernel(
        kernel, out_shape=out, grid=(count,), grid_names=("i",), scratch_shapes=list(scratch),
        interpret=params(schedule=schedule, **more),
    )  # fmt: skip
    return lambda: call(*given)


def over_devices(body, x, out, scratch=(SEM,), schedule="lazy"):
    """Run a kernel body(me, *refs) on two devices, each with a half of x."""
    mesh = jax.make_mesh((2,), ("d",))

    def kernel(*refs):
        body(lax.axis_index("d"), *refs)

    call = plgpu.kernel(kernel, out_shape=out, scratch_shapes=list(scratch), interpret=params(schedule=schedule))
    call = jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return jax.jit(call)(jax.device_put(x, jax.NamedSharding(mesh, P("d"))))


# --- semaphores -------------------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_a_block_signals_another(schedule, waits):
    def body(me, x, y, z, sem):
        @pl.when(me == 0)
        def _():
            y[...] = x[...] + 1
            pl.semaphore_signal(sem, 2)

        @pl.when(me == 1)
        def _():
            if waits:
                pl.semaphore_wait(sem, 2)
            z[...] = y[...] * 2
            if not waits:
                pl.semaphore_wait(sem, 2)

    call = blocks(body, (X, X), schedule=schedule)
    if waits:
        np.testing.assert_array_equal(quiet(call)[1], (X + 1) * 2)
    else:
        finding(blocks(body, (X, X), schedule=schedule, uninitialized_reads="allow"), "race", "nothing orders the two")


@schedules
@pytest.mark.parametrize("amount", [3, 2])
def test_a_wait_for_a_part_of_the_signals_knows_of_none_for_certain(schedule, amount):
    def body(me, x, y, z, sem):
        @pl.when(me < 3)
        def _():
            y[me] = x[me]
            pl.semaphore_signal(sem)

        @pl.when(me == 3)
        def _():
            pl.semaphore_wait(sem, amount)
            z[...] = y[0] + y[1] + y[2]
            pl.semaphore_wait(sem, 3 - amount)

    call = blocks(body, (X, jax.ShapeDtypeStruct((128,), X.dtype)), schedule=schedule, count=4,
                  uninitialized_reads="allow")  # fmt: skip
    if amount == 3:
        np.testing.assert_array_equal(quiet(call)[1], X[:3].sum(0))
    else:
        finding(call, "race")


@schedules
def test_waiting_without_taking_and_reading(schedule):
    def body(me, x, y, z, sem):
        @pl.when(me == 0)
        def _():
            y[...] = x[...]
            pl.semaphore_signal(sem, 3)

        @pl.when(me == 1)
        def _():
            pl.semaphore_wait(sem, 2, decrement=False)
            z[0] = jnp.broadcast_to(pl.semaphore_read(sem), (128,)).astype(jnp.float32) + y[0]
            pl.semaphore_wait(sem, 3)

    got = quiet(blocks(body, (X, jax.ShapeDtypeStruct((1, 128), X.dtype)), schedule=schedule))
    np.testing.assert_array_equal(got[1][0], X[0] + 3)


@schedules
def test_a_wait_that_nobody_ends(schedule):
    def body(me, x, y, sem):
        y[...] = x[...]
        pl.semaphore_wait(sem)

    finding(blocks(body, count=1, schedule=schedule), "deadlock", "to reach 1 (it is 0)")


def test_what_is_left_of_a_semaphore():
    def body(me, x, y, sem):
        y[...] = x[...]
        pl.semaphore_signal(sem, 2)
        pl.semaphore_wait(sem, 1)

    np.testing.assert_array_equal(warned(blocks(body, count=1), "semaphore-leftover"), X)


@schedules
@pytest.mark.parametrize("commits", [True, False])
def test_a_semaphore_is_no_proxy_fence(schedule, commits):
    def body(me, x, y, z, sem, smem, barrier):
        @pl.when(me == 0)
        def _():
            y[...] = x[...] + 1
            if commits:
                plgpu.commit_smem()
            pl.semaphore_signal(sem)

        @pl.when(me == 1)
        def _():
            pl.semaphore_wait(sem)
            plgpu.copy_gmem_to_smem(y, smem, barrier)
            plgpu.barrier_wait(barrier)
            z[...] = smem[...]

    scratch = [SEM, plgpu.SMEM(X.shape, X.dtype), plgpu.Barrier()]
    call = blocks(body, (X, X), scratch, schedule=schedule)
    if commits:
        np.testing.assert_array_equal(quiet(call)[1], X + 1)
    else:
        finding(call, "missing-fence", "commit_smem")


@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_devices_exchange_by_copies(schedule, waits):
    def body(me, x, y, smem, barrier, sem):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y, 1 - me))
        plgpu.wait_smem_to_gmem(0, wait_read_only=not waits)
        pl.semaphore_signal(sem, device_id=1 - me)
        pl.semaphore_wait(sem)
        y[...] = y[...] + 1

    x = numbers(8, 128)
    scratch = [plgpu.SMEM((4, 128), x.dtype), plgpu.Barrier(), SEM]
    if waits:
        got = over_devices(body, x, X, scratch, schedule)
        np.testing.assert_array_equal(got, np.concatenate([x[4:], x[:4]]) + 1)
    else:
        with pytest.raises(Exception, match=r"missing-wait|race"):
            jax.block_until_ready(over_devices(body, x, X, scratch, schedule))


def test_a_copy_from_another_device():
    def body(me, x, y, smem, barrier, sem):
        plgpu.copy_gmem_to_smem(plgpu.remote_ref(x, {"d": 1 - me}), smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]
        pl.semaphore_signal(sem, device_id=1 - me)
        pl.semaphore_wait(sem)

    x = numbers(8, 128)
    got = over_devices(body, x, X, [plgpu.SMEM((4, 128), x.dtype), plgpu.Barrier(), SEM])
    np.testing.assert_array_equal(got, np.concatenate([x[4:], x[:4]]))


# --- atomics ----------------------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("op, ufunc", [("add", np.add), ("max", np.maximum), ("xor", np.bitwise_xor)])
def test_atomics_of_several_blocks(schedule, op, ufunc):
    x = numbers(4, 128, dtype=jnp.int32)

    out = jax.ShapeDtypeStruct((128,), jnp.int32)

    def body(me, x, y, z, start, end):
        @pl.when(me == 0)
        def _():
            y[...] = jnp.full((128,), 1, jnp.int32)
            pl.semaphore_signal(start, 4)

        pl.semaphore_wait(start)
        getattr(plgpu, f"atomic_{op}")(y, x[me])
        pl.semaphore_signal(end)

        @pl.when(me == 3)
        def _():
            pl.semaphore_wait(end, 4)
            z[...] = y[...]

    got = quiet(blocks(body, (out, out), [SEM, SEM], (x,), schedule, 4))
    np.testing.assert_array_equal(got[1], ufunc.reduce(np.asarray(x), 0, initial=1))


@schedules
@pytest.mark.parametrize("other", ["store", "load"])
def test_an_atomic_and_an_ordinary_access_race(schedule, other):
    def body(me, x, y, z, start):
        @pl.when(me == 0)
        def _():
            y[...] = x[0]
            pl.semaphore_signal(start, 1)
            plgpu.atomic_add(y, x[1])

        @pl.when(me == 1)
        def _():
            pl.semaphore_wait(start)
            if other == "store":
                y[...] = x[2]
            else:
                z[...] = y[...]

    out = jax.ShapeDtypeStruct((128,), X.dtype)
    finding(blocks(body, (out, out), schedule=schedule), "race", "nothing orders the two")


def test_an_atomic_races_with_a_store_that_an_earlier_atomic_knew_of():
    def body(me, x, y, start):
        @pl.when(me == 0)
        def _():
            y[...] = x[0]
            plgpu.atomic_add(y, x[1])

        pl.when(me == 1)(lambda: plgpu.atomic_add(y, x[2]))

    out = jax.ShapeDtypeStruct((128,), X.dtype)
    finding(blocks(body, out), "race")


@schedules
def test_an_index_that_is_repeated_counts_twice(schedule):
    def body(me, i, y, smem):
        smem[...] = jnp.zeros((4,), jnp.int32)
        plgpu.atomic_add(smem.at[i[...]], jnp.ones((6,), jnp.int32))
        y[...] = smem[...]

    i = jnp.array([0, 3, 3, 1, 3, 0], jnp.int32)
    out = jax.ShapeDtypeStruct((4,), jnp.int32)
    got = quiet(blocks(body, out, [plgpu.SMEM((4,), jnp.int32)], (i,), schedule, 1))
    np.testing.assert_array_equal(got, [2, 1, 0, 3])


# --- all devices ------------------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_multimem(schedule, waits):
    def body(me, x, y, z, sem, done):
        y[pl.ds(me * 2, 2)] = x[pl.ds(0, 2)]
        plgpu.multimem_store(x[pl.ds(2, 2)], y.at[pl.ds(4 + me * 2, 2)], "d")
        plgpu.semaphore_signal_multicast(sem, collective_axes="d")
        if waits:
            pl.semaphore_wait(sem, 2)
        z[...] = plgpu.multimem_load_reduce(y.at[pl.ds(4, 4)], collective_axes="d", reduction_op="add")
        plgpu.semaphore_signal_multicast(done, collective_axes="d")
        pl.semaphore_wait(done, 2)
        if not waits:
            pl.semaphore_wait(sem, 2)

    x = numbers(8, 128)
    out = (jax.ShapeDtypeStruct((8, 128), X.dtype), X)
    if waits:
        y, z = map(np.asarray, over_devices(body, x, out, [SEM, SEM], schedule))
        both = np.concatenate([x[2:4], x[6:8]])
        np.testing.assert_array_equal(y[4:8], both)
        np.testing.assert_array_equal(y[12:], both)
        np.testing.assert_array_equal(z, np.concatenate([both, both]) * 2)
    else:
        with pytest.raises(Exception, match=r"race|uninitialized-read"):
            jax.block_until_ready(over_devices(body, x, out, [SEM, SEM], schedule))


def test_a_multicast_view_is_written_everywhere():
    def body(me, x, y, sem):
        plgpu.multicast_ref(y.at[pl.ds(me * 4, 4)], "d")[...] = x[...]
        plgpu.semaphore_signal_multicast(sem, collective_axes="d")
        pl.semaphore_wait(sem, 2)

    x = numbers(8, 128)
    got = over_devices(body, x, jax.ShapeDtypeStruct((8, 128), X.dtype))
    np.testing.assert_array_equal(got, np.concatenate([x, x]))


@pytest.mark.parametrize("op, wanted", [("inc", [1, 0, 0, 5]), ("dec", [3, 1, 3, 3])])
def test_counting_reductions(op, wanted):
    assert REDUCTIONS[op](np.array([0, 2, 7, 4]), np.array([3, 2, 3, 9] if op == "inc" else 3)).tolist() == wanted
