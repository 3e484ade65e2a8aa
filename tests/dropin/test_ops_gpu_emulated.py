"""The Mosaic GPU kernels that ship with JAX, compiled by Palladion and run on the emulator: right values.

The calls are those of `test_ops_gpu.py` and `test_ops_gpu_blackwell.py`, where they run on the simulated GPU.
"""

import importlib.util
import types

import pytest

from dropin import test_ops_gpu as hopper
from dropin import test_ops_gpu_blackwell as blackwell
from dropin.gpu_ops import M, N, close, exact, ops
from palladion import mosaic_gpu as plgpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)


@pytest.fixture(scope="module", autouse=True)
def emulated(installed):
    """Calls run on the emulator; what the simulator would warn of does not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops("attention"), "cuda_versions", types.SimpleNamespace(cuda_runtime_get_version=lambda: 12091))
        for module in (hopper, blackwell):
            patch.setattr(module, "warned", lambda call, *kinds: call())
        yield


def on(arch, **given):
    return plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch=arch, num_sms=4, **given))


CALLS = {
    "hopper_matmul": lambda: hopper.hopper(),
    "hopper_matmul_m": lambda: hopper.hopper(wg=M),
    "hopper_matmul_cluster": lambda: hopper.hopper(cluster=N),
    **{f"hopper_matmul_{k}": lambda c=c: hopper.hopper(**c) for k, c in enumerate(hopper.HOPPER)},
    **{f"mixed_matmul_{k}": lambda c=c: hopper.mixed(**c) for k, c in enumerate(hopper.MIXED)},
    **{f"ragged_dot_{k}": lambda c=c: hopper.ragged(**c) for k, c in enumerate(hopper.RAGGED)},
    **{f"transposed_ragged_dot_{k}": lambda c=c: hopper.transposed(**c) for k, c in enumerate(hopper.TRANSPOSED)},
    **{f"attention_{k}": lambda c=c: hopper.attention_forward(**c) for k, c in enumerate(hopper.FORWARD)},
    **{f"attention_backward_{k}": lambda c=c: hopper.attention_backward(**c) for k, c in enumerate(hopper.BACKWARD)},
}


@pytest.mark.parametrize("name", CALLS)
def test_hopper(name):
    with on("sm_90a"):
        CALLS[name]()


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("config", blackwell.BLACKWELL, ids=str)
def test_blackwell_matmul(config, collective):
    """Its last stores are mended (see test_ops_gpu_blackwell.py): the block must not end while they read its memory."""
    module = blackwell.mended("blackwell_matmul", blackwell.STORES_END)
    a, b, call = blackwell.blackwell(module, collective, **config)
    with on("sm_100a"):
        close(call(), exact(a) @ exact(b))


@pytest.mark.parametrize("config", blackwell.RAGGED, ids=str)
def test_blackwell_ragged_dot(config):
    call, want = blackwell.blackwell_ragged(ops("blackwell_ragged_dot"), **config)
    with on("sm_100a"):
        close(call(), want)
