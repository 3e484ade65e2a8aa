"""Rules of clusters: collective copies, memory that blocks share, leader-tracked copies, barriers across blocks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import numbers
from simulator.gpu.rules.registry import Program, rule

X = numbers(8, 128)
N = np.asarray(X)
SMEM = plgpu.SMEM(X.shape, X.dtype)
PAIR = dict(cluster=(2,), cluster_names=("c",))
SQUARE = dict(cluster=(2, 2), cluster_names=("a", "b"))
BOTH = plgpu.ClusterBarrier(collective_axes=("c",))


def me():
    return lax.axis_index("c")


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@rule("collective-mismatch", "same copies", bad=["one block", "predicate", "cond"], good=["kept", "neither"])
def every_block_issues_a_collective_copy(way):
    def body(n, x, y, smem, loaded, ready):
        smem[...] = x[...]
        plgpu.commit_smem()
        meet(ready)
        happens = {"one block": me() == 0, "cond": me() == n[0], "neither": n[0] == 1}.get(way, n[0] == 0)

        def copy():
            here = me() == 0 if way == "predicate" else None
            plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="c", predicate=here)

        pl.when(happens)(copy)
        pl.when(happens)(lambda: plgpu.barrier_wait(loaded))
        pl.when(jnp.logical_or(happens, way == "neither"))(lambda: y.__setitem__(me(), smem[...]))

    return Program(body, [np.stack([N, N])], (jnp.zeros(1, jnp.int32), X), [SMEM, plgpu.Barrier(), BOTH], PAIR)


@rule("collective-mismatch", "", bad=["order", "source", "target", "operand", "barrier"], good=["kept"], lines=1)
def collective_copies_are_the_same_in_every_block(way):
    """Another order, slice of the source, slot of the target, operand, or barrier in one of the blocks."""

    def body(x, w, y, smem, loaded):
        second = me() == 1

        def copy(source, slot, bar):
            plgpu.copy_gmem_to_smem(source, smem.at[slot], loaded.at[bar], collective_axes="c")

        def two(swap):
            for k in (1, 0) if swap else (0, 1):
                copy(x.at[pl.ds(4 * k, 4)], k, 0)

        if way == "order":
            pl.when(second)(lambda: two(True))
            pl.when(jnp.logical_not(second))(lambda: two(False))
        elif way == "source":
            copy(x.at[pl.ds(4 * me(), 4)], 0, 0)
            copy(x.at[pl.ds(4, 4)], 1, 0)
        elif way == "target":
            copy(x.at[pl.ds(0, 4)], me(), 0)
            copy(x.at[pl.ds(4, 4)], 1 - me(), 0)
        elif way == "operand":
            pl.when(second)(lambda: copy(w.at[pl.ds(0, 4)], 0, 0))
            pl.when(jnp.logical_not(second))(lambda: copy(x.at[pl.ds(0, 4)], 0, 0))
            copy(x.at[pl.ds(4, 4)], 1, 0)
        elif way == "barrier":
            copy(x.at[pl.ds(0, 4)], 0, me())
            copy(x.at[pl.ds(4, 4)], 1, 1 - me())
        else:
            two(False)
        plgpu.barrier_wait(loaded.at[0])
        y[me(), pl.ds(0, 4)] = smem[0]
        y[me(), pl.ds(4, 4)] = smem[1]

    arrivals = 2 if way != "barrier" else 1
    scratch = [plgpu.SMEM((2, 4, 128), X.dtype), plgpu.Barrier(num_arrivals=arrivals, num_barriers=2)]
    return Program(body, [np.stack([N, N])], (X, X + 1), scratch, PAIR)


@rule("collective-mismatch race", "all blocks along the axes|same copies", bad=["other axis"], good=["a", "b", "both"])
def collective_copies_are_along_the_same_axis(way):
    """A cluster of two by two: the block at a=0, b=0 takes another axis than the others."""

    def body(x, y, smem, loaded):
        a, b = lax.axis_index("a"), lax.axis_index("b")
        axes = {"b": "b", "both": ("a", "b")}.get(way, "a")

        def copy(along):
            plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes=along)

        if way == "other axis":
            first = jnp.logical_and(a == 0, b == 0)
            pl.when(first)(lambda: copy("b"))
            pl.when(jnp.logical_not(first))(lambda: copy("a"))
        else:
            copy(axes)
        plgpu.barrier_wait(loaded)
        y[a, b] = smem[...]

    return Program(body, [np.stack([N] * 4).reshape(2, 2, *N.shape)], (X,), [SMEM, plgpu.Barrier()], SQUARE)


@rule("race missing-fence missing-wait", "", bad=["none", "own barrier", "before the read", "no commit"], good=["kept"],
      lines=2)  # fmt: skip
def smem_of_a_cluster_is_used_again_after_a_cluster_barrier(way):
    """Slots of a buffer in a loop; no ClusterBarrier, a Barrier of the block's own, or one that comes too early."""

    def body(x, y, smem, loaded, free, own):
        @pl.loop(0, 3)
        def _(i):
            plgpu.copy_gmem_to_smem(x, smem.at[0], loaded, collective_axes="c")
            plgpu.barrier_wait(loaded)
            if way == "before the read":
                meet(free)
            y[me()] = smem[0] + i.astype(jnp.float32)
            if way != "no commit":
                plgpu.commit_smem()
            if way in ("kept", "no commit"):
                meet(free)
            elif way == "own barrier":
                meet(own)

    scratch = [plgpu.SMEM((1, *X.shape), X.dtype), plgpu.Barrier(), BOTH, plgpu.Barrier()]
    return Program(body, [np.stack([N, N]) + 2], (X,), scratch, PAIR)


@rule("deadlock", "leader_tracked", bad=["second waits"], good=["kept"])
def the_second_block_does_not_wait_for_a_leader_tracked_copy(way):
    def body(x, y, smem, loaded, told):
        plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="c", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))
        if way == "kept":
            pl.when(me() == 0)(lambda: plgpu.barrier_wait(loaded))
        else:
            plgpu.barrier_wait(loaded)
        meet(told)
        y[pl.ds(4 * me(), 4)] = smem[...]

    scratch = [plgpu.SMEM((4, 128), X.dtype), plgpu.Barrier(), BOTH]
    return Program(body, [N], (X,), scratch, PAIR, {"arch": "sm_100a"})


@rule("missing-wait race", "", bad=["second reads"], good=["told"], lines=2)
def the_second_block_learns_of_a_leader_tracked_copy_from_the_first(way):
    def body(x, y, smem, loaded, told):
        plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="c", leader_tracked=plgpu.CopyPartition.REPLICATED)
        pl.when(me() == 0)(lambda: plgpu.barrier_wait(loaded))
        if way == "told":
            meet(told)
        y[me()] = smem[...]
        if way != "told":
            meet(told)

    interpret = {"arch": "sm_100a", "uninitialized_reads": "allow"}
    return Program(body, [np.stack([N, N])], (X,), [SMEM, plgpu.Barrier(), BOTH], PAIR, interpret)


@rule("race", "", bad=["none", "own barrier", "read late"], good=["kept"], lines=2)
def the_memory_of_another_block_is_read_between_two_meetings(way):
    """After its block has written it, and before its block writes it again."""

    def body(x, y, smem, one, two, own):
        smem[...] = x[...] + me().astype(jnp.float32)
        if way == "own barrier":
            meet(own)
        elif way != "none":
            meet(one)
        other = plgpu.cluster_ref(smem, {"c": 1 - me()})
        value = other[...]
        y[me()] = value
        if way == "read late":
            smem[...] = x[...]
        meet(two)

    interpret = {} if way == "kept" else {"uninitialized_reads": "allow"}
    return Program(body, [np.stack([N + 1, N])], (X,), [SMEM, BOTH, BOTH, plgpu.Barrier()], PAIR, interpret)


@rule("deadlock barrier-unwaited-completion", "", bad=["one arrives", "twice"], good=["kept"])
def all_blocks_arrive_on_a_cluster_barrier(way):
    def body(x, y, both):
        if way == "one arrives":
            pl.when(me() == 0)(lambda: plgpu.barrier_arrive(both))
        else:
            plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)
        if way == "twice":
            plgpu.barrier_wait(both)
        y[me()] = x[...]

    return Program(body, [np.stack([N, N])], (X,), [BOTH], PAIR)


@rule("race", "not ended", bad=["last"], good=["kept"], warns=True)
def a_block_does_not_end_while_another_one_uses_its_memory(way):
    """Shared memory of a block is there as long as the block is: whoever is read waits for the reader."""

    def body(x, y, smem, one, two):
        smem[...] = x[...] + me().astype(jnp.float32)
        meet(one)
        y[me()] = plgpu.cluster_ref(smem, {"c": 1 - me()})[...]
        if way == "kept":
            meet(two)

    return Program(body, [np.stack([N + 1, N])], (X,), [SMEM, BOTH, BOTH], PAIR)
