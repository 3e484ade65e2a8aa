"""What broke the Mosaic GPU compiler or its emulated device, or might: odd shapes, names, dtypes, wrong programs."""

import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import PalladionWarning
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import nvrtc, tma
from palladion.compiler.gpu.build import LimitExceeded
from palladion.compiler.gpu.generate import generate
from palladion.compiler.gpu.writer import kernel_name
from palladion.emulator.faults import EmulationFault

compiles = pytest.mark.skipif(
    not nvrtc.available(), reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'"
)
EMULATED = plgpu.EmulateParams()
SEQUENTIAL = plgpu.CompilerParams(dimension_semantics=("sequential",), max_concurrent_steps=2)
F32, I32 = jnp.float32, jnp.int32


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(seed, *shape, dtype=F32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32), dtype)


def call(kernel, out, *args, interpret=EMULATED, **options):
    return pl.pallas_call(kernel, out, interpret=interpret, **options)(*args)


def twice(x_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[...]


def params_of(kernel, *shapes, **options):
    """Of the `pallas_call` equation of a call whose arrays are of one shape."""
    f = pl.pallas_call(kernel, shapes[-1], **options)
    (eqn,) = jax.make_jaxpr(f)(*shapes[:-1]).jaxpr.eqns
    return eqn.params


# --- sizes --------------------------------------------------------------------------------------------------------
@compiles
@pytest.mark.parametrize(
    ("n", "rows", "block", "dtype"),
    [
        (500, 13, 4, jnp.bfloat16),  # 500 = 4 * 125: no multiple of 16 bytes that divides it fits into a box
        (16, 521, 257, F32),  # a prime number of rows above 256
        (16, 600, 300, F32),
        (33, 7, 3, F32),
        (1, 5, 2, jnp.int8),
    ],
)
def test_blocks_that_boxes_of_the_copy_engine_do_not_divide(n, rows, block, dtype):
    x = normal(0, rows, n).astype(dtype)
    spec = pl.BlockSpec((block, n), lambda i: (i, 0))
    options: dict[str, Any] = dict(grid=(pl.cdiv(rows, block),), in_specs=[spec], out_specs=spec)
    for params in (None, SEQUENTIAL):
        found = call(twice, struct(rows, n, dtype=dtype), x, compiler_params=params, **options)
        np.testing.assert_array_equal(found, x + x)


@pytest.mark.parametrize(("size", "step"), [(257, 1), (521, 1), (64, 9), (514, 1), (1, 1)])
def test_boxes_hold_each_element_once(size, step):
    inside, looped = tma._boxed([tma.Piece(1, 16, 1, 4), tma.Piece(0, size, 1, 64, step)], 4, 0)
    along = [p for p in [*inside, *looped] if p.dim == 0]
    found = [0]
    for p in along:
        found = [a + k * p.weight for a in found for k in range(p.size)]
    assert sorted(found) == list(range(size))


@compiles
def test_more_dimensions_than_a_tensor_map_has():
    x = normal(0, 2, 3, 1, 5, 2, 7)
    kernel = lambda x, o: o.__setitem__(..., jnp.transpose(x[...], (5, 0, 3, 1, 4, 2)))
    np.testing.assert_array_equal(call(kernel, struct(7, 2, 5, 3, 2, 1), x), np.transpose(x, (5, 0, 3, 1, 4, 2)))

    def copied(x_ref, o_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[1], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    x = normal(0, 2, 2, 3, 2, 2, 3, 8)
    scratch = [plgpu.SMEM(x.shape[1:], F32), plgpu.Barrier()]
    f = plgpu.kernel(copied, out_type=struct(*x.shape[1:]), scratch_types=scratch, interpret=EMULATED)
    np.testing.assert_array_equal(f(x), x[1])


@compiles
@pytest.mark.parametrize("shape", [(), (1, 1, 1), (0, 4)])
def test_few_elements(shape):
    x = jnp.ones(shape)
    np.testing.assert_array_equal(call(twice, struct(*shape), x), 2 * np.ones(shape))


@compiles
def test_a_grid_without_programs_runs_nothing():
    spec = pl.BlockSpec((4,), lambda i: (i,))
    assert call(twice, struct(8), jnp.ones(8), grid=(0,), in_specs=[spec], out_specs=spec).shape == (8,)


# --- outputs that are inputs --------------------------------------------------------------------------------------
@compiles
@pytest.mark.parametrize("n", [64, 70])
def test_sums_into_an_aliased_output_over_sequential_steps(n):
    x, start = normal(0, 4, n), normal(1, n)

    def add(x_ref, start_ref, o_ref):
        o_ref[...] += x_ref[0] + 0 * start_ref[...]

    row = pl.BlockSpec((64,), lambda j, i: (j,))
    found = call(
        add,
        struct(n),
        x,
        start,
        grid=(pl.cdiv(n, 64), 4),
        in_specs=[pl.BlockSpec((1, 64), lambda j, i: (i, j)), row],
        out_specs=row,
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel", "sequential")),
    )
    np.testing.assert_allclose(found, np.float64(start) + np.float64(x).sum(0), rtol=1e-5, atol=1e-6)


# --- control flow -------------------------------------------------------------------------------------------------
@compiles
def test_conditions_in_a_while_loop_in_a_fori_loop_that_carry_arrays():
    x = normal(0, 8, 32)

    def kernel(x_ref, o_ref):
        def outer(i, carry):
            def body(w):
                n, a, s = w
                a, s = lax.cond(n % 2 == 0, lambda a, s: (a * 2, s + 1), lambda a, s: (a[::-1], s * 2), a, s)
                return n + 1, a, s

            return lax.while_loop(lambda w: w[0] < i + 2, body, (jnp.int32(0), *carry))[1:]

        a, s = lax.fori_loop(0, 4, outer, (x_ref[...], jnp.int32(1)))
        o_ref[...] = a + s.astype(F32)

    a: Any = np.float64(x)
    s = 1
    for i in range(4):
        for n in range(i + 2):
            a, s = (a * 2, s + 1) if n % 2 == 0 else (a[::-1], s * 2)
    np.testing.assert_allclose(call(kernel, struct(8, 32), x), a + s, rtol=1e-6)


def test_nested_loops_are_not_generated_over_and_over():
    lines = []
    for depth in (2, 4):

        def nest(d, v):
            if d == 0:
                return v + 1
            return lax.fori_loop(0, 2, lambda i, v: v + nest(d - 1, jnp.zeros((8,), F32)), v)

        kernel = lambda o_ref, depth=depth: o_ref.__setitem__(..., nest(depth, jnp.zeros((8,), F32)))
        lines.append(generate(params_of(kernel, struct(8)), "sm_90a").source.count("for ("))
    assert lines[1] - lines[0] < 40


# --- names --------------------------------------------------------------------------------------------------------
@compiles
@pytest.mark.parametrize("name", ["größe-1 *//", "a\nb\\", "int", "7", "数"])
def test_names_that_are_not_names_in_cpp(name):
    def kernel(float, while_):  # C++'s own words, and letters that it does not have
        größe = float[...] * 2  # 数 \
        while_[...] = größe

    np.testing.assert_array_equal(call(kernel, struct(8), jnp.ones(8), name=name), 2 * np.ones(8))


@pytest.mark.parametrize("name", ["größe", "数", "a b", ""])
def test_names_of_kernels_are_ascii(name):
    assert kernel_name(name).isidentifier() and kernel_name(name).isascii()


# --- refusals -----------------------------------------------------------------------------------------------------
def test_a_dtype_without_values_is_refused_at_the_users_line():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.fft.fft(x_ref[...]).real

    with pytest.raises(TypeError, match=r"no values of complex64\.\n  at: .*test_breaker_gpu\.py:\d+ .*\n  fix: "):
        generate(params_of(kernel, struct(8), struct(8)), "sm_90a")


def test_blocks_that_threads_cannot_copy_name_their_operand():
    x, spec = struct(6, 34, dtype=jnp.int4), pl.BlockSpec((4, 34), lambda i: (i, 0))
    params = params_of(lambda x, o: o.__setitem__(..., x[...]), x, x, grid=(2,), in_specs=[spec], out_specs=spec)
    with pytest.raises(TypeError, match=r"x \(input 0\) has blocks of int4 that hang over its edge"):
        generate(params, "sm_90a")


def test_an_operation_that_is_not_compiled_names_itself_the_line_and_who_has_it():
    params = params_of(lambda x, o: o.__setitem__(..., jnp.linalg.cholesky(x[...])), struct(8, 8), struct(8, 8))
    with pytest.raises(NotImplementedError, match=r"(?s)`cholesky`.*Mosaic GPU.*test_breaker_gpu\.py.*interpreter"):
        generate(params, "sm_90a")


def test_too_much_shared_memory_is_said_before_the_assembler_runs(monkeypatch):
    from palladion.compiler.gpu import build

    def never(generated):
        raise AssertionError("compiled")

    monkeypatch.setattr(build, "compile_generated", never)
    spec = pl.BlockSpec((999, 200), lambda i: (i, 0))
    params = params_of(twice, struct(1000, 200), struct(1000, 200), grid=(2,), in_specs=[spec], out_specs=spec)
    with pytest.raises(LimitExceeded, match=r"needs 1,598,\d+ B of shared memory; a block can have 232,448 B"):
        build.build(params, "sm_90a")


# --- wrong programs -----------------------------------------------------------------------------------------------
@compiles
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_failed_check_is_a_check_error(transform, capfd):
    def kernel(x_ref, o_ref):
        pl.debug_check(jnp.all(x_ref[...] > 100), "must be big")
        o_ref[...] = x_ref[...]

    with pl.enable_debug_checks(True):
        f = transform(lambda x: call(kernel, struct(4), x))
        kinds = pl.KernelCheckError if transform is not jax.jit else jax.errors.JaxRuntimeError
        with pytest.raises(kinds, match=r"must be big\n  at: .*test_breaker_gpu\.py:\d+ .*, block 0"):
            jax.block_until_ready(f(jnp.ones(4)))
    assert "must be big" in capfd.readouterr().out


@compiles
def test_faults_in_functions_of_the_header_name_the_users_line():
    def waits(o_ref, barrier):
        plgpu.barrier_wait(barrier)
        o_ref[...] = jnp.ones((8,), F32)

    f = plgpu.kernel(waits, out_type=struct(8), scratch_types=[plgpu.Barrier()], interpret=EMULATED)
    with pytest.raises(
        EmulationFault, match=r"deadlock(?s:.*)test_breaker_gpu\.py:\d+  plgpu\.barrier_wait\(barrier\)"
    ):
        f()


@compiles
def test_unwritten_shared_memory_is_reported_where_asked():
    def reads(o_ref, smem):
        o_ref[...] = smem[...]

    def run(interpret):
        return call(reads, struct(8), interpret=interpret, scratch_shapes=[plgpu.SMEM((8,), F32)])

    with pytest.warns(PalladionWarning, match=r"uninitialized-read(?s:.*)o_ref\[\.\.\.\] = smem"):
        run(plgpu.EmulateParams(detect_uninitialized=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(EMULATED)


@compiles
def test_programs_are_told_how_many_multiprocessors_there_are():
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.inline_ptx("mov.u32 $0, %nsmid; add.s32 $0, $0, $1;", x_ref[...], dtype=I32)

    for n in (132, 4):
        asked = EMULATED if n == 132 else plgpu.EmulateParams(num_sms=n)
        assert int(call(kernel, struct(dtype=I32), jnp.int32(0), interpret=asked)) == n


@compiles
def test_calls_of_several_threads_at_once():
    x, found = normal(0, 4, 64), {}
    spec = pl.BlockSpec((1, 64), lambda i: (i, 0))

    def run(k):
        kernel = lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * (k + 1))
        found[k] = call(kernel, struct(4, 64), x, grid=(4,), in_specs=[spec], out_specs=spec)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        np.testing.assert_array_equal(found[k], np.asarray(x) * (k + 1))


@compiles
def test_the_cache_may_be_nowhere(tmp_path):
    from palladion import config

    (tmp_path / "file").write_text("")
    with config.state("cache_dir")(str(tmp_path / "file" / "folder")):
        np.testing.assert_array_equal(call(twice, struct(9), jnp.ones(9)), 2 * np.ones(9))
