"""Numbers of one type as another: `cvt` between integers, floats, and the packed formats of 8, 6 and 4 bits.

Source: PTX ISA manual, "cvt"; facts file 9.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from palladion.emulator.lane_floats import directed, from_double, relu, saturate
from palladion.emulator.lane_types import DTYPES, UNSIGNED, Array, bf, f4, f8, i8, is_float, one_nan, u1, u2, u4

WHOLE: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
"""Roundings to whole numbers."""
SMALL: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn, "ue8m0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
"""Formats that come in pairs only."""
_LARGEST = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in SMALL.items()}


def convert(x: Array, target: str, mode: str, clamp: bool, whole: str) -> Array:
    """Numbers as another type.

    Arguments:
      x: numbers. target: PTX type. mode: rounding to a float: rn rz rm rp rna, or "". clamp: `.sat`, `.satfinite`.
      whole: rounding to an integer: rni rzi rmi rpi, or "".
    """
    dtype = np.dtype(DTYPES[target])
    if dtype.kind in "iu":
        return _to_integer(x, dtype, whole) if is_float(x) else _narrowed(x, dtype, clamp)
    if whole and is_float(x):
        x = WHOLE[whole](x.astype(f8)).astype(x.dtype)
    found = to_float(x, dtype, mode)
    return saturate(found) if clamp else found


def _to_integer(x: Array, dtype: Any, whole: str) -> Array:
    """Clamped to what the integer can hold; NaN is 0, or of 64-bit numbers half the range."""
    info = np.iinfo(dtype)
    wide = WHOLE[whole or "rzi"](x.astype(f8))
    half = np.array(1 << (8 * dtype.itemsize - 1), UNSIGNED[dtype.itemsize]).view(dtype)
    none = half if x.dtype == f8 or dtype.itemsize == 8 else dtype.type(0)
    if dtype.itemsize < 8:
        found = np.clip(np.where(np.isnan(wide), 0, wide), info.min, info.max).astype(dtype)
    else:
        limit = 2.0 ** (63 if dtype.kind == "i" else 64)
        inside = np.where(np.isnan(wide), 0, np.clip(wide, info.min, np.nextafter(limit, 0)))
        found = np.where(wide >= limit, dtype.type(info.max), inside.astype(dtype))
    nan = np.isnan(wide)
    return np.where(nan, none, found).astype(dtype) if nan.any() else found


def _narrowed(x: Array, dtype: Any, clamp: bool) -> Array:
    if clamp:
        info, own = np.iinfo(dtype), np.iinfo(x.dtype)
        x = np.clip(x, x.dtype.type(max(info.min, own.min)), x.dtype.type(min(info.max, own.max)))
    return x.astype(dtype)


def to_float(x: Array, dtype: Any, mode: str) -> Array:
    """Numbers rounded once to a floating type."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype.kind in "iu":
        return _from_integer(x, dtype, mode)
    if dtype == bf and x.dtype == f8:
        return one_nan(from_double(x, bf, mode))
    near = x.astype(dtype)
    near = near if mode in ("", "rn") else directed(x.astype(f8), near, mode)
    return one_nan(near) if dtype.itemsize == 2 else near


def narrower(x: Array, dtype: Any) -> Array:
    """Floats rounded to the nearest f16 or bf16."""
    return one_nan(x.astype(dtype))


def _from_integer(x: Array, dtype: Any, mode: str) -> Array:
    """Integers; those of 64 bits may not be exact even in double."""
    if x.dtype.itemsize < 8:
        return (
            from_double(x.astype(f8), np.dtype(dtype), mode)
            if mode not in ("", "rn") or dtype == bf
            else x.astype(dtype)
        )
    near = x.astype(f8)
    if dtype == f8 and mode in ("", "rn"):
        return near
    # what the nearest double lacks, as an integer: both are less than 2**65
    gap = np.array([int(n) - int(d) for n, d in zip(np.ravel(x).tolist(), np.ravel(near).tolist())], object)
    error = np.array([float((g > 0) - (g < 0)) for g in gap]).reshape(np.shape(x))
    if dtype == f8:
        step = {"rz": (error < 0) & (near > 0) | (error > 0) & (near < 0), "rm": error < 0, "rp": error > 0}[mode]
        toward = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode]
        return np.where(step, np.nextafter(near, toward), near)
    bits = near.view(i8)
    change = (error != 0) & (bits & 1 == 0)
    exact = (bits + np.where(change, np.where((error > 0) == (near > 0), i8(1), i8(-1)), i8(0))).view(f8)
    return from_double(exact, np.dtype(dtype), mode)


def to_tf32(x: Array, mode: str) -> Array:
    """float32 with 10 bits of fraction, in the bits of a float32 whose other 13 are zero."""
    bits = x.view(u4)
    if mode == "rz":
        moved = bits
    elif mode == "rn":
        moved = bits + u4(0xFFF) + (bits >> u4(13) & u4(1))
    else:  # rna: ties away from zero
        moved = bits + u4(0x1000)
    return np.where(np.isfinite(x), moved & u4(0xFFFFE000), np.where(np.isnan(x), u4(0x7FFFE000), bits))


# --- packed pairs -------------------------------------------------------------------------------------------
def narrow(x: Array, kind: str, mode: str) -> Array:
    """float32 numbers as the codes (uint8) of a small format: what is too large becomes the largest number."""
    if kind == "ue8m0":
        return _scale(x, mode)
    top = _LARGEST[kind]
    clamped = np.clip(x, f4(-top), f4(top))
    if kind in ("e4m3", "e5m2"):
        codes = clamped.astype(SMALL[kind]).view(u1)
        return np.where(np.isnan(x), u1(0x7F), codes)
    return np.where(np.isnan(x), f4(top), clamped).astype(SMALL[kind]).view(u1)


def _scale(x: Array, mode: str) -> Array:
    """Powers of two: exponents of magnitudes, rounded up or to zero."""
    size = np.abs(x)
    fraction, exponent = np.frexp(size)
    exponent = exponent - 1 + (fraction > 0.5 if mode == "rp" else 0)
    code = np.clip(exponent + 127, 0, 254)
    return np.where(np.isnan(x), 255, np.where(np.isinf(x), 254, np.where(size == 0, 0, code))).astype(u1)


def pack(high: Array, low: Array, kind: str, mode: str, positive: bool, clamp: bool) -> Array:
    """Two float32 as a pair: 32 bits of halves, 16 bits of codes, or 8 of the 4-bit format."""
    if positive:
        high, low = relu(high), relu(low)
    high, low = np.broadcast_arrays(high, low)
    if kind in ("f16", "bf16"):
        one = half if clamp else lambda x, kind, mode: to_float(x, DTYPES[kind], mode)
        bits = [one(x, kind, mode).view(u2).astype(u4) for x in (high, low)]
        return bits[0] << u4(16) | bits[1]
    codes = [narrow(x, kind, mode) for x in (high, low)]
    if kind == "e2m1":
        return codes[0] << u1(4) | codes[1]
    return codes[0].astype(u2) << u2(8) | codes[1]


def half(x: Array, kind: str, mode: str) -> Array:
    """Numbers as f16 or bf16 that are never infinite (`.satfinite`)."""
    found = to_float(x, DTYPES[kind], mode)
    top = np.array(65504 if kind == "f16" else 3.3895314e38).astype(found.dtype)
    return np.where(np.isinf(found), np.copysign(top, found), found).astype(found.dtype)


def unpack(pair: Array, kind: str, target: str, positive: bool) -> Array:
    """A pair of small floats as a pair of halves."""
    pair = np.ascontiguousarray(pair)
    if kind == "e2m1":
        codes = np.stack([pair & u1(15), pair >> u1(4)], -1).astype(u1)
    else:
        codes = pair.view(u1).reshape(-1, 2)
    wide = codes.view(SMALL[kind]).astype(f4)
    wide = relu(wide) if positive else wide
    return np.ascontiguousarray(wide.astype(DTYPES[target])).view(u4).reshape(len(pair))


def renarrow(pair: Array, source: str, target: str, mode: str, positive: bool) -> Array:
    """A pair of halves as a pair of small floats."""
    wide = np.ascontiguousarray(pair).view(DTYPES[source]).reshape(-1, 2).astype(f4)
    return pack(wide[:, 1], wide[:, 0], target, mode, positive, True)
