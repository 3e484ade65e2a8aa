"""The Mosaic GPU kernels that ship with JAX, unmodified, on the simulated GPU: right values and no false finding.

Values are compared with the same mathematics in NumPy's float64; races are looked for. Where a kernel breaks a rule of
the Mosaic GPU reference, the test names the finding and the lines, and a mended copy of the kernel is silent. Those for
Blackwell, and for several devices, have files of their own.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dropin.gpu_ops import (
    BF16,
    F16,
    LEFT_OVER,
    SCHEDULES,
    M,
    N,
    attention,
    attention_gradients,
    close,
    exact,
    finding,
    grouped,
    grouped_transposed,
    integers,
    machine,
    normal,
    ops,
    tuning,
    warned,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cuda(installed):
    """On a machine without CUDA `cuda_versions` is None, which the attention kernels assert it is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops("attention"), "cuda_versions", types.SimpleNamespace(cuda_runtime_get_version=lambda: 12091))
        yield


# --- Hopper matmuls -----------------------------------------------------------------------------------------------
def hopper(m=256, n=256, k=192, dtype=F16, adds=False, **config):
    module = ops("hopper_matmul")
    a, b, c = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), normal(m, n, seed=1, dtype=dtype) if adds else None
    out = warned(lambda: module.matmul(a, b, c, tuning(module, **config)))
    close(out, exact(a) @ exact(b) + (exact(c) if adds else 0), 2 if adds else 1)


@pytest.mark.parametrize("cluster", [None, M, N])
@pytest.mark.parametrize("wg", [M, N])
def test_hopper_matmul(wg, cluster):
    with machine():
        hopper(wg=wg, cluster=cluster)


HOPPER = [
    dict(max_concurrent_steps=1, epi_tile_m=None, epi_tile_n=None, dtype=BF16),
    dict(max_concurrent_steps=4, minor=M, grid_tile_width=2, m=512),
    dict(tile_m=128, tile_n=128, epi_tile_m=64, epi_tile_n=32, wg=M),
    dict(tile_k=32, k=160, max_concurrent_steps=4, cluster=M),
    dict(adds=True, epi_tile_n=32),
    dict(adds=True, tile_m=128, dtype=BF16, wg=M, cluster=N, max_concurrent_steps=1),
]


@pytest.mark.parametrize("config", HOPPER, ids=str)
def test_hopper_matmul_configurations(config):
    with machine():
        hopper(**config)


def mixed(m=256, n=256, k=192, dtype=BF16, **config):
    module = ops("hopper_mixed_type_matmul")
    a, b = integers(m, k), normal(k, n, dtype=dtype)
    out = warned(lambda: module.mixed_matmul_kernel(a, b, out_dtype=dtype, config=tuning(module, **config)))
    close(out, exact(a) @ exact(b))


MIXED = [
    dict(wg=M),
    dict(wg=N, dtype=F16, max_concurrent_steps=1, epi_tile_n=32),
    dict(wg=M, cluster=M, max_concurrent_steps=4),
    dict(wg=N, cluster=N, tile_k=128, k=256, epi_tile_m=None, epi_tile_n=None),
    dict(tile_m=128, minor=M, grid_tile_width=2, m=512),
]


@pytest.mark.parametrize("config", MIXED, ids=str)
def test_hopper_mixed_type_matmul(config):
    with machine():
        mixed(**config)


# --- ragged products ----------------------------------------------------------------------------------------------
RAGGED = [
    dict(max_concurrent_steps=2),
    dict(max_concurrent_steps=4, transpose=True, k=320, grid_block_n=2),
    dict(max_concurrent_steps=2, transpose=True, block_m=128, block_n=128, sizes=(0, 1, 254, 1)),
]


def ragged(sizes=(50, 0, 150, 56), n=256, k=128, transpose=False, **blocks):
    fields = dict(block_m=64, block_n=64, block_k=64, grid_block_n=1) | blocks
    a, b = normal(sum(sizes), k), normal(len(sizes), k, n)
    rhs = jnp.swapaxes(b, 1, 2) if transpose else b
    sizes_ = jnp.array(sizes, jnp.int32)
    out = warned(lambda: ops("ragged_dot").ragged_dot(a, rhs, group_sizes=sizes_, transpose_rhs=transpose, **fields))
    close(out, grouped(a, b, sizes))


@pytest.mark.parametrize("config", RAGGED, ids=str)
def test_ragged_dot(config):
    with machine():  # it has a grid of 132 blocks, whatever the device
        ragged(**config)


TRANSPOSED = [
    dict(max_concurrent_steps=1),
    dict(max_concurrent_steps=2, sizes=(50, 0, 150, 50)),  # the last block is partly outside
    dict(max_concurrent_steps=4, block_k=128, sizes=(10, 300, 202), grid_block_n=2),
]


def transposed(sizes=(50, 0, 150, 56), m=128, n=256, **blocks):
    fields = dict(block_m=64, block_n=64, block_k=64, grid_block_n=1) | blocks
    a, b = normal(sum(sizes), m), normal(sum(sizes), n)
    call = ops("transposed_ragged_dot").transposed_ragged_dot
    close(
        warned(lambda: call(a, b, group_sizes=jnp.array(sizes, jnp.int32), **fields)), grouped_transposed(a, b, sizes)
    )


@pytest.mark.parametrize("config", TRANSPOSED, ids=str)
def test_transposed_ragged_dot(config):
    with machine():
        transposed(**config)


# --- attention ------------------------------------------------------------------------------------------------------
def operands(q_length=256, kv_length=256, batch=1, heads=2, kv_heads=1, dim=64):
    q = normal(batch, q_length, heads, dim, scale=0.5)
    return q, *(normal(batch, kv_length, kv_heads, dim, seed=s, scale=0.5) for s in (1, 2))


def attention_forward(function="attention", residuals=False, warns=(LEFT_OVER,), causal=False, schedule=True, **given):
    """The kernel ends with completions of its consumed barriers that nobody waits for."""
    module = ops("attention")
    names = ("block_q", "block_kv", "max_concurrent_steps")
    fields = dict(block_q=64, block_kv=64, max_concurrent_steps=2) | {n: given.pop(n) for n in names if n in given}
    config = module.TuningConfig(**fields, causal=causal, use_schedule_barrier=schedule)
    q, k, v = operands(**given)
    out = warned(lambda: getattr(module, function)(q, k, v, config, residuals), *warns)
    want, lse = attention(q, k, v, causal)
    if residuals:
        out, (got_lse,) = out
        np.testing.assert_allclose(got_lse, lse, atol=1e-2)
    close(out, want, 2)  # the weights are rounded to float16 too


FORWARD = [
    dict(residuals=True),
    dict(causal=True, residuals=True),
    dict(max_concurrent_steps=4, kv_length=512, heads=1),
    dict(causal=True, block_kv=128, q_length=512, kv_length=512, heads=1, dim=128),
]


@pytest.mark.parametrize("config", FORWARD, ids=str)
def test_attention(config):
    with machine():
        attention_forward(**config)


@pytest.mark.parametrize("schedule", [False, True])
def test_attention_with_pipeline_emitter(schedule):
    with machine():
        attention_forward("attention_with_pipeline_emitter", residuals=schedule, schedule=schedule, warns=(),
                          max_concurrent_steps=2 + schedule, kv_length=512)  # fmt: skip


def test_causal_attention_of_tall_blocks_has_a_thread_that_stops_waiting():
    """Thread 0 needs three blocks less of K and V than thread 1, and waits for none of them on the barriers."""
    config = dict(block_q=192, q_length=384, kv_length=384, heads=1, causal=True)
    with machine():
        finding(lambda: attention_forward(**config), "barrier-partial-waits", "plgpu.copy_gmem_to_smem(k_ref")


def attention_backward(compute_wgs, block_q=64, block_kv=64, max_concurrent_steps=2, **given):
    module = ops("attention")
    config = module.TuningConfig(
        64, 64, max_concurrent_steps, compute_wgs_bwd=compute_wgs, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip
    q, k, v = operands(**given)
    g = normal(*q.shape, seed=3)
    grads = warned(lambda: jax.vjp(lambda *a: module.attention(*a, config), q, k, v)[1](g), LEFT_OVER)
    for got, want in zip(grads, attention_gradients(q, k, v, g)):
        close(got, want, 5)


BACKWARD = [
    dict(compute_wgs=1),
    dict(compute_wgs=2, max_concurrent_steps=3, heads=1, kv_length=384),
    dict(compute_wgs=1, block_q=128, batch=2, kv_heads=2, kv_length=128),
]


@pytest.mark.parametrize("config", BACKWARD, ids=str)
def test_attention_backward(config):
    with machine():
        attention_backward(**config)


# --- other schedules --------------------------------------------------------------------------------------------------
EACH = {
    "hopper": functools.partial(hopper, cluster=M, adds=True),
    "mixed": functools.partial(mixed, wg=M, cluster=N),
    "ragged": functools.partial(ragged, max_concurrent_steps=2),
    "transposed": functools.partial(transposed, max_concurrent_steps=2),
    "attention": functools.partial(attention_forward, causal=True, residuals=True),
    "emitter": functools.partial(attention_forward, "attention_with_pipeline_emitter", warns=()),
    "backward": functools.partial(attention_backward, 2, heads=1),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EACH)
def test_under_other_schedules(name, schedule):
    with machine(schedule=schedule):
        EACH[name]()
