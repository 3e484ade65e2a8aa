"""Element formats of the tensor cores: raw bits to exact float32 values, and back for the few result formats.

Every operand format of mma.sync, wgmma and tcgen05.mma fits into float32 without rounding (f16, bf16, tf32,
fp8, fp6, fp4, scales, integers up to 8 bits), and a product of two of them needs at most 24 significant bits,
so that a float32 matrix product multiplies exactly and only its sums round. That is the numeric rule of this
emulator: exact products, sums in float32 (the BLAS chooses the order, as the hardware does not tell its own),
one more rounding where the accumulator is added; f16 accumulators are rounded once per instruction. Hardware
keeps fewer bits in some cases (fp8 with f32 sums); compare results with tolerances.

Small formats are decoded through tables of all their codes, built from the description (bits of exponent and
fraction, bias, what the top exponent means). Sources: PTX manual, alternate floating-point formats; OCP MX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Small:
    """A format of at most 8 bits: sign (0 or 1 bit), exponent and fraction bits, bias, and its special codes."""

    sign: int
    exponent: int
    fraction: int
    bias: int
    infinity: bool = False  # the top exponent holds infinity and NaN, as in IEEE 754
    nan_codes: tuple[int, ...] = ()  # codes without the sign bit that mean NaN

    @property
    def bits(self) -> int:
        return self.sign + self.exponent + self.fraction


SMALL: dict[str, Small] = {
    "e4m3": Small(1, 4, 3, 7, nan_codes=(0x7F,)),
    "e5m2": Small(1, 5, 2, 15, infinity=True),
    "e2m3": Small(1, 2, 3, 1),
    "e3m2": Small(1, 3, 2, 3),
    "e2m1": Small(1, 2, 1, 1),
    "ue4m3": Small(0, 4, 3, 7, nan_codes=(0x7F,)),
    "ue8m0": Small(0, 8, 0, 127, nan_codes=(0xFF,)),
}


def _value(form: Small, code: int) -> float:
    magnitude = code & ((1 << (form.exponent + form.fraction)) - 1)
    negative = form.sign and code >> (form.bits - 1) & 1
    fraction = magnitude & ((1 << form.fraction) - 1)
    exponent = magnitude >> form.fraction
    if magnitude in form.nan_codes:
        return float("nan")
    if form.infinity and exponent == (1 << form.exponent) - 1:
        value = float("nan") if fraction else float("inf")
    elif exponent == 0 and form.fraction:
        value = fraction * 2.0 ** (1 - form.bias - form.fraction)
    else:
        value = (1 + fraction / (1 << form.fraction)) * 2.0 ** (exponent - form.bias)
    return -value if negative else value


@cache
def table(name: str) -> Array:
    """float32 value of each of the 256 bytes; bits above the format's own width are ignored."""
    form = SMALL[name]
    return np.array([_value(form, code & ((1 << form.bits) - 1)) for code in range(256)], np.float32)


@cache
def _f16_table() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def from_f16(raw: Array) -> Array:
    return np.take(_f16_table(), raw)


def from_bf16(raw: Array) -> Array:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def from_tf32(raw: Array) -> Array:
    """The low 13 bits of a tf32 container are not looked at."""
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)


def _from_small(name: str) -> Callable[[Array], Array]:
    return lambda raw: np.take(table(name), raw)


@dataclass(frozen=True)
class Format:
    """An operand format: name, width in bits as packed in registers, the container type and the decoding."""

    name: str
    bits: int
    container: type
    decode: Callable[[Array], Array]
    kind: str = "float"  # float | int | bit | double


FORMATS: dict[str, Format] = {
    "f16": Format("f16", 16, np.uint16, from_f16),
    "bf16": Format("bf16", 16, np.uint16, from_bf16),
    "tf32": Format("tf32", 32, np.uint32, from_tf32),
    "f64": Format("f64", 64, np.uint64, lambda raw: raw.view(np.float64), "double"),
    "s8": Format("s8", 8, np.uint8, lambda raw: raw.view(np.int8).astype(np.float32), "int"),
    "u8": Format("u8", 8, np.uint8, lambda raw: raw.astype(np.float32), "int"),
    "s4": Format("s4", 4, np.uint8, lambda raw: ((raw.astype(np.int8) ^ 8) - 8).astype(np.float32), "int"),
    "u4": Format("u4", 4, np.uint8, lambda raw: raw.astype(np.float32), "int"),
    "b1": Format("b1", 1, np.uint8, lambda raw: raw.astype(np.float32), "bit"),
}
for _name in ("e4m3", "e5m2"):
    FORMATS[_name] = Format(_name, 8, np.uint8, _from_small(_name))
for _name in ("e2m3", "e3m2"):
    FORMATS[_name] = Format(_name, 6, np.uint8, _from_small(_name))
FORMATS["e2m1"] = Format("e2m1", 4, np.uint8, _from_small("e2m1"))


def elements(raw: Array, bits: int) -> Array:
    """Splits packed memory into element codes, the lowest bits first.

    Arguments: raw: uint8 array (..., nbytes), contiguous in its last axis; bits: 1, 4, 8, 16, 32 or 64.
    Returns: (..., nbytes * 8 // bits) array of the unsigned type that holds one element.
    """
    if bits >= 8:
        return raw.view(np.dtype(f"u{bits // 8}"))
    if bits == 4:
        out = np.empty((*raw.shape, 2), np.uint8)
        np.bitwise_and(raw, 15, out=out[..., 0])
        np.right_shift(raw, 4, out=out[..., 1])
        return out.reshape(*raw.shape[:-1], raw.shape[-1] * 2)
    if bits == 1:
        return np.unpackbits(raw, axis=-1, bitorder="little")
    raise ValueError(f"elements of {bits} bits are not packed without padding")


def slots(raw: Array, bits: int) -> Array:
    """Decompresses padded 16-byte slots: 16 elements of 4 or 6 bits in the slot's low 8 or 12 bytes.

    Arguments: raw: uint8 (..., 16 * n). Returns: uint8 codes (..., 16 * n), one element a byte.
    """
    parts = raw.reshape(*raw.shape[:-1], raw.shape[-1] // 16, 16)
    stream = np.unpackbits(parts[..., : 2 * bits], axis=-1, bitorder="little")
    codes = np.packbits(stream.reshape(*stream.shape[:-1], 16, bits), axis=-1, bitorder="little")
    return codes.reshape(raw.shape)


def to_f16(value: Array) -> Array:
    """float32 to f16 bits, nearest even; what is too large becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return value.astype(np.float16).view(np.uint16)


def to_s32(total: Array, saturate: bool) -> Array:
    """Exact integer sums (int64) to s32: wrapped, or clamped with `.satfinite`."""
    if saturate:
        return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32)
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
