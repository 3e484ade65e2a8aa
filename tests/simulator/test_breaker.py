"""Attempts to break the simulated TPU: a test for each fault that was there. What it finds: test_accusations.py."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import KernelFinding
from palladion.simulator import meeting

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)
HBM = pl.BlockSpec(memory_space=pl.ANY)
VMEM = pltpu.VMEM((8, 128), jnp.float32)
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
STRICT = dict(detect_races=True, uninitialized_reads="raise")


def run(kernel, *scratch, x=X, out=LIKE, in_spec=HBM, out_spec=HBM, grid=(), compiler_params=None, **params):
    return pl.pallas_call(
        kernel,
        out,
        grid=grid,
        in_specs=[in_spec],
        out_specs=out_spec,
        scratch_shapes=scratch,
        compiler_params=compiler_params,
        interpret=pltpu.InterpretParams(**STRICT | params),
    )(x)


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


# --- blocks that are not there ----------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize(
    "grid, which, hint",
    [
        (5, lambda i: (i, 0), "pl.cdiv.8, 2. programs cover it"),
        (jnp.int32(5), lambda i: (i, 0), "pl.cdiv.8, 2. programs cover it"),
        (4, lambda i: (i * 2, 0), "block numbers, not element offsets"),
        (4, lambda i: (i - 1, 0), "block number in 0..3"),
    ],
    ids=["too many programs", "a dynamic grid", "element offsets", "negative"],
)
def test_a_block_outside_the_array(grid, which, hint):
    rows = pl.BlockSpec((2, 128), lambda i: (i, 0))
    asked = pl.BlockSpec((2, 128), which)
    with pytest.raises(KernelFinding, match=hint) as caught:
        run(double, grid=(grid,), in_spec=asked, out_spec=rows)
    found = caught.value.finding
    assert found.kind == "out-of-bounds"
    assert found.message.startswith("Out of bounds block: the index map of x_ref (input 0) asks for block")
    assert "test_breaker.py" in found.where


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
def test_a_block_outside_may_be_read_as_uninitialized():
    rows, later = pl.BlockSpec((2, 128), lambda i: (i, 0)), pl.BlockSpec((2, 128), lambda i: (i + 1, 0))
    options = dict(out_of_bounds_reads="uninitialized", uninitialized_reads="allow")
    out = run(double, grid=(4,), in_spec=later, out_spec=rows, **options)
    np.testing.assert_array_equal(out, np.concatenate([X[2:] * 2, np.full((2, 128), np.nan)]))
    with pytest.raises(KernelFinding, match="index map of o_ref"):
        run(double, grid=(4,), in_spec=rows, out_spec=later, **options)


@pytest.mark.parametrize("grid", [(0,), (2, 0), (0, 3)])
def test_empty_grids_write_nothing(grid):
    rows = pl.BlockSpec((2, 128), lambda i, *_: (i, 0))
    assert np.isnan(run(double, grid=grid, in_spec=rows, out_spec=rows)).all()


# --- dtypes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_typed_keys(shape, transform):
    keys = jax.random.split(jax.random.key(0), shape)

    def kernel(x_ref, o_ref, v):
        v[...] = x_ref[...]
        o_ref[...] = v[...]

    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(shape, keys.dtype), scratch_shapes=[pltpu.VMEM(shape, keys.dtype)],
        interpret=pltpu.InterpretParams(**STRICT),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.random.key_data(transform(call)(keys)), jax.random.key_data(keys))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4", "uint2", "bool", "uint16", "int8"])
def test_ragged_blocks_and_copies_of_every_width(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (5, 7)), dtype)

    def shift(x_ref, o_ref, v, sem):
        pltpu.async_copy(x_ref, v, sem).wait()
        pltpu.sync_copy(v.at[pl.ds(1, 4)], o_ref.at[pl.ds(0, 4)])
        pltpu.sync_copy(v.at[0], o_ref.at[4])

    like, block = jax.ShapeDtypeStruct(x.shape, x.dtype), pl.BlockSpec((2, 4), lambda i, j: (i, j))
    out = run(shift, pltpu.VMEM(x.shape, dtype), DMA, x=x, out=like)
    np.testing.assert_array_equal(np.asarray(out), np.roll(np.asarray(x), -1, 0))
    out = run(lambda i, o: o.__setitem__(..., i[...]), x=x, out=like, grid=(3, 2), in_spec=block, out_spec=block)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))


# --- transformations --------------------------------------------------------------------------------------------------
def gather(interpret):
    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[pl.program_id(0)]

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((4, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[pl.BlockSpec((1, 128), lambda i, t: (t[i], 0))],
            out_specs=pl.BlockSpec((1, 128), lambda i, t: (i, 0)),
        ),
        interpret=interpret,
    )


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 1)])
def test_vmap_of_scalar_prefetch(axes):
    table = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, 4)), jnp.int32)
    xs = jnp.stack([X, X + 1000, -X])
    args = [a[0] if d is None else jnp.moveaxis(a, 0, d) for a, d in zip((table, xs), axes)]
    want = np.asarray([xs[k if axes[1] is not None else 0][t] + t[:, None] for k, t in enumerate(table)])
    if axes[0] is None:
        want = np.asarray([x[table[0]] + table[0][:, None] for x in xs])
    call = gather(pltpu.InterpretParams(**STRICT))
    np.testing.assert_array_equal(jax.vmap(call, axes)(*args), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(call, axes))(*args), want)


@pytest.mark.parametrize("cores", [1, 2])
def test_vmap_of_copies(cores):
    def kernel(x_ref, o_ref, v, sem):
        pltpu.sync_copy(x_ref, v)
        v[...] = v[...] * 2
        pltpu.async_copy(v, o_ref, sem).wait()

    xs = jnp.stack([X, X + 1, X + 2])
    call = jax.vmap(lambda x: run(kernel, VMEM, DMA, x=x, num_cores_or_threads=cores), 1, 1)
    np.testing.assert_array_equal(call(jnp.moveaxis(xs, 0, 1)), jnp.moveaxis(xs * 2, 0, 1))


# --- several devices --------------------------------------------------------------------------------------------------
def device_mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


def rotate(x):
    def kernel(x_ref, o_ref, send, recv):
        pltpu.async_remote_copy(x_ref, o_ref, send, recv, (lax.rem(lax.axis_index("x") + 1, 4),)).wait()

    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[HBM], out_specs=HBM, scratch_shapes=[DMA, DMA],
        interpret=pltpu.InterpretParams(),
    )(x)  # fmt: skip


def sharded(f, *specs, out=None, **params):
    specs = specs or (P("x"),)
    options = dict(mesh=device_mesh(), check_vma=False) | params
    return jax.jit(jax.shard_map(f, in_specs=specs, out_specs=specs[0] if out is None else out, **options))


ROWS = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)


def test_vmap_of_copies_to_other_devices():
    xs = jnp.stack([ROWS, ROWS + 1])
    want = np.roll(xs, 8, 1)
    np.testing.assert_array_equal(sharded(jax.vmap(rotate), P(None, "x"))(xs), want)
    np.testing.assert_array_equal(jax.vmap(sharded(rotate))(xs), want)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operands_sharded_by_jit():
    x = jax.device_put(ROWS, NamedSharding(device_mesh(), P("x")))
    call = pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=pltpu.InterpretParams())
    np.testing.assert_array_equal(jax.jit(lambda x: call(x + 1) + 1)(x), 2 * ROWS + 3)


def test_a_shard_map_over_some_of_the_axes_is_refused():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    call = pl.pallas_call(double, jax.ShapeDtypeStruct((16, 128), jnp.float32), interpret=pltpu.InterpretParams())
    with pytest.raises(NotImplementedError, match="leaves axes of its mesh automatic: 'y'"):
        sharded(call, mesh=mesh, axis_names={"x"})(ROWS)


@pytest.mark.parametrize("by, asked", [(("x",), "('x',): 4"), ("x", "'x': 4")])
def test_a_device_that_is_not_there_is_named_as_it_was_asked_for(by, asked):
    def kernel(x_ref, o_ref, send, recv):
        pltpu.async_remote_copy(x_ref, o_ref, send, recv, {by: lax.axis_index("x") + 1}).wait()

    def call(x):
        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[HBM], out_specs=HBM, scratch_shapes=[DMA, DMA],
            interpret=pltpu.InterpretParams(),
        )(x)  # fmt: skip

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(sharded(call)(ROWS))
    assert f"There is no device {{{asked}}}, core 0: the mesh has 4 devices (x: 4) of 1 core." in str(caught.value)


def test_after_a_device_that_did_not_come_the_next_call_works(monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.3)

    def some(x, n):
        return lax.cond(lax.axis_index("x") < n, lambda: rotate(x), lambda: x)

    call = sharded(some, P("x"), P(), out=P("x"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Only devices 0, 1, 2 of 4 came"):
        jax.block_until_ready(call(ROWS, 3))
    for k in range(3):
        np.testing.assert_array_equal(call(ROWS + k, 4), np.roll(ROWS + k, 8, 0))


def test_a_simulation_may_take_longer_than_devices_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.2)
    arrived, release = threading.Event(), threading.Event()

    def simulate(operands):
        arrived.set()
        release.wait(5)
        return [[x] for (x,) in operands]

    meet, results = meeting.Meeting(simulate, 2), {}
    devices = [threading.Thread(target=lambda d=d: results.update({d: meet(d, np.int32(d))})) for d in range(2)]
    for thread in devices:
        thread.start()
    arrived.wait(5)
    devices[0].join(0.5)
    release.set()
    for thread in devices:
        thread.join(5)
    assert results == {0: (0,), 1: (1,)}


# --- going on ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_halfway_leaves_nothing_behind(error, cores):
    def recorder(token, point, core):
        if point[0] == 2:
            raise error("halfway")
        return token

    rows = pl.BlockSpec((2, 128), lambda i: (i, 0))
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    options = dict(grid=(4,), in_spec=rows, out_spec=rows, compiler_params=parallel, num_cores_or_threads=cores)
    for _ in range(2):
        with pytest.raises(error, match="halfway"):
            run(double, grid_point_recorder=recorder, **options)
        np.testing.assert_array_equal(run(double, **options), X * 2)


def by_copies(x_ref, o_ref, v, sem):
    pltpu.async_copy(x_ref, v, sem).wait()
    pltpu.sync_copy(v, o_ref)


def overwritten(x_ref, o_ref, v, sem):
    copy = pltpu.async_copy(x_ref, v, sem)
    v[0] = v[0] * 2
    copy.wait()
    pltpu.sync_copy(v, o_ref)


def test_threads_call_right_and_wrong_kernels_at_once():
    compiled = jax.jit(lambda x: run(lambda i, o: pltpu.sync_copy(i, o), x=x))
    failures = []

    def call(k):
        for _ in range(3):
            try:
                run(overwritten if k % 2 else by_copies, VMEM, DMA)
                failures.extend(["silent"] if k % 2 else [])
            except KernelFinding:
                failures.extend([] if k % 2 else ["accused"])
            failures.extend([] if (compiled(X + k) == X + k).all() else ["values"])

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(t.is_alive() for t in threads)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_explore_says_which_schedule_it_was(transform):
    def kernel(x_ref, o_ref, v, sems, left):
        for k in range(2):
            pltpu.make_async_copy(x_ref.at[k], v.at[0], sems.at[k]).start()
        for k in range(2):
            pltpu.make_async_copy(x_ref.at[k], v.at[0], sems.at[k]).wait()

        @pl.when(v[0, 0] != 128)  # only if the first copy came last
        def _():
            pl.semaphore_signal(left, 1)

        pltpu.sync_copy(v, o_ref)

    call = transform(lambda x: run(kernel, VMEM, DMA((2,)), REGULAR, x=x, explore=20, detect_races=False,
                                   uninitialized_reads="allow"))  # fmt: skip
    with pytest.raises((KernelFinding, jax.errors.JaxRuntimeError), match=r"under schedule=\d+, which repeats it"):
        jax.block_until_ready(call(X))


def test_explore_counts_the_further_schedules():
    for n in (0, 1, 3):
        run(lambda i, o: pltpu.sync_copy(i, o), explore=n)
        assert pl.last_report().schedules == n + 1


def test_any_seed_orders_the_programs():
    rows = pl.BlockSpec((2, 128), lambda i: (i, 0))
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    out = run(double, grid=(4,), in_spec=rows, out_spec=rows, compiler_params=parallel, random_seed=-1)
    np.testing.assert_array_equal(out, X * 2)
