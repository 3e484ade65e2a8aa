"""Integers and bits: what PTX has and NumPy has not. Functions of lane arrays (or NumPy scalars) of one type.

Source: PTX ISA manual, "Integer Arithmetic Instructions", "Logic and Shift Instructions", "prmt".
"""

from __future__ import annotations

import numpy as np

from palladion.emulator.lane_types import UNSIGNED, Array, i1, i8, u1, u2, u4, u8

_LOW = u8(0xFFFFFFFF)
_ALL = u8(0xFFFFFFFFFFFFFFFF)


def mul_hi(a: Array, b: Array) -> Array:
    """The upper half of products."""
    size = a.dtype.itemsize
    if size < 8:
        wide = i8 if a.dtype.kind == "i" else u8
        return (a.astype(wide) * b.astype(wide) >> wide(8 * size)).astype(a.dtype)
    x, y = a.view(u8), b.view(u8)
    x0, x1, y0, y1 = x & _LOW, x >> u8(32), y & _LOW, y >> u8(32)
    middle = x1 * y0 + (x0 * y0 >> u8(32))
    other = x0 * y1 + (middle & _LOW)
    high = x1 * y1 + (middle >> u8(32)) + (other >> u8(32))
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, u8(0)) - np.where(b < 0, x, u8(0))
    return high.view(a.dtype)


def divide(a: Array, b: Array) -> Array:
    """Quotients towards zero; by zero all bits are one, as hardware gives."""
    zero = b == 0
    if zero.any():
        b = np.where(zero, b.dtype.type(1), b)
    q = a // b
    if a.dtype.kind == "i":  # from the floor to zero
        q = q + ((q * b != a) & ((a ^ b) < 0))
    return np.where(zero, ~a.dtype.type(0), q).astype(a.dtype) if zero.any() else q.astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """Remainders with the sign of the dividend; by zero the dividend."""
    zero = b == 0
    if zero.any():
        b = np.where(zero, b.dtype.type(1), b)
    r = a - divide(a, b) * b
    return np.where(zero, a, r).astype(a.dtype) if zero.any() else r.astype(a.dtype)


def saturated(text: str, a: Array, b: Array) -> Array:
    """`add.sat.s32`, `sub.sat.s32`."""
    wide = a.astype(i8) + b.astype(i8) if text == "add" else a.astype(i8) - b.astype(i8)
    info = np.iinfo(a.dtype)
    return np.clip(wide, info.min, info.max).astype(a.dtype)


def mul24(a: Array, b: Array, high: bool) -> Array:
    """Products of the low 24 bits: bits 0..31 or 16..47."""
    eight = a.dtype.type(8)
    x, y = ((n << eight) >> eight for n in (a, b))
    wide = i8 if a.dtype.kind == "i" else u8
    product = x.astype(wide) * y.astype(wide)
    return (product >> wide(16) if high else product).astype(a.dtype)


def with_carry(a: Array, b: Array, carry: Array | None, add: bool) -> tuple[Array, Array]:
    """Unsigned sums or differences with a carry (borrow), and the carry out."""
    c = a.dtype.type(0) if carry is None else carry.astype(a.dtype)
    if add:
        s = a + b
        total = s + c
        return total, (s < a) | (total < s)
    s = a - b
    return s - c, (a < b) | (s < c)


def shift_left(a: Array, b: Array) -> Array:
    """Shifts by any amount; from the width on everything is gone."""
    bits = 8 * a.dtype.itemsize
    return np.where(b >= bits, a.dtype.type(0), a << (b & u4(bits - 1)).astype(a.dtype))


def shift_right(a: Array, b: Array) -> Array:
    """The same to the right: signs or zeros come in."""
    bits = 8 * a.dtype.itemsize
    if a.dtype.kind == "i":
        return a >> np.minimum(b, u4(bits - 1)).astype(a.dtype)
    return np.where(b >= bits, a.dtype.type(0), a >> (b & u4(bits - 1)).astype(a.dtype))


def funnel(low: Array, high: Array, c: Array, right: bool, wrap: bool) -> Array:
    """`shf`: 32 bits of 64, moved by c (modulo 32, or at most 32)."""
    amount = (c & u4(31) if wrap else np.minimum(c, u4(32))).astype(u8)
    both = high.astype(u8) << u8(32) | low.astype(u8)
    if right:
        return (both >> amount).astype(u4)
    return (both >> (u8(32) - amount)).astype(u4)


_LOP3 = {
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0xCA: lambda a, b, c: (a & b) | (~a & c),
    0xE8: lambda a, b, c: (a & b) | ((a | b) & c),
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
    0x6A: lambda a, b, c: (a & b) ^ c,
}


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any function of three bits: bit 4a+2b+c of the table."""
    if table in _LOP3:
        return _LOP3[table](a, b, c)
    result = (a ^ a) | (b ^ b) | (c ^ c)
    for k in range(8):
        if table >> k & 1:
            result = result | (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return result


def popcount(x: Array) -> Array:
    return np.bitwise_count(x).astype(u4)


def bit_length(x: Array) -> Array:
    """Bits up to the highest one."""
    found = np.zeros(np.shape(x), u4)
    step = 4 * x.dtype.itemsize
    while step:
        big = x >= x.dtype.type(1) << x.dtype.type(step)
        found = found + np.where(big, u4(step), u4(0))
        x = np.where(big, x >> x.dtype.type(step), x)
        step //= 2
    return (found + (x > 0)).astype(u4)


def leading_zeros(x: Array) -> Array:
    return u4(8 * x.dtype.itemsize) - bit_length(x)


def find_top(x: Array, shift: bool) -> Array:
    """`bfind`: position of the highest bit that is no sign (or how far it is from the top); none: all ones."""
    bits = 8 * x.dtype.itemsize
    if x.dtype.kind == "i":
        x = np.where(x < 0, ~x, x)
    top = bit_length(x.view(UNSIGNED[x.dtype.itemsize])).astype(i8) - 1
    return np.where(top < 0, 0xFFFFFFFF, bits - 1 - top if shift else top).astype(u4)


def reverse_bits(x: Array) -> Array:
    kind, half = x.dtype.type, 4 * x.dtype.itemsize
    while half:
        mask = kind(sum(((1 << half) - 1) << k for k in range(0, 8 * x.dtype.itemsize, 2 * half)))
        x = ((x >> kind(half)) & mask) | ((x & mask) << kind(half))
        half //= 2
    return x


def _ones(count: Array) -> Array:
    """Numbers with this many low bits set."""
    return np.where(count >= 64, _ALL, (u8(1) << np.minimum(count, u8(63))) - u8(1))


def extract(a: Array, b: Array, c: Array) -> Array:
    """`bfe`: c bits of a from bit b on, with the sign of the last that there is."""
    bits = 8 * a.dtype.itemsize
    raw = a.view(UNSIGNED[a.dtype.itemsize])
    start, length = (b & u4(0xFF)).astype(u8), (c & u4(0xFF)).astype(u8)
    wide = raw.astype(u8)
    moved = np.where(start >= 64, u8(0), wide >> np.minimum(start, u8(63)))
    have = np.where(start >= bits, u8(0), np.minimum(length, u8(bits) - np.minimum(start, u8(bits))))
    found = moved & _ones(have)
    if a.dtype.kind == "i":
        last = np.minimum(start + np.maximum(length, u8(1)) - u8(1), u8(bits - 1))
        negative = (length > 0) & ((wide >> last & u8(1)) != 0)
        found = np.where(negative, found | ~_ones(have), found)
    return found.astype(raw.dtype).view(a.dtype)


def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
    """`bfi`: d low bits of a into b from bit c on."""
    bits = 8 * a.dtype.itemsize
    start, length = (c & u4(0xFF)).astype(u8), (d & u4(0xFF)).astype(u8)
    at = np.minimum(start, u8(63))
    mask = np.where(start >= bits, u8(0), _ones(length) << at)
    return ((b.astype(u8) & ~mask) | (a.astype(u8) << at & mask)).astype(a.dtype)


def permute(a: Array, b: Array, c: Array, mode: str) -> Array:
    """`prmt`: each byte of the result is one of the eight of a and b, or copies of its sign."""
    a, b, c = np.broadcast_arrays(a, b, c)
    source = np.stack([a, b], -1).view(u1)
    low = (c & u4(3)).astype(i8)
    chosen = {
        "": lambda k: (c >> u4(4 * k) & u4(15)).astype(i8),
        "f4e": lambda k: low + k,
        "b4e": lambda k: (low - k) % 8,
        "rc8": lambda k: low,
        "ecl": lambda k: np.maximum(low, k),
        "ecr": lambda k: np.minimum(low, k),
        "rc16": lambda k: (low & 1) * 2 + (k & 1),
    }[mode]
    select = np.stack([chosen(k) for k in range(4)], -1)
    found = np.take_along_axis(source, select & 7, -1)
    if mode == "":
        found = np.where(select & 8, np.where(found & 0x80, u1(0xFF), u1(0)), found)
    return np.ascontiguousarray(found).view(u4)[..., 0]


def absolute_difference(a: Array, b: Array, c: Array) -> Array:
    """`sad`."""
    return c + np.where(a > b, a - b, b - a)


def dot4(a: Array, b: Array, c: Array, first: str, second: str) -> Array:
    """`dp4a`: four products of bytes, added to c."""
    x = np.ascontiguousarray(a).view(i1 if first == "s32" else u1).reshape(-1, 4).astype(i8)
    y = np.ascontiguousarray(b).view(i1 if second == "s32" else u1).reshape(-1, 4).astype(i8)
    return ((x * y).sum(1) + c.astype(i8)).astype(c.dtype)


def dot2(a: Array, b: Array, c: Array, first: str, second: str, high: bool) -> Array:
    """`dp2a`: two products of halves of a and bytes of b (its low or high ones), added to c."""
    x = np.ascontiguousarray(a).view(np.int16 if first == "s32" else u2).reshape(-1, 2).astype(i8)
    y = np.ascontiguousarray(b).view(i1 if second == "s32" else u1).reshape(-1, 4).astype(i8)
    return ((x * (y[:, 2:] if high else y[:, :2])).sum(1) + c.astype(i8)).astype(c.dtype)
