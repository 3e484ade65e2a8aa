"""The eager interpreter: Refs in every construct of JAX, and all that a Ref offers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu

EAGER = pl.EagerParams()
X = np.arange(16, dtype=np.float32).reshape(4, 4)


def call(kernel, *args, out=(4, 4), dtype="float32", interpret=EAGER, **more):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(out, dtype), interpret=interpret, **more)(*args)


def both(kernel, *args, **more):
    """The eager result, after a check that the traced kernel gives the same."""
    eager = np.asarray(call(kernel, *args, **more))
    np.testing.assert_array_equal(eager, call(kernel, *args, interpret=True, **more))
    return eager


def is_value(x) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


# --- control flow runs as Python ------------------------------------------------------------------------------------
def test_cond_and_switch_run_one_branch_with_refs_closed_over_and_passed():
    ran = []

    def kernel(x_ref, o_ref):
        def put(name, row, ref):
            ran.append(name)
            o_ref[row] = ref[row] + row

        big = x_ref[1, 0] > 3
        lax.cond(big, lambda r: put("yes", 0, r), lambda r: put("no", 0, r), x_ref)
        lax.switch(jnp.int32(7), [lambda: put("first", 1, x_ref), lambda: put("last", 1, x_ref)])
        pl.when(big)(lambda: put("when", 2, x_ref))
        pl.when(jnp.logical_not(big))(lambda: put("never", 2, x_ref))
        o_ref[3] = lax.cond(big, lambda: x_ref[3], lambda: x_ref[0])

    out = call(kernel, X)
    assert ran == ["yes", "last", "when"]
    np.testing.assert_array_equal(out, X + np.array([0, 1, 2, 0])[:, None])


def test_loops_see_values_and_write_refs():
    seen = []

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def row(i, total):
            assert is_value(i) and is_value(total)
            seen.append(int(i))
            o_ref[i] = x_ref[i] * i.astype(jnp.float32)
            return total + x_ref[i, 0]

        o_ref[0, 0] = lax.fori_loop(1, 4, row, 0.0)
        o_ref[0, 1] = lax.fori_loop(jnp.int32(2), x_ref[0, 3].astype(jnp.int32), row, jnp.float32(1))

        def step(carry, i):
            assert is_value(i)
            o_ref[i, 3] += 100
            return carry + i, carry

        last, before = lax.scan(step, jnp.int32(0), jnp.arange(4), reverse=True)
        o_ref[0, 2] = (last * 100 + before[0]).astype(jnp.float32)
        pl.loop(0, 4, step=3)(lambda i: seen.append(int(i)))

    out = call(kernel, X)
    assert seen == [1, 2, 3, 2, 0, 3]
    want = X * np.arange(4)[:, None]
    want[0] = [24, 9, 606, 0]
    want[:, 3] += 100
    np.testing.assert_array_equal(out, want)


def test_while_condition_reads_what_the_body_writes():
    rounds = []

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        def body(n):
            rounds.append(float(o_ref[0, 1]))
            o_ref[0, 1] = o_ref[0, 1] * 2
            return n + 1

        o_ref[0, 0] = lax.while_loop(lambda n: o_ref[0, 1] < 8, body, 0).astype(jnp.float32)

    out = call(kernel, X)
    assert rounds == [1.0, 2.0, 4.0] and out[0].tolist() == [3, 8, 2, 3]


def test_functions_of_functions_see_values():
    @jax.custom_jvp
    def doubled(v):
        assert is_value(v)
        return v * 2

    doubled.defjvp(lambda p, t: (doubled(p[0]), t[0] * 2))

    @jax.custom_vjp
    def tripled(v):
        assert is_value(v)
        return v * 3

    tripled.defvjp(lambda v: (tripled(v), None), lambda _, g: (g * 3,))

    def kernel(x_ref, o_ref):
        @jax.jit
        def add_row(ref, row):
            assert is_value(ref[row])
            o_ref[row] = ref[row] + 1

        add_row(x_ref, 0)
        o_ref[1] = doubled(x_ref[1])
        o_ref[2] = tripled(x_ref[2])
        o_ref[3] = jax.grad(lambda v: jnp.sum(tripled(v) * x_ref[0] + doubled(v)))(x_ref[3])

    want = X * np.array([1, 2, 3, 0])[:, None] + np.array([1, 0, 0, 2])[:, None]
    want[3] += 3 * X[0]
    np.testing.assert_array_equal(call(kernel, X), want)


def test_checkpoint_is_traced_but_reads_writes_prints_and_checks_refs(capsys):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @jax.checkpoint
        def step(v):
            pl.debug_print("v {}", v)
            pl.debug_check(v < 5, "v is large")
            o_ref[0] = o_ref[1] * v
            return o_ref[0, 1] + pl.multiple_of(pl.program_id(0) + pl.num_programs(0), 1) + x_ref[2, 0]

        o_ref[3, 3] = step(x_ref[0, 2])

    with pl.enable_debug_checks(True):
        out = call(kernel, X, grid=(1,))
        assert capsys.readouterr().out == "v 2.0\n"
        assert out[0].tolist() == [8, 10, 12, 14] and out[3, 3] == 10 + 1 + 8
        with pytest.raises(pl.KernelCheckError, match="v is large"):
            call(kernel, X + 4, grid=(1,))


def test_compiled_parts_inside_a_kernel():
    """`with jax.disable_jit(False)` makes a slow loop fast: JAX traces it, and it runs on the same Refs."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        with jax.disable_jit(False):

            def row(i, total):
                o_ref[i, 0] = x_ref[i, 1] + total
                return total + 1

            o_ref[0, 3] = lax.fori_loop(0, 4, row, 0.0)
            o_ref[1, 3] = jax.jit(lambda r: lax.cond(r[0, 3] > 3, lambda: r[3, 3], lambda: r[0, 0]))(o_ref)
            lax.while_loop(lambda n: o_ref[2, 2] < 100, lambda n: _double(o_ref, n), 0)
            _, o_ref[3] = lax.scan(lambda c, i: (c, x_ref[i, i] + c), 1.0, jnp.arange(4), reverse=True)
            lax.scan(lambda c, i: (c, x_ref[0]), 0, jnp.arange(0))

    def _double(ref, n):
        ref[2, 2] = ref[2, 2] * 2
        return n + 1

    out = both(kernel, X)
    assert out[0].tolist() == [1, 1, 2, 4] and out[1, 3] == 15 and out[2, 2] == 160
    assert out[3].tolist() == [1, 6, 11, 16]


def test_vmap_reads_refs_at_batched_indices():
    def kernel(x_ref, o_ref):
        rows = (jnp.arange(4) + 3) % 4
        o_ref[...] = jax.vmap(lambda i: x_ref[i] + x_ref[0, i] + i.astype(jnp.float32))(rows)

    rows = [3, 0, 1, 2]
    want = X[rows] + X[0, rows][:, None] + np.array(rows)[:, None]
    np.testing.assert_array_equal(both(kernel, X, grid=(1,)), want)


def test_vmap_of_loops_and_branches():
    def kernel(x_ref, o_ref):
        values = jnp.arange(1.0, 5.0)
        o_ref[0] = jax.vmap(lambda v: lax.while_loop(lambda u: u < x_ref[2, 1], lambda u: u + x_ref[0, 1] * v, v))(
            values
        )
        o_ref[1] = jax.vmap(lambda v: lax.fori_loop(0, 3, lambda i, u: u + x_ref[0, i] * v, v))(values)
        o_ref[2] = jax.vmap(lambda v: lax.cond(v > 2, lambda: v, lambda: -v))(values)
        o_ref[3] = jax.vmap(
            lambda v: lax.while_loop(lambda u: u[0] < 9, lambda u: (u[0] + v, u[1] * 2), (v, x_ref[0]))[1][1]
        )(values)

    out = call(kernel, X)
    assert out[0].tolist() == [9, 10, 9, 12]
    assert out[1].tolist() == [4, 8, 12, 16]
    assert out[2].tolist() == [-1, -2, 3, 4]
    assert out[3].tolist() == [256, 16, 4, 4]


# --- what a Ref offers ----------------------------------------------------------------------------------------------
def test_attributes_and_array_functions():
    def kernel(x_ref, o_ref):
        assert (x_ref.shape, x_ref.dtype, x_ref.ndim, x_ref.size, len(x_ref)) == ((4, 4), jnp.float32, 2, 16, 4)
        view = x_ref.at[1:3].T
        assert (view.shape, view.dtype, view.ndim, view.size, len(view)) == ((4, 2), jnp.float32, 2, 8, 4)
        rows = jax.tree.map(lambda ref: ref[0], {"a": x_ref, "b": [x_ref]})
        o_ref[...] = jnp.zeros_like(x_ref) + jnp.full_like(x_ref, 3) + jnp.ones_like(x_ref)
        o_ref[0] = rows["a"] + rows["b"][0]

    want = np.full((4, 4), 4.0)
    want[0] = 2 * X[0]
    np.testing.assert_array_equal(both(kernel, X), want)


def test_views_chain_and_write_through():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        i = pl.program_id(0) + 1
        o_ref.at[pl.ds(i, 2)].T[0] = jnp.full((2,), -1.0)
        o_ref.at[:, 1:3].reshape(8)[pl.ds(i, 3)] = jnp.full((3,), -2.0)  # not contiguous, so reshaped by a copy
        o_ref.at[3].at[i].set(7.0)
        o_ref.bitcast(jnp.int32)[0, 3] = 0x40490FDB
        o_ref.bitcast(jnp.uint16)[7, 2] = jnp.uint16(0x4120)
        o_ref[2, 0] = o_ref.T.at[3].get()[0]
        o_ref.at[2].reshape(2, 2).T[1] += 0.5

    want = X.copy()
    want[1:3, 0] = -1
    want[0, 2] = want[1, 1] = want[1, 2] = -2
    want[3, 1] = 7
    want[0, 3] = want[2, 0] = np.pi
    want.view(np.uint16)[3, 5] = 0x4120
    want[2, [1, 3]] += 0.5
    np.testing.assert_array_equal(both(kernel, X, grid=(1,)), want)


def test_functions_of_jax_ref():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        i = pl.program_id(0)
        old = jax.ref.swap(o_ref, (i,), jax.ref.get(x_ref, (i + 1,)))
        jax.ref.set(o_ref, (1, slice(0, 2)), old[:2] - 1)
        jax.ref.addupdate(o_ref, (2 + jnp.arange(3) % 2, 0), jnp.full((3,), 100.0))
        jax.ref.addupdate(o_ref.at[2], (slice(1, 3),), jnp.ones((2,)))
        jax.ref.addupdate(o_ref, (), o_ref.at[0:1].get() * jnp.ones((4, 1)))

    want = X.copy()
    want[0] = X[1]
    want[1, :2] = X[0, :2] - 1
    want[2, 0] += 200
    want[3, 0] += 100
    want[2, 1:3] += 1
    np.testing.assert_array_equal(both(kernel, X, grid=(1,)), want + want[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "bool", "int4", "uint8"])
def test_narrow_dtypes_pass_unchanged(dtype):
    def kernel(x_ref, o_ref, tmp_ref):
        assert x_ref[...].dtype == x_ref.dtype == jnp.dtype(dtype)
        tmp_ref[...] = x_ref[...]
        tmp_ref[0] = x_ref[1]
        o_ref[...] = tmp_ref[...]

    x = jnp.asarray(np.arange(16).reshape(4, 4) % 7).astype(dtype)
    out = both(kernel, x, dtype=dtype, scratch_shapes=[pltpu.VMEM((4, 4), dtype)])
    np.testing.assert_array_equal(out, np.asarray(x)[[1, 1, 2, 3]])


def test_repeated_accumulation_in_bfloat16_counts_every_contribution():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        jax.ref.addupdate(o_ref, (jnp.array([1, 1, 3, 1]),), x_ref[...])

    x = jnp.arange(16, dtype="bfloat16").reshape(4, 4)
    out = call(kernel, x, dtype="bfloat16").astype(np.float32)
    np.testing.assert_array_equal(out, np.stack([0 * X[0], X[0] + X[1] + X[3], 0 * X[0], X[2]]))


def test_typed_random_keys_in_blocks():
    def kernel(key_ref, o_ref):
        o_ref[...] = jax.random.uniform(key_ref.reshape(1)[0], (1, 4))

    specs = dict(in_specs=[pl.BlockSpec((1, 1), lambda i: (i, 0))], out_specs=pl.BlockSpec((1, 4), lambda i: (i, 0)))
    keys = jax.random.split(jax.random.key(3), (4, 1))
    out = both(kernel, keys, grid=(4,), **specs)
    np.testing.assert_array_equal(out, jnp.stack([jax.random.uniform(k[0], (4,)) for k in keys]))


def test_masks_known_at_run_time():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[x_ref[...] > 11] = 0.0
        o_ref[x_ref[...] < 3] = x_ref[...] * 10

    np.testing.assert_array_equal(both(kernel, X), np.where(X > 11, 0, np.where(X < 3, X * 10, X)))

    def select(x_ref, o_ref):  # as a constant mask does; the traced kernel, which cannot know the number, refuses
        o_ref[...] = x_ref[...]
        o_ref[x_ref[:, 0] > 6] = jnp.stack([x_ref[x_ref[:, 0] < 1][0], x_ref[1]])

    np.testing.assert_array_equal(call(select, X), X[[0, 1, 0, 1]])


def test_aliased_inputs_may_be_stored_to():
    def kernel(x_ref, o_ref):
        x_ref[0] = x_ref[1]
        o_ref[...] = x_ref[...] + 1

    x = jnp.asarray(X)
    np.testing.assert_array_equal(both(kernel, x, input_output_aliases={0: 0}), X[[1, 1, 2, 3]] + 1)
    np.testing.assert_array_equal(x, X)
