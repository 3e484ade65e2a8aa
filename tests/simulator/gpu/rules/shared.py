"""Rules of what is shared by more than two: tensor cores of two blocks, warps of a thread, TMEM of scopes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import numbers
from simulator.gpu.rules.blackwell import PRODUCT, TC, TILED, A, B, K, M, N, fetch, load, program
from simulator.gpu.rules.registry import Program, rule

X = numbers(4, 128)
PAIR = dict(cluster=(2,), cluster_names=("c",))


@rule("tmem-in-flight missing-fence race missing-wait barrier-double-completion", "",
      bad=["operand of the second", "no meeting", "meeting orders nothing", "no wait for loads"],
      good=["kept"])  # fmt: skip
def tensor_cores_of_two_blocks_share_their_operands(way):
    """The leader multiplies when both blocks have their operands, and again when both have loaded the result."""
    a, b = numbers(2 * M, K, dtype=jnp.float16), numbers(K, 2 * N, dtype=jnp.float16)
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32)

    def body(a, b, o, a_s, b_s, acc, loaded, done, ready, free):
        c = lax.axis_index("c")
        plgpu.copy_gmem_to_smem(a.at[pl.ds(c * M, M)], a_s, loaded)
        plgpu.copy_gmem_to_smem(b.at[:, pl.ds(c * N, N)], b_s, loaded)
        if way == "operand of the second":
            plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(loaded)
        if way != "operand of the second":
            plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        for turn in range(2):

            @pl.when(c == 0)
            def _(turn=turn):
                plgpu.tcgen05_mma(acc, a_s, b_s, done, accumulate=turn == 1, collective_axis="c")

            plgpu.barrier_wait(done)
            o[pl.ds(c * M, M)] = plgpu.async_load_tmem(acc)
            if way != "no wait for loads" or turn:
                plgpu.wait_load_tmem()
            if way != "no meeting" and not turn:
                plgpu.barrier_arrive(free)
                plgpu.barrier_wait(free)

    scratch = [
        plgpu.SMEM((M, K), jnp.float16, transforms=TILED), plgpu.SMEM((K, N), jnp.float16, transforms=TILED),
        plgpu.TMEM((M, 2 * N), jnp.float32, collective=True), plgpu.Barrier(num_arrivals=2), TC,
        plgpu.ClusterBarrier(collective_axes=("c",)),
        plgpu.ClusterBarrier(collective_axes=("c",), orders_tensor_core=way != "meeting orders nothing"),
    ]  # fmt: skip
    return Program(body, [2 * product], (a, b), scratch, PAIR)


@rule("tmem-in-flight", "", bad=["store", "load"], good=["kept"], lines=2)
def an_operand_in_tmem_is_left_alone_until_its_product_is_done(way):
    def body(a, b, o, s):
        fetch(a, b, s)
        plgpu.async_store_tmem(s["a_t"], a[0])
        plgpu.commit_tmem()
        plgpu.tcgen05_mma(s["acc"], s["a_t"], s["b_s"].at[0], s["done"], accumulate=False)
        if way == "load":
            o[...] = load(s["acc"])
        if way == "kept":
            plgpu.barrier_wait(s["done"])
        plgpu.async_store_tmem(s["a_t"], a[1])
        plgpu.commit_tmem()
        if way != "kept":
            plgpu.barrier_wait(s["done"])
        o[...] = load(s["acc"])

    return program(body, PRODUCT)


@rule("tmem-in-flight", "", bad=["no wait"], good=["kept"])
def tmem_of_a_scope_is_left_when_its_products_are_done(way):
    def body(a, b, o, s):
        fetch(a, b, s)

        def scope(acc):
            plgpu.tcgen05_mma(acc, s["a_s"].at[0], s["b_s"].at[0], s["done"], accumulate=False)
            if way == "kept":
                plgpu.barrier_wait(s["done"])
                o[...] = load(acc)

        pl.run_scoped(scope, plgpu.TMEM((M, N), jnp.float32))
        if way != "kept":
            plgpu.barrier_wait(s["done"])

    return program(body, PRODUCT)


@rule("out-of-bounds", "", bad=["a", "tmem", "barrier"], good=["kept"])
def indices_of_operands_stay_inside(way):
    def body(n, a, b, o, a_s, b_s, acc, loaded, done):
        i = n[0]
        plgpu.copy_gmem_to_smem(a.at[0], a_s.at[i], loaded)
        plgpu.copy_gmem_to_smem(b.at[0], b_s.at[0], loaded)
        plgpu.barrier_wait(loaded)
        out = acc.at[:, pl.ds((i + (2 if way == "tmem" else 1)) * N, N)]
        plgpu.tcgen05_mma(
            out, a_s.at[i + (2 if way == "a" else 0)], b_s.at[0], done.at[i + (2 if way == "barrier" else 0)],
            accumulate=False,
        )  # fmt: skip
        plgpu.barrier_wait(done.at[i])
        o[...] = load(out)

    scratch = [
        plgpu.SMEM((2, M, K), jnp.float16, transforms=TILED), plgpu.SMEM((1, K, N), jnp.float16, transforms=TILED),
        plgpu.TMEM((M, 2 * N), jnp.float32), plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
    ]  # fmt: skip
    return Program(body, [PRODUCT], (jnp.zeros(1, jnp.int32), A, B), scratch)


@rule(
    "race missing-wait missing-fence",
    "",
    bad=["two warps", "no wait", "commit in another warp"],
    good=["kept"],
    lines=1,
)
def warps_of_a_thread_are_apart(way):
    """Warp 0 copies; the thread reads after the wait of a warp. What one warp stored another one does not know."""

    def body(x, y, smem, loaded, ready):
        axis = "w"

        @pl.core_map(plgpu.WarpMesh(axis_name=axis))
        def _():
            w = lax.axis_index(axis)

            @pl.when(w == 0)
            def _():
                plgpu.copy_gmem_to_smem(x, smem, loaded)
                if way == "two warps":
                    plgpu.barrier_arrive(ready)
                if way != "no wait":
                    plgpu.barrier_wait(loaded)

            @pl.when(w == 1)
            def _():
                if way == "two warps":
                    plgpu.barrier_wait(ready)
                    plgpu.copy_smem_to_gmem(smem, y)
                if way == "commit in another warp":
                    plgpu.commit_smem()

        y[...] = smem[...]
        if way == "commit in another warp":
            plgpu.copy_gmem_to_smem(x, smem, ready)
            plgpu.barrier_wait(ready)
        if way == "two warps":
            plgpu.wait_smem_to_gmem(0)
        if way == "no wait":
            plgpu.barrier_wait(loaded)

    scratch = [plgpu.SMEM(X.shape, X.dtype), plgpu.Barrier(), plgpu.Barrier()]
    return Program(body, [np.asarray(X)], (X,), scratch)
