"""The fragments of the Mosaic GPU reference run without a finding, and give what NumPy gives, in both spellings."""

import warnings

import pytest

from palladion import mosaic_gpu as plgpu
from palladion.errors import UnsupportedPrimitive
from simulator.gpu.fragments import FRAGMENTS, SPELLINGS
from simulator.gpu.kernels import off_by


@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragment(name, spelling):
    f = FRAGMENTS[name]
    params = plgpu.InterpretGPUParams(detect_races=True, arch=f.arch, **f.options)
    with warnings.catch_warnings(), plgpu.force_gpu_interpret_mode(params):
        warnings.simplefilter("error")
        results = f.run(spelling)
    for actual, expected, tolerance in results if isinstance(results, list) else [results]:
        assert off_by(actual, expected) <= tolerance


def test_inline_mgpu_is_refused():
    """Section "Inline Mosaic GPU" is a TODO of the reference."""

    @plgpu.kernel(out_shape=())
    def kernel():
        plgpu.inline_mgpu()(lambda: None)()

    with (
        pytest.raises(UnsupportedPrimitive, match="inline_mgpu"),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
    ):
        kernel()
