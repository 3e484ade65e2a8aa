"""The kernels written for the simulated GPU, compiled and run on the emulator, give what NumPy gives in float64."""

import importlib.util

import pytest

from palladion import mosaic_gpu as plgpu
from simulator.gpu.kernels import CORPUS, off_by

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)
NAMES = [name for name, case in CORPUS.items() if case.devices == 1]


@pytest.mark.parametrize("name", NAMES)
def test_kernel(name):
    case = CORPUS[name]
    with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch=case.arch)):
        actual, expected, tolerance = case.run()
    assert off_by(actual, expected) <= max(tolerance, 1e-6)
