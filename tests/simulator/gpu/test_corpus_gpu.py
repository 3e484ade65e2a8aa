"""The corpus of block kernels on the simulated GPU: the same values as everywhere, or why not."""

import jax
import pytest

from corpus import CASES, check
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding

# Programs of a grid are CUDA blocks that run at the same time: two that store one block of an output race, whether they
# accumulate in it or each write a part. Along sequential axes (see below) they are right.
RACES = {
    "online_logsumexp": 2,
    "column_sum_masked": 2,
    "column_sum_reduction_first": None,  # other blocks in between: it is wrong along sequential axes, too
    "sum_of_everything": 2,
    "histogram": 1,
    "matmul_accumulating_output": 3,
    "matmul_bf16_scratch": 3,
    "matmul_ragged": 3,
    "matmul_int8": 3,
    "flash_attention": 3,
    "whole_output_in_a_grid": 1,
    "default_index_map": 1,
    "dynamic_grid_reduction": 1,
    "last_visit_stays": 2,
    "block_comes_back": None,
    "outputs_of_two_kinds": 1,
    "prefetch_with_scratch": 2,
    "scratch_tuple": 1,
    "nested_operands": 1,
}
# Each block has scratch of its own, so that programs cannot hand anything on: the first read is of fresh memory.
CARRIES = {"cumsum_with_carry": 1, "order_of_programs": 3, "scratch_dict": 1}
# TMA fills what a block has outside the array with zeros; the corpus expects the interpreter's NaN.
ZEROS = ("ragged_sum_unmasked", "element_padding", "element_past_the_end", "fill_of_ragged_blocks")
# Indices that the interpreter clamps.
OUTSIDE = {
    "offsets_for_block_numbers": "Out of bounds block",
    "clamped_output_block": "Out of bounds block",
    "read_out_of_range": "Out of bounds read",
    "write_out_of_range": "Out of bounds write",
}
FILLS = {"fill_of_every_dtype": "Race on"}  # whole outputs in a grid, and zeros
DIFFERS = {*RACES, *CARRIES, *ZEROS, *OUTSIDE, *FILLS}
# What only the history of memory shows.
TRACKED = {
    "alias_recurrence": "reads what block .* wrote",  # through an operand that lies in GMEM
    "scoped_value": "before anything was written",
}
SAME = [name for name in CASES if name not in DIFFERS]

pytestmark = pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")


@pytest.mark.parametrize("name", SAME)
def test_values(name):
    check(CASES[name], interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("name", [n for n in SAME if n not in TRACKED])
def test_values_with_race_detection(name):
    check(CASES[name], interpret=plgpu.InterpretGPUParams(detect_races=True), seed=1)


@pytest.mark.parametrize("name", SAME[::3])
def test_values_under_jit(name):
    check(CASES[name], interpret=plgpu.InterpretGPUParams(), transform=jax.jit)


@pytest.mark.parametrize("name", [*RACES, *FILLS])
def test_output_blocks_of_two_programs_race(name):
    with pytest.raises(KernelFinding, match=r"Race on .* both write its block"):
        check(CASES[name], interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("name, axes", [(n, a) for n, a in {**RACES, **CARRIES}.items() if a is not None])
@pytest.mark.parametrize("steps", [1, 3])
def test_sequential_axes_accumulate(name, axes, steps):
    params = plgpu.CompilerParams(dimension_semantics=("sequential",) * axes, max_concurrent_steps=steps)
    check(CASES[name], interpret=plgpu.InterpretGPUParams(detect_races=name != "scratch_tuple"), compiler_params=params)


@pytest.mark.parametrize("name", [n for n, a in RACES.items() if a is None])
def test_a_block_that_comes_back_has_left(name):
    axes = 2 if "grid:2d" in CASES[name].tags else 1
    params = plgpu.CompilerParams(dimension_semantics=("sequential",) * axes)
    with pytest.raises(KernelFinding, match="Revisited block"):
        check(CASES[name], interpret=plgpu.InterpretGPUParams(), compiler_params=params)


@pytest.mark.parametrize("name", CARRIES)
def test_scratch_is_not_carried_between_blocks(name):
    with pytest.raises(AssertionError, match="result differs"):
        check(CASES[name], interpret=plgpu.InterpretGPUParams())
    with pytest.raises(KernelFinding, match="before anything was written"):
        check(CASES[name], interpret=plgpu.InterpretGPUParams(detect_races=True))


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_outside_the_array(name):
    with pytest.raises(AssertionError, match=r"expected np\.\w+\((nan|-2147483648)\)"):
        check(CASES[name], interpret=plgpu.InterpretGPUParams(detect_races=True))


@pytest.mark.parametrize("name", OUTSIDE)
def test_indices_outside(name):
    with pytest.raises(KernelFinding, match=OUTSIDE[name]):
        check(CASES[name], interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("name", TRACKED)
def test_what_the_history_shows(name):
    with pytest.raises(KernelFinding, match=TRACKED[name]):
        check(CASES[name], interpret=plgpu.InterpretGPUParams(detect_races=True))
