"""A matrix product for Hopper in which two threads take turns at the tensor core, and a picture of it, without a GPU.

    python examples/gpu_ping_pong.py                         # checks the product against NumPy in float64
    python examples/gpu_ping_pong.py --draw ping_pong.png    # and draws what a simulated H100 did, with matplotlib
    python examples/gpu_ping_pong.py --trace ping_pong.json  # or saves it for Perfetto

A block keeps its columns of B in shared memory. Compute thread w has the tiles w, w + 2 … of 64 rows: while one thread
multiplies, the other converts and stores its last result. `turn[w]` says that it is thread w's turn. A third thread
copies the rows of A, to a buffer for each of the two.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

M, N, K = 512, 384, 256
TILE_M, TILE_N = 64, 192
ROUNDS = M // TILE_M // 2  # tiles of each compute thread


def matrix(*shape: int):
    """A buffer in shared memory, as the tensor core reads it: tiles of 8 rows of 128 bytes, swizzled."""
    return plgpu.SMEM(shape, jnp.float16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, b_loaded, loaded, consumed, turn):
    wg = lax.axis_index("wg")
    columns = pl.ds(lax.axis_index("n") * TILE_N, TILE_N)

    @pl.when(wg == 2)
    def memory_thread():
        plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, b_loaded)

        @pl.loop(0, ROUNDS)
        def _(i):
            for w in range(2):

                @pl.when(i > 0)
                def _(w=w):
                    plgpu.barrier_wait(consumed.at[w])

                plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds((2 * i + w) * TILE_M, TILE_M)], a_smem.at[w], loaded.at[w])

        for w in range(2):  # as many waits as completions
            plgpu.barrier_wait(consumed.at[w])

    @pl.when(wg < 2)
    def compute_thread():
        plgpu.barrier_wait(b_loaded)

        @pl.loop(0, ROUNDS)
        def _(i):
            @pl.when((wg > 0) | (i > 0))
            def _():
                plgpu.barrier_wait(turn.at[wg])

            plgpu.barrier_wait(loaded.at[wg])

            def multiply(acc):
                plgpu.wgmma(acc, a_smem.at[wg], b_smem)
                return acc[...]  # waits for it

            result = pl.run_scoped(multiply, plgpu.ACC((TILE_M, TILE_N), jnp.float32))
            plgpu.barrier_arrive(consumed.at[wg])

            @pl.when((wg == 0) | (i < ROUNDS - 1))
            def _():
                plgpu.barrier_arrive(turn.at[1 - wg])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result has left the buffer
            o_smem[wg] = result.astype(jnp.float16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[wg], o_gmem.at[pl.ds((2 * i + wg) * TILE_M, TILE_M), columns])

        plgpu.wait_smem_to_gmem(0)


matmul = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((M, N), jnp.float16),
    grid=(N // TILE_N,),
    grid_names=("n",),
    num_threads=3,
    thread_name="wg",
    scratch_types=dict(
        a_smem=matrix(2, TILE_M, K),
        b_smem=matrix(K, TILE_N),
        o_smem=matrix(2, TILE_M, TILE_N),
        b_loaded=plgpu.Barrier(),
        loaded=plgpu.Barrier(num_barriers=2),
        consumed=plgpu.Barrier(num_barriers=2),
        turn=plgpu.Barrier(num_barriers=2),
    ),
    interpret=plgpu.InterpretGPUParams(detect_races=True, trace=True),
    name="ping_pong_matmul",
)


def main() -> None:
    a = jax.random.normal(jax.random.key(0), (M, K), jnp.float16)
    b = jax.random.normal(jax.random.key(1), (K, N), jnp.float16)
    error = np.abs(np.asarray(matmul(a, b), np.float64) - np.asarray(a, np.float64) @ np.asarray(b, np.float64)).max()
    print(f"largest difference from NumPy in float64: {error:.0e}")
    timeline = pl.last_report().timeline
    if "--trace" in sys.argv:
        timeline.save(sys.argv[sys.argv.index("--trace") + 1])
    if "--draw" in sys.argv:
        from palladion.report.timeline import draw

        draw(timeline, sys.argv[sys.argv.index("--draw") + 1], processes=["block n=0"])


if __name__ == "__main__":
    main()
