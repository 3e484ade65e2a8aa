"""Atomic updates of memory; stores and reductions over several devices.

Every element is updated once, by one CUDA thread; an element that an index array names twice, twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.compiler.gpu import access, hazards, memory, thread_copies
from palladion.compiler.gpu.fragments import NOTHING, default_layout
from palladion.compiler.gpu.rules_refs import _as_array, base_of, read, write
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.views import View
from palladion.language.gpu import atomics


@RULES.rule(atomics.atomic_p)
def _atomic(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    view = memory.view_of(unit, given.ref)
    hazards.before(unit, view.ref, writes=True, pattern=None)
    unit.tables.more["communicates"] = True
    update(unit, view, given.value.value, eqn.params["op"], base_of(unit, view))
    return []


def update(unit: Unit, view: View, value: Any, op: str, base: str | None) -> None:
    """Combine each element of a view with that of a value."""
    view = view.folded()
    function = thread_copies.update(unit, op, view.dtype)
    c = value.kind.c
    if not view.shape:
        with unit.one_thread():
            unit.line(f"{function}(({c}*)({access.element(unit, view, base)}), {value.text});")
        return
    value = access.as_registers(unit, view, _as_array(value, view))
    numbers = value.layout.table[value.layout.table != NOTHING]
    if len(np.unique(numbers)) < numbers.size:  # several threads have the same element
        value = unit.fragment(value, default_layout(view.shape, view.dtype))
    access.update_each(unit, view, value, function, base)


@RULES.rule(atomics.multimem_store_p)
def _multimem_store(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    _one_device(unit, eqn)
    write(unit, memory.view_of(unit, given.ref), given.value.value)
    return []


@RULES.rule(atomics.multimem_load_reduce_p)
def _multimem_load_reduce(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    _one_device(unit, eqn)
    return [read(unit, memory.view_of(unit, given.ref), eqn.outvars[0])]


def _one_device(unit: Unit, eqn: Any) -> None:
    sizes = unit.tables.more.get("devices", {})
    axes = eqn.params["collective_axes"]
    if any(sizes.get(a, 2) != 1 for a in (axes if isinstance(axes, (tuple, list)) else (axes,))):
        raise unit.refuse(
            "Stores and reductions over several devices (multimem) are not compiled: the compiler builds kernels for "
            "one device so far.",
            "interpret=plgpu.InterpretGPUParams() runs them on simulated devices",
        )
