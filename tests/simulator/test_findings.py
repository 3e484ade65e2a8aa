"""What the simulated TPU finds: each kind of fault is provoked, and a close relative that is right stays silent."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
HBM = pl.BlockSpec(memory_space=pl.ANY)
VMEM = pltpu.VMEM((8, 128), jnp.float32)
DMA = pltpu.SemaphoreType.DMA
RACES = dict(detect_races=True)


def run(kernel, *scratch, x=X, in_spec=HBM, out_spec=HBM, grid=(), out=None, compiler_params=None, **params):
    call = pl.pallas_call(
        kernel,
        out or jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=grid,
        in_specs=[in_spec],
        out_specs=out_spec,
        scratch_shapes=scratch,
        compiler_params=compiler_params,
        interpret=pltpu.InterpretParams(**params),
    )
    return call(x)


def finding(kind, *args, words=None, **params):
    with pytest.raises(KernelFinding, match=words) as caught:
        run(*args, **params)
    found = caught.value.finding
    assert found.kind == kind
    assert found.where is None or "test_findings.py" in found.where
    return found


# --- races of a copy with the kernel ----------------------------------------------------------------------------------
def copy_then(early):
    def kernel(x_ref, o_ref, v, sem):
        copy = pltpu.make_async_copy(x_ref, v, sem)
        copy.start()
        if early:
            v[0, :] = v[0, :] * 2
        copy.wait()
        if not early:
            v[0, :] = v[0, :] * 2
        pltpu.sync_copy(v, o_ref)

    return kernel


def test_destination_read_before_the_wait():
    found = finding("race", copy_then(True), VMEM, DMA, words="Race on v", **RACES)
    assert found.where.count("test_findings.py") == 2  # both lines


def test_destination_read_after_the_wait():
    out = run(copy_then(False), VMEM, DMA, **RACES)
    np.testing.assert_array_equal(out, np.concatenate([X[:1] * 2, X[1:]]))


def overwrite(early):
    def kernel(x_ref, o_ref, v, sem):
        pltpu.sync_copy(x_ref, v)
        copy = pltpu.make_async_copy(v, o_ref, sem)
        copy.start()
        if early:
            v[...] = jnp.zeros_like(v)
        copy.wait()
        v[...] = jnp.zeros_like(v)

    return kernel


def test_source_overwritten_before_the_wait():
    finding("race", overwrite(True), VMEM, DMA, words="Race on v", **RACES)


def test_source_overwritten_after_the_wait():
    np.testing.assert_array_equal(run(overwrite(False), VMEM, DMA, **RACES), X)


def test_a_source_may_be_read_while_it_is_copied():
    def kernel(x_ref, o_ref, v, w, sem):
        pltpu.sync_copy(x_ref, v)
        copy = pltpu.make_async_copy(v, w, sem)
        copy.start()
        total = jnp.sum(v[...])
        copy.wait()
        w[...] = w[...] + total * 0
        pltpu.sync_copy(w, o_ref)

    np.testing.assert_array_equal(run(kernel, VMEM, VMEM, DMA, **RACES), X)


def test_two_copies_into_halves_and_into_one_place():
    def kernel(overlap):
        def two(x_ref, o_ref, sems):
            rows = pl.ds(3 if overlap else 4, 4)
            first = pltpu.make_async_copy(x_ref.at[pl.ds(0, 4)], o_ref.at[pl.ds(0, 4)], sems.at[0])
            second = pltpu.make_async_copy(x_ref.at[rows], o_ref.at[rows], sems.at[1])
            first.start()
            second.start()
            first.wait()
            second.wait()

        return two

    np.testing.assert_array_equal(run(kernel(False), DMA((2,)), **RACES), X)
    finding("race", kernel(True), DMA((2,)), words="Race on o_ref", **RACES)


def test_a_race_may_be_a_warning():
    with pytest.warns(pl.PalladionWarning, match="Race on v") as caught:
        run(copy_then(True), VMEM, DMA, on_race="warn", **RACES)
    assert caught[0].filename.endswith("test_findings.py")


# --- races of cores ---------------------------------------------------------------------------------------------------
PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel",))


@pytest.mark.parametrize("parallel", [True, False])
def test_two_cores_write_one_block(parallel):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    rows = pl.BlockSpec((2, 128), lambda i: (i, 0))
    one = pl.BlockSpec((2, 128), lambda i: (0, 0))
    options = dict(in_spec=rows, out_spec=one, grid=(4,), num_cores_or_threads=2, **RACES)
    options |= dict(out=jax.ShapeDtypeStruct((2, 128), jnp.float32))
    if parallel:
        finding("race", kernel, compiler_params=PARALLEL, words="core [01]", **options)
    else:
        np.testing.assert_array_equal(run(kernel, **options), X[6:])


def test_two_cores_write_their_own_blocks_and_read_the_same_one():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[0:2] + lax.convert_element_type(pl.program_id(0), jnp.float32)

    rows = pl.BlockSpec((2, 128), lambda i: (i, 0))
    out = run(
        kernel, in_spec=pl.BlockSpec((8, 128), lambda i: (0, 0)), out_spec=rows, grid=(4,),
        compiler_params=PARALLEL, num_cores_or_threads=2, **RACES,
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.concatenate([X[:2] + k for k in range(4)]))


# --- semaphores -------------------------------------------------------------------------------------------------------
def test_a_copy_that_is_never_waited_for():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    finding("missing-wait", kernel, DMA, words="never waited for")


def test_a_copy_in_a_scope_that_is_never_waited_for():
    def kernel(x_ref, o_ref):
        pl.run_scoped(lambda sem: pltpu.make_async_copy(x_ref, o_ref, sem).start(), DMA)

    finding("missing-wait", kernel, words="never waited for")


def test_a_semaphore_that_does_not_end_at_zero():
    def kernel(count):
        def signal(x_ref, o_ref, sem):
            pl.semaphore_signal(sem, 2)
            pl.semaphore_wait(sem, count)
            pltpu.sync_copy(x_ref, o_ref)

        return signal

    finding("semaphore-leftover", kernel(1), pltpu.SemaphoreType.REGULAR, words="ends at 1")
    np.testing.assert_array_equal(run(kernel(2), pltpu.SemaphoreType.REGULAR), X)
    relaxed = pltpu.CompilerParams(disable_semaphore_checks=True)
    run(kernel(1), pltpu.SemaphoreType.REGULAR, compiler_params=relaxed)


def test_a_wait_that_nobody_signals():
    def kernel(x_ref, o_ref, sem):
        pl.semaphore_signal(sem, 1)
        pl.semaphore_wait(sem, 2)

    found = finding("deadlock", kernel, pltpu.SemaphoreType.REGULAR, words="to reach 2 .it is 1.")
    assert "last signalled at" in found.hint


def test_a_wait_for_a_copy_that_was_not_started():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    found = finding("deadlock", kernel, DMA, words="4096 bytes")
    assert "nobody ever signalled sem" in found.hint


# --- bounds -----------------------------------------------------------------------------------------------------------
def rows_at(start, size, write=False):
    def kernel(x_ref, o_ref):
        at = pl.ds(pl.program_id(0) + start, size)
        if write:
            o_ref[at, :] = x_ref[0:size, :]
        else:
            o_ref[...] = jnp.zeros_like(o_ref)
            o_ref[0:size, :] = x_ref[at, :]

    return kernel


BLOCK = pl.BlockSpec((8, 128), lambda i: (0, 0))
INSIDE = dict(in_spec=BLOCK, out_spec=BLOCK, grid=(1,))


@pytest.mark.parametrize("write", [False, True])
def test_run_time_indices_out_of_bounds(write):
    finding("out-of-bounds", rows_at(6, 3, write), words=r"pl.ds\(6, 3\) in dimension 0", **INSIDE)
    run(rows_at(5, 3, write), **INSIDE)


def test_a_read_out_of_bounds_may_give_what_is_not_initialised():
    out = run(rows_at(6, 3), out_of_bounds_reads="uninitialized", **INSIDE)
    np.testing.assert_array_equal(out[:3], np.concatenate([X[6:], np.full((1, 128), np.nan)]))


def test_a_copy_out_of_bounds():
    def kernel(start):
        def copy(x_ref, o_ref, sem):
            begin = jnp.int32(start) + pl.num_programs(0) - 1
            pltpu.sync_copy(x_ref.at[pl.ds(begin, 4)], o_ref.at[pl.ds(0, 4)])
            pltpu.sync_copy(x_ref.at[pl.ds(4, 4)], o_ref.at[pl.ds(4, 4)])

        return copy

    finding("out-of-bounds", kernel(5), DMA, words="copy from", grid=(1,))
    run(kernel(4), DMA, grid=(1,))


# --- memory -----------------------------------------------------------------------------------------------------------
def accumulate(first):
    def kernel(x_ref, o_ref):
        if first:

            @pl.when(pl.program_id(1) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    return kernel


SUMS = dict(
    in_spec=pl.BlockSpec((2, 128), lambda i, j: (2 * i + j, 0)),
    out_spec=pl.BlockSpec((2, 128), lambda i, j: (i, 0)),
    grid=(2, 2),
    out=jax.ShapeDtypeStruct((4, 128), jnp.float32),
)


def test_an_accumulator_that_is_not_initialised():
    finding("uninitialized-read", accumulate(False), uninitialized_reads="raise", **SUMS)
    out = run(accumulate(True), uninitialized_reads="raise", **SUMS)
    np.testing.assert_array_equal(out, np.concatenate([X[0:2] + X[2:4], X[4:6] + X[6:8]]))


def test_a_block_that_is_visited_again():
    swapped = SUMS | dict(out_spec=pl.BlockSpec((2, 128), lambda i, j: (j, 0)))
    finding("revisited-block", accumulate(True), words="Revisited block", **swapped)


def test_vmem_that_does_not_suffice():
    whole = dict(in_spec=BLOCK, out_spec=BLOCK, grid=(2,), uninitialized_memory="zero")

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    finding("vmem-overflow", kernel, vmem_limit=15 << 10, **whole)  # 2 operands, 2 buffers of 4 KiB each
    np.testing.assert_array_equal(run(kernel, vmem_limit=16 << 10, **whole), X)
    big = jnp.zeros((8192, 4096))  # 128 MiB
    everything = pl.BlockSpec((8192, 4096), lambda i: (0, 0))
    sizes = dict(x=big, in_spec=everything, out_spec=everything, grid=(2,))
    finding("vmem-overflow", kernel, chip="v5e", **sizes)


def test_hbm_is_reached_only_by_copies():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    with pytest.raises(ValueError, match="lies in HBM"):
        run(kernel)


# --- going on ---------------------------------------------------------------------------------------------------------
def test_after_a_finding_the_next_call_works():
    for _ in range(2):
        finding("race", copy_then(True), VMEM, DMA, **RACES)
        run(copy_then(False), VMEM, DMA, **RACES)


def test_under_jit_the_message_survives():
    call = jax.jit(lambda x: run(copy_then(True), VMEM, DMA, x=x, **RACES))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call(X))
    text = str(caught.value)
    assert "KernelFinding: Race on v" in text
    assert text.count("test_findings.py") >= 2
    assert "fix: wait for the copy" in text


def test_explore_finds_what_one_schedule_does_not():
    def kernel(x_ref, o_ref, v, sems):
        # Right only if the first copy completes before the second: nothing makes it.
        one = pltpu.make_async_copy(x_ref.at[0], v.at[0], sems.at[0])
        two = pltpu.make_async_copy(x_ref.at[1], v.at[0], sems.at[1])
        one.start()
        two.start()
        one.wait()
        two.wait()
        pl.debug_check(v[0, 0] == 128.0, "the second copy came last")
        pltpu.sync_copy(v, o_ref)

    with pl.enable_debug_checks(True):
        run(kernel, VMEM, DMA((2,)))
        with pytest.raises(pl.KernelCheckError, match="the second copy came last"):
            run(kernel, VMEM, DMA((2,)), explore=20)


@pytest.mark.parametrize("schedule", ["eager", "lazy", 0, 1, 2, 3])
def test_a_right_kernel_is_right_under_every_schedule(schedule):
    out = run(copy_then(False), VMEM, DMA, schedule=schedule, **RACES)
    np.testing.assert_array_equal(out[1:], X[1:])


# --- other parameters -------------------------------------------------------------------------------------------------
def test_logging_says_what_happens(capsys):
    def kernel(x_ref, o_ref, sem, ready):
        pl.semaphore_signal(ready, 2)
        pl.semaphore_wait(ready, 2)
        pltpu.make_async_copy(x_ref, o_ref, sem).start()
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    scratch = DMA, pltpu.SemaphoreType.REGULAR
    run(kernel, *scratch, logging_mode=pltpu.LoggingMode.SEMAPHORE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1].split(" (")[0] for line in lines] == [
        "signals ready", "waits for ready", "waits for sem",
    ]  # fmt: skip
    run(kernel, *scratch, logging_mode=pltpu.LoggingMode.SHARED_MEMORY)
    assert "starts the copy of x_ref" in capsys.readouterr().out
    run(kernel, *scratch)
    assert not capsys.readouterr().out


def test_hbm_in_run_scoped_is_asked_for():
    def kernel(x_ref, o_ref):
        def scope(tmp):
            pltpu.sync_copy(x_ref, tmp)
            pltpu.sync_copy(tmp, o_ref)

        pl.run_scoped(scope, pltpu.HBM((8, 128), jnp.float32))

    with pytest.raises(ValueError, match="in HBM"):
        run(kernel)
    np.testing.assert_array_equal(run(kernel, allow_hbm_allocation_in_run_scoped=True), X)


def test_skipping_floating_point_moves_data_all_the_same():
    def kernel(x_ref, o_ref, v, sem):
        pltpu.sync_copy(x_ref, v)
        v[0, :] = v[0, :] * 2
        pltpu.sync_copy(v, o_ref)

    out = run(kernel, VMEM, DMA, skip_floating_point_ops=True)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], X[1:])


def test_a_block_outside_the_array_is_a_finding_and_no_warning():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    offsets = pl.BlockSpec((2, 128), lambda i: (2 * i, 0))  # elements, where block numbers are meant
    rows = pl.BlockSpec((2, 128), lambda i: (i, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding("out-of-bounds", kernel, in_spec=offsets, out_spec=rows, grid=(4,))
