"""tcgen05 and TMEM on the simulated Blackwell GPU: each rule, broken and kept."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import PalladionWarning
from simulator.gpu.tensor_calls import SCHEDULES, TC, K, M, N, buffers, fill, found, load, operands, run


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

        def product(k):
            @pl.when(x == leader)
            def _mma():
                plgpu.tcgen05_mma(acc, a_s, b_s, bar.at[k], accumulate=False, collective_axis="x")

        together()
        product(0)
        plgpu.barrier_wait(bar.at[0])
        o[pl.ds(x * M, M)] = load(acc)
        if wait:
            together()
        product(1)
        plgpu.barrier_wait(bar.at[1])
        o[pl.ds(x * M, M)] = load(acc)

    return body


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collective_products(schedule):
    a, b, wanted = operands(m=2 * M, n=2 * N)
    scratch = dict(
        a_s=plgpu.SMEM((M, K), jnp.float16), b_s=plgpu.SMEM((K, N), jnp.float16),
        acc=plgpu.TMEM((M, 2 * N), jnp.float32, collective=True),
        bar=plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        cluster=plgpu.ClusterBarrier(collective_axes=("x",), orders_tensor_core=True),
    )  # fmt: skip
    mesh = dict(cluster=(2,), cluster_names=("x",))
    how: Any = dict(mesh=mesh, shape=(2 * M, 2 * N), scratch=scratch, schedule=schedule)
    np.testing.assert_array_equal(run(collective(), a, b, **how), wanted)
    finding = found(collective(leader=1), a, b, **how)
    assert finding.kind == "collective-mismatch" and "first of the two blocks" in finding.message
    finding = found(collective(wait=False), a, b, **how)
    assert finding.kind == "tmem-in-flight" and "acc" in finding.message


# --- warps --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warp", [1, 2])
def test_what_a_warp_issues_is_in_order_also_in_the_next_warp_map(schedule, warp):
    """Another warp's products are in no order with it."""
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s, acc, bar):
        fill(a, b, a_s, b_s)

        def issue(number, *, accumulate):
            @plgpu.warp_map
            def _warps(w):
                @pl.when(w == number)
                def _mma():
                    plgpu.tcgen05_mma(acc, a_s, b_s, bar if accumulate else None, accumulate=accumulate)

        issue(1, accumulate=False)
        issue(warp, accumulate=True)
        plgpu.barrier_wait(bar)
        o[...] = load(acc)

    if warp == 1:
        got = run(body, a, b, scratch=buffers(a, b), schedule=schedule)
        np.testing.assert_array_equal(got, 2 * wanted)
    else:
        finding = found(body, a, b, scratch=buffers(a, b), schedule=schedule)
        assert finding.kind == "tmem-in-flight" and "warp 2" in finding.message and "warp 1" in finding.message


# --- copies -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("late", [0, 1, None])
def test_a_product_comes_after_the_copy_of_its_operand(schedule, late):
    """In whichever round the wait comes too late, and under each schedule, it is the copy that is in flight."""
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s, acc, bar, copied):
        b_s[...] = b[...]
        plgpu.commit_smem()
        for k in range(2):
            plgpu.copy_gmem_to_smem(a, a_s, copied)
            if k != late:
                plgpu.barrier_wait(copied)
            plgpu.tcgen05_mma(acc, a_s, b_s, bar, accumulate=k > 0)
            plgpu.barrier_wait(bar)
            if k == late:
                plgpu.barrier_wait(copied)
        o[...] = load(acc)

    scratch = buffers(a, b) | dict(copied=plgpu.Barrier())
    if late is None:
        np.testing.assert_array_equal(run(body, a, b, scratch=scratch, schedule=schedule), 2 * wanted)
    else:
        finding = found(body, a, b, scratch=scratch, schedule=schedule)
        assert finding.kind == "missing-wait" and "tcgen05_mma of the block reads" in finding.message


# --- time ---------------------------------------------------------------------------------------------------------
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
