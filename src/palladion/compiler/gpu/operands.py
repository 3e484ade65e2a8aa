"""Operands of matrix instructions in shared memory, as C++: the two words of their descriptors.

The words are made once, before the kernel's body (or where the thread asks for more registers): the high one, which
is constant, and the low one of the buffer's start. Where an instruction reads is added to that one. `once` hides from
the assembler that a word is constant, or where it comes from: it would make it anew for each instruction, instead of
keeping it in a register.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion.compiler.gpu import descriptors
from palladion.compiler.gpu.views import Term, View

_UNIT = 16  # bytes that a step of the low word is
_CODE = r"""// The low word of a matrix descriptor: where a matrix begins, in 16 bytes, and one of its strides.
__device__ __forceinline__ u32 matrix_start(const char* p, u32 stride) {
  return (shared_address(p) & 0x3ffff) >> 4 | stride;
}
__device__ __forceinline__ u64 matrix(u32 low, u32 high) { return (u64)high << 32 | low; }
// A number, the same in all lanes, that is not worked out again (what is added to it is zero, but nobody knows).
// Different lanes make different numbers of it, which would otherwise be found to be the same.
template <int lane> __device__ __forceinline__ u32 once(u32 x) {
  asm volatile(
      "{\n.reg .u32 zero, sum;\n"
      "mov.u32 zero, %%tid.x;\n"
      "shr.u32 zero, zero, 20;\n"
      "add.u32 sum, %1, zero;\n"
      "shfl.sync.idx.b32 %0, sum, %2, 31, 0xffffffff;\n}" : "=r"(x) : "r"(x), "n"(lane));
  return x;
}"""


@dataclasses.dataclass(frozen=True)
class Words:
    """The descriptors of an operand.

    Attributes: low: C++ of the low word of its beginning. high: C++ of the high word.
    """

    low: str
    high: str

    def at(self, offset: int) -> str:
        """C++ of the two words (as two arguments) of the part that begins `offset` bytes further."""
        return f"{self.low}{f' + {offset // _UNIT}' if offset else ''}, {self.high}"


def lies(unit: Any, name: str, view: View, k_axis: int, rows: int, depth: int) -> descriptors.Matrix:
    """How an operand lies in shared memory, see `descriptors.matrix`.

    Raises: NotImplementedError: as no instruction reads it.
    """
    try:
        return descriptors.matrix(view, k_axis, rows, depth)
    except descriptors.Misfit as misfit:
        raise unit.refuse(
            f"{name} of the product, a part of {view.ref.label} of shape {view.shape}, cannot be read by the tensor "
            f"core: {misfit}.",
            "store it with TilingTransform((8, swizzle bytes / element bytes)) and SwizzleTransform, and take whole "
            "tiles",
        ) from None


def declare(unit: Any) -> None:
    """Declare what makes matrix descriptors."""
    unit.function("matrix", _CODE)


def words(unit: Any, side: str, matrix: descriptors.Matrix, view: View) -> Words:
    """The descriptors of an operand; writes lines.

    Arguments:
      unit: the unit. side: "a" or "b": operands of one instruction have words of their own. matrix: how it lies.
      view: of which buffer.
    """
    declare(unit)
    high = _made_once(unit, side, f"{side}_high", f"{matrix.high(unit.arch)}u")
    if view.ref.moving:
        start = f"matrix_start({matrix.start()}, {matrix.low}u)"
        return Words(unit.scalar("uint32", start, f"{side}_matrix").text, high)
    start = _made_once(unit, side, f"{view.ref.base}_{side}", f"matrix_start({matrix.base}, {matrix.low}u)")
    parts = [start, *map(_moved, matrix.terms), *([str(matrix.offset // _UNIT)] if matrix.offset else [])]
    if len(parts) == 1:
        return Words(start, high)
    return Words(unit.scalar("uint32", " + ".join(parts), f"{side}_matrix").text, high)


def _moved(term: Term) -> str:
    """C++ for a run-time start, in steps of the low word."""
    if term.factor % _UNIT:
        return f"({term.text}) * {term.factor} / {_UNIT}"
    factor = term.factor // _UNIT
    return term.text if factor == 1 else f"{term.text} * {factor}"


def _made_once(unit: Any, side: str, wanted: str, text: str) -> str:
    """The name of a number that is made at the start of the kernel, or where its thread gets its registers."""
    place = anchor(unit.writer.lines)
    key = ("once", side, wanted, text, place)
    if key not in unit.tables.more:
        name = unit.tables.more[key] = unit.name(wanted)
        line = f"const u32 {name} = once<{int(side == 'b')}>({text});"
        if place is None:
            unit.tables.prologue.append(line)
        else:
            before = unit.writer.lines[place]
            indent = before[: len(before) - len(before.lstrip())]
            unit.writer.lines[place] = f"{before}\n{indent}{line}"
    return unit.tables.more[key]


def anchor(lines: list[str]) -> int | None:
    """The number of the line by which the running code got more registers; before it there are few for such numbers."""
    depth = 0
    for k in range(len(lines) - 1, -1, -1):
        line = lines[k].strip()
        if line.startswith("}"):
            depth += 1
        elif depth == 0 and "setmaxnreg.inc" in line:
            return k
        if line.endswith("{"):
            depth = max(depth - 1, 0)
    return None
