"""Rules of operations that move elements: transpose, broadcast, squeeze, slices, concatenation, iota and their like.

What such an operation does to the array is done by the block's index; what is left to do with a block in the kernel
is at most a transpose, a broadcast or a reshape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.language.blocks import Element
from palladion.language.fuser.passes import Program
from palladion.language.fuser.rules import NotFusible, rule
from palladion.language.fuser.transforms import SCALAR, BlockIndexTransform, RootIndices, block, size_of


def plain(eqn: Any, found: BlockIndexTransform) -> tuple[Any, ...]:
    """The dimensions of a block, none of them a BoundedSlice or a padded Element.

    Raises:
      NotFusible: one is.
    """
    for d in found.block_shape or ():
        if d is not None and not isinstance(d, int) and not (isinstance(d, Element) and not any(d.padding)):
            raise NotFusible(
                eqn, f"`{eqn.primitive}` cannot be fused around a block with {d}.", "use plain block sizes on this path"
            )
    return tuple(found.block_shape or ())


def _reshape_run(ctx: Program, eqn: Any, values: list[Any]) -> list[Any]:
    """The block holds the right elements in the right order."""
    return [ctx.fit(eqn.outvars[0], values[0])]


# --- transpose ------------------------------------------------------------------------------------------------------
def _transposed(found: BlockIndexTransform, permutation: Any) -> BlockIndexTransform:
    dims = found.block_shape or ()
    return block(found, [dims[p] for p in permutation], lambda i, _: [i[p] for p in permutation])


def _transpose_run(ctx, eqn, values):
    full = ctx.full(eqn.invars[0], values[0])
    return [ctx.fit(eqn.outvars[0], lax.transpose(full, eqn.params["permutation"]))]


rule(
    lax.transpose_p,
    pull=lambda ctx, eqn, outs: [_transposed(outs[0], np.argsort(eqn.params["permutation"]))],
    push=lambda ctx, eqn, ins: [_transposed(ins[0], eqn.params["permutation"])],
    run=_transpose_run,
)


# --- broadcast_in_dim (also expand_dims) and tile ---------------------------------------------------------------------
def _broadcast_pull(ctx, eqn, outs):
    (out,), operand = outs, eqn.invars[0].aval
    where, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    spread = [operand.shape[d] != shape[w] for d, w in enumerate(where)]
    dims = [(None if out.block_shape[w] is None else 1) if s else out.block_shape[w] for s, w in zip(spread, where)]
    found = block(out, dims, lambda i, _: [0 if s else i[w] for s, w in zip(spread, where)])
    return [found if operand.shape else SCALAR, *[SCALAR] * (len(eqn.invars) - 1)]


def _broadcast_push(ctx, eqn, ins):
    (found, *_), operand = ins, eqn.invars[0].aval
    where, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    source = {w: d for d, w in enumerate(where) if operand.shape[d] == shape[w]}
    dims = [found.block_shape[source[w]] if w in source else n for w, n in enumerate(shape)]
    return [block(found, dims, lambda i, _: [i[source[w]] if w in source else 0 for w in range(len(shape))])]


def _broadcast_run(ctx, eqn, values):
    out = eqn.outvars[0]
    full = ctx.full(eqn.invars[0], values[0])
    return [ctx.fit(out, lax.broadcast_in_dim(full, ctx.sizes(out), eqn.params["broadcast_dimensions"]))]


rule(lax.broadcast_in_dim_p, pull=_broadcast_pull, push=_broadcast_push, run=_broadcast_run)


def _tile_pull(ctx, eqn, outs):
    (out,), shape = outs, eqn.invars[0].aval.shape
    dims, periods = [], []
    for d, n, reps in zip(plain(eqn, out), shape, eqn.params["reps"]):
        size = size_of(d)
        if reps == 1:
            dims.append(d)
            periods.append(None)
        elif n > 1 and (isinstance(d, Element) or (n % size and size % n)):
            hint = f"choose a block whose size divides {n}, or is a multiple of it"
            raise NotFusible(eqn, f"`tile` repeats {n} elements, which blocks of {d} cut unevenly.", hint)
        else:
            dims.append(None if d is None else min(n, size))
            periods.append(max(n // size, 1))
    return [block(out, dims, lambda i, _: [x if p is None else 0 if p == 1 else x % p for x, p in zip(i, periods)])]


def _tile_run(ctx, eqn, values):
    have, want = ctx.sizes(eqn.invars[0]), ctx.sizes(eqn.outvars[0])
    return [ctx.fit(eqn.outvars[0], jnp.tile(ctx.full(eqn.invars[0], values[0]), [w // h for w, h in zip(want, have)]))]


if hasattr(lax, "tile_p"):
    rule(lax.tile_p, pull=_tile_pull, run=_tile_run)


# --- squeeze ----------------------------------------------------------------------------------------------------------
def _squeeze_pull(ctx, eqn, outs):
    (out,), rank = outs, len(eqn.invars[0].aval.shape)
    kept = [d for d in range(rank) if d not in eqn.params["dimensions"]]
    place = {d: n for n, d in enumerate(kept)}
    dims = [out.block_shape[place[d]] if d in place else None for d in range(rank)]
    return [block(out, dims, lambda i, _: [i[place[d]] if d in place else 0 for d in range(rank)])]


def _squeeze_push(ctx, eqn, ins):
    (found,), rank = ins, len(eqn.invars[0].aval.shape)
    kept = [d for d in range(rank) if d not in eqn.params["dimensions"]]
    if any(size_of(found.block_shape[d]) != 1 for d in eqn.params["dimensions"]):
        raise NotFusible(
            eqn, "`squeeze` removes a dimension whose block has more than one element.", "make it 1 or None"
        )
    return [block(found, [found.block_shape[d] for d in kept], lambda i, _: [i[d] for d in kept])]


rule(lax.squeeze_p, pull=_squeeze_pull, push=_squeeze_push, run=_reshape_run)


# --- slices -----------------------------------------------------------------------------------------------------------
def shifted(eqn: Any, out: BlockIndexTransform, starts: list[Any]) -> BlockIndexTransform:
    """The block of an array whose part from `starts` on has the block `out`.

    Arguments:
      starts: for each dimension a static int, or (divisor, function of the first root to a run-time start).
    """
    dims: list[Any] = []
    moves: list[tuple[Any, ...]] = []
    for d, start in zip(plain(eqn, out), starts):
        divisor, read = start if isinstance(start, tuple) else (start, functools.partial(_constant, start))
        between = isinstance(d, int) and d > 1 and divisor % d != 0  # starts between two blocks: count elements
        dims.append(Element(d) if between else d)
        moves.append((d if between else 1, 1 if between or isinstance(d, Element) else size_of(d), read))

    def move(index: Any, root: RootIndices, scale: int, unit: int, read: Callable[[Any], Any]) -> Any:
        offset = read(root)
        if unit > 1:
            offset = offset // unit if isinstance(offset, int) else lax.div(offset, np.int32(unit))
        index = index if scale == 1 else index * scale
        return index if isinstance(offset, int) and offset == 0 else index + offset

    return block(out, dims, lambda i, root: [move(x, root, *m) for x, m in zip(i, moves)])


def _constant(value: int, root: RootIndices) -> int:
    return value


def _slice_pull(ctx, eqn, outs):
    (out,), starts = outs, [int(s) for s in eqn.params["start_indices"]]
    strides = eqn.params["strides"] or [1] * len(starts)
    if any(s != 1 and n != 1 for s, n in zip(strides, eqn.outvars[0].aval.shape)):
        raise NotFusible(
            eqn, f"A slice with strides {tuple(strides)} leaves gaps in the blocks.", "slice before the fused function"
        )
    return [shifted(eqn, out, starts)]


def _slice_push(ctx, eqn, ins):
    (found,), shape = ins, eqn.invars[0].aval.shape
    if eqn.outvars[0].aval.shape != shape:
        reason = "A slice of the kernel's result would leave some programs without an output block."
        raise NotFusible(eqn, reason, "slice what the fused function returns")
    return [found]


def _dynamic_slice_pull(ctx, eqn, outs):
    (out,), (operand, *starts) = outs, eqn.invars

    def one(atom, n, size):
        if n == size:
            return 0
        known = ctx.static(atom)
        if known is not None:
            return min(max(known, 0), n - size)
        divisor = int(np.gcd(ctx.divisor(atom), n - size))  # out-of-range starts are moved inside, as lax does
        return divisor, lambda root: jnp.clip(jnp.int32(ctx.start(atom, root)), 0, n - size)

    moved = [one(a, n, size) for a, n, size in zip(starts, operand.aval.shape, eqn.params["slice_sizes"])]
    return [shifted(eqn, out, moved), *[None] * len(starts)]


rule(lax.slice_p, pull=_slice_pull, push=_slice_push, run=_reshape_run)
rule(lax.dynamic_slice_p, pull=_dynamic_slice_pull, run=_reshape_run)


# --- concatenate, stack, split, unstack -------------------------------------------------------------------------------
def _pieces(eqn: Any, out: BlockIndexTransform, axis: int, lengths: list[int]) -> list[BlockIndexTransform]:
    """The blocks of arrays that stand one after the other along an axis."""
    d, size = plain(eqn, out)[axis], size_of(plain(eqn, out)[axis])
    ends = np.cumsum(lengths)
    if isinstance(d, int) and d == ends[-1]:
        return [_with_axis(out, axis, n, lambda x: 0) for n in lengths]
    if isinstance(d, Element) or any(e % size for e in ends[:-1]):
        reason = (
            f"`{eqn.primitive}` joins {lengths} elements along dimension {axis}, and blocks of {d} straddle the seams."
        )
        raise NotFusible(
            eqn, reason, "choose a block size that divides all of them, or one block for the whole dimension"
        )
    blocks = [(int(e) - n) // size for e, n in zip(ends, lengths)]  # the number of each piece's first block
    return [
        _with_axis(out, axis, d, lambda x, b=b, n=n: jnp.clip(x - b, 0, -(-n // size) - 1))
        for b, n in zip(blocks, lengths)
    ]


def _with_axis(out: BlockIndexTransform, axis: int, dim: Any, index: Any) -> BlockIndexTransform:
    dims = [dim if d == axis else b for d, b in enumerate(out.block_shape or ())]
    return block(out, dims, lambda i, _: [index(x) if d == axis else x for d, x in enumerate(i)])


def _concatenate_pull(ctx, eqn, outs):
    axis = eqn.params["dimension"]
    return _pieces(eqn, outs[0], axis, [a.aval.shape[axis] for a in eqn.invars])


def _concatenate_run(ctx, eqn, values):
    (out,), axis = eqn.outvars, eqn.params["dimension"]
    dim, total = ctx.dims(out)[axis], out.aval.shape[axis]
    full = [ctx.full(a, v) for a, v in zip(eqn.invars, values)]
    if isinstance(dim, int) and dim == total:
        return [ctx.fit(out, lax.concatenate(full, axis))]
    starts = np.cumsum([0, *(a.aval.shape[axis] for a in eqn.invars)])[1:-1] // size_of(dim)
    number, result = ctx.indices(out)[axis], full[0]
    for start, piece in zip(starts, full[1:]):
        result = jnp.where(number >= int(start), piece, result)
    return [ctx.fit(out, result)]


rule(lax.concatenate_p, pull=_concatenate_pull, run=_concatenate_run)


def _split_pull(ctx, eqn, outs):
    axis, lengths = eqn.params["axis"], [int(n) for n in eqn.params["sizes"]]
    starts = np.cumsum([0, *lengths])
    used = [n for n, b in enumerate(outs) if b is not None]
    rank = len(eqn.invars[0].aval.shape)
    if len(used) == 1:
        (n,) = used
        return [shifted(eqn, outs[n], [int(starts[n]) if d == axis else 0 for d in range(rank)])]
    if any(outs[n].block_shape[axis] != lengths[n] for n in used):
        reason = f"`split` gives {len(used)} parts, whose blocks lie at different places of one array."
        raise NotFusible(
            eqn, reason, "pass the parts as arrays of their own, or use blocks that cover the split dimension"
        )
    found = [_with_axis(outs[n], axis, int(starts[-1]), lambda x: 0) for n in used]
    for other in found[1:]:
        if ctx.merged(found[0], other) is None:
            raise NotFusible(eqn, "`split` gives parts whose blocks differ.", "use the parts in the same blocks")
    return found[:1]


def _split_push(ctx, eqn, ins):
    (found,), axis, shape = ins, eqn.params["axis"], eqn.invars[0].aval.shape
    if found.block_shape[axis] != shape[axis]:
        hint = "use a block that covers the dimension that is split"
        raise NotFusible(eqn, "`split` cuts through an array whose blocks do not cover the split dimension.", hint)
    return [_with_axis(found, axis, int(n), lambda x: 0) for n in eqn.params["sizes"]]


def _split_run(ctx, eqn, values):
    used = [v in ctx.blocks for v in eqn.outvars]
    full = ctx.full(eqn.invars[0], values[0])
    if sum(used) == 1:
        return [ctx.fit(v, full) if u else None for u, v in zip(used, eqn.outvars)]
    parts = lax.split(full, [int(n) for n in eqn.params["sizes"]], eqn.params["axis"])
    return [ctx.fit(v, p) if u else None for u, v, p in zip(used, eqn.outvars, parts)]


rule(lax.split_p, pull=_split_pull, push=_split_push, run=_split_run)


def _stack_pull(ctx, eqn, outs):
    (out,), axis = outs, eqn.params["axis"]
    kept = [d for d in range(len(eqn.outvars[0].aval.shape)) if d != axis]
    if isinstance(plain(eqn, out)[axis], Element) or size_of(out.block_shape[axis]) not in (1, len(eqn.invars)):
        hint = "use a block of 1, None, or all of the stacked dimension"
        raise NotFusible(eqn, f"`stack` puts {len(eqn.invars)} arrays together, which its blocks cut unevenly.", hint)
    return [block(out, [out.block_shape[d] for d in kept], lambda i, _: [i[d] for d in kept])] * len(eqn.invars)


def _stack_run(ctx, eqn, values):
    (out,), axis = eqn.outvars, eqn.params["axis"]
    full = [ctx.full(a, v) for a, v in zip(eqn.invars, values)]
    if ctx.sizes(out)[axis] == len(full):
        return [ctx.fit(out, jnp.stack(full, axis))]
    number, result = ctx.indices(out)[axis], full[0]
    for n, piece in enumerate(full[1:], 1):
        result = jnp.where(number == n, piece, result)
    return [ctx.fit(out, result)]


def _unstack_pull(ctx, eqn, outs):
    axis, used = eqn.params["axis"], [n for n, b in enumerate(outs) if b is not None]
    if len(used) > 1:
        reason = f"`unstack` gives {len(used)} parts, whose blocks lie at different places of one array."
        raise NotFusible(eqn, reason, "pass the parts as arrays of their own")
    (n,) = used
    dims = list(outs[n].block_shape)
    dims.insert(axis, None)
    return [block(outs[n], dims, lambda i, _: [*i[:axis], n, *i[axis:]])]


if hasattr(lax, "stack_p"):
    rule(lax.stack_p, pull=_stack_pull, run=_stack_run)
    rule(
        lax.unstack_p,
        pull=_unstack_pull,
        run=lambda ctx, eqn, values: [ctx.fit(v, values[0]) if v in ctx.blocks else None for v in eqn.outvars],
    )


# --- iota and rev -----------------------------------------------------------------------------------------------------
def _iota_run(ctx, eqn, values):
    (out,), axis, dtype = eqn.outvars, eqn.params["dimension"], eqn.params["dtype"]
    dim, index = ctx.dims(out)[axis], ctx.indices(out)[axis]
    if isinstance(dim, Element):
        first = index - dim.padding[0]
    else:
        first = index * size_of(dim) if isinstance(dim, int) or dim is None else index.start
    ramp = lax.broadcasted_iota(jnp.int32, ctx.sizes(out), axis) + jnp.int32(first)
    return [ctx.fit(out, ramp.astype(dtype))]


rule(lax.iota_p, pull=lambda ctx, eqn, outs: [None] * len(eqn.invars), run=_iota_run)


def _reversed(eqn, found):
    shape, axes = eqn.invars[0].aval.shape, eqn.params["dimensions"]
    for d in axes:
        dim = plain(eqn, found)[d]
        if isinstance(dim, Element) or shape[d] % size_of(dim):
            hint = f"choose a block size that divides {shape[d]}"
            raise NotFusible(eqn, f"`rev` turns round dimension {d}, where the last block is not full.", hint)
    last = [shape[d] // size_of(b) - 1 for d, b in enumerate(found.block_shape or ())]
    return block(found, found.block_shape, lambda i, _: [last[d] - x if d in axes else x for d, x in enumerate(i)])


rule(
    lax.rev_p,
    pull=lambda ctx, eqn, outs: [_reversed(eqn, outs[0])],
    push=lambda ctx, eqn, ins: [_reversed(eqn, ins[0])],
    run=lambda ctx, eqn, values: [
        ctx.fit(eqn.outvars[0], lax.rev(ctx.full(eqn.invars[0], values[0]), eqn.params["dimensions"]))
    ],
)


# --- values that pass through as they are -----------------------------------------------------------------------------
def _through_push(ctx, eqn, ins):
    return list(ins)


rule(
    lax.optimization_barrier_p,
    pull=lambda ctx, eqn, outs: list(outs),
    push=_through_push,
    run=lambda ctx, eqn, values: [v if o in ctx.blocks else None for v, o in zip(values, eqn.outvars)],
)


def _bitcast_dims(eqn: Any, found: BlockIndexTransform) -> BlockIndexTransform:
    if eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape:
        raise NotFusible(
            eqn, "A bitcast between element types of different widths changes the shape.", "bitcast outside"
        )
    return found


rule(
    lax.bitcast_convert_type_p,
    pull=lambda ctx, eqn, outs: [_bitcast_dims(eqn, outs[0])],
    push=lambda ctx, eqn, ins: [_bitcast_dims(eqn, ins[0])],
    run=lambda ctx, eqn, values: [
        ctx.fit(eqn.outvars[0], lax.bitcast_convert_type(values[0], eqn.params["new_dtype"]))
    ],
)
