# ruff: noqa: E501 (PTX)
"""Loads, stores and atomic operations of all widths, vectors, spaces and scopes, as PTX."""

import ml_dtypes
import numpy as np
import pytest

from emulator.running import run
from palladion.emulator.faults import EmulationFault

HEAD = ".version 8.5\n.target sm_90a\n.address_size 64\n"
REGISTERS = """.reg .b64 %rd<9>; .reg .b32 %r<20>; .reg .b16 %h<20>; .reg .f32 %f<9>; .reg .f64 %d<5>; .reg .b128 %q<3>; .reg .pred %p<3>; .reg .b64 %w<9>;
  .shared .align 128 .b8 buf[16384]; .local .align 16 .b8 mine[64];
  ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [y]; mov.u32 %r0, %tid.x; cvt.u64.u32 %rd2, %r0;
"""


def kernel(body):
    return f"{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{\n{REGISTERS}{body}\nret;\n}}"


def copied(body, x, threads=32):
    """`body` moves `x.shape[1:]` bytes from %rd3 to %rd4, for each thread."""
    size = x[0].nbytes
    text = f"mad.lo.u64 %rd3, %rd2, {size}, %rd0; mad.lo.u64 %rd4, %rd2, {size}, %rd1;\n{body}"
    return run(kernel(text), "k", 1, threads, [x, np.zeros_like(x)])[1]


BYTES = np.random.default_rng(0).integers(0, 256, (32, 32)).astype("u1")


@pytest.mark.parametrize(
    "size, load, store",
    [
        (1, "ld.global.u8 %r1, [%rd3];", "st.global.u8 [%rd4], %r1;"),
        (2, "ld.global.nc.b16 %h1, [%rd3];", "st.global.wb.b16 [%rd4], %h1;"),
        (4, "ld.global.L1::evict_last.L2::128B.f32 %f1, [%rd3];", "st.global.cs.f32 [%rd4], %f1;"),
        (8, "ld.volatile.global.f64 %d1, [%rd3];", "st.volatile.global.f64 [%rd4], %d1;"),
        (16, "ld.global.b128 %q1, [%rd3];", "st.global.b128 [%rd4], %q1;"),
        (2, "ld.global.v2.u8 {%h1, %h2}, [%rd3];", "st.global.v2.u8 [%rd4], {%h1, %h2};"),
        (8, "ld.acquire.gpu.global.v2.b32 {%r1, %f1}, [%rd3];", "st.release.sys.global.v2.b32 [%rd4], {%r1, %f1};"),
        (16, "ld.v4.u32 {%r1, %r2, %r3, %r4}, [%rd3];", "st.v4.f32 [%rd4], {%r1, %r2, %r3, %r4};"),
        (16, "ld.global.v2.u64 {%w1, %w2}, [%rd3+0];", "st.global.v2.f64 [%rd4], {%w1, %w2};"),
        (32, "ld.global.v4.b64 {%w1, %w2, %w3, %w4}, [%rd3];", "st.global.v4.b64 [%rd4], {%w1, %w2, %w3, %w4};"),
        (32, "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd3];", "st.global.v8.b32 [%rd4], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};"),
        (8, "createpolicy.fractional.L2::evict_first.b64 %w5, 1.0; ld.global.L2::cache_hint.b64 %w1, [%rd3], %w5;", "prefetch.global.L2 [%rd4]; st.global.L2::cache_hint.b64 [%rd4], %w1, %w5;"),
        (4, "ld.relaxed.cta.global.u32 %r1, [%rd3];", "st.weak.global.u32 [%rd4], %r1;"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("through", ["", "shared", "local"])
def test_widths_and_vectors(size, load, store, through):
    x = np.ascontiguousarray(BYTES[:, :size])
    if through == "shared":  # by way of the same instructions on another space
        address = f"mov.u64 %rd5, buf; mad.lo.u64 %rd6, %rd2, {size}, %rd5; cvta.shared.u64 %rd7, %rd6;"
    elif through == "local":
        address = "mov.u64 %rd6, mine; cvta.local.u64 %rd7, %rd6;"
    if through:
        put = store.replace("%rd4", "%rd6" if ".global" in store else "%rd7").replace(".global", f".{through}")
        get = (
            load.replace("%rd3", "%rd6" if ".global" in load else "%rd7")
            .replace(".global", f".{through}")
            .replace(".nc", "")
        )
        if through == "local":  # orders of memory are for shared state
            put, get = (
                t.replace(".release.sys", "").replace(".acquire.gpu", "").replace(".relaxed.cta", "")
                for t in (put, get)
            )
        body = f"{address}\n{load}\n{put}\nmov.b32 %r1, 0; mov.b64 %w1, 0; mov.b16 %h1, 0;\n{get}\n{store}"
    else:
        body = f"{load}\n{store}"
    np.testing.assert_array_equal(copied(body, x), x)


def test_loads_extend_as_their_type_says():
    x = np.ascontiguousarray(BYTES[:, :8])
    body = """ld.global.s8 %r1, [%rd3]; ld.global.u8 %r2, [%rd3+1]; add.u32 %r1, %r1, %r2; st.global.u32 [%rd4], %r1;
      ld.global.s16 %r1, [%rd3+2]; ld.global.s32 %w1, [%rd3+4]; cvt.u32.u64 %r3, %w1; shr.s64 %w1, %w1, 40; cvt.u32.u64 %r2, %w1;
      add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; st.global.u32 [%rd4+4], %r1;"""
    got = copied(body, x).view("i4")
    np.testing.assert_array_equal(got[:, 0], x[:, 0].view("i1").astype("i4") + x[:, 1])
    wide = x.view("i4")[:, 1].astype("i8")
    np.testing.assert_array_equal(got[:, 1], (x.view("i2")[:, 1] + (wide >> 40) + wide).astype("i4"))


def test_guards_of_accesses():
    x = np.ascontiguousarray(BYTES[:, :4])
    body = """and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; mov.b32 %r2, 7; @%p1 ld.global.b32 %r2, [%rd3];
      @!%p1 mov.u64 %rd4, 16; @%p1 st.global.b32 [%rd4], %r2; setp.lt.u32 %p2, %r0, 0; @%p2 ld.global.b32 %r2, [%r0]; @%p2 st.shared.b32 [%r0], %r2;"""
    got = copied(body, x)
    even = np.arange(32) % 2 == 0
    np.testing.assert_array_equal(got, np.where(even[:, None], x, 0))


def test_mixed_generic_addresses():
    """Lanes of one instruction may mean different memories."""
    x = np.ascontiguousarray(BYTES[:, :4])
    body = """mov.u64 %rd5, buf; mad.lo.u64 %rd5, %rd2, 4, %rd5; cvta.shared.u64 %rd6, %rd5; mov.u64 %rd7, mine; cvta.local.u64 %rd7, %rd7;
      rem.u32 %r1, %r0, 3; setp.eq.u32 %p1, %r1, 1; setp.eq.u32 %p2, %r1, 2; mov.u64 %rd8, %rd4;
      @%p1 mov.u64 %rd8, %rd6; @%p2 mov.u64 %rd8, %rd7; ld.b32 %r2, [%rd3]; st.b32 [%rd8], %r2; mov.b32 %r2, 0;
      ld.b32 %r2, [%rd8]; isspacep.shared %p1, %rd8; @%p1 add.u32 %r2, %r2, 1; isspacep.local %p1, %rd8; @%p1 add.u32 %r2, %r2, 2; st.global.b32 [%rd4], %r2;"""
    got = copied(body, x).view("u4")[:, 0]
    np.testing.assert_array_equal(got, x.view("u4")[:, 0] + np.arange(32, dtype="u4") % 3)


def test_edges_of_memory():
    x = np.ascontiguousarray(BYTES[:, :4])
    for body, message in [
        ("ld.global.b16 %h1, [%rd3+1];", "misaligned: A thread accesses 2 bytes at global address"),
        ("setp.eq.u32 %p1, %r0, 31; @%p1 ld.global.b32 %r1, [%rd3+4];", r"4 bytes past the end[\s\S]*"),
        ("setp.eq.u32 %p1, %r0, 5; @%p1 st.shared.b32 [buf+16384], %r1;", r"thread 5 "),
        ("ld.shared.b32 %r1, [8];", "reads 4 bytes at shared address 0x8"),
        ("ld.local.b32 %r1, [mine+64000];", "reads 4 bytes at local address"),
        ("mov.u64 %rd5, 0x10000000000; ld.global.b32 %r1, [%rd5-4];", "global address 0xfffffffffc"),
    ]:
        with pytest.raises(EmulationFault, match=message):
            copied(body, x)


# --- atomic operations ---------------------------------------------------------------------------------------------
def atomics(instruction, start, operands, where="global", threads=64):
    """All threads do `instruction` on one place, the old values and the final one: `%v` the operand, `%o` the old value."""
    dtype = start.dtype
    size = dtype.itemsize
    v, o = {2: ("%h1", "%h2"), 4: ("%r1", "%r2"), 8: ("%w1", "%w2")}[size]
    place = "[%rd0]"
    setup = f"mad.lo.u64 %rd3, %rd2, {size}, %rd1; ld.global.b{8 * size} {v}, [%rd3];"
    end = ""
    if where != "global":
        old = {2: "%h5", 4: "%r5", 8: "%w5"}[size]
        setup += f"ld.global.b{8 * size} {old}, [%rd0]; st.shared.b{8 * size} [buf], {old}; bar.sync 0;"
        place = "[buf]"
        if where == "generic":
            setup += "mov.u64 %rd5, buf; cvta.shared.u64 %rd5, %rd5;"
            place = "[%rd5]"
        end = f"bar.sync 0; ld.shared.b{8 * size} {old}, [buf]; st.global.b{8 * size} [%rd0], {old};"
    text = instruction.replace("[]", place).replace("%v", v).replace("%o", o)
    if where == "global":
        text = text.replace(".SPACE", ".global")
    else:
        text = text.replace(".SPACE", ".shared" if where == "shared" else "")
    keep = f"st.global.b{8 * size} [%rd3], {o};" if "%o" in instruction else ""
    final, old = run(kernel(f"{setup}\n{text}\n{keep}\n{end}"), "k", 1, threads, [start, operands])
    return final, old


def in_order(function, start, operands):
    """One after another, by thread."""
    value, old = start[0], []
    for x in operands:
        old.append(value)
        value = function(value, x)
    return value, np.array(old, start.dtype)


rng = np.random.default_rng(1)
U4, S4, U8, S8 = (
    rng.integers(0, 1 << 8 * s, 64, dtype=f"u{s}").view(d) for s, d in ((4, "u4"), (4, "i4"), (8, "u8"), (8, "i8"))
)
CASES = {
    "atom.SPACE.add.u32": (np.add, U4), "atom.SPACE.add.s32": (np.add, S4), "atom.SPACE.add.u64": (np.add, U8),
    "atom.SPACE.min.s32": (min, S4), "atom.SPACE.max.u32": (max, U4), "atom.relaxed.gpu.SPACE.min.u64": (min, U8),
    "atom.acq_rel.sys.SPACE.max.s64": (max, S8), "atom.SPACE.and.b32": (np.bitwise_and, U4),
    "atom.release.cta.SPACE.or.b64": (np.bitwise_or, U8), "atom.acquire.cluster.SPACE.xor.b32": (np.bitwise_xor, U4),
    "atom.SPACE.exch.b64": (lambda a, b: b, U8), "atom.SPACE.exch.b32": (lambda a, b: b, U4),
    "atom.SPACE.inc.u32": (lambda a, b: np.uint32(0) if a >= b else a + np.uint32(1), U4 % 9),
    "atom.SPACE.dec.u32": (lambda a, b: b if a == 0 or a > b else a - np.uint32(1), U4 % 9),
}  # fmt: skip


@pytest.mark.parametrize("where", ["global", "shared", "generic"])
@pytest.mark.parametrize("name", CASES)
def test_integer_atomics(name, where):
    function, operands = CASES[name]
    start = operands[:1] // 2
    with np.errstate(over="ignore"):
        value, old = in_order(function, start, operands)
    got, before = atomics(f"{name} %o, [], %v;", start, operands, where)
    assert got[0] == value
    np.testing.assert_array_equal(before, old)
    if "exch" not in name:
        red = name.replace("atom", "red").replace("acquire", "relaxed").replace("acq_rel", "relaxed")
        got, untouched = atomics(f"{red} [], %v;", start, operands, where)
        assert got[0] == value
        np.testing.assert_array_equal(untouched, operands)


@pytest.mark.parametrize("where", ["global", "shared"])
def test_float_atomics(where):
    exact = (rng.integers(-8, 8, 64) * 0.25).astype("f8")  # so that the order of sums does not matter
    for kind, dtype in (("f32", "f4"), ("f64", "f8")):
        got, old = atomics(f"atom.SPACE.add.{kind} %o, [], %v;", np.array([1.5], dtype), exact.astype(dtype), where)
        assert got[0] == exact.sum() + 1.5
        assert sorted(np.diff(np.append(old, got[0])).tolist()) == sorted(exact.tolist())
    for kind, dtype in (("f16", "f2"), ("bf16", ml_dtypes.bfloat16)):
        x = exact.astype(dtype)
        got, _ = atomics(f"atom.SPACE.add.noftz.{kind} %o, [], %v;", np.array([0.5], dtype), x, where)
        assert float(got[0]) == exact.sum() + 0.5
        pair = np.stack([x, x[::-1] * np.array(2, dtype)], 1).astype(dtype).view("u4").reshape(-1)
        got, _ = atomics(f"red.SPACE.add.noftz.{kind}x2 [], %v;", np.zeros(1, "u4"), pair, where)
        np.testing.assert_array_equal(got.view(dtype).astype("f8"), [exact.sum(), 2 * exact.sum()])


def test_compare_and_swap():
    operands = np.arange(64, dtype="u4")
    got, old = atomics(
        "mov.u32 %r3, %r0; atom.SPACE.cas.b32 %o, [], %r3, 1000;".replace("1000", "%r4")
        .replace("mov.u32 %r3, %r0;", "add.u32 %r4, %r0, 1;")
        .replace("%r3", "%r0"),
        np.zeros(1, "u4"),
        operands,
    )
    assert got[0] == 64, "each thread finds what the one before left"
    np.testing.assert_array_equal(old, operands)
    got, old = atomics(
        "mov.b16 %h3, 5; atom.SPACE.cas.b16 %o, [], %h3, %v;",
        np.array([5], "u2"),
        np.arange(64, dtype="u2") + np.uint16(9),
    )
    assert got[0] == 9 and old[0] == 5 and (old[1:] == 9).all()


def test_vectors_of_atomics():
    x = np.tile(np.array([1, 2, 3, 4], "f4"), (32, 1))
    body = """setp.lt.u32 %p1, %r0, 8; mad.lo.u64 %rd3, %rd2, 16, %rd0; ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3];
      @%p1 red.global.v4.f32.add [%rd1], {%f1, %f2, %f3, %f4}; @%p1 red.global.add.v2.f32 [%rd1+16], {%f3, %f4};
      @%p1 atom.global.v2.f32.add {%f5, %f6}, [%rd1+24], {%f1, %f2};
      mov.b32 %r3, 0x40003C00; @%p1 red.global.add.noftz.v2.f16x2 [%rd1+32], {%r3, %r3};"""
    for spelling in (
        body,
        body.replace(".v4.f32.add", ".add.v4.f32").replace("red.global.add.v2.f32", "red.global.v2.f32.add"),
    ):
        _, y = run(kernel(spelling), "k", 1, 32, [x, np.zeros(12, "f4")])
        np.testing.assert_array_equal(y[:8], np.array([1, 2, 3, 4, 3, 4, 1, 2]) * 8)
        np.testing.assert_array_equal(y[8:10].view("f2"), [8, 16, 8, 16])


def test_128_bit_exchange():
    x = np.array([7, 9], "u8")
    body = """setp.eq.u32 %p1, %r0, 3; @!%p1 bra END; mov.u64 %w1, 1; mov.u64 %w2, 2; mov.b128 %q1, {%w1, %w2};
      atom.global.exch.b128 %q2, [%rd0], %q1; st.global.b128 [%rd1], %q2; atom.global.cas.b128 %q2, [%rd0], %q1, %q2; st.global.b128 [%rd1+16], %q2; END:"""
    x, y = run(kernel(body), "k", 1, 32, [x, np.zeros(4, "u8")])
    assert y.tolist() == [7, 9, 1, 2] and x.tolist() == [7, 9]


def test_atomics_tell_what_is_wrong():
    for text, kind in (
        ("red.global.add.u32 [%rd0+2], %r0;", "misaligned"),
        ("atom.global.add.u32 %r1, [%rd0+4096], %r0;", "out-of-bounds"),
        ("atom.shared.add.u32 %r1, [buf+16384], %r0;", "out-of-bounds"),
    ):
        with pytest.raises(EmulationFault) as caught:
            run(kernel(text), "k", 1, 32, [np.zeros(4, "u4"), np.zeros(4, "u4")])
        assert caught.value.kind == kind and text.split()[0] in str(caught.value)
