"""The Mosaic GPU compiler and the PTX emulator: compile times, and how long emulated kernels take.

    ./dev exec python benchmarks/mosaic_gpu.py

Compile times are of the kernels of the GPU corpus (tests/simulator/gpu/kernels), each compiled with no cache: the code
generator, and NVRTC in its child process. Shown are medians. There is no peer on a machine without a GPU: JAX's own
Mosaic GPU compiles a kernel when it first runs on one.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import emulated, nvrtc
from palladion.compiler.gpu.generate import generate
from simulator.gpu.kernels import CORPUS


def calls() -> list[tuple[str, str, dict[str, Any]]]:
    """(name, architecture, parameters) of the corpus's calls on one device."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    run = emulated._emulate
    for name, case in CORPUS.items():
        if case.devices > 1:
            continue

        def keep(params: Any, operands: Any, name: str = name, arch: str = case.arch) -> Any:
            found.append((name, arch, params))
            return run(params, operands)

        emulated._emulate = keep
        with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch=case.arch)):
            case.run()
    emulated._emulate = run
    return found


def compile_times() -> None:
    """Print medians over the corpus."""
    lowering, assembling = [], []
    for _, arch, params in calls():
        start = time.perf_counter()
        made = generate(params, arch)
        middle = time.perf_counter()
        nvrtc.compile_source(made.source, arch, made.name)
        lowering.append(middle - start)
        assembling.append(time.perf_counter() - middle)
    total = [a + b for a, b in zip(lowering, assembling)]
    print(f"{len(total)} kernels: code generator {1e3 * statistics.median(lowering):.0f} ms, NVRTC "
          f"{1e3 * statistics.median(assembling):.0f} ms, together {1e3 * statistics.median(total):.0f} ms (medians), "
          f"at most {1e3 * max(total):.0f} ms")  # fmt: skip


def timed(f: Any, *args: Any) -> tuple[float, float, Any]:
    """Seconds of the first call and the median of three more, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(f(*args))
    first = time.perf_counter() - start
    rest = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        rest.append(time.perf_counter() - start)
    return first, statistics.median(rest), result


def emulated_times() -> None:
    """Print how long kernels take on the emulator."""
    from simulator.gpu.kernels.hopper import simple_matmul

    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, (256, 256)), jnp.float16) for _ in range(2))
    with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch="sm_90a")):
        first, again, got = timed(simple_matmul, a, b)
    assert np.array_equal(got, np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    print(f"wgmma matmul f16 256³, tiles of 64: {again:.2f} s (first call {first:.2f} s; wanted: under 5 s)")

    def softmax(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jax.nn.softmax(x_ref[...], axis=-1)

    x = jnp.asarray(rng.standard_normal((64, 1024)), jnp.float32)
    spec = pl.BlockSpec((4, 1024), lambda i: (i, 0))
    call = pl.pallas_call(softmax, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(16,), in_specs=[spec], out_specs=spec,
                          interpret=plgpu.EmulateParams())  # fmt: skip
    first, again, got = timed(call, x)
    assert np.allclose(got, jax.nn.softmax(x, -1), atol=1e-6)
    print(f"softmax f32 (64, 1024), 16 blocks: {again:.2f} s (first call {first:.2f} s)")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    compile_times()
    emulated_times()
