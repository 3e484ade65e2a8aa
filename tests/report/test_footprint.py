"""The numbers of a call's table, against the tutorial's formulas and hand counts."""

import jax
import jax.numpy as jnp
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion import tpu as pltpu
from palladion import triton as pltriton
from palladion.report.footprint import compute_bound
from palladion.report.tables import _intensity
from palladion.report.targets import TPUS
from report.looking import copy_kernel, copying, look


def matmul_kernel(a_ref, b_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(bm, bk, bn, size=2048, **options):
    call = pl.pallas_call(
        matmul_kernel,
        jax.ShapeDtypeStruct((size, size), jnp.bfloat16),
        grid=(size // bm, size // bn, size // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k), **options),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j), **options),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j), **options),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )
    return look(call, *[jnp.zeros((size, size), jnp.bfloat16)] * 2).footprint


def tile_stats(bm, bk, bn, in_bytes=2, acc_bytes=4, out_bytes=2, buffers=2):
    """Tutorial 6.3."""
    intensity = 2 * bm * bk * bn / ((bm * bk + bk * bn) * in_bytes)
    held = buffers * (bm * bk + bk * bn) * in_bytes + buffers * bm * bn * out_bytes + bm * bn * acc_bytes
    return intensity, held


@pytest.mark.parametrize("block", [(128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 512, 1024)])
def test_a_blocked_matmul_as_the_tutorial_counts_it(block):
    footprint = matmul(*block)
    intensity, held = tile_stats(*block)
    assert footprint.vector_bytes == footprint.vmem_bytes == held
    # The tutorial leaves out the output's bytes and the additions to the accumulator.
    out = 2048 * 2048 * 2
    inputs = sum(row.moved_bytes for row in footprint.buffers if row.role == "input")
    assert footprint.moved_bytes == inputs + out
    assert footprint.flops / inputs == pytest.approx(intensity, rel=0.02)
    assert footprint.intensity == pytest.approx(footprint.flops / (inputs + out))


def test_buffered_counts_are_respected():
    single, deep = (
        matmul(256, 256, 256, pipeline_mode=pl.Buffered(1)),
        matmul(256, 256, 256, pipeline_mode=pl.Buffered((3, 1))),
    )
    assert single.vector_bytes == tile_stats(256, 256, 256, buffers=1)[1]
    assert [row.buffers for row in deep.buffers] == [3, 3, 1, 1]
    assert deep.vector_bytes == 3 * 2 * 256 * 256 * 2 + 256 * 256 * 2 + 256 * 256 * 4


def test_a_single_program_needs_no_second_buffer():
    footprint = copying((8, 128), (1,), lambda i: (0, 0), shape=(8, 128)).footprint
    assert footprint.vector_bytes == 2 * 8 * 128 * 4


def test_reused_blocks_are_copied_once():
    footprint = matmul(512, 512, 512, size=1024)
    assert [row.copies for row in footprint.buffers] == [8, 8, 4, None]
    kept = copying((8, 128), (4,), lambda i: (0, 0), lambda i: (i, 0), shape=(32, 128)).footprint
    assert [row.copies for row in kept.buffers] == [1, 4]


def test_buffers_take_whole_tiles_of_vmem():
    footprint = copying((1000, 1), (1,), lambda i: (0, 0), shape=(1000, 1)).footprint
    assert footprint.vector_bytes == 2 * 4000
    assert footprint.vmem_bytes == 2 * 1000 * 128 * 4


def test_narrow_dtypes():
    assert copying((32, 128), (1,), lambda i: (0, 0), shape=(32, 128), dtype=jnp.int4).footprint.vector_bytes == 4096
    assert copying((32, 128), (1,), lambda i: (0, 0), shape=(32, 128), dtype=jnp.bool_).footprint.vector_bytes == 8192


def test_the_largest_run_scoped_counts():
    def kernel(x_ref, o_ref):
        def inner(a_ref):
            a_ref[...] = x_ref[...]
            pl.run_scoped(lambda b_ref: o_ref.__setitem__(..., a_ref[...]), pltpu.VMEM((16, 128), jnp.float32))

        pl.run_scoped(inner, pltpu.VMEM((8, 128), jnp.float32))
        pl.run_scoped(lambda c_ref: None, pltpu.VMEM((8, 128), jnp.float32))

    footprint = copying((8, 128), (1,), lambda i: (0, 0), shape=(8, 128), kernel=kernel).footprint
    assert footprint.vector_bytes == (2 * 8 + 8 + 16) * 128 * 4


def test_scalars_are_counted_apart():
    def kernel(s_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[0]

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
    )
    footprint = look(call, jnp.zeros(16), jnp.zeros((8, 128))).footprint
    assert (footprint.scalar_bytes, footprint.vector_bytes) == (64, 2 * 8 * 128 * 4)


def test_operands_in_hbm_are_left_to_the_kernel():
    call = pl.pallas_call(
        copy_kernel,
        jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
    )
    footprint = look(call, jnp.zeros((8, 128))).footprint
    assert footprint.buffers[0].buffers == 0 and footprint.buffers[0].copies is None
    assert footprint.moves_more and footprint.intensity is None
    assert footprint.vector_bytes == 8 * 128 * 4


@pytest.mark.parametrize(
    ("params", "buffers"),
    [(None, 2), (pltriton.CompilerParams(), 1), (plgpu.CompilerParams(max_concurrent_steps=4), 4)],
    ids=str,
)
def test_buffers_of_each_compiler(params, buffers):
    footprint = copying((8, 128), (4,), lambda i: (i, 0), shape=(32, 128), compiler_params=params).footprint
    assert [row.buffers for row in footprint.buffers] == [buffers, buffers]
    machines = {limit.machine for limit in footprint.limits}
    assert machines == ({"TPU", "GPU"} if params is None else {"GPU"})


def test_every_tpu_generation_and_an_sm_are_limits():
    limits = copying((8, 128), (4,), lambda i: (i, 0), shape=(32, 128)).footprint.limits
    capacities = {name: limit.capacity for limit in limits for name in limit.names}
    assert set(capacities) == {str(chip) for chip in pltpu.ChipVersion} | {"H100", "B200"}
    assert capacities["v4"] == 16 << 20 and capacities["v6e"] == 128 << 20 and capacities["H100"] == 227 << 10
    assert all(limit.fits and limit.used == 4 * 8 * 128 * 4 for limit in limits)


def test_transcendentals_are_counted():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    footprint = copying((8, 128), (4,), lambda i: (i, 0), shape=(32, 128), kernel=kernel).footprint
    assert (footprint.flops, footprint.transcendentals) == (0, 32 * 128)


def test_the_ridge_of_each_chip():
    assert compute_bound(0.1) == []
    assert "v5e" in compute_bound(241) and "v5e" not in compute_bound(239)  # 197 Tflop/s over 820 GB/s
    assert len(compute_bound(1000)) == len(pltpu.ChipVersion)


def test_the_text_lists_the_chips_on_which_a_kernel_is_compute_bound():
    footprint = matmul(512, 512, 512)
    *first, last = compute_bound(footprint.intensity)
    assert first and len(first) + 1 < len(TPUS)
    assert _intensity(footprint).endswith(
        f": compute-bound on TPU {', '.join(first)} and {last}, memory-bound on the others"
    )
