"""A kernel for GPUs with a line missing, that no test of its values finds: what it computes is right.

    palladion check --target gpu:h100 examples/gpu_missing_fence.py

Two threads share the work: one doubles rows in shared memory, the other lets TMA store them. On a GPU, TMA looks at
shared memory through another proxy than the threads: what they wrote may not be there yet, whatever barrier is between.
"""

import jax.numpy as jnp
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

x = jnp.arange(64 * 128, dtype=jnp.float32).reshape(64, 128)


def double(x_gmem, o_gmem, smem, ready):
    thread = lax.axis_index("thread")

    @pl.when(thread == 0)
    def _():
        smem[...] = x_gmem[...] * 2
        plgpu.barrier_arrive(ready)  # the line before this one is missing: plgpu.commit_smem()

    @pl.when(thread == 1)
    def _():
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)


call = plgpu.kernel(
    double,
    out_type=x,
    num_threads=2,
    thread_name="thread",
    scratch_types=dict(smem=plgpu.SMEM(x.shape, x.dtype), ready=plgpu.Barrier()),
)

if __name__ == "__main__":
    print("right values:", bool((call(x) == 2 * x).all()))
