"""What has to be known of a kernel before it is compiled: order, coverage, and what must be copied.

- which leading grid axes may run at once (declared parallel, or proved to touch different output blocks);
- whether every element of an output is written in any case, so that it need not be filled first;
- which aliased inputs must be copied, because the kernel reads them after it has written the output;
- which windows may hang over the edge of their array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.language import ops
from palladion.language.blocks import BoundedSlice, Element
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.index_maps import MAX_POINTS, evaluate, grid_points, reads_prefetch

_CALLS = {jaxlink.jit_p: "jaxpr", jaxlink.remat_p: "jaxpr"}
_CALLS |= dict.fromkeys((jaxlink.custom_jvp_call_p, jaxlink.custom_vjp_call_p), "call_jaxpr")


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jaxlink.Literal)


def written_in_any_case(jaxpr: Any, var: Any) -> bool:
    """Whether the kernel stores all of a Ref before it reads any of it, whatever its branches do."""
    return _first_use(jaxpr, var) == "written"


def _first_use(jaxpr: Any, var: Any) -> str | None:
    used = {v for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars) for v in atoms if _is_var(v)}
    for eqn in jaxpr.eqns:
        if not any(v is var for v in eqn.invars):
            continue
        if eqn.primitive is jaxlink.swap_p and len(eqn.invars) == 2:
            unused = eqn.outvars[0] not in used
            return "written" if unused else "other"
        if eqn.primitive in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive]]
            k = next(i for i, v in enumerate(eqn.invars) if v is var)
            return _first_use(inner, inner.invars[k]) or "other"
        return "other"
    return None


def starts_over(jaxpr: Any, var: Any, axes: Sequence[int]) -> bool:
    """Whether a scratch Ref is set up afresh whenever the program ids of `axes` are all 0.

    True for `pl.when(pl.program_id(axis) == 0)` round a full store that comes before every other use.
    """
    made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
    for eqn in jaxpr.eqns:
        if not any(v is var for v in eqn.invars):
            continue
        if eqn.primitive is not lax.cond_p or len(eqn.params["branches"]) != 2:
            return written_in_any_case(jaxpr, var)
        if _zero_test(made_by, eqn.invars[0]) not in axes or len(axes) != 1:
            return False
        k = next(i for i, v in enumerate(eqn.invars[1:]) if v is var)
        off, on = eqn.params["branches"]
        untouched = not any(v is off.invars[k] for e in off.eqns for v in e.invars)
        return untouched and written_in_any_case(on, on.invars[k])
    return True


def _zero_test(made_by: dict[Any, Any], atom: Any) -> int | None:
    """The axis a of a predicate `program_id(a) == 0`."""
    while not isinstance(atom, jaxlink.Literal) and (eqn := made_by.get(atom)) is not None:
        if eqn.primitive is lax.convert_element_type_p:
            atom = eqn.invars[0]
            continue
        if eqn.primitive is not lax.eq_p:
            return None
        a, b = eqn.invars
        source = None if isinstance(a, jaxlink.Literal) else made_by.get(a)
        zero = isinstance(b, jaxlink.Literal) and int(b.val) == 0
        if zero and source is not None and source.primitive is ops.program_id_p:
            return source.params["axis"]
        return None
    return None


def must_copy(jaxpr: Any, read: Any, written: Any, same_window: bool) -> bool:
    """Whether an aliased input has to be copied at the start: its reads must see what was there before the program.

    Arguments:
      read, written: the input's and the output's Ref variables.
      same_window: whether both see the same part of the array.
    """
    reads = [k for k, e in enumerate(jaxpr.eqns) if any(v is read for v in e.invars)]
    writes = [k for k, e in enumerate(jaxpr.eqns) if any(v is written for v in e.invars)]
    if not reads or not writes:
        return False
    return not same_window or max(reads) >= min(writes)


def same_window(a: BlockMapping, b: BlockMapping, grid: Sequence[int | None]) -> bool:
    """Whether two mappings see the same part of arrays of one shape, for every program."""
    if a.block_shape != b.block_shape or a.array.shape != b.array.shape or reads_prefetch(a) or reads_prefetch(b):
        return False
    if None in grid or math.prod(n or 0 for n in grid) > MAX_POINTS or a.indirect is not None:
        return False
    points = grid_points([n or 0 for n in grid])
    return all((x == y).all() for x, y in zip(evaluate(a, points), evaluate(b, points)))


def may_hang_over(mapping: BlockMapping) -> bool:
    """Whether some window may reach outside its array, or is cut short."""
    for b, n, size in zip(mapping.block_shape, mapping.array.shape, mapping.sizes):
        if isinstance(b, (Element, BoundedSlice)) or n < size or (size and n % size):
            return True
    return mapping.indirect is not None


@dataclasses.dataclass(frozen=True)
class Order:
    """Which programs may run at once.

    Attributes:
      groups: the programs fall into this many consecutive groups that may run in any order.
      why: for reports: why not more.
    """

    groups: int
    why: str


def order(jaxpr: Any, gm: GridMapping, declared: Sequence[str] | None, aliases: dict[int, int]) -> Order:
    """How far the grid can be split among threads.

    Arguments:
      declared: the user's dimension_semantics, one of "parallel" and "arbitrary" for each axis, or None.
    """
    total = gm.num_programs
    if total is None:
        return Order(1, "the grid is dynamic")
    if jaxlink.effects_outside(jaxpr):
        return Order(1, "the kernel prints or checks")
    grid = [n or 0 for n in gm.grid]
    n_refs = gm.num_prefetch + len(gm.block_mappings)
    scratch = jaxpr.invars[n_refs:]
    semantics = None if declared is None else [*["parallel"] * len(gm.vmapped_dims), *declared]
    best = Order(1, "no leading axis is independent")
    for axes in range(1, len(grid) + 1):
        trailing = [a - len(gm.vmapped_dims) for a in range(axes, len(grid)) if grid[a] != 1]
        groups = math.prod(grid[:axes])
        if semantics is not None and all(s == "parallel" for s in semantics[:axes]) and len(semantics) == len(grid):
            best = Order(groups, f"axes 0..{axes - 1} are declared parallel")
            continue
        if not all(starts_over(jaxpr, v, trailing) for v in scratch):
            if best.groups == 1:
                best = Order(1, "scratch is carried from program to program")
            continue
        if not _disjoint(gm, grid, groups, aliases):
            continue
        best = Order(groups, f"axes 0..{axes - 1} write different blocks")
    return best


def _disjoint(gm: GridMapping, grid: list[int], groups: int, aliases: dict[int, int]) -> bool:
    total = math.prod(grid)
    if not total or total > MAX_POINTS:
        return False
    points = grid_points(grid)
    group = np.arange(total) // (total // groups)
    aliased = {gm.num_inputs + o: i for i, o in aliases.items()}
    for k, mapping in enumerate(gm.block_mappings[gm.num_inputs :], gm.num_inputs):
        overlapping = any(isinstance(b, (Element, BoundedSlice)) for b in mapping.block_shape)
        if overlapping or reads_prefetch(mapping) or mapping.indirect is not None:
            return False
        index = [i for i, _ in mapping.indices(evaluate(mapping, points))]
        index = [np.clip(i, low, high) for i, (low, high) in zip(index, mapping.extents)]
        counts = [high + 1 for _, high in mapping.extents]
        block = np.zeros(total, np.int64)
        for i, n in zip(index, counts):
            block = block * n + i
        pairs = np.unique(np.stack([block, group]), axis=1)
        if len(np.unique(pairs[0])) != pairs.shape[1]:
            return False
        if k in aliased and not same_window(gm.block_mappings[aliased[k]], mapping, gm.grid):
            return False
    return True


def every_block_visited(mapping: BlockMapping, grid: Sequence[int | None]) -> bool:
    """Whether the windows of all programs together cover the array."""
    total = None if None in grid else math.prod(n or 0 for n in grid)
    overlapping = any(isinstance(b, (Element, BoundedSlice)) for b in mapping.block_shape)
    if not total or total > MAX_POINTS or overlapping or reads_prefetch(mapping) or mapping.indirect is not None:
        return False
    index = [i for i, _ in mapping.indices(evaluate(mapping, grid_points([n or 0 for n in grid])))]
    index = [np.clip(i, low, high) for i, (low, high) in zip(index, mapping.extents)]
    blocks = math.prod(high + 1 for _, high in mapping.extents)
    return len(np.unique(np.stack(index), axis=1).T) == blocks if index else True
