"""tcgen05 and TMEM on the simulated Blackwell GPU: numbers, and each rule, broken and kept."""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding, PalladionWarning

M, N, K = 128, 64, 64
SCHEDULES = [None, "eager", 1, 2]
TC = plgpu.Barrier(orders_tensor_core=True)


def operands(dtype=jnp.float16, m=M, n=N, k=K, seed=0):
    """Small integers, exact in every dtype here."""
    draw = np.random.default_rng(seed).integers
    a, b = draw(-2, 3, (m, k)), draw(-2, 3, (k, n))
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), a @ b


def run(body, *args, shape=(M, N), out=jnp.float32, schedule=None, scratch=None, mesh=None, warns=False, **params):
    """A kernel on arrays in GMEM; `scratch`: types of its further arguments, by name. Without `warns`, no warning."""
    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, out),
        scratch_types=scratch or {},
        interpret=plgpu.InterpretGPUParams(detect_races=True, schedule=schedule, **params),
        **(mesh or {}),
    )
    with warnings.catch_warnings():
        if not warns:
            warnings.simplefilter("error", PalladionWarning)
        return np.asarray(made(*args))


def found(body, *args, **params):
    with pytest.raises(KernelFinding) as caught:
        run(body, *args, **params)
    return caught.value.finding


def fill(a, b, a_s, b_s):
    a_s[...], b_s[...] = a[...], b[...]
    plgpu.commit_smem()


def buffers(a, b, acc=jnp.float32, n=N):
    packed = None if jnp.dtype(acc).itemsize == 4 else False
    return dict(
        a_s=plgpu.SMEM(a.shape, a.dtype),
        b_s=plgpu.SMEM(b.shape, b.dtype),
        acc=plgpu.TMEM((M, n), acc, packed=packed),
        bar=TC,
    )


def load(acc):
    value = plgpu.async_load_tmem(acc)
    plgpu.wait_load_tmem()
    return value


# --- numbers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulate", [True, False])
def test_two_products_and_a_commit(schedule, accumulate):
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s, acc, bar):
        fill(a, b, a_s, b_s)
        plgpu.tcgen05_mma(acc, a_s, b_s, accumulate=False)
        plgpu.tcgen05_mma(acc, a_s, b_s, accumulate=jnp.bool_(accumulate))
        plgpu.tcgen05_commit_arrive(bar)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    got = run(body, a, b, scratch=buffers(a, b), schedule=schedule)
    np.testing.assert_array_equal(got, wanted * (2 if accumulate else 1))


@pytest.mark.parametrize(
    "dtype, out",
    [(jnp.bfloat16, jnp.float32), (jnp.float8_e5m2, jnp.float32), (jnp.float8_e4m3fn, jnp.float32),
     (jnp.int8, jnp.int32), (jnp.float16, jnp.float16)],
)  # fmt: skip
def test_a_product_of_each_dtype(dtype, out):
    a, b, wanted = operands(dtype)

    def body(a, b, o, a_s, b_s, acc, bar):
        fill(a, b, a_s, b_s)
        plgpu.tcgen05_mma(acc, a_s, plgpu.transpose_ref(b_s, (1, 0)), bar, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    got = run(body, a, b.T, scratch=buffers(a, b.T, out), out=out)
    np.testing.assert_array_equal(got.astype(np.float64), wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_in_tensor_memory(schedule):
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s, acc, bar, a_t):
        fill(a, b, a_s, b_s)
        plgpu.async_store_tmem(a_t, a_s[...])
        plgpu.commit_tmem()
        plgpu.tcgen05_mma(acc, a_t, b_s, bar, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    scratch = buffers(a, b) | dict(a_t=plgpu.TMEM((M, K), jnp.float16, packed=True))
    np.testing.assert_array_equal(run(body, a, b, scratch=scratch, schedule=schedule), wanted)


def smem_scales(scales):
    """(R, C) scales as `async_copy_scales_to_tmem` wants them: row 32 * i + j, column c at [j, 4 * i + c]."""
    rows, columns = scales.shape
    parts = scales.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)
    return parts.reshape(rows // 128, columns // 4, 32, 16)


@pytest.mark.parametrize("copied", [True, False])
def test_block_scaled_operands(copied):
    k, n = 128, 128
    a, b, _ = operands(jnp.float8_e4m3fn, n=n, k=k)
    draw = np.random.default_rng(1).integers
    a_scale, b_scale = (2.0 ** draw(-2, 3, (128, k // 32)) for _ in range(2))
    wide = [np.asarray(x, np.float64) for x in (a, b)]
    wanted = (wide[0] * np.repeat(a_scale, 32, 1)) @ (wide[1] * np.repeat(b_scale.T, 32, 0))

    def body(a, b, sa, sb, o, a_s, b_s, acc, bar, sa_s, sb_s, sa_t, sb_t):
        fill(a, b, a_s, b_s)
        sa_s[...], sb_s[...] = sa[...], sb[...]
        plgpu.commit_smem()
        plgpu.async_copy_scales_to_tmem(sa_s, sa_t)
        if copied:
            plgpu.async_copy_scales_to_tmem(sb_s, sb_t)
        b_t = plgpu.transpose_ref(b_s, (1, 0))
        plgpu.tcgen05_mma(acc, a_s, b_t, bar, a_scale=sa_t, b_scale=sb_t, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    e8 = jnp.float8_e8m0fnu
    scales = [jnp.asarray(smem_scales(s), e8) for s in (a_scale, b_scale)]
    tmem = plgpu.TMEM((128, k // 32), e8, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
    scratch = buffers(a, b.T, n=n) | dict(
        sa_s=plgpu.SMEM(scales[0].shape, e8), sb_s=plgpu.SMEM(scales[1].shape, e8), sa_t=tmem, sb_t=tmem
    )
    how: Any = dict(scratch=scratch, shape=(M, n), uninitialized_reads="raise")
    if copied:
        np.testing.assert_array_equal(run(body, a, b.T, *scales, **how), wanted)
    else:
        finding = found(body, a, b.T, *scales, **how)
        assert finding.kind == "uninitialized-read" and "sb_t" in finding.message


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8])
def test_a_sparse_operand(dtype):
    k, out = 256, jnp.int32 if dtype == jnp.int8 else jnp.float32
    rng = np.random.default_rng(3)
    places = np.stack([np.sort(rng.choice(4, 2, replace=False)) for _ in range(M * k // 4)]).reshape(M, k // 4, 2)
    a, b, _ = operands(dtype, k=k)
    half = np.asarray(rng.integers(-2, 3, (M, k // 2)), dtype)
    full = np.zeros((M, k // 4, 4))
    np.put_along_axis(full, places, half.reshape(M, k // 4, 2).astype(np.float64), 2)
    wanted = full.reshape(M, k) @ np.asarray(b, np.float64)
    meta = plgpu.format_tcgen05_sparse_metadata(jnp.asarray(places, jnp.uint2), dtype)

    def body(a, b, meta, o, a_s, b_s, acc, bar, m_s, m_t):
        fill(a, b, a_s, b_s)
        m_s[...] = meta[...]
        plgpu.commit_smem()
        plgpu.async_copy_sparse_metadata_to_tmem(m_s, m_t)
        b_t = plgpu.transpose_ref(b_s, (1, 0))
        plgpu.tcgen05_mma(acc, a_s, b_t, bar, a_sparse_metadata=m_t, accumulate=False)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    scratch = buffers(half, b.T, out) | dict(
        m_s=plgpu.SMEM(meta.shape, jnp.uint2), m_t=plgpu.TMEM((M, k // 2), jnp.uint2, layout=layout)
    )
    got = run(body, jnp.asarray(half), b.T, meta, scratch=scratch, out=out)
    np.testing.assert_array_equal(got, wanted)


def test_a_load_with_a_reduction():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(M, N)), jnp.float32)

    def body(x, o, acc):
        plgpu.async_store_tmem(acc, x[...])
        plgpu.commit_tmem()
        value, most = plgpu.async_load_tmem(acc, reduce="absmax")
        plgpu.wait_load_tmem()
        o[...] = value + lax.broadcast_in_dim(most, (M, N), (0,))

    got = run(body, x, scratch=dict(acc=plgpu.TMEM((M, N), jnp.float32)))
    np.testing.assert_array_equal(got, np.asarray(x) + np.abs(x).max(1)[:, None])


# --- rules of one thread ------------------------------------------------------------------------------------------
def one_product(last="", commit=True, wait=True, early="", late="", reload=True):
    """A product, with or without what it needs.

    `last`: the operand stored after the fence. `early`, `late`: the one overwritten before and after the wait.
    """

    def body(a, b, o, a_s, b_s, acc, bar):
        smem, gmem = dict(a=a_s, b=b_s), dict(a=a, b=b)
        for name in "ab":
            if name != last:
                smem[name][...] = gmem[name][...]
        plgpu.commit_smem()
        if last:
            smem[last][...] = gmem[last][...]
        plgpu.tcgen05_mma(acc, a_s, b_s, bar if commit else None, accumulate=False)
        if early:
            smem[early][...] = jnp.zeros_like(smem[early])
        if wait:
            plgpu.barrier_wait(bar)
        if late:
            smem[late][...] = jnp.zeros_like(smem[late])
        o[...] = load(acc) if reload else jnp.zeros((M, N), jnp.float32)

    return body


def check(broken, right, kind, *words, args=None, scratch=None, schedule=None, wanted=None, **how):
    """The one is found, the other runs."""
    a, b, product = operands()
    args = (a, b) if args is None else args
    scratch = buffers(a, b) if scratch is None else scratch
    finding = found(broken, *args, scratch=scratch, schedule=schedule, **how)
    assert finding.kind == kind, finding
    assert all(w in finding.message + (finding.hint or "") for w in words), finding
    np.testing.assert_array_equal(
        run(right, *args, scratch=scratch, schedule=schedule, **how), product if wanted is None else wanted
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["a", "b"])
def test_operands_stored_by_hand_are_committed(schedule, name):
    broken, right = one_product(last=name), one_product()
    check(broken, right, "missing-fence", f"{name}_s", "commit_smem", schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_result_is_loaded_when_its_barrier_completed(schedule):
    check(one_product(wait=False), one_product(), "tmem-in-flight", "acc", "barrier", schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["a", "b"])
def test_an_operand_is_overwritten_when_the_product_is_done(schedule, name):
    broken, right = one_product(early=name), one_product(late=name)
    check(broken, right, "tmem-in-flight", f"{name}_s", schedule=schedule)


@pytest.mark.parametrize("commit", [True, False])
def test_a_product_that_nobody_waits_for_is_warned_of(commit, recwarn):
    a, b, _ = operands()
    body = one_product(commit=commit, wait=commit, reload=False)
    run(body, a, b, scratch=buffers(a, b), warns=True)
    warned = [str(w.message) for w in recwarn if issubclass(w.category, PalladionWarning)]
    assert len(warned) == (0 if commit else 1)
    assert commit or ("tmem-in-flight" in warned[0] and "tcgen05_commit_arrive" in warned[0])


def stored(store="commit", loads="wait", barrier=None):
    """x to TMEM and back, and then twice x: with or without the waits."""

    def body(x, o, acc):
        plgpu.async_store_tmem(acc, x[...])
        if store == "commit":
            plgpu.commit_tmem()
        first = plgpu.async_load_tmem(acc)
        if loads == "wait":
            plgpu.wait_load_tmem()
        plgpu.async_store_tmem(acc, first * 2)
        plgpu.commit_tmem()
        o[...] = load(acc)

    return body


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("broken, word", [(dict(store=None), "commit_tmem"), (dict(loads=None), "wait_load_tmem")])
def test_stores_are_committed_and_loads_waited_for(schedule, broken, word):
    x = jnp.ones((M, N), jnp.float32)
    scratch = dict(acc=plgpu.TMEM((M, N), jnp.float32))
    check(stored(**broken), stored(), "tmem-in-flight", "acc", word, args=(x,), scratch=scratch, schedule=schedule,
          wanted=np.full((M, N), 2))  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_comes_after_loads_and_stores_only_if_these_were_waited_for(schedule):
    def again(wait, commit):
        def body(a, b, o, a_s, b_s, acc, bar):
            fill(a, b, a_s, b_s)
            plgpu.async_store_tmem(acc, jnp.zeros((M, N), jnp.float32))
            if commit:
                plgpu.commit_tmem()
            plgpu.tcgen05_mma(acc, a_s, b_s, bar)
            plgpu.barrier_wait(bar)
            o[...] = plgpu.async_load_tmem(acc)
            if wait:
                plgpu.wait_load_tmem()
            plgpu.tcgen05_mma(acc, a_s, b_s, bar)
            plgpu.barrier_wait(bar)

        return body

    check(again(False, True), again(True, True), "tmem-in-flight", "acc", "wait_load_tmem", schedule=schedule)
    check(again(True, False), again(True, True), "tmem-in-flight", "acc", "commit_tmem", schedule=schedule)


def test_tensor_memory_was_written():
    a, b, _ = operands()

    def body(add):
        def kernel(a, b, o, a_s, b_s, acc, bar):
            fill(a, b, a_s, b_s)
            plgpu.tcgen05_mma(acc, a_s, b_s, bar, accumulate=add)
            plgpu.barrier_wait(bar)
            o[...] = load(acc)

        return kernel

    check(body(True), body(False), "uninitialized-read", "acc", uninitialized_reads="raise")


def test_what_a_kernel_leaves_running_is_warned_of(recwarn):
    x = jnp.ones((M, N), jnp.float32)

    def body(x, o, acc):
        plgpu.async_store_tmem(acc, x[...])
        plgpu.commit_tmem()
        o[...] = plgpu.async_load_tmem(acc)

    run(body, x, scratch=dict(acc=plgpu.TMEM((M, N), jnp.float32)), warns=True)
    (warned,) = [str(w.message) for w in recwarn if issubclass(w.category, PalladionWarning)]
    assert "tmem-in-flight" in warned and "wait_load_tmem" in warned


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_to_tensor_memory(schedule):
    """It reads SMEM as TMA does, and is complete when a barrier says so."""

    def body(commit, wait):
        def kernel(x, o, s, acc, bar):
            s[...] = x[...]
            if commit:
                plgpu.commit_smem()
            plgpu.async_copy_smem_to_tmem(s, acc)
            plgpu.tcgen05_commit_arrive(bar)
            if wait:
                plgpu.barrier_wait(bar)
            o[...] = load(acc)

        return kernel

    x = jnp.arange(M * N, dtype=jnp.float32).reshape(M, N)
    scratch = dict(s=plgpu.SMEM((M, N), jnp.float32), acc=plgpu.TMEM((M, N), jnp.float32), bar=TC)
    how: Any = dict(args=(x,), scratch=scratch, schedule=schedule, wanted=x)
    check(body(False, True), body(True, True), "missing-fence", "commit_smem", **how)
    check(body(True, False), body(True, True), "tmem-in-flight", "acc", **how)


# --- several threads ----------------------------------------------------------------------------------------------
TWO = dict(num_threads=2, thread_name="t")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_between_threads_orders_the_tensor_core(schedule):
    """One thread stores A to TMEM, the other multiplies it."""

    def body(a, b, o, a_s, b_s, acc, bar, a_t, ready):
        @pl.when(lax.axis_index("t") == 0)
        def _store():
            b_s[...] = b[...]
            plgpu.commit_smem()
            plgpu.async_store_tmem(a_t, a[...])
            plgpu.commit_tmem()
            plgpu.barrier_arrive(ready)

        @pl.when(lax.axis_index("t") == 1)
        def _multiply():
            plgpu.barrier_wait(ready)
            plgpu.tcgen05_mma(acc, a_t, b_s, bar, accumulate=False)
            plgpu.barrier_wait(bar)
            o[...] = load(acc)

    a, b, wanted = operands()
    scratch = buffers(a, b) | dict(a_t=plgpu.TMEM((M, K), jnp.float16, packed=True), ready=plgpu.Barrier())
    finding = found(body, a, b, scratch=scratch, mesh=TWO, schedule=schedule)
    assert finding.kind == "missing-fence" and "orders_tensor_core" in str(finding.hint)
    got = run(body, a, b, scratch=scratch | dict(ready=TC), mesh=TWO, schedule=schedule)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loads_of_another_thread_are_over_before_the_next_product(schedule):
    """The accumulator goes back to the thread that multiplies, by a barrier that orders the tensor core."""

    def body(a, b, o, a_s, b_s, acc, bar, free):
        @pl.when(lax.axis_index("t") == 0)
        def _multiply():
            fill(a, b, a_s, b_s)
            plgpu.tcgen05_mma(acc, a_s, b_s, bar, accumulate=False)
            plgpu.barrier_wait(free)
            plgpu.tcgen05_mma(acc, a_s, b_s, bar)

        @pl.when(lax.axis_index("t") == 1)
        def _load():
            plgpu.barrier_wait(bar)
            load(acc)
            plgpu.barrier_arrive(free)
            plgpu.barrier_wait(bar)
            o[...] = load(acc)

    a, b, wanted = operands()
    scratch = buffers(a, b)
    finding = found(body, a, b, scratch=scratch | dict(free=plgpu.Barrier()), mesh=TWO, schedule=schedule)
    assert finding.kind == "missing-fence" and "orders_tensor_core" in str(finding.hint)
    got = run(body, a, b, scratch=scratch | dict(free=TC), mesh=TWO, schedule=schedule)
    np.testing.assert_array_equal(got, 2 * wanted)


# --- two blocks ---------------------------------------------------------------------------------------------------
def collective(leader=0, wait=True):
    """The reference's example: TMEM of a collective product used again, under a ClusterBarrier."""

    def body(a, b, o, a_s, b_s, acc, bar, cluster):
        x = lax.axis_index("x")
        a_s[...] = a[pl.ds(x * M, M)]
        b_s[...] = b[:, pl.ds(x * N, N)]
        plgpu.commit_smem()

        def together():
            plgpu.barrier_arrive(cluster)
            plgpu.barrier_wait(cluster)

        def product():
            @pl.when(x == leader)
            def _mma():
                plgpu.tcgen05_mma(acc, a_s, b_s, bar, accumulate=False, collective_axis="x")

        together()
        product()
        plgpu.barrier_wait(bar)
        o[pl.ds(x * M, M)] = load(acc)
        if wait:
            together()
        product()
        plgpu.barrier_wait(bar)
        o[pl.ds(x * M, M)] = load(acc)

    return body


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collective_products(schedule):
    a, b, wanted = operands(m=2 * M, n=2 * N)
    scratch = dict(
        a_s=plgpu.SMEM((M, K), jnp.float16), b_s=plgpu.SMEM((K, N), jnp.float16),
        acc=plgpu.TMEM((M, 2 * N), jnp.float32, collective=True), bar=TC,
        cluster=plgpu.ClusterBarrier(collective_axes=("x",), orders_tensor_core=True),
    )  # fmt: skip
    mesh = dict(cluster=(2,), cluster_names=("x",))
    how: Any = dict(mesh=mesh, shape=(2 * M, 2 * N), scratch=scratch, schedule=schedule)
    np.testing.assert_array_equal(run(collective(), a, b, **how), wanted)
    finding = found(collective(leader=1), a, b, **how)
    assert finding.kind == "collective-mismatch" and "first of the two blocks" in finding.message
    finding = found(collective(wait=False), a, b, **how)
    assert finding.kind in ("race", "tmem-in-flight", "barrier-double-completion"), finding


def test_products_queue_in_simulated_time():
    a, b, _ = operands()

    def body(a, b, o, a_s, b_s, acc, bar):
        fill(a, b, a_s, b_s)
        for k in range(3):
            plgpu.tcgen05_mma(acc, a_s, b_s, bar if k == 2 else None, accumulate=k > 0)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    run(body, a, b, scratch=buffers(a, b), trace=True)
    spans = [s for s in pl.last_report().timeline.spans if s.track == "tensor core"]
    assert len(spans) == 3 and all(x.end == y.start for x, y in itertools.pairwise(spans))
    waits = [s for s in pl.last_report().timeline.spans if s.kind == "wait"]
    assert waits[-1].end >= spans[-1].end
