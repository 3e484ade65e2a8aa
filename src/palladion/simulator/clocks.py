"""Happens-before, as vector clocks with views.

Whoever accesses memory has a *component*: a core, a warpgroup, a copy in flight. Its accesses are stamped with
(component, epoch), and an epoch ends whenever something is published. A clock says, for each component, up to which
epoch its accesses are known to have happened. An access that is not known to the next one that touches the same
element, one of the two being a write, is a race.

A machine may have several *views* of memory. The NVIDIA memory model calls them proxies (PTX manual, "Memory
consistency model", Proxies): what a thread wrote through the generic proxy is not there for a copy through the
async proxy until a proxy fence. So a clock is a matrix, a row for each view. An access through view v is checked
against row v; a fence lets one row know what another knows; ordinary synchronisation joins clocks row by row. A TPU
has one view.

Components of short-lived operations are recycled: an operation may take the component of an earlier one that its
issuer knows to be complete, since whoever knows the later one then knows the earlier one as well.

Sources: Lamport 1978; Mattern 1989; FastTrack (Flanagan and Freund 2009), whose last-access epochs `memory.py` keeps.
"""

from __future__ import annotations

import collections

import numpy as np

TIME_BITS, SITE_BITS = 32, 17  # of a stamp; 14 bits are left for the component
MAX_COMPONENTS = 1 << (63 - TIME_BITS - SITE_BITS)
PLENTY = MAX_COMPONENTS // 2  # components, after which those of actors that have ended are used again
_TIME = (1 << TIME_BITS) - 1
_SITE = (1 << SITE_BITS) - 1


def stamp(component: int, epoch: int, site: int) -> int:
    """An access in one int64: who, when, and which line of the program (a number of the engine's table). Never 0."""
    return (component << (TIME_BITS + SITE_BITS)) | ((site & _SITE) << TIME_BITS) | epoch


def component_of(stamps):
    """The component of a stamp, or of an array of them."""
    return stamps >> (TIME_BITS + SITE_BITS)


def epoch_of(stamps):
    """The epoch of a stamp, or of an array of them."""
    return stamps & _TIME


def site_of(stamps):
    """The site of a stamp, or of an array of them."""
    return (stamps >> TIME_BITS) & _SITE


class Clock:
    """What is known of every component's accesses, in each view: an int64 matrix (views, components)."""

    __slots__ = ("known",)

    def __init__(self, views: int, components: int) -> None:
        self.known = np.zeros((views, components), np.int64)

    def copy(self) -> Clock:
        other = object.__new__(Clock)
        other.known = self.known.copy()
        return other

    def join(self, other: Clock) -> None:
        """Know also what `other` knows."""
        mine, theirs = self.known, other.known
        if mine.shape[1] < theirs.shape[1]:  # as much room and no more: two that join in turn would grow without end
            mine = np.zeros(theirs.shape, np.int64)
            mine[:, : self.known.shape[1]] = self.known
            self.known = mine
        part = mine[:, : theirs.shape[1]]
        np.maximum(part, theirs, out=part)

    def grow(self, components: int) -> None:
        """Make room for more components, of which nothing is known; some to spare, so that this happens rarely."""
        views, have = self.known.shape
        if components > have:
            wider = np.zeros((views, components + max(components // 4, 8)), np.int64)
            wider[:, :have] = self.known
            self.known = wider

    def knows(self, view: int, stamps) -> bool:
        """Whether all of these accesses (one stamp, or an array; 0 is none) are known in a view."""
        row = self.known[view]
        who = component_of(stamps)
        if isinstance(who, (int, np.integer)):
            return bool(epoch_of(stamps) <= row[who]) if who < len(row) else epoch_of(stamps) == 0
        if len(row) <= int(who.max(initial=0)):
            self.grow(int(who.max()) + 1)
            row = self.known[view]
        return bool((epoch_of(stamps) <= row[who]).all())

    def unknown(self, view: int, stamps: np.ndarray) -> np.ndarray:
        """Which of these accesses are not known: a boolean array."""
        who = component_of(stamps)
        if stamps.size:
            self.grow(int(who.max()) + 1)
        return epoch_of(stamps) > self.known[view][who]


class Actor:
    """A component with a clock: what accesses memory and synchronises.

    Attributes:
      name: for messages and the timeline.
      component: its number. epoch: of its accesses now. home: the view that its accesses go through.
      clock: what it knows, itself included.
    """

    __slots__ = ("clock", "component", "epoch", "home", "name")

    def __init__(self, name: str, component: int, clock: Clock, home: int = 0, after: int = 0) -> None:
        self.name, self.component, self.clock, self.home = name, component, clock, home
        clock.grow(component + 1)
        self.epoch = max(int(clock.known[:, component].max()), after) + 1
        clock.known[home, component] = self.epoch

    def publish(self) -> Clock:
        """A copy of the clock for others to join; accesses made after this are not in it."""
        snapshot = self.clock.copy()
        self._next_epoch()
        return snapshot

    def complete(self) -> Clock:
        """The clock of a finished operation: whoever waits for it sees its accesses in every view."""
        self.clock.known[:, self.component] = self.epoch
        return self.clock

    def known_at_completion(self) -> np.ndarray:
        """What `complete` will give, of an operation that is still in flight."""
        known = self.clock.known.copy()
        known[:, self.component] = self.epoch
        return known

    def fence(self, source: int, target: int) -> None:
        """Let view `target` know what view `source` knows (a proxy fence)."""
        known = self.clock.known
        np.maximum(known[target], known[source], out=known[target])
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.clock.known[self.home, self.component] = self.epoch


class Registry:
    """Hands out components, and takes those of finished operations and actors back."""

    def __init__(self, views: int = 1) -> None:
        self.views, self.count = views, 0
        self._finished: list[tuple[int, int, int]] = []  # (component, last epoch, views that saw it)
        self._retired: collections.deque[tuple[int, int]] = collections.deque()  # (component, last epoch)

    def actor(self, name: str, clock: Clock | None = None, home: int = 0) -> Actor:
        """A new lasting actor; `clock`: what it knows to begin with."""
        if self.count + 1 >= PLENTY and self._retired:
            component, epoch = self._retired.popleft()
            return Actor(name, component, clock or Clock(self.views, component + 1), home, after=epoch)
        self.count += 1
        if self.count >= MAX_COMPONENTS:
            raise RuntimeError(
                f"Races can be looked for among {MAX_COMPONENTS} threads and operations, and more are alive at once.\n"
                "  fix: run fewer blocks at once (num_sms=…), or look without detect_races"
            )
        return Actor(name, self.count, clock or Clock(self.views, self.count + 1), home)

    def operation(self, name: str, issuer: Actor, home: int = 0, spare: tuple[int, int] | None = None) -> Actor:
        """An actor for an operation that `issuer` starts now: it knows what the issuer knows.

        Arguments:
          spare: a component that was taken over, and its last epoch (`take_over`).
        """
        clock = issuer.publish()
        if spare is not None:
            return Actor(name, spare[0], clock, home, after=spare[1])
        for k, (component, epoch, views) in enumerate(self._finished[:16]):
            if component < clock.known.shape[1] and clock.known[:views, component].min() >= epoch:
                del self._finished[k]
                return Actor(name, component, clock, home, after=epoch)
        self._finished = self._finished[16:] + self._finished[:16]  # others next time
        if self.count + 1 >= PLENTY and self._finished:  # as for `retire`: races between the two are not noticed then
            component, epoch, _ = self._finished.pop(0)
            return Actor(name, component, clock, home, after=epoch)
        return self.actor(name, clock, home)

    def finish(self, operation: Actor, views: int | None = None) -> None:
        """An operation is complete: another may take its component.

        Arguments:
          views: its accesses went through the first so many views; default: all of them.
        """
        self._finished.append((operation.component, operation.epoch, self.views if views is None else views))

    def take_over(self, operation: Actor) -> tuple[int, int] | None:
        """The component of a finished operation, for a later one that nobody knows without knowing this one; None:
        another one has it already."""
        for k, (component, epoch, _) in enumerate(self._finished):
            if component == operation.component and epoch == operation.epoch:
                del self._finished[k]
                return component, epoch
        return None

    def retire(self, actor: Actor) -> None:
        """An actor has ended. When components run short another takes its component; it is then not noticed if their
        accesses race with each other."""
        self._retired.append((actor.component, actor.epoch))
