"""Saying what went wrong when nobody can go on: who waits for what, and what could have ended the wait."""

from __future__ import annotations

from typing import Any

from palladion.simulator.engine import Agent, Deadlock
from palladion.simulator.gpu.allocation import Together
from palladion.simulator.gpu.barriers import Waiting
from palladion.simulator.gpu.machine import Machine
from palladion.simulator.waits import line_of, location_of, sentence_of

SHOWN = 6  # agents that are listed


def report(machine: Machine, error: Deadlock) -> None:
    """Turn a deadlock into a finding.

    Raises:
      KernelFinding: always.
    """
    waiting = [a for a in error.agents if a.waits is not None] or list(error.agents)
    partial = _collective(machine)
    together: dict[str, list[str]] = {}  # those who wait for the same thing at the same line
    for agent in waiting[:SHOWN]:
        together.setdefault(_rest(agent), []).append(agent.name)
    lines = [
        f"{' and '.join(names)} {'wait' if len(names) > 1 else 'waits'}{rest}." for rest, names in together.items()
    ]
    lines += [f"And {len(waiting) - SHOWN} more."] if len(waiting) > SHOWN else []
    if len(waiting) == 1:
        headline = f"Deadlock: {sentence_of(waiting[0])}, and nobody is left who could end the wait."
    else:
        headline = f"Deadlock: {len(waiting)} threads wait, and none can go on. " + " ".join(lines)
    scopes = [a for a in waiting if isinstance(a.waits, Together)]
    if partial:
        headline = f"{partial[0]} {headline}"
    machine.found(
        "collective-mismatch" if partial or scopes else "deadlock",
        headline,
        where="; ".join(dict.fromkeys(filter(None, [*(p for p in partial[1:2]), *map(line_of, waiting)]))) or None,
        when="; ".join(a.place.when() for a in waiting[:SHOWN]),
        hint=partial[2] if partial else _hint(machine, waiting),
    )


def _collective(machine: Machine) -> list[Any]:
    """A collective operation that some blocks of a cluster did not come to: a sentence, its line, a hint."""
    seen = set()
    for agent in machine.engine.agents:
        cluster = agent.place.block.cluster
        if id(cluster) in seen:
            continue
        seen.add(id(cluster))
        for meeting in cluster.collectives.values():
            sentence = meeting.incomplete()
            if sentence is not None:
                return [
                    sentence,
                    location_of(meeting.eqn),
                    "every block along the collective axes must issue the same copies in the same order",
                ]
    return []


def _rest(agent: Agent) -> str:
    at = line_of(agent)
    return f"{f' at {at}' if at else ''} for {agent.waits() if agent.waits else 'something'}"


def _hint(machine: Machine, waiting: Any) -> str:
    last, barriers = [], False
    for agent in waiting[:SHOWN]:
        if isinstance(agent.waits, Together):
            return "all threads of the block must come to a collective pl.run_scoped: no condition on the thread"
        on_barrier = isinstance(agent.waits, Waiting)
        barriers |= on_barrier or not agent.wanted
        for counter in [agent.waits.barrier] if isinstance(agent.waits, Waiting) else agent.wanted:
            if counter.last_signal is None:
                last.append(f"nobody ever {'arrived on' if on_barrier else 'signalled'} {counter.label}")
            else:
                at = location_of(machine.engine.sites[counter.last_signal])
                last.append(f"the last {'arrival on' if on_barrier else 'signal of'} {counter.label} was at {at}")
    advice = "as many arrivals as num_arrivals says, for each wait" if barriers else "as many signals as waits take off"
    advice += "; check conditions on the thread, the block or the device, and the loop's bounds"
    return f"{'; '.join(dict.fromkeys(last))}: {advice}" if last else advice
