"""The memories of a TPU, as operands and scratch shapes name them.

A TensorCore computes on what is in its VMEM (vectors) and SMEM (scalars); blocks come from HBM by DMA. Some
chips have a further on-chip memory between HBM and VMEM (CMEM: v4 and v4i). VMEM_SHARED is memory that the
subcores of a SparseCore share, SEMAPHORE holds the counters that DMAs and cores signal.
Source: the Pallas TPU documentation; tutorial sections 1 and 4.1.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from palladion.language.refs import MemoryRef, memory_ref

__all__ = ["CMEM", "HBM", "MemorySpace", "SEMAPHORE", "SMEM", "VMEM", "VMEM_SHARED"]


class MemorySpace(enum.Enum):
    """A memory of a TPU. A member is callable: `pltpu.VMEM((8, 128), jnp.float32)` is a scratch shape."""

    HBM = "hbm"
    CMEM = "cmem"
    VMEM = "vmem"
    SMEM = "smem"
    VMEM_SHARED = "vmem_shared"
    SEMAPHORE = "semaphore_mem"

    def __str__(self) -> str:  # a jaxpr shows a ref as Ref<vmem>{f32[8,128]}
        return self.value

    def __repr__(self) -> str:
        return self.name

    def __call__(self, shape: Sequence[int], dtype: Any) -> MemoryRef:
        """The type of a buffer in this memory, for `scratch_shapes`, `run_scoped` and `out_shape`.

        Arguments:
          shape: ints, one for each dimension.
          dtype: anything that `jnp.dtype` takes.

        Raises:
          TypeError, ValueError: a dimension is not a non-negative integer, or the dtype is 64 bits with x64
            off.
        """
        return memory_ref(self, shape, dtype)

    def like(self, array: Any) -> MemoryRef:
        """The type of a buffer in this memory with the shape and dtype of `array` (or a ShapeDtypeStruct)."""
        return memory_ref(self, array.shape, array.dtype)


VMEM = MemorySpace.VMEM
VMEM_SHARED = MemorySpace.VMEM_SHARED
SMEM = MemorySpace.SMEM
CMEM = MemorySpace.CMEM
SEMAPHORE = MemorySpace.SEMAPHORE
HBM = MemorySpace.HBM
