"""Matrix products: `lax.dot_general` as `tpu.matmul`, which has one contracted, at most one batch dimension.

Either side may be transposed; further dimensions are brought together by reshapes. Sums are in float32, or in int32,
and are rounded to the result's dtype at the end. `precision` HIGHEST and HIGH ask the MXU for several passes over
float32 operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import full, reshape, shape_of
from palladion.compiler.tpu.emit import RULES, Emitter, Empty
from palladion.compiler.tpu.kinds import element_bits, is_float, is_unsigned, typed, value_type
from palladion.compiler.tpu.rules_casts import convert

_PASSES = {
    lax.Precision.HIGHEST: "fp32",
    lax.DotAlgorithmPreset.F32_F32_F32: "fp32",
    lax.Precision.HIGH: "bf16x3",
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3: "bf16x3",
}


@RULES.rule(lax.dot_general_p)
def _dot_general(ev: Emitter, eqn, left, right):
    (contract, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    if isinstance(left, Empty) or isinstance(right, Empty):  # a sum of nothing
        return full(value_type(out), 0)
    left, left_kind = _operand(ev, eqn, left, eqn.invars[0].aval.dtype)
    right, right_kind = _operand(ev, eqn, right, eqn.invars[1].aval.dtype)
    floats = is_float(left_kind)
    if floats != is_float(right_kind):
        raise ev.refuse(eqn, f"dot_general of {left_kind} and {right_kind}")
    product = jnp.dtype("float32" if floats else "int32")
    a, a_free, a_contract = _matrix(left, contract[0], batch[0])
    b, b_free, b_contract = _matrix(right, contract[1], batch[1])
    result = _matmul(
        ev, eqn, a, a_contract, b, b_contract, batched=bool(batch[0]), passes=passes(eqn, left_kind, right_kind)
    )
    shape = [shape_of(left)[d] for d in batch[0]] + a_free + b_free
    return convert(reshape(result, shape), product, out.dtype)


def _operand(ev: Emitter, eqn: Any, x: ir.Value, dtype: Any) -> tuple[ir.Value, Any]:
    """An operand at a dtype that the MXU takes: floats and signed integers of 8 bits at most."""
    if is_unsigned(dtype) or (not is_float(dtype) and element_bits(dtype) > 8):
        raise ev.refuse(eqn, f"dot_general of {dtype}")
    return x, dtype


def passes(eqn: Any, *dtypes: Any) -> str | None:
    precision = eqn.params["precision"]
    both = precision if isinstance(precision, tuple) else (precision, precision)
    if all(d != jnp.float32 for d in dtypes):
        return None
    return next((passes for wanted, passes in _PASSES.items() if wanted in both), None)


def _matrix(x: ir.Value, contract: Sequence[int], batch: Sequence[int]) -> tuple[ir.Value, list[int], int]:
    """An operand as [batch,] and two dimensions: the matrix, the sizes of its free dimensions, and which of the two
    is contracted (0 or 1)."""
    shape = shape_of(x)
    free = [d for d in range(len(shape)) if d not in contract and d not in batch]
    sizes = [shape[d] for d in free]
    lead = [math.prod(shape[d] for d in batch)] if batch else []
    n_free, n_contract = math.prod(sizes), math.prod(shape[d] for d in contract)
    order = [*batch, *contract, *free]
    if order == list(range(len(shape))):  # contracted first: the product takes it so
        return reshape(x, (*lead, n_contract, n_free)), sizes, 0
    x = build.transpose(x, [*batch, *free, *contract])
    return reshape(x, (*lead, n_free, n_contract)), sizes, 1


def _matmul(
    ev: Emitter, eqn: Any, a: ir.Value, a_dim: int, b: ir.Value, b_dim: int, batched: bool, passes: str | None
) -> ir.Value:
    """[batch,] a's free dimension, b's free dimension."""
    o = int(batched)
    m, n = shape_of(a)[o + 1 - a_dim], shape_of(b)[o + 1 - b_dim]
    floats = isinstance(build.element_of(a), ir.FloatType)
    element = ir.F32Type.get() if floats else ir.IntegerType.get_signless(32)
    kind = typed((*shape_of(a)[:o], m, n), element)
    free_a, free_b = o + 1 - a_dim, o + 1 - b_dim
    order = ([0, 0] if batched else []) + [0, free_a, 1, free_b]
    groups = [[o + a_dim], [o + b_dim], [free_a], [free_b], order, [0] * o, [0] * o]
    numbers = ", ".join(str(g) for g in groups)
    return tpu.matmul(
        kind,
        a,
        b,
        full(kind, 0),
        transpose_lhs_hint=bool(getattr(ev.kernel.params, "fuse_transposed_lhs_in_matmul", False)),
        precision=build.attr(f"#tpu.contract_precision<{passes}>") if passes else None,
        dimension_numbers=build.attr(f"#tpu.dot_dimension_numbers<{numbers}>"),
    )
