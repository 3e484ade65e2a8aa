"""How one phase of a kernel runs over its grid: alone, or with the help of XLA's intra-op pool.

A job is a phase, or one large statement of a phase (`spread`), that several threads work on. Each takes the next chunk
of grid programs until none is left. The caller is one of them, and then waits only for chunks that a running thread has
begun; it never waits for a task that is still in the pool's queue. (Waiting for queued tasks deadlocks as soon as every
thread of the pool does it, which a few concurrent programs are enough for.) The job is on the heap with a count of
references, so that a helper that XLA starts late still finds it, sees that no work is left, and leaves.

A thread that joins a job gets the next worker index, so that each has its own part of the arena. A chunk that returns
a nonzero status stops the job: no chunk is begun after that, and the first status is the job's.

Where a helper begins matters more than anything else here. In virtual machines Linux takes a CPU that sleeps for one
that the host has taken away (vcpu_is_preempted), and so wakes the helper on the caller's own CPU, where both then take
turns for milliseconds, until the next balancing, beside an idle one (measured: 70 % of calls after a pause of 0.25 s).
So a helper that finds itself on the caller's CPU moves to another one at once, and a caller whose helper has not begun
gives way to it for the few microseconds that takes. On a busy machine somebody else may get that turn, for
milliseconds; a caller that met this does not give way for a while.

XLA's threads flush subnormal numbers. Kernels compute them as IEEE 754 says: each thread switches that mode off for as
long as it runs chunks (two instructions; on x86 bits 15 and 6 of MXCSR, on aarch64 bits 24 and 19 of FPCR).
"""

from __future__ import annotations

import contextlib
import ctypes as C
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import target
from palladion.compiler.cpu.abi import (
    I32,
    I64,
    CallFrame,
    Kernel,
    NumThreads,
    P,
    Phase,
    Schedule,
    argument,
    call_api,
    discard_error,
    field,
    get,
    put,
    struct,
)
from palladion.compiler.cpu.builder import (
    NULL,
    Value,
    blocks,
    call_extern,
    call_pointer,
    const,
    define,
    gep,
    i32,
    i64,
    intrinsic,
    load,
    loop,
    on_stack,
    ptr,
    smax,
    smin,
    store,
    void,
)

SPREAD = "palladion_spread"
KERNEL_AT, FRAME_AT = -1, -2  # where, before a kernel's buffers, the handler keeps pointers to its descriptor and frame

SPINS = 3000  # pauses before a caller sleeps: some 50 microseconds, about what waking it on a sleeping CPU would cost
CHUNKS_PER_THREAD = 4  # enough to even out threads that start late

LONG_NS = 300_000  # giving way took so long: somebody else got that turn
SKIPS = (
    2,
    64,
)  # so many times a caller does not give way after that; twice as many, up to the second, if it is so again
CPUS = 1024  # of an affinity mask, as the C library's cpu_set_t; on a larger machine threads stay where they are

# next, done: grid indices; refs, workers: counts; home: the caller's CPU; status: the first nonzero one; sem: a sem_t
# of the C library
Job = struct(
    "Job",
    *(("fn", P), ("bufs", P), ("end", I64), ("chunk", I64), ("next", I64), ("done", I64), ("refs", I64)),
    *(("workers", I64), ("home", I32), ("status", I32), ("sem", I64 * 4)),
    head=False,
)


@contextlib.contextmanager
def ieee_subnormals(b: ir.IRBuilder) -> Iterator[None]:
    """Code emitted inside runs with subnormal numbers on; afterwards the thread's mode is what it was."""
    if target.host().arch == "x86_64":
        saved, mode = on_stack(b, i32), on_stack(b, i32)
        intrinsic(b, void, "x86.sse.stmxcsr", saved, types=())
        store(b, b.and_(load(b, i32, saved), const(~0x8040, i32)), mode)
        intrinsic(b, void, "x86.sse.ldmxcsr", mode, types=())
        yield
        intrinsic(b, void, "x86.sse.ldmxcsr", saved, types=())
    else:
        register = intrinsic(b, i64, "aarch64.get.fpcr", types=())
        intrinsic(b, void, "aarch64.set.fpcr", b.and_(register, const(~(1 << 24 | 1 << 19))), types=())
        yield
        intrinsic(b, void, "aarch64.set.fpcr", register, types=())


def _pause(b: ir.IRBuilder) -> None:
    if target.host().arch == "x86_64":
        intrinsic(b, void, "x86.sse2.pause", types=())
    else:
        intrinsic(b, void, "aarch64.hint", const(1, i32), types=())  # yield


def _atomic_add(b: ir.IRBuilder, job: Value, name: str, value: Value) -> Value:
    return b.atomic_rmw("add", field(b, Job, job, name)[0], value, "acq_rel")


def _atomic_get(b: ir.IRBuilder, job: Value, name: str) -> Value:
    address, ty = field(b, Job, job, name)
    return b.load_atomic(address, "acquire", C.sizeof({i64: I64, i32: I32}[ty]), typ=ty)


def _emit_work(m: Any) -> Any:
    """void work(job): take chunks until none is left; whoever finishes the last one signals."""
    work, b = define(m, "job_work", void, ptr, internal=True)
    (job,) = work.args
    worker = _atomic_add(b, job, "workers", const(1))
    last, chunk = get(b, Job, job, "end"), get(b, Job, job, "chunk")
    fn, bufs = get(b, Job, job, "fn"), get(b, Job, job, "bufs")
    with ieee_subnormals(b):
        take, leave, run, failed, finish, signal = blocks(b, "take", "leave", "run", "failed", "finish", "signal")
        b.branch(take)

        b.position_at_end(take)
        begin = _atomic_add(b, job, "next", chunk)
        b.cbranch(b.icmp_signed("<", begin, last), run, leave)

        b.position_at_end(run)
        end = smin(b, b.add(begin, chunk), last)
        status = call_pointer(b, i32, fn, bufs, begin, end, worker)
        own = b.sub(end, begin)
        b.cbranch(b.icmp_signed("==", status, const(0, i32)), finish, failed)

        b.position_at_end(failed)  # what nobody has begun counts as done
        b.cmpxchg(field(b, Job, job, "status")[0], const(0, i32), status, "acq_rel", "acquire")
        unbegun = b.sub(last, b.atomic_rmw("xchg", field(b, Job, job, "next")[0], last, "acq_rel"))
        with_unbegun = b.add(own, smax(b, unbegun, const(0)))
        b.branch(finish)

        b.position_at_end(finish)
        size = b.phi(i64)
        size.add_incoming(own, run)
        size.add_incoming(with_unbegun, failed)
        done = b.add(_atomic_add(b, job, "done", size), size)
        b.cbranch(b.icmp_signed("==", done, last), signal, take)

        b.position_at_end(signal)
        call_extern(b, i32, "sem_post", field(b, Job, job, "sem")[0])
        b.branch(leave)
        b.position_at_end(leave)
    b.ret_void()
    return work


def _emit_wait(m: Any) -> Any:
    """void wait(job): return when every chunk is done. Spins first, as it usually is about to be."""
    wait, b = define(m, "job_wait", void, ptr, internal=True)
    (job,) = wait.args
    last, sem = get(b, Job, job, "end"), field(b, Job, job, "sem")[0]
    before, (spin, pause, sleep, done) = b.block, blocks(b, "spin", "pause", "sleep", "done")
    b.branch(spin)
    b.position_at_end(spin)
    n = b.phi(i64)
    b.cbranch(b.icmp_signed("==", _atomic_get(b, job, "done"), last), done, pause)
    b.position_at_end(pause)
    _pause(b)
    more = b.add(n, const(1))
    n.add_incoming(const(0), before)
    n.add_incoming(more, pause)
    b.cbranch(b.icmp_signed("<", more, const(SPINS)), spin, sleep)
    b.position_at_end(sleep)  # and again after an interrupting Unix signal
    b.cbranch(b.icmp_signed("==", call_extern(b, i32, "sem_wait", sem), const(0, i32)), done, sleep)
    b.position_at_end(done)
    b.ret_void()
    return wait


def _emit_leave(m: Any) -> Any:
    """void leave(cpu): move this thread off a CPU if it is on it and may run elsewhere."""
    leave, b = define(m, "job_leave", void, i32, internal=True)
    (cpu,) = leave.args
    with b.if_then(b.icmp_signed("!=", call_extern(b, i32, "sched_getcpu"), cpu), likely=True):
        b.ret_void()
    nbytes = const(CPUS // 8)
    allowed, others = on_stack(b, i64, CPUS // 64), on_stack(b, i64, CPUS // 64)
    known = [call_extern(b, i32, "sched_getaffinity", const(0, i32), nbytes, mask) for mask in (allowed, others)]
    with b.if_then(b.icmp_signed("==", b.or_(*known), const(0, i32))):
        word = gep(b, others, b.sext(b.lshr(cpu, const(6, i32)), i64), i64)
        bit = b.shl(const(1), b.zext(b.and_(cpu, const(63, i32)), i64))
        store(b, b.and_(load(b, i64, word), b.not_(bit)), word)
        # Refused where no CPU is left. The thread stays where it went when it may again run anywhere.
        moved = call_extern(b, i32, "sched_setaffinity", const(0, i32), nbytes, others)
        with b.if_then(b.icmp_signed("==", moved, const(0, i32))):
            call_extern(b, i32, "sched_setaffinity", const(0, i32), nbytes, allowed)
    b.ret_void()
    return leave


def _nanoseconds(b: ir.IRBuilder) -> Value:
    """The time on a clock that no system call is needed for."""
    time = on_stack(b, i64, 2)
    call_extern(b, i32, "clock_gettime", const(1, i32), time)  # CLOCK_MONOTONIC: seconds, nanoseconds
    return b.add(b.mul(load(b, i64, time), const(10**9)), load(b, i64, gep(b, time, 1, i64)))


def _emit_give_way(m: Any) -> Any:
    """void give_way(): let a thread that waits for this CPU run first, unless that was no good lately."""
    give_way, b = define(m, "job_give_way", void, internal=True)
    skip, next_skip = (_count(m, f"job_{name}", value) for name, value in (("skip", 0), ("next_skip", SKIPS[0])))
    left = b.load_atomic(skip, "monotonic", 8, typ=i64)
    with b.if_then(b.icmp_signed(">", left, const(0)), likely=False):
        b.atomic_rmw("xchg", skip, b.sub(left, const(1)), "monotonic")
        b.ret_void()
    before = _nanoseconds(b)
    call_extern(b, i32, "sched_yield")
    bad = b.icmp_signed(">", b.sub(_nanoseconds(b), before), const(LONG_NS))
    many = b.load_atomic(next_skip, "monotonic", 8, typ=i64)
    worse, better = smin(b, b.mul(many, const(2)), const(SKIPS[1])), smax(b, b.sub(many, const(1)), const(SKIPS[0]))
    more = b.select(bad, worse, better)
    with b.if_then(b.or_(bad, b.icmp_signed("!=", more, many)), likely=False):
        b.atomic_rmw("xchg", next_skip, more, "monotonic")
        b.atomic_rmw("xchg", skip, b.select(bad, many, const(0)), "monotonic")
    b.ret_void()
    return give_way


def _count(m: Any, name: str, value: int) -> Value:
    count: Any = ir.GlobalVariable(m, i64, name)
    count.initializer, count.linkage = const(value), "internal"
    count.type = ptr
    return count


def emit_jobs(m: Any) -> SimpleNamespace:
    """The functions of jobs: work (take chunks), wait, drop (a reference), task (a helper: work, then drop), give_way
    (to a helper that waits for the caller's CPU)."""
    work, wait, leave = _emit_work(m), _emit_wait(m), _emit_leave(m)

    drop, b = define(m, "job_drop", void, ptr, internal=True)
    with b.if_then(b.icmp_signed("==", _atomic_add(b, drop.args[0], "refs", const(-1)), const(1))):
        call_extern(b, void, "free", drop.args[0])
    b.ret_void()

    task, b = define(m, "job_task", void, ptr, internal=True)
    b.call(leave, [get(b, Job, task.args[0], "home")])
    b.call(work, task.args)
    b.call(drop, task.args)
    b.ret_void()
    return SimpleNamespace(work=work, wait=wait, drop=drop, task=task, give_way=_emit_give_way(m))


def _pool_threads(b: ir.IRBuilder, frame: Value) -> Value:
    n = on_stack(b, i64)
    store(b, const(1), n)  # where XLA has no pool
    arguments = argument(b, NumThreads, ctx=get(b, CallFrame, frame, "ctx"), num_threads=n)
    error = call_api(b, frame, "ThreadPool_NumThreads", arguments)
    with b.if_then(b.icmp_unsigned("!=", error, NULL), likely=False):
        discard_error(b, frame, error)
    return load(b, i64, n)


def _schedule(b: ir.IRBuilder, frame: Value, job: Value, jobs: SimpleNamespace, count: Value) -> None:
    """Ask XLA's pool to run the task of helpers `count` times; where it cannot, run it here."""
    task = jobs.task
    with loop(b, 0, count) as L:
        arguments = argument(b, Schedule, ctx=get(b, CallFrame, frame, "ctx"), task=task, data=job)
        error = call_api(b, frame, "ThreadPool_Schedule", arguments)
        with b.if_then(b.icmp_unsigned("!=", error, NULL), likely=False):
            discard_error(b, frame, error)
            b.call(task, [job])
        with b.if_then(b.icmp_signed("<=", _atomic_get(b, job, "workers"), L.i)):  # it has not begun
            b.call(jobs.give_way, [])


def emit_run(m: Any) -> Any:
    """i32 run(frame, fn, bufs, begin, end, chunk, threads): run fn over begin..end-1 on at most so many threads,
    `chunk` indices at a time (0: as many as suits); the first nonzero status of its chunks, or 0."""
    jobs = emit_jobs(m)
    run, b = define(m, "job_run", i32, ptr, ptr, ptr, i64, i64, i64, i64, internal=True)
    frame, fn, bufs, begin, end, chunk, worth = run.args
    total = b.sub(end, begin)
    with b.if_then(b.icmp_signed("<=", total, const(0))):
        b.ret(const(0, i32))

    shared, several, alone = blocks(b, "shared", "several", "alone")
    b.cbranch(b.icmp_signed(">", worth, const(1)), shared, alone)
    b.position_at_end(shared)
    threads = smax(b, smin(b, _pool_threads(b, frame), worth), const(1))
    auto = b.add(b.sdiv(b.sub(total, const(1)), b.mul(threads, const(CHUNKS_PER_THREAD))), const(1))
    chunk = b.select(b.icmp_signed("==", chunk, const(0)), auto, chunk)
    chunks = b.add(b.sdiv(b.sub(total, const(1)), chunk), const(1))
    threads = smin(b, threads, chunks)
    b.cbranch(b.icmp_signed(">", threads, const(1)), several, alone)

    b.position_at_end(alone)
    with ieee_subnormals(b):
        status = call_pointer(b, i32, fn, bufs, begin, end, const(0))
    b.ret(status)

    b.position_at_end(several)
    job = call_extern(b, ptr, "malloc", const(C.sizeof(Job)))
    with b.if_then(b.icmp_unsigned("==", job, NULL), likely=False):  # out of memory
        b.branch(alone)
    put(b, Job, job, fn=fn, bufs=bufs, end=end, chunk=chunk, next=begin, done=begin, refs=threads, workers=0, status=0)
    put(b, Job, job, home=call_extern(b, i32, "sched_getcpu"))
    call_extern(b, i32, "sem_init", field(b, Job, job, "sem")[0], const(0, i32), const(0, i32))
    _schedule(b, frame, job, jobs, b.sub(threads, const(1)))
    b.call(jobs.work, [job])
    b.call(jobs.wait, [job])
    status = _atomic_get(b, job, "status")
    b.call(jobs.drop, [job])
    b.ret(status)
    return run


def run_phase(b: ir.IRBuilder, run: Any, frame: Value, phase: Value, bufs: Value) -> Value:
    """Run one phase of a kernel to its end; the status."""
    names = ("fn", "begin", "end", "chunk", "threads")
    fn, begin, end, chunk, threads = (get(b, Phase, phase, name) for name in names)
    return b.call(run, [frame, fn, bufs, begin, end, chunk, threads])


def emit_spread(m: Any, run: Any) -> None:
    """i32 palladion_spread(buffers, fn, data, count): what kernels link to, to share one statement among threads."""
    spread, b = define(m, SPREAD, i32, ptr, ptr, ptr, i64)
    buffers, fn, data, count = spread.args
    kernel, frame = (load(b, ptr, gep(b, buffers, place, ptr)) for place in (KERNEL_AT, FRAME_AT))
    b.ret(b.call(run, [frame, fn, data, const(0), count, const(1), get(b, Kernel, kernel, "workers")]))


def spread(b: ir.IRBuilder, buffers: Value, function: Any, data: Value, count: int) -> None:
    """Emit, in the function of a phase that is not parallel, a call of another function by several threads.

    Arguments:
      buffers: the kernel's first argument.
      function: `i32 (ptr data, i64 begin, i64 end, i64 worker)`, which always returns 0: the indices begin to end - 1,
        by the worker of that number; the description's `spread` says that the arena has a part for each.
      data: for the function. count: of indices.
    """
    call_extern(b, i32, SPREAD, buffers, function, data, const(count))
