"""GridMapping: what a kernel call knows about its grid and each operand after tracing.

A `BlockMapping` is a `BlockSpec` made concrete for one array: its index map is a jaxpr. Mappings are frozen and
hashable, for they are parameters of the `pallas_call` equation. Executors read windows off them:

    block_mapping.indices(ids, prefetch)   the index map's results, one (index, size) pair a dimension
    block_mapping.window(indices)          clamped element starts (and sizes), as the reference text says

Source: tutorial 2.2 (block numbers, clamping), 3.2 (ragged edges), 5.2 (squeezed batch dimension).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import explain
from palladion.language import frames
from palladion.language.blocks import (
    BlockSpec,
    BoundedSlice,
    Element,
    NoBlockSpec,
    Squeezed,
    as_block_dim,
    block_size,
)
from palladion.language.refs import KernelRef, MemorySpace


@dataclasses.dataclass(frozen=True)
class BlockMapping:
    """How one operand is cut into blocks.

    Attributes:
      block_shape: block dimensions (`Squeezed()`, `Blocked(n)`, `Element(n)`, `BoundedSlice(n)`).
      index_map: a jaxpr from int32 grid indices, then scalar-prefetch Refs, to int32 results: one for each
        dimension, two (start, size) for a `BoundedSlice`.
      array: the operand's array type (`jax.ShapeDtypeStruct`).
      memory_space: where the kernel's Ref lives.
      pipeline_mode: a `Buffered`, or None.
      origin: how messages call the operand, e.g. "input 0 (x_ref)".
      map_location: `name at file:line` of the index map, or None for the default one.
    """

    block_shape: tuple[Any, ...]
    index_map: Any
    array: jax.ShapeDtypeStruct
    memory_space: Any
    pipeline_mode: Any = None
    origin: str = "an operand"
    map_location: str | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the array that a block covers, for each dimension."""
        return tuple(block_size(b) for b in self.block_shape)

    @property
    def ref_shape(self) -> tuple[int, ...]:
        """The shape of the kernel's Ref: without squeezed dimensions."""
        return tuple(block_size(b) for b in self.block_shape if not isinstance(b, Squeezed))

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The squeezed dimensions."""
        return tuple(d for d, b in enumerate(self.block_shape) if isinstance(b, Squeezed))

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(lowest, highest) index that the index map may give in each dimension; the highest is inclusive."""
        result = []
        for b, n in zip(self.block_shape, self.array.shape):
            if isinstance(b, Element):
                result.append((0, max(n + sum(b.padding) - 1, 0)))
            elif isinstance(b, (Squeezed, BoundedSlice)):
                result.append((0, max(n - 1, 0)))
            else:
                result.append((0, max(-(-n // b.block_size) - 1, 0) if b.block_size else 0))
        return tuple(result)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, as the kernel sees it."""
        bits = getattr(jnp.dtype(self.array.dtype), "itemsize", 4) * 8
        return math.prod(self.ref_shape) * bits // 8

    @property
    def covers_array(self) -> bool:
        """Whether the block is the whole array, so that its only window starts at 0."""
        return all(
            not isinstance(b, (Element, BoundedSlice)) and s == n
            for b, s, n in zip(self.block_shape, self.sizes, self.array.shape)
        )

    @property
    def is_default_map(self) -> bool:
        return self.map_location is None

    @property
    def results_per_dim(self) -> tuple[int, ...]:
        """How many flat results the index map gives for each dimension: two for a BoundedSlice, else one."""
        return tuple(2 if isinstance(b, BoundedSlice) else 1 for b in self.block_shape)

    def indices(self, flat: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The index map's flat results as one (index, size) pair a dimension; size is None but for BoundedSlice."""
        results = iter(flat)
        return [(next(results), next(results) if isinstance(b, BoundedSlice) else None) for b in self.block_shape]

    def window(self, indices: Sequence[tuple[Any, Any]], clip: Callable = jnp.clip) -> list[tuple[Any, Any]]:
        """Element (start, size or None) of the window in each dimension; indices past the end are clamped.

        Starts are relative to the array, so negative inside an Element's low padding.
        """
        result = []
        for (index, size), b, (low, high) in zip(indices, self.block_shape, self.extents):
            index = clip(index, low, high)
            if isinstance(b, Element):
                result.append((index - b.padding[0], None))
            elif isinstance(b, BoundedSlice):
                result.append((index, clip(size, 0, b.block_size)))
            elif isinstance(b, Squeezed):
                result.append((index, None))
            else:
                result.append((index * b.block_size, None))
        return result

    def ref_aval(self) -> KernelRef:
        """The abstract Ref that the kernel gets."""
        return KernelRef(jaxlink.ShapedArray(self.ref_shape, self.array.dtype), self.memory_space, label=self.origin)

    def __repr__(self) -> str:
        return f"BlockMapping(block_shape={self.block_shape}, memory_space={self.memory_space})"


@dataclasses.dataclass(frozen=True)
class GridMapping:
    """What `pallas_call` knows about each operand after tracing.

    Attributes:
      grid: the number of programs along each axis; None for an axis whose size is an operand (a dynamic grid).
      block_mappings: of the inputs, then of the outputs.
      prefetch_mappings: of the scalar-prefetch operands (whole arrays).
      num_inputs: how many of `block_mappings` are inputs.
      vmapped_dims: grid axes that vmap added, which the kernel's `program_id` and index maps' authors do not see.

    The operands of the call are: sizes of the dynamic grid axes, scalar-prefetch operands, inputs.
    """

    grid: tuple[int | None, ...]
    block_mappings: tuple[BlockMapping, ...]
    num_inputs: int
    prefetch_mappings: tuple[BlockMapping, ...] = ()
    vmapped_dims: tuple[int, ...] = ()

    @property
    def num_dynamic(self) -> int:
        return sum(n is None for n in self.grid)

    @property
    def num_prefetch(self) -> int:
        return len(self.prefetch_mappings)

    @property
    def num_outputs(self) -> int:
        return len(self.block_mappings) - self.num_inputs

    @property
    def inputs(self) -> tuple[BlockMapping, ...]:
        return self.block_mappings[: self.num_inputs]

    @property
    def outputs(self) -> tuple[BlockMapping, ...]:
        return self.block_mappings[self.num_inputs :]

    @property
    def num_programs(self) -> int | None:
        """How many programs the grid has; None when that is known only at run time."""
        return None if self.num_dynamic else math.prod(n for n in self.grid if n is not None)

    @property
    def kernel_grid(self) -> tuple[int | None, ...]:
        """The grid as the kernel's author wrote it."""
        return tuple(self.kernel_ids(self.grid))

    def kernel_ids(self, ids: Sequence[Any]) -> list[Any]:
        """Of one value for each grid axis, those that the kernel sees."""
        return [i for axis, i in enumerate(ids) if axis not in self.vmapped_dims]

    def __repr__(self) -> str:
        return f"GridMapping(grid={self.grid}, block_mappings={self.block_mappings})"


def make_block_mapping(
    spec: BlockSpec | NoBlockSpec | None,
    array: Any,
    grid: tuple[int | None, ...],
    prefetch_refs: Sequence[Any] = (),
    *,
    origin: str,
    prefetch_tree: Any = None,
) -> BlockMapping:
    """Make a BlockSpec concrete for one array.

    Arguments:
      spec: the user's spec; no spec is the whole array.
      array: the operand's type, with shape and dtype.
      grid: the grid, None for dynamic axes.
      prefetch_refs: abstract Refs of the scalar-prefetch operands, which index maps also get.
      origin: how messages call the operand.
      prefetch_tree: pytree structure of the scalar-prefetch operands as the user passed them.

    Raises:
      ValueError, TypeError: the block does not fit the array, or the index map is not one (see `_trace_index_map`).
    """
    spec = BlockSpec() if spec is None or isinstance(spec, NoBlockSpec) else spec
    array = jax.ShapeDtypeStruct(tuple(array.shape), array.dtype)
    space = MemorySpace.DEFAULT if spec.memory_space is None else spec.memory_space
    if spec.block_shape is None:
        block = tuple(_whole(n) for n in array.shape)
    else:
        block = tuple(as_block_dim(b) for b in spec.block_shape)
        if len(block) != len(array.shape):
            raise ValueError(
                explain(
                    f"The block shape of {origin} has {len(block)} dimension(s), but the array has {len(array.shape)}.",
                    block_shape=tuple(spec.block_shape),
                    array=f"{array.dtype}{list(array.shape)}",
                    hint="give one entry for each dimension of the array; None squeezes a dimension away",
                )
            )
    jaxpr, location = _trace_index_map(spec.index_map, block, grid, prefetch_refs, prefetch_tree, origin)
    return BlockMapping(block, jaxpr, array, space, spec.pipeline_mode, origin, location)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The block dimension of an operand without a block shape: all of it, even when that is 0 elements."""

    block_size: int

    def __repr__(self) -> str:
        return f"Blocked(block_size={self.block_size})"


def _whole(n: int) -> Any:
    return as_block_dim(n) if n else _Whole(0)


def _trace_index_map(index_map, block, grid, prefetch_refs, prefetch_tree, origin) -> tuple[Any, str | None]:
    ids = [jaxlink.ShapedArray((), jnp.dtype("int32"))] * len(grid)
    if prefetch_tree is None:
        prefetch_tree = jax.tree.structure(tuple(range(len(prefetch_refs))))
    if index_map is None:
        location, index_map, n_args = None, _zeros(block), len(grid) + len(prefetch_tree.children())
    else:
        location, n_args = jaxlink.function_location(index_map), len(grid) + len(prefetch_tree.children())
    what = f"The index map of {origin}"

    def flat_map(*args):
        refs = jax.tree.unflatten(prefetch_tree, args[len(grid) :])
        return _flat_results(index_map(*args[: len(grid)], *refs), block, what, location)

    frames.check_arity(
        index_map,
        n_args,
        lambda takes: explain(
            f"{what} takes {takes}, but is called with {n_args} argument(s): {len(grid)} grid indices"
            + (f" and {n_args - len(grid)} scalar-prefetch Refs." if prefetch_refs else "."),
            where=location,
            grid=grid,
            hint="an index map has one parameter for each grid axis, then one for each scalar-prefetch operand",
        ),
    )
    with frames.no_kernel("an index map"):
        info = jaxlink.debug_info("index map", index_map, ())
        jaxpr, _ = jaxlink.trace_to_jaxpr(flat_map, [*ids, *prefetch_refs], info)
    if jaxpr.consts:
        kinds = ", ".join(v.aval.str_short(short_dtypes=True) for v in jaxpr.constvars)
        raise ValueError(
            explain(
                f"{what} captures values [{kinds}] that are not its parameters.",
                where=location,
                hint="index maps may use Python integers and their parameters; pass run-time values as "
                "scalar-prefetch operands (pltpu.PrefetchScalarGridSpec)",
            )
        )
    if jaxlink.written_vars(jaxpr) or jaxlink.effects_outside(jaxpr):
        raise ValueError(
            explain(
                f"{what} has side effects: it must only compute indices.",
                where=location,
                hint="move prints and writes into the kernel",
            )
        )
    return jaxpr, location


def _zeros(block) -> Callable:
    """The default index map: the first block in every dimension."""
    first = tuple(jaxlink.ds(0, b.block_size) if isinstance(b, BoundedSlice) else 0 for b in block)
    return lambda *_: first


def _flat_results(out, block, what, location) -> list[Any]:
    """One int32 scalar for each dimension (two for a BoundedSlice), checked."""
    out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(out) != len(block):
        raise ValueError(
            explain(
                f"{what} returns {len(out)} value(s), but the block has {len(block)} dimension(s).",
                where=location,
                block_shape=block,
                hint="return one block index for each dimension of the block shape, squeezed ones included",
            )
        )
    flat: list[Any] = []
    for d, (value, b) in enumerate(zip(out, block)):
        if isinstance(value, jaxlink.Slice) != isinstance(b, BoundedSlice):
            raise ValueError(
                explain(
                    f"{what} gives {'a slice' if isinstance(value, jaxlink.Slice) else 'a number'} for dimension {d}, "
                    f"which is {b}.",
                    where=location,
                    hint="BoundedSlice dimensions take pl.ds(start, size); all others take an integer",
                )
            )
        parts = [value.start, value.size] if isinstance(value, jaxlink.Slice) else [value]
        flat += [_as_index(p, f"{what} returns {{}} for dimension {d}", location) for p in parts]
    return flat


def _as_index(value, what, location):
    ref = isinstance(value, jaxlink.TransformedRef) or (
        isinstance(value, jax.Array) and isinstance(jaxlink.typeof(value), jaxlink.AbstractRef)
    )
    kind = value if ref or hasattr(value, "dtype") else np.asarray(value)
    shape, dtype = kind.shape, kind.dtype
    if ref or shape != () or not jnp.issubdtype(dtype, jnp.integer):
        kind = "a Ref" if ref else f"{type(value).__name__} {dtype}{list(shape)}"
        hint = "read the Ref: table_ref[i]" if ref else "return integers: use // instead of /"
        raise ValueError(explain(f"{what.format(kind)}; it must be an integer scalar.", where=location, hint=hint))
    return jnp.asarray(value).astype(jnp.int32) if isinstance(value, jax.Array) else np.int32(value)
