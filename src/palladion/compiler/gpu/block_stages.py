"""Blocks of operands: where they begin, Refs of them in place, and the copies that threads make to and from stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu import access, memory, moves, smem
from palladion.compiler.gpu.dtypes import constant, kind
from palladion.compiler.gpu.fragments import default_layout
from palladion.compiler.gpu.unit import Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import Index, View, resolve
from palladion.errors import explain
from palladion.language.blocks import BoundedSlice, Element, Indirect, Squeezed, block_size
from palladion.language.gpu.memory import GMEM
from palladion.language.grid import BlockMapping
from palladion.language.refs import KernelRef

Start = Sequence[tuple[Scalar, Any]]  # for each dimension, where a block begins, and (BoundedSlice) how long it is


@dataclasses.dataclass
class Operand:
    """One operand of a call.

    Attributes:
      mapping: how it is cut. number: among the kernel's Refs. output: whether it is one. filled: whether its blocks
        are read (inputs, and outputs that are an input's memory). staged: whether they have a buffer. array: the Ref of
        the whole array.
      buffer: the Ref of the (first) buffer, or None. pitch: bytes from one buffer to the next. fetched: whether the TMA
        engine fills it.
    """

    mapping: BlockMapping
    number: int
    output: bool
    filled: bool
    staged: bool
    array: memory.Ref
    buffer: Any = None
    pitch: int = 0
    fetched: bool = False

    @property
    def delay(self) -> int:
        """Steps for which a block stays after its own."""
        return 0 if self.mapping.options is None else self.mapping.options.delay_release

    def slot(self, number: Scalar) -> memory.Ref:
        """One of the buffers."""
        if not self.fetched or number.value == 0:
            return self.buffer
        return dataclasses.replace(
            self.buffer, base=f"({self.buffer.base} + {number.text} * {self.pitch})", moving=True
        )

    def filled_from_output(self, params: dict[str, Any], gm: Any) -> bool:
        """Whether it is an input whose memory an output has."""
        return any(i == self.number for i, _ in params["input_output_aliases"])


def whole(m: BlockMapping) -> Any:
    """The type of a Ref of a whole operand."""
    return KernelRef(jaxlink.ShapedArray(m.array.shape, m.array.dtype), GMEM, label=m.origin)


def always_inside(m: BlockMapping) -> bool:
    """Whether every block lies in its array, once its index is clamped."""
    for b, n in zip(m.block_shape, m.array.shape):
        if isinstance(b, (Element, BoundedSlice, Indirect)):
            return isinstance(b, Element) and b.block_size == 1 and not any(b.padding)
        if not isinstance(b, Squeezed) and (b.block_size == 0 or n % b.block_size):
            return False
    return True


def make_buffer(unit: Unit, aval: Any, key: int, count: int) -> tuple[memory.Ref, int]:
    """Buffers in shared memory for the blocks of an operand: a Ref of the first, and bytes from one to the next."""
    transforms = memory.smem_transforms(unit, aval, key)
    itemsize = max(kind(aval.dtype).bits // 8, 1)
    swizzle = smem.stored_axes(aval.shape, itemsize, transforms)[1]
    size = max(math.prod(aval.shape) * itemsize, 1)
    align = smem.alignment(swizzle, size)
    pitch = -(-size // align) * align
    return memory.placed(unit, aval, key, smem.allocate(unit, pitch * count, align)), pitch


def is_plain(m: BlockMapping) -> bool:
    """Whether blocks are boxes of one size."""
    return not any(isinstance(b, (BoundedSlice, Indirect)) for b in m.block_shape)


def block_view(unit: Unit, o: Operand, start: Start) -> View:
    """The block as a view of the whole array."""
    indices = []
    for (s, _), b in zip(start, o.mapping.block_shape):
        step = 1 if isinstance(b, (Squeezed, Element, BoundedSlice)) else block_size(b)
        at = int(s.value) if s.value is not None else Index(s, step)
        indices.append(at if isinstance(b, Squeezed) else jaxlink.Slice(at, block_size(b)))  # pyright: ignore[reportArgumentType]
    return resolve(unit, o.array, (jaxlink.NDIndexer(tuple(indices), tuple(o.mapping.array.shape), ()),))


def element_view(unit: Unit, ref: Any, indices: Sequence[Any]) -> View:
    """One element of a Ref."""
    if not ref.shape:
        return resolve(unit, ref, ())
    return resolve(unit, ref, (jaxlink.NDIndexer(tuple(indices), tuple(ref.shape), ()),))


def depends_on(jaxpr: Any, numbers: Sequence[int]) -> bool:
    """Whether results of an index map depend on arguments with these numbers."""
    changing = {jaxpr.invars[k] for k in numbers}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, jaxlink.Literal) and v in changing for v in eqn.invars):
            changing.update(eqn.outvars)
    return any(not isinstance(v, jaxlink.Literal) and v in changing for v in jaxpr.outvars)


def start_of(unit: Unit, o: Operand, ids: Sequence[Scalar], prefetch: Sequence[Any]) -> Start:
    """For each dimension of the array, where the block begins, and (BoundedSlice) how many elements it has."""
    m = o.mapping
    takes = len(m.index_map.invars) - len(ids)
    flat = unit.run(m.index_map, [*ids, *prefetch[:takes]])
    found = []
    for (index, size), b, (low, high) in zip(m.indices(flat), m.block_shape, m.extents):
        if isinstance(b, Indirect):
            raise NotImplementedError(
                explain(
                    f"{m.origin} gathers rows (pl.Indirect), which the Mosaic GPU compiler does not do.",
                    hint="index the whole array in GMEM with an array of rows",
                )
            )
        index = _clamped(unit, index, low, high)
        if isinstance(b, Element):
            index = _scaled(unit, index, 1, -b.padding[0])
        elif not isinstance(b, (Squeezed, BoundedSlice)):
            index = _scaled(unit, index, block_size(b), 0)
        length = None if size is None else _clamped(unit, size, 0, block_size(b))
        found.append((index, length))
    return found


def _clamped(unit: Unit, index: Scalar, low: int, high: int) -> Scalar:
    if index.value is not None:
        value = min(max(int(index.value), low), high)
        return Scalar(str(value), np.dtype(np.int32), value)
    return Scalar(f"min(max((int){index.text}, {low}), {high})", np.dtype(np.int32))


def _scaled(unit: Unit, index: Scalar, by: int, plus: int) -> Scalar:
    if index.value is not None:
        value = int(index.value) * by + plus
        return Scalar(str(value) if value >= 0 else f"({value})", np.dtype(np.int32), value)
    text = index.text if by == 1 else f"{index.text} * {by}"
    text = text if not plus else f"({text} + ({plus}))"
    return Scalar(text, np.dtype(np.int32))


def _strides(m: BlockMapping) -> list[int]:
    """Bytes of a step along each dimension of the array."""
    itemsize = max(kind(m.array.dtype).bits // 8, 1)
    return [math.prod(m.array.shape[d + 1 :]) * itemsize for d in range(len(m.array.shape))]


def in_place(unit: Unit, o: Operand, start: Start, aval: Any) -> memory.Ref:
    """The block where it is, in global memory."""
    m, strides = o.mapping, _strides(o.mapping)
    moved = [f"(i64){s.text} * {stride}" for (s, _), stride in zip(start, strides) if s.value != 0]
    aligned = 16
    for (s, _), b, stride in zip(start, m.block_shape, strides):
        step = stride if isinstance(b, (Squeezed, Element, BoundedSlice)) else stride * b.block_size
        aligned = math.gcd(aligned, step if s.value is None else int(s.value) * stride)
    name = o.array.base
    if moved:
        name = unit.name(f"{memory.name_of(o.array.aval)}_block")
        unit.line(f"char* const {name} = {o.array.base} + {' + '.join(moved)};")
    axes = []
    for b, stride, axis in zip(m.block_shape, strides, o.array.axes):
        if not isinstance(b, Squeezed):
            size = b.block_size
            digits = ((size, stride),) if size > 1 else ()
            axes.append(dataclasses.replace(axis, n=size, extent=size, digits=digits, dim=len(axes)))
    return dataclasses.replace(
        o.array, aval=aval, base=name, axes=tuple(axes), aligned=aligned, moving=bool(moved), size=m.block_bytes
    )


def _element(unit: Unit, o: Operand, start: Start) -> tuple[Any, Any, Any]:
    """How a stage's elements lie in the array: a layout of the block, and C++ from a register to the element's offset
    in bytes and to whether it exists (None: all do)."""
    m, strides = o.mapping, _strides(o.mapping)
    kept = [d for d, b in enumerate(m.block_shape) if not isinstance(b, Squeezed)]
    shape = m.ref_shape
    layout = default_layout(shape, m.array.dtype, 1)
    base = [f"(i64){s.text} * {stride}" for (s, _), stride in zip(start, strides) if s.value != 0]
    at = unit.name("first")
    unit.line(f"const i64 {at} = {' + '.join(base) or '0'};")

    def coordinate(k: int, i: str) -> str:
        if layout.flat:
            number = moves.flat_text(layout, i)
            below = math.prod(shape[k + 1 :])
            text = f"({number}) / {below}" if below > 1 else f"({number})"
            return f"{text} % {shape[k]}" if k else text
        return f"({layout.thread_index(k)} + {layout.register_index(k, i)})"

    def offset(i: str) -> str:
        parts = [f"(i64)({coordinate(k, i)}) * {strides[d]}" for k, d in enumerate(kept)]
        return " + ".join([at, *parts])

    tests: list[Any] = []
    for k, d in enumerate(kept):
        b, n, (s, length) = m.block_shape[d], m.array.shape[d], start[d]
        if isinstance(b, BoundedSlice):
            tests.append(lambda i, k=k, length=length: f"{coordinate(k, i)} < {length.text}")
        exact = not isinstance(b, (Element, BoundedSlice)) and (b.block_size == 0 or n % b.block_size == 0)
        if exact:
            continue
        tests.append(lambda i, k=k, s=s, n=n: f"{s.text} + {coordinate(k, i)} < {n}")
        if isinstance(b, Element) and b.padding[0]:
            tests.append(lambda i, k=k, s=s: f"{s.text} + {coordinate(k, i)} >= 0")
    if layout.padded:
        tests.append(moves.guard_text(layout))
    inside = None if not tests else lambda i: " && ".join(test(i) for test in tests)
    return layout, offset, inside


def fill(unit: Unit, o: Operand, start: Start) -> None:
    """Read a block into its buffer."""
    dtype = o.mapping.array.dtype
    c = kind(dtype).c
    outside = constant(np.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)
    if not o.mapping.ref_shape:
        one = _element(unit, o, start)[1]("0")
        value = unit.scalar(dtype, f"*(const {c}*)({o.array.base} + {one})", "value")
        access.store_scalar(unit, resolve(unit, o.buffer, ()), value)
        return
    layout, offset, inside = _element(unit, o, start)
    value = unit.registers(dtype, layout, "block")
    read = lambda i: f"*(const {c}*)({o.array.base} + {offset(i)})"
    unit.fill(value, read if inside is None else lambda i: f"{inside(i)} ? {read(i)} : {c}({outside})")
    access.store(unit, resolve(unit, o.buffer, ()), value)


def drain(unit: Unit, o: Operand, start: Start) -> None:
    """Write a buffer back to its block."""
    dtype = o.mapping.array.dtype
    c = kind(dtype).c
    if not o.mapping.ref_shape:
        one = _element(unit, o, start)[1]("0")
        value = access.load_scalar(unit, resolve(unit, o.buffer, ()))
        with unit.one_thread():
            unit.line(f"*({c}*)({o.array.base} + {one}) = {value.text};")
        return
    layout, offset, inside = _element(unit, o, start)
    value = access.load(unit, resolve(unit, o.buffer, ()), layout, "block")

    def put(i: str) -> str:
        body = f"*({c}*)({o.array.base} + {offset(i)}) = {value.at_text(i)};"
        return body if inside is None else f"if ({inside(i)}) {body}"

    access.each(unit, layout, put)
