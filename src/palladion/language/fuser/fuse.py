"""fuse: the computations around one call of a fusible become its input and output fusions.

The function is traced; of the equations before the call, each operand's fusion has those that the operand depends on,
and the output fusion has what the results need, wherever it stands, except the call. Nothing is computed until the
fusible asks for it. Results that do not depend on the call are computed beside it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import mistake
from palladion.language.fuser import graph as graphs
from palladion.language.fuser.fusible import FusibleCall, Fusion, fusible_p


def fuse(
    f: Callable[..., Any] | None = None,
    *,
    resolve_fusion_dtypes: bool = True,
    debug: bool = False,
    strict_mode: bool = True,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Callable[..., Any]:
    """Fuse what a function computes around its one call of a `fusible` into that call.

    Arguments:
      f: the function; None makes a decorator. If it calls several fusibles, the last is fused and the others run.
      resolve_fusion_dtypes: accepted as in Pallas; Palladion has no element types that exist in fusions only.
      debug: print what was traced.
      strict_mode: kept in the `Fusion`s for the fusible: whether converging blocks must have equal index maps.
      static_argnums, static_argnames: arguments that are not arrays, by position or name.

    Returns:
      a function of the same arguments and results.

    Raises:
      ValueError: f calls no fusible, or its results mix outputs that the fusible wants fused apart.
      NotImplementedError: an argument is a Ref (close over it instead).
    """
    if f is None:
        options = dict(resolve_fusion_dtypes=resolve_fusion_dtypes, debug=debug, strict_mode=strict_mode)
        return functools.partial(fuse, static_argnums=static_argnums, static_argnames=static_argnames, **options)
    nums, names = _statics(f, static_argnums, static_argnames)

    @functools.wraps(f)
    def fused(*args: Any, **kwargs: Any) -> Any:
        static_at = {n % len(args) for n in nums if -len(args) <= n < len(args)}
        arrays = (
            [x for n, x in enumerate(args) if n not in static_at],
            {k: v for k, v in kwargs.items() if k not in names},
        )

        def of_arrays(positional, named):
            left = iter(positional)
            every = [x if n in static_at else next(left) for n, x in enumerate(args)]
            return f(*every, **{k: named.get(k, v) for k, v in kwargs.items()})

        flat, in_tree = jax.tree.flatten(arrays)
        for x in flat:
            if graphs.is_ref(x):
                raise mistake(
                    NotImplementedError,
                    f"The fused function {locations.function_location(f)} gets a Ref as an argument.",
                    hint="let the function close over the Ref",
                )
        return _run_fused(f, lambda *leaves: of_arrays(*jax.tree.unflatten(in_tree, leaves)), flat, debug, strict_mode)

    return fused


def _statics(f: Callable, argnums: Any, argnames: Any) -> tuple[set[int], set[str]]:
    """Positions and names of static arguments; each names the other where the signature tells."""
    nums: set[int] = {argnums} if isinstance(argnums, int) else set(argnums or ())
    names: set[str] = {argnames} if isinstance(argnames, str) else set(argnames or ())
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return nums, names
    by_name = {p.name: n for n, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD}
    nums |= {by_name[name] for name in names if name in by_name}
    names |= {name for name, n in by_name.items() if n in nums or n - len(parameters) in nums}
    return nums, names


def _run_fused(f: Callable, of_leaves: Callable, flat: Sequence[Any], debug: bool, strict: bool) -> Any:
    info = jaxlink.debug_info("fuse", f, ())
    avals = [graphs.abstract(x) for x in flat]
    jaxpr, out_tree = jaxlink.trace_to_jaxpr(of_leaves, avals, info)
    calls = graphs.holds(fusible_p)
    while any(calls(eqn) for eqn in jaxpr.eqns):  # a fusible in a jitted function
        inlined = functools.partial(_inlined, jaxpr, calls)
        before, (jaxpr, _) = len(jaxpr.eqns), jaxlink.trace_to_jaxpr(inlined, avals, info)
        if len(jaxpr.eqns) == before:
            break
    if debug:
        print(f"Jaxpr before fusion:\n{jaxpr}")
    places = [n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive is fusible_p]
    if not places:
        raise mistake(
            ValueError,
            f"No fusible is called in the fused function {locations.function_location(f)}.",
            where=locations.defined_at(f),
            hint="fuse takes functions that call what @fuser.fusible decorates, directly or in jitted functions",
        )
    env = dict(zip(jaxpr.constvars, jaxpr.consts)) | dict(zip(jaxpr.invars, flat))
    return jax.tree.unflatten(out_tree, _Split(jaxpr, places[-1], env, strict).run())


def _inlined(jaxpr: Any, calls: Callable, *leaves: Any) -> list[Any]:
    return graphs.run_inlined(jaxpr, leaves, calls)


class _Split:
    """A traced function, cut at one call of a fusible.

    Attributes:
      eqns, outvars: of the traced function.
      at: the call's place among the equations.
      env: the values of arguments and constants.
    """

    def __init__(self, jaxpr: Any, at: int, env: dict[Any, Any], strict: bool) -> None:
        self.eqns, self.outvars, self.at, self.env, self.strict = jaxpr.eqns, jaxpr.outvars, at, env, strict
        self.eqn = jaxpr.eqns[at]
        self.call: FusibleCall = self.eqn.params["call"]
        if self.call.traced_keywords:
            raise mistake(
                TypeError,
                f"The fusible {self.call.name} gets an array as a keyword argument; only positional ones are fused.",
                where=locations.location_of(self.eqn),
                hint="pass arrays by position",
            )
        self.others = [e for n, e in enumerate(self.eqns) if n != at]
        writes = [e for e in self.eqns[:at] if jaxlink.written_vars(e)]
        if writes:
            raise mistake(
                ValueError,
                "The fused function writes a Ref before it calls the fusible.",
                where=locations.location_of(writes[0]),
                hint="write it before the fused function, which computes its inputs when the kernel asks for them",
            )

    def following(self, outs: Iterable[Any]) -> tuple[set[Any], list[Any]]:
        """The variables that depend on some of the call's outputs, and the equations with effects that go with them.

        Writes to Refs after the call keep their order with each other, and reads after them depend on them.
        """
        found, effectful = set(outs), []
        for eqn in self.eqns[self.at + 1 :]:
            writes = jaxlink.written_vars(eqn)
            if writes or any(not graphs.is_literal(a) and a in found for a in eqn.invars):
                found.update(eqn.outvars, writes)
                effectful += [eqn] if eqn.effects else []
        return found, effectful

    def input_fusion(self, operand: Any) -> Fusion:
        """What computes one operand of the call."""
        eqns = graphs.needed(self.eqns[: self.at], [operand], effects=False)
        return Fusion(lambda: graphs.run(eqns, self.env, [operand])[0], ((), {}), operand.aval, self.strict)

    def groups(self) -> list[tuple[list[Any], Any]]:
        """The call's outputs by output group, each with its pytree structure."""
        tree, prefix = self.eqn.params["out_tree"], self.call.prefix
        outs = jax.tree.unflatten(tree, self.eqn.outvars)
        try:
            parts = jax.tree.structure(prefix).flatten_up_to(outs)
        except ValueError as error:
            message = (
                f"output_fusion_prefix={prefix!r} of the fusible {self.call.name} is no prefix of its outputs, {tree}."
            )
            raise mistake(ValueError, message) from error
        return [(jax.tree.leaves(part), jax.tree.structure(part)) for part in parts]

    def run(self) -> list[Any]:
        """Call the fusible with its fusions: the flat results of the traced function."""
        groups, fusions, places = self.groups(), [], []
        taken: set[Any] = set()
        for outs, tree in groups:
            reached, effectful = self.following(outs)
            mine = [n for n, v in enumerate(self.outvars) if not graphs.is_literal(v) and v in reached]
            if taken & reached or (effectful and len(groups) > 1):
                message = f"The outputs that the fusible {self.call.name} wants fused apart are used together."
                message = message if not effectful else "Separate output fusions cannot write Refs."
                raise mistake(ValueError, message, hint="use one output group (output_fusion_prefix=True)")
            taken |= reached
            places.append(mine)
            wanted = [self.outvars[n] for n in mine]
            same = wanted == list(outs) and not effectful
            fusions.append(None if same else self.output_fusion(outs, tree, wanted, effectful))
        beside = [n for n in range(len(self.outvars)) if n not in {m for group in places for m in group}]
        found = dict(zip(beside, self.run_beside([self.outvars[n] for n in beside], taken)))
        operands = self.eqn.invars[self.eqn.params["num_consts"] :]
        result = jax.tree.leaves(self.call([self.input_fusion(a) for a in operands], fusions))
        order = [n for group in places for n in group]
        if len(result) != len(order):
            raise mistake(
                ValueError,
                f"The fusible {self.call.name} returns {len(result)} array(s), but its output fusions {len(order)}.",
                hint="where an output fusion is given, return what it returns (the arrays of its out_type)",
            )
        found.update(zip(order, result))
        return [found[n] for n in range(len(self.outvars))]

    def run_beside(self, outs: list[Any], taken: set[Any]) -> list[Any]:
        """Compute results that do not depend on the call, and do what else (prints) does not."""
        others = [e for e in self.others if not taken.intersection(a for a in e.invars if not graphs.is_literal(a))]
        return graphs.run(graphs.needed(others, outs), self.env, outs)

    def output_fusion(self, outs: list[Any], tree: Any, wanted: list[Any], effectful: list[Any]) -> Fusion:
        """What follows some outputs of the call."""
        effects = [a for e in effectful for a in e.invars if not graphs.is_literal(a)]
        reads = graphs.needed(self.others, [*wanted, *effects], effects=False)
        eqns = [e for e in self.others if e in reads or e in effectful]

        def function(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            leaves = jax.tree.leaves((args, kwargs))
            if len(leaves) != len(outs):
                message = f"The output fusion of {self.call.name} takes {len(outs)} array(s), not {len(leaves)}."
                raise mistake(ValueError, message)
            return tuple(graphs.run(eqns, self.env | dict(zip(outs, leaves)), wanted))

        types = jax.tree.unflatten(tree, [v.aval for v in outs])
        args = types if isinstance(types, tuple) else (types,)
        return Fusion(function, (args, {}), tuple(v.aval for v in wanted), self.strict)


# --- evaluate -------------------------------------------------------------------------------------------------------
def evaluate(f: Callable[..., Any], *, allow_transpose: bool = True) -> Callable[..., Any]:
    """Run a function operation by operation, as code in a fused kernel is run.

    Arguments:
      f: a function of positional arguments.
      allow_transpose: whether it may transpose.

    Returns:
      a function of the same arguments.

    Raises:
      NotImplementedError: f uses scan, while_loop or cond. ValueError: f transposes and may not.
    """

    @functools.wraps(f)
    def evaluated(*args: Any) -> Any:
        flat = jax.tree.leaves(args)
        graph = graphs.trace(f, args, {})
        for eqn in graph.eqns:
            if eqn.primitive in (lax.scan_p, lax.while_p, lax.cond_p):
                message = f"Primitive {eqn.primitive} not supported in a fused kernel."
                raise mistake(
                    NotImplementedError, message, where=locations.location_of(eqn), hint="unroll it in Python"
                )
            if eqn.primitive is lax.transpose_p and not allow_transpose:
                raise mistake(ValueError, "Transpose not allowed.", where=locations.location_of(eqn))
        env = dict(zip(graph.constvars, graph.consts)) | dict(zip(graph.invars, flat))
        return jax.tree.unflatten(graph.out_tree, graphs.run(graph.eqns, env, graph.outvars))

    return evaluated
