"""Copies as boxes of tensor maps: played through in NumPy, element by element, against the views that they copy."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from palladion import jaxlink
from palladion.compiler.gpu import clusters, copies_in, issue, tma
from palladion.compiler.gpu.values import Scalar
from palladion.language.gpu.memory import GMEM, SwizzleTransform, TilingTransform

from .addresses import a_ref, dynamic, index, number, placed, swizzled, view

f16, f32, i8 = jnp.float16, jnp.float32, jnp.int8


def tiles(columns: int, width: int):
    return TilingTransform((8, columns)), SwizzleTransform(width)


def play(plan: tma.Plan, itemsize: int, base: int, **values: int) -> dict[int, int | None]:
    """{address in shared memory: address in global memory, or None for what lies outside}, of all boxes."""
    found: dict[int, int | None] = {}
    m = plan.map
    steps = [itemsize, *m.strides]
    counts = [-(-b // e) for b, e in zip(m.box, m.element_strides)]
    for loop in itertools.product(*map(range, plan.loops)):
        known = {**values, **{f"k{k}": n for k, n in enumerate(loop)}}
        start = [number(c.text(), **known) for c in plan.coordinates]
        at = base + sum(n * s for n, s in zip(loop, plan.strides))
        for offset, box in enumerate(itertools.product(*map(range, reversed(counts)))):
            place = [s + b * e for s, b, e in zip(start, reversed(box), m.element_strides)]
            inside = all(0 <= p < n for p, n in zip(place, m.dims))
            to = swizzled(m.swizzle, at + offset * itemsize) if m.swizzle else at + offset * itemsize
            assert to not in found
            found[to] = m.offset + sum(p * s for p, s in zip(place, steps)) if inside else None
    return found


def check(array, buffer, source, target, expected, boxes: int, **values: int):
    """The plan moves each element of the source to its place; `expected`: global addresses, -1 outside."""
    plan = issue.planned(source, target)
    assert plan is not None
    assert np.prod(plan.loops, initial=1) == boxes
    folded = target.folded()
    base = folded.offset + sum(int(a.places()[0]) for a in folded.axes)
    base += sum(number(str(t), **values) for t in folded.terms)
    found = play(plan, jnp.dtype(array.dtype).itemsize, base, **values)
    where = _seen(buffer, target, values)
    assert len(found) == expected.size
    for to, address in zip(where.reshape(-1), expected.reshape(-1)):
        assert found[int(to)] == (None if address < 0 else address)


def _seen(buffer, target, values) -> np.ndarray:
    """Where the elements of a view of a buffer lie, by the slow way."""
    numbers = np.arange(placed(buffer).size).reshape(buffer.shape)
    slots = [values.get("slot", 0)] if len(buffer.shape) == 3 else []
    for s in slots:
        numbers = numbers[s]
    rows = target.shape[0]
    numbers = numbers[:rows] if numbers.shape[0] != rows else numbers
    return placed(buffer).reshape(-1)[numbers]


def global_box(array, rows, columns) -> np.ndarray:
    """Addresses of array[rows, columns], -1 outside."""
    m, n = array.shape
    itemsize = jnp.dtype(array.dtype).itemsize
    at = (rows[:, None] * n + columns) * itemsize
    return np.where((rows[:, None] < m) & (rows[:, None] >= 0) & (columns < n) & (columns >= 0), at, -1)


@pytest.mark.parametrize(
    ("shape", "dtype", "columns", "width"),
    [((64, 64), f16, 64, 128), ((64, 64), f32, 32, 128), ((64, 128), f16, 64, 128), ((16, 64), f16, 32, 64)],
)
def test_tiles_come_in_one_box(shape, dtype, columns, width):
    array, buffer = a_ref((128, 256), dtype, space=GMEM), a_ref(shape, dtype, tiles(columns, width))
    m, n = shape
    source = view(array, index((128, 256), (dynamic("r"), m), (dynamic("c"), n)))
    expected = global_box(array, 16 + np.arange(m), 64 + np.arange(n))
    check(array, buffer, source, view(buffer), expected, boxes=1, r=16, c=64)


def test_a_slot_of_several():
    array, buffer = a_ref((128, 256), f16, space=GMEM), a_ref((3, 64, 64), f16, tiles(64, 128))
    source = view(array, index((128, 256), (64, 64), (dynamic("c", 64), 64)))
    target = view(buffer, index((3, 64, 64), dynamic("slot"), (0, 64), (0, 64)))
    expected = global_box(array, 64 + np.arange(64), 128 + np.arange(64))
    check(array, buffer, source, target, expected, boxes=1, c=128, slot=2)


def test_ragged_arrays_come_tile_by_tile():
    """Of 100 columns a map cannot have tiles of 64: what lies outside would not be zero."""
    array, buffer = a_ref((60, 104), f16, space=GMEM), a_ref((64, 128), f16, tiles(64, 128))
    source = view(array, index((60, 104), (dynamic("r", 8), 64), (dynamic("c", 64), 128)))
    expected = global_box(array, 8 + np.arange(64), 64 + np.arange(128))
    check(array, buffer, source, view(buffer), expected, boxes=16, r=8, c=64)


def test_long_rows_are_cut():
    array, buffer = a_ref((4096,), f32, space=GMEM), a_ref((1024,), f32)
    source, target = view(array, index((4096,), (dynamic("s", 256), 1024))), view(buffer)
    expected = (512 + np.arange(1024)) * 4
    check(array, buffer, source, target, expected, boxes=1, s=512)
    source = view(array, index((4096,), (dynamic("s"), 1024)))
    expected = (33 + np.arange(1024)) * 4
    check(array, buffer, source, target, expected, boxes=4, s=33)


def test_steps_and_integers():
    array, buffer = a_ref((6, 64, 32), f32, space=GMEM), a_ref((16, 32), f32)
    source = view(array, index((6, 64, 32), dynamic("b"), (2, 16, 3), (0, 32)))
    at = 4 * 2048 + (2 + 3 * np.arange(16))[:, None] * 32 + np.arange(32)
    check(array, buffer, source, view(buffer), at * 4, boxes=1, b=4)


def test_a_dimension_of_one():
    array, buffer = a_ref((1, 64, 32), f32, space=GMEM), a_ref((16, 32), f32)
    source = view(array, index((1, 64, 32), dynamic("b"), (8, 16), (0, 32)))
    expected = (8 + np.arange(16))[:, None] * 128 + np.arange(32) * 4
    check(array, buffer, source, view(buffer), expected, boxes=1, b=0)


def test_outside_of_the_array_is_none():
    array, buffer = a_ref((50, 64), f16, space=GMEM), a_ref((32, 64), f16)
    source = view(array, index((50, 64), (dynamic("r"), 32), (dynamic("c"), 64)))
    expected = global_box(array, 40 + np.arange(32), -8 + np.arange(64))
    check(array, buffer, source, view(buffer), expected, boxes=1, r=40, c=-8)


def test_reshaped_arrays():
    array, buffer = a_ref((128, 64), f16, space=GMEM), a_ref((16, 64), f16)
    source = view(array, jaxlink.ReshapeTransform((8, 16, 64)), index((8, 16, 64), dynamic("b"), (0, 16), (0, 64)))
    expected = global_box(array, 80 + np.arange(16), np.arange(64))
    check(array, buffer, source, view(buffer), expected, boxes=1, b=5)


def test_what_the_engine_cannot_copy():
    seven = a_ref((50, 7), f32, space=GMEM)
    assert issue.planned(view(seven), view(a_ref((50, 7), f32))) is None  # rows of 28 bytes
    square = a_ref((64, 64), f16, space=GMEM)
    turned = view(square, jaxlink.TransposeTransform((1, 0)))
    assert issue.planned(turned, view(a_ref((64, 64), f16))) is None  # the last dimension must stay
    stepped = view(square, index((64, 64), (0, 64), (0, 32, 2)))
    assert issue.planned(stepped, view(a_ref((64, 32), f16))) is None


@pytest.mark.parametrize("start", [8, 12])
def test_unknown_starts_of_tiles_are_promised_and_known_ones_are_not_believed(start):
    array, buffer = a_ref((128, 128), f16, space=GMEM), a_ref((64, 128), f16, tiles(64, 128))
    source = view(array, index((128, 128), (start, 64), (0, 128)))
    expected = global_box(array, start + np.arange(64), np.arange(128))
    check(array, buffer, source, view(buffer), expected, boxes=1 if start % 8 == 0 else 8)


def test_two_blocks_share_a_copy():
    """Each brings half; together they bring all, to the same places as one would."""
    array, buffer = a_ref((128, 256), f16, space=GMEM), a_ref((64, 128), f16, tiles(64, 128))
    source = view(array, index((128, 256), (dynamic("r", 64), 64), (dynamic("c", 128), 128)))
    both = clusters.Partners((0, 1), "0", Scalar("block", np.dtype(np.int32)))
    found: dict[int, int | None] = {}
    for block in range(2):
        mine = copies_in.shares(source, view(buffer), both)
        assert mine is not None
        plan = issue.planned(*mine)
        assert plan is not None
        target = mine[1].folded()
        base = target.offset + sum(number(str(t), block=block) for t in target.terms)
        part = play(plan, 2, base, r=64, c=128, block=block)
        assert not found.keys() & part.keys()
        found |= part
    expected = global_box(array, 64 + np.arange(64), 128 + np.arange(128))
    assert found == dict(zip(placed(buffer).reshape(-1).tolist(), expected.reshape(-1).tolist()))
