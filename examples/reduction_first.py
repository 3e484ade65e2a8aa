"""The matrix product of clean_matmul.py with the reduction axis first in the grid: right here, wrong on a TPU.

    palladion check examples/reduction_first.py

Programs run in grid order, the last axis fastest. With the reduction axis k first, the programs of one output block
are far apart: in between, a TPU writes the block back, and does not read it again. The interpreter works on whole
arrays, which hides that. The fix is the grid (i, j, k) of clean_matmul.py.
"""

import jax
import jax.numpy as jnp

import palladion as pl

M = K = N = 512
BM, BK, BN = 256, 128, 256


def matmul(a_ref, b_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)


call = pl.pallas_call(
    matmul,
    jax.ShapeDtypeStruct((M, N), jnp.float32),
    grid=(K // BK, M // BM, N // BN),
    in_specs=[
        pl.BlockSpec((BM, BK), lambda k, i, j: (i, k)),
        pl.BlockSpec((BK, BN), lambda k, i, j: (k, j)),
    ],
    out_specs=pl.BlockSpec((BM, BN), lambda k, i, j: (i, j)),
    interpret=True,
)

a = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
b = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
error = jnp.abs(call(a, b) - jnp.dot(a, b, preferred_element_type=jnp.float32)).max()
print(f"largest difference from jnp.dot: {error:.1e}")
