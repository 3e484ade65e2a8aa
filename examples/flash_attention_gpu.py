"""Flash attention, forward, for Hopper on a simulated H100: two threads compute, one copies keys and values.

    python examples/flash_attention_gpu.py          # checks it, full and causal, against NumPy in float64
    palladion check examples/flash_attention_gpu.py

A block owns 128 queries of a head, 64 for each compute thread, and walks over the keys. What is kept for a query, its
largest score m, the sum of weights l and the weighted sum of values acc, stays in registers (Dao, Fu, Ermon, Rudra, Re,
FlashAttention, 2022; the division of labour is that of FlashAttention-3, Shah et al., 2024). Scores are a wgmma of
operands in shared memory, K being seen transposed; the weights are the operand in registers of a second wgmma. K and V
have barriers of their own, since the values are needed later than the keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

BLOCK_Q, BLOCK_KV, BUFFERS, THREADS = 64, 64, 2, 2
LOWEST = -1e30  # below every score, and finite: the difference of two of them is 0 and not NaN
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of an accumulator


def flash_attention(q, k, v, *, causal=False, **how):
    """Attention of q, k and v, each (heads, length, 64) in bfloat16; `how` is passed to plgpu.kernel."""
    heads, length, d = q.shape
    block = THREADS * BLOCK_Q

    def kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, o_smem, q_loaded, loaded, consumed):
        head, qi, wg = lax.axis_index("head"), lax.axis_index("q"), lax.axis_index("wg")
        first = qi * block  # of the block's queries
        steps = lax.div(first + block, BLOCK_KV) if causal else length // BLOCK_KV

        def memory_thread():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def _(i):
                slot, keys = lax.rem(i, BUFFERS), pl.ds(i * BLOCK_KV, BLOCK_KV)
                for n, (gmem, smem) in enumerate([(k_gmem, k_smem), (v_gmem, v_smem)]):
                    pl.when(i >= BUFFERS)(lambda n=n: plgpu.barrier_wait(consumed[n].at[slot]))
                    plgpu.copy_gmem_to_smem(gmem.at[head, keys], smem.at[slot], loaded[n].at[slot])

            @pl.loop(jnp.maximum(steps - BUFFERS, 0), steps)  # as many waits as completions
            def _(i):
                for barriers in consumed:
                    plgpu.barrier_wait(barriers.at[lax.rem(i, BUFFERS)])

        def compute_thread():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(first + wg * BLOCK_Q, BLOCK_Q)
            plgpu.copy_gmem_to_smem(q_gmem.at[head, mine], q_smem.at[wg], q_loaded.at[wg])
            plgpu.barrier_wait(q_loaded.at[wg])

            def visit(i, carry):
                m_before, l, acc = carry
                slot = lax.rem(i, BUFFERS)
                plgpu.barrier_wait(loaded[0].at[slot])

                def scores(s):
                    plgpu.wgmma(s, q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
                    return s[...]

                s = pl.run_scoped(scores, plgpu.ACC((BLOCK_Q, BLOCK_KV), jnp.float32)) * d**-0.5
                plgpu.barrier_arrive(consumed[0].at[slot])
                if causal:
                    iota = [plgpu.broadcasted_iota(jnp.int32, s.shape, n, layout=plgpu.Layout.WGMMA) for n in (0, 1)]
                    s = jnp.where(first + wg * BLOCK_Q + iota[0] >= i * BLOCK_KV + iota[1], s, LOWEST)
                m = jnp.maximum(m_before, s.max(axis=1))
                p = jnp.exp(s - lax.broadcast_in_dim(m, s.shape, (0,)))
                shrink = jnp.exp(m_before - m)
                l = l * shrink + p.sum(axis=1)
                acc *= lax.broadcast_in_dim(shrink, acc.shape, (0,))
                plgpu.barrier_wait(loaded[1].at[slot])

                def weigh(acc):
                    plgpu.wgmma(acc, p.astype(v.dtype), v_smem.at[slot])

                acc = pl.run_state(weigh)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(consumed[1].at[slot])
                return m, l, acc

            m = plgpu.layout_cast(jnp.full((BLOCK_Q,), LOWEST, jnp.float32), ROWS)
            l = plgpu.layout_cast(jnp.zeros((BLOCK_Q,), jnp.float32), ROWS)
            acc = plgpu.layout_cast(jnp.zeros((BLOCK_Q, d), jnp.float32), plgpu.Layout.WGMMA)
            m, l, acc = lax.fori_loop(0, steps, visit, (m, l, acc))
            o_smem[wg] = (acc / lax.broadcast_in_dim(l, acc.shape, (0,))).astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[wg], o_gmem.at[head, mine])
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == THREADS)(memory_thread)
        pl.when(wg < THREADS)(compute_thread)

    tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # for wgmma: rows of 64 bfloat16

    def buffers(count, rows):
        return plgpu.SMEM((count, rows, d), q.dtype, transforms=tiled)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=dict(
            q_smem=buffers(THREADS, BLOCK_Q),
            k_smem=buffers(BUFFERS, BLOCK_KV),
            v_smem=buffers(BUFFERS, BLOCK_KV),
            o_smem=buffers(THREADS, BLOCK_Q),
            q_loaded=plgpu.Barrier(num_barriers=THREADS),
            loaded=[plgpu.Barrier(num_barriers=BUFFERS)] * 2,
            consumed=[plgpu.Barrier(num_arrivals=THREADS, num_barriers=BUFFERS)] * 2,
        ),
        grid=(heads, length // block),
        grid_names=("head", "q"),
        num_threads=THREADS + 1,
        thread_name="wg",
        **how,
    )(q, k, v)


def exact(q, k, v, causal):
    """The same in NumPy, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


def main() -> None:
    args = [jax.random.normal(key, (2, 384, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3)]
    for causal in (False, True):
        result = flash_attention(*args, causal=causal, interpret=plgpu.InterpretGPUParams(detect_races=True))
        error = np.abs(np.asarray(result, np.float64) - exact(*args, causal)).max()
        print(f"{'causal' if causal else 'full':6s} largest difference from NumPy in float64: {error:.0e}")


if __name__ == "__main__":
    main()
