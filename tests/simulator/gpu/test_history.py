"""The GPU's history in cells finds what a history of single elements finds."""

import numpy as np
import pytest

from palladion.simulator import memory
from palladion.simulator.clocks import Actor, Registry
from palladion.simulator.gpu.history import MANY, Buffer
from palladion.simulator.memory import Region


def actors(registry, count):
    return [registry.actor(f"actor {i}") for i in range(count)]


def some_region(rng, shape):
    """A random chain of views: a box, integers, strides, index arrays, a transposition, another box."""
    index = []
    for n in shape:
        start, stop = sorted(rng.integers(0, n + 1, 2).tolist())
        kind = rng.choice(["slice", "slice", "whole", "int", "stride", "array"])
        index.append(
            {
                "slice": slice(start, stop, 1),
                "whole": slice(0, n, 1),
                "int": int(rng.integers(0, n)),
                "stride": slice(start, stop, 2),
                "array": slice(0, n, 1),
            }[str(kind)]
        )
    if rng.random() < 0.15:
        index[int(rng.integers(len(shape)))] = rng.integers(0, min(shape), 3)
    views = [("index", tuple(index))]
    part = Region(views).get(np.zeros(shape))
    if isinstance(part, np.ndarray) and part.ndim == 2 and rng.random() < 0.5:
        views.append(("transpose", (1, 0)))
        part = part.T
        if rng.random() < 0.5:
            views.append(("index", tuple(slice(0, int(rng.integers(0, n + 1)), 1) for n in part.shape)))
        elif rng.random() < 0.3 and part.size:
            views.append(("reshape", (part.size,)))
            if rng.random() < 0.5:
                views.append(("index", (slice(0, part.size // 2, 1),)))
    return Region(views)


@pytest.mark.parametrize("seed", range(25))
def test_cells_find_what_elements_find(seed):
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 9)), int(rng.integers(1, 90)))
    elements = memory.Buffer(np.zeros(shape), "elements", tracked=True)
    cells = Buffer(np.zeros(shape), "cells", tracked=True)
    registry = Registry(2)
    who: list[Actor] = actors(registry, 3)
    for step in range(120):
        actor = who[int(rng.integers(3))]
        region, view = some_region(rng, shape), int(rng.integers(2))
        what = rng.choice(["read", "write", "meet", "fence", "unwritten"], p=[0.35, 0.25, 0.15, 0.15, 0.1])
        if what == "meet":
            actor.clock.join(who[int(rng.integers(3))].publish())
        elif what == "fence":
            actor.fence(0, 1)
        elif what == "unwritten":
            assert cells.unwritten(region) == elements.unwritten(region), step
        else:
            name = "read_by" if what == "read" else "written_by"
            expected = getattr(elements, name)(actor, region, step, view)
            found = getattr(cells, name)(actor, region, step, view)
            assert (found is None) == (expected is None), (step, what, region.views)
            if found is not None:
                assert found[0] == expected[0]


def test_a_regular_pattern_is_cut_at_once():
    cells = Buffer(np.zeros((4096, 8)), "cells", tracked=True)
    actor = Registry(1).actor("one")
    for k in range(2 * MANY):
        assert cells.written_by(actor, Region([("index", (slice(8 * k, 8 * k + 8, 1), slice(0, 8, 1)))]), 1) is None
    assert len(cells.cuts[0]) == 4096 // 8 + 1
    assert len(cells.cuts[1]) == 2


def test_parts_share_their_buffers_history():
    whole = Buffer(np.zeros((8, 8)), "whole", tracked=True)
    one, two = actors(Registry(1), 2)
    part = whole.part((slice(2, 4, 1), slice(0, 8, 1)))
    assert part.written_by(one, Region(), 1) is None
    assert whole.read_by(two, Region([("index", (3, slice(0, 8, 1)))]), 1)[0] == "wrote"
    assert whole.read_by(two, Region([("index", (4, slice(0, 8, 1)))]), 1) is None
    assert not part.unwritten(Region())
    assert whole.unwritten(Region())
    part.forget(Region())
    assert part.unwritten(Region())
