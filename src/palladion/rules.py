"""RuleTable: primitive -> rule, per target; the one way to say "not supported here".

Each executor walks a kernel's jaxpr through a table of its own. A rule is a small function for one primitive.
The tables know of each other only by name: a primitive without a rule is reported with the targets that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import lax

from palladion import executors, locations
from palladion.errors import UnsupportedPrimitive

_TABLES: list[RuleTable] = []
_MACHINES: dict[Any, tuple[str, ...]] = {}  # primitive -> the machines that give it a meaning


def only_on(targets: str | Sequence[str], *primitives: Any) -> None:
    """Declare primitives that mean nothing to JAX, only to machines (whose tables are perhaps not imported yet).

    Arguments:
      targets: one machine as `RuleTable.target` names it, or several.
    """
    named = (targets,) if isinstance(targets, str) else tuple(targets)
    for primitive in primitives:
        _MACHINES[primitive] = named


def needs_machine(primitive: Any) -> bool:
    """Whether a primitive was declared so."""
    return primitive in _MACHINES


def present(*names: str) -> list[Any]:
    """The primitives of `jax.lax` with these names that this release of JAX has."""
    return [getattr(lax, name) for name in names if hasattr(lax, name)]


class RuleTable:
    """The rules of one target.

    Arguments:
      target: the target as it is named in messages, e.g. "the reference interpreter".
      covers: for targets that also take primitives without a rule (because JAX runs them): a predicate on the
        primitive, used when other tables list who supports it.
    """

    def __init__(self, target: str, covers: Callable[[Any], bool] = lambda primitive: False) -> None:
        self.target = target
        self._covers = covers
        self._rules: dict[Any, Callable] = {}
        _TABLES.append(self)

    def rule(self, *primitives: Any) -> Callable[[Callable], Callable]:
        """Decorator: the function is the rule of these primitives."""

        def register(function: Callable) -> Callable:
            for primitive in primitives:
                self._rules[primitive] = function
            return function

        return register

    def get(self, primitive: Any) -> Callable | None:
        """The rule, or None."""
        return self._rules.get(primitive)

    def supports(self, primitive: Any) -> bool:
        """Whether the target runs this primitive."""
        return primitive in self._rules or self._covers(primitive)

    def unsupported(self, eqn: Any) -> UnsupportedPrimitive:
        """The exception for an equation that has no rule here."""
        others = self.others(eqn.primitive)
        return UnsupportedPrimitive(str(eqn.primitive), self.target, locations.location_of(eqn), others)

    def others(self, primitive: Any) -> list[str]:
        """The other targets that run a primitive."""
        executors.load_all()  # a table is there when its module is
        found = [t.target for t in _TABLES if t is not self and t.supports(primitive)]
        unnamed = [m for m in _MACHINES.get(primitive, ()) if m not in (self.target, *found)]
        return [*unnamed, *found]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)
