"""PTX as data: modules, functions, variables, instructions and their operands. `parse.py` makes them from text.

Registers and labels have unique names within a function: those declared in a nested `{ }` get a suffix.
Source: PTX ISA manual, "Syntax" and "State Spaces, Types, and Variables".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4,
    "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
    "e4m3": 1, "e5m2": 1, "f32x2": 8, "u128": 16, "s128": 16,
}  # fmt: skip
"""Bytes of each fundamental type."""

SPACES = (
    "global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry", "param::func",
)  # fmt: skip


@dataclass(frozen=True)
class Register:
    """A register; `type` as declared ("b32", "pred", …)."""

    name: str
    type: str


@dataclass(frozen=True)
class Negated:
    """`!%p`, or `-%r` where an instruction allows it."""

    value: Register


@dataclass(frozen=True)
class Immediate:
    """A constant. `kind` is "int", "f32" or "f64"; `bits` are those of a float written in hexadecimal."""

    value: int | float
    kind: str = "int"
    bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register: `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The name of a variable or function; `offset` bytes are added."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Vector:
    """`{a, b}`, or a list in parentheses of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; more operands inside the brackets (`[map, {c0, c1}]`) are in `more`."""

    base: Operand
    offset: int = 0
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """`d|p`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """`_`: no destination, or no source."""


Operand = Register | Negated | Immediate | Special | Symbol | Label | Vector | Address | Pair | Sink


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      opcode: with all its modifiers, as written.
      operands: all, destinations first.
      guard: predicate register and whether it is negated, or None.
      line: line of the PTX text; text: that instruction.
      loc: (file number, line) of the CUDA or Triton source, if told, and of an inlined function the line of the
        kernel that it comes from; see `Module.files`.
      key: the number of leading words of the opcode that name its operation.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str
    loc: tuple[int, ...] | None = None
    key: int = 1

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def tail(self) -> tuple[str, ...]:
        """Words of the opcode after those that name the operation."""
        return self.parts[self.key :]

    def has(self, *words: str) -> bool:
        """Whether the opcode has one of these words."""
        return any(word in self.parts for word in words)

    def space(self) -> str:
        """The first state space in the opcode; "generic" if it has none."""
        return next((p for p in self.parts if p in SPACES), "generic")

    def type(self) -> str:
        """The last type in the opcode."""
        return next((p for p in reversed(self.parts) if p in SIZES), "b32")


@dataclass(frozen=True)
class Variable:
    """A variable or parameter.

    Attributes:
      space: "global", "const", "shared", "local" or "param".
      size: bytes; 0 for an array with no length (dynamic shared memory).
      data: initial bytes, or empty.
      links: (byte, symbol, addend, generic, size) of addresses among the initial bytes.
      extern: declared `.extern`.
    """

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""
    links: tuple[tuple[int, str, int, bool, int], ...] = ()
    extern: bool = False
    type: str = "b8"


@dataclass
class Function:
    """A kernel (`entry`) or device function.

    Attributes:
      body: instructions and labels in order; None for a declaration.
      params, returns: parameters.
      variables: those declared inside.
      directives: `reqntid`, `maxntid`, `reqnctapercluster`, …, with their numbers.
      targets: lists of labels declared by `.branchtargets`, by name.
    """

    name: str
    entry: bool
    params: list[Variable]
    returns: list[Variable]
    body: list[Instruction | Label] | None = None
    variables: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    registers: dict[str, Register] = field(default_factory=dict)
    line: int = 0


@dataclass
class Module:
    """A module: functions and variables by name; `files` by the number that `.loc` uses."""

    version: str = ""
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    text: str = ""

    def source_line(self, instr: Instruction) -> str | None:
        """`file:line` of an instruction in the source that it was compiled from."""
        if instr.loc is None or instr.loc[1] == 0:
            return None
        file, line, *callers = instr.loc
        called = f" called at line {callers[0]}" if callers else ""
        return f"{self.files.get(file, f'file {file}')}:{line}{called}"
