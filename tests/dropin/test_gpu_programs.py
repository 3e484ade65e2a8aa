"""What kernels for GPUs ask JAX for, under the drop-in: modules to import, and a device's number of cores."""

INSTALL = "import palladion.dropin; palladion.dropin.install()\n"

DEVICES = """
import jax, palladion
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import backend

def cores():
    here = [getattr(d, "core_count", None) for d in (jax.devices()[0], backend.get_default_device())]
    assert here[0] == here[1]
    return here[0]

print(cores())
for fields in ({}, dict(arch="sm_90a"), dict(arch="sm_100a"), dict(num_sms=4)):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**fields)):
        print(cores())
print(cores())
with plgpu.force_gpu_interpret_mode():
    palladion.dropin.uninstall()
    print(cores())
"""


def test_a_device_has_the_cores_of_the_simulated_gpu(forks):
    """Only in the GPU interpret mode, and only under the drop-in."""
    ran = forks.python(INSTALL + DEVICES)
    assert ran.lines == ["None", "132", "132", "148", "4", "None", "None"], ran.err


KERNELS = """
import importlib, sys
names = ("hopper_matmul hopper_mixed_type_matmul blackwell_matmul blackwell_ragged_dot ragged_dot "
         "transposed_ragged_dot attention collective_matmul all_gather reduce_scatter").split()
for name in names:
    importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}_mgpu")
own = [m for m in sys.modules if m.startswith(("jax._src.pallas.pallas_call", "jax._src.pallas.primitives"))]
print(len(names), own)
"""


def test_the_kernels_that_ship_with_jax_import(forks):
    assert forks.python(INSTALL + KERNELS).lines == ["10 []"]


def test_they_import_without_absl(forks):
    """JAX's test utilities need absl-py; the kernels import them for nothing."""
    program = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'absl' else find(name, package)\n"
        + INSTALL
        + """
import sys
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu
import jax._src.test_util as jtu
try:
    jtu.JaxTestCase
except AttributeError as error:
    print(str(error).splitlines()[0])
palladion.dropin.uninstall()
print("jax._src.test_util" in sys.modules)
"""
    )
    ran = forks.python(program)
    assert ran.lines == [
        "jax._src.test_util.JaxTestCase needs the package absl-py, which is not installed.",
        "False",
    ], ran.err
