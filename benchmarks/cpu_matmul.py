"""The matrix products of the native CPU compiler, on one thread, against NumPy's OpenBLAS and jnp.

    ./dev exec python benchmarks/cpu_matmul.py            # all tables
    ./dev exec python benchmarks/cpu_matmul.py blocks     # or some: blocks, narrow, shapes, plans

The functions are called through ctypes, with nothing of Pallas around them. A block of C gets its sum over k by one
call a block, as programs of a grid do it; windows have the row strides of the whole arrays. NumPy chooses its kernel
itself (OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE are unset) and runs on one thread, and so does jnp, whose process is
tied to one CPU. Contenders take turns; shown are GFLOP/s (GOP/s) of the best round and of the median, and their
ratios to the peer's. Time is CPU time of the process, which other users of the machine disturb less; even so, on a
machine that is not quiet the best is the one to trust.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # before NumPy loads OpenBLAS
    os.environ.pop(name, None)
os.environ["OPENBLAS_NUM_THREADS"] = "1"
if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from palladion.compiler.cpu import cache, target
from palladion.compiler.cpu.builder import define, new_module, ptr, void
from palladion.compiler.cpu.matmul import MatmulSpec, emit_matmul
from palladion.compiler.cpu.matmul_plan import Plan, plans

SECONDS = float(os.environ.get("BENCHMARK_SECONDS", "8"))  # a table


def product(spec: MatmulSpec, plan: Plan | None = None) -> tuple[Callable, np.ndarray, float]:
    """The compiled function, its workspace, and the milliseconds from spec to object code."""
    plan = plan or plans(spec, target.host())[0]
    start = time.perf_counter()
    module = new_module("benchmark")
    function, b = define(module, "entry", void, ptr, ptr, ptr, ptr)
    b.call(emit_matmul(module, spec, plan=plan), function.args)
    b.ret_void()
    code = cache.compile_module(module)
    took = 1e3 * (time.perf_counter() - start)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(cache.link(code, ["entry"])["entry"])
    size = max(offset + n for offset, n in plan.areas().values())
    return call, np.zeros(size + 4096, np.uint8), took


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def matrix(shape, dtype):
    return np.random.default_rng(0).integers(0, 3, shape).astype(getattr(ml_dtypes, dtype, dtype))


def race(runs: dict[str, tuple[Callable, float]], peer: str | None, seconds: float = SECONDS) -> None:
    """Take turns; each run is (function, operations of a call)."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, (run, _) in runs.items():
            run()  # brings its own data back into the caches
            for _ in range(2):
                start = time.process_time()
                run()
                times[name].append(time.process_time() - start)
    rate = {n: [runs[n][1] / f(t) / 1e9 for f in (min, statistics.median)] for n, t in times.items()}
    for name, (best, median) in rate.items():
        ratio = (
            ""
            if peer is None
            else f"   / {peer}: best {best / rate[peer][0]:5.2f}, median {median / rate[peer][1]:5.2f}"
        )
        print(f"  {name:44s} {best:7.1f} (median {median:6.1f}){ratio}")


def peers(size: int, dtype: str, out: str) -> dict[str, tuple[Callable, float]]:
    """NumPy, where it has the dtype in OpenBLAS, and jnp: whole products of `size` cubed."""
    a, b = matrix((size, size), dtype), matrix((size, size), dtype)
    work = 2.0 * size**3
    found = {}
    if dtype in ("float32", "float64"):
        c = np.empty((size, size), dtype)
        found["numpy"] = lambda: np.matmul(a, b, out=c), work
    x, y = jnp.asarray(a), jnp.asarray(b)
    if x.dtype == a.dtype:  # not so for float64 without jax_enable_x64
        f = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=out))
        found["jnp"] = lambda: f(x, y).block_until_ready(), work
    return found


def block_of(size: int, block: tuple[int, int, int], dtype: str, out: str) -> tuple[Callable, float]:
    """One block of C of a product of `size` cubed, added up over k; another block with each call."""
    m, n, k = block
    spec = MatmulSpec(m, n, k, (size, 1), (size, 1), (size, 1), dtype, dtype, out, True)
    a, b, c = matrix((size, size), dtype), matrix((size, size), dtype), np.zeros((size, size), out)
    call, workspace, _ = product(spec)
    at = lambda x, row, column: ctypes.c_void_p(address(x) + (row * size + column) * x.itemsize)
    turns = [  # made beforehand: Python's arithmetic takes as long as a small block
        [(at(a, i, p), at(b, p, j), at(c, i, j), ctypes.c_void_p(address(workspace))) for p in range(0, size, k)]
        for i in range(0, size, m)
        for j in range(0, size, n)
    ]
    turn = itertools.cycle(turns)

    def run(keep=(a, b, c, workspace)):
        for arguments in next(turn):
            call(*arguments)

    return run, 2.0 * m * n * size


def blocks() -> None:
    """The tutorial's kernel with blocks of several sizes, f32 and f64."""
    for dtype in ("float32", "float64"):
        for size in (512, 1024, 2048):
            print(f"{dtype}, {size} cubed")
            runs = peers(size, dtype, dtype)
            for block in ((128, 128, 128), (256, 256, 256), (512, 512, 512), (256, 256, 512), (size, size, size)):
                if max(block) <= size and block not in ((512, 512, 512),) * (size == 512):
                    runs["blocks of {} x {} x {}".format(*block)] = block_of(size, block, dtype, dtype)
            race(runs, "numpy")


def narrow() -> None:
    """Elements of 16 and 8 bits."""
    pairs = [("bfloat16", "float32"), ("float16", "float32"), ("float8_e4m3fn", "float32")]
    for dtype, out in [*pairs, ("int8", "int32"), ("int16", "int32")]:
        print(f"{dtype} to {out}, 1024 cubed")
        runs = peers(1024, dtype, out)
        for block in (128, 256, 512):
            runs[f"blocks of {block} cubed"] = block_of(1024, (block,) * 3, dtype, out)
        race(runs, "jnp")


def one(m: int, n: int, k: int, a: str = "n", b: str = "n", dtype: str = "float32", out: str = "float32"):
    """The spec of a product of dense operands; "t": stored transposed."""
    strides = [(c, 1) if how == "n" else (1, r) for how, r, c in ((a, m, k), (b, k, n), ("n", m, n))]
    return MatmulSpec(m, n, k, *strides, dtype, dtype, out)


def repeated(spec: MatmulSpec, plan: Plan | None = None) -> tuple[Callable, float]:
    """Calls enough for a tenth of a millisecond, on dense operands."""
    call, workspace, _ = product(spec, plan)
    operands = (matrix(spec.m * spec.k, spec.a_dtype), matrix(spec.k * spec.n, spec.b_dtype))
    c = np.zeros(spec.m * spec.n, spec.c_dtype)
    args = [ctypes.c_void_p(address(x)) for x in (*operands, c, workspace)]
    work = 2.0 * spec.m * spec.n * spec.k
    count = max(1, int(1e-4 / (work / 1e11 + 3e-7)))

    def run(keep=(operands, c, workspace)):
        for _ in range(count):
            call(*args)

    return run, work * count


def shapes() -> None:
    """Operands in the caches: small blocks, attention's, vectors; a call through ctypes, 0.3 us, is included."""
    cases = {f"{n} cubed": (n, n, n) for n in (8, 16, 32, 64, 96)}
    cases |= {
        "Q K^T, 64 x 64, head 64": (64, 64, 64, "n", "t"),
        "Q K^T, 128 x 128, head 128": (128, 128, 128, "n", "t"),
    }
    cases |= {"P V, 64 x 64, head 128": (64, 128, 64), "A^T B, 128 cubed": (128, 128, 128, "t", "n")}
    cases |= {"row x matrix, 1024": (1, 1024, 1024), "row x transposed, 1024": (1, 1024, 1024, "n", "t")}
    cases |= {"matrix x column, 1024": (1024, 1, 1024), "outer product, 256": (256, 256, 1)}
    cases |= {"4 rows x matrix, 1024": (4, 1024, 1024), "primes 127 x 131 x 137": (127, 131, 137)}
    for title, case in cases.items():
        spec = one(*case)
        m, n, k = case[:3]
        a = matrix((m, k), "float32") if spec.a[1] == 1 else matrix((k, m), "float32").T
        b = matrix((k, n), "float32") if spec.b[1] == 1 else matrix((n, k), "float32").T
        c = np.empty((m, n), np.float32)
        ours, work = repeated(spec)
        count = round(work / (2.0 * m * n * k))
        print(title)

        def numpy(a=a, b=b, c=c, count=count):
            for _ in range(count):
                np.matmul(a, b, out=c)

        race({"numpy": (numpy, work), "palladion": (ours, work)}, "numpy", SECONDS / 8)


def plans_table() -> None:
    """Every way the planner considered, and what each took: the first should be the fastest, or nearly."""
    cases = {"256 cubed": one(256, 256, 256), "64 x 64 x 64, B^T": one(64, 64, 64, "n", "t")}
    cases |= {"1 x 512 x 512": one(1, 512, 512), "8 x 512 x 512, B^T": one(8, 512, 512, "n", "t")}
    cases |= {"bf16 32 x 128 x 128": one(32, 128, 128, dtype="bfloat16"), "512 x 8 x 512": one(512, 8, 512)}
    for title, spec in cases.items():
        runs = {}
        for plan in plans(spec, target.host()):
            kind = "dots" if plan.dots else f"{plan.rows} x {plan.vectors} tiles"
            name = f"{plan.kind.name}, {kind}, A {plan.a_mode}, B {plan.b_mode}" + ", swapped" * plan.swapped
            runs[name] = repeated(spec, plan)
        print(f"{title}; spec to object code: {product(spec)[2]:.0f} ms")
        race(runs, next(iter(runs)), SECONDS / 4)


TABLES = {"blocks": blocks, "narrow": narrow, "shapes": shapes, "plans": plans_table}

if __name__ == "__main__":
    host = target.host()
    print(f"{host.cpu}, vectors of {8 * host.vector_bytes} bits, one thread; GFLOP/s")
    for table in sys.argv[1:] or TABLES:
        TABLES[table]()
