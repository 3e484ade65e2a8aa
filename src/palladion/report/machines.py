"""What came of calls on simulated GPUs, in a check's own terms: columns of the table of targets, and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from palladion.compiler.reports import CompiledCall, Fact
from palladion.errors import Finding, KernelFinding, count_of
from palladion.report.analysis import WORST_FIRST
from palladion.report.calls import Call
from palladion.report.simulated import ANY_GPU, Journal, Outcome, identity, why_not
from palladion.report.text import bytes_text, listing
from palladion.simulator import report as simulation


def column(call: Call, target: str, outcome: Outcome | None) -> CompiledCall:
    """A call's column in the table of targets.

    Arguments:
      call: the call. target: the GPU. outcome: what came of it there, None if it did not run.
    """
    if outcome is None:
        why = why_not(call) or ("jit traced it, and it never ran" if call.traced else "it never ran")
        facts: tuple[Fact, ...] = (Fact("not_run", "findings", why, "not run"),)
    else:
        facts = tuple(_facts(outcome)) if outcome.refusal is None else ()
    refusal = None if outcome is None else outcome.refusal
    return CompiledCall(target, call.name, call.kernel_at, call.called_at, facts=facts, refusal=refusal)


def _facts(outcome: Outcome) -> list[Fact]:
    levels = [f.level for f in outcome.findings]
    counts = [count_of(levels.count(level), level) for level in WORST_FIRST if level in levels]
    facts = [Fact("findings", "findings", len(levels), listing(counts) or "none")]
    if outcome.runs:  # not for what was found before it ran
        facts.append(Fact("schedules", "schedules", outcome.schedules, f"{outcome.schedules:,}"))
    if outcome.seconds is not None:
        facts.append(Fact("simulated_seconds", "simulated", outcome.seconds, f"{outcome.seconds * 1e6:.2f} us"))
    if outcome.smem_bytes is not None:
        facts.append(Fact("smem_bytes", "SMEM", outcome.smem_bytes, f"{bytes_text(outcome.smem_bytes)} a block"))
    if outcome.tmem_columns is not None:
        facts.append(Fact("tmem_columns", "TMEM", outcome.tmem_columns, f"{outcome.tmem_columns} columns a block"))
    return facts


def merged(findings: Sequence[Finding], ran: Mapping[str, Outcome]) -> tuple[Finding, ...]:
    """The findings of a check together with those of the machines, worst first; each once.

    With several machines, what only some of them found says which.
    """
    by: dict[tuple, tuple[Finding, list[str]]] = {}
    for target, outcome in ran.items():
        for finding in outcome.findings:
            by.setdefault(identity(finding), (finding, []))[1].append(target)
    asked = [target for target in ran if target != ANY_GPU]
    found = [
        dataclasses.replace(f, when=f"{f.when or 'the call'}, on {listing(on)}") if len(on) < len(asked) else f
        for f, on in by.values()
    ]
    return tuple(sorted((*found, *findings), key=lambda f: WORST_FIRST[f.level]))


def found_in(failure: BaseException | None, journal: Journal) -> Finding | None:
    """The finding that ended a program, or None if something else did.

    Under jit a simulator's exception comes out as JAX's, with the finding's text in it.
    """
    if failure is None:
        return None
    if isinstance(failure, KernelFinding):
        return failure.finding
    last = simulation.last()
    candidates = [*journal.errors(), *(f for f in (last.findings if last else ()) if f.level == "error")]
    text = str(failure)
    return next((f for f in candidates if "KernelFinding" in text and f.message in text), None)
