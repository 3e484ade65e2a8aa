"""Elementary functions: CUDA's own, in float (or double), rounded to the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.rules_elementwise import expression
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.rules import present

# What CUDA calls it in double; with an f at the end in float.
_NAMES = {
    "exp_p": "exp", "exp2_p": "exp2", "expm1_p": "expm1", "log_p": "log", "log1p_p": "log1p", "log2_p": "log2",
    "sqrt_p": "sqrt",
    "rsqrt_p": "rsqrt", "cbrt_p": "cbrt", "sin_p": "sin", "cos_p": "cos", "tan_p": "tan", "asin_p": "asin",
    "acos_p": "acos", "atan_p": "atan", "sinh_p": "sinh", "cosh_p": "cosh", "tanh_p": "tanh", "asinh_p": "asinh",
    "acosh_p": "acosh", "atanh_p": "atanh", "erf_p": "erf", "erfc_p": "erfc", "erf_inv_p": "erfinv",
    "lgamma_p": "lgamma", "floor_p": "floor", "ceil_p": "ceil", "atan2_p": "atan2", "pow_p": "pow",
}  # fmt: skip


def function_text(name: str, dtype: Any, *operands: str) -> str:
    """C++ for one of CUDA's functions of floats: of operands and with a result of `dtype`."""
    of = kind(dtype)
    called = name if of.bits == 64 else f"{name}f"
    return f"{of.c}({called}({', '.join(expression(of, x) for x in operands)}))"


def _rule(name: str) -> Callable:
    def rule(unit: Unit, eqn: Any, *operands: Any) -> Any:
        dtype = eqn.outvars[0].aval.dtype

        def text(*given: str) -> str:
            if eqn.primitive is lax.pow_p and kind(eqn.invars[1].aval.dtype).family != "float":
                given = (given[0], f"{kind(dtype).compute}({given[1]})")
            return function_text(name, dtype, *given)

        return unit.elementwise(eqn, text, *operands)

    return rule


for _primitive_name, _cuda in _NAMES.items():
    RULES.rule(*present(_primitive_name))(_rule(_cuda))


@RULES.rule(lax.round_p)
def _round(unit: Unit, eqn: Any, x: Any) -> Any:
    even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    name = "rint" if even else "round"
    return unit.elementwise(eqn, lambda a: function_text(name, eqn.outvars[0].aval.dtype, a), x)


@RULES.rule(lax.logistic_p)
def _logistic(unit: Unit, eqn: Any, x: Any) -> Any:
    of = kind(eqn.outvars[0].aval.dtype)
    exp, one = ("exp", "1.0") if of.bits == 64 else ("expf", "1.0f")
    return unit.elementwise(eqn, lambda a: f"{of.c}({one} / ({one} + {exp}(-{expression(of, a)})))", x)
