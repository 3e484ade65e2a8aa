"""What broke the simulated GPU: arguments of the wrong kind, very many operations in flight, negative indices, keys."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from simulator.gpu.calls import finding, params, quiet

X = jnp.arange(64 * 8, dtype=jnp.float32).reshape(64, 8)


def kernel(body, out=(8,), scratch=(), **mesh):
    """A kernel with X as its operand, under the simulator."""
    options = {k: mesh.pop(k) for k in list(mesh) if k in ("arch", "schedule", "trace", "uninitialized_memory")}
    made = jax.ShapeDtypeStruct(out, jnp.float32)
    return plgpu.kernel(body, out_type=made, scratch_types=list(scratch), interpret=params(**options), **mesh)


def refusal(body, scratch=(), arch=None):
    """The error of a kernel that is refused, at the line of this file and with advice."""
    with pytest.raises((TypeError, ValueError)) as error:
        jax.make_jaxpr(kernel(body, scratch=scratch, arch=arch))(X)
    text = str(error.value)
    assert "test_gpu.py" in text and "fix:" in text, text
    assert "at:" in text
    return text.splitlines()[0]


# --- arguments --------------------------------------------------------------------------------------------------------
NOT_DTYPES = [None, 3, "zz", (), object(), lambda: 3, [None]]
NOT_SHAPES = [None, 3, 1.5, "zz", object(), (2.5,)]
NOT_ARRAYS = [None, "zz", {"q": 1}, object(), jnp.float32, plgpu.SMEM, plgpu.Layout.WGMMA]


@pytest.mark.parametrize("dtype", [*NOT_DTYPES, np.float32(2), bool])
def test_iota_of_no_dtype(dtype):
    assert "dtype" in refusal(lambda x, o: plgpu.broadcasted_iota(dtype, (8, 8), 0))


@pytest.mark.parametrize("shape", NOT_SHAPES)
def test_iota_of_no_shape(shape):
    assert "shape" in refusal(lambda x, o: plgpu.broadcasted_iota(jnp.int32, shape, 0))


@pytest.mark.parametrize("dimension", [None, "zz", 2, -1, 0.5])
def test_iota_along_no_dimension(dimension):
    assert "dimension" in refusal(lambda x, o: plgpu.broadcasted_iota(jnp.int32, (8, 8), dimension))


@pytest.mark.parametrize("bits", [None, "zz", (), 0, -128, 1.5, True])
def test_swizzle_of_no_size(bits):
    assert "minor_dim_bits" in refusal(lambda x, o: plgpu.find_swizzle(bits))


@pytest.mark.parametrize("meta", [None, 3, "zz", object()])
def test_metadata_that_is_no_array(meta):
    refusal(lambda x, o: plgpu.format_tcgen05_sparse_metadata(meta, jnp.float16))


@pytest.mark.parametrize("dtype", [*NOT_DTYPES, "S1"])
def test_metadata_for_no_dtype(dtype):
    meta = jnp.zeros((128, 32, 2), jnp.uint8)
    with pytest.raises(TypeError, match=r"operand_dtype of plgpu.format_tcgen05"):
        plgpu.format_tcgen05_sparse_metadata(meta, dtype)


@pytest.mark.parametrize("value", NOT_ARRAYS)
def test_functions_of_arrays_take_nothing_else(value):
    tmem = [plgpu.TMEM((128, 64), jnp.float32)]
    assert "takes an array" in refusal(lambda x, o, t: plgpu.async_store_tmem(t, value), tmem, "sm_100a")
    for function in (plgpu.sum, plgpu.max):
        if value is not None and not isinstance(value, dict):  # pytrees of arrays
            assert "takes an array" in refusal(lambda x, o, f=function: f(value))
    if not isinstance(value, dict) and value is not None:
        assert "takes an array" in refusal(lambda x, o: plgpu.layout_cast(value, plgpu.Layout.WGMMA))
    assert "takes an array" in refusal(lambda x, o: plgpu.print_layout("{}", value))


@pytest.mark.parametrize("axis", [1.5, "zz", (0, 0), (0, -2), 2, {"q": 1}, ("c", "c"), object(), [None]])
def test_sums_over_no_axis(axis):
    assert "axis" in refusal(lambda x, o: plgpu.sum(x[...], axis=axis))


def test_sums_that_keep_what():
    assert "keepdims" in refusal(lambda x, o: plgpu.sum(x[...], axis=0, keepdims=x[...]))


@pytest.mark.parametrize("op", [{"q": 1}, [], "zz", 3])
def test_stores_with_no_reduction(op):
    body = lambda x, o, s: plgpu.copy_smem_to_gmem(s, o, reduction_op=op)
    assert "reduction_op" in refusal(body, [plgpu.SMEM((8,), jnp.float32)])


@pytest.mark.parametrize("axes", [{"q": 1}, [[]], "zz"])
def test_loops_along_no_axis(axes):
    refusal(lambda x, o: plgpu.nd_loop((2,), collective_axes=axes)(lambda info: None))


@pytest.mark.parametrize("given", [(None, (4, 4), 2), ("zz", (4, 4), 2), (3, 4, 2), (3, (4, "z"), 2), (3, (4, 4), "z")])
def test_snakes_in_no_plane(given):
    place, shape, width = given
    refusal(lambda x, o: plgpu.planar_snake(place, shape, 0, width))


@pytest.mark.parametrize("names", [3, 1.5, object(), {"q": 1}, "zz"])
def test_results_along_no_axes(names):
    body = lambda x, o, r: plgpu.query_cluster_cancel(r, names)
    refusal(body, [plgpu.TryClusterCancelResult()], "sm_100a")


def test_a_wait_that_takes_what_off():
    body = lambda x, o, sem: plgpu.semaphore_wait(sem, decrement=x[...])
    assert "decrement" in refusal(body, [plgpu.SemaphoreType.REGULAR])


def test_keys_are_not_held_in_buffers():
    key = jax.random.key(0)
    for space in (plgpu.SMEM, plgpu.GMEM):
        with pytest.raises(TypeError, match=r"cannot hold key<fry>[^$]*key_data"):
            space((4,), key.dtype)


# --- sizes that nothing has -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [plgpu.Barrier(num_barriers=10**12), plgpu.SMEM((10**12,), jnp.int8)])
def test_what_does_not_fit_is_found_before_it_is_made(kind):
    finding(lambda: kernel(lambda x, o, s: o.__setitem__(..., x[0]), scratch=[kind])(X), "smem-overflow", "000,000,")


def test_semaphores_without_number():
    with pytest.raises(ValueError, match="at most 1,048,576"):
        plgpu.SemaphoreType.REGULAR((10**9,))
    assert "at most" in refusal(lambda x, o: plgpu.alloc_semaphore((10**9,)))


def test_barriers_are_counted_in_smem():
    call = kernel(lambda x, o, b: o.__setitem__(..., x[0]), scratch=[plgpu.Barrier(num_barriers=2000)])
    quiet(lambda: call(X))
    assert pl.last_report().smem_bytes == 2000 * 8


# --- indices below zero -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [-1, -64, 64, -65, -(2**31), 2**31 - 1])
def test_an_index_that_leaves_its_ref(index):
    """A GPU has no indices from the end: x_ref[i - 1] at i = 0 is another array's memory."""

    def load(x, i, o):
        o[...] = x[i[0]]

    def store(x, i, o):
        o[i[0], pl.ds(0, 1)] = x[0, pl.ds(0, 1)]

    call = lambda body, out: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(out, X.dtype), interpret=params())
    finding(lambda: call(load, (8,))(X, jnp.asarray([index], jnp.int32)), "out-of-bounds", f"index {index} ")
    finding(lambda: call(store, (4, 8))(X, jnp.asarray([index], jnp.int32)), "out-of-bounds", f"index {index} ")


@pytest.mark.parametrize("rows", [[0, -1, 64, 2], [-1, -2, -64, -65], [5, 5, 5, 63]])
def test_rows_that_are_gathered_from_outside_are_zeros(rows):
    def body(x, i, o, s, bar):
        plgpu.copy_gmem_to_smem(x.at[plgpu.load(i, layout=plgpu.Layout.TMA_INDICES)], s, bar)
        plgpu.barrier_wait(bar)
        o[...] = s[...]

    call = kernel(body, (4, 8), [plgpu.SMEM((4, 8), jnp.float32), plgpu.Barrier()])
    expected = np.stack([X[r] if 0 <= r < 64 else np.zeros(8) for r in rows])
    np.testing.assert_array_equal(quiet(lambda: call(X, jnp.asarray(rows, jnp.int32))), expected)


# --- very many operations ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_stores_whose_end_is_awaited_once(schedule):
    """Each waits until its buffer is read, and nobody until it is written: the usual way out of a persistent kernel."""
    n = 9000

    def body(x, o, s):
        @pl.loop(0, n)
        def _(i):
            s[...] = x[i % 64]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, o.at[i])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.wait_smem_to_gmem(0)

    call = kernel(body, (n, 8), [plgpu.SMEM((8,), jnp.float32)], schedule=schedule)
    start = time.process_time()
    got = quiet(lambda: call(X))
    assert time.process_time() - start < 20
    np.testing.assert_array_equal(got, np.asarray(X)[np.arange(n) % 64])


@pytest.mark.parametrize("grouped", [False, True])
def test_stores_that_are_not_waited_for(grouped):
    n = 3000

    def body(x, o, again, s):
        s[...] = x[1]
        plgpu.commit_smem()

        @pl.loop(0, n)
        def _(i):
            plgpu.copy_smem_to_gmem(s, o.at[i], commit_group=not grouped)

        if grouped:
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)
        again[...] = o[n - 1] + o[0]  # known to be written, and s to be read
        s[...] = x[2]

    out = [jax.ShapeDtypeStruct((n, 8), X.dtype), jax.ShapeDtypeStruct((8,), X.dtype)]
    call = plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SMEM((8,), X.dtype)], interpret=params())
    np.testing.assert_array_equal(quiet(lambda: call(X))[1], 2 * np.asarray(X[1]))


def test_of_many_stores_one_that_is_not_waited_for_is_found():
    n = 2000

    def body(x, o, s):
        @pl.loop(0, n)
        def _(i):
            s[...] = x[i % 64]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, o.at[i])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        o[n - 1] = o[n - 1] + 1  # the last store may be under way
        plgpu.wait_smem_to_gmem(0)

    finding(lambda: kernel(body, (n, 8), [plgpu.SMEM((8,), jnp.float32)])(X), "missing-wait")


def test_loads_on_one_barrier():
    n = 1500

    def body(x, o, s, bar):
        @pl.loop(0, n)
        def _(i):
            plgpu.copy_gmem_to_smem(x.at[i % 64], s.at[i], bar)

        plgpu.barrier_wait(bar)
        o[...] = s[n - 1] + s[0]

    call = kernel(body, (8,), [plgpu.SMEM((n, 8), jnp.float32), plgpu.Barrier(num_arrivals=n)])
    np.testing.assert_array_equal(quiet(lambda: call(X)), np.asarray(X[(n - 1) % 64] + X[0]))


# --- from everywhere at once ------------------------------------------------------------------------------------------
def twice(x, o, s, bar):
    plgpu.copy_gmem_to_smem(x.at[0], s, bar)
    plgpu.barrier_wait(bar)
    o[...] = s[...] * 2


TWICE = kernel(twice, (8,), [plgpu.SMEM((8,), jnp.float32), plgpu.Barrier()])


def test_python_threads_that_call_at_once():
    wrong = []

    def work(k):
        for _ in range(8):
            try:
                np.testing.assert_array_equal(TWICE(X + k), 2 * np.asarray(X[0] + k))
                assert pl.last_report().findings == ()
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_interrupt_leaves_the_simulator_usable(monkeypatch):
    """It comes while threads wait for each other."""
    from palladion.simulator.gpu import barriers

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(barriers, "wait_on", interrupted)
        body = lambda x, o, s, b: twice(x, o, s, b)
        with pytest.raises(KeyboardInterrupt):
            kernel(body, (8,), [plgpu.SMEM((8,), jnp.float32), plgpu.Barrier()])(X)
    np.testing.assert_array_equal(TWICE(X), 2 * np.asarray(X[0]))


@pytest.mark.parametrize("n", [2, 4])
def test_a_mistake_on_one_device(n):
    """The others end, too, and the next call is right."""

    def one(x, o):
        me = lax.axis_index("x")
        pl.when(me == 1)(lambda: o.__setitem__(me + 77, x[0]))
        o[0] = x[0]

    def right(x, o):
        o[...] = x[...] * 2

    mesh = jax.make_mesh((n,), ("x",), devices=jax.devices()[:n])
    spec = jax.sharding.PartitionSpec("x")
    x = jax.device_put(X, jax.NamedSharding(mesh, spec))

    def over(body):
        call = lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=params())(x)
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    with pytest.raises(jax.errors.JaxRuntimeError, match="device 1"):
        jax.block_until_ready(over(one)(x))
    np.testing.assert_array_equal(over(right)(x), 2 * np.asarray(X))


def test_same_seed_same_order():
    def body(x, o):
        o[0] = o[0] * 3 + lax.axis_index("g")

    def run(seed):
        made = jax.ShapeDtypeStruct((1,), jnp.float32)
        how = plgpu.InterpretGPUParams(schedule=seed, uninitialized_memory="zero")
        return float(plgpu.kernel(body, out_type=made, grid=(6,), grid_names=("g",), interpret=how)(X)[0])

    first = [run(seed) for seed in range(4)]
    assert first == [run(seed) for seed in range(4)]
    assert len(set(first)) > 1


def test_the_same_finding_twice():
    def body(x, o):
        o[...] = x[0] * lax.axis_index("t")

    said = []
    for _ in range(2):
        with pytest.raises(KernelFinding) as error:
            kernel(body, num_threads=4, thread_name="t", schedule=5)(X)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("schedule", ["lazy", "eager", 1])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_read_among_updates(schedule, ordered):
    """The reader's own update is the last; those of others before it are not known to have happened."""

    def body(x, o, sem):
        block = lax.axis_index("g")
        plgpu.atomic_add(o.at[0], x[0])

        @pl.when(block == 0)
        def _():
            if ordered:
                pl.semaphore_signal(sem)

        @pl.when(block == 1)
        def _():
            if ordered:
                pl.semaphore_wait(sem)
            o[1] = o[0]

    how = params(schedule=schedule, uninitialized_memory="zero", uninitialized_reads="allow")
    made = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    call = plgpu.kernel(
        body, out_type=made, scratch_types=[plgpu.SemaphoreType.REGULAR], grid=(2,), grid_names=("g",), interpret=how
    )
    if ordered:
        np.testing.assert_array_equal(quiet(lambda: call(X))[1], 2 * np.asarray(X[0]))
    else:
        finding(lambda: call(X), "race")
