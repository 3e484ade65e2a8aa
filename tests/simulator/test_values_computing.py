"""Reductions, products, convolutions, windows, sorts and random bits in NumPy against JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from simulator.values_check import case, check, compare, run

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int32", "uint32", "int8", "uint8")


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def whole(*shape, dtype="int32", seed=0, low=-9, high=9):
    """Small integers: in any dtype their sums are exact."""
    low = 0 if dtype.startswith("u") else low
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def nans(x, *at):
    x = np.array(x)
    x.reshape(-1)[list(at)] = np.nan
    return x


def reduction_cases():
    for dtype in (*FLOATS, *INTS):
        for shape in ((3, 5, 4), (7,), (0, 3), (2, 0), (1, 1), (131,)):
            x = whole(*shape, dtype=dtype, low=-3, high=4)
            axes = ((0,), (len(shape) - 1,), tuple(range(len(shape))))
            sums = lambda v, axes=axes: [
                (lax.reduce_sum(v, a), lax.reduce_max(v, a), lax.reduce_min(v, a)) for a in axes
            ]
            yield case(f"sum, max, min {dtype}{list(shape)}", sums, x, loose_zero=True)
            if 0 not in shape:
                yield case(
                    f"argmax, argmin {dtype}{list(shape)}",
                    lambda v, axes=axes: [
                        (lax.argmax(v, a[0], "int32"), lax.argmin(v, a[0], "int8" if v.size < 99 else "uint32"))
                        for a in axes[:2]
                    ],
                    x,
                )
        yield case(
            f"prod {dtype}",
            lambda v: (jnp.prod(v, 0, dtype=v.dtype), lax.reduce_prod(v, (0, 1))),
            whole(5, 3, dtype=dtype, low=1, high=4),
        )
    x = nans(normal(6, 7), 3, 8, 9, 30)
    yield case("NaN", lambda v: (v.max(1), v.min(0), jnp.argmax(v, 1), jnp.argmin(v, 0), jnp.argmax(v)), x)
    yield case("NaN bf16", lambda v: (v.max(1), v.min(0), jnp.argmax(v, 1), jnp.argmin(v, 0)), x.astype("bfloat16"))
    yield case("no axes", lambda v: lax.reduce_sum(v, ()), normal(3))
    b = whole(4, 6, low=0, high=2).astype(bool)
    yield case(
        "bools",
        lambda v: (
            v.all(1),
            v.any(0),
            lax.reduce_and(v, (0, 1)),
            v.max(1),
            v.min(),
            jnp.argmax(v, 1),
            lax.reduce_xor(v, (0,)),
        ),
        b,
    )
    yield case("no bools", lambda v: (v.all(0), v.any(0), lax.reduce_max(v, (0,)), lax.reduce_min(v, (0,))), b[:0])
    yield case(
        "bits",
        lambda v: (lax.reduce_and(v, (0,)), lax.reduce_or(v, (1,)), lax.reduce_xor(v, (0, 1))),
        whole(4, 6, high=2**30),
    )
    long = normal(64, 1000)
    yield case("long sums", lambda v: (v.sum(1), v.sum(0), v.sum(), v.mean(1), v.var(1)), long, ulp=64, atol=2e-4)
    argmax_of = lambda a, b: (jnp.where(a[0] >= b[0], a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1]))
    yield case(
        "reduce by a function",
        lambda v: lax.reduce(
            (v, lax.broadcasted_iota("int32", v.shape, 1)), (jnp.float32(-9), jnp.int32(0)), argmax_of, (1,)
        ),
        normal(5, 9),
    )
    yield case(
        "reduce all by a function",
        lambda v: lax.reduce(v, jnp.float32(0), lambda a, b: a * 0.5 + b, (0, 1)),
        whole(1, 4, dtype="float32"),
    )
    yield case("reduce nothing", lambda v: lax.reduce(v, jnp.float32(3), lambda a, b: a * 0.5 + b, (0,)), normal(0, 4))
    int4 = whole(3, 20, low=-8, high=8).astype(np.int8)
    yield case(
        "cumulative",
        lambda v: [
            f(v, axis, reverse)
            for f in (lax.cumsum, lax.cummax, lax.cummin)
            for axis in (0, 1)
            for reverse in (False, True)
        ],
        int4,
    )
    for dtype in (*FLOATS, "int32"):
        x = whole(4, 9, dtype=dtype)
        yield case(
            f"cumsum {dtype}",
            lambda v: (lax.cumsum(v, 1), lax.cumsum(v, 0, True), lax.cummax(v, 1), lax.cummin(v, 1, True)),
            x,
            loose_zero=True,
        )
        yield case(
            f"cumprod {dtype}",
            lambda v: (lax.cumprod(v, 1), lax.cumprod(v, 0, True)),
            whole(3, 5, dtype=dtype, low=1, high=3),
        )
    yield case(
        "cumlogsumexp",
        lambda v: (lax.cumlogsumexp(v, 1), lax.cumlogsumexp(v, 0, True)),
        normal(3, 40) * 9,
        ulp=16,
        atol=1e-6,
    )
    yield case("cumsum of nothing", lambda v: (jnp.cumsum(v), lax.cummax(v)), normal(0))


def window_cases():
    x, w = whole(7, 9, dtype="float32"), dict(window_dimensions=(3, 2), window_strides=(2, 1))
    for padding in ("VALID", "SAME", ((1, 2), (0, 3))):
        for op, start in ((lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf), (lax.mul, 1.0)):
            f = lambda v, op=op, start=start, padding=padding: lax.reduce_window(
                v, np.float32(start), op, padding=padding, **w
            )
            yield case(f"reduce_window {op.__name__} {padding}", f, x, loose_zero=True)
    dilated = lambda v: [
        lax.reduce_window(v, v.dtype.type(0), op, (2, 3), (1, 2), ((2, 1), (0, 0)), (2, 1), (1, 3))
        for op in (lax.add, lax.max)
    ]
    for dtype in ("float32", "int32", "bfloat16"):
        yield case(f"dilated windows {dtype}", dilated, whole(5, 9, dtype=dtype))
    yield case(
        "custom window",
        lambda v: lax.reduce_window((v, v), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (3,), (2,), "SAME"),
        x[0],
    )
    pool = lambda op, start: jax.grad(
        lambda v: (lax.reduce_window(v, start, op, (3, 2), (2, 2), ((1, 0), (0, 1))) ** 2).sum()
    )
    yield case(
        "gradient of pooling", lambda v: (pool(lax.max, -np.inf)(v), pool(lax.min, np.inf)(v)), normal(6, 5), ulp=2
    )


DOTS = {
    "matrix": ((5, 7), (7, 3), (([1], [0]), ([], []))),
    "rows with rows": ((5, 7), (3, 7), (([1], [1]), ([], []))),
    "columns": ((7, 5), (7, 3), (([0], [0]), ([], []))),
    "vectors": ((7,), (7,), (([0], [0]), ([], []))),
    "matrix, vector": ((5, 7), (7,), (([1], [0]), ([], []))),
    "outer": ((5,), (3,), (([], []), ([], []))),
    "batch": ((4, 5, 7), (4, 7, 3), (([2], [1]), ([0], [0]))),
    "batch at the end": ((5, 7, 4), (7, 4, 3), (([1], [0]), ([2], [1]))),
    "two of each": ((2, 5, 3, 7, 4), (7, 3, 6, 4, 2), (([3, 4], [0, 3]), ([0, 2], [4, 1]))),
    "contracted in other order": ((3, 4, 5), (4, 3, 2), (([0, 1], [1, 0]), ([], []))),
    "every dimension": ((6, 3), (6, 3), (([0, 1], [0, 1]), ([], []))),
    "every dimension, batch": ((2, 6, 3), (6, 2, 3), (([1, 2], [0, 2]), ([0], [1]))),
    "batch alone": ((4, 3), (4, 3), (([], []), ([0, 1], [0, 1]))),
    "no terms": ((5, 0), (0, 3), (([1], [0]), ([], []))),
    "no rows": ((0, 7), (7, 3), (([1], [0]), ([], []))),
}


def product_cases():
    for name, (left, right, numbers) in DOTS.items():
        dot = lambda a, b, numbers=numbers: lax.dot_general(a, b, numbers)
        for dtype in ("float32", "bfloat16", "int32", "int8"):
            yield case(
                f"dot {name} {dtype}",
                dot,
                whole(*left, dtype=dtype, low=-2, high=3),
                whole(*right, dtype=dtype, seed=1, low=-2, high=3),
                loose_zero=True,
            )
    plain = DOTS["matrix"][2]
    for a, b, out in (
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float32"),
        ("int8", "int8", "int32"),
        ("int16", "int16", "int32"),
        ("float8_e4m3fn", "float8_e4m3fn", "float32"),
        ("float8_e5m2", "float8_e4m3fn", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("uint8", "uint8", "uint32"),
        ("int8", "int8", "float32"),
        ("float32", "float32", "bfloat16"),
    ):
        dot = lambda x, y, out=out: lax.dot_general(x, y, plain, preferred_element_type=out)
        yield case(
            f"dot {a} {b} {out}",
            dot,
            whole(5, 40, dtype=a, low=-3),
            whole(40, 6, dtype=b, low=-3, seed=1),
            loose_zero=True,
        )
    big = lambda dtype, seed: whole(4, 300, dtype=dtype, seed=seed, low=-(2**30), high=2**30)
    yield case(
        "int32 wraps", lambda x, y: lax.dot_general(x, y, DOTS["rows with rows"][2]), big("int32", 0), big("int32", 1)
    )
    bytes_of = lambda seed: whole(4, 2000, dtype="int8", seed=seed, low=-128, high=128)
    yield case(
        "int8 sums",
        lambda x, y: lax.dot_general(x, y, DOTS["rows with rows"][2], preferred_element_type="int32"),
        bytes_of(0),
        bytes_of(1),
    )
    yield case("int8 wraps", lambda x, y: lax.dot_general(x, y, DOTS["rows with rows"][2]), bytes_of(0), bytes_of(1))
    yield case("float32 products", jnp.matmul, normal(64, 128), normal(128, 96, seed=1), ulp=16, atol=3e-5)
    yield case(
        "bfloat16 products",
        jnp.matmul,
        normal(64, 128, dtype="bfloat16"),
        normal(128, 96, dtype="bfloat16", seed=1),
        ulp=1.01,
    )
    c = normal(4, 5) + 1j * normal(4, 5, seed=1)
    yield case("complex", lambda v: v @ v.T, c.astype("complex64"), ulp=8, atol=1e-5)
    yield case(
        "transforms",
        lambda v, w: (jnp.fft.fft(v), jnp.fft.ifft(v), jnp.fft.rfft(w), jnp.fft.irfft(v), jnp.fft.fft2(v)),
        c.astype("complex64"),
        normal(3, 8),
        atol=1e-5,
    )


def convolution_cases():
    def conv(**options):
        return lambda x, w: lax.conv_general_dilated(x, w, **options)

    x, w = whole(2, 4, 9, 8, dtype="float32"), whole(6, 4, 3, 2, dtype="float32", seed=1)
    for padding in ("VALID", "SAME", [(2, 0), (-1, 3)]):
        yield case(f"conv {padding}", conv(window_strides=(1, 1), padding=padding), x, w, loose_zero=True)
    options = dict(window_strides=(2, 1), padding=[(3, 2), (1, 1)], lhs_dilation=(2, 1), rhs_dilation=(2, 3))
    yield case("conv strided, dilated", conv(**options), x, w, loose_zero=True)
    yield case(
        "conv in groups",
        conv(window_strides=(1, 1), padding="SAME", feature_group_count=2),
        x,
        whole(6, 2, 3, 2, dtype="float32"),
        loose_zero=True,
    )
    yield case(
        "conv in groups of the batch",
        conv(window_strides=(1, 1), padding="SAME", batch_group_count=2),
        x,
        w,
        loose_zero=True,
    )
    layout = dict(window_strides=(1, 2), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    for dtype in ("float32", "bfloat16", "int32"):
        yield case(
            f"conv channels last {dtype}",
            conv(**layout),
            whole(2, 5, 6, 3, dtype=dtype),
            whole(3, 3, 3, 4, dtype=dtype, seed=1),
            loose_zero=True,
        )
    yield case(
        "convolve",
        lambda a, b: (jnp.convolve(a, b), jnp.correlate(a, b, "same")),
        whole(12, dtype="float32"),
        whole(5, dtype="float32"),
        loose_zero=True,
    )


def sort_cases():
    x = nans(normal(5, 9), 3, 4, 20)
    x[1, :4] = [0.0, -0.0, np.inf, -np.inf]
    for dtype in (*FLOATS, *INTS):
        v = x.astype(dtype) if dtype in FLOATS else whole(5, 9, dtype=dtype)
        yield case(f"sort {dtype}", lambda v: (lax.sort(v, 0), lax.sort(v, 1), jnp.sort(v, descending=True)), v)
        yield case(f"argsort {dtype}", lambda v: (jnp.argsort(v, 0), jnp.argsort(v, 1, descending=True)), v)
        yield case(f"top_k {dtype}", lambda v: (lax.top_k(v, 4), lax.top_k(v, 9), lax.top_k(v[0], 0)), v)
    few = whole(40, 2, high=2, low=0)
    yield case("sort by two", lambda a: lax.sort((a[:, 0], a[:, 1], lax.iota("int32", 40)), num_keys=2), few)
    yield case(
        "sort columns by two",
        lambda a: lax.sort((a, a[::-1], lax.broadcasted_iota("int32", (40, 2), 0)), 0, num_keys=2),
        few,
    )
    yield case("sort float by two", lambda a, b: lax.sort((a, b, b), 1, num_keys=2), np.sign(x), whole(5, 9))
    yield case("not stable", lambda a: lax.sort(a, is_stable=False), whole(50))
    yield case(
        "sort bools",
        lambda a: (jnp.sort(a), lax.sort((a, lax.iota("int32", 9)), num_keys=1)),
        whole(9, low=0, high=2).astype(bool),
    )
    yield case("sort of nothing", lambda a: (lax.sort(a, 0), lax.sort((a, a), 0)), normal(0, 3))
    yield case("top_k elsewhere", lambda a: lax.top_k(a, 3, axis=0), x)
    yield case(
        "approx_max_k", lambda a: (lax.approx_max_k(a, 3), lax.approx_min_k(a, 3, reduction_dimension=0)), normal(5, 9)
    )


def random_cases():
    words = jax.random.key_data
    keys = jax.random.split(jax.random.key(5), 6).reshape(2, 3)
    one = keys[1, 2]
    for width in (8, 16, 32):
        for shape in ((), (5,), (3, 0), (2, 3, 4)):
            bits = lambda k, width=width, shape=shape: jax.random.bits(k, shape, f"uint{width}")
            yield case(f"bits {width} {list(shape)}", bits, one)
    yield case(
        "keys",
        lambda k: (
            words(k),
            words(jax.random.split(k, 3)),
            words(jax.random.split(k, (2, 2))),
            words(jax.random.fold_in(k, 7)),
        ),
        one,
    )
    each = jax.vmap(
        jax.vmap(lambda k: (jax.random.bits(k, (3,)), words(jax.random.split(k)), words(jax.random.fold_in(k, 3))))
    )
    yield case("many keys", each, keys)
    yield case(
        "fold_in data",
        lambda k, i: [words(jax.random.fold_in(k, j)) for j in (i[0], i[1])],
        one,
        np.array([-1, 2**31 - 1], np.int32),
    )
    yield case("seeds", lambda s: [words(jax.random.key(s[i])) for i in range(3)], np.array([0, -1, 123456], np.int32))
    yield case(
        "old keys",
        lambda k: (jax.random.bits(k, (4,)), jax.random.split(k), words(jax.random.wrap_key_data(k))),
        np.array([3, 4], np.uint32),
    )
    yield case(
        "numbers",
        lambda k: (
            jax.random.uniform(k, (40,)),
            jax.random.randint(k, (40,), -5, 100),
            jax.random.bernoulli(k, 0.3, (40,)),
            jax.random.uniform(k, (9,), "bfloat16"),
        ),
        one,
    )
    yield case("normal", lambda k: jax.random.normal(k, (100,)), one, ulp=16)
    from palladion import jaxlink

    yield case(
        "threefry",
        lambda a, b: jaxlink.threefry2x32_p.bind(a[0], a[1], b[:2], b[2:]),
        whole(2, dtype="uint32"),
        whole(4, dtype="uint32"),
    )
    yield case("iota_2x32_shape", lambda: jaxlink.iota_2x32_shape_p.bind(shape=(3, 4)))
    yield case("empty", lambda: jaxlink.empty_p.bind(shape=(3, 4), dtype=np.dtype("float32"), out_sharding=None))


ALL = (reduction_cases, window_cases, product_cases, convolution_cases, sort_cases, random_cases)
FAMILIES = {f.__name__: list(f()) for f in ALL}


@pytest.mark.parametrize("family", FAMILIES)
def test_against_jax(family):
    check(FAMILIES[family])


def test_random_bits_of_the_older_scheme():
    """Without `jax_threefry_partitionable` JAX draws the counters in two halves."""
    key = jax.random.key(5)
    halves = functools.partial(case, enter=False)
    draw = lambda width, n: lambda k: jax.random.bits(k, (n,), f"uint{width}")
    with jax.threefry_partitionable(False):
        cases = [halves(f"bits {w} {n}", draw(w, n), key) for w in (8, 16, 32) for n in (0, 1, 5, 8)]
        check([*cases, halves("split", lambda k: jax.random.key_data(jax.random.split(k, (3, 2))), key)])


def test_small_floats_are_summed_in_float32():
    """As the hardware does; XLA on a CPU may round at each step."""
    x = normal(64, 1000, dtype="bfloat16")
    (got,) = run(lambda v: lax.reduce_sum(v, (1,)), x)
    compare(got, x.astype(np.float64).sum(1).astype("bfloat16"), ulp=1, atol=1e-4)


def test_64_bits():
    long = functools.partial(case, enter=False)
    with jax.enable_x64(True):
        x, key = whole(4, 5, dtype="int64", high=2**40), jax.random.key(2**40 + 3)
        some = lambda v: (v.sum(1), v.max(), lax.sort(v, 1), v @ v.T, jnp.argmax(v, 0), lax.cumsum(v, 1))
        cases = [
            long("int64", some, x),
            long("float64", lambda v: (v.sum(1), lax.sort(v, 0), v @ v.T), x.astype("float64")),
            long("64 random bits", lambda k: jax.random.bits(k, (3,), "uint64"), key),
            long("seeds of 64 bits", lambda s: jax.random.key_data(jax.random.key(s)), np.int64(-(2**40))),
            long("indices of 64 bits", lambda v, i: (v[i], v.at[i].add(1)), x, np.array([3, -1], np.int64)),
        ]
        check(cases)
        with jax.threefry_partitionable(False):
            check([long("64 random bits, older", lambda k: jax.random.bits(k, (3,), "uint64"), key)])


def test_a_reducer_may_hold_calls():
    got = run(
        lambda v: lax.reduce(v, jnp.float32(0), lambda a, b: jax.nn.relu(a) + jnp.clip(b, -1, 1), (0,)),
        np.array([-5, 0.5, 9], np.float32),
    )
    assert got[0] == 1.5
