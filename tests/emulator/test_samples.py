"""CUDA samples, compiled by NVRTC, run on the emulator, against NumPy."""

import math

import numpy as np
import pytest

from emulator import samples
from emulator.running import run

rng = np.random.default_rng(0)


def ints(*shape, low=-100, high=100, dtype="int32"):
    return rng.integers(low, high, shape).astype(dtype)


def test_reductions():
    x = rng.standard_normal(5000).astype("f4")
    _, out = run(samples.REDUCE, "reduce", 4, 160, [x, np.zeros(1, "f4"), np.int32(5000)])
    np.testing.assert_allclose(out[0], x.sum(dtype="f8"), rtol=1e-5, atol=1e-3)
    y = ints(4 * 256)
    _, top = run(samples.REDUCE, "tree", 4, 256, [y, np.zeros(4, "i4")], smem=1024)
    np.testing.assert_array_equal(top, y.reshape(4, 256).max(1))


def test_shuffles():
    x, t = ints(64), np.arange(64)
    _, out = run(samples.SHUFFLES, "shuffles", 1, 64, [x, np.zeros(320, "i4")])
    out, warp, lane = out.reshape(5, 64), t // 32 * 32, t % 32
    np.testing.assert_array_equal(out[0], x[warp + (t * 7 + 3) % 32])
    np.testing.assert_array_equal(out[1], np.where(lane % 16 >= 3, x[t - 3], x))
    np.testing.assert_array_equal(out[2], np.where(lane % 8 < 3, x[np.minimum(t + 5, 63)], x))
    np.testing.assert_array_equal(out[3], x[warp + (lane ^ 9)])
    np.testing.assert_array_equal(out[4], x[t // 4 * 4 + 2])
    _, sums = run(samples.SHUFFLES, "scan", 1, 64, [x, np.zeros(64, "i4")])
    np.testing.assert_array_equal(sums.reshape(2, 32), x.reshape(2, 32).cumsum(1))


def test_votes():
    x = ints(64)
    t = np.arange(64)
    _, out = run(samples.SHUFFLES, "votes", 1, 64, [x, np.zeros(9 * 64, "u4")])
    out, rows = out.reshape(9, 64), x.reshape(2, 32)

    def ballot(p):  # (2, 32) -> (64,)
        return np.repeat((p.astype("u8") << np.arange(32, dtype="u8")).sum(1).astype("u4"), 32)

    np.testing.assert_array_equal(out[0], ballot(rows > 0))
    want = (rows > 90).any(1) | ((rows > -95).all(1) << 1)
    np.testing.assert_array_equal(out[1], np.repeat(want, 32))
    same = (rows[:, :, None] & 7) == (rows[:, None, :] & 7)
    np.testing.assert_array_equal(out[2], (same.astype("u8") << np.arange(32, dtype="u8")).sum(2).astype("u4").ravel())
    np.testing.assert_array_equal(out[3], np.zeros(64, "u4"))  # all lanes: 0xffffffff, and 1
    np.testing.assert_array_equal(out[4], np.repeat(rows.sum(1).astype("u4"), 32))
    np.testing.assert_array_equal(out[5].view("i4"), np.repeat(rows.min(1), 32))
    np.testing.assert_array_equal(out[6].view("i4"), np.repeat(np.bitwise_xor.reduce(rows, 1), 32))
    odd = ballot(rows % 2 == 1)
    np.testing.assert_array_equal(out[7], odd)  # ~ of the even lanes is the odd lanes
    third = ballot(np.where(t % 3 == 0, x > 0, False).reshape(2, 32))
    np.testing.assert_array_equal(out[8][t % 3 == 0], third[t % 3 == 0])


def test_elections():
    (out,) = run(samples.SHUFFLES, "elect", 1, 64, [np.full(64, 9, "u4")])
    np.testing.assert_array_equal(out, np.where(np.arange(64) % 32 == 0, 3, 0))


def test_atomics():
    x = ints(3000, low=0, high=1 << 30, dtype="u4")
    _, bins = run(samples.ATOMICS, "histogram", 3, 128, [x, np.zeros(64, "u4"), np.int32(3000)])
    np.testing.assert_array_equal(bins, np.bincount(x & 63, minlength=64))
    s, u, w = np.zeros(6, "i4"), np.array([0xFFFFFFFF, 0, 0, 0, 3, 0], "u4"), np.array([0, 0, 5], "u8")
    t = np.arange(256)
    s, u, w, f, d, order = run(
        samples.ATOMICS, "all", 2, 128, [s, u, w, np.zeros(1, "f4"), np.zeros(1), np.zeros(256, "i4")]
    )
    np.testing.assert_array_equal(s, [t.sum(), -t.sum(), -255, 765, 77, 256])
    mixed = np.bitwise_xor.reduce((t * 2654435761).astype("u4"))
    steps, down = 0, 3
    for _ in t:
        steps = 0 if steps >= 10 else steps + 1
        down = 10 if down == 0 or down > 10 else down - 1
    np.testing.assert_array_equal(u, np.array([0, 0xFFFFFFFF, mixed, steps, down, 0x80000000 + 255], "u4"))
    np.testing.assert_array_equal(w, np.array([256 << 33, 255 << 40, 6], "u8"))
    assert f[0] == 0.5 * t.sum() and d[0] == 0.25 * t.sum()
    np.testing.assert_array_equal(np.sort(order), t)


def test_lanes_of_a_warp_wait_for_each_other_at_a_lock():
    lock, count = run(samples.ATOMICS, "spin_lock", 2, 64, [np.zeros(1, "i4"), np.zeros(1, "i4")])
    assert count[0] == 128 and lock[0] == 0


def test_blocks_see_each_other():
    x = rng.standard_normal(8 * 64).astype("f4")
    *_, out = run(samples.ATOMICS, "last_block", 8, 64, [x, np.zeros(8, "f4"), np.zeros(1, "u4"), np.zeros(1, "f4")])
    np.testing.assert_allclose(out[0], x.sum(dtype="f8"), rtol=1e-5, atol=1e-4)
    _, _, out = run(samples.ATOMICS, "grid_barrier", 6, 32, [np.zeros(1, "u4"), np.zeros(6, "i4"), np.zeros(6, "i4")])
    np.testing.assert_array_equal(out, (np.arange(1, 7) % 6) ** 2)


def nested(v):
    if v & 1:
        return v * 3 if v & 2 else v - 100 if v & 4 else -v
    return {0: 1, 1: 355, 2: 333, 3: v, 5: int(v / 3), 6: int(np.fmod(v, 5))}.get(v >> 1 & 7, -7)


def loops(t, v):
    r, steps, c = 0, 0, v + 1
    for i in range(v):
        if i % 3 == 1:
            continue
        if r > 500:
            break
        for j in range(i, v, 5):
            r += j ^ t
    while c != 1:
        c, steps = (3 * c + 1 if c & 1 else c >> 1), steps + 1
    return r * 1000 + steps


def test_divergence():
    x = ints(192)
    _, out = run(samples.DIVERGENCE, "nested", 2, 96, [x, np.zeros(192, "i4")])
    np.testing.assert_array_equal(out, [nested(int(v)) + 1000 for v in x])
    x = ints(100, low=0, high=25)
    _, out = run(samples.DIVERGENCE, "loops", 2, 50, [x, np.zeros(100, "i4")])
    np.testing.assert_array_equal(out, [loops(t, int(v)) for t, v in enumerate(x)])


def test_early_returns():
    x = (rng.standard_normal(200) * 5).astype("f4")
    _, out = run(samples.DIVERGENCE, "early", 2, 128, [x, np.full(200, 7, "f4"), np.int32(180)])
    with np.errstate(invalid="ignore"):
        want = np.where(x < 0, -1, np.where(np.sqrt(x) > 2, 7, np.sqrt(x)))
    want[180:] = 7
    np.testing.assert_array_equal(out, want.astype("f4"))


def test_barriers_after_divergence():
    x, t = ints(128, low=0, high=16), np.arange(128)
    _, out = run(samples.DIVERGENCE, "meet", 1, 128, [x, np.zeros(128, "i4")])
    r = np.zeros(128, "i8")
    for k in range(4):
        r = r + np.where(x >> k & 1, (t & 7) * ((t & 7) - 1) // 2 * k, 0)
        r = r + r[(t + 32 * k + 1) & 127]
    np.testing.assert_array_equal(out, r + r[t ^ 1])


def test_threads_that_wait_for_each_other():
    (out,) = run(samples.DIVERGENCE, "handshake", 1, 64, [np.zeros(2, "i4")])
    assert out.tolist() == [4, 5]
    (out,) = run(samples.DIVERGENCE, "inside_a_warp", 1, 32, [np.zeros(1, "i4")])
    assert out[0] == 9


@pytest.mark.parametrize("which", [0, 1])
def test_device_functions(which):
    start = np.array([(3, 0.5, [1, 2, 3])], np.dtype([("a", "i4"), ("b", "f8"), ("c", "f4", 3)], align=True))
    assert start.itemsize == 32
    args = [np.zeros(128, "i4"), np.zeros(64), start.tobytes(), np.int32(which)]
    out, sums = run(samples.FUNCTIONS, "functions", 1, 64, args)
    t = np.arange(64)
    fib = [0, 1]
    while len(fib) < 11:
        fib.append(fib[-1] + fib[-2])
    np.testing.assert_array_equal(out[:64], np.array(fib)[t % 11])
    np.testing.assert_array_equal(out[64:], [t * t, 2 * t][which])
    want = []
    for k in t:
        c = [1.0, 2.0, 3.0]
        c[k % 3] = k
        c[(k + 1) % 3] = k + 1
        want.append(3 + 2 * k + 1 + 2.0 + c[0] + 10 * c[1] + 100 * c[2])
    np.testing.assert_array_equal(sums, want)


def test_local_arrays_and_constants():
    x = ints(32, 16)
    _, out = run(samples.FUNCTIONS, "locals", 1, 32, [x, np.zeros_like(x)])
    np.testing.assert_array_equal(out, np.sort(x, 1))
    (out,) = run(samples.FUNCTIONS, "constants", 1, 32, [np.zeros(64, "f4")])
    np.testing.assert_array_equal(out[:32], np.tile(np.array([1, 2, 3, -4.5], "f4"), 8))
    np.testing.assert_array_equal(out[32:], np.full(32, 10))


def test_printf():
    lines = []
    run(samples.FUNCTIONS, "hello", 1, 32, [np.int32(3)], output=lines.append)
    assert "".join(lines).splitlines() == [
        f"{t} {['even', 'odd'][t & 1]} {t * 0.5:5.2f}|7   |{'abc'[t]} {1 << (40 + t)} ff %" for t in range(3)
    ]


def test_barriers():
    (out,) = run(samples.BARRIERS, "ring", 1, 64, [np.zeros(20, "i4"), np.int32(20)])
    np.testing.assert_array_equal(out, np.arange(20) ** 2)
    x = ints(96, low=-50, high=50)
    _, out = run(samples.BARRIERS, "counted", 1, 96, [x, np.zeros(192, "i4")])
    np.testing.assert_array_equal(out, np.repeat([(x > 0).sum(), 2 + (x > 49).any()], 96))
    (out,) = run(samples.BARRIERS, "two_rings", 1, 128, [np.zeros(128, "i4")])
    np.testing.assert_array_equal(out, np.repeat([2016, 66016], 64))
    (out,) = run(samples.BARRIERS, "some_left", 1, 160, [np.zeros(64, "i4")])
    np.testing.assert_array_equal(out, np.arange(64)[::-1])


def test_copies_and_matrices():
    x = rng.standard_normal(1024).astype("f4")
    _, out = run(samples.COPIES, "staged", 1, 64, [x, np.zeros(1024, "f4"), np.int32(4)])
    np.testing.assert_array_equal(out.reshape(4, 256), 2 * x.reshape(4, 256)[:, ::-1])
    a, b = rng.standard_normal((16, 16)).astype("f2"), rng.standard_normal((16, 8)).astype("f2")
    *_, d = run(samples.COPIES, "tile", 1, 32, [a, b, np.zeros((16, 8), "f4")])
    np.testing.assert_allclose(d, a.astype("f8") @ b.astype("f8"), rtol=1e-5, atol=1e-5)


def quotient(a, b):
    """C's division, of Python integers."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def bits(value, size):
    """A Python integer as a signed number of `size` bits."""
    value &= (1 << size) - 1
    return value - (1 << size) if value >> (size - 1) else value


def lowest(v):
    return (v & -v).bit_length()


def reversed_bits(v, size):
    return bits(int(f"{v & ((1 << size) - 1):0{size}b}"[::-1], 2), size)


def test_64_bit_integers():
    edges = [0, 1, -1, 2, -2, 1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 32, -(1 << 32), 12345678901, -7]
    a = np.array([x for x in edges for _ in edges] + ints(40, low=-(2**62), high=2**62, dtype="i8").tolist(), "i8")
    b = np.array(edges * len(edges) + ints(40, low=-(2**40), high=2**40, dtype="i8").tolist(), "i8")
    n = len(a)
    *_, out = run(samples.ARITHMETIC, "wide", 2, 128, [a, b, np.zeros((n, 16), "i8"), np.int32(n)])
    for x, y, got in zip(a.tolist(), b.tolist(), out.tolist()):
        ux, uy, s = x % 2**64, y % 2**64, y & 63
        counts = bin(ux).count("1") + 100 * (64 - ux.bit_length()) + 10000 * lowest(x)
        in_float = int(np.float32(x)) if abs(int(np.float32(x))) < 2**63 else None
        in_double = int(float(x)) if abs(float(x)) < 2**63 else None
        want = [
            x * y, quotient(x, y) if y else 0, x - quotient(x, y) * y if y else 0, ux // uy if uy else 0,
            ux % uy if uy else 0, x * y >> 64, ux * uy >> 64, x << s, x >> s, ux >> s, counts, reversed_bits(x, 64),
            min(x, y), in_double, in_float, ux > uy,
        ]  # fmt: skip
        want = [g if w is None else bits(int(w), 64) for g, w in zip(got, want)]
        assert got == want, (x, y)


def test_32_bit_integers():
    edges = [0, 1, -1, 7, -7, 1 << 30, -(1 << 31), (1 << 31) - 1, 0x12345678, -0x1234567, 33, 255, -256]
    a = np.array([x for x in edges for _ in edges] + ints(60, low=-(2**31), high=2**31, dtype="i8").tolist(), "i4")
    b = np.array(edges * len(edges) + ints(60, low=-(2**20), high=2**20, dtype="i8").tolist(), "i4")
    n = len(a)
    *_, out = run(samples.ARITHMETIC, "narrow", 4, 64, [a, b, np.zeros((n, 20), "i4"), np.int32(n)])
    for x, y, got in zip(a.tolist(), b.tolist(), out.tolist()):
        ux, uy = x % 2**32, y % 2**32
        data = ux.to_bytes(4, "little") + uy.to_bytes(4, "little")
        picked = [data[k] for k in (6, 2, 3, 5)]  # __byte_perm looks at three bits of each selector
        both = ux | uy << 32
        left, right = both << (x & 31) >> 32, both >> min(y & 63, 32)
        low = [bits(v, 24) for v in (x, y)]
        signed = sum(bits(p, 8) * bits(q, 8) for p, q in zip(data[:4], data[4:]))
        plain = sum(p * q for p, q in zip(data[:4], data[4:]))
        want = [
            quotient(x, y) if y else 0, x - quotient(x, y) * y if y else 0, ux // uy if uy else 0,
            ux % uy if uy else 0, x * y >> 32, ux * uy >> 32, quotient(x, 7) + x - quotient(x, 10) * 10,
            ux // 7 + ux % 1000, int.from_bytes(bytes(picked), "little"), left, right,
            32 - ux.bit_length() + 100 * bin(uy).count("1") + 10000 * lowest(x), reversed_bits(x, 32), abs(x - y) + 5,
            abs(ux - uy) + 5, low[0] * low[1], (ux & 0xFFFFFF) * (uy & 0xFFFFFF), signed + 100, plain + 100,
            bits(x, 16) * bits(y, 16) + bits(x, 8),
        ]  # fmt: skip
        assert got == [bits(int(w), 32) for w in want], (x, y)


def test_floats():
    n = 300
    a, b = ((rng.standard_normal(n) * 20).astype("f4") for _ in range(2))
    *_, out = run(samples.ARITHMETIC, "floats", 3, 128, [a, b, np.zeros((n, 20), "f4"), np.int32(n)])
    x, y = a.astype("f8"), b.astype("f8")
    f = np.float32
    exact = {
        0: f(x * y + 1.5), 1: f(x / y), 2: f(np.sqrt(abs(x))), 3: f(1 / y), 4: np.minimum(a, b), 5: np.maximum(a, b),
        6: np.floor(a) + np.ceil(b), 7: np.rint(a), 8: np.trunc(a), 9: np.copysign(a, b), 10: np.trunc(a),
        11: np.clip(a, 0, 1), 18: np.fmod(a, b),
    }  # fmt: skip
    for k, want in exact.items():
        np.testing.assert_array_equal(out[:, k], want, err_msg=f"column {k}")
    near = {12: np.exp(x * f(0.1)), 13: np.log(abs(x) + 1), 14: np.sin(x), 15: np.tanh(x), 19: x / y}
    for k, want in near.items():
        np.testing.assert_allclose(out[:, k], want, rtol=4e-6, atol=1e-6, err_msg=f"column {k}")
    total, product = f(x + y), f(x * y)
    toward_zero = np.where(abs(total.astype("f8")) > abs(x + y), np.nextafter(total, f(0)), total)
    up = np.where(product.astype("f8") < x * y, np.nextafter(product, f(np.inf)), product)
    np.testing.assert_array_equal(out[:, 16], toward_zero)
    np.testing.assert_array_equal(out[:, 17], up)


def test_doubles():
    n = 200
    a, b = rng.standard_normal(n) * 9, rng.standard_normal(n) * 9
    *_, out = run(samples.ARITHMETIC, "doubles", 2, 128, [a, b, np.zeros((n, 8)), np.int32(n)])
    np.testing.assert_array_equal(out[:, 0], [math.fma(p, q, -0.75) for p, q in zip(a, b)])
    exact = [a / b, np.sqrt(abs(a)), np.exp(a * 0.25), np.log(abs(a) + 1), np.rint(a), a.astype("f4"), abs(a) ** 1.25]
    for k, want in enumerate(exact, 1):
        np.testing.assert_allclose(out[:, k], want, rtol=0 if k in (1, 2, 5, 6) else 4e-16, err_msg=f"column {k}")
