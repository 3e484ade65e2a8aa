"""wgmma: warpgroup products that are issued, committed in groups and waited for.

A product is an event of the machine: with order "lazy" it reads its operands when a `wgmma.wait_group` asks for it, so
that shared memory refilled too early shows. Its registers hold tags until the wait, which then looks through the
warpgroup's registers and puts the results where the tags are. A use of registers in flight is found by
`wgmma_registers` before the program runs into it, and a product never waited for when the CTA ends.

A product whose accumulator was changed by other instructions needs a `wgmma.fence` since the last wait of its
warpgroup; registers that were only read do not show.

Sources: facts file 4.6; PTX manual, "Asynchronous wgmma instructions".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator import wgmma_registers
from palladion.emulator.descriptors import IllegalDescriptor, MatrixDescriptor, decode_wgmma
from palladion.emulator.faults import EmulationFault, UnknownInstruction
from palladion.emulator.numbers import FORMATS
from palladion.emulator.operands import Reader, readers
from palladion.emulator.proxies import check_async_read
from palladion.emulator.registry import operation
from palladion.emulator.warpgroup_product import Form, Product, check_operand, parse, read_tag

Array = np.ndarray


@dataclass
class Warpgroup:
    """What one warpgroup has under way.

    Attributes:
      products: in flight, by serial, each with the warpgroup's number within it.
      readers: of shared memory, by serial of the product.
      uncommitted, committed: (product, event) of those, in order; committed in groups.
      fenced: a wgmma.fence was executed since the last wait that retired something.
      last: results of the product retired last, to see whether they were changed.
    """

    products: dict[int, tuple[Product, int]] = field(default_factory=dict)
    readers: dict[int, list[Reader]] = field(default_factory=dict)
    uncommitted: list[tuple[Product, Any]] = field(default_factory=list)
    committed: deque[list[tuple[Product, Any]]] = field(default_factory=deque)
    fenced: bool = False
    last: Array | None = None


@dataclass
class Table:
    """All warpgroups of a CTA, and how many products it has issued."""

    warpgroups: dict[int, Warpgroup] = field(default_factory=dict)
    issued: int = 0


def _table(cta: Any) -> Table:
    def make() -> Table:
        made = Table()
        cta.on_exit.append(lambda ended: _check_exit(ended, made))
        return made

    return cta.slot("wgmma", make)


def _check_exit(cta: Any, table: Table) -> None:
    for number, warpgroup in table.warpgroups.items():
        for product, _ in warpgroup.products.values():
            raise EmulationFault(
                "wgmma-in-flight",
                f"warpgroup {number} of CTA {cta.id} ended without waiting for the wgmma at PTX line {product.line}",
                hint="Execute wgmma.commit_group and wgmma.wait_group 0 before the accumulator is used.",
            )


def _warpgroups(group: Any, instr: Any) -> list[Warpgroup]:
    if group.n % 128 or not group.active.all():
        group.fault("collective-mismatch", f"{instr.opcode} is not executed by all threads of a warpgroup together")
    table = _table(group.cta).warpgroups
    return [table.setdefault(int(first) // 4, Warpgroup()) for first in group.warps[::4]]


def _uniform(group: Any, values: Any, what: str) -> list[int]:
    """One value a warpgroup; all its lanes must agree."""
    rows = group.array(values).reshape(-1, 128)
    if (rows != rows[:, :1]).any():
        group.fault("collective-mismatch", f"{what} differs between the threads of a warpgroup")
    return [int(row[0]) for row in rows]


def _descriptors(
    group: Any, values: Any, what: str, mn_major: bool, rows: int, form: Form, read: list[list[Array]]
) -> list[MatrixDescriptor]:
    """The descriptors of an operand, one a warpgroup; `read[warpgroup]` gets the chunks that it covers."""
    out = []
    for number, raw in enumerate(_uniform(group, values, f"the descriptor of {what}")):
        try:
            found = decode_wgmma(raw)
            offsets = check_operand(group.cta.shared, found, mn_major, rows, form)
        except IllegalDescriptor as error:
            group.fault("illegal-shape", f"wgmma operand {what}: {error}", lane=128 * number)
            raise
        if group.cta.unfenced is not None:
            words = (offsets[:, None] + np.arange(0, 16, 4)).ravel()
            check_async_read(group, group.cta, words, f"wgmma operand {what}", lane=128 * number)
        read[number].append(offsets >> 4)
        out.append(found)
    return out


def _in_flight(states: list[Warpgroup], register: Array) -> tuple[Product, int] | None:
    """The product and the number of its register that a register is waiting for."""
    found = read_tag(int(register.view(np.uint32)[0]))
    if found is None or found[0] not in states[0].products:
        return None
    return states[0].products[found[0]][0], found[1]


def _accumulator(group: Any, states: list[Warpgroup], old: Any, lanes: int) -> Product | None:
    """The product in flight whose registers, all and in order, are the accumulator; None if it is none's."""
    tags = [_in_flight(states, register) for register in old]
    if not any(tags):
        return None
    first = tags[0][0] if tags[0] else None
    whole = first is not None and first.form.registers == len(old) and 128 * len(first.b) == lanes
    if not whole or any(tag is None or tag[0] is not first or tag[1] != i for i, tag in enumerate(tags)):
        line = next(tag[0].line for tag in tags if tag)
        group.fault(
            "wgmma-in-flight",
            f"the accumulator has registers that the wgmma at PTX line {line} still writes, and is not its accumulator",
        )
    return first


@operation("wgmma.mma_async", out=1, inout=True, collective="warpgroup")
def mma_async(group: Any, instr: Any, old: Any, a: Any, b: Any, scale_d: Any, *rest: int) -> Any:
    """wgmma.mma_async: D registers (N / 2, or N / 4 for f16), A descriptor or registers, B descriptor, scale-d."""
    form = parse(instr.opcode)
    if form is None:
        raise UnknownInstruction(f"{instr.opcode}: no such dense wgmma (sparse forms are not emulated)", group.place())
    wgmma_registers.check(group)
    states = _warpgroups(group, instr)
    in_registers = isinstance(a, (tuple, list))
    negative, a_mn, b_mn = _immediates(group, form, in_registers, rest)
    if len(old) != form.registers or (in_registers and len(a) != 4):
        group.fault("illegal-shape", f"{instr.opcode} takes {form.registers} registers of D and 4 of A in registers")
    before = _accumulator(group, states, old, group.n)
    kept = None if before is not None else [np.array(r) for r in old]
    if kept is not None:
        _check_fence(group, states, kept)
    table = _table(group.cta)
    table.issued += 1
    read: list[list[Array]] = [[] for _ in states]
    product = Product(
        form=form,
        serial=table.issued % (1 << 15),
        line=instr.line,
        shared=group.cta.shared,
        a=[np.array(r) for r in a] if in_registers else _descriptors(group, a, "A", a_mn, 64, form, read),
        b=_descriptors(group, b, "B", b_mn, form.n, form, read),
        accumulate=[bool(v) for v in _uniform(group, scale_d, "scale-d")],
        sign=-1 if negative else 1,
        a_mn_major=a_mn,
        b_mn_major=b_mn,
        before=before,
        old=kept,
    )
    after = tuple(event for state in states for _, event in state.uncommitted[-1:])
    event = group.machine.queue(product.finish, instr.opcode, group, after)
    for number, state in enumerate(states):
        state.products[product.serial] = (product, number)
        reading = readers(group.cta)
        what = f"the wgmma at PTX line {instr.line}"
        state.readers[product.serial] = [reading.begin(chunks, what) for chunks in read[number]]
        state.uncommitted.append((product, event))
    return product.tags()


def _check_fence(group: Any, states: list[Warpgroup], old: list[Array]) -> None:
    """Fault where the accumulator does not hold what the last product left, and no fence was executed since."""
    for number, state in enumerate(states):
        if state.fenced:
            continue
        now = np.stack([r.view(np.uint32)[128 * number : 128 * number + 128] for r in old])
        if state.last is None or not np.array_equal(now, state.last):
            group.fault(
                "missing-fence",
                "the accumulator's registers were written by other instructions, and no wgmma.fence follows",
                lane=128 * number,
                hint="Execute wgmma.fence.sync.aligned before the first wgmma after its registers were touched.",
            )


def _immediates(group: Any, form: Form, in_registers: bool, rest: tuple[int, ...]) -> tuple[bool, bool, bool]:
    """(negative product, A is MN-major, B is MN-major) from imm-scale-a, imm-scale-b and the transposes."""
    if FORMATS[form.a].kind != "float":
        return False, False, False
    values = [int(np.int64(v)) for v in rest]
    if values[0] not in (1, -1) or values[1] not in (1, -1):
        group.fault("illegal-shape", f"imm-scale-a and imm-scale-b are 1 or -1, not {values[0]} and {values[1]}")
    major = values[2:]
    b_mn = bool(major[-1]) if major else False
    a_mn = bool(major[0]) if len(major) == 2 and not in_registers else False
    return values[0] * values[1] < 0, a_mn, b_mn


@operation("wgmma.fence", collective="warpgroup")
def fence(group: Any, instr: Any) -> None:
    """wgmma.fence: orders register accesses (and generic accesses of shared memory) before the next wgmma."""
    for state in _warpgroups(group, instr):
        state.fenced = True


@operation("wgmma.commit_group", collective="warpgroup")
def commit_group(group: Any, instr: Any) -> None:
    """wgmma.commit_group: closes the set of products issued since the last one, possibly an empty set."""
    for state in _warpgroups(group, instr):
        state.committed.append(state.uncommitted)
        state.uncommitted = []


# It begins and ends a block of its own (`parks`), so that all registers are in the register file then.
@operation("wgmma.wait_group", parks=True, collective="warpgroup")
def wait_group(group: Any, instr: Any, pending: int) -> None:
    """wgmma.wait_group N: finishes all but the N latest groups."""
    for state, first in zip(_warpgroups(group, instr), group.warps[::4], strict=True):
        retired: dict[int, tuple[Product, int]] = {}
        while len(state.committed) > int(pending):
            for product, event in state.committed.popleft():
                group.machine.perform(event)
                retired[product.serial] = state.products.pop(product.serial)
                for reader in state.readers.pop(product.serial):
                    readers(group.cta).end(reader)
                state.fenced = False
                number = retired[product.serial][1]
                assert product.results is not None
                state.last = product.results[:, 128 * number : 128 * number + 128]
        if retired:
            _put(group, int(first) * 32, retired)


def _put(group: Any, thread: int, retired: dict[int, tuple[Product, int]]) -> None:
    """Replaces the tags of finished products in the registers of a warpgroup, wherever they were copied to."""
    for kind, register in zip(group.frame.code.slots, group.frame.registers, strict=True):
        if not kind.endswith("4"):
            continue
        words = register.view(np.uint32)
        found = read_tag(int(words[thread]))
        if found is not None and found[0] in retired:
            product, number = retired[found[0]]
            if found[1] < product.form.registers and product.results is not None:
                words[thread : thread + 128] = product.results[found[1], 128 * number : 128 * number + 128]
