"""The TPU kernels that ship with JAX, unmodified, on the simulated TPU: right values and no finding.

Values are compared with the same mathematics in jnp or NumPy; races are looked for. The slow ones are the backward
passes and ragged paged attention.
"""

import contextlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from palladion import dropin
from palladion import tpu as pltpu

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def on_the_simulated_tpu():
    dropin.install()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    dropin.uninstall()


def ops(name: str):
    return importlib.import_module(f"jax.experimental.pallas.ops.tpu.{name}")


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def attention(q, k, v, scale=1.0):
    """Causal attention of (heads, length, dimension)."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k, precision="highest") * scale
    scores = jnp.where(jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool), scores, -1e30)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v, precision="highest")


def gradients(f, *args):
    return jax.grad(lambda *a: jnp.sum(f(*a) ** 2), argnums=(0, 1, 2))(*args)


def test_matmul():
    a, b = normal(256, 512), normal(512, 256)
    out = ops("matmul").matmul(a, b, block_shape=(128, 128))
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), atol=2e-4)


def flash(q, k, v):
    module = ops("flash_attention")
    sizes = {f: 1 if f == "block_b" else 128 for f in module.BlockSizes.__dataclass_fields__}
    call = module.flash_attention
    return call(q[None], k[None], v[None], causal=True, sm_scale=0.1, block_sizes=module.BlockSizes(**sizes))[0]


QKV = tuple(normal(2, 256, 128, seed=s) for s in range(3))


def test_flash_attention():
    np.testing.assert_allclose(flash(*QKV), attention(*QKV, 0.1), atol=2e-5)


@pytest.mark.slow
def test_flash_attention_backward():
    for got, want in zip(gradients(flash, *QKV), gradients(lambda *a: attention(*a, 0.1), *QKV)):
        np.testing.assert_allclose(got, want, atol=2e-4)


def splash(q, k, v):
    kernels, masks = (ops(f"splash_attention.splash_attention_{m}") for m in ("kernel", "mask"))
    mask = masks.MultiHeadMask([masks.CausalMask((256, 256)) for _ in range(2)])
    names = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq"
    sizes = kernels.BlockSizes(**dict.fromkeys(names.split(), 128))
    return kernels.make_splash_mha(mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)(q * 0.1, k, v)


def test_splash_attention():
    np.testing.assert_allclose(splash(*QKV), attention(*QKV, 0.1), atol=2e-5)


@pytest.mark.slow
def test_splash_attention_backward():
    for got, want in zip(gradients(splash, *QKV), gradients(lambda *a: attention(*a, 0.1), *QKV)):
        np.testing.assert_allclose(got, want, atol=5e-4)


def test_grouped_matmul():
    gmm = ops("megablox.gmm")
    x, w, sizes = normal(256, 128), normal(4, 128, 128), np.array([64, 0, 100, 92], np.int32)
    out = gmm.gmm(x, w, jnp.asarray(sizes), preferred_element_type=jnp.float32)
    group = np.repeat(np.arange(4), sizes)
    want = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), np.asarray(w, np.float64)[group])
    np.testing.assert_allclose(out, want, atol=2e-4)


def test_paged_attention():
    batch, heads, groups, dim, page, pages = 2, 8, 2, 128, 16, 16
    q = normal(batch, heads, dim) * 0.1
    k, v = normal(groups, pages * batch, page, dim), normal(groups, pages * batch, page, dim, seed=1)
    lengths, table = np.array([100, 200]), np.random.default_rng(0).permutation(pages * batch).reshape(batch, pages)
    out = ops("paged_attention.paged_attention_kernel").paged_attention(
        q, k, v, jnp.asarray(lengths, jnp.int32), jnp.asarray(table, jnp.int32), pages_per_compute_block=4
    )
    for b in range(batch):
        for h in range(heads):
            keys, values = (
                np.asarray(x, np.float64)[h * groups // heads][table[b]].reshape(-1, dim)[: lengths[b]] for x in (k, v)
            )
            scores = np.exp(keys @ np.asarray(q[b, h], np.float64))
            # The kernel itself rounds keys and values to bfloat16.
            np.testing.assert_allclose(out[b, h], scores / scores.sum() @ values, atol=0.02)


@pytest.mark.slow
def test_ragged_paged_attention():
    kernel = ops("ragged_paged_attention.kernel")
    q, pages = normal(32, 4, 128), normal(64, 16, 4, 128)
    table = jnp.asarray(np.random.default_rng(0).permutation(64)[:24].reshape(3, 8), jnp.int32)
    args = q, pages, jnp.array([40, 20, 100]), table, jnp.array([0, 5, 25, 26]), jnp.array([3])
    out = kernel.ragged_paged_attention(*args, sm_scale=0.1, num_kv_pages_per_block=4, num_queries_per_block=16)
    want = kernel.ref_ragged_paged_attention(*args, sm_scale=0.1)
    np.testing.assert_allclose(out[:26], want[:26], atol=2e-5)


def test_all_gather():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(32, 128)
    out = ops("all_gather").all_gather(x, mesh=mesh, axis_name="x", memory_space=pltpu.VMEM)
    np.testing.assert_array_equal(out, x)


def register(name: str):
    """Import a module that registers a generator, which it can do once in a process: the other test file may have."""
    with contextlib.suppress(ValueError):
        ops(name)


def test_random_bits():
    register("random.threefry")
    ours = jax.random.bits(jax.random.key(3, impl="pallas_threefry2x32"), (8, 256))
    np.testing.assert_array_equal(ours, jax.random.bits(jax.random.key(3, impl="threefry2x32"), (8, 256)))


def test_philox_and_the_example():
    register("random.philox")
    first, second = (jax.random.bits(jax.random.key(s, impl="pallas_philox4x32"), (8, 256)) for s in (3, 4))
    assert (first != second).mean() > 0.99
    x = normal(256, 256)
    np.testing.assert_array_equal(ops("example_kernel").double(x), 2 * x)
