"""Arithmetic, bits, casts and elementary functions in NumPy against JAX."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from simulator.values_check import case, check, compare, run

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int32", "uint32", "int8", "uint8", "int16", "uint16")
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 1, 5))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-3]
EDGES = [0, 1, 2, 3, 5, 7, 8, 31, 32, 33, 100, 127]


def floats(dtype, seed=0, shape=(97,)):
    x = np.random.default_rng(seed).normal(size=shape) * 3
    if len(shape) == 1 and shape[0] > 16:
        x[:16] = np.roll(SPECIAL, seed)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def ints(dtype, seed=0, shape=(97,)):
    info = jnp.iinfo(dtype)
    x = np.random.default_rng(seed).integers(int(info.min), int(info.max), shape, np.int64, endpoint=True)
    if len(shape) == 1 and shape[0] > 16:
        few = [e for e in EDGES if e <= info.max] + [int(info.min), int(info.max), int(info.max) - 1]
        few += [-1, -2] if info.min < 0 else []
        x[: len(few)] = np.roll(few, seed)
    return x.astype(dtype)


def draw(dtype, seed=0, shape=(97,)):
    if dtype == "bool":
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
    return ints(dtype, seed, shape) if jnp.issubdtype(dtype, jnp.integer) else floats(dtype, seed, shape)


UNARY_FLOAT = (lax.neg, lax.abs, lax.sign, lax.floor, lax.ceil, lax.is_finite, lax.square, lax.stop_gradient)
BINARY = (lax.add, lax.sub, lax.mul, lax.max, lax.min)
COMPARE = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
BITS = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
SHIFTS = (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
ROUNDS = tuple(lax.RoundingMethod)


def name_of(function):
    return getattr(function, "__name__", str(function))


def exact_cases():
    for dtype in FLOATS:
        x, y = floats(dtype, 0), floats(dtype, 5)
        for f in UNARY_FLOAT:
            yield case(f"{name_of(f)} {dtype}", f, x)
        for method in ROUNDS:
            yield case(f"round {method} {dtype}", lambda v, method=method: lax.round(v, method), x)
        for f in (*BINARY, *COMPARE, lax.rem, lax.nextafter):
            yield case(f"{name_of(f)} {dtype}", f, x, y, loose_zero=f in (lax.max, lax.min))
        # XLA's division may be off by a unit, and flushes what is subnormal
        yield case(f"div {dtype}", lax.div, x, y, ulp=1, atol=1e-38 if dtype != "float16" else 0)
        yield case(f"clamp {dtype}", lax.clamp, np.full_like(x, -1), x, np.full_like(x, 2))
        yield case(
            f"clamp by scalars {dtype}", lambda v: lax.clamp(jnp.asarray(-1, v.dtype), v, jnp.asarray(2, v.dtype)), x
        )
    for dtype in INTS:
        x, y = ints(dtype, 0), ints(dtype, 3)
        unary = [lax.sign, lax.bitwise_not, lax.population_count, lax.clz, lax.square, lax.neg]
        unary += [lax.abs] if dtype.startswith("i") else []
        for f in unary:
            yield case(f"{name_of(f)} {dtype}", f, x)
        for f in (*BINARY, *COMPARE, *BITS, *SHIFTS, lax.div, lax.rem, lax.mulhi):
            if f is lax.mulhi and dtype not in ("int32", "uint32"):
                continue
            yield case(f"{name_of(f)} {dtype}", f, x, y)
        for shift in SHIFTS:
            yield case(f"{name_of(shift)} near {dtype}", shift, x, (np.arange(97) % 9).astype(dtype))
        for divisor in (3, 8, *([-7] if dtype.startswith("i") else [])):
            both = lambda v, d=divisor: (lax.div(v, v.dtype.type(d)), lax.rem(v, v.dtype.type(d)))
            yield case(f"div, rem by {divisor} {dtype}", both, x)
        yield case(f"integer_pow {dtype}", lambda v: (lax.integer_pow(v, 3), lax.integer_pow(v, 6)), x)
    b, c = draw("bool", 0), draw("bool", 1)
    for f in (*BITS, lax.eq, lax.ne, lax.max, lax.min, lax.lt):
        yield case(f"{name_of(f)} bool", f, b, c)
    yield case("not bool", lax.bitwise_not, b)
    for dtype in (*FLOATS, *INTS, "bool"):
        x, y, z = (draw(dtype, i) for i in range(3))
        yield case(f"select_n {dtype}", lax.select_n, b, x, y)
        yield case(f"select_n of scalar {dtype}", lax.select_n, np.bool_(True), x, y)
        yield case(f"select_n of three {dtype}", lax.select_n, (np.arange(97) % 3).astype(np.int32), x, y, z)
        yield case(f"select_n of scalar among three {dtype}", lax.select_n, np.int32(1), x, y, z)


def scalar_cases():
    """On scalars Python's operators stand in for ufuncs."""
    for dtype in ("float32", "bfloat16", "int32", "uint32", "int8"):
        pairs = [(7, 3), (-7, 3), (7, 0), (0, 0), (-1, 1)] if dtype[0] != "u" else [(7, 3), (7, 0), (0, 0)]
        for a, b in pairs:
            a, b = np.array(a).astype(dtype)[()], np.array(b).astype(dtype)[()]
            for f in (*BINARY, *COMPARE, lax.div, lax.rem):
                yield case(f"{name_of(f)}({a}, {b}) {dtype}", f, a, b, loose_zero=True)
            for f in (lax.neg, lax.sign, *([lax.abs] if dtype[0] != "u" else [])):
                yield case(f"{name_of(f)}({a}) {dtype}", f, a)
    for a in (np.iinfo(np.int32).min, np.iinfo(np.int32).max):
        for f in (lax.add, lax.mul, lax.div, lax.rem, lax.max, lax.bitwise_xor):
            yield case(f"{name_of(f)}({a}, -1)", f, np.int32(a), np.int32(-1))
    for f in BITS:
        yield case(f"{name_of(f)} of scalar bools", f, np.bool_(True), np.bool_(False))
    yield case("max of NaN", lambda a, b: (lax.max(a, b), lax.min(b, a)), np.float32(np.nan), np.float32(1))


def shape_cases():
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16", "int32"):
            x, y = draw(dtype, 0, shape), draw(dtype, 1, shape)
            f = lambda a, b: (
                a + b,
                a * b,
                jnp.where(a > b, a, b),
                -a,
                jnp.minimum(a, b),
                a // 2 if a.dtype == "int32" else a,
            )
            yield case(f"arithmetic {dtype}{list(shape)}", f, x, y)
        x = draw("float32", 0, shape)
        yield case(f"functions float32{list(shape)}", lambda a: (jnp.tanh(a), lax.erf(a), a**3), x, ulp=8)


def cast_cases():
    everything = (
        *FLOATS,
        "int32",
        "uint32",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    )
    wild = np.array(
        [
            0,
            -0.0,
            0.5,
            -0.5,
            0.999,
            -0.999,
            1.5,
            2.5,
            -1.5,
            127.5,
            128,
            255.7,
            256,
            -128.9,
            -129,
            447,
            449,
            464,
            465,
            480,
            5e4,
            6.1e4,
            65519,
            65520,
            7e4,
            2147483520,
            2147483648,
            4294967040,
            4294967296,
            1e20,
            -1e20,
            np.inf,
            -np.inf,
            np.nan,
            1e-3,
            1e-7,
            2**-9,
            2**-10,
            1.001 * 2**-10,
            2**-16,
            2**-17,
        ]
    )
    for source in everything:
        with np.errstate(all="ignore"):
            x = ints(source) if source in INTS else wild.astype("float32").astype(source)
        for target in everything:
            cast = lambda v, target=target: lax.convert_element_type(v, target)
            yield case(f"{source} to {target}", cast, x)
    for narrow in ("int4", "uint4"):
        x = ints(narrow)
        for target in ("int8", "int32", "float32", "bfloat16", "uint8"):
            yield case(f"{narrow} to {target}", lambda v, target=target: v.astype(target), x)
            y = draw(target, 1) if target in INTS else wild.astype("float32").astype(target)
            yield case(f"{target} to {narrow}", lambda v, narrow=narrow: v.astype(narrow), y)
    c = np.empty(97, "complex64")
    c.real, c.imag = floats("float32"), floats("float32", 3)
    for target in ("float32", "bfloat16", "int32", "bool"):
        yield case(f"complex64 to {target}", lambda v, target=target: lax.convert_element_type(v, target), c)
    yield case("float32 to complex64", lambda v: v.astype("complex64"), floats("float32"))


def bit_cases():
    wide = ints("int32", 0, (3, 4))
    for target in ("float32", "uint32", "int16", "uint8", "bfloat16"):
        yield case(f"int32 read as {target}", lambda v, t=target: lax.bitcast_convert_type(v, t), wide)
    yield case("int8 read as int32", lambda v: lax.bitcast_convert_type(v, "int32"), ints("int8", 0, (3, 4)))
    yield case("scalar read as bytes", lambda v: lax.bitcast_convert_type(v, "uint8"), np.float32(1.5))
    yield case("transposed, read as bytes", lambda v: lax.bitcast_convert_type(v.T, "uint8"), wide)
    yield case("int8 read as int4", lambda v: lax.bitcast_convert_type(v, "int4"), ints("int8", 0, (3, 2)))
    yield case("int4 read as int8", lambda v: lax.bitcast_convert_type(v, "int8"), ints("int4", 0, (3, 2)))
    yield case("int4 read as uint4", lambda v: lax.bitcast_convert_type(v, "uint4"), ints("int4", 0, (3, 2)))
    for dtype in FLOATS:
        x = floats(dtype)
        for e, m in ((8, 7), (5, 10), (4, 3), (5, 2), (8, 23), (3, 1)):
            reduce = lambda v, e=e, m=m: lax.reduce_precision(v, e, m)
            yield case(f"reduce_precision {e}, {m} {dtype}", reduce, x)
    for f in (lax.real, lax.imag, lax.conj, lax.neg, lax.abs, lax.sign):
        c = np.array([1 + 2j, -3 + 4j, 0.5j, 0], "complex64")
        yield case(f"{name_of(f)} complex64", f, c, ulp=2)
    yield case("conj of a real", lambda v: lax.conj(v), floats("float32"))
    yield case("complex", lax.complex, floats("float32"), floats("float32", 1))
    yield case(
        "total order",
        lambda a, b: (lax.eq_to_p.bind(a, b), lax.le_to_p.bind(a, b), lax.lt_to_p.bind(a, b)),
        floats("float32", 0),
        floats("float32", 2),
    )


EXACT, SCALARS, ANY_SHAPE = list(exact_cases()), list(scalar_cases()), list(shape_cases())
CASTS, READ_AS = list(cast_cases()), list(bit_cases())


@pytest.mark.parametrize(
    "cases", [EXACT, SCALARS, ANY_SHAPE, CASTS, READ_AS], ids="exact scalars shapes casts bits".split()
)
def test_against_jax(cases):
    check(cases)


INT4 = {
    f"{name_of(f)} {d}": (f, d)
    for d in ("int4", "uint4")
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.lt, lax.bitwise_xor, *SHIFTS)
}


@pytest.mark.parametrize("name", INT4)
def test_four_bits_wrap_as_they_should(name):
    """XLA on a CPU does not compute with these; the meaning is that of a byte, cut to four bits."""
    function, dtype = INT4[name]
    x, y = np.meshgrid(np.arange(16), np.arange(1, 16))
    x, y = x.astype(np.int8).astype(dtype), y.astype(np.int8).astype(dtype)
    a, b = x.astype(np.int64), y.astype(np.int64)
    bits = np.where(b < 0, 16, b)  # shift counts are without sign
    want = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "div": lambda: np.trunc(a / b),
        "max": lambda: np.maximum(a, b),
        "lt": lambda: a < b,
        "bitwise_xor": lambda: a ^ b,
        "shift_left": lambda: a << np.minimum(bits, 4),
        "shift_right_logical": lambda: (a & 15) >> np.minimum(bits, 8),
        "shift_right_arithmetic": lambda: (a | -16 * (a & 8 != 0)) >> np.minimum(bits, 8),
    }[name_of(function)]()
    want = want if want.dtype == bool else want.astype(np.int64).astype(np.int8).astype(dtype)
    compare(run(function, x, y)[0], want)


# --- elementary functions, against JAX in float64 --------------------------------------------------------------------
WHOLE = np.concatenate(
    [np.linspace(-30, 30, 301), [1e-3, -1e-5, 1e-8, 87.0, -87.0, 100, 1e4, np.inf, -np.inf, np.nan, 0, -0.0]]
)
UNIT = np.concatenate([np.linspace(-1, 1, 301), [1 - 2**-20, 2**-20 - 1, 1e-6, 1.5, np.nan, -0.0]])
MATH = {
    **{
        f: (getattr(lax, f), WHOLE)
        for f in "exp exp2 expm1 sin cos tan tanh sinh cosh asinh atan logistic cbrt".split()
    },
    **{f: (getattr(lax, f), np.abs(WHOLE)) for f in "log log2 log1p sqrt rsqrt".split() if hasattr(lax, f)},
    "log2": (jnp.log2, np.abs(WHOLE)),
    **{f: (getattr(lax, f), UNIT) for f in "asin acos atanh erf_inv".split()},
    **{f: (getattr(lax, f), WHOLE) for f in "erf erfc bessel_i0e bessel_i1e lgamma digamma".split()},
    "acosh": (lax.acosh, 1 + np.abs(WHOLE)),
    "integer_pow": (lambda x: (x**3, x**-2, x**7, x**4, x**0, lax.integer_pow(x, 1)), UNIT * 3),
    "polynomial": (lambda x: jnp.polyval(jnp.asarray([0.5, -2, 1], x.dtype), x), UNIT),
    "one_minus_square": (lambda x: lax.one_minus_square_p.bind(x), np.abs(UNIT) / 3),
}
rng = np.random.default_rng(1)
A, B = rng.uniform(0.1, 9, 200), rng.uniform(0.1, 20, 200)
MATH_2 = {
    "pow": (lax.pow, A, B - 10),
    "pow of signs": (
        lax.pow,
        np.array([-2.0, -2, 0, 0, 1, np.inf, -1, 2, 0]),
        np.array([3.0, 0.5, 0, -1, np.nan, 0, np.inf, -np.inf, 2]),
    ),
    "pow by integers": (lambda x, y: lax.pow(x, y.astype(jnp.int32)), A - 4, B - 10),
    "atan2": (lax.atan2, np.r_[A - 4, 0, 0, -0.0], np.r_[B - 10, -1, 1, -1]),
    "igamma": (lax.igamma, A, B),
    "igammac": (lax.igammac, A, B),
    "zeta": (lax.zeta, A + 1, B),
    "polygamma": (lax.polygamma, np.floor(A), B),
    "betainc": (lambda a, b: lax.betainc(a, b, jnp.full_like(a, 0.25)), A, B),
}
ABSOLUTE = {
    "lgamma": 1e-6,
    "digamma": 1e-6,
    "igamma": 1e-6,
    "igammac": 1e-6,
    "betainc": 1e-6,
    "bessel_i0e": 1e-7,
    "polynomial": 2e-7,
}
for _name, (_function, *_arguments) in {**MATH, **MATH_2}.items():
    case(_name, _function, *[a.astype("float32") for a in _arguments])


@pytest.fixture(scope="module")
def true_values():
    """JAX's float64 results, of arguments rounded to each dtype."""

    def everything(arguments):
        return {n: jax.tree.leaves(f(*a)) for (n, (f, *_)), a in zip({**MATH, **MATH_2}.items(), arguments)}

    found = {}
    with jax.enable_x64(True), np.errstate(all="ignore"):
        compiled = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})
        for dtype in FLOATS:
            rounded = [[a.astype(dtype).astype(np.float64) for a in args] for _, *args in {**MATH, **MATH_2}.values()]
            found[dtype] = jax.tree.map(np.asarray, compiled(rounded))
        found["float64"] = jax.tree.map(np.asarray, compiled([args for _, *args in {**MATH, **MATH_2}.values()]))
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_elementary_functions(dtype, true_values):
    """At most 4 units of f32 from the truth; the smaller floats are rounded once from f32."""
    problems = []
    for name, (function, *arguments) in {**MATH, **MATH_2}.items():
        with np.errstate(all="ignore"):
            got = run(function, *[a.astype(dtype) for a in arguments])
            want = [w.astype("float32").astype(dtype) for w in true_values[dtype][name]]
        # a product of several f32 roundings; a result of the small floats is one rounding away
        ulp = (16 if name in ("integer_pow", "polynomial") else 4) if dtype == "float32" else 1
        try:
            assert len(got) == len(want)
            for g, w in zip(got, want):
                compare(g, w, ulp, ABSOLUTE.get(name, 0) if dtype == "float32" else 1e-12, loose_zero=True)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    assert not problems, "\n".join(problems)


def test_elementary_functions_of_float64(true_values):
    problems = []
    with jax.enable_x64(True):
        for name, (function, *arguments) in {**MATH, **MATH_2}.items():
            try:
                for g, w in zip(run(function, *arguments), true_values["float64"][name], strict=True):
                    compare(g, w, ulp=20000, atol=1e-13, loose_zero=True)
            except AssertionError as error:
                problems.append(f"{name}: {error}")
    assert not problems, "\n".join(problems)


def test_64_bits():
    long = functools.partial(case, enter=False)
    with jax.enable_x64(True):
        x, y = ints("int64"), ints("int64", 4)
        u, v = x.astype("uint64"), y.astype("uint64")
        both = (*BINARY, *COMPARE, *BITS, *SHIFTS, lax.div, lax.rem, lax.mulhi)
        cases = [long(name_of(f) + " 64", f, *args) for f in both for args in ((x, y), (u, v))]
        cases += [long(name_of(f) + " 64", f, a) for f in (lax.clz, lax.population_count, lax.sign) for a in (x, u)]
        f = np.array([0.5, -0.5, 1e18, 1e19, 1e20, -1e20, np.inf, -np.inf, np.nan, 2.0**53 + 1, 1e-300])
        for target in ("int64", "uint64", "int32", "uint8", "float32", "float16", "bool"):
            cast = lambda a, t=target: lax.convert_element_type(a, t)
            cases += [long(f"float64 to {target}", cast, f), long(f"int64 to {target}", cast, x)]
        cases.append(long("bits of float64", lambda a: lax.bitcast_convert_type(a, "uint32"), f))
        d, e = floats("float64"), floats("float64", 4)
        both = (*BINARY, *COMPARE, lax.div, lax.rem)
        cases += [long(name_of(g) + " float64", g, d, e, loose_zero=True) for g in both]
        check(cases)


def test_complex_functions():
    c = np.array([1 + 2j, -3 + 0.5j, 0.25j, -0.1], "complex64")
    check(
        [
            case(name_of(f), f, c, ulp=16, atol=1e-6)
            for f in (lax.exp, lax.log, lax.sin, lax.cos, lax.tanh, lax.sqrt, lax.square, lambda z: z * z + z / (2 - z))
        ]
    )


def test_the_rule_of_a_plain_operation_is_the_ufunc():
    """Nothing stands between a program and NumPy where there is nothing to decide."""
    from palladion.simulator.values import array_function

    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def function(f, *avals):
        return array_function(jax.make_jaxpr(f)(*avals).eqns[-1])

    assert function(jnp.add, x, x) is np.add
    assert function(jnp.exp, x) is np.exp
    assert function(lax.lt, x, x) is np.less
    y = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert function(lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))), x, y) is np.matmul
    assert ml_dtypes.bfloat16(1) == function(jnp.add, *[jax.ShapeDtypeStruct((), jnp.bfloat16)] * 2)(
        ml_dtypes.bfloat16(0.5), ml_dtypes.bfloat16(0.5)
    )
