"""Hardware units of an SM in simulated time: the tensor core and the TMA engine do one thing after the other.

The simulation runs a thread until it must wait, so requests of several threads do not come in the order of their
times. Each gets the first gap that is long enough, from its own time on.
"""

from __future__ import annotations

import bisect


class Unit:
    """A unit. Attributes: idle_from: the end of the last thing that it has been asked to do."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # busy from, to; in order, apart from each other

    @property
    def idle_from(self) -> float:
        return self._spans[-1][1] if self._spans else 0.0

    def gap(self, now: float, seconds: float) -> float:
        """When something that takes so long can begin, not before `now`."""
        first = max(bisect.bisect_right(self._spans, (now, float("inf"))) - 1, 0)
        for begin, end in self._spans[first:]:
            if now + seconds <= begin:
                break
            now = max(now, end)
        return now

    def take(self, begin: float, seconds: float) -> None:
        """Be busy from `begin` on, as `gap` has found."""
        if seconds <= 0:
            return
        end = begin + seconds
        at = bisect.bisect_left(self._spans, (begin, end))
        if at and self._spans[at - 1][1] >= begin:  # they touch
            at -= 1
            begin = self._spans.pop(at)[0]
        if at < len(self._spans) and self._spans[at][0] <= end:
            end = self._spans.pop(at)[1]
        self._spans.insert(at, (begin, end))
