"""Shared-memory matrix descriptors of wgmma and tcgen05: decoding, legality, and the gather of an operand
tile.

A descriptor names a tile of 16-byte chunks: start, two strides (leading and stride byte offsets, LBO and SBO)
and a swizzle. Which chunk of the operand sits where is the table of canonical layouts (facts file 4.3 and
8.4; PTX manual, "Matrix descriptor" and "Canonical layouts"); the swizzle is then taken from the bits of the
final address. A gather is one indexed read of 16-byte items; its index array depends only on the descriptor's
shape (strides, swizzle, start within the swizzle's period), so it is computed once for each shape.

The base offset says at which 128-byte line the swizzle's pattern begins where this is not its natural
boundary: the line number used in the exclusive-or is counted from there. (Inferred from the manual's formula;
kernels seen in the wild all have 0.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from palladion.emulator.swizzle import NONE, SWIZZLES, Swizzle, swizzle_address

CHUNK = np.dtype(np.complex128)  # any 16-byte item type: NumPy moves it by plain copies

WGMMA_SWIZZLES: dict[int, Swizzle] = {0: NONE, 1: SWIZZLES[3], 2: SWIZZLES[2], 3: SWIZZLES[1]}
TCGEN05_SWIZZLES: dict[int, Swizzle] = {0: NONE, 1: SWIZZLES[4], 2: SWIZZLES[3], 4: SWIZZLES[2], 6: SWIZZLES[1]}


class IllegalDescriptor(ValueError):
    """A descriptor (or its use) that the hardware does not define; the message is one sentence."""


@dataclass(frozen=True)
class MatrixDescriptor:
    """A decoded descriptor. Offsets in bytes; `start` is an address of the CTA's window (low 18 bits)."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: Swizzle
    raw: int

    def __str__(self) -> str:
        return (
            f"descriptor {self.raw:#018x} (start {self.start:#x}, LBO {self.leading}, SBO {self.stride}, "
            f"base offset {self.base_offset}, swizzle {self.swizzle.name})"
        )


def _field(raw: int, low: int, width: int) -> int:
    return (raw >> low) & ((1 << width) - 1)


def _decode(raw: int, constant: int, swizzle_low: int, zero: int, swizzles: dict[int, Swizzle]) -> MatrixDescriptor:
    if _field(raw, 46, 3) != constant:
        wanted = "0b001 (bit 46 set)" if constant else "0"
        raise IllegalDescriptor(
            f"descriptor {raw:#018x}: bits 48:46 are {_field(raw, 46, 3):#05b}, they must be {wanted}"
        )
    if raw & zero:
        raise IllegalDescriptor(f"descriptor {raw:#018x}: reserved bits {raw & zero:#x} are set")
    code = raw >> swizzle_low
    if code not in swizzles:
        raise IllegalDescriptor(f"descriptor {raw:#018x}: swizzle code {code} means nothing")
    return MatrixDescriptor(
        _field(raw, 0, 14) << 4,
        _field(raw, 16, 14) << 4,
        _field(raw, 32, 14) << 4,
        _field(raw, 49, 3),
        swizzles[code],
        raw,
    )


_RESERVED = (3 << 14) | (3 << 30)


@lru_cache(maxsize=4096)
def decode_wgmma(raw: int) -> MatrixDescriptor:
    """The 64-bit descriptor of wgmma. Raises IllegalDescriptor where reserved bits are set."""
    return _decode(raw, 0, 62, _RESERVED | (((1 << 10) - 1) << 52), WGMMA_SWIZZLES)


@lru_cache(maxsize=4096)
def decode_tcgen05(raw: int) -> MatrixDescriptor:
    """The 64-bit descriptor of tcgen05.mma and tcgen05.cp (sm_100a: no absolute LBO mode)."""
    return _decode(raw, 1, 61, _RESERVED | (((1 << 9) - 1) << 52), TCGEN05_SWIZZLES)


@lru_cache(maxsize=1024)
def _chunks(
    phase: int,
    leading: int,
    stride: int,
    base_offset: int,
    swizzle: Swizzle,
    mn_major: bool,
    size: int,
    depth: int,
    item: int,
) -> tuple[np.ndarray, int, int]:
    """Chunk numbers of an operand relative to its start rounded down to 1024 bytes.

    `size`: rows along M or N; `depth`: bytes of K a row (K-major) or number of k (MN-major); `item`: bytes
    an element. Returns (indices, lowest, highest): (size, depth // 16) or, MN-major, (depth, size * item // 16).
    """
    span = swizzle.span // 16  # chunks of a swizzled row
    if not mn_major:
        row, chunk = np.arange(size)[:, None], np.arange(depth // 16)[None, :]
        if span:
            offset = (row % 8) * span * 16 + (row // 8) * stride + chunk * 16
        else:
            offset = (row % 8) * 16 + (row // 8) * stride + chunk * leading
    else:
        k, chunk = np.arange(depth)[:, None], np.arange(-(-size * item // 16))[None, :]
        if not span:
            offset = chunk * stride + (k % 8) * 16 + (k // 8) * leading
        else:
            lines = 4 if swizzle.low == 5 else 8  # the 32-byte atom repeats after 4 lines of k
            offset = (chunk % span) * 16 + (chunk // span) * leading + (k % lines) * span * 16 + (k // lines) * stride
    address = phase + offset
    if base_offset:  # count lines from where the pattern begins
        shift = 1024 - (base_offset << 7)
        address = swizzle_address(address + shift, swizzle) - shift
    else:
        address = swizzle_address(address, swizzle)
    index = (address >> 4).astype(np.intp)
    return index, int(index.min()), int(index.max())


def gather(
    memory: np.ndarray, descriptor: MatrixDescriptor, mn_major: bool, size: int, depth: int, item: int
) -> np.ndarray:
    """Reads an operand tile from a CTA's shared memory.

    Arguments: memory: 1-D uint8 view of the CTA's shared window, index = CTA-local address; descriptor: decoded;
        mn_major: layout in memory; size: rows along M or N; depth: bytes of K in a row for K-major, number of
        k for MN-major; item: bytes of an element (MN-major).
    Returns: uint8 array, (size, depth) for K-major, (depth, size * item) for MN-major: always memory order.
    Raises: IllegalDescriptor where the tile reaches outside the shared memory.
    """
    index, base = tile_index(memory.size, descriptor, mn_major, size, depth, item)
    whole = memory[: memory.size & ~15]  # a rest of less than 16 bytes holds no chunk
    chunks = np.take(whole.view(CHUNK)[base:], index)
    raw = chunks.view(np.uint8)
    return raw if not mn_major else raw[:, : size * item]


def tile_index(
    extent: int, descriptor: MatrixDescriptor, mn_major: bool, size: int, depth: int, item: int
) -> tuple[np.ndarray, int]:
    """Which 16-byte chunks `gather` reads: (relative chunk numbers, chunk number of their origin)."""
    phase = descriptor.start & 1023
    index, low, high = _chunks(
        phase,
        descriptor.leading,
        descriptor.stride,
        descriptor.base_offset,
        descriptor.swizzle,
        mn_major,
        size,
        depth,
        item,
    )
    base = (descriptor.start - phase) >> 4
    if base + low < 0 or (base + high + 1) * 16 > extent:
        raise IllegalDescriptor(
            f"{descriptor}: the operand's {size} rows reach bytes {(base + low) * 16}..{(base + high) * 16 + 15}, "
            f"the CTA has {extent} bytes of shared memory"
        )
    return index, base
