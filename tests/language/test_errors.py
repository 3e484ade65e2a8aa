"""Mistakes in what a program gives to `pallas_call`: grids, specs, index maps, aliases, operands, outputs.

Each has a test on the first line of its message, on the line of this file that it names, and on the fix it offers.
Mistakes inside kernels are in `test_errors_in_kernels.py`.
"""

import functools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from language.mistakes import check, collector
from palladion import tpu as pltpu

CASES, mistake = collector()

x = jnp.arange(8, dtype=jnp.float32)
matrix = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)
f32 = jax.ShapeDtypeStruct((8,), jnp.float32)


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def spec(index_map, block_shape=(4,)):
    return pl.BlockSpec(block_shape, index_map)


blocks = spec(lambda i: (i,))


def call(index_map, block_shape=(4,), array=x, grid=(2,), kernel=copy):
    """A call whose input has the given index map."""
    in_spec = pl.BlockSpec(block_shape, index_map)
    out_spec = spec(lambda *ids: (ids[0],))
    return pl.pallas_call(kernel, f32, grid=grid, in_specs=[in_spec], out_specs=out_spec, interpret=True)(array)


@pytest.mark.parametrize("case", CASES)
def test_mistake(case):
    check(case)


# --- grid -----------------------------------------------------------------------------------------------------------
GRID_FIX = "write grid=n or a tuple of ints; pl.cdiv(n, block) and n // block give ints, n / block is a float"


@mistake(TypeError, "Axis 0 of the grid of copy is 2.0 (float); a grid size is an integer.", fix=GRID_FIX)
def grid_of_a_float():
    pl.pallas_call(copy, f32, grid=8 / 4)  # here


@mistake(TypeError, "Axis 1 of the grid of copy is True (bool); a grid size is an integer.")
def grid_of_a_bool():
    pl.pallas_call(copy, f32, grid=(2, True))  # here


@mistake(TypeError, "Axis 0 of the grid of copy is '2' (str); a grid size is an integer.")
def grid_of_a_string():
    pl.pallas_call(copy, f32, grid="2")  # here


@mistake(TypeError, "Axis 0 of the grid of copy is None; a grid size is an integer.")
def grid_of_none():
    pl.pallas_call(copy, f32, grid=(None,))  # here


@mistake(TypeError, "Axis 0 of the grid of copy is (2, 2) (tuple); a grid size is an integer.")
def grid_of_a_tuple_too_deep():
    pl.pallas_call(copy, f32, grid=((2, 2),))  # here


@mistake(TypeError, "Axis 0 of the grid of copy is int32[3]; a grid size is an integer.")
def grid_of_an_array():
    pl.pallas_call(copy, f32, grid=jnp.arange(3))  # here


@mistake(TypeError, "Axis 0 of the grid of copy is a scalar float32; a grid size is an integer.")
def grid_of_a_traced_float():
    jax.jit(lambda n: pl.pallas_call(copy, f32, grid=(n,), interpret=True)(x))(2.0)  # here


@mistake(ValueError, "Axis 1 of the grid of copy is -1; a grid size cannot be negative.", grid="(2, -1)")
def grid_with_a_negative_size():
    pl.pallas_call(copy, f32, grid=(2, -1))  # here


@mistake(ValueError, "The grid of copy is too large: program numbers are 32-bit integers.", grid="(2147483648,)")
def grid_with_a_size_beyond_int32():
    pl.pallas_call(copy, f32, grid=2**31)  # here


@mistake(ValueError, "The grid of copy is too large: program numbers are 32-bit integers.")
def grid_with_a_product_beyond_int32():
    pl.pallas_call(copy, f32, grid=(2**20, 2**20))  # here


@mistake(ValueError, "`grid_spec` and `grid` are both given to pallas_call; with a grid_spec, grid belongs in it.")
def grid_spec_together_with_grid():
    pl.pallas_call(copy, f32, grid_spec=pl.GridSpec(grid=(2,)), grid=(2,))  # here


@mistake(
    ValueError, "`grid_spec` and `in_specs` are both given to pallas_call; with a grid_spec, in_specs belongs in it."
)
def grid_spec_together_with_in_specs():
    pl.pallas_call(copy, f32, grid_spec=pl.GridSpec(grid=(2,)), in_specs=[blocks])  # here


@mistake(TypeError, "grid_spec must be a pl.GridSpec, not (2,) (tuple).")
def grid_spec_of_a_tuple():
    pl.pallas_call(copy, f32, grid_spec=(2,))  # here


# --- block shapes ---------------------------------------------------------------------------------------------------
def unsupported(kind, value):
    return (
        f"Unsupported block dimension type: <class '{kind}'>. Dimension 1 of the block shape must be a Python integer, "
        f"not {value}."
    )


@mistake(ValueError, unsupported("float", "4.0 (float)"), block_shape="(8, 4.0)")
def block_dimension_of_a_float():
    pl.BlockSpec((8, 4.0), lambda i: (i, 0))  # here


@mistake(ValueError, unsupported("bool", "True (bool)"))
def block_dimension_of_a_bool():
    pl.BlockSpec((8, True), lambda i: (i, 0))  # here


@mistake(ValueError, unsupported("str", "'4' (str)"))
def block_dimension_of_a_string():
    pl.BlockSpec((8, "4"), lambda i: (i, 0))  # here


@mistake(ValueError, unsupported("tuple", "(4, 4) (tuple)"))
def block_dimension_of_a_tuple():
    pl.BlockSpec((8, (4, 4)), lambda i: (i, 0))  # here


@mistake(
    ValueError,
    unsupported("jax._src.interpreters.partial_eval.DynamicJaxprTracer", "a scalar int32"),
    fix="block sizes are fixed when the kernel is built; under jit, pass them as static_argnames or bind them with "
    "functools.partial",
)
def block_dimension_traced():
    jax.jit(lambda n: pl.BlockSpec((8, n), lambda i: (i, 0)))(4)  # here


@mistake(ValueError, "Dimension 0 of the block shape must be at least 1, not 0.", block_shape="(0, None)")
def block_dimension_of_zero():
    pl.BlockSpec((0, None), lambda i: (i, 0))  # here


@mistake(ValueError, "Dimension 0 of the block shape must be at least 1, not -4.")
def block_dimension_negative():
    pl.BlockSpec((-4,), lambda i: (i,))  # here


@mistake(ValueError, "An Element block size must be at least 1, not 0.")
def element_of_zero():
    pl.Element(0)  # here


@mistake(ValueError, "The padding of an Element block is a pair, not 3 (int).")
def element_padding_of_an_int():
    pl.Element(8, padding=3)  # here


@mistake(ValueError, "The padding of an Element block must be at least 0, not -1.")
def element_padding_negative():
    pl.Element(8, padding=(0, -1))  # here


@mistake(ValueError, "A buffer count must be at least 1, not 0.")
def no_buffers():
    pl.Buffered(0)  # here


@mistake(ValueError, "The block shape of x_ref (input 0) has 1 dimension, but the array has 2.", array="float32[4, 8]")
def block_rank_unlike_array_rank():
    pl.pallas_call(copy, f32, grid=2, in_specs=[blocks], out_specs=blocks, interpret=True)(matrix)  # here


@mistake(
    ValueError, "The block shape of x_ref (input 0) has 1 dimension, but the array has 0.", array="a scalar float32"
)
def block_for_a_scalar():
    pl.pallas_call(copy, f32, grid=2, in_specs=[blocks], out_specs=blocks, interpret=True)(3.0)  # here


@mistake(ValueError, "The first argument of BlockSpec is the block shape, but it got a function.")
def block_spec_arguments_swapped():
    pl.BlockSpec(lambda i: (i,), (4,))  # here


@mistake(
    ValueError,
    "The block shape of a BlockSpec is a tuple with one entry for each dimension of the array, not 8 (int).",
    fix="pl.BlockSpec((8, 128), index_map); a block of one dimension is (128,)",
)
def block_shape_of_an_int():
    pl.BlockSpec(8, lambda i: (i,))  # here


@mistake(ValueError, "The index map of a BlockSpec is a function of the grid indices, not (0,) (tuple).")
def index_map_of_a_tuple():
    pl.BlockSpec((4,), (0,))  # here


@mistake(ValueError, "The pipeline mode of a BlockSpec is a pl.Buffered or None, not VMEM (MemorySpace).")
def memory_space_by_position():
    pl.BlockSpec((4,), lambda i: (i,), pltpu.VMEM)  # here


# --- index maps -----------------------------------------------------------------------------------------------------
MAP = "The index map of x_ref (input 0) "
INTEGER = " for dimension 0; it must be an integer scalar."


@mistake(TypeError, MAP + "takes 1 parameter (i), but it gets 2 grid indices.", grid="(2, 1)")
def index_map_with_too_few_parameters():
    call(lambda i: (i,), grid=(2, 1))  # here


@mistake(TypeError, MAP + "takes 2 parameters (i, j), but it gets 1 grid index.", grid="(2,)")
def index_map_with_too_many_parameters():
    call(lambda i, j: (i,))  # here


@mistake(TypeError, MAP + "takes 1 parameter (i), but it gets 0 grid indices: the call has no grid.", grid="()")
def index_map_without_a_grid():
    call(lambda i: (i,), grid=())  # here


@mistake(TypeError, MAP + "takes 1 parameter (i), but it gets 1 grid index and 1 scalar-prefetch Ref.")
def index_map_without_the_prefetch_ref():
    forgetful = spec(lambda i: (i,))  # here
    grid_spec = pltpu.PrefetchScalarGridSpec(1, grid=(2,), in_specs=[forgetful], out_specs=spec(lambda i, s: (i,)))
    pl.pallas_call(lambda s_ref, x_ref, o_ref: None, f32, grid_spec=grid_spec, interpret=True)(jnp.arange(2), x)


@mistake(ValueError, MAP + "returns 2 values, but the block has 1 dimension.", block_shape="(4,)")
def index_map_with_too_many_results():
    call(lambda i: (i, 0))  # here


@mistake(ValueError, MAP + "returns 1 value, but the block has 2 dimensions.", block_shape="(None, 4)")
def index_map_with_too_few_results():
    call(lambda i: i, (None, 4), array=matrix)  # here


@mistake(ValueError, MAP + "returns nothing.", fix="return a tuple of block indices: return (i, j)")
def index_map_without_return():
    def index_map(i):  # here
        (i,)

    call(index_map)


@mistake(ValueError, MAP + "returns a scalar float32" + INTEGER)
def index_map_with_a_float():
    call(lambda i: (i / 2,))  # here


@mistake(ValueError, MAP + "returns a scalar bool" + INTEGER)
def index_map_with_a_bool():
    call(lambda i: (i > 0,))  # here


@mistake(ValueError, MAP + "returns 'i' (str)" + INTEGER)
def index_map_with_a_string():
    call(lambda i: ("i",))  # here


@mistake(ValueError, MAP + "returns int32[2]" + INTEGER)
def index_map_with_a_vector():
    call(lambda i: (jnp.arange(2) * i,))  # here


@mistake(ValueError, MAP + "returns 4294967296 for dimension 0, which is not a 32-bit integer.")
def index_map_with_a_huge_number():
    call(lambda i: (2**32,))  # here


@mistake(ValueError, MAP + "returns a slice for dimension 0, which is Blocked(block_size=4).")
def index_map_with_a_slice_for_a_block_number():
    call(lambda i: (pl.ds(i * 4, 4),))  # here


@mistake(ValueError, MAP + "returns a number for dimension 0, which is BoundedSlice(4).")
def index_map_with_a_block_number_for_a_slice():
    call(lambda i: (i,), (pl.BoundedSlice(4),))  # here


@mistake(ValueError, MAP + "captures values [i32[2]] that are not its parameters.")
def index_map_with_a_captured_array():
    table = jnp.array([1, 0])
    call(lambda i: (table[i],))  # here


@mistake(ValueError, MAP + "captures values [i32[]] that are not its parameters.")
def index_map_with_a_captured_tracer():
    jax.jit(lambda first: call(lambda i: (first + i,)))(1)  # here


@mistake(ValueError, MAP + "captures values [i32[]] that are not its parameters.")
def index_map_that_returns_a_captured_tracer():
    jax.jit(lambda first: call(lambda i: (first,)))(1)  # here


@mistake(ValueError, MAP + "has side effects: it must only compute indices.")
def index_map_that_prints():
    def index_map(i):  # here
        jax.debug.print("{}", i)
        return (i,)

    call(index_map)


@mistake(ValueError, "The index map of x_ref (input 0) has side effects: it must only compute indices.")
def index_map_that_writes():
    def index_map(i, s_ref):  # here
        s_ref[i] = 0
        return (i,)

    grid_spec = pltpu.PrefetchScalarGridSpec(1, grid=(2,), in_specs=[spec(index_map)], out_specs=spec(lambda i, s: i))
    pl.pallas_call(lambda s_ref, x_ref, o_ref: None, f32, grid_spec=grid_spec, interpret=True)(jnp.arange(2), x)


@mistake(ValueError, MAP + "returns the Ref s_ref (scalar-prefetch operand 0)" + INTEGER)
def index_map_that_returns_a_ref():
    in_spec = spec(lambda i, s: (s,))  # here
    grid_spec = pltpu.PrefetchScalarGridSpec(1, grid=(2,), in_specs=[in_spec], out_specs=spec(lambda i, s: i))
    pl.pallas_call(lambda s_ref, x_ref, o_ref: None, f32, grid_spec=grid_spec, interpret=True)(jnp.arange(2), x)


@mistake(
    jax.errors.TracerBoolConversionError,
    "Attempted boolean conversion of traced array with shape bool[].",
    noted=True,
    fix="compute with the grid indices: jnp.where for a choice, // and % for arithmetic",
)
def index_map_with_a_python_if():
    call(lambda i: (0 if i > 0 else 1,))  # here


@mistake(
    ValueError,
    "pl.program_id can only be used inside a kernel; it was called in the index map of x_ref (input 0).",
)
def program_id_in_an_index_map():
    call(lambda i: (pl.program_id(0),))  # here


@mistake(
    ValueError,
    "pl.num_programs can only be used inside a kernel; it was called in the index map of x_ref (input 0).",
)
def num_programs_in_an_index_map():
    call(lambda i: (pl.num_programs(0) - 1 - i,))  # here


# --- spec trees -----------------------------------------------------------------------------------------------------
UNLIKE = "in_specs does not match the operands: "


@mistake(ValueError, UNLIKE + "in_specs has 1 entry, but the call has 2 operands.")
def too_few_in_specs():
    pl.pallas_call(lambda a, b, o: None, f32, in_specs=[pl.BlockSpec()], interpret=True)(x, x)  # here


@mistake(ValueError, UNLIKE + "in_specs has 2 entries, but the call has 1 operand.")
def too_many_in_specs():
    pl.pallas_call(copy, f32, in_specs=[pl.BlockSpec(), pl.BlockSpec()], interpret=True)(x)  # here


@mistake(ValueError, UNLIKE + "in_specs[0] has the keys 'a', 'c', but the operands[0] has the keys 'a', 'b'.")
def in_specs_with_other_keys():
    specs = [{"a": pl.BlockSpec(), "c": pl.BlockSpec()}]
    pl.pallas_call(copy, f32, in_specs=specs, interpret=True)({"a": x, "b": x})  # here


@mistake(ValueError, UNLIKE + "in_specs[0] has 2 entries, but the operands[0] is one array.")
def in_specs_deeper_than_the_operands():
    pl.pallas_call(copy, f32, in_specs=[(pl.BlockSpec(), pl.BlockSpec())], interpret=True)(x)  # here


@mistake(ValueError, UNLIKE + "in_specs[0] is the class BlockSpec, not a BlockSpec.")
def in_specs_with_a_class():
    pl.pallas_call(copy, f32, in_specs=[pl.BlockSpec], interpret=True)(x)  # here


@mistake(ValueError, "out_specs does not match out_shape: out_specs has 1 entry, but out_shape has 2 entries.")
def too_few_out_specs():
    pl.pallas_call(lambda x, a, b: None, (f32, f32), out_specs=[pl.BlockSpec()], interpret=True)(x)  # here


@mistake(ValueError, "out_specs does not match out_shape: out_specs has 1 entry, but out_shape is one array.")
def a_list_of_out_specs_for_one_output():
    pl.pallas_call(copy, f32, out_specs=[pl.BlockSpec()], interpret=True)(x)  # here


# --- outputs, operands, scratch -------------------------------------------------------------------------------------
@mistake(TypeError, "Output 0 of out_shape is 8 (int); it must have a shape and a dtype.")
def out_shape_of_a_tuple():
    pl.pallas_call(copy, (8,))  # here


@mistake(TypeError, "Output 1 of out_shape is 'f32' (str); it must have a shape and a dtype.")
def out_shape_with_a_string():
    pl.pallas_call(copy, [f32, "f32"])  # here


@mistake(
    ValueError,
    "The dtype of output 0 of out_shape is float64, but 64-bit types are off in JAX.",
    fix="ask for float32, or switch them on: `with jax.enable_x64(True):`",
)
def float64_without_x64():
    pl.pallas_call(copy, jax.ShapeDtypeStruct((8,), jnp.float64))  # here


@mistake(ValueError, "The dtype of a vmem buffer is int64, but 64-bit types are off in JAX.")
def int64_scratch_without_x64():
    pltpu.VMEM((8,), jnp.int64)  # here


@mistake(TypeError, "Operand 0 of copy is 'abc' (str); it must be an array.")
def operand_of_a_string():
    pl.pallas_call(copy, f32, interpret=True)("abc")  # here


@mistake(TypeError, "Operand 1 of copy is the class object; it must be an array.")
def operand_of_a_class():
    pl.pallas_call(copy, f32, interpret=True)(x, object)  # here


@mistake(TypeError, "Operand 0 of copy is a Ref, the Ref; it must be an array.")
def operand_of_a_ref():
    pl.pallas_call(copy, f32, interpret=True)(jax.new_ref(x))  # here


@mistake(TypeError, "The kernel call copy takes operands by position, not by name (x_ref).")
def operand_by_name():
    pl.pallas_call(copy, f32, interpret=True)(x_ref=x)  # here


@mistake(ValueError, "The grid_spec of copy asks for 2 scalar-prefetch operands, but the call has 1 operand.")
def too_few_prefetch_operands():
    pl.pallas_call(copy, f32, grid_spec=pltpu.PrefetchScalarGridSpec(2), interpret=True)(x)  # here


@mistake(TypeError, "scratch_shapes of copy is one buffer type; it must be a tuple or a dict of buffer types.")
def scratch_shapes_without_a_list():
    pl.pallas_call(copy, f32, scratch_shapes=pltpu.VMEM((8,), jnp.float32), interpret=True)(x)  # here


@mistake(TypeError, "s_ref (scratch 0) of kernel is VMEM (MemorySpace), which is not a buffer type.")
def scratch_without_a_shape():
    def kernel(x_ref, o_ref, s_ref):
        pass

    pl.pallas_call(kernel, f32, scratch_shapes=[pltpu.VMEM], interpret=True)(x)  # here


@mistake(TypeError, "s_ref (scratch 0) of kernel is 8 (int), which is not a buffer type.")
def scratch_of_a_number():
    def kernel(x_ref, o_ref, *, s_ref):
        pass

    pl.pallas_call(kernel, f32, scratch_shapes={"s_ref": 8}, interpret=True)(x)  # here


@mistake(TypeError, "The shape of a vmem buffer must be integers, not (8.0,) (tuple).")
def scratch_of_a_float():
    pltpu.VMEM((8.0,), jnp.float32)  # here


@mistake(ValueError, "The shape of a smem buffer cannot be negative, but it is (-8,).")
def scratch_of_a_negative_size():
    pltpu.SMEM((-8,), jnp.float32)  # here


@mistake(TypeError, "The dtype of a vmem buffer is 'floot' (str), which is not one.")
def scratch_of_an_unknown_dtype():
    pltpu.VMEM((8,), "floot")  # here


# --- aliases --------------------------------------------------------------------------------------------------------
PAIRS = "input_output_aliases pairs operand 0, {}, with output 0, float32[8]: they must have the same shape and dtype."


@mistake(ValueError, PAIRS.format("float32[4]"), operand="x_ref (input 0)", output="o_ref (output 0)")
def alias_with_another_shape():
    pl.pallas_call(copy, f32, input_output_aliases={0: 0}, interpret=True)(x[:4])  # here


@mistake(ValueError, PAIRS.format("int32[8]"))
def alias_with_another_dtype():
    pl.pallas_call(copy, f32, input_output_aliases={0: 0}, interpret=True)(x.astype(int))  # here


@mistake(ValueError, "input_output_aliases names operand 1, but the call has 1 operand.", aliases="{1: 0}")
def alias_of_an_operand_that_is_not_there():
    pl.pallas_call(copy, f32, input_output_aliases={1: 0}, interpret=True)(x)  # here


@mistake(ValueError, "input_output_aliases names operand -1, but the call has 1 operand.")
def alias_of_a_negative_operand():
    pl.pallas_call(copy, f32, input_output_aliases={-1: 0}, interpret=True)(x)  # here


@mistake(ValueError, "input_output_aliases names output 2, but the call has 1 output.")
def alias_of_an_output_that_is_not_there():
    pl.pallas_call(copy, f32, input_output_aliases={0: 2}, interpret=True)(x)  # here


@mistake(ValueError, "input_output_aliases gives output 0 to more than one operand.", aliases="{0: 0, 1: 0}")
def alias_given_twice():
    pl.pallas_call(lambda a, b, o: None, f32, input_output_aliases={0: 0, 1: 0})  # here


@mistake(TypeError, "input_output_aliases maps operand numbers to output numbers; it cannot be [(0, 0)] (list).")
def aliases_of_a_list():
    pl.pallas_call(copy, f32, input_output_aliases=[(0, 0)])  # here


@mistake(TypeError, "input_output_aliases maps operand numbers to output numbers, not {'x': 0}.")
def aliases_by_name():
    pl.pallas_call(copy, f32, input_output_aliases={"x": 0})  # here


@mistake(
    ValueError,
    "input_output_aliases names operand 0, s_ref (scalar-prefetch operand 0), which cannot become an output.",
)
def alias_of_a_prefetch_operand():
    def kernel(s_ref, x_ref, o_ref):
        pass

    grid_spec = pltpu.PrefetchScalarGridSpec(1)
    pl.pallas_call(kernel, f32, grid_spec=grid_spec, input_output_aliases={0: 0}, interpret=True)(x, x)  # here


# --- the other arguments --------------------------------------------------------------------------------------------
@mistake(TypeError, "pallas_call() got an unexpected keyword argument 'in_spec'. Did you mean 'in_specs'?")
def misspelt_keyword():
    pl.pallas_call(copy, f32, in_spec=[blocks])  # here


@mistake(TypeError, "pallas_call() got an unexpected keyword argument 'num_warps'.")
def unknown_keyword():
    pl.pallas_call(copy, f32, num_warps=4)  # here


@mistake(TypeError, "The kernel must be a function of Refs, not None.")
def kernel_of_none():
    pl.pallas_call(None, f32)  # here


@mistake(TypeError, "The kernel must be a function of Refs, not float32[8].")
def kernel_of_an_array():
    pl.pallas_call(x, f32)  # here


@mistake(
    TypeError,
    "interpret cannot be 'yes' (str).",
    fix="interpret=True, pl.EagerParams(), pltpu.InterpretParams(), plgpu.InterpretGPUParams() or "
    "plgpu.EmulateParams()",
)
def interpret_of_a_string():
    pl.pallas_call(copy, f32, interpret="yes")  # here


@mistake(TypeError, "interpret cannot be the class EagerParams.")
def interpret_of_a_class():
    pl.pallas_call(copy, f32, interpret=pl.EagerParams)  # here


@mistake(TypeError, "compiler_params cannot be {'num_warps': 4} (dict).")
def compiler_params_of_a_dict():
    pl.pallas_call(copy, f32, compiler_params={"num_warps": 4})  # here


@mistake(TypeError, "cost_estimate cannot be 100 (int).")
def cost_estimate_of_a_number():
    pl.pallas_call(copy, f32, cost_estimate=100)  # here


@mistake(ValueError, "flops of pl.CostEstimate must be an integer, not 1.5 (float).")
def cost_of_a_float():
    pl.CostEstimate(flops=1.5, transcendentals=0, bytes_accessed=0)  # here


@mistake(ValueError, "bytes_accessed of pl.CostEstimate must not be negative, but it is -1.")
def cost_negative():
    pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=-1)  # here


@mistake(TypeError, "metadata must map strings to strings, not {'layer': 3} (dict).")
def metadata_of_numbers():
    pl.pallas_call(copy, f32, metadata={"layer": 3})  # here


@mistake(TypeError, "name cannot be 3 (int).")
def name_of_a_number():
    pl.pallas_call(copy, f32, name=3)  # here


# --- parameters of the kernel ---------------------------------------------------------------------------------------
FIX = (
    "  fix: a kernel has one parameter for each operand, then each output, then each scratch buffer; bind other "
    "parameters with functools.partial"
)


def parameters(kernel, *operands, **options):
    """The lines of the message, without the place and the fix, which are checked here."""
    with pytest.raises(TypeError) as caught:
        pl.pallas_call(kernel, f32, interpret=True, **options)(*operands)
    first, place, *facts, fix = str(caught.value).splitlines()
    code = kernel.__code__
    assert place.startswith("  at: ") and place.endswith(f"test_errors.py:{code.co_firstlineno} ({code.co_name})")
    assert fix == FIX
    return [first, *facts]


def test_too_few_parameters_says_which_ref_each_would_be():
    def add(x_ref):
        pass

    assert parameters(add, x) == [
        "The kernel add takes 1 parameter (x_ref), but this call passes 2 Refs.",
        "  parameters and Refs:",
        "    x_ref <- input float32[8]",
        "    no parameter <- output float32[8]",
    ]


def test_too_many_parameters_says_which_ref_each_would_be():
    def add(x_ref, y_ref, o_ref):
        pass

    assert parameters(add, x) == [
        "The kernel add takes 3 parameters (x_ref, y_ref, o_ref), but this call passes 2 Refs.",
        "  parameters and Refs:",
        "    x_ref <- input float32[8]",
        "    y_ref <- output float32[8]",
        "    o_ref <- no Ref",
    ]


def test_what_partial_binds_by_keyword_needs_no_ref():
    def add(x_ref, y_ref, o_ref, *, scale, shift=0):
        pass

    with pytest.raises(TypeError) as caught:
        pl.pallas_call(functools.partial(add, scale=2), f32)(x)
    first, _, *facts, _ = str(caught.value).splitlines()
    assert first == (
        "The kernel add takes 3 parameters (x_ref, y_ref, o_ref, *, scale=2, shift=0), but this call passes 2 Refs."
    )
    assert facts == [
        "  parameters and Refs:",
        "    x_ref <- input float32[8]",
        "    y_ref <- output float32[8]",
        "    o_ref <- no Ref",
    ]


def test_a_scratch_buffer_without_a_parameter():
    def add(x_ref, o_ref):
        pass

    lines = parameters(add, {"a": x}, scratch_shapes=[pltpu.VMEM((2, 8), jnp.float32)])
    assert lines == [
        "The kernel add takes 2 parameters (x_ref, o_ref), but this call passes 3 Refs.",
        "  parameters and Refs:",
        "    x_ref <- input a dict of arrays",
        "    o_ref <- output float32[8]",
        "    no parameter <- scratch float32[2, 8]",
    ]


def test_scratch_by_another_keyword():
    def add(x_ref, o_ref, *, acc_ref):
        pass

    lines = parameters(add, x, scratch_shapes={"tmp_ref": pltpu.VMEM((8,), jnp.float32)})
    assert lines == [
        "The kernel add takes 2 parameters (x_ref, o_ref, *, acc_ref), but this call passes 2 Refs and, by keyword, "
        "tmp_ref.",
        "  parameters and Refs:",
        "    x_ref <- input float32[8]",
        "    o_ref <- output float32[8]",
        "    acc_ref <- no Ref",
        "    no tmp_ref <- scratch float32[8]",
    ]


def test_a_keyword_parameter_that_nothing_binds():
    def add(x_ref, o_ref, *, scale):
        pass

    first, *_, last = parameters(add, x)
    assert first == "The kernel add takes 2 parameters (x_ref, o_ref, *, scale), but this call passes 2 Refs."
    assert last == "    scale <- no Ref"


def test_scalar_prefetch_comes_first():
    def add(x_ref, o_ref):
        pass

    lines = parameters(add, jnp.arange(2), x, grid_spec=pltpu.PrefetchScalarGridSpec(1))
    assert lines[2] == "    x_ref <- scalar-prefetch operand int32[2]"


# --- the reference's own words --------------------------------------------------------------------------------------
WAYS_OUT = ("interpret=True", "interpret=pl.EagerParams()", "palladion.config.cpu = 'interpret'")


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_on_the_cpu_without_interpret(transform):
    with pytest.raises(ValueError) as caught:
        transform(pl.pallas_call(copy, f32 if transform is not jax.vmap else jax.ShapeDtypeStruct((), jnp.float32)))(x)
    lines = str(caught.value).splitlines()
    assert lines[0] == "Only interpret mode is supported on CPU backend."
    for way in WAYS_OUT:
        assert any(way in line for line in lines[1:]), way


@pytest.mark.parametrize("name", ["load", "store", "InterpretParams", "atomic_add"])
def test_names_of_older_versions_are_absent(name):
    with pytest.raises(AttributeError, match=f"module 'palladion' has no attribute '{name}'"):
        getattr(pl, name)


def test_a_third_argument_by_position():
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        pl.pallas_call(copy, f32, (2,))


def test_machines_that_are_not_built_say_so():
    traced = jax.jit(pl.pallas_call(copy, f32)).trace(x)
    with pytest.raises(pl.TargetNotBuilt, match="no compiler for rocm yet"):
        traced.lower(lowering_platforms=("rocm",))
    with pytest.raises(pl.TargetNotBuilt, match=r"which compiler this kernel is for; .*plgpu.CompilerParams\(\)"):
        traced.lower(lowering_platforms=("cuda",))


# --- silent by specification: a warning -----------------------------------------------------------------------------
def test_a_block_out_of_range_is_a_warning():
    """Tutorial 2.2: the index is clamped. The warning names operand, block, range, grid point and line."""
    y = jnp.arange(64, dtype=jnp.float32)
    offsets = pl.BlockSpec((16,), lambda i: (i * 16,))
    out = pl.BlockSpec((16,), lambda i: (i,))
    doubled = pl.pallas_call(copy, y, grid=(4,), in_specs=[offsets], out_specs=out, interpret=True)
    with pytest.warns(pl.PalladionWarning) as caught:
        result = doubled(y)
    np.testing.assert_array_equal(result, np.concatenate([np.arange(16), *[np.arange(48, 64)] * 3]))
    assert [w.filename for w in caught] == [__file__]
    lines = str(caught[0].message).splitlines()
    assert lines[0] == (
        "The index map of x_ref (input 0) asks for block 16 in dimension 0 at grid point (1,), outside the valid range "
        "0..3; it is clamped."
    )
    assert lines[1].startswith("  at: ") and "test_errors.py:" in lines[1]
    assert lines[2].startswith("  fix: return block numbers, not element offsets")


def test_a_call_without_a_mistake_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(lambda i: (i,))


# --- not mistakes ---------------------------------------------------------------------------------------------------
def test_0d_arrays_work():
    def kernel(x_ref, n_ref, o_ref):
        assert x_ref.shape == () and o_ref.ndim == 0
        o_ref[...] = x_ref[...] * 2 + n_ref[()]

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    assert pl.pallas_call(kernel, scalar, interpret=True)(jnp.float32(3), 1.0) == 7
    spec = pl.BlockSpec((), lambda i: ())
    call = pl.pallas_call(kernel, scalar, grid=3, in_specs=[spec, spec], out_specs=spec, interpret=True)
    assert jax.jit(call)(jnp.float32(3), 1.0) == 7


def test_empty_arrays_work():
    def kernel(x_ref, o_ref):
        assert x_ref.shape == (0, 4)
        o_ref[...] = x_ref[...] + 1

    empty = jax.ShapeDtypeStruct((0, 4), jnp.float32)
    assert pl.pallas_call(kernel, empty, interpret=True)(jnp.zeros((0, 4))).shape == (0, 4)
    assert pl.pallas_call(kernel, empty, grid=2, interpret=True)(jnp.zeros((0, 4))).shape == (0, 4)


def test_none_is_an_empty_pytree():
    """As in JAX: an operand or output that is None gives the kernel None and takes part in nothing else."""

    def kernel(x_ref, mask_ref, o_ref, extra_ref):
        assert mask_ref is None and extra_ref is None
        o_ref[...] = x_ref[...] * 2

    result, extra = pl.pallas_call(kernel, (f32, None), in_specs=[pl.BlockSpec(), None], interpret=True)(x, None)
    np.testing.assert_array_equal(result, 2 * np.arange(8))
    assert extra is None


def test_float64_with_x64():
    with jax.enable_x64(True):
        y = np.linspace(0, 1, 8)
        out = jax.ShapeDtypeStruct((8,), jnp.float64)
        result = pl.pallas_call(copy, out, scratch_shapes=(), interpret=True)(y)
        assert result.dtype == jnp.float64
        np.testing.assert_array_equal(result, y)
        pltpu.VMEM((8,), jnp.float64)


def test_sizes_may_be_numpy_integers():
    spec = pl.BlockSpec((np.int64(4),), lambda i: (i,))
    call = pl.pallas_call(copy, f32, grid=np.int32(2), in_specs=[spec], out_specs=spec, interpret=True)
    np.testing.assert_array_equal(call(x), x)


@pytest.mark.parametrize(
    "kernel",
    [
        functools.partial(lambda scale, x_ref, o_ref: copy(x_ref, o_ref), 2.0),
        functools.partial(lambda x_ref, o_ref, *, scale: copy(x_ref, o_ref), scale=2.0),
        lambda *refs: copy(*refs),
        lambda x_ref, o_ref, scale=1.0: copy(x_ref, o_ref),
        lambda x_ref, *rest: copy(x_ref, *rest),
        jax.jit(copy),
        jax.named_call(copy, name="named"),
    ],
)
def test_kernels_of_every_sort(kernel):
    np.testing.assert_array_equal(pl.pallas_call(kernel, f32, interpret=True)(x), x)


class Doubler:
    """A kernel that is an object, and one that is its method."""

    def __call__(self, x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def method(self, x_ref, o_ref):
        self(x_ref, o_ref)

    @classmethod
    def of_class(cls, x_ref, o_ref):
        cls()(x_ref, o_ref)

    @staticmethod
    def static(x_ref, o_ref):
        Doubler()(x_ref, o_ref)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (Doubler(), "Doubler"),
        (Doubler().method, "method"),
        (Doubler.of_class, "of_class"),
        (Doubler.static, "static"),
        (functools.partial(Doubler()), "Doubler"),
        (functools.partial(functools.partial(Doubler().method)), "method"),
    ],
)
def test_objects_and_methods_as_kernels(kernel, name):
    call = pl.pallas_call(kernel, f32, interpret=True)
    np.testing.assert_array_equal(call(x), 2 * x)
    assert f"name={name}" in str(jax.make_jaxpr(call)(x))
    with pytest.raises(TypeError, match=f"^The kernel {name} takes 2 parameters"):
        call(x, x)


# --- environment variables ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PALLADION_CPU", "foo", "ValueError: The environment variable PALLADION_CPU cannot be 'foo'.\n  fix: "),
        ("PALLADION_CPU", "native", "native False"),
        ("PALLADION_DEBUG_CHECKS", "2", "ValueError: The environment variable PALLADION_DEBUG_CHECKS cannot be '2'."),
        ("PALLADION_DEBUG_CHECKS", "True", "refuse True"),
    ],
)
def test_a_value_of_an_environment_variable(variable, value, expected):
    source = "from palladion import config; print(config.cpu, config.debug_checks)"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in done.stdout + done.stderr and (done.returncode == 0) == ("ValueError" not in expected)
