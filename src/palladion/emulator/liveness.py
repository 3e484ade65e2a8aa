"""Which registers an instruction reads and writes, and which of them are needed after each block."""

from __future__ import annotations

from palladion.emulator import flow, rules
from palladion.emulator.ptx import Address, Function, Instruction, Negated, Operand, Pair, Register, Vector
from palladion.emulator.registry import Operation, find_operation


def parts_of(instr: Instruction) -> tuple[Operation | None, rules.Rule | None, int]:
    """The operation or the rule of an instruction, and its number of destinations."""
    op, rule = find_operation(instr.parts), rules.find_rule(instr.parts)
    if op is not None and rule is not None:
        if len(rule.key) > len(op.key):
            op = None
        else:
            rule = None
    if op is not None:
        return op, None, op.outputs(instr)
    if rule is not None:
        return None, rule, rule.outputs(instr)
    return None, None, 0


def registers_in(operand: Operand) -> list[str]:
    """Names of the registers in an operand."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Negated):
        return [operand.value.name]
    if isinstance(operand, Vector):
        return [n for o in operand.items for n in registers_in(o)]
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    if isinstance(operand, Address):
        return registers_in(operand.base) + [n for o in operand.more for n in registers_in(o)]
    return []


def type_of(function: Function, name: str) -> str:
    """The type of a register; the carry flag "%cc" is declared nowhere."""
    return "pred" if name == "%cc" else function.registers[name].type


def uses(block: flow.Block) -> tuple[set[str], set[str]]:
    """Registers that a block reads before it writes them, and those that it writes for all its lanes."""
    reads: set[str] = set()
    writes: set[str] = set()
    for instr in block.body:
        op, _, out = parts_of(instr)
        sources = [n for o in instr.operands[out:] for n in registers_in(o)]
        targets = [n for o in instr.operands[:out] for n in registers_in(o)]
        if instr.name in ("addc", "subc", "madc"):
            sources.append("%cc")
        if instr.has("cc"):
            targets.append("%cc")
        if instr.guard is not None:
            sources.append(instr.guard[0].name)
        if instr.guard is not None or (op is not None and op.inout):
            sources += targets
        reads.update(n for n in sources if n not in writes)
        writes.update(targets)
    ending = []
    if block.guard is not None:
        ending.append(block.guard[0].name)
    if block.ends == "switch" and block.last is not None:
        ending += registers_in(block.last.operands[0])
    if block.ends == "call" and block.last is not None:
        ending += [n for o in block.last.operands for n in registers_in(o)]
    reads.update(n for n in ending if n not in writes)
    return reads, writes


def live_after(blocks: list[flow.Block], reads: list[set[str]], writes: list[set[str]]) -> list[set[str]]:
    """Registers that are still needed after each block."""
    live_in = [set(r) for r in reads]
    live_out: list[set[str]] = [set() for _ in blocks]
    before: list[list[int]] = [[] for _ in blocks]
    for b in blocks:
        for t in b.targets:
            before[t].append(b.index)
    work = [b.index for b in sorted(blocks, key=lambda b: b.position)]
    waiting = set(work)
    while work:
        k = work.pop()
        waiting.discard(k)
        out: set[str] = set().union(*(live_in[t] for t in blocks[k].targets))
        live_out[k] = out
        new = reads[k] | (out - writes[k])
        if new != live_in[k]:
            live_in[k] = new
            for p in before[k]:
                if p not in waiting:
                    waiting.add(p)
                    work.append(p)
    return live_out
