"""How dtypes are held in LLVM values, and conversions among them with XLA's rules.

f32, f64 and integers are themselves; a bool is `i1` as a value and a byte in memory; bf16, f16 and the 8-bit floats
are held as their bits and computed with as f32. Integers and floats of less than a byte take a byte each in memory.
Conversions round to nearest even; floats to integers saturate and NaN gives 0; what is too large for a small float
becomes infinity, NaN or (float4_e2m1fn) the largest number. Source of the formats: the ml_dtypes documentation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from palladion.compiler.cpu import ir as nests
from palladion.compiler.cpu.boundary import UNPACKED
from palladion.compiler.cpu.builder import (
    const,
    f16,
    f32,
    f64,
    i1,
    i8,
    i32,
    i64,
    intrinsic,
    is_float,
    like,
    scalar_of,
    size_of,
)


@dataclasses.dataclass(frozen=True)
class Format:
    """A float of at most 8 bits: sign, `exponent` bits, `mantissa` bits.

    Attributes:
      bias: of the exponent.
      top: the bits of the largest finite number; over: those that take the place of larger ones.
      nan: the bits of NaN, or what becomes of it where there is none.
      infinite: whether the number above the largest finite one is infinity.
      signless: no sign bit, no zero, no subnormal numbers, and ties are rounded up (e8m0fnu).
      zero_sign: whether there is a negative zero; in the fnuz formats its bits are NaN.
    """

    exponent: int
    mantissa: int
    bias: int
    top: int
    over: int
    nan: int
    has_nan: bool = True
    infinite: bool = False
    signless: bool = False
    zero_sign: bool = True

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 0 if self.signless else 1 << (self.exponent + self.mantissa)


def _ieee(exponent: int, mantissa: int) -> Format:
    infinity = ((1 << exponent) - 1) << mantissa
    bias = (1 << (exponent - 1)) - 1
    return Format(exponent, mantissa, bias, infinity - 1, infinity, infinity | 1 << (mantissa - 1), infinite=True)


def _fnuz(exponent: int, mantissa: int, bias: int) -> Format:
    return Format(exponent, mantissa, bias, 0x7F, 0x80, 0x80, zero_sign=False)


_SMALL = {
    "float8_e4m3fn": Format(4, 3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e5m2": _ieee(5, 2),
    "float8_e4m3": _ieee(4, 3),
    "float8_e3m4": _ieee(3, 4),
    "float8_e4m3b11fnuz": _fnuz(4, 3, 11),
    "float8_e4m3fnuz": _fnuz(4, 3, 8),
    "float8_e5m2fnuz": _fnuz(5, 2, 16),
    "float8_e8m0fnu": Format(8, 0, 127, 0xFE, 0xFF, 0xFF, signless=True),
    "float4_e2m1fn": Format(2, 1, 1, 0x7, 0x7, 0x8, has_nan=False),
}
HELD = {"float32", "float64", "bfloat16", "float16", "bool", *_SMALL, *UNPACKED} | {
    f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)
}


def sign_bit(dtype: Any) -> int:
    """The sign bit of a float of at most 16 bits."""
    name = jnp.dtype(dtype).name
    return _SMALL[name].sign if name in _SMALL else 0x8000


def has_negative_zero(dtype: Any) -> bool:
    """Whether a float has -0 (the fnuz formats have NaN in its place)."""
    name = jnp.dtype(dtype).name
    return name not in _SMALL or _SMALL[name].zero_sign


def held(dtype: Any) -> Any:
    """The LLVM type of a value."""
    if dtype == nests.INDEX:
        return i64
    name = jnp.dtype(dtype).name
    if name in ("float32", "float64"):
        return f32 if name == "float32" else f64
    if name == "bool":
        return i1
    return ir.IntType(jax.dtypes.itemsize_bits(dtype) if is_integer(dtype) else jnp.dtype(dtype).itemsize * 8)


def stored(dtype: Any) -> Any:
    """The LLVM type of an element in memory."""
    ty = held(dtype)
    return i8 if isinstance(ty, ir.IntType) and ty.width < 8 else ty


def to_memory(b: Any, value: Any, dtype: Any) -> Any:
    """A value of `dtype` as it lies in memory."""
    ty = like(stored(dtype), value.type)
    if value.type == ty:
        return value
    return b.sext(value, ty) if is_signed(dtype) else b.zext(value, ty)


def from_memory(b: Any, value: Any, dtype: Any) -> Any:
    """What lies in memory as a value of `dtype`; any nonzero byte is true."""
    ty = like(held(dtype), value.type)
    if value.type == ty:
        return value
    return b.icmp_unsigned("!=", value, const(0, value.type)) if scalar_of(ty) == i1 else b.trunc(value, ty)


def is_integer(dtype: Any) -> bool:
    return dtype != nests.INDEX and jnp.issubdtype(dtype, jnp.integer)


def is_signed(dtype: Any) -> bool:
    return dtype == nests.INDEX or jnp.issubdtype(dtype, jnp.signedinteger)


def is_floating(dtype: Any) -> bool:
    return dtype != nests.INDEX and jnp.issubdtype(dtype, jnp.floating)


def constant(value: Any, dtype: Any, ty: Any) -> Any:
    """A Python number as a value of `dtype`, in every lane of `ty`."""
    if dtype != nests.INDEX and is_floating(dtype) and jnp.dtype(dtype).itemsize < 4:
        bits = np.asarray(value).astype(dtype).view(f"uint{jnp.dtype(dtype).itemsize * 8}")
        return const(int(bits), ty)
    return const(value, ty)


def convert(b: Any, x: Any, source: Any, target: Any) -> Any:
    """A value of one dtype as another."""
    if source == target:
        return x
    if source != nests.INDEX and is_floating(source) and jnp.dtype(source).itemsize < 4:
        return convert(b, widen(b, x, jnp.dtype(source).name), np.dtype("float32"), target)
    if target != nests.INDEX and is_floating(target) and jnp.dtype(target).itemsize < 4:
        wide = convert(b, x, source, np.dtype("float32"))
        return narrow(b, wide, jnp.dtype(target).name)
    from_float, to_float = is_float(x.type), is_floating(target)
    ty = like(held(target), x.type)
    if target != nests.INDEX and jnp.dtype(target) == np.bool_:
        zero = const(0, x.type)
        return b.fcmp_unordered("!=", x, zero) if from_float else b.icmp_unsigned("!=", x, zero)
    if from_float and to_float:
        return b.fpext(x, ty) if size_of(scalar_of(ty)) > size_of(scalar_of(x.type)) else b.fptrunc(x, ty)
    if from_float:
        name, width = "fptosi.sat" if is_signed(target) else "fptoui.sat", scalar_of(ty).width
        if width >= 32:
            return intrinsic(b, ty, name, x, types=(ty, x.type))
        low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed(target) else (0, (1 << width) - 1)
        ends = const(low, x.type), const(high, x.type)  # LLVM's own saturation is many instructions for narrow integers
        held_in = b.select(b.fcmp_ordered(">", x, ends[0]), x, ends[0])
        held_in = b.select(b.fcmp_ordered("<", held_in, ends[1]), held_in, ends[1])
        held_in = b.select(b.fcmp_unordered("uno", x, x), const(0.0, x.type), held_in)
        return b.trunc(b.fptosi(held_in, like(i32, x.type)), ty)
    signed = is_signed(source)
    if to_float:
        return b.sitofp(x, ty) if signed else b.uitofp(x, ty)
    old, new = scalar_of(x.type).width, scalar_of(ty).width
    if new < old:
        return b.trunc(x, ty)
    if new == old:
        return x
    return b.sext(x, ty) if signed else b.zext(x, ty)


def widen(b: Any, bits: Any, name: str) -> Any:
    """A narrow float, given by its bits, as f32 (exact)."""
    wide_int, wide = like(i32, bits.type), like(f32, bits.type)
    if name == "bfloat16":
        return b.bitcast(b.shl(b.zext(bits, wide_int), const(16, wide_int)), wide)
    if name == "float16":
        return b.fpext(b.bitcast(bits, like(f16, bits.type)), wide)
    form = _SMALL[name]
    mantissa, bias = form.mantissa, form.bias
    x = b.zext(bits, wide_int)
    if form.signless:  # a power of two: 2^-127 is subnormal in f32
        tiny = b.icmp_unsigned("==", x, const(0, wide_int))
        value = b.select(tiny, const(0x400000, wide_int), b.shl(x, const(23, wide_int)))
        return b.bitcast(_chosen(b, x, form.nan, 0x7FC00000, value), wide)
    magnitude = b.and_(x, const(form.sign - 1, wide_int))
    sign = b.shl(b.and_(x, const(form.sign, wide_int)), const(31 - form.exponent - mantissa, wide_int))
    normal = b.add(b.shl(magnitude, const(23 - mantissa, wide_int)), const((127 - bias) << 23, wide_int))
    tiny = b.bitcast(b.fmul(b.uitofp(magnitude, wide), const(2.0 ** (1 - bias - mantissa), wide)), wide_int)
    value = b.select(b.icmp_unsigned("<", magnitude, const(1 << mantissa, wide_int)), tiny, normal)
    if form.infinite:
        special = b.icmp_unsigned(">=", magnitude, const(form.over, wide_int))
        payload = b.shl(b.and_(magnitude, const((1 << mantissa) - 1, wide_int)), const(23 - mantissa, wide_int))
        value = b.select(special, b.or_(const(0x7F800000, wide_int), payload), value)
    elif not form.zero_sign:
        return b.bitcast(_chosen(b, x, form.nan, 0x7FC00000, b.or_(value, sign)), wide)
    elif form.has_nan:
        value = _chosen(b, magnitude, form.nan, 0x7FC00000, value)
    return b.bitcast(b.or_(value, sign), wide)


def _chosen(b: Any, x: Any, when: Any, then: int, otherwise: Any) -> Any:
    """`then` where x is `when`."""
    return b.select(b.icmp_unsigned("==", x, const(when, x.type)), const(then, otherwise.type), otherwise)


def narrow(b: Any, x: Any, name: str) -> Any:
    """f32 as the bits of a narrow float, rounded to nearest even."""
    wide_int = like(i32, x.type)
    bits = b.bitcast(x, wide_int)
    if name == "float16":
        return b.bitcast(b.fptrunc(x, like(f16, x.type)), like(ir.IntType(16), x.type))
    if name == "bfloat16":
        odd = b.and_(b.lshr(bits, const(16, wide_int)), const(1, wide_int))
        rounded = b.lshr(b.add(bits, b.add(odd, const(0x7FFF, wide_int))), const(16, wide_int))
        quiet = b.or_(b.lshr(bits, const(16, wide_int)), const(0x40, wide_int))
        return b.trunc(b.select(b.fcmp_unordered("!=", x, x), quiet, rounded), like(ir.IntType(16), x.type))
    form = _SMALL[name]
    mantissa, bias = form.mantissa, form.bias
    u = b.and_(bits, const(0x7FFFFFFF, wide_int))
    magnitude = b.bitcast(u, x.type)
    drop = 23 - mantissa
    odd = const(1, wide_int) if form.signless else b.and_(b.lshr(u, const(drop, wide_int)), const(1, wide_int))
    rounded = b.lshr(b.add(u, b.add(odd, const((1 << (drop - 1)) - 1, wide_int))), const(drop, wide_int))
    result = b.sub(rounded, const((127 - bias) << mantissa, wide_int))
    if not form.signless:
        scaled = b.fmul(magnitude, const(2.0 ** (bias - 1 + mantissa), x.type))
        tiny = b.fptoui(intrinsic(b, x.type, "rint", _below(b, scaled, float(1 << (mantissa + 1)))), wide_int)
        result = b.select(b.fcmp_ordered("<", magnitude, const(2.0 ** (1 - bias), x.type)), tiny, result)
    result = b.select(b.icmp_signed(">", result, const(form.top, wide_int)), const(form.over, wide_int), result)
    result = b.select(b.fcmp_unordered("!=", x, x), const(form.nan, wide_int), result)
    if form.signless:  # neither zero nor negative numbers: they are NaN
        positive = b.icmp_signed(">", bits, const(0, wide_int))
        return b.trunc(b.select(positive, result, const(form.nan, wide_int)), like(i8, x.type))
    sign = b.and_(b.lshr(bits, const(31 - form.exponent - mantissa, wide_int)), const(form.sign, wide_int))
    if not form.zero_sign:  # negative zero would be NaN
        special = b.or_(*(b.icmp_unsigned("==", result, const(n, wide_int)) for n in (0, form.nan)))
        sign = b.select(special, const(0, wide_int), sign)
    return b.trunc(b.or_(result, sign), like(i8, x.type))


def _below(b: Any, x: Any, limit: float) -> Any:
    """x, or the limit where x is larger or NaN: what a conversion to an integer can take."""
    bound = const(limit, x.type)
    return b.select(b.fcmp_ordered("<", x, bound), x, bound)
