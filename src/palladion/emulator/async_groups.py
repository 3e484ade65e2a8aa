"""Commit and wait groups: which asynchronous operations of a thread a `wait_group N` has to wait for.

`cp.async` and bulk copies share the scheme: a thread's operations since its last `commit_group` make one group,
and `wait_group N` waits until at most its N latest groups are unfinished. Counting is per thread; most threads
of a warp act alike, so an operation is recorded once with the threads that issued it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class _Record:
    threads: np.ndarray
    numbers: np.ndarray  # each thread's group when it issued the operation
    reads: Any
    event: Any


@dataclass
class AsyncGroups:
    """The groups of all `threads` threads of one CTA. Events have an attribute `done`."""

    threads: int
    committed: np.ndarray = field(init=False)
    records: list[_Record] = field(default_factory=list)

    def __post_init__(self):
        self.committed = np.zeros(self.threads, np.int64)

    def issued(self, threads: np.ndarray, event, reads=None) -> None:
        """Threads issued an operation that ends with `event`; its sources are read when `reads` is done."""
        self.records.append(_Record(threads, self.committed[threads], reads or event, event))

    def commit(self, threads: np.ndarray) -> None:
        """Close the open group of these threads."""
        self.committed[threads] += 1

    def unfinished(self, threads: np.ndarray, allowed: int | None, reads: bool = False) -> list:
        """The events that these threads must wait for.

        Arguments: allowed: how many of the latest groups may be unfinished (None: nothing may be, committed
            or not); reads: only the reading of the sources is waited for."""
        self.records = [r for r in self.records if not r.event.done]
        limit = np.full(self.threads, -1, np.int64)
        limit[threads] = self.committed[threads] + 1 if allowed is None else self.committed[threads] - allowed
        wanted = [r for r in self.records if (r.numbers < limit[r.threads]).any()]
        events = [r.reads if reads else r.event for r in wanted]
        return [e for e in events if not e.done]
