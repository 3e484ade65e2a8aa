"""Copies from GMEM to SMEM, and the fence between the proxies, on the simulated GPU.

A copy is an operation in flight: when it completes it reads its source and writes its destination through the async
proxy, and then arrives on its barrier. It knows what its issuer knew at the start, in the async proxy: what threads
have read or written by hand is there only after `commit_smem`. What lies outside the source is filled with zeros.

A copy without a barrier is not one of the TMA engine but of the threads (cp.async): it goes through the generic proxy,
and the thread waits for it by count.

Sources: the Mosaic GPU reference, "Asynchronous copies" and "commit_smem"; PTX ISA, "cp.async.bulk.tensor", "cp.async".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.language.dtypes import element_bits
from palladion.language.gpu.copies import (
    async_prefetch_p,
    commit_smem_p,
    copy_gmem_to_smem_p,
    wait_gmem_to_smem_p,
)
from palladion.language.gpu.params import OOBFillMode
from palladion.language.interpret_params import LoggingMode
from palladion.simulator.clocks import Actor
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu import collective
from palladion.simulator.gpu.boxes import Box, GmemEnd, check_aligned, engine_time, note_copy, tile_of
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import ASYNC, GENERIC, Machine, Thread, Who
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End, predicate


# --- GMEM to SMEM ---------------------------------------------------------------------------------------------------
@RULES.rule(copy_gmem_to_smem_p)
def _copy(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    src, dst = GmemEnd(eqn, given.src), End(eqn, given.dst)
    bar = None if given.barrier is None else End(eqn, given.barrier)
    happens, tile = predicate(given.predicate), tile_of(dst, given.dst)
    site, mode = compiler.machine.site_of(eqn), eqn.params["oob_mode"]
    axes, leader_tracked = eqn.params["collective_axes"], eqn.params["leader_tracked"]
    size = dst.size * element_bits(dst.aval.dtype) // 8
    promised = mode is OOBFillMode.PROMISE_IN_BOUNDS or bar is None

    def start(agent: Agent, *operands: Any) -> list:
        if not happens(operands):
            return []
        thread: Thread = agent.place
        machine: Machine = thread.machine
        source, goal = src.of(agent, operands).as_it_is(), dst.of(agent, operands).as_it_is()
        box, part = src.box(operands, source), dst.region(operands)
        dst.check(agent, operands, goal, "copy to")
        if promised and box.inside is not None:
            _found_outside(agent, eqn, source, box, promise=bar is not None)
        if tile:
            check_aligned(thread, eqn, source.label, tile, box)
        by = "" if thread.name == "the block" else f" by {thread.name}"
        name = Who(f"the copy of {source.label} to {goal.label}{by}", "copy")
        machine.log(thread, LoggingMode.SHARED_MEMORY, f"starts {name}, {size} bytes")
        _, duration = engine_time(thread, size, name, eqn)
        fill = machine.fill(source.data.dtype) if mode is OOBFillMode.UNDEFINED else np.zeros((), source.data.dtype)
        if axes:
            assert bar is not None
            copy = collective.Copy(thread, eqn, site, name, source, box, goal, part, fill, duration)
            collective.start(agent, copy, bar.of(agent, operands), bar.region(operands), axes, leader_tracked)
        else:
            home = GENERIC if bar is None else ASYNC

            def effect(actor: Actor | None) -> None:
                if actor is not None:
                    note_copy(thread, eqn, site, source, box, goal, part, name, actor, home)
                part.put(goal.data, box.get(source, fill))

            signals = [] if bar is None else [(bar.of(agent, operands).one(bar.region(operands)), 1)]
            operation = machine.engine.start(
                agent, name, effect, signals, site=site, home=home, duration=duration, views=2
            )
            if bar is None:
                thread.fetches.append(operation)
        machine.engine.pause(agent)
        return []

    return start


def _found_outside(agent: Agent, eqn: Any, source: Buffer, box: Box, *, promise: bool) -> None:
    thread: Thread = agent.place
    starts = ", ".join("?" if s is None else str(s) for s in box.starts)
    thread.machine.found(
        "out-of-bounds",
        f"Out of bounds copy: a box of {box.shape} at ({starts}) reaches outside of {source.label}, which has shape "
        f"{source.shape}"
        + (", although oob_mode promises that it does not." if promise else "; without a barrier nothing is filled."),
        where=location(eqn),
        when=thread.when(),
        operand=source.label,
        hint="leave oob_mode out: the copy then fills what is outside with zeros"
        if promise
        else "give the copy a barrier: the TMA engine fills what is outside with zeros",
    )


@RULES.rule(wait_gmem_to_smem_p)
def _wait(compiler: Compiler, eqn: Any) -> Callable:
    left = eqn.params["n"]

    def wait(agent: Agent) -> list:
        thread: Thread = agent.place
        while len(thread.fetches) > left:
            _join_generic(agent, thread.fetches.pop(0))
        return []

    return wait


def _join_generic(agent: Agent, operation: Operation) -> None:
    """Wait for a copy that goes through the generic proxy: the async proxy does not see it before a fence."""
    engine = agent.place.machine.engine
    if not operation.done:
        engine.complete(operation)
    if operation.actor is not None:
        known = operation.actor.clock.copy()
        mine, component = agent.actor.clock.known, operation.actor.component
        known.known[ASYNC, component] = mine[ASYNC, component] if component < mine.shape[1] else 0
        agent.actor.clock.join(known)
    agent.time = max(agent.time, operation.ends)


@RULES.rule(commit_smem_p)
def _commit(compiler: Compiler, eqn: Any) -> Callable:
    def commit(agent: Agent) -> list:
        if agent.place.machine.tracking:
            agent.actor.fence(GENERIC, ASYNC)
        return []

    return commit


@RULES.rule(async_prefetch_p)
def _prefetch(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, happens = GmemEnd(eqn, given.ref), predicate(given.predicate)
    size = 0 if end.windows is not None else end.size * element_bits(end.aval.dtype) // 8

    def prefetch(agent: Agent, *operands: Any) -> list:
        if happens(operands):
            machine: Machine = agent.place.machine
            buffer = end.of(agent, operands)
            machine.log(agent.place, LoggingMode.SHARED_MEMORY, f"prefetches {buffer.label}, {size} bytes")
        return []

    return prefetch
