"""The common base of the dialects' compiler parameters.

`pl.pallas_call(compiler_params=...)` takes the parameters of the compiler that a kernel is meant for, and the
type of the object says which one that is: `pltpu.CompilerParams` (Mosaic TPU), `pltriton.CompilerParams`
(Triton) or `plgpu.CompilerParams` (Mosaic GPU). Parameters for another target than the one a call runs on are
ignored, so that one call can be traced for several platforms. The base carries no fields: it is what
`isinstance` asks for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from palladion.errors import explain

__all__ = ["CompilerParams"]


@dataclasses.dataclass(frozen=True)
class CompilerParams:
    """Compiler parameters of some target; make one of `pltpu`, `pltriton` or `plgpu`, not of this class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is CompilerParams:
            raise TypeError(
                explain(
                    "pl.CompilerParams has no fields: it stands for the compiler parameters of any target.",
                    hint="use pltpu.CompilerParams, pltriton.CompilerParams or plgpu.CompilerParams",
                )
            )
        return super().__new__(cls)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; the copy is checked as a new one is."""
        return dataclasses.replace(self, **changes)
