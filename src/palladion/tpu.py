"""`pltpu`, the TPU dialect: `from palladion import tpu as pltpu`.

Here are its memory spaces, the parameters of its compiler and of its simulated machine, scalar prefetch, the hardware
figures of every TPU, and its operations on plain arrays and Refs. Operations that only a machine gives a meaning to
(copies, semaphores, pipelines) come with the simulated TPU; asking for one says so.
"""

from palladion.language.interpret_params import LoggingMode
from palladion.language.tpu.grid_spec import PrefetchScalarGridSpec
from palladion.language.tpu.info import (
    ChipVersion,
    TpuInfo,
    get_tpu_info,
    get_tpu_info_for_chip,
    is_tpu_device,
)
from palladion.language.tpu.memory import CMEM, HBM, SEMAPHORE, SMEM, VMEM, VMEM_SHARED, MemorySpace
from palladion.language.tpu.mode import (
    force_tpu_interpret_mode,
    reset_tpu_interpret_mode_state,
    set_tpu_interpret_mode,
)
from palladion.language.tpu.ops import bitcast, load, reciprocal, roll, store
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
from palladion.language.unbuilt import unbuilt

__all__ = [
    "ARBITRARY",
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
    "PrefetchScalarGridSpec",
    "SEMAPHORE",
    "SMEM",
    "SUBCORE_PARALLEL",
    "SideEffectType",
    "Tiling",
    "TpuInfo",
    "VMEM",
    "VMEM_SHARED",
    "bitcast",
    "force_tpu_interpret_mode",
    "get_tpu_info",
    "get_tpu_info_for_chip",
    "is_tpu_device",
    "load",
    "reciprocal",
    "reset_tpu_interpret_mode_state",
    "roll",
    "set_tpu_interpret_mode",
    "store",
]

__getattr__ = unbuilt(
    __name__,
    "pltpu",
    "the simulated TPU and the Mosaic TPU compiler are later work",
    """
    ACC BufferType BufferedRef PipelineStep SemaphoreType TensorCoreMesh annotate async_copy async_remote_copy
    conv core core_barrier dma_semaphore einshape emit_pipeline emit_pipeline_with_allocations
    emit_pipeline_with_async_prefetch get_barrier_semaphore has_memory_space join_bits make_async_copy
    make_async_remote_copy matmul_acc_lhs matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs
    pack_elementwise pack_fp6 prng_random_bits prng_seed run_on_first_core sample_block
    split_bits stateful_bernoulli stateful_bits stateful_normal stateful_uniform stochastic_round
    sync_copy to_pallas_key touch trace_value unpack_elementwise unpack_fp6 with_memory_space_constraint
    """,
    __all__,
)
