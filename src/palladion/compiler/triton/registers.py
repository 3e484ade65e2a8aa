"""Reading and writing Cells: Refs that live in registers, as one block each.

The whole of a Cell is read and written as it is. A part is picked with `tt.gather` along each axis that it does not
cover, and written by choosing between the new elements and the old. A Cell that a program reads before it has stored
anything is refused: there is nothing in it (what earlier programs leave for it is carried in a loop: `sequence.py`).
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

from palladion.compiler.triton import emit
from palladion.compiler.triton.lowering import Cell, refusal
from palladion.compiler.triton.refs import Coord, View
from palladion.compiler.triton.shapes import gathered


def held(eqn: Any, cell: Cell) -> Any:
    """What a Cell holds.

    Raises: ValueError: nothing yet, at least not on every path that leads here.
    """
    if cell.value is None:
        raise refusal(
            ValueError,
            f"{cell.label} is read before the program has stored anything in it.",
            eqn,
            "what earlier programs left there is carried along a grid axis, but the first one finds nothing: store in "
            "it first, under pl.when(pl.program_id(…) == 0)",
        )
    return cell.value


def read_cell(eqn: Any, cell: Cell, view: View) -> Any:
    """A part of a Cell."""
    value = held(eqn, cell)
    if view.covers:
        return _seen_as(value, view)
    parts = _axes(eqn, cell, view)
    for axis, at in enumerate(parts):
        if at is not None:
            value = gathered(value, axis, at)
    return _seen_as(emit.reshape(value, view.shape), view)


def _seen_as(value: Any, view: View) -> Any:
    kind = emit.typed(emit.shape_of(value), emit.element_type(view.dtype))
    return value if value.type == kind else tt.bitcast(kind, value)


def write_cell(eqn: Any, cell: Cell, view: View, new: Any) -> None:
    """Replace a part of a Cell."""
    if view.dtype != cell.dtype:
        new = tt.bitcast(emit.typed(emit.shape_of(new), emit.element_type(cell.dtype)), new)
    if view.covers:
        cell.value = emit.broadcast(new, cell.block)
        return
    if not view.box:
        raise _not_a_box(eqn, cell)
    old = emit.const(0, cell.dtype, cell.block) if cell.value is None else cell.value
    parts = _axes(eqn, cell, view)
    sizes = [n if at is None else emit.shape_of(at)[0] for n, at in zip(cell.block, parts)]
    new = emit.reshape(new, sizes)
    inside = None
    for axis, (at, n) in enumerate(zip(parts, cell.block)):
        if at is None:
            continue
        new, within = _spread(new, axis, at, n, len(sizes))
        inside = emit.both(inside, within)
    if inside is not None:
        new = emit.select(emit.broadcast(inside, cell.block), emit.broadcast(new, cell.block), old)
    cell.value = new


def _spread(new: Any, axis: int, at: Any, size: int, rank: int) -> tuple[Any, Any]:
    """The new elements at the places `at` (in a row) of an axis; and which places those are."""
    count = emit.shape_of(at)[0]
    first = emit.reshape(gathered(at, 0, emit.full((1,), 0, emit.scalar_type(at))), ())
    place = emit.sub(emit.arange(size, 0, 1), first)
    inside = arith.cmpi(arith.CmpIPredicate.ult, place, emit.like(place, count))
    for d in range(rank):
        if d != axis:
            inside = tt.expand_dims(inside, d)
    return gathered(new, axis, emit.clamp(place, 0, count - 1)), inside


def _axes(eqn: Any, cell: Cell, view: View) -> list[Any]:
    """For each axis of a Cell the indices that a view picks, as a vector; None for all of them, in order.

    Raises: NotImplementedError: the view is not a box of the Cell.
    """
    kept = [d for d, c in enumerate(view.coords) if c.lanes is not None]
    places = [_place(c) for c in view.coords]
    in_order = [-1 if (place := places[d]) is None else place for d in kept]
    if -1 in in_order or in_order != sorted(set(in_order)):
        raise _not_a_box(eqn, cell)
    result: list[Any] = []
    for c, n in zip(view.coords, cell.block):
        if n == 1:
            result.append(None)
        elif c.lanes is None:
            i32 = emit.element_type("int32")
            at = emit.full((), c.base, i32) if isinstance(c.base, int) else c.base
            result.append(emit.broadcast(at, (1,)))
        else:
            total = Coord(c.base, c.lanes).total()
            result.append(_vector(total))
    return result


def _not_a_box(eqn: Any, cell: Cell) -> Exception:
    headline = f"{cell.label} lives in registers, where parts without gaps are read and written, in order."
    return refusal(NotImplementedError, headline, eqn, "read the whole of it, choose with jnp.where, and store all")


def _place(c: Coord) -> int | None:
    """Along which axis of the view the index changes; None if along several."""
    if c.lanes is None:
        return None
    long = [d for d, n in enumerate(emit.shape_of(c.lanes)) if n > 1]
    return long[0] if len(long) == 1 else 0 if not long else None


def _vector(x: Any) -> Any:
    count = max(emit.shape_of(x))
    return emit.reshape(x, (count,))
