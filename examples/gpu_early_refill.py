"""A matrix product for Hopper that refills a buffer too early: right on a slow copy, wrong on a fast one.

    palladion check --target gpu:h100 examples/gpu_early_refill.py

When `plgpu.wgmma` returns, the product that it began is still running, and only those before it are complete. So the
buffer to refill is the one of the step before, not this one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

TILE, STEPS, BUFFERS = 64, 6, 3
a = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (TILE, STEPS * TILE)), jnp.float16)
b = jnp.asarray(np.random.default_rng(1).integers(-3, 4, (STEPS * TILE, TILE)), jnp.float16)


def matmul(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, loaded):
    def fetch(step, slot):
        part = pl.ds(step * TILE, TILE)
        plgpu.copy_gmem_to_smem(a_gmem.at[:, part], a_smem.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(b_gmem.at[part], b_smem.at[slot], loaded.at[slot])

    def compute(acc):
        for slot in range(BUFFERS):
            fetch(slot, slot)

        @pl.loop(0, STEPS)
        def _(i):
            slot = lax.rem(i, BUFFERS)
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])

            @pl.when(i + BUFFERS < STEPS)
            def _():
                fetch(i + BUFFERS, slot)  # right: when(i > 0), fetch(i - 1 + BUFFERS, rem(i - 1, BUFFERS))

        return acc[...]

    o_smem[...] = pl.run_scoped(compute, plgpu.ACC((TILE, TILE), jnp.float32))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_gmem)
    plgpu.wait_smem_to_gmem(0)


transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
call = plgpu.kernel(
    matmul,
    out_type=jax.ShapeDtypeStruct((TILE, TILE), jnp.float32),
    scratch_types=dict(
        a_smem=plgpu.SMEM((BUFFERS, TILE, TILE), jnp.float16, transforms=transforms),
        b_smem=plgpu.SMEM((BUFFERS, TILE, TILE), jnp.float16, transforms=transforms),
        o_smem=plgpu.SMEM((TILE, TILE), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
    ),
)

if __name__ == "__main__":
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    print("right values:", bool((np.asarray(call(a, b)) == expected).all()))
