"""Rules of logic, shifts, and bit fields; with constant operands they become plain shifts and masks.

Source: PTX ISA manual, "Logic and Shift Instructions", "bfe", "bfi", "prmt", "popc", "clz", "bfind", "brev".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.emulator.emitter import Emitter, Value
from palladion.emulator.lane_types import DTYPES
from palladion.emulator.ptx import SIZES, Immediate, Instruction
from palladion.emulator.rules import rule
from palladion.emulator.rules_arithmetic import sources
from palladion.emulator.runtime import Unreached

_RAW = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}


def unsigned(kind: str) -> str:
    """The unsigned type of the same size."""
    return f"u{8 * SIZES[kind]}"


def constant(operand: Any) -> int | None:
    """The value of an integer that is known now."""
    return int(operand.value) if isinstance(operand, Immediate) and operand.kind == "int" else None


_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@rule("and", "or", "xor")
def _logic(e: Emitter, i: Instruction) -> Value:
    kind = "pred" if i.has("pred") else unsigned(i.type())
    (a, b), uniform = sources(e, i, kind)
    return e.let(f"{a} {_LOGIC[i.name]} {b}", kind, uniform)


@rule("not")
def _not(e: Emitter, i: Instruction) -> Value:
    kind = "pred" if i.has("pred") else unsigned(i.type())
    (a,), uniform = sources(e, i, kind)
    return e.let(f"~{a}", kind, uniform)


@rule("cnot")
def _cnot(e: Emitter, i: Instruction) -> Value:
    kind = unsigned(i.type())
    (a,), uniform = sources(e, i, kind)
    return e.let(f"({a} == 0).astype(U{SIZES[kind]})", kind, uniform)


@rule("shl", "shr")
def _shift(e: Emitter, i: Instruction) -> Value:
    kind = _RAW.get(i.type(), i.type())
    a, amount = e.operand(i.operands[1], kind), constant(i.operands[2])
    if amount is not None and 0 <= amount < 8 * SIZES[kind]:
        k = e.constant(np.dtype(DTYPES[kind]).type(amount))
        return e.let(f"{a.name} {'<<' if i.name == 'shl' else '>>'} {k}", kind, a.uniform)
    b = e.operand(i.operands[2], "u32")
    name = "shift_left" if i.name == "shl" else "shift_right"
    return e.let(f"I.{name}({a.name}, {b.name})", kind, a.uniform and b.uniform)


@rule("shf")
def _funnel(e: Emitter, i: Instruction) -> Value:
    (low, high, c), uniform = sources(e, i, "u32")
    amount = constant(i.operands[3])
    if amount is not None:
        amount = amount & 31 if i.has("wrap") else min(amount & 0xFFFFFFFF, 32)
        if not i.has("r"):
            amount = 32 - amount
        if 0 < amount < 32:
            return e.let(f"({high} << U4({32 - amount})) | ({low} >> U4({amount}))", "u32", uniform)
    return e.let(f"I.funnel({low}, {high}, {c}, {i.has('r')}, {i.has('wrap')})", "u32", uniform)


@rule("lop3")
def _lop3(e: Emitter, i: Instruction) -> Value:
    table = constant(i.operands[4])
    if i.has("BOOL") or table is None or i.has("and", "or", "xor"):
        raise Unreached("lop3 with a predicate")
    (a, b, c), uniform = sources(e, i, "u32", 1, 3)
    return e.let(f"I.lop3({a}, {b}, {c}, {table & 0xFF})", "u32", uniform)


_COUNTS = {"popc": "popcount", "clz": "leading_zeros", "brev": "reverse_bits"}


@rule("popc", "clz", "brev", "bfind")
def _count(e: Emitter, i: Instruction) -> Value:
    kind = _RAW.get(i.type(), i.type())
    (a,), uniform = sources(e, i, kind)
    if i.name == "bfind":
        return e.let(f"I.find_top({a}, {i.has('shiftamt')})", "u32", uniform)
    return e.let(f"I.{_COUNTS[i.name]}({a})", kind if i.name == "brev" else "u32", uniform)


@rule("bfe")
def _bfe(e: Emitter, i: Instruction) -> Value:
    kind = i.type()
    (a,), uniform = sources(e, i, kind, 1, 1)
    start, length = constant(i.operands[2]), constant(i.operands[3])
    bits, size = 8 * SIZES[kind], SIZES[kind]
    if start is not None and length is not None and 0 < length and 0 <= start and start + length <= bits:
        if kind[0] == "u":
            return e.let(f"({a} >> U{size}({start})) & U{size}({(1 << length) - 1})", kind, uniform)
        return e.let(f"({a} << I{size}({bits - start - length})) >> I{size}({bits - length})", kind, uniform)
    (b, c), both = sources(e, i, "u32", 2, 2)
    return e.let(f"I.extract({a}, {b}, {c})", kind, uniform and both)


@rule("bfi")
def _bfi(e: Emitter, i: Instruction) -> Value:
    kind = unsigned(i.type())
    (a, b), uniform = sources(e, i, kind, 1, 2)
    start, length = constant(i.operands[3]), constant(i.operands[4])
    bits, size = 8 * SIZES[kind], SIZES[kind]
    if start is not None and length is not None and 0 < length and 0 <= start and start + length <= bits:
        mask = ((1 << length) - 1) << start
        rest = ~mask & ((1 << bits) - 1)
        return e.let(f"(({a} << U{size}({start})) & U{size}({mask})) | ({b} & U{size}({rest}))", kind, uniform)
    (c, d), both = sources(e, i, "u32", 3, 2)
    return e.let(f"I.insert({a}, {b}, {c}, {d})", kind, uniform and both)


@rule("szext", "bmsk")
def _masks(e: Emitter, i: Instruction) -> Value:
    """`bmsk`: b bits from bit a on; `szext`: the low b bits with their sign or zeros."""
    wrap = i.has("wrap")
    if i.name == "bmsk":
        (a, b), uniform = sources(e, i, "u32")
        b = f"({b} & U4(31))" if wrap else f"np.minimum({b}, U4(255))"
        a = f"({a} & U4(31))" if wrap else f"np.minimum({a}, U4(255))"
        return e.let(f"I.insert(U4(0xFFFFFFFF) + {a} * U4(0), {a} * U4(0), {a}, {b})", "u32", uniform)
    kind = i.type()
    (a,), uniform = sources(e, i, kind, 1, 1)
    (b,), same = sources(e, i, "u32", 2, 1)
    b = f"({b} & U4(31))" if wrap else f"np.minimum({b}, U4(32))"
    return e.let(f"I.extract({a}, U4(0), {b})", kind, uniform and same)


@rule("prmt")
def _prmt(e: Emitter, i: Instruction) -> Value:
    (a, b, c), uniform = sources(e, i, "u32")
    mode = next((p for p in i.parts if p in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")), "")
    select = constant(i.operands[3])
    if mode or select is None or select & 0x8888:
        return e.let(f"I.permute({a}, {b}, {c}, {mode!r})", "u32", uniform)
    moves: dict[tuple[str, int], int] = {}  # (source, shift to the left in bits) -> mask of the result
    for k in range(4):
        chosen = select >> 4 * k & 7
        place = (a if chosen < 4 else b, 8 * (k - chosen % 4))
        moves[place] = moves.get(place, 0) | 0xFF << 8 * k
    terms = []
    for (name, shift), mask in moves.items():
        moved = name if shift == 0 else f"({name} << U4({shift}))" if shift > 0 else f"({name} >> U4({-shift}))"
        whole = 0xFFFFFFFF << shift & 0xFFFFFFFF if shift > 0 else 0xFFFFFFFF >> -shift
        terms.append(moved if mask == whole else f"({moved} & U4({mask:#x}))")
    return e.let(" | ".join(terms), "u32", uniform)
