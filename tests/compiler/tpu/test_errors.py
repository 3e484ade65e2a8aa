"""What the TPU compiler refuses: in words of the user, at the user's line, with the way out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import palladion as pl
from compiler.tpu.calls import lowered, sds
from palladion import tpu as pltpu
from palladion.errors import UnsupportedPrimitive

SMEM, HBM = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
TUTORIAL = "The Pallas TPU lowering currently requires that the last two dimensions of your block shape are"


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def blocked(block, shape, dtype=jnp.float32, **more):
    spec = pl.BlockSpec(block, lambda *ids: ids, **more)
    grid = tuple(pl.cdiv(n, b or 1) for n, b in zip(shape, block))
    call = pl.pallas_call(double, sds(*shape, dtype=dtype), grid=grid, in_specs=[spec], out_specs=spec)
    return lambda: lowered(call, sds(*shape, dtype=dtype))


# --- blocks (tutorial 6.1) --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("block", "shape"),
    [
        ((8, 128), (256, 512)),
        ((64, 128), (256, 512)),
        ((256, 512), (256, 512)),
        ((4, 100), (4, 100)),  # both as the array
        ((4, 128), (4, 512)),  # the first one
        ((8, 100), (16, 100)),  # the second one
        ((2, 8, 128), (4, 64, 256)),  # leading dimensions are free
        ((None, 8, 128), (4, 64, 256)),
        ((300,), (300,)),
        ((1024,), (5000,)),
        ((3072,), (6144,)),
        ((128,), (1000,)),
        ((256,), (1000,)),
    ],
)
def test_blocks_that_a_tpu_takes(block, shape):
    assert "tpu_custom_call" in blocked(block, shape)()


@pytest.mark.parametrize("block", [(4, 128), (64, 100), (8, 64)])
def test_blocks_that_are_no_tiles(block):
    with pytest.raises(ValueError) as caught:
        blocked(block, (256, 512))()
    message = str(caught.value)
    assert message.startswith(TUTORIAL)
    assert "operand: x_ref (input 0)" in message and f"block shape: {block}" in message
    assert "test_errors.py" in message and "fix: a block that fits: (" in message


@pytest.mark.parametrize(("n", "dtype"), [(64, jnp.float32), (384, jnp.float32), (128, jnp.bfloat16), (256, jnp.int8)])
def test_blocks_of_one_dimension(n, dtype):
    with pytest.raises(ValueError, match="one dimension is equal to the array's, or a multiple of 1024"):
        blocked((n,), (n * 10,), dtype)()


def test_a_squeezed_row_is_a_block_of_one_row():
    spec = pl.BlockSpec((None, 128), lambda i, j: (i, j))
    call = pl.pallas_call(double, sds(16, 256), grid=(16, 2), in_specs=[spec], out_specs=spec)
    with pytest.raises(ValueError, match=r"(?s)last two dimensions.*None counts as 1"):
        lowered(call, sds(16, 256))


def test_a_part_of_what_is_left_in_place():
    with pytest.raises(
        ValueError, match=r"x_ref \(input 0\) is left in place by memory_space=any, so it has no blocks"
    ):
        blocked((8, 128), (256, 512), memory_space=pl.ANY)()


def test_more_buffers_than_two():
    with pytest.raises(pltpu.LoweringException, match="the TPU compiler's own has one buffer or two"):
        blocked((8, 128), (256, 512), pipeline_mode=pl.Buffered(3))()


# --- operations -------------------------------------------------------------------------------------------------------
def refused(kernel, *, dtype=jnp.float32, specs=None, out=None, n=1, **more):
    """Lower a call of a kernel; the exception, which must name the kernel's file."""
    options = more if specs is None else {"in_specs": specs, **more}
    call = pl.pallas_call(kernel, out or sds(8, 128, dtype=dtype), **options)
    with pytest.raises((pltpu.LoweringException, UnsupportedPrimitive)) as caught:
        lowered(call, *[sds(8, 128, dtype=dtype)] * n)
    return str(caught.value)


def line(kernel, offset=1):
    return f"test_errors.py:{kernel.__code__.co_firstlineno + offset} "


def test_an_operation_without_a_rule():
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.reduce_window(x_ref[...], 0.0, lax.add, (2, 2), (1, 1), "SAME")

    message = refused(kernel)
    assert "The operation `reduce_window_sum` is not supported in a kernel on the TPU compiler." in message
    assert line(kernel) in message and "the reference interpreter" in message


def test_the_line_is_the_users_inside_functions_of_jax():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(jnp.convolve(x_ref[0], x_ref[1], "same").astype(jnp.float16))[None].astype(jnp.float32)

    message = refused(kernel, out=sds(1, 128))
    assert line(kernel) in message


def test_a_dtype_that_tpus_have_not():
    assert "Mosaic takes no float16" in refused(double, dtype=jnp.float16)

    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...].astype(jnp.float16) * 2).astype(jnp.float32)

    message = refused(kernel)
    assert "`convert_element_type` cannot be compiled for TPU: Mosaic takes no float16" in message
    assert line(kernel) in message
    with jax.enable_x64(True):
        assert "TPUs have no float64" in refused(double, dtype=jnp.float64)


def test_values_are_not_read_where_they_cannot_be():
    message = refused(double, specs=[HBM])
    assert "x_ref (input 0) is in memory any" in message and "sync_copy" in message
    message = refused(double, specs=[SMEM])
    assert "x_ref (input 0) is in SMEM, which is read one scalar at a time" in message


def test_index_arrays():
    def kernel(x_ref, o_ref):
        rows = lax.broadcasted_iota(jnp.int32, (8, 1), 0)[:, 0]
        o_ref[rows] = x_ref[...]

    message = refused(kernel)
    assert "index arrays cannot address a Ref on TPU" in message and line(kernel, 2) in message


def test_a_vector_is_not_printed():
    def kernel(x_ref, o_ref):
        pl.debug_print("x = {}", x_ref[...])
        o_ref[...] = x_ref[...]

    message = refused(kernel)
    assert "pl.debug_print prints scalars on TPU" in message and line(kernel) in message


def test_an_axis_that_is_not_there():
    def here(x_ref, o_ref, sems):
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, sems.at[0], sems.at[1], {"x": 1})
        copy.start()
        copy.wait()

    message = refused(here, scratch_shapes=[pltpu.SemaphoreType.DMA((2,))])
    assert "there is no mesh of devices around the call" in message


# --- what the compiler would let pass ---------------------------------------------------------------------------------
def test_a_copy_that_nothing_waits_for():
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    message = refused(kernel, specs=[HBM], scratch_shapes=[pltpu.SemaphoreType.DMA], out_specs=HBM)
    assert "A copy in the kernel kernel signals sem (scratch 0), and nothing waits for it." in message
    assert line(kernel) in message


def test_a_copy_that_is_waited_for_in_a_loop_is_fine():
    def kernel(x_ref, o_ref, sem):
        def body(i, _):
            pltpu.make_async_copy(x_ref, o_ref, sem).start()
            pltpu.make_async_copy(x_ref, o_ref, sem).wait()

        lax.fori_loop(0, 3, body, None)

    call = pl.pallas_call(kernel, sds(8, 128), in_specs=[HBM], out_specs=HBM, scratch_shapes=[pltpu.SemaphoreType.DMA])
    assert "tpu_custom_call" in lowered(call, sds(8, 128))


def test_a_copy_without_a_semaphore():
    def kernel(x_ref, o_ref):
        pltpu.make_async_copy(x_ref, o_ref).start()

    assert "can never be waited for" in refused(kernel, specs=[HBM], out_specs=HBM)


def test_parameters():
    def call(**params):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        given = pltpu.CompilerParams(**params)
        run = pl.pallas_call(double, sds(32, 128), grid=(4,), in_specs=[spec], out_specs=spec, compiler_params=given)
        return lowered(run, sds(32, 128))

    with pytest.raises(ValueError, match="dimension_semantics has 2 entries, but the grid of double has 1 axis"):
        call(dimension_semantics=("parallel", "arbitrary"))
    with pytest.raises(ValueError, match="allow_input_fusion has 3 entries, but double has 1 input"):
        call(allow_input_fusion=[True] * 3)
    with pytest.raises(ValueError, match=r"opt_level=…\) is for SparseCore"):
        call(opt_level="O2")
    assert "tpu_custom_call" in call(dimension_semantics=("parallel",), allow_input_fusion=[True])


def test_the_barrier_semaphore_needs_a_number():
    def kernel(x_ref, o_ref):
        pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)
        o_ref[...] = x_ref[...]

    assert "collective_id" in refused(kernel)
