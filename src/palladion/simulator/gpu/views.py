"""The Ref operands of an equation on a simulated GPU: which buffer, in which block or device, and what part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from palladion import jaxlink
from palladion.errors import count_of
from palladion.language.dtypes import SemaphoreDType
from palladion.language.gpu.refs import BarrierDType
from palladion.language.gpu.views import ClusterRef, MulticastRef, PeerMemRef, split_view
from palladion.simulator import shared_rules
from palladion.simulator.code import View, location
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import Block, Device, Thread
from palladion.simulator.memory import Region
from palladion.simulator.waits import Elsewhere

HINT_OF_COUNTERS = "an index counts from 0 to the number of barriers or semaphores, less one: lax.rem(i, number)"
HINT = "the hardware reads and writes whatever lies there; keep indices inside, or let a TMA copy fill what is outside"


class End:
    """A Ref operand of an equation, with the view taken of it.

    Attributes:
      k: its number among the operands. aval: the type of the Ref, without the view. view: the part.
      where: transforms that say in which block or device it is. eqn: the equation.
    """

    def __init__(self, eqn: Any, ref_view: Any) -> None:
        self.k, self.eqn = ref_view.ref.k, eqn
        self.aval = eqn.invars[self.k].aval
        self.where, transforms = split_view(ref_view)
        self.view = View(transforms, wraps=False)
        self.chosen = isinstance(self.aval.dtype, (BarrierDType, SemaphoreDType)) and self.view.fixed is None

    def of(self, agent: Agent, operands: Sequence[Any]) -> Any:
        """The buffer, semaphores or barriers that are meant; of the latter, checked that the index names one."""
        thing = operands[self.k]
        if self.chosen:
            shared_rules.check_bounds(agent, self.eqn, self.view, operands, thing, "index", HINT_OF_COUNTERS)
        for transform in self.where:
            thing = _moved(agent, thing, transform, operands, self.eqn)
        return thing

    def region(self, operands: Sequence[Any]) -> Region:
        """The part, for these operands."""
        return self.view.region(operands)

    def check(self, agent: Agent, operands: Sequence[Any], buffer: Any, access: str) -> bool:
        """Whether run-time indices stay inside (see `shared_rules.check_bounds`)."""
        if self.view.fixed is not None:
            return True
        return shared_rules.check_bounds(agent, self.eqn, self.view, operands, buffer, access, HINT)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part; sizes do not depend on run-time indices."""
        zeros: list[Any] = [np.int32(0)] * len(self.eqn.invars)
        for k, v in enumerate(self.eqn.invars):
            if not isinstance(v.aval, jaxlink.AbstractRef) and getattr(v.aval, "shape", ()):
                zeros[k] = np.zeros(v.aval.shape, np.int32)
        whole = np.broadcast_to(np.zeros((), np.int8), self.aval.shape)
        return tuple(np.shape(self.view.region(zeros).before_bitcast().get(whole)))

    @property
    def size(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape)


def predicate(given: Any) -> Callable[[Sequence[Any]], bool]:
    """A function of the operands: whether the operation happens; `given`: its predicate's placeholder, or None."""
    if given is None:
        return lambda operands: True
    k = given.k
    return lambda operands: bool(operands[k])


def numbers(tree: Any) -> Any:
    """A structure with the operands' numbers at its leaves."""
    return jax.tree.map(lambda x: x.k if hasattr(x, "k") else x, tree, is_leaf=lambda x: hasattr(x, "k"))


# --- other blocks and devices -------------------------------------------------------------------------------------
def _moved(agent: Agent, thing: Any, transform: Any, operands: Sequence[Any], eqn: Any) -> Any:
    thread: Thread = agent.place
    match transform:
        case PeerMemRef():
            device = target(thread, numbers(transform.device_id), operands, eqn)
            return counterpart(agent, thing, device, eqn)
        case ClusterRef():
            return in_block(agent, thing, peer(thread, numbers(transform.block_id), operands, eqn), eqn)
        case MulticastRef():
            return thing
    raise NotImplementedError(f"the simulated GPU has no meaning for the view {transform}")


def target(thread: Thread, device_id: Any, operands: Sequence[Any], eqn: Any) -> Device:
    """The device that a device id (with operands' numbers at its leaves) names."""
    machine, here = thread.machine, thread.block.device
    if device_id is None:
        return here

    def value(x: Any) -> int:
        return int(operands[x]) if isinstance(x, int) else int(x)

    sizes, coords = list(machine.axes.values()), dict(here.axes)
    asked: Any
    if isinstance(device_id, Mapping):
        for name, k in device_id.items():
            names = name if isinstance(name, tuple) else (name,)
            dims = [machine.axes.get(n, 1) for n in names]
            inside = 0 <= value(k) < math.prod(dims)
            coords |= dict(zip(names, map(int, np.unravel_index(value(k), dims)))) if inside else {names[0]: -1}
        flat, asked = list(coords.values()), {n: value(k) for n, k in device_id.items()}
    elif isinstance(device_id, tuple):
        flat = asked = [value(x) for x in device_id]
    else:
        asked = value(device_id)
        flat = list(map(int, np.unravel_index(asked, sizes))) if 0 <= asked < math.prod(sizes) else [-1]
    if len(flat) == len(sizes) and all(0 <= c < n for c, n in zip(flat, sizes)):
        return machine.devices[int(np.ravel_multi_index(flat, sizes)) if sizes else 0]
    if not sizes and asked == 0:
        return here
    machine.found(
        "out-of-bounds",
        f"There is no device {asked}: the mesh has {count_of(len(machine.devices), 'device')} "
        f"({', '.join(f'{a}: {n}' for a, n in machine.axes.items()) or 'no axes'}).",
        where=location(eqn),
        when=thread.when(),
        hint="take neighbours modulo the size of the axis: lax.rem(me + 1, lax.axis_size(axis))",
    )
    return here


def devices_along(thread: Thread, axes: Any) -> list[Device]:
    """The devices that share all coordinates with the thread's own but those along mesh axes, in order."""
    machine, here = thread.machine, thread.block.device
    names = set(axes) if isinstance(axes, (tuple, list)) else {axes}
    return [d for d in machine.devices if all(d.axes[a] == i for a, i in here.axes.items() if a not in names)]


def everywhere(end: End, agent: Agent, operands: Sequence[Any]) -> list[Any]:
    """The buffers that are meant: several on several devices, if the view is a `multicast_ref`."""
    thing = end.of(agent, operands)
    for transform in end.where:
        if isinstance(transform, MulticastRef):
            devices = devices_along(agent.place, transform.collective_axes)
            return [counterpart(agent, thing, device, end.eqn) for device in devices]
    return [thing]


def peer(thread: Thread, block_id: Mapping[str, Any], operands: Sequence[Any], eqn: Any) -> Block:
    """The block of the cluster with these coordinates; axes that are not named: the thread's own."""
    block, machine = thread.block, thread.machine
    coords = {a: block.axes[a] for a in machine.cluster_axes}
    for name, x in block_id.items():
        coords[name] = int(operands[x]) if isinstance(x, int) else int(x)
    for other in block.cluster.blocks:
        if all(other.axes[a] == i for a, i in coords.items()):
            return other
    machine.found(
        "out-of-bounds",
        f"There is no block {coords} in the cluster: its size is {machine.cluster_axes}.",
        where=location(eqn),
        when=thread.when(),
        hint="block ids are coordinates along the cluster's axes",
    )
    return block


def counterpart(agent: Agent, thing: Any, device: Device, eqn: Any) -> Any:
    """What corresponds on another device to a buffer in GMEM or to semaphores; waits until it exists."""
    if thing.place is device or (isinstance(thing, Buffer) and thing.whole is not None and thing.whole.place is device):
        return thing
    if isinstance(thing, Buffer) and thing.whole is not None:
        return counterpart(agent, thing.whole, device, eqn).part(thing.index[:-1])
    _await(agent, device.buffers, thing, f"device {device.id}", eqn)
    return device.buffers[thing.key]


def in_block(agent: Agent, thing: Any, block: Block, eqn: Any) -> Any:
    """What corresponds in another block of the cluster to a buffer or to barriers; waits until it exists."""
    own = agent.place.block
    if block is own:
        return thing
    _await(agent, block.buffers, thing, block.name, eqn)
    return block.buffers[thing.key]


def _await(agent: Agent, place: Mapping[Any, Any], thing: Any, where: str, eqn: Any) -> None:
    if thing.key not in place:
        waits = Elsewhere(f"{thing.label} to exist in {where}", eqn)
        agent.place.machine.engine.wait(agent, lambda: thing.key in place, (), waits)
