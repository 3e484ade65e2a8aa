"""MOSAIC_GPU_DUMP_*: what is printed, what becomes a file, what is said once; without a GPU."""

import dataclasses
import subprocess
import sys
import warnings

import pytest

from compiler.gpu.sources import SCALE, generated, needs_nvdisasm
from palladion import config
from palladion.compiler.gpu import dumps
from palladion.compiler.gpu.nvrtc import compile_source
from palladion.errors import PalladionWarning

pytestmark = needs_nvdisasm
JAXPR = "{ lambda ; a:Ref{float32[128]}. let in () }"
SUFFIXES = {"jaxpr.txt", "layouts.txt", "cu", "ptxas.txt", "ptx", "sass", "sass_ctrl"}


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dumps, "_said", set())


@pytest.fixture(scope="module")
def binaries():
    return {arch: compile_source(SCALE, arch, "scale") for arch in ("sm_90a", "sm_100a")}


def dumped(binaries, capsys, kernel=None, jaxpr=JAXPR):
    """What is printed of a kernel, by the titles of the stages."""
    kernel = kernel or generated()
    dumps.front(kernel, jaxpr)
    dumps.back(kernel, jaxpr, binaries[kernel.arch])
    parts = capsys.readouterr().out.split("// ---- ")
    assert parts[0] == ""
    return dict(part.split("\n", 1) for part in parts[1:])


def test_nothing_is_dumped_unless_it_is_asked_for(binaries, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dumped(binaries, capsys) == {}


@pytest.mark.parametrize(
    ("variable", "title", "text"),
    [
        ("PTXAS", "ptxas", "bytes spill stores"),
        ("PTX", "PTX", ".visible .entry scale("),
        ("SASS", "SASS", "/*0000*/"),
        ("SASS_CTRL", "SASS with control codes", "   /*0000*/ LDC R1"),
    ],
)
def test_each_variable_prints_its_stage(binaries, capsys, monkeypatch, variable, title, text):
    monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{variable}", "1")
    ((heading, found),) = dumped(binaries, capsys).items()
    assert heading == f"scale, sm_90a: {title}" and text in found


def test_in_place_of_mlir_there_is_what_this_compiler_has(binaries, capsys, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_MLIR_PASSES", "1")
    with pytest.warns(PalladionWarning, match="has no MLIR passes") as said:
        found = dumped(binaries, capsys)
    assert len(said) == 1
    assert [t.partition(": ")[2] for t in found] == ["jaxpr", "layouts", "CUDA"]
    jaxpr, layouts, cuda = found.values()
    assert jaxpr.strip() == JAXPR and "float32[256] in SMEM" in layouts and cuda.strip() == SCALE.strip()
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        assert len(dumped(binaries, capsys)) == 3


@pytest.mark.parametrize("name", ["MOSAIC_GPU_DUMP_LLVM", "MOSAIC_GPU_LLVM_DEBUG_ONLY"])
def test_that_there_is_no_llvm_is_said_once(binaries, capsys, monkeypatch, name):
    monkeypatch.setenv(name, "serialize-to-llvm")
    with pytest.warns(PalladionWarning, match=rf"{name}: .* LLVM") as said:
        assert dumped(binaries, capsys) == {} == dumped(binaries, capsys)
    assert len(said) == 1


@pytest.mark.parametrize("value", ["", "0", "false", "OFF"])
def test_the_words_for_no_ask_for_nothing(binaries, capsys, monkeypatch, value):
    for name in config.VARIABLES:
        if name.startswith("MOSAIC_GPU_DUMP") and name != "MOSAIC_GPU_DUMP_TO":
            monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dumped(binaries, capsys) == {}


# --- files ------------------------------------------------------------------------------------------------------------
def test_all_stages_become_files(binaries, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    assert dumped(binaries, capsys) == {}
    files = {p.name: p.read_text() for p in tmp_path.iterdir()}
    stems = {name.partition(".")[0] for name in files}
    assert len(stems) == 1 and stems == {dumps.stem(generated(), JAXPR)}
    assert {name.partition(".")[2] for name in files} == SUFFIXES
    (stem,) = stems
    assert files[f"{stem}.cu"].strip() == SCALE.strip() and ".target sm_90a" in files[f"{stem}.ptx"]
    assert files[f"{stem}.sass_ctrl"].count("/*0") > 10
    dumped(binaries, capsys)  # once more: the same names
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == files


def test_kernels_do_not_overwrite_each_others_files(binaries, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    dumped(binaries, capsys)
    dumped(binaries, capsys, jaxpr=JAXPR + " ")
    dumped(binaries, capsys, generated(arch="sm_100a"))
    dumped(binaries, capsys, generated(SCALE + "// another"))
    dumped(binaries, capsys, generated(name="other"))
    assert len(list(tmp_path.iterdir())) == 5 * len(SUFFIXES)


def test_a_stage_may_be_printed_and_written(binaries, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    assert list(dumped(binaries, capsys)) == ["scale, sm_90a: PTX"]
    assert len(list(tmp_path.iterdir())) == len(SUFFIXES)


def test_the_folder_must_be_there(binaries, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"^MOSAIC_GPU_DUMP_TO=.*nowhere: there is no such folder\.\n  fix: make it"):
        dumped(binaries, capsys)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setattr(dumps.os, "replace", full)
    with pytest.raises(ValueError, match=r"scale-\w+\.jaxpr\.txt cannot be written there \(No space left"):
        dumps.front(generated(), JAXPR)
    assert list(tmp_path.iterdir()) == []


def test_layouts_that_are_not_there_are_said_to_be_none():
    assert dumps.layouts_of(dataclasses.replace(generated(), layouts=())) == "scale has neither arrays nor buffers"


def test_every_variable_of_the_reference_is_known():
    names = {"DUMP_PTXAS", "DUMP_PTX", "DUMP_MLIR_PASSES", "DUMP_SASS", "DUMP_SASS_CTRL", "DUMP_TO", "DUMP_LLVM",
             "LLVM_DEBUG_ONLY"}  # fmt: skip
    assert {name.removeprefix("MOSAIC_GPU_") for name in config.VARIABLES} == names


def test_spills_are_allowed_by_an_option_and_its_variable():
    assert config.get("allow_spills") is False
    with config.state("allow_spills")(True):
        assert config.get("allow_spills") is True
    program = "import palladion; print(palladion.config.allow_spills)"
    env = {"PALLADION_ALLOW_SPILLS": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"
