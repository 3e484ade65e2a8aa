"""Small functions that emit Triton IR: types, constants, broadcasts, arithmetic on whole blocks.

A value of a kernel is an MLIR value: a scalar where JAX has shape (), otherwise a ranked tensor. MLIR's integers have
no sign, so what depends on it takes the dtype of the jaxpr. Booleans are i1 in registers and bytes in memory.

Source: the `tt` dialect's definition in Triton, through the bindings that jaxlib ships.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

# For each value of a dialect's type MLIR's bindings import a module of the dialect's name, and do not remember that
# there is none: half the time of lowering a kernel. Triton's bindings lie elsewhere.
sys.modules.setdefault("jaxlib.mlir.dialects.tt", tt)

Value = Any  # an ir.Value; jaxlib's bindings carry no types that pyright reads
Number = Any  # an int, or an ir.Value of 32 or 64 bits

# Largest number of elements in one value: the verifier of Triton's dialect refuses more.
MAX_ELEMENTS = 1 << 20
_FLOATS = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
}
_INTEGERS = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)}
HELD = ("bool", *_INTEGERS, *_FLOATS)


# --- types ------------------------------------------------------------------------------------------------------------
def element_type(dtype: Any, *, memory: bool = False) -> ir.Type:
    """The MLIR type of one element; `memory`: as it lies in memory, where a bool is a byte."""
    name = str(jnp.dtype(dtype))
    if name == "bool":
        return ir.IntegerType.get_signless(8 if memory else 1)
    if name in _INTEGERS:
        return ir.IntegerType.get_signless(_INTEGERS[name])
    return ir.Type.parse(_FLOATS[name])


def shape_of(v: Value) -> tuple[int, ...]:
    """The shape of a value; () for scalars."""
    return tuple(v.type.shape) if isinstance(v.type, ir.RankedTensorType) else ()


def scalar_type(v: Value) -> Any:
    """The type of one element of a value."""
    return v.type.element_type if isinstance(v.type, ir.RankedTensorType) else v.type


def typed(shape: Sequence[int], element: ir.Type) -> ir.Type:
    """The type of a block; of a scalar for shape ()."""
    return ir.RankedTensorType.get(tuple(shape), element) if shape else element


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_signed(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.signedinteger)


def is_unsigned(dtype: Any) -> bool:
    """Unsigned integers, and booleans."""
    return jnp.issubdtype(dtype, jnp.unsignedinteger) or jnp.dtype(dtype) == np.bool_


def bits_of(dtype: Any) -> int:
    return 1 if jnp.dtype(dtype) == np.bool_ else jnp.dtype(dtype).itemsize * 8


# --- constants and shapes ---------------------------------------------------------------------------------------------
def full(shape: Sequence[int], value: Any, element: ir.Type) -> Value:
    """A constant in every element."""
    if isinstance(element, ir.IntegerType):
        bits = element.width
        value = int(value) & ((1 << bits) - 1)
        value = value - (1 << bits) if value >> (bits - 1) and bits > 1 else value
        attr = ir.IntegerAttr.get(element, value)
    else:
        attr = ir.FloatAttr.get(element, float(value))
    if not shape:
        return arith.constant(element, attr)
    kind = typed(shape, element)
    return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, attr))


def const(value: Any, dtype: Any, shape: Sequence[int] = ()) -> Value:
    """A constant of a dtype of JAX's."""
    return full(shape, value, element_type(dtype))


def like(v: Value, value: Any) -> Value:
    """A constant of the type of `v`."""
    return full(shape_of(v), value, scalar_type(v))


def like_i32(n: Number) -> Value:
    """A number as a value of 32 bits."""
    return n if isinstance(n, ir.Value) else full((), n, ir.IntegerType.get_signless(32))


def broadcast(v: Value, shape: Sequence[int]) -> Value:
    """Spread a scalar, or a block of the same rank with dimensions of 1."""
    shape = tuple(shape)
    old = shape_of(v)
    if old == shape:
        return v
    kind = typed(shape, scalar_type(v))
    return tt.broadcast(kind, v) if old else tt.splat(kind, v)


def reshape(v: Value, shape: Sequence[int]) -> Value:
    """The same elements in the same order in another shape."""
    shape, old = tuple(shape), shape_of(v)
    if old == shape:
        return v
    if not old:
        return tt.splat(typed(shape, v.type), v)
    if not shape:
        return tt.unsplat(v)
    if math.prod(old) == 1:
        return tt.splat(typed(shape, scalar_type(v)), tt.unsplat(v))
    squeezed, wanted = (tuple(n for n in s if n != 1) for s in (old, shape))
    if squeezed == wanted == old:  # only ones to add: expand_dims leaves a layout as it is
        for d, n in enumerate(shape):
            if n == 1:
                v = tt.expand_dims(v, d)
        return v
    return tt.reshape(typed(shape, scalar_type(v)), v)


def arange(n: int, axis: int, rank: int, bits: int = 32) -> Value:
    """0, 1, ... n - 1 along one axis of a block of that rank whose other dimensions are 1."""
    i32 = ir.IntegerType.get_signless(32)
    v = tt.make_range(typed((n,), i32), 0, n)
    if bits != 32:
        v = widen(v, bits)
    for d in range(rank):
        if d != axis:
            v = tt.expand_dims(v, d)
    return v


def widen(v: Value, bits: int) -> Value:
    """A signed integer in at least so many bits."""
    if scalar_type(v).width >= bits:
        return v
    return arith.extsi(typed(shape_of(v), ir.IntegerType.get_signless(bits)), v)


def spread(*values: Value) -> list[Value]:
    """Values whose shapes broadcast, scalars among them, in their common shape."""
    shape = np.broadcast_shapes(*(shape_of(v) for v in values))
    return [broadcast(v, shape) for v in values]


# --- integer arithmetic on indices, with Python's integers folded ---------------------------------------------------


def _operands(a: Number, b: Number) -> list[Value]:
    bits = max(scalar_type(v).width for v in (a, b) if not isinstance(v, int))
    kind = ir.IntegerType.get_signless(bits)
    return spread(*(full((), v, kind) if isinstance(v, int) else widen(v, bits) for v in (a, b)))


def add(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int):
        a, b = b, a
    return a if isinstance(b, int) and b == 0 else arith.addi(*_operands(a, b))


def sub(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return a if isinstance(b, int) and b == 0 else arith.subi(*_operands(a, b))


def mul(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int) and b in (0, 1):
        return a if b else 0
    return arith.muli(*_operands(a, b))


def divide(a: Number, b: int) -> Number:
    """a // b of numbers that are not negative."""
    if isinstance(a, int):
        return a // b
    return a if b == 1 else arith.divui(*_operands(a, b))


def modulo(a: Number, b: int) -> Number:
    """a % b of numbers that are not negative."""
    if isinstance(a, int):
        return a % b
    return 0 if b == 1 else arith.remui(*_operands(a, b))


def less(a: Number, b: Number) -> Value:
    """a < b, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, *_operands(a, b))


def at_least(a: Number, b: Number) -> Value:
    """a >= b, signed."""
    return arith.cmpi(arith.CmpIPredicate.sge, *_operands(a, b))


def clamp(a: Number, low: int, high: int) -> Number:
    if isinstance(a, int):
        return min(max(a, low), high)
    low_v, high_v = like(a, low), like(a, high)
    return arith.minsi(arith.maxsi(a, low_v), high_v)


def both(a: Value | None, b: Value) -> Value:
    """The conjunction of two masks; None is no mask."""
    return b if a is None else arith.andi(*spread(a, b))


def select(mask: Value, a: Value, b: Value) -> Value:
    """`a` where the mask is on, else `b`; a scalar mask may choose between blocks."""
    return arith.select(mask if not shape_of(mask) else broadcast(mask, shape_of(a)), a, b)
