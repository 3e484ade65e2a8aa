"""The reference interpreter beyond values: memory, what is compiled when, order, and where JAX's own goes wrong."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion.language import intern
from palladion.reference import parallel

rng = np.random.default_rng(0)


def randn(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tiled(kernel, n, block, **options):
    """A call on an n x n array in square blocks."""
    spec = pl.BlockSpec((block, block), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel, f32(n, n), grid=(-(-n // block),) * 2, in_specs=[spec], out_specs=spec, interpret=True, **options
    )


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def cumsum(x_ref, o_ref):
    o_ref[...] = jnp.cumsum(x_ref[...], axis=1)


def matmul(m, bm):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    return pl.pallas_call(
        kernel,
        f32(m, m),
        grid=(m // bm,) * 3,
        in_specs=[pl.BlockSpec((bm, bm), lambda i, j, k: (i, k)), pl.BlockSpec((bm, bm), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bm), lambda i, j, k: (i, j)),
        interpret=True,
    )


def temporary_bytes(call, *shapes):
    """What XLA allocates beyond the operands and results."""
    return jax.jit(call).lower(*(f32(*s) for s in shapes)).compile().memory_analysis().temp_size_in_bytes


BLOCK = 128 * 128 * 4


@pytest.mark.parametrize(
    "call,shapes",
    [
        (tiled(double, 1024, 128), [(1024, 1024)]),
        (tiled(double, 1000, 128), [(1000, 1000)]),
        (tiled(cumsum, 1024, 128), [(1024, 1024)]),
        (tiled(cumsum, 1000, 128), [(1000, 1000)]),
        (matmul(1024, 128), [(1024, 1024)] * 2),
        (jax.vmap(tiled(cumsum, 1024, 128)), [(4, 1024, 1024)]),
        (tiled(cumsum, 1024, 128, input_output_aliases={0: 0}), [(1024, 1024)]),
    ],
    ids=["at once", "at once, ragged", "in order", "ragged", "matmul", "vmap", "alias"],
)
def test_memory_is_operands_results_and_a_few_blocks(call, shapes):
    assert temporary_bytes(call, *shapes) <= 8 * BLOCK  # the arrays are 64 blocks and more


def compilations(run):
    """How often XLA compiles while `run` runs."""
    count = 0

    def listen(event, duration, **_):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count


def test_an_eager_call_traces_and_compiles_once():
    traces = 0

    def kernel(x_ref, o_ref):
        nonlocal traces
        traces += 1
        o_ref[...] = x_ref[...] * 3

    call = tiled(kernel, 8, 4)
    x = randn(8, 8)
    assert compilations(lambda: call(x)) >= 1
    assert compilations(lambda: [call(x) for _ in range(5)]) == 0
    assert traces == 1


def test_a_call_made_afresh_is_not_compiled_afresh():
    def run(x, factor):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * factor

        return tiled(kernel, 8, 4)(x)

    x = randn(8, 8)
    np.testing.assert_allclose(run(x, 5), x * 5, rtol=1e-6)
    assert compilations(lambda: run(x, 5)) == 0
    # What looks alike but is not the same is kept apart.
    np.testing.assert_allclose(run(x, 6), x * 6, rtol=1e-6)
    np.testing.assert_allclose(run(x, 5), x * 5, rtol=1e-6)


def test_interning_tells_kernels_apart():
    x = jnp.arange(8, dtype=jnp.int32)

    def run(fill, axis_block, custom=None):
        def kernel(x_ref, o_ref):
            o_ref[...] = (custom or (lambda v: v))(x_ref[...]) + fill

        spec = pl.BlockSpec((axis_block,), lambda i: (i,))
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((8,), jnp.int32),
            grid=8 // axis_block,
            in_specs=[spec],
            out_specs=spec,
            interpret=True,
        )(x)

    def with_rule(k):
        f = jax.custom_jvp(lambda v: v * k)
        f.defjvp(lambda p, t: (f(*p), t[0]))
        return f

    for fill in (1, 2, -1):
        for block in (2, 4, 8):
            np.testing.assert_array_equal(run(fill, block), np.arange(8) + fill)
    for k in (2, 3):
        np.testing.assert_array_equal(run(0, 4, with_rule(k)), np.arange(8) * k)
    assert intern._key(1) != intern._key(True) != intern._key(1.0)


def test_a_grid_of_100_000_programs_costs_a_constant_each():
    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]

    n = 100_000
    spec = pl.BlockSpec((2,), lambda i: (i,))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((2 * n,), jnp.int32),
        grid=n,
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((2,), jnp.int32)],
        interpret=True,
    )
    x = jnp.asarray(rng.integers(-5, 5, 2 * n), jnp.int32)
    np.testing.assert_array_equal(call(x), np.asarray(x).reshape(n, 2).cumsum(0).ravel())


def test_a_grid_too_large_for_tables():
    def kernel(x_ref, o_ref):
        o_ref[0] += x_ref[0]

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(3, 1 << 20),
        in_specs=[pl.BlockSpec((1,), lambda i, j: (i,))],
        out_specs=pl.BlockSpec((1,), lambda i, j: (0,)),
        interpret=True,
    )
    aliased = pl.run_state(lambda r: r.__setitem__(..., r[...] * 0))
    out = call(jnp.array([1, 2, 3], jnp.int32))
    start = np.iinfo(np.int32).min  # uninitialised
    assert int(out[0]) == start + (1 << 20) * 6
    assert int(aliased(out)[0]) == 0


def test_while_loop_condition_sees_what_the_body_writes():
    def kernel(x_ref, o_ref):
        o_ref[0] = 0.0

        def body(n):
            o_ref[0] += 1.0
            return n + 1

        o_ref[1] = lax.while_loop(lambda n: (o_ref[0] < 5) & (n < 50), body, 0).astype(jnp.float32)

    out = pl.pallas_call(kernel, f32(2), interpret=True)(jnp.zeros(2))
    np.testing.assert_array_equal(out, [5, 5])


def test_while_loop_condition_may_write_a_ref():
    def kernel(o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def cond(n):
            o_ref[0] += 1.0  # runs once more than the body
            return o_ref[1] < 3

        def body(n):
            o_ref[1] += 1.0
            return n

        lax.while_loop(cond, body, 0)

    np.testing.assert_array_equal(pl.pallas_call(kernel, f32(2), interpret=True)(), [4, 3])


@pytest.mark.parametrize("grid", [(2, 3), (3, 2)])
def test_program_ids_at_any_depth(grid):
    @jax.jit
    def helper(o_ref):
        o_ref[0, 0] = 10 * pl.program_id(0) + pl.program_id(1)
        return pl.num_programs(0)

    def kernel(o_ref):
        n = helper(o_ref)

        def body(k, _):
            @pl.when(pl.program_id(1) > 0)
            def _():
                o_ref[0, 0] += 100 * n + k

        lax.fori_loop(0, 2, body, None)

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(grid, jnp.int32),
        grid=grid,
        out_specs=pl.BlockSpec((1, 1), lambda i, j: (i, j)),
        interpret=True,
    )
    i, j = np.indices(grid)
    np.testing.assert_array_equal(call(), 10 * i + j + np.where(j > 0, 200 * grid[0] + 1, 0))


def test_prints_come_in_grid_order(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("{} {}: {:.1f}", pl.program_id(0), pl.program_id(1), x_ref[0, 0])
        o_ref[...] = x_ref[...]

    x = jnp.arange(64.0).reshape(8, 8)
    jax.block_until_ready(tiled(kernel, 8, 2)(x))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"{i} {j}: {16.0 * i + 2.0 * j:.1f}" for i in range(4) for j in range(4)]


def test_a_print_whose_call_nobody_uses_still_prints(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("here")
        o_ref[...] = x_ref[...]

    @jax.jit
    def f(x):
        pl.pallas_call(kernel, f32(4), interpret=True)(x)
        return x

    jax.block_until_ready(f(jnp.ones(4)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "here\n"


def test_the_plan_at_once_is_taken_only_where_it_may_be():
    def plan_of(call, *args):
        params = jax.make_jaxpr(call)(*args).eqns[0].params
        return parallel.plan(params["jaxpr"], params["grid_mapping"])

    x = randn(8, 8)
    assert plan_of(tiled(double, 8, 4), x) is not None
    assert plan_of(tiled(cumsum, 8, 4), x) is None  # not elementwise
    revisits = pl.pallas_call(
        double,
        f32(8, 4),
        grid=(2, 2),
        in_specs=[pl.BlockSpec((4, 4), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((4, 4), lambda i, j: (i, 0)),
        interpret=True,
    )
    assert plan_of(revisits, x) is None
    np.testing.assert_allclose(revisits(x), 2 * np.asarray(x)[:, 4:])  # the last program's block stays


def test_two_threads_at_once():
    results, errors = {}, []

    def work(k):
        try:

            def kernel(x_ref, o_ref):
                o_ref[...] = x_ref[...] * k + pl.program_id(0) * pl.num_programs(0)

            grid = k + 1
            spec = pl.BlockSpec((2,), lambda i: (i,))
            call = pl.pallas_call(kernel, f32(2 * grid), grid=grid, in_specs=[spec], out_specs=spec, interpret=True)
            for _ in range(5):
                results[k] = np.asarray(call(jnp.ones(2 * grid)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for k, got in results.items():
        np.testing.assert_array_equal(got, k + np.repeat(np.arange(k + 1), 2) * (k + 1))


def test_checks_inside_jit_stop_the_program_with_our_words():
    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref[0] < 3, "x is too large")
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((2,), lambda i: (i,))
    call = pl.pallas_call(kernel, f32(4), grid=2, in_specs=[spec], out_specs=spec, interpret=True)
    x = jnp.array([1.0, 0, 5, 0])
    np.testing.assert_array_equal(call(x), x)  # off
    with pl.enable_debug_checks(True):
        with pytest.raises(pl.KernelCheckError, match="x is too large") as e:
            call(x)
        assert "test_interpret.py" in str(e.value) and "grid point: (1,)" in str(e.value)
        with pytest.raises(jax.errors.JaxRuntimeError, match="x is too large"):
            jax.block_until_ready(jax.jit(call)(x))
        np.testing.assert_array_equal(call(x[:1].repeat(4)), np.ones(4))  # the next call works
    np.testing.assert_array_equal(call(x), x)


# --- Indirect block dimensions --------------------------------------------------------------------------------------
def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def test_indirect_gathers_rows():
    x = randn(8, 5)
    call = pl.pallas_call(
        copy,
        f32(4, 6),
        grid=2,
        in_specs=[pl.BlockSpec((pl.Indirect(2), 6), lambda i: (jnp.arange(2) * 3 + i, 0))],
        out_specs=pl.BlockSpec((2, 6), lambda i: (i, 0)),
        interpret=True,
    )
    got = np.asarray(call(x))
    np.testing.assert_array_equal(got[:, :5], np.asarray(x)[[0, 3, 1, 4]])
    assert np.isnan(got[:, 5]).all()


def test_indirect_scatters_and_the_last_repeated_index_stays():
    def kernel(rows_ref, x_ref, o_ref, seen_ref):
        o_ref[...] = x_ref[...]
        seen_ref[...] = jnp.full_like(seen_ref, 1)

    rows = jnp.array([3, 0, 3, 1], jnp.int32)
    x, base = randn(4, 3), randn(5, 3)
    call = pl.pallas_call(
        lambda rows_ref, x_ref, base_ref, o_ref: copy(x_ref, o_ref),
        f32(5, 3),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            1,
            grid=(2,),
            in_specs=[pl.BlockSpec((2, 3), lambda i, rows: (i, 0)), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((pl.Indirect(2), 3), lambda i, rows: (rows.at[pl.ds(2 * i, 2)], 0)),
        ),
        input_output_aliases={2: 0},
        interpret=True,
    )
    want = np.array(base)
    for r, row in zip(np.asarray(rows), np.asarray(x)):
        want[r] = row
    np.testing.assert_array_equal(call(rows, x, base), want)
    batched = jax.vmap(call, (0, None, None))(jnp.stack([rows, rows[::-1]]), x, base)
    np.testing.assert_array_equal(batched[0], want)


def test_indirect_mistakes():
    def call(index_map, block=(pl.Indirect(2), 5)):
        return pl.pallas_call(copy, f32(2, 5), grid=1, in_specs=[pl.BlockSpec(block, index_map)], interpret=True)(
            randn(8, 5)
        )

    with pytest.raises(ValueError, match="it must be 2 integers in an array or a Ref"):
        call(lambda i: (0, 0))
    with pytest.raises(ValueError, match="more than one Indirect"):
        call(lambda i: (0, 0), (pl.Indirect(2), pl.Indirect(5)))
    with pytest.warns(pl.PalladionWarning, match="asks for block 8"):
        call(lambda i: (jnp.array(8) + jnp.arange(2), 0))


# --- symbolic shapes ------------------------------------------------------------------------------------------------
def test_export_with_symbolic_shapes():
    def rows(x):
        spec = pl.BlockSpec((8, 4), lambda i: (i, 0))
        return pl.pallas_call(
            cumsum,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(pl.cdiv(x.shape[0], 8),),
            in_specs=[spec],
            out_specs=spec,
            interpret=True,
        )(x)

    def whole(x):
        return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    (m,) = jax.export.symbolic_shape("m")
    with pl.pallas_export_experimental(dynamic_shapes=True):
        exported = [jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((m, 4), jnp.float32)) for f in (rows, whole)]
    for n in (1, 7, 8, 9, 37):
        x = randn(n, 4)
        np.testing.assert_allclose(exported[0].call(x), np.cumsum(np.asarray(x), 1), rtol=1e-5)
        np.testing.assert_allclose(exported[1].call(x), 2 * np.asarray(x), rtol=1e-6)


def test_prints_within_a_program_keep_their_order(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("start {}", pl.program_id(0))

        def body(k, total):
            pl.debug_print("  round {}: {:.2f}", k, x_ref[k])

            @pl.when(k == 1)
            def _():
                pl.debug_print("    special {}", x_ref[k].astype(jnp.bfloat16))

            return total + x_ref[k]

        total = lax.fori_loop(0, 3, body, 0.0)
        pl.debug_print("end {{{:.1f}}} {}", total, jnp.arange(2))
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((3,), lambda i: (i,))
    call = pl.pallas_call(kernel, f32(60), grid=20, in_specs=[spec], out_specs=spec, interpret=True)
    jax.block_until_ready(jax.jit(call)(jnp.arange(60.0)))
    jax.effects_barrier()
    want = []
    for i in range(20):
        rows = 3 * i + np.arange(3)
        want.append(f"start {i}")
        for k in range(3):
            want.append(f"  round {k}: {rows[k]:.2f}")
            if k == 1:
                want.append(f"    special {float(jnp.bfloat16(rows[k]))}")
        want.append(f"end {{{rows.sum():.1f}}} [0 1]")
    assert capfd.readouterr().out.splitlines() == want


def test_vmap_inside_a_kernel_of_a_loop_with_its_own_condition():
    def kernel(n_ref, o_ref):
        def count(n):
            return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + s[0]), (0, 0))[1]

        o_ref[...] = jax.vmap(count)(n_ref[...])

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4,), jnp.int32), interpret=True)
    n = jnp.array([0, 1, 5, 3], jnp.int32)
    np.testing.assert_array_equal(call(n), [k * (k - 1) // 2 for k in (0, 1, 5, 3)])
