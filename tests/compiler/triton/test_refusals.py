"""What the Triton compiler refuses, in the user's words and at the user's line. Needs no triton package."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import palladion as pl
from compiler.triton.kernels import sds
from palladion import tpu as pltpu
from palladion import triton as pltriton
from palladion.compiler.entry import _calls_in
from palladion.compiler.triton.module import lower_call
from palladion.errors import UnsupportedPrimitive


def refused(kind, call, *shapes, sm=90):
    """The message of the refusal; it names a line of this file."""
    (found,) = _calls_in(jax.make_jaxpr(call)(*shapes).jaxpr)
    with pytest.raises(kind) as error:
        lower_call(found.params, sm)
    assert "test_refusals.py:" in str(error.value), error.value
    return str(error.value)


def test_an_operand_whose_block_is_no_power_of_two_is_named():
    def kernel(x_ref, scale_ref, o_ref):
        o_ref[...] = x_ref[...] * scale_ref[0]

    spec = pl.BlockSpec((8, 100), lambda i: (i, 0))
    one = pl.BlockSpec((1,), lambda i: (0,))
    call = pl.pallas_call(kernel, sds((16, 100)), grid=(2,), in_specs=[spec, one], out_specs=spec)
    message = refused(ValueError, call, sds((16, 100)), sds((1,)))
    assert message.startswith(
        "In Triton every size of a block is a power of two; x_ref (input 0), a block of shape (8, 100)"
    )
    assert "operand: x_ref (input 0), block (8, 100): make it (8, 128)" in message
    assert "nor is: o_ref (output 0), block (8, 100): make it (8, 128)" in message, (
        "all of them, not one after the other"
    )


def test_its_parts_may_still_be_used():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[2, pl.ds(3, 64)] + x_ref[5, 99]

    call = pl.pallas_call(kernel, sds((64,)))
    (found,) = _calls_in(jax.make_jaxpr(call)(sds((7, 100))).jaxpr)
    assert lower_call(found.params, 90).plain.count("tt.load") == 2


def test_a_value_of_another_size_names_its_operation():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.full(16, x_ref[0:16][:12].sum())

    message = refused(ValueError, pl.pallas_call(kernel, sds((16,))), sds((16,)))
    assert message.startswith("`slice` gives a block of shape (12,); in Triton every size is a power of two.")


def test_blocks_are_not_larger_than_triton_holds():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    message = refused(ValueError, pl.pallas_call(kernel, sds((2048, 1024))), sds((2048, 1024)))
    assert "`get` gives 2,097,152 elements; a block of Triton's has at most 1,048,576." in message


def test_scratch_that_no_program_fills():
    def kernel(x_ref, o_ref, acc_ref):
        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]

    spec = pl.BlockSpec((16,), lambda i: (i,))
    call = pl.pallas_call(
        kernel, sds((64,)), grid=(4,), in_specs=[spec], out_specs=spec, scratch_shapes=[pltpu.VMEM((16,), jnp.float32)]
    )
    message = refused(ValueError, call, sds((64,)))
    assert message.startswith("acc_ref (scratch 0) is read before the program has stored anything in it.")
    assert "store in it first, under pl.when(pl.program_id(…) == 0)" in message


def test_parts_of_registers_without_order():
    def kernel(x_ref, o_ref, t_ref):
        t_ref[...] = x_ref[...]
        t_ref[::2] = x_ref[0:8]
        o_ref[...] = t_ref[...]

    call = pl.pallas_call(kernel, sds((16,)), scratch_shapes=[pltpu.VMEM((16,), jnp.float32)])
    message = refused(NotImplementedError, call, sds((16,)))
    assert message.startswith("t_ref (scratch 0) lives in registers, where parts without gaps are read and written")


def test_atomic_updates_of_one_output_leave_the_grid_parallel():
    def kernel(x_ref, zero_ref, o_ref):
        pltriton.atomic_add(o_ref, slice(None), x_ref[...].sum(0))

    call = pl.pallas_call(
        kernel, sds((16,)), grid=(4,),
        in_specs=[pl.BlockSpec((16, 16), lambda i: (i, 0)), pl.BlockSpec((16,), lambda i: (0,))],
        out_specs=pl.BlockSpec((16,), lambda i: (0,)), input_output_aliases={1: 0},
    )  # fmt: skip
    (found,) = _calls_in(jax.make_jaxpr(call)(sds((64, 16)), sds((16,))).jaxpr)
    assert "tt.atomic_rmw fadd, acq_rel, gpu" in lower_call(found.params, 90).plain


def test_programs_that_store_in_their_own_part_of_a_whole_output_are_fine():
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[pl.ds(i * 16, 16)] = x_ref[pl.ds(i * 16, 16)] + o_ref[pl.ds(i * 16, 16)]

    call = pl.pallas_call(kernel, sds((64,)), grid=(4,))
    (found,) = _calls_in(jax.make_jaxpr(call)(sds((64,))).jaxpr)
    assert lower_call(found.params, 90).plain.count("tt.store") == 1


def test_operations_without_a_rule():
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.conv(x_ref[...][None, None], jnp.ones((1, 1, 1)), (1,), "VALID")[0, 0]

    message = refused(UnsupportedPrimitive, pl.pallas_call(kernel, sds((16,))), sds((16,)))
    assert message.startswith(
        "The operation `conv_general_dilated` is not supported in a kernel on the Triton compiler."
    )
    assert "supported by:" in message


def test_semaphores_are_for_other_machines():
    def kernel(x_ref, o_ref, sem):
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(kernel, sds((16,)), scratch_shapes=[pltpu.SemaphoreType.DMA])
    (found,) = _calls_in(jax.make_jaxpr(call)(sds((16,))).jaxpr)
    with pytest.raises(NotImplementedError, match="a Triton program has no such thing"):
        lower_call(found.params, 90)


@pytest.mark.parametrize("dtype", ["int4", "complex64"])
def test_dtypes_that_triton_does_not_have(dtype):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    (found,) = _calls_in(jax.make_jaxpr(pl.pallas_call(kernel, sds((16,), dtype)))(sds((16,), dtype)).jaxpr)
    with pytest.raises(TypeError, match=rf"x_ref \(input 0\) holds {dtype}, which Triton does not have"):
        lower_call(found.params, 90)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        (dict(cache_modifier=".cx"), "There is no cache modifier '.cx'."),
        (dict(eviction_policy="soon"), "There is no eviction policy 'soon'."),
        (dict(cache_modifier=".ca", eviction_policy="evict_first"), "PTX does not combine the cache modifier '.ca'"),
    ],
)
def test_hints_that_ptx_does_not_take(hints, message):
    def kernel(x_ref, o_ref):
        o_ref[...] = pltriton.load(x_ref, **hints)

    assert refused(ValueError, pl.pallas_call(kernel, sds((16,))), sds((16,))).startswith(message)


def test_narrow_atomics():
    def kernel(x_ref, o_ref):
        pltriton.atomic_add(o_ref, slice(None), x_ref[...])

    message = refused(NotImplementedError, pl.pallas_call(kernel, sds((16,), "int8")), sds((16,), "int8"))
    assert "PTX has no atomic add of 8 bits" in message


def test_a_product_without_an_instruction_that_is_too_large():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] @ y_ref[...]

    call = pl.pallas_call(kernel, sds((128, 128), "int32"))
    message = refused(ValueError, call, sds((128, 128), "int32"), sds((128, 128), "int32"))
    assert "has no instruction and is too large to be multiplied out" in message
