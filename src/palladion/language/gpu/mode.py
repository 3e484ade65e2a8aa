"""Running every kernel call of a program on the simulated (or the emulated) GPU, without changing the calls.

Both functions set `palladion.config.interpret`, which stands in for `interpret=False`; a call with an
`interpret` of its own keeps it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from palladion import config
from palladion.errors import explain
from palladion.language.gpu.emulate_params import EmulateParams
from palladion.language.gpu.params import InterpretGPUParams

__all__ = ["force_gpu_interpret_mode", "set_gpu_interpret_mode"]

_OPTION = "interpret"
_DEFAULTS = InterpretGPUParams()


def set_gpu_interpret_mode(params: InterpretGPUParams | EmulateParams | None = _DEFAULTS) -> None:
    """From now on, kernel calls that do not say how to be interpreted run on the simulated GPU.

    Arguments:
      params: parameters of the simulated GPU, or of the emulated one; None ends the mode.

    Raises:
      TypeError: `params` is something else.
    """
    setattr(config, _OPTION, _checked(params))


def force_gpu_interpret_mode(
    params: InterpretGPUParams | EmulateParams | None = _DEFAULTS,
) -> contextlib.AbstractContextManager[Any]:
    """The same for the calls traced in a block: `with plgpu.force_gpu_interpret_mode(): ...`.

    Arguments:
      params: parameters of the simulated GPU, or of the emulated one; None ends the mode within the block.

    Errors are those of `set_gpu_interpret_mode`.
    """
    return config.state(_OPTION)(_checked(params))


def _checked(params: Any) -> Any:
    if params is not None and not isinstance(params, (InterpretGPUParams, EmulateParams)):
        raise TypeError(
            explain(
                f"The GPU interpret mode takes a plgpu.InterpretGPUParams, a plgpu.EmulateParams or None, but it is "
                f"{params!r}.",
                hint="for the reference interpreter, pass interpret=True to the kernel call",
            )
        )
    return params
