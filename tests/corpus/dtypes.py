"""Every dtype: arithmetic, casts, and what blocks read outside the array.

The expectation computes in float64 (or in the integers' own width, wrapping) and is rounded once. For the 8-
and 16-bit floats the kernel computes in float32 and rounds once, so these results are bitwise too.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from .case import case, integers, normal, sds

_FLOATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int8", "int16", "uint8", "uint16", "uint32")


def _row_call(pl, kernel, shape, dtypes, options, n_in=2):
    spec = pl.BlockSpec((4, shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        tuple(sds(shape, d) for d in dtypes),
        grid=(pl.cdiv(shape[0], 4),),
        in_specs=[spec] * n_in,
        out_specs=(spec,) * len(dtypes),
        **options,
    )


def _float_case(dtype):
    """Sum and product by way of float32, data movement, and comparison, in a narrow float dtype."""

    def build(pl, pltpu, **options):
        def kernel(x_ref, y_ref, sum_ref, product_ref, select_ref, less_ref, wide_ref):
            x, y = x_ref[...], y_ref[...]
            wide_x, wide_y = x.astype(jnp.float32), y.astype(jnp.float32)
            sum_ref[...] = (wide_x + wide_y).astype(dtype)
            product_ref[...] = (wide_x * wide_y).astype(dtype)
            select_ref[...] = jnp.where(wide_x > 0, x, y)
            less_ref[...] = x < y
            wide_ref[...] = wide_x

        return _row_call(pl, kernel, (11, 16), (dtype, dtype, dtype, "bool", "float32"), options)

    def expect(x, y):
        return x + y, x * y, np.where(x > 0, x, y), x < y, x.astype("float32")

    build.__name__ = f"arithmetic_{dtype}"
    return case(
        inputs=lambda rng: (
            normal(rng, 11, 16, dtype=jnp.dtype(dtype)),
            normal(rng, 11, 16, dtype=jnp.dtype(dtype)),
        ),
        expect=expect,
        out=dtype,
        tags=f"dtype:{dtype} dtype:bool block:int grid:1d grid:ragged",
    )(build)


arithmetic_bfloat16, arithmetic_float16, arithmetic_float8_e4m3fn, arithmetic_float8_e5m2 = map(_float_case, _FLOATS)


def _integer_case(dtype):
    """Wrapping sum and product, shifts and bits, division, minimum, in an integer dtype."""
    info = np.iinfo(dtype)

    def operations(x, y):
        return x + y, x * y, x - y, x & y, x ^ y, x >> 1, x // 3, x % 5

    def build(pl, pltpu, **options):
        def kernel(x_ref, y_ref, *o_refs):
            x, y = x_ref[...], y_ref[...]
            for o_ref, value in zip(
                o_refs, (*operations(x, y), jnp.minimum(x, y), jnp.max(x, axis=1, keepdims=True) - x)
            ):
                o_ref[...] = value

        return _row_call(pl, kernel, (11, 16), (dtype,) * 10, options)

    def expect(x, y):
        return *operations(x, y), np.minimum(x, y), x.max(1, keepdims=True) - x

    def inputs(rng):
        return tuple(integers(rng, 11, 16, low=info.min, high=int(info.max) + 1, dtype=dtype) for _ in range(2))

    build.__name__ = f"arithmetic_{dtype}"
    return case(inputs=inputs, expect=expect, tags=f"dtype:{dtype} block:int grid:1d grid:ragged")(build)


arithmetic_int8, arithmetic_int16, arithmetic_uint8, arithmetic_uint16, arithmetic_uint32 = map(
    _integer_case, _INTEGERS
)


@case(
    inputs=lambda rng: (
        integers(rng, 8, 16, low=-8, high=8, dtype=ml_dtypes.int4),
        integers(rng, 8, 16, low=0, high=16, dtype=ml_dtypes.uint4),
    ),
    expect=lambda x, y: (
        x,
        y.astype("int32"),
        (x.astype("int32") * y),
        np.where(x < 0, -1, 7).astype(ml_dtypes.int4),
    ),
    tags="dtype:int4 dtype:uint4 dtype:int8 block:int grid:1d",
)
def four_bit_integers(pl, pltpu, **options):
    """int4 and uint4 operands widened in the block, and an int4 result."""

    def kernel(x_ref, y_ref, wide_ref, unsigned_ref, product_ref, narrow_ref):
        x, y = x_ref[...].astype(jnp.int32), y_ref[...].astype(jnp.int32)
        wide_ref[...] = x.astype(jnp.int8)
        unsigned_ref[...] = y
        product_ref[...] = x * y
        narrow_ref[...] = jnp.where(x < 0, -1, 7).astype(jnp.int4)

    return _row_call(pl, kernel, (8, 16), ("int8", "int32", "int32", "int4"), options)


@case(
    inputs=lambda rng: (rng.integers(0, 2, (11, 16)).astype(bool), rng.integers(0, 2, (11, 16)).astype(bool)),
    expect=lambda x, y: (x & y, x | ~y, x ^ y, np.where(x, 2.5, y), x.astype("int32") + y),
    tags="dtype:bool block:int grid:1d grid:ragged",
)
def arithmetic_bool(pl, pltpu, **options):
    def kernel(x_ref, y_ref, and_ref, or_ref, xor_ref, float_ref, int_ref):
        x, y = x_ref[...], y_ref[...]
        and_ref[...] = x & y
        or_ref[...] = x | ~y
        xor_ref[...] = x ^ y
        float_ref[...] = jnp.where(x, 2.5, y.astype(jnp.float32))
        int_ref[...] = x.astype(jnp.int32) + y

    return _row_call(pl, kernel, (11, 16), ("bool", "bool", "bool", "float32", "int32"), options)


@case(
    inputs=lambda rng: (normal(rng, 11, 16, dtype="float64"), normal(rng, 11, 16, dtype="float64")),
    expect=lambda x, y: (x + y, x * y, x / y, np.sqrt(np.abs(x)), x.astype("float32")),
    out="float64",
    tags="dtype:float64 x64 block:int grid:1d grid:ragged",
)
def arithmetic_float64(pl, pltpu, **options):
    def kernel(x_ref, y_ref, sum_ref, product_ref, quotient_ref, root_ref, narrow_ref):
        x, y = x_ref[...], y_ref[...]
        sum_ref[...] = x + y
        product_ref[...] = x * y
        quotient_ref[...] = x / y
        root_ref[...] = jnp.sqrt(jnp.abs(x))
        narrow_ref[...] = x.astype(jnp.float32)

    dtypes = ("float64",) * 4 + ("float32",)
    return _row_call(pl, kernel, (11, 16), dtypes, options)


@case(
    inputs=lambda rng: (normal(rng, 16, 24, dtype="float64"), normal(rng, 24, 8, dtype="float64")),
    expect=lambda a, b: (a @ b, np.exp(a)),
    rtol=1e-13,
    atol=1e-13,
    out="float64",
    tags="dtype:float64 x64 prim:dot prim:math control:fori control:when grid:1d index:ds order block:int",
)
def kernel_float64(pl, pltpu, **options):
    """A product, a loop and a program id under 64-bit types: indices may be of either width."""

    def kernel(a_ref, b_ref, o_ref, e_ref):
        def body(k, acc):
            return acc + a_ref[:, pl.ds(k * 8, 8)] @ b_ref[pl.ds(k * 8, 8), :]

        o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(pl.program_id(0) >= 0)
        def _():
            o_ref[...] += lax.fori_loop(0, 3, body, jnp.zeros((4, 8), jnp.float64))

        e_ref[...] = jnp.exp(a_ref[...])

    return pl.pallas_call(
        kernel,
        (sds((16, 8), "float64"), sds((16, 24), "float64")),
        grid=(4,),
        in_specs=[pl.BlockSpec((4, 24), lambda i: (i, 0)), pl.BlockSpec((24, 8), lambda i: (0, 0))],
        out_specs=(pl.BlockSpec((4, 8), lambda i: (i, 0)), pl.BlockSpec((4, 24), lambda i: (i, 0))),
        **options,
    )


@case(
    inputs=lambda rng: (
        rng.integers(-(2**62), 2**62, (11, 16)),
        rng.integers(0, 2**63, (11, 16), dtype="uint64"),
    ),
    expect=lambda x, y: (
        x * 3,
        x // 7,
        x ^ (x >> 5),
        y * np.uint64(5),
        y >> np.uint64(60),
        y.astype("int64") - x,
    ),
    tags="dtype:int64 dtype:uint64 x64 block:int grid:1d grid:ragged",
)
def arithmetic_int64(pl, pltpu, **options):
    def kernel(x_ref, y_ref, *o_refs):
        x, y = x_ref[...], y_ref[...]
        values = (x * 3, x // 7, x ^ (x >> 5), y * 5, y >> 60, y.astype(jnp.int64) - x)
        for o_ref, value in zip(o_refs, values):
            o_ref[...] = value

    dtypes = ("int64", "int64", "int64", "uint64", "uint64", "int64")
    return _row_call(pl, kernel, (11, 16), dtypes, options)


_CAST_TO = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32", "uint8", "bool")


def _cast(x, dtype):
    if dtype in _FLOATS:
        return x.astype("float32").astype(jnp.dtype(dtype))
    return (x != 0) if dtype == "bool" else np.trunc(x).astype(dtype)


@case(
    inputs=lambda rng: (np.abs(np.round(normal(rng, 8, 32, scale=30.0) * 64) / 64).clip(0, 127),),
    expect=lambda x: tuple(_cast(x, d) for d in _CAST_TO),
    tags="block:int grid:1d dtype:bool " + " ".join(f"dtype:{d}" for d in _CAST_TO),
)
def casts_from_float32(pl, pltpu, **options):
    """float32 to everything: floats round to nearest even, integers truncate."""

    def kernel(x_ref, *o_refs):
        for o_ref in o_refs:
            o_ref[...] = x_ref[...].astype(o_ref.dtype)

    return _row_call(pl, kernel, (8, 32), _CAST_TO, options, n_in=1)


def _cast_sources(rng):
    return tuple(integers(rng, 8, 16, low=0, high=100, dtype=jnp.dtype(d)) for d in (*_FLOATS, *_INTEGERS))


@case(
    inputs=_cast_sources,
    expect=lambda *xs: tuple(v for x in xs for v in (x.astype("float64"), x.astype("int32"))),
    tags="block:int grid:1d " + " ".join(f"dtype:{d}" for d in (*_FLOATS, *_INTEGERS)),
)
def casts_to_float32(pl, pltpu, **options):
    """Everything to float32 and to int32."""

    def kernel(*refs):
        inputs, outputs = refs[: len(refs) // 3], refs[len(refs) // 3 :]
        for k, x_ref in enumerate(inputs):
            outputs[2 * k][...] = x_ref[...].astype(jnp.float32)
            outputs[2 * k + 1][...] = x_ref[...].astype(jnp.int32)

    n = len(_FLOATS) + len(_INTEGERS)
    return _row_call(pl, kernel, (8, 16), ("float32", "int32") * n, options, n_in=n)


_FILL = ("float32", "bfloat16", "float16", "float8_e5m2", "int8", "int16", "int32", "uint8", "uint32", "bool")


def _fill(dtype):
    if dtype == "bool":
        return False
    return np.nan if dtype.startswith(("float", "bfloat")) else np.iinfo(dtype).min


def _filled(*xs):
    out = []
    for x, name in zip(xs, _FILL):
        dtype = jnp.dtype(name)
        block = np.full((2, 4), _fill(name)).astype(dtype)
        block[0], block[1, 0] = x[:4].astype(dtype), x[4].astype(dtype)
        out += [block, np.full(3, _fill(name)).astype(dtype)]
    return tuple(out)


@case(
    inputs=lambda rng: tuple(integers(rng, 5, low=0, high=2, dtype=jnp.dtype(d)) for d in _FILL),
    expect=_filled,
    tags="block:int block:none grid:1d grid:ragged padding uninit " + " ".join(f"dtype:{d}" for d in _FILL),
)
def fill_of_every_dtype(pl, pltpu, **options):
    """Outside the array, and in an output that nothing writes: NaN, the lowest integer, False."""
    n = len(_FILL)

    def kernel(*refs):
        for k in range(n):
            refs[n + 2 * k][...] = refs[k][...]

    block = pl.BlockSpec((4,), lambda i: (i,))
    outputs, specs = [], []
    for dtype in _FILL:
        outputs += [sds((2, 4), dtype), sds((3,), dtype)]
        specs += [pl.BlockSpec((None, 4), lambda i: (i, 0)), pl.BlockSpec((3,), lambda i: (0,))]
    return pl.pallas_call(kernel, tuple(outputs), grid=(2,), in_specs=[block] * n, out_specs=tuple(specs), **options)
