"""The matrix products of the native CPU compiler against NumPy's OpenBLAS and jnp.

    ./dev exec python benchmarks/cpu_matmul.py            # all tables
    ./dev exec python benchmarks/cpu_matmul.py blocks     # or some: peak, kernels, blocks, narrow, shapes, plans
    BENCHMARK_THREADS=2 ./dev exec python benchmarks/cpu_matmul.py peak kernels

`peak` is what the processor's multipliers do from registers. `kernels` are whole kernels, K-accumulating as the
tutorial's, called through jit, with blocks that suit each size; wall-clock time. Both on BENCHMARK_THREADS threads, 1
unless it says otherwise, which is what NumPy and jnp have then too. Between contenders `kernels` waits until OpenBLAS's
threads no longer spin.

In the other tables, always on one thread, functions are called through ctypes, with nothing of Pallas around them. A
block of C gets its sum over k by one call a block, as programs of a grid do it; windows have the row strides of the
whole arrays. Contenders take turns; shown are GFLOP/s (GOP/s) of the best round and of the median, and their ratios to
the peer's. Time there is CPU time of the process, which other users of the machine disturb less; even so, on a machine
that is not quiet the best is the one to trust.

NumPy chooses its kernel itself (OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE are unset). On one thread the process, and with
it jnp, is tied to one CPU.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # before NumPy loads OpenBLAS
    os.environ.pop(name, None)
THREADS = int(os.environ.get("BENCHMARK_THREADS", "1"))
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["NPROC"] = str(THREADS)
if THREADS == 1 and hasattr(os, "sched_setaffinity"):  # before JAX starts its threads
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import ctypes
import itertools
import statistics
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import palladion as pl
from palladion import cpu as plcpu
from palladion.compiler.cpu import cache, target
from palladion.compiler.cpu.builder import const, define, gep, i64, load, loop, new_module, ptr, store, vec, void
from palladion.compiler.cpu.matmul import MatmulSpec, emit_matmul
from palladion.compiler.cpu.matmul_plan import Plan, plans
from palladion.compiler.cpu.matmul_tile import kinds, step

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


def multiplier(dtype: str, sums: int = 20) -> tuple[Callable, float]:
    """A loop that multiplies and adds to many sums without touching memory, and the operations of 2**20 rounds."""
    host = target.host()
    kind = kinds(dtype, dtype, "float32", host)[0]
    lanes = min(sums, host.registers - 4)
    module = new_module("peak")
    function, b = define(module, "entry", void, ptr, i64)
    data, rounds = function.args
    size = host.vector_bytes
    acc_ty, lane_ty = vec(kind.acc, host.lanes(4)), vec(kind.lane, host.lanes(4))
    x, y = (load(b, lane_ty, gep(b, data, n * size)) for n in range(2))
    with loop(b, const(0), rounds, 1, [load(b, acc_ty, gep(b, data, n * size)) for n in range(lanes)]) as L:
        L.next = [step(b, kind, host, acc, x, y) for acc in L.v]
    for n, acc in enumerate(L.out):
        store(b, acc, gep(b, data, n * size))
    b.ret_void()
    link = cache.link(cache.compile_module(module), ["entry"])
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(link["entry"])
    return call, 2.0 * lanes * host.lanes(4) * kind.group * 2**20


def peak() -> None:
    """What the multipliers do, on THREADS threads at once."""
    for dtype in ("float32", "bfloat16"):
        call, work = multiplier(dtype)
        rates = []
        for _ in range(9):
            data = [np.zeros(4096, np.uint8) for _ in range(THREADS)]
            workers = [threading.Thread(target=call, args=(address(d), 2**20)) for d in data]
            start = time.perf_counter()
            for w in workers:
                w.start()
            for w in workers:
                w.join()
            rates.append(THREADS * work / (time.perf_counter() - start) / 1e9)
        print(f"multiply-adds of {dtype} from registers: best {max(rates):.0f}, median {statistics.median(rates):.0f}")


Blocks = tuple[tuple[int, int, int], ...]
BLOCKS: dict[int, Blocks] = {  # of float32 products, by size: what suits it
    512: ((64, 512, 512), (64, 256, 512), (256, 256, 256), (512, 512, 512)),
    1024: ((512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024), (256, 256, 256)),
    2048: ((512, 1024, 512), (1024, 1024, 512), (512, 512, 512), (256, 256, 256)),
}


def summing(size: int, block: tuple[int, int, int], dtype: str) -> Callable:
    """The tutorial's K-accumulating kernel, float32 result, with blocks of m x n and k at a time."""
    m, n, k = block

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((size, size), jnp.float32),
        grid=(size // m, size // n, size // k),
        in_specs=[pl.BlockSpec((m, k), lambda i, j, k: (i, k)), pl.BlockSpec((k, n), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((m, n), lambda i, j, k: (i, j)),
        compiler_params=plcpu.CompilerParams(),
    )


def kernels() -> None:
    """Whole kernels through jit, wall-clock time: six calls a turn, of which five count."""
    cases: list[tuple[str, int, Blocks]] = [("float32", size, blocks) for size, blocks in BLOCKS.items()]
    cases.append(("bfloat16", 1024, ((1024, 256, 1024), (1024, 512, 512), (256, 256, 256))))
    for dtype, size, blocks in cases:
        x, y = (jnp.asarray(matrix((size, size), dtype)) for _ in range(2))
        product = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
        runs: dict[str, Callable] = {"jnp": lambda x=x, y=y, f=product: f(x, y).block_until_ready()}
        if dtype == "float32":
            runs["numpy"] = lambda x=np.array(x), y=np.array(y): np.matmul(x, y)
        count = len(runs)
        for block in blocks:
            call = jax.jit(summing(size, block, dtype))
            runs["blocks of {} x {} x {}".format(*block)] = lambda x=x, y=y, f=call: f(x, y).block_until_ready()
        times: dict[str, list[float]] = {name: [] for name in runs}
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(times["jnp"]) < 25:
            for name, run in runs.items():
                time.sleep(0.25)
                run()
                for _ in range(5):
                    start = time.perf_counter()
                    run()
                    times[name].append(time.perf_counter() - start)
        median = {name: statistics.median(t) for name, t in times.items()}
        peer = min(median[name] for name in list(runs)[:count])
        print(f"{dtype} to float32, {size} cubed, {THREADS} threads")
        for name, t in median.items():
            rate = 2e-9 * size**3 / t
            print(f"  {name:30s} {1e3 * t:8.3f} ms {rate:7.1f}   / best peer: {peer / t:5.2f}")


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


TABLES = {"peak": peak, "kernels": kernels, "blocks": blocks, "narrow": narrow, "shapes": shapes, "plans": plans_table}

if __name__ == "__main__":
    host = target.host()
    print(f"{host.cpu}, vectors of {8 * host.vector_bytes} bits; GFLOP/s")
    for table in sys.argv[1:] or TABLES:
        TABLES[table]()
