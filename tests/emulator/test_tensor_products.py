"""tcgen05.mma's products over arrays alone: layouts, sparsity, scales, masks that few kernels use."""

import dataclasses

import numpy as np
import pytest

from palladion.emulator.descriptors import IllegalDescriptor, decode_tcgen05
from palladion.emulator.numbers import table
from palladion.emulator.tcgen05_kinds import decode
from palladion.emulator.tcgen05_product import Job, perform
from palladion.emulator.tmem import TensorMemory, copy_in, shift_down
from tests.emulator.tensor_kernels import descriptor, swizzled

A_AT, B_AT, SIZE = 0, 64 * 1024, 128 * 1024
F16, F32, TF32, E4M3 = np.float16, np.float32, np.float32, np.uint8


def idesc(m, n, code=0, sparse=False, selector=0, result=1):
    return selector | int(sparse) << 2 | result << 4 | code << 7 | code << 10 | (n >> 3) << 17 | (m >> 4) << 24


def setting(a, b, group, span=128, b_span=128):
    """Shared memories (one a CTA), and the descriptors of A and B; both K-major."""
    shared = []
    for rank in range(group):
        memory = np.zeros(SIZE, np.uint8)
        swizzled(memory, A_AT, a[rank * len(a) // group : (rank + 1) * len(a) // group], span)
        swizzled(memory, B_AT, b[rank * len(b) // group : (rank + 1) * len(b) // group], b_span)
        shared.append(memory)
    return (
        shared,
        decode_tcgen05(descriptor(A_AT, 16, 8 * span, span, True)),
        decode_tcgen05(descriptor(B_AT, 16, 8 * b_span, b_span, True)),
    )


def wide(rows, item):
    """Zero columns up to 128 bytes, so that the tile fills its swizzle."""
    out = np.zeros((len(rows), 128 // item), rows.dtype)
    out[:, : rows.shape[1]] = rows
    return out


def cells_of(job, tensor, m, n):
    out = np.zeros((m, n), np.float32)
    for s in job.segments():
        block = tensor[s.cta].cells[s.lane : s.lane + s.rows, s.at : s.at + s.columns]
        out[s.row : s.row + s.rows, s.column : s.column + s.columns] = block.view(np.float32)
    return out


@pytest.mark.parametrize("m, lanes", [(64, [0, 64]), (32, [0, 32, 64, 96])])
def test_ws_spreads_columns_over_lanes(m, lanes):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, 16)).astype(F16), rng.standard_normal((64, 16)).astype(F16)
    shared, da, db = setting(wide(a, 2), wide(b, 2), 1)
    tensor = [TensorMemory()]
    job = Job(decode(idesc(m, 64), "f16", 1, False, True), 1, True, 0, da, db, False)
    perform(job, shared, tensor)
    want = a.astype(float) @ b.astype(float).T
    part = 64 // len(lanes)
    for number, lane in enumerate(lanes):
        got = tensor[0].cells[lane : lane + m, :part].view(np.float32)
        np.testing.assert_allclose(got, want[:, number * part : (number + 1) * part], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, item, depth, code", [("f16", 2, 32, 0), ("tf32", 4, 16, 2), ("f8f6f4", 1, 64, 0)])
@pytest.mark.parametrize("m, group", [(128, 1), (128, 2)])
def test_sparse_a(kind, item, depth, code, m, group):
    rng = np.random.default_rng(1)
    pick, of = (1, 2) if item == 4 else (2, 4)
    dense = np.zeros((m, depth))
    compressed = np.zeros((m, depth // 2), {2: F16, 4: F32, 1: np.uint8}[item])
    nibbles = np.zeros((m, depth // of), np.uint32)
    for row, cell in np.ndindex(m, depth // of):
        places = sorted(rng.choice(of, pick, replace=False))
        values = rng.integers(0x20, 0x60, pick).astype(np.uint8) if item == 1 else rng.integers(-8, 9, pick)
        dense[row, of * cell + np.array(places)] = table("e4m3")[values] if item == 1 else values
        compressed[row, pick * cell : pick * cell + pick] = values
        nibbles[row, cell] = (0b1110 if places[0] else 0b0100) if of == 2 else places[0] | places[1] << 2
    b = (
        rng.integers(0x20, 0x60, (64, depth)).astype(np.uint8)
        if item == 1
        else rng.integers(-8, 9, (64, depth)).astype(compressed.dtype)
    )
    shared, da, db = setting(wide(compressed, item), wide(b, item), group)
    tensor = [TensorMemory() for _ in range(group)]
    for row, cell in np.ndindex(m, depth // of):
        cta, r = divmod(row, m // group)
        start = 32 * (r // 16) if group == 2 else 16 * (r // 16)  # 64 rows a CTA: 16 in every 32 lanes
        k = of * cell
        if item == 1:
            lane, column, bit = start + r % 16, 200 + k // 32, k % 32
        else:
            span = 16 if item == 2 else 8
            lane, column, bit = (
                start + r % 8 + 8 * (k // span),
                201,
                16 * (r // 8 % 2) + k % span * (1 if item == 2 else 2),
            )
        word = tensor[cta].cells[lane, column]
        tensor[cta].cells[lane, column] = word & ~np.uint32(15 << bit) | nibbles[row, cell] << np.uint32(bit)
    found = decode(idesc(m, 64, code, True, 0 if item == 1 else 1), kind, group, True)
    job = Job(found, group, False, 0, da, db, False, metadata=200)
    perform(job, shared, tensor)
    right = table("e4m3")[b].astype(float) if item == 1 else b.astype(float)
    np.testing.assert_allclose(cells_of(job, tensor, m, 64), dense @ right.T, rtol=1e-5, atol=1e-3)


def test_lanes_switched_off_and_the_scale_of_d():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((128, 16)).astype(F16), rng.standard_normal((64, 16)).astype(F16)
    shared, da, db = setting(wide(a, 2), wide(b, 2), 1)
    tensor = [TensorMemory()]
    job = Job(decode(idesc(128, 64), "f16", 1, False), 1, False, 0, da, db, False)
    perform(job, shared, tensor)
    first = cells_of(job, tensor, 128, 64).copy()
    half = dataclasses.replace(job, accumulate=True, scale_d=1, disabled=(0xFFFFFFFF, 0, 2, 0))
    perform(half, shared, tensor)
    again = cells_of(job, tensor, 128, 64)
    kept = np.r_[0:32, 65]
    np.testing.assert_array_equal(again[kept], first[kept])
    others = np.setdiff1d(np.arange(128), kept)
    np.testing.assert_allclose(again[others], 1.5 * first[others], rtol=1e-5)


def test_four_and_six_bit_operands_lie_in_padded_slots():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (128, 32)).astype(np.uint8), rng.integers(0, 64, (64, 32)).astype(np.uint8)
    rows = []
    for values, bits in zip(codes, (4, 6), strict=True):
        flat = np.unpackbits(values[..., None], axis=-1, bitorder="little")[..., :bits].reshape(
            len(values), 2, 16 * bits
        )
        packed = np.zeros((len(values), 2, 16), np.uint8)
        packed[..., : 2 * bits] = np.packbits(flat, axis=-1, bitorder="little")
        rows.append(packed.reshape(len(values), 32))
    shared, da, db = setting(rows[0], rows[1], 1, 32, 32)
    raw = idesc(128, 64) | 5 << 7 | 3 << 10
    tensor = [TensorMemory()]
    job = Job(decode(raw, "f8f6f4", 1, False), 1, False, 0, da, db, False)
    perform(job, shared, tensor)
    want = table("e2m1")[codes[0]].astype(float) @ table("e2m3")[codes[1]].astype(float).T
    np.testing.assert_allclose(cells_of(job, tensor, 128, 64), want, rtol=1e-6)


@pytest.mark.parametrize("m", [128, 256])
def test_block_scales_of_a_pair(m):
    rng = np.random.default_rng(3)
    n = 128
    a, b = (rng.integers(0, 0x70, (rows, 32)).astype(np.uint8) for rows in (m, n))
    scale_a, scale_b = (rng.integers(120, 134, rows).astype(np.uint8) for rows in (m, n))
    shared, da, db = setting(a, b, 2, 32, 32)
    tensor = [TensorMemory(), TensorMemory()]
    for cta, memory in enumerate(tensor):
        cells = memory.cells.view(np.uint8).reshape(128, 512, 4)
        for i in range(m // 2):
            for quarter in range(4):
                cells[i % 32 + 32 * quarter, 256 + i // 32, 1] = scale_a[cta * m // 2 + i]
        for j in range(n):
            if m == 256:
                for quarter in range(4):
                    cells[j % 32 + 32 * quarter, 300 + j // 32, 2] = scale_b[j]
            else:  # halves of the columns by halves of the lanes
                half, within = divmod(j, n // 2)
                for copy in range(2):
                    cells[within % 32 + 64 * half + 32 * copy, 300 + within // 32, 2] = scale_b[j]
    raw = 2 << 4 | (n >> 3) << 17 | 1 << 23 | (m >> 7) << 27 | 1 << 29
    job = Job(decode(raw, "mxf8f6f4", 2, False), 2, False, 0, da, db, False, 256, 300, 1)
    perform(job, shared, tensor)
    e4m3, power = table("e4m3").astype(float), table("ue8m0").astype(float)
    want = (e4m3[a] * power[scale_a][:, None]) @ (e4m3[b] * power[scale_b][:, None]).T
    np.testing.assert_allclose(cells_of(job, tensor, m, n), want, rtol=1e-5)
    tensor[1].cells[40, 300] ^= 1 << 16
    with pytest.raises(IllegalDescriptor, match="quarters"):
        perform(job, shared, tensor)


def test_copies_and_the_shift():
    memory = TensorMemory()
    rows = np.arange(64 * 16, dtype=np.uint32).view(np.uint8)[: 64 * 16].reshape(64, 16)
    words = rows.view(np.uint32)
    copy_in(memory, 8, "64x128b.warpx2::01_23", rows)
    for lane, row in ((0, 0), (33, 1), (64, 32), (127, 63)):
        np.testing.assert_array_equal(memory.cells[lane, 8:12], words[row])
    copy_in(memory, 8, "64x128b.warpx2::02_13", rows)
    for lane, row in ((33, 33), (64, 0), (127, 63)):
        np.testing.assert_array_equal(memory.cells[lane, 8:12], words[row])
    four = np.arange(32, dtype=np.uint32).view(np.uint8).reshape(4, 32)
    copy_in(memory, 32, "4x256b", four)
    np.testing.assert_array_equal(memory.cells[96, 32:40], np.arange(24, 32))
    memory.cells[32:64, 40:48] = np.arange(32)[:, None]
    shift_down(memory, 32 << 16 | 40)
    np.testing.assert_array_equal(memory.cells[32:64, 40], [0, *range(31)])
