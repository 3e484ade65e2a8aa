"""A few words of MLIR: constants, casts between scalars and vectors, shapes. All of them emit at the insertion point.

Masks (`i1` vectors) can be combined and selected by, but neither reshaped nor carried through loops: what moves
elements around takes them as `i32` (`as_words`, `as_mask`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mosaic.python import tpu

from palladion.compiler.tpu.context import attr as attr
from palladion.compiler.tpu.context import constant as any_constant
from palladion.compiler.tpu.context import place, scalar
from palladion.compiler.tpu.kinds import i32, integer, typed


def is_vector(x: ir.Value) -> bool:
    return isinstance(x.type, ir.VectorType)


def shape_of(x: ir.Value) -> tuple[int, ...]:
    kind = x.type
    return tuple(kind.shape) if isinstance(kind, ir.VectorType) else ()


def element_of(x: ir.Value) -> ir.Type:
    kind = x.type
    return kind.element_type if isinstance(kind, ir.VectorType) else kind


def like(x: ir.Value, element: ir.Type) -> ir.Type:
    """The type of a value of the shape of `x`, with other elements."""
    return typed(shape_of(x), element)


def number(element: ir.Type, value: Any) -> ir.Attribute:
    """A number as an attribute of an element type."""
    if isinstance(element, ir.IntegerType):
        bits = element.width
        value = int(value) & ((1 << bits) - 1)
        value -= (1 << bits) if bits > 1 and value >> (bits - 1) else 0
        return ir.IntegerAttr.get(element, value)
    if isinstance(element, ir.IndexType):
        return ir.IntegerAttr.get(element, int(value))
    return ir.FloatAttr.get(element, float(value))


def full(kind: ir.Type, value: Any) -> ir.Value:
    """A constant: a scalar, or a vector all of whose elements are one number."""
    if isinstance(kind, ir.VectorType):
        return any_constant(kind, ir.DenseElementsAttr.get_splat(kind, number(kind.element_type, value)))
    return scalar(kind, number(kind, value))


def constant(value: int) -> ir.Value:
    """An `i32`."""
    return full(i32(), value)


def index(value: Any) -> ir.Value:
    """An `index`, of a Python integer or an integer value."""
    if isinstance(value, (int, np.integer)):
        return place(int(value))
    return value if isinstance(value.type, ir.IndexType) else arith.index_cast(ir.IndexType.get(), value)


def as_i32(value: Any) -> ir.Value:
    """An `i32`, of a Python integer or an integer scalar."""
    if isinstance(value, (int, np.integer)):
        return constant(int(value))
    if isinstance(value.type, ir.IndexType):
        return arith.index_cast(i32(), value)
    return value


# --- masks ------------------------------------------------------------------------------------------------------------
def is_mask(x: ir.Value) -> bool:
    element = element_of(x)
    return isinstance(element, ir.IntegerType) and element.width == 1


def as_words(mask: ir.Value) -> ir.Value:
    """0 and 1 as `i32`."""
    return arith.extui(like(mask, i32()), mask)


def as_mask(words: ir.Value) -> ir.Value:
    """Where integers are not 0."""
    return arith.cmpi(arith.CmpIPredicate.ne, words, full(words.type, 0))


def on_words(operation: Any) -> Any:
    """Lets an operation on one value that moves elements around take masks too."""

    @functools.wraps(operation)
    def run(x: ir.Value, *args: Any, **kwargs: Any) -> ir.Value:
        kind = x.type
        if isinstance(kind, ir.VectorType) and kind.element_type == integer(1):
            return as_mask(operation(as_words(x), *args, **kwargs))
        return operation(x, *args, **kwargs)

    return run


# --- shapes -----------------------------------------------------------------------------------------------------------
@on_words
def splat(x: ir.Value, shape: Sequence[int]) -> ir.Value:
    """A scalar in all elements of a vector; a value of that shape stays as it is."""
    if shape_of(x) == tuple(shape):
        return x
    if is_mask(x):
        return as_mask(splat(as_words(x), shape))
    return vector.broadcast(typed(shape, element_of(x)), x)


@on_words
def reshape(x: ir.Value, shape: Sequence[int]) -> ir.Value:
    """The elements in row-major order as another shape, () included."""
    shape, old = tuple(shape), shape_of(x)
    if shape == old:
        return x
    if not shape:
        return extract(x)
    if not old:
        return splat(x, shape)
    return vector.shape_cast(typed(shape, element_of(x)), x)


def extract(x: ir.Value) -> ir.Value:
    """The first element of a vector, as a scalar."""
    if is_mask(x):
        return as_mask(extract(as_words(x)))
    element = element_of(x)
    narrow = widening(element)
    if narrow is not None:  # Mosaic extracts 32 bits only
        up, down, wide = narrow
        return down(element, extract(up(like(x, wide), x)))
    return vector.extract(x, [], [0] * len(shape_of(x)))


def widening(element: ir.Type) -> tuple[Any, Any, ir.Type] | None:
    """How a narrow element becomes one of 32 bits and back; None for those that have 32."""
    if isinstance(element, ir.IntegerType):
        return (arith.extsi, arith.trunci, i32()) if 1 < element.width < 32 else None
    return None if isinstance(element, ir.F32Type) else (arith.extf, arith.truncf, ir.F32Type.get())


@on_words
def broadcast(x: ir.Value, shape: Sequence[int], dimensions: Sequence[int]) -> ir.Value:
    """`lax.broadcast_in_dim`."""
    if not shape_of(x):
        return splat(x, shape) if shape else x
    aligned = [1] * len(shape)
    for n, d in zip(shape_of(x), dimensions):
        aligned[d] = n
    x = reshape(x, aligned)
    return x if tuple(aligned) == tuple(shape) else vector.broadcast(typed(shape, element_of(x)), x)


@on_words
def transpose(x: ir.Value, permutation: Sequence[int]) -> ir.Value:
    permutation = list(permutation)
    if permutation == sorted(permutation):
        return x
    shape = [shape_of(x)[d] for d in permutation]
    moved = [d for d in permutation if shape_of(x)[d] != 1]
    if moved == sorted(moved):  # only dimensions of size 1 move
        return reshape(x, shape)
    return tpu.transpose(typed(shape, element_of(x)), x, permutation)


@on_words
def cut(x: ir.Value, starts: Sequence[int], sizes: Sequence[int]) -> ir.Value:
    """A window at a static place."""
    if tuple(sizes) == shape_of(x):
        return x
    return vector.extract_strided_slice(typed(sizes, element_of(x)), x, list(starts), list(sizes), [1] * len(sizes))


def concatenate(parts: Sequence[ir.Value], axis: int) -> ir.Value:
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    if is_mask(parts[0]):
        return as_mask(concatenate([as_words(p) for p in parts], axis))
    return tpu.concatenate(parts, axis)


def iota(shape: Sequence[int], axis: int) -> ir.Value:
    """The index along an axis, in `i32`."""
    if len(shape) == 1:  # Mosaic's has two dimensions at least
        return reshape(iota((1, *shape), 1), shape)
    return tpu.iota(typed(shape, i32()), [axis])


def numbers(shape: Sequence[int]) -> ir.Value:
    """The number of each element in row-major order, in `i32`."""
    result = None
    for axis, n in enumerate(shape):
        here = iota(shape, axis)
        result = here if result is None else arith.addi(arith.muli(result, full(here.type, n)), here)
    assert result is not None  # there is a dimension
    return result


def rotate(x: ir.Value, amount: ir.Value, axis: int) -> ir.Value:
    """Element i of the result is element (i - amount) modulo the size."""
    if is_mask(x):
        return as_mask(rotate(as_words(x), amount, axis))
    if len(shape_of(x)) == 1:
        return reshape(rotate(reshape(x, (1, *shape_of(x))), amount, 1), shape_of(x))
    element = element_of(x)
    if (narrow := widening(element)) is not None:
        up, down, wide = narrow
        return down(like(x, element), rotate(up(like(x, wide), x), amount, axis))
    return tpu.dynamic_rotate(x, amount, axis)
