"""Notes on what costs time in kernels for GPUs: each has a kernel that gets it, and a twin that does not.

No kernel is run here.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from report.looking import found, look

f16, f32 = jnp.float16, jnp.float32


def notes(call, *operands):
    """The messages of the notes."""
    result = found(look(call, *operands), "performance")
    assert all(note.level == "note" and "test_gpu_advice.py:" in note.where for note in result)
    return [note.message for note in result]


def tiled(shape, dtype=f16, swizzle=128):
    transforms = (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def matmul(
    *, grid=(2, 2), names=("m", "n"), rows=None, k=256, buffers=3, swizzle=128, wait=None, straight=False, commit=False,
    by_hand=False, thread_buffers=False,
):  # fmt: skip
    """A product with tiles of 64 x 64; `rows` gives the row of tiles from the named indices."""
    m_tiles = 1
    for name, size in zip(names, grid):
        m_tiles *= 1 if name == "n" else size
    n_tiles = dict(zip(names, grid))["n"]

    def kernel(a, b, o, a_smem, b_smem, o_smem, loaded):
        index = {name: lax.axis_index(name) for name in names}
        mi = index["m"] if rows is None else rows(index)
        here = pl.ds(mi * 64, 64), pl.ds(index["n"] * 64, 64)

        def compute(acc):
            @pl.loop(0, k // 64)
            def _(ki):
                slot = 0 if thread_buffers else lax.rem(ki, buffers)
                part = pl.ds(ki * 64, 64)
                plgpu.copy_gmem_to_smem(a.at[here[0], part], a_smem.at[slot], loaded)
                plgpu.copy_gmem_to_smem(b.at[part, here[1]], b_smem.at[slot], loaded)
                plgpu.barrier_wait(loaded)
                if by_hand:
                    o_smem[...] = o_smem[...] + 1.0
                if commit:
                    plgpu.commit_smem()
                plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                if wait is not None:
                    plgpu.wgmma_wait(wait)

            return acc[...]

        result = pl.run_scoped(compute, plgpu.ACC((64, 64), f32))
        if straight:
            o[here] = result
        else:
            o_smem[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o.at[here])
            plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m_tiles * 64, n_tiles * 64), f32),
        grid=grid,
        grid_names=names,
        scratch_types=dict(
            a_smem=tiled((buffers, 64, 64), swizzle=swizzle),
            b_smem=tiled((buffers, 64, 64)),
            o_smem=tiled((64, 64), f32),
            loaded=plgpu.Barrier(num_arrivals=2),
        ),
    )
    shapes = jax.ShapeDtypeStruct((m_tiles * 64, k), f16), jax.ShapeDtypeStruct((k, n_tiles * 64), f16)
    return lambda: jax.eval_shape(call, *shapes)


def test_a_good_kernel_gets_no_note():
    assert notes(matmul()) == []


def test_a_swizzle_that_could_be_wider():
    (note,) = notes(matmul(swizzle=64))
    assert note.startswith("a_smem has a swizzle of 64 bytes, and its rows of 128 bytes allow 128")
    assert "TilingTransform((8, 64))" in note


def test_a_narrow_swizzle_of_narrow_rows():
    def kernel(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, o)
        plgpu.wait_smem_to_gmem(0)

    def call(columns):
        shape = jax.ShapeDtypeStruct((64, columns), f16)
        scratch = [tiled((64, columns), swizzle=64), plgpu.Barrier()]
        run = plgpu.kernel(kernel, out_type=shape, scratch_types=scratch)
        return lambda: jax.eval_shape(run, shape)

    assert notes(call(32)) == []
    assert len(notes(call(64))) == 1


def test_a_result_stored_straight_to_gmem():
    (note,) = notes(matmul(straight=True))
    assert note.startswith("o is written straight from the tensor core's layout (Layout.WGMMA)")


def test_a_row_stored_straight_to_gmem_is_well():
    def kernel(x, o):
        o[...] = x[...] * 2

    x = jnp.ones((64, 64))
    assert notes(plgpu.kernel(kernel, out_type=x), x) == []


WIDE = 512  # columns of tiles: more than there are SMs
DEEP = 1024  # 512 * 64 columns of float16: 64 MiB, more than the L2 cache of an H100


def test_rows_of_a_grid_that_share_nothing():
    (note,) = notes(matmul(grid=(4, WIDE), k=DEEP))
    assert note.startswith("The blocks of each row of the grid read all of b (64.0 MiB") and "one piece of a" in note


def test_a_grid_in_tiles_shares():
    tiles = dict(grid=(2, WIDE, 2), names=("m", "n", "mt"), rows=lambda index: index["m"] * 2 + index["mt"])
    assert notes(matmul(**tiles, k=DEEP)) == []


@pytest.mark.parametrize("case", [dict(grid=(4, WIDE), k=256), dict(grid=(4, 64), k=8 * DEEP)])
def test_an_operand_that_the_cache_holds_or_few_columns(case):
    assert notes(matmul(**case)) == []


def test_a_commit_in_a_loop_that_touches_nothing():
    (note,) = notes(matmul(commit=True))
    assert note.startswith("commit_smem in a loop that neither reads nor writes memory by hand")
    assert notes(matmul(commit=True, by_hand=True)) == []


def test_waiting_for_each_product():
    (note,) = notes(matmul(wait=0))
    assert note.startswith("wgmma_wait(0) after each wgmma of a loop")
    assert notes(matmul(wait=1)) == []
    assert notes(matmul(wait=0, buffers=2)) == []  # the next copy needs this buffer
    assert notes(matmul(wait=0, thread_buffers=True)) == []  # one buffer of three, always the same


def blackwell(m=128, n=128, straight=False):
    def kernel(a, b, o, a_smem, b_smem, o_smem, acc, loaded, done):
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
        plgpu.barrier_wait(done)
        result = plgpu.async_load_tmem(acc)
        if straight:
            o[...] = result
        else:
            o_smem[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o)
            plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), f32),
        scratch_types=dict(
            a_smem=tiled((m, 64)), b_smem=tiled((64, n)), o_smem=tiled((m, n), f32), acc=plgpu.TMEM((m, n), f32),
            loaded=plgpu.Barrier(num_arrivals=2), done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )  # fmt: skip
    return lambda: jax.eval_shape(call, jax.ShapeDtypeStruct((m, 64), f16), jax.ShapeDtypeStruct((64, n), f16))


def test_small_products_on_blackwell():
    assert notes(blackwell()) == []
    (rows,) = notes(blackwell(m=64))
    assert rows.startswith("tcgen05_mma with M = 64 is much slower")
    (columns,) = notes(blackwell(n=64))
    assert columns.startswith("tcgen05_mma with N = 64")


def test_a_result_of_tensor_memory_stored_straight_to_gmem():
    (note,) = notes(blackwell(straight=True))
    assert "Layout.TCGEN05" in note


def test_two_blocks_products_may_be_small():
    def kernel(o, a_smem, b_smem, acc, done):
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False, collective_axis="x")

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128, 64), f32),
        cluster=(2,),
        cluster_names=("x",),
        scratch_types=dict(
            a_smem=tiled((64, 64)),
            b_smem=tiled((64, 32), swizzle=64),
            acc=plgpu.TMEM((64, 64), f32, collective=True),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    assert notes(lambda: jax.eval_shape(call)) == []
