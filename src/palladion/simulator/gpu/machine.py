"""What a simulated GPU consists of: devices with GMEM, clusters, blocks with SMEM and TMEM, threads; and its findings.

A machine lives for one kernel call. A *thread* is a Pallas thread: a warpgroup, the software agent of the engine. What
it starts (a TMA copy, a wgmma, a tcgen05 product, a load of TMEM) is an operation of its own.

There are three views of memory (clocks.py): GENERIC, through which threads load and store; ASYNC, the async proxy,
through which TMA, wgmma and tcgen05 reach SMEM and GMEM; and TENSOR, in which accesses to TMEM are ordered. What moves
knowledge from one to the other: `commit_smem` from GENERIC to ASYNC; the completion of an operation, which whoever
waits for it sees in every view; and a barrier passes on what is known in TENSOR only if it `orders_tensor_core`.

Sources: the Mosaic GPU reference; PTX ISA, "Memory consistency model", "Asynchronous operations", "tcgen05 memory
consistency"; DESIGN "Simulated machines".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palladion.errors import Finding, KernelFinding
from palladion.language.dtypes import unwritten
from palladion.language.gpu.params import InterpretGPUParams
from palladion.language.interpret_params import LoggingMode
from palladion.simulator.calls import warn_of
from palladion.simulator.clocks import Actor, component_of
from palladion.simulator.engine import Agent, Counter, Engine, Operation
from palladion.simulator.gpu.chip import CHIPS
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.memory import SharedMemory
from palladion.simulator.gpu.units import Unit
from palladion.simulator.memory import Region
from palladion.simulator.timeline import Timeline
from palladion.simulator.waits import location_of

GENERIC, ASYNC, TENSOR = 0, 1, 2
VIEWS = 3
WARPS = 4  # of a thread

# What an earlier access by an operation of some kind makes of a conflict with it.
_KINDS = {"wgmma": "wgmma-in-flight", "tcgen05": "tmem-in-flight", "tmem": "tmem-in-flight", "copy": "missing-wait",
          "store": "missing-wait"}  # fmt: skip
_PAST = {"read": "read", "write": "wrote", "free": "freed"}
_HINTS = {
    "race": "order the two by a barrier (threads of a block), a ClusterBarrier (blocks of a cluster) or a semaphore; "
    "sums of several blocks: plgpu.atomic_add",
    "missing-wait": "wait for the copy first: barrier_wait on its barrier, or wait_smem_to_gmem in the thread that "
    "started it, from which another thread learns of it by a barrier",
    "refill": "is this the slot that is meant? A slot is filled again when its data was used: after barrier_wait on "
    "the first copy's barrier and the last use; another thread that uses it tells of that on a second barrier",
    "wgmma-in-flight": "the last wgmma still runs: wgmma_wait(0), or read the accumulator, before its operands change "
    "or another thread is told that they may; or refill the slot of the step before (delay_release=1 in a pipeline)",
    "tmem-in-flight": "operations on TMEM are asynchronous: wait on the product's barrier, wait_load_tmem() after "
    "loads, commit_tmem() after stores",
    "operand-in-flight": "the product still reads its operands: before they change, wait on a barrier that it arrives "
    "on, of tcgen05_mma(…, barrier) or tcgen05_commit_arrive(barrier)",
}
_PROXY = (
    "the async proxy (TMA, wgmma, tcgen05) does not see ordinary accesses until a fence: call plgpu.commit_smem() "
    "after them, in the same thread, before the barrier that orders the two"
)
_TENSOR = (
    "a barrier orders TMEM operations only if it was made with orders_tensor_core=True: "
    "plgpu.Barrier(orders_tensor_core=True)"
)


class Who(str):
    """The name of an operation, with its kind; of a collective one also the ranks of the blocks that `came` to it.

    `number` tells which of two operations was started first.
    """

    kind: str
    came: set[int] | None = None
    number: int
    _numbers = itertools.count()

    def __new__(cls, name: str, kind: str) -> Who:
        self = super().__new__(cls, name)
        self.kind, self.number = kind, next(cls._numbers)
        return self


@dataclasses.dataclass
class Device:
    """One GPU.

    Attributes:
      id: its place in the mesh of devices, row by row. axes: its coordinates along the named axes.
      buffers: what lies in GMEM, and semaphores of the whole call, by key; the same keys on every device.
      pending: the clusters that were not started yet, as (number, grid coordinates), next one last.
      running: how many clusters run.
      written: which CUDA block (its `ids`) stores a block of an output, for kernels with a grid of programs.
      reads: by component, the last read of its memory by another device: the stamp, and what was read.
    """

    id: int
    axes: dict[str, int]
    buffers: dict[Any, Any] = dataclasses.field(default_factory=dict)
    pending: list[Any] = dataclasses.field(default_factory=list)
    running: int = 0
    written: dict[Any, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    reads: dict[int, tuple[int, Buffer]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Cluster:
    """Blocks that run together.

    Attributes:
      device; number: in the grid's order; blocks; live: blocks that have not ended.
      collectives: copies, and cancels: requests for more work, that not all blocks have issued yet; turns: how many
        of them each block has issued.
    """

    device: Device
    number: int
    blocks: list[Block] = dataclasses.field(default_factory=list)
    live: int = 0
    collectives: dict[Any, Any] = dataclasses.field(default_factory=dict)
    turns: dict[Any, int] = dataclasses.field(default_factory=dict)
    cancels: dict[Any, Any] = dataclasses.field(default_factory=dict)


class Block:
    """A CUDA block: threads that share SMEM and TMEM.

    Attributes:
      cluster, rank: its cluster, and which of the cluster's blocks it is, row-major along the cluster's axes.
      axes: its coordinates along the named axes of the grid and the cluster.
      buffers: its buffers and barriers, by key: the same keys in every block.
      memory: its SMEM and TMEM, as addresses. threads: its threads.
      meetings: where its threads come together, by key. left: scopes that have ended, by key.
      ids: of the program, for kernels with a grid of programs.
      known: what its threads knew when they ended, a Clock, where another block may use its memory.
      registers: what `set_max_registers` asked for, by thread. tensor_core, tma: its units.
    """

    def __init__(self, machine: Machine, cluster: Cluster, rank: int, axes: Mapping[str, int]) -> None:
        self.machine, self.cluster, self.rank, self.axes = machine, cluster, rank, dict(axes)
        self.device = cluster.device
        self.buffers: dict[Any, Any] = {}
        self.memory = SharedMemory(self)
        self.threads: list[Thread] = []
        self.meetings: dict[Any, Any] = {}
        self.left: set[Any] = set()
        self.ids: tuple[int, ...] = ()
        self.live = 0
        self.known: Any = None
        self.registers: dict[int, int] = {}
        self.tensor_core, self.tma = Unit(), Unit()

    @property
    def name(self) -> str:
        parts = []
        if len(self.machine.devices) > 1:
            parts.append(f"device {self.device.id}")
        if self.axes:
            parts.append("block " + ", ".join(f"{a}={i}" for a, i in self.axes.items()))
        elif self.ids:
            parts.append(f"block {tuple(map(int, self.ids))}")
        return " of ".join(reversed(parts)) or "the block"


class Thread:
    """A Pallas thread, or one of its warps in `warp_map`: what an agent's `place` is.

    Attributes:
      machine, block, index: whose and which it is. warp: its number, or None for a whole thread.
      parent: of a warp, its thread. axes: coordinates along all named axes. agent: who runs it.
      ids, sizes: the program that it runs, and the grid.
      wgmmas: in flight, oldest first. groups: committed groups of SMEM-to-GMEM stores, oldest first, each a list of
        (read, write) operations; open: stores that are not in a group yet; spare: components for later stores.
      fetches: non-TMA copies to SMEM in flight. loads, stores: of TMEM in flight.
      products: of each warp (0 for the thread itself), tcgen05 operations whose completion no barrier tells of yet.
      tensor: of each warp, the operations of the tensor core that it issued, which complete in order.
      visits: how often it came to each equation that counts.
      accumulators: registers of each CUDA thread that its accumulators take.
      warps: its warps in `warp_map`, by the name of their axis.
      step: of a kernel with a grid of programs, which of its programs it runs, for messages.
    """

    def __init__(self, block: Block, index: int, axes: Mapping[str, int], warp: int | None = None) -> None:
        self.machine, self.block, self.index, self.warp = block.machine, block, index, warp
        self.axes = {**block.axes, **axes}
        self.parent: Thread | None = None
        self.agent: Agent = None  # pyright: ignore[reportAttributeAccessIssue] - set when the agent is made
        self.ids: tuple[int, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.step = ""
        self.wgmmas: list[Operation] = []
        self.groups: list[list[tuple[Operation, Operation]]] = []
        self.open: list[tuple[Operation, Operation]] = []
        self.spare: list[tuple[int, int]] = []
        self.fetches: list[Operation] = []
        self.loads: list[Operation] = []
        self.stores: list[Operation] = []
        self.products: dict[int, list[Operation]] = {}
        self.tensor: dict[int, Any] = {}
        self.visits: dict[Any, int] = {}
        self.accumulators = 0
        self.warps: dict[Any, list[Thread]] = {}

    @functools.cached_property
    def observer(self) -> Any:
        """Who waits on barriers."""
        return (self.block.rank, self.index, self.warp) if self.warp is not None else (self.block.rank, self.index)

    @functools.cached_property
    def name(self) -> str:
        machine = self.machine
        warp = "" if self.warp is None else f"warp {self.warp} of "
        if machine.thread_name is None:
            return f"{warp}{self.block.name}"
        return f"{warp}thread {machine.thread_name}={self.index} of {self.block.name}"

    def when(self) -> str:
        """Where it is: for findings."""
        return self.step + self.name

    def visit(self, key: Any) -> int:
        """How often it came here before."""
        count = self.visits.get(key, 0)
        self.visits[key] = count + 1
        return count


class Semaphores:
    """An array of semaphores.

    Attributes:
      counters, label. key: the same on all devices. place: its device.
      looks: of each counter, the most that each block of its device has waited for without taking it, by the
        block's cluster and rank; where several devices run.
    """

    __slots__ = ("counters", "key", "label", "looks", "place")

    def __init__(self, shape: Sequence[int], label: str, place: Any, key: Any) -> None:
        self.label, self.place, self.key = label, place, key
        self.looks: dict[Counter, dict[tuple[int, int], int]] = {}
        self.counters = np.empty(tuple(shape), object)
        for index in np.ndindex(*self.counters.shape):
            name = f"{label}[{', '.join(map(str, index))}]" if index else label
            self.counters[index] = Counter(name)

    def one(self, region: Region) -> Counter:
        """The semaphore that a view selects."""
        found = region.get(self.counters)
        return found.reshape(-1)[0] if isinstance(found, np.ndarray) else found


class Machine:
    """All devices of one kernel call.

    Arguments:
      params: what the user asked for. name: of the kernel. arch: the chip's.
      axes: the device mesh's named axes and their sizes; empty outside shard_map. num_devices: how many take part.
      mesh: the kernel's `plgpu.Mesh`, or None.
      tracking: whether the history of memory is kept.
    """

    def __init__(
        self, params: InterpretGPUParams, name: str, arch: str, axes: Mapping[str, int], num_devices: int, mesh: Any,
        schedule: str | int, tracking: bool,
    ) -> None:  # fmt: skip
        self.params, self.name, self.axes, self.mesh = params, name, dict(axes), mesh
        self.chip = CHIPS[arch]
        self.num_sms = params.num_sms or self.chip.num_sms
        self.engine = Engine(schedule, views=VIEWS, tracking=tracking)
        self.tracking = tracking
        self.findings: list[Finding] = []
        self.timeline = Timeline() if params.trace else None
        self.grid_axes: dict[str, int] = {}
        self.cluster_axes: dict[str, int] = {}
        self.thread_name: str | None = None
        self.num_threads = 1
        self.most_smem = self.most_tmem = 0
        self.read_only: set[Any] = set()  # keys of operands that are no output's
        if mesh is not None:
            self.grid_axes = dict(zip(mesh.grid_names, mesh.grid))
            self.cluster_axes = dict(zip(mesh.cluster_names, mesh.cluster))
            self.thread_name, self.num_threads = mesh.thread_name, mesh.num_threads or 1
        self.devices = []
        sizes = list(self.axes.values())
        for k in range(num_devices):
            coords = np.unravel_index(k, sizes) if sizes else ()
            self.devices.append(Device(k, dict(zip(self.axes, map(int, coords)))))
        self.uninitialized = params.uninitialized_reads if tracking else "allow"

    @property
    def cluster_size(self) -> int:
        return math.prod(self.cluster_axes.values())

    def size_of(self, axis: str) -> int:
        """The size of an axis of the kernel's mesh, or of a `WarpMesh`."""
        if axis in self.grid_axes or axis in self.cluster_axes:
            return self.grid_axes.get(axis) or self.cluster_axes[axis]
        return self.num_threads if axis == self.thread_name else WARPS

    # --- memory ---------------------------------------------------------------------------------------------------
    def fill(self, dtype: Any) -> Any:
        """What memory of a dtype holds before it is written."""
        return np.zeros((), dtype) if self.params.uninitialized_memory == "zero" else unwritten(dtype)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Memory that was never written."""
        fill = self.fill(dtype)
        return np.full(tuple(shape), fill, fill.dtype)

    def log(self, thread: Thread, mode: LoggingMode, text: str) -> None:
        """Print what a thread does, where `logging_mode` asks for it."""
        wanted = self.params.logging_mode
        if wanted is not None and mode in wanted:
            print(f"[{thread.name}] {text}", flush=True)

    def span(
        self, thread: Thread, track: str | None, name: str, kind: str, start: float, end: float, where: Any = None
    ) -> None:
        """Note what took time, where a timeline is kept; `track` None: the thread itself."""
        if self.timeline is not None and end > start:
            process = thread.block.name if len(self.devices) == 1 else f"device {thread.block.device.id}"
            own = "thread" if self.thread_name is None else f"{self.thread_name} {thread.index}"
            own += "" if thread.warp is None else f" warp {thread.warp}"
            if kind == "product" and self.thread_name is not None:
                name += f" of {own}"
            self.timeline.add(process, track or own, name, kind, start, end, where)

    # --- findings -------------------------------------------------------------------------------------------------
    def found(
        self, kind: str, message: str, *, where: str | None, when: str | None, hint: str, operand: str | None = None,
        warn: bool = False,
    ) -> None:  # fmt: skip
        """Report a finding: raise it, or, if it is only to `warn` and the run is not strict, warn of it.

        Raises:
          KernelFinding: unless it is a warning.
        """
        warn = warn and not self.params.strict
        finding = Finding(kind, "warning" if warn else "error", message, where, when, hint, operand)
        if warn and any(f.kind == kind and f.where == where and f.operand == operand for f in self.findings):
            return
        self.findings.append(finding)
        if not warn:
            raise KernelFinding(finding)
        warn_of(finding)

    def race(
        self, place: Thread, buffer: Buffer, access: str, who: str, conflict: tuple[str, int], eqn: Any,
        actor: Actor | None = None, view: int = GENERIC, region: Region | None = None,
    ) -> None:  # fmt: skip
        """Report that an access is not ordered after an earlier one, as what it is.

        Arguments:
          place: the thread that does it, or started it. buffer: what is accessed.
          access: "read" or "write". who: does it, for the message; an operation's is a `Who`.
          conflict: what the earlier access did ("read" or "wrote"), and its stamp. eqn: the line.
          actor, view: through which the access goes; default: the thread's own. region: what of the buffer.
        """
        engine = self.engine
        actor = actor or place.agent.actor
        verb, stamp = conflict
        other, earlier = engine.place_of(stamp), engine.who(stamp)
        kind = _KINDS.get(getattr(earlier, "kind", ""), "race")
        came = getattr(earlier, "came", None)
        if came is not None and place.block.rank not in came:
            kind = "race"  # a collective copy of other blocks, which this one has not come to
        if kind == "race" and view == GENERIC and isinstance(who, Who):
            kind = _KINDS.get(who.kind, kind)
        started = isinstance(earlier, Who) and came is None and isinstance(who, Who) and who.number < earlier.number
        later = started or (kind == "race" and isinstance(who, Who) and self._is_later(place, actor, stamp))
        if later and isinstance(who, Who):
            kind = _KINDS.get(who.kind, kind)
        hint = _HINTS[_case(kind, buffer, access, who, earlier)]
        if came is not None and kind == "race":
            hint += "; all blocks along the axes of a collective copy must issue it"
        if view != GENERIC and actor.clock.knows(GENERIC, stamp):
            kind, hint = "missing-fence", _PROXY if view == ASYNC else _TENSOR
        here, there = location_of(eqn), location_of(other)
        act = f"{who} {access}s what {earlier} {verb}"
        if later:  # what was started first is in flight, although its access came last in this run
            here, there = there, here
            act = f"{earlier} {'reads' if verb == 'read' else 'writes'} what {who} {_PAST[access]}"
        where = here or there if there in (None, here) or here is None else f"{here}; the other access at {there}"
        label = buffer.label + _slot(region) + self.whose(place, buffer)
        what = {
            "missing-fence": f"Missing fence on {label}: {act}, in another proxy.",
            "race": f"Race on {label}: {act}, and nothing orders the two.",
        }.get(kind, f"{label} is still in use: {act}, which may still be running.")
        warn = self.params.on_race == "warn"
        self.found(kind, what, where=where, when=place.when(), operand=buffer.label, hint=hint, warn=warn)

    @staticmethod
    def whose(place: Thread, buffer: Buffer) -> str:
        """` of block x=1`, for a message about memory of another block."""
        other = isinstance(buffer.place, Block) and buffer.place is not place.block
        return f" of {buffer.place.name}" if other else ""

    def _is_later(self, place: Thread, actor: Actor, stamp: int) -> bool:
        """Whether an access was made after an operation was started: by the thread that did, or one that it told."""
        own = {t.agent.actor.component for t in (place, place.parent) if t is not None and t.agent.actor is not actor}
        if component_of(stamp) in own and not actor.clock.knows(GENERIC, stamp):
            return True
        starter = place.agent.actor.component
        for agent in {*self.engine.agents, *(t.agent for t in place.block.threads)}:
            if agent is not place.agent and agent.actor.component == component_of(stamp):
                known, then = agent.actor.clock.known[GENERIC], actor.clock.known[GENERIC]
                return starter < len(known) and bool(known[starter] >= then[starter])
        return False


def _case(kind: str, buffer: Buffer, access: str, who: str, earlier: str) -> str:
    """Which of the hints is for a finding of this kind."""
    if kind == "missing-wait" and access == "write" and {getattr(x, "kind", "") for x in (who, earlier)} == {"copy"}:
        return "refill"
    return "operand-in-flight" if kind == "tmem-in-flight" and getattr(buffer.space, "name", "") != "TMEM" else kind


def _slot(region: Region | None) -> str:
    """`[2]`, of a part that is chosen by numbers first: a slot of a ring of buffers."""
    first = region.views[0] if region is not None and region.views else ("", ())
    numbers = first[1] if first[0] == "index" else ()
    slot = list(itertools.takewhile(lambda i: isinstance(i, int | np.integer), numbers))
    return f"[{', '.join(map(str, slot))}]" if slot and len(slot) < len(numbers) else ""
