"""Elementwise primitives: each becomes one operation of the emitter, or a few.

Arithmetic on bf16, f16 and the 8-bit floats is done in f32 and rounded back after every operation, as NumPy does
with ml_dtypes. Booleans are `i1` in expressions and one byte in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.cpu import dtypes, ir
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, derived, op
from palladion.language import ops
from palladion.language.dtypes import element_bits

# Rough costs, in operations, of what is dearer than an addition.
_COST: dict[str, int] = {"div": 3, "sqrt": 3, "rsqrt": 3, "rem": 3}
for _name in "exp exp2 log log2 tanh logistic sin cos erf expm1 log1p cbrt".split():
    _COST[_name] = 12
for _name in "pow tan sinh cosh asinh acosh atanh atan atan2 asin acos erfc erf_inv lgamma digamma".split():
    _COST[_name] = 25


def is_narrow_float(dtype: Any) -> bool:
    """Floats that are computed with in f32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def convert(e: ir.Expr, dtype: Any) -> ir.Expr:
    """A scalar in another type, with XLA's rules (floats to integers saturate, NaN gives 0)."""
    dtype = jnp.dtype(dtype)
    if e.dtype == dtype:
        return e
    return op("convert", dtype, e)


def as_number(index: ir.Expr) -> ir.Expr:
    """An index as an int32."""
    return ir.Const(jnp.dtype(np.int32), index.value) if isinstance(index, ir.Const) else op("convert", np.int32, index)


def scalar_op(name: str, dtype: Any, *args: ir.Expr, params: tuple = ()) -> ir.Expr:
    """An operation on scalars of any dtype; narrow floats go through f32."""
    if any(is_narrow_float(a.dtype) for a in args if a.dtype != ir.INDEX):
        wide = [convert(a, jnp.float32) if is_narrow_float(a.dtype) else a for a in args]
        result = op(name, jnp.float32 if is_narrow_float(dtype) else dtype, *wide, params=params)
        return convert(result, dtype)
    return op(name, dtype, *args, params=params)


def element(x: Lazy, index: tuple[ir.Expr, ...]) -> ir.Expr:
    """An operand's element that goes with an element of the result: scalars and dimensions of one are repeated."""
    if not x.shape:
        return x.at(())
    return x.at(tuple(ir.index(0) if n == 1 else i for i, n in zip(index, x.shape)))


def elementwise(name: str, *params: str) -> Callable:
    """The rule of a primitive that applies `name` to corresponding elements (scalars go with every element)."""

    def rule(ctx: Lowering, eqn, *inputs: Lazy) -> Lazy:
        aval = eqn.outvars[0].aval
        static = tuple(eqn.params[p] for p in params)

        def at(index):
            args = [element(x, index) for x in inputs]
            return scalar_op(name, aval.dtype, *args, params=static)

        return derived(aval.shape, aval.dtype, inputs, at, _COST.get(name, 1))

    return rule


_PLAIN = """
    add sub mul div rem max min neg abs sign floor ceil sqrt rsqrt cbrt exp exp2 expm1 log log2 log1p sin cos tan tanh
    sinh cosh asinh acosh atanh atan atan2 asin acos erf erfc erf_inv logistic pow lgamma digamma and or xor not eq ne
    lt le gt ge is_finite shift_left shift_right_logical shift_right_arithmetic square population_count clz
""".split()
for _name in _PLAIN:
    RULES.rule(getattr(lax, f"{_name}_p"))(elementwise(_name))


def _total_order(name: str) -> Callable:
    """Comparison in IEEE 754's total order: -NaN, -inf … -0, +0 … inf, NaN; of integers, the usual one."""

    def key(e: ir.Expr) -> ir.Expr:
        if not jnp.issubdtype(e.dtype, jnp.floating):
            return e
        width = e.dtype.itemsize * 8
        ty = jnp.dtype(f"int{width}")
        bits = op("bitcast", ty, e)
        negative = op("shift_right_arithmetic", ty, bits, ir.Const(ty, width - 1))
        return op("xor", ty, bits, op("and", ty, negative, ir.Const(ty, (1 << (width - 1)) - 1)))

    def rule(ctx: Lowering, eqn, x: Lazy, y: Lazy) -> Lazy:
        shape = eqn.outvars[0].aval.shape
        return derived(shape, np.bool_, [x, y], lambda i: op(name, np.bool_, *(key(element(v, i)) for v in (x, y))), 3)

    return rule


for _name in ("eq", "le", "lt"):
    RULES.rule(getattr(lax, f"{_name}_to_p"))(_total_order(_name))
RULES.rule(lax.integer_pow_p)(elementwise("integer_pow", "y"))


@RULES.rule(lax.nextafter_p)
def _nextafter(ctx: Lowering, eqn, x: Lazy, y: Lazy) -> Lazy:
    if not is_narrow_float(x.dtype):
        return elementwise("nextafter")(ctx, eqn, x, y)
    if not dtypes.sign_bit(x.dtype):
        raise RULES.unsupported(eqn)
    aval = eqn.outvars[0].aval
    return derived(aval.shape, aval.dtype, [x, y], lambda i: _step(element(x, i), element(y, i)), 8)


def _step(x: ir.Expr, y: ir.Expr) -> ir.Expr:
    """The next number after x towards y, in a narrow float: a step of one in its bits (f32's neighbour rounds to x)."""
    ty = jnp.dtype(f"uint{x.dtype.itemsize * 8}")
    bits, sign, one = op("bitcast", ty, x), ir.Const(ty, dtypes.sign_bit(x.dtype)), ir.Const(ty, 1)
    zero = ir.Const(jnp.dtype(np.float32), 0.0)
    a, b = convert(x, jnp.float32), convert(y, jnp.float32)
    up = op("lt", np.bool_, a, b)
    grows = op("eq", np.bool_, up, op("lt", np.bool_, zero, a))
    stepped = op("select", ty, grows, op("add", ty, bits, one), op("sub", ty, bits, one))
    smallest = op("select", ty, up, one, op("or", ty, sign, one))
    stepped = op("select", ty, op("eq", np.bool_, a, zero), smallest, stepped)
    if not dtypes.has_negative_zero(x.dtype):  # its bits are NaN
        stepped = op("select", ty, op("eq", np.bool_, stepped, sign), ir.Const(ty, 0), stepped)
    stepped = op("bitcast", x.dtype, stepped)
    ordered = op("or", np.bool_, up, op("lt", np.bool_, b, a))
    same = op("select", x.dtype, op("eq", np.bool_, a, b), y, convert(op("add", np.float32, a, b), x.dtype))
    return op("select", x.dtype, ordered, stepped, same)


@RULES.rule(lax.round_p)
def _round(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return elementwise("round_even" if even else "round_away")(ctx, eqn, x)


@RULES.rule(lax.convert_element_type_p)
def _convert_element_type(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    dtype = jnp.dtype(eqn.params["new_dtype"])
    if x.dtype == dtype:
        return x
    return derived(x.shape, dtype, [x], lambda index: convert(x.at(index), dtype), 1)


@RULES.rule(lax.reduce_precision_p)
def _reduce_precision(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    wide = jnp.dtype(np.float32) if is_narrow_float(x.dtype) else x.dtype
    return derived(x.shape, x.dtype, [x], lambda i: convert(_rounded(convert(x.at(i), wide), *bits), x.dtype), 6)


def _rounded(x: ir.Expr, exponent: int, mantissa: int) -> ir.Expr:
    """As a float of fewer bits would have it: rounded to even, infinite or zero where its exponent ends (as XLA)."""
    ty, (own_exponent, own) = (
        (jnp.dtype(np.uint32), (8, 23)) if x.dtype == np.float32 else (jnp.dtype(np.uint64), (11, 52))
    )

    def const(n: int) -> ir.Const:
        return ir.Const(ty, n)

    given = op("bitcast", ty, x)
    sign, infinity = const(1 << (own_exponent + own)), ((1 << own_exponent) - 1) << own
    magnitude = bits = op("and", ty, given, const(infinity | ((1 << own) - 1)))
    if mantissa < own:
        drop = own - mantissa
        odd = op("and", ty, op("shift_right_logical", ty, bits, const(drop)), const(1))
        bits = op("add", ty, bits, op("add", ty, odd, const((1 << (drop - 1)) - 1)))
        bits = op("and", ty, bits, const(((1 << (own_exponent + own)) - 1) >> drop << drop))
    if exponent < own_exponent:
        bias, new_bias = (1 << (own_exponent - 1)) - 1, (1 << (exponent - 1)) - 1
        power = op("and", ty, bits, const(infinity))
        over = op("gt", np.bool_, power, const((bias + new_bias) << own))
        under = op("le", np.bool_, power, const((bias - new_bias) << own))
        bits = op("select", ty, over, const(infinity), op("select", ty, under, const(0), bits))
    nan = op("gt", np.bool_, magnitude, const(infinity))
    result = op("bitcast", x.dtype, op("or", ty, bits, op("and", ty, given, sign)))
    return op("select", x.dtype, nan, x, result)


@RULES.rule(lax.bitcast_convert_type_p)
def _bitcast(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    """The same bits as another type: of one width, or the last dimension split into, or put together from, pieces."""
    dtype, shape = jnp.dtype(eqn.params["new_dtype"]), eqn.outvars[0].aval.shape
    if np.bool_ in (dtype, x.dtype) and dtype != x.dtype:
        raise RULES.unsupported(eqn)
    old, new = element_bits(x.dtype), element_bits(dtype)
    if old == new:
        return derived(shape, dtype, [x], lambda index: op("bitcast", dtype, x.at(index)), 1)
    wide, narrow = (jnp.dtype(f"uint{n}") for n in (max(old, new), min(old, new)))

    def piece(index):
        bits, shift = op("bitcast", wide, x.at(index[:-1])), convert(as_number(index[-1]), wide)
        bits = op("shift_right_logical", wide, bits, op("mul", wide, shift, ir.Const(wide, new)))
        return op("bitcast", dtype, convert(bits, narrow))

    def whole(index):
        total = None
        for k in range(new // old):
            bits = convert(op("bitcast", narrow, x.at((*index, ir.index(k)))), wide)
            bits = op("shift_left", wide, bits, ir.Const(wide, k * old))
            total = bits if total is None else op("or", wide, total, bits)
        assert total is not None
        return op("bitcast", dtype, total)

    return derived(shape, dtype, [ctx.keep(x)], piece if new < old else whole, 3)


@RULES.rule(lax.select_n_p)
def _select_n(ctx: Lowering, eqn, which: Lazy, *cases: Lazy) -> Lazy:
    dtype = cases[0].dtype

    def at(index):
        w = element(which, index)
        values = [element(c, index) for c in cases]
        if len(values) == 1:
            return values[0]
        if w.dtype == np.bool_:
            return op("select", dtype, w, values[1], values[0])
        result = values[-1]
        for k in reversed(range(len(values) - 1)):
            below = op("lt", np.bool_, w, ir.Const(w.dtype, k + 1))
            result = op("select", dtype, below, values[k], result)
        return result

    return derived(eqn.outvars[0].aval.shape, dtype, [which, *cases], at, len(cases) - 1)


@RULES.rule(lax.clamp_p)
def _clamp(ctx: Lowering, eqn, low: Lazy, x: Lazy, high: Lazy) -> Lazy:
    def at(index):
        bounds = [element(b, index) for b in (low, high)]
        raised = scalar_op("max", x.dtype, bounds[0], x.at(index))
        return scalar_op("min", x.dtype, raised, bounds[1])

    return derived(x.shape, x.dtype, [low, x, high], at, 2)


def _ref_broadcast(x: Lazy, shape: tuple[int, ...]) -> Lazy:
    """How JAX broadcasts the index arrays of a Ref: by NumPy's rules."""
    return derived(shape, x.dtype, [x], lambda index: element(x, index[len(index) - len(x.shape) :]))


def _identity(ctx: Lowering, eqn, x: Lazy, *_) -> Lazy:
    return x


RULES.rule(lax.copy_p, ops.multiple_of_p, lax.stop_gradient_p)(_identity)
RULES.rule(lax.optimization_barrier_p)(lambda ctx, eqn, *xs: list(xs))
RULES.rule(jaxlink.add_any_p)(elementwise("add"))
RULES.rule(jaxlink.ref_broadcast_to_p)(lambda ctx, eqn, x: _ref_broadcast(x, eqn.params["shape"]))


@RULES.rule(lax.mul_p)
def _mul(ctx: Lowering, eqn, x: Lazy, y: Lazy) -> Lazy:
    return elementwise("and" if x.dtype == np.bool_ else "mul")(ctx, eqn, x, y)


@RULES.rule(lax.add_p)
def _add(ctx: Lowering, eqn, x: Lazy, y: Lazy) -> Lazy:
    return elementwise("or" if x.dtype == np.bool_ else "add")(ctx, eqn, x, y)


def _call(param: str) -> Callable:
    return lambda ctx, eqn, *args: ctx.run(eqn.params[param], args)


RULES.rule(jaxlink.jit_p, jaxlink.remat_p)(_call("jaxpr"))
RULES.rule(jaxlink.custom_jvp_call_p, jaxlink.custom_vjp_call_p)(_call("call_jaxpr"))
