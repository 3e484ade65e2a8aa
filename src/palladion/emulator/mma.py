"""mma.sync: one warp multiplies a 16 x K (or 8 x K) by a K x 8 matrix, all in registers.

Every warp of the group computes at once, as one batched matrix product. Sums are float32 (see `numbers`),
exact for integers, float64 for f64. Sparse forms (`mma.sp`), the Volta shape m8n8k4 of f16 and the
block-scaled kinds (sm_120) are not there. Sources: facts file 9.1; PTX manual, "mma".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from palladion.emulator.faults import UnknownInstruction
from palladion.emulator.matrices import accumulator, operand, registers_of
from palladion.emulator.numbers import FORMATS, to_s32
from palladion.emulator.registry import operation

Array = np.ndarray

# K that exist for each type of A, with 16 rows and with 8
DEPTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "f16": ((8, 16), ()),
    "bf16": ((8, 16), ()),
    "tf32": ((4, 8), ()),
    "e4m3": ((16, 32), ()),
    "e5m2": ((16, 32), ()),
    "s8": ((16, 32), (16,)),
    "u8": ((16, 32), (16,)),
    "s4": ((32, 64), (32,)),
    "u4": ((32, 64), (32,)),
    "b1": ((128, 256), (128,)),
    "f64": ((4, 8, 16), (4,)),
}
_SIMILAR = ({"f16"}, {"bf16"}, {"tf32"}, {"e4m3", "e5m2"}, {"s8", "u8"}, {"s4", "u4"}, {"b1"}, {"f64"})


@dataclass(frozen=True)
class Form:
    """What an opcode says: rows of A, K, the four types, saturation, and the operation of 1-bit products."""

    rows: int
    depth: int
    d: str
    a: str
    b: str
    c: str
    saturate: bool
    bit_operation: str


@cache
def parse(opcode: str) -> Form | None:
    """The form of an `mma.sync` opcode, or None where it is not one of those that are there."""
    parts = opcode.split(".")
    shape = next((m for p in parts if (m := re.fullmatch(r"m(8|16)n8k(\d+)", p))), None)
    if shape is None or parts[:3] != ["mma", "sync", "aligned"] or "row" not in parts or "col" not in parts:
        return None
    rest = [p for p in parts[parts.index("col") + 1 :] if p not in ("satfinite", "popc")]
    operation = next((p for p in rest if p in ("and", "xor")), "")
    types = [p for p in rest if p != operation]
    rows, depth = int(shape[1]), int(shape[2])
    if len(types) != 4 or types[1] not in DEPTHS or depth not in DEPTHS[types[1]][rows == 8]:
        return None
    if not any({types[1], types[2]} <= group for group in _SIMILAR):
        return None
    d, a, b, c = types
    return Form(rows, depth, d, a, b, c, "satfinite" in parts, operation)


def multiply(form: Form, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
    """D of `mma.sync`, register by register.

    Arguments: registers of A, B and C, arrays of one item a lane (whole warps, in order).
    Returns: D's registers: float32, float64 or int32 values, uint32 for pairs of f16.
    """
    kind = FORMATS[form.a].kind
    left = FORMATS[form.a].decode(operand(a, form.rows, form.depth, FORMATS[form.a].bits))
    right = FORMATS[form.b].decode(operand(b, 8, form.depth, FORMATS[form.b].bits))
    types = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}
    old = accumulator(c, form.rows, types[form.c])
    with np.errstate(over="ignore", invalid="ignore"):
        product = left @ right.transpose(0, 2, 1)
        if kind in ("int", "bit"):
            total = product.astype(np.int64)
            if form.bit_operation == "xor":  # ones of a ^ b = ones of a + ones of b - 2 ones of a & b
                ones = left.sum(2)[:, :, None] + right.sum(2)[:, None, :]
                total = ones.astype(np.int64) - 2 * total
            return registers_of(to_s32(total + old, form.saturate), form.rows, False)
        return registers_of(product + old, form.rows, form.d == "f16")


@operation("mma", out=1, collective="warp")
def mma_sync(group: Any, instr: Any, a: Any, b: Any, c: Any, *rest: Any) -> list[Array]:
    """mma.sync: D, A, B, C as vectors of registers (a single register may stand without braces)."""
    form = parse(instr.opcode)
    if form is None or rest:
        raise UnknownInstruction(f"{instr.opcode}: not one of the dense mma.sync shapes that are emulated")
    if not group.active.reshape(-1, 32).all(axis=1).all():
        group.fault("collective-mismatch", f"{instr.opcode} is not executed by all lanes of a warp")
    registers = [[group.array(r) for r in (v if isinstance(v, (tuple, list)) else (v,))] for v in (a, b, c)]
    return multiply(form, *registers)


from palladion.emulator import ldmatrix  # noqa: E402,F401  (registers its operations)
