"""Threads of a job: where a helper goes, and single statements that several threads share."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compiler.cpu import kernels
from palladion.compiler.cpu import builder as B
from palladion.compiler.cpu import cache, jobs, runtime
from palladion.compiler.cpu.builder import const, gep, i32, i64, load, loop, ptr, store, void
from palladion.compiler.cpu.runtime import Array, KernelDescription, Phase

THREADED = pytest.mark.skipif(runtime.cpu_count() < 2, reason="needs two CPUs")
PARTS = 64


def in_thread(function):
    """What a function returns on a thread of its own, whose CPUs may be changed."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


def exported(name, emit, *types):
    """The address of a function of jobs.py, behind one that can be linked to."""
    m = B.new_module(name)
    inner = emit(m)
    function, b = B.define(m, "entry", void, *types)
    b.call(inner, function.args)
    b.ret_void()
    return cache.link(cache.compile_module(m), ["entry"])["entry"]


LIBC = ctypes.CDLL(None)


@THREADED
def test_a_helper_leaves_the_cpu_of_the_caller_and_only_that():
    leave = ctypes.CFUNCTYPE(None, ctypes.c_int32)(exported("leave", jobs._emit_leave, i32))

    def moves():
        all_cpus = os.sched_getaffinity(0)
        before = LIBC.sched_getcpu()
        os.sched_setaffinity(0, {before})  # nobody else moves the thread while we look
        os.sched_setaffinity(0, all_cpus)
        leave(before)
        after = LIBC.sched_getcpu()
        return before, after, os.sched_getaffinity(0) == all_cpus

    for _ in range(10):
        before, after, same_cpus = in_thread(moves)
        assert after != before and same_cpus


@THREADED
def test_a_thread_that_may_run_nowhere_else_stays():
    leave = ctypes.CFUNCTYPE(None, ctypes.c_int32)(exported("leave", jobs._emit_leave, i32))

    def stays():
        only = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {only})
        leave(only)
        return LIBC.sched_getcpu() == only and os.sched_getaffinity(0) == {only}

    assert in_thread(stays)


def test_a_caller_that_lost_its_turn_does_not_give_way_for_a_while():
    give_way = ctypes.CFUNCTYPE(None)(exported("give_way", jobs._emit_give_way))
    only = {min(os.sched_getaffinity(0))}
    code = f"import os\nos.sched_setaffinity(0, {only})\nprint(1, flush=True)\nwhile 1: pass"
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert busy.stdout and busy.stdout.read(1)

    def turns():
        os.sched_setaffinity(0, only)
        times = []
        while len(times) < 60:
            start = time.perf_counter()
            give_way()
            times.append(time.perf_counter() - start)
        return times

    try:
        times = in_thread(turns)
    finally:
        busy.kill()
        busy.communicate()
    lost = sum(t > 1e-3 for t in times)
    # without the pauses of 2, 4, 8 … turns nearly every one would be lost; some are as CPU time runs out anyway
    assert 1 <= lost <= 20, (lost, times)


def spreading(num_threads=None):
    """A phase of one program that has PARTS parts done: each writes (thread, worker, how often it was done)."""
    m, b, (_, out, arena), _, _, _, buffers = kernels.kernel("spreading", 3)
    part, p = B.define(m, "part", i32, ptr, i64, i64, i64, internal=True)
    data, begin, end, worker = part.args
    report, own = load(p, ptr, data), gep(p, load(p, ptr, gep(p, data, 1, ptr)), p.mul(worker, const(64)))
    thread = p.zext(B.call_extern(p, i32, "gettid"), i64)
    with loop(p, begin, end) as L:
        store(p, L.i, own)
        kernels.spin(p, 20_000)
        row = gep(p, report, p.mul(L.i, const(3)), i64)
        mine = p.zext(p.icmp_signed("==", load(p, i64, own), L.i), i64)  # nobody else has this part of the arena
        count = p.add(load(p, i64, gep(p, row, 2, i64)), mine)
        for n, value in enumerate((thread, worker, count)):
            store(p, value, gep(p, row, n, i64))
    kernels.done(p)
    with loop(b, 0, 3 * PARTS) as L:
        store(b, const(0), gep(b, out, L.i, i64))
    slots = B.on_stack(b, ptr, 2)
    store(b, out, slots)
    store(b, arena, gep(b, slots, 1, ptr))
    jobs.spread(b, buffers, part, slots, PARTS)
    with loop(b, 0, PARTS) as L:  # all are done when it comes back
        count = gep(b, out, B.add_up(b, (L.i, 3), 2), i64)
        store(b, b.add(load(b, i64, count), const(10)), count)
    kernels.done(b)
    return m, KernelDescription(
        "spreading",
        (Array((1,), "int32"),),
        (Array((PARTS, 6), "int32"),),
        (Phase("spreading", 0, 1, parallel=False),),
        arena_bytes=64,
        num_threads=num_threads,
        spread=True,
    )


def test_one_statement_is_shared_among_threads():
    key = runtime.load(*spreading())
    f = jax.jit(lambda x: runtime.call(key, x)[0])
    used = set()
    for i in range(20):
        thread, worker, count = np.asarray(f(jnp.full(1, i))).view(np.int64).T
        np.testing.assert_array_equal(count, 11)
        pairs = set(zip(thread, worker))
        assert len({t for t, _ in pairs}) == len({w for _, w in pairs}) == len(pairs)
        assert all(0 <= w < runtime.cpu_count() for w in worker)
        used.add(len(pairs))
    assert runtime.cpu_count() == 1 or max(used) > 1, "no call of twenty used a second thread"


def test_a_shared_statement_keeps_to_num_threads():
    key = runtime.load(*spreading(num_threads=1))
    thread, worker, count = np.asarray(runtime.call(key, jnp.zeros(1, jnp.int32))[0]).view(np.int64).T
    assert len(set(thread)) == 1 and set(worker) == {0} and set(count) == {11}


def test_programs_that_share_statements_do_not_deadlock():
    key = runtime.load(*spreading())
    f = jax.jit(lambda x: [runtime.call(key, x + i)[0] for i in range(8)])

    def client():
        return [np.asarray(r).view(np.int64)[:, 2] for _ in range(5) for r in f(jnp.zeros(1, jnp.int32))]

    results = []
    clients = [threading.Thread(target=lambda: results.append(client())) for _ in range(4)]
    for c in clients:
        c.start()
    for c in clients:
        c.join(60)
        assert not c.is_alive()
    assert len(results) == 4
    np.testing.assert_array_equal(results, 11)
