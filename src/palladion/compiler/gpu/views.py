"""Views of Refs as sums: how far from the start of its buffer each element of a view lies, in bytes.

Whatever chain of indices, reshapes, transposes and bitcasts a view is, the place of its element (i, j, …) is

    a constant + run-time terms (a start times a stride) + a part for i + a part for j + …

since buffers are row-major, or tiled, which treats each dimension on its own. The part for i is kept as the *digits*
of i: a dimension of 128 rows stored in tiles of 8 has two, 16 steps of one tile and 8 steps of one row. A start that is
only known at run time becomes a term, where moving by it moves every element equally far; of a tiled buffer that needs
a multiple of the tile, and where that is not known the digits are taken apart at run time (`Axis.text`). Rows that an
index array names are parts of their own (`Gather`).

A swizzle changes final addresses only, and is no business of views.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu.axes import Axis, Digits, Term, as_digits, fold, merged, spread
from palladion.compiler.gpu.smem import itemsize as itemsize_of
from palladion.compiler.gpu.values import Scalar
from palladion.language.gpu.views import Im2Col, split_view


class Index:
    """A run-time index: a value, and a number that is known to divide it."""

    def __init__(self, value: Any, multiple: int = 1) -> None:
        self.value, self.multiple = value, multiple

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


@dataclasses.dataclass(frozen=True)
class Gather:
    """What an index array adds: `digits` of the elements of `value`, which runs along some axes of the view.

    Attributes: value: integers in registers, or all one. axes: of the view, one for each dimension of the value.
      digits, extent, dim: as of the `Axis` that it indexes.
    """

    value: Any
    axes: tuple[int, ...]
    digits: Digits
    extent: int
    dim: int | None = None


@dataclasses.dataclass(frozen=True)
class View:
    """A view of a Ref.

    Attributes:
      ref: the Ref. dtype: of the elements. axes: its dimensions. offset, terms: bytes, see above. gathers: by arrays.
      where: transforms that say in which block or on which device it is, with `Index`es as their leaves.
      windows: an `im2col_ref`, whose rows the axes then are; else None.
      root: (extent, digits) of the dimensions that `Axis.dim` counts: the buffer's, until a reshape gives others.
      fixed: (dimension of the root, first, terms) of those that integers chose.
      origin, floating: where the root begins, in bytes; whether run-time terms move it.
    """

    ref: Any
    dtype: Any
    axes: tuple[Axis, ...]
    offset: int = 0
    terms: tuple[Term, ...] = ()
    gathers: tuple[Gather, ...] = ()
    where: tuple[Any, ...] = ()
    windows: Im2Col | None = None
    root: tuple[tuple[int, Digits], ...] = ()
    fixed: tuple[tuple[int, int, tuple[Term, ...]], ...] = ()
    origin: int = 0
    floating: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.n for a in self.axes)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize_of(self.dtype)

    def table(self) -> np.ndarray:
        """The constant part of each element's place, in the view's shape; run-time terms and gathers left out."""
        total = np.full((1,) * len(self.axes), self.offset, np.int64)
        for k, axis in enumerate(self.axes):
            shape = [1] * len(self.axes)
            shape[k] = axis.n
            total = total + axis.places().reshape(shape)
        return np.broadcast_to(total, self.shape)

    def folded(self) -> View:
        """The same with run-time starts moved out of the axes, where they move all elements equally far."""
        axes, terms, offset = [], list(self.terms), self.offset
        for axis in self.axes:
            moved = fold(axis)
            axes.append(moved[0])
            offset += moved[1]
            terms += moved[2]
        return dataclasses.replace(self, axes=tuple(axes), terms=tuple(terms), offset=offset)


# --- chains of transforms -------------------------------------------------------------------------------------------
def resolve(unit: Any, ref: Any, transforms: Sequence[Any]) -> View:
    """The view that a chain of transforms takes of a Ref.

    Arguments:
      unit: the unit. ref: a `memory.Ref`: `axes`, `dtype`.
      transforms: JAX's and ours, with run-time indices as `Index`es.

    Raises: NotImplementedError: no sum of parts gives the places.
    """
    view = _rooted(View(ref, ref.dtype, ref.axes))
    where, others = split_view(jaxlink.TransformedRef(None, tuple(transforms)))
    for transform in others:
        match transform:
            case jaxlink.NDIndexer():
                view = _indexed(unit, view, transform)
            case jaxlink.ReshapeTransform():
                view = _reshaped(unit, view, tuple(transform.shape))
            case jaxlink.TransposeTransform():
                view = _transposed(view, tuple(transform.permutation))
            case jaxlink.BitcastTransform():
                view = _bitcast(unit, view, np.dtype(transform.dtype))
            case Im2Col():
                view = dataclasses.replace(view, windows=transform, axes=_window_axes(view, transform))
            case _:
                raise unit.refuse(f"The Mosaic GPU compiler has no meaning for the view {transform}.")
    return dataclasses.replace(view, where=tuple(where))


def _rooted(view: View) -> View:
    """A view whose axes are dimensions of a new root, behind those that integers have chosen before."""
    before = [view.root[d] for d, _, _ in view.fixed]
    fixed = tuple((k, first, terms) for k, (_, first, terms) in enumerate(view.fixed))
    chosen = sum(len(terms) for _, _, terms in fixed)
    origin = view.offset - sum(int(spread(view.root[d][1], np.array(first))) for d, first, _ in view.fixed)
    axes = tuple(dataclasses.replace(a, dim=len(before) + k) for k, a in enumerate(view.axes))
    root = (*before, *((a.n, a.digits) for a in axes))
    return dataclasses.replace(
        view, axes=axes, root=root, fixed=fixed, origin=origin, floating=len(view.terms) > chosen
    )


def _number(x: Any) -> tuple[int, tuple[Term, ...]]:
    """A start as a constant and terms."""
    if isinstance(x, Index):
        value = x.value
        if value.value is not None:
            return int(value.value), ()
        return 0, (Term(_atom(value.text), 1, x.multiple),)
    if isinstance(x, Scalar):
        return (int(x.value), ()) if x.value is not None else (0, (Term(_atom(x.text), 1),))
    return int(x), ()


def _atom(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def _indexed(unit: Any, view: View, indexer: Any) -> View:
    indices = list(indexer.indices)
    arrays = [k for k, i in enumerate(indices) if not isinstance(i, jaxlink.Slice) and getattr(i, "shape", ())]
    if arrays and view.gathers:
        raise unit.refuse("A view is indexed by arrays twice.", "one index array a view; read it, then index the value")
    axes, offset, terms, fixed = [], view.offset, list(view.terms), list(view.fixed)
    moved: dict[int, int] = {}  # a remaining axis' new number
    # NumPy's rule: index arrays stand where they are if they are side by side (integers count), else in front.
    integers = [k for k, i in enumerate(indices) if not isinstance(i, jaxlink.Slice)]
    together = bool(integers) and integers == list(range(integers[0], integers[-1] + 1))
    shape = tuple(np.broadcast_shapes(*[tuple(indices[k].shape) for k in arrays])) if arrays else ()
    place = (sum(k < integers[0] for k in range(len(indices)) if k not in integers) if together else 0) if arrays else 0
    gathers: list[Gather] = []
    for k, (index, axis) in enumerate(zip(indices, view.axes, strict=True)):
        if isinstance(index, jaxlink.Slice):
            first, more = _number(index.start)
            moved[k] = len(axes)
            axes.append(_sliced(unit, axis, first, more, int(index.size), index.stride))
        elif k in arrays:
            if axis.coords is not None or axis.terms or axis.step != 1 or axis.first:
                axis, added, extra = fold(axis)
                offset += added
                terms += extra
                if not axis.digits or axis.terms or axis.first or axis.coords is not None:
                    raise unit.refuse("An index array of a view that begins at a run-time place is not compiled.")
            value = index.value if isinstance(index, Index) else index
            along = tuple(range(place, place + len(shape)))[len(shape) - len(value.shape) :]
            gathers.append(Gather(value, along, axis.digits, axis.extent, axis.dim))
        else:
            first, more = _number(index)
            one, added, extra = fold(_sliced(unit, axis, first, more, 1, 1))
            if one.terms:  # a run-time place within digits
                text = one.text(" + ".join([str(one.first), *map(str, one.terms)]))
                extra = [Term(f"({text})", 1)]
            else:
                added += int(one.places()[0])
            offset += added
            terms += extra
            if axis.coords is None and axis.dim is not None:
                start = axis.first + first * axis.step
                fixed.append((axis.dim, start, (*axis.terms, *(t.times(axis.step) for t in more))))
    old = view.gathers
    if arrays:
        axes[place:place] = [Axis(n, (), n) for n in shape]
        old = tuple(gathers)
    elif old:
        for g in old:
            if any(not (isinstance(indices[a], jaxlink.Slice) and indices[a].size == view.axes[a].n) for a in g.axes):
                raise unit.refuse("Rows that an index array names cannot be indexed again.", "index the array itself")
        old = tuple(dataclasses.replace(g, axes=tuple(moved[a] for a in g.axes)) for g in old)
    return dataclasses.replace(
        view, axes=tuple(axes), offset=offset, terms=tuple(terms), gathers=old, fixed=tuple(fixed)
    )


def _sliced(unit: Any, axis: Axis, first: int, terms: tuple[Term, ...], n: int, step: int) -> Axis:
    if axis.coords is not None:
        if terms:
            raise unit.refuse("A constant index array cannot be indexed at run time.", "index the array of indices")
        return dataclasses.replace(axis, n=n, coords=axis.coords[first : first + (n - 1) * step + 1 : step])
    return dataclasses.replace(
        axis,
        n=n,
        first=axis.first + first * axis.step,
        terms=(*axis.terms, *(t.times(axis.step) for t in terms)),
        step=axis.step * step,
    )


def _transposed(view: View, order: tuple[int, ...]) -> View:
    gathers = tuple(dataclasses.replace(g, axes=tuple(order.index(a) for a in g.axes)) for g in view.gathers)
    return dataclasses.replace(view, axes=tuple(view.axes[d] for d in order), gathers=gathers)


def _reshaped(unit: Any, view: View, shape: tuple[int, ...]) -> View:
    if shape == view.shape:
        return view
    view = view.folded()
    if view.gathers or view.windows or not all(a.whole for a in view.axes):
        raise unit.refuse(
            f"A part of a Ref that is stored in tiles is reshaped to {shape}.",
            "reshape the whole Ref first, then take the part: ref.reshape(…).at[…]",
        )
    digits: list[tuple[int, int]] = [d for a in view.axes for d in (a.digits if a.n > 1 else ())]
    axes = []
    for n in shape:
        rest, own = n, []
        while rest > 1:
            digits = [*merged((digits[0], digits[1])), *digits[2:]] if len(digits) > 1 else digits
            size, stride = digits[0]
            if rest % size == 0:
                own.append((size, stride))
                digits = digits[1:]
                rest //= size
            elif size % rest == 0:
                own.append((rest, stride * (size // rest)))
                digits = [(size // rest, stride), *digits[1:]]
                rest = 1
            else:
                raise unit.refuse(
                    f"A view of shape {view.shape} cannot be seen as {shape}: its elements do not lie in order.",
                    "read it, and reshape the value",
                )
        axes.append(Axis(n, merged(tuple(own)), n))
    return _rooted(dataclasses.replace(view, axes=tuple(axes)))


def _bitcast(unit: Any, view: View, dtype: np.dtype) -> View:
    """The bits as another dtype; a change of width is taken up by the second-last dimension."""
    old, new = view.itemsize, itemsize_of(dtype)
    if old == new:
        return dataclasses.replace(view, dtype=dtype)
    view = view.folded()
    rows = view.axes[-2]
    if not rows.whole or any(-2 % len(view.axes) in g.axes for g in view.gathers):
        raise unit.refuse("A part of a Ref is taken for another dtype.", "bitcast the Ref first, then take the part")
    if old > new:
        ratio = old // new
        digits: Digits | None = merged((*rows.digits, (ratio, new)))
        n = rows.n * ratio
    else:
        ratio = new // old
        n = rows.n // ratio
        parts = rows.digits
        digits = None
        if parts and parts[-1][1] == old and parts[-1][0] % ratio == 0:
            digits = merged((*parts[:-1], (parts[-1][0] // ratio, new)))
        elif parts and parts[-1][1] == old and parts[-1][0] == ratio:
            digits = parts[:-1]
    if digits is None:
        raise unit.refuse(
            f"Elements of {view.dtype} cannot be taken for wider {dtype} where they lie: rows are not next to each "
            "other in memory.",
            "read them, and use jax.lax.bitcast_convert_type",
        )
    axes = (*view.axes[:-2], Axis(n, digits, n), view.axes[-1])
    return _rooted(dataclasses.replace(view, dtype=dtype, axes=axes))


def _window_axes(view: View, windows: Im2Col) -> tuple[Axis, ...]:
    images, *sizes, channels = view.shape
    rows = images * math.prod(n + sum(p) - w + 1 for n, p, w in zip(sizes, windows.padding, windows.window_shape))
    plain = [Axis(n, (), n, dim=k) for k, n in enumerate((rows, *windows.window_shape, channels))]
    return tuple(plain)


__all__ = ["Axis", "Digits", "Gather", "Index", "Term", "View", "as_digits", "fold", "merged", "resolve", "spread"]
