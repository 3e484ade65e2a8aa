"""Convolutions: `lax.conv_general_dilated` as `tpu.conv`, summed in float32 or int32 and rounded at the end."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from palladion.compiler.tpu.build import attr, full
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import element_bits, is_float, is_unsigned, typed
from palladion.compiler.tpu.rules_casts import convert
from palladion.compiler.tpu.rules_dot import passes


@RULES.rule(lax.conv_general_dilated_p)
def _conv(ev: Emitter, eqn, left, right):
    params, out = eqn.params, eqn.outvars[0].aval
    dtypes = [v.aval.dtype for v in eqn.invars]
    if any(is_unsigned(d) or (not is_float(d) and element_bits(d) > 8) for d in dtypes):
        raise ev.refuse(eqn, f"conv_general_dilated of {dtypes[0]}")
    floats = is_float(dtypes[0])
    kind = typed(out.shape, ir.F32Type.get() if floats else ir.IntegerType.get_signless(32))
    numbers = params["dimension_numbers"]
    (batch, feature, *spatial), (out_feature, in_feature, *window), (to_batch, to_feature, *to_spatial) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    places = (batch, feature, spatial, in_feature, out_feature, window, to_batch, to_feature, to_spatial)
    several = passes(eqn, *dtypes)
    result = tpu.conv(
        kind,
        left,
        right,
        full(kind, 0),
        attr(f"#tpu.conv_dimension_numbers<{', '.join(map(str, places))}>"),
        list(params["window_strides"]),
        [n for pair in params["padding"] for n in pair],
        list(params["lhs_dilation"]),
        list(params["rhs_dilation"]),
        [False] * len(spatial),
        feature_group_count=params["feature_group_count"],
        batch_group_count=params["batch_group_count"],
        precision=attr(f"#tpu.contract_precision<{several}>") if several else None,
    )
    return convert(result, jnp.dtype("float32" if floats else "int32"), out.dtype)
