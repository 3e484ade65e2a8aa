"""JAX types as the types of MLIR that Mosaic takes.

A value of rank 0 is an MLIR scalar, any other a `vector`. Integers are signless: which operation fits is read off the
JAX type. A bool is an `i1` as a value and an `i32` in memory. 64-bit types and float16 are not on TPUs.

Source: measured with libtpu (shared notes on Mosaic); nothing here needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from palladion import jaxlink
from palladion.compiler.tpu.context import attr, element
from palladion.language import dtypes
from palladion.language import semaphores as generic
from palladion.language.refs import MemorySpace as AnySpace
from palladion.language.tpu import memory
from palladion.language.tpu import semaphores as tpu_semaphores


class Refusal(Exception):
    """Something that Mosaic does not take, before the user's line is known: a headline and how to fix it."""

    def __init__(self, headline: str, hint: str | None = None) -> None:
        super().__init__(headline)
        self.headline, self.hint = headline, hint


_SPACES = {
    None: "vmem",
    AnySpace.DEFAULT: "vmem",
    AnySpace.ANY: "any",
    AnySpace.KEY: "smem",
    memory.HBM: "hbm",
    memory.VMEM: "vmem",
    memory.SMEM: "smem",
    memory.CMEM: "cmem",
    memory.VMEM_SHARED: "vmem_shared",
    memory.SEMAPHORE: "semaphore_mem",
}
_SEMAPHORES = {
    generic.REGULAR: "!tpu.semaphore",
    generic.BARRIER: "!tpu.semaphore",
    tpu_semaphores.DMA: "!tpu.dma_semaphore",
}


def space_name(space: Any) -> str:
    """Mosaic's name of a memory space.

    Raises: Refusal: a TPU has no such memory.
    """
    name = _SPACES.get(space)
    if name is None:
        raise Refusal(f"A TPU has no memory {space}.", "pltpu.VMEM, pltpu.SMEM, pltpu.HBM, pl.ANY")
    return name


def space_attribute(name: str) -> ir.Attribute:
    return attr(f"#tpu.memory_space<{name}>")


@functools.cache
def is_bool(dtype: Any) -> bool:
    return bool(dtype == np.bool_)


@functools.cache
def is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.cache
def is_integer(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer))


@functools.cache
def element_bits(dtype: Any) -> int:
    """Bits of an element; a bool has 8 in an array."""
    return dtypes.element_bits(dtype)


@functools.cache
def is_unsigned(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.unsignedinteger)) or is_bool(dtype)


def bits_of(dtype: Any) -> int:
    """Bits of an element in memory: a bool takes 32."""
    return 32 if is_bool(dtype) else element_bits(dtype)


def integer(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def element_type(dtype: Any) -> ir.Type:
    """The type of one element of a value.

    Raises: Refusal: TPUs have no such elements.
    """
    return element(dtype, _element_type)


def _element_type(dtype: Any) -> ir.Type:
    if is_bool(dtype):
        return integer(1)
    if is_integer(dtype):
        if element_bits(dtype) > 32:
            narrow = "uint32" if is_unsigned(dtype) else "int32"
            raise Refusal(f"TPUs have no {dtype}.", f"use {narrow}: .astype(jnp.{narrow})")
        return integer(element_bits(dtype))
    if is_float(dtype):
        if dtype == jnp.float64:
            raise Refusal("TPUs have no float64.", "use float32: .astype(jnp.float32)")
        if dtype == jnp.float16:
            raise Refusal("Mosaic takes no float16.", "use bfloat16 or float32")
        return jaxlink.mlir.dtype_to_ir_type(np.dtype(dtype))
    raise Refusal(f"Mosaic has no type for elements of {dtype}.", "use float32, bfloat16, int32, int8, bool …")


def value_type(aval: Any) -> ir.Type:
    """The type of a value: a scalar, or a vector."""
    return element((tuple(aval.shape), aval.dtype), _value_type)


def _value_type(key: tuple[tuple[int, ...], Any]) -> ir.Type:
    return typed(key[0], element_type(key[1]))


def typed(shape: Sequence[int], element: ir.Type) -> ir.Type:
    """`element` itself for shape (), else a vector of it."""
    if 0 in shape:
        raise Refusal(f"Mosaic has no arrays without elements, such as shape {tuple(shape)}.", "leave them out")
    return ir.VectorType.get(tuple(shape), element) if shape else element


def memory_element(dtype: Any) -> ir.Type:
    """The type of one element of a Ref."""
    if dtype in _SEMAPHORES:
        return ir.Type.parse(_SEMAPHORES[dtype])
    if is_bool(dtype) or jaxlink.is_opaque(dtype):  # of typed PRNG keys: their words
        return i32()
    return element_type(dtype)


def memory_shape(aval: Any) -> tuple[int, ...]:
    """The shape of a Ref in memory: of PRNG keys, with that of their words."""
    if jaxlink.is_opaque(aval.dtype) and aval.dtype not in _SEMAPHORES:
        return (*aval.shape, *aval.dtype._impl.key_shape)
    return tuple(aval.shape)


def memref_type(shape: Sequence[int], of: ir.Type, space: str) -> ir.Type:
    return element((tuple(shape), of, space), _memref_type)


def _memref_type(key: tuple[tuple[int, ...], ir.Type, str]) -> ir.Type:
    shape, of, space = key
    return ir.MemRefType.get(shape, of, memory_space=space_attribute(space))


def ref_type(aval: Any) -> ir.Type:
    """The type of a Ref: a memref."""
    if aval.dtype in _SEMAPHORES:
        return memref_type(aval.shape, memory_element(aval.dtype), "semaphore_mem")
    return memref_type(memory_shape(aval), memory_element(aval.dtype), space_name(aval.memory_space))
