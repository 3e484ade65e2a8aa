"""The Refs of a GPU's memories, and the dtype of barriers.

A Ref in SMEM knows how its buffer lies in memory, one in TMEM whether its elements share columns; both are part of its
type (`GPURef.storage`), so that operations can check them. A barrier is a Ref in SMEM of an extended dtype, which says
how many arrivals complete it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion import jaxlink
from palladion.errors import mistake
from palladion.language.dtypes import SemaphoreDType, semaphore_dtype
from palladion.language.indices import label_of
from palladion.language.refs import KernelRef


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a buffer is stored.

    Attributes:
      transforms: of a buffer in SMEM or GMEM, in the order of application.
      packed: of a buffer in TMEM: whether elements narrower than 32 bits share a column; else None.
      collective: of a buffer in TMEM: whether it spans both blocks of a collective matrix product; else None.
      layout: of a buffer in TMEM: a `plgpu.TMEMLayout`, or None for the usual one; of an accumulator: `Layout.WGMMA`,
        which says that it is one.
      union: of a part of a `RefUnion`: (label of the union, number of the alternative); else None.
      init: of an accumulator: whether it begins with given values instead of zeros.
    """

    transforms: tuple[Any, ...] = ()
    packed: bool | None = None
    collective: bool | None = None
    layout: Any = None
    union: tuple[str, int] | None = None
    init: bool = False


class GPURef(KernelRef):
    """A `KernelRef` that knows how its buffer is stored."""

    __slots__ = ("storage",)

    def __init__(
        self,
        inner_aval: Any,
        memory_space: Any = None,
        kind: Any = None,
        *,
        label: str = "a Ref",
        storage: Storage = Storage(),
    ):
        super().__init__(inner_aval, memory_space, kind, label=label)
        self.storage = storage

    def update(self, inner_aval: Any = None, memory_space: Any = None, kind: Any = None) -> GPURef:
        return GPURef(
            self.inner_aval if inner_aval is None else inner_aval,
            self.memory_space if memory_space is None else memory_space,
            self.kind if kind is None else kind,
            label=self.label,
            storage=self.storage,
        )

    def check_access(self, target: Any, verb: str) -> None:
        """Refuse to read or write by brackets what has operations of its own.

        Raises:
          TypeError: `target`, this Ref or a view of it, is a barrier, or in TMEM.
        """
        label = label_of(target)
        if is_barrier(self):
            hint = "plgpu.barrier_arrive(barrier), plgpu.barrier_wait(barrier); barriers.at[i] picks one"
            raise mistake(TypeError, f"Cannot {verb} {label}: it is a barrier, not data.", hint=hint)
        if getattr(self.memory_space, "name", None) == "TMEM":
            headline = f"Cannot {verb} {label} by brackets: it is in TMEM, whose loads and stores are asynchronous."
            hint = "plgpu.async_load_tmem(ref), then plgpu.wait_load_tmem() before it is overwritten"
            if verb == "write":
                hint = "plgpu.async_store_tmem(ref, value), then plgpu.commit_tmem()"
            raise mistake(TypeError, headline, hint=hint)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GPURef)
            and self.inner_aval == other.inner_aval
            and self.memory_space == other.memory_space
            and self.storage == other.storage
        )

    def __hash__(self) -> int:
        return hash((GPURef, self.inner_aval, self.memory_space, self.storage))


jaxlink.register_ref_type(GPURef)


def storage_of(ref: Any) -> Storage:
    """How the buffer behind a Ref, a view, or the type of one, is stored."""
    while isinstance(ref, jaxlink.TransformedRef):
        ref = ref.ref
    return getattr(getattr(ref, "aval", ref), "storage", Storage())


def space_of(ref: Any) -> Any:
    """The memory space of a Ref, a view, or the type of one."""
    while isinstance(ref, jaxlink.TransformedRef):
        ref = ref.ref
    return getattr(getattr(ref, "aval", ref), "memory_space", None)


class barrier_dtype(semaphore_dtype):
    """What all barriers are, for `jnp.issubdtype(ref.dtype, …)`."""


class BarrierDType(SemaphoreDType):
    """The dtype of a barrier's Ref.

    Attributes:
      num_arrivals: how many arrivals complete it (of a cluster barrier: from each block).
      orders_tensor_core: whether it orders operations of the tensor core, too.
      collective_axes: of a cluster barrier: the cluster axes over which arrivals are counted; else None. Each entry
        is a tuple of names.
      leader_tracked: of a cluster barrier: whether only the first block's counts.
    """

    advice = "a barrier: plgpu.barrier_arrive(barrier) and plgpu.barrier_wait(barrier)"  # to who takes it for another

    def __init__(
        self,
        num_arrivals: int = 1,
        orders_tensor_core: bool = False,
        collective_axes: tuple[Any, ...] | None = None,
        leader_tracked: bool = False,
    ) -> None:
        self.num_arrivals, self.orders_tensor_core = num_arrivals, orders_tensor_core
        self.collective_axes, self.leader_tracked = collective_axes, leader_tracked
        details = [str(num_arrivals)] if num_arrivals != 1 else []
        details += [",".join("/".join(map(str, a)) for a in collective_axes)] if collective_axes is not None else []
        details += ["tc"] if orders_tensor_core else []
        details += ["leader"] if leader_tracked else []
        name = "cluster_barrier" if collective_axes is not None else "barrier"
        super().__init__(f"{name}({' '.join(details)})" if details else name, barrier_dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BarrierDType) and self.name == other.name

    def __hash__(self) -> int:
        return hash((BarrierDType, self.name))


def is_barrier(x: Any) -> bool:
    """Whether a Ref or view is a barrier, or an array of them."""
    return isinstance(getattr(x, "dtype", None), BarrierDType)


def as_storage(ref: Any, label: str) -> Any:
    """The abstract Ref of a `GPUMemoryRef`."""
    storage = Storage(tuple(ref.transforms), ref.packed, ref.collective, getattr(ref, "layout", None))
    return GPURef(ref.inner_aval, ref.memory_space, label=label, storage=storage)
