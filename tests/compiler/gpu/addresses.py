"""Helpers of the tests of memory: views of buffers without a kernel, and addresses in C++ as numbers."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu import memory, smem
from palladion.compiler.gpu.unit import Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import Index, View, resolve
from palladion.language.gpu.memory import GMEM, SMEM
from palladion.language.gpu.refs import GPURef, Storage


def a_unit(arch: str = "sm_90a") -> Unit:
    """A unit without a kernel."""
    return Unit(arch, None, {})


def a_ref(shape, dtype, transforms=(), space=SMEM) -> memory.Ref:
    """A buffer at offset 2048 of shared memory (C++ `0`), or operand 0 in global memory."""
    dtype = jax.numpy.dtype(dtype)
    aval = GPURef(jaxlink.ShapedArray(shape, dtype), space, label="x_ref", storage=Storage(tuple(transforms)))
    axes, swizzle = smem.stored_axes(shape, dtype.itemsize, transforms)
    size = int(np.prod(shape)) * dtype.itemsize
    where: dict[str, Any] = dict(operand=0) if space is GMEM else dict(at=2048)
    return memory.Ref(aval, "x_ref", "0", axes, swizzle, size=size, transforms=tuple(transforms), **where)


def dynamic(name: str, multiple: int = 1) -> Index:
    """An index that is known at run time."""
    return Index(Scalar(name, np.dtype(np.int32)), multiple)


def view(ref: memory.Ref, *transforms) -> View:
    """A view by index tuples, or JAX's transforms."""
    return resolve(a_unit(), ref, transforms)


def index(shape, *items):
    """JAX's indexer: an int, `Index`, or (start, size[, stride]) for each dimension."""
    indices = tuple(jaxlink.Slice(*(i if len(i) == 3 else (*i, 1))) if isinstance(i, tuple) else i for i in items)
    return jaxlink.NDIndexer(indices, shape, ())


def number(text: str, lines=(), **values: int) -> int:
    """What a C++ expression of integers is, after `const` lines."""
    known = dict(values)
    for line in lines:
        found = re.match(r"\s*(?:const int|char\* const) (\w+) = (.*);$", line)
        if found:
            known[found[1]] = number(found[2], **known)
    python = re.sub(r"swizzle<(\d+)>\(", r"swizzle(\1, ", text).replace("(int)", "").replace("/", "//")
    return eval(python, {"__builtins__": {}, "swizzle": swizzled}, known)


def swizzled(width: int, at: int) -> int:
    return at ^ ((at >> 7 & width // 16 - 1) << 4)


def placed(ref: memory.Ref) -> np.ndarray:
    """Where each element of a buffer lies, worked out the slow way: the storage transforms as NumPy does them."""
    from palladion.language.gpu.memory import SwizzleTransform, TilingTransform, TransposeTransform

    numbers, swizzle = np.arange(int(np.prod(ref.shape))).reshape(ref.shape), 0
    for layer in ref.transforms:
        if isinstance(layer, TilingTransform):
            lead = numbers.ndim - len(layer.tiling)
            parts = [p for n, t in zip(numbers.shape[lead:], layer.tiling) for p in (n // t, t)]
            split = numbers.reshape(*numbers.shape[:lead], *parts)
            outer = [lead + 2 * k for k in range(len(layer.tiling))]
            numbers = split.transpose(*range(lead), *outer, *(d + 1 for d in outer))
        elif isinstance(layer, SwizzleTransform):
            swizzle = layer.swizzle
        elif isinstance(layer, TransposeTransform):
            numbers = numbers.transpose(layer.permutation)
    itemsize = jax.numpy.dtype(ref.dtype).itemsize
    found = np.empty(numbers.size, np.int64)
    found[numbers.reshape(-1)] = np.arange(numbers.size) * itemsize
    if swizzle > 16:
        found = np.array([swizzled(swizzle, int(a)) for a in found])
    return found.reshape(ref.shape)
