"""Linear bulk copies: `cp.async.bulk` and `cp.reduce.async.bulk` between global and shared memory, and bulk groups.

One thread copies any multiple of 16 bytes; loads signal an mbarrier, stores belong to the thread's bulk groups.
Tensor copies are in `tensor_copies.py`. Facts file 2.3 to 2.7.
"""

import numpy as np

from palladion.emulator import engine
from palladion.emulator.proxies import check_async_read
from palladion.emulator.reductions import allowed, reduce_bytes
from palladion.emulator.registry import Wait, operation
from palladion.emulator.sources import sources


def lanes_of(group):
    """The active lanes, each with a function that picks its value of an operand (ints stay)."""
    for i in group.active_indices().tolist():
        yield i, lambda value, i=i: int(value[i]) if isinstance(value, np.ndarray) else int(value)


def _optional(instr, extra, names):
    """The optional operands by name, in the order in which the qualifiers that bring them are written."""
    given = [name for name, qualifier in names if instr.has(qualifier)]
    return dict(zip(given, extra))


@operation("cp.async.bulk")
def cp_async_bulk(group, instr, target, source, size, *extra) -> None:
    """Linear copies: global to shared (one CTA or several), shared to another CTA's, shared to global."""
    spaces = [part for part in instr.parts if part in ("global", "shared::cta", "shared::cluster")]
    for lane, at in lanes_of(group):
        if spaces == ["global", "shared::cta"]:
            _store(group, instr, lane, at(target), at(source), at(size), [at(x) for x in extra])
        elif spaces[-1] == "global":
            _load(group, instr, lane, at(target), at(source), at(size), [at(x) for x in extra], spaces[0])
        else:
            _across(group, lane, at(target), at(source), at(size), at(extra[0]))


def _load(group, instr, lane, target, source, size, extra, space) -> None:
    what = f"cp.async.bulk of {size} bytes from global to shared memory"
    engine.multiple_of_16(group, source, "global address", lane, what)
    engine.multiple_of_16(group, size, "size", lane, what)
    left = right = 0
    if instr.has("ignore_oob"):
        left, right, *extra = extra
        if not (0 <= left < 16 and 0 <= right < 16 and left + right <= size):
            group.fault(
                "illegal-shape", f"{what}: .ignore_oob of {left} and {right} bytes; each is up to 15", lane=lane
            )
    mbarrier, *rest = extra
    options = _optional(instr, rest, [("mask", "multicast::cluster"), ("policy", "L2::cache_hint")])
    cta, offset = engine.shared_span(group, target, size, 16, lane, what, own=space == "shared::cta")
    view = group.view("global", source + left, size - left - right)
    if "mask" in options:
        targets = engine.multicast_targets(group, options["mask"], lane, what)
        at = group.locate_shared(mbarrier)[1]
        signals = [engine.signal_at(group, one, at, lane) for one in targets]
    else:
        targets, signals = [cta], [engine.signal(group, mbarrier, lane)]
        _same_cta(group, lane, what, cta, signals[0])
    span = np.arange(offset + left, offset + size - right)
    engine.load(group, lane, what, view.copy, [(one, span) for one in targets], signals, size)


def _same_cta(group, lane, what, cta, signal) -> None:
    if signal.cta is not cta:
        group.fault(
            "barrier-remote",
            f"{what}: the mbarrier is of CTA {signal.cta.rank} and the destination of CTA {cta.rank}; both must be "
            "in one CTA",
            lane=lane,
        )


def _across(group, lane, target, source, size, mbarrier) -> None:
    what = f"cp.async.bulk of {size} bytes from shared memory to another CTA's"
    engine.multiple_of_16(group, size, "size", lane, what)
    cta, offset = engine.shared_span(group, target, size, 16, lane, what)
    own, start = engine.shared_span(group, source, size, 16, lane, what, own=True)
    signal = engine.signal(group, mbarrier, lane)
    _same_cta(group, lane, what, cta, signal)
    check_async_read(group, own, np.arange(start, start + size), what, lane)
    view = own.view(start, size)
    engine.load(group, lane, what, view.copy, [(cta, np.arange(offset, offset + size))], [signal], size)


def _store(group, instr, lane, target, source, size, extra) -> None:
    what = f"cp.async.bulk of {size} bytes from shared to global memory"
    engine.multiple_of_16(group, target, "global address", lane, what)
    engine.multiple_of_16(group, size, "size", lane, what)
    options = _optional(instr, extra, [("policy", "L2::cache_hint"), ("bytes", "cp_mask")])
    _, start = engine.shared_span(group, source, size, 16, lane, what, own=True)
    out = group.view("global", target, size, write=True)
    chosen = (options.get("bytes", 0xFFFF) >> (np.arange(size) % 16)) & 1 == 1

    def put(data):
        out[chosen] = data[chosen]

    engine.store(group, lane, what, np.arange(start, start + size), put)


@operation("cp.reduce.async.bulk")
def cp_reduce_async_bulk(group, instr, target, source, size, *extra) -> None:
    """`cp.reduce.async.bulk.{global|shared::cluster}.shared::cta….OP.TYPE [dst], [src], size{, [mb]};`"""
    name, kind = instr.parts[-2:] if instr.parts[-2] != "noftz" else (instr.parts[-3], instr.parts[-1])
    to_global = "global" in instr.parts
    for lane, at in lanes_of(group):
        n = at(size)
        what = f"cp.reduce.async.bulk.{name}.{kind} of {n} bytes"
        if not allowed(name, kind):
            group.fault("illegal-shape", f"{what}: there is no such reduction", lane=lane)
        engine.multiple_of_16(group, n, "size", lane, what)
        own, start = engine.shared_span(group, at(source), n, 16, lane, what, own=True)
        if to_global:
            engine.multiple_of_16(group, at(target), "global address", lane, what)
            out = group.view("global", at(target), n, write=True)

            def put(data, out=out):
                out[:] = reduce_bytes(name, kind, out, data)

            engine.store(group, lane, what, np.arange(start, start + n), put)
            continue
        check_async_read(group, own, np.arange(start, start + n), what, lane)
        view = own.view(start, n)
        cta, offset = engine.shared_span(group, at(target), n, 16, lane, what)
        signal = engine.signal(group, at(extra[0]), lane)
        _same_cta(group, lane, what, cta, signal)
        there = cta.view(offset, n, write=True)

        def fetch(view=view, there=there):
            return reduce_bytes(name, kind, there.copy(), view.copy())

        engine.load(group, lane, what, fetch, [(cta, np.arange(offset, offset + n))], [signal], n)


@operation("cp.async.bulk.commit_group")
def commit_group(group, instr) -> None:
    """`cp.async.bulk.commit_group;`"""
    engine.stores(group.cta).commit(group.threads[group.active])


@operation("cp.async.bulk.wait_group", parks=True)
def wait_group(group, instr, count) -> None:
    """`cp.async.bulk.wait_group{.read} N;`: at most N of the thread's latest groups unfinished."""
    reads = instr.has("read")
    events = engine.stores(group.cta).unfinished(group.threads[group.active], int(count), reads)
    if events:
        raise Wait(
            lambda: all(e.done for e in events),
            f"{len(events)} bulk stores to have {'read their source' if reads else 'been written'}",
        )
    threads = group.threads[group.active]
    limits = engine.stores(group.cta).committed[threads] - int(count)
    sources(group.cta).end(dict(zip(threads.tolist(), limits.tolist())))


@operation("cp.async.bulk.prefetch")
def prefetch(group, instr, source, size, *policy) -> None:
    """`cp.async.bulk.prefetch.L2.global [src], size;`: only a hint, but its operands have rules."""
    for lane, at in lanes_of(group):
        engine.multiple_of_16(group, at(source), "global address", lane, "cp.async.bulk.prefetch")
        engine.multiple_of_16(group, at(size), "size", lane, "cp.async.bulk.prefetch")


@operation("st.bulk")
def st_bulk(group, instr, address, size, value) -> None:
    """`st.bulk{.weak}{.shared::cta} [a], size, 0;`: fill shared memory, an ordinary (generic) store."""
    for lane, at in lanes_of(group):
        n = at(size)
        if at(value) != 0 or n % 8:
            group.fault("illegal-shape", f"st.bulk of {n} bytes of {at(value)}: whole 8 bytes of 0 only", lane=lane)
        cta, offset = engine.shared_span(group, at(address), n, 8, lane, "st.bulk", own=True)
        cta.view(offset, n, write=True)[:] = 0
        if cta.unfenced is not None and n:
            words = np.arange(offset, offset + n, 4)
            cta.unfenced.wrote(words, 4, np.full(len(words), group.threads[lane]))
