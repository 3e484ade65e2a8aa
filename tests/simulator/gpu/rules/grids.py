"""Rules of what blocks and devices share, of semaphores, of memory that has two names, and of what a block may have."""

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
SEM = plgpu.SemaphoreType.REGULAR
FLAG = jnp.zeros(1, jnp.int32)
TWO = dict(num_threads=2, thread_name="t")
GRID = dict(grid=(2,), grid_names=("i",))


def thread():
    return lax.axis_index("t")


# --- one memory, two names --------------------------------------------------------------------------------------------
@rule("missing-fence missing-wait race", "", bad=["no commit", "no wait", "thread"], good=["kept"], lines=2)
def alternatives_of_a_union_are_one_memory(way):
    """A RefUnion: what is stored in one alternative is in the way of a copy to the other."""

    def body(x, y, union, loaded, ready):
        one, other = union

        def fill():
            plgpu.copy_gmem_to_smem(x, other, loaded)
            if way != "no wait":
                plgpu.barrier_wait(loaded)
            y[...] = other[...]
            if way == "no wait":
                plgpu.barrier_wait(loaded)

        @pl.when(thread() == 0)
        def _():
            one[...] = x[...] + 1
            y[...] = one[...]
            if way != "no commit":
                plgpu.commit_smem()
            if way != "thread":
                fill()
            plgpu.barrier_arrive(ready)

        @pl.when(thread() == 1)
        def _():
            if way == "thread":
                fill()
            plgpu.barrier_wait(ready)

    union = plgpu.RefUnion(SMEM, plgpu.SMEM(X.shape, X.dtype))
    interpret = {} if way == "kept" else {"uninitialized_reads": "allow"}
    return Program(body, [N], (X,), [union, plgpu.Barrier(), plgpu.Barrier()], TWO, interpret)


@rule("race", "nothing orders the two", bad=["overlap", "transposed", "strided"], good=["apart", "other rows"])
def threads_write_different_parts(way):
    def body(x, y, smem, ready):
        t = thread()
        if way == "overlap":
            smem[pl.ds(t, 3)] = x[pl.ds(t, 3)]
        elif way == "transposed":
            view = plgpu.transpose_ref(smem, (1, 0))
            pl.when(t == 0)(lambda: view.__setitem__((pl.ds(0, 64), slice(None)), x[:, :64].T))
            pl.when(t == 1)(lambda: smem.__setitem__((slice(None), pl.ds(32, 96)), x[:, 32:]))
        elif way == "strided":
            pl.when(t == 0)(lambda: smem.__setitem__(pl.ds(0, 2, 2), x[::2]))
            pl.when(t == 1)(lambda: smem.__setitem__(pl.ds(2, 2), x[2:]))
        elif way == "other rows":
            pl.when(t == 0)(lambda: smem.__setitem__(pl.ds(0, 2, 2), x[::2]))
            pl.when(t == 1)(lambda: smem.__setitem__(pl.ds(1, 2, 2), x[1::2]))
        else:
            smem[pl.ds(2 * t, 2)] = x[pl.ds(2 * t, 2)]
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        pl.when(t == 0)(lambda: y.__setitem__(..., smem[...]))

    return Program(body, [N], (X,), [SMEM, plgpu.Barrier(num_arrivals=2)], TWO)


# --- GMEM -------------------------------------------------------------------------------------------------------------
@rule("missing-wait race", "", bad=["early"], good=["kept"], lines=2)
def the_source_of_a_copy_is_left_alone_until_it_was_waited_for(way):
    def body(x, y, z, smem, loaded):
        y[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(y, smem, loaded)
        if way == "kept":
            plgpu.barrier_wait(loaded)
        y[...] = x[...] + 1
        if way != "kept":
            plgpu.barrier_wait(loaded)
        z[...] = smem[...]

    return Program(body, [N + 1, N], (X,), [SMEM, plgpu.Barrier()])


@rule("race", "", bad=["no signal", "before", "too few"], good=["kept", "all"], lines=2)
def a_block_reads_what_others_stored_after_their_signals(way):
    """Two blocks signal; a wait for one of two signals does not tell which."""
    count = 3

    def body(x, y, z):
        i, ready = lax.axis_index("i"), pl.get_global(SEM)

        @pl.when(i < 2)
        def _():
            if way == "before":
                pl.semaphore_signal(ready)
            y[i] = x[i] + 1
            if way != "before":
                pl.semaphore_signal(ready)

        @pl.when(i == 2)
        def _():
            if way == "too few":
                pl.semaphore_wait(ready)
            elif way != "no signal":
                pl.semaphore_wait(ready, 2)
            z[...] = y[:2]
            if way in ("no signal", "too few"):
                pl.semaphore_wait(ready, 2 if way == "no signal" else 1)

    expected = [np.concatenate([N[:2] + 1]), N[:2] + 1]
    mesh, interpret = dict(grid=(count,), grid_names=("i",)), {"uninitialized_reads": "allow"}
    return Program(body, expected, (X,), (), mesh, interpret)


@rule("semaphore-leftover", "ends at", bad=["twice", "no wait", "no decrement"], good=["kept"], warns=True)
def semaphores_end_at_zero(way):
    def body(x, y):
        ready = pl.get_global(SEM)
        pl.semaphore_signal(ready, 2 if way == "twice" else 1)
        if way != "no wait":
            pl.semaphore_wait(ready, decrement=way != "no decrement")
        y[...] = x[...]

    return Program(body, [N], (X,), ())


@rule("deadlock", "", bad=["one for two", "polls"], good=["two", "polled"])
def two_global_semaphores_are_two(way):
    def body(x, y):
        a, b = pl.get_global(SEM), pl.get_global(SEM)
        i = lax.axis_index("i")

        @pl.when(i == 0)
        def _():
            y[0] = x[0]
            pl.semaphore_signal(b if way in ("one for two", "polls") else a)

        @pl.when(i == 1)
        def _():
            if way in ("polls", "polled"):
                lax.while_loop(lambda _: pl.semaphore_read(a) < 1, lambda c: c + 1, 0)
            pl.semaphore_wait(a)
            y[1] = x[1]

    return Program(body, [N[:2]], (X,), (), GRID)


@rule("race missing-wait", "", bad=["no wait", "no signal"], good=["kept"], lines=0)
def devices_read_what_others_wrote_after_their_signals(way):
    def body(x, y, z, done):
        me = lax.axis_index("d")
        plgpu.remote_ref(y, 1 - me)[...] = x[...]
        pl.semaphore_signal(done, device_id=1 - me if way != "no signal" else me)
        if way != "no wait":
            pl.semaphore_wait(done)
        z[...] = y[...]
        if way == "no wait":
            pl.semaphore_wait(done)

    swapped = np.concatenate([N[2:], N[:2]])
    half = struct((2, 128))
    return Program(body, [swapped, swapped], (X,), [SEM], {}, {"uninitialized_reads": "allow"}, [half, half], 2)


# --- what a block may have --------------------------------------------------------------------------------------------
@rule("smem-overflow", "232,448", bad=["bytes", "barrier", "scope", "union"], good=["kept", "shared"], lines=0)
def smem_has_227_kib(way):
    """All of it; one row more; all of it and a barrier; and a scope; alternatives of a union count once."""
    rows = 227 + (way == "bytes")
    whole = plgpu.SMEM((rows, 256), X.dtype)
    more = [plgpu.Barrier()] if way == "barrier" else []
    if way in ("shared", "union"):
        halves = [plgpu.SMEM((128, 256), X.dtype), plgpu.SMEM((99 + (way == "union"), 256), X.dtype)]
        whole = plgpu.RefUnion(whole, halves)

    def body(x, y, smem, *barriers):
        if way == "scope":
            pl.run_scoped(lambda more: None, plgpu.SMEM((1, 256), X.dtype))
        y[...] = x[...]

    return Program(body, [N], (X,), [whole, *more])


@rule("register-overflow", "registers", bad=[(40, 240, 240, 24), (240, 240, 240, 24)], good=[(40, 216, 216, 24)])
def registers_of_all_threads(counts):
    """The register file has 64 Ki registers, 512 a CUDA thread of four warpgroups; each starts with 128."""

    def body(x, y):
        for k, n in enumerate(counts):
            action = "decrease" if n < 128 else "increase"
            pl.when(thread() == k)(lambda n=n, action=action: plgpu.set_max_registers(n, action=action))
        pl.when(thread() == 0)(lambda: y.__setitem__(..., x[...]))

    return Program(body, [N], (X,), (), dict(num_threads=4, thread_name="t"))


@rule("", "(?i)cluster|threads|wgmma|tcgen05|tensor memory|TMEM", bad=["cluster", "threads", "wgmma", "tmem"],
      good=["kept"], error=Exception)  # fmt: skip
def the_chip_has_what_is_asked_for(way):
    def body(x, y):
        if way == "wgmma":
            pl.run_scoped(lambda acc: plgpu.wgmma(acc, x, x), plgpu.ACC((64, 64), jnp.float32))
        if way == "tmem":
            pl.run_scoped(lambda tmem: plgpu.commit_tmem(), plgpu.TMEM((128, 64), jnp.float32))
        first = lax.axis_index("t") == 0 if way == "threads" else True
        pl.when(first)(lambda: y.__setitem__(..., x[...]))

    mesh = {"cluster": dict(cluster=(32,), cluster_names=("c",)), "threads": dict(num_threads=9, thread_name="t")}
    arch = "sm_90a" if way == "tmem" else "sm_100a"
    return Program(body, [N], (X,), (), mesh.get(way, {}), {"arch": arch})


@rule("tmem-in-flight", "", bad=["same half"], good=["other half"], lines=2)
def halves_of_an_accumulator_are_apart(way):
    """A double-buffered accumulator: a product fills one half while the other one is loaded."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    a, b = numbers(128, 64, dtype=jnp.float16), numbers(64, 64, dtype=jnp.float16)
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32)

    def body(a, b, o, a_s, b_s, acc, loaded, done):
        plgpu.copy_gmem_to_smem(a, a_s, loaded)
        plgpu.copy_gmem_to_smem(b, b_s, loaded)
        plgpu.barrier_wait(loaded)
        halves = [acc.at[:, pl.ds(0, 64)], acc.at[:, pl.ds(64, 64)]]
        plgpu.tcgen05_mma(halves[0], a_s, b_s, done.at[0], accumulate=False)
        plgpu.barrier_wait(done.at[0])
        second = halves[1] if way == "other half" else halves[0]
        plgpu.tcgen05_mma(second, a_s, b_s, done.at[1], accumulate=False)
        o[...] = plgpu.async_load_tmem(halves[0])
        plgpu.wait_load_tmem()
        plgpu.barrier_wait(done.at[1])

    scratch = [
        plgpu.SMEM(a.shape, a.dtype, transforms=tiled), plgpu.SMEM(b.shape, b.dtype, transforms=tiled),
        plgpu.TMEM((128, 128), jnp.float32), plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
    ]  # fmt: skip
    return Program(body, [product], (a, b), scratch)
