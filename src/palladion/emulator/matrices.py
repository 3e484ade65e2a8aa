"""Matrix fragments: which lane and register of a warp holds which element, for mma.sync, wgmma and ldmatrix.

One rule covers the operands of all shapes that the tensor cores take from registers. With `g = lane / 4`,
`q = lane % 4` and `n` elements in a 32-bit register (or one 64-bit element), element `e` of register `r` is

    A (16 rows):  row g + 8 * (r % 2),   k = n * q + e + 4 * n * (r / 2)
    A (8 rows):   row g,                 k = n * q + e + 4 * n * r
    B:            column g,              k = n * q + e + 4 * n * r
    C, D:         row g + 8 * (i / 2),   column 2 * q + i % 2     (element i; two f16 in a register)

(facts file 4.5 and 9.1; PTX manual, "Matrix fragments for mma"). A warpgroup's fragment is four of these, 16
rows a warp; its accumulator has N / 8 of them side by side. Conversions are single indexed reads with cached
index arrays.

Registers are arrays with one item a lane, shape (32 * warps,); matrices are (warps, rows, columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from palladion.emulator.numbers import elements, from_f16, to_f16

Array = np.ndarray


@cache
def operand_index(rows: int, depth: int, per_register: int) -> Array:
    """(rows, depth) positions of an operand's elements among the `32 * registers * per_register` of a warp.

    `rows` is 16 or 8 for A, 8 for B (its columns); `depth` is K.
    """
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    q, e, block = (k // per_register) % 4, k % per_register, k // (4 * per_register)
    lane = (row % 8) * 4 + q
    register = block * (rows // 8) + row // 8
    registers = rows * depth // (32 * per_register)
    return ((lane * registers + register) * per_register + e).astype(np.intp)


@cache
def accumulator_index(rows: int) -> Array:
    """(rows, 8) positions of a C or D tile's elements among the `32 * rows / 4` of a warp."""
    row, column = np.arange(rows)[:, None], np.arange(8)[None, :]
    lane = (row % 8) * 4 + column // 2
    return (lane * (rows // 4) + (row // 8) * 2 + column % 2).astype(np.intp)


@cache
def _accumulator_scatter(rows: int) -> Array:
    """The inverse of `accumulator_index`: for each lane and element its place in the (rows, 8) tile."""
    inverse = np.empty(rows * 8, np.intp)
    inverse[accumulator_index(rows).ravel()] = np.arange(rows * 8)
    return inverse


def stack(registers: Sequence[Array], dtype: type = np.uint32) -> Array:
    """Registers side by side: (lanes, registers), each read as `dtype` (same width)."""
    out = np.empty((registers[0].size, len(registers)), dtype)
    for number, register in enumerate(registers):
        out[:, number] = register.view(dtype)
    return out


def operand(registers: Sequence[Array], rows: int, depth: int, bits: int) -> Array:
    """An A or B operand out of its registers: raw element codes, shape (warps, rows, depth)."""
    raw = stack(registers, np.uint64 if bits == 64 else np.uint32)
    codes = elements(raw.view(np.uint8), bits)
    per_register = codes.shape[1] // len(registers)
    warps = raw.shape[0] // 32
    return np.take(codes.reshape(warps, -1), operand_index(rows, depth, per_register), axis=1)


def accumulator(registers: Sequence[Array], rows: int, dtype: type) -> Array:
    """A C operand as (warps, rows, 8); `dtype` float32, float64, int32 or (f16 pairs, widened) float16."""
    if dtype is np.float16:
        values = from_f16(stack(registers).view(np.uint16))
    else:
        values = stack(registers, dtype)
    return np.take(values.reshape(values.shape[0] // 32, -1), accumulator_index(rows), axis=1)


def registers_of(tile: Array, rows: int, half: bool) -> list[Array]:
    """A D tile (warps, rows, 8) to its registers; `half`: float32 values rounded to f16, two in a register."""
    warps = tile.shape[0]
    flat = np.take(tile.reshape(warps, rows * 8), _accumulator_scatter(rows), axis=1)
    columns = flat.reshape(warps * 32, rows // 4)
    if not half:
        return [np.ascontiguousarray(columns[:, number]) for number in range(rows // 4)]
    words = np.ascontiguousarray(to_f16(columns)).view(np.uint32)
    return [np.ascontiguousarray(words[:, number]) for number in range(rows // 8)]


def warpgroup_accumulator(registers: Sequence[Array], columns: int, half: bool) -> Array:
    """A wgmma accumulator as (64, columns): float32 or int32 (as the registers are), f16 widened to float32.

    Element i (f16 has two in a register): row 16 w + g + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 q + i % 2.
    """
    if half:
        words = np.stack([register.view(np.uint32) for register in registers])
        pairs = from_f16(words.view(np.uint16)).reshape(columns // 8, 2, 4, 8, 4, 2)  # j, h, w, g, q, b
        return pairs.transpose(2, 1, 3, 0, 4, 5).reshape(64, columns)
    words = np.stack(registers).reshape(columns // 8, 2, 2, 4, 8, 4)  # j, h, b, w, g, q
    return words.transpose(3, 1, 4, 0, 5, 2).reshape(64, columns)


def warpgroup_registers(tile: Array, half: bool) -> Array:
    """The inverse: (64, N) to an array with one row a register, (N / 2, 128), or (N / 4, 128) uint32 for f16."""
    columns = tile.shape[1]
    parts = tile.reshape(4, 2, 8, columns // 8, 4, 2)  # w, h, g, j, q, b
    if half:
        pairs = np.ascontiguousarray(to_f16(parts).transpose(3, 1, 0, 2, 4, 5))
        return pairs.view(np.uint32).reshape(columns // 4, 128)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, 128)


def matrix_rows_to_registers(rows: Array, transposed: bool) -> Array:
    """ldmatrix: (matrices, 8, 16) bytes, row by row, to registers (matrices, 32) uint32.

    Lane l of matrix j holds the elements (l / 4, 2 (l % 4)) and its right neighbour, of the matrix or its transpose.
    """
    if not transposed:
        return rows.view(np.uint32).reshape(-1, 32)
    halves = rows.view(np.uint16).transpose(0, 2, 1)
    return np.ascontiguousarray(halves).view(np.uint32).reshape(-1, 32)


def registers_to_matrix_rows(registers: Array, transposed: bool) -> Array:
    """stmatrix: registers (matrices, 32) uint32 to (matrices, 8, 16) bytes, row by row."""
    words = np.ascontiguousarray(registers).reshape(-1, 8, 4)
    if not transposed:
        return words.view(np.uint8)
    halves = words.view(np.uint16).transpose(0, 2, 1)
    return np.ascontiguousarray(halves).view(np.uint8)


def transpose_fragment(register: Array) -> Array:
    """movmatrix: each warp's 8x8 16-bit fragment becomes the fragment of its transpose."""
    rows = register.view(np.uint32).reshape(-1, 8, 4).view(np.uint16)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).view(np.uint32).reshape(register.shape)
