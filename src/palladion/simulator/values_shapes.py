"""NumPy rules: movement whose places are known when the kernel is prepared.

Reshapes and static slices are views. What depends on no operand (iota, the broadcast of a literal) is one array,
made once and given back each time. Small broadcasts are written out, because NumPy takes longer to make the view.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.rules import present
from palladion.simulator.values_table import ARRAYS, dtype_out, literal, shape_in, shape_out, words

_WRITTEN_OUT = 1 << 14  # elements up to which a broadcast is copied


def _constant(value: np.ndarray) -> Callable[..., Any]:
    value.setflags(write=False)
    return lambda *_: value


def _first(x, *_):
    return x


# --- the same elements in another shape ----------------------------------------------------------------------------
@ARRAYS.rule(lax.reshape_p)
def _reshape(eqn):
    shape, order = shape_out(eqn), eqn.params.get("dimensions")
    if order is None:
        return operator.methodcaller("reshape", shape)
    order = (*map(int, order), *range(len(order), len(shape_in(eqn))))
    return lambda x: x.transpose(order).reshape(shape)


@ARRAYS.rule(lax.squeeze_p)
def _squeeze(eqn):
    return operator.methodcaller("reshape", shape_out(eqn))


@ARRAYS.rule(lax.transpose_p)
def _transpose(eqn):
    order = tuple(map(int, eqn.params["permutation"]))
    order = (*order, *range(len(order), len(shape_in(eqn))))
    return operator.methodcaller("transpose", order)


@ARRAYS.rule(lax.rev_p)
def _rev(eqn):
    dimensions = eqn.params["dimensions"]
    back, whole = slice(None, None, -1), slice(None)
    return operator.itemgetter(tuple(back if d in dimensions else whole for d in range(len(shape_in(eqn)))))


@ARRAYS.rule(lax.copy_p, lax.sharding_constraint_p, *present("stop_gradient_p"))
def _identity(eqn):
    return _first


@ARRAYS.rule(lax.optimization_barrier_p, lax.device_put_p)
def _identities(eqn):
    return lambda *xs: xs


# --- more of the same --------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.broadcast_in_dim_p)
def _broadcast_in_dim(eqn):
    before, after, dtype = shape_in(eqn), shape_out(eqn), dtype_out(eqn)
    places = tuple(map(int, eqn.params.get("broadcast_dimensions", ())))
    trailing = len(words(eqn.invars[0].aval.dtype))
    places += tuple(range(len(after) - trailing, len(after)))
    middle = [1] * len(after)
    for size, place in zip(before, places):
        middle[place] = size
    middle = tuple(middle)
    value = literal(eqn, 0)
    if value is not None:
        return _constant(np.array(np.broadcast_to(np.asarray(value, dtype).reshape(middle), after)))
    if middle == after:
        return operator.methodcaller("reshape", after)
    if math.prod(after) > _WRITTEN_OUT:
        return lambda x: np.broadcast_to(x.reshape(middle), after)

    def copy(x):
        out = np.empty(after, dtype)
        out[...] = x.reshape(middle)
        return out

    def fill(x):
        out = np.empty(after, dtype)
        out.fill(x)
        return out

    return copy if before else fill


@ARRAYS.rule(lax.iota_p)
def _iota(eqn):
    shape, dtype, along = shape_out(eqn), dtype_out(eqn), eqn.params["dimension"]
    line = np.arange(shape[along]).astype(dtype)
    return _constant(
        np.array(np.broadcast_to(line.reshape([-1 if d == along else 1 for d in range(len(shape))]), shape))
    )


@ARRAYS.rule(jaxlink.empty_p)
def _empty(eqn):
    """An array that JAX says nothing about; zeros, as XLA makes it."""
    return _constant(np.zeros(shape_out(eqn), dtype_out(eqn)))


@ARRAYS.rule(*present("tile_p"))
def _tile(eqn):
    repeats = tuple(map(int, eqn.params["reps"])) + (1,) * len(words(eqn.invars[0].aval.dtype))
    return lambda x: np.tile(x, repeats)


# --- joining and cutting -------------------------------------------------------------------------------------------
@ARRAYS.rule(lax.concatenate_p)
def _concatenate(eqn):
    axis = int(eqn.params["dimension"])
    return lambda *xs: np.concatenate(xs, axis)


@ARRAYS.rule(*present("stack_p"))
def _stack(eqn):
    axis = int(eqn.params["axis"])
    return lambda *xs: np.stack(xs, axis)


def _along(axis: int, index: Any) -> tuple:
    return (*[slice(None)] * axis, index)


@ARRAYS.rule(*present("unstack_p"))
def _unstack(eqn):
    axis = int(eqn.params["axis"])
    picks = [_along(axis, i) for i in range(len(eqn.outvars))]
    return lambda x: [x[pick] for pick in picks]


@ARRAYS.rule(*present("split_p"))
def _split(eqn):
    axis, picks, at = int(eqn.params["axis"]), [], 0
    for size in map(int, eqn.params["sizes"]):
        picks.append(_along(axis, slice(at, at + size)))
        at += size
    return lambda x: [x[pick] for pick in picks]


@ARRAYS.rule(lax.slice_p)
def _slice(eqn):
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params.get("strides") or (1,) * len(starts)
    return operator.itemgetter(tuple(slice(int(a), int(b), int(s)) for a, b, s in zip(starts, stops, strides)))


# --- padding -------------------------------------------------------------------------------------------------------
def _pad_slices(size: int, low: int, high: int, interior: int) -> tuple[slice, slice, int]:
    """Along one dimension: what is taken, where it goes, and the size of the result."""
    step = interior + 1
    result = low + high + size + max(size - 1, 0) * interior
    first = -(min(low, 0) // step)  # the first element whose place is not negative
    last = min(size, -((low - result) // step))  # past the last one whose place is within
    if last <= first:
        return slice(0, 0), slice(0, 0), max(result, 0)
    place = low + first * step
    return slice(first, last), slice(place, place + (last - first - 1) * step + 1, step), result


def padding(config: Sequence[Sequence[int]], shape: Sequence[int], dtype: np.dtype) -> Callable[[Any, Any], Any]:
    """The function of an array of `shape` and a value that pads as `lax.pad`: negative, and between elements."""
    slices = [_pad_slices(int(n), *map(int, edges)) for n, edges in zip(shape, config)]
    take, put = tuple(s[0] for s in slices), tuple(s[1] for s in slices)
    after = tuple(s[2] for s in slices)

    def pad(x, value):
        out = np.empty(after, dtype)
        out.fill(value)
        out[put] = x[take]
        return out

    return pad


@ARRAYS.rule(lax.pad_p)
def _pad(eqn):
    return padding(eqn.params["padding_config"], shape_in(eqn), dtype_out(eqn))
