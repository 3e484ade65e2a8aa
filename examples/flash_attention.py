"""Flash attention, forward: softmax(Q K^T) V without the matrix of scores in memory, interpreted and native.

    python examples/flash_attention.py           # checks every variant against NumPy in float64
    python examples/flash_attention.py --time    # and times 8 heads of length 2048 against jnp
    palladion check examples/flash_attention.py

A program owns a block of queries and walks over the keys. It keeps, for each query, the largest score so far (m), the
sum of the weights relative to it (l) and the weighted sum of the values (acc), and rescales l and acc whenever m grows
(Dao, Fu, Ermon, Rudra, Re, FlashAttention, 2022, algorithm 1; the order of loops is that of FlashAttention-2, 2023).
With `causal` a query sees no later key: blocks of keys above the diagonal are never visited, because the loop ends at
a bound that depends on the program, and only blocks on the diagonal are masked. Inputs may be float32 or bfloat16;
scores, weights and sums are float32, and the weights are rounded to the values' dtype for the second product.

Blocks of 256 queries and 512 keys were the quickest, or within 3 %, of 64 to 512 each on two cores of a Zen 5; causal,
256 keys, because the diagonal wastes less. A loop in the kernel, as here, and a third grid axis over the keys were
equally quick; the loop can end early.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * log2(e)), and exp2 is a little cheaper
LOWEST = -1e30  # below every score, and finite: the difference of two of them is 0 and not NaN


def attention_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, causal, block_k):
    block_q, head = q_ref.shape
    first = pl.program_id(2) * block_q  # the first query of this program
    factor = head**-0.5 * LOG2_E
    m_ref[...] = jnp.full_like(m_ref, LOWEST)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def visit(j, masked):
        k = k_ref[pl.ds(j * block_k, block_k), :]
        v = v_ref[pl.ds(j * block_k, block_k), :]
        s = jax.lax.dot_general(q_ref[...], k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if masked:
            query = first + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
            key = j * block_k + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where(query >= key, s, LOWEST)
        m_before = m_ref[...]
        m = jnp.maximum(m_before, s.max(axis=1, keepdims=True))
        p = jnp.exp2(s * factor - m * factor)
        shrink = jnp.exp2((m_before - m) * factor)
        m_ref[...] = m
        l_ref[...] = l_ref[...] * shrink + p.sum(axis=1, keepdims=True)
        acc_ref[...] *= shrink
        acc_ref[...] += jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)

    if causal:
        pl.loop(0, first // block_k)(lambda j: visit(j, masked=False))
        pl.loop(first // block_k, pl.cdiv(first + block_q, block_k))(lambda j: visit(j, masked=True))
    else:
        pl.loop(0, k_ref.shape[0] // block_k)(lambda j: visit(j, masked=False))
    o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


def flash_attention(q, k, v, *, causal=False, block_q=256, block_k=None, **how):
    """Attention of q, k and v, each (batch, heads, length, head), in their dtype; `how` is passed to pallas_call."""
    batch, heads, length, head = q.shape
    block_q, block_k = min(block_q, length), min(block_k or (256 if causal else 512), length)
    if length % block_q or length % block_k:
        raise ValueError(f"length {length} is not a multiple of both block sizes, {block_q} and {block_k}")
    queries = pl.BlockSpec((None, None, block_q, head), lambda b, h, i: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, length, head), lambda b, h, i: (b, h, 0, 0))
    return pl.pallas_call(
        functools.partial(attention_kernel, causal=causal, block_k=block_k),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch, heads, length // block_q),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        scratch_shapes=[
            pltpu.VMEM((block_q, 1), jnp.float32),
            pltpu.VMEM((block_q, 1), jnp.float32),
            pltpu.VMEM((block_q, head), jnp.float32),
        ],
        **how,
    )(q, k, v)


# The whole difference between a kernel that is looked at and one that is fast:
INTERPRETED = dict(interpret=True)
NATIVE = dict(compiler_params=plcpu.CompilerParams(dimension_semantics=("parallel",) * 3))


def attention(q, k, v, causal=False):
    """The same in jnp: what flash attention is measured against."""
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


def exact(q, k, v, causal):
    """The same in NumPy, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


def operands(batch, heads, length, head, dtype):
    """Random queries, keys and values."""
    shape = (batch, heads, length, head)
    return [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 3)]


def check():
    """Every variant, small, against NumPy; prints the largest error of each."""
    for dtype in ("float32", "bfloat16"):
        for causal in (False, True):
            args = operands(2, 2, 256, 64, dtype)
            wanted = exact(*args, causal)
            for name, how in (("interpreted", INTERPRETED), ("native", NATIVE)):
                result = flash_attention(*args, causal=causal, block_q=128, block_k=64, **how)
                error = np.abs(np.asarray(result, np.float64) - wanted).max()
                print(f"{dtype:8s} {'causal' if causal else 'full':6s} {name:11s} largest error {error:.0e}")


def race():
    """Native against jnp under jit, taking turns; medians."""
    for head in (64, 128):
        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                args = operands(1, 8, 2048, head, dtype)
                calls = [jax.jit(functools.partial(flash_attention, causal=causal, **NATIVE))]
                calls += [jax.jit(functools.partial(attention, causal=causal))]
                times: list[list[float]] = [[], []]
                for _ in range(9):
                    for call, seen in zip(calls, times):
                        start = time.perf_counter()
                        jax.block_until_ready(call(*args))
                        seen.append(1e3 * (time.perf_counter() - start))
                ours, peer = (statistics.median(seen[1:]) for seen in times)
                title = f"head {head:3d} {dtype:8s} {'causal' if causal else 'full':6s}"
                print(f"{title} {ours:6.1f} ms, jnp {peer:6.1f} ms: {peer / ours:.2f}x")


if __name__ == "__main__":
    check()
    if "--time" in sys.argv:
        race()
