"""Barriers (mbarriers) of a simulated GPU, and the operations on them.

A barrier completes a phase after a fixed number of arrivals. A thread's k-th wait is for the k-th completion, and
whoever waits knows afterwards what all those knew who arrived in that phase; what is known of TMEM passes only through
a barrier that `orders_tensor_core`.

The hardware tells phases apart by one bit, so a completion that nobody has waited for when the next one comes is an
error, and so is a waiting thread that misses one. Both are checked in happens-before order, not in the order in which
this run happened to go: the arrivals of a phase must know of the waits for the one before.

Sources: the Mosaic GPU reference, "Barrier" and "ClusterBarrier"; PTX ISA, "mbarrier".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palladion.language.gpu.barriers import barrier_arrive_p, barrier_test_p, barrier_wait_p
from palladion.language.gpu.refs import BarrierDType
from palladion.language.interpret_params import LoggingMode
from palladion.simulator.clocks import Clock
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.chip import BARRIER_SECONDS
from palladion.simulator.gpu.machine import TENSOR, WARPS, Block, Machine, Thread
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.views import End, in_block, predicate
from palladion.simulator.memory import Region
from palladion.simulator.waits import location_of

HISTORY = 8  # events that a report shows


class Barrier:
    """One barrier. To the engine it is a counter that operations raise (`coming`, `add`).

    Attributes:
      label, array: how messages call it; the array that it is in. arrivals: that complete a phase.
      orders: whether it orders the tensor core. completed: phases. arrived: in this phase.
      waits: of each observer: how often it waited. coming: operations in flight that will arrive.
      ignored: why nobody may wait on it, or None (a block that is not the leader).
    """

    __slots__ = (
        "array", "arrivals", "arrived", "clock", "coming", "completed", "history", "ignored", "knowledge", "label",
        "last_signal", "latest", "orders", "phases", "waits",
    )  # fmt: skip

    def __init__(self, array: Barriers, label: str, arrivals: int, orders: bool) -> None:
        self.array, self.label, self.arrivals, self.orders = array, label, arrivals, orders
        self.completed = self.arrived = 0
        self.clock: Clock | None = None
        self.latest = 0.0
        self.phases: dict[int, tuple[Clock | None, float]] = {}
        self.waits: dict[Any, int] = {}
        self.knowledge: dict[
            Any, tuple[int, int, str]
        ] = {}  # of each observer: (component, epoch) of its last wait, who
        self.coming: dict[int, Any] = {}
        self.last_signal: Any = None
        self.history: list[str] = []
        self.ignored: str | None = None

    # --- arrivals -------------------------------------------------------------------------------------------------
    def add(self, amount: int, clock: Clock | None, time: float = 0.0, where: Any = None) -> None:
        """Arrive, so many times."""
        self.last_signal = where
        for _ in range(amount):
            self.latest = max(self.latest, time)
            if clock is not None:
                if self.clock is None:
                    self.clock = clock.copy()
                else:
                    self.clock.join(clock)
            self.arrived += 1
            if self.arrived == self.arrivals:
                self._complete(where)

    def _complete(self, where: Any) -> None:
        if self.completed:
            self._check_waited(where)
        self.completed += 1
        if self.clock is not None and not self.orders:
            self.clock.known[TENSOR] = 0
        self.phases[self.completed] = self.clock, self.latest
        self.phases.pop(self.completed - 4, None)
        self.clock, self.arrived = None, 0
        self._note(f"completion {self.completed} at {self._line(where)}")

    def _check_waited(self, where: Any) -> None:
        """The completion before this one must have been waited for, by everybody who waits on this barrier."""
        n = self.completed
        late = [o for o in self.waits if self.count(o) < n]
        if self.waits and late and len(late) < len(self.waits):
            names = ", ".join(self.knowledge[o][2] for o in late)
            self._found(
                "barrier-partial-waits",
                f"{names} misses a completion of {self.label}: it completes for the {_th(n + 1)} time, and "
                f"{'they have' if len(late) > 1 else 'that thread has'} not waited for the {_th(n)}.",
                where,
                "a thread that waits on a barrier must wait for every one of its completions; give each thread a "
                "barrier of its own, or let all wait each time",
            )
        unordered = [o for o in self.waits if o not in late and not self._knows_wait(o)]
        if late or not self.waits or unordered:
            who = ", ".join(self.knowledge[o][2] for o in unordered)
            first = f"{self.label} completes for the {_th(n + 1)} time, "
            first += (
                f"and nothing makes sure that {who} has waited for the {_th(n)} by then."
                if unordered and not late
                else f"and nobody has waited for the {_th(n)}."
            )
            several = "copies" if self.coming or "copy" in self._what(where) else "threads"
            arrivals = f"; several {several} that one wait is for need a Barrier(num_arrivals=…)"
            self._found(
                "barrier-double-completion",
                first,
                where,
                "wait for each completion before the barrier can complete again: let the waiting thread arrive on a "
                f"second barrier that the arriving one waits for{arrivals}",
            )

    def _knows_wait(self, observer: Any) -> bool:
        component, epoch, _ = self.knowledge[observer]
        if self.clock is None or not epoch:  # it comes to its first wait, or another one waited for it
            return True
        row = self.clock.known[0]
        return component < len(row) and bool(row[component] >= epoch)

    # --- waits ----------------------------------------------------------------------------------------------------
    def seen(self, thread: Thread) -> int:
        """How often this thread, or warp, has waited."""
        return self.count(thread.observer)

    def count(self, observer: Any) -> int:
        """How often an observer has waited: a thread's waits are those of its warps, and what all warps did it did."""
        own = self.waits.get(observer, 0)
        if len(observer) == 3:
            return own + self.waits.get(observer[:2], 0)
        return own + min(self.waits.get((*observer, k), 0) for k in range(WARPS))

    def waited(self, agent: Agent, nth: int) -> None:
        """An agent has waited for the n-th completion: what it learns, and that it did."""
        thread: Thread = agent.place
        clock, time = self.phases.get(nth, (None, 0.0))
        if clock is not None:
            agent.actor.clock.join(clock)
        agent.time = max(agent.time, time) + BARRIER_SECONDS
        self.waits[thread.observer] = self.waits.get(thread.observer, 0) + 1
        self.knowledge[thread.observer] = agent.actor.component, agent.actor.epoch, thread.name

    def check_warps(self, thread: Thread, eqn: Any) -> None:
        """Before all warps of a thread wait: they must have waited equally often."""
        counts = [self.waits.get((*thread.observer, k), 0) for k in range(WARPS)]
        if min(counts) < max(counts):
            self._found(
                "barrier-partial-waits",
                f"{thread.name} waits on {self.label}, on which only some of its warps have waited before: "
                f"{', '.join(map(str, counts))} times, in the order of warps.",
                None,
                "each warp must wait for every completion of a barrier: all four in the warp_map, or the thread",
                at=location(eqn),
            )

    # --- the end --------------------------------------------------------------------------------------------------
    def check_end(self, where: str | None, *, warn: bool) -> None:
        """Every completion must have been waited for, by everybody who waits on this barrier."""
        late = {o: n for o in self.waits if (n := self.count(o)) < self.completed}
        if late:
            who = ", ".join(f"{self.knowledge[o][2]} waited for {n}" for o, n in late.items())
        elif self.completed and not self.waits:
            who = "nobody waited"
        else:
            return
        self._found(
            "barrier-unwaited-completion",
            f"{self.label} completed {_times(self.completed)}, and {who}.",
            self.last_signal,
            "as many waits as completions, by every thread that waits on it: wait for the last ones, too, before the "
            "barrier's memory is used for something else",
            at="; the last arrival at ".join(filter(None, [where, self._line(self.last_signal)])) or None,
            warn=warn,
        )

    def _found(self, kind: str, message: str, where: Any, hint: str, *, at: Any = None, warn: bool = False) -> None:
        machine = self.array.block.machine
        where = at or self._line(where)
        machine.found(
            kind, message, where=where, when="; ".join([self.array.block.name, *self.history[-HISTORY:]]), hint=hint,
            operand=self.array.label, warn=warn,
        )  # fmt: skip

    def _what(self, site: Any) -> str:
        sites = self.array.block.machine.engine.sites
        eqn = sites[site] if isinstance(site, int) and site < len(sites) else None
        return str(getattr(eqn, "primitive", ""))

    def _line(self, site: Any) -> str | None:
        sites = self.array.block.machine.engine.sites
        return location_of(sites[site]) if isinstance(site, int) and site < len(sites) else None

    def _note(self, event: str) -> None:
        self.history.append(event)
        if len(self.history) > HISTORY:
            del self.history[0]


class Barriers:
    """An array of barriers of one block. Attributes: barriers (an object array); label; key; block; dtype."""

    __slots__ = ("barriers", "block", "dtype", "key", "label")

    def __init__(self, shape: Sequence[int], dtype: BarrierDType, label: str, block: Block, key: Any) -> None:
        self.label, self.block, self.key, self.dtype = label, block, key, dtype
        arrivals = dtype.num_arrivals
        if dtype.collective_axes is not None:
            arrivals *= len(partners(block, dtype.collective_axes))
        self.barriers = np.empty(tuple(shape), object)
        for index in np.ndindex(*self.barriers.shape):
            name = f"{label}[{', '.join(map(str, index))}]" if index else label
            self.barriers[index] = Barrier(self, name, arrivals, dtype.orders_tensor_core)

    def one(self, region: Region) -> Barrier:
        """The barrier that a view selects."""
        found = region.get(self.barriers)
        return found.reshape(-1)[0] if isinstance(found, np.ndarray) else found

    def check_end(self, engine: Any, where: str | None, *, warn: bool) -> None:
        """At the end of the barriers' life."""
        engine.settle(list(self.barriers.flat))
        for barrier in self.barriers.flat:
            barrier.check_end(where, warn=warn)


def partners(block: Block, collective_axes: Sequence[Any]) -> list[Block]:
    """The blocks of a cluster that share all coordinates with this one but those along one of the axes."""
    found = []
    for other in block.cluster.blocks:
        for axes in collective_axes:
            names = axes if isinstance(axes, tuple) else (axes,)
            if all(other.axes[a] == block.axes[a] for a in block.machine.cluster_axes if a not in names):
                found.append(other)
                break
    return found


def arrive_everywhere(agent: Agent, barriers: Barriers, region: Region, eqn: Any, last: bool) -> list[Barrier]:
    """The barriers that an arrival on this one raises: of a cluster barrier, one in each block; waits until they exist.

    A block that has left the barrier's scope is left out, and reported; `last`: whether the kernel ends with it.
    """
    axes = barriers.dtype.collective_axes
    if axes is None:
        return [barriers.one(region)]
    blocks = partners(barriers.block, axes)
    if barriers.dtype.leader_tracked:
        blocks = blocks[:1]
    there = []
    for block in blocks:
        if barriers.key[:-1] not in block.left:
            there.append(in_block(agent, barriers, block, eqn).one(region))
            continue
        block.machine.found(
            "barrier-unwaited-completion",
            f"{agent.name} arrives on {barriers.label} of {block.name}, which has left the scope that it belongs to.",
            where=location(eqn),
            when=agent.place.when(),
            operand=barriers.label,
            hint="let each block wait for the last arrivals of the others before it leaves: its memory may serve for "
            "something else by then",
            warn=last,
        )
    return there


# --- rules --------------------------------------------------------------------------------------------------------
@RULES.rule(barrier_arrive_p)
def _arrive(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end, condition = End(eqn, given.barrier), predicate(given.predicate)
    setting = compiler.machine
    site = setting.site_of(eqn)

    def is_last(barriers: Barriers) -> bool:
        return barriers.key[:2] == ("scoped", id(setting.last))

    def arrive(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine: Machine = thread.machine
        if condition(operands):
            barriers, region = end.of(agent, operands), end.region(operands)
            clock = agent.actor.publish() if machine.tracking else None
            agent.time += BARRIER_SECONDS
            machine.log(thread, LoggingMode.BARRIER, f"arrives on {barriers.label}")
            for barrier in arrive_everywhere(agent, barriers, region, eqn, is_last(barriers)):
                barrier.add(1, clock, agent.time, site)
            machine.engine.pause(agent)
        return []

    return arrive


@RULES.rule(barrier_wait_p)
def _wait(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end = End(eqn, given.barrier)

    def wait(agent: Agent, *operands: Any) -> list:
        wait_on(agent, end.of(agent, operands).one(end.region(operands)), eqn)
        return []

    return wait


def wait_on(agent: Agent, barrier: Barrier, eqn: Any) -> None:
    """Wait for the next completion."""
    thread: Thread = agent.place
    machine: Machine = thread.machine
    if barrier.ignored is not None:
        machine.found(
            "deadlock",
            f"{thread.name} waits on {barrier.label}, on which nothing can arrive: {barrier.ignored}",
            where=location(eqn),
            when=thread.when(),
            operand=barrier.array.label,
            hint="only the first block of the cluster may wait for a leader-tracked copy; the other one waits for the "
            "product that reads the data, or on a ClusterBarrier",
        )
    if thread.warps:
        barrier.check_warps(thread, eqn)
    nth, began = barrier.seen(thread) + 1, agent.time
    machine.log(thread, LoggingMode.BARRIER, f"waits on {barrier.label} for the {_th(nth)} time")
    barrier.waits.setdefault(thread.observer, 0)
    barrier.knowledge.setdefault(thread.observer, (agent.actor.component, 0, thread.name))
    if barrier.completed < nth or machine.engine.random is not None:
        machine.engine.wait(agent, lambda: barrier.completed >= nth, (barrier,), Waiting(barrier, nth, eqn))  # pyright: ignore[reportArgumentType]
    barrier.waited(agent, nth)
    machine.span(thread, None, f"wait on {barrier.label}", "wait", began, agent.time, location(eqn))


@RULES.rule(barrier_test_p)
def _test(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    end = End(eqn, given.barrier)

    def test(agent: Agent, *operands: Any) -> list:
        barrier = end.of(agent, operands).one(end.region(operands))
        nth = barrier.seen(agent.place) + 1  # a loop that tests until it is complete must let it complete
        agent.place.machine.engine.yield_to_others(agent, Waiting(barrier, nth, eqn))
        return [np.bool_(barrier.completed > barrier.seen(agent.place))]

    return test


class Waiting:
    """Says what an agent waits for; `eqn` is the line."""

    def __init__(self, barrier: Barrier, nth: int, eqn: Any) -> None:
        self.barrier, self.nth, self.eqn = barrier, nth, eqn

    def __call__(self) -> str:
        b = self.barrier
        state = f"{b.arrived} of {b.arrivals} arrivals" if b.arrivals > 1 else "no arrival"
        past = f"completed {_times(b.completed)} and has {state} since" if b.completed else f"has {state} so far"
        return f"the {_th(self.nth)} completion of {b.label}, which {past}"


def _th(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")
