"""Copies by the DMA engines, and semaphores.

A copy that is started and never waited for is accepted by the compiler, and leaves the chip in a state that the next
kernel inherits: `check_waits` finds those that are plain to see.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mosaic.python import tpu

from palladion import locations
from palladion.compiler.tpu import views
from palladion.compiler.tpu.build import as_i32, constant
from palladion.compiler.tpu.emit import RULES, Emitter, Kernel, Ref
from palladion.compiler.tpu.kinds import Refusal, ref_type
from palladion.compiler.tpu.rules_kernel import axis_place
from palladion.errors import explain
from palladion.language import semaphores
from palladion.language.tpu import dma
from palladion.language.tpu import semaphores as tpu_semaphores
from palladion.language.tpu.params import LoweringException


def _memory(view: Any, what: str) -> ir.Value:
    return views.memref_of(view.ref, view.transforms, what)


def _semaphore(view: Any) -> ir.Value | None:
    """One semaphore, of rank 0."""
    return None if view is None else _memory(view, "the semaphore")


def device_number(ev: Emitter, device: Any, kind: semaphores.DeviceIdType) -> tuple[ir.Value | None, ir.Value | None]:
    """A device id as the device's number in the mesh, and the core there that a dict may name as well."""
    if device is None:
        return None, None
    if kind is semaphores.DeviceIdType.LOGICAL:
        return as_i32(device), None
    mesh = ev.kernel.devices
    core = None
    if isinstance(device, Mapping):
        named = {}
        for axes, index in device.items():
            if len(axes) == 1 and axes[0] in ev.kernel.cores:
                core = as_i32(index)
            else:
                named.update(_apart(axes, index, mesh or {}))
        if not named:
            return None, core
        if mesh is None:
            raise Refusal("a device id names axes, but there is no mesh of devices around the call.", "jax.shard_map")
        places = [as_i32(named[a]) if a in named else axis_place(ev, a)[1] for a in mesh]
    else:
        places = [as_i32(x) for x in (device if isinstance(device, tuple) else (device,))]
        if mesh is None or len(places) != len(mesh):
            raise Refusal(
                f"a device id with {len(places)} coordinates needs a mesh with as many axes around the call.",
                "call the kernel in a jax.shard_map",
            )
    number = None
    for place, size in zip(places, mesh.values() if mesh else ()):
        number = place if number is None else arith.addi(arith.muli(number, constant(size)), place)
    return number, core


def _apart(axes: tuple[Any, ...], index: Any, mesh: Mapping[Any, int]) -> dict[Any, Any]:
    """One index over several axes as an index for each."""
    if len(axes) == 1:
        return {axes[0]: index}
    rest, result = as_i32(index), {}
    for axis in reversed(axes):
        size = constant(mesh[axis])
        result[axis] = arith.remsi(rest, size)
        rest = arith.divsi(rest, size)
    return result


# --- copies -----------------------------------------------------------------------------------------------------------
@RULES.rule(dma.dma_start_p)
def _start(ev: Emitter, eqn, *operands):
    copy, params = jax.tree.unflatten(eqn.params["tree"], operands), eqn.params
    if params["add"]:
        raise ev.refuse(eqn, "dma_start with add=True")
    if copy.dst_sem is None:
        raise Refusal(
            "a copy without a semaphore can never be waited for.",
            "pltpu.make_async_copy(src, dst, sem), pltpu.sync_copy",
        )
    device, core = device_number(ev, copy.device_id, params["device_id_type"])
    tpu.enqueue_dma(
        _memory(copy.src, "the source"),
        _memory(copy.dst, "the destination"),
        source_semaphore=_semaphore(copy.src_sem),
        target_semaphore=_semaphore(copy.dst_sem),
        device_id=device,
        core_id=core,
        priority=params["priority"],
    )
    for view in (copy.dst_sem, copy.src_sem):
        if view is not None:
            ev.kernel.started.setdefault(view.ref, locations.location_of(eqn))
    return []


@RULES.rule(dma.dma_wait_p)
def _wait(ev: Emitter, eqn, *operands):
    copy, params = jax.tree.unflatten(eqn.params["tree"], operands), eqn.params
    view = copy.dst_sem if params["wait"] == "recv" else copy.src_sem
    source, target = _memory(copy.src, "the source"), _memory(copy.dst, "the destination")
    if params["wait"] == "send":  # the bytes that are counted are those of the last operand
        source, target = source, source
    device, core = device_number(ev, copy.device_id, params["device_id_type"])
    tpu.wait_dma2(_semaphore(view), source, target, device_id=device, core_id=core)
    ev.kernel.waited.setdefault(view.ref, ev.where())
    return []


def check_waits(kernel: Kernel, name: str, operands: Collection[Ref]) -> None:
    """Raise LoweringException for copies that are started and not waited for, or waited for and not started.

    Arguments: operands: Refs of the call's operands, whose semaphores other kernels may wait on.
    """
    for ref, where in kernel.started.items():
        if ref not in kernel.waited and ref not in operands:
            raise LoweringException(
                explain(
                    f"A copy in the kernel {name} signals {ref.label}, and nothing waits for it.",
                    where=where,
                    hint="copy.wait() before the data is used, and before the kernel ends: the compiler does not check",
                )
            )
    for ref, where in kernel.waited.items():
        if ref not in kernel.started and ref not in operands:
            raise LoweringException(
                explain(
                    f"The kernel {name} waits for a copy that signals {ref.label}, and no copy in it does: it would "
                    "wait forever.",
                    where=where,
                    hint="copy.start() before copy.wait(), with the same semaphore",
                )
            )


# --- semaphores -------------------------------------------------------------------------------------------------------
@RULES.rule(semaphores.semaphore_signal_p)
def _signal(ev: Emitter, eqn, *operands):
    signal = jax.tree.unflatten(eqn.params["tree"], operands)
    device, core = device_number(ev, signal.device_id, eqn.params["device_id_type"])
    core = core if signal.core_index is None else as_i32(signal.core_index)
    tpu.sem_signal(_semaphore(signal.sem), as_i32(signal.value), device_id=device, core_id=core)
    return []


@RULES.rule(semaphores.semaphore_wait_p)
def _semaphore_wait(ev: Emitter, eqn, *operands):
    wait = jax.tree.unflatten(eqn.params["tree"], operands)
    if not wait.decrement:
        raise ev.refuse(eqn, "semaphore_wait with decrement=False")
    tpu.sem_wait(_semaphore(wait.sem), as_i32(wait.value))
    return []


@RULES.rule(semaphores.semaphore_read_p)
def _read(ev: Emitter, eqn, *operands):
    (view,) = jax.tree.unflatten(eqn.params["tree"], operands)
    return tpu.sem_read(_semaphore(view))


@RULES.rule(tpu_semaphores.get_barrier_semaphore_p)
def _barrier(ev: Emitter, eqn):
    aval = eqn.outvars[0].aval
    if getattr(ev.kernel.params, "collective_id", None) is None:
        raise Refusal("the barrier semaphore needs a number.", "compiler_params=pltpu.CompilerParams(collective_id=0)")
    return Ref(tpu.sem_barrier(ref_type(aval)), aval, aval.label)
