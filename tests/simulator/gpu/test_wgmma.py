"""wgmma on the simulated Hopper GPU: numbers of each dtype, and each rule, broken and kept."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding, PalladionWarning

M, N, K = 64, 32, 64
SCHEDULES = [None, "eager", 1, 2]


def operands(dtype=jnp.float16, out=jnp.float32, seed=0):
    """Small integers, exact in every dtype here."""
    draw = np.random.default_rng(seed).integers
    a, b = draw(-2, 3, (M, K)), draw(-2, 3, (K, N))
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), np.asarray(a @ b).astype(out)


def run(body, a, b, out=jnp.float32, *, schedule=None, shape=None, warns=False, **params):
    """A kernel with A and B in SMEM, b as it lies there. Without `warns`, no warning."""
    shape = shape or (a.shape[0], N)
    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, out),
        scratch_types=[plgpu.SMEM(a.shape, a.dtype), plgpu.SMEM(b.shape, b.dtype)],
        interpret=plgpu.InterpretGPUParams(detect_races=True, schedule=schedule, **params),
    )
    with warnings.catch_warnings():
        if not warns:
            warnings.simplefilter("error", PalladionWarning)
        return np.asarray(made(a, b))


def fill(a, b, a_s, b_s, commit=True):
    a_s[...], b_s[...] = a[...], b[...]
    if commit:
        plgpu.commit_smem()


def multiply(acc_type, *, b_is_nk=False, a_is_km=False, in_registers=False):
    def body(a, b, o, a_s, b_s):
        fill(a, b, a_s, b_s)

        def scope(acc):
            left = plgpu.transpose_ref(a_s, (1, 0)) if a_is_km else a_s
            left = plgpu.load(a_s, layout=plgpu.Layout.WGMMA) if in_registers else left
            plgpu.wgmma(acc, left, plgpu.transpose_ref(b_s, (1, 0)) if b_is_nk else b_s)
            return acc[...]

        o[...] = pl.run_scoped(scope, plgpu.ACC((M, N), acc_type))

    return body


def found(body, *args, **params):
    with pytest.raises(KernelFinding) as caught:
        run(body, *args, **params)
    return caught.value.finding


# --- numbers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_of_16_bit_operands(schedule):
    a, b, wanted = operands()
    np.testing.assert_array_equal(run(multiply(jnp.float32), a, b, schedule=schedule), wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
def test_a_product_of_each_dtype_with_b_transposed(dtype):
    out = jnp.int32 if dtype == jnp.int8 else jnp.float32
    a, b, wanted = operands(dtype, out)
    np.testing.assert_array_equal(run(multiply(out, b_is_nk=True), a, b.T, out), wanted)


def test_both_operands_transposed():
    a, b, wanted = operands(jnp.bfloat16)
    got = run(multiply(jnp.float32, b_is_nk=True, a_is_km=True), a.T, b.T, shape=(M, N))
    np.testing.assert_array_equal(got, wanted)


def test_a_in_registers():
    a, b, wanted = operands()
    np.testing.assert_array_equal(run(multiply(jnp.float32, in_registers=True), a, b), wanted)


def test_int8_products_are_exact_at_the_ends_of_the_range():
    a, b = jnp.full((M, K), -128, jnp.int8), jnp.full((K, N), -128, jnp.int8)
    assert (run(multiply(jnp.int32, b_is_nk=True), a, b.T, jnp.int32) == 128 * 128 * K).all()


def test_float32_operands_lose_their_low_13_bits():
    one = np.float32(1) + np.float32(2**-11)  # the last bit that does not count
    a, b = jnp.full((M, K), one, jnp.float32), jnp.ones((K, N), jnp.float32)
    assert (run(multiply(jnp.float32, b_is_nk=True), a, b.T) == K).all()
    kept = jnp.full((M, K), 1 + 2**-10, jnp.float32)
    assert (run(multiply(jnp.float32, b_is_nk=True), kept, b.T) == K * (1 + 2**-10)).all()


def test_a_float16_accumulator_is_rounded_after_each_product():
    a, b = jnp.full((M, K), 40, jnp.float16), jnp.ones((K, N), jnp.float16)
    b = b.at[0, 0].set(41 / 40 * 1.0)
    got = run(multiply(jnp.float16), a, b, jnp.float16)
    exact = np.float64(40) * (K - 1) + 40 * np.float64(b[0, 0])
    assert got.dtype == np.float16 and got[0, 0] == np.float16(exact) and got[0, 1] == 40 * K


def test_products_accumulate_and_an_accumulator_can_begin_with_an_array():
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s):
        fill(a, b, a_s, b_s)

        def scope(acc):
            for _ in range(3):
                plgpu.wgmma(acc, a_s, b_s)

        o[...] = pl.run_state(scope)(plgpu.ACC.init(jnp.ones((M, N), jnp.float32)))

    np.testing.assert_array_equal(run(body, a, b), 3 * wanted + 1)


def test_mma_multiplies_arrays():
    a, b, wanted = operands()

    def body(a, b, o, a_s, b_s):
        acc = plgpu.layout_cast(jnp.ones((M, N), jnp.float32), plgpu.Layout.MMA_ACC)
        left, right = plgpu.load(a, layout=plgpu.Layout.MMA_LHS), plgpu.load(b, layout=plgpu.Layout.MMA_RHS)
        o[...] = plgpu.mma(acc, left, right)

    np.testing.assert_array_equal(run(body, a, b), wanted + 1)


def test_floats_can_be_skipped():
    a, b, _ = operands()
    assert np.isnan(run(multiply(jnp.float32), a, b, skip_floating_point_ops=True)).all()


# --- rules --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_operands_stored_by_hand_are_committed(schedule):
    a, b, wanted = operands()

    def body(commit):
        def kernel(a, b, o, a_s, b_s):
            fill(a, b, a_s, b_s, commit)

            def scope(acc):
                plgpu.wgmma(acc, a_s, b_s)
                return acc[...]

            o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)))

        return kernel

    finding = found(body(False), a, b, schedule=schedule)
    assert finding.kind == "missing-fence" and "commit_smem" in str(finding.hint)
    np.testing.assert_array_equal(run(body(True), a, b, schedule=schedule), wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_operand_is_overwritten_only_when_its_product_is_done(schedule):
    a, b, wanted = operands()

    def body(wait):
        def kernel(a, b, o, a_s, b_s):
            fill(a, b, a_s, b_s)

            def scope(acc):
                plgpu.wgmma(acc, a_s, b_s)
                if wait:
                    plgpu.wgmma_wait(0)
                a_s[...] = jnp.zeros_like(a_s)
                return acc[...]

            o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)))

        return kernel

    finding = found(body(False), a, b, schedule=schedule)
    assert finding.kind == "wgmma-in-flight" and str(finding.where).count("test_wgmma.py") == 2
    np.testing.assert_array_equal(run(body(True), a, b, schedule=schedule), wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [True, False])
def test_all_products_but_the_last_are_done_when_one_was_issued(schedule, first):
    """The buffer that the product before read may be written again, the one that the last reads may not."""
    a, b, wanted = operands()

    def kernel(a, b, o, a_s, b_s):
        fill(a, b, a_s, b_s)

        def scope(acc, other):
            other[...] = a[...]
            plgpu.commit_smem()
            plgpu.wgmma(acc, a_s, b_s)
            plgpu.wgmma(acc, other, b_s)
            (a_s if first else other)[...] = jnp.zeros((M, K), jnp.float16)
            return acc[...]

        o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)), plgpu.SMEM((M, K), jnp.float16))

    if first:
        np.testing.assert_array_equal(run(kernel, a, b, schedule=schedule), 2 * wanted)
    else:
        assert found(kernel, a, b, schedule=schedule).kind == "wgmma-in-flight"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wait_n", [0, 1, None])
def test_an_accumulator_is_read_when_its_product_is_done(schedule, wait_n):
    a, b, wanted = operands()

    def kernel(a, b, o, a_s, b_s):
        fill(a, b, a_s, b_s)

        def scope(acc):
            plgpu.wgmma(acc, a_s, b_s)
            return plgpu.wgmma_accumulator_load(acc, wait_n=wait_n)

        o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)))

    if wait_n == 0:
        np.testing.assert_array_equal(run(kernel, a, b, schedule=schedule), wanted)
    else:
        finding = found(kernel, a, b, schedule=schedule)
        assert finding.kind == "wgmma-in-flight" and finding.operand == "scoped buffer 0"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("late", [0, 1, None])
def test_a_product_comes_after_the_copy_of_its_operand(schedule, late):
    """In whichever round the wait comes too late, and under each schedule, it is the copy that is in flight."""
    a, b, wanted = operands()

    def kernel(a, b, o, a_s, b_s):
        b_s[...] = b[...]
        plgpu.commit_smem()

        def scope(acc, copied):
            for k in range(2):
                plgpu.copy_gmem_to_smem(a, a_s, copied)
                if k != late:
                    plgpu.barrier_wait(copied)
                plgpu.wgmma(acc, a_s, b_s)
                plgpu.wgmma_wait(0)
                if k == late:
                    plgpu.barrier_wait(copied)
            return acc[...]

        o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)), plgpu.Barrier())

    if late is None:
        np.testing.assert_array_equal(run(kernel, a, b, schedule=schedule), 2 * wanted)
    else:
        finding = found(kernel, a, b, schedule=schedule)
        assert finding.kind == "missing-wait" and "wgmma of the block reads" in finding.message


def test_an_accumulator_may_be_read_while_a_product_on_another_runs():
    a, b, wanted = operands()

    def kernel(a, b, o, a_s, b_s):
        fill(a, b, a_s, b_s)

        def scope(acc, other):
            plgpu.wgmma(acc, a_s, b_s)
            plgpu.wgmma(other, a_s, b_s)
            first = plgpu.wgmma_accumulator_load(acc, wait_n=1)
            return first + other[...]

        o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)), plgpu.ACC((M, N)))

    np.testing.assert_array_equal(run(kernel, a, b), 2 * wanted)


def test_operands_were_written():
    a, b, _ = operands()

    def kernel(a, b, o, a_s, b_s):
        b_s[...] = b[...]
        plgpu.commit_smem()

        def scope(acc):
            plgpu.wgmma(acc, a_s, b_s)
            return acc[...]

        o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)))

    assert found(kernel, a, b, uninitialized_reads="raise").kind == "uninitialized-read"


@pytest.mark.parametrize("wait", [True, False])
def test_a_thread_that_ends_during_a_product_is_warned_of(wait, recwarn):
    a, b, _ = operands()

    def kernel(a, b, o, a_s, b_s):
        fill(a, b, a_s, b_s)
        o[...] = jnp.zeros((M, N), jnp.float32)

        def scope(acc):
            plgpu.wgmma(acc, a_s, b_s)
            if wait:
                plgpu.wgmma_wait(0)

        pl.run_scoped(scope, plgpu.ACC((M, N)))

    run(kernel, a, b, warns=True)
    warned = [w for w in recwarn if issubclass(w.category, PalladionWarning)]
    assert len(warned) == (0 if wait else 1)
    assert wait or "wgmma-in-flight" in str(warned[0].message)


def test_products_queue_in_simulated_time():
    a, b, _ = operands()

    def kernel(times):
        def body(a, b, o, a_s, b_s):
            fill(a, b, a_s, b_s)

            def scope(acc):
                for _ in range(times):
                    plgpu.wgmma(acc, a_s, b_s)
                return acc[...]

            o[...] = pl.run_scoped(scope, plgpu.ACC((M, N)))

        return body

    def busy(times):
        run(kernel(times), a, b, trace=True)
        spans = [s for s in pl.last_report().timeline.spans if s.track == "tensor core"]
        assert len(spans) == times and all(x.end <= y.start for x, y in itertools.pairwise(spans))
        return sum(s.end - s.start for s in spans)

    assert busy(4) == pytest.approx(4 * busy(1))
