"""Layouts of operands of matrix instructions in registers: A of `wgmma`, A and B of `mma.sync`.

Accumulators of both are `fragments.wgmma`. A lies alike for both: of 16 bits as an accumulator of K columns.

Source: PTX ISA, register fragments of wgmma and mma.m16n8k*; facts file, sections 4.5 and 9.1.
"""

from __future__ import annotations

from palladion.compiler.gpu import fragments
from palladion.compiler.gpu.fragments import Digit, Fragments


def left(shape: tuple[int, int], bits: int) -> Fragments:
    """The registers of A (M, K), four of 32 bits for each 16 rows of a warp and each 32 bytes of K."""
    m, k = shape
    if bits == 16:
        return fragments.wgmma(shape)
    if bits == 8:
        return fragments.wgmma_narrow(shape, 4, "WGMMA_8BIT")
    return Fragments(
        (m, k),
        (Digit(m // 64, 0, 64), Digit(k // 4, 1, 4), Digit(2, 0, 8)),
        (Digit(4, 0, 16), Digit(8, 0, 1), Digit(4, 1, 1)),
        name="MMA_LHS",
    )


def right(shape: tuple[int, int], bits: int) -> Fragments:
    """The registers of B (K, N) of `mma.sync`: every warp has all of it."""
    k, n = shape
    each = 32 // bits
    registers = (Digit(n // 8, 1, 8), Digit(k // (8 * each), 0, 8 * each), Digit(2, 0, 4 * each), Digit(each, 0, 1))
    return Fragments((k, n), registers, (Digit(4, None), Digit(8, 1, 1), Digit(4, 0, each)), name="MMA_RHS")


def left_if_it_fits(shape: tuple[int, ...], bits: int) -> Fragments | None:
    """`left`, or None: the sizes are no multiples of an instruction's."""
    fits = len(shape) == 2 and bits >= 8 and shape[0] % 64 == 0 and shape[1] * bits % 256 == 0 and all(shape)
    return left((shape[0], shape[1]), bits) if fits else None


def right_if_it_fits(shape: tuple[int, ...], bits: int) -> Fragments | None:
    """`right`, or None: the sizes are no multiples of an instruction's."""
    fits = len(shape) == 2 and bits >= 8 and shape[0] * bits % 256 == 0 and shape[1] % 8 == 0 and all(shape)
    return right((shape[0], shape[1]), bits) if fits else None
