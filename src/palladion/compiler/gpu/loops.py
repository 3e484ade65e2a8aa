"""Basic blocks and loops of machine code, and what the main loop is made of: the measure of a kernel's quality.

A loop is a natural one (Aho and others, "Compilers", 9.6): a branch back to a block that dominates it, and what leads
to that branch. Code that the assembler moved out of line, such as the second try of a wait, so belongs to the loop that
it returns to. A loop's `own` instructions are those that are in no loop inside it: of a matrix product's main loop
without the spinning of its waits, and without the branches back from there.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from palladion.compiler.gpu.sass import SIZE, Instruction

# Matrix products: HGMMA (wgmma), UTCHMMA (tcgen05), HMMA (mma.sync) and their kin of other types.
_TENSOR = re.compile(r"[A-Z]GMMA|UTC[A-Z]+MMA|[A-Z]MMA")
_ENDS = ("EXIT", "RET", "KILL", "RTT", "BPT")  # nothing comes after, unless under a predicate
_KINDS = (  # of an instruction, by the name without modifiers; the first that fits
    ("tensor", _TENSOR),
    ("TMA", re.compile(r"UTMA\w+|UBLK\w+|UTMACMDFLUSH")),
    ("barrier", re.compile(r"SYNCS|BAR|UCGABAR_\w+|WARPSYNC|DEPBAR|WARPGROUP|MEMBAR|FENCE|UTCBAR|LDGDEPBAR|ERRBAR")),
    ("tensor memory", re.compile(r"UTC\w+|LDTM|STTM")),
    ("spill", re.compile(r"LDL|STL")),
    ("shared memory", re.compile(r"LDS\w*|STS\w*|ATOMS\w*|STAS|REDAS")),
    ("global memory", re.compile(r"LDG\w*|STG|RED\w*|ATOM\w*|LD|ST|CCTL\w*")),
    ("shuffle", re.compile(r"SHFL|VOTE\w*|MATCH|REDUX|CREDUX|ELECT|R2UR|MOVM")),
    ("branch", re.compile(r"BRA|BRX|JMP|JMX|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BREAKA|YIELD|NANOSLEEP")),
    ("convert", re.compile(r"[FI]2\w+|FRND")),
    ("float", re.compile(r"F(?!LO)[A-Z]+\d*|H[A-Z]+\d*|MUFU|D[A-Z]+\d*")),
    ("uniform", re.compile(r"U[A-Z]\w*|S2UR")),
)


def is_tensor(i: Instruction) -> bool:
    """Whether it is a matrix product; the empty ones that the assembler adds as a fence are not."""
    return _TENSOR.fullmatch(i.base) is not None and "gdesc[URZ]" not in i.operands


def kind_of(i: Instruction) -> str:
    """What sort of instruction it is: "tensor", "shared memory", …; "integer" for the rest."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(i.base)), "integer")


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block.

    Attributes: instructions: in order. successors: numbers of the blocks that may come next.
    """

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


def basic_blocks(code: Sequence[Instruction]) -> tuple[Block, ...]:
    """The basic blocks of a kernel, in order of their addresses.

    An indirect branch may lead to any label; the code here has them for tables of `switch` only.
    """
    if not code:
        return ()
    # BSSY and LEPC name a place without going there.
    jumps = {i.address: i for i in code if i.target is not None and i.base in ("BRA", "CALL", "JMP", "BRX", "BREAK")}
    starts = {code[0].address, *(i.target for i in jumps.values()), *(i.address for i in code if i.labels)}
    starts |= {i.address + SIZE for i in code if i.base in ("BRA", "BRX", "JMP", "JMX", *_ENDS)}
    order = sorted(i.address for i in code if i.address in starts)
    number = {address: n for n, address in enumerate(order)}
    parts: list[list[Instruction]] = [[] for _ in order]
    at = 0
    for i in code:
        at = number.get(i.address, at)
        parts[at].append(i)
    labelled = [n for n, part in enumerate(parts) if part[0].labels]

    def successors(n: int) -> tuple[int, ...]:
        last = parts[n][-1]
        after = [n + 1] if n + 1 < len(parts) else []
        if last.base in ("BRX", "JMX"):
            return tuple(labelled)
        if last.base in ("BRA", "JMP"):
            to = [number[last.target]] if last.target in number else []
            return tuple(dict.fromkeys(to + (after if _conditional(last) else [])))
        return tuple(after) if last.base not in _ENDS or last.predicate else ()

    return tuple(Block(tuple(part), successors(n)) for n, part in enumerate(parts))


def _conditional(i: Instruction) -> bool:
    """`@P0 BRA`, and the forms with a condition among the operands: `BRA.U UP0, …`, `BRA.DIV UR4, …`."""
    return bool(i.predicate and i.predicate not in ("@PT", "@UPT")) or "," in i.operands


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
      head: the address that it returns to.
      blocks: numbers of its blocks, of loops inside it too.
      own: its instructions that are in no loop inside it and do not only lead back from one, by address.
      depth: 1 for a loop that is in no other.
    """

    head: int
    blocks: frozenset[int]
    own: tuple[Instruction, ...]
    depth: int

    @functools.cached_property
    def mix(self) -> Mapping[str, int]:
        """How many `own` instructions there are of each opcode (without modifiers), most frequent first."""
        return dict(collections.Counter(i.base for i in self.own).most_common())

    @functools.cached_property
    def kinds(self) -> Mapping[str, int]:
        """The same by kind: "tensor", "shared memory", …"""
        return dict(collections.Counter(kind_of(i) for i in self.own).most_common())

    @property
    def tensor(self) -> int:
        """How many of them are matrix products."""
        return sum(map(is_tensor, self.own))

    @property
    def line(self) -> int | None:
        """The CUDA line that most of them come from."""
        lines = collections.Counter(i.line for i in self.own if i.line is not None)
        return lines.most_common(1)[0][0] if lines else None


def find_loops(code: Sequence[Instruction]) -> tuple[Loop, ...]:
    """The loops of a kernel, by address; the trap of an endless branch to itself at its end is none."""
    blocks = basic_blocks(code)
    dominators = _dominators(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        for s in block.successors:
            before[s].append(n)
    bodies: dict[int, set[int]] = {}
    for n, block in enumerate(blocks):
        for head in block.successors:
            if n in dominators and head in dominators[n]:
                body = bodies.setdefault(head, {head})
                rest = [n]
                while rest:
                    b = rest.pop()
                    if b not in body:
                        body.add(b)
                        rest += [p for p in before[b] if p in dominators]
    loops = []
    for head, body in sorted(bodies.items()):
        inside = set().union(*(b for h, b in bodies.items() if h != head and b < body))
        back = {n for n in body - inside if _only_branches(blocks[n]) and before[n] and inside.issuperset(before[n])}
        own = tuple(i for n in sorted(body - inside - back) for i in blocks[n].instructions)
        depth = sum(head in b for b in bodies.values())
        loops.append(Loop(blocks[head].instructions[0].address, frozenset(body), own, depth))
    return tuple(loops)


def _only_branches(block: Block) -> bool:
    return len(block.instructions) == 1 and len(block.successors) == 1 and block.instructions[0].base == "BRA"


def _dominators(blocks: Sequence[Block]) -> dict[int, set[int]]:
    """For each block that can be reached, those that every way to it passes."""
    order: list[int] = []
    seen = {0} if blocks else set()
    rest = [(0, iter(blocks[0].successors))] if blocks else []
    while rest:
        n, successors = rest[-1]
        following = next((s for s in successors if s not in seen), None)
        if following is None:
            order.append(n)
            rest.pop()
        else:
            seen.add(following)
            rest.append((following, iter(blocks[following].successors)))
    order.reverse()
    before: dict[int, list[int]] = {n: [] for n in order}
    for n in order:
        for s in blocks[n].successors:
            before[s].append(n)
    found = {n: set(order) for n in order}
    if order:
        found[0] = {0}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            new = set.intersection(*(found[p] for p in before[n])) | {n}
            if new != found[n]:
                found[n], changed = new, True
    return found


def main_loop(code: Sequence[Instruction]) -> Loop | None:
    """The loop where a kernel's time goes: with the most matrix products of its own, else the one with the most
    instructions of its own; None where there is none that does more than wait."""
    working = (loop for loop in find_loops(code) if not loop.kinds.keys() <= {"barrier", "branch"})
    return max(working, key=lambda loop: (loop.tensor, len(loop.own)), default=None)


def reallocations(code: Sequence[Instruction]) -> tuple[int, ...]:
    """The register counts that `setmaxnreg` asks for, in order of the code."""
    found = (re.search(r"0x([0-9a-f]+)\s*$", i.operands) for i in code if i.base == "USETMAXREG")
    return tuple(int(match[1], 16) for match in found if match)
