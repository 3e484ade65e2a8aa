"""Every option of Palladion, with its environment variable, default and meaning.

    import palladion
    palladion.config.cpu = "interpret"            # for the process
    with palladion.config.state("cpu")("refuse"): # for a block
        ...

Each option except `cache_dir`, which changes no result, is part of the key of JAX's trace and compile caches, so that
changing one never reuses a kernel that was traced under another value.

| option         | values                             | meaning |
|----------------|------------------------------------|---------|
| cpu            | "refuse" (default), "interpret", "native" | what a kernel call without `interpret` does on the CPU |
| debug_checks   | False (default), True              | `pl.debug_check` and checks of run-time indices are on |
| poison_buffers | False (default), True              | compiled targets fill new buffers with NaN, as interpreters do |
| interpret      | None (default), or a value of `interpret=` | replaces `interpret=False` of every call |
| allow_spills   | False (default), True              | Mosaic GPU kernels may spill registers; else that is an error |
| cache_dir      | a folder; None or "" for none      | where compiled CPU and GPU kernels are kept between processes |

The environment variables PALLADION_CPU, PALLADION_DEBUG_CHECKS, PALLADION_POISON_BUFFERS and PALLADION_ALLOW_SPILLS set
those options, and PALLADION_CACHE_DIR the last, which is otherwise `palladion` in the folder that XDG_CACHE_HOME names,
or in ~/.cache.

Other environment variables are read whenever a kernel is compiled (`variable`, `switch`); `VARIABLES` lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from palladion import jaxlink
from palladion.errors import explain, kind_of, mistake


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its value for the process, and a context manager that changes it for a block of one thread.

    Arguments:
      name: of the option.
      values: what it may be; None for anything that has a hash.
      stored: JAX's state that holds it.
    """

    name: str
    values: tuple[Any, ...] | None
    stored: Any

    @property
    def value(self) -> Any:
        """Here and now: of the innermost `with`, else of the process."""
        return self.stored.value

    def __call__(self, new_val: Any) -> contextlib.AbstractContextManager[None]:
        """A context manager in which the option is `new_val`."""
        return self.stored(self._checked(new_val))

    def set(self, new_val: Any) -> None:
        """Change the option for the process."""
        self.stored._set(self._checked(new_val))

    def _checked(self, value: Any) -> Any:
        if self.values is not None and (type(value) is not type(self.values[0]) or value not in self.values):
            hint = " or ".join(map(repr, self.values))
            raise mistake(ValueError, f"palladion.config.{self.name} cannot be {kind_of(value)}.", hint=hint)
        return value


class _Plain:
    """A value with the interface of JAX's states, outside the keys of its caches. One value for all threads."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _set(self, value: Any) -> None:
        self.value = value

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


def _default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.environ.get("PALLADION_CACHE_DIR", os.path.join(base, "palladion"))


def _check_environment(variable: str, values: tuple[str, ...], shown: tuple[str, ...]) -> None:
    """Refuse a value that JAX's states would refuse as one of JAX's flags."""
    value = os.environ.get(variable)
    if value is not None and value not in values:
        hint = f"{variable} is {', '.join(shown)}, or not set"
        raise ValueError(explain(f"The environment variable {variable} cannot be {value!r}.", hint=hint))


_CPU = ("refuse", "interpret", "native")
_WORDS = ("0", "1", "false", "true", "n", "y", "no", "yes", "f", "t", "off", "on")
_TRUTH = (*_WORDS, *map(str.upper, _WORDS), *map(str.title, _WORDS))
_check_environment("PALLADION_CPU", _CPU, _CPU)
for _name in ("PALLADION_DEBUG_CHECKS", "PALLADION_POISON_BUFFERS", "PALLADION_ALLOW_SPILLS"):
    _check_environment(_name, _TRUTH, _TRUTH[:2])

_OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "cpu",
            _CPU,
            jaxlink.enum_state(
                "palladion_cpu",
                _CPU,
                "refuse",
                "What a kernel call without `interpret` does on the CPU: refuse (as in Pallas), interpret, or compile.",
            ),
        ),
        Option(
            "debug_checks",
            (False, True),
            jaxlink.bool_state(
                "palladion_debug_checks", False, "Run `pl.debug_check` and check run-time indices of Refs."
            ),
        ),
        Option(
            "poison_buffers",
            (False, True),
            jaxlink.bool_state(
                "palladion_poison_buffers",
                False,
                "Fill uninitialised buffers of compiled kernels with NaN; interpreters always do.",
            ),
        ),
        Option(
            "interpret",
            None,
            jaxlink.object_state(
                "palladion_interpret", None, "The value of `interpret=` for calls that leave it False."
            ),
        ),
        Option(
            "allow_spills",
            (False, True),
            jaxlink.bool_state("palladion_allow_spills", False, "A Mosaic GPU kernel may spill registers."),
        ),
        Option("cache_dir", None, _Plain(_default_cache_dir())),
    )
}


def state(name: str) -> Option:
    """The option, also a context manager: `with state("cpu")("interpret"): …`."""
    if name not in _OPTIONS:
        options = ", ".join(_OPTIONS)
        raise mistake(AttributeError, f"palladion.config has no option {name!r}.", hint=f"the options are {options}")
    return _OPTIONS[name]


def get(name: str) -> Any:
    """The option's value here and now: of the innermost `with`, else of the process."""
    return state(name).value


VARIABLES: dict[str, str] = {
    "MOSAIC_GPU_DUMP_PTXAS": "print what ptxas says of each Mosaic GPU kernel: registers, spills, warnings",
    "MOSAIC_GPU_DUMP_PTX": "print its PTX",
    "MOSAIC_GPU_DUMP_SASS": "print its machine code",
    "MOSAIC_GPU_DUMP_SASS_CTRL": "print its machine code with the scheduler's control codes, as maxas writes them",
    "MOSAIC_GPU_DUMP_MLIR_PASSES": "print what this compiler has in place of MLIR: jaxpr, layouts, CUDA C++",
    "MOSAIC_GPU_DUMP_LLVM": "say that this compiler has no LLVM IR of its own",
    "MOSAIC_GPU_LLVM_DEBUG_ONLY": "the same; names of LLVM's debug output",
    "MOSAIC_GPU_DUMP_TO": "a folder that exists: put all of the above there, as files",
}
"""Environment variables that are read when they are needed, and what they ask for when they are set."""


def variable(name: str) -> str | None:
    """What an environment variable of `VARIABLES` says now; None where it is not set, or empty."""
    assert name in VARIABLES, name
    return os.environ.get(name) or None


def switch(name: str) -> bool:
    """Whether it is set, and not to one of the words for no: 0, false, no, off."""
    return (variable(name) or "0").lower() not in ("0", "false", "f", "no", "n", "off")


class _ConfigModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return state(name).value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            state(name).set(value)


sys.modules[__name__].__class__ = _ConfigModule
