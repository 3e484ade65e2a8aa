"""Every Note, Warning and "must" of the Mosaic GPU reference, as programs that break it and twins that do not."""

from . import barriers, blackwell, clusters, copies, grids, hopper, shared
from .registry import RULES, Program, Rule

__all__ = ["RULES", "Program", "Rule", "barriers", "blackwell", "clusters", "copies", "grids", "hopper", "shared"]
