"""libtpu compiles what the TPU compiler lowers: the corpus, on TPUs that are not there.

Most blocks of the corpus are smaller than a tile. So each kernel is compiled a second time with its blocks as whole
arrays, which a TPU takes at any size: then it is the kernel's operations that count. A sample runs by default, all of
it with the slow tests.
"""

import jax
import pytest

from compiler.tpu.calls import calls_in, with_whole_blocks
from compiler.tpu.test_meaning import REFUSED
from corpus import CASES
from corpus.case import arguments, scope
from palladion.compiler.tpu import aot
from palladion.compiler.tpu.topologies import CHIPS

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
