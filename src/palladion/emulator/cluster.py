"""Clusters: their barrier, addresses of other CTAs' shared memory, and asynchronous stores into it.

A shared address carries the CTA's rank in the cluster from bit 24 on; `mapa` replaces it. The cluster barrier
counts every thread of the cluster that has not exited: each arrives once a phase and waits before it arrives
again. Facts file, section 6.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator import engine
from palladion.emulator.mbarrier import Told
from palladion.emulator.operands import check_overwrite
from palladion.emulator.proxies import publish
from palladion.emulator.reductions import reduce_bytes
from palladion.emulator.registry import Wait, operation
from palladion.emulator.sources import sources

RANK_SHIFT = 24
"""Where a shared address has the rank of its CTA: four bits."""


@dataclass
class ClusterBarrier:
    """The hardware barrier of a cluster. `arrived`: of each CTA, by thread, the phase of its last arrival
    (-1: none); `waited`: likewise of its last wait."""

    ctas: list
    phase: int = 0
    arrived: dict = field(default_factory=dict)
    waited: dict = field(default_factory=dict)

    def __post_init__(self):
        for cta in self.ctas:
            self.arrived[cta.rank] = np.full(len(cta.live), -1, np.int64)
            self.waited[cta.rank] = np.full(len(cta.live), -1, np.int64)

    def advance(self) -> None:
        """End the phase if every thread that has not exited has arrived."""
        missing = any(((self.arrived[c.rank] < self.phase) & c.live).any() for c in self.ctas)
        if not missing and any((self.arrived[c.rank] == self.phase).any() for c in self.ctas):
            self.phase += 1

    def missing(self) -> str:
        """Who has not arrived, in words."""
        parts = []
        for cta in self.ctas:
            late = np.flatnonzero((self.arrived[cta.rank] < self.phase) & cta.live)
            if len(late):
                parts.append(f"{len(late)} threads of CTA {cta.rank} (first: thread {late[0]})")
        return ", ".join(parts)


def barrier_of(group) -> ClusterBarrier:
    """The cluster barrier of a group's cluster."""
    cluster = group.cluster
    return cluster.slot("barrier", lambda: ClusterBarrier(cluster.ctas))


@operation("barrier.cluster.arrive")
def arrive(group, instr) -> None:
    """`barrier.cluster.arrive{.release|.relaxed}{.aligned};`"""
    barrier, threads = barrier_of(group), group.threads[group.active]
    barrier.advance()
    arrived, waited = barrier.arrived[group.cta.rank], barrier.waited[group.cta.rank]
    twice = threads[arrived[threads] > waited[threads]]
    if len(twice):
        lane = int(np.flatnonzero(group.threads == twice[0])[0])
        group.fault(
            "barrier-arrivals",
            f"thread {twice[0]} arrives at the cluster barrier again without a barrier.cluster.wait in between",
            lane=lane,
        )
    if not instr.has("relaxed"):
        publish(group)
    if group.cta.unfenced is not None:
        group.cta.unfenced.passed_on(threads)
    arrived[threads] = barrier.phase
    barrier.advance()


@operation("barrier.cluster.wait", parks=True)
def wait(group, instr) -> None:
    """`barrier.cluster.wait{.acquire}{.aligned};`"""
    barrier, threads = barrier_of(group), group.threads[group.active]
    barrier.advance()
    arrived, waited = barrier.arrived[group.cta.rank], barrier.waited[group.cta.rank]
    early = threads[arrived[threads] <= waited[threads]]
    if len(early):
        lane = int(np.flatnonzero(group.threads == early[0])[0])
        group.fault(
            "collective-mismatch",
            f"thread {early[0]} waits at the cluster barrier without a barrier.cluster.arrive before it",
            lane=lane,
        )
    if (arrived[threads] >= barrier.phase).any():
        phase = barrier.phase

        def until():
            barrier.advance()
            return barrier.phase > phase

        reason: Any = Told(lambda: f"the cluster barrier, phase {phase}; not arrived: {barrier.missing()}")
        raise Wait(until, reason)
    waited[threads] = arrived[threads]


# ------------------------------------------------------------------------------------------------ addresses


@operation("mapa", out=1)
def mapa(group, instr, address, rank):
    """`mapa{.shared::cluster}.{u32|u64} d, a, rank;`: the same offset in CTA `rank`."""
    wide = group.array(address).astype(np.uint64)
    ranks = group.array(rank).astype(np.uint64)
    size = len(group.cluster.ctas)
    for lane in group.active_indices()[ranks[group.active] >= size][:1]:
        group.fault("out-of-bounds", f"mapa: rank {int(ranks[lane])} in a cluster of {size} CTAs", lane=int(lane))
    if group.active.any():
        group.locate_shared(int(wide[group.first_active()]))
    # Of a generic address the window's own bits stay.
    mapped = (wide & ~np.uint64(0xF << RANK_SHIFT)) | (ranks << np.uint64(RANK_SHIFT))
    return mapped.astype(np.uint32) if instr.type() == "u32" else mapped


@operation("getctarank", out=1)
def getctarank(group, instr, address):
    """`getctarank{.shared::cluster}.{u32|u64} r, a;`: the CTA that an address is of."""
    wide = group.array(address).astype(np.uint64)
    return ((wide >> np.uint64(RANK_SHIFT)) & np.uint64(0xF)).astype(np.uint32)


# ------------------------------------------------------------------------------------------------ asynchronous stores

_BYTES = {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


def _bytes_of(group, value, width: int) -> np.ndarray:
    """A register or vector of registers as bytes; uint8 (n, bytes)."""
    items = value if isinstance(value, tuple) else (value,)
    columns = []
    for item in items:
        array = np.ascontiguousarray(group.array(item, None if isinstance(item, np.ndarray) else f"u{width}"))
        columns.append(array.view(np.uint8).reshape(group.n, -1)[:, :width])
    return np.concatenate(columns, 1)


def _asynchronous(group, instr, address, value, mbarrier, combine) -> None:
    kind = instr.parts[-1]
    data = _bytes_of(group, value, _BYTES[kind])
    width = data.shape[1]
    what = f"{'.'.join(instr.parts[:2])} of {width} bytes"
    addresses, barriers = group.array(address), group.array(mbarrier)
    if len(group.cluster.ctas) < 2:
        group.fault("illegal-shape", f"{what}: defined only in a cluster of more than one CTA")
    plan = []
    for lane in group.active_indices().tolist():
        cta, offset = engine.shared_span(group, addresses[lane], width, width, lane, what)
        signal = engine.signal(group, int(barriers[lane]), lane)
        if signal.cta is not cta:
            group.fault("barrier-remote", f"{what}: the mbarrier and the destination are of different CTAs", lane=lane)
        if combine and cta is group.cta:
            group.fault("barrier-remote", f"{what}: the destination must be another CTA's", lane=lane)
        span = np.arange(offset, offset + width)
        check_overwrite(group, cta, span, what, lane)
        sources(cta).check(span, what)
        plan.append((cta, offset, signal, data[lane].copy()))

    def run():
        for cta, offset, signal, new in plan:
            there = cta.view(offset, width, write=True)
            there[:] = combine(there.copy(), new) if combine else new
            signal.send(width, what)

    group.machine.queue(run, what, group)


@operation("st.async")
def st_async(group, instr, address, value, mbarrier=None) -> None:
    """`st.async….shared::cluster.mbarrier::complete_tx::bytes{.v2|.v4}.TYPE [a], v, [mb];`"""
    if mbarrier is None:  # st.async.release.scope.global.TYPE [a], v: performed at once, which it may be
        group.write("global", address, _bytes_of(group, value, _BYTES[instr.parts[-1]]))
        return
    _asynchronous(group, instr, address, value, mbarrier, None)


@operation("red.async")
def red_async(group, instr, address, value, mbarrier=None) -> None:
    """`red.async.relaxed.cluster….OP.TYPE [a], v, [mb];`"""
    name, kind = instr.parts[-2], instr.parts[-1]

    def combine(old, new):
        return reduce_bytes(name, kind, old, new)

    if mbarrier is None:
        data = _bytes_of(group, value, _BYTES[kind])
        for lane in group.active_indices().tolist():
            there = group.view("global", int(group.array(address)[lane]), data.shape[1], data.shape[1], write=True)
            there[:] = combine(there.copy(), data[lane])
        return
    _asynchronous(group, instr, address, value, mbarrier, combine)
