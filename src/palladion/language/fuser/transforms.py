"""BlockIndexTransform: which block of a value one program needs, in terms of the blocks at the roots.

The passes give every value of a fusion a block. Its index is a function of the indices at the *roots*, the blocks
that the caller chose (outputs when pulling, inputs when pushing), so that an index map is `transform ∘ root maps`.
Block shapes are tuples of ints, None (squeezed), `Element` and `BoundedSlice`.

When two paths ask for blocks of one value, the blocks must be the same. Shapes are compared; index functions are
compared by the operations that they trace to, which never takes unlike functions for equal. A block that is as long
as its dimension can only be number 0, which is put in place of whatever its path computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.language.blocks import Blocked, BlockSpec, BoundedSlice, Buffered, Squeezed, as_block_dim
from palladion.language.blocks import block_size as _block_size
from palladion.language.fuser.graph import needed


class RootIndices(tuple):
    """The block indices at one root, for one program, and what else an index may depend on.

    Attributes:
      scalars: a function of a variable of the graph, to its run-time value.
      args: the arguments of the index map; None while index functions are compared.
    """

    scalars: Callable[[Any], Any]
    args: tuple[Any, ...] | None

    def __new__(cls, indices: Sequence[Any], scalars: Callable[[Any], Any], args: Any = None) -> RootIndices:
        self = super().__new__(cls, indices)
        self.scalars, self.args = scalars, args
        return self


def _no_indices(*block_indices: Any) -> None:
    """The transform of a value that has no blocks."""


@dataclasses.dataclass
class BlockIndexTransform:
    """A block shape, and how block indices come from those at the roots of a fusion.

    Arguments:
      block_shape: one entry for each dimension: an int, None for a squeezed one, `pl.Element`, `pl.BoundedSlice`; or
        None for no blocks.
      block_index_transform: a function of one tuple of block indices for each root, to the tuple of this value's.
      memory_space: where the block lives, or None.
      pipeline_mode: a `pl.Buffered`, or None.
    """

    block_shape: Sequence[Any] | None
    block_index_transform: Callable[..., Any] = _no_indices
    memory_space: Any | None = dataclasses.field(default=None, kw_only=True)
    pipeline_mode: Buffered | None = dataclasses.field(default=None, kw_only=True)

    def replace(self, **changes: Any) -> BlockIndexTransform:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


def dims_of(block_shape: Sequence[Any]) -> tuple[Any, ...]:
    """A block shape with plain ints for `Blocked` and None for `Squeezed`."""

    def one(dim):
        match as_block_dim(dim):
            case Blocked(n):
                return n
            case Squeezed():
                return None
            case other:
                return other

    return tuple(one(d) for d in block_shape)


def size_of(dim: Any) -> int:
    """Elements that a block dimension covers."""
    return _block_size(as_block_dim(dim))


def sizes(dims: Sequence[Any]) -> tuple[int, ...]:
    """Elements along each dimension of a block, 1 for squeezed ones."""
    return tuple(size_of(d) for d in dims)


def ref_shape(dims: Sequence[Any]) -> tuple[int, ...]:
    """The shape that a kernel sees: without squeezed dimensions."""
    return tuple(size_of(d) for d in dims if d is not None)


def block(
    like: BlockIndexTransform, dims: Sequence[Any], pick: Callable[[tuple, RootIndices], Any]
) -> BlockIndexTransform:
    """A block whose indices are computed from those of the block `like`.

    Arguments:
      like: where memory space and pipeline mode come from.
      dims: the block's dimensions.
      pick: a function of the indices of `like` and of the first root, to the indices.
    """

    def transform(*roots):
        return tuple(pick(tuple(like.block_index_transform(*roots)), roots[0]))

    return like.replace(block_shape=tuple(dims), block_index_transform=transform)


SCALAR = BlockIndexTransform((), lambda *roots: ())


def canonical(found: BlockIndexTransform, shape: Sequence[int]) -> BlockIndexTransform:
    """The same block, number 0 where it covers a whole dimension."""
    dims = dims_of(found.block_shape or ())
    if not dims:
        return SCALAR
    whole = [n == 1 if d is None else isinstance(d, int) and d >= n for d, n in zip(dims, shape, strict=True)]

    def transform(*roots):
        return tuple(0 if w else i for w, i in zip(whole, found.block_index_transform(*roots), strict=True))

    return found.replace(block_shape=dims, block_index_transform=transform)


def merge(
    a: BlockIndexTransform, b: BlockIndexTransform, same: Callable[[Any, Any], bool]
) -> BlockIndexTransform | None:
    """The block that serves both, or None where they differ.

    Arguments:
      a, b: canonical.
      same: whether two index functions are equal.
    """
    assert a.block_shape is not None and b.block_shape is not None
    if a is b or not a.block_shape:
        return a
    if [1 if d is None else d for d in a.block_shape] != [1 if d is None else d for d in b.block_shape]:
        return None
    if a.memory_space != b.memory_space or a.pipeline_mode != b.pipeline_mode or not same(a, b):
        return None
    # A dimension of one element may be squeezed in one and not in the other: the kernel reshapes.
    return a.replace(block_shape=tuple(1 if x != y else x for x, y in zip(a.block_shape, b.block_shape)))


# --- index maps that can be compared --------------------------------------------------------------------------------
class Unknowable(Exception):
    """An index function that is being compared depends on what the comparison has no name for."""


@dataclasses.dataclass(frozen=True)
class Base:
    """An index map that a user wrote, and the dimensions of its block."""

    index_map: Callable[..., Any]
    dims: tuple[Any, ...]

    @property
    def arity(self) -> int:
        """How many integers its result is."""
        return sum(1 + isinstance(d, BoundedSlice) for d in self.dims)

    def indices(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Its result, made of this many integers."""
        left = iter(flat)
        return tuple(
            jaxlink.ds(next(left), next(left)) if isinstance(d, BoundedSlice) else next(left) for d in self.dims
        )


@dataclasses.dataclass(frozen=True, eq=False)
class IndexMap:
    """An index map that the fuser made, from index maps that users wrote.

    Attributes:
      function: of grid indices and scalar-prefetch operands.
      bases: the users' index maps that it depends on.
      of_bases: the same function, of the results of these.
    """

    function: Callable[..., tuple]
    bases: tuple[Base, ...]
    of_bases: Callable[[Sequence[tuple]], tuple]

    def __call__(self, *args: Any) -> tuple:
        return self.function(*args)


def program_text(function: Callable[..., Any], counts: Sequence[int], scalars: Sequence[Any]) -> str:
    """The operations that an index function traces to, as text that is equal for equal operations.

    Arguments:
      function: of (one sequence of integers for each of `counts`, the values of `scalars`), to indices.
      scalars: variables.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)

    def flat(integers, scalars):
        return [
            x for i in function(integers, scalars) for x in ([i.start, i.size] if isinstance(i, jaxlink.Slice) else [i])
        ]

    values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in scalars]
    jaxpr = jax.make_jaxpr(flat)([[index] * n for n in counts], values)
    return str(jaxpr.replace(eqns=needed(jaxpr.eqns, jaxpr.outvars)))


def root_of(spec: BlockSpec, shape: Sequence[int], what: str) -> tuple[tuple[Any, ...], Callable[..., tuple]]:
    """The block dimensions of a BlockSpec for an array, and its index map as a function to a tuple.

    Raises:
      ValueError: the block has another rank than the array.
    """
    dims = tuple(shape) if spec.block_shape is None else dims_of(spec.block_shape)
    if len(dims) != len(shape):
        raise ValueError(
            f"The block shape {dims} of {what} has {len(dims)} dimension(s), but its shape is {tuple(shape)}."
        )

    def indices(*args):
        if spec.index_map is None:
            return tuple(jaxlink.ds(0, d.block_size) if isinstance(d, BoundedSlice) else 0 for d in dims)
        out = spec.index_map(*args)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    return dims, indices
