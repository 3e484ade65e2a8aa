"""Looking inside a running kernel: print, assert and breakpoint() in its own Python.

    python examples/look_inside.py

With `interpret=pl.EagerParams()` nothing is traced: the kernel's Python runs once for each program, in grid order,
on concrete values, so that Python's own tools work in it. `only` picks programs. The same kernel runs compiled with
`interpret=True` once the lines for looking are gone.
"""

import jax
import jax.numpy as jnp

import palladion as pl

BR = 8


def row_mean(x_ref, o_ref):
    i = pl.program_id(0)
    mean = x_ref[...].mean(axis=1, keepdims=True)
    print(f"program {int(i)}: rows {int(i) * BR} to {int(i) * BR + BR - 1}, means up to {float(mean.max()):.2f}")
    # breakpoint() works here: look at x_ref[...], step through the next lines
    assert x_ref[...].shape == (BR, 128)
    o_ref[...] = jnp.broadcast_to(mean, o_ref.shape)


def call(params):
    rows = pl.BlockSpec((BR, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((32, 128), jnp.float32)
    return pl.pallas_call(row_mean, shape, grid=(4,), in_specs=[rows], out_specs=rows, interpret=params)


x = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)

print("all programs:")
call(pl.EagerParams())(x)

print("only program 2:")
call(pl.EagerParams(only=(2,)))(x)
