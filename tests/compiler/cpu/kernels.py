"""Small hand-made kernels, in LLVM IR, for the tests of the runtime and of the cache."""

from __future__ import annotations

import math

from palladion.compiler.cpu import builder as B
from palladion.compiler.cpu import ffi
from palladion.compiler.cpu.builder import const, f32, f64, gep, i8, i32, i64, load, loop, ptr, store
from palladion.compiler.cpu.runtime import Array, KernelDescription, Phase

MUCH_NS = 10**9  # a cost estimate that makes the runtime use every thread


def kernel(name, count):
    """A module with one kernel function: module, builder, data pointers, begin, end, worker, buffers."""
    m = B.new_module(name)
    function, b = B.define(m, name, i32, ptr, i64, i64, i64)
    buffers, begin, end, worker = function.args
    return m, b, [load(b, ptr, gep(b, buffers, i, ptr)) for i in range(count)], begin, end, worker, buffers


def done(b):
    b.ret(const(0, i32))


def add(shape, name="add", cost_ns=0, aliases=(), num_threads=None, ty=f32, dtype="float32"):
    """z = x + y; a grid program is one element, however little that is."""
    m, b, (x, y, z), begin, end, _, _ = kernel("add", 3)
    with loop(b, begin, end) as L:
        plus = b.fadd if B.is_float(ty) else b.add
        store(b, plus(load(b, ty, gep(b, x, L.i, ty)), load(b, ty, gep(b, y, L.i, ty))), gep(b, z, L.i, ty))
    done(b)
    a = Array(shape, dtype)
    phases = (Phase("add", 0, math.prod(shape), cost_ns=cost_ns),)
    return m, KernelDescription(name, (a, a), (a,), phases, aliases=aliases, num_threads=num_threads)


def copy_bytes(array, name="copy"):
    """y = x, byte by byte, for any dtype."""
    m, b, (x, y), begin, end, _, _ = kernel("copy", 2)
    with loop(b, begin, end) as L:
        store(b, load(b, i8, gep(b, x, L.i)), gep(b, y, L.i))
    done(b)
    return m, KernelDescription(name, (array,), (array,), (Phase("copy", 0, array.nbytes),))


def spin(b, count):
    """Some 4 * count clock cycles of work that nothing can shorten; the value depends on it."""
    with loop(b, 0, count, carry=[const(1.0, f64)]) as L:
        L.next = [b.fmul(L.v[0], const(1.0000001, f64))]
    return L.out[0]


def probe(n, programs=64, spins=0, aliases=(), num_threads=None, cost_ns=MUCH_NS):
    """Each program writes (thread id, address of the argument, address of the second result, worker) as int64."""
    m, b, (x, report, out), begin, end, worker, _ = kernel("probe", 3)
    thread = B.call_extern(b, i32, "gettid")
    with loop(b, begin, end) as L:
        spin(b, spins)
        values = b.zext(thread, i64), b.ptrtoint(x, i64), b.ptrtoint(out, i64), worker
        for j, value in enumerate(values):
            store(b, value, gep(b, report, B.add_up(b, (L.i, 4), j), i64))
    done(b)
    d = KernelDescription(
        "probe",
        (Array((n,), "float32"),),
        (Array((programs, 8), "int32"), Array((n,), "float32")),  # pairs of int32: x64 may be off
        (Phase("probe", 0, programs, cost_ns=cost_ns, chunk=1),),
        aliases=aliases,
        num_threads=num_threads,
    )
    return m, d


def private_arena(programs=400, arena_bytes=4096):
    """Each program fills its worker's arena with its number, spins, and counts what is not its number any more."""
    m, b, (_, out, arena), begin, end, worker, _ = kernel("private", 3)
    own = gep(b, arena, b.mul(worker, const(arena_bytes)))
    words = arena_bytes // 8
    with loop(b, begin, end) as L:
        with loop(b, 0, words) as W:
            store(b, L.i, gep(b, own, W.i, i64))
        spin(b, 500)
        with loop(b, 0, words, carry=[const(0, i32)]) as W:
            wrong = b.icmp_signed("!=", load(b, i64, gep(b, own, W.i, i64)), L.i)
            W.next = [b.add(W.v[0], b.zext(wrong, i32))]
        store(b, W.out[0], gep(b, out, L.i, i32))
    done(b)
    a = Array((programs,), "int32")
    phases = (Phase("private", 0, programs, cost_ns=MUCH_NS, chunk=1),)
    return m, KernelDescription("private", (a,), (a,), phases, arena_bytes=arena_bytes)


def two_phases(n):
    """Phase 1: y[i] = 2 x[i]. Phase 2: z[i] = y[i] + y[n - 1 - i], which another thread may have written."""
    m, b, (x, y), begin, end, _, _ = kernel("first", 2)
    with loop(b, begin, end) as L:
        store(b, b.fmul(load(b, f32, gep(b, x, L.i, f32)), const(2.0, f32)), gep(b, y, L.i, f32))
    done(b)
    function, b = B.define(m, "second", i32, ptr, i64, i64, i64)
    buffers, begin, end, _ = function.args
    y, z = (load(b, ptr, gep(b, buffers, i, ptr)) for i in (1, 2))
    with loop(b, begin, end) as L:
        other = load(b, f32, gep(b, y, b.sub(const(n - 1), L.i), f32))
        store(b, b.fadd(load(b, f32, gep(b, y, L.i, f32)), other), gep(b, z, L.i, f32))
    done(b)
    a = Array((n,), "float32")
    phases = tuple(Phase(f, 0, n, cost_ns=MUCH_NS) for f in ("first", "second"))
    return m, KernelDescription("two phases", (a,), (a, a), phases)


def failing(programs, fails_at, status, spins=2000):
    """Program i adds 1 to the only element (atomically); program `fails_at` returns the status."""
    m, b, (_, out), begin, end, _, _ = kernel("failing", 2)
    with loop(b, begin, end) as L:
        with b.if_then(b.icmp_signed("==", L.i, const(fails_at))):
            b.ret(const(status, i32))
        spin(b, spins)
        b.atomic_rmw("add", out, const(1, i32), "monotonic")
    done(b)
    a = Array((1,), "int32")
    phases = (Phase("failing", 0, programs, cost_ns=MUCH_NS, chunk=1),)
    return m, KernelDescription("failing", (a,), (a,), phases, aliases=((0, 0),), errors=("zeroth", "first"))


def telling(n, values, programs=1):
    """Calls its only host site with pointers to (its argument, the program's number), and copies the argument."""
    m, b, (x, y), begin, end, _, buffers = kernel("telling", 2)
    number = B.on_stack(b, i32)
    with loop(b, begin, end) as L:
        store(b, b.trunc(L.i, i32), number)
        status = ffi.host_call(b, buffers, 0, [x, number][: len(values)])
        with b.if_then(b.icmp_signed("!=", status, const(0, i32))):
            b.ret(status)
        with loop(b, 0, n) as J:
            store(b, load(b, f32, gep(b, x, J.i, f32)), gep(b, y, J.i, f32))
    done(b)
    a = Array((n,), "float32")
    phases = (Phase("telling", 0, programs, cost_ns=MUCH_NS, chunk=1),)
    return m, KernelDescription("telling", (a,), (a,), phases)
