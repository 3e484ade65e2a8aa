"""A softmax over rows whose last block hangs over the array's edge, under jit and vmap.

    python examples/softmax.py
    palladion check examples/softmax.py

There are 100 rows in blocks of 16, so the grid has pl.cdiv(100, 16) = 7 programs, and the last block reaches past the
array. What it reads there is undefined (NaN here), what it writes there is dropped: rows do not mix, so no mask is
needed.
"""

import jax
import jax.numpy as jnp

import palladion as pl

BR = 16


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(axis=1, keepdims=True))  # without the maximum, large inputs overflow
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


@jax.jit
def softmax(x):
    rows, columns = x.shape
    block = pl.BlockSpec((BR, columns), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(rows, BR),),
        in_specs=[block],
        out_specs=block,
        interpret=True,
    )(x)


x = 50 * jax.random.normal(jax.random.key(0), (100, 256))
print("equals jax.nn.softmax:", bool(jnp.allclose(softmax(x), jax.nn.softmax(x, axis=1), atol=1e-6)))

batch = jnp.stack([x, x + 100, -x])
print("under vmap too:", bool(jnp.allclose(jax.vmap(softmax)(batch), jax.nn.softmax(batch, axis=2), atol=1e-6)))
