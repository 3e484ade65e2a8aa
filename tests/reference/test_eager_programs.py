"""The eager interpreter: which programs run, its parameters, its place among JAX's transformations, and memory."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu
from reference.eager_calls import EAGER, ROW, X, double, notes, raised, rows, sds, whole


# --- which programs run ---------------------------------------------------------------------------------------------
def nan_rows(*kept):
    out = np.full((4, 4), np.nan, np.float32)
    out[list(kept)] = X[list(kept)] * 2
    return out


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        (2, [2]),
        ((2,), [2]),
        (
            [
                3,
            ],
            [3],
        ),
        ([(3,), (0,), (3,)], [0, 3]),
        (np.int64(1), [1]),
    ],
)
def test_only_runs_the_chosen_programs(only, kept):
    np.testing.assert_array_equal(rows(double, pl.EagerParams(only=only))(X), nan_rows(*kept))


def test_only_runs_in_grid_order_whatever_the_order_given():
    order = []

    def kernel(x_ref, o_ref):
        order.append((int(pl.program_id(0)), int(pl.program_id(1))))

    params = pl.EagerParams(only=[(1, 2), (0, 1), (1, 0)])
    pl.pallas_call(kernel, sds((4, 4)), grid=(2, 3), interpret=params)(X)
    assert order == [(0, 1), (1, 0), (1, 2)]


def test_only_without_a_grid():
    np.testing.assert_array_equal(whole(double, interpret=pl.EagerParams(only=()))(X), X * 2)


def test_only_on_a_huge_grid_costs_nothing():
    def kernel(o_ref):
        o_ref[0] = pl.program_id(0) + pl.program_id(1)

    call = pl.pallas_call(kernel, sds((1,), "int32"), grid=(50_000, 20_000), interpret=pl.EagerParams(only=(9, 7)))
    start = time.perf_counter()
    assert call()[0] == 16
    assert time.perf_counter() - start < 20  # the call looks at the grid's corners for its warnings


@pytest.mark.parametrize("only", [(4,), (1, 1), ()])
def test_only_outside_the_grid_is_refused(only):
    error = raised(rows(double, pl.EagerParams(only=only)), X)
    assert isinstance(error, ValueError)
    assert str(error).splitlines()[0] == f"pl.EagerParams(only={only}) names no program of double: its grid is (4,)."


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        (dict(only="all"), TypeError, "pl.EagerParams: only must be None, one program's ids"),
        (dict(only=(1.5,)), TypeError, "pl.EagerParams: only must be None, one program's ids"),
        (dict(only=(-1,)), ValueError, "(-1,) has a negative id"),
        (dict(only=[(0,), (1, 1)]), ValueError, "unlike numbers of ids"),
        (dict(only=True), TypeError, "only must be"),
        (dict(out_of_range="wrap"), ValueError, "out_of_range must be 'raise' or 'clamp'"),
        (dict(uninitialized=0), TypeError, "uninitialized must be 'nan' or 'zero'"),
    ],
)
def test_wrong_parameters_are_refused(fields, kind, words):
    with pytest.raises(kind) as info:
        pl.EagerParams(**fields)
    assert words in str(info.value)


def test_parameters_are_values():
    assert pl.EagerParams(only=[[1, 2]]) == pl.EagerParams(only=(1, 2))
    assert hash(pl.EagerParams(only=3)) == hash(pl.EagerParams(only=(3,)))


def test_zero_programs_leave_the_output_uninitialised():
    out = pl.pallas_call(double, sds((2, 2)), grid=(3, 0), interpret=EAGER)(X[:2, :2])
    assert np.isnan(out).all()


def test_uninitialized_zero():
    def kernel(x_ref, o_ref, tmp_ref):
        o_ref[:, 0:1] = x_ref[:, 0:1] + tmp_ref[...]

    spec = pl.BlockSpec((3, 4), lambda i: (i, 0))
    out = pl.pallas_call(
        kernel,
        sds((4, 4)),
        grid=(2,),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((3, 1), jnp.float32)],
        interpret=pl.EagerParams(uninitialized="zero"),
    )(X)
    np.testing.assert_array_equal(out, np.where(np.arange(4) == 0, X, 0))


# --- where it stands among JAX's transformations --------------------------------------------------------------------
def test_vmap_runs_the_chosen_program_of_each_element(capsys):
    def kernel(x_ref, o_ref):
        print(int(pl.program_id(0)), pl.num_programs(0), float(x_ref[0, 0]))
        o_ref[...] = x_ref[...] * 2

    batch = np.stack([X, X + 100])
    out = jax.vmap(rows(kernel, pl.EagerParams(only=1)))(batch)
    np.testing.assert_array_equal(out, np.stack([nan_rows(1), nan_rows(1) + 200]))
    assert capsys.readouterr().out == "1 4 4.0\n1 4 104.0\n"


def test_nested_vmap_and_its_note():
    batch = np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4)
    out = jax.vmap(jax.vmap(rows(double), in_axes=1, out_axes=1))(batch.swapaxes(1, 2))
    np.testing.assert_array_equal(out, batch.swapaxes(1, 2) * 2)

    def kernel(x_ref, o_ref):
        assert x_ref[0, 0] != 24

    error = raised(jax.vmap(jax.vmap(rows(kernel))), batch)
    assert notes(error).startswith("In the kernel kernel, program (2,) of the grid (4,), batch element (0, 1).")


def test_inside_jit_it_is_refused_and_disable_jit_is_the_way_out():
    error = raised(jax.jit(rows(double)), X)
    assert isinstance(error, ValueError)
    assert "interpret=pl.EagerParams(...) runs the kernel's Python on concrete arrays" in str(error)
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.jit(rows(double))(X), X * 2)


def test_a_jitted_caller_with_disable_jit_may_size_the_grid_at_run_time():
    def kernel(x_ref, o_ref):
        assert isinstance(pl.num_programs(0), jax.Array)  # an int32 scalar, as in a traced kernel
        o_ref[...] = x_ref[...] * pl.num_programs(0)

    with jax.disable_jit():
        out = pl.pallas_call(kernel, sds((4, 4)), grid=(jnp.int32(3),), in_specs=[ROW], out_specs=ROW, interpret=EAGER)(
            X
        )
    np.testing.assert_array_equal(out, np.where(np.arange(4)[:, None] < 3, X * 3, np.nan))


def test_grad_names_the_way_out():
    error = raised(jax.grad(lambda x: whole(double)(x).sum()), X)
    assert isinstance(error, ValueError) and "custom_vjp" in str(error)


def test_the_option_that_replaces_interpret_false():
    call = pl.pallas_call(double, sds((4, 4)))
    assert isinstance(raised(call, X), ValueError)
    with pl.config.state("interpret")(pl.EagerParams(only=())):
        np.testing.assert_array_equal(pl.pallas_call(double, sds((4, 4)))(X), X * 2)


def test_kernel_calls_inside_a_kernel():
    def outer(x_ref, o_ref):
        once = whole(double, interpret=True)(x_ref[...])
        o_ref[...] = whole(double)(once) + pl.program_id(0)

    out = pl.pallas_call(outer, sds((4, 4)), grid=(1,), interpret=EAGER)(X)
    np.testing.assert_array_equal(out, X * 4)


# --- memory ---------------------------------------------------------------------------------------------------------
def test_aliased_operand_is_the_outputs_memory_and_stays_as_it_was():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    def previous_row(i):
        return (jnp.maximum(i - 1, 0), 0)

    x = jnp.asarray(X)
    for interpret in (True, EAGER):
        out = pl.pallas_call(
            kernel,
            sds((4, 4)),
            grid=(4,),
            in_specs=[pl.BlockSpec((1, 4), previous_row)],
            out_specs=ROW,
            input_output_aliases={0: 0},
            interpret=interpret,
        )(x)
        np.testing.assert_array_equal(out, X[:1] + np.arange(1, 5)[:, None])  # each program sees the last one's row
    np.testing.assert_array_equal(x, X)


def test_values_read_earlier_do_not_change():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        before, row = o_ref[...], o_ref[0]
        o_ref[...] = before + 1
        assert (before == X).all() and (row == X[0]).all()

    np.testing.assert_array_equal(whole(kernel)(X), X + 1)


def test_scalar_prefetch_indices_out_of_range_warn_and_clamp():
    def call(table):
        spec = pl.BlockSpec((1, 4), lambda i, t: (t[i], 0))
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(2,), in_specs=[spec], out_specs=pl.BlockSpec((1, 4), lambda i, t: (i, 0))
        )
        return pl.pallas_call(
            lambda t_ref, x_ref, o_ref: double(x_ref, o_ref), sds((2, 4)), grid_spec=grid_spec, interpret=EAGER
        )(np.array(table, np.int32), X)

    np.testing.assert_array_equal(call([3, 1]), X[[3, 1]] * 2)
    with pytest.warns(pl.PalladionWarning, match="asks for block 7 in dimension 0 at grid point \\(1,\\)"):
        np.testing.assert_array_equal(call([0, 7]), X[[0, 3]] * 2)
