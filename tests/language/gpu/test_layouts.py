"""Array layouts of the Mosaic GPU dialect: values, casts, loads and stores, and arrays whose layouts clash."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from palladion.language.gpu import layouts, mma, tcgen05
from palladion.language.gpu.layout_inference import check_layouts, layout_of, printed_layouts

L = layouts.Layout
STRIDED = L.WG_STRIDED((128, 128), vec_size=4)
FULL = (128, 128)


def traced(body, *types, out=(FULL, jnp.float32)):
    """The jaxpr of a kernel with scratch."""
    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(*out), scratch_shapes=list(types))
    return jax.make_jaxpr(call)().eqns[0].params["jaxpr"]


def smem(shape=FULL, dtype=jnp.float32):
    return plgpu.SMEM(shape, dtype)


def clash(body, *types, **kwargs):
    jaxpr = traced(body, *types, **kwargs)
    with pytest.raises(KernelFinding) as error:
        check_layouts(jaxpr)
    assert error.value.finding.kind == "illegal-layout"
    assert error.value.finding.where is not None and "test_layouts.py" in error.value.finding.where
    return error.value.finding.message


def fine(body, *types, **kwargs):
    check_layouts(traced(body, *types, **kwargs))


# --- values -----------------------------------------------------------------------------------------------------------
def test_layouts_are_hashable_values():
    assert repr(L.WGMMA) == "<Layout.WGMMA: 1>" and str(L.WGMMA) == "Layout.WGMMA"
    assert L.TMA_GATHER_INDICES is L.TMA_INDICES
    assert L.WGMMA.reduce(1) == L.WGMMA.reduce((1,)) != L.WGMMA.reduce(0)
    assert hash(L.WG_STRIDED([64], vec_size=2)) == hash(L.WG_STRIDED((64,), vec_size=2))
    assert repr(L.WGMMA.reduce(1)) == "ReducedLayout(layout=<Layout.WGMMA: 1>, axes=(1,))"
    assert str(L.TCGEN05.reduce(0)) == "Layout.TCGEN05.reduce(0)"
    assert L.WGMMA.reduce(1).reduce(0) == L.WGMMA.reduce((0, 1))
    with pytest.raises(TypeError, match="takes an axis"):
        L.WGMMA.reduce("x")


def test_find_swizzle_takes_the_widest_that_divides():
    assert [layouts.find_swizzle(8 * n) for n in (16, 32, 48, 64, 96, 128, 192, 256)] == [
        16,
        32,
        16,
        64,
        32,
        128,
        64,
        128,
    ]
    with pytest.raises(ValueError, match="No swizzle fits lhs"):
        layouts.find_swizzle(24 * 8, "lhs")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8])
def test_sparse_metadata_is_a_permutation_as_the_hardware_reads_it(dtype):
    meta = jnp.arange(256 * 128).reshape(256, 64, 2)  # K = 256
    made = np.asarray(layouts.format_tcgen05_sparse_metadata(meta, dtype))
    assert made.shape == (2, 2, 128, 64) and sorted(made.ravel()) == list(range(256 * 128))
    row, column = 128 + 21, 128 + 32 + 9  # of the metadata as (M, K // 2), K // 2 = 128
    value = int(meta.reshape(256, 128)[row, column - 128])
    if dtype == jnp.int8:
        assert made[1, 0, 21, 41] == value
    else:  # rows 8 apart share a cell, and the second 8 entries lie 8 lanes further
        assert made[1, 0, 16 + 8 + 5, 2 * 16 + 0 + 1] == value
    with pytest.raises(ValueError, match="multiples of 128"):
        layouts.format_tcgen05_sparse_metadata(meta[:100], dtype)
    with pytest.raises(TypeError, match="16-bit and 8-bit"):
        layouts.format_tcgen05_sparse_metadata(meta, jnp.float32)


# --- what a kernel writes ---------------------------------------------------------------------------------------------
def test_both_spellings_of_load_and_store():
    def body(o, s):
        a = layouts.load(s, (), layout=L.WGMMA)
        b = layouts.load(s, pl.ds(0, 64), layout=L.WGMMA)
        c = layouts.load(s.at[:64], layout=L.WGMMA, optimized=False)
        layouts.store(o, a)
        layouts.store(o, (), value=a)
        layouts.store(o, pl.ds(0, 64), b)
        layouts.store(o.at[64:], c, optimized=False)

    text = str(traced(body, smem()))
    assert text.count("layout_cast[layout=Layout.WGMMA]") == 3
    assert [text.count(f"a[{part}] <- ") for part in ("...", ":64,:", "64:,:")] == [2, 1, 1]
    with pytest.raises(TypeError, match="reads a Ref"):
        traced(lambda o, s: layouts.load(s[...]), smem())
    with pytest.raises(TypeError, match="needs a value"):
        traced(lambda o, s: layouts.store(o), smem())
    with pytest.raises(TypeError, match="optimized is True or False"):
        traced(lambda o, s: layouts.load(s, optimized=L.WGMMA), smem())


def test_iota_and_reductions_compute_as_jax_does():
    def body(o, s):
        x = layouts.broadcasted_iota(jnp.float32, FULL, 1, layout=L.WGMMA)
        rows = [f(x, axis=1, accumulator_ilp=2) for f in (layouts.sum, layouts.max, layouts.min, layouts.prod)]
        o[...] = lax.broadcast_in_dim(sum(rows), FULL, (0,)) + x

    fine(body, smem())
    with pytest.raises(ValueError, match="accumulator_ilp is a positive integer"):
        traced(lambda o, s: layouts.sum(s[...], accumulator_ilp=0), smem())
    with pytest.raises(TypeError, match="is a Ref"):
        traced(lambda o, s: layouts.max(s), smem())


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(L.WGMMA, (60, 64)), (L.WGMMA, (64, 12)), (L.WGMMA, (64,)), (L.WGMMA.reduce(1), (64, 8)), (STRIDED, (64, 64)),
     (L.TMA_INDICES, (4, 4)), (L.WGMMA_TRANSPOSED, (64, 8))],
)  # fmt: skip
def test_a_layout_that_does_not_fit_the_shape(layout, shape):
    with pytest.raises(KernelFinding, match="illegal-layout"):
        traced(lambda o, s: layouts.layout_cast(s[...], layout), smem(shape))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(L.WGMMA, (64, 8)), (L.WGMMA.reduce(1), (64,)), (L.WGMMA.reduce(0), (8,)), (STRIDED, (128, 128)),
     (L.TMA_INDICES, (32,)), (L.WGMMA_TRANSPOSED, (8, 64)), (L.WG_SPLAT((7,)), (7,))],
)  # fmt: skip
def test_a_layout_that_fits(layout, shape):
    traced(lambda o, s: layouts.store(s, layouts.layout_cast(s[...], layout)), smem(shape))


def test_what_is_no_layout():
    with pytest.raises(TypeError, match=r"is not a plgpu\.Layout"):
        traced(lambda o, s: layouts.layout_cast(s[...], layouts.TMEMLayout.SCALES_LAYOUT), smem())
    with pytest.raises(TypeError, match="is a Ref"):
        traced(lambda o, s: layouts.layout_cast(s, L.WGMMA), smem())


def test_print_layout(capsys):
    def body(o, s):
        x = layouts.load(s, layout=L.WGMMA)
        layouts.print_layout("x {}", x)
        layouts.print_layout("rows: {}", jnp.sum(x, axis=1))
        layouts.print_layout("open {}", s[...])
        layouts.print_layout("s: {}", s)

    types = plgpu.SMEM(FULL, jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)))
    assert printed_layouts(traced(body, types)) == ["x Layout.WGMMA", "rows: Layout.WGMMA.reduce(1)", "open any"]
    assert "SwizzleTransform(swizzle=128)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="with one"):
        traced(lambda o, s: layouts.print_layout("x", s), smem())


# --- arrays that meet -------------------------------------------------------------------------------------------------
LAYOUTS = [L.WGMMA, L.WGMMA_TRANSPOSED, L.TCGEN05, L.TCGEN05_TMEM_NATIVE, STRIDED]


@pytest.mark.parametrize(("a", "b"), [*itertools.product(LAYOUTS, LAYOUTS)], ids=str)
def test_two_arrays_meet(a, b):
    def body(o, s, t):
        o[...] = layouts.load(s, layout=a) * layouts.load(t, layout=b)

    if a == b:
        return fine(body, smem(), smem())
    message = clash(body, smem(), smem())
    assert str(a) in message and str(b) in message and message.count("test_layouts.py") == 2


def test_open_arrays_take_the_other_layout_and_keep_it():
    def once(o, s, t):
        o[...] = layouts.load(s, layout=L.WGMMA) + t[...] * 2.0 + lax.broadcasted_iota(jnp.float32, FULL, 0)

    def constant(o, s, t):
        x = jnp.zeros(FULL) + jnp.sum(s[0])  # a run-time scalar is a constant, too
        o[...] = layouts.load(s, layout=L.WGMMA) + x
        o[...] = layouts.load(t, layout=STRIDED) + x

    def loaded(o, s, t):
        x = o[...]
        o[...] = layouts.load(s, layout=L.WGMMA) + x
        o[...] = layouts.load(t, layout=STRIDED) + x

    fine(once, smem(), smem())
    fine(constant, smem(), smem())
    assert "WG_STRIDED" in clash(loaded, smem(), smem())


@pytest.mark.parametrize(
    ("layout", "axis", "dim", "other", "ok"),
    [(L.WGMMA, 1, 0, L.WGMMA, True), (L.WGMMA, 0, 1, L.WGMMA, True), (L.WGMMA, 1, 1, L.WGMMA, False),
     (L.WGMMA, 1, 0, STRIDED, False), (L.TCGEN05, 1, 0, L.TCGEN05, True), (L.TCGEN05, 1, 0, L.WGMMA, False)],
)  # fmt: skip
@pytest.mark.parametrize("by", ["broadcast_in_dim", "new axis", "keepdims"])
def test_reduced_and_broadcast_again(layout, axis, dim, other, ok, by):
    def body(o, s, t):
        x = layouts.load(s, layout=layout)
        if by == "keepdims":
            rows = jnp.sum(x, axis=axis, keepdims=True)
            rows = rows if dim != axis else rows.reshape(FULL[0])[None, :] if axis else rows.reshape(FULL[0])[:, None]
            spread = jnp.broadcast_to(rows, FULL)
        elif by == "new axis":
            rows = jnp.sum(x, axis=axis)
            spread = jnp.broadcast_to(rows[:, None] if dim == 0 else rows[None, :], FULL)
        else:
            spread = lax.broadcast_in_dim(jnp.sum(x, axis=axis), FULL, (dim,))
        o[...] = spread - layouts.load(t, layout=other)

    (fine if ok else clash)(body, smem(), smem())


def test_rows_and_columns_do_not_mix():
    def body(o, s, t, *, b):
        o[0] = layouts.load(s, layout=L.WGMMA.reduce(1)) + layouts.load(t, layout=b)

    vector = smem((128,))
    clash(lambda o, s, t: body(o, s, t, b=L.WGMMA.reduce(0)), vector, vector)
    fine(lambda o, s, t: body(o, s, t, b=L.WGMMA.reduce(1)), vector, vector)


@pytest.mark.parametrize("how", ["fori", "while", "cond", "select", "jit", "scope"])
@pytest.mark.parametrize("ok", [True, False])
def test_through_control_flow(how, ok):
    other = L.WGMMA if ok else STRIDED

    def body(o, s, t):
        x, y = jnp.exp(layouts.load(s, layout=L.WGMMA)), layouts.load(t, layout=other)
        if how == "fori":
            r = lax.fori_loop(0, 3, lambda i, c: c + layouts.load(t, layout=other), x)
        elif how == "while":
            r = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layouts.load(t, layout=other)), (0, x))[1]
        elif how == "cond":
            r = lax.cond(s[0, 0] > 0, lambda: x, lambda: layouts.load(t, layout=other))
        elif how == "select":
            r = jnp.where(x > 0, y, 0.0)
        elif how == "jit":
            r = jax.jit(lambda a, b: a - b)(x, y)
        else:
            r = pl.run_scoped(lambda u: x + layouts.load(u, layout=other), smem())
        o[...] = r

    (fine if ok else clash)(body, smem(), smem())


def test_a_carry_that_begins_open():
    def body(o, s, t, *, last):
        acc = lax.fori_loop(0, 3, lambda i, c: c + layouts.load(s, layout=L.WGMMA), jnp.zeros(FULL))
        o[...] = acc + layouts.load(t, layout=last)

    fine(lambda *refs: body(*refs, last=L.WGMMA), smem(), smem())
    clash(lambda *refs: body(*refs, last=STRIDED), smem(), smem())


# --- casts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("a", "b"), [*itertools.permutations(LAYOUTS, 2)], ids=str)
def test_casts_between_layouts(a, b):
    def body(o, s):
        o[...] = layouts.layout_cast(layouts.load(s, layout=a), b)

    if {a, b} == {L.WGMMA, L.WGMMA_TRANSPOSED}:
        return fine(body, smem())
    message = clash(body, smem())
    assert str(a) in message and str(b) in message


def test_casts_of_widened_values_and_of_constants():
    def body(o, s):
        x = layouts.load(s, layout=L.WGMMA_UPCAST_2X).astype(jnp.bfloat16)
        x = layouts.layout_cast(x, L.WGMMA) + layouts.layout_cast(jnp.ones(FULL, jnp.bfloat16), L.WGMMA)
        zeros = layouts.layout_cast(layouts.layout_cast(jnp.zeros(FULL), L.WG_SPLAT(FULL)), STRIDED)
        o[...] = x.astype(jnp.float32)
        o[...] = zeros

    fine(body, smem(dtype=jnp.int8))

    def uncast(o, s):
        x = layouts.load(s, layout=L.WGMMA_UPCAST_2X).astype(jnp.float32)
        o[...] = x + layouts.layout_cast(jnp.ones(FULL), L.WGMMA)

    clash(uncast, smem(dtype=jnp.int8))
    clash(
        lambda o, s: o.__setitem__(..., layouts.layout_cast(layouts.load(s, layout=L.WGMMA), L.WG_SPLAT(FULL))), smem()
    )


# --- the tensor core --------------------------------------------------------------------------------------------------
def test_accumulators_are_wgmma():
    def body(o, s, *, layout):
        x = pl.run_scoped(lambda acc: acc[...], mma.ACC(FULL))
        o[...] = x + layouts.load(s, layout=layout)

    fine(lambda *refs: body(*refs, layout=L.WGMMA), smem())
    assert "WGMMA" in clash(lambda *refs: body(*refs, layout=STRIDED), smem())

    def load(o):
        o[...] = pl.run_scoped(lambda acc: mma.wgmma_accumulator_load(acc), mma.ACC(FULL)) + layouts.broadcasted_iota(
            jnp.float32, FULL, 0, layout=L.TCGEN05
        )

    clash(load)


def test_values_of_accumulators_and_operands_in_registers():
    f16 = jnp.float16

    def body(o, s, b, *, layout):
        x = layouts.load(s, layout=layout)
        o[...] = pl.run_state(lambda acc: mma.wgmma(acc, x.astype(f16), b))(mma.ACC.init(jnp.zeros(FULL)))

    fine(lambda *refs: body(*refs, layout=L.WGMMA), smem(), smem(dtype=f16))
    assert "A of plgpu.wgmma" in clash(lambda *refs: body(*refs, layout=STRIDED), smem(), smem(dtype=f16))

    def init(o, s, *, layout):
        o[...] = pl.run_state(lambda acc: None)(mma.ACC.init(layouts.load(s, layout=layout)))

    fine(lambda *refs: init(*refs, layout=L.WGMMA), smem())
    assert "ACC.init" in clash(lambda *refs: init(*refs, layout=STRIDED), smem())


@pytest.mark.parametrize(
    ("layout", "other", "ok"),
    [(None, L.TCGEN05, True), (None, L.TCGEN05_TMEM_NATIVE, True), (None, L.WGMMA, False), (None, STRIDED, False),
     (L.TCGEN05, L.TCGEN05, True), (L.TCGEN05, L.TCGEN05_TMEM_NATIVE, False)],
)  # fmt: skip
def test_loads_of_tensor_memory(layout, other, ok):
    def body(o, t, s):
        o[...] = tcgen05.async_load_tmem(t, layout=layout) + layouts.load(s, layout=other)

    (fine if ok else clash)(body, plgpu.TMEM(FULL, jnp.float32), smem())


def test_stores_to_tensor_memory():
    def body(o, t, s, *, layout):
        tcgen05.async_store_tmem(t, layouts.load(s, layout=layout))

    tmem = plgpu.TMEM(FULL, jnp.float32)
    fine(lambda *refs: body(*refs, layout=L.TCGEN05), tmem, smem())
    fine(lambda o, t, s: tcgen05.async_store_tmem(t, s[...]), tmem, smem())
    clash(lambda *refs: body(*refs, layout=STRIDED), tmem, smem())


def test_layout_of_a_result():
    def f(s):
        return layouts.load(s, layout=L.WGMMA) + 1.0

    found = []

    def body(o, s):
        found.append(s)
        o[...] = f(s)

    jaxpr = traced(body, smem())
    casts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add"]
    inner = jaxpr.replace(outvars=[casts[0].outvars[0]], debug_info=jaxpr.debug_info.with_unknown_names())
    assert layout_of(inner) is L.WGMMA
