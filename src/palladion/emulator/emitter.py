"""Writing the Python of blocks: values, their types, operands and constants. This is what rules use.

Within a block a register is a local variable, kept in the type of its last use; what is the same for all lanes is a
NumPy scalar until somebody needs an array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator.ptx import (
    SIZES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)
from palladion.emulator.runtime import DTYPES, SPECIALS, Unreached

_CODES = {"f": "f", "u": "u", "s": "i", "b": "u"}


def code_of(kind: str) -> str:
    """The code of the NumPy type that holds a PTX type: "u4", "i8", "f2", "bf", "p" (bool), "x" (128 bits)."""
    if kind == "pred":
        return "p"
    if kind in ("b128", "u128", "s128"):
        return "x"
    if kind == "bf16":
        return "bf"
    if kind in ("f16x2", "bf16x2", "tf32", "e4m3", "e5m2", "f32x2"):
        return f"u{SIZES[kind]}"
    return f"{_CODES[kind[0]]}{SIZES[kind]}"


def size_of(code: str) -> int:
    """Bytes of an item."""
    return {"p": 1, "x": 16, "bf": 2}.get(code) or int(code[1])


@dataclass
class Value:
    """A local variable of generated code.

    Attributes:
      name: of the variable.
      code: its type, as `code_of` says.
      base: the number of the register whose stored array it may be a view of, or None.
      uniform: it is a NumPy scalar.
    """

    name: str
    code: str
    base: int | None = None
    uniform: bool = False
    views: dict[str, Value] = field(default_factory=dict)


class Emitter:
    """Writes the Python of one function; what rules use is documented here.

    Attributes:
      mask: the expression of the lanes that execute the instruction (None in Python: all).
    """

    def __init__(
        self,
        module: Module,
        function: Function,
        kept: dict[str, int],
        namespace: dict[str, Any],
        offsets: dict[str, int],
    ) -> None:
        self.module, self.function, self.kept, self.namespace, self.offsets = module, function, kept, namespace, offsets
        self.instrs: list[Instruction] = []
        self.constants: dict[Any, str] = {}
        self.count = 0
        self.mask = "m"
        self.guard_value: Value | None = None
        self.begin()

    def begin(self) -> None:
        """A new block."""
        self.lines: list[str] = []
        self.values: dict[str, Value] = {}
        self.written: set[str] = set()
        self.specials: dict[str, Value] = {}

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def let(self, expression: str, kind: str, uniform: bool = False, base: int | None = None) -> Value:
        """A new local variable of a PTX type (or type code)."""
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return Value(name, kind if kind in DTYPES else code_of(kind), base, uniform)

    def expression(self, text: str) -> str:
        """The same without a type, for what is not the value of a register."""
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def constant(self, value: Any) -> str:
        """The name of a Python object that the code refers to."""
        key = (type(value), value) if isinstance(value, (int, float, str, tuple)) else id(value)
        if isinstance(value, float):
            key = (float, str(value), np.float64(value).tobytes())
        if isinstance(value, np.generic):
            key = (value.dtype.str, value.tobytes())
        if key not in self.constants:
            name = f"k{len(self.constants)}"
            self.constants[key] = name
            self.namespace[name] = value
            self.namespace.setdefault("__keep__", []).append(value)
        return self.constants[key]

    def locate(self, instr: Instruction) -> int:
        """Note in the code which instruction is executed, for faults."""
        self.instrs.append(instr)
        self.lines.append(f"g.at = {len(self.instrs) - 1}")
        return len(self.instrs) - 1

    def guard(self, instr: Instruction) -> Value | None:
        if instr.guard is None:
            return None
        register, negated = instr.guard
        value = self.read(register)
        return self.let(f"~{value.name}", "p", value.uniform) if negated else value

    def read(self, register: Register) -> Value:
        """A register's value, in the type it has just now."""
        found = self.values.get(register.name)
        if found is None:
            code = code_of(register.type)
            slot = self.kept.get(register.name)
            if slot is None:
                found = self.let(f"{code.upper()}(0)" if code not in "px" else "P(0)", code, True)
            else:
                found = self.let(f"R[{slot}][s]", code, base=slot)
            self.values[register.name] = found
        return found

    def as_code(self, value: Value, code: str) -> Value:
        """A value in another type: the same bits if the size is the same, else the low bits or zero-extended."""
        if value.code == code:
            return value
        if code in value.views:
            return value.views[code]
        size, new = size_of(value.code), size_of(code)
        if value.code == "p" or code == "p":
            text, base = f"{value.name}.astype({code.upper()})", None
        elif "x" in (value.code, code):
            raise Unreached("a 128-bit register where another is expected")
        elif size == new:
            text, base = f"{value.name}.view({code.upper()})", value.base
        else:
            whole = self.as_code(value, f"u{size}") if value.code[0] in "fb" else value
            text, base = f"{whole.name}.astype(U{new})", None
            if code != f"u{new}":
                text += f".view({code.upper()})"
        result = self.let(text, code, value.uniform, base)
        value.views[code] = result
        return result

    def operand(self, operand: Operand, kind: str | None) -> Value:
        """The value of a source operand, as a PTX type; None: as it is declared."""
        code = None if kind is None else (kind if kind in DTYPES else code_of(kind))
        if isinstance(operand, Register):
            value = self.read(operand)
            return self.as_code(value, code or code_of(operand.type))
        if isinstance(operand, Immediate):
            return self.immediate(operand, code or "u4")
        if isinstance(operand, Special):
            value = self.special(operand.name)
            return value if code is None else self.as_code(value, code)
        if isinstance(operand, Symbol):
            value = self.symbol(operand)
            return value if code is None else self.as_code(value, code)
        if isinstance(operand, Negated):
            value = self.read(operand.value)
            if value.code == "p":
                return self.let(f"~{value.name}", "p", value.uniform)
            value = self.as_code(value, code or code_of(operand.value.type))
            return self.let(f"-{value.name}", value.code, value.uniform)
        raise Unreached("an operand of this kind")

    def src(self, instr: Instruction, number: int, kind: str) -> str:
        """The expression of a source operand as a PTX type."""
        return self.operand(instr.operands[number], kind).name

    def args(self, instr: Instruction, kind: str, first: int = 1) -> list[Value]:
        """All source operands as one type."""
        return [self.operand(o, kind) for o in instr.operands[first:]]

    def immediate(self, operand: Immediate, code: str) -> Value:
        dtype = DTYPES[code]
        if code == "p":
            value = np.bool_(operand.value != 0)
        elif operand.kind == "int":
            size = size_of(code)
            if code[0] == "f" and size >= 4:
                value = dtype(operand.value)
            elif code == "x":
                raise Unreached("a 128-bit constant")
            else:
                bits = int(operand.value) & ((1 << 8 * size) - 1)
                value = DTYPES[f"u{size}"](bits).view(dtype)
        elif code in ("f4", "f8"):
            value = dtype(operand.value)
            if operand.kind == ("f32" if code == "f4" else "f64"):
                value = (np.uint32 if code == "f4" else np.uint64)(operand.bits).view(dtype)
        else:
            value = DTYPES[f"u{size_of(code)}"](operand.bits & ((1 << 8 * size_of(code)) - 1)).view(dtype)
        return Value(self.constant(value), code, None, True)

    def special(self, name: str) -> Value:
        if name not in SPECIALS:
            raise Unreached(f"the special register {name}")
        code, text, uniform = SPECIALS[name]
        if name in self.specials:
            return self.specials[name]
        value = self.let(text, code, uniform)
        if "clock" not in name and "timer" not in name:
            self.specials[name] = value
        return value

    def symbol(self, symbol: Symbol) -> Value:
        """The address of a variable, in its own space."""
        if symbol.name in self.offsets:
            return self.let(f"U8(g.frame.base + {self.offsets[symbol.name] + symbol.offset})", "u8", True)
        name = self.constant(symbol.name)
        return self.let(f"U8(g.symbol({name}) + {symbol.offset})", "u8", True)

    def param_offset(self, name: str) -> int:
        """Byte of a kernel's parameter."""
        at = 0
        for p in self.function.params:
            at = -(-at // p.align) * p.align
            if p.name == name:
                return at
            at += p.size
        raise Unreached(f"the parameter {name}")

    def address(self, operand: Operand) -> Value:
        """An effective address: u4 or u8 as the base is."""
        if not isinstance(operand, Address):
            raise Unreached("an operand that is not an address")
        base = operand.base
        if isinstance(base, Symbol):
            return self.symbol(Symbol(base.name, base.offset + operand.offset))
        if isinstance(base, Immediate):
            return Value(self.constant(np.uint64(int(base.value) + operand.offset)), "u8", None, True)
        value = self.operand(base, None)
        if value.code[0] != "u":
            value = self.as_code(value, f"u{size_of(value.code)}")
        if not operand.offset:
            return value
        kind = DTYPES[value.code]
        offset = kind(operand.offset & ((1 << 8 * size_of(value.code)) - 1))
        return self.let(f"{value.name} + {self.constant(offset)}", value.code, value.uniform)

    def array(self, value: Value) -> str:
        """The expression of a value with one item a lane."""
        return f"full(g.n, {value.name})" if value.uniform else value.name

    def assign(self, operand: Operand, value: Value, guard: Value | None) -> None:
        """Give a destination register its new value."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise Unreached("a destination of this kind")
        code = code_of(operand.type)
        if size_of(value.code) != size_of(code) and value.code != "p":
            if value.code[0] == "i":  # sign-extended
                value = self.let(f"{value.name}.astype(I{size_of(code)})", f"i{size_of(code)}", value.uniform)
            else:
                value = self.as_code(value, f"u{size_of(code)}")
        if guard is not None:
            old = self.as_code(self.read(operand), value.code)
            uniform = value.uniform and old.uniform and guard.uniform
            value = self.let(f"where({guard.name}, {value.name}, {old.name})", value.code, uniform)
        self.values[operand.name] = value
        self.written.add(operand.name)
