"""What one core can multiply and add at most, from registers alone: the bound of every matrix product.

    ./dev exec python benchmarks/cpu_peak.py

A loop of independent multiply-adds of vectors, with the instructions that products are made of: f32, f64, and bf16
into f32 sums.
"""

from __future__ import annotations

import ctypes
import os
import time

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import numpy as np

from palladion.compiler.cpu import cache, target
from palladion.compiler.cpu.builder import define, i64, load, loop, new_module, ptr, size_of, store, vec, void
from palladion.compiler.cpu.matmul_tile import kinds, step

ROUNDS = 300_000


def rate(dtype: str, out: str) -> float:
    """Operations a second, a multiply-add being two: the best of several runs."""
    host = target.host()
    kind = kinds(dtype, dtype, out, host)[0]
    lanes = host.lanes(size_of(kind.acc))
    sums = 3 * host.registers // 4  # enough to hide the latency, and they stay in registers
    module = new_module("peak")
    function, b = define(module, "peak", void, ptr, i64)
    zero = load(b, vec(kind.acc, lanes), function.args[0])
    x = load(b, vec(kind.lane, lanes), function.args[0])
    with loop(b, 0, function.args[1], carry=[zero] * sums) as L:
        L.next = [step(b, kind, host, acc, x, x) for acc in L.v]
    for k, acc in enumerate(L.out):
        store(b, acc, b.gep(function.args[0], [i64((1 + k) * lanes)], source_etype=kind.acc))
    b.ret_void()
    entry = cache.link(cache.compile_module(module), ["peak"])["peak"]
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(entry)
    memory = np.zeros(64 * 64, np.uint8)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        call(memory.ctypes.data, ROUNDS)
        best = min(best, time.perf_counter() - start)
    return 2.0 * ROUNDS * sums * lanes * kind.group / best


if __name__ == "__main__":
    print(f"{target.host().cpu}, one core, {8 * target.host().vector_bytes}-bit vectors")
    for dtype, out in (("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")):
        print(f"{dtype:9s} {rate(dtype, out) / 1e9:6.0f} GFLOP/s")
