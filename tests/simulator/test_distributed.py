"""Kernels on four simulated devices that talk to each other: collectives with right values, and what can go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import tpu as pltpu

N = 4
HBM = pl.BlockSpec(memory_space=pl.ANY)
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
SCHEDULES = ["lazy", "eager", 0, 1]


def mesh():
    return jax.make_mesh((N,), ("x",), axis_types=(AxisType.Auto,))


def on_mesh(f, *args, out=P("x"), specs=None):
    specs = (P("x"),) * len(args) if specs is None else specs
    shard = jax.shard_map(f, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=False)
    return jax.block_until_ready(jax.jit(shard)(*args))


def call(kernel, shape, scratch, n_in=1, dtype=jnp.float32, **params):
    params.setdefault("detect_races", True)
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, dtype),
        in_specs=[HBM] * n_in,
        out_specs=HBM,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(collective_id=0),
        interpret=pltpu.InterpretParams(**params),
    )


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def neighbours():
    me = lax.axis_index("x")
    return me, lax.rem(me + N - 1, N), lax.rem(me + 1, N)


def meet(*devices):
    """Wait until these devices have come here too."""
    barrier = pltpu.get_barrier_semaphore()
    for device in devices:
        pl.semaphore_signal(barrier, 1, device_id=(device,))
    pl.semaphore_wait(barrier, len(devices))


# --- collectives ------------------------------------------------------------------------------------------------------
def all_gather_kernel(x_ref, o_ref, send, recv, local):
    me, left, right = neighbours()
    meet(left, right)
    pltpu.make_async_copy(x_ref, o_ref.at[me], local).start()
    pltpu.make_async_copy(x_ref, o_ref.at[me], local).wait()
    for step in range(N - 1):
        slot = lax.rem(me - step + N, N)
        copy = pltpu.make_async_remote_copy(
            o_ref.at[slot], o_ref.at[slot], send.at[step], recv.at[step], device_id={"x": right}
        )
        copy.start()
        copy.wait()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ring_all_gather(schedule):
    x = normal(N * 8, 128)
    kernel = call(all_gather_kernel, (N, 8, 128), [DMA((N - 1,)), DMA((N - 1,)), DMA], schedule=schedule)
    out = on_mesh(kernel, x, out=P("x"))
    for k in range(N):
        np.testing.assert_array_equal(out[k * N : (k + 1) * N].reshape(N * 8, 128), x)


def reduce_scatter_kernel(x_ref, o_ref, acc, got, send, recv, free):
    """x: (N, 8, 128) on each device; o: the sum over devices of the chunk with its own number."""
    me, left, right = neighbours()
    meet(left, right)
    pltpu.sync_copy(x_ref.at[lax.rem(me + N - 1, N)], acc)
    for step in range(N - 1):
        slot = step % 2
        if step >= 2:
            pl.semaphore_wait(free, 1)  # the right neighbour has used what was sent two steps ago
        copy = pltpu.make_async_remote_copy(acc, got.at[slot], send, recv.at[slot], device_id=(right,))
        copy.start()
        copy.wait()
        pltpu.sync_copy(x_ref.at[lax.rem(me + 2 * N - 2 - step, N)], acc)
        acc[...] += got[slot]
        if step + 2 < N - 1:
            pl.semaphore_signal(free, 1, device_id=(left,))
    pltpu.sync_copy(acc, o_ref)


SCATTER = [
    pltpu.VMEM((8, 128), jnp.float32), pltpu.VMEM((2, 8, 128), jnp.float32), DMA, DMA((2,)), REGULAR,
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reduce_scatter(schedule):
    x = normal(N, N, 8, 128)
    out = on_mesh(lambda x: call(reduce_scatter_kernel, (8, 128), SCATTER, schedule=schedule)(x[0]), x)
    np.testing.assert_allclose(out.reshape(N, 8, 128), np.asarray(x, np.float64).sum(0), atol=1e-5)


def test_all_reduce():
    def both(x):
        part = call(reduce_scatter_kernel, (8, 128), SCATTER)(x[0])
        return call(all_gather_kernel, (N, 8, 128), [DMA((N - 1,)), DMA((N - 1,)), DMA])(part)

    x = normal(N, N, 8, 128)
    out = on_mesh(both, x)
    want = np.asarray(x, np.float64).sum(0)
    for k in range(N):
        np.testing.assert_allclose(out[k * N : (k + 1) * N], want, atol=1e-5)


def collective_matmul_kernel(x_ref, w_ref, o_ref, ring, w, acc, send, recv, free):
    """y = all_gather(x) @ w, multiplying one shard while the next one is on its way."""
    me, left, right = neighbours()
    meet(left, right)
    pltpu.sync_copy(w_ref, w)
    pltpu.sync_copy(x_ref, ring.at[0])
    for step in range(N):
        now, then = step % 2, (step + 1) % 2
        copy = pltpu.make_async_remote_copy(
            ring.at[now], ring.at[then], send.at[now], recv.at[then], device_id=(right,)
        )
        if step < N - 1:
            if step:
                pl.semaphore_wait(free, 1)
            copy.start()
        acc[...] = jnp.dot(ring[now], w[...], precision="highest")
        pltpu.sync_copy(acc, o_ref.at[lax.rem(me - step + N, N)])
        if step < N - 1:
            copy.wait()
            if step < N - 2:
                pl.semaphore_signal(free, 1, device_id=(left,))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collective_matmul(schedule):
    x, w = normal(N * 8, 128), normal(128, 128, seed=1)
    scratch = [
        pltpu.VMEM((2, 8, 128), jnp.float32), pltpu.VMEM((128, 128), jnp.float32), pltpu.VMEM((8, 128), jnp.float32),
        DMA((2,)), DMA((2,)), REGULAR,
    ]  # fmt: skip
    kernel = call(collective_matmul_kernel, (N, 8, 128), scratch, n_in=2, schedule=schedule)
    out = on_mesh(kernel, x, w, specs=(P("x"), P()))
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for k in range(N):
        np.testing.assert_allclose(out[k * N : (k + 1) * N].reshape(N * 8, 128), want, atol=1e-4)


# --- what can go wrong ----------------------------------------------------------------------------------------------
def failing(kernel, scratch, words, shape=(8, 128), **params):
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        on_mesh(call(kernel, shape, scratch, **params), normal(N * 8, 128))


def test_a_buffer_is_sent_over_while_the_other_device_uses_it():
    def kernel(early):
        def exchange(x_ref, o_ref, v, send, recv):
            _, left, right = neighbours()
            if not early:
                meet(left, right)
            v[...] = jnp.zeros_like(v)
            if not early:
                meet(left, right)
            copy = pltpu.make_async_remote_copy(x_ref, v, send, recv, device_id=(right,))
            copy.start()
            copy.wait()
            pltpu.sync_copy(v, o_ref)

        return exchange

    scratch = [pltpu.VMEM((8, 128), jnp.float32), DMA, DMA]
    failing(kernel(True), scratch, "Race on v")
    x = normal(N * 8, 128)
    out = on_mesh(call(kernel(False), (8, 128), scratch), x)
    np.testing.assert_array_equal(out, np.roll(x, 8, 0))


def test_two_devices_wait_for_each_other():
    def kernel(x_ref, o_ref, send, recv):
        _, _, right = neighbours()
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id=(right,))
        copy.wait_recv()  # before anybody has sent
        copy.start()
        copy.wait_send()

    failing(kernel, [DMA, DMA], "Deadlock: 4 cores wait, and none can go on")


def test_one_device_skips_a_barrier():
    def kernel(x_ref, o_ref):
        me, left, right = neighbours()

        @pl.when(me != 2)
        def _():
            meet(left, right)

        pltpu.sync_copy(x_ref, o_ref)

    failing(kernel, [], "collective-mismatch")


def test_a_device_that_is_not_there():
    def kernel(x_ref, o_ref, send, recv):
        me, _, _ = neighbours()
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id=(me + 1,))
        copy.start()
        copy.wait()

    failing(kernel, [DMA, DMA], "There is no device")


def test_what_is_sent_must_be_waited_for():
    def kernel(x_ref, o_ref, send, recv):
        _, _, right = neighbours()
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id=(right,))
        copy.start()
        copy.wait_send()

    failing(kernel, [DMA, DMA], "never waited for")


def test_logical_ids_and_a_mesh_of_two_axes():
    def kernel(x_ref, o_ref, send, recv):
        i, j = lax.axis_index("a"), lax.axis_index("b")
        other = (1 - i) * 2 + j
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, send, recv, device_id=other, device_id_type=pl.DeviceIdType.LOGICAL
        )
        copy.start()
        copy.wait()

    x = normal(N * 8, 128)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(
        call(kernel, (8, 128), [DMA, DMA]), mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(f)(x), np.roll(x, 16, 0))


def test_many_calls_one_after_the_other():
    kernel = call(all_gather_kernel, (N, 8, 128), [DMA((N - 1,)), DMA((N - 1,)), DMA], detect_races=False)

    def f(x):
        return lax.fori_loop(0, 5, lambda _, y: kernel(y)[0] + 1, x)

    x = normal(N * 8, 128)
    out = on_mesh(f, x)
    np.testing.assert_allclose(out[:8], x[:8] + 5, atol=1e-5)
