"""What a kernel takes of an SM, from ptxas's words and from the cubin; and how many blocks fit."""

import re

import pytest

from compiler.gpu import sources
from compiler.gpu.sources import SCALE, needs_nvrtc
from palladion.compiler.gpu import places, resources, tools
from palladion.compiler.gpu.nvrtc import compile_source
from palladion.compiler.gpu.resources import Occupancy, occupancy, resources_of
from palladion.errors import TargetNotBuilt

LOG = """\
k.cu(3): warning #177-D: variable "y" was declared but never referenced
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : 260 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_90a'
ptxas info    : Function properties for k2
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 8 bytes cumulative stack size, 400 bytes smem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     120 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 30 registers, used 4 barriers, 152 bytes cumulative stack size
ptxas info    : Function properties for _Z1ffi
ptxas         .     32 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
"""


def elf_of(binary):
    return resources.sections(binary.cubin)


# --- ptxas's words ----------------------------------------------------------------------------------------------------
@needs_nvrtc
def test_each_kernel_of_a_log_has_its_own_numbers():
    cubin = compile_source(SCALE, "sm_90a", "scale").cubin
    k2, k = resources_of(LOG, cubin, "k2"), resources_of(LOG, cubin, "k")
    assert (k2.registers, k2.stack_bytes, k2.static_smem_bytes, k2.named_barriers) == (24, 8, 400, 1)
    assert not k2.spills
    assert (k.registers, k.stack_bytes, k.static_smem_bytes, k.named_barriers) == (30, 152, 0, 4)
    assert (k.spill_store_bytes, k.spill_load_bytes) == (48, 48) and k.spills  # with those of the function it calls
    assert k.warnings == (
        'k.cu(3): warning #177-D: variable "y" was declared but never referenced',
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
    )
    with pytest.raises(LookupError, match=r"nothing of a kernel k3; it compiled \['k2', 'k'\]"):
        resources_of(LOG, cubin, "k3")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_words_agree_with_the_cubin(arch):
    binary = compile_source(SCALE, arch, "scale")
    found = resources_of(binary.log, binary.cubin, "scale")
    assert found.static_smem_bytes == 1024 and found.named_barriers == 1 and not found.spills and not found.warnings
    assert found.code_bytes == elf_of(binary)[".text.scale"] > 0 and found.code_bytes % 16 == 0
    if tools.find_tool("cuobjdump"):
        usage = resources.usage_of_cubin(binary.cubin, "scale")
        assert usage["REG"] == found.registers and usage["SHARED"] == 1024 + resources.SHARED_RESERVED
        with pytest.raises(LookupError, match="no kernel other"):
            resources.usage_of_cubin(binary.cubin, "other")


@needs_nvrtc
def test_spills_are_counted():
    binary = compile_source(sources.spilling(), "sm_90a", "spill")
    found = resources_of(binary.log, binary.cubin, "spill")
    assert found.spills and found.registers == 128  # 4 blocks of 128 threads: 65536 / 512
    assert found.spill_store_bytes > 500 and found.spill_load_bytes > 500 and found.stack_bytes > 500


@needs_nvrtc
def test_a_warning_that_names_a_line_leads_to_the_users():
    source = sources.matmul().replace("c[i] = 0;", "c[i] = 0;", 1)
    at = source.index('      asm volatile("wgmma.commit_group')
    source = source[:at] + "      c[3] += 1;\n" + source[at:]  # a register that the product still writes
    binary = compile_source(source, "sm_90a", "matmul")
    warnings = resources_of(binary.log, binary.cubin, "matmul").warnings
    (text,) = (w for w in warnings if "serialized" in w)
    line = places.cuda_line(binary.ptx, int(re.findall(r"\bline (\d+)", text)[0]))
    assert places.user_line(binary.source, line) == "matmul.py:20 (multiply)"


def test_what_is_no_elf_file_is_refused():
    for data in (b"", b"\x7fELF", b"no cubin" * 20):
        with pytest.raises(ValueError, match="not a 64-bit ELF"):
            resources.sections(data)


def test_a_tool_that_is_missing_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    with pytest.raises(TargetNotBuilt, match=r"needs cuobjdump.*\n  fix: pip install 'palladion\[gpu\]'"):
        resources.usage_of_cubin(b"", "k")


@pytest.mark.skipif(tools.find_tool("cuobjdump") is None, reason="needs cuobjdump: pip install 'palladion[gpu]'")
def test_a_tool_that_refuses_says_why():
    with pytest.raises(RuntimeError, match=r"^cuobjdump cannot read the machine code: .*"):
        resources.usage_of_cubin(b"no cubin", "k")


# --- occupancy --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("registers", "threads", "smem", "ctas", "reason"),
    [
        (168, 384, 0, 1, "registers"),  # what setmaxnreg 40/232/232 deals out again: 12 warps of 3 a part
        (128, 512, 0, 1, "registers"),
        (32, 128, 0, 16, "threads"),
        (255, 32, 0, 8, "registers"),  # two warps of 8192 registers a part
        (16, 32, 0, 32, "blocks"),
        (255, 128, 0, 2, "registers"),
        (255, 256, 0, 1, "registers"),
        (33, 1024, 0, 1, "registers"),  # 40 with the granularity: 12 warps a part, where 16 are needed for two
        (32, 1024, 0, 2, "threads"),
        (32, 128, 232448, 1, "shared memory"),
        (32, 128, 232449, 0, "shared memory"),
        (32, 128, 115712, 2, "shared memory"),  # 2 * (115712 + 1024) = 233472
        (32, 128, 115713, 1, "shared memory"),
        (80, 1024, 0, 0, "registers"),
        (32, 1056, 0, 0, "threads"),
    ],
)
def test_how_many_blocks_an_sm_holds(registers, threads, smem, ctas, reason):
    found = occupancy(registers, threads, smem)
    assert (found.ctas, found.reason) == (ctas, reason)
    assert found.warps == ctas * -(-threads // 32) and found.share == 100 * found.warps // 64


def test_tensor_memory_counts_too():
    assert occupancy(32, 128, 0, 256) == Occupancy(2, "tensor memory", 8, 12)
    assert occupancy(32, 128, 0, 32).reason == "threads"
