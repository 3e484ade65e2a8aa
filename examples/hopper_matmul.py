"""A matrix product for Hopper on a simulated H100: two threads compute, one copies, and a bug is found without a GPU.

    python examples/hopper_matmul.py                        # checks the product against NumPy in float64
    python examples/hopper_matmul.py --forget commit_smem   # and what the simulator says when a line is forgotten:
    python examples/hopper_matmul.py --forget wait          #   each is a bug that a real GPU may hide for weeks
    palladion check examples/hopper_matmul.py

A block owns 128 x 128 of the result. Its memory thread brings blocks of A and B to shared memory by TMA, as many steps
ahead as there are buffers; each of the two compute threads multiplies 64 rows of A by B with wgmma, whose accumulator
is in registers. `delay_release=1` keeps a block for one step longer than its own, since the wgmma that reads it is
still running when the step ends. The result goes through shared memory: `commit_smem` shows the threads' stores to the
TMA engine, and `wait_smem_to_gmem` waits for the engine.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

M = K = N = 512
TILE_M, TILE_N, TILE_K = 64, 128, 64  # of one compute thread
STEPS = 4  # whose blocks are in shared memory at the same time


def mma_transforms(rows: int, columns: int, dtype) -> tuple:
    """Tiles of 8 rows of 128 bytes, swizzled: how the tensor core reads shared memory fastest."""
    elements = 128 // jnp.dtype(dtype).itemsize
    assert rows % 8 == 0 and columns % elements == 0
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(128)


def matmul(a, b, *, forget: str = "", **how):
    """a @ b in float32, of float16 (m, k) and (k, n); `how` is passed to plgpu.kernel."""
    (m, k), n = a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, o_smem):
        mi, ni, wg = lax.axis_index("m"), lax.axis_index("n"), lax.axis_index("wg")
        mine = pl.ds(wg * TILE_M, TILE_M)

        def step(_, a_smem, b_smem, acc):
            plgpu.wgmma(acc, a_smem.at[mine], b_smem)
            return acc

        def compute_thread(pipeline):
            def compute(acc):
                pipeline(acc)
                return acc[...]  # waits for the last wgmma

            o_smem[mine] = pl.run_scoped(compute, plgpu.ACC((TILE_M, TILE_N), jnp.float32))
            if forget != "commit_smem":
                plgpu.commit_smem()
            rows = pl.ds((2 * mi + wg) * TILE_M, TILE_M)
            plgpu.copy_smem_to_gmem(o_smem.at[mine], o_gmem.at[rows, pl.ds(ni * TILE_N, TILE_N)])
            if forget != "wait":
                plgpu.wait_smem_to_gmem(0)

        def blocks(shape, index_map):
            return plgpu.BlockSpec(shape, index_map, transforms=mma_transforms(*shape, a.dtype), delay_release=1)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // TILE_K,),
            in_specs=[
                blocks((2 * TILE_M, TILE_K), lambda ki: (mi, ki)),
                blocks((TILE_K, TILE_N), lambda ki: (ki, ni)),
            ],
            max_concurrent_steps=STEPS,
            wg_axis="wg",
            num_compute_wgs=2,
            memory_registers=40,
            compute_context=compute_thread,
        )(a_gmem, b_gmem)

    transforms = mma_transforms(2 * TILE_M, TILE_N, jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_types=dict(o_smem=plgpu.SMEM((2 * TILE_M, TILE_N), jnp.float32, transforms=transforms)),
        grid=(m // (2 * TILE_M), n // TILE_N),
        grid_names=("m", "n"),
        num_threads=3,
        thread_name="wg",
        **how,
    )(a, b)


def main() -> None:
    a = jax.random.normal(jax.random.key(0), (M, K), jnp.float16)
    b = jax.random.normal(jax.random.key(1), (K, N), jnp.float16)
    forget = sys.argv[sys.argv.index("--forget") + 1] if "--forget" in sys.argv else ""
    try:
        result = matmul(a, b, forget=forget, interpret=plgpu.InterpretGPUParams(detect_races=True))
    except pl.KernelFinding as finding:
        print(finding)
        sys.exit(1)
    error = np.abs(np.asarray(result) - np.asarray(a, np.float64) @ np.asarray(b, np.float64)).max()
    print(f"largest difference from NumPy in float64: {error:.0e}")


if __name__ == "__main__":
    main()
