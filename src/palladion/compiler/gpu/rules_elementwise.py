"""Arithmetic, comparisons, logic and choices, element by element: each operation is one C++ expression.

Floats narrower than 32 bits are computed in float and rounded after each operation. Signed integers wrap, as in JAX:
C++ leaves that open for `int`, so that sums and products go through unsigned numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.gpu.dtypes import Kind, constant, kind
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar

_UNSIGNED = {c: "u64" if c in ("i64", "u64") else "u32" for c in ("int", "i64", "i16", "i8", "u16", "u8", "u32", "u64")}


def expression(of: Kind, text: str) -> str:
    """C++ for an operand in the type in which it is computed: `float(x[i])` of a narrow float."""
    return f"float({text})" if of.family == "float" and of.bits < 32 else text


def _wrapping(sign: str) -> Callable[[Kind, str, str], str]:
    """Sums, differences and products of integers, of floats, and (or, and) of booleans."""

    def text(of: Kind, x: str, y: str) -> str:
        if of.family == "float":
            return f"{of.c}({expression(of, x)} {sign} {expression(of, y)})"
        if of.family == "bool":
            return f"(bool)({x} {'&' if sign == '*' else '|'} {y})"
        wide = _UNSIGNED[of.c]
        return f"({of.c})(({wide}){x} {sign} ({wide}){y})"

    return text


def _divide(of: Kind, x: str, y: str) -> str:
    if of.family == "float" and of.bits < 32:  # two units in the last place of a float do not show in it
        return f"{of.c}(quotient({expression(of, x)}, {expression(of, y)}))"
    if of.family == "float":
        return f"{of.c}({expression(of, x)} / {expression(of, y)})"
    return f"divide<{of.c}>({x}, {y})"


def _rem(of: Kind, x: str, y: str) -> str:
    if of.family == "float":
        name = "fmod" if of.bits == 64 else "fmodf"
        return f"{of.c}({name}({expression(of, x)}, {expression(of, y)}))"
    return f"remainder_of<{of.c}>({x}, {y})"


def extremum(name: str) -> Callable[[Kind, str, str], str]:
    """`max` and `min`, which give NaN if one of the operands is NaN."""

    def text(of: Kind, x: str, y: str) -> str:
        if of.family == "float":
            return f"{of.c}({name}imum({expression(of, x)}, {expression(of, y)}))"
        if of.family == "bool":
            return f"(bool)({x} {'|' if name == 'max' else '&'} {y})"
        return f"({x} {'>' if name == 'max' else '<'} {y} ? {x} : {y})"

    return text


add, sub, mul = _wrapping("+"), _wrapping("-"), _wrapping("*")
maximum, minimum = extremum("max"), extremum("min")


def bitwise(sign: str) -> Callable[[Kind, str, str], str]:
    """And, or, exclusive or; of booleans as well: both operands are always computed."""
    return lambda of, x, y: f"({of.c})({x} {sign} {y})"


def _shift(sign: str, arithmetic: bool = False) -> Callable[[Kind, str, str], str]:
    """Shifts; by as many bits as there are or more, zeros (or copies of the sign) are left."""

    def text(of: Kind, x: str, y: str) -> str:
        wide = _UNSIGNED[of.c]
        amount = f"({wide}){y}"
        if arithmetic:
            signed = {"u8": "i8", "u16": "i16", "u32": "int", "u64": "i64"}.get(of.c, of.c)
            top = of.bits - 1
            return f"({of.c})(({signed}){x} >> ({amount} < {of.bits}u ? {amount} : {top}u))"
        bits = {8: "u8", 16: "u16", 32: "u32", 64: "u64"}[of.bits]
        return f"({of.c})({amount} < {of.bits}u ? ({wide})({bits}){x} {sign} {amount} : 0)"

    return text


_BINARY: dict[Any, Callable[[Kind, str, str], str]] = {
    lax.add_p: add,
    jaxlink.add_any_p: add,
    lax.sub_p: sub,
    lax.mul_p: mul,
    lax.div_p: _divide,
    lax.rem_p: _rem,
    lax.max_p: maximum,
    lax.min_p: minimum,
    lax.and_p: bitwise("&"),
    lax.or_p: bitwise("|"),
    lax.xor_p: bitwise("^"),
    lax.shift_left_p: _shift("<<"),
    lax.shift_right_logical_p: _shift(">>"),
    lax.shift_right_arithmetic_p: _shift(">>", arithmetic=True),
}


def _number(value: Any) -> Any:
    return getattr(value, "value", None)


_KNOWN = {
    lax.add_p: np.add, lax.sub_p: np.subtract, lax.mul_p: np.multiply, lax.max_p: np.maximum, lax.min_p: np.minimum,
    lax.and_p: np.bitwise_and, lax.or_p: np.bitwise_or,
}  # fmt: skip


def _quotient(a: Any, b: Any) -> int:
    """a / b, towards zero."""
    found = abs(int(a)) // abs(int(b))
    return found if (a < 0) == (b < 0) else -found


def _folded(eqn: Any, function: Any, *operands: Any) -> Scalar | None:
    """The result, if all operands are numbers known now (indices, mostly)."""
    numbers = [_number(x) for x in operands]
    if function is None or eqn.outvars[0].aval.shape or any(n is None for n in numbers):
        return None
    dtype = eqn.outvars[0].aval.dtype
    with np.errstate(all="ignore"):
        value = np.asarray(function(*numbers)).astype(dtype)[()]  # wraps
    return Scalar(constant(value, dtype), dtype, value)


def _binary(primitive: Any, text: Callable[[Kind, str, str], str]) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
        of = kind(eqn.outvars[0].aval.dtype)
        known = _KNOWN.get(primitive) if of.family != "float" else None
        if primitive in (lax.div_p, lax.rem_p) and of.family == "int" and _number(y):
            known = _quotient if primitive is lax.div_p else lambda a, b: int(a) - _quotient(a, b) * int(b)
        return _folded(eqn, known, x, y) or unit.elementwise(eqn, lambda a, b: text(of, a, b), x, y)

    return rule


for _primitive, _text in _BINARY.items():
    RULES.rule(_primitive)(_binary(_primitive, _text))


# --- comparisons -----------------------------------------------------------------------------------------------------
def _compared(sign: str, function: Any) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
        of = kind(eqn.invars[0].aval.dtype)
        known = _folded(eqn, function, x, y)
        return known or unit.elementwise(eqn, lambda a, b: f"({expression(of, a)} {sign} {expression(of, b)})", x, y)

    return rule


for _primitive, _sign, _function in (
    (lax.eq_p, "==", np.equal), (lax.ne_p, "!=", np.not_equal), (lax.lt_p, "<", np.less),
    (lax.le_p, "<=", np.less_equal), (lax.gt_p, ">", np.greater), (lax.ge_p, ">=", np.greater_equal),
):  # fmt: skip
    RULES.rule(_primitive)(_compared(_sign, _function))


# --- one operand -----------------------------------------------------------------------------------------------------
def _negative(of: Kind, x: str) -> str:
    if of.family == "float":
        return f"{of.c}(-{expression(of, x)})"
    return f"({of.c})(0 - ({_UNSIGNED[of.c]}){x})"


def _absolute(of: Kind, x: str) -> str:
    if of.family == "float":
        return f"{of.c}({'fabs' if of.bits == 64 else 'fabsf'}({expression(of, x)}))"
    return x if of.family != "int" else f"({x} < 0 ? {_negative(of, x)} : {x})"


def _sign_of(of: Kind, x: str) -> str:
    e = expression(of, x)
    if of.family == "float":
        return f"{of.c}({e} > 0 ? 1.0f : {e} < 0 ? -1.0f : {e})"
    return f"({of.c})(({e} > 0) - ({e} < 0))" if of.family == "int" else f"({of.c})({e} != 0)"


def _bits(of: Kind, x: str) -> str:
    """The bits of an integer as a u64, with zeros above."""
    return f"(u64)({_UNSIGNED[of.c] if of.bits >= 32 else f'u{of.bits}'}){x}"


_UNARY: dict[Any, Callable[[Kind, str], str]] = {
    lax.neg_p: _negative,
    lax.abs_p: _absolute,
    lax.sign_p: _sign_of,
    lax.square_p: lambda of, x: mul(of, x, x),
    lax.not_p: lambda of, x: f"(!{x})" if of.family == "bool" else f"({of.c})(~{x})",
    lax.is_finite_p: lambda of, x: f"(fabsf({expression(of, x)}) < __int_as_float(0x7f800000))" if of.bits < 64 else
    f"(fabs({x}) < __longlong_as_double(0x7ff0000000000000ll))",
    lax.population_count_p: lambda of, x: f"({of.c})__popcll({_bits(of, x)})",
    lax.clz_p: lambda of, x: f"({of.c})(__clzll((i64){_bits(of, x)}) - {64 - of.bits})",
}  # fmt: skip


def _unary(text: Callable[[Kind, str], str]) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any) -> Any:
        of = kind(eqn.invars[0].aval.dtype)
        return unit.elementwise(eqn, lambda a: text(of, a), x)

    return rule


for _primitive, _single in _UNARY.items():
    RULES.rule(_primitive)(_unary(_single))


@RULES.rule(lax.integer_pow_p)
def _integer_pow(unit: Unit, eqn: Any, x: Any) -> Any:
    of, y = kind(eqn.outvars[0].aval.dtype), eqn.params["y"]

    def text(a: str) -> str:
        if y == 0:
            return f"{of.c}({of.compute}(1))"
        held = of.compute if of.family == "float" else _UNSIGNED[of.c]  # integers wrap
        product = f"power<{abs(y)}>(({held}){expression(of, a)})"
        return f"{of.c}({product})" if y > 0 else f"{of.c}({of.compute}(1) / {product})"

    return unit.elementwise(eqn, text, x)


@RULES.rule(lax.select_n_p)
def _select(unit: Unit, eqn: Any, which: Any, *cases: Any) -> Any:
    of = kind(eqn.outvars[0].aval.dtype)
    boolean = which.kind.family == "bool"

    def text(w: str, *values: str) -> str:
        if len(values) == 1:
            return values[0]
        if boolean:
            return f"({w} ? {of.c}({values[1]}) : {of.c}({values[0]}))"
        found = values[-1]
        for k in reversed(range(len(values) - 1)):
            found = f"({w} == {k} ? {of.c}({values[k]}) : {found})"
        return found

    return unit.elementwise(eqn, text, which, *cases)


@RULES.rule(lax.clamp_p)
def _clamp(unit: Unit, eqn: Any, low: Any, x: Any, high: Any) -> Any:
    of = kind(eqn.outvars[0].aval.dtype)
    return unit.elementwise(eqn, lambda l, a, h: minimum(of, maximum(of, a, l), h), low, x, high)


@RULES.rule(lax.copy_p, lax.stop_gradient_p, lax.optimization_barrier_p)
def _same(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    return list(values)


@RULES.rule(lax.nextafter_p)
def _nextafter(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
    of = kind(eqn.outvars[0].aval.dtype)
    if of.bits < 32:
        raise unit.refuse("nextafter of floats narrower than 32 bits is not compiled for GPUs.", "compute in float32")
    return unit.elementwise(eqn, lambda a, b: f"{'nextafter' if of.bits == 64 else 'nextafterf'}({a}, {b})", x, y)


@RULES.rule(lax.mulhi_p)
def _mulhi(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
    of = kind(eqn.outvars[0].aval.dtype)
    name = {"int": "__mulhi", "u32": "__umulhi", "i64": "__mul64hi", "u64": "__umul64hi"}.get(of.c)
    if name is None:
        raise unit.refuse(f"mulhi of {eqn.outvars[0].aval.dtype} is not compiled for GPUs.", "use 32-bit integers")
    return unit.elementwise(eqn, lambda a, b: f"{name}({a}, {b})", x, y)
