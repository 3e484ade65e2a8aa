"""What a failed check looks like: outside jit, inside it, from several threads, and after it."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import cpu as plcpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())


def sds(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def checked(i_ref, x_ref, o_ref):
    pl.debug_check(x_ref[0] < 10, "x is {too} large")
    o_ref[...] = x_ref[pl.ds(i_ref[0], 2)]


CALL = pl.pallas_call(checked, sds(2), **NATIVE)
REFERENCE = pl.pallas_call(checked, sds(2), interpret=True)


def error_of(call, *args):
    with pl.enable_debug_checks(True), pytest.raises(Exception) as caught:
        jax.block_until_ready(call(*args))
    return caught.value


@pytest.mark.parametrize("index,add", [(3, 0), (0, 20)])
def test_the_exception_is_ours_and_that_of_the_reference(index, add):
    operands = jnp.array([index], jnp.int32), jnp.arange(4.0) + add
    error, expected = error_of(CALL, *operands), error_of(REFERENCE, *operands)
    assert type(error) is type(expected) is pl.KernelCheckError
    assert str(error) == str(expected)
    assert "test_checks.py" in str(error)


def test_under_jit_the_first_line_has_our_words():
    error = error_of(jax.jit(CALL), jnp.array([3], jnp.int32), jnp.arange(4.0))
    first = str(error).splitlines()[0]
    assert first.endswith("pl.ds(start=3, size=2) runs past dimension 0 of x_ref (input 1), which has 4 elements.")
    assert "Traceback" not in str(error)


def test_index_arrays_and_scalars_name_what_they_hold_and_the_grid_point():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]]

    call = pl.pallas_call(
        kernel, sds(6), grid=3, in_specs=[pl.BlockSpec((2,), lambda g: (g,)), pl.BlockSpec((4,), lambda g: (0,))],
        out_specs=pl.BlockSpec((2,), lambda g: (g,)), **NATIVE,
    )  # fmt: skip
    error = error_of(call, jnp.array([0, 1, 2, 3, -9, 1], jnp.int32), jnp.arange(4.0))
    assert str(error).startswith("Index -9 runs past dimension 0 of x_ref (input 1), which has 4 elements.")
    assert "grid point: (2,)" in str(error)
    with pl.enable_debug_checks(True):  # negative ones count from the end
        good = call(jnp.array([0, 1, 2, 3, -4, -1], jnp.int32), jnp.arange(4.0))
    np.testing.assert_array_equal(good, [0, 1, 2, 3, 0, 3])


def test_a_kernel_runs_again_after_a_failure_halfway():
    def kernel(x_ref, o_ref):
        pl.debug_check(jnp.all(x_ref[...] < 3), "three or more")
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((1,), lambda i: (i,))
    call = pl.pallas_call(kernel, sds(8), grid=8, in_specs=[spec], out_specs=spec, **NATIVE)
    for _ in range(3):
        error = error_of(call, jnp.arange(8.0))
        assert "grid point: (3,)" in str(error)  # in order: the first that fails
        with pl.enable_debug_checks(True):
            np.testing.assert_array_equal(call(jnp.zeros(8)), 0)


def test_threads_get_their_own_failures():
    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref[0] < 10, "too large")
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(kernel, sds(4), **NATIVE)
    results: dict[int, object] = {}

    def work(k):
        with pl.enable_debug_checks(True):
            for _ in range(20):
                try:
                    results[k] = np.asarray(call(jnp.full(4, float(k * 5))))
                except pl.KernelCheckError as error:
                    results[k] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(2):
        np.testing.assert_array_equal(results[k], 5.0 * k)
    for k in range(2, 4):
        assert isinstance(results[k], pl.KernelCheckError) and "too large" in str(results[k])


def test_an_unhandled_failure_leaves_no_noise_at_exit():
    program = """
import jax, jax.numpy as jnp, palladion as pl
from palladion import cpu as plcpu
def kernel(x_ref, o_ref):
    pl.debug_check(x_ref[0] < 10, "x is too large")
    o_ref[...] = x_ref[...]
call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4,), jnp.float32), compiler_params=plcpu.CompilerParams())
with pl.enable_debug_checks(True):
    WRAP(call)(jnp.arange(4.0) + 20)
"""
    for wrap, last in (("", "KernelCheckError: x is too large"), ("jax.jit", "INVALID_ARGUMENT: x is too large")):
        run = subprocess.run(
            [sys.executable, "-c", program.replace("WRAP", wrap)], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 1
        assert "atexit" not in run.stderr, run.stderr
        assert last in run.stderr
