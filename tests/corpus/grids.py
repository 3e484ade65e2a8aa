"""Grids and index maps: every rank, one program, none, a size known only at run time, maps of every form."""

import jax.numpy as jnp
import numpy as np

from .case import case, integers, normal, sds


def _copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def _ids():
    ids = np.arange(2)[:, None, None] * 100 + np.arange(3)[:, None] * 10 + np.arange(2)
    return ids.repeat(2, 0).repeat(2, 1).repeat(5, 2)


@case(
    inputs=lambda rng: (normal(rng, 4, 6, 10),),
    expect=lambda x: x + _ids(),
    rtol=1e-6,
    tags="grid:3d block:int",
)
def program_ids_3d(pl, pltpu, **options):
    def kernel(x_ref, o_ref):
        i, j, k = (pl.program_id(axis) for axis in range(3))
        assert [pl.num_programs(axis) for axis in range(3)] == [2, 3, 2]
        o_ref[...] = x_ref[...] + (i * 100 + j * 10 + k).astype(jnp.float32)

    spec = pl.BlockSpec((2, 2, 5), lambda i, j, k: (i, j, k))
    return pl.pallas_call(kernel, sds((4, 6, 10)), grid=(2, 3, 2), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 24),),
    expect=lambda x: np.stack([np.arange(24), np.arange(24) // 6, np.arange(24) // 2 % 3, np.arange(24) % 2]).T.astype(
        "int32"
    ),
    tags="grid:3d grid:arithmetic block:whole block:none dtype:int32 order scratch",
)
def order_of_programs(pl, pltpu, **options):
    """Programs run in lexicographic order, the last axis fastest; a counter in scratch lives across them."""

    def kernel(x_ref, o_ref, count_ref):
        i, j, k = pl.program_id(0), pl.program_id(1), pl.program_id(2)

        @pl.when((i == 0) & (j == 0) & (k == 0))
        def _():
            count_ref[0] = 0

        o_ref[0] = count_ref[0]
        o_ref[1] = i
        o_ref[2] = j
        o_ref[3] = k
        count_ref[0] += 1

    return pl.pallas_call(
        kernel,
        sds((24, 4), "int32"),
        grid=(4, 3, 2),
        in_specs=[pl.BlockSpec((24,), lambda i, j, k: (0,))],
        out_specs=pl.BlockSpec((None, 4), lambda i, j, k: (i * 6 + j * 2 + k, 0)),
        scratch_shapes=[pltpu.SMEM((1,), jnp.int32)],
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 5, 7),),
    expect=lambda x: x * 3,
    tags="grid:one grid:3d block:int",
)
def grid_of_one(pl, pltpu, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 3

    spec = pl.BlockSpec((5, 7), lambda i, j, k: (i + j, k))
    return pl.pallas_call(kernel, sds((5, 7)), grid=(1, 1, 1), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 6), integers(rng, 6)),
    expect=lambda x, i: (np.full(6, np.nan), np.full(6, np.iinfo("int32").min, "int32")),
    tags="grid:empty grid:2d block:int uninit",
)
def empty_grid(pl, pltpu, **options):
    """No programs: nothing is written, and outputs keep the fill of uninitialised memory."""

    def kernel(x_ref, i_ref, o_ref, n_ref):
        o_ref[...] = x_ref[...]
        n_ref[...] = i_ref[...]

    spec = pl.BlockSpec((2,), lambda i, j: (i,))
    return pl.pallas_call(
        kernel,
        (sds((6,)), sds((6,), "int32")),
        grid=(3, 0),
        in_specs=[spec, spec],
        out_specs=(spec, spec),
        **options,
    )


@case(
    inputs=lambda rng: (np.int32(3), normal(rng, 10, 4)),
    expect=lambda n, x: np.concatenate([x[:6] + 3, np.full((4, 4), np.nan)]),
    rtol=1e-6,
    tags="grid:dynamic grid:2d block:int uninit",
)
def dynamic_grid(pl, pltpu, **options):
    """A grid size given as an operand, traced under jit; blocks beyond it are not written."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jnp.asarray(pl.num_programs(0), jnp.float32)

    def call(n, x):
        spec = pl.BlockSpec((2, 2), lambda i, j: (i, j))
        return pl.pallas_call(kernel, sds((10, 4)), grid=(n, 2), in_specs=[spec], out_specs=spec, **options)(x)

    return call


@case(
    inputs=lambda rng: (np.int32(4), integers(rng, 12, 5, dtype="float32")),
    expect=lambda n, x: x[:8].sum(0),
    tags="grid:dynamic grid:revisit grid:constant block:int control:when order",
)
def dynamic_grid_reduction(pl, pltpu, **options):
    """A reduction over as many blocks as an operand says."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(x_ref[...], axis=0)

    def call(n, x):
        return pl.pallas_call(
            kernel,
            sds((5,)),
            grid=(n,),
            in_specs=[pl.BlockSpec((2, 5), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((5,), lambda i: (0,)),
            **options,
        )(x)

    return call


@case(
    inputs=lambda rng: (normal(rng, 17, 23, 3),),
    expect=lambda x: x.transpose(2, 0, 1),
    tags="grid:3d grid:ragged grid:permuted block:int block:none",
)
def permuted_prime(pl, pltpu, **options):
    """Ragged in two dimensions, with the grid's axes in another order than the array's."""
    return pl.pallas_call(
        _copy,
        sds((3, 17, 23)),
        grid=(3, 5, 5),
        in_specs=[pl.BlockSpec((4, 5, None), lambda c, j, i: (i, j, c))],
        out_specs=pl.BlockSpec((None, 4, 5), lambda c, j, i: (c, i, j)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 12, 4),),
    expect=lambda x: np.concatenate([x[i // 2 * 2 : i // 2 * 2 + 2] for i in range(11, -1, -1)]),
    tags="grid:1d grid:arithmetic block:int",
)
def arithmetic_maps(pl, pltpu, **options):
    """i // 2 in, n - 1 - i out."""
    return pl.pallas_call(
        _copy,
        sds((24, 4)),
        grid=(12,),
        in_specs=[pl.BlockSpec((2, 4), lambda i: (i // 2, 0))],
        out_specs=pl.BlockSpec((2, 4), lambda i: (11 - i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 10, 6),),
    expect=lambda x: np.concatenate([x[2 * k : 2 * k + 2] for k in (0, 3, 1, 4, 2, 0, 3)]),
    tags="grid:1d grid:arithmetic block:int",
)
def modular_map(pl, pltpu, **options):
    """An index map that walks the blocks with a stride, modulo their number, using jnp."""
    return pl.pallas_call(
        _copy,
        sds((14, 6)),
        grid=(7,),
        in_specs=[pl.BlockSpec((2, 6), lambda i: (jnp.mod(i * 3, 5), 0))],
        out_specs=pl.BlockSpec((2, 6), lambda i: (jnp.minimum(i, 6), 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 8), normal(rng, 8)),
    expect=lambda x, y: x - y,
    tags="grid:1d block:int",
)
def index_map_without_tuple(pl, pltpu, **options):
    """For a one-dimensional block an index map may return the index itself."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] - y_ref[...]

    spec = pl.BlockSpec((2,), lambda i: i)
    return pl.pallas_call(kernel, sds((8,)), grid=4, in_specs=[spec, spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 16),),
    expect=lambda x: np.concatenate([x[:4], x[12:], x[12:], x[12:]]),
    tags="grid:1d block:int clamp",
)
def offsets_for_block_numbers(pl, pltpu, **options):
    """The classical mistake, an index map in elements: every block past the end is the last one."""
    return pl.pallas_call(
        _copy,
        sds((16,)),
        grid=(4,),
        in_specs=[pl.BlockSpec((4,), lambda i: (i * 4,))],
        out_specs=pl.BlockSpec((4,), lambda i: (i,)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 6, 4),),
    expect=lambda x: np.concatenate([np.full((4, 4), np.nan), x[4:] * 2]),
    tags="grid:1d block:int clamp uninit",
)
def clamped_output_block(pl, pltpu, **options):
    """All programs store into the last output block; the last one stays."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(
        kernel,
        sds((6, 4)),
        grid=(3,),
        in_specs=[pl.BlockSpec((2, 4), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((2, 4), lambda i: (i + 2, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 12, 4),),
    expect=lambda x: np.stack([x[2], x[5], x[8], x[11]]),
    tags="grid:2d grid:revisit block:int block:none order",
)
def last_visit_stays(pl, pltpu, **options):
    """Consecutive programs overwrite one output block."""
    return pl.pallas_call(
        _copy,
        sds((4, 4)),
        grid=(4, 3),
        in_specs=[pl.BlockSpec((None, 4), lambda i, j: (3 * i + j, 0))],
        out_specs=pl.BlockSpec((None, 4), lambda i, j: (i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 6, 4),),
    expect=lambda x: np.concatenate([x[:2] + x[4:], x[2:4]]),
    tags="grid:1d grid:revisit grid:arithmetic block:int control:when order revisit",
)
def block_comes_back(pl, pltpu, **options):
    """Output blocks 0, 1, 0: a block comes back after another, with what it held."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) < 2)
        def _():
            o_ref[...] = x_ref[...]

        @pl.when(pl.program_id(0) == 2)
        def _():
            o_ref[...] += x_ref[...]

    return pl.pallas_call(
        kernel,
        sds((4, 4)),
        grid=(3,),
        in_specs=[pl.BlockSpec((2, 4), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((2, 4), lambda i: (i % 2, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 8, 8),),
    expect=lambda x: (x + 4, x + 2, x * 2 + 6),
    rtol=1e-6,
    tags="grid:1d grid:2d block:int",
)
def one_kernel_many_grids(pl, pltpu, **options):
    """One kernel function under different grids; num_programs is right in each."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jnp.float32(pl.num_programs(0))

    def under(grid, spec):
        return pl.pallas_call(kernel, sds((8, 8)), grid=grid, in_specs=[spec], out_specs=spec, **options)

    a = under((4,), pl.BlockSpec((2, 8), lambda i: (i, 0)))
    b = under((2, 4), pl.BlockSpec((4, 2), lambda i, j: (i, j)))

    def call(x):
        first, second = a(x), b(x)
        return first, second, first + second

    return call


@case(
    inputs=lambda rng: (integers(rng, 30, 4, dtype="float32"),),
    expect=lambda x: (x.sum(0), x),
    tags="grid:1d grid:constant grid:revisit block:int block:whole order",
)
def outputs_of_two_kinds(pl, pltpu, **options):
    """One output is one block for all programs, the other one block for each."""

    def kernel(x_ref, sum_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...].sum(0)
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((5, 4), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((4,)), sds((30, 4))),
        grid=(6,),
        in_specs=[spec],
        out_specs=(pl.BlockSpec((4,), lambda i: (0,)), spec),
        **options,
    )
