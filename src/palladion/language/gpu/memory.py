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

from palladion import jaxlink
from palladion.errors import count_of, explain, mistake
from palladion.language.dtypes import SemaphoreDType, element_bits
from palladion.language.fields import Check, check_fields, integer, sequence_of
from palladion.language.gpu.layout_values import TMEMLayout, base_of
from palladion.language.gpu.refs import as_storage
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
    "Transform",
    "TransposeTransform",
]


class Transform:
    """What says how a buffer lies in its memory: the base of the storage transforms."""


@dataclasses.dataclass(frozen=True)
class TilingTransform(Transform):
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
class SwizzleTransform(Transform):
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


@dataclasses.dataclass(frozen=True)
class TransposeTransform(Transform):
    """Store a buffer with its dimensions in another order, so that a copy changes the layout on its way.

    A name of the Mosaic GPU reference that JAX 0.12 no longer has.

    Arguments:
      permutation: for each dimension in memory, outermost first, the dimension of the buffer. The last dimension stays
        the last: the hardware has no copy that changes it.

    Raises:
      TypeError, ValueError: that is no such order.
    """

    permutation: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.TransposeTransform", {"permutation": sequence_of(integer(0), "dimension")})
        ordered = list(range(len(self.permutation)))
        if sorted(self.permutation) != ordered:
            raise ValueError(
                explain(
                    f"plgpu.TransposeTransform: permutation must name each dimension once, not {self.permutation}.",
                    hint="(1, 0, 2) swaps the first two of three dimensions",
                )
            )
        if ordered and self.permutation[-1] != ordered[-1]:
            raise ValueError(
                explain(
                    f"plgpu.TransposeTransform: the last dimension must stay the last, but permutation is "
                    f"{self.permutation}.",
                    hint="transpose a matrix where it is read: plgpu.transpose_ref(ref, (1, 0))",
                )
            )


def storage_transforms(transforms: Any, what: str) -> tuple[Transform, ...]:
    """The transforms as a tuple, checked; `what` they belong to is for the message.

    Raises:
      TypeError: they are not a sequence, or one of them is something else.
    """
    for layer in transforms if isinstance(transforms, (list, tuple)) else (transforms,):
        if not isinstance(layer, Transform):
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


def stored_shape(shape: Sequence[int], dtype: Any, transforms: Sequence[Transform], what: str) -> tuple[int, ...]:
    """The shape in memory, row-major, of a buffer that is stored with these transforms, applied one after the other.

    Arguments:
      shape, dtype: of the buffer.
      transforms: as `storage_transforms` gives them.
      what: the buffer, for messages.

    Raises:
      ValueError: a tile that does not divide the buffer, a swizzle of another width than the rows of a tile, a
        transposition of another number of dimensions.
    """
    dims = tuple(shape)
    for layer in transforms:
        if isinstance(layer, TilingTransform):
            n = len(layer.tiling)
            part = dims[len(dims) - n :]
            if n > len(dims) or any(d % t for d, t in zip(part, layer.tiling)):
                raise mistake(
                    ValueError,
                    f"Tiles of {layer.tiling} do not divide {what} of shape {tuple(shape)}.",
                    hint="the sizes of a tile divide the last dimensions of the buffer, which is a multiple of it",
                    stored_as=dims if dims != tuple(shape) else None,
                )
            dims = (*dims[: len(dims) - n], *(d // t for d, t in zip(part, layer.tiling)), *layer.tiling)
        elif isinstance(layer, SwizzleTransform):
            _check_swizzle(layer.swizzle, dims, shape, dtype, what)
        elif isinstance(layer, TransposeTransform):
            if len(layer.permutation) != len(dims):
                n = len(layer.permutation)
                raise mistake(
                    ValueError,
                    f"plgpu.TransposeTransform({layer.permutation}) is for {count_of(n, 'dimension')}, but {what} is "
                    f"stored with {len(dims)} here.",
                    hint="after a tiling the dimensions are those of the array of tiles, then those of a tile",
                    stored_as=dims,
                )
            dims = tuple(dims[d] for d in layer.permutation)
    return dims


def _check_swizzle(swizzle: int, dims: tuple[int, ...], shape: Sequence[int], dtype: Any, what: str) -> None:
    if swizzle == 16:  # none: 16-byte pieces stay where they are
        return
    bits = element_bits(dtype)
    if not dims or dims[-1] * bits != swizzle * 8:
        wide = f"{dims[-1] * bits / 8:g} bytes wide" if dims else "no rows"
        raise mistake(
            ValueError,
            f"A swizzle of {swizzle} bytes is for rows as wide; {what} of shape {tuple(shape)} and dtype {dtype} is "
            f"stored in rows that are {wide}.",
            hint=f"plgpu.TilingTransform((8, {swizzle * 8 // bits})) before plgpu.SwizzleTransform({swizzle})",
        )


@dataclasses.dataclass(frozen=True)
class GPUMemoryRef(MemoryRef):
    """The type of a buffer in a GPU's memory.

    Arguments:
      inner_aval: the array type.
      memory_space: a `plgpu.MemorySpace`.
      transforms: how it is stored, outermost first (SMEM, GMEM).
      collective: whether it spans the two blocks of a collective matrix product; None outside TMEM.
      packed: whether elements narrower than 32 bits share a 32-bit column; None outside TMEM and for 32 bits.
      layout: a `plgpu.TMEMLayout` where a buffer in TMEM does not lie as usual; else None.
    """

    transforms: tuple[Any, ...] = ()
    collective: bool | None = dataclasses.field(default=None, kw_only=True)
    packed: bool | None = dataclasses.field(default=None, kw_only=True)
    layout: Any = dataclasses.field(default=None, kw_only=True)

    def get_ref_aval(self, label: str = "scratch") -> Any:
        """The abstract Ref that a kernel sees."""
        return as_storage(self, label)


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
        layout: Any = None,
    ) -> GPUMemoryRef:
        """The type of a buffer in this memory, for `scratch_shapes` and `run_scoped`.

        Arguments:
          shape: ints, one for each dimension. In TMEM, 64 or 128 rows (lanes), then columns; dimensions
            before them are a batch.
          dtype: anything that `jnp.dtype` takes.
          transforms: `TilingTransform`, `SwizzleTransform` and `TransposeTransform`, in the order of application. Not
            in TMEM.
          packed: TMEM only, and needed there for dtypes narrower than 32 bits: whether elements share a
            column.
          collective: TMEM only: the buffer spans the two blocks of a collective matrix product.
          layout: TMEM only: a `plgpu.TMEMLayout`, for scales, sparse metadata, and what else does not lie as usual.

        Raises:
          TypeError, ValueError: a shape, dtype or option that this memory cannot have.
        """
        ref = memory_ref(self, shape, dtype)
        if jaxlink.is_opaque(ref.dtype) and not isinstance(ref.dtype, SemaphoreDType):
            headline = f"A {self} buffer cannot hold {ref.dtype}."
            raise mistake(TypeError, headline, hint="keys are uint32 numbers in memory: jax.random.key_data(key)")
        layers = storage_transforms(transforms, f"a {self} buffer")
        if self is not MemorySpace.TMEM:
            stored_shape(ref.shape, ref.dtype, layers, f"a {self} buffer")
        if self is MemorySpace.TMEM:
            _check_tmem(ref, layers, packed, layout)
            collective = bool(collective)
        elif (packed, collective, layout) != (None, None, None):
            raise ValueError(f"packed, collective and layout describe buffers in TMEM; this one is in {self.name}.")
        options: dict[str, Any] = dict(collective=collective, packed=packed, layout=layout)
        return GPUMemoryRef(ref.inner_aval, self, transforms=layers, **options)

    def like(self, array: Any) -> GPUMemoryRef:
        """The type of a buffer in this memory with the shape and dtype of `array` (or a ShapeDtypeStruct)."""
        return self(array.shape, array.dtype)


def _check_tmem(ref: MemoryRef, transforms: tuple[Any, ...], packed: bool | None, layout: Any) -> None:
    shape = ref.shape
    if transforms:
        raise ValueError("A TMEM buffer has no transforms: its layout is the hardware's.")
    if layout is not None and not isinstance(base_of(layout), TMEMLayout):
        hint = "plgpu.TMEMLayout.SCALES_LAYOUT for scales; most buffers need none"
        raise TypeError(explain(f"The layout of a TMEM buffer is a plgpu.TMEMLayout, not {layout!r}.", hint=hint))
    scales = (TMEMLayout.SCALES_LAYOUT, TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT)
    if layout is not None and base_of(layout) in scales:  # in each column four rows of scales for each of 32 lanes
        if len(shape) != 2 or shape[0] % 32 or shape[1] % 4:
            hint = "scales of M rows and K elements are (M, K // 32), M a multiple of 32, K of 128"
            raise ValueError(explain(f"A TMEM buffer of scales cannot have shape {shape}.", hint=hint))
    elif len(shape) < 2 or shape[-2] not in (64, 128):
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
    if bits < 32 and packed is None and layout is None:
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
