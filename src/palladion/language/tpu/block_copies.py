"""Copies of blocks by DMA: where a block of an array lies, and the copies of static size that move what is there of it.

A DMA has a static shape, but a block at the edge of an array does not: there only the elements that exist are moved.

| block dimension                   | what exists of a block  | copies                                              |
|-----------------------------------|-------------------------|-----------------------------------------------------|
| divides the array, or is squeezed | all                     | one                                                 |
| leaves a remainder                | all, or the remainder   | one, of either size: the block number decides       |
| `Element`, `BoundedSlice`         | known at run time       | one if it is all, else one for each bit of the size |

A wait names the same copies as the start, so that it takes as many bytes off the semaphore. Unlike the block windows of
`pallas_call`, block numbers are not clamped: a block outside the array is a copy outside the array.

Not optimal: the binary pieces of a partial `Element` block are up to log2(size) copies where a machine with copies of
run-time size needs one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import frames, ops
from palladion.language.blocks import (
    BlockSpec,
    BoundedSlice,
    Element,
    Indirect,
    NoBlockSpec,
    Squeezed,
    as_block_dim,
    block_size,
    spelled,
)
from palladion.language.grid import flat_results

Index = tuple[Any, ...]  # flat results of an index map: np.int32 where constant, else traced int32 scalars


# --- logic on values that may be known while tracing ------------------------------------------------------------------
def is_known(x: Any) -> bool:
    """Whether a value is a number now, rather than at run time."""
    return not isinstance(x, jaxlink.Tracer)


def all_of(*conditions: Any) -> Any:
    """The conjunction of bools, of which some may be known now."""
    unknown = []
    for condition in conditions:
        if not is_known(condition):
            unknown.append(condition)
        elif not condition:
            return False
    return functools.reduce(lax.bitwise_and, unknown) if unknown else True


def any_of(*conditions: Any) -> Any:
    """The disjunction of bools, of which some may be known now."""
    unknown = []
    for condition in conditions:
        if not is_known(condition):
            unknown.append(condition)
        elif condition:
            return True
    return functools.reduce(lax.bitwise_or, unknown) if unknown else False


def differs(a: Index, b: Index) -> Any:
    """Whether two blocks are different ones; where only that of the later one, `b`, is known, it is a constant."""
    return any_of(*(bool(x != y) if is_known(x) else False if is_known(y) else lax.ne(x, y) for x, y in zip(a, b)))


def choose(condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
    """Trace one of two bodies, or both under a run-time condition."""
    if not is_known(condition):
        lax.cond(condition, yes, no)
    elif condition:
        yes()
    else:
        no()


# --- windows ----------------------------------------------------------------------------------------------------------
class _Piece(NamedTuple):
    """A run of elements along one dimension: where it is in the array and in the buffer, and when it is moved."""

    far: Any
    near: Any
    size: int
    condition: Any = True


class _Dim(NamedTuple):
    """One dimension of a block: whether all of it exists, it as one piece, and the pieces if not all of it does."""

    is_whole: Any
    whole: _Piece
    parts: list[_Piece]


@dataclasses.dataclass(frozen=True)
class BlockWindow:
    """How one array is cut into blocks, for copies.

    Attributes:
      block: the block dimensions.
      shape: of the array.
      index_map: the user's, or None for the first block.
      label: how messages call the operand.
      where: `file:line (name)` of the index map.
    """

    block: tuple[Any, ...]
    shape: tuple[int, ...]
    index_map: Callable[..., Any] | None
    label: str
    where: str | None

    @classmethod
    def make(cls, spec: Any, shape: Sequence[int], label: str) -> BlockWindow:
        """The window of a BlockSpec (or none: the whole array) on an array of this shape.

        Raises:
          ValueError: they do not fit. NotImplementedError: the block is `Indirect`.
        """
        spec = BlockSpec() if spec is None or isinstance(spec, NoBlockSpec) else spec
        if not isinstance(spec, BlockSpec):
            hint = "in_specs and out_specs hold a pl.BlockSpec for each operand"
            raise mistake(TypeError, f"The spec of {label} is {kind_of(spec)}.", hint=hint)
        shape = tuple(shape)
        block = tuple(as_block_dim(b) for b in (shape if spec.block_shape is None else spec.block_shape))
        if len(block) != len(shape):
            raise mistake(
                ValueError,
                f"The block shape of {label} has {count_of(len(block), 'dimension')}, but its Ref has {len(shape)}.",
                block_shape=spelled(block),
                hint="give one entry for each dimension of the array; None squeezes a dimension away",
            )
        if any(isinstance(b, Indirect) for b in block):
            headline = f"The block of {label} is {spelled(block)}: a pipeline cannot gather with pl.Indirect."
            raise mistake(NotImplementedError, headline, hint="give the operand to pl.pallas_call with that BlockSpec")
        index_map = spec.index_map if spec.block_shape is not None else None
        return cls(block, shape, index_map, label, None if index_map is None else locations.defined_at(index_map))

    @property
    def ref_shape(self) -> tuple[int, ...]:
        """The shape of a block as the body sees it: without squeezed dimensions."""
        return tuple(block_size(b) for b in self.block if not isinstance(b, Squeezed))

    @property
    def is_all(self) -> bool:
        """Whether there is just one block, the array."""
        dims = zip(self.block, self.shape)
        return all(not isinstance(b, (Squeezed, Element, BoundedSlice)) and b.block_size == n for b, n in dims)

    @property
    def may_be_partial(self) -> bool:
        """Whether there are blocks of which only a part exists."""
        return any(isinstance(b, (Element, BoundedSlice)) or n % block_size(b) for b, n in zip(self.block, self.shape))

    def index(self, ids: Sequence[Any]) -> Index:
        """The index map's results at a grid point.

        Raises:
          TypeError: the map takes another number of indices. ValueError: it does not give one for each dimension.
        """
        what = f"The index map of {self.label}"
        if self.index_map is None:
            pairs = [(0, b.block_size) if isinstance(b, BoundedSlice) else (0,) for b in self.block]
            return tuple(np.int32(x) for pair in pairs for x in pair)
        frames.check_arity(
            self.index_map,
            len(ids),
            lambda takes: explain(
                f"{what} takes {takes}, but it gets {count_of(len(ids), 'grid index', 'grid indices')}.",
                where=self.where,
                hint="an index map has one parameter for each axis of the pipeline's grid",
            ),
        )
        flat = flat_results(self.index_map(*ids), self.block, what, self.where)
        return tuple(x if isinstance(x, jaxlink.Tracer) else np.int32(x) for x in flat)

    # --- the copies of a block ----------------------------------------------------------------------------------------
    def slices(self, index: Index) -> tuple[Any, ...]:
        """The block as `pl.ds` for each dimension, a number for a squeezed one: as if all of it existed."""
        return self._slices([dim.whole for dim in self._dims(index)])

    def each(self, index: Index, ref: Any, buffer: Any, act: Callable[[Any, Any], None]) -> None:
        """Call `act(view of the array, view of the buffer)` for each copy that moves a block, under its condition.

        Arguments:
          index: which block.
          ref: the Ref of the array, or a view.
          buffer: a Ref of `ref_shape`.
          act: starts the copy, or waits for it.
        """
        dims = self._dims(index)

        def visit(pieces):
            if len(pieces) == len(dims):
                near = [p for p, b in zip(pieces, self.block) if not isinstance(b, Squeezed)]
                act(ref.at[self._slices(pieces)], buffer.at[tuple(jaxlink.ds(p.near, p.size) for p in near)])
                return
            dim = dims[len(pieces)]

            def partly():
                for part in dim.parts:
                    ops.when(part.condition)(functools.partial(visit, [*pieces, part]))

            choose(dim.is_whole, functools.partial(visit, [*pieces, dim.whole]), partly)

        visit([])

    def _slices(self, pieces: Sequence[_Piece]) -> tuple[Any, ...]:
        squeezed = [isinstance(b, Squeezed) for b in self.block]
        return tuple(p.far if s else jaxlink.ds(p.far, p.size) for p, s in zip(pieces, squeezed))

    def _dims(self, index: Index) -> list[_Dim]:
        values = iter(index)
        return [self._dim(d, next(values), values) for d in range(len(self.block))]

    def _dim(self, d: int, at: Any, more: Iterator[Any]) -> _Dim:
        b, extent, size = self.block[d], self.shape[d], block_size(self.block[d])
        if isinstance(b, BoundedSlice):
            return _bits(at, 0, _clamp(next(more), 0, min(size, extent)), size, extent)
        if isinstance(b, Element):
            start = at - np.int32(b.padding[0])
            first, end = _clamp(start, 0, extent), _clamp(start + np.int32(size), 0, extent)
            return _bits(first, first - start, end - first, size, extent)
        whole = _Piece(at if isinstance(b, Squeezed) else at * np.int32(size), 0, size)
        if not extent % size:
            return _Dim(True, whole, [])
        if extent < size:
            is_whole = False
        else:
            is_whole = at != extent // size if is_known(at) else lax.ne(at, np.int32(extent // size))
        return _Dim(is_whole, whole, [whole._replace(size=extent % size)])


def _bits(far: Any, near: Any, count: Any, most: int, extent: int) -> _Dim:
    """A dimension of which `count` elements exist, known at run time: all, or a piece for each bit of `count`."""
    parts = []
    for bit in reversed(range(min(most, extent).bit_length())):
        size = np.int32(1 << bit)
        before = count & (-2 * size)  # what the larger pieces have moved
        parts.append(_Piece(far + before, near + before, 1 << bit, (count & size) != 0))
    return _Dim(False if most > extent else count == np.int32(most), _Piece(far, 0, most), parts)


def _clamp(x: Any, low: int, high: int) -> Any:
    if is_known(x):
        return np.clip(x, np.int32(low), np.int32(high))
    return lax.clamp(np.int32(low), x, np.int32(high))


class BlockCopies(NamedTuple):
    """The copies that move one block: started together, waited for together.

    Attributes:
      window, index: which block.
      ref, buffer: the Ref of the array, and the block's own.
      make: makes a copy of a view of each.
    """

    window: BlockWindow
    index: Index
    ref: Any
    buffer: Any
    make: Callable[[Any, Any], Any]

    def start(self) -> None:
        """Start them."""
        self.window.each(self.index, self.ref, self.buffer, lambda far, near: self.make(far, near).start())

    def wait(self) -> None:
        """Wait for them, or for as many bytes."""
        self.window.each(self.index, self.ref, self.buffer, lambda far, near: self.make(far, near).wait())
