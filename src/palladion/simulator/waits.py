"""Waiting for counters, and saying what somebody waits for, on every simulated machine."""

from __future__ import annotations

from typing import Any

from palladion.simulator.code import location
from palladion.simulator.engine import Agent, Counter, Engine


class Elsewhere:
    """Says what an agent waits for, a text; `eqn` is the line."""

    def __init__(self, text: str, eqn: Any) -> None:
        self.text, self.eqn = text, eqn

    def __call__(self) -> str:
        return self.text


class Waiting:
    """Says for what value of a counter an agent waits; `unit` follows the number; `eqn` is the line."""

    def __init__(self, counter: Counter, amount: int, eqn: Any, unit: str = "") -> None:
        self.counter, self.amount, self.eqn, self.unit = counter, amount, eqn, unit

    def __call__(self) -> str:
        return f"{self.counter.label} to reach {self.amount}{self.unit} (it is {self.counter.value})"


def take(
    engine: Engine, agent: Agent, counter: Counter, amount: int, eqn: Any, *, decrement: bool, unit: str = ""
) -> float:
    """Wait until a counter has an amount, take that off it if it is to `decrement`, and learn what its signals knew.

    Returns:
      when the last of these signals came, in simulated time.
    """
    if counter.value < amount or engine.random is not None:
        engine.wait(agent, lambda: counter.value >= amount, (counter,), Waiting(counter, amount, eqn, unit))
    actor = agent.actor if engine.tracking else None
    return (counter.take if decrement else counter.look)(amount, actor)


def location_of(eqn: Any) -> str | None:
    """The user's line of an equation; a text stands for itself."""
    return eqn if eqn is None or isinstance(eqn, str) else location(eqn)


def line_of(agent: Agent) -> str | None:
    """The user's line at which an agent waits."""
    return location_of(getattr(agent.waits, "eqn", None))


def sentence_of(agent: Agent) -> str:
    """Who waits for what."""
    return f"{agent.name} waits for {agent.waits() if agent.waits else 'something'}"
