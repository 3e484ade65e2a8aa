"""Rules of wgmma: what a product in flight reads, which products are done, accumulators, commits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.rules.registry import Program, rule

M, N, K = 64, 32, 64
DRAW = np.random.default_rng(7).integers
A, B = (jnp.asarray(DRAW(-2, 3, (3, *s)), jnp.float16) for s in ((M, K), (K, N)))
PRODUCT = np.asarray(A[0], np.float32) @ np.asarray(B[0], np.float32)
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
A_S = plgpu.SMEM((3, M, K), jnp.float16, transforms=TILED)
B_S = plgpu.SMEM((3, K, N), jnp.float16, transforms=TILED)
ACC = plgpu.ACC((M, N), jnp.float32)
TWO = dict(num_threads=2, thread_name="t")


def thread():
    return lax.axis_index("t")


def load(a, b, a_s, b_s, loaded, slot=0):
    """Tiles by TMA, waited for."""
    plgpu.copy_gmem_to_smem(a.at[slot], a_s.at[slot], loaded)
    plgpu.copy_gmem_to_smem(b.at[slot], b_s.at[slot], loaded)
    plgpu.barrier_wait(loaded)


SCRATCH = [A_S, B_S, plgpu.Barrier(num_arrivals=2), plgpu.Barrier(), plgpu.Barrier(), plgpu.Barrier()]


@rule("wgmma-in-flight missing-fence", "", bad=["copy", "store", "wait 1", "other"],
      good=["wait", "read", "next product"], lines=2)  # fmt: skip
def an_operand_is_left_alone_until_its_product_is_done(way):
    """By TMA, by hand, after a wait that leaves the product in flight; "other": two accumulators."""

    def body(a, b, o, a_s, b_s, loaded, again, *_):
        for slot in range(2):
            load(a, b, a_s, b_s, loaded, slot)

        def scope(acc, acc2):
            plgpu.wgmma(acc, a_s.at[0], b_s.at[0])
            if way == "wait":
                plgpu.wgmma_wait(0)
            elif way == "wait 1":
                plgpu.wgmma_wait(1)
            elif way == "read":
                o[...] = acc[...]
            elif way == "next product":
                plgpu.wgmma(acc2, a_s.at[1], b_s.at[1])
            elif way == "other":
                plgpu.wgmma(acc2, a_s.at[0], b_s.at[1])
            if way == "store":
                a_s[0] = a[0]
            else:
                plgpu.copy_gmem_to_smem(a.at[0], a_s.at[0], again)
                plgpu.barrier_wait(again)
            o[...] = acc[...]

        pl.run_scoped(scope, ACC, ACC)

    return Program(body, [PRODUCT], (A, B), SCRATCH)


@rule(
    "wgmma-in-flight race missing-wait",
    "",
    bad=["none", "before", "other product"],
    good=["kept", "next product"],
    lines=2,
)
def another_thread_fills_an_operand_again_when_it_is_told(way):
    """The producer's slot comes back by a barrier: after the wait for the product, or after the next product."""

    def body(a, b, o, a_s, b_s, loaded, free, again, two):
        @pl.when(thread() == 0)
        def _():
            for slot in range(2):
                plgpu.copy_gmem_to_smem(a.at[slot], a_s.at[slot], loaded)
                plgpu.copy_gmem_to_smem(b.at[slot], b_s.at[slot], loaded)
                if not slot:
                    plgpu.barrier_wait(two)
            if way != "none":
                plgpu.barrier_wait(free)
            plgpu.copy_gmem_to_smem(a.at[0], a_s.at[0], again)
            plgpu.barrier_wait(again)
            if way == "none":
                plgpu.barrier_wait(free)

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_wait(loaded)
            plgpu.barrier_arrive(two)
            plgpu.barrier_wait(loaded)

            def scope(acc):
                if way == "before":
                    plgpu.barrier_arrive(free)
                plgpu.wgmma(acc, a_s.at[0], b_s.at[0])
                if way == "kept":
                    plgpu.wgmma_wait(0)
                if way == "next product":
                    plgpu.wgmma(acc, a_s.at[1], b_s.at[1])
                if way != "before":
                    plgpu.barrier_arrive(free)
                o[...] = acc[...]

            pl.run_scoped(scope, ACC)

    expected = PRODUCT
    if way == "next product":
        expected = expected + np.asarray(A[1], np.float32) @ np.asarray(B[1], np.float32)
    return Program(body, [expected], (A, B), SCRATCH, TWO)


@rule("missing-fence", "commit_smem", bad=["a", "b", "cond", "other thread", "scoped"],
      good=["kept", "reader", "writer", "scoped commit"], lines=2)  # fmt: skip
def operands_stored_by_hand_are_committed(way):
    def body(a, b, o, a_s, b_s, loaded, ready, *_):
        threads = way in ("other thread", "reader", "writer")

        def fill(a_s, b_s):
            if way == "b":
                a_s[...] = a[0]
                plgpu.commit_smem()
                b_s[...] = b[0]
            else:
                b_s[...] = b[0]
                a_s[...] = a[0]
                if way in ("kept", "writer", "scoped commit"):
                    plgpu.commit_smem()
            if way == "cond":
                pl.when(a[0, 0, 0] > 99)(plgpu.commit_smem)

        def multiply(a_s, b_s):
            def scope(acc):
                plgpu.wgmma(acc, a_s, b_s)
                o[...] = acc[...]

            pl.run_scoped(scope, ACC)

        def both(a_s, b_s):
            fill(a_s, b_s)
            multiply(a_s, b_s)

        if way.startswith("scoped"):
            types = [plgpu.SMEM(s.shape[1:], s.dtype, transforms=TILED) for s in (A_S, B_S)]
            pl.run_scoped(both, *types, collective_axes="t")
            return

        @pl.when(thread() == 0)
        def _():
            if threads:
                fill(a_s.at[0], b_s.at[0])
                plgpu.barrier_arrive(ready)
            else:
                both(a_s.at[0], b_s.at[0])

        if threads:

            @pl.when(thread() == 1)
            def _():
                plgpu.barrier_wait(ready)
                if way == "reader":
                    plgpu.commit_smem()
                multiply(a_s.at[0], b_s.at[0])

    one = dict(num_threads=1, thread_name="t") if way.startswith("scoped") else TWO
    return Program(body, [PRODUCT], (A, B), SCRATCH, one)


@rule(
    "wgmma-in-flight", "wgmma_wait", bad=["no wait", "one left"], good=["load", "waited", "plain", "run_state"], lines=1
)
def an_accumulator_is_read_when_its_products_are_done(way):
    def body(a, b, o, a_s, b_s, loaded, *_):
        load(a, b, a_s, b_s, loaded)

        def scope(acc) -> Any:
            plgpu.wgmma(acc, a_s.at[0], b_s.at[0])
            if way == "waited":
                plgpu.wgmma_wait(0)
            if way == "run_state":
                return None
            if way == "plain":
                return acc[...]
            left = {"no wait": None, "one left": 1, "load": 0, "waited": None}[way]
            return plgpu.wgmma_accumulator_load(acc, wait_n=left)

        if way == "run_state":
            o[...] = pl.run_state(scope)(plgpu.ACC.init(jnp.zeros((M, N), jnp.float32)))
        else:
            o[...] = pl.run_scoped(scope, ACC)

    return Program(body, [PRODUCT], (A, B), SCRATCH)


@rule("uninitialized-read", "", bad=["a", "b", "half"], good=["kept"], lines=1)
def operands_were_written(way):
    def body(a, b, o, a_s, b_s, *_):
        if way != "a":
            rows = pl.ds(0, 32 if way == "half" else M)
            a_s[0, rows] = a[0, rows]
        if way != "b":
            b_s[0] = b[0]
        plgpu.commit_smem()

        def scope(acc):
            plgpu.wgmma(acc, a_s.at[0], b_s.at[0])
            return acc[...]

        o[...] = pl.run_scoped(scope, ACC)

    return Program(body, [PRODUCT], (A, B), SCRATCH)


@rule("missing-wait race", "", bad=["not waited", "other barrier"], good=["kept"], lines=2)
def operands_have_landed(way):
    def body(a, b, o, a_s, b_s, loaded, *_):
        if way != "not waited":
            load(a, b, a_s, b_s, loaded, 1)
        plgpu.copy_gmem_to_smem(a.at[0], a_s.at[0], loaded)
        plgpu.copy_gmem_to_smem(b.at[0], b_s.at[0], loaded)
        if way == "kept":
            plgpu.barrier_wait(loaded)

        def scope(acc):
            plgpu.wgmma(acc, a_s.at[0], b_s.at[0])
            o[...] = acc[...]

        pl.run_scoped(scope, ACC)
        if way != "kept":
            plgpu.barrier_wait(loaded)

    return Program(body, [PRODUCT], (A, B), SCRATCH)


@rule("wgmma-in-flight", "wgmma_wait", warns=True)
def a_thread_does_not_end_during_a_product(ok):
    def body(a, b, o, a_s, b_s, loaded, *_):
        load(a, b, a_s, b_s, loaded)

        def scope(acc):
            plgpu.wgmma(acc, a_s.at[0], b_s.at[0])
            if ok:
                plgpu.wgmma_wait(0)

        pl.run_scoped(scope, ACC)
        o[...] = jnp.zeros((M, N), jnp.float32)

    return Program(body, [np.zeros((M, N), np.float32)], (A, B), SCRATCH)


@rule("register-overflow", "registers", bad=["one", "two", "nested"], good=["kept", "one after the other"])
def accumulators_fit_the_registers(way):
    """255 registers of 32 bits for each of 128 CUDA threads."""
    half, whole = plgpu.ACC((128, 128), jnp.float32), plgpu.ACC((128, 256), jnp.float32)

    def body(o):
        if way == "one":
            o[...] = pl.run_scoped(lambda acc: acc[...][:, :128], whole)
        elif way == "two":
            o[...] = pl.run_scoped(lambda acc, more: acc[...] + more[...], half, half)
        elif way == "nested":
            o[...] = pl.run_scoped(lambda acc: pl.run_scoped(lambda more: acc[...] + more[...], half), half)
        else:
            for _ in range(2 if way == "one after the other" else 1):
                o[...] = pl.run_scoped(lambda acc: acc[...], half)

    return Program(body, [np.zeros((128, 128), np.float32)], (), ())
