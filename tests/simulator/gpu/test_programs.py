"""`pl.pallas_call` on the simulated GPU: programs as CUDA blocks, sequential axes as pipelines of TMA copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion import tpu as pltpu
from palladion.language.gpu.refs import storage_of
from simulator.gpu.calls import SCHEDULES, finding, numbers, params, quiet, warned

MMA = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SEQUENTIAL = plgpu.CompilerParams(dimension_semantics=("sequential",))


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(size, width=4):
    """Blocks of rows, one for each program."""
    return pl.BlockSpec((size, width), lambda i: (i, 0))


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def row_sums(x_ref, o_ref):
    """Adds up the programs' blocks of rows in one output block."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def accumulate(x, interpret, compiler_params=None):
    call = pl.pallas_call(
        row_sums, like(2, 4), grid=(x.shape[0] // 2,), in_specs=[rows(2)], interpret=interpret,
        out_specs=pl.BlockSpec((2, 4), lambda i: (0, 0)), compiler_params=compiler_params,
    )  # fmt: skip
    return call(x)


# --- a product that still reads a block ---------------------------------------------------------------------------
def matmul(a, b, *, delay, steps=2, wait=None, **interpret):
    """A Hopper matmul whose K loop is the pipeline."""
    (m, k), n = a.shape, b.shape[1]

    def kernel(a_ref, b_ref, o_ref, acc):
        plgpu.wgmma(acc, a_ref, b_ref)
        if wait is not None:
            plgpu.wgmma_wait(wait)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc[...]

    block = functools.partial(plgpu.BlockSpec, transforms=MMA, delay_release=delay)
    return pl.pallas_call(
        kernel,
        like(m, n),
        grid=(m // 64, n // 64, k // 64),
        in_specs=[block((64, 64), lambda i, j, k: (i, k)), block((64, 64), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((64, 64), lambda i, j, k: (i, j)),
        scratch_shapes=[plgpu.ACC((64, 64), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "sequential"), max_concurrent_steps=steps
        ),
        interpret=params(**interpret),
    )(a, b)


@pytest.fixture
def factors():
    draw = np.random.default_rng(0).integers
    a, b = draw(-2, 3, (128, 256)), draw(-2, 3, (256, 128))
    return jnp.asarray(a, jnp.float16), jnp.asarray(b, jnp.float16), a @ b


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("delay, steps, wait", [(1, 2, None), (1, 4, None), (0, 2, 0), (2, 3, None)])
def test_a_matmul_is_pipelined(factors, schedule, delay, steps, wait):
    a, b, want = factors
    got = quiet(lambda: matmul(a, b, delay=delay, steps=steps, wait=wait, schedule=schedule))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_is_refilled_while_a_product_reads_it(factors, schedule):
    a, b, _ = factors
    found = finding(lambda: matmul(a, b, delay=0, schedule=schedule), "wgmma-in-flight", "copy of a block of")
    assert found.when is not None and found.when.startswith("program (")


def test_delay_release_needs_buffers(factors):
    a, b, _ = factors
    with pytest.raises(ValueError, match="delay_release=1, but only 1 buffer"):
        matmul(a, b, delay=1, steps=1)


# --- sequential axes ----------------------------------------------------------------------------------------------
def test_programs_that_accumulate_race():
    x = numbers(8, 4)
    found = finding(lambda: accumulate(x, plgpu.InterpretGPUParams()), "race", "block (0,) and block (1,) both write")
    assert "sequential" in found.hint and found.operand == "o_ref (output 0)"


def test_the_race_may_be_a_warning():
    x = numbers(8, 4)
    got = warned(lambda: accumulate(x, params(on_race="warn", uninitialized_reads="allow")), "race")
    assert np.isnan(got).all()  # the last block adds to fresh memory


@pytest.mark.parametrize("detect_races", [False, True])
def test_a_sequential_axis_accumulates(detect_races):
    x = numbers(8, 4)
    got = quiet(lambda: accumulate(x, params(detect_races=detect_races), SEQUENTIAL))
    np.testing.assert_array_equal(got, np.asarray(x).reshape(4, 2, 4).sum(0))


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_buffers_take_smem(steps):
    x = numbers(16, 256)
    compiler_params = plgpu.CompilerParams(dimension_semantics=("sequential",), max_concurrent_steps=steps)
    call = pl.pallas_call(
        copy, like(16, 256), grid=(4,), in_specs=[rows(4, 256)], out_specs=rows(4, 256),
        compiler_params=compiler_params, interpret=params(),
    )  # fmt: skip
    np.testing.assert_array_equal(quiet(lambda: call(x)), x)
    assert pl.last_report().smem_bytes == 2 * 4096 * min(steps, 4)


def traced(steps, index_map):
    """The spans of a pipeline over 8 steps, and how long it takes."""
    x = numbers(16, 4)
    compiler_params = plgpu.CompilerParams(dimension_semantics=("sequential",), max_concurrent_steps=steps)
    call = pl.pallas_call(
        copy, like(16, 4), grid=(8,), in_specs=[pl.BlockSpec((2, 4), index_map)], out_specs=rows(2),
        compiler_params=compiler_params, interpret=params(trace=True),
    )  # fmt: skip
    call(x)
    report = pl.last_report()
    return report.seconds, [s.name for s in report.timeline.spans]


def test_a_block_that_stays_is_not_copied_again():
    assert traced(2, lambda i: (i, 0))[1].count("x_ref in") == 8
    seconds, names = traced(2, lambda i: (i // 4, 0))
    assert names.count("x_ref in") == 2
    assert names.count("o_ref out") == 8


def test_copies_ahead_save_time():
    alone, ahead = traced(1, lambda i: (i, 0))[0], traced(3, lambda i: (i, 0))[0]
    assert ahead < 0.7 * alone


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_reads_what_the_last_one_stored(schedule):
    """The block that was stored is fetched again, through an alias, before the store was waited for."""

    def call(size):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1

        return pl.pallas_call(
            kernel, like(8, 4), grid=(4,), input_output_aliases={0: 0}, interpret=params(schedule=schedule),
            in_specs=[pl.BlockSpec((2, 4), lambda i: ((i + 4 - size) % 4, 0))], out_specs=rows(2),
            compiler_params=plgpu.CompilerParams(dimension_semantics=("sequential",), max_concurrent_steps=2),
        )  # fmt: skip

    x = numbers(8, 4)
    np.testing.assert_array_equal(quiet(lambda: call(0)(x)), x + 1)
    finding(lambda: call(1)(x), "missing-wait", "x_ref")


# --- memory spaces ------------------------------------------------------------------------------------------------
def test_operands_in_gmem():
    def kernel(x_ref, y_ref, o_ref):
        assert x_ref.shape == (8, 4) and y_ref.shape == (2, 4)
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 2, 2)] + y_ref[...]

    x = numbers(8, 4)
    call = pl.pallas_call(
        kernel, like(8, 4), grid=(4,), out_specs=rows(2), interpret=params(),
        in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM),
                  plgpu.BlockSpec((2, 4), lambda i: (i, 0), memory_space=plgpu.GMEM)],
    )  # fmt: skip
    np.testing.assert_array_equal(quiet(lambda: call(x, x)), 2 * x)
    assert pl.last_report().smem_bytes == 128  # the output's


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("committed", [True, False])
def test_a_kernel_copies_by_itself_besides(schedule, committed):
    def kernel(x_ref, y_ref, o_ref, scratch, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(pl.program_id(0) * 32, 32)], scratch, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = scratch[...] + y_ref[...]
        if committed:
            plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, 32)], scratch, barrier)
        plgpu.barrier_wait(barrier)

    x = numbers(128)
    call = pl.pallas_call(
        kernel, like(128), grid=(4,), interpret=params(schedule=schedule),
        in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM), pl.BlockSpec((32,), lambda i: (i,))],
        out_specs=pl.BlockSpec((32,), lambda i: (i,)),
        scratch_shapes=[plgpu.SMEM((32,), jnp.float32), plgpu.Barrier()],
    )  # fmt: skip
    if committed:
        np.testing.assert_array_equal(quiet(lambda: call(x, x)), 2 * x)
    else:
        finding(lambda: call(x, x), "missing-fence", "scratch")


def test_transforms_reach_the_kernel():
    seen = []

    def kernel(x_ref, o_ref):
        seen.append(storage_of(x_ref).transforms)
        o_ref[...] = x_ref[...]

    def call(tiling):
        transforms = (plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(128))
        spec = plgpu.BlockSpec((16, 64), lambda i: (i, 0), transforms=transforms)
        return pl.pallas_call(
            kernel, like(32, 64, dtype=jnp.float16), grid=(2,), in_specs=[spec], out_specs=rows(16, 64),
            interpret=params(),
        )  # fmt: skip

    x = numbers(32, 64, dtype=jnp.float16)
    np.testing.assert_array_equal(quiet(lambda: call((8, 64))(x)), x)
    assert seen == [MMA]
    with pytest.raises(ValueError, match=r"Tiles of \(5, 64\) do not divide"):
        call((5, 64))(x)


def test_smem_overflows():
    call = pl.pallas_call(copy, like(256, 256), interpret=params())
    finding(lambda: call(numbers(256, 256)), "smem-overflow", "262,144 bytes")


# --- edges --------------------------------------------------------------------------------------------------------
def ragged(mode, **interpret):
    spec = plgpu.BlockSpec((4, 4), lambda i: (i, 0), oob_fill_mode=mode)
    call = pl.pallas_call(
        copy, like(8, 4), grid=(2,), in_specs=[spec], out_specs=rows(4), interpret=params(**interpret)
    )
    return call(numbers(6, 4) + 1)


def test_outside_the_array_are_zeros():
    got = quiet(lambda: ragged(plgpu.OOBFillMode.ZEROS))
    np.testing.assert_array_equal(got, np.pad(numbers(6, 4) + 1, ((0, 2), (0, 0))))


def test_undefined_is_not_zero():
    assert np.isnan(ragged(plgpu.OOBFillMode.UNDEFINED)[6:]).all()


def test_a_promise_is_checked():
    finding(lambda: ragged(plgpu.OOBFillMode.PROMISE_IN_BOUNDS), "out-of-bounds", "PROMISE_IN_BOUNDS")


def test_blocks_outside_the_array():
    def call(shift, **interpret):
        return pl.pallas_call(
            copy, like(8, 4), grid=(4,), in_specs=[pl.BlockSpec((2, 4), lambda i: (i + shift, 0))],
            out_specs=rows(2), interpret=params(**interpret),
        )  # fmt: skip

    x = numbers(8, 4)
    np.testing.assert_array_equal(quiet(lambda: call(0)(x)), x)
    found = finding(lambda: call(1)(x), "out-of-bounds", "asks for block 4 in dimension 0")
    assert found.when == "block (3,)"
    finding(lambda: call(1, detect_races=False)(x), "out-of-bounds")
    call(1, out_of_bounds_reads="uninitialized")(x)


def test_overlapping_blocks_race():
    def call(step):
        return pl.pallas_call(
            copy, like(8, 4), grid=(4,), in_specs=[rows(2)], interpret=params(),
            out_specs=pl.BlockSpec((pl.Element(2), pl.Element(4)), lambda i: (i * step, 0)),
        )  # fmt: skip

    x = numbers(8, 4)
    np.testing.assert_array_equal(quiet(lambda: call(2)(x)), x)
    finding(lambda: call(1)(x), "race", "the pipeline of block (1,) writes what block (0,) wrote")


def test_an_output_block_is_fresh():
    def kernel(x_ref, o_ref):
        o_ref[...] += x_ref[...]

    call = pl.pallas_call(kernel, like(8, 4), grid=(4,), in_specs=[rows(2)], out_specs=rows(2), interpret=params())
    finding(lambda: call(numbers(8, 4)), "uninitialized-read", "o_ref")


def test_an_aliased_output_holds_the_input():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[1]

    x = numbers(8, 4)
    call = pl.pallas_call(
        kernel, like(8, 4), grid=(4,), in_specs=[rows(2)], out_specs=rows(2), input_output_aliases={0: 0},
        interpret=params(),
    )  # fmt: skip
    want = np.array(x)
    want[::2] = want[1::2]
    np.testing.assert_array_equal(quiet(lambda: call(x)), want)


# --- what JAX does with a call ------------------------------------------------------------------------------------
def test_vmap_with_prefetch():
    def kernel(order_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + order_ref[pl.program_id(0)].astype(jnp.float32)

    def call(order, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4,), in_specs=[pl.BlockSpec((2, 4), lambda i, order: (order[i], 0))],
            out_specs=pl.BlockSpec((2, 4), lambda i, order: (i, 0)),
        )  # fmt: skip
        return pl.pallas_call(kernel, like(8, 4), grid_spec=spec, interpret=params())(order, x)

    order = jnp.array([[3, 1, 2, 0], [0, 0, 1, 1], [2, 3, 0, 1]], jnp.int32)
    x = numbers(3, 8, 4)
    want = [
        np.asarray(a).reshape(4, 2, 4)[np.asarray(o)] + np.asarray(o)[:, None, None].astype(np.float32)
        for o, a in zip(order, x)
    ]
    np.testing.assert_array_equal(quiet(lambda: jax.vmap(call)(order, x)), np.reshape(want, (3, 8, 4)))


def test_vmap_of_a_sequential_axis():
    x = numbers(3, 8, 4)
    got = quiet(lambda: jax.jit(jax.vmap(lambda a: accumulate(a, params(), SEQUENTIAL)))(x))
    np.testing.assert_array_equal(got, np.asarray(x).reshape(3, 4, 2, 4).sum(1))


def test_derivatives():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] ** 2

    call = pl.pallas_call(kernel, like(8, 4), grid=(4,), in_specs=[rows(2)], out_specs=rows(2), interpret=params())
    x = numbers(8, 4)
    _, tangent = jax.jvp(call, (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(tangent, 2 * x)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_grid_known_at_run_time(n):
    def call(n, x):
        return pl.pallas_call(copy, like(8, 4), grid=(n,), in_specs=[rows(2)], out_specs=rows(2), interpret=params())(x)

    x = numbers(8, 4)
    got = jax.jit(call)(jnp.int32(n), x)
    np.testing.assert_array_equal(got[: 2 * n], x[: 2 * n])
    assert np.isnan(got[2 * n :]).all()


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.float8_e4m3fn, jnp.bfloat16, jnp.int8, jnp.int4])
def test_dtypes(dtype):
    x = numbers(6, 4, dtype=dtype)
    call = pl.pallas_call(
        copy, like(6, 4, dtype=dtype), grid=(2,), in_specs=[rows(4)], out_specs=rows(4), interpret=params()
    )
    np.testing.assert_array_equal(quiet(lambda: call(x)), x)


def test_keys():
    def kernel(key_ref, o_ref):
        o_ref[...] = jax.random.uniform(key_ref[()], (4,))

    keys = jax.random.split(jax.random.key(0), 3)
    call = pl.pallas_call(
        kernel, like(3, 4), grid=(3,), in_specs=[pl.BlockSpec((None,), lambda i: (i,))], interpret=params(),
        out_specs=pl.BlockSpec((None, 4), lambda i: (i, 0)),
    )  # fmt: skip
    want = jax.vmap(lambda k: jax.random.uniform(k, (4,)))(keys)
    np.testing.assert_array_equal(quiet(lambda: call(keys)), want)


def test_blocks_start_in_order(capsys):
    def kernel(o_ref):
        pl.debug_print("{}", pl.program_id(0))
        o_ref[...] = lax.broadcast(pl.program_id(0), (1,))

    spec = pl.BlockSpec((1,), lambda i: (i,))
    call = pl.pallas_call(kernel, like(300, dtype=jnp.int32), grid=(300,), out_specs=spec, interpret=params(num_sms=2))
    np.testing.assert_array_equal(quiet(call), np.arange(300))
    assert [int(x) for x in capsys.readouterr().out.split()] == list(range(300))


# --- mistakes -----------------------------------------------------------------------------------------------------
def test_an_entry_for_each_axis():
    params_of = plgpu.CompilerParams(dimension_semantics=("parallel", "sequential"))
    with pytest.raises(ValueError, match="dimension_semantics has 2 entries, but the grid of row_sums has 1 axis"):
        accumulate(numbers(8, 4), params(), params_of)


def test_no_clusters():
    spec = plgpu.BlockSpec((2, 4), lambda i: (i, 0), collective_axes=("c",))
    call = pl.pallas_call(copy, like(8, 4), grid=(4,), in_specs=[spec], out_specs=rows(2), interpret=params())
    with pytest.raises(ValueError, match="a pallas_call has no clusters"):
        call(numbers(8, 4))
