"""Reading a Ref: integers, slices, strides, integer arrays, masks, and views chained to any depth.

Shapes and values are NumPy's. Dynamic starts and integers out of range clamp, as XLA's do.
"""

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np

from .case import case, integers, normal, sds


def _reads(pl, read, shapes, options):
    """A call whose kernel stores `read(*input_refs)`, a tuple of values, into outputs of these shapes."""
    shapes = tuple(s if isinstance(s, jax.ShapeDtypeStruct) else sds(s) for s in shapes)

    def kernel(*refs):
        inputs, outputs = refs[: len(refs) - len(shapes)], refs[len(refs) - len(shapes) :]
        values = read(*inputs)
        assert len(values) == len(outputs)
        for o_ref, value in zip(outputs, values):
            o_ref[...] = value

    return pl.pallas_call(kernel, shapes, **options)


@case(
    inputs=lambda rng: (normal(rng, 4, 6, 8),),
    expect=lambda x: (x[2], x[-1, 3], x[..., 5], x[1, ..., -2], x[0, 0, 0]),
    tags="index:int index:negative index:ellipsis grid:absent",
)
def read_static_integers(pl, pltpu, **options):
    def read(x_ref):
        return x_ref[2], x_ref[-1, 3], x_ref[..., 5], x_ref[1, ..., -2], x_ref[0, 0, 0]

    return _reads(pl, read, ((6, 8), (8,), (4, 6), (6,), ()), options)


@case(
    inputs=lambda rng: (normal(rng, 9, 12),),
    expect=lambda x: (x[2:5], x[:, 3:], x[-4:-1, :7], x[::2, 1::3], x[1:8:3, 5], x[4:4], x[3:100:2]),
    tags="index:slice index:stride index:negative index:int grid:absent",
)
def read_static_slices(pl, pltpu, **options):
    """Strides and an integer beside a strided slice included."""

    def read(x_ref):
        return (
            x_ref[2:5],
            x_ref[:, 3:],
            x_ref[-4:-1, :7],
            x_ref[::2, 1::3],
            x_ref[1:8:3, 5],
            x_ref[4:4],
            x_ref[3:9:2],
        )

    return _reads(pl, read, ((3, 12), (9, 9), (3, 7), (5, 4), (3,), (0, 12), (3, 12)), options)


@case(
    inputs=lambda rng: (normal(rng, 10, 12), np.array([1, 4, 7], "int32")),
    expect=lambda x, i: (x[1:5, 4:7], x[1:5, 7], x[3, 4:6], x[7, 4], x[2:9, :2], x[4:12, -3:]),
    tags="index:ds index:dynamic index:int index:slice grid:absent",
)
def read_dynamic_slices(pl, pltpu, **options):
    def read(x_ref, i_ref):
        a, b, c = i_ref[0], i_ref[1], i_ref[2]
        return (
            x_ref[pl.ds(a, 4), pl.ds(b, 3)],
            x_ref[pl.ds(a, 4), c],
            x_ref[3, pl.ds(b, 2)],
            x_ref[c, b],
            x_ref[pl.dslice(2, 7), pl.dslice(2)],
            x_ref[pl.ds(b, 6), -3:],
        )

    return _reads(pl, read, ((4, 3), (4,), (2,), (), (7, 2), (6, 3)), options)


@case(
    inputs=lambda rng: (normal(rng, 10, 12), np.array([1, 3], "int32")),
    expect=lambda x, i: (x[1:8:2], x[:, 3:9:3], x[1, 3:12:4], x[3, 0:12:2], x[::2, 1:7:5]),
    tags="index:ds index:stride index:dynamic index:int grid:absent",
)
def read_strided(pl, pltpu, **options):
    """pl.ds with a stride, from static and dynamic starts, alone and beside an integer."""

    def read(x_ref, i_ref):
        a, b = i_ref[0], i_ref[1]
        return (
            x_ref[pl.ds(a, 4, 2)],
            x_ref[:, pl.ds(b, 2, 3)],
            x_ref[a, pl.ds(b, 3, stride=4)],
            x_ref[3, pl.ds(0, 6, 2)],
            x_ref[::2, pl.ds(a, 2, 5)],
        )

    return _reads(pl, read, ((4, 12), (10, 2), (3,), (6,), (5, 2)), options)


@case(
    inputs=lambda rng: (normal(rng, 8, 5), np.array([6, 40, -3], "int32")),
    expect=lambda x, i: (x[4:8], x[7], x[5], x[:, 1:5]),
    tags="index:dynamic index:ds oob grid:absent",
)
def read_out_of_range(pl, pltpu, **options):
    """A start too large is moved back, an integer too large is the last, a negative one counts back."""

    def read(x_ref, i_ref):
        return x_ref[pl.ds(i_ref[0], 4)], x_ref[i_ref[1]], x_ref[i_ref[2]], x_ref[:, pl.ds(i_ref[0], 4)]

    return _reads(pl, read, ((4, 5), (5,), (5,), (8, 4)), options)


@case(
    inputs=lambda rng: (normal(rng, 7, 9), integers(rng, 4, low=0, high=7), integers(rng, 4, low=0, high=7)),
    expect=lambda x, i, j: (
        x[i],
        x[:, j],
        x[i, j],
        x[i[:, None], j[None, :]],
        x[i, 3],
        x[i, 2:6],
        x[2:5, j],
        x[np.stack([i, j])],
    ),
    tags="index:array index:int index:slice grid:absent",
)
def read_integer_arrays(pl, pltpu, **options):
    """One array, two, broadcast against each other, beside an integer, beside slices."""

    def read(x_ref, i_ref, j_ref):
        i, j = i_ref[...], j_ref[...]
        return (
            x_ref[i],
            x_ref[:, j],
            x_ref[i, j],
            x_ref[i[:, None], j[None, :]],
            x_ref[i, 3],
            x_ref[i, 2:6],
            x_ref[2:5, j],
            x_ref[jnp.stack([i, j])],
        )

    shapes = ((4, 9), (7, 4), (4,), (4, 4), (4,), (4, 4), (3, 4), (2, 4, 9))
    return _reads(pl, read, shapes, options)


@case(
    inputs=lambda rng: (normal(rng, 5, 6, 7), integers(rng, 3, low=0, high=5), np.array([2], "int32")),
    expect=lambda x, i, s: (x[i, :, i], x[:, i, 1:4], x[i, 2:5], x[2, :, i], x[i, 2]),
    tags="index:array index:ds index:slice index:int index:dynamic grid:absent",
)
def read_mixed_arrays(pl, pltpu, **options):
    """Arrays with slices between them go first, arrays side by side stay in place, as in NumPy."""

    def read(x_ref, i_ref, s_ref):
        i, s = i_ref[...], s_ref[0]
        return x_ref[i, :, i], x_ref[:, i, 1:4], x_ref[i, pl.ds(s, 3)], x_ref[2, :, i], x_ref[i, s]

    return _reads(pl, read, ((3, 6), (5, 3, 3), (3, 3, 7), (3, 6), (3, 7)), options)


_ROWS = np.array([True, False, True, True, False])
_CELLS = np.arange(20).reshape(5, 4) % 3 == 0


@case(
    inputs=lambda rng: (normal(rng, 5, 4),),
    expect=lambda x: (x[_ROWS], x[_CELLS], x[_ROWS, 1:3]),
    tags="index:mask index:slice grid:absent",
)
def read_masks(pl, pltpu, **options):
    """A boolean mask that is known while tracing selects, as in NumPy."""

    def read(x_ref):
        return x_ref[_ROWS], x_ref[_CELLS], x_ref[_ROWS, 1:3]

    return _reads(pl, read, ((3, 4), (7,), (3, 2)), options)


@case(
    inputs=lambda rng: (normal(rng, 8, 12), np.array([2, 5], "int32")),
    expect=lambda x, i: (x[2:6, 1:9][1, 2:5], x[2:6][1:3][:, 5:8], x[2, 5:9][1], x[1::2][:, ::3][2:4]),
    tags="index:at index:ds index:dynamic index:stride index:int grid:absent",
)
def read_views(pl, pltpu, **options):
    """`.at[...]` views chained; every index counts from its view's start."""

    def read(x_ref, i_ref):
        a, b = i_ref[0], i_ref[1]
        return (
            x_ref.at[2:6, 1:9].at[1][2:5],
            x_ref.at[pl.ds(a, 4)].at[pl.ds(a - 1, 2)].at[:, pl.ds(b, 3)][...],
            x_ref.at[a].at[pl.ds(b, 4)][1],
            x_ref.at[1::2].at[:, ::3][2:4],
        )

    return _reads(pl, read, ((3,), (2, 3), (), (2, 4)), options)


@case(
    inputs=lambda rng: (normal(rng, 4, 6), np.array([3], "int32")),
    expect=lambda x, i: (
        x.reshape(8, 3)[5],
        x.reshape(24)[3:10],
        x[:2].reshape(12)[3:9],
        x.reshape(2, 12)[1, 4],
    ),
    tags="index:reshape index:at index:ds index:int grid:absent",
)
def read_reshaped(pl, pltpu, **options):
    def read(x_ref, i_ref):
        return (
            x_ref.reshape(8, 3)[5],
            x_ref.reshape((24,))[pl.ds(i_ref[0], 7)],
            x_ref.at[0:2].reshape(12)[3:9],
            x_ref.reshape(2, 12).at[1].reshape(3, 4)[1, 0],
        )

    return _reads(pl, read, ((3,), (7,), (6,), ()), options)


def _bf16_pairs(x):
    halves = x.astype("float32").view("uint16").reshape(4, 6, 2)
    return halves.transpose(0, 2, 1).reshape(8, 6)


@case(
    inputs=lambda rng: (normal(rng, 4, 6), integers(rng, 4, 6, low=-(2**31), high=2**31)),
    expect=lambda x, i: (
        x.astype("float32").view("int32"),
        x.astype("float32").view("uint32")[1],
        _bf16_pairs(x),
        i.view("uint32")[2:, :3],
    ),
    tags="index:bitcast index:slice dtype:uint32 dtype:uint16 grid:absent",
)
def read_bitcast(pl, pltpu, **options):
    """Bits seen as another dtype; a narrower one makes the second last dimension longer, low half first."""

    def read(x_ref, i_ref):
        return (
            x_ref.bitcast(jnp.int32)[...],
            x_ref.bitcast(jnp.uint32)[1],
            x_ref.bitcast(jnp.uint16)[...],
            i_ref.bitcast(jnp.uint32)[2:, :3],
        )

    shapes = (sds((4, 6), "int32"), sds((6,), "uint32"), sds((8, 6), "uint16"), sds((2, 3), "uint32"))
    return _reads(pl, read, shapes, options)


@case(
    inputs=lambda rng: (normal(rng, 4, 6), normal(rng, 2, 3, 4), np.array([2], "int32")),
    expect=lambda x, y, i: (x.T, x.T[2], x.T[2:5, 1], y.transpose(2, 0, 1)[2], x[1:3].T[4]),
    tags="index:transpose index:at index:ds index:int grid:absent",
)
def read_transposed(pl, pltpu, **options):
    """`.T` and `.transpose` are views too."""

    def read(x_ref, y_ref, i_ref):
        s = i_ref[0]
        return (
            x_ref.T[...],
            x_ref.T[2],
            x_ref.T[pl.ds(s, 3), 1],
            y_ref.transpose((2, 0, 1))[s],
            x_ref.at[1:3].T[4],
        )

    return _reads(pl, read, ((6, 4), (4,), (3,), (2, 3), (2,)), options)


@case(
    inputs=lambda rng: (normal(rng, 5, 6), np.array([1], "int32")),
    expect=lambda x, i: (x[2:4, 1], x[1], x, x[:, None, 2]),
    tags="index:get index:newaxis index:dynamic grid:absent",
)
def read_by_functions(pl, pltpu, **options):
    """jax.ref.get; and a new axis, which is the value's, not the Ref's."""

    def read(x_ref, i_ref):
        return (
            jax.ref.get(x_ref, (slice(2, 4), 1)),
            jax.ref.get(x_ref, (i_ref[0],)),
            jax.ref.get(x_ref),
            x_ref[...][:, None, 2],
        )

    return _reads(pl, read, ((2,), (6,), (5, 6), (5, 1)), options)


@case(
    inputs=lambda rng: (normal(rng, 12, 6),),
    expect=lambda x: x[np.arange(12) // 4 * 4 + (np.arange(12) + 1) % 4, ::-1],
    tags="index:dynamic index:int index:slice block:int grid:1d",
)
def read_within_blocks(pl, pltpu, **options):
    """Indices are relative to the block; attributes of the Ref are the block's."""

    def kernel(x_ref, o_ref):
        assert x_ref.shape == (4, 6) and x_ref.ndim == 2 and len(x_ref) == 4 and x_ref.dtype == jnp.float32
        o_ref[0:3] = x_ref[1:4][:, ::-1]
        o_ref[3] = x_ref[0][::-1]

    spec = pl.BlockSpec((4, 6), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds((12, 6)), grid=(3,), in_specs=[spec], out_specs=spec, **options)
