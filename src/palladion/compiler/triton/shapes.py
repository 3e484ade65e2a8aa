"""Rules: operations that move elements: broadcasts, reshapes, transposes, parts of blocks, concatenations.

Triton has no slices of blocks, since which thread holds which element is its own choice. `tt.gather` along one axis,
which goes through shared memory where it must, stands in for slices, reversals, pads and concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import cast
from palladion.compiler.triton.lowering import RULES, Lowering, dtype_of, fits, refusal
from palladion.language import ops
from palladion.language.triton.ops import max_contiguous_p


@RULES.rule(lax.broadcast_in_dim_p)
def _broadcast_in_dim(ctx: Lowering, eqn, x, *_) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return broadcast_in_dim(x, shape, dims)


def broadcast_in_dim(x: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """Put dimension i of `x` at dims[i] of `shape`, and repeat it along the others."""
    own = emit.shape_of(x)
    if not own:
        return emit.broadcast(x, shape)
    placed = [1] * len(shape)
    for n, d in zip(own, dims):
        placed[d] = n
    missing = [d for d in range(len(shape)) if d not in dims]
    for d in missing:
        x = tt.expand_dims(x, d)
    return emit.broadcast(x, shape)


@RULES.rule(jaxlink.ref_broadcast_to_p)
def _ref_broadcast(ctx: Lowering, eqn, x) -> Any:
    """How JAX broadcasts the index arrays of a Ref: by NumPy's rules."""
    shape = eqn.params["shape"]
    rank = len(emit.shape_of(x))
    return broadcast_in_dim(x, shape, range(len(shape) - rank, len(shape)))


@RULES.rule(lax.reshape_p)
def _reshape(ctx: Lowering, eqn, x, *_) -> Any:
    if eqn.params["dimensions"] is not None:
        raise RULES.unsupported(eqn)
    return emit.reshape(x, eqn.params["new_sizes"])


@RULES.rule(lax.squeeze_p)
def _squeeze(ctx: Lowering, eqn, x) -> Any:
    return emit.reshape(x, eqn.outvars[0].aval.shape)


@RULES.rule(lax.transpose_p)
def _transpose(ctx: Lowering, eqn, x) -> Any:
    permutation = eqn.params["permutation"]
    return tt.trans(x, list(permutation)) if emit.shape_of(x) else x


@RULES.rule(lax.iota_p)
def _iota(ctx: Lowering, eqn, *_) -> Any:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    numbers = emit.arange(shape[d], d, len(shape))
    return emit.broadcast(cast(numbers, jnp.int32, eqn.params["dtype"]), shape)


@RULES.rule(jaxlink.iota_2x32_shape_p)
def _iota_2x32(ctx: Lowering, eqn) -> list[Any]:
    """The numbers of the elements in row-major order, as high and low words."""
    shape = eqn.params["shape"]
    total: Any = 0
    for d, n in enumerate(shape):
        total = emit.add(total, emit.mul(emit.arange(n, d, len(shape)), math.prod(shape[d + 1 :])))
    low = emit.const(0, jnp.uint32, shape) if isinstance(total, int) else emit.broadcast(total, shape)
    return [emit.like(low, 0), low]


@RULES.rule(jaxlink.empty_p)
def _empty(ctx: Lowering, eqn) -> Any:
    """A value that nobody has set: zero, so that lowering is the same every time."""
    aval = eqn.outvars[0].aval
    return emit.const(0, aval.dtype, aval.shape)


# --- parts of blocks --------------------------------------------------------------------------------------------------
def gathered(x: Any, axis: int, index: Any) -> Any:
    """The elements of a block at `index` along one axis; `index` is a vector of 32-bit integers."""
    shape = list(emit.shape_of(x))
    (n,) = emit.shape_of(index)
    if shape[axis] == 1:
        shape[axis] = n
        return emit.broadcast(x, shape)
    shape[axis] = n
    for d in range(len(shape)):
        if d != axis:
            index = tt.expand_dims(index, d)
    index = emit.broadcast(index, shape)
    if str(emit.scalar_type(x)) != "i1":
        return tt.gather(x, index, axis)
    wide = arith.extui(emit.typed(emit.shape_of(x), ir.IntegerType.get_signless(8)), x)  # masks go as bytes
    return cast(tt.gather(wide, index, axis), jnp.uint8, jnp.bool_)


def steps(start: Any, n: int, stride: int = 1) -> Any:
    """start, start + stride, ... as a vector of n."""
    start = start if isinstance(start, ir.Value) else int(start)  # parameters may hold NumPy's integers
    if n == 1:
        return _single(start)
    return emit.broadcast(emit.add(emit.mul(emit.arange(n, 0, 1), int(stride)), start), (n,))


def _single(start: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return emit.full((1,), start, i32) if not isinstance(start, ir.Value) else emit.broadcast(start, (1,))


@RULES.rule(lax.slice_p)
def _slice(ctx: Lowering, eqn, x) -> Any:
    strides = eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])
    own, shape = emit.shape_of(x), eqn.outvars[0].aval.shape
    for axis, (start, stride, n) in enumerate(zip(eqn.params["start_indices"], strides, shape)):
        if n != own[axis]:
            x = gathered(x, axis, steps(start, n, stride))
    return x


@RULES.rule(lax.dynamic_slice_p)
def _dynamic_slice(ctx: Lowering, eqn, x, *starts) -> Any:
    own, shape = emit.shape_of(x), eqn.outvars[0].aval.shape
    for axis, (start, n) in enumerate(zip(starts, shape)):
        if n != own[axis]:
            start = emit.clamp(cast(start, dtype_of(eqn.invars[1 + axis]), jnp.int32), 0, own[axis] - n)
            x = gathered(x, axis, steps(start, n))
    return x


@RULES.rule(lax.dynamic_update_slice_p)
def _dynamic_update_slice(ctx: Lowering, eqn, x, new, *starts) -> Any:
    own, part = emit.shape_of(x), emit.shape_of(new)
    inside = None
    for axis, (start, n, size) in enumerate(zip(starts, part, own)):
        if n == size:
            continue
        start = emit.clamp(cast(start, dtype_of(eqn.invars[2 + axis]), jnp.int32), 0, size - n)
        new, within = _placed(new, axis, start, size)
        inside = emit.both(inside, within)
    return new if inside is None else emit.select(inside, emit.broadcast(new, own), x)


def _placed(x: Any, axis: int, start: Any, size: int) -> tuple[Any, Any]:
    """`x` moved to start at `start` of an axis of `size` elements; and which elements of that axis it covers."""
    n, rank = emit.shape_of(x)[axis], len(emit.shape_of(x))
    at = emit.sub(emit.arange(size, 0, 1) if size > 1 else _single(0), start)
    inside = arith.cmpi(arith.CmpIPredicate.ult, at, emit.like(at, n))
    for d in range(rank):
        if d != axis:
            inside = tt.expand_dims(inside, d)
    return gathered(x, axis, emit.clamp(at, 0, n - 1)), inside


@RULES.rule(lax.rev_p)
def _rev(ctx: Lowering, eqn, x) -> Any:
    for axis in eqn.params["dimensions"]:
        n = emit.shape_of(x)[axis]
        if n > 1:
            x = gathered(x, axis, steps(n - 1, n, -1))
    return x


@RULES.rule(lax.concatenate_p)
def _concatenate(ctx: Lowering, eqn, *parts) -> Any:
    axis, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    result, start = None, 0
    for x in parts:
        n = emit.shape_of(x)[axis]
        placed, inside = _placed(x, axis, start, shape[axis])
        result = placed if result is None else emit.select(emit.broadcast(inside, shape), placed, result)
        start += n
    return result


@RULES.rule(lax.pad_p)
def _pad(ctx: Lowering, eqn, x, fill) -> Any:
    shape = eqn.outvars[0].aval.shape
    inside = None
    for axis, config in enumerate(eqn.params["padding_config"]):
        low, high, interior = map(int, config)
        n = emit.shape_of(x)[axis]
        if low == high == interior == 0:
            continue
        at = emit.sub(emit.arange(shape[axis], 0, 1) if shape[axis] > 1 else _single(0), low)
        within = arith.cmpi(arith.CmpIPredicate.sge, at, emit.like(at, 0))
        within = emit.both(within, emit.less(at, (n - 1) * (interior + 1) + 1))
        if interior:
            within = emit.both(within, arith.cmpi(arith.CmpIPredicate.eq, _rest(at, interior), emit.like(at, 0)))
            at = emit.divide(emit.clamp(at, 0, (n - 1) * (interior + 1)), interior + 1)
        for d in range(len(shape)):
            if d != axis:
                within = tt.expand_dims(within, d)
        x = gathered(x, axis, emit.clamp(at, 0, n - 1))
        inside = emit.both(inside, within)
    return x if inside is None else emit.select(emit.broadcast(inside, shape), x, emit.broadcast(fill, shape))


def _rest(at: Any, interior: int) -> Any:
    return arith.remsi(at, emit.like(at, interior + 1))


@RULES.rule(lax.tile_p)
def _tile(ctx: Lowering, eqn, x) -> Any:
    for axis, n in enumerate(eqn.params["reps"]):
        size = emit.shape_of(x)[axis]
        if n > 1:
            x = gathered(x, axis, emit.modulo(emit.arange(n * size, 0, 1), size) if size > 1 else steps(0, n))
    return x


@RULES.rule(lax.split_p)
def _split(ctx: Lowering, eqn, x) -> list[Any]:
    axis, start, outs = eqn.params["axis"], 0, []
    for n in eqn.params["sizes"]:
        outs.append(gathered(x, axis, steps(start, n)))
        start += n
    return outs


@RULES.rule(lax.stack_p)
def _stack(ctx: Lowering, eqn, *parts) -> Any:
    axis, shape = eqn.params["axis"], eqn.outvars[0].aval.shape
    result = None
    for k, x in enumerate(parts):
        x = tt.expand_dims(x, axis) if emit.shape_of(x) else emit.reshape(x, (1,))
        x = emit.broadcast(x, shape)
        here = emit.arange(shape[axis], axis, len(shape))
        here = arith.cmpi(arith.CmpIPredicate.eq, here, emit.like(here, k))
        result = x if result is None else emit.select(emit.broadcast(here, shape), x, result)
    return result


@RULES.rule(lax.unstack_p)
def _unstack(ctx: Lowering, eqn, x) -> list[Any]:
    axis = eqn.params["axis"]
    return [emit.reshape(gathered(x, axis, steps(k, 1)), v.aval.shape) for k, v in enumerate(eqn.outvars)]


@RULES.rule(lax.gather_p)
def _gather(ctx: Lowering, eqn, x, indices) -> Any:
    """Gathers along one axis, element by element (`jnp.take_along_axis`) or whole slices (`jnp.take`)."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    axes = numbers.start_index_map
    own, shape = emit.shape_of(x), eqn.outvars[0].aval.shape
    if len(axes) != 1 or sizes[axes[0]] != 1 or not fits(emit.shape_of(indices)):
        raise RULES.unsupported(eqn)
    (axis,) = axes
    batching = numbers.operand_batching_dims
    others = [d for d in range(len(own)) if d != axis and d not in batching]
    if any(sizes[d] != own[d] for d in others):
        raise RULES.unsupported(eqn)
    index = cast(emit.reshape(indices, emit.shape_of(indices)[:-1]), dtype_of(eqn.invars[1]), jnp.int32)
    raw, limit = index, own[axis]
    index = emit.clamp(index, 0, limit - 1)
    if batching:
        if others or tuple(batching) != tuple(d for d in range(len(own)) if d != axis) or len(shape) != len(own):
            raise RULES.unsupported(eqn)
        if tuple(numbers.start_indices_batching_dims) != tuple(batching):
            raise RULES.unsupported(eqn)
        result = tt.gather(x, emit.broadcast(index, shape), axis)
        return _filled(eqn, result, raw, limit)
    rank = len(emit.shape_of(index))
    if rank > 1 or tuple(numbers.offset_dims) != tuple(d for d in range(len(shape)) if d != axis or rank == 0):
        raise RULES.unsupported(eqn)
    if rank == 0:
        return _filled(eqn, emit.reshape(gathered(x, axis, emit.broadcast(index, (1,))), shape), raw, limit)
    result = gathered(x, axis, index)
    for d in range(len(shape)):
        if d != axis:
            raw = tt.expand_dims(raw, d)
    return _filled(eqn, result, raw, limit)


def _filled(eqn: Any, result: Any, index: Any, limit: int) -> Any:
    """NaN (or the like) where an index is out of range, if the mode asks for it."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return result
    dtype, fill = dtype_of(eqn.outvars[0]), eqn.params["fill_value"]
    if fill is None:
        signed = emit.is_signed(dtype)
        fill = np.nan if emit.is_float(dtype) else jnp.iinfo(dtype).min if signed else True
        fill = jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.unsignedinteger) else fill
    inside = arith.cmpi(arith.CmpIPredicate.ult, index, emit.like(index, limit))
    shape = emit.shape_of(result)
    return emit.select(emit.broadcast(inside, shape), result, emit.const(fill, dtype, shape))


# --- promises ---------------------------------------------------------------------------------------------------------
def promise(x: Any, name: str, values: Sequence[int]) -> Any:
    """Attach what the user promises of a value (`tt.divisibility`, `tt.contiguity`) to the operation that makes it."""
    owner = x.owner
    if isinstance(owner, ir.Block) or (not emit.shape_of(x) and name == "tt.contiguity"):
        return x
    kind = ir.RankedTensorType.get((len(values),), ir.IntegerType.get_signless(32))
    numbers = np.array(values, np.int32)
    owner.attributes[name] = ir.DenseElementsAttr.get(numbers, type=kind.element_type)
    return x


@RULES.rule(ops.multiple_of_p)
def _multiple_of(ctx: Lowering, eqn, x) -> Any:
    rank = max(len(emit.shape_of(x)), 1)
    values = eqn.params["values"]
    return promise(x, "tt.divisibility", values if len(values) == rank else values[:1] * rank)


@RULES.rule(max_contiguous_p)
def _max_contiguous(ctx: Lowering, eqn, x) -> Any:
    rank = max(len(emit.shape_of(x)), 1)
    values = eqn.params["values"]
    if len(values) != rank and len(values) != 1:
        raise refusal(ValueError, f"max_contiguous got {len(values)} values for {rank} dimensions.", eqn)
    return promise(x, "tt.contiguity", values if len(values) == rank else values * rank)
