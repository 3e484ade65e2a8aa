"""Rules: arithmetic, comparisons, logic, choices and conversions, element by element.

Floats below 32 bits: additions, subtractions and products of bfloat16 and float16 are instructions; everything else is
computed in float32 and rounded once, and float8 always. Integer division truncates, as in JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.lowering import RULES, Lowering, dtype_of, refusal

_F, _I = arith.CmpFPredicate, arith.CmpIPredicate
_F8 = ("float8_e4m3fn", "float8_e5m2")


# --- conversions ------------------------------------------------------------------------------------------------------
def cast(v: Any, old: Any, new: Any) -> Any:
    """Convert as `lax.convert_element_type` does: towards zero to integers, to nearest even to floats."""
    old, new = jnp.dtype(old), jnp.dtype(new)
    if old == new:
        return v
    kind = emit.typed(emit.shape_of(v), emit.element_type(new))
    floats = emit.is_float(old), emit.is_float(new)
    if new == np.bool_:
        zero = emit.like(v, 0)
        return arith.cmpf(_F.UNE, v, zero) if floats[0] else arith.cmpi(_I.ne, v, zero)
    if all(floats):
        return _float_to_float(v, old, new, kind)
    if floats[1]:
        if emit.bits_of(new) < 32:  # one rounding too many for integers of more than 24 bits, as on other targets
            return cast(cast(v, old, jnp.float32), jnp.float32, new)
        return arith.uitofp(kind, v) if emit.is_unsigned(old) else arith.sitofp(kind, v)
    if floats[0]:
        v = cast(v, old, jnp.float32) if emit.bits_of(old) < 32 else v
        return _float_to_int(v, new, kind)
    a, b = emit.bits_of(old), emit.bits_of(new)
    if a == b:
        return v
    if b < a:
        return arith.trunci(kind, v)
    return arith.extui(kind, v) if emit.is_unsigned(old) else arith.extsi(kind, v)


def _float_to_int(v: Any, new: Any, kind: Any) -> Any:
    wide = max(emit.bits_of(new), 32)
    element = emit.typed(emit.shape_of(v), ir.IntegerType.get_signless(wide))
    whole = arith.fptoui(element, v) if emit.is_unsigned(new) else arith.fptosi(element, v)
    return whole if wide == emit.bits_of(new) else arith.trunci(kind, whole)


def _float_to_float(v: Any, old: Any, new: Any, kind: Any) -> Any:
    if str(old) in _F8 or str(new) in _F8:
        if str(old) in _F8 and str(new) in _F8:
            return cast(cast(v, old, jnp.float32), jnp.float32, new)
        nearest = tt.RoundingMode.RTNE if emit.bits_of(new) < emit.bits_of(old) else None
        return tt.fp_to_fp(kind, v, rounding=nearest)
    a, b = emit.bits_of(old), emit.bits_of(new)
    if a == b:
        return cast(cast(v, old, jnp.float32), jnp.float32, new)
    if b < a and a == 64 and b == 16:
        return cast(cast(v, old, jnp.float32), jnp.float32, new)
    return arith.extf(kind, v) if b > a else arith.truncf(kind, v)


@RULES.rule(lax.convert_element_type_p)
def _convert(ctx: Lowering, eqn, x) -> Any:
    old, new = dtype_of(eqn.invars[0]), jnp.dtype(eqn.params["new_dtype"])
    if "float8_e4m3fn" in (str(old), str(new)) and old != new:
        check_f8(ctx, eqn)
    return cast(x, old, new)


def check_f8(ctx: Lowering, eqn: Any) -> None:
    """Raises: NotImplementedError: the chip has no conversions of float8_e4m3fn."""
    if ctx.sm < 89:
        headline = f"sm_{ctx.sm} does not compute with float8_e4m3fn; that came with sm_89."
        raise refusal(NotImplementedError, headline, eqn, "use float8_e5m2, bfloat16 or int8 there")


@RULES.rule(lax.bitcast_convert_type_p)
def _bitcast(ctx: Lowering, eqn, x) -> Any:
    old, new = dtype_of(eqn.invars[0]), jnp.dtype(eqn.params["new_dtype"])
    if emit.bits_of(old) != emit.bits_of(new):
        raise refusal(NotImplementedError, f"A bitcast from {old} to {new} changes the number of elements.", eqn)
    return bitcast(x, new)


def bitcast(x: Any, dtype: Any) -> Any:
    """The same bits as another dtype of the same width."""
    kind = emit.typed(emit.shape_of(x), emit.element_type(dtype))
    return x if kind == x.type else tt.bitcast(kind, x)


@RULES.rule(lax.reduce_precision_p)
def _reduce_precision(ctx: Lowering, eqn, x) -> Any:
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    own = dtype_of(eqn.invars[0])
    for dtype in (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16):
        if (jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant) == bits:
            return cast(cast(x, own, dtype), dtype, own) if emit.bits_of(dtype) < emit.bits_of(own) else x
    raise refusal(NotImplementedError, f"reduce_precision to {bits[0]} and {bits[1]} bits is not a dtype.", eqn)


# --- arithmetic -------------------------------------------------------------------------------------------------------
def in_f32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute floats below 32 bits in float32: a function of (dtype, *values) that gives a value of that dtype."""

    def wide(dtype: Any, *values: Any) -> Any:
        if not emit.is_float(dtype) or emit.bits_of(dtype) >= 32:
            return function(dtype, *values)
        result = function(jnp.dtype(jnp.float32), *(cast(v, dtype, jnp.float32) for v in values))
        return cast(result, jnp.float32, dtype)

    return wide


def _arithmetic(floating: Callable, signed: Callable, unsigned: Callable | None = None, *, narrow: bool = False) -> Any:
    def compute(dtype: Any, *values: Any) -> Any:
        spread = emit.spread(*values)
        if emit.is_float(dtype):
            return floating(*spread)
        return (unsigned or signed)(*spread) if emit.is_unsigned(dtype) else signed(*spread)

    computed = in_f32(compute)

    def choose(dtype: Any, *values: Any) -> Any:
        return compute(dtype, *values) if narrow and str(dtype) not in _F8 else computed(dtype, *values)

    return choose


add = _arithmetic(arith.addf, arith.addi, narrow=True)
sub = _arithmetic(arith.subf, arith.subi, narrow=True)
mul = _arithmetic(arith.mulf, arith.muli, narrow=True)
div = _arithmetic(arith.divf, arith.divsi, arith.divui)
maximum = _arithmetic(arith.maximumf, arith.maxsi, arith.maxui)
minimum = _arithmetic(arith.minimumf, arith.minsi, arith.minui)


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ctx, eqn, x, y: function(dtype_of(eqn.outvars[0]), x, y)


for _primitive, _function in {
    lax.sub_p: sub,
    lax.div_p: div,
    lax.max_p: maximum,
    lax.min_p: minimum,
}.items():
    RULES.rule(_primitive)(_binary(_function))


@RULES.rule(lax.add_p, jaxlink.add_any_p)
def _add(ctx: Lowering, eqn, x, y) -> Any:
    if dtype_of(eqn.outvars[0]) == np.bool_:
        return arith.ori(*emit.spread(x, y))
    return add(dtype_of(eqn.outvars[0]), x, y)


@RULES.rule(lax.mul_p)
def _mul(ctx: Lowering, eqn, x, y) -> Any:
    if dtype_of(eqn.outvars[0]) == np.bool_:
        return arith.andi(*emit.spread(x, y))
    return mul(dtype_of(eqn.outvars[0]), x, y)


def negative(dtype: Any, x: Any) -> Any:
    if not emit.is_float(dtype):
        return arith.subi(emit.like(x, 0), x)
    if str(dtype) in _F8:
        return in_f32(lambda _, v: arith.negf(v))(dtype, x)
    return arith.negf(x)


RULES.rule(lax.neg_p)(lambda ctx, eqn, x: negative(dtype_of(eqn.outvars[0]), x))


@in_f32
def absolute(dtype: Any, x: Any) -> Any:
    if emit.is_float(dtype):
        return mlir_math.absf(x)
    return x if emit.is_unsigned(dtype) else arith.maxsi(x, arith.subi(emit.like(x, 0), x))


RULES.rule(lax.abs_p)(lambda ctx, eqn, x: absolute(dtype_of(eqn.outvars[0]), x))


@RULES.rule(lax.sign_p)
def _sign(ctx: Lowering, eqn, x) -> Any:
    dtype = dtype_of(eqn.outvars[0])
    if emit.is_float(dtype):
        return in_f32(_sign_of_float)(dtype, x)
    if emit.is_unsigned(dtype):
        return arith.minui(x, emit.like(x, 1))
    return arith.maxsi(arith.minsi(x, emit.like(x, 1)), emit.like(x, -1))


def _sign_of_float(dtype: Any, x: Any) -> Any:
    """1 or -1 by the sign; zeros and NaN as they are."""
    zero = emit.like(x, 0)
    up = arith.select(arith.cmpf(_F.OGT, x, zero), emit.like(x, 1), x)
    return arith.select(arith.cmpf(_F.OLT, x, zero), emit.like(x, -1), up)


RULES.rule(lax.square_p)(lambda ctx, eqn, x: mul(dtype_of(eqn.outvars[0]), x, x))


@RULES.rule(lax.integer_pow_p)
def _integer_pow(ctx: Lowering, eqn, x) -> Any:
    dtype, n = dtype_of(eqn.outvars[0]), eqn.params["y"]

    def power(dtype: Any, x: Any) -> Any:
        result, base, rest = None, x, abs(n)
        while rest:
            if rest & 1:
                result = base if result is None else mul(dtype, result, base)
            rest >>= 1
            base = mul(dtype, base, base) if rest else base
        if result is None:
            return emit.like(x, 1)
        return div(dtype, emit.like(x, 1), result) if n < 0 else result

    return in_f32(power)(dtype, x)


# --- comparisons and logic --------------------------------------------------------------------------------------------
_COMPARED = {
    lax.eq_p: (_F.OEQ, _I.eq, _I.eq),
    lax.ne_p: (_F.UNE, _I.ne, _I.ne),
    lax.lt_p: (_F.OLT, _I.slt, _I.ult),
    lax.le_p: (_F.OLE, _I.sle, _I.ule),
    lax.gt_p: (_F.OGT, _I.sgt, _I.ugt),
    lax.ge_p: (_F.OGE, _I.sge, _I.uge),
}


def compare(primitive: Any, dtype: Any, x: Any, y: Any) -> Any:
    """x < y and the like, as booleans."""
    floating, signed, unsigned = _COMPARED[primitive]
    if emit.is_float(dtype):
        if emit.bits_of(dtype) < 32:
            x, y = cast(x, dtype, jnp.float32), cast(y, dtype, jnp.float32)
        return arith.cmpf(floating, *emit.spread(x, y))
    return arith.cmpi(unsigned if emit.is_unsigned(dtype) else signed, *emit.spread(x, y))


def _comparison(primitive: Any) -> Callable[..., Any]:
    return lambda ctx, eqn, x, y: compare(primitive, dtype_of(eqn.invars[0]), x, y)


for _primitive in _COMPARED:
    RULES.rule(_primitive)(_comparison(_primitive))

for _primitive, _op in {lax.and_p: arith.andi, lax.or_p: arith.ori, lax.xor_p: arith.xori}.items():
    RULES.rule(_primitive)(lambda ctx, eqn, x, y, op=_op: op(*emit.spread(x, y)))

RULES.rule(lax.not_p)(lambda ctx, eqn, x: arith.xori(x, emit.like(x, -1)))


def _shift(op: Any, fill: Any) -> Callable[..., Any]:
    """Shifts by as many bits as there are, or more, leave nothing (or the sign); the instructions leave it open."""

    def rule(ctx: Lowering, eqn, x, y) -> Any:
        x, y = emit.spread(x, y)
        bits = emit.bits_of(dtype_of(eqn.outvars[0]))
        fits = arith.cmpi(_I.ult, y, emit.like(y, bits))
        return fill(op, x, y, fits, bits)

    return rule


def _zero_beyond(op: Any, x: Any, y: Any, fits: Any, bits: int) -> Any:
    return arith.select(fits, op(x, y), emit.like(x, 0))


def _sign_beyond(op: Any, x: Any, y: Any, fits: Any, bits: int) -> Any:
    return op(x, arith.select(fits, y, emit.like(y, bits - 1)))


RULES.rule(lax.shift_left_p)(_shift(arith.shli, _zero_beyond))
RULES.rule(lax.shift_right_logical_p)(_shift(arith.shrui, _zero_beyond))
RULES.rule(lax.shift_right_arithmetic_p)(_shift(arith.shrsi, _sign_beyond))


# --- choices ----------------------------------------------------------------------------------------------------------
@RULES.rule(lax.select_n_p)
def _select_n(ctx: Lowering, eqn, which, *cases) -> Any:
    if dtype_of(eqn.invars[0]) == np.bool_:
        return cases[0] if len(cases) == 1 else emit.select(which, cases[1], cases[0])
    result = cases[-1]
    for k in range(len(cases) - 2, -1, -1):
        result = emit.select(arith.cmpi(_I.sle, which, emit.like(which, k)), cases[k], result)
    return result


@RULES.rule(lax.clamp_p)
def _clamp(ctx: Lowering, eqn, low, x, high) -> Any:
    dtype = dtype_of(eqn.outvars[0])
    return minimum(dtype, maximum(dtype, x, low), high)


@RULES.rule(lax.is_finite_p)
def _is_finite(ctx: Lowering, eqn, x) -> Any:
    dtype = dtype_of(eqn.invars[0])
    x = cast(x, dtype, jnp.float32) if emit.bits_of(dtype) < 32 else x
    return arith.cmpf(_F.OLT, mlir_math.absf(x), emit.like(x, float("inf")))


RULES.rule(lax.copy_p, lax.stop_gradient_p, lax.optimization_barrier_p)(lambda ctx, eqn, *values: list(values))


@RULES.rule(lax.mulhi_p)
def _mulhi(ctx: Lowering, eqn, x, y) -> Any:
    dtype = dtype_of(eqn.outvars[0])
    if str(dtype) in ("uint32", "uint64"):
        return tt.mulhiui(*emit.spread(x, y))
    if str(dtype) != "int32":
        raise RULES.unsupported(eqn)
    wide = [cast(v, dtype, jnp.int64) for v in emit.spread(x, y)]
    product = arith.shrsi(arith.muli(*wide), emit.like(wide[0], 32))
    return cast(product, jnp.int64, jnp.int32)
