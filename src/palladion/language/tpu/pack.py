"""Narrow elements in wide words: packing, unpacking, 6-bit floats, and stochastic rounding. All plain array semantics.

The packing is interleaved: array i of those packed sits in bits [i * w, (i + 1) * w) of each word, w being the width of
the narrow dtype. 6-bit elements are kept as two arrays, of their upper two and of their lower four bits.

Source: the public documentation of `jax.experimental.pallas.tpu`; for what it leaves open (how f32 rounds to bf16 when
packed: to nearest even; which random bits round: the upper ones) the choice is stated at the function.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language.dtypes import element_bits

__all__ = [
    "join_bits",
    "pack_elementwise",
    "pack_fp6",
    "split_bits",
    "stochastic_round",
    "unpack_elementwise",
    "unpack_fp6",
]


# --- packing ----------------------------------------------------------------------------------------------------------
def pack_elementwise(xs: Sequence[jax.Array], *, packed_dtype: Any) -> jax.Array:
    """Several arrays as one: each word of the result holds one element of every array, the first one lowest.

    Integers lose their upper bits; float32 becomes bfloat16, rounded to nearest even.

    Arguments:
      xs: arrays of the same shape and dtype, as many as narrow elements fill a word.
      packed_dtype: the narrow dtype: bfloat16 of float32 arrays, an integer dtype of integer arrays.

    Returns:
      an array of the same shape, of unsigned integers as wide as the elements of `xs`.

    Raises:
      ValueError: shapes, dtypes or the number of arrays do not fit.
    """
    xs = [jnp.asarray(x) for x in xs]
    if not xs or any(x.shape != xs[0].shape or x.dtype != xs[0].dtype for x in xs):
        found = ", ".join(map(kind_of, xs)) or "no array"
        raise mistake(
            ValueError,
            f"pltpu.pack_elementwise packs arrays of one shape and dtype, not {found}.",
            hint="convert them first: x.astype(y.dtype)",
        )
    wide, narrow = _pair("pack_elementwise", xs[0].dtype, packed_dtype)
    count = element_bits(wide) // element_bits(narrow)
    if len(xs) != count:
        raise mistake(
            ValueError,
            f"pltpu.pack_elementwise got {count_of(len(xs), 'array')}, but {count} {narrow} fill one {wide}.",
            hint=f"pass {count} arrays",
        )
    word, width = _unsigned(wide), element_bits(narrow)
    mask = np.array((1 << width) - 1, word)
    parts = [(_narrowed(x, narrow, word) & mask) << np.array(i * width, word) for i, x in enumerate(xs)]
    return functools.reduce(operator.or_, parts)


def _narrowed(x: jax.Array, narrow: Any, word: Any) -> jax.Array:
    """`x` in words, the narrow element in the lowest bits of each."""
    if jnp.issubdtype(narrow, jnp.floating):
        return lax.bitcast_convert_type(x.astype(narrow), _unsigned(narrow)).astype(word)
    return lax.bitcast_convert_type(x, word)


def unpack_elementwise(x: jax.Array, *, index: int, packed_dtype: Any, unpacked_dtype: Any) -> jax.Array:
    """One of the arrays that `pack_elementwise` packed.

    Arguments:
      x: packed words, of any integer dtype.
      index: which array, counted from the lowest bits; a Python int.
      packed_dtype: the narrow dtype. A signed one is extended by its sign, an unsigned one by zeros.
      unpacked_dtype: the dtype of the result, as wide as a word.

    Raises:
      ValueError: dtypes or the index do not fit.
    """
    x = jnp.asarray(x)
    wide, narrow = _pair("unpack_elementwise", unpacked_dtype, packed_dtype)
    if not jnp.issubdtype(x.dtype, jnp.integer) or element_bits(x.dtype) != element_bits(wide):
        raise mistake(
            ValueError,
            f"pltpu.unpack_elementwise to {wide} takes words of {element_bits(wide)} bits, not {kind_of(x)}.",
            hint="packed words are integers; pltpu.bitcast(x, …) sees others as such",
        )
    count = element_bits(wide) // element_bits(narrow)
    if not isinstance(index, (int, np.integer)) or not 0 <= index < count:
        raise mistake(
            ValueError,
            f"pltpu.unpack_elementwise: index is {kind_of(index)}, but a {wide} holds {count} {narrow}.",
            hint=f"a Python int from 0 to {count - 1}",
        )
    width, bits = element_bits(narrow), element_bits(wide)
    signed = jnp.issubdtype(narrow, jnp.signedinteger)
    word = jnp.dtype(f"{'int' if signed else 'uint'}{bits}")
    words = lax.bitcast_convert_type(x, word) << np.array(bits - (index + 1) * width, word)
    if jnp.issubdtype(narrow, jnp.floating):  # the upper half of an f32 is a bf16
        return lax.bitcast_convert_type(words & np.array(((1 << width) - 1) << (bits - width), word), wide)
    return lax.bitcast_convert_type(words >> np.array(bits - width, word), wide)


def _pair(name: str, wide: Any, narrow: Any) -> tuple[Any, Any]:
    """The wide and the narrow dtype, checked."""
    wide, narrow = jaxlink.canonicalize_dtype(wide), jnp.dtype(narrow)
    integers = jnp.issubdtype(wide, jnp.integer) and jnp.issubdtype(narrow, jnp.integer)
    if not integers and (wide, narrow) != (jnp.float32, jnp.bfloat16):
        headline = f"pltpu.{name} pairs integers with integers and float32 with bfloat16, not {wide} with {narrow}."
        raise mistake(ValueError, headline, hint="see other dtypes as integers first: pltpu.bitcast(x, jnp.int32)")
    if element_bits(wide) <= element_bits(narrow):
        headline = f"pltpu.{name}: {narrow} is not narrower than {wide}."
        raise mistake(ValueError, headline, hint="packed elements are narrower than the words")
    return wide, narrow


def _unsigned(dtype: Any) -> Any:
    return jnp.dtype(f"uint{element_bits(dtype)}")


# --- bits of a byte ---------------------------------------------------------------------------------------------------
def split_bits(x: jax.Array, bitwidths: Sequence[int]) -> tuple[jax.Array, ...]:
    """The bits of each byte as arrays of narrow integers, lowest bits first.

    Arguments:
      x: int8 or uint8.
      bitwidths: widths of the parts, 2 or 4 each, 8 in all at most.

    Returns:
      for each width an array of the shape of `x`, int2 or int4.

    Raises:
      ValueError: another dtype or other widths.
    """
    x = _bytes("split_bits", x)
    widths = tuple(bitwidths)
    if any(w not in (2, 4) for w in widths) or sum(widths) > 8:
        headline = f"pltpu.split_bits splits a byte into parts of 2 or 4 bits, not {widths}."
        raise mistake(
            ValueError, headline, hint="pltpu.split_bits(x, (4, 2)): lowest bits first, 8 bits in all at most"
        )
    x = lax.bitcast_convert_type(x, jnp.int8)
    parts, low = [], 0
    for width in widths:
        signed = (x << np.int8(8 - low - width)) >> np.int8(8 - width)
        parts.append(signed.astype(f"int{width}"))
        low += width
    return tuple(parts)


def _bytes(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype not in (jnp.int8, jnp.uint8):
        raise mistake(ValueError, f"pltpu.{name} takes int8 or uint8, not {kind_of(x)}.", hint="x.astype(jnp.uint8)")
    return x


def join_bits(*, two_bits: jax.Array | None = None, four_bits: jax.Array | None = None) -> jax.Array:
    """Bytes of which the lowest bits are `four_bits`, then `two_bits`, then zeros; either may be left out.

    Arguments:
      two_bits: int2 or uint2.
      four_bits: int4 or uint4, of the same shape.

    Returns:
      int8 of that shape.

    Raises:
      ValueError: neither is given, or a dtype or the shapes do not fit.
    """
    parts = [(name, x, w) for name, x, w in (("four_bits", four_bits, 4), ("two_bits", two_bits, 2)) if x is not None]
    if not parts:
        hint = "pltpu.join_bits(two_bits=high, four_bits=low)"
        raise mistake(ValueError, "pltpu.join_bits got neither two_bits nor four_bits.", hint=hint)
    for name, x, width in parts:
        if jnp.dtype(x.dtype) not in (jnp.dtype(f"int{width}"), jnp.dtype(f"uint{width}")):
            headline = f"pltpu.join_bits: {name} must be int{width} or uint{width}, not {kind_of(x)}."
            raise mistake(ValueError, headline, hint=f"x.astype(jnp.int{width})")
    if parts[0][1].shape != parts[-1][1].shape:
        headline = f"pltpu.join_bits: four_bits of {parts[0][1].shape} and two_bits of {parts[-1][1].shape} differ."
        raise mistake(ValueError, headline, hint="give both the same shape")
    joined, low = None, 0
    for _, x, width in parts:
        bits = (x.astype(jnp.int8) & np.int8((1 << width) - 1)) << np.int8(low)
        joined, low = bits if joined is None else joined | bits, low + width
    assert joined is not None  # there is at least one part
    return joined


def pack_fp6(fp6_in_8b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Six-bit elements, held in bytes, as an array of their upper two bits and one of their lower four.

    Arguments:
      fp6_in_8b: int8 or uint8; bits 6 and 7 do not count.

    Returns:
      (two_bits, four_bits): int2 and int4 of the same shape.

    Raises:
      ValueError: another dtype.
    """
    four, two = split_bits(_bytes("pack_fp6", fp6_in_8b), (4, 2))
    return two, four


def unpack_fp6(two_bits: jax.Array, four_bits: jax.Array) -> jax.Array:
    """What `pack_fp6` packed: six-bit elements in bytes, whose bits 6 and 7 are zero.

    Arguments:
      two_bits: the upper bits, int2 or uint2.
      four_bits: the lower bits, int4 or uint4, of the same shape.

    Returns:
      int8 of that shape.

    Raises:
      ValueError: a dtype or the shapes do not fit.
    """
    return join_bits(two_bits=two_bits, four_bits=four_bits)


# --- stochastic rounding ----------------------------------------------------------------------------------------------
_ROUND_TO = (jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz)


def stochastic_round(x: jax.Array, random_bits: jax.Array, *, target_dtype: Any) -> jax.Array:
    """`x` rounded to one of its two neighbours in a narrower dtype, to the nearer one more often: right on average.

    It is rounded away from zero where `random_bits / 2**32` is at least 1 - (the part of a step that is cut off).
    Infinities and NaN stay; what is beyond the largest number becomes what `astype` makes of it.

    Arguments:
      x: float32.
      random_bits: uint32 of the same shape, such as `pltpu.bitcast(pltpu.prng_random_bits(x.shape), jnp.uint32)`.
      target_dtype: bfloat16, float8_e5m2, float8_e4m3fn or float8_e4m3b11fnuz.

    Raises:
      ValueError: a dtype or the shapes do not fit.
    """
    x, random_bits, target = jnp.asarray(x), jnp.asarray(random_bits), jnp.dtype(target_dtype)
    if x.dtype != jnp.float32 or target not in map(jnp.dtype, _ROUND_TO):
        names = ", ".join(jnp.dtype(d).name for d in _ROUND_TO)
        headline = f"pltpu.stochastic_round rounds float32 to {names}, not {x.dtype} to {target}."
        raise mistake(ValueError, headline, hint="x.astype(jnp.float32) before, .astype(…) after for other dtypes")
    if random_bits.dtype != jnp.uint32 or random_bits.shape != x.shape:
        headline = f"pltpu.stochastic_round of {kind_of(x)} takes uint32 bits of its shape, not {kind_of(random_bits)}."
        raise mistake(ValueError, headline, hint="pltpu.bitcast(pltpu.prng_random_bits(x.shape), jnp.uint32)")
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    if target == jnp.bfloat16:  # the upper half of an f32: adding carries into it
        up = bits + (random_bits >> np.uint32(16)) & np.uint32(0xFFFF0000)
        rounded = lax.bitcast_convert_type(up, jnp.float32)
    else:
        info = jnp.finfo(target)
        exponent = (bits >> np.uint32(23) & np.uint32(0xFF)).astype(jnp.int32) - 127
        exponent = jnp.maximum(exponent, int(info.minexp)) - info.nmant  # of one step
        step = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
        steps = jnp.abs(x) / step
        whole = jnp.floor(steps)
        chance = (random_bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
        up = jnp.where(chance >= 1 - (steps - whole), whole + 1, whole)
        rounded = jnp.copysign(up * step, x)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(target)
