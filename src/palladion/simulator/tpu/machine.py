"""What a simulated TPU consists of: devices with HBM, cores with VMEM, and how they report what goes wrong.

A machine lives for one kernel call: nothing has to be reset after an exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.errors import Finding, KernelFinding
from palladion.language.dtypes import unwritten
from palladion.language.interpret_params import LoggingMode
from palladion.language.refs import MemorySpace
from palladion.language.semaphores import SemaphoreDType
from palladion.language.tpu.memory import MemorySpace as TpuMemory
from palladion.language.tpu.params import InterpretParams
from palladion.simulator.calls import warn_of
from palladion.simulator.clocks import site_of
from palladion.simulator.engine import Agent, Counter, Engine
from palladion.simulator.memory import Buffer, Region
from palladion.simulator.timeline import Timeline
from palladion.simulator.tpu import chip
from palladion.simulator.values_table import words
from palladion.simulator.waits import location_of

BARRIER = "the barrier semaphore"
SHARED_BLOCK = (
    'programs on different cores use one block: make the grid axis "arbitrary", so that one core runs them in order, '
    "or give each program a block of its own and combine them afterwards"
)
HBM_SPACES = (MemorySpace.ANY, TpuMemory.HBM)
OFF_VMEM = (*HBM_SPACES, TpuMemory.SMEM, TpuMemory.CMEM, TpuMemory.SEMAPHORE)


@dataclasses.dataclass
class Device:
    """One chip.

    Attributes:
      id: its logical id: its place in the mesh, row by row.
      axes: its coordinates along the named axes of the mesh.
      buffers: by key; what other devices reach by the same key.
      bus_free: when its memory bus is free again, in simulated time.
    """

    id: int
    axes: dict[str, int]
    buffers: dict[Any, Any] = dataclasses.field(default_factory=dict)
    bus_free: float = 0.0

    def move(self, size: int, issue: float, info: Any) -> tuple[float, float]:
        """Occupy the memory bus: when a copy that is issued now starts and ends."""
        start = max(issue, self.bus_free)
        self.bus_free = start + chip.copy_seconds(size, info)
        return start, self.bus_free


class Semaphores:
    """An array of semaphores of one core.

    Attributes:
      counters: an object array of `Counter`. kind: "sem", "dma_sem" or "barrier_sem".
      label: how messages call them. key: the same on all devices and cores. place: its core.
    """

    __slots__ = ("counters", "key", "kind", "label", "place")

    def __init__(self, shape: Sequence[int], label: str, kind: str, place: Any, key: Any) -> None:
        self.label, self.kind, self.place, self.key = label, kind, place, key
        self.counters = np.empty(tuple(shape), object)
        for index in np.ndindex(*self.counters.shape):
            name = f"{label}[{', '.join(map(str, index))}]" if index else label
            self.counters[index] = Counter(name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.counters.shape

    def one(self, region: Region) -> Counter:
        """The semaphore that a view selects; the only one of an array of one."""
        found = region.get(self.counters)
        return found.reshape(-1)[0] if isinstance(found, np.ndarray) else found


class Core:
    """One TensorCore: what an agent's `place` is.

    Attributes:
      machine, device, index: whose and which it is. agent: the agent that runs on it.
      ids: the program that it runs. sizes: the grid. scopes: how many buffers `run_scoped` made so far.
      axes: its coordinates along the axes of the kernel's mesh of cores; empty without one.
      generator: the state of its random generator; None: never seeded.
      buffers: its buffers and semaphores, by key.
      vmem_bytes, most_vmem: what its buffers take of VMEM now, and at most so far.
      visited: for each output that is cut into blocks, the blocks that it left.
      before: when the last program began: that is when the pipeline asks for the next one's blocks.
    """

    def __init__(self, machine: Machine, device: Device, index: int) -> None:
        self.machine, self.device, self.index = machine, device, index
        self.agent: Agent = None  # pyright: ignore[reportAttributeAccessIssue] - set when the agent is made
        self.ids: tuple[int, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.scopes = 0
        self.axes: dict[str, int] = {}
        self.generator: Any = None
        self.buffers: dict[Any, Any] = {}
        self.vmem_bytes = self.most_vmem = 0
        self.before = 0.0
        self.visited: dict[int, Any] = {}

    def hold(self, ref: Any, count: int, label: str) -> None:
        """Take VMEM for `count` buffers of a Ref's type.

        Raises:
          KernelFinding: VMEM is full.
        """
        if ref.memory_space in OFF_VMEM or jaxlink.is_opaque(ref.dtype):
            return
        self.vmem_bytes += count * chip.tile_bytes(ref.shape, ref.dtype, self.machine.info)
        self.most_vmem = max(self.most_vmem, self.vmem_bytes)
        limit = self.machine.vmem_limit
        if limit is not None and self.vmem_bytes > limit:
            self.machine.found(
                "vmem-overflow",
                f"VMEM overflow: {label} brings the core to {self.vmem_bytes / 1024:,.1f} KiB, and there are "
                f"{limit / 1024:,.1f} KiB.",
                where=None,
                when=self.name if self.name != "the core" else None,
                operand=label,
                hint="take smaller blocks; each block has two buffers (pl.Buffered(1) asks for one), in whole tiles",
            )

    @property
    def name(self) -> str:
        parts = []
        if len(self.machine.devices) > 1:
            parts.append(f"device {self.device.id}")
        if self.machine.num_cores > 1:
            parts.append(f"core {self.index}")
        return ", ".join(parts) or "the core"

    def when(self) -> str:
        """Where the core is: for findings."""
        point = f"program {tuple(map(int, self.ids))}" if self.ids else "the only program"
        return f"{point} on {self.name}" if self.name != "the core" else point


class Machine:
    """All devices of one kernel call.

    Arguments:
      params: what the user asked for.
      name: of the kernel.
      axes: the mesh's named axes and their sizes; empty outside shard_map.
      num_devices: how many take part.
      tracking: whether the history of memory is kept; of VMEM, which is a core's own, only where `track_vmem`.
    """

    def __init__(
        self, params: InterpretParams, name: str, axes: Mapping[str, int], num_devices: int, num_cores: int,
        schedule: str | int, tracking: bool, track_vmem: bool,
    ) -> None:  # fmt: skip
        self.params, self.name, self.axes, self.num_cores = params, name, dict(axes), num_cores
        self.engine = Engine(schedule, tracking=tracking)
        self.tracking, self.track_vmem = tracking, track_vmem
        self.findings: list[Finding] = []
        self.pipeline_site = 1
        self.info = chip.chip(params.chip)
        self.vmem_limit = params.vmem_limit or (self.info.vmem_capacity_bytes if params.chip else None)
        self.timeline = Timeline() if params.trace else None
        self.collective_id: int | None = None
        self.core_axes: dict[str, int] = {}
        self.vmapped = 0  # leading axes of the grid that vmap added
        self.semaphore_checks = True
        self.drain: list[tuple[Semaphores, Core]] = []  # semaphores that must be zero at the end
        self.devices = []
        sizes = list(self.axes.values())
        for k in range(num_devices):
            coords = np.unravel_index(k, sizes) if sizes else ()
            self.devices.append(Device(k, dict(zip(self.axes, map(int, coords)))))
        self.cores = [Core(self, d, c) for d in self.devices for c in range(num_cores)]

    def core(self, device: int, index: int) -> Core:
        """A core of a device, by numbers."""
        return self.cores[device * self.num_cores + index]

    # --- memory ------------------------------------------------------------------------------------------------------
    def fill(self, dtype: Any) -> Any:
        """What memory of a dtype holds before it is written."""
        if jaxlink.is_opaque(dtype):
            dtype = np.uint32  # the words of a typed PRNG key
        if self.params.uninitialized_memory == "zero":
            return np.zeros((), dtype)
        return unwritten(dtype)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Memory that was never written."""
        fill = self.fill(dtype)
        return np.full((*shape, *words(dtype)), fill, fill.dtype)

    def allocate(self, ref: Any, label: str, place: Any, key: Any) -> Buffer | Semaphores:
        """A buffer, or semaphores, for a Ref's type."""
        dtype = ref.dtype
        if isinstance(dtype, SemaphoreDType):
            return Semaphores(ref.shape, label, str(dtype), place, key)
        return Buffer(self.empty(ref.shape, dtype), label, ref.memory_space, place, key, self.track_vmem)

    def log(self, core: Core, made: Any, text: str) -> None:
        """Print what a core does with a semaphore (None: with memory), where `logging_mode` asks for it."""
        mode = self.params.logging_mode
        if mode is not None:
            kind = LoggingMode.SHARED_MEMORY if made is None else LoggingMode.SEMAPHORE
            kind = LoggingMode.BARRIER if made is not None and made.kind == "barrier_sem" else kind
            if kind in mode:
                print(f"[{core.name}{f', program {core.ids}' if core.ids else ''}] {text}", flush=True)

    def span(self, core: Core, track: str, name: str, kind: str, start: float, end: float, where: Any = None) -> None:
        """Note what took time, where a timeline is kept."""
        if self.timeline is not None and end > start:
            self.timeline.add(f"device {core.device.id}", track, name, kind, start, end, where)

    # --- findings ----------------------------------------------------------------------------------------------------
    def found(
        self, kind: str, message: str, *, where: str | None, when: str | None, hint: str, operand: str | None = None,
        warn: bool = False,
    ) -> None:  # fmt: skip
        """Report a finding: raise it, or warn of it.

        Raises:
          KernelFinding: unless `warn`.
        """
        finding = Finding(kind, "error", message, where, when, hint, operand)
        self.findings.append(finding)
        if not warn:
            raise KernelFinding(finding)
        warn_of(finding)

    def keep_watch(self, made: Any, core: Core) -> None:
        """At the end of the call, semaphores must be back at zero."""
        if isinstance(made, Semaphores):
            self.drain.append((made, core))

    def check_semaphores(self, made: Semaphores, core: Core, where: str | None) -> None:
        """Report semaphores that are not zero when their scope ends; copies that signal them complete first."""
        self.engine.settle(list(made.counters.flat))
        for counter in made.counters.flat:
            if counter.value:
                self._leftover(counter, made, core, where)

    def _leftover(self, counter: Counter, made: Semaphores, core: Core, where: str | None) -> None:
        signalled = location_of(self.engine.sites[counter.last_signal]) if counter.last_signal else None
        unit = "bytes of copies" if made.kind == "dma_sem" else ""
        missing, name = made.kind == "dma_sem", counter.label
        name = "T" + name[1:] if name.startswith("the ") else f"The semaphore {name}"
        self.found(
            "missing-wait" if missing else "semaphore-leftover",
            f"A copy was never waited for: {counter.value:,} {unit} are left on {counter.label}."
            if missing
            else f"{name} ends at {counter.value}, not at zero.",
            where=signalled or where,
            when=core.name if core.name != "the core" else None,
            operand=made.label,
            hint="wait for every copy that is started, with .wait() (remote: wait_send and wait_recv)"
            if missing
            else "wait for as much as is signalled: what is left over confuses the next kernel that uses the semaphore",
        )

    def race(self, core: Core, buffer: Buffer, access: str, who: str, conflict: tuple[str, int], eqn: Any) -> None:
        """Report that an access is not ordered after an earlier one."""
        engine = self.engine
        verb, stamp = conflict
        other, earlier = engine.place_of(stamp), engine.who(stamp)
        by_pipeline = int(site_of(stamp)) == self.pipeline_site
        if by_pipeline:
            earlier = f"the pipeline of {earlier}"
        here, there = location_of(eqn), location_of(other)
        where = here or there if there in (None, here) or here is None else f"{here}; the other access at {there}"
        self.found(
            "race",
            f"Race on {buffer.label}: {who} {access}s what {earlier} {verb}, and nothing orders the two.",
            where=where,
            when=core.when(),
            operand=buffer.label,
            hint=SHARED_BLOCK
            if by_pipeline and who.startswith("the pipeline")
            else "wait for the copy before its data is used or its source is overwritten, or order the cores and "
            "devices by a semaphore",
            warn=self.params.on_race == "warn",
        )
