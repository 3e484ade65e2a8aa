"""What lowered kernels compute, by an evaluator of Triton IR in NumPy (`ttir.py`), with every access checked.

The corpus is compared with NumPy, the kernels of `kernels.py` with the reference interpreter.
"""

import zlib

import jax
import numpy as np
import pytest

import corpus
from compiler.triton.kernels import KERNELS
from compiler.triton.running import evaluate
from compiler.triton.table import NOT_THE_VALUES, REFUSED

COMPILED = [name for name in corpus.CASES if name not in REFUSED]


@pytest.mark.filterwarnings("ignore::palladion.errors.PalladionWarning")
@pytest.mark.parametrize("name", [n for n in COMPILED if n not in NOT_THE_VALUES])
def test_corpus(name):
    case = corpus.CASES[name]
    with corpus.scope(case):
        args = corpus.arguments(case)
        got = jax.tree.map(np.asarray, evaluate(case.make(), *args))
    corpus.compare(case, got, corpus.expected(case, args))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    call, operands = KERNELS[name]()
    reference, _ = KERNELS[name](interpret=True)
    want = jax.tree.leaves(reference(*operands))
    got = jax.tree.leaves(evaluate(call, *operands, seed=zlib.crc32(name.encode())))  # an order of programs of its own
    assert len(got) == len(want)
    for g, w in zip(got, map(np.asarray, want)):
        assert g.dtype == w.dtype and g.shape == w.shape
        narrow = w.dtype.itemsize < 4 and w.dtype.kind not in "iub"
        np.testing.assert_allclose(g.astype("float64"), w.astype("float64"), rtol=2e-2 if narrow else 3e-6, atol=1e-5)


def test_a_missing_mask_is_found():
    """The evaluator itself: an access outside an array is an error, not a number."""
    from compiler.triton.ttir import run_kernel

    text = """
module {
  tt.func public @k(%x: !tt.ptr<f32>) {
    %r = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32>
    %s = tt.splat %x : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>
    %p = tt.addptr %s, %r : tensor<8x!tt.ptr<f32>>, tensor<8xi32>
    %v = tt.load %p : tensor<8x!tt.ptr<f32>>
    tt.store %p, %v : tensor<8x!tt.ptr<f32>>
    tt.return
  }
}
"""
    run_kernel(text, [np.zeros(8, "float32")], (1, 1, 1))
    with pytest.raises(AssertionError, match="points 7 elements into an array of 7"):
        run_kernel(text, [np.zeros(7, "float32")], (1, 1, 1))
