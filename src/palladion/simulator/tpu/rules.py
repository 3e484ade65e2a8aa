"""What a TPU core does for operations that are more than array code: Refs, program ids, prints, scopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import KernelCheckError, count_of, explain
from palladion.language import ops
from palladion.rules import RuleTable
from palladion.simulator.code import Compiler, View, location, view
from palladion.simulator.memory import WHOLE, Buffer, Region, read_outside
from palladion.simulator.tpu.machine import HBM_SPACES, Core, Semaphores
from palladion.simulator.values import ARRAYS

RULES = RuleTable("the simulated TPU", covers=lambda primitive: ARRAYS.supports(primitive))


# --- Refs ----------------------------------------------------------------------------------------------------------
def refuse_hbm(eqn: Any, verb: str) -> None:
    """A core computes on VMEM and SMEM.

    Raises:
      ValueError: the equation's Ref lies in HBM.
    """
    ref = eqn.invars[0].aval
    if ref.memory_space in HBM_SPACES:
        raise ValueError(
            explain(
                f"Cannot {verb} {getattr(ref, 'label', 'a Ref')}: it lies in HBM, which a core reaches only by copies.",
                where=location(eqn),
                hint="copy it to VMEM with pltpu.sync_copy or pltpu.async_copy, or give the operand a block shape",
            )
        )


def check_bounds(agent: Any, eqn: Any, v: View, operands: Any, buffer: Any, access: str) -> bool:
    """Whether run-time indices stay inside; a read outside may be allowed, everything else is a finding."""
    bad = v.outside(operands)
    if bad is None:
        return True
    core: Core = agent.place
    machine = core.machine
    if access == "read" and machine.params.out_of_bounds_reads == "uninitialized":
        return False
    d, index, size = bad
    text = f"pl.ds({index.start}, {index.stop - index.start})" if isinstance(index, slice) else f"index {index}"
    if isinstance(index, np.ndarray):
        text = f"an index array with {index.min()} to {index.max()}"
    machine.found(
        "out-of-bounds",
        f"Out of bounds {access}: {text} in dimension {d} of {buffer.label}, which has {count_of(size, 'element')}.",
        where=location(eqn),
        when=core.when(),
        operand=buffer.label,
        hint="a TPU reads and writes whatever lies there; clamp the index or mask the access",
    )
    return False


def note_read(agent: Any, eqn: Any, site: int, buffer: Buffer, region: Region) -> None:
    """Check a read against the buffer's history."""
    if buffer.writes is None:
        return
    core: Core = agent.place
    if conflict := buffer.read_by(agent.actor, region, site):
        core.machine.race(core, buffer, "read", agent.name, conflict, eqn)
    wanted = core.machine.params.uninitialized_reads
    if wanted != "allow" and buffer.unwritten(region):
        core.machine.found(
            "uninitialized-read",
            f"Read of {buffer.label} before anything was written there.",
            where=location(eqn),
            when=core.when(),
            operand=buffer.label,
            hint="initialise it first, for accumulators in the first program of a block: "
            "@pl.when(pl.program_id(axis) == 0)",
            warn=wanted == "warn",
        )


def note_write(agent: Any, eqn: Any, site: int, buffer: Buffer, region: Region) -> None:
    """Check a write against the buffer's history."""
    if buffer.writes is not None and (conflict := buffer.written_by(agent.actor, region, site)):
        agent.place.machine.race(agent.place, buffer, "write", agent.name, conflict, eqn)


def _value(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x


@RULES.rule(jaxlink.get_p)
def _get(compiler: Compiler, eqn: Any) -> Callable:
    refuse_hbm(eqn, "read")
    v, (tracked, site_of) = view(eqn, 1), compiler.machine
    site = site_of(eqn)
    if v.fixed is WHOLE and not tracked:

        def whole(agent: Any, buffer: Buffer) -> Any:
            data = buffer.data
            return data.copy() if data.flags.writeable else data

        return whole
    fixed = v.fixed
    fill_dtype = eqn.outvars[0].aval.dtype

    def read(agent: Any, *operands: Any) -> Any:
        buffer = operands[0]
        region = fixed
        if region is None:
            if not check_bounds(agent, eqn, v, operands, buffer, "read"):
                return _read_outside(agent, buffer, v, operands, fill_dtype)
            region = v.region(operands)
        if tracked:
            note_read(agent, eqn, site, buffer, region)
        return _value(region.get(buffer.data))

    return read


def _read_outside(agent: Any, buffer: Buffer, v: View, operands: Any, dtype: Any) -> Any:
    value = buffer.data
    fill = agent.place.machine.fill(dtype)
    for kind, how in v.region(operands).views:
        value = read_outside(value, how, fill) if kind == "index" else Region([(kind, how)]).get(value)
    return value


@RULES.rule(jaxlink.swap_p)
def _swap(compiler: Compiler, eqn: Any) -> Callable:
    refuse_hbm(eqn, "write")
    v, (tracked, site_of) = view(eqn, 2), compiler.machine
    site, fixed = site_of(eqn), v.fixed
    wanted = compiler.wanted[0]

    def write(agent: Any, *operands: Any) -> Any:
        buffer, new = operands[0], operands[1]
        region = fixed
        if region is None:
            check_bounds(agent, eqn, v, operands, buffer, "write")
            region = v.region(operands)
        if tracked:
            if wanted:
                note_read(agent, eqn, site, buffer, region)
            note_write(agent, eqn, site, buffer, region)
        old = _value(region.get(buffer.data)) if wanted else None
        region.put(buffer.data, new)
        return old

    return write


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(compiler: Compiler, eqn: Any) -> Callable:
    refuse_hbm(eqn, "add to")
    v, (tracked, site_of) = view(eqn, 2), compiler.machine
    site = site_of(eqn)

    def write(agent: Any, *operands: Any) -> Any:
        buffer, new = operands[0], operands[1]
        check_bounds(agent, eqn, v, operands, buffer, "write")
        region = v.region(operands)
        if tracked:
            note_read(agent, eqn, site, buffer, region)
            note_write(agent, eqn, site, buffer, region)
        last = region.views[-1] if region.views else ("", ())
        if last[0] == "index" and any(isinstance(i, np.ndarray) for i in last[1]):  # a repeated index counts each time
            outer = Region(region.views[:-1])
            part = np.array(outer.get(buffer.data))
            np.add.at(part, last[1], new)
            outer.put(buffer.data, part)
        else:
            region.put(buffer.data, region.get(buffer.data) + new)
        return []

    return write


def _scratch(agent: Any, aval: Any, label: str, value: Any = None) -> Any:
    core: Core = agent.place
    if aval.memory_space in HBM_SPACES and not core.machine.params.allow_hbm_allocation_in_run_scoped:
        raise ValueError(
            explain(
                f"pl.run_scoped allocates {label} in HBM, which a TPU kernel cannot do.",
                hint="make it a further output, or ask for it: "
                "pltpu.InterpretParams(allow_hbm_allocation_in_run_scoped=True)",
            )
        )
    core.hold(aval, 1, label)
    core.scopes += 1
    key = ("scoped", core.index, core.scopes)
    made = core.machine.allocate(aval, label, core, key)
    core.buffers[key] = made
    if value is not None and isinstance(made, Buffer):
        made.given().data[...] = value
    return made


@RULES.rule(jaxlink.ref_p)
def _new_ref(compiler: Compiler, eqn: Any) -> Callable:
    aval = eqn.outvars[0].aval
    return lambda agent, x: _scratch(agent, aval, "a new Ref", x)


@RULES.rule(jaxlink.empty_ref_p)
def _empty_ref(compiler: Compiler, eqn: Any) -> Callable:
    aval = eqn.outvars[0].aval
    return lambda agent: _scratch(agent, aval, "a new Ref")


@RULES.rule(jaxlink.freeze_p)
def _freeze(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, buffer: _value(buffer.data)


@RULES.rule(jaxlink.free_ref_p)
def _free_ref(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, buffer: []


@RULES.rule(jaxlink.ref_broadcast_to_p)
def _broadcast_to(compiler: Compiler, eqn: Any) -> Callable:
    shape = tuple(eqn.params["shape"])
    return lambda agent, x: np.broadcast_to(x, shape)


@RULES.rule(ops.run_scoped_p)
def _run_scoped(compiler: Compiler, eqn: Any) -> Callable:
    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    avals = [v.aval for v in jaxpr.invars[len(jaxpr.invars) - n :]]
    code = compiler.code(jaxpr)
    tracked, site_of = compiler.machine
    end = f"the end of the scope at {location(eqn)}" if tracked else None
    site = site_of(end) if tracked else 0

    def run(agent: Any, *operands: Any) -> Any:
        core: Core = agent.place
        before = core.vmem_bytes
        scoped = [_scratch(agent, a, a.label) for a in avals]
        results = code(agent, [*operands, *scoped])
        core.vmem_bytes = before
        for made in scoped:
            if isinstance(made, Semaphores):
                if core.machine.semaphore_checks:
                    core.machine.check_semaphores(made, core, location(eqn))
            elif made.writes is not None and (conflict := made.written_by(agent.actor, WHOLE, site)):
                core.machine.race(core, made, "free", agent.name, conflict, end)
            core.buffers.pop(made.key, None)
        return results

    return run


# --- the kernel's own operations -----------------------------------------------------------------------------------
@RULES.rule(ops.program_id_p)
def _program_id(compiler: Compiler, eqn: Any) -> Callable:
    axis = eqn.params["axis"]
    return lambda agent: np.int32(agent.place.ids[axis])


@RULES.rule(ops.num_programs_p)
def _num_programs(compiler: Compiler, eqn: Any) -> Callable:
    axis = eqn.params["axis"]
    return lambda agent: np.int32(agent.place.sizes[axis])


@RULES.rule(ops.debug_print_p)
def _debug_print(compiler: Compiler, eqn: Any) -> Callable:
    fmt = eqn.params["fmt"]

    def show(agent: Any, *values: Any) -> list:
        print(ops.format_values(fmt, [np.asarray(v) for v in values]), flush=True)
        return []

    return show


@RULES.rule(jaxlink.jax_debug_print_p)
def _jax_debug_print(compiler: Compiler, eqn: Any) -> Callable:
    if eqn.params["static_args"]:
        raise RULES.unsupported(eqn)
    fmt, tree = eqn.params["fmt"], eqn.params["in_tree"]

    def show(agent: Any, *values: Any) -> list:
        args, named = jax.tree.unflatten(tree, [np.asarray(v) for v in values])
        print(fmt.format(*args, **named), flush=True)
        return []

    return show


@RULES.rule(ops.debug_check_p)
def _debug_check(compiler: Compiler, eqn: Any) -> Callable:
    message, where = eqn.params["message"], eqn.params["where"]

    def check(agent: Any, condition: Any) -> list:
        if not condition:
            point = tuple(map(int, agent.place.ids)) or None
            raise KernelCheckError(explain(message, where=where, grid_point=point))
        return []

    return check


@RULES.rule(ops.delay_p)
def _delay(compiler: Compiler, eqn: Any) -> Callable:
    def wait(agent: Any, nanos: Any) -> list:
        agent.time += float(nanos) * 1e-9
        agent.place.machine.engine.pause(agent)
        return []

    return wait


@RULES.rule(ops.multiple_of_p)
def _multiple_of(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, x: x


@RULES.rule(lax.axis_index_p)
def _axis_index(compiler: Compiler, eqn: Any) -> Callable:
    name = eqn.params["axis_name"]
    names = name if isinstance(name, tuple) else (name,)

    def index(agent: Any) -> Any:
        core: Core = agent.place
        position = 0
        for n in names:
            if n in core.axes:
                position = position * core.machine.core_axes[n] + core.axes[n]
            else:
                position = position * core.machine.axes[n] + core.device.axes[n]
        return np.int32(position)

    return index
