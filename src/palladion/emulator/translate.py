"""Basic blocks become Python functions over NumPy arrays, one array a register, one item a lane of the running group.

Within a block a register is a local variable, kept in the type of its last use; what a later block reads is stored
in the register file of the CTA at the end of the block, under the group's mask. So lane arithmetic costs one NumPy call
whatever the number of warps, and lanes that are not active are computed and thrown away. Values that are the same
for all lanes (constants, `%ctaid`, parameters) are NumPy scalars until they are stored.

The code is made once a function of a module. An instruction that nobody knows raises when it is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from palladion.emulator import flow, rules
from palladion.emulator.emitter import Emitter, Value, code_of
from palladion.emulator.liveness import live_after, parts_of, type_of, uses
from palladion.emulator.ptx import (
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from palladion.emulator.registry import Operation, find_operation
from palladion.emulator.runtime import NAMESPACE, Unreached


@dataclass
class Code:
    """A translated function.

    Attributes:
      blocks: of `flow`.
      run: for each block the Python function, called with the group.
      slots: type code of each register that is kept between blocks.
      source: the Python text, for reading.
    """

    function: Function
    blocks: list[flow.Block]
    run: list[Callable[[Any], Any]]
    slots: list[str]
    source: str
    instrs: list[Instruction]
    local_size: int
    locals: dict[str, int]


def translate(module: Module, function: Function) -> Code:
    """Translate a function; see the module's docstring."""
    blocks = flow.blocks_of(function, find_operation)
    reads = [uses(b)[0] for b in blocks]
    writes = [uses(b)[1] for b in blocks]
    live_out = live_after(blocks, reads, writes)
    # kept: what some block reads before it writes it, if another one writes it
    kept: dict[str, int] = {}
    for wanted in reads:
        for name in wanted:
            kept.setdefault(name, len(kept))
    offsets, at = _local_offsets(function)
    namespace = dict(NAMESPACE)
    namespace.update(rules.HELPERS)
    emitter = _Blocks(module, function, kept, namespace, offsets)
    text = [emitter.block(b, live_out[b.index]) for b in blocks]
    source = "\n".join(text)
    exec(compile(source, f"<PTX {function.name}>", "exec"), namespace)
    run = [namespace[f"block{b.index}"] for b in blocks]
    slots = [code_of(type_of(function, name)) for name in kept]
    return Code(function, blocks, run, slots, source, emitter.instrs, at, offsets)


def _local_offsets(function: Function) -> tuple[dict[str, int], int]:
    """Where in a frame of local memory a function's own variables are, and how big the frame is."""
    offsets, at = {}, 0
    own = [v for v in function.variables if v.space in ("local", "param")]
    if not function.entry:
        own = [*function.params, *function.returns, *own]
    for v in own:
        align = max(v.align, 4)
        at = -(-at // align) * align
        offsets[v.name] = at
        at += v.size
    return offsets, -(-at // 16) * 16


class _Blocks(Emitter):
    """Writes the blocks of one function."""

    def block(self, block: flow.Block, live: set[str]) -> str:
        """The Python function of a block."""
        self.begin()
        for instr in block.body:
            self.instruction(instr)
        ending = self.ending(block)
        self.store(live)
        self.lines.append(ending)
        head = [f"def block{block.index}(g):", " R = g.R; s = g.s; m = None if g.full else g.mask"]
        return "\n".join([*head, *(f" {line}" for line in self.lines), ""])

    def ending(self, block: flow.Block) -> str:
        if block.ends == "jump":
            return f"return {block.targets[0]}"
        if block.ends == "branch":
            assert block.guard is not None
            register, negated = block.guard
            taken, other = block.targets[::-1] if negated else block.targets
            p = self.read(register)
            if p.base is not None and p.base in [self.kept.get(n) for n in self.written]:
                p = self.let(f"{p.name}.copy()", "p")
            if p.uniform:
                return f"return {taken} if {p.name} else {other}"
            return f"return g.branch({p.name}, {taken}, {other})"
        assert block.last is not None or block.ends == "return"
        if block.last is not None:
            self.locate(block.last)
        if block.ends == "switch":
            assert block.last is not None
            index = self.src(block.last, 0, "u32")
            return f"return g.switch({index}, {tuple(block.targets)})"
        if block.ends == "call":
            return self.call(block)
        return {"exit": "return g.exit()", "return": "return g.leave()", "trap": "return g.trap()"}[block.ends]

    def call(self, block: flow.Block) -> str:
        """`call (returns), function, (arguments)`; the parentheses of either list may be absent."""
        assert block.last is not None
        operands = list(block.last.operands)
        returns = operands.pop(0) if isinstance(operands[0], Vector) else Vector(())
        callee = operands.pop(0)
        arguments = operands[0] if operands and isinstance(operands[0], Vector) else Vector(())
        place = [
            tuple(self.offsets.get(o.name) for o in v.items if isinstance(o, Symbol))
            for v in (returns, arguments)
            if isinstance(v, Vector)
        ]
        if isinstance(callee, Symbol):
            target = repr(callee.name)
        else:
            target = self.array(self.operand(callee, "u64"))
        return f"return g.call({block.index}, {target}, {place[0]}, {place[1]}, {block.targets[0]})"

    def instruction(self, instr: Instruction) -> None:
        op, rule, out = parts_of(instr)
        guard = self.guard_value = self.guard(instr)
        self.mask = "m" if guard is None else self.expression(f"both(m, {self.array(guard)})")
        if op is None and rule is None:
            self.locate(instr)
            self.lines.append(f"unknown(g, {self.mask})")
            return
        mark = len(self.lines)
        try:
            if op is not None:
                results = self.operation(op, instr, out, guard)
            else:
                assert rule is not None
                results = rule.write(self, instr)
        except (Unreached, KeyError, IndexError, AttributeError, ValueError) as error:
            del self.lines[mark:]
            self.values = {k: v for k, v in self.values.items() if _defined(v, self.lines)}
            self.locate(instr)
            why = str(error) if isinstance(error, Unreached) else f"{type(error).__name__}: {error}"
            self.lines.append(f"unknown(g, {self.mask}, {why!r})")
            return
        if results is None:
            results = []
        elif isinstance(results, Value):
            results = [results]
        for operand, value in zip(instr.operands[:out], results, strict=False):
            if isinstance(operand, Pair):
                raise AssertionError("a rule gives a value for each half of a pair")
            self.assign(operand, value, guard)

    def operation(self, op: Operation, instr: Instruction, out: int, guard: Value | None) -> list[Value]:
        instr = Instruction(
            instr.opcode, instr.operands, instr.guard, instr.line, instr.text, instr.loc, op.key.count(".") + 1
        )
        number = self.locate(instr)
        sources = instr.operands if op.inout else instr.operands[out:]
        values = [self.argument(o) for o in sources]
        self.lines.append(f"g.active = g.mask if {self.mask} is None else {self.mask}")
        call = f"{self.constant(op.run)}(g, {self.constant(instr)}{''.join(', ' + v for v in values)})"
        if self.mask != "m" and not op.may_park(instr):
            call = f"{call} if g.active.any() else None"
        if op.may_park(instr):
            call = f"{call} if g.resume is None else g.resumed()"
        if out == 0:
            self.lines.append(call)
            return []
        name = self.name()
        self.lines.append(f"{name} = {call}")
        targets: list[tuple[Register, str]] = []
        for k, operand in enumerate(instr.operands[:out]):
            source = name if out == 1 else f"{name}[{k}]"
            targets += self.targets(operand, source)
        old = {}
        if self.mask != "m" and not op.may_park(instr):
            old = {r.name: self.read(r).name for r, _ in targets}
        for register, source in targets:
            code = code_of(register.type)
            if old:
                value = self.let(
                    f"{old[register.name]} if {name} is None else taken({source}, {code.upper()}, g.n)", code
                )
            else:
                value = self.let(f"taken({source}, {code.upper()}, g.n)", code)
            self.assign(register, value, guard)
        del number
        return []

    def targets(self, operand: Operand, source: str) -> list[tuple[Register, str]]:
        """Registers of a destination operand, each with the expression of its result."""
        if isinstance(operand, Register):
            return [(operand, source)]
        if isinstance(operand, Vector):
            return [t for k, o in enumerate(operand.items) for t in self.targets(o, f"{source}[{k}]")]
        if isinstance(operand, Pair):
            return self.targets(operand.first, f"{source}[0]") + self.targets(operand.second, f"{source}[1]")
        return []

    def argument(self, operand: Operand) -> str:
        """An operand of an operation, as arrays."""
        if isinstance(operand, Immediate):
            return repr(operand.value) if operand.kind == "int" else self.constant(operand.value)
        if isinstance(operand, Sink):
            return "None"
        if isinstance(operand, Vector):
            return f"({''.join(self.argument(o) + ', ' for o in operand.items)})"
        if isinstance(operand, Address):
            base = self.array(self.address(operand))
            if operand.more:
                return f"({base}, {''.join(self.argument(o) + ', ' for o in operand.more)})"
            return base
        return self.array(self.operand(operand, None))

    def store(self, live: set[str]) -> None:
        """Keep what later blocks need."""
        out = [(self.kept[n], n) for n in sorted(self.written & live) if n in self.kept]
        if not out:
            return
        slots = {slot for slot, _ in out}
        found = []
        for slot, name in out:
            code = code_of(type_of(self.function, name))
            value = self.as_code(self.values[name], code)
            if value.base is not None and value.base in slots and value.base != slot:
                value = self.let(f"{value.name}.copy()", code)
            elif value.base == slot:
                continue
            found.append((slot, value.name))
        if not found:
            return
        self.lines.append("if m is None:")
        self.lines += [f" R[{slot}][s] = {name}" for slot, name in found]
        self.lines.append(f"else: keep(R, s, m, ({''.join(f'({slot}, {name}), ' for slot, name in found)}))")


def _defined(value: Value, lines: Sequence[str]) -> bool:
    return any(line.startswith(f"{value.name} = ") for line in lines)
