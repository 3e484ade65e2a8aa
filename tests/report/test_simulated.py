"""`palladion check --target gpu:…`: calls run on simulated GPUs, and what comes of them is in the report."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from palladion import config
from palladion.report.command import main

HEADER = """
import jax, jax.numpy as jnp
from jax import lax
import palladion as pl
from palladion import mosaic_gpu as plgpu, tpu as pltpu, triton as pltriton

x = jnp.ones((64, 128))
rows = pl.BlockSpec((16, 128), lambda i: (i, 0))

def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

def blocks(kernel=double, **options):
    return pl.pallas_call(kernel, x, grid=(4,), in_specs=[rows], out_specs=rows, **options)

def through_smem(x_gmem, o_gmem, smem):
    smem[...] = x_gmem[...] * 2
    if COMMIT:
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, o_gmem)
    plgpu.wait_smem_to_gmem(0)

COMMIT = True
def stored(**options):
    return plgpu.kernel(through_smem, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype)], **options)
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capfd):
    """Checks a program: (exit status, document, its standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(body, *targets, status=0):
        (tmp_path / "program.py").write_text(HEADER + textwrap.dedent(body) + "\n")
        words = [word for target in targets for word in ("--target", target)]
        found = main(["--json", *words, "program.py"])
        out, err = capfd.readouterr()
        assert found == status, err
        assert config.get("interpret") is None
        return json.loads(out)

    return run


def columns(document):
    """For each call, {target: facts, or the type of the refusal}."""
    return [{c["target"]: c["refusal"]["type"] if c["refusal"] else c["facts"] for c in call["compiled"]}
            for call in document["calls"]]  # fmt: skip


def kinds(document):
    return [[(f["kind"], f["level"]) for f in call["findings"]] for call in document["calls"]]


def test_a_call_runs_there_and_the_program_gets_its_values(check):
    document = check("assert (blocks()(x) == 2).all() and (stored()(x) == 2).all()", "gpu:h100")
    blocks, kernel = columns(document)
    assert blocks["gpu:h100"]["findings"] == kernel["gpu:h100"]["findings"] == 0
    assert kernel["gpu:h100"]["smem_bytes"] == 64 * 128 * 4 and kernel["gpu:h100"]["schedules"] == 1
    assert 1e-7 < kernel["gpu:h100"]["simulated_seconds"] < 1e-4
    assert "tmem_columns" not in kernel["gpu:h100"]


def test_jit_vmap_and_repetition(check):
    body = """
    f = blocks()
    for _ in range(2):
        assert (jax.jit(f)(x) == 2).all()
    assert (jax.vmap(f)(jnp.stack([x, x])) == 2).all()
    assert (f(x) == 2).all()
    """
    document = check(body, "gpu:h100")
    assert [facts["gpu:h100"]["schedules"] for facts in columns(document)] == [4]


def test_devices_meet(check):
    body = """
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("d")
    call = pl.pallas_call(double, jax.ShapeDtypeStruct((32, 128), x.dtype))
    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    assert (f(x) == 2).all()
    """
    assert columns(check(body, "gpu:h100"))[0]["gpu:h100"]["schedules"] == 1


@pytest.mark.parametrize("call", ["stored()(x)", "jax.jit(stored())(x)"])
def test_an_error_ends_the_program(check, call):
    document = check(f"blocks()(x); COMMIT = False\n{call}; raise RuntimeError", "gpu:h100", status=1)
    assert kinds(document) == [[], [("missing-fence", "error")]]
    assert columns(document)[1]["gpu:h100"]["findings"] == 1
    assert document["failure"] is None
    (finding,) = document["calls"][1]["findings"]
    assert "program.py:" in finding["where"] and "commit_smem" in finding["hint"]


def test_a_program_that_goes_on_after_an_error(check):
    body = """
    COMMIT = False
    try:
        stored()(x)
    except Exception:
        COMMIT = True
    stored()(x)
    """
    document = check(body, "gpu:h100", status=1)
    assert kinds(document) == [[("missing-fence", "error")], []]


def test_warnings_are_in_the_report(check):
    body = """
    def kernel(x_gmem, o_gmem, smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.barrier_arrive(barrier)  # nobody waits for this
        o_gmem[...] = smem[...]
    for _ in range(2):
        plgpu.kernel(kernel, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])(x)
    """
    document = check(body, "gpu:h100", "gpu:b200")
    assert kinds(document) == [[("barrier-unwaited-completion", "warning")]]
    facts = columns(document)[0]
    assert facts["gpu:h100"]["schedules"] == facts["gpu:b200"]["schedules"] == 2


WGMMA = """
swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
def kernel(a, o, smem, barrier):
    plgpu.copy_gmem_to_smem(a, smem, barrier)
    plgpu.barrier_wait(barrier)
    def product(acc):
        plgpu.wgmma(acc, smem, smem)
        return acc[...]
    o[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
a = jnp.ones((64, 64), jnp.float16)
product = plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
                       scratch_types=[plgpu.SMEM((64, 64), jnp.float16, transforms=swizzled), plgpu.Barrier()])
assert (product(a) == 64).all()
blocks()(x)
"""


def test_several_gpus_one_of_which_refuses(check):
    document = check(WGMMA, "gpu:b200", "gpu:h100", "cpu", status=1)
    product, blocks = columns(document)
    assert product["gpu:b200"] == "NotImplementedError" and product["gpu:h100"]["findings"] == 0
    assert product["cpu"] == "UnsupportedPrimitive" and blocks["cpu"]["code_bytes"] > 0
    assert blocks["gpu:b200"]["findings"] == blocks["gpu:h100"]["findings"] == 0
    refused = document["calls"][0]["compiled"][0]["refusal"]
    assert "wgmma is an operation of Hopper" in refused["message"] and "program.py:" in refused["message"]


def test_a_call_that_no_gpu_takes_still_runs(check):
    product, blocks = columns(check(WGMMA, "gpu:b200", status=1))
    assert product["gpu:b200"] == "NotImplementedError" and blocks["gpu:b200"]["findings"] == 0


def test_without_a_target_kernels_for_gpus_run_and_others_do_not(check):
    document = check(WGMMA)
    assert columns(document) == [{}, {}]
    assert kinds(document) == [[("performance", "note")], []]
    document = check("blocks(); COMMIT = False; stored()(x)", status=1)
    assert kinds(document) == [[("missing-fence", "error")]]


def test_what_only_one_gpu_finds_says_which(check):
    body = """
    def kernel(o, tmem):
        pass
    plgpu.kernel(kernel, out_type=x, scratch_types=[plgpu.TMEM((128, 128), jnp.float32)])()
    """
    document = check(body, "gpu:h100", "gpu:b200", status=1)
    (overflow,) = [f for f in document["calls"][0]["findings"] if f["kind"] == "tmem-overflow"]
    assert overflow["when"].endswith(", on gpu:h100")
    assert columns(document)[0]["gpu:b200"]["tmem_columns"] == 128


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("blocks(interpret=True)(x)", "the call says interpret=True"),
        ("stored(interpret=plgpu.InterpretGPUParams())(x)", "the call says interpret=InterpretGPUParams(…)"),
        ("blocks(compiler_params=pltpu.CompilerParams())(x)", "the call is written for a TPU"),
        ("blocks(compiler_params=pltriton.CompilerParams())(x)", "the call is written for Triton"),
        ("jax.make_jaxpr(blocks())(x)", "jit traced it, and it never ran"),
    ],
)
def test_calls_that_do_not_run_there(check, call, why):
    assert columns(check(call, "gpu:h100")) == [{"gpu:h100": {"not_run": why}}]


def test_cores_of_a_tpu_do_not_run_there(check):
    body = """
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
    try:
        pl.kernel(kernel, x, mesh=mesh)(x)
    except Exception:
        pass
    """
    assert columns(check(body, "gpu:h100"))[0]["gpu:h100"] == {"not_run": "the call is written for a TPU"}


def test_a_sum_over_a_grid_axis_is_a_race(check):
    body = """
    def total(x_ref, o_ref):
        pl.when(pl.program_id(0) == 0)(lambda: o_ref.__setitem__(..., jnp.zeros_like(o_ref)))
        o_ref[...] += x_ref[...]
    pl.pallas_call(total, jax.ShapeDtypeStruct((16, 128), x.dtype), grid=(4,), in_specs=[rows],
                   out_specs=pl.BlockSpec((16, 128), lambda i: (0, 0)))(x)
    """
    document = check(body, "gpu:h100", status=1)
    assert ("race", "error") in kinds(document)[0]
    assert ("race", "error") not in kinds(check(body))[0]


@pytest.mark.parametrize("call", ["stored(interpret={})(x)", "jax.jit(stored(interpret={}))(x)"])
def test_a_program_with_a_simulated_gpu_of_its_own(check, call):
    body = f"COMMIT = False\n{call.format('plgpu.InterpretGPUParams(detect_races=True)')}"
    document = check(body, status=1)
    assert kinds(document) == [[("missing-fence", "error")]] and document["failure"] is None


def test_what_is_printed(tmp_path):
    other = "\ndef other(*refs): double(*refs)\nblocks(other, interpret=True)(x)\n"
    (tmp_path / "program.py").write_text(HEADER + other + "blocks()(x); COMMIT = False; stored()(x)")
    words = ["check", "--target", "gpu:h100", "program.py"]
    run = subprocess.run(
        [sys.executable, "-m", "palladion", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert run.returncode == 1, run.stderr
    assert "\nno grid: 1 block, called once at program.py:" in run.stdout and "\ngrid (4,) = 4 programs," in run.stdout
    second, first, third = run.stdout.split("  target ")[1:]
    assert "findings   none" in first and "SMEM       16.0 KiB a block" in first and "simulated  " in first
    assert "gpu:h100  not run: the call says interpret=True" in second
    assert "findings   1 error" in third and "error  missing-fence\n" in third and "commit_smem()" in third
    assert third.rstrip().endswith("what comes after it was not looked at.")


@pytest.mark.parametrize("name", ["gpu:a100", "gpu:", "gpu"])
def test_unknown_gpus(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("")
    assert main(["--target", name, "program.py"]) == 2
    said = capsys.readouterr().err
    assert f"there is no target {name}; the targets are: cpu, " in said and said.endswith(", gpu:h100, gpu:b200.\n")
