"""The memories of a GPU, and how a shared-memory buffer may lie in its memory.

GMEM is the device's global memory, SMEM the shared memory of a block, TMEM the tensor memory of Blackwell
(where `tcgen05` matrix products accumulate), REGS the registers of a warpgroup. Buffers that tensor cores and
TMA copies use are stored tiled and swizzled: transforms say so, and leave indexing as it is.
Source: the Pallas Mosaic GPU reference; PTX ISA, sections on the tensor map, on `wgmma` and on tensor memory.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from palladion.errors import explain
from palladion.language.fields import Check, check_fields, integer, sequence_of
from palladion.language.refs import MemoryRef, memory_ref

__all__ = [
    "GMEM",
    "GPUMemoryRef",
    "MemorySpace",
    "REGS",
    "SMEM",
    "SwizzleTransform",
    "TMEM",
    "TileTransform",
    "TilingTransform",
]


@dataclasses.dataclass(frozen=True)
class TilingTransform:
    """Store a buffer as a row-major array of row-major tiles.

    A (128, 128) buffer with `TilingTransform((8, 64))` lies in memory as
    `x.reshape(16, 8, 2, 64).transpose(0, 2, 1, 3)`. `TileTransform` is the older name.

    Arguments:
      tiling: sizes of a tile, in elements, for the last dimensions of the buffer.

    Raises:
      TypeError, ValueError: a size is not a positive integer.
    """

    tiling: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.TilingTransform", _TILING_CHECKS)


_TILING_CHECKS: dict[str, Check] = {"tiling": sequence_of(integer(1), "tiled dimension")}

TileTransform = TilingTransform


@dataclasses.dataclass(frozen=True)
class SwizzleTransform:
    """Permute 16-byte pieces of a buffer, so that tensor cores read it without bank conflicts.

    Arguments:
      swizzle: width of the pattern in bytes: 128, 64, 32, or 16 for none. The last dimension of the tiling
        that goes with it is as wide.

    Raises:
      ValueError: another width.
    """

    swizzle: int

    def __post_init__(self) -> None:
        if self.swizzle not in (16, 32, 64, 128):
            raise ValueError(
                explain(
                    f"plgpu.SwizzleTransform: swizzle is 16, 32, 64 or 128 bytes, not {self.swizzle!r}.",
                    hint="128 for most buffers; the width is in bytes, that of a tile in elements",
                )
            )


def storage_transforms(transforms: Any, what: str) -> tuple[TilingTransform | SwizzleTransform, ...]:
    """The transforms as a tuple, checked; `what` they belong to is for the message.

    Raises:
      TypeError: they are not a sequence, or one of them is something else.
    """
    for layer in transforms if isinstance(transforms, (list, tuple)) else (transforms,):
        if not isinstance(layer, (TilingTransform, SwizzleTransform)):
            raise TypeError(
                explain(
                    f"A transform of {what} cannot be {layer!r}.",
                    hint="use a tuple of plgpu.TilingTransform and plgpu.SwizzleTransform",
                )
            )
    if not isinstance(transforms, (list, tuple)):
        raise TypeError(
            explain(f"The transforms of {what} are a tuple, not {transforms!r}.", hint=f"write ({transforms!r},)")
        )
    return tuple(transforms)


@dataclasses.dataclass(frozen=True)
class GPUMemoryRef(MemoryRef):
    """The type of a buffer in a GPU's memory.

    Arguments:
      inner_aval: the array type.
      memory_space: a `plgpu.MemorySpace`.
      transforms: how it is stored, outermost first (SMEM, GMEM).
      collective: whether it spans the two blocks of a collective matrix product; None outside TMEM.
      packed: whether elements narrower than 32 bits share a 32-bit column; None outside TMEM and for 32 bits.
    """

    transforms: tuple[Any, ...] = ()
    collective: bool | None = dataclasses.field(default=None, kw_only=True)
    packed: bool | None = dataclasses.field(default=None, kw_only=True)


class MemorySpace(enum.Enum):
    """A memory of a GPU. A member is callable: `plgpu.SMEM((64, 64), jnp.float16)` is a scratch shape."""

    REGS = "regs"
    SMEM = "smem"
    GMEM = "gmem"
    TMEM = "tmem"

    def __str__(self) -> str:  # a jaxpr shows a ref as Ref<smem>{f16[64,64]}
        return self.value

    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        transforms: Sequence[Any] = (),
        packed: bool | None = None,
        collective: bool | None = None,
    ) -> GPUMemoryRef:
        """The type of a buffer in this memory, for `scratch_shapes` and `run_scoped`.

        Arguments:
          shape: ints, one for each dimension. In TMEM, 64 or 128 rows (lanes), then columns; dimensions
            before them are a batch.
          dtype: anything that `jnp.dtype` takes.
          transforms: `TilingTransform` and `SwizzleTransform`, in the order of application. Not in TMEM.
          packed: TMEM only, and needed there for dtypes narrower than 32 bits: whether elements share a
            column.
          collective: TMEM only: the buffer spans the two blocks of a collective matrix product.

        Raises:
          TypeError, ValueError: a shape, dtype or option that this memory cannot have.
        """
        ref = memory_ref(self, shape, dtype)
        layers = storage_transforms(transforms, f"a {self} buffer")
        if self is MemorySpace.TMEM:
            _check_tmem(ref, layers, packed)
            collective = bool(collective)
        elif packed is not None or collective is not None:
            raise ValueError(f"packed and collective describe buffers in TMEM; this one is in {self.name}.")
        return GPUMemoryRef(ref.inner_aval, self, transforms=layers, collective=collective, packed=packed)

    def like(self, array: Any) -> GPUMemoryRef:
        """The type of a buffer in this memory with the shape and dtype of `array` (or a ShapeDtypeStruct)."""
        return self(array.shape, array.dtype)


def _check_tmem(ref: MemoryRef, transforms: tuple[Any, ...], packed: bool | None) -> None:
    shape = ref.shape
    if transforms:
        raise ValueError("A TMEM buffer has no transforms: its layout is the hardware's.")
    if len(shape) < 2 or shape[-2] not in (64, 128):
        raise ValueError(
            explain(
                f"A TMEM buffer has 64 or 128 rows and some columns, but its shape is {shape}.",
                hint="tensor memory has 128 lanes: use a shape such as (128, 256)",
            )
        )
    bits = jax.dtypes.itemsize_bits(ref.dtype)
    name = jnp.dtype(ref.dtype).name
    if bits > 32:
        raise ValueError(f"A TMEM buffer cannot hold {name}: a column is 32 bits wide.")
    if bits < 32 and packed is None:
        raise ValueError(
            explain(
                f"A TMEM buffer of {name} must say whether its elements share the 32-bit columns.",
                hint="pass packed=True for an operand of a matrix product, packed=False for an accumulator",
            )
        )


GMEM = MemorySpace.GMEM
SMEM = MemorySpace.SMEM
TMEM = MemorySpace.TMEM
REGS = MemorySpace.REGS
