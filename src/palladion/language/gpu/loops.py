"""Loops over more work than a kernel has blocks: persistent kernels, and kernels that take over blocks.

`nd_loop` deals the points of a grid to the blocks of a kernel, round and round; `dynamic_scheduling_loop` lets a
cluster that is done take over one that has not started (Blackwell); `planar_snake` orders the tiles of a matrix so that
blocks that run at the same time read the same operands, which are then in the L2 cache.

Source: the Mosaic GPU reference, "Cluster launch control"; the public documentation of `nd_loop`. The orders, and the
parameter `carry`, are those that JAX 0.12 was seen to use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import frames, ops
from palladion.language.gpu.arguments import axis_names
from palladion.language.gpu.barriers import Barrier, ClusterBarrier, barrier_arrive, barrier_wait
from palladion.language.gpu.carry import Carry
from palladion.language.gpu.control import TryClusterCancelResult, query_cluster_cancel, try_cluster_cancel
from palladion.language.gpu.copies import commit_smem
from palladion.language.indexing import is_ref

__all__ = ["NDLoopInfo", "dynamic_scheduling_loop", "nd_loop", "planar_snake"]


@dataclasses.dataclass(frozen=True)
class NDLoopInfo:
    """Where a loop is.

    Attributes:
      index: the grid indices of this iteration, int32 scalars.
      local_index: how many iterations this block has done before, an int32 scalar.
      num_local_steps: how many iterations this block does, an int32 scalar; None where it is not known
        (`dynamic_scheduling_loop`).
    """

    index: tuple[Any, ...]
    local_index: Any
    num_local_steps: Any


# --- numbers that may be known while tracing --------------------------------------------------------------------------
def int32(x: Any) -> Any:
    """An integer as np.int32, or as an int32 scalar of the run."""
    return lax.convert_element_type(x, np.int32) if isinstance(x, jax.Array) else np.int32(x)


def is_known(*values: Any) -> bool:
    """Whether values are numbers now, rather than at run time."""
    return not any(isinstance(x, jax.Array) for x in values)


def div(x: Any, y: Any) -> Any:
    """x // y of int32 numbers that are not negative."""
    return np.int32(x // y) if is_known(x, y) else lax.div(x, y)


def rem(x: Any, y: Any) -> Any:
    """x % y of int32 numbers that are not negative."""
    return np.int32(x % y) if is_known(x, y) else lax.rem(x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two int32 numbers."""
    return np.int32(min(x, y)) if is_known(x, y) else lax.min(x, y)


def product(sizes: Sequence[Any]) -> Any:
    """The product of int32 numbers."""
    return functools.reduce(operator.mul, sizes, np.int32(1))


def grid_point(number: Any, sizes: Sequence[Any]) -> tuple[Any, ...]:
    """The point of a grid with this number, row-major. The first index is not reduced: beyond the end it goes on."""
    point = []
    for size in reversed(sizes[1:]):
        point.append(rem(number, size))
        number = div(number, size)
    return (number, *reversed(point)) if sizes else ()


def grid_sizes(grid: Any, what: str) -> tuple[Any, ...]:
    """The sizes of a grid as np.int32, or int32 scalars of the run.

    Arguments:
      grid: what the user gave; a single integer is a grid of one axis.
      what: whose grid it is, for messages.

    Raises:
      TypeError: a size is no integer. ValueError: a size is negative.
    """
    sizes = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    for n, size in enumerate(sizes):
        if is_ref(size):
            raise mistake(TypeError, f"Axis {n} of the grid of {what} is a Ref.", hint="read it: grid=(n_ref[0],)")
        if not ops.is_integer(size) or isinstance(size, bool):
            hint = "grid=(4, n): integers, or integer scalars known at run time"
            raise mistake(TypeError, f"Axis {n} of the grid of {what} is {kind_of(size)}.", hint=hint)
        if is_known(size) and size < 0:
            raise mistake(ValueError, f"The grid of {what}, {sizes}, has a negative size.", hint="sizes are counts")
    return tuple(int32(size) for size in sizes)


# --- one iteration ----------------------------------------------------------------------------------------------------
def _run(body: Callable[..., Any], info: NDLoopInfo, carry: Carry, leaves: Sequence[Any]) -> list[Any]:
    """One iteration: the carry goes in, and out, by the name `carry`."""
    if not carry.tree.num_leaves:
        return carry.leaves(body(info), body)
    return carry.leaves(body(info, carry=carry.value(leaves)), body)


def _check_body(body: Callable[..., Any], carry: Carry) -> None:
    names = ("carry",) if carry.tree.num_leaves else ()

    def message(takes: str) -> str:
        gets = "an NDLoopInfo" + (" and, by keyword, carry" if names else "")
        return explain(
            f"The body of {carry.owner} takes {takes}, but it gets {gets}.",
            where=locations.defined_at(body),
            hint="`def _(loop_info)`, or `def _(loop_info, carry)` with init_carry=…",
        )

    frames.check_arity(body, 1, message, names)


# --- persistent kernels -----------------------------------------------------------------------------------------------
def nd_loop(
    grid: Sequence[int | jax.Array],
    *,
    collective_axes: Hashable | Sequence[Hashable],
    tiling: Sequence[int] | None = None,
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: run a function at each point of a grid, the points being dealt to the blocks of a kernel.

        @plgpu.nd_loop((m_tiles, n_tiles), collective_axes="sm")
        def _(loop_info):
            mi, ni = loop_info.index
            …

    With n blocks along `collective_axes`, block b does the points b, b + n, b + 2n … in row-major order; their numbers
    may differ by one. Everything that shares the indices along these axes (the threads of a block, the blocks of a
    cluster) does the same points.

    Arguments:
      grid: sizes: integers, or int scalars known at run time. A size of zero is no iteration.
      collective_axes: axes of the kernel's mesh, one name or several (row-major).
      tiling: sizes of a tile for each axis of the grid, which they divide: the points of a tile come one after another,
        so that blocks at work at the same time are near each other.
      init_carry: a pytree carried from one iteration of a block to its next; then the body is `body(loop_info, carry)`
        (by name) and returns the next carry. Refs in it must come back as they are.

    Returns:
      a decorator that gives the last carry (None without one). The body gets an `NDLoopInfo`.

    Raises:
      TypeError, ValueError: an argument is not as described, an axis is not one of the kernel's; outside a kernel.
    """
    owner = "plgpu.nd_loop"
    sizes = grid_sizes(grid, owner)
    names = _mesh_axes(owner, collective_axes)
    tiles = None if tiling is None else _tiling(tiling, sizes)

    def decorate(body: Callable[..., Any]) -> Any:
        carry = Carry.of(init_carry, owner)
        _check_body(body, carry)
        cores = frames.required(owner).cores
        block, blocks = np.int32(0), math.prod(cores[name] for name in names)
        for name in names:
            block = block * np.int32(cores[name]) + lax.axis_index(name)
        stride = np.int32(blocks)
        steps = div(int32(product(sizes) - block + (stride - np.int32(1))), stride)

        def step(n, leaves):
            n = int32(n)
            number = block + n * stride
            index = grid_point(number, sizes) if tiles is None else _in_tiles(number, sizes, tiles)
            return _run(body, NDLoopInfo(tuple(int32(i) for i in index), n, steps), carry, leaves)

        return carry.value(lax.fori_loop(np.int32(0), steps, step, carry.start))

    return decorate


def _mesh_axes(owner: str, axes: Any) -> tuple[Any, ...]:
    names: tuple[Any, ...] = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    names = tuple(name for entry in names for name in axis_names(owner, "collective_axes", entry))
    known = frames.required(owner).cores
    for name in names:
        if name not in known:
            raise mistake(
                ValueError,
                f"{owner}(collective_axes={axes!r}): {name!r} is not an axis of the kernel's mesh.",
                axes=", ".join(map(repr, known)) or "none",
                hint="name the axes of the grid that the work is dealt along: plgpu.kernel(…, grid=(132,), "
                "grid_names=('sm',))",
            )
    if not names or len(set(names)) != len(names):
        headline = f"{owner}(collective_axes={axes!r}) must name each axis once, and at least one."
        raise mistake(ValueError, headline, hint="collective_axes='sm', or a tuple of names")
    return names


def _tiling(tiling: Any, sizes: Sequence[Any]) -> tuple[np.int32, ...]:
    tiles = tuple(tiling) if isinstance(tiling, (tuple, list)) else (tiling,)
    hint = "tiling=(4, 1) for a grid of two axes: a positive Python integer for each, which divides its size"
    if len(tiles) != len(sizes) or not all(isinstance(t, (int, np.integer)) and t > 0 for t in tiles):
        grid_axes = count_of(len(sizes), "axis", "axes")
        raise mistake(
            ValueError, f"The tiling {tiling!r} of plgpu.nd_loop does not fit a grid of {grid_axes}.", hint=hint
        )
    if any(is_known(n) and n % t for n, t in zip(sizes, tiles)):
        shown = tuple(int(n) if is_known(n) else "?" for n in sizes)
        raise mistake(ValueError, f"Tiling {tiles} does not divide grid {shown}.", hint=hint)
    return tuple(np.int32(t) for t in tiles)


def _in_tiles(number: Any, sizes: Sequence[Any], tiles: Sequence[np.int32]) -> list[Any]:
    """The point with this number, where tiles come one after another."""
    volume = product(tiles)
    outer = grid_point(div(number, volume), [div(n, t) for n, t in zip(sizes, tiles)])
    inner = grid_point(rem(number, volume), tiles)
    return [o * t + i for o, t, i in zip(outer, tiles, inner)]


# --- cluster launch control -------------------------------------------------------------------------------------------
def dynamic_scheduling_loop(
    grid_names: Hashable | Sequence[Hashable],
    thread_axis: Hashable | None = None,
    cluster_axes: Sequence[Hashable] = (),
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: do this block's work, then that of blocks that have not started, until none is left. Blackwell only.

        @plgpu.dynamic_scheduling_loop(grid_names=("m", "n"), thread_axis="wg")
        def _(loop_info):
            mi, ni = loop_info.index
            …

    The kernel's grid is the work to be done. The first iteration is the block's own; each iteration asks at its
    beginning for the next one, and learns the answer at its end. All threads of a block, and all blocks of a cluster,
    do the same iterations.

    Arguments:
      grid_names: axes of the kernel's grid: the indices that the body wants.
      thread_axis: the axis of the kernel's threads, where it has several: all must run the loop.
      cluster_axes: axes of the kernel's cluster; () for all of them.
      init_carry: a pytree carried from one iteration to the next; then the body is `body(loop_info, carry)` (by name)
        and returns the next carry.

    Returns:
      a decorator that gives the last carry (None without one). The body gets an `NDLoopInfo` without a number of steps.

    Raises:
      TypeError, ValueError: an argument is not as described; outside a kernel.
    """
    owner = "plgpu.dynamic_scheduling_loop"
    frame = frames.required(owner)
    names = axis_names(owner, "grid_names", grid_names)
    of_grid = tuple(getattr(frame.mesh, "grid_names", ()))
    for name in names:
        if name not in of_grid:
            headline = f"{owner}: {name!r} is not an axis of the kernel's grid."
            hint = "the grid_names of the kernel, or some of them"
            raise mistake(ValueError, headline, axes=", ".join(map(repr, of_grid)) or "none", hint=hint)
    mesh_threads: Any = getattr(frame.mesh, "thread_name", None)
    threads = frame.cores.get(mesh_threads, 1)
    if thread_axis != mesh_threads and (thread_axis is not None or threads > 1):
        headline = f"{owner}: thread_axis is {thread_axis!r}, but the threads of the kernel are along {mesh_threads!r}."
        raise mistake(ValueError, headline, hint=f"thread_axis={mesh_threads!r}: all threads of a block run the loop")
    of_cluster = tuple(getattr(frame.mesh, "cluster_names", ()))
    axes = axis_names(owner, "cluster_axes", cluster_axes)
    axes = tuple(a for a in axes or of_cluster if frame.cores.get(a) != 1)

    def decorate(body: Callable[..., Any]) -> Any:
        carry = Carry.of(init_carry, owner)
        _check_body(body, carry)
        types: dict[str, Any] = dict(result=TryClusterCancelResult(2), found=Barrier(num_barriers=2))
        if axes:  # whoever asks writes the result of every block, so that all must have read the one before
            types["seen"] = ClusterBarrier(collective_axes=(axes,), num_arrivals=threads, num_barriers=2)
        elif threads > 1:
            types["seen"] = Barrier(num_arrivals=threads, num_barriers=2)
        shared = () if thread_axis is None else (thread_axis,)

        def run(result: Any, found: Any, seen: Any = None):
            asks = True if threads == 1 else lax.axis_index(thread_axis) == 0

            def ask(slot, step):
                if seen is not None:
                    ops.when(step >= np.int32(2))(lambda: barrier_wait(seen.at[slot]))
                try_cluster_cancel(result.at[slot], found.at[slot], collective_axes=axes)

            def turn(state):
                index, step, _, leaves = state
                slot = lax.rem(step, np.int32(2))
                ops.when(asks)(lambda: ask(slot, step))
                leaves = _run(body, NDLoopInfo(index, step, None), carry, leaves)
                barrier_wait(found.at[slot])
                index, more = query_cluster_cancel(result.at[slot], names)
                commit_smem()  # read by the threads, written next by the scheduler
                if seen is not None:
                    barrier_arrive(seen.at[slot])
                return index, step + np.int32(1), more, leaves

            def finish():  # as many waits as completions
                for back in (1, 2):
                    slot = lax.rem(steps + np.int32(2 - back), np.int32(2))
                    ops.when(steps >= np.int32(back))(functools.partial(barrier_wait, seen.at[slot]))

            own = tuple(lax.axis_index(name) for name in names)
            start = own, jnp.zeros((), jnp.int32), jnp.ones((), jnp.bool_), carry.start
            _, steps, _, leaves = lax.while_loop(lambda state: state[2], turn, start)
            if seen is not None:
                ops.when(asks)(finish)
            return leaves

        return carry.value(ops.run_scoped(run, **types, collective_axes=shared))

    return decorate


# --- order of tiles ---------------------------------------------------------------------------------------------------
def planar_snake(
    lin_idx: int | jax.Array, shape: tuple[int | jax.Array, int | jax.Array], minor_dim: int, tile_width: int
) -> tuple[jax.Array, jax.Array]:
    """The tile of a matrix of tiles that comes at a place in an order that keeps neighbours together.

    The matrix is cut into strips that are `tile_width` wide along `minor_dim`; a strip is walked row by row, and the
    strips in turn forth and back, so that consecutive tiles share rows and columns of the operands.

    Arguments:
      lin_idx: the place, an integer from 0 on.
      shape: (rows, columns) of tiles.
      minor_dim: 0 or 1: the dimension that varies fastest, along which strips are wide.
      tile_width: the width of a strip; the last one may be narrower.

    Returns:
      (row, column), int32 scalars.

    Raises:
      ValueError: a shape that is not of two sizes, a minor_dim that is neither 0 nor 1, a width that is not positive.
    """
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise mistake(ValueError, f"plgpu.planar_snake orders a plane of tiles, but its shape is {shape!r}.",
                      hint="shape=(rows, columns)")  # fmt: skip
    if not isinstance(minor_dim, (int, np.integer)) or minor_dim not in (0, 1):
        headline = f"The minor_dim of plgpu.planar_snake is {minor_dim!r}; a plane has the dimensions 0 and 1."
        raise mistake(ValueError, headline, hint="minor_dim=1 for columns that vary fastest")
    if isinstance(tile_width, bool) or not isinstance(tile_width, (int, np.integer)) or tile_width < 1:
        headline = f"The tile_width of plgpu.planar_snake is {kind_of(tile_width)}; it must be a positive integer."
        raise mistake(ValueError, headline, hint="tile_width=4, say")
    for what, n in (("lin_idx", lin_idx), ("shape[0]", shape[0]), ("shape[1]", shape[1])):
        if np.ndim(n) or not jnp.issubdtype(getattr(n, "dtype", type(n)), np.integer):
            headline = f"The {what} of plgpu.planar_snake is {kind_of(n)}; it must be an integer."
            raise mistake(TypeError, headline, hint="a Python integer or an int32 scalar")
    width = np.int32(tile_width)
    major, minor = int32(shape[1 - int(minor_dim)]), int32(shape[int(minor_dim)])
    number = int32(lin_idx)
    strip, inside = div(number, width * major), rem(number, width * major)
    here = minimum(width, minor - strip * width)  # the last strip may be narrower
    here = here if not is_known(here) else np.maximum(here, np.int32(1))
    row, column = div(inside, here), strip * width + rem(inside, here)
    odd = rem(strip, np.int32(2)) == 1
    back = major - np.int32(1) - row
    row = (
        (back if odd else row)
        if is_known(odd, row, back)
        else lax.select(jnp.asarray(odd), *map(jnp.asarray, (back, row)))
    )
    pair = (jnp.asarray(column), jnp.asarray(row)) if int(minor_dim) == 0 else (jnp.asarray(row), jnp.asarray(column))
    return pair


jax.tree_util.register_dataclass(NDLoopInfo, ["index", "local_index", "num_local_steps"], [])
