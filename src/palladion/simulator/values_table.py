"""The table of NumPy rules, and what its families of rules share.

A rule is called once an equation, when a kernel is prepared: it looks at the equation's types and parameters and
returns a plain function of the operand values, so that nothing is decided while the kernel runs. The families are
the files `values_*.py`; `values.py` gathers them.

Values are NumPy arrays, or NumPy scalars for shape (), of exactly the dtype of their abstract values; bf16, the
8-bit floats and the sub-byte integers are those of ml_dtypes. Typed PRNG keys are held as their uint32 words, in
trailing dimensions. Functions never change their operands; a result may be a view of one, or a constant that is
given back each time. The caller runs them under `np.errstate(all="ignore")`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from palladion import jaxlink
from palladion.rules import RuleTable

ARRAYS = RuleTable("NumPy, the simulated machines' arrays")

_NARROW_INTS = {
    np.dtype(ml_dtypes.int2): 2,
    np.dtype(ml_dtypes.uint2): 2,
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
}


def array_function(eqn: Any) -> Callable[..., Any]:
    """The NumPy function of an array equation.

    Arguments:
      eqn: an equation of a jaxpr.

    Returns:
      a function of the operand values, by position, that returns the result, or a sequence of results for a
      primitive with several.

    Raises:
      UnsupportedPrimitive: no rule, or a parameter that the rule does not take.
    """
    rule = ARRAYS.get(eqn.primitive)
    if rule is None:
        raise ARRAYS.unsupported(eqn)
    return rule(eqn)


# --- what rules ask of an equation -----------------------------------------------------------------------------
def dtype_in(eqn: Any, i: int = 0) -> np.dtype:
    """The dtype in which operand `i` is held."""
    return held_dtype(eqn.invars[i].aval)


def dtype_out(eqn: Any, i: int = 0) -> np.dtype:
    """The dtype in which result `i` is held."""
    return held_dtype(eqn.outvars[i].aval)


def shape_in(eqn: Any, i: int = 0) -> tuple[int, ...]:
    """The shape in which operand `i` is held."""
    return held_shape(eqn.invars[i].aval)


def shape_out(eqn: Any, i: int = 0) -> tuple[int, ...]:
    """The shape in which result `i` is held."""
    return held_shape(eqn.outvars[i].aval)


def words(dtype: Any) -> tuple[int, ...]:
    """The trailing dimensions that hold one typed PRNG key; () for other dtypes."""
    return tuple(dtype._impl.key_shape) if jaxlink.is_opaque(dtype) else ()


def held_shape(aval: Any) -> tuple[int, ...]:
    """The shape of the array that holds a value of this abstract value."""
    return tuple(map(int, aval.shape)) + words(aval.dtype)


def held_dtype(aval: Any) -> np.dtype:
    """The dtype of the array that holds a value of this abstract value."""
    return np.dtype(np.uint32) if jaxlink.is_opaque(aval.dtype) else np.dtype(aval.dtype)


def literal(eqn: Any, i: int) -> Any:
    """The value of operand `i` where it is written into the jaxpr, else None."""
    atom = eqn.invars[i]
    return atom.val if isinstance(atom, jaxlink.Literal) else None


def all_scalar(eqn: Any) -> bool:
    """Whether every operand has shape ()."""
    return all(not held_shape(v.aval) for v in eqn.invars)


# --- dtypes ----------------------------------------------------------------------------------------------------
def is_float(dtype: Any) -> bool:
    """Whether a dtype is a real float, ml_dtypes' included."""
    return jax.dtypes.issubdtype(dtype, np.floating)


def is_int(dtype: Any) -> bool:
    """Whether a dtype is an integer (not bool), sub-byte ones included."""
    return jax.dtypes.issubdtype(dtype, np.integer)


def is_signed(dtype: Any) -> bool:
    """Whether a dtype is a signed integer."""
    return jax.dtypes.issubdtype(dtype, np.signedinteger)


def bits_of(dtype: np.dtype) -> int:
    """The number of bits that count of a value."""
    return _NARROW_INTS.get(dtype, dtype.itemsize * 8)


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which NumPy computes: float32 for the smaller floats, a byte for sub-byte integers, else itself."""
    if dtype in _NARROW_INTS:
        return np.dtype(np.int8 if is_signed(dtype) else np.uint8)
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype


def widened(function: Callable[..., Any], eqn: Any, *, out: np.dtype | None = None) -> Callable[..., Any]:
    """`function` computed in the wide dtype of the first operand and rounded (or wrapped) once to `out`.

    Operands all have the dtype of the first. Without `out` the result keeps the dtype that `function` gives it.
    Where the wide dtype is the operands' own, this is `function` itself, which then must give `out`.
    """
    dtype = dtype_in(eqn)
    to = wide(dtype)
    if to == dtype:
        return function
    if len(eqn.invars) == 1:
        if out is None:
            return lambda x: function(x.astype(to))
        return lambda x: function(x.astype(to)).astype(out)
    if len(eqn.invars) == 2:
        if out is None:
            return lambda x, y: function(x.astype(to), y.astype(to))
        return lambda x, y: function(x.astype(to), y.astype(to)).astype(out)
    if out is None:
        return lambda *xs: function(*[x.astype(to) for x in xs])
    return lambda *xs: function(*[x.astype(to) for x in xs]).astype(out)


def total_order(dtype: np.dtype) -> Callable[[Any], Any]:
    """A function from values to integers that are ordered as IEEE's total order: -NaN < -inf < -0 < 0 < inf < NaN."""
    if not is_float(dtype):
        return lambda x: x
    signed = np.dtype(f"int{dtype.itemsize * 8}")
    shift, mask = signed.type(dtype.itemsize * 8 - 1), signed.type(np.iinfo(signed).max)

    def key(x):
        bits = x.view(signed)
        return bits ^ ((bits >> shift) & mask)

    return key


# --- small functions given in jaxprs -----------------------------------------------------------------------------
def straight_line(jaxpr: Any) -> Callable[..., list[Any]]:
    """The function of a jaxpr of array primitives and nested calls, without control flow or Refs.

    Arguments:
      jaxpr: a jaxpr with its constants.

    Returns:
      a function of the argument values that returns the list of results.
    """
    jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    held = {v: np.asarray(c) for v, c in zip(jaxpr.constvars, consts)}
    steps = []
    for eqn in jaxpr.eqns:
        if eqn.primitive in jaxlink.CALLED:
            function, several = straight_line(eqn.params[jaxlink.CALLED[eqn.primitive]]), True
        else:
            function, several = array_function(eqn), eqn.primitive.multiple_results
        steps.append((function, [_reader(v) for v in eqn.invars], eqn.outvars, several))
    outs = [_reader(v) for v in jaxpr.outvars]

    def run(*args):
        env = dict(held)
        env.update(zip(jaxpr.invars, args))
        for function, readers, outvars, several in steps:
            result = function(*[read(env) for read in readers])
            env.update(zip(outvars, result if several else (result,)))
        return [read(env) for read in outs]

    return run


def _reader(atom: Any) -> Callable[[dict], Any]:
    if isinstance(atom, jaxlink.Literal):
        value = np.asarray(atom.val, held_dtype(atom.aval))[()]
        return lambda env: value
    return lambda env: env[atom]


def elementwise(jaxpr: Any, consts: Sequence[Any], shape: Sequence[int]) -> Callable[..., list[Any]]:
    """The function of a jaxpr of scalars (a reducer, say), made to work on arrays of `shape` element by element.

    It is traced anew for the number of elements, because rules are chosen by shape.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    shape = tuple(shape)
    size = math.prod(shape)
    flat = [jax.ShapeDtypeStruct((size,), v.aval.dtype) for v in jaxpr.invars]
    with jaxlink.tracing_aside():
        run = straight_line(jax.make_jaxpr(jax.vmap(lambda *args: jaxlink.eval_jaxpr(jaxpr, consts, *args)))(*flat))

    def apply(*args):
        return [y.reshape(shape) for y in run(*[np.broadcast_to(x, shape).reshape(size) for x in args])]

    return apply
