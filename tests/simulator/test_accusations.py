"""Wrong kernels are found whatever the schedule, and right ones, close relatives of these, are not accused."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)
HBM = pl.BlockSpec(memory_space=pl.ANY)
ROW = pl.BlockSpec((None, 128), lambda i: (i, 0))
VMEM = pltpu.VMEM((8, 128), jnp.float32)
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
STRICT = dict(detect_races=True, uninitialized_reads="raise")
SCHEDULES = [None, "eager", 0, 1, 2]
MESH = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)


def run(kernel, *scratch, x=X, out=LIKE, in_spec=HBM, out_spec=HBM, grid=(), compiler_params=None, **params):
    return pl.pallas_call(
        kernel,
        out,
        grid=grid,
        in_specs=[in_spec],
        out_specs=out_spec,
        scratch_shapes=scratch,
        compiler_params=compiler_params,
        interpret=pltpu.InterpretParams(**STRICT | params),
    )(x)


def on_cores(kernel, *scratch, out=LIKE, **params):
    interpret = pltpu.InterpretParams(**STRICT | params)
    return pl.kernel(kernel, out, mesh=MESH, scratch_types=scratch, interpret=interpret)(X)


# --- right and wrong kernels, under every schedule --------------------------------------------------------------------
def next_block_in_flight(one_semaphore, schedule):
    """The next program's block is fetched meanwhile; with one semaphore a wait cannot tell which of them has come."""

    def kernel(x_ref, o_ref, buffer, sem):
        i = pl.program_id(0)

        def copy(i):
            return pltpu.make_async_copy(x_ref.at[i], buffer.at[i % 2], sem.at[0 if one_semaphore else i % 2])

        @pl.when(i == 0)
        def _():
            copy(0).start()

        @pl.when(i + 1 < pl.num_programs(0))
        def _():
            copy(i + 1).start()

        copy(i).wait()
        o_ref[...] = buffer[i % 2] * 2

    scratch = pltpu.VMEM((2, 128), jnp.float32), DMA((2,))
    np.testing.assert_array_equal(run(kernel, *scratch, grid=(8,), out_spec=ROW, schedule=schedule), X * 2)


def copies_on_one_semaphore(too_early, schedule):
    """Eight copies on one semaphore: only the last wait says that a particular one is done."""

    def kernel(x_ref, o_ref, v, sem):
        copies = [pltpu.make_async_copy(x_ref.at[i], v.at[i], sem) for i in range(8)]
        for copy in copies:
            copy.start()
        for copy in copies[:7]:
            copy.wait()
        if too_early:
            v[0] = v[0] * 2
        copies[7].wait()
        if not too_early:
            v[0] = v[0] * 2
        pltpu.sync_copy(v, o_ref)

    out = run(kernel, VMEM, DMA, schedule=schedule)
    np.testing.assert_array_equal(out, X.at[0].multiply(2))


def output_block_copied_on(programs, schedule):
    """A copy out of an output's block may go on in the next program, where the block is other memory; not longer."""

    def kernel(x_ref, o_ref, z_ref, sem):
        i, n = pl.program_id(0), pl.num_programs(0)

        def copy(i):
            return pltpu.make_async_copy(o_ref, z_ref.at[i], sem.at[i % 3])

        o_ref[...] = x_ref[...] + 1

        @pl.when(i >= programs)
        def _():
            copy(i - programs).wait()

        copy(i).start()

        @pl.when(i == n - 1)
        def _():
            for k in range(programs):
                copy(i - k).wait()

    o, z = pl.pallas_call(
        kernel, [LIKE, LIKE], grid=(8,), in_specs=[ROW], out_specs=[ROW, HBM], scratch_shapes=[DMA((3,))],
        interpret=pltpu.InterpretParams(**STRICT, schedule=schedule),
    )(X)  # fmt: skip
    np.testing.assert_array_equal(z, X + 1)
    np.testing.assert_array_equal(o, X + 1)


def scope_ends(too_early, schedule):
    """Memory of a scope may be given to another one while it is still copied."""

    def kernel(x_ref, o_ref, sem):
        def scope(v):
            pltpu.sync_copy(x_ref, v)
            copy = pltpu.async_copy(v, o_ref, sem)
            if not too_early:
                copy.wait()

        pl.run_scoped(scope, VMEM)
        if too_early:
            pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    np.testing.assert_array_equal(run(kernel, DMA, schedule=schedule), X)


def through_another_core(signal_early, schedule):
    def kernel(x_ref, o_ref, v, sem, copied):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _():
            copy = pltpu.async_copy(x_ref, o_ref.at[0], copied)
            if signal_early:
                pl.semaphore_signal(sem, 1, device_id={"core": 1})
            copy.wait()
            if not signal_early:
                pl.semaphore_signal(sem, 1, device_id={"core": 1})

        @pl.when(core == 1)
        def _():
            pl.semaphore_wait(sem, 1)
            pltpu.sync_copy(o_ref.at[0], v)
            v[...] = v[...] * 2
            pltpu.sync_copy(v, o_ref.at[1])

    out = jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)
    np.testing.assert_array_equal(on_cores(kernel, VMEM, REGULAR, DMA, out=out, schedule=schedule)[1], X * 2)


def either_signal(wait_for_both, schedule):
    """A wait for one of two signals does not say whose signal it was."""

    def kernel(x_ref, o_ref, v, sem):
        rows = pl.ds(lax.axis_index("core") * 4, 4)
        pltpu.sync_copy(x_ref.at[rows], o_ref.at[0, rows])
        pl.semaphore_signal(sem, 1, device_id={"core": 0})

        @pl.when(lax.axis_index("core") == 0)
        def _():
            pl.semaphore_wait(sem, 2 if wait_for_both else 1)
            pltpu.sync_copy(o_ref.at[0], v)
            pltpu.sync_copy(v, o_ref.at[1])
            pl.semaphore_wait(sem, 0 if wait_for_both else 1)

    out = jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)
    np.testing.assert_array_equal(on_cores(kernel, VMEM, REGULAR, out=out, schedule=schedule)[1], X)


def lanes_that_are_off(columns, schedule):
    """A masked store touches only the lanes that are on."""

    def kernel(x_ref, o_ref, v, sem):
        v[...] = jnp.zeros_like(v)
        right = pl.ds(64, 64)
        copy = pltpu.async_copy(x_ref.at[:, right], v.at[:, right], sem)
        pltpu.store(v.at[...], jnp.ones_like(v), mask=lax.broadcasted_iota(jnp.int32, v.shape, 1) < columns)
        copy.wait()
        pltpu.sync_copy(v, o_ref)

    want = np.concatenate([np.ones((8, 64)), X[:, 64:]], 1)
    np.testing.assert_array_equal(run(kernel, VMEM, DMA, schedule=schedule), want)


PAIRS = [
    (next_block_in_flight, False, True),
    (copies_on_one_semaphore, False, True),
    (output_block_copied_on, 1, 2),
    (scope_ends, False, True),
    (through_another_core, False, True),
    (either_signal, True, False),
    (lanes_that_are_off, 64, 65),
]
each_pair = pytest.mark.parametrize("make, right, wrong", PAIRS, ids=[p[0].__name__ for p in PAIRS])


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_pair
def test_right_kernels_are_not_accused(make, right, wrong, schedule):
    make(right, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_pair
def test_wrong_kernels_are_found(make, right, wrong, schedule):
    with pytest.raises(KernelFinding, match=r"^Race on") as caught:
        make(wrong, schedule)
    assert caught.value.finding.where.count("test_accusations.py") == 2


@pytest.mark.parametrize("written", [4, 8])
def test_a_copy_of_what_was_never_written_is_not_written(written):
    def kernel(x_ref, o_ref, v, w):
        pltpu.sync_copy(x_ref.at[pl.ds(0, written)], v.at[pl.ds(0, written)])
        pltpu.sync_copy(v, w)  # alone that does no harm
        o_ref[...] = w[...]

    def call():
        return run(kernel, VMEM, VMEM, out_spec=pl.BlockSpec())

    if written == 8:
        np.testing.assert_array_equal(call(), X)
    else:
        with pytest.raises(KernelFinding, match=r"^Read of w .* before anything was written"):
            call()


@pytest.mark.parametrize("read", [64, 65])
def test_lanes_that_are_off_are_not_written(read):
    def kernel(x_ref, o_ref, v):
        lane = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
        pltpu.store(v.at[...], x_ref[...], mask=lane < 64)
        o_ref[...] = jnp.where(lane < read, pltpu.load(v.at[...], mask=lane < read), 0)

    def call():
        return run(kernel, VMEM, in_spec=pl.BlockSpec(), out_spec=pl.BlockSpec())

    if read == 64:
        np.testing.assert_array_equal(call(), np.where(np.arange(128) < 64, X, 0))
    else:
        with pytest.raises(KernelFinding, match="before anything was written"):
            call()


def test_cores_that_write_one_block_are_told_of_the_grid_axis():
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    one = pl.BlockSpec((None, 128), lambda i: (0, 0))
    with pytest.raises(
        KernelFinding, match=r"the pipeline of core 1 .* writes what the pipeline of core 0 .* wrote"
    ) as e:
        run(lambda i, o: o.__setitem__(..., i[...]), grid=(8,), in_spec=ROW, out_spec=one, out=LIKE,
            compiler_params=parallel, num_cores_or_threads=2)  # fmt: skip
    assert 'make the grid axis "arbitrary"' in e.value.finding.hint


def test_operands_and_new_refs_are_written():
    def kernel(table_ref, x_ref, o_ref):
        ref = jax.new_ref(x_ref[...])
        o_ref[...] = ref[...] * table_ref[pl.program_id(0)]

    out = pl.pallas_call(
        kernel,
        LIKE,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(8,),
            in_specs=[pl.BlockSpec((None, 128), lambda i, table: (table[i], 0))],
            out_specs=pl.BlockSpec((None, 128), lambda i, table: (i, 0)),
        ),
        interpret=pltpu.InterpretParams(**STRICT),
    )(jnp.arange(8)[::-1], X)
    np.testing.assert_array_equal(out, X[::-1] * np.arange(8)[::-1, None])


def test_checks_of_semaphores_can_be_turned_off_in_scopes_too():
    def kernel(x_ref, o_ref):
        pl.run_scoped(lambda sem: pl.semaphore_signal(sem, 3), REGULAR)
        pltpu.sync_copy(x_ref, o_ref)

    with pytest.raises(KernelFinding, match="ends at 3"):
        run(kernel)
    run(kernel, compiler_params=pltpu.CompilerParams(disable_semaphore_checks=True))


# --- programs drawn at random -----------------------------------------------------------------------------------------
ROWS, SEMAPHORES = 8, 2


def random_program(seed):
    """("start", source, destination, semaphore), ("wait", semaphore) and ("add", row); every copy is waited for."""
    draw, program, under_way = random.Random(seed), [], [0] * SEMAPHORES
    for _ in range(8):
        sem = draw.randrange(SEMAPHORES)
        if under_way[sem] and draw.random() < 0.8:
            program.append(("wait", sem))
            under_way[sem] -= 1
        elif draw.random() < 0.6:
            program.append(("start", *draw.sample(range(ROWS), 2), sem))
            under_way[sem] += 1
        else:
            program.append(("add", draw.randrange(ROWS)))
    return program + [("wait", sem) for sem in range(SEMAPHORES) for _ in range(under_way[sem])]


def has_race(program):
    """The rule: a copy is surely complete when all copies started on its semaphore so far have been waited for."""
    started = [[] for _ in range(SEMAPHORES)]
    waited = [0] * SEMAPHORES
    for what, *rest in program:
        if what == "wait":
            (sem,) = rest
            waited[sem] += 1
            if waited[sem] == len(started[sem]):
                started[sem], waited[sem] = [], 0
            continue
        reads, writes = rest[0], rest[1] if what == "start" else rest[0]
        for source, destination in [copy for copies in started for copy in copies]:
            if destination in (reads, writes) or source == writes:
                return True
        if what == "start":
            started[rest[2]].append((reads, writes))
    return False


def test_the_verdict_on_random_programs_is_right_under_every_schedule():
    verdicts = []
    for seed in range(40):
        program = random_program(seed)

        def kernel(x_ref, o_ref, v, sems, program=program):
            pltpu.sync_copy(x_ref, v)
            for what, *rest in program:
                if what == "add":
                    v[rest[0]] = v[rest[0]] + 1
                elif what == "start":
                    pltpu.make_async_copy(v.at[rest[0]], v.at[rest[1]], sems.at[rest[2]]).start()
                else:
                    pltpu.make_async_copy(v.at[0], v.at[1], sems.at[rest[0]]).wait()
            pltpu.sync_copy(v, o_ref)

        x = X[:ROWS]
        scratch, out = (pltpu.VMEM(x.shape, x.dtype), DMA((SEMAPHORES,))), jax.ShapeDtypeStruct(x.shape, x.dtype)
        for schedule in (None, "eager", seed):
            try:
                run(kernel, *scratch, x=x, out=out, schedule=schedule)
                found = False
            except KernelFinding as error:
                found = error.finding.kind == "race"
            assert found == has_race(program), (seed, schedule, program)
        verdicts.append(found)
    assert 5 < sum(verdicts) < 35
