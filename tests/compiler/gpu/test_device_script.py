"""The script for a machine with a GPU (benchmarks/device/mosaic_corpus.py), as far as the emulator takes it."""

import os
import subprocess
import sys

import numpy as np
import pytest

from palladion.compiler.gpu import emulated, nvrtc
from palladion.emulator.driver import EmulatedDriver
from repo.tree import ROOT

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'"
)


def test_both_steps_on_the_emulator():
    run = subprocess.run(
        [sys.executable, "benchmarks/device/mosaic_corpus.py", "--emulate"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=120,
    )  # fmt: skip
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stdout + run.stderr
    assert lines[0] == "corpus: 3 of 3 right"
    assert [line.split(":")[0] for line in lines[1:]] == ["matmul", "attention"]


class Ptx(EmulatedDriver):
    """Stands where `CudaDriver` does."""

    def load_module(self, text):
        return super().load_module(self.programs[text])


def test_the_corpus_goes_through_the_driver_and_wrong_results_are_counted(monkeypatch, capsys):
    from benchmarks.device import mosaic_corpus as script

    driver = Ptx()
    driver.programs = {}
    prepare = script.launch.prepare

    def remember(params, arch=None):
        assert arch == "sm_90a"
        program = prepare(params, arch)
        driver.programs[program.cubin] = program.ptx
        return program

    monkeypatch.setattr(script.launch, "prepare", remember)
    chosen = {name: script.cases("sm_90a")[name] for name in ("hopper_simple", "softmax_rows")}
    with script.on_gpu(driver):
        assert script.run_corpus(chosen) == 0 and len(driver.programs) == 2
        copy = driver.copy_out
        monkeypatch.setattr(driver, "copy_out", lambda *a: np.zeros_like(copy(*a)))
        assert script.run_corpus(chosen) == 2
    assert "corpus: 2 of 2 right\nhopper_simple: AssertionError: off by" in capsys.readouterr().out
    assert emulated._emulate.__module__ == emulated.__name__


def test_a_lost_context_ends_the_corpus(capsys):
    from benchmarks.device import mosaic_corpus as script

    def lost():
        raise script.DriverError("Running the kernel failed: illegal address (CUDA_ERROR_ILLEGAL_ADDRESS).")

    assert script.run_corpus({"a": lambda: None, "b": lost, "c": lambda: None}) == 2
    assert "1 cases have not run" in capsys.readouterr().out


def test_kernels_of_other_architectures_are_left_out():
    from benchmarks.device import mosaic_corpus as script

    assert "blackwell_simple" not in script.cases("sm_90a") and "blackwell_simple" in script.cases(None)
