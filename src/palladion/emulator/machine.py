"""The grid in execution: clusters, CTAs, the choice of which group runs next, asynchronous events, deadlock.

Of the groups of a CTA the one furthest behind runs first, and groups at the same place become one, so that lanes that
diverged meet again. A group that runs long while others could go on lets them (a spinning thread must see what it waits
for). When every group waits, the oldest asynchronous event is performed; when there is none, it is a deadlock, and
the fault says what each group waits for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator.calls import Calls
from palladion.emulator.cta import Cluster
from palladion.emulator.faults import EmulationFault, Note, Place
from palladion.emulator.group import Group, Shape, shape_of
from palladion.emulator.ptx import Instruction
from palladion.emulator.registry import Wait
from palladion.emulator.spaces import RESERVED

QUANTUM = 200
"""Blocks that a group runs before other groups that could run are tried."""


@dataclass(eq=False)
class Event:
    """Something asynchronous that is under way: `run` does it."""

    run: Callable[[], None]
    what: str
    place: Place
    cta: Any = None
    after: tuple[Event, ...] = ()
    done: bool = False


@dataclass(frozen=True)
class Launch:
    """How a kernel was launched."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int = 0
    pdl: bool = False
    cooperative: bool = False
    params: bytes = b""
    explicit_cluster: bool = field(default=False)


class Machine:
    """One launch of a kernel.

    Arguments:
      driver: the device: its memory, options and output.
      loaded: the module (`driver.Loaded`); name: of the kernel.
    """

    def __init__(self, driver: Any, loaded: Any, name: str, launch: Launch) -> None:
        self.driver, self.loaded, self.launch = driver, loaded, launch
        self.memory, self.arch, self.order = driver.memory, driver.arch, driver.order
        self.random = random.Random(self.order) if isinstance(self.order, int) else None
        self.entry = loaded.module.functions[name]
        self.code = loaded.code(name)
        self.calls = Calls(self)
        self.grid, self.block, self.cluster = launch.grid, launch.block, launch.cluster
        self.explicit_cluster = launch.explicit_cluster
        self.clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.sms = driver.sms
        self.smem = launch.smem
        self.layout, self.shared_size = loaded.shared_layout(name, launch.smem)
        self.window = self.shared_size
        self.window_stride = -(-self.window // 1024) * 1024
        self.detect_uninitialized = driver.detect_uninitialized
        self.accounts = self.detect_uninitialized or loaded.wants_fences(self)
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._slots: dict[str, Any] = {}
        self.inflight: list[Event] = []
        self.ticks = 0
        total = self.clusters[0] * self.clusters[1] * self.clusters[2]
        order = list(range(total))
        self.starting = deque(order[: driver.resident])
        self.pending = deque(order[driver.resident :])
        self.resident: list[Cluster] = []
        self.steps = 0
        self.params = np.zeros(0, np.uint8)
        self.params_address = 0

    # --- for operations -------------------------------------------------------------------------------------
    def slot(self, name: str, factory: Callable[[], Any]) -> Any:
        """State of an operation's own, made once a launch."""
        if name not in self._slots:
            self._slots[name] = factory()
        return self._slots[name]

    def shape(self, warps: tuple[int, ...]) -> Shape:
        found = self._shapes.get(warps)
        if found is None:
            found = self._shapes[warps] = shape_of(warps, self.block)
        return found

    def clock(self) -> int:
        """A clock that always goes on."""
        self.ticks += 1
        return self.ticks + 64 * self.steps

    def queue(
        self, run: Callable[[], None], what: str = "", group: Group | None = None, after: tuple[Event, ...] = ()
    ) -> Event:
        """Start something asynchronous; see the driver's `order` for when it is performed."""
        place = group.place() if group is not None else Place(self.entry.name)
        event = Event(run, what, place, group.cta if group is not None else None, tuple(after))
        if self.order == "eager":
            self.perform(event)
        else:
            self.inflight.append(event)
        return event

    def perform(self, event: Event) -> None:
        """Do an event now, and before it those that it comes after."""
        if event.done:
            return
        for earlier in event.after:
            self.perform(earlier)
        event.done = True
        if event in self.inflight:
            self.inflight.remove(event)
        try:
            event.run()
        except EmulationFault as fault:
            fault.place = fault.place or event.place
            raise

    def happened(self) -> None:
        """Nothing to do: conditions are asked again in every round."""

    def note(self, kind: str, message: str, group: Group | None = None, lane: int | None = None) -> None:
        """Report something that is no fault of the machine."""
        place = group.place(lane) if group is not None else Place(self.entry.name)
        if self.driver.strict:
            raise EmulationFault(kind, message, place)
        self.driver.findings.append(Note(kind, message, place))

    def source_line(self, instr: Instruction) -> str | None:
        """The line of the source, and of the user's, if they are known."""
        return self.driver.source_line(self.loaded.module, instr)

    def symbol(self, group: Group, name: str) -> int:
        """The address of a variable in its own space."""
        if name in self.layout:
            return group.cta.shared_base + self.layout[name]
        for p, offset in self.loaded.param_offsets(self.entry):
            if p == name:
                return self.params_address + offset
        found = self.loaded.address(name)
        if found is None:
            group.fault("unknown-symbol", f"There is no variable or function {name} in the module.")
        return found

    # --- running --------------------------------------------------------------------------------------------
    def execute(self) -> None:
        """Run the grid.

        Raises: EmulationFault.
        """
        with np.errstate(all="ignore"):
            while True:
                ran = self.round()
                if not self.resident and not self.starting:
                    break
                if ran:
                    continue
                if self.starting:
                    self.start()
                elif not self.advance():
                    self.stuck()
            while self.inflight:
                self.perform(self.inflight[0])

    def start(self) -> None:
        self.resident.append(Cluster(self, self.starting.popleft()))

    def round(self) -> bool:
        """Run every CTA for a while; whether any of them did something."""
        ran = spent = False
        for cluster in list(self.resident):
            for cta in cluster.ctas:
                if not cta.ended:
                    did, more = cta.run()
                    ran, spent = ran or did, spent or more
            if all(c.ended for c in cluster.ctas):
                self.resident.remove(cluster)
                if self.pending:
                    self.starting.append(self.pending.popleft())
        if spent and self.starting and len(self.resident) < self.driver.resident:
            self.start()
        if self.random is not None and self.inflight and self.random.random() < 0.3:
            ready = [e for e in self.inflight if all(a.done for a in e.after)]
            self.perform(self.random.choice(ready))
            ran = True
        return ran

    def advance(self) -> bool:
        """Perform one event, or let those that poll poll again; False: there is nothing."""
        polling = [g for cluster in self.resident for cta in cluster.ctas for g in cta.groups if g.polling]
        for g in polling:
            g.polling = False
        for event in self.inflight:
            if all(a.done for a in event.after):
                self.perform(event)
                self.idle = 0
                return True
        if not polling:
            return False
        self.idle += 1
        return self.idle <= self.driver.patience

    idle = 0

    def stuck(self) -> None:
        """Raise the fault of a deadlock: what each group waits for."""
        details, first = [], None
        for cluster in self.resident:
            for cta in cluster.ctas:
                for g in cta.groups:
                    place = g.place(int(np.flatnonzero(g.mask)[0]))
                    first = first or place
                    reason = g.waiting.reason if g.waiting is not None else "polls, and nothing changes"
                    warps = ", ".join(map(str, g.key))
                    lanes = "" if (g.mask.reshape(-1, 32).all()) else f", {g.count} threads"
                    source = f", {place.source}" if place.source else ""
                    details.append(
                        f"  CTA {cta.id}, warp {warps}{lanes}: {reason} (PTX line {place.line}: {place.text}{source})"
                    )
        more = len(details) - 12
        if more > 0:
            details = [*details[:12], f"  … and {more} more"]
        message = "Every thread waits, and nothing is under way that could wake one."
        raise EmulationFault("deadlock", message, first, details=details)


__all__ = ["QUANTUM", "RESERVED", "Event", "Launch", "Machine", "Wait"]
