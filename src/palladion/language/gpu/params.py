"""Parameters of the Mosaic GPU compiler and of the simulated GPU.

Fields, order and defaults are those of JAX 0.12 (their values print as there); what is new is that each field
is checked when the object is made. Meanings: the Pallas Mosaic GPU reference and tutorial section 6.2.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Literal

from palladion.errors import count_of, explain, mistake
from palladion.language import compiler_params
from palladion.language.fields import (
    Check,
    check_fields,
    choice,
    flag,
    integer,
    member,
    one_of,
    optional,
    sequence_of,
    text,
)
from palladion.language.interpret_params import SHARED_CHECKS, LoggingMode

__all__ = ["CompilerParams", "InterpretGPUParams", "LoweringSemantics", "OOBFillMode", "TraceScope"]


class TraceScope(enum.Enum):
    """Who records the events of a profile: each warp, or each warpgroup as one."""

    WARP = "warp"
    WARPGROUP = "warpgroup"


class LoweringSemantics(enum.Enum):
    """Who executes a statement of a kernel: each lane for itself, or a warpgroup as one."""

    Lane = 1
    Warpgroup = 2


class OOBFillMode(enum.IntEnum):
    """What a copy reads outside its source: anything, nothing (a promise that it stays inside), or zeros."""

    UNDEFINED = 0
    PROMISE_IN_BOUNDS = 1
    ZEROS = 2


_COMPILER_CHECKS: dict[str, Check] = {
    "approx_math": flag(),
    "dimension_semantics": optional(
        sequence_of(choice("parallel", "sequential"), "grid axis", '"sequential" is what a TPU calls "arbitrary"')
    ),
    "max_concurrent_steps": integer(1),
    "unsafe_no_auto_barriers": flag(),
    "reduction_scratch_bytes": integer(0, "number of bytes"),
    "profile_space": integer(0, "number of events"),
    "profile_dir": text(),
    "profile_trace_scope": member(TraceScope, "plgpu.TraceScope"),
    "profile_bounds_check": flag(),
    "lowering_semantics": member(LoweringSemantics, "plgpu.LoweringSemantics"),
    "skip_device_barrier": flag(),
    "is_multi_process": flag(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams(compiler_params.CompilerParams):
    """Parameters of the Mosaic GPU compiler, for `compiler_params=`.

    Arguments:
      approx_math: use the hardware's approximate functions.
      dimension_semantics: for each grid axis, "parallel" (programs are blocks of their own) or "sequential"
        (one block does them in order, as a software pipeline). None: every axis is "parallel".
      max_concurrent_steps: how many steps of a sequential axis are in flight, the copies ahead included.
      unsafe_no_auto_barriers: do not put barriers between operations that use shared memory; the kernel has
        its own.
      reduction_scratch_bytes: shared memory for reductions across warps, in bytes.
      profile_space: events that a profile can hold for each warpgroup; 0 for no profile.
      profile_dir: where profiles are written; given exactly when `profile_space` is.
      profile_trace_scope: who records events.
      profile_bounds_check: check that the events fit in `profile_space`.
      lowering_semantics: who executes a statement.
      skip_device_barrier: start without waiting for other devices.
      is_multi_process: the kernel's devices belong to several processes.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    approx_math: bool = False
    dimension_semantics: Sequence[str] | None = None
    max_concurrent_steps: int = 1
    unsafe_no_auto_barriers: bool = False
    reduction_scratch_bytes: int = 2048
    profile_space: int = 0
    profile_dir: str = ""
    profile_trace_scope: TraceScope = TraceScope.WARPGROUP
    profile_bounds_check: bool = False
    lowering_semantics: LoweringSemantics = LoweringSemantics.Warpgroup
    skip_device_barrier: bool = False
    is_multi_process: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.CompilerParams", _COMPILER_CHECKS)
        if bool(self.profile_space) != bool(self.profile_dir):
            given, missing = (
                ("profile_space", "profile_dir") if self.profile_space else ("profile_dir", "profile_space")
            )
            raise ValueError(
                explain(
                    f"plgpu.CompilerParams: {given} is given without {missing}.",
                    hint="a profile needs both: room for events, and a directory to write to",
                )
            )

    def sequential_axes(self, gm: Any, name: str) -> list[int]:
        """The grid axes that one CUDA block walks along by itself.

        Arguments: gm: the call's `GridMapping`. name: of the kernel, for the message.

        Raises: ValueError: another number of entries than of axes.
        """
        semantics, axes = self.dimension_semantics, len(gm.kernel_grid)
        if semantics is None:
            return []
        if len(semantics) != axes:
            raise mistake(
                ValueError,
                f"dimension_semantics has {count_of(len(semantics), 'entry', 'entries')}, but the grid of {name} has "
                f"{count_of(axes, 'axis', 'axes')}.",
                hint='one entry for each axis: ("parallel", "sequential")',
            )
        own = [a for a in range(len(gm.grid)) if a not in gm.vmapped_dims]
        return [a for a, s in zip(own, semantics) if s == "sequential"]


_INTERPRET_CHECKS: dict[str, Check] = {
    **SHARED_CHECKS,
    "num_tma_threads_per_device": integer(1),
    "inline_mgpu": text(),
    "arch": optional(choice("sm_90a", "sm_100a")),
    "schedule": optional(one_of(choice("eager", "lazy"), integer(0))),
    "explore": integer(0, "number of schedules"),
    "strict": flag(),
    "trace": flag(),
    "uninitialized_reads": choice("allow", "warn", "raise"),
    "num_sms": optional(integer(1, "number of SMs")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretGPUParams:
    """Parameters of the simulated GPU, for `interpret=plgpu.InterpretGPUParams(...)`.

    Arguments:
      detect_races: report accesses to memory that nothing orders.
      on_race: "raise" at the first access that nothing orders (a race, a missing fence or wait), or "warn" and go on.
      out_of_bounds_reads: "raise", or "uninitialized": read what `uninitialized_memory` says.
      skip_floating_point_ops: replace floating-point results by NaN, to check data movement quickly.
      uninitialized_memory: what memory holds before the first write, "nan" (integers: their lowest value) or
        "zero".
      num_cores_or_threads: as in JAX, where it bounds the threads of a simulated device; here the kernel's mesh says
        how many there are.
      vector_clock_size: as in JAX, where clocks have a fixed size; here they grow as needed whatever it says.
      logging_mode: a `LoggingMode`, or None for no log.
      num_tma_threads_per_device: how many TMA copies can be in flight at once.
      inline_mgpu: what to do with `plgpu.inline_mgpu`, which a simulator cannot run; "error" refuses it.

    Beyond JAX's:
      arch: the simulated GPU, "sm_90a" (H100) or "sm_100a" (B200). None: sm_100a if the kernel uses an operation that
        only Blackwell has, else sm_90a.
      schedule: when asynchronous operations complete and who runs: "eager" (at their start), "lazy" (when they are
        waited for), or a seed for an order drawn at random. None: "lazy".
      explore: how many further schedules, drawn from successive seeds, each call is run under; the first finding is
        raised, with the schedule that repeats it.
      strict: a finding that would be a warning is an error.
      trace: keep a timeline in simulated time; `palladion.last_report().timeline` has it.
      uninitialized_reads: "raise" or "warn" when something reads memory that nothing has written; found in the history
        that `detect_races` keeps.
      num_sms: streaming multiprocessors of the simulated device, which bound how many blocks run at once; None: as
        many as the chip has.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    detect_races: bool = False
    on_race: Literal["raise", "warn"] = "raise"
    out_of_bounds_reads: Literal["raise", "uninitialized"] = "raise"
    skip_floating_point_ops: bool = False
    uninitialized_memory: Literal["nan", "zero"] = "nan"
    num_cores_or_threads: int = 1
    vector_clock_size: int | None = None
    logging_mode: LoggingMode | None = None
    num_tma_threads_per_device: int = 5
    inline_mgpu: str = "error"
    arch: Literal["sm_90a", "sm_100a"] | None = None
    schedule: Literal["eager", "lazy"] | int | None = None
    explore: int = 0
    strict: bool = False
    trace: bool = False
    uninitialized_reads: Literal["allow", "warn", "raise"] = "raise"
    num_sms: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.InterpretGPUParams", _INTERPRET_CHECKS)
