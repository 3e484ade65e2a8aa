"""The examples do what they say, and `docs/check.md` shows what is printed."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

from palladion import mosaic_gpu as plgpu
from palladion.report.command import main
from repo.tree import ROOT

DOCUMENTATION = (ROOT / "docs" / "check.md").read_text()
FINDINGS = {
    "clean_matmul.py": {"race": "note"},
    "reduction_first.py": {"revisited-block": "error", "race": "warning", "smem-overflow": "note"},
    "offset_index_map.py": {"out-of-bounds": "error"},
    "softmax.py": {},
    "look_inside.py": {},
    "gather_rows.py": {},
    "flash_attention.py": {},
    "native.py": {},
    "flash_attention_gpu.py": {},
    "hopper_matmul.py": {},
    "gpu_ping_pong.py": {},
    "gpu_missing_fence.py": {"missing-fence": "error"},
    "gpu_early_refill.py": {"wgmma-in-flight": "error"},
}


def test_every_example_is_tested():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(FINDINGS)


PRINTED = {
    "clean_matmul.py": r"largest difference from jnp.dot: \d\.\de-0[4-9]",
    "reduction_first.py": r"largest difference from jnp.dot: \d\.\de-0[4-9]",
    "offset_index_map.py": r"wrong elements: 4096 of 8192",
    "softmax.py": r"equals jax.nn.softmax: True\nunder vmap too: True",
    "look_inside.py": r"all programs:\nprogram 0: .*(\n.*){3}\nonly program 2:\nprogram 2: .* up to 3007.50",
    "gather_rows.py": r"equals x\[rows\]: True",
    "flash_attention.py": r"(float32 .* error \d[eE]-0[67]\n){4}(bfloat16 .* error \de-03(\n|$)){4}",
    "flash_attention_gpu.py": r"(full  |causal) largest.*(\n.*)*",
    "hopper_matmul.py": r"largest difference from NumPy in float64: \de-0[56]",
    "gpu_ping_pong.py": r"largest difference from NumPy in float64: \de-0[23]",
    "gpu_missing_fence.py": r"",  # a check ends them
    "gpu_early_refill.py": r"",
    "native.py": r"interpreted +\d+\.\d\d ms\nnative +\d+\.\d\d ms\njnp +\d+\.\d\d ms",
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_an_example_prints_and_a_check_finds(name, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    status = main(["--json", f"examples/{name}"])
    out, err = capfd.readouterr()  # with --json, what the program prints is in err
    found = json.loads(out)
    assert found["failure"] is None, err
    assert re.fullmatch(PRINTED[name], err.rstrip())
    assert {f["kind"]: f["level"] for call in found["calls"] for f in call["findings"]} == FINDINGS[name]
    assert status == int("error" in FINDINGS[name].values())


def test_the_documentation_shows_what_a_simulated_gpu_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--target", "gpu:h100", "examples/gpu_missing_fence.py"]) == 1
    shown = re.findall(r"^```text\n(  target +gpu:h100.*?)^```$", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert len(shown) == 1 and shown[0] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpu_missing_fence.py", "gpu_early_refill.py"])
def test_the_values_of_a_wrong_example_are_right(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with plgpu.force_gpu_interpret_mode():
        runpy.run_path(f"examples/{name}", run_name="__main__")
    assert capsys.readouterr().out == "right values: True\n"


def test_flash_attention_by_blocks_that_do_not_divide_the_length_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from flash_attention import flash_attention, operands  # pyright: ignore[reportMissingImports]

    with pytest.raises(ValueError, match="length 192 is not a multiple of both block sizes, 128 and 96"):
        flash_attention(*operands(1, 1, 192, 32, "float32"), block_q=128, block_k=96, interpret=True)


@pytest.mark.parametrize("blocks", [(32, 96), (96, 32), (192, 192)])
def test_causal_flash_attention_with_unequal_blocks(blocks, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from flash_attention import NATIVE, exact, flash_attention, operands  # pyright: ignore[reportMissingImports]

    args = operands(1, 2, 192, 32, "float32")
    result = flash_attention(*args, causal=True, block_q=blocks[0], block_k=blocks[1], **NATIVE)
    np.testing.assert_allclose(result, exact(*args, True), atol=3e-6)


def test_an_example_runs_on_its_own():
    program = [sys.executable, "examples/gather_rows.py"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "equals x[rows]: True\n", done.stderr


def test_the_documentation_shows_what_is_printed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    main(["examples/offset_index_map.py"])
    own, _, report = capsys.readouterr().out.partition("\n")
    shown, *_ = re.findall(r"^```text\n(.*?)^```$", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert own == "wrong elements: 4096 of 8192" and report == shown
