"""wgmma and mma: what they accept, what they refuse and at which line; accumulators and `run_state`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from palladion.language.gpu import layouts, mma

f16, bf16, f32, i8, i32 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int8, jnp.int32
f8, f8b = jnp.float8_e4m3fn, jnp.float8_e5m2


def traced(body, *types):
    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((64, 64), f32), scratch_shapes=list(types))
    return jax.make_jaxpr(call)().eqns[0].params["jaxpr"]


def smem(shape, dtype=f16, swizzle=128, tile=None):
    """A buffer for wgmma; swizzle None: without transforms, `tile` () without tiles."""
    if swizzle is None and tile is None:
        return plgpu.SMEM(shape, dtype)
    width = 8 * (swizzle or 16) // jax.dtypes.itemsize_bits(jnp.dtype(dtype))
    tiles = () if tile == () else (plgpu.TilingTransform(tile or (8, width)),)
    return plgpu.SMEM(shape, dtype, transforms=(*tiles, *([plgpu.SwizzleTransform(swizzle)] if swizzle else [])))


def product(a, b, acc, *, ta=False, tb=False, regs=False):
    def body(o, x, y):
        def run(d):
            left = x.transpose((1, 0)) if ta else x[...] if regs else x
            mma.wgmma(d, left, y.transpose((1, 0)) if tb else y)

        pl.run_scoped(run, acc)

    return traced(body, a, b)


def refused(kind, words, *args, **kwargs):
    with pytest.raises(KernelFinding, match=words) as error:
        product(*args, **kwargs)
    finding = error.value.finding
    assert finding.kind == kind and finding.level == "error" and finding.hint
    assert "test_mma.py" in finding.where


OK = (smem((64, 64)), smem((64, 64)), mma.ACC((64, 64)))


# Each product with a near twin: kind of the finding and words of the message, or None.
@pytest.mark.parametrize(
    ("m", "n", "k", "kind"),
    [(64, 64, 64, None), (128, 256, 128, None), (64, 8, 64, None), (64, 64, 16, "illegal-shape"),
     (32, 64, 64, "illegal-shape"), (96, 64, 64, "illegal-shape"), (64, 264, 64, "illegal-shape"),
     (64, 256, 64, None), (64, 12, 64, "illegal-shape"), (64, 64, 96, "illegal-shape"), (0, 64, 64, "illegal-shape")],
)  # fmt: skip
def test_sizes(m, n, k, kind):
    # (K, N) lies in tiles of 8 rows as wide as N allows, so that only the size is wrong.
    a = smem((m, k), swizzle=128 if k % 64 == 0 else 32)
    swizzle = 128 if k == 16 or k == 96 else next((s for s in (128, 64, 32, 16) if n % (s // 2) == 0), None)
    b = smem((k, 64), swizzle=swizzle) if n == 64 else smem((n, k), swizzle=128 if n % 8 == 0 else None)
    args = a, b, mma.ACC((m, n))
    if kind is None:
        product(*args, tb=n != 64)
    else:
        refused(kind, "is", *args, tb=n != 64)


def test_shapes_must_agree():
    product(*OK)
    refused("illegal-shape", "shapes do not agree", smem((64, 64)), smem((128, 64)), mma.ACC((64, 64)))
    refused("illegal-shape", "shapes do not agree", smem((128, 64)), smem((64, 64)), mma.ACC((64, 64)))
    refused("illegal-shape", "shapes do not agree", smem((64, 64)), smem((64, 64)), mma.ACC((64, 128)))
    refused("illegal-shape", "3 dimensions", smem((2, 64, 64)), smem((64, 64)), mma.ACC((64, 64)))


@pytest.mark.parametrize(
    ("a", "b", "acc", "ok"),
    [(f16, f16, f32, True), (f16, f16, f16, True), (bf16, bf16, f32, True), (f32, f32, f32, True), (i8, i8, i32, True),
     (f8, f8, f32, True), (f8, f8b, f16, True), (jnp.uint8, jnp.uint8, i32, True),
     (bf16, bf16, f16, False), (bf16, bf16, bf16, False), (f16, bf16, f32, False), (f32, f32, f16, False),
     (i8, i8, f32, False), (jnp.int16, jnp.int16, i32, False), (f8, f8, bf16, False), (i8, jnp.uint8, i32, False)],
)  # fmt: skip
def test_dtypes(a, b, acc, ok):
    args = smem((64, 128), a), smem((64, 128), b), mma.ACC((64, 64), acc)
    product(*args, tb=True) if ok else refused("illegal-shape", "is|supported", *args, tb=True)


@pytest.mark.parametrize(("n", "ok"), [(8, True), (24, True), (32, True), (40, False), (48, True), (72, False)])
def test_columns_of_integer_products(n, ok):
    args = smem((64, 128), i8), smem((n, 128), i8), mma.ACC((64, n), i32)
    product(*args, tb=True) if ok else refused("illegal-shape", f"N is {n}", *args, tb=True)


@pytest.mark.parametrize("swizzle", [128, 64, 32, 16, None])
def test_each_swizzle(swizzle):
    product(smem((64, 64), swizzle=swizzle), smem((64, 64), swizzle=swizzle), mma.ACC((64, 64)))


@pytest.mark.parametrize(
    ("swizzle", "tile", "shape", "ok"),
    [(128, (8, 64), (64, 64), True), (128, (16, 64), (64, 64), False), (64, (8, 32), (64, 64), True),
     (64, (4, 32), (64, 64), False), (None, (8, 64), (64, 64), False), (None, (8, 8), (64, 64), True),
     (128, (), (64, 64), True)],
)  # fmt: skip
def test_tiles_are_as_wide_as_the_swizzle(swizzle, tile, shape, ok):
    k = shape[1]
    args = smem(shape, swizzle=swizzle, tile=tile), smem((k, 64)), mma.ACC((64, 64))
    product(*args) if ok else refused("illegal-layout", "tiles", *args)
    turned = smem((k, 64)), smem(shape, swizzle=swizzle, tile=tile), mma.ACC((k, k))
    if k == 64:
        product(*turned) if ok else refused("illegal-layout", "tiles", *turned)


def test_slices_are_whole_tiles():
    def body(o, a, b, *, width):
        def run(acc):
            mma.wgmma(acc, a, b.at[:, pl.ds(0, width)])

        pl.run_scoped(run, mma.ACC((64, width)))

    traced(lambda *refs: body(*refs, width=64), smem((64, 64)), smem((64, 128)))
    with pytest.raises(KernelFinding, match="not a whole number of tiles"):
        traced(lambda *refs: body(*refs, width=32), smem((64, 64)), smem((64, 128)))


def test_transposed_operands():
    product(smem((64, 128)), smem((64, 64)), mma.ACC((128, 64)), ta=True)
    product(smem((64, 64)), smem((128, 64)), mma.ACC((64, 128)), tb=True)
    product(smem((64, 128), f32), smem((128, 128), f32), mma.ACC((64, 128)), tb=True)
    product(smem((64, 64), f32, None), smem((64, 64), f32, None), mma.ACC((64, 64)), tb=True)
    refused("illegal-layout", "K first", smem((64, 128), f32), smem((128, 128), f32), mma.ACC((64, 128)))
    refused("illegal-layout", "K first", smem((64, 64), f32, None), smem((64, 64), f32, None), mma.ACC((64, 64)))
    refused(
        "illegal-layout", "K first", smem((128, 64), f32), smem((64, 128), f32), mma.ACC((64, 64)), ta=True, tb=True
    )
    refused("illegal-layout", "K first", smem((64, 128), i8), smem((128, 128), i8), mma.ACC((64, 128), i32))
    product(smem((64, 128), i8), smem((128, 128), i8), mma.ACC((64, 128), i32), tb=True)


def test_a_transposed_view_of_one_buffer_among_several():
    def body(o, a, b, *, dtype):
        def run(acc):
            mma.wgmma(acc, a.at[1], b.at[1].T)
            mma.wgmma(acc, a.at[1], b.transpose((0, 2, 1)).at[0])
            mma.wgmma(acc, a.at[0].T.T, b.at[0].reshape(64, 64).T)

        pl.run_scoped(run, mma.ACC((64, 64)))

    traced(lambda *refs: body(*refs, dtype=f32), smem((2, 64, 64), f32), smem((2, 64, 64), f32))

    def wrong(o, a, b):
        pl.run_scoped(lambda acc: mma.wgmma(acc, a.at[1], b.at[1].T.T), mma.ACC((64, 64)))

    with pytest.raises(KernelFinding, match="K first"):
        traced(wrong, smem((2, 64, 64), f32), smem((2, 64, 64), f32))


def test_memories():
    product(*OK, regs=True)

    def body(o, a, b, t, *, which):
        def run(acc):
            places = {"acc": (a, a, b), "b": (acc, a, b[...]), "a": (acc, t, b), "gmem": (acc, a, o), "ok": (acc, a, b)}
            mma.wgmma(*places[which])

        pl.run_scoped(run, mma.ACC((64, 64)))

    types = (*OK[:2], plgpu.TMEM((64, 64), f16, packed=True))
    traced(lambda *refs: body(*refs, which="ok"), *types)
    for which, words in (("acc", "register accumulator"), ("b", "B .* registers"), ("a", "A .* TMEM")):
        with pytest.raises(KernelFinding, match=words) as error:
            traced(lambda *refs: body(*refs, which=which), *types)
        assert error.value.finding.kind == "illegal-layout"
    with pytest.raises(TypeError, match="neither a Ref nor an array"):
        traced(lambda o, a: pl.run_scoped(lambda acc: mma.wgmma(acc, a, None), mma.ACC((64, 64))), smem((64, 64)))


# --- accumulators -----------------------------------------------------------------------------------------------------
def test_accumulator_types():
    assert mma.ACC is mma.WGMMAAccumulatorRef
    ref = mma.ACC([64, 128]).get_ref_aval()
    assert ref.shape == (64, 128) and ref.dtype == f32 and not ref.storage.init
    with pytest.raises(TypeError, match="two integers"):
        mma.ACC(64)
    with pytest.raises(TypeError, match="takes an array"):
        mma.ACC.init(3.0)
    with pytest.raises(ValueError, match=r"argument of pl\.run_state"):
        traced(lambda o: pl.run_scoped(lambda acc: None, mma.ACC.init(jnp.zeros((64, 64)))))


def test_run_state_of_accumulators_and_arrays():
    seen = {}

    def body(o, a, b):
        def step(refs):
            seen.update(init=refs["acc"].storage.init)
            mma.wgmma(refs["acc"], a, b)
            refs["n"][...] = refs["n"][...] + 1

        out = pl.run_state(step)({"acc": mma.ACC.init(jnp.ones((64, 64))), "n": jnp.zeros((), i32)})
        o[...] = out["acc"] + out["n"].astype(f32)

    text = str(traced(body, *OK[:2]))
    assert seen["init"] and text.count("wgmma_accumulator_init") == 1 and "Ref<regs>{i32[]}" in text
    assert text.index("wgmma_accumulator_init") < text.index("wgmma acc")
    with pytest.raises(ValueError, match="should return None"):
        traced(lambda o: pl.run_state(lambda acc: 1)(mma.ACC.init(jnp.ones((64, 64)))))


def test_run_state_of_arrays_in_a_kernel_is_as_ever():
    def body(x, o):
        def add(refs):
            refs[0][...] += x[...]

        o[...] = pl.run_state(add)((jnp.ones((8,), f32),))[0]

    x = np.arange(8, dtype=np.float32)
    y = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8,), f32), interpret=True)(x)
    np.testing.assert_array_equal(y, x + 1)


def test_waits_and_loads():
    def body(o, a, b):
        def run(acc):
            mma.wgmma(acc, a, b)
            mma.wgmma_wait(1)
            return mma.wgmma_accumulator_load(acc, wait_n=None) + mma.wgmma_accumulator_load(acc) + acc[...]

        o[...] = pl.run_scoped(run, mma.ACC((64, 64)))

    text = str(traced(body, *OK[:2]))
    assert "wgmma_wait[n=1]" in text and text.count("wgmma_accumulator_load") == 2
    with pytest.raises(ValueError, match="cannot be negative"):
        traced(lambda o: mma.wgmma_wait(-1))
    with pytest.raises(TypeError, match=r"reads a plgpu\.ACC"):
        traced(lambda o, a: mma.wgmma_accumulator_load(a), smem((64, 64)))
    with pytest.raises(ValueError, match="inside a kernel"):
        mma.wgmma_wait(0)


# --- mma of arrays ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b", "acc", "kind"),
    [(((64, 16), f16), ((16, 8), f16), ((64, 8), f32), None), (((64, 32), i8), ((32, 8), i8), ((64, 8), i32), None),
     (((64, 16), f16), ((16, 8), bf16), ((64, 8), f32), "illegal-shape"),
     (((64, 8), f16), ((8, 8), f16), ((64, 8), f32), "illegal-shape"),
     (((64, 16), f16), ((8, 16), f16), ((64, 8), f32), "illegal-shape"),
     (((32, 16), f16), ((16, 8), f16), ((32, 8), f32), "illegal-shape")],
)  # fmt: skip
def test_mma_of_arrays(a, b, acc, kind):
    def body(o):
        out = mma.mma(*(jnp.zeros(*x) for x in (acc, a, b)))
        assert out.shape == acc[0] and out.dtype == acc[1]

    if kind is None:
        traced(body)
        return
    with pytest.raises(KernelFinding) as error:
        traced(body)
    assert error.value.finding.kind == kind


def test_mma_takes_no_refs():
    with pytest.raises(KernelFinding, match="not an array"):
        traced(lambda o, a: mma.mma(jnp.zeros((64, 64)), a, jnp.zeros((64, 64), f16)), smem((64, 64)))
    assert layouts.Layout.MMA_ACC.value == 20
