"""What fusibles get, what fuse does with the rest of the program, and what it says where it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import fuser
from palladion import tpu as pltpu

X = jnp.arange(512.0).reshape(16, 32)
TYPE = jax.ShapeDtypeStruct((16, 32), jnp.float32)
SPEC = pl.BlockSpec((8, 16), lambda i, j, *_: (i, j))


def recording(seen, outputs=1, prefix=True):
    """A fusible of the sum of its operands that notes what it is given."""

    @fuser.fusible(output_fusion_prefix=prefix)
    def total(*args, **keywords):
        *ins, out = args
        seen.append((ins, out, keywords))
        value = sum(f() for f in jax.tree.leaves(ins, is_leaf=lambda x: isinstance(x, fuser.Fusion)))
        results = [value * (n + 1) for n in range(outputs)]
        if isinstance(out, tuple):
            return tuple(r if f is None else f(r) for f, r in zip(out, results, strict=True))
        if out is not None:
            return out(*results)
        return results[0] if outputs == 1 else tuple(results)

    return total


# --- fusible and Fusion ---------------------------------------------------------------------------------------------
def test_outside_fuse_a_fusible_is_a_function_of_arrays():
    seen = []
    total = recording(seen)
    for run in (total, jax.jit(total)):
        np.testing.assert_array_equal(run(X, X), 2 * X)
    (ins, out, _) = seen[0]
    assert out is None and [type(f) for f in ins] == [fuser.Fusion] * 2
    assert (ins[0].shape, ins[0].dtype, ins[0].in_type) == ((16, 32), jnp.float32, ((), {}))


def test_a_fusible_outside_fuse_is_differentiated_and_batched_as_what_it_runs():
    total = recording([])
    np.testing.assert_array_equal(jax.grad(lambda x: total(x * 3, x).sum())(X), jnp.full_like(X, 4))
    np.testing.assert_array_equal(jax.vmap(total)(X, X), 2 * X)


def test_a_fusible_gets_what_surrounds_it():
    seen = []
    total = recording(seen)
    fused = fuser.fuse(lambda x, y: total({"a": x * 2, "b": y}, jnp.sum(x)) + 1)
    np.testing.assert_array_equal(fused(X, X), 3 * X + X.sum() + 1)
    ins, out, _ = seen[-1]
    assert jax.tree.map(lambda f: f.shape, ins, is_leaf=lambda x: isinstance(x, fuser.Fusion)) == [
        {"a": (16, 32), "b": (16, 32)},
        (),
    ]
    assert (out.in_shape, out.in_dtype, out.shape) == ((((16, 32),), {}), ((jnp.float32,), {}), ((16, 32),))


def test_nothing_to_fuse_after_the_call_is_none():
    seen = []
    np.testing.assert_array_equal(fuser.fuse(recording(seen))(X, X), 2 * X)
    assert seen[-1][1] is None


def test_keyword_arguments_reach_the_fusible():
    seen = []
    total = recording(seen)
    fuser.fuse(lambda x: total(x, block=128, mode="fast"))(X)
    assert seen[-1][2] == {"block": 128, "mode": "fast"}


def test_an_array_as_a_keyword_argument_is_refused():
    total = recording([])
    with pytest.raises(TypeError, match=r"^The fusible total gets an array as a keyword argument"):
        fuser.fuse(lambda x: total(x, y=x))(X)


def test_output_groups_are_fused_apart():
    seen = []
    pair = recording(seen, 2, (True, True))
    first, second, third = fuser.fuse(lambda x: (lambda a, b: (a + 1, b, a * 2))(*pair(x)))(X)
    np.testing.assert_array_equal(first, X + 1)
    np.testing.assert_array_equal(second, 2 * X)
    np.testing.assert_array_equal(third, 2 * X)
    out = seen[-1][1]
    assert len(out[0].out_type) == 2 and out[1] is None


def test_output_groups_that_meet_are_refused():
    pair = recording([], 2, (True, True))
    with pytest.raises(ValueError, match=r"^The outputs that the fusible total wants fused apart are used together"):
        fuser.fuse(lambda x: sum(pair(x)))(X)


def test_one_group_of_two_outputs():
    pair = recording([], 2)
    np.testing.assert_array_equal(fuser.fuse(lambda x: sum(pair(x)))(X), 3 * X)
    np.testing.assert_array_equal(fuser.fuse(lambda x: pair(x)[1])(X), 2 * X)


# --- fuse -----------------------------------------------------------------------------------------------------------
def test_results_keep_their_structure_and_may_not_depend_on_the_kernel():
    seen = []
    total = recording(seen)
    out = fuser.fuse(lambda x, y: {"z": total(x, y) * 2, "x": x, "s": [jnp.sin(y), 3.0]})(X, X)
    np.testing.assert_array_equal(out["z"], 4 * X)
    np.testing.assert_array_equal(out["x"], X)
    np.testing.assert_allclose(out["s"][0], jnp.sin(X), 1e-6)
    assert out["s"][1] == 3.0
    assert len(seen[-1][1].out_type) == 1


def test_a_call_inside_a_jitted_function_is_found():
    seen = []
    total = recording(seen)
    inner = jax.jit(lambda x: jax.jit(total)(x, x) + 1)
    np.testing.assert_array_equal(jax.jit(fuser.fuse(lambda x: inner(x) * 2))(X), 4 * X + 2)
    assert isinstance(seen[-1][1], fuser.Fusion)


def test_of_several_calls_the_last_is_fused():
    seen = []
    total = recording(seen)
    np.testing.assert_array_equal(fuser.fuse(lambda x: total(total(x, x), x) + 1)(X), 3 * X + 1)
    assert sum(isinstance(out, fuser.Fusion) for _, out, _ in seen) == 1


def test_static_arguments_by_position_and_by_name():
    total = recording([])
    scale = lambda x, n, mode="double": total(x, x * n) * (2 if mode == "double" else 1)
    fused = fuser.fuse(scale, static_argnums=1, static_argnames="mode")
    np.testing.assert_array_equal(fused(X, 3), 8 * X)
    np.testing.assert_array_equal(fused(X, n=3, mode="plain"), 4 * X)
    np.testing.assert_array_equal(fused(X, 3, "plain"), 4 * X)
    np.testing.assert_array_equal(fuser.fuse(static_argnames=("n", "mode"))(scale)(X, 1), 4 * X)


def test_no_fusible_is_an_error():
    with pytest.raises(ValueError, match=r"^No fusible is called in the fused function"):
        fuser.fuse(lambda x: x + 1)(X)


def test_a_fusible_that_returns_too_little():
    bad = fuser.fusible(lambda x, out: x() if out is None else ())
    with pytest.raises(ValueError, match=r"^The fusible .* returns 0 array\(s\), but its output fusions 1"):
        fuser.fuse(lambda x: bad(x) + 1)(X)


def test_debug_prints_the_program(capsys):
    total = recording([])
    fuser.fuse(lambda x: total(x, x) + 1, debug=True)(X)
    assert "fusible[" in capsys.readouterr().out


def test_strict_mode_is_told_to_the_fusions():
    seen = []
    total = recording(seen)
    fuser.fuse(lambda x: total(x) + 1, strict_mode=False)(X)
    assert not seen[-1][1].strict_mode and not seen[-1][0][0].strict_mode


# --- get_fusion_values ----------------------------------------------------------------------------------------------
def test_values_are_what_is_closed_over_and_scalars_what_chooses_blocks():
    w, i = jnp.arange(24.0).reshape(4, 2, 3), jnp.int32(2)
    fn, values, scalars = fuser.get_fusion_values(lambda y: w[i] * i + y, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert [v.shape for v in values] == [(4, 2, 3)] and [int(s) for s in scalars] == [2]
    np.testing.assert_array_equal(fn((w * 10,), jnp.ones((2, 3))), w[2] * 20 + 1)


def test_a_block_index_from_an_array_is_refused():
    w, table = jnp.zeros((4, 2, 3)), jnp.arange(4)
    with pytest.raises(ValueError, match=r"computes a block index from a value of shape \(4,\)"):
        fuser.get_fusion_values(lambda: w[table[1]])


def test_prints_in_a_fusion_are_refused():
    with pytest.raises(ValueError, match=r"has side effects, and get_fusion_values takes pure functions"):
        fuser.get_fusion_values(lambda: (jax.debug.print("hello"), X)[1])


# --- pull_block_spec, push_block_spec -------------------------------------------------------------------------------
def pulled(f, *args, spec=SPEC, **options):
    return fuser.pull_block_spec(f, spec, grid_len=2, **options)(*args)


def test_specs_have_the_structure_of_the_arguments():
    f = lambda x, scale, *, rest: x * scale + rest["b"].T
    pull = fuser.pull_block_spec(f, SPEC, grid_len=2)
    kernel_fn, (x, scale), keywords = pull(X, jnp.float32(2), rest={"b": X.T, "unused": X})
    assert x.block_shape == (8, 16) and x.index_map(1, 0) == (1, 0)
    assert scale is pl.no_block_spec and keywords["rest"]["unused"] is pl.no_block_spec
    assert keywords["rest"]["b"].block_shape == (16, 8) and keywords["rest"]["b"].index_map(1, 0) == (0, 1)
    blocks = dict(b=X.T[:16, 8:], unused=X)
    np.testing.assert_array_equal(kernel_fn((1, 0), (), X[8:, :16], jnp.float32(2), rest=blocks), 3 * X[8:, :16])


def test_types_do_for_arrays_and_whole_arrays_for_no_spec():
    _, (spec,), _ = pulled(lambda x: x * 2, TYPE, spec=pl.no_block_spec)
    assert spec.block_shape == (16, 32) and spec.index_map(3, 4) == (0, 0)


def test_memory_space_and_pipeline_mode_are_passed_on():
    spec = pl.BlockSpec((8, 16), SPEC.index_map, pl.Buffered(3), memory_space=pltpu.VMEM)
    _, (found,), _ = pulled(lambda x: x.T + 1, jax.ShapeDtypeStruct((32, 16), jnp.float32), spec=spec)
    assert (found.pipeline_mode, found.memory_space) == (pl.Buffered(3), pltpu.VMEM)


def test_an_operation_without_a_rule_is_named_with_its_line():
    with pytest.raises(NotImplementedError, match=r"^The fuser has no rule for `scan`") as caught:
        pulled(lambda x: lax.fori_loop(0, 3, lambda i, x: x * 2, x), X)
    assert caught.value.primitive == "scan" and "test_fuser_api.py" in str(caught.value)
    assert isinstance(caught.value, pl.UnsupportedPrimitive)


def test_random_bits_are_refused():
    with pytest.raises(NotImplementedError, match=r"^The fuser has no rule for `random_bits`"):
        pulled(lambda x: x + jax.random.uniform(jax.random.key(0), x.shape), X)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: jnp.cumsum(x, 1), "`cumsum` needs all 32 elements of dimension 1 at once, but blocks have 16"),
        (lambda x: jnp.concatenate([x[:4], x[4:]], 0), r"`concatenate` joins \[4, 12\] elements along dimension 0"),
        (lambda x: x.reshape(8, 64).reshape(16, 32), r"A reshape between \(16, 32\) and \(8, 64\) tears blocks"),
        (lambda x: jnp.concatenate([x, x], 1)[:, ::2], "A slice with strides"),
    ],
)
def test_blocks_that_cannot_pass_are_refused(f, message):
    with pytest.raises(NotImplementedError, match=rf"^{message}"):
        pulled(f, X)


def test_one_value_in_two_blocks_is_refused_unless_asked_for():
    f = lambda x: x + x[::-1]
    with pytest.raises(ValueError, match=r"^The fusion needs two different blocks of one value") as caught:
        pulled(f, X)
    assert "test_fuser_api.py" in str(caught.value)
    _, (spec,), _ = pulled(f, X, strict_mode=False)
    assert spec.block_shape == (8, 16)


def test_equal_index_maps_that_are_written_twice_are_equal():
    specs = [pl.BlockSpec((8, 16), lambda i, j: (i, j)), pl.BlockSpec((8, 16), lambda a, b: (a, b))]
    _, (spec,), _ = pulled(lambda x: (x, x + 1), X, spec=tuple(specs))
    assert spec.index_map(1, 1) == (1, 1)
    with pytest.raises(ValueError, match=r"two different blocks"):
        pulled(lambda x: (x, x + 1), X, spec=(specs[0], pl.BlockSpec((8, 16), lambda i, j: (j, i))))


def test_an_array_that_is_closed_over_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"closes over f32\[16,32\]") as caught:
        pulled(lambda x: x + X, TYPE)
    assert "get_fusion_values" in str(caught.value)


def test_run_time_scalars_need_a_handler():
    def specs(i):
        fn, values, _ = fuser.get_fusion_values(lambda: lax.dynamic_index_in_dim(X.reshape(2, 8, 32), i, 0, False))
        return pulled(fn, values, spec=pl.BlockSpec((8, 32), lambda i, j: (0, 0)))[1][0][0].index_map(0, 0)

    with pytest.raises(ValueError, match=r"no scalar_prefetch_handler says where"):
        jax.jit(specs)(jnp.int32(1))


def test_a_block_of_the_wrong_size_is_refused():
    kernel_fn, _, _ = pulled(lambda x: x + 1, X)
    with pytest.raises(ValueError, match=r"^Argument 0 of the kernel function .* is a block of shape \(16, 32\)"):
        kernel_fn((0, 0), (), X)


def test_specs_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^The block shape \(8,\) of result 0"):
        pulled(lambda x: x + 1, X, spec=pl.BlockSpec((8,), lambda i, j: i))
    with pytest.raises(ValueError, match=r"^The block specs of .* have the structure"):
        pulled(lambda x: x + 1, X, spec=(SPEC, SPEC))


def test_pushing():
    out = fuser.push_block_spec(lambda x, y: {"t": (x + y).T, "s": x * 2}, SPEC, pl.no_block_spec)(TYPE, TYPE)
    assert out["t"].block_shape == (16, 8) and out["t"].index_map(1, 0) == (0, 1)
    assert out["s"].block_shape == (8, 16)
    spec, kind = fuser.push_block_spec(lambda x: x.astype(jnp.int8), SPEC, return_out_type=True)(TYPE)
    assert spec.block_shape == (8, 16) and kind == jax.ShapeDtypeStruct((16, 32), jnp.int8)


def test_pushing_what_leaves_no_block():
    with pytest.raises(ValueError, match=r"^No block spec found for output 1"):
        fuser.push_block_spec(lambda x, y: (x, y + 1), SPEC, pl.no_block_spec)(TYPE, TYPE)
    with pytest.raises(NotImplementedError, match=r"^`add` gets operands in different blocks"):
        fuser.push_block_spec(lambda x: x + x[::-1], SPEC)(TYPE)
    with pytest.raises(NotImplementedError, match=r"^A slice of the kernel's result"):
        fuser.push_block_spec(lambda x: x[:8], SPEC)(TYPE)
    with pytest.raises(NotImplementedError, match=r"^`reduce_sum` needs all 32 elements"):
        fuser.push_block_spec(lambda x: x.sum(1), SPEC)(TYPE)


# --- helpers ----------------------------------------------------------------------------------------------------------
def test_filter_no_block_specs():
    values, specs = fuser.filter_no_block_specs((1, {"a": 2}), (pl.no_block_spec, {"a": SPEC}))
    assert values == (None, {"a": 2}) and specs == (None, {"a": SPEC})


def test_block_spec_with_prefetch():
    spec = pl.BlockSpec((8,), lambda i, a, b: i + a * b)
    bound = fuser.block_spec_with_prefetch({"x": spec, "y": pl.no_block_spec}, (3, 4))
    assert bound["x"].index_map(1) == 13 and bound["y"] is pl.no_block_spec


def test_scalar_prefetch_handler():
    assert fuser.make_scalar_prefetch_handler(1, "b")((), {"a": 0, "b": 5}) == 5
    assert fuser.make_scalar_prefetch_handler()(1, 2) == (1, 2)


def test_evaluate():
    f = lambda x: jnp.sin(x).T
    np.testing.assert_array_equal(fuser.evaluate(f)(X), f(X))
    with pytest.raises(ValueError, match=r"^Transpose not allowed"):
        fuser.evaluate(f, allow_transpose=False)(X)
    for loop in (
        lambda x: lax.fori_loop(0, 3, lambda i, x: x * 2, x),
        lambda x: lax.while_loop(lambda x: x.sum() < 0, lambda x: x, x),
        lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    ):
        with pytest.raises(NotImplementedError, match=r"^Primitive (scan|while|cond) not supported"):
            fuser.evaluate(loop)(X)
