"""README.md and docs/guide.md tell the truth: their code prints what they say, the table of targets holds."""

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from repo.tree import ROOT

README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
TPU = (ROOT / "docs" / "tpu_simulator.md").read_text()
GPU = (ROOT / "docs" / "gpu_simulator.md").read_text()
NAMESPACES = {"pltpu": "tpu", "pltriton": "triton", "plgpu": "mosaic_gpu", "plcpu": "cpu"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_program(source: str, folder) -> str:
    program = folder / "program.py"
    program.write_text(source)
    run = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_readmes_example_prints_what_it_says(tmp_path):
    (program,), (output,) = blocks(README, "python"), blocks(README, "text")
    assert len(program.splitlines()) <= 15
    assert run_program(program, tmp_path) == output


def test_the_guides_code_prints_what_it_says(tmp_path):
    """The guide's python blocks are one program; its text blocks are, in order, what that program prints."""
    assert run_program("\n".join(blocks(GUIDE, "python")), tmp_path) == "".join(blocks(GUIDE, "text"))


def test_the_tpu_pages_code_prints_what_it_says(tmp_path):
    assert run_program("\n".join(blocks(TPU, "python")), tmp_path) == "".join(blocks(TPU, "text"))


def test_the_gpu_pages_code_prints_what_it_says(tmp_path):
    assert run_program("\n".join(blocks(GPU, "python")), tmp_path) == "".join(blocks(GPU, "text"))


def test_setting_up_takes_two_commands():
    section = README[README.index("## Set up") : README.index("## A kernel")]
    assert re.findall(r"^    (\S.*?)\s+#", section, re.MULTILINE) == ["./dev demo", "./dev test"]


def test_links_lead_somewhere():
    pages = {"README.md": README, "docs/guide.md": GUIDE, "docs/tpu_simulator.md": TPU, "docs/gpu_simulator.md": GPU}
    for name, text in pages.items():
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / name).parent / link).exists(), f"{name} links to {link}"


def targets() -> list[tuple[str, str]]:
    """(how to ask for it, state) for each row of the table of targets."""
    rows = re.findall(r"^\| .* \| `(.+?)` \| (.+?) \|$", README, re.MULTILINE)
    assert len(rows) >= 10
    return rows


def ask_in_a_call(options: str) -> None:
    """Runs a kernel call with `options` as the README writes them."""
    names = {}
    for short, module in NAMESPACES.items():
        if f"{short}." in options:
            names[short] = importlib.import_module(f"palladion.{module}")
    keywords = eval(f"dict({options})", {"pl": pl, **names})

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    x = jnp.arange(8.0)
    out = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), **keywords)(x)
    np.testing.assert_array_equal(out, np.arange(8.0) * 2)


def ask_by_command(command: str, folder, *, compiles: bool = False) -> None:
    """Runs a command of the README; one that `compiles` may also say which extra it lacks."""
    program = folder / "program.py"
    program.write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.experimental import pallas as pl\n"
        "def kernel(x_ref, o_ref): o_ref[...] = x_ref[...]\n"
        "x = jnp.ones((8, 128))\n"
        "out = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)\n"
        "assert pl.pallas_call.__module__.startswith('palladion'), pl\n"
    )
    words = command.replace("FILE", str(program)).split()
    assert words[0] == "palladion"
    run = subprocess.run([sys.executable, "-m", *words], cwd=folder, check=not compiles, capture_output=True, text=True)
    output = " ".join((run.stdout + run.stderr).split())
    assert run.returncode == 0 or "pip install 'palladion[" in output, run.stdout + run.stderr


@pytest.mark.parametrize(("asked", "state"), targets(), ids=[asked for asked, _ in targets()])
def test_the_table_of_targets_holds(asked, state, tmp_path):
    """What is said to work works; what is said to be absent says so in one sentence, or has no name."""
    compiles = state.startswith("compiles; nothing has run on a ")
    assert compiles or state in ("works", "not yet")
    refusals = () if compiles or state == "works" else (NotImplementedError, ValueError, ImportError, AttributeError)
    with contextlib.ExitStack() as stack:
        refusal = stack.enter_context(pytest.raises(refusals)) if refusals else None
        if asked.startswith("palladion "):
            ask_by_command(asked, tmp_path, compiles=compiles)
        elif "=" in asked:
            if "EmulateParams" in asked and importlib.util.find_spec("cuda.bindings") is None:
                pytest.skip("compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'")
            ask_in_a_call(asked)
        else:
            assert getattr(pl, asked.removeprefix("pl."))
    if refusal is not None:
        first = str(refusal.value).splitlines()[0]
        assert first.endswith((".", "'")) and len(first.split()) >= 4, f"not a sentence: {first!r}"


def test_the_tests_run_on_four_cpu_devices():
    assert os.environ["JAX_PLATFORMS"] != "cpu" or jax.device_count() >= 4
