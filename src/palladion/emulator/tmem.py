"""Tensor Memory of one CTA: 128 lanes by 512 columns of 32-bit cells, its allocations and the shapes that
move data.

Addresses are `lane << 16 | column`. Columns are allocated in powers of two from 32; an access outside a live
allocation is a finding. What loads and stores are still unfinished is kept here as rectangles, so that an MMA
that writes what a warp has not finished to read, or reads what a store has not finished to write, shows.

Sources: facts file 8.1, 8.7, 8.10, 8.11; PTX manual, "Tensor Memory" and "tcgen05 data movement shapes".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

Array = np.ndarray

LANES, COLUMNS = 128, 512
POISON = 0x7FC0DEAD  # a NaN, as f32 and (upper half) bf16: what nobody wrote is noticed in results


class TensorMemoryError(ValueError):
    """A use of Tensor Memory that is not allowed; `kind` is the fault kind, the message one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Region:
    """Lanes [lane, lane + lanes) by columns [column, column + columns)."""

    lane: int
    lanes: int
    column: int
    columns: int

    def overlaps(self, other: Region) -> bool:
        return (
            self.column < other.column + other.columns
            and other.column < self.column + self.columns
            and self.lane < other.lane + other.lanes
            and other.lane < self.lane + self.lanes
        )

    def __str__(self) -> str:
        return (
            f"lanes {self.lane}..{self.lane + self.lanes - 1}, columns {self.column}..{self.column + self.columns - 1}"
        )


@dataclass
class TensorMemory:
    """The Tensor Memory that one CTA sees. Created at the first tcgen05.alloc of a CTA."""

    cells: Array = field(default_factory=lambda: np.full((LANES, COLUMNS), POISON, np.uint32))
    allocations: dict[int, int] = field(default_factory=dict)  # first column -> columns
    relinquished: bool = False

    def find(self, columns: int) -> int | None:
        """The first free aligned range of `columns` columns, or None where there is none now."""
        for start in range(0, COLUMNS, columns):
            if all(start + columns <= a or a + n <= start for a, n in self.allocations.items()):
                return start
        return None

    def allocate(self, start: int, columns: int) -> int:
        """Marks columns as this CTA's; returns the address. What they held before is unknown."""
        self.allocations[start] = columns
        self.cells[:, start : start + columns] = POISON
        return start

    def check_allocate(self, columns: int) -> None:
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise TensorMemoryError(
                "illegal-shape", f"tcgen05.alloc of {columns} columns: a power of two from 32 to 512 is needed"
            )
        if self.relinquished:
            raise TensorMemoryError(
                "illegal-shape", "tcgen05.alloc after tcgen05.relinquish_alloc_permit: this CTA may allocate no more"
            )
        if self.allocations and columns > (last := next(reversed(self.allocations.values()))):
            raise TensorMemoryError(
                "illegal-shape",
                f"tcgen05.alloc of {columns} columns after one of {last}: successive allocations must not grow",
            )

    def free(self, address: int, columns: int) -> None:
        start = address & 0xFFFF
        if address >> 16 or self.allocations.get(start) != columns:
            live = ", ".join(f"{n} columns at {a}" for a, n in self.allocations.items()) or "none"
            raise TensorMemoryError(
                "illegal-shape",
                f"tcgen05.dealloc of {columns} columns at {address:#x}: not an allocation of this CTA (live: {live})",
            )
        del self.allocations[start]

    def check(self, region: Region, what: str) -> None:
        """Raises TensorMemoryError where a region lies outside the allocated columns or the lanes."""
        end = region.column + region.columns
        if region.lane + region.lanes > LANES or end > COLUMNS:
            raise TensorMemoryError("out-of-bounds", f"{what} reaches beyond Tensor Memory: {region}")
        at = region.column
        while at < end:
            for start, count in self.allocations.items():
                if start <= at < start + count:
                    at = start + count
                    break
            else:
                live = ", ".join(f"{a}..{a + n - 1}" for a, n in self.allocations.items()) or "none"
                raise TensorMemoryError(
                    "out-of-bounds",
                    f"{what} touches Tensor Memory column {at}, which is not allocated ({region}; allocated: {live})",
                )

    def leak(self) -> str | None:
        """What is still allocated, as text; None where nothing is."""
        if not self.allocations:
            return None
        return ", ".join(f"{n} columns at column {a}" for a, n in self.allocations.items())


def split(address: int) -> tuple[int, int]:
    """(lane, column) of an address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


@dataclass(frozen=True)
class Movement:
    """One shape of tcgen05.ld / .st: lanes it covers, columns of one repeat, registers of one repeat."""

    lanes: int
    columns: int
    registers: int
    most: int  # largest repeat


MOVEMENTS: dict[str, Movement] = {
    "32x32b": Movement(32, 1, 1, 128),
    "16x64b": Movement(16, 2, 1, 128),
    "16x128b": Movement(16, 4, 2, 64),
    "16x256b": Movement(16, 8, 4, 32),
    "16x32bx2": Movement(16, 1, 1, 128),
}


@cache
def movement_map(shape: str, repeats: int, half: int = 0) -> tuple[Array, Array]:
    """(lane, column) of register i in thread lane l, each (registers, 32), relative to the address.

    `half` is the column offset of the upper 16 thread lanes of 16x32bx2.
    """
    form = MOVEMENTS[shape]
    i = np.arange(form.registers * repeats)[:, None]
    thread = np.arange(32)[None, :]
    zero = np.zeros_like(i * thread)
    if shape == "32x32b":
        return thread + zero, i + zero
    if shape == "16x64b":
        return (thread >> 2) + 8 * (thread & 1) + zero, 2 * i + ((thread >> 1) & 1)
    if shape == "16x128b":
        return (thread >> 2) + 8 * (i & 1), 4 * (i >> 1) + (thread & 3)
    if shape == "16x256b":
        return (thread >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (thread & 3) + (i & 1)
    return (thread & 15) + zero, i + np.where(thread >= 16, half, 0)


@cache
def movement_index(shape: str, repeats: int, half: int, packed: bool) -> Array:
    """Flat cell numbers (lane * 512 + column) of `movement_map`; `packed`: of the lower of each pair of columns."""
    lane, column = movement_map(shape, repeats, half)
    return (lane * COLUMNS + column * (2 if packed else 1)).astype(np.intp)


def movement_regions(shape: str, repeats: int, half: int, packed: bool, address: int) -> list[Region]:
    """What a load or store touches."""
    form = MOVEMENTS[shape]
    lane, column = split(address)
    columns = form.columns * repeats * (2 if packed else 1)
    regions = [Region(lane, form.lanes, column, columns)]
    if shape == "16x32bx2":
        regions.append(Region(lane, form.lanes, column + half * (2 if packed else 1), columns))
    return regions


def load(memory: TensorMemory, addresses: Iterable[int], shape: str, repeats: int, half: int, packed: bool) -> Array:
    """Registers of tcgen05.ld for the warps whose addresses are given: uint32 (registers, 32 * warps)."""
    index = movement_index(shape, repeats, half, packed)
    flat = memory.cells.reshape(-1)
    parts = []
    for address in addresses:
        lane, column = split(address)
        at = index + (lane * COLUMNS + column)
        if packed:
            parts.append((flat[at] & 0xFFFF) | (flat[at + 1] << np.uint32(16)))
        else:
            parts.append(flat[at])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def store(
    memory: TensorMemory, addresses: Iterable[int], shape: str, repeats: int, half: int, packed: bool, values: Array
) -> None:
    """tcgen05.st of uint32 (registers, 32 * warps); `packed`: each register becomes two cells with zero upper
    halves."""
    index = movement_index(shape, repeats, half, packed)
    flat = memory.cells.reshape(-1)
    for number, address in enumerate(addresses):
        lane, column = split(address)
        at = index + (lane * COLUMNS + column)
        part = values[:, 32 * number : 32 * number + 32]
        if packed:
            flat[at] = part & 0xFFFF
            flat[at + 1] = part >> np.uint32(16)
        else:
            flat[at] = part


# ---- tcgen05.cp and tcgen05.shift

# rows of the source, bytes a row, and for each destination block (first source row, rows, first lane)
COPIES: dict[str, tuple[int, int, tuple[tuple[int, int, int], ...]]] = {
    "128x256b": (128, 32, ((0, 128, 0),)),
    "128x128b": (128, 16, ((0, 128, 0),)),
    "4x256b": (4, 32, tuple((i, 1, 32 * i) for i in range(4))),
    "64x128b.warpx2::02_13": (64, 16, ((0, 64, 0), (0, 64, 64))),
    "64x128b.warpx2::01_23": (64, 16, ((0, 32, 0), (0, 32, 32), (32, 32, 64), (32, 32, 96))),
    "32x128b.warpx4": (32, 16, tuple((0, 32, 32 * i) for i in range(4))),
}


def copy_in(memory: TensorMemory, address: int, shape: str, rows: Array) -> None:
    """Writes the gathered source rows, uint8 (rows, bytes), of a tcgen05.cp."""
    lane, column = split(address)
    words = np.ascontiguousarray(rows).view(np.uint32)
    for first, count, to in COPIES[shape][2]:
        memory.cells[lane + to : lane + to + count, column : column + words.shape[1]] = words[first : first + count]


def shift_down(memory: TensorMemory, address: int) -> None:
    """tcgen05.shift: 8 columns of the 32 lanes from the address move one lane up in number; the first stays as
    it was."""
    lane, column = split(address)
    block = memory.cells[lane : lane + 32, column : column + 8]
    block[1:] = block[:-1].copy()
