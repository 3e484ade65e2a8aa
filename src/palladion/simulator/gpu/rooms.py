"""The modules that register the simulated GPU's rules, imported once; and the pipeline of kernels with programs."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = (
    "rules",
    "barriers",
    "copies",
    "stores",
    "semaphores",
    "atomics",
    "wgmma",
    "tmem",
    "tcgen05",
    "layouts",
    "control",
)


def load() -> None:
    """Import the modules that register rules."""
    for name in _MODULES:
        importlib.import_module(f"palladion.simulator.gpu.{name}")


def pipeline(params: dict[str, Any], compiler: Any, setting: Any) -> Any:
    """How the blocks of a `pallas_call` come to SMEM."""
    return importlib.import_module("palladion.simulator.gpu.programs").Pipeline(params, compiler, setting)
