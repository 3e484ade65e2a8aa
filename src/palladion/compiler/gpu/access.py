"""Ordinary loads and stores: arrays and scalars between the registers of a Pallas thread and memory.

Where things lie is worked out in `plans`; here are the lines that use it, after the meeting of the CUDA threads that
may be needed before (`hazards`). The address of one element is `plans.element`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.compiler.gpu import hazards, matrices, moves
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.fragments import NOTHING, Fragments, default_layout
from palladion.compiler.gpu.plans import WIDEST_SINGLE, Vectors, element, plan, times
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat, index_formula
from palladion.compiler.gpu.views import View


# --- what rules call ------------------------------------------------------------------------------------------------
def load(unit: Any, view: View, layout: Fragments, wanted: str | None = None, base: str | None = None) -> Fragment:
    """Read a view into registers.

    Arguments:
      unit: the unit. view: what to read. layout: of the registers; of the view's shape. wanted: their C++ name.
      base: C++ of the buffer's address, if another one than the Ref's.
    """
    view = view.folded()
    hazards.before(unit, view.ref, writes=False, pattern=_pattern(view, layout))
    return load_unordered(unit, view, layout, wanted, base)


def load_unordered(
    unit: Any, view: View, layout: Fragments, wanted: str | None = None, base: str | None = None, inside: bool = False
) -> Fragment:
    """`load` where nothing can conflict; `inside`: rows of an index array that do not exist are zeros."""
    target = unit.registers(view.dtype, layout, wanted)
    if base is None and matrices.load(unit, view, target):
        return target
    vectors = plan(unit, view, layout, base)
    if inside and vectors.rows:
        unit.fill(target, lambda i: f"{target.kind.c}(0)")
        tests = lambda i: " && ".join(f"(u32)({row(i)}) < {extent}u" for row, extent in vectors.rows)
        before = vectors.guard
        vectors = dataclasses.replace(vectors, guard=lambda i: f"{before(i)} && {tests(i)}" if before else tests(i))
    c, v, x = target.kind.c, vectors.width, target.name

    def body(i: str) -> str:
        if vectors.in_order:
            at = f"&{x}[{times(i, v)}]" if v > 1 else f"{x}[{i}]"
            return (
                f"load<{v}>({at}, {vectors.address(i)});" if v > 1 else f"{at} = *(const {c}*)({vectors.address(i)});"
            )
        part = unit.name("part")
        fill = f"for (int j = 0, r = {times(i, v)}; j < {v}; ++j, ++r) "
        fill += f"{x}[{index_formula(vectors.order, 'r')}] = {part}[j];"
        return f"{c} {part}[{v}];\nload<{v}>({part}, {vectors.address(i)});\n{fill}"

    _loop(unit, vectors, body)
    return target


def store(unit: Any, view: View, value: Any, base: str | None = None) -> None:
    """Write an array to a view."""
    view = view.folded()
    value = as_registers(unit, view, value)
    hazards.before(unit, view.ref, writes=True, pattern=_pattern(view, value.layout))
    store_unordered(unit, view, value, base)


def as_registers(unit: Any, view: View, value: Any) -> Fragment:
    """A value that is stored, as registers: in the layout that it has, or one of wide vectors.

    A transposed array stays where it is: its elements are stored to other places.
    """
    if isinstance(value, Splat):
        return unit.fragment(value, default_for(view))
    if isinstance(value, Rearranged) and (layout := _turned(value)) is not None:
        return unit.fragment(value, layout)
    return unit.settled(value)


def _turned(value: Rearranged) -> Fragments | None:
    """The layout of a transposed array in which nothing moves; None: it is something else."""
    base = value.base.layout
    numbers = np.arange(base.size).reshape(base.shape)
    for order in itertools.permutations(range(min(len(base.shape), 4))):
        if len(order) == len(base.shape) and tuple(base.shape[d] for d in order) == tuple(value.shape):
            if (numbers.transpose(order).reshape(-1) == value.source).all():
                return base.renumbered(value.shape, tuple(map(order.index, range(len(order)))))
    return None


def store_unordered(unit: Any, view: View, value: Fragment, base: str | None = None) -> None:
    """`store` where nothing can conflict."""
    if base is None and matrices.store(unit, view, value):
        return
    vectors = plan(unit, view, value.layout, base)
    c, v = value.kind.c, vectors.width
    pick = value.pick or tuple(range(value.layout.count))
    order = tuple(pick[r] for r in vectors.order)  # elements of the C++ array

    def body(i: str) -> str:
        if v == 1:
            at = index_formula(order, i) if not i.isdigit() else str(order[int(i)])
            return f"*({c}*)({vectors.address(i)}) = {value.name}[{at}];"
        starts = order[::v]
        if all(order[k] == starts[k // v] + k % v for k in range(len(order))):
            at = index_formula(starts, i) if not i.isdigit() else str(starts[int(i)])
            return f"store<{v}>({vectors.address(i)}, &{value.name}[{at}]);"
        part = unit.name("part")
        inner = index_formula(order, "r")
        fill = f"for (int j = 0, r = {times(i, v)}; j < {v}; ++j, ++r) {part}[j] = {value.name}[{inner}];"
        return f"{c} {part}[{v}];\n{fill}\nstore<{v}>({vectors.address(i)}, {part});"

    _loop(unit, vectors, body)


def default_for(view: View) -> Fragments:
    """The layout of an array that nothing decides, for a view."""
    return default_layout(view.shape, view.dtype)


def load_where(
    unit: Any, view: View, layout: Fragments, on: Callable[[str], str], off: Callable[[str], str], base: str | None
) -> Fragment:
    """Read the elements for which `on(register)` holds; others become `off(register)`. C++ of both."""
    view = view.folded()
    hazards.before(unit, view.ref, writes=False, pattern=None)
    target = unit.registers(view.dtype, layout)
    one = _single(unit, view, layout, base)
    return unit.fill(target, lambda i: f"{on(i)} ? *(const {target.kind.c}*)({one(i)}) : {off(i)}")


def store_where(unit: Any, view: View, value: Fragment, on: Callable[[str], str], base: str | None) -> None:
    """Write the elements for which `on(register)` holds."""
    view = view.folded()
    hazards.before(unit, view.ref, writes=True, pattern=None)
    one = _single(unit, view, value.layout, base)
    guard = moves.guard_text(value.layout) if value.layout.padded else None
    each(unit, value.layout, lambda i: (
        f"if ({on(i) if guard is None else f'{guard(i)} && {on(i)}'}) "
        f"*({value.kind.c}*)({one(i)}) = {value.at_text(i)};"
    ))  # fmt: skip


def update_each(unit: Any, view: View, value: Fragment, function: str, base: str | None) -> None:
    """Call a device function (address, value) for each element of a folded view."""
    one = _single(unit, view, value.layout, base)
    guard = moves.guard_text(value.layout) if value.layout.padded else None
    each(unit, value.layout, lambda i: (
        f"{'' if guard is None else f'if ({guard(i)}) '}{function}(({value.kind.c}*)({one(i)}), {value.at_text(i)});"
    ))  # fmt: skip


def each_vector(unit: Any, vectors: Vectors, body: Callable[[str], str]) -> None:
    """A line for every vector, `body(number)`."""
    _loop(unit, vectors, body)


def each(unit: Any, layout: Fragments, body: Callable[[str], str]) -> None:
    """A line for every register."""
    if layout.count == 1:
        unit.line(body("0"))
    elif layout.count:
        unit.line("#pragma unroll")
        unit.line(f"for (int i = 0; i < {layout.count}; ++i) {body('i')}")


def _single(unit: Any, view: View, layout: Fragments, base: str | None) -> Callable[[str], str]:
    """C++ for the address of each register's element."""
    return plan(unit, view, layout, base, WIDEST_SINGLE).address


def load_scalar(unit: Any, view: View, base: str | None = None) -> Scalar:
    """Read one element: all threads get it."""
    view = view.folded()
    hazards.before(unit, view.ref, writes=False, pattern=None)
    of = kind(view.dtype)
    return unit.scalar(view.dtype, f"*(const {of.c}*)({element(unit, view, base)})")


def store_scalar(unit: Any, view: View, value: Scalar, base: str | None = None) -> None:
    """Write one element."""
    view = view.folded()
    hazards.before(unit, view.ref, writes=True, pattern=None)
    with unit.one_thread():
        unit.line(f"*({kind(view.dtype).c}*)({element(unit, view, base)}) = {value.text};")


def _loop(unit: Any, vectors: Vectors, body: Callable[[str], str]) -> None:
    """`body` for each vector."""
    if not vectors.count:
        return
    i = "0" if vectors.count == 1 else "i"
    lines = body(i)
    guard = None if vectors.guard is None else vectors.guard(i)
    head = f"for (int i = 0; i < {vectors.count}; ++i)"
    if vectors.count > 1:
        unit.line("#pragma unroll")
    if "\n" in lines:
        with unit.block(head if vectors.count > 1 else ""):
            if guard is None:
                unit.line(lines)
            else:
                with unit.block(f"if ({guard})"):
                    unit.line(lines)
        return
    text = lines if guard is None else f"if ({guard}) {lines}"
    unit.line(f"{head} {text}" if vectors.count > 1 else text)


def _pattern(view: View, layout: Fragments) -> Any:
    """What tells which thread has which element, for `hazards`; None: others may have the same."""
    moving = view.terms or view.gathers or any(a.terms for a in view.axes) or view.ref.moving
    numbers = layout.table[layout.table != NOTHING]
    if moving or len(np.unique(numbers)) < numbers.size or matrices.tiles_of(view, layout) is not None:
        return None
    return view.offset, view.axes, layout


__all__ = ["element", "load", "load_scalar", "load_unordered", "plan", "store", "store_scalar"]
