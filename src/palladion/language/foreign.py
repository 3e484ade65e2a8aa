"""What belongs to JAX's own Pallas and reaches Palladion by mistake: a program that imports some names from each.

Its classes have the same names and fields as Palladion's, so that a message with their repr explains nothing, and some
would be taken for arrays or buffers and then quietly mean something else. Nothing of JAX's Pallas is imported here:
objects are known by the module of their class, operations by the file that they fail in.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from palladion.errors import mistake

_MODULE = "jax._src.pallas"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "_src", "pallas") + os.sep
# The part of JAX's Pallas that a class lives in, and the import that gives Palladion's; the first that fits.
_IMPORTS = (
    ("mosaic_gpu", "import palladion.mosaic_gpu as plgpu"),
    ("mosaic", "import palladion.tpu as pltpu"),
    ("triton", "import palladion.triton as pltriton"),
    ("", "import palladion as pl"),
)


def is_foreign(x: Any) -> bool:
    """Whether `x` is an object, or a class, of JAX's own Pallas."""
    module = getattr(x if isinstance(x, type) else type(x), "__module__", None)
    return isinstance(module, str) and (module == _MODULE or module.startswith(f"{_MODULE}."))


def refuse_foreign(**given: Any) -> None:
    """Refuse arguments that are, or are pytrees that hold, objects of JAX's own Pallas.

    Arguments:
      **given: argument's name -> its value.

    Raises:
      TypeError: naming the argument, the class, and the import to use.
    """
    for name, value in given.items():
        for x in _leaves(value):
            if is_foreign(x):
                kind = x if isinstance(x, type) else type(x)
                part = kind.__module__.removeprefix(f"{_MODULE}.")
                fix = next(words for start, words in _IMPORTS if part.startswith(start))
                raise mistake(
                    TypeError,
                    f"{name}: this {kind.__name__} is JAX's own Pallas ({kind.__module__}); Palladion cannot use it.",
                    hint=f"{fix} (or run the program with `palladion run`)",
                )


def _leaves(x: Any) -> list[Any]:
    """Leaves of nested tuples, lists and dicts; other pytrees hold no specs that a user would write."""
    if isinstance(x, (tuple, list)) and not is_foreign(x):
        return [leaf for part in x for leaf in _leaves(part)]
    return [leaf for part in x.values() for leaf in _leaves(part)] if isinstance(x, dict) else [x]


@contextlib.contextmanager
def noting_foreign_operations(kernel: str) -> Iterator[None]:
    """Add a note to an exception that an operation of JAX's own Pallas raises in the block: it finds no grid there.

    Arguments:
      kernel: its name.
    """
    try:
        yield
    except Exception as error:
        if not getattr(error, "_foreign", False) and _fails_in_jaxs_pallas(error):
            error._foreign = True  # pyright: ignore[reportAttributeAccessIssue]  # the innermost kernel's note is enough
            error.add_note(
                f"The kernel {kernel} runs on Palladion, but uses an operation of JAX's own Pallas "
                "(`jax.experimental.pallas`).\n"
                "  fix: import palladion as pl (or run the program with `palladion run`)"
            )
        raise


def _fails_in_jaxs_pallas(error: BaseException | None) -> bool:
    """Whether the innermost frame lies there; of an exception whose traceback JAX has cut, in its cause's."""
    while error is not None:
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if frames and frames[-1].startswith(_FOLDER):
            return True
        error = error.__cause__
    return False
