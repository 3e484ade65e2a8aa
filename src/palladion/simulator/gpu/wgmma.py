"""wgmma on a simulated Hopper GPU: products in flight on accumulators in registers; and `mma` of arrays.

A product reads SMEM through the async proxy. Products of a thread complete in order, and when one has been issued all
but that one are complete. Reading an accumulator by brackets waits for all (rules.py).

Sources: the Mosaic GPU reference, "Hopper (wgmma)"; PTX ISA, wgmma.mma_async, wait_group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from palladion.language.gpu.mma import (
    mma_p,
    wgmma_accumulator_init_p,
    wgmma_accumulator_load_p,
    wgmma_p,
    wgmma_wait_p,
)
from palladion.simulator.clocks import Actor
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu import chip, rules
from palladion.simulator.gpu.machine import ASYNC, GENERIC, Thread, Who
from palladion.simulator.gpu.products import product
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.tensor_core import By, Part, busy, dtype_of, queue_of
from palladion.simulator.gpu.views import End
from palladion.simulator.shared_rules import held


@RULES.rule(wgmma_p)
def _wgmma(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    setting = compiler.machine
    site = setting.site_of(eqn)
    acc_end, b_end = End(eqn, given.acc), End(eqn, given.b)
    a_end = End(eqn, given.a) if hasattr(given.a, "ref") else None
    (k, n), dtype = b_end.shape, dtype_of(given.b, b_end)
    left = eqn.invars[given.a.k].aval.dtype if a_end is None else dtype_of(given.a, a_end)
    multiply = product(left, dtype, acc_end.aval.dtype, k, skip_floats=compiler.skip_floats)
    seconds = chip.product_seconds(acc_end.shape[0], n, k, jax.dtypes.itemsize_bits(dtype), setting.chip)

    def issue(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine, block = thread.machine, thread.block
        acc, b = Part(agent, acc_end, operands, block), Part(agent, b_end, operands, block)
        a = Part(agent, a_end, operands, block) if a_end is not None else None
        array = None if a is not None else operands[given.a.k]

        def effect(actor: Actor | None) -> None:
            left: Any = array if a is None else a.get()
            acc.put(multiply(acc.get(), left, b.get()))

        begins, ends = busy(agent, [block], seconds)
        operation = queue_of(thread).start(
            agent, Who(f"the wgmma of {thread.name}", "wgmma"), effect, (),
            site=site, home=ASYNC, duration=ends - agent.time, views=2,
        )  # fmt: skip
        if machine.tracking:
            by = By(thread, eqn, site, operation)
            for part in (a, b):
                if part is not None:
                    part.note("read", by, ASYNC)
            acc.note("read", by, GENERIC)
            acc.note("write", by, GENERIC)
        thread.wgmmas.append(operation)
        machine.span(thread, "tensor core", "wgmma", "product", begins, ends, location(eqn))
        rules.finish_products(agent, 1)
        machine.engine.pause(agent)
        return []

    return issue


@RULES.rule(wgmma_wait_p)
def _wait(compiler: Compiler, eqn: Any) -> Callable:
    n = eqn.params["n"]

    def wait(agent: Agent) -> list:
        rules.finish_products(agent, n)
        return []

    return wait


@RULES.rule(wgmma_accumulator_init_p)
def _init(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, k, site = End(eqn, given.acc), given.value.k, compiler.machine.site_of(eqn)

    def init(agent: Agent, *operands: Any) -> list:
        buffer, region = end.of(agent, operands), end.region(operands)
        if agent.place.machine.tracking:
            rules.write(agent, eqn, site, buffer, region)
        region.put(buffer.data, operands[k])
        return []

    return init


@RULES.rule(wgmma_accumulator_load_p)
def _load(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, site, wait_n = End(eqn, given.acc), compiler.machine.site_of(eqn), eqn.params["wait_n"]

    def load(agent: Agent, *operands: Any) -> list:
        if wait_n is not None:
            rules.finish_products(agent, wait_n)
        buffer, region = end.of(agent, operands), end.region(operands)
        if agent.place.machine.tracking:
            rules.read(agent, eqn, site, buffer, region)
        return [held(region.get(buffer.data))]

    return load


@RULES.rule(mma_p)
def _mma(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    acc, a, b = (eqn.invars[x.k].aval for x in given)
    multiply = product(a.dtype, b.dtype, acc.dtype, a.shape[1], skip_floats=compiler.skip_floats)
    bits = jax.dtypes.itemsize_bits(a.dtype)
    seconds = chip.product_seconds(a.shape[0], b.shape[1], a.shape[1], bits, compiler.machine.chip)

    def run(agent: Agent, *operands: Any) -> list:
        _, ends = busy(agent, [agent.place.block], seconds)
        agent.time = ends
        return [multiply(operands[given.acc.k], operands[given.a.k], operands[given.b.k])]

    return run
