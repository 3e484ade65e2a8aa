"""Arithmetic, comparisons and choices, element by element.

Integers narrower than 32 bits and 8-bit floats are widened, computed and narrowed: chips have no units for them all.
Mosaic computes bfloat16 itself where the chip has none. Shifts by as many bits as there are, or more, give what
XLA's give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math
from jaxlib.mosaic.python import tpu

from palladion import jaxlink
from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import full, like, splat
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import element_bits, element_type, i32, is_bool, is_float, is_unsigned, value_type
from palladion.language import ops


# --- widening ---------------------------------------------------------------------------------------------------------
def widened(x: ir.Value, dtype: Any) -> ir.Value:
    """An integer in 32 bits, an 8-bit float or a scalar of 16 bits in float32; others as they are."""
    if is_bool(dtype):
        return x
    if is_float(dtype):
        least = 16 if build.is_vector(x) else 32  # the scalar unit has 32 bits only
        return arith.extf(like(x, ir.F32Type.get()), x) if element_bits(dtype) < least else x
    if element_bits(dtype) == 32:
        return x
    return (arith.extui if is_unsigned(dtype) else arith.extsi)(like(x, i32()), x)


def widened_type(dtype: Any) -> ir.Type:
    """A type of elements that holds what `widened` gives."""
    if is_float(dtype):
        return ir.F32Type.get()
    return element_type(dtype) if is_bool(dtype) else i32()


def narrowed(x: ir.Value, aval: Any) -> ir.Value:
    """Back from `widened` (or from float32) to a result's type."""
    kind = value_type(aval)
    if x.type == kind:
        return x
    return (arith.truncf if is_float(aval.dtype) else arith.trunci)(kind, x)


def float32(x: ir.Value, dtype: Any) -> ir.Value:
    wide = like(x, ir.F32Type.get())
    return x if x.type == wide else arith.extf(wide, x)


def in_vectors(emit: Callable) -> Callable:
    """An operation that the scalar unit has not, or not for narrow integers, to which Mosaic's simplifier turns back
    what was widened: scalars go through a vector of one element."""

    def run(*values: ir.Value) -> ir.Value:
        if build.is_vector(values[0]) or all(build.is_mask(x) for x in values):
            return emit(*values)
        return build.extract(emit(*[splat(x, (1, 1)) for x in values]))

    return run


def lifted(eqn: Any, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Operands at the shape of the result: lax lets scalars and dimensions of size 1 stand beside arrays."""
    shape = eqn.outvars[0].aval.shape
    return [build.broadcast(x, shape, range(len(shape))) if build.shape_of(x) != shape else x for x in inputs]


def operands(eqn: Any, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Operands at the shape of the result, widened."""
    return [widened(x, v.aval.dtype) for x, v in zip(lifted(eqn, inputs), eqn.invars)]


# --- operations with one result of the operands' type -----------------------------------------------------------------
def _by_kind(
    floats: Callable | None = None,
    signed: Callable | None = None,
    unsigned: Callable | None = None,
    bools: Callable | None = None,
    wide_floats: bool = False,
) -> Callable:
    """A rule that picks an MLIR operation by the kind of the operands; a kind without one is refused.

    `wide_floats`: the operation is there for float32 only.
    """

    def rule(ev: Emitter, eqn, *inputs):
        aval, dtype = eqn.outvars[0].aval, eqn.invars[0].aval.dtype
        if is_bool(dtype):
            emit = bools
        elif is_float(dtype):
            emit = floats
        else:
            emit = signed if not is_unsigned(dtype) else unsigned or signed
        if emit is None:
            raise ev.refuse(eqn, f"{eqn.primitive} of {dtype}")
        values = operands(eqn, inputs)
        if wide_floats and is_float(dtype) and element_bits(dtype) == 16:
            values = [float32(x, dtype) for x in values]
        return narrowed(emit(*values), aval)

    return rule


def _rem(a, b):
    return arith.remf(a, b)


def _neg(x):
    return arith.subi(full(x.type, 0), x)


def _not(x):
    return arith.xori(x, full(x.type, -1))


def _sign_float(x):
    zero, one = full(x.type, 0), full(x.type, 1)
    up = arith.select(arith.cmpf(arith.CmpFPredicate.OGT, x, zero), one, x)
    return arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, zero), full(x.type, -1), up)  # 0 and NaN stay


def _sign_int(x):
    zero = full(x.type, 0)
    up = arith.select(arith.cmpi(arith.CmpIPredicate.sgt, x, zero), full(x.type, 1), zero)
    return arith.select(arith.cmpi(arith.CmpIPredicate.slt, x, zero), full(x.type, -1), up)


def _sign_uint(x):
    zero = full(x.type, 0)
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, x, zero), zero, full(x.type, 1))


def _logistic(x):
    if build.is_vector(x):
        return tpu.logistic(x)
    one = full(x.type, 1)
    return arith.divf(one, arith.addf(one, math.exp(arith.negf(x))))


def _least_or_greatest(greatest: bool, dtype: Any) -> Callable:
    """The smaller or larger of two operands that `widened` gave."""
    if is_float(dtype):
        return arith.maximumf if greatest else arith.minimumf
    if is_bool(dtype):
        return _OR if greatest else _AND
    if element_bits(dtype) == 32:
        if is_unsigned(dtype):
            return arith.maxui if greatest else arith.minui
        return arith.maxsi if greatest else arith.minsi
    compare = arith.CmpIPredicate.sgt if greatest else arith.CmpIPredicate.slt

    def by_difference(a, b):  # the compiler narrows arith.minsi to the operands' width, where it then has none
        apart, zero = arith.subi(a, b), full(a.type, 0)
        return arith.addi(b, arith.select(arith.cmpi(compare, apart, zero), apart, zero))

    return by_difference


_AND, _OR, _XOR = in_vectors(arith.andi), in_vectors(arith.ori), in_vectors(arith.xori)
_TABLE: dict[Any, Callable] = {
    lax.add_p: _by_kind(arith.addf, arith.addi, bools=_OR),
    jaxlink.add_any_p: _by_kind(arith.addf, arith.addi, bools=_OR),
    lax.sub_p: _by_kind(arith.subf, arith.subi),
    lax.mul_p: _by_kind(arith.mulf, arith.muli, bools=_AND),
    lax.div_p: _by_kind(arith.divf, arith.divsi, arith.divui),
    lax.rem_p: _by_kind(_rem, arith.remsi, arith.remui, wide_floats=True),
    lax.neg_p: _by_kind(arith.negf, _neg),
    lax.abs_p: _by_kind(math.absf, math.absi, lambda x: x),
    lax.sign_p: _by_kind(_sign_float, _sign_int, _sign_uint),
    lax.floor_p: _by_kind(math.floor),
    lax.ceil_p: _by_kind(math.ceil),
    lax.exp_p: _by_kind(math.exp),
    lax.exp2_p: _by_kind(math.exp2),
    lax.log_p: _by_kind(math.log),
    lax.log2_p: _by_kind(math.log2),
    lax.log1p_p: _by_kind(math.log1p),
    lax.tanh_p: _by_kind(math.tanh),
    lax.logistic_p: _by_kind(_logistic),
    lax.sin_p: _by_kind(math.sin),
    lax.cos_p: _by_kind(math.cos),
    lax.tan_p: _by_kind(math.tan, wide_floats=True),
    lax.sqrt_p: _by_kind(math.sqrt),
    lax.rsqrt_p: _by_kind(math.rsqrt),
    lax.erf_p: _by_kind(math.erf),
    lax.atan2_p: _by_kind(math.atan2, wide_floats=True),
    lax.square_p: _by_kind(lambda x: arith.mulf(x, x), lambda x: arith.muli(x, x)),
    lax.and_p: _by_kind(None, _AND, _AND, _AND),
    lax.or_p: _by_kind(None, _OR, _OR, _OR),
    lax.xor_p: _by_kind(None, _XOR, _XOR, _XOR),
    lax.not_p: _by_kind(None, _not, _not, _not),
    lax.population_count_p: _by_kind(None, in_vectors(math.ctpop)),
}
for _primitive, _rule in _TABLE.items():
    RULES.rule(_primitive)(_rule)


def _extreme(greatest: bool) -> Callable:
    def rule(ev: Emitter, eqn, *inputs):
        emit = _least_or_greatest(greatest, eqn.invars[0].aval.dtype)
        return narrowed(emit(*operands(eqn, inputs)), eqn.outvars[0].aval)

    return rule


RULES.rule(lax.max_p)(_extreme(greatest=True))
RULES.rule(lax.min_p)(_extreme(greatest=False))


@RULES.rule(lax.clz_p)
def _clz(ev: Emitter, eqn, x):
    aval = eqn.outvars[0].aval
    x = widened(x, jnp.dtype(f"uint{element_bits(aval.dtype)}"))
    return narrowed(arith.subi(math.ctlz(x), full(x.type, 32 - element_bits(aval.dtype))), aval)


@RULES.rule(lax.pow_p)
def _pow(ev: Emitter, eqn, *inputs):
    aval = eqn.outvars[0].aval
    if not is_float(aval.dtype):
        raise ev.refuse(eqn, f"pow of {aval.dtype}")
    base, exponent = lifted(eqn, inputs)
    base = float32(base, eqn.invars[0].aval.dtype)
    kind = eqn.invars[1].aval.dtype
    exponent = float32(exponent, kind) if is_float(kind) else arith.sitofp(base.type, widened(exponent, kind))
    return narrowed(in_vectors(math.powf)(base, exponent), aval)


@RULES.rule(lax.integer_pow_p)
def _integer_pow(ev: Emitter, eqn, x):
    aval, y = eqn.outvars[0].aval, eqn.params["y"]
    (x,) = operands(eqn, [x])
    multiply = arith.mulf if is_float(aval.dtype) else arith.muli
    if y < 0 and not is_float(aval.dtype):
        raise ev.refuse(eqn, f"integer_pow of {aval.dtype} with the exponent {y}")
    result, power, n = None, x, abs(y)
    while n:
        if n & 1:
            result = power if result is None else multiply(result, power)
        n >>= 1
        power = multiply(power, power) if n else power
    result = full(x.type, 1) if result is None else result
    return narrowed(arith.divf(full(x.type, 1), result) if y < 0 else result, aval)


@RULES.rule(lax.round_p)
def _round(ev: Emitter, eqn, x):
    to_even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    (x,) = operands(eqn, [x])
    return narrowed((math.roundeven if to_even else math.round)(x), eqn.outvars[0].aval)


@RULES.rule(lax.is_finite_p)
def _is_finite(ev: Emitter, eqn, x):
    x = float32(x, eqn.invars[0].aval.dtype)
    return arith.cmpf(arith.CmpFPredicate.OLT, math.absf(x), full(x.type, np.inf))


# --- shifts -----------------------------------------------------------------------------------------------------------
def _shift(emit: Callable, arithmetic: bool) -> Callable:
    def rule(ev: Emitter, eqn, *inputs):
        aval = eqn.outvars[0].aval
        bits = element_bits(aval.dtype)
        x, by = lifted(eqn, inputs)
        if emit is arith.shrui:  # zeros come in from above, whatever the sign
            x = widened(x, jnp.dtype(f"uint{bits}"))
        else:
            x = widened(x, jnp.dtype(f"int{bits}") if arithmetic else aval.dtype)
        by = widened(by, jnp.dtype(f"uint{bits}"))
        amount = eqn.invars[1]
        if isinstance(amount, jaxlink.Literal) and 0 <= int(amount.val) < bits:
            return narrowed(emit(x, by), aval)
        last = full(by.type, bits - 1)
        if arithmetic:  # by more than there are: as by all but one
            return narrowed(emit(x, arith.minui(by, last)), aval)
        inside = arith.cmpi(arith.CmpIPredicate.ule, by, last)
        return narrowed(arith.select(inside, emit(x, arith.minui(by, last)), full(x.type, 0)), aval)

    return rule


RULES.rule(lax.shift_left_p)(_shift(arith.shli, False))
RULES.rule(lax.shift_right_logical_p)(_shift(arith.shrui, False))
RULES.rule(lax.shift_right_arithmetic_p)(_shift(arith.shrsi, True))


# --- comparisons and choices ------------------------------------------------------------------------------------------
_F, _I = arith.CmpFPredicate, arith.CmpIPredicate
_COMPARISONS = {
    lax.eq_p: (_F.OEQ, _I.eq, _I.eq),
    lax.ne_p: (_F.OEQ, _I.ne, _I.ne),  # turned round below: Mosaic has no unordered comparisons
    lax.lt_p: (_F.OLT, _I.slt, _I.ult),
    lax.le_p: (_F.OLE, _I.sle, _I.ule),
    lax.gt_p: (_F.OGT, _I.sgt, _I.ugt),
    lax.ge_p: (_F.OGE, _I.sge, _I.uge),
}


def _compare(primitive: Any) -> Callable:
    floats, signed, unsigned = _COMPARISONS[primitive]

    def rule(ev: Emitter, eqn, *inputs):
        dtype = eqn.invars[0].aval.dtype
        a, b = operands(eqn, inputs)
        if is_float(dtype):
            same = arith.cmpf(floats, a, b)
            return _not(same) if primitive is lax.ne_p else same
        if is_bool(dtype):
            return _compare_masks(primitive, a, b)
        return arith.cmpi(unsigned if is_unsigned(dtype) else signed, a, b)

    return rule


def _compare_masks(primitive: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    if primitive is lax.eq_p:
        return _not(arith.xori(a, b))
    if primitive is lax.ne_p:
        return arith.xori(a, b)
    if primitive in (lax.gt_p, lax.le_p):
        result = arith.andi(a, _not(b))
        return result if primitive is lax.gt_p else _not(result)
    result = arith.andi(_not(a), b)
    return result if primitive is lax.lt_p else _not(result)


for _primitive in _COMPARISONS:
    RULES.rule(_primitive)(_compare(_primitive))


def choose(condition: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    """`yes` where a mask (or scalar) holds, `no` elsewhere; both of one type."""
    if build.is_vector(yes) and not build.is_vector(condition):
        condition = splat(condition, build.shape_of(yes))
    if not build.is_vector(yes) and (narrow := build.widening(build.element_of(yes))) is not None:
        up, down, wide = narrow  # scalars have 32 bits
        return down(yes.type, in_vectors(arith.select)(condition, up(wide, yes), up(wide, no)))
    if build.is_mask(yes):
        return arith.ori(arith.andi(condition, yes), arith.andi(_not(condition), no))
    return arith.select(condition, yes, no)


@RULES.rule(lax.select_n_p)
def _select_n(ev: Emitter, eqn, which, *cases):
    if len(cases) == 1:
        return cases[0]
    if build.is_mask(which):
        return choose(which, cases[1], cases[0])
    which = widened(which, eqn.invars[0].aval.dtype)
    result = cases[-1]
    for n, case in reversed(list(enumerate(cases[:-1]))):
        result = choose(arith.cmpi(_I.eq, which, full(which.type, n)), case, result)
    return result


@RULES.rule(lax.clamp_p)
def _clamp(ev: Emitter, eqn, *inputs):
    dtype = eqn.outvars[0].aval.dtype
    low, x, high = operands(eqn, inputs)
    least, greatest = _least_or_greatest(False, dtype), _least_or_greatest(True, dtype)
    return narrowed(least(greatest(x, low), high), eqn.outvars[0].aval)


RULES.rule(lax.copy_p, lax.stop_gradient_p)(lambda ev, eqn, x: x)
RULES.rule(lax.optimization_barrier_p)(lambda ev, eqn, *xs: list(xs))


@RULES.rule(ops.multiple_of_p)
def _multiple_of(ev: Emitter, eqn, x):
    values = eqn.params["values"]
    return x if build.is_vector(x) else tpu.assume_multiple(x, int(np.lcm.reduce(values)))
