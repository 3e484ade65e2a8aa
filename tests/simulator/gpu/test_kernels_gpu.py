"""The kernels of the GPU corpus give what NumPy gives in float64, without a finding or a warning, on every schedule."""

import warnings

import jax
import pytest

from palladion import mosaic_gpu as plgpu
from simulator.gpu.kernels import CORPUS, off_by

RUNS = [(name, schedule) for name, case in CORPUS.items() for schedule in ("lazy", "eager", *(0, 1) * case.small)]


@pytest.mark.parametrize(("name", "schedule"), RUNS)
def test_kernel(name, schedule):
    case = CORPUS[name]
    params = plgpu.InterpretGPUParams(detect_races=True, arch=case.arch, schedule=schedule, **case.options)
    with warnings.catch_warnings(), plgpu.force_gpu_interpret_mode(params):
        warnings.simplefilter("error")
        actual, expected, tolerance = jax.block_until_ready(case.run())  # warnings of a callback come in here
    assert off_by(actual, expected) <= tolerance
