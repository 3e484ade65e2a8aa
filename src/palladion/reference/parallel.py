"""Kernels whose programs may run at once: independent and elementwise.

When every output block is visited by exactly one program and the body only computes element by element, order means
nothing. Arrays are then seen as [grid axes…, block…] and the kernel runs under one `vmap` for each grid axis. XLA
fuses the relayouts and the body into one pass over the operands, on all cores, with no intermediate array. Kernels
with reductions, products, inner loops or scratch stay with the sequential plan, which holds one block at a time.

Under vmap a `when` on a program id becomes a select: both sides are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.language import ops
from palladion.language.blocks import Blocked, Squeezed
from palladion.language.check import ref_transforms
from palladion.language.grid import BlockMapping, GridMapping
from palladion.reference.evaluate import Cell, Evaluator, pad, uninitialized

_ELEMENTWISE = {
    getattr(lax, f"{name}_p")
    for name in (
        "abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp "
        "convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow iota "
        "is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt "
        "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square squeeze sub tan "
        "tanh xor reshape expand_dims"
    ).split()
    if hasattr(lax, f"{name}_p")
}
_CALLS = {jaxlink.jit_p: "jaxpr", jaxlink.custom_jvp_call_p: "call_jaxpr", jaxlink.custom_vjp_call_p: "call_jaxpr"}


def _is_elementwise(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive in (jaxlink.get_p, jaxlink.swap_p):
            if ref_transforms(eqn):
                return False
        elif eqn.primitive in _CALLS:
            if not _is_elementwise(eqn.params[_CALLS[eqn.primitive]]):
                return False
        elif eqn.primitive is lax.cond_p:
            if not all(_is_elementwise(b) for b in eqn.params["branches"]):
                return False
        elif eqn.primitive not in _ELEMENTWISE and eqn.primitive not in (ops.program_id_p, ops.multiple_of_p):
            return False
    return True


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel call to be run at once.

    Attributes:
      picks: for each operand and output, the grid axis that picks each of its block dimensions, or None where there
        is just one block.
    """

    jaxpr: Any
    gm: GridMapping
    picks: tuple[tuple[int | None, ...], ...]

    def run(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs."""
        gm, maps, n_in = self.gm, self.gm.block_mappings, self.gm.num_inputs
        grid = [n or 0 for n in gm.grid]

        def program(ids, blocks):
            cells = [Cell(b, m.origin) for b, m in zip(blocks, maps)]
            Evaluator(gm.kernel_ids(ids), gm.kernel_ids(grid)).run(self.jaxpr, cells)
            return [c.value for c in cells[n_in:]]

        for axis in reversed(range(len(grid))):
            mapped_ids = [0 if axis == b else None for b in range(len(grid))]
            mapped_blocks = [0 if axis in p else None for p in self.picks]
            program = jax.vmap(program, (mapped_ids, mapped_blocks))
        arrays = [*inputs, *(uninitialized(m.array.shape, m.array.dtype) for m in gm.outputs)]
        blocks = [_to_blocks(x, m, p) for x, m, p in zip(arrays, maps, self.picks)]
        outs = program([jnp.arange(n, dtype=jnp.int32) for n in grid], blocks)
        return [_from_blocks(x, m, p) for x, m, p in zip(outs, gm.outputs, self.picks[n_in:])]


def plan(jaxpr: Any, gm: GridMapping) -> Plan | None:
    """A plan, if the call's programs are independent and elementwise."""
    only_refs = all(isinstance(e, jaxlink.RefEffect) for e in jaxpr.effects)
    if gm.num_dynamic or gm.num_prefetch or not only_refs or len(jaxpr.invars) != len(gm.block_mappings):
        return None
    if (gm.num_programs or 0) < 2 or jaxlink.written_vars(jaxpr) & set(jaxpr.invars[: gm.num_inputs]):
        return None
    picks = []
    for k, mapping in enumerate(gm.block_mappings):
        pick = _picks(mapping, gm.grid)
        if pick is None or (k >= gm.num_inputs and len([a for a in pick if a is not None]) < len(gm.grid)):
            return None
        picks.append(pick)
    return Plan(jaxpr, gm, tuple(picks)) if _is_elementwise(jaxpr) else None


def _picks(mapping: BlockMapping, grid: Sequence[int | None]) -> tuple[int | None, ...] | None:
    """The grid axis that picks each block dimension, for index maps that just pick; else None."""
    if not all(isinstance(b, (Blocked, Squeezed)) for b in mapping.block_shape) or 0 in mapping.array.shape:
        return None
    axis_of = {v: a for a, v in enumerate(mapping.index_map.invars)}
    picks: list[int | None] = []
    for out, n, size in zip(mapping.index_map.outvars, mapping.array.shape, mapping.sizes):
        blocks = -(-n // size)
        if isinstance(out, jaxlink.Literal):
            if int(out.val) != 0 or blocks != 1:
                return None
            picks.append(None)
        elif (axis := axis_of.get(out)) is None or grid[axis] != blocks or axis in picks:
            return None
        else:
            picks.append(axis)
    return None if mapping.index_map.eqns else tuple(picks)


def _order(mapping: BlockMapping, picks: Sequence[int | None]) -> tuple[list[int], int]:
    """Of dimensions (blocks 0, size 0, blocks 1, size 1, …): grid axes in order, the block, and those of size one."""
    front = [2 * d for _, d in sorted((a, d) for d, a in enumerate(picks) if a is not None)]
    block = [2 * d + 1 for d, b in enumerate(mapping.block_shape) if not isinstance(b, Squeezed)]
    rest = sorted({*range(2 * len(picks))} - {*front, *block})
    return [*front, *block, *rest], len(front) + len(block)


def _padded(mapping: BlockMapping) -> list[tuple[int, int]]:
    return [(-(-n // size), size) for n, size in zip(mapping.array.shape, mapping.sizes)]


def _to_blocks(x: jax.Array, mapping: BlockMapping, picks: Sequence[int | None]) -> jax.Array:
    parts, (order, keep) = _padded(mapping), _order(mapping, picks)
    edges = [(0, count * size - n) for (count, size), n in zip(parts, x.shape)]
    x = pad(x, edges) if any(after for _, after in edges) else x
    x = x.reshape([s for part in parts for s in part]).transpose(order)
    return x.reshape(x.shape[:keep])


def _from_blocks(x: jax.Array, mapping: BlockMapping, picks: Sequence[int | None]) -> jax.Array:
    parts, (order, keep) = _padded(mapping), _order(mapping, picks)
    x = x.reshape(x.shape + (1,) * (len(order) - keep)).transpose(np.argsort(order))
    x = x.reshape([count * size for count, size in parts])
    return lax.slice(x, [0] * x.ndim, mapping.array.shape)
