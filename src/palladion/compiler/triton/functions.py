"""Rules: mathematical functions, by Triton's own operations where it has them, otherwise from CUDA's libdevice.

Triton's exp, exp2, sqrt and rsqrt are the hardware's approximations (about 2 ulp); sin, cos, log, erf and all of
libdevice are accurate to a few ulp. Floats below 32 bits are computed in float32.

Source: CUDA's libdevice user's guide, for the functions and the names of their versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import add, bitcast, cast, div, in_f32, mul, negative, sub
from palladion.compiler.triton.lowering import RULES, Lowering, dtype_of, refusal
from palladion.rules import present


def libdevice(symbol: str, result: Any, *values: Any) -> Any:
    """A call of a function of libdevice, element by element; `result` is the dtype of what it gives."""
    spread = emit.spread(*values)
    kind = emit.typed(emit.shape_of(spread[0]), emit.element_type(result))
    return tt.extern_elementwise(kind, spread, "libdevice", "", symbol, True)


def _of_float(name: str) -> Callable[..., Any]:
    """A function of libdevice that has a version for float32 (named with an f) and one for float64."""

    def function(dtype: Any, *values: Any) -> Any:
        return libdevice(f"__nv_{name}{'f' if emit.bits_of(dtype) == 32 else ''}", dtype, *values)

    return function


def _own(op: Callable[..., Any], name: str) -> Callable[..., Any]:
    """An operation of Triton's for float32, and libdevice's for float64."""
    return lambda dtype, x: op(x) if emit.bits_of(dtype) == 32 else _of_float(name)(dtype, x)


exp = in_f32(_own(mlir_math.exp, "exp"))
log = in_f32(_own(mlir_math.log, "log"))
log1p = in_f32(_of_float("log1p"))
tanh = in_f32(_of_float("tanh"))

UNARY: dict[Any, Callable[..., Any]] = {
    lax.exp_p: exp,
    lax.log_p: log,
    lax.exp2_p: in_f32(_own(mlir_math.exp2, "exp2")),
    lax.log2_p: in_f32(_own(mlir_math.log2, "log2")),
    lax.sin_p: in_f32(_own(mlir_math.sin, "sin")),
    lax.cos_p: in_f32(_own(mlir_math.cos, "cos")),
    lax.sqrt_p: in_f32(_own(mlir_math.sqrt, "sqrt")),
    lax.rsqrt_p: in_f32(_own(mlir_math.rsqrt, "rsqrt")),
    lax.erf_p: in_f32(_own(mlir_math.erf, "erf")),
    lax.floor_p: in_f32(_own(mlir_math.floor, "floor")),
    lax.ceil_p: in_f32(_own(mlir_math.ceil, "ceil")),
    lax.log1p_p: log1p,
    lax.tanh_p: tanh,
    **{
        primitive: in_f32(_of_float(name))
        for primitive, name in {
            lax.tan_p: "tan",
            lax.sinh_p: "sinh",
            lax.cosh_p: "cosh",
            lax.asin_p: "asin",
            lax.acos_p: "acos",
            lax.atan_p: "atan",
            lax.asinh_p: "asinh",
            lax.acosh_p: "acosh",
            lax.atanh_p: "atanh",
            lax.expm1_p: "expm1",
            lax.cbrt_p: "cbrt",
            lax.erfc_p: "erfc",
            lax.erf_inv_p: "erfinv",
            lax.lgamma_p: "lgamma",
        }.items()
    },
}


def _rule_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ctx, eqn, x: function(dtype_of(eqn.outvars[0]), x)


for _primitive, _function in UNARY.items():
    RULES.rule(_primitive)(_rule_of(_function))


@RULES.rule(lax.round_p)
def _round(ctx: Lowering, eqn, x) -> Any:
    name = "rint" if eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else "round"
    return in_f32(_of_float(name))(dtype_of(eqn.outvars[0]), x)


@RULES.rule(lax.logistic_p)
def _logistic(ctx: Lowering, eqn, x) -> Any:
    def logistic(dtype: Any, x: Any) -> Any:
        return div(dtype, emit.like(x, 1), add(dtype, exp(dtype, negative(dtype, x)), emit.like(x, 1)))

    return in_f32(logistic)(dtype_of(eqn.outvars[0]), x)


@RULES.rule(*present("one_minus_square_p"))
def _one_minus_square(ctx: Lowering, eqn, x) -> Any:
    """(1 + x)(1 - x), which is exact near 1."""
    dtype, one = dtype_of(eqn.outvars[0]), emit.like(x, 1)
    return mul(dtype, add(dtype, one, x), sub(dtype, one, x))


# --- of two operands --------------------------------------------------------------------------------------------------
@RULES.rule(lax.rem_p)
def _rem(ctx: Lowering, eqn, x, y) -> Any:
    dtype = dtype_of(eqn.outvars[0])
    if emit.is_float(dtype):
        return in_f32(_of_float("fmod"))(dtype, x, y)
    return (arith.remui if emit.is_unsigned(dtype) else arith.remsi)(*emit.spread(x, y))


@RULES.rule(lax.pow_p)
def _pow(ctx: Lowering, eqn, x, y) -> Any:
    dtype = dtype_of(eqn.outvars[0])
    if not emit.is_float(dtype):
        raise RULES.unsupported(eqn)
    return in_f32(_of_float("pow"))(dtype, x, cast(y, dtype_of(eqn.invars[1]), dtype))


RULES.rule(lax.atan2_p)(lambda ctx, eqn, x, y: in_f32(_of_float("atan2"))(dtype_of(eqn.outvars[0]), x, y))


@RULES.rule(lax.nextafter_p)
def _nextafter(ctx: Lowering, eqn, x, y) -> Any:
    dtype = dtype_of(eqn.outvars[0])
    if emit.bits_of(dtype) < 32:
        raise refusal(NotImplementedError, f"nextafter of {dtype} is not in CUDA's libdevice.", eqn)
    return _of_float("nextafter")(dtype, x, y)


# --- bits -------------------------------------------------------------------------------------------------------------
def _counting(name: str, narrow: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """popc and clz, which libdevice has for 32 and 64 bits: narrower integers are widened, and the count mended."""

    def rule(ctx: Lowering, eqn, x) -> Any:
        dtype = dtype_of(eqn.outvars[0])
        bits = emit.bits_of(dtype)
        unsigned = jnp.dtype(f"uint{bits}")
        if bits < 32:
            x = cast(x, unsigned, jnp.uint32)
        count = libdevice(f"__nv_{name}{'ll' if bits == 64 else ''}", jnp.int32, x)
        return cast(narrow(count, bits), jnp.uint32, dtype)

    return rule


def _without_padding(count: Any, bits: int) -> Any:
    return arith.subi(count, emit.like(count, 32 - bits)) if bits < 32 else count


RULES.rule(lax.population_count_p)(_counting("popc", lambda count, bits: count))
RULES.rule(lax.clz_p)(_counting("clz", _without_padding))


# --- functions that JAX spells out in simpler ones --------------------------------------------------------------------
def run_function(ctx: Lowering, function: Callable[..., Any], eqn: Any, *values: Any) -> list[Any]:
    """Lower what a JAX function of arrays does, given the operands of an equation."""
    return run_traced(ctx, function, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars], *values)


def run_traced(ctx: Lowering, function: Callable[..., Any], types: Sequence[Any], *values: Any) -> list[Any]:
    """Lower what a JAX function of arrays of some types does; equations keep the line of the one that runs."""
    traced = jax.make_jaxpr(function)(*types)
    return ctx.run(getattr(traced, "jaxpr", traced), list(values))


for _primitive, _function in jaxlink.special_functions().items():
    RULES.rule(_primitive)(lambda ctx, eqn, *values, f=_function: run_function(ctx, f, eqn, *values))


@RULES.rule(jaxlink.threefry2x32_p)
def _threefry(ctx: Lowering, eqn, *values) -> list[Any]:
    """The bits of JAX's default random generator, equal to what it gives outside."""
    rounds = functools.partial(jaxlink.threefry2x32_lowering, use_rolled_loops=False)
    return run_function(ctx, rounds, eqn, *values)  # rolled, they need a table of rotations


@RULES.rule(*present("polynomial_p"))
def _polynomial(ctx: Lowering, eqn, x, *coefficients) -> Any:
    """By Horner's rule; the coefficients begin with that of the lowest power."""
    dtype = dtype_of(eqn.outvars[0])
    total = emit.spread(coefficients[-1], x)[0]
    for c in reversed(coefficients[:-1]):
        total = add(dtype, mul(dtype, total, x), c)
    return total


__all__ = ["bitcast", "exp", "libdevice", "log", "log1p", "run_function", "run_traced", "tanh"]
