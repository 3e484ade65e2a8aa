"""NumPy rules: reductions over sliding windows, and the gradients of pooling.

A window is taken apart into its offsets: at each, the operand strided by the window's steps is one array, and the
reduction is a chain over these. Sums, maxima and minima go dimension by dimension, which takes fewer steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion.simulator.values_reduce import highest, lowest
from palladion.simulator.values_shapes import padding
from palladion.simulator.values_table import ARRAYS, dtype_in, elementwise, shape_in, shape_out, wide, widened


def _padding(eqn: Any, dtype: np.dtype) -> Callable[[Any, Any], Any]:
    base = eqn.params.get("base_dilation") or (1,) * len(shape_in(eqn))
    config = [(*edges, int(step) - 1) for edges, step in zip(eqn.params["padding"], base)]
    return padding(config, shape_in(eqn), dtype)


def _offsets(sizes: Sequence[int], steps: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> Iterator:
    """For each offset within a window, in order: the slices of the padded operand that hold it in all windows."""
    for offset in itertools.product(*map(range, sizes)):
        starts = [o * d for o, d in zip(offset, steps)]
        yield tuple(slice(a, a + (n - 1) * s + 1, s) if n else slice(0, 0) for a, n, s in zip(starts, shape, strides))


def _register(primitive: Any, ufunc: np.ufunc, initial: Callable[[np.dtype], Any]) -> None:
    @ARRAYS.rule(primitive)
    def rule(eqn):
        p, dtype = eqn.params, wide(dtype_in(eqn))
        rank, after = len(shape_in(eqn)), shape_out(eqn)
        steps = p.get("window_dilation") or (1,) * rank
        pad, start = _padding(eqn, dtype), initial(dtype)
        passes = []
        for d, size in enumerate(p["window_dimensions"]):
            lead = (slice(None),) * d
            one = _offsets([size], [steps[d]], [p["window_strides"][d]], [after[d]])
            passes.append([(*lead, *cut) for cut in one])

        def reduce(x):
            x = pad(x, start)
            for cuts in passes:
                if len(cuts) == 1:
                    x = x[cuts[0]]
                    continue
                total = np.array(x[cuts[0]]) if cuts else np.zeros(after, dtype)
                for cut in cuts[1:]:
                    ufunc(total, x[cut], out=total)
                x = total
            return x

        return widened(reduce, eqn, out=dtype_in(eqn))


_register(lax.reduce_window_sum_p, np.add, lambda dtype: np.array(0, dtype))
_register(lax.reduce_window_max_p, np.maximum, lowest)
_register(lax.reduce_window_min_p, np.minimum, highest)


@ARRAYS.rule(lax.reduce_window_p)
def _reduce_window(eqn):
    """Windows reduced by a function of the user's, from the initial values, over the offsets in order."""
    p, count, after = eqn.params, len(eqn.outvars), shape_out(eqn)
    steps = p.get("window_dilation") or (1,) * len(after)
    cuts = list(_offsets(p["window_dimensions"], steps, p["window_strides"], after))
    combine = elementwise(p["jaxpr"], p.get("consts", ()), after)
    pads = [_padding(eqn, dtype_in(eqn, i)) for i in range(count)]

    def reduce(*operands):
        initial = operands[count:]
        xs = [pad(x, start) for pad, x, start in zip(pads, operands, initial)]
        state = [np.broadcast_to(start, after) for start in initial]
        for cut in cuts:
            state = combine(*state, *[x[cut] for x in xs])
        return state

    return reduce


@ARRAYS.rule(lax.select_and_scatter_add_p)
def _select_and_scatter_add(eqn):
    """The gradient of pooling: each source element is added where its window's selected element is."""
    p = eqn.params
    dtype, inner = dtype_in(eqn, 1), wide(dtype_in(eqn, 1))
    source, shape = shape_in(eqn, 0), shape_in(eqn, 1)
    largest = p["select_prim"] is lax.ge_p
    fill = (lowest if largest else highest)(inner)
    config = [(*map(int, edges), 0) for edges in p["padding"]]
    pad = padding(config, shape, inner)
    padded = tuple(n + low + high for n, (low, high, _) in zip(shape, config))
    cuts = list(_offsets(p["window_dimensions"], (1,) * len(shape), p["window_strides"], source))
    inside = tuple(slice(low, low + n) for n, (low, _, _) in zip(shape, config))
    better = np.greater if largest else np.less

    def scatter(new, x):
        x = pad(x.astype(inner), fill)
        best, chosen = np.array(x[cuts[0]]), np.zeros(source, np.intp)
        for i, cut in enumerate(cuts[1:], 1):
            wins = better(x[cut], best)
            np.copyto(best, x[cut], where=wins)
            chosen[wins] = i
        out = np.zeros(padded, inner)
        new = new.astype(inner)
        for i, cut in enumerate(cuts):
            out[cut] += np.where(chosen == i, new, 0)
        return out[inside].astype(dtype)

    return scatter
