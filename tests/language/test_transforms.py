"""JAX transformations of kernel calls: jit, vmap, jvp, grad, custom_vjp, checkpoint, scan, shard_map, export,
donation. Values against NumPy; errors by their first line (tutorial section 5)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import palladion as pl
from palladion import tpu as pltpu

rng = np.random.default_rng(0)


def randn(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def elementwise(kernel, shape, block, n_in=1, **options):
    """A call of an elementwise kernel on blocks."""
    grid = tuple(-(-n // b) for n, b in zip(shape, block))
    spec = pl.BlockSpec(block, lambda *ids: ids)
    return pl.pallas_call(
        kernel, f32(*shape), grid=grid, in_specs=[spec] * n_in, out_specs=spec, **{"interpret": True, **options}
    )


def axpy_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = 2 * x_ref[...] + y_ref[...]


axpy = elementwise(axpy_kernel, (6, 10), (4, 4), 2)


def running_sum_kernel(x_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...]
    o_ref[...] = acc_ref[...]


running_sum = pl.pallas_call(
    running_sum_kernel,
    f32(6, 5),
    grid=(6,),
    in_specs=[pl.BlockSpec((None, 5), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((None, 5), lambda i: (i, 0)),
    scratch_shapes=[pltpu.VMEM((5,), jnp.float32)],
    interpret=True,
)


def gather_kernel(rows_ref, x_ref, o_ref):
    o_ref[...] = x_ref[...] + rows_ref[pl.program_id(0)]


gather = pl.pallas_call(
    gather_kernel,
    f32(4, 3),
    grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[pl.BlockSpec((None, 3), lambda i, rows: (rows[i], 0))],
        out_specs=pl.BlockSpec((None, 3), lambda i, rows: (i, 0)),
    ),
    interpret=True,
)


def gather_ref(rows, x):
    return np.asarray(x)[np.asarray(rows)] + np.asarray(rows)[:, None]


# --- vmap -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 0), (2, 1), (-1, None)])
@pytest.mark.parametrize("out_axes", [0, 1, 2])
def test_vmap_axes(in_axes, out_axes):
    size = 3

    def operand(axis):
        shape = [6, 10]
        if axis is not None:
            shape.insert(axis % 3, size)
        return randn(*shape)

    x, y = map(operand, in_axes)
    got = jax.vmap(axpy, in_axes, out_axes)(x, y)

    def each(a, axis):
        return [np.asarray(a)] * size if axis is None else list(np.moveaxis(np.asarray(a), axis, 0))

    want = np.stack([2 * a + b for a, b in zip(each(x, in_axes[0]), each(y, in_axes[1]))], out_axes)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_vmap_nested_over_different_operands():
    x, y = randn(3, 6, 10), randn(2, 6, 10)
    got = jax.vmap(jax.vmap(axpy, (None, 0)), (0, None))(x, y)
    np.testing.assert_allclose(got, 2 * np.asarray(x)[:, None] + np.asarray(y)[None], rtol=1e-6)


def test_vmap_of_a_kernel_that_needs_its_order():
    x = randn(4, 6, 5)
    np.testing.assert_allclose(jax.vmap(running_sum)(x), np.cumsum(np.asarray(x), 1), rtol=1e-5)
    y = randn(6, 5, 2, 3)
    got = jax.vmap(jax.vmap(running_sum, -1), -1)(y)
    np.testing.assert_allclose(got, np.moveaxis(np.cumsum(np.asarray(y), 0), (3, 2), (0, 1)), rtol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap_scalar_prefetch(in_axes):
    rows = jnp.asarray(rng.integers(0, 7, (2, 4)), jnp.int32)
    x = randn(2, 7, 3)
    rows_in = rows if in_axes[0] is not None else rows[0]
    x_in = x if in_axes[1] is not None else x[0]
    args = [jnp.moveaxis(a, 0, axis) if axis is not None else a for a, axis in zip((rows_in, x_in), in_axes)]
    got = jax.vmap(gather, in_axes)(*args)
    want = [
        gather_ref(rows[b] if in_axes[0] is not None else rows[0], x[b] if in_axes[1] is not None else x[0])
        for b in range(2)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_vmap_prints_as_the_tutorial_says():
    call = elementwise(axpy_kernel, (256, 512), (64, 128), 2)
    eqn = jax.make_jaxpr(jax.vmap(call))(randn(3, 256, 512), randn(3, 256, 512)).jaxpr.eqns[0]
    grid_mapping = eqn.params["grid_mapping"]
    assert str(eqn.primitive) == "pallas_call"
    assert grid_mapping.grid == (3, 4, 4)
    assert str(grid_mapping.block_mappings[0].block_shape) == (
        "(Squeezed(), Blocked(block_size=64), Blocked(block_size=128))"
    )


def test_vmap_alias_of_an_unbatched_operand():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[0] = x_ref[0] + y_ref[0]

    call = pl.pallas_call(kernel, f32(4), input_output_aliases={1: 0}, interpret=True)
    x, y = randn(3, 4), randn(4)
    want = np.tile(np.asarray(y), (3, 1))
    want[:, 0] += np.asarray(x)[:, 0]
    np.testing.assert_allclose(jax.vmap(call, (0, None))(x, y), want, rtol=1e-6)


def test_vmap_of_a_dynamic_grid():
    @jax.jit
    def first_rows(n, x):
        spec = pl.BlockSpec((1, 3), lambda i: (i, 0))

        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * pl.num_programs(0)

        return pl.pallas_call(kernel, f32(4, 3), grid=(n,), in_specs=[spec], out_specs=spec, interpret=True)(x)

    x = randn(4, 3)
    got = jax.vmap(first_rows, (0, None))(jnp.array([1, 3]), x)
    for out, n in zip(got, (1, 3)):
        np.testing.assert_allclose(out[:n], np.asarray(x)[:n] * n, rtol=1e-6)
        assert np.isnan(out[n:]).all()
    batched_x = jax.vmap(first_rows, (None, 0))(2, jnp.stack([x, -x]))
    np.testing.assert_allclose(batched_x[:, :2], np.stack([x, -x])[:, :2] * 2, rtol=1e-6)


def test_vmap_with_element_and_bounded_blocks():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    call = pl.pallas_call(
        kernel,
        f32(3, 4),
        grid=3,
        in_specs=[
            pl.BlockSpec((pl.Element(4, (1, 0)),), lambda i: (3 * i,)),
            pl.BlockSpec((pl.BoundedSlice(4),), lambda i: (pl.ds(2 * i, 4),)),
        ],
        out_specs=pl.BlockSpec((None, 4), lambda i: (i, 0)),
        interpret=True,
    )
    x, y = randn(2, 10), randn(2, 10)
    want = []
    for a, b in zip(np.asarray(x), np.asarray(y)):
        padded = np.concatenate([[np.nan], a])
        want.append([padded[3 * i : 3 * i + 4] + b[2 * i : 2 * i + 4] for i in range(3)])
    np.testing.assert_allclose(jax.vmap(call)(x, y), want, rtol=1e-6)


def test_vmap_over_more_than_65535():
    call = elementwise(axpy_kernel, (1, 2), (1, 2), 2)
    x, y = randn(70_000, 1, 2), randn(1, 2)
    np.testing.assert_allclose(jax.vmap(call, (0, None))(x, y), 2 * np.asarray(x) + np.asarray(y), rtol=1e-6)


# --- differentiation ------------------------------------------------------------------------------------------------
def sin_kernel(x_ref, o_ref):
    o_ref[...] = jnp.sin(x_ref[...])


sin = elementwise(sin_kernel, (6,), (4,))


@jax.custom_vjp
def softmax(x):
    def kernel(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - jnp.max(x_ref[...], axis=-1, keepdims=True))
        o_ref[...] = e / jnp.sum(e, axis=-1, keepdims=True)

    spec = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out, grid=-(-x.shape[0] // 2), in_specs=[spec], out_specs=spec, interpret=True)(x)


def _softmax_bwd(y, dy):
    def kernel(y_ref, dy_ref, dx_ref):
        y, dy = y_ref[...], dy_ref[...]
        dx_ref[...] = y * (dy - jnp.sum(dy * y, axis=-1, keepdims=True))

    spec = pl.BlockSpec((2, y.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    call = pl.pallas_call(kernel, out, grid=-(-y.shape[0] // 2), in_specs=[spec] * 2, out_specs=spec, interpret=True)
    return (call(y, dy),)


softmax.defvjp(lambda x: (softmax(x),) * 2, _softmax_bwd)


def test_jvp_of_a_simple_kernel():
    x, t = randn(6), randn(6)
    value, tangent = jax.jvp(sin, (x,), (t,))
    np.testing.assert_allclose(value, np.sin(x), rtol=1e-5)
    np.testing.assert_allclose(tangent, np.cos(x) * t, rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(jax.jit(sin), (x,), (t,))[1], np.cos(x) * t, rtol=1e-5)


def test_jvp_of_two_inputs_and_of_its_vmap():
    x, y, dx, dy = (randn(2, 6, 10) for _ in range(4))
    _, tangent = jax.jvp(jax.vmap(axpy), (x, y), (dx, dy))
    np.testing.assert_allclose(tangent, 2 * dx + dy, rtol=1e-5)
    _, tangent = jax.vmap(lambda *a: jax.jvp(axpy, a[:2], a[2:]))(x, y, dx, dy)
    np.testing.assert_allclose(tangent, 2 * dx + dy, rtol=1e-5)


def test_jvp_refusals_name_the_ways_out():
    x = randn(6, 10)
    with pytest.raises(ValueError, match=r"tangents are given for some inputs only, not for y_ref \(input 1\)") as e:
        jax.jvp(lambda u: axpy(u, x), (x,), (x,))
    assert "jax.custom_vjp" in str(e.value) and "jax.custom_jvp" in str(e.value)
    with pytest.raises(ValueError, match="it uses program_id") as e:
        jax.jvp(running_sum, (randn(6, 5),), (randn(6, 5),))
    assert "test_transforms.py" in str(e.value)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda f, x: jax.grad(lambda v: f(v).sum())(x),
        lambda f, x: jax.jit(jax.grad(lambda v: f(v).sum()))(x),
        lambda f, x: jax.grad(jax.jit(lambda v: f(v).sum()))(x),
        lambda f, x: jax.vjp(f, x),
        lambda f, x: jax.linearize(f, x),
        lambda f, x: jax.vmap(jax.grad(lambda v: f(v).sum()))(jnp.stack([x, x])),
    ],
)
def test_reverse_mode_stops_at_linearisation(attempt):
    with pytest.raises(ValueError, match=r"^Linearization failed to produce known values for all output primals") as e:
        attempt(sin, randn(6))
    assert "fix: wrap the call in jax.custom_vjp" in str(e.value)


def test_custom_vjp_composes():
    x, w = randn(5, 7), randn(5, 7)

    def loss(x, w):
        return jnp.sum(softmax(x) * w)

    def reference(x, w):
        return jnp.sum(jax.nn.softmax(x) * w)

    want = jax.grad(reference)(x, w)
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss)), jax.grad(jax.jit(loss))):
        np.testing.assert_allclose(grad(x, w), want, rtol=1e-5, atol=1e-7)
    xs, ws = randn(3, 5, 7), randn(3, 5, 7)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(loss))(xs, ws), jax.vmap(jax.grad(reference))(xs, ws), rtol=1e-5, atol=1e-7
    )

    def twice(f):
        return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0].sum()

    np.testing.assert_allclose(
        jax.grad(lambda x: twice(softmax)(x) * 1.0)(x), jax.grad(twice(jax.nn.softmax))(x), atol=1e-6
    )
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(softmax, (x,), (x,))


def test_check_grads():
    check_grads(softmax, (randn(4, 6),), order=1, modes=["rev"])
    with jax.enable_x64(True):
        x = jnp.asarray(rng.standard_normal((4, 6)))
        assert softmax(x).dtype == jnp.float64
        check_grads(softmax, (x,), order=1, modes=["rev"])


# --- calls inside JAX's control flow, on several devices, exported --------------------------------------------------
def test_scan_and_loops_over_a_call():
    x, steps = randn(6, 10), randn(3, 6, 10)
    out, _ = lax.scan(lambda c, s: (axpy(c, s), None), x, steps)
    want = np.asarray(x)
    for s in np.asarray(steps):
        want = 2 * want + s
    np.testing.assert_allclose(out, want, rtol=1e-5)
    looped = lax.fori_loop(0, 3, lambda i, c: axpy(c, steps[i]), x)
    np.testing.assert_allclose(looped, want, rtol=1e-5)
    chosen = lax.cond(x[0, 0] > 1e9, lambda: x, lambda: axpy(x, x))
    np.testing.assert_allclose(chosen, 3 * np.asarray(x), rtol=1e-6)


def _on_four_devices(f, axis_type, n_in):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("d"),) * n_in, out_specs=P("d")))
    place = jax.NamedSharding(mesh, P("d"))
    return lambda *args: mapped(*(jax.device_put(a, place) for a in args))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_over_four_devices(axis_type):
    x, y = randn(24, 10), randn(24, 10)
    np.testing.assert_allclose(_on_four_devices(axpy, axis_type, 2)(x, y), 2 * np.asarray(x) + y, rtol=1e-6)
    z = randn(24, 5)
    got = _on_four_devices(running_sum, axis_type, 1)(z)
    np.testing.assert_allclose(got, np.cumsum(np.asarray(z).reshape(4, 6, 5), 1).reshape(24, 5), rtol=1e-5)

    def with_collective(x):
        return axpy(x, x) + lax.psum(x, "d")

    got = _on_four_devices(with_collective, axis_type, 1)(x)
    want = 3 * np.asarray(x) + np.tile(np.asarray(x).reshape(4, 6, 10).sum(0), (4, 1))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_grad_under_shard_map():
    x = randn(8, 6)
    got = _on_four_devices(jax.grad(lambda x: (softmax(x) ** 2).sum()), AxisType.Auto, 1)(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(x), atol=1e-6)


@pytest.mark.parametrize("call,args", [(axpy, (randn(6, 10), randn(6, 10))), (running_sum, (randn(6, 5),))])
def test_export_round_trip(call, args):
    exported = jax.export.export(jax.jit(call))(*args)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(*args), call(*args), rtol=1e-6)


def test_export_for_platforms_that_are_not_here():
    exported = jax.export.export(jax.jit(axpy), platforms=("cpu", "tpu", "cuda"))(randn(6, 10), randn(6, 10))
    assert exported.platforms == ("cpu", "tpu", "cuda")
    assert "custom_call" not in str(exported.mlir_module())


@pytest.mark.parametrize("kernel", ["elementwise", "in order"])
def test_donation_updates_in_place(kernel):
    n = 64

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + (1 if kernel == "elementwise" else jnp.sum(x_ref[0, :1]))

    call = elementwise(body, (n, n), (16, n), input_output_aliases={0: 0})
    x = jnp.ones((n, n))
    pointer = x.unsafe_buffer_pointer()
    out = jax.jit(call, donate_argnums=0)(x)
    assert x.is_deleted() and out.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(out, 2.0)


def test_an_aliased_operand_that_is_not_donated_is_kept():
    call = elementwise(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] + 1), (8,), (4,), input_output_aliases={0: 0}
    )
    x = jnp.zeros(8)
    np.testing.assert_array_equal(call(x), 1.0)
    np.testing.assert_array_equal(jax.jit(call)(x), 1.0)
    np.testing.assert_array_equal(x, 0.0)


def test_jit_needs_static_block_sizes():
    def double(x, block):
        return elementwise(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 2), (8,), (block,))(x)

    with pytest.raises(ValueError, match="Unsupported block dimension type") as e:
        jax.jit(
            lambda x, b: pl.pallas_call(
                lambda x_ref, o_ref: None, f32(8), grid=2, in_specs=[pl.BlockSpec((b,), lambda i: (i,))], interpret=True
            )(x)
        )(jnp.ones(8), 4)
    assert "static_argnames" in str(e.value)
    np.testing.assert_array_equal(jax.jit(double, static_argnames="block")(jnp.ones(8), block=4), 2.0)


def test_one_call_used_under_many_transforms_keeps_its_meaning():
    x, y = randn(3, 6, 10), randn(3, 6, 10)
    want = 2 * np.asarray(x) + np.asarray(y)
    for wrap in itertools.permutations([jax.jit, jax.vmap], 2):
        f = axpy
        for w in wrap:
            f = w(f)
        np.testing.assert_allclose(f(x, y), want, rtol=1e-6)
