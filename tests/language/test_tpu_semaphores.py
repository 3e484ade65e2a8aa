"""Semaphores: their types and equations, their meaning on one core, device ids, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from language.mistakes import check, collector
from palladion import jaxlink
from palladion import tpu as pltpu
from palladion.language import semaphores

DMA, REGULAR, BARRIER = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.BARRIER
OUT = jax.ShapeDtypeStruct((4,), jnp.int32)
MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))

cases, mistake = collector()


def call(kernel, scratch=(REGULAR,), interpret=True):
    return pl.pallas_call(kernel, OUT, scratch_shapes=list(scratch), interpret=interpret)


def traced(kernel, scratch=(REGULAR,)):
    return jax.make_jaxpr(call(kernel, scratch))().eqns[0].params["jaxpr"]


def operands(kernel, *scratch):
    """Those of the kernel's last equation."""
    eqn = traced(kernel, scratch or (REGULAR,)).eqns[-1]
    return jax.tree.unflatten(eqn.params["tree"], eqn.invars), eqn


# --- types ------------------------------------------------------------------------------------------------------------
def test_refs_print_their_kind():
    def kernel(o_ref, a, b, c):
        pl.run_scoped(lambda d: pl.semaphore_signal(d.at[1]), REGULAR((3,)))

    text = str(traced(kernel, [REGULAR, DMA((2,)), BARRIER]))
    for shown in ("{sem[]}", "{dma_sem[2]}", "{barrier_sem[]}", "Ref<semaphore_mem>{sem[3]}"):
        assert shown in text


def test_types_say_what_they_are():
    assert jnp.issubdtype(DMA.dtype, pltpu.dma_semaphore)
    assert jnp.issubdtype(REGULAR.dtype, pl.semaphore)
    assert not jnp.issubdtype(DMA.dtype, pl.semaphore)
    assert DMA((2,)).shape == (2,) and DMA((2,)).memory_space is pltpu.SEMAPHORE
    assert pltpu.SEMAPHORE((2,), pltpu.dma_semaphore) == DMA((2,))
    with pytest.raises(ValueError, match="cannot be negative"):
        DMA((-1,))


# --- equations --------------------------------------------------------------------------------------------------------
def test_a_signal_holds_value_device_and_core():
    def kernel(o_ref, sems):
        pl.semaphore_signal(sems.at[1], 3, device_id={"x": 1}, core_index=2)

    signal, eqn = operands(kernel, REGULAR((2,)))
    assert isinstance(signal, semaphores.Signal)
    assert signal.sem.ref is eqn.invars[0]
    assert [v.val for v in (signal.value, signal.device_id["x"], signal.core_index)] == [3, 1, 2]
    assert semaphores.communication in eqn.effects


def test_a_wait_says_statically_whether_it_decrements():
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem, 2)
        pl.semaphore_wait(sem, 2, decrement=False)

    wait, eqn = operands(kernel)
    assert wait.decrement is False and wait.value.val == 2
    assert semaphores.communication not in eqn.effects
    assert jaxlink.written_vars(eqn) == {eqn.invars[0]}


def test_the_barrier_semaphore_works_in_control_flow():
    def kernel(o_ref):
        barrier = pltpu.get_barrier_semaphore()

        @pl.loop(0, 3)
        def _(i):
            pl.semaphore_signal(barrier, device_id=i)

        pl.semaphore_wait(barrier, 3)

    jaxpr = traced(kernel, [])
    assert str(jaxpr.eqns[0].outvars[0].aval) == "Ref<semaphore_mem>{barrier_sem[]}"
    assert jaxpr.eqns[-1].invars[0] is jaxpr.eqns[0].outvars[0]


@pytest.mark.parametrize(
    ("device_id", "axes"),
    [
        ({"y": 1}, ["y"]),
        ({"y": 1, "x": 0}, ["x", "y"]),
        ({("x", "y"): 5}, [("x", "y")]),
        ((1, 3), None),
        ([1, 3], None),
    ],
)
def test_device_ids_of_a_mesh(device_id, axes):
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem, device_id=device_id)

    found = {}

    def f():
        found["signal"], _ = operands(kernel)
        return jnp.zeros(())

    jax.make_jaxpr(jax.shard_map(f, mesh=MESH, in_specs=(), out_specs=jax.P(), check_vma=False))()
    device = found["signal"].device_id
    if axes is None:
        assert [v.val for v in device] == [1, 3]
    else:
        assert list(device) == axes


# --- on one core ------------------------------------------------------------------------------------------------------
def test_semaphores_count():
    def kernel(o_ref, sems):
        pl.semaphore_signal(sems.at[1], 5)
        o_ref[0] = pl.semaphore_read(sems.at[1])
        pl.semaphore_wait(sems.at[1], 2)
        o_ref[1] = pl.semaphore_read(sems.at[1])
        pl.semaphore_wait(sems.at[1], 3, decrement=False)
        o_ref[2] = pl.semaphore_read(sems.at[1])
        o_ref[3] = pl.semaphore_read(sems.at[0])

    np.testing.assert_array_equal(call(kernel, [REGULAR((2,))])(), [5, 3, 3, 0])


def test_a_wait_that_no_one_satisfies_is_an_error_at_its_line():
    def kernel(o_ref, sem):
        @pl.loop(0, 4)
        def _(i):
            pl.semaphore_signal(sem, 1 - i)
            pl.semaphore_wait(sem)

    with pytest.raises(pl.KernelCheckError, match=r"A wait for 1 on sem \(scratch 0\), which holds 0") as caught:
        call(kernel)()
    assert f"{__file__.rsplit('/', 1)[-1]}:" in str(caught.value)


def test_cores_and_devices_need_a_machine():
    def core(o_ref, sem):
        pl.semaphore_signal(sem, core_index=1)

    def barrier(o_ref, sem):
        pltpu.get_barrier_semaphore()
        pl.semaphore_signal(pltpu.get_barrier_semaphore())

    for kernel in (core, barrier):
        with pytest.raises(pl.UnsupportedPrimitive) as caught:
            call(kernel)()
        assert "the simulated TPU" in caught.value.supported_by


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(TypeError, "Cannot read sem (scratch 0): it is a semaphore, not data.")
def read_as_data():
    def kernel(o_ref, sem):
        o_ref[0] = sem[...]  # here

    call(kernel)()


@mistake(TypeError, "Cannot write sem (scratch 0): it is a semaphore, not data.")
def written_as_data():
    def kernel(o_ref, sem):
        sem[...] = 1  # here

    call(kernel)()


@mistake(TypeError, "The operation `get` on sem (scratch 0): it is a semaphore, not data.")
def read_by_jax():
    def kernel(o_ref, sem):
        jax.ref.get(sem)  # here

    call(kernel)()


@mistake(TypeError, "pl.semaphore_signal cannot signal sem (scratch 0), a dma_sem.")
def signal_of_a_copys_semaphore():
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem)  # here

    call(kernel, [DMA])()


@mistake(TypeError, "pl.semaphore_wait takes a semaphore, not the Ref o_ref (output 0), which holds int32.")
def a_wait_for_data():
    def kernel(o_ref, sem):
        pl.semaphore_wait(o_ref)  # here

    call(kernel)()


@mistake(ValueError, "pl.semaphore_read takes one semaphore; sems (scratch 0) is an array of shape (2,).")
def an_array_of_semaphores():
    def kernel(o_ref, sems):
        pl.semaphore_read(sems)  # here

    call(kernel, [REGULAR((2,))])()


@mistake(TypeError, "The inc of pl.semaphore_signal is 1.5 (float); it must be an integer.")
def a_fraction():
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem, 1.5)  # here

    call(kernel)()


@mistake(
    ValueError,
    "The device_id (1,) of pl.semaphore_signal has 1 coordinate, but the mesh has 2 axes.",
    axes="'x', 'y'",
)
def too_few_coordinates():
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem, device_id=(1,))  # here

    mapped = jax.shard_map(call(kernel), mesh=MESH, in_specs=(), out_specs=jax.P(), check_vma=False)
    jax.make_jaxpr(mapped)()


@mistake(
    ValueError,
    "The device_id of pl.semaphore_signal names the axis 'z', which is not bound in this kernel.",
    axes="'x', 'y'",
)
def an_unknown_axis():
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem, device_id={"z": 1})  # here

    mapped = jax.shard_map(call(kernel), mesh=MESH, in_specs=(), out_specs=jax.P(), check_vma=False)
    jax.make_jaxpr(mapped)()


@mistake(
    ValueError,
    "pl.semaphore_signal got a device_id with coordinates, (1, 0), and DeviceIdType.LOGICAL, which takes one integer.",
)
def coordinates_as_a_logical_id():
    def kernel(o_ref, sem):
        pl.semaphore_signal(sem, device_id=(1, 0), device_id_type=pl.DeviceIdType.LOGICAL)  # here

    call(kernel)()


@mistake(ValueError, "pltpu.get_barrier_semaphore can only be used inside a kernel; it was called outside a kernel.")
def a_barrier_outside_a_kernel():
    pltpu.get_barrier_semaphore()  # here


@pytest.mark.parametrize("case", cases)
def test_mistakes(case):
    check(case)
