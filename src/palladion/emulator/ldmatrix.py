"""ldmatrix, stmatrix and movmatrix: tiles between shared memory, one 16-byte row an address, and a warp's registers.

With g = lane / 4 and q = lane % 4, the 32-bit register of a tile holds

    m8n8 .b16              elements (row g, columns 2q and 2q + 1), of the tile or, `.trans`, of its transpose
    m16n16 .trans .b8      two registers r = 0, 1: rows 4q .. 4q + 3 of column g + 8 r
    m8n16 .b8x16           columns 4q .. 4q + 3 of row g
    stmatrix m16n8 .b8     the tile's (row g + 8 (e / 2), column 2q + e % 2) as byte e; stored transposed

Forms with `.b4x16_p64` and `.b6x16_p32` unpack padded 16-byte rows to one code a byte, in its low bits. The maps of the
8-bit forms come from published kernels that use them, as the manual has them in figures only.
Sources: facts file 9.2; PTX manual, "ldmatrix", "stmatrix", "movmatrix".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.emulator import ptx
from palladion.emulator.faults import UnknownInstruction
from palladion.emulator.matrices import matrix_rows_to_registers, registers_to_matrix_rows, transpose_fragment
from palladion.emulator.numbers import slots
from palladion.emulator.registry import operation

Array = np.ndarray


def _count(group: Any, instr: Any) -> int:
    """The number of tiles; all lanes of a warp must be there."""
    if not group.active.all():
        group.fault("collective-mismatch", f"{instr.opcode} is not executed by all lanes of a warp")
    return next((int(p[1:]) for p in instr.parts if p in ("x1", "x2", "x4")), 0)


def _unknown(group: Any, instr: Any) -> UnknownInstruction:
    return UnknownInstruction(f"{instr.opcode}: no such matrix form", group.place())


def _space(instr: Any) -> str:
    return "shared" if instr.space().startswith("shared") else "generic"


def _rows(group: Any, instr: Any, address: Any, count: int) -> Array:
    """(warps, count, 16) bytes of the rows whose addresses the first `count` lanes of each warp have."""
    mask = (np.arange(group.n) % 32) < count
    rows = group.read(_space(instr), group.array(address), 16, mask=mask, align=16).reshape(-1, 32, 16)[:, :count]
    bits = 4 if instr.has("b4x16_p64") else 6 if instr.has("b6x16_p32") else 0
    rows = np.ascontiguousarray(rows)
    return slots(rows, bits) if bits else rows


@operation("ldmatrix", out=1, collective="warp")
def ldmatrix(group: Any, instr: Any, address: Any) -> Any:
    """ldmatrix.sync.aligned.SHAPE.xN{.trans}.shared.TYPE {r...}, [row]; rows are 16 bytes, 16-byte aligned."""
    count, transposed = _count(group, instr), instr.has("trans")
    narrow = instr.has("b8x16") and instr.has("b4x16_p64", "b6x16_p32")
    if instr.has("m8n8") and instr.has("b16") and count:
        tiles = _rows(group, instr, address, 8 * count).reshape(-1, 8, 16)
        registers = matrix_rows_to_registers(tiles, transposed).reshape(-1, count, 32)
    elif instr.has("m8n16") and narrow and count and not transposed:
        tiles = _rows(group, instr, address, 8 * count).reshape(-1, 8, 16)
        registers = matrix_rows_to_registers(tiles, False).reshape(-1, count, 32)
    elif instr.has("m16n16") and (narrow or instr.has("b8")) and count in (1, 2) and transposed:
        tiles = _rows(group, instr, address, 16 * count).reshape(-1, count, 4, 4, 2, 8)  # tile, q, e, r, g
        words = np.ascontiguousarray(tiles.transpose(0, 1, 4, 5, 2, 3)).view(np.uint32)
        registers = words.reshape(-1, 2 * count, 32)
    else:
        raise _unknown(group, instr)
    out = [np.ascontiguousarray(registers[:, j]).reshape(-1) for j in range(registers.shape[1])]
    return out if isinstance(instr.operands[0], ptx.Vector) else out[0]


@operation("stmatrix", collective="warp")
def stmatrix(group: Any, instr: Any, address: Any, values: Any) -> None:
    """stmatrix.sync.aligned.SHAPE.xN{.trans}.shared.TYPE [row], {r...}."""
    count, transposed = _count(group, instr), instr.has("trans")
    parts = values if isinstance(values, (tuple, list)) else (values,)
    registers = np.stack([group.array(r).view(np.uint32).reshape(-1, 32) for r in parts], axis=1)
    if len(parts) != count:
        raise _unknown(group, instr)
    if instr.has("m8n8") and instr.has("b16"):
        rows = registers_to_matrix_rows(registers, transposed)
    elif instr.has("m16n8") and instr.has("b8") and transposed:
        parts = np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 8, 4, 2, 2)  # g, q, row / 8, column % 2
        rows = np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1))
    else:
        raise _unknown(group, instr)
    data = np.zeros((group.n // 32, 32, 16), np.uint8)
    data[:, : 8 * count] = rows.reshape(-1, 8 * count, 16)
    mask = (np.arange(group.n) % 32) < 8 * count
    group.write(_space(instr), group.array(address), data.reshape(-1, 16), mask=mask, align=16)


@operation("movmatrix", out=1, collective="warp")
def movmatrix(group: Any, instr: Any, value: Any) -> Array:
    """movmatrix.sync.aligned.m8n8.trans.b16 d, a."""
    return transpose_fragment(np.ascontiguousarray(group.array(value)))
