"""Outputs that several programs store in: a race on a GPU, where programs run in any order and many at a time.

A block that the index map gives for every value of a grid axis alike is shared by all programs along it. Storing in it
is a race; reading it, adding and storing, which is how TPU kernels accumulate over their last axis, is always wrong.
Atomic updates are how programs share a block: a kernel that has any knows what it does (it may hold a lock).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import explain
from palladion.language.masked import atomic_update_p, masked_load_p, masked_store_p
from palladion.language.ops import run_scoped_p


@dataclasses.dataclass(frozen=True)
class Shared:
    """An output whose block several programs store in.

    Attributes:
      axis: of the grid, along which they do.
      label: of the output.
      accumulates: whether each reads the whole block before it stores the whole block.
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
        parts = not all(a.whole for a in mine)
        for axis, n in enumerate(gm.grid):
            if n != 1 and axis not in uses and not (parts and axis in ids):  # else each may store in its own part
                reads = any(a.kind == "read" for a in mine) and not parts
                result.append(Shared(axis, mapping.origin, reads, locations.location_of(stores[-1].eqn)))
    return result


def refuse(params: dict[str, Any]) -> None:
    """Raises: ValueError: the kernel accumulates in an output along a grid axis."""
    for found in shared_outputs(params):
        if found.accumulates:
            n = params["grid_mapping"].grid[found.axis]
            raise ValueError(
                explain(
                    f"{'The' if n is None else f'All {n}'} programs along grid axis {found.axis} read and store the "
                    f"same block of {found.label}; Triton runs them in any order, at the same time.",
                    where=found.where,
                    hint="loop over that axis inside the kernel (lax.fori_loop, one store at the end), or use "
                    "pltriton.atomic_add",
                )
            )


# --- what a kernel does with its Refs ---------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Access:
    """An equation that reads or writes a Ref: `kind` is "read", "write" or "atomic"; `whole`: all of it at once."""

    eqn: Any
    ref: Any
    kind: str
    whole: bool


_KINDS = {
    jaxlink.get_p: ("read",),
    jaxlink.swap_p: ("write",),
    jaxlink.addupdate_p: ("read", "write"),
    masked_load_p: ("read",),
    masked_store_p: ("write",),
    atomic_update_p: ("atomic",),
}


def accesses(jaxpr: Any, names: dict[Any, Any]) -> Iterator[Access]:
    """All accesses of a kernel; `names` says which of the kernel's parameters a variable is."""
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jaxlink.Literal)} | {
        v for v in jaxpr.outvars if not isinstance(v, jaxlink.Literal)
    }
    for eqn in jaxpr.eqns:
        kinds = _KINDS.get(eqn.primitive)
        if kinds is None:
            for inner, operands in called(eqn):
                known = {i: names[o] for i, o in zip(inner.invars, operands) if _is_named(o, names)}
                yield from accesses(inner, known)
            continue
        if not _is_named(eqn.invars[0], names):
            continue
        whole = _covers(eqn)
        if eqn.primitive is jaxlink.swap_p and eqn.outvars[0] in used:
            kinds = ("read", "write")
        for kind in kinds:
            yield Access(eqn, names[eqn.invars[0]], kind, whole)


def _is_named(v: Any, names: dict[Any, Any]) -> bool:
    return not isinstance(v, jaxlink.Literal) and v in names


def _covers(eqn: Any) -> bool:
    skip = 2 if eqn.primitive in (jaxlink.swap_p, jaxlink.addupdate_p, masked_store_p) else 1
    tree = jax.tree.unflatten(eqn.params["tree"], eqn.invars[skip:])
    views = tree[0] if eqn.primitive in (masked_load_p, masked_store_p) else tree
    if eqn.primitive is atomic_update_p:
        views = tree[1]
    return not views


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


def _program_ids(jaxpr: Any) -> Iterator[int]:
    """The axes whose index the kernel reads."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "program_id":
            yield eqn.params["axis"]
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from _program_ids(inner)
