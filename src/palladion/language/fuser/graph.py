"""Traced functions as flat lists of equations, which the fuser cuts, follows backwards and runs on blocks.

A `Graph` is a jaxpr without calls: `jit`, `custom_jvp`, `custom_vjp` and `checkpoint` are inlined by tracing anew, so
that a rule for each array primitive is all that the passes need, and equations that no result depends on are gone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax

from palladion import jaxlink, locations


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a constant written into it."""
    return isinstance(atom, jaxlink.Literal)


def is_ref(x: Any) -> bool:
    """Whether a variable, a value or a type is a Ref."""
    aval = x if isinstance(x, (jaxlink.ShapedArray, jaxlink.AbstractRef)) else getattr(x, "aval", None)
    return isinstance(jaxlink.typeof(x) if aval is None else aval, jaxlink.AbstractRef)


def abstract(x: Any) -> Any:
    """The abstract value to trace with, of an array, a Python number or an array type."""
    if isinstance(x, (jaxlink.ShapedArray, jaxlink.AbstractRef)):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jaxlink.ShapedArray(x.shape, x.dtype, weak_type=bool(x.weak_type))
    return jaxlink.typeof(x)


def as_type(aval: Any) -> jax.ShapeDtypeStruct:
    """The public array type of an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def bind(eqn: Any, values: Sequence[Any], at: Any = None) -> list[Any]:
    """Run one equation on values, under its own configuration and source location (or that of the equation `at`)."""
    with locations.as_traced(at or eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def run(eqns: Iterable[Any], env: dict[Any, Any], outs: Sequence[Any]) -> list[Any]:
    """Run equations on the values in `env` (a copy is extended): what `outs` are at the end."""
    env = dict(env)

    def read(atom):
        return atom.val if is_literal(atom) else env[atom]

    for eqn in eqns:
        env.update(zip(eqn.outvars, bind(eqn, [read(a) for a in eqn.invars])))
    return [read(a) for a in outs]


def run_inlined(
    jaxpr: Any, args: Sequence[Any], inlines: Callable[[Any], bool] = lambda eqn: True, at: Any = None
) -> list[Any]:
    """Run a jaxpr with its calls (those that `inlines` chooses) run equation by equation.

    Equations of library functions have no line of the user's; they get that of the call, `at`.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(a) for a in eqn.invars]
        here = eqn if at is None or locations.location_of(eqn) else at
        if eqn.primitive in jaxlink.CALLED and inlines(eqn):
            outs = run_inlined(eqn.params[jaxlink.CALLED[eqn.primitive]], values, inlines, here)
        else:
            outs = bind(eqn, values, here)
        env.update(zip(eqn.outvars, outs))
    return [read(a) for a in jaxpr.outvars]


def needed(eqns: Sequence[Any], outs: Iterable[Any], *, effects: bool = True) -> list[Any]:
    """The equations that `outs` depend on, in order; with `effects`, also those that do more than compute."""
    wanted = {a for a in outs if not is_literal(a)}
    kept = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(a for a in eqn.invars if not is_literal(a))
    return kept[::-1]


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A traced function without calls.

    Attributes:
      eqns: in order.
      constvars, consts: variables of the values that the function closes over, and these values.
      invars: of the flat arguments.
      outvars: variables or literals, of the flat results.
      in_tree: pytree structure of (args, kwargs).
      out_tree: pytree structure of the result.
      name: `name at file:line` of the function.
      effects: what the function does besides computing its result.
    """

    eqns: tuple[Any, ...]
    constvars: tuple[Any, ...]
    consts: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    name: str
    effects: frozenset[Any] = frozenset()

    @functools.cached_property
    def producers(self) -> dict[Any, Any]:
        """The equation that makes each variable."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    def reaching(self, atoms: Iterable[Any]) -> set[Any]:
        """All variables that the given ones are computed from, themselves included."""
        found, todo = set(), [a for a in atoms if not is_literal(a)]
        while todo:
            var = todo.pop()
            if var not in found:
                found.add(var)
                eqn = self.producers.get(var)
                todo += [] if eqn is None else [a for a in eqn.invars if not is_literal(a)]
        return found

    def static(self, atom: Any) -> int | None:
        """The value of an integer scalar that depends on nothing but literals, else None."""
        if is_literal(atom):
            return int(atom.val)
        reached = self.reaching([atom])
        if reached & {*self.constvars, *self.invars}:
            return None
        eqns = [e for e in self.eqns if any(v in reached for v in e.outvars)]
        with jax.ensure_compile_time_eval():
            return int(run(eqns, {}, [atom])[0])

    def divisor(self, atom: Any) -> int:
        """A number that surely divides an integer scalar: what alignment its arithmetic shows (0 divides only 0)."""
        if is_literal(atom):
            return abs(int(atom.val))
        eqn = self.producers.get(atom)
        rule = None if eqn is None else _DIVISORS.get(eqn.primitive)
        return 1 if rule is None or eqn is None else rule(*(self.divisor(a) for a in eqn.invars))


_DIVISORS: dict[Any, Callable[..., int]] = {
    lax.mul_p: lambda a, b: a * b,
    lax.add_p: math.gcd,
    lax.sub_p: math.gcd,
    lax.max_p: math.gcd,
    lax.min_p: math.gcd,
    lax.neg_p: lambda a: a,
    lax.select_n_p: lambda which, *cases: math.gcd(*cases),
    lax.clamp_p: lambda low, x, high: math.gcd(low, x, high),
    lax.convert_element_type_p: lambda a: a,
}


def trace(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Graph:
    """Trace a function without calls and without equations that nothing depends on.

    Arguments:
      fun: a JAX function.
      args, kwargs: pytrees of arrays or array types.
    """
    flat, in_tree = jax.tree.flatten((tuple(args), kwargs))
    avals = [abstract(x) for x in flat]
    info = jaxlink.debug_info("fusion", fun, ())

    def flat_fun(*leaves):
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        return fun(*args, **kwargs)

    jaxpr, out_tree = jaxlink.trace_to_jaxpr(flat_fun, avals, info)
    if any(eqn.primitive in jaxlink.CALLED for eqn in jaxpr.eqns):
        jaxpr, _ = jaxlink.trace_to_jaxpr(functools.partial(_flat_run, jaxpr), avals, info)
    return Graph(
        eqns=tuple(needed(jaxpr.eqns, jaxpr.outvars)),
        constvars=tuple(jaxpr.constvars),
        consts=tuple(jaxpr.consts),
        invars=tuple(jaxpr.invars),
        outvars=tuple(jaxpr.outvars),
        in_tree=in_tree,
        out_tree=out_tree,
        name=locations.function_location(fun),
        effects=frozenset(jaxpr.effects),
    )


def _flat_run(jaxpr: Any, *leaves: Any) -> list[Any]:
    return run_inlined(jaxpr, leaves)


def holds(primitive: Any) -> Callable[[Any], bool]:
    """A predicate on equations: whether a call runs `primitive` somewhere inside."""

    def inside(eqn: Any) -> bool:
        inner = jaxlink.jaxprs_in_params(eqn.params)
        return any(e.primitive is primitive or inside(e) for j in inner for e in j.eqns)

    return inside


def carrier(name: str) -> Any:
    """A primitive whose meaning is the closed jaxpr in its parameter `jaxpr`, under every JAX transformation."""
    primitive = jaxlink.Primitive(name)
    primitive.multiple_results = True

    def apply(*args, jaxpr, **_):
        return jaxlink.eval_jaxpr(jaxpr, jaxpr.consts, *args)

    primitive.def_impl(apply)
    primitive.def_effectful_abstract_eval(
        lambda *_, jaxpr, **__: (list(jaxpr.out_avals), jaxlink.effects_outside(jaxpr))
    )
    jaxlink.mlir.register_lowering(primitive, jaxlink.mlir.lower_fun(apply, multiple_results=True))

    def batch(args, dims, *, jaxpr, **_):
        outs = jax.vmap(lambda *xs: apply(*xs, jaxpr=jaxpr), in_axes=tuple(dims))(*args)
        return outs, [0] * len(outs)

    def jvp(primals, tangents, *, jaxpr, **_):
        tangents = tuple(jaxlink.ad.instantiate_zeros(t) for t in tangents)
        return jax.jvp(lambda *xs: apply(*xs, jaxpr=jaxpr), tuple(primals), tangents)

    jaxlink.batching.primitive_batchers[primitive] = batch
    jaxlink.ad.primitive_jvps[primitive] = jvp
    return primitive


def hoisted(fun: Callable, flat: Sequence[Any], what: str) -> tuple[Any, list[Any], Any]:
    """Trace a function of flat arguments: a jaxpr without constants, the captured values, the result's structure."""
    jaxpr, tree = jaxlink.trace_to_jaxpr(fun, [abstract(x) for x in flat], jaxlink.debug_info(what, fun, ()))
    jaxpr, consts = jaxlink.convert_consts_to_invars(jaxpr)
    return jaxpr, consts, tree
