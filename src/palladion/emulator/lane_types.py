"""PTX types as NumPy types: numbers from the bits of a register and back; pairs and quadruples in one register."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = Any
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64
bf = ml_dtypes.bfloat16

DTYPES: dict[str, Any] = {
    "b8": u1, "u8": u1, "s8": i1, "b16": u2, "u16": u2, "s16": i2, "b32": u4, "u32": u4, "s32": i4, "b64": u8,
    "u64": u8, "s64": i8, "f16": f2, "bf16": bf,
    "f32": f4, "f64": f8, "f16x2": f2, "bf16x2": bf, "u16x2": u2, "s16x2": i2,
    "f32x2": f4, "u8x4": u1, "s8x4": i1,
}  # fmt: skip
"""NumPy type of the numbers of each type."""
PACKED = {"f16x2": u4, "bf16x2": u4, "u16x2": u4, "s16x2": u4, "f32x2": u8, "u8x4": u4, "s8x4": u4}
"""Types of several numbers in one register, and the unsigned type of that register."""
UNSIGNED: dict[int, Any] = {1: u1, 2: u2, 4: u4, 8: u8}
NAN: dict[Any, Any] = {
    np.dtype(f2): u2(0x7FFF).view(f2), np.dtype(bf): np.array(0x7FFF, u2).view(bf),
    np.dtype(f4): u4(0x7FFFFFFF).view(f4), np.dtype(f8): f8(np.nan),
}  # fmt: skip
"""The NaN that hardware gives, whatever NaN comes in. Only conversions to halves and `.NaN` see to it here; sums and
products keep what NumPy gives, as nothing but the bits of a NaN would differ."""
TINY = np.finfo(f4).tiny


def decode(x: Array, kind: str) -> Array:
    """The numbers (n, count) of a register (n,) of a packed type."""
    return np.ascontiguousarray(x).view(DTYPES[kind]).reshape(len(x), -1)


def encode(x: Array, kind: str) -> Array:
    """The register (n,) of packed numbers (n, count)."""
    return np.ascontiguousarray(x.astype(DTYPES[kind], copy=False)).view(PACKED[kind]).reshape(len(x))


def flush(x: Array) -> Array:
    """Subnormal float32 numbers as zeros of the same sign (`.ftz`); other types as they are."""
    if x.dtype != f4:
        return x
    small = np.abs(x) < TINY
    return np.where(small, np.copysign(f4(0), x), x) if small.any() else x


def one_nan(x: Array) -> Array:
    """With the NaN of the hardware in place of others."""
    nan = np.isnan(x)
    return np.where(nan, NAN[x.dtype], x) if nan.any() else x


def is_float(x: Array) -> bool:
    """Whether the numbers have a floating point."""
    return x.dtype.kind == "f" or x.dtype == bf
