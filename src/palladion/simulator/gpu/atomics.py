"""Atomic updates of memory, and stores and reductions over all devices, on the simulated GPU.

Atomic updates, and TMA copies with a reduction, do not race with each other, whoever makes them; with ordinary loads
and stores they do. An element that an index array names twice is updated twice.

Sources: the API reference of Pallas Mosaic GPU; PTX ISA, "atom", "multimem".
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax
import numpy as np

from palladion.language.gpu.atomics import atomic_p, multimem_load_reduce_p, multimem_store_p
from palladion.simulator import shared_rules
from palladion.simulator.clocks import Actor, site_of
from palladion.simulator.code import Compiler, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import GENERIC, Thread
from palladion.simulator.gpu.rules import UNWRITTEN, read, write
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End, counterpart, devices_along
from palladion.simulator.memory import Region


def _increment(old: Any, limit: Any) -> Any:
    return np.where(old >= limit, 0, old + 1)


def _decrement(old: Any, limit: Any) -> Any:
    return np.where((old == 0) | (old > limit), limit, old - 1)


ATOMICS: dict[str, np.ufunc] = {
    "add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {**ATOMICS, "inc": _increment, "dec": _decrement}


def note_update(
    thread: Thread, eqn: Any, site: int, buffer: Buffer, region: Region, who: str, actor: Actor, view: int,
    atomics: Set[int],
) -> None:  # fmt: skip
    """Check an atomic update against the history: other updates, made by the lines `atomics`, do not matter."""
    if buffer.writes is None:
        return
    machine = thread.machine
    if machine.uninitialized != "allow" and buffer.unwritten(region):
        while machine.engine.flying:  # perhaps a copy to it, for which nobody waited
            machine.engine.complete(machine.engine.flying[0])
        shared_rules.check_written(thread.agent, eqn, buffer, region, machine.uninitialized, UNWRITTEN)
    lines = np.fromiter(atomics, np.int64)
    if conflict := buffer.updated_by(actor, region, site, view, lambda stamps: np.isin(site_of(stamps), lines)):
        thread.machine.race(thread, buffer, "update", who, conflict, eqn, actor, view, region)


@RULES.rule(atomic_p)
def _atomic(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, setting = End(eqn, given.ref), given.value.k, compiler.machine
    site, ufunc = setting.site_of(eqn), ATOMICS[eqn.params["op"]]
    setting.atomics.add(site)

    def update(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        buffer = end.of(agent, operands)
        end.check(agent, operands, buffer, "update")
        region = end.region(operands)
        if setting.tracked:
            note_update(thread, eqn, site, buffer, region, agent.name, agent.actor, GENERIC, setting.atomics)
        shared_rules.update(buffer, region, operands[value], ufunc)
        thread.machine.engine.pause(agent)
        return []

    return update


# --- all devices ------------------------------------------------------------------------------------------------------
@RULES.rule(multimem_store_p)
def _multimem_store(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, axes = End(eqn, given.ref), given.value.k, eqn.params["collective_axes"]
    site, tracked = compiler.machine.site_of(eqn), compiler.machine.tracked

    def store(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        own = end.of(agent, operands)
        end.check(agent, operands, own, "write")
        region = end.region(operands)
        for device in devices_along(thread, axes):
            buffer = counterpart(agent, own, device, eqn)
            if tracked:
                write(agent, eqn, site, buffer, region)
            region.put(buffer.data, operands[value])
        return []

    return store


@RULES.rule(multimem_load_reduce_p)
def _multimem_load_reduce(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, axes, ufunc = End(eqn, given.ref), eqn.params["collective_axes"], ATOMICS[eqn.params["reduction_op"]]
    site, tracked, dtype = compiler.machine.site_of(eqn), compiler.machine.tracked, eqn.outvars[0].aval.dtype

    def load(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        own = end.of(agent, operands)
        end.check(agent, operands, own, "read")
        region, total = end.region(operands), None
        for device in devices_along(thread, axes):
            buffer = counterpart(agent, own, device, eqn)
            if tracked:
                read(agent, eqn, site, buffer, region)
            part = np.array(region.get(buffer.data))
            total = part if total is None else ufunc(total, part)
        return [np.asarray(total).astype(dtype, copy=False)]

    return load
