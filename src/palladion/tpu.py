"""`pltpu`, the TPU dialect: `from palladion import tpu as pltpu`.

Here are its memory spaces, the parameters of its compiler and of its simulated machine, scalar prefetch, the hardware
figures of every TPU, its operations on plain arrays and Refs, and those that need a machine: copies, semaphores, cores.
"""

from palladion.language.interpret_params import LoggingMode
from palladion.language.tpu.buffered import BufferedRef, BufferType
from palladion.language.tpu.dma import async_copy, async_remote_copy, make_async_copy, make_async_remote_copy, sync_copy
from palladion.language.tpu.einshape import einshape
from palladion.language.tpu.grid_spec import PrefetchScalarGridSpec
from palladion.language.tpu.hints import has_memory_space, touch, trace_value, with_memory_space_constraint
from palladion.language.tpu.info import (
    ChipVersion,
    TpuInfo,
    get_tpu_info,
    get_tpu_info_for_chip,
    is_tpu_device,
)
from palladion.language.tpu.memory import CMEM, HBM, SEMAPHORE, SMEM, VMEM, VMEM_SHARED, MemorySpace
from palladion.language.tpu.mesh import TensorCoreMesh, core_barrier, run_on_first_core
from palladion.language.tpu.mode import (
    force_tpu_interpret_mode,
    reset_tpu_interpret_mode_state,
    set_tpu_interpret_mode,
)
from palladion.language.tpu.ops import annotate, bitcast, conv, load, reciprocal, roll, store
from palladion.language.tpu.pack import (
    join_bits,
    pack_elementwise,
    pack_fp6,
    split_bits,
    stochastic_round,
    unpack_elementwise,
    unpack_fp6,
)
from palladion.language.tpu.params import (
    ARBITRARY,
    CORE_PARALLEL,
    PARALLEL,
    SUBCORE_PARALLEL,
    CompilerParams,
    CoreType,
    GridDimensionSemantics,
    InterpretParams,
    LoweringException,
    OptLevel,
    SideEffectType,
    Tiling,
)
from palladion.language.tpu.pipeline import (
    emit_pipeline,
    emit_pipeline_with_allocations,
    emit_pipeline_with_async_prefetch,
)
from palladion.language.tpu.random import (
    prng_random_bits,
    prng_seed,
    sample_block,
    stateful_bernoulli,
    stateful_bits,
    stateful_normal,
    stateful_uniform,
    to_pallas_key,
)
from palladion.language.tpu.schedule import PipelineStep
from palladion.language.tpu.semaphores import SemaphoreType, dma_semaphore, get_barrier_semaphore
from palladion.language.unbuilt import unbuilt

__all__ = [
    "ARBITRARY",
    "BufferType",
    "BufferedRef",
    "CMEM",
    "CORE_PARALLEL",
    "ChipVersion",
    "CompilerParams",
    "CoreType",
    "GridDimensionSemantics",
    "HBM",
    "InterpretParams",
    "LoggingMode",
    "LoweringException",
    "MemorySpace",
    "OptLevel",
    "PARALLEL",
    "PipelineStep",
    "PrefetchScalarGridSpec",
    "SEMAPHORE",
    "SMEM",
    "SUBCORE_PARALLEL",
    "SemaphoreType",
    "SideEffectType",
    "TensorCoreMesh",
    "Tiling",
    "TpuInfo",
    "VMEM",
    "VMEM_SHARED",
    "annotate",
    "async_copy",
    "async_remote_copy",
    "bitcast",
    "conv",
    "core_barrier",
    "dma_semaphore",
    "einshape",
    "emit_pipeline",
    "emit_pipeline_with_allocations",
    "emit_pipeline_with_async_prefetch",
    "force_tpu_interpret_mode",
    "get_barrier_semaphore",
    "get_tpu_info",
    "get_tpu_info_for_chip",
    "has_memory_space",
    "is_tpu_device",
    "join_bits",
    "load",
    "make_async_copy",
    "make_async_remote_copy",
    "pack_elementwise",
    "pack_fp6",
    "prng_random_bits",
    "prng_seed",
    "reciprocal",
    "reset_tpu_interpret_mode_state",
    "roll",
    "run_on_first_core",
    "sample_block",
    "set_tpu_interpret_mode",
    "split_bits",
    "stateful_bernoulli",
    "stateful_bits",
    "stateful_normal",
    "stateful_uniform",
    "stochastic_round",
    "store",
    "sync_copy",
    "to_pallas_key",
    "touch",
    "trace_value",
    "unpack_elementwise",
    "unpack_fp6",
    "with_memory_space_constraint",
]

__getattr__ = unbuilt(
    __name__,
    "pltpu",
    "explicit matrix-unit operations and the Mosaic TPU compiler are later work",
    """
    ACC core matmul_acc_lhs matmul_lhs_fifo matmul_pop matmul_pop_fifo
    matmul_push_rhs
    """,
    __all__,
)
