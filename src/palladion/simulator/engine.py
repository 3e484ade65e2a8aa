"""The engine under the simulated machines: agents, a deterministic scheduler, operations in flight, deadlocks.

A software agent (a TPU core, a Pallas thread of a GPU) is a greenlet that runs until it must wait. An operation (a
DMA, a TMA copy, a matrix product in flight) is started by an agent and completes later, when the schedule says so: its
effects on memory happen at its completion, and whoever waits for it learns of them. A schedule is

    "eager"     an operation completes at once
    "lazy"      it completes when somebody waits for what it signals, or when nobody can go on otherwise
    an int      a seed: agents and completions in an order drawn at random, the same for the same seed

One agent runs at a time, and switches happen only in `wait` and `pause`, so that a run repeats exactly.

A `Counter` is what semaphores and barriers are made of: tokens that carry the clock of whoever put them there. Taking
tokens teaches what is certain of these clocks; that is how happens-before follows synchronisation and nothing else.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import numpy as np

from palladion.simulator.clocks import Actor, Clock, Registry, component_of, epoch_of, site_of

MANY = 32  # tokens that a counter keeps apart
MOST_FLYING = 512  # operations that are under way at once; the oldest completes when there are more
PATIENCE = 20_000  # looks at counters, while nothing else happens, after which nothing ever will


class Counter:
    """A count with the clocks of those who raised it.

    Whoever lowers it learns what is certain: if two copies raise one semaphore and half of that is waited for, either
    may be the one that is done. For each component that is the least it can have learned, whichever tokens it took.

    Attributes:
      label: how messages call it. value: the count. last_signal: where it was last raised.
      tokens: (amount, clock, time) of increments, oldest first, until all of them are taken.
      taken: how much of these tokens is taken.
      coming: the operations in flight that will raise it: (amount, actor).
    """

    __slots__ = ("coming", "label", "last_signal", "taken", "tokens", "value")

    def __init__(self, label: str) -> None:
        self.label, self.value, self.taken, self.last_signal = label, 0, 0, None
        self.tokens: list[tuple[int, Clock | None, float]] = []
        self.coming: dict[int, tuple[int, Actor]] = {}

    def add(self, amount: int, clock: Clock | None, time: float = 0.0, where: Any = None) -> None:
        """Raise the count."""
        self.value += amount
        self.last_signal = where
        self.tokens.append((amount, clock, time))

    def take(self, amount: int, actor: Actor | None) -> float:
        """Lower the count and learn what those knew who raised it; the time of the latest of them."""
        latest = self.look(amount, actor)
        self.value -= amount
        self.taken += amount
        if not self.value and not self.coming:
            self.tokens.clear()
            self.taken = 0
        elif actor is None or len(self.tokens) > MANY:
            self._forget(actor)
        return latest

    def look(self, amount: int, actor: Actor | None) -> float:
        """As `take`, but the count stays."""
        taken, latest = self.taken + amount, 0.0
        if amount > 0 and actor is not None:
            if (taken == self.taken + self.value and not self.coming) or len(self.tokens) + len(self.coming) > MANY:
                self._join_oldest(taken, actor)
            else:
                self._learn(taken, actor)
        for have, _, time in self.tokens:
            if taken <= 0:
                break
            latest = max(latest, time)
            taken -= have
        return latest

    def _join_oldest(self, taken: int, actor: Actor) -> None:
        for have, clock, _ in self.tokens:
            if taken <= 0:
                break
            if clock is not None:
                actor.clock.join(clock)
            taken -= have

    def _learn(self, taken: int, actor: Actor) -> None:
        """Learn what is known whichever of the tokens, those in flight among them, make up this amount."""
        known = [(amount, clock.known) for amount, clock, _ in self.tokens if clock is not None and amount > 0]
        known += [(amount, flying.known_at_completion()) for amount, flying in self.coming.values()]
        if not known:
            return
        clocks = np.zeros((len(known), len(actor.clock.known), max(k.shape[1] for _, k in known)), np.int64)
        for row, (_, k) in zip(clocks, known):
            row[:, : k.shape[1]] = k
        order = np.argsort(clocks, 0, kind="stable")
        amounts = np.cumsum(np.array([amount for amount, _ in known])[order], 0)
        enough = np.argmax(amounts >= taken, 0)[None]
        learned = object.__new__(Clock)
        learned.known = np.take_along_axis(np.take_along_axis(clocks, order, 0), enough, 0)[0]
        actor.clock.join(learned)

    def _forget(self, actor: Actor | None) -> None:
        """Give up the oldest tokens, as if they had been the ones taken."""
        while self.tokens and self.taken >= self.tokens[0][0]:
            amount, clock, _ = self.tokens.pop(0)
            self.taken -= amount
            if actor is not None and clock is not None:
                actor.clock.join(clock)


class Agent:
    """A software agent.

    Attributes:
      name: for messages. actor: its component and clock. time: its simulated time in seconds.
      place: what the machine knows it by (device, core, grid point …).
      waits: what it waits for now, a function giving a sentence, or None. looks: what it looked at last, likewise.
    """

    __slots__ = ("actor", "done", "greenlet", "looks", "name", "place", "ready", "time", "waits", "wanted")

    def __init__(self, name: str, actor: Actor, place: Any) -> None:
        self.name, self.actor, self.place = name, actor, place
        self.time = 0.0
        self.greenlet: Any = None
        self.ready: Callable[[], bool] | None = None
        self.waits: Callable[[], str] | None = None
        self.looks: Callable[[], str] | None = None
        self.wanted: Sequence[Counter] = ()
        self.done = False


@dataclasses.dataclass(slots=True)
class Operation:
    """Something in flight.

    Attributes:
      name: for messages. actor: its component and clock.
      signals: the counters that its completion raises.
      effect: what happens at its completion.
      site: the line that started it. ends: when it completes, in simulated time.
      done: whether it is complete. waited: whether somebody has waited for it by itself.
    """

    name: str
    actor: Actor | None
    signals: tuple[Counter, ...]
    effect: Callable[[], None]
    site: int
    ends: float = 0.0
    done: bool = False
    waited: bool = False


class Deadlock(Exception):
    """Nobody can go on. `agents`: those that wait."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        super().__init__("; ".join(f"{a.name} waits for {a.waits() if a.waits else '?'}" for a in agents))
        self.agents = tuple(agents)


class Engine:
    """Runs agents to their end.

    Arguments:
      schedule: "eager", "lazy" or a seed (see above).
      views: of memory, that the machine's clocks have.
      tracking: whether clocks are kept.
    """

    def __init__(self, schedule: str | int = "lazy", *, views: int = 1, tracking: bool = False) -> None:
        self.schedule, self.tracking = schedule, tracking
        self.random = random.Random(schedule) if isinstance(schedule, int) else None
        self.registry = Registry(views)
        self.agents: list[Agent] = []  # that have not ended
        self.ended: list[str] = []  # names of those that have
        self.flying: list[Operation] = []
        self.idle = 0  # looks at counters since something else happened
        self.sites: list[Any] = [None]  # what a site number stands for; site 0 is unknown
        self.names: dict[int, list[tuple[int, str]]] = {}  # of components: (from epoch, name)
        self.current: Agent | None = None
        self._nobody: Actor | None = None  # whom all agents share where no clocks are kept
        self._skip: Agent | None = None  # who has just let others go first

    # --- who and where ----------------------------------------------------------------------------------------------
    def agent(self, name: str, place: Any, run: Callable[[Agent], None], actor: Actor | None = None) -> Agent:
        """A new agent that will run `run(agent)`; `actor`: of an agent that has ended, whose work it goes on with."""
        if actor is None and not self.tracking:
            actor = self._nobody
        if actor is None:
            actor = self._nobody = self.registry.actor(name)
            self.names[actor.component] = [(0, name)]
        agent = Agent(name, actor, place)
        agent.greenlet = greenlet.greenlet(lambda: self._run(agent, run))
        self.agents.append(agent)
        return agent

    def who(self, stamp: int) -> str:
        """Whose access a stamp is."""
        name = "somebody"
        for first, owner in self.names.get(int(component_of(stamp)), ()):
            if first <= epoch_of(stamp):
                name = owner
        return name

    def place_of(self, stamp: int) -> Any:
        """What the site of a stamp stands for (modulo the size of the field, which wraps after 131,072 sites)."""
        site = int(site_of(stamp))
        return self.sites[site] if site < len(self.sites) else None

    # --- operations ---------------------------------------------------------------------------------------------------
    def start(
        self,
        agent: Agent,
        name: str,
        effect: Callable[[Actor | None], None],
        signals: Sequence[tuple[Counter, int]],
        *,
        site: int = 0,
        home: int = 0,
        duration: float = 0.0,
        views: int | None = None,
        spare: tuple[int, int] | None = None,
    ) -> Operation:
        """Start an operation: at its completion `effect(actor)` runs, then each counter is raised by its amount.

        Arguments:
          home: the view that its accesses go through. views: they go through the first so many; default: all.
          duration: in simulated seconds. spare: a component that it may have (`Registry.take_over`).
        """
        actor = None
        self.idle = 0
        if self.tracking:
            actor = self.registry.operation(name, agent.actor, home, spare)
            self.names.setdefault(actor.component, []).append((actor.epoch, name))
        ends = agent.time + duration

        def complete() -> None:
            effect(actor)
            clock = None
            if actor is not None:
                clock = actor.complete()
                self.registry.finish(actor, views)
            operation.done = True
            for counter, amount in signals:
                counter.coming.pop(id(operation), None)
                counter.add(amount, clock, ends, site)

        operation = Operation(name, actor, tuple(c for c, _ in signals), complete, site, ends)
        if self.schedule == "eager":
            complete()
        else:
            if len(self.flying) >= MOST_FLYING:
                self.complete(self.flying[0])
            self.flying.append(operation)
            if actor is not None:
                for counter, amount in signals:
                    counter.coming[id(operation)] = amount, actor
        return operation

    def complete(self, operation: Operation) -> None:
        """Let an operation complete now."""
        self.idle = 0
        self.flying.remove(operation)
        operation.effect()

    def _complete_for(self, counters: Sequence[Counter]) -> bool:
        """Complete one operation that raises one of these counters, the earliest; whether there was one."""
        for operation in self.flying:
            for counter in operation.signals:
                if counter in counters:
                    self.complete(operation)
                    return True
        return False

    # --- waiting ------------------------------------------------------------------------------------------------------
    def wait(
        self, agent: Agent, ready: Callable[[], bool], wanted: Sequence[Counter], waits: Callable[[], str]
    ) -> None:
        """Return when `ready()`; meanwhile others run and operations complete.

        Arguments:
          wanted: the counters that it depends on.
          waits: for messages, what is waited for.
        """
        self.idle = 0
        if self.random is not None:
            self.pause(agent)
        while not ready():
            if self.random is None and self._complete_for(wanted):
                continue
            agent.ready, agent.waits, agent.wanted = ready, waits, wanted
            agent.greenlet.parent.switch()
            agent.ready = agent.waits = None

    def pause(self, agent: Agent) -> None:
        """A point where another agent may go on, and operations may complete, if the schedule is drawn at random."""
        self.idle = 0
        if self.random is None:
            return
        while self.flying and self.random.random() < 0.5:
            self.complete(self.random.choice(self.flying))
        if len(self.agents) > 1:
            agent.greenlet.parent.switch()

    def yield_to_others(self, agent: Agent, looks: Callable[[], str] | None = None) -> None:
        """Let every other agent that can go on do so once, and let one operation complete if nobody can.

        Arguments:
          looks: for messages, what the agent looks at, again and again; None: it computes.

        Raises:
          Deadlock: agents have looked very often, and nothing else happened.
        """
        if looks is not None:
            self.idle += 1
            agent.looks = looks
        if self.idle > PATIENCE and not self.flying:
            for each in self.agents:
                each.waits = each.waits or each.looks
            raise Deadlock(self.agents)
        if not any(a is not agent and (a.ready is None or a.ready()) for a in self.agents):
            if self.flying:
                self.complete(self.flying[0])
            return
        self._skip = agent
        agent.greenlet.parent.switch()

    def settle(self, counters: Sequence[Counter]) -> None:
        """Complete all operations that raise one of these counters."""
        while self._complete_for(counters):
            pass

    # --- the scheduler ------------------------------------------------------------------------------------------------
    def _run(self, agent: Agent, run: Callable[[Agent], None]) -> None:
        with np.errstate(all="ignore"):
            run(agent)
        agent.done = True

    def run(self) -> None:
        """Run all agents to their end, and complete what is in flight.

        Raises:
          Deadlock: nobody can go on. Also what an agent raises; the other agents are then ended.
        """
        try:
            while True:
                agent = self._choose()
                if agent is not None:
                    self.current = agent
                    agent.greenlet.parent = greenlet.getcurrent()
                    agent.greenlet.switch()
                    if agent.done:
                        self.idle = 0
                        self.agents.remove(agent)
                        self.ended.append(agent.name)
                elif self.flying and self.agents:
                    self.complete(self.flying[0] if self.random is None else self.random.choice(self.flying))
                elif self.agents:
                    raise Deadlock(self.agents)
                else:
                    break
        finally:
            self._end()

    def _choose(self) -> Agent | None:
        """Who goes on: the one that ran last, or else the first that can; None: nobody can."""
        skip, self._skip = self._skip, None
        if self.random is not None:
            runnable = [a for a in self.agents if a is not skip and (a.ready is None or a.ready())]
            if runnable:
                return self.random.choice(runnable)
        else:
            last = self.current
            if last is not None and last is not skip and not last.done and (last.ready is None or last.ready()):
                return last
            for agent in self.agents:
                if agent is not skip and (agent.ready is None or agent.ready()):
                    return agent
        return skip if skip is not None and (skip.ready is None or skip.ready()) else None

    def _end(self) -> None:
        for agent in self.agents:
            if agent.greenlet and not agent.greenlet.dead:
                agent.greenlet.throw(greenlet.GreenletExit)
