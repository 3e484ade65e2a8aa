"""Rules of operations that need all of a dimension at once: reductions, running sums, sorts and matrix products.

Their blocks cover these dimensions exactly. A block that is longer than the array would bring elements into the
result that are not there, so it is refused.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from palladion.language.fuser.passes import Program
from palladion.language.fuser.rules import NotFusible, rule
from palladion.language.fuser.transforms import BlockIndexTransform, block

_REDUCTIONS = [lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p, lax.reduce_prod_p]
_REDUCTIONS += [lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p, lax.argmax_p, lax.argmin_p]
_RUNNING = [lax.cumsum_p, lax.cumprod_p, lax.cummax_p, lax.cummin_p, lax.cumlogsumexp_p]


def _require_whole(eqn: Any, found: BlockIndexTransform, shape: Any, axes: Any) -> None:
    for d in axes:
        dim = (found.block_shape or ())[d]
        if dim != shape[d] and not (dim is None and shape[d] == 1):
            raise NotFusible(
                eqn,
                f"`{eqn.primitive}` needs all {shape[d]} elements of dimension {d} at once, but blocks have {dim}.",
                f"use a block of {shape[d]} in this dimension",
            )


# --- reductions -------------------------------------------------------------------------------------------------------
def _reduce_pull(ctx, eqn, outs):
    (out,), shape, axes = outs, eqn.invars[0].aval.shape, eqn.params["axes"]
    place = {d: n for n, d in enumerate(d for d in range(len(shape)) if d not in axes)}
    dims = [out.block_shape[place[d]] if d in place else n for d, n in enumerate(shape)]
    return [block(out, dims, lambda i, _: [i[place[d]] if d in place else 0 for d in range(len(shape))])]


def _reduce_push(ctx, eqn, ins):
    (found,), shape, axes = ins, eqn.invars[0].aval.shape, eqn.params["axes"]
    _require_whole(eqn, found, shape, axes)
    kept = [d for d in range(len(shape)) if d not in axes]
    return [block(found, [found.block_shape[d] for d in kept], lambda i, _: [i[d] for d in kept])]


def _reduce_run(ctx: Program, eqn, values):
    full = ctx.full(eqn.invars[0], values[0])
    return [ctx.fit(eqn.outvars[0], eqn.primitive.bind(full, **eqn.primitive.get_bind_params(eqn.params)))]


rule(*_REDUCTIONS, pull=_reduce_pull, push=_reduce_push, run=_reduce_run)


# --- along one dimension, which stays -------------------------------------------------------------------------------
def _along(axis_name: str) -> dict[str, Any]:
    def move(eqn, blocks, shape):
        axis = eqn.params[axis_name]
        for found in blocks:
            if found is not None:
                _require_whole(eqn, found, shape, [axis])
        return blocks

    def pull(ctx, eqn, outs):
        blocks = move(eqn, outs, eqn.outvars[0].aval.shape)
        first, *rest = [b for b in blocks if b is not None]
        if any(ctx.merged(first, other) is None for other in rest):
            raise NotFusible(eqn, f"The results of `{eqn.primitive}` are used in different blocks.", "use equal blocks")
        return [first] * len(eqn.invars)  # a sort of several operands moves them together

    def push(ctx, eqn, ins):
        if None in ins:
            raise NotFusible(
                eqn, f"`{eqn.primitive}` sorts the kernel's result along with another array.", "sort outside"
            )
        return move(eqn, ins, eqn.invars[0].aval.shape)

    def run(ctx: Program, eqn, values):
        full = [ctx.full(a, v) for a, v in zip(eqn.invars, values)]
        outs = eqn.primitive.bind(*full, **eqn.primitive.get_bind_params(eqn.params))
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [ctx.fit(v, o) if v in ctx.blocks else None for v, o in zip(eqn.outvars, outs)]

    return dict(pull=pull, push=push, run=run)


rule(*_RUNNING, **_along("axis"))
rule(lax.sort_p, **_along("dimension"))


# --- matrix products ------------------------------------------------------------------------------------------------
def _operand_places(eqn: Any) -> tuple[list[dict[int, int]], list[Any]]:
    """For each operand: which dimension of the result each of its kept dimensions is; and the contracted ones."""
    contracted, batch = eqn.params["dimension_numbers"]
    places, following = [], len(batch[0])
    for side in (0, 1):
        free = [d for d in range(len(eqn.invars[side].aval.shape)) if d not in (*contracted[side], *batch[side])]
        place = {d: n for n, d in enumerate(batch[side])} | {d: following + n for n, d in enumerate(free)}
        following += len(free)
        places.append(place)
    return places, contracted


def _dot_pull(ctx, eqn, outs):
    (out,), (places, _) = outs, _operand_places(eqn)

    def operand(place, shape):
        dims = [out.block_shape[place[d]] if d in place else n for d, n in enumerate(shape)]
        return block(out, dims, lambda i, _: [i[place[d]] if d in place else 0 for d in range(len(shape))])

    return [operand(place, a.aval.shape) for place, a in zip(places, eqn.invars)]


def _dot_push(ctx, eqn, ins):
    places, contracted = _operand_places(eqn)
    side = 0 if ins[0] is not None else 1
    found, shape = ins[side], eqn.outvars[0].aval.shape
    if ins[1 - side] is not None or eqn.params["dimension_numbers"][1][0]:
        raise NotFusible(
            eqn, "A product of the kernel's result with itself, or with batches, is not fused.", "do it outside"
        )
    _require_whole(eqn, found, eqn.invars[side].aval.shape, contracted[side])
    source = {n: d for d, n in places[side].items()}
    dims = [found.block_shape[source[n]] if n in source else size for n, size in enumerate(shape)]
    return [block(found, dims, lambda i, _: [i[source[n]] if n in source else 0 for n in range(len(shape))])]


def _dot_run(ctx: Program, eqn, values):
    lhs, rhs = (ctx.full(a, v) for a, v in zip(eqn.invars, values))
    names = ("precision", "preferred_element_type")
    out = lax.dot_general(lhs, rhs, eqn.params["dimension_numbers"], **{n: eqn.params[n] for n in names})
    return [ctx.fit(eqn.outvars[0], out)]


rule(lax.dot_general_p, pull=_dot_pull, push=_dot_push, run=_dot_run)
