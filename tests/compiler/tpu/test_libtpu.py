"""libtpu compiles what the TPU compiler lowers: the corpus, on TPUs that are not there.

Most blocks of the corpus are smaller than a tile. So each kernel is compiled a second time with its blocks as whole
arrays, which a TPU takes at any size: then it is the kernel's operations that count. A sample runs by default, all of
it with the slow tests.
"""

import json
import os
import subprocess
import sys

import jax
import pytest

from compiler.tpu.calls import calls_in, with_whole_blocks
from compiler.tpu.extra_kernels import KERNELS
from compiler.tpu.test_meaning import REFUSED
from corpus import CASES
from corpus.case import arguments, scope
from palladion.compiler.tpu import aot
from palladion.compiler.tpu.topologies import CHIPS
from repo.tree import ROOT

pytestmark = pytest.mark.skipif(not aot.is_installed(), reason="libtpu is not installed: pip install 'palladion[tpu]'")

# Rows and columns at which an Element block begins must be on tiles, and the compiler must see it in the index map.
OFF_TILES = "prove that tiling"
NOT_COMPILED = {
    **REFUSED,
    **dict.fromkeys(
        ("conv1d_shifted", "stencil_with_halo", "element_windows", "element_beside_blocked", "element_padding",
         "element_output", "element_output_padding", "element_past_the_end"), OFF_TILES),
}  # fmt: skip
# Blocks of these lie on tiles (or there are none): libtpu takes the calls as they are.
AS_THEY_ARE = (
    "softmax_rows layer_norm rms_norm flash_attention causal_attention dot_general_forms zero_dimensions "
    "comparisons next_after cumulative_operations reductions_of_a_block read_dynamic_slices write_slices"
).split()
SAMPLE = list(CASES)[::9]


def compile_calls(name, chip, whole):
    """Compile the kernel calls of a case."""
    case = CASES[name]
    with scope(case):
        eqns = list(calls_in(jax.make_jaxpr(case.make())(*arguments(case)).jaxpr))
        assert eqns, "the case makes no kernel call"
        for eqn in eqns:
            lowered = aot.lower(with_whole_blocks(eqn.params) if whole else eqn.params)
            aot.compile(lowered, CHIPS[chip].topology(lowered.devices))


def check_case(name, chip):
    if name in NOT_COMPILED:
        with pytest.raises(Exception, match=NOT_COMPILED[name]):
            compile_calls(name, chip, whole=True)
    else:
        compile_calls(name, chip, whole=True)


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("name", SAMPLE)
def test_kernels_of_the_corpus(name):
    check_case(name, "v5e")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("name", list(CASES))
def test_every_kernel_of_the_corpus(name, chip):
    check_case(name, chip)


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_calls_of_the_corpus_as_they_are(name):
    compile_calls(name, "v6e", whole=False)


def compile_kernel(name, chip):
    call, operands = KERNELS[name]
    for eqn in calls_in(jax.make_jaxpr(call)(*operands).jaxpr):
        lowered = aot.lower(eqn.params)
        aot.compile(lowered, CHIPS[chip].topology(lowered.devices))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_the_corpus_has_not(name):
    compile_kernel(name, "v5e")


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p", "v6e", "v7x"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_the_corpus_has_not_on_other_chips(name, chip):
    compile_kernel(name, chip)


# --- the tutorial -----------------------------------------------------------------------------------------------------
CELLS = ROOT.parent / "shared" / "conformance" / "run_tutorial.py"
PROGRAM = """
import contextlib, io, json, sys
sys.path[:0] = sys.argv[1:3]
import run_tutorial
from compiler.tpu.calls import with_whole_blocks
from palladion import dropin
from palladion.compiler.tpu import aot
from palladion.compiler.tpu.topologies import CHIPS
from repo.tree import ROOT
from palladion.language import primitive

found = {}
def observer(_, params):
    if type(params["jaxpr"]).__name__ != "EagerKernel":
        found.setdefault((id(params["jaxpr"]), params["grid_mapping"].grid), (cell, params))

def outcome(params, chip):
    try:
        lowered = aot.lower(params)
        aot.compile(lowered, CHIPS[chip].topology(lowered.devices))
        return "compiles"
    except Exception as error:
        return str(error)

dropin.install()
names = {"__name__": "tutorial"}
with primitive.observing(observer), contextlib.redirect_stdout(io.StringIO()):
    for cell, source in run_tutorial.cells():
        exec(compile(source, f"<tutorial line {cell}>", "exec"), names)
dropin.uninstall()
for cell, params in found.values():
    for chip in ("v5e", "v6e"):
        told = outcome(params, chip)
        if "block shape" in told:
            told = outcome(with_whole_blocks(params), chip) + " with blocks as whole arrays"
        print(json.dumps([cell, params["name"], chip, told]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not CELLS.exists(), reason="the tutorial's cells are not beside the checkout")
def test_every_kernel_of_the_tutorial():
    """A third of them have blocks that are no tiles, as the tutorial says (6.1); some are in float64."""
    folders = str(CELLS.parent), str(ROOT / "tests")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *folders],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(told) > 100
    refused = [t for t in told if not t[3].startswith("compiles")]
    assert all("TPUs have no float64" in t[3] for t in refused), refused
    assert sum(t[3] == "compiles" for t in told) >= 2 * len(told) / 3 - 4
