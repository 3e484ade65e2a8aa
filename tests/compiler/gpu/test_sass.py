"""Machine code as data: control codes, instructions, loops, and what the main loop is made of."""

import pytest

from compiler.gpu import sources
from compiler.gpu.sources import SCALE, needs_nvdisasm
from palladion.compiler.gpu import loops, places, sass
from palladion.compiler.gpu.nvrtc import compile_source
from palladion.compiler.gpu.sass import Control, Instruction, control_of


def code_of(source, name, arch="sm_90a"):
    return sass.instructions(sass.disassemble(compile_source(source, arch, name).cubin))[name]


# --- control codes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("high", "control", "text"),
    [  # the upper halves of instructions as ptxas wrote them; decoded by hand
        (0x000FE20000000800, Control(1, False, None, None, 0, 0), "--:-:-:-:1"),
        (0x000E220000000800, Control(1, False, 0, None, 0, 0), "--:-:1:-:1"),
        (0x001FE20003F06270, Control(1, False, None, None, 1, 0), "01:-:-:-:1"),
        (0x002FD8000F8E0206, Control(12, True, None, None, 2, 0), "02:-:-:Y:c"),
        (0x040FE20007FFE0FF, Control(1, False, None, None, 0, 1), "--:-:-:-:1"),
        (0x000FC60000000000, Control(3, True, None, None, 0, 0), "--:-:-:Y:3"),
    ],
)
def test_control_codes_are_read_from_the_encoding(high, control, text):
    assert control_of(high << 64) == control and str(control) == text


def test_every_field_has_its_bits():
    def encoded(stall=0, yields=0, write=0, read=0, wait=0, reuse=0):
        fields = ((stall, 4), (yields, 1), (write, 3), (read, 3), (wait, 6), (reuse, 4))
        word, at = 0, 105
        for value, width in fields:
            word |= value << at
            at += width
        assert at == 126
        return word | 1 << 126 | (1 << 105) - 1  # its neighbours are not read

    assert control_of(encoded()) == Control(0, True, 0, 0, 0, 0)
    assert control_of(encoded(15, 1, 7, 7, 63, 15)) == Control(15, False, None, None, 63, 15)
    assert str(control_of(encoded(10, 0, 5, 2, 0x21))) == "21:3:6:Y:a"


# --- the listing ------------------------------------------------------------------------------------------------------
LISTING = """
//--------------------- .text.k                   --------------------------
        .section        .text.k,"ax",@progbits
.text.k:
        //## File "/palladion/k.cu", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;                     /* 0x00000a00ff017b82 */
                                                                              /* 0x000ff00000000800 */
.L_x_4:
        //## File "/palladion/k.cu", line 20 inlined at "/palladion/k.cu", line 8
        //## File "/palladion/k.cu", line 8
        /*0010*/              @!P0 BRA `(.L_x_4) ;                            /* 0x00000008008c8947 */
                                                                              /* 0x000fea0003800000 */
        /*0020*/                   NOP;                                       /* 0x0000000000007918 */
                                                                              /* 0x000fc00000000000 */
.L_x_9:
"""


def test_a_listing_becomes_instructions():
    load, branch, nop = sass.instructions(LISTING)["k"]
    assert (load.opcode, load.operands, load.predicate, load.line) == ("LDC", "R1, c[0x0][0x28]", "", 3)
    assert load.encoding == 0x000FF00000000800_00000A00FF017B82 and load.labels == (".text.k",)
    assert (branch.predicate, branch.target, branch.line, branch.labels) == ("@!P0", 0x10, 8, (".L_x_4",))
    assert (nop.opcode, nop.operands, nop.address) == ("NOP", "", 0x20)
    listing = sass.control_listing([load, branch, nop])
    assert listing.splitlines()[3] == "--:-:-:-:5   /*0010*/ @!P0 BRA `(.L_x_4) ;"


def test_what_is_no_listing_is_refused():
    with pytest.raises(ValueError, match="no encodings"):
        sass.instructions(LISTING.replace("/* 0x00000a00ff017b82 */", ""))
    with pytest.raises(ValueError, match="not an instruction"):
        sass.instructions(LISTING.replace("NOP;", "???"))


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_instruction_is_parsed_with_its_own_bits(arch):
    """The encodings in the listing are the bytes of the cubin: nothing is skipped, nothing shifted."""
    binary = compile_source(SCALE, arch, "scale")
    code = sass.instructions(sass.disassemble(binary.cubin))["scale"]
    assert [i.address for i in code] == list(range(0, 16 * len(code), 16))
    data = b"".join(i.encoding.to_bytes(16, "little") for i in code)
    assert data in binary.cubin
    assert {i.base for i in code} >= {"LDG", "STS", "BAR", "EXIT"}
    lines = {places.user_line(SCALE, i.line) for i in code if i.base in ("STS", "LDS")}
    assert lines >= {"scale.py:5 (kernel)", "scale.py:6 (kernel)"}
    # a load sets a barrier, and whoever needs its result waits for it
    load = next(n for n, i in enumerate(code) if i.base == "LDG")
    assert code[load].control.write is not None
    assert any(i.control.wait >> code[load].control.write & 1 for i in code[load + 1 :])


@needs_nvdisasm
def test_reuse_marks_in_the_text_are_the_bits():
    code = code_of(sources.matmul(), "matmul")
    marked = [i for i in code if ".reuse" in i.operands]
    assert marked and all(i.control.reuse for i in marked)
    assert not any(i.control.reuse for i in code if ".reuse" not in i.operands)


# --- loops ------------------------------------------------------------------------------------------------------------
def straight(*ops):
    """Instructions from (opcode, label or None, target label or None[, predicate])."""
    places_ = {label: 16 * n for n, (_, label, *_) in enumerate(ops) if label}
    return [
        Instruction(16 * n, rest[0] if rest else "", op, f"`({to})" if to else "", 0, (label,) if label else (),
                    places_.get(to))
        for n, (op, label, to, *rest) in enumerate(ops)
    ]  # fmt: skip


def test_a_wait_that_is_tried_again_out_of_line_belongs_to_its_loop():
    code = straight(
        ("MOV", None, None),
        ("SYNCS", "head", None),
        ("BRA", None, "again", "@!P0"),
        ("HGMMA", "go", None),
        ("BRA", None, "head", "@P1"),
        ("EXIT", None, None),
        ("SYNCS", "again", None),
        ("BRA", None, "again", "@!P0"),
        ("BRA", None, "go"),
    )
    outer, inner = loops.find_loops(code)
    assert (outer.head, outer.depth, inner.head, inner.depth) == (16, 1, 96, 2)
    assert dict(outer.mix) == {"BRA": 2, "SYNCS": 1, "HGMMA": 1} and outer.tensor == 1  # no branch back to "go"
    assert dict(inner.mix) == {"SYNCS": 1, "BRA": 1} and inner.tensor == 0
    assert loops.main_loop(code) == outer


def test_a_branch_back_into_the_middle_is_no_loop():
    code = straight(("BRA", None, "far", "@P0"), ("MOV", "near", None), ("EXIT", None, None), ("BRA", "far", "near"))
    assert loops.find_loops(code) == () and loops.main_loop(code) is None
    assert [b.successors for b in loops.basic_blocks(code)] == [(2, 1), (), (1,)]


def test_the_trap_at_the_end_of_a_kernel_is_no_loop():
    assert loops.find_loops(straight(("EXIT", None, None), ("BRA", "trap", "trap"))) == ()
    assert loops.basic_blocks([]) == () and loops.find_loops([]) == ()


def test_without_products_the_largest_loop_is_the_main_one():
    code = straight(
        ("FADD", "a", None), ("BRA", None, "a", "@P0"), ("FADD", "b", None), ("LDG", None, None),
        ("BRA", None, "b", "@P0"), ("EXIT", None, None),
    )  # fmt: skip
    found = loops.main_loop(code)
    assert found.head == 32 and dict(found.kinds) == {"float": 1, "global memory": 1, "branch": 1}


def test_what_comes_after_a_wait_belongs_to_the_loop_around_it():
    code = straight(
        ("MOV", "head", None), ("SYNCS", "again", None), ("BRA", None, "again", "@!P0"), ("HGMMA", None, None),
        ("BRA", None, "head", "@P1"), ("EXIT", None, None),
    )  # fmt: skip
    assert dict(loops.main_loop(code).mix) == {"MOV": 1, "HGMMA": 1, "BRA": 1}


def test_a_kernel_that_only_waits_in_loops_has_no_main_loop():
    code = straight(("SYNCS", "again", None), ("BRA", None, "again", "@!P0"), ("EXIT", None, None))
    assert len(loops.find_loops(code)) == 1 and loops.main_loop(code) is None


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HGMMA.64x256x16.F32.BF16", "tensor"), ("QGMMA", "tensor"), ("UTCHMMA", "tensor"), ("HMMA.16816", "tensor"),
        ("UTMALDG.2D", "TMA"), ("UBLKCP", "TMA"), ("SYNCS.PHASECHK", "barrier"), ("UTCBAR", "barrier"),
        ("WARPGROUP.ARRIVE", "barrier"), ("LDTM.x32", "tensor memory"), ("LDL", "spill"), ("LDSM.16", "shared memory"),
        ("LDS.128", "shared memory"), ("STG.E.128", "global memory"), ("SHFL.BFLY", "shuffle"), ("HFMA2.MMA", "float"),
        ("MUFU.EX2", "float"), ("FADD2", "float"), ("FENCE.VIEW.ASYNC", "barrier"), ("F2FP.BF16.F32", "convert"),
        ("I2FP.F32.S32", "convert"), ("UIADD3", "uniform"), ("IMAD.MOV.U32", "integer"), ("FLO.U32", "integer"),
        ("BRA.U", "branch"), ("S2R", "integer"),
    ],
)  # fmt: skip
def test_kinds_of_instructions(opcode, kind):
    assert loops.kind_of(Instruction(0, "", opcode, "", 0)) == kind


@needs_nvdisasm
def test_the_main_loop_of_a_matrix_product():
    """The loop that multiplies, of the consumers, with its waits out of it: 4 steps of 4 products, as ptxas unrolls."""
    source = sources.matmul()
    code = code_of(source, "matmul")
    found = loops.main_loop(code)
    assert found.tensor == 16 and found.kinds["tensor"] == 16
    assert "TMA" not in found.kinds and "spill" not in found.kinds
    assert places.user_line(source, found.line) == "matmul.py:20 (multiply)"
    copying = [loop for loop in loops.find_loops(code) if loop.kinds.get("TMA")]
    assert copying and all(loop.tensor == 0 for loop in copying)
    assert loops.reallocations(code) == (232, 40)


@needs_nvdisasm
def test_products_that_the_assembler_adds_as_a_fence_do_not_count():
    source = sources.matmul()
    at = source.index('      asm volatile("wgmma.commit_group')
    code = code_of(source[:at] + "      c[3] += 1;\n" + source[at:], "matmul")
    found = loops.main_loop(code)
    assert found.mix["HGMMA"] > found.tensor > 0
