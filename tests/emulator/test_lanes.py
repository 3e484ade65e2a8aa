# ruff: noqa: E501 (an instruction and what it should give, in one line)
"""Arithmetic of lanes bit by bit, one instruction of PTX at a time, against NumPy, ml_dtypes and exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from emulator.lane_values import ALL, DOUBLES, EDGES, FLOATS, INTS, bf16, bits, pairs, rng, same
from emulator.running import apply


@pytest.mark.parametrize("op, function", [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)])
def test_halves(op, function):
    a, b = pairs(ALL)
    same(apply(f"{op}.f16 %d, %a, %b;", a, b, out="f2"), function(a.view("f2"), b.view("f2")))
    same(apply(f"{op}.rn.bf16 %d, %a, %b;", a, b, out=bf16), function(a.view(bf16), b.view(bf16)))
    c, d = pairs(ALL)
    wide = apply(f"{op}.f16x2 %d, %a, %b;", a | c.astype("u4") << 16, b | d.astype("u4") << 16, out="u4")
    same((wide >> 16).astype("u2").view("f2"), function(c.view("f2"), d.view("f2")))
    same(wide.astype("u2").view("f2"), function(a.view("f2"), b.view("f2")))


def fma_exact(a, b, c, dtype):
    """Through fractions; special values through doubles."""
    found = []
    for x, y, z in zip(a.astype("f8").tolist(), b.astype("f8").tolist(), c.astype("f8").tolist()):
        if not all(np.isfinite([x, y, z])):
            found.append(np.float64(x) * np.float64(y) + np.float64(z))
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            found.append(np.float64(x) * np.float64(y) + np.float64(z) if x * y == 0 or z == 0 else 0.0)
            continue
        # to odd with 53 bits: no second rounding hurts
        near = float(exact) if abs(exact) < Fraction(2) ** 1000 else np.inf
        if Fraction(near) != exact:
            code = int(np.float64(near).view("u8"))
            code -= abs(Fraction(near)) > abs(exact)
            near = float(np.uint64(code | 1).view("f8"))
        found.append(near)
    exact = np.array(found)
    if np.dtype(dtype) == np.dtype(bf16):
        single = exact.astype("f4")
        code = bits(single).astype("i8")
        with np.errstate(all="ignore"):
            code -= np.abs(single.astype("f8")) > np.abs(exact)
            inexact = np.isfinite(exact) & (single.astype("f8") != exact)
        odd = np.where(inexact, code | 1, code).astype("u4").view("f4")
        return np.where(np.isnan(exact), np.float32(np.nan), odd).astype(bf16)
    return exact.astype(dtype)


@pytest.mark.parametrize("kind, dtype", [("f16", "f2"), ("bf16", bf16), ("f32", "f4")])
def test_fused_multiply_add_rounds_once(kind, dtype):
    if kind == "f32":
        a, b = pairs(FLOATS[: len(EDGES) + 1500])
        c = rng.choice(FLOATS, len(a))
        close = rng.standard_normal((2, 1000)).astype("f4")  # sums that almost cancel, and ties
        a, b = np.concatenate([a, close[0]]), np.concatenate([b, close[1]])
        c = np.concatenate([c, -(close[0] * close[1])])
        ties = 1 + np.arange(1, 200, dtype="f4") * np.float32(2**-23)
        a, b, c = (
            np.concatenate([a, ties]),
            np.concatenate([b, np.full(199, 1.5, "f4")]),
            np.concatenate([c, np.full(199, 2.0**-60, "f4")]),
        )
    else:
        a, b = (x.view(dtype) for x in pairs(ALL, 4000))
        c = rng.choice(ALL, 4000).view(dtype)
    with np.errstate(all="ignore"):
        want = fma_exact(a, b, c, dtype)
    same(apply(f"fma.rn.{kind} %d, %a, %b, %c;", a, b, c, out=dtype), want)


def test_fused_multiply_add_of_doubles():
    a, b = rng.standard_normal((2, 500)) * 10.0 ** rng.integers(-150, 150, (2, 500))
    c = -(a * b) * (1 + 2.0**-50 * rng.integers(-3, 3, 500))
    a, b, c = (np.concatenate([x, [y]]) for x, y in zip((a, b, c), (np.inf, 2.0, 1.0)))
    want = [math.fma(x, y, z) for x, y, z in zip(a[:-1], b[:-1], c[:-1])] + [np.inf]
    same(apply("fma.rn.f64 %d, %a, %b, %c;", a, b, c, out="f8"), np.array(want))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_directed_rounding(op, mode):
    a, b = ((rng.standard_normal(300) * 2.0 ** rng.integers(-20, 20, 300)).astype("f4") for _ in range(2))
    got = apply(f"{op}.{mode}.f32 %d, %a, %b;", a, b, out="f4")
    for x, y, g in zip(a.tolist(), b.tolist(), got):
        p, q = Fraction(x), Fraction(y)
        exact = {"add": p + q, "sub": p - q, "mul": p * q, "div": p / q}[op]
        step = Fraction(float(g))
        if mode == "rm" or (mode == "rz" and exact > 0):
            assert step <= exact < Fraction(float(np.nextafter(g, np.float32(np.inf))))
        else:
            assert step >= exact > Fraction(float(np.nextafter(g, np.float32(-np.inf))))


def test_division_and_roots_are_exact_where_ptx_says_so():
    a, b = pairs(FLOATS)
    with np.errstate(all="ignore"):
        same(apply("div.rn.f32 %d, %a, %b;", a, b, out="f4"), a / b)
        same(apply("sqrt.rn.f32 %d, %a;", a, out="f4"), np.sqrt(a))
        same(apply("rcp.rn.f32 %d, %a;", a, out="f4"), np.float32(1) / a)
        c, d = pairs(DOUBLES)
        same(apply("div.rn.f64 %d, %a, %b;", c, d, out="f8"), c / d)
        same(apply("sqrt.rn.f64 %d, %a;", c, out="f8"), np.sqrt(c))


def test_approximate_functions():
    x = (rng.standard_normal(500) * 3).astype("f4")
    y = abs(x)
    for text, given, want in (
        ("ex2.approx.ftz.f32", x, np.exp2(x.astype("f8"))),
        ("lg2.approx.f32", y, np.log2(y.astype("f8"))),
        ("rcp.approx.ftz.f32", x, 1 / x.astype("f8")),
        ("rsqrt.approx.f32", y, 1 / np.sqrt(y.astype("f8"))),
        ("sqrt.approx.f32", y, np.sqrt(y.astype("f8"))),
        ("sin.approx.f32", x, np.sin(x.astype("f8"))),
        ("cos.approx.f32", x, np.cos(x.astype("f8"))),
        ("tanh.approx.f32", x, np.tanh(x.astype("f8"))),
    ):
        np.testing.assert_allclose(
            apply(f"{text} %d, %a;", given, out="f4"),
            want,
            rtol=1e-3 if "tanh" in text else 4e-7,
            atol=1e-6,
            err_msg=text,
        )
    np.testing.assert_allclose(apply("div.full.f32 %d, %a, %b;", x, y + 1, out="f4"), x / (y + 1), rtol=3e-7)
    special = np.array([np.inf, -np.inf, 0, -0.0, np.nan, -1], "f4")
    same(apply("ex2.approx.f32 %d, %a;", special, out="f4"), np.array([np.inf, 0, 1, 1, np.nan, 0.5], "f4"))
    same(apply("rcp.approx.f32 %d, %a;", special, out="f4"), np.array([0, -0.0, np.inf, -np.inf, np.nan, -1], "f4"))
    same(
        apply("rsqrt.approx.f32 %d, %a;", special, out="f4"),
        np.array([0, np.nan, np.inf, -np.inf, np.nan, np.nan], "f4"),
    )
    same(
        apply("lg2.approx.f32 %d, %a;", special, out="f4"),
        np.array([np.inf, np.nan, -np.inf, -np.inf, np.nan, np.nan], "f4"),
    )
    h = (rng.standard_normal(400) * 2).astype("f2")
    got = apply("ex2.approx.f16 %d, %a;", h, out="f2").astype("f8")
    np.testing.assert_allclose(got, np.exp2(h.astype("f8")), rtol=2**-9.9)
    got = apply("tanh.approx.bf16 %d, %a;", h.astype(bf16), out=bf16).astype("f8")
    np.testing.assert_allclose(got, np.tanh(h.astype(bf16).astype("f8")), atol=2**-8)


def test_minimum_and_maximum():
    a, b = pairs(FLOATS)
    a[:4], b[:4] = [0, -0.0, np.nan, 1], [-0.0, 0, 1, np.nan]
    low, high = np.fmin(a, b), np.fmax(a, b)
    low[:2], high[:2] = -0.0, 0.0
    same(apply("min.f32 %d, %a, %b;", a, b, out="f4"), low)
    same(apply("max.f32 %d, %a, %b;", a, b, out="f4"), high)
    nan = np.isnan(a) | np.isnan(b)
    same(apply("min.NaN.f32 %d, %a, %b;", a, b, out="f4"), np.where(nan, np.float32(np.nan), low))
    got = apply("max.NaN.f32 %d, %a, %b;", a[2:4], b[2:4], out="u4")
    np.testing.assert_array_equal(got, 0x7FFFFFFF)
    x, y = pairs(ALL)
    for kind, dtype in (("f16", "f2"), ("bf16", bf16)):
        got = apply(f"max.{kind} %d, %a, %b;", x, y, out=dtype).astype("f4")
        np.testing.assert_array_equal(got, np.fmax(x.view(dtype).astype("f4"), y.view(dtype).astype("f4")))
    got = apply("max.xorsign.abs.f32 %d, %a, %b;", np.array([-3, 2, -1], "f4"), np.array([1, 5, -7], "f4"), out="f4")
    np.testing.assert_array_equal(got, [-3, 5, 7])


def test_comparisons_with_nan():
    a, b = pairs(EDGES, 400)
    nan = np.isnan(a) | np.isnan(b)
    table = {"eq": a == b, "ne": (a != b) & ~nan, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "num": ~nan, "nan": nan,
             "equ": (a == b) | nan, "neu": a != b, "ltu": (a < b) | nan, "leu": ~(a > b), "gtu": ~(a <= b), "geu": ~(a < b)}  # fmt: skip
    for name, want in table.items():
        got = apply(f"setp.{name}.f32 %p, %a, %b; selp.u32 %d, 1, 0, %p;", a, b, out="u4")
        np.testing.assert_array_equal(got, want, err_msg=name)
    got = apply(
        "setp.lt.f32 %q, %a, 0f00000000; setp.gt.xor.f32 %p|%q, %a, %b, %q; selp.u32 %t0, 2, 0, %p; selp.u32 %d, 1, 0, %q; add.u32 %d, %d, %t0;",
        a,
        b,
        out="u4",
    )
    np.testing.assert_array_equal(got, 2 * ((a > b) ^ (a < 0)) + (~(a > b) ^ (a < 0)))
    np.testing.assert_array_equal(apply("set.gt.u32.f32 %d, %a, %b;", a, b, out="u4"), np.where(a > b, 0xFFFFFFFF, 0))
    np.testing.assert_array_equal(apply("set.gt.f32.f32 %d, %a, %b;", a, b, out="f4"), (a > b).astype("f4"))
    np.testing.assert_array_equal(
        apply("slct.u32.s32 %d, %a, %b, %c;", a.view("u4"), b.view("u4"), INTS[:400], out="u4"),
        np.where(INTS[:400].view("i4") >= 0, a.view("u4"), b.view("u4")),
    )
    unsigned = INTS[:400]
    for name, want in {
        "lo": unsigned < 1000,
        "ls": unsigned <= 1,
        "hi": unsigned > 5,
        "hs": unsigned >= 1 << 31,
    }.items():
        bound = {"lo": 1000, "ls": 1, "hi": 5, "hs": 1 << 31}[name]
        got = apply(f"setp.{name}.u32 %p, %a, {bound}; selp.u32 %d, 1, 0, %p;", unsigned, out="u4")
        np.testing.assert_array_equal(got, want)


def test_classes_of_floats():
    x, tiny = FLOATS, np.float32(1.1754944e-38)
    table = {"finite": np.isfinite(x), "infinite": np.isinf(x), "number": ~np.isnan(x), "notanumber": np.isnan(x),
             "normal": np.isfinite(x) & (abs(x) >= tiny), "subnormal": (x != 0) & (abs(x) < tiny)}  # fmt: skip
    for name, want in table.items():
        got = apply(f"testp.{name}.f32 %p, %a; selp.u32 %d, 1, 0, %p;", x, out="u4")
        np.testing.assert_array_equal(got, want, err_msg=name)
    same(apply("copysign.f32 %d, %a, %b;", x, x[::-1].copy(), out="f4"), np.copysign(x[::-1], x))
    same(
        apply("neg.f16 %d, %a; abs.f16 %h0, %a; mul.f16 %d, %d, %h0;", ALL, out="f2"),
        -ALL.view("f2") * abs(ALL.view("f2")),
    )
