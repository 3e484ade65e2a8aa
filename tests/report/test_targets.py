"""`palladion check --target`: each call compiled too; and reports that are wide, or cannot be written."""

import json
import os
import re
import subprocess
import sys

import pytest

from palladion.compiler.cpu import target
from palladion.report.command import main

HEADER = """
import jax, jax.numpy as jnp
import palladion as pl

def call(kernel, **options):
    x = jnp.ones((32, 128))
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, shape, grid=(4,), in_specs=[spec], out_specs=spec, **options)(x)

def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

def refused(x_ref, o_ref):
    o_ref[:, :8] = jax.lax.linalg.cholesky(x_ref[:, :8])
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a program and gives its name, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def write(body):
        (tmp_path / "program.py").write_text(HEADER + body + "\n")
        return "program.py"

    return write


def test_a_call_is_compiled_for_a_target(program, capsys):
    assert main(["--target", "cpu", program("call(double)")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  target +cpu$", out, re.M) and re.search(r"^  code +[\d,]+ B$", out, re.M)
    assert f"{8 * target.host().vector_bytes} bits" in out
    assert "cpu  axis 0 (4 programs) in parallel: its programs write different blocks" in out
    assert re.search(r"loop of [\d,]+ in vectors \(program.py:12\)", out)
    assert max(map(len, out.splitlines())) <= 80


def test_without_a_target_nothing_is_compiled(program, capfd):
    assert main(["--json", program("call(double)")]) == 0
    assert json.loads(capfd.readouterr().out)["calls"][0]["compiled"] == []


def test_json_of_a_target(program, capfd):
    assert main(["--target=cpu", "--target", "cpu", "--json", program("call(double); call(refused)")]) == 1
    good, bad = json.loads(capfd.readouterr().out)["calls"]
    (compiled,) = good["compiled"]
    assert set(compiled) == {"target", "refusal", "facts", "axes", "loops"} and compiled["refusal"] is None
    assert compiled["facts"]["vector_bits"] == 8 * target.host().vector_bytes and compiled["facts"]["code_bytes"] > 0
    (axis,) = compiled["axes"]
    assert (axis["index"], axis["size"], axis["parallel"], axis["reason"]) == (0, 4, True, "independent")
    assert compiled["loops"][0]["vectorised"] and compiled["loops"][0]["where"] == ["program.py:12 (double)"]
    (refused,) = bad["compiled"]
    assert refused["refusal"]["type"] == "UnsupportedPrimitive" and refused["facts"] == {}
    assert refused["refusal"]["where"] == "program.py:15 (refused)"


def test_a_refusal_is_shown_with_its_line_and_is_the_exit_status(program, capsys):
    assert main(["--target", "cpu", program("call(refused)")]) == 1
    out = capsys.readouterr().out
    assert "accepted  no" in out and "at: program.py:15 (refused)" in out
    assert out.splitlines()[-1] == "1 kernel call in program.py: no findings; 1 not compiled for cpu"


def test_an_eager_call_is_refused_in_words(program, capsys):
    assert main(["--target", "cpu", program("call(double, interpret=pl.EagerParams())")]) == 1
    assert "is not traced, so there is nothing to compile" in " ".join(capsys.readouterr().out.split())


def test_long_names_are_not_broken(program, capsys):
    name = "a_ref_whose_name_is_longer_than_any_column_of_a_table_could_be"
    main([program(f"def k({name}, o_ref): o_ref[...] = {name}[...]\ncall(k)")])
    out = capsys.readouterr().out
    assert f"  in  {name}\n      f32[32,128]  block (8, 128)  default  on chip 2 x 4.0 KiB  copies 4\n" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_report_that_cannot_be_written(program, option):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "palladion", "check", *option, program("call(double)")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "palladion check: the report cannot be written: No space left on device.\n"
