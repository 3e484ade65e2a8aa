"""Kernel calls under vmap and JAX's options: equal to a Python loop, or one clear refusal."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu

MODES = [pytest.param(True, id="reference"), pytest.param(pl.EagerParams(), id="eager")]
ROW = jax.ShapeDtypeStruct((4,), jnp.float32)


def call_of(kernel, interpret, **options):
    return pl.pallas_call(kernel, ROW, interpret=interpret, **options)


@pytest.mark.parametrize("interpret", MODES)
def test_vmap_over_grid_sizes_and_prefetched_rows(interpret):
    """Each element of the batch has a grid of its own size: one call for each, in every mode."""

    def kernel(rows_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + rows_ref[pl.program_id(0)].astype(jnp.float32)

    def one(n, rows, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n,),
            in_specs=[pl.BlockSpec((1, 4), lambda i, rows: (rows[i], 0))],
            out_specs=pl.BlockSpec((1, 4), lambda i, rows: (i, 0)),
        )
        shape = jax.ShapeDtypeStruct((3, 4), jnp.float32)
        return pl.pallas_call(kernel, shape, grid_spec=spec, interpret=interpret)(rows, x)

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows = np.array([[2, 0, 1], [1, 1, 0]], np.int32)
    sizes = np.array([2, 3], np.int32)
    out = jax.vmap(one, (0, 0, None))(jnp.array(sizes), jnp.array(rows), jnp.array(x))
    expected = np.full((2, 3, 4), np.nan, np.float32)
    for b in range(2):
        for i in range(sizes[b]):
            expected[b, i] = x[rows[b, i]] + rows[b, i]
    np.testing.assert_array_equal(out, expected)
    none = jax.vmap(one, (0, 0, None))(jnp.array(sizes[:0]), jnp.array(rows[:0]), jnp.array(x))
    assert none.shape == (0, 3, 4)


COLLECTIVES = [
    lambda x: lax.psum(x, "batch"),
    lambda x: lax.pmax(x, ("batch",)),
    lambda x: lax.all_gather(x, "batch").sum(0),
    lambda x: lax.ppermute(x, "batch", [(0, 1)]),
    lambda x: x + lax.axis_index("batch"),
    lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, "batch"), lambda: x),
]


@pytest.mark.parametrize(
    "collective", COLLECTIVES, ids=["psum", "pmax", "all_gather", "ppermute", "index", "in a cond"]
)
def test_an_axis_of_vmap_is_not_bound_in_a_kernel(collective):
    """JAX's own message was an empty AssertionError from the depth of the lowering."""

    def kernel(x_ref, o_ref):
        o_ref[...] = collective(x_ref[...])

    with pytest.raises(ValueError) as error:
        jax.vmap(call_of(kernel, True), axis_name="batch")(jnp.ones((2, 4)))
    first, *rest = str(error.value).splitlines()
    assert first.startswith("The kernel kernel uses the axis 'batch' of vmap (")
    assert any("test_transforms.py" in line for line in rest)


@pytest.mark.parametrize(
    "collective", [COLLECTIVES[0], COLLECTIVES[2], COLLECTIVES[4]], ids=["psum", "gather", "index"]
)
def test_an_axis_of_vmap_is_not_bound_in_an_eager_kernel(collective):
    """`psum` of a concrete block once gave the block times the size of the batch."""

    def kernel(x_ref, o_ref):
        o_ref[...] = collective(x_ref[...])

    with pytest.raises(NameError, match="batch"):
        jax.vmap(call_of(kernel, pl.EagerParams()), axis_name="batch")(jnp.ones((2, 4)))


@pytest.mark.parametrize("interpret", MODES)
def test_an_axis_of_a_vmap_in_the_kernel_is_bound(interpret):
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.vmap(lambda v: v / lax.psum(v, "lane"), axis_name="lane")(x_ref[...])

    out = jax.vmap(call_of(kernel, interpret), axis_name="batch")(jnp.ones((2, 4)))
    np.testing.assert_array_equal(out, np.full((2, 4), 0.25))


@pytest.mark.parametrize("interpret", MODES)
def test_vmap_with_jax_enable_checks(interpret):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    blocks = pl.BlockSpec((2,), lambda i: (i,))
    with jax.enable_checks(True):
        call = call_of(kernel, interpret, grid=(2,), in_specs=[blocks], out_specs=blocks)
        out = jax.vmap(call)(jnp.ones((3, 4)))
    np.testing.assert_array_equal(out, np.full((3, 4), 2.0))


@pytest.mark.parametrize("interpret", MODES)
def test_nan_checks_do_not_stop_on_unwritten_memory(interpret):
    """`jax_debug_nans` is about what a program computes: padding that a kernel masks is none of its business."""

    def kernel(x_ref, o_ref, s_ref):
        inside = jnp.arange(3) + 3 * pl.program_id(0) < 4
        s_ref[...] = jnp.where(inside, x_ref[...], 0)
        o_ref[...] = s_ref[...] * 2

    blocks = pl.BlockSpec((3,), lambda i: (i,))
    scratch = [pltpu.VMEM((3,), jnp.float32)]
    with jax.debug_nans(True):
        call = call_of(kernel, interpret, grid=(2,), in_specs=[blocks], out_specs=blocks, scratch_shapes=scratch)
        out = call(jnp.arange(4.0))
    np.testing.assert_array_equal(out, [0, 2, 4, 6])


@pytest.mark.parametrize("interpret", MODES)
def test_a_call_makes_no_implicit_transfers(interpret):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    x = jnp.arange(4.0)
    with jax.transfer_guard("disallow"):
        out = call_of(kernel, interpret)(x)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_specs_survive_copies(duplicate):
    for spec in (
        pl.GridSpec(grid=(2,)),
        pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(2,)),
        pl.BlockSpec((4, None, pl.Element(3, (1, 1)), pl.BoundedSlice(2)), memory_space=pltpu.VMEM),
        pl.Buffered(2),
        pl.EagerParams(only=(1,)),
        pltpu.CompilerParams(dimension_semantics=("parallel",)),
        pl.CostEstimate(flops=1, transcendentals=2, bytes_accessed=3),
    ):
        assert duplicate(spec) == spec
    copied = duplicate(pl.GridSpec(grid=(2,)))
    shape = jax.ShapeDtypeStruct((), jnp.int32)

    def kernel(o_ref):
        o_ref[...] = pl.program_id(0)

    assert pl.pallas_call(kernel, shape, grid_spec=copied, interpret=True)() == 1


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    "transformed",
    [lambda f: jax.vmap(f)(jnp.arange(2.0)), lambda f: jax.grad(lambda s: f(s).sum())(2.0)],
    ids=["vmap", "grad"],
)
def test_a_kernel_that_captures_what_a_transformation_traces(interpret, transformed):
    """The eager interpreter once spoke of a leaked tracer and side effects."""

    def scaled(s):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * s

        return call_of(kernel, interpret)(jnp.ones(4))

    with pytest.raises(ValueError, match="captures") as error:
        transformed(scaled)
    assert "operand of the call" in str(error.value) or "make the value an operand" in str(error.value)
