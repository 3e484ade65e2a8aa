"""Vectors from and to memory: contiguous, reversed, a few elements apart, or anywhere; whole or in part.

A vector of which only the first lanes count (`valid`) touches no other memory; its other lanes are zero or repeat a
valid one, so that whatever is computed from them stays harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palladion.compiler.cpu.builder import (
    const,
    extract,
    gep,
    i1,
    i32,
    load,
    masked_load,
    masked_store,
    shuffle,
    store,
    vec,
)

FEW = 4  # elements apart: up to here a strided vector is put together from whole ones


def _mask(lanes: int, valid: int) -> Any:
    return const([lane < valid for lane in range(lanes)], vec(i1, lanes))


def read(b: Any, ty: Any, place: Any, lanes: int, valid: int) -> Any:
    """`valid` contiguous elements."""
    wide = vec(ty, lanes)
    return load(b, wide, place) if valid == lanes else masked_load(b, wide, place, _mask(lanes, valid))


def write(b: Any, value: Any, place: Any, valid: int) -> None:
    """`valid` contiguous elements."""
    lanes = value.type.count
    if valid == lanes:
        store(b, value, place)
    else:
        masked_store(b, value, place, _mask(lanes, valid))


def flipped(b: Any, value: Any, valid: int) -> Any:
    """The valid lanes in reverse."""
    lanes = value.type.count
    return shuffle(b, value, None, [max(valid - 1 - k, 0) for k in range(lanes)])


def read_apart(b: Any, ty: Any, place: Any, lanes: int, step: int) -> Any:
    """Elements 0, step, 2 * step, …, for steps from 2 to FEW: whole vectors, and the lanes picked out of them."""
    last = (lanes - 1) * step
    value = None
    for k in range(step):
        start = min(k * lanes, last + 1 - lanes)  # the last vector ends with the last element
        chunk = load(b, vec(ty, lanes), gep(b, place, start, ty))
        taken = [lane * step for lane in range(lanes)]
        mine = {lane: at - start for lane, at in enumerate(taken) if start <= at < start + lanes}
        if value is None:
            value = shuffle(b, chunk, None, [mine.get(lane, 0) for lane in range(lanes)])
        else:
            value = shuffle(b, value, chunk, [lanes + mine[lane] if lane in mine else lane for lane in range(lanes)])
    return value


def write_apart(b: Any, value: Any, place: Any, step: int) -> None:
    """The lanes to elements 0, step, 2 * step, …: whole vectors of which the elements between are left alone."""
    lanes, ty = value.type.count, value.type.element
    for k in range(step):
        mine = {at: (k * lanes + at) // step for at in range(lanes) if (k * lanes + at) % step == 0}
        spread = shuffle(b, value, None, [mine.get(at, 0) for at in range(lanes)])
        mask = const([at in mine for at in range(lanes)], vec(i1, lanes))
        masked_store(b, spread, gep(b, place, k * lanes, ty), mask)


def read_each(b: Any, ty: Any, places: list[Any], lanes: int) -> Any:
    """One element from each place; lanes without one are zero."""
    value = const(0, vec(ty, lanes))
    for k, p in enumerate(places):
        value = b.insert_element(value, load(b, ty, p), const(k, i32))
    return value


def write_each(b: Any, value: Any, places: list[Any]) -> None:
    """One lane to each place, in order."""
    for k, p in enumerate(places):
        store(b, extract(b, value, k), p)


def where_valid(b: Any, value: Any, valid: int, otherwise: Any) -> Any:
    """The vector with another value in the lanes that do not count."""
    lanes = value.type.count
    return value if valid == lanes else b.select(_mask(lanes, valid), value, otherwise)


def prefixes(b: Any, value: Any, combine: Callable[[Any, Any], Any], neutral: Any) -> Any:
    """Lane k becomes lanes 0 to k combined: doubling distances (Hillis and Steele, Data parallel algorithms, 1986)."""
    lanes, distance = value.type.count, 1
    while distance < lanes:
        earlier = [0 if k < distance else lanes + k - distance for k in range(lanes)]
        moved = shuffle(b, neutral, value, earlier)
        value = combine(moved, value)
        distance *= 2
    return value
