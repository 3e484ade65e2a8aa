"""Elements narrower than a byte: several lie in a byte, the first in its lowest bits.

No code of threads reads them; copies and the tensor core take them as they are. Places in a buffer of them are counted
in elements, and what copies or multiplies gets the view as one of bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.compiler.gpu.axes import Axis, Digits, Term
from palladion.compiler.gpu.smem import itemsize
from palladion.compiler.gpu.views import View
from palladion.language.dtypes import element_bits


def in_byte(dtype: Any) -> int:
    """How many elements a byte holds; 1: an element has one or more."""
    return max(8 // element_bits(dtype), 1)


def bytes_of(shape: Sequence[int], dtype: Any) -> int:
    """The size of an array."""
    return -(-math.prod(shape) * itemsize(dtype) // in_byte(dtype))


def packed(x: np.ndarray) -> np.ndarray:
    """An array as it lies in a GPU's memory: flat bytes, if its elements are narrower than one; else the array."""
    count = in_byte(x.dtype)
    if count == 1:
        return x
    bits = 8 // count
    flat = np.ascontiguousarray(x).view(np.uint8).reshape(-1) & (1 << bits) - 1
    flat = np.pad(flat, (0, -flat.size % count)).reshape(-1, count)
    return np.bitwise_or.reduce(flat << (bits * np.arange(count, dtype=np.uint8)), axis=1).astype(np.uint8)


def unpacked(raw: np.ndarray, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """The array whose bytes in a GPU's memory are `raw`."""
    count = in_byte(dtype)
    if count == 1:
        return raw.view(dtype).reshape(shape)
    bits = 8 // count
    flat = raw.reshape(-1, 1) >> (bits * np.arange(count, dtype=np.uint8)) & (1 << bits) - 1
    values = flat.reshape(-1)[: math.prod(shape)].astype(np.uint8)
    if np.dtype(dtype).name.startswith("int"):  # NumPy keeps the sign in the byte's other bits
        values = (values ^ 1 << bits - 1) - np.uint8(1 << bits - 1)
    return values.view(dtype).reshape(shape)


def as_bytes(unit: Any, view: View) -> View:
    """A view of narrow elements as one of bytes; others as they are.

    Raises: NotImplementedError: it begins or ends within a byte.
    """
    count = in_byte(view.dtype)
    if count == 1:
        return view
    try:
        if view.gathers or view.windows or view.offset % count or view.origin % count:
            raise ValueError
        return dataclasses.replace(
            view,
            dtype=np.dtype(np.uint8),
            axes=tuple(_axis(a, count) for a in view.axes),
            offset=view.offset // count,
            origin=view.origin // count,
            terms=tuple(_term(t, count) for t in view.terms),
            root=tuple((extent // count if _dense(d) else extent, _digits(d, count)) for extent, d in view.root),
            fixed=tuple(_fixed(view, f, count) for f in view.fixed),
        )
    except ValueError:
        raise unit.refuse(
            f"A part of {view.ref.label}, which holds {view.dtype}, begins or ends within a byte.",
            f"take multiples of {count} elements of its last dimension",
        ) from None


def _dense(digits: Digits) -> bool:
    return bool(digits) and digits[-1][1] == 1


def _digits(digits: Digits, count: int) -> Digits:
    found = []
    for size, stride in digits:
        if stride == 1:
            found.append((_exact(size, count), 1))
        else:
            found.append((size, _exact(stride, count)))
    return tuple(d for d in found if d[0] > 1)


def _exact(n: int, count: int) -> int:
    if n % count:
        raise ValueError
    return n // count


def _term(term: Term, count: int) -> Term:
    if term.factor % count == 0:
        return dataclasses.replace(term, factor=term.factor // count)
    if term.divisor % count:
        raise ValueError
    return Term(f"({term}) / {count}", 1, term.divisor // count)


def _axis(axis: Axis, count: int) -> Axis:
    digits = _digits(axis.digits, count)
    if not _dense(axis.digits):
        return dataclasses.replace(axis, digits=digits)
    if axis.step != 1 or axis.coords is not None:
        raise ValueError
    n, extent, first = (_exact(x, count) for x in (axis.n, axis.extent, axis.first))
    terms = tuple(_term(t, count) for t in axis.terms)
    return dataclasses.replace(axis, n=n, digits=digits, extent=extent, first=first, terms=terms)


def _fixed(view: View, fixed: tuple[int, int, tuple[Term, ...]], count: int) -> tuple[int, int, tuple[Term, ...]]:
    d, first, terms = fixed
    if not _dense(view.root[d][1]):
        return fixed
    return d, _exact(first, count), tuple(_term(t, count) for t in terms)
