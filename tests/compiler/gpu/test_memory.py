"""Views of buffers as addresses, vectors of loads and stores, and what a kernel does with its Refs."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from palladion import jaxlink
from palladion.compiler.gpu import access, fragments, matrices
from palladion.compiler.gpu.fragments import default_layout
from palladion.language.gpu.memory import GMEM, SwizzleTransform, TilingTransform, TransposeTransform

from .addresses import a_ref, a_unit, dynamic, index, number, placed, swizzled, view

f16, f32 = jnp.float16, jnp.float32


def tiles(width: int, itemsize: int):
    return TilingTransform((8, width // itemsize)), SwizzleTransform(width)


def check(ref, seen, expected: np.ndarray, layout, width=None, **values: int):
    """Every register's address is the expected one; the width of vectors, too."""
    unit = a_unit()
    vectors = access.plan(unit, seen.folded(), layout)
    table, flat = layout.table, expected.reshape(-1)
    lines = unit.writer.lines
    assert sorted(vectors.order) == list(range(layout.count))
    for t, k in itertools.product(range(0, 128, 5), range(vectors.count)):
        at = number(vectors.address(str(k)), lines, t=t, **values)
        same = number(vectors.address("i"), lines, t=t, i=k, **values)
        assert at == same
        for j in range(vectors.width):
            element = table[t, vectors.order[k * vectors.width + j]]
            if element >= 0:
                itemsize = jnp.dtype(ref.dtype).itemsize
                assert at + j * itemsize == flat[element], (t, k, j)
    if width is not None:
        assert vectors.width == width


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize("dtype", [f16, f32])
def test_swizzled_buffers_lie_as_their_transforms_say(width, dtype):
    ref = a_ref((64, 128), dtype, tiles(width, jnp.dtype(dtype).itemsize))
    seen = view(ref)
    check(ref, seen, placed(ref), default_layout((64, 128), dtype), width=16 // jnp.dtype(dtype).itemsize)
    check(ref, seen, placed(ref), fragments.wgmma((64, 128)), width=2)


def test_a_wgmma_fragment_is_stored_by_two_xors_at_most():
    ref = a_ref((64, 64), f16, tiles(128, 2))
    unit = a_unit()
    vectors = access.plan(unit, view(ref).folded(), fragments.wgmma((64, 64)))
    assert "swizzle" in unit.writer.lines[0] and "swizzle" not in vectors.address("i")


@pytest.mark.parametrize("first", [0, 1, 2])
def test_slots_of_a_buffer(first):
    ref = a_ref((3, 64, 64), f16, tiles(128, 2))
    seen = view(ref, index((3, 64, 64), dynamic("slot"), (0, 64), (0, 64)))
    check(ref, seen, placed(ref)[first], default_layout((64, 64), f16), width=8, slot=first)


def test_a_slot_of_one():
    ref = a_ref((1, 64, 64), f16, tiles(128, 2))
    seen = view(ref, index((1, 64, 64), dynamic("slot"), (0, 64), (0, 64))).folded()
    assert seen.terms == () and seen.offset == 0


@pytest.mark.parametrize("start", [0, 8, 40])
def test_a_run_time_start_at_a_multiple_of_the_tile_stays_out_of_the_swizzle(start):
    ref = a_ref((64, 128), f16, tiles(128, 2))
    seen = view(ref, index((64, 128), (dynamic("s", 8), 16), (64, 64)))
    expected = placed(ref)[start : start + 16, 64:]
    check(ref, seen, expected, default_layout((16, 64), f16), width=8, s=start)
    assert "swizzle<128>(s" not in access.plan(a_unit(), seen.folded(), default_layout((16, 64), f16)).address("i")


@pytest.mark.parametrize("start", [0, 3, 41])
def test_a_run_time_start_within_tiles_is_taken_apart_at_run_time(start):
    ref = a_ref((64, 128), f16, tiles(128, 2))
    seen = view(ref, index((64, 128), (dynamic("s"), 16), (64, 64)))
    check(ref, seen, placed(ref)[start : start + 16, 64:], default_layout((16, 64), f16), width=8, s=start)


def test_static_parts_of_tiles():
    ref = a_ref((64, 128), f16, tiles(128, 2))
    seen = view(ref, index((64, 128), (3, 20, 2), (60, 40)))
    check(ref, seen, placed(ref)[3:43:2, 60:100], fragments.strided((20, 40)))


def test_strides_transposes_and_reshapes():
    ref = a_ref((4, 32, 16), f32, (TransposeTransform((1, 0, 2)),))
    expected = placed(ref)
    seen = view(ref, jaxlink.TransposeTransform((2, 0, 1)))
    check(ref, seen, expected.transpose(2, 0, 1), fragments.strided((16, 4, 32)))
    plain = a_ref((32, 64), f32)
    seen = view(plain, jaxlink.ReshapeTransform((8, 4, 64)), index((8, 4, 64), dynamic("p"), (0, 4), (0, 64)))
    check(plain, seen, placed(plain).reshape(8, 4, 64)[5], fragments.strided((4, 64)), width=1, p=5)
    check(plain, seen, placed(plain).reshape(8, 4, 64)[5], default_layout((4, 64), f32, 2), width=2, p=5)


def test_transposed_registers_are_read_in_vectors():
    """A column-major view of a row-major buffer: consecutive bytes are registers that are not consecutive."""
    ref = a_ref((128, 64), f16)
    seen = view(ref, jaxlink.TransposeTransform((1, 0)))
    layout = fragments.strided((128, 64), 2).renumbered((64, 128), (1, 0))
    check(ref, seen, placed(ref).T, layout, width=2)


def test_a_bitcast_takes_the_rows():
    ref = a_ref((16, 64), f32)
    seen = view(ref, jaxlink.BitcastTransform(jnp.dtype(f16)))
    assert seen.shape == (32, 64) and seen.itemsize == 2
    rows = np.arange(32)[:, None]
    assert (seen.table() == rows // 2 * 256 + np.arange(64) * 4 + rows % 2 * 2).all()


def test_reshaped_parts_of_tiles_are_refused():
    ref = a_ref((64, 128), f16, tiles(128, 2))
    with pytest.raises(NotImplementedError, match="A part of a Ref that is stored in tiles is reshaped"):
        view(ref, index((64, 128), (dynamic("s"), 16), (0, 128)), jaxlink.ReshapeTransform((2, 8, 128)))


def test_global_memory_is_read_in_vectors_only_where_it_is_aligned():
    ref = a_ref((64, 100), f16, space=GMEM)
    layout = default_layout((64, 64), f16)
    whole = view(ref, index((64, 100), (0, 64), (0, 64)))
    check(ref, whole, placed(ref)[:, :64], layout, width=4)
    moved = view(ref, index((64, 100), (0, 64), (dynamic("s", 2), 64)))
    check(ref, moved, placed(ref)[:, 6:70], layout, width=2, s=6)


def test_padding_is_guarded():
    ref = a_ref((7, 5), f32)
    vectors = access.plan(a_unit(), view(ref).folded(), fragments.strided((7, 5)))
    assert vectors.guard is not None and vectors.guard("0") == "t < 35"


# --- tiles of 8 x 8 ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("shape", "at_once"), [((64, 64), 4), ((128, 32), 4), ((64, 8), 2)])
def test_fragments_go_by_tiles(shape, at_once, turned):
    """Row r of tile k is what lane 8 * k + r points at; lane l gets elements 2 * (l % 4) and the next of row l / 4."""
    m, n = shape
    stored = shape[::-1] if turned else shape
    ref = a_ref(stored, f16, tiles(128, 2) if stored[1] % 64 == 0 else ())
    seen, expected = view(ref), placed(ref)
    if turned:
        seen, expected = view(ref, jaxlink.TransposeTransform((1, 0))), expected.T
    layout = fragments.wgmma(shape)
    found = matrices.tiles_of(seen.folded(), layout)
    assert found is not None and (found.at_once, found.turned) == (at_once, turned)
    for t, g, tile, e in itertools.product(range(128), range(found.rows.shape[1]), range(at_once), range(2)):
        element = layout.table[t, (g * at_once + tile) * 2 + e]
        row, column = (2 * (t % 4) + e, t % 32 // 4) if turned else (t % 32 // 4, 2 * (t % 4) + e)
        start = int(found.rows[t // 32 * 32 + tile * 8 + row, g])
        at = swizzled(ref.swizzle, start) if ref.swizzle else start
        assert at + 2 * column == expected.reshape(-1)[element]


def test_other_arrays_do_not_go_by_tiles():
    ref = a_ref((64, 64), f16, tiles(128, 2))
    assert matrices.tiles_of(view(ref).folded(), default_layout((64, 64), f16)) is None
    wide = a_ref((64, 64), f32)
    assert matrices.tiles_of(view(wide).folded(), fragments.wgmma((64, 64))) is None
    moved = view(ref, index((64, 64), (0, 64), (4, 8)))
    assert matrices.tiles_of(moved.folded(), fragments.wgmma((64, 8))) is None
