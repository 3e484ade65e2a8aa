"""The Mosaic GPU kernels that ship with JAX, unmodified, on the simulated GPU: right values and no false finding.

Values are compared with the same mathematics in NumPy's float64; races are looked for. Where a kernel breaks a rule of
the Mosaic GPU reference, the test names the finding and the lines, and a mended copy of the kernel is silent.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dropin.gpu_ops import (
    BF16,
    F16,
    F32,
    along,
    attention,
    attention_gradients,
    close,
    exact,
    finding,
    grouped,
    grouped_transposed,
    integers,
    machine,
    mended,
    normal,
    on_devices,
    ops,
    warned,
)  # fmt: skip
from palladion import dropin

M, N = 0, 1  # MatmulDimension
LEFT_OVER = "barrier-unwaited-completion"


@pytest.fixture(scope="module", autouse=True)
def installed():
    dropin.install()
    with pytest.MonkeyPatch.context() as patch:
        # On a machine without CUDA it is None, which the kernel asserts it is not.
        patch.setattr(ops("attention"), "cuda_versions", types.SimpleNamespace(cuda_runtime_get_version=lambda: 12091))
        yield
    dropin.uninstall()


# --- Hopper matmuls -----------------------------------------------------------------------------------------------
def tuning(module, wg=N, cluster=None, minor=N, **sizes):
    dim = module.MatmulDimension
    fields = dict(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2) | sizes
    return module.TuningConfig(
        **fields, wg_dimension=dim(wg), cluster_dimension=None if cluster is None else dim(cluster),
        grid_minor_dim=dim(minor),
    )  # fmt: skip


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


# --- Blackwell matmuls ----------------------------------------------------------------------------------------------
# The thread that stores ends while its last copy still reads SMEM.
STORES_END = (
    "        plgpu.barrier_arrive(store_done_barrier.at[acc_slot])\n",
    "        plgpu.barrier_arrive(store_done_barrier.at[acc_slot])\n    plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
)
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


MANY = dict(m=1024, n=512)  # tiles for each cluster: more than the four that nothing is reused for


def test_blackwell_matmul_of_two_blocks_may_complete_a_barrier_twice():
    with machine():
        once = mended("blackwell_matmul", STORES_END)
        found = "plgpu.barrier_arrive(store_done_barrier"
        finding(blackwell(ops("blackwell_matmul"), True, **MANY)[2], "barrier-double-completion", found)
        a, b, call = blackwell(
            mended("blackwell_matmul", STORES_END, (WAIT, "False"), thread_waits(" " * 8)), True, **MANY
        )
        close(warned(call, LEFT_OVER), exact(a) @ exact(b))
        a, b, call = blackwell(once, False, **MANY)
        close(warned(call, LEFT_OVER), exact(a) @ exact(b))


# --- ragged products ------------------------------------------------------------------------------------------------
def blackwell_ragged(module, sizes=(100, 0, 375, 37), n=256, k=128, minor=N, **tiles):
    fields = dict(tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, epilogue_tile_n=32, grid_tile_width=1)
    dim = ops("blackwell_matmul").MatmulDimension(minor)
    config = module.TuningConfig(collective=True, grid_minor_dim=dim, **(fields | tiles))
    a, b = normal(sum(sizes), k), normal(len(sizes), k, n)
    call = functools.partial(module.ragged_dot_kernel, a, b, jnp.array(sizes, jnp.int32), config)
    return call, grouped(a, b, sizes)


def test_blackwell_ragged_dot_overwrites_what_the_second_block_reads():
    """Its store_done_barrier is each block's own, but the leader's product writes the TMEM of both."""
    with machine():
        call, want = blackwell_ragged(ops("blackwell_ragged_dot"))
        finding(call, "tmem-in-flight", "plgpu.tcgen05_mma(")
    for config in ({}, dict(max_concurrent_steps=4, minor=M, grid_tile_width=2, k=256, sizes=(1, 200, 311, 0))):
        call, want = blackwell_ragged(ops("blackwell_ragged_dot"), **config)
        with machine(on_race="warn"):
            close(warned(call, "tmem-in-flight", LEFT_OVER), want)
        barrier = (
            "store_done_barrier=plgpu.Barrier(",
            'store_done_barrier=plgpu.ClusterBarrier(collective_axes=("x",), ',
        )
        module = mended("blackwell_ragged_dot", barrier, (WAIT, "False"), thread_waits(" " * 4))
        call, want = blackwell_ragged(module, **config)
        with machine():
            close(warned(call, LEFT_OVER), want)


def test_blackwell_ragged_dot_is_for_two_blocks_only():
    """Without `collective` its body asks for a cluster's axis that the kernel does not have, in JAX too."""
    module = ops("blackwell_ragged_dot")
    dim = ops("blackwell_matmul").MatmulDimension(N)
    config = module.TuningConfig(128, 64, 64, 2, collective=False, grid_tile_width=1, grid_minor_dim=dim)
    with machine(), pytest.raises(NameError, match="unbound axis name: x"):
        module.ragged_dot_kernel(normal(256, 64), normal(2, 64, 64), jnp.array([100, 156], jnp.int32), config)


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


# --- several devices --------------------------------------------------------------------------------------------------
# These three leave counts on their semaphores: they wait without taking off.
def collective_matmul(dtype=F16, m=512, n=512, k=128, **config):
    module = ops("collective_matmul")
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    call = functools.partial(module.all_gather_lhs_matmul, axis_name="x", config=tuning(module, **config), dtype=dtype)
    call = on_devices(call, jax.device_count(), (P("x", None), P(None, "x")), P(None, "x"))
    close(warned(lambda: call(a, b), "semaphore-leftover"), exact(a) @ exact(b))


@pytest.mark.parametrize(
    "config", [{}, dict(wg=M, dtype=BF16, max_concurrent_steps=4, k=320, grid_tile_width=2)], ids=str
)
def test_collective_matmul(config):
    with machine(num_sms=2):
        collective_matmul(**config)


def all_gather(shape, axis, dtype, **options):
    x = normal(*shape, dtype=dtype) if jnp.issubdtype(dtype, jnp.floating) else integers(*shape, dtype=dtype)
    call = functools.partial(ops("all_gather").all_gather, axis_name="x", gather_dimension=axis, **options)
    call = on_devices(call, 2, along(axis, len(shape)), P())
    np.testing.assert_array_equal(warned(lambda: call(x), "semaphore-leftover"), x)


GATHERS = [((64, 128), 0, F32, {}), ((4, 8, 256), 1, BF16, {}), ((16, 256), 1, jnp.int32, dict(tile_size=256))]


@pytest.mark.parametrize(("shape", "axis", "dtype", "options"), GATHERS)
def test_all_gather(shape, axis, dtype, options):
    with machine():
        all_gather(shape, axis, dtype, **options)


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor}  # fmt: skip


def reduce_scatter(shape, axis, dtype, reduction="add", **options):
    x = (normal if jnp.issubdtype(dtype, jnp.floating) else integers)(2, *shape, dtype=dtype)
    call = functools.partial(
        ops("reduce_scatter").reduce_scatter, axis_name="x", scatter_dimension=axis, reduction=reduction, **options
    )
    call = on_devices(lambda x: call_(x[0]), 2, P("x"), along(axis, len(shape))) if (call_ := call) else call
    ours = exact(x) if jnp.issubdtype(dtype, jnp.floating) else np.asarray(x)
    want = REDUCTIONS[reduction](ours[0], ours[1])
    out = warned(lambda: call(x), "semaphore-leftover")
    if dtype == jnp.int32:
        np.testing.assert_array_equal(out, want)
    else:
        close(out, want)


SCATTERS = [
    ((64, 128), 0, F32, "add", {}),
    ((64, 128), None, F32, "add", {}),  # an all-reduce
    ((4, 8, 256), 1, BF16, "max", {}),
    ((4, 8, 256), 2, F16, "min", dict(num_blocks=3)),
    ((16, 256), 0, jnp.int32, "xor", dict(tile_size=256)),
    ((16, 256), 0, jnp.int32, "and", {}),
]


@pytest.mark.parametrize(("shape", "axis", "dtype", "reduction", "options"), SCATTERS)
def test_reduce_scatter(shape, axis, dtype, reduction, options):
    with machine():
        reduce_scatter(shape, axis, dtype, reduction, **options)


# --- other schedules --------------------------------------------------------------------------------------------------
EACH = {
    "hopper": functools.partial(hopper, cluster=M, adds=True),
    "mixed": functools.partial(mixed, wg=M, cluster=N),
    "ragged": functools.partial(ragged, max_concurrent_steps=2),
    "transposed": functools.partial(transposed, max_concurrent_steps=2),
    "attention": functools.partial(attention_forward, causal=True, residuals=True),
    "emitter": functools.partial(attention_forward, "attention_with_pipeline_emitter", warns=()),
    "backward": functools.partial(attention_backward, 2, heads=1),
    "collective": functools.partial(collective_matmul, m=256, n=512, k=128),
    "all_gather": functools.partial(all_gather, (16, 128), 0, F32, num_blocks=4),
    "reduce_scatter": functools.partial(reduce_scatter, (16, 128), 0, F32, num_blocks=4),
}


@pytest.mark.parametrize("schedule", ["eager", 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EACH)
def test_under_other_schedules(name, schedule):
    with machine(schedule=schedule, num_sms=2 if name == "collective" else 4):
        EACH[name]()


@pytest.mark.parametrize("schedule", ["eager", 1, pytest.param(2, marks=pytest.mark.slow)])
def test_blackwell_under_other_schedules(schedule):
    with machine(schedule=schedule):
        for module, collective in ((mended("blackwell_matmul", STORES_END), False),
                                   (mended("blackwell_matmul", STORES_END, (WAIT, "False"), thread_waits(" " * 8)), True)):  # fmt: skip
            a, b, call = blackwell(module, collective, **MANY)
            close(warned(call, LEFT_OVER), exact(a) @ exact(b))
