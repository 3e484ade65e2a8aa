"""Kernels that move data, compiled and run on the emulator: loads, stores, scopes, copies, atomics, clusters."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)
f16, f32, i32 = jnp.float16, jnp.float32, jnp.int32
X = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


def tiles(columns, width):
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(width)


def run(body, out, *args, arch: Any = "sm_90a", **options: Any):
    """The result of a kernel on the emulator."""
    mode = plgpu.EmulateParams(arch=arch)
    return np.asarray(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(*out), interpret=mode, **options)(*args))


def test_blocks_have_parts():
    def body(x_ref, y_ref):
        part = pl.ds(lax.axis_index("x") * 32, 32)
        y_ref[part] = x_ref[part] + 1

    np.testing.assert_array_equal(run(body, ((64, 64), f32), X, grid=(2,), grid_names=("x",)), X + 1)


def test_through_a_swizzled_buffer():
    def body(x_ref, y_ref, s):
        s[...] = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA)
        y_ref[...] = s[...]
        y_ref[pl.ds(8, 8), 3] = s[pl.ds(0, 8), 5]

    expected = X.copy()
    expected[8:16, 3] = X[:8, 5]
    scratch = dict(s=plgpu.SMEM((64, 64), f32, transforms=tiles(32, 128)))
    np.testing.assert_array_equal(run(body, ((64, 64), f32), X, scratch_types=scratch), expected)


@pytest.mark.parametrize("start", [0, 13, 48])
def test_a_run_time_start_within_tiles(start):
    def body(x_ref, i_ref, y_ref, s):
        s[...] = x_ref[...]
        y_ref[...] = s[pl.ds(i_ref[0], 16), :]

    scratch = dict(s=plgpu.SMEM((64, 64), f32, transforms=tiles(32, 128)))
    out = run(body, ((16, 64), f32), X, jnp.array([start]), scratch_types=scratch)
    np.testing.assert_array_equal(out, X[start : start + 16])


def test_rows_by_an_index_array():
    rows = np.array([5, 3, 60, 3] * 8, np.int32)

    def body(x_ref, i_ref, y_ref):
        y_ref[...] = x_ref[i_ref[...]]

    np.testing.assert_array_equal(run(body, ((32, 64), f32), X, rows), X[rows])


def test_overlapping_parts_and_a_transpose():
    """What one CUDA thread stores another one reads, and overwrites what others have read."""

    def body(x_ref, y_ref, s):
        s[...] = x_ref[...]
        s[pl.ds(3, 4)] = s[pl.ds(8, 4)]
        y_ref[...] = s[...].T

    expected = X.copy()
    expected[3:7] = X[8:12]
    scratch = dict(s=plgpu.SMEM((64, 64), f32))
    np.testing.assert_array_equal(run(body, ((64, 64), f32), X, scratch_types=scratch), expected.T)


def test_transposed_views():
    def body(x_ref, y_ref, s):
        s[...] = x_ref[...]
        y_ref[...] = plgpu.transpose_ref(s, (1, 0))[...]

    scratch = dict(s=plgpu.SMEM((64, 64), f32, transforms=tiles(32, 128)))
    np.testing.assert_array_equal(run(body, ((64, 64), f32), X, scratch_types=scratch), X.T)


def test_slots_in_a_loop():
    def body(x_ref, y_ref, s):
        @pl.loop(0, 8)
        def _(i):
            s[i % 2] = x_ref[i] * 2
            y_ref[i] = s[i % 2] + 1

    out = run(body, ((8, 64), f32), X[:8], scratch_types=dict(s=plgpu.SMEM((2, 64), f32)))
    np.testing.assert_array_equal(out, X[:8] * 2 + 1)


def test_scopes_one_after_the_other():
    def body(x_ref, y_ref):
        def first(s):
            s[...] = x_ref[...]
            return s[pl.ds(32, 32)]

        upper = pl.run_scoped(first, plgpu.SMEM((64, 64), f32))

        def second(s):
            s[...] = upper + 1
            y_ref[...] = s[...]

        pl.run_scoped(second, plgpu.SMEM((32, 64), f32, transforms=tiles(32, 128)))

    np.testing.assert_array_equal(run(body, ((32, 64), f32), X), X[32:] + 1)


def test_two_threads_meet_at_barriers():
    def body(x_ref, y_ref, s, full, empty):
        thread = lax.axis_index("thread")

        @pl.when(thread == 0)
        def _():
            @pl.loop(0, 4)
            def _(i):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(empty))
                s[...] = x_ref[pl.ds(16 * i, 16)] + 1
                plgpu.barrier_arrive(full)

            plgpu.barrier_wait(empty)

        @pl.when(thread == 1)
        def _():
            @pl.loop(0, 4)
            def _(i):
                plgpu.barrier_wait(full)
                y_ref[pl.ds(16 * i, 16)] = s[...] * 2
                plgpu.barrier_arrive(empty)

    scratch = dict(s=plgpu.SMEM((16, 64), f32), full=plgpu.Barrier(), empty=plgpu.Barrier())
    out = run(body, ((64, 64), f32), X, num_threads=2, thread_name="thread", scratch_types=scratch)
    np.testing.assert_array_equal(out, (X + 1) * 2)


def test_a_barrier_is_tested():
    def body(y_ref, barrier):
        before = plgpu.barrier_test(barrier)
        plgpu.barrier_arrive(barrier)
        after = plgpu.barrier_test(barrier)
        plgpu.barrier_wait(barrier)
        y_ref[0] = before.astype(i32)
        y_ref[1] = after.astype(i32)

    out = run(body, ((2,), i32), scratch_types=dict(barrier=plgpu.Barrier()))
    np.testing.assert_array_equal(out, [0, 1])


def test_single_warps():
    def body(y_ref, s):
        @plgpu.warp_map
        def _(warp):
            s[warp] = warp * 3

        y_ref[...] = s[...]

    out = run(body, ((4,), i32), scratch_types=dict(s=plgpu.SMEM((4,), i32)))
    np.testing.assert_array_equal(out, np.arange(4) * 3)


def test_atomic_updates():
    def body(x_ref, y_ref):
        y_ref[...] = jnp.zeros_like(y_ref)
        plgpu.atomic_add(y_ref, x_ref[...])
        plgpu.atomic_add(y_ref.at[pl.ds(0, 32)], x_ref[pl.ds(32, 32)])

    for x in (X, (X % 100).astype(np.float16)):
        expected = x.copy()
        expected[:32] += x[32:]
        np.testing.assert_array_equal(run(body, ((64, 64), x.dtype), x), expected)


def test_semaphores_between_blocks():
    def body(y_ref, s):
        block = lax.axis_index("x")

        @pl.when(block == 0)
        def _():
            y_ref[...] = jnp.ones_like(y_ref)
            pl.semaphore_signal(s.at[1], 3)

        @pl.when(block == 1)
        def _():
            pl.semaphore_wait(s.at[1], 2)
            y_ref[...] = y_ref[...] + pl.semaphore_read(s.at[1]).astype(f32)

    scratch = dict(s=plgpu.SemaphoreType.REGULAR((2,)))
    out = run(body, ((128,), f32), grid=(2,), grid_names=("x",), scratch_types=scratch)
    np.testing.assert_array_equal(out, np.full(128, 2.0))


# --- copies -----------------------------------------------------------------------------------------------------------
def test_a_copy_there_and_back():
    def body(x_ref, y_ref, s, out, loaded):
        rows = pl.ds(lax.axis_index("m") * 64, 64)
        for k in range(2):
            plgpu.copy_gmem_to_smem(x_ref.at[rows, pl.ds(k * 64, 64)], s.at[k], loaded.at[k])
        for k in range(2):
            plgpu.barrier_wait(loaded.at[k])
            out[:, k * 64 : k * 64 + 64] = s[k]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, y_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    x = (np.arange(128 * 128).reshape(128, 128) % 1000).astype(np.float16)
    scratch = dict(
        s=plgpu.SMEM((2, 64, 64), f16, transforms=tiles(64, 128)),
        out=plgpu.SMEM((64, 128), f16, transforms=tiles(64, 128)),
        loaded=plgpu.Barrier(num_barriers=2),
    )
    out = run(body, ((128, 128), f16), x, grid=(2,), grid_names=("m",), scratch_types=scratch)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("columns", [7, 8])
def test_copies_that_reach_outside(columns):
    """Rows of 7 floats are no multiple of 16 bytes: the threads copy them."""
    x = np.arange(50 * columns, dtype=np.float32).reshape(50, columns)

    def body(x_ref, y_ref, s, loaded):
        block = lax.axis_index("x")
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(block * 40, 16)], s, loaded)
        plgpu.barrier_wait(loaded)
        s[...] = s[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    expected = np.zeros((2, 16, columns), np.float32)
    expected[0], expected[1, :10] = x[:16] * 2, x[40:] * 2
    scratch = dict(s=plgpu.SMEM((16, columns), f32), loaded=plgpu.Barrier())
    out = run(body, ((2, 16, columns), f32), x, grid=(2,), grid_names=("x",), scratch_types=scratch)
    np.testing.assert_array_equal(out, expected)


def test_copies_without_a_barrier():
    def body(x_ref, y_ref, s):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(16, 32)], s)
        plgpu.wait_gmem_to_smem(0)
        y_ref[...] = s[...]

    scratch = dict(s=plgpu.SMEM((32, 64), f32, transforms=tiles(32, 128)))
    np.testing.assert_array_equal(run(body, ((32, 64), f32), X, scratch_types=scratch), X[16:48])


@pytest.mark.parametrize("count", [32, 6])
def test_rows_are_gathered(count):
    """By four, or, where their number is no multiple of it, through registers; row 64 does not exist."""
    rows = np.array([5, 3, 64, 63] * 8, np.int32)[:count]
    x = (X % 500).astype(np.float16)

    def body(x_ref, i_ref, y_ref, s, loaded):
        plgpu.copy_gmem_to_smem(x_ref.at[i_ref[...]], s, loaded)
        plgpu.barrier_wait(loaded)
        y_ref[...] = s[...]

    transforms = tiles(64, 128) if count == 32 else ()
    scratch = dict(s=plgpu.SMEM((count, 64), f16, transforms=transforms), loaded=plgpu.Barrier())
    out = run(body, ((count, 64), f16), x, rows, arch="sm_100a", scratch_types=scratch)
    np.testing.assert_array_equal(out, np.concatenate([x, np.zeros((1, 64))])[rows])
    with pytest.raises(NotImplementedError, match="gathers rows of x_ref"):
        run(body, ((count, 64), f16), x, rows, arch="sm_90a", scratch_types=scratch)


def test_windows_of_images():
    images = np.arange(2 * 6 * 5 * 8, dtype=np.float32).reshape(2, 6, 5, 8)

    def body(x_ref, y_ref, s, loaded):
        windows = plgpu.im2col_ref(x_ref, window_shape=(3, 3), padding=((1, 1), (1, 1)))
        plgpu.copy_gmem_to_smem(windows.at[pl.ds(10, 32), 0, 2, pl.ds(0, 8)], s, loaded)
        plgpu.barrier_wait(loaded)
        y_ref[...] = s[...]

    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = padded[:, 0:6, 2:7].reshape(60, 8)[10:42]
    scratch = dict(s=plgpu.SMEM((32, 8), f32), loaded=plgpu.Barrier())
    np.testing.assert_array_equal(run(body, ((32, 8), f32), images, scratch_types=scratch), expected)


@pytest.mark.parametrize(("op", "dtype"), [("add", f32), ("max", i32), ("max", f32), ("add", jnp.int8)])
def test_stores_that_combine(op, dtype):
    x = np.asarray(jnp.asarray(X % 50 - 20, dtype))

    def body(x_ref, y_ref, s):
        y_ref[...] = jnp.ones_like(y_ref)
        s[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y_ref, reduction_op=op)
        plgpu.wait_smem_to_gmem(0)

    expected = x + np.asarray(1, x.dtype) if op == "add" else np.maximum(x, 1)
    out = run(body, ((64, 64), dtype), x, scratch_types=dict(s=plgpu.SMEM((64, 64), dtype)))
    np.testing.assert_array_equal(out, expected)


# --- clusters ---------------------------------------------------------------------------------------------------------
CLUSTER: dict[str, Any] = dict(cluster=(2,), cluster_names=("cluster",))


def test_a_copy_to_both_blocks():
    def body(x_ref, y_ref, s, loaded, done):
        plgpu.copy_gmem_to_smem(x_ref, s, loaded, collective_axes="cluster")
        plgpu.barrier_wait(loaded)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        me = lax.axis_index("cluster")
        y_ref[me] = plgpu.cluster_ref(s, {"cluster": 1 - me})[...]

    scratch = dict(
        s=plgpu.SMEM((64, 64), f32, transforms=tiles(32, 128)),
        loaded=plgpu.Barrier(),
        done=plgpu.ClusterBarrier(collective_axes=("cluster",)),
    )
    out = run(body, ((2, 64, 64), f32), X, scratch_types=scratch, **CLUSTER)
    np.testing.assert_array_equal(out, np.stack([X, X]))


@pytest.mark.parametrize("atomic", [None, "add"])
def test_stores_to_the_other_block(atomic):
    def body(x_ref, y_ref, s, ready, arrived):
        me = lax.axis_index("cluster")
        s[...] = jnp.ones_like(s)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        plgpu.async_store_smem(x_ref[me], s, arrived, cluster_idx=1 - me, cluster_dim="cluster", atomic=atomic)
        plgpu.barrier_wait(arrived)
        y_ref[me] = s[...]

    x = X[:2]
    scratch = dict(
        s=plgpu.SMEM((64,), f32),
        ready=plgpu.ClusterBarrier(collective_axes=("cluster",)),
        arrived=plgpu.Barrier(),
    )
    out = run(body, ((2, 64), f32), x, scratch_types=scratch, **CLUSTER)
    np.testing.assert_array_equal(out, x[::-1] + (1 if atomic else 0))


def test_only_the_leader_is_told():
    def body(x_ref, y_ref, s, loaded, done):
        me = lax.axis_index("cluster")
        plgpu.copy_gmem_to_smem(
            x_ref, s, loaded, collective_axes="cluster", leader_tracked=plgpu.CopyPartition.PARTITIONED(0)
        )
        pl.when(me == 0)(lambda: plgpu.barrier_wait(loaded))
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        y_ref[pl.ds(me * 32, 32)] = s[...]

    scratch = dict(
        s=plgpu.SMEM((32, 64), f32, transforms=tiles(32, 128)),
        loaded=plgpu.Barrier(),
        done=plgpu.ClusterBarrier(collective_axes=("cluster",)),
    )
    out = run(body, ((64, 64), f32), X, arch="sm_100a", scratch_types=scratch, **CLUSTER)
    np.testing.assert_array_equal(out, X)


def test_work_is_taken_over():
    def body(y_ref, result, barrier):
        block = lax.axis_index("m")
        y_ref[block] = block + 1
        plgpu.try_cluster_cancel(result, barrier)
        plgpu.barrier_wait(barrier)
        (other,), taken = plgpu.query_cluster_cancel(result, ("m",))

        @pl.when(taken)
        def _():
            y_ref[other] = other + 1

    scratch = dict(result=plgpu.TryClusterCancelResult(), barrier=plgpu.Barrier())
    out = run(body, ((8,), i32), arch="sm_100a", grid=(8,), grid_names=("m",), scratch_types=scratch)
    np.testing.assert_array_equal(out, np.arange(8) + 1)


def test_what_a_copy_has_written_is_read():
    def body(x_ref, y_ref, s):
        for i in range(2):
            s[...] = x_ref[pl.ds(0, 32)] + i if i == 0 else y_ref[pl.ds(0, 32)] * 3
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, y_ref.at[pl.ds(32 * i, 32)])
            plgpu.wait_smem_to_gmem(0)

    out = run(body, ((64, 64), f32), X, scratch_types=dict(s=plgpu.SMEM((32, 64), f32)))
    np.testing.assert_array_equal(out, np.concatenate([X[:32], X[:32] * 3]))
