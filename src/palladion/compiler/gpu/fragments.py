"""How an array lies in the registers of a warpgroup: which element is in which register of which of 128 threads.

A `Fragments` describes that as a mixed-radix numeral. The register number and the thread number are split into digits,
most significant first; each digit moves some steps along one dimension of the array, or along none (then the threads
hold copies). The accumulator of `wgmma`, for example, 64 rows and N columns:

    threads   4 warps, 16 rows each   x   8 rows   x   4 pairs of columns
    registers N/8 groups of 8 columns x   2 halves, 8 rows apart   x   2 columns

Arrays that no such numeral fits (sizes that are no multiples of 128 threads) lie flat: their elements in row-major
order, vectors of them dealt out to the threads in turn, with what is left over as padding.

Everything else (conversions, broadcasts, reductions, vector loads) is worked out from `Fragments.table`, the table of
which element is where; so no pair of layouts needs code of its own.

Source: PTX ISA, fragments of wgmma and tcgen05.ld; the facts file's tables (4.5, 8.10).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.compiler.gpu.dtypes import kind

THREADS = 128  # in a Pallas thread
NOTHING = -1  # in a table: padding, an element that no array has


@dataclasses.dataclass(frozen=True)
class Digit:
    """One digit of a register or thread number.

    Attributes:
      size: how many values it takes.
      dim: the dimension along which it moves, or None: its values hold the same elements.
      stride: elements along `dim` for each step.
    """

    size: int
    dim: int | None
    stride: int = 0


@dataclasses.dataclass(frozen=True)
class Fragments:
    """A layout of one array.

    Attributes:
      shape: of the array.
      registers, threads: digits, most significant first. The threads' sizes multiply to 128.
      flat: the digits move along the elements in row-major order (dimension 0) instead of along dimensions.
      name: how messages and comments call it.
    """

    shape: tuple[int, ...]
    registers: tuple[Digit, ...]
    threads: tuple[Digit, ...]
    flat: bool = False
    name: str = dataclasses.field(default="", compare=False)

    @functools.cached_property
    def count(self) -> int:
        """Registers a thread."""
        return math.prod(d.size for d in self.registers)

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @functools.cached_property
    def table(self) -> np.ndarray:
        """(128, count): the row-major number of the element that each register of each thread holds, or NOTHING."""
        dims = (self.size,) if self.flat else self.shape
        at = np.zeros((len(dims), THREADS, self.count), np.int64)
        for numbers, digits, axis in (
            (np.arange(THREADS)[:, None], self.threads, 0),
            (np.arange(self.count)[None], self.registers, 1),
        ):
            del axis
            weight = 1
            for digit in reversed(digits):
                if digit.dim is not None:
                    at[digit.dim] += numbers // weight % digit.size * digit.stride
                weight *= digit.size
        inside = np.ones((THREADS, self.count), bool)
        number = np.zeros((THREADS, self.count), np.int64)
        for d, n in enumerate(dims):
            inside &= at[d] < n
            number = number * n + at[d]
        return np.where(inside, number, NOTHING)

    @functools.cached_property
    def padded(self) -> bool:
        """Whether some registers hold nothing."""
        return bool((self.table == NOTHING).any())

    def start(self, register: int) -> tuple[int, ...]:
        """Where, along each dimension (one, if flat), a register's element lies in thread 0."""
        at = [0] * (1 if self.flat else len(self.shape))
        for digit in reversed(self.registers):
            if digit.dim is not None:
                at[digit.dim] += register % digit.size * digit.stride
            register //= digit.size
        return tuple(at)

    def thread_index(self, dim: int, thread: str = "t") -> str:
        """C++ for how far along a dimension the thread's elements lie from those of thread 0."""
        return _terms(self.threads, dim, thread)

    def register_index(self, dim: int, register: str = "i") -> str:
        """The same for a register's number."""
        return _terms(self.registers, dim, register)

    # --- layouts made of others ----------------------------------------------------------------------------------
    def without(self, dims: Sequence[int]) -> Fragments | None:
        """The layout after a reduction along `dims`, which every thread then holds the results of; None: flat."""
        if self.flat:
            return None
        kept = [d for d in range(len(self.shape)) if d not in dims]
        moved = {d: k for k, d in enumerate(kept)}
        registers = tuple(dataclasses.replace(d, dim=moved[d.dim]) for d in self.registers if d.dim in moved)
        threads = tuple(
            dataclasses.replace(d, dim=moved[d.dim]) if d.dim in moved else Digit(d.size, None) for d in self.threads
        )
        return Fragments(tuple(self.shape[d] for d in kept), registers, threads, name=f"{self.name} reduced")

    def renumbered(self, shape: Sequence[int], dims: Sequence[int]) -> Fragments | None:
        """The layout in an array of shape `shape` whose dimension `dims[d]` is this one's dimension d."""
        if self.flat:
            return None

        def move(digit: Digit) -> Digit:
            return digit if digit.dim is None else dataclasses.replace(digit, dim=dims[digit.dim])

        return Fragments(tuple(shape), tuple(map(move, self.registers)), tuple(map(move, self.threads)), name=self.name)


def _terms(digits: Sequence[Digit], dim: int, variable: str) -> str:
    """`t / 32 * 16 + t % 32 / 4`: the sum of the digits that move along a dimension."""
    found, weight = [], 1
    total = math.prod(d.size for d in digits)
    for digit in reversed(digits):
        if digit.dim == dim and digit.size > 1 and digit.stride:
            text = variable
            if weight * digit.size < total:
                text = f"{text} % {weight * digit.size}"
            if weight > 1:
                text = f"{text} / {weight}"
            found.append(f"{text} * {digit.stride}" if digit.stride > 1 else text)
        weight *= digit.size
    return " + ".join(reversed(found)) or "0"


def strided(shape: Sequence[int], vector: int = 1) -> Fragments:
    """Vectors of consecutive elements go round the threads.

    Arguments:
      shape: of the array. vector: elements of one vector.
    """
    shape = tuple(shape)
    size = math.prod(shape)
    name = f"WG_STRIDED(vec_size={vector})"
    rounds = -(-max(size, 1) // (THREADS * vector))
    registers = [Digit(rounds, 0, THREADS * vector), Digit(vector, 0, 1)]
    threads = [Digit(THREADS, 0, vector)]
    if size == rounds * THREADS * vector:
        split = [_along(shape, digits) for digits in (registers, threads)]
        if split[0] is not None and split[1] is not None:
            return Fragments(shape, split[0], split[1], name=name)
    return Fragments(shape, tuple(registers), tuple(threads), flat=True, name=name)


def _along(shape: tuple[int, ...], digits: Sequence[Digit]) -> tuple[Digit, ...] | None:
    """Digits over row-major numbers as digits over dimensions; None if one of them turns a corner."""
    found: list[Digit] = []
    for digit in digits:
        size, stride, parts = digit.size, digit.stride, []
        inner = 1  # elements below the dimension
        for dim in reversed(range(len(shape))):
            outer = inner * shape[dim]
            if size == 1:
                break
            if stride < outer:
                if stride % inner:
                    return None
                room = outer // stride
                here = min(size, room)
                if outer % stride or size % here:
                    return None
                parts.append(Digit(here, dim, stride // inner))
                size, stride = size // here, stride * here
            inner = outer
        if size > 1:
            return None
        found += reversed(parts)
    return tuple(found) or (Digit(1, None),)


def default_layout(shape: tuple[int, ...], dtype: Any, vector: int | None = None) -> Fragments:
    """The layout of an array that nothing decides: strided, with vectors of 16 bytes if they fit."""
    size = int(np.prod(shape, dtype=np.int64))
    if vector is None:
        vector = max(128 // kind(dtype).bits, 1)
        last = shape[-1] if shape else 1
        while vector > 1 and (size % (128 * vector) or last % vector):
            vector //= 2
    return strided(shape, vector)


def wgmma(shape: Sequence[int]) -> Fragments:
    """The accumulator of `wgmma` (facts 4.5): 64 x N parts one after the other down the rows."""
    m, n = shape
    return Fragments(
        (m, n),
        (Digit(m // 64, 0, 64), Digit(n // 8, 1, 8), Digit(2, 0, 8), Digit(2, 1, 1)),
        (Digit(4, 0, 16), Digit(8, 0, 1), Digit(4, 1, 2)),
        name="WGMMA",
    )


def wgmma_narrow(shape: Sequence[int], group: int, name: str) -> Fragments:
    """As `wgmma`, but each thread has `group` consecutive columns: operands of 8 bits (4), values to be widened."""
    m, n = shape
    return Fragments(
        (m, n),
        (Digit(m // 64, 0, 64), Digit(n // (4 * group), 1, 4 * group), Digit(2, 0, 8), Digit(group, 1, 1)),
        (Digit(4, 0, 16), Digit(8, 0, 1), Digit(4, 1, group)),
        name=name,
    )


def tmem_native(shape: Sequence[int]) -> Fragments:
    """A row a thread: what `tcgen05.ld.32x32b` gives (facts 8.10)."""
    m, n = shape
    threads = (Digit(m, 0, 1),) if m == THREADS else (Digit(THREADS // m, None), Digit(m, 0, 1))
    return Fragments((m, n), (Digit(n, 1, 1),), threads, name="TCGEN05_TMEM_NATIVE")


def tcgen05(shape: Sequence[int]) -> Fragments:
    """What `tcgen05.ld.16x256b` gives for 128 lanes: rows as in `wgmma`, of 32 lanes a warp."""
    m, n = shape
    return Fragments(
        (m, n),
        (Digit(2, 0, 16), Digit(n // 8, 1, 8), Digit(2, 0, 8), Digit(2, 1, 1)),
        (Digit(4, 0, 32), Digit(8, 0, 1), Digit(4, 1, 2)),
        name="TCGEN05",
    )


def replicated(shape: Sequence[int]) -> Fragments:
    """Every thread holds the whole array."""
    shape = tuple(shape)
    strides = [Digit(n, d, 1) for d, n in enumerate(shape)]
    return Fragments(shape, tuple(strides) or (Digit(1, None),), (Digit(THREADS, None),), name="replicated")


def local_map(have: Fragments, need: np.ndarray) -> tuple[int, ...] | None:
    """From which of its own registers each thread can take what it needs.

    Arguments:
      have: how the array lies.
      need: (128, n), the number of the element that each thread wants in each of n registers, or NOTHING.

    Returns:
      for each of the n registers the number of one of `have`, the same in all threads; None if some thread does not
      hold what it needs, or in another register than others.
    """
    table = have.table
    if table.shape[1] == 0:
        return None
    columns: dict[bytes, int] = {}
    for r in reversed(range(table.shape[1])):
        columns[table[:, r].tobytes()] = r
    found = []
    for r in range(need.shape[1]):
        wanted = np.ascontiguousarray(need[:, r])
        at = columns.get(wanted.tobytes())
        if at is None:
            real = wanted != NOTHING
            if not real.any():
                at = 0
            else:
                first = int(np.argmax(real))
                for candidate in np.flatnonzero(table[first] == wanted[first]):
                    if (table[real, candidate] == wanted[real]).all():
                        at = int(candidate)
                        break
        if at is None:
            return None
        found.append(at)
    return tuple(found)
