"""Which calls of a program are recorded, how they are grouped, and what is kept of each."""

import jax
import jax.numpy as jnp
import numpy as np

import palladion as pl
from palladion import tpu as pltpu
from palladion.language import primitive
from palladion.report.analysis import analyse
from palladion.report.calls import MAX_VALUES, Recorder
from palladion.report.findings import CHECKS
from report.looking import copy_kernel

X = jnp.zeros((32, 128))


def copy(x, n=4, kernel=copy_kernel, **options):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    options = dict(interpret=True) | options
    return pl.pallas_call(kernel, shape, grid=(n,), in_specs=[rows], out_specs=rows, **options)(x)


def recorded(program):
    recorder = Recorder()
    with primitive.observing(recorder):
        program()
    return recorder


def test_a_call_made_many_times_is_one_with_a_count():
    (call,) = recorded(lambda: [copy(X) for _ in range(5)]).calls
    assert (call.name, call.count, call.traced) == ("copy_kernel", 5, 0)
    assert call.kernel_at.endswith("looking.py:" + str(copy_kernel.__code__.co_firstlineno))
    assert "test_calls.py:" in call.called_at and call.called_at.endswith("(copy)")


def test_calls_that_differ_are_apart():
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def program():
        copy(X), copy(X, n=2), copy(X.astype(jnp.bfloat16)), copy(X, kernel=double)

    calls = recorded(program).calls
    assert [call.count for call in calls] == [1, 1, 1, 1]
    assert [call.grid_mapping.grid for call in calls] == [(4,), (2,), (4,), (4,)]


def test_the_same_kernel_with_and_without_interpret_is_one_call():
    assert len(recorded(lambda: (copy(X), copy(X, interpret=pl.EagerParams()))).calls) == 2  # not traced: apart
    (call,) = recorded(lambda: (copy(X), copy(X, name="copy_kernel"))).calls
    assert call.count == 2


def test_a_call_under_jit_is_counted_when_it_is_traced():
    def program():
        jitted = jax.jit(copy)
        jitted(X), jitted(X + 1), copy(X)

    (call,) = recorded(program).calls
    assert (call.count, call.traced) == (2, 1)


def test_a_call_in_a_scan_is_recorded():
    calls = recorded(lambda: jax.lax.scan(lambda x, _: (copy(x), None), X, length=3)).calls
    assert len(calls) == 1 and calls[0].traced == calls[0].count >= 1


def test_the_axes_of_vmap_are_recorded_outermost_first():
    def program():
        jax.vmap(copy)(jnp.zeros((5, 32, 128)))
        jax.vmap(jax.vmap(copy), in_axes=1)(jnp.zeros((3, 2, 32, 128)))
        jax.jit(jax.vmap(copy))(jnp.zeros((7, 32, 128)))

    (call,) = recorded(program).calls
    assert call.batches == [(5,), (2, 3), (7,)]
    assert call.grid_mapping.grid == (4,)  # as it is written


def test_different_run_time_values_are_all_checked():
    def program():
        for n in (4, 2, 4, 3):
            copy(X, jnp.int32(n))

    (call,) = recorded(program).calls
    assert call.count == 4 and [values.grid for values in call.values.values()] == [(4,), (2,), (3,)]
    report = analyse(call, CHECKS)
    assert report.grid == (4,)
    assert [f.kind for f in report.findings] == ["uninitialized-read"]  # of the grids (2,) and (3,), said once


def test_only_so_many_run_time_values_are_kept():
    (call,) = recorded(lambda: [copy(X, jnp.int32(n)) for n in range(4, 6 + MAX_VALUES)]).calls
    assert len(call.values) == MAX_VALUES
    assert [f.kind for f in analyse(call, CHECKS).findings if f.level == "note"] == ["not-checked"]


def test_known_values_come_before_unknown_ones():
    def program():
        jax.jit(copy)(X, jnp.int32(4))
        copy(X, jnp.int32(4))

    (call,) = recorded(program).calls
    report = analyse(call, CHECKS)
    assert report.grid == (4,) and report.footprint.flops is not None
    assert [f.kind for f in report.findings] == ["not-checked"]


def test_prefetch_values_are_copied():
    table = np.array([0, 1, 2, 3], np.int32)

    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, table_ref: (table_ref[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, table_ref: (i, 0)),
    )
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), grid_spec=spec, interpret=True)
    recorder = recorded(lambda: call(table, X))
    table[:] = 99
    (values,) = recorder.calls[0].values.values()
    assert values.prefetch[0].tolist() == [0, 1, 2, 3]


def test_calls_with_symbolic_shapes_are_left_out():
    (n,) = jax.export.symbolic_shape("n")

    def program():
        def whole(x):
            return pl.pallas_call(copy_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

        jax.export.export(jax.jit(whole))(jax.ShapeDtypeStruct((n, 128), jnp.float32))

    recorder = recorded(program)
    assert recorder.symbolic == 1 and recorder.calls == []


def test_a_call_that_fails_afterwards_is_recorded():
    def program():
        try:
            copy(X, interpret=False)  # refused on the CPU, when it is lowered
        except ValueError as error:
            assert "interpret" in str(error)

    assert len(recorded(program).calls) == 1
