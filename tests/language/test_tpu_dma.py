"""pltpu's copies: what a kernel with them traces to, what it gives in the reference interpreter, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from language.mistakes import check, collector
from palladion import jaxlink
from palladion import tpu as pltpu
from palladion.language.check import equations
from palladion.language.tpu import dma

DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
F32 = jnp.float32
X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
HBM = pl.BlockSpec(memory_space=pl.ANY)

cases, mistake = collector()


def call(kernel, scratch=(DMA,), x=X, out=None, interpret=True, **options):
    """A call whose operand and output stay in HBM."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype) if out is None else out
    return pl.pallas_call(
        kernel, out, in_specs=[HBM], out_specs=HBM, scratch_shapes=list(scratch), interpret=interpret, **options
    )


def traced(kernel, **options):
    """The kernel's jaxpr."""
    jaxpr = jax.make_jaxpr(call(kernel, **options))(X)
    return next(e.params["jaxpr"] for e in equations(jaxpr) if e.primitive is pl.pallas_call_p)


# --- equations --------------------------------------------------------------------------------------------------------
def test_the_equations_hold_views_semaphores_and_the_device():
    def kernel(x_ref, o_ref, sems):
        i = pl.semaphore_read(sems.at[0])
        copy = pltpu.make_async_remote_copy(x_ref.at[pl.ds(i, 2)], o_ref.at[0:2], sems.at[0], sems.at[1], {"x": i})
        copy.start(priority=1)
        copy.wait()

    jaxpr = traced(kernel, scratch=[DMA((2,))])
    _, start, send, recv = jaxpr.eqns
    assert [e.primitive for e in (start, send, recv)] == [dma.dma_start_p, dma.dma_wait_p, dma.dma_wait_p]
    x, o, sems = jaxpr.invars
    operands = jax.tree.unflatten(start.params["tree"], start.invars)
    assert isinstance(operands, dma.DMA)
    assert (operands.src.ref, operands.dst.ref) == (x, o)
    assert operands.src.transforms[0].indices[0].start is jaxpr.eqns[0].outvars[0]
    # dst_sem is recv_sem, which comes second in the call
    assert [s.ref for s in (operands.dst_sem, operands.src_sem)] == [sems, sems]
    assert [int(s.transforms[0].indices[0].val) for s in (operands.dst_sem, operands.src_sem)] == [1, 0]
    assert operands.device_id == {"x": jaxpr.eqns[0].outvars[0]}
    assert (start.params["priority"], start.params["add"]) == (1, False)
    assert start.params["device_id_type"] is pl.DeviceIdType.MESH
    assert [e.params["wait"] for e in (send, recv)] == ["send", "recv"]


def test_a_copy_writes_its_destination_and_a_wait_only_its_semaphore():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    def started(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    waited, moved = traced(kernel), traced(started)
    assert jaxlink.written_vars(waited) == {waited.invars[2]}
    assert jaxlink.written_vars(moved) == {moved.invars[1], moved.invars[2]}
    assert moved.invars[0] in jaxlink.read_vars(moved)


def test_a_copy_with_both_semaphores_is_waited_for_at_both_ends():
    def kernel(x_ref, o_ref, sems):
        pltpu.async_copy(x_ref, o_ref, sems.at[0], src_sem=sems.at[1]).wait()

    waits = [e.params["wait"] for e in traced(kernel, scratch=[DMA((2,))]).eqns[1:]]
    assert waits == ["send", "recv"]


def test_jaxprs_show_copies_in_words():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref.at[0:4], o_ref.at[4:8], sem).wait()

    text = str(traced(kernel))
    assert "dma_start[priority=0 add=False] a[:4,:] -> b[4:,:] dst_sem c[...]" in text
    assert "dma_wait[recv] b[4:,:] dst_sem c[...]" in text


def test_a_call_that_sends_is_kept_though_no_one_uses_its_results():
    def kernel(x_ref, o_ref, send, recv):
        pltpu.async_remote_copy(x_ref, o_ref, send, recv, 0).wait()

    def local(x_ref, o_ref, send, recv):
        pltpu.async_copy(x_ref, o_ref, send).wait()

    def calls(kernel):
        def unused(x):
            call(kernel, scratch=[DMA, DMA])(x)
            return x

        return [e for e in jax.jit(unused).trace(X).jaxpr.eqns if e.effects]

    assert len(calls(kernel)) == 1
    assert calls(local) == []


# --- in the reference interpreter -------------------------------------------------------------------------------------
def test_copies_of_views_in_a_loop():
    def kernel(x_ref, o_ref, sems):
        @pl.loop(0, 4)
        def _(i):
            rows = pl.ds(2 * i, 2)
            pltpu.async_copy(x_ref.at[rows], o_ref.at[pl.ds(6 - 2 * i, 2)], sems.at[i % 2]).wait()

    np.testing.assert_array_equal(call(kernel, [DMA((2,))])(X), X.reshape(4, 2, 128)[::-1].reshape(8, 128))


def test_a_copy_into_scratch_and_under_a_condition():
    def kernel(x_ref, o_ref, buffer, sem):
        for k in range(2):

            @pl.when(x_ref[0, 0] == k)
            def _(k=k):
                pltpu.async_copy(x_ref.at[4 * k + 3], buffer, sem).wait()

        o_ref[...] = jnp.broadcast_to(buffer[...], (8, 128))

    got = call(kernel, [pltpu.VMEM((128,), F32), DMA])(X)
    np.testing.assert_array_equal(got, np.broadcast_to(X[3], (8, 128)))


def test_copies_may_add_and_take_pytrees():
    def kernel(x_ref, o_ref, sem):
        pltpu.sync_copy({"low": x_ref.at[:4], "high": x_ref.at[4:]}, {"low": o_ref.at[4:], "high": o_ref.at[:4]})
        pltpu.sync_copy(x_ref, o_ref, add=True)

    np.testing.assert_array_equal(call(kernel)(X), np.roll(X, 4, axis=0) + X)


def test_a_transposed_view_is_copied():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref.T, o_ref, sem).wait()

    got = call(kernel, out=jax.ShapeDtypeStruct((128, 8), F32))(X)
    np.testing.assert_array_equal(got, X.T)


def test_a_destination_may_be_an_aliased_operand():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref.at[0], x_ref.at[1], sem).wait()

    got = call(kernel, input_output_aliases={0: 0})(X)
    np.testing.assert_array_equal(got, np.concatenate([X[:1], X[:1], X[2:]]))


def test_a_semaphore_goes_from_the_call_that_copies_to_the_one_that_waits():
    semaphore = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    array = jax.ShapeDtypeStruct(X.shape, X.dtype)

    def start(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref, o_ref, sem)

    def done(x_ref, y_ref, sem, o_ref):
        assert jax.typeof(sem).memory_space is pltpu.SEMAPHORE
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    first = pl.pallas_call(start, (array, DMA(())), in_specs=[HBM], out_specs=(HBM, semaphore), interpret=True)
    options = dict(in_specs=[HBM, HBM, semaphore], out_specs=HBM, input_output_aliases={1: 0})
    second = pl.pallas_call(done, array, interpret=True, **options)
    np.testing.assert_array_equal(jax.jit(lambda x: second(x, *first(x)))(X), X)
    with pytest.raises(TypeError, match="cannot leave a compiled program"):
        first(X)


def test_copies_cost_no_operations():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref, o_ref, sem).wait()
        pl.run_scoped(lambda other: pl.semaphore_signal(other), REGULAR)

    assert pl.estimate_cost(call(kernel), X).flops == 0


def test_other_executors_name_the_simulated_tpu():
    def remote(x_ref, o_ref, sem):
        pltpu.async_remote_copy(x_ref, o_ref, sem, sem, 0).wait()

    def local(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref, o_ref, sem).wait()

    with pytest.raises(pl.UnsupportedPrimitive, match="dma_start to another device") as caught:
        call(remote)(X)
    assert "the simulated TPU" in caught.value.supported_by
    with pytest.raises(pl.UnsupportedPrimitive, match="`dma_start` is not supported") as caught:
        call(local, interpret=pl.EagerParams())(X)
    assert "the simulated TPU" in caught.value.supported_by


# --- memories ---------------------------------------------------------------------------------------------------------
SPACES = [pl.ANY, pltpu.HBM, pltpu.VMEM, pltpu.SMEM]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_operands_are_refs_of_the_memory_that_their_spec_names(space):
    whole = pl.BlockSpec(memory_space=space)

    def kernel(x_ref, o_ref):
        assert jax.typeof(x_ref).memory_space is space
        assert jax.typeof(o_ref).memory_space is space
        assert x_ref.shape == o_ref.shape == (8, 128)
        pltpu.sync_copy(x_ref, o_ref)

    out = pltpu.HBM((8, 128), F32)
    got = pl.pallas_call(kernel, out, grid=(1,), in_specs=[whole], out_specs=whole, interpret=True)(X)
    np.testing.assert_array_equal(got, X)


def test_scratch_may_be_in_hbm():
    def kernel(x_ref, o_ref, buffer):
        assert jax.typeof(buffer).memory_space is pltpu.HBM
        pltpu.sync_copy(x_ref, buffer)
        pltpu.sync_copy(buffer, o_ref)

    np.testing.assert_array_equal(call(kernel, [pltpu.HBM((8, 128), F32)])(X), X)


def test_marks_and_memory_questions():
    answers = []

    def kernel(x_ref, o_ref, sem):
        answers.append((pltpu.has_memory_space(sem, pltpu.SEMAPHORE), pltpu.has_memory_space(sem, pltpu.VMEM)))
        pltpu.touch(x_ref.at[0])
        pltpu.trace_value("first", x_ref[0, 0])
        in_hbm = pltpu.has_memory_space(x_ref, pltpu.HBM)
        o_ref[...] = jnp.full((8, 128), jnp.where(in_hbm, 1.0, 2.0))

    np.testing.assert_array_equal(call(kernel)(X), np.ones((8, 128)))
    assert answers == [(True, False)]
    names = [e.primitive.name for e in traced(kernel).eqns]
    assert {"touch", "trace_value", "has_memory_space"} <= set(names)


def test_a_memory_constraint_is_the_identity_elsewhere():
    def f(x):
        return jnp.sum(pltpu.with_memory_space_constraint(x, pltpu.HBM) * 2)

    assert jax.jit(f)(X) == 2 * X.sum()
    np.testing.assert_array_equal(jax.grad(f)(X), np.full_like(X, 2))
    np.testing.assert_array_equal(jax.vmap(f)(X), 2 * X.sum(1))
    assert pltpu.with_memory_space_constraint(X, pl.ANY) is X
    with pytest.raises(NotImplementedError, match="takes HBM, VMEM, SMEM and HOST"):
        pltpu.with_memory_space_constraint(X, pltpu.SEMAPHORE)


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(
    ValueError,
    "A copy needs a source and a destination of the same shape: a view of x_ref (input 0) has (4, 128), "
    "o_ref (output 0) has (8, 128).",
)
def different_shapes():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref.at[0:4], o_ref, sem).start()  # here

    call(kernel)(X)


@mistake(
    TypeError,
    "A copy does not convert: a view of x_ref (input 0) holds int32, o_ref (output 0) holds float32.",
)
def different_dtypes():
    def kernel(x_ref, o_ref, sem):
        pltpu.sync_copy(x_ref.bitcast(jnp.int32), o_ref)  # here

    call(kernel)(X)


@mistake(TypeError, "The source of pltpu.async_copy is float32[8, 128]; it must be a Ref.")
def a_value_as_the_source():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref[...], o_ref, sem)  # here

    call(kernel)(X)


@mistake(TypeError, "pltpu.make_async_copy signals a dma_sem when it is done; sem (scratch 0) is a sem.")
def a_regular_semaphore():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem)  # here

    call(kernel, [REGULAR])(X)


@mistake(ValueError, "pltpu.make_async_copy takes one semaphore; sems (scratch 0) is an array of shape (2,).")
def an_array_of_semaphores():
    def kernel(x_ref, o_ref, sems):
        pltpu.make_async_copy(x_ref, o_ref, sems)  # here

    call(kernel, [DMA((2,))])(X)


@mistake(
    ValueError,
    "There is nothing to wait for: the copy of x_ref (input 0) to o_ref (output 0) has no sem.",
)
def a_wait_without_a_semaphore():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref, o_ref).wait()  # here

    call(kernel)(X)


@mistake(RuntimeError, "wait_send is for remote copies; this one, of x_ref (input 0), is local.")
def wait_send_of_a_local_copy():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(x_ref, o_ref, sem).wait_send()  # here

    call(kernel)(X)


@mistake(ValueError, "pltpu.make_async_remote_copy needs a device_id: the device that the copy goes to.")
def no_device():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_remote_copy(x_ref, o_ref, sem, sem, None)  # here

    call(kernel)(X)


@mistake(ValueError, "The kernel kernel writes to x_ref (input 0), which is not aliased to an output.")
def a_copy_into_an_operand():
    def kernel(x_ref, o_ref, sem):
        pltpu.async_copy(o_ref, x_ref, sem).wait()  # here

    call(kernel)(X)


@mistake(ValueError, "pltpu.make_async_copy can only be used inside a kernel; it was called outside a kernel.")
def outside_a_kernel():
    pltpu.make_async_copy(X, X)  # here


@pytest.mark.parametrize("case", cases)
def test_mistakes(case):
    check(case)
