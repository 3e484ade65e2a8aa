"""Elementary functions on vectors, as LLVM instructions.

    from palladion.compiler.cpu import math
    y = math.RULES["exp"].emit(b, x)     # x: f32 or f64, scalar or a vector of any number of lanes

`b` is an `ir.IRBuilder`; the result has x's type. What is emitted is straight-line vector code, free of calls
to the C library, with subnormal numbers, infinities, NaN and signed zeros as in C99. The exceptions
branch where any lane needs it, and so leave `b` in another block: sin, cos and tan for huge arguments (they call
a function of the module), rem for huge quotients (it loops).

Accuracy: `RULES[name].ulp_f32` and `.ulp_f64`, bounds on the error in units of the result's last place,
tested in tests/compiler/cpu/test_math.py; measured values are in docs/cpu_math.md. They hold with subnormal
numbers enabled.

Narrow floats are the caller's to widen. `core.py` has the notation, `coefficients.py` the numbers, which
tests/compiler/cpu/fit_math.py derives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu.math import erf, exp, gamma, hyperbolic, inverse, log, power, rounding, trig
from palladion.compiler.cpu.math.core import V


@dataclasses.dataclass(frozen=True)
class Function:
    """One elementary function.

    of: the function on `V`; arity: number of operands; ulp_f32, ulp_f64: bounds on the error, 0.5 for correct
    rounding, 0 for exact results; note: where the bounds do not hold, or what the function means there.
    """

    of: Callable[..., V]
    ulp_f32: float
    ulp_f64: float
    arity: int = 1
    note: str = ""

    def emit(self, b: ir.IRBuilder, *operands: Any, **options: Any) -> Any:
        """The function's value.

        Arguments: b: where instructions go; operands: `arity` LLVM values of one type, f32 or f64 or vectors
          of them; options: Python values of the function's own: `n` of integer_pow.
        Returns: an LLVM value of that type (is_finite: i1, in as many lanes).
        """
        values, rest = operands[: self.arity], operands[self.arity :]
        return self.of(*[V(b, v) for v in values], *rest, **options).v


_NEAR_ZEROS = "near the zeros on the negative axis, ulp of the terms that cancel"

RULES: dict[str, Function] = {
    "exp": Function(exp.exp, 2, 2),
    "exp2": Function(exp.exp2, 1.5, 1.5),
    "expm1": Function(exp.expm1, 2, 2.5),
    "logistic": Function(exp.logistic, 2, 2),
    "log": Function(log.log, 1, 1.5),
    "log2": Function(log.log2, 2, 3),
    "log1p": Function(log.log1p, 2, 2),
    "sin": Function(trig.sin, 2, 2),
    "cos": Function(trig.cos, 2, 2),
    "tan": Function(trig.tan, 2, 3.5),
    "atan": Function(inverse.atan, 1.5, 2),
    "atan2": Function(inverse.atan2, 2, 2, arity=2),
    "asin": Function(inverse.asin, 1.5, 2),
    "acos": Function(inverse.acos, 1.5, 1.5),
    "tanh": Function(hyperbolic.tanh, 2, 2.5),
    "sinh": Function(hyperbolic.sinh, 2, 2),
    "cosh": Function(hyperbolic.cosh, 1.5, 1.5),
    "asinh": Function(hyperbolic.asinh, 2, 3),
    "acosh": Function(hyperbolic.acosh, 2, 3),
    "atanh": Function(hyperbolic.atanh, 1.5, 3),
    "erf": Function(erf.erf, 1.5, 1.5),
    "erfc": Function(erf.erfc, 3.5, 3.5),
    "erf_inv": Function(erf.erf_inv, 2, 3),
    "pow": Function(power.pow, 1, 1.5, arity=2, note="as C99's pow for infinities and zeros"),
    "integer_pow": Function(power.integer_pow, 2, 2, note="for |n| <= 3; each multiplication adds half an ulp"),
    "sqrt": Function(power.sqrt, 0.5, 0.5),
    "rsqrt": Function(power.rsqrt, 1.5, 1.5),
    "cbrt": Function(power.cbrt, 1, 1),
    "lgamma": Function(gamma.lgamma, 1, 5, note=_NEAR_ZEROS),
    "digamma": Function(gamma.digamma, 1, 5, note=_NEAR_ZEROS),
    "floor": Function(rounding.floor, 0, 0),
    "ceil": Function(rounding.ceil, 0, 0),
    "round_away": Function(rounding.round_away, 0, 0, note="ties away from zero"),
    "round_even": Function(rounding.round_even, 0, 0, note="ties to even"),
    "sign": Function(rounding.sign, 0, 0),
    "is_finite": Function(rounding.is_finite, 0, 0),
    "nextafter": Function(rounding.nextafter, 0, 0, arity=2),
    "rem": Function(rounding.rem, 0, 0, arity=2, note="C's fmod"),
}
