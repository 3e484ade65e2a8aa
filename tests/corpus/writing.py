"""Writing a Ref: every kind of index, views, masks, read-modify-write, and the functions of jax.ref."""

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np

from .case import case, integers, normal, sds


def _writes(pl, write, shape, options, dtype="float32"):
    """A call whose kernel fills its output with zeros and then runs `write(*input_refs, o_ref)`."""

    def kernel(*refs):
        refs[-1][...] = jnp.zeros(shape, dtype)
        write(*refs)

    return pl.pallas_call(kernel, sds(shape, dtype), **options)


def _write_expectation(shape, write, dtype="float64"):
    """The same in NumPy: `write(*inputs, o)` on an array of zeros."""

    def expect(*inputs):
        o = np.zeros(shape, dtype)
        write(*inputs, o)
        return o

    return expect


def _np_slices(x, i, o):
    o[2] = x[0]
    o[-1, 3:] = x[1, 3:]
    o[0, ::2] = x[2, :4]
    o[4:6, 1] = x[3, :2]
    o[3, 7] = 5.0
    o[6:9, 2:5] = x[1:4, 2:5]
    o[1, 0:8:3] = x[1, :3]
    o[7, 6] = 9.0


@case(
    inputs=lambda rng: (normal(rng, 5, 8), np.array([6, 2], "int32")),
    expect=_write_expectation((10, 8), _np_slices),
    tags="index:int index:negative index:slice index:stride index:ds index:dynamic grid:absent",
)
def write_slices(pl, pltpu, **options):
    def write(x_ref, i_ref, o_ref):
        a, b = i_ref[0], i_ref[1]
        o_ref[2] = x_ref[0]
        o_ref[-1, 3:] = x_ref[1, 3:]
        o_ref[0, ::2] = x_ref[2, :4]
        o_ref[4:6, 1] = x_ref[3, :2]
        o_ref[3, 7] = 5.0
        o_ref[pl.ds(a, 3), pl.ds(b, 3)] = x_ref[1:4, 2:5]
        o_ref[1, pl.ds(0, 3, 3)] = x_ref[1, :3]
        o_ref[a + 1, a] = 9.0

    return _writes(pl, write, (10, 8), options)


def _np_strided(x, i, o):
    o[1:8:2] = x
    o[:, 3:9:3] += 1
    o[0:9:4, 1] = 7


@case(
    inputs=lambda rng: (integers(rng, 4, 12, dtype="float32"), np.array([1, 3], "int32")),
    expect=_write_expectation((10, 12), _np_strided),
    tags="index:ds index:stride index:dynamic index:rmw index:slice grid:absent",
)
def write_strided(pl, pltpu, **options):
    def write(x_ref, i_ref, o_ref):
        o_ref[pl.ds(i_ref[0], 4, 2)] = x_ref[...]
        o_ref[:, pl.ds(i_ref[1], 2, 3)] += jnp.ones((10, 2))
        o_ref[::4, 1] = jnp.full((3,), 7.0)

    return _writes(pl, write, (10, 12), options)


def _np_out_of_range(x, i, o):
    o[5:8] = x[:3]
    o[0] = x[3]
    o[7] = o[7] + x[4]


@case(
    inputs=lambda rng: (integers(rng, 5, 4, dtype="float32"), np.array([6, 99, -8], "int32")),
    expect=_write_expectation((8, 4), _np_out_of_range),
    tags="index:dynamic index:ds index:rmw oob grid:absent",
)
def write_out_of_range(pl, pltpu, **options):
    def write(x_ref, i_ref, o_ref):
        o_ref[pl.ds(i_ref[0], 3)] = x_ref[0:3]
        o_ref[i_ref[2]] = x_ref[3]
        o_ref[i_ref[1]] += x_ref[4]

    return _writes(pl, write, (8, 4), options)


def _np_arrays(x, i, j, o):
    o[i] = x
    o[:, j] = x[:, :3].sum(0)[:, None].T
    o[i, j] = [1, 2, 3]
    o[i, 0] = x[:, 0]
    o[2:4, j] = x[1:3, 1:4]


@case(
    inputs=lambda rng: (
        integers(rng, 3, 6, dtype="float32"),
        np.array([4, 0, 7], "int32"),
        np.array([5, 1, 2], "int32"),
    ),
    expect=_write_expectation((8, 6), _np_arrays),
    tags="index:array index:int index:slice grid:absent",
)
def write_integer_arrays(pl, pltpu, **options):
    """Scatters of distinct rows, columns and cells."""

    def write(x_ref, i_ref, j_ref, o_ref):
        i, j = i_ref[...], j_ref[...]
        o_ref[i] = x_ref[...]
        o_ref[:, j] = jnp.broadcast_to(x_ref[:, :3].sum(0), (8, 3))
        o_ref[i, j] = jnp.arange(1, 4).astype(jnp.float32)
        o_ref[i, 0] = x_ref[:, 0]
        o_ref[2:4, j] = x_ref[1:3, 1:4]

    return _writes(pl, write, (8, 6), options)


def _np_repeated(x, i, o):
    np.add.at(o, i, x)
    o[5:7] += x[:2]
    o[0, 2] += 100


@case(
    inputs=lambda rng: (integers(rng, 4, 3, dtype="float32"), np.array([1, 3, 1, 1], "int32")),
    expect=_write_expectation((7, 3), _np_repeated),
    tags="index:addupdate index:array index:slice index:int grid:absent",
)
def add_to_repeated_rows(pl, pltpu, **options):
    """jax.ref.addupdate counts every contribution to a repeated index."""

    def write(x_ref, i_ref, o_ref):
        jax.ref.addupdate(o_ref, (i_ref[...],), x_ref[...])
        jax.ref.addupdate(o_ref, (slice(5, 7),), x_ref[0:2])
        jax.ref.addupdate(o_ref, (0, 2), 100.0)

    return _writes(pl, write, (7, 3), options)


_ROWS = np.array([True, False, True, True, False])
_CELLS = np.arange(20).reshape(5, 4) % 3 == 0


def _np_masks(x, v, o):
    o[_ROWS] = x[:3]
    o[_CELLS] = v


@case(
    inputs=lambda rng: (normal(rng, 5, 4), normal(rng, 7)),
    expect=_write_expectation((5, 4), _np_masks),
    tags="index:mask index:slice grid:absent",
)
def write_masks(pl, pltpu, **options):
    """A mask that is known while tracing selects what is stored."""

    def write(x_ref, v_ref, o_ref):
        o_ref[_ROWS] = x_ref[0:3]
        o_ref[_CELLS] = v_ref[...]

    return _writes(pl, write, (5, 4), options)


@case(
    inputs=lambda rng: (normal(rng, 11, 6), normal(rng, 11, 6)),
    expect=lambda x, y: np.where(x > y, x, y * 2),
    tags="index:store index:rmw block:int grid:1d grid:ragged",
)
def masked_store(pl, pltpu, **options):
    """`o[...] = where(mask, value, o[...])`: a mask computed in the kernel."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = y_ref[...] * 2
        o_ref[...] = jnp.where(x_ref[...] > y_ref[...], x_ref[...], o_ref[...])

    spec = pl.BlockSpec((4, 6), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds((11, 6)), grid=(3,), in_specs=[spec, spec], out_specs=spec, **options)


def _np_views(x, i, o):
    o[1:5][1:3, 2:4] = x[:2, :2]
    o[2:6][3] += x[0]
    o[::2][2, 1] = 8
    o.reshape(48)[5:8] = x[1, :3]
    o[6:].reshape(12)[4:6] = x[2, 4:]


@case(
    inputs=lambda rng: (integers(rng, 3, 6, dtype="float32"), np.array([2], "int32")),
    expect=_write_expectation((8, 6), _np_views),
    tags="index:at index:reshape index:rmw index:ds index:stride index:dynamic grid:absent",
)
def write_views(pl, pltpu, **options):
    """Stores through `.at[...]` chains and reshaped views change the Ref itself."""

    def write(x_ref, i_ref, o_ref):
        a = i_ref[0]
        o_ref.at[1:5].at[1:3, pl.ds(a, 2)][...] = x_ref[:2, :2]
        o_ref.at[pl.ds(a, 4)].at[3][...] += x_ref[0]
        o_ref.at[::2].at[a][1] = 8.0
        o_ref.reshape(48)[pl.ds(a + 3, 3)] = x_ref[1, :3]
        o_ref.at[6:].reshape(12)[4:6] = x_ref[2, 4:]

    return _writes(pl, write, (8, 6), options)


def _np_transposed(x, o):
    o.T[1] = x[:, 0]
    o.T[2:5, 3] = x[0, :3]
    o[1:3].T[5] += x[2:4, 1]
    o.T.T[0, 0] = 6


@case(
    inputs=lambda rng: (integers(rng, 4, 6, dtype="float32"),),
    expect=_write_expectation((4, 6), _np_transposed),
    tags="index:transpose index:at index:rmw grid:absent",
)
def write_transposed(pl, pltpu, **options):
    def write(x_ref, o_ref):
        o_ref.T[1] = x_ref[:, 0]
        o_ref.transpose((1, 0))[pl.ds(2, 3), 3] = x_ref[0, :3]
        o_ref.at[1:3].T[5] += x_ref[2:4, 1]
        o_ref.T.T[0, 0] = 6.0

    return _writes(pl, write, (4, 6), options)


def _np_bits(x):
    o = np.zeros((3, 6), "uint32")
    o[0] = (x[0] & 0x007FFFFF) | 0x3F800000
    o[1] = (x[1] & 0x3FFF) << 16
    return o.view("float32")


@case(
    inputs=lambda rng: (integers(rng, 2, 6, low=0, high=2**31, dtype="uint32"),),
    expect=_np_bits,
    tags="index:bitcast dtype:uint32 grid:absent",
)
def write_bitcast(pl, pltpu, **options):
    """Bits stored through a view of another dtype, of the same width and of half."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros((3, 6), jnp.float32)
        o_ref.bitcast(jnp.uint32)[0] = (x_ref[0] & 0x007FFFFF) | 0x3F800000
        o_ref.bitcast(jnp.uint16)[3] = x_ref[1].astype(jnp.uint16) & 0x3FFF

    return pl.pallas_call(kernel, sds((3, 6)), **options)


def _np_functions(x, i, o):
    o[0] = 3
    old = o[0].copy()
    o[0] = x[1]
    o[1] = old + 5
    o[2, 1:3] = x[0, 1:3]
    o[3, 2] += x[0, 2]
    previous = o[3, 2]
    o[3, 2] = -1
    o[3, 3] = previous


@case(
    inputs=lambda rng: (integers(rng, 2, 4, dtype="float32"), np.array([2], "int32")),
    expect=_write_expectation((4, 4), _np_functions),
    tags="index:get index:set index:swap index:addupdate index:dynamic grid:absent",
)
def write_by_functions(pl, pltpu, **options):
    """jax.ref.set, swap (which gives the old value) and addupdate."""

    def write(x_ref, i_ref, o_ref):
        a = i_ref[0]
        jax.ref.set(o_ref, (0,), jnp.full((4,), 3.0))
        old = jax.ref.swap(o_ref, (0,), x_ref[1])
        jax.ref.set(o_ref, (1,), old + 5)
        jax.ref.set(o_ref, (a, slice(1, 3)), x_ref[0, 1:3])
        jax.ref.addupdate(o_ref, (3, a), x_ref[0, 2])
        previous = jax.ref.swap(o_ref, (3, a), jnp.float32(-1))
        o_ref[3, a + 1] = previous

    return _writes(pl, write, (4, 4), options)


def _np_read_modify_write(x, o):
    o += x
    o *= 2
    o[1] -= 3
    o[:, 2] //= 2
    o[0, 0] = -o[0, 0]


@case(
    inputs=lambda rng: (integers(rng, 4, 6),),
    expect=_write_expectation((4, 6), _np_read_modify_write, "int32"),
    tags="index:rmw index:int index:slice dtype:int32 grid:absent",
)
def read_modify_write(pl, pltpu, **options):
    def write(x_ref, o_ref):
        o_ref[...] += x_ref[...]
        o_ref[...] *= 2
        o_ref[1] -= 3
        o_ref[:, 2] //= 2
        o_ref[0, 0] = -o_ref[0, 0]

    return _writes(pl, write, (4, 6), options, "int32")


@case(
    inputs=lambda rng: (normal(rng, 7, 5),),
    expect=lambda x: (np.concatenate([x[:1] + 1, x[1:] * 2]), x),
    rtol=1e-6,
    tags="index:slice index:int block:int grid:1d grid:ragged",
)
def partial_stores_to_ragged_blocks(pl, pltpu, **options):
    """Rows of a block stored one by one, those beyond the array too: they are dropped."""

    def kernel(x_ref, o_ref, copy_ref):
        for row in range(3):
            o_ref[row] = x_ref[row] * 2
            copy_ref[row, 0:2] = x_ref[row, 0:2]
        copy_ref[:, 2:] = x_ref[:, 2:]

        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[0] = x_ref[0] + 1

    spec = pl.BlockSpec((3, 5), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, (sds((7, 5)), sds((7, 5))), grid=(3,), in_specs=[spec], out_specs=(spec, spec), **options
    )
