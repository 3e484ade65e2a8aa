"""Fault kinds that users meet, on the simulated GPU, which are no rule of the reference: calls, transforms, endings."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet

X = numbers(4, 128)
SMEM = plgpu.SMEM(X.shape, X.dtype)
SEM = plgpu.SemaphoreType.REGULAR
TWO = dict(num_threads=2, thread_name="t")
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def kernel(body, out=X, scratch=(), schedule="lazy", more=(), **mesh):
    """A kernel on the simulated GPU."""
    given = params(schedule=schedule, **dict(more))
    return plgpu.kernel(body, out_shape=out, scratch_shapes=list(scratch), interpret=given, **mesh)


def copied(broken):
    """y = x + 1 through SMEM; broken: the copy is not waited for before it is read."""

    def body(x, y, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        if not broken:
            plgpu.barrier_wait(loaded)
        y[...] = smem[...] + 1
        if broken:
            plgpu.barrier_wait(loaded)

    return kernel(body, scratch=[SMEM, plgpu.Barrier()])


# --- 1, 15, 16, 30: the call ------------------------------------------------------------------------------------------
def test_one_body_and_several_grids():
    """Kind 1: caches are keyed by the grid."""

    def body(y):
        y[lax.axis_index("i")] = jnp.full(128, lax.axis_size("i"), jnp.float32)

    for n in (2, 3, 2):
        call = kernel(body, jax.ShapeDtypeStruct((n, 128), jnp.float32), grid=(n,), grid_names=("i",))
        np.testing.assert_array_equal(quiet(call), np.full((n, 128), n))


def test_an_operand_that_the_kernel_ignores():
    """Kind 16: produced in the same jit, it changes nothing."""
    call = kernel(lambda x, w, y: y.__setitem__(..., x[...] + 1))
    got = jax.jit(lambda x: (call(x, jnp.cumsum(x, 0)), x * 2))(X)
    np.testing.assert_array_equal(got[0], X + 1)
    np.testing.assert_array_equal(got[1], X * 2)


@pytest.mark.parametrize("work", ["kernel", "steps"])
def test_aliases_hold_what_was_given(work):
    """Kind 15: refs that are operand and result, with an empty body and one that works in place."""

    @pl.run_state
    def run(refs):
        x, y = refs

        @pl.core_map(plgpu.Mesh(grid=(2,), grid_names=("i",)), interpret=params())
        def _():
            if work == "steps":
                i = lax.axis_index("i")
                x[i] = x[i] + 1

    x, y = quiet(lambda: run((X, X * 3)))
    expected = np.array(X)
    expected[:2] += work == "steps"
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(y, X * 3)


@pytest.mark.parametrize("steps", [0, 3])
@schedules
def test_no_work(steps, schedule):
    """Kind 30: a loop without steps, known only at run time; fewer tiles than blocks."""

    def body(n, x, y):
        i = lax.axis_index("i")
        y[i] = x[i]

        def one(step, _):
            y[i] = x[i] + step.astype(jnp.float32)

        lax.fori_loop(0, n[0], one, None)

        @pl.when(i == 5)
        def _():
            y[0] = x[0]

    call = kernel(body, schedule=schedule, grid=(4,), grid_names=("i",))
    got = quiet(lambda: call(jnp.array([steps], jnp.int32), X))
    np.testing.assert_array_equal(got, X + max(steps - 1, 0))


# --- 13: spinning -----------------------------------------------------------------------------------------------------
def spin(look, raised, schedule="lazy"):
    """Block 0 spins until block 1 has raised a semaphore, or a flag in GMEM."""

    def body(x, y):
        ready, i = pl.get_global(SEM), lax.axis_index("i")

        @pl.when(i == 0)
        def _():
            seen = (lambda: pl.semaphore_read(ready) > 0) if look == "semaphore" else (lambda: y[2, 0] == 5)
            lax.while_loop(lambda _: jnp.logical_not(seen()), lambda c: c + 1, 0)
            if look == "semaphore":
                pl.semaphore_wait(ready)
            y[0] = x[0]

        @pl.when(i == 1)
        def _():
            y[1] = x[1]
            if raised and look == "semaphore":
                pl.semaphore_signal(ready)
            y[2] = jnp.full(128, 5.0)

    # without race detection: a flag in GMEM is a race
    more = {"detect_races": look == "semaphore"}
    return kernel(body, schedule=schedule, more=more, grid=(2,), grid_names=("i",))


@schedules
@pytest.mark.parametrize("look", ["semaphore", "flag"])
def test_spinning_ends_when_the_others_have_had_their_turn(look, schedule):
    np.testing.assert_array_equal(quiet(lambda: spin(look, True, schedule)(X))[:2], X[:2])


@schedules
def test_spinning_for_ever_is_a_deadlock(schedule):
    found = finding(lambda: spin("semaphore", False, schedule)(X), "deadlock", "reads in a loop")
    assert "test_fault_kinds_gpu.py" in found.where


@schedules
def test_testing_a_barrier_for_ever_is_a_deadlock(schedule):
    def body(x, y, barrier):
        lax.while_loop(lambda _: jnp.logical_not(plgpu.barrier_test(barrier)), lambda c: c + 1, 0)
        y[...] = x[...]

    finding(lambda: kernel(body, scratch=[plgpu.Barrier()], schedule=schedule)(X), "deadlock", "nobody ever arrived")


# --- 21: several devices ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("signals", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_all_to_all(count, signals):
    """Kind 21: each device stores a row to each other one; what is not waited for is found."""

    def body(x, y, done):
        me = lax.axis_index("d")
        for k in range(count):
            plgpu.remote_ref(y, k)[me] = x[k]
            pl.semaphore_signal(done, device_id=k)
        pl.semaphore_wait(done, count if signals else 1)
        total = jnp.sum(y[...])
        y[me] = y[me] + 0 * total
        if not signals:
            pl.semaphore_wait(done, count - 1)

    mesh = jax.make_mesh((count,), ("d",), devices=jax.devices()[:count])
    out = jax.ShapeDtypeStruct((count, 128), jnp.float32)
    call = kernel(body, out, [SEM], more={"uninitialized_reads": "allow"})
    call = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    x = numbers(count * count, 128)
    given = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    if signals:
        got = np.asarray(call(given)).reshape(count, count, 128)
        np.testing.assert_array_equal(got, np.asarray(x).reshape(count, count, 128).transpose(1, 0, 2))
    else:
        with pytest.raises(Exception, match=r"(?s)race.*device"):
            jax.block_until_ready(call(given))


# --- 31: endings ------------------------------------------------------------------------------------------------------
@schedules
def test_one_thread_fails_and_the_next_call_needs_no_reset(schedule):
    """Kind 31: the other thread waits for ever; it is unwound, and the first error comes out."""

    def body(n, x, y, smem, ready):
        @pl.when(lax.axis_index("t") == 0)
        def _():
            y[n[0]] = x[0]
            plgpu.barrier_arrive(ready)

        @pl.when(lax.axis_index("t") == 1)
        def _():
            pl.run_scoped(lambda acc: acc[...], plgpu.ACC((64, 8), jnp.float32))
            plgpu.barrier_wait(ready)
            for row in range(1, 4):
                y[row] = x[row]

    call = kernel(body, scratch=[SMEM, plgpu.Barrier()], schedule=schedule, **TWO)
    for _ in range(2):
        began = time.perf_counter()
        finding(lambda: call(jnp.array([9], jnp.int32), X), "out-of-bounds", "index 9")
        assert time.perf_counter() - began < 5
        np.testing.assert_array_equal(quiet(lambda: call(jnp.array([0], jnp.int32), X)), X)


def test_calls_on_several_python_threads():
    good, bad, results = copied(False), copied(True), {}

    def work(k):
        for turn in range(3):
            try:
                results[k, turn] = np.asarray((bad if k % 2 else good)(X + k))
            except KernelFinding as error:
                results[k, turn] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for k in range(4):
        for turn in range(3):
            got = results[k, turn]
            if k % 2:
                assert isinstance(got, KernelFinding) and got.finding.kind == "missing-wait"
            else:
                np.testing.assert_array_equal(got, X + k + 1)


# --- 37, 39: transforms -----------------------------------------------------------------------------------------------
def over_devices(call):
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return lambda x: jax.jit(mapped)(jax.device_put(x, jax.NamedSharding(mesh, P("d"))))


WAYS = {
    "call": lambda call: call,
    "jit": jax.jit,
    "vmap": lambda call: lambda x: jax.vmap(call)(x[None])[0],
    "jit of vmap": lambda call: lambda x: jax.jit(jax.vmap(call))(x[None])[0],
    "shard_map": lambda call: lambda x: np.asarray(over_devices(call)(jnp.concatenate([x, x])))[:4],
    "scan": lambda call: lambda x: lax.scan(lambda c, _: (c, call(c)), x, length=2)[1][0],
}


@pytest.mark.parametrize("way", WAYS)
def test_findings_come_out_of_transforms(way):
    """The text of the finding, its line and the remedy are in the message, and the twin is right."""
    np.testing.assert_array_equal(WAYS[way](copied(False))(X), X + 1)
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(WAYS[way](copied(True))(X))
    text = str(caught.value)
    for words in ("still in use", "test_fault_kinds_gpu.py:", "kind: missing-wait", "barrier_wait"):
        assert words in text, text


def test_gradients_of_a_kernel_are_refused_in_one_sentence():
    with pytest.raises(Exception, match=r"(?i)differentiat|derivative|custom_vjp"):
        jax.grad(lambda x: copied(False)(x).sum())(X)


# --- 32: prints and checks --------------------------------------------------------------------------------------------
@schedules
def test_prints_and_checks(schedule, capfd):
    """Kind 32: they name the thread, change nothing, and a check that fails stops."""

    def body(n, x, y):
        t = lax.axis_index("t")
        pl.debug_print("row {}", t)
        pl.when(t == 0)(lambda: y.__setitem__(..., x[...]))
        pl.debug_check(n[0] == 0, "n is zero")

    call = kernel(body, schedule=schedule, **TWO)
    with pl.enable_debug_checks(True):
        np.testing.assert_array_equal(quiet(lambda: call(jnp.zeros(1, jnp.int32), X)), X)
        assert sorted(capfd.readouterr().out.split()) == ["0", "1", "row", "row"]
        with pytest.raises(Exception, match="n is zero"):
            call(jnp.ones(1, jnp.int32), X)


# --- 19: what nobody waits for ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_nobody_waits_for(waits, recwarn):
    def body(x, y, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        if waits:
            plgpu.barrier_wait(loaded)
        y[...] = x[...]

    np.testing.assert_array_equal(kernel(body, scratch=[SMEM, plgpu.Barrier()])(X), X)
    texts = [str(w.message) for w in recwarn]
    assert any("nobody waited" in t and "test_fault_kinds_gpu.py" in t for t in texts) is not waits
