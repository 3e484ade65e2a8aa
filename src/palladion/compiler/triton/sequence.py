"""Grid axes that must run in order: what a program leaves in scratch or in an output block, the next one needs.

A GPU runs the programs of a grid in any order, many at a time. TPU kernels count on order: they accumulate over their
last grid axis in scratch, or in an output block that all programs of an axis share. Such axes become loops inside
each program; the others stay CUDA's grid.

- *Scratch*: the fewest last axes whose first program (index 0 along them) stores in scratch before it reads it. That
  is found by walking the jaxpr with those indices known, so that `pl.when(k == 0)` is seen to run. If the very first
  program of the grid reads what nobody has stored, no loop helps, and lowering says so.
- *Outputs*: the axes along which all programs read and store the same block (`races.shared_outputs`), or may come back
  to one, since the index map does not tell them apart. A program that reads only what it has stored needs no order.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.compiler.triton import races
from palladion.compiler.triton.lowering import fits
from palladion.language import ops
from palladion.language.masked import masked_store_p


@dataclasses.dataclass(frozen=True)
class Carried:
    """Why an axis runs in order: `label` is carried along it, and read at `where`."""

    axis: int
    label: str
    where: str | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of a call's grid.

    Attributes:
      axes: those that become loops, outermost first, each with its reason.
      scratch: positions among the kernel's scratch Refs of those whose values go from program to program.
      outputs: positions of the outputs that are held in registers for all rounds, and stored at the end.
    """

    axes: tuple[Carried, ...] = ()
    scratch: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @property
    def loops(self) -> tuple[int, ...]:
        """The numbers of the axes."""
        return tuple(c.axis for c in self.axes)


def plan(params: dict[str, Any]) -> Plan:
    """How the programs of a call follow each other."""
    gm, jaxpr = params["grid_mapping"], params["jaxpr"]
    first_scratch = gm.num_prefetch + len(gm.block_mappings)
    held = list(jaxpr.invars[first_scratch:])
    found: dict[int, Carried] = {}
    carried = _first_reads(params, held, ())
    if carried:
        seen = [a for a in range(len(gm.grid)) if a not in gm.vmapped_dims]
        for n in range(1, len(seen) + 1):
            if not _first_reads(params, held, seen[-n:]):
                var, where = next(iter(carried.items()))
                found = {a: Carried(a, var.aval.label, where) for a in seen[-n:] if gm.grid[a] != 1}
                break
        else:
            carried = {}
    for shared in races.shared_outputs(params):
        if shared.accumulates:
            found.setdefault(shared.axis, Carried(shared.axis, shared.label, shared.where))
    for c in _revisited(params):
        found.setdefault(c.axis, c)
    axes = tuple(found[a] for a in sorted(found))
    scratch = tuple(k for k, v in enumerate(held) if v in carried) if axes else ()
    return Plan(axes, scratch, _in_registers(params, [c.axis for c in axes]))


def _revisited(params: dict[str, Any]) -> Iterator[Carried]:
    """Axes along which programs may come back to a block, by a table say, of outputs that are read first."""
    gm, refs = params["grid_mapping"], _output_refs(params)
    touched = list(races.accesses(params["jaxpr"], {v: v for v in params["jaxpr"].invars}))
    if any(a.kind == "atomic" for a in touched):
        return
    unset = _first_reads(params, refs, ())
    stored = {a.ref for a in touched if a.kind == "write"}
    for v, mapping in zip(refs, gm.outputs):
        if v not in unset or v not in stored:
            continue
        used = races.axes_used(mapping.index_map, len(gm.grid)) - races.axes_told(mapping.index_map, gm.grid)
        for axis in sorted(used):
            if gm.grid[axis] != 1:
                yield Carried(axis, mapping.origin, unset[v])


def _output_refs(params: dict[str, Any]) -> list[Any]:
    gm = params["grid_mapping"]
    first = gm.num_prefetch + gm.num_inputs
    return list(params["jaxpr"].invars[first : first + gm.num_outputs])


def _in_registers(params: dict[str, Any], loops: Sequence[int]) -> tuple[int, ...]:
    """Accumulated outputs of which the loops see one block, whole, that the first round fills."""
    gm, jaxpr = params["grid_mapping"], params["jaxpr"]
    if not loops:
        return ()
    refs = _output_refs(params)
    touched = list(races.accesses(jaxpr, {v: v for v in refs}))
    aliased = {out for _, out in params["input_output_aliases"]}
    unset = _first_reads(params, refs, loops)
    result = []
    for k, (v, mapping) in enumerate(zip(refs, gm.outputs)):
        mine = [a for a in touched if a.ref is v]
        accumulates = any(a.kind == "read" for a in mine) and all(a.whole and a.kind != "atomic" for a in mine)
        still = not races.axes_used(mapping.index_map, len(gm.grid)) & set(loops)
        if accumulates and still and k not in aliased and v not in unset and fits(mapping.ref_shape):
            result.append(k)
    return tuple(result)


# --- what a program reads before it has stored it -------------------------------------------------------------------
def _first_reads(params: dict[str, Any], refs: Sequence[Any], zero: Sequence[int]) -> dict[Any, str | None]:
    """Which of some Refs a program may read before it stores in them, where its index along the axes `zero` is 0."""
    gm, jaxpr = params["grid_mapping"], params["jaxpr"]
    seen = [a for a in range(len(gm.grid)) if a not in gm.vmapped_dims]
    ids = {k: 0 for k, a in enumerate(seen) if a in zero or gm.grid[a] == 1}
    sizes = {k: n for k, a in enumerate(seen) if (n := gm.grid[a]) is not None}
    walk = _Walk(ids, sizes)
    walk.run(jaxpr, {v: v for v in refs}, {}, set())
    return walk.unset


_FOLDED: dict[Any, Callable[..., Any]] = {
    lax.eq_p: operator.eq, lax.ne_p: operator.ne, lax.lt_p: operator.lt, lax.le_p: operator.le,
    lax.gt_p: operator.gt, lax.ge_p: operator.ge, lax.add_p: operator.add, lax.sub_p: operator.sub,
    lax.mul_p: operator.mul, lax.min_p: min, lax.max_p: max,
    lax.rem_p: lambda a, b: int(np.fmod(a, b)), lax.div_p: lambda a, b: int(a / b),
    lax.sign_p: lambda a: (a > 0) - (a < 0), lax.convert_element_type_p: int,
    lax.clamp_p: lambda low, x, high: min(max(x, low), high), lax.select_n_p: lambda which, *cases: cases[int(which)],
}  # fmt: skip
_CONDITIONS = {lax.and_p: (all, False), lax.or_p: (any, True)}  # of booleans; one may settle both


class _Walk:
    """A walk over a jaxpr in the order of its equations, with the integers that are known."""

    def __init__(self, ids: Mapping[int, int], sizes: Mapping[int, int]) -> None:
        self.ids, self.sizes = ids, sizes
        self.unset: dict[Any, str | None] = {}

    def run(self, jaxpr: Any, names: dict[Any, Any], known: dict[Any, int], stored: set[Any]) -> set[Any]:
        """The Refs that hold something afterwards; `stored` did before."""
        used = races.used_in(jaxpr)
        for eqn in jaxpr.eqns:
            if eqn.primitive in races.KINDS:
                stored = self._access(eqn, list(races.accesses_of(eqn, names, used)), stored)
                continue
            inner = races.called(eqn)
            if not inner:
                value = self._folded(eqn, known)
                if value is not None:
                    known[eqn.outvars[0]] = int(value)
                continue
            which = _value(eqn.invars[0], known) if eqn.primitive is lax.cond_p else None
            if which is not None:
                inner = [inner[min(max(which, 0), len(inner) - 1)]]
            after = [self._inner(eqn, called, operands, names, known, stored) for called, operands in inner]
            if eqn.primitive is lax.while_p or (eqn.primitive is lax.scan_p and not eqn.params["length"]):
                continue  # there may be no round
            stored = set.intersection(*after)
        return stored

    def _access(self, eqn: Any, touched: Sequence[races.Access], stored: set[Any]) -> set[Any]:
        if not touched:
            return stored
        ref, kinds = touched[0].ref, {a.kind for a in touched}
        masked = (
            eqn.primitive is masked_store_p and jax.tree.unflatten(eqn.params["tree"], eqn.invars[2:])[1] is not None
        )
        if (kinds != {"write"} or masked) and ref not in stored:  # a mask leaves elements as they were
            self.unset.setdefault(ref, locations.location_of(eqn))
        return stored | {ref} if "write" in kinds else stored

    def _inner(self, eqn: Any, jaxpr: Any, operands: Any, names: Any, known: Any, stored: set[Any]) -> set[Any]:
        """The same of a jaxpr that an equation runs."""
        pairs = [(i, o) for i, o in zip(jaxpr.invars, operands) if not isinstance(o, jaxlink.Literal)]
        below = {i: names[o] for i, o in pairs if o in names}
        numbers: dict[Any, int] = {}
        if eqn.primitive not in (lax.while_p, lax.scan_p):  # what a loop carries changes
            numbers = {i: v for i, o in zip(jaxpr.invars, operands) if (v := _value(o, known)) is not None}
        after = self.run(jaxpr, below, numbers, stored)
        if eqn.primitive in jaxlink.CALLED:
            for out, v in zip(eqn.outvars, jaxpr.outvars):
                if (number := _value(v, numbers)) is not None:
                    known[out] = number
        return after

    def _folded(self, eqn: Any, known: Mapping[Any, int]) -> Any:
        """The value of an integer or boolean scalar, if it is known."""
        p = eqn.primitive
        if len(eqn.outvars) != 1 or getattr(eqn.outvars[0].aval, "shape", None) != ():
            return None
        dtype = eqn.outvars[0].aval.dtype
        if not jnp.issubdtype(dtype, jnp.integer) and dtype != np.bool_:
            return None
        if p is ops.program_id_p:
            return self.ids.get(eqn.params["axis"])
        if p is ops.num_programs_p:
            return self.sizes.get(eqn.params["axis"])
        values = [_value(v, known) for v in eqn.invars]
        if p in _CONDITIONS and dtype == np.bool_:
            combine, settles = _CONDITIONS[p]
            if settles in [None if v is None else bool(v) for v in values]:
                return settles
            return None if None in values else combine(values)
        if p is lax.not_p and dtype == np.bool_:
            return None if values[0] is None else not values[0]
        if None in values or p not in _FOLDED or (p in (lax.rem_p, lax.div_p) and not values[1]):
            return None
        return _FOLDED[p](*values)


def _value(v: Any, known: Mapping[Any, int]) -> int | None:
    if not isinstance(v, jaxlink.Literal):
        return known.get(v)
    dtype = np.asarray(v.val).dtype
    whole = np.shape(v.val) == () and (np.issubdtype(dtype, np.integer) or dtype == np.bool_)
    return int(v.val) if whole else None
