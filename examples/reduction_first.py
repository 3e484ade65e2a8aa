"""The sum of each row, with the reduction axis first in the grid: right here, wrong on a TPU.

    palladion check examples/reduction_first.py

Programs run in grid order, the last axis fastest. With the reduction axis j first, the programs of one output block
are far apart: in between, a TPU writes the block back, and does not read it again. The interpreter works on whole
arrays, which hides that. The fix is grid (rows, columns) and index maps of (i, j).
"""

import jax
import jax.numpy as jnp

import palladion as pl

ROWS, COLUMNS = 256, 512
BR, BC = 64, 128


def row_sum(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


call = pl.pallas_call(
    row_sum,
    jax.ShapeDtypeStruct((ROWS, 1), jnp.float32),
    grid=(COLUMNS // BC, ROWS // BR),
    in_specs=[pl.BlockSpec((BR, BC), lambda j, i: (i, j))],
    out_specs=pl.BlockSpec((BR, 1), lambda j, i: (i, 0)),
    interpret=True,
)

x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS))
error = jnp.abs(call(x)[:, 0] - x.sum(axis=1)).max()
print(f"largest difference from x.sum: {error:.1e}")
