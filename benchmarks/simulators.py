"""The simulated TPU against the one inside JAX (`pltpu.InterpretParams`), in one process.

    ./dev exec python benchmarks/simulators.py [--quick]

Medians of interleaved turns; a ratio above 1 means that Palladion is faster. Calls are under jit, as the peer compiles
its simulator with XLA; the column "direct" is Palladion called without jit, where nothing is compiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as peer_pl
from jax.experimental.pallas import tpu as peer_pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import tpu as pltpu

OURS, PEER = (pl, pltpu), (peer_pl, peer_pltpu)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def make_add(pl, pltpu, **params):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((128, 128), lambda i, j: (i, j))
    interpret = pltpu.InterpretParams(**params)
    return pl.pallas_call(
        kernel, f32(1024, 1024), grid=(8, 8), in_specs=[spec] * 2, out_specs=spec, interpret=interpret
    )


def make_matmul(pl, pltpu, **params):
    def kernel(a_ref, b_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        f32(256, 512),
        grid=(4, 4, 3),
        in_specs=[pl.BlockSpec((64, 128), lambda i, j, k: (i, k)), pl.BlockSpec((128, 128), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((64, 128), lambda i, j, k: (i, j)),
        interpret=pltpu.InterpretParams(**params),
    )


def make_all_gather(pl, pltpu, **params):
    """A ring of four devices: each passes on what it got, three times. Shards of 1 MiB."""

    def kernel(x_ref, o_ref, send, recv, local):
        me = lax.axis_index("x")
        right = lax.rem(me + 1, 4)
        copy = pltpu.make_async_copy(x_ref, o_ref.at[me], local)
        copy.start()
        copy.wait()
        for step in range(3):
            slot = lax.rem(me - step + 4, 4)
            remote = pltpu.make_async_remote_copy(
                o_ref.at[slot], o_ref.at[slot], send.at[step], recv.at[step], device_id=(right,)
            )
            remote.start()
            remote.wait()

    call = pl.pallas_call(
        kernel,
        f32(4, 2048, 128),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA((3,)), pltpu.SemaphoreType.DMA((3,)), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(**params),
    )
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


def make_running_sum(pl, pltpu, programs):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    return pl.pallas_call(
        kernel,
        f32(8, 128),
        grid=(programs,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        interpret=pltpu.InterpretParams(),
    )


def timed(call, args):
    start = time.perf_counter()
    out = jax.block_until_ready(call(*args))
    return time.perf_counter() - start, out


def compare(label, make, args, rounds, wanted, *, direct=True, **params):
    ours, peer = jax.jit(make(*OURS, **params)), jax.jit(make(*PEER, **params))
    first_ours, mine = timed(ours, args)
    first_peer, theirs = timed(peer, args)
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)
    times = {"ours": [], "peer": [], "direct": []}
    plain = make(*OURS, **params)
    for _ in range(rounds):
        times["peer"].append(timed(peer, args)[0])
        times["ours"] += [timed(ours, args)[0] for _ in range(3)]
        if direct:
            times["direct"] += [timed(plain, args)[0] for _ in range(3)]
    ours_ms, peer_ms = (statistics.median(times[k]) * 1e3 for k in ("ours", "peer"))
    alone = f"{statistics.median(times['direct']) * 1e3:8.2f}" if direct else "       -"
    print(
        f"| {label} | {ours_ms:8.2f} ms | {alone} ms | {peer_ms:8.1f} ms | {peer_ms / ours_ms:6.0f}x | {wanted}x | "
        f"first call {first_ours:.2f} s, peer {first_peer:.2f} s ({first_peer / first_ours:.0f}x) |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn each")
    rounds = 1 if parser.parse_args().quick else 5
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    print("| kernel | ours, jit | direct | peer | ratio | wanted | |\n|---|---|---|---|---|---|---|")
    a, b, x, y = normal(256, 384), normal(384, 512), normal(1024, 1024), normal(1024, 1024)
    compare("matmul 256x384x512, grid (4, 4, 3)", make_matmul, (a, b), rounds, 50)
    compare("the same, detect_races", make_matmul, (a, b), rounds, 50, detect_races=True)
    compare("add 1024^2, 64 blocks", make_add, (x, y), rounds, 50)
    compare("the same, detect_races", make_add, (x, y), rounds, 50, detect_races=True)
    compare("ring all-gather, 4 devices, 1 MiB", make_all_gather, (normal(4 * 2048, 128),), rounds, 20, direct=False)
    for programs in (100, 1_000, 10_000):
        call = make_running_sum(*OURS, programs)
        block = normal(8, 128)
        timed(call, (block,))
        seconds = statistics.median(timed(call, (block,))[0] for _ in range(rounds + 2))
        print(f"running sum, {programs} programs: {seconds / programs * 1e6:.2f} us a program")


if __name__ == "__main__":
    main()
