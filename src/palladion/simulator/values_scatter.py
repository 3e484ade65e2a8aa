"""NumPy rules: scatters, which replace, add, multiply, or take the least or largest, in the order of the updates.

Windows that are not wholly within the operand are dropped, or moved inside in mode `clip`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from palladion.simulator.values_indexing import scatter_addressing
from palladion.simulator.values_table import ARRAYS, dtype_in, elementwise, is_int, shape_in, wide


def _scatter(eqn: Any, combine: Any) -> Any:
    """The function of a scatter.

    Arguments:
      combine: a function of the operand (to be changed), index arrays and updates.
    """
    at, window = scatter_addressing(eqn)
    updates = shape_in(eqn, 2)
    moved, left = at.axes(window, len(updates))
    order, rank = (*moved, *left), len(at.batch)
    behind = tuple(updates[d] for d in moved[rank:])
    lead = tuple(updates[d] for d in moved[:rank])
    front = (*at.picked, *at.whole)
    back = tuple(np.argsort(front))
    clip = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    index = at.indexer(clip=clip)
    picked = at.picked
    if 0 in at.shape or any(n > m for n, m in zip(at.sizes, at.shape)):
        return lambda x, indices, new: x

    def scatter(x, indices, new):
        out = np.array(x.transpose(front), order="C")
        picks, within = index(indices)
        new = new.transpose(order).reshape(lead + behind)
        if within is not None:
            new = new[within]
            picks = tuple(np.broadcast_to(p, lead + p.shape[rank:])[within] for p in picks)
        if picked:
            combine(out, picks, new)
        else:  # each update is as large as the operand
            for part in new.reshape(-1, *out.shape):
                combine(out, (), part)
        return out.transpose(back)

    return scatter


def _put(x, picks, new):
    x[picks or ...] = new


_FEW = 256  # places up to which it pays to see whether they differ


def _accumulating(ufunc: np.ufunc) -> Any:
    at: Any = ufunc.at

    def combine(x, picks, new):
        if len(picks) == 1 and 1 < picks[0].size <= _FEW < new.size:
            place = picks[0]
            if len(set(place.ravel().tolist())) == place.size:  # ufunc.at, for places that repeat, is slow
                x[place] = ufunc(x[place], new)
                return
        at(x, picks or ..., new)

    def rule(eqn):
        function = _scatter(eqn, combine)
        dtype = dtype_in(eqn)
        to = wide(dtype)
        if to == dtype or not is_int(dtype):  # ml_dtypes' own loops round at each step, as XLA's scatter does
            return function
        return lambda x, indices, new: function(x.astype(to), indices, new.astype(to)).astype(dtype)

    return rule


ARRAYS.rule(lax.scatter_add_p)(_accumulating(np.add))
ARRAYS.rule(lax.scatter_sub_p)(_accumulating(np.subtract))
ARRAYS.rule(lax.scatter_mul_p)(_accumulating(np.multiply))
ARRAYS.rule(lax.scatter_min_p)(_accumulating(np.minimum))
ARRAYS.rule(lax.scatter_max_p)(_accumulating(np.maximum))


@ARRAYS.rule(lax.scatter_p)
def _scatter_any(eqn):
    """Replaces, or (for `x.at[i].apply(f)`) computes from the old value and the update."""
    jaxpr, consts = eqn.params["update_jaxpr"], eqn.params["update_consts"]
    if jaxpr is None or (not jaxpr.eqns and jaxpr.outvars[0] is jaxpr.invars[1]):
        return _scatter(eqn, _put)
    apply = elementwise(jaxpr, consts, ())

    def combine(x, picks, new):
        """One place after the other, because a place that comes twice is changed twice."""
        if not picks:
            for place in np.ndindex(x.shape):
                x[place] = apply(x[place], new[place])[0]
            return
        shape = new.shape[: new.ndim - (x.ndim - len(picks))]
        picks = [np.broadcast_to(p, shape) for p in picks]
        for at in np.ndindex(shape):
            place = tuple(p[at] for p in picks)
            for rest in np.ndindex(new.shape[len(shape) :]):
                x[place + rest] = apply(x[place + rest], new[at + rest])[0]

    return _scatter(eqn, combine)
