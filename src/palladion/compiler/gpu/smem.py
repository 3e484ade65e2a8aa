"""Shared memory of a block: where buffers lie in it, and how each lies in its memory.

A buffer is row-major, or stored with transforms: tiles, and a swizzle, which exchanges pieces of 16 bytes within rows
of 128 so that columns can be read at full speed. The hardware swizzles final addresses: pieces are numbered by address
bits 4 to 6, and exchanged by bits 7 to 9, so that swizzled buffers begin at multiples of 1024.

Memory of a scope is used again after it: holes that a scope left are filled first.

Source: PTX ISA, "Tensor swizzling modes"; facts file, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.compiler.gpu.axes import Axis, merged
from palladion.language.dtypes import element_bits
from palladion.language.gpu.memory import SwizzleTransform, TilingTransform, TransposeTransform

ALIGNMENT = 128  # of a buffer that a copy writes (TMA)
PATTERN = 1024  # of a swizzled one
LEAST = 16  # of others
_HOLES = "smem holes"


def stored_axes(shape: Sequence[int], itemsize: int, transforms: Sequence[Any]) -> tuple[tuple[Axis, ...], int]:
    """How a buffer lies: the axes of its dimensions, and the bytes of its swizzle (0: none).

    Arguments:
      shape: of the buffer. itemsize: bytes of an element.
      transforms: of the language, in the order of application; checked (`memory.stored_shape`).
    """
    entries = [(d, n, 1) for d, n in enumerate(shape)]  # (dimension, size, coordinates of a step), as stored
    swizzle = 0
    for layer in transforms:
        if isinstance(layer, TilingTransform):
            first = len(entries) - len(layer.tiling)
            tiled = list(zip(entries[first:], layer.tiling, strict=True))
            outer = [(d, n // t, w * t) for (d, n, w), t in tiled]
            entries = [*entries[:first], *outer, *((d, t, w) for (d, _, w), t in tiled)]
        elif isinstance(layer, SwizzleTransform):
            swizzle = 0 if layer.swizzle == 16 else layer.swizzle
        elif isinstance(layer, TransposeTransform):
            entries = [entries[d] for d in layer.permutation]
    found: list[list[tuple[int, int, int]]] = [[] for _ in shape]  # of each dimension: (weight, size, stride)
    stride = itemsize
    for d, n, w in reversed(entries):
        found[d].append((w, n, stride))
        stride *= n
    axes = []
    for d, n in enumerate(shape):
        digits = merged(tuple((size, step) for w, size, step in sorted(found[d], reverse=True)))
        axes.append(Axis(n, digits, n, dim=d))
    return tuple(axes), swizzle


def swizzled(places: np.ndarray, swizzle: int) -> np.ndarray:
    """Addresses as the hardware swizzles them."""
    if not swizzle:
        return places
    return places ^ ((places >> 7 & swizzle // 16 - 1) << 4)


def itemsize(dtype: Any) -> int:
    """Bytes of an element; elements narrower than a byte have one each."""
    return max(element_bits(dtype) // 8, 1)


def allocate(unit: Any, size: int, align: int) -> int:
    """Bytes of a scope: the offset of the first. They are given back with `release`."""
    holes = unit.tables.more.get(_HOLES, ())
    for k, (start, end) in enumerate(holes):
        at = -(-start // align) * align
        if at + size <= end:
            rest = [(start, at), (at + size, end)]
            unit.tables.more[_HOLES] = (*holes[:k], *(h for h in rest if h[0] < h[1]), *holes[k + 1 :])
            return at
    before = unit.tables.smem
    at = unit.shared(size, align)
    if before < at:  # what was left out for alignment
        unit.tables.more[_HOLES] = (*unit.tables.more.get(_HOLES, ()), (before, at))
    return at


def release(unit: Any, at: int, size: int) -> None:
    """Give bytes back: whatever comes after may use them."""
    holes = sorted((*unit.tables.more.get(_HOLES, ()), (at, at + size)))
    joined: list[tuple[int, int]] = []
    for start, end in holes:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    unit.tables.more[_HOLES] = tuple(joined)


def alignment(swizzle: int, size: int) -> int:
    """Where a buffer may begin."""
    return PATTERN if swizzle else ALIGNMENT if size >= ALIGNMENT else max(LEAST, 1 << (size - 1).bit_length())


def bytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Of a buffer."""
    return math.prod(shape) * itemsize


def barriers(unit: Any, size: int) -> int:
    """Bytes of barriers, of which the first kilobyte is kept free: the offset of the first."""
    at = unit.tables.more.get("barrier bytes", 0)
    if at + size <= unit.tables.more.get("barrier room", 0):
        unit.tables.more["barrier bytes"] = at + size
        return at
    return unit.shared(size, 8)
