"""One set of parameters for calls that are the same: kernels made afresh in each step compile once.

Users often write `pl.pallas_call(kernel, …)(x)` inside a function that they call eagerly again and again. Each time
the kernel is traced to new jaxpr objects, and since JAX's compile caches compare jaxprs by identity, each time it
would be compiled anew (tens of milliseconds). `intern` compares the traced call by structure instead and returns
the parameters of an equal earlier call.

Two jaxprs are the same when their equations, types, literals and parameters are equal one by one. A function among
the parameters (a custom derivative rule) is only equal to itself, and a parameter that cannot be hashed makes the
call unique: both err on the side of compiling again. The kernel's own file and line are part of the key, since
messages name them.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.language.grid import BlockMapping, GridMapping

_CAPACITY = 1024
_lock = threading.Lock()
_table: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()


class _Cache:
    """The table to `jax.clear_caches()`."""

    def cache_clear(self) -> None:
        with _lock:
            _table.clear()

    def cache_keys(self) -> list[Hashable]:
        return list(_table)


_cache = _Cache()  # JAX holds it weakly
jaxlink.clear_caches_with_jax(_cache, "interned kernel calls")


class _Unique(Exception):
    """Something in the call has no structure to compare."""


def intern(params: dict[str, Any], location: str) -> dict[str, Any]:
    """The parameters of an equal earlier call, or `params`, remembered.

    Arguments:
      params: of a traced `pallas_call` equation.
      location: the kernel's `name at file:line`.
    """
    try:
        key = (location, jaxlink.trace_context(), _key(params))
        hash(key)
    except (_Unique, TypeError):
        return params
    with _lock:
        found = _table.setdefault(key, params)
        _table.move_to_end(key)
        if len(_table) > _CAPACITY:
            _table.popitem(last=False)
    return found


def _key(x: Any) -> Hashable:
    if isinstance(x, jaxlink.Jaxpr):
        return _jaxpr_key(x)
    if isinstance(x, GridMapping):
        parts = (x.grid, x.num_inputs, x.vmapped_dims, _key(x.block_mappings), _key(x.prefetch_mappings))
        return ("grid", parts)
    if isinstance(x, BlockMapping):
        fixed = (x.block_shape, x.array.shape, x.array.dtype, x.memory_space, x.pipeline_mode, x.origin, x.options)
        return ("block", fixed, x.map_location, _jaxpr_key(x.index_map))
    if isinstance(x, (tuple, list)):
        return (type(x).__name__, *map(_key, x))
    if isinstance(x, Mapping):
        return ("map", tuple((str(k), _key(x[k])) for k in sorted(x, key=str)))
    if isinstance(x, np.ndarray):
        return ("array", x.dtype, x.shape, x.tobytes())
    # 1, True and 1.0 are equal and hash alike, but make different kernels.
    return (type(x), x)


def _jaxpr_key(jaxpr: Any) -> Hashable:
    if jaxpr.consts:
        raise _Unique
    numbers: dict[Any, int] = {}

    def number(var):
        return numbers.setdefault(var, len(numbers))

    def atom(a):
        if isinstance(a, jaxlink.Literal):
            value = np.asarray(a.val)
            return ("literal", str(a.aval), value.dtype, value.shape, value.tobytes())
        return number(a)

    binders = tuple((number(v), v.aval, getattr(v.aval, "label", None)) for v in jaxpr.invars)
    eqns = tuple(
        (
            eqn.primitive,
            tuple(map(atom, eqn.invars)),
            tuple((k, _key(eqn.params[k])) for k in sorted(eqn.params)),
            tuple((number(v), v.aval, getattr(v.aval, "weak_type", None)) for v in eqn.outvars),
            eqn.ctx,
        )
        for eqn in jaxpr.eqns
    )
    return ("jaxpr", binders, eqns, tuple(map(atom, jaxpr.outvars)))


class CallKey:
    """The parameters of a call as a key for an executor's own cache: equal by identity of their jaxpr.

    Arguments:
      params: of a `pallas_call` equation.
      fields: those that the cached thing depends on; one that is absent counts as None.
    """

    def __init__(self, params: dict[str, Any], fields: Iterable[str]) -> None:
        self.params = params
        self._key = tuple(map(params.get, fields))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallKey) and self._key == other._key
