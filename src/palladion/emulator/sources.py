"""Shared memory that a bulk store may still be reading: from its issue until its thread's `wait_group` covers it.

Whether the engine has read its source is not known before the thread has waited (`cp.async.bulk.wait_group`, with
`.read` or without), so whatever is written into the source before that is a race, even where the emulator's order of
events gives the right values. Facts file 2.7 and 5.2.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator.faults import EmulationFault
from palladion.emulator.operands import Reader, Readers


@dataclass
class Sources:
    """The sources in use of one CTA; `open`: (thread, its bulk group, reader)."""

    readers: Readers
    open: list[tuple[int, int, Reader]] = field(default_factory=list)

    def begin(self, thread: int, number: int, offsets: np.ndarray, what: str) -> None:
        """A store of a thread, in its bulk group `number`, reads these bytes."""
        self.open.append((thread, number, self.readers.begin(offsets.reshape(-1) >> 4, what)))

    def end(self, limit: dict[int, int]) -> None:
        """Threads have waited for their bulk groups below `limit[thread]`."""
        still = []
        for thread, number, reader in self.open:
            if number < limit.get(thread, -1):
                self.readers.end(reader)
            else:
                still.append((thread, number, reader))
        self.open = still

    def check(self, offsets: np.ndarray, what: str) -> None:
        """Fault if a write hits bytes that a store may still read."""
        found = self.readers.reader_of(offsets)
        if found is None:
            return
        reader, at = found
        raise EmulationFault(
            "missing-wait",
            f"{what} writes shared byte {at:#x}, which {reader} may still read",
            hint="The thread that issued the store executes cp.async.bulk.wait_group.read, then a barrier, before "
            "its source is used again.",
        )


def sources(cta: Any) -> Sources:
    """The sources in use of a CTA."""

    def make() -> Sources:
        found = Sources(Readers(np.zeros(-(-len(cta.shared) // 16) + 8, np.int16)))
        if cta.unfenced is not None:
            cta.unfenced.watch = lambda offsets: found.check(offsets, "an ordinary store")
        return found

    return cta.slot("bulk sources", make)
