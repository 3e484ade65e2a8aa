"""Elements narrower than a byte: how arrays of them lie in a GPU's memory, and views of them as bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from palladion.compiler.gpu import narrow
from palladion.language.gpu.memory import SwizzleTransform, TilingTransform

from .addresses import a_ref, a_unit, index, view


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.uint2, jnp.int2, jnp.float4_e2m1fn, jnp.int8, jnp.float32])
def test_packed_arrays_come_back(dtype):
    x = np.asarray(np.random.default_rng(0).integers(-2, 2, (3, 5)), np.float32).astype(dtype)
    raw = np.ascontiguousarray(narrow.packed(x)).view(np.uint8).reshape(-1)
    assert raw.size == narrow.bytes_of(x.shape, dtype)
    np.testing.assert_array_equal(narrow.unpacked(raw, x.shape, x.dtype), x)


def test_the_first_element_lies_in_the_lowest_bits():
    assert narrow.packed(np.array([1, 2, 3, 15], jnp.uint4)).tolist() == [0x21, 0xF3]
    assert narrow.packed(np.array([1, 2, 3, 0, 2], jnp.uint2)).tolist() == [0b00111001, 0b10]


def test_a_view_as_bytes():
    ref = a_ref((64, 512), jnp.uint4, [TilingTransform((8, 256)), SwizzleTransform(128)])
    found = narrow.as_bytes(a_unit(), view(ref, index(ref.shape, (8, 16), (256, 256))))
    assert found.shape == (16, 128) and found.dtype == np.uint8
    places = found.table()
    assert places[0, 0] == 3 * 1024 and places[8, 0] - places[0, 0] == 2048
    assert places[1, 0] - places[0, 0] == 128 and places[0, 5] - places[0, 0] == 5


def test_a_view_that_begins_within_a_byte_is_refused():
    ref = a_ref((64, 64), jnp.uint4)
    with pytest.raises(NotImplementedError, match="begins or ends within a byte"):
        narrow.as_bytes(a_unit(), view(ref, index(ref.shape, (0, 64), (1, 32))))
