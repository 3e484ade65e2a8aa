"""Semaphores on the simulated GPU: counters in GMEM, which belong to a device.

A signal publishes what its thread knows; a wait learns what is certain of those who made up the amount that it takes
(`engine.Counter`). What passes is ordinary knowledge and that of the async proxy: a semaphore is no proxy fence.

Source: the Mosaic GPU reference, "Semaphore".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.language.gpu.semaphores import semaphore_signal_multicast_p
from palladion.language.interpret_params import LoggingMode
from palladion.language.semaphores import semaphore_read_p, semaphore_signal_p, semaphore_wait_p
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.machine import TENSOR, Machine, Semaphores, Thread
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End, counterpart, devices_along, numbers, target
from palladion.simulator.waits import take


class Looking:
    """Says what an agent looks at, again and again; `eqn` is the line."""

    def __init__(self, counter: Any, eqn: Any) -> None:
        self.counter, self.eqn = counter, eqn

    def __call__(self) -> str:
        return f"a change of {self.counter.label}, which it reads in a loop"


def _publish(agent: Agent) -> Any:
    """What a signal tells: not the order of accesses to TMEM."""
    if not agent.place.machine.tracking:
        return None
    clock = agent.actor.publish()
    clock.known[TENSOR] = 0
    return clock


def _raise(agent: Agent, sems: Semaphores, which: Any, amount: int, clock: Any, site: int) -> None:
    machine: Machine = agent.place.machine
    counter = sems.one(which)
    place = f" of device {sems.place.id}" if len(machine.devices) > 1 else ""
    machine.log(agent.place, LoggingMode.SEMAPHORE, f"signals {counter.label}{place} by {amount}")
    counter.add(amount, clock, agent.time, site)


@RULES.rule(semaphore_signal_p)
def _signal(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, device = End(eqn, given.sem), given.value.k, numbers(given.device_id)
    site = compiler.machine.site_of(eqn)

    def signal(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        sems, which = end.of(agent, operands), end.region(operands)
        if device is not None:
            sems = counterpart(agent, sems, target(thread, device, operands, eqn), eqn)
        _raise(agent, sems, which, int(operands[value]), _publish(agent), site)
        thread.machine.engine.pause(agent)
        return []

    return signal


@RULES.rule(semaphore_signal_multicast_p)
def _multicast(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, axes = End(eqn, given.sem), given.value.k, eqn.params["collective_axes"]
    site = compiler.machine.site_of(eqn)

    def signal(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        sems, which = end.of(agent, operands), end.region(operands)
        clock = _publish(agent)
        for device in devices_along(thread, axes):
            _raise(agent, counterpart(agent, sems, device, eqn), which, int(operands[value]), clock, site)
        thread.machine.engine.pause(agent)
        return []

    return signal


@RULES.rule(semaphore_wait_p)
def _wait(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, decrement = End(eqn, given.sem), given.value.k, given.decrement

    def wait(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine: Machine = thread.machine
        sems, amount = end.of(agent, operands), int(operands[value])
        counter = sems.one(end.region(operands))
        machine.log(
            thread, LoggingMode.SEMAPHORE, f"waits for {counter.label} to reach {amount}; it is {counter.value}"
        )
        there = take(machine.engine, agent, counter, amount, eqn, decrement=decrement)
        if not decrement and len(machine.devices) > 1 and sems.place is thread.block.device:
            looks, block = sems.looks.setdefault(counter, {}), (thread.block.cluster.number, thread.block.rank)
            looks[block] = max(looks.get(block, 0), amount)
        machine.span(thread, None, f"wait for {counter.label}", "wait", agent.time, there, location(eqn))
        agent.time = max(agent.time, there)
        return []

    return wait


@RULES.rule(semaphore_read_p)
def _read(compiler: Compiler, eqn: Any) -> Callable:
    (given,) = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end = End(eqn, given)

    def read(agent: Agent, *operands: Any) -> Any:
        counter = end.of(agent, operands).one(end.region(operands))  # a loop that reads until it changes must let it
        agent.place.machine.engine.yield_to_others(agent, Looking(counter, eqn))
        return np.int32(counter.value)

    return read
