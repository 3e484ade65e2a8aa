"""Matrix products against NumPy in float64 (integers: exactly), here and as on lesser machines.

Operands lie in buffers of random bytes, which also lie around the workspace: none of those may change. Random products
run with every plan that the planner considers, so that the ones it rarely takes are tested too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest

from palladion.compiler.cpu import cache, target
from palladion.compiler.cpu.builder import define, new_module, ptr, void
from palladion.compiler.cpu.matmul import MatmulSpec, emit_matmul, workspace_bytes
from palladion.compiler.cpu.matmul_plan import plans

HOST = target.host()
FLOATS = ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
EPSILON = {"float32": 2.0**-24, "float64": 2.0**-53, "bfloat16": 2.0**-8, "float16": 2.0**-11}
GUARD = 192  # elements around each operand, bytes around the workspace


def _hosts() -> dict[str, target.Host]:
    """This machine, and lesser ones whose code it can run."""
    hosts = {"host": HOST}
    if HOST.arch != "x86_64":
        return hosts
    base = "+64bit,+cmov,+cx16,+fxsr,+mmx,+sse,+sse2"
    avx2 = base + ",+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
    avx512 = avx2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
    hosts["sse2"] = dataclasses.replace(HOST, cpu="x86-64", features=base, vector_bytes=16, registers=16, fma=False)
    if HOST.vector_bytes >= 32 and HOST.has("fma") and HOST.has("f16c"):
        hosts["avx2"] = dataclasses.replace(HOST, cpu="haswell", features=avx2, vector_bytes=32, registers=16)
    if HOST.has("avxvnni"):
        hosts["avxvnni"] = dataclasses.replace(hosts["avx2"], cpu="alderlake", features=avx2 + ",+avxvnni")
    if HOST.vector_bytes == 64:
        hosts["avx512"] = dataclasses.replace(HOST, cpu="skylake-avx512", features=avx512)
    return hosts


HOSTS = _hosts()


def compiled(spec, host=HOST, plan=None):
    """The product's function, called through a wrapper as a kernel would: f(A, B, C, workspace), addresses."""
    module = new_module("product")
    product = emit_matmul(module, spec, host, plan)
    wrapper, b = define(module, "wrapper", void, ptr, ptr, ptr, ptr)
    b.call(product, wrapper.args)
    b.ret_void()
    code = target._machine(host.cpu, host.features).emit_object(cache.parse(module))
    address = cache.link(code, ["wrapper"])["wrapper"]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(address)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def operand(rng, shape, strides, dtype, batch, batch_stride):
    """A buffer of random bytes, and a view (batch, *shape) of it with values to multiply."""
    dtype = dtype_of(dtype)
    steps = [(n - 1) * s if 0 not in shape else 0 for n, s in zip((batch, *shape), (batch_stride, *strides))]
    low, high = sum(min(0, s) for s in steps), sum(max(0, s) for s in steps)
    raw = rng.integers(0, 256, (high - low + 1 + 2 * GUARD) * dtype.itemsize, dtype=np.uint8)
    strides = tuple(s * dtype.itemsize for s in (batch_stride, *strides))
    view = np.ndarray((batch, *shape), dtype, raw, (GUARD - low) * dtype.itemsize, strides)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        view[...] = rng.integers(limits.min, limits.max, view.shape, dtype, endpoint=True)
    else:
        view[...] = rng.standard_normal(view.shape).astype(dtype)
    return raw, view


def check(spec, host=HOST, plan=None, seed=0):
    """Form one product and compare it, and all that may not change."""
    rng = np.random.default_rng(seed)
    shapes = (spec.m, spec.k), (spec.k, spec.n), (spec.m, spec.n)
    dtypes = spec.a_dtype, spec.b_dtype, spec.c_dtype
    made = [
        operand(rng, shape, strides, dtype, spec.batch, step)
        for shape, strides, dtype, step in zip(shapes, (spec.a, spec.b, spec.c), dtypes, spec.batch_strides)
    ]
    (raw_a, a), (raw_b, b), (raw_c, c) = made
    if plan is None:
        size = workspace_bytes(spec, host)
    else:
        size = max(offset + n for offset, n in plan.areas().values())
    raw_w = rng.integers(0, 256, size + 2 * GUARD, dtype=np.uint8)
    before = [raw.copy() for raw in (raw_a, raw_b, raw_c, raw_w)]
    wide = np.float64 if dtype_of(spec.a_dtype).kind not in "iu" else np.int64
    x, y, old = (v.astype(wide) for v in (a, b, c))
    old = old * spec.accumulate
    with np.errstate(over="ignore"):
        want = x @ y + old

    addresses = [v.__array_interface__["data"][0] for v in (a, b, c)]
    compiled(spec, host, plan)(*addresses, raw_w.ctypes.data + GUARD)

    if wide is np.int64:
        np.testing.assert_array_equal(c, want.astype(c.dtype), err_msg=f"{spec}\n{plan}")
    else:
        size_of_terms = np.abs(x) @ np.abs(y) + np.abs(old)
        inner = EPSILON["float64" if "float64" in dtypes else "float32"]
        bound = 2 * inner * (spec.k + 3) ** 0.5 * size_of_terms + 1.01 * EPSILON[spec.c_dtype] * np.abs(want)
        bound += 2.0**-24 if spec.c_dtype == "float16" else 2.0**-126
        error = np.abs(c.astype(np.float64) - want)
        worst = (error - bound).max(initial=-1.0)
        assert worst <= 0, f"{spec}\n{plan}\nbeyond the bound by {worst} at {np.argwhere(error > bound)[:4].tolist()}"
    expected = before[2].copy()
    offset = addresses[2] - raw_c.ctypes.data
    np.ndarray(c.shape, c.dtype, expected, offset, c.strides)[...] = c
    names = ("A", "B", "the gaps and surroundings of C", "the surroundings of the workspace")
    before[2], before[3][GUARD : GUARD + size] = expected, raw_w[GUARD : GUARD + size]
    for name, was, raw in zip(names, before, (raw_a, raw_b, raw_c, raw_w)):
        assert np.array_equal(was, raw), f"{name} changed\n{spec}\n{plan}"


def dense(m, n, k, dtype="float32", out=None, **rest):
    """Row-major operands without gaps."""
    out = out or ("int32" if "int" in dtype else dtype)
    return MatmulSpec(m, n, k, (k, 1), (n, 1), (n, 1), dtype, dtype, out, **rest)


# ----------------------------------------------------------------------------------------------------- tests
SIZES = [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 1, 97), (1, 101, 67), (103, 1, 61), (2, 3, 5), (7, 11, 13)]
SIZES += [(12, 32, 64), (13, 33, 65), (64, 64, 64), (59, 127, 31), (131, 71, 257), (25, 50, 1031), (5, 300, 700)]


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sizes(m, n, k, accumulate):
    check(dense(m, n, k, accumulate=accumulate))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_dtypes(dtype, host):
    out = "float32" if "float8" in dtype else dtype
    check(dense(37, 45, 83, dtype, out), HOSTS[host])
    if dtype in INTEGERS[:4]:
        check(dense(29, 35, 67, dtype, "int32", accumulate=True), HOSTS[host])


def random_spec(r: random.Random) -> MatmulSpec:
    """Any product: sizes around the edges of tiles, operands transposed, with gaps, reversed or in general strides."""
    size = lambda: r.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 31, 32, 33, 37, 41, 61, 64, 67, 97])
    m, n, k = size(), size(), size()
    if r.random() < 0.15:  # several slices of k
        m, n, k = min(m, 40), min(n, 40), r.choice([257, 300, 512, 600, 1025, 1100])

    def strides(rows, cols):
        gap, way = r.choice([0, 0, 1, 3, 16]), r.random()
        if way < 0.45:
            return cols + gap, 1
        if way < 0.8:
            return 1, rows + gap
        return r.choice([(2 * cols + gap, 2), (3, 3 * rows + gap), (-(cols + gap), 1), (1, -(rows + gap))])

    sort = FLOATS if r.random() < 0.6 else INTEGERS[:6]
    a = r.choice(sort)
    b = a if r.random() < 0.6 else r.choice(sort)
    c = r.choice(FLOATS[:4] if sort is FLOATS else INTEGERS[:7])
    if r.random() < 0.5:
        c = "float32" if sort is FLOATS else "int32"
    sides = [strides(m, k), strides(k, n), strides(m, n)]
    batch, steps = 1, [0, 0, 0]
    if r.random() < 0.15:
        batch = 3
        extents = [max(p, 1) * abs(s) + max(q, 1) * abs(t) for (p, q), (s, t) in zip(((m, k), (k, n), (m, n)), sides)]
        steps = [r.choice([0, extents[0]]), *extents[1:]]
    sizes = (max(m, 0), max(n, 0), max(k, 0))
    return MatmulSpec(*sizes, *sides, a, b, c, r.random() < 0.5, batch, tuple(steps))


@pytest.mark.parametrize("seed", range(8))
def test_random(seed):
    r = random.Random(seed)
    for case in range(36):
        spec, host = random_spec(r), HOSTS[r.choice(list(HOSTS))]
        ways = plans(spec, host) if spec.m * spec.n * spec.k else [None]
        check(spec, host, r.choice(ways), seed=case)


@pytest.mark.slow
def test_random_at_length():
    r = random.Random(1000)
    for case in range(500):
        spec, host = random_spec(r), HOSTS[r.choice(list(HOSTS))]
        for plan in plans(spec, host) if spec.m * spec.n * spec.k else [None]:
            check(spec, host, plan, seed=case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_of_a_large_array(dtype):
    """Windows whose rows are a page apart, added up over k as the tutorial's kernel does."""
    out = "int32" if dtype == "int8" else "float32"
    size, block = 512, 128
    spec = MatmulSpec(block, block, block, (size, 1), (size, 1), (size, 1), dtype, dtype, out, True)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (size, size)).astype(dtype_of(dtype)) for _ in range(2))
    c = np.zeros((size, size), out)
    work = np.empty(workspace_bytes(spec), np.uint8)
    product = compiled(spec)
    for i in range(0, size, block):
        for j in range(0, size, block):
            for k in range(0, size, block):
                windows = a[i:, k:], b[k:, j:], c[i:, j:]
                product(*(w.__array_interface__["data"][0] for w in windows), work.ctypes.data)
    np.testing.assert_array_equal(c, a.astype(np.float64) @ b.astype(np.float64))


NARROW = {"float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_narrow_value_is_converted_exactly(dtype, host):
    """All bit patterns times one, as the column A and as the row B, packed or not."""
    bits = np.arange(2 ** NARROW[dtype], dtype=f"uint{NARROW[dtype]}")
    x = bits.view(dtype_of(dtype))
    with np.errstate(invalid="ignore"):  # signalling NaN
        want = x.astype(np.float32)
    spec = MatmulSpec(len(x), 1, 1, (1, 1), (1, 1), (1, 1), dtype, "float32", "float32")
    one = np.ones(1, np.float32)
    ways = {}
    for s in (spec, spec.transposed()):
        for plan in plans(s, HOSTS[host]):
            ways[plan.a_mode, plan.b_mode, plan.dots] = s, plan
    assert len(ways) >= 2
    for s, plan in ways.values():
        got = np.empty(len(x), np.float32)
        work = np.empty(max(offset + n for offset, n in plan.areas().values()), np.uint8)
        sides = (x, one) if s is spec else (one, x)
        addresses = [v.__array_interface__["data"][0] for v in (*sides, got, work)]
        compiled(s, HOSTS[host], plan)(*addresses)
        np.testing.assert_array_equal(got, want, err_msg=str(plan))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_nearest_even(dtype, host):
    rng = np.random.default_rng(1)
    every = np.arange(0, 2**16, 7, dtype=np.uint16).view(dtype_of(dtype)).astype(np.float32)
    every = every[np.isfinite(every)]
    with np.errstate(over="ignore"):
        halfway = (every[:-1] + every[1:]) / 2
    bits = rng.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    bits = bits[~np.isnan(bits)]
    x = np.concatenate([every, halfway, np.nextafter(halfway, np.float32(0)), bits, [np.inf, -np.inf, np.nan]])
    x = x.astype(np.float32)
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0) | np.isnan(x)]  # f32 subnormals: as the thread's mode has it
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(dtype_of(dtype))
    one, got = np.ones(1, np.float32), np.empty(len(x), dtype_of(dtype))
    spec = MatmulSpec(1, len(x), 1, (1, 1), (len(x), 1), (len(x), 1), c_dtype=dtype)
    work = np.empty(workspace_bytes(spec, HOSTS[host]) + 1, np.uint8)
    compiled(spec, HOSTS[host])(*(v.__array_interface__["data"][0] for v in (one, x, got, work)))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))  # NaN equals NaN


@pytest.mark.parametrize("dtype, step", [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_float64_is_rounded_once(dtype, step):
    """Just past halfway between two results, by less than an f32 can tell."""
    x = np.array([1 + step / 2 + 2.0**-40, 1 + step / 2, 1 + 3 * step / 2 - 2.0**-40, 1 + 3 * step / 2, 1 + step])
    want = [1 + step, 1, 1 + step, 1 + 2 * step, 1 + step]
    one, got = np.ones(1), np.empty(len(x), dtype_of(dtype))
    spec = MatmulSpec(1, 5, 1, (1, 1), (5, 1), (5, 1), "float64", "float64", dtype)
    work = np.empty(workspace_bytes(spec) + 1, np.uint8)
    compiled(spec)(*(v.__array_interface__["data"][0] for v in (one, x, got, work)))
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_extremes_of_integers_wrap():
    """-32768 * -32768, twice in one pair, is 2**31, and bytes at their limits need every bit of the correction."""
    for a, b in (("int16", "int16"), ("int8", "int8"), ("uint8", "uint8"), ("int8", "uint8"), ("uint8", "int8")):
        for pick in ("min", "max"):
            x, y = (np.full(shape, getattr(np.iinfo(d), pick), d) for shape, d in (((20, 300), a), ((300, 40), b)))
            spec = MatmulSpec(20, 40, 300, (300, 1), (40, 1), (40, 1), a, b, "int32")
            got, work = np.empty((20, 40), np.int32), np.empty(workspace_bytes(spec) + 1, np.uint8)
            compiled(spec)(*(v.ctypes.data for v in (x, y, got, work)))
            np.testing.assert_array_equal(got, (x.astype(np.int64) @ y.astype(np.int64)).astype(np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("k", [1, 33, 64])
def test_nan_and_infinity_stay_in_their_row_and_column(dtype, k):
    """Padding multiplies zeros only by zeros: no NaN where there was none."""
    m, n = 14, 35
    a, b = np.ones((m, k), dtype_of(dtype)), np.ones((k, n), dtype_of(dtype))
    a[5, k - 1], b[0, 17], b[0, n - 1] = np.inf, np.nan, np.inf
    spec = dense(m, n, k, dtype, "float64" if dtype == "float64" else "float32")
    got, work = np.zeros((m, n), spec.c_dtype), np.empty(workspace_bytes(spec) + 1, np.uint8)
    compiled(spec)(*(v.__array_interface__["data"][0] for v in (a, b, got, work)))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, a.astype(spec.c_dtype) @ b.astype(spec.c_dtype))


def test_one_function_for_a_spec():
    module = new_module("twice")
    assert emit_matmul(module, dense(8, 8, 8)) is emit_matmul(module, dense(8, 8, 8))
    assert emit_matmul(module, dense(8, 8, 8)) is not emit_matmul(module, dense(8, 8, 8, accumulate=True))


@pytest.mark.parametrize(
    "spec, message",
    [
        (dense(2, 2, 2, "float32", "int32"), "convert the operands to one sort of number first"),
        (MatmulSpec(2, 2, 2, (2, 1), (2, 1), (2, 1), "int8", "float32", "float32"), "one sort of number"),
        (dense(2, 2, 2, "float8_e5m2", "float8_e5m2"), "results of float8_e5m2"),
        (dense(2, 2, 2, "bool", "int32"), "elements or results of bool"),
        (dense(2, 2, -1), "sizes of at least 0"),
    ],
)
def test_what_is_not_there_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        emit_matmul(new_module("refused"), spec)


def test_plans_fit_the_shape():
    """The planner's estimates rank the ways as they were measured."""
    if HOST.vector_bytes < 32:
        pytest.skip("estimates were checked on AVX2 and AVX-512")
    best = lambda spec: plans(spec, HOST)[0]
    assert best(dense(256, 256, 256)).b_mode == "side"  # many panels of rows share the packed B
    assert best(dense(12, 256, 256)).b_mode == "direct"  # one does not
    row_times_columns = MatmulSpec(1, 512, 512, (512, 1), (1, 512), (512, 1))
    assert best(row_times_columns).dots and not best(dense(1, 512, 512)).dots
    assert best(dense(512, 1, 512)).dots
    assert best(MatmulSpec(64, 128, 64, (64, 1), (128, 1), (1, 64))).swapped  # C is stored by columns
    if HOST.has("avx512bf16"):
        assert best(dense(128, 128, 128, "bfloat16")).kind.name == "bf16"


@functools.cache
def _arm():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM makes no code for aarch64")
    machine = machine.create_target_machine(cpu="neoverse-n1", opt=2, reloc="pic")
    host = dataclasses.replace(
        HOST, triple="aarch64-unknown-linux-gnu", cpu="neoverse-n1", features="+neon", arch="aarch64",
        vector_bytes=16, registers=32, fma=True,
    )  # fmt: skip
    return machine, host


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int16", "float8_e4m3fn"])
def test_code_for_arm_calls_nothing_from_outside(dtype):
    machine, host = _arm()
    out = "int32" if "int" in dtype else "float32"
    spec = MatmulSpec(21, 35, 70, (70, 1), (1, 70), (35, 1), dtype, dtype, out)
    for plan in plans(spec, host):
        module = new_module("arm")
        module.triple, module.data_layout = host.triple, str(machine.target_data)
        emit_matmul(module, spec, host, plan).linkage = "external"
        assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
        called = {line.split()[1] for line in assembly.splitlines() if line.split()[:1] == ["bl"]}
        assert called and all(name.startswith("matmul_") for name in called), called
        assert ("fmla" in assembly) == ("float" in dtype)
