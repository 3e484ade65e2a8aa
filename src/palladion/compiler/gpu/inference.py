"""Layouts of the language as tables of registers: what `plgpu.Layout.WGMMA` means for an array of a given shape."""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import fragments, mma_layouts
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.fragments import Digit, Fragments
from palladion.language.gpu.layout_values import Layout, ParameterizedLayout, ReducedLayout

# Where several layouts are possible (a load of tensor memory, say), the first of these that is among them.
PREFERRED = (Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE, Layout.TCGEN05, Layout.WGMMA_UPCAST_2X, Layout.WGMMA_UPCAST_4X)


def fragments_of(layouts: Any, shape: tuple[int, ...], dtype: Any) -> Fragments | None:
    """The registers of one of a set of layouts; None: the set is empty or None, or none of them is known here."""
    if layouts is None:
        return None
    known = sorted(layouts, key=lambda l: (PREFERRED.index(l) if l in PREFERRED else len(PREFERRED), str(l)))
    for layout in known:
        found = registers_of(layout, shape, dtype)
        if found is not None:
            return found
    return None


def registers_of(layout: Any, shape: tuple[int, ...], dtype: Any) -> Fragments | None:
    """How an array lies in a layout of the language; None: the layout is not known here, or does not fit."""
    if isinstance(layout, ReducedLayout):
        return _reduced(layout, shape, dtype)
    if isinstance(layout, ParameterizedLayout):
        given = dict(layout.kwargs.items)
        if layout.layout_cls is Layout.WG_STRIDED:
            vector = given.get("vec_size", layout.args[1] if len(layout.args) > 1 else None)
            return fragments.strided(shape, vector or 1)
        return None
    maker = _MAKERS.get(layout)
    return None if maker is None else maker(shape, kind(dtype).bits)


def _matrix(rows: int, columns: int, make: Any) -> Any:
    """A maker for matrices whose sizes are multiples of these."""

    def maker(shape: tuple[int, ...], bits: int) -> Fragments | None:
        fits = len(shape) == 2 and shape[0] % rows == 0 and shape[1] % columns == 0 and all(shape)
        return make(shape) if fits else None

    return maker


def _transposed(shape: tuple[int, ...]) -> Fragments:
    found = fragments.wgmma(shape[::-1]).renumbered(shape, (1, 0))
    assert found is not None
    return found


def _strided(shape: tuple[int, ...], bits: int) -> Fragments:
    vector = max(64 // bits, 1)
    size = 1
    for n in shape:
        size *= n
    while vector > 1 and size % (128 * vector):
        vector //= 2
    return fragments.strided(shape, vector)


def _indices(each: int) -> Any:
    """Row numbers for gathers, which every warp holds in full; a lane four (or one) after the other."""

    def maker(shape: tuple[int, ...], bits: int) -> Fragments | None:
        return fragments.replicated(shape) if len(shape) == 1 else None

    return maker


_MAKERS: dict[Any, Any] = {
    Layout.WGMMA: _matrix(64, 8, fragments.wgmma),
    Layout._WGMMA_ACC_32BIT: _matrix(64, 8, fragments.wgmma),
    Layout.WGMMA_8BIT: _matrix(64, 16, lambda s: fragments.wgmma_narrow(s, 4, "WGMMA_8BIT")),
    Layout.WGMMA_UPCAST_2X: _matrix(64, 16, lambda s: fragments.wgmma_narrow(s, 4, "WGMMA_UPCAST_2X")),
    Layout.WGMMA_UPCAST_4X: _matrix(64, 32, lambda s: fragments.wgmma_narrow(s, 8, "WGMMA_UPCAST_4X")),
    Layout.WGMMA_TRANSPOSED: _matrix(8, 64, _transposed),
    Layout.MMA_LHS: mma_layouts.left_if_it_fits,
    Layout.MMA_RHS: mma_layouts.right_if_it_fits,
    Layout.MMA_ACC: _matrix(64, 8, fragments.wgmma),
    Layout.TCGEN05: _matrix(128, 8, fragments.tcgen05),
    Layout.TCGEN05_TMEM_NATIVE: _matrix(64, 1, fragments.tmem_native),
    Layout.WG_STRIDED: _strided,
    Layout.TMA_INDICES: _indices(4),
    Layout.TMA_INDICES_4: _indices(4),
}


def _reduced(layout: ReducedLayout, shape: tuple[int, ...], dtype: Any) -> Fragments | None:
    """The layout of a reduced array: that of a small array with the reduced dimensions put back, reduced."""
    sizes = {Layout.WGMMA: (64, 8), Layout.WGMMA_UPCAST_2X: (64, 16), Layout.WGMMA_UPCAST_4X: (64, 32),
             Layout.WGMMA_8BIT: (64, 16), Layout.WGMMA_TRANSPOSED: (8, 64), Layout.TCGEN05: (128, 8),
             Layout.TCGEN05_TMEM_NATIVE: (128, 8)}.get(layout.layout)  # fmt: skip
    if sizes is None:
        return None
    full, rest = [], list(shape)
    for axis, least in enumerate(sizes):
        full.append(least if axis in layout.axes else rest.pop(0) if rest else least)
    if rest:
        return None
    whole = registers_of(layout.layout, tuple(full), dtype)
    return None if whole is None else whole.without(layout.axes)


def described(digits: tuple[Digit, ...]) -> str:
    """Digits for people: `2 of dim 0 by 8`."""
    return " x ".join(f"{d.size}{'' if d.dim is None else f' along {d.dim} by {d.stride}'}" for d in digits)
