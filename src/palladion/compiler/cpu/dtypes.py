"""How dtypes are held in LLVM values, and conversions among them with XLA's rules.

f32, f64 and integers are themselves; a bool is `i1` as a value and a byte in memory; bf16, f16 and the 8-bit floats
are held as their bits and computed with as f32. Conversions round to nearest even; floats to integers saturate and
NaN gives 0; values too large for e4m3fn become NaN, for e5m2 infinity.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from palladion.compiler.cpu import ir as nests
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

_SMALL = {  # exponent bits, mantissa bits, bias, overflows to NaN (else infinity)
    "float8_e4m3fn": (4, 3, 7, True),
    "float8_e5m2": (5, 2, 15, False),
}
HELD = {"float32", "float64", "bfloat16", "float16", "bool", *_SMALL} | {
    f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)
}


def held(dtype: Any) -> Any:
    """The LLVM type of a value."""
    if dtype == nests.INDEX:
        return i64
    name = jnp.dtype(dtype).name
    if name in ("float32", "float64"):
        return f32 if name == "float32" else f64
    return i1 if name == "bool" else ir.IntType(jnp.dtype(dtype).itemsize * 8)


def stored(dtype: Any) -> Any:
    """The LLVM type of an element in memory."""
    return i8 if jnp.dtype(dtype) == np.bool_ else held(dtype)


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
        name = "fptosi.sat" if is_signed(target) else "fptoui.sat"
        return intrinsic(b, ty, name, x, types=(ty, x.type))
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
    _, mantissa, bias, _ = _SMALL[name]
    x = b.zext(bits, wide_int)
    magnitude = b.and_(x, const(0x7F, wide_int))
    sign = b.shl(b.and_(x, const(0x80, wide_int)), const(24, wide_int))
    normal = b.add(b.shl(magnitude, const(23 - mantissa, wide_int)), const((127 - bias) << 23, wide_int))
    tiny = b.bitcast(b.fmul(b.uitofp(magnitude, wide), const(2.0 ** (1 - bias - mantissa), wide)), wide_int)
    value = b.select(b.icmp_unsigned("<", magnitude, const(1 << mantissa, wide_int)), tiny, normal)
    if name == "float8_e5m2":
        special = b.icmp_unsigned(">=", magnitude, const(0x7C, wide_int))
        infinite = b.or_(const(0x7F800000, wide_int), b.shl(b.and_(magnitude, const(3, wide_int)), const(21, wide_int)))
        value = b.select(special, infinite, value)
    else:
        value = b.select(b.icmp_unsigned("==", magnitude, const(0x7F, wide_int)), const(0x7FC00000, wide_int), value)
    return b.bitcast(b.or_(value, sign), wide)


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
    _, mantissa, bias, to_nan = _SMALL[name]
    sign = b.and_(b.lshr(bits, const(24, wide_int)), const(0x80, wide_int))
    u = b.and_(bits, const(0x7FFFFFFF, wide_int))
    magnitude = b.bitcast(u, x.type)
    drop = 23 - mantissa
    odd = b.and_(b.lshr(u, const(drop, wide_int)), const(1, wide_int))
    rounded = b.lshr(b.add(u, b.add(odd, const((1 << (drop - 1)) - 1, wide_int))), const(drop, wide_int))
    normal = b.sub(rounded, const((127 - bias) << mantissa, wide_int))
    scaled = b.fmul(magnitude, const(2.0 ** (bias - 1 + mantissa), x.type))
    tiny = b.fptoui(intrinsic(b, x.type, "rint", _below(b, scaled, float(1 << (mantissa + 1)))), wide_int)
    smallest = const(2.0 ** (1 - bias), x.type)
    result = b.select(b.fcmp_ordered("<", magnitude, smallest), tiny, normal)
    top = 0x7E if to_nan else 0x7B
    over = 0x7F if to_nan else 0x7C
    result = b.select(b.icmp_signed(">", result, const(top, wide_int)), const(over, wide_int), result)
    nan = const(0x7F if to_nan else 0x7E, wide_int)
    result = b.select(b.fcmp_unordered("!=", x, x), nan, result)
    return b.trunc(b.or_(result, sign), like(i8, x.type))


def _below(b: Any, x: Any, limit: float) -> Any:
    """x, or the limit where x is larger or NaN: what a conversion to an integer can take."""
    bound = const(limit, x.type)
    return b.select(b.fcmp_ordered("<", x, bound), x, bound)
