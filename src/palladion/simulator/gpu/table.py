"""The table of the simulated GPU's rules, and what a rule is told when it is prepared."""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion.rules import RuleTable
from palladion.simulator import shared_rules
from palladion.simulator.gpu.chip import Chip
from palladion.simulator.values import ARRAYS

RULES = RuleTable("the simulated GPU", covers=lambda primitive: ARRAYS.supports(primitive))
shared_rules.install(RULES)


@dataclasses.dataclass
class Setting:
    """What rules know of the machine when a kernel is prepared (`compiler.machine`).

    Attributes:
      tracked: whether the history of memory is kept. timed: whether simulated time is.
      chip: the GPU. sites: the equations that stamps name, by number.
      last: the equation that is the last thing that the kernel does, or None.
      atomics: the sites that update memory atomically: they do not race with each other.
    """

    tracked: bool
    timed: bool
    chip: Chip
    sites: list[Any]
    last: Any = None
    atomics: set[int] = dataclasses.field(default_factory=set)

    def site_of(self, eqn: Any) -> int:
        """A number for an equation."""
        self.sites.append(eqn)
        return len(self.sites) - 1
