"""NumPy rules: sorting.

In a sort NaNs come last and zeros are equal; among the largest, floats have IEEE's total order, NaN above infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from palladion.simulator.values_table import ARRAYS, dtype_in, dtype_out, is_float, shape_in, total_order, wide


@ARRAYS.rule(lax.sort_p)
def _sort(eqn):
    axis, count = int(eqn.params["dimension"]), int(eqn.params["num_keys"])
    inner = [wide(dtype_in(eqn, i)) for i in range(count)]
    kind = "stable" if eqn.params["is_stable"] else None
    if len(eqn.invars) == 1:
        dtype, to = dtype_in(eqn), inner[0]
        if dtype == to:
            return lambda x: (np.sort(x, axis, kind),)
        return lambda x: (np.sort(x.astype(to), axis, kind).astype(dtype),)
    flat = len(shape_in(eqn)) == 1

    def sort(*xs):
        keys = [x.astype(to, copy=False) for x, to in zip(xs, inner)]
        order = np.argsort(keys[0], axis, "stable") if count == 1 else np.lexsort(keys[::-1], axis)
        if flat:
            return [x[order] for x in xs]
        return [np.take_along_axis(x, order, axis) for x in xs]

    return sort


def _largest(axis: int, k: int, key: Callable[[Any], Any], index: np.dtype) -> Callable[[Any], Any]:
    """The k largest along an axis, the first of equals first, and their places."""
    lead = (slice(None),) * axis
    back, first = (*lead, slice(None, None, -1)), (*lead, slice(0, k))

    def pick(x):
        # in the reversed array a stable sort puts the last of equals first; reversed again, it is the other way
        order = x.shape[axis] - 1 - np.argsort(key(x)[back], axis, "stable")[back][first]
        return np.take_along_axis(x, order, axis), order.astype(index)

    return pick


def _order(dtype: np.dtype) -> Callable[[Any], Any]:
    inner = wide(dtype)
    return total_order(dtype) if is_float(dtype) or inner == dtype else lambda x: x.astype(inner)


@ARRAYS.rule(lax.top_k_p)
def _top_k(eqn):
    axis = int(eqn.params.get("axis", -1)) % len(shape_in(eqn))
    return _largest(axis, int(eqn.params["k"]), _order(dtype_in(eqn)), dtype_out(eqn, 1))


@ARRAYS.rule(lax.approx_top_k_p)
def _approx_top_k(eqn):
    """The exact answer, which every recall target allows."""
    axis = int(eqn.params["reduction_dimension"]) % len(shape_in(eqn))
    if not eqn.params["aggregate_to_topk"]:
        raise ARRAYS.unsupported(eqn)
    key = _order(dtype_in(eqn))
    if not eqn.params["is_max_k"]:
        upward = key
        key = lambda x: ~upward(x)
    return _largest(axis, int(eqn.params["k"]), key, dtype_out(eqn, 1))
