"""The emitter's table: what each scalar operation of the loop nests is in LLVM, for scalars and vectors alike.

Semantics are XLA's: integer division by zero gives -1 and remainder by zero the dividend, shifts by the width or more
give 0 (or the sign), max and min pass NaN on. Elementary functions come from `math`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from palladion.compiler.cpu import dtypes
from palladion.compiler.cpu import math as vector_math
from palladion.compiler.cpu.builder import const, i1, intrinsic, is_float, like, scalar_of

Emit = Callable[..., Any]
TABLE: dict[str, Emit] = {}


def operation(*names: str) -> Callable[[Emit], Emit]:
    """Decorator: the function emits these operations, as `f(b, op, dtype, *values)` with the operands' dtype."""

    def register(function: Emit) -> Emit:
        for name in names:
            TABLE[name] = function
        return function

    return register


def emit(b: Any, op: Any, values: Sequence[Any]) -> Any:
    """The value of an operation whose operands are ready (and all of one width)."""
    dtype = op.args[-1].dtype if op.args else op.dtype
    function = TABLE.get(op.name)
    if function is not None:
        return function(b, op, dtype, *values)
    return vector_math.RULES[op.name].emit(b, *values, *op.params)


def branches(op: Any) -> bool:
    """Whether an operation is emitted as more than one basic block (huge arguments are handled apart)."""
    return op.name in ("sin", "cos", "tan") or (op.name == "rem" and dtypes.is_floating(op.dtype))


_ARITHMETIC = {"add": ("fadd", "add"), "sub": ("fsub", "sub"), "mul": ("fmul", "mul")}


@operation(*_ARITHMETIC)
def _arithmetic(b, op, dtype, x, y):
    return getattr(b, _ARITHMETIC[op.name][0 if is_float(x.type) else 1])(x, y)


@operation("square")
def _square(b, op, dtype, x):
    return b.fmul(x, x) if is_float(x.type) else b.mul(x, x)


def _lowest(ty) -> int:
    return -(1 << (scalar_of(ty).width - 1))


@operation("div", "rem")
def _divide(b, op, dtype, x, y):
    if is_float(x.type):
        return b.fdiv(x, y) if op.name == "div" else vector_math.RULES["rem"].emit(b, x, y)
    if op.dtype == "index":  # never negative, the divisor a positive constant
        return (b.udiv if op.name == "div" else b.urem)(x, y)
    ty, signed = x.type, dtypes.is_signed(dtype)
    zero = b.icmp_unsigned("==", y, const(0, ty))
    bad = zero
    if signed:
        overflow = b.and_(b.icmp_unsigned("==", x, const(_lowest(ty), ty)), b.icmp_unsigned("==", y, const(-1, ty)))
        bad = b.or_(zero, overflow)
    safe = b.select(bad, const(1, ty), y)
    if op.name == "div":
        q = (b.sdiv if signed else b.udiv)(x, safe)
        return b.select(zero, const(-1, ty), q)  # the overflowing quotient is x / 1, the lowest integer itself
    r = (b.srem if signed else b.urem)(x, safe)
    return b.select(zero, x, r)


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@operation(*_COMPARE)
def _compare(b, op, dtype, x, y):
    sign = _COMPARE[op.name]
    if is_float(x.type):
        return b.fcmp_unordered(sign, x, y) if op.name == "ne" else b.fcmp_ordered(sign, x, y)
    return (b.icmp_signed if dtypes.is_signed(dtype) else b.icmp_unsigned)(sign, x, y)


@operation("max", "min")
def _extreme(b, op, dtype, x, y):
    sign = ">" if op.name == "max" else "<"
    if is_float(x.type):  # the processor's max gives y where either is NaN
        larger = b.select(b.fcmp_ordered(sign, x, y), x, y)
        return b.select(b.fcmp_unordered("uno", x, x), x, larger)
    return b.select((b.icmp_signed if dtypes.is_signed(dtype) else b.icmp_unsigned)(sign, x, y), x, y)


@operation("clamp")
def _clamp(b, op, dtype, low, x, high):
    x = b.select(b.icmp_signed("<", x, low), low, x)
    return b.select(b.icmp_signed(">", x, high), high, x)


@operation("select")
def _select(b, op, dtype, cond, x, y):
    return b.select(cond, x, y)


@operation("and", "or", "xor")
def _bitwise(b, op, dtype, x, y):
    return getattr(b, op.name if op.name == "xor" else f"{op.name}_")(x, y)


@operation("not")
def _not(b, op, dtype, x):
    return b.xor(x, const(-1 if scalar_of(x.type) != i1 else 1, x.type))


@operation("neg")
def _neg(b, op, dtype, x):
    return b.fneg(x) if is_float(x.type) else b.sub(const(0, x.type), x)


@operation("abs")
def _abs(b, op, dtype, x):
    if is_float(x.type):
        return intrinsic(b, x.type, "fabs", x)
    return b.select(b.icmp_signed("<", x, const(0, x.type)), _neg(b, op, dtype, x), x) if dtypes.is_signed(dtype) else x


@operation("sign")
def _sign(b, op, dtype, x):
    if is_float(x.type):
        return vector_math.RULES["sign"].emit(b, x)
    one = b.zext(b.icmp_unsigned("!=", x, const(0, x.type)), x.type)
    if not dtypes.is_signed(dtype):
        return one
    return b.select(b.icmp_signed("<", x, const(0, x.type)), const(-1, x.type), one)


_SHIFT = {"shift_left": "shl", "shift_right_logical": "lshr", "shift_right_arithmetic": "ashr"}


@operation(*_SHIFT)
def _shift(b, op, dtype, x, y):
    width = scalar_of(x.type).width
    fits = b.icmp_unsigned("<", y, const(width, y.type))
    amount = b.select(fits, y, const(width - 1, y.type))
    shifted = getattr(b, _SHIFT[op.name])(x, amount)
    if op.name == "shift_right_arithmetic":
        return shifted
    return b.select(fits, shifted, const(0, x.type))


@operation("population_count")
def _population_count(b, op, dtype, x):
    return intrinsic(b, x.type, "ctpop", x)


@operation("clz")
def _clz(b, op, dtype, x):
    return intrinsic(b, x.type, "ctlz", x, const(0, i1), types=(x.type,))


@operation("convert")
def _convert(b, op, dtype, x):
    return dtypes.convert(b, x, dtype, op.dtype)


@operation("bitcast")
def _bitcast(b, op, dtype, x):
    return b.bitcast(x, like(dtypes.held(op.dtype), x.type)) if x.type != like(dtypes.held(op.dtype), x.type) else x


@operation("integer_pow")
def _integer_pow(b, op, dtype, x):
    (n,) = op.params
    floating = is_float(x.type)

    def times(p, q):
        return b.fmul(p, q) if floating else b.mul(p, q)

    result, square, left = None, x, abs(n)
    while left:
        if left & 1:
            result = square if result is None else times(result, square)
        left >>= 1
        square = times(square, square) if left else square
    result = const(1, x.type) if result is None else result
    return b.fdiv(const(1.0, x.type), result) if n < 0 else result


@operation("is_finite")
def _is_finite(b, op, dtype, x):
    return b.fcmp_ordered("<", intrinsic(b, x.type, "fabs", x), const(np.inf, x.type))


@operation("logaddexp")
def _logaddexp(b, op, dtype, x, y):
    """log(exp(x) + exp(y)), through the larger of the two, if that is finite."""
    rules = vector_math.RULES
    top = _extreme(b, SimpleNamespace(name="max"), dtype, x, y)
    finite = b.fcmp_ordered("<", intrinsic(b, x.type, "fabs", top), const(np.inf, x.type))
    top = b.select(finite, top, const(0.0, x.type))
    parts = [rules["exp"].emit(b, b.fsub(v, top)) for v in (x, y)]
    return b.fadd(rules["log"].emit(b, b.fadd(*parts)), top)
