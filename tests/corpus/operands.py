"""Operands: aliases, scalar prefetch, scratch, nested operands and results, specs as prefixes, options."""

import jax.numpy as jnp
import numpy as np

from .case import case, integers, normal, sds


@case(
    inputs=lambda rng: (normal(rng, 16), normal(rng, 16)),
    expect=lambda x, y: 2 * x + y,
    rtol=1e-6,
    tags="alias block:whole grid:absent",
)
def alias_axpy(pl, pltpu, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = 2.0 * x_ref[...] + y_ref[...]

    return pl.pallas_call(
        kernel,
        sds((16,)),
        input_output_aliases={1: 0},
        cost_estimate=pl.CostEstimate(flops=32, transcendentals=0, bytes_accessed=192),
        name="axpy",
        **options,
    )


def _cache_row(cache, row, at):
    out = cache.copy()
    out[at[0]] = row
    return out


@case(
    inputs=lambda rng: (normal(rng, 12, 8), normal(rng, 8), np.array([5], "int32")),
    expect=_cache_row,
    tags="alias block:any block:smem grid:absent index:dynamic",
)
def alias_partial_update(pl, pltpu, **options):
    """A cache with one row replaced in place: what the kernel does not store keeps the input's value."""

    def kernel(cache_ref, row_ref, at_ref, o_ref):
        o_ref[at_ref[0]] = row_ref[...]

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        sds((12, 8)),
        in_specs=[anywhere, pl.BlockSpec(), pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=anywhere,
        input_output_aliases={0: 0},
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 13, 6), normal(rng, 13, 6)),
    expect=lambda x, y: (np.where(np.arange(13)[:, None] // 4 % 2, x, x * 2), y + x),
    tags="alias block:int grid:1d grid:ragged control:when",
)
def aliases_blockwise(pl, pltpu, **options):
    """Two aliases; odd programs leave their block of one output alone."""

    def kernel(x_ref, y_ref, a_ref, b_ref):
        b_ref[...] = y_ref[...] + x_ref[...]

        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            a_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((4, 6), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((13, 6)), sds((13, 6))),
        grid=(4,),
        in_specs=[spec, spec],
        out_specs=(spec, spec),
        input_output_aliases={0: 0, 1: 1},
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 9, 4),),
    expect=lambda x: x,
    tags="alias block:int grid:1d grid:ragged",
)
def alias_with_empty_body(pl, pltpu, **options):
    def kernel(x_ref, o_ref):
        del x_ref, o_ref

    spec = pl.BlockSpec((4, 4), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        sds((9, 4)),
        grid=(3,),
        in_specs=[spec],
        out_specs=spec,
        input_output_aliases={0: 0},
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"), integers(rng, 6, 4, dtype="float32")),
    expect=lambda x, y: np.cumsum(np.concatenate([x[:1] + y[:1], y[1:]]), 0),
    tags="alias block:any block:int grid:1d order index:int",
)
def alias_recurrence(pl, pltpu, **options):
    """An output in place of its input, read back by the next program: row i is row i-1 plus y's row i."""

    def kernel(x_ref, y_ref, o_ref):
        i = pl.program_id(0)

        @pl.when(i == 0)
        def _():
            o_ref[0] = x_ref[0] + y_ref[0]

        @pl.when(i > 0)
        def _():
            o_ref[i] = o_ref[i - 1] + y_ref[0]

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        sds((6, 4)),
        grid=(6,),
        in_specs=[anywhere, pl.BlockSpec((1, 4), lambda i: (i, 0))],
        out_specs=anywhere,
        input_output_aliases={0: 0},
        **options,
    )


@case(
    inputs=lambda rng: (
        np.array([3, 0, 2, 1], "int32"),
        np.array([2, 3], "int32"),
        normal(rng, 16, 8),
        normal(rng, 16, 8),
    ),
    expect=lambda p, s, x, y: np.concatenate(
        [np.where(p[i] == 0, 0, x[4 * p[i] : 4 * p[i] + 4] * s[0] + y[4 * i : 4 * i + 4] * s[1]) for i in range(4)]
    ),
    rtol=1e-6,
    atol=1e-6,
    tags="prefetch block:int grid:1d control:when",
)
def prefetch_two_tables(pl, pltpu, **options):
    """One table in the index map, another in the kernel only; the map computes with what it reads."""

    def kernel(p_ref, s_ref, x_ref, y_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = x_ref[...] * s_ref[0].astype(jnp.float32) + y_ref[...] * s_ref[1].astype(jnp.float32)

        @pl.when(p_ref[i] == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

    straight = pl.BlockSpec((4, 8), lambda i, p, s: (i, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(4,),
        in_specs=[pl.BlockSpec((4, 8), lambda i, p, s: (p[i] + 0 * s[0], 0)), straight],
        out_specs=straight,
    )
    return pl.pallas_call(kernel, sds((16, 8)), grid_spec=grid_spec, **options)


@case(
    inputs=lambda rng: (
        np.array([[0, 2], [1, 1]], "int32"),
        integers(rng, 12, 6, dtype="float32"),
    ),
    expect=lambda t, x: np.stack([x[4 * t[i, 0] : 4 * t[i, 0] + 4].sum(0) + t[i, 1] for i in range(2)]),
    tags="prefetch scratch block:int block:none grid:2d grid:revisit control:when order",
)
def prefetch_with_scratch(pl, pltpu, **options):
    """A two-dimensional table, a reduction and scratch declared in the grid spec."""

    def kernel(t_ref, x_ref, o_ref, acc_ref):
        i, k = pl.program_id(0), pl.program_id(1)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.full_like(acc_ref, t_ref[i, 1].astype(jnp.float32))

        acc_ref[...] += jnp.sum(x_ref[...], axis=0)

        @pl.when(k == 1)
        def _():
            o_ref[...] = acc_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2, 2),
        in_specs=[pl.BlockSpec((2, 6), lambda i, k, t: (2 * t[i, 0] + k, 0))],
        out_specs=pl.BlockSpec((None, 6), lambda i, k, t: (i, 0)),
        scratch_shapes=[pltpu.VMEM((6,), jnp.float32)],
    )
    return pl.pallas_call(kernel, sds((2, 6)), grid_spec=grid_spec, **options)


@case(
    inputs=lambda rng: (np.array([2, 0], "int32"), normal(rng, 8, 4), normal(rng, 4, 4)),
    expect=lambda i, x, v: np.concatenate([v[2:], x[2:4], v[:2], x[6:]]),
    tags="prefetch alias block:int grid:1d",
)
def prefetch_scatter_in_place(pl, pltpu, **options):
    """Blocks of an aliased output chosen by a table; aliases count the prefetched operand too."""

    def kernel(i_ref, x_ref, v_ref, o_ref):
        o_ref[...] = v_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((2, 4), lambda n, i: (n, 0))],
        out_specs=pl.BlockSpec((2, 4), lambda n, i: (i[n], 0)),
    )
    return pl.pallas_call(kernel, sds((8, 4)), grid_spec=grid_spec, input_output_aliases={1: 0}, **options)


@case(
    inputs=lambda rng: (normal(rng, 8, 4),),
    expect=lambda x: (x * 2 + 1, np.full((2, 4), np.nan)),
    rtol=1e-6,
    tags="scratch block:int block:vmem block:smem grid:1d uninit order",
)
def scratch_tuple(pl, pltpu, **options):
    """Scratch of three kinds; what nothing wrote reads NaN, in the first program."""

    def kernel(x_ref, o_ref, n_ref, a_ref, b_ref, s_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            n_ref[...] = b_ref[...]

        a_ref[...] = x_ref[...] * 2
        s_ref[1] = 1
        o_ref[...] = a_ref[...] + s_ref[1].astype(jnp.float32)

    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((8, 4)), sds((2, 4))),
        grid=(4,),
        in_specs=[spec],
        out_specs=(spec, pl.BlockSpec((2, 4), lambda i: (0, 0))),
        scratch_shapes=(
            pltpu.VMEM((2, 4), jnp.float32),
            pltpu.VMEM((2, 4), jnp.float32),
            pltpu.SMEM((2,), jnp.int32),
        ),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 8, 4, dtype="float32"),),
    expect=lambda x: np.cumsum(x.reshape(4, 2, 4).sum(1), 0),
    tags="scratch block:int block:none grid:1d control:when order",
)
def scratch_dict(pl, pltpu, **options):
    """Scratch as a dict arrives as keyword arguments."""

    def kernel(x_ref, o_ref, *, total, part):
        @pl.when(pl.program_id(0) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        part[...] = jnp.sum(x_ref[...], axis=0)
        total[...] += part[...]
        o_ref[...] = total[...]

    return pl.pallas_call(
        kernel,
        sds((4, 4)),
        grid=(4,),
        in_specs=[pl.BlockSpec((2, 4), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((None, 4), lambda i: (i, 0)),
        scratch_shapes=dict(part=pltpu.VMEM((4,), jnp.float32), total=pltpu.VMEM((4,), jnp.float32)),
        **options,
    )
