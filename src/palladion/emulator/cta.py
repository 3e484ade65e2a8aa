"""A CTA and its cluster: shared memory, register rows, the groups of its warps, and which of them runs next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.emulator.faults import EmulationFault, UnknownInstruction
from palladion.emulator.group import Frame, Group
from palladion.emulator.registry import Wait
from palladion.emulator.spaces import RESERVED, Views

Array = np.ndarray
POISON = 0xA5
"""What shared memory holds before anybody writes it."""
QUANTUM = 200
BUDGET = 4000


class Cluster:
    """CTAs that can read each other's shared memory.

    Attributes:
      ctas: by rank; index: linear number of the cluster; id: (x, y, z); shape: CTAs in x, y, z.
    """

    def __init__(self, machine: Any, index: int) -> None:
        self.machine, self.index, self.shape = machine, index, machine.cluster
        nx, ny, _ = machine.clusters
        self.id = (index % nx, index // nx % ny, index // (nx * ny))
        x, y, z = self.shape
        count, stride = x * y * z, machine.window_stride
        self.views = Views(np.full(count * stride, POISON, np.uint8))
        self._slots: dict[str, Any] = {}
        self.ctas: list[Cta] = []
        for rank in range(count):
            self.ctas.append(Cta(self, rank, (rank % x, rank // x % y, rank // (x * y))))

    def slot(self, name: str, factory: Callable[[], Any]) -> Any:
        """State of an operation's own, made once a cluster."""
        if name not in self._slots:
            self._slots[name] = factory()
        return self._slots[name]


class Cta:
    """A CTA.

    Attributes:
      rank: in its cluster; id: (x, y, z) in the grid; index: linear; shared: bytes of its window, offsets as in
      addresses; live: threads that have not exited; groups: all of its groups; on_exit: called with the CTA at its end.
    """

    def __init__(self, cluster: Cluster, rank: int, place: tuple[int, int, int]) -> None:
        machine = cluster.machine
        self.cluster, self.machine, self.rank, self.cluster_id = cluster, machine, rank, place
        self.id = tuple(c * s + p for c, s, p in zip(cluster.id, cluster.shape, place, strict=True))
        gx, gy, _ = machine.grid
        self.index = self.id[0] + gx * (self.id[1] + gy * self.id[2])
        self.sm = self.index % machine.sms
        self.shared_base = rank << 24
        start = rank * machine.window_stride
        self.views = Views(cluster.views.bytes[start : start + machine.window_stride])
        self.shared = self.views.bytes[: machine.window]
        self.warps = -(-machine.threads // 32)
        self.width = 32 * self.warps
        self.live = np.zeros(self.width, bool)
        self.live[: machine.threads] = True
        self.local = np.zeros((self.width, 0), np.uint8)
        self.on_exit: list[Callable[[Cta], None]] = []
        self._slots: dict[str, Any] = {}
        self.unfenced: Any = machine.loaded.unfenced(machine)
        self.initialized = np.zeros(machine.window_stride, bool) if machine.detect_uninitialized else None
        self.ended = False
        self.waiting = 0
        self.frame = self.new_frame(machine.code, None)
        warps = tuple(range(self.warps))
        self.groups = [Group(self, self.frame, warps, self.live.copy(), 0)]

    def new_frame(self, code: Any, parent: Frame | None) -> Frame:
        """A frame for an activation of a function, with room for its variables in local memory."""
        base = 0 if parent is None else parent.base + parent.code.local_size
        if self.local.shape[1] < base + code.local_size:
            grown = np.zeros((self.width, max(2 * self.local.shape[1], base + code.local_size)), np.uint8)
            grown[:, : self.local.shape[1]] = self.local
            self.local = grown
        return Frame(code, self.width, base, parent, 0 if parent is None else parent.depth + 1)

    def slot(self, name: str, factory: Callable[[], Any]) -> Any:
        """State of an operation's own, made once a CTA."""
        if name not in self._slots:
            self._slots[name] = factory()
        return self._slots[name]

    def known_slot(self, name: str) -> Any:
        """The state of an operation if it has been made; else None."""
        return self._slots.get(name)

    def live_warps(self) -> int:
        """Warps that have not exited."""
        return int(self.live.reshape(-1, 32).any(1).sum())

    def shared_address(self, offset: int) -> int:
        """The shared::cluster address of a byte of this CTA."""
        return self.shared_base | offset

    def view(self, offset: int, nbytes: int, align: int = 1, write: bool = False) -> Array:
        """Bytes of shared memory, checked."""
        if offset % align:
            raise EmulationFault("misaligned", f"Shared byte {offset:#x} is not a multiple of {align}.")
        if offset < RESERVED or offset + nbytes > len(self.shared):
            size = len(self.shared) - RESERVED
            have = f"the CTA has {size} bytes from {RESERVED:#x} on"
            message = f"{nbytes} bytes at shared byte {offset:#x} are not there: {have}."
            raise EmulationFault("out-of-bounds", message)
        if write and self.initialized is not None:
            self.initialized[offset : offset + nbytes] = True
        return self.shared[offset : offset + nbytes]

    def note_written(self, offsets: Array, nbytes: int, threads: Array) -> None:
        """Ordinary code has written shared memory."""
        if self.initialized is not None:
            self.initialized[offsets[:, None] + np.arange(nbytes)] = True
        if self.unfenced is not None:
            self.unfenced.wrote(offsets, nbytes, threads)

    def check_read(self, group: Group, views: Views, offset: Array, m: Any, nbytes: int) -> None:
        """With `detect_uninitialized`: a note when nobody has written what is read."""
        if views is not self.views or self.initialized is None:
            return
        known = self.initialized[offset.astype(np.int64)[:, None] + np.arange(nbytes)].all(1)
        bad = ~known if m is None else ~known & m
        if bad.any():
            lane = int(bad.argmax())
            message = f"{nbytes} bytes of shared memory at {int(offset[lane]):#x} are read that nobody has written."
            self.machine.note("uninitialized-read", message, group, lane)

    # --- groups ---------------------------------------------------------------------------------------------
    def split(self, group: Group, lanes: Array, block: int) -> Group:
        """A new group of some lanes of a group, which go to another block."""
        group.settled()
        some = lanes.reshape(-1, 32).any(1)
        warps = tuple(w for w, have in zip(group.key, some) if have)
        new = Group(self, group.frame, warps, lanes.reshape(-1, 32)[some].reshape(-1), block)
        new.epoch, new.steps = group.epoch, group.steps
        self.groups.append(new)
        return new

    def merge(self, group: Group, other: Group) -> None:
        """`other`, at the same place, becomes part of `group`."""
        group.settled()
        other.settled()
        mask = np.zeros(self.width, bool)
        mask[group.threads] |= group.mask
        mask[other.threads] |= other.mask
        warps = tuple(sorted({*group.key, *other.key}))
        shape = self.machine.shape(warps)
        group.reshape(warps, mask[shape.threads])
        group.epoch = max(group.epoch, other.epoch)
        group.waiting = None
        other.done = True
        self.groups.remove(other)

    def retire(self, group: Group) -> None:
        """The group's lanes have exited."""
        group.settled()
        self.live[group.threads[group.mask]] = False
        group.done = True
        self.groups.remove(group)
        if not self.groups:
            # Before its events are performed: an operation still under way may be what is wrong.
            for function in self.on_exit:
                function(self)
            for event in [e for e in self.machine.inflight if e.cta is self]:
                self.machine.perform(event)
            self.ended = True

    def run(self) -> tuple[bool, bool]:
        """Run groups until all wait or the budget is spent.

        Returns: whether anything ran; whether something could still run.
        """
        ran, budget = False, BUDGET
        while budget > 0:
            group = self.choose()
            if group is None:
                return ran, False
            ran = True
            budget -= self.go(group)
            if self.ended:
                return True, False
        return ran, True

    def choose(self) -> Group | None:
        """The group that is furthest behind of those that can run; groups at its place join it."""
        best, key = None, None
        for g in self.groups:
            if g.polling or (g.waiting is not None and not self.awake(g)):
                continue
            k = g.order()
            if key is None or k < key:
                best, key = g, k
        if best is not None and len(self.groups) > 1 and best.resume is None:
            for g in [g for g in self.groups if g is not best and g.frame is best.frame and g.block == best.block]:
                if not g.polling and g.resume is None and (g.waiting is None or g.waiting.merge):
                    self.merge(best, g)
        return best

    def awake(self, group: Group) -> bool:
        """Whether a group that waited may go on; if so it is made ready."""
        wait = group.waiting
        assert wait is not None
        if not wait.until():
            return False
        group.waiting = None
        if wait.finish is not None:
            group.resume = (wait.finish(),)
        return True

    def go(self, group: Group) -> int:
        """Run a group until it ends, waits, splits, or others should have their turn; gives the blocks it ran."""
        count, limit = 0, QUANTUM if len(self.groups) > 1 else BUDGET
        blocks, machine = group.frame.code.blocks, self.machine
        group.polling = False
        try:
            while True:
                block = blocks[group.block]
                if block.gather is not None and group.resume is None and not self.together(group, block.gather):
                    break
                count += 1
                following = group.run[group.block](group)
                if following < 0:
                    break
                group.block = following
                if group.polling or count >= limit:
                    group.epoch += 1
                    break
                if len(self.groups) > 1 and self.overtaken(group):
                    break
        except Wait as wait:
            self.park(group, wait)
        except UnknownInstruction:
            raise
        except EmulationFault as fault:
            fault.place = fault.place or group.place()
            raise
        machine.steps += count
        if machine.steps > machine.driver.limit:
            message = f"The kernel still runs after {machine.steps} basic blocks."
            group.fault("deadlock", message, hint="EmulatedDriver(limit=…)")
        return max(count, 1)

    def overtaken(self, group: Group) -> bool:
        """Whether another group is behind this one, or at the same place."""
        order = group.order()
        for g in self.groups:
            if g is group or g.polling:
                continue
            if g.waiting is not None and not (g.waiting.merge and g.frame is group.frame and g.block == group.block):
                continue
            if g.order() <= order:
                return True
        return False

    def together(self, group: Group, kind: str) -> bool:
        """Whether the lanes that an instruction needs are all in the group; if not, it waits for them."""
        if kind == "warp" and group.full:
            return True
        missing = self.missing(group, kind)
        if not missing:
            return True
        what = "the other lanes of its warp" if kind == "warp" else "the other warps of its warpgroup"
        instr = group.frame.code.blocks[group.block].body[0]
        group.at = next(k for k, i in enumerate(group.frame.code.instrs) if i.line == instr.line)
        group.waiting = Wait(lambda: not self.missing(group, kind), f"waits for {what}", merge=True)
        return False

    def missing(self, group: Group, kind: str) -> bool:
        if (self.live[group.threads] & ~group.mask).any():
            return True
        if kind == "warp":
            return False
        have = set(group.key)
        for first in {w // 4 * 4 for w in group.key}:
            for w in range(first, min(first + 4, self.warps)):
                if w not in have and self.live[32 * w : 32 * w + 32].any():
                    return True
        return False

    def park(self, group: Group, wait: Wait) -> None:
        """The group waits; the lanes that need not wait go on as a group of their own."""
        group.settled()
        if wait.ready is not None:
            ready = wait.ready & group.mask
            if ready.any() and not (ready == group.mask).all():
                self.split(group, ready, group.block)
                group.narrow(group.mask & ~ready)
            elif ready.any():
                return
        group.waiting = wait
