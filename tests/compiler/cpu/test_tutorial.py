"""The tutorial with native code in place of `interpret=True`: its own assertions compare with NumPy float64."""

import os
import re
import subprocess
import sys

import pytest

from repo.tree import ROOT

CELLS = ROOT.parent / "shared" / "conformance" / "run_tutorial.py"
# They ask for machines that are not built, or (237) look at the program that XLA makes of the reference interpreter.
NOT_NATIVE = {114, 237, 1203, 1247}

PROGRAM = """
import importlib, runpy, sys
from palladion import executors

lookup = executors.for_lowering

def native(platform, interpret, *rest):
    if interpret is True and platform == "cpu":
        return importlib.import_module(executors.NATIVE_CPU)
    return lookup(platform, interpret, *rest)

executors.for_lowering = native
sys.argv = [sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(not CELLS.exists(), reason="the tutorial's cells are not beside the checkout")
def test_every_cell_passes_natively():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CELLS)],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    verdicts = re.findall(r"^line +(\d+) .* s  (pass|FAIL)", run.stdout, re.MULTILINE)
    assert len(verdicts) == 61, run.stdout + run.stderr
    assert {int(line) for line, verdict in verdicts if verdict == "FAIL"} <= NOT_NATIVE, run.stdout
