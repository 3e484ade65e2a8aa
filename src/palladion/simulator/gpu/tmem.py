"""Loads and stores of tensor memory by the threads of a simulated Blackwell GPU, and the waits for them.

Both are operations of their own. What a load gives is there at once, but only `wait_load_tmem` tells its thread that it
has read; what a store writes is there after `commit_tmem`. What they read and write is checked in the view of the
tensor core: a barrier passes that on only if it `orders_tensor_core`.

Sources: the Mosaic GPU reference, "Load", "Store"; PTX ISA, tcgen05.ld, tcgen05.st, tcgen05.wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.language.gpu.tcgen05 import async_load_tmem_p, async_store_tmem_p, commit_tmem_p, wait_load_tmem_p
from palladion.simulator.code import Compiler, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu import rules
from palladion.simulator.gpu.chip import LANES
from palladion.simulator.gpu.machine import TENSOR, Thread, Who
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.tensor_core import By, Part
from palladion.simulator.gpu.views import End
from palladion.simulator.shared_rules import held

_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: x.max(-1),
    "min": lambda x: x.min(-1),
    "absmax": lambda x: np.abs(x).max(-1),
    "absmin": lambda x: np.abs(x).min(-1),
}


@RULES.rule(async_load_tmem_p)
def _load(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, site = End(eqn, given.ref), compiler.machine.site_of(eqn)
    seconds = end.size / LANES / compiler.machine.chip.clock
    reduce = _REDUCTIONS.get(eqn.params["reduce"])

    def load(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        engine, part = thread.machine.engine, Part(agent, end, operands, thread.block)
        who = Who(f"the load of {part.buffer.label} by {thread.name}", "tmem")
        operation = engine.start(agent, who, lambda actor: None, (), site=site, home=TENSOR, duration=seconds)
        part.note("read", By(thread, eqn, site, operation), TENSOR)
        thread.loads.append(operation)
        agent.time += seconds
        value = held(part.get())
        return [value] if reduce is None else [value, reduce(value)]

    return load


@RULES.rule(async_store_tmem_p)
def _store(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, k, site = End(eqn, given.ref), given.value.k, compiler.machine.site_of(eqn)
    seconds = end.size / LANES / compiler.machine.chip.clock

    def store(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        engine, value = thread.machine.engine, operands[k]
        part = Part(agent, end, operands, thread.block, "write")
        who = Who(f"the store to {part.buffer.label} by {thread.name}", "tmem")
        operation = engine.start(
            agent, who, lambda actor: part.put(value), (), site=site, home=TENSOR, duration=seconds
        )
        part.note("write", By(thread, eqn, site, operation), TENSOR)
        thread.stores.append(operation)
        engine.pause(agent)
        return []

    return store


@RULES.rule(wait_load_tmem_p)
def _wait_load(compiler: Compiler, eqn: Any) -> Callable:
    def wait(agent: Agent) -> list:
        _join_all(agent, agent.place.loads)
        return []

    return wait


@RULES.rule(commit_tmem_p)
def _commit(compiler: Compiler, eqn: Any) -> Callable:
    def commit(agent: Agent) -> list:
        _join_all(agent, agent.place.stores)
        return []

    return commit


def _join_all(agent: Agent, operations: list[Any]) -> None:
    for operation in operations:
        rules.join(agent, operation, agent.place.machine.engine)
    operations.clear()
