"""Copies on the simulated GPU: values, and what each rule of the reference finds, with a near twin that is silent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet

X = numbers(8, 128)
SMEM = plgpu.SMEM(X.shape, X.dtype)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def kernel(body, out=X, scratch=(SMEM, plgpu.Barrier()), given=(X,), schedule="lazy", more=(), **options):
    """A call of a kernel body(*operands, *results, *scratch)."""
    call = plgpu.kernel(
        body, out_shape=out, scratch_shapes=list(scratch), interpret=params(schedule=schedule, **dict(more)), **options
    )
    return lambda: call(*given)


# --- GMEM to SMEM -----------------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_is_waited_for(schedule, waits):
    def body(x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        if waits:
            plgpu.barrier_wait(barrier)
        y[...] = smem[...] + 1
        if not waits:
            plgpu.barrier_wait(barrier)

    call = kernel(body, schedule=schedule)
    if waits:
        np.testing.assert_array_equal(quiet(call), X + 1)
    else:
        finding(call, "missing-wait", "smem")


@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_is_read_again_only_after_the_second_copy(schedule, waits):
    def body(x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        if waits:
            plgpu.barrier_wait(barrier)
        y[...] = smem[...] * 2
        if not waits:
            plgpu.barrier_wait(barrier)

    call = kernel(body, schedule=schedule)
    if waits:
        np.testing.assert_array_equal(quiet(call), X * 2)
    else:
        finding(call, "missing-wait", "still in use")


@schedules
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("access", ["read", "write"])
def test_a_copy_over_what_was_accessed_by_hand_needs_a_commit(schedule, commits, access):
    def body(x, y, smem, barrier):
        if access == "write":
            smem[...] = jnp.zeros_like(X)
        else:
            plgpu.copy_gmem_to_smem(x, smem, barrier)
            plgpu.barrier_wait(barrier)
            y[...] = smem[...]
        if commits:
            plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...] + 1

    call = kernel(body, schedule=schedule)
    if commits:
        np.testing.assert_array_equal(quiet(call), X + 1)
    else:
        finding(call, "missing-fence", "commit_smem")


@pytest.mark.parametrize(
    "start, mode, expected",
    [
        (-4, None, "zero"), (6, plgpu.OOBFillMode.ZEROS, "zero"), (100, None, "zero"),
        (6, plgpu.OOBFillMode.UNDEFINED, "nan"), (6, plgpu.OOBFillMode.PROMISE_IN_BOUNDS, "out-of-bounds"),
        (0, plgpu.OOBFillMode.PROMISE_IN_BOUNDS, "zero"),
    ],
)  # fmt: skip
def test_what_lies_outside_is_filled(start, mode, expected):
    def body(n, x, y, smem, barrier):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(n[0], 8)], smem, barrier, oob_mode=mode)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]

    call = kernel(body, given=(jnp.array([start], jnp.int32), X))
    if expected == "out-of-bounds":
        finding(call, expected, "promises")
        return
    wanted = np.full((8, 128), np.nan if expected == "nan" else 0, np.float32)
    for i in range(8):
        if 0 <= start + i < 8:
            wanted[i] = X[start + i]
    np.testing.assert_array_equal(quiet(call), wanted)


def test_a_slice_of_a_slice_is_filled_only_outside_of_the_array():
    def body(n, x, y, smem, barrier):
        part = x.at[pl.ds(n[0], 8)].at[pl.ds(2, 4)].at[:, pl.ds(n[1], 64)]
        plgpu.copy_gmem_to_smem(part, smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]

    n = jnp.array([3, 96], jnp.int32)
    call = kernel(body, jax.ShapeDtypeStruct((4, 64), X.dtype), [plgpu.SMEM((4, 64), X.dtype), plgpu.Barrier()],
                  given=(n, X))  # fmt: skip
    wanted = np.zeros((4, 64), np.float32)
    wanted[:3, :32] = X[5:8, 96:]
    np.testing.assert_array_equal(quiet(call), wanted)


@pytest.mark.parametrize("row, column, fits", [(8, 64, True), (4, 64, False), (8, 32, False)])
@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_copy_begins_at_a_tile(row, column, fits, direction):
    big = numbers(32, 128, dtype=jnp.float16)
    tiled = plgpu.SMEM((8, 64), jnp.float16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    def body(n, x, y, smem, barrier):
        there = pl.ds(n[0], 8), pl.ds(n[1], 64)
        plgpu.copy_gmem_to_smem(x.at[there if direction == "in" else (pl.ds(0, 8), pl.ds(0, 64))], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, y.at[there if direction == "out" else (pl.ds(0, 8), pl.ds(0, 64))])
        plgpu.wait_smem_to_gmem(0)

    call = kernel(body, big, [tiled, plgpu.Barrier()], given=(jnp.array([row, column], jnp.int32), big))
    if fits:
        got = np.asarray(quiet(call))
        i, j = (row, column) if direction == "out" else (0, 0)
        a, b = (row, column) if direction == "in" else (0, 0)
        np.testing.assert_array_equal(got[i : i + 8, j : j + 64], big[a : a + 8, b : b + 64])
    else:
        finding(call, "misaligned", "tile")


@pytest.mark.parametrize("on", [True, False])
def test_a_predicate_that_is_false_copies_nothing_and_arrives_nowhere(on):
    def body(n, x, y, smem, barrier):
        smem[...] = jnp.zeros_like(X)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x, smem, barrier, predicate=n[0] == 1)
        pl.when(n[0] == 1)(lambda: plgpu.barrier_wait(barrier))
        plgpu.copy_smem_to_gmem(smem, y, predicate=n[0] == 1)
        plgpu.wait_smem_to_gmem(0)
        pl.when(n[0] == 0)(lambda: y.__setitem__(..., smem[...] - 1))

    got = quiet(kernel(body, given=(jnp.array([int(on)], jnp.int32), X)))
    np.testing.assert_array_equal(got, X if on else np.full(X.shape, -1))


def test_gathered_rows():
    def body(i, x, y, indices, smem, barrier):
        indices[...] = i[...]
        rows = plgpu.load(indices, (), layout=plgpu.Layout.TMA_GATHER_INDICES)
        plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(64, 64)], smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]

    rows = jnp.array([7, 0, 3, 3, 9, 1, 2, 5], jnp.int32)  # row 9 does not exist
    scratch = [plgpu.SMEM((8,), jnp.int32), plgpu.SMEM((8, 64), X.dtype), plgpu.Barrier()]
    call = kernel(body, jax.ShapeDtypeStruct((8, 64), X.dtype), scratch, (rows, X), more={"arch": "sm_100a"})
    wanted = np.concatenate([X, np.zeros((2, 128))])[np.array(rows)][:, 64:]
    np.testing.assert_array_equal(quiet(call), wanted)
    with pytest.raises(NotImplementedError, match="gathers rows"):
        kernel(body, jax.ShapeDtypeStruct((8, 64), X.dtype), scratch, (rows, X), more={"arch": "sm_90a"})()


def test_windows_of_images():
    images = numbers(2, 6, 5, 16)
    spec = jax.ShapeDtypeStruct((3, 2, 32, 16), X.dtype)

    def body(x, y, smem, barrier):
        windows = plgpu.im2col_ref(x, window_shape=(3, 2), padding=((1, 1), (0, 1)))  # 2 images of 6 x 5 positions
        for i in range(3):
            for j in range(2):
                plgpu.copy_gmem_to_smem(windows.at[pl.ds(8, 32), i, j, pl.ds(0, 16)], smem, barrier)
                plgpu.barrier_wait(barrier)
                y[i, j] = smem[...]
                plgpu.commit_smem()

    got = quiet(kernel(body, spec, [plgpu.SMEM((32, 16), X.dtype), plgpu.Barrier()], (images,)))
    padded = np.pad(images, ((0, 0), (1, 1), (0, 1), (0, 0)))
    wanted = np.zeros(spec.shape, np.float32)
    for r in range(32):
        n, p, q = np.unravel_index(r + 8, (2, 6, 5))
        wanted[:, :, r] = padded[n, p : p + 3, q : q + 2]
    np.testing.assert_array_equal(got, wanted)


@schedules
@pytest.mark.parametrize("left", [0, 1])
def test_copies_without_a_barrier_are_waited_for_by_count(schedule, left):
    def body(x, y, smem):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(0, 4)], smem.at[pl.ds(0, 4)])
        plgpu.copy_gmem_to_smem(x.at[pl.ds(4, 4)], smem.at[pl.ds(4, 4)])
        plgpu.wait_gmem_to_smem(1)
        y[pl.ds(0, 4)] = smem[pl.ds(0, 4)]
        plgpu.wait_gmem_to_smem(left)
        y[pl.ds(4, 4)] = smem[pl.ds(4, 4)]
        plgpu.wait_gmem_to_smem(0)

    call = kernel(body, scratch=[SMEM], schedule=schedule)
    if left:
        finding(call, "missing-wait")
    else:
        np.testing.assert_array_equal(quiet(call), X)


@pytest.mark.parametrize("commits", [True, False])
def test_copies_without_a_barrier_go_through_the_generic_proxy(commits):
    def body(x, y, smem):
        plgpu.copy_gmem_to_smem(x, smem)
        plgpu.wait_gmem_to_smem(0)
        if commits:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y)
        plgpu.wait_smem_to_gmem(0)

    call = kernel(body, scratch=[SMEM])
    if commits:
        np.testing.assert_array_equal(quiet(call), X)
    else:
        finding(call, "missing-fence")


def test_prefetching_changes_nothing():
    def body(x, y):
        plgpu.async_prefetch(x.at[pl.ds(0, 4)])
        y[...] = x[...]

    np.testing.assert_array_equal(quiet(kernel(body, scratch=())), X)


# --- SMEM to GMEM -----------------------------------------------------------------------------------------------------
@schedules
@pytest.mark.parametrize("commits", [True, False])
def test_a_store_of_what_was_written_by_hand_needs_a_commit(schedule, commits):
    def body(x, y, smem, barrier):
        smem[...] = x[...] * 2
        if commits:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y)
        plgpu.wait_smem_to_gmem(0)

    call = kernel(body, schedule=schedule)
    if commits:
        np.testing.assert_array_equal(quiet(call), X * 2)
    else:
        finding(call, "missing-fence", "commit_smem")


@schedules
@pytest.mark.parametrize("left, read_only, again, found", [
    (0, True, "overwrite", None), (1, True, "overwrite", "missing-wait"), (0, False, "read", None),
    (0, True, "read", "missing-wait"),
])  # fmt: skip
def test_stores_in_groups(schedule, left, read_only, again, found):
    def body(x, y, z, smem):
        smem[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, 4)], y.at[pl.ds(0, 4)], commit_group=False)
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(4, 4)], y.at[pl.ds(4, 4)])
        plgpu.wait_smem_to_gmem(left, wait_read_only=read_only)
        if again == "overwrite":
            smem[...] = jnp.zeros_like(X)
            z[...] = x[...]
        else:
            z[...] = y[...]
        plgpu.wait_smem_to_gmem(0)

    call = kernel(body, (X, X), [SMEM], schedule=schedule)
    if found:
        finding(call, found)
    else:
        for got in quiet(call):
            np.testing.assert_array_equal(got, X)


def test_many_stores_of_which_only_the_reads_are_waited_for():
    def body(x, y, z, smem):
        smem[...] = x[...]

        def step(i, _):
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y.at[i])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem[...] = smem[...] + 1

        lax.fori_loop(0, 50, step, None)
        plgpu.wait_smem_to_gmem(0)
        z[...] = y[0] + y[49]

    got, z = quiet(kernel(body, (jax.ShapeDtypeStruct((50, *X.shape), X.dtype), X), [SMEM]))
    np.testing.assert_array_equal(got, X + np.arange(50)[:, None, None])
    np.testing.assert_array_equal(z, 2 * X + 49)


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_does_not_end_while_a_store_reads(waits):
    def body(x, y, smem, barrier):
        smem[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y)
        if waits:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if waits:
        np.testing.assert_array_equal(quiet(kernel(body)), X)
    else:
        finding(kernel(body), "missing-wait", "ends while")


@schedules
@pytest.mark.parametrize("waiter", [0, 1])
def test_another_thread_cannot_wait_for_a_store(schedule, waiter):
    def body(x, y, smem, barrier):
        t = lax.axis_index("t")

        @pl.when(t == 0)
        def _():
            smem[...] = x[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y)

        pl.when(t == waiter)(lambda: plgpu.wait_smem_to_gmem(0))
        pl.when(t == 0)(lambda: plgpu.barrier_arrive(barrier))

        @pl.when(t == 1)
        def _():
            plgpu.barrier_wait(barrier)
            smem[...] = jnp.zeros_like(X)

        pl.when(t == 0)(lambda: plgpu.wait_smem_to_gmem(0))

    call = kernel(body, schedule=schedule, num_threads=2, thread_name="t")
    if waiter == 0:
        np.testing.assert_array_equal(quiet(call), X)
    else:
        finding(call, "missing-wait", "in the thread that started it")


def test_what_a_store_has_outside_of_the_array_is_dropped():
    def body(n, x, y, smem, barrier):
        y[...] = x[...]
        smem[...] = x[...] * 0 + 9
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y.at[pl.ds(n[0], 8)])
        plgpu.wait_smem_to_gmem(0)

    got = quiet(kernel(body, given=(jnp.array([6], jnp.int32), X)))
    np.testing.assert_array_equal(got, np.concatenate([X[:6], np.full((2, 128), 9)]))


@schedules
@pytest.mark.parametrize("op", ["add", "max", None])
def test_reductions_of_several_blocks_do_not_race(schedule, op):
    def body(x, y, smem):
        i = lax.axis_index("i")
        smem[...] = x[i]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y, reduction_op=op)
        plgpu.wait_smem_to_gmem(0)

    x = numbers(4, 8, 128)
    init = jnp.full((8, 128), -1, jnp.float32)

    @functools.partial(jax.jit)
    def run(x, y):
        def inner(refs):
            mesh = plgpu.Mesh(grid=(4,), grid_names=("i",))

            @pl.core_map(mesh, interpret=params(schedule=schedule))
            def _():
                pl.run_scoped(functools.partial(body, *refs), plgpu.SMEM((8, 128), jnp.float32))

        return pl.run_state(inner)((x, y))[1]

    if op is None:
        with pytest.raises(Exception, match=r"race|missing-wait"):
            jax.block_until_ready(run(x, init))
        return
    wanted = x.sum(0) - 1 if op == "add" else np.maximum(x.max(0), -1)
    np.testing.assert_array_equal(run(x, init), wanted)


@schedules
def test_a_store_of_what_nobody_wrote(schedule):
    def body(x, y, smem, barrier):
        plgpu.copy_smem_to_gmem(smem, y)
        plgpu.wait_smem_to_gmem(0)

    finding(kernel(body, schedule=schedule), "uninitialized-read", "smem")


@schedules
@pytest.mark.parametrize("waits", [True, False])
def test_a_scope_does_not_end_before_its_copies(schedule, waits):
    def body(x, y):
        @functools.partial(pl.run_scoped, smem=SMEM)
        def _(smem):
            plgpu.copy_gmem_to_smem(x, smem)
            if waits:
                plgpu.wait_gmem_to_smem(0)

        y[...] = x[...]

    call = kernel(body, scratch=(), schedule=schedule)
    if waits:
        np.testing.assert_array_equal(quiet(call), X)
    else:
        finding(call, "missing-wait", "smem")
