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

from palladion import jaxlink, locations
from palladion.language import ops
from palladion.language.blocks import BoundedSlice, Element
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.index_maps import MAX_POINTS, evaluate, grid_points, reads_prefetch


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
        if eqn.primitive in jaxlink.CALLED:
            inner = eqn.params[jaxlink.CALLED[eqn.primitive]]
            k = next(i for i, v in enumerate(eqn.invars) if v is var)
            return _first_use(inner, inner.invars[k]) or "other"
        return "other"
    return None


def starts_over(jaxpr: Any, var: Any, axes: Sequence[int], single: Sequence[int] = ()) -> bool:
    """Whether a scratch Ref is set up afresh whenever the program ids of `axes` are all 0.

    True for `pl.when(pl.program_id(axis) == 0)` round a full store that comes before every other use. On the axes
    `single`, which have one program, the test always holds.
    """
    made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
    for eqn in jaxpr.eqns:
        if not any(v is var for v in eqn.invars):
            continue
        if eqn.primitive is not lax.cond_p or len(eqn.params["branches"]) != 2:
            return written_in_any_case(jaxpr, var)
        tested = _zero_test(made_by, eqn.invars[0])
        if tested not in single and (tested not in axes or len(axes) != 1):
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
class Axis:
    """Whether the programs along a grid axis may run at once.

    Attributes:
      kind: "declared" or "independent" (they may); "same-block", "scratch", "effects", "dynamic", "unknown" or "inner"
        (they run in order).
      why: for reports, to be read after the axis' name.
      where: the user's `file:line (function)`, or None.
    """

    kind: str
    why: str
    where: str | None = None

    @property
    def parallel(self) -> bool:
        return self.kind in ("declared", "independent")


@dataclasses.dataclass(frozen=True)
class Order:
    """Which programs may run at once.

    Attributes:
      groups: the programs fall into this many consecutive groups that may run in any order.
      axes: one for each grid axis.
    """

    groups: int
    axes: tuple[Axis, ...]


def order(jaxpr: Any, gm: GridMapping, declared: Sequence[str] | None, aliases: dict[int, int]) -> Order:
    """How far the grid can be split among threads.

    Arguments:
      declared: the user's dimension_semantics, one of "parallel" and "arbitrary" for each axis, or None.
    """
    if gm.num_programs is None:
        return Order(1, (Axis("dynamic", "the sizes of the grid are known at run time only"),) * len(gm.grid))
    if jaxlink.effects_outside(jaxpr):
        axis = Axis("effects", "the kernel prints or checks, which is done in order", _first_effect(jaxpr))
        return Order(1, (axis,) * len(gm.grid))
    grid = [n or 0 for n in gm.grid]
    n_refs = gm.num_prefetch + len(gm.block_mappings)
    scratch = jaxpr.invars[n_refs:]
    semantics = None if declared is None else [*["parallel"] * len(gm.vmapped_dims), *declared]
    split, found = 0, []  # how many leading axes are split; what was found of each
    for axes in range(1, len(grid) + 1):
        trailing = [a - len(gm.vmapped_dims) for a in range(axes, len(grid)) if grid[a] != 1]
        if semantics is not None and all(s == "parallel" for s in semantics[:axes]) and len(semantics) == len(grid):
            found.append(Axis("declared", "declared parallel"))
            split = axes
            continue
        single = [a - len(gm.vmapped_dims) for a, n in enumerate(grid) if n == 1]
        carried = next((v for v in scratch if not starts_over(jaxpr, v, trailing, single)), None)
        if carried is not None:
            found.append(Axis("scratch", f"{_name(carried.aval.label)} is carried on", _first_line(jaxpr, carried)))
            continue
        shared = _shared(gm, grid, axes, aliases)
        found.append(shared or Axis("independent", "its programs write different blocks"))
        split = split if shared else axes
    for a in range(split):
        found[a] = found[a] if found[a].parallel else Axis("independent", "its programs write different blocks")
    for a in range(split + 1, len(grid)):
        own = _same_block(gm, grid, a)
        found[a] = own or Axis("inner", f"it runs inside axis {split}, and only leading axes are split")
    return Order(math.prod(grid[:split]), tuple(found))


def _first_effect(jaxpr: Any) -> str | None:
    return next((locations.location_of(e) for e in jaxpr.eqns if jaxlink.effects_outside(e)), None)


def _first_line(jaxpr: Any, var: Any) -> str | None:
    return next((locations.location_of(e) for e in jaxpr.eqns if any(v is var for v in e.invars)), None)


def _name(origin: str) -> str:
    """`o_ref (output 0)` -> o_ref."""
    return origin.partition(" (")[0]


def _blocks(mapping: BlockMapping, grid: list[int]) -> np.ndarray:
    """The number of the block that each program has, in the shape of the grid."""
    index = [i for i, _ in mapping.indices(evaluate(mapping, grid_points(grid)))]
    block = np.zeros(math.prod(grid), np.int64)
    for i, (low, high) in zip(index, mapping.extents):
        block = block * (high + 1) + np.clip(i, low, high)
    return block.reshape(grid)


def _unknown_blocks(mapping: BlockMapping, grid: list[int]) -> str | None:
    """Why it is not known which programs share a block of an output."""
    name = _name(mapping.origin)
    if any(isinstance(b, (Element, BoundedSlice)) for b in mapping.block_shape):
        return f"windows of {name} may overlap"
    if reads_prefetch(mapping) or mapping.indirect is not None:
        return f"the blocks of {name} are chosen by values at run time"
    total = math.prod(grid)
    return None if 0 < total <= MAX_POINTS else f"a grid of {total:,} programs is not looked through"


def _same_block(gm: GridMapping, grid: list[int], axis: int) -> Axis | None:
    """Whether neighbours along an axis write the same block of an output."""
    for mapping in gm.outputs:
        if _unknown_blocks(mapping, grid) is None and (np.diff(_blocks(mapping, grid), axis=axis) == 0).any():
            name = _name(mapping.origin)
            return Axis("same-block", f"it writes the same block of {name} as its neighbours", mapping.map_location)
    return None


def _shared(gm: GridMapping, grid: list[int], axes: int, aliases: dict[int, int]) -> Axis | None:
    """What speaks against splitting the first `axes` axes: an output block that two of the groups write."""
    total, groups = math.prod(grid), math.prod(grid[:axes])
    aliased = {gm.num_inputs + o: i for i, o in aliases.items()}
    for k, mapping in enumerate(gm.block_mappings[gm.num_inputs :], gm.num_inputs):
        name, line = _name(mapping.origin), mapping.map_location
        if (why := _unknown_blocks(mapping, grid)) is not None:
            return Axis("unknown", why, line)
        block = _blocks(mapping, grid).reshape(-1)
        pairs = np.unique(np.stack([block, np.arange(total) // (total // groups)]), axis=1)
        if len(np.unique(pairs[0])) != pairs.shape[1]:
            other = Axis("same-block", f"some of its programs write the same block of {name}", line)
            return _same_block(gm, grid, axes - 1) or other
        if k in aliased and not same_window(gm.block_mappings[aliased[k]], mapping, gm.grid):
            return Axis("unknown", f"{name} is also an input, of which a program reads other blocks", line)
    return None


def every_block_visited(mapping: BlockMapping, grid: Sequence[int | None]) -> bool:
    """Whether the windows of all programs together cover the array."""
    total = None if None in grid else math.prod(n or 0 for n in grid)
    overlapping = any(isinstance(b, (Element, BoundedSlice)) for b in mapping.block_shape)
    if not total or total > MAX_POINTS or overlapping or reads_prefetch(mapping) or mapping.indirect is not None:
        return False
    blocks = math.prod(high + 1 for _, high in mapping.extents)
    return len(np.unique(_blocks(mapping, [n or 0 for n in grid]))) == blocks
