"""Hopper's matrix products: `wgmma` and its accumulators; and `mma`, the product of arrays that warps compute.

An accumulator is an array of registers in the layout of `wgmma`; it changes while products run, so what is read of it
is a copy. The C++ compiler sees a product's result as there at once: `wgmma_settled` makes what is read depend on the
wait before it, and keeps the compiler from giving registers their first values among products.

A `plgpu.wgmma` is one instruction for each 64 rows and each 32 bytes of K, together one group of which at most one is
in flight afterwards. Descriptors are computed once for all of them: a step along K adds to the low word.

Source: PTX ISA, wgmma.mma_async, wgmma.fence, mma.sync; facts file, sections 4 and 9.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu import descriptors, fragments, memory, mma_layouts, operands
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.fragments import Fragments
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment, Rearranged
from palladion.compiler.gpu.views import Index
from palladion.compiler.gpu.wgmma_code import GROUPS, mma_function, product_function
from palladion.language.gpu.mma import (
    mma_p,
    wgmma_accumulator_init_p,
    wgmma_accumulator_load_p,
    wgmma_p,
    wgmma_wait_p,
)

PART = 64  # rows of an instruction


# --- accumulators -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """An accumulator in registers.

    Attributes: aval: its type. label: for messages. name: of the C++ array; of float16 it has two in each element.
    """

    aval: Any
    label: str
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def axes(self) -> tuple[Any, ...]:
        return ()

    @property
    def layout(self) -> Fragments:
        return fragments.wgmma(self.shape)

    @property
    def packed(self) -> int:
        """Elements in one register."""
        return 32 // kind(self.dtype).bits

    @property
    def c(self) -> str:
        """The C++ type of a register."""
        return kind(self.dtype).c if self.packed == 1 else "u32"

    @property
    def registers(self) -> int:
        return self.layout.count // self.packed

    def get(self, unit: Unit, eqn: Any, transforms: Any) -> Any:
        """What it holds once all products have completed."""
        unit.line("wgmma_wait<0>();")
        return _viewed(unit, read(unit, self), transforms)

    def swap(self, unit: Unit, eqn: Any, transforms: Any, value: Any) -> Any:
        """Give it other values."""
        old = self.get(unit, eqn, ())
        if any(_indices(t, self.shape) is not None for t in transforms):
            raise unit.refuse(f"A part of {self.label} is written.", "write all of it, or keep several accumulators")
        write(unit, self, value)
        return old

    def addupdate(self, unit: Unit, eqn: Any, transforms: Any, value: Any) -> Any:
        raise unit.refuse(f"{self.label} is added to.", "plgpu.wgmma adds products; add arrays to acc[...]")


def scratch(unit: Unit, aval: Any) -> Accumulator:
    """The accumulator of a scope, zeros."""
    m, n = aval.shape
    if m % PART or n % 8:
        raise unit.refuse(f"An accumulator has shape {(m, n)}.", "M is a multiple of 64, N of 8")
    unit.function("wgmma", GROUPS)
    acc = Accumulator(aval, aval.label, unit.name("acc"))
    unit.line(f"{acc.c} {acc.name}[{acc.registers}];")
    if not aval.storage.init:
        unit.line("#pragma unroll")
        unit.line(f"for (int i = 0; i < {acc.registers}; ++i) {acc.name}[i] = 0;")
    return acc


def read(unit: Unit, acc: Accumulator) -> Fragment:
    """Its values as an array."""
    unit.line(f"wgmma_settled({acc.name});")
    result = unit.registers(acc.dtype, acc.layout)
    if acc.packed == 1:
        return unit.fill(result, lambda i: f"{acc.name}[{i}]")
    return unit.fill(result, lambda i: f"bit_cast<f16>((u16)({acc.name}[{i} / 2] >> {i} % 2 * 16))")


def write(unit: Unit, acc: Accumulator, value: Any) -> None:
    """Set its values."""
    value = unit.fragment(value, acc.layout)
    unit.line("#pragma unroll")
    text = value.at("i") if acc.packed == 1 else packed(value, "i * 2", 2)
    unit.line(f"for (int i = 0; i < {acc.registers}; ++i) {acc.name}[i] = {text};")


def packed(value: Fragment, first: str | int, count: int) -> str:
    """C++ for `count` narrow registers from number `first` on as one of 32 bits, the first lowest."""
    if kind(value.dtype).bits == 32:
        return f"bit_cast<u32>({value.at(first)})"
    size = kind(value.dtype).bits
    parts = []
    for k in range(count):
        register: str | int = first + k if isinstance(first, int) else first if not k else f"({first} + {k})"
        bits = f"(u32)bit_cast<u{size}>({value.at(register)})"
        parts.append(bits if not k else f"{bits} << {size * k}")
    return " | ".join(parts)


def _indices(transform: Any, shape: tuple[int, ...]) -> tuple[slice | int, ...] | None:
    """Constant indices of a transform; None: it takes everything."""
    if not isinstance(transform, jaxlink.NDIndexer):
        return ()
    found: list[slice | int] = []
    for index in transform.indices:
        if isinstance(index, jaxlink.Slice):
            start = _constant(index.start)
            found.append(slice(start, start + (index.size - 1) * index.stride + 1, index.stride))
        else:
            found.append(_constant(index))
    whole = all(isinstance(i, slice) and (i.start, i.stop, i.step) == (0, n, 1) for i, n in zip(found, shape))
    return None if whole else tuple(found)


def _constant(x: Any) -> int:
    x = x.value if isinstance(x, Index) else x
    x = x.value if hasattr(x, "value") else x
    return -1 if x is None else int(x)


def _viewed(unit: Unit, value: Fragment, transforms: Any) -> Any:
    """A part of what was read of an accumulator."""
    taken = np.arange(value.layout.size).reshape(value.shape)
    changed = False
    for transform in transforms:
        if isinstance(transform, jaxlink.TransposeTransform):
            taken, changed = taken.transpose(transform.permutation), True
            continue
        indices = _indices(transform, taken.shape)
        if indices is None:
            continue
        if not indices or any((i.start if isinstance(i, slice) else i) < 0 for i in indices):
            raise unit.refuse(
                "A part of an accumulator is read.", "its registers have fixed numbers: use constant slices"
            )
        taken, changed = taken[indices], True
    return Rearranged(value, taken.shape, taken.reshape(-1)) if changed else value


@RULES.rule(wgmma_accumulator_init_p)
def _init(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    write(unit, given.acc.ref, given.value.value)
    return []


@RULES.rule(wgmma_accumulator_load_p)
def _load(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given, n = memory.arguments(unit, eqn, values), eqn.params["wait_n"]
    if n is not None:
        unit.line(f"wgmma_wait<{min(n, 7)}>();")
    return [_viewed(unit, read(unit, given.acc.ref), given.acc.transforms)]


@RULES.rule(wgmma_wait_p)
def _wait(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    unit.function("wgmma", GROUPS)
    unit.line(f"wgmma_wait<{min(eqn.params['n'], 7)}>();")
    return []


# --- products ---------------------------------------------------------------------------------------------------------
@RULES.rule(wgmma_p)
def _wgmma(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    if unit.arch != "sm_90a":
        raise unit.refuse(
            f"plgpu.wgmma is Hopper's; {unit.arch} has none.", "plgpu.tcgen05_mma multiplies on Blackwell"
        )
    if unit.warps != 4:
        raise unit.refuse("A single warp issues a wgmma.", "all four warps of a Pallas thread take part in it")
    given = memory.arguments(unit, eqn, values)
    acc: Accumulator = given.acc.ref
    if any(_indices(t, acc.shape) is not None for t in given.acc.transforms):
        raise unit.refuse(f"A product is added to a part of {acc.label}.", "use an accumulator for each part")
    b_view = memory.view_of(unit, given.b)
    (k, n), parts = b_view.shape, acc.shape[0] // PART
    depth = descriptors.STEP * 8 // kind(b_view.dtype).bits
    b = operands.lies(unit, "B", b_view, 0, n, depth)
    with unit.block(""):
        right = operands.words(unit, "b", b, b_view)
        a_dtype, a_mn_major, left = _left(unit, given.a, (parts * PART, k), depth)
        dtypes = (str(np.dtype(a_dtype)), str(np.dtype(b_view.dtype)), str(np.dtype(acc.dtype)))
        per_part, in_registers = acc.registers // parts, a_mn_major is None
        name = product_function(unit, n, dtypes, per_part, in_registers, bool(a_mn_major), b.mn_major)
        unit.line(f"wgmma_settled({acc.name});")
        unit.line("wgmma_begin();")
        for part in range(parts):
            to = acc.name if not part else f"{acc.name} + {part * per_part}"
            for step in range(k // depth):
                unit.line(f"{name}({to}, {left(part, step)}, {right.at(b.steps[step])});")
        unit.line("wgmma_commit();")
        # An A in registers is read until the end: they may be anything's from here on.
        unit.line("wgmma_wait<0>();" if in_registers else "wgmma_wait<1>();")
    return []


def _left(
    unit: Unit, given: Any, shape: tuple[int, int], depth: int
) -> tuple[Any, bool | None, Callable[[int, int], str]]:
    """A of a product: its dtype; whether it lies with K outermost, None: it is in registers; and C++ of the arguments
    that say what the instruction for a part of the rows and a step of K takes."""
    if not hasattr(given, "ref"):
        value = unit.fragment(given.value, mma_layouts.left(shape, kind(given.value.dtype).bits))
        name, steps = _left_registers(unit, value), shape[1] // depth
        return value.dtype, None, lambda part, step: f"{name} + {4 * (part * steps + step)}"
    view = memory.view_of(unit, given)
    a = operands.lies(unit, "A", view, 1, PART, depth)
    words = operands.words(unit, "a", a, view)
    return view.dtype, a.mn_major, lambda part, step: words.at(a.lines[part] + a.steps[step])


def _left_registers(unit: Unit, left: Fragment) -> str:
    """The name of an array with A's registers, four for each instruction."""
    name = unit.name("a")
    each = 32 // kind(left.dtype).bits
    total = left.layout.count // each
    unit.line(f"u32 {name}[{total}];")
    if left.pick is None:
        unit.line("#pragma unroll")
        text = packed(left, "i" if each == 1 else f"i * {each}", each)
        unit.line(f"for (int i = 0; i < {total}; ++i) {name}[i] = {text};")
    else:
        for i in range(total):
            unit.line(f"{name}[{i}] = {packed(left, i * each, each)};")
    return name


# --- products of arrays -----------------------------------------------------------------------------------------------
@RULES.rule(mma_p)
def _mma(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    acc, a, b = (x.value for x in given)
    (m, n), k = acc.shape, a.shape[1]
    each = 32 // kind(a.dtype).bits
    depth, halves = 8 * each, 32 // kind(acc.dtype).bits
    acc = unit.fragment(acc, fragments.wgmma((m, n)))
    left = _left_registers(unit, unit.fragment(a, mma_layouts.left((m, k), kind(a.dtype).bits)))
    right = _left_registers(unit, unit.fragment(b, mma_layouts.right((k, n), kind(b.dtype).bits)))
    name = mma_function(unit, tuple(str(np.dtype(x.dtype)) for x in (a, b, acc)))
    c = kind(acc.dtype).c if halves == 1 else "u32"
    total = acc.layout.count // halves
    sums = unit.name("sums")
    unit.line(f"{c} {sums}[{total}];")
    unit.line("#pragma unroll")
    text = acc.at("i") if halves == 1 else packed(acc, "i * 2", 2)
    unit.line(f"for (int i = 0; i < {total}; ++i) {sums}[i] = {text};")
    steps, columns, wide = k // depth, n // 8, 4 // halves
    for part, row in (("for (int m = 0;", m // 64), ("for (int n = 0;", columns), ("for (int k = 0;", steps)):
        letter = part[9]
        unit.line("#pragma unroll")
        unit.line(f"{part} {letter} < {row}; ++{letter})")
    unit.line(
        f"  {name}({sums} + (m * {columns} + n) * {wide}, {left} + (m * {steps} + k) * 4, "
        f"{right} + (n * {steps} + k) * 2);"
    )
    result = unit.registers(acc.dtype, acc.layout)
    if halves == 1:
        return [unit.fill(result, lambda i: f"{sums}[{i}]")]
    return [unit.fill(result, lambda i: f"bit_cast<f16>((u16)({sums}[{i} / 2] >> {i} % 2 * 16))")]
