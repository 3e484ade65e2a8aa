"""Which bytes of shared memory tensor-core operations in flight may still read, so that refilling them shows.

Each CTA counts, for every 16 bytes, the readers under way: a wgmma from its issue to the `wgmma.wait_group` that
covers it, a tcgen05.mma or .cp until it has been performed. A copy or a store into such bytes is a race on hardware,
whatever the emulator's order of events makes of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Reader:
    """One operation: the 16-byte chunks it reads (numbers in the CTA's window), and what it is."""

    chunks: Array
    what: str


@dataclass
class Readers:
    """All readers in flight of one CTA's shared memory, and how many there are for each chunk."""

    counts: Array
    readers: list[Reader] = field(default_factory=list)

    def begin(self, chunks: Array, what: str) -> Reader:
        """Notes a reader; `end` it when it is known to be over."""
        reader = Reader(np.unique(chunks), what)
        self.counts[reader.chunks] += 1
        self.readers.append(reader)
        return reader

    def end(self, reader: Reader) -> None:
        self.counts[reader.chunks] -= 1
        self.readers = [other for other in self.readers if other is not reader]

    def reader_of(self, offsets: Array) -> tuple[str, int] | None:
        """A reader of any of these bytes, and the first such byte; None if there is none."""
        if not self.readers:
            return None
        hit = self.counts[offsets >> 4] > 0
        if not hit.any():
            return None
        at = int(offsets[hit].flat[0])
        return next(r.what for r in self.readers if (r.chunks == at >> 4).any()), at


def readers(cta: Any) -> Readers:
    """The readers of a CTA's shared memory."""
    return cta.slot("operands", lambda: Readers(np.zeros(-(-len(cta.shared) // 16), np.int16)))


def check_overwrite(group: Any, cta: Any, offsets: Array, what: str, lane: int | None = None) -> None:
    """Fault "wgmma-in-flight" or "tmem-in-flight" if a write issued now hits bytes that an operation still reads.

    Arguments: group, lane: who writes; cta: whose shared memory; offsets: int64 bytes in it; what: the writer.
    """
    found = readers(cta).reader_of(offsets)
    if found is None:
        return
    reader, at = found
    group.fault(
        "tmem-in-flight" if reader.startswith("tcgen05") else "wgmma-in-flight",
        f"{what} writes shared byte {at:#x}, which {reader} may still read",
        lane=lane,
        hint="Give a buffer back only after wgmma.wait_group, or the mbarrier of a tcgen05.commit, covers its readers.",
    )
