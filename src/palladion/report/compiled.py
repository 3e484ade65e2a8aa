"""Compiled calls as people read them: one table with a column for each target, then what each target remarks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from palladion.compiler.reports import CompiledCall
from palladion.report.writing import indented, wrapped

_INDENT = 2


def print_compiled(console: Console, calls: Sequence[CompiledCall]) -> None:
    """Print one kernel call as several targets compiled it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    for _ in calls:
        table.add_column(no_wrap=True)
    table.add_row("target", *(call.target for call in calls))
    labels = dict.fromkeys(fact.label for call in calls for fact in call.facts)
    if not all(call.ok for call in calls):
        table.add_row("accepted", *(Text("yes") if c.ok else Text("no", style="bold red") for c in calls))
    for label in labels:
        table.add_row(label, *(_cell(call, label) for call in calls))
    indented(console, table, _INDENT)
    for call in calls:
        _remarks(console, call)
    console.print()


def _cell(call: CompiledCall, label: str) -> str:
    return next((fact.text for fact in call.facts if fact.label == label), "")


def _remarks(console: Console, call: CompiledCall) -> None:
    if call.refusal is not None:
        console.print()
        first, *rest = call.refusal.message.splitlines() or [call.refusal.type]
        wrapped(console, Text(f"{call.target}  {call.refusal.type}: {first}"), _INDENT)
        for line in rest:
            wrapped(console, Text(line.strip()), _INDENT + len(call.target) + 2)
        return
    why = call.fact("not_run")
    if why is not None or call.remarks:
        console.print()
    if why is not None:
        wrapped(console, Text(f"{call.target}  not run: {why}"), _INDENT)
    head = call.target
    for remark in call.remarks:
        line = Text(f"{head:{len(call.target)}}  ", style="dim").append(remark.what, style="not dim")
        line.append(f" {remark.verdict}", style="green" if remark.good else "yellow")
        line.append(f": {remark.why}" if remark.why else "", style="not dim")
        if remark.where:
            line.append(f" ({remark.place})", style="not dim")
        wrapped(console, line, _INDENT, hanging=len(call.target) + 4)
        head = ""
