"""What steers threads on the simulated GPU: registers, dependent launches, taking over clusters, single warps.

`try_cluster_cancel` is an operation of the async proxy: when it completes it takes the next cluster that has not been
started off the list, writes which one into the result's Ref of every block that asks together, and arrives on their
barriers.

Sources: the Mosaic GPU reference, "Cluster launch control"; PTX ISA, "setmaxnreg", "griddepcontrol",
"clusterlaunchcontrol".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.language.gpu.control import (
    griddepcontrol_p,
    query_cluster_cancel_p,
    set_max_registers_p,
    try_cluster_cancel_p,
    warp_map_p,
)
from palladion.simulator.clocks import Actor
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.chip import LANES, TMA_LATENCY
from palladion.simulator.gpu.collective import Request, ask
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import ASYNC, WARPS, Machine, Thread, Who
from palladion.simulator.gpu.rules import note_write, read
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End
from palladion.simulator.waits import Elsewhere


# --- registers and dependent launches ---------------------------------------------------------------------------------
@RULES.rule(set_max_registers_p)
def _set_max_registers(compiler: Compiler, eqn: Any) -> Callable:
    n = eqn.params["n"]

    def ask_for(agent: Agent) -> list:
        thread: Thread = agent.place
        machine, block = thread.machine, thread.block
        block.registers[thread.index] = n
        total, limit = sum(block.registers.values()) * LANES, machine.chip.registers
        if total > limit:
            asked = ", ".join(f"{r} in thread {t}" for t, r in sorted(block.registers.items()))
            machine.found(
                "register-overflow",
                f"Register overflow: the threads of a block ask for {total:,} registers ({asked}), and there are "
                f"{limit:,}.",
                where=location(eqn),
                when=thread.when(),
                hint="128 times the sum over all threads must be at most 65,536: fewer in the threads that only copy "
                "(plgpu.set_max_registers(40, action='decrease')), or less in those that compute",
            )
        return []

    return ask_for


@RULES.rule(griddepcontrol_p)
def _griddepcontrol(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent: []  # kernels run one after the other, each with the memory that the one before left


# --- cluster launch control -------------------------------------------------------------------------------------------
@RULES.rule(try_cluster_cancel_p)
def _try_cluster_cancel(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, bar, axes = End(eqn, given.result), End(eqn, given.barrier), eqn.params["collective_axes"]
    site = compiler.machine.site_of(eqn)

    def request(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine: Machine = thread.machine
        result, part = end.of(agent, operands), end.region(operands)
        end.check(agent, operands, result, "write")
        barriers, which = bar.of(agent, operands), bar.region(operands)
        by = "" if thread.name == "the block" else f" by {thread.name}"
        name = Who(f"the request for another cluster{by}", "copy")

        def write(actor: Actor | None, results: list[Buffer]) -> None:
            pending = thread.block.device.pending
            found = np.array([1, pending.pop()[0], 0, 0] if pending else [0, 0, 0, 0], np.int32)
            for buffer in results:
                if actor is not None:
                    note_write(thread, eqn, site, buffer, part, name, actor, ASYNC)
                part.put(buffer.data, found)

        if axes:
            ask(agent, Request(thread, eqn, site, name, result, part, write), barriers, which, axes)
        else:
            machine.engine.start(
                agent, name, lambda actor: write(actor, [result]), [(barriers.one(which), 1)], site=site, home=ASYNC,
                duration=TMA_LATENCY, views=2,
            )  # fmt: skip
        machine.engine.pause(agent)
        return []

    return request


@RULES.rule(query_cluster_cancel_p)
def _query_cluster_cancel(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, names = End(eqn, given.result), eqn.params["grid_names"]
    site, tracked = compiler.machine.site_of(eqn), compiler.machine.tracked

    def query(agent: Agent, *operands: Any) -> list:
        machine: Machine = agent.place.machine
        result, part = end.of(agent, operands), end.region(operands)
        end.check(agent, operands, result, "read")
        if tracked:
            read(agent, eqn, site, result, part)
        success, number, *_ = part.get(result.data)
        if not success:  # the indices mean nothing
            return [*(np.int32(machine.fill(np.int32)) for _ in names), np.bool_(False)]
        point = dict(zip(machine.grid_axes, np.unravel_index(int(number), tuple(machine.grid_axes.values()))))
        return [*(np.int32(point[a]) for a in names), np.bool_(True)]

    return query


# --- single warps -----------------------------------------------------------------------------------------------------
@RULES.rule(warp_map_p)
def _warp_map(compiler: Compiler, eqn: Any) -> Callable:
    code, axis = compiler.code(eqn.params["jaxpr"]), eqn.params["axis_name"]

    def run(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place

        def one(agent: Agent) -> None:
            code(agent, operands)

        engine = thread.machine.engine
        warps = thread.warps.setdefault(axis, [])
        if not warps:
            warps += [_warp(thread, axis, k) for k in range(WARPS)]
        began = agent.actor.publish() if thread.machine.tracking else None
        for warp in warps:
            actor = warp.agent.actor if warp.agent is not None else None
            warp.agent = engine.agent(warp.name, warp, one, actor)
            warp.agent.time = agent.time
            warp.ids, warp.sizes = thread.ids, thread.sizes
            if began is not None:
                warp.agent.actor.clock.join(began)
        engine.wait(agent, lambda: all(w.agent.done for w in warps), (), Elsewhere("its warps", eqn))
        for warp in warps:
            if began is not None:
                agent.actor.clock.join(warp.agent.actor.publish())
            agent.time = max(agent.time, warp.agent.time)
            _hand_over(warp, thread)
        return []

    return run


def _warp(thread: Thread, axis: Any, number: int) -> Thread:
    warp = Thread(thread.block, thread.index, {**thread.axes, axis: number}, warp=number)
    warp.parent = thread
    return warp


def _hand_over(warp: Thread, thread: Thread) -> None:
    """What a warp has left in flight is the whole thread's from now on."""
    for name in ("groups", "open", "fetches", "wgmmas", "loads", "stores"):
        left = getattr(warp, name)
        getattr(thread, name).extend(left)
        left.clear()
