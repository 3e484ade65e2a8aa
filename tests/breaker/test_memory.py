"""Kernels made afresh again and again: what is kept of them is bounded, and `jax.clear_caches()` lets go of it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import jaxlink
from palladion.language import intern, transforms

MODES = [pytest.param(True, id="reference"), pytest.param(pl.EagerParams(), id="eager")]
X = jnp.arange(8.0)


class Tag:
    """Something to hold a weak reference to."""


def test_executables_of_a_primitive_are_kept_for_the_last_calls_only():
    """JAX's own implementation of a primitive keeps 4096 of them alive: 0.4 MB for each small kernel."""
    primitive = jaxlink.Primitive("breaker_identity")
    primitive.def_abstract_eval(lambda x, *, number: x)
    jaxlink.mlir.register_lowering(primitive, lambda ctx, x, *, number: [x])
    run = jaxlink.compile_and_run(primitive, capacity=2)

    def alive():
        gc.collect()
        return len(X.devices().pop().client.live_executables())

    jax.clear_caches()
    before = alive()
    for number in range(6):
        run(X, number=number)
    assert alive() - before == 2
    jax.clear_caches()
    assert alive() == before


def test_clearing_jaxs_caches_clears_ours():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 3

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)
    expected = 3 * np.arange(8.0)
    np.testing.assert_array_equal(call(X), expected)
    np.testing.assert_array_equal(jax.vmap(call)(X[None])[0], expected)
    assert intern._table
    assert transforms._batched.cache_info().currsize
    jax.clear_caches()
    assert not intern._table
    assert not transforms._batched.cache_info().currsize
    np.testing.assert_array_equal(call(X), expected)


@pytest.mark.parametrize("interpret", MODES)
def test_a_kernel_that_nobody_holds_is_let_go(interpret):
    def run():
        tag = Tag()

        def kernel(x_ref, o_ref):
            assert tag is not None
            o_ref[...] = x_ref[...]

        pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=interpret)(X)
        return weakref.ref(tag)

    ref = run()
    gc.collect()
    assert ref() is None
