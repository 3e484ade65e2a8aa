"""What index maps ask for over a whole grid, worked out in NumPy before anything runs.

An index map that reads no scalar-prefetch Ref is a pure function of the grid indices, nearly always a few integer
operations, so `evaluate` runs its jaxpr on arrays of all grid points at once. Executors take window tables from it;
`out_of_range` finds the operands whose maps ask for blocks outside the array. By the specification such an index is
clamped (tutorial 2.2, the map that returns element offsets), so it is a warning, not an error.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import PalladionWarning, count_of, explain
from palladion.language.blocks import BoundedSlice, Element, Indirect
from palladion.language.grid import BlockMapping, GridMapping

MAX_POINTS = 1 << 20  # a larger grid is looked at in its corners and along its axes only


def grid_points(grid: Sequence[int]) -> np.ndarray:
    """All grid points in program order, as int32 [axes, programs]."""
    return np.indices(tuple(grid), dtype=np.int32).reshape(len(grid), math.prod(grid))


def sample_points(grid: Sequence[int]) -> np.ndarray:
    """Grid points that show what affine index maps do: all of a small grid, else its corners and its axes' lines."""
    if math.prod(grid) <= MAX_POINTS:
        return grid_points(grid)
    corners = np.array(list(itertools.product(*({0, n - 1} for n in grid))), np.int32).T
    lines = []
    for axis, n in enumerate(grid):
        line = np.zeros((len(grid), min(n, MAX_POINTS)), np.int32)
        line[axis] = np.unique(np.linspace(0, n - 1, line.shape[1]).astype(np.int32))[: line.shape[1]]
        lines.append(line)
    return np.concatenate([corners, *lines], axis=1)


def reads_prefetch(mapping: BlockMapping) -> bool:
    """Whether the index map depends on scalar-prefetch values."""
    return bool(jaxlink.read_vars(mapping.index_map))


def evaluate(mapping: BlockMapping, points: np.ndarray, prefetch: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
    """The index map's flat results at the given grid points.

    Arguments:
      mapping: one operand's mapping.
      points: int32 [axes, points].
      prefetch: values of the scalar-prefetch operands; needed when the map reads them.

    Returns:
      for each flat result, an int array [points] ([points, indices] for an Indirect dimension).
    """
    n, missing = points.shape[1], len(mapping.index_map.invars) - len(points) - len(prefetch)
    operands = [*prefetch, *[None] * missing]  # None: not read, or the caller would have passed it
    try:
        if any(isinstance(b, Indirect) for b in mapping.block_shape):
            raise _NoRule
        results = _run(mapping.index_map, [*points, *operands])
    except _NoRule:
        results = _evaluate_with_jax(mapping, points, operands)
    return [np.broadcast_to(r, (n, *np.shape(r)[1:])).astype(np.int64) for r in results]


class _NoRule(Exception):
    """An equation of an index map is outside the NumPy table."""


def _run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))

    def read(atom):
        return np.asarray(atom.val) if isinstance(atom, jaxlink.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        if eqn.primitive is jaxlink.jit_p:
            env.update(zip(eqn.outvars, _run(eqn.params["jaxpr"], values)))
        elif (rule := _NUMPY.get(eqn.primitive)) is not None:
            env[eqn.outvars[0]] = rule(eqn.params, *values)
        else:
            raise _NoRule
    return [read(v) for v in jaxpr.outvars]


def _evaluate_with_jax(mapping, points, prefetch) -> list[Any]:
    """For maps that use an operation outside the table: one vmap over the points."""
    from palladion.executors import discharge  # the run-time meaning of Refs lives with the executors

    with jax.ensure_compile_time_eval():
        values = [None if p is None else jax.numpy.asarray(p) for p in prefetch]
        return jax.vmap(lambda *ids: discharge(mapping.index_map, [*ids, *values])[0])(*points)


def _truncated_div(_, a, b):
    by = np.where(b == 0, 1, b)
    quotient = np.sign(a) * np.sign(by) * (np.abs(a) // np.abs(by))
    return np.where(b == 0, -1, quotient).astype(np.result_type(a, b))  # by zero: what XLA gives


def _select(_, which, *cases):
    return np.choose(np.asarray(which).astype(np.int64), cases)


_NUMPY: dict[Any, Callable] = {
    lax.add_p: lambda _, a, b: a + b,
    lax.sub_p: lambda _, a, b: a - b,
    lax.mul_p: lambda _, a, b: a * b,
    lax.neg_p: lambda _, a: -a,
    lax.sign_p: lambda _, a: np.sign(a),
    lax.div_p: _truncated_div,
    lax.rem_p: lambda _, a, b: np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))),
    lax.max_p: lambda _, a, b: np.maximum(a, b),
    lax.min_p: lambda _, a, b: np.minimum(a, b),
    lax.clamp_p: lambda _, low, x, high: np.clip(x, low, high),
    lax.and_p: lambda _, a, b: a & b,
    lax.or_p: lambda _, a, b: a | b,
    lax.xor_p: lambda _, a, b: a ^ b,
    lax.not_p: lambda _, a: ~a,
    lax.eq_p: lambda _, a, b: a == b,
    lax.ne_p: lambda _, a, b: a != b,
    lax.lt_p: lambda _, a, b: a < b,
    lax.le_p: lambda _, a, b: a <= b,
    lax.gt_p: lambda _, a, b: a > b,
    lax.ge_p: lambda _, a, b: a >= b,
    lax.select_n_p: _select,
    lax.convert_element_type_p: lambda params, a: np.asarray(a).astype(params["new_dtype"]),
    lax.shift_right_arithmetic_p: lambda _, a, b: a >> b,
    lax.shift_left_p: lambda _, a, b: a << b,
}


@dataclasses.dataclass(frozen=True)
class OutOfRange:
    """An index map that asks for a block outside the array: the first grid point where it does.

    Attributes:
      mapping, dimension: which operand, and which of its dimensions.
      index, extent: what is asked for, and the lowest and highest index there are.
      point: the grid point.
      hint: the likely fix.
    """

    mapping: BlockMapping
    dimension: int
    index: int
    extent: tuple[int, int]
    point: tuple[int, ...]
    hint: str

    def message(self) -> str:
        """One line: which operand asks for which block outside which range, at which grid point."""
        low, high = self.extent
        return (
            f"The index map of {self.mapping.origin} asks for block {self.index} in dimension {self.dimension} at grid "
            f"point {self.point}, outside the valid range {low}..{high}; it is clamped."
        )


def out_of_range(grid_mapping: GridMapping, prefetch: Sequence[np.ndarray] | None = None) -> list[OutOfRange]:
    """The operands whose index maps leave their range somewhere on a static grid (one entry for an operand)."""
    if grid_mapping.num_programs in (None, 0):
        return []
    points = sample_points([n or 0 for n in grid_mapping.grid])
    found = []
    for mapping in grid_mapping.block_mappings:
        if mapping.is_default_map or (reads_prefetch(mapping) and prefetch is None):
            continue
        flat = evaluate(mapping, points, prefetch or ())
        for d, ((index, _), extent) in enumerate(zip(mapping.indices(flat), mapping.extents)):
            if not mapping.array.shape[d]:
                continue
            bad = (index < extent[0]) | (index > extent[1])
            outside = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
            if outside.size:
                first = outside[0]
                asked = index[first][bad[first]].ravel() if bad.ndim > 1 else index[first : first + 1]
                point = tuple(int(i) for i in grid_mapping.kernel_ids(list(points[:, first])))
                likely = hint(mapping, d, index, grid_mapping.kernel_ids(list(points)))
                found.append(OutOfRange(mapping, d, int(asked[0]), extent, point, likely))
                break
    return found


def hint(mapping: BlockMapping, d: int, index: np.ndarray, ids: Sequence[np.ndarray]) -> str:
    """The likely fix, from what the index map gives for dimension d at all grid points (`ids`: for each axis)."""
    block, size, (low, high) = mapping.block_shape[d], mapping.sizes[d], mapping.extents[d]
    if isinstance(block, (Element, BoundedSlice, Indirect)):
        return f"{block!r} takes element offsets, here {low}..{high}: keep them there, or run fewer programs"
    axis = next((a for a, i in enumerate(ids) if np.array_equal(i, index)), None)
    if axis is not None:
        n = mapping.array.shape[d]
        return (
            f"the grid has {ids[axis].max() + 1} programs along axis {axis}, but the array has "
            f"{count_of(high + 1, 'block')} in this dimension: pl.cdiv({n}, {size}) programs cover it"
        )
    begins = f"block n begins at element n * {size}"
    if size > 1 and not (index % size).any():
        return f"return block numbers, not element offsets: {begins} (pl.Element takes offsets)"
    return f"return a block number in {low}..{high} for every program ({begins}), or run fewer programs"


def warn_out_of_range(grid_mapping: GridMapping) -> None:
    """Warn, as the specification clamps silently (tutorial 2.2)."""
    for item in out_of_range(grid_mapping):
        text = explain(item.message(), where=item.mapping.map_location, hint=item.hint)
        warnings.warn(text, PalladionWarning, skip_file_prefixes=jaxlink.LIBRARY_DIRS)
