"""What a kernel call is, as text: the key of its machine code, so that a call known from the disk is not lowered again.

    text = describe(params, context)       # None: something in the call has no text that says all of it

Two calls with the same text compile to the same code. So the text holds the kernel's jaxpr with the contents of every
constant in it, operand types, blocks and index maps, aliases, options, and the part of JAX's configuration that
decides what a lowering rule traces to (x64, precision …). It leaves out what changes no code: source lines, the names
and derivatives of functions. Printing the jaxpr would not do, as JAX abbreviates constants; so it is walked here.

Only values of known kinds are written. Anything else (an object whose text may hide what it is, or be an address) makes
the whole text None, and the caller builds the loop nests to learn the key from them.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.language.cost import CostEstimate

_PARAMS = ("name", "jaxpr", "grid_mapping", "input_output_aliases", "debug_checks", "compiler_params")
_SILENT = ("map_location", "origin")  # fields of dataclasses that say where something was written
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Unknown(Exception):
    """A value that has no text of its own."""


def describe(params: Mapping[str, Any], context: Any = ()) -> str | None:
    """The text that decides the native code of a call.

    Arguments:
      params: of the `pallas_call` equation.
      context: whatever else decides it, such as `jaxlink.trace_context()`; of a tuple, the plain values count.

    Returns:
      the text, the same in every process; None where some value in the call has none.
    """
    plain = [x if isinstance(x, _PLAIN) else str(x) for x in context if isinstance(x, (*_PLAIN, enum.Enum))]
    try:
        return repr((plain, [_value(params[name]) for name in _PARAMS]))
    except _Unknown:
        return None


def _value(x: Any) -> Any:
    """Nested tuples of plain values that say what a value is."""
    if type(x) in _PLAIN:
        return x
    for kind, rule in _RULES:
        if isinstance(x, kind):
            return rule(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [f.name for f in dataclasses.fields(x) if f.name not in _SILENT]
        return (type(x).__qualname__, *((n, _value(getattr(x, n))) for n in names))
    raise _Unknown


def _array(x: Any) -> Any:
    if jaxlink.is_opaque(x.dtype):
        raise _Unknown
    x = np.asarray(x)
    return "array", x.dtype.name, x.shape, hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def _mapping(x: Mapping) -> Any:
    return "dict", sorted((repr(_value(k)), _value(v)) for k, v in x.items())


def _tree(x: Any) -> Any:
    text = str(x)  # with the static part of each node: slices, axes
    if " at 0x" in text or "..." in text:
        raise _Unknown
    return "tree", text


def _jaxpr(jaxpr: Any) -> Any:
    numbers: dict[Any, int] = {}

    def atom(a: Any) -> Any:
        if isinstance(a, jaxlink.Literal):
            return _type(a.aval), _value(a.val)
        return numbers[a]

    def bind(variables: Any) -> Any:
        for v in variables:
            numbers[v] = len(numbers)
        return [_type(v.aval) for v in variables]

    heads = bind(jaxpr.constvars), [_value(c) for c in jaxpr.consts], bind(jaxpr.invars)
    eqns = []
    for eqn in jaxpr.eqns:
        inputs = [atom(a) for a in eqn.invars]
        eqns.append((eqn.primitive.name, inputs, _params(eqn), bind(eqn.outvars)))
    return "jaxpr", *heads, eqns, [atom(a) for a in jaxpr.outvars]


def _params(eqn: Any) -> Any:
    if eqn.primitive in jaxlink.CALLED:  # of a call the body matters, not its derivatives, names and shardings
        return _value(eqn.params[jaxlink.CALLED[eqn.primitive]])
    params = dict(eqn.params)
    if eqn.primitive is lax.scan_p:  # these say how its operands are grouped: so many constants, so many carries
        del params["ft_in"], params["ft_out"]
        params["counts"] = jaxlink.scan_counts(eqn)
    return [(name, _value(value)) for name, value in sorted(params.items())]


def _type(aval: Any) -> Any:
    space = getattr(aval, "memory_space", None)
    return (
        type(aval).__name__,
        getattr(aval, "shape", None),
        str(getattr(aval, "dtype", None)),
        bool(getattr(aval, "weak_type", False)),
        str(space),
    )


_RULES: tuple[tuple[Any, Any], ...] = (
    (enum.Enum, lambda x: (type(x).__qualname__, x.name)),
    (jaxlink.Jaxpr, _jaxpr),
    (np.dtype, lambda x: ("dtype", str(x))),
    ((np.ndarray, np.generic, jax.Array), _array),
    (jax.ShapeDtypeStruct, lambda x: ("shape", x.shape, str(x.dtype))),
    (CostEstimate, lambda x: None),
    ((tuple, list), lambda x: (type(x).__qualname__, *map(_value, x))),
    (Mapping, _mapping),
    (type, lambda x: ("class", x.__module__, x.__qualname__)),
    (type(jax.tree.structure(0)), _tree),
    (_PLAIN, lambda x: (type(x).__qualname__, str(x))),
)
