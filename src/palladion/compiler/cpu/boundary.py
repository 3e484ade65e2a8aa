"""How arrays go into and come out of a native call: what XLA holds in another form than the kernel's code does.

- Elements of less than a byte are packed in XLA. The kernel has them in a byte each: two programs of a grid that wrote
  halves of one byte would disturb each other.
- Complex arrays are two arrays of floats; arrays of PRNG keys are one array of uint32 for each of a key's words.
  The kernel is rewritten for that (lower/parts.py).

All of it is done by XLA operations around the call, of which there are none for other dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.language.semaphores import SemaphoreDType

UNPACKED = {"int2": "int8", "uint2": "uint8", "int4": "int8", "uint4": "uint8", "float4_e2m1fn": "uint8"}


def is_semaphore(dtype: Any) -> bool:
    """Whether a dtype is that of semaphores, which only machines have."""
    return isinstance(dtype, SemaphoreDType)


def part_dtypes(dtype: Any) -> tuple[Any, ...]:
    """The dtypes of the parts that arrays of a dtype are taken into; () for a dtype that is not taken apart."""
    if is_semaphore(dtype):
        return ()
    if jaxlink.is_opaque(dtype):
        return (jnp.dtype("uint32"),) * math.prod(dtype._impl.key_shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (jnp.finfo(dtype).dtype,) * 2
    return ()


def has_parts(jaxpr: Any) -> bool:
    """Whether a kernel has complex numbers or keys anywhere."""
    atoms = [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in (*e.invars, *e.outvars))]
    if any(part_dtypes(getattr(v.aval, "dtype", np.int32)) for v in atoms):
        return True
    return any(has_parts(inner) for e in jaxpr.eqns for inner in jaxlink.jaxprs_in_params(e.params))


def passes_as_it_is(dtype: Any) -> bool:
    """Whether the kernel's memory is the array's own."""
    return not part_dtypes(dtype) and jnp.dtype(dtype).name not in UNPACKED


def enter(x: jax.Array) -> list[jax.Array]:
    """An operand as the native call takes it: one array, or its parts."""
    if part_dtypes(x.dtype):
        return take_apart(x)
    if (name := UNPACKED.get(x.dtype.name)) is None:
        return [x]
    bits = lax.bitcast_convert_type(x, "uint4") if jnp.issubdtype(x.dtype, jnp.floating) else x
    return [bits.astype(name)]


def leave(parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """A result of the native call, as an array of `dtype`."""
    if part_dtypes(dtype):
        return put_together(parts, dtype)
    (x,) = parts
    if x.dtype == dtype:
        return x
    return (
        lax.bitcast_convert_type(x.astype("uint4"), dtype) if jnp.issubdtype(dtype, jnp.floating) else x.astype(dtype)
    )


def take_apart(x: Any) -> list[Any]:
    """Real and imaginary part of a complex array, or the words of keys, each an array of x's shape."""
    if jaxlink.is_opaque(x.dtype):
        words = jax.random.key_data(x).reshape(*x.shape, -1)
        return [words[..., k] for k in range(words.shape[-1])]
    return [lax.real(x), lax.imag(x)]


def put_together(parts: Sequence[Any], dtype: Any) -> Any:
    """The array of which these are the parts."""
    return jaxlink.wrap_keys(key_words(parts, dtype), dtype) if jaxlink.is_opaque(dtype) else lax.complex(*parts)


def key_words(parts: Sequence[Any], dtype: Any) -> Any:
    """Keys as JAX's generators take them: the words behind the dimensions of the array."""
    words = jnp.stack(parts, axis=-1)
    return words.reshape(*words.shape[:-1], *dtype._impl.key_shape)
