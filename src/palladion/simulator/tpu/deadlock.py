"""Saying what went wrong when nobody can go on: who waits for what, and who could have ended the wait."""

from __future__ import annotations

from typing import Any

from palladion.simulator.engine import Agent, Deadlock
from palladion.simulator.tpu.machine import BARRIER, Machine
from palladion.simulator.waits import line_of, location_of, sentence_of


def report(machine: Machine, error: Deadlock) -> None:
    """Turn a deadlock into a finding.

    Raises:
      KernelFinding: always.
    """
    waiting = error.agents
    done = machine.engine.ended
    lines = [_one(a) for a in waiting]
    if len(waiting) == 1:
        headline = f"Deadlock: {sentence_of(waiting[0])}, and nobody is left who could end the wait."
    else:
        headline = f"Deadlock: {len(waiting)} cores wait, and none can go on. " + " ".join(lines)
    ended = f" {', '.join(done)} already ended." if done else ""
    barrier = all(_on_barrier(a) for a in waiting)
    machine.found(
        "collective-mismatch" if barrier and done else "deadlock",
        headline + ended,
        where="; ".join(dict.fromkeys(filter(None, (line_of(a) for a in waiting)))) or None,
        when="; ".join(a.place.when() for a in waiting),
        hint=_hint(machine, waiting),
    )


def _one(agent: Agent) -> str:
    at = line_of(agent)
    return f"{sentence_of(agent)}{f' at {at}' if at else ''}."


def _on_barrier(agent: Agent) -> bool:
    return bool(agent.wanted) and all(c.label == BARRIER for c in agent.wanted)


def _hint(machine: Machine, waiting: Any) -> str:
    last = []
    for agent in waiting:
        for counter in agent.wanted:
            if counter.last_signal is None:
                last.append(f"nobody ever signalled {counter.label}")
            else:
                at = location_of(machine.engine.sites[counter.last_signal])
                last.append(f"{counter.label} was last signalled at {at}")
    advice = "signal it as often as it is waited for; on a mesh, check the device id and that every device gets there"
    return f"{'; '.join(dict.fromkeys(last))}: {advice}" if last else advice
