"""Copies and semaphores on the simulated TPU.

A copy reads its source and writes its destination when it completes, at some moment between its start and the wait
for it. It knows what its issuer knew at the start, and only who waits for it knows of its accesses: so a kernel that
overwrites the source, or reads the destination, before the wait has a race, whatever the schedule was.

DMA semaphores count bytes. A remote copy writes the buffer with the same key on the other device and signals that
device's semaphore. The barrier semaphore of a collective id exists on every core from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from palladion import jaxlink
from palladion.errors import count_of, explain
from palladion.language.semaphores import semaphore_read_p, semaphore_signal_p, semaphore_wait_p
from palladion.language.tpu.dma import dma_start_p, dma_wait_p
from palladion.language.tpu.semaphores import get_barrier_semaphore_p
from palladion.simulator.code import Compiler, View, location, placeholders
from palladion.simulator.engine import Counter
from palladion.simulator.memory import Buffer
from palladion.simulator.tpu.chip import LATENCY
from palladion.simulator.tpu.machine import BARRIER, Core, Machine, Semaphores
from palladion.simulator.tpu.rules import RULES, check_bounds
from palladion.simulator.waits import Elsewhere, take

MACHINE_ONLY = (
    dma_start_p, dma_wait_p, semaphore_signal_p, semaphore_wait_p, semaphore_read_p, get_barrier_semaphore_p,
)  # fmt: skip


class _End:
    """A Ref operand of an equation, with the view taken of it."""

    def __init__(self, eqn: Any, ref_view: Any) -> None:
        self.k = ref_view.ref.k
        self.aval = eqn.invars[self.k].aval
        self.view = View(ref_view.transforms)

    def count(self) -> int:
        """Bytes of the view; sizes do not depend on run-time indices."""
        zeros = [np.int32(0)] * 64
        whole = np.broadcast_to(np.zeros((), self.aval.dtype), self.aval.shape)
        part = np.asarray(self.view.region(zeros).get(whole))
        return math.prod(part.shape) * part.dtype.itemsize


def _semaphore(end: _End, operands: Any) -> tuple[Semaphores, Any]:
    return operands[end.k], end.view.region(operands)


def _numbers(tree: Any) -> Any:
    """A device id's structure with the operands' numbers at its leaves."""
    return jax.tree.map(lambda x: x.k, tree, is_leaf=lambda x: hasattr(x, "k"))


# --- other devices -------------------------------------------------------------------------------------------------
def target(core: Core, eqn: Any, device_id: Any, core_index: Any, operands: Any) -> Core:
    """The core that a device id names, in its core's own place on that device unless told otherwise."""
    machine = core.machine
    index = core.index if core_index is None else int(operands[core_index])
    device: int = core.device.id
    asked: Any = device
    sizes = list(machine.axes.values())
    if isinstance(device_id, Mapping):
        coords = dict(core.device.axes)
        for name, k in device_id.items():
            value = int(operands[k])
            if isinstance(name, tuple):
                dims = [machine.axes[n] for n in name]
                inside = 0 <= value < math.prod(dims)
                coords |= dict(zip(name, map(int, np.unravel_index(value, dims)))) if inside else {name: value}
            elif name in coords:
                coords[name] = value
            else:
                index = value
        device = _logical(list(coords.values()), sizes)
        asked = {name: int(operands[k]) for name, k in device_id.items()}
    elif isinstance(device_id, tuple):
        asked = tuple([int(operands[k]) for k in device_id])
        device = _logical(list(asked), sizes)
    elif device_id is not None:
        device = asked = int(operands[device_id])
    if not 0 <= device < len(machine.devices) or not 0 <= index < machine.num_cores:
        machine.found(
            "out-of-bounds",
            f"There is no device {asked}, core {index}: the mesh has {count_of(len(machine.devices), 'device')} "
            f"({', '.join(f'{a}: {n}' for a, n in machine.axes.items()) or 'no axes'}) of "
            f"{count_of(machine.num_cores, 'core')}.",
            where=location(eqn),
            when=core.when(),
            hint="take neighbours modulo the size of the axis: lax.rem(me + 1, lax.axis_size(axis))",
        )
    return machine.core(device, index)


def _logical(coords: list[int], sizes: list[int]) -> int:
    if len(coords) != len(sizes) or any(not 0 <= c < n for c, n in zip(coords, sizes)):
        return -1
    return int(np.ravel_multi_index(coords, sizes)) if sizes else 0


def counterpart(agent: Any, thing: Any, other: Core, eqn: Any) -> Any:
    """The buffer or semaphore on another core that corresponds to one here; waits until it exists."""
    core: Core = agent.place
    if other is core:
        return thing
    if isinstance(thing, Buffer) and thing.whole is not None:
        return counterpart(agent, thing.whole, other, eqn).part(thing.index[:-1])
    shared = thing.place is core.device  # by the cores of a device
    if shared and other.device is core.device:
        return thing
    place = other.device.buffers if shared else other.buffers
    if thing.key not in place:
        waits = Elsewhere(f"{thing.label} to exist on {other.name}", eqn)
        core.machine.engine.wait(agent, lambda: thing.key in place, (), waits)
    return place[thing.key]


# --- copies --------------------------------------------------------------------------------------------------------
@RULES.rule(dma_start_p)
def _dma_start(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    src, dst = _End(eqn, given.src), _End(eqn, given.dst)
    dst_sem = None if given.dst_sem is None else _End(eqn, given.dst_sem)
    src_sem = None if given.src_sem is None else _End(eqn, given.src_sem)
    device, add = _numbers(given.device_id), eqn.params["add"]
    remote = device is not None
    site_of = compiler.machine[1]
    site, size = site_of(eqn), src.count()

    def start(agent: Any, *operands: Any) -> list:
        core: Core = agent.place
        machine: Machine = core.machine
        source, goal = operands[src.k], operands[dst.k]
        check_bounds(agent, eqn, src.view, operands, source, "copy from")
        check_bounds(agent, eqn, dst.view, operands, goal, "copy to")
        source_part, goal_part = src.view.region(operands), dst.view.region(operands)
        other = target(core, eqn, device, None, operands) if remote else core
        if remote:
            goal = counterpart(agent, goal, other, eqn)
        source, goal = source.as_it_is(), goal.as_it_is()
        signals = []
        if dst_sem is not None:
            sem, part = _semaphore(dst_sem, operands)
            sem = counterpart(agent, sem, other, eqn) if remote else sem
            signals.append((sem.one(part), size))
        if src_sem is not None:
            sem, part = _semaphore(src_sem, operands)
            signals.append((sem.one(part), size))
        name = f"the copy of {source.label} to {goal.label}" + (f" on {other.name}" if remote else "")
        name += f" by {core.name}" if core.name != "the core" else ""

        def effect(actor: Any) -> None:
            if actor is not None:
                if source.writes is not None and (bad := source.read_by(actor, source_part, site)):
                    machine.race(core, source, "read", name, bad, eqn)
                if goal.writes is not None and (bad := goal.written_by(actor, goal_part, site)):
                    machine.race(core, goal, "write", name, bad, eqn)
                if machine.params.uninitialized_reads != "allow":
                    goal.copied_from(goal_part, source, source_part)
            value = source_part.get(source.data)
            if add:
                value = goal_part.get(goal.data) + value
            goal_part.put(goal.data, value)

        machine.log(core, None, f"starts {name}, {size} bytes")
        duration = 0.0
        if machine.timeline is not None:
            begin, end = core.device.move(size, agent.time, machine.info)
            machine.span(core, "copies", name, "copy", begin, end, location(eqn))
            duration = end + LATENCY - agent.time
        machine.engine.start(agent, name, effect, signals, site=site, duration=duration)
        machine.engine.pause(agent)
        return []

    return start


@RULES.rule(dma_wait_p)
def _dma_wait(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    receives = eqn.params["wait"] == "recv"
    sem_end = _End(eqn, given.dst_sem if receives else given.src_sem)
    amount = _End(eqn, given.dst if receives else given.src).count()

    def wait(agent: Any, *operands: Any) -> list:
        sem, part = _semaphore(sem_end, operands)
        _take(agent, sem, sem.one(part), amount, " bytes", eqn, decrement=True)
        return []

    return wait


def _take(agent: Any, sem: Semaphores, counter: Counter, amount: int, unit: str, eqn: Any, *, decrement: bool) -> None:
    machine: Machine = agent.place.machine
    machine.log(agent.place, sem, f"waits for {counter.label} to reach {amount}{unit}; it is {counter.value}")
    there = take(machine.engine, agent, counter, amount, eqn, decrement=decrement, unit=unit)
    core = agent.place
    machine.span(core, f"core {core.index}", f"wait for {counter.label}", "wait", agent.time, there, location(eqn))
    agent.time = max(agent.time, there)


# --- semaphores ----------------------------------------------------------------------------------------------------
@RULES.rule(semaphore_signal_p)
def _signal(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, device = _End(eqn, given.sem), given.value.k, _numbers(given.device_id)
    core_index = None if given.core_index is None else given.core_index.k
    site = compiler.machine[1](eqn)
    here = device is None and core_index is None

    def signal(agent: Any, *operands: Any) -> list:
        core: Core = agent.place
        sem, part = _semaphore(end, operands)
        if not here:
            other = target(core, eqn, device, core_index, operands)
            sem = counterpart(agent, sem, other, eqn)
        clock = agent.actor.publish() if core.machine.tracking else None
        amount = int(operands[value])
        core.machine.log(
            core, sem, f"signals {sem.one(part).label} of {getattr(sem.place, 'name', 'the device')} by {amount}"
        )
        sem.one(part).add(amount, clock, agent.time, site)
        core.machine.engine.pause(agent)
        return []

    return signal


@RULES.rule(semaphore_wait_p)
def _wait(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, value, decrement = _End(eqn, given.sem), given.value.k, given.decrement

    def wait(agent: Any, *operands: Any) -> list:
        sem, part = _semaphore(end, operands)
        _take(agent, sem, sem.one(part), int(operands[value]), "", eqn, decrement=decrement)
        return []

    return wait


@RULES.rule(semaphore_read_p)
def _read(compiler: Compiler, eqn: Any) -> Callable:
    (given,) = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end = _End(eqn, given)

    def read(agent: Any, *operands: Any) -> Any:
        sem, part = _semaphore(end, operands)
        agent.place.machine.engine.yield_to_others(agent)  # a loop that reads until it changes must let it change
        return np.int32(sem.one(part).value)

    return read


@RULES.rule(get_barrier_semaphore_p)
def _barrier(compiler: Compiler, eqn: Any) -> Callable:
    tag = eqn.params["tag"]

    def barrier(agent: Any) -> Semaphores:
        machine: Machine = agent.place.machine
        if machine.collective_id is None:
            raise ValueError(
                explain(
                    f"The kernel {machine.name} uses a barrier semaphore, but its call has no collective_id.",
                    where=location(eqn),
                    hint="compiler_params=pltpu.CompilerParams(collective_id=0), the same number on every device",
                )
            )
        key = ("barrier", machine.collective_id, tag)
        for core in machine.cores:
            if key not in core.buffers:
                made = Semaphores((), BARRIER, "barrier_sem", core, key)
                core.buffers[key] = made
                machine.keep_watch(made, core)
        return agent.place.buffers[key]

    return barrier


# --- the whole call ------------------------------------------------------------------------------------------------
def uses_machine(jaxpr: Any) -> bool:
    """Whether a kernel copies or synchronises by itself."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in MACHINE_ONLY or any(map(uses_machine, jaxlink.jaxprs_in_params(eqn.params))):
            return True
    return False


def finish(machine: Machine) -> None:
    """After the last program: what is in flight completes, and every semaphore must be back at zero."""
    engine = machine.engine
    while engine.flying:
        engine.complete(engine.flying[0])
    if machine.semaphore_checks:
        for made, core in machine.drain:
            machine.check_semaphores(made, core, None)
