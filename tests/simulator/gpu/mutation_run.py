"""Mutate kernels, run the mutants, and count: python tests/simulator/gpu/mutation_run.py [GROUP or PROGRAM …].

A mutant is *reported* if the simulator finds what it does not find without the mutation; *reported on another schedule*
if it does so on one of a few; *harmless* if it gives the same results, bit by bit, on all of these, and a rule of
mutation_reasons.py says why; *different* if it gives other results in silence; and a *hole* if no rule covers it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from palladion import dropin

    dropin.install()

from simulator.gpu.mutation_calls import Call, Outcome, calls_of, same
from simulator.gpu.mutation_kernel import Kernel
from simulator.gpu.mutation_reasons import reason_of
from simulator.gpu.mutations import Mutant, mutants

SCHEDULES = ("eager", 0, 1, 2)
GROUPS = ("sample", "corpus", "fragments", "jax")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant. Attributes: program; mutant; how: as above; why: the reason, or the kind of finding."""

    program: str
    mutant: Mutant
    how: str
    why: str | None


def judge(call: Call, kernel: list[Kernel], base: Outcome, mutant: Mutant, limit: float = 3) -> Verdict:
    """Run a mutant, for at most `limit` seconds, or ten times that; `kernel` keeps what the rules want to know."""

    def new(outcome: Outcome) -> bool:
        return outcome.error or bool(set(outcome.found) - set(base.found)) or len(outcome.found) > len(base.found)

    def run(**how: Any) -> Outcome:
        outcome = call.mutated(mutant, seconds=limit, **how)
        return call.mutated(mutant, seconds=10 * limit, **how) if "no end" in outcome.kinds else outcome

    outcome = run()
    if new(outcome):
        return Verdict(call.program, mutant, "reported", outcome.kinds[-1])
    for schedule in SCHEDULES:
        other = run(schedule=schedule)
        if new(other):
            return Verdict(call.program, mutant, "reported on another schedule", other.kinds[-1])
        if not same(base, other):
            return Verdict(call.program, mutant, "different", None)
    if not same(base, outcome):
        return Verdict(call.program, mutant, "different", None)
    if not kernel:
        kernel.append(Kernel(call))
    why = reason_of(kernel[0], mutant)
    return Verdict(call.program, mutant, "hole" if why is None else "harmless", why)


def verdicts(calls: list[Call]) -> Iterator[Verdict]:
    """Of all mutants of these calls."""
    for call in calls:
        began = time.process_time()
        base, kernel = call.run(), []
        limit = max(1.0, 8 * (time.process_time() - began))
        assert not base.error, base.message
        for mutant in mutants(call.jaxpr):
            yield judge(call, kernel, base, mutant, limit)


def table(found: list[Verdict]) -> str:
    """The numbers, as Markdown."""
    kinds = collections.Counter((v.mutant.what, v.mutant.how, v.how) for v in found)
    columns = ["reported", "reported on another schedule", "harmless", "different", "hole"]
    lines = ["| operation | mutation | mutants | reported | on another schedule | harmless | different | holes |",
             "|---|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for what, how in sorted({(v.mutant.what, v.mutant.how) for v in found}):
        counts = [kinds[what, how, c] for c in columns]
        lines.append(f"| {what} | {how} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    totals = [sum(v.how == c for v in found) for c in columns]
    lines.append(f"| all | | {len(found)} | " + " | ".join(map(str, totals)) + " |")
    reasons = collections.Counter(v.why for v in found if v.how == "harmless")
    lines += [
        "",
        "| reason | mutants |",
        "|---|--:|",
        *(f"| {why} | {n} |" for why, n in reasons.most_common()),
    ]
    kinds = collections.Counter(v.why for v in found if v.how.startswith("reported"))
    lines += [
        "",
        "| reported as | mutants |",
        "|---|--:|",
        *(f"| {kind} | {n} |" for kind, n in kinds.most_common()),
    ]
    return "\n".join(lines)


def main() -> Any:
    """The command."""
    from simulator.gpu.mutation_programs import programs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=f"programs or groups ({', '.join(GROUPS)}); default: all")
    parser.add_argument("--reasons", action="store_true", help="list every harmless mutant with its reason")
    given = parser.parse_args()
    found: list[Verdict] = []
    for p in programs(*GROUPS):
        if given.names and p.name not in given.names and p.group not in given.names:
            continue
        began = time.time()
        mine = list(verdicts(calls_of(p.name, p.run, p.arch, **p.options)))
        found += mine
        print(
            f"{p.group} {p.name}: {dict(collections.Counter(v.how for v in mine))}, {time.time() - began:.1f} s",
            flush=True,
        )
        for v in mine:
            if v.how in ("hole", "different") or (given.reasons and v.how == "harmless"):
                print(f"  {v.how} {v.why or ''}: {v.mutant}", flush=True)
    print(table(found))
    return any(v.how in ("hole", "different") for v in found)


if __name__ == "__main__":
    sys.exit(main())
