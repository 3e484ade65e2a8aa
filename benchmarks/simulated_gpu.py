"""The simulated GPU against the one inside JAX (`plgpu.InterpretGPUParams`), in one process.

    ./dev exec python benchmarks/simulated_gpu.py [--quick]

Medians of interleaved turns; a ratio above 1 means that Palladion is faster. Calls are under jit, as the peer compiles
its simulator with XLA. Races are looked for on both sides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as peer_pl
from jax.experimental.pallas import mosaic_gpu as peer_plgpu

import palladion as pl
from palladion import mosaic_gpu as plgpu

OURS, PEER = (pl, plgpu), (peer_pl, peer_plgpu)


SMS = 132  # of an H100


def make_persistent(pl, plgpu, n, **params):
    """The same by a block for each SM, which takes tiles as long as there are some."""
    return make_matmul(pl, plgpu, n, persistent=True, **params)


def make_matmul(pl, plgpu, n, persistent=False, **params):
    """An n-cubed product, tiles of 128, two steps in flight; two threads compute, a third one fetches."""
    tile_m = tile_n = 128
    tile_k, steps = 64, 2

    def tiled(columns):
        return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * 2))

    def tile(m, n_, a_gmem, b_gmem, o_gmem, o_smem):
        wg = lax.axis_index("wg")
        rows, columns = pl.ds(m * tile_m, tile_m), pl.ds(n_ * tile_n, tile_n)
        half = pl.ds(wg * (tile_m // 2), tile_m // 2)

        def body(_, a_smem, b_smem, acc_ref):
            plgpu.wgmma(acc_ref, a_smem.at[half], b_smem)
            plgpu.wgmma_wait(0)
            return acc_ref

        def context(run):
            def scope(acc_ref):
                run(acc_ref)
                return acc_ref[...]

            acc = pl.run_scoped(scope, plgpu.ACC((tile_m // 2, tile_n), jnp.float32))
            o_smem[wg] = acc.astype(jnp.float16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[wg], o_gmem.at[rows, columns].at[half])
            plgpu.wait_smem_to_gmem(0)

        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(n // tile_k,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((tile_m, tile_k), lambda k: (m, k), transforms=tiled(64)),
                plgpu.BlockSpec((tile_k, tile_n), lambda k: (k, n_), transforms=tiled(64)),
            ],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=steps,
            compute_context=context,
        )(a_gmem, b_gmem)

    def kernel(*refs):
        if not persistent:
            tile(lax.axis_index("m"), lax.axis_index("n"), *refs)
            return

        @plgpu.nd_loop((n // tile_m, n // tile_n), collective_axes="sm")
        def _(loop_info):
            tile(*loop_info.index, *refs)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((n, n), jnp.float16),
        grid=(SMS,) if persistent else (n // tile_m, n // tile_n),
        grid_names=("sm",) if persistent else ("m", "n"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((2, tile_m // 2, tile_n), jnp.float16, transforms=tiled(64))],
        interpret=plgpu.InterpretGPUParams(**params),
    )


def make_queue(pl, plgpu, items, **params):
    """One thread writes rows to SMEM, another one reads them; three slots."""
    slots = 3

    def kernel(x_ref, y_ref, queue, produced, consumed):
        t = lax.axis_index("t")

        def produce(i, _):
            slot = lax.rem(i, slots)

            @pl.when(i >= slots)
            def _():
                plgpu.barrier_wait(consumed.at[slot])

            queue[slot] = x_ref[i] * 2
            plgpu.barrier_arrive(produced.at[slot])

        def consume(i, _):
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(produced.at[slot])
            y_ref[i] = queue[slot] + 1
            plgpu.barrier_arrive(consumed.at[slot])

        @pl.when(t == 0)
        def _():
            lax.fori_loop(0, items, produce, None)
            for i in range(items - slots, items):
                plgpu.barrier_wait(consumed.at[i % slots])

        @pl.when(t == 1)
        def _():
            lax.fori_loop(0, items, consume, None)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((items, 128), jnp.float32),
        num_threads=2,
        thread_name="t",
        scratch_types=dict(
            queue=plgpu.SMEM((slots, 128), jnp.float32),
            produced=plgpu.Barrier(num_barriers=slots),
            consumed=plgpu.Barrier(num_barriers=slots),
        ),
        interpret=plgpu.InterpretGPUParams(**params),
    )


def make_blocks(pl, plgpu, blocks, **params):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((blocks * 8, 128), jnp.float32),
        grid=(blocks,),
        in_specs=[spec],
        out_specs=spec,
        interpret=plgpu.InterpretGPUParams(**params),
    )


def timed(call, args):
    start = time.perf_counter()
    out = jax.block_until_ready(call(*args))
    return time.perf_counter() - start, out


def compare(label, make, size, args, rounds, wanted, **params):
    ours, peer = jax.jit(make(*OURS, size, **params)), jax.jit(make(*PEER, size, **params))
    first_ours, mine = timed(ours, args)
    first_peer, theirs = timed(peer, args)
    np.testing.assert_allclose(np.float32(mine), np.float32(theirs), rtol=2e-2, atol=1e-2)
    times = {"ours": [], "peer": []}
    for _ in range(rounds):
        times["peer"].append(timed(peer, args)[0])
        times["ours"] += [timed(ours, args)[0] for _ in range(3)]
    ours_ms, peer_ms = (statistics.median(times[k]) * 1e3 for k in ("ours", "peer"))
    print(
        f"| {label} | {ours_ms:8.2f} ms | {peer_ms:8.1f} ms | {peer_ms / ours_ms:6.0f}x | {wanted} | "
        f"first call {first_ours:.2f} s, peer {first_peer:.2f} s ({first_peer / first_ours:.0f}x) |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn each")
    rounds = 1 if parser.parse_args().quick else 3
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    print("| kernel | ours, jit | peer | ratio | wanted | |\n|---|---|---|---|---|---|")
    a, b = normal(512, 512, dtype=jnp.float16), normal(512, 512, dtype=jnp.float16)
    compare("wgmma matmul f16 512^3, 3 threads, races", make_matmul, 512, (a, b), rounds, "50x", detect_races=True)
    label = "the same, persistent on 132 blocks, races"
    compare(label, make_persistent, 512, (a, b), rounds, "50x", detect_races=True)
    x = normal(1000, 128)
    compare("producer/consumer, 1,000 items, races", make_queue, 1000, (x,), rounds, "50x", detect_races=True)
    for races in (False, True):
        call = make_blocks(*OURS, 4096, detect_races=races)
        block = normal(4096 * 8, 128)
        timed(call, (block,))
        seconds = statistics.median(timed(call, (block,))[0] for _ in range(rounds + 2))
        print(f"4,096 blocks of 8x128{', races' if races else ''}: {seconds:.2f} s (wanted under 2 s)")


if __name__ == "__main__":
    main()
