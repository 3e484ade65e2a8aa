"""tcgen05: tensor memory and the products that accumulate in it: what is accepted, what is refused."""

import jax
import jax.numpy as jnp
import pytest

from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from palladion.language.gpu import layouts, tcgen05
from palladion.language.gpu.barriers import Barrier

f16, bf16, f32, i8, i32 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int8, jnp.int32
f8, f8b, f4, e8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu
TMEM, ORDERED = plgpu.TMEM, Barrier(orders_tensor_core=True)
SCALES = layouts.TMEMLayout.SCALES_LAYOUT


def traced(body, *types, cluster=None):
    options = dict(cluster=cluster, cluster_names=("x",)) if cluster else {}
    call = plgpu.kernel(body, out_shape=jax.ShapeDtypeStruct((8, 128), f32), scratch_shapes=list(types), **options)
    return str(jax.make_jaxpr(call)())


def smem(shape, dtype=f16, swizzle=128):
    if swizzle is None:
        return plgpu.SMEM(shape, dtype)
    width = 8 * swizzle // jax.dtypes.itemsize_bits(jnp.dtype(dtype))
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def product(acc, a, b, *, tb=False, collective=False, scales=None, sparse=None, **options):
    def body(o, d, x, y, *more):
        kwargs = dict(zip(("a_scale", "b_scale"), more)) if scales else {}
        kwargs |= {"a_sparse_metadata": more[-1]} if sparse else {}
        axis = "x" if collective else None
        tcgen05.tcgen05_mma(d, x, y.transpose((1, 0)) if tb else y, collective_axis=axis, **kwargs, **options)

    more = [*(scales or ()), *([sparse] if sparse else [])]
    return traced(body, acc, a, b, *more, cluster=(2,) if collective else None)


def refused(kind, words, *args, **kwargs):
    with pytest.raises(KernelFinding, match=words) as error:
        product(*args, **kwargs)
    finding = error.value.finding
    assert finding.kind == kind and finding.hint and "test_tcgen05.py" in finding.where


def acc(m, n, dtype=f32, **options):
    return TMEM((m, n), dtype, packed=None if dtype in (f32, i32) else False, **options)


# --- products ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("m", "n", "k", "ok"),
    [(128, 128, 64, True), (64, 64, 64, True), (128, 512, 128, True), (128, 520, 64, False), (128, 24, 64, True),
     (128, 20, 64, False), (128, 128, 32, False), (128, 128, 96, False)],
)  # fmt: skip
def test_sizes(m, n, k, ok):
    b = smem((n, k), swizzle=128 if n % 8 == 0 and k % 64 == 0 else None)
    a = smem((m, k), swizzle=128 if k % 64 == 0 else 32)
    if k % 64:
        args, tb = (acc(m, n), a, smem((k, n))), False  # N last, in tiles of 64
    else:
        args, tb = (acc(m, n), a, b), True
    product(*args, tb=tb) if ok else refused("illegal-shape", "N is|K is", *args, tb=tb)


@pytest.mark.parametrize(
    ("m", "n", "ok"), [(128, 128, True), (64, 128, True), (128, 256, True), (128, 272, False), (128, 24, False)]
)
def test_sizes_of_collective_products(m, n, ok):
    """Sizes of a block: M is half of the product's, B has half of its columns."""
    swizzle = 128 if n // 2 % 8 == 0 else None
    args = acc(m, n, collective=True), smem((m, 64)), smem((n // 2, 64), swizzle=swizzle)
    if ok:
        assert "collective_axis=x" in product(*args, tb=True, collective=True)
    else:
        refused("illegal-shape", f"N is {n}", *args, tb=True, collective=True)
    if ok:  # the same buffers do not fit a product of one block
        refused("illegal-shape", "shapes do not agree", *args, tb=True)


def test_shapes_must_agree():
    refused("illegal-shape", "shapes do not agree", acc(128, 64), smem((128, 64)), smem((64, 128)))
    refused("illegal-shape", "M // 2", acc(128, 128), smem((128, 64)), smem((64, 128)), collective=True)
    refused("illegal-shape", "3 dimensions", TMEM((2, 128, 128), f32), smem((128, 64)), smem((64, 128)))


@pytest.mark.parametrize(
    ("a", "b", "d", "ok"),
    [(f16, f16, f32, True), (f16, f16, f16, True), (bf16, bf16, f32, True), (f8, f8, f32, True), (f8b, f8b, f16, True),
     (f8, f8b, f32, True), (i8, i8, i32, True), (bf16, bf16, f16, False), (f32, f32, f32, False), (i8, i8, f32, False),
     (f16, bf16, f32, False), (f4, f4, f32, False), (f8, f8, bf16, False)],
)  # fmt: skip
def test_dtypes(a, b, d, ok):
    args = acc(128, 128, d), smem((128, 256), a), smem((128, 256), b)
    product(*args, tb=True) if ok else refused("illegal-shape", "is|no scales|supported", *args, tb=True)


def test_eight_bits_may_be_transposed_but_not_by_odd_columns():
    product(acc(128, 128), smem((128, 128), f8), smem((128, 128), f8))
    product(acc(128, 24), smem((128, 128), f8), smem((24, 128), f8), tb=True)
    refused("illegal-shape", "N is 24", acc(128, 24), smem((128, 128), f8), smem((128, 24), f8, None))
    refused("illegal-shape", "N is 40", acc(128, 40, i32), smem((128, 128), i8), smem((40, 128), i8), tb=True)


def test_memories_and_packing():
    packed, b = TMEM((128, 64), f16, packed=True), smem((64, 128))
    product(acc(128, 128), packed, b)
    refused("illegal-layout", "A in TMEM is always packed", acc(128, 128), TMEM((128, 64), f16, packed=False), b)
    product(acc(128, 128, f16), smem((128, 64)), b)
    refused("illegal-layout", "never packed", TMEM((128, 128), f16, packed=True), smem((128, 64)), b)
    refused("illegal-layout", "accumulator .* not in TMEM", smem((128, 128), f32), smem((128, 64)), b)
    refused("illegal-layout", "B is always in SMEM", acc(128, 64), smem((128, 128)), TMEM((128, 64), f16, packed=True))
    with pytest.raises(KernelFinding, match="A is in SMEM, or packed in TMEM"):
        traced(lambda o, d, y: tcgen05.tcgen05_mma(d, jnp.zeros((128, 64), f16), y), acc(128, 128), b)


def test_tiles():
    product(acc(128, 128), smem((128, 64), swizzle=64), smem((64, 128)))
    product(acc(128, 128), smem((128, 64), swizzle=None), smem((64, 128), swizzle=None))
    wrong = plgpu.SMEM((128, 64), f16, transforms=(plgpu.TilingTransform((16, 64)), plgpu.SwizzleTransform(128)))
    refused("illegal-layout", "tiles of", acc(128, 128), wrong, smem((64, 128)))


def test_scaled_products():
    def scales(dtype=e8, block=32, m=128, n=128, k=256):
        return TMEM((m, k // block), dtype, layout=SCALES), TMEM((n, k // block), dtype, layout=SCALES)

    d, a, b = acc(128, 128), smem((128, 256), f8), smem((128, 256), f8)
    product(d, a, b, tb=True, scales=scales())
    half = smem((128, 256), f4), smem((128, 256), f4)
    product(d, *half, tb=True, scales=scales())
    product(d, *half, tb=True, scales=scales(f8, 16))
    refused("illegal-shape", "should have shape", d, a, b, tb=True, scales=scales(block=16))
    refused("illegal-shape", "another dtype", d, a, b, tb=True, scales=scales(f8, 32))
    refused(
        "illegal-shape", "have no scales", acc(128, 128), smem((128, 256)), smem((128, 256)), tb=True, scales=scales()
    )
    refused("illegal-shape", "float32", acc(128, 128, f16), a, b, tb=True, scales=scales())
    refused("illegal-shape", "M is 64", acc(64, 128), smem((64, 256), f8), b, tb=True, scales=scales(m=64))
    here = plgpu.SMEM((128, 8), e8)
    refused("illegal-layout", "not in TMEM", d, a, b, tb=True, scales=(here, scales()[1]))
    with pytest.raises(ValueError, match="b_scale is missing"):
        traced(lambda o, d, x, y, s: tcgen05.tcgen05_mma(d, x, y, a_scale=s), d, a, b, scales()[0])


def test_sparse_products():
    meta = TMEM((128, 128), jnp.uint2, layout=layouts.TMEMLayout.SPARSE_METADATA_LAYOUT)
    d, a, b = acc(128, 128), smem((128, 128)), smem((256, 128))
    product(d, a, b, sparse=meta)
    refused("illegal-shape", "shapes do not agree", d, smem((128, 256)), b, sparse=meta)
    other = TMEM((128, 64), jnp.uint2, layout=layouts.TMEMLayout.SPARSE_METADATA_LAYOUT)
    refused("illegal-shape", "should have shape", d, a, b, sparse=other)
    refused("illegal-layout", "must be in TMEM", d, a, b, sparse=plgpu.SMEM((128, 128), jnp.uint2))


def test_accumulate_and_barriers():
    types = acc(128, 128), smem((128, 64)), smem((64, 128))

    def body(o, d, a, b, bar, bars):
        tcgen05.tcgen05_mma(d, a, b, bar, accumulate=False)
        tcgen05.tcgen05_mma(d, a, b, bars.at[1], accumulate=o[0, 0] > 0)
        tcgen05.tcgen05_commit_arrive(bars.at[0], predicate=o[0, 0] > 0)
        tcgen05.tcgen05_commit(bar)

    text = traced(body, *types, ORDERED, Barrier(num_barriers=2, orders_tensor_core=True))
    assert "accumulate False" in text and text.count("tcgen05_commit_arrive") == 2
    for use in (
        lambda d, a, b, bar: tcgen05.tcgen05_mma(d, a, b, bar),
        lambda d, a, b, bar: tcgen05.tcgen05_commit(bar),
    ):
        traced(lambda o, *refs: use(*refs), *types, ORDERED)
        with pytest.raises(KernelFinding, match="does not order tensor core operations") as error:
            traced(lambda o, *refs: use(*refs), *types, Barrier())
        assert error.value.finding.kind == "missing-fence"
        with pytest.raises(ValueError, match="takes one barrier"):
            traced(lambda o, *refs: use(*refs), *types, Barrier(num_barriers=2, orders_tensor_core=True))
        with pytest.raises(TypeError, match="a barrier, not"):
            traced(lambda o, d, a, b: use(d, a, b, a), *types)
    with pytest.raises(TypeError, match="must be a bool"):
        traced(lambda o, d, a, b: tcgen05.tcgen05_mma(d, a, b, accumulate=1), *types)
    with pytest.raises(ValueError, match="cluster axes"):
        traced(lambda o, d, a, b: tcgen05.tcgen05_mma(d, a, b, collective_axis="y"), *types)


# --- tensor memory ----------------------------------------------------------------------------------------------------
def test_loads_and_stores():
    def body(o, t):
        tcgen05.async_store_tmem(t, jnp.ones((128, 64)))
        tcgen05.async_store_tmem(t.at[:, :32], jnp.ones((128, 32)))
        tcgen05.commit_tmem()
        assert tcgen05.async_load_tmem(t.at[:, 32:]).shape == (128, 32)
        value, rows = tcgen05.async_load_tmem(t, layout=layouts.Layout.TCGEN05, reduce="max")
        assert value.shape == (128, 64) and rows.shape == (128,)
        tcgen05.wait_load_tmem()

    text = traced(body, TMEM((128, 64), f32))
    assert text.count("async_store_tmem") == 2 and text.count("async_load_tmem") == 2 and "reduce=max" in text
    with pytest.raises(ValueError, match="cannot store"):
        traced(lambda o, t: tcgen05.async_store_tmem(t, jnp.ones((64, 64))), TMEM((128, 64), f32))
    with pytest.raises(ValueError, match="cannot store"):
        traced(lambda o, t: tcgen05.async_store_tmem(t, jnp.ones((128, 64), f16)), TMEM((128, 64), f32))
    with pytest.raises(ValueError, match="reduce is"):
        traced(lambda o, t: tcgen05.async_load_tmem(t, reduce="sum"), TMEM((128, 64), f32))
    with pytest.raises(KernelFinding, match="must be in TMEM"):
        traced(lambda o, s: tcgen05.async_load_tmem(s), plgpu.SMEM((128, 64), f32))


@pytest.mark.parametrize(
    "use",
    [lambda t: t[...], lambda t: t.at[:64][...], lambda t: t.at[:, 0].get(), lambda t: t.swap(jnp.zeros((128, 64)))],
)
def test_tensor_memory_is_not_read_by_brackets(use):
    with pytest.raises(TypeError, match=r"is in TMEM[\s\S]*async_(load|store)_tmem"):
        traced(lambda o, t: (use(t), None)[1], TMEM((128, 64), f32))
    traced(lambda o, t: (use(t), None)[1], plgpu.SMEM((128, 64), f32))


def test_tensor_memory_and_barriers_are_not_written_by_brackets():
    def write(o, t):
        t[...] = jnp.zeros(t.shape)

    traced(write, plgpu.SMEM((128, 64), f32))
    with pytest.raises(TypeError, match=r"Cannot write .* is in TMEM[\s\S]*async_store_tmem"):
        traced(write, TMEM((128, 64), f32))
    with pytest.raises(TypeError, match=r"is a barrier, not data[\s\S]*barrier_wait"):
        traced(lambda o, b: b[...], Barrier())
    with pytest.raises(TypeError, match="is a barrier, not data"):
        traced(lambda o, b: b.at[0][...], Barrier(num_barriers=2))


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "ok"),
    [((128, 64), f32, {}, True), ((2, 128, 64), f32, {}, True), ((64, 512), f32, {}, True), ((32, 64), f32, {}, False),
     ((128,), f32, {}, False), ((128, 64), f16, {}, False), ((128, 64), f16, dict(packed=False), True),
     ((256, 4), e8, dict(layout=SCALES), True), ((250, 4), e8, dict(layout=SCALES), False),
     ((128, 64), jnp.uint2, dict(layout=layouts.TMEMLayout.SPARSE_METADATA_LAYOUT), True),
     ((128, 64), f32, dict(layout=layouts.Layout.WGMMA), False)],
)  # fmt: skip
def test_buffers_in_tensor_memory(shape, dtype, options, ok):
    if ok:
        assert TMEM(shape, dtype, **options).get_ref_aval().storage.layout is options.get("layout")
    else:
        with pytest.raises((ValueError, TypeError), match="TMEM buffer"):
            TMEM(shape, dtype, **options)
    with pytest.raises(ValueError, match="describe buffers in TMEM"):
        plgpu.SMEM((128, 64), f32, layout=SCALES)


@pytest.mark.parametrize(
    ("copy", "smem_shape", "tmem", "kind"),
    [(tcgen05.async_copy_smem_to_tmem, (128, 64), ((128, 64), i32), "plain"),
     (tcgen05.async_copy_scales_to_tmem, (2, 1, 32, 16), ((256, 4), e8, SCALES), "scales"),
     (tcgen05.async_copy_sparse_metadata_to_tmem, (1, 2, 128, 64),
      ((128, 128), jnp.uint2, layouts.TMEMLayout.SPARSE_METADATA_LAYOUT), "sparse_metadata")],
)  # fmt: skip
def test_copies_from_shared_memory(copy, smem_shape, tmem, kind):
    shape, dtype, *layout = tmem
    there = TMEM(shape, dtype, **(dict(layout=layout[0]) if layout else {}))
    assert f"kind={kind}" in traced(lambda o, s, t: copy(s, t), plgpu.SMEM(smem_shape, dtype), there)
    with pytest.raises(KernelFinding, match="cannot copy"):
        traced(lambda o, s, t: copy(s, t), plgpu.SMEM((*smem_shape[:-1], 8), dtype), there)
    with pytest.raises(KernelFinding, match="cannot copy"):
        traced(lambda o, s, t: copy(s, t), plgpu.SMEM(smem_shape, f32), there)
    with pytest.raises(KernelFinding, match="must be in TMEM"):
        traced(lambda o, s, t: copy(s, s), plgpu.SMEM(smem_shape, dtype), there)


def test_outside_a_kernel():
    with pytest.raises(ValueError, match="inside a kernel"):
        tcgen05.wait_load_tmem()
