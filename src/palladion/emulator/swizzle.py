"""Where a shared-memory byte goes under a TMA swizzle: functions of the address alone.

A swizzle is an exclusive-or of some address bits into lower ones, taken from the *final* address inside the
CTA's window (not from the offset in the tile), so a tile may begin anywhere in the pattern. All of them are
their own inverse. Facts file, section 3 (PTX manual, "swizzling modes").
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Swizzle:
    """One mode: XOR bits `[low, low + bits)` of an address with the same number of bits, `shift` above.

    `span` is the widest row in bytes (box's inner dimension), `period` how many bytes until the pattern
    repeats, `flip` whether the two 8-byte halves of a 16-byte chunk swap on odd 128-byte lines."""

    name: str
    bits: int
    low: int
    shift: int
    span: int
    period: int
    flip: bool = False


NONE = Swizzle("none", 0, 4, 3, 0, 16)
SWIZZLES = {
    0: NONE,
    1: Swizzle("32B", 1, 4, 3, 32, 256),
    2: Swizzle("64B", 2, 4, 3, 64, 512),
    3: Swizzle("128B", 3, 4, 3, 128, 1024),
    4: Swizzle("128B_ATOM_32B", 2, 5, 2, 128, 512),
    # The parity of the lines that flip is not documented; odd lines is the reading used here.
    5: Swizzle("128B_ATOM_32B_FLIP_8B", 2, 5, 2, 128, 512, flip=True),
    6: Swizzle("128B_ATOM_64B", 1, 6, 1, 128, 256),
}
"""Modes by the number that the CUDA driver's `CUtensorMapSwizzle` gives them."""


def swizzle_address(address, mode: Swizzle):
    """The byte address at which a swizzled tile keeps what linearly belongs at `address`.

    Arguments: address: int or integer array, byte addresses in a CTA's shared window; mode: the swizzle.
    Returns: the same shape and type."""
    if mode.bits == 0:
        return address
    mask = ((1 << mode.bits) - 1) << mode.low
    swizzled = address ^ ((address >> mode.shift) & mask)
    if mode.flip:
        swizzled = swizzled ^ (((address >> 7) & 1) << 3)
    return swizzled
