"""pl.kernel and pl.core_map: functions that run on every core of a mesh; and `lax` inside kernels under shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from language.mistakes import check, collector
from palladion import tpu as pltpu

DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
X = np.arange(16 * 128, dtype=np.float32).reshape(16, 128)
TWO = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

cases, mistake = collector()


def half_each(x_ref, o_ref, sem):
    assert lax.axis_size("core") == 2
    rows = pl.ds(lax.axis_index("core") * 8, 8)
    pltpu.async_copy(x_ref.at[rows], o_ref.at[rows], sem).wait()


# --- pl.kernel --------------------------------------------------------------------------------------------------------
def test_a_kernel_is_a_call_with_a_mesh():
    jaxpr = jax.make_jaxpr(pl.kernel(half_each, jax.typeof(jnp.asarray(X)), mesh=TWO, scratch_types=[DMA]))(X)
    (eqn,) = jaxpr.eqns
    assert eqn.primitive is pl.pallas_call_p
    assert eqn.params["mesh"] == TWO and eqn.params["grid_mapping"].grid == (2,)
    refs = [v.aval for v in eqn.params["jaxpr"].invars]
    assert [(r.shape, r.memory_space) for r in refs] == [
        ((16, 128), pl.ANY),
        ((16, 128), pl.ANY),
        ((), pltpu.SEMAPHORE),
    ]
    index = eqn.params["jaxpr"].eqns[0]
    assert index.primitive is lax.axis_index_p and index.params["axis_name"] == "core"


def test_a_kernel_runs_core_after_core_in_the_reference_interpreter():
    call = pl.kernel(half_each, jax.ShapeDtypeStruct(X.shape, X.dtype), mesh=TWO, scratch_types=[DMA], interpret=True)
    np.testing.assert_array_equal(call(X), X)
    np.testing.assert_array_equal(jax.vmap(call)(np.stack([X, -X])), np.stack([X, -X]))


def test_a_kernel_as_a_decorator_with_several_outputs_and_named_scratch():
    types = {"low": jax.ShapeDtypeStruct((8, 128), jnp.float32), "high": pltpu.VMEM((8, 128), jnp.float32)}

    @pl.kernel(out_type=types, mesh=TWO, scratch_types={"sem": DMA}, interpret=True, name="halves")
    def halves(x_ref, out, *, sem):
        assert jax.typeof(out["low"]).memory_space is pl.ANY
        assert jax.typeof(out["high"]).memory_space is pltpu.VMEM
        for core, name in enumerate(("low", "high")):

            @pl.when(lax.axis_index("core") == core)
            def _(core=core, name=name):
                pltpu.async_copy(x_ref.at[pl.ds(8 * core, 8)], out[name], sem).wait()

    got = halves(X)
    np.testing.assert_array_equal(got["low"], X[:8])
    np.testing.assert_array_equal(got["high"], X[8:])
    assert halves.__name__ == "halves"


def test_first_core_and_barrier_of_one_core():
    @pl.kernel(out_type=jax.ShapeDtypeStruct((2,), jnp.int32), mesh=TWO, interpret=True)
    def first(o_ref):
        o_ref[1 - lax.axis_index("core")] = 7

        @pltpu.run_on_first_core("core")
        def _():
            o_ref[0] = 5

    np.testing.assert_array_equal(first(), [7, 7])  # core 1 comes after core 0
    one = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    @pl.kernel(out_type=jax.ShapeDtypeStruct((), jnp.int32), mesh=one, scratch_types=[REGULAR], interpret=True)
    def alone(o_ref, sem):
        pltpu.core_barrier(sem, core_axis_name="core")
        o_ref[...] = lax.axis_index("core") + 1

    assert alone() == 1


def test_a_barrier_signals_every_other_core_and_waits():
    def kernel(o_ref, sem):
        pltpu.core_barrier(sem, core_axis_name="core")

    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=3)
    call = pl.kernel(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), mesh=mesh, scratch_types=[REGULAR], interpret=True)
    text = str(jax.make_jaxpr(call)())
    assert text.count("semaphore_signal") == 3 and "device {'core': 2:i32[]}" in text
    assert "semaphore_wait[decrement=True]" in text and "2:i32[]" in text.split("semaphore_wait")[1]
    with pytest.raises(pl.UnsupportedPrimitive, match="semaphore_signal to another device") as caught:
        call()
    assert "the simulated TPU" in caught.value.supported_by


def test_get_global_gives_a_ref_of_the_whole_call():
    def kernel(o_ref):
        sem = pl.get_global(REGULAR)
        pl.when(lax.axis_index("core") == 0)(lambda: pl.semaphore_signal(sem))

    call = pl.kernel(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), mesh=TWO, interpret=True)
    assert "Ref<semaphore_mem>{sem[]} = get_global" in str(jax.make_jaxpr(call)())
    with pytest.raises(pl.UnsupportedPrimitive, match="get_global"):
        call()


# --- pl.core_map ------------------------------------------------------------------------------------------------------
def copied_by_run_state(x):
    def body(refs):
        x_ref, y_ref = refs

        @pl.core_map(TWO, interpret=True, scratch_shapes=[DMA])
        def _(sem):
            half_each(x_ref, y_ref, sem)

    return pl.run_state(body)((x, jnp.zeros_like(x)))[1]


def copied_by_new_ref(x):
    x_ref, y_ref, rows = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x)), x[0, 0].astype(int) + 8

    @pl.core_map(TWO, interpret=True, scratch_shapes={"sem": DMA})
    def _(*, sem):
        part = pl.ds(lax.axis_index("core") * rows, 8)  # `rows` is a value that the function closes over
        pltpu.async_copy(x_ref.at[part], y_ref.at[part], sem).wait()

    return y_ref[...]


@pytest.mark.parametrize("program", [copied_by_run_state, copied_by_new_ref])
def test_core_map_changes_refs_that_it_closes_over(program):
    np.testing.assert_array_equal(jax.jit(program)(X), X)
    np.testing.assert_array_equal(program(jnp.asarray(X)), X)


def test_core_map_knows_what_it_writes():
    def body(refs):
        @pl.core_map(TWO, interpret=True)
        def _():
            refs[1][...] = refs[0][...] + 1

    jaxpr = jax.make_jaxpr(lambda x: pl.run_state(body)((x, x)))(X)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive is pl.pallas_call_p]
    assert eqn.params["input_output_aliases"] == ((1, 0),)
    assert eqn.params["mesh"] == TWO and len(eqn.params["out_avals"]) == 1


# --- named axes of a shard_map ----------------------------------------------------------------------------------------
def test_axis_names_of_a_shard_map_trace_to_equations():
    def kernel(x_ref, o_ref):
        assert lax.axis_size("x") == 4
        o_ref[...] = x_ref[...] + lax.axis_index("x")

    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), interpret=True)
    for check_vma in (True, False):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=check_vma)
        text = str(jax.make_jaxpr(mapped)(jnp.arange(8)))
        assert "axis_index[axis_name=x]" in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_names_of_a_shard_map_have_values_in_the_reference_interpreter(check_vma):
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.psum(x_ref[...], "x") + lax.axis_index("x") + lax.axis_size("x")

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), interpret=True)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(call, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=check_vma)
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(2)), [1, 2])


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(TypeError, "The mesh of pl.kernel cannot be 2 (int).")
def a_number_as_a_mesh():
    pl.kernel(half_each, X, mesh=2)  # here


@mistake(TypeError, "The mesh of pl.core_map is one of cores in a device, not of devices.")
def a_mesh_of_devices():
    pl.core_map(jax.make_mesh((1,), ("x",)))  # here


@mistake(ValueError, "pltpu.run_on_first_core: 'cores' is not an axis of the kernel's core mesh.", axes="'core'")
def an_unknown_core_axis():
    def kernel(o_ref):
        pltpu.run_on_first_core("cores")(lambda: None)  # here

    pl.kernel(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), mesh=TWO)()


@mistake(ValueError, "pl.program_id(0): the grid of kernel has no axes.", grid="()")
def a_program_id_on_cores():
    def kernel(o_ref):
        pl.program_id(0)  # here

    pl.kernel(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), mesh=TWO)()


@mistake(
    NotImplementedError,
    "pl.kernel does not run under interpret=pl.EagerParams(): cores are no programs of a grid.",
)
def a_kernel_run_eagerly():
    pl.kernel(half_each, X, mesh=TWO, interpret=pl.EagerParams())  # here


@pytest.mark.parametrize("case", cases)
def test_mistakes(case):
    check(case)


def test_core_map_refuses_a_result():
    with pytest.raises(ValueError, match="should return None"):
        pl.core_map(TWO)(lambda: 1)


def test_several_bodies_are_later_work():
    with pytest.raises(pl.TargetNotBuilt, match="several bodies"):
        pl.kernel([half_each, half_each], X, mesh=[TWO, TWO])
