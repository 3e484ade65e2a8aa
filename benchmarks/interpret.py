"""The reference interpreter against JAX's own Pallas, both with `interpret=True`, in one process.

    ./dev exec python benchmarks/interpret.py          # the table of docs/performance.md
    ./dev exec python benchmarks/interpret.py --quick  # fewer rounds

Times are medians over interleaved rounds; ratios are peer time / Palladion time (and Palladion / jnp where a jnp
counterpart exists). JAX's Pallas is imported here as a peer only; the package never imports it.
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
from jax.experimental import pallas as peer
from jax.experimental.pallas import tpu as peer_tpu

import palladion as ours
from palladion import tpu as ours_tpu


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def make_add(pl, tpu, n=1024, b=128):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((b, b), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel, f32(n, n), grid=(-(-n // b), -(-n // b)), in_specs=[spec] * 2, out_specs=spec, interpret=True
    )


def make_matmul(pl, tpu, m=256, k=384, n=512, bm=64, bk=128, bn=128):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        f32(m, n),
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        interpret=True,
    )


def make_softmax(pl, tpu, rows=1024, cols=1024, b=64):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        o_ref[...] = e / jnp.sum(e, axis=-1, keepdims=True)

    spec = pl.BlockSpec((b, cols), lambda i: (i, 0))
    return pl.pallas_call(kernel, f32(rows, cols), grid=(rows // b,), in_specs=[spec], out_specs=spec, interpret=True)


def make_scratch_sum(pl, tpu, n=100_000):
    """One small program after another, in order: what a program costs."""

    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]

    spec = pl.BlockSpec((8,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        f32(n * 8),
        grid=(n,),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[tpu.VMEM((8,), jnp.float32)],
        interpret=True,
    )


def once(call, args):
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - start


def compare(label, calls, args, programs, rounds):
    """Median times of several callables in interleaved rounds, with their first calls."""
    first, times = {}, {name: [] for name in calls}
    jitted = {name: jax.jit(call) for name, call in calls.items()}
    for name, call in jitted.items():
        first[name] = once(call, args)
    for _ in range(rounds):
        for name, call in jitted.items():
            repeat = max(1, min(50, int(0.02 / max(first[name] / 50, 1e-5))))
            times[name].append(min(once(call, args) for _ in range(min(repeat, 10))))
    median = {name: statistics.median(t) for name, t in times.items()}
    out = f"{label:36s} {median['palladion'] * 1e6:10.0f} us"
    if programs:
        out += f" {median['palladion'] * 1e6 / programs:9.3f} us/program"
    if "peer" in median:
        out += f"  {median['peer'] / median['palladion']:8.1f}x peer ({median['peer'] * 1e6:.0f} us)"
        out += f"  first call {first['palladion']:.2f} s (peer {first['peer']:.2f} s)"
    if "jnp" in median:
        out += f"  takes {median['palladion'] / median['jnp']:.2f} of jnp's time"
    print(out, flush=True)
    return median


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds = 3 if parser.parse_args().quick else 9
    rng = np.random.default_rng(0)

    def randn(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def both(make, **sizes):
        return {"palladion": make(ours, ours_tpu, **sizes), "peer": make(peer, peer_tpu, **sizes)}

    x, y = randn(1024, 1024), randn(1024, 1024)
    compare("add 1024x1024, 128x128 blocks", both(make_add) | {"jnp": lambda x, y: x + y}, (x, y), 64, rounds)
    xr, yr = randn(1000, 1000), randn(1000, 1000)
    compare("add 1000x1000, ragged 128x128", both(make_add, n=1000) | {"jnp": lambda x, y: x + y}, (xr, yr), 64, rounds)
    a, b = randn(256, 384), randn(384, 512)
    compare("matmul 256x384x512, grid (4,4,3)", both(make_matmul) | {"jnp": jnp.dot}, (a, b), 48, rounds)
    s, t = randn(256, 256), randn(256, 256)
    compare("add 256x256, 8x8 blocks", both(make_add, n=256, b=8) | {"jnp": lambda x, y: x + y}, (s, t), 1024, rounds)
    compare("softmax 1024x1024, 64 rows", both(make_softmax) | {"jnp": jax.nn.softmax}, (x,), 16, rounds)
    vm = {k: jax.vmap(f) for k, f in both(make_add, n=256).items()}
    compare("vmap of 16 adds 256x256", vm, (randn(16, 256, 256), randn(16, 256, 256)), 64, rounds)
    for n in (100, 1_000, 10_000, 100_000):
        calls = {"palladion": make_scratch_sum(ours, ours_tpu, n)}
        if n <= 1_000:
            calls["peer"] = make_scratch_sum(peer, peer_tpu, n)
        compare(f"running sum, grid {n}", calls, (randn(n * 8),), n, rounds)

    call = make_add(ours, ours_tpu)
    jax.block_until_ready(call(x, y))
    eager = statistics.median(once(call, (x, y)) for _ in range(50))
    jnp_add = statistics.median(once(lambda x, y: x + y, (x, y)) for _ in range(50))
    print(f"eager repeated call of add: {eager * 1e6:.0f} us (jnp add: {jnp_add * 1e6:.0f} us)")


if __name__ == "__main__":
    main()
