"""Kernels on the cores of a chip (`pl.kernel`, `pl.core_map`), the core's random generator, and marks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

X = jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128)
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)
MESH = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
HALF = pltpu.VMEM((8, 128), jnp.float32)
PARAMS = pltpu.InterpretParams(detect_races=True)


def test_each_core_copies_and_computes_its_half():
    @pl.kernel(out_type=LIKE, mesh=MESH, scratch_types=(HALF,), interpret=PARAMS)
    def double(x_ref, o_ref, v):
        rows = pl.ds(lax.axis_index("core") * 8, 8)
        pltpu.sync_copy(x_ref.at[rows], v)
        v[...] = v[...] * 2
        pltpu.sync_copy(v, o_ref.at[rows])

    np.testing.assert_array_equal(double(X), X * 2)
    np.testing.assert_array_equal(jax.jit(double)(X), X * 2)


def swap_halves(barrier):
    def kernel(x_ref, o_ref, v, sem):
        core = lax.axis_index("core")
        pltpu.sync_copy(x_ref.at[pl.ds(core * 8, 8)], o_ref.at[pl.ds(core * 8, 8)])
        if barrier:
            pltpu.core_barrier(sem, core_axis_name="core")
        pltpu.sync_copy(o_ref.at[pl.ds((1 - core) * 8, 8)], v)
        if barrier:
            pltpu.core_barrier(sem, core_axis_name="core")
        pltpu.sync_copy(v, o_ref.at[pl.ds(core * 8, 8)])

    return pl.kernel(kernel, LIKE, mesh=MESH, scratch_types=(HALF, pltpu.SemaphoreType.REGULAR), interpret=PARAMS)


def test_cores_meet_at_a_barrier():
    np.testing.assert_array_equal(swap_halves(True)(X), np.roll(X, 8, 0))


def test_cores_that_do_not_meet_race():
    with pytest.raises(KernelFinding, match="Race on"):
        swap_halves(False)(X)


def test_core_map_writes_refs_it_closes_over():
    def f(x):
        def body(refs):
            x_ref, y_ref = refs

            @pl.core_map(MESH, interpret=PARAMS)
            def _():
                rows = pl.ds(lax.axis_index("core") * 8, 8)
                pltpu.sync_copy(x_ref.at[rows], y_ref.at[rows])

        return pl.run_state(body)((x, jnp.zeros_like(x)))[1]

    np.testing.assert_array_equal(jax.jit(f)(X), X)


def test_run_on_first_core():
    @pl.kernel(out_type=LIKE, mesh=MESH, interpret=PARAMS)
    def copy(x_ref, o_ref):
        @pltpu.run_on_first_core("core")
        def _():
            pltpu.sync_copy(x_ref, o_ref)

    np.testing.assert_array_equal(copy(X), X)


@pytest.mark.parametrize("interpret", [True, pltpu.InterpretParams()])
def test_the_random_generator_gives_the_same_everywhere(interpret):
    def kernel(o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            pltpu.prng_seed(3, 4)

        o_ref[...] = pltpu.prng_random_bits((8, 128))

    out = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((16, 128), jnp.int32),
        grid=(2,),
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        interpret=interpret,
    )()
    from palladion.language.tpu import random

    first, state = random.random_bits(random.mix([3, 4], np), (8, 128), np)
    second, _ = random.random_bits(state, (8, 128), np)
    np.testing.assert_array_equal(out.view(jnp.uint32), np.concatenate([first, second]))


def test_megacore_runs_every_program_once():
    seen = []

    def recorder(token, point, core):
        seen.append((int(core), *map(int, point)))
        return token

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((2, 128), lambda i: (i, 0))
    out = pl.pallas_call(
        kernel, LIKE, grid=(8,), in_specs=[spec], out_specs=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=pltpu.InterpretParams(num_cores_or_threads=2, grid_point_recorder=recorder),
    )(X)  # fmt: skip
    np.testing.assert_array_equal(out, X)
    assert sorted(seen) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
