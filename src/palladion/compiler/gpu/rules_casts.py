"""Conversions between dtypes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.compiler.gpu.dtypes import constant, kind
from palladion.compiler.gpu.rules_elementwise import expression
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar


def cast_text(old: Any, new: Any, text: str) -> str:
    """C++ for a value of one dtype as another: to integers towards zero and up to their range, to the nearest float."""
    a, b = kind(old), kind(new)
    if a == b:
        return text
    value = expression(a, text)
    if b.family == "bool":
        return f"({value} != 0)"
    if b.family == "float":
        if b.bits < 32:
            return f"{b.c}((float){value})"
        return f"({b.c}){value}"
    if a.family == "float":
        return f"whole<{b.c}>({value})"
    return f"({b.c}){value}"


@RULES.rule(lax.convert_element_type_p)
def _convert(unit: Unit, eqn: Any, x: Any) -> Any:
    old, new = eqn.invars[0].aval.dtype, jnp.dtype(eqn.params["new_dtype"])
    if kind(old) == kind(new):
        return x
    if isinstance(x, Scalar) and x.value is not None and kind(old).family != "float":
        value = np.asarray(x.value).astype(old).astype(new)[()]
        return Scalar(constant(value, new), new, value)
    return unit.elementwise(eqn, lambda a: cast_text(old, new, a), x, dtype=new)


@RULES.rule(lax.bitcast_convert_type_p)
def _bitcast(unit: Unit, eqn: Any, x: Any) -> Any:
    old, new = kind(eqn.invars[0].aval.dtype), kind(eqn.params["new_dtype"])
    if old.bits != new.bits:
        raise unit.refuse(
            f"A bitcast from {eqn.invars[0].aval.dtype} to {eqn.params['new_dtype']} changes the number of elements.",
            "bitcast the Ref instead: x_ref.bitcast(dtype)",
        )
    return unit.elementwise(eqn, lambda a: f"bit_cast<{new.c}>({a})", x)


@RULES.rule(lax.reduce_precision_p)
def _reduce_precision(unit: Unit, eqn: Any, x: Any) -> Any:
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    own = eqn.invars[0].aval.dtype
    for dtype in (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16):
        if (jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant) == bits:
            if kind(dtype).bits >= kind(own).bits:
                return x
            return unit.elementwise(eqn, lambda a: cast_text(dtype, own, cast_text(own, dtype, a)), x)
    raise unit.refuse(f"reduce_precision to {bits[0]} and {bits[1]} bits is not a dtype.")
