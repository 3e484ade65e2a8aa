"""Parameters of the emulated GPU: `interpret=plgpu.EmulateParams(...)` compiles a call and runs its PTX on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Literal

from palladion.language.fields import Check, check_fields, choice, flag, integer, one_of, optional

__all__ = ["EmulateParams"]

_CHECKS: dict[str, Check] = {
    "arch": optional(choice("sm_90a", "sm_100a")),
    "order": one_of(choice("lazy", "eager"), integer(0)),
    "detect_uninitialized": flag(),
    "num_sms": optional(integer(1, "number of SMs")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmulateParams:
    """Run a kernel's compiled code, instruction by instruction, with no GPU.

    The call goes through the Mosaic GPU compiler and NVRTC (extra `gpu`), and the PTX that came of it runs on an
    emulator written from the PTX manual: what comes out is what the compiled code computes.

    Arguments:
      arch: what it is compiled for, "sm_90a" (Hopper) or "sm_100a" (Blackwell). None: sm_100a if the kernel uses an
        operation that only Blackwell has, else sm_90a.
      order: when asynchronous operations happen: "lazy" (as late as something waits for them, so that a missing wait
        shows), "eager" (at once), or a seed for an order drawn at random.
      detect_uninitialized: report reads of shared memory that nothing has written.
      num_sms: streaming multiprocessors that programs are told the device has; None: as many as the chip.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    arch: Literal["sm_90a", "sm_100a"] | None = None
    order: Literal["lazy", "eager"] | int = "lazy"
    detect_uninitialized: bool = False
    num_sms: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.EmulateParams", _CHECKS)
