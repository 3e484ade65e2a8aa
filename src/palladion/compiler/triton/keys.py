"""Rules: random numbers from JAX's keys. A key is its words, uint32, along a last dimension that JAX does not show.

What is done with a key is arithmetic on its words, spelled out by JAX's own implementation of that kind of keys, so
that a kernel draws the same bits on every target. Keys that draw from a TPU core's generator have no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.triton.functions import run_traced
from palladion.compiler.triton.lowering import KEY_RULES, RULES, Lowering, refusal
from palladion.language.tpu import random


def _words(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of keys as words."""
    return jax.ShapeDtypeStruct((*aval.shape, *aval.dtype._impl.key_shape), np.dtype("uint32"))


RULES.rule(jaxlink.random_wrap_p, jaxlink.random_unwrap_p)(lambda ctx, eqn, x: x)


def _on_words(eqn: Any, impl: Any, name: str, **params: Any) -> Callable[..., Any]:
    """A function of an implementation of keys, for each key of the first operand."""
    if impl.name == random.pallas_keys:
        headline = "Pallas keys draw from the generator of a TPU core, which a GPU does not have."
        raise refusal(NotImplementedError, headline, eqn, "make the key with jax.random.key(seed)")
    function = getattr(impl, name)

    def one(words, *rest):
        return function(words, *rest, *params.values())

    for _ in eqn.invars[0].aval.shape:
        one = jax.vmap(one)
    return one


@RULES.rule(jaxlink.random_seed_p)
def _seed(ctx: Lowering, eqn, seeds) -> Any:
    aval = eqn.invars[0].aval
    run = _on_words(eqn, eqn.params["impl"], "seed")
    return run_traced(ctx, run, [jax.ShapeDtypeStruct(aval.shape, aval.dtype)], seeds)[0]


@RULES.rule(jaxlink.random_fold_in_p)
def _fold_in(ctx: Lowering, eqn, keys, data) -> Any:
    aval, number = (v.aval for v in eqn.invars)
    types = [_words(aval), jax.ShapeDtypeStruct(number.shape, number.dtype)]
    return run_traced(ctx, _on_words(eqn, aval.dtype._impl, "fold_in"), types, keys, data)[0]


@RULES.rule(jaxlink.random_split_p)
def _split(ctx: Lowering, eqn, keys) -> Any:
    aval = eqn.invars[0].aval
    run = _on_words(eqn, aval.dtype._impl, "split", shape=eqn.params["shape"])
    return run_traced(ctx, run, [_words(aval)], keys)[0]


@RULES.rule(jaxlink.random_bits_p)
def _random_bits(ctx: Lowering, eqn, keys) -> Any:
    aval, params = eqn.invars[0].aval, eqn.params
    run = _on_words(eqn, aval.dtype._impl, "random_bits", bit_width=params["bit_width"], shape=params["shape"])
    return run_traced(ctx, run, [_words(aval)], keys)[0]


# --- arrays of keys ---------------------------------------------------------------------------------------------------
def _slice(eqn: Any) -> Callable[..., Any]:
    p, shape = eqn.params, eqn.invars[0].aval.dtype._impl.key_shape
    steps = (*(p["strides"] or (1,) * len(p["start_indices"])), *(1,) * len(shape))
    return lambda x: lax.slice(x, (*p["start_indices"], *(0,) * len(shape)), (*p["limit_indices"], *shape), steps)


def _dynamic_slice(eqn: Any) -> Callable[..., Any]:
    p, shape = eqn.params, eqn.invars[0].aval.dtype._impl.key_shape
    return lambda x, *at: lax.dynamic_slice(x, (*at, *(np.int32(0),) * len(shape)), (*p["slice_sizes"], *shape))


def _unstack(eqn: Any) -> Callable[..., Any]:
    return lambda x: lax.unstack(x, axis=eqn.params["axis"])


# How the words of keys move when the keys do: an operation on keys -> a function of their words.
_MOVED: dict[Any, Callable[[Any], Callable[..., Any]]] = {
    lax.slice_p: _slice,
    lax.dynamic_slice_p: _dynamic_slice,
    lax.unstack_p: _unstack,
    lax.squeeze_p: lambda eqn: lambda x: lax.squeeze(x, eqn.params["dimensions"]),
    lax.reshape_p: lambda eqn: lambda x: x.reshape(_words(eqn.outvars[0].aval).shape),
}


def _moved(function: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    def rule(ctx: Lowering, eqn, *operands) -> list[Any]:
        avals = [v.aval for v in eqn.invars]
        types = [_words(a) if jaxlink.is_opaque(a.dtype) else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return run_traced(ctx, function(eqn), types, *operands)

    return rule


_OF_KEYS = (jaxlink.random_unwrap_p, jaxlink.random_fold_in_p, jaxlink.random_split_p, jaxlink.random_bits_p)
KEY_RULES.update({p: RULES.get(p) for p in _OF_KEYS})
KEY_RULES.update({p: _moved(f) for p, f in _MOVED.items()})
