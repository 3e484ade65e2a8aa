"""The kernels that ship with JAX under `jax.experimental.pallas.ops`, unmodified, on the reference interpreter.

Each is compared with NumPy in float64. The tolerances follow the kernel's own arithmetic (float32, or bfloat16 inputs);
docs/dropin.md states the errors measured. Kernels without an `interpret` option run under `config.cpu = "interpret"`.
"""

import importlib
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion
from palladion import dropin

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def on_palladion():
    dropin.install()
    yield
    own = [m for m in sys.modules if m.startswith(("jax._src.pallas.pallas_call", "jax._src.pallas.primitives"))]
    assert not own, "JAX's own Pallas was loaded"
    dropin.uninstall()


@pytest.fixture
def cpu_interpret():
    with palladion.config.state("cpu")("interpret"):
        yield


def ops(name: str):
    return importlib.import_module(f"jax.experimental.pallas.ops.{name}")


def normal(seed: int, *shape: int, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def f64(x):
    return np.asarray(x, np.float64)


def assert_close(got, want, tolerance: float, record=None):
    got, want = f64(got), np.asarray(want, np.float64)
    assert got.shape == want.shape
    error = float(np.abs(got - want).max())
    if record is not None:
        record("max_error", error)
    assert error <= tolerance, f"max error {error} > {tolerance}"


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q, k, v, mask=None, scale=1.0):
    """q [..., q, d], k and v [..., kv, d], mask broadcasting to [..., q, kv]."""
    logits = np.einsum("...qd,...kd->...qk", q, k) * scale
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    return np.einsum("...qk,...kd->...qd", softmax(logits), v)


def attention_grads(q, k, v, do, mask=None, scale=1.0):
    """Gradients of sum(attention * do) in float64, written out by hand."""
    logits = np.einsum("...qd,...kd->...qk", q, k) * scale
    p = softmax(logits if mask is None else np.where(mask, logits, -np.inf))
    dv = np.einsum("...qk,...qd->...kd", p, do)
    dp = np.einsum("...qd,...kd->...qk", do, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return np.einsum("...qk,...kd->...qd", ds, k), np.einsum("...qk,...qd->...kd", ds, q), dv


# --- GPU: softmax and norms -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dtype", "tolerance"),
    [
        ((3, 100), jnp.float32, 1e-6),
        ((2, 3, 64), jnp.float32, 1e-6),
        ((5,), jnp.float32, 1e-6),
        ((4, 37), jnp.bfloat16, 4e-3),
    ],
)
def test_gpu_softmax(shape, dtype, tolerance, record_property):
    x = normal(0, *shape, dtype=dtype)
    assert_close(ops("gpu.softmax").softmax(x, interpret=True), softmax(f64(x)), tolerance, record_property)


def layer_norm(x, weight, bias, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x, weight, bias, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight + bias


def numeric_grads(f, arguments, cotangent, step=1e-6):
    """Gradients of sum(f(*arguments) * cotangent) by central differences in float64."""
    grads = []
    for n, x in enumerate(arguments):
        grad = np.zeros_like(x)
        for i in np.ndindex(x.shape):
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[i] += sign * step
                ends.append((f(*arguments[:n], moved, *arguments[n + 1 :]) * cotangent).sum())
            grad[i] = (ends[0] - ends[1]) / (2 * step)
        grads.append(grad)
    return grads


@pytest.mark.parametrize(("name", "reference"), [("layer_norm", layer_norm), ("rms_norm", rms_norm)])
@pytest.mark.parametrize("columns", [96, 256, 300])  # not a power of two, one block, more than one block of 128
def test_gpu_norm(name, reference, columns, record_property):
    x, weight, bias = normal(1, 2, 3, columns), normal(2, columns), normal(3, columns)
    got = getattr(ops(f"gpu.{name}"), name)(x, weight, bias, interpret=True)
    assert_close(got, reference(f64(x), f64(weight), f64(bias)), 5e-6, record_property)


@pytest.mark.parametrize(("name", "reference"), [("layer_norm", layer_norm), ("rms_norm", rms_norm)])
def test_gpu_norm_backward(name, reference, record_property):
    x, weight, bias, do = normal(1, 2, 3, 20), normal(2, 20), normal(3, 20), normal(4, 2, 3, 20)
    kernel = getattr(ops(f"gpu.{name}"), name)
    _, pullback = jax.vjp(lambda *args: kernel(*args, interpret=True), x, weight, bias)
    want = numeric_grads(reference, [f64(x), f64(weight), f64(bias)], f64(do))
    for got, expected in zip(pullback(do), want, strict=True):
        assert_close(got, expected, 2e-5, record_property)


# --- GPU: attention -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 24])  # 24 is padded to 32 and masked
@pytest.mark.parametrize("segments", [False, True])
def test_gpu_attention(causal, head_dim, segments, record_property):
    module = ops("gpu.attention")
    q, k, v = (normal(i, 2, 64, 2, head_dim) for i in range(3))
    ids = jnp.asarray(np.repeat([[0, 1], [0, 2]], 32, axis=1), jnp.int32) if segments else None
    mask = np.tril(np.ones((64, 64), bool))[None, None] if causal else np.ones((1, 1, 64, 64), bool)
    if segments:
        mask = mask & (np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None, :])
    sizes = module.BlockSizes(block_q=32, block_k=16)
    got = module.mha(q, k, v, ids, sm_scale=0.3, causal=causal, block_sizes=sizes, interpret=True)
    heads = [f64(x).swapaxes(1, 2) for x in (q, k, v)]
    assert_close(got, attention(*heads, mask, 0.3).swapaxes(1, 2), 5e-6, record_property)


@pytest.mark.parametrize("causal", [False, True])
def test_gpu_attention_backward(causal, record_property):
    module = ops("gpu.attention")
    q, k, v, do = (normal(i, 1, 64, 2, 24) for i in range(4))
    sizes = module.BlockSizes(block_q=32, block_k=32, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32)
    _, pullback = jax.vjp(
        lambda q, k, v: module.mha(q, k, v, None, sm_scale=0.2, causal=causal, block_sizes=sizes, interpret=True),
        q,
        k,
        v,
    )
    mask = np.tril(np.ones((64, 64), bool)) if causal else None
    heads = [f64(x).swapaxes(1, 2) for x in (q, k, v, do)]
    for got, want in zip(pullback(do), attention_grads(*heads, mask, 0.2), strict=True):
        assert_close(got, want.swapaxes(1, 2), 2e-5, record_property)


@pytest.mark.parametrize("bounded", [False, True])
def test_gpu_decode_attention_mqa(bounded, record_property):
    q, k, v = normal(0, 2, 4, 32), normal(1, 2, 128, 32), normal(2, 2, 128, 32)
    start, end = (jnp.array([0, 13], jnp.int32), jnp.array([100, 128], jnp.int32)) if bounded else (None, None)
    got = ops("gpu.decode_attention").mqa(q, k, v, start, end, block_k=32, k_splits=4, interpret=True)
    position = np.arange(128)
    mask = None
    if bounded:
        mask = ((position >= np.asarray(start)[:, None]) & (position < np.asarray(end)[:, None]))[:, None, :]
    assert_close(got, attention(f64(q), f64(k), f64(v), mask, 1 / math.sqrt(32)), 2e-6, record_property)


def test_gpu_decode_attention_gqa(record_property):
    q, k, v = normal(0, 2, 8, 32), normal(1, 2, 128, 2, 32), normal(2, 2, 128, 2, 32)
    lengths = jnp.array([128, 70], jnp.int32)
    got = ops("gpu.decode_attention").gqa(q, k, v, None, lengths, block_k=32, k_splits=2, interpret=True)
    groups = f64(q).reshape(2, 2, 4, 32)
    mask = (np.arange(128) < np.asarray(lengths)[:, None])[:, None, None, :]
    want = attention(groups, f64(k).swapaxes(1, 2), f64(v).swapaxes(1, 2), mask, 1 / math.sqrt(32))
    assert_close(got, want.reshape(2, 8, 32), 2e-6, record_property)


@pytest.mark.parametrize("k_splits", [1, 4])
def test_gpu_paged_attention(k_splits, record_property):
    page, pages = 8, 8
    rng = np.random.default_rng(7)
    q = normal(0, 2, 4, 32)
    k_pages, v_pages = normal(1, 2, 20, page, 32), normal(2, 2, 20, page, 32)
    tables = jnp.asarray(rng.permutation(20)[: 2 * pages].reshape(2, pages), jnp.int32)
    lengths = jnp.array([37, 64], jnp.int32)
    got = ops("gpu.paged_attention").paged_attention(
        q, k_pages, v_pages, tables, lengths, pages_per_compute_block=2, k_splits=k_splits, interpret=True
    )
    picked = [f64(x)[:, np.asarray(tables)].swapaxes(0, 1).reshape(2, 2, pages * page, 32) for x in (k_pages, v_pages)]
    mask = (np.arange(pages * page) < np.asarray(lengths)[:, None])[:, None, None, :]
    want = attention(f64(q).reshape(2, 2, 2, 32), *picked, mask)
    assert_close(got, want.reshape(2, 4, 32), 5e-6, record_property)


# --- TPU: products --------------------------------------------------------------------------------------------------
def test_tpu_example_kernel(cpu_interpret):
    x = normal(0, 8, 128)
    np.testing.assert_array_equal(ops("tpu.example_kernel").double(x), 2 * x)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tolerance"),
    [
        (jnp.float32, None, 1e-4),
        (jnp.bfloat16, jnp.float32, 1e-4),
        (jnp.int8, jnp.int32, 0),
    ],
)
def test_tpu_matmul(dtype, out_dtype, tolerance, cpu_interpret, record_property):
    rng = np.random.default_rng(0)
    draw = (lambda s: rng.integers(-9, 9, s)) if dtype == jnp.int8 else rng.standard_normal
    x, y = jnp.asarray(draw((128, 256)), dtype), jnp.asarray(draw((256, 128)), dtype)
    got = ops("tpu.matmul").matmul(x, y, block_shape=(64, 128), block_k=128, out_dtype=out_dtype)
    assert got.dtype == (out_dtype or dtype)
    assert_close(got, f64(x) @ f64(y), tolerance, record_property)


def grouped(lhs, rhs, sizes):
    out, start = np.zeros((lhs.shape[0], rhs.shape[2])), 0
    for g, n in enumerate(sizes):
        out[start : start + n] = lhs[start : start + n] @ rhs[g]
        start += n
    return out


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("sizes", [(40, 0, 56, 32), (128, 0, 0, 0)])
def test_tpu_megablox_gmm(transpose_rhs, sizes, record_property):
    lhs = normal(0, 128, 48)
    rhs = normal(1, 4, 40, 48) if transpose_rhs else normal(1, 4, 48, 40)
    got = ops("tpu.megablox.gmm").gmm(
        lhs, rhs, jnp.array(sizes, jnp.int32), tiling=(32, 32, 32), transpose_rhs=transpose_rhs, interpret=True
    )
    right = f64(rhs).swapaxes(1, 2) if transpose_rhs else f64(rhs)
    assert_close(got, grouped(f64(lhs), right, sizes), 5e-5, record_property)


def test_tpu_megablox_gradients(record_property):
    """The backward pass runs gmm with a transposed right side, and tgmm."""
    lhs, rhs, sizes, do = normal(0, 64, 32), normal(1, 3, 32, 40), (20, 12, 32), normal(2, 64, 40)
    gmm = ops("tpu.megablox").gmm
    groups = jnp.array(sizes, jnp.int32)
    _, pullback = jax.vjp(lambda a, b: gmm(a, b, groups, jnp.float32, (16, 16, 16), None, None, False, True), lhs, rhs)
    d_lhs, d_rhs = pullback(do)
    ends = np.cumsum((0, *sizes))
    want = np.stack([f64(lhs)[a:b].T @ f64(do)[a:b] for a, b in itertools.pairwise(ends)])
    assert_close(d_lhs, grouped(f64(do), f64(rhs).swapaxes(1, 2), sizes), 5e-5, record_property)
    assert_close(d_rhs, want, 5e-5, record_property)


# --- TPU: attention -------------------------------------------------------------------------------------------------
def flash_sizes(module, n):
    names = "block_q block_k_major block_k block_q_major_dkv block_k_major_dkv block_k_dkv block_q_dkv block_k_major_dq"
    return module.BlockSizes(block_b=1, **dict.fromkeys([*names.split(), "block_k_dq", "block_q_dq"], n))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extras", [False, True])  # an additive bias and segment ids
def test_tpu_flash_attention(causal, extras, cpu_interpret, record_property):
    module = ops("tpu.flash_attention")
    q, k, v = (normal(i, 1, 2, 256, 64) for i in range(3))
    bias, segments, mask = None, None, np.tril(np.ones((256, 256), bool)) if causal else np.ones((256, 256), bool)
    logits_bias = 0.0
    if extras:
        bias = normal(5, 1, 2, 256, 256)
        ids = np.repeat([[0, 1]], 128, axis=1)
        segments = module.SegmentIds(jnp.asarray(ids, jnp.int32), jnp.asarray(ids, jnp.int32))
        mask = mask & (ids[0][:, None] == ids[0][None])
        logits_bias = f64(bias)
    got = module.flash_attention(
        q, k, v, bias, segments, causal=causal, sm_scale=0.1, block_sizes=flash_sizes(module, 128)
    )
    logits = (np.einsum("bhqd,bhkd->bhqk", f64(q), f64(k)) + logits_bias) * 0.1
    want = np.einsum("bhqk,bhkd->bhqd", softmax(np.where(mask, logits, -np.inf)), f64(v))
    assert_close(got, want, 5e-6, record_property)


def test_tpu_flash_attention_backward(cpu_interpret, record_property):
    module = ops("tpu.flash_attention")
    q, k, v, do = (normal(i, 1, 1, 256, 128) for i in range(4))
    _, pullback = jax.vjp(
        lambda q, k, v: module.flash_attention(
            q, k, v, causal=True, sm_scale=0.1, block_sizes=flash_sizes(module, 128)
        ),
        q,
        k,
        v,
    )
    want = attention_grads(f64(q), f64(k), f64(v), f64(do), np.tril(np.ones((256, 256), bool)), 0.1)
    for got, expected in zip(pullback(do), want, strict=True):
        assert_close(got, expected, 5e-5, record_property)


def splash(kind, mask_of, save_residuals=False, **sizes):
    module, masks = (
        ops("tpu.splash_attention.splash_attention_kernel"),
        ops("tpu.splash_attention.splash_attention_mask"),
    )
    make = getattr(module, f"make_splash_{kind}_single_device")
    mask = masks.MultiHeadMask([mask_of(masks) for _ in range(2)])
    blocks = dict(block_q=128, block_kv=128, block_kv_compute=128) | sizes
    return make(mask, block_sizes=module.BlockSizes(**blocks), save_residuals=save_residuals, interpret=True)


MASKS = {
    "causal": (lambda m: m.CausalMask((256, 256)), np.tril(np.ones((256, 256), bool))),
    "full": (lambda m: m.FullMask((256, 256)), np.ones((256, 256), bool)),
    "local": (
        lambda m: m.LocalMask((256, 256), (100, 0), 0),
        np.tril(np.ones((256, 256), bool)) & ~np.tril(np.ones((256, 256), bool), -101),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_tpu_splash_attention(name, record_property):
    mask_of, mask = MASKS[name]
    q, k, v = (normal(i, 2, 256, 128) for i in range(3))
    got = splash("mha", mask_of)(q * 0.1, k, v)
    assert_close(got, attention(f64(q * 0.1), f64(k), f64(v), mask), 5e-6, record_property)


def test_tpu_splash_attention_mqa_with_segments_and_residuals(record_property):
    module = ops("tpu.splash_attention.splash_attention_kernel")
    q, k, v = normal(0, 2, 256, 128) * 0.1, normal(1, 256, 128), normal(2, 256, 128)
    ids = np.repeat([0, 1], 128)
    segments = module.SegmentIds(jnp.asarray(ids, jnp.int32), jnp.asarray(ids, jnp.int32))
    got, (lse,) = splash("mqa", MASKS["causal"][0], save_residuals=True)(q, k, v, segments)
    mask = MASKS["causal"][1] & (ids[:, None] == ids[None])
    logits = np.where(mask, np.einsum("hqd,kd->hqk", f64(q), f64(k)), -np.inf)
    assert_close(got, attention(f64(q), f64(k)[None], f64(v)[None], mask), 5e-6, record_property)
    assert_close(lse, np.log(np.exp(logits).sum(-1)), 1e-5, record_property)


@pytest.mark.parametrize("fused", [False, True])
def test_tpu_splash_attention_backward(fused, record_property):
    sizes = dict(block_q_dkv=128, block_kv_dkv=128, block_kv_dkv_compute=128, use_fused_bwd_kernel=fused)
    if not fused:
        sizes |= dict(block_q_dq=128, block_kv_dq=128)
    q, k, v, do = (normal(i, 2, 256, 128) for i in range(4))
    q = q * 0.1
    _, pullback = jax.vjp(splash("mha", MASKS["causal"][0], **sizes), q, k, v)
    want = attention_grads(f64(q), f64(k), f64(v), f64(do), MASKS["causal"][1])
    for got, expected in zip(pullback(do), want, strict=True):
        assert_close(got, expected, 5e-5, record_property)


# --- TPU: random numbers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(256, 256), (512, 256), (3, 5), (7,), (2, 256, 256)])
def test_tpu_threefry(shape, cpu_interpret):
    """The same bits as JAX's own threefry with counters that run over the whole shape."""
    module = ops("tpu.random.threefry")
    key = jax.random.key(42, impl=module.plthreefry_prng_impl)
    with jax.threefry_partitionable(True):
        want = jax.random.bits(jax.random.key(42, impl="threefry2x32"), shape)
    np.testing.assert_array_equal(jax.random.bits(key, shape), want)


def philox(hi0, lo0, hi1, lo1, key_hi, key_lo):
    """Philox 4x32-10 (Salmon et al. 2011) on Python integers, in the order of arguments that the kernel uses."""
    mask = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xCD9E8D57 * hi1, 0xD2511F53 * hi0
        hi0, lo0, hi1, lo1 = (a >> 32) ^ lo0 ^ key_hi, a & mask, (b >> 32) ^ lo1 ^ key_lo, b & mask
        key_hi, key_lo = (key_hi + 0x9E3779B9) & mask, (key_lo + 0xBB67AE85) & mask
    return hi0, lo0


@pytest.mark.parametrize("shape", [(256, 256), (3, 5), (2, 260)])
def test_tpu_philox(shape, cpu_interpret):
    module = ops("tpu.random.philox")
    key = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)
    got = np.asarray(module.philox_4x32_count(key, shape, offset=17))
    flat = got.reshape(-1)
    for n in [*range(10), len(flat) // 2, len(flat) - 1]:
        hi, lo = philox(0, n + 17, 0, 0, 0x12345678, 0x9ABCDEF0)
        assert flat[n] == hi ^ lo, n
    assert len(np.unique(flat)) >= len(flat) - 2  # a birthday or two at most


def test_tpu_philox_as_a_jax_generator(cpu_interpret):
    key = jax.random.key(3, impl=ops("tpu.random.philox").plphilox_prng_impl)
    a, b = jax.random.split(key)
    x, y = jax.random.uniform(a, (64, 64)), jax.random.uniform(b, (64, 64))
    assert abs(float(x.mean()) - 0.5) < 0.02 and abs(float(np.corrcoef(x.ravel(), y.ravel())[0, 1])) < 0.05
