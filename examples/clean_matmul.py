"""A matrix product in blocks that accumulates over its last grid axis: nothing wrong with it.

    palladion check examples/clean_matmul.py

The programs of one output block follow one another, for the reduction axis k is the last of the grid. So the block
stays on the chip from its first program, which sets it to zero, to its last.
"""

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import tpu as pltpu

M = K = N = 512
BM, BK, BN = 256, 128, 256


def matmul(a_ref, b_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)


call = pl.pallas_call(
    matmul,
    jax.ShapeDtypeStruct((M, N), jnp.float32),
    grid=(M // BM, N // BN, K // BK),
    in_specs=[
        pl.BlockSpec((BM, BK), lambda i, j, k: (i, k)),
        pl.BlockSpec((BK, BN), lambda i, j, k: (k, j)),
    ],
    out_specs=pl.BlockSpec((BM, BN), lambda i, j, k: (i, j)),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    interpret=True,
)

a = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
b = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
error = jnp.abs(call(a, b) - jnp.dot(a, b, preferred_element_type=jnp.float32)).max()
print(f"largest difference from jnp.dot: {error:.1e}")
