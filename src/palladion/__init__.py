"""Palladion: write a kernel once on Refs; check it, debug it, run it.

    import palladion as pl

The names of Pallas (`jax.experimental.pallas`), and beyond them `EagerParams`, `config`, the exceptions, and `compile`,
which says what a compiler makes of a kernel.
The dialects are `palladion.tpu` (pltpu), `palladion.mosaic_gpu` (plgpu), `palladion.triton` (pltriton) and
`palladion.cpu` (plcpu); `palladion.fuser` fuses what stands around a kernel into it.
"""

import jax as _jax

from palladion import config as config
from palladion.compiler.entry import compile as compile
from palladion.compiler.reports import CompileReport as CompileReport
from palladion.errors import KernelCheckError as KernelCheckError
from palladion.errors import KernelFinding as KernelFinding
from palladion.errors import PalladionWarning as PalladionWarning
from palladion.errors import TargetNotBuilt as TargetNotBuilt
from palladion.errors import UnsupportedPrimitive as UnsupportedPrimitive
from palladion.executors import last_report as last_report
from palladion.jaxlink import Slice as Slice
from palladion.jaxlink import ds as ds
from palladion.language import transforms as _transforms  # registers the rules of pallas_call
from palladion.language.blocks import BlockDim as BlockDim
from palladion.language.blocks import Blocked as Blocked
from palladion.language.blocks import BlockSpec as BlockSpec
from palladion.language.blocks import BoundedSlice as BoundedSlice
from palladion.language.blocks import Buffered as Buffered
from palladion.language.blocks import Element as Element
from palladion.language.blocks import GridSpec as GridSpec
from palladion.language.blocks import Indirect as Indirect
from palladion.language.blocks import RevisitMode as RevisitMode
from palladion.language.blocks import Squeezed as Squeezed
from palladion.language.blocks import no_block_spec as no_block_spec
from palladion.language.blocks import squeezed as squeezed
from palladion.language.call import pallas_call as pallas_call
from palladion.language.compiler_params import CompilerParams as CompilerParams
from palladion.language.core_map import core_map as core_map
from palladion.language.cost import CostEstimate as CostEstimate
from palladion.language.cost import estimate_cost as estimate_cost
from palladion.language.eager_params import EagerParams as EagerParams
from palladion.language.helpers import align_to as align_to
from palladion.language.helpers import broadcast_to as broadcast_to
from palladion.language.helpers import cdiv as cdiv
from palladion.language.helpers import empty as empty
from palladion.language.helpers import empty_like as empty_like
from palladion.language.helpers import empty_ref_like as empty_ref_like
from palladion.language.helpers import lower_as_mlir as lower_as_mlir
from palladion.language.helpers import next_power_of_2 as next_power_of_2
from palladion.language.helpers import pallas_export_experimental as pallas_export_experimental
from palladion.language.helpers import run_state as run_state
from palladion.language.helpers import strides_from_shape as strides_from_shape
from palladion.language.kernel import get_global as get_global
from palladion.language.kernel import kernel as kernel
from palladion.language.ops import debug_check as debug_check
from palladion.language.ops import debug_print as debug_print
from palladion.language.ops import delay as delay
from palladion.language.ops import loop as loop
from palladion.language.ops import multiple_of as multiple_of
from palladion.language.ops import num_programs as num_programs
from palladion.language.ops import program_id as program_id
from palladion.language.ops import run_scoped as run_scoped
from palladion.language.ops import when as when
from palladion.language.ops import with_scoped as with_scoped
from palladion.language.primitive import pallas_call_p as pallas_call_p
from palladion.language.refs import MemoryRef as MemoryRef
from palladion.language.refs import MemorySpace as MemorySpace
from palladion.language.semaphores import DeviceIdType as DeviceIdType
from palladion.language.semaphores import semaphore as semaphore
from palladion.language.semaphores import semaphore_read as semaphore_read
from palladion.language.semaphores import semaphore_signal as semaphore_signal
from palladion.language.semaphores import semaphore_wait as semaphore_wait
from palladion.language.unbuilt import unbuilt as _unbuilt

dslice = ds
ANY = MemorySpace.ANY
HOST = _jax.memory.Space.Host
enable_debug_checks = config.state("debug_checks")
enable_poison_buffers = config.state("poison_buffers")

from palladion import cpu as cpu  # noqa: E402
from palladion import fuser as fuser  # noqa: E402 - the fuser and the dialects stand on the language
from palladion import mosaic_gpu as mosaic_gpu  # noqa: E402
from palladion import tpu as tpu  # noqa: E402
from palladion import triton as triton  # noqa: E402

__all__ = [
    "ANY",
    "BlockDim",
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "Buffered",
    "CompileReport",
    "CompilerParams",
    "CostEstimate",
    "DeviceIdType",
    "EagerParams",
    "Element",
    "GridSpec",
    "HOST",
    "Indirect",
    "KernelCheckError",
    "MemoryRef",
    "MemorySpace",
    "PalladionWarning",
    "RevisitMode",
    "Slice",
    "Squeezed",
    "TargetNotBuilt",
    "UnsupportedPrimitive",
    "align_to",
    "broadcast_to",
    "cdiv",
    "compile",
    "config",
    "core_map",
    "cpu",
    "debug_check",
    "debug_print",
    "delay",
    "ds",
    "dslice",
    "empty",
    "empty_like",
    "empty_ref_like",
    "enable_debug_checks",
    "enable_poison_buffers",
    "estimate_cost",
    "fuser",
    "get_global",
    "kernel",
    "loop",
    "lower_as_mlir",
    "mosaic_gpu",
    "multiple_of",
    "next_power_of_2",
    "no_block_spec",
    "num_programs",
    "pallas_call",
    "pallas_call_p",
    "pallas_export_experimental",
    "program_id",
    "run_scoped",
    "run_state",
    "semaphore",
    "semaphore_read",
    "semaphore_signal",
    "semaphore_wait",
    "squeezed",
    "strides_from_shape",
    "tpu",
    "triton",
    "when",
    "with_scoped",
]

__getattr__ = _unbuilt(
    __name__,
    "pl",
    "it needs a simulated machine or a compiler, which are later work",
    "select_ref",
    __all__,
)
