"""What a TPU core does for operations that are more than array code: Refs, program ids, prints, scopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import explain
from palladion.language import ops
from palladion.rules import RuleTable
from palladion.simulator import shared_rules
from palladion.simulator.code import Compiler, View, location, view
from palladion.simulator.memory import WHOLE, Buffer, Region
from palladion.simulator.shared_rules import add_into, held, read_partly_outside
from palladion.simulator.tpu.machine import HBM_SPACES, Core, Semaphores
from palladion.simulator.values import ARRAYS

RULES = RuleTable("the simulated TPU", covers=lambda primitive: ARRAYS.supports(primitive))
shared_rules.install(RULES)


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
    hint = "a TPU reads and writes whatever lies there; clamp the index or mask the access"
    return shared_rules.check_bounds(agent, eqn, v, operands, buffer, access, hint)


def note_read(agent: Any, eqn: Any, site: int, buffer: Buffer, region: Region) -> None:
    """Check a read against the buffer's history."""
    if buffer.writes is None:
        return
    core: Core = agent.place
    if conflict := buffer.read_by(agent.actor, region, site):
        core.machine.race(core, buffer, "read", agent.name, conflict, eqn)
    hint = "initialise it first, for accumulators in the first program of a block: @pl.when(pl.program_id(axis) == 0)"
    shared_rules.check_written(agent, eqn, buffer, region, core.machine.params.uninitialized_reads, hint)


def note_write(agent: Any, eqn: Any, site: int, buffer: Buffer, region: Region) -> None:
    """Check a write against the buffer's history."""
    if buffer.writes is not None and (conflict := buffer.written_by(agent.actor, region, site)):
        agent.place.machine.race(agent.place, buffer, "write", agent.name, conflict, eqn)


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
                return read_partly_outside(agent.place.machine, buffer, v.region(operands), fill_dtype)
            region = v.region(operands)
        if tracked:
            note_read(agent, eqn, site, buffer, region)
        return held(region.get(buffer.data))

    return read


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
        old = held(region.get(buffer.data)) if wanted else None
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
        add_into(buffer, region, new)
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
