"""Every kind of block: squeezed, element windows, padding, bounded slices, whole arrays, buffering.

Element dimensions are indexed in elements and start where the index map says, less the low padding; padding,
like everything outside an array, is NaN.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import case, integers, normal, sds


def _copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


@case(
    inputs=lambda rng: (normal(rng, 6, 4, 10),),
    expect=lambda x: x.transpose(0, 2, 1) * 2,
    tags="block:none block:squeezed grid:2d prim:shape",
)
def squeezed_dimensions(pl, pltpu, **options):
    """None and pl.squeezed, leading and in the middle; a squeezed dimension is absent from the Ref."""

    def kernel(x_ref, o_ref):
        assert x_ref.shape == (10,) and o_ref.shape == (10,), (x_ref.shape, o_ref.shape)
        assert x_ref.ndim == 1 and len(x_ref) == 10
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(
        kernel,
        sds((6, 10, 4)),
        grid=(6, 4),
        in_specs=[pl.BlockSpec((None, pl.squeezed, 10), lambda i, j: (i, j, 0))],
        out_specs=pl.BlockSpec((pl.Squeezed(), 10, None), lambda i, j: (i, 0, j)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 5, 3),),
    expect=lambda x: x + np.arange(5)[:, None] * 10 + np.arange(3),
    rtol=1e-6,
    tags="block:none grid:2d",
)
def squeezed_to_a_scalar(pl, pltpu, **options):
    """Every dimension squeezed: the Refs are 0-d."""

    def kernel(x_ref, o_ref):
        assert x_ref.shape == ()
        o_ref[...] = x_ref[...] + (pl.program_id(0) * 10 + pl.program_id(1)).astype(jnp.float32)

    spec = pl.BlockSpec((None, None), lambda i, j: (i, j))
    return pl.pallas_call(kernel, sds((5, 3)), grid=(5, 3), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 19, 24),),
    expect=lambda x: x,
    tags="block:blocked grid:2d grid:ragged",
)
def blocked_objects(pl, pltpu, **options):
    """pl.Blocked(n) means n, also beside plain integers."""
    return pl.pallas_call(
        _copy,
        sds((19, 24)),
        grid=(3, 3),
        in_specs=[pl.BlockSpec((pl.Blocked(8), 8), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((pl.Blocked(8), pl.Blocked(8)), lambda i, j: (i, j)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 40),),
    expect=lambda x: np.stack([x[7 * i : 7 * i + 12] for i in range(5)]),
    tags="block:element block:none grid:1d grid:arithmetic",
)
def element_windows(pl, pltpu, **options):
    """Windows that overlap and start at no multiple of their size."""
    return pl.pallas_call(
        _copy,
        sds((5, 12)),
        grid=(5,),
        in_specs=[pl.BlockSpec((pl.Element(12),), lambda i: (7 * i,))],
        out_specs=pl.BlockSpec((None, 12), lambda i: (i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 12, 16),),
    expect=lambda x: np.stack([x[3 * i : 3 * i + 4, 8 * j : 8 * j + 8] for i in range(3) for j in range(2)]),
    tags="block:element block:int block:none grid:2d grid:arithmetic",
)
def element_beside_blocked(pl, pltpu, **options):
    """One dimension in elements, the other in blocks."""
    return pl.pallas_call(
        _copy,
        sds((6, 4, 8)),
        grid=(3, 2),
        in_specs=[pl.BlockSpec((pl.Element(4), 8), lambda i, j: (3 * i, j))],
        out_specs=pl.BlockSpec((None, 4, 8), lambda i, j: (2 * i + j, 0, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 10),),
    expect=lambda x: np.stack([np.pad(x, 2, constant_values=np.nan)[4 * i : 4 * i + 6] for i in range(3)]),
    tags="block:element block:padding block:none grid:1d padding",
)
def element_padding(pl, pltpu, **options):
    """Windows over an array padded by two on both sides; the padding reads NaN."""
    return pl.pallas_call(
        _copy,
        sds((3, 6)),
        grid=(3,),
        in_specs=[pl.BlockSpec((pl.Element(6, (2, 2)),), lambda i: (4 * i,))],
        out_specs=pl.BlockSpec((None, 6), lambda i: (i, 0)),
        **options,
    )


def _spaced(x):
    out = np.full((11, 3), np.nan)
    for i in range(3):
        out[4 * i : 4 * i + 3] = x[3 * i : 3 * i + 3]
    return out


@case(
    inputs=lambda rng: (normal(rng, 9, 3),),
    expect=_spaced,
    tags="block:element block:int grid:1d uninit",
)
def element_output(pl, pltpu, **options):
    """An output in element windows with gaps; what no window covers is never written."""
    return pl.pallas_call(
        _copy,
        sds((11, 3)),
        grid=(3,),
        in_specs=[pl.BlockSpec((3, 3), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((pl.Element(3), pl.Element(3)), lambda i: (4 * i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 8),),
    expect=lambda x: np.concatenate([x[1:4], x[4:7]]),
    tags="block:element block:padding grid:1d",
)
def element_output_padding(pl, pltpu, **options):
    """Output windows reach into the padding on both sides; those stores are dropped."""
    return pl.pallas_call(
        _copy,
        sds((6,)),
        grid=(2,),
        in_specs=[pl.BlockSpec((4,), lambda i: (i,))],
        out_specs=pl.BlockSpec((pl.Element(4, (1, 1)),), lambda i: (4 * i,)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 10),),
    expect=lambda x: np.stack([x[:4], x[4:8], np.pad(x[8:], (0, 2), constant_values=np.nan)]),
    tags="block:element block:none grid:1d grid:ragged padding",
)
def element_past_the_end(pl, pltpu, **options):
    """A window that reaches beyond the array reads NaN there, like any block."""
    return pl.pallas_call(
        _copy,
        sds((3, 4)),
        grid=(3,),
        in_specs=[pl.BlockSpec((pl.Element(4),), lambda i: (4 * i,))],
        out_specs=pl.BlockSpec((None, 4), lambda i: (i, 0)),
        **options,
    )


_SIZES = np.array([2, 3, 4, 1], "int32")
_STARTS = np.array([0, 2, 5, 9], "int32")


def _unpacked(starts, sizes, x):
    out = np.zeros((4, 4, 8))
    for i in range(4):
        out[i, : sizes[i]] = x[starts[i] : starts[i] + sizes[i]]
    return out


@case(
    inputs=lambda rng: (_STARTS, _SIZES, normal(rng, 10, 8)),
    expect=_unpacked,
    tags="block:bounded block:none prefetch grid:1d",
)
def bounded_slice_input(pl, pltpu, **options):
    """Ragged segments, at most four rows each; the last one's block would reach beyond the array."""

    def kernel(starts_ref, sizes_ref, x_ref, o_ref):
        size = sizes_ref[pl.program_id(0)]
        rows = lax.broadcasted_iota(jnp.int32, (4, 8), 0)
        o_ref[...] = jnp.where(rows < size, x_ref[...], 0.0)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(4,),
        in_specs=[pl.BlockSpec((pl.BoundedSlice(4), 8), lambda i, starts, sizes: (pl.ds(starts[i], sizes[i]), 0))],
        out_specs=pl.BlockSpec((None, 4, 8), lambda i, starts, sizes: (i, 0, 0)),
    )
    return pl.pallas_call(kernel, sds((4, 4, 8)), grid_spec=grid_spec, **options)


@case(
    inputs=lambda rng: (_STARTS, _SIZES, normal(rng, 4, 4, 8)),
    expect=lambda starts, sizes, x: np.concatenate([x[i, : sizes[i]] for i in range(4)]),
    tags="block:bounded block:none prefetch grid:1d",
)
def bounded_slice_output(pl, pltpu, **options):
    """Segments packed back together, last first: rows of a block beyond its bound must not be stored."""

    def kernel(starts_ref, sizes_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(4,),
        in_specs=[pl.BlockSpec((None, 4, 8), lambda i, starts, sizes: (3 - i, 0, 0))],
        out_specs=pl.BlockSpec(
            (pl.BoundedSlice(4), 8), lambda i, starts, sizes: (pl.ds(starts[3 - i], sizes[3 - i]), 0)
        ),
    )
    return pl.pallas_call(kernel, sds((10, 8)), grid_spec=grid_spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 6, 5), normal(rng, 5)),
    expect=lambda x, y: x * y,
    tags="block:whole block:int grid:1d",
)
def whole_beside_blocks(pl, pltpu, **options):
    """pl.no_block_spec, and a BlockSpec with nothing in it, hand every program the whole array."""

    def kernel(x_ref, y_ref, o_ref):
        assert x_ref.shape == (6, 5) and y_ref.shape == (5,) and o_ref.shape == (2, 5)
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 2, 2)] * y_ref[...]

    return pl.pallas_call(
        kernel,
        sds((6, 5)),
        grid=(3,),
        in_specs=[pl.no_block_spec, pl.BlockSpec()],
        out_specs=pl.BlockSpec((2, 5), lambda i: (i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 4, 6),),
    expect=lambda x: x[::-1] + 1,
    tags="block:whole grid:1d index:int",
)
def whole_output_in_a_grid(pl, pltpu, **options):
    """No specs at all: each program stores one row of the one output block."""

    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[3 - i] = x_ref[i] + 1

    return pl.pallas_call(kernel, sds((4, 6)), grid=4, **options)


@case(
    inputs=lambda rng: (normal(rng, 8, 6), normal(rng, 8, 6)),
    expect=lambda x, y: x - y[::-1],
    tags="block:any block:vmem block:int grid:1d index:int",
)
def memory_space_any(pl, pltpu, **options):
    """Operands left where they are and indexed by hand, beside a block in VMEM."""

    def kernel(x_ref, y_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i] = x_ref[0] - y_ref[7 - i]

    return pl.pallas_call(
        kernel,
        sds((8, 6)),
        grid=(8,),
        in_specs=[
            pl.BlockSpec((1, 6), lambda i: (i, 0), memory_space=pltpu.VMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 4, low=1, high=9), normal(rng, 8, 16)),
    expect=lambda s, x: x * np.repeat(s, 2)[:, None] + s.sum(),
    rtol=1e-6,
    tags="block:smem block:vmem block:int grid:1d index:int",
)
def scalars_in_smem(pl, pltpu, **options):
    """A table of scalars whole in SMEM."""

    def kernel(s_ref, x_ref, o_ref):
        total = s_ref[0] + s_ref[1] + s_ref[2] + s_ref[3]
        o_ref[...] = x_ref[...] * s_ref[pl.program_id(0)].astype(jnp.float32) + total.astype(jnp.float32)

    spec = pl.BlockSpec((2, 16), lambda i: (i, 0), memory_space=pltpu.VMEM)
    return pl.pallas_call(
        kernel,
        sds((8, 16)),
        grid=(4,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), spec],
        out_specs=spec,
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 8, 6), normal(rng, 6)),
    expect=lambda x, y: (x[:2] + y, x * 2),
    tags="block:default block:int grid:1d grid:constant",
)
def default_index_map(pl, pltpu, **options):
    """A block shape without an index map is block 0 for every program."""

    def kernel(x_ref, y_ref, row_ref, first_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            first_ref[...] = x_ref[...] + y_ref[...]

        o_ref[...] = row_ref[...] * 2

    call = pl.pallas_call(
        kernel,
        (sds((2, 6)), sds((8, 6))),
        grid=(4,),
        in_specs=[pl.BlockSpec((2, 6)), pl.BlockSpec((6,)), pl.BlockSpec((2, 6), lambda i: (i, 0))],
        out_specs=(pl.BlockSpec((2, 6)), pl.BlockSpec((2, 6), lambda i: (i, 0))),
        **options,
    )
    return lambda x, y: call(x, y, x)


@case(
    inputs=lambda rng: (normal(rng, 24, 16), normal(rng, 24, 16)),
    expect=lambda x, y: x + y,
    tags="block:buffered block:int grid:1d",
)
def buffered_blocks(pl, pltpu, **options):
    """How deep a block is buffered changes nothing about its meaning."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    def spec(count):
        return pl.BlockSpec((8, 16), lambda i: (i, 0), pipeline_mode=pl.Buffered(count))

    return pl.pallas_call(kernel, sds((24, 16)), grid=(3,), in_specs=[spec(1), spec(3)], out_specs=spec(2), **options)


@case(
    inputs=lambda rng: (integers(rng, 13, low=-50, high=-1), normal(rng, 13)),
    expect=lambda i, x: (
        np.array([i[:8].min(), np.iinfo("int32").min], "int32"),
        np.array([i[:8].max(), i[8:].max()], "int32"),
        np.stack([x[:8], np.pad(x[8:], (0, 3), constant_values=np.nan)]),
    ),
    tags="block:int block:none grid:1d grid:ragged padding prim:reduce",
)
def fill_of_ragged_blocks(pl, pltpu, **options):
    """Outside the array floats read NaN and integers the lowest value of their dtype."""

    def kernel(i_ref, x_ref, low_ref, high_ref, o_ref):
        low_ref[...] = jnp.min(i_ref[...], keepdims=True)
        high_ref[...] = jnp.max(i_ref[...], keepdims=True)
        o_ref[...] = x_ref[...]

    block, one = pl.BlockSpec((8,), lambda n: (n,)), pl.BlockSpec((1,), lambda n: (n,))
    return pl.pallas_call(
        kernel,
        (sds((2,), "int32"), sds((2,), "int32"), sds((2, 8))),
        grid=(2,),
        in_specs=[block, block],
        out_specs=(one, one, pl.BlockSpec((None, 8), lambda n: (n, 0))),
        **options,
    )
