"""`plgpu.BlockSpec`: a block that a pipeline copies to shared memory, and how it is stored there."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from palladion.language import blocks
from palladion.language.fields import Check, check_fields, integer, member
from palladion.language.gpu.memory import GMEM, storage_transforms, stored_shape
from palladion.language.gpu.params import OOBFillMode
from palladion.language.gpu.refs import GPURef, Storage

__all__ = ["BlockSpec"]


def _axis_names(value: Any) -> tuple[Hashable, ...] | None:
    if value is None:
        return None
    names = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    hash(names)
    return names


_CHECKS: dict[str, Check] = {
    "transforms": Check(
        "a tuple of transforms", lambda transforms: storage_transforms(transforms, "a plgpu.BlockSpec")
    ),
    "delay_release": integer(0, "number of steps"),
    "collective_axes": Check("a tuple of axis names or None", _axis_names),
    "oob_fill_mode": member(OOBFillMode, "plgpu.OOBFillMode"),
}


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What a `plgpu.BlockSpec` adds to the mapping of an operand of `pallas_call`; fields as there."""

    transforms: tuple[Any, ...]
    delay_release: int
    collective_axes: tuple[Hashable, ...] | None
    oob_fill_mode: OOBFillMode

    def ref_aval(self, inner_aval: Any, memory_space: Any, label: str) -> GPURef:
        """The abstract Ref of a block.

        Raises:
          ValueError: a block that cannot be stored so.
        """
        if memory_space is not GMEM:
            stored_shape(inner_aval.shape, inner_aval.dtype, self.transforms, f"a block of {label}")
        return GPURef(inner_aval, memory_space, label=label, storage=Storage(self.transforms))


@dataclasses.dataclass
class BlockSpec(blocks.BlockSpec):
    """Which block of an operand each step of a pipeline sees, and how it lies in shared memory.

    Arguments:
      block_shape, index_map, pipeline_mode, memory_space: as in `pl.BlockSpec`.
      transforms: `plgpu.TilingTransform` and `plgpu.SwizzleTransform`, in the order of application.
      delay_release: steps for which a block stays valid after its own (an asynchronous matrix product may
        still read it); each needs one more buffer.
      collective_axes: cluster axes whose blocks need the same data and load it once, by multicast.
      oob_fill_mode: what is read outside the operand.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    transforms: Sequence[Any] = ()
    delay_release: int = 0
    collective_axes: tuple[Hashable, ...] | None = None
    oob_fill_mode: OOBFillMode = OOBFillMode.ZEROS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "plgpu.BlockSpec", _CHECKS)

    @property
    def block_options(self) -> BlockOptions:
        """What it says beyond a `pl.BlockSpec`."""
        return BlockOptions(tuple(self.transforms), self.delay_release, self.collective_axes, self.oob_fill_mode)
