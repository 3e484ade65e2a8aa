"""The cores of a TPU chip as a mesh, for `pl.kernel` and `pl.core_map`, and how they find each other.

Source: public documentation, "Pallas Core-specific Programming" and the API reference of Pallas TPU.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

from palladion.errors import mistake
from palladion.language import frames, ops
from palladion.language.fields import check_fields, integer, text
from palladion.language.refs import MemorySpace
from palladion.language.semaphores import one_semaphore, semaphore_signal, semaphore_wait
from palladion.language.tpu.info import get_tpu_info, is_tpu_device
from palladion.language.tpu.params import PARALLEL, CoreType, GridDimensionSemantics

__all__ = ["TensorCoreMesh", "core_barrier", "run_on_first_core"]


def _cores_here() -> int:
    return get_tpu_info().num_cores if is_tpu_device() else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorCoreMesh:
    """The TensorCores of a device, as one named axis.

        mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

        @pl.kernel(out_type=x, mesh=mesh, scratch_types=[pltpu.SemaphoreType.DMA])
        def half_each(x_ref, o_ref, sem):
            rows = pl.ds(lax.axis_index("core") * 8, 8)
            pltpu.async_copy(x_ref.at[rows], o_ref.at[rows], sem).wait()

    Arguments:
      axis_name: of the axis, for `lax.axis_index` and device ids.
      num_cores: how many cores; default: those of the current device (1 where that is no TPU).

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    axis_name: str
    num_cores: int = dataclasses.field(default_factory=_cores_here)

    def __post_init__(self) -> None:
        checks = {"axis_name": text(), "num_cores": integer(1, "number of cores")}
        check_fields(self, "pltpu.TensorCoreMesh", checks)

    @property
    def shape(self) -> Mapping[str, int]:
        """{axis name: size}."""
        return collections.OrderedDict({self.axis_name: self.num_cores})

    @property
    def core_type(self) -> CoreType:
        return CoreType.TC

    @property
    def default_memory_space(self) -> Any:
        """Where operands of a kernel on this mesh are: left in place, for copies to fetch."""
        return MemorySpace.ANY

    @property
    def dimension_semantics(self) -> list[GridDimensionSemantics]:
        return [PARALLEL]


def _axis(function: str, core_axis_name: str) -> int:
    """The size of a core axis of the kernel.

    Raises:
      ValueError: outside a kernel, or the kernel's mesh has no such axis.
    """
    cores = frames.required(function).cores
    if core_axis_name not in cores:
        names = ", ".join(map(repr, cores)) or "none: it runs on a grid"
        raise mistake(
            ValueError,
            f"{function}: {core_axis_name!r} is not an axis of the kernel's core mesh.",
            axes=names,
            hint="pl.kernel(…, mesh=pltpu.TensorCoreMesh(axis_name='core')) has the axis 'core'",
        )
    return cores[core_axis_name]


def run_on_first_core(core_axis_name: str) -> Callable[[Callable[[], None]], None]:
    """Decorator: run a function without parameters, for its effects, on core 0 only.

    Arguments:
      core_axis_name: the axis of the kernel's `TensorCoreMesh`.

    Raises:
      ValueError: outside a kernel, or no such axis.
    """
    size = _axis("pltpu.run_on_first_core", core_axis_name)
    if size == 1:
        return lambda body: ops.when(True)(body)
    return ops.when(lax.axis_index(core_axis_name) == 0)


def core_barrier(sem: Any, *, core_axis_name: str) -> None:
    """Wait until all cores have come here: each signals `sem` on every other one, and waits for as many signals.

    Arguments:
      sem: a regular semaphore of shape (), 0 on every core.
      core_axis_name: the axis of the kernel's `TensorCoreMesh`.

    Raises:
      TypeError, ValueError: as `pl.semaphore_signal`; no such axis.
    """
    size = _axis("pltpu.core_barrier", core_axis_name)
    one_semaphore("pltpu.core_barrier", sem, "signal")
    here: jax.Array = lax.axis_index(core_axis_name)
    for other in range(size if size > 1 else 0):

        @ops.when(here != other)
        def _(other=other):
            semaphore_signal(sem, 1, device_id={core_axis_name: other})

    if size > 1:
        semaphore_wait(sem, size - 1)
