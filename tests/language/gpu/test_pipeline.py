"""Pipelines in GPU kernels: values on the simulated GPU, with no finding; what they allocate, and what they refuse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import jaxlink
from palladion import mosaic_gpu as plgpu

SIMULATED = plgpu.InterpretGPUParams(detect_races=True)
RNG = np.random.default_rng(0)
f16, f32 = jnp.float16, jnp.float32
MMA = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # of float16


def struct(*shape, dtype: Any = f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape, dtype: Any = f32):
    """Small integers: sums and products of them are exact."""
    return jnp.asarray(RNG.integers(-3, 4, size=shape), dtype)


def f64(x):
    return np.asarray(x).astype(np.float64)


def kernel(body, *operands, out, **how):
    return plgpu.kernel(body, out_type=out, interpret=SIMULATED, **how)(*operands)


def pipelined(body, *operands, out, **pipeline):
    """A kernel that is one pipeline."""
    return kernel(lambda *refs: plgpu.emit_pipeline(body, **pipeline)(*refs), *operands, out=out)


def primitives(function, *operands):
    """How often each primitive stands in a traced function."""
    counts: dict[str, int] = {}

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            counts[eqn.primitive.name] = counts.get(eqn.primitive.name, 0) + 1
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                count(getattr(inner, "jaxpr", inner))

    count(jax.make_jaxpr(function)(*operands).jaxpr)
    return counts


ROWS = plgpu.BlockSpec((16, 32), lambda i: (i, 0))


def add_one(_, x_smem, o_smem):
    o_smem[...] = x_smem[...] + 1


# --- emit_pipeline ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_blocks_come_and_go(steps):
    x = ints(80, 32)
    y = pipelined(add_one, x, out=x, grid=(5,), in_specs=[ROWS], out_specs=[ROWS], max_concurrent_steps=steps)
    np.testing.assert_array_equal(y, f64(x) + 1)


def test_a_grid_of_two_axes_and_several_operands():
    x, y = ints(4, 48, 64), ints(32, 64)
    spec = plgpu.BlockSpec((None, 16, 32), lambda g, i: (g, i, 1))

    def body(indices, x_smem, y_smem, sum_smem, product_smem):
        g, i = indices
        sum_smem[...] = x_smem[...] + y_smem[...] + g
        product_smem[...] = x_smem[...] * y_smem[...] * i

    total, product = pipelined(
        body, x, y, out=[struct(4, 48, 32), struct(48, 4 * 32)], grid=(4, 3), max_concurrent_steps=3,
        in_specs=[spec, plgpu.BlockSpec((16, 32), lambda g, i: (g % 2, 0))],
        out_specs=[plgpu.BlockSpec((pl.squeezed, pl.Element(16), 32), lambda g, i: (g, 16 * i, 0)),
                   plgpu.BlockSpec((16, 32), lambda g, i: (i, g))],
    )  # fmt: skip
    g, i = np.arange(4)[:, None, None], np.repeat(np.arange(3), 16)[None, :, None]
    near = f64(x)[:, :, 32:]
    far = np.stack([np.tile(f64(y)[g % 2 * 16 :][:16, :32], (3, 1)) for g in range(4)])
    np.testing.assert_array_equal(total, near + far + g)
    np.testing.assert_array_equal(product, np.concatenate(near * far * i, axis=1))


def test_blocks_over_the_edge():
    x = ints(70, 32)
    y = pipelined(add_one, x, out=x, grid=(5,), in_specs=[ROWS], out_specs=[ROWS], max_concurrent_steps=2)
    np.testing.assert_array_equal(y, f64(x) + 1)
    total = sums(x, 5)
    np.testing.assert_array_equal(total, f64(x).sum(0))


def sums(x, steps):
    """The sums of columns, over blocks of 16 rows: zeros are what lies over the edge."""

    def body(x_ref, o_ref):
        def add(indices, x_smem, total):
            return total + x_smem[...].sum(0)

        pipeline = plgpu.emit_pipeline(
            add, grid=(steps,), in_specs=[ROWS], max_concurrent_steps=2, init_carry=jnp.zeros(32)
        )
        o_ref[...] = pipeline(x_ref)

    return kernel(body, x, out=struct(32))


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_a_number_of_steps_known_at_run_time(steps, most):
    x = ints(112, 32)
    n = jnp.full((1,), steps, jnp.int32)

    def body(n_ref, x_ref, o_ref, copy_ref):
        def add(_, x_smem, copy_smem, total):
            copy_smem[...] = x_smem[...]
            return total + x_smem[...].sum(0)

        copy_ref[...] = jnp.zeros((112, 32))
        plgpu.commit_smem()
        o_ref[...] = plgpu.emit_pipeline(
            add, grid=(n_ref[0],), in_specs=[ROWS], out_specs=[ROWS], max_concurrent_steps=most,
            init_carry=jnp.zeros(32),
        )(x_ref, copy_ref)  # fmt: skip

    total, copy = kernel(body, n, x, out=[struct(32), struct(112, 32)])
    here = f64(x)[: 16 * steps]
    np.testing.assert_array_equal(total, here.sum(0))
    np.testing.assert_array_equal(copy, np.concatenate([here, np.zeros((112 - 16 * steps, 32))]))


def test_no_steps_known_while_tracing():
    x = ints(16, 32)
    np.testing.assert_array_equal(sums(x, 0), np.zeros(32))


def test_an_output_accumulates_over_the_steps_of_its_block():
    x = ints(96, 32)

    def body(indices, x_smem, o_smem):
        @pl.when(indices[1] == 0)
        def _():
            o_smem[...] = jnp.zeros_like(o_smem)

        o_smem[...] += x_smem[...]

    y = pipelined(
        body, x, out=struct(32, 32), grid=(2, 3), max_concurrent_steps=2,
        in_specs=[plgpu.BlockSpec((16, 32), lambda o, k: (3 * o + k, 0))],
        out_specs=[plgpu.BlockSpec((16, 32), lambda o, k: (o, 0))],
    )  # fmt: skip
    np.testing.assert_array_equal(y, f64(x).reshape(2, 3, 16, 32).sum(1).reshape(32, 32))


def test_operands_that_stay_where_they_are():
    x, y = ints(64, 32), ints(64, 32)

    def body(x_ref, y_ref, o_ref, s_ref):
        s_ref[...] = y_ref[...]

        def add(_, x_gmem, y_smem, o_gmem):
            o_gmem[...] = x_gmem[...] + y_smem[...]

        stay = plgpu.BlockSpec((16, 32), lambda i: (i, 0), memory_space=plgpu.GMEM)
        plgpu.emit_pipeline(add, grid=(4,), in_specs=[stay, ROWS], out_specs=[stay])(x_ref, s_ref, o_ref)

    scratch = [plgpu.SMEM((64, 32), f32)]
    np.testing.assert_array_equal(kernel(body, x, y, out=x, scratch_types=scratch), f64(x) + f64(y))
    counts = primitives(plgpu.kernel(body, out_type=x, scratch_types=scratch), x, y)
    assert "copy_gmem_to_smem" not in counts and "copy_smem_to_gmem" not in counts


def test_pipelines_nest():
    x = ints(64, 64)

    def body(x_ref, o_ref):
        def outer(indices):
            (i,) = indices
            inner = plgpu.BlockSpec((32, 32), lambda j: (i, j))
            plgpu.emit_pipeline(add_one, grid=(2,), in_specs=[inner], out_specs=[inner], max_concurrent_steps=2)(
                x_ref, o_ref
            )

        plgpu.emit_pipeline(outer, grid=(2,))()

    np.testing.assert_array_equal(kernel(body, x, out=x), f64(x) + 1)


@pytest.mark.parametrize("steps, delay, blocks", [(2, 1, 5), (3, 1, 5), (4, 2, 5), (4, 1, 1), (2, 0, 4)])
def test_products_that_go_on_reading_their_blocks(steps, delay, blocks):
    a, b = ints(64, 64 * blocks, dtype=f16), ints(64 * blocks, 64, dtype=f16)

    def body(a_ref, b_ref, o_ref):
        def multiply(_, a_smem, b_smem, acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(delay)
            return acc

        def compute(acc):
            out = plgpu.emit_pipeline(
                multiply, grid=(blocks,), max_concurrent_steps=steps, init_carry=acc,
                in_specs=[plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=MMA, delay_release=delay),
                          plgpu.BlockSpec((64, 64), lambda k: (k, 0), transforms=MMA, delay_release=delay)],
            )(a_ref, b_ref)  # fmt: skip
            assert out is acc
            return acc[...]

        o_ref[...] = pl.run_scoped(compute, plgpu.ACC((64, 64)))

    np.testing.assert_array_equal(kernel(body, a, b, out=struct(64, 64)), f64(a) @ f64(b))


def test_pipelines_in_a_row_reuse_memory_that_products_may_still_read():
    a, b = ints(64, 256, dtype=f16), ints(256, 64, dtype=f16)

    def body(a_ref, b_ref, o_ref):
        def compute(acc):
            for part in range(2):
                k = pl.ds(part * 128, 128)
                plgpu.emit_pipeline(
                    lambda _, a_smem, b_smem: plgpu.wgmma(acc, a_smem, b_smem), grid=(2,), max_concurrent_steps=2,
                    in_specs=[plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=MMA, delay_release=1),
                              plgpu.BlockSpec((64, 64), lambda k: (k, 0), transforms=MMA, delay_release=1)],
                )(a_ref.at[:, k], b_ref.at[k])  # fmt: skip
            return acc[...]

        o_ref[...] = pl.run_scoped(compute, plgpu.ACC((64, 64)))

    np.testing.assert_array_equal(kernel(body, a, b, out=struct(64, 64)), f64(a) @ f64(b))


def test_only_what_threads_touch_is_committed():
    def multiply(_, a_smem, b_smem, acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc

    def by_hand(_, a_smem, b_smem, total):
        return total + a_smem[0, 0] + b_smem[0, 0]

    def commits(body, carries_acc):
        def whole(a_ref, b_ref, o_ref):
            specs = [plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=MMA, delay_release=1)] * 2

            def run(acc):
                carry = acc if carries_acc else jnp.zeros((), f16)
                plgpu.emit_pipeline(body, grid=(4,), in_specs=specs, max_concurrent_steps=2, init_carry=carry)(
                    a_ref, b_ref
                )
                return acc[...]

            pl.run_scoped(run, plgpu.ACC((64, 64)))

        a = ints(64, 256, dtype=f16)
        return primitives(plgpu.kernel(whole, out_type=struct(64, 64)), a, a).get("commit_smem", 0)

    assert commits(multiply, True) == 0
    assert commits(by_hand, False) == 1


def test_a_copy_shared_by_the_blocks_of_a_cluster():
    x = ints(96, 32)

    def body(x_ref, o_ref):
        me = lax.axis_index("c")
        shared = plgpu.BlockSpec((16, 32), lambda i: (i, 0), collective_axes=("c",))

        def add(_, x_smem, total):
            return total + x_smem[...] * (1 + me)

        o_ref[me] = plgpu.emit_pipeline(
            add, grid=(6,), in_specs=[shared], max_concurrent_steps=2, init_carry=jnp.zeros((16, 32))
        )(x_ref)

    total = kernel(body, x, out=struct(2, 16, 32), cluster=(2,), cluster_names=("c",))
    one = f64(x).reshape(6, 16, 32).sum(0)
    np.testing.assert_array_equal(total, np.stack([one, 2 * one]))


def refused(build, *shapes, **how):
    """What is said of a kernel that cannot be."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        jax.make_jaxpr(plgpu.kernel(build, out_type=struct(64, 64), **how))(*(jnp.zeros(s) for s in shapes))
    return str(error.value)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(body=3), "The body of plgpu.emit_pipeline is 3"),
        (dict(grid=(1.5,)), "Axis 0 of the grid of plgpu.emit_pipeline is"),
        (dict(grid=(-1,)), "has a negative size"),
        (dict(max_concurrent_steps=0), "The max_concurrent_steps of plgpu.emit_pipeline is 0"),
        (dict(max_concurrent_steps=2.0), "it must be a Python integer"),
        (dict(in_specs=[plgpu.BlockSpec((16, 64), lambda i: (i, 0), delay_release=2)], max_concurrent_steps=2),
         "max_concurrent_steps must be greater than delay_release"),
        (dict(in_specs=[]), "has specs for 0 inputs and 1 output, but it is called with 2 Refs"),
        (dict(in_specs=[plgpu.BlockSpec((16,), lambda i: (i,))]), "The block shape of input 0 of plgpu.emit_pipeline"),
        (dict(in_specs=[plgpu.BlockSpec((16, 64), lambda i, j: (i, 0))]), "takes 2 parameters (i, j)"),
        (dict(in_specs=[plgpu.BlockSpec((pl.BoundedSlice(16), 64), lambda i: (pl.ds(i, 3), 0))]), "pl.BoundedSlice"),
        (dict(in_specs=[plgpu.BlockSpec((16, 64), lambda i: (i, 0), memory_space=plgpu.TMEM)]), "cannot be in tmem"),
        (dict(in_specs=[plgpu.BlockSpec((16, 64), lambda i: (i, 0), pl.Buffered(3))]), "has a pipeline_mode"),
        (dict(body=lambda x_smem, o_smem: None), "takes 2 parameters (x_smem, o_smem), but it gets the grid indices"),
        (dict(body=lambda i, x_smem, o_smem: 1), "but nothing is carried"),
    ],
)  # fmt: skip
def test_what_a_pipeline_refuses(options: dict[str, Any], said):
    spec = plgpu.BlockSpec((16, 64), lambda i: (i, 0))
    options = dict(body=add_one, grid=(4,), in_specs=[spec], out_specs=[spec]) | options
    assert said in refused(lambda x, o: plgpu.emit_pipeline(options.pop("body"), **options)(x, o), (64, 64))


# --- emit_pipeline_warp_specialized -----------------------------------------------------------------------------------
THREADS: dict[str, Any] = dict(num_threads=3, thread_name="wg")
PIPELINE: dict[str, Any] = dict(memory_registers=40, wg_axis="wg", num_compute_wgs=2)
HALVES = plgpu.BlockSpec((32, 32), lambda i: (i, 0))


def warp_sums(x, how, make):
    """What two compute threads make of the halves of x's blocks."""

    def body(x_ref, o_ref):
        me = lax.axis_index("wg")

        def compute_context(pipeline):
            o_ref[me] = pipeline(jnp.zeros((16, 32)))

        plgpu.emit_pipeline_warp_specialized(
            functools.partial(make, me), in_specs=[HALVES], compute_context=compute_context, **PIPELINE | how
        )(x_ref)

    return kernel(body, x, out=struct(2, 16, 32), **THREADS)


def half(me):
    return pl.ds(me * 16, 16)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_compute_threads_work_on_what_another_fetches(steps, blocks):
    x = ints(160, 32)
    total = warp_sums(
        x, dict(grid=(blocks,), max_concurrent_steps=steps),
        lambda me, _, x_smem, total: total + x_smem[half(me)],
    )  # fmt: skip
    np.testing.assert_array_equal(total, f64(x)[: 32 * blocks].reshape(blocks, 2, 16, 32).sum(0))


def test_barriers_by_hand():
    x = ints(160, 32)

    def add(me, _, x_smem, produced, consumed, total):
        plgpu.barrier_wait(produced)
        part = x_smem[half(me)]
        plgpu.barrier_arrive(consumed)
        return total + part

    how: dict[str, Any] = dict(
        grid=(5,), manual_produced_barriers=True, manual_consumed_barriers=True, max_concurrent_steps=2
    )
    np.testing.assert_array_equal(warp_sums(x, how, add), f64(x).reshape(5, 2, 16, 32).sum(0))


def test_the_memory_thread_may_be_another():
    x = ints(160, 32)

    def body(x_ref, o_ref):
        me = lax.axis_index("wg") - 1

        def compute_context(pipeline):
            o_ref[me] = pipeline(jnp.zeros((16, 32)))

        plgpu.emit_pipeline_warp_specialized(
            lambda _, x_smem, total: total + x_smem[half(me)], grid=(5,), in_specs=[HALVES], memory_thread_idx=0,
            compute_context=compute_context, **PIPELINE,
        )(x_ref)  # fmt: skip

    total = kernel(body, x, out=struct(2, 16, 32), **THREADS)
    np.testing.assert_array_equal(total, f64(x).reshape(5, 2, 16, 32).sum(0))


def test_one_compute_thread_with_outputs():
    x = ints(80, 32)

    def body(x_ref, o_ref):
        plgpu.emit_pipeline_warp_specialized(
            add_one, grid=(5,), in_specs=[ROWS], out_specs=[ROWS], max_concurrent_steps=2, memory_registers=40,
            wg_axis="wg", num_compute_wgs=1,
        )(x_ref, o_ref)  # fmt: skip

    np.testing.assert_array_equal(kernel(body, x, out=x, num_threads=2, thread_name="wg"), f64(x) + 1)


@pytest.mark.parametrize("delay, steps", [(0, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize("states", [False, True])
def test_a_persistent_matmul(delay, steps, states):
    """Pipelines in a row on the same buffers; with states each begins while the one before is worked on."""
    m, n, blocks = 3, 2, 3
    a, b = ints(128 * m, 64 * blocks, dtype=f16), ints(64 * blocks, 64 * n, dtype=f16)

    def body(a_ref, b_ref, o_ref):
        me = lax.axis_index("wg")

        def pipeline(row=0, column=0, state=None):
            def multiply(_, a_smem, b_smem, acc):
                plgpu.wgmma(acc, a_smem.at[pl.ds(me * 64, 64)], b_smem)
                plgpu.wgmma_wait(delay)
                return acc

            def compute_context(run):
                def compute(acc):
                    run(acc)
                    return acc[...]

                o_ref[pl.ds(row * 128 + me * 64, 64), pl.ds(column * 64, 64)] = pl.run_scoped(
                    compute, plgpu.ACC((64, 64))
                )

            keep: dict[str, Any] = dict(transforms=MMA, delay_release=delay)
            return plgpu.emit_pipeline_warp_specialized(
                multiply, grid=(blocks,), max_concurrent_steps=steps, compute_context=compute_context,
                pipeline_state=state, in_specs=[plgpu.BlockSpec((128, 64), lambda k: (row, k), **keep),
                                                plgpu.BlockSpec((64, 64), lambda k: (k, column), **keep)],
                **PIPELINE,
            )  # fmt: skip

        @functools.partial(pl.run_scoped, allocations=pipeline().get_allocations(a_ref, b_ref), collective_axes="wg")
        def _(allocations):
            @plgpu.nd_loop((m, n), collective_axes="sm")
            def _(info):
                state = None
                if states:
                    first, last = info.local_index == 0, info.local_index == info.num_local_steps - 1
                    state = jnp.where(first, 0, jnp.where(last, 2, 1)).astype(jnp.int32)
                pipeline(*info.index, state)(a_ref, b_ref, allocations=allocations)

    how: dict[str, Any] = dict(grid=(2,), grid_names=("sm",), **THREADS)
    np.testing.assert_array_equal(kernel(body, a, b, out=struct(128 * m, 64 * n), **how), f64(a) @ f64(b))


def test_products_that_outlive_a_warp_specialized_pipeline():
    """Two pipelines on the same buffers, without a compute_context that waits for the products."""
    a, b = ints(128, 256, dtype=f16), ints(256, 64, dtype=f16)

    def body(a_ref, b_ref, o_ref):
        me = lax.axis_index("wg")

        def compute(acc):
            keep: dict[str, Any] = dict(transforms=MMA, delay_release=1)
            pipeline = plgpu.emit_pipeline_warp_specialized(
                lambda _, a_smem, b_smem: plgpu.wgmma(acc, a_smem.at[pl.ds(me * 64, 64)], b_smem), grid=(2,),
                in_specs=[plgpu.BlockSpec((128, 64), lambda k: (0, k), **keep),
                          plgpu.BlockSpec((64, 64), lambda k: (k, 0), **keep)],
                **PIPELINE,
            )  # fmt: skip
            parts = [(a_ref.at[:, pl.ds(k, 128)], b_ref.at[pl.ds(k, 128)]) for k in (0, 128)]

            def run(allocations):
                for refs in parts:
                    pipeline(*refs, allocations=allocations)

            pl.run_scoped(run, pipeline.get_allocations(*parts[0]), collective_axes="wg")

            @pl.when(me < 2)
            def _():
                o_ref[pl.ds(me * 64, 64)] = acc[...]

        pl.run_scoped(compute, plgpu.ACC((64, 64)))

    np.testing.assert_array_equal(kernel(body, a, b, out=struct(128, 64), **THREADS), f64(a) @ f64(b))


def test_a_cluster_shares_copies():
    x, y = ints(160, 32), ints(2, 160, 32)

    def body(x_ref, y_ref, o_ref):
        me, block = lax.axis_index("wg"), lax.axis_index("c")
        shared = plgpu.BlockSpec((32, 32), lambda i: (i, 0), collective_axes=("c",))

        def add(_, x_smem, y_smem, total):
            return total + x_smem[half(me)] * y_smem[half(me)]

        def compute_context(pipeline):
            o_ref[block, me] = pipeline(jnp.zeros((16, 32)))

        plgpu.emit_pipeline_warp_specialized(
            add, grid=(5,), in_specs=[shared, HALVES], compute_context=compute_context, **PIPELINE
        )(x_ref, y_ref.at[block])

    total = kernel(body, x, y, out=struct(2, 2, 16, 32), cluster=(2,), cluster_names=("c",), **THREADS)
    np.testing.assert_array_equal(total, (f64(x) * f64(y)).reshape(2, 5, 2, 16, 32).sum(1))


@pytest.mark.parametrize("threads, memory, others", [(1, 24, 256), (2, 40, 232), (2, 24, 240), (3, 40, 152)])
def test_registers(threads, memory, others):
    """As JAX 0.12 sets them."""

    def body(x_ref, o_ref):
        plgpu.emit_pipeline_warp_specialized(
            lambda i, x_smem: None, grid=(5,), in_specs=[HALVES], memory_registers=memory, wg_axis="wg",
            num_compute_wgs=threads,
        )(x_ref)  # fmt: skip

    how: dict[str, Any] = dict(num_threads=threads + 1, thread_name="wg")
    text = str(jax.make_jaxpr(plgpu.kernel(body, out_type=struct(1), **how))(jnp.zeros((160, 32))))
    assert f"n={memory} action=decrease" in text and f"n={others} action=increase" in text


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(num_compute_wgs=3), "wants 4 threads along 'wg', but the kernel has 3 threads along it"),
        (dict(wg_axis="thread"), "but the kernel has no such axis"),
        (dict(memory_registers=41), "The memory_registers of plgpu.emit_pipeline_warp_specialized are 41"),
        (dict(memory_registers=176), "of 168 that each of 3 threads has"),
        (dict(memory_thread_idx=3), "The memory_thread_idx of plgpu.emit_pipeline_warp_specialized is 3"),
        (dict(pipeline_state=plgpu.PipelinePipeline.START), "got a pipeline_state, but it makes its buffers itself"),
        (dict(pipeline_state="start"), "The pipeline_state of plgpu.emit_pipeline_warp_specialized is"),
        (dict(compute_context=lambda pipeline: None), "does not run its pipeline"),
        (dict(compute_context=lambda pipeline: (pipeline(), pipeline())), "runs its pipeline twice"),
        (dict(compute_context=7), "The compute_context of plgpu.emit_pipeline_warp_specialized is"),
        (dict(manual_consumed_barriers=True, in_specs=[plgpu.BlockSpec((32, 32), lambda i: (i, 0), delay_release=1)]),
         "got a delay_release and manual_consumed_barriers"),
        (dict(manual_consumed_barriers=True), "takes 2 parameters (i, x_smem), but it gets the grid indices, 2 Refs"),
        (dict(in_specs=[], out_specs=[HALVES]), "has outputs in SMEM and 2 compute threads"),
    ],
)  # fmt: skip
def test_what_a_warp_specialized_pipeline_refuses(options, said):
    def body(x_ref, o_ref):
        call: dict[str, Any] = dict(grid=(2,), in_specs=[HALVES], **PIPELINE) | options
        plgpu.emit_pipeline_warp_specialized(lambda i, x_smem: None, **call)(x_ref)

    assert said in refused(body, (64, 32), **THREADS)
