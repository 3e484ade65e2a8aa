"""mma.sync, ldmatrix, stmatrix and movmatrix on the emulator, against NumPy."""

import numpy as np
import pytest

from palladion.emulator.faults import EmulationFault, UnknownInstruction
from palladion.emulator.mma import multiply, parse
from palladion.emulator.numbers import FORMATS
from tests.emulator.tensor_kernels import BYTES, MMA, compiled, launch


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ldmatrix_and_mma(arch):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 48)).astype(np.float16), rng.standard_normal((48, 8)).astype(np.float16)
    out = launch(MMA, "matmul", [a, b, np.zeros((64, 8), np.float32), np.int32(48)], arch=arch)[2]
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_tiles_are_transposed_by_ldmatrix_and_movmatrix():
    tile = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    out, moved = launch(
        MMA, "turn", [tile, np.zeros_like(tile), np.zeros((32, 2), np.uint32)], arch="sm_90a", block=32
    )[1:]
    np.testing.assert_array_equal(out, tile.transpose(0, 2, 1))
    np.testing.assert_array_equal(moved[:, 0], moved[:, 1])
    np.testing.assert_array_equal(np.ascontiguousarray(moved[:, 1]).view(np.uint16).reshape(8, 8), tile[0].T)


def test_tiles_of_bytes():
    tile = np.random.default_rng(0).integers(0, 256, (2, 16, 16)).astype(np.uint8)
    arguments = [tile, np.zeros((32, 4), np.uint32), np.zeros((4, 8, 16), np.uint8), np.zeros(32, np.uint32)]
    _, loaded, stored, narrow = launch(BYTES, "bytes", arguments, arch="sm_100a", block=32)
    lanes = loaded.view(np.uint8).reshape(32, 2, 2, 4)
    for lane, matrix, half, e in np.ndindex(32, 2, 2, 4):
        g, q = divmod(lane, 4)
        value = lanes[lane, matrix, half, e]
        assert value == tile[matrix, 4 * q + e, g + 8 * half]
        assert stored[2 * matrix + half, 2 * q + e % 2, g + 8 * (e // 2)] == value
    codes = np.stack([tile[0, :8, :8] & 15, tile[0, :8, :8] >> 4], axis=-1).reshape(8, 16)
    np.testing.assert_array_equal(narrow.view(np.uint8).reshape(8, 16), codes)


def test_a_row_that_is_not_aligned_is_a_fault():
    text = compiled(MMA, "sm_90a")
    at = text.index("ldmatrix.sync.aligned.m8n8.x4.trans")
    bad = text[:at] + text[at:].replace("];", "+8];", 1)
    with pytest.raises(EmulationFault) as caught:
        launch(
            "",
            "turn",
            [np.zeros(256, np.uint16), np.zeros(256, np.uint16), np.zeros((32, 2), np.uint32)],
            arch="sm_90a",
            block=32,
            ptx=bad,
        )
    assert caught.value.kind == "misaligned"


def test_sparse_mma_says_that_it_is_not_there():
    text = compiled(MMA, "sm_90a").replace("mma.sync.aligned.m16n8k16", "mma.sp.sync.aligned.m16n8k16")
    with pytest.raises(UnknownInstruction):
        launch(
            "",
            "matmul",
            [
                np.zeros((64, 16), np.float16),
                np.zeros((16, 8), np.float16),
                np.zeros((64, 8), np.float32),
                np.int32(16),
            ],
            arch="sm_90a",
            ptx=text,
        )


OPCODES = [
    "m16n8k16.row.col.f32.f16.f16.f32",
    "m16n8k8.row.col.f32.bf16.bf16.f32",
    "m16n8k8.row.col.f32.tf32.tf32.f32",
    "m16n8k4.row.col.f32.tf32.tf32.f32",
    "m16n8k32.row.col.f32.e4m3.e5m2.f32",
    "m16n8k16.row.col.f32.e5m2.e4m3.f32",
    "m16n8k32.row.col.s32.s8.u8.s32",
    "m16n8k64.row.col.s32.s4.u4.s32",
    "m8n8k16.row.col.s32.u8.s8.s32",
    "m16n8k256.row.col.s32.b1.b1.s32.xor.popc",
    "m16n8k128.row.col.s32.b1.b1.s32.and.popc",
    "m8n8k4.row.col.f64.f64.f64.f64",
    "m16n8k16.row.col.f64.f64.f64.f64",
]


@pytest.mark.parametrize("opcode", OPCODES)
def test_fragments_of_every_type(opcode):
    form = parse("mma.sync.aligned." + opcode)
    assert form is not None
    rng = np.random.default_rng(1)
    warps, bits = 2, FORMATS[form.a].bits

    def codes(shape, name):
        if name == "f64":
            return rng.standard_normal(shape).view(np.uint64)
        if name in ("tf32", "f16", "bf16"):
            value = rng.standard_normal(shape).astype(np.float16 if name == "f16" else np.float32)
            return value.view(np.uint16) if name == "f16" else value.view(np.uint32) >> (16 if name == "bf16" else 0)
        return rng.integers(0, 0x70 if name in ("e4m3", "e5m2") else 1 << bits, shape)

    def registers(matrix):
        """Element by element from the manual's formulas."""
        rows, depth = matrix.shape[1:]
        per = max(1, 32 // bits)
        out = [np.zeros(warps * 32, np.uint64 if bits == 64 else np.uint32) for _ in range(rows * depth // (32 * per))]
        for w, lane, r, e in np.ndindex(warps, 32, len(out), per):
            row = (lane >> 2) + (8 * (r % 2) if rows == 16 else 0)
            k = per * (lane & 3) + e + 4 * per * (r // 2 if rows == 16 else r)
            out[r][w * 32 + lane] |= out[r].dtype.type(int(matrix[w, row, k]) << (e * bits))
        return out

    a, b = codes((warps, form.rows, form.depth), form.a), codes((warps, 8, form.depth), form.b)
    dtype = {"f32": np.float32, "s32": np.int32, "f64": np.float64}[form.c]
    c = [(10 * rng.standard_normal(warps * 32)).astype(dtype) for _ in range(form.rows // 4)]
    d = multiply(form, registers(a), registers(b), c)
    left = FORMATS[form.a].decode(a.astype(FORMATS[form.a].container)).astype(np.float64)
    right = FORMATS[form.b].decode(b.astype(FORMATS[form.b].container)).astype(np.float64)
    product = left @ right.transpose(0, 2, 1)
    if form.bit_operation == "xor":
        product = (a[:, :, None, :] ^ b[:, None, :, :]).sum(-1)
    lane = np.arange(32)
    for i, register in enumerate(d):
        want = product[:, (lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)].reshape(-1) + c[i]
        np.testing.assert_allclose(register, want, rtol=1e-4, atol=1e-4)


def test_integers_wrap_or_saturate():
    one = [np.full(32, 0x7F7F7F7F, np.uint32)] * 4
    top = [np.full(32, 2**31 - 1, np.int32)] * 4
    wrap, clamp = ("mma.sync.aligned.m16n8k32.row.col" + s + ".s32.s8.s8.s32" for s in ("", ".satfinite"))
    assert (multiply(parse(wrap), one, one[:2], top)[0] == 127 * 127 * 32 + 2**31 - 1 - 2**32).all()
    assert (multiply(parse(clamp), one, one[:2], top)[0] == 2**31 - 1).all()


@pytest.mark.parametrize(
    "opcode",
    [
        "m8n8k4.row.col.f32.f16.f16.f32",
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32",
    ],
)
def test_shapes_that_are_not_there(opcode):
    assert parse("mma.sync.aligned." + opcode) is None
