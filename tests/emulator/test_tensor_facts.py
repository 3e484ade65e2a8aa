"""tcgen05's single parts: the facts file's test vectors (section 11) and the rules of descriptors and allocation."""

import numpy as np
import pytest

from palladion.emulator import operands, tmem
from palladion.emulator.descriptors import IllegalDescriptor
from palladion.emulator.tcgen05_kinds import check_scale_ids, decode, scale_counts
from palladion.emulator.tcgen05_product import expand_sparse, placement


@pytest.mark.parametrize(
    "raw, kind, group, fields",
    [
        (0x08400490, "f16", 1, (128, 256, "bf16", "bf16", "f32")),
        (0x10400490, "f16", 2, (256, 256, "bf16", "bf16", "f32")),
        (0x08410490, "f16", 1, (128, 256, "bf16", "bf16", "f32")),
        (0x04100000, "f16", 1, (64, 64, "f16", "f16", "f16")),
        (0x08200010, "f16", 1, (128, 128, "f16", "f16", "f32")),
        (0x08200910, "tf32", 1, (128, 128, "tf32", "tf32", "f32")),
        (0x08200410, "f8f6f4", 1, (128, 128, "e4m3", "e5m2", "f32")),
        (0x082004A8, "i8", 1, (128, 128, "s8", "s8", "s32")),
        (0x08A00000, "mxf8f6f4", 1, (128, 128, "e4m3", "e4m3", "f32")),
        (0x28A00010, "mxf8f6f4", 1, (128, 128, "e4m3", "e4m3", "f32")),
        (0x08A00480, "mxf4", 1, (128, 128, "e2m1", "e2m1", "f32")),
        (0x08400480, "mxf4nvf4", 1, (128, 256, "e2m1", "e2m1", "f32")),
        (0x10400480, "mxf4nvf4", 2, (256, 256, "e2m1", "e2m1", "f32")),
    ],
)
def test_instruction_descriptor_vectors(raw, kind, group, fields):
    found = decode(raw, kind, group, False)
    assert (found.m, found.n, found.a, found.b, found.d) == fields
    assert found.b_mn_major == (raw == 0x08410490) and found.saturate == (raw == 0x082004A8)
    assert (found.scale_a_id, found.scale_b_id) == ((1, 1) if raw == 0x28A00010 else (0, 0))
    if kind.startswith("mx"):
        check_scale_ids(found, scale_counts(kind, frozenset(["block16"] if kind == "mxf4nvf4" else []), raw))


def test_movement_and_layout_vectors():
    for shape, repeats, lane, register, want in (
        ("16x64b", 2, 6, 1, (1, 3)),
        ("16x128b", 2, 13, 3, (11, 5)),
        ("16x256b", 2, 30, 7, (15, 13)),
    ):
        lanes, columns = tmem.movement_map(shape, repeats)
        assert (lanes[register, lane], columns[register, lane]) == want
    lanes, columns = tmem.movement_map("16x32bx2", 2, 8)
    assert (lanes[1, 5], columns[1, 5], lanes[1, 21], columns[1, 21]) == (5, 1, 5, 9)
    half = placement(64, 64, 1, False, False, 0)[37 // 16]
    assert half.lane + 37 - half.row == 69
    parts = [
        s
        for s in placement(128, 256, 2, False, False, 0)
        if s.row <= 100 < s.row + 64 and s.column <= 200 < s.column + 128
    ]
    assert [(s.cta, s.lane + 100 - s.row, 200 - s.column) for s in parts] == [(1, 100, 72)]
    with pytest.raises(IllegalDescriptor, match="lane"):
        placement(128, 64, 1, False, False, 16)


def test_sparse_expansion():
    values = np.arange(1, 9, dtype=np.float32)[None]
    words = np.array([[0b0100, 0b1110, 0b1000, 0b1101]])  # positions (0,1), (2,3), (0,2), (1,3)
    want = [[1, 2, 0, 0, 0, 0, 3, 4, 5, 0, 6, 0, 0, 7, 0, 8]]
    np.testing.assert_array_equal(expand_sparse(values, words, 16), want)
    np.testing.assert_array_equal(expand_sparse(values[:, :2], np.array([[0b1110, 0b0100]]), 32), [[0, 1, 2, 0]])


def test_allocation_rules():
    memory = tmem.TensorMemory()
    for columns in (16, 96, 1024):
        with pytest.raises(tmem.TensorMemoryError, match="power of two"):
            memory.check_allocate(columns)
    assert memory.find(512) == 0
    memory.allocate(0, 256)
    assert memory.find(512) is None and memory.find(256) == 256
    memory.allocate(256, 64)
    with pytest.raises(tmem.TensorMemoryError, match="must not grow"):
        memory.check_allocate(128)
    with pytest.raises(tmem.TensorMemoryError, match="not an allocation"):
        memory.free(256, 32)
    memory.check(tmem.Region(0, 128, 200, 100), "test")
    with pytest.raises(tmem.TensorMemoryError, match="column 320"):
        memory.check(tmem.Region(0, 128, 300, 100), "test")
    memory.free(0, 256)
    assert memory.leak() == "64 columns at column 256"
    memory.relinquished = True
    with pytest.raises(tmem.TensorMemoryError, match="relinquish"):
        memory.check_allocate(32)


@pytest.mark.parametrize(
    "raw, kind, sparse, text",
    [
        (0x08200014, "f16", False, "sparsity"),
        (0x08A00490, "f16", False, "reserved"),
        (0x08200410, "f16", False, "does not mix"),
        (0x08200480, "f16", False, "f16 D needs"),
        (0x08200018, "f16", False, "saturates"),
        (0x08200000, "mxf8f6f4", False, "ue8m0"),
        (0x08218410 | 5 << 7, "f8f6f4", False, "K-major"),
        (0x0820C4A0 | 1 << 13, "i8", False, "negate"),
    ],
)
def test_illegal_instruction_descriptors(raw, kind, sparse, text):
    with pytest.raises(IllegalDescriptor, match=text):
        decode(raw, kind, 1, sparse)


def test_readers_of_shared_memory():
    table = operands.Readers(np.zeros(64, np.int16))
    first = table.begin(np.array([3, 4, 4]), "the first")
    second = table.begin(np.array([4, 5]), "the second")
    assert table.reader_of(np.arange(0, 48)) is None
    assert table.reader_of(np.arange(40, 60)) == ("the first", 48)
    table.end(first)
    assert table.reader_of(np.arange(48, 64)) is None
    assert table.reader_of(np.array([70])) == ("the second", 70)
    table.end(second)
    assert table.reader_of(np.arange(1024)) is None
