"""`pltriton`, the Triton dialect: `from palladion import triton as pltriton`.

Here are the parameters of its compiler, the compute capability of every GPU, the operations that mean something on
every target (masked loads and stores, atomics, products), and those for GPUs alone (inline assembly, thread barriers).
"""

from palladion.language.triton.asm import debug_barrier, elementwise_inline_asm
from palladion.language.triton.info import (
    GpuInfo,
    GpuVersion,
    get_gpu_info,
    get_gpu_info_from_version,
    is_gpu_device,
)
from palladion.language.triton.ops import (
    approx_tanh,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    dot,
    load,
    max_contiguous,
    store,
)
from palladion.language.triton.params import CUSTOM_CALL_TARGET_NAME, CompilerParams

__all__ = [
    "CUSTOM_CALL_TARGET_NAME",
    "CompilerParams",
    "GpuInfo",
    "GpuVersion",
    "approx_tanh",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "debug_barrier",
    "dot",
    "elementwise_inline_asm",
    "get_gpu_info",
    "get_gpu_info_from_version",
    "is_gpu_device",
    "load",
    "max_contiguous",
    "store",
]
