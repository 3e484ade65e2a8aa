"""What a device does with another one's memory must be over when the kernel ends on that one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import mosaic_gpu as plgpu


def exchange(order, *, blocks=1, decrement=True, on_race="raise"):
    """Two devices exchange their x; `order`: words of store, load, copy (from the other device), zero, add (to both
    y), signal and wait. The first block does it all; `blocks` of them signal and wait."""

    def kernel(x_ref, y_ref, smem, barrier, done):
        other = 1 - lax.axis_index("x")
        first = lax.axis_index("b") == 0

        def store():
            plgpu.remote_ref(y_ref, other)[...] = x_ref[...]

        def load():
            y_ref[...] = plgpu.remote_ref(x_ref, other)[...]

        def copy():
            plgpu.copy_gmem_to_smem(plgpu.remote_ref(x_ref, other), smem, barrier)
            plgpu.barrier_wait(barrier)
            y_ref[...] = smem[...]

        def zero():
            y_ref[...] = jnp.zeros_like(y_ref)

        def add():
            plgpu.atomic_add(plgpu.remote_ref(y_ref, other), x_ref[...])
            plgpu.atomic_add(y_ref, jnp.zeros_like(y_ref))

        steps = {"store": store, "load": load, "copy": copy, "zero": zero, "add": add}
        for word in order.split():
            if word == "signal":
                pl.semaphore_signal(done, device_id=other)
            elif word == "wait":
                pl.semaphore_wait(done, decrement=decrement)
            else:
                pl.when(first)(steps[word])

    def call(x):
        scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR]
        kwargs = dict(grid=(blocks,), grid_names=("b",), scratch_types=scratch)
        return plgpu.kernel(kernel, out_type=x, **kwargs)(x)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.arange(256, dtype=jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, on_race=on_race)):
        y = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(x)
        return np.asarray(y), np.roll(np.asarray(x), 128)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("access", ["store", "load", "copy"])
def test_an_access_that_is_signalled_is_over(access):
    np.testing.assert_array_equal(*exchange(f"{access} signal wait"))


LATE = "{} it, and nothing makes sure that this has happened when the kernel ends on device"


@pytest.mark.parametrize("order", ["signal {} wait", "{} signal"])
@pytest.mark.parametrize(("access", "verb"), [("store", "wrote"), ("load", "reads"), ("copy", "reads")])
def test_an_access_that_nobody_knows_to_be_over_may_come_too_late(access, verb, order):
    """It comes after the signal, or nobody waits for the signal."""
    with pytest.raises(Exception, match=LATE.format(verb)):
        exchange(order.format(access))


def test_an_atomic_update_after_which_there_was_another_may_come_too_late():
    np.testing.assert_array_equal(*exchange("zero signal wait add signal wait"))
    with pytest.raises(Exception, match=LATE.format("wrote") + " 0"):
        exchange("zero signal wait add")


def test_it_is_a_warning_where_races_are():
    with pytest.warns(pl.PalladionWarning, match=LATE.format("reads")):
        exchange("signal load wait", on_race="warn")


@pytest.mark.filterwarnings("ignore:(?s).*kind. semaphore-leftover")
def test_waits_of_several_blocks_that_take_nothing_off_count_as_one():
    """Each block may have its share of the signals in mind; but one wait is not for two signals."""
    np.testing.assert_array_equal(*exchange("store signal wait", blocks=2, decrement=False))
    with pytest.raises(Exception, match=LATE.format("wrote")):
        exchange("signal store signal wait", blocks=1, decrement=False)
