"""What happened when, in simulated time: spans on tracks, for a picture and for Perfetto.

A track is a core, or the copies of a device. Times are seconds of the simulated machine, computed from the published
rates of its chip; they show what overlaps and what waits, and are no prediction of a kernel's run time.

The export is the Trace Event Format that chrome://tracing and Perfetto open: complete events ("ph": "X") with times in
microseconds.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """One thing that took time.

    Attributes:
      process: the device. track: who did it ("core 0", "copies").
      name: what, e.g. "program (0, 1)". kind: "program", "copy", "wait" or "trace".
      start, end: seconds.
      where: the user's line, or None.
    """

    process: str
    track: str
    name: str
    kind: str
    start: float
    end: float
    where: str | None = None


class Timeline:
    """The spans of a run, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, process: str, track: str, name: str, kind: str, start: float, end: float, where: Any = None) -> None:
        """Note a span."""
        self.spans.append(Span(process, track, name, kind, start, end, where))

    @property
    def duration(self) -> float:
        """From the first start to the last end, in seconds."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def tracks(self) -> list[tuple[str, str]]:
        """The (process, track) pairs, sorted."""
        return sorted({(s.process, s.track) for s in self.spans})

    def chrome(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format."""
        processes = sorted({s.process for s in self.spans})
        threads = {pair: k for k, pair in enumerate(self.tracks(), 1)}
        events: list[dict[str, Any]] = []
        for k, process in enumerate(processes, 1):
            events.append({"ph": "M", "name": "process_name", "pid": k, "args": {"name": process}})
        for (process, track), tid in threads.items():
            pid = processes.index(process) + 1
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        for s in self.spans:
            event = {
                "ph": "X", "name": s.name, "cat": s.kind, "pid": processes.index(s.process) + 1,
                "tid": threads[s.process, s.track], "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6,
            }  # fmt: skip
            events.append(event if s.where is None else {**event, "args": {"where": s.where}})
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str | pathlib.Path) -> None:
        """Write the timeline as JSON, to be opened in Perfetto."""
        pathlib.Path(path).write_text(json.dumps(self.chrome()))
