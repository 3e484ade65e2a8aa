"""tcgen05 on the emulator: products of all kinds, Tensor Memory movement, and misuse, through NVRTC's PTX."""

import re

import ml_dtypes
import numpy as np
import pytest

from palladion.emulator.faults import EmulationFault, UnknownInstruction
from palladion.emulator.numbers import table
from tests.emulator.tensor_kernels import MOVES, compiled, descriptor, launch, moves_kernel, swizzled, tcgen05_kernel

ITEM = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
B_AT, SF_AT, SIZE = 64 * 1024, 120 * 1024, 124 * 1024


def idesc(m, n, d, a, b, a_mn=0, b_mn=0):
    results = {"f16": 0, "f32": 1, "s32": 2}
    return results[d] << 4 | CODES[a] << 7 | CODES[b] << 10 | a_mn << 15 | b_mn << 16 | (n >> 3) << 17 | (m >> 4) << 24


def numbers(rng, shape, kind):
    if kind in ("s8", "u8"):
        return rng.integers(*((-128, 128) if kind == "s8" else (0, 256)), shape).astype(ITEM[kind])
    value = rng.standard_normal(shape).astype(ITEM[kind])
    return (value.view(np.uint32) & 0xFFFFE000).view(np.float32) if kind == "tf32" else value


def place(image, at, tile, span, mn_major):
    """(descriptor, step) of an operand (rows, K) put into an image."""
    pitch = swizzled(image, at, np.ascontiguousarray(tile.T if mn_major else tile), span)
    if mn_major:
        k = 32 // tile.dtype.itemsize
        return descriptor(at, pitch, 8 * span, span, True), k * span // 16
    return descriptor(at, 16 if span else pitch, 8 * span if span else 128, span, True), 2 if span else 2 * pitch // 16


def run(
    m=128,
    n=64,
    d="f32",
    a_kind="f16",
    b_kind="f16",
    kind="f16",
    group=1,
    span=128,
    b_mn=0,
    form="ss",
    order="lazy",
    steps=None,
    identity=None,
    **source,
):
    """Runs steps of one kind; returns (D as the kernel's lanes by columns, A, B)."""
    rng = np.random.default_rng(0)
    item = np.dtype(ITEM[a_kind]).itemsize
    span_a = 128 if b_mn else span
    steps = steps or (span_a // 32 if span_a else 4)
    depth = steps * 32 // item
    a, b = numbers(rng, (m, depth), a_kind), numbers(rng, (n, depth), b_kind)
    images = []
    for rank in range(group):
        image = np.zeros(SIZE, np.uint8)
        da, step_a = place(image, 0, a[rank * m // group : (rank + 1) * m // group], span_a, 0)
        db, step_b = place(image, B_AT, b[rank * n // group : (rank + 1) * n // group], span, b_mn)
        images.append(image)
    words = np.zeros((128, 8 * steps), np.uint32)
    if form == "ts":
        words[:m] = np.ascontiguousarray(a).view(np.uint32)
    out = np.zeros((128 * group, n), np.uint32)
    text = tcgen05_kernel(kind, group, form, n, **source)
    given = idesc(m, n, d, a_kind, b_kind, 0, b_mn) if identity is None else identity
    result = launch(
        text,
        "kernel",
        [
            np.stack(images),
            np.int32(SIZE // 16),
            out,
            np.uint64(da),
            np.uint64(db),
            np.uint64(step_a),
            np.uint64(step_b),
            np.int32(steps),
            np.uint32(given),
            words,
        ],
        arch="sm_100a",
        grid=group,
        cluster=group,
        smem=SIZE,
        order=order,
    )[1]
    return result, a, b


def rows_of(cells, m, n, group):
    """D (m, n) out of the lanes: the table of layouts, element by element."""
    i, j = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    if group == 1:
        return cells[i if m == 128 else i % 16 + 32 * (i // 16), j]
    if m == 256:
        return cells[i, j]
    return cells[128 * (i // 64) + i % 64 + 64 * (j // (n // 2)), j % (n // 2)]


def check(result, a, b, m, n, group=1, d="f32"):
    cells = rows_of(result, m, n, group)
    if d == "f16":
        got = (cells & 0xFFFF).astype(np.uint16).view(np.float16)
    else:
        got = cells.view(np.float32 if d == "f32" else np.int32)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    tolerance = 2e-2 if d == "f16" else 1e-4
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_every_swizzle(span):
    check(*run(span=span), 128, 64)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_b_mn_major(span):
    check(*run(span=span, b_mn=1), 128, 64)


@pytest.mark.parametrize("m, n, group", [(64, 32, 1), (128, 256, 1), (256, 128, 2), (128, 64, 2)])
def test_layouts_of_d(m, n, group):
    check(*run(m=m, n=n, group=group), m, n, group)


@pytest.mark.parametrize("order", ["eager", 5])
def test_the_order_of_asynchronous_work_does_not_matter(order):
    check(*run(m=256, n=64, group=2, order=order), 256, 64, 2)


@pytest.mark.parametrize(
    "kind, d, a, b",
    [
        ("f16", "f16", "f16", "f16"),
        ("f16", "f32", "bf16", "bf16"),
        ("tf32", "f32", "tf32", "tf32"),
        ("f8f6f4", "f32", "e4m3", "e5m2"),
        ("i8", "s32", "s8", "u8"),
    ],
)
def test_kinds(kind, d, a, b):
    check(*run(kind=kind, d=d, a_kind=a, b_kind=b), 128, 64, d=d)


@pytest.mark.parametrize("kind, item", [("f16", "bf16"), ("f8f6f4", "e4m3"), ("tf32", "tf32")])
def test_a_from_tensor_memory(kind, item):
    check(*run(kind=kind, a_kind=item, b_kind=item, form="ts"), 128, 64)


@pytest.mark.parametrize("kind", ["mxf8f6f4", "mxf4nvf4", "mxf4"])
def test_block_scales(kind):
    rng = np.random.default_rng(2)
    m, n = 128, 64
    four = kind != "mxf8f6f4"
    depth, count, block = (64, 4, 16) if kind == "mxf4nvf4" else (64, 2, 32) if four else (32, 1, 32)
    scale = "ue4m3" if kind == "mxf4nvf4" else "ue8m0"
    form = "e2m1" if four else "e4m3"
    codes = [rng.integers(0, 16 if four else 0x78, (rows, depth)).astype(np.uint8) for rows in (m, n)]
    image = np.zeros(SIZE, np.uint8)
    packed = [(c[:, 0::2] | c[:, 1::2] << 4) if four else c for c in codes]
    da, _ = place(image, 0, packed[0], 32, 0)
    db, _ = place(image, B_AT, packed[1], 32, 0)
    scales = [
        rng.integers(120, 134, (rows, count)).astype(np.uint8) & (0x7F if scale == "ue4m3" else 0xFF) for rows in (m, n)
    ]
    if scale == "ue4m3":
        scales = [rng.integers(40, 70, (rows, count)).astype(np.uint8) for rows in (m, n)]
    for number, values in enumerate(scales):
        for i in range(len(values)):
            at = SF_AT + 512 * number + (i % 32) * 16 + (i // 32) * 4
            image[at : at + count] = values[i]
    before = "".join(
        'asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" :: '
        f'"r"(t + {256 + 32 * i}), "l"({descriptor(SF_AT + 512 * i, 16, 128, 0, True)}ull + base) : "memory");'
        for i in range(2)
    )
    identity = (
        (n >> 3) << 17 | (m >> 7) << 27 | (1 << 23 if scale == "ue8m0" else 0) | (1 << 7 | 1 << 10 if four else 0)
    )
    out = launch(
        tcgen05_kernel(kind, 1, "scaled", n, before=before),
        "kernel",
        [
            image,
            np.int32(SIZE // 16),
            np.zeros((128, n), np.uint32),
            np.uint64(da),
            np.uint64(db),
            np.uint64(0),
            np.uint64(0),
            np.int32(1),
            np.uint32(identity),
            np.zeros(4, np.uint32),
        ],
        arch="sm_100a",
        smem=SIZE,
    )[1]
    value, factor = table(form).astype(np.float64), table(scale).astype(np.float64)
    a, b = (value[c] * np.repeat(factor[s], block, axis=1) for c, s in zip(codes, scales, strict=True))
    np.testing.assert_allclose(out.view(np.float32), a @ b.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", list(MOVES))
def test_shapes_of_loads_and_stores(shape):
    repeats = 8 // MOVES[shape][0]
    count, lanes = 8, MOVES[shape][1]
    words = np.arange(1, 128 * count + 1, dtype=np.uint32).reshape(128, count)
    _, out, back = launch(
        moves_kernel(shape, repeats),
        "moves",
        [words, np.zeros((128, 64), np.uint32), np.zeros((128, count), np.uint32)],
        arch="sm_100a",
    )
    np.testing.assert_array_equal(back, words)
    want = np.zeros((128, 64), np.uint32)
    for t, i in np.ndindex(128, count):
        lane, column = {
            "32x32b": lambda v, i: (v, i),
            "16x64b": lambda v, i: ((v >> 2) + 8 * (v & 1), 2 * i + ((v >> 1) & 1)),
            "16x128b": lambda v, i: ((v >> 2) + 8 * (i & 1), 4 * (i >> 1) + (v & 3)),
            "16x256b": lambda v, i: ((v >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (v & 3) + (i & 1)),
        }[shape](t % 32, i)
        want[32 * (t // 32) + lane, column] = words[t, i]
    assert lanes in (16, 32)
    np.testing.assert_array_equal(out, want)


def test_packed_halves():
    words = np.random.default_rng(0).integers(0, 1 << 32, (128, 8), dtype=np.uint64).astype(np.uint32)
    _, out, back = launch(
        moves_kernel("32x32b", 8, ".pack::16b", ".unpack::16b"),
        "moves",
        [words, np.zeros((128, 64), np.uint32), np.zeros((128, 8), np.uint32)],
        arch="sm_100a",
    )
    np.testing.assert_array_equal(back, words)
    np.testing.assert_array_equal(out[:, :16], words.view(np.uint16).astype(np.uint32))


# ---- misuse


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"commit_wait": ""}, "tmem-in-flight"),  # D read before the commit's mbarrier
        ({"proxy": ""}, "missing-fence"),  # operands stored without a proxy fence
        ({"free": False}, "tmem-leak"),
        ({"issuers": "threadIdx.x < 2"}, "collective-mismatch"),
    ],
)
def test_misuse(change, kind):
    with pytest.raises(EmulationFault) as caught:
        run(**change)
    assert caught.value.kind == kind


def test_d_written_again_before_wait_ld():
    again = """if (threadIdx.x == 0) asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0;\\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" :: "r"(t), "l"(da), "l"(db), "r"(id) : "memory");"""
    with pytest.raises(EmulationFault, match="wait::ld") as caught:
        run(wait_ld="", again=again)
    assert caught.value.kind == "missing-wait"


@pytest.mark.parametrize("m, n, text", [(32, 64, "M = 32"), (128, 0, "N = 0"), (128, 264, "N = 264")])
def test_illegal_shapes(m, n, text):
    with pytest.raises(EmulationFault, match=text) as caught:
        run(m=128, n=64, identity=idesc(m, n, "f32", "f16", "f16"))
    assert caught.value.kind == "illegal-shape"


@pytest.mark.parametrize(
    "offset, text", [(64, "not allocated"), (1 << 21, "may use lanes"), (16 << 16, "may use lanes")]
)
def test_a_load_outside_of_the_allocation_or_of_the_warps_lanes(offset, text):
    good = compiled(moves_kernel("32x32b", 8), "sm_100a")
    bad = re.sub(r"(tcgen05\.ld\.sync\.aligned\.32x32b\.x8.*\[%r\d+)\]", rf"\1+{offset}]", good, count=1)
    assert bad != good
    arguments = [np.zeros((128, 8), np.uint32), np.zeros((128, 64), np.uint32), np.zeros((128, 8), np.uint32)]
    with pytest.raises(EmulationFault, match=text) as caught:
        launch("", "moves", arguments, arch="sm_100a", ptx=bad)
    assert caught.value.kind == "out-of-bounds"


def test_forms_that_are_not_there_say_so():
    text = compiled(tcgen05_kernel("f16", form="ts"), "sm_100a").replace("kind::f16 ", "kind::f16.ashift ")
    with pytest.raises(UnknownInstruction, match="ashift"):
        launch(
            "",
            "kernel",
            [
                np.zeros(SIZE, np.uint8),
                np.int32(SIZE // 16),
                np.zeros((128, 256), np.uint32),
                np.uint64(1 << 46),
                np.uint64(1 << 46),
                np.uint64(0),
                np.uint64(0),
                np.int32(1),
                np.uint32(0),
                np.zeros((128, 8), np.uint32),
            ],
            arch="sm_100a",
            smem=SIZE,
            ptx=text,
        )
