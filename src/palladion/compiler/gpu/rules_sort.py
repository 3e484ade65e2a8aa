"""Sorting: every element counts those before it, which is its place in the sorted array.

Right for every size and number of operands, and always stable; quadratic in the length of a row. Floats are in JAX's
order: -0 equals 0, and NaNs are larger than all numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from palladion.compiler.gpu.dtypes import Kind, kind
from palladion.compiler.gpu.fragments import Fragments, default_layout
from palladion.compiler.gpu.moves import guard_text
from palladion.compiler.gpu.rules_special import ORDERED
from palladion.compiler.gpu.spill import (
    behind,
    coordinate,
    coordinates,
    each_element,
    itemsize,
    read_back,
    registers_of,
    spilled_registers,
    strides_of,
)
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment
from palladion.rules import present

_KEY = r"""
// What a number counts as when arrays are sorted.
template <class T> __device__ __forceinline__ auto sort_key(T x) {
  const auto wide = T(x) + 0;  // float of narrow ones
  using result = decltype(ordered(wide));
  if (wide != wide) return (result)(((u64)1 << (8 * sizeof(result) - 1)) - 1);
  return ordered(wide == 0 ? decltype(wide)(0) : wide);
}
"""


def _key(unit: Unit, of: Kind, text: str) -> str:
    if of.family != "float":
        return text
    unit.function("ordered", ORDERED)
    unit.function("sort_key", _KEY)
    return f"sort_key({text})"


def _rank(
    unit: Unit, layout: Fragments, i: str, keys: list[tuple[str, Kind]], axis: int, larger_first: bool = False
) -> str:
    """Lines that count what comes before the element in register i; the name of the count."""
    n, strides = layout.shape[axis], strides_of(layout.shape)
    line = unit.name("line")
    unit.line(f"const int {line} = {coordinates(layout, [0 if d == axis else s for d, s in enumerate(strides)])(i)};")
    own = unit.name("own")
    unit.line(f"const int {own} = {coordinate(layout, axis, i)};")
    rank = unit.name("rank")
    unit.line(f"int {rank} = 0;")
    mine = []
    for pointer, of in keys:
        mine.append(unit.name("key"))
        unit.line(f"const auto {mine[-1]} = {_key(unit, of, f'{pointer}[{line} + {own} * {strides[axis]}]')};")
    with unit.block(f"for (int k = 0; k < {n}; ++k)"):
        test = f"k < {own}"
        for (pointer, of), key in reversed(list(zip(keys, mine))):
            other = unit.name("other")
            unit.line(f"const auto {other} = {_key(unit, of, f'{pointer}[{line} + k * {strides[axis]}]')};")
            test = f"({other} {'>' if larger_first else '<'} {key} || ({other} == {key} && {test}))"
        unit.line(f"{rank} += {test};")
    return rank


def _ranks(unit: Unit, held: list[Fragment], pointers: list[str], count: int, axis: int, larger: bool) -> Fragment:
    """The place of every element along an axis, by the first `count` operands."""
    layout = held[0].layout
    ranks = unit.registers(np.int32, layout, "ranks")
    keys = [(pointer, x.kind) for pointer, x in zip(pointers[:count], held)]
    with each_element(unit, layout) as i:
        unit.line(f"{ranks.at_text(i)} = {_rank(unit, layout, i, keys, axis, larger)};")
    return ranks


@RULES.rule(lax.sort_p)
def _sort(unit: Unit, eqn: Any, *operands: Any) -> list[Any]:
    axis = eqn.params["dimension"]
    if 0 in eqn.invars[0].aval.shape:
        return list(operands)
    first = registers_of(unit, operands[0], eqn.outvars[0])
    layout = first.layout
    held = [first, *(unit.fragment(registers_of(unit, x, None), layout) for x in operands[1:])]
    pointers = spilled_registers(unit, *held)
    ranks = _ranks(unit, held, pointers, eqn.params["num_keys"], axis, False)
    unit.sync()  # all have read the keys
    strides = strides_of(layout.shape)
    line = coordinates(layout, [0 if d == axis else s for d, s in enumerate(strides)])
    with each_element(unit, layout) as i:
        guard = f"if ({guard_text(layout)(i)}) " if layout.padded else ""
        place = unit.name("place")
        unit.line(f"const int {place} = {line(i)} + {ranks.at_text(i)} * {strides[axis]};")
        for pointer, x in zip(pointers, held):
            unit.line(f"{guard}{pointer}[{place}] = {x.at_text(i)};")
    unit.sync()
    return [read_back(unit, pointer, x.dtype, layout) for pointer, x in zip(pointers, held)]


def _best(unit: Unit, eqn: Any, x: Any, axis: int, larger: bool) -> list[Any]:
    """The first `k` along an axis, and where they were."""
    values, numbers = (v.aval for v in eqn.outvars)
    if 0 in values.shape:
        from palladion.compiler.gpu.values import Splat

        return [Splat("0", a.dtype, tuple(a.shape)) for a in (values, numbers)]
    x = registers_of(unit, x, eqn.invars[0])
    layout, size = x.layout, int(np.prod(values.shape))
    room = -(-size * itemsize(x) // 16) * 16
    (pointer,) = spilled_registers(unit, x, room=room + size * 4)
    at = behind(x)
    best, where = f"(({x.kind.c}*)(exchange + {at}))", f"((int*)(exchange + {at + room}))"
    ranks = _ranks(unit, [x], [pointer], 1, axis, larger)
    strides = strides_of(values.shape)
    line = coordinates(layout, [0 if d == axis else s for d, s in enumerate(strides)])
    with each_element(unit, layout) as i:
        guard = f"{guard_text(layout)(i)} && " if layout.padded else ""
        with unit.block(f"if ({guard}{ranks.at_text(i)} < {values.shape[axis]})"):
            place = unit.name("place")
            unit.line(f"const int {place} = {line(i)} + {ranks.at_text(i)} * {strides[axis]};")
            unit.line(f"{best}[{place}] = {x.at_text(i)};")
            unit.line(f"{where}[{place}] = {coordinate(layout, axis, i)};")
    unit.sync()
    out = default_layout(tuple(values.shape), values.dtype)
    found = read_back(unit, best, values.dtype, out)
    index = read_back(unit, where, np.int32, out)
    if kind(numbers.dtype).c == "int":
        return [found, index]
    wide = unit.registers(numbers.dtype, out)
    return [found, unit.fill(wide, lambda i: f"({wide.kind.c}){index.at_text(i)}")]


@RULES.rule(lax.top_k_p)
def _top_k(unit: Unit, eqn: Any, x: Any) -> list[Any]:
    axis = eqn.params.get("axis", -1) % len(eqn.invars[0].aval.shape)
    return _best(unit, eqn, x, axis, True)


@RULES.rule(*present("approx_top_k_p"))
def _approx_top_k(unit: Unit, eqn: Any, x: Any) -> list[Any]:
    p = eqn.params
    axis = p["reduction_dimension"] % len(eqn.invars[0].aval.shape)
    if eqn.outvars[0].aval.shape[axis] != p["k"]:
        raise unit.refuse("approx_max_k without aggregate_to_topk is not compiled for GPUs.", "use lax.top_k")
    return _best(unit, eqn, x, axis, p["is_max_k"])
