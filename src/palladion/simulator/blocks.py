"""How an operand is cut into blocks, prepared once a call for the pipelines of simulated machines.

A `Plan` turns what an index map gives into places in the array and in the block; blocks over the edge of the array,
squeezed dimensions and index arrays included. Source: tutorial 2.2 (block numbers), 3.2 (ragged edges).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.language.blocks import BoundedSlice, Buffered, Element, Indirect, Squeezed
from palladion.language.grid import BlockMapping
from palladion.language.index_maps import hint
from palladion.simulator.code import Compiler
from palladion.simulator.memory import Buffer

KEPT = 1 << 16  # places of blocks that a plan remembers
Place = tuple[Any, ...]  # one slice or int for each dimension


def _clip(x: Any, low: Any, high: Any) -> Any:
    if isinstance(x, np.ndarray) and x.ndim:
        return np.clip(x, low, high)
    return min(max(int(x), low), high)


class Plan:
    """What is known of an operand's windows before a call.

    Attributes:
      mapping: how the operand is cut. count: buffers in VMEM.
      number: its place among the inputs or outputs. is_output: whether it is an output.
      is_read: whether blocks are copied in: of inputs, and of outputs that are an input's memory (fault kind 15).
      outside: of the indices met so far, those that lie outside the array: in which dimension, and what is asked for.
    """

    def __init__(
        self, mapping: BlockMapping, number: int, is_output: bool, compiler: Compiler, aliased: bool = False
    ) -> None:
        self.mapping, self.number, self.is_output = mapping, number, is_output
        self.is_read = aliased or not is_output
        count = mapping.pipeline_mode.buffer_count if isinstance(mapping.pipeline_mode, Buffered) else 2
        self.count: int = count[int(is_output)] if isinstance(count, tuple) else count
        self._at: dict[tuple[Any, ...], tuple[Place, Place, bool]] = {}
        self.outside: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.index_map = compiler.code(mapping.index_map)
        self.picks = self._picks(mapping.index_map)
        self.squeezed = (*(0 if isinstance(b, Squeezed) else slice(None) for b in mapping.block_shape), ...)
        self.has_squeezed = any(isinstance(b, Squeezed) for b in mapping.block_shape)

    def _picks(self, jaxpr: Any) -> list[Any] | None:
        """Where the index map only picks grid indices and constants: how."""
        if jaxpr.eqns:
            return None
        place = {v: k for k, v in enumerate(jaxpr.invars)}
        result = []
        for v in jaxpr.outvars:
            if isinstance(v, jaxlink.Literal):
                result.append((None, int(v.val)))
            elif v in place:
                result.append((place[v], 0))
            else:
                return None
        return result

    def indices(self, agent: Any, ids: Sequence[int], prefetch: Sequence[Any]) -> tuple[Any, ...]:
        """The index map's results at a grid point."""
        if self.picks is not None:
            return tuple([value if k is None else ids[k] for k, value in self.picks])
        flat = self.index_map(agent, [*map(np.int32, ids), *prefetch])
        return tuple([int(x) if np.ndim(x) == 0 else tuple(map(int, x)) for x in flat])

    def at(self, flat: tuple[Any, ...]) -> tuple[Place, Place, bool]:
        """`places` of an index; kept from one program, and one call, to the next."""
        found = self._at.get(flat)
        if found is None:
            if len(self._at) >= KEPT:
                self._at.clear()
            found = self._at[flat] = self.places(self.starts(flat))
            if bad := self._outside(flat):
                self.outside[flat] = bad
        return found

    def _outside(self, flat: tuple[Any, ...]) -> tuple[int, int] | None:
        """None, or the first dimension in which an index leaves the array, and that index."""
        pairs = self.mapping.indices(flat)
        for d, ((index, size), (low, high)) in enumerate(zip(pairs, self.mapping.extents)):
            asked = index if isinstance(index, tuple) else (index,)
            wrong = next((i for i in asked if not low <= i <= high), None)
            if wrong is not None and size != 0 and self.mapping.array.shape[d]:
                return d, wrong
        return None

    @property
    def side_by_side(self) -> bool:
        """Whether the array is cut into blocks that do not overlap, numbered along each dimension."""
        return not any(isinstance(b, (Element, BoundedSlice, Indirect)) for b in self.mapping.block_shape)

    @property
    def divides(self) -> bool:
        """Whether the array is cut into blocks that all lie inside it."""
        pairs = zip(self.mapping.array.shape, self.mapping.sizes)
        return self.side_by_side and all(size and n % size == 0 for n, size in pairs)

    def blocks(self) -> list[tuple[int, ...]]:
        """Every index that the index map may give, where blocks lie side by side."""
        return list(itertools.product(*[range(high + 1) for _, high in self.mapping.extents]))

    def starts(self, flat: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Where the window begins in each dimension, clamped into the array as the reference says."""
        flat = [np.asarray(x) if isinstance(x, tuple) else x for x in flat]
        return self.mapping.window(self.mapping.indices(flat), _clip)

    def places(self, starts: Sequence[tuple[Any, Any]]) -> tuple[Place, Place, bool]:
        """The window in the array, its part of the block (squeezed dimensions included), and whether that is all."""
        outside: list[Any] = []
        inside: list[Any] = []
        whole = True
        for (start, size), b, n, extent in zip(
            starts, self.mapping.block_shape, self.mapping.array.shape, self.mapping.sizes
        ):
            if isinstance(b, Indirect):
                outside.append(start)
                inside.append(slice(None))
                continue
            extent_here = extent if size is None else min(int(size), extent)
            first, last = max(start, 0), min(start + extent_here, n)
            last = max(first, last)
            whole = whole and first == start and last == start + extent
            outside.append(slice(first, last))
            inside.append(slice(first - start, last - start))
        return tuple(outside), tuple(inside), whole


def refuse_outside(plan: Plan, place: Any, vmapped: int, flat: tuple[Any, ...]) -> None:
    """The index map asks for a block that is not there.

    Arguments:
      place: what runs the program: has `machine`, `sizes` of the kernel's grid and `when()`.
      vmapped: how many grid axes vmap has put before the kernel's.

    Raises:
      KernelFinding: always.
    """
    machine, mapping = place.machine, plan.mapping
    d, index = plan.outside[flat]
    low, high = mapping.extents[d]
    unit = "element" if isinstance(mapping.block_shape[d], (Element, BoundedSlice, Indirect)) else "block"
    axis = plan.picks[d][0] if plan.picks is not None and len(plan.picks) == len(mapping.block_shape) else None
    axis = None if axis is None else axis - vmapped
    index_of_all = np.array([index])
    ids = [np.array([], int)] * len(place.sizes)
    if axis is not None and axis >= 0:
        index_of_all = ids[axis] = np.arange(place.sizes[axis])
    machine.found(
        "out-of-bounds",
        f"Out of bounds block: the index map of {mapping.origin} asks for {unit} {index} in dimension {d}, and "
        f"there are the {unit}s {low}..{high}.",
        where=mapping.map_location,
        when=place.when(),
        operand=mapping.origin,
        hint=hint(mapping, d, index_of_all, ids),
    )


class InPlace:
    """An operand that stays where it is: each program sees its block of it (after vmap, its element of the batch).

    Arguments:
      vmapped: how many grid axes vmap has put before the kernel's.

    Attributes:
      view: that block, in the program that runs.
    """

    def __init__(self, plan: Plan, whole: Buffer, key: Any, vmapped: int = 0) -> None:
        self.plan, self.whole, self.vmapped = plan, whole, vmapped
        self.view = Buffer(whole.data, whole.label, whole.space, whole.place, key)

    def enter(self, agent: Any, ids: tuple[int, ...], prefetch: Sequence[Any]) -> None:
        """Take the block of a grid point."""
        plan = self.plan
        flat = plan.indices(agent, ids, prefetch)
        outside = plan.at(flat)[0]
        if flat in plan.outside:
            refuse_outside(plan, agent.place, self.vmapped, flat)
        index = [o.start if all_of == 0 else o for o, all_of in zip(outside, plan.squeezed)]
        self.view.lie_in(self.whole, tuple(index))
