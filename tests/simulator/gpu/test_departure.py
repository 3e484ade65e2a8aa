"""What a device writes to another one's memory must be there when the kernel ends on that one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import mosaic_gpu as plgpu


def exchange(order):
    """Two devices send each other their x; `order`: "store, signal", or the other way round."""

    def kernel(x_ref, y_ref, done):
        other = 1 - lax.axis_index("x")

        def store():
            plgpu.remote_ref(y_ref, other)[...] = x_ref[...]

        def signal():
            pl.semaphore_signal(done, device_id=other)

        for step in (store, signal) if order == "store, signal" else (signal, store):
            step()
        pl.semaphore_wait(done)

    def call(x):
        return plgpu.kernel(kernel, out_type=x, scratch_types=[plgpu.SemaphoreType.REGULAR])(x)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.arange(256, dtype=jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(x)
        return np.asarray(y), np.roll(np.asarray(x), 128)


def test_a_store_that_is_signalled_is_there():
    got, want = exchange("store, signal")
    np.testing.assert_array_equal(got, want)


def test_a_store_after_the_signal_may_come_too_late():
    with pytest.raises(Exception, match="nothing makes sure that this has happened when the kernel ends on device"):
        exchange("signal, store")
