"""Flash attention, forward, on Hopper: one or two compute threads with 64 queries each, and a memory thread."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

from .common import HOPPER, Table, bf16, f32, f64, reals, struct, tiled_smem

ATTENTION = Table()
LAYOUT = plgpu.Layout.WGMMA
LOWEST = -1e30  # below every score, and finite


def flash_attention(q, k, v, compute_threads=2, block_q=64, block_kv=64, buffers=2):
    """softmax(q kᵀ / √d) v of heads (heads, length, d), without the matrix of scores in memory.

    Keys and values have barriers of their own: the values of a block may still be on their way when its scores are
    computed. The weights go to wgmma as an operand in registers.
    """
    heads, length, d = q.shape
    kv_length = k.shape[1]
    steps = kv_length // block_kv
    block = compute_threads * block_q

    def kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, o_smem, loaded, consumed):
        wg, head, qi = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("q")
        q_loaded, k_loaded, v_loaded = loaded
        k_consumed, v_consumed = consumed
        factor = d**-0.5

        @pl.when(wg == compute_threads)
        def memory_thread():
            @pl.loop(0, steps)
            def _(i):
                slot, part = lax.rem(i, buffers), pl.ds(i * block_kv, block_kv)

                @pl.when(i >= buffers)
                def _():
                    plgpu.barrier_wait(k_consumed.at[slot])

                plgpu.copy_gmem_to_smem(k_gmem.at[head, part], k_smem.at[slot], k_loaded.at[slot])

                @pl.when(i >= buffers)
                def _():
                    plgpu.barrier_wait(v_consumed.at[slot])

                plgpu.copy_gmem_to_smem(v_gmem.at[head, part], v_smem.at[slot], v_loaded.at[slot])

            for i in range(max(steps - buffers, 0), steps):
                plgpu.barrier_wait(k_consumed.at[i % buffers])
                plgpu.barrier_wait(v_consumed.at[i % buffers])

        @pl.when(wg < compute_threads)
        def compute_thread():
            rows = pl.ds(qi * block + wg * block_q, block_q)
            plgpu.copy_gmem_to_smem(q_gmem.at[head, rows], q_smem.at[wg], q_loaded.at[wg])
            plgpu.barrier_wait(q_loaded.at[wg])

            def wide(x):
                return lax.broadcast_in_dim(x, (block_q, block_kv), (0,))

            def step(i, carry):
                m, l, acc = carry
                slot = lax.rem(i, buffers)
                plgpu.barrier_wait(k_loaded.at[slot])

                def scores(s_ref):
                    plgpu.wgmma(s_ref, q_smem.at[wg], plgpu.transpose_ref(k_smem.at[slot], (1, 0)))
                    return s_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC((block_q, block_kv), f32)) * factor
                plgpu.barrier_arrive(k_consumed.at[slot])
                m_new = jnp.maximum(m, s.max(axis=1))
                alpha = jnp.exp(m - m_new)
                p = jnp.exp(s - wide(m_new))
                l = l * alpha + p.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, (0,))
                plgpu.barrier_wait(v_loaded.at[slot])

                def weigh(acc_ref):
                    plgpu.wgmma(acc_ref, p.astype(bf16), v_smem.at[slot])

                acc = pl.run_state(weigh)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_consumed.at[slot])
                return m_new, l, acc

            m = plgpu.layout_cast(jnp.full((block_q,), LOWEST, f32), LAYOUT.reduce(1))
            l = plgpu.layout_cast(jnp.zeros((block_q,), f32), LAYOUT.reduce(1))
            acc = plgpu.layout_cast(jnp.zeros((block_q, d), f32), LAYOUT)
            m, l, acc = lax.fori_loop(0, steps, step, (m, l, acc))
            o_smem[wg] = acc / lax.broadcast_in_dim(l, acc.shape, (0,))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[wg], o_gmem.at[head, rows])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=struct(q.shape),
        grid=(heads, length // block),
        grid_names=("head", "q"),
        num_threads=compute_threads + 1,
        thread_name="wg",
        scratch_types=dict(
            q_smem=tiled_smem((compute_threads, block_q, d), bf16),
            k_smem=tiled_smem((buffers, block_kv, d), bf16),
            v_smem=tiled_smem((buffers, block_kv, d), bf16),
            o_smem=tiled_smem((compute_threads, block_q, d), f32),
            loaded=(
                plgpu.Barrier(num_barriers=compute_threads),
                plgpu.Barrier(num_barriers=buffers),
                plgpu.Barrier(num_barriers=buffers),
            ),
            consumed=(
                plgpu.Barrier(num_arrivals=compute_threads, num_barriers=buffers),
                plgpu.Barrier(num_arrivals=compute_threads, num_barriers=buffers),
            ),
        ),
    )(q, k, v)


def exact(q, k, v):
    s = f64(q) @ f64(k).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ f64(v) / p.sum(-1, keepdims=True)


def operands(seed, heads, length, kv_length, d):
    shapes = [(heads, length, d), (heads, kv_length, d), (heads, kv_length, d)]
    return [reals(seed + i, shape, bf16) for i, shape in enumerate(shapes)]


@ATTENTION.case(flash_attention, HOPPER)
def attention_2_warpgroups():
    q, k, v = operands(40, 2, 128, 256, 64)
    return flash_attention(q, k, v, compute_threads=1), exact(q, k, v), 5e-3


@ATTENTION.case(flash_attention, HOPPER)
def attention_3_warpgroups():
    q, k, v = operands(43, 1, 256, 320, 64)
    return flash_attention(q, k, v, compute_threads=2), exact(q, k, v), 5e-3
