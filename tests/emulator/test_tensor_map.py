"""Tensor maps, tiles, swizzles and reductions by themselves: rules of the encoder, and boxes against plain loops."""

import numpy as np
import pytest

from palladion.emulator.map_bytes import pack, replace_field, unpack
from palladion.emulator.reductions import reduce_bytes
from palladion.emulator.swizzle import SWIZZLES, swizzle_address
from palladion.emulator.tensor_map import TensorMapError, encode_tiled
from palladion.emulator.tiles import TileError, converted, fill_pattern, tile

# The chunk (16 bytes) stored at each position of a 128-byte line, written out (facts file 3.2).
LINES = {
    1: ["01234567", "10325476"],
    2: ["01234567", "10325476", "23016745", "32107654"],
    3: "01234567 10325476 23016745 32107654 45670123 54761032 67452301 76543210".split(),
    4: ["01234567", "23016745", "45670123", "67452301"],
    6: ["01234567", "45670123"],
}


@pytest.mark.parametrize("mode", sorted(LINES))
def test_swizzle_agrees_with_the_written_out_table(mode):
    for line in range(16):
        row = LINES[mode][line % len(LINES[mode])]
        for position, chunk in enumerate(row):
            assert swizzle_address(line * 128 + int(chunk) * 16 + 5, SWIZZLES[mode]) == line * 128 + position * 16 + 5


@pytest.mark.parametrize("mode, linear, stored", [(3, 0x480, 0x490), (2, 0x190, 0x1A0), (1, 0x90, 0x80)])
def test_swizzle_vectors(mode, linear, stored):
    assert swizzle_address(linear, SWIZZLES[mode]) == stored


@pytest.mark.parametrize("mode", sorted(SWIZZLES))
def test_swizzles_are_their_own_inverse(mode):
    a = np.arange(4096)
    once = swizzle_address(a, SWIZZLES[mode])
    assert np.array_equal(np.sort(once), a)
    assert np.array_equal(swizzle_address(once, SWIZZLES[mode]), a)


GOOD = dict(
    dtype="f16", rank=2, address=1024, dims=(100, 50), strides_bytes=(208,), box=(64, 8), element_strides=(1, 1)
)


def encode(**changes):
    return encode_tiled(**{**GOOD, **changes})


def test_blob_holds_the_map():
    m = encode_tiled(
        "bf16", 5, 1 << 40, (1 << 32, 2, 3, 4, 5), (32, 16, 1 << 39, 48), (8, 1, 256, 2, 3), (1, 2, 3, 1, 8), 0, 1, 2, 1
    )
    assert len(pack(m)) == 128
    assert unpack(pack(m)) == m
    assert unpack(bytes(128)) is None
    assert unpack(b"\xff" * 128) is None


@pytest.mark.parametrize(
    "changes, rule",
    [
        (dict(address=1032), "globalAddress 0x408 is not a multiple of 16"),
        (
            dict(
                address=1040,
                interleave=2,
                swizzle=1,
                rank=3,
                dims=(8, 8, 8),
                strides_bytes=(32, 64),
                box=(16, 1, 1),
                element_strides=(1, 1, 1),
            ),
            "multiple of 32",
        ),
        (dict(interleave=1), "needs at least 3"),
        (dict(dims=(0, 50)), r"globalDim\[0\] is 0"),
        (dict(dims=(100, (1 << 32) + 1)), r"globalDim\[1\]"),
        (dict(strides_bytes=(200,)), r"globalStrides\[0\] \(of dimension 1\) is 200"),
        (dict(strides_bytes=(1 << 40,)), "below 2"),
        (dict(box=(64, 257)), r"boxDim\[1\] is 257"),
        (dict(box=(64, 0)), r"boxDim\[1\] is 0"),
        (dict(box=(12, 8)), "24 bytes"),
        (dict(element_strides=(1, 9)), r"elementStrides\[1\] is 9"),
        (dict(swizzle=2), "128 bytes; swizzle 64B allows at most 64"),
        (dict(swizzle=4), "compute capability 10"),
        (dict(dtype="b4x16"), "compute capability 10"),
        (dict(dtype="b4x16_p64", arch=100, box=(64, 8), dims=(128, 8), strides_bytes=(64,)), "must be 128"),
        (dict(dtype="b4x16_p64", arch=100, box=(128, 8), dims=(100, 8), strides_bytes=(64,)), "multiple of 128"),
        (
            dict(dtype="b6x16_p32", arch=100, box=(128, 8), dims=(128, 8), strides_bytes=(96,), swizzle=2),
            "no swizzle 64B|allows at most",
        ),
        (dict(dtype="u16", oob_fill=1), "floating-point"),
        (dict(rank=6), "tensorRank is 6"),
        (dict(rank=3), "globalDim has 2 entries"),
        (dict(swizzle=7), "swizzle is 7"),
        (dict(dtype="f12"), "no element type 'f12'"),
    ],
)
def test_encoder_refuses(changes, rule):
    with pytest.raises(TensorMapError, match=rule):
        encode(**changes)


def test_element_stride_of_dimension_zero_is_ignored():
    assert encode(element_strides=(0, 1)).counts == (64, 8)
    assert encode(element_strides=(4, 3)).counts == (64, 3)


def by_loops(m, array, coordinates):
    """The dense box, element by element. `array`: values with dimension 0 last."""
    counts = m.counts
    out = np.zeros(counts[::-1], array.dtype)
    for index in np.ndindex(*counts[::-1]):
        where = [
            c + i * (1 if d == 0 else m.element_strides[d]) for d, (c, i) in enumerate(zip(coordinates, index[::-1]))
        ]
        if all(0 <= w < n for w, n in zip(where, m.dims)):
            out[index] = array[tuple(where[::-1])]
    return out


@pytest.mark.parametrize(
    "dims, box, steps, coordinates",
    [
        ((40,), (16,), (1,), (-3,)),
        ((40,), (16,), (1,), (30,)),
        ((40, 9), (24, 4), (1, 1), (30, 7)),
        ((40, 9), (24, 4), (1, 2), (-5, -2)),
        ((24, 5, 4), (8, 3, 2), (1, 1, 1), (20, 3, 3)),
        ((24, 5, 4), (8, 4, 3), (1, 3, 2), (3, 1, -1)),
        ((16, 3, 4, 3), (8, 2, 2, 2), (1, 1, 1, 1), (12, 2, 3, 2)),
        ((16, 3, 4, 3, 2), (8, 2, 2, 2, 2), (1, 1, 1, 1, 1), (-4, -1, 2, -1, 1)),
        ((8, 3), (16, 8), (1, 1), (0, 0)),
        ((8, 3), (16, 8), (1, 1), (100, 100)),
    ],
)
@pytest.mark.parametrize("dtype", ["u8", "u16", "f32", "f64"])
def test_tile_is_the_box(dims, box, steps, coordinates, dtype, rng=np.random.default_rng(0)):
    kind = {"u8": np.uint8, "u16": np.uint16, "f32": np.float32, "f64": np.float64}[dtype]
    size = np.dtype(kind).itemsize
    box = (box[0] * max(1, 16 // (size * 8)) * (2 if size == 1 else 1), *box[1:])
    pitch = -(-dims[0] * size // 16) * 16 + 16
    strides = [pitch]
    for n in dims[1:-1]:
        strides.append(strides[-1] * n)
    memory = rng.integers(1, 256, 4096 + pitch * int(np.prod(dims[1:])), np.uint8)
    m = encode_tiled(dtype, len(dims), 4096, dims, strides[: len(dims) - 1], box, steps)
    rows = memory[4096:].reshape(-1, pitch)[:, : dims[0] * size]
    array = np.ascontiguousarray(rows).view(kind).reshape(dims[::-1]).view(f"u{size}")
    t = tile(m, coordinates)
    got = np.zeros(t.size, np.uint8)
    got[t.offset] = np.where(t.inside, memory[np.where(t.inside, t.source, 0)], 0)
    assert t.size == m.box_bytes
    assert np.array_equal(got.view(f"u{size}"), by_loops(m, array, coordinates).reshape(-1))


def test_gather_takes_four_rows():
    m = encode_tiled("u8", 2, 0, (64, 10), (64,), (32, 1), (1, 1), arch=100)
    memory = np.arange(640, dtype=np.uint32).astype(np.uint8)
    t = tile(m, (16, 9, 3, -1, 3), gather=True)
    got = np.where(t.inside, memory[np.where(t.inside, t.source, 0)], 0)
    rows = memory.reshape(10, 64)[:, 16:48]
    assert np.array_equal(got, [rows[9], rows[3], np.zeros(32), rows[3]])
    assert t.size == 128
    with pytest.raises(TileError, match="one row"):
        tile(encode(), (0, 1, 2, 3, 4), gather=True)


def test_padded_types_widen_groups_of_sixteen():
    four = encode_tiled("b4x16_p64", 2, 0, (128, 2), (64,), (128, 2), (1, 1), swizzle=3, arch=100)
    t = tile(four, (0, 0))
    assert (t.size, four.box_bytes, t.offset.shape) == (256, 128, (2, 64))
    assert list(t.offset[1, :10]) == [128, 129, 130, 131, 132, 133, 134, 135, 144, 145]
    six = encode_tiled("b6x16_p32", 2, 0, (128, 2), (96,), (128, 2), (1, 1), arch=100)
    t = tile(six, (0, 0))
    assert list(t.offset[0, 10:14]) == [10, 11, 16, 17]
    with pytest.raises(TileError, match="not a multiple of 128"):
        tile(six, (64, 0))
    packed = encode_tiled("b4x16", 2, 0, (64, 2), (32,), (32, 2), (1, 1), arch=100)
    assert packed.box_bytes == 32
    assert list(tile(packed, (2, 1)).source[0, :2]) == [33, 34]


def test_rank_of_the_copy_must_be_the_maps():
    with pytest.raises(TileError, match="3-d copy with a tensor map of rank 2"):
        tile(encode(), (0, 0, 0))


def test_nan_fill_is_nan():
    for name, view in [("f16", np.float16), ("f32", np.float32), ("f64", np.float64)]:
        m = encode_tiled(name, 1, 0, (16,), (), (16,), (1,), oob_fill=1)
        assert np.isnan(fill_pattern(m, 64).view(view)).all()
    assert not fill_pattern(encode(), 64).any()


def test_tf32_maps_round_and_ftz_maps_flush():
    m = encode_tiled("tf32", 1, 0, (16,), (), (16,), (1,))
    values = np.array([1 + 2**-11, 1 + 2**-10, 1 + 3 * 2**-11, -1 - 2**-12, np.inf], np.float32)
    got = converted(m, values.view(np.uint8), True).view(np.float32)
    assert np.array_equal(got, np.array([1, 1 + 2**-10, 1 + 2**-9, -1, np.inf], np.float32))
    flush = encode_tiled("f32.ftz", 1, 0, (16,), (), (16,), (1,))
    tiny = np.array([1e-40, -1e-40, 1.5], np.float32)
    assert np.array_equal(
        converted(flush, tiny.view(np.uint8), True).view(np.float32), np.array([0, -0.0, 1.5], np.float32)
    )


def test_map_made_field_by_field():
    m, blob = encode(swizzle=3), bytes(128)
    for field, ordinal, value in [
        ("global_address", 0, 1024), ("rank", 0, 1), ("box_dim", 0, 64), ("box_dim", 1, 8), ("global_dim", 0, 100),
        ("global_dim", 1, 50), ("global_stride", 0, 208), ("element_stride", 0, 1), ("element_stride", 1, 1),
        ("elemtype", 0, 6), ("interleave_layout", 0, 0), ("swizzle_mode", 0, 3), ("fill_mode", 0, 0),
    ]:  # fmt: skip
        blob = replace_field(blob, field, ordinal, value)
    assert unpack(blob) == m
    other = unpack(replace_field(pack(m), "elemtype", 0, 8))
    assert other is not None and other.type.name == "f32.ftz"
    other = unpack(replace_field(pack(m), "swizzle_atomicity", 0, 1))
    assert other is not None and other.swizzle.name == "128B_ATOM_32B"
    with pytest.raises(TensorMapError, match="not a tensor map"):
        replace_field(b"\x01" * 128, "rank", 0, 1)
    with pytest.raises(TensorMapError, match="from 0 to 4"):
        replace_field(pack(m), "rank", 0, 5)
    with pytest.raises(TensorMapError, match="out of range"):
        replace_field(pack(m), "global_dim", 0, 0)


def test_reductions():
    def run(op, kind, old, new, dtype):
        old, new = np.array(old, dtype), np.array(new, dtype)
        return list(reduce_bytes(op, kind, old.view(np.uint8), new.view(np.uint8)).view(dtype))

    assert run("add", "u32", [2**32 - 1, 5], [2, 6], np.uint32) == [1, 11]
    assert run("inc", "u32", [3, 4, 9], [4, 4, 4], np.uint32) == [4, 0, 0]
    assert run("dec", "u32", [0, 3, 9], [4, 4, 4], np.uint32) == [4, 2, 4]
    assert run("min", "s32", [-1], [1], np.int32) == [-1]
    assert run("min", "u32", [2**32 - 1], [1], np.uint32) == [1]
    assert run("max", "f16", [np.nan, 2], [1, 3], np.float16) == [1, 3]
    assert run("add", "f32", [1e-39, 1], [1e-39, 2**-24], np.float32) == [0, 1]
    assert run("xor", "b64", [5], [3], np.uint64) == [6]
