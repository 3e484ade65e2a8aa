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

from palladion import jaxlink, locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import frames, indexing
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
      options: what a dialect's BlockSpec says beyond that (its `block_options`), or None. It is hashable, and its
        `ref_aval(inner_aval, memory_space, label)` is the abstract Ref.
    """

    block_shape: tuple[Any, ...]
    index_map: Any
    array: jax.ShapeDtypeStruct
    memory_space: Any
    pipeline_mode: Any = None
    origin: str = "an operand"
    map_location: str | None = None
    options: Any = None

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
                count = n + sum(b.padding)
            elif isinstance(b, (Squeezed, BoundedSlice, Indirect)):
                count = n
            else:
                count = -(-n // b.block_size) if b.block_size else 0
            result.append((0, jaxlink.max_dim(count - 1, 0)))
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
            not isinstance(b, (Element, BoundedSlice, Indirect)) and s == n
            for b, s, n in zip(self.block_shape, self.sizes, self.array.shape)
        )

    @property
    def is_default_map(self) -> bool:
        return self.map_location is None

    @property
    def indirect(self) -> int | None:
        """The dimension that is `Indirect`, or None."""
        return next((d for d, b in enumerate(self.block_shape) if isinstance(b, Indirect)), None)

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
            elif isinstance(b, (Squeezed, Indirect)):
                result.append((index, None))
            else:
                result.append((index * b.block_size, None))
        return result

    def ref_aval(self) -> KernelRef:
        """The abstract Ref that the kernel gets."""
        make = KernelRef if self.options is None else self.options.ref_aval
        return make(jaxlink.ShapedArray(self.ref_shape, self.array.dtype), self.memory_space, label=self.origin)

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
            raise mistake(
                ValueError,
                f"The block shape of {origin} has {count_of(len(block), 'dimension')}, but the array has "
                f"{len(array.shape)}.",
                block_shape=spelled(spec.block_shape),
                array=kind_of(array),
                hint="give one entry for each dimension of the array; None squeezes a dimension away",
            )
    if sum(isinstance(b, Indirect) for b in block) > 1:
        raise mistake(
            ValueError,
            f"The block shape of {origin} has more than one Indirect dimension.",
            block_shape=spelled(block),
            hint="gather along one dimension; the others take block numbers or pl.Element offsets",
        )
    jaxpr, location = _trace_index_map(spec.index_map, block, grid, prefetch_refs, prefetch_tree, origin)
    return BlockMapping(
        block, jaxpr, array, space, spec.pipeline_mode, origin, location, getattr(spec, "block_options", None)
    )


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The block dimension of an operand without a block shape: all of it, even 0 or a symbolic number of elements."""

    block_size: Any

    def __repr__(self) -> str:
        return f"Blocked(block_size={self.block_size})"


def _whole(n: int) -> Any:
    return as_block_dim(n) if isinstance(n, int) and n else _Whole(n)


def _trace_index_map(index_map, block, grid, prefetch_refs, prefetch_tree, origin) -> tuple[Any, str | None]:
    ids = [jaxlink.ShapedArray((), jnp.dtype("int32"))] * len(grid)
    if prefetch_tree is None:
        prefetch_tree = jax.tree.structure(tuple(range(len(prefetch_refs))))
    if index_map is None:
        location, index_map, n_args = None, _zeros(block), len(grid) + len(prefetch_tree.children())
    else:
        location, n_args = locations.defined_at(index_map), len(grid) + len(prefetch_tree.children())
    what = f"The index map of {origin}"

    def flat_map(*args):
        refs = jax.tree.unflatten(prefetch_tree, args[len(grid) :])
        return flat_results(index_map(*args[: len(grid)], *refs), block, what, location)

    frames.check_arity(
        index_map,
        n_args,
        lambda takes: explain(
            f"{what} takes {takes}, but it gets {count_of(len(grid), 'grid index', 'grid indices')}"
            + (f" and {count_of(n_args - len(grid), 'scalar-prefetch Ref')}" if prefetch_refs else "")
            + ("." if grid else ": the call has no grid."),
            where=location,
            grid=grid,
            hint="an index map has one parameter for each grid axis, then one for each scalar-prefetch operand",
        ),
    )
    with frames.no_kernel(f"the index map of {origin}"):
        info = jaxlink.debug_info("index map", index_map, ids)
        jaxpr, _ = jaxlink.trace_to_jaxpr(flat_map, [*ids, *prefetch_refs], info)
    if jaxpr.consts:
        kinds = ", ".join(v.aval.str_short(short_dtypes=True) for v in jaxpr.constvars)
        raise mistake(
            ValueError,
            f"{what} captures values [{kinds}] that are not its parameters.",
            where=location,
            hint="an index map uses its parameters and Python numbers; values known at run time are passed as "
            "scalar-prefetch operands (pltpu.PrefetchScalarGridSpec)",
        )
    if jaxlink.written_vars(jaxpr) or jaxlink.effects_outside(jaxpr):
        raise mistake(
            ValueError,
            f"{what} has side effects: it must only compute indices.",
            where=location,
            hint="move prints and writes into the kernel",
        )
    return jaxpr, location


def _zeros(block) -> Callable:
    """The default index map: the first block in every dimension."""

    def first(b):
        if isinstance(b, BoundedSlice):
            return jaxlink.ds(0, b.block_size)
        return jnp.arange(b.block_size) if isinstance(b, Indirect) else 0

    return lambda *_: tuple(first(b) for b in block)


def flat_results(out: Any, block: Sequence[Any], what: str, location: str | None) -> list[Any]:
    """What an index map returned as one int32 scalar for each dimension (two for a BoundedSlice), checked.

    Arguments:
      out: what it returned.
      block: the block dimensions.
      what, location: the index map and where it is, for messages.

    Raises:
      ValueError: it is not one index for each dimension.
    """
    if out is None and block:
        hint = "return a tuple of block indices: return (i, j)"
        raise mistake(ValueError, f"{what} returns nothing.", where=location, hint=hint)
    out = tuple(out) if isinstance(out, (tuple, list)) else () if out is None else (out,)
    if len(out) != len(block):
        raise mistake(
            ValueError,
            f"{what} returns {count_of(len(out), 'value')}, but the block has {count_of(len(block), 'dimension')}.",
            where=location,
            block_shape=spelled(block),
            hint="return one block index for each dimension of the block shape, squeezed ones included",
        )
    flat: list[Any] = []
    for d, (value, b) in enumerate(zip(out, block)):
        if isinstance(b, Indirect):
            flat.append(_as_indices(value, b, f"{what} returns {{}} for dimension {d}, which is {b}", location))
            continue
        if isinstance(value, jaxlink.Slice) != isinstance(b, BoundedSlice):
            raise mistake(
                ValueError,
                f"{what} returns {'a slice' if isinstance(value, jaxlink.Slice) else 'a number'} for dimension {d}, "
                f"which is {b}.",
                where=location,
                hint="BoundedSlice dimensions take pl.ds(start, size); all others take an integer",
            )
        parts = [value.start, value.size] if isinstance(value, jaxlink.Slice) else [value]
        flat += [_as_index(p, f"{what} returns {{}} for dimension {d}", location) for p in parts]
    return flat


def _as_index(value, what, location):
    ref = indexing.is_ref(value)
    dtype = None if ref else np.asarray(value).dtype if not hasattr(value, "dtype") else value.dtype
    if dtype is None or np.shape(value) or not jnp.issubdtype(dtype, jnp.integer):
        if ref:
            kind, hint = f"the Ref {indexing.label_of(value)}", "read an element of the Ref: table_ref[i]"
        else:
            kind, hint = kind_of(value), "an index map returns integers: // instead of /, .astype(jnp.int32) of a bool"
        raise mistake(ValueError, f"{what.format(kind)}; it must be an integer scalar.", where=location, hint=hint)
    if not isinstance(value, jax.Array) and not -(2**31) <= int(value) < 2**31:
        hint = "block numbers and offsets are 32-bit integers; a larger array needs several calls"
        raise mistake(ValueError, f"{what.format(value)}, which is not a 32-bit integer.", where=location, hint=hint)
    return jnp.asarray(value).astype(jnp.int32) if isinstance(value, jax.Array) else np.int32(value)


def _as_indices(value, dim, what, location):
    """The index vector of an Indirect dimension."""
    value = value[...] if indexing.is_ref(value) else jnp.asarray(value)
    if value.shape != (dim.block_size,) or not jnp.issubdtype(value.dtype, jnp.integer):
        raise mistake(
            ValueError,
            f"{what.format(kind_of(value))}; it must be {dim.block_size} integers in an array or a Ref.",
            where=location,
            hint=f"return table_ref.at[pl.ds(i * {dim.block_size}, {dim.block_size})], or as many indices in an array",
        )
    return value.astype(jnp.int32)
