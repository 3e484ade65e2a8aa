"""NumPy rules: reductions and cumulative sums.

The small floats are summed in float32 and rounded once. Integers keep their width, and so wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion.simulator.values_table import (
    ARRAYS,
    dtype_in,
    dtype_out,
    elementwise,
    is_float,
    shape_in,
    shape_out,
    wide,
    widened,
)


def lowest(dtype: np.dtype) -> Any:
    """What the largest of no numbers is: minus infinity, the least integer, False."""
    if dtype == np.bool_:
        return np.False_
    return np.array(-np.inf, dtype) if is_float(dtype) else np.array(jax.numpy.iinfo(dtype).min, dtype)


def highest(dtype: np.dtype) -> Any:
    """What the smallest of no numbers is: infinity, the largest integer, True."""
    if dtype == np.bool_:
        return np.True_
    return np.array(np.inf, dtype) if is_float(dtype) else np.array(jax.numpy.iinfo(dtype).max, dtype)


def _register(primitive: Any, ufunc: np.ufunc, initial: Callable[[np.dtype], Any] | None) -> None:
    """A reduction by a ufunc; `initial` is the result of nothing where the ufunc has none of its own."""

    @ARRAYS.rule(primitive)
    def rule(eqn):
        dtype, axes = wide(dtype_in(eqn)), tuple(map(int, eqn.params["axes"]))
        if not axes:
            return lambda x: x
        reduce, empty = ufunc.reduce, any(shape_in(eqn)[d] == 0 for d in axes)
        if initial is None:
            function = lambda x: reduce(x, axes, dtype)
        elif empty:
            result = np.full(shape_out(eqn), initial(dtype_in(eqn)), dtype_in(eqn))
            return lambda x: result
        else:
            function = lambda x: reduce(x, axes)
        return widened(function, eqn, out=dtype_out(eqn))


_register(lax.reduce_sum_p, np.add, None)
_register(lax.reduce_prod_p, np.multiply, None)
_register(lax.reduce_max_p, np.maximum, lowest)
_register(lax.reduce_min_p, np.minimum, highest)
_register(lax.reduce_and_p, np.bitwise_and, None)
_register(lax.reduce_or_p, np.bitwise_or, None)
_register(lax.reduce_xor_p, np.bitwise_xor, None)


def _register_position(primitive: Any, function: Callable[..., Any]) -> None:
    """The first place of the largest or smallest; a NaN is both."""

    @ARRAYS.rule(primitive)
    def rule(eqn):
        (axis,) = eqn.params["axes"]
        to, held = dtype_out(eqn), dtype_in(eqn)
        if wide(held) == held:
            return lambda x: function(x, axis).astype(to)
        return lambda x: function(x.astype(wide(held)), axis).astype(to)


_register_position(lax.argmax_p, np.argmax)
_register_position(lax.argmin_p, np.argmin)


@ARRAYS.rule(lax.reduce_p)
def _reduce(eqn):
    """A reduction by a function of the user's: over the reduced elements in order, from the initial values."""
    count = len(eqn.outvars)
    axes = tuple(map(int, eqn.params["dimensions"]))
    shape, after = shape_in(eqn), shape_out(eqn)
    kept = [d for d in range(len(shape)) if d not in axes]
    step = elementwise(eqn.params["jaxpr"], eqn.params.get("consts", ()), after)

    def reduce(*operands):
        xs = [x.transpose((*axes, *kept)).reshape((-1, *after)) for x in operands[:count]]
        state = [np.broadcast_to(initial, after) for initial in operands[count:]]
        for parts in zip(*xs):
            state = step(*state, *parts)
        return state

    if 0 in shape:
        return lambda *operands: [np.broadcast_to(initial, after) for initial in operands[count:]]
    return reduce


# --- cumulative ----------------------------------------------------------------------------------------------------
def _register_cumulative(primitive: Any, ufunc: np.ufunc, *, exact: bool = True) -> None:
    """`exact` False: computed in float64 and rounded once."""

    @ARRAYS.rule(primitive)
    def rule(eqn):
        axis, dtype, held = int(eqn.params["axis"]), wide(dtype_in(eqn)), dtype_in(eqn)
        dtype = dtype if exact else np.dtype(np.float64)
        back = (*[slice(None)] * axis, slice(None, None, -1))
        accumulate = ufunc.accumulate
        if eqn.params["reverse"]:
            function = lambda x: accumulate(x[back], axis, dtype)[back]
        else:
            function = lambda x: accumulate(x, axis, dtype)
        return function if dtype == held else lambda x: function(x.astype(dtype)).astype(held)


_register_cumulative(lax.cumsum_p, np.add)
_register_cumulative(lax.cumprod_p, np.multiply)
_register_cumulative(lax.cummax_p, np.maximum)
_register_cumulative(lax.cummin_p, np.minimum)
_register_cumulative(lax.cumlogsumexp_p, np.logaddexp, exact=False)
