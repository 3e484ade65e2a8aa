"""Parameters of the Triton compiler. Fields and defaults are those of JAX 0.12; tutorial section 6.2."""

from __future__ import annotations

import dataclasses

from palladion.language import compiler_params
from palladion.language.fields import Check, check_fields, integer, optional, power_of_two

__all__ = ["CUSTOM_CALL_TARGET_NAME", "CompilerParams"]

# The custom call by which XLA:GPU takes a kernel in Triton's IR.
CUSTOM_CALL_TARGET_NAME = "__gpu$xla.gpu.triton"

_COMPILER_CHECKS: dict[str, Check] = {
    "num_warps": optional(power_of_two()),
    "num_stages": optional(integer(0)),
}


@dataclasses.dataclass(frozen=True)
class CompilerParams(compiler_params.CompilerParams):
    """Parameters of the Triton compiler, for `pallas_call(compiler_params=...)`.

    Arguments:
      num_warps: warps (of 32 threads) that work on one program, a power of two; None is the compiler's
        default.
      num_stages: depth of the software pipelines that Triton makes of loops; None is the compiler's default.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "pltriton.CompilerParams", _COMPILER_CHECKS)
