"""The corpus of block kernels, compiled by NVRTC and run on the emulated device: the same values, or why not."""

import jax
import pytest

from compiler.gpu.table import COMES_BACK, DYNAMIC, NO_GRID, OUTSIDE, REFUSED, SAME, SEQUENTIAL, UNDEFINED, why_refused
from corpus import CASES, check
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import nvrtc
from palladion.emulator.faults import EmulationFault

compiles = pytest.mark.skipif(
    not nvrtc.available(), reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'"
)
pytestmark = pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")


def test_every_case_is_in_one_row():
    assert {*SAME, *REFUSED, *SEQUENTIAL, *COMES_BACK, *UNDEFINED, *OUTSIDE} == set(CASES)
    assert not set(SAME) & {*REFUSED, *DYNAMIC}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_refused(arch):
    found = {name: why for name, case in CASES.items() if (why := why_refused(case, arch))}
    assert set(found) == {*REFUSED, *DYNAMIC}
    for name in REFUSED:
        assert found[name].startswith(REFUSED[name])
    for name in DYNAMIC:
        assert found[name].startswith(NO_GRID)


@compiles
@pytest.mark.parametrize("name", SAME)
def test_values(name):
    check(CASES[name], interpret=plgpu.EmulateParams())


@compiles
@pytest.mark.parametrize("name", SAME[::12])
def test_values_under_jit(name):
    check(CASES[name], interpret=plgpu.EmulateParams(), transform=jax.jit)


@compiles
@pytest.mark.parametrize("name", [n for n in SEQUENTIAL if n not in UNDEFINED])
@pytest.mark.parametrize("steps", [1, 3])
def test_sequential_axes(name, steps):
    params = plgpu.CompilerParams(dimension_semantics=("sequential",) * SEQUENTIAL[name], max_concurrent_steps=steps)
    check(CASES[name], interpret=plgpu.EmulateParams(), compiler_params=params)


@compiles
@pytest.mark.parametrize("name", UNDEFINED)
def test_what_nothing_has_written_differs(name):
    with pytest.raises(AssertionError, match=r"expected np\.\w+\((nan|-\d+)\)"):
        check(CASES[name], interpret=plgpu.EmulateParams())


@compiles
@pytest.mark.parametrize("name", OUTSIDE)
def test_indices_outside_are_faults(name):
    with pytest.raises(EmulationFault, match="out-of-bounds"):
        check(CASES[name], interpret=plgpu.EmulateParams())


@compiles
def test_printing(capfd):
    check(CASES["printing"], interpret=plgpu.EmulateParams())
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line.split(":")[0] for line in lines if line.startswith("program")) == [
        f"program {i} {j}" for i in range(2) for j in range(2)
    ]
    assert lines.count("diagonal 0") == lines.count("diagonal 1") == 1
