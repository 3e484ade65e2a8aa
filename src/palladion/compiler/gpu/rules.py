"""All rules of the compiler: importing this module fills `unit.RULES`."""

from __future__ import annotations

import importlib

FILES = (
    "rules_control",
    "rules_elementwise",
    "rules_functions",
    "rules_casts",
    "rules_shapes",
    "rules_reduce",
    "rules_special",
    "rules_indexed",
    "rules_sort",
    "rules_window",
    "rules_refs",
    "rules_kernel",
    "rules_barriers",
    "rules_copies",
    "rules_atomics",
    "rules_cluster",
    "rules_semaphores",
    "rules_wgmma",
    "rules_tcgen05",
    "rules_tcgen05_mma",
    "rules_debug",
    "rules_inline",
)


for _name in FILES:
    importlib.import_module(f"palladion.compiler.gpu.{_name}")
