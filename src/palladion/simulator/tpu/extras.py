"""The core's random generator, allocations of the whole call, and marks, on the simulated TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.language.kernel import get_global_p
from palladion.language.tpu import allocation, hints, random
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.tpu.machine import HBM_SPACES, Core
from palladion.simulator.tpu.rules import RULES, _scratch


@RULES.rule(random.prng_seed_p)
def _prng_seed(compiler: Compiler, eqn: Any) -> Callable:
    def seed(agent: Any, *seeds: Any) -> list:
        agent.place.generator = random.mix(seeds, np)
        return []

    return seed


@RULES.rule(random.prng_random_bits_p)
def _prng_random_bits(compiler: Compiler, eqn: Any) -> Callable:
    shape, dtype = eqn.params["shape"], eqn.outvars[0].aval.dtype

    def draw(agent: Any) -> Any:
        core: Core = agent.place
        state = random.mix([0], np) if core.generator is None else core.generator
        bits, core.generator = random.random_bits(state, shape, np)
        return np.asarray(bits).view(dtype)

    return draw


@RULES.rule(get_global_p)
def _get_global(compiler: Compiler, eqn: Any) -> Callable:
    what, key = eqn.params["what"], ("global", compiler.machine[1](eqn))

    def find(agent: Any) -> Any:
        core: Core = agent.place
        if key not in core.device.buffers:
            made = core.machine.allocate(what, f"the global buffer of {location(eqn)}", core.device, key)
            core.device.buffers[key] = made
            core.machine.keep_watch(made, core)
        return core.device.buffers[key]

    return find


@RULES.rule(allocation.allocate_p)
def _allocate(compiler: Compiler, eqn: Any) -> Callable:
    what = eqn.params["what"]
    return lambda agent: _scratch(agent, what, what.label)


# --- marks ----------------------------------------------------------------------------------------------------------
@RULES.rule(hints.with_memory_space_constraint_p)
def _constraint(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, x: x


@RULES.rule(hints.has_memory_space_p)
def _has_memory_space(compiler: Compiler, eqn: Any) -> Callable:
    (view,) = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    space = eqn.params["memory_space"]

    def holds(agent: Any, *operands: Any) -> Any:
        lies = operands[view.ref.k].space
        return np.bool_(lies is space or (lies in HBM_SPACES and space in HBM_SPACES))

    return holds


@RULES.rule(hints.touch_p)
def _touch(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, *operands: []


@RULES.rule(hints.trace_value_p)
def _trace_value(compiler: Compiler, eqn: Any) -> Callable:
    label = eqn.params["label"]

    def note(agent: Any, value: Any) -> list:
        core: Core = agent.place
        moment = agent.time
        core.machine.span(core, f"core {core.index}", f"{label} = {value}", "trace", moment, moment + 1e-9)
        return []

    return note
