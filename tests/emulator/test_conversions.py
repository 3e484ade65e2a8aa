"""`cvt` bit by bit: all values of the small formats, and edges of the large ones, against exact fractions."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from emulator.lane_values import ALL, DOUBLES, EDGES, FLOATS, INTS, bf16, bits, e4m3, e5m2, rng, same
from emulator.running import apply


@pytest.mark.parametrize("kind, dtype", [("f16", np.dtype("f2")), ("bf16", np.dtype(bf16))])
def test_all_halves_widen_exactly(kind, dtype):
    same(apply(f"cvt.f32.{kind} %d, %a;", ALL, out="f4"), ALL.view(dtype).astype("f4"))
    if kind == "f16":
        same(apply("cvt.f64.f16 %d, %a;", ALL, out="f8"), ALL.view(dtype).astype("f8"))


@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64", "s8", "u8"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_all_halves_as_integers(to, mode):
    size = int(to[1:]) // 8
    dtype = np.dtype(f"{'i' if to[0] == 's' else 'u'}{size}")
    if size == 1:
        got = apply(f"cvt.{mode}.{to}.f16 %t0, %a; cvt.u32.u32 %d, %t0;", ALL, out="u4").astype("u1").view(dtype)
    else:
        got = apply(f"cvt.{mode}.{to}.f16 %d, %a;", ALL, out=dtype)
    x = ALL.view("f2").astype("f8")
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)
    info, finite = np.iinfo(dtype), np.isfinite(x)
    want = [min(max(int(v), info.min), info.max) for v in whole[finite]]
    np.testing.assert_array_equal(got[finite], np.array(want, dtype))
    np.testing.assert_array_equal(got[x == np.inf], info.max)
    np.testing.assert_array_equal(got[x == -np.inf], info.min)


FORMATS = {"f16": ("f2", 11, -14), "bf16": (bf16, 8, -126), "f32": ("f4", 24, -126)}
"""dtype, bits of the significand, and exponent of the smallest normal number."""


def once(values, kind, mode):
    """Doubles rounded once to a format, by their fractions."""
    dtype, precision, least = FORMATS[kind]
    top, found = float(ml_dtypes.finfo(dtype).max), []
    for x in values.astype("f8").tolist():
        if x != x or x in (0, np.inf, -np.inf):
            found.append(x)
            continue
        exponent = max(int(np.frexp(x)[1]) - 1, least)
        unit = Fraction(2) ** (exponent - precision + 1)
        whole, rest = divmod(abs(Fraction(x)), unit)
        up = {"rz": False, "rm": x < 0, "rp": x > 0}.get(mode, rest * 2 > unit or (rest * 2 == unit and whole % 2))
        size = (whole + (1 if up and rest else 0)) * unit
        if size > top:
            size = top if mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0) else np.inf
        found.append(float(np.copysign(float(size), x)))
    return np.array(found).astype("f4").astype(dtype)


SOME = np.concatenate([EDGES, FLOATS[len(EDGES) : len(EDGES) + 400], FLOATS[-200:]])


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind, dtype", [("f16", "f2"), ("bf16", bf16)])
def test_floats_as_halves(kind, dtype, mode):
    got = apply(f"cvt.{mode}.{kind}.f32 %d, %a;", SOME, out=dtype)
    same(got, once(SOME, kind, mode))
    relu = apply(f"cvt.{mode}.relu.{kind}.f32 %d, %a;", SOME, out=dtype)
    want = np.where(SOME < 0, np.zeros(1, dtype), got).astype(dtype)
    np.testing.assert_array_equal(relu.astype("f4")[SOME != 0], want.astype("f4")[SOME != 0])
    nan = apply(f"cvt.{mode}.{kind}.f32 %d, %a;", np.array([np.nan], "f4"), out="u2")
    assert nan[0] == 0x7FFF


def test_rounding_to_nearest_of_many_floats():
    x = np.concatenate(
        [FLOATS, (ALL.astype("u4") << 16 | 0x8000).view("f4"), (ALL.astype("u4") << 16 | 0x8001).view("f4")]
    )
    same(apply("cvt.rn.bf16.f32 %d, %a;", x, out=bf16), x.astype(bf16))
    same(apply("cvt.rn.f16.f32 %d, %a;", x, out="f2"), x.astype("f2"))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_doubles_as_floats(mode):
    x = np.concatenate([DOUBLES[: len(EDGES)], DOUBLES[len(EDGES) : len(EDGES) + 300], DOUBLES[-7:]])
    same(apply(f"cvt.{mode}.f32.f64 %d, %a;", x, out="f4"), once(x, "f32", mode))
    if mode == "rn":
        same(apply("cvt.rn.f16.f64 %d, %a;", x, out="f2"), x.astype("f2"))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_integers_as_floats(source, mode):
    dtype = np.dtype(f"{'i' if source[0] == 's' else 'u'}{int(source[1:]) // 8}")
    x = INTS.view("i4")[:200].astype(dtype)
    if dtype.itemsize == 8:
        x = np.concatenate(
            [
                x,
                rng.integers(0, 1 << 64, 200, dtype="u8").view(dtype),
                np.array([(1 << 60) + 1, (1 << 54) + 3, (1 << 40) + 1], dtype),
            ]
        )
    got = apply(f"cvt.{mode}.f32.{source} %d, %a;", x, out="f4")
    for v, g in zip(x.tolist(), got.tolist()):
        near = np.float32(v)
        exact, other = Fraction(v), Fraction(float(near))
        if mode == "rn":
            assert g == float(near), v
            continue
        down = {"rm": True, "rp": False, "rz": v >= 0}[mode]
        if other > exact and down:
            near = np.nextafter(near, np.float32(-np.inf))
        if other < exact and not down:
            near = np.nextafter(near, np.float32(np.inf))
        assert g == float(near), (v, mode)
    if mode == "rn":
        same(apply(f"cvt.rn.f64.{source} %d, %a;", x, out="f8"), x.astype("f8"))


@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64", "s16", "u8"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_as_integers(source, to, mode):
    x = FLOATS[:600] if source == "f32" else DOUBLES[:600]
    x = x[~np.isnan(x)]
    size = int(to[1:]) // 8
    dtype = np.dtype(f"{'i' if to[0] == 's' else 'u'}{size}")
    got = apply(f"cvt.{mode}.{to}.{source} %d, %a;", x, out=f"{dtype.kind}{max(size, 2)}")
    info = np.iinfo(dtype)
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x.astype("f8"))
    limit = [
        info.max if v == np.inf else info.min if v == -np.inf else min(max(int(v), info.min), info.max) for v in whole
    ]
    np.testing.assert_array_equal(got.astype(dtype), np.array(limit, dtype))
    zero = apply(f"cvt.{mode}.{to}.f32 %d, %a;", np.array([np.nan], "f4"), out=f"{dtype.kind}{max(size, 2)}")
    assert size == 8 or zero[0] == 0


def test_integers_narrow_and_saturate():
    x = INTS.view("i4")
    for to, dtype in (("s8", "i1"), ("u8", "u1"), ("s16", "i2"), ("u16", "u2")):
        info = np.iinfo(dtype)
        got = apply(f"cvt.sat.{to}.s32 %d, %a;", x, out="u2").astype(dtype)
        np.testing.assert_array_equal(got, np.clip(x, info.min, info.max).astype(dtype), err_msg=to)
        wrapped = apply(f"cvt.{to}.s32 %d, %a;", x, out="u2").astype(dtype)
        np.testing.assert_array_equal(wrapped, x.astype(dtype))
    np.testing.assert_array_equal(apply("cvt.sat.u32.s32 %d, %a;", x, out="u4"), np.maximum(x, 0).astype("u4"))
    np.testing.assert_array_equal(
        apply("cvt.sat.s32.u32 %d, %a;", INTS, out="i4"), np.minimum(INTS, 0x7FFFFFFF).astype("i4")
    )
    low = INTS.astype("u2")
    np.testing.assert_array_equal(apply("cvt.s32.s16 %d, %a;", low, out="i4"), low.view("i2").astype("i4"))
    np.testing.assert_array_equal(
        apply("cvt.s64.s8 %d, %a;", INTS, out="i8"), INTS.astype("u1").view("i1").astype("i8")
    )
    np.testing.assert_array_equal(apply("cvt.u64.u32 %d, %a;", INTS, out="u8"), INTS.astype("u8"))


def test_rounding_to_whole_floats_and_saturation():
    for mode, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        same(apply(f"cvt.{mode}.f32.f32 %d, %a;", FLOATS, out="f4"), function(FLOATS))
        same(apply(f"cvt.{mode}.f16.f16 %d, %a;", ALL, out="f2"), function(ALL.view("f2")))
        same(apply(f"cvt.{mode}.f64.f64 %d, %a;", DOUBLES, out="f8"), function(DOUBLES))
    x = FLOATS[~np.isnan(FLOATS)]
    np.testing.assert_array_equal(apply("cvt.sat.f32.f32 %d, %a;", x, out="f4"), np.clip(x, 0, 1))
    np.testing.assert_array_equal(apply("add.sat.f32 %d, %a, %a;", np.array([np.nan], "f4"), out="f4"), [0])
    np.testing.assert_array_equal(
        apply("add.sat.s32 %d, %a, %b;", *np.array([[1 << 31, 2**31 - 1, 5], [1 << 31, 1, 6]], "u4"), out="i4"),
        [-(2**31), 2**31 - 1, 11],
    )


def test_subnormals_are_flushed_when_asked_for():
    tiny = np.array([1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, -1.1754942e-38], "f4")
    want = np.array([0, -0.0, 0, 1.1754944e-38, -0.0], "f4")
    same(
        apply("add.ftz.f32 %d, %a, %b;", tiny, np.full(5, -0.0, "f4"), out="f4"),
        np.array([0, -0.0, 0, 1.1754944e-38, -0.0], "f4"),
    )
    same(apply("mul.ftz.f32 %d, %a, %b;", tiny, np.ones(5, "f4"), out="f4"), want)
    same(apply("mul.f32 %d, %a, %b;", tiny, np.ones(5, "f4"), out="f4"), tiny)
    same(apply("cvt.ftz.f32.f16 %d, %a;", np.array([1], "u2"), out="f4"), np.array([2.0**-24], "f4"))
    got = apply("mul.ftz.f32 %d, %a, %b;", np.array([1.1754944e-38], "f4"), np.array([0.5], "f4"), out="f4")
    same(got, np.array([0], "f4"))


def test_8_bit_floats():
    low, high = ALL.astype("u1"), (ALL >> 8).astype("u1")
    for kind, dtype in (("e4m3x2", e4m3), ("e5m2x2", e5m2)):
        pair = apply(f"cvt.rn.f16x2.{kind} %d, %a;", ALL, out="u4")
        same(pair.astype("u2").view("f2"), low.view(dtype).astype("f2"))
        same((pair >> 16).astype("u2").view("f2"), high.view(dtype).astype("f2"))
        top = float(ml_dtypes.finfo(dtype).max)
        x = np.concatenate([FLOATS, np.linspace(-600, 600, 999, dtype="f4"), ALL.view("f2").astype("f4")])
        y = x[::-1].copy()
        packed = apply(f"cvt.rn.satfinite.{kind}.f32 %d, %a, %b;", x, y, out="u2")
        for got, value in ((packed >> 8, x), (packed & 0xFF, y)):
            want = np.clip(value, -top, top).astype(dtype)
            nan = np.isnan(value)
            np.testing.assert_array_equal(got.astype("u1")[~nan], want.view("u1")[~nan])
            np.testing.assert_array_equal(got[nan], 0x7F)
        halves = ALL.astype("u4") | ALL[::-1].astype("u4") << 16
        packed = apply(f"cvt.rn.satfinite.{kind}.f16x2 %d, %a;", halves, out="u2")
        value = ALL.view("f2").astype("f4")
        nan = np.isnan(value)
        np.testing.assert_array_equal((packed & 0xFF)[~nan], np.clip(value, -top, top).astype(dtype).view("u1")[~nan])
        np.testing.assert_array_equal((packed & 0xFF)[nan], 0x7F)


def test_pairs_of_halves():
    x, y = FLOATS, FLOATS[::-1].copy()
    for kind, dtype in (("f16x2", "f2"), ("bf16x2", bf16)):
        got = apply(f"cvt.rn.{kind}.f32 %d, %a, %b;", x, y, out="u4")
        same((got >> 16).astype("u2").view(dtype), x.astype(dtype))
        same(got.astype("u2").view(dtype), y.astype(dtype))


def test_tf32():
    x = FLOATS[np.isfinite(FLOATS) & (abs(FLOATS) < 1e38)]
    got = apply("cvt.rna.tf32.f32 %d, %a;", x, out="u4")
    away = (bits(x).astype("u8") + 0x1000).astype("u4") & 0xFFFFE000  # half a unit more, in sign and magnitude
    np.testing.assert_array_equal(got & 0xFFFFE000, away)
    got = apply("cvt.rn.tf32.f32 %d, %a;", x, out="u4")
    b = bits(x).astype("u8")
    even = ((b + 0xFFF + ((b >> 13) & 1)) & 0xFFFFE000).astype("u4")
    np.testing.assert_array_equal(got & 0xFFFFE000, even)
