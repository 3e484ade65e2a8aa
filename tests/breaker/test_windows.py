"""Windows and memory at their edges: what the two interpreters must agree on where blocks hang out of their arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl

MODES = [pytest.param(True, id="reference"), pytest.param(pl.EagerParams(), id="eager")]


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def padded(x, low, high):
    return np.concatenate([np.full(low, np.nan), np.asarray(x, np.float64), np.full(high, np.nan)])


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("pads", [(0, 0), (1, 1), (2, 0), (0, 3), (5, 5), (9, 7)])
@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_element_blocks_far_out_in_the_padding(interpret, pads, size):
    """A window that lies below the array by more than its own size once read from the array's end."""
    n, programs = 6, 6 + sum(pads)
    x = jnp.arange(1.0, n + 1)
    whole = padded(x, *pads)
    whole = np.concatenate([whole, np.full(size, np.nan)])  # a window may also hang over the padding
    window = pl.BlockSpec((pl.Element(size, pads),), lambda i: i)
    row = pl.BlockSpec((None, size), lambda i: (i, 0))

    call = pl.pallas_call(
        copy,
        jax.ShapeDtypeStruct((programs, size), x.dtype),
        grid=(programs,),
        in_specs=[window],
        out_specs=row,
        interpret=interpret,
    )
    expected = np.stack([whole[i : i + size] for i in range(programs)])
    np.testing.assert_array_equal(call(x), expected)


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("pads", [(0, 0), (2, 0), (5, 5), (9, 7)])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_element_blocks_written_far_out_in_the_padding(interpret, pads, size):
    n, programs = 6, 6 + sum(pads)
    rows = 100.0 * jnp.arange(programs)[:, None] + jnp.arange(size)
    call = pl.pallas_call(
        copy,
        jax.ShapeDtypeStruct((n,), rows.dtype),
        grid=(programs,),
        in_specs=[pl.BlockSpec((None, size), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((pl.Element(size, pads),), lambda i: i),
        interpret=interpret,
    )
    expected = np.full(n, np.nan)
    for i in range(programs):
        for k in range(size):
            if 0 <= (at := i + k - pads[0]) < n:
                expected[at] = 100.0 * i + k
    np.testing.assert_array_equal(call(rows), expected)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("n", [6, 5], ids=["whole blocks", "ragged"])
def test_typed_keys_as_outputs_and_in_ragged_blocks(interpret, n):
    keys = jax.random.split(jax.random.key(0), n)
    blocks = pl.BlockSpec((3,), lambda i: (i,))
    call = pl.pallas_call(
        copy,
        jax.ShapeDtypeStruct(keys.shape, keys.dtype),
        grid=(2,),
        in_specs=[blocks],
        out_specs=blocks,
        interpret=interpret,
    )
    out = call(keys)
    assert out.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


@pytest.mark.parametrize("interpret", MODES)
def test_typed_keys_that_nothing_wrote_are_zero_words(interpret):
    keys = jax.random.split(jax.random.key(0), 2)
    shape = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    out = pl.pallas_call(lambda x_ref, o_ref: None, shape, interpret=interpret)(keys)
    np.testing.assert_array_equal(jax.random.key_data(out), np.zeros((2, 2), np.uint32))


@pytest.mark.parametrize("interpret", MODES)
def test_index_maps_that_divide_by_zero(interpret):
    """Integer division by zero is -1 to XLA (then clamped), a remainder the dividend: in tables as in the loop."""
    x = jnp.arange(4.0)
    one = pl.BlockSpec((1,), lambda i: (i,))

    def run(index_map):
        blocks = pl.BlockSpec((1,), index_map)
        shape = jax.ShapeDtypeStruct((4,), x.dtype)
        call = pl.pallas_call(copy, shape, grid=(4,), in_specs=[blocks], out_specs=one, interpret=interpret)
        return call(x)

    with pytest.warns(pl.PalladionWarning, match="asks for block -1"):
        np.testing.assert_array_equal(run(lambda i: (jax.lax.div(i, i * 0),)), [0, 0, 0, 0])
    np.testing.assert_array_equal(run(lambda i: (jax.lax.rem(i, i * 0),)), [0, 1, 2, 3])
