"""Layouts as values: how an array lies in the registers of a warpgroup, and special layouts of tensor memory.

A layout is a member of `Layout`, one of its members called with parameters (`Layout.WG_STRIDED((64,), vec_size=2)`),
or one of these reduced along axes (`Layout.WGMMA.reduce(1)`, for one number for each row). All are hashable, so that
they can be parameters of equations. `layouts.py` has the operations, `layout_inference.py` the rules.

Source: the Pallas Mosaic GPU reference, section on array layouts; names and repr of JAX 0.12.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Sequence
from typing import Any

from palladion.errors import Finding, KernelFinding, kind_of, mistake
from palladion.locations import current_location


@dataclasses.dataclass(frozen=True)
class FrozenArguments:
    """Keyword arguments as a hashable value, in the order of their names."""

    items: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {v!r}" for k, v in self.items) + "}"


def _frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_frozen, x))
    return x


def _axes(what: str, axes: int | Sequence[int]) -> tuple[int, ...]:
    try:
        given = tuple(axes) if isinstance(axes, (list, tuple)) else (axes,)
        return tuple(sorted({operator.index(a) for a in given}))  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise mistake(
            TypeError, f"{what}.reduce takes an axis or several, not {kind_of(axes)}.", hint=f"{what}.reduce(1)"
        ) from None


@dataclasses.dataclass(frozen=True)
class ParameterizedLayout:
    """A layout with its parameters.

    Attributes:
      layout_cls: the member of `Layout` or `TMEMLayout`.
      args, kwargs: what it was called with.
    """

    layout_cls: Any
    args: tuple[Any, ...]
    kwargs: FrozenArguments

    def reduce(self, axes: int | Sequence[int]) -> ReducedLayout:
        """The layout of what remains when an array of this layout is reduced along `axes`."""
        return ReducedLayout(self, _axes(str(self.layout_cls), axes))

    def __str__(self) -> str:
        shown = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items)]
        return f"{self.layout_cls}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class ReducedLayout:
    """The layout of an array that was reduced along some axes of a layout; broadcasting those again is free.

    Attributes:
      layout: of the array before the reduction.
      axes: which axes are gone.
    """

    layout: Any
    axes: tuple[int, ...]

    def reduce(self, axes: int | Sequence[int]) -> ReducedLayout:
        """The layout after a further reduction, along `axes` of what remains."""
        left = [a for a in range(4) if a not in self.axes]
        return ReducedLayout(self.layout, tuple(sorted({*self.axes, *(left[a] for a in _axes(str(self), axes))})))

    def __str__(self) -> str:
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"{self.layout}.reduce({axes})"


class Layout(enum.Enum):
    """How an array lies in the registers of the 128 lanes that are a Pallas thread.

    `WGMMA`: accumulators and 16-bit operands of Hopper's `wgmma`. `WGMMA_8BIT`: its 8-bit operands.
    `WGMMA_UPCAST_2X`, `WGMMA_UPCAST_4X`: narrow values that are in `WGMMA` once they are converted to a type two or
    four times as wide. `WGMMA_TRANSPOSED`: the transpose of `WGMMA`. `WG_STRIDED(shape, vec_size=…)`: consecutive
    vectors go round the lanes. `WG_SPLAT(shape)`: one constant. `TILED(…)`: described in full. `TCGEN05…`: what
    tensor memory is loaded to and stored from. `TMA_INDICES` (older name `TMA_GATHER_INDICES`), `TMA_INDICES_4`:
    indices of a gather. `SMEM_GMEM_COPY(…)`: for copies by hand. `MMA_LHS`, `MMA_RHS`, `MMA_ACC`: operands of
    `plgpu.mma`.
    """

    WGMMA, WGMMA_8BIT, WGMMA_UPCAST_2X = 1, 2, 3
    WGMMA_UPCAST_4X, WGMMA_TRANSPOSED, WG_SPLAT = 4, 5, 6
    WG_STRIDED, TILED, TCGEN05 = 7, 8, 9
    TCGEN05_TRANSPOSED, TCGEN05_M64_COLLECTIVE, TCGEN05_TMEM_NATIVE = 10, 11, 12
    TCGEN05_M64_COLLECTIVE_NATIVE, SMEM_GMEM_COPY, TMA_INDICES = 13, 14, 15
    TMA_INDICES_4, _WGMMA_ACC_32BIT, MMA_LHS = 16, 17, 18
    MMA_RHS, MMA_ACC = 19, 20
    TMA_GATHER_INDICES = TMA_INDICES  # the Mosaic GPU reference's name

    def __call__(self, *args: Any, **kwargs: Any) -> ParameterizedLayout:
        """The layout with parameters, e.g. `WG_STRIDED((64, 64), vec_size=4)`."""
        return _with_parameters(self, args, kwargs)

    def reduce(self, axes: int | Sequence[int]) -> ReducedLayout:
        """The layout of what remains when an array of this layout is reduced along `axes` (an int or several)."""
        return ReducedLayout(self, _axes(str(self), axes))


class TMEMLayout(enum.Enum):
    """How a buffer lies in tensor memory, for `plgpu.TMEM(…, layout=…)` where it is not the usual way.

    `SCALES_LAYOUT`: scales of a block-scaled matrix product. `SPARSE_METADATA_LAYOUT`: which elements of a sparse
    operand are there. `M64_COLLECTIVE_LAYOUT`: the accumulator of a collective product with 64 rows a block;
    `SCALES_M64_COLLECTIVE_LAYOUT`: its scales.
    """

    SCALES_LAYOUT, SPARSE_METADATA_LAYOUT, M64_COLLECTIVE_LAYOUT = 1, 2, 3
    SCALES_M64_COLLECTIVE_LAYOUT = 4

    def __call__(self, *args: Any, **kwargs: Any) -> ParameterizedLayout:
        """The layout with parameters."""
        return _with_parameters(self, args, kwargs)


def _with_parameters(member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParameterizedLayout:
    frozen = FrozenArguments(tuple(sorted((k, _frozen(v)) for k, v in kwargs.items())))
    made = ParameterizedLayout(member, _frozen(args), frozen)
    hash(made)  # what cannot be hashed is refused here, not deep in a trace
    return made


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Nested tiles, outermost first, as `Layout.TILED` takes them.

    Arguments:
      tiles: tuples of ints; each tiles the last dimensions of what the one before leaves.
    """

    tiles: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A dimension of lanes or warps that all hold the same values.

    Arguments:
      times: how many of them.
    """

    times: int


@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """The type of an array in registers, with its layout: for `plgpu.inline_mgpu`.

    Arguments:
      shape: ints. dtype: of the elements. layout: a layout.
    """

    shape: tuple[int, ...]
    dtype: Any
    layout: Any


def base_of(layout: Any) -> Any:
    """The member of `Layout` behind a layout, for comparisons that ignore parameters."""
    while isinstance(layout, (ParameterizedLayout, ReducedLayout)):
        layout = layout.layout_cls if isinstance(layout, ParameterizedLayout) else layout.layout
    return layout


def checked_layout(function: str, layout: Any) -> Any:
    """A layout argument.

    Raises:
      TypeError: it is something else.
    """
    if isinstance(layout, (Layout, ReducedLayout)):
        return layout
    if isinstance(layout, ParameterizedLayout) and isinstance(layout.layout_cls, Layout):
        return layout
    raise mistake(
        TypeError,
        f"The layout of {function} is {kind_of(layout)}, which is not a plgpu.Layout.",
        hint="plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_STRIDED(shape, vec_size=…)",
    )


_2D = {
    Layout.WGMMA: (64, 8),
    Layout.WGMMA_8BIT: (64, 16),
    Layout.WGMMA_UPCAST_2X: (64, 16),
    Layout.WGMMA_UPCAST_4X: (64, 32),
    Layout.WGMMA_TRANSPOSED: (8, 64),
    Layout._WGMMA_ACC_32BIT: (64, 8),
    Layout.TCGEN05: (1, 1),
    Layout.TCGEN05_TRANSPOSED: (1, 1),
    Layout.TCGEN05_TMEM_NATIVE: (1, 1),
    Layout.TCGEN05_M64_COLLECTIVE: (1, 1),
    Layout.TCGEN05_M64_COLLECTIVE_NATIVE: (1, 1),
    Layout.MMA_LHS: (1, 1),
    Layout.MMA_RHS: (1, 1),
    Layout.MMA_ACC: (1, 1),
}  # layouts of matrices: rows and columns come in multiples of these


def check_fits(layout: Any, shape: Sequence[int]) -> None:
    """Whether an array of this shape can have a layout.

    Raises:
      KernelFinding: it cannot (`illegal-layout`).
    """
    full, gone = (layout.layout, layout.axes) if isinstance(layout, ReducedLayout) else (layout, ())
    if isinstance(full, ParameterizedLayout):
        sizes = full.args[0] if full.args else dict(full.kwargs.items).get("shape")
        described = full.layout_cls in (Layout.WG_STRIDED, Layout.WG_SPLAT) and isinstance(sizes, tuple)
        if described and not gone and tuple(shape) != sizes:
            raise _misfit(f"{layout} is for arrays of shape {sizes}, not {tuple(shape)}.", "give it the array's shape")
        return
    if full in (Layout.TMA_INDICES, Layout.TMA_INDICES_4) and len(shape) != 1:
        raise _misfit(f"{layout} is for a vector of indices, not for shape {tuple(shape)}.", "ravel the indices")
    if full not in _2D or not shape:
        return
    multiples = [m for axis, m in enumerate(_2D[full]) if axis not in gone]
    if len(multiples) != len(shape):
        rank = {1: "vectors", 2: "matrices"}.get(len(multiples), "scalars")
        hint = "layout.reduce(1) is for one value for each row, .reduce(0) for one for each column"
        raise _misfit(f"{layout} is for {rank}, not for an array of shape {tuple(shape)}.", hint)
    if any(n % m for n, m in zip(shape, multiples)):
        sizes = " and ".join(f"{m}" for m in multiples)
        hint = f"its sizes are multiples of {sizes}; layout WG_STRIDED takes others"
        raise _misfit(f"{layout} does not fit an array of shape {tuple(shape)}.", hint)


def _misfit(message: str, hint: str) -> KernelFinding:
    return KernelFinding(Finding("illegal-layout", "error", message, where=current_location(), hint=hint))
