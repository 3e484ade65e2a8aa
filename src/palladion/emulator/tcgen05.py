"""tcgen05: allocation of Tensor Memory, loads, stores, waits and fences, which whole warps execute.

What a single thread issues (mma, cp, shift, commit) is in `tcgen05_issue`. A load gives its registers at
once, as the hardware honours their use, and stays open until `tcgen05.wait::ld`; a store is an event that
`tcgen05.wait::st` performs. Every open access is remembered as a rectangle of Tensor Memory, and one that
meets another open access that it is not ordered with is a fault: "tmem-in-flight" where it reads or frees
what an mma, cp or shift may still write, "missing-wait" where a `wait::ld` or `wait::st` is missing.

With cta_group::2 both CTAs of a pair allocate; the n-th allocations of the two get the same columns.

Sources: facts file 8.1, 8.2, 8.9, 8.10; PTX manual, "tcgen05 instructions".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator import ptx
from palladion.emulator.faults import EmulationFault, UnknownInstruction
from palladion.emulator.registry import Wait, operation
from palladion.emulator.tmem import (
    MOVEMENTS,
    Region,
    TensorMemory,
    TensorMemoryError,
    load,
    movement_regions,
    split,
    store,
)

Array = np.ndarray


@dataclass
class Open:
    """An access that is not known to be over: what it touches, who made it and when."""

    region: Region
    what: str
    warp: int  # of loads and stores
    issuer: tuple[int, int] | None = None  # (CTA rank, thread) of mma, cp and shift
    event: Any = None

    @property
    def over(self) -> bool:
        return self.event is not None and self.event.done


@dataclass
class State:
    """Tensor Memory of a CTA and its open accesses."""

    memory: TensorMemory = field(default_factory=TensorMemory)
    loads: list[Open] = field(default_factory=list)
    stores: list[Open] = field(default_factory=list)
    writes: list[Open] = field(default_factory=list)  # by mma, cp and shift
    chains: dict[int, list[Any]] = field(default_factory=dict)  # thread -> events issued in order
    pairs_allocated: int = 0

    def open_writes(self) -> list[Open]:
        self.writes = [entry for entry in self.writes if not entry.over]
        return self.writes


def state_of(cta: Any) -> State:
    """The Tensor Memory state of a CTA, with the check for leaks at its end."""

    def make() -> State:
        made = State()
        cta.on_exit.append(lambda ended: _check_exit(ended, made))
        return made

    return cta.slot("tmem", make)


def _check_exit(cta: Any, state: State) -> None:
    leak = state.memory.leak()
    if leak:
        raise EmulationFault(
            "tmem-leak",
            f"CTA {cta.id} ended with Tensor Memory still allocated: {leak}",
            hint="Every tcgen05.alloc needs a tcgen05.dealloc of the same columns before the kernel ends.",
        )


def group_size(instr: Any) -> int:
    """1 or 2 from `.cta_group::N`."""
    return 2 if instr.has("cta_group::2") else 1


def pair_of(group: Any, instr: Any) -> list[Any]:
    """The CTAs an instruction concerns, even rank first: the executing one, or its pair."""
    if group_size(instr) == 1:
        return [group.cta]
    ctas = group.cta.cluster.ctas
    first = group.cta.rank & ~1
    if first + 1 >= len(ctas):
        group.fault("illegal-shape", f"{instr.opcode} needs a pair of CTAs; the cluster has {len(ctas)}")
    return [ctas[first], ctas[first + 1]]


def refuse(group: Any, error: TensorMemoryError, lane: int | None = None) -> None:
    group.fault(error.kind, str(error), lane=lane)


# ---- allocation


@operation("tcgen05.alloc", parks=True, collective="warp")
def alloc(group: Any, instr: Any, destination: Array, columns: Any) -> None:
    """tcgen05.alloc: columns of Tensor Memory; the address goes to shared memory. Waits until there are some."""
    count = int(group.array(columns)[0])
    state = state_of(group.cta)
    space = "shared" if instr.has("shared::cta") else "generic"
    for warp in range(len(group.warps)):
        lane = 32 * warp
        try:
            state.memory.check_allocate(count)
        except TensorMemoryError as error:
            refuse(group, error, lane)
        start = _pair_start(group, instr, state, count) if group_size(instr) == 2 else state.memory.find(count)
        if start is None:
            raise Wait(lambda: state.memory.find(count) is not None, f"tcgen05.alloc of {count} columns")
        address = np.array([state.memory.allocate(start, count)], np.uint32)
        only = np.zeros(group.n, bool)
        only[lane] = True
        data = np.broadcast_to(address.view(np.uint8), (group.n, 4))
        group.write(space, group.array(destination), data, mask=only)


def _pair_start(group: Any, instr: Any, state: State, count: int) -> int | None:
    """Where the pair's next allocation is: what the other CTA chose, or the first place free in both."""
    both = [state_of(cta).memory for cta in pair_of(group, instr)]
    log: list[tuple[int, int]] = group.cta.cluster.slot(("tmem-pair", group.cta.rank // 2), list)
    if state.pairs_allocated < len(log):
        start, size = log[state.pairs_allocated]
        if size != count:
            group.fault("collective-mismatch", f"the CTAs of a pair allocate {size} and {count} columns")
        if any(start < a + n and a < start + count for a, n in state.memory.allocations.items()):
            return None
    else:
        free = [s for s in range(0, 512, count) if all(_is_free(m, s, count) for m in both)]
        if not free:
            return None
        start = free[0]
        log.append((start, count))
    state.pairs_allocated += 1
    return start


def _is_free(memory: TensorMemory, start: int, count: int) -> bool:
    return all(start + count <= a or a + n <= start for a, n in memory.allocations.items())


@operation("tcgen05.dealloc", collective="warp")
def dealloc(group: Any, instr: Any, address: Any, columns: Any) -> None:
    """tcgen05.dealloc: gives back what one alloc gave, all of it."""
    pair_of(group, instr)
    state = state_of(group.cta)
    addresses, counts = group.array(address), group.array(columns)
    for warp in range(len(group.warps)):
        at, count = int(addresses[32 * warp]), int(counts[32 * warp])
        region = Region(0, 128, at & 0xFFFF, count)
        _not_being_written(group, state, region, instr.opcode, 32 * warp)
        try:
            state.memory.free(at, count)
        except TensorMemoryError as error:
            refuse(group, error, 32 * warp)
    group.machine.happened()


@operation("tcgen05.relinquish_alloc_permit", collective="warp")
def relinquish(group: Any, instr: Any) -> None:
    """tcgen05.relinquish_alloc_permit: this CTA allocates no more."""
    state_of(group.cta).memory.relinquished = True


# ---- loads and stores


def _shape(instr: Any) -> tuple[str, int, bool]:
    """(shape, repeats, packed) of a load or store."""
    shape = next((p for p in instr.parts if p in MOVEMENTS), None)
    repeats = next((int(p[1:]) for p in instr.parts if re.fullmatch(r"x\d+", p)), 0)
    if shape is None or not repeats or repeats > MOVEMENTS[shape].most or instr.has("red"):
        raise UnknownInstruction(f"{instr.opcode}: not a form of tcgen05.ld or .st that sm_100a has")
    return shape, repeats, instr.has("pack::16b") or instr.has("unpack::16b")


def _warp_addresses(group: Any, instr: Any, address: Any, shape: str) -> list[int]:
    """One address a warp, checked to be uniform and in the warp's own quarter of the lanes."""
    rows = group.array(address).reshape(-1, 32)
    out = []
    for warp, row in zip(group.warps, rows, strict=True):
        lane, at = 32 * len(out), int(row[0])
        if (row != row[0]).any():
            group.fault(
                "collective-mismatch", f"{instr.opcode}: the address differs between lanes of a warp", lane=lane
            )
        quarter = 32 * (int(warp) % 4)
        legal = (quarter,) if shape == "32x32b" else (quarter, quarter + 16)
        if split(at)[0] not in legal:
            group.fault(
                "out-of-bounds",
                f"{instr.opcode}: the address {at:#x} begins in lane {split(at)[0]}; warp {int(warp)} may use "
                f"lanes {quarter}..{quarter + 31} only",
                lane=lane,
            )
        out.append(at)
    return out


def _not_being_written(group: Any, state: State, region: Region, what: str, lane: int) -> None:
    for entry in state.open_writes():
        if entry.region.overlaps(region):
            group.fault(
                "tmem-in-flight",
                f"{what} touches {region} while {entry.what} may still write {entry.region}: wait for a "
                "tcgen05.commit on its mbarrier first",
                lane=lane,
            )


def not_open(group: Any, entries: list[Open], region: Region, what: str, wait: str, lane: int) -> None:
    """Fault where an access meets loads or stores that were not waited for."""
    for entry in entries:
        if entry.region.overlaps(region):
            group.fault(
                "missing-wait",
                f"{what} touches {region}, where warp {entry.warp}'s {entry.what} was not followed by {wait}",
                lane=lane,
            )


def _checked_regions(
    group: Any, instr: Any, state: State, shape: str, repeats: int, half: int, packed: bool, addresses: list[int]
) -> list[list[Region]]:
    out = []
    for number, at in enumerate(addresses):
        regions = movement_regions(shape, repeats, half, packed, at)
        for region in regions:
            try:
                state.memory.check(region, instr.opcode)
            except TensorMemoryError as error:
                refuse(group, error, 32 * number)
            _not_being_written(group, state, region, instr.opcode, 32 * number)
        out.append(regions)
    return out


@operation("tcgen05.ld", out=1, collective="warp")
def ld(group: Any, instr: Any, address: Any, half: int = 0) -> Any:
    """tcgen05.ld: registers from Tensor Memory; open until tcgen05.wait::ld."""
    shape, repeats, packed = _shape(instr)
    state = state_of(group.cta)
    addresses = _warp_addresses(group, instr, address, shape)
    regions = _checked_regions(group, instr, state, shape, repeats, int(half), packed, addresses)
    for warp, touched in zip(group.warps, regions, strict=True):
        for region in touched:
            not_open(group, state.stores, region, instr.opcode, "tcgen05.wait::st", 0)
            state.loads.append(Open(region, f"tcgen05.ld (PTX line {instr.line})", int(warp)))
    values = load(state.memory, addresses, shape, repeats, int(half), packed)
    rows = list(np.ascontiguousarray(values))
    return rows if isinstance(instr.operands[0], ptx.Vector) else rows[0]


@operation("tcgen05.st", collective="warp")
def st(group: Any, instr: Any, address: Any, *rest: Any) -> None:
    """tcgen05.st: registers to Tensor Memory, by tcgen05.wait::st at the latest."""
    shape, repeats, packed = _shape(instr)
    half = int(rest[0]) if len(rest) == 2 else 0
    registers = rest[-1] if isinstance(rest[-1], (tuple, list)) else (rest[-1],)
    state = state_of(group.cta)
    addresses = _warp_addresses(group, instr, address, shape)
    regions = _checked_regions(group, instr, state, shape, repeats, half, packed, addresses)
    values = np.stack([group.array(r).view(np.uint32) for r in registers])
    event = group.machine.queue(
        lambda: store(state.memory, addresses, shape, repeats, half, packed, values), what=instr.opcode, group=group
    )
    for warp, touched in zip(group.warps, regions, strict=True):
        for region in touched:
            not_open(
                group,
                [e for e in state.loads if e.warp == int(warp)],
                region,
                instr.opcode,
                "tcgen05.wait::ld",
                0,
            )
            state.stores.append(Open(region, f"tcgen05.st (PTX line {instr.line})", int(warp), event=event))


@operation("tcgen05.wait::ld", collective="warp")
def wait_ld(group: Any, instr: Any) -> None:
    """tcgen05.wait::ld: this warp's loads are over."""
    state = state_of(group.cta)
    warps = {int(w) for w in group.warps}
    state.loads = [entry for entry in state.loads if entry.warp not in warps]


@operation("tcgen05.wait::st", collective="warp")
def wait_st(group: Any, instr: Any) -> None:
    """tcgen05.wait::st: this warp's stores are over."""
    state = state_of(group.cta)
    warps = {int(w) for w in group.warps}
    for entry in state.stores:
        if entry.warp in warps:
            group.machine.perform(entry.event)
    state.stores = [entry for entry in state.stores if entry.warp not in warps]


@operation("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(group: Any, instr: Any) -> None:
    """The fences around a thread synchronisation: nothing to do, as the machine performs nothing out of turn."""


from palladion.emulator import tcgen05_issue  # noqa: E402,F401  (registers the other half)
