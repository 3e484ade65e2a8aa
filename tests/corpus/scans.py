"""Cumulative operations, sorting, searching and counting, within a block and across the grid."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import case, integers, normal, sds, uniform


@case(
    inputs=lambda rng: (uniform(rng, 8, 16, low=0.5, high=1.5),),
    expect=lambda x: (
        np.cumsum(x, 1),
        np.cumprod(x, 0),
        np.maximum.accumulate(x, 1),
        np.minimum.accumulate(x, 0)[::1],
        np.logaddexp.accumulate(x, 1),
        np.cumsum(x[:, ::-1], 1)[:, ::-1],
    ),
    rtol=2e-6,
    tags="prim:cumulative grid:absent",
)
def cumulative_operations(pl, pltpu, **options):
    def kernel(x_ref, sum_ref, prod_ref, max_ref, min_ref, lse_ref, back_ref):
        x = x_ref[...]
        sum_ref[...] = jnp.cumsum(x, axis=1)
        prod_ref[...] = jnp.cumprod(x, axis=0)
        max_ref[...] = lax.cummax(x, axis=1)
        min_ref[...] = lax.cummin(x, axis=0)
        lse_ref[...] = lax.cumlogsumexp(x, axis=1)
        back_ref[...] = lax.cumsum(x, axis=1, reverse=True)

    return pl.pallas_call(kernel, (sds((8, 16)),) * 6, **options)


@case(
    inputs=lambda rng: (integers(rng, 64, dtype="float32"),),
    expect=lambda x: np.cumsum(x),
    tags="block:int block:smem grid:1d scratch control:when order prim:cumulative index:int",
)
def cumsum_with_carry(pl, pltpu, **options):
    """The carry between blocks is one scalar in SMEM scratch."""

    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[0] = 0.0

        sums = jnp.cumsum(x_ref[...]) + carry_ref[0]
        o_ref[...] = sums
        carry_ref[0] = sums[-1]

    spec = pl.BlockSpec((16,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        sds((64,)),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.SMEM((1,), jnp.float32)],
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 4, 32, dtype="float32"),),
    expect=lambda x: np.cumsum(x, axis=1),
    tags="block:int grid:1d control:fori prim:cumulative",
)
def prefix_scan_by_doubling(pl, pltpu, **options):
    """Hillis and Steele: log2(n) steps of shift and add, unrolled in Python; associative_scan beside it."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        shift = 1
        while shift < 32:
            x = x + jnp.pad(x, ((0, 0), (shift, 0)))[:, :32]
            shift *= 2
        o_ref[...] = (x + lax.associative_scan(jnp.add, x_ref[...], axis=1)) / 2

    spec = pl.BlockSpec((2, 32), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds((4, 32)), grid=(2,), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 12, 20),),
    expect=lambda x: (np.sort(x, 1), -np.sort(-x, 1), np.argsort(x, 1, kind="stable").astype("int32")),
    tags="block:int grid:1d grid:ragged prim:sort",
)
def sort_rows(pl, pltpu, **options):
    def kernel(x_ref, up_ref, down_ref, order_ref):
        x = x_ref[...]
        up_ref[...] = jnp.sort(x, axis=1)
        down_ref[...] = jnp.sort(x, axis=1, descending=True)
        order_ref[...] = jnp.argsort(x, axis=1).astype(jnp.int32)

    spec = pl.BlockSpec((5, 20), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((12, 20)), sds((12, 20)), sds((12, 20), "int32")),
        grid=(3,),
        in_specs=[spec],
        out_specs=(spec, spec, spec),
        **options,
    )


def _sorted_pairs(k, v):
    order = np.lexsort((v, k))
    return k[order], v[order]


@case(
    inputs=lambda rng: (integers(rng, 40, low=0, high=6), normal(rng, 40)),
    expect=_sorted_pairs,
    tags="prim:sort grid:absent",
)
def sort_pairs(pl, pltpu, **options):
    """lax.sort of two operands by both keys."""

    def kernel(k_ref, v_ref, ks_ref, vs_ref):
        ks_ref[...], vs_ref[...] = lax.sort((k_ref[...], v_ref[...]), num_keys=2)

    return pl.pallas_call(kernel, (sds((40,), "int32"), sds((40,))), **options)


def _top3(x):
    order = np.argsort(-x, axis=1, kind="stable")[:, :3]
    return np.take_along_axis(x, order, 1), order.astype("int32")


@case(
    inputs=lambda rng: (normal(rng, 6, 33),),
    expect=lambda x: (*_top3(x), *_top3(x)),
    tags="prim:sort control:fori index:dynamic index:slice grid:1d",
)
def top_k(pl, pltpu, **options):
    """lax.top_k, and the same by a loop that takes the maximum out three times."""

    def kernel(x_ref, v_ref, i_ref, lv_ref, li_ref):
        v_ref[...], i_ref[...] = lax.top_k(x_ref[...], 3)

        def body(k, x):
            best = jnp.argmax(x, axis=1)
            lv_ref[:, k] = jnp.max(x, axis=1)
            li_ref[:, k] = best.astype(jnp.int32)
            columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
            return jnp.where(columns == best[:, None], -jnp.inf, x)

        lax.fori_loop(0, 3, body, x_ref[...])

    out = pl.BlockSpec((2, 3), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((6, 3)), sds((6, 3), "int32"), sds((6, 3)), sds((6, 3), "int32")),
        grid=(3,),
        in_specs=[pl.BlockSpec((2, 33), lambda i: (i, 0))],
        out_specs=(out, out, out, out),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 96, low=0, high=10),),
    expect=lambda x: np.bincount(x, minlength=10).astype("int32"),
    tags="block:int grid:1d grid:revisit control:when control:fori order index:dynamic index:rmw",
)
def histogram(pl, pltpu, **options):
    """Counts go through a dynamic scalar index, one at a time; all programs share the output block."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        def body(k, _):
            o_ref[x_ref[k]] += 1

        lax.fori_loop(0, x_ref.shape[0], body, None)

    return pl.pallas_call(
        kernel,
        sds((10,), "int32"),
        grid=(3,),
        in_specs=[pl.BlockSpec((32,), lambda i: (i,))],
        out_specs=pl.BlockSpec((10,), lambda i: (0,)),
        **options,
    )
