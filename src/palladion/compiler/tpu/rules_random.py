"""Random numbers from keys: a key is its words, and what is done with it is arithmetic on them.

`pltpu.prng_seed` and `prng_random_bits`, the generator of the core, are in `rules_kernel`. Pallas keys draw from that
generator too: the core is seeded with the key's words before each draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxlib.mosaic.python import tpu

from palladion import jaxlink
from palladion.compiler.tpu import build
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import Refusal, i32, typed
from palladion.compiler.tpu.rules_casts import convert
from palladion.language.tpu import random


def _words(aval: Any) -> Any:
    """The type of keys as words."""
    return jaxlink.ShapedArray((*aval.shape, *aval.dtype._impl.key_shape), np.dtype("uint32"))


RULES.rule(jaxlink.random_wrap_p, jaxlink.random_unwrap_p)(lambda ev, eqn, x: x)


@RULES.rule(jaxlink.threefry2x32_p)
def _threefry(ev: Emitter, eqn, *words):
    return ev.inline(jaxlink.threefry2x32_lowering, *words, avals=[v.aval for v in eqn.invars])


@functools.cache
def _numbers(shape: tuple[int, ...]) -> Callable:
    def run():
        place = jnp.zeros(shape, jnp.uint32)
        for d, n in enumerate(shape):
            place = place * np.uint32(n) + jax.lax.broadcasted_iota(jnp.uint32, shape, d)
        return jnp.zeros(shape, jnp.uint32), place

    return run


@RULES.rule(jaxlink.iota_2x32_shape_p)
def _iota_2x32(ev: Emitter, eqn):
    """The numbers of the elements in row-major order, as high and low words."""
    return ev.inline(_numbers(tuple(eqn.params["shape"])), avals=[])


@functools.cache
def _on_words(impl: Any, name: str, rank: int, **params: Any) -> Callable:
    function = getattr(impl, name)

    def one(words, *rest):
        return function(words, *rest, *params.values())

    for _ in range(rank):
        one = jax.vmap(one)
    return one


@RULES.rule(jaxlink.random_bits_p)
def _random_bits(ev: Emitter, eqn, keys):
    aval, params = eqn.invars[0].aval, eqn.params
    impl, out = aval.dtype._impl, eqn.outvars[0].aval
    if impl.name == random.pallas_keys:
        if aval.shape:
            raise Refusal("an array of Pallas keys draws no bits.", "one key at a time: jax.random.bits(keys[i], …)")
        return _hardware_bits(keys, out)
    run = _on_words(impl, "random_bits", len(aval.shape), bit_width=params["bit_width"], shape=params["shape"])
    return ev.inline(run, keys, avals=[_words(aval)])[0]


def _hardware_bits(key: ir.Value, out: Any) -> ir.Value:
    seeds = [vector.extract(key, [], [0, n]) for n in range(2)]
    tpu.prng_set_seed_32(seeds)
    shape = tuple(out.shape) if len(out.shape) > 1 else (1,) * (2 - len(out.shape)) + tuple(out.shape)
    bits = build.reshape(tpu.prng_random_bits(typed(shape, i32())), out.shape)
    return convert(bits, np.dtype("uint32"), out.dtype)


@RULES.rule(jaxlink.random_fold_in_p)
def _fold_in(ev: Emitter, eqn, keys, data):
    aval = eqn.invars[0].aval
    run = _on_words(aval.dtype._impl, "fold_in", len(aval.shape))
    return ev.inline(run, keys, data, avals=[_words(aval), eqn.invars[1].aval])[0]


@RULES.rule(jaxlink.random_seed_p)
def _seed(ev: Emitter, eqn, seeds):
    aval = eqn.invars[0].aval
    run = _on_words(eqn.params["impl"], "seed", len(aval.shape))
    return ev.inline(run, seeds, avals=[aval])[0]


@RULES.rule(jaxlink.random_split_p)
def _split(ev: Emitter, eqn, keys):
    aval = eqn.invars[0].aval
    run = _on_words(aval.dtype._impl, "split", len(aval.shape), shape=eqn.params["shape"])
    return ev.inline(run, keys, avals=[_words(aval)])[0]
