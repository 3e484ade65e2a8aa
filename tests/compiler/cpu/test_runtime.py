"""The runtime of native kernels: the FFI handler, threads, errors, calls of the host, element types."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from compiler.cpu import kernels
from compiler.cpu.kernels import MUCH_NS
from palladion.compiler.cpu import abi, builder, cache, ffi, runtime, target
from palladion.compiler.cpu.builder import const, f32, i32
from palladion.compiler.cpu.runtime import Array, HostSite, KernelDescription, Phase

THREADED = pytest.mark.skipif(runtime.cpu_count() < 2, reason="needs two CPUs")


def jitted(built, **jit_options):
    key = runtime.load(*built)
    return jax.jit(lambda *args: runtime.call(key, *args), **jit_options)


def raw_call(key, results, *args):
    """A call of the target that lower_call's care does not protect."""
    return jax.block_until_ready(jax.ffi.ffi_call(ffi.TARGET_NAME, results)(*args, kernel=np.int64(key)))


def reported(report):
    """A probe's report: columns thread, address of the argument, address of the result, worker."""
    return np.asarray(report).view(np.int64)


def copies(function, *args):
    return function.lower(*args).compile().as_text().count(" copy(")


# --- buffers --------------------------------------------------------------------------------------------------------
def test_kernels_get_the_arrays_own_memory():
    x = jnp.arange(1 << 16, dtype=jnp.float32)
    report, out = jitted(kernels.probe(1 << 16))(x)
    assert (reported(report)[:, 1] == x.unsafe_buffer_pointer()).all()
    assert (reported(report)[:, 2] == out.unsafe_buffer_pointer()).all()
    assert x.unsafe_buffer_pointer() % 64 == 0 and out.unsafe_buffer_pointer() % 64 == 0


def test_outside_and_inside_jit():
    key = runtime.load(*kernels.add((3, 5)))
    x, y = jnp.arange(15, dtype=jnp.float32).reshape(3, 5), jnp.ones((3, 5))
    np.testing.assert_array_equal(runtime.call(key, x, y)[0], x + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: runtime.call(key, x * 2, x)[0] * 10)(x), x * 30)


def test_a_donated_argument_is_written_in_place():
    built = kernels.probe(1 << 12, aliases=((0, 1),))
    donating, keeping = jitted(built, donate_argnums=0), jitted(built)
    x = jnp.ones(1 << 12) + 0
    address = x.unsafe_buffer_pointer()
    report, out = donating(x)
    assert (reported(report)[:, 1:3] == address).all() and out.unsafe_buffer_pointer() == address
    x = jnp.ones(1 << 12)
    report, out = keeping(x)  # XLA copies it: x is still the caller's
    assert (reported(report)[:, 1] != x.unsafe_buffer_pointer()).all()
    assert copies(donating, x) == 0 and copies(keeping, x) == 1


def test_loops_update_in_place():
    n = 1 << 12
    key = runtime.load(*kernels.add((n,), aliases=((0, 0),)))
    y = jnp.ones(n)

    def fori(x):
        return jax.lax.fori_loop(0, 10, lambda i, c: runtime.call(key, c, y)[0], x)

    def scan(x):
        return jax.lax.scan(lambda c, _: (runtime.call(key, c, y)[0], None), x, length=10)[0]

    def wheel(x):
        return jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, runtime.call(key, c[1], y)[0]), (0, x))[1]

    x = jnp.arange(n, dtype=jnp.float32)
    for function in (fori, scan, wheel):
        compiled = jax.jit(function, donate_argnums=0)
        text = compiled.lower(x).compile().as_text()
        assert f"f32[{n}]{{0}} copy(" not in text, function.__name__
        np.testing.assert_array_equal(compiled(x + 0), x + 10)


def test_under_shard_map():
    devices = jax.devices()
    assert len(devices) == 4
    mesh = jax.make_mesh((4,), ("i",))
    key = runtime.load(*kernels.add((256,), cost_ns=MUCH_NS))
    spec = PartitionSpec("i")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    def f(x, y):
        return runtime.call(key, x, y)[0]

    x = jax.device_put(jnp.arange(1024, dtype=jnp.float32), NamedSharding(mesh, spec))
    z = f(x, x)
    assert len(z.sharding.device_set) == 4
    np.testing.assert_array_equal(z, 2 * x)


@pytest.mark.parametrize("dtype", sorted(abi.DTYPES))
def test_every_dtype_is_passed_as_xla_stores_it(dtype):
    with jax.enable_x64(True):
        values = np.arange(15) % 2 + 1  # 1 and 2, or -1 and 0
        x = jnp.asarray(values - 2 if dtype.startswith("int") else values).astype(dtype)
        array = Array((15,), dtype)
        (y,) = jitted(kernels.copy_bytes(array))(x)
        assert y.dtype == x.dtype
        assert np.asarray(y).tobytes() == np.asarray(x).tobytes()
        packed = {"int4": 8, "uint4": 8, "float4_e2m1fn": 8, "int2": 4, "uint2": 4}
        assert array.nbytes == packed.get(dtype, 15 * x.dtype.itemsize)


def test_int4_has_two_elements_a_byte_the_first_in_the_low_bits():
    key = runtime.load(*_bytes_of(Array((5,), "int4")))
    (y,) = runtime.call(key, jnp.asarray([1, -1, 2, -8, 3], "int4"))
    assert list(np.asarray(y)[:2]) == [0xF1, 0x82] and np.asarray(y)[2] & 15 == 3


def _bytes_of(array):
    m, d = kernels.copy_bytes(array, "bytes_of")
    return m, KernelDescription("bytes_of", d.args, (Array((array.nbytes,), "uint8"),), d.phases)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 2, 1, 3, 1, 2, 1, 2, 1, 2)])
def test_any_rank_and_no_elements(shape):
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    (z,) = jitted(kernels.add(shape))(x, x)
    assert z.shape == shape
    np.testing.assert_array_equal(z, 2 * x)


def test_any_number_of_buffers():
    count = 70
    m, b, pointers, *_ = kernels.kernel("sum", count + 1)
    total = const(0.0, f32)
    for p in pointers[:-1]:
        total = b.fadd(total, builder.load(b, f32, p))
    builder.store(b, total, pointers[-1])
    kernels.done(b)
    a = Array((1,), "float32")
    (y,) = jitted((m, KernelDescription("sum", (a,) * count, (a,), (Phase("sum", 0, 1),))))(
        *[jnp.full((1,), i, jnp.float32) for i in range(count)]
    )
    assert y[0] == sum(range(count))


# --- wrong calls ----------------------------------------------------------------------------------------------------
def test_a_call_that_does_not_fit_says_how():
    key = runtime.load(*kernels.add((8, 16)))
    good, out = jnp.ones((8, 16)), jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def message(results, *args):
        with pytest.raises(jax.errors.JaxRuntimeError) as info:
            raw_call(key, results, *args)
        return str(info.value)

    assert message([out], good, good.astype(jnp.int32)) == (
        "INVALID_ARGUMENT: kernel 'add', argument 1: its dtype is int32, expected float32"
    )
    assert message([out], good[0], good) == (
        "INVALID_ARGUMENT: kernel 'add', argument 0: it has 1 dimensions, expected 2"
    )
    assert message([out], good, good[:, :9]) == (
        "INVALID_ARGUMENT: kernel 'add', argument 1: dimension 1 is 9, expected 16"
    )
    assert message([jax.ShapeDtypeStruct((7, 16), jnp.float32)], good, good) == (
        "INVALID_ARGUMENT: kernel 'add', result 0: dimension 0 is 7, expected 8"
    )
    assert message([out], good) == "INVALID_ARGUMENT: kernel 'add': it is called with 1 arguments, expected 2"
    assert message([out, out], good, good) == "INVALID_ARGUMENT: kernel 'add': it is called with 2 results, expected 1"
    np.testing.assert_array_equal(raw_call(key, [out], good, good)[0], 2 * good)


def test_an_unknown_key_is_not_found():
    with pytest.raises(jax.errors.JaxRuntimeError, match="NOT_FOUND: no native kernel with key 0000000000003039"):
        raw_call(12345, [jax.ShapeDtypeStruct((2,), jnp.float32)], jnp.ones(2))


def test_aliases_that_do_not_hold_are_refused():
    key = runtime.load(*kernels.add((4,), aliases=((0, 0),)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="argument 0 and result 0 are not in the same memory"):
        raw_call(key, [jax.ShapeDtypeStruct((4,), jnp.float32)], jnp.ones(4), jnp.ones(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": (Array((2,), "float4_e8m9"),) * 2}, "no buffers of dtype float4_e8m9"),
        ({"arena_bytes": 100}, "not a multiple of 64"),
        ({"args": (Array((2,), "int32"),) * 2, "aliases": ((0, 0),)}, "cannot be the same memory"),
    ],
)
def test_a_description_that_contradicts_itself(changes, message):
    m, d = kernels.add((2,))
    with pytest.raises(ValueError, match=message):
        runtime.load(m, dataclasses.replace(d, **changes))


def test_a_function_that_is_nowhere(capfd):
    m, b, *_ = kernels.kernel("lost", 1)
    b.ret(builder.call_extern(b, i32, "no_such_function_anywhere"))
    a = Array((1,), "float32")
    with pytest.raises(RuntimeError, match="Failed to materialize symbols"):
        runtime.load(m, KernelDescription("lost", (a,), (a,), (Phase("lost", 0, 1),)))
    assert "no_such_function_anywhere" in capfd.readouterr().err


# --- threads --------------------------------------------------------------------------------------------------------
@THREADED
def test_work_is_shared_and_each_thread_has_its_own_worker_index():
    f = jitted(kernels.probe(8, programs=256, spins=20_000))
    x = jnp.ones(8)
    for _ in range(20):
        report = reported(f(x)[0])
        pairs = {(int(thread), int(worker)) for thread, _, _, worker in report}
        assert len({t for t, _ in pairs}) == len({w for _, w in pairs}) == len(pairs)
        assert all(0 <= w < runtime.cpu_count() for _, w in pairs)
        if len(pairs) > 1:
            return
    pytest.fail("no launch of twenty used a second thread")


@pytest.mark.parametrize("options", [{"num_threads": 1}, {"cost_ns": runtime.SERIAL_BELOW_NS - 1}])
def test_one_thread_where_that_is_asked_for_or_enough(options):
    f = jitted(kernels.probe(8, programs=64, spins=20_000, **options))
    for _ in range(5):
        report = reported(f(jnp.ones(8))[0])
        assert len(set(report[:, 0])) == 1 and set(report[:, 3]) == {0}


def test_workers_follow_cost_threads_and_programs(monkeypatch):
    monkeypatch.setattr(runtime, "cpu_count", lambda: 16)
    a = Array((1,), "float32")

    def workers(num_threads=None, **phase):
        phase = {"begin": 0, "end": 1000, "cost_ns": MUCH_NS} | phase
        return KernelDescription("k", (a,), (a,), (Phase("k", **phase),), num_threads=num_threads).workers

    assert workers() == 16
    assert workers(num_threads=3) == 3
    assert workers(parallel=False) == 1
    assert workers(end=5) == 5
    assert workers(end=0) == 1
    assert workers(cost_ns=30_000) == 4
    assert workers(cost_ns=14_999) == 1


def test_arenas_are_private():
    key = runtime.load(*kernels.private_arena())
    x = jnp.zeros(400, jnp.int32)

    @jax.jit
    def f(x):
        return [runtime.call(key, x + i)[0] for i in range(4)]

    for _ in range(10):
        for wrong in f(x):
            np.testing.assert_array_equal(wrong, 0)


def test_a_phase_sees_all_of_the_one_before():
    f = jitted(kernels.two_phases(1 << 15))
    x = jax.random.normal(jax.random.key(0), (1 << 15,))
    for _ in range(20):
        y, z = f(x)
        np.testing.assert_array_equal(y, 2 * x)
        np.testing.assert_array_equal(z, 2 * x + 2 * x[::-1])


def test_concurrent_programs_do_not_deadlock():
    code = """if True:
        import threading, jax, jax.numpy as jnp
        from compiler.cpu import kernels
        from palladion.compiler.cpu import runtime
        n = 1 << 14
        key = runtime.load(*kernels.probe(n, spins=300))
        xs = [jnp.full(n, i, jnp.float32) for i in range(16)]
        f = jax.jit(lambda *xs: [runtime.call(key, x) for x in xs])  # independent: XLA runs some on its pool
        def client():
            for _ in range(30):
                jax.block_until_ready(f(*xs))
        clients = [threading.Thread(target=client) for _ in range(8)]
        [c.start() for c in clients]
        [c.join() for c in clients]
        print("finished, with up to", runtime.cpu_count(), "threads a call")
    """
    done = subprocess.run([sys.executable, "-c", code], env=_env(NPROC="6"), capture_output=True, text=True, timeout=60)
    assert done.stdout == "finished, with up to 6 threads a call\n", done.stderr


def _env(**more):
    tests = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return {**os.environ, "PYTHONPATH": tests, **more}


def test_other_python_threads_run_during_a_call():
    f = jitted(kernels.probe(8, programs=8, spins=4_000_000))
    x, ticks, stop = jnp.ones(8), [], threading.Event()
    jax.block_until_ready(f(x))

    def tick():
        while not stop.wait(0.0005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    jax.block_until_ready(f(x))
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(start < t < end for t in ticks) >= 5


# --- errors and the host --------------------------------------------------------------------------------------------
def test_a_status_stops_the_other_chunks_and_names_its_message():
    f = jitted(kernels.failing(20_000, 3, -2), donate_argnums=0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INVALID_ARGUMENT: kernel 'failing': first\n"):
        jax.block_until_ready(f(jnp.zeros(1, jnp.int32)))


def test_no_chunk_is_begun_after_a_failure():
    ran = []
    m, d = kernels.telling(4, (1, 2), programs=5000)

    def count(x, number):
        ran.append(int(number))
        if number == 5:
            raise ValueError("enough")

    key = runtime.load(m, d, [HostSite("count", count, (Array((4,), "float32"), Array((), "int32")))])
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: enough"):
        jax.block_until_ready(runtime.call(key, jnp.ones(4)))
    assert 5 in ran and len(ran) < 100
    ran.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: enough"):
        jax.block_until_ready(runtime.call(key, jnp.ones(4)))  # and the process is none the worse for it


def test_a_status_without_a_message():
    f = jitted(kernels.failing(10, 3, -77))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: kernel 'failing' stopped with status -77"):
        jax.block_until_ready(f(jnp.zeros(1, jnp.int32)))


def test_the_host_gets_values_and_prints(capfd):
    m, d = kernels.telling(3, (1, 2))
    site = HostSite(
        "print", lambda x, n: print(f"x = {x}, program {n}", flush=True), (Array((3,), "float32"), Array((), "int32"))
    )
    key = runtime.load(m, d, [site])
    (y,) = jax.jit(lambda x: runtime.call(key, x))(jnp.asarray([1.0, 2.5, -0.0]))
    np.testing.assert_array_equal(y, [1.0, 2.5, 0.0])
    assert capfd.readouterr().out == "x = [ 1.   2.5 -0. ], program 0\n"


def test_the_text_of_an_exception_is_the_error():
    text = "grid point (3, 4): größer ≥ 0 " + "x" * 9000

    def check(x):
        raise KeyError(text) if x[0] < 0 else AssertionError(text) if x[0] > 0 else SystemExit()

    m, d = kernels.telling(1, (1,))
    key = runtime.load(m, d, [HostSite("check", check, (Array((1,), "float32"),))])
    with pytest.raises(jax.errors.JaxRuntimeError) as info:
        jax.block_until_ready(runtime.call(key, jnp.asarray([1.0])))
    assert str(info.value).startswith("INVALID_ARGUMENT: grid point (3, 4): größer ≥ 0 xxx")
    assert len(str(info.value).encode()) > 8000
    with pytest.raises(jax.errors.JaxRuntimeError, match="SystemExit"):
        jax.block_until_ready(runtime.call(key, jnp.asarray([0.0])))


def test_kernels_that_print_are_kept_though_nobody_uses_their_results(capfd):
    m, d = kernels.telling(1, (1,))
    site = HostSite("hello", lambda x: print("hello", flush=True), (Array((1,), "float32"),))
    key = runtime.load(m, d, [site])
    text = jax.jit(lambda x: (runtime.call(key, x), x)[1]).lower(jnp.ones(1)).as_text()
    assert "has_side_effect = true" in text
    plain = runtime.load(*kernels.add((2,)))
    text = jax.jit(lambda x: runtime.call(plain, x, x)).lower(jnp.ones(2)).as_text()
    assert "has_side_effect" not in text


def test_host_sites_with_other_names_are_other_kernels():
    m, d = kernels.telling(1, (1,))
    values = (Array((1,), "float32"),)
    first, second = (runtime.load(m, d, [HostSite(n, lambda x: None, values)]) for n in ("first", "second"))
    assert first != second
    assert runtime.load(m, d, [HostSite("first", lambda x: None, values)]) == first


# --- floating point -------------------------------------------------------------------------------------------------
def test_subnormals_are_computed_and_the_mode_of_xla_is_restored():
    n = 1 << 14
    for cost in (0, MUCH_NS):
        key = runtime.load(*kernels.add((n,), cost_ns=cost))
        tiny = jnp.full((n,), 1.5 * np.finfo(np.float32).tiny)

        @jax.jit
        def f(x, minus):
            before = x + minus
            between = runtime.call(key, x, minus)[0]
            after = jax.lax.optimization_barrier((x, between))[0] + minus
            return before, between, after

        before, between, after = f(tiny, -jnp.full((n,), np.finfo(np.float32).tiny))
        np.testing.assert_array_equal(between, np.float32(0.5) * np.finfo(np.float32).tiny)
        np.testing.assert_array_equal(before, after)


# --- loading --------------------------------------------------------------------------------------------------------
def test_loading_twice_is_loading_once():
    assert runtime.load(*kernels.add((2, 2))) == runtime.load(*kernels.add((2, 2)))
    assert runtime.load(*kernels.add((2, 2))) != runtime.load(*kernels.add((4,)))


def test_threads_may_load_at_once():
    keys = [[] for _ in range(8)]

    def client(mine):
        for n in range(1, 9):
            mine.append(runtime.load(*kernels.add((n, 3), name="by threads")))

    threads = [threading.Thread(target=client, args=(k,)) for k in keys]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(k == keys[0] for k in keys) and len(set(keys[0])) == 8
    x = jnp.ones((8, 3))
    np.testing.assert_array_equal(runtime.call(keys[0][-1], x, x)[0], 2 * x)


def test_many_kernels():
    module, _ = kernels.add((1,))
    text = str(module)
    keys = [runtime.load(text, kernels.add((1,), name=f"number {n}")[1]) for n in range(300)]
    assert len(set(keys)) == 300
    x = jnp.ones(1)
    for key in keys[::37]:
        assert runtime.call(key, x, x)[0][0] == 2


# --- other machines -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("platform", "arch", "words"),
    [
        ("win32", "x86_64", "runs on Linux only, and this is win32"),
        ("darwin", "aarch64", "runs on Linux only, and this is darwin"),
        ("linux", "riscv64", "knows x86-64 and aarch64, not riscv64"),
        ("linux", "x86_64", None),
        ("linux", "aarch64", None),
    ],
)
def test_which_machines_have_a_compiler(platform, arch, words):
    reason = target.refusal(platform, arch)
    assert (reason is None) if words is None else (words in reason and "interpret=True" in reason)


def test_an_unsupported_machine_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "plan9")
    target.host.cache_clear()
    try:
        with pytest.raises(target.UnsupportedHost, match="this is plan9"):
            target.host()
    finally:
        monkeypatch.undo()
        target.host.cache_clear()


def test_the_host_has_vectors():
    host = target.host()
    assert host.vector_bytes in (16, 32, 64) and target.LANES_F32 == host.vector_bytes // 4
    assert host.lanes(8) == host.vector_bytes // 8
    assert host.has("sse2") or host.arch != "x86_64"
    assert not host.has("no such feature")


def test_the_runtime_compiles_for_arm(monkeypatch):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="neoverse-n1", opt=2, reloc="pic")
    arm = target.Host(triple, "neoverse-n1", "", str(machine.target_data), "aarch64", 16, True, 32)
    monkeypatch.setattr(target, "host", lambda: arm)
    assembly = machine.emit_assembly(cache.parse(ffi.build_runtime()))
    assert "msr\tFPCR" in assembly and "ldadd" in assembly + "ldadd" * ("ldaxr" in assembly)
