"""Memory of the simulated machines: regions, bounds, and pieces that are used again only when nobody holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu
from palladion.simulator import memory
from palladion.simulator.memory import Region, read_outside


def test_a_piece_is_used_again_when_it_is_free():
    shape = (512, 1025)
    first, second = memory.aligned(shape, np.float32), memory.aligned(shape, np.float32)
    assert first.ctypes.data % 64 == 0
    assert not np.shares_memory(first, second)
    address = first.ctypes.data
    part = first[3:5, 7]
    del first
    third = memory.aligned(shape, np.float32)
    assert not np.shares_memory(part, third)
    del part
    assert memory.aligned(shape, np.float32).ctypes.data == address


@pytest.mark.parametrize("jit", [False, True])
def test_results_of_earlier_calls_stay_as_they_are(jit):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((512, 512), jnp.float32), interpret=pltpu.InterpretParams())
    call = jax.jit(call) if jit else call
    results = [call(jnp.full((512, 512), float(k))) for k in range(6)]
    hosts = [np.asarray(r) for r in results[:3]]
    del results[:3]
    results += [call(jnp.full((512, 512), 100.0)) for _ in range(4)]
    for k, host in enumerate(hosts):
        assert (host == k + 1).all()
    for k, result in enumerate(results[:3], 3):
        assert (np.asarray(result) == k + 1).all()


REGIONS = [
    [("index", (slice(1, 5, 2), 3))],
    [("index", (slice(2, 6, 1), slice(0, 8, 1))), ("reshape", (2, 16)), ("index", (1, slice(4, 9, 1)))],
    [("transpose", (1, 0)), ("index", (slice(0, 3, 1), slice(2, 4, 1)))],
    [("reshape", (4, 16)), ("transpose", (1, 0)), ("index", (slice(3, 7, 1), 2))],
    [("index", (np.array([4, 1]), slice(0, 4, 1))), ("index", (1, slice(1, 3, 1)))],
]


@pytest.mark.parametrize("views", REGIONS)
def test_what_is_put_is_what_one_gets_and_nothing_else_changes(views):
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    region, before = Region(views), array.copy()
    part = np.array(region.get(array))
    region.put(array, part + 1000)
    np.testing.assert_array_equal(region.get(array), part + 1000)
    assert sorted(array[array >= 1000] - 1000) == sorted(part.ravel())
    np.testing.assert_array_equal(array[array < 1000], before[array < 1000])


def test_bitcasts_pack_the_second_last_dimension():
    words = np.arange(64, dtype=np.uint32).reshape(4, 16) * 0x10001
    halves = memory.bitcast(words, np.uint16)
    assert halves.shape == (8, 16)
    np.testing.assert_array_equal(halves[0], words[0] & 0xFFFF)
    np.testing.assert_array_equal(memory.bitcast(halves, np.uint32), words)
    region = Region([("bitcast", np.dtype(np.uint16)), ("index", (3, slice(0, 16, 1)))])
    region.put(words, np.uint16(7))
    np.testing.assert_array_equal(memory.bitcast(words, np.uint16)[3], np.full(16, 7))


def test_reading_outside():
    array = np.arange(12.0).reshape(3, 4)
    got = read_outside(array, (slice(1, 5, 1), slice(-1, 2, 1)), -5.0)
    want = np.full((4, 3), -5.0)
    want[:2, 1:] = array[1:3, 0:2]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(read_outside(array, (np.array([2, 3]), 1), -5.0), [9.0, -5.0])
