"""The reference interpreter's meaning of copies and semaphores on one core: nothing happens at the same time.

A copy is done when it is started, and a wait for it has nothing to wait for. A semaphore is an int32 counter in a Cell:
a signal adds to it, and a wait for more than it holds could never end, so it is an error with the user's line. What
needs a second device or core is left to a machine.

The cores of a mesh (`pl.kernel`) run one after the other, in the order of their numbers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from palladion import locations
from palladion.errors import UnsupportedPrimitive
from palladion.language import core_map, semaphores
from palladion.language.tpu import dma, hints
from palladion.language.tpu.memory import HBM
from palladion.reference import eager_refs, host
from palladion.reference.evaluate import HIDDEN, RULES, Cell, Evaluator, load, store

HIDDEN[semaphores.WaitEffect] = host.first_token  # keeps the checks of waits in the loops that they are in


def _refuse_remote(eqn: Any, what: str) -> None:
    others = RULES.others(eqn.primitive)
    raise UnsupportedPrimitive(f"{eqn.primitive} to another {what}", RULES.target, locations.location_of(eqn), others)


def _set(view: Any, update: Any) -> None:
    cell: Cell = view.ref
    cell.value = store(cell.value, view.transforms, update)


def _get(view: Any) -> jax.Array:
    return load(view.ref.value, view.transforms)


# --- copies -----------------------------------------------------------------------------------------------------------
@RULES.rule(dma.dma_start_p)
def _dma_start(ev: Evaluator, eqn, *operands):
    copy = jax.tree.unflatten(eqn.params["tree"], operands)
    if copy.device_id is not None:
        _refuse_remote(eqn, "device")
    value = _get(copy.src)
    _set(copy.dst, (lambda old: old + value) if eqn.params["add"] else lambda _: value)
    return []


@RULES.rule(dma.dma_wait_p)
def _dma_wait(ev: Evaluator, eqn, *operands):
    if jax.tree.unflatten(eqn.params["tree"], operands).device_id is not None:
        _refuse_remote(eqn, "device")
    return []


# --- semaphores -------------------------------------------------------------------------------------------------------
@RULES.rule(semaphores.semaphore_signal_p)
def _signal(ev: Evaluator, eqn, *operands):
    signal = jax.tree.unflatten(eqn.params["tree"], operands)
    if signal.device_id is not None or signal.core_index is not None:
        _refuse_remote(eqn, "device" if signal.core_index is None else "core")
    _set(signal.sem, lambda held: held + signal.value)
    return []


@RULES.rule(semaphores.semaphore_wait_p)
def _wait(ev: Evaluator, eqn, *operands):
    wait = jax.tree.unflatten(eqn.params["tree"], operands)
    held = _get(wait.sem)
    message = f"A wait for {{}} on {wait.sem.ref.label}, which holds {{}}, never ends: nothing here can signal it."
    order, values = ev.hidden[semaphores.WaitEffect], (jnp.asarray(wait.value, jnp.int32), held)
    action = host.Check(message, len(values), locations.location_of(eqn))
    order.value = host.act(order.value, action, held >= wait.value, *values, *ev.ids)
    if wait.decrement:
        _set(wait.sem, lambda held: held - wait.value)
    return []


@RULES.rule(semaphores.semaphore_read_p)
def _read(ev: Evaluator, eqn, *operands):
    (view,) = jax.tree.unflatten(eqn.params["tree"], operands)
    return _get(view)


# --- marks -----------------------------------------------------------------------------------------------------------
@RULES.rule(hints.has_memory_space_p)
def _has_memory_space(ev: Evaluator, eqn, *operands):
    return jnp.bool_(eqn.params["memory_space"] is HBM)  # operands in pl.ANY are left in place


@eager_refs.RULES.rule(hints.has_memory_space_p)
def _eager_has_memory_space(trace, params, *operands):
    return jnp.bool_(params["memory_space"] is HBM)


@RULES.rule(hints.touch_p, hints.trace_value_p)
def _mark(ev: Evaluator, eqn, *operands):
    return []


@eager_refs.RULES.rule(hints.touch_p)
def _eager_touch(trace, params, *operands):
    return []


# --- cores ------------------------------------------------------------------------------------------------------------
@RULES.rule(lax.axis_index_p)
def _axis_index(ev: Evaluator, eqn):
    name = eqn.params["axis_name"]
    names, position = name if isinstance(name, tuple) else (name,), jnp.int32(0)
    for n in names:
        if n in ev.mesh:  # an axis of the kernel's mesh of cores, which are the programs of its grid
            position = position * ev.mesh[n] + ev.ids[list(ev.mesh).index(n)]
        else:
            position = position * lax.axis_size(n) + lax.axis_index_p.bind(axis_name=n)
    return position


@RULES.rule(core_map.core_map_p)
def _core_map(ev: Evaluator, eqn, *operands):
    values = [x.value if isinstance(x, Cell) else x for x in operands]
    for cell, value in zip(operands, core_map.on_values(*values, **eqn.params)):
        if value is not None:
            cell.value = value
    return []
