"""The semaphores of a TPU: `pltpu.SemaphoreType` and the barrier semaphore.

A regular semaphore is a counter that cores signal; a DMA semaphore counts the bytes that copies have moved; a
barrier semaphore belongs to the program rather than to one call, so that a kernel may signal a device whose own call
has not started yet. Which barrier semaphore that is, `pltpu.CompilerParams(collective_id=…)` says.

Equation:

    get_barrier_semaphore  no operands    params: tag (None, or what the user gave)    gives a barrier semaphore's Ref

Source: public documentation of Pallas TPU, "Distributed Computing in Pallas for TPUs".
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Any

from palladion import jaxlink
from palladion.language import frames
from palladion.language import semaphores as generic
from palladion.language.refs import KernelRef, MemoryRef, memory_ref
from palladion.language.tpu.memory import SEMAPHORE
from palladion.rules import only_on

__all__ = ["SemaphoreType", "dma_semaphore", "get_barrier_semaphore", "get_barrier_semaphore_p"]


class dma_semaphore(generic.semaphore_dtype):
    """A counter of bytes that copies have moved."""


DMA = generic.SemaphoreDType("dma_sem", dma_semaphore)


class SemaphoreType(enum.Enum):
    """Kinds of semaphore, for `scratch_shapes` and `pl.run_scoped`.

    `SemaphoreType.DMA` is one semaphore; called, `SemaphoreType.DMA((2,))`, it is an array of them.
    """

    REGULAR = "regular"
    DMA = "dma"
    BARRIER = "barrier"

    @property
    def dtype(self) -> generic.SemaphoreDType:
        """The dtype of such a Ref."""
        return _DTYPES[self]

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def __call__(self, shape: Sequence[int]) -> MemoryRef:
        """An array of semaphores of this kind.

        Raises:
          TypeError, ValueError: a dimension is not a non-negative integer.
        """
        return memory_ref(SEMAPHORE, shape, self.dtype)

    def get_array_aval(self) -> Any:
        """The type of one semaphore as an array of shape ()."""
        return self(()).inner_aval

    def get_ref_aval(self, label: str = "scratch") -> KernelRef:
        """The abstract Ref that a kernel sees."""
        return self(()).get_ref_aval(label)


_DTYPES = {SemaphoreType.REGULAR: generic.REGULAR, SemaphoreType.DMA: DMA, SemaphoreType.BARRIER: generic.BARRIER}

get_barrier_semaphore_p = jaxlink.Primitive("get_barrier_semaphore")
get_barrier_semaphore_p.ref_allocating = True  # to JAX: a Ref that is no argument of the kernel


@get_barrier_semaphore_p.def_effectful_abstract_eval
def _barrier_type(*, tag):
    return SemaphoreType.BARRIER.get_ref_aval("the barrier semaphore"), {generic.communication}


only_on("the simulated TPU", get_barrier_semaphore_p)


def get_barrier_semaphore(tag: Hashable | None = None) -> Any:
    """The Ref of the barrier semaphore that calls with this kernel's `collective_id` share on every device.

    Kernels that communicate meet on it first: signal each partner, then wait for as many signals. It must be back at 0
    when the kernel ends.

    Arguments:
      tag: picks one of several, where a kernel needs more than one.

    Raises:
      ValueError: outside a kernel.
    """
    frames.required("pltpu.get_barrier_semaphore")
    return get_barrier_semaphore_p.bind(tag=tag)
