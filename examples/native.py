"""The same kernel interpreted and as machine code, timed against jnp.

    python examples/native.py

The kernel is written once. INTERPRETED shows what it means, on any machine; NATIVE compiles it for this machine's CPU.
`palladion.config.cpu = "native"`, or `palladion run --cpu native FILE`, chooses native code for a whole program.
"""

import statistics
import time

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import cpu as plcpu

BR = 8


def rms_norm_kernel(x_ref, scale_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale_ref[...]


def rms_norm(x, scale, how):
    rows = pl.BlockSpec((BR, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (pl.cdiv(x.shape[0], BR),)
    return pl.pallas_call(rms_norm_kernel, shape, grid=grid, in_specs=[rows, whole], out_specs=rows, **how)(x, scale)


def plain(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale


# Here is the whole difference.
INTERPRETED = dict(interpret=True)
NATIVE = dict(compiler_params=plcpu.CompilerParams())

calls = {
    "interpreted": jax.jit(lambda x, scale: rms_norm(x, scale, INTERPRETED)),
    "native": jax.jit(lambda x, scale: rms_norm(x, scale, NATIVE)),
    "jnp": jax.jit(plain),
}
x = jax.random.normal(jax.random.key(0), (1024, 1024))
scale = jnp.linspace(0.5, 2, 1024)[None]
wanted = plain(x, scale)
times = {name: [] for name in calls}
for _ in range(20):  # in turns, so that a busy moment of the machine hits all alike
    for name, call in calls.items():
        start = time.perf_counter()
        result = jax.block_until_ready(call(x, scale))
        times[name].append(1e3 * (time.perf_counter() - start))
        assert jnp.allclose(result, wanted, atol=1e-5)
for name, seen in times.items():
    print(f"{name:11s} {statistics.median(seen):6.2f} ms")
