"""Mistakes inside kernels: what they return, capture, write, index and ask for.

As in `test_errors.py`, each has a test on the first line of its message, on the line of this file that it names, and on
the fix it offers.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from language.mistakes import check, collector
from palladion import tpu as pltpu

CASES, mistake = collector()

x = jnp.arange(8, dtype=jnp.float32)
f32 = jax.ShapeDtypeStruct((8,), jnp.float32)
vmem = pltpu.VMEM((8,), jnp.float32)


def run(kernel, *operands, out=f32, **options):
    return pl.pallas_call(kernel, out, interpret=True, **options)(*(operands or (x,)))


@pytest.mark.parametrize("case", CASES)
def test_mistake(case):
    check(case)


# --- results and captures -------------------------------------------------------------------------------------------
RETURNS = "The kernel function in the pallas_call kernel at {here} should return None. It returns a PyTree: "


@mistake(ValueError, RETURNS + "PyTreeDef(*)")
def returns_a_value():
    def kernel(x_ref, o_ref):  # here
        return x_ref[...] * 2

    run(kernel)


@mistake(ValueError, RETURNS + "PyTreeDef(*)")
def returns_a_ref():
    def kernel(x_ref, o_ref):  # here
        return o_ref

    run(kernel)


@mistake(ValueError, RETURNS + "PyTreeDef((*, *))")
def returns_strings():
    def kernel(x_ref, o_ref):  # here
        return "done", "well"

    run(kernel)


def captures(name, kinds):
    return (
        f"The kernel function in the pallas_call {name} captures constants [{kinds}]. You should pass them as inputs."
    )


def captured(kernel, kinds, *operands, at):
    """The message's first line names the kernel's own line, later ones the first use of each array: `at` lines on."""
    with pytest.raises(ValueError) as caught:
        run(kernel, *operands)
    first, *rest = str(caught.value).splitlines()
    code = kernel.__code__
    where = f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"
    assert first == captures(where, kinds)
    *uses, fix = rest
    assert fix.startswith("  fix: make what is captured an operand of the call")
    for line in uses:
        assert line.startswith("  at: ") and "test_errors_in_kernels.py:" in line and "(first use of" in line
    lines = [int(line.split(".py:")[1].split(" ")[0]) - code.co_firstlineno for line in uses]
    assert lines == at


def test_captures_a_jax_array():
    w = jnp.ones(8)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + w

    captured(kernel, "f32[8]", at=[1])


def test_captures_a_numpy_array():
    w = np.ones(8, np.float32)

    def kernel(x_ref, o_ref):
        o_ref[...] = w

    captured(kernel, "f32[8]", at=[1])


def test_captures_two_arrays():
    w, b = jnp.ones(8), np.ones((), np.int32)[None]

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * w
        o_ref[0] += b[0] + jnp.sum(w)
        o_ref[1] = jnp.sum(b).astype(jnp.float32)

    captured(kernel, "f32[8], i32[1]", at=[1, 3])


def test_captures_a_0d_jax_array():
    w = jnp.float32(2)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * w

    captured(kernel, "f32[]", at=[1])


def test_captures_a_tracer_of_an_outer_jit():
    @jax.jit
    def outer(w):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] + w

        captured(kernel, "f32[8]", at=[1])
        return w

    outer(x)


def test_captures_inside_a_loop():
    w = jnp.ones(8)

    def kernel(x_ref, o_ref):
        @pl.loop(0, 8)
        def _(i):
            o_ref[i] = x_ref[i] + w[i]

    captured(kernel, "f32[8]", at=[1])


def test_captures_the_ref_of_another_kernel():
    def outer(x_ref, o_ref):
        def kernel(y_ref, p_ref):
            p_ref[...] = y_ref[...] + x_ref[...]

        captured(kernel, "Ref<default>{f32[8]}", at=[1])
        o_ref[...] = x_ref[...]

    run(outer)


def test_python_and_numpy_numbers_may_be_captured():
    a, b, c, d = 2, 0.5, np.float32(3), np.int64(4)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * a * b * c + d

    np.testing.assert_array_equal(run(kernel), 3 * np.arange(8) + 4)


def test_constant_index_arrays_and_masks_may_be_captured():
    rows, mask, traced = np.array([[3, 1], [0, 2]]), np.arange(8) % 3 == 0, jnp.array([7, 6])

    def kernel(x_ref, o_ref):
        o_ref[:4] = x_ref[rows].reshape(4)
        o_ref[4:7] = x_ref[mask]
        o_ref[7] = x_ref[traced][1]

    np.testing.assert_array_equal(run(kernel), [3, 1, 0, 2, 0, 3, 6, 6])


# --- values that Python wants now -----------------------------------------------------------------------------------
BOOL = "Attempted boolean conversion of traced array with shape {}[]."
WHEN = "use @pl.when(condition) for an `if`, jnp.where for a choice of values, & and | for `and` and `or`"


@mistake(jax.errors.TracerBoolConversionError, BOOL.format("bool"), noted=True, fix=WHEN)
def python_if_on_program_id():
    def kernel(x_ref, o_ref):
        if pl.program_id(0) == 0:  # here
            o_ref[...] = x_ref[...]

    run(kernel, grid=2)


@mistake(jax.errors.TracerBoolConversionError, BOOL.format("int32"), noted=True, fix=WHEN)
def bool_of_program_id():
    def kernel(x_ref, o_ref):
        bool(pl.program_id(0))  # here

    run(kernel, grid=2)


@mistake(jax.errors.TracerBoolConversionError, BOOL.format("bool"), noted=True, fix=WHEN)
def python_and_of_conditions():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0 and pl.program_id(1) == 0)  # here
        def _():
            pass

    run(kernel, grid=(2, 2))


@mistake(jax.errors.TracerBoolConversionError, BOOL.format("bool"), noted=True, fix=WHEN)
def python_while_in_a_branch():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            while x_ref[0] > 0:  # here
                pass

    run(kernel, grid=2)


@mistake(
    jax.errors.ConcretizationTypeError,
    "Abstract tracer value encountered where concrete value is expected: traced array with shape int32[]",
    noted=True,
    fix="use the value as it is: Refs take run-time integers and pl.ds(start, size) run-time starts; .astype converts",
)
def int_of_program_id():
    def kernel(x_ref, o_ref):
        o_ref[int(pl.program_id(0))] = 1.0  # here

    run(kernel, grid=2)


@mistake(
    jax.errors.TracerIntegerConversionError,
    "The __index__() method was called on traced array with shape int32[]",
    noted=True,
    fix="sizes, shapes, `range` and list indices need Python integers; loop with pl.loop or lax.fori_loop, index Refs "
    "with run-time integers as they are",
)
def python_range_of_program_id():
    def kernel(x_ref, o_ref):
        for i in range(pl.program_id(0)):  # here
            o_ref[i] = 1.0

    run(kernel, grid=2)


@mistake(
    jax.errors.TracerArrayConversionError,
    "The numpy.ndarray conversion method __array__() was called on traced array with shape float32[8]",
    noted=True,
    fix="NumPy functions need concrete arrays: use the jax.numpy function of the same name",
)
def numpy_function_of_a_value():
    def kernel(x_ref, o_ref):
        o_ref[...] = np.sin(x_ref[...])  # here

    run(kernel)


@mistake(TypeError, "add got incompatible shapes for broadcasting: (8,), (4,).", noted=True)
def jax_refuses_shapes():
    def kernel(x_ref, o_ref):
        o_ref[...] += x_ref[:4]  # here

    run(kernel)


def test_a_note_is_given_once():
    def inner(y_ref, p_ref):
        if y_ref[0] > 0:
            p_ref[...] = y_ref[...]

    def outer(x_ref, o_ref):
        o_ref[...] = run(inner, x_ref[...])

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(lambda y: run(outer, y))(x)
    ours = [note for note in caught.value.__notes__ if note.startswith("In the kernel")]
    assert len(ours) == 1
    assert ours[0].startswith("In the kernel inner, program ids and what Refs hold are known only when")


def test_an_exception_of_the_kernels_own_is_left_alone():
    def kernel(x_ref, o_ref):
        raise ValueError("mine")

    with pytest.raises(ValueError) as caught:
        run(kernel)
    assert caught.value.args == ("mine",)
    assert not any("Raised in" in note for note in getattr(caught.value, "__notes__", []))


# --- stores ---------------------------------------------------------------------------------------------------------
STORE = (
    "stores do not broadcast: write jnp.full(shape, number) or jnp.broadcast_to(value, shape), or index the part that "
    "is meant"
)


@mistake(ValueError, "Cannot write a value of shape (4,) to o_ref (output 0), which has shape (8,).", fix=STORE)
def store_of_another_shape():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:4]  # here

    run(kernel)


@mistake(ValueError, "Cannot write a value of shape () to o_ref (output 0), which has shape (8,).")
def store_of_a_number_to_all():
    def kernel(x_ref, o_ref):
        o_ref[...] = 0.0  # here

    run(kernel)


@mistake(ValueError, "Cannot write a value of shape (2,) to o_ref (output 0), where the index selects shape (3,).")
def store_to_a_part_of_another_shape():
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(pl.program_id(0), 3)] = x_ref[:2]  # here

    run(kernel, grid=2)


@mistake(ValueError, "Cannot write a value of shape (8,) to a view of o_ref (output 0), which has shape (2,).")
def store_to_a_view():
    def kernel(x_ref, o_ref):
        o_ref.at[2:6].at[1:3].set(x_ref[...])  # here

    run(kernel)


@mistake(ValueError, "Cannot write a value of shape (8,) to o_ref (output 0), where the index selects shape ().")
def store_in_a_loop():
    def kernel(x_ref, o_ref):
        def body(i, carry):
            o_ref[i] = x_ref[...]  # here
            return carry

        lax.fori_loop(0, 8, body, 0)

    run(kernel)


@mistake(ValueError, "Cannot write a value of shape (4,) to s_ref (scratch 0), which has shape (8,).")
def store_in_a_branch():
    def kernel(x_ref, o_ref, s_ref):
        @pl.when(x_ref[0] > 0)
        def _():
            s_ref[...] = x_ref[:4]  # here

    run(kernel, scratch_shapes=[vmem])


@mistake(ValueError, "Cannot write a value of shape (3,) to o_ref (output 0), which has shape (8,).")
def store_in_a_jitted_helper():
    @jax.jit
    def helper(ref, value):
        ref[...] = value  # here

    run(lambda x_ref, o_ref: helper(o_ref, x_ref[:3]))


@mistake(
    ValueError,
    "Cannot write a value of dtype bfloat16 to o_ref (output 0), which holds float32.",
    fix="stores do not convert: write value.astype(o_ref.dtype)",
)
def store_of_another_dtype():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(jnp.bfloat16)  # here

    run(kernel)


@mistake(ValueError, "Cannot write a value of dtype float32 to o_ref (output 0), which holds int32.")
def store_of_a_float_to_integers():
    def kernel(x_ref, o_ref):
        o_ref[0] = 1.5  # here

    run(kernel, out=jax.ShapeDtypeStruct((8,), jnp.int32))


@mistake(TypeError, "Cannot write None to o_ref (output 0): it is not an array.")
def store_of_none():
    def kernel(x_ref, o_ref):
        o_ref[...] = None  # here

    run(kernel)


@mistake(TypeError, "Cannot write 'abc' (str) to o_ref (output 0): it is not an array.")
def store_of_a_string():
    def kernel(x_ref, o_ref):
        o_ref[...] = "abc"  # here

    run(kernel)


@mistake(ValueError, "Cannot store the Ref x_ref (input 0) in o_ref (output 0): a Ref is not a value.")
def store_of_a_ref():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref  # here

    run(kernel)


@mistake(ValueError, "Cannot store the Ref a view of x_ref (input 0) in o_ref (output 0): a Ref is not a value.")
def store_of_a_view():
    def kernel(x_ref, o_ref):
        o_ref[:4] = x_ref.at[:4]  # here

    run(kernel)


@mistake(ValueError, "Cannot write a value of shape (4,) to o_ref (output 0), which has shape (8,).")
def accumulate_another_shape():
    def kernel(x_ref, o_ref):
        o_ref.addupdate(x_ref[:4])  # here

    run(kernel)


@mistake(IndexError, "A write to o_ref (output 0) cannot use new axes (None).")
def store_with_a_new_axis():
    def kernel(x_ref, o_ref):
        o_ref[None, :] = x_ref[...]  # here

    run(kernel)


@mistake(
    ValueError,
    "A store to o_ref (output 0) under a run-time mask takes a scalar or a value of shape (8,), not (4,): how many "
    "elements the mask selects is not known.",
)
def store_under_a_mask():
    def kernel(x_ref, o_ref):
        o_ref[x_ref[...] > 0] = x_ref[:4]  # here

    run(kernel)


@mistake(
    ValueError,
    "The kernel kernel writes to x_ref (input 0), which is not aliased to an output.",
    fix="write to an output or scratch Ref, or pass input_output_aliases={0: <output number>} to update the operand in "
    "place",
)
def store_to_an_input():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.when(x_ref[0] > 0)
        def _():
            x_ref[0] = 1.0  # here

    run(kernel)


@mistake(
    ValueError,
    "The kernel kernel writes to s_ref (scalar-prefetch operand 0), which the index map of x_ref (input 0) reads while "
    "blocks are in flight.",
)
def store_to_scalar_prefetch():
    def kernel(s_ref, x_ref, o_ref):
        s_ref[0] = 1  # here

    spec = pl.BlockSpec((4,), lambda i, s: (s[i],))
    grid_spec = pltpu.PrefetchScalarGridSpec(1, grid=(2,), in_specs=[spec], out_specs=spec)
    run(kernel, jnp.arange(2), x, grid_spec=grid_spec)


# --- Refs are not values --------------------------------------------------------------------------------------------
READ = "read it first: x_ref[...]"


@mistake(TypeError, "Cannot apply + to x_ref (input 0): a Ref is not a value.", fix=READ)
def ref_plus_number():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref + 1  # here

    run(kernel)


@mistake(TypeError, "Cannot apply * to x_ref (input 0): a Ref is not a value.", fix=READ)
def number_times_ref():
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref  # here

    run(kernel)


@mistake(TypeError, "Cannot apply @ to x_ref (input 0): a Ref is not a value.")
def ref_matmul_ref():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref @ x_ref  # here

    run(kernel)


@mistake(TypeError, "Cannot apply - to x_ref (input 0): a Ref is not a value.")
def minus_ref():
    def kernel(x_ref, o_ref):
        o_ref[...] = -x_ref  # here

    run(kernel)


@mistake(TypeError, "Cannot apply > to x_ref (input 0): a Ref is not a value.")
def ref_compared():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.where(x_ref > 0, 1.0, 0.0)  # here

    run(kernel)


@mistake(TypeError, "Cannot apply == to x_ref (input 0): a Ref is not a value.")
def ref_equals():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.where(x_ref == 0, 1.0, 0.0)  # here

    run(kernel)


@mistake(TypeError, "Cannot apply + to o_ref (output 0): a Ref is not a value.")
def ref_added_to():
    def kernel(x_ref, o_ref):
        o_ref += x_ref[...]  # here

    run(kernel)


@mistake(
    TypeError, "Cannot call .sum() of x_ref (input 0): a Ref is not a value.", fix="read it first: x_ref[...].sum(…)"
)
def ref_sum():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref.sum()  # here

    run(kernel)


@mistake(TypeError, "Cannot call .astype() of a view of x_ref (input 0): a Ref is not a value.")
def view_astype():
    def kernel(x_ref, o_ref):
        o_ref[:4] = x_ref.at[:4].astype(jnp.float32)  # here

    run(kernel)


@mistake(TypeError, "Cannot iterate over x_ref (input 0): a Ref is not a value.")
def ref_iterated():
    def kernel(x_ref, o_ref):
        for value in x_ref:  # here
            o_ref[0] += value

    run(kernel)


@mistake(TypeError, "Cannot apply / to a view of x_ref (input 0): a Ref is not a value.")
def view_divided():
    def kernel(x_ref, o_ref):
        o_ref[:4] = x_ref.at[:4] / 2  # here

    run(kernel)


@mistake(TypeError, "Cannot compute with a view of x_ref (input 0): a Ref is not a value.")
def function_of_a_view():
    def kernel(x_ref, o_ref):
        o_ref[:4] = jnp.sin(x_ref.at[:4])  # here

    run(kernel)


@mistake(
    TypeError,
    "Operand 0 of inner is a Ref, x_ref (input 0); it must be an array.",
    fix="pass its value: call(x_ref[...]); a kernel that updates a Ref in place is a pl.core_map",
)
def ref_as_an_operand():
    def inner(y_ref, p_ref):
        pass

    def kernel(x_ref, o_ref):
        o_ref[...] = pl.pallas_call(inner, f32, interpret=True)(x_ref)  # here

    run(kernel)


@pytest.mark.parametrize("function", [jnp.sin, jnp.sum, lambda r: jnp.dot(r, r), lambda r: jnp.where(True, r, r)])
def test_jax_functions_of_a_ref(function):
    def kernel(x_ref, o_ref):
        o_ref[...] = function(x_ref)

    with pytest.raises(TypeError) as caught:
        run(kernel)
    first, place, fix = str(caught.value).splitlines()
    assert first == "Cannot compute with x_ref (input 0): a Ref is not a value."
    assert "test_errors_in_kernels.py:" in place and fix == f"  fix: {READ}"


def test_what_refs_do_have():
    def kernel(x_ref, o_ref):
        assert x_ref.shape == (2, 4) and x_ref.dtype == jnp.float32 and x_ref.ndim == 2 and x_ref.size == 8
        assert len(x_ref) == 2 and len(x_ref.at[:, 1:]) == 2
        assert x_ref is not None and not hasattr(x_ref, "no_such_thing")
        assert jnp.zeros_like(x_ref).shape == (2, 4) and jnp.ones_like(o_ref).dtype == jnp.float32
        old = o_ref.swap(x_ref.get())
        o_ref.set(old * 0 + 1, (0,) if old.ndim == 1 else ())
        o_ref[...] = x_ref.get() + x_ref.T.reshape(4, 2).T.get()

    y = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(kernel, y, out=jax.ShapeDtypeStruct((2, 4), jnp.float32)), 2 * y)


# --- indices --------------------------------------------------------------------------------------------------------
OUT = "Index {} is out of range for dimension 0 of x_ref (input 0), which has 8 elements."


@mistake(IndexError, OUT.format(8), fix="valid indices are -8..7, within the block")
def index_past_the_end():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[8]  # here

    run(kernel)


@mistake(IndexError, OUT.format(-9))
def index_before_the_start():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[-9]  # here

    run(kernel)


@mistake(IndexError, OUT.format(8))
def index_array_past_the_end():
    def kernel(x_ref, o_ref):
        o_ref[:2] = x_ref[np.array([0, 8])]  # here

    run(kernel)


@mistake(IndexError, OUT.format(9))
def index_list_past_the_end():
    def kernel(x_ref, o_ref):
        o_ref[:2] = x_ref[[0, 9]]  # here

    run(kernel)


@mistake(IndexError, OUT.format(8))
def index_past_the_end_through_jax():
    def kernel(x_ref, o_ref):
        o_ref[0] = jax.ref.get(x_ref, 8)  # here

    run(kernel)


@mistake(IndexError, "Index 1 is out of range for dimension 0 of o_ref (output 0), which has 1 element.")
def index_of_a_store_past_the_end():
    def kernel(x_ref, o_ref):
        o_ref[1] = x_ref[0]  # here

    run(kernel, out=jax.ShapeDtypeStruct((1,), jnp.float32))


@mistake(IndexError, "Index 4 is out of range for dimension 0 of a view of x_ref (input 0), which has 4 elements.")
def index_past_the_end_of_a_view():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref.at[2:6][4]  # here

    run(kernel)


@mistake(IndexError, "Index 0 is out of range for dimension 0 of x_ref (input 0), which has 0 elements.")
def index_of_an_empty_ref():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[0]  # here

    run(kernel, jnp.zeros((0,)))


PAST = "pl.ds({}) runs past dimension 0 of x_ref (input 0), which has 8 elements."


@mistake(
    IndexError,
    PAST.format("start=4, size=8"),
    fix="a start of at most 0 fits; a ragged tail needs a mask",
)
def slice_past_the_end():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(4, 8)]  # here

    run(kernel)


@mistake(IndexError, PAST.format("start=-4, size=8"))
def slice_from_before_the_end():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(-4, 8)]  # here

    run(kernel)


@mistake(IndexError, PAST.format("start=0, size=8, stride=2"))
def strided_slice_past_the_end():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(0, 8, 2)]  # here

    run(kernel)


@mistake(IndexError, PAST.format("…, size=9"))
def slice_longer_than_the_ref():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0), 9)]  # here

    run(kernel, grid=1)


@mistake(IndexError, "A slice of x_ref (input 0) has a size known only at run time.")
def slice_of_a_run_time_size():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(0, pl.program_id(0))]  # here

    run(kernel, grid=1)


@mistake(
    IndexError,
    "A slice of x_ref (input 0) has bounds known only at run time.",
    fix="sizes are static: write x_ref[pl.ds(start, size)] for x_ref[start:start + size]",
)
def python_slice_of_run_time_bounds():
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = x_ref[i : i + 4]  # here

    run(kernel, grid=1)


@mistake(IndexError, "A slice of x_ref (input 0) has step -1; Refs take positive steps.")
def slice_backwards():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[::-1]  # here

    run(kernel)


@mistake(TypeError, "A slice of x_ref (input 0) has bounds that are not integers: 0:4.0.")
def slice_to_a_float():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[0 : 8 / 2]  # here

    run(kernel)


@mistake(TypeError, "Cannot index x_ref (input 0) with 1.0 (float).")
def index_of_a_float():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[1.0]  # here

    run(kernel)


@mistake(TypeError, "Cannot index x_ref (input 0) with float32[8].")
def index_of_floats():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[x_ref[...]]  # here

    run(kernel)


@mistake(TypeError, "The index of x_ref (input 0) is a Ref, i_ref (input 1).")
def index_of_a_ref():
    def kernel(x_ref, i_ref, o_ref):
        o_ref[0] = x_ref[i_ref]  # here

    run(kernel, x, jnp.arange(1))


@mistake(IndexError, "Too many indices: cannot read x_ref (input 0) of shape (8,) with 2 of them.")
def too_many_indices():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[0, 0]  # here

    run(kernel)


@mistake(IndexError, "An index of x_ref (input 0) can have only one `...`.")
def two_ellipses():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[..., ...]  # here

    run(kernel)


@mistake(IndexError, "Cannot index x_ref (input 0) with the single bool True.")
def index_of_a_bool():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[True]  # here

    run(kernel)


@mistake(IndexError, "A mask of shape (2,) does not fit dimensions of shape (8,) of x_ref (input 0).")
def mask_of_another_shape():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[np.array([True, False])][0]  # here

    run(kernel)


@mistake(
    IndexError,
    "Cannot read x_ref (input 0) under a boolean mask known only at run time: the shape would depend on its values.",
    fix="read all and choose: jnp.where(mask, x_ref[...], other)",
)
def read_under_a_run_time_mask():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[x_ref[...] > 0]  # here

    run(kernel)


@mistake(ValueError, "x_ref (input 0) of shape (8,) cannot be seen as shape (3, 3).")
def reshaped_view_of_another_size():
    def kernel(x_ref, o_ref):
        x_ref.reshape(3, 3)  # here

    run(kernel)


@mistake(ValueError, "x_ref (input 0) has 1 dimension; a bitcast from float32 to int8 changes the width and needs two.")
def bitcast_of_one_dimension():
    def kernel(x_ref, o_ref):
        x_ref.bitcast(jnp.int8)  # here

    run(kernel)


@mistake(ValueError, "x_ref (input 0) has 1 dimension; (1, 0) is not an order of them.")
def transpose_of_other_dimensions():
    def kernel(x_ref, o_ref):
        x_ref.transpose(1, 0)  # here

    run(kernel)


# --- operations -----------------------------------------------------------------------------------------------------
@mistake(ValueError, "pl.program_id can only be used inside a kernel; it was called outside a kernel.")
def program_id_outside():
    pl.program_id(0)  # here


@mistake(ValueError, "pl.num_programs can only be used inside a kernel; it was called outside a kernel.")
def num_programs_outside():
    pl.num_programs(0)  # here


@mistake(ValueError, "pl.program_id(1): the grid of kernel has 1 axis.", grid="(2,)", fix="axes are counted from 0")
def program_id_of_an_axis_too_far():
    def kernel(x_ref, o_ref):
        pl.program_id(1)  # here

    run(kernel, grid=2)


@mistake(ValueError, "pl.program_id(-1): the grid of kernel has 2 axes.")
def program_id_of_a_negative_axis():
    def kernel(x_ref, o_ref):
        pl.program_id(-1)  # here

    run(kernel, grid=(2, 2))


@mistake(
    ValueError,
    "pl.num_programs(0): the grid of kernel has no axes.",
    fix="give the call a grid: pl.pallas_call(…, grid=(n,))",
)
def num_programs_without_a_grid():
    def kernel(x_ref, o_ref):
        pl.num_programs(0)  # here

    run(kernel)


@mistake(TypeError, "pl.program_id takes the number of a grid axis, not a scalar int32.")
def program_id_of_a_traced_axis():
    def kernel(x_ref, o_ref):
        pl.program_id(pl.program_id(0))  # here

    run(kernel, grid=2)


@mistake(TypeError, "pl.num_programs takes the number of a grid axis, not 'i' (str).")
def num_programs_of_a_name():
    def kernel(x_ref, o_ref):
        pl.num_programs("i")  # here

    run(kernel, grid=2)


@mistake(TypeError, "pl.when takes one condition, not an array of shape (8,).")
def when_of_a_vector():
    def kernel(x_ref, o_ref):
        pl.when(x_ref[...] > 0)(lambda: None)  # here

    run(kernel)


@mistake(TypeError, "pl.when got the Ref x_ref (input 0), not a condition.")
def when_of_a_ref():
    def kernel(x_ref, o_ref):
        pl.when(x_ref)(lambda: None)  # here

    run(kernel)


@mistake(TypeError, "pl.when takes a condition, not None.")
def when_of_none():
    pl.when(None)  # here


@mistake(TypeError, "The function under pl.when takes 1 parameter (i), but it is called without arguments.")
def when_with_a_parameter():
    def kernel(x_ref, o_ref):
        pl.when(x_ref[0] > 0)(lambda i: None)  # here

    run(kernel)


@mistake(ValueError, "The function under pl.when returns a scalar float32; it must return nothing.")
def when_with_a_result():
    def kernel(x_ref, o_ref):
        pl.when(x_ref[0] > 0)(lambda: x_ref[0])  # here

    run(kernel)


@mistake(TypeError, "The upper bound of pl.loop is a scalar float32, not an integer.")
def loop_to_a_traced_float():
    def kernel(x_ref, o_ref):
        pl.loop(0, x_ref[0])(lambda i: None)  # here

    run(kernel)


@mistake(TypeError, "The lower bound of pl.loop is 0.5 (float), not an integer.")
def loop_from_a_float():
    pl.loop(0.5, 4)  # here


@mistake(TypeError, "The upper bound of pl.loop is a Ref, n_ref (input 0).")
def loop_to_a_ref():
    def kernel(n_ref, o_ref):
        pl.loop(0, n_ref)(lambda i: None)  # here

    run(kernel, jnp.arange(1))


@mistake(ValueError, "The step of pl.loop is 0; it must be positive.")
def loop_without_progress():
    pl.loop(0, 4, step=0)  # here


@mistake(TypeError, "The body of pl.loop takes 1 parameter (i), but it is called with the index and the carry.")
def loop_body_without_carry():
    pl.loop(0, 4, init_carry=0)(lambda i: 1)  # here


@mistake(TypeError, "The body of pl.loop takes 2 parameters (i, carry), but it is called with the index only.")
def loop_body_with_carry():
    pl.loop(0, 4)(lambda i, carry: carry)  # here


@mistake(ValueError, "The body of pl.loop returns 1 (int), but nothing is carried.")
def loop_body_with_a_result():
    pl.loop(0, 4)(lambda i: 1)  # here


@mistake(ValueError, "pl.run_scoped can only be used inside a kernel; it was called outside a kernel.")
def run_scoped_outside():
    pl.run_scoped(lambda ref: None, vmem)  # here


@mistake(TypeError, "Scoped buffer 0 of pl.run_scoped is 8 (int), which is not a buffer type.")
def run_scoped_of_a_number():
    def kernel(x_ref, o_ref):
        pl.run_scoped(lambda ref: None, 8)  # here

    run(kernel)


@mistake(TypeError, "The function given to pl.run_scoped takes 1 parameter (a), but it gets 2 arguments.")
def run_scoped_with_too_many():
    def kernel(x_ref, o_ref):
        pl.run_scoped(lambda a: None, vmem, vmem)  # here

    run(kernel)


@mistake(ValueError, "The function given to pl.run_scoped returns the Ref of scoped buffer 0.")
def run_scoped_returns_its_ref():
    def kernel(x_ref, o_ref):
        pl.run_scoped(lambda ref: (1, ref), vmem)  # here

    run(kernel)


@mistake(ValueError, "The function given to pl.run_state should return None; it returns 1 (int).")
def run_state_with_a_result():
    pl.run_state(lambda refs: 1)(x)  # here


@mistake(ValueError, "The format '{} {}' of pl.debug_print asks for more than its 1 value.")
def print_of_too_few_values():
    def kernel(x_ref, o_ref):
        pl.debug_print("{} {}", x_ref[0])  # here

    run(kernel)


@mistake(ValueError, "The format 'x={}' of pl.debug_print has no place for argument 1 of 2.")
def print_of_too_many_values():
    def kernel(x_ref, o_ref):
        pl.debug_print("x={}", x_ref[0], x_ref[1])  # here

    run(kernel)


@mistake(ValueError, "The format '{x}' of pl.debug_print names 'x', but its values come by position.")
def print_by_name():
    def kernel(x_ref, o_ref):
        pl.debug_print("{x}", x_ref[0])  # here

    run(kernel)


@mistake(ValueError, "The format 'a {' of pl.debug_print is not one: Single '{' encountered in format string.")
def print_of_half_a_brace():
    def kernel(x_ref, o_ref):
        pl.debug_print("a {", x_ref[0])  # here

    run(kernel)


@mistake(
    ValueError,
    "The format '{:d}' does not fit the values of pl.debug_print: Unknown format code 'd' for object of type 'float'.",
    values="a scalar float32",
)
def print_of_a_float_as_an_integer():
    def kernel(x_ref, o_ref):
        pl.debug_print("{:d}", x_ref[0])  # here

    run(kernel)


@mistake(TypeError, "pl.debug_print takes a format string first, not a scalar float32.")
def print_without_a_format():
    def kernel(x_ref, o_ref):
        pl.debug_print(x_ref[0])  # here

    run(kernel)


@mistake(TypeError, "Argument 0 of pl.debug_print is a tuple of values known at run time.")
def print_of_a_tuple():
    def kernel(x_ref, o_ref):
        pl.debug_print("{}", (x_ref[0], x_ref[1]))  # here

    run(kernel)


@mistake(TypeError, "pl.debug_check takes one condition, not an array of shape (8,).")
def check_of_a_vector():
    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref[...] > 0, "positive")  # here

    with pl.enable_debug_checks(True):
        run(kernel)


@mistake(TypeError, "pl.delay takes an integer number of nanoseconds, not 1.5 (float).")
def delay_of_a_float():
    def kernel(x_ref, o_ref):
        pl.delay(1.5)  # here

    run(kernel)


@mistake(ValueError, "pl.multiple_of(5, 2): 5 is not a multiple of 2.")
def false_promise():
    pl.multiple_of(5, 2)  # here


@mistake(ValueError, "pl.multiple_of takes positive integers, not 0 (int).")
def multiple_of_zero():
    pl.multiple_of(5, 0)  # here


@mistake(TypeError, "pl.next_power_of_2 takes an integer, not 1.5 (float).")
def power_of_a_float():
    pl.next_power_of_2(1.5)  # here


@mistake(ValueError, "pl.next_power_of_2 takes a number that is not negative, not -1.")
def power_of_a_negative_number():
    pl.next_power_of_2(-1)  # here


@mistake(ValueError, "An array of shape (3,) cannot be broadcast to (2, 4).")
def broadcast_to_another_shape():
    pl.broadcast_to(jnp.arange(3), (2, 4))  # here


@mistake(TypeError, "pl.empty_ref_like takes array types, not 3 (int).")
def empty_ref_like_a_number():
    pl.empty_ref_like(3)  # here


@mistake(ValueError, "The dtype of pl.empty is float64, but 64-bit types are off in JAX.")
def empty_of_float64():
    pl.empty((8,), jnp.float64)  # here


# --- kernels in kernels ---------------------------------------------------------------------------------------------
@mistake(RecursionError, "The kernel kernel is called inside 8 other kernel calls: it calls itself without end.")
def kernel_that_calls_itself():
    def kernel(x_ref, o_ref):
        o_ref[...] = pl.pallas_call(kernel, f32, interpret=True)(x_ref[...])  # here

    run(kernel)


def test_a_kernel_call_inside_a_kernel_works_in_the_interpreter():
    """A call is a function of arrays, so it may stand in a kernel that XLA runs; machines have no rule for it."""

    def inner(y_ref, p_ref):
        p_ref[...] = y_ref[...] * (pl.program_id(0) + 1)

    def outer(x_ref, o_ref):
        spec = pl.BlockSpec((2,), lambda i: (i,))
        block = jax.ShapeDtypeStruct((4,), jnp.float32)
        call = pl.pallas_call(inner, block, grid=2, in_specs=[spec], out_specs=spec, interpret=True)
        o_ref[...] = call(x_ref[...]) + 10 * pl.program_id(0)

    spec = pl.BlockSpec((4,), lambda i: (i,))
    result = run(outer, grid=2, in_specs=[spec], out_specs=spec)
    np.testing.assert_array_equal(result, [0, 1, 4, 6, 14, 15, 22, 24])


class Stop(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


def test_an_interrupted_trace_leaves_nothing_behind():
    stop = True

    def kernel(x_ref, o_ref):
        if stop:
            raise Stop
        o_ref[...] = x_ref[...] + pl.program_id(0)

    call = pl.pallas_call(kernel, f32, grid=1, interpret=True)
    for function in (call, jax.jit(call), jax.vmap(call)):
        with pytest.raises(Stop):
            function(x if function is not jax.vmap(call) else x[None])
    with pytest.raises(ValueError, match="outside a kernel"):
        pl.program_id(0)
    stop = False
    np.testing.assert_array_equal(call(x), x)


def test_threads_do_not_see_each_others_kernels():
    """Two threads trace the same kernel with different grids at the same time, each stopping halfway for the other."""
    meet = threading.Barrier(2, timeout=60)

    def kernel(x_ref, o_ref):
        meet.wait()
        size = pl.num_programs(0)
        meet.wait()
        o_ref[...] = x_ref[...] * size + pl.program_id(0)

    results = {}

    def work(n):
        spec = pl.BlockSpec((8 // n,), lambda i: (i,))
        results[n] = run(kernel, grid=n, in_specs=[spec], out_specs=spec)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in (2, 4):
        np.testing.assert_array_equal(results[n], np.arange(8) * n + np.arange(8) // (8 // n))


def test_many_threads_call_one_kernel():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * pl.num_programs(0) + pl.program_id(0)

    spec = pl.BlockSpec((4,), lambda i: (i,))
    call = pl.pallas_call(kernel, f32, grid=2, in_specs=[spec], out_specs=spec, interpret=True)
    errors = []

    def work(n):
        try:
            y = x[: 8 if n % 2 else 4]  # two types, so that both threads trace
            if n % 2:
                np.testing.assert_array_equal(call(y + n), 2 * (np.arange(8) + n) + np.arange(8) // 4)
            else:
                half = jax.ShapeDtypeStruct((4,), jnp.float32)
                np.testing.assert_array_equal(run(lambda *refs: kernel(*refs), y, grid=1, out=half), np.arange(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
