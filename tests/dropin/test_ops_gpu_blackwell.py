"""JAX's Mosaic GPU kernels for Blackwell: right values, what they break, and mended copies that are silent."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from dropin.gpu_ops import (
    BF16,
    F16,
    LEFT_OVER,
    SCHEDULES,
    M,
    N,
    close,
    exact,
    finding,
    grouped,
    machine,
    mended,
    normal,
    ops,
    warned,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("installed")

# The thread that stores ends while its last copy still reads SMEM.
ARRIVES = "        plgpu.barrier_arrive(store_done_barrier.at[acc_slot])\n"
STORES_END = ARRIVES, ARRIVES + "    plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n"
# In the second block of a cluster a warp waits on store_done_barrier, while another one already lets the leader go on
# to the product after which the barrier completes again. Mended: the whole thread waits, before its warps part.
WAIT = "jnp.logical_and(warp_id == MMA_WARP, local_index > 1)"


def thread_waits(indent):
    lines = ["@pl.when(local_index > 1)", "def _():", "  plgpu.barrier_wait(store_done_barrier.at[acc_slot])", ""]
    return f"{indent}@plgpu.warp_map", "".join(f"{indent}{line}\n" for line in lines) + f"{indent}@plgpu.warp_map"


def blackwell(module, collective, m=512, n=256, k=128, dtype=F16, minor=N, **sizes):
    fields = dict(tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, epilogue_tile_n=32) | sizes
    dim = ops("blackwell_matmul").MatmulDimension(minor)
    config = module.TuningConfig(collective=collective, grid_minor_dim=dim, **fields)
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    return a, b, functools.partial(module.matmul_kernel, a, b, config)


BLACKWELL = [
    dict(max_concurrent_steps=1, dtype=BF16),
    dict(max_concurrent_steps=4, tile_n=128, epilogue_tile_n=64, k=384, minor=M, grid_tile_width=2),
    dict(tile_n=64, epilogue_tile_n=64),
]


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("config", BLACKWELL, ids=str)
def test_blackwell_matmul(config, collective):
    """Unmodified, with the finding that it has as a warning: each thread has only its last copy in flight."""
    module = ops("blackwell_matmul")
    a, b, call = blackwell(module, collective, **config)
    with machine(on_race="warn"):
        close(warned(call, "missing-wait", LEFT_OVER), exact(a) @ exact(b))


@pytest.mark.parametrize("collective", [False, True])
def test_blackwell_matmul_ends_while_it_stores(collective):
    with machine():
        finding(
            blackwell(ops("blackwell_matmul"), collective)[2], "missing-wait", "plgpu.copy_smem_to_gmem(acc_smem_ni"
        )
        a, b, call = blackwell(mended("blackwell_matmul", STORES_END), collective)
        close(warned(call, LEFT_OVER), exact(a) @ exact(b))


MANY = dict(m=1024, n=512)  # several tiles for each cluster


def in_order(collective):
    """The kernel with nothing left to report."""
    more = ((WAIT, "False"), thread_waits(" " * 8)) if collective else ()
    return mended("blackwell_matmul", STORES_END, *more)


def test_blackwell_matmul_of_two_blocks_may_complete_a_barrier_twice():
    with machine():
        call = blackwell(mended("blackwell_matmul", STORES_END), True, **MANY)[2]
        finding(call, "barrier-double-completion", "plgpu.barrier_arrive(store_done_barrier")


@pytest.mark.parametrize("schedule", ["lazy", *SCHEDULES])
@pytest.mark.parametrize("collective", [False, True])
def test_blackwell_matmul_in_order(collective, schedule):
    with machine(schedule=schedule):
        a, b, call = blackwell(in_order(collective), collective, **MANY)
        close(warned(call, LEFT_OVER), exact(a) @ exact(b))


# --- ragged products --------------------------------------------------------------------------------------------------
def blackwell_ragged(module, sizes=(100, 0, 375, 37), n=256, k=128, minor=N, **tiles):
    fields = dict(tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, epilogue_tile_n=32, grid_tile_width=1)
    dim = ops("blackwell_matmul").MatmulDimension(minor)
    config = module.TuningConfig(collective=True, grid_minor_dim=dim, **(fields | tiles))
    a, b = normal(sum(sizes), k), normal(len(sizes), k, n)
    call = functools.partial(module.ragged_dot_kernel, a, b, jnp.array(sizes, jnp.int32), config)
    return call, grouped(a, b, sizes)


LEADERS_ONLY = "store_done_barrier=plgpu.Barrier("
RAGGED = [
    {},
    dict(max_concurrent_steps=4, minor=M, grid_tile_width=2, k=256, sizes=(1, 200, 311, 0)),
]


@pytest.mark.parametrize("config", RAGGED, ids=str)
def test_blackwell_ragged_dot_overwrites_what_the_second_block_reads(config):
    """Its store_done_barrier is each block's own, but the leader's product writes the TMEM of both.

    So the leader may be a tile ahead: a product overwrites what the second block still loads, and mma_done_barrier may
    complete again in the second block before that has waited.
    """
    call, want = blackwell_ragged(ops("blackwell_ragged_dot"), **config)
    with machine():
        finding(call, "tmem-in-flight", "plgpu.tcgen05_mma(")
    with machine(detect_races=False):
        close(warned(call, LEFT_OVER), want)


@pytest.mark.parametrize("schedule", ["lazy", *SCHEDULES])
@pytest.mark.parametrize("config", RAGGED, ids=str)
def test_blackwell_ragged_dot_in_order(config, schedule):
    barrier = LEADERS_ONLY, 'store_done_barrier=plgpu.ClusterBarrier(collective_axes=("x",), '
    module = mended("blackwell_ragged_dot", barrier, (WAIT, "False"), thread_waits(" " * 4))
    call, want = blackwell_ragged(module, **config)
    with machine(schedule=schedule):
        close(warned(call, LEFT_OVER), want)


def test_blackwell_ragged_dot_is_for_two_blocks_only():
    """Without `collective` its body asks for a cluster's axis that the kernel does not have, in JAX too."""
    module = ops("blackwell_ragged_dot")
    dim = ops("blackwell_matmul").MatmulDimension(N)
    config = module.TuningConfig(128, 64, 64, 2, collective=False, grid_tile_width=1, grid_minor_dim=dim)
    with machine(), pytest.raises(NameError, match="unbound axis name: x"):
        module.ragged_dot_kernel(normal(256, 64), normal(2, 64, 64), jnp.array([100, 156], jnp.int32), config)
