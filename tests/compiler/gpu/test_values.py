"""Primitives on the emulated device: dtypes, odd shapes, layouts and special values, against what JAX gives outside.

One kernel computes all functions of a table; a failure names each that differs.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from compiler.gpu.values import differences, in_kernel
from palladion import config
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import nvrtc

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'"
)


@pytest.fixture(autouse=True)
def spills_are_fine():
    """All results of a table are alive at once."""
    with config.state("allow_spills")(True):
        yield


def agree(table, *args, rtol=0.0, atol=0.0, layout=None):
    """Every function of a table gives in a kernel what it gives outside."""
    function = lambda *xs: [f(*xs) for f in table.values()]
    wide = any(np.dtype(x.dtype).itemsize == 8 for x in args)
    with jax.enable_x64(wide):
        expected = jax.jit(function)(*args)
        actual = in_kernel(function, *args, layout=layout)
    assert not differences(list(table), actual, expected, rtol, atol)


def pairs(values):
    """Every pair of values."""
    return tuple(x.ravel() for x in np.meshgrid(values, values, indexing="ij"))


BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lax.div,
    "rem": lax.rem,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "ne": lambda x, y: x != y,
    "select": lambda x, y: jnp.where(x > y, x, y),
    "clamp": lambda x, y: lax.clamp(x, y, x),
    "abs": lambda x, y: jnp.abs(x),
    "square": lambda x, y: lax.square(x),
    "pow5": lambda x, y: lax.integer_pow(x, 5),
}
BITS = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x, y: ~x,
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "population_count": lambda x, y: lax.population_count(x),
    "clz": lambda x, y: lax.clz(x),
}
ROUNDING = {
    "neg": lambda x, y: -x,
    "sign": lambda x, y: jnp.sign(x),
    "finite": lambda x, y: jnp.isfinite(x),
    "round": lambda x, y: jnp.round(x),
    "away": lambda x, y: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "floor": lambda x, y: jnp.floor(x),
    "ceil": lambda x, y: jnp.ceil(x),
    "reciprocal": lambda x, y: 1 / x,
}
SPECIAL = np.array([0, -0.0, 1, -1, 0.5, -2.5, 3.75, 7, 1e4, -1e-3, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_floats(dtype):
    x, y = pairs(SPECIAL.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    tolerance = {"float32": 2e-7, "float64": 1e-15, "bfloat16": 2**-7, "float16": 2**-9}[dtype]
    agree({**BINARY, **ROUNDING}, x, y, rtol=tolerance)


def test_signs_of_zeros_and_nans_exactly():
    exact = "add sub mul max min select clamp abs neg sign round floor ceil away".split()
    x, y = pairs(SPECIAL.astype("float32"))
    table = {name: f for name, f in {**BINARY, **ROUNDING}.items() if name in exact}
    ordinary = ~((x == 0) & (y == 0))  # which zero is the larger one, is open
    agree(table, x[ordinary], y[ordinary])


def extremes(dtype):
    i = np.iinfo(dtype)
    some = [-1, -2, -7, -100] if i.min < 0 else []
    return np.array(sorted({0, 1, 2, 3, 5, 7, 31, 100, i.max, i.max - 1, i.min, i.min + 1, *some}), dtype)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint16", "uint32", "int64", "uint64"])
def test_integers_wrap(dtype):
    agree({**BINARY, **BITS}, *pairs(extremes(dtype)))


def test_booleans():
    table = {name: BITS[name] for name in ("and", "or", "xor", "not")} | {
        name: BINARY[name] for name in ("max", "min", "lt", "ne", "select", "add", "mul")
    }
    agree({**table, "any": lambda x, y: jnp.any(x), "all": lambda x, y: jnp.all(x)}, *pairs(np.array([False, True])))


NARROW = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int32 int16 int8 uint32 uint16 uint8 bool".split()
WIDE = "float64 int64 uint64 float32 float16 int32 uint8 bool".split()
NUMBERS = np.array(
    [0, -0.0, 1, -1.5, 2.5, 3.49, 100, -100, 300, -300, 447, 449, 464, 465, 500, 5e4, 6e4, 61439, 61441, 6.6e4, 1e-8]
    + [1e-3, 1e9, -1e9, np.inf, -np.inf, np.nan]
)


@pytest.mark.parametrize("dtype", [*NARROW, "float64", "int64"])
def test_casts(dtype):
    wide = dtype.endswith("64")
    with np.errstate(all="ignore"), jax.enable_x64(wide):
        whole = dtype.startswith(("int", "uint"))
        values = extremes(dtype) if whole else np.asarray(jnp.asarray(NUMBERS, "float32").astype(dtype))
    to = [d for d in (WIDE if wide else NARROW) if not (d == "uint64" and not whole)]
    agree({d: (lambda x, d=d: x.astype(d)) for d in to}, values)


NAMES = "exp expm1 log log2 log1p sqrt sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh cbrt"
FUNCTIONS = {name: getattr(jnp, name) for name in NAMES.split()} | {
    name: getattr(lax, name) for name in "rsqrt erf erfc erf_inv lgamma digamma logistic bessel_i0e bessel_i1e".split()
}


@pytest.mark.parametrize("dtype, tolerance", [("float32", 3e-6), ("float16", 3e-3)])
def test_functions(dtype, tolerance):
    x = np.concatenate([np.linspace(-6, 6, 97), SPECIAL, [50, -50]]).astype(dtype)
    agree(FUNCTIONS, x, rtol=tolerance, atol=tolerance)


def test_functions_of_two():
    x, y = pairs(np.array([0, 0.5, 1, 2, -1, -2.5, 3, np.inf, np.nan, -0.0], np.float32))
    table = {name: getattr(jnp, name) for name in ("power", "arctan2", "nextafter", "hypot", "logaddexp")}
    agree(table, x, y, rtol=1e-6, atol=1e-7)


SHAPES = [(), (1,), (7,), (0,), (129,), (13, 17), (33, 1), (2, 0, 3), (3, 5, 7), (4, 128)]


def some(shape, dtype):
    return np.asarray(jnp.asarray(np.random.default_rng(0).integers(-5, 6, shape)).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions(shape, dtype):
    axes = [None, *[(d,) for d in range(len(shape))], *([(0, len(shape) - 1)] if len(shape) > 1 else [])]
    table = {f"sum{a}": (lambda x, a=a: jnp.sum(x, a)) for a in axes}
    if 0 not in shape:
        table |= {f"max{a}": (lambda x, a=a: jnp.max(x, a)) for a in axes}
        for d in range(len(shape)):
            table |= {
                f"argmax{d}": lambda x, d=d: jnp.argmax(x, d),
                f"cumsum{d}": lambda x, d=d: jnp.cumsum(x, d),
                f"cummin{d}": lambda x, d=d: lax.cummin(x, d, reverse=True),
                f"sort{d}": lambda x, d=d: jnp.sort(x, d),
            }
    agree(table, some(shape, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "bool"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s], ids=str)
def test_rearrangements(shape, dtype):
    table = {
        "flat": lambda x: x.reshape(-1) ^ x.reshape(-1) if dtype == "bool" else 2 * x.reshape(-1),
        "transpose": lambda x: x.T,
        "concatenate": lambda x: jnp.concatenate([x, x], 0),
        "pad": lambda x: lax.pad(x, jnp.ones((), x.dtype), [(1, 2, 1)] * x.ndim),
        "stack": lambda x: jnp.stack([x, x], -1),
        "flip": jnp.flip,
        "roll": lambda x: jnp.roll(x, 3, 0),
        "every second": lambda x: x[::2],
        "from 1": lambda x: x[1:],
        "none": lambda x: x[..., :0],
        "broadcast": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
        "repeat": lambda x: jnp.repeat(x, 2, 0),
        "tile": lambda x: jnp.tile(x, (2,) * x.ndim),
    }
    agree(table, some(shape, dtype))


LAYOUTS = [plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED, plgpu.Layout.WG_STRIDED, plgpu.Layout.TCGEN05]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout):
    x = some((128, 64), "float32")
    table = {
        "rows": lambda x: jnp.sum(x, 0),
        "columns": lambda x: jnp.max(x, 1),
        "all": jnp.sum,
        "centred": lambda x: x - jnp.mean(x, 1, keepdims=True),
        "transpose": lambda x: x.T,
        "slice": lambda x: x[3:70, 5:],
        "half": lambda x: x.astype(jnp.bfloat16),
        "count": lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 1),
    }
    agree(table, x, rtol=1e-6, atol=1e-6, layout=layout)


def test_products_gathers_and_windows():
    x, i = some((9, 12), "float32"), np.array([[3, 0, 8], [3, 20, -1]], np.int32)
    table = {
        "dot": lambda x, i: x @ x.T,
        "batched": lambda x, i: jnp.einsum("bij,bkj->bik", x.reshape(3, 3, 12), x.reshape(3, 3, 12)),
        "take": lambda x, i: jnp.take(x, i, axis=0, mode="fill"),
        "clip": lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
        "set": lambda x, i: x.at[i[0]].set(7.0),
        "add": lambda x, i: x.at[i].add(1.0, mode="drop"),
        "max": lambda x, i: x.at[:, i[0, 0]].max(2.0),
        "dynamic": lambda x, i: lax.dynamic_slice(x, (i[0, 0], i[1, 1]), (4, 5)),
        "update": lambda x, i: lax.dynamic_update_slice(x, x[:2, :3] + 1, (i[1, 1], i[1, 2])),
        "top": lambda x, i: lax.top_k(x, 5)[1],
        "pool": lambda x, i: lax.reduce_window(x, -jnp.inf, lax.max, (3, 2), (2, 1), "SAME"),
        "function": lambda x, i: lax.reduce(x, 1.0, lambda a, b: a + b * b, (0,)),
        "conv": lambda x, i: lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 2), "SAME"),
        "bits": lambda x, i: jax.random.bits(jax.random.key(i[0, 0]), (5, 3)),
    }
    agree(table, x, i, rtol=1e-6, atol=1e-5)
