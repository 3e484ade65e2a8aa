"""Conversions between dtypes.

Mosaic converts between 32-bit integers and floats of 16 or 32 bits; everything else goes through those. A float
becomes an integer by truncation. What does not fit is the chip's affair, as it is in XLA's conversions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mosaic.python import tpu

from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import full, like
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import element_bits, element_type, i32, is_bool, is_float, is_unsigned, value_type
from palladion.compiler.tpu.rules_elementwise import widened


def convert(x: ir.Value, old: Any, new: Any) -> ir.Value:
    """`x` of dtype `old` as dtype `new`."""
    if old == new:
        return x
    target = like(x, element_type(new))
    if is_bool(new):
        wide = widened(x, old)
        if is_float(old):
            zero = arith.cmpf(arith.CmpFPredicate.OEQ, wide, full(wide.type, 0))
            return arith.xori(zero, full(zero.type, 1))
        return build.as_mask(wide)
    if is_bool(old):
        return convert(build.as_words(x), jnp.dtype("int32"), new)
    if is_float(old) and is_float(new):
        return _float_to_float(x, old, new)
    if is_float(old):
        wide = x if element_bits(old) == 32 else arith.extf(like(x, ir.F32Type.get()), x)
        unsigned = is_unsigned(new) and element_bits(new) == 32
        whole = (arith.fptoui if unsigned else arith.fptosi)(like(x, i32()), wide)
        return whole if element_bits(new) == 32 else arith.trunci(target, whole)
    if is_float(new):
        wide = widened(x, old)
        unsigned = is_unsigned(old) and element_bits(old) == 32
        number = (arith.uitofp if unsigned else arith.sitofp)(like(x, ir.F32Type.get()), wide)
        return _float_to_float(number, jnp.dtype("float32"), new)
    if element_bits(new) > element_bits(old):
        return (arith.extui if is_unsigned(old) else arith.extsi)(target, x)
    return x if element_bits(new) == element_bits(old) else arith.trunci(target, x)


def _float_to_float(x: ir.Value, old: Any, new: Any) -> ir.Value:
    target = like(x, element_type(new))
    if old == new:
        return x
    if element_bits(new) > element_bits(old):
        return arith.extf(target, x)
    if element_bits(new) < element_bits(old):
        return arith.truncf(target, x)
    return arith.truncf(target, arith.extf(like(x, ir.F32Type.get()), x))


@RULES.rule(lax.convert_element_type_p)
def _convert(ev: Emitter, eqn, x):
    return convert(x, eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)


@RULES.rule(lax.reduce_precision_p)
def _reduce_precision(ev: Emitter, eqn, x):
    exponent, mantissa = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    if (exponent, mantissa) == (8, 23):
        return x
    if (exponent, mantissa) == (8, 7):
        down = arith.truncf(like(x, ir.BF16Type.get()), x) if eqn.invars[0].aval.dtype == jnp.float32 else x
        return x if down is x else arith.extf(x.type, down)
    return tpu.reduce_precision(x, exponent, mantissa)


@RULES.rule(lax.bitcast_convert_type_p)
def _bitcast(ev: Emitter, eqn, x):
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    if element_bits(old.dtype) != element_bits(new.dtype) or is_bool(old.dtype) or is_bool(new.dtype):
        raise ev.refuse(eqn, f"bitcast_convert_type from {old.dtype} to {new.dtype}")
    kind = value_type(new)
    return x if kind == x.type else arith.bitcast(kind, x)
