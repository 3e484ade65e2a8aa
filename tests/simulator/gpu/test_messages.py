"""What messages about GPU kernels name beside the buffer and the lines: the slot, the block, the axes, the sizes.

A user needs them to see the mistake; they were missing when somebody new wrote kernels with the documents alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .calls import finding, numbers, params, quiet

TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
x = numbers(4, 64)


def run(body, *, scratch, threads=None, **options):
    return plgpu.kernel(
        body, out_type=x, scratch_types=scratch, num_threads=threads, thread_name=threads and "wg", interpret=params(),
        **options,
    )(x)  # fmt: skip


def test_a_slot_is_named():
    def body(x_gmem, o_gmem, slots, loaded):
        for i in (0, 1, 1):
            plgpu.copy_gmem_to_smem(x_gmem.at[i], slots.at[i], loaded.at[i])

    scratch = dict(slots=plgpu.SMEM((2, 64), x.dtype), loaded=plgpu.Barrier(num_barriers=2))
    found = finding(lambda: run(body, scratch=scratch), "missing-wait", "slots (scratch 1)[1] is still in use")
    assert "the slot that is meant" in found.hint


def test_another_block_is_named():
    def body(x_gmem, o_gmem, smem):
        @pl.when(lax.axis_index("c") == 0)
        def _():
            o_gmem[...] = plgpu.cluster_ref(smem, {"c": 1})[...]

    call = lambda: run(body, scratch=dict(smem=plgpu.SMEM(x.shape, x.dtype)), cluster=(2,), cluster_names=("c",))
    found = finding(call, "uninitialized-read", "smem (scratch 0) of block c=1")
    assert "ClusterBarrier" in found.hint


def test_threads_that_wait_for_the_same_share_a_sentence():
    def body(x_gmem, o_gmem, barrier):
        plgpu.barrier_wait(barrier)

    call = lambda: run(body, scratch=[plgpu.Barrier(num_arrivals=2)], threads=2)
    found = finding(call, "deadlock", "thread wg=0 of the block and thread wg=1 of the block wait at")
    assert found.message.count("0 of 2 arrivals so far") == 1


def test_semaphores_have_signals_and_barriers_arrivals():
    def body(x_gmem, o_gmem):
        pl.semaphore_wait(pl.get_global(plgpu.SemaphoreType.REGULAR))

    hint = finding(lambda: run(body, scratch=[]), "deadlock").hint
    assert "nobody ever signalled" in hint and "num_arrivals" not in hint


def test_what_takes_the_shared_memory():
    def body(x_gmem, o_gmem, large, small):
        large[0, 0] = 1.0

    scratch = dict(large=plgpu.SMEM((64, 512), x.dtype), small=plgpu.SMEM((64, 480), x.dtype))
    finding(
        lambda: run(body, scratch=scratch),
        "smem-overflow",
        "131,072 for large (scratch 0), 122,880 for small (scratch 1)",
    )


def test_an_unknown_axis():
    def body(x_gmem, o_gmem):
        o_gmem[...] = x_gmem[...] * lax.axis_index("m")

    with pytest.raises(
        NameError, match=r"^Found an unbound axis name: m\.\n  at: .*\n  axes of the kernel: 'n', 'wg'\n"
    ):
        run(body, scratch=[], threads=2, grid=(2,), grid_names=("n",))


def test_functions_in_functions_are_named_plainly():
    def body(x_gmem, o_gmem, smem):
        @pl.when(True)
        def inner():
            o_gmem[...] = smem[...]

    found = finding(lambda: run(body, scratch=[plgpu.SMEM(x.shape, x.dtype)]), "uninitialized-read")
    assert found.where.endswith("(test_functions_in_functions_are_named_plainly.body.inner)")


def test_an_atomic_update_of_what_was_never_written():
    def body(x_gmem, o_gmem):
        plgpu.atomic_add(o_gmem, x_gmem[...])

    finding(lambda: run(body, scratch=[]), "uninitialized-read", "o_gmem (output 0)")


@pytest.mark.parametrize("k", [96, 160, 480])
def test_a_ragged_last_step_of_a_pipeline(k):
    """Whether its steps are known while tracing or not: what lies outside is zeros."""
    a, b = numbers(64, k, dtype=jnp.float16), numbers(k, 64, dtype=jnp.float16)

    def body(a_gmem, b_gmem, o_gmem):
        def step(_, a_smem, b_smem, acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc

        def compute(acc):
            plgpu.emit_pipeline(
                step,
                grid=(-(-k // 64),),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda i: (0, i), transforms=TILES, delay_release=1),
                    plgpu.BlockSpec((64, 64), lambda i: (i, 0), transforms=TILES, delay_release=1),
                ],
                max_concurrent_steps=2,
                init_carry=acc,
            )(a_gmem, b_gmem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 64)))

    out = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    result = quiet(lambda: plgpu.kernel(body, out_type=out, interpret=params())(a, b))
    np.testing.assert_array_equal(result, np.asarray(a, np.float32) @ np.asarray(b, np.float32))


def test_an_index_map_with_offsets():
    def step(_, x_smem):
        pass

    def body(x_gmem, o_gmem):
        specs = [plgpu.BlockSpec((1, 64), lambda i: (i, 64 * i))]  # the block number would be 0
        plgpu.emit_pipeline(step, grid=(4,), in_specs=specs, max_concurrent_steps=2)(x_gmem)

    with pytest.raises(IndexError, match=r"input 0 of plgpu.emit_pipeline .* asks for elements 4096 to 4159") as error:
        run(body, scratch=[])
    assert "block numbers, not element offsets" in str(error.value)


def test_a_pipelines_buffers_have_names():
    a = numbers(64, 256, dtype=jnp.float16)

    def step(_, a_smem, acc):
        plgpu.wgmma(acc, a_smem, a_smem)  # and the next copy overwrites what it reads
        return acc

    def body(a_gmem, o_gmem):
        def compute(acc):
            specs = [plgpu.BlockSpec((64, 64), lambda i: (0, i), transforms=TILES)]
            plgpu.emit_pipeline(step, grid=(4,), in_specs=specs, max_concurrent_steps=2, init_carry=acc)(a_gmem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 64)))

    out = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    call = lambda: plgpu.kernel(body, out_type=out, interpret=params())(a)
    found = finding(call, "wgmma-in-flight", "the buffer of a_gmem (input 0)[0] is still in use")
    assert "delay_release=1" in found.hint
