"""Rules of copies: fences between the proxies, waits in each direction, groups, what is read of a buffer in flight."""

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
BUFFERS = plgpu.SMEM((3, *X.shape), X.dtype)
FLAG = jnp.zeros(1, jnp.int32)
TWO = dict(num_threads=2, thread_name="t")
SEM = plgpu.SemaphoreType.REGULAR


def thread():
    return lax.axis_index("t")


def stored(smem, y):
    plgpu.copy_smem_to_gmem(smem, y)
    plgpu.wait_smem_to_gmem(0)


# --- commit_smem ------------------------------------------------------------------------------------------------------
@rule("missing-fence", "commit_smem", bad=["none", "before", "cond", "other slot"], good=["kept", "slot"], lines=2)
def what_was_stored_by_hand_is_committed_before_a_copy(way):
    """No commit; one before the store; one that a condition leaves out; written again after the commit."""

    def body(n, x, y, smem):
        slot = n[0] + 1 if way == "slot" else 0
        if way == "before":
            plgpu.commit_smem()
        smem[slot] = x[...] + 1
        if way in ("kept", "slot", "other slot"):
            plgpu.commit_smem()
        if way == "cond":
            pl.when(n[0] == 1)(plgpu.commit_smem)
        if way == "other slot":
            smem[slot, 2:] = x[2:] + 1
        stored(smem.at[slot], y)

    return Program(body, [N + 1], (FLAG, X), [BUFFERS])


@rule("missing-fence", "commit_smem", bad=["after the arrival", "before the wait", "none", "third"],
      good=["writer", "reader"], lines=2)  # fmt: skip
def a_fence_stands_between_a_store_and_another_threads_copy(way):
    """The writer commits before it arrives, or whoever issues the copy does after the wait (facts 5.2)."""

    def body(x, y, smem, ready, more):
        @pl.when(thread() == 0)
        def _():
            smem[...] = x[...] + 1
            if way == "writer":
                plgpu.commit_smem()
            plgpu.barrier_arrive(ready)
            if way == "after the arrival":
                plgpu.commit_smem()

        @pl.when(thread() == 1)
        def _():
            if way == "before the wait":
                plgpu.commit_smem()
            plgpu.barrier_wait(ready)
            if way == "reader":
                plgpu.commit_smem()
            stored(smem, y)
            if way == "third":
                plgpu.commit_smem()

    return Program(body, [N + 1], (X,), [SMEM, plgpu.Barrier(), plgpu.Barrier()], TWO)


@rule("missing-fence", "commit_smem", bad=["read", "write", "other thread"],
      good=["read and commit", "write and commit", "other thread and commit", "only copies"], lines=2)  # fmt: skip
def what_was_touched_by_hand_is_committed_before_a_copy_overwrites_it(way):
    """In a loop over slots, in this thread or in another one that hands the buffer back by a barrier."""

    def body(x, y, smem, loaded, free):
        other, commit = way.startswith("other"), way.endswith("commit")

        def use(i):
            if way.startswith("write"):
                smem[0, 0] = x[0] + i
            elif way != "only copies":
                y[...] = smem[0] + i
            if commit:
                plgpu.commit_smem()

        def fetch(i):
            plgpu.copy_gmem_to_smem(x, smem.at[0], loaded)

        @pl.loop(0, 3)
        def _(i):
            @pl.when(thread() == 0)
            def _():
                if other:
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(free))
                fetch(i)
                if not other:
                    plgpu.barrier_wait(loaded)
                    use(i.astype(jnp.float32))

            if other:

                @pl.when(thread() == 1)
                def _():
                    plgpu.barrier_wait(loaded)
                    use(i.astype(jnp.float32))
                    pl.when(i < 2)(lambda: plgpu.barrier_arrive(free))

        if way.startswith("write") or way == "only copies":
            pl.when(thread() == 0)(lambda: y.__setitem__(..., x[...] + 2))

    return Program(body, [N + 2], (X,), [BUFFERS, plgpu.Barrier(), plgpu.Barrier()], TWO)


@rule("missing-fence", "commit_smem", bad=["none"], good=["commit"], lines=2)
def gmem_stored_by_hand_is_committed_before_a_copy_reads_it(way):
    def body(x, y, z, smem, barrier):
        y[...] = x[...] + 1
        if way == "commit":
            plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(y, smem, barrier)
        plgpu.barrier_wait(barrier)
        z[...] = smem[...]

    return Program(body, [N + 1, N + 1], (X,), [SMEM, plgpu.Barrier()])


# --- waits for copies to SMEM -----------------------------------------------------------------------------------------
@rule("missing-wait race", "", bad=["no wait", "other slot", "other barrier", "cond"], good=["kept"], lines=2)
def a_tile_is_read_after_the_wait_on_its_barrier(way):
    def body(n, x, y, smem, loaded):
        for slot in range(2):
            plgpu.copy_gmem_to_smem(x, smem.at[slot], loaded.at[slot])
        if way == "cond":
            pl.when(n[0] == 1)(lambda: plgpu.barrier_wait(loaded.at[0]))
        elif way != "no wait":
            plgpu.barrier_wait(loaded.at[0])
        y[...] = smem[1 if way.startswith("other") else 0]
        if way in ("no wait", "cond"):
            plgpu.barrier_wait(loaded.at[0])
        plgpu.barrier_wait(loaded.at[1])

    return Program(body, [N], (FLAG, X), [BUFFERS, plgpu.Barrier(num_barriers=2)])


@rule("race missing-wait", "", bad=["another thread", "early"], good=["kept"], lines=2)
def a_wait_serves_the_threads_that_it_is_passed_on_to(way):
    """One thread waits for the copy; another one reads the tile: only after a barrier between the two."""

    def body(x, y, smem, loaded, handed):
        @pl.when(thread() == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, smem, loaded)
            if way == "early":
                plgpu.barrier_arrive(handed)
            plgpu.barrier_wait(loaded)
            if way != "early":
                plgpu.barrier_arrive(handed)

        @pl.when(thread() == 1)
        def _():
            if way != "another thread":
                plgpu.barrier_wait(handed)
            y[...] = smem[...]
            if way == "another thread":
                plgpu.barrier_wait(handed)

    return Program(body, [N], (X,), [SMEM, plgpu.Barrier(), plgpu.Barrier()], TWO)


@rule("missing-wait race", "", bad=["same"], good=["apart"])
def two_copies_in_flight_do_not_write_one_place(way):
    def body(x, y, smem, loaded):
        for k in range(2):
            slot = k if way == "apart" else 0
            plgpu.copy_gmem_to_smem(x.at[pl.ds(2 * k, 2)], smem.at[slot, pl.ds(0, 2)], loaded)
        plgpu.barrier_wait(loaded)
        y[...] = smem[0, :2] + smem[1, :2] if way == "apart" else smem[0, :2]

    return Program(body, [N[:2] + N[2:]], (X,), [BUFFERS, plgpu.Barrier(num_arrivals=2)])


# --- copies to GMEM ---------------------------------------------------------------------------------------------------
@rule("missing-wait", "wait_smem_to_gmem", bad=["smem by hand", "smem by copy", "read gmem", "write gmem", "load gmem",
      "other thread", "other thread writes"], good=["kept", "read only, then smem", "handed on"], lines=2)  # fmt: skip
def what_a_store_uses_is_left_alone_until_it_was_waited_for(way):
    """`wait_read_only` frees the source; the destination is free after the full wait, in the thread that stored."""

    def body(x, y, z, smem, barrier, ready, handed):
        @pl.when(thread() == 0)
        def _():
            smem[0] = x[...] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.at[0], y)
            if way in ("kept", "handed on"):
                plgpu.wait_smem_to_gmem(0)
            elif way not in ("smem by hand", "smem by copy"):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if way == "smem by copy":
                plgpu.copy_gmem_to_smem(x, smem.at[0], barrier)
                plgpu.barrier_wait(barrier)
            if way in ("smem by hand", "read only, then smem", "kept"):
                smem[0] = x[...] * 5
            if way == "read gmem":
                z[...] = y[...]
            elif way == "write gmem":
                y[...] = x[...] + 1
            elif way == "load gmem":
                plgpu.copy_gmem_to_smem(y, smem.at[1], barrier)
                plgpu.barrier_wait(barrier)
            plgpu.barrier_arrive(handed)
            plgpu.wait_smem_to_gmem(0)
            if way not in ("read gmem", "other thread", "other thread writes", "handed on"):
                z[...] = y[...]

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_wait(handed)
            if way in ("other thread", "handed on"):
                plgpu.wait_smem_to_gmem(0)  # of its own stores, of which there are none
                z[...] = y[...]
            elif way == "other thread writes":
                y[...] = x[...]

    scratch = [BUFFERS, *[plgpu.Barrier()] * 3]
    return Program(body, [N + 1, N + 1], (X,), scratch, TWO, {"uninitialized_reads": "allow"})


@rule("missing-wait", "wait_smem_to_gmem", bad=[("latest", 1), ("first", 2), ("open", 0), ("grouped", 1)],
      good=[("first", 1), ("latest", 0), ("grouped", 0), ("committed", 0)], lines=2)  # fmt: skip
def waits_count_groups_of_stores_from_the_latest(way):
    """Which buffer is overwritten after `wait_smem_to_gmem(n)`; "open": no commit; "grouped": both in one group."""
    which, left = way

    def body(x, y, smem):
        for k in range(2):
            smem[k] = x[...] + k
        plgpu.commit_smem()
        apart = which in ("first", "latest")
        plgpu.copy_smem_to_gmem(smem.at[0], y.at[0], commit_group=apart)
        plgpu.copy_smem_to_gmem(smem.at[1], y.at[1], commit_group=which not in ("open", "committed"))
        if which == "committed":
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(left, wait_read_only=True)
        smem[1 if which == "latest" else 0] = x[...] * 9
        if which == "open":
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    return Program(body, [np.stack([N, N + 1])], (X,), [BUFFERS])


@rule("missing-wait", "wait_smem_to_gmem", bad=["none", "cond", "group"], good=["kept", "read only"], lines=1)
def a_thread_does_not_end_while_its_stores_read(way):
    def body(n, x, y, smem):
        smem[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y, commit_group=way != "group")
        if way == "cond":
            pl.when(n[0] == 1)(lambda: plgpu.wait_smem_to_gmem(0))
        elif way != "none":
            plgpu.wait_smem_to_gmem(0, wait_read_only=way == "read only")

    return Program(body, [N], (FLAG, X), [SMEM])


@rule("missing-wait race missing-fence", "", bad=["no wait", "read only", "signal first"], good=["kept"], lines=2)
def another_block_reads_what_was_stored_after_wait_and_signal(way):
    def body(x, y, z, smem, _):
        ready = pl.get_global(SEM)

        @pl.when(lax.axis_index("i") == 0)
        def _():
            smem[...] = x[...] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y)
            if way == "signal first":
                pl.semaphore_signal(ready)
            if way != "no wait":
                plgpu.wait_smem_to_gmem(0, wait_read_only=way == "read only")
            if way != "signal first":
                pl.semaphore_signal(ready)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("i") == 1)
        def _():
            pl.semaphore_wait(ready)
            z[...] = y[...]

    mesh = dict(grid=(2,), grid_names=("i",))
    return Program(body, [N + 1, N + 1], (X,), [SMEM, SMEM], mesh, {"uninitialized_reads": "allow"})


@rule("uninitialized-read", "write it first", bad=["all", "part, read again"], good=["kept", "part"], lines=1)
def what_was_never_written_is_not_stored(way):
    """Rows that nobody wrote may go to GMEM, as long as nobody reads them there."""

    def body(x, y, z, smem):
        if way != "all":
            rows = pl.ds(0, 4 if way == "kept" else 2)
            smem[rows] = x[rows]
        plgpu.commit_smem()
        stored(smem, y)
        if way == "part":
            z[...] = jnp.concatenate([y[:2], y[:2]])
        else:
            z[...] = y[...]

    twice = np.concatenate([N[:2], N[:2]])
    y = N if way == "kept" else np.concatenate([N[:2], np.full((2, 128), np.nan, np.float32)])
    return Program(body, [y, twice if way == "part" else N], (X,), [SMEM])


@rule("misaligned", "tile", bad=["in row", "in column", "out row", "batch"], good=["kept", "slot"])
def gmem_offsets_are_whole_tiles(way):
    big = numbers(32, 128, dtype=jnp.float16)
    tiled = plgpu.SMEM(
        (2, 8, 64), jnp.float16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )

    def body(n, x, y, smem, barrier):
        row = n[0] + {"in row": 4, "batch": 20}.get(way, 8)
        column = n[0] + (32 if way == "in column" else 64)
        slot = n[0] + 1 if way == "slot" else 0
        plgpu.copy_gmem_to_smem(x.at[pl.ds(row, 8)].at[:, pl.ds(column, 64)], smem.at[slot], barrier)
        plgpu.barrier_wait(barrier)
        stored(smem.at[slot], y.at[pl.ds(n[0] + (4 if way == "out row" else 0), 8)])

    expected = np.asarray(big)[8:16, 64:]
    out = [] if way in ("kept", "slot") else [struct((32, 64), jnp.float16)]
    return Program(body, [expected], (FLAG, big), [tiled, plgpu.Barrier()], out=out)
