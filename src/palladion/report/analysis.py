"""One call, looked at: everything that its findings and its table are made from.

`Analysis` holds what the checks share: the target, the grid as it was at the call, the visited blocks of each
operand. A call made with different run-time values (a dynamic grid, scalar prefetch) gets one `Analysis` for each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from palladion.compiler.reports import CompiledCall
from palladion.errors import Finding
from palladion.language.grid import BlockMapping
from palladion.language.index_maps import OutOfRange, out_of_range, reads_prefetch
from palladion.report.calls import Call, Values
from palladion.report.footprint import Footprint, footprint
from palladion.report.targets import Target, on_chip, target_of
from palladion.report.visits import Grid, Visits

Tick = Callable[[], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """What is known about a call for one set of run-time values.

    Attributes:
      call: the call.
      target: the machine that it is written for.
      values: the run-time values.
      grid: the grid points that are looked at, or None when the grid is known only at run time.
      visits: for each input and output, the blocks that are visited; None when that is known only at run time.
      out_of_range: the operands whose index maps leave their range.
    """

    call: Call
    target: Target
    values: Values
    grid: Grid | None
    visits: tuple[Visits | None, ...]
    out_of_range: tuple[OutOfRange, ...]

    @functools.cached_property
    def footprint(self) -> Footprint:
        """The numbers of the call's table for these values."""
        return footprint(self.call, self.target, self.grid, self.visits)

    @property
    def outputs(self) -> list[tuple[int, BlockMapping, Visits | None]]:
        """(number, mapping, visits) of the outputs that a pipeline writes back block by block."""
        mapping = self.call.grid_mapping
        numbered = enumerate(zip(mapping.outputs, self.visits[mapping.num_inputs :]))
        return [(i, m, v) for i, (m, v) in numbered if on_chip(m.memory_space, self.target) is not None]


@dataclasses.dataclass(frozen=True)
class CallReport:
    """What a check says about one call.

    Attributes:
      call: the call.
      target: the machine that it is written for.
      footprint: the numbers of its table, for the first of its run-time values.
      grid: the grid of those values, None for an axis that is known only at run time.
      findings: worst first.
      compiled: the call as each target that was asked for compiled it.
    """

    call: Call
    target: Target
    footprint: Footprint
    grid: tuple[int | None, ...]
    findings: tuple[Finding, ...]
    compiled: tuple[CompiledCall, ...] = ()


WORST_FIRST = {"error": 0, "warning": 1, "note": 2}


def steps_of(call: Call) -> int:
    """How often `analyse` calls its `tick`."""
    return len(call.values) * (len(call.grid_mapping.block_mappings) + 1)


def analyse(call: Call, checks: Sequence[Callable], tick: Tick = lambda: None) -> CallReport:
    """Look at a call.

    Arguments:
      call: a recorded call.
      checks: functions from an `Analysis` to its findings.
      tick: called after each step of the work (there are `steps_of(call)`).

    Returns:
      the report; findings that several run-time values have in common are there once.
    """
    target = target_of(call)
    found: dict[tuple, Finding] = {}
    first: Analysis | None = None
    for values in sorted(call.values.values(), key=lambda v: (None in v.grid, v.prefetch is None)):  # known ones first
        analysis = _look_at(call, target, values, tick)
        first = first or analysis
        for check in checks:
            for finding in check(analysis):
                same = finding.message if finding.kind == "not-checked" else finding.where
                found.setdefault((finding.kind, finding.level, finding.operand, same), finding)
        tick()
    assert first is not None  # a call is recorded with its values
    return CallReport(
        call=call,
        target=target,
        footprint=first.footprint,
        grid=first.values.grid,
        findings=tuple(sorted(found.values(), key=lambda f: WORST_FIRST[f.level])),
    )


def _look_at(call: Call, target: Target, values: Values, tick: Tick) -> Analysis:
    mapping = call.grid_mapping
    if any(n is None for n in values.grid):
        for _ in mapping.block_mappings:
            tick()
        return Analysis(call, target, values, None, (None,) * len(mapping.block_mappings), ())
    sizes = tuple(n or 0 for n in values.grid)
    grid = Grid.of(sizes)
    visits = []
    for m in mapping.block_mappings:
        known = values.prefetch is not None or not reads_prefetch(m)
        visits.append(Visits.of(m, grid, values.prefetch or ()) if known else None)
        tick()
    static = dataclasses.replace(mapping, grid=sizes)
    outside = out_of_range(static, values.prefetch)
    return Analysis(call, target, values, grid, tuple(visits), tuple(outside))
