"""How an array is cut into blocks: block dimensions, BlockSpec, GridSpec.

A `BlockSpec(block_shape, index_map)` says, for each program of the grid, which part of an operand it sees. One
dimension of a block shape is

| written            | the index map gives          | the kernel sees                           |
|--------------------|------------------------------|-------------------------------------------|
| `n` or `Blocked(n)`| a block number               | n elements from `number * n`              |
| `None` or `squeezed` | an index                   | nothing: the dimension is squeezed away   |
| `Element(n, (lo, hi))` | an element offset in the array padded by lo and hi | n elements     |
| `BoundedSlice(n)`  | `pl.ds(start, size)`, size up to n | n elements, of which `size` are real |
| `Indirect(n)`      | n indices (an array or a Ref)      | the n elements at those indices           |

Source: tutorial 2.2, 3.2; the public Pallas documentation on grids and BlockSpecs.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language.foreign import refuse_foreign


def _integer(value: Any, what: str, least: int, prefix: str = "", **details: Any) -> int:
    """`value` as an int of at least `least`; `what` says which number it is ("A buffer count")."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:  # tracers raise a subclass
        if isinstance(value, jaxlink.Tracer):
            details["hint"] = (
                "block sizes are fixed when the kernel is built; under jit, pass them as static_argnames or bind them "
                "with functools.partial"
            )
        raise mistake(
            ValueError, f"{prefix}{what} must be a Python integer, not {kind_of(value)}.", **details
        ) from None
    if number < least:
        raise mistake(ValueError, f"{what} must be at least {least}, not {number}.", **details)
    return number


def _size(value: Any, what: str, **facts: Any) -> int:
    """A number of elements in a block dimension."""
    hint = "a block dimension is a positive int (pl.cdiv and // give ints), or None to squeeze it away"
    # The reference's words first: programs match on them.
    return _integer(value, what, 1, f"Unsupported block dimension type: {type(value)}. ", hint=hint, **facts)


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A block dimension of `block_size` elements; the index map gives block numbers."""

    block_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _size(self.block_size, "A block size"))


@dataclasses.dataclass(frozen=True)
class Element:
    """A block dimension of `block_size` elements; the index map gives element offsets, so blocks may overlap.

    Arguments:
      block_size: elements in the block.
      padding: (low, high) elements by which the array is taken to be longer; they read as uninitialised, and what
        is written there is dropped.
    """

    block_size: int
    padding: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _size(self.block_size, "An Element block size"))
        pads = tuple(self.padding) if isinstance(self.padding, (tuple, list)) else ()
        hint = f"pl.Element({self.block_size}, padding=(low, high)), in elements"
        if len(pads) != 2:
            raise mistake(
                ValueError, f"The padding of an Element block is a pair, not {kind_of(self.padding)}.", hint=hint
            )
        pads = tuple(_integer(p, "The padding of an Element block", 0, hint=hint) for p in pads)
        object.__setattr__(self, "padding", pads)

    def __repr__(self) -> str:
        return f"Element({self.block_size}{f', padding={self.padding}' if any(self.padding) else ''})"


@dataclasses.dataclass(frozen=True)
class BoundedSlice:
    """A block dimension of up to `block_size` elements; the index map gives `pl.ds(start, size)` in elements."""

    block_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _size(self.block_size, "A BoundedSlice size"))

    def __repr__(self) -> str:
        return f"BoundedSlice({self.block_size})"


@dataclasses.dataclass(frozen=True)
class Indirect:
    """A block dimension of `block_size` elements gathered from (inputs) or scattered to (outputs) given indices.

    The index map gives an integer array, or a scalar-prefetch Ref, of `block_size` indices for this dimension; a block
    shape can have one such dimension. Where an index repeats in an output, the last one stays.
    Source: the public documentation of `pl.Indirect`.
    """

    block_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _size(self.block_size, "An Indirect block size"))

    def __repr__(self) -> str:
        return f"Indirect({self.block_size})"


@dataclasses.dataclass(frozen=True)
class Squeezed:
    """A block dimension of size one that the kernel does not see. Write `None` or `pl.squeezed`."""


squeezed = Squeezed()


BlockDim = Squeezed | Blocked | Element | BoundedSlice | Indirect


class RevisitMode(enum.Enum):
    """When a pipeline keeps a block that the next program visits again."""

    ANY = "any"
    IMMEDIATE = "immediate"


@dataclasses.dataclass(frozen=True)
class Buffered:
    """How many blocks of an operand a pipeline holds at once (two is double buffering).

    Arguments:
      buffer_count: buffers, or (input buffers, output buffers).
      use_lookahead: fetch as far ahead as buffers are free.
      revisit: a RevisitMode, or None for the target's default.
      prefetched_count: blocks that are already there when the pipeline starts.
    """

    buffer_count: int | tuple[int, int]
    use_lookahead: bool = False
    revisit: RevisitMode | None = None
    prefetched_count: int = 0

    def __post_init__(self) -> None:
        counts = self.buffer_count if isinstance(self.buffer_count, (tuple, list)) else (self.buffer_count,)
        hint = "pl.Buffered(2), or pl.Buffered((input buffers, output buffers))"
        counts = tuple(_integer(c, "A buffer count", 1, hint=hint) for c in counts)
        if isinstance(self.buffer_count, (tuple, list)):
            if len(counts) != 2:
                raise mistake(
                    ValueError, f"A buffer count is a number or a pair, not {self.buffer_count!r}.", hint=hint
                )
            object.__setattr__(self, "buffer_count", counts)
        _integer(self.prefetched_count, "A prefetched count", 0, hint="prefetched_count=0")


class NoBlockSpec:
    """The absence of a BlockSpec: the whole array. There is one, `no_block_spec`, also after a copy or a pickle."""

    def __reduce__(self) -> str:
        return "no_block_spec"

    def __repr__(self) -> str:
        return "NoBlockSpec"


no_block_spec = NoBlockSpec()


def as_block_dim(dim: Any, number: int | None = None, shape: Sequence[Any] = ()) -> BlockDim:
    """One entry of a user's block shape as a block dimension.

    Arguments:
      dim: the entry.
      number, shape: which entry of which block shape it is, for messages.

    Raises:
      ValueError: it is traced, a float, zero or negative, or of another type.
    """
    if dim is None:
        return squeezed
    if isinstance(dim, BlockDim):
        return dim
    if type(dim) is type and dim is Squeezed:
        return squeezed
    if number is None:
        return Blocked(_size(dim, "A dimension of a block shape"))
    return Blocked(_size(dim, f"Dimension {number} of the block shape", block_shape=spelled(shape)))


def spelled(shape: Sequence[Any]) -> str:
    """A block shape as its author wrote it: `(8, None, Element(4))`."""

    def one(dim):
        return "None" if isinstance(dim, Squeezed) else str(dim.block_size) if isinstance(dim, Blocked) else repr(dim)

    return f"({', '.join(map(one, shape))}{',' if len(shape) == 1 else ''})"


def block_size(dim: Any) -> int:
    """Elements of the array that a block dimension covers."""
    return 1 if isinstance(dim, Squeezed) else dim.block_size


@dataclasses.dataclass
class BlockSpec:
    """Which block of an operand each program sees.

    Arguments:
      block_shape: one entry for each dimension of the array (see the module's table), or None for the whole array.
      index_map: a function of the grid indices (int32 scalars), then of the scalar-prefetch Refs, to one index for
        each dimension; a single index may be returned bare. Default: block 0 in every dimension.
      pipeline_mode: a `Buffered`, or None.
      memory_space: where the kernel's Ref lives, e.g. `pltpu.SMEM` or `pl.ANY`; None is the target's default.

    The index map returns block numbers, not element offsets (tutorial 2.2).
    """

    block_shape: Sequence[Any] | None = None
    index_map: Callable[..., Any] | None = None
    pipeline_mode: Buffered | None = None
    memory_space: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        refuse_foreign(block_shape=self.block_shape, pipeline_mode=self.pipeline_mode, memory_space=self.memory_space)
        if self.block_shape is not None:
            if callable(self.block_shape):
                raise mistake(
                    ValueError,
                    "The first argument of BlockSpec is the block shape, but it got a function.",
                    hint="the order is pl.BlockSpec(block_shape, index_map)",
                )
            if isinstance(self.block_shape, str) or not isinstance(self.block_shape, Iterable):
                raise mistake(
                    ValueError,
                    "The block shape of a BlockSpec is a tuple with one entry for each dimension of the array, not "
                    f"{kind_of(self.block_shape)}.",
                    hint="pl.BlockSpec((8, 128), index_map); a block of one dimension is (128,)",
                )
            self.block_shape = tuple(self.block_shape)
            for number, dim in enumerate(self.block_shape):
                as_block_dim(dim, number, self.block_shape)
        if self.index_map is not None and not callable(self.index_map):
            raise mistake(
                ValueError,
                f"The index map of a BlockSpec is a function of the grid indices, not {kind_of(self.index_map)}.",
                hint="pl.BlockSpec((8, 128), lambda i, j: (i, j)); a constant map is lambda i, j: (0, 0)",
            )
        if self.pipeline_mode is not None and not isinstance(self.pipeline_mode, Buffered):
            raise mistake(
                ValueError,
                f"The pipeline mode of a BlockSpec is a pl.Buffered or None, not {kind_of(self.pipeline_mode)}.",
                hint="a memory space is passed by keyword: pl.BlockSpec(block_shape, index_map, memory_space=…)",
            )

        try:
            hash(self.memory_space)
        except TypeError:
            raise mistake(
                TypeError,
                f"The memory space of a BlockSpec cannot be {kind_of(self.memory_space)}.",
                hint="pl.BlockSpec(…, memory_space=pltpu.VMEM), pl.ANY …",
            ) from None

    def replace(self, **changes: Any) -> BlockSpec:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class GridSpec:
    """A grid and the specs that go with it, for `pallas_call(grid_spec=…)`.

    Arguments:
      grid: an int or a tuple of ints (or traced int32 scalars); () is one program.
      in_specs, out_specs: pytree prefixes of the operands and of `out_shape`, with BlockSpecs as leaves.
      scratch_shapes: a tuple, or a dict for keyword parameters, of buffer types such as `pltpu.VMEM(shape, dtype)`.
    """

    grid: Any = ()
    in_specs: Any = no_block_spec
    out_specs: Any = no_block_spec
    scratch_shapes: Any = ()

    num_scalar_prefetch = 0

    def __post_init__(self) -> None:
        refuse_foreign(
            grid=self.grid, in_specs=self.in_specs, out_specs=self.out_specs, scratch_shapes=self.scratch_shapes
        )
