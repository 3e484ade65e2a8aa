"""Visited blocks against plain Python: loops over the grid with dictionaries, on random index maps."""

import itertools
import math
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion.language.grid import make_block_mapping
from palladion.language.index_maps import MAX_POINTS
from palladion.report.visits import Grid, Visits, find_revisit, find_sharing, find_unvisited


def visits_of(block, shape, grid, index_map):
    spec, array = pl.BlockSpec(block, index_map), jax.ShapeDtypeStruct(shape, jnp.float32)
    return Visits.of(make_block_mapping(spec, array, tuple(grid), origin="x"), Grid.of(grid))


def random_case(seed):
    """A grid of two or three axes, blocks of a 2-d array, and an index map with random integer coefficients."""
    rng = random.Random(seed)
    grid = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    blocks = (rng.randint(1, 4), rng.randint(1, 4))
    weights = [[rng.choice([0, 0, 1, 1, -1, 2]) for _ in grid] for _ in blocks]

    def index_map(*ids):
        return tuple(sum(w * i for w, i in zip(row, ids)) for row in weights)

    def visited(point):
        return tuple(min(max(i, 0), n - 1) for i, n in zip(index_map(*point), blocks))

    return grid, blocks, index_map, [(p, visited(p)) for p in itertools.product(*map(range, grid))]


SEEDS = range(60)


def test_the_random_cases_show_what_they_are_to_show():
    results = [random_case(seed) for seed in SEEDS]
    looked = [visits_of((8, 128), (b[0] * 8, b[1] * 128), g, m) for g, b, m, _ in results]
    for find in (find_revisit, find_sharing, find_unvisited):
        yes = sum(find(v) is not None for v in looked)
        assert 8 <= yes <= len(looked) - 8, find


@pytest.mark.parametrize("seed", SEEDS)
def test_visits_agree_with_loops_over_the_grid(seed):
    grid, blocks, index_map, history = random_case(seed)
    visits = visits_of((8, 128), (blocks[0] * 8, blocks[1] * 128), grid, index_map)

    runs = []  # (block, first point, last point)
    for point, block in history:
        if runs and runs[-1][0] == block:
            runs[-1] = (block, runs[-1][1], point)
        else:
            runs.append((block, point, point))
    assert visits.copies == len(runs)
    assert visits.moved_bytes == len(runs) * 8 * 128 * 4

    again = [k for k, run in enumerate(runs) if run[0] in [r[0] for r in runs[:k]]]
    revisit = find_revisit(visits)
    if not again:
        assert revisit is None
    else:
        first = again[0]
        before = [run for run in runs[:first] if run[0] == runs[first][0]][-1]
        assert (revisit.block, revisit.point) == runs[first][:2]
        assert (revisit.first, revisit.last) == before[1:]
        assert revisit.count == len({runs[k][0] for k in again})

    sharers = {}
    for point, block in history:
        sharers.setdefault(block, []).append(point)
    shared = {block: ps for block, ps in sharers.items() if len(ps) > 1}
    sharing = find_sharing(visits)
    if not shared:
        assert sharing is None
    else:
        axes = {a for ps in shared.values() for a in range(len(grid)) if len({p[a] for p in ps}) > 1}
        assert (set(sharing.axes), sharing.count, sharing.total) == (axes, len(shared), len(sharers))
        assert sharing.block == next(iter(shared)) and sharing.programs == len(shared[sharing.block])
        assert sharing.points == tuple(shared[sharing.block][:2])

    missing = [b for b in itertools.product(*map(range, blocks)) if b not in sharers]
    unvisited = find_unvisited(visits)
    if not missing:
        assert unvisited is None
    else:
        assert (unvisited.count, unvisited.first) == (len(missing), missing[0])
        assert (unvisited.total, unvisited.unit) == (math.prod(blocks), "blocks")


@pytest.mark.parametrize("seed", range(12))
def test_unvisited_elements_of_overlapping_blocks(seed):
    rng = random.Random(seed)
    shape, sizes = (rng.randint(3, 9), rng.randint(3, 9)), (rng.randint(1, 4), rng.randint(1, 4))
    pads = [(rng.randint(0, 2), rng.randint(0, 2)) for _ in sizes]
    steps, grid = (rng.randint(1, 3), rng.randint(1, 3)), (rng.randint(1, 4), rng.randint(1, 4))
    block = tuple(pl.Element(s, p) for s, p in zip(sizes, pads))
    visits = visits_of(block, shape, grid, lambda i, j: (i * steps[0], j * steps[1]))

    covered = np.zeros(shape, bool)
    for point in itertools.product(*map(range, grid)):
        window = []
        for i, step, n, size, (low, high) in zip(point, steps, shape, sizes, pads):
            start = min(i * step, n + low + high - 1) - low
            window.append(slice(max(start, 0), max(start + size, 0)))
        covered[tuple(window)] = True
    missing = np.argwhere(~covered)
    unvisited = find_unvisited(visits)
    if not len(missing):
        assert unvisited is None
    else:
        assert (unvisited.count, unvisited.total) == (len(missing), covered.size)
        assert (unvisited.first, unvisited.unit) == (tuple(missing[0]), "elements")


def test_the_part_of_a_block_outside_the_array_is_not_moved():
    visits = visits_of((32,), (100,), (4,), lambda i: (i,))
    assert visits.moved_bytes == 100 * 4


def test_bounded_slices_with_different_sizes_are_different_blocks():
    visits = visits_of((pl.BoundedSlice(8),), (16,), (4,), lambda i: (pl.ds(0, i),))
    assert visits.copies == 4 and visits.moved_bytes == (0 + 1 + 2 + 3) * 4
    assert find_sharing(visits) is None
    assert find_unvisited(visits).first == (3,)


def test_an_empty_grid_visits_nothing():
    visits = visits_of((8,), (32,), (0,), lambda i: (i,))
    assert (visits.copies, visits.moved_bytes) == (0, 0)
    assert find_revisit(visits) is None and find_sharing(visits) is None
    assert find_unvisited(visits).count == 4


def test_a_grid_without_axes_is_one_program():
    visits = visits_of((), (), (), None)
    assert visits.copies == 1 and find_unvisited(visits) is None


def test_a_large_grid_is_cut_down_from_the_outside():
    grid = Grid.of((4096, 1, 4096))
    assert grid.sampled and grid.programs == 1 << 24
    assert grid.points.shape == (3, MAX_POINTS)
    assert set(grid.points[2]) == set(range(4096)) and grid.points[0].max() == 255
    steps = np.diff(np.ravel_multi_index(grid.points, (4096, 1, 4096)))
    assert (steps > 0).all()  # program order
    assert Grid.of((3, 1 << 30)).points[0].max() == 1  # two of every axis at least


def test_copies_of_a_large_grid_are_scaled_up():
    shape = (4096 * 8, 4096 * 128)
    visits = visits_of((8, 128), shape, (4096, 4096), lambda i, j: (i, j))
    assert visits.copies == 1 << 24 and visits.moved_bytes == math.prod(shape) * 4
    rows = visits_of((8, shape[1]), shape, (4096, 4096), lambda i, j: (i, 0))
    assert rows.copies == 4096 and rows.moved_bytes == math.prod(shape) * 4


def test_100000_programs_take_well_under_a_second():
    grid, shape = (50, 40, 50), (50 * 8, 40 * 128)
    start = time.perf_counter()
    visits = visits_of((8, 128), shape, grid, lambda i, j, k: (i, j))
    assert find_revisit(visits) is None and find_unvisited(visits) is None
    assert find_sharing(visits).axes == (2,) and visits.moved_bytes
    assert time.perf_counter() - start < 0.8  # 0.02 s on an idle core of 2024
