"""Rules of operations that compute each element from elements at the same place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from palladion.language.fuser import graph as graphs
from palladion.language.fuser.passes import Program, reshaped
from palladion.language.fuser.rules import NotFusible, rule
from palladion.language.fuser.transforms import SCALAR, BlockIndexTransform, block, canonical, ref_shape

_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul mulhi ne neg nextafter not
    one_minus_square or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
"""
PRIMITIVES = [getattr(lax, f"{name}_p") for name in _NAMES.split() if hasattr(lax, f"{name}_p")]


def _spreads(operand: Any, shape: tuple[int, ...]) -> list[bool]:
    """For each dimension of the result, whether one element of the operand stands for all."""
    return [m != n for m, n in zip(operand.aval.shape, shape)]


def _pull(ctx: Any, eqn: Any, outs: list[Any]) -> list[Any]:
    """Operands have the result's block, one element where they are spread out; scalars have none."""
    (out,) = outs
    shape = eqn.outvars[0].aval.shape

    def operand(a):
        if not a.aval.shape:
            return SCALAR
        spread = _spreads(a, shape)
        if not any(spread):
            return out
        dims = [(None if d is None else 1) if s else d for s, d in zip(spread, out.block_shape)]
        return block(out, dims, lambda i, _: [0 if s else x for s, x in zip(spread, i)])

    return [operand(a) for a in eqn.invars]


def _push(ctx: Any, eqn: Any, ins: list[Any]) -> list[Any]:
    """Each dimension's block comes from an operand that has it; all operands that have blocks must agree."""
    shape = eqn.outvars[0].aval.shape
    found = [(b, _spreads(a, shape)) for a, b in zip(eqn.invars, ins) if b is not None and a.aval.shape]
    if not found:
        return [None if shape else SCALAR]
    sources = [next((b for b, spread in found if not spread[d]), None) for d in range(len(shape))]

    def combined(own: BlockIndexTransform, spread: list[bool]) -> BlockIndexTransform:
        """An operand's block, with the others' in the dimensions where it has one element for all."""
        take = [source if s else own for s, source in zip(spread, sources)]
        dims = [n if t is None else (t.block_shape or ())[d] for d, (t, n) in enumerate(zip(take, shape))]

        def transform(*roots):
            return tuple(0 if t is None else t.block_index_transform(*roots)[d] for d, t in enumerate(take))

        return canonical(own.replace(block_shape=tuple(dims), block_index_transform=transform), shape)

    first, *rest = [combined(*b) for b in found]
    for other in rest:
        merged = ctx.merged(first, other)
        if merged is None:
            raise NotFusible(
                eqn,
                f"`{eqn.primitive}` gets operands in different blocks, so the block of its result is not known.",
                "use the kernel's result in one arrangement only, or transpose outside the fused function",
            )
        first = merged
    return [first]


def _run(ctx: Program, eqn: Any, values: list[Any]) -> list[Any]:
    """The same operation on blocks."""
    var = eqn.outvars[0]
    operands = [v if graphs.is_literal(a) else _spread(ctx, a, v, var) for a, v in zip(eqn.invars, values)]
    if eqn.primitive is lax.convert_element_type_p:  # its parameters may name a sharding of the whole array
        return [lax.convert_element_type(operands[0], eqn.params["new_dtype"])]
    return [eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))]


def _spread(ctx: Program, operand: Any, value: Any, var: Any) -> Any:
    """An operand's block in the shape of the result's: not every compiler takes unlike shapes."""
    sizes, shape = ctx.sizes(var), ref_shape(ctx.dims(var))
    if np.shape(value) == shape:
        return value
    if not operand.aval.shape:
        return lax.broadcast(value, shape)
    if np.size(value) == math.prod(shape):
        return reshaped(value, shape)
    return reshaped(lax.broadcast_in_dim(ctx.full(operand, value), sizes, range(len(sizes))), shape)


rule(*PRIMITIVES, pull=_pull, push=_push, run=_run)
