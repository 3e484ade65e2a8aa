"""Copies from SMEM to GMEM on the simulated GPU, the groups in which a thread waits for them, and remote stores.

Such a copy is two operations: one reads SMEM, after which the buffer may be used again, and a later one writes GMEM. A
thread waits for its own groups only, the oldest first. What lies outside the array is dropped. With a reduction the
write is an atomic read-modify-write.

`async_store_smem` writes an array to the SMEM of another block of the cluster, and arrives on that block's barrier.

Sources: the Mosaic GPU reference, "SMEM to GMEM copies"; PTX ISA, "cp.async.bulk.commit_group", "cp.reduce.async.bulk".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.language.dtypes import element_bits
from palladion.language.gpu.copies import async_store_smem_p, commit_group_p, copy_smem_to_gmem_p, wait_smem_to_gmem_p
from palladion.language.interpret_params import LoggingMode
from palladion.simulator import shared_rules
from palladion.simulator.clocks import Actor
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu.atomics import ATOMICS, REDUCTIONS, note_update
from palladion.simulator.gpu.boxes import GmemEnd, check_aligned, engine_time, tile_of
from palladion.simulator.gpu.chip import TMA_LATENCY
from palladion.simulator.gpu.machine import ASYNC, GENERIC, Machine, Thread, Who
from palladion.simulator.gpu.rules import UNWRITTEN, join, note_write
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End, everywhere, in_block, peer, predicate
from palladion.simulator.memory import Region

KEPT = 32  # groups of a thread that are remembered one by one
MOST = 512  # even if the thread has not waited until their buffers are read


@RULES.rule(copy_smem_to_gmem_p)
def _store(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    src, dst = End(eqn, given.src), GmemEnd(eqn, given.dst)
    happens, tile = predicate(given.predicate), tile_of(src, given.src)
    setting, commit = compiler.machine, eqn.params["commit_group"]
    site, reduction = setting.site_of(eqn), eqn.params["reduction_op"]
    size = src.size * element_bits(src.aval.dtype) // 8
    combine = None if reduction is None else REDUCTIONS[reduction]
    if combine is not None:
        setting.atomics.add(site)

    def start(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine: Machine = thread.machine
        if not happens(operands):
            if commit:
                _commit(thread)
            return []
        source = src.of(agent, operands).as_it_is()
        goals = [b.as_it_is() for b in everywhere(dst, agent, operands)]
        part, box = src.region(operands), dst.box(operands, goals[0])
        src.check(agent, operands, source, "copy from")
        if tile:
            check_aligned(thread, eqn, goals[0].label, tile, box)
        by = "" if thread.name == "the block" else f" by {thread.name}"
        name = Who(f"the copy of {source.label} to {goals[0].label}{by}", "store")
        machine.log(thread, LoggingMode.SHARED_MEMORY, f"starts {name}, {size} bytes")
        read_time, write_time = engine_time(thread, size, name, eqn)
        held: list[Any] = []

        def read(actor: Actor | None) -> None:
            if actor is not None and source.writes is not None:
                if conflict := source.read_by(actor, part, site, ASYNC):
                    machine.race(thread, source, "read", name, conflict, eqn, actor, ASYNC, part)
                _check_written(agent, eqn, source, part)
                held.append(source.gaps(part))
            held.insert(0, np.array(part.get(source.data)))

        reading = machine.engine.start(agent, name, read, [], site=site, home=ASYNC, duration=read_time, views=2)

        def write(actor: Actor | None) -> None:
            if not reading.done:
                machine.engine.complete(reading)
            if box.region is None:
                return
            value = held[0] if box.inside is None else held[0][box.inside]
            for goal in goals:
                if actor is None:
                    pass
                elif combine is None:
                    note_write(thread, eqn, site, goal, box.region, name, actor, ASYNC)
                    if machine.uninitialized != "allow":
                        gaps = held[1] if len(held) > 1 else None
                        inside = gaps if gaps is None or box.inside is None else gaps[box.inside]
                        goal.unmark(box.region, inside)
                else:
                    note_update(thread, eqn, site, goal, box.region, name, actor, ASYNC, setting.atomics)
                if combine is None:
                    box.region.put(goal.data, value)
                else:
                    old = box.region.get(goal.data)
                    box.region.put(goal.data, combine(old, value).astype(goal.data.dtype, copy=False))

        spare = thread.spare.pop() if thread.spare else None
        writing = machine.engine.start(
            agent, name, write, [], site=site, home=ASYNC, duration=write_time, views=2, spare=spare
        )
        thread.open.append((reading, writing))
        if len(thread.open) > MOST:
            for operation in (*thread.open[0], *thread.open[1]):
                if not operation.done:
                    machine.engine.complete(operation)
            _hand_on(thread, thread.open[0], thread.open[1])
            del thread.open[0]
        if commit:
            _commit(thread)
        machine.engine.pause(agent)
        return []

    return start


def _check_written(agent: Agent, eqn: Any, source: Any, part: Region) -> None:
    """A copy of what nobody wrote is a mistake; if only a part of it is unwritten, it may not matter."""
    machine: Machine = agent.place.machine
    if machine.uninitialized != "allow" and (gaps := source.gaps(part)) is not None and gaps.all():
        shared_rules.check_written(agent, eqn, source, part, machine.uninitialized, UNWRITTEN)


# --- groups -----------------------------------------------------------------------------------------------------------
def _commit(thread: Thread) -> None:
    """Close the open group; it may be empty."""
    thread.groups.append(thread.open)
    thread.open = []
    while len(thread.groups) > KEPT and all(read.waited for pair in thread.groups[0] for read in pair[:1]):
        _merge_oldest(thread)
    while len(thread.groups) > MOST:
        _merge_oldest(thread)


def _merge_oldest(thread: Thread) -> None:
    """Let the oldest group complete, and be waited for with the next one: groups are waited for in order."""
    engine = thread.machine.engine
    oldest, following = thread.groups[0], thread.groups[1]
    for operation in [op for pair in (*oldest, *following) for op in pair]:
        if not operation.done:
            engine.complete(operation)
    if not following:
        thread.groups[1] = oldest
    else:
        for pair in oldest:
            _hand_on(thread, pair, following[-1])
    del thread.groups[0]


def _hand_on(thread: Thread, pair: tuple[Operation, Operation], later: tuple[Operation, Operation]) -> None:
    """Whoever waits for a later copy, whose two operations are done, waits for this one, too."""
    for operation, other in zip(pair, later):
        if operation.actor is not None and other.actor is not None:
            other.actor.clock.join(operation.actor.clock)
    registry, written = thread.machine.engine.registry, pair[1].actor
    if written is not None and (spare := registry.take_over(written)) is not None:
        thread.spare.append(spare)


@RULES.rule(commit_group_p)
def _commit_group(compiler: Compiler, eqn: Any) -> Callable:
    def commit(agent: Agent) -> list:
        _commit(agent.place)
        return []

    return commit


@RULES.rule(wait_smem_to_gmem_p)
def _wait(compiler: Compiler, eqn: Any) -> Callable:
    left, only_read = eqn.params["n"], eqn.params["wait_read_only"]

    def wait(agent: Agent) -> list:
        thread: Thread = agent.place
        engine, began = thread.machine.engine, agent.time
        old = thread.groups[: max(len(thread.groups) - left, 0)]
        for group in old:
            for reading, writing in group:
                _join_once(agent, reading, engine)
                if not only_read:
                    join(agent, writing, engine)
        if not only_read:
            del thread.groups[: len(old)]
        thread.machine.span(thread, None, "wait for stores", "wait", began, agent.time, location(eqn))
        engine.pause(agent)
        return []

    return wait


def _join_once(agent: Agent, operation: Operation, engine: Any) -> None:
    if not operation.waited:
        join(agent, operation, engine)
        operation.waited = True


# --- stores to other blocks -------------------------------------------------------------------------------------------
@RULES.rule(async_store_smem_p)
def _async_store(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, bar, value = End(eqn, given.ref), End(eqn, given.barrier), given.value.k
    block_id = {eqn.params["cluster_dim"]: given.cluster_idx.k}
    setting, op = compiler.machine, eqn.params["atomic"]
    site, ufunc = setting.site_of(eqn), None if op is None else ATOMICS[op]
    if ufunc is not None:
        setting.atomics.add(site)

    def start(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine: Machine = thread.machine
        other = peer(thread, block_id, operands, eqn)
        goal, barriers = end.of(agent, operands), bar.of(agent, operands)
        end.check(agent, operands, goal, "write")
        goal, barriers = in_block(agent, goal, other, eqn), in_block(agent, barriers, other, eqn)
        part, new = end.region(operands), operands[value]
        name = Who(f"the store by {thread.name} to {goal.label} of {other.name}", "remote store")
        machine.log(thread, LoggingMode.SHARED_MEMORY, f"starts {name}")

        def effect(actor: Actor | None) -> None:
            if ufunc is not None:
                if actor is not None:
                    note_update(thread, eqn, site, goal, part, name, actor, GENERIC, setting.atomics)
                shared_rules.update(goal, part, new, ufunc)
                return
            if actor is not None:
                note_write(thread, eqn, site, goal, part, name, actor, GENERIC)
            part.put(goal.data, new)

        signals = [(barriers.one(bar.region(operands)), 1)]
        machine.engine.start(agent, name, effect, signals, site=site, duration=TMA_LATENCY, views=2)
        machine.engine.pause(agent)
        return []

    return start
