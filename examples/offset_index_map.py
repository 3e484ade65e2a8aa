"""An index map that returns element offsets instead of block numbers: no error, wrong values.

    palladion check examples/offset_index_map.py

Block numbers are multiplied by the block's size: program 1 asks for the elements from 16 * 128 on. There is no such
block, so the last one is taken in its place. The fix is `lambda i: (i, 0)`.
"""

import jax
import jax.numpy as jnp

import palladion as pl

ROWS, COLUMNS, BR = 64, 128, 16


def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


call = pl.pallas_call(
    double,
    jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
    grid=(ROWS // BR,),
    in_specs=[pl.BlockSpec((BR, COLUMNS), lambda i: (i * BR, 0))],
    out_specs=pl.BlockSpec((BR, COLUMNS), lambda i: (i, 0)),
    interpret=True,
)

x = jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(ROWS, COLUMNS)
wrong = int((call(x) != 2 * x).sum())
print(f"wrong elements: {wrong} of {x.size}")
