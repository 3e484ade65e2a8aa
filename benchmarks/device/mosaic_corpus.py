"""Runs the Mosaic GPU corpus on a GPU, compares every result, and times two kernels against cuBLAS and SDPA.

It has not been run on hardware yet: no machine of ours had a GPU.

    python benchmarks/device/mosaic_corpus.py                     both steps, on a Hopper or Blackwell GPU
    python benchmarks/device/mosaic_corpus.py corpus --only NAME  some cases
    python benchmarks/device/mosaic_corpus.py speed               needs PyTorch; on Hopper
    python benchmarks/device/mosaic_corpus.py --emulate           the same code on the emulator: small, and no times

`corpus`: the kernels that were written for the simulated GPU (tests/simulator/gpu/kernels), those for the architecture
of the GPU that is here, and the corpus of block kernels (tests/corpus), in so far as hardware defines its results
(tests/compiler/gpu/table.py). Each is compiled, launched through `CudaDriver`, and compared with NumPy in float64.

`speed`: the matmul and the attention of `jax.experimental.pallas.ops.gpu`, as they ship, compiled by Palladion and
called by `plgpu.as_torch_kernel`. bfloat16, 8192 x 8192 x 8192; and 32 heads of 4096 queries, keys and values, 128
wide, float16, as batch 1. Shown are medians of 20 launches, by CUDA events, after 5 that do not count, interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from palladion import dropin
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import emulated, launch
from palladion.compiler.gpu.driver import CudaDriver, DriverError

SMALL = ("hopper_simple", "matmul_loop_inside", "softmax_rows")  # on the emulator, unless others are named
ROUNDS, WARM = 20, 5
SMS = {"sm_90a": 132, "sm_100a": 148}


# --- corpus -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def on_gpu(driver: Any) -> Iterator[None]:
    """Calls with `interpret=plgpu.EmulateParams()` go to the device instead, as machine code."""

    def run(params: dict[str, Any], operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        program = launch.prepare(params, driver.arch)
        return launch.on_host(program, driver, program.cubin, operands)

    with mock.patch.object(emulated, "_emulate", run):
        yield


def cases(arch: str | None) -> dict[str, Callable[[], None]]:
    """Every case by name: a function that raises AssertionError where a result is wrong. `arch`: of the kernels."""
    import corpus
    from compiler.gpu.table import SAME
    from simulator.gpu.kernels import CORPUS, off_by

    def kernel(case: Any) -> None:
        with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch=case.arch)):
            actual, expected, tolerance = case.run()
        off = off_by(actual, expected)
        assert off <= max(tolerance, 1e-6), f"off by {off:.2e}, {tolerance:.0e} allowed"

    def blocks(name: str) -> None:
        corpus.check(corpus.CASES[name], interpret=plgpu.EmulateParams())

    found: dict[str, Callable[[], None]] = {}
    for name, case in CORPUS.items():
        if case.devices == 1 and arch in (None, case.arch):
            found[name] = lambda case=case: kernel(case)
    return found | {name: lambda name=name: blocks(name) for name in SAME}


def run_corpus(chosen: dict[str, Callable[[], None]]) -> int:
    """Run cases and say what is wrong; how many are."""
    wrong = 0
    for number, (name, case) in enumerate(chosen.items()):
        try:
            case()
        except DriverError as error:
            print(f"{name}: {error}\nThe device's context is lost; {len(chosen) - number - 1} cases have not run.")
            return wrong + len(chosen) - number
        except Exception as error:
            wrong += 1
            print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
    print(f"corpus: {len(chosen) - wrong} of {len(chosen)} right")
    return wrong


# --- speed ------------------------------------------------------------------------------------------------------------
def matmul_of_ops(sms: int, **tiles: Any) -> Callable[..., Any]:
    """JAX's Hopper matmul, a function of (m, k) and (k, n)."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as ops

    sizes = dict(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_tile_width=8) | tiles
    setattr(ops, "get_num_sms", lambda: sms)  # JAX may have no GPU of its own here
    return lambda a, b: ops.matmul(a, b, None, ops.TuningConfig(**sizes))


def attention_of_ops(**blocks: Any) -> Callable[..., Any]:
    """JAX's Hopper attention, a function of three arrays (batch, length, heads, d)."""
    import types

    from jax.experimental.pallas.ops.gpu import attention_mgpu as ops

    sizes = dict(block_q=64, block_kv=128, max_concurrent_steps=2) | blocks
    setattr(ops, "cuda_versions", types.SimpleNamespace(cuda_runtime_get_version=lambda: 13000))
    return lambda q, k, v: ops.attention(q, k, v, ops.TuningConfig(**sizes))


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """In float64; like that of JAX, it leaves scores as they are: queries are given divided by √d."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p @ v / p.sum(-1, keepdims=True)).swapaxes(1, 2)


def off(actual: Any, expected: Any) -> float:
    """The largest error, relative to the largest expected magnitude."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def speed_emulated() -> int:
    """The kernels that are timed, small, on the emulator; how many are wrong."""
    draw = np.random.default_rng(0).standard_normal
    a, b = (jnp.asarray(draw((128, 128)), jnp.bfloat16) for _ in range(2))
    q, k, v = (jnp.asarray(draw((1, 128, 1, 64)), jnp.float16) for _ in range(3))
    q = q / 8
    with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch="sm_90a")):
        product = matmul_of_ops(2, tile_m=64, tile_n=64, max_concurrent_steps=2)(a, b)
        weighed = attention_of_ops(block_kv=64)(q, k, v)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    errors = {"matmul": off(product, expected), "attention": off(weighed, exact_attention(q, k, v))}
    for name, error in errors.items():
        print(f"{name}: off by {error:.1e}")
    return sum(error > 1e-2 for error in errors.values())


def speed(torch: Any, arch: str) -> int:
    """Times of the two kernels against PyTorch's; how many results are wrong."""
    n, heads, length, d = 8192, 32, 4096, 128
    made = dict(device="cuda", dtype=torch.bfloat16)
    a, b = torch.randn(n, n, **made), torch.randn(n, n, **made)
    q, k, v = (torch.randn(1, length, heads, d, device="cuda", dtype=torch.float16) for _ in range(3))
    q = q * d**-0.5
    matmul, attention = plgpu.as_torch_kernel(matmul_of_ops(SMS[arch])), plgpu.as_torch_kernel(attention_of_ops())
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def library(q: Any, k: Any, v: Any) -> Any:
        return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0).transpose(1, 2)

    work = {
        f"bf16 matmul {n}³ / cuBLAS": (matmul, torch.matmul, (a, b), 2 * n**3),
        f"f16 attention, {heads} x {length} x {d} / SDPA": (attention, library, (q, k, v), 4 * heads * length**2 * d),
    }
    wrong = 0
    with torch.no_grad():
        for name, (ours, theirs, operands, flops) in work.items():
            mine, its = ours(*operands).float(), theirs(*operands).float()
            error = float((mine - its).abs().max() / its.abs().max())
            wrong += not error < 1e-2
            own, other = times(torch, [lambda: ours(*operands), lambda: theirs(*operands)])
            rates = " against ".join(f"{flops / t / 1e9:.0f}" for t in (own, other))
            print(f"{name}: {own:.3f} ms / {other:.3f} ms = {own / other:.2f}; {rates} TFLOP/s; off by {error:.1e}")
    return wrong


def times(torch: Any, functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Medians in ms, by events on the current stream."""
    taken: list[list[float]] = [[] for _ in functions]
    for number in range(WARM + ROUNDS):
        for function, row in zip(functions, taken):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            if number >= WARM:
                row.append(start.elapsed_time(end))
    return [statistics.median(row) for row in taken]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """How many results are wrong, at most 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", choices=("corpus", "speed", []), help="default: both")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--emulate", action="store_true", help="on the emulator")
    given = parser.parse_args(arguments)
    steps = given.steps or ("corpus", "speed")
    jax.config.update("jax_platforms", "cpu")  # the device is used through the driver, and by PyTorch
    if "speed" in steps:
        dropin.install()
    driver = None if given.emulate else CudaDriver()
    wrong = 0
    if "corpus" in steps:
        found = cases(driver and driver.arch)
        if unknown := set(given.only) - set(found):
            parser.error(f"there are no cases {', '.join(sorted(unknown))}")
        only = given.only or (SMALL if driver is None else found)
        with contextlib.nullcontext() if driver is None else on_gpu(driver):
            wrong += run_corpus({name: found[name] for name in only})
    if "speed" in steps and driver is None:
        wrong += speed_emulated()
    elif "speed" in steps and driver is not None:
        torch = _torch()
        if torch is None or driver.arch != "sm_90a":
            print("speed: these kernels are for Hopper, and need PyTorch with CUDA; nothing is timed here.")
        else:
            wrong += speed(torch, driver.arch)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
