"""`plgpu`, the Mosaic GPU dialect: `from palladion import mosaic_gpu as plgpu`.

Here are its memory spaces and storage transforms, its BlockSpec, and the parameters of its compiler and of
its simulated machine. Operations (copies, barriers, matrix products) come with the simulated GPUs and the
compiler; asking for one says so.
"""

from palladion.language.gpu.block_spec import BlockSpec
from palladion.language.gpu.memory import (
    GMEM,
    REGS,
    SMEM,
    TMEM,
    MemorySpace,
    SwizzleTransform,
    TileTransform,
    TilingTransform,
)
from palladion.language.gpu.mode import force_gpu_interpret_mode, set_gpu_interpret_mode
from palladion.language.gpu.params import (
    CompilerParams,
    InterpretGPUParams,
    LoweringSemantics,
    OOBFillMode,
    TraceScope,
)
from palladion.language.interpret_params import LoggingMode
from palladion.language.unbuilt import unbuilt

__all__ = [
    "BlockSpec",
    "CompilerParams",
    "GMEM",
    "InterpretGPUParams",
    "LoggingMode",
    "LoweringSemantics",
    "MemorySpace",
    "OOBFillMode",
    "REGS",
    "SMEM",
    "SwizzleTransform",
    "TMEM",
    "TileTransform",
    "TilingTransform",
    "TraceScope",
    "force_gpu_interpret_mode",
    "set_gpu_interpret_mode",
]

__getattr__ = unbuilt(
    __name__,
    "plgpu",
    "simulated GPUs and the Mosaic GPU compiler are later work",
    # The last line: older spellings that the Mosaic GPU reference uses.
    """
    ACC Barrier ClusterBarrier CopyPartition Layout Mesh NDLoopInfo PeerMemRef PipelinePipeline RefType
    RefUnion Replicated SemaphoreSignal SemaphoreType ShapeDtypeStruct TMEMLayout Tiling Transform
    TryClusterCancelResult WGMMAAccumulatorRef WarpMesh alloc_semaphore as_torch_kernel
    async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem async_load_tmem
    async_prefetch async_store_smem async_store_tmem atomic_add atomic_and atomic_max atomic_min atomic_or
    atomic_xor barrier_arrive barrier_arrive_and_wait barrier_test barrier_wait broadcasted_iota cluster_ref
    commit_smem commit_smem_to_gmem_group commit_tmem copy_gmem_to_smem copy_smem_to_gmem
    dynamic_scheduling_loop emit_pipeline emit_pipeline_warp_specialized find_swizzle
    format_tcgen05_sparse_metadata griddepcontrol_launch_dependents griddepcontrol_wait im2col_ref inline_mgpu
    kernel layout_cast load max min mma multicast_ref multimem_load_reduce multimem_store nd_loop planar_snake
    print_layout prod query_cluster_cancel remote_ref semaphore_signal semaphore_signal_multicast
    semaphore_signal_parallel semaphore_wait set_max_registers store sum tcgen05_commit_arrive tcgen05_mma
    try_cluster_cancel wait_gmem_to_smem wait_load_tmem wait_smem_to_gmem warp_map wgmma
    wgmma_accumulator_load wgmma_wait TransposeTransform TryCancelResultRef peer_ref transpose_ref
    """,
    __all__,
)
