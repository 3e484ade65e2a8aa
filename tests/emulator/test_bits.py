# ruff: noqa: E501 (an instruction and what it should give, in one line)
"""Integers and bits of lanes, one instruction of PTX at a time, against Python's integers."""

import numpy as np
import pytest

from emulator.lane_values import INTS, rng
from emulator.running import apply


def test_bit_fields():
    a, start, length = INTS[:1500], rng.integers(0, 40, 1500, dtype="u4"), rng.integers(0, 40, 1500, dtype="u4")
    signed = apply("bfe.s32 %d, %a, %b, %c;", a, start, length, out="u4")
    plain = apply("bfe.u32 %d, %a, %b, %c;", a, start, length, out="u4")
    put = apply("bfi.b32 %d, %a, %b, %c, %t0;".replace("%t0", "7"), a, a[::-1].copy(), start, out="u4")
    for k, (x, s, n) in enumerate(zip(a.tolist(), start.tolist(), length.tolist())):
        field = (x >> s) & ((1 << n) - 1)
        assert plain[k] == field
        # the sign is the field's last bit, or the number's where the field reaches past it
        sign = (x >> min(s + n - 1, 31)) & 1 if n else 0
        want = [x >> p & 1 if p < 32 and p < s + n else sign for p in range(s, s + 32)]
        assert signed[k] == sum(bit << j for j, bit in enumerate(want))
        other, mask = int(a[::-1][k]), (127 << s) & 0xFFFFFFFF
        assert put[k] == (other if s > 31 else (other & ~mask) | (x << s & mask))


def test_counts_and_permutations():
    for kind, x in (("32", INTS), ("64", INTS.astype("u8") << np.uint64(32) | INTS[::-1])):
        width = int(kind)
        text = [format(v, f"0{width}b") for v in x.tolist()]
        np.testing.assert_array_equal(apply(f"popc.b{kind} %d, %a;", x, out="u4"), [t.count("1") for t in text])
        np.testing.assert_array_equal(
            apply(f"clz.b{kind} %d, %a;", x, out="u4"), [len(t) - len(t.lstrip("0")) for t in text]
        )
        np.testing.assert_array_equal(
            apply(f"brev.b{kind} %d, %a;", x, out=x.dtype), np.array([int(t[::-1], 2) for t in text], x.dtype)
        )
        top = [v.bit_length() - 1 for v in x.tolist()]
        np.testing.assert_array_equal(apply(f"bfind.u{kind} %d, %a;", x, out="u4"), np.array(top, "i8").astype("u4"))
        negative = [(v if v >> (width - 1) == 0 else ~v & ((1 << width) - 1)).bit_length() - 1 for v in x.tolist()]
        np.testing.assert_array_equal(
            apply(f"bfind.s{kind} %d, %a;", x, out="u4"), np.array(negative, "i8").astype("u4")
        )
        shift = [0xFFFFFFFF if t < 0 else width - 1 - t for t in top]
        np.testing.assert_array_equal(apply(f"bfind.shiftamt.u{kind} %d, %a;", x, out="u4"), np.array(shift, "u4"))
    a, b, c = INTS[:800], INTS[800:1600], INTS[1000:1800]
    data = np.concatenate([a.view("u1").reshape(-1, 4), b.view("u1").reshape(-1, 4)], 1)

    def picked(select, copies=None):
        found = np.take_along_axis(data, select & 7, 1)
        return found if copies is None else np.where(copies, np.where(found & 128, 255, 0), found).astype("u1")

    nibbles = np.stack([c >> (4 * k) & 15 for k in range(4)], 1).astype("i8")
    low = (c & 3).astype("i8")[:, None]
    k = np.arange(4)
    want = {"": picked(nibbles, nibbles & 8), ".f4e": picked(low + k), ".b4e": picked((low - k) % 8), ".rc8": picked(low + 0 * k),
            ".ecl": picked(np.maximum(low, k)), ".ecr": picked(np.minimum(low, k)), ".rc16": picked((low & 1) * 2 + (k & 1))}  # fmt: skip
    for mode, bytes_ in want.items():
        got = apply(f"prmt.b32{mode} %d, %a, %b, %c;", a, b, c, out="u4")
        np.testing.assert_array_equal(got, np.ascontiguousarray(bytes_).view("u4").ravel(), err_msg=mode)


@pytest.mark.parametrize("table", [0, 0x80, 0x96, 0xE8, 0xCA, 0x1B, 0xFF])
def test_three_input_logic(table):
    a, b, c = INTS[:500], INTS[500:1000], INTS[1000:1500]
    want = np.zeros(500, "u4")
    for k in range(32):
        index = (a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)
        want |= (np.uint32(table) >> index & 1) << np.uint32(k)
    np.testing.assert_array_equal(apply(f"lop3.b32 %d, %a, %b, %c, {table};", a, b, c, out="u4"), want)


def test_shifts_past_the_width():
    a, by = INTS[:1500], rng.integers(0, 70, 1500, dtype="u4")
    wide = by.astype("u8")
    np.testing.assert_array_equal(
        apply("shl.b32 %d, %a, %b;", a, by, out="u4"), np.where(by > 31, 0, a.astype("u8") << (wide & 31)).astype("u4")
    )
    np.testing.assert_array_equal(apply("shr.u32 %d, %a, %b;", a, by, out="u4"), np.where(by > 31, 0, a >> (by & 31)))
    np.testing.assert_array_equal(
        apply("shr.s32 %d, %a, %b;", a, by, out="i4"), a.view("i4") >> np.minimum(by, 31).astype("i4")
    )
    np.testing.assert_array_equal(
        apply("shr.s64 %d, %a, %b;", a.astype("u8") << np.uint64(32), by, out="i8"),
        (a.astype("u8") << np.uint64(32)).view("i8") >> np.minimum(by, 63).astype("i8"),
    )
    np.testing.assert_array_equal(
        apply("shl.b16 %d, %a, %b;", a.astype("u2"), by, out="u2"), np.where(by > 15, 0, a << (by & 15)).astype("u2")
    )
    both = a.astype("u8") | a[::-1].astype("u8") << np.uint64(32)
    clamp, wrap = np.minimum(wide, 32), wide & np.uint64(31)
    for mode, n in (("clamp", clamp), ("wrap", wrap)):
        right = apply(f"shf.r.{mode}.b32 %d, %a, %b, %c;", a, a[::-1].copy(), by, out="u4")
        np.testing.assert_array_equal(right, (both >> n).astype("u4"))
        left = apply(f"shf.l.{mode}.b32 %d, %a, %b, %c;", a, a[::-1].copy(), by, out="u4")
        np.testing.assert_array_equal(left, np.where(n == 32, a, (both << n) >> np.uint64(32)).astype("u4"))


def test_carries():
    a, b = INTS[:1000].astype("u8"), INTS[1000:2000].astype("u8")
    x, y = a << np.uint64(32) | b[::-1], b << np.uint64(32) | a[::-1]
    split = "mov.b64 {%t0, %t1}, %a; mov.b64 {%t2, %t3}, %b;"
    got = apply(split + "add.cc.u32 %t4, %t0, %t2; addc.u32 %t5, %t1, %t3; mov.b64 %d, {%t4, %t5};", x, y, out="u8")
    np.testing.assert_array_equal(got, x + y)
    got = apply(split + "sub.cc.u32 %t4, %t0, %t2; subc.u32 %t5, %t1, %t3; mov.b64 %d, {%t4, %t5};", x, y, out="u8")
    np.testing.assert_array_equal(got, x - y)
    text = (
        split
        + """mul.lo.u32 %t4, %t0, %t2; mul.hi.u32 %t5, %t0, %t2; mad.lo.cc.u32 %t5, %t0, %t3, %t5; madc.hi.u32 %t6, %t0, %t3, 0;
      mad.lo.cc.u32 %t5, %t1, %t2, %t5; madc.hi.u32 %t6, %t1, %t2, %t6; mov.b64 %d, {%t4, %t5};"""
    )
    np.testing.assert_array_equal(apply(text, x, y, out="u8"), x * y)
    got = apply("add.cc.u64 %w0, %a, %b; addc.u64 %d, 0, 0;", x, y, out="u8")
    np.testing.assert_array_equal(got, x + y < x)


def test_products():
    a, b = INTS[:1000], INTS[1000:2000]
    p, q = a.view("i4").astype("i8"), b.view("i4").astype("i8")
    np.testing.assert_array_equal(apply("mul.wide.s32 %d, %a, %b;", a, b, out="i8"), p * q)
    np.testing.assert_array_equal(
        apply("mad.wide.u32 %d, %a, %b, %w0;".replace("%w0", "5"), a, b, out="u8"), a.astype("u8") * b + np.uint64(5)
    )
    np.testing.assert_array_equal(
        apply("mul.wide.u16 %d, %a, %b;", a.astype("u2"), b.astype("u2"), out="u4"),
        a.astype("u2").astype("u4") * b.astype("u2"),
    )
    np.testing.assert_array_equal(apply("mad.hi.s32 %d, %a, %b, 3;", a, b, out="i4"), ((p * q >> 32) + 3).astype("i4"))
    np.testing.assert_array_equal(
        apply("mul.hi.u16 %d, %a, %b;", a.astype("u2"), b.astype("u2"), out="u2"),
        a.astype("u2").astype("u4") * b.astype("u2") >> 16,
    )
    low = [x.astype("i4") << 8 >> 8 for x in (a.view("i4"), b.view("i4"))]
    np.testing.assert_array_equal(
        apply("mul24.hi.s32 %d, %a, %b;", a, b, out="i4"), (low[0].astype("i8") * low[1] >> 16).astype("i4")
    )
    np.testing.assert_array_equal(
        apply("mad24.lo.u32 %d, %a, %b, 9;", a, b, out="u4"),
        ((a & 0xFFFFFF).astype("u8") * (b & 0xFFFFFF) + 9).astype("u4"),
    )
    halves = a.view("i2").reshape(-1, 2).astype("i8")
    octets = b.view("u1").reshape(-1, 4).astype("i8")
    np.testing.assert_array_equal(
        apply("dp2a.hi.s32.u32 %d, %a, %b, 7;", a, b, out="i4"), ((halves * octets[:, 2:]).sum(1) + 7).astype("i4")
    )
    np.testing.assert_array_equal(apply("abs.s32 %d, %a; neg.s32 %d, %d;", a, out="i4"), -abs(a.view("i4")))
    np.testing.assert_array_equal(apply("cnot.b32 %d, %a;", np.array([0, 5, 1 << 31], "u4"), out="u4"), [1, 0, 0])
    np.testing.assert_array_equal(
        apply("max.s16x2 %d, %a, %b;", a, b, out="u4"), np.maximum(a.view("i2"), b.view("i2")).view("u4")
    )
