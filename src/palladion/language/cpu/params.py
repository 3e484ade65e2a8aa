"""Parameters of the native CPU compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from palladion.language import compiler_params
from palladion.language.fields import check_fields, choice, integer, optional, sequence_of

__all__ = ["CompilerParams"]


@dataclasses.dataclass(frozen=True)
class CompilerParams(compiler_params.CompilerParams):
    """Compile a kernel to native code for the processor that runs this program.

    Arguments:
      dimension_semantics: "parallel" or "arbitrary" for each grid axis. Programs along leading parallel axes may run
        at once on several threads; without it, axes that are proved independent do.
      num_threads: at most so many threads; None is as many as XLA's pool has.

    Raises:
      TypeError, ValueError: a field is of the wrong type or out of range.
    """

    dimension_semantics: Sequence[Any] | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "plcpu.CompilerParams",
            {
                "dimension_semantics": optional(sequence_of(choice("parallel", "arbitrary"), "grid axis")),
                "num_threads": optional(integer(1, "number of threads")),
            },
        )
