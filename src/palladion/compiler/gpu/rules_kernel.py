"""What a kernel asks of its machine: its place in the grid, scratch memory, registers, single warps."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from palladion.compiler.gpu import memory, operands, smem, tmem
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar
from palladion.language import kernel, ops
from palladion.language.gpu import control


# --- places ---------------------------------------------------------------------------------------------------------
@RULES.rule(ops.program_id_p)
def _program_id(unit: Unit, eqn: Any) -> Scalar:
    return unit.ids[eqn.params["axis"]]


@RULES.rule(ops.num_programs_p)
def _num_programs(unit: Unit, eqn: Any) -> Scalar:
    return unit.sizes[eqn.params["axis"]]


@RULES.rule(lax.axis_index_p)
def _axis_index(unit: Unit, eqn: Any) -> Scalar:
    name = eqn.params["axis_name"]
    names = name if isinstance(name, tuple) else (name,)
    if len(names) == 1:
        return _along(unit, names[0])
    text, value = "0", 0
    for n in names:
        size, here = _size(unit, n), _along(unit, n)
        text = f"({text}) * {size} + {here.text}" if text != "0" else here.text
        value = None if value is None or here.value is None else value * size + int(here.value)
    return Scalar(str(value), np.dtype(np.int32), value) if value is not None else unit.scalar(np.int32, text, "place")


def _along(unit: Unit, name: Any) -> Scalar:
    if name in unit.axes:
        return unit.axes[name]
    devices = unit.tables.more.get("devices", {})
    if devices.get(name, 0) == 1:
        return Scalar("0", np.dtype(np.int32), 0)
    raise unit.refuse(
        f"The kernel asks for its index along {name!r}, an axis of several devices; the compiler builds kernels for "
        "one device so far.",
        "interpret=plgpu.InterpretGPUParams() runs it on simulated devices",
    )


def _size(unit: Unit, name: Any) -> int:
    if unit.mesh is not None and name in unit.mesh.shape:
        return unit.mesh.shape[name]
    return unit.tables.more.get("devices", {}).get(name, 4)


@RULES.rule(ops.multiple_of_p)
def _multiple_of(unit: Unit, eqn: Any, x: Any) -> Any:
    return x


@RULES.rule(ops.delay_p)
def _delay(unit: Unit, eqn: Any, nanos: Scalar) -> list[Any]:
    unit.line(f"__nanosleep({nanos.text});")
    return []


# --- memory ---------------------------------------------------------------------------------------------------------
@RULES.rule(ops.run_scoped_p)
def _run_scoped(unit: Unit, eqn: Any, *given: Any) -> list[Any]:
    jaxpr, axes = eqn.params["jaxpr"], eqn.params["collective_axes"]
    scoped = jaxpr.invars[len(given) :]
    private = unit.num_threads > 1 and not (unit.mesh is not None and unit.mesh.thread_name in axes)
    keys = [(id(jaxpr), k) for k in range(len(scoped))]
    if private and unit.warps == 1 and any(memory.in_shared(v.aval) for v in scoped):
        raise unit.refuse("A single warp allocates shared memory.", "allocate it outside of the warp_map")
    refs = memory.scratch_all(unit, [v.aval for v in scoped], keys, private)
    results = unit.run(jaxpr, [*given, *refs])
    tmem.release(unit, refs)
    shared = {(r.at, r.size) for r in refs if isinstance(r, memory.Ref) and r.in_smem}
    if shared:
        unit.line("commit_shared();  // what comes next in this memory may be a copy")
        if private or unit.num_threads == 1:
            unit.sync()
        else:
            unit.sync_block()
        if not private:
            for at, size in memory.rooms(unit, refs):
                smem.release(unit, at, size)
    return results


@RULES.rule(kernel.get_global_p)
def _get_global(unit: Unit, eqn: Any) -> Any:
    key = "global", id(eqn.outvars[0])
    if key not in unit.tables.more:
        unit.tables.more[key] = memory.scratch_all(unit, [eqn.params["what"]], [None])[0]
    return unit.tables.more[key]


# --- threads --------------------------------------------------------------------------------------------------------
@RULES.rule(control.set_max_registers_p)
def _set_max_registers(unit: Unit, eqn: Any) -> list[Any]:
    how = "inc" if eqn.params["action"] == "increase" else "dec"
    first = operands.anchor(unit.writer.lines) is None
    unit.line(f'asm volatile("setmaxnreg.{how}.sync.aligned.u32 {eqn.params["n"]};");')
    if how == "inc" and first and unit.writer.depth > 1:
        # What follows from a thread's number is worked out here, not before, where registers are few.
        outer = unit.name("t_outer")
        unit.line(f'const int {outer} = t; int t = {outer}; asm volatile("" : "+r"(t));')
    return []


@RULES.rule(control.griddepcontrol_p)
def _griddepcontrol(unit: Unit, eqn: Any) -> list[Any]:
    unit.line(f'asm volatile("griddepcontrol.{eqn.params["which"]};" ::: "memory");')
    return []


@RULES.rule(control.warp_map_p)
def _warp_map(unit: Unit, eqn: Any, *given: Any) -> list[Any]:
    axis = eqn.params["axis_name"]
    unit.sync()
    outer, unit.axes = unit.axes, {**unit.axes, axis: Scalar("warp", np.dtype(np.int32))}
    unit.warps = 1
    try:
        unit.run(eqn.params["jaxpr"], given)
    finally:
        unit.warps, unit.axes = 4, outer
    unit.line("__syncwarp();")
    unit.sync()
    return []
