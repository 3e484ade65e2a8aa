"""Software pipelines inside kernels: values on two executors, and which copies are made."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import jaxlink
from palladion import tpu as pltpu
from palladion.language.tpu import dma
from palladion.reference import evaluate

ANY = pl.BlockSpec(memory_space=pl.ANY)
RNG = np.random.default_rng(0)


@pytest.fixture(params=["reference", "simulator"])
def interpret(request):
    return True if request.param == "reference" else pltpu.InterpretParams(detect_races=True)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def run(kernel, *operands, out, interpret: Any = True, space=ANY, **call: Any) -> Any:
    """What a kernel gives on operands that stay where they are."""
    outs = jax.tree.map(lambda o: jax.ShapeDtypeStruct(o, jnp.float32), out, is_leaf=lambda o: isinstance(o, tuple))
    specs = dict(in_specs=[space] * len(operands), out_specs=jax.tree.map(lambda _: space, outs))
    return pl.pallas_call(kernel, outs, interpret=interpret, **specs | call)(*operands)


def pipelined(body, *operands, out, interpret: Any = True, **pipeline: Any) -> Any:
    """A kernel that is one pipeline."""
    return run(lambda *refs: pltpu.emit_pipeline(body, **pipeline)(*refs), *operands, out=out, interpret=interpret)


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def tiles(*block, **options):
    return pl.BlockSpec(block, lambda *ids: ids, **options)


# --- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [None, 1, 2, 3, 5])
def test_any_number_of_buffers(interpret, count):
    x = random(24, 256)
    spec = tiles(8, 128, pipeline_mode=count and pl.Buffered(count))
    got = pipelined(add_one, x, out=x.shape, interpret=interpret, grid=(3, 2), in_specs=[spec], out_specs=[spec])
    np.testing.assert_array_equal(got, x + 1)


@pytest.mark.parametrize("shape", [(13, 200), (16, 200), (13, 256), (5, 100), (8, 128)])
def test_ragged_edges(interpret, shape):
    x, grid = random(*shape), (pl.cdiv(shape[0], 8), pl.cdiv(shape[1], 128))
    spec = tiles(8, 128)
    got = pipelined(add_one, x, out=shape, interpret=interpret, grid=grid, in_specs=[spec], out_specs=spec)
    np.testing.assert_array_equal(got, x + 1)


def matmul(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


MATMUL: dict[str, Any] = dict(
    in_specs=[pl.BlockSpec((16, 32), lambda i, j, k: (i, k)), pl.BlockSpec((32, 128), lambda i, j, k: (k, j))],
    out_specs=[pl.BlockSpec((16, 128), lambda i, j, k: (i, j))],
)


def test_an_output_accumulates_while_its_block_stays(interpret):
    x, y = random(32, 96), random(96, 384)
    got = pipelined(matmul, x, y, out=(32, 384), interpret=interpret, grid=(2, 3, 3), **MATMUL)
    np.testing.assert_allclose(got, x @ y, rtol=1e-5, atol=1e-5)


def test_sum_over_the_last_axis(interpret):
    def body(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(axis=1)

    x, row = random(16, 512), pl.BlockSpec((8,), lambda i, j: (i,))
    got = pipelined(body, x, out=(16,), interpret=interpret, grid=(2, 4), in_specs=[tiles(8, 128)], out_specs=[row])
    np.testing.assert_allclose(got, x.sum(axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_a_grid_known_at_run_time(interpret, rows):
    def kernel(n_ref, x_ref, o_ref, s_ref):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + pl.num_programs(0).astype(jnp.float32)

        pltpu.emit_pipeline(body, grid=(n_ref[0], 2), in_specs=[tiles(8, 128)], out_specs=[tiles(8, 128)])(x_ref, o_ref)
        s_ref[0] = 1.0

    x, scalars = random(24, 256), pl.BlockSpec(memory_space=pltpu.SMEM)
    got, _ = run(
        kernel,
        np.array([rows], np.int32),
        x,
        out=[(24, 256), (1,)],
        interpret=interpret,
        in_specs=[scalars, ANY],
        out_specs=[ANY, scalars],
    )
    np.testing.assert_array_equal(got[: 8 * rows], x[: 8 * rows] + rows)
    assert jnp.isnan(got[8 * rows :]).all()


def test_index_maps_read_scalars(interpret):
    def kernel(order_ref, x_ref, o_ref):
        picks = pl.BlockSpec((8, 128), lambda i: (order_ref[i], 0))
        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(add_one, grid=(4,), in_specs=[picks], out_specs=[rows])(x_ref, o_ref)

    x, order = random(24, 128), np.array([2, 0, 0, 1], np.int32)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    got = run(kernel, order, x, out=(32, 128), interpret=interpret, in_specs=[scalars, ANY])
    np.testing.assert_array_equal(got, x.reshape(3, 8, 128)[order].reshape(32, 128) + 1)


def test_a_pipeline_in_a_pipeline(interpret):
    def kernel(x_ref, y_ref, o_ref):
        def outer(y_ref, o_ref):
            column = pl.program_id(0)

            def inner(x_ref, y_ref, o_ref):
                o_ref[...] = x_ref[...] * y_ref[...] + 10 * column + pl.program_id(0)

            pltpu.emit_pipeline(
                inner,
                grid=(3,),
                in_specs=[pl.BlockSpec((8, 128), lambda i: (i, column)), pl.BlockSpec((8, 128), lambda i: (i, 0))],
                out_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            )(x_ref, y_ref, o_ref)

        columns = pl.BlockSpec((24, 128), lambda j: (0, j))
        pltpu.emit_pipeline(outer, grid=(2,), in_specs=[columns], out_specs=[columns])(y_ref, o_ref)

    x, y = random(24, 256), random(24, 256)
    got = run(kernel, x, y, out=(24, 256), interpret=interpret)
    np.testing.assert_allclose(got, x * y + np.repeat([0, 10], 128) + np.repeat([[0], [1], [2]], 8, axis=0), rtol=1e-6)


def test_dimensions_of_one_index_and_whole_operands(interpret):
    def body(x_ref, w_ref, o_ref):
        assert (x_ref.shape, w_ref.shape, o_ref.shape) == ((8, 128), (1, 128), (8, 128))
        o_ref[...] = x_ref[...] * w_ref[...]

    plane = pl.BlockSpec((None, 8, 128), lambda i: (i, 0, 0))
    x, w = random(3, 8, 128), random(1, 128)
    got = pipelined(
        body, x, w, out=(3, 8, 128), interpret=interpret, grid=(3,), in_specs=[plane, None], out_specs=[plane]
    )
    np.testing.assert_array_equal(got, x * w)


def test_blocks_at_element_offsets(interpret):
    def body(x_ref, o_ref):
        rows = jax.lax.broadcasted_iota(jnp.int32, (16, 128), 0) + 8 * pl.program_id(0)
        o_ref[...] = jnp.where(rows < 20, x_ref[...], 0)[:8] + jnp.where(rows < 20, x_ref[...], 0)[8:]

    x = random(20, 128)  # block 1 is rows 8 to 24, of which 12 are there; block 2 has 4
    halo = pl.BlockSpec((pl.Element(16), 128), lambda i: (8 * i, 0))
    out = pl.BlockSpec((8, 128), lambda i: (i, 0))
    got = pipelined(body, x, out=(24, 128), interpret=interpret, grid=(3,), in_specs=[halo], out_specs=[out])
    padded = np.pad(x, ((0, 12), (0, 0)))
    np.testing.assert_array_equal(got, padded[:24] + padded[8:32])


def test_blocks_of_bounded_size(interpret):
    starts, sizes = [0, 3, 8], [3, 5, 8]

    def kernel(bounds_ref, x_ref, o_ref):
        part = pl.BlockSpec((pl.BoundedSlice(8), 128), lambda i: (pl.ds(bounds_ref[0, i], bounds_ref[1, i]), 0))
        pltpu.emit_pipeline(add_one, grid=(3,), in_specs=[part], out_specs=[part])(x_ref, o_ref)

    x, scalars = random(16, 128), pl.BlockSpec(memory_space=pltpu.SMEM)
    bounds = np.array([starts, sizes], np.int32)
    got = run(kernel, bounds, x, out=(16, 128), interpret=interpret, in_specs=[scalars, ANY])
    np.testing.assert_array_equal(got, x + 1)


def test_what_the_body_gets():
    seen = []

    def body(step, x_ref, o_ref, tmp_ref):
        seen.append((step, x_ref.shape, tmp_ref.shape, pl.num_programs(0), pl.num_programs(1)))
        tmp_ref[...] = x_ref[...]
        number = 10 * step.index[0] + step.index[1] + 100 * step.local_index
        o_ref[...] = tmp_ref[...] * 0 + number.astype(jnp.float32)

    def kernel(x_ref, o_ref, tmp_ref):
        pipeline = pltpu.emit_pipeline(
            body, grid=(2, 2), in_specs=[tiles(8, 128)], out_specs=[tiles(8, 128)], _explicit_indices=True
        )
        assert pipeline(x_ref, o_ref, scratches=(tmp_ref,)) is None

    got = run(kernel, random(16, 256), out=(16, 256), scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)])
    np.testing.assert_array_equal(got[::8, ::128], [[0, 101], [210, 311]])
    assert isinstance(seen[0][0], pltpu.PipelineStep)
    assert seen[0][1:] == ((8, 128), (8, 128), 2, 2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_looking_ahead(interpret, count):
    spec = pl.BlockSpec((8, 128), lambda i: (i // 3, 0), pipeline_mode=pl.Buffered(count, use_lookahead=True))
    out = pl.BlockSpec((8, 128), lambda i: (i, 0))
    x = random(30, 128)  # the last block is ragged
    got = pipelined(add_one, x, out=(96, 128), interpret=interpret, grid=(12,), in_specs=[spec], out_specs=[out])
    expected = np.repeat(np.pad(x, ((0, 2), (0, 0))).reshape(4, 1, 8, 128), 3, axis=1).reshape(96, 128) + 1
    exists = np.arange(96) % 8 + 8 * (np.arange(96) // 24) < 30
    np.testing.assert_array_equal(got[exists], expected[exists])


@pytest.mark.parametrize("lookahead", [True, False])
def test_looking_ahead_fills_the_slots_at_once(lookahead):
    spec = pl.BlockSpec((8, 128), lambda i: (i // 4, 0), pipeline_mode=pl.Buffered(3, use_lookahead=lookahead))

    def kernel(x_ref, o_ref):
        def body(x_ref):
            @pl.when(pl.program_id(0) == 0)
            def _():
                pltpu.sync_copy(window_ref, o_ref)

        pipeline, allocations = pltpu.emit_pipeline_with_allocations(body, grid=(12,), in_specs=[spec])

        def with_buffers(buffers):
            nonlocal window_ref
            window_ref = buffers[0].window_ref
            pipeline(x_ref, allocations=buffers)

        pl.run_scoped(with_buffers, allocations(x_ref))

    window_ref = None
    x = random(24, 128)
    got = run(kernel, x, out=(3, 8, 128))
    np.testing.assert_array_equal(got[0], x[:8])
    if lookahead:
        np.testing.assert_array_equal(got[1:], x[8:].reshape(2, 8, 128))
    else:
        assert np.isnan(got[1:]).all()


# --- buffers of one's own ---------------------------------------------------------------------------------------------
def test_runs_may_share_buffers(interpret):
    spec = tiles(8, 128)

    def kernel(x_ref, y_ref, o_ref, p_ref):
        pipeline, allocations = pltpu.emit_pipeline_with_allocations(
            add_one, grid=(3, 2), in_specs=[spec], out_specs=[spec]
        )

        def both(buffers):
            pipeline(x_ref, o_ref, allocations=buffers)
            pipeline(y_ref, p_ref, allocations=buffers)

        pl.run_scoped(both, allocations(x_ref, o_ref))

    x, y = random(24, 256), random(24, 256)
    got = run(kernel, x, y, out=[(24, 256), (24, 256)], interpret=interpret)
    np.testing.assert_array_equal(got, [x + 1, y + 1])


@pytest.mark.parametrize("count", [2, (1, 1), (2, 2), (3, 2)])
def test_blocks_that_are_read_and_written(interpret, count):
    def body(x_ref, o_ref):
        o_ref[...] += x_ref[...]

    def kernel(x_ref, y_ref, o_ref, *buffers):
        pltpu.sync_copy(y_ref, o_ref)
        spec = tiles(8, 128)
        pipeline = pltpu.emit_pipeline(body, grid=(3, 2), in_specs=[spec], out_specs=[spec])
        pipeline(x_ref, o_ref, allocations=buffers)

    x, y = random(24, 200), random(24, 200)
    buffers = [
        pltpu.BufferedRef.input(tiles(8, 128), jnp.float32),
        pltpu.BufferedRef.input_output(tiles(8, 128), jnp.float32, buffer_count=count),
    ]
    got = run(kernel, x, y, out=(24, 200), interpret=interpret, scratch_shapes=buffers)
    np.testing.assert_array_equal(got, x + y)


def test_blocks_that_are_visited_again(interpret):
    def body(x_ref, o_ref):
        o_ref[...] = jnp.where(pl.program_id(0) == 0, 0, o_ref[...]) + x_ref[...]

    x = random(2, 3, 8, 128)
    inputs = pl.BlockSpec((None, None, 8, 128), lambda k, i: (k, i, 0, 0))
    again = pl.BlockSpec((8, 128), lambda k, i: (i, 0), pipeline_mode=pl.Buffered(2, revisit=pl.RevisitMode.ANY))
    got = pipelined(body, x, out=(24, 128), interpret=interpret, grid=(2, 3), in_specs=[inputs], out_specs=[again])
    np.testing.assert_array_equal(got, x.sum(axis=0).reshape(24, 128))


def test_a_buffered_ref_by_hand(interpret):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))

    def kernel(x_ref, o_ref, ins, outs):
        ins, outs = ins.initialize_slots(), outs.initialize_slots()
        ins.copy_in(x_ref, (0,))
        ins = ins.advance_copy_in_slot()
        for i in range(3):
            if i + 1 < 3:
                ins.copy_in(x_ref, (i + 1,))
                ins = ins.advance_copy_in_slot(True)
            ins.wait_in(x_ref, (i,))
            ins = ins.advance_wait_in_slot()
            if i > 1:
                outs.wait_out(o_ref, (i - 2,))
                outs = outs.advance_wait_out_slot()
            outs.current_ref[...] = ins.current_ref[...] + 1
            outs.copy_out(o_ref, (i,))
            outs = outs.advance_copy_out_slot()
        for i in (1, 2):
            outs.wait_out(o_ref, (i,))
            outs = outs.advance_wait_out_slot()
        assert (ins.cumulative_wait_in, outs.cumulative_wait_out) == (3, 3)

    buffers = [pltpu.BufferedRef.input(spec, jnp.float32), pltpu.BufferedRef.output(spec, jnp.float32)]
    x = random(20, 128)
    got = run(kernel, x, out=(20, 128), interpret=interpret, scratch_shapes=buffers)
    np.testing.assert_array_equal(got, x + 1)


def test_the_types_of_buffers():
    both = pltpu.BufferedRef.input_output(pl.BlockSpec((None, 8, 128), lambda i: (i, 0, 0)), jnp.bfloat16, (3, 2))
    window, recv, send = jax.tree.leaves(both)
    assert (window.shape, window.dtype, window.memory_space) == ((4, 8, 128), jnp.bfloat16, pltpu.VMEM)
    assert recv.shape == send.shape == (4,)
    assert (both.buffer_count, both.is_input, both.is_output) == (4, True, True)
    there = pltpu.BufferedRef.input(tiles(8, 128), jnp.float32, source_memory_space=pltpu.VMEM)
    assert jax.tree.leaves(there) == []
    assert not there.is_buffered


# --- cores ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cores", "grid"), [(1, (4, 3)), (2, (4, 3)), (3, (4, 3)), (3, (5, 2)), (8, (4, 1))])
def test_the_cores_share_a_grid(cores, grid):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + (10 * pl.program_id(0) + pl.program_id(1)).astype(jnp.float32)

    def kernel(x_ref, o_ref):
        pltpu.emit_pipeline(
            body,
            grid=grid,
            in_specs=[tiles(8, 128)],
            out_specs=[tiles(8, 128)],
            core_axis=0,
            dimension_semantics=("parallel", pltpu.PARALLEL),
        )(x_ref, o_ref)

    x = random(8 * grid[0], 128 * grid[1])
    got = run(kernel, x, out=x.shape, grid=(cores,))
    ids = 10 * np.arange(grid[0])[:, None] + np.arange(grid[1])
    np.testing.assert_allclose(got, x + np.repeat(np.repeat(ids, 8, 0), 128, 1), rtol=1e-6)


def test_two_simulated_cores_share_a_grid():
    def kernel(x_ref, o_ref):
        spec = tiles(8, 128)
        split: dict[str, Any] = dict(core_axis=0, dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY))
        pltpu.emit_pipeline(add_one, grid=(5, 2), in_specs=[spec], out_specs=[spec], **split)(x_ref, o_ref)

    x = random(40, 256)
    cores = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    got = run(kernel, x, out=x.shape, grid=(2,), interpret=cores, compiler_params=parallel)
    np.testing.assert_array_equal(got, x + 1)


def test_the_cores_of_a_mesh_share_a_grid(interpret):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

    @pl.kernel(out_type=jax.ShapeDtypeStruct((24, 256), jnp.float32), mesh=mesh, interpret=interpret)
    def kernel(x_ref, o_ref):
        pltpu.emit_pipeline(
            add_one,
            grid=(3, 2),
            in_specs=[tiles(8, 128)],
            out_specs=[tiles(8, 128)],
            core_axis_name="core",
            dimension_semantics=(pltpu.ARBITRARY, pltpu.PARALLEL),
        )(x_ref, o_ref)

    x = random(24, 256)
    np.testing.assert_array_equal(kernel(x), x + 1)


# --- which copies -----------------------------------------------------------------------------------------------------
class Copies:
    """The copies that a kernel starts and waits for, as (memory of the source, bytes), counted as it runs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[str, int]]] = []

    def _count(self, which: str) -> collections.Counter:
        jax.effects_barrier()
        return collections.Counter(copy for what, copy in self.seen if what == which)

    @property
    def started(self) -> collections.Counter:
        return self._count("start")

    @property
    def awaited(self) -> collections.Counter:
        return self._count("wait")


@pytest.fixture
def copies(monkeypatch):
    seen = Copies()

    def counting(primitive, what):
        plain = evaluate.RULES.get(primitive)

        def rule(ev, eqn, *operands):
            views = jax.tree.unflatten(eqn.params["tree"], operands)
            size = evaluate.load(views.src.ref.value, views.src.transforms).size * 4
            space = str(eqn.invars[0].aval.memory_space)  # of the source
            jax.debug.callback(lambda: seen.seen.append((what, (space, size))))
            return plain(ev, eqn, *operands)

        monkeypatch.setitem(evaluate.RULES._rules, primitive, rule)

    jax.clear_caches()  # an equal kernel may have been compiled without the counting, and must not be with it
    counting(dma.dma_start_p, "start")
    counting(dma.dma_wait_p, "wait")
    yield seen
    jax.clear_caches()
    assert seen.started == seen.awaited  # every copy is awaited, with its size


TILE = 8 * 128 * 4


def test_a_block_is_fetched_once_for_a_run_of_steps(copies):
    x, y = random(16, 96), random(96, 256)
    got = pipelined(matmul, x, y, out=(16, 256), grid=(1, 2, 3), **MATMUL)
    np.testing.assert_allclose(got, x @ y, rtol=1e-5, atol=1e-5)
    assert copies.started == {("any", 16 * 32 * 4): 6, ("any", 32 * 128 * 4): 6, ("vmem", 16 * 128 * 4): 2}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_neighbouring_steps_share_a_block(copies, count):
    spec = pl.BlockSpec((8, 128), lambda i: (i // 2, 0), pipeline_mode=pl.Buffered(count))
    out = pl.BlockSpec((8, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(count))
    x = random(24, 128)
    got = pipelined(add_one, x, out=(48, 128), grid=(6,), in_specs=[spec], out_specs=[out])
    np.testing.assert_array_equal(got, np.repeat(x.reshape(3, 1, 8, 128), 2, axis=1).reshape(48, 128) + 1)
    assert copies.started == {("any", TILE): 3, ("vmem", TILE): 6}


def test_an_operand_of_one_block_is_copied_once(copies):
    def body(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.where(pl.program_id(0) == 0, 0, o_ref[...]) + x_ref[...] * w_ref[...]

    row, whole = pl.BlockSpec((8, 128), lambda i: (i, 0)), pl.BlockSpec((8, 128), lambda i: (0, 0))
    x, w = random(24, 128), random(8, 128)
    got = pipelined(body, x, w, out=(8, 128), grid=(3,), in_specs=[row, whole], out_specs=[whole])
    np.testing.assert_allclose(got, (x.reshape(3, 8, 128) * w).sum(axis=0), rtol=1e-5, atol=1e-5)
    assert copies.started == {("any", TILE): 4, ("vmem", TILE): 1}


def test_at_the_edge_only_what_exists_is_copied(copies):
    x = random(13, 200)
    got = pipelined(add_one, x, out=x.shape, grid=(2, 2), in_specs=[tiles(8, 128)], out_specs=[tiles(8, 128)])
    np.testing.assert_array_equal(got, x + 1)
    sizes = [8 * 128, 8 * 72, 5 * 128, 5 * 72]
    assert copies.started == {(space, 4 * n): 1 for space in ("any", "vmem") for n in sizes}


def test_nothing_is_copied_where_blocks_are_in_place(copies):
    spec = tiles(8, 128)
    x = random(24, 256)

    def kernel(x_ref, o_ref):
        pltpu.emit_pipeline(add_one, grid=(3, 2), in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    got = run(kernel, x, out=x.shape, space=pl.BlockSpec(memory_space=pltpu.VMEM))
    np.testing.assert_array_equal(got, x + 1)
    left = tiles(8, 128, memory_space=pl.ANY)
    got = pipelined(add_one, x, out=x.shape, grid=(3, 2), in_specs=[left], out_specs=[left])
    np.testing.assert_array_equal(got, x + 1)
    assert not copies.started


def test_without_pipelining_each_copy_is_awaited_at_once(interpret):
    def kernel(x_ref, o_ref):
        spec = tiles(8, 128)
        pltpu.emit_pipeline(add_one, grid=(3, 2), in_specs=[spec], out_specs=[spec], no_pipelining=True)(x_ref, o_ref)

    x = random(24, 200)
    np.testing.assert_array_equal(run(kernel, x, out=x.shape, interpret=interpret), x + 1)


def in_program_order(jaxpr):
    """The names of the copies' equations."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in (dma.dma_start_p, dma.dma_wait_p):
            yield eqn.primitive.name
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from in_program_order(inner)


def test_without_pipelining_each_copy_is_awaited_before_the_next_starts():
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec, x = tiles(8, 128), random(24, 256)
    for no_pipelining in (True, False):
        options: dict[str, Any] = dict(
            grid=(3, 2), in_specs=[spec, spec], out_specs=[spec], no_pipelining=no_pipelining
        )
        traced = jax.make_jaxpr(lambda x, o=options: pipelined(body, x, x, out=x.shape, **o))(x)
        assert (list(in_program_order(traced.jaxpr)) == ["dma_start", "dma_wait"] * 3) is no_pipelining


@pytest.mark.parametrize(("prefetched", "starts"), [(0, 3), (1, 2), (2, 1)])
def test_blocks_that_are_there_already(copies, prefetched, starts):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(2, prefetched_count=prefetched))
    out = pl.BlockSpec((8, 128), lambda i: (i, 0))

    def kernel(x_ref, o_ref):
        pipeline, allocations = pltpu.emit_pipeline_with_allocations(
            add_one, grid=(3,), in_specs=[spec], out_specs=[out]
        )

        def with_buffers(buffers):
            for slot in range(prefetched):
                pltpu.sync_copy(x_ref.at[pl.ds(8 * slot, 8)], buffers[0].window_ref.at[slot])
            pipeline(x_ref, o_ref, allocations=buffers)

        pl.run_scoped(with_buffers, allocations(x_ref, o_ref))

    x = random(24, 128)
    np.testing.assert_array_equal(run(kernel, x, out=x.shape), x + 1)
    assert copies.started[("any", TILE)] == starts + prefetched  # those of the pipeline, and those before it


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("repeat", [1, 2])
def test_prefetching_before_a_pipeline(interpret, ahead, repeat):
    spec = pl.BlockSpec((8, 128), lambda i: (i // repeat, 0), pipeline_mode=pl.Buffered(2, prefetched_count=ahead))
    out = pl.BlockSpec((8, 128), lambda i: (i, 0))
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    def kernel(x_ref, o_ref):
        pipeline, prefetch = pltpu.emit_pipeline_with_async_prefetch(
            add_one, grid=(3 * repeat,), in_specs=[spec], out_specs=[out], mesh=mesh
        )
        buffers = prefetch(x_ref)
        pipeline(x_ref, o_ref, allocations=buffers)

    x = random(20, 128)
    got = run(kernel, x, out=(24 * repeat, 128), interpret=interpret)
    expected = np.repeat(np.pad(x, ((0, 4), (0, 0))).reshape(3, 1, 8, 128), repeat, axis=1).reshape(-1, 128) + 1
    exists = np.arange(24 * repeat) % 8 + 8 * (np.arange(24 * repeat) // (8 * repeat)) < 20
    np.testing.assert_array_equal(got[exists], expected[exists])


# --- mistakes ---------------------------------------------------------------------------------------------------------
def emit(body=add_one, refs=2, **options):
    spec = tiles(8, 128)
    options: dict[str, Any] = dict(grid=(3, 2), in_specs=[spec], out_specs=[spec]) | options
    return lambda *given: pltpu.emit_pipeline(body, **options)(*given[:refs])


@pytest.mark.parametrize(
    ("kernel", "kind", "first_line"),
    [
        (emit(refs=1), TypeError, "The pipeline has specs for 1 input and 1 output, but it is called with 1 Ref."),
        (emit(body=3), TypeError, "The body of a pipeline is a function of Refs, not 3 (int)."),
        (
            emit(body=lambda x_ref: None),
            TypeError,
            "The body of a pipeline takes 1 parameter (x_ref), but it gets 2 arguments.",
        ),
        (
            emit(body=lambda x_ref, o_ref: 1),
            ValueError,
            "The body of a pipeline returns 1 (int); it must return nothing.",
        ),
        (emit(grid=(3, 1.5)), TypeError, "An axis of a pipeline's grid is 1.5 (float)."),
        (emit(grid=(3, -1)), ValueError, "The grid of a pipeline, (3, -1), has a negative size."),
        (
            emit(grid=(3,), in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))]),
            TypeError,
            "The index map of input 0 of the pipeline (x_ref (input 0)) takes 2 parameters (i, j), but it gets 1 grid",
        ),
        (
            emit(in_specs=[pl.BlockSpec((8,), lambda i, j: (i,))]),
            ValueError,
            "The block shape of input 0 of the pipeline (x_ref (input 0)) has 1 dimension, but its Ref has 2.",
        ),
        (
            emit(in_specs=[tiles(7, 128, memory_space=pl.ANY)]),
            ValueError,
            "The blocks of the input 0 of the pipeline (x_ref (input 0)) stay in any, but some lie over its edge.",
        ),
        (
            emit(in_specs=[tiles(8, 128, pipeline_mode=pl.Buffered((2, 1)))]),
            ValueError,
            "The input 0 of the pipeline (x_ref (input 0)) has a pair of buffer counts, (2, 1), but the pipeline only",
        ),
        (
            emit(in_specs=[tiles(8, 128, pipeline_mode=pl.Buffered(2, prefetched_count=1))]),
            ValueError,
            "The input 0 of the pipeline (x_ref (input 0)) has prefetched blocks, but the pipeline makes its buffers",
        ),
        (
            emit(body=lambda x_ref, o_ref: x_ref[8]),
            IndexError,
            "Index 8 is out of range for dimension 0 of a view of the buffers of input 0 of the pipeline (x_ref",
        ),
        (
            emit(core_axis=0, dimension_semantics=(pltpu.ARBITRARY, pltpu.ARBITRARY)),
            NotImplementedError,
            "A pipeline can be split over cores only along a parallel axis, and it has none.",
        ),
        (
            emit(core_axis_name="core"),
            ValueError,
            "A pipeline cannot be split along 'core': it is not an axis of the kernel's core mesh.",
        ),
    ],
)
def test_mistakes(kernel, kind, first_line):
    def named(x_ref, o_ref):
        kernel(x_ref, o_ref)

    with pytest.raises(kind) as error:
        run(named, random(24, 256), out=(24, 256), grid=(2,))
    assert str(error.value).startswith(first_line)


def test_outside_a_kernel():
    with pytest.raises(ValueError, match=r"pltpu\.emit_pipeline.* can only be used inside a kernel"):
        emit()(jax.new_ref(jnp.zeros((24, 256))), jax.new_ref(jnp.zeros((24, 256))))
