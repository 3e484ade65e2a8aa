"""Names of the dialects that a later version builds: asking for one raises a sentence instead of a puzzle.

A dialect's namespace (`palladion.tpu`, `.mosaic_gpu`, `.triton`) sets its module-level `__getattr__` to
`unbuilt(...)`. Because the error is an AttributeError, `hasattr` is False for such a name and programs that
probe for features behave. `from palladion.tpu import name` shows Python's own ImportError: the import
statement drops the text of an AttributeError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from palladion.errors import explain

__all__ = ["unbuilt"]


def unbuilt(module: str, alias: str, why: str, names: str, built: Iterable[str]) -> Callable[[str], Any]:
    """The module-level `__getattr__` of a dialect.

    Arguments:
      module: the module's `__name__`.
      alias: what users call the module, such as "plgpu".
      why: what the names wait for, to follow "NAME is not built yet: ".
      names: the names to come, separated by white space.
      built: the names that are there, for the message.

    Returns:
      a function that raises AttributeError for every name.
    """
    later = frozenset(names.split())
    available = ", ".join(sorted(built))

    def __getattr__(name: str) -> Any:
        if name in later:
            message = explain(f"{alias}.{name} is not built yet: {why}.", built_today=available)
        else:
            message = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[module])

    return __getattr__
