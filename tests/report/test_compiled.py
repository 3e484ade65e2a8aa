"""The table of targets: as wide as the console, one for each family where all do not fit, and nothing said twice."""

import io
import json

import jax
import pytest
from rich.console import Console

from palladion.compiler.reports import CompiledCall, Fact, Refusal, Remark
from palladion.compiler.tpu import aot
from palladion.report.command import main
from palladion.report.compiled import print_compiled


def call(target, *facts, refusal=None, remarks=()):
    facts = tuple(Fact(label, label, text, text) for label, text in facts)
    return CompiledCall(target, "kernel", facts=facts, refusal=refusal, remarks=remarks)


def printed(*calls, width=80):
    out = io.StringIO()
    print_compiled(Console(file=out, width=width, highlight=False), calls)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_targets_share_rows_of_one_table():
    lines = printed(
        call("cpu", ("code", "1 KiB"), ("LLVM", "2 ms")), call("tpu:v5e", ("code", "3 KiB"), ("VMEM", "4 B"))
    )
    assert lines[:4] == ["  target  cpu    tpu:v5e", "  code    1 KiB  3 KiB", "  LLVM    2 ms", "  VMEM           4 B"]


def test_where_they_do_not_fit_each_family_has_a_table():
    tpus = [call(f"tpu:v{n}", ("VMEM", "16.0 MiB")) for n in "456"]
    lines = printed(tpus[0], call("cpu", ("threads", "1 (too little work for more)")), *tpus[1:], width=48)
    tables = [line.split()[1:] for line in lines if line.startswith("  target")]
    assert tables == [["tpu:v4", "tpu:v5", "tpu:v6"], ["cpu"]]
    assert max(map(len, lines)) <= 48 and not any("…" in line for line in lines)
    one = printed(tpus[0], call("cpu", ("threads", "1 (too little work for more)")), *tpus[1:], width=80)
    assert [line.split()[1:] for line in one if line.startswith("  target")] == [["tpu:v4", "cpu", "tpu:v5", "tpu:v6"]]


def test_what_several_targets_say_is_said_once():
    refusal = Refusal("UnsupportedPrimitive", "No cholesky here.\n  at: a.py:3 (k)\n  fix: another")
    other = Refusal("VmemOverflow", "Too much.")
    lines = printed(call("tpu:v4", refusal=refusal), call("cpu", refusal=other), call("tpu:v5e", refusal=refusal))
    assert lines.count("  tpu:v4, tpu:v5e  UnsupportedPrimitive: No cholesky here.") == 1
    assert lines.count("      at: a.py:3 (k)") == 1 and "  cpu  VmemOverflow: Too much." in lines
    remark = Remark("axis", 4, 0, True, "parallel", "")
    lines = printed(call("triton:sm_80", remarks=(remark,)), call("triton:sm_90", remarks=(remark,)))
    assert lines[-3:-1] == ["  triton:sm_80, triton:sm_90", "        axis 0 (4 programs) in parallel"]
    assert printed(call("a", remarks=(remark,)))[-2] == "  a  axis 0 (4 programs) in parallel"


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import palladion as pl

def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

def refused(x_ref, o_ref):
    o_ref[...] = jax.lax.linalg.cholesky(x_ref[...])

def numbered(x_ref, o_ref):
    o_ref[...] = x_ref[...] + jax.lax.axis_index("x")

x = jnp.ones((128, 128))
for kernel in (double, refused):
    pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
each = pl.pallas_call(numbered, jax.ShapeDtypeStruct((64, 128), jnp.int32))
jax.shard_map(each, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x.astype(jnp.int32))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "program.py").write_text(PROGRAM)
    return "program.py"


@pytest.mark.skipif(not aot.is_installed(), reason="compiling for TPU needs libtpu: pip install 'palladion[tpu]'")
@pytest.mark.skipif(jax.device_count() < 2, reason="a mesh of two devices is needed")
def test_a_program_is_compiled_for_several_tpus(program, capfd):
    assert main(["--target", "tpu:v5e", "--target=tpu:v6e", "--target", "cpu", program]) == 1
    out = capfd.readouterr().out
    assert "accepted    yes" in out and "tpu:v5e, tpu:v6e  UnsupportedPrimitive: The operation `cholesky`" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["--target", "tpu:v5e", "--json", program]) == 1
    calls = json.loads(capfd.readouterr().out)["calls"]
    good, bad, numbered = (c["compiled"][0] for c in calls)
    assert good["target"] == "tpu:v5e" and good["refusal"] is None and good["facts"]["vmem_bytes"] == 2 * 128 * 128 * 4
    assert bad["refusal"]["where"] == "program.py:10 (refused)"
    assert numbered["refusal"] is None  # in its mesh: `axis_index` means something


def test_a_compiler_that_is_not_installed_is_an_error_of_the_command_line(program, capsys, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    assert main(["--target", "tpu:v5e", program]) == 2
    said = capsys.readouterr().err
    assert "needs the package libtpu, which is not installed" in said and "pip install 'palladion[tpu]'" in said
    assert main(["--target", "tpu:v9", program]) == 2
    assert "there is no target tpu:v9; the targets are: cpu, tpu:v4i" in capsys.readouterr().err
