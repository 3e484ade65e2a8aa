"""Groups: warps of one CTA that are at the same instruction, executed together; what operations ask of the machine.

A group's registers are rows of the CTA's register file, cut to its warps (`s`: a slice, or an array of indices where
the warps are not consecutive), so that groups split and merge without copying anything. Lanes that took
another way are off in `mask`. Which group runs next is the machine's choice (`machine.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from palladion.emulator import spaces
from palladion.emulator.faults import EmulationFault, Place
from palladion.emulator.ptx import Instruction
from palladion.emulator.registry import Wait
from palladion.emulator.translate import Code

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Shape:
    """Warps of a CTA as lane arrays.

    Attributes:
      s: their part of a row of the register file; threads: linear thread indices; lanes: 0..31; warp: warp of each
      lane (uint32); tid: x, y, z indices (uint32); exists: lanes that are threads of the CTA.
    """

    warps: Array
    n: int
    s: Any
    threads: Array
    lanes: Array
    warp: Array
    tid: tuple[Array, Array, Array]
    exists: Array


def shape_of(warps: tuple[int, ...], block: tuple[int, int, int]) -> Shape:
    """The lanes of warps (ascending) of a CTA of `block` threads."""
    ids = np.array(warps, np.int64)
    threads = (ids[:, None] * 32 + np.arange(32)).reshape(-1)
    consecutive = warps[-1] - warps[0] + 1 == len(warps)
    s = slice(32 * warps[0], 32 * (warps[-1] + 1)) if consecutive else threads
    x, y, z = block
    tid = (threads % x, threads // x % y, threads // (x * y))
    lanes = (threads % 32).astype(np.uint32)
    exists = threads < x * y * z
    a, b, c = (t.astype(np.uint32) for t in tid)
    return Shape(ids, len(threads), s, threads, lanes, (threads // 32).astype(np.uint32), (a, b, c), exists)


class Frame:
    """An activation of a function, for all threads of a CTA at once.

    A place of a call has one frame for each way that leads to it: lanes that call at different times do not disturb
    each other, as each has its own item of every row. So recursion makes frames, and loops do not.

    Attributes:
      registers: rows of the register file; base: byte in local memory where its variables begin; next: block of the
      parent to return to; returns: (from, to, size) of results in local memory.
    """

    def __init__(self, code: Code, threads: int, base: int, parent: Frame | None, depth: int) -> None:
        self.code, self.base, self.parent, self.depth = code, base, parent, depth
        dtypes = spaces.DTYPES
        self.registers = [np.zeros((threads, 2) if c == "x" else threads, dtypes[c]) for c in code.slots]
        self.next = 0
        self.returns: tuple[tuple[int, int, int], ...] = ()
        self.calls: dict[tuple[int, str], Frame] = {}
        self.order: tuple[int, ...] = ()


class Group:
    """See the module's docstring.

    Attributes:
      n: lanes; warps: their numbers; mask: lanes that are here; full: all of them are;
      active: lanes that execute the present operation; block: index of the block that runs next; waiting: why it
      does not run; settle: functions to call before registers move.
    """

    def __init__(self, cta: Any, frame: Frame, warps: tuple[int, ...], mask: Array, block: int) -> None:
        self.cta, self.machine = cta, cta.machine
        self.settle: list[Callable[[], None]] = []
        self.waiting: Wait | None = None
        self.polling = False
        self.resume: tuple[Any] | None = None  # what an operation gives that has waited
        self.done = False
        self.epoch = 0
        self.steps = 0
        self.at = 0
        self.block = block
        self.enter(frame)
        self.reshape(warps, mask)

    def enter(self, frame: Frame) -> None:
        self.frame, self.R, self.run = frame, frame.registers, frame.code.run

    def reshape(self, warps: tuple[int, ...], mask: Array) -> None:
        """Become these warps with these lanes."""
        self.key = warps
        self.shape: Shape = self.machine.shape(warps)
        self.n, self.s, self.warps = self.shape.n, self.shape.s, self.shape.warps
        self.mask = self.active = mask
        self.count = int(np.count_nonzero(mask))
        self.full = self.count == self.n

    @property
    def cluster(self) -> Any:
        return self.cta.cluster

    @property
    def lanes(self) -> Array:
        """0..31, shape (n,)."""
        return self.shape.lanes

    @property
    def threads(self) -> Array:
        """Linear thread index in the CTA, shape (n,)."""
        return self.shape.threads

    @property
    def instr(self) -> Instruction | None:
        """The instruction that is executed."""
        instrs = self.frame.code.instrs
        return instrs[self.at] if self.at < len(instrs) else None

    def active_indices(self) -> Array:
        """Which of the n lanes execute the operation."""
        return np.flatnonzero(self.active)

    def first_active(self) -> int | None:
        """The first lane that executes the operation."""
        found = np.flatnonzero(self.active)
        return int(found[0]) if len(found) else None

    def array(self, value: Any, dtype: Any = None) -> Array:
        """One item a lane."""
        if isinstance(value, np.ndarray) and value.shape == (self.n,) and (dtype is None or value.dtype == dtype):
            return value
        return np.broadcast_to(np.asarray(value, dtype), (self.n,))

    def resumed(self) -> Any:
        """The result of the operation that the group has waited in."""
        assert self.resume is not None
        (result,), self.resume = self.resume, None
        return result

    def order(self) -> tuple[int, ...]:
        """How far the group has come; the least runs first."""
        return (self.epoch, *self.frame.order, self.frame.code.blocks[self.block].position)

    # --- reports --------------------------------------------------------------------------------------------
    def place(self, lane: int | None = None) -> Place:
        """Where the group is."""
        instr = self.instr
        if lane is None:
            lane = self.first_active()
        thread = None if lane is None else int(self.threads[lane])
        source = self.machine.source_line(instr) if instr is not None else None
        line, text = (instr.line, instr.text) if instr is not None else (0, "")
        return Place(self.machine.entry.name, line, text, source, self.cta.id, thread)

    def fault(self, kind: str, message: str, lane: int | None = None, hint: str | None = None) -> NoReturn:
        """Raise an EmulationFault at the present instruction."""
        raise EmulationFault(kind, message, self.place(lane), hint)

    def poll(self) -> None:
        """Let everything else go first: for polls that found nothing."""
        self.polling = True

    # --- control, called by generated code: gives the next block, or -1 when the group has to be chosen again
    def branch(self, p: Array, taken: int, other: int) -> int:
        if not self.full:
            p = p & self.mask
        count = np.count_nonzero(p)
        if count == self.count:
            return taken
        if count == 0:
            return other
        rest = self.mask & ~p
        self.cta.split(self, rest, other)
        self.narrow(p)
        self.block = taken
        return -1

    def switch(self, index: Any, targets: tuple[int, ...]) -> int:
        index = self.array(index)
        wanted = np.unique(index[self.mask])
        if wanted[-1] >= len(targets):
            self.fault("out-of-bounds", f"Index {wanted[-1]} into a list of {len(targets)} branch targets.")
        for value in wanted[1:]:
            self.cta.split(self, self.mask & (index == value), targets[value])
        if len(wanted) > 1:
            self.narrow(self.mask & (index == wanted[0]))
        self.block = targets[wanted[0]]
        return -1

    def narrow(self, mask: Array) -> None:
        """Keep these lanes only."""
        some = mask.reshape(-1, 32).any(1)
        if some.all():
            self.reshape(self.key, mask)
        else:
            warps = tuple(w for w, have in zip(self.key, some) if have)
            self.reshape(warps, mask.reshape(-1, 32)[some].reshape(-1))

    def settled(self) -> None:
        """Finish what has to be finished before registers move."""
        while self.settle:
            self.settle.pop(0)()

    def exit(self) -> int:
        self.cta.retire(self)
        return -1

    def leave(self) -> int:
        """`ret`: back to the caller, or the end."""
        frame = self.frame
        if frame.parent is None:
            return self.exit()
        rows = self.threads[self.mask]
        local = self.cta.local
        for source, target, size in frame.returns:
            local[rows, target : target + size] = local[rows, source : source + size]
        self.settled()
        self.enter(frame.parent)
        self.block = frame.next
        return -1

    def call(self, site: int, target: Any, returns: tuple[int, ...], arguments: tuple[int, ...], after: int) -> int:
        """`call`: site is the block that ends with it; offsets are of caller's parameters in its local memory."""
        return self.machine.calls.call(self, site, target, returns, arguments, after)

    def trap(self) -> int:
        self.fault("trap", "The program executed trap.")

    def symbol(self, name: str) -> int:
        """The address of a variable of the module."""
        return self.machine.symbol(self, name)

    # --- memory ---------------------------------------------------------------------------------------------
    def read(self, space: str, addresses: Any, nbytes: int, mask: Any = None, align: int | None = None) -> Array:
        """Bytes that each lane reads: (n, nbytes) uint8, zeros where the mask (default: active) is off."""
        mask = self.active if mask is None else mask
        found = np.zeros((self.n, nbytes), np.uint8)
        for buffer, offsets, chosen in spaces.places(self, space, addresses, nbytes, align or nbytes, mask, False):
            found[chosen] = buffer[offsets[:, None] + np.arange(nbytes)]
        return found

    def write(self, space: str, addresses: Any, data: Array, mask: Any = None, align: int | None = None) -> None:
        """Write (n, nbytes) bytes; of lanes with the same address the last one wins."""
        mask = self.active if mask is None else mask
        nbytes = data.shape[1]
        for buffer, offsets, chosen in spaces.places(self, space, addresses, nbytes, align or nbytes, mask, True):
            buffer[offsets[:, None] + np.arange(nbytes)] = data[chosen]

    def view(self, space: str, address: int, nbytes: int, align: int = 1, write: bool = False) -> Array:
        """The bytes of memory themselves."""
        return spaces.view(self, space, int(address), nbytes, align, write)

    def locate_shared(self, address: int) -> tuple[Any, int]:
        """The CTA and the offset in its window of a shared (or generic) address."""
        return spaces.locate_shared(self, int(address))
