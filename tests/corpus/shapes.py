"""Operations on the shape of values inside a kernel, and operands of unusual shapes (empty, 0-d, 5-d)."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import case, integers, normal, sds


@case(
    inputs=lambda rng: (normal(rng, 16, 1), normal(rng, 1, 32)),
    expect=lambda c, r: c + r + np.arange(16)[:, None] * 32 + np.arange(32),
    rtol=1e-6,
    tags="prim:shape grid:1d grid:constant",
)
def broadcast_and_iota(pl, pltpu, **options):
    def kernel(c_ref, r_ref, o_ref):
        rows = pl.program_id(0) * 4 + lax.broadcasted_iota(jnp.int32, (4, 32), 0)
        columns = lax.broadcasted_iota(jnp.int32, (4, 32), 1)
        o_ref[...] = pl.broadcast_to(c_ref[...], (4, 32)) + r_ref[...] + (rows * 32 + columns).astype(jnp.float32)

    return pl.pallas_call(
        kernel,
        sds((16, 32)),
        grid=(4,),
        in_specs=[pl.BlockSpec((4, 1), lambda i: (i, 0)), pl.BlockSpec((1, 32), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((4, 32), lambda i: (i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 4, 6), normal(rng, 4, 6)),
    expect=lambda x, y: (
        np.concatenate([x, y[:, ::-1]], axis=1),
        np.stack([x, y], axis=1).reshape(8, 6),
        np.pad(x, ((1, 2), (0, 3)), constant_values=7.0),
        x.T.reshape(3, 8),
        x[1:4, 0:6:2],
        x[None, :, None, 2],
    ),
    tags="prim:shape grid:absent",
)
def rearranged_values(pl, pltpu, **options):
    def kernel(x_ref, y_ref, cat_ref, stack_ref, pad_ref, turn_ref, slice_ref, new_ref):
        x, y = x_ref[...], y_ref[...]
        cat_ref[...] = jnp.concatenate([x, y[:, ::-1]], axis=1)
        stack_ref[...] = jnp.stack([x, y], axis=1).reshape(8, 6)
        pad_ref[...] = jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0)
        turn_ref[...] = x.T.reshape(3, 8)
        slice_ref[...] = x[1:4, 0:6:2]
        new_ref[...] = jnp.expand_dims(jnp.squeeze(x[:, 2:3], 1), (0, 2))

    shapes = ((4, 12), (8, 6), (7, 9), (3, 8), (3, 3), (1, 4, 1))
    return pl.pallas_call(kernel, tuple(sds(s) for s in shapes), **options)


def _interior(x):
    out = np.full(15, -1.0)
    out[1:14:2] = x[:7]
    return out


@case(
    inputs=lambda rng: (normal(rng, 8), np.array([3], "int32")),
    expect=lambda x, s: (
        np.roll(x, 3),
        x[s[0] : s[0] + 4],
        np.concatenate([x[:3], np.zeros(2), x[5:]]),
        _interior(x),
        np.repeat(x, 2),
        np.tile(x, 2),
    ),
    tags="prim:shape grid:absent index:int",
)
def dynamic_values(pl, pltpu, **options):
    """Dynamic slices and updates of values (not of Refs), rolls, repeats, interior and negative padding."""

    def kernel(x_ref, s_ref, roll_ref, slice_ref, update_ref, pad_ref, repeat_ref, tile_ref):
        x, s = x_ref[...], s_ref[0]
        roll_ref[...] = jnp.roll(x, 3)
        slice_ref[...] = lax.dynamic_slice(x, (s,), (4,))
        update_ref[...] = lax.dynamic_update_slice(x, jnp.zeros(2, x.dtype), (s,))
        pad_ref[...] = lax.pad(x, jnp.float32(-1), [(1, -1, 1)])
        repeat_ref[...] = jnp.repeat(x, 2)
        tile_ref[...] = jnp.tile(x, 2)

    return pl.pallas_call(kernel, tuple(sds((n,)) for n in (8, 4, 8, 15, 16, 16)), **options)


@case(
    inputs=lambda rng: (
        normal(rng, 8, 16),
        integers(rng, 8, 4, low=0, high=16),
        integers(rng, 5, low=0, high=8),
    ),
    expect=lambda x, i, r: (np.take_along_axis(x, i, axis=1), x[r], x[r, i[r, 0]]),
    tags="prim:gather grid:absent",
)
def gathered_values(pl, pltpu, **options):
    """jnp indexing of values by arrays, which traces to gather."""

    def kernel(x_ref, i_ref, r_ref, along_ref, rows_ref, both_ref):
        x, i, r = x_ref[...], i_ref[...], r_ref[...]
        along_ref[...] = jnp.take_along_axis(x, i, axis=1)
        rows_ref[...] = jnp.take(x, r, axis=0)
        both_ref[...] = x[r, i[r, 0]]

    return pl.pallas_call(kernel, (sds((8, 4)), sds((5, 16)), sds((5,))), **options)


def _scattered(x, i, v):
    added, put = x.copy(), x.copy()
    np.add.at(added, i, v)
    for k, j in enumerate(i):
        put[j] = max(put[j], v[k])
    return added, put


@case(
    inputs=lambda rng: (
        integers(rng, 10, dtype="float32"),
        integers(rng, 7, low=0, high=10),
        integers(rng, 7, dtype="float32"),
    ),
    expect=_scattered,
    tags="prim:scatter grid:absent",
)
def scattered_values(pl, pltpu, **options):
    """jnp `.at[i].add` and `.at[i].max` on values with repeated indices, which trace to scatter."""

    def kernel(x_ref, i_ref, v_ref, add_ref, max_ref):
        x, i, v = x_ref[...], i_ref[...], v_ref[...]
        add_ref[...] = x.at[i].add(v)
        max_ref[...] = x.at[i].max(v)

    return pl.pallas_call(kernel, (sds((10,)), sds((10,))), **options)


@case(
    inputs=lambda rng: (normal(rng, 2, 3, 4, 5, 6),),
    expect=lambda x: np.moveaxis(x, 4, 0) + 1,
    tags="block:int grid:3d grid:permuted prim:shape",
)
def five_dimensions(pl, pltpu, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.transpose(x_ref[...], (4, 0, 1, 2, 3)) + 1

    return pl.pallas_call(
        kernel,
        sds((6, 2, 3, 4, 5)),
        grid=(2, 3, 2),
        in_specs=[pl.BlockSpec((1, 1, 2, 5, 6), lambda a, b, c: (a, b, c, 0, 0))],
        out_specs=pl.BlockSpec((6, 1, 1, 2, 5), lambda a, b, c: (0, a, b, c, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (np.float32(rng.standard_normal()), normal(rng, 5)),
    expect=lambda s, x: (s * 2, s * x),
    tags="block:whole grid:absent index:ellipsis",
)
def zero_dimensions(pl, pltpu, **options):
    """A 0-d operand and a 0-d result, read and written with `[...]`."""

    def kernel(s_ref, x_ref, t_ref, o_ref):
        t_ref[...] = s_ref[...] * 2
        o_ref[...] = s_ref[...] * x_ref[...]

    return pl.pallas_call(kernel, (sds(()), sds((5,))), **options)


@case(
    inputs=lambda rng: (normal(rng, 0, 4), normal(rng, 3)),
    expect=lambda e, x: (e + 1, x + e.sum()),
    tags="block:whole grid:absent empty",
)
def empty_operand(pl, pltpu, **options):
    """An operand with no elements: its blocks are empty, and the other operands are not disturbed."""

    def kernel(e_ref, x_ref, f_ref, o_ref):
        f_ref[...] = e_ref[...] + 1
        o_ref[...] = x_ref[...] + jnp.sum(e_ref[...])

    return pl.pallas_call(kernel, (sds((0, 4)), sds((3,))), **options)
