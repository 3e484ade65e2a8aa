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
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, derived, op
from palladion.language import ops

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
RULES.rule(lax.integer_pow_p)(elementwise("integer_pow", "y"))


@RULES.rule(lax.nextafter_p)
def _nextafter(ctx: Lowering, eqn, x: Lazy, y: Lazy) -> Lazy:
    if not is_narrow_float(x.dtype):
        return elementwise("nextafter")(ctx, eqn, x, y)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise RULES.unsupported(eqn)
    aval = eqn.outvars[0].aval
    return derived(aval.shape, aval.dtype, [x, y], lambda i: _step_16(element(x, i), element(y, i)), 8)


def _step_16(x: ir.Expr, y: ir.Expr) -> ir.Expr:
    """The next number after x towards y, in a 16-bit float: a step of one in its bits (f32's neighbour rounds to x)."""
    bits, sign = (op("bitcast", np.int16, x), ir.Const(jnp.dtype(np.int16), -0x8000))
    one, zero = ir.Const(jnp.dtype(np.int16), 1), ir.Const(jnp.dtype(np.float32), 0.0)
    a, b = convert(x, jnp.float32), convert(y, jnp.float32)
    grows = op("eq", np.bool_, op("lt", np.bool_, a, b), op("lt", np.bool_, zero, a))
    stepped = op("select", np.int16, grows, op("add", np.int16, bits, one), op("sub", np.int16, bits, one))
    smallest = op("or", np.int16, op("and", np.int16, op("bitcast", np.int16, y), sign), one)
    stepped = op("select", np.int16, op("eq", np.bool_, a, zero), smallest, stepped)
    stepped = op("bitcast", x.dtype, stepped)
    ordered = op("or", np.bool_, op("lt", np.bool_, a, b), op("lt", np.bool_, b, a))
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
    narrow = {(8, 7): jnp.bfloat16, (5, 10): jnp.float16, (8, 23): jnp.float32, (11, 52): jnp.float64}.get(bits)
    if narrow is None:
        raise RULES.unsupported(eqn)
    return derived(x.shape, x.dtype, [x], lambda index: convert(convert(x.at(index), narrow), x.dtype), 2)


@RULES.rule(lax.bitcast_convert_type_p)
def _bitcast(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    dtype = jnp.dtype(eqn.params["new_dtype"])
    if dtype.itemsize != x.dtype.itemsize or np.bool_ in (dtype, x.dtype):
        raise RULES.unsupported(eqn)
    return derived(x.shape, dtype, [x], lambda index: op("bitcast", dtype, x.at(index)), 1)


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
