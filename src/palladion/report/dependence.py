"""What the values of a kernel depend on: the axes of its mesh, and the loops around them.

A forward walk over a jaxpr and the jaxprs in it. Each value has a set: the names of the axes whose `lax.axis_index`
it was computed from, and the loops (their equations) whose round it varies with. Stores and loads are not followed:
what is read from memory depends on the indices that it was read with, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax import lax

from palladion import jaxlink
from palladion.language.ops import run_scoped_p

Set = frozenset[Hashable]
Visitor = Callable[[Any, Sequence[Set]], None]
NOTHING: Set = frozenset()


def follow(jaxpr: Any, inputs: Sequence[Set], visit: Visitor = lambda eqn, sets: None) -> list[Set]:
    """Walk a jaxpr.

    Arguments:
      jaxpr: closed or not. inputs: the sets of its arguments.
      visit: called with each equation and the sets of its operands; of an equation in a loop, more than once.

    Returns:
      the sets of its results.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Set] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Set:
        return NOTHING if isinstance(atom, jaxlink.Literal) else env.get(atom, NOTHING)

    for eqn in jaxpr.eqns:
        sets = [read(x) for x in eqn.invars]
        visit(eqn, sets)
        outs = _FLOW.get(eqn.primitive, _plain)(eqn, sets, visit)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def loop_of(eqn: Any) -> Hashable:
    """What stands in a set for a loop."""
    return ("loop", id(eqn))


def _plain(eqn: Any, sets: Sequence[Set], visit: Visitor) -> list[Set]:
    all_of_them = NOTHING.union(*sets)
    if eqn.primitive in jaxlink.CALLED:
        return follow(eqn.params[jaxlink.CALLED[eqn.primitive]], sets, visit)
    if "axis_name" in eqn.params and not eqn.invars:
        name = eqn.params["axis_name"]
        all_of_them |= set(name if isinstance(name, tuple) else (name,))
    for inner in jaxlink.jaxprs_in_params(eqn.params):  # something that calls: its arguments may be any of these
        follow(inner, [all_of_them] * len(getattr(inner, "jaxpr", inner).invars), visit)
    return [all_of_them] * len(eqn.outvars)


def _cond(eqn: Any, sets: Sequence[Set], visit: Visitor) -> list[Set]:
    branches = [follow(branch, sets[1:], visit) for branch in eqn.params["branches"]]
    return [sets[0].union(*results) for results in zip(*branches, strict=True)]


def _while(eqn: Any, sets: Sequence[Set], visit: Visitor) -> list[Set]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts = sets[n_cond : n_cond + n_body]
    return _carried(eqn, sets[n_cond + n_body :], lambda c: follow(eqn.params["body_jaxpr"], [*consts, *c], visit))


def _scan(eqn: Any, sets: Sequence[Set], visit: Visitor) -> list[Set]:
    n_consts, n_carry = jaxlink.scan_counts(eqn)
    xs = [s | {loop_of(eqn)} for s in sets[n_consts + n_carry :]]
    consts, init = sets[:n_consts], sets[n_consts : n_consts + n_carry]
    results: list[Set] = []

    def body(carry: Sequence[Set]) -> list[Set]:
        results[:] = follow(eqn.params["jaxpr"], [*consts, *carry, *xs], visit)
        return results[:n_carry]

    return [*_carried(eqn, init, body), *results[n_carry:]]


def _carried(eqn: Any, init: Sequence[Set], body: Callable[[Sequence[Set]], Sequence[Set]]) -> list[Set]:
    carry = [s | {loop_of(eqn)} for s in init]
    while True:
        after = [a | b for a, b in zip(carry, body(carry), strict=True)]
        if after == carry:  # sets only grow, so this comes
            return carry
        carry = after


def _scope(eqn: Any, sets: Sequence[Set], visit: Visitor) -> list[Set]:
    return follow(eqn.params["jaxpr"], [*sets, *[NOTHING] * eqn.params["num_scoped"]], visit)


_FLOW: dict[Any, Callable[[Any, Sequence[Set], Visitor], list[Set]]] = {
    lax.cond_p: _cond,
    lax.while_p: _while,
    lax.scan_p: _scan,
    run_scoped_p: _scope,
}
