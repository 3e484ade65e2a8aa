"""plgpu's semaphores: their types, signals to one, several and all devices, and what is refused."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import palladion as pl
from language.mistakes import check, collector
from palladion import mosaic_gpu as plgpu
from palladion.errors import TargetNotBuilt
from palladion.language.check import equations
from palladion.language.gpu import semaphores
from palladion.language.semaphores import BARRIER, REGULAR, semaphore_signal_p, semaphore_wait_p

X = np.zeros((2, 128), np.float32)
cases, mistake = collector()


def traced(body, *scratch, axes=("x",), **options):
    """The jaxpr of a kernel under a shard_map over devices, which are only traced."""
    mesh = jax.sharding.AbstractMesh((2,) * len(axes), axes)
    call = plgpu.kernel(body, out_type=X, scratch_types=scratch, **options)
    jaxpr = jax.make_jaxpr(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(X)
    return next(e.params["jaxpr"] for e in equations(jaxpr) if e.primitive is pl.pallas_call_p)


def test_a_semaphore_is_a_counter_in_gmem():
    assert plgpu.Semaphore is plgpu.SemaphoreType
    for kind, dtype in ((plgpu.SemaphoreType.REGULAR, REGULAR), (plgpu.SemaphoreType.BARRIER, BARRIER)):
        ref = kind.get_ref_aval()
        assert (ref.shape, ref.dtype, ref.memory_space) == ((), dtype, plgpu.GMEM)
        assert kind((2, 3)).get_ref_aval().shape == (2, 3)


@pytest.mark.parametrize("grid", [{}, dict(grid=(4,), grid_names=("g",), num_threads=2, thread_name="wg")])
def test_an_integer_is_a_device_of_a_mesh_of_one_axis(grid):
    def body(x, o, sem):
        other = 1 - lax.axis_index("x")
        pl.semaphore_signal(sem, device_id=other)
        pl.semaphore_wait(sem)
        plgpu.semaphore_signal(sem, 2, device_id=1, memory_scope="gpu")
        plgpu.semaphore_wait(sem, 2, decrement=False)

    eqns = traced(body, plgpu.Semaphore.REGULAR, **grid).eqns
    signals = [jax.tree.unflatten(e.params["tree"], e.invars) for e in eqns if e.primitive is semaphore_signal_p]
    assert signals[0].device_id is eqns[1].outvars[0]
    assert int(signals[1].device_id.val) == 1 and int(signals[1].value.val) == 2
    waits = [jax.tree.unflatten(e.params["tree"], e.invars) for e in eqns if e.primitive is semaphore_wait_p]
    assert [w.decrement for w in waits] == [True, False]


def test_signals_to_several_devices():
    def body(x, o, sems):
        plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(sems.at[0], device_id=0),
            plgpu.SemaphoreSignal(sems.at[1], device_id={"x": 1}, inc=3),
        )
        plgpu.semaphore_signal_multicast(sems.at[1], 4, collective_axes="x")

    one, two, multi = traced(body, plgpu.SemaphoreType.REGULAR((2,))).eqns
    assert [e.primitive for e in (one, two)] == [semaphore_signal_p] * 2
    assert multi.primitive is semaphores.semaphore_signal_multicast_p
    assert multi.params["collective_axes"] == ("x",)
    assert int(jax.tree.unflatten(multi.params["tree"], multi.invars).value.val) == 4


def test_allocated_semaphores_are_the_calls():
    def body(x, o):
        pl.semaphore_signal(plgpu.alloc_semaphore((2,)).at[1])
        pl.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR))

    text = str(traced(body))
    assert "get_global[what=Ref<gmem>{sem[2]}]" in text and "get_global[what=Ref<gmem>{sem[]}]" in text
    with pytest.raises(TargetNotBuilt, match="outside a kernel"):
        plgpu.alloc_semaphore()


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(
    ValueError,
    "plgpu.semaphore_signal_multicast signals all devices: collective_axes must name every axis of the mesh, and 'y' "
    "is missing.",
)
def a_multicast_to_some():
    def kernel(x, o, sem):
        plgpu.semaphore_signal_multicast(sem, collective_axes="x")  # here

    traced(kernel, plgpu.SemaphoreType.REGULAR, axes=("x", "y"))


@mistake(ValueError, "The memory_scope of plgpu.semaphore_signal is 'cluster' (str).")
def an_unknown_scope():
    def kernel(x, o, sem):
        plgpu.semaphore_signal(sem, memory_scope="cluster")  # here

    traced(kernel, plgpu.SemaphoreType.REGULAR)


@mistake(TypeError, "plgpu.semaphore_signal_parallel takes plgpu.SemaphoreSignal objects, not a scalar sem.")
def signals_that_are_semaphores():
    def kernel(x, o, sem):
        plgpu.semaphore_signal_parallel(sem)  # here

    traced(kernel, plgpu.SemaphoreType.REGULAR)


@mistake(
    TypeError, "plgpu.semaphore_signal_multicast takes a semaphore, not the Ref o (output 0), which holds float32."
)
def a_multicast_of_data():
    def kernel(x, o):
        plgpu.semaphore_signal_multicast(o, collective_axes="x")  # here

    traced(kernel)


@pytest.mark.parametrize("case", cases)
def test_mistakes_are_explained(case):
    check(case)
