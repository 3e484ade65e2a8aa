"""tcgen05.mma, cp, shift and commit: what one thread issues and the tensor core does in its own time.

Each issuing thread has a chain of events in the order of issue, as the hardware keeps these instructions in
order; a commit is an event at the chain's end that arrives on an mbarrier. With order "lazy" nothing of a
chain happens before somebody waits. At issue the descriptors are checked and the Tensor Memory and shared
memory concerned are compared with what other threads have open there.

Sources: facts file 8.2 to 8.11; PTX manual, "tcgen05.mma", "tcgen05.cp", "tcgen05.shift", "tcgen05.commit".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.emulator import ptx
from palladion.emulator.descriptors import IllegalDescriptor, MatrixDescriptor, decode_tcgen05, gather, tile_index
from palladion.emulator.faults import UnknownInstruction
from palladion.emulator.mbarrier import arrived, find
from palladion.emulator.numbers import FORMATS, slots
from palladion.emulator.operands import Reader, readers
from palladion.emulator.proxies import check_async_read
from palladion.emulator.registry import operation
from palladion.emulator.tcgen05 import Open, group_size, not_open, pair_of, refuse, state_of
from palladion.emulator.tcgen05_kinds import KINDS, Instruction, check_scale_ids, decode, scale_counts
from palladion.emulator.tcgen05_product import Job, perform
from palladion.emulator.tmem import COPIES, Region, TensorMemoryError, copy_in, shift_down, split

Array = np.ndarray


def _issuer(group: Any, instr: Any) -> int:
    """The one lane (index in the group) that issues. Several would each start an operation of their own."""
    lanes = group.active_indices()
    if len(lanes) != 1:
        group.fault(
            "collective-mismatch",
            f"{instr.opcode} is executed by {len(lanes)} threads; each would issue it: let one thread do it "
            "(elect.sync)",
            lane=int(lanes[0]),
        )
    return int(lanes[0])


def _at(group: Any, value: Any, lane: int) -> int:
    return int(group.array(value)[lane])


def _queue(group: Any, instr: Any, lane: int, run: Any) -> Any:
    """An event at the end of the issuing thread's chain."""
    chain = state_of(group.cta).chains.setdefault(int(group.threads[lane]), [])
    chain[:] = [event for event in chain[-1:] if not event.done]
    event = group.machine.queue(run, what=instr.opcode, group=group, after=tuple(chain))
    chain.append(event)
    return event


def _claim(
    group: Any, instr: Any, lane: int, reads: list[tuple[int, Region]], writes: list[tuple[int, Region]]
) -> list[tuple[Any, Region]]:
    """Checks regions (index of the CTA in the pair, region) against allocations and open accesses.

    Returns the written regions with their states; `_record` marks them open."""
    states = [state_of(cta) for cta in pair_of(group, instr)]
    issuer = (group.cta.rank, int(group.threads[lane]))
    for which, region in [*reads, *writes]:
        state = states[which]
        try:
            state.memory.check(region, instr.opcode)
        except TensorMemoryError as error:
            refuse(group, error, lane)
        not_open(group, state.stores, region, instr.opcode, "tcgen05.wait::st", lane)
        for entry in state.open_writes():
            if entry.issuer != issuer and entry.region.overlaps(region):
                group.fault(
                    "tmem-in-flight",
                    f"{instr.opcode} touches {region} while {entry.what} of thread {entry.issuer} (CTA rank, "
                    f"thread) may still write {entry.region}",
                    lane=lane,
                )
    for which, region in writes:
        not_open(group, states[which].loads, region, instr.opcode, "tcgen05.wait::ld", lane)
    return [(states[which], region) for which, region in writes]


def _record(group: Any, instr: Any, lane: int, claimed: list[tuple[Any, Region]], event: Any) -> None:
    issuer = (group.cta.rank, int(group.threads[lane]))
    name = f"{'.'.join(instr.parts[:2])} (PTX line {instr.line})"
    for state, region in claimed:
        state.writes.append(Open(region, name, -1, issuer, event))


class _Source:
    """Operands in shared memory of one operation: checked when made, known as being read until `over`."""

    def __init__(self, group: Any, instr: Any, lane: int) -> None:
        self.group, self.lane, self.ctas = group, lane, pair_of(group, instr)
        self.what = f"{'.'.join(instr.parts[:2])} at PTX line {instr.line}"
        self.chunks: list[tuple[Any, Array]] = []
        self.reading: list[tuple[Any, Reader]] = []

    def add(self, where: MatrixDescriptor, mn: bool, rows: int, depth: int, item: int, operand: str) -> None:
        """One operand, the same in all CTAs concerned; bounds and proxies. Raises IllegalDescriptor."""
        for cta in self.ctas:
            index, base = tile_index(cta.shared.size, where, mn, rows, depth, item)
            chunks = index.ravel() + base
            if cta.unfenced is not None:
                words = (chunks * 16)[:, None] + np.arange(0, 16, 4)
                check_async_read(self.group, cta, words.ravel(), operand, lane=self.lane)
            self.chunks.append((cta, chunks))

    def begin(self) -> None:
        self.reading = [(cta, readers(cta).begin(chunks, self.what)) for cta, chunks in self.chunks]

    def over(self) -> None:
        for cta, reader in self.reading:
            readers(cta).end(reader)


# ---- mma


def _operands(group: Any, instr: Any, lane: int, values: tuple[Any, ...]) -> dict[str, Any]:
    """Names for the operands, whose number depends on the form."""
    names = ["d", "a", "b"]
    if instr.has("sp"):
        names.append("metadata")
    names.append("id")
    if instr.has("block_scale"):
        names += ["scale_a", "scale_b"]
    given = dict(zip(names, values, strict=False))
    rest = list(values[len(names) :])
    if rest and isinstance(rest[0], (tuple, list)):
        given["disabled"] = tuple(_at(group, word, lane) for word in rest.pop(0))
    given["enable"] = rest.pop(0)
    if rest and instr.has("ws"):
        if _at(group, rest.pop(0), lane):
            raise UnknownInstruction(f"{instr.opcode} with a zero-column mask")
    elif rest:
        given["scale_d"] = int(rest.pop(0))
    for name in ("d", "a", "b", "metadata", "id", "enable", "scale_a", "scale_b"):
        if name in given:
            given[name] = _at(group, given[name], lane)
    return given


@operation("tcgen05.mma")
def mma(group: Any, instr: Any, *values: Any) -> None:
    """tcgen05.mma in its dense, sparse, block-scaled and .ws forms; `.ashift` is not there."""
    kind = next((p[6:] for p in instr.parts if p.startswith("kind::")), "")
    if kind not in KINDS or instr.has("ashift") or (instr.has("sp") and KINDS[kind].scaled):
        raise UnknownInstruction(f"{instr.opcode}: this form of tcgen05.mma is not emulated")
    lane = _issuer(group, instr)
    given = _operands(group, instr, lane, values)
    size = group_size(instr)
    try:
        found = decode(given["id"], kind, size, instr.has("sp"), instr.has("ws"))
        scales = 0
        if KINDS[kind].scaled:
            scales = scale_counts(kind, frozenset(instr.parts), given["id"])
            check_scale_ids(found, scales)
        in_memory = isinstance(instr.operands[1], ptx.Address)
        if in_memory and found.a_mn_major:
            raise IllegalDescriptor("A in Tensor Memory must be K-major")
        job = Job(
            instruction=found,
            group=size,
            ws=instr.has("ws"),
            d=given["d"],
            a=given["a"] if in_memory else decode_tcgen05(given["a"]),
            b=decode_tcgen05(given["b"]),
            accumulate=bool(given["enable"]),
            scale_a=given.get("scale_a", 0),
            scale_b=given.get("scale_b", 0),
            scales=scales,
            metadata=given.get("metadata", 0),
            disabled=given.get("disabled", ()),
            scale_d=given.get("scale_d", 0),
        )
        source = _source(group, instr, lane, job, found)
        claimed = _claim(group, instr, lane, job.input_regions(), job.output_regions())
    except IllegalDescriptor as error:
        group.fault("illegal-shape", f"tcgen05.mma: {error}", lane=lane)
        raise
    ctas = pair_of(group, instr)
    machine = group.machine

    def run() -> None:
        perform(job, [cta.shared for cta in ctas], [state_of(cta).memory for cta in ctas])
        source.over()
        machine.happened()

    source.begin()
    _record(group, instr, lane, claimed, _queue(group, instr, lane, run))


def _source(group: Any, instr: Any, lane: int, job: Job, i: Instruction) -> _Source:
    """The operands in shared memory. Raises IllegalDescriptor."""
    source = _Source(group, instr, lane)
    packed = i.kind.name in ("mxf4", "mxf4nvf4")
    operands: list[tuple[Any, str, str, bool, int, int]] = [(job.b, "B", i.b, i.b_mn_major, i.n // job.group, i.depth)]
    if isinstance(job.a, MatrixDescriptor):
        depth = i.depth // (2 if i.sparse else 1)
        operands.append((job.a, "A", i.a, i.a_mn_major, i.m // job.group, depth))
    for where, name, form, mn, rows, depth in operands:
        item = max(1, FORMATS[form].bits // 8)
        width = depth if mn else depth // 2 if packed else depth * item
        source.add(where, mn, rows, width, item, f"tcgen05.mma operand {name}")
    return source


# ---- cp, shift, commit


@operation("tcgen05.cp")
def cp(group: Any, instr: Any, address: Any, source: Any) -> None:
    """tcgen05.cp: rows of shared memory to Tensor Memory, in all shapes; 4- and 6-bit slots to bytes if asked for."""
    lane = _issuer(group, instr)
    shape = ".".join(p for p in instr.parts if p in _CP_WORDS)
    if shape not in COPIES:
        raise UnknownInstruction(f"{instr.opcode}: no such shape of tcgen05.cp")
    rows, width, blocks = COPIES[shape]
    bits = 6 if instr.has("b6x16_p32") else 4 if instr.has("b4x16_p64") else 0
    to = _at(group, address, lane)
    ctas = pair_of(group, instr)
    try:
        where = decode_tcgen05(_at(group, source, lane))
        read = _Source(group, instr, lane)
        read.add(where, False, rows, width, 1, "tcgen05.cp")
    except IllegalDescriptor as error:
        group.fault("illegal-shape", f"tcgen05.cp: {error}", lane=lane)
        raise
    first, column = split(to)
    regions = [Region(first + at, count, column, width // 4) for _, count, at in blocks]
    claimed = _claim(group, instr, lane, [], [(n, r) for n in range(len(ctas)) for r in regions])

    def run() -> None:
        for cta in ctas:
            raw = gather(cta.shared, where, False, rows, width, 1)
            if bits:  # containers: 4-bit codes in bits 5:2, 6-bit codes in bits 5:0
                raw = slots(raw, bits) << (2 if bits == 4 else 0)
            copy_in(state_of(cta).memory, to, shape, raw)
        read.over()
        machine.happened()

    machine = group.machine
    read.begin()
    _record(group, instr, lane, claimed, _queue(group, instr, lane, run))


_CP_WORDS = {word for shape in COPIES for word in shape.split(".")}


@operation("tcgen05.shift")
def shift(group: Any, instr: Any, address: Any) -> None:
    """tcgen05.shift.down: 32 bytes of each of the warp's rows one row down."""
    lane = _issuer(group, instr)
    to = _at(group, address, lane)
    first, column = split(to)
    if first % 32:
        group.fault("misaligned", f"tcgen05.shift at lane {first}; it must be a multiple of 32", lane=lane)
    ctas = pair_of(group, instr)
    region = Region(first, 32, column, 8)
    claimed = _claim(group, instr, lane, [], [(n, region) for n in range(len(ctas))])
    machine = group.machine

    def run() -> None:
        for cta in ctas:
            shift_down(state_of(cta).memory, to)
        machine.happened()

    _record(group, instr, lane, claimed, _queue(group, instr, lane, run))


@operation("tcgen05.commit")
def commit(group: Any, instr: Any, barrier: Any, ranks: Any = None) -> None:
    """tcgen05.commit: an arrival on one mbarrier, or one in each CTA of a mask, once the thread's chain is done."""
    addresses = group.array(barrier)
    for lane in group.active_indices():
        lane = int(lane)
        targets = [find(group, int(addresses[lane]), lane)]
        if ranks is not None:
            _, offset = group.locate_shared(int(addresses[lane]))
            mask = _at(group, ranks, lane) & 0xFFFF
            ctas = group.cta.cluster.ctas
            if mask >> len(ctas):
                group.fault("out-of-bounds", f"CTA mask {mask:#x} of a cluster of {len(ctas)}", lane=lane)
            chosen = [cta for cta in ctas if mask >> cta.rank & 1]
            targets = [find(group, cta.shared_address(offset), lane) for cta in chosen]

        def run(targets: list[Any] = targets) -> None:
            for cta, found in targets:
                arrived(cta, found)
            group.machine.happened()

        _queue(group, instr, lane, run)
