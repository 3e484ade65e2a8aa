"""The corpus on the Mosaic GPU compiler: what is refused, what needs an order, what hardware does not define.

All other cases compile for sm_90a and give the corpus's values on the emulated device.
"""

import jax

import corpus
from palladion.compiler.entry import _calls_in
from palladion.compiler.gpu.generate import generate
from simulator.gpu.test_corpus_gpu import CARRIES, RACES

# Refused in words: (the beginning of the message's first line).
REFUSED = {
    "four_bit_integers": "The Mosaic GPU compiler has no values of int4",
}
# Under jit: a size of the grid is known only at run time. Called outside, it is known.
NO_GRID = "The grid has a size that is known only at run time"
DYNAMIC = ("dynamic_grid", "dynamic_grid_reduction")
# Programs of a grid are CUDA blocks that run in any order: these accumulate in one block of an output, or hand on
# scratch, and are right along sequential axes: {name: how many axes}.
SEQUENTIAL = {name: axes for name, axes in {**RACES, **CARRIES}.items() if axes is not None}
# Right in no order but that of the reference: an output block that comes back.
COMES_BACK = [name for name, axes in RACES.items() if axes is None]
# The result shows what nothing has written: outputs, scratch, or (TMA: zeros) what lies outside the array.
UNDEFINED = (
    "element_output", "element_past_the_end", "fill_of_ragged_blocks", "fill_of_every_dtype", "empty_grid",
    "clamped_output_block", "scratch_tuple", "scoped_value", "dynamic_grid",
)  # fmt: skip
# An index outside the array, which the reference clamps: a fault of the device.
OUTSIDE = ("read_out_of_range", "write_out_of_range")

SAME = [n for n in corpus.CASES if n not in {*REFUSED, *SEQUENTIAL, *COMES_BACK, *UNDEFINED, *OUTSIDE}]


def why_refused(case: corpus.Case, arch: str) -> str | None:
    """The first line of the refusal of a case's calls; None: they are generated."""
    with corpus.scope(case):
        traced = jax.make_jaxpr(case.make())(*corpus.arguments(case))
        for call in _calls_in(traced.jaxpr):
            try:
                generate(call.params, arch)
            except (NotImplementedError, ValueError, TypeError) as error:
                return str(error).splitlines()[0]
    return None
