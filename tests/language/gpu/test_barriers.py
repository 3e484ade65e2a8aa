"""Barriers: their types, what operations on them trace to, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from language.mistakes import check, collector
from palladion import mosaic_gpu as plgpu
from palladion.language import semaphores
from palladion.language.gpu import barriers
from palladion.language.gpu.refs import BarrierDType
from palladion.rules import RuleTable

X = np.zeros((8,), np.float32)
cases, mistake = collector()


def traced(body, *scratch, **options):
    """The jaxpr of a kernel with scratch Refs and no use of its operand."""
    call = plgpu.kernel(lambda x, o, *refs: body(*refs), out_type=X, scratch_types=scratch, **options)
    return jax.make_jaxpr(call)(X).jaxpr.eqns[0].params["jaxpr"]


# --- types ------------------------------------------------------------------------------------------------------------
def test_a_barrier_is_a_ref_in_smem_whose_dtype_says_how_many_arrivals_complete_it():
    ref = plgpu.Barrier(num_arrivals=3, num_barriers=2, orders_tensor_core=True).get_ref_aval()
    assert (ref.shape, ref.memory_space) == ((2,), plgpu.SMEM)
    assert ref.dtype == BarrierDType(3, True)
    assert ref.dtype != plgpu.Barrier(num_arrivals=2, orders_tensor_core=True).dtype
    assert plgpu.Barrier().shape == ()
    assert repr(plgpu.Barrier(num_barriers=3)) == "Barrier(num_arrivals=1, num_barriers=(3,), orders_tensor_core=False)"


def test_a_cluster_barrier_keeps_its_axes():
    barrier = plgpu.ClusterBarrier(collective_axes=("a", ["b", "c"]), num_barriers=(2, 3), leader_tracked=True)
    assert barrier.collective_axes == ("a", ("b", "c"))
    assert barrier.dtype.collective_axes == (("a",), ("b", "c"))
    assert barrier.dtype.leader_tracked and barrier.shape == (2, 3)
    assert plgpu.ClusterBarrier(collective_axes="a").collective_axes == ("a",)
    assert hash(barrier) == hash(
        plgpu.ClusterBarrier(collective_axes=("a", ("b", "c")), num_barriers=(2, 3), leader_tracked=True)
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: plgpu.Barrier(num_arrivals=0),
            "plgpu.Barrier: num_arrivals must be a number of arrivals of at least 1",
        ),
        (
            lambda: plgpu.Barrier(num_barriers=1.5),
            "plgpu.Barrier: num_barriers must be a number of barriers, or a tuple",
        ),
        (lambda: plgpu.Barrier(num_barriers=-1), "plgpu.Barrier: num_barriers must be"),
        (lambda: plgpu.ClusterBarrier(collective_axes=()), "plgpu.ClusterBarrier: collective_axes must be a tuple of"),
        (
            lambda: plgpu.ClusterBarrier(collective_axes=(1,)),
            "plgpu.ClusterBarrier: collective_axes must be a tuple of",
        ),
    ],
)
def test_fields_are_checked(make, words):
    with pytest.raises((TypeError, ValueError), match=words.replace("(", r"\(")):
        make()


# --- equations --------------------------------------------------------------------------------------------------------
def test_operations_trace_to_equations_with_views():
    def body(bars):
        i = lax.axis_index("wg")
        plgpu.barrier_arrive(bars.at[i], predicate=i > 0)
        done = plgpu.barrier_test(bars.at[1])
        lax.cond(done, lambda: plgpu.barrier_wait(bars.at[1]), lambda: None)
        lax.fori_loop(0, 2, lambda k, _: plgpu.barrier_arrive_and_wait(bars.at[k]), None)

    jaxpr = traced(body, plgpu.Barrier(num_barriers=2), num_threads=2, thread_name="wg")
    arrive = next(e for e in jaxpr.eqns if e.primitive is barriers.barrier_arrive_p)
    operands = jax.tree.unflatten(arrive.params["tree"], arrive.invars)
    assert operands.barrier.ref is jaxpr.invars[2]
    assert operands.barrier.transforms[0].indices[0] is jaxpr.eqns[0].outvars[0]
    assert operands.predicate is jaxpr.eqns[1].outvars[0]
    test = next(e for e in jaxpr.eqns if e.primitive is barriers.barrier_test_p)
    assert [v.aval.str_short() for v in test.outvars] == ["bool[]"]
    text = str(jaxpr)
    assert "barrier_arrive barrier c[d] predicate e" in text
    assert text.count("barrier_wait barrier") == 2 and text.count("barrier_arrive barrier") == 2


@pytest.mark.parametrize("known", [True, np.bool_(True), jnp.bool_(True)])
def test_a_predicate_that_is_known_is_no_captured_array(known):
    assert "predicate" not in str(traced(lambda b: plgpu.barrier_arrive(b, predicate=known), plgpu.Barrier()))
    never = type(known)(0) if not isinstance(known, jax.Array) else jnp.bool_(False)
    jaxpr = traced(lambda b: plgpu.barrier_arrive(b, predicate=never), plgpu.Barrier())
    assert "predicate False" in str(jaxpr) and not jaxpr.constvars


def test_a_primitive_may_be_for_several_machines():
    table = RuleTable("the machine of this test")
    both = {"the simulated TPU", "the simulated GPU"}
    assert both <= set(table.others(semaphores.semaphore_signal_p))
    assert both & set(table.others(barriers.barrier_wait_p)) == {"the simulated GPU"}


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(ValueError, "plgpu.barrier_wait takes one barrier; bars (scratch 0) is an array of shape (2,).")
def an_array_of_barriers():
    def kernel(x, o, bars):
        plgpu.barrier_wait(bars)  # here

    jax.make_jaxpr(plgpu.kernel(kernel, out_type=X, scratch_types=[plgpu.Barrier(num_barriers=2)]))(X)


@mistake(TypeError, "plgpu.barrier_arrive takes a barrier, not the Ref o (output 0), which holds float32.")
def a_ref_of_data():
    def kernel(x, o):
        plgpu.barrier_arrive(o)  # here

    jax.make_jaxpr(plgpu.kernel(kernel, out_type=X))(X)


@mistake(TypeError, "plgpu.barrier_test takes a barrier, not the type Barrier.")
def the_type_of_a_barrier():
    def kernel(x, o):
        plgpu.barrier_test(plgpu.Barrier())  # here

    jax.make_jaxpr(plgpu.kernel(kernel, out_type=X))(X)


@mistake(TypeError, "The predicate of plgpu.barrier_arrive is 1 (int); it must be a boolean scalar.")
def a_number_as_predicate():
    def kernel(x, o, bar):
        plgpu.barrier_arrive(bar, predicate=1)  # here

    jax.make_jaxpr(plgpu.kernel(kernel, out_type=X, scratch_types=[plgpu.Barrier()]))(X)


@mistake(TypeError, "pl.semaphore_signal cannot signal bar (scratch 0), a barrier.")
def a_barrier_as_a_semaphore():
    def kernel(x, o, bar):
        pl.semaphore_signal(bar)  # here

    jax.make_jaxpr(plgpu.kernel(kernel, out_type=X, scratch_types=[plgpu.Barrier()]))(X)


@mistake(
    ValueError,
    "The collective_axes of plgpu.ClusterBarrier must be cluster axes of the kernel; 'x' is none.",
    axes="'cl'",
)
def a_cluster_barrier_over_the_grid():
    def kernel(x, o, bar):
        plgpu.barrier_arrive(bar)  # here

    scratch = [plgpu.ClusterBarrier(collective_axes=("x",))]
    mesh = dict(grid=(2,), grid_names=("x",), cluster=(2,), cluster_names=("cl",))
    jax.make_jaxpr(plgpu.kernel(kernel, out_type=X, scratch_types=scratch, **mesh))(X)


@mistake(ValueError, "plgpu.barrier_wait can only be used inside a kernel; it was called outside a kernel.")
def outside_a_kernel():
    plgpu.barrier_wait(None)  # here


@pytest.mark.parametrize("case", cases)
def test_mistakes_are_explained(case):
    check(case)
