"""What single operations do to layouts: the tables of `layout_inference`.

A rule maps an equation and the layouts of its first operand (a set, or None for open) to those of each result.

Layouts are compared in a canonical form: per-row values of `WGMMA` and of its transpose's columns lie alike. Layouts
that are described in full (`TILED`) or that may coincide with others (those of `plgpu.mma`) count as open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from palladion.language.gpu.layout_values import Layout, ParameterizedLayout, ReducedLayout, base_of
from palladion.language.gpu.refs import storage_of

Layouts = frozenset[Any] | None
SAME: Any = object()  # a result that has the operand's layout, whatever that turns out to be
OF_CONSTANTS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "transpose"})

_UNKNOWN = {
    Layout.TILED, Layout.SMEM_GMEM_COPY, Layout.MMA_LHS, Layout.MMA_RHS, Layout.MMA_ACC, Layout._WGMMA_ACC_32BIT,
    Layout.WG_SPLAT,
}  # fmt: skip
_TRANSPOSED = {
    Layout.WGMMA: Layout.WGMMA_TRANSPOSED,
    Layout.WGMMA_TRANSPOSED: Layout.WGMMA,
    Layout.TCGEN05: Layout.TCGEN05_TRANSPOSED,
    Layout.TCGEN05_TRANSPOSED: Layout.TCGEN05,
}
_WGMMA_KIN = {Layout.WGMMA, Layout.WGMMA_8BIT, Layout.WGMMA_UPCAST_2X, Layout.WGMMA_UPCAST_4X}
_TMEM_KIN = {
    Layout.TCGEN05, Layout.TCGEN05_TRANSPOSED, Layout.TCGEN05_TMEM_NATIVE, Layout.TCGEN05_M64_COLLECTIVE,
    Layout.TCGEN05_M64_COLLECTIVE_NATIVE,
}  # fmt: skip
_MATRICES = {*_WGMMA_KIN, *_TRANSPOSED, *_TMEM_KIN}

# Element by element: operands that are no scalars have one layout, which is that of the results.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not
    or population_count pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor multiple_of
    """.split()
)


def canonical(layout: Any) -> Any:
    """A layout in the form in which layouts are compared; None: it counts as open."""
    if base_of(layout) in _UNKNOWN or layout is Layout.WG_STRIDED:
        return None
    if isinstance(layout, ParameterizedLayout) and layout.layout_cls is not Layout.WG_STRIDED:
        return canonical(layout.layout_cls)
    if isinstance(layout, ReducedLayout):
        return reduced(canonical(layout.layout), layout.axes)
    return layout


def is_splat(layout: Any) -> bool:
    """Whether a layout is that of a constant."""
    return base_of(layout) is Layout.WG_SPLAT


def reduced(layout: Any, axes: tuple[int, ...]) -> Any:
    """The canonical layout of a matrix's reduction; None: open."""
    if layout not in _MATRICES or len(axes) != 1:
        return None  # all of it, or of vectors: one number, which every lane has; others are not supported
    axis = axes[0]
    if layout in (Layout.WGMMA_TRANSPOSED, Layout.TCGEN05_TRANSPOSED):
        layout, axis = _TRANSPOSED[layout], 1 - axis
    if layout in _WGMMA_KIN and axis == 1:
        layout = Layout.WGMMA  # they differ in columns only
    return ReducedLayout(layout, (axis,))


def castable(before: Any, after: Any) -> bool:
    """Whether an array can be moved from one canonical layout to another."""
    if after is None or before == after:
        return True
    pair = {before, after}
    return _TRANSPOSED.get(before) is after or pair <= _WGMMA_KIN - {Layout.WGMMA_8BIT}


def _each(layouts: Layouts, change: Callable[[Any], Any]) -> Layouts:
    """The set of what `change` gives; open as soon as one of it is."""
    if layouts is None:
        return None
    changed = [change(layout) for layout in layouts]
    return None if None in changed else frozenset(changed)


def _set(layout: Any) -> Layouts:
    known = canonical(layout)
    return None if known is None else frozenset({known})


def _get(eqn: Any, _: Layouts) -> list[Layouts]:
    """Reading an accumulator; other Refs are read as what their value becomes."""
    accumulator = storage_of(eqn.invars[0].aval).layout is Layout.WGMMA
    return [_set(Layout.WGMMA) if accumulator and _whole_tiles(eqn.outvars[0].aval) else None]


def _whole_tiles(aval: Any) -> bool:
    return aval.ndim == 2 and aval.shape[0] % 64 == 0 and aval.shape[1] % 8 == 0


def _load_tmem(eqn: Any, _: Layouts) -> list[Layouts]:
    layout = eqn.params["layout"]
    first = frozenset(_TMEM_KIN) if layout is None else _set(layout)
    return [first, *[None] * (len(eqn.outvars) - 1)]


def _reduce(eqn: Any, layouts: Layouts) -> list[Layouts]:
    matrix = eqn.invars[0].aval.ndim == 2
    return [_each(layouts, lambda l: reduced(l, tuple(eqn.params["axes"]))) if matrix else None]


def _broadcast(eqn: Any, layouts: Layouts) -> list[Layouts]:
    """A reduced array broadcast again has the layout from which it was reduced."""
    shape, dims, before = eqn.params["shape"], eqn.params["broadcast_dimensions"], eqn.invars[0].aval
    if len(shape) != 2 or before.ndim == 0:
        return [None]
    if before.ndim == 2:  # (m, 1) to (m, n), whose layout was said when the 1 came
        return [_each(layouts, _matrix)]
    return [_each(layouts, lambda l: _unreduced(l, 1 - dims[0]))]


def _matrix(layout: Any) -> Any:
    return layout if layout in _MATRICES else None


def _unreduced(layout: Any, new_axis: int) -> Any:
    """The layout of a vector that gets an axis."""
    if not isinstance(layout, ReducedLayout) or len(layout.axes) != 1:
        return None
    if layout.axes[0] == new_axis:
        return layout.layout
    return _TRANSPOSED.get(layout.layout)


def _transpose(eqn: Any, layouts: Layouts) -> list[Layouts]:
    swapped = tuple(eqn.params["permutation"]) == (1, 0)
    return [_each(layouts, _TRANSPOSED.get) if swapped else None]


def _reshape(eqn: Any, layouts: Layouts) -> list[Layouts]:
    """Dimensions of size 1 come and go; other reshapes are left open."""
    before, after = tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)
    if before == after:
        return [SAME]
    if len(before) == 1 and len(after) == 2 and 1 in after and before[0] != 1:
        return [_each(layouts, lambda l: _unreduced(l, after.index(1)))]
    if len(before) == 2 and len(after) == 1 and 1 in before and after[0] != 1:
        return [_each(layouts, lambda l: reduced(l, (before.index(1),)))]
    return [None]


def _slice(eqn: Any, layouts: Layouts) -> list[Layouts]:
    return [_each(layouts, _matrix) if _whole_tiles(eqn.outvars[0].aval) else None]


RULES: dict[str, Callable[[Any, Layouts], list[Layouts]]] = {
    "layout_cast": lambda eqn, _: [_set(eqn.params["layout"])],
    "get": _get,
    "wgmma_accumulator_load": lambda eqn, _: [_set(Layout.WGMMA)],
    "async_load_tmem": _load_tmem,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_prod": _reduce,
    "reduce_and": _reduce,
    "reduce_or": _reduce,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "slice": _slice,
}


def _fragment(aval: Any) -> Layouts:
    """What wgmma takes as A in registers: 16-bit values in `WGMMA`; how others lie is less certain."""
    if jax.dtypes.itemsize_bits(aval.dtype) != 16:
        return None
    return frozenset({Layout.WGMMA, Layout.WGMMA_UPCAST_2X, Layout.WGMMA_UPCAST_4X})


# Instructions with an operand in registers: its field, the layouts that it can have, what it is.
NEEDS: dict[str, tuple[str, Callable[[Any], Layouts], str]] = {
    "wgmma": ("a", _fragment, "A of plgpu.wgmma"),
    "wgmma_accumulator_init": ("value", lambda aval: frozenset({Layout.WGMMA}), "The value of plgpu.ACC.init"),
    "async_store_tmem": ("value", lambda aval: frozenset(_TMEM_KIN), "The value of plgpu.async_store_tmem"),
}
