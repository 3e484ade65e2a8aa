"""What a thread of a simulated GPU does for loads and stores, scopes, and named axes.

Loads and stores go through the generic proxy. An accumulator of wgmma is read when the products on it are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import explain
from palladion.language import ops
from palladion.language.gpu.memory import MemorySpace
from palladion.language.kernel import get_global_p
from palladion.language.refs import RefView
from palladion.simulator import shared_rules
from palladion.simulator.clocks import Actor
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.allocation import Scope, allocate_global, is_private
from palladion.simulator.gpu.departure import note_foreign
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import GENERIC, Thread
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End, everywhere
from palladion.simulator.memory import Region
from palladion.simulator.shared_rules import held, read_partly_outside, update

UNWRITTEN = "write it first, or copy data there and wait for the copy"


def _end(eqn: Any, first: int) -> End:
    """The Ref that `get`, `swap` or `addupdate` accesses; its dynamic indices are the operands from `first` on."""
    refs = placeholders(eqn)
    return End(eqn, RefView(refs[0], tuple(jax.tree.unflatten(eqn.params["tree"], refs[first:]))))


# --- checked accesses ---------------------------------------------------------------------------------------------
def note_read(
    thread: Thread, eqn: Any, site: int, buffer: Buffer, region: Region, who: str, actor: Actor, view: int
) -> None:
    """Check a read against the buffer's history: by `who`, through a view, for `thread`."""
    if buffer.writes is None:
        return
    machine = thread.machine
    unwritten = machine.uninitialized != "allow" and buffer.unwritten(region)
    if unwritten:  # perhaps what writes it is in flight: then the mistake is that nobody waited
        while machine.engine.flying:
            machine.engine.complete(machine.engine.flying[0])
    note_foreign(thread, buffer, actor, site)
    if conflict := buffer.read_by(actor, region, site, view):
        machine.race(thread, buffer, "read", who, conflict, eqn, actor, view, region)
    if unwritten:
        label = buffer.label + machine.whose(thread, buffer)
        hint = UNWRITTEN
        if label != buffer.label:
            hint += "; the other block does, and then both meet at a ClusterBarrier (or use collective copies)"
        elif getattr(who, "kind", "") == "tcgen05" and buffer.space is MemorySpace.TMEM:
            hint += "; the first product on an accumulator has accumulate=False (accumulate=k > 0 in a loop)"
        shared_rules.check_written(thread.agent, eqn, buffer, region, machine.uninitialized, hint, label)


def note_write(
    thread: Thread, eqn: Any, site: int, buffer: Buffer, region: Region, who: str, actor: Actor, view: int
) -> None:
    """Check a write against the buffer's history."""
    refuse_operand(thread, eqn, buffer, who)
    if buffer.writes is not None and (conflict := buffer.written_by(actor, region, site, view)):
        thread.machine.race(thread, buffer, "write", who, conflict, eqn, actor, view, region)


def refuse_operand(thread: Thread, eqn: Any, buffer: Buffer, who: str) -> None:
    """A kernel does not write its operands.

    Raises:
      ValueError: the buffer is one that no output is aliased to.
    """
    if buffer.key in thread.machine.read_only:
        raise ValueError(
            explain(
                f"{who} stores to {buffer.label}, an operand of the kernel.",
                where=location(eqn),
                hint="write an output; to work in place alias the two (pl.run_state and pl.core_map do)",
            )
        )


def read(agent: Agent, eqn: Any, site: int, buffer: Buffer, region: Region) -> None:
    """Note a load by a thread itself."""
    note_read(agent.place, eqn, site, buffer, region, agent.name, agent.actor, GENERIC)


def write(agent: Agent, eqn: Any, site: int, buffer: Buffer, region: Region) -> None:
    """Note a store by a thread itself."""
    note_write(agent.place, eqn, site, buffer, region, agent.name, agent.actor, GENERIC)


def _is_accumulator(eqn: Any) -> bool:
    return eqn.invars[0].aval.memory_space is MemorySpace.REGS


@RULES.rule(jaxlink.get_p)
def _get(compiler: Compiler, eqn: Any) -> Callable:
    end, setting = _end(eqn, 1), compiler.machine
    site, tracked, accumulator = setting.site_of(eqn), setting.tracked, _is_accumulator(eqn)
    dtype = eqn.outvars[0].aval.dtype

    def load(agent: Agent, *operands: Any) -> Any:
        buffer = end.of(agent, operands)
        if accumulator:
            finish_products(agent, 0)
        region = end.region(operands)
        if not end.check(agent, operands, buffer, "read"):
            return read_partly_outside(agent.place.machine, buffer, region, dtype)
        if tracked:
            read(agent, eqn, site, buffer, region)
        return held(region.get(buffer.data))

    return load


@RULES.rule(jaxlink.swap_p)
def _swap(compiler: Compiler, eqn: Any) -> Callable:
    end, setting = _end(eqn, 2), compiler.machine
    site, tracked, accumulator = setting.site_of(eqn), setting.tracked, _is_accumulator(eqn)
    wanted = compiler.wanted[0]

    def store(agent: Agent, *operands: Any) -> Any:
        buffers, new = everywhere(end, agent, operands), operands[1]
        buffer = buffers[0]
        if accumulator:
            finish_products(agent, 0)
        end.check(agent, operands, buffer, "write")
        region = end.region(operands)
        if tracked and wanted:
            read(agent, eqn, site, buffer, region)
        old = held(region.get(buffer.data)) if wanted else None
        for each in buffers:
            if tracked:
                write(agent, eqn, site, each, region)
            else:
                refuse_operand(agent.place, eqn, each, agent.name)
            region.put(each.data, new)
        return old

    return store


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(compiler: Compiler, eqn: Any) -> Callable:
    end, setting = _end(eqn, 2), compiler.machine
    site, tracked = setting.site_of(eqn), setting.tracked

    def store(agent: Agent, *operands: Any) -> list:
        buffer = end.of(agent, operands)
        end.check(agent, operands, buffer, "write")
        region = end.region(operands)
        if tracked:
            read(agent, eqn, site, buffer, region)
            write(agent, eqn, site, buffer, region)
        else:
            refuse_operand(agent.place, eqn, buffer, agent.name)
        update(buffer, region, operands[1], np.add)
        return []

    return store


def finish_products(agent: Agent, left: int) -> None:
    """Wait until no more than `left` of the thread's wgmmas are in flight; the oldest are done first."""
    thread: Thread = agent.place
    engine = thread.machine.engine
    while len(thread.wgmmas) > left:
        operation = thread.wgmmas.pop(0)
        join(agent, operation, engine)


def join(agent: Agent, operation: Any, engine: Any) -> None:
    """Wait for an operation: it completes, and the agent knows what it did."""
    if not operation.done:
        engine.complete(operation)
    if operation.actor is not None:
        agent.actor.clock.join(operation.actor.clock)
    agent.time = max(agent.time, operation.ends)


# --- scopes -------------------------------------------------------------------------------------------------------
@RULES.rule(ops.run_scoped_p)
def _run_scoped(compiler: Compiler, eqn: Any) -> Callable:
    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    avals = [v.aval for v in jaxpr.invars[len(jaxpr.invars) - n :]]
    code, setting = compiler.code(jaxpr), compiler.machine
    shared = not all(is_private(a) for a in avals)
    axes = tuple(eqn.params.get("collective_axes") or ())
    last = setting.last is eqn

    def run(agent: Agent, *operands: Any) -> Any:
        scope = Scope(agent, eqn, avals, axes, shared=shared, last=last)
        made = scope.enter()
        results = code(agent, [*operands, *made])
        scope.leave()
        return results

    return run


def _fresh(compiler: Compiler, eqn: Any) -> Callable:
    aval = eqn.outvars[0].aval

    def make(agent: Agent, *value: Any) -> Buffer:
        thread: Thread = agent.place
        machine = thread.machine
        data = machine.empty(aval.shape, aval.dtype)
        made = Buffer(data, "a new Ref", MemorySpace.REGS, thread, None, machine.tracking)
        if value:
            made.given().data[...] = value[0]
        return made

    return make


RULES.rule(jaxlink.ref_p)(_fresh)
RULES.rule(jaxlink.empty_ref_p)(_fresh)


@RULES.rule(get_global_p)
def _get_global(compiler: Compiler, eqn: Any) -> Callable:
    what = eqn.params["what"]
    return lambda agent: allocate_global(agent.place, what, eqn)


# --- where a thread is --------------------------------------------------------------------------------------------
@RULES.rule(lax.axis_index_p)
def _axis_index(compiler: Compiler, eqn: Any) -> Callable:
    name = eqn.params["axis_name"]
    names = name if isinstance(name, tuple) else (name,)

    def index(agent: Agent) -> Any:
        thread: Thread = agent.place
        machine, position = thread.machine, 0
        for n in names:
            if n in thread.axes:
                position = position * machine.size_of(n) + thread.axes[n]
            else:
                position = position * machine.axes[n] + thread.block.device.axes[n]
        return np.int32(position)

    return index
