"""custom_fusion, and fusions that read and write Refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import fuser

X = jnp.arange(512.0).reshape(16, 32)
TYPE = jax.ShapeDtypeStruct((16, 32), jnp.float32)
SPEC = pl.BlockSpec((8, 16), lambda i, j: (i, j))


def transposed_double():
    @fuser.custom_fusion
    def double(x):
        return x.T * 2

    @double.def_pull_block_spec
    def pull(outs):
        (out,) = outs
        turned = lambda *roots: out.block_index_transform(*roots)[::-1]
        return [fuser.BlockIndexTransform(out.block_shape[::-1], turned)]

    @double.def_eval_rule
    def run(ctx, x):
        (spec,), (indices,) = ctx.out_block_specs, ctx.out_block_indices
        assert spec.block_shape == (16, 8) and len(indices) == 2
        return [x.T * 2]

    @double.def_push_block_spec
    def push(specs):
        (spec,) = specs
        return [pl.BlockSpec(spec.block_shape[::-1], lambda i, j: spec.index_map(i, j)[::-1])]

    return double


def run_on_blocks(f, *args, out_spec, grid):
    fn, values, _ = fuser.get_fusion_values(f)
    kernel_fn, (specs,), _ = fuser.pull_block_spec(fn, out_spec, grid_len=2)(values)

    def kernel(refs, o_ref):
        ids = (pl.program_id(0), pl.program_id(1))
        o_ref[...] = kernel_fn(ids, (), jax.tree.map(lambda ref: ref[...], refs))

    call = pl.pallas_call(
        kernel, jax.eval_shape(fn, values), grid=grid, in_specs=[specs], out_specs=out_spec, interpret=True
    )
    return call(values)


def test_outside_of_kernels_it_is_its_function():
    double = transposed_double()
    for run in (double, jax.jit(double)):
        np.testing.assert_array_equal(run(X), X.T * 2)
    np.testing.assert_array_equal(jax.vmap(double)(X[None])[0], X.T * 2)
    np.testing.assert_array_equal(jax.grad(lambda x: double(x).sum())(X), jnp.full_like(X, 2))


def test_its_rules_give_the_blocks():
    double = transposed_double()
    spec = pl.BlockSpec((16, 8), lambda i, j: (i, j))
    got = run_on_blocks(lambda: double(X * 3) + 1, out_spec=spec, grid=(2, 2))
    np.testing.assert_array_equal(got, X.T * 6 + 1)


def test_it_is_pushed_through():
    double = transposed_double()
    out = fuser.push_block_spec(lambda x: double(x + 1) * 2, SPEC, grid_len=2)(TYPE)
    assert out.block_shape == (16, 8) and out.index_map(1, 0) == (0, 1)


def test_without_a_push_rule_it_stays_out_of_output_fusions():
    double = transposed_double()
    double.push_block_spec_rule = None
    with pytest.raises(NotImplementedError, match=r"^The custom_fusion double has no push_block_spec rule"):
        fuser.push_block_spec(double, SPEC)(TYPE)


def test_missing_rules_are_named():
    bare = fuser.custom_fusion(lambda x: x + 1)
    with pytest.raises(ValueError, match=r"is missing an evaluation rule"):
        bare(X)
    bare.def_eval_rule(lambda ctx, x: [x + 1])
    with pytest.raises(ValueError, match=r"is missing a pull_block_spec rule"):
        bare(X)


def test_results_that_are_not_used_have_no_transform():
    seen = []

    @fuser.custom_fusion
    def both(x):
        return x + 1, x - 1

    both.def_pull_block_spec(lambda outs: (seen.append([o is None for o in outs]), [outs[1]])[1])
    both.def_eval_rule(lambda ctx, x: [x + 1, x - 1])
    got = run_on_blocks(lambda: both(X)[1] * 2, out_spec=SPEC, grid=(2, 2))
    np.testing.assert_array_equal(got, (X - 1) * 2)
    assert seen == [[True, False]]


def test_inside_a_kernel_its_stand_in_runs():
    double = transposed_double()
    double.def_pallas_impl(lambda x: x.T + x.T + 100)

    def kernel(x_ref, o_ref):
        o_ref[...] = double(x_ref[...])

    out = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    np.testing.assert_array_equal(pl.pallas_call(kernel, out, interpret=True)(X), X.T * 2 + 100)


def test_a_rule_with_too_few_results():
    one = fuser.custom_fusion(lambda x, y: x + y)
    one.def_eval_rule(lambda ctx, x, y: [x + y])
    one.def_pull_block_spec(lambda outs: outs)
    with pytest.raises(ValueError, match=r"^The pull_block_spec rule of <lambda> gives 1 result\(s\) in place of 2"):
        fuser.pull_block_spec(one, SPEC)(TYPE, TYPE)


# --- Refs -------------------------------------------------------------------------------------------------------------
def test_an_input_fusion_that_reads_refs():
    ref, index = jax.new_ref(X.reshape(2, 8, 32)), jnp.int32(1)
    fn, values, scalars = fuser.get_stateful_input_fusion_values(lambda: ref[index] * 2 + X[:8])
    assert len(values) == 2 and any(v is ref for v in values) and [int(s) for s in scalars] == [1]
    arrays = tuple(v[...] for v in values)
    np.testing.assert_array_equal(fn(arrays), X[8:] * 2 + X[:8])
    spec = pl.BlockSpec((8, 16), lambda i, j, *_: (i, j))
    handler = fuser.make_scalar_prefetch_handler(0)
    _, (specs,), _ = fuser.pull_block_spec(fn, spec, grid_len=2, scalar_prefetch_handler=handler)(arrays)
    place = next(n for n, v in enumerate(values) if v is ref)
    assert specs[place].block_shape == (None, 8, 16) and specs[place].index_map(0, 1, (index,)) == (1, 0, 1)


def test_an_output_fusion_that_writes_refs():
    ref, other = jax.new_ref(X), jax.new_ref(X * 10)

    def out(z):
        ref[...] = z * 2 + other[...]
        return z + 1

    fn, values, _, aliases = fuser.get_stateful_output_fusion_values(out, TYPE)
    assert {id(v) for v in values} == {id(ref), id(other)}
    assert aliases == {1: next(n for n, v in enumerate(values) if v is ref)}
    result, (written,) = fn(tuple(v[...] for v in values), X)
    np.testing.assert_array_equal(result, X + 1)
    np.testing.assert_array_equal(written, X * 12)
    np.testing.assert_array_equal(ref[...], X)


def test_without_writes_the_result_stands_alone():
    ref = jax.new_ref(X)
    fn, values, _, aliases = fuser.get_stateful_output_fusion_values(lambda z: z + ref[...], TYPE)
    assert aliases == {}
    np.testing.assert_array_equal(fn((X,), X), 2 * X)


def test_refs_are_refused_by_get_fusion_values():
    ref = jax.new_ref(X)
    with pytest.raises(ValueError, match=r"closes over 1 Ref\(s\), and get_fusion_values takes pure functions"):
        fuser.get_fusion_values(lambda: ref[...] * 2)


@fuser.fusible
def copying(x_fusion, out_fusion):
    """A copy in blocks, whose fusions may use Refs: written Refs are aliased and stored back."""
    out_fusion = out_fusion or (lambda z: z)
    kind = jax.ShapeDtypeStruct(x_fusion.shape, x_fusion.dtype)
    x_fn, x_values, _ = fuser.get_stateful_input_fusion_values(x_fusion)
    z_fn, z_refs, _, aliases = fuser.get_stateful_output_fusion_values(out_fusion, kind)
    x_values, z_values = jax.tree.map(lambda v: v[...], (x_values, z_refs))
    x_kernel, (x_specs,), _ = fuser.pull_block_spec(x_fn, SPEC, grid_len=2)(x_values)
    z_kernel, z_specs, _, out_type, out_specs = fuser.push_pull_block_spec(z_fn, SPEC, grid_len=2)(z_values, kind)
    types, specs = jax.tree.leaves(out_type), jax.tree.leaves(out_specs)

    def kernel(x_refs, z_refs, *o_refs):
        ids = (pl.program_id(0), pl.program_id(1))
        x, z = jax.tree.map(lambda ref: ref[...], (x_refs, z_refs))
        for o_ref, out in zip(o_refs, jax.tree.leaves(z_kernel(ids, (), z, x_kernel(ids, (), x))), strict=True):
            o_ref[...] = out

    outs = pl.pallas_call(
        kernel,
        types,
        grid=(2, 2),
        in_specs=[x_specs, z_specs],
        out_specs=specs,
        input_output_aliases={len(x_values) + n: out for out, n in aliases.items()},
        interpret=True,
    )(x_values, z_values)
    outs = jax.tree.unflatten(jax.tree.structure(out_type), outs)
    if not aliases:
        return outs
    outs, written = outs
    for n, value in zip(aliases.values(), written, strict=True):
        z_refs[n][...] = value
    return outs


def test_a_fused_function_reads_and_writes_refs():
    source, sink = jax.new_ref(X), jax.new_ref(jnp.zeros_like(X))

    @fuser.fuse
    def f(x):
        z = copying(x + source[...])
        sink[...] += z * 2
        return z - 1

    np.testing.assert_array_equal(f(X), 2 * X - 1)
    np.testing.assert_array_equal(sink[...], 4 * X)
    f(X)
    np.testing.assert_array_equal(sink[...], 8 * X)


def test_refs_as_arguments_and_early_writes_are_refused():
    ref = jax.new_ref(X)
    with pytest.raises(NotImplementedError, match=r"gets a Ref as an argument"):
        fuser.fuse(lambda r: copying(r[...]))(ref)

    def writes_first(x):
        ref[...] = x
        return copying(x)

    with pytest.raises(ValueError, match=r"^The fused function writes a Ref before it calls the fusible"):
        fuser.fuse(writes_first)(X)
