"""The machines that a call is measured against: which one it is written for, and what each holds on chip.

Sources: `language/tpu/info.py` for TPUs; for GPUs, the shared memory that one block may use according to the CUDA
programming guide (compute capability 9.0 and 10.0: 227 KiB of an SM's 228 KiB).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from palladion.language.gpu.memory import MemorySpace as GpuSpace
from palladion.language.gpu.params import CompilerParams as MosaicGpuParams
from palladion.language.refs import MemorySpace
from palladion.language.tpu.info import ChipVersion, TpuInfo, get_tpu_info_for_chip
from palladion.language.tpu.memory import MemorySpace as TpuSpace
from palladion.language.tpu.params import CompilerParams as TpuParams
from palladion.language.triton.params import CompilerParams as TritonParams
from palladion.report.calls import Call

SHARED_MEMORY_BYTES = 227 << 10  # of an SM, for one block: H100, H200, B200
TPUS: tuple[TpuInfo, ...] = tuple(get_tpu_info_for_chip(chip, 1) for chip in ChipVersion)
LARGEST_VMEM = max(info.vmem_capacity_bytes for info in TPUS)
LARGEST_SCALAR_MEMORY = max(info.smem_capacity_bytes for info in TPUS)


class Target(enum.Enum):
    """The machine that a call is written for."""

    TPU = "tpu"
    TRITON = "triton"
    MOSAIC_GPU = "mosaic_gpu"
    ANY = "any"  # nothing in the call says

    @property
    def is_gpu(self) -> bool:
        return self in (Target.TRITON, Target.MOSAIC_GPU)


def target_of(call: Call) -> Target:
    """What a call is written for: its compiler parameters say so, else a memory space of one dialect does."""
    params = call.params["compiler_params"]
    for kind, target in ((TpuParams, Target.TPU), (TritonParams, Target.TRITON), (MosaicGpuParams, Target.MOSAIC_GPU)):
        if isinstance(params, kind):
            return target
    spaces = [*(m.memory_space for m in call.grid_mapping.block_mappings), *(r.memory_space for r in call.scratch_refs)]
    if call.grid_mapping.num_prefetch or any(isinstance(s, TpuSpace) for s in spaces):
        return Target.TPU  # scalar prefetch is a part of pltpu
    return Target.MOSAIC_GPU if any(isinstance(s, GpuSpace) for s in spaces) else Target.ANY


def axis_semantics(call: Call, target: Target, axes: int) -> tuple[str, ...]:
    """ "parallel", "arbitrary" (in order) or "unknown" for each grid axis, as the target takes the call.

    A TPU runs axes in order unless they are declared parallel; a GPU runs them at once unless they are declared
    sequential.
    """
    default = {Target.TPU: "arbitrary", Target.TRITON: "parallel", Target.MOSAIC_GPU: "parallel"}.get(target, "unknown")
    declared = getattr(call.params["compiler_params"], "dimension_semantics", None) or ()
    words = [str(getattr(word, "value", word)) for word in declared]
    known = ["parallel" if "parallel" in word else "arbitrary" for word in words]
    return tuple((known + [default] * axes)[:axes])


def on_chip(space: Any, target: Target) -> str | None:
    """Which on-chip memory a buffer of this space takes: "vector", "scalar", or None for one that stays off chip."""
    if space in (
        MemorySpace.ANY,
        TpuSpace.HBM,
        TpuSpace.CMEM,
        TpuSpace.SEMAPHORE,
        GpuSpace.GMEM,
        GpuSpace.REGS,
        GpuSpace.TMEM,
    ):
        return None
    return "scalar" if space is TpuSpace.SMEM else "vector"


@dataclasses.dataclass(frozen=True)
class Limit:
    """An on-chip memory that a call's buffers must fit into.

    Attributes:
      names: the chips that have it ("v5e").
      memory: "VMEM" or "shared memory".
      capacity: bytes.
      used: bytes that the call takes there.
    """

    names: tuple[str, ...]
    memory: str
    capacity: int
    used: int

    @property
    def fits(self) -> bool:
        return self.used <= self.capacity

    @property
    def machine(self) -> str:
        return "TPU" if self.memory == "VMEM" else "GPU"


def limits(vmem: int, shared: int, target: Target) -> list[Limit]:
    """The memories of the machines that a call may run on, smallest first for each kind.

    Arguments:
      vmem: bytes that the call takes in a TPU's VMEM.
      shared: bytes that it takes in an SM's shared memory.
      target: TPUs are left out for a call written for GPUs, and the other way round.
    """
    result = []
    if not target.is_gpu:
        for capacity in sorted({info.vmem_capacity_bytes for info in TPUS}):
            names = tuple(str(i.chip_version) for i in TPUS if i.vmem_capacity_bytes == capacity)
            result.append(Limit(names, "VMEM", capacity, vmem))
    if target is not Target.TPU:
        result.append(Limit(("H100", "B200"), "shared memory", SHARED_MEMORY_BYTES, shared))
    return result
