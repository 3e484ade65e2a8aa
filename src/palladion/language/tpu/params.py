"""Parameters of the Mosaic TPU compiler and of the simulated TPU.

Fields, order and defaults are those of JAX 0.12 (their values print as there); what is new is that each field
is checked when the object is made. Meanings: tutorial sections 6.2 (compiler) and 3 (simulator), and the
public documentation of Pallas TPU.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from palladion.language import compiler_params
from palladion.language.fields import (
    Check,
    check_fields,
    choice,
    flag,
    frozen_mapping,
    function,
    integer,
    member,
    one_of,
    optional,
    sequence_of,
)
from palladion.language.interpret_params import SHARED_CHECKS, LoggingMode
from palladion.language.tpu.info import ChipVersion

__all__ = [
    "ARBITRARY",
    "CORE_PARALLEL",
    "CompilerParams",
    "CoreType",
    "GridDimensionSemantics",
    "InterpretParams",
    "LoweringException",
    "OptLevel",
    "PARALLEL",
    "SUBCORE_PARALLEL",
    "SideEffectType",
    "Tiling",
]


class GridDimensionSemantics(enum.Enum):
    """What the programs along a grid axis may do.

    `PARALLEL`: in any order, and split over the TensorCores of a megacore chip. `ARBITRARY`: in order, on one
    core (an axis of a reduction). `CORE_PARALLEL`, `SUBCORE_PARALLEL`: one slice for each core, or subcore,
    at once.
    """

    ARBITRARY = "arbitrary"
    PARALLEL = "parallel"
    SUBCORE_PARALLEL = "subcore_parallel"
    CORE_PARALLEL = "core_parallel"


ARBITRARY = GridDimensionSemantics.ARBITRARY
PARALLEL = GridDimensionSemantics.PARALLEL
SUBCORE_PARALLEL = GridDimensionSemantics.SUBCORE_PARALLEL
CORE_PARALLEL = GridDimensionSemantics.CORE_PARALLEL


class SideEffectType(enum.Enum):
    """What a kernel does besides returning its outputs, as far as XLA has to know.

    `PURE`: nothing, an unused call may go. `DATAFLOW_SIDE_EFFECTING`: effects reach only what depends on the
    call's results. `SIDE_EFFECTING`: the call must run, in program order.
    """

    SIDE_EFFECTING = "side_effecting"
    DATAFLOW_SIDE_EFFECTING = "dataflow_side_effecting"
    PURE = "pure"


class CoreType(enum.Enum):
    """The kinds of core on a TPU chip: TensorCore, and the scalar and vector subcores of a SparseCore."""

    SC_VECTOR_SUBCORE = "sc_vector_subcore"
    SC_SCALAR_SUBCORE = "sc_scalar_subcore"
    TC = "tc"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.name


class Tiling(enum.Enum):
    """How arrays lie in memory: `COMPACT`, the TensorCore's tiles (sublanes by lanes), or `SPARSE_CORE`'s."""

    COMPACT = 1
    SPARSE_CORE = 2


class OptLevel(enum.Enum):
    """How hard the Mosaic compiler works."""

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"


class LoweringException(Exception):
    """A kernel, or one of its operations, that cannot become a Mosaic TPU module."""


_SEMANTICS = Check(
    "'parallel', 'arbitrary', 'core_parallel', 'subcore_parallel' or a pltpu.GridDimensionSemantics",
    one_of(
        choice(*(semantics.value for semantics in GridDimensionSemantics)),
        member(GridDimensionSemantics, "pltpu.GridDimensionSemantics"),
    ).convert,
)

_COMPILER_CHECKS: dict[str, Check] = {
    "dimension_semantics": optional(
        sequence_of(
            _SEMANTICS,
            "grid axis",
            'write for example ("parallel", "parallel", "arbitrary"), reductions last',
        )
    ),
    "allow_input_fusion": optional(sequence_of(flag(), "input")),
    "vmem_limit_bytes": optional(integer(1, "number of bytes")),
    "collective_id": optional(integer(0)),
    "has_side_effects": one_of(flag(), member(SideEffectType, "pltpu.SideEffectType")),
    "flags": optional(frozen_mapping()),
    "internal_scratch_in_bytes": optional(integer(0, "number of bytes")),
    "serialization_format": integer(0),
    "disable_bounds_checks": flag(),
    "disable_semaphore_checks": flag(),
    "skip_device_barrier": flag(),
    "allow_collective_id_without_custom_barrier": flag(),
    "shape_invariant_numerics": flag(),
    "use_tc_tiling_on_sc": optional(flag()),
    "needs_layout_passes": flag(),
    "fuse_transposed_lhs_in_matmul": flag(),
    "opt_level": optional(member(OptLevel, "pltpu.OptLevel", by_value=True)),
}


@dataclasses.dataclass(frozen=True)
class CompilerParams(compiler_params.CompilerParams):
    """Parameters of the Mosaic TPU compiler, for `pallas_call(compiler_params=...)`.

    Sequences and mappings are stored as tuples and frozen mappings: an instance can be hashed.

    Arguments:
      dimension_semantics: what programs along each grid axis may do: "parallel", "arbitrary",
        "core_parallel", "subcore_parallel" or the `GridDimensionSemantics`. None: every axis is "arbitrary".
      allow_input_fusion: for each input, whether XLA may fuse its producer into the kernel.
      vmem_limit_bytes: VMEM that the kernel may use, in bytes; None is the compiler's own limit.
      collective_id: which barrier semaphore a kernel that talks to other devices uses; the same on all of
        them.
      has_side_effects: whether the call must run though its results are unused.
      flags: further options of the compiler, by name.
      internal_scratch_in_bytes: VMEM for the compiler's own use, in bytes.
      serialization_format: version of the serialised module.
      disable_bounds_checks: do not check DMA and Ref bounds at run time.
      disable_semaphore_checks: do not check at run time that semaphores end at zero.
      skip_device_barrier: start without waiting for the previous kernel on the device.
      allow_collective_id_without_custom_barrier: accept a `collective_id` in a kernel that uses no barrier.
      shape_invariant_numerics: the same rounding whatever the block shape.
      use_tc_tiling_on_sc: SparseCore kernels take HBM arrays in the TensorCore's tiling; None: by the
        compiler.
      needs_layout_passes: let the compiler infer vector layouts.
      fuse_transposed_lhs_in_matmul: fuse a transpose of the left operand into a matrix product.
      opt_level: an `OptLevel`, or its name ("O2"); None is the compiler's default.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    dimension_semantics: Sequence[GridDimensionSemantics | str] | None = None
    allow_input_fusion: Sequence[bool] | None = None
    vmem_limit_bytes: int | None = None
    collective_id: int | None = None
    has_side_effects: bool | SideEffectType = False
    flags: Mapping[str, Any] | None = None
    internal_scratch_in_bytes: int | None = None
    serialization_format: int = 1
    disable_bounds_checks: bool = False
    disable_semaphore_checks: bool = False
    skip_device_barrier: bool = False
    allow_collective_id_without_custom_barrier: bool = False
    shape_invariant_numerics: bool = True
    use_tc_tiling_on_sc: bool | None = None
    needs_layout_passes: bool = True
    fuse_transposed_lhs_in_matmul: bool = False
    opt_level: OptLevel | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "pltpu.CompilerParams", _COMPILER_CHECKS)


_INTERPRET_CHECKS: dict[str, Check] = {
    **SHARED_CHECKS,
    "dma_execution_mode": choice("eager", "on_wait"),
    "random_seed": optional(integer()),
    "grid_point_recorder": optional(function()),
    "allow_hbm_allocation_in_run_scoped": flag(),
    "buffer_bounds": choice("logical", "padded"),
    "schedule": optional(one_of(choice("eager", "lazy"), integer(0))),
    "explore": integer(0, "number of schedules"),
    "uninitialized_reads": choice("allow", "warn", "raise"),
    "chip": optional(choice(*(c.value for c in ChipVersion))),
    "vmem_limit": optional(integer(1, "number of bytes")),
    "trace": flag(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretParams:
    """Parameters of the simulated TPU, for `pallas_call(interpret=pltpu.InterpretParams(...))`.

    Arguments:
      detect_races: report accesses to memory that nothing orders.
      on_race: "raise" at the first race, or "warn" and go on.
      out_of_bounds_reads: "raise", or "uninitialized": read what `uninitialized_memory` says.
      skip_floating_point_ops: replace floating-point results by NaN, to check data movement quickly.
      uninitialized_memory: what memory holds before the first write, "nan" (integers: their lowest value) or
        "zero".
      num_cores_or_threads: TensorCores of a simulated device; parallel grid axes are split over them.
      vector_clock_size: as in JAX, where clocks have a fixed size; here they grow as needed whatever it says.
      logging_mode: a `LoggingMode`, or None for no log.
      dma_execution_mode: when the data of a DMA moves: at its start ("eager") or at the wait ("on_wait").
      random_seed: seed of the order in which programs along parallel axes run; None: in grid order.
      grid_point_recorder: called as `f(token, grid_point, core_id) -> token` at each grid point.
      allow_hbm_allocation_in_run_scoped: let `run_scoped` allocate in HBM.
      buffer_bounds: bounds that accesses are checked against, "logical" (the shape) or "padded" (to whole
        tiles).

    Beyond JAX's:
      schedule: when copies complete and who runs: "eager" (a copy at its start), "lazy" (when it is waited for), or a
        seed for an order drawn at random. None: as `dma_execution_mode` says.
      explore: how many further schedules, drawn from successive seeds, each call is run under; the first finding is
        raised, with the schedule that repeats it.
      uninitialized_reads: "raise" or "warn" when a core reads memory that nothing has written; needs the history that
        `detect_races` keeps, which it switches on.
      chip: the chip whose VMEM must hold the call's blocks and scratch, by its short name ("v5e"); None: any.
      vmem_limit: bytes of VMEM, in place of the chip's.
      trace: keep a timeline in simulated time; `palladion.last_report().timeline` has it.

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
    dma_execution_mode: Literal["eager", "on_wait"] = "on_wait"
    random_seed: int | None = None
    grid_point_recorder: Callable[[Any, tuple[Any, ...], Any], Any] | None = None
    allow_hbm_allocation_in_run_scoped: bool = False
    buffer_bounds: Literal["logical", "padded"] = "logical"
    schedule: Literal["eager", "lazy"] | int | None = None
    explore: int = 0
    uninitialized_reads: Literal["allow", "warn", "raise"] = "allow"
    chip: str | None = None
    vmem_limit: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "pltpu.InterpretParams", _INTERPRET_CHECKS)
