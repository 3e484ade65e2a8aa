"""pltriton's masked loads and stores, atomics, dot and hints, in both interpreters, against NumPy."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import triton as pltriton

MODES = [True, pl.EagerParams()]
modes = pytest.mark.parametrize("interpret", MODES, ids=["reference", "eager"])


def call(kernel, out, *operands, interpret=True, **kwargs):
    """Run a kernel; `out` is an array or a tuple of arrays that stand for the outputs' types."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), out)
    return jax.tree.map(np.asarray, pl.pallas_call(kernel, shapes, interpret=interpret, **kwargs)(*operands))


def f32(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def first_line(error):
    return str(error.value).splitlines()[0]


def eager_refuses_slices(interpret, fits: bool):
    """The eager interpreter looks at a slice before it knows of a mask: what runs past the end is an error there."""
    refuses = not fits and interpret is not True
    return pytest.raises(IndexError, match="runs past dimension") if refuses else contextlib.nullcontext()


# --- loads ----------------------------------------------------------------------------------------------------------
@modes
def test_index_arrays_may_leave_the_ref_where_the_mask_is_off(interpret):
    def kernel(x_ref, o_ref):
        i = jnp.arange(16) - 3
        o_ref[...] = pltriton.load(x_ref.at[i], mask=(i >= 0) & (i < 8), other=-1)

    want = np.concatenate([np.full(3, -1), f32(8), np.full(5, -1)])
    np.testing.assert_array_equal(call(kernel, np.zeros(16, np.float32), f32(8), interpret=interpret), want)


@modes
@pytest.mark.parametrize("start", [-9, -2, 0, 3, 5, 8, 40])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_slice_under_a_mask_never_moves_back_inside(start, stride, interpret):
    def kernel(s_ref, x_ref, o_ref):
        i = s_ref[0] + stride * jnp.arange(4)
        inside = (i >= 0) & (i < 8)
        o_ref[...] = pltriton.load(x_ref.at[pl.ds(s_ref[0], 4, stride)], mask=inside, other=0)

    i = start + stride * np.arange(4)
    want = np.where((i >= 0) & (i < 8), i + 1, 0)
    with eager_refuses_slices(interpret, i[0] >= 0 and i[-1] < 8):
        got = call(kernel, np.zeros(4, np.float32), np.array([start], np.int32), f32(8), interpret=interpret)
        np.testing.assert_array_equal(got, want)


@modes
def test_two_dimensions_with_a_slice_an_integer_and_arrays(interpret):
    x = f32(3, 5, 6)

    def kernel(s_ref, x_ref, a_ref, b_ref, c_ref):
        rows, cols = s_ref[0] + jnp.arange(4), jnp.arange(8)
        mask = (rows < 5)[:, None] & (cols < 6)[None]
        a_ref[...] = pltriton.load(x_ref.at[1, pl.ds(s_ref[0], 4), :], mask=(rows < 5)[:, None], other=0)
        b_ref[...] = pltriton.load(x_ref.at[2, rows[:, None], cols[None]], mask=mask, other=0)
        c_ref[...] = pltriton.load(x_ref.at[s_ref[1], :, cols], mask=(cols < 6)[:, None], other=0)

    out = (np.zeros((4, 6), np.float32), np.zeros((4, 8), np.float32), np.zeros((8, 5), np.float32))
    with eager_refuses_slices(interpret, fits=False):
        call(kernel, out, np.array([2, 0], np.int32), x, interpret=interpret)
    a, b, c = call(kernel, out, np.array([2, 0], np.int32), x)
    padded = np.pad(x, ((0, 0), (0, 1), (0, 2)))
    np.testing.assert_array_equal(a, padded[1, 2:6, :6])
    np.testing.assert_array_equal(b, padded[2, 2:6, :8])
    np.testing.assert_array_equal(c, padded[0, :5, :8].T)


@modes
def test_other_is_an_array_or_a_number_or_nothing(interpret):
    def kernel(x_ref, a_ref, b_ref, c_ref, d_ref):
        mask = jnp.arange(4) < 2
        a_ref[...] = pltriton.load(x_ref, mask=mask, other=10 * jnp.arange(4.0))
        b_ref[...] = pltriton.load(x_ref, mask=mask)
        c_ref[...] = pltriton.load(x_ref, mask=True, other=0, eviction_policy="evict_last", volatile=True)
        d_ref[...] = pltriton.load(x_ref.at[1:3], cache_modifier=".cg")

    out = (np.zeros(4, np.float32),) * 3 + (np.zeros(2, np.float32),)
    a, b, c, d = call(kernel, out, f32(4), interpret=interpret)
    np.testing.assert_array_equal(a, [1, 2, 20, 30])
    np.testing.assert_array_equal(b, [1, 2, np.nan, np.nan])
    np.testing.assert_array_equal(c, f32(4))
    np.testing.assert_array_equal(d, [2, 3])


# --- stores ---------------------------------------------------------------------------------------------------------
@modes
@pytest.mark.parametrize("start", [-3, 0, 5, 7, 30])
@pytest.mark.parametrize("stride", [1, 2])
def test_masked_stores_of_slices(start, stride, interpret):
    def kernel(s_ref, o_ref):
        i = s_ref[0] + stride * jnp.arange(4)
        o_ref[...] = jnp.zeros(8)
        mask = (i >= 0) & (i < 8) & (jnp.arange(4) != 1)
        pltriton.store(o_ref.at[pl.ds(s_ref[0], 4, stride)], 10.0 + jnp.arange(4), mask=mask)

    want = np.zeros(8)
    for lane in (0, 2, 3):
        if 0 <= start + stride * lane < 8:
            want[start + stride * lane] = 10 + lane
    with eager_refuses_slices(interpret, start >= 0 and start + 3 * stride < 8):
        got = call(kernel, np.zeros(8, np.float32), np.array([start], np.int32), interpret=interpret)
        np.testing.assert_array_equal(got, want)


@modes
def test_a_lane_that_is_off_does_not_undo_one_that_is_on(interpret):
    """Both index element 2: `jnp.where(mask, new, old)` round a scatter would store the old value last."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros(4)
        pltriton.store(o_ref.at[jnp.minimum(jnp.arange(6), 2)], x_ref[...], mask=jnp.arange(6) < 3)

    np.testing.assert_array_equal(call(kernel, np.zeros(4, np.float32), f32(6), interpret=interpret), [1, 2, 3, 0])


@modes
def test_stores_through_views(interpret):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros((4, 6))
        cols = jnp.arange(8)
        pltriton.store(o_ref.at[1:3].at[:, cols], x_ref[...], mask=cols < 6)
        pltriton.store(o_ref.T.at[0], jnp.full(4, -1.0), mask=jnp.arange(4) == 3)
        pltriton.store(o_ref.reshape(24), jnp.full(24, -2.0), mask=jnp.arange(24) == 5)

    want = np.zeros((4, 6))
    want[1:3] = f32(2, 8)[:, :6]
    want[3, 0], want[0, 5] = -1, -2
    got = call(kernel, np.zeros((4, 6), np.float32), f32(2, 8), interpret=interpret)
    np.testing.assert_array_equal(got, want)


@modes
def test_a_masked_tail_in_a_grid(interpret):
    """The usual Triton kernel: a power-of-two block over a size that is none, on the whole operand."""
    x = f32(37)

    def kernel(x_ref, o_ref):
        i = pl.program_id(0) * 16 + jnp.arange(16)
        pltriton.store(o_ref.at[i], 2 * pltriton.load(x_ref.at[i], mask=i < 37), mask=i < 37)

    np.testing.assert_array_equal(call(kernel, x, x, grid=3, interpret=interpret), 2 * x)


# --- atomics --------------------------------------------------------------------------------------------------------
SERIAL = {
    "add": lambda found, value: found + value,
    "max": max,
    "min": min,
    "and": lambda found, value: found & value,
    "or": lambda found, value: found | value,
    "xor": lambda found, value: found ^ value,
    "xchg": lambda found, value: value,
}


@modes
@pytest.mark.parametrize("op", SERIAL)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_atomics_take_turns(op, used, masked, interpret):
    start, values = np.array([7, 3, 9, 5], np.int32), np.array([8, 6, 1, 12, 10, 4], np.int32)
    index, mask = np.array([0, 2, 2, 1, 2, 0]), np.array([True, True, False, True, True, True])

    def kernel(x_ref, v_ref, i_ref, m_ref, o_ref, found_ref):
        o_ref[...] = x_ref[...]
        found_ref[...] = jnp.zeros(6, jnp.int32)
        where = dict(mask=m_ref[...]) if masked else {}
        found = getattr(pltriton, f"atomic_{op}")(o_ref, (i_ref[...],), v_ref[...], **where)
        if used:
            found_ref[...] = jnp.where(m_ref[...], found, 0)

    want, found = start.copy(), np.zeros(6, np.int32)
    for lane in range(6):
        if mask[lane] or not masked:
            found[lane] = want[index[lane]]
            want[index[lane]] = SERIAL[op](int(want[index[lane]]), int(values[lane]))
    got, got_found = call(kernel, (start, found), start, values, index, mask, interpret=interpret)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_found, np.where(mask, found, 0) if used else 0)


@modes
def test_atomic_add_over_programs_and_compare_and_swap(interpret):
    def kernel(x_ref, total_ref, lock_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            total_ref[...] = jnp.zeros(1)
            lock_ref[...] = jnp.zeros(2, jnp.int32)

        pltriton.atomic_add(total_ref, 0, jnp.sum(x_ref[...]))
        found = pltriton.atomic_cas(lock_ref.at[0], 0, pl.program_id(0) + 5)
        lock_ref[1] += (found == 0).astype(jnp.int32)

    x = f32(12)
    total, lock = call(
        kernel,
        (np.zeros(1, np.float32), np.zeros(2, np.int32)),
        x,
        grid=4,
        interpret=interpret,
        in_specs=[pl.BlockSpec((3,), lambda i: i)],
    )
    assert total[0] == x.sum() and lock.tolist() == [5, 1]


# --- dot, functions, hints --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.int8, jnp.int32),
    ],
)
def test_dot(trans_a, trans_b, dtype, result):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-8, 9, s), dtype) for s in ((16, 24), (24, 8)))

    def kernel(a_ref, b_ref, o_ref):
        out = pltriton.dot(a_ref[...], b_ref[...], trans_a, trans_b)
        assert out.dtype == result
        o_ref[...] = out

    got = call(kernel, np.zeros((16, 8), result), a.T if trans_a else a, b.T if trans_b else b)
    np.testing.assert_array_equal(got, np.asarray(a, np.float64) @ np.asarray(b, np.float64))


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({}, None),
        (dict(allow_tf32=True), jax.lax.Precision.DEFAULT),
        (dict(allow_tf32=False), jax.lax.Precision.HIGHEST),
        (dict(precision="highest"), jax.lax.Precision.HIGHEST),
    ],
)
def test_precision_of_dot(given, precision):
    jaxpr = jax.make_jaxpr(lambda a, b: pltriton.dot(a, b, **given))(f32(4, 4), f32(4, 4))
    (eqn,) = jaxpr.eqns
    assert eqn.params["precision"] == (None if precision is None else (precision, precision))


def test_functions_and_hints():
    def kernel(x_ref, a_ref, b_ref):
        i = pltriton.max_contiguous(pl.multiple_of(8 * pl.program_id(0), 8) + jnp.arange(8), 8)
        a_ref[...] = pltriton.approx_tanh(pltriton.load(x_ref.at[i]))
        b_ref[...] = i

    a, b = call(kernel, (f32(8), np.zeros(8, np.int32)), f32(8), grid=1)
    np.testing.assert_allclose(a, np.tanh(np.arange(1, 9)), rtol=1e-6)
    np.testing.assert_array_equal(b, np.arange(8))


# --- transforms and checks --------------------------------------------------------------------------------------------
def test_vmap_of_the_call_and_in_the_kernel():
    def kernel(x_ref, o_ref):
        i = jnp.arange(8)
        o_ref[...] = pltriton.load(x_ref.at[i], mask=i < 6, other=0)

    def inside(x_ref, o_ref):
        def row(r):
            got = pltriton.load(x_ref.at[r].at[jnp.arange(8)], mask=jnp.arange(8) < 6, other=0)
            pltriton.store(o_ref.at[r], got, mask=jnp.arange(8) < 7)
            return got

        o_ref[...] = jnp.ones((4, 8))
        jax.vmap(row)(jnp.arange(4))

    x, want = f32(4, 6), np.pad(f32(4, 6), ((0, 0), (0, 2)))
    f = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)
    np.testing.assert_array_equal(jax.vmap(f)(x), want)
    want[:, 7] = 1
    np.testing.assert_array_equal(call(inside, np.zeros((4, 8), np.float32), x), want)


@pytest.mark.parametrize("other", [None, 3.0])
def test_jvp(other):
    def kernel(x_ref, o_ref):
        i = jnp.arange(8)
        value = pltriton.load(x_ref.at[i], mask=i < 6, other=other)
        o_ref[...] = jnp.ones(8)
        pltriton.store(o_ref.at[i], value**2, mask=i != 2)

    f = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)
    x, t = f32(6), np.array([1, 2, 3, 4, 5, 6], np.float32)
    out, tangent = jax.jvp(f, (x,), (t,))
    padding = np.nan if other is None else other**2
    np.testing.assert_array_equal(out, [1, 4, 1, 16, 25, 36, padding, padding])
    np.testing.assert_array_equal(tangent[:6], [2, 8, 0, 32, 50, 72])
    assert other is None or (tangent[6:] == 0).all()


@pytest.mark.parametrize("operation", ["load", "store", "atomic"])
def test_a_lane_that_is_on_must_stay_inside(operation):
    def kernel(x_ref, o_ref):
        i = jnp.arange(4) + 2
        o_ref[...] = jnp.zeros(4)
        if operation == "load":
            o_ref[...] = pltriton.load(x_ref.at[i], mask=i < 5)
        elif operation == "store":
            pltriton.store(o_ref.at[i], x_ref[...], mask=i < 5)
        else:
            pltriton.atomic_add(o_ref, i, x_ref[...], mask=i < 5)

    name = {"load": "masked_load", "store": "masked_store", "atomic": "atomic_update"}[operation]
    where = "x_ref (input 0)" if operation == "load" else "o_ref (output 0)"
    line = f"A lane of {name} whose mask is on points outside {where}."
    with pytest.raises(IndexError) as error:
        call(kernel, f32(4), f32(4), interpret=pl.EagerParams())
    assert first_line(error) == line and "test_triton_ops.py" in str(error.value)
    with pl.enable_debug_checks(True), pytest.raises(pl.KernelCheckError) as error:
        call(kernel, f32(4), f32(4))
    assert first_line(error) == line
    call(kernel, f32(4), f32(4))  # no check is on: as on a GPU, anything may come out


def wrong(body):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        body(x_ref, o_ref)

    return kernel


@pytest.mark.parametrize(
    ("body", "kind", "line"),
    [
        (
            lambda x, o: pltriton.load(x[...]),
            TypeError,
            "pltriton.load takes a Ref or a view of one, such as x_ref.at[i]",
        ),
        (lambda x, o: pltriton.load(x, mask=jnp.arange(8)), TypeError, "The mask of pltriton.load has dtype int32"),
        (
            lambda x, o: pltriton.load(x, mask=jnp.arange(7) < 2),
            ValueError,
            "The mask of pltriton.load has shape (7,); it is to cover shape (8,).",
        ),
        (lambda x, o: pltriton.load(x, other=1), ValueError, "pltriton.load got other=1 without a mask"),
        (
            lambda x, o: pltriton.load(x, mask=True, other=jnp.zeros(3)),
            ValueError,
            "The other of pltriton.load has shape (3,); it is to cover shape (8,).",
        ),
        (lambda x, o: pltriton.store(o, x[0:4], mask=True), ValueError, "Cannot write a value of shape (4,)"),
        (
            lambda x, o: pltriton.store(o, x[...].astype(jnp.int32), mask=True),
            ValueError,
            "Cannot write a value of dtype int32",
        ),
        (lambda x, o: pltriton.atomic_or(o, 0, 1), TypeError, "pltriton.atomic_or works on integers; a view of o_ref"),
        (
            lambda x, o: pltriton.atomic_add(o, slice(0, 4), jnp.zeros(3)),
            ValueError,
            "The value of pltriton.atomic_add has shape (3,); it is to cover shape (4,).",
        ),
        (lambda x, o: pltriton.dot(x[...], x[...]), ValueError, "`a` and `b` must be 2D arrays"),
        (
            lambda x, o: pltriton.dot(x[...][None], x[...][None]),
            ValueError,
            "pltriton.dot: the inner sizes differ, 8 and 1.",
        ),
        (
            lambda x, o: pltriton.dot(x[...][None], x[...][None], trans_b=True, allow_tf32=True, precision="high"),
            ValueError,
            "Only one of allow_tf32 and precision can be specified",
        ),
        (
            lambda x, o: pltriton.approx_tanh(jnp.arange(3)),
            TypeError,
            "approx_tanh takes floating-point arrays, not int32.",
        ),
        (
            lambda x, o: pltriton.max_contiguous(jnp.arange(3), 0),
            ValueError,
            "max_contiguous takes positive integers, not 0.",
        ),
    ],
)
def test_mistakes(body, kind, line):
    with pytest.raises(kind) as error:
        call(wrong(body), f32(8), f32(8))
    assert first_line(error).startswith(line)
