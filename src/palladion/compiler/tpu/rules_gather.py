"""`lax.gather` along one dimension: `jnp.take_along_axis`, and `jnp.take` of rows or columns.

Mosaic gathers within registers: from 8 rows, or from 128 lanes of 32 bits. Other tables are chosen from row by row, as
long as they are short. Gathers along several dimensions at once are not there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mosaic.python import tpu

from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import full, shape_of
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import Refusal, is_float, is_unsigned, typed
from palladion.compiler.tpu.rules_elementwise import choose, widened
from palladion.compiler.tpu.rules_shapes import UNROLLED, along


@RULES.rule(lax.gather_p)
def _gather(ev: Emitter, eqn, x, indices):
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out = eqn.outvars[0].aval
    axis = _axis(numbers, sizes, shape_of(x))
    if axis is None:
        raise ev.refuse(eqn, "gather along several dimensions, or of parts")
    places = widened(indices, eqn.invars[1].aval.dtype)
    batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    places = build.broadcast(build.reshape(places, shape_of(places)[:-1]), out.shape, batch)
    where = _axis_of_result(numbers, axis, len(out.shape), len(shape_of(places)))
    if where is None:
        raise ev.refuse(eqn, "gather whose indices have several dimensions")
    n = shape_of(x)[axis]
    last = full(places.type, n - 1)
    clamped = arith.maxsi(arith.minsi(places, last), full(places.type, 0))
    result = take(x, clamped, axis)
    if eqn.params["mode"] in (lax.GatherScatterMode.FILL_OR_DROP,):
        fill = eqn.params["fill_value"]
        fill = _default_fill(out.dtype) if fill is None else fill
        inside = arith.cmpi(arith.CmpIPredicate.eq, clamped, places)
        result = choose(inside, result, full(result.type, fill))
    return result


def _axis(numbers: Any, sizes: Any, shape: tuple[int, ...]) -> int | None:
    """The dimension that is gathered along; None where the gather is of another kind."""
    if len(numbers.start_index_map) != 1 or numbers.collapsed_slice_dims != numbers.start_index_map:
        return None
    (axis,) = numbers.start_index_map
    whole = [d for d in range(len(shape)) if d != axis and d not in numbers.operand_batching_dims]
    return axis if all(sizes[d] == shape[d] for d in whole) else None


def _axis_of_result(numbers: Any, axis: int, rank: int, places: int) -> int | None:
    """The dimension of the result along which the indices run: where the operand has `axis`."""
    own = [d for d in range(rank) if d not in numbers.offset_dims]
    if not numbers.operand_batching_dims:
        return own[0] if len(own) == 1 and own[0] == axis else None
    return (
        axis
        if not numbers.offset_dims and numbers.operand_batching_dims == numbers.start_indices_batching_dims
        else None
    )


def _default_fill(dtype: Any) -> Any:
    if is_float(dtype):
        return np.nan
    return np.iinfo(dtype).max if is_unsigned(dtype) else np.iinfo(dtype).min


def take(x: ir.Value, places: ir.Value, axis: int) -> ir.Value:
    """Element [..., places[..., j, ...], ...] of `x` at [..., j, ...]; all places are inside."""
    if build.is_mask(x):
        return build.as_mask(take(build.as_words(x), places, axis))
    if (narrow := build.widening(build.element_of(x))) is not None:
        up, down, wide = narrow
        return down(typed(shape_of(places), build.element_of(x)), take(up(typed(shape_of(x), wide), x), places, axis))
    if _in_registers(shape_of(x), shape_of(places), axis):
        return tpu.dynamic_gather(x, places, [axis])
    n = shape_of(x)[axis]
    if n > UNROLLED:
        raise Refusal(
            f"a gather from {n} elements along dimension {axis} would take as many selections.",
            "gather 128 lanes or 8 rows at a time, or copy rows by DMA: pltpu.make_async_copy(x_ref.at[i], …)",
        )
    result = None
    for k in range(n):
        row = build.broadcast(along(x, axis, k, 1), shape_of(places), range(len(shape_of(places))))
        here = None if result is None else arith.cmpi(arith.CmpIPredicate.eq, places, full(places.type, k))
        result = row if result is None or here is None else arith.select(here, row, result)
    assert result is not None  # there are rows
    return result


def _in_registers(shape: tuple[int, ...], places: tuple[int, ...], axis: int) -> bool:
    """Whether all that is gathered from lies in one register."""
    if shape != places or len(shape) != 2 or shape[0] % 8 or shape[1] % 128:
        return False
    return shape[1] == 128 if axis == 1 else shape[0] == 8
