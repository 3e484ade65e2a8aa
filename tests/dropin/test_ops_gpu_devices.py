"""JAX's Mosaic GPU kernels over several devices.

All of them leave semaphores above zero: they wait without taking off.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dropin.gpu_ops import (
    BF16,
    F16,
    F32,
    SCHEDULES,
    M,
    along,
    close,
    exact,
    finding,
    integers,
    machine,
    mended,
    normal,
    on_devices,
    ops,
    tuning,
    warned,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("installed")

LEFT_OVER = "semaphore-leftover"


def collective(module, devices, dtype=F16, m=256, n=256, k=192, **config):
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    call = functools.partial(module.all_gather_lhs_matmul, axis_name="x", config=tuning(module, **config), dtype=dtype)
    call = on_devices(call, devices, (P("x", None), P(None, "x")), P(None, "x"))

    def run():
        with pytest.MonkeyPatch.context() as patch:  # it wants to run on all devices that there are
            patch.setattr(jax, "device_count", lambda: devices)
            patch.setattr(jax, "local_device_count", lambda: devices)
            return call(a, b)

    return run, exact(a) @ exact(b)


def collective_matmul(**given):
    call, want = collective(ops("collective_matmul"), 2, **given)
    close(warned(call, LEFT_OVER), want)


COLLECTIVE = [{}, dict(wg=M, dtype=BF16, max_concurrent_steps=4, k=320, grid_tile_width=2, m=512)]


@pytest.mark.parametrize("config", COLLECTIVE, ids=str)
def test_collective_matmul(config):
    with machine():
        collective_matmul(**config)


def test_collective_matmul_takes_signals_for_later_steps_for_those_of_this_one():
    """Its blocks signal once a step on one semaphore, and the receiver counts: that two blocks have signalled may be
    one of them in two steps. Two devices have one step. Mended: a semaphore for each step."""
    sizes = dict(m=512, n=512, k=128)
    wait = "received_sem, value=(device_offset + 1) * num_sms"
    one_for_each_step = (
        ("get_global(plgpu.SemaphoreType.REGULAR)", "get_global(plgpu.SemaphoreType.REGULAR((num_devices - 1,)))"),
        ("received_sem, device_id", "received_sem.at[device_offset], device_id"),
        (wait, "received_sem.at[device_offset], value=num_sms"),
    )
    with machine(num_sms=2):
        call, _ = collective(ops("collective_matmul"), 4, **sizes)
        finding(call, "missing-wait", "plgpu.copy_smem_to_gmem(a_smem, send_ref")
        call, want = collective(mended("collective_matmul", *one_for_each_step), 4, **sizes)
        close(warned(call, LEFT_OVER), want)


def all_gather(shape, axis, dtype, **options):
    x = normal(*shape, dtype=dtype) if jnp.issubdtype(dtype, jnp.floating) else integers(*shape, dtype=dtype)
    call = functools.partial(ops("all_gather").all_gather, axis_name="x", gather_dimension=axis, **options)
    call = on_devices(call, 2, along(axis, len(shape)), P())
    np.testing.assert_array_equal(warned(lambda: call(x), LEFT_OVER), x)


GATHERS = [((64, 128), 0, F32, {}), ((4, 8, 256), 1, BF16, {}), ((16, 256), 1, jnp.int32, dict(tile_size=256))]


@pytest.mark.parametrize(("shape", "axis", "dtype", "options"), GATHERS)
def test_all_gather(shape, axis, dtype, options):
    with machine():
        all_gather(shape, axis, dtype, **options)


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor}  # fmt: skip


def reduce_scatter(shape, axis, dtype, reduction="add", **options):
    floating = jnp.issubdtype(dtype, jnp.floating)
    x = (normal if floating else integers)(2, *shape, dtype=dtype)

    def each(x):
        function = ops("reduce_scatter").reduce_scatter
        return function(x[0], axis_name="x", scatter_dimension=axis, reduction=reduction, **options)

    call = on_devices(each, 2, P("x"), along(axis, len(shape)))
    out = warned(lambda: call(x), LEFT_OVER)
    want = REDUCTIONS[reduction](*(exact(x) if floating else np.asarray(x)))
    close(out, want) if floating else np.testing.assert_array_equal(out, want)


SCATTERS = [
    ((64, 128), 0, F32, "add", {}),
    ((64, 128), None, F32, "add", {}),  # an all-reduce
    ((4, 8, 256), 1, BF16, "max", {}),
    ((4, 8, 256), 2, F16, "min", dict(num_blocks=3)),
    ((16, 256), 0, jnp.int32, "xor", dict(tile_size=256)),
    ((16, 256), 0, jnp.int32, "and", {}),
    ((16, 256), 0, jnp.int32, "or", {}),
]


@pytest.mark.parametrize(("shape", "axis", "dtype", "reduction", "options"), SCATTERS)
def test_reduce_scatter(shape, axis, dtype, reduction, options):
    with machine():
        reduce_scatter(shape, axis, dtype, reduction, **options)


EACH = {
    "collective": functools.partial(collective_matmul, wg=M),
    "all_gather": functools.partial(all_gather, (16, 128), 0, F32, num_blocks=4),
    "reduce_scatter": functools.partial(reduce_scatter, (16, 128), 0, F32, num_blocks=4),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EACH)
def test_under_other_schedules(name, schedule):
    with machine(schedule=schedule):
        EACH[name]()
