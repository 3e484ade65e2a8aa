"""libtpu compiles kernels that were not written for these tests: those of the simulator's tests (attention, paged and
by tables, grouped and pipelined products, collectives on four devices), and those that ship with JAX.

Their own tests are run, on the simulated TPU as they stand, and every kernel call that they make is compiled.
"""

import contextlib
import importlib

import jax
import pytest

from palladion import dropin
from palladion.compiler.tpu import aot
from palladion.compiler.tpu.topologies import CHIPS
from palladion.language import primitive

pytestmark = [
    pytest.mark.skipif(not aot.is_installed(), reason="libtpu is not installed: pip install 'palladion[tpu]'"),
    pytest.mark.filterwarnings("ignore"),
]

# What their shapes, which are small, or their parameters rule out on the chip, in libtpu's words or ours.
SMALL = "contiguous inner slice in the DMA transfer must be divisible by 512 bytes|last two dimensions of your block"
NO_BARRIER = "collective_id has to be unspecified or None when not using a custom"
KERNELS = {
    "simulator.test_kernels": {
        "test_attention_with_a_table_of_blocks": SMALL,
        "test_flash_attention_by_a_loop_over_keys": None,
        "test_grouped_matmul": None,
        "test_block_sparse_matmul": None,
        "test_paged_attention": None,
        "test_matmul_by_a_pipeline": {"v5e": SMALL},
        "test_embedding_by_copies_of_rows": None,
    },
    "simulator.test_distributed": {
        "test_ring_all_gather": None,
        "test_reduce_scatter": None,
        "test_all_reduce": None,
        "test_collective_matmul": None,
        "test_logical_ids_and_a_mesh_of_two_axes": NO_BARRIER,
        "test_many_calls_one_after_the_other": None,
    },
    "dropin.test_ops_simulated_tpu": {
        "test_matmul": None,
        "test_flash_attention_backward": None,
        "test_splash_attention_backward": None,
        "test_grouped_matmul": None,
        "test_paged_attention": None,
        "test_ragged_paged_attention": None,
        "test_all_gather": None,
        "test_random_bits": None,
        "test_philox_and_the_example": None,
    },
}
FIRST = {"schedule": None, "cores": 1}  # values for parameters of the tests
QUICK = ["test_flash_attention_by_a_loop_over_keys", "test_paged_attention", "test_ring_all_gather"]
ALL = [(module, name) for module, tests in KERNELS.items() for name in tests]


def calls_of(module, name):
    """The kernel calls that a test makes: parameters, and the mesh of devices around each."""
    found = {}

    def observer(_, params):
        mesh = jax.sharding.get_abstract_mesh()
        axes = {a: mesh.shape[a] for a in mesh.axis_names} if mesh.manual_axes else None
        found.setdefault((id(params["jaxpr"]), str(axes)), (params, axes))

    test = getattr(importlib.import_module(module), name)
    arguments = {k: v for k, v in FIRST.items() if k in test.__code__.co_varnames[: test.__code__.co_argcount]}
    with primitive.observing(observer):
        test(**arguments)
    assert found, "the test makes no kernel call"
    return list(found.values())


def compile_calls(module, name, chip):
    shipped = module.startswith("dropin.")
    if shipped:
        dropin.install()
    try:
        with (
            importlib.import_module("palladion.tpu").force_tpu_interpret_mode() if shipped else contextlib.nullcontext()
        ):
            calls = calls_of(module, name)
    finally:
        if shipped:
            dropin.uninstall()
    for params, mesh in calls:
        lowered = aot.lower(params, mesh)
        aot.compile(lowered, CHIPS[chip].topology(lowered.devices))


def check(module, name, chip):
    refusal = KERNELS[module][name]
    refusal = refusal.get(chip) if isinstance(refusal, dict) else refusal
    if refusal is None:
        compile_calls(module, name, chip)
    else:
        with pytest.raises(Exception, match=refusal):
            compile_calls(module, name, chip)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in ALL if n in QUICK])
def test_kernels(module, name):
    check(module, name, "v5e")


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(("module", "name"), ALL)
def test_every_kernel(module, name, chip):
    check(module, name, chip)
