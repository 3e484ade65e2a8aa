"""How the blocks of an operand come to the kernel: one entry of `window_params` and one function for each operand.

The function gives the block's numbers for a grid point; the compiler copies that block, two buffers deep, and clips it
at the array's edge. A number outside the array is clamped here, as the language says (tutorial 2.2), unless it is
plain that there is none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func

from palladion import jaxlink
from palladion.compiler.tpu.blocks import LEFT_IN_PLACE
from palladion.compiler.tpu.build import constant
from palladion.compiler.tpu.context import attr, copied, function, new_function
from palladion.compiler.tpu.emit import Emitter, Kernel, Ref
from palladion.compiler.tpu.kinds import i32, memory_element, memref_type, space_name
from palladion.language.blocks import Blocked, Element
from palladion.language.grid import BlockMapping
from palladion.language.index_maps import evaluate, grid_points, reads_prefetch
from palladion.language.tpu.memory import SMEM

_LOOKED_AT = 4096  # grid points at which an index map is worked out to see whether it needs clamping


def space_of(mapping: BlockMapping) -> str:
    """The memory of an operand's Ref; one without dimensions is a scalar, and those are in SMEM."""
    name = space_name(mapping.memory_space)
    return "smem" if name == "vmem" and not mapping.array.shape else name


def window_shape(mapping: BlockMapping) -> tuple[int, ...]:
    """The shape of the memref that the kernel gets: a block, squeezed dimensions and all, or the array in its place."""
    shape = mapping.array.shape if space_of(mapping) in LEFT_IN_PLACE else mapping.sizes
    dtype: Any = mapping.array.dtype
    return (*shape, *dtype._impl.key_shape) if jaxlink.is_opaque(dtype) else tuple(shape)


def window_type(mapping: BlockMapping) -> ir.Type:
    """The memref that the kernel gets."""
    return memref_type(window_shape(mapping), memory_element(mapping.array.dtype), space_of(mapping))


def prefetch_type(mapping: BlockMapping) -> ir.Type:
    """The memref of prefetched scalars: whole, in SMEM."""
    return window_type(dataclasses.replace(mapping, memory_space=SMEM))


def window_params(mapping: BlockMapping, name: str) -> ir.Attribute:
    """What `window_params` says of an operand."""
    if space_of(mapping) in LEFT_IN_PLACE:
        return ir.DictAttr.get({})
    entry: dict[str, ir.Attribute] = {
        "window_bounds": ir.DenseI64ArrayAttr.get(window_shape(mapping)),
        "transform_indices": ir.FlatSymbolRefAttr.get(name),
    }
    if mapping.pipeline_mode is not None and mapping.pipeline_mode.buffer_count == 1:
        entry["pipeline_mode"] = attr("#tpu.pipeline_mode<synchronous>")
    if in_elements(mapping):
        padding = [b.padding if isinstance(b, Element) else (0, 0) for b in mapping.block_shape]
        low, high = ([p[side] for p in padding] for side in (0, 1))
        entry["window_kind"] = attr(f"#tpu.element_window<{low}, {high}>")
    return ir.DictAttr.get(entry)


def in_elements(mapping: BlockMapping) -> bool:
    """Whether the window is placed by elements, not by blocks."""
    return any(isinstance(b, Element) for b in mapping.block_shape)


def emit_window(mapping: BlockMapping, name: str, grid: Sequence[int | None], prefetch: Sequence[BlockMapping]) -> None:
    """The function of an operand's window: grid indices and prefetched scalars to block numbers.

    Arguments:
      grid: of the module; its first axes are those of the call.
    """
    index_map = mapping.index_map
    kinds = [i32()] * len(grid) + [prefetch_type(p) for p in prefetch]
    rank = len(window_shape(mapping))
    n_ids = len(index_map.invars) - (len(prefetch) if _takes(mapping, len(prefetch)) else 0)
    clamps = needs_clamp(mapping, tuple(grid[:n_ids]))
    if not index_map.eqns and not any(clamps) and not in_elements(mapping):
        plan = tuple(_plain_results(index_map))
        plan += (("number", 0),) * (rank - len(plan))
        transform = copied((tuple(kinds), plan), lambda: _emit_plain(kinds, plan))
        transform.attributes["sym_name"] = ir.StringAttr.get(name)
        return
    _, entry = new_function(name, kinds, [i32()] * rank)
    with function(entry):
        ids, memrefs = list(entry.arguments[: len(grid)]), list(entry.arguments[len(grid) :])
        flat = _results(index_map, ids[:n_ids], memrefs, prefetch)
        indices = [index for index, _ in mapping.indices(flat)]
        indices = [_clamped(i, low, high) if c else i for i, (low, high), c in zip(indices, mapping.extents, clamps)]
        if in_elements(mapping):
            indices = [
                arith.muli(i, constant(b.block_size)) if isinstance(b, Blocked) and b.block_size != 1 else i
                for i, b in zip(indices, mapping.block_shape)
            ]
        if len(indices) < rank:
            indices += [constant(0)] * (rank - len(indices))
        func.ReturnOp(indices)


def _plain_results(index_map: Any) -> Iterator[tuple[str, int]]:
    """What an index map without operations gives: grid indices, by their axis, and numbers."""
    for var in index_map.outvars:
        if isinstance(var, jaxlink.Literal):
            yield "number", int(var.val)
        else:
            yield "axis", index_map.invars.index(var)


def _emit_plain(kinds: Sequence[ir.Type], plan: Sequence[tuple[str, int]]) -> ir.Operation:
    """The function of a window whose index map has no operations."""
    transform, entry = new_function("transform", kinds, [i32()] * len(plan))
    with function(entry):
        func.ReturnOp([constant(n) if what == "number" else entry.arguments[n] for what, n in plan])
    return transform


def _results(index_map: Any, ids: list[ir.Value], memrefs: list[ir.Value], prefetch: Sequence[BlockMapping]) -> Any:
    """What the index map gives."""
    if not index_map.eqns:  # grid indices and numbers as they are
        return [constant(n) if what == "number" else ids[n] for what, n in _plain_results(index_map)]
    refs = [Ref(m, p.ref_aval(), p.origin) for m, p in zip(memrefs, prefetch)]
    return Emitter(Kernel()).run(index_map, [*ids, *refs][: len(index_map.invars)])


def _takes(mapping: BlockMapping, n_prefetch: int) -> bool:
    return n_prefetch > 0 and isinstance(mapping.index_map.invars[-1].aval, jaxlink.AbstractRef)


def _clamped(index: ir.Value, low: int, high: int) -> ir.Value:
    return arith.maxsi(arith.minsi(index, constant(high)), constant(low))


@functools.lru_cache(4096)
def needs_clamp(mapping: BlockMapping, grid: tuple[int | None, ...]) -> tuple[bool, ...]:
    """For each dimension, whether the index map may leave the array."""
    jaxpr = mapping.index_map
    result: list[bool] = []
    for var, (low, high) in zip(jaxpr.outvars, mapping.extents):
        if isinstance(var, jaxlink.Literal):
            result.append(not low <= int(var.val) <= high)
        elif var in jaxpr.invars[: len(grid)]:
            size = grid[jaxpr.invars.index(var)]
            result.append(size is None or size - 1 > high)
        else:
            result.append(True)
    if (
        any(result)
        and None not in grid
        and not reads_prefetch(mapping)
        and 0 < math.prod(n or 0 for n in grid) <= _LOOKED_AT
    ):
        found = mapping.indices(evaluate(mapping, grid_points([n or 0 for n in grid])))
        return tuple(bool(((i < low) | (i > high)).any()) for (i, _), (low, high) in zip(found, mapping.extents))
    return tuple(result)
