"""Compiled calls as people read them: one table with a column for each target, then what each target remarks.

Where they do not fit side by side, each family of targets has a table; what several say in the same words is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from palladion.compiler.reports import CompiledCall
from palladion.report.writing import indented, natural_width, wrapped

_INDENT = 2


def print_compiled(console: Console, calls: Sequence[CompiledCall]) -> None:
    """Print one kernel call as several targets compiled it."""
    for n, some in enumerate(_side_by_side(console, calls)):
        if n:
            console.print()
        indented(console, _table(some), _INDENT)
    for some in _alike(calls, lambda c: c.refusal and (c.refusal.type, c.refusal.message)):
        if some[0].refusal is not None:
            _refusal(console, some)
    for some in _alike(calls, lambda c: (c.fact("not_run"), c.remarks)):
        if some[0].refusal is None:
            _remarks(console, some)
    console.print()


def _side_by_side(console: Console, calls: Sequence[CompiledCall]) -> list[list[CompiledCall]]:
    """The calls in groups whose tables are no wider than the console: all, or those that share rows together."""
    room = console.width - _INDENT
    if natural_width(console, _table(calls)) <= room:
        return [list(calls)]
    groups: list[list[CompiledCall]] = []
    for call in calls:
        family = call.target.partition(":")[0]
        for group in groups:
            alike = group[0].target.partition(":")[0] == family
            if alike and natural_width(console, _table([*group, call])) <= room:
                group.append(call)
                break
        else:
            groups.append([call])
    return groups


def _table(calls: Sequence[CompiledCall]) -> Table:
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
    return table


def _cell(call: CompiledCall, label: str) -> str:
    return next((fact.text for fact in call.facts if fact.label == label), "")


def _alike(calls: Sequence[CompiledCall], key: Callable[[CompiledCall], Hashable]) -> list[list[CompiledCall]]:
    """The calls in groups with equal keys; accepted and refused ones apart."""
    groups: dict[Hashable, list[CompiledCall]] = {}
    for call in calls:
        groups.setdefault((call.ok, key(call)), []).append(call)
    return list(groups.values())


def _names(calls: Sequence[CompiledCall]) -> str:
    return ", ".join(call.target for call in calls)


def _refusal(console: Console, calls: Sequence[CompiledCall]) -> None:
    refusal = calls[0].refusal
    assert refusal is not None
    console.print()
    first, *rest = refusal.message.splitlines() or [refusal.type]
    wrapped(console, Text(f"{_names(calls)}  {refusal.type}: {first}"), _INDENT, hanging=2)
    for line in rest:
        wrapped(console, Text(line.strip()), _INDENT + 4, hanging=2)


def _remarks(console: Console, calls: Sequence[CompiledCall]) -> None:
    call, names = calls[0], _names(calls)
    why = call.fact("not_run")
    if why is not None or call.remarks:
        console.print()
    if why is not None:
        wrapped(console, Text(f"{names}  not run: {why}"), _INDENT)
    head, width = names, len(names) if len(names) <= 20 else 4
    for remark in call.remarks:
        if len(head) > width:
            wrapped(console, Text(head, style="dim"), _INDENT)
            head = ""
        line = Text(f"{head:{width}}  ", style="dim").append(remark.what, style="not dim")
        line.append(f" {remark.verdict}", style="green" if remark.good else "yellow")
        line.append(f": {remark.why}" if remark.why else "", style="not dim")
        if remark.where:
            line.append(f" ({remark.place})", style="not dim")
        wrapped(console, line, _INDENT, hanging=width + 4)
        head = ""
