"""What a check found, as people read it: one table a call, its numbers, then its findings.

Rich draws it: colours only on a terminal, lines broken at the terminal's width (80 columns when there is none).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from palladion.errors import Finding
from palladion.language.gpu.mesh import Mesh
from palladion.report.analysis import CallReport
from palladion.report.calls import Call, short_type
from palladion.report.compiled import print_compiled
from palladion.report.footprint import Buffer, Footprint, compute_bound
from palladion.report.targets import TPUS, Limit
from palladion.report.text import bytes_text, listing, plural, si_text, tuple_text
from palladion.report.writing import indented, natural_width, wrapped

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_ROLES = {"prefetch": "scalars", "input": "in", "output": "out", "scratch": "scratch"}
_INDENT = 2


def print_report(console: Console, report: CallReport) -> None:
    """Print one call: heading, operands, numbers, findings."""
    console.print(Rule(Text(report.call.name, style="bold"), align="left", style="dim"))
    for line in _heading(report):
        wrapped(console, Text(line, style="dim"))
    console.print()
    _print_operands(console, report.footprint)
    console.print()
    indented(console, _numbers(report.footprint), _INDENT)
    console.print()
    if report.compiled:
        print_compiled(console, report.compiled)
    if report.findings:
        _findings(console, report.findings)
    else:
        indented(console, Text("no findings", style="green"), _INDENT)
    console.print()


def print_summary(
    console: Console, reports: Sequence[CallReport], program: str, symbolic: int = 0, failed: bool = False
) -> None:
    """The last lines: how many calls and findings (`symbolic` calls were left out), and whether the program failed."""
    if symbolic:
        console.print(f"{plural(symbolic, 'call')} with symbolic shapes (jax.export): nothing to look at.")
    if not reports:
        other = "other " if symbolic else ""
        said = f"failed before it had made any {other}kernel call" if failed else f"makes no {other}kernel call"
        wrapped(console, Text(f"{program} {said}.", style="bold red" if failed else ""))
        return
    counts = count_levels(reports)
    found = [Text(plural(n, level), style=_STYLES[level]) for level, n in counts.items() if n]
    line = Text(f"{plural(len(reports), 'kernel call')} in {program}: ")
    line.append_text(Text(", ").join(found) if found else Text("no findings", style="green"))
    if found and not counts["error"]:
        line.append(" (no errors)", style="green")
    for target, n in refusals(reports).items():
        what = "does not run on" if target.startswith("gpu:") and n == 1 else "do not run on"
        what = what if target.startswith("gpu:") else "not compiled for"
        line.append(f"; {n} {what} {target}", style=_STYLES["error"])
    wrapped(console, line)
    if failed:
        console.print("The program failed; the calls up to there are above.", style="bold red")


def refusals(reports: Sequence[CallReport]) -> dict[str, int]:
    """How many calls each target refuses; targets that take all are left out."""
    refused = [call.target for report in reports for call in report.compiled if not call.ok]
    return {target: refused.count(target) for target in dict.fromkeys(refused)}


def count_levels(reports: Sequence[CallReport]) -> dict[str, int]:
    """How many findings there are of each level, worst level first."""
    levels = [finding.level for report in reports for finding in report.findings]
    return {level: levels.count(level) for level in _STYLES}


# --- heading ----------------------------------------------------------------------------------------------------------
def _heading(report: CallReport) -> list[str]:
    call = report.call
    return [line for line in (call.kernel_at, f"{_grid(report)}, {_how_often(call)}") if line]


def _grid(report: CallReport) -> str:
    grid, mesh = report.grid, report.call.params.get("mesh")
    if isinstance(mesh, Mesh):
        return _blocks(mesh)
    if not grid:
        return "no grid: 1 program"
    known = [n for n in grid if n is not None]
    programs = 1
    for n in known:
        programs *= n
    return f"grid {tuple_text(grid)}" + (f" = {plural(programs, 'program')}" if len(known) == len(grid) else "")


def _blocks(mesh: Mesh) -> str:
    """The blocks and threads of a GPU kernel, which its axes count together."""
    axes = {"grid": (mesh.grid_names, mesh.grid), "clusters": (mesh.cluster_names, mesh.cluster)}
    named = [
        f"{what} ({', '.join(f'{name}={size}' for name, size in zip(*given))})"
        for what, given in axes.items()
        if given[1]
    ]
    blocks = plural(math.prod((*mesh.grid, *mesh.cluster)), "block")
    threads = f" of {plural(mesh.num_threads, 'thread')} ({mesh.thread_name})" if mesh.num_threads else ""
    return f"{', '.join(named) or 'no grid'}: {blocks}{threads}"


def _how_often(call: Call) -> str:
    ways = [("called", call.count - call.traced), ("traced", call.traced)]
    times = [f"{way} {'once' if n == 1 else f'{n:,} times'}" for way, n in ways if n]
    where = f" at {call.called_at.partition(' (')[0]}" if call.called_at else ""
    grids = [tuple_text((*batch, *call.grid_mapping.grid)) for batch in call.batches]
    return f"{listing(times)}{where}" + (f"; vmap makes the grid {listing(grids)}" if grids else "")


# --- operands ---------------------------------------------------------------------------------------------------------
def _print_operands(console: Console, footprint: Footprint) -> None:
    table = _operands(footprint)
    if natural_width(console, table) + _INDENT <= console.width:
        return indented(console, table, _INDENT)
    for row in footprint.buffers:  # names too long for columns: an operand takes two lines or more
        wrapped(console, Text(f"{_ROLES[row.role]}  ", style="dim").append(row.name, style="not dim"), _INDENT)
        block = "" if row.block is None else f"block {tuple_text(row.block)}"
        copies = _copies(row, footprint.sampled)
        facts = (short_type(row.array), block, row.memory_space, f"on chip {_held(row)}", copies and f"copies {copies}")
        wrapped(console, Text("  ".join(filter(None, facts))), _INDENT + 4)


def _operands(footprint: Footprint) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in ("", "operand", "array", "block", "memory"):
        table.add_column(title, no_wrap=True)
    table.add_column("on chip", justify="right", no_wrap=True)
    table.add_column("copies", justify="right", no_wrap=True)
    for row in footprint.buffers:
        table.add_row(
            Text(_ROLES[row.role], style="dim"),
            row.name,
            short_type(row.array),
            "" if row.block is None else tuple_text(row.block),
            row.memory_space,
            _held(row),
            _copies(row, footprint.sampled),
        )
    return table


def _held(row: Buffer) -> str:
    if not row.buffers:
        return "no"
    return bytes_text(row.block_bytes) if row.buffers == 1 else f"{row.buffers} x {bytes_text(row.block_bytes)}"


def _copies(row: Buffer, sampled: bool) -> str:
    if row.role == "scratch":
        return ""
    if not row.buffers:
        return "by kernel"
    about = "~" if sampled and (row.copies or 0) > 1 else ""
    return "?" if row.copies is None else f"{about}{row.copies:,}"


# --- numbers ----------------------------------------------------------------------------------------------------------
def _numbers(footprint: Footprint) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("intensity", _intensity(footprint))
    scalars = f" and {bytes_text(footprint.scalar_bytes)} of scalars" if footprint.scalar_bytes else ""
    tiles = ""
    if footprint.vmem_bytes > footprint.vector_bytes and any(x.machine == "TPU" for x in footprint.limits):
        tiles = f"; {bytes_text(footprint.vmem_bytes)} in a TPU's tiles of 8 x 128"
    grid.add_row("on chip", f"{bytes_text(footprint.vector_bytes)}{scalars}{tiles}")
    grid.add_row(_limit_titles(footprint.limits), _limits(footprint.limits))
    return grid


def _intensity(footprint: Footprint) -> str:
    if footprint.flops is None:
        why = "the grid is known only at run time" if footprint.programs is None else "the kernel is not traced"
        return f"unknown: {why}"
    work = si_text(footprint.flops, "flop")
    if footprint.moved_bytes is None or footprint.moves_more:
        why = "are made by the kernel itself" if footprint.moves_more else "are known only at run time"
        return f"unknown: {work}, but some copies {why}"
    moved = f"{bytes_text(footprint.moved_bytes)} moved"
    if footprint.intensity is None:
        return f"{work}, {moved}"
    verdict = ""
    if any(limit.machine == "TPU" for limit in footprint.limits):
        bound = compute_bound(footprint.intensity)
        if not bound:
            verdict = ": memory-bound on TPUs"
        elif len(bound) == len(TPUS):
            verdict = ": compute-bound on TPUs"
        else:
            verdict = f": compute-bound on TPU {listing(bound)}, memory-bound on the others"
    about = "about " if footprint.sampled else ""
    return f"{about}{footprint.intensity:.3g} flop/byte ({work}, {moved}){verdict}"


def _limit_titles(limits: Sequence[Limit]) -> str:
    machines = [limit.machine for limit in limits]
    return f"{' or '.join(dict.fromkeys(machines))}\nholds\nused"


def _limits(limits: Sequence[Limit]) -> Table:
    """One column for each memory: who has it, how large it is, how much of it the call takes."""
    table = Table.grid(padding=(0, 2, 0, 0))
    columns = []
    for limit in limits:
        table.add_column()
        columns.append((" ".join(limit.names), _capacity(limit), _share(limit)))
    for row in zip(*columns):
        table.add_row(*row)
    return table


def _capacity(limit: Limit) -> str:
    return f"{limit.capacity >> 10} KiB" if limit.capacity < 1 << 20 else f"{limit.capacity >> 20} MiB"


def _share(limit: Limit) -> Text:
    share = 100 * limit.used / limit.capacity
    used = "<1 %" if 0 < share < 1 else f"{share:,.0f} %"
    return Text(used, style="green") if limit.fits else Text(f"{used}!", style="bold yellow")


# --- findings ---------------------------------------------------------------------------------------------------------
def _findings(console: Console, findings: Sequence[Finding]) -> None:
    column = _INDENT + 2 + max(len(finding.level) for finding in findings)
    for finding in findings:
        head = Text(" " * _INDENT)
        head.append(finding.level.ljust(column - _INDENT), style=_STYLES[finding.level])
        head.append(finding.kind, style="bold")
        # A long place gets a line of its own, never broken: people copy it, and terminals follow it.
        at = "" if finding.where is None else f"at {finding.where}"
        own_line = head.cell_len + 1 + cell_len(at) > console.width
        head.append(f"\n{' ' * column}{at}" if own_line else f" {at}".rstrip())
        console.print(head, soft_wrap=True)
        wrapped(console, Text(finding.message), column)
        for name, fact in (("when", finding.when), ("fix", finding.hint)):
            if fact is not None and finding.level != "note":  # a note is short: JSON has the rest
                wrapped(console, Text(f"{name}: ", style="dim").append(fact, style="not dim"), column)
