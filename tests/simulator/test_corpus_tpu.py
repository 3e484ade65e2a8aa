"""The corpus on the simulated TPU: the same values as everywhere, but where a TPU differs, and then what it says."""

import jax
import pytest

from corpus import CASES, check
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

# What is right in the plain meaning of kernels and wrong on a TPU.
DIFFERS = {
    "column_sum_reduction_first": (KernelFinding, "Revisited block"),
    "block_comes_back": (KernelFinding, "Revisited block"),
    "memory_space_any": (ValueError, "lies in HBM"),
    "alias_partial_update": (ValueError, "lies in HBM"),
    "alias_recurrence": (ValueError, "lies in HBM"),
    "read_out_of_range": (KernelFinding, "Out of bounds read"),
    "write_out_of_range": (KernelFinding, "Out of bounds write"),
    "offsets_for_block_numbers": (KernelFinding, "Out of bounds block"),
    "clamped_output_block": (KernelFinding, "Out of bounds block"),
}
SAME = [name for name in CASES if name not in DIFFERS]

pytestmark = pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")


@pytest.mark.parametrize("name", SAME)
def test_values(name):
    check(CASES[name], interpret=pltpu.InterpretParams())


@pytest.mark.parametrize("name", SAME[::2])
def test_values_with_race_detection(name):
    check(CASES[name], interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2), seed=1)


@pytest.mark.parametrize("name", SAME[::3])
def test_values_under_jit(name):
    check(CASES[name], interpret=pltpu.InterpretParams(), transform=jax.jit)


@pytest.mark.parametrize("name", DIFFERS)
def test_where_a_tpu_differs(name):
    error, words = DIFFERS[name]
    with pytest.raises(error, match=words):
        check(CASES[name], interpret=pltpu.InterpretParams())
