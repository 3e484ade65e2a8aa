"""Operations that are short programs: functions that JAX spells out in simpler ones, random numbers, total orders.

A PRNG key is its words (uint32) here, and what is done with it is arithmetic on them. The generators give the same
numbers as outside of kernels.
"""

# ruff: noqa: E501 (C++ in strings)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.gpu.dtypes import constant, kind
from palladion.compiler.gpu.rules_elementwise import expression
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar, Splat
from palladion.language.tpu import hints
from palladion.rules import present


def inline(unit: Unit, function: Callable, values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Compile what a JAX function of arrays does.

    Arguments:
      function: of arrays. values: its operands. avals: their types.
    """
    wide = any(jnp.dtype(a.dtype).itemsize == 8 for a in avals)
    with jax.enable_x64(wide or jax.config.jax_enable_x64):  # pyright: ignore[reportAttributeAccessIssue]
        traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return unit.run(traced, values)


def _plain(function: Callable) -> Callable:
    def rule(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
        return inline(unit, function, values, [v.aval for v in eqn.invars])

    return rule


for _primitive, _function in jaxlink.special_functions().items():
    RULES.rule(_primitive)(_plain(_function))

RULES.rule(*present("one_minus_square_p"))(_plain(lambda x: (1 - x) * (1 + x)))


def _horner(x: Any, *coefficients: Any) -> Any:
    """The coefficients begin with that of the lowest power."""
    total = coefficients[-1] + jnp.zeros_like(x)
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


RULES.rule(*present("polynomial_p"))(_plain(_horner))

# By reflection to positive numbers, the recurrence to large ones, and the asymptotic series (DLMF 5.5, 5.11.2).
_DIGAMMA = r"""
__device__ double digamma(double x) {
  if (x == 0.0) return copysign(__longlong_as_double(0x7ff0000000000000ll), -x);
  double sum = 0.0;
  if (x < 0.0) {
    if (x == floor(x)) return __longlong_as_double(0x7ff8000000000000ll);
    sum = -3.14159265358979323846 / tan(3.14159265358979323846 * (x - rint(x)));
    x = 1.0 - x;
  }
  while (x < 10.0) { sum -= 1.0 / x; x += 1.0; }
  const double w = 1.0 / (x * x);
  const double series = w * (1.0 / 12 - w * (1.0 / 120 - w * (1.0 / 252 - w * (1.0 / 240 - w * (1.0 / 132 - w * (691.0 / 32760 - w / 12))))));
  return sum + log(x) - 0.5 / x - series;
}
"""

# The power series, all of whose terms have one sign, and the asymptotic one, until terms stop to count (DLMF 10.25.2,
# 10.40.1).
_BESSEL_I1E = r"""
__device__ double bessel_i1e(double x) {
  const double size = fabs(x);
  if (!(size < 30.0)) {
    if (size != size || size > 1e300) return size != size ? x : copysign(0.0, x);
    double term = 1.0, sum = 1.0;
    for (int k = 1; k < 40; ++k) {
      term *= -(4.0 - (2 * k - 1) * (2 * k - 1)) / (k * 8.0 * size);
      sum += term;
    }
    return copysign(sum / sqrt(6.283185307179586 * size), x);
  }
  double term = 0.5 * size, sum = term;
  for (int k = 1; k < 80; ++k) { term *= 0.25 * size * size / (k * (k + 1.0)); sum += term; }
  return copysign(sum * exp(-size), x);
}
"""


def _in_double(name: str, text: str) -> Callable:
    """A rule for a device function of double."""

    def rule(unit: Unit, eqn: Any, x: Any) -> Any:
        of = kind(eqn.outvars[0].aval.dtype)
        unit.function(name, text)
        back = "" if of.bits == 64 else "(float)"
        return unit.elementwise(eqn, lambda a: f"{of.c}({back}{name}((double){expression(of, a)}))", x)

    return rule


RULES.rule(lax.digamma_p)(_in_double("digamma", _DIGAMMA))
RULES.rule(lax.bessel_i1e_p)(_in_double("bessel_i1e", _BESSEL_I1E))


# --- keys -----------------------------------------------------------------------------------------------------------
RULES.rule(jaxlink.random_wrap_p, jaxlink.random_unwrap_p)(lambda unit, eqn, x: x)


def _words(aval: Any) -> Any:
    """The type of keys as words."""
    return jax.ShapeDtypeStruct((*aval.shape, *aval.dtype._impl.key_shape), np.dtype("uint32"))


@RULES.rule(jaxlink.threefry2x32_p)
def _threefry(unit: Unit, eqn: Any, *words: Any) -> list[Any]:
    rounds = functools.partial(jaxlink.threefry2x32_lowering, use_rolled_loops=False)
    return inline(unit, rounds, words, [v.aval for v in eqn.invars])


@RULES.rule(jaxlink.iota_2x32_shape_p)
def _iota_2x32(unit: Unit, eqn: Any) -> list[Any]:
    """The numbers of the elements in row-major order, as high and low words."""
    shape = tuple(eqn.params["shape"])

    def run() -> Any:
        place = jnp.zeros(shape, jnp.uint32)
        for d, n in enumerate(shape):
            place = place * np.uint32(n) + lax.broadcasted_iota(jnp.uint32, shape, d)
        return jnp.zeros(shape, jnp.uint32), place

    if not math.prod(shape) < 2**32:
        raise unit.refuse(f"Random bits for an array of {math.prod(shape):,} elements are not compiled.")
    return inline(unit, run, [], [])


def _of_keys(impl: Any, name: str, rank: int, **params: Any) -> Callable:
    function = getattr(impl, name)

    def one(words: Any, *rest: Any) -> Any:
        return function(words, *rest, *params.values())

    for _ in range(rank):
        one = jax.vmap(one)
    return one


@RULES.rule(jaxlink.random_bits_p)
def _random_bits(unit: Unit, eqn: Any, keys: Any) -> Any:
    aval, params = eqn.invars[0].aval, eqn.params
    run = _of_keys(
        aval.dtype._impl, "random_bits", len(aval.shape), bit_width=params["bit_width"], shape=params["shape"]
    )
    return inline(unit, run, [keys], [_words(aval)])


@RULES.rule(jaxlink.random_fold_in_p)
def _fold_in(unit: Unit, eqn: Any, keys: Any, data: Any) -> Any:
    aval = eqn.invars[0].aval
    run = _of_keys(aval.dtype._impl, "fold_in", len(aval.shape))
    return inline(unit, run, [keys, data], [_words(aval), eqn.invars[1].aval])


@RULES.rule(jaxlink.random_seed_p)
def _seed(unit: Unit, eqn: Any, seeds: Any) -> Any:
    aval = eqn.invars[0].aval
    return inline(unit, _of_keys(eqn.params["impl"], "seed", len(aval.shape)), [seeds], [aval])


@RULES.rule(jaxlink.random_split_p)
def _split(unit: Unit, eqn: Any, keys: Any) -> Any:
    aval = eqn.invars[0].aval
    run = _of_keys(aval.dtype._impl, "split", len(aval.shape), shape=eqn.params["shape"])
    return inline(unit, run, [keys], [_words(aval)])


# --- total orders ---------------------------------------------------------------------------------------------------
ORDERED = r"""
// Integers in the order of floating-point numbers, -0 below 0 and NaNs at the ends.
template <class T> __device__ __forceinline__ auto ordered(T x) {
  if constexpr (sizeof(T) == 8) { const i64 b = bit_cast<i64>(x); return b ^ ((b >> 63) & 0x7fffffffffffffffll); }
  else if constexpr (sizeof(T) == 4) { const int b = bit_cast<int>(x); return b ^ ((b >> 31) & 0x7fffffff); }
  else if constexpr (sizeof(T) == 2) { const int b = bit_cast<i16>(x); return b ^ ((b >> 31) & 0x7fff); }
  else { const int b = bit_cast<i8>(x); return b ^ ((b >> 31) & 0x7f); }
}
"""


def _total(sign: str) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
        of = kind(eqn.invars[0].aval.dtype)
        if of.family != "float":
            return unit.elementwise(eqn, lambda a, b: f"({a} {sign} {b})", x, y)
        unit.function("ordered", ORDERED)
        return unit.elementwise(eqn, lambda a, b: f"(ordered({a}) {sign} ordered({b}))", x, y)

    return rule


for _name, _sign in (("eq_to_p", "=="), ("lt_to_p", "<"), ("le_to_p", "<=")):
    RULES.rule(*present(_name))(_total(_sign))


# --- without work ---------------------------------------------------------------------------------------------------
@RULES.rule(jaxlink.empty_p)
def _empty(unit: Unit, eqn: Any) -> Any:
    aval = eqn.outvars[0].aval
    text = constant(0, aval.dtype)
    return Splat(text, aval.dtype, tuple(aval.shape)) if aval.shape else Scalar(text, aval.dtype)


RULES.rule(hints.touch_p, hints.trace_value_p)(lambda unit, eqn, *operands: [])
RULES.rule(hints.with_memory_space_constraint_p)(lambda unit, eqn, x: x)
