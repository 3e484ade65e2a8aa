"""Native CPU code against jnp under jit (and NumPy's BLAS for products), in one process.

    ./dev exec python benchmarks/cpu.py [--quick]

Medians of interleaved turns; a ratio above 1 means that Palladion is faster. XLA and Palladion use XLA's thread pool
with all cores. Results go into fresh memory unless the line says otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # let NumPy's OpenBLAS choose its own kernel
    os.environ.pop(_name, None)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())


def sds(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def make_add(n, bm, bn, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((bm, bn), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel, sds((n, n)), grid=(n // bm, n // bn), in_specs=[spec] * 2, out_specs=spec, **NATIVE, **options
    )


def make_matmul(n, b, dtype=jnp.float32):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        sds((n, n)),
        grid=(n // b, n // b, n // b),
        in_specs=[pl.BlockSpec((b, b), lambda i, j, k: (i, k)), pl.BlockSpec((b, b), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((b, b), lambda i, j, k: (i, j)),
        **NATIVE,
    )


def make_matmul_bf16(n, b):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        sds((n, n), jnp.bfloat16),
        grid=(n // b, n // b, n // b),
        in_specs=[pl.BlockSpec((b, b), lambda i, j, k: (i, k)), pl.BlockSpec((b, b), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((b, b), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((b, b), jnp.float32)],
        **NATIVE,
    )


def make_rows(kernel, rows, cols, br, dtype=jnp.float32, out_cols=None, **options):
    out_shape = (rows, cols) if out_cols is None else (rows,)
    out_spec = pl.BlockSpec((br, cols), lambda i: (i, 0)) if out_cols is None else pl.BlockSpec((br,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        sds(out_shape, dtype),
        grid=(rows // br,),
        in_specs=[pl.BlockSpec((br, cols), lambda i: (i, 0))],
        out_specs=out_spec,
        **NATIVE,
        **options,
    )


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    o_ref[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(o_ref.dtype)


def layernorm_kernel(x_ref, o_ref):
    x = x_ref[...]
    xc = x - jnp.mean(x, axis=-1, keepdims=True)
    o_ref[...] = xc * jax.lax.rsqrt(jnp.mean(xc * xc, axis=-1, keepdims=True) + 1e-5)


def layernorm(x):
    xc = x - jnp.mean(x, axis=-1, keepdims=True)
    return xc * jax.lax.rsqrt(jnp.mean(xc * xc, axis=-1, keepdims=True) + 1e-5)


def rowsum_kernel(x_ref, o_ref):
    o_ref[...] = jnp.sum(x_ref[...], axis=-1)


def once(call, args):
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - start


def compare(label, calls, args, rounds, donate=False):
    """Median times in interleaved turns; the ratios of the peers' times to ours.

    A turn waits, then makes six calls and counts five: after its last call NumPy's thread pool spins for about 0.1 s
    (measured) and takes a core from the contender that comes next.
    """
    jitted = {}
    for name, call in calls.items():
        jitted[name] = call if name.startswith("numpy") else jax.jit(call, donate_argnums=0 if donate else ())
    times = {name: [] for name in calls}

    def run(name):
        given = args
        if donate:
            given = (args[0] + 0, *args[1:])
            jax.block_until_ready(given)
        return once(jitted[name], [np.asarray(a) for a in given] if name.startswith("numpy") else given)

    first = run("native")
    for _ in range(rounds):
        for name in jitted:
            time.sleep(0.25 if "numpy" in jitted else 0.0)
            times[name] += [run(name) for _ in range(6)][1:]
    median = {name: statistics.median(t) for name, t in times.items()}
    peers = ", ".join(
        f"{median[n] / median['native']:.2f}x {n} ({median[n] * 1e3:.2f} ms)" for n in calls if n != "native"
    )
    print(f"{label:44s} {median['native'] * 1e3:9.3f} ms  {peers}  first call {first:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds = 3 if parser.parse_args().quick else 11
    rng = np.random.default_rng(0)

    def randn(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    for n in (512, 1024):
        a, b = randn(n, n), randn(n, n)
        calls = {"native": make_matmul(n, 256), "jnp": jnp.dot, "numpy": np.dot}
        compare(f"matmul f32 {n}^3, 256^3 blocks", calls, (a, b), rounds)
    a, b = (randn(1024, 1024, dtype=jnp.bfloat16) for _ in range(2))
    compare("matmul bf16 1024^3, scratch", {"native": make_matmul_bf16(1024, 256), "jnp": jnp.dot}, (a, b), rounds)
    x, y = randn(4096, 4096), randn(4096, 4096)
    for bm, bn in ((64, 128), (256, 4096)):
        compare(f"add 4096^2, {bm}x{bn} blocks", {"native": make_add(4096, bm, bn), "jnp": jnp.add}, (x, y), rounds)
    donated = make_add(4096, 256, 4096, input_output_aliases={0: 0})
    compare("add 4096^2, donated input", {"native": donated, "jnp": jnp.add}, (x, y), rounds, donate=True)
    s, t = randn(1024, 1024), randn(1024, 1024)
    compare("add 1024^2, 64 programs", {"native": make_add(1024, 128, 128), "jnp": jnp.add}, (s, t), rounds)
    compare(
        "softmax 4096^2 f32", {"native": make_rows(softmax_kernel, 4096, 4096, 8), "jnp": jax.nn.softmax}, (x,), rounds
    )
    call = make_rows(softmax_kernel, 4096, 4096, 8, input_output_aliases={0: 0})
    compare("softmax 4096^2 f32, donated", {"native": call, "jnp": jax.nn.softmax}, (x,), rounds, donate=True)
    compare("layernorm 4096^2", {"native": make_rows(layernorm_kernel, 4096, 4096, 8), "jnp": layernorm}, (x,), rounds)
    compare(
        "row sum 4096^2",
        {"native": make_rows(rowsum_kernel, 4096, 4096, 8, out_cols=0), "jnp": lambda x: jnp.sum(x, -1)},
        (x,),
        rounds,
    )
    small = randn(8, 128), randn(8, 128)
    one = pl.pallas_call(lambda x, y, o: o.__setitem__(..., x[...] + y[...]), sds((8, 128)), **NATIVE)
    compare("add 8x128, one block", {"native": one, "jnp": jnp.add}, small, rounds * 20)


if __name__ == "__main__":
    main()
