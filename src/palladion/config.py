"""Every option of Palladion, with its environment variable, default and meaning.

    import palladion
    palladion.config.cpu = "interpret"            # for the process
    with palladion.config.state("cpu")("refuse"): # for a block
        ...

Each option is part of the key of JAX's trace and compile caches, so that changing one never reuses a kernel that
was traced under another value.

| option         | environment variable     | values                     | meaning |
|----------------|--------------------------|----------------------------|---------|
| `cpu`          | `PALLADION_CPU`          | "refuse" (default), "interpret" | what a kernel call without `interpret` does on the CPU |
| `debug_checks` | `PALLADION_DEBUG_CHECKS` | False (default), True      | `pl.debug_check` and checks of run-time indices are on |
| `poison_buffers` | `PALLADION_POISON_BUFFERS` | False (default), True  | compiled targets fill uninitialised buffers with NaN; interpreters always do |
| `interpret`    | (none)                   | None (default), or a value of `interpret=` | replaces `interpret=False` of every call |
"""

from __future__ import annotations

import sys
import types
from typing import Any

from palladion import jaxlink

_STATES: dict[str, Any] = {
    "cpu": jaxlink.enum_state(
        "palladion_cpu",
        ("refuse", "interpret"),
        "refuse",
        "What a kernel call without `interpret` does on the CPU: refuse (as Pallas does) or interpret.",
    ),
    "debug_checks": jaxlink.bool_state(
        "palladion_debug_checks", False, "Run `pl.debug_check` and check run-time indices of Refs."
    ),
    "poison_buffers": jaxlink.bool_state(
        "palladion_poison_buffers",
        False,
        "Fill uninitialised buffers of compiled kernels with NaN; interpreters always do.",
    ),
    "interpret": jaxlink.object_state(
        "palladion_interpret", None, "The value of `interpret=` for calls that leave it False."
    ),
}


def state(name: str) -> Any:
    """The option as a context manager: `with state("cpu")("interpret"): …`."""
    if name not in _STATES:
        raise AttributeError(f"palladion.config has no option {name!r}; the options are {', '.join(_STATES)}")
    return _STATES[name]


def get(name: str) -> Any:
    """The option's value here and now: of the innermost `with`, else of the process."""
    return state(name).value


class _ConfigModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in _STATES:
            return _STATES[name].value
        raise AttributeError(f"palladion.config has no option {name!r}; the options are {', '.join(_STATES)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STATES:
            _STATES[name]._set(value)
        elif name.startswith("__"):
            super().__setattr__(name, value)
        else:
            state(name)  # raises, naming the options


sys.modules[__name__].__class__ = _ConfigModule
