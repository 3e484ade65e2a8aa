"""Elementwise kernels: arithmetic, the mathematical functions, comparisons and bits, block by block.

Additions, products, quotients and roots of float32 are expected bitwise: float64 rounded once gives the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from .case import case, integers, normal, sds, uniform


@case(
    inputs=lambda rng: (normal(rng, 8), normal(rng, 8)),
    expect=lambda x, y: x + y,
    tags="block:whole grid:absent index:ellipsis",
)
def add_whole(pl, pltpu, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(kernel, sds((8,)), **options)


@case(
    inputs=lambda rng: (normal(rng, 37, 53), normal(rng, 37, 53)),
    expect=lambda x, y: x + y,
    tags="block:int grid:2d grid:ragged index:ellipsis",
)
def add_blocks_prime(pl, pltpu, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((8, 16), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        sds((37, 53)),
        grid=(pl.cdiv(37, 8), pl.cdiv(53, 16)),
        in_specs=[spec, spec],
        out_specs=spec,
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 64, 256), normal(rng, 64, 256)),
    expect=lambda x, y: (x * y, x / y, x - y),
    tags="block:int grid:2d index:ellipsis",
)
def arithmetic_three_outputs(pl, pltpu, **options):
    def kernel(x_ref, y_ref, m_ref, q_ref, d_ref):
        x, y = x_ref[...], y_ref[...]
        m_ref[...] = x * y
        q_ref[...] = x / y
        d_ref[...] = x - y

    spec = pl.BlockSpec((16, 128), lambda i, j: (i, j))
    shape = sds((64, 256))
    return pl.pallas_call(
        kernel,
        (shape, shape, shape),
        grid=(4, 2),
        in_specs=[spec, spec],
        out_specs=(spec, spec, spec),
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 1000), normal(rng, 1), normal(rng, 1)),
    expect=lambda x, a, b: a * x + b,
    rtol=1e-6,
    atol=1e-6,
    tags="block:int grid:1d grid:ragged grid:constant index:ellipsis",
)
def axpy_scalars_as_blocks(pl, pltpu, **options):
    def kernel(x_ref, a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] * x_ref[...] + b_ref[...]

    one = pl.BlockSpec((1,), lambda i: (0,))
    row = pl.BlockSpec((128,), lambda i: (i,))
    return pl.pallas_call(
        kernel, sds((1000,)), grid=(pl.cdiv(1000, 128),), in_specs=[row, one, one], out_specs=row, **options
    )


@case(
    inputs=lambda rng: (normal(rng, 1, 1), normal(rng, 1, 1)),
    expect=lambda x, y: np.maximum(x, y) - np.minimum(x, y),
    tags="block:int grid:2d grid:one index:ellipsis",
)
def size_one(pl, pltpu, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.maximum(x_ref[...], y_ref[...]) - jnp.minimum(x_ref[...], y_ref[...])

    spec = pl.BlockSpec((1, 1), lambda i, j: (i, j))
    return pl.pallas_call(kernel, sds((1, 1)), grid=(1, 1), in_specs=[spec, spec], out_specs=spec, **options)


def _unary(name, functions, reference, inputs, tags, rtol=2e-6, atol=0.0):
    """A case with one output a function, for a table of (function in JAX, function in NumPy)."""

    def build(pl, pltpu, **options):
        def kernel(x_ref, *o_refs):
            x = x_ref[...]
            for f, o_ref in zip(functions, o_refs):
                o_ref[...] = f(x)

        spec = pl.BlockSpec((4, 128), lambda i: (i, 0))
        n = len(functions)
        return pl.pallas_call(kernel, (sds((16, 128)),) * n, grid=4, in_specs=[spec], out_specs=(spec,) * n, **options)

    build.__name__ = name
    return case(inputs=inputs, expect=lambda x: tuple(f(x) for f in reference), tags=tags, rtol=rtol, atol=atol)(build)


exp_log = _unary(
    "exp_log",
    (jnp.exp, jnp.exp2, jnp.expm1, jnp.log, jnp.log1p, jnp.log2),
    (np.exp, np.exp2, np.expm1, np.log, np.log1p, np.log2),
    lambda rng: (uniform(rng, 16, 128, low=0.01, high=20.0),),
    "prim:math grid:int",
    atol=2e-7,
)

trigonometric = _unary(
    "trigonometric",
    (jnp.sin, jnp.cos, jnp.tan, jnp.arcsin, jnp.arccos, jnp.arctan, lambda x: jnp.arctan2(x, x - 0.5)),
    (np.sin, np.cos, np.tan, np.arcsin, np.arccos, np.arctan, lambda x: np.arctan2(x, x - 0.5)),
    lambda rng: (uniform(rng, 16, 128, low=-0.99, high=0.99),),
    "prim:math grid:int",
    rtol=3e-6,
    atol=5e-7,
)

hyperbolic = _unary(
    "hyperbolic",
    (jnp.sinh, jnp.cosh, jnp.tanh, jnp.arcsinh, lambda x: jnp.arccosh(jnp.abs(x) + 1.5), jax.nn.sigmoid),
    (np.sinh, np.cosh, np.tanh, np.arcsinh, lambda x: np.arccosh(np.abs(x) + 1.5), scipy.special.expit),
    lambda rng: (normal(rng, 16, 128, scale=3.0),),
    "prim:math control:jit grid:int",
    rtol=5e-6,
    atol=1e-6,
)

error_functions = _unary(
    "error_functions",
    (lax.erf, lax.erfc, lambda x: lax.erf_inv(0.9 * lax.tanh(x)), lax.lgamma),
    (
        scipy.special.erf,
        scipy.special.erfc,
        lambda x: scipy.special.erfinv(0.9 * np.tanh(x)),
        scipy.special.gammaln,
    ),
    lambda rng: (uniform(rng, 16, 128, low=0.1, high=4.0),),
    "prim:math grid:int",
    rtol=2e-5,
    atol=2e-6,
)

powers = _unary(
    "powers",
    (jnp.sqrt, lax.rsqrt, jnp.cbrt, lambda x: x**3, lambda x: x**-2, lambda x: x**1.7, jnp.reciprocal),
    (
        np.sqrt,
        lambda x: x**-0.5,
        np.cbrt,
        lambda x: x**3,
        lambda x: x**-2.0,
        lambda x: x**1.7,
        lambda x: 1 / x,
    ),
    lambda rng: (uniform(rng, 16, 128, low=0.05, high=9.0),),
    "prim:math grid:int",
)


def _sign(x):
    return np.where(x == 0, x, np.sign(x))  # XLA keeps the sign of a zero, NumPy does not


rounding = _unary(
    "rounding",
    (jnp.floor, jnp.ceil, jnp.round, jnp.trunc, jnp.sign, jnp.abs, lambda x: jnp.clip(x, -1.5, 2.0)),
    (np.floor, np.ceil, np.round, np.trunc, _sign, np.abs, lambda x: np.clip(x, -1.5, 2.0)),
    lambda rng: ((np.round(8 * rng.standard_normal((16, 128))) / 4).astype("float32"),),
    "prim:math grid:int",
    rtol=0.0,
)

activations = _unary(
    "activations",
    (jax.nn.relu, jax.nn.silu, jax.nn.gelu, jax.nn.softplus, jax.nn.elu, lambda x: jax.nn.leaky_relu(x, 0.1)),
    (
        lambda x: np.maximum(x, 0),
        lambda x: x * scipy.special.expit(x),
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        lambda x: np.logaddexp(x, 0),
        lambda x: np.where(x > 0, x, np.expm1(x)),
        lambda x: np.where(x > 0, x, 0.1 * x),
    ),
    lambda rng: (normal(rng, 16, 128, scale=2.0),),
    "prim:math control:custom control:jit grid:int",
    rtol=5e-6,
    atol=1e-6,
)

_SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-30, -2.5, 0.5], "float32")


def _copysign(x, y):
    return np.where(np.signbit(y), -np.abs(x), np.abs(x))


@case(
    inputs=lambda rng: (np.repeat(_SPECIAL, 12).reshape(12, 12), np.tile(_SPECIAL, (12, 1))),
    expect=lambda x, y: (
        np.where(x == y, 1.0, np.maximum(x, y)),
        np.where(x < y, x, y),
        _copysign(x, y),
        np.isfinite(x) & ~np.isnan(y),
        np.signbit(y),
        x + y,
        -x,
    ),
    tags="prim:math dtype:bool grid:absent",
)
def special_values(pl, pltpu, **options):
    """NaN, infinities and signed zeros go through selections and sums unchanged."""

    def kernel(x_ref, y_ref, *o_refs):
        x, y = x_ref[...], y_ref[...]
        values = (
            jnp.where(x == y, 1.0, jnp.maximum(x, y)),  # the larger of 0.0 and -0.0 may be either
            jnp.where(x < y, x, y),
            jnp.copysign(x, y),
            jnp.isfinite(x) & ~jnp.isnan(y),
            jnp.signbit(y),
            x + y,
            -x,
        )
        for o_ref, value in zip(o_refs, values):
            o_ref[...] = value

    dtypes = ("float32", "float32", "float32", "bool", "bool", "float32", "float32")
    return pl.pallas_call(kernel, tuple(sds((12, 12), d) for d in dtypes), **options)


@case(
    inputs=lambda rng: (_SPECIAL[:11], np.roll(_SPECIAL[:11], 3)),
    expect=lambda x, y: np.nextafter(x.astype("float32"), y.astype("float32")),
    tags="prim:math grid:absent",
)
def next_after(pl, pltpu, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.nextafter(x_ref[...], y_ref[...])

    return pl.pallas_call(kernel, sds((11,)), **options)


@case(
    inputs=lambda rng: (
        integers(rng, 8, 128, low=-(2**31), high=2**31, dtype="int32"),
        integers(rng, 8, 128, low=-(2**31), high=2**31, dtype="int32"),
    ),
    expect=lambda x, y: (
        x & y,
        x | y,
        x ^ y,
        ~x,
        x << (y & 31),
        x >> (y & 31),
        (x.view("uint32") >> (y & 31).view("uint32")).view("int32"),
        np.bitwise_count(x.view("uint32")).astype("int32"),
        (32 - np.ceil(np.log2(np.abs(x.view("uint32").astype("float64")) + 1))).astype("int32"),
    ),
    tags="prim:bits dtype:int32 grid:1d",
)
def bit_operations(pl, pltpu, **options):
    def kernel(x_ref, y_ref, *o_refs):
        x, y = x_ref[...], y_ref[...]
        by = y & 31
        values = (
            x & y,
            x | y,
            x ^ y,
            ~x,
            x << by,
            x >> by,
            lax.shift_right_logical(x, by),
            lax.population_count(x),
            lax.clz(x),
        )
        for o_ref, value in zip(o_refs, values):
            o_ref[...] = value

    spec = pl.BlockSpec((2, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((8, 128), "int32"),) * 9,
        grid=(4,),
        in_specs=[spec, spec],
        out_specs=(spec,) * 9,
        **options,
    )


@case(
    inputs=lambda rng: (
        integers(rng, 16, 16, low=-100, high=101),
        np.where((d := integers(rng, 16, 16, low=-9, high=10)) == 0, 5, d).astype("int32"),
    ),
    expect=lambda x, y: (
        x // y,
        x % y,
        np.fmod(x, y),
        x * y * 123456789,
        np.abs(x),
        np.sign(x),
        x**3,
        np.maximum(x, y),
    ),
    tags="dtype:int32 grid:absent",
)
def integer_arithmetic(pl, pltpu, **options):
    """Floor and truncating division, and products that wrap around."""

    def kernel(x_ref, y_ref, *o_refs):
        x, y = x_ref[...], y_ref[...]
        values = (
            x // y,
            x % y,
            lax.rem(x, y),
            x * y * 123456789,
            jnp.abs(x),
            jnp.sign(x),
            x**3,
            jnp.maximum(x, y),
        )
        for o_ref, value in zip(o_refs, values):
            o_ref[...] = value

    return pl.pallas_call(kernel, (sds((16, 16), "int32"),) * 8, **options)


@case(
    inputs=lambda rng: (integers(rng, 8, 32, dtype="float32"), integers(rng, 8, 32, dtype="float32")),
    expect=lambda x, y: (
        x == y,
        x != y,
        x < y,
        x <= y,
        ~(x > y) & (x >= 0) | (y > 3),
        np.where((x > y) ^ (y > 0), x, -y),
    ),
    tags="dtype:bool grid:absent",
)
def comparisons(pl, pltpu, **options):
    def kernel(x_ref, y_ref, eq_ref, ne_ref, lt_ref, le_ref, mix_ref, pick_ref):
        x, y = x_ref[...], y_ref[...]
        eq_ref[...] = x == y
        ne_ref[...] = x != y
        lt_ref[...] = x < y
        le_ref[...] = x <= y
        mix_ref[...] = ~(x > y) & (x >= 0) | (y > 3)
        pick_ref[...] = jnp.where((x > y) ^ (y > 0), x, -y)

    return pl.pallas_call(kernel, (*[sds((8, 32), "bool")] * 5, sds((8, 32))), **options)
