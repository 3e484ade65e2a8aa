"""Machine code (SASS) as data: instructions with predicates, encodings and control codes, from nvdisasm's listing.

    code = instructions(disassemble(cubin))["softmax"]
    print(control_listing(code))              # --:-:1:-:2   /*0010*/ LDC R4, c[0x0][0x220] ;

Since Volta an instruction is 128 bits, of which 21 tell the scheduler what to do about hazards (Jia and others,
"Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018; the fields of Maxwell's control words):

    bits 105..108  stall: cycles before the next instruction
    bit  109       yield: 0 asks the scheduler to take another warp next
    bits 110..112  write barrier: set when the result is there; 7: none
    bits 113..115  read barrier: set when the operands have been read; 7: none
    bits 116..121  wait mask: barriers that must be clear before this one starts
    bits 122..125  reuse: operands to keep in the operand cache

They are written as maxas does: `wait mask : read : write : yield : stall`, barriers counted from 1, masks and stalls in
hexadecimal, `-` for none. `Y` is printed where bit 109 is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

from palladion.compiler.gpu.tools import run_tool

SIZE = 16  # bytes of an instruction


@dataclasses.dataclass(frozen=True)
class Control:
    """The scheduling fields of an instruction.

    Attributes:
      stall: cycles, 0 to 15. yields: whether bit 109 is 0.
      write, read: the barrier that it sets, 0 to 5, or None.
      wait: mask of barriers to wait for, bit 0 for barrier 0. reuse: mask of operand slots.
    """

    stall: int
    yields: bool
    write: int | None
    read: int | None
    wait: int
    reuse: int

    def __str__(self) -> str:
        mask = f"{self.wait:02x}" if self.wait else "--"
        read, write = ("-" if b is None else str(b + 1) for b in (self.read, self.write))
        return f"{mask}:{read}:{write}:{'Y' if self.yields else '-'}:{self.stall:x}"


def control_of(encoding: int) -> Control:
    """The scheduling fields of a 128-bit instruction."""

    def bits(low: int, count: int) -> int:
        return encoding >> low & (1 << count) - 1

    write, read = (None if b == 7 else b for b in (bits(110, 3), bits(113, 3)))
    return Control(bits(105, 4), not bits(109, 1), write, read, bits(116, 6), bits(122, 4))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      address: in bytes from the start of its section.
      predicate: "@!P0" or "".
      opcode: with its modifiers, "LDG.E.128".
      operands: as text, "R4, desc[UR8][R2.64]".
      encoding: all 128 bits.
      labels: that stand before it.
      target: the address that it may branch to, or None.
      line: of the CUDA source, or None; inside the kernel itself, for code of inlined functions.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    encoding: int
    labels: tuple[str, ...] = ()
    target: int | None = None
    line: int | None = None

    @property
    def base(self) -> str:
        """The opcode without modifiers: "LDG"."""
        return self.opcode.partition(".")[0]

    @property
    def control(self) -> Control:
        """Its scheduling fields."""
        return control_of(self.encoding)

    def __str__(self) -> str:
        words = (self.predicate, self.opcode, self.operands)
        return f"/*{self.address:04x}*/ {' '.join(filter(None, words))} ;"


@functools.lru_cache(16)
def disassemble(cubin: bytes, encodings: bool = True) -> str:
    """nvdisasm's listing of a cubin, with CUDA lines; with the encodings, too, if asked for.

    Raises: TargetNotBuilt: nvdisasm is not installed. RuntimeError: it is no cubin.
    """
    return run_tool("nvdisasm", ("-c", "-gi", *(("-hex",) if encodings else ())), cubin)


_SECTION = re.compile(r"^//-+ \.text\.(\S+)")
_LABEL = re.compile(r"^(\S+):\s*$")
_LINE = re.compile(r'^\s*//## File "[^"]*", line (\d+)(.*)$')
_INLINED = re.compile(r'inlined at "[^"]*", line (\d+)')
_TEXT = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<predicate>@!?\w+\s+)?(?P<opcode>[\w.]+)\s*(?P<operands>.*?)\s*;"
    r"(?:\s*/\* 0x(?P<low>[0-9a-f]+) \*/)?\s*$"
)
_HIGH = re.compile(r"^\s*/\* 0x([0-9a-f]+) \*/\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")


def instructions(listing: str) -> dict[str, tuple[Instruction, ...]]:
    """The instructions of each kernel in a listing with encodings.

    Raises: ValueError: a line that should be an instruction is none, or has no encoding.
    """
    found: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    labels: list[str] = []
    line: int | None = None
    for text in listing.splitlines():
        if match := _SECTION.match(text):
            code, labels, line = found.setdefault(match[1], []), [], None
        elif match := _HIGH.match(text):
            code[-1] = dataclasses.replace(code[-1], encoding=code[-1].encoding | int(match[1], 16) << 64)
        elif match := _TEXT.match(text):
            if match["low"] is None:
                raise ValueError("the listing has no encodings")
            words = ((match["predicate"] or "").strip(), match["opcode"], match["operands"])
            code.append(
                Instruction(int(match["address"], 16), *words, int(match["low"], 16), tuple(labels), None, line)
            )
            labels = []
        elif match := _LINE.match(text):
            line, last = int(match[1]), _INLINED.findall(match[2])
            # Code of an inlined function has a row for each call around it; the outermost comes last.
            line = int(last[-1]) if last else line
        elif match := _LABEL.match(text):
            labels.append(match[1])
        elif text.lstrip().startswith("/*0"):
            raise ValueError(f"not an instruction: {text.strip()}")
    return {name: _with_targets(code) for name, code in found.items()}


def _with_targets(code: Sequence[Instruction]) -> tuple[Instruction, ...]:
    places = {label: i.address for i in code for label in i.labels}

    def target(i: Instruction) -> int | None:
        match = _TARGET.search(i.operands)
        return places.get(match[1]) if match else None

    return tuple(dataclasses.replace(i, target=target(i)) for i in code)


def control_listing(code: Sequence[Instruction]) -> str:
    """Each instruction with its control code before it, labels on lines of their own."""
    lines = []
    for i in code:
        lines += [f"{label}:" for label in i.labels]
        lines.append(f"{i.control}   {i}")
    return "\n".join(lines)
