"""Rules: reductions along axes, the place of the largest element, running sums and the like, and sorting.

`tt.reduce` and `tt.scan` take a function of scalars as a region. Floats below 32 bits are combined in float32.
`lax.sort` is a bitonic network of exchanges between elements that `tt.gather` brings together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import add, cast, compare, maximum, minimum, mul, sub
from palladion.compiler.triton.functions import exp, log
from palladion.compiler.triton.lowering import RULES, Lowering, dtype_of
from palladion.compiler.triton.shapes import gathered

Combine = Callable[..., Sequence[Any]]  # (left values, right values) -> values, all scalars


def reduce(values: Sequence[Any], axis: int, combine: Combine) -> list[Any]:
    """Reduce several blocks together along one axis."""
    if emit.shape_of(values[0])[axis] == 1:
        shape = list(emit.shape_of(values[0]))
        del shape[axis]
        return [emit.reshape(v, shape) for v in values]
    op = tt.ReduceOp(values, axis)
    _region(op, values, combine, tt.reduce_return)
    return list(op.results)


def scan(values: Sequence[Any], axis: int, reverse: bool, combine: Combine) -> list[Any]:
    """Running reduction along one axis."""
    op = tt.ScanOp(values, axis, reverse)
    _region(op, values, combine, tt.scan_return)
    return list(op.results)


def _region(op: Any, values: Sequence[Any], combine: Combine, leave: Callable[..., Any]) -> None:
    kinds = [emit.scalar_type(v) for v in values]
    block = op.regions[0].blocks.append(*kinds, *kinds)
    n = len(values)
    with ir.InsertionPoint(block):
        leave(list(combine(*block.arguments[:n], *block.arguments[n:])))


def _wide(dtype: Any) -> Any:
    """What values of a dtype are combined in."""
    if jnp.dtype(dtype) == np.bool_:
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float32) if emit.is_float(dtype) and emit.bits_of(dtype) < 32 else jnp.dtype(dtype)


def reduce_axes(x: Any, dtype: Any, axes: Sequence[int], function: Callable[..., Any]) -> Any:
    """Reduce along several axes with a function of (dtype, a, b)."""
    wide = _wide(dtype)
    x = cast(x, dtype, wide)
    for axis in sorted(axes, reverse=True):
        (x,) = reduce([x], axis, lambda a, b: [function(wide, a, b)])
    return cast(x, wide, dtype)


def _bits(op: Any) -> Callable[..., Any]:
    return lambda dtype, a, b: op(a, b)


_REDUCED = {
    lax.reduce_sum_p: add,
    lax.reduce_prod_p: mul,
    lax.reduce_max_p: maximum,
    lax.reduce_min_p: minimum,
    lax.reduce_and_p: _bits(arith.andi),
    lax.reduce_or_p: _bits(arith.ori),
    lax.reduce_xor_p: _bits(arith.xori),
}
for _primitive, _function in _REDUCED.items():
    RULES.rule(_primitive)(
        lambda ctx, eqn, x, f=_function: reduce_axes(x, dtype_of(eqn.invars[0]), eqn.params["axes"], f)
    )


# --- the place of the largest or smallest -----------------------------------------------------------------------------
def _first_of(better: Any) -> Callable[..., Any]:
    def rule(ctx: Lowering, eqn, x) -> Any:
        """The lowest index of the best element; NaN is better than any number."""
        dtype, (axis,) = dtype_of(eqn.invars[0]), eqn.params["axes"]
        wide = _wide(dtype)
        x = cast(x, dtype, wide)
        shape = emit.shape_of(x)
        index = emit.broadcast(emit.arange(shape[axis], axis, len(shape)), shape)

        def combine(a, i, b, j):
            wins = compare(better, wide, a, b)
            ties = compare(lax.eq_p, wide, a, b)
            if emit.is_float(wide):
                nans = [compare(lax.ne_p, wide, v, v) for v in (a, b)]
                wins = arith.ori(wins, arith.andi(nans[0], arith.xori(nans[1], emit.like(nans[1], 1))))
                ties = arith.ori(ties, arith.andi(*nans))
            first = arith.ori(wins, arith.andi(ties, arith.cmpi(arith.CmpIPredicate.slt, i, j)))
            return arith.select(first, a, b), arith.select(first, i, j)

        _, place = reduce([x, index], axis, combine)
        return cast(place, jnp.int32, eqn.params["index_dtype"])

    return rule


RULES.rule(lax.argmax_p)(_first_of(lax.gt_p))
RULES.rule(lax.argmin_p)(_first_of(lax.lt_p))


# --- running reductions -----------------------------------------------------------------------------------------------
def _log_add_exp(dtype: Any, a: Any, b: Any) -> Any:
    """log(exp(a) + exp(b)); of two infinities of a sign, that one."""
    top, low = maximum(dtype, a, b), minimum(dtype, a, b)
    same = compare(lax.eq_p, dtype, a, b)
    gap = arith.select(same, emit.like(a, 0), sub(dtype, low, top))
    return add(dtype, top, log(dtype, add(dtype, exp(dtype, gap), emit.like(a, 1))))


_RUNNING = {
    lax.cumsum_p: add,
    lax.cumprod_p: mul,
    lax.cummax_p: maximum,
    lax.cummin_p: minimum,
    lax.cumlogsumexp_p: _log_add_exp,
}


def _running(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(ctx: Lowering, eqn, x) -> Any:
        dtype = dtype_of(eqn.invars[0])
        wide = _wide(dtype)
        combine = lambda a, b: [function(wide, a, b)]
        (x,) = scan([cast(x, dtype, wide)], eqn.params["axis"], eqn.params["reverse"], combine)
        return cast(x, wide, dtype_of(eqn.outvars[0]))

    return rule


for _primitive, _function in _RUNNING.items():
    RULES.rule(_primitive)(_running(_function))


# --- sorting ----------------------------------------------------------------------------------------------------------
@RULES.rule(lax.sort_p)
def _sort(ctx: Lowering, eqn, *operands) -> list[Any]:
    """A bitonic network; ties are broken by position, so it is stable. NaN comes last, as in JAX."""
    axis, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
    shape = emit.shape_of(operands[0])
    n = shape[axis]
    dtypes = [_wide(dtype_of(v)) for v in eqn.invars]
    values = [cast(x, dtype_of(v), d) for x, v, d in zip(operands, eqn.invars, dtypes)]
    values.append(emit.broadcast(emit.arange(n, axis, len(shape)), shape))
    dtypes.append(jnp.dtype(jnp.int32))
    keys = [*range(num_keys), len(values) - 1]
    width = 2
    while width <= n:
        step = width // 2
        while step:
            values = _exchange(values, dtypes, keys, axis, width, step)
            step //= 2
        width *= 2
    return [cast(x, d, dtype_of(v)) for x, d, v in zip(values, dtypes, eqn.invars)]


def _exchange(values: list[Any], dtypes: list[Any], keys: list[int], axis: int, width: int, step: int) -> list[Any]:
    """One step of the network: every element and its partner, `step` away, in the order of their run."""
    shape = emit.shape_of(values[0])
    place = emit.arange(shape[axis], 0, 1)
    partners = [gathered(x, axis, arith.xori(place, emit.like(place, step))) for x in values]
    along = emit.arange(shape[axis], axis, len(shape))
    second = _bit(along, step)
    downwards = _bit(along, width) if width < shape[axis] else None
    takes_larger = second if downwards is None else arith.xori(second, downwards)
    smaller = None
    for k in reversed(keys):
        lt, eq = _before(dtypes[k], partners[k], values[k])
        smaller = lt if smaller is None else arith.ori(lt, arith.andi(eq, smaller))
    swap = arith.xori(smaller, emit.broadcast(takes_larger, shape))
    return [arith.select(swap, p, x) for p, x in zip(partners, values)]


def _bit(along: Any, bit: int) -> Any:
    masked = arith.andi(along, emit.like(along, bit))
    return arith.cmpi(arith.CmpIPredicate.ne, masked, emit.like(masked, 0))


def _before(dtype: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Whether a comes before b, and whether neither does: -0 with 0, and NaN after all numbers."""
    lt, eq = compare(lax.lt_p, dtype, a, b), compare(lax.eq_p, dtype, a, b)
    if not emit.is_float(dtype):
        return lt, eq
    a_nan, b_nan = compare(lax.ne_p, dtype, a, a), compare(lax.ne_p, dtype, b, b)
    lt = arith.ori(lt, arith.andi(b_nan, arith.xori(a_nan, emit.like(a_nan, 1))))
    return lt, arith.ori(eq, arith.andi(a_nan, b_nan))
