"""How the blocks of an operand come to the kernel: one entry of `window_params` and one function for each operand.

The function gives the block's numbers for a grid point; the compiler copies that block, two buffers deep, and clips it
at the array's edge. A number outside the array is clamped here, as the language says (tutorial 2.2), unless it is
plain that there is none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func

from palladion import jaxlink
from palladion.compiler.tpu.blocks import LEFT_IN_PLACE
from palladion.compiler.tpu.build import constant
from palladion.compiler.tpu.context import attr, function
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


def window_type(mapping: BlockMapping) -> ir.Type:
    """The memref that the kernel gets: a block, squeezed dimensions and all, or the array where it lies."""
    extra = ()
    if jaxlink.is_opaque(mapping.array.dtype):
        extra = mapping.array.dtype._impl.key_shape
    space = space_of(mapping)
    shape = mapping.array.shape if space in LEFT_IN_PLACE else mapping.sizes
    return memref_type((*shape, *extra), memory_element(mapping.array.dtype), space)


def prefetch_type(mapping: BlockMapping) -> ir.Type:
    """The memref of prefetched scalars: whole, in SMEM."""
    return window_type(dataclasses.replace(mapping, memory_space=SMEM))


def window_params(mapping: BlockMapping, name: str) -> ir.Attribute:
    """What `window_params` says of an operand."""
    if space_of(mapping) in LEFT_IN_PLACE:
        return ir.DictAttr.get({})
    shape = tuple(ir.MemRefType(window_type(mapping)).shape)  # the window and the memref are one shape
    entry: dict[str, ir.Attribute] = {
        "window_bounds": ir.DenseI64ArrayAttr.get(shape),
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
    kinds = [i32()] * len(grid) + [prefetch_type(p) for p in prefetch]
    rank = len(ir.MemRefType(window_type(mapping)).shape)
    transform = func.FuncOp(name, (kinds, [i32()] * rank))
    with function(transform.add_entry_block()):
        ids, memrefs = list(transform.arguments[: len(grid)]), list(transform.arguments[len(grid) :])
        n_ids = len(mapping.index_map.invars) - (len(prefetch) if _takes(mapping, len(prefetch)) else 0)
        flat = _results(mapping.index_map, ids[:n_ids], memrefs, prefetch)
        indices = [index for index, _ in mapping.indices(flat)]
        clamps = needs_clamp(mapping, tuple(grid[:n_ids]))
        indices = [_clamped(i, low, high) if c else i for i, (low, high), c in zip(indices, mapping.extents, clamps)]
        if in_elements(mapping):
            indices = [
                arith.muli(i, constant(b.block_size)) if isinstance(b, Blocked) and b.block_size != 1 else i
                for i, b in zip(indices, mapping.block_shape)
            ]
        indices += [constant(0)] * (rank - len(indices))
        func.ReturnOp(indices)


def _results(index_map: Any, ids: list[ir.Value], memrefs: list[ir.Value], prefetch: Sequence[BlockMapping]) -> Any:
    """What the index map gives."""
    if not index_map.eqns:  # grid indices and numbers as they are
        known = dict(zip(index_map.invars, ids))
        return [constant(int(v.val)) if isinstance(v, jaxlink.Literal) else known[v] for v in index_map.outvars]
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
