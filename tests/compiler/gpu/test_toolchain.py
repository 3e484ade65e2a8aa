"""From generated CUDA to a report: numbers, refusals, stages, dumps, the cache; and the names of the targets."""

import jax
import jax.numpy as jnp
import pytest

import palladion as pl
from compiler.gpu import sources
from compiler.gpu.sources import SCALE, generated, needs_nvdisasm, needs_nvrtc
from palladion import config
from palladion.compiler import entry
from palladion.compiler.gpu import build, resources, tools
from palladion.simulator.gpu.chip import CHIPS


def compiled(monkeypatch, kernel, target="gpu:sm_90a"):
    """What `palladion.compile` says of a call whose CUDA is the given one."""
    monkeypatch.setattr(build, "generate", lambda params, arch, mesh=None: kernel)

    def add(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    (call,) = pl.compile(pl.pallas_call(add, x), x, target=target).calls
    return call


@needs_nvdisasm
@pytest.mark.parametrize(("target", "arch"), [("gpu:sm_90a", "sm_90a"), ("gpu:b200", "sm_100a")])
def test_the_report_has_the_numbers(monkeypatch, target, arch):
    call = compiled(monkeypatch, generated(arch=arch, smem_bytes=1000, barriers=3, grid=(264, 1, 1)), target)
    assert call.ok, call.refusal
    assert call.target == f"gpu:{arch}"  # of an alias, what it stands for
    facts = call.as_dict()["facts"]
    assert 10 < facts["registers"] < 50 and facts["spill_bytes"] == 0
    assert (facts["shared_bytes"], facts["static_shared_bytes"]) == (2024, 1024)
    assert (facts["barriers"], facts["named_barriers"], facts["threads"], facts["programs"]) == (3, 1, 128, 264)
    assert facts["occupancy"] == 16 and facts["code_bytes"] % 16 == 0 and facts["ptx_bytes"] > 500
    loop = facts["main_loop"]
    assert loop["where"] == "scale.py:6 (kernel)" and loop["tensor"] == 0 and loop["mix"]["LDS"] >= 1
    assert sum(loop["mix"].values()) == sum(facts["main_loop_kinds"].values()) == loop["instructions"]
    assert {"sm_90a": "of 2,112 at a time", "sm_100a": "of 2,368 at a time"}[arch] in str(call.facts)
    assert facts["warnings"] == [] and "tensor_memory_columns" not in facts and "cluster" not in facts


@needs_nvdisasm
def test_the_report_has_the_stages(monkeypatch):
    call = compiled(monkeypatch, generated())
    assert call.stages == ("jaxpr", "layouts", "cuda", "ptx", "ptxas", "sass", "sass_ctrl")
    assert call.text("cuda") == SCALE and ".visible .entry scale" in call.text("ptx")
    assert "add" in call.text("jaxpr") and "SMEM" in call.text("layouts")
    assert call.text("sass").count("/*0") > 10 and "--:-:" in call.text("sass_ctrl")


@needs_nvdisasm
def test_a_matrix_product_tells_what_its_consumers_get(monkeypatch):
    kernel = generated(
        sources.matmul(), "matmul", threads=256, smem_bytes=1024 + 4 * 16384, barriers=8, cluster=(2, 1, 1)
    )
    facts = compiled(monkeypatch, kernel).as_dict()["facts"]
    assert facts["reallocated_registers"] == [232, 40] and facts["main_loop"]["tensor"] == 16
    assert facts["cluster"] == 2 and facts["occupancy"] == 1


@needs_nvdisasm
def test_what_ptxas_warns_of_is_a_remark_with_the_users_line(monkeypatch):
    source = sources.matmul()
    at = source.index('      asm volatile("wgmma.commit_group')
    source = source[:at] + "      c[3] += 1;\n" + source[at:]  # a register that the product still writes
    call = compiled(monkeypatch, generated(source, "matmul", threads=256))
    (serial,) = (r for r in call.remarks if "serialized" in r.why)
    assert (serial.what, serial.verdict, serial.where) == ("ptxas", "warns", ("matmul.py:20 (multiply)",))
    assert serial.why in call.fact("warnings") and call.as_dict()["loops"] == []


@needs_nvrtc
def test_without_a_disassembler_the_rest_is_reported(monkeypatch):
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    call = compiled(monkeypatch, generated())
    assert call.ok and call.fact("registers") and call.fact("main_loop") is None


@needs_nvrtc
def test_spills_are_an_error_unless_allowed(monkeypatch):
    kernel = generated(sources.spilling(), "spill")
    refusal = compiled(monkeypatch, kernel).refusal
    assert refusal.type == "RegisterSpill"
    first, fix = refusal.message.splitlines()
    assert first.startswith("spill spills registers on sm_90a: a thread has 128, and its code stores ")
    assert fix.startswith("  fix: smaller tiles") and "PALLADION_ALLOW_SPILLS=1" in fix
    with config.state("allow_spills")(True):
        call = compiled(monkeypatch, kernel)
    assert call.ok and call.fact("spill_bytes") > 1000 and call.fact("stack_bytes") > 500


@needs_nvrtc
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (dict(smem_bytes=232448 - 1023), "232,449 B of shared memory; a block can have 232,448 B"),
        (dict(tmem_columns=1024), "1024 columns of tensor memory; an SM has 512"),
        (dict(threads=1152), "1,152 CUDA threads a block; it can have 1,024, 8 Pallas threads"),
        (dict(cluster=(32, 1, 1), grid=(32, 1, 1)), "clusters of 32 blocks; they have 16 at most"),
        (dict(cluster=(3, 1, 1)), "a grid of 4×1×1 blocks in clusters of 3×1×1, which do not divide it"),
    ],
)
def test_what_no_gpu_can_launch_is_refused(monkeypatch, changes, what):
    refusal = compiled(monkeypatch, generated(**changes)).refusal
    assert refusal.type == "LimitExceeded" and refusal.message.startswith(f"scale needs {what}.\n  fix: ")


@needs_nvrtc
def test_as_much_as_there_can_be_is_not_refused(monkeypatch):
    call = compiled(monkeypatch, generated(smem_bytes=232448 - 1024, cluster=(16, 1, 1), grid=(16, 1, 1), threads=1024))
    assert call.ok, call.refusal
    assert "(not portable)" in str(call.facts)


@needs_nvrtc
def test_what_nvrtc_refuses_is_a_refusal_with_the_users_line(monkeypatch):
    broken = SCALE.replace("s[threadIdx.x] = b", "s[threadIdx.x] = c")
    refusal = compiled(monkeypatch, generated(broken)).refusal
    assert (refusal.type, refusal.where) == ("NvrtcError", "scale.py:5 (kernel)")


@needs_nvrtc
def test_the_cuda_is_dumped_even_when_it_does_not_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    assert not compiled(monkeypatch, generated("}")).ok
    assert {p.suffix for p in tmp_path.iterdir()} == {".cu", ".txt"}


@needs_nvrtc
def test_a_report_says_what_came_from_the_cache(monkeypatch, tmp_path):
    kernel = generated(SCALE + "// of this test")
    with config.state("cache_dir")(str(tmp_path / "cache")):
        first = compiled(monkeypatch, kernel)
        build.cache._store.memory.clear()
        second = compiled(monkeypatch, kernel)
    assert "from the cache" not in str(first.facts) and "from the cache" in str(second.facts)
    assert first.fact("nvrtc_seconds") == second.fact("nvrtc_seconds")


# --- names of targets -------------------------------------------------------------------------------------------------
def test_the_names_of_the_targets():
    assert {"gpu:sm_90a", "gpu:sm_100a"} <= set(entry.TARGETS) and "gpu:h100" not in entry.TARGETS
    with pytest.raises(ValueError, match="There is no compile target 'gpu:a100'"):
        entry.known_target("gpu:a100")


@needs_nvrtc
def test_chips_stand_for_their_architectures():
    names = {n: entry.known_target(n) for n in ("gpu:h100", "gpu:b200", "gpu:sm_90a")}
    assert names == {"gpu:h100": "gpu:sm_90a", "gpu:b200": "gpu:sm_100a", "gpu:sm_90a": "gpu:sm_90a"}


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_without_the_extra_the_command_is_named(monkeypatch, missing):
    find = entry.importlib.util.find_spec

    def without(name):
        if name.startswith(missing):
            if name != missing:
                raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
            return None
        return find(name)

    monkeypatch.setattr(entry.importlib.util, "find_spec", without)
    with pytest.raises(ModuleNotFoundError) as error:
        entry.known_target("gpu:h100")
    first, *_, fix = str(error.value).splitlines()
    assert first == "Compiling for gpu:sm_90a needs the package cuda-bindings, which is not installed."
    assert fix == "  fix: pip install 'palladion[gpu]'"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_limits_are_those_of_the_simulator(arch):
    chip = CHIPS[arch]
    assert (resources.SHARED_CTA, resources.SHARED_SM) == (chip.smem_bytes, chip.smem_bytes_per_sm)
    assert (resources.SHARED_RESERVED, resources.REGISTERS) == (chip.smem_reserved, chip.registers)
    assert (resources.CTA_THREADS, resources.CTAS) == (chip.max_threads, chip.max_blocks_per_sm)
    assert resources.CLUSTER == chip.max_cluster and chip.tmem_columns in (0, resources.TMEM_COLUMNS)
    name, sms = resources.CHIPS[arch]
    assert chip.name.startswith(name) and sms == chip.num_sms
