"""Loops of GPU kernels: which block does which point, what is carried, what is refused. Values on the simulated GPU."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

SIMULATED = plgpu.InterpretGPUParams(detect_races=True)
BLOCKS: dict[str, Any] = dict(grid=(2, 3), grid_names=("a", "b"))


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# --- planar_snake -----------------------------------------------------------------------------------------------------
def snake(shape, minor_dim, tile_width):
    place = jnp.arange(int(np.prod(shape)), dtype=jnp.int32)
    rows, columns = jax.vmap(lambda i: plgpu.planar_snake(i, shape, minor_dim, tile_width))(place)
    assert rows.dtype == columns.dtype == jnp.int32
    return list(zip(rows.tolist(), columns.tolist()))


def test_the_order_of_a_snake():
    """As JAX 0.12 gives it."""
    assert snake((3, 4), 0, 2) == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (2, 2), (2, 1), (2, 0),
    ]  # fmt: skip
    assert snake((3, 4), 1, 2) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (1, 2), (1, 3), (0, 2), (0, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (8, 2), (1, 9), (4, 4)])
@pytest.mark.parametrize("minor_dim", [0, 1])
@pytest.mark.parametrize("width", [1, 3, 4, 16])
def test_a_snake_visits_each_tile_once_and_its_strips_in_turn(shape, minor_dim, width):
    order = snake(shape, minor_dim, width)
    assert sorted(order) == [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    strips = [tile[minor_dim] // width for tile in order]
    assert strips == sorted(strips)
    for (before, here), (strip, same) in zip(itertools.pairwise(order), itertools.pairwise(strips)):
        assert abs(before[1 - minor_dim] - here[1 - minor_dim]) <= (1 if strip == same else 0)


def test_a_snake_of_python_integers():
    row, column = plgpu.planar_snake(4, (3, 4), 1, 2)
    assert (int(row), int(column), row.dtype) == (2, 0, jnp.int32)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (((3, 4), 2, 1), "The minor_dim of plgpu.planar_snake is 2"),
        (((3, 4), 1, 0), "The tile_width of plgpu.planar_snake is"),
        (((3, 4, 5), 1, 1), "orders a plane of tiles, but its shape is (3, 4, 5)"),
    ],
)
def test_what_a_snake_cannot_be(arguments, said):
    with pytest.raises(ValueError) as error:
        plgpu.planar_snake(jnp.int32(0), *arguments)
    assert said in str(error.value)


# --- nd_loop ----------------------------------------------------------------------------------------------------------
def dealt(grid, axes=("a", "b"), tiling=None, sizes=None):
    """For each point: which block did it, as which of its steps, and how many it said it has."""

    def body(o_ref):
        at = sizes(o_ref) if sizes else grid

        @plgpu.nd_loop(at, collective_axes=axes, tiling=tiling)
        def _(info):
            me = lax.axis_index("a") * 3 + lax.axis_index("b")
            o_ref[tuple(info.index)] = jnp.stack([me, info.local_index, info.num_local_steps])

    return np.asarray(plgpu.kernel(body, out_type=ints(*grid, 3), interpret=SIMULATED, **BLOCKS)())


@pytest.mark.parametrize("grid", [(4, 5), (4,), (13,), (2, 3, 2)])
def test_points_are_dealt_round_and_round(grid):
    number = np.arange(np.prod(grid)).reshape(grid)
    done = dealt(grid)
    np.testing.assert_array_equal(done[..., 0], number % 6)
    np.testing.assert_array_equal(done[..., 1], number // 6)
    np.testing.assert_array_equal(done[..., 2], (number.size - number % 6 + 5) // 6)


def test_a_grid_known_at_run_time():
    done = dealt((4, 5), sizes=lambda _: (lax.axis_index("a") * 0 + 4, lax.axis_index("a") * 0 + 5))
    np.testing.assert_array_equal(done[..., 0].ravel(), np.arange(20) % 6)


def test_tiles_come_one_after_another():
    """As JAX 0.12 deals them."""
    done = dealt((4, 6), tiling=(2, 2))
    assert done[..., 0].tolist() == [[0, 1, 4, 5, 2, 3], [2, 3, 0, 1, 4, 5], [0, 1, 4, 5, 2, 3], [2, 3, 0, 1, 4, 5]]
    assert done[..., 1].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 3, 3], [2, 2, 3, 3, 3, 3]]


def test_the_order_of_axes():
    def body(o_ref):
        @plgpu.nd_loop((6,), collective_axes=("b", "a"))
        def _(info):
            o_ref[info.index[0]] = lax.axis_index("b") * 10 + lax.axis_index("a")

    done = plgpu.kernel(body, out_type=ints(6), interpret=SIMULATED, **BLOCKS)()
    assert done.tolist() == [0, 1, 10, 11, 20, 21]


def test_a_carry_and_no_steps():
    def body(o_ref):
        me = lax.axis_index("a") * 3 + lax.axis_index("b")
        start = (jnp.int32(0), {"steps": jnp.int32(0), "where": o_ref})

        @plgpu.nd_loop((15,), collective_axes=("a", "b"), init_carry=start)
        def last(info, carry):
            total, rest = carry
            return total + info.index[0], {"steps": rest["steps"] + 1, "where": o_ref}

        assert last[1]["where"] is o_ref
        none = plgpu.nd_loop((5, 0), collective_axes="b", init_carry=jnp.int32(7))(lambda info, carry: carry + 1)
        o_ref[me] = jnp.stack([last[0], last[1]["steps"], none])

    done = plgpu.kernel(body, out_type=ints(6, 3), interpret=SIMULATED, **BLOCKS)()
    own = [range(b, 15, 6) for b in range(6)]
    assert done.tolist() == [[sum(points), len(points), 7] for points in own]


def in_kernel(function, **how):
    """The mistake in a kernel."""
    with pytest.raises((TypeError, ValueError)) as error:
        jax.make_jaxpr(plgpu.kernel(lambda o_ref: function(), out_type=ints(4), **BLOCKS | how))()
    return str(error.value)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(collective_axes="c"), "'c' is not an axis of the kernel's mesh"),
        (dict(collective_axes=("a", "a")), "must name each axis once"),
        (dict(collective_axes="a", tiling=(3, 1)), "Tiling (3, 1) does not divide grid (4, 6)"),
        (dict(collective_axes="a", tiling=(2,)), "does not fit a grid of 2 axes"),
        (dict(grid=(4, 0.5), collective_axes="a"), "Axis 1 of the grid of plgpu.nd_loop is"),
        (dict(grid=(4, -1), collective_axes="a"), "has a negative size"),
    ],
)
def test_what_nd_loop_refuses(options, said):
    options = {"grid": (4, 6), **options}
    assert said in in_kernel(lambda: plgpu.nd_loop(**options)(lambda info: None))


@pytest.mark.parametrize(
    "body, start, said",
    [
        (lambda: None, None, "takes 0 parameters (), but it gets an NDLoopInfo"),
        (lambda info: None, 1, "but it gets an NDLoopInfo and, by keyword, carry"),
        (lambda info: 3, None, "but nothing is carried"),
        (lambda info, carry: (carry, carry), 1, "must return a carry like the one it gets"),
        (lambda info, carry: jnp.float32(1), 1, "carries float32[] on, but began with int32[]"),
    ],
)
def test_what_a_body_must_be(body, start, said):
    assert said in in_kernel(lambda: plgpu.nd_loop((4,), collective_axes="a", init_carry=start)(body))


# --- dynamic_scheduling_loop ------------------------------------------------------------------------------------------
def taken_over(grid, names, **how):
    """For each point of the grid the number of the block that did it, and for each block its number of steps."""

    def body(who_ref, steps_ref):
        threads = how.get("thread_name")
        writes = True if threads is None else lax.axis_index(threads) == 1
        for axis in how.get("cluster_names", ()):
            writes = writes & (lax.axis_index(axis) == 1)
        own = tuple(lax.axis_index(name) for name in names)
        me = own[0] * grid[1] + own[1]

        def work(info, carry):
            assert info.num_local_steps is None
            number = info.index[0] * grid[1] + info.index[1]
            same = jnp.where(info.local_index == 0, number == me, number != me) & (carry == info.local_index)
            pl.when(writes)(lambda: who_ref.set(jnp.where(same, me, -1), tuple(info.index)))
            return carry + 1

        loop = plgpu.dynamic_scheduling_loop(grid_names=names, thread_axis=threads, init_carry=jnp.int32(0))
        last = loop(work)
        pl.when(writes)(lambda: steps_ref.set(last, own))

    out = [ints(*grid)] * 2
    small = plgpu.InterpretGPUParams(detect_races=True, arch="sm_100a", num_sms=4)  # not all blocks fit at once
    return plgpu.kernel(body, out_type=out, grid=grid, grid_names=names, interpret=small, **how)()


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(num_threads=3, thread_name="wg"),
        dict(cluster=(2,), cluster_names=("c",)),
        dict(cluster=(2,), cluster_names=("c",), num_threads=2, thread_name="wg"),
    ],
    ids=["one thread", "threads", "clusters", "both"],
)
def test_each_block_is_done_once_by_someone(how):
    who, steps = taken_over((60, 5), ("x", "y"), **how)
    done = np.bincount(np.asarray(who).ravel(), minlength=300)
    np.testing.assert_array_equal(np.maximum(steps, 0).ravel(), done)
    assert done.sum() == 300 and done.max() > 1


def test_what_dynamic_scheduling_refuses():
    threads = dict(num_threads=2, thread_name="wg")
    loop = plgpu.dynamic_scheduling_loop
    said = in_kernel(lambda: loop(("a", "b"))(lambda info: None), **threads)
    assert "thread_axis is None, but the threads of the kernel are along 'wg'" in said
    assert "thread_axis is 'a'" in in_kernel(lambda: loop(("a", "b"), thread_axis="a")(lambda info: None), **threads)
    assert "'c' is not an axis of the kernel's grid" in in_kernel(lambda: loop(("c",))(lambda info: None))
