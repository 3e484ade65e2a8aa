"""Running every kernel call of a program on the simulated TPU, without changing the calls.

Both functions set `palladion.config.interpret`, which stands in for `interpret=False`; a call with an
`interpret` of its own keeps it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from palladion import config
from palladion.errors import explain
from palladion.language.tpu.params import InterpretParams

__all__ = ["force_tpu_interpret_mode", "reset_tpu_interpret_mode_state", "set_tpu_interpret_mode"]

_OPTION = "interpret"
_DEFAULTS = InterpretParams()


def set_tpu_interpret_mode(params: InterpretParams | None = _DEFAULTS) -> None:
    """From now on, kernel calls that do not say how to be interpreted run on the simulated TPU.

    Arguments:
      params: parameters of the simulated TPU; None ends the mode.

    Raises:
      TypeError: `params` is something else.
    """
    setattr(config, _OPTION, _checked(params))


def force_tpu_interpret_mode(
    params: InterpretParams | None = _DEFAULTS,
) -> contextlib.AbstractContextManager[Any]:
    """The same for the calls traced in a block: `with pltpu.force_tpu_interpret_mode(): ...`.

    Arguments:
      params: parameters of the simulated TPU; None ends the mode within the block.

    Errors are those of `set_tpu_interpret_mode`.
    """
    return config.state(_OPTION)(_checked(params))


def reset_tpu_interpret_mode_state() -> None:
    """Does nothing, and is never needed: a simulated TPU keeps no state from one kernel call to the next.

    Programs written for JAX's simulator call it after an exception, where it is required.
    """


def _checked(params: Any) -> Any:
    if params is not None and not isinstance(params, InterpretParams):
        raise TypeError(
            explain(
                f"The TPU interpret mode takes a pltpu.InterpretParams or None, but it is {params!r}.",
                hint="for the reference interpreter, pass interpret=True to the kernel call",
            )
        )
    return params
