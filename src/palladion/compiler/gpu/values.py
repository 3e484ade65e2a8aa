"""What the names of a kernel's jaxpr stand for while it is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion.compiler.gpu.dtypes import Kind, kind
from palladion.compiler.gpu.fragments import Fragments


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number that all CUDA threads of a Pallas thread hold.

    Attributes:
      text: a C++ expression without side effects (a name, mostly). dtype: JAX's.
      value: the number, if it is known.
    """

    text: str
    dtype: Any
    value: Any = None

    shape = ()

    @property
    def kind(self) -> Kind:
        return kind(self.dtype)


@dataclasses.dataclass(frozen=True)
class Splat:
    """An array all of whose elements are one number.

    Attributes: text, dtype: as of `Scalar`; shape: of the array.
    """

    text: str
    dtype: Any
    shape: tuple[int, ...]
    value: Any = None

    @property
    def kind(self) -> Kind:
        return kind(self.dtype)


@dataclasses.dataclass(frozen=True)
class Fragment:
    """An array in registers.

    Attributes:
      name: of a C++ array. dtype: JAX's. layout: how the logical array lies.
      pick: which elements of the C++ array are its registers, in order; None: all of them.
    """

    name: str
    dtype: Any
    layout: Fragments
    pick: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def kind(self) -> Kind:
        return kind(self.dtype)

    def at_text(self, register: str) -> str:
        """`at`, of a register as `Unit.fill` names it: a loop variable or a number in decimal."""
        return self.at(int(register) if register.isdigit() else register)

    def at(self, register: str | int) -> str:
        """C++ for one register, by number or by the name of a loop variable."""
        if isinstance(register, int):
            return f"{self.name}[{register if self.pick is None else self.pick[register]}]"
        if self.pick is None:
            return f"{self.name}[{register}]"
        return f"{self.name}[{index_formula(self.pick, register)}]"


def index_formula(pick: tuple[int, ...], variable: str) -> str:
    """C++ for the function i -> pick[i], short where its value is a sum over the digits of i."""
    n = len(pick)
    if pick == tuple(range(n)):
        return variable
    if len(set(pick)) == 1:
        return str(pick[0])
    digits: list[tuple[int, int, int]] = []  # (weight of the digit in i, its size, what a step adds)
    weight, rest = 1, list(pick)
    while len(rest) > 1:
        step = rest[1] - rest[0]
        size = 1
        while size < len(rest) and rest[size] - rest[0] == step * size:
            size += 1
        while len(rest) % size:
            size -= 1
        if size == 1:
            break
        groups = [rest[k : k + size] for k in range(0, len(rest), size)]
        if any(g[j] - g[0] != step * j for g in groups for j in range(size)):
            size = 2 if len(rest) % 2 == 0 else 1
            groups = [rest[k : k + size] for k in range(0, len(rest), size)]
            if size == 1 or any(g[1] - g[0] != step for g in groups):
                break
        digits.append((weight, size, step))
        weight, rest = weight * size, [g[0] for g in groups]
    if len(rest) == 1:
        parts = [] if rest[0] == 0 else [str(rest[0])]
        for at, size, step in reversed(digits):
            if step == 0:
                continue
            text = variable if at == 1 else f"{variable} / {at}"
            text = text if at * size == n else f"{text} % {size}"
            parts.append(text if step == 1 else f"{text} * {step}" if step > 0 else f"{text} * ({step})")
        formula = " + ".join(parts) or "0"
        ok = all(_value(formula, variable, i) == p for i, p in enumerate(pick))
        if ok:
            return formula
    return f"pick<{', '.join(map(str, pick))}>({variable})"


def _value(formula: str, variable: str, i: int) -> int:
    return eval(formula.replace("/", "//"), {"__builtins__": {}}, {variable: i})


@dataclasses.dataclass(frozen=True)
class Rearranged:
    """An array made of another's elements, which has no layout yet: it takes that of what it meets.

    Attributes:
      base: the other array. shape: of this one.
      source: for each element of this one, in row-major order, the row-major number of the base's element.
    """

    base: Fragment
    shape: tuple[int, ...]
    source: Any

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def kind(self) -> Kind:
        return self.base.kind
