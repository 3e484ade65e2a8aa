"""The corpus, compiled for TPU, its Mosaic modules run in NumPy: what is compiled means what the kernel says.

libtpu takes no part here; `test_libtpu` has it compile the same kernels.
"""

import pytest

from compiler.tpu import mosaic_run
from compiler.tpu.mosaic_run import MosaicInNumPy
from corpus import CASES
from corpus.case import check

# What a TPU does otherwise by specification: an output block that is left is not fetched when it comes back, and
# run-time indices are not clamped.
OTHERWISE = {"revisit", "oob"}
# What the compiler refuses, in its words.
FLOAT16, WIDE = "no float16", "TPUs have no (float|int)64"
ARRAYS, IN_PLACE = "index arrays cannot address a Ref", "reads? values in VMEM|writes? values in VMEM"
REFUSED = {
    **dict.fromkeys(("arithmetic_float16", "casts_from_float32", "casts_to_float32", "fill_of_every_dtype"), FLOAT16),
    **dict.fromkeys(("arithmetic_float64", "kernel_float64", "arithmetic_int64"), WIDE),
    **dict.fromkeys(("read_integer_arrays", "read_mixed_arrays", "read_masks", "write_integer_arrays"), ARRAYS),
    **dict.fromkeys(("add_to_repeated_rows", "write_masks"), ARRAYS),
    **dict.fromkeys(("memory_space_any", "alias_partial_update", "alias_recurrence"), IN_PLACE),
    **dict.fromkeys(("bounded_slice_input", "bounded_slice_output"), "BoundedSlice"),
    "buffered_blocks": "one buffer or two",
    "gathered_values": "gather along several dimensions",
    "scattered_values": "`scatter-add`",
}
# Rows of another width lie between each other in memory, which no view of a NumPy array does.
NOT_IN_NUMPY = {"read_bitcast", "write_bitcast"}
RUN = [n for n, c in CASES.items() if not (c.tags & OTHERWISE or n in REFUSED or n in NOT_IN_NUMPY)]


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("name", RUN)
def test_meaning(name):
    with mosaic_run.installed():
        check(CASES[name], interpret=MosaicInNumPy())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with mosaic_run.installed(), pytest.raises(Exception, match=REFUSED[name]):
        check(CASES[name], interpret=MosaicInNumPy())
