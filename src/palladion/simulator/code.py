"""A kernel's jaxpr as Python closures: what the agents of a simulated machine run.

A jaxpr is prepared once. Each equation becomes a small function `step(env, agent)` over a list of values; its
rule has looked at params and types beforehand, so that a run does nothing but call NumPy. Calls (`jit`, `checkpoint`,
custom derivatives) are inlined; `cond`, `while` and `scan` are Python's own `if` and loops.

    code = Compiler(RULES, options).code(jaxpr)
    results = code(agent, arguments)

A machine gives rules `rule(compiler, eqn) -> function(agent, *values)` in a `RuleTable` of its own. What it has no
rule for is array code, and `values.py` has its meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import UnsupportedPrimitive
from palladion.rules import RuleTable
from palladion.simulator.memory import WHOLE, Region, index_fits
from palladion.simulator.values import array_function
from palladion.simulator.values_table import held_dtype, held_shape

Step = Callable[[list, Any], None]


class Code:
    """A prepared jaxpr: call it with an agent and its arguments."""

    __slots__ = ("_first", "_outs", "_steps", "_template")

    def __init__(self, template: list, first: int, steps: Sequence[Step], outs: Sequence[int]) -> None:
        self._template, self._first, self._steps, self._outs = template, first, tuple(steps), tuple(outs)

    def __call__(self, agent: Any, args: Sequence[Any]) -> list[Any]:
        env = self._template.copy()
        env[self._first : self._first + len(args)] = args
        for step in self._steps:
            step(env, agent)
        return [env[o] for o in self._outs]


class Compiler:
    """Prepares jaxprs for a machine.

    Arguments:
      rules: the machine's rules.
      machine: what its rules want to know; kept as it is.
      skip_floats: give NaN for every floating-point result of array code.
      seconds: how long an equation of array code keeps an agent busy; None: time is not kept.
    """

    def __init__(
        self,
        rules: RuleTable,
        machine: Any = None,
        *,
        skip_floats: bool = False,
        seconds: Callable[[Any], float] | None = None,
    ) -> None:
        self.rules, self.machine, self.skip_floats, self.seconds = rules, machine, skip_floats, seconds
        self.wanted: list[bool] = []  # of the equation that a rule looks at: which results are used
        self.around: Any = None  # the equation in whose jaxpr they are
        self._codes: dict[Any, Code] = {}

    def code(self, jaxpr: Any) -> Code:
        """The jaxpr as code; the same jaxpr is prepared once."""
        if jaxpr not in self._codes:
            self._codes[jaxpr] = _Writer(self).write(jaxpr)
        return self._codes[jaxpr]

    def function(self, eqn: Any) -> Callable:
        """What an equation of array code does, a function of its operands' values."""
        avals = [v.aval for v in eqn.outvars]
        if self.skip_floats and avals and all(_is_float(a) for a in avals) and eqn.primitive not in _MOVEMENT:
            results = tuple(np.full(a.shape, np.nan, a.dtype) for a in avals)
            return lambda *_: results if eqn.primitive.multiple_results else results[0]
        return array_function(eqn)


def _is_float(aval: Any) -> bool:
    return not jaxlink.is_opaque(aval.dtype) and jnp.issubdtype(aval.dtype, jnp.inexact)


FAIR = 1000  # iterations of a loop, after which other agents have their turn
_MOVEMENT = {
    lax.broadcast_in_dim_p, lax.reshape_p, lax.transpose_p, lax.squeeze_p, lax.concatenate_p, lax.slice_p,
    lax.dynamic_slice_p, lax.dynamic_update_slice_p, lax.convert_element_type_p, lax.select_n_p,
}  # fmt: skip


class _Writer:
    """Writes one `Code`."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.template: list[Any] = []
        self.steps: list[Step] = []

    def write(self, jaxpr: Any) -> Code:
        slots = [self.slot() for _ in jaxpr.invars]
        outs = self.inline(jaxpr, slots)
        return Code(self.template, 0, self.steps, outs)

    def slot(self, value: Any = None) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def inline(self, jaxpr: Any, slots: Sequence[int]) -> list[int]:
        """Steps for a jaxpr whose arguments lie in these slots; the slots of its results."""
        place: dict[Any, int] = dict(zip(jaxpr.invars, slots, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts):
            place[var] = self.slot(_constant(value))

        def where(atom: Any) -> int:
            if isinstance(atom, jaxlink.Literal):
                return self.slot(_constant(atom.val, getattr(atom.aval, "dtype", None)))
            return place[atom]

        used = {v for e in jaxpr.eqns for v in e.invars if not isinstance(v, jaxlink.Literal)}
        used |= {v for v in jaxpr.outvars if not isinstance(v, jaxlink.Literal)}
        for eqn in jaxpr.eqns:
            ins = [where(a) for a in eqn.invars]
            inner = _inner(eqn)
            if inner is not None:
                place.update(zip(eqn.outvars, self.inline(inner, ins)))
                continue
            outs = [self.slot() for _ in eqn.outvars]
            place.update(zip(eqn.outvars, outs))
            self.compiler.wanted = [v in used for v in eqn.outvars]
            self.steps.append(self.step(eqn, ins, outs))
        return [where(a) for a in jaxpr.outvars]

    def step(self, eqn: Any, ins: Sequence[int], outs: Sequence[int]) -> Step:
        outer = self.compiler.around
        if outer is not None and locations.location_of(eqn) is None:
            # It was made in Palladion's own code (sync_copy, a pipeline): the user's line is the one that called that.
            eqn = eqn.replace(source_info=outer.source_info)
        self.compiler.around = eqn
        try:
            return self._step(eqn, ins, outs)
        finally:
            self.compiler.around = outer

    def _step(self, eqn: Any, ins: Sequence[int], outs: Sequence[int]) -> Step:
        rule = self.compiler.rules.get(eqn.primitive) or _CONTROL.get(eqn.primitive)
        if rule is not None:
            return _with_agent(rule(self.compiler, eqn), ins, outs, eqn.primitive.multiple_results)
        try:
            function = self.compiler.function(eqn)
        except UnsupportedPrimitive:
            raise self.compiler.rules.unsupported(eqn) from None
        step = _pure(function, ins, outs, eqn.primitive.multiple_results)
        return step if self.compiler.seconds is None else _timed(step, self.compiler.seconds(eqn))


def _timed(step: Step, seconds: float) -> Step:
    def run(env: list, agent: Any) -> None:
        step(env, agent)
        agent.time += seconds

    return run


def _constant(value: Any, dtype: Any = None) -> Any:
    if jaxlink.is_opaque(getattr(value, "dtype", np.dtype(int))):
        value = jax.random.key_data(value)
    array = np.asarray(value, dtype)
    return array if array.ndim else array[()]


def _pure(function: Callable, ins: Sequence[int], outs: Sequence[int], multiple: bool) -> Step:
    if multiple:

        def many(env: list, agent: Any) -> None:
            for o, value in zip(outs, function(*[env[i] for i in ins])):
                env[o] = value

        return many
    (o,) = outs
    if len(ins) == 1:
        (a,) = ins

        def one(env: list, agent: Any) -> None:
            env[o] = function(env[a])

        return one
    if len(ins) == 2:
        a, b = ins

        def two(env: list, agent: Any) -> None:
            env[o] = function(env[a], env[b])

        return two

    def several(env: list, agent: Any) -> None:
        env[o] = function(*[env[i] for i in ins])

    return several


def _with_agent(function: Callable, ins: Sequence[int], outs: Sequence[int], multiple: bool) -> Step:
    if not multiple and len(outs) == 1:
        (o,) = outs
        if len(ins) == 1:
            (a,) = ins

            def one(env: list, agent: Any) -> None:
                env[o] = function(agent, env[a])

            return one

        def single(env: list, agent: Any) -> None:
            env[o] = function(agent, *[env[i] for i in ins])

        return single

    def step(env: list, agent: Any) -> None:
        results = function(agent, *[env[i] for i in ins])
        if outs:
            for o, value in zip(outs, results):
                env[o] = value

    return step


# --- calls and control flow ----------------------------------------------------------------------------------------
def _inner(eqn: Any) -> Any:
    """The jaxpr of a call that is written out in place, or None."""
    if (name := jaxlink.CALLED.get(eqn.primitive)) is not None:
        return eqn.params[name]
    if eqn.primitive.name == "call_hi_primitive":  # a function that JAX expands late (jnp.searchsorted)
        function = eqn.params["_prim"]
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

        def expanded(*flat: Any) -> Any:
            return function.expand(*jax.tree.unflatten(function.in_tree, flat))

        with jaxlink.tracing_aside():
            closed = jax.make_jaxpr(expanded)(*avals)
        return getattr(closed, "jaxpr", closed)
    return None


def _cond(compiler: Compiler, eqn: Any) -> Callable:
    branches = [compiler.code(b) for b in eqn.params["branches"]]
    last = len(branches) - 1

    def run(agent: Any, which: Any, *operands: Any) -> list[Any]:
        return branches[min(max(int(which), 0), last)](agent, operands)

    return run


def _while(compiler: Compiler, eqn: Any) -> Callable:
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    cond, body = compiler.code(eqn.params["cond_jaxpr"]), compiler.code(eqn.params["body_jaxpr"])
    batched = eqn.params["cond_jaxpr"].outvars[0].aval.ndim

    def run(agent: Any, *operands: Any) -> list[Any]:
        test, given, carry = operands[:n], operands[n:m], list(operands[m:])
        count = 0
        while cond(agent, (*test, *carry))[0]:
            carry = body(agent, (*given, *carry))
            count += 1
            if not count % FAIR:  # it may wait for what another agent stores
                agent.place.machine.engine.yield_to_others(agent)
        return carry

    def run_batched(agent: Any, *operands: Any) -> list[Any]:  # elements that are done keep what they have
        test, given, carry = operands[:n], operands[n:m], list(operands[m:])
        while (going := np.asarray(cond(agent, (*test, *carry))[0])).any():
            new = body(agent, (*given, *carry))
            carry = [
                np.where(going.reshape(going.shape + (1,) * (np.ndim(x) - going.ndim)), x, old)
                for x, old in zip(new, carry)
            ]
        return carry

    return run_batched if batched else run


def _scan(compiler: Compiler, eqn: Any) -> Callable:
    n_consts, n_carry = jaxlink.scan_counts(eqn)
    body, params = compiler.code(eqn.params["jaxpr"]), eqn.params
    order = range(params["length"])
    order = order[::-1] if params["reverse"] else order
    ys_avals = [v.aval for v in eqn.outvars[n_carry:]]
    shapes = [(held_shape(a), held_dtype(a)) for a in ys_avals]

    def run(agent: Any, *operands: Any) -> list[Any]:
        consts, carry = operands[:n_consts], list(operands[n_consts : n_consts + n_carry])
        xs = operands[n_consts + n_carry :]
        ys = [np.empty(shape, dtype) for shape, dtype in shapes]
        for k in order:
            outs = body(agent, (*consts, *carry, *[x[k] for x in xs]))
            carry = outs[:n_carry]
            for y, value in zip(ys, outs[n_carry:]):
                y[k] = value
        return [*carry, *ys]

    return run


_CONTROL: dict[Any, Callable] = {lax.cond_p: _cond, lax.while_p: _while, lax.scan_p: _scan}


# --- views of Refs -------------------------------------------------------------------------------------------------
class _Operand:
    """Stands for a dynamic index while a view is prepared."""

    __slots__ = ("k", "shape")

    def __init__(self, k: int, shape: tuple[int, ...]) -> None:
        self.k, self.shape = k, shape


class View:
    """The views that an equation takes of a Ref: a region that depends on the equation's dynamic indices.

    Arguments:
      wraps: whether run-time indices below zero count from the end, as they do in interpreters.

    Attributes:
      fixed: the region, where no index is dynamic; else None.
      unknown: whether run-time indices have to be checked.
    """

    def __init__(self, transforms: Sequence[Any], wraps: bool = True) -> None:
        self._parts: list[Any] = [_part(t, wraps) for t in transforms]
        self.fixed = None
        if not any(callable(p) for p in self._parts):
            self.fixed = Region(self._parts) if self._parts else WHOLE

    def region(self, values: Sequence[Any]) -> Region:
        """The region for these values of the equation's operands (those that are dynamic indices are looked up)."""
        if self.fixed is not None:
            return self.fixed
        parts: list[Any] = [p(values) if callable(p) else p for p in self._parts]
        return Region(parts)

    def outside(self, values: Sequence[Any]) -> tuple[int, Any, int] | None:
        """None, or (dimension, index, size) of the first index that leaves its Ref."""
        for part in self._parts:
            if isinstance(part, _DynamicIndex):
                index = part(values)[1]
                d = index_fits(index, part.shape)
                if d is not None:
                    return d, index[d], part.shape[d]
        return None


class _DynamicIndex:
    """An indexer with run-time parts; calling it with the operands' values gives ("index", tuple)."""

    __slots__ = ("dims", "shape")

    def __init__(self, indexer: Any, wraps: bool) -> None:
        self.shape = indexer.shape
        self.dims = [_dim(i, n if wraps else 0) for i, n in zip(indexer.indices, indexer.shape)]

    def __call__(self, values: Sequence[Any]) -> tuple[str, Any]:
        return "index", tuple([d(values) if callable(d) else d for d in self.dims])


def _dim(index: Any, extent: int) -> Any:
    """A part of an index, or how to find it from the operands' values; `extent` is added to what is below zero."""
    if isinstance(index, jaxlink.Slice):
        size, stride = index.size, index.stride
        if isinstance(index.start, _Operand):
            k, length = index.start.k, (size - 1) * stride + 1 if size else 0

            def dynamic(values: Sequence[Any]) -> slice:
                start = int(values[k])
                return slice(start, start + length, stride)

            return dynamic
        start = int(index.start)
        return slice(start, start + ((size - 1) * stride + 1 if size else 0), stride)
    if isinstance(index, _Operand):
        k = index.k
        if index.shape:
            return lambda values: np.where(values[k] < 0, values[k] + extent, values[k])

        def integer(values: Sequence[Any]) -> int:
            i = int(values[k])
            return i + extent if -extent <= i < 0 else i

        return integer
    return np.asarray(index) if np.ndim(index) else int(index)


def _part(transform: Any, wraps: bool) -> Any:
    match transform:
        case jaxlink.NDIndexer():
            dynamic = _DynamicIndex(transform, wraps)
            return dynamic if any(callable(d) for d in dynamic.dims) else dynamic(())
        case jaxlink.ReshapeTransform():
            return "reshape", tuple(transform.shape)
        case jaxlink.TransposeTransform():
            return "transpose", tuple(transform.permutation)
        case jaxlink.BitcastTransform():
            return "bitcast", np.dtype(transform.dtype)
    raise NotImplementedError(f"simulated machines have no meaning for the view {transform}")


def placeholders(eqn: Any, first: int = 0) -> list[_Operand]:
    """Stand-ins for the operands of an equation from number `first` on, to be regrouped by its tree."""
    return [_Operand(k, getattr(v.aval, "shape", ())) for k, v in enumerate(eqn.invars[first:], first)]


def view(eqn: Any, first: int) -> View:
    """The view that `get`, `swap` or `addupdate` takes; its dynamic indices are the operands from `first` on."""
    return View(jax.tree.unflatten(eqn.params["tree"], placeholders(eqn, first)))


@functools.cache
def location(eqn: Any) -> str | None:
    """`file:line (function)` of the user's line behind an equation."""
    return locations.location_of(eqn)
