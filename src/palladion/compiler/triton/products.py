"""Rule: `dot_general`, as `tt.dot` where tensor cores or Triton's own loops take it, otherwise as products and sums.

`tt.dot` takes blocks [batch,] m x k and k x n with k of at least 16 (32 for 8-bit types, 8 for float32) and
accumulates in 32 bits. Smaller ones, integers that are not 8-bit and vectors are multiplied out elementwise.

Precision of float32: DEFAULT is TF32, as in `pltriton.dot(allow_tf32=True)`, HIGH three products in TF32, HIGHEST
full float32 (without tensor cores).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.triton import dialect as tt

from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import add, cast, check_f8, mul
from palladion.compiler.triton.lowering import RULES, Lowering, dtype_of, refusal
from palladion.compiler.triton.reductions import reduce_axes

_F8 = ("float8_e4m3fn", "float8_e5m2")
_LEAST_K = {64: 4, 32: 8, 16: 16, 8: 32}


@RULES.rule(lax.dot_general_p)
def _dot_general(ctx: Lowering, eqn, a, b) -> Any:
    (ca, cb), (ba, bb) = eqn.params["dimension_numbers"]
    types = dtype_of(eqn.invars[0]), dtype_of(eqn.invars[1])
    if "float8_e4m3fn" in map(str, types):
        check_f8(ctx, eqn)
    out = dtype_of(eqn.outvars[0])
    a, batch, m = _arranged(a, ba, ca, last=True)
    b, _, n = _arranged(b, bb, cb, last=False)
    k = math.prod(eqn.invars[0].aval.shape[d] for d in ca)
    rows, columns, batches = math.prod(m), math.prod(n), math.prod(batch)
    lead = (batches,) if batches > 1 else ()
    a, b = emit.reshape(a, (*lead, rows, k)), emit.reshape(b, (*lead, k, columns))
    common = _operand_dtype(types, out)
    if common is not None and k >= _LEAST_K[emit.bits_of(common)] and rows * columns > 1:
        a, b = cast(a, types[0], common), cast(b, types[1], common)
        result, made = _dot(eqn, a, b, common, (*lead, rows, columns))
    else:
        result, made = _multiplied_out(eqn, a, b, types, out, lead, (rows, columns, k))
    return cast(emit.reshape(result, (*batch, *m, *n)), made, out)


def _arranged(x: Any, batch: Sequence[int], contracted: Sequence[int], *, last: bool) -> tuple[Any, Any, Any]:
    """Batch dimensions first, contracted ones last (or right behind them); the sizes of the batch and of the rest."""
    shape = emit.shape_of(x)
    free = [d for d in range(len(shape)) if d not in batch and d not in contracted]
    order = [*batch, *free, *contracted] if last else [*batch, *contracted, *free]
    if order != list(range(len(shape))):
        x = tt.trans(x, order)
    return x, tuple(shape[d] for d in batch), tuple(shape[d] for d in free)


def _operand_dtype(types: Sequence[Any], out: Any) -> Any:
    """What `tt.dot` multiplies: None for types that it does not take."""
    if all(str(t) == "int8" for t in types):
        return types[0] if str(out) == "int32" else None
    if not all(emit.is_float(t) for t in types):
        return None
    if types[0] == types[1]:
        return types[0]
    return jnp.promote_types(*(jnp.bfloat16 if str(t) in _F8 else t for t in types))


def _dot(eqn: Any, a: Any, b: Any, dtype: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    made = jnp.dtype(jnp.int32 if str(dtype) == "int8" else jnp.float64 if emit.bits_of(dtype) == 64 else jnp.float32)
    accumulator = emit.const(0, made, shape)
    precision = _precision(eqn) if str(dtype) == "float32" else tt.InputPrecision.IEEE
    return tt.dot(a, b, accumulator, input_precision=precision, max_num_imprecise_acc=0), made


def _precision(eqn: Any) -> Any:
    asked = eqn.params["precision"]
    if isinstance(asked, lax.DotAlgorithmPreset):
        named = {
            lax.DotAlgorithmPreset.TF32_TF32_F32: tt.InputPrecision.TF32,
            lax.DotAlgorithmPreset.TF32_TF32_F32_X3: tt.InputPrecision.TF32x3,
            lax.DotAlgorithmPreset.BF16_BF16_F32_X3: tt.InputPrecision.BF16x3,
            lax.DotAlgorithmPreset.BF16_BF16_F32_X6: tt.InputPrecision.BF16x6,
            lax.DotAlgorithmPreset.F32_F32_F32: tt.InputPrecision.IEEE,
            lax.DotAlgorithmPreset.DEFAULT: tt.InputPrecision.TF32,
        }
        if asked not in named:
            raise refusal(NotImplementedError, f"Triton has no product of float32 by {asked}.", eqn)
        return named[asked]
    wanted = {lax.Precision(p) for p in (asked if isinstance(asked, tuple) else (asked,)) if p is not None}
    if lax.Precision.HIGHEST in wanted:
        return tt.InputPrecision.IEEE
    return tt.InputPrecision.TF32x3 if lax.Precision.HIGH in wanted else tt.InputPrecision.TF32


def _multiplied_out(
    eqn: Any, a: Any, b: Any, types: Sequence[Any], out: Any, lead: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[Any, Any]:
    """The product as a sum over an m x n x k block."""
    rows, columns, k = sizes
    if math.prod((*lead, *sizes)) > emit.MAX_ELEMENTS:
        raise refusal(
            ValueError,
            f"A product of {rows} x {k} and {k} x {columns} in {types[0]} has no instruction and is too large to be "
            "multiplied out in registers.",
            eqn,
            "use float or int8 operands with int32 results, or smaller blocks",
        )
    wide = out if not emit.is_float(out) else jnp.dtype(jnp.float32) if emit.bits_of(out) < 32 else out
    a, b = cast(a, types[0], wide), cast(b, types[1], wide)
    if k == 1:
        a, b = emit.broadcast(a, (*lead, rows, columns)), emit.broadcast(b, (*lead, rows, columns))
        return mul(wide, a, b) if wide != np.bool_ else a, wide
    rank = len(lead)
    b = tt.trans(b, [*range(rank), rank + 1, rank])
    if rows == 1 or columns == 1:  # a matrix and a vector
        product = mul(wide, a, b)
        return emit.reshape(reduce_axes(product, wide, [rank + 1], add), (*lead, rows, columns)), wide
    product = mul(wide, tt.expand_dims(a, rank + 1), tt.expand_dims(b, rank))
    return reduce_axes(product, wide, [rank + 2], add), wide
