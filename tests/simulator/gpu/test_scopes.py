"""Memory of the simulated GPU: scopes, budgets, unwritten memory, races between blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet


def run_with_threads(body, axes, schedule="lazy"):
    def kernel(x_ref, y_ref):
        body(x_ref, y_ref, axes)

    x = numbers(2, 128)
    call = plgpu.kernel(kernel, out_shape=x, num_threads=2, thread_name="t", interpret=params(schedule=schedule))
    return x, lambda: call(x)


def exchange(x_ref, y_ref, axes):
    t = lax.axis_index("t")

    def scope(smem, barrier):
        smem[t] = x_ref[t]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        y_ref[t] = smem[1 - t]

    pl.run_scoped(scope, plgpu.SMEM((2, 128), jnp.float32), plgpu.Barrier(num_arrivals=2), collective_axes=axes)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_share_what_they_allocate_together(schedule):
    x, call = run_with_threads(exchange, "t", schedule)
    np.testing.assert_array_equal(quiet(call), np.array(x)[::-1])


def test_an_allocation_of_one_thread():
    _, call = run_with_threads(exchange, ())
    assert "collective_axes='t'" in finding(call, "collective-mismatch", "for itself").hint


def test_an_allocation_that_not_all_threads_come_to():
    def body(x_ref, y_ref, axes):
        t = lax.axis_index("t")

        @pl.when(t == 0)
        def _():
            exchange(x_ref, y_ref, axes)

    _, call = run_with_threads(body, "t")
    finding(call, "collective-mismatch", "thread t=1 of the block did not come to")


def test_scopes_of_accumulators_are_a_threads_own():
    def body(x_ref, y_ref, axes):
        t = lax.axis_index("t")
        y_ref[t] = pl.run_scoped(lambda acc: acc[0] + x_ref[t], plgpu.ACC((64, 128)))

    x, call = run_with_threads(body, ())
    np.testing.assert_array_equal(quiet(call), x)


@pytest.mark.parametrize("commit", [True, False])
def test_the_next_scope_gets_the_same_memory(commit):
    @functools.partial(plgpu.kernel, out_shape=numbers(2, 128), interpret=params())
    def kernel(x_ref, y_ref):
        for i in range(2):

            @functools.partial(pl.run_scoped, smem=plgpu.SMEM((128,), jnp.float32), barrier=plgpu.Barrier())
            def scope(smem, barrier):
                plgpu.copy_gmem_to_smem(x_ref.at[i], smem, barrier)
                plgpu.barrier_wait(barrier)
                y_ref[i] = smem[...]
                if commit:
                    plgpu.commit_smem()

    x = numbers(2, 128)
    if commit:
        np.testing.assert_array_equal(quiet(lambda: kernel(x)), x)
    else:
        finding(lambda: kernel(x), "missing-fence", "scoped buffer")


def scratch(*shapes, body=lambda *_: None, arch=None):
    def kernel(y_ref, *refs):
        y_ref[...] = jnp.zeros_like(y_ref)
        body(*refs)

    return plgpu.kernel(kernel, out_shape=numbers(128), interpret=params(arch=arch), scratch_shapes=list(shapes))


def test_shared_memory_is_full():
    quiet(scratch(plgpu.SMEM((227 * 1024,), jnp.int8)))
    found = finding(scratch(plgpu.SMEM((227, 512), jnp.float16), plgpu.Barrier()), "smem-overflow", "232,448")
    assert found.operand
    finding(scratch(plgpu.SMEM((228 * 1024,), jnp.int8)), "smem-overflow")


def test_scopes_add_up():
    def body():
        pl.run_scoped(lambda s: None, plgpu.SMEM((200, 1024), jnp.int8))
        pl.run_scoped(lambda s: None, plgpu.SMEM((200, 1024), jnp.int8))

    def nested():
        pl.run_scoped(
            lambda s: pl.run_scoped(lambda s: None, plgpu.SMEM((200, 1024), jnp.int8)),
            plgpu.SMEM((200, 1024), jnp.int8),
        )

    quiet(scratch(body=body))
    finding(scratch(body=nested), "smem-overflow")


def test_tensor_memory_is_full():
    quiet(scratch(plgpu.TMEM((128, 512), jnp.float32)))
    quiet(scratch(plgpu.TMEM((128, 1024), jnp.float16, packed=True)))
    finding(scratch(plgpu.TMEM((128, 1024), jnp.float16, packed=False)), "tmem-overflow", "1024 columns")
    finding(scratch(plgpu.TMEM((128, 32), jnp.float32), arch="sm_90a"), "tmem-overflow", "no tensor memory")


def test_registers_are_full():
    quiet(scratch(body=lambda: pl.run_scoped(lambda acc: None, plgpu.ACC((64, 256)))))
    finding(scratch(body=lambda: pl.run_scoped(lambda acc: None, plgpu.ACC((128, 256)))), "register-overflow", "256")


def test_memory_that_was_never_written():
    def kernel(x_ref, y_ref, smem):
        smem[0] = x_ref[...]
        y_ref[...] = smem[1]

    x = numbers(128)
    call = plgpu.kernel(kernel, out_shape=x, interpret=params(), scratch_shapes=[plgpu.SMEM((2, 128), jnp.float32)])
    finding(lambda: call(x), "uninitialized-read", "before anything was written")


@pytest.mark.parametrize("index", [1, 2])
def test_an_index_that_leaves_its_ref(index):
    def kernel(n_ref, x_ref, y_ref):
        y_ref[...] = x_ref[n_ref[0]]

    x = numbers(2, 128)
    call = plgpu.kernel(kernel, out_shape=x[0], interpret=params())
    if index < 2:
        np.testing.assert_array_equal(quiet(lambda: call(jnp.array([index]), x)), x[index])
    else:
        finding(lambda: call(jnp.array([index]), x), "out-of-bounds", "index 2 in dimension 0")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("apart", [True, False])
def test_blocks_that_write_one_place(schedule, apart):
    def kernel(y_ref):
        i = lax.axis_index("x")
        y_ref[i if apart else 0] = jnp.full((128,), 1.0)

    out = numbers(300, 128)
    call = plgpu.kernel(kernel, out_shape=out, grid=(300,), grid_names=("x",), interpret=params(schedule=schedule))
    if apart:
        np.testing.assert_array_equal(quiet(call), np.ones((300, 128)))
    else:
        found = finding(call, "race", "block x=")
        assert found.where is not None


def test_in_jit_and_on_threads():
    x, _ = run_with_threads(exchange, "t")
    call = plgpu.kernel(
        lambda a, b: exchange(a, b, "t"), out_shape=x, num_threads=2, thread_name="t", interpret=params()
    )
    np.testing.assert_array_equal(jax.jit(call)(x) + 0, np.array(x)[::-1])
    batched = jax.vmap(call)(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(batched, np.stack([np.array(x)[::-1], 2 * np.array(x)[::-1]]))


@pytest.mark.parametrize("races", [True, False])
@pytest.mark.parametrize("condition", [True, False])
def test_a_store_to_an_operand(races, condition):
    """A store that never runs is no mistake (JAX's all-gather has one)."""

    def kernel(n_ref, x_ref, y_ref):
        @pl.when(n_ref[0] == condition)
        def _():
            x_ref[...] = jnp.zeros_like(x_ref)

        y_ref[...] = x_ref[...] + 1

    x = numbers(128)
    call = plgpu.kernel(kernel, out_shape=x, interpret=params(detect_races=races))
    if condition:
        with pytest.raises(ValueError, match=r"stores to refs\[1\]|stores to x_ref"):
            call(jnp.array([1]), x)
    else:
        np.testing.assert_array_equal(call(jnp.array([1]), x), np.array(x) + 1)
