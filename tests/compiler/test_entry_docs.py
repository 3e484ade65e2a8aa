"""docs/compilers.md tells the truth: its code prints what it says, and its tables hold."""

import importlib.util
import re
import subprocess
import sys

import pytest

from palladion.compiler import entry
from palladion.compiler.tpu import aot
from repo.tree import ROOT

PAGE = ROOT / "docs" / "compilers.md"
TEXT = PAGE.read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(
    not aot.is_installed() or importlib.util.find_spec("triton") is None,
    reason="the page compiles for TPU and GPU: pip install 'palladion[tpu,triton]'",
)
def test_the_pages_code_prints_what_it_says(tmp_path):
    """Its python blocks are one program; its text blocks are, in order, what that program prints."""
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks("python")))
    run = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "".join(blocks("text"))


def test_the_page_names_every_target():
    table = TEXT[TEXT.index("| target |") : TEXT.index("`palladion check")]
    assert all(f"`{t}`" in table or f"`{t.partition(':')[2]}`" in table for t in entry.TARGETS)


def test_the_page_names_every_refusal():
    from palladion.compiler import child
    from palladion.compiler.tpu import refusals

    kinds = [c for c in vars(refusals).values() if isinstance(c, type) and issubclass(c, refusals.TpuRefusal)]
    deaths = [c for c in child.CompilerFailure.__subclasses__() if c is not child.CompilerError]
    assert len(kinds) > 4 and len(deaths) == 4
    for kind in [*kinds, *deaths]:
        assert kind is refusals.TpuRefusal or f"`{kind.__name__}`" in TEXT


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT):
        assert (PAGE.parent / link).exists(), link
