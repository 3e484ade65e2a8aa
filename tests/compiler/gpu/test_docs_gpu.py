"""docs/gpu_compiler.md tells the truth: its program prints what it says, its links and files are there."""

import importlib.util
import re
import subprocess
import sys

import pytest

from repo.tree import ROOT

PAGE = ROOT / "docs" / "gpu_compiler.md"
TEXT = PAGE.read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)
def test_the_pages_code_prints_what_it_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks("python")))
    run = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "".join(blocks("text"))


def test_the_files_that_the_page_names_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert len(named) == 4
    assert all((ROOT / name).exists() for name in named)
