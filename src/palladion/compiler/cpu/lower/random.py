"""Threefry: the array program that JAX runs for it (additions, rotations and exclusive ors), lowered like any other.

What is done with keys has become operations on their words before lowering (parts.py).
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from palladion import jaxlink
from palladion.compiler.cpu.lower.special import run_function
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering


@RULES.rule(jaxlink.threefry2x32_p)
def _threefry(ctx: Lowering, eqn, *values: Lazy) -> list[Lazy]:
    shape = jnp.broadcast_shapes(*(v.shape for v in values))
    outs = run_function(ctx, jaxlink.threefry2x32_lowering, *values)
    assert all(o.shape == shape for o in outs)
    return outs


@RULES.rule(jaxlink.iota_2x32_shape_p)
def _iota_2x32(ctx: Lowering, eqn) -> list[Lazy]:
    """The numbers of the elements in row-major order, as high and low words."""
    shape = eqn.params["shape"]

    def words():
        count = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        return jnp.zeros(shape, jnp.uint32), count

    return run_function(ctx, words)
