"""`lax.sort` and `lax.top_k`, which Mosaic has not: a bitonic network of rotations and selections.

It takes log2(n)² / 2 rounds over the whole value, so it is for short rows. Source: K. Batcher, "Sorting networks and
their applications", 1968.

NaN comes last, as in lax, and the place of an element decides among equal ones, so that every sort is stable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import Refusal, is_float

_LONGEST = 1024


def _before(a: Sequence[jax.Array], b: Sequence[jax.Array], descending: bool) -> jax.Array:
    """Whether the keys `a` come before the keys `b`; the last key, the place, is always ascending."""
    result = jnp.zeros(a[0].shape, bool)
    same = jnp.ones(a[0].shape, bool)
    for n, (x, y) in enumerate(zip(a, b)):
        if descending and 0 < n < len(a) - 1:
            x, y = y, x
        less, equal = x < y, x == y
        if is_float(x.dtype):
            x_nan, y_nan = ~(x == x), ~(y == y)
            less, equal = less | (~x_nan & y_nan), equal | (x_nan & y_nan)
        result, same = result | (same & less), same & equal
    return result


def _rotated(x: jax.Array, by: int, axis: int) -> jax.Array:
    """Element i is element i + by, modulo the size."""
    n = x.shape[axis]
    by %= n
    return lax.concatenate([lax.slice_in_dim(x, by, n, axis=axis), lax.slice_in_dim(x, 0, by, axis=axis)], axis)


@functools.cache
def _sorter(axis: int, n_keys: int, descending: bool) -> Callable[..., list[jax.Array]]:
    def run(*operands: jax.Array) -> list[jax.Array]:
        n = operands[0].shape[axis]
        size = 1 << (n - 1).bit_length()
        edges = [(0, size - n if d == axis else 0, 0) for d in range(operands[0].ndim)]
        arrays = [lax.pad(x, jnp.zeros((), x.dtype), edges) for x in operands]
        place = lax.broadcasted_iota(jnp.int32, arrays[0].shape, axis)
        arrays += [(place >= n).astype(jnp.int32), place]  # padding comes last

        def keys(values):
            return [values[-2], *values[:n_keys], values[-1]]

        k = 2
        while k <= size:
            j = k // 2
            while j:
                low, up = (place & j) == 0, (place & k) == 0
                others = [jnp.where(low, _rotated(x, j, axis), _rotated(x, -j, axis)) for x in arrays]
                first = _before(keys(others), keys(arrays), descending)
                swap = first == (low == up)
                arrays = [jnp.where(swap, y, x) for x, y in zip(arrays, others)]
                j //= 2
            k *= 2
        return [lax.slice_in_dim(x, 0, n, axis=axis) for x in arrays[:-2]]

    return run


def _check(n: int) -> None:
    if n > _LONGEST:
        raise Refusal(
            f"a sort of {n} elements would take too many rounds; {_LONGEST} are the most.",
            "sort in XLA, outside the kernel: jnp.sort",
        )


@RULES.rule(lax.sort_p)
def _sort(ev: Emitter, eqn, *operands):
    axis = eqn.params["dimension"]
    avals = [v.aval for v in eqn.invars]
    _check(avals[0].shape[axis])
    return ev.inline(_sorter(axis, eqn.params["num_keys"], False), *operands, avals=avals)


@functools.cache
def _best(k: int, axis: int) -> Callable[..., list[jax.Array]]:
    def run(x: jax.Array) -> list[jax.Array]:
        place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return [lax.slice_in_dim(y, 0, k, axis=axis) for y in _sorter(axis, 1, True)(x, place)]

    return run


@RULES.rule(lax.top_k_p)
def _top_k(ev: Emitter, eqn, x):
    aval = eqn.invars[0].aval
    axis = eqn.params.get("axis", len(aval.shape) - 1)
    _check(aval.shape[axis])
    return ev.inline(_best(eqn.params["k"], axis), x, avals=[aval])
