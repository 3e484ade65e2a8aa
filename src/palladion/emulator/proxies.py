"""Who wrote shared memory through the generic proxy and has not fenced it for the asynchronous proxy yet.

Ordinary stores and asynchronous copies see shared memory through different proxies; without a
`fence.proxy.async` between a store and the copy, wgmma or tcgen05 operation that reads it, the latter may read
what was there before. A sequential emulator never shows this in the values, so each CTA keeps, per 4-byte word,
the thread whose store is not fenced yet. The writer's own fence clears it. So does anybody's fence after a
barrier that the writer has passed: the PTX memory model asks for a fence somewhere on the path from the store to
the asynchronous read, not for the writer's own. Facts file, section 5.
"""

from collections.abc import Callable

import numpy as np

from palladion.emulator.registry import operation

PASSED_ON = 0x7FFF
"""Word written, not fenced, and handed on through a barrier: any thread's fence settles it."""

FOREIGN = PASSED_ON - 1
"""The "thread" of a store that another CTA made; it counts as handed on."""

_READERS = ("cp.async.bulk", "cp.reduce.async.bulk", "wgmma.mma_async", "tcgen05.mma", "tcgen05.cp")


def wanted(opcodes) -> bool:
    """Whether a module with these opcodes has anything that reads shared memory through the async proxy."""
    return any(opcode.startswith(_READERS) for opcode in opcodes)


class UnfencedWrites:
    """The unfenced words of one CTA's shared memory of `size` bytes; `watch` is told of every store's addresses."""

    def __init__(self, size: int):
        self._writer = np.zeros(-(-size // 4), np.int16)
        self._clean = True
        self.watch: Callable[[np.ndarray], None] | None = None

    def wrote(self, address: np.ndarray, width: int, threads: np.ndarray) -> None:
        """Generic stores: thread `threads[i]` wrote `width` bytes at byte `address[i]`."""
        if self.watch is not None:
            self.watch(address)
        first = address >> 2
        for word in range(max(1, width // 4)):
            self._writer[first + word] = threads + 1
        self._clean = False

    def fenced(self, threads: np.ndarray) -> None:
        """These threads executed a fence between the proxies."""
        if self._clean:
            return
        settled = np.zeros(PASSED_ON + 1, bool)
        settled[threads + 1] = True
        settled[PASSED_ON] = True
        self._writer[settled[self._writer]] = 0
        self._clean = not self._writer.any()

    def passed_on(self, threads: np.ndarray | None = None) -> None:
        """These threads (None: all) passed a barrier, or arrived at one: what they wrote is known to others."""
        if self._clean:
            return
        if threads is None:
            self._writer[self._writer != 0] = PASSED_ON
            return
        known = np.zeros(PASSED_ON + 1, bool)
        known[threads + 1] = True
        self._writer[known[self._writer]] = PASSED_ON

    def overwritten(self, address: np.ndarray) -> None:
        """The asynchronous proxy wrote these bytes."""
        if not self._clean:
            self._writer[address >> 2] = 0

    def unfenced(self, address: np.ndarray) -> tuple[int, int | None] | None:
        """The first of these bytes that a store wrote and no fence has followed: (byte address, thread, or
        None where the thread is no longer known). None if there is none."""
        if self._clean:
            return None
        writer = self._writer[address >> 2]
        if not writer.any():
            return None
        at = int(np.argmax(writer != 0))
        thread = int(writer.flat[at]) - 1
        return int(address.flat[at]), None if thread == PASSED_ON - 1 else thread


def check_async_read(group, cta, offsets: np.ndarray, what: str, lane: int | None = None) -> None:
    """Fault "missing-fence" if an asynchronous operation issued now would read bytes that a store wrote and no
    proxy fence has followed.

    Arguments: group, lane: who issues; cta: whose shared memory; offsets: int64 byte offsets in it, any
        shape; what: the reader, for the message."""
    found = cta.unfenced.unfenced(offsets) if cta.unfenced is not None else None
    if found is None:
        return
    at, thread = found
    writer = "a thread" if thread is None else f"thread {thread}"
    group.fault(
        "missing-fence",
        f"{what} reads shared byte {at:#x}, which {writer} wrote with an ordinary store and no "
        "fence.proxy.async has followed; let the writers execute fence.proxy.async.shared::cta, then a "
        "barrier, before this",
        lane=lane,
    )


# ------------------------------------------------------------------------------------------------ the instructions


def _settle(group) -> None:
    threads = group.threads[group.active]
    for cta in group.cluster.ctas:
        if cta.unfenced is not None:
            # In another CTA's memory these threads' stores count as handed on.
            cta.unfenced.fenced(threads if cta is group.cta else threads[:0])


@operation("fence.proxy.async")
def fence_proxy_async(group, instr) -> None:
    """`fence.proxy.async{.space}`: generic and async proxy agree from here on (shared memory is all we track)."""
    if not instr.has("global"):
        _settle(group)


@operation("fence.proxy.async::generic")
def fence_proxy_one_way(group, instr) -> None:
    """The one-way forms: only the release on shared::cta settles what this thread stored."""
    if instr.has("release"):
        _settle(group)


@operation("fence.proxy.alias")
def fence_proxy_alias(group, instr) -> None:
    """Virtual aliases of memory: the emulated device has none, so there is nothing to order."""


@operation("fence.mbarrier_init")
def fence_mbarrier_init(group, instr) -> None:
    """`fence.mbarrier_init.release.cluster`: other CTAs may learn of this thread's barriers from now on."""
    publish(group)


def publish(group) -> None:
    """Mark the barriers that the active threads initialised as known to the cluster."""
    threads = set(group.threads[group.active].tolist())
    for barrier in group.cta.slot("mbarrier", dict).values():
        if barrier.by in threads:
            barrier.published = True


@operation("fence.proxy.tensormap::generic")
def fence_proxy_tensormap(group, instr, address=None, size=None) -> None:
    """Release: nothing to do. Acquire: this CTA may use the map that it names, edited on the device or not."""
    if instr.has("acquire") and address is not None:
        acquired = group.machine.slot("edited maps", dict)
        for i in group.active_indices():
            acquired.setdefault(int(group.array(address)[i]), set()).add(group.cta.index)
