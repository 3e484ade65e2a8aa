"""Kernels compiled by the triton package for GPUs that need not be here. Skipped where triton is not installed."""

import json
import re

import jax
import numpy as np
import pytest

import corpus
import palladion as pl
from compiler.triton.kernels import KERNELS, sds
from compiler.triton.large import LARGE, matmul
from compiler.triton.table import REFUSED, why_refused
from palladion import triton as pltriton
from palladion.compiler.entry import _calls_in, compile_call
from palladion.compiler.triton import compile as compiler
from palladion.compiler.triton.chips import CHIPS, chip_of, occupancy

needs_triton = pytest.mark.skipif(not compiler.available(), reason="the triton package is not installed")
TARGETS = ("triton:sm_80", "triton:sm_90", "triton:sm_100")
INSTRUCTION = {"triton:sm_80": "mma.sync", "triton:sm_90": "wgmma.mma_async", "triton:sm_100": "tcgen05.mma"}


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """Triton's cache on disk apart from the user's, so that times and results are those of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(call, *shapes, target):
    (result,) = [compile_call(c, target) for c in _calls_in(jax.make_jaxpr(call)(*shapes).jaxpr)]
    return result


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["add_ragged", "matmul_1000"])
def test_a_sample(name, target):
    call, shapes = LARGE[name]()
    result = compiled(call, *shapes, target=target)
    assert result.ok, result.refusal
    assert result.fact("spill_bytes") == 0
    ptx = result.text("ptx")
    if name == "add_ragged":
        assert "ld.global.v4.b32" in ptx, "loads are wide, masks notwithstanding"
    else:
        assert INSTRUCTION[target] in ptx and "cp.async" in ptx, "tensor cores, and a pipeline"


@needs_triton
def test_the_report_of_a_call():
    call, shapes = LARGE["softmax_rows"]()
    result = compiled(call, *shapes, target="triton:sm_90")
    assert result.ok and result.target == "triton:sm_90" and result.name == "softmax"
    assert 0 < result.fact("registers") <= 255 and result.fact("num_warps") == 4 and result.fact("num_stages") == 3
    assert result.fact("occupancy") == 16, "2048 threads of 128 a program"
    assert result.fact("ptx_bytes") == len(result.text("ptx"))
    assert result.stages == ("jaxpr", "lowered", "ttir", "ttgir", "llir", "ptx", "sass")
    assert "tt.reduce" in result.text("lowered") and "ttg.num-warps" in result.text("ttgir")
    assert re.search(r"\bEXIT\b", result.text("sass")), "machine code, disassembled"
    assert ".target sm_90a" in result.text("ptx")
    assert re.search(r'\.file\s+1 ".*large\.py"', result.text("ptx")), "debuggers find the user's file"


@needs_triton
def test_too_much_shared_memory_is_a_refusal():
    call = matmul(1024, 128, 64, 8, 8)
    result = compiled(call, *[sds((1024, 1024), "bfloat16")] * 2, target="triton:sm_80")
    assert result.refusal is not None and result.refusal.type == "SharedMemoryOverflow"
    assert "of shared memory; a program on sm_80 has 163.0 KiB" in result.refusal.message
    assert "num_stages=8 now" in result.refusal.message


@needs_triton
def test_what_triton_refuses_is_a_refusal_too():
    def kernel(x_ref, o_ref):
        (y,) = pltriton.elementwise_inline_asm(
            "no.such.instruction $0, $1;",
            args=[x_ref[...]],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[sds((32,))],
        )
        o_ref[...] = y

    result = compiled(pl.pallas_call(kernel, sds((32,))), sds((32,)), target="triton:sm_90")
    assert result.refusal is not None and result.refusal.type == "TritonError", result
    assert result.refusal.message.startswith("Triton: ptxas: "), result.refusal.message
    assert "test_compile.py:" in str(result.refusal.where), "at the line of the assembly"
    after = compiled(LARGE["softmax_rows"]()[0], *LARGE["softmax_rows"]()[1], target="triton:sm_90")
    assert after.ok, "the compiler goes on"


def test_without_triton_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: False)
    with pytest.raises(NotImplementedError, match="needs the triton package, which is not installed"):
        compiler.compile_ttir("module {}", 90, 4, 3)


def test_triton_gets_a_cache_where_there_is_no_home(monkeypatch):
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("HOME", "/no/such/folder")
    assert "palladion-triton-" in compiler.environment()["TRITON_CACHE_DIR"]
    monkeypatch.setenv("HOME", "/tmp")
    assert "TRITON_CACHE_DIR" not in compiler.environment()


def test_chips():
    assert chip_of("triton:sm_90a").sm == 90 and chip_of("triton:sm_80") is CHIPS[80]
    with pytest.raises(ValueError, match="There is no compile target 'triton:sm_42'"):
        chip_of("triton:sm_42")
    assert occupancy(CHIPS[80], 128, 0, 4) == (4, "registers")
    assert occupancy(CHIPS[90], 32, 100 << 10, 4) == (2, "shared memory")
    assert occupancy(CHIPS[90], 16, 0, 4) == (16, "threads")


@pytest.mark.filterwarnings("ignore::palladion.errors.PalladionWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_the_corpus_is_refused_where_the_table_says(name):
    assert why_refused(corpus.CASES[name]) == REFUSED[name]


@needs_triton
def test_arguments_of_prints_are_not_spills():
    def kernel(x_ref, o_ref):
        pl.debug_print("first {}", x_ref[0])
        o_ref[...] = x_ref[...]

    result = compiled(pl.pallas_call(kernel, sds((32,))), sds((32,)), target="triton:sm_90")
    assert result.ok and result.fact("spill_bytes") == 0 and "vprintf" in result.text("ptx")


@needs_triton
def test_spills_are_counted():
    """256 x 256 accumulators for 4 warps do not fit in the registers."""
    result = compiled(matmul(4096, 256, 64, 4, 3), *[sds((4096, 4096), "bfloat16")] * 2, target="triton:sm_80")
    assert result.refusal is None and result.fact("registers") == 255 and result.fact("spill_bytes") > 0


@needs_triton
def test_one_axis_whose_programs_store_in_one_block_is_remarked_on():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((16,), lambda i: (0,))
    call = pl.pallas_call(kernel, sds((16,)), grid=(4,), in_specs=[spec], out_specs=spec)
    (axis,) = compiled(call, sds((16,)), target="triton:sm_90").remarks
    assert not axis.good and "all store in the same block of o_ref (output 0)" in axis.why


@pytest.mark.slow
@needs_triton
def test_the_script_for_a_gpu_up_to_the_launch(tmp_path, capsys):
    """What `benchmarks/device/triton_corpus.py` writes for a GPU; results of the evaluator stand in for the GPU's."""
    from benchmarks.device import triton_corpus
    from compiler.triton.running import run_call

    triton_corpus.build(tmp_path, 90, ["branches", "relu"])
    (entry,) = json.loads((tmp_path / "manifest.json").read_text())
    assert entry["grid"] == [4, 1, 1] and entry["threads"] == 128 and entry["outputs"][0]["shape"] == [8, 16]
    assert (tmp_path / "0000.cubin").read_bytes().startswith(b"\x7fELF")
    assert triton_corpus.check(tmp_path) == 1, "nothing has run"
    call, operands = KERNELS["branches"]()
    (found,) = _calls_in(jax.make_jaxpr(call)(*operands).jaxpr)
    (result,) = run_call(found.params, list(operands), 90, 0)
    np.savez(tmp_path / "0000.results.npz", np.frombuffer(result.tobytes(), np.uint8))
    assert triton_corpus.check(tmp_path) == 0
    np.savez(tmp_path / "0000.results.npz", np.frombuffer((result + 1).tobytes(), np.uint8))
    assert triton_corpus.check(tmp_path) == 1
    assert "branches result 0: 128 of 128 differ" in capsys.readouterr().out


# --- everything -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@needs_triton
@pytest.mark.filterwarnings("ignore::palladion.errors.PalladionWarning")
@pytest.mark.parametrize("name", [n for n in corpus.CASES if n not in REFUSED])
def test_the_corpus(name):
    case = corpus.CASES[name]
    with corpus.scope(case):
        calls = list(_calls_in(jax.make_jaxpr(case.make())(*corpus.arguments(case)).jaxpr))
        for target in TARGETS:
            for call in calls:
                result = compile_call(call, target)
                if result.refusal is not None:
                    assert target == "triton:sm_80" and "float8_e4m3fn" in result.refusal.message, result.refusal


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_all_kernels(name):
    call, operands = KERNELS[name]()
    for target in (*TARGETS, "triton:sm_120"):
        result = compiled(call, *operands, target=target)
        assert result.ok, result.refusal


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("target", (*TARGETS, "triton:sm_120"))
@pytest.mark.parametrize("name", LARGE)
def test_large_kernels_do_not_spill(name, target):
    call, shapes = LARGE[name]()
    result = compiled(call, *shapes, target=target)
    assert result.ok, result.refusal
    assert result.fact("spill_bytes") == 0
    if target in INSTRUCTION and ("matmul" in name or "attention" in name):
        assert INSTRUCTION[target] in result.text("ptx")
