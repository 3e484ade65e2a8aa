"""Kernels of the literature on the simulated TPU: values against NumPy in float64, no finding, under three schedules.

Written for these tests from the papers: attention by blocks with an online softmax (Milakov and Gimelshein 2018; Dao
et al. 2022) and with a table of blocks ("Splash"), grouped matrix products (MegaBlocks, Gale et al. 2022), attention
over pages (vLLM, Kwon et al. 2023).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding

HBM = pl.BlockSpec(memory_space=pl.ANY)
DMA = pltpu.SemaphoreType.DMA
LOW = -1e30
SCHEDULES = pytest.mark.parametrize("schedule", [None, "eager", 3])


def simulated(schedule, **params):
    return pltpu.InterpretParams(detect_races=True, schedule=schedule, **params)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def f64(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def attention(q, k, v, mask):
    q, k, v = f64(q, k, v)
    scores = np.where(mask, q @ np.swapaxes(k, -1, -2), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def dot(a, b):
    return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)


def online(scores, v, m, l, acc):
    """One step of the online softmax: new maximum, sum and weighted values of each row."""
    top = jnp.maximum(m, scores.max(-1, keepdims=True))
    p, scale = jnp.exp(scores - top), jnp.exp(m - top)
    return top, l * scale + p.sum(-1, keepdims=True), acc * scale + dot(p, v)


# --- attention by a table of blocks -----------------------------------------------------------------------------------
B = 16  # rows of a block


def splash_kernel(count_ref, table_ref, mask_table_ref, q_ref, k_ref, v_ref, mask_ref, o_ref, m, l, acc):
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m[...] = jnp.full_like(m, LOW)
        l[...] = jnp.zeros_like(l)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(j < count_ref[i])
    def _():
        scores = jnp.where(mask_ref[...] != 0, dot(q_ref[...], k_ref[...].T), LOW)
        m[...], l[...], acc[...] = online(scores, v_ref[...], m[...], l[...], acc[...])

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = acc[...] / l[...]


def block_table(mask):
    """Of each row of blocks: how many blocks have anything in them, and which (the last one repeated)."""
    n, w = mask.shape[0] // B, mask.shape[1] // B
    filled = mask.reshape(n, B, w, B).any((1, 3))
    count = filled.sum(1)
    table = np.zeros((n, count.max()), np.int32)
    for i, row in enumerate(filled):
        (ids,) = np.nonzero(row)
        table[i] = np.pad(ids, (0, count.max() - len(ids)), mode="edge")
    return count.astype(np.int32), table


@SCHEDULES
def test_attention_with_a_table_of_blocks(schedule):
    rows, dim = 96, 32
    q, k, v = (normal(rows, dim, seed=s) for s in range(3))
    at = np.arange(rows)
    mask = (at[:, None] >= at) & (at[:, None] - at < 40) | (at < 4)  # a causal window and a few global keys
    mask[33:48, 16:] &= at[16:] % 2 == 0
    count, table = block_table(mask)
    assert 1 < count.max() < rows // B  # blocks are skipped
    call = pl.pallas_call(
        splash_kernel,
        jax.ShapeDtypeStruct((rows, dim), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows // B, table.shape[1]),
            in_specs=[
                pl.BlockSpec((B, dim), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((B, dim), lambda i, j, count, table, _: (table[i, j], 0)),
                pl.BlockSpec((B, dim), lambda i, j, count, table, _: (table[i, j], 0)),
                pl.BlockSpec((B, B), lambda i, j, count, table, mask_table: (i, mask_table[i, j])),
            ],
            out_specs=pl.BlockSpec((B, dim), lambda i, j, *_: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((B, 1), jnp.float32), pltpu.VMEM((B, 1), jnp.float32), pltpu.VMEM((B, dim), jnp.float32)
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=simulated(schedule, uninitialized_reads="raise"),
    )  # fmt: skip
    out = call(count, table, table, q, k, v, mask.astype(np.int8))
    np.testing.assert_allclose(out, attention(q, k, v, mask), atol=2e-5)


# --- attention, keys by a loop in the kernel --------------------------------------------------------------------------
def flash_kernel(q_ref, k_ref, v_ref, o_ref):
    i = pl.program_id(1)
    rows, dim = q_ref.shape
    q = q_ref[...]

    def step(j, carry):
        at = pl.ds(pl.multiple_of(j * rows, rows), rows)
        scores = dot(q, k_ref[at, :].T)
        row = i * rows + lax.broadcasted_iota(jnp.int32, (rows, rows), 0)
        column = j * rows + lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
        return online(jnp.where(row >= column, scores, LOW), v_ref[at, :], *carry)

    start = jnp.full((rows, 1), LOW), jnp.zeros((rows, 1)), jnp.zeros((rows, dim))
    _, l, acc = lax.fori_loop(0, i + 1, step, start)  # blocks above the diagonal are not looked at
    o_ref[...] = acc / l


@SCHEDULES
@pytest.mark.parametrize("cores", [1, 2])
def test_flash_attention_by_a_loop_over_keys(schedule, cores):
    heads, rows, dim, block = 2, 64, 32, 16
    q, k, v = (normal(heads, rows, dim, seed=s) for s in range(3))
    whole = pl.BlockSpec((None, rows, dim), lambda h, i: (h, 0, 0))
    part = pl.BlockSpec((None, block, dim), lambda h, i: (h, i, 0))
    out = pl.pallas_call(
        flash_kernel,
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(heads, rows // block),
        in_specs=[part, whole, whole],
        out_specs=part,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=simulated(schedule, num_cores_or_threads=cores),
    )(q, k, v)
    np.testing.assert_allclose(out, attention(q, k, v, np.tri(rows, dtype=bool)), atol=2e-5)


# --- matrix products with a table -------------------------------------------------------------------------------------
def ragged_kernel(group_ref, tile_ref, start_ref, end_ref, x_ref, w_ref, o_ref):
    """One visit: the rows of this tile that belong to this group."""
    t = pl.program_id(1)
    first = (t == 0) | (tile_ref[t] != tile_ref[jnp.maximum(t - 1, 0)])

    @pl.when(first)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    row = tile_ref[t] * B + lax.broadcasted_iota(jnp.int32, o_ref.shape, 0)
    mine = (row >= start_ref[t]) & (row < end_ref[t])
    o_ref[...] += jnp.where(mine, dot(x_ref[...], w_ref[...]), 0)


def visits(sizes):
    """(group, tile, first row, end row) of each pair of a group and a tile that have rows in common."""
    ends = np.cumsum(sizes)
    found = []
    for g, (start, end) in enumerate(zip(ends - sizes, ends)):
        found += [(g, t, start, end) for t in range(start // B, -(-end // B)) if end > start]
    return [np.array(column, np.int32) for column in zip(*found)]


@SCHEDULES
def test_grouped_matmul(schedule):
    sizes = np.array([5, 0, 30, 1, 44])
    rows, inner, columns = int(sizes.sum()), 32, 256
    x, w = normal(rows, inner), normal(len(sizes), inner, columns, seed=1)
    group, tile, start, end = visits(sizes)
    out = pl.pallas_call(
        ragged_kernel,
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(columns // 128, len(group)),
            in_specs=[
                pl.BlockSpec((B, inner), lambda n, t, g, tile, *_: (tile[t], 0)),
                pl.BlockSpec((None, inner, 128), lambda n, t, g, *_: (g[t], 0, n)),
            ],
            out_specs=pl.BlockSpec((B, 128), lambda n, t, g, tile, *_: (tile[t], n)),
        ),
        interpret=simulated(schedule, uninitialized_reads="raise"),
    )(group, tile, start, end, x, w)
    want = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), np.asarray(w, np.float64)[np.repeat(range(5), sizes)])
    np.testing.assert_allclose(out, want, atol=2e-5)


def block_sparse_kernel(row_ref, column_ref, a_ref, b_ref, o_ref):
    t = pl.program_id(1)

    @pl.when((t == 0) | (row_ref[t] != row_ref[jnp.maximum(t - 1, 0)]))
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += dot(a_ref[...], b_ref[...])


def block_sparse(schedule, order):
    rng = np.random.default_rng(0)
    n, width = 5, 128
    rows, columns = np.nonzero(np.eye(n, dtype=bool) | (rng.random((n, n)) < 0.3))
    keep = slice(None) if order is None else order(len(rows))
    rows, columns = (x[keep].astype(np.int32) for x in (rows, columns))
    blocks, b = normal(len(rows), B, B), normal(n * B, width, seed=1)
    out = pl.pallas_call(
        block_sparse_kernel,
        jax.ShapeDtypeStruct((n * B, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1, len(rows)),
            in_specs=[
                pl.BlockSpec((None, B, B), lambda j, t, row, column: (t, 0, 0)),
                pl.BlockSpec((B, width), lambda j, t, row, column: (column[t], j)),
            ],
            out_specs=pl.BlockSpec((B, width), lambda j, t, row, column: (row[t], j)),
        ),
        interpret=simulated(schedule),
    )(rows, columns, blocks, b)
    dense = np.zeros((n, n, B, B))
    dense[rows, columns] = blocks
    np.testing.assert_allclose(out, dense.swapaxes(1, 2).reshape(n * B, n * B) @ np.asarray(b, np.float64), atol=2e-5)


@SCHEDULES
def test_block_sparse_matmul(schedule):
    block_sparse(schedule, None)


def test_block_sparse_matmul_in_the_wrong_order():
    with pytest.raises(KernelFinding, match="Revisited block") as caught:
        block_sparse(None, lambda n: np.roll(np.arange(n), 1))
    assert "test_kernels.py" in caught.value.finding.where


# --- attention over pages ---------------------------------------------------------------------------------------------
PAGE, AT_ONCE, DIM = 8, 2, 32  # keys in a page; pages fetched together


def paged_kernel(early, length_ref, table_ref, q_ref, k_hbm, v_hbm, o_ref, k_buf, v_buf, sems):
    sequence = pl.program_id(0)
    length = length_ref[sequence]
    keys = PAGE * AT_ONCE
    steps = pl.cdiv(length, keys)

    def copies(step, slot):
        for p in range(AT_ONCE):
            page = table_ref[sequence, step * AT_ONCE + p]
            for n, (pages, buffer) in enumerate(((k_hbm, k_buf), (v_hbm, v_buf))):
                yield pltpu.make_async_copy(pages.at[page], buffer.at[slot, p], sems.at[slot, n])

    def start(step, slot):
        for copy in copies(step, slot):
            copy.start()

    start(0, 0)

    def body(step, carry):
        slot = lax.rem(step, 2)

        @pl.when(step + 1 < steps)
        def _():
            start(step + 1, 1 - slot)

        if not early:
            for copy in copies(step, slot):
                copy.wait()
        k = k_buf[slot].reshape(keys, DIM)
        if early:
            for copy in copies(step, slot):
                copy.wait()
        column = step * keys + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        scores = jnp.where(column < length, dot(q_ref[...], k.T), LOW)
        return online(scores, v_buf[slot].reshape(keys, DIM), *carry)

    heads = q_ref.shape[0]
    begin = jnp.full((heads, 1), LOW), jnp.zeros((heads, 1)), jnp.zeros((heads, DIM))
    _, l, acc = lax.fori_loop(0, steps, body, begin)
    o_ref[...] = acc / l


def paged(schedule, early=False):
    sequences, heads, pages = 3, 4, 20
    lengths = np.array([1, 47, 32], np.int32)
    table = np.random.default_rng(0).permutation(pages)[:18].reshape(sequences, 6).astype(np.int32)
    q, k, v = normal(sequences, heads, DIM), normal(pages, PAGE, DIM, seed=1), normal(pages, PAGE, DIM, seed=2)
    rows = pl.BlockSpec((None, heads, DIM), lambda s, *_: (s, 0, 0))
    out = pl.pallas_call(
        lambda *refs: paged_kernel(early, *refs),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sequences,),
            in_specs=[rows, HBM, HBM],
            out_specs=rows,
            scratch_shapes=[*[pltpu.VMEM((2, AT_ONCE, PAGE, DIM), jnp.float32)] * 2, DMA((2, 2))],
        ),
        interpret=simulated(schedule, uninitialized_reads="raise"),
    )(lengths, table, q, k, v)
    for s, n in enumerate(lengths):
        keys, values = (np.asarray(x)[table[s]].reshape(-1, DIM)[:n] for x in (k, v))
        np.testing.assert_allclose(out[s], attention(q[s], keys, values, True), atol=2e-5)


@SCHEDULES
def test_paged_attention(schedule):
    paged(schedule)


@SCHEDULES
def test_paged_attention_that_reads_a_page_too_early(schedule):
    with pytest.raises(KernelFinding) as caught:
        paged(schedule, early=True)
    assert caught.value.finding.kind in ("race", "uninitialized-read")


# --- a pipeline inside the kernel -------------------------------------------------------------------------------------
def pipelined_matmul(schedule, tiles, shape, cores=1, **params):
    (m, k, n), (tm, tk, tn) = shape, tiles
    x, y = normal(m, k), normal(k, n, seed=1)

    def step(x_ref, y_ref, o_ref, acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += dot(x_ref[...], y_ref[...])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc[...]

    def kernel(x_ref, y_ref, o_ref, acc):
        pltpu.emit_pipeline(
            step,
            grid=(m // tm, n // tn, k // tk),
            in_specs=[pl.BlockSpec((tm, tk), lambda i, j, k: (i, k)), pl.BlockSpec((tk, tn), lambda i, j, k: (k, j))],
            out_specs=[pl.BlockSpec((tm, tn), lambda i, j, k: (i, j))],
            core_axis_name="core" if cores > 1 else None,
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
        )(x_ref, y_ref, o_ref, scratches=[acc])

    out, acc = jax.ShapeDtypeStruct((m, n), jnp.float32), pltpu.VMEM((tm, tn), jnp.float32)
    if cores > 1:
        mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=cores)
        call = pl.kernel(kernel, out, mesh=mesh, scratch_types=[acc], interpret=simulated(schedule, **params))
    else:
        call = pl.pallas_call(
            kernel, out, in_specs=[HBM, HBM], out_specs=HBM, scratch_shapes=[acc],
            interpret=simulated(schedule, **params),
        )  # fmt: skip
    np.testing.assert_allclose(call(x, y), np.matmul(*f64(x, y)), atol=1e-4)


@SCHEDULES
@pytest.mark.parametrize("cores", [1, 2])
def test_matmul_by_a_pipeline(schedule, cores):
    pipelined_matmul(schedule, (16, 32, 128), (64, 96, 256), cores, uninitialized_reads="raise")


# --- an embedding -----------------------------------------------------------------------------------------------------
def embed_kernel(ids_ref, table_hbm, o_ref, sems):
    """Rows of a table, several copies under way at a time."""
    block, depth = o_ref.shape[0], sems.shape[0]
    first = pl.program_id(0) * block

    def row(i):
        return pltpu.make_async_copy(table_hbm.at[ids_ref[first + i]], o_ref.at[i], sems.at[lax.rem(i, depth)])

    @pl.loop(0, block)
    def _(i):
        @pl.when(i >= depth)
        def _():
            row(i - depth).wait()

        row(i).start()

    @pl.loop(block - depth, block)
    def _(i):
        row(i).wait()


@SCHEDULES
def test_embedding_by_copies_of_rows(schedule):
    vocabulary, block, depth = 50, 8, 3
    ids = np.random.default_rng(0).integers(0, vocabulary, 32).astype(np.int32)
    table = normal(vocabulary, 128)
    out = pl.pallas_call(
        embed_kernel,
        jax.ShapeDtypeStruct((32, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(32 // block,),
            in_specs=[HBM],
            out_specs=pl.BlockSpec((block, 128), lambda i, _: (i, 0)),
            scratch_shapes=[DMA((depth,))],
        ),
        interpret=simulated(schedule, uninitialized_reads="raise"),
    )(ids, table)
    np.testing.assert_array_equal(out, np.asarray(table)[ids])
