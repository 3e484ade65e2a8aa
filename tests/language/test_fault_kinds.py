"""Fault kinds that kernel users meet, on the reference interpreter (`interpret=True`).

The kinds are those of the project's list, drawn from public reports; a test's name carries the number. Where the
reference text says otherwise than the list (a block index past the end is clamped, a run-time slice too), the text
wins: the call works as specified, and a warning or the checked mode says what is wrong.
"""

import functools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import palladion as pl
from palladion import tpu as pltpu

x = jnp.arange(8, dtype=jnp.float32)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


call = functools.partial(pl.pallas_call, interpret=True)


def blocks(n, rank=1):
    return pl.BlockSpec((n,) * rank, lambda *ids: ids)


# --- 1: same kernel object, new grid --------------------------------------------------------------------------------
@jax.jit
def jitted_helper(ref):
    return ref[...] * pl.num_programs(0) + pl.program_id(0)


def by_helper(x_ref, o_ref):
    o_ref[...] = jitted_helper(x_ref)


def in_place(x_ref, o_ref):
    o_ref[...] = x_ref[...] * pl.num_programs(0) + pl.program_id(0)


def in_loop(x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, 2)
    def _(i):
        o_ref[...] += (x_ref[...] * pl.num_programs(0) + pl.program_id(0)) / 2


@pytest.mark.parametrize("kernel", [by_helper, in_place, in_loop])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_1_one_kernel_on_several_grids(kernel, wrap):
    """Every trace and compile cache is keyed by the grid, also that of a jitted helper which both kernels call."""

    def expected(n):
        return np.arange(8) * n + np.arange(8) // (8 // n)

    for n in (2, 4, 8, 2):  # blocks of different shapes, so different types for the helper
        f = call(kernel, f32(8), grid=n, in_specs=[blocks(8 // n)], out_specs=blocks(8 // n))
        np.testing.assert_array_equal(wrap(f)(x), expected(n))
    whole = pl.BlockSpec((2,), lambda i: (i % 4,))
    for n in (4, 8, 4):  # blocks of one shape: only the grid differs
        f = call(kernel, f32(8), grid=n, in_specs=[whole], out_specs=whole)
        np.testing.assert_array_equal(wrap(f)(x), np.arange(8) * n + np.arange(8) // 2 + (n - 4))


def test_1_one_call_on_several_dynamic_sizes():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * pl.num_programs(0)

    @jax.jit
    def f(n):
        return call(kernel, f32(8), grid=(n,))(x)

    for n in (1, 3, 2):
        np.testing.assert_array_equal(f(n), np.arange(8) * n)


# --- 2 and 3: block indices out of range ----------------------------------------------------------------------------
def clamped(index_map, array=x, block=(2,), grid=(4,)):
    """The warning's lines, and the blocks that the kernel saw, one a row."""
    f = call(
        copy,
        f32(*grid, *block),
        grid=grid,
        in_specs=[pl.BlockSpec(block, index_map)],
        out_specs=pl.BlockSpec((*[None] * len(grid), *block), lambda *ids: (*ids, *[0] * len(block))),
    )
    with pytest.warns(pl.PalladionWarning) as caught:
        seen = f(array)
    assert len(caught) == 1 and caught[0].filename == __file__
    return str(caught[0].message).splitlines(), np.asarray(seen)


def test_2_index_map_in_elements():
    """Tutorial 2.2 clamps silently; the warning names operand, block, valid range, grid point and the usual mistake."""
    (first, place, fix), seen = clamped(lambda i: (i * 2,))
    assert first == (
        "The index map of x_ref (input 0) asks for block 4 in dimension 0 at grid point (2,), outside the valid range "
        "0..3; it is clamped."
    )
    assert "test_fault_kinds.py:" in place
    assert fix.startswith("  fix: return block numbers, not element offsets")
    np.testing.assert_array_equal(seen, [[0, 1], [4, 5], [6, 7], [6, 7]])


def test_3_block_index_negative():
    (first, *_), seen = clamped(lambda i: (i - 1,))
    assert "asks for block -1 in dimension 0 at grid point (0,), outside the valid range 0..3" in first
    np.testing.assert_array_equal(seen, [[0, 1], [0, 1], [2, 3], [4, 5]])


def test_3_block_index_past_the_end_of_a_dimension_of_size_one():
    (first, *_), seen = clamped(lambda i: (i, i), x.reshape(8, 1), (2, 1))
    assert "asks for block 1 in dimension 1 at grid point (1,), outside the valid range 0..0" in first
    np.testing.assert_array_equal(seen.reshape(4, 2), np.arange(8).reshape(4, 2))


def test_3_squeezed_index_past_the_end():
    f = call(copy, f32(3, 8), grid=3, in_specs=[pl.BlockSpec((None, 8), lambda i: (i, 0))],
             out_specs=pl.BlockSpec((None, 8), lambda i: (i, 0)))  # fmt: skip
    with pytest.warns(pl.PalladionWarning, match=r"asks for block 2 in dimension 0 at grid point \(2,\)"):
        seen = f(x.reshape(2, 4).repeat(2, axis=1))
    assert np.array_equal(seen[1], seen[2])


def test_3_output_block_past_the_end():
    f = call(copy, f32(4), grid=3, in_specs=[blocks(2)], out_specs=blocks(2))
    with pytest.warns(pl.PalladionWarning) as caught:
        result = f(x)
    assert str(caught[0].message).startswith("The index map of o_ref (output 0) asks for block 2 in dimension 0")
    np.testing.assert_array_equal(result, [0, 1, 4, 5])


def test_3_element_offset_past_the_end():
    """An `Element` block may start anywhere in the padded array; a start beyond it is clamped to the last element."""
    f = call(
        copy,
        f32(3, 4),
        grid=3,
        in_specs=[pl.BlockSpec((pl.Element(4),), lambda i: (i * 4,))],
        out_specs=pl.BlockSpec((None, 4), lambda i: (i, 0)),
    )
    with pytest.warns(pl.PalladionWarning) as caught:
        seen = f(x)
    first = str(caught[0].message).splitlines()[0]
    assert "asks for block 8 in dimension 0 at grid point (2,), outside the valid range 0..7" in first
    np.testing.assert_array_equal(seen[:2], [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_3_a_huge_grid_is_looked_at_too():
    """The check samples a grid of more than a million programs; nothing runs, for the call is only traced."""
    f = call(copy, f32(8), grid=(2**11, 2**11), in_specs=[pl.BlockSpec((8,), lambda i, j: (i,))])
    with pytest.warns(pl.PalladionWarning, match=r"outside the valid range 0\.\.0"):
        jax.eval_shape(f, x)


# --- 4: partial last block ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (jnp.float32, np.nan),
        (jnp.bfloat16, np.nan),
        (jnp.int32, -(2**31)),
        (jnp.int8, -128),
        (jnp.uint8, 0),
        (jnp.bool_, False),
    ],
)
def test_4_the_part_outside_reads_as_poison(dtype, poison):
    """NaN for floats (tutorial 3.2), the lowest value for integers, where a sum of zeros would hide the mistake."""
    f = call(
        copy,
        jax.ShapeDtypeStruct((2, 4), dtype),
        grid=2,
        in_specs=[blocks(4)],
        out_specs=pl.BlockSpec((None, 4), lambda i: (i, 0)),
    )
    result = np.asarray(f(jnp.ones(5, dtype))).astype(np.float64)
    np.testing.assert_array_equal(result, [[1, 1, 1, 1], [1, poison, poison, poison]])


def test_4_poison_that_reaches_an_output_shows():
    def total(x_ref, o_ref):
        o_ref[...] = jnp.sum(x_ref[...])[None]

    f = call(total, f32(2), grid=2, in_specs=[blocks(4)], out_specs=blocks(1))
    np.testing.assert_array_equal(f(jnp.ones(5)), [4, np.nan])


def test_4_the_part_outside_of_a_store_is_dropped():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 10 * pl.program_id(0)

    f = call(kernel, f32(5), grid=2, in_specs=[blocks(4)], out_specs=blocks(4))
    np.testing.assert_array_equal(f(jnp.arange(5.0)), [0, 1, 2, 3, 14])
    aliased = call(kernel, f32(5), grid=2, in_specs=[blocks(4)], out_specs=blocks(4), input_output_aliases={0: 0})
    np.testing.assert_array_equal(aliased(jnp.arange(5.0)), [0, 1, 2, 3, 14])


# --- 5: run-time slice past the end ---------------------------------------------------------------------------------
def reads_at(start_ref, x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(start_ref[0], 4)]


def writes_at(start_ref, x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[pl.ds(start_ref[0], 4)] = x_ref[:4]


@pytest.mark.parametrize("start", [6, 100])
def test_5_an_unchecked_slice_clamps_as_in_xla(start):
    """As in JAX's own dynamic slices, which the reference's interpreter is made of."""
    np.testing.assert_array_equal(call(reads_at, f32(4))(jnp.array([start]), x), [4, 5, 6, 7])
    np.testing.assert_array_equal(call(writes_at, f32(8))(jnp.array([start]), x), [0, 0, 0, 0, 0, 1, 2, 3])


def indexes_at(start_ref, x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[0] = x_ref[start_ref[0]]


def strides_at(start_ref, x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(start_ref[0], 4, 2)]


def gathers_at(start_ref, x_ref, o_ref):
    o_ref[...] = x_ref[start_ref[0] - jnp.arange(4)]


def in_a_view(start_ref, x_ref, o_ref):
    o_ref[...] = x_ref.at[:6].at[pl.ds(start_ref[0], 4)].get()


def in_a_branch(start_ref, x_ref, o_ref):
    @pl.when(start_ref[0] > 2)
    def _():
        o_ref[...] = x_ref[pl.ds(start_ref[0], 4)]


X = "dimension 0 of x_ref (input 1), which has 8 elements."


@pytest.mark.parametrize(
    ("kernel", "out", "start", "message", "line"),
    [
        (reads_at, 4, 6, f"pl.ds(start=6, size=4) runs past {X}", 1),
        (reads_at, 4, -1, f"pl.ds(start=-1, size=4) runs past {X}", 1),
        (writes_at, 8, 7, "pl.ds(start=7, size=4) runs past dimension 0 of o_ref (output 0), which has 8 elements.", 2),
        (indexes_at, 8, 8, f"Index 8 runs past {X}", 2),
        (indexes_at, 8, -9, f"Index -9 runs past {X}", 2),
        (strides_at, 4, 2, f"pl.ds(start=2, size=4, stride=2) runs past {X}", 1),
        (gathers_at, 4, 9, f"Index 9 runs past {X}", 1),
        (in_a_branch, 4, 5, f"pl.ds(start=5, size=4) runs past {X}", 3),
    ],
)
def test_5_a_checked_slice_is_an_error(kernel, out, start, message, line):
    """It names start, size, extent, the line, and the grid point."""
    f = call(kernel, f32(out), grid=(2, 1))
    with pl.enable_debug_checks(True):
        f(jnp.array([start - 4 if start > 4 else 0 if start < 0 else 1]), x)  # in range: no error
        with pytest.raises(pl.KernelCheckError) as caught:
            f(jnp.array([start]), x)
    code = kernel.__code__
    first, place, point = str(caught.value).splitlines()
    assert first == message
    assert place.startswith("  at: ") and f"test_fault_kinds.py:{code.co_firstlineno + line} (" in place
    assert point == "  grid point: (0, 0)"


def test_5_the_grid_point_is_that_of_the_program():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 2, 4)]

    with pl.enable_debug_checks(True), pytest.raises(pl.KernelCheckError, match=r"grid point: \(3,\)"):
        call(kernel, f32(4), grid=4)(x)


def test_5_in_jit_the_text_is_kept():
    with pl.enable_debug_checks(True), pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(call(reads_at, f32(4)))(jnp.array([6]), x).block_until_ready()
    assert f"KernelCheckError: pl.ds(start=6, size=4) runs past {X}" in str(caught.value)


def test_5_masked_lanes_keep_their_places_and_touch_nothing():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = jnp.full_like(o_ref, -1)
        lane = lax.broadcasted_iota(jnp.int32, (8,), 0)
        o_ref[lane < n_ref[0]] = x_ref[...]

    np.testing.assert_array_equal(call(kernel, f32(8))(jnp.array([5]), x), [0, 1, 2, 3, 4, -1, -1, -1])
    np.testing.assert_array_equal(call(kernel, f32(8))(jnp.array([0]), x), [-1] * 8)


# --- 7: strided, mixed and negative indexing ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "idx",
    [
        np.s_[::2, 1::3],
        np.s_[1:4:2, -1],
        np.s_[-1, ::3],
        np.s_[-3:, -5:-1:2],
        np.s_[..., -2],
        np.s_[2:2],
        np.s_[9:, :],
        np.s_[:, None, 2],
        np.s_[[0, 2]],
        np.s_[[-1, 0], [1, -2]],
        np.s_[:, [[0, 1], [-1, 2]]],
        np.s_[1, [0, 3]],
        np.s_[[1, 1], 1:5:2],
        np.s_[np.arange(24).reshape(4, 6) % 5 == 0],
        np.s_[np.array([True, False, False, True])],
        np.s_[:, np.array([True, False, False, True, True, False])],
    ],
    ids=str,
)
def test_7_indexing_is_numpys(idx):
    """Same shape and values as NumPy, for reads and for stores."""
    a = np.arange(24, dtype=np.float32).reshape(4, 6)

    def read(x_ref, o_ref):
        o_ref[...] = x_ref[idx]

    np.testing.assert_array_equal(call(read, f32(*a[idx].shape))(a), a[idx])
    if any(i is None for i in (idx if isinstance(idx, tuple) else ())):
        return  # stores take no new axes: one documented refusal, tested in test_errors_in_kernels.py

    def write(x_ref, v_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[idx] = v_ref[...]

    expected, value = a.copy(), 100 + np.arange(a[idx].size, dtype=np.float32).reshape(a[idx].shape)
    expected[idx] = value
    np.testing.assert_array_equal(call(write, f32(4, 6))(a, value), expected)


# --- 12: a repeated index in one vector -----------------------------------------------------------------------------
REPEATED = np.array([0, 0, 1, 1, 1, 3, 3, 0])


@pytest.mark.parametrize(
    "add",
    [
        lambda o_ref, i_ref, v: o_ref.addupdate(v, i_ref[...]),
        lambda o_ref, i_ref, v: o_ref.addupdate(v, REPEATED),
        lambda o_ref, i_ref, v: jax.ref.addupdate(o_ref, i_ref[...], v),
        lambda o_ref, i_ref, v: jax.ref.addupdate(o_ref.at[i_ref[...]], (), v),
        lambda o_ref, i_ref, v: o_ref.reshape(2, 2).reshape(4).addupdate(v, i_ref[...]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda i, v: jax.vmap(f)(i[None], v[None])[0]])
def test_12_every_contribution_counts(add, wrap):
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        add(o_ref, i_ref, x_ref[...])

    expected = np.zeros(4)
    np.add.at(expected, REPEATED, np.arange(8))
    np.testing.assert_array_equal(wrap(call(kernel, f32(4)))(jnp.asarray(REPEATED), x), expected)


def test_12_read_modify_write_counts_the_last_as_numpy_does():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[i_ref[...]] += x_ref[...]

    expected = np.zeros(4)
    expected[REPEATED] += np.arange(8)
    np.testing.assert_array_equal(call(kernel, f32(4))(jnp.asarray(REPEATED), x), expected)


# --- 14: store to an input Ref without alias ------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [None, pl.BlockSpec((4,), lambda i: (i,)), pl.BlockSpec(memory_space=pl.ANY)])
def test_14_a_store_to_an_input_names_operand_and_alias(spec):
    def kernel(x_ref, y_ref, o_ref):
        y_ref[0] = 1.0

    with pytest.raises(ValueError) as caught:
        call(kernel, f32(8), grid=2, in_specs=[spec, spec])(x, x)
    first, place, fix = str(caught.value).splitlines()
    assert first == "The kernel kernel writes to y_ref (input 1), which is not aliased to an output."
    assert f"test_fault_kinds.py:{kernel.__code__.co_firstlineno + 1} (" in place
    assert "input_output_aliases={1: <output number>}" in fix


# --- 15: aliases ----------------------------------------------------------------------------------------------------
SPACES = [pl.ANY, pltpu.VMEM, pltpu.SMEM, pltpu.HBM]


def nothing(*refs):
    pass


@pytest.mark.parametrize("space", SPACES)
def test_15_an_empty_body_gives_the_inputs(space):
    spec = pl.BlockSpec(memory_space=space)
    f = call(nothing, f32(8), in_specs=[spec], out_specs=spec, input_output_aliases={0: 0})
    np.testing.assert_array_equal(f(x), x)
    np.testing.assert_array_equal(jax.jit(f)(x), x)


@pytest.mark.parametrize("space", SPACES)
def test_15_two_aliases_and_an_update_in_place(space):
    def kernel(a_ref, b_ref, c_ref, a_out, c_out, b_out):
        @pl.when(pl.program_id(0) == 1)
        def _():
            a_out[1] = a_ref[0] + b_ref[1] + c_ref[2]
            b_out[0] = 50.0

    spec = pl.BlockSpec(memory_space=space)
    f = call(
        kernel,
        (f32(8), f32(4), f32(8)),
        grid=2,
        in_specs=[spec] * 3,
        out_specs=(spec,) * 3,
        input_output_aliases={0: 0, 1: 2, 2: 1},
    )
    a, b, c = np.arange(8.0), np.arange(8.0) + 10, np.arange(4.0) + 100
    new_a, new_c, new_b = f(a, b, c)
    np.testing.assert_array_equal(new_a, np.where(np.arange(8) == 1, 0 + 11 + 102, a))
    np.testing.assert_array_equal(new_b, np.where(np.arange(8) == 0, 50, b))
    np.testing.assert_array_equal(new_c, c)
    np.testing.assert_array_equal(a, np.arange(8))  # the caller's arrays are as they were


def test_15_blocks_that_no_program_visits_keep_the_operand():
    def kernel(x_ref, o_ref):
        o_ref[...] = -x_ref[...]

    f = call(kernel, f32(8), grid=1, in_specs=[blocks(4)], out_specs=blocks(4), input_output_aliases={0: 0})
    np.testing.assert_array_equal(f(x), [0, -1, -2, -3, 4, 5, 6, 7])


def test_15_the_input_ref_sees_the_update():
    """Input and output are one buffer: what an earlier program stored, a later one reads through either Ref."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    whole = pl.BlockSpec((8,), lambda i: (0,))
    f = call(kernel, f32(8), grid=3, in_specs=[whole], out_specs=whole, input_output_aliases={0: 0})
    np.testing.assert_array_equal(f(x), np.arange(8) + 3)


# --- 16: an operand that the kernel ignores -------------------------------------------------------------------------
def test_16_an_ignored_operand_made_in_the_same_jit_has_no_effect():
    def kernel(x_ref, ignored_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...] * 2
        p_ref[...] = x_ref[...] + 1

    @jax.jit
    def f(x):
        ignored = jnp.log(-x - 1)  # NaN
        return *call(kernel, (f32(8), f32(8)))(x, ignored), ignored

    doubled, more, ignored = f(x)
    np.testing.assert_array_equal(doubled, np.arange(8) * 2)
    np.testing.assert_array_equal(more, np.arange(8) + 1)
    assert np.isnan(ignored).all()


# --- 18: nested scopes ----------------------------------------------------------------------------------------------
def test_18_nested_scopes_give_the_flat_programs_result():
    """Scoped buffers in scoped buffers, in branches and loops, with views into the outer one and ids of the grid."""

    def nested(x_ref, o_ref):
        def outer(acc_ref):
            acc_ref[...] = jnp.zeros_like(acc_ref)

            @pl.loop(0, 2)
            def _(j):
                @pl.when(pl.program_id(0) >= j)
                def _():
                    def inner(tmp_ref, half_ref):
                        tmp_ref[...] = x_ref[...] * (pl.program_id(0) + 1)
                        half_ref[...] = tmp_ref[:2] + j
                        acc_ref.at[pl.ds(2 * j, 2)].addupdate(half_ref[...])
                        return jnp.sum(tmp_ref[...])

                    total = pl.run_scoped(inner, pltpu.VMEM((4,), jnp.float32), half_ref=pltpu.VMEM((2,), jnp.float32))
                    acc_ref[...] += total

            o_ref[...] = acc_ref[...]

        pl.run_scoped(outer, pltpu.VMEM((4,), jnp.float32))

    result = call(nested, f32(8), grid=2, in_specs=[blocks(4)], out_specs=blocks(4))(x)
    expected = []
    for program, block in enumerate(np.arange(8.0).reshape(2, 4)):
        acc = np.zeros(4)
        for j in range(2):
            if program >= j:
                tmp = block * (program + 1)
                acc[2 * j : 2 * j + 2] += tmp[:2] + j
                acc += tmp.sum()
        expected.append(acc)
    np.testing.assert_array_equal(result, np.concatenate(expected))


def test_18_a_scope_starts_uninitialised_each_time():
    def kernel(o_ref):
        @pl.loop(0, 2)
        def _(i):
            def body(tmp_ref):
                o_ref[i] = tmp_ref[0]
                tmp_ref[...] = jnp.ones_like(tmp_ref)

            pl.run_scoped(body, pltpu.VMEM((4,), jnp.float32))

    assert np.isnan(call(kernel, f32(2))()).all()


# --- 30: zero work --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("grid", [0, (0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_30_a_grid_of_zero_runs_nothing(grid, wrap):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    np.testing.assert_array_equal(wrap(call(kernel, f32(8), grid=grid))(x), [np.nan] * 8)  # nothing wrote the output
    aliased = call(kernel, f32(8), grid=grid, input_output_aliases={0: 0})
    np.testing.assert_array_equal(wrap(aliased)(x), x)


def test_30_a_dynamic_grid_of_zero_runs_nothing():
    f = jax.jit(lambda n: call(copy, f32(8), grid=(n, 2), input_output_aliases={0: 0})(x + n))
    np.testing.assert_array_equal(f(0), np.arange(8))
    np.testing.assert_array_equal(f(1), np.arange(8) + 1)


def test_30_an_inner_trip_count_of_zero():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.loop(0, n_ref[0])
        def _(i):
            o_ref[...] += 1

        def body(i):
            o_ref[i] = 50.0
            return i + 1

        o_ref[7] = lax.while_loop(lambda i: i < n_ref[0], body, 0).astype(jnp.float32)

    np.testing.assert_array_equal(call(kernel, f32(8))(jnp.array([0]), x), [0, 1, 2, 3, 4, 5, 6, 0])


@pytest.mark.parametrize("grid", [0, 1])
def test_30_an_empty_operand(grid):
    def kernel(x_ref, y_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...] + 1
        p_ref[...] = y_ref[...]

    spec = pl.BlockSpec((4, 2), lambda i: (i, 0))
    whole = pl.BlockSpec()
    f = call(kernel, (f32(0, 2), f32(8)), grid=grid, in_specs=[spec, whole], out_specs=(spec, whole))
    empty, rest = jax.jit(f)(jnp.zeros((0, 2)), x)
    assert empty.shape == (0, 2)
    np.testing.assert_array_equal(rest, x if grid else [np.nan] * 8)


def test_30_fewer_blocks_than_programs():
    """Programs beyond the last tile do nothing when the kernel says so."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) < 2)
        def _():
            o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((4,), lambda i: (jnp.minimum(i, 1),))
    np.testing.assert_array_equal(call(kernel, f32(8), grid=5, in_specs=[spec], out_specs=spec)(x), x)


# --- 31: one program raises -----------------------------------------------------------------------------------------
def test_31_an_exception_while_tracing_is_the_users_own():
    fail = True

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.when(x_ref[0] >= 0)
        def _():
            if fail:
                raise KeyError("mine")
            o_ref[0] = 5.0

    f = call(kernel, f32(8))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            f(x)
    fail = False
    np.testing.assert_array_equal(f(x), [5, 1, 2, 3, 4, 5, 6, 7])


def test_31_a_check_that_fails_halfway_needs_no_reset():
    """The first failure surfaces as it was raised, within a second, and the next call works, in jit too."""

    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref[0] < 4, "block starts too high")
        o_ref[...] = x_ref[...] * 2

    f = call(kernel, f32(8), grid=4, in_specs=[blocks(2)], out_specs=blocks(2))
    small = jnp.zeros(8)
    with pl.enable_debug_checks(True):
        np.testing.assert_array_equal(f(small), small)  # compiled
        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(pl.KernelCheckError) as caught:
                f(x)
            assert time.monotonic() - start < 1
            assert str(caught.value).splitlines()[0] == "block starts too high"
            assert "grid point: (2,)" in str(caught.value)
            np.testing.assert_array_equal(f(x / 4), x / 2)
        g = jax.jit(f)
        with pytest.raises(jax.errors.JaxRuntimeError, match="block starts too high"):
            g(x).block_until_ready()
        np.testing.assert_array_equal(g(x / 4), x / 2)
    np.testing.assert_array_equal(f(x), 2 * x)  # checks off


# --- 32: print, assert, named scope ---------------------------------------------------------------------------------
def test_32_prints_checks_and_scopes_do_not_change_results(capfd):
    def plain(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + pl.program_id(0)

    def chatty(x_ref, o_ref):
        with jax.named_scope("loading"):
            value = x_ref[...]
        pl.debug_print("program {} starts with {:.1f}", pl.program_id(0), value[0])
        pl.debug_check(value[0] >= 0, "never negative")
        o_ref[...] = jnp.exp(value) + pl.program_id(0)

    def run(kernel):
        result = call(kernel, f32(8), grid=4, in_specs=[blocks(2)], out_specs=blocks(2))(x)
        jax.block_until_ready(result)
        jax.effects_barrier()
        return np.asarray(result)

    expected = run(plain)
    for checks in (False, True):
        with pl.enable_debug_checks(checks):
            np.testing.assert_array_equal(run(chatty), expected)
        printed = capfd.readouterr().out.splitlines()
        assert printed == [f"program {i} starts with {2 * i:.1f}" for i in range(4)]


def test_32_named_scopes_reach_the_compiled_program():
    def kernel(x_ref, o_ref):
        with jax.named_scope("my_scope"):
            o_ref[...] = jnp.sin(x_ref[...])

    text = jax.jit(call(kernel, f32(8))).lower(x).compile().as_text()
    assert "my_scope" in text


def test_32_a_false_check_stops_the_program(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("before {}", pl.program_id(0))
        pl.debug_check(pl.program_id(0) < 1, "stop here")
        pl.debug_print("after {}", pl.program_id(0))
        o_ref[...] = x_ref[...]

    with pl.enable_debug_checks(True), pytest.raises(pl.KernelCheckError, match="stop here"):
        call(kernel, f32(8), grid=3)(x)
    assert capfd.readouterr().out.splitlines() == ["before 0", "after 0", "before 1"]


# --- 36: first chunk or whole row masked ----------------------------------------------------------------------------
def softmax_kernel(valid_ref, x_ref, o_ref, m_ref, l_ref):
    """Online softmax over chunks of a row, of which only entries at or after `valid` count."""
    j, last = pl.program_id(1), pl.num_programs(1) - 1
    rows, chunk = x_ref.shape

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        o_ref[...] = jnp.zeros_like(o_ref)

    column = j * chunk + lax.broadcasted_iota(jnp.int32, (rows, chunk), 1)
    logits = jnp.where(column >= valid_ref[...], x_ref[...], -jnp.inf)
    m_new = jnp.maximum(m_ref[...], logits.max(axis=1, keepdims=True))
    safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # a row with nothing so far: exp(-inf - 0) is 0, not NaN
    p = jnp.exp(logits - safe)
    scale = jnp.exp(m_ref[...] - safe)
    l_ref[...] = scale * l_ref[...] + p.sum(axis=1, keepdims=True)
    o_ref[...] = scale * o_ref[...] + (p * x_ref[...]).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == last)
    def _():
        o_ref[...] = o_ref[...] / jnp.where(l_ref[...] == 0, 1.0, l_ref[...])


def masked_mean(valid, x):
    """The softmax-weighted mean of each row's valid entries; 0 for a row without any."""
    rows, cols = x.shape
    column = pltpu.VMEM((2, 1), jnp.float32)
    return call(
        softmax_kernel,
        f32(rows, 1),
        grid=(rows // 2, cols // 4),
        in_specs=[pl.BlockSpec((2, 1), lambda i, j: (i, 0)), pl.BlockSpec((2, 4), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((2, 1), lambda i, j: (i, 0)),
        scratch_shapes=[column, column],
    )(valid, x)


def masked_mean_in_numpy(valid, x):
    keep = np.arange(x.shape[1]) >= valid
    weights = np.where(keep, np.exp(x), 0)
    total = weights.sum(1, keepdims=True)
    return (weights * x).sum(1, keepdims=True) / np.where(total == 0, 1, total)


def test_36_masked_chunks_and_rows_stay_finite_forward_and_backward():
    """The first chunk of row 1, and all of row 2, are masked: finite values, finite gradients, and exact zeros."""
    valid = np.array([[0], [5], [12], [11]], np.int32)
    values = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
    np.testing.assert_allclose(
        masked_mean(valid, values), masked_mean_in_numpy(valid, values.astype(np.float64)), rtol=2e-6, atol=1e-7
    )

    def backward(x_ref, keep_ref, g_ref, dx_ref):
        weights = jnp.where(keep_ref[...] != 0, jnp.exp(x_ref[...]), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
        mean = (weights * x_ref[...]).sum(axis=1, keepdims=True)
        dx_ref[...] = g_ref[...] * weights * (1 + x_ref[...] - mean)

    @jax.custom_vjp
    def mean(x):
        return masked_mean(valid, x)

    def bwd(x, g):
        keep = (np.arange(12) >= valid).astype(np.int32)
        return (call(backward, f32(4, 12))(x, keep, g),)

    mean.defvjp(lambda x: (masked_mean(valid, x), x), bwd)
    grads = np.asarray(jax.grad(lambda v: mean(v).sum())(values))
    assert np.isfinite(grads).all() and not grads[2].any() and not grads[1, :5].any()
    with jax.enable_x64(True):
        wide, step = values.astype(np.float64), 1e-6
        for at in [(0, 3), (1, 7), (3, 11)]:
            nudge = np.zeros_like(wide)
            nudge[at] = step
            up, down = masked_mean_in_numpy(valid, wide + nudge), masked_mean_in_numpy(valid, wide - nudge)
            np.testing.assert_allclose(grads[at], (up - down).sum() / (2 * step), rtol=1e-4, atol=1e-6)


def test_36_jax_debug_nans_reports_a_nan_and_only_a_nan():
    """Buffers start as NaN, which must not trip JAX's own check; a NaN in a result must."""

    def unsafe(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...] - jnp.max(x_ref[...]))

    with jax.debug_nans(True):
        np.testing.assert_array_equal(call(unsafe, f32(8), scratch_shapes=())(jnp.zeros(8)), np.ones(8))
        with pytest.raises(FloatingPointError, match="invalid value"):
            call(unsafe, f32(8))(jnp.full(8, -jnp.inf))


# --- 37: transforms -------------------------------------------------------------------------------------------------
def test_37_vmap_over_more_than_a_gpu_grid_axis_holds():
    """70,000 is beyond the 65,535 blocks that a GPU allows along the second and third axes."""
    n = 70_000
    batch = jnp.arange(n, dtype=jnp.float32)[:, None] + jnp.arange(2.0)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2 + pl.program_id(0)

    f = call(kernel, f32(2), grid=2, in_specs=[blocks(1)], out_specs=blocks(1))
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(batch), 2 * batch + np.arange(2))


def test_37_vmap_over_more_than_65535_with_an_order():
    n = 66_000

    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]

    whole = pl.BlockSpec((1,), lambda i: (0,))
    scratch = [pltpu.VMEM((1,), jnp.float32)]
    f = call(kernel, f32(1), grid=2, in_specs=[blocks(1)], out_specs=whole, scratch_shapes=scratch)
    batch = jnp.arange(2 * n, dtype=jnp.float32).reshape(n, 2)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(batch)[:, 0], np.asarray(batch).sum(1))


def gather_rows(table, x):
    grid_spec = pltpu.PrefetchScalarGridSpec(
        1,
        grid=(4,),
        in_specs=[pl.BlockSpec((1, 4), lambda i, s: (s[i], 0))],
        out_specs=pl.BlockSpec((1, 4), lambda i, s: (i, 0)),
    )
    return call(lambda s_ref, x_ref, o_ref: copy(x_ref, o_ref), f32(4, 4), grid_spec=grid_spec)(table, x)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 0)])
def test_37_vmap_of_scalar_prefetch_equals_a_python_loop(in_axes):
    rng = np.random.default_rng(0)
    tables = rng.integers(0, 3, (4, 4)).astype(np.int32)
    arrays = rng.standard_normal((4, 3, 4)).astype(np.float32)
    table = tables if in_axes[0] is not None else tables[0]
    array = arrays if in_axes[1] is not None else arrays[0]
    result = jax.jit(jax.vmap(gather_rows, in_axes))(table, array)
    for b in range(4):
        rows = tables[0] if in_axes[0] is None else np.moveaxis(tables, in_axes[0], 0)[b]
        np.testing.assert_array_equal(result[b], (arrays[0] if in_axes[1] is None else arrays[b])[rows])


def test_37_vmap_inside_a_kernel():
    """`jax.vmap` of a helper that works on values, and of one that reads a Ref at a batched index."""

    def kernel(x_ref, o_ref):
        square = jax.vmap(lambda row: row * row.sum())
        o_ref[...] = square(x_ref[...]) + jax.vmap(lambda i: x_ref[i, 0])(jnp.arange(2))[:, None] + pl.program_id(0)

    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    result = call(kernel, f32(2, 4), grid=1)(a)
    np.testing.assert_array_equal(result, a * a.sum(1, keepdims=True) + a[:, :1])


def test_37_vmap_of_different_grid_sizes_equals_a_python_loop():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * pl.num_programs(0)

    def f(n, x):
        return call(kernel, f32(8), grid=(n,))(x)

    sizes, batch = jnp.array([1, 3, 2]), jnp.arange(24.0).reshape(3, 8)
    np.testing.assert_array_equal(jax.vmap(f)(sizes, batch), batch * sizes[:, None])


def test_37_sharded_operands():
    """Under jit with sharded operands the result is that of one device, however the batch is laid out."""
    assert len(jax.devices()) >= 4, "tests/conftest.py asks for 4 CPU devices"
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    a = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2 + pl.program_id(0)

    spec = pl.BlockSpec((2, 8), lambda i: (i, 0))
    f = call(kernel, f32(8, 8), grid=4, in_specs=[spec], out_specs=spec)
    expected = np.asarray(a) * 2 + (np.arange(8) // 2)[:, None]
    for where in (PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec()):
        sharded = jax.device_put(a, NamedSharding(mesh, where))
        np.testing.assert_array_equal(jax.jit(f)(sharded), expected)


def test_no_kind_warns_without_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(call(copy, f32(8), grid=2, in_specs=[blocks(4)], out_specs=blocks(4))(x), x)
