"""The elementary functions of the CPU compiler against NumPy, SciPy and mpmath in higher precision.

f32 results are compared with f64 ones (whose own error is nothing beside an f32 ulp), f64 results with the 80-bit
`np.longdouble`, or with mpmath where NumPy has no such function. `python tests/compiler/cpu/test_math.py` prints the
table of docs/cpu_math.md.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import pathlib
import re
import sys
import time

import llvmlite.binding as llvm
import mpmath as mp
import numpy as np
import pytest
import scipy.special as sp

from palladion.compiler.cpu import builder, cache
from palladion.compiler.cpu.math import RULES, coefficients
from palladion.compiler.cpu.target import host

TYPES = {"f32": builder.f32, "f64": builder.f64}
DTYPES = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
WIDE = {"f32": np.float64, "f64": np.longdouble}
extended = np.finfo(np.longdouble).nmant >= 63
kinds = pytest.mark.parametrize(
    "kind", ["f32", pytest.param("f64", marks=pytest.mark.skipif(not extended, reason="no 80-bit floats"))]
)


# -------------------------------------------------------------------------------------------- running a function
def module(name: str, kind: str, lanes: int, options: tuple = ()):
    """An IR module whose function `go(x, [y,] out, n)` applies the function to n elements, n a multiple of `lanes`."""
    ty, rule = TYPES[kind], RULES[name]
    m = builder.new_module("math")
    fn, b = builder.define(m, "go", builder.void, *[builder.ptr] * (rule.arity + 1), builder.i64)
    *operands, out, n = fn.args
    with builder.loop(b, 0, n, lanes) as L:
        xs = [builder.load(b, builder.vec(ty, lanes), builder.gep(b, p, L.i, ty)) for p in operands]
        y = rule.emit(b, *xs, *options)
        if builder.scalar_of(y.type) == builder.i1:
            y = b.zext(y, builder.like(builder.i8, y.type))
        builder.store(b, y, builder.gep(b, out, L.i, builder.scalar_of(y.type)))
    b.ret_void()
    return m


@functools.cache
def compiled(name: str, kind: str, lanes: int, options: tuple = ()):
    """The function on NumPy arrays of the kind's dtype."""
    arity, dtype = RULES[name].arity, DTYPES[kind]
    address = cache.link(cache.compile_module(module(name, kind, lanes, options)), ["go"])["go"]
    go = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (arity + 1), ctypes.c_int64)(address)

    def run(*xs):
        size = xs[0].size
        padded = [np.concatenate([x.ravel(), np.ones(-size % lanes, dtype)]) for x in xs]
        out = np.empty(padded[0].size, np.bool_ if name == "is_finite" else dtype)
        go(*[x.ctypes.data for x in padded], out.ctypes.data, out.size)
        return out[:size]

    run.bare = go  # type: ignore[attr-defined]
    return run


# ---------------------------------------------------------------------------------------------------- references
def by_mpmath(name: str):
    """A function of longdouble arrays, evaluated in 40 digits one by one; of infinities and NaN as SciPy has it."""
    f = MPMATH[name]

    def reference(x):
        out = np.empty(x.shape, np.longdouble)
        with mp.workdps(40):
            for i, v in enumerate(x):
                y = f(mp.mpf(float(v))) if np.isfinite(v) else mp.mpf(float(SCIPY[name](float(v))))
                high = float(y)
                out[i] = np.longdouble(high) + (np.longdouble(float(y - high)) if np.isfinite(high) else 0)
        return out

    return reference


def log_gamma(x):
    """log |Gamma|, infinite at its poles."""
    if x <= 0:
        return mp.inf if x == mp.floor(x) else mp.log(abs(mp.gamma(x)))
    return mp.loggamma(x)


def digamma(x):
    """The derivative of log_gamma; at 0 as JAX has it, NaN at the other poles."""
    return -mp.inf if x == 0 else mp.nan if x < 0 and x == mp.floor(x) else mp.digamma(x)


def erf_inv(x):
    """NaN outside [-1, 1], where mpmath's is complex."""
    return mp.erfinv(x) if abs(x) <= 1 else mp.nan


def erfc(x):
    """mpmath's gives up far out."""
    return mp.mpf(0) if x > 30 else mp.erfc(x)


REFERENCES = {
    "logistic": lambda x: np.where(x < 0, np.exp(x) / (1 + np.exp(x)), 1 / (1 + np.exp(-x))),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "integer_pow": lambda x: x * x * x,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_even": np.rint,
    "round_away": lambda x: np.where(abs(x) < 2.0**60, np.copysign(np.floor(abs(x) + 0.5), x), x),
    "sign": lambda x: np.where(x == 0, x, np.sign(x)),
    "nextafter": np.nextafter,
    "rem": np.fmod,
    "pow": np.power,
    "is_finite": np.isfinite,
    **{n: getattr(np, n) for n in "exp exp2 expm1 log log2 log1p sin cos tan tanh sinh cosh sqrt cbrt".split()},
    **{n: getattr(np, "arc" + n[1:]) for n in "asin acos atan atan2 asinh acosh atanh".split()},
}
SCIPY = {"erf": sp.erf, "erfc": sp.erfc, "erf_inv": sp.erfinv}
# Where SciPy and JAX differ: log |Gamma(-inf)|, and digamma(-0).
SCIPY["lgamma"] = lambda x: np.where(np.isinf(x), np.inf, sp.gammaln(x))
SCIPY["digamma"] = lambda x: np.where(x == 0, -np.inf, sp.digamma(x))
MPMATH = {"erf": mp.erf, "erfc": erfc, "erf_inv": erf_inv, "lgamma": log_gamma, "digamma": digamma}
EXACT = [n for n, r in RULES.items() if r.ulp_f32 == 0]
INEXACT = [n for n in RULES if n not in EXACT]


def reference(name: str, kind: str, *xs):
    """The function's values in more precision than the kind has (exact functions: in the same)."""
    with np.errstate(all="ignore"):
        if name in EXACT and name != "round_away":  # + 0.5 must not round
            return REFERENCES[name](*xs)
        wide = [x.astype(WIDE[kind]) for x in xs]
        if name in MPMATH:
            return SCIPY[name](*wide) if kind == "f32" else by_mpmath(name)(*wide)
        return REFERENCES[name](*wide)


def ulps(got, want, kind: str):
    """Errors in units of the last place that `want` has in the format; infinite for a NaN or an infinity too many or
    too few. Infinity where the largest number is due counts as the number that would come next."""
    dtype = DTYPES[kind]
    info, wide = np.finfo(dtype), want.dtype.type
    beyond = np.ldexp(wide(1), info.maxexp)
    with np.errstate(all="ignore"):
        bounded = np.clip(np.nan_to_num(want, nan=1.0), -beyond, beyond)
        spacing = np.ldexp(wide(1), np.frexp(bounded)[1].astype(np.int32) - info.nmant - 1)
        spacing = np.clip(spacing, wide(info.smallest_subnormal), wide(info.max) * wide(info.eps) / 2)
        error = abs(np.clip(got.astype(want.dtype), -beyond, beyond) - bounded) / spacing
    return np.where(np.isnan(got) & np.isnan(want), 0, np.where(np.isnan(got) | np.isnan(want), np.inf, error))


# ------------------------------------------------------------------------------------------------------- samples
# Where a function has its interesting points: intervals that the samples cover evenly, beside all magnitudes.
FOCUS = {
    "exp": [(-110, 90), (-1, 1), (-760, 720)],
    "exp2": [(-155, 130), (-1, 1), (-1080, 1030)],
    "expm1": [(-20, 90), (-1, 1), (-40, 711)],
    "logistic": [(-110, 30), (-1, 1), (-8, 8), (-760, 60)],
    "log": [(0, 4), (0.5, 1.5), (0.999, 1.001)],
    "log1p": [(-1, 4), (-0.5, 0.5), (-1e-3, 1e-3)],
    "sin": [(-8, 8), (-1e3, 1e3), (-(2**20), 2**20), (2**20, 2**32)],
    "atan": [(-4, 4), (-1, 1), (-100, 100)],
    "asin": [(-1, 1), (0.5, 0.6), (0.99, 1)],
    "acos": [(-1, 1), (0.5, 0.6), (0.99, 1), (-1, -0.99)],
    "tanh": [(-10, 10), (-1, 1), (-20, 20)],
    "sinh": [(-90, 90), (-3, 3), (0.9, 1.5), (-711, 711)],
    "asinh": [(-90, 90), (-2, 2), (-1e9, 1e9)],
    "acosh": [(1, 90), (1, 3), (1, 1.001), (1, 1e9)],
    "atanh": [(-1, 1), (0.4, 0.6), (0.99, 1)],
    "erf": [(-4, 4), (-1, 1), (0.8, 1.5)],
    "erfc": [(-4, 4), (0.4, 2), (3, 10.2), (5, 28)],
    "erf_inv": [(-1, 1), (0.9, 1), (0.9999, 1), (1 - 1e-6, 1)],
    "lgamma": [(0, 10), (0.9, 1.1), (1.4, 2.6), (6, 8), (-0.5, 0)],
    "digamma": [(0, 10), (0.9, 1.1), (1.4, 1.5), (6, 8), (-0.25, 0)],
    "sqrt": [(0, 10)],
    "cbrt": [(-10, 10)],
    "round_away": [(-10, 10), (-(2**25), 2**25), (-(2.0**54), 2.0**54)],
}
for _to, _from in {
    **dict(log2="log", cos="sin", tan="sin", cosh="sinh", rsqrt="sqrt", integer_pow="sqrt", is_finite="round_away"),
    **dict(floor="round_away", ceil="round_away", round_even="round_away", sign="round_away"),
}.items():
    FOCUS[_to] = FOCUS[_from]
SPECIAL = [0, 1, 2, 3, 0.5, 1.5, 2.5, np.inf, np.nan, 7, 1 / 3, 100, 127, 128, 149, 150, 1e10, 1e-10, 2**23 + 1, 2**24]


def special(kind: str):
    """Zeros, infinities, NaN, the ends of the normal and subnormal numbers, halves and whole numbers; both signs."""
    info = np.finfo(DTYPES[kind])
    ends = [info.max, info.tiny, info.smallest_subnormal, info.tiny * 0.5, 1 - info.epsneg, 1 + info.eps, 2.0**52 + 1]
    x = np.array(SPECIAL + [float(v) for v in ends], DTYPES[kind])
    return np.concatenate([x, -x])


def samples(name: str, kind: str, count: int, stride: int):
    """Operands: bit patterns of all magnitudes (f32: with a stride over all of them), and the focus intervals."""
    rng, dtype = np.random.default_rng(sum(map(ord, name))), DTYPES[kind]

    def bits(n):
        return np.frombuffer(rng.bytes(n * dtype.itemsize), dtype)

    if RULES[name].arity == 2:
        pairs = [(bits(count), bits(count)), (rng.uniform(-10, 10, count), rng.uniform(-10, 10, count))]
        if name == "pow":
            far = 80 if kind == "f32" else 700
            pairs.append((np.exp(rng.uniform(-far, far, count)), rng.uniform(-1.2, 1.2, count)))
            pairs.append((rng.uniform(0.99, 1.01, count), rng.uniform(-9000, 9000, count)))
            pairs.append((rng.uniform(-10, 10, count), np.round(rng.uniform(-40, 40, count))))
        pairs.append([v.ravel() for v in np.meshgrid(special(kind), special(kind))])
        return tuple(np.concatenate([np.asarray(p[k], dtype) for p in pairs]) for k in (0, 1))
    patterns = (
        np.arange(rng.integers(stride), 2**32, stride).astype(np.uint32).view(dtype) if kind == "f32" else bits(count)
    )
    return (np.concatenate([special(kind), patterns, *[rng.uniform(*f, count).astype(dtype) for f in FOCUS[name]]]),)


def largest_error(name: str, kind: str, count: int, stride: int, lanes: int = 8):
    """The largest error in ulp over samples, and where."""
    if kind == "f64" and name in MPMATH:
        count = min(count, 1500)
    xs = samples(name, kind, count, stride)
    got, want = compiled(name, kind, lanes, options(name))(*xs), reference(name, kind, *xs)
    error = ulps(got, np.asarray(want), kind)
    if name in ("lgamma", "digamma"):  # see their notes: cancellation near the zeros on the negative axis
        error = np.where((xs[0] < -0.5) & (abs(want) < 1), 0, error)
    worst = int(np.argmax(error))
    return float(error[worst]), f"{name}({', '.join(repr(x[worst]) for x in xs)}) = {got[worst]!r}, not {want[worst]!r}"


def options(name: str) -> tuple:
    """What a function takes beside its operands."""
    return (3,) if name == "integer_pow" else ()


# --------------------------------------------------------------------------------------------------------- tests
@kinds
@pytest.mark.parametrize("name", INEXACT)
def test_errors_stay_within_the_stated_bound(name, kind):
    error, where = largest_error(name, kind, 200_000, 2003)
    assert error <= getattr(RULES[name], f"ulp_{kind}"), f"{error:.2f} ulp: {where}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in INEXACT if RULES[n].arity == 1])
def test_errors_stay_within_the_stated_bound_at_every_127th_float(name):
    error, where = 0.0, ""
    for start in range(127):  # in parts, to bound memory
        x = np.arange(start, 2**32, 127 * 127).astype(np.uint32).view(np.float32)
        found = ulps(compiled(name, "f32", 8, options(name))(x), reference(name, "f32", x), "f32")
        if name in ("lgamma", "digamma"):
            found = np.where((x < -0.5) & (abs(reference(name, "f32", x)) < 1), 0, found)
        if found.max() > error:
            error, where = found.max(), f"at {x[found.argmax()]!r}"
    assert error <= RULES[name].ulp_f32, f"{error:.2f} ulp {where}"


@kinds
@pytest.mark.parametrize("name", EXACT)
def test_exact_functions_are_exact_to_the_bit(name, kind):
    xs = samples(name, kind, 50_000, 9973)
    got = compiled(name, kind, 8)(*xs)
    want = reference(name, kind, *xs).astype(got.dtype)
    same = (got == want) & (np.signbit(got) == np.signbit(want)) if got.dtype != bool else got == want
    same |= (got != got) & (want != want)
    bad = np.flatnonzero(~same)
    assert not bad.size, [(*[x[i] for x in xs], got[i], want[i]) for i in bad[:5]]


@kinds
@pytest.mark.parametrize("name", [n for n in INEXACT if n not in MPMATH])
def test_zeros_keep_their_signs(name, kind):
    xs = [special(kind)] if RULES[name].arity == 1 else [v.ravel() for v in np.meshgrid(special(kind), special(kind))]
    got = compiled(name, kind, 8, options(name))(*xs)
    with np.errstate(all="ignore"):
        want = REFERENCES[name](*xs)
    zero = (want == 0) & (got == 0)
    assert zero.any() or name in ("exp2", "cosh", "rsqrt", "cos", "logistic")
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("name", SCIPY)
def test_special_values_of_the_error_and_gamma_functions(name):
    inf, nan = np.inf, np.nan
    x, want = {
        "erf": ([0.0, -0.0, inf, -inf, nan, 1e-40], [0.0, -0.0, 1, -1, nan, 1.1283792e-40]),
        "erfc": ([0.0, -0.0, inf, -inf, nan, 30], [1, 1, 0.0, 2, nan, 0.0]),
        "erf_inv": ([0.0, -0.0, 1, -1, 1.5, -inf, nan], [0.0, -0.0, inf, -inf, nan, nan, nan]),
        "lgamma": ([0.0, -0.0, -3, 1, 2, inf, -inf, nan], [inf, inf, inf, 0.0, 0.0, inf, inf, nan]),
        "digamma": ([0.0, -0.0, -3, 1, inf, -inf, nan], [-inf, -inf, nan, -0.5772156649015329, inf, nan, nan]),
    }[name]
    for kind in ("f32", "f64"):
        got, due = compiled(name, kind, 1)(np.array(x, DTYPES[kind])), np.array(want)
        np.testing.assert_allclose(got, due, rtol=1e-4)  # 1e-40 is subnormal in f32
        np.testing.assert_array_equal(np.signbit(got[due == 0]), np.signbit(due[due == 0]))


@pytest.mark.parametrize("name", RULES)
def test_the_number_of_lanes_does_not_change_a_bit(name):
    for kind in ("f32", "f64"):
        xs = [x[:3001] for x in samples(name, kind, 1000, 2**22)]
        results = [compiled(name, kind, lanes, options(name))(*xs) for lanes in (8, 1, 3)]
        for other in results[1:]:
            assert ((results[0] == other) | (other != other)).all()
            np.testing.assert_array_equal(results[0] != results[0], other != other)


@pytest.mark.parametrize("n", [-3, -1, 0, 1, 2, 5, 8, 13])
def test_integer_pow_multiplies(n):
    x = np.linspace(-3, 3, 1001, dtype=np.float32)[1::2]
    np.testing.assert_allclose(compiled("integer_pow", "f32", 8, (n,))(x), x.astype(float) ** n, rtol=1e-6)


def external_calls(assembly: str) -> set[str]:
    """What an assembly text calls, beside the reduction of huge angles that is its own."""
    called = re.findall(r"(?m)^\s+(?:call|callq|bl)\s+\"?([\w.*%]+)", assembly)
    return {c for c in called if not c.startswith("palladion.reduce")}


@pytest.mark.parametrize("name", RULES)
def test_no_function_calls_the_c_library(name):
    for kind in ("f32", "f64"):
        assert not external_calls(cache.assembly(module(name, kind, 8, options(name))))


@pytest.mark.slow
@pytest.mark.parametrize("arch, cpu", [("x86_64", "haswell"), ("aarch64", "neoverse-n1")])
def test_no_function_calls_the_c_library_on_other_machines(arch, cpu):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(f"{arch}-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu, opt=2, reloc="pic", codemodel="small")
    for name in RULES:
        for kind, lanes in (("f32", 8), ("f32", 1), ("f64", 4)):
            m = module(name, kind, lanes, options(name))
            m.triple, m.data_layout = machine.triple, str(machine.target_data)
            assert not external_calls(machine.emit_assembly(cache.parse(m))), (name, kind, lanes)


def test_branches_do_not_depend_on_undefined_lanes():
    # A masked load may leave lanes undefined; a branch on one of them would be undefined behaviour.
    for name in ("sin", "rem"):
        assert " = freeze <8 x i1>" in str(module(name, "f32", 8))


def test_huge_arguments_do_not_slow_down_their_module():
    # The slow reduction is one function of the module, however often sin and cos occur.
    m = builder.new_module("twice")
    fn, b = builder.define(m, "go", builder.vec(builder.f32, 8), builder.vec(builder.f32, 8))
    b.ret(RULES["sin"].emit(b, RULES["cos"].emit(b, RULES["sin"].emit(b, fn.args[0]))))
    assert sorted(f.name for f in m.functions if not f.is_declaration) == [
        "go",
        "palladion.reduce",
        "palladion.reduce.v8f32.2",
    ]
    cache.compile_module(m)


@pytest.mark.slow
def test_coefficients_are_what_the_script_derives():
    path = pathlib.Path(__file__).with_name("fit_math.py")
    spec = importlib.util.spec_from_file_location("fit_math", path)
    assert spec is not None and spec.loader is not None
    fit_math = importlib.util.module_from_spec(spec)
    sys.modules["fit_math"] = fit_math  # dataclasses look their module up
    spec.loader.exec_module(fit_math)
    assert fit_math.text() == pathlib.Path(coefficients.__file__).read_text()


# --------------------------------------------------------------------------------------------------------- table
def nanoseconds(name: str, kind: str) -> float:
    """Time an element on one core, in a loop over 4,096 elements that the cache holds, a register of lanes a step: the
    best of many, less that of an empty loop."""
    x = np.random.default_rng(0).uniform(0.1, 0.9, 4096).astype(DTYPES[kind]) + (name == "acosh")
    go, out = compiled(name, kind, host().lanes(x.itemsize), options(name)).bare, np.empty_like(x)
    addresses = [*[x.ctypes.data] * RULES[name].arity, out.ctypes.data]
    best = {0: np.inf, x.size: np.inf}
    for _ in range(500):
        for n in best:
            start = time.perf_counter()
            go(*addresses, n)
            best[n] = min(best[n], time.perf_counter() - start)
    return 1e9 * (best[x.size] - best[0]) / x.size


if __name__ == "__main__":
    print("| function | f32: bound | measured | ns | f64: bound | measured | ns | |\n|---|---|---|---|---|---|---|---|")
    for each, rule in RULES.items():
        cells = [each]
        for k in ("f32", "f64"):
            measured = largest_error(each, k, 1_000_000, 127)[0] if each in INEXACT else 0.0
            cells += [f"{getattr(rule, f'ulp_{k}'):g}", f"{measured:.2f}", f"{nanoseconds(each, k):.2f}"]
        print("| " + " | ".join([*cells, rule.note]) + " |", flush=True)
