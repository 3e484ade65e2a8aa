"""Reductions within a block and across the grid, cumulative operations, sorting and searching.

Where an order of summation is not fixed the inputs are small integers, whose float32 sums are exact, so that
these kernels are expected bitwise.
"""

import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from .case import case, integers, normal, sds


@case(
    inputs=lambda rng: (integers(rng, 16, 32, dtype="float32"),),
    expect=lambda x: (
        x.sum(1),
        x.max(1),
        x.min(1),
        x[:, :4].prod(1),
        x.sum(),
        (x > 7).any(1),
        (x < 8).all(1),
    ),
    tags="prim:reduce dtype:bool grid:absent",
)
def reductions_of_a_block(pl, pltpu, **options):
    def kernel(x_ref, sum_ref, max_ref, min_ref, prod_ref, all_ref, any_ref, every_ref):
        x = x_ref[...]
        sum_ref[...] = jnp.sum(x, axis=1)
        max_ref[...] = jnp.max(x, axis=1)
        min_ref[...] = jnp.min(x, axis=1)
        prod_ref[...] = jnp.prod(x[:, :4], axis=1)
        all_ref[...] = jnp.sum(x)
        any_ref[...] = jnp.any(x > 7, axis=1)
        every_ref[...] = jnp.all(x < 8, axis=1)

    shapes = [sds((16,))] * 4 + [sds(()), sds((16,), "bool"), sds((16,), "bool")]
    return pl.pallas_call(kernel, tuple(shapes), **options)


@case(
    inputs=lambda rng: (integers(rng, 12, 16, low=-5, high=6, dtype="float32"),),
    expect=lambda x: (
        x.argmax(1).astype("int32"),
        x.argmin(0).astype("int32"),
        x.mean(1),
        np.abs(x).max(1, keepdims=True),
    ),
    tags="prim:reduce grid:absent",
)
def arg_reductions(pl, pltpu, **options):
    """The first of equal elements wins."""

    def kernel(x_ref, big_ref, small_ref, mean_ref, abs_ref):
        x = x_ref[...]
        big_ref[...] = jnp.argmax(x, axis=1).astype(jnp.int32)
        small_ref[...] = jnp.argmin(x, axis=0).astype(jnp.int32)
        mean_ref[...] = jnp.mean(x, axis=1)
        abs_ref[...] = jnp.max(jnp.abs(x), axis=1, keepdims=True)

    shapes = (sds((12,), "int32"), sds((16,), "int32"), sds((12,)), sds((12, 1)))
    return pl.pallas_call(kernel, shapes, **options)


def _row_blocks(pl, rows, columns):
    return pl.BlockSpec((rows, columns), lambda i: (i, 0))


@case(
    inputs=lambda rng: (normal(rng, 50, 200, scale=4.0),),
    expect=lambda x: scipy.special.softmax(x, axis=-1),
    rtol=2e-6,
    atol=1e-7,
    tags="block:int grid:1d grid:ragged prim:math prim:reduce",
)
def softmax_rows(pl, pltpu, **options):
    """Ragged in rows: the fill is confined to rows whose result is dropped, so no mask is needed."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        o_ref[...] = e / jnp.sum(e, axis=-1, keepdims=True)

    spec = _row_blocks(pl, 16, 200)
    return pl.pallas_call(kernel, sds((50, 200)), grid=(pl.cdiv(50, 16),), in_specs=[spec], out_specs=spec, **options)


def _layer_norm(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b


@case(
    inputs=lambda rng: (normal(rng, 40, 96), normal(rng, 96), normal(rng, 96)),
    expect=_layer_norm,
    rtol=1e-5,
    atol=1e-5,
    tags="block:int grid:1d grid:constant prim:math prim:reduce",
)
def layer_norm(pl, pltpu, **options):
    def kernel(x_ref, g_ref, b_ref, o_ref):
        x = x_ref[...]
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.mean(centred * centred, axis=-1, keepdims=True)
        o_ref[...] = centred * lax.rsqrt(var + 1e-5) * g_ref[...] + b_ref[...]

    row, vector = _row_blocks(pl, 8, 96), pl.BlockSpec((96,), lambda i: (0,))
    return pl.pallas_call(kernel, sds((40, 96)), grid=(5,), in_specs=[row, vector, vector], out_specs=row, **options)


@case(
    inputs=lambda rng: (normal(rng, 24, 96, dtype=jnp.bfloat16), normal(rng, 96)),
    expect=lambda x, g: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * g,
    rtol=8e-3,
    atol=1e-3,
    out="bfloat16",
    tags="block:int grid:1d grid:constant dtype:bfloat16 prim:reduce",
)
def rms_norm(pl, pltpu, **options):
    def kernel(x_ref, g_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        o_ref[...] = (x * scale * g_ref[...]).astype(o_ref.dtype)

    row, vector = _row_blocks(pl, 8, 96), pl.BlockSpec((96,), lambda i: (0,))
    return pl.pallas_call(
        kernel, sds((24, 96), jnp.bfloat16), grid=(3,), in_specs=[row, vector], out_specs=row, **options
    )


@case(
    inputs=lambda rng: (normal(rng, 16, 300, scale=3.0),),
    expect=lambda x: scipy.special.logsumexp(x, axis=1, keepdims=True),
    rtol=2e-6,
    atol=1e-6,
    tags="block:int grid:2d grid:ragged grid:revisit scratch control:when order prim:math prim:reduce",
)
def online_logsumexp(pl, pltpu, **options):
    """Columns arrive block by block; running maximum and sum live in scratch; the last block is masked."""

    def kernel(x_ref, o_ref, m_ref, s_ref):
        j = pl.program_id(1)
        columns = j * 128 + lax.broadcasted_iota(jnp.int32, (8, 128), 1)
        x = jnp.where(columns < 300, x_ref[...], -jnp.inf)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            s_ref[...] = jnp.zeros_like(s_ref)

        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, jnp.max(x, axis=1, keepdims=True))
        s_ref[...] = s_ref[...] * jnp.exp(m_old - m_new) + jnp.sum(jnp.exp(x - m_new), axis=1, keepdims=True)
        m_ref[...] = m_new

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = m_ref[...] + jnp.log(s_ref[...])

    return pl.pallas_call(
        kernel,
        sds((16, 1)),
        grid=(2, pl.cdiv(300, 128)),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32), pltpu.VMEM((8, 1), jnp.float32)],
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 300, 256, dtype="float32"),),
    expect=lambda x: x.sum(0),
    tags="block:int grid:2d grid:ragged grid:revisit grid:permuted control:when order prim:reduce",
)
def column_sum_masked(pl, pltpu, **options):
    """The reduction axis last; rows beyond the array are masked."""

    def kernel(x_ref, o_ref):
        r = pl.program_id(1)

        @pl.when(r == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        rows = r * 128 + lax.broadcasted_iota(jnp.int32, x_ref.shape, 0)
        o_ref[...] += jnp.sum(jnp.where(rows < 300, x_ref[...], 0.0), axis=0)

    return pl.pallas_call(
        kernel,
        sds((256,)),
        grid=(2, pl.cdiv(300, 128)),
        in_specs=[pl.BlockSpec((128, 128), lambda c, r: (r, c))],
        out_specs=pl.BlockSpec((128,), lambda c, r: (c,)),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 32, 24, dtype="float32"),),
    expect=lambda x: x.sum(0),
    tags="block:int grid:2d grid:revisit control:when order revisit prim:reduce",
)
def column_sum_reduction_first(pl, pltpu, **options):
    """The reduction axis first: each output block is left and visited again."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(x_ref[...], axis=0)

    return pl.pallas_call(
        kernel,
        sds((24,)),
        grid=(4, 3),
        in_specs=[pl.BlockSpec((8, 8), lambda r, c: (r, c))],
        out_specs=pl.BlockSpec((8,), lambda r, c: (c,)),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 20, 9, dtype="float32"),),
    expect=lambda x: np.array([[x.sum()]]),
    tags="block:int grid:2d grid:revisit grid:constant control:when order prim:reduce",
)
def sum_of_everything(pl, pltpu, **options):
    def kernel(x_ref, o_ref):
        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(x_ref[...])

    return pl.pallas_call(
        kernel,
        sds((1, 1)),
        grid=(4, 3),
        in_specs=[pl.BlockSpec((5, 3), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((1, 1), lambda i, j: (0, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 10, 3, dtype="float32"),),
    expect=lambda x: np.stack([x[:4].sum(0), x[4:8].sum(0), np.full(3, np.nan)]),
    tags="block:int block:none grid:1d grid:ragged padding prim:reduce",
)
def ragged_sum_unmasked(pl, pltpu, **options):
    """A sum over a block that reaches beyond the array shows the fill: NaN."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sum(x_ref[...], axis=0)

    return pl.pallas_call(
        kernel,
        sds((3, 3)),
        grid=(3,),
        in_specs=[pl.BlockSpec((4, 3), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((None, 3), lambda i: (i, 0)),
        **options,
    )
