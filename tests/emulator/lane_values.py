"""Numbers that are hard to convert and to add, and how to compare results bit by bit."""

import ml_dtypes
import numpy as np

bf16, e4m3, e5m2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ALL = np.arange(1 << 16, dtype="u2")
rng = np.random.default_rng(3)


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def same(got, want, what=""):
    """Equal bits; any NaN equals any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    if got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    nan = np.isnan(want.astype("f8"))
    np.testing.assert_array_equal(np.isnan(got.astype("f8")), nan, err_msg=what)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan], err_msg=what)


EDGES = np.array(
    [0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -3.4028235e38,
     np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 6e-8, 2.9802322e-08, 5.9604645e-08, 448, 464, 480, 57344, 61440,
     2147483647, 2147483648, -2147483648, 4294967295, 4294967296, 9.223372e18, 1.8446744e19, 127.5, 128, -128.5, 255.5,
     256, 1 / 3, 16777216, 16777217, 0.99999994, 3.3895314e38, 1.0039062, 1.0039063, 1.01171875], "f4",
)  # fmt: skip
FLOATS = np.concatenate(
    [EDGES, rng.integers(0, 1 << 32, 3000, dtype="u4").view("f4"), (rng.standard_normal(1000) * 50).astype("f4")]
)
DOUBLES = np.concatenate([
    EDGES.astype("f8"), rng.integers(0, 1 << 64, 2000, dtype="u8").view("f8"), rng.standard_normal(500) * 50,
    [1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-52, 1 + 3 * 2.0**-24, 2.0**-150, 2.0**-150 * (1 + 2**-50), 5e-324, 1.7e308],
])  # fmt: skip
INTS = np.concatenate([np.array([0, 1, -1, 2, -2, 1 << 31, -(1 << 31), (1 << 31) - 1, 0x1000001], "i8").astype("u4"),
                       rng.integers(0, 1 << 32, 2000, dtype="u4")])  # fmt: skip


def pairs(x, n=3000):
    return rng.choice(x, n), rng.choice(x, n)
