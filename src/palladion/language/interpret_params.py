"""What the parameters of the simulated TPU and of the simulated GPUs have in common.

The two classes, `pltpu.InterpretParams` and `plgpu.InterpretGPUParams`, spell out their fields themselves;
this file has the checks for the fields that both have, and the flags of `logging_mode`.
"""

from __future__ import annotations

import enum

from palladion.language.fields import Check, choice, flag, integer, member, optional

__all__ = ["LoggingMode", "SHARED_CHECKS"]


class LoggingMode(enum.Flag):
    """What a simulator logs while it runs; flags combine with `|`."""

    BARRIER = 1
    SEMAPHORE = 2
    SHARED_MEMORY = 4


SHARED_CHECKS: dict[str, Check] = {
    "detect_races": flag(),
    "on_race": choice("raise", "warn"),
    "out_of_bounds_reads": choice("raise", "uninitialized"),
    "skip_floating_point_ops": flag(),
    "uninitialized_memory": choice("nan", "zero"),
    "num_cores_or_threads": integer(1),
    "vector_clock_size": optional(integer(1)),
    "logging_mode": optional(member(LoggingMode, "LoggingMode")),
}
