"""Descriptors: how matrix instructions are told where an operand lies in shared memory, and what to multiply.

A matrix descriptor (64 bits) names the start of a part of a buffer, two strides and the swizzle. The part consists of
*core matrices*, 8 lines of 16 bytes; which of the two strides leads to which neighbour depends on whether the
contracted dimension K is contiguous in memory ("K-major") or the other one ("MN-major"):

    K-major,  swizzled    sbo: to the next 8 rows                          lbo: not used
    K-major,  plain       sbo: to the next 8 rows                          lbo: to the next 16 bytes of K
    MN-major, swizzled    sbo: to the next 8 lines of K                    lbo: to the next columns of a swizzle
    MN-major, plain       sbo: to the next 16 bytes of columns             lbo: to the next 8 lines of K

`matrix` finds all of that from the table of a view's places, so that tiles, transposes and slices need no code of their
own: whatever lies as the hardware wants it, is taken. The instruction descriptor of tcgen05 (32 bits) has types and
sizes.

Source: PTX ISA, "Matrix descriptor", "Canonical layouts", "Instruction descriptor"; facts file, sections 4.2, 4.3, 8.4,
8.5, with the test vectors of section 11.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from palladion.compiler.gpu.views import Axis, Term, View, fold

ROW = 16  # bytes of a line of a core matrix
STEP = 32  # bytes of K that an instruction takes
_SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}  # wgmma's code; tcgen05's three bits have the same on top


def encoded(size: int) -> int:
    """An address or a stride as descriptors hold it: 14 bits, in units of 16 bytes."""
    return (size & 0x3FFFF) >> 4


def high_word(sbo: int, swizzle: int, arch: str) -> int:
    """Bits 32 to 63 of a matrix descriptor.

    Arguments:
      sbo: the stride byte offset. swizzle: 0, 32, 64 or 128 bytes. arch: "sm_90a" or "sm_100a".
    """
    version = 1 << 14 if arch == "sm_100a" else 0
    return encoded(sbo) | version | _SWIZZLE[swizzle] << 30


def descriptor(address: int, lbo: int, sbo: int, swizzle: int, arch: str) -> int:
    """A whole matrix descriptor; all sizes in bytes."""
    return high_word(sbo, swizzle, arch) << 32 | encoded(lbo) << 16 | encoded(address)


# --- where an operand lies ------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Matrix:
    """An operand in shared memory, as instructions read it.

    Attributes:
      base: C++ of the address of its buffer, a `char*`.
      offset, terms: where it begins in the buffer, in bytes: a constant and what is known at run time only.
      swizzle, lbo, sbo: of the descriptor, in bytes.
      mn_major: whether K is not the contiguous dimension.
      lines: for each instruction along M or N: bytes from the beginning. steps: the same along K.
    """

    base: str
    offset: int
    terms: tuple[Term, ...]
    swizzle: int
    lbo: int
    sbo: int
    mn_major: bool
    lines: tuple[int, ...]
    steps: tuple[int, ...]

    def start(self) -> str:
        """C++ of the address of its beginning, a `char*`."""
        parts = [self.base, *map(str, self.terms), *([str(self.offset)] if self.offset else [])]
        return " + ".join(parts)

    def high(self, arch: str) -> int:
        """Bits 32 to 63 of its descriptors."""
        return high_word(self.sbo, self.swizzle, arch)

    @property
    def low(self) -> int:
        """What the low word has beside the address."""
        return encoded(self.lbo) << 16


class Misfit(Exception):
    """An operand that no descriptor describes; the message says why."""


def matrix(view: View, k_axis: int, rows: int, depth: int) -> Matrix:
    """How instructions read a view.

    Arguments:
      view: of a buffer in shared memory, with two axes. k_axis: which of them is contracted.
      rows: of M or N that one instruction takes. depth: the elements of K that it takes.

    Raises: Misfit: it does not lie as the hardware wants it.
    """
    size, swizzle = view.itemsize, view.ref.swizzle
    if view.gathers or view.windows or view.where:
        raise Misfit("index arrays and other blocks' memory are nothing that an instruction reads")
    axes = [view.axes[1 - k_axis], view.axes[k_axis]]
    folded = [fold(axis) for axis in axes]
    if any(axis.terms or axis.coords is not None for axis, _, _ in folded):
        raise Misfit("it begins within a tile, at a place that is known at run time only")
    (mn, mn_offset, mn_terms), (k, k_offset, k_terms) = folded
    along_mn, along_k = mn.places(), k.places()
    if len(along_mn) % rows or len(along_k) % depth:
        raise Misfit(f"its sizes are no multiples of {rows} and {depth}")
    offset = view.offset + mn_offset + k_offset + int(along_mn[0]) + int(along_k[0])
    along_mn, along_k = along_mn - along_mn[0], along_k - along_k[0]
    wide = ROW // size
    mn_major = not _contiguous(along_k[:wide], size)
    if not mn_major and 0 < swizzle < depth * size:
        raise Misfit(f"an instruction takes {depth * size} bytes of K, and its swizzle is {swizzle} bytes wide")
    inner, outer = (along_mn, along_k) if mn_major else (along_k, along_mn)
    found = _strides(inner, outer, (rows, depth) if mn_major else (depth, rows), size, swizzle)
    if found is None:
        raise Misfit(_advice(size, swizzle))
    along_inner, along_outer = found
    if mn_major:
        lbo, sbo = (along_inner, along_outer) if swizzle else (along_outer, along_inner)
    else:
        lbo, sbo = (along_inner, along_outer) if not swizzle else (ROW, along_outer)
    lines = tuple(int(x) for x in along_mn[::rows])
    steps = tuple(int(x) for x in along_k[::depth])
    inside = mn_terms if mn_major else k_terms
    others = (*view.terms, *(k_terms if mn_major else mn_terms))
    _check_start(
        axes[0 if mn_major else 1], offset, [a + b for a in lines for b in steps], inside, others, swizzle, size
    )
    terms = (*view.terms, *mn_terms, *k_terms)
    return Matrix(view.ref.base, offset, terms, swizzle, lbo, sbo, mn_major, lines, steps)


def _contiguous(places: np.ndarray, size: int) -> bool:
    return bool((places == np.arange(len(places)) * size).all())


def _strides(
    inner: np.ndarray, outer: np.ndarray, part: tuple[int, int], size: int, swizzle: int
) -> tuple[int, int] | None:
    """The strides between core matrices (or swizzled rows) along the contiguous dimension, and along the other one.

    Arguments: inner, outer: places along them. part: elements of each that an instruction takes.
    """
    width = swizzle or ROW
    along_inner = _stride(inner, part[0], width // size, size)
    along_outer = _stride(outer, part[1], 8, width)
    return None if along_inner is None or along_outer is None else (along_inner, along_outer)


def _stride(places: np.ndarray, part: int, group: int, step: int) -> int | None:
    """The stride between groups of elements that are `step` apart; None: they do not lie so in every part."""
    stride = int(places[group]) if part > group else group * step
    n = np.arange(part)
    expected = n % group * step + n // group * stride
    parts = places.reshape(-1, part)
    return stride if (parts - parts[:, :1] == expected).all() else None


def _check_start(
    inner: Axis, offset: int, places: list[int], inside: list[Term], others: tuple[Term, ...], swizzle: int, size: int
) -> None:
    """The pattern of a swizzle must begin where the operand does; along its rows any 16 bytes will do."""
    pattern = 8 * swizzle or ROW
    within = len(inner.digits) == 1 and inner.extent * size <= (swizzle or ROW)
    if any(t.divisor % pattern for t in others) or any(t.divisor % (ROW if within else pattern) for t in inside):
        raise Misfit("it begins at a run-time place that is not known to be that of a tile of 8 rows")
    if any((offset + at) % pattern >= max(swizzle, 1) or (offset + at) % ROW for at in places):
        raise Misfit("it begins within a tile of 8 rows")


def _advice(size: int, swizzle: int) -> str:
    if swizzle:
        return f"its rows are not those of tiles of (8, {swizzle // size})"
    return f"it is not stored in tiles of (8, {ROW // size})"


# --- what tcgen05 multiplies ----------------------------------------------------------------------------------------
_ACCUMULATORS = {"float16": 0, "float32": 1, "int32": 2}
_TYPES = {
    "f16": {"float16": 0, "bfloat16": 1},
    "tf32": {"float32": 2},
    "f8f6f4": {"float8_e4m3fn": 0, "float8_e5m2": 1, "float4_e2m1fn": 5},
    "i8": {"uint8": 0, "int8": 1},
    "mxf8f6f4": {"float8_e4m3fn": 0, "float8_e5m2": 1, "float4_e2m1fn": 5},
    "mxf4": {"float4_e2m1fn": 1},
    "mxf4nvf4": {"float4_e2m1fn": 1},
}


def instruction(
    kind: str,
    a: str,
    b: str,
    d: str,
    m: int,
    n: int,
    *,
    a_mn_major: bool = False,
    b_mn_major: bool = False,
    sparse: int | None = None,
    saturate: bool = False,
    scale: str | None = None,
    ids: tuple[int, int] = (0, 0),
) -> int:
    """The instruction descriptor of a `tcgen05.mma`.

    Arguments:
      kind: "f16", "tf32", "f8f6f4", "i8", or block-scaled: "mxf8f6f4", "mxf4", "mxf4nvf4".
      a, b, d: dtypes. m, n: of the product, over both blocks.
      sparse: of a sparse A: which column of a pair has its metadata; else None.
      scale: the dtype of the scales. ids: which bytes of a cell hold those of A and of B.
    """
    types = _TYPES[kind]
    word = (
        (0 if sparse is None else 4 | sparse)
        | types[a] << 7
        | types[b] << 10
        | a_mn_major << 15
        | b_mn_major << 16
        | n >> 3 << 17
    )
    if scale is None:
        return word | saturate << 3 | _ACCUMULATORS[d] << 4 | m >> 4 << 24
    word |= (scale == "float8_e8m0fnu") << 23 | m >> 7 << 27
    return word | ids[1] << 4 | ids[0] << 29


def kind_of(a: str, scale: str | None) -> str:
    """The `.kind` of a product of operands of a dtype."""
    if scale is not None:
        if a != "float4_e2m1fn":
            return "mxf8f6f4"
        return "mxf4" if scale == "float8_e8m0fnu" else "mxf4nvf4"
    return {"float16": "f16", "bfloat16": "f16", "float32": "tf32", "int8": "i8", "uint8": "i8"}.get(a, "f8f6f4")


def smem_of(operand: Any) -> bool:
    """Whether an operand is a view of shared memory."""
    return bool(getattr(getattr(operand, "ref", None), "in_smem", False))
