"""What the cores of every simulated machine do alike: access checks, prints, checks, program ids.

An agent's `place` is what runs: a core of a TPU, a thread of a GPU. What is asked of it: `machine` (with `found`,
`race`, `params`, `fill` and `engine`), `when()`, `ids` and `sizes` of the program that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion import jaxlink
from palladion.errors import KernelCheckError, count_of, explain
from palladion.language import ops
from palladion.rules import RuleTable
from palladion.simulator.code import Compiler, View, location
from palladion.simulator.memory import Buffer, Region, read_outside


def check_bounds(agent: Any, eqn: Any, v: View, operands: Any, buffer: Any, access: str, hint: str) -> bool:
    """Whether run-time indices stay inside; a read outside may be allowed, everything else is a finding."""
    bad = v.outside(operands)
    if bad is None:
        return True
    machine = agent.place.machine
    if access == "read" and machine.params.out_of_bounds_reads == "uninitialized":
        return False
    d, index, size = bad
    text = f"pl.ds({index.start}, {index.stop - index.start})" if isinstance(index, slice) else f"index {index}"
    if isinstance(index, np.ndarray):
        text = f"an index array with {index.min()} to {index.max()}"
    machine.found(
        "out-of-bounds",
        f"Out of bounds {access}: {text} in dimension {d} of {buffer.label}, which has {count_of(size, 'element')}.",
        where=location(eqn),
        when=agent.place.when(),
        operand=buffer.label,
        hint=hint,
    )
    return False


def check_written(
    agent: Any, eqn: Any, buffer: Buffer, region: Region, wanted: str, hint: str, label: str | None = None
) -> None:
    """Report a read of what was never written; `wanted` is "allow", "warn" or "raise". `label`: what was read."""
    if wanted != "allow" and buffer.unwritten(region):
        agent.place.machine.found(
            "uninitialized-read",
            f"Read of {label or buffer.label} before anything was written there.",
            where=location(eqn),
            when=agent.place.when(),
            operand=buffer.label,
            hint=hint,
            warn=wanted == "warn",
        )


def held(x: Any) -> Any:
    """A value of its own, as it is now."""
    return x.copy() if isinstance(x, np.ndarray) else x


def read_partly_outside(machine: Any, buffer: Buffer, region: Region, dtype: Any) -> Any:
    """What a region selects, unwritten memory where it leaves the buffer."""
    value = buffer.data
    fill = machine.fill(dtype)
    for kind, how in region.views:
        value = read_outside(value, how, fill) if kind == "index" else Region([(kind, how)]).get(value)
    return value


def add_into(buffer: Buffer, region: Region, new: Any) -> None:
    """Add to what a region holds; an index that is repeated counts each time."""
    update(buffer, region, new, np.add)


def update(buffer: Buffer, region: Region, new: Any, ufunc: Any) -> None:
    """Combine what a region holds with new values by a binary ufunc; a repeated index counts each time."""
    last = region.views[-1] if region.views else ("", ())
    if last[0] == "index" and any(isinstance(i, np.ndarray) for i in last[1]):
        outer = Region(region.views[:-1])
        part = np.array(outer.get(buffer.data))
        ufunc.at(part, last[1], new)
        outer.put(buffer.data, part)
    else:
        old = region.get(buffer.data)
        region.put(buffer.data, ufunc(old, new).astype(buffer.data.dtype, copy=False))


# --- rules --------------------------------------------------------------------------------------------------------
def _freeze(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, buffer: held(buffer.data)


def _free_ref(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, buffer: []


def _broadcast_to(compiler: Compiler, eqn: Any) -> Callable:
    shape = tuple(eqn.params["shape"])
    return lambda agent, x: np.broadcast_to(x, shape)


def _program_id(compiler: Compiler, eqn: Any) -> Callable:
    axis = eqn.params["axis"]
    return lambda agent: np.int32(agent.place.ids[axis])


def _num_programs(compiler: Compiler, eqn: Any) -> Callable:
    axis = eqn.params["axis"]
    return lambda agent: np.int32(agent.place.sizes[axis])


def _debug_print(compiler: Compiler, eqn: Any) -> Callable:
    fmt = eqn.params["fmt"]

    def show(agent: Any, *values: Any) -> list:
        print(ops.format_values(fmt, [np.asarray(v) for v in values]), flush=True)
        return []

    return show


def _jax_debug_print(compiler: Compiler, eqn: Any) -> Callable:
    if eqn.params["static_args"]:
        raise compiler.rules.unsupported(eqn)
    fmt, tree = eqn.params["fmt"], eqn.params["in_tree"]

    def show(agent: Any, *values: Any) -> list:
        args, named = jax.tree.unflatten(tree, [np.asarray(v) for v in values])
        print(fmt.format(*args, **named), flush=True)
        return []

    return show


def _debug_check(compiler: Compiler, eqn: Any) -> Callable:
    message, where = eqn.params["message"], eqn.params["where"]

    def check(agent: Any, condition: Any) -> list:
        if not condition:
            point = tuple(map(int, agent.place.ids)) or None
            raise KernelCheckError(explain(message, where=where, grid_point=point))
        return []

    return check


def _delay(compiler: Compiler, eqn: Any) -> Callable:
    def wait(agent: Any, nanos: Any) -> list:
        agent.time += float(nanos) * 1e-9
        agent.place.machine.engine.pause(agent)
        return []

    return wait


def _multiple_of(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, x: x


_RULES = {
    jaxlink.freeze_p: _freeze, jaxlink.free_ref_p: _free_ref, jaxlink.ref_broadcast_to_p: _broadcast_to,
    ops.program_id_p: _program_id, ops.num_programs_p: _num_programs, ops.debug_print_p: _debug_print,
    jaxlink.jax_debug_print_p: _jax_debug_print, ops.debug_check_p: _debug_check, ops.delay_p: _delay,
    ops.multiple_of_p: _multiple_of,
}  # fmt: skip


def install(table: RuleTable) -> None:
    """Give a machine's table the rules that all machines share."""
    for primitive, rule in _RULES.items():
        table.rule(primitive)(rule)
