"""Rows picked by a table that is known only at run time: index maps that read scalar-prefetch values.

    python examples/gather_rows.py
    palladion check examples/gather_rows.py

The table is the call's first operand. It is in scalar memory before any block is fetched, so that the index map of x
may read it: program i works on the block of x that table[i] names. `palladion check` follows the table's values.
"""

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import tpu as pltpu

BR = 8


def copy(table_ref, x_ref, o_ref):
    o_ref[...] = x_ref[...]


def gather_blocks(table, x):
    return pl.pallas_call(
        copy,
        jax.ShapeDtypeStruct((len(table) * BR, x.shape[1]), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(table),),
            in_specs=[pl.BlockSpec((BR, x.shape[1]), lambda i, table: (table[i], 0))],
            out_specs=pl.BlockSpec((BR, x.shape[1]), lambda i, table: (i, 0)),
        ),
        interpret=True,
    )(table, x)


x = jnp.arange(64 * 128, dtype=jnp.float32).reshape(64, 128)
table = jnp.array([5, 5, 0, 7], jnp.int32)
rows = (table[:, None] * BR + jnp.arange(BR)).reshape(-1)
print("equals x[rows]:", bool((gather_blocks(table, x) == x[rows]).all()))
