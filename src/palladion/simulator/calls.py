"""What the calls of all simulated machines have in common: the two ways in, and the schedules of a run."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from palladion.errors import Finding, KernelFinding, PalladionWarning
from palladion.language import concrete
from palladion.simulator import report
from palladion.simulator.meeting import Meeting, mesh_axes

Schedule = str | int
Simulate = Callable[[Mapping[str, int], Sequence[Sequence[np.ndarray]]], list[list[Any]]]


class Run(Protocol):
    """One run of a call on all devices, under one schedule."""

    def go(self) -> list[list[Any]]:
        """Run; the outputs of each device."""
        ...

    def report(self, schedules: int) -> report.SimulationReport:
        """What the run leaves behind."""
        ...


# --- the two ways in ----------------------------------------------------------------------------------------------
def in_python(simulate: Simulate, args: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """Run a call on concrete arrays.

    Arguments:
      simulate: from the named axes of the mesh of devices and each device's operands to each device's outputs.
    """
    (results,) = simulate({}, [[concrete.held(a) for a in args]])
    return [concrete.returned(x, a) for x, a in zip(results, out_avals)]


def lower(ctx: Any, simulate: Simulate, args: Sequence[Any]) -> Any:
    """Lower a call: one host callback, in which the devices of a `shard_map` meet; `simulate` as in `in_python`."""
    axes = mesh_axes(ctx)
    meeting = Meeting(lambda operands: simulate(axes, operands), math.prod(axes.values()))
    return meeting.lower(ctx, axes, args)


def frozen(x: np.ndarray) -> np.ndarray:
    """A view of an operand that cannot be written."""
    view = x.view()
    view.flags.writeable = False
    return view


# --- schedules ----------------------------------------------------------------------------------------------------
def under_schedules(first: Schedule, explore: int, make: Callable[[Schedule], Run]) -> list[list[Any]]:
    """Run under a schedule, and under `explore` further ones with successive seeds; the outputs of the last run.

    Raises:
      KernelFinding: the first finding, which says under which schedule it comes again.
    """
    schedules: list[Schedule] = [first]
    if explore:
        seed = first if isinstance(first, int) else 0
        schedules += range(seed + 1, seed + 1 + explore)
    results: list[list[Any]] = []
    for k, schedule in enumerate(schedules, 1):
        run = make(schedule)
        try:
            results = run.go()
        except KernelFinding as error:
            if len(schedules) == 1:
                raise
            found = error.finding  # in the message itself, which is all that comes out of jit
            when = f"{found.when or 'the whole call'}, under schedule={schedule!r}, which repeats it"
            raise KernelFinding(dataclasses.replace(found, when=when)) from None
        except Exception as error:
            if len(schedules) > 1:
                error.add_note(f"  raised under schedule={schedule!r}, which repeats it")
            raise
        finally:
            report.keep(run.report(k))
    return results


# --- findings -----------------------------------------------------------------------------------------------------
def warn_of(finding: Finding) -> None:
    """Warn of a finding at the user's line: an agent's stack does not reach to their call."""
    text = str(KernelFinding(finding))
    place = re.match(r"(.+?):(\d+) \(", finding.where or "")
    if place is None:
        warnings.warn(text, PalladionWarning, stacklevel=3)
    else:
        warnings.warn_explicit(text, PalladionWarning, place[1], int(place[2]))
