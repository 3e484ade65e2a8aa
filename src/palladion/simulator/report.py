"""What a simulated run leaves behind, besides its results: findings, simulated time, memory, timeline."""

from __future__ import annotations

import dataclasses
import threading

from palladion.errors import Finding, count_of
from palladion.simulator.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class SimulationReport:
    """One kernel call on a simulated machine.

    Attributes:
      kernel: its name. machine: "simulated TPU".
      findings: what was found; those that were raised are in it too.
      schedules: how many schedules the call was run under.
      seconds: simulated time, where it was kept (`trace`), else None.
      vmem_bytes: the most VMEM that a core held, in whole tiles, where it was counted, else None.
      smem_bytes, tmem_columns: the most SMEM and TMEM that a block of a GPU held, else None.
      timeline: where it was kept, else None.
    """

    kernel: str
    machine: str
    findings: tuple[Finding, ...]
    schedules: int
    seconds: float | None = None
    vmem_bytes: int | None = None
    timeline: Timeline | None = None
    smem_bytes: int | None = None
    tmem_columns: int | None = None

    def __str__(self) -> str:
        lines = [f"{self.kernel} on the {self.machine}: {count_of(len(self.findings), 'finding')}"]
        for f in self.findings:
            lines += [f"  {f.kind}: {f.message}", *([f"    at: {f.where}"] if f.where else [])]
        if self.seconds is not None:
            lines.append(f"  simulated time: {self.seconds * 1e6:.2f} us")
        if self.vmem_bytes is not None:
            lines.append(f"  VMEM: {self.vmem_bytes / 1024:.1f} KiB")
        if self.smem_bytes is not None:
            lines.append(f"  SMEM: {self.smem_bytes / 1024:.1f} KiB a block")
        if self.tmem_columns is not None:
            lines.append(f"  TMEM: {self.tmem_columns} columns a block")
        return "\n".join(lines)


_last: SimulationReport | None = None
_lock = threading.Lock()


def keep(report: SimulationReport) -> None:
    """Make this the last report of the process."""
    global _last
    with _lock:
        _last = report


def last() -> SimulationReport | None:
    """The report of the last simulated call of this process, on any thread; None before the first."""
    return _last
