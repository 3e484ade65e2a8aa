"""The semaphores of a GPU: counters in GMEM, which blocks and devices signal.

`plgpu.SemaphoreType.REGULAR` is the type of one, for `scratch_shapes` and `pl.get_global`; `pl.semaphore_signal`,
`pl.semaphore_wait` and `pl.semaphore_read` work on it. Threads of one block meet at a `plgpu.Barrier`, blocks of a
cluster at a `plgpu.ClusterBarrier`.

Equation (operands are the leaves of `Multi(sem, value)`):

    semaphore_signal_multicast    params: tree, collective_axes

Source: the Pallas Mosaic GPU reference, "Semaphore" and "Global allocation with pl.get_global".
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from palladion.errors import TargetNotBuilt, kind_of, mistake
from palladion.language import frames
from palladion.language import kernel as kernels
from palladion.language import semaphores as generic
from palladion.language.gpu.arguments import device_axes, print_operands
from palladion.language.gpu.memory import GMEM, GPUMemoryRef
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.refs import RefView, memory_ref

__all__ = [
    "Semaphore",
    "SemaphoreSignal",
    "SemaphoreType",
    "alloc_semaphore",
    "semaphore_signal",
    "semaphore_signal_multicast",
    "semaphore_signal_parallel",
    "semaphore_wait",
]


class SemaphoreType(enum.Enum):
    """Kinds of semaphore, for `scratch_shapes` and `pl.get_global`. `Semaphore` is the older name.

    `SemaphoreType.REGULAR` is one semaphore, called, `SemaphoreType.REGULAR((2,))`, it is an array of them. It begins
    at 0. A scratch semaphore is the same for all blocks of the grid.
    """

    REGULAR = "regular"
    BARRIER = "barrier"

    @property
    def dtype(self) -> generic.SemaphoreDType:
        """The dtype of such a Ref."""
        return generic.REGULAR if self is SemaphoreType.REGULAR else generic.BARRIER

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def __call__(self, shape: Sequence[int]) -> GPUMemoryRef:
        """An array of semaphores of this kind.

        Arguments:
          shape: ints.

        Raises:
          TypeError, ValueError: a dimension is not a non-negative integer, or there are more than 2**20.
        """
        aval = memory_ref(GMEM, shape, self.dtype).inner_aval
        if math.prod(aval.shape) > _MOST:
            headline = f"An array of semaphores of shape {aval.shape}: there can be at most {_MOST:,} in one."
            raise mistake(ValueError, headline, hint="shape=(2,): two semaphores")
        return GPUMemoryRef(aval, GMEM)

    def get_array_aval(self) -> Any:
        """The type of one semaphore as an array of shape ()."""
        return self(()).inner_aval

    def get_ref_aval(self, label: str = "scratch") -> Any:
        """The abstract Ref that a kernel sees."""
        return self(()).get_ref_aval(label)


Semaphore = SemaphoreType
_MOST = 1 << 20


class Multi(NamedTuple):
    """The operands of `semaphore_signal_multicast`."""

    sem: RefView
    value: Any


semaphore_signal_multicast_p = gpu_primitive("semaphore_signal_multicast", writes=["sem"])
print_operands(semaphore_signal_multicast_p)


# --- what kernels call ------------------------------------------------------------------------------------------------
def _check_scope(name: str, memory_scope: Any) -> None:
    if memory_scope not in ("sys", "gpu"):
        headline = f"The memory_scope of {name} is {kind_of(memory_scope)}."
        raise mistake(ValueError, headline, hint="'sys', for other devices too, or 'gpu', for this one")


def semaphore_signal(
    semaphore: Any,
    inc: int | jax.Array = 1,
    *,
    device_id: Any = None,
    memory_scope: Literal["sys", "gpu"] = "sys",
) -> None:
    """Add to a semaphore, as `pl.semaphore_signal`; the thread's earlier effects are complete before.

    Arguments:
      semaphore: a semaphore Ref of shape ().
      inc: by how much, an integer.
      device_id: the device whose semaphore it is: an integer (its number in a mesh of one axis), a tuple with an index
        for each axis or a dict {axis name: index}; None: this device.
      memory_scope: for whom the earlier effects are complete: "sys", all devices, or "gpu", this device.

    Raises:
      TypeError, ValueError: as `pl.semaphore_signal`; another scope.

    Reference: "Semaphore".
    """
    _check_scope("plgpu.semaphore_signal", memory_scope)
    generic.semaphore_signal(semaphore, inc, device_id=device_id)


def semaphore_wait(
    semaphore: Any,
    value: int | jax.Array = 1,
    *,
    decrement: bool = True,
    memory_scope: Literal["sys", "gpu"] = "sys",
) -> None:
    """Wait until a semaphore holds at least `value`, then take `value` off it, as `pl.semaphore_wait`.

    Arguments:
      semaphore: a semaphore Ref of shape ().
      value: an integer.
      decrement: False leaves the counter as it is.
      memory_scope: whose effects are known after it: "sys", of all devices, or "gpu", of this device.

    Raises:
      TypeError, ValueError: as `pl.semaphore_wait`; another scope.

    Reference: "Semaphore".
    """
    _check_scope("plgpu.semaphore_wait", memory_scope)
    generic.semaphore_wait(semaphore, value, decrement=decrement)


def semaphore_signal_multicast(semaphore: Any, value: int | jax.Array = 1, *, collective_axes: Any) -> None:
    """Add to the semaphore of this name on all devices along mesh axes, this one included.

    Arguments:
      semaphore: a semaphore Ref of shape ().
      value: by how much, an integer.
      collective_axes: a name or a tuple of names: all axes of the mesh of the `shard_map` around the call.

    Raises:
      TypeError: not a semaphore, or a number that is none. ValueError: an array of semaphores; axes that are not
        those of the mesh, or not all of them.
    """
    name = "plgpu.semaphore_signal_multicast"
    view = generic.one_semaphore(name, semaphore, "signal")
    axes = device_axes(name, collective_axes)
    around = jax.sharding.get_abstract_mesh()
    missing = [a for a in around.axis_names if a not in axes] if around.manual_axes else []
    if missing:
        raise mistake(
            ValueError,
            f"{name} signals all devices: collective_axes must name every axis of the mesh, and "
            f"{', '.join(map(repr, missing))} {'is' if len(missing) == 1 else 'are'} missing.",
            hint="plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(sem, device_id=…), …) signals some of them",
        )
    operands = Multi(view, generic.int32(name, "value", value))
    bind(name, semaphore_signal_multicast_p, operands, collective_axes=axes)


@dataclasses.dataclass(frozen=True, init=False)
class SemaphoreSignal:
    """One signal of `plgpu.semaphore_signal_parallel`.

    Arguments:
      ref: a semaphore Ref of shape ().
      device_id: the device whose semaphore it is, as in `plgpu.semaphore_signal`; None: this device.
      inc: by how much, an integer.
    """

    ref: Any
    device_id: Any
    inc: int | jax.Array = 1

    def __init__(self, ref: Any, *, device_id: Any, inc: int | jax.Array = 1) -> None:
        for name, value in (("ref", ref), ("device_id", device_id), ("inc", inc)):
            object.__setattr__(self, name, value)


def semaphore_signal_parallel(*signals: SemaphoreSignal) -> None:
    """Make several signals, in no order among them; the thread's earlier effects are complete before each.

    Arguments:
      *signals: what to signal.

    Raises:
      TypeError, ValueError: something else than a `SemaphoreSignal`; as `plgpu.semaphore_signal`.
    """
    name = "plgpu.semaphore_signal_parallel"
    frames.required(name)
    for signal in signals:
        if not isinstance(signal, SemaphoreSignal):
            hint = "plgpu.SemaphoreSignal(sem, device_id=1)"
            raise mistake(TypeError, f"{name} takes plgpu.SemaphoreSignal objects, not {kind_of(signal)}.", hint=hint)
    for signal in signals:
        generic.semaphore_signal(signal.ref, signal.inc, device_id=signal.device_id)


def alloc_semaphore(shape: Sequence[int] = ()) -> Any:
    """A Ref of new semaphores at 0, which all blocks of the call share: `pl.get_global(SemaphoreType.REGULAR(shape))`.

    Arguments:
      shape: ints; () is one semaphore.

    Raises:
      TargetNotBuilt: outside a kernel, where the semaphores would outlive the call.
      TypeError, ValueError: a dimension is not a non-negative integer.
    """
    if frames.current() is None:
        raise TargetNotBuilt(
            "plgpu.alloc_semaphore outside a kernel (semaphores that outlive a call) is later work; in a kernel it "
            "gives semaphores of the call, as does scratch_shapes=[plgpu.SemaphoreType.REGULAR]."
        )
    return kernels.get_global(SemaphoreType.REGULAR(shape))
