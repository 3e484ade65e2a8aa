"""Rules of tcgen05: TMEM in flight, what tells of completion, barriers that order the tensor core."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.rules.registry import Program, rule

M, N, K = 128, 64, 64
DRAW = np.random.default_rng(8).integers
A, B = (jnp.asarray(DRAW(-2, 3, (2, *s)), jnp.float16) for s in ((M, K), (K, N)))
PRODUCT = np.asarray(A[0], np.float32) @ np.asarray(B[0], np.float32)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TWO = dict(num_threads=2, thread_name="t")
TC = plgpu.Barrier(orders_tensor_core=True)


def thread():
    return lax.axis_index("t")


def scratch(**more):
    """Operands in SMEM, an accumulator, a packed operand in TMEM, barriers."""
    return dict(
        a_s=plgpu.SMEM((2, M, K), jnp.float16, transforms=TILED),
        b_s=plgpu.SMEM((2, K, N), jnp.float16, transforms=TILED),
        acc=plgpu.TMEM((M, N), jnp.float32),
        a_t=plgpu.TMEM((M, K), jnp.float16, packed=True),
        loaded=plgpu.Barrier(num_arrivals=2), done=TC,
    ) | more  # fmt: skip


def fetch(a, b, s, slot=0):
    plgpu.copy_gmem_to_smem(a.at[slot], s["a_s"].at[slot], s["loaded"])
    plgpu.copy_gmem_to_smem(b.at[slot], s["b_s"].at[slot], s["loaded"])
    plgpu.barrier_wait(s["loaded"])


def program(body, expected, mesh=None, **more):
    """body(a, b, o, s): `s` the scratch by name."""

    def kernel(a, b, o, **s):
        body(a, b, o, s)

    return Program(kernel, [expected], (A, B), scratch(**more), mesh or {})


def multiply(s, barrier=True, accumulate=False, slot=0):
    plgpu.tcgen05_mma(
        s["acc"], s["a_s"].at[slot], s["b_s"].at[slot], s["done"] if barrier else None, accumulate=accumulate
    )


def load(ref):
    value = plgpu.async_load_tmem(ref)
    plgpu.wait_load_tmem()
    return value


@rule(
    "tmem-in-flight", "", bad=["no wait", "commit too early", "other slot"], good=["kept", "commit", "several"], lines=2
)
def a_result_is_loaded_when_a_barrier_told_of_it(way):
    """The product's barrier, or one commit for several products; a product after the commit is not in it."""

    def body(a, b, o, s):
        fetch(a, b, s)
        fetch(a, b, s, 1)
        if way in ("kept", "no wait"):
            multiply(s)
        elif way == "other slot":
            multiply(s)
            multiply(s, barrier=False, accumulate=True, slot=1)
        else:
            multiply(s, barrier=False)
            if way == "several":
                multiply(s, barrier=False, accumulate=True, slot=1)
            plgpu.tcgen05_commit_arrive(s["done"])
            if way == "commit too early":
                multiply(s, barrier=False, accumulate=True, slot=1)
        if way != "no wait":
            plgpu.barrier_wait(s["done"])
        o[...] = load(s["acc"])
        if way == "no wait":
            plgpu.barrier_wait(s["done"])

    more = np.asarray(A[1], np.float32) @ np.asarray(B[1], np.float32) if way == "several" else 0
    return program(body, PRODUCT + more)


@rule("tmem-in-flight missing-wait", "", bad=["copy", "store", "wait for another"], good=["kept"], lines=2)
def operands_in_smem_are_left_alone_until_a_barrier_told(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        multiply(s)
        if way == "kept":
            plgpu.barrier_wait(s["done"])
        if way == "store":
            s["a_s"][0] = a[1]
        else:
            fetch(a, b, s, 1) if way == "wait for another" else None
            plgpu.copy_gmem_to_smem(a.at[1], s["a_s"].at[0], s["again"])
            plgpu.barrier_wait(s["again"])
        if way != "kept":
            plgpu.barrier_wait(s["done"])
        o[...] = load(s["acc"])

    return program(body, PRODUCT, again=plgpu.Barrier())


@rule("missing-fence", "commit_smem", bad=["a", "b", "other thread"], good=["writer", "reader"], lines=2)
def operands_stored_by_hand_are_committed_for_tcgen05(way):
    def body(a, b, o, s):
        @pl.when(thread() == 0)
        def _():
            if way == "b":
                s["a_s"][0] = a[0]
                plgpu.commit_smem()
                s["b_s"][0] = b[0]
            else:
                s["b_s"][0] = b[0]
                if way == "a":
                    plgpu.commit_smem()
                s["a_s"][0] = a[0]
            if way == "writer":
                plgpu.commit_smem()
            plgpu.barrier_arrive(s["ready"])

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_wait(s["ready"])
            if way == "reader":
                plgpu.commit_smem()
            multiply(s)
            plgpu.barrier_wait(s["done"])
            o[...] = load(s["acc"])

    return program(body, PRODUCT, TWO, ready=plgpu.Barrier())


@rule("tmem-in-flight missing-fence", "", bad=["no commit", "cond"], good=["kept"], lines=2)
def a_store_to_tmem_is_committed_before_a_product_reads_it(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        plgpu.async_store_tmem(s["a_t"], a[0])
        if way == "kept":
            plgpu.commit_tmem()
        elif way == "cond":
            pl.when(a[0, 0, 0] > 99)(plgpu.commit_tmem)
        plgpu.tcgen05_mma(s["acc"], s["a_t"], s["b_s"].at[0], s["done"], accumulate=False)
        plgpu.barrier_wait(s["done"])
        o[...] = load(s["acc"])
        plgpu.commit_tmem()

    return program(body, PRODUCT)


@rule("tmem-in-flight", "", bad=["load after store", "store after load", "store after store", "product after load"],
      good=["kept"], lines=2)  # fmt: skip
def loads_and_stores_of_tmem_are_waited_for(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        zero = jnp.zeros((M, N), jnp.float32)
        plgpu.async_store_tmem(s["acc"], zero + 5)
        if way == "store after store":
            plgpu.async_store_tmem(s["acc"], zero)
        if way != "load after store":
            plgpu.commit_tmem()
        value = plgpu.async_load_tmem(s["acc"])
        if way not in ("store after load", "product after load"):
            plgpu.wait_load_tmem()
        if way == "product after load":
            multiply(s)
            plgpu.barrier_wait(s["done"])
        else:
            plgpu.async_store_tmem(s["acc"], zero + 1)
            plgpu.commit_tmem()
        o[...] = load(s["acc"]) + value
        plgpu.wait_load_tmem()

    return program(body, np.full((M, N), 6, np.float32))


def orders(way, place):
    return plgpu.Barrier(orders_tensor_core=way != place)


@rule("missing-fence tmem-in-flight", "", bad=["stored", "freed"], good=["kept"], lines=2)
def barriers_between_threads_order_the_tensor_core(way):
    """A in TMEM goes to the thread that multiplies; the accumulator comes back for the next product, in a loop."""

    def body(a, b, o, s):
        steps = 3

        @pl.when(thread() == 0)
        def _():
            s["b_s"][0] = b[0]
            plgpu.commit_smem()
            plgpu.async_store_tmem(s["a_t"], a[0])
            plgpu.commit_tmem()
            plgpu.barrier_arrive(s["stored"])

            @pl.loop(0, steps)
            def _(i):
                plgpu.barrier_wait(s["done"])
                o[...] = load(s["acc"])
                pl.when(i < steps - 1)(lambda: plgpu.barrier_arrive(s["freed"]))

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_wait(s["stored"])

            @pl.loop(0, steps)
            def _(i):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(s["freed"]))
                plgpu.tcgen05_mma(s["acc"], s["a_t"], s["b_s"].at[0], s["done"], accumulate=i > 0)

    return program(body, 3 * PRODUCT, TWO, stored=orders(way, "stored"), freed=orders(way, "freed"))


@rule("tmem-in-flight race", "", bad=["no wait", "no barrier"], good=["kept"], lines=2)
def an_accumulator_is_free_when_another_threads_loads_are_done(way):
    def body(a, b, o, s):
        @pl.when(thread() == 0)
        def _():
            fetch(a, b, s)
            multiply(s)
            if way != "no barrier":
                plgpu.barrier_wait(s["freed"])
            else:
                plgpu.barrier_wait(s["told"])
            multiply(s, accumulate=True)

        @pl.when(thread() == 1)
        def _():
            plgpu.barrier_wait(s["done"])
            if way == "no barrier":
                plgpu.barrier_arrive(s["told"])
            value = plgpu.async_load_tmem(s["acc"])
            if way != "no wait":
                plgpu.wait_load_tmem()
            if way != "no barrier":
                plgpu.barrier_arrive(s["freed"])
            plgpu.barrier_wait(s["done"])
            o[...] = load(s["acc"]) - value

    return program(body, PRODUCT, TWO, freed=TC, told=TC)


@rule("", "orders_tensor_core", bad=["product", "commit"], good=["kept"], error=Exception)
def barriers_of_products_order_the_tensor_core(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        if way == "commit":
            multiply(s, barrier=False)
            plgpu.tcgen05_commit_arrive(s["plain"])
            plgpu.barrier_wait(s["plain"])
        else:
            barrier = s["plain" if way == "product" else "done"]
            plgpu.tcgen05_mma(s["acc"], s["a_s"].at[0], s["b_s"].at[0], barrier, accumulate=False)
            plgpu.barrier_wait(barrier)
        o[...] = load(s["acc"])

    return program(body, PRODUCT, plain=plgpu.Barrier())


@rule("uninitialized-read", "", bad=["accumulate", "load", "a"], good=["kept"])
def tmem_was_written(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        if way == "a":
            plgpu.tcgen05_mma(s["acc"], s["a_t"], s["b_s"].at[0], s["done"], accumulate=False)
            plgpu.barrier_wait(s["done"])
        elif way != "load":
            multiply(s, accumulate=way == "accumulate")
            plgpu.barrier_wait(s["done"])
        o[...] = load(s["acc"])

    return program(body, PRODUCT)


@rule("tmem-overflow", "512", bad=[9], good=[8], lines=0)
def accumulators_fit_tensor_memory(count):
    def body(o, *accs):
        plgpu.async_store_tmem(accs[-1], jnp.ones((M, N), jnp.float32))
        plgpu.commit_tmem()
        o[...] = load(accs[-1])

    return Program(body, [np.ones((M, N), np.float32)], (), [plgpu.TMEM((M, N), jnp.float32)] * count)


@rule("tmem-in-flight", "", bad=["product", "load", "store"], good=["kept"], warns=True)
def a_thread_does_not_end_while_tmem_is_in_use(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        multiply(s)
        plgpu.barrier_wait(s["done"])
        o[...] = load(s["acc"])
        if way == "product":
            multiply(s, barrier=False)
        elif way == "load":
            o[...] = plgpu.async_load_tmem(s["acc"])
        elif way == "store":
            plgpu.async_store_tmem(s["acc"], jnp.ones((M, N), jnp.float32))

    return program(body, PRODUCT)
