"""Which bytes a tensor copy moves: a box of a tensor map against its bytes in global and shared memory.

A `Tile` is index arithmetic only: for each byte of the box, where it lies in global memory, whether that is
inside the tensor, and at which offset of the dense tile in shared memory it belongs (before the swizzle).
The copies of `bulk.py` gather and scatter with it. Facts file 2.5 to 2.7.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from palladion.emulator.tensor_map import TensorMap


@dataclass(frozen=True)
class Tile:
    """`source`: global byte addresses; `inside`: within the tensor; `offset`: in the dense shared tile.
    All of shape (rows, bytes of a row). `size`: bytes of the dense shared tile, padding included."""

    source: np.ndarray
    inside: np.ndarray
    offset: np.ndarray
    size: int


class TileError(ValueError):
    """A copy that does not fit its tensor map; `kind` is the kind of fault."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@lru_cache(maxsize=64)
def _offsets(rows: int, row_bytes: int, pitch: int, padded_from: int) -> np.ndarray:
    """Offset in the dense tile of each payload byte; groups of `padded_from` bytes widened to 16 if not 0."""
    column = np.arange(row_bytes, dtype=np.int64)
    if padded_from:
        column = column // padded_from * 16 + column % padded_from
    result = np.arange(rows, dtype=np.int64)[:, None] * pitch + column
    result.flags.writeable = False
    return result


def tile(tensor_map: TensorMap, coordinates, gather: bool = False) -> Tile:
    """The bytes of one box.

    Arguments: tensor_map; coordinates: signed elements, innermost first, of the box's first element; with
        `gather` (tile::gather4 and tile::scatter4) the column and four rows.
    Raises: TileError for a coordinate that the element type or mode does not allow."""
    m, bits = tensor_map, tensor_map.type.bits
    c = [int(x) for x in coordinates]
    if m.interleave:
        raise TileError("illegal-shape", "tensor copies of interleaved layouts are not emulated")
    if gather:
        if m.rank != 2 or m.box[1] != 1:
            raise TileError("illegal-shape", "gather4 and scatter4 need a map of rank 2 whose box has one row")
        row_indices = [np.asarray(c[1:], np.int64)]
    else:
        if len(c) != m.rank:
            raise TileError("illegal-shape", f"a {len(c)}-d copy with a tensor map of rank {m.rank}")
        row_indices = [c[d] + np.arange(m.counts[d], dtype=np.int64) * m.element_strides[d] for d in range(1, m.rank)]
    step = 128 if m.type.padded else 2 if bits == 4 else 1
    if c[0] % step:
        raise TileError(
            "misaligned", f"innermost coordinate {c[0]} of {m.type.name} is not a multiple of {step} elements"
        )
    base, valid = np.zeros(1, np.int64), np.ones(1, bool)
    # Dimension 1 runs fastest among rows, so it is the last to be broadcast in.
    for d in range(len(row_indices), 0, -1):
        index = row_indices[d - 1]
        base = (base[:, None] + index * m.strides[d - 1]).reshape(-1)
        valid = (valid[:, None] & ((index >= 0) & (index < m.dims[d]))).reshape(-1)
    first = c[0] * bits // 8
    column = first + np.arange(m.row_bytes, dtype=np.int64)
    inside = valid[:, None] & ((column >= 0) & (column < m.dims[0] * bits // 8))
    source = m.address + base[:, None] + column
    group = bits * 2 if m.type.padded else 0
    offset = _offsets(len(base), m.row_bytes, m.row_pitch, group)
    return Tile(source, inside, offset, len(base) * m.row_pitch)


def fill_pattern(tensor_map: TensorMap, count: int) -> np.ndarray:
    """What out-of-bounds bytes are filled with: zeros or NaN, `count` bytes; uint8."""
    if not tensor_map.fill or tensor_map.type.nan is None:
        return np.zeros(count, np.uint8)
    width = tensor_map.type.bits // 8
    one = np.frombuffer(tensor_map.type.nan.to_bytes(width, "little"), np.uint8)
    return np.tile(one, -(-count // width))[:count]


def converted(tensor_map: TensorMap, data: np.ndarray, load: bool) -> np.ndarray:
    """What a copy does to the values themselves: `.ftz` types flush subnormals, and a tf32 map rounds to
    nearest even when loading (which rounding the hardware takes is not documented).

    Arguments: data: uint8, whole elements, last axis bytes. Returns: uint8 of the same shape."""
    kind = tensor_map.type
    if not kind.flush and not kind.name.startswith("tf32"):
        return data
    words = np.ascontiguousarray(data).view(np.uint32).copy()
    if kind.flush:
        words[(words & 0x7F800000) == 0] &= np.uint32(0x80000000)
    if load and kind.name.startswith("tf32"):
        finite = (words & 0x7F800000) != 0x7F800000
        words[finite] += np.uint32(0xFFF) + ((words[finite] >> 13) & 1)
        words &= np.uint32(0xFFFFE000)
    return words.view(np.uint8).reshape(data.shape)
