"""Parsing PTX, blocks and their order, and what only PTX text can say (calls by address, brx, scopes)."""

import numpy as np
import pytest

from emulator.running import run
from palladion.emulator.faults import PtxError
from palladion.emulator.flow import blocks_of, weak_topological_order
from palladion.emulator.parse import parse
from palladion.emulator.ptx import Address, Immediate, Label, Pair, Register, Symbol, Vector
from palladion.emulator.registry import find_operation

HEAD = ".version 8.5\n.target sm_90a\n.address_size 64\n"


def body(text):
    (function,) = parse(f"{HEAD}.visible .entry k(.param .u64 x) {{\n{text}\n}}").functions.values()
    return function


def test_operands():
    function = body("""
  .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .pred %p<3>; .reg .f32 %f<2>;
  .shared .align 16 .b8 buf[64];
  @!%p1 ld.global.nc.L1::evict_last.v2.b32 {%r1, _}, [%rd1+-16];
  shfl.sync.idx.b32 %r2|%p2, %r1, 0x1f, 31, -1;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [buf], [%rd1, {%r1, %r2}], [%r3+8];
  mov.f32 %f1, 0fBF800000; mov.u64 %rd2, buf+4; setp.lt.and.f32 %p1, %f1, 0f3F800000, !%p2;
""")
    load, shuffle, copy, one, address, compare = function.body
    assert load.guard == (Register("%p1", "pred"), True) and load.line == 8
    assert load.operands[1] == Address(Register("%rd1", "b64"), -16)
    assert load.parts == ("ld", "global", "nc", "L1::evict_last", "v2", "b32") and load.space() == "global"
    assert isinstance(load.operands[0], Vector) and load.operands[0].items[0] == Register("%r1", "b32")
    assert shuffle.operands[0] == Pair(Register("%r2", "b32"), Register("%p2", "pred"))
    assert [o.value for o in shuffle.operands[2:]] == [31, 31, -1]
    assert copy.operands[1].more == (Vector((Register("%r1", "b32"), Register("%r2", "b32"))),)
    assert copy.has("mbarrier::complete_tx::bytes") and copy.operands[2].offset == 8
    assert one.operands[1] == Immediate(-1.0, "f32", 0xBF800000)
    assert address.operands[1] == Symbol("buf", 4)
    assert compare.text == "setp.lt.and.f32 %p1, %f1, 0f3F800000, !%p2;"


def test_names_in_nested_braces_are_their_own():
    function = body("""
  .reg .b32 %r<3>;
  mov.u32 %r1, 1;
  { .reg .b32 %r1; .reg .pred p; L: mov.u32 %r1, 2; @p bra L; mov.u32 %r2, %r1; }
  { .reg .pred p; L: @p bra L; @p bra END; }
  add.u32 %r2, %r2, %r1;
END: ret;
""")
    outer, label, inner, jump, use = function.body[:5]
    assert outer.operands[0] != inner.operands[0] == use.operands[1]
    assert jump.operands[0] == label and isinstance(label, Label)
    second, again, leave, last, end = function.body[5:10]
    assert second != label and again.operands[0] == second
    assert leave.operands[0] == end and last.operands[2] == outer.operands[0]


def test_variables_and_lines():
    module = parse(
        HEAD
        + """.file 1 "a.cu"
.global .align 8 .u64 names[2] = {generic(text), text+2};
.global .align 1 .b8 text[4] = {97, 98, 0x63};
.const .f32 table[] = {0f3F800000, 2.5, -1};
.extern .shared .align 1024 .b8 dynamic[];
.section .debug_abbrev { .b8 1 }
.visible .entry k() .reqntid 64, 2, 1 .minnctapersm 1 { .loc 1 7 3
  ret; .loc 1 0 0
  ret; }"""
    )
    assert module.variables["names"].links == ((0, "text", 0, True, 8), (8, "text", 2, False, 8))
    assert module.variables["text"].data == b"abc\0" and module.variables["text"].size == 4
    assert np.frombuffer(module.variables["table"].data, "f4").tolist() == [1, 2.5, -1]
    dynamic = module.variables["dynamic"]
    assert dynamic.size == 0 and dynamic.extern and dynamic.align == 1024
    function = module.functions["k"]
    assert function.directives["reqntid"] == (64, 2, 1)
    # line 0 is what the compiler made itself: the line before it says more
    assert [module.source_line(i) for i in function.body] == ["a.cu:7", "a.cu:7"]


@pytest.mark.parametrize(
    "text, message",
    [
        (".entry k() { ret }", "PTX line 4: an operand is expected, not '}'"),
        (".entry k() { @q bra L; }", "PTX line 4: the predicate is not a register"),
        (".entry k() { ret; `", "PTX line 4: cannot read"),
        ("add.u32 %r1, %r2, %r3;", "not expected outside a function"),
        (".entry k() { ret;", "ends in the middle"),
    ],
)
def test_what_is_not_ptx_is_said_with_its_line(text, message):
    with pytest.raises(PtxError, match=message):
        parse(HEAD + text)


def test_blocks():
    function = body("""
  .reg .pred %p; .reg .b32 %r<3>;
  @%p exit;
  mov.u32 %r1, 0;
LOOP:
  shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;
  bar.sync 0;
  add.u32 %r1, %r1, 1;
  @%p bra LOOP;
  ret;
""")
    from palladion.emulator.registry import import_operations

    import_operations()
    blocks = blocks_of(function, find_operation)
    assert sorted(b.ends for b in blocks) == ["branch", "branch", "exit", "jump", "jump", "jump", "return"]
    assert sorted(b.position for b in blocks) == list(range(7)) and blocks[0].position == 0
    alone = next(b for b in blocks if b.body and b.body[0].name == "bar")
    assert len(alone.body) == 1, "an instruction that may park has a block of its own"
    assert next(b for b in blocks if b.body and b.body[0].name == "shfl").gather == "warp"


def test_what_follows_a_loop_comes_after_it():
    #   0 -> 1 -> 2 -> 3 -> 2 (inner), 3 -> 1 (outer), 2 -> 4 (break out of both), 3 -> 5, 5 -> 6, 4 -> 6
    after = [[1], [4, 2], [4, 3], [2, 1, 5], [6], [6], []]
    order = weak_topological_order(after)
    at = {node: k for k, node in enumerate(order)}
    assert sorted(order) == list(range(7)) and order[0] == 0 and order[-1] == 6
    assert max(at[n] for n in (1, 2, 3)) < min(at[4], at[5])
    rng = np.random.default_rng(1)
    for _ in range(50):  # an order without cycles is topological
        n = int(rng.integers(2, 12))
        edges = [sorted({int(t) for t in rng.integers(k + 1, n, 2)}) if k + 1 < n else [] for k in range(n)]
        at = {node: k for k, node in enumerate(weak_topological_order(edges))}
        assert len(at) == n and all(at[k] < at[t] for k in range(n) for t in edges[k])


SWITCH = f"""{HEAD}.visible .entry k(.param .u64 x) {{
  .reg .b32 %r<4>; .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  and.b32 %r2, %r1, 3;
  TABLE: .branchtargets A, B, C, A;
  brx.idx %r2, TABLE;
A: mov.u32 %r3, 10; bra.uni END;
B: mov.u32 %r3, 20; bra.uni END;
C: mov.u32 %r3, 30;
END: st.global.u32 [%rd1], %r3;
  ret;
}}"""


def test_branches_by_a_table():
    (x,) = run(SWITCH, "k", 1, 64, [np.zeros(64, "i4")])
    np.testing.assert_array_equal(x, np.array([10, 20, 30, 10])[np.arange(64) % 4])


VALUES = f"""{HEAD}
.global .align 4 .u32 where[3] = {{5, 6, 7}};
.global .u64 pointer = where+4;
.visible .entry k(.param .u64 x, .param .align 8 .b8 s[16]) {{
  .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %h<5>; .reg .f64 %d; .reg .b128 %q; .reg .pred %p;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 16;
  add.u64 %rd1, %rd1, %rd2;
  mov.b64 %rd3, s;
  cvta.param.u64 %rd3, %rd3;
  ld.u32 %r2, [%rd3+12];
  ld.global.u64 %rd4, [pointer];
  ld.u32 %r3, [%rd4];
  mov.b32 {{%h1, %h2}}, %r2;
  mov.b32 %r4, {{%h2, %h1}};
  mov.b64 %rd5, {{%r4, %r3}};
  mov.f64 %d, 0dBFE8000000000000;
  mov.b64 %rd6, %d;
  mov.b128 %q, {{%rd5, %rd6}};
  st.global.b128 [%rd1], %q;
  ret;
}}"""


def test_moves_addresses_and_parameters():
    params = np.array([1, 2, 3, 0x12345678], "u4").tobytes()
    (x,) = run(VALUES, "k", 1, 32, [np.zeros((32, 2), "u8"), params])
    want = [0x56781234 | 6 << 32, np.float64(-0.75).view("u8")]
    np.testing.assert_array_equal(x, np.tile(np.array(want, "u8"), (32, 1)))
