"""Control flow under `vmap` inside a kernel: a condition, a trip count or a branch for each element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import cpu as plcpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())
rng = np.random.default_rng(0)
X = jnp.asarray(rng.uniform(0.1, 9, (13, 5)), jnp.float32)
N = jnp.asarray(rng.integers(0, 7, 13), jnp.int32)


def newton(v):
    return lax.while_loop(
        lambda s: jnp.abs(s[0] * s[0] - v) > 1e-4, lambda s: (0.5 * (s[0] + v / s[0]), s[1] + 1), (v, 0)
    )


def grow(row):
    return lax.while_loop(lambda c: jnp.max(jnp.abs(c)) < 50, lambda c: c * 1.5 + jnp.flip(c), row)


CASES = {
    "scalar": lambda x, n: jax.vmap(jax.vmap(newton))(x),
    "rows": lambda x, n: jax.vmap(grow)(x),
    "columns": lambda x, n: jax.vmap(grow, in_axes=1, out_axes=1)(x),
    "fori": lambda x, n: jax.vmap(lambda r, m: lax.fori_loop(0, m, lambda i, c: c * 1.1 + i, r))(x, n),
    "cond": lambda x, n: jax.vmap(lambda r, m: lax.cond(m > 3, jnp.cumsum, jnp.negative, r))(x, n),
    "switch": lambda x, n: jax.vmap(lambda r, m: lax.switch(m, [jnp.sin, jnp.cos, lambda v: v], r))(x, n),
    "mixed types": lambda x, n: jax.vmap(
        lambda m: lax.while_loop(lambda c: c[0] < m, lambda c: (c[0] + 1, c[1] ^ (c[0] << 1), ~c[2]), (0, m, m > 2))
    )(n),
    "condition of some axes": lambda x, n: jax.vmap(
        lambda r, m: jax.vmap(lambda s: lax.fori_loop(0, m, lambda i, c: c + s, s))(r)
    )(x, n),
    "inside scan": lambda x, n: jax.vmap(
        lambda r: lax.scan(lambda c, v: (c + v, lax.while_loop(lambda t: t < c, lambda t: t * 2 + 1, v)), 0.0, r)[1]
    )(x),
}


@pytest.mark.parametrize("name", CASES)
def test_a_condition_for_each_element(name):
    def kernel(x_ref, n_ref, *o_refs):
        for o_ref, value in zip(o_refs, jax.tree.leaves(CASES[name](x_ref[...], n_ref[...]))):
            o_ref[...] = value

    want = jax.tree.leaves(CASES[name](X, N))
    outs = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in want]
    for got, w in zip(pl.pallas_call(kernel, outs, **NATIVE)(X, N), want, strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-5)


def test_loops_in_loops_that_index_a_ref():
    """The index of the inner loop is carried: it must be read before the next round writes it."""

    def kernel(x_ref, n_ref, o_ref):
        def each(row, m):
            return lax.fori_loop(0, m, lambda i, c: lax.fori_loop(0, i, lambda j, d: d + x_ref[j, 0], c), row)

        o_ref[...] = jax.vmap(each)(x_ref[...], n_ref[...])

    want = np.asarray(X, np.float64).copy()
    for r, m in enumerate(np.asarray(N)):
        want[r] += sum(np.asarray(X)[j, 0] for i in range(m) for j in range(i))
    got = pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), **NATIVE)(X, N)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_ref_indexed_by_what_it_holds():
    def kernel(i_ref, o_ref):
        o_ref[...] = i_ref[...]
        o_ref[o_ref[...]] = o_ref[...] * 10

    i = jnp.array([2, 0, 3, 1], jnp.int32)
    want = np.asarray(i).copy()
    want[np.asarray(i)] = np.asarray(i) * 10
    np.testing.assert_array_equal(pl.pallas_call(kernel, jax.ShapeDtypeStruct((4,), jnp.int32), **NATIVE)(i), want)


def test_two_elements_of_a_temporary_stay_apart():
    """Stacked and taken apart again: loops over both are fused, and the pair is not one value."""

    def kernel(a_ref, b_ref, o_ref):
        first, second = lax.unstack(jnp.stack([a_ref[...], b_ref[...]], 1), axis=1)
        o_ref[0] = first
        o_ref[1] = second

    a, b = jnp.arange(6.0), jnp.arange(6.0) * -3
    got = pl.pallas_call(kernel, jax.ShapeDtypeStruct((2, 6), jnp.float32), **NATIVE)(a, b)
    np.testing.assert_array_equal(got, np.stack([a, b]))


def test_a_value_that_is_stored_where_it_was_read_and_used_again():
    def kernel(x_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...]
        more = o_ref[...] + 1
        o_ref[...] = more
        p_ref[...] = more * 10

    got = pl.pallas_call(kernel, [jax.ShapeDtypeStruct((4,), jnp.int32)] * 2, **NATIVE)(jnp.arange(4))
    np.testing.assert_array_equal(got[0], np.arange(4) + 1)
    np.testing.assert_array_equal(got[1], (np.arange(4) + 1) * 10)
