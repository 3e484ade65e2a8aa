"""Rules of barriers and of threads: completions, waits, arrivals, scopes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import numbers
from simulator.gpu.rules.registry import Program, rule, struct

X = numbers(4, 128)
N = np.asarray(X)
SMEM = plgpu.SMEM(X.shape, X.dtype)
TWO = dict(num_threads=2, thread_name="t")
THREE = dict(num_threads=3, thread_name="t")


def thread():
    return lax.axis_index("t")


@rule("race barrier-double-completion", "", bad=["late", "none"], good=["kept"])
def a_queue_of_three_slots_needs_back_pressure(way):
    """Phases wrap around: 3 slots, 8 items. The producer waits for a slot's consumer one round late, or never."""
    slots, steps = 3, 8
    first = {"kept": slots, "late": 2 * slots, "none": 99}[way]

    def body(x, y, queue, produced, consumed):
        @pl.when(thread() == 0)
        def _():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)
                pl.when(i >= first)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                queue[slot] = x[0] + i.astype(jnp.float32)
                plgpu.barrier_arrive(produced.at[slot])

        @pl.when(thread() == 1)
        def _():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(produced.at[slot])
                y[i] = queue[slot]
                pl.when(i < steps - slots)(lambda: plgpu.barrier_arrive(consumed.at[slot]))

    expected = N[0][None] + np.arange(steps, dtype=np.float32)[:, None]
    scratch = [plgpu.SMEM((slots, 128), X.dtype), *[plgpu.Barrier(num_barriers=slots)] * 2]
    return Program(body, [expected], (X,), scratch, TWO)


@rule("barrier-double-completion", "second barrier", bad=["no wait", "other wait"], good=["kept"], lines=1)
def a_barrier_completes_again_only_when_it_was_waited_for(way):
    """Arrivals by hand, no data: the second arrival is ordered after the wait for the first, or not."""

    def body(x, y, ready, back, other):
        @pl.when(thread() == 0)
        def _():
            plgpu.barrier_arrive(ready)
            if way == "kept":
                plgpu.barrier_wait(back)
            if way == "other wait":
                plgpu.barrier_wait(other)
            plgpu.barrier_arrive(ready)

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_arrive(other)
            plgpu.barrier_wait(ready)
            if way == "kept":
                plgpu.barrier_arrive(back)
            plgpu.barrier_wait(ready)
            y[...] = x[...]

        if way != "other wait":
            pl.when(thread() == 0)(lambda: plgpu.barrier_wait(other))

    return Program(body, [N], (X,), [plgpu.Barrier()] * 3, TWO)


@rule("barrier-partial-waits barrier-double-completion deadlock", "", bad=["skips", "turns"], good=["both"])
def each_of_two_observers_waits_for_each_completion(way):
    def body(x, y, ready, back):
        @pl.loop(0, 4)
        def _(i):
            @pl.when(thread() == 0)
            def _():
                plgpu.barrier_arrive(ready)
                plgpu.barrier_wait(back)

            @pl.when(thread() > 0)
            def _():
                waits = {
                    "both": i >= 0,
                    "skips": jnp.logical_or(thread() == 1, i != 2),
                    "turns": lax.rem(i, 2) == thread() - 1,
                }[way]
                pl.when(waits)(lambda: plgpu.barrier_wait(ready))
                plgpu.barrier_arrive(back)

        pl.when(thread() == 1)(lambda: y.__setitem__(..., x[...]))

    return Program(body, [N], (X,), [plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)], THREE)


@rule("barrier-unwaited-completion", "wait for the last ones", bad=[(0, 1), (1, 0), (0, 0)], good=[(1, 1)])
def completions_of_a_scope_are_waited_for_by_each_observer(way):
    """The scope is entered three times; in the last round some observer leaves out its wait."""

    def body(x, y):
        @pl.loop(0, 3)
        def _(i):
            def scope(ready, back):
                @pl.when(thread() == 0)
                def _():
                    plgpu.barrier_arrive(ready)
                    plgpu.barrier_wait(back)
                    plgpu.barrier_arrive(ready)

                @pl.when(thread() > 0)
                def _():
                    plgpu.barrier_wait(ready)
                    plgpu.barrier_arrive(back)
                    waits = jnp.where(thread() == 1, way[0], way[1])
                    pl.when(jnp.logical_or(i < 2, waits == 1))(lambda: plgpu.barrier_wait(ready))

            pl.run_scoped(scope, plgpu.Barrier(), plgpu.Barrier(num_arrivals=2), collective_axes="t")

        pl.when(thread() == 1)(lambda: y.__setitem__(..., x[...]))

    return Program(body, [N], (X,), (), THREE)


@rule("barrier-unwaited-completion", "nobody waited", warns=True)
def completions_of_scratch_barriers_are_waited_for(ok):
    def body(x, y, barrier):
        y[...] = x[...]
        plgpu.barrier_arrive(barrier)
        if ok:
            plgpu.barrier_wait(barrier)

    return Program(body, [N], (X,), [plgpu.Barrier()])


@rule("deadlock", "arrival", bad=["two waits", "too few", "predicate", "other slot"], good=["kept"])
def each_wait_has_its_completion(way):
    arrivals = 2 if way == "too few" else 1

    def body(x, y, smem, barriers):
        plgpu.copy_gmem_to_smem(x, smem, barriers.at[0], predicate=x[0, 0] > 99 if way == "predicate" else None)
        plgpu.barrier_wait(barriers.at[1 if way == "other slot" else 0])
        if way == "two waits":
            plgpu.barrier_wait(barriers.at[0])
        y[...] = smem[...]

    return Program(body, [N], (X,), [SMEM, plgpu.Barrier(num_arrivals=arrivals, num_barriers=2)])


@rule("barrier-double-completion barrier-unwaited-completion", "num_arrivals")
def several_copies_on_a_barrier_need_as_many_arrivals(ok):
    def body(x, y, smem, barrier):
        for half in range(2):
            rows = pl.ds(2 * half, 2)
            plgpu.copy_gmem_to_smem(x.at[rows], smem.at[rows], barrier)
        plgpu.barrier_wait(barrier)
        if not ok:
            plgpu.barrier_wait(barrier)
        y[...] = smem[...]

    return Program(body, [N], (X,), [SMEM, plgpu.Barrier(num_arrivals=2 if ok else 1)])


@rule("race", "nothing orders the two", bad=["none", "before", "cond"], good=["kept"], lines=2)
def threads_that_share_smem_meet(way):
    """No barrier; the arrival before the store; a wait under a condition that is false."""

    def body(n, x, y, smem, ready):
        @pl.when(thread() == 0)
        def _():
            if way == "before":
                plgpu.barrier_arrive(ready)
            smem[...] = x[...] * 2
            if way != "before":
                plgpu.barrier_arrive(ready)

        @pl.when(thread() == 1)
        def _():
            if way in ("kept", "before"):
                plgpu.barrier_wait(ready)
            elif way == "cond":
                pl.when(n[0] == 1)(lambda: plgpu.barrier_wait(ready))
            y[...] = smem[...]
            if way == "none":
                plgpu.barrier_wait(ready)

    interpret = {} if way == "kept" else {"uninitialized_reads": "allow"}
    return Program(body, [2 * N], (jnp.zeros(1, jnp.int32), X), [SMEM, plgpu.Barrier()], TWO, interpret)


@rule("deadlock", "nobody is left|none can go on", bad=["cycle", "one side"], good=["kept"])
def threads_do_not_wait_for_each_other_in_a_circle(way):
    def body(x, y, a, b):
        @pl.when(thread() == 0)
        def _():
            if way == "cycle":
                plgpu.barrier_wait(b)
                plgpu.barrier_arrive(a)
            else:
                plgpu.barrier_arrive(a)
                plgpu.barrier_wait(b)

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_wait(a)
            if way != "one side":
                plgpu.barrier_arrive(b)
            y[...] = x[...]

    return Program(body, [N], (X,), [plgpu.Barrier()] * 2, TWO)


@rule("collective-mismatch", "collective", bad=["alone", "some"], good=["kept", "cond of all"])
def smem_of_scopes_is_allocated_by_all_threads(way):
    def body(n, x, y):
        def scope(smem):
            pl.when(thread() == 0)(lambda: y.__setitem__(..., x[...]))

        def allocate():
            pl.run_scoped(scope, SMEM, collective_axes=None if way == "alone" else "t")

        if way in ("some", "cond of all"):
            pl.when(thread() == 0 if way == "some" else n[0] == 0)(allocate)
        else:
            allocate()

    return Program(body, [N], (jnp.zeros(1, jnp.int32), X), (), TWO)


@rule("missing-wait missing-fence race", "", bad=["no wait", "no commit"], good=["kept"], lines=2)
def the_memory_of_a_scope_is_used_again(way):
    """Two scopes in a row get the same memory; TMA fills the second while the first is in use."""

    def body(x, y):
        def first(smem):
            smem[...] = x[...] + 1
            y[...] = smem[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y)
            if way != "no wait":
                plgpu.wait_smem_to_gmem(0, wait_read_only=way == "kept")
            if way == "no commit":
                y[...] = smem[...] * 2

        def second(smem, barrier):
            plgpu.copy_gmem_to_smem(x, smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.wait_smem_to_gmem(0)
            y[...] = smem[...]

        pl.run_scoped(first, SMEM)
        pl.run_scoped(second, SMEM, plgpu.Barrier())

    return Program(body, [N], (X,), ())


@rule("missing-wait race", "", bad=["copy", "thread", "later"], good=["kept"])
def a_scope_ends_when_nobody_writes_its_memory(way):
    """A copy in flight whose barrier lives on; a thread that is told too late."""

    def body(x, y, loaded):
        def scope(smem):
            @pl.when(thread() == 0)
            def _():
                plgpu.copy_gmem_to_smem(x, smem, loaded)
                if way == "kept":
                    plgpu.barrier_wait(loaded)
                    y[...] = smem[...]
                    plgpu.commit_smem()

        pl.run_scoped(scope, SMEM, collective_axes="t")
        if way == "thread":
            pl.run_scoped(lambda other: other.__setitem__(thread(), x[0]), SMEM, collective_axes="t")
        if way != "kept":
            pl.when(thread() == 0)(lambda: plgpu.barrier_wait(loaded))

    return Program(body, [N], (X,), [plgpu.Barrier()], TWO)


@rule("uninitialized-read", "write it first", bad=["smem", "slot", "part"], good=["kept"])
def smem_is_written_before_it_is_read(way):
    def body(x, y, smem):
        if way == "kept":
            smem[0] = x[...]
        if way == "slot":
            smem[1] = x[...]
        if way == "part":
            smem[0, 1:] = x[1:]
        y[...] = smem[0]

    return Program(body, [N], (X,), [plgpu.SMEM((2, *X.shape), X.dtype)])


@rule("out-of-bounds", "", bad=["slot", "barrier", "copy", "negative"], good=["kept"])
def indices_stay_inside(way):
    def body(n, x, y, smem, barriers):
        slot = n[0]
        there = {"slot": slot + 2, "copy": slot + 2, "negative": slot - 3}.get(way, slot)
        plgpu.copy_gmem_to_smem(
            x, smem.at[there if way == "copy" else slot], barriers.at[slot + 2 if way == "barrier" else slot]
        )
        plgpu.barrier_wait(barriers.at[slot])
        y[...] = smem[there]

    scratch = [plgpu.SMEM((2, *X.shape), X.dtype), plgpu.Barrier(num_barriers=2)]
    return Program(body, [N], (jnp.zeros(1, jnp.int32), X), scratch)


@rule("deadlock", "", bad=[8], good=[2])
def blocks_that_wait_for_each_other_run_together(blocks):
    """A grid larger than the machine, whose blocks wait for all of them: a persistent kernel has as many as fit."""

    def body(y):
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR)
        pl.semaphore_signal(ready)
        pl.semaphore_wait(ready, blocks, decrement=False)
        y[lax.axis_index("i")] = jnp.ones(128)
        finished = pl.get_global(plgpu.SemaphoreType.REGULAR)
        pl.semaphore_signal(finished)

        @pl.when(lax.axis_index("i") == 0)
        def _():
            pl.semaphore_wait(finished, blocks)
            pl.semaphore_wait(ready, blocks)

    smem = plgpu.SMEM((48, 1024), jnp.float32)
    interpret = {"num_sms": 2}
    return Program(
        lambda y, _: body(y), [np.ones((blocks, 128), np.float32)], (), [smem],
        dict(grid=(blocks,), grid_names=("i",)), interpret,
    )  # fmt: skip


@rule("race", "block i=", bad=["store", "scalar"], good=["apart"], lines=1)
def blocks_that_write_one_place_race(way):
    def body(x, y):
        i = lax.axis_index("i")
        if way == "scalar":
            y[0, 0] = x[0, 0]
        else:
            y[i if way == "apart" else i // 2] = x[0]

    expected = [np.stack([N[0]] * 4)] if way == "apart" else None
    return Program(body, expected, (X,), (), dict(grid=(4,), grid_names=("i",)), out=[struct((4, 128))])
