"""Random numbers inside a kernel: JAX's generators, run on their key data.

A PRNG key is held as the integers that JAX keeps in it. Each operation on keys is traced as the array program that
JAX itself runs for it (threefry: additions, rotations and exclusive ors) and lowered like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering


def _run(ctx: Lowering, function: Callable, *values: Lazy) -> Any:
    """Lower what a JAX function of arrays does."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values))
    for v in values:
        ctx.keep(v)
    return ctx.run(getattr(jaxpr, "jaxpr", jaxpr), list(values))


def _over_keys(function: Callable, n_batch: int) -> Callable:
    for _ in range(n_batch):
        function = jax.vmap(function)
    return function


@RULES.rule(jaxlink.random_seed_p)
def _seed(ctx: Lowering, eqn, seeds: Lazy) -> Lazy:
    (data,) = _run(ctx, _over_keys(eqn.params["impl"].seed, len(seeds.shape)), seeds)
    return data


@RULES.rule(jaxlink.random_wrap_p, jaxlink.random_unwrap_p)
def _same_data(ctx: Lowering, eqn, data: Lazy) -> Lazy:
    return data


@RULES.rule(jaxlink.random_bits_p)
def _bits(ctx: Lowering, eqn, data: Lazy) -> Lazy:
    impl, keys = _impl(eqn), eqn.invars[0].aval

    def bits(key):
        return impl.random_bits(key, eqn.params["bit_width"], eqn.params["shape"])

    (out,) = _run(ctx, _over_keys(bits, keys.ndim), data)
    return out


@RULES.rule(jaxlink.random_fold_in_p)
def _fold_in(ctx: Lowering, eqn, data: Lazy, msgs: Lazy) -> Lazy:
    impl, keys = _impl(eqn), eqn.invars[0].aval

    def fold(key, msg):
        return impl.fold_in(key, msg)

    (out,) = _run(ctx, _over_keys(fold, keys.ndim), data, msgs)
    return out


@RULES.rule(jaxlink.random_split_p)
def _split(ctx: Lowering, eqn, data: Lazy) -> Lazy:
    impl, keys = _impl(eqn), eqn.invars[0].aval
    (out,) = _run(ctx, _over_keys(lambda key: impl.split(key, eqn.params["shape"]), keys.ndim), data)
    return out


def _impl(eqn: Any) -> Any:
    return eqn.invars[0].aval.dtype._impl


@RULES.rule(jaxlink.threefry2x32_p)
def _threefry(ctx: Lowering, eqn, *values: Lazy) -> list[Lazy]:
    shape = jnp.broadcast_shapes(*(v.shape for v in values))
    outs = _run(ctx, jaxlink.threefry2x32_lowering, *values)
    assert all(o.shape == shape for o in outs)
    return outs


@RULES.rule(jaxlink.iota_2x32_shape_p)
def _iota_2x32(ctx: Lowering, eqn) -> list[Lazy]:
    """The numbers of the elements in row-major order, as high and low words."""
    shape = eqn.params["shape"]

    def words():
        count = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        return jnp.zeros(shape, jnp.uint32), count

    return _run(ctx, words)
