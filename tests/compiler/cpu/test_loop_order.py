"""The order of loops: collapsed, interchanged, tiled, by rows; and vectors of which only a part counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import cpu as plcpu
from palladion.compiler.cpu import affine, ir, target
from palladion.compiler.cpu.loops import arrange

NATIVE = dict(compiler_params=plcpu.CompilerParams())
rng = np.random.default_rng(0)
wide = pytest.mark.skipif(target.host().vector_bytes != 64, reason="parts of tiles need AVX-512")


def agree(function, *xs, tol=0.0):
    """The function as a native kernel on whole arrays gives what it gives under jit."""
    want = jax.tree.leaves(jax.jit(function)(*xs))

    def kernel(*refs):
        for ref, value in zip(refs[len(xs) :], jax.tree.leaves(function(*(r[...] for r in refs[: len(xs)])))):
            ref[...] = value

    got = pl.pallas_call(kernel, [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in want], **NATIVE)(*xs)
    for g, w in zip(got, want):
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=tol, atol=tol)


def numbers(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.integers(-8, 9, shape), dtype)


# --- the pass itself --------------------------------------------------------------------------------------------------
def buffer(name, *strides, shape=(64, 64)):
    return ir.Buf(name, shape, np.dtype(np.float32), strides, "window", name)


def nest(extents, store, load):
    """for i, j: store[i, j] = load[i, j]; and the two variables."""
    i, j = ir.new_var(), ir.new_var()
    body = ir.Store(store, (i, j), ir.Load(load.dtype, load, (i, j)))
    return ir.For(i, extents[0], (ir.For(j, extents[1], (body,)),)), i, j


def test_loops_through_gapless_memory_become_one():
    s, *_ = nest((128, 3), buffer("o", 3, 1), buffer("x", 3, 1))
    (one,) = arrange([s])
    assert isinstance(one, ir.For) and one.extent == 384 and isinstance(one.body[0], ir.Store)
    assert affine.step(one.body[0].buf, one.body[0].index, one.var) == 1


def test_loops_with_gaps_stay_apart():
    s, *_ = nest((128, 3), buffer("o", 3, 1), buffer("x", 4, 1))
    (outer,) = arrange([s])
    assert isinstance(outer.body[0], ir.For) and {outer.extent, outer.body[0].extent} == {128, 3}


def test_an_index_used_as_a_number_keeps_its_loop():
    o, i, j = buffer("o", 3, 1), ir.new_var(), ir.new_var()
    body = ir.Store(o, (i, j), ir.Op(np.dtype(np.float32), "convert", (j,)))
    (outer,) = arrange([ir.For(i, 128, (ir.For(j, 3, (body,)),))])
    assert isinstance(outer.body[0], ir.For)


def test_the_contiguous_loop_becomes_the_innermost():
    s, i, j = nest((60, 31), buffer("o", 1, 64), buffer("x", 1, 64))
    (outer,) = arrange([s])
    assert (outer.var, outer.body[0].var) == (j, i)


@wide
def test_a_transposed_read_runs_in_tiles():
    s, i, j = nest((64, 32), buffer("o", 64, 1), buffer("x", 1, 64))
    (outer,) = arrange([s])
    assert outer.tiled and (outer.var, outer.body[0].var) == (i, j)


def test_a_store_that_may_repeat_a_place_keeps_its_order():
    s, i, j = nest((64, 32), buffer("o", 0, 64), buffer("x", 1, 64))
    (outer,) = arrange([s])
    assert (outer.var, outer.body[0].var) == (i, j) and not outer.tiled


def test_a_sum_down_the_columns_adds_rows():
    o, x, j, r = buffer("o", 1, shape=(64,)), buffer("x", 64, 1), ir.new_var(), ir.new_var("r")
    f32 = np.dtype(np.float32)
    total = ir.Reduce(f32, "add", r, 50, 0.0, ir.Load(f32, x, (r, j)))
    block = arrange([ir.For(j, 64, (ir.Store(o, (j,), total),))])
    assert not any(isinstance(n, ir.Reduce) for s in ir.statements(block) for e in ir.stmt_exprs(s) for n in ir.walk(e))
    rows = [s for s in block if isinstance(s, ir.For) and s.ordered]
    assert len(rows) == 1 and rows[0].extent == 6  # eight at a time, and two more


# --- what comes out ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_])
def test_transposes_of_every_size(dtype):
    xs = [numbers(*shape).astype(dtype) for shape in ((1, 5), (16, 16), (33, 70), (3, 100), (100, 3), (130, 66))]
    agree(lambda *xs: [x.T for x in xs], *xs)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_permutations_within_other_work(order):
    x, y = numbers(5, 18, 37), numbers(*(np.array([5, 18, 37])[list(order)]))
    agree(lambda x, y: jnp.transpose(x, order) * y + jnp.transpose(x + 1, order)[:1], x, y)


def test_a_transpose_added_to_the_output_itself():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[...] += x_ref[...].T * 2

    x = numbers(37, 37)
    got = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), **NATIVE)(x)
    np.testing.assert_array_equal(got, np.asarray(x) + 2 * np.asarray(x).T)


def test_a_long_body_does_not_run_in_tiles_itself():
    x, y = jnp.asarray(rng.standard_normal((40, 33)), jnp.float32), numbers(33, 40)
    agree(lambda x, y: jnp.tanh(jnp.exp(x.T)) + jnp.log1p(jnp.abs(x.T)) * jnp.sin(x.T + y) ** 2, x, y, tol=1e-5)


@pytest.mark.parametrize("shape", [(65, 3), (40, 5)])
def test_short_rows(shape):
    x, row, column = numbers(*shape), numbers(1, shape[1]), numbers(shape[0], 1)
    agree(lambda x, row, column: jnp.tanh(x + row) * column + x.sum(1, keepdims=True), x, row, column, tol=1e-5)


def test_a_part_of_a_row_leaves_the_rest_alone():
    x, y = numbers(6, 37), numbers(6, 5)
    agree(lambda x, y: lax.dynamic_update_slice(x * 2, y + 1, (0, 0)) - x.sum(1, keepdims=True), x, y)
    agree(lambda x, y: lax.dynamic_update_slice(x[0] * 2, y[0] + 1, (0,)) * x.max(), x, y)


def test_elements_a_few_apart_reversed_and_reshaped():
    def several(x):
        flat = x.reshape(-1)
        return flat[::2] + flat[1::2], flat[::3] * 2, x[::-1, ::-1] + x, x.reshape(12, 100) + 1

    agree(several, numbers(24, 50))


def test_interleaved_stores():
    x, y, z = (numbers(5, 70) for _ in range(3))
    agree(lambda x, y, z: (jnp.stack([x, y], -1), jnp.stack([x, y * 2, z], -1).reshape(5, -1)), x, y, z)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reductions_along_every_axis(axis):
    others = tuple(a for a in range(3) if a != axis)
    agree(lambda x: (jnp.sum(x, axis) + jnp.max(x * 2, axis), jnp.sum(x, others)), numbers(9, 21, 35))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_running_results(dtype):
    for shape, axis in (((4, 100), 1), ((100, 20), 0), ((3, 16), 1), ((70,), 0)):
        ways = [(f, reverse) for f in (lax.cumsum, lax.cummax) for reverse in (False, True)]
        agree(lambda x, a=axis, ways=ways: [f(x, a, r) for f, r in ways], numbers(*shape, dtype=dtype))


def test_running_products_and_logsumexp():
    x = jnp.asarray(rng.uniform(0.5, 1.5, (3, 37)), jnp.float32)
    agree(lambda x: lax.cumprod(x, 1), x, tol=1e-5)
    agree(lambda x: lax.cumlogsumexp(x, 1), x.at[0, :5].set(-np.inf).at[1, 30].set(np.inf), tol=1e-5)
    zero = jnp.full((1, 20), -0.0)
    got = pl.pallas_call(lambda x, o: o.__setitem__(..., lax.cumsum(x[...], 1)), zero, **NATIVE)(zero)
    assert np.signbit(np.asarray(got)).all()  # nothing is added to the first


@pytest.mark.parametrize("shape,axis", [((6, 100), 1), ((100, 40), 0), ((5, 3), 1), ((50,), 0)])
def test_the_place_of_the_extreme(shape, axis):
    x = numbers(*shape)  # few values: many equals, of which the first counts
    for y in (x, x.at[2:4].set(np.nan)):
        agree(lambda x: [f(x, axis=axis).astype(jnp.int32) for f in (jnp.argmax, jnp.argmin)], y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32])
@pytest.mark.parametrize("k", [1, 16])
def test_the_largest_few(k, dtype):
    x = numbers(4, 37, dtype=dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        x = x.at[0, 5:9].set(np.nan).at[1, 3].set(-np.inf)
    agree(lambda x: lax.top_k(x, k), x)


@pytest.mark.parametrize("count", [5, 40])
def test_a_place_that_is_added_to_twice(count):
    where = jnp.asarray(rng.integers(0, 7, count), jnp.int32)

    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        jax.ref.addupdate(o_ref, i_ref[...], x_ref[...])

    x = numbers(count)
    got = pl.pallas_call(kernel, jax.ShapeDtypeStruct((7,), jnp.float32), **NATIVE)(where, x)
    want = np.zeros(7)
    np.add.at(want, np.asarray(where), np.asarray(x))
    np.testing.assert_array_equal(got, want)


def test_as_on_a_machine_without_parts_of_vectors(monkeypatch):
    """The code for AVX2, which this machine runs too."""
    narrow = dataclasses.replace(target.host(), vector_bytes=min(target.host().vector_bytes, 32))
    monkeypatch.setattr(target, "host", lambda: narrow)
    x = numbers(16, 37)
    agree(lambda x: (x[:, :32].T + 1, x.T + 1, jnp.argmax(x, 1) + jnp.sum(x, 1), x[:, ::2].sum(1)), x)
    agree(lambda x: (lax.cumsum(x, 1) + x[:, ::-1] + jnp.max(x, 0), jnp.stack([x, x], -1)), x)


def test_large_results_are_advised_to_lie_in_large_pages(monkeypatch):
    from palladion.compiler.cpu import pages

    monkeypatch.setattr(pages, "LARGE", 1 << 12)
    x = numbers(64, 128)
    call = pl.pallas_call(lambda x, o: o.__setitem__(..., x[...] + 1), x, **NATIVE)
    (report,) = pl.compile(call, x).calls
    assert "madvise" in report.text("llvm")
    agree(lambda x: x + 1, x)
