"""Dimensions of views as digits: what a coordinate adds to the place of an element.

A coordinate's digits each move the place by their stride: a dimension of 128 rows stored in tiles of 8 has two, 16
steps of one tile and 8 steps of one row. A run-time start becomes a `Term`, a text times a number, where moving by it
moves every element equally far (`fold`); of digits that needs a multiple of the lower ones.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

Digits = tuple[tuple[int, int], ...]  # (size, bytes of a step), the most significant first


@dataclasses.dataclass(frozen=True)
class Term:
    """A run-time part of a sum: `text * factor`.

    Attributes: text: C++ of an int. factor: a number. multiple: what divides the text's value.
    """

    text: str
    factor: int
    multiple: int = 1

    def times(self, n: int) -> Term:
        return dataclasses.replace(self, factor=self.factor * n)

    @property
    def divisor(self) -> int:
        """What divides the whole term; 0 if it is zero."""
        return abs(self.factor) * self.multiple

    def __str__(self) -> str:
        return self.text if self.factor == 1 else f"{self.text} * {self.factor}"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A dimension of a view: index i stands for the coordinate `first + terms + i * step`.

    Attributes:
      n: its size. digits: what a coordinate adds to the place. extent: coordinates that there are.
      first, terms, step: see above; an axis that begins at 0 and has all of its coordinates is *whole*.
      coords: of a constant index array: the coordinate of each index instead.
      dim: of the buffer's dimensions, which one this is a part of, as it is; None: after a reshape or bitcast.
    """

    n: int
    digits: Digits
    extent: int
    first: int = 0
    terms: tuple[Term, ...] = ()
    step: int = 1
    coords: tuple[int, ...] | None = None
    dim: int | None = None

    @property
    def whole(self) -> bool:
        return self.coords is None and not self.first and not self.terms and self.step == 1 and self.n == self.extent

    def places(self) -> np.ndarray:
        """What each index adds, with the terms taken as zero."""
        at = np.asarray(self.coords, np.int64) if self.coords is not None else np.arange(self.n) * self.step
        return spread(self.digits, at + self.first)

    def text(self, index: str) -> str:
        """C++ for what a coordinate at run time adds."""
        total = math.prod(size for size, _ in self.digits)
        parts, below = [], total
        for size, stride in self.digits:
            below //= size
            part = f"({index})" if below == 1 else f"({index}) / {below}"
            part = part if below * size == total else f"{part} % {size}"
            parts.append(part if stride == 1 else f"{part} * {stride}")
        return " + ".join(parts) or "0"


def spread(digits: Digits, at: np.ndarray) -> np.ndarray:
    """What coordinates add."""
    found = np.zeros_like(at)
    below = 1
    for size, stride in reversed(digits):
        found = found + at // below % size * stride
        below *= size
    return found


def merged(digits: Digits) -> Digits:
    """Digits without those that another one continues, or that have one value."""
    found: list[tuple[int, int]] = []
    for size, stride in digits:
        if size == 1:
            continue
        if found and found[-1][1] == stride * size:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)


def fold(axis: Axis) -> tuple[Axis, int, list[Term]]:
    """An axis that begins at zero, and what its start adds: a constant and terms; as far as its digits allow."""
    if axis.coords is not None:
        return axis, 0, []
    if not axis.digits:
        return Axis(axis.n, (), axis.n, dim=axis.dim), 0, []
    if len(axis.digits) == 1:
        stride = axis.digits[0][1]
        terms = [t.times(stride) for t in axis.terms]
        plain = Axis(axis.n, ((axis.n, stride * axis.step),) if axis.n > 1 else (), axis.n, dim=axis.dim)
        return plain, axis.first * stride, terms
    if axis.step != 1:
        return axis, 0, []
    # A start at a multiple of the lower digits moves the top one only; a short run stays within the lowest digit.
    for k in range(len(axis.digits) - 1):
        below = math.prod(size for size, _ in axis.digits[k + 1 :])
        aligned = axis.first % below == 0 and all(t.divisor % below == 0 for t in axis.terms)
        if not aligned:
            continue
        stride, kept = _continued(axis.digits[: k + 1]), axis.digits[k + 1 :]
        if stride is None:
            continue
        if axis.n % below == 0:
            digits = merged(((axis.n // below, stride), *kept))
        elif axis.n < below and (inner := _first_of(kept, axis.n)) is not None:
            digits = inner
        else:
            continue
        terms = [_divided(t, below).times(stride) for t in axis.terms]
        return Axis(axis.n, digits, axis.n, dim=axis.dim), axis.first // below * stride, terms
    if not axis.terms:
        run = axis.places()
        digits = as_digits(run - run[0]) if len(run) else ()
        if digits is not None:
            return Axis(axis.n, digits, axis.n, dim=axis.dim), int(run[0]) if len(run) else 0, []
    return axis, 0, []


def _divided(term: Term, n: int) -> Term:
    """A term divided by a number that divides it."""
    if term.factor % n == 0:
        return dataclasses.replace(term, factor=term.factor // n)
    whole = term.text if term.factor == 1 else f"({term})"
    return Term(f"{whole} / {n}", 1, term.divisor // n)


def _continued(digits: Digits) -> int | None:
    """The step of the lowest of digits, if they continue each other; else None."""
    joined = merged(digits)
    return digits[-1][1] if len(joined) <= 1 else None


def _first_of(digits: Digits, n: int) -> Digits | None:
    """The digits of the first n coordinates, if n is made of the lower ones."""
    for k in range(len(digits)):
        below = math.prod(size for size, _ in digits[k + 1 :])
        if n % below == 0 and n // below <= digits[k][0]:
            return merged(((n // below, digits[k][1]), *digits[k + 1 :]))
    return None


def as_digits(run: np.ndarray) -> Digits | None:
    """Digits that give these places, or None."""
    found: list[tuple[int, int]] = []
    rest = np.asarray(run, np.int64)
    while len(rest) > 1:
        step, size = int(rest[1] - rest[0]), 1
        while size < len(rest) and rest[size] - rest[0] == step * size:
            size += 1
        while len(rest) % size:
            size -= 1
        if size < 2:
            return None
        groups = rest.reshape(-1, size)
        if (groups != groups[:, :1] + np.arange(size) * step).any():
            return None
        found.insert(0, (size, step))
        rest = groups[:, 0]
    return merged(tuple(found))
