"""wgmma on the emulator: descriptors, fragments and rules, against NumPy in float64 through NVRTC's PTX."""

import ml_dtypes
import numpy as np
import pytest

from palladion.emulator import flow, registry
from palladion.emulator.descriptors import IllegalDescriptor, decode_tcgen05, decode_wgmma, gather
from palladion.emulator.faults import EmulationFault, UnknownInstruction
from palladion.emulator.matrices import operand_index, warpgroup_registers
from palladion.emulator.numbers import SMALL, table
from palladion.emulator.parse import parse as parse_ptx
from palladion.emulator.warpgroup_product import parse
from palladion.emulator.wgmma_registers import first_use
from tests.emulator.tensor_kernels import compiled, descriptor, launch, swizzled, wgmma_kernel

K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
NUMPY = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
B_AT = 64 * 1024


def numbers(rng, shape, kind):
    if kind in ("s8", "u8"):
        return rng.integers(*((-128, 128) if kind == "s8" else (0, 256)), shape).astype(NUMPY[kind])
    value = rng.standard_normal(shape).astype(NUMPY[kind])
    if kind == "tf32":
        return (value.view(np.uint32) & 0xFFFFE000).view(np.float32)
    return value


def place(image, at, tile, span, mn_major, k_bytes):
    """Writes an operand (rows, K); returns (descriptor, step in 16-byte units)."""
    stored = tile.T if mn_major else tile
    pitch = swizzled(image, at, np.ascontiguousarray(stored), span)
    if mn_major:
        k = K["f16"]
        if span:
            return descriptor(at, pitch, 8 * span, span), k * span // 16
        return descriptor(at, 128, pitch, 0), 2 * 128 // 16
    if span:
        return descriptor(at, 16, 8 * span, span), k_bytes // 16
    return descriptor(at, pitch, 128, 0), 2 * pitch // 16


def unpacked(out, n, half=False):
    """Registers (128, N / 2) to D (64, N), element by element from the formula of the manual."""
    if half:
        out = out.view(np.float16)
    t, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    w, lane = t // 32, t % 32
    d = np.zeros((64, n), out.dtype)
    d[16 * w + (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)] = out
    return d


def run(n, d, a_kind, b_kind, span_a=128, span_b=128, mn=(0, 0), order="lazy", seed=0, registers=False, **source):
    rng = np.random.default_rng(seed)
    k = K[a_kind]
    steps = 4
    for span, flag in ((span_a, mn[0]), (span_b, mn[1])):
        if span and not flag:
            steps = min(steps, span // 32)
    depth = steps * k
    a, b = numbers(rng, (64, depth), a_kind), numbers(rng, (n, depth), b_kind)
    image = np.zeros(B_AT * 2, np.uint8)
    da, step_a = place(image, 0, a, span_a, mn[0], 32)
    db, step_b = place(image, B_AT, b, span_b, mn[1], 32)
    count = n // 4 if d == "f16" else n // 2
    out = np.zeros((128, count), np.float32 if d == "f32" else np.uint32)
    fragments = np.zeros((128, 16), np.uint32)
    if registers:
        per = 4 // a.dtype.itemsize
        rows = a.reshape(4, 16, steps, k).transpose(2, 0, 1, 3)
        for step in range(steps):
            for r in range(4):
                for t in range(128):
                    row, q = t % 32 // 4 + 8 * (r & 1), t % 4
                    first = per * q + 4 * per * (r >> 1)
                    fragments[t, 4 * step + r] = np.ascontiguousarray(
                        rows[step, t // 32, row, first : first + per]
                    ).view(np.uint32)[0]
    text = wgmma_kernel(n, k, d, a_kind, b_kind, mn if a_kind in ("f16", "bf16") else (), registers, **source)
    result = launch(
        text,
        "kernel",
        [
            image,
            np.int32(image.size // 16),
            out,
            np.uint64(da),
            np.uint64(db),
            np.uint64(step_a),
            np.uint64(step_b),
            np.int32(steps),
            fragments,
        ],
        arch="sm_90a",
        smem=image.size,
        order=order,
    )[1]
    start = np.zeros((64, n))
    if d == "f16":
        start[:] = np.where(np.arange(n) % 2, 0, float(np.array(1, np.uint16).view(np.float16)))
    else:
        start[:] = 1
    want = start + a.astype(np.float64) @ b.astype(np.float64).T
    got = unpacked(result if d != "s32" else result.view(np.int32), n, d == "f16").astype(np.float64)
    tolerance = 1e-2 if d == "f16" else 1e-4
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("mn", [(0, 0), (1, 1), (0, 1)])
def test_every_swizzle_and_major(span, mn):
    run(64, "f32", "f16", "f16", span, span, mn)


@pytest.mark.parametrize("order", ["eager", 3])
def test_the_order_of_asynchronous_work_does_not_matter(order):
    run(64, "f32", "f16", "f16", order=order)


@pytest.mark.parametrize(
    "n, d, a, b",
    [
        (256, "f32", "bf16", "bf16"),
        (8, "f16", "f16", "f16"),
        (32, "f32", "tf32", "tf32"),
        (16, "f32", "e4m3", "e5m2"),
        (48, "s32", "s8", "u8"),
    ],
)
def test_types(n, d, a, b):
    run(n, d, a, b)


@pytest.mark.parametrize("a", ["f16", "tf32", "e4m3"])
def test_a_in_registers(a):
    run(32, "f32", a, a, registers=True)


@pytest.mark.parametrize(
    "change, kind",
    [({"fence": ""}, "missing-fence"), ({"proxy": ""}, "missing-fence"), ({"wait": ""}, "wgmma-in-flight")],
)
def test_a_missing_fence_or_wait_is_a_fault(change, kind):
    with pytest.raises(EmulationFault) as caught:
        run(16, "f32", "f16", "f16", **change)
    assert caught.value.kind == kind
    assert "PTX line" in str(caught.value)


def test_an_ordinary_store_into_an_operand_in_flight_is_a_fault():
    store = '" ::: "memory"); ((volatile u32*)sm)[threadIdx.x] = 7; asm volatile("wgmma.wait_group.sync.aligned 0;'
    with pytest.raises(EmulationFault, match="an ordinary store writes shared byte 0x400, which the wgmma") as caught:
        run(16, "f32", "f16", "f16", wait=store)
    assert caught.value.kind == "wgmma-in-flight" and "st.volatile.shared" in str(caught.value)


def test_an_operand_beyond_shared_memory_is_a_fault():
    text = wgmma_kernel(16, 16, "f32", "f16", "f16", (0, 0))
    image, out = np.zeros(4096, np.uint8), np.zeros((128, 8), np.float32)
    for bad in (descriptor(0x3F000, 16, 1024, 128), descriptor(0, 16, 1024, 128, blackwell=True)):
        with pytest.raises(EmulationFault, match="descriptor") as caught:
            launch(
                text,
                "kernel",
                [
                    image,
                    np.int32(256),
                    out,
                    np.uint64(bad),
                    np.uint64(descriptor(0, 16, 1024, 128)),
                    np.uint64(2),
                    np.uint64(2),
                    np.int32(1),
                    np.zeros((128, 16), np.uint32),
                ],
                arch="sm_90a",
                smem=4096,
            )
        assert caught.value.kind == "illegal-shape"


def test_sparse_wgmma_says_that_it_is_not_there():
    text = compiled(wgmma_kernel(16, 16, "f32", "f16", "f16", (0, 0)), "sm_90a").replace(
        "mma_async.sync", "mma_async.sp.sync"
    )
    with pytest.raises(UnknownInstruction, match="sparse"):
        launch(
            "",
            "kernel",
            [
                np.zeros(4096, np.uint8),
                np.int32(256),
                np.zeros((128, 8), np.float32),
                np.uint64(0),
                np.uint64(0),
                np.uint64(2),
                np.uint64(2),
                np.int32(1),
                np.zeros((128, 16), np.uint32),
            ],
            arch="sm_90a",
            smem=4096,
            ptx=text,
        )


# ---- facts file, section 11


def test_descriptor_vectors():
    for raw, leading, stride, span in (
        (0x4000004000010040, 16, 1024, 128),
        (0x8000002000010040, 16, 512, 64),
        (0xC000001000010040, 16, 256, 32),
        (0x0000001000080040, 128, 256, 0),
        (0x4000004002000040, 8192, 1024, 128),
    ):
        found = decode_wgmma(raw)
        assert (found.start, found.leading, found.stride, found.swizzle.span) == (0x400, leading, stride, span)
        assert found.base_offset == 0
    for raw, span in (
        (0x4000404000010040, 128),
        (0x8000402000010040, 64),
        (0xC000401000010040, 32),
        (0x0000401000080040, 0),
    ):
        assert decode_tcgen05(raw).swizzle.span == span
    assert decode_wgmma(0x4000004000010042).start == 0x420  # the next K step


def test_fragment_vectors():
    tile = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    assert warpgroup_registers(tile, False)[6, 37] == tile[25, 10]
    # A, 16 bit: thread 37 is warp 1, lane 5; register 3, high half
    flat = operand_index(16, 16, 2)
    assert flat[25 - 16, 11] == (5 * 4 + 3) * 2 + 1


@pytest.mark.parametrize(
    "raw, text", [(0x4000404000010040, "48:46"), (0x4000004000014040, "reserved"), (0x4010004000010040, "reserved")]
)
def test_illegal_descriptor_bits(raw, text):
    with pytest.raises(IllegalDescriptor, match=text):
        decode_wgmma(raw)
    with pytest.raises(IllegalDescriptor):
        decode_tcgen05(0x6000404000010040 | 1 << 61 if raw & 1 << 46 else raw)


def test_base_offset_moves_the_pattern():
    memory = np.zeros(8192, np.uint8)
    tile = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    start = 1024 + 3 * 128  # the pattern begins at line 3
    linear = np.arange(1024)
    memory[start + (linear ^ (((linear >> 7) & 7) << 4))] = tile.view(np.uint8).ravel()
    raw = descriptor(start, 16, 1024, 128) | 3 << 49
    got = gather(memory, decode_wgmma(raw), False, 8, 32, 2).view(np.uint16)
    np.testing.assert_array_equal(got, tile[:, :16])


def test_shared_memory_need_not_be_whole_chunks():
    memory = np.arange(256 + 8, dtype=np.uint16).view(np.uint8)[: 512 + 8]
    descriptor_of_first = decode_wgmma(descriptor(0, 128, 256, 0))
    got = gather(memory, descriptor_of_first, False, 16, 32, 2).view(np.uint16)
    np.testing.assert_array_equal(got[9], np.r_[136:144, 200:208])
    with pytest.raises(IllegalDescriptor, match="520 bytes"):
        gather(memory, decode_wgmma(descriptor(16, 128, 256, 0)), False, 16, 32, 2)


def test_small_formats_agree_with_ml_dtypes():
    types = {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "e2m3": ml_dtypes.float6_e2m3fn,
        "e3m2": ml_dtypes.float6_e3m2fn,
        "e2m1": ml_dtypes.float4_e2m1fn,
        "ue8m0": ml_dtypes.float8_e8m0fnu,
    }
    for name, dtype in types.items():
        codes = np.arange(1 << SMALL[name].bits, dtype=np.uint8)
        np.testing.assert_array_equal(table(name)[codes], codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize(
    "shape",
    [
        "m64n12k16.f32.f16.f16",
        "m64n264k16.f32.f16.f16",
        "m64n40k32.s32.s8.s8",
        "m64n64k16.bf16.bf16.bf16",
        "m64n64k8.f32.f16.f16",
    ],
)
def test_shapes_that_do_not_exist(shape):
    assert parse("wgmma.mma_async.sync.aligned." + shape) is None
    assert parse("wgmma.mma_async.sync.aligned.m64n240k32.s32.s8.u8") is not None


WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, %rd1, %rd2, 1, 1, 1, 0, 0;\n"
OTHER = WGMMA.replace("%f1,%f2,%f3,%f4", "%f11,%f12,%f13,%f14")
COMMIT, WAIT0, WAIT1 = (
    "wgmma.commit_group.sync.aligned;\n",
    "wgmma.wait_group.sync.aligned 0;\n",
    "wgmma.wait_group.sync.aligned 1;\n",
)
USE, COPY = "add.f32 %f5, %f1, %f2;\n", "mov.f32 %f7, %f1;\n"


@pytest.mark.parametrize(
    "body, register",
    [
        (WGMMA + COMMIT + WAIT0 + USE, None),
        (WGMMA + COMMIT + USE, "%f1"),
        (WGMMA + COMMIT + WAIT1 + USE, "%f1"),
        (WGMMA + COPY + COMMIT + WAIT0 + "add.f32 %f5, %f7, %f2;", None),
        (WGMMA + COPY + COMMIT + "add.f32 %f5, %f7, %f7;", "%f7"),
        (WGMMA + COMMIT + OTHER + COMMIT + WAIT1 + USE, None),
        (WGMMA + COMMIT + OTHER + COMMIT + WAIT1 + "add.f32 %f5, %f11, %f2;", "%f11"),
        ("L: " + WGMMA + COMMIT + WAIT1 + "@%p1 bra L;\n" + WAIT0 + USE, None),
        ("L: " + WGMMA + COMMIT + WAIT1 + "@%p1 bra L;\n" + USE, "%f1"),
        ("@%p1 bra L;\n" + WGMMA + COMMIT + "L: " + USE, None),  # not in flight on every path
    ],
)
def test_uses_of_registers_in_flight_are_found_in_the_program(body, register):
    registry.import_operations()
    text = (
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n.reg .pred %p<4>;\n.reg .f32 %f<20>;\n"
    )
    module = parse_ptx(text + ".reg .b64 %rd<9>;\n" + body + "\nret;\n}")
    found = first_use(flow.blocks_of(module.functions["k"], registry.find_operation))
    assert (found and found[1]) == register
