"""Loads and stores of Blackwell's tensor memory; products are in `rules_tcgen05_mma`.

They are done by all warps, each for its quarter of the lanes. A load is waited for at once. What the four warps have
loaded or stored, the thread that issues products knows after `wait_load_tmem` and `commit_tmem`, where they meet.

Source: PTX ISA, tcgen05.ld, tcgen05.st, tcgen05.wait; facts file, sections 8.9 and 8.10.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import (
    fragments,
    memory,
    tcgen05_code,
    tmem,
)
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.fragments import Fragments
from palladion.compiler.gpu.rules_wgmma import packed
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment
from palladion.compiler.gpu.views import View
from palladion.language.gpu.tcgen05 import async_load_tmem_p, async_store_tmem_p, commit_tmem_p, wait_load_tmem_p

scratch = tmem.scratch
WIDEST = 64  # registers of one load or store


# --- loads and stores -------------------------------------------------------------------------------------------------
def natural_layouts(view: View) -> dict[str, Fragments]:
    """Layouts in which instructions load a view, by the instruction's shape; none: it does not lie as they want it."""
    m, n = view.shape
    form = view.ref.form
    if form == tmem.ROWS and m == tmem.LANES and tmem.lies_as(view, ((m, tmem.LANE),)):
        found = {"32x32b": fragments.tmem_native((m, n))}
        return {**found, "16x256b": fragments.tcgen05((m, n))} if n % 8 == 0 and view.ref.step == tmem.CELL else found
    quarters = ((4, 32 * tmem.LANE), (16, tmem.LANE))
    if form == tmem.QUARTERS and m == 64 and n % 8 == 0 and view.ref.step == tmem.CELL and tmem.lies_as(view, quarters):
        return {"16x256b": fragments.wgmma((m, n))}
    if form == tmem.HALVES and view.axes[1].whole and view.axes[0].whole:
        digit = fragments.Digit
        threads = (digit(2, 1, n // 2), digit(64, 0, 1))
        return {"32x32b": Fragments((m, n), (digit(n // 2, 1, 1),), threads, name="TCGEN05_M64_COLLECTIVE_NATIVE")}
    return {}


def _chosen(unit: Unit, view: View, wanted: Fragments | None, what: str) -> tuple[str, Fragments]:
    """The instruction's shape and the layout for a load or store: the wanted one, if there is an instruction."""
    found = natural_layouts(view)
    if not found:
        raise unit.refuse(
            f"{what} takes a part of {view.ref.label} of shape {view.shape} that no instruction reads.",
            "take all rows; columns in multiples of 8",
        )
    for shape, layout in found.items():
        if layout == wanted:
            return shape, layout
    return next(iter(found.items()))


def _parts(shape: str, layout: Fragments, view: View) -> list[tuple[int, int, int, int]]:
    """Instructions for a load or store: (first register, registers, its `.xN`, bytes from the view's start)."""
    cells = layout.count * (1 if shape == "16x256b" else view.ref.step) // (1 if shape == "16x256b" else tmem.CELL)
    halves = 2 if shape == "16x256b" and layout.shape[0] == tmem.LANES else 1
    each, found = (4 if shape == "16x256b" else 1), []
    for half in range(halves):
        at, rest = 0, max(cells // halves, 1)
        while rest:
            take = 1 << (min(rest, WIDEST).bit_length() - 1)
            columns = at * (2 if shape == "16x256b" else 1)
            place = columns * tmem.CELL + half * 16 * tmem.LANE
            found.append((half * (cells // halves) + at, take, take // each, place))
            at, rest = at + take, rest - take
    return found


def _warps(unit: Unit, what: str) -> None:
    unit.function("tmem", tcgen05_code.WAITS)
    if unit.warps != 4:
        raise unit.refuse(f"A single warp runs {what}.", "all four warps take part: do it outside of the warp_map")


@RULES.rule(async_load_tmem_p)
def _load(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    _warps(unit, "plgpu.async_load_tmem")
    given, reduce = memory.arguments(unit, eqn, values), eqn.params["reduce"]
    view = tmem.matrix_view(unit, given.ref, "plgpu.async_load_tmem")
    wanted = unit.inferred_layout(eqn.outvars[0])
    shape, layout = _chosen(unit, view, None if reduce else wanted, "plgpu.async_load_tmem")
    parts = _parts(shape, layout, view)
    raw = unit.name("cells")
    total = sum(count for _, count, _, _ in parts)
    unit.line(f"u32 {raw}[{total}];")
    for first, count, times, place in parts:
        name = tcgen05_code.move_function(unit, "ld", shape, times, count)
        unit.line(f"{name}({_from(raw, first)}, {tmem.address(view, place)} + (warp << 21));")
    unit.line("tmem_wait_load();")
    unit.line(f"tmem_settled({raw});")
    result = unit.registers(view.dtype, layout)
    unit.fill(result, lambda i: _unpacked(raw, i, view))
    if reduce is not None:
        return [result, _reduced(unit, eqn, result, reduce)]
    return [result if wanted is None else unit.fragment(result, wanted)]


def _from(name: str, first: int) -> str:
    return name if not first else f"{name} + {first}"


def _unpacked(raw: str, i: str, view: View) -> str:
    """C++ for element i of what was loaded."""
    of = kind(view.dtype)
    if of.bits == 32:
        return f"bit_cast<{of.c}>({raw}[{i}])"
    if view.ref.step == tmem.CELL:
        return f"bit_cast<{of.c}>((u{of.bits}){raw}[{i}])"
    each = tmem.CELL // view.ref.step
    return f"bit_cast<{of.c}>((u{of.bits})({raw}[{i} / {each}] >> {i} % {each} * {of.bits}))"


def _reduced(unit: Unit, eqn: Any, value: Fragment, how: str) -> Fragment:
    """A number for each row, which one thread has all of."""
    layout = value.layout.without((1,))
    if layout is None or layout.count != 1 or any(d.dim == 1 for d in value.layout.threads):
        raise unit.refuse("plgpu.async_load_tmem reduces rows that several threads share.", "reduce what it loads")
    c, of = value.kind.c, value.kind
    absolute = how.startswith("abs")
    pick = "max" if how.endswith("max") else "min"
    pick = {"max": "maximum", "min": "minimum"}[pick] if of.family == "float" else pick
    held = of.compute if of.family == "float" else c
    one = lambda i: (
        f"{'fabsf' if of.family == 'float' else 'abs'}({held}({value.at(i)}))" if absolute else f"{held}({value.at(i)})"
    )
    found = unit.name("most")
    unit.line(f"{held} {found} = {one(0)};")
    unit.line("#pragma unroll")
    unit.line(f"for (int i = 1; i < {value.layout.count}; ++i) {found} = {pick}({found}, {one('i')});")
    return unit.fill(unit.registers(eqn.outvars[1].aval.dtype, layout), lambda i: f"{c}({found})")


@RULES.rule(async_store_tmem_p)
def _store(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    _warps(unit, "plgpu.async_store_tmem")
    given = memory.arguments(unit, eqn, values)
    view = tmem.matrix_view(unit, given.ref, "plgpu.async_store_tmem")
    value = given.value.value
    shape, layout = _chosen(unit, view, getattr(value, "layout", None), "plgpu.async_store_tmem")
    value = unit.fragment(value, layout)
    parts = _parts(shape, layout, view)
    raw = unit.name("cells")
    each = tmem.CELL // view.ref.step
    total = sum(count for _, count, _, _ in parts)
    unit.line(f"u32 {raw}[{total}];")
    if value.pick is not None:
        value = unit.fill(unit.registers(value.dtype, layout, "stored"), value.at_text)
    unit.line("#pragma unroll")
    text = packed(value, "i" if each == 1 else f"i * {each}", each)
    unit.line(f"for (int i = 0; i < {total}; ++i) {raw}[i] = {text};")
    for first, count, times, place in parts:
        name = tcgen05_code.move_function(unit, "st", shape, times, count)
        unit.line(f"{name}({tmem.address(view, place)} + (warp << 21), {_from(raw, first)});")
    return []


@RULES.rule(wait_load_tmem_p)
def _wait_load(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    _warps(unit, "plgpu.wait_load_tmem")
    _meet(unit, "tmem_wait_load();")
    return []


@RULES.rule(commit_tmem_p)
def _commit_tmem(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    _warps(unit, "plgpu.commit_tmem")
    _meet(unit, "tmem_wait_store();")
    return []


def _meet(unit: Unit, wait: str) -> None:
    """What all warps have done is done for the thread that issues products."""
    for line in (wait, "before_sync();"):
        unit.line(line)
    unit.sync()
    unit.line("after_sync();")


__all__ = ["natural_layouts", "scratch"]
