"""Outputs that several programs store in: a race on a GPU, where programs run in any order and many at a time.

A block that the index map gives for every value of a grid axis alike is shared by all programs along it. Storing in it
is a race, which the report remarks on; where the programs read it too, as TPU kernels accumulate over their last axis,
the axis becomes a loop inside each program (`sequence.py`).
Atomic updates are how programs share a block: a kernel that has any knows what it does (it may hold a lock).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from palladion import jaxlink, locations
from palladion.language.masked import atomic_update_p, masked_load_p, masked_store_p
from palladion.language.ops import run_scoped_p


@dataclasses.dataclass(frozen=True)
class Shared:
    """An output whose block several programs store in.

    Attributes:
      axis: of the grid, along which they do.
      label: of the output.
      accumulates: whether each reads what it stores in.
      where: the line of a store.
    """

    axis: int
    label: str
    accumulates: bool
    where: str | None


def shared_outputs(params: dict[str, Any]) -> list[Shared]:
    """The outputs that several programs store in, one for each axis."""
    gm, jaxpr = params["grid_mapping"], params["jaxpr"]
    touched = list(accesses(jaxpr, dict(zip(jaxpr.invars, jaxpr.invars))))
    if any(a.kind == "atomic" for a in touched):
        return []
    ids = set(_program_ids(jaxpr))
    first = gm.num_prefetch + gm.num_inputs
    result = []
    for k, mapping in enumerate(gm.outputs):
        mine = [a for a in touched if a.ref is jaxpr.invars[first + k]]
        stores = [a for a in mine if a.kind == "write"]
        if not stores:
            continue
        uses = axes_used(mapping.index_map, len(gm.grid))
        own = not all(a.fixed for a in mine)  # each may store in a part of its own, if it knows its number
        for axis, n in enumerate(gm.grid):
            if n != 1 and axis not in uses and not (own and axis in ids):
                reads = any(a.kind == "read" for a in mine)
                result.append(Shared(axis, mapping.origin, reads, locations.location_of(stores[-1].eqn)))
    return result


# --- what a kernel does with its Refs ---------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Access:
    """An equation that reads or writes a Ref.

    Attributes:
      kind: "read", "write" or "atomic".
      whole: all of it at once; fixed: the same part in every program, since its indices are constants.
    """

    eqn: Any
    ref: Any
    kind: str
    whole: bool
    fixed: bool


KINDS = {
    jaxlink.get_p: ("read",),
    jaxlink.swap_p: ("write",),
    jaxlink.addupdate_p: ("read", "write"),
    masked_load_p: ("read",),
    masked_store_p: ("write",),
    atomic_update_p: ("atomic",),
}


def accesses(jaxpr: Any, names: dict[Any, Any]) -> Iterator[Access]:
    """All accesses of a kernel; `names` says which of the kernel's parameters a variable is."""
    used = used_in(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive in KINDS:
            yield from accesses_of(eqn, names, used)
            continue
        for inner, operands in called(eqn):
            known = {i: names[o] for i, o in zip(inner.invars, operands) if _is_named(o, names)}
            yield from accesses(inner, known)


def used_in(jaxpr: Any) -> set[Any]:
    """The variables that a jaxpr's equations or results use."""
    every = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    return {v for v in every if not isinstance(v, jaxlink.Literal)}


def accesses_of(eqn: Any, names: dict[Any, Any], used: set[Any]) -> Iterator[Access]:
    """The accesses that one equation makes; none if it is no access, or one of another Ref. `used`: see `used_in`."""
    if eqn.primitive not in KINDS or not _is_named(eqn.invars[0], names):
        return
    kinds = KINDS[eqn.primitive]
    if eqn.primitive is jaxlink.swap_p and eqn.outvars[0] in used:
        kinds = ("read", "write")
    whole, fixed = _extent(eqn)
    for kind in kinds:
        yield Access(eqn, names[eqn.invars[0]], kind, whole, fixed)


def _is_named(v: Any, names: dict[Any, Any]) -> bool:
    return not isinstance(v, jaxlink.Literal) and v in names


def _extent(eqn: Any) -> tuple[bool, bool]:
    """Whether an access is of the whole Ref, and whether its indices are constants."""
    skip = 2 if eqn.primitive in (jaxlink.swap_p, jaxlink.addupdate_p, masked_store_p) else 1
    tree = jax.tree.unflatten(eqn.params["tree"], eqn.invars[skip:])
    views = tree[0] if eqn.primitive in (masked_load_p, masked_store_p) else tree
    if eqn.primitive is atomic_update_p:
        views = tree[1]
    return not views, all(isinstance(v, (jaxlink.Literal, int)) for v in jax.tree.leaves(views))


def called(eqn: Any) -> list[tuple[Any, Any]]:
    """The jaxprs that an equation runs, each with the operands that become its parameters."""
    p = eqn.params
    if eqn.primitive is lax.cond_p:
        return [(branch, eqn.invars[1:]) for branch in p["branches"]]
    if eqn.primitive is lax.while_p:
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        return [(p["body_jaxpr"], eqn.invars[n:]), (p["cond_jaxpr"], [*eqn.invars[:n], *eqn.invars[m:]])]
    if eqn.primitive is lax.scan_p or eqn.primitive is run_scoped_p:
        return [(p["jaxpr"], eqn.invars)]
    if eqn.primitive in jaxlink.CALLED:
        return [(p[jaxlink.CALLED[eqn.primitive]], eqn.invars)]
    return []


def axes_used(index_map: Any, rank: int) -> set[int]:
    """The grid axes that an index map's results depend on."""
    depends: dict[Any, set[int]] = {v: {a} for a, v in enumerate(index_map.invars[:rank])}

    def of(v: Any) -> set[int]:
        return set() if isinstance(v, jaxlink.Literal) else depends.get(v, set())

    for eqn in index_map.eqns:
        found = set().union(*map(of, eqn.invars))
        depends.update(dict.fromkeys(eqn.outvars, found))
    return set().union(*map(of, index_map.outvars))


def axes_told(index_map: Any, grid: tuple[int | None, ...]) -> set[int]:
    """The grid axes whose index follows from the block's, so that programs along them never share one.

    A result tells the axes in it if it is a sum of their multiples, each larger than all smaller ones together.
    """
    rank = len(grid)
    forms: dict[Any, dict[int, int] | None] = {v: {a: 1} for a, v in enumerate(index_map.invars[:rank])}

    def of(v: Any) -> dict[int, int] | None:
        return {} if isinstance(v, jaxlink.Literal) else forms.get(v)

    for eqn in index_map.eqns:
        forms[eqn.outvars[0]] = _affine(eqn, [of(v) for v in eqn.invars])
    told: set[int] = set()
    for form in map(of, index_map.outvars):
        reach = 0
        for a, factor in sorted((form or {}).items(), key=lambda item: abs(item[1])):
            n = grid[a]
            if abs(factor) <= reach:
                break
            told.add(a)
            if n is None:
                break
            reach += abs(factor) * (n - 1)
    return told


def _affine(eqn: Any, forms: list[dict[int, int] | None]) -> dict[int, int] | None:
    """The factor of each grid index in a sum of multiples; None for what is no such sum."""
    if None in forms:
        return None
    known: list[dict[int, int]] = [f for f in forms if f is not None]
    p = eqn.primitive
    if p is lax.convert_element_type_p:
        return known[0]
    if p in (lax.add_p, lax.sub_p):
        sign = 1 if p is lax.add_p else -1
        a, b = known
        total = {k: a.get(k, 0) + sign * b.get(k, 0) for k in a.keys() | b.keys()}
        return {k: factor for k, factor in total.items() if factor}
    if p is lax.mul_p:
        for v, other in zip(eqn.invars, reversed(known)):
            if isinstance(v, jaxlink.Literal) and (n := int(v.val)):
                return {k: n * factor for k, factor in other.items()}
    return None


def _program_ids(jaxpr: Any) -> Iterator[int]:
    """The axes whose index the kernel reads."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "program_id":
            yield eqn.params["axis"]
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from _program_ids(inner)
