"""Short blocks that are joined to long rows, blocks over the edge, and the ends of rows of narrow elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())


def silu(x_ref, y_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = jnp.where(x > 0, jax.nn.silu(x) + y_ref[...] * 2, x.astype(jnp.int32).astype(x.dtype))


def call(kernel, shape, block, swap=False, more=(), **how):
    grid = tuple(n // b for n, b in zip(shape, block))
    at = (lambda j, i: (i, j)) if swap else (lambda i, j: (i, j))
    spec = pl.BlockSpec(block, at)
    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(shape, jnp.float32), grid=grid[::-1] if swap else grid, in_specs=[spec] * 2,
        out_specs=spec, scratch_shapes=more, **how,
    )  # fmt: skip


def operands(shape):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))


def loops(f, *args):
    return pl.compile(f, *args).text("nests")


@pytest.mark.parametrize(
    ("shape", "block"), [((1024, 2048), (64, 128)), ((96, 1536), (8, 64)), ((512, 28 * 36), (4, 28))]
)
@pytest.mark.parametrize("swap", [False, True])
def test_short_rows_are_joined(shape, block, swap):
    args = operands(shape)
    native = call(silu, shape, block, swap, **NATIVE)
    np.testing.assert_allclose(native(*args), call(silu, shape, block, swap, interpret=True)(*args), atol=1e-5)
    assert f"< {block[1]}:" not in loops(native, *args)


def test_in_place():
    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    x, y = operands((1024, 2048))
    native = call(add, (1024, 2048), (64, 128), input_output_aliases={0: 0}, **NATIVE)
    want = np.asarray(x) + np.asarray(y)
    np.testing.assert_array_equal(jax.jit(native, donate_argnums=0)(x, y), want)


def with_id(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...] * pl.program_id(1).astype(jnp.float32)


def with_iota(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...] * jax.lax.broadcasted_iota(jnp.float32, x_ref.shape, 1)


def with_sum(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...].sum(axis=1, keepdims=True)


def with_column(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[:, 0:1]


def with_scratch(x_ref, y_ref, o_ref, tmp):
    tmp[...] = x_ref[...]
    o_ref[...] = tmp[...] + y_ref[...]


@pytest.mark.parametrize("kernel", [with_id, with_iota, with_sum, with_column, with_scratch])
def test_what_depends_on_the_block_is_left_alone(kernel):
    shape, block = (1024, 2048), (64, 128)
    more = [pltpu.VMEM(block, jnp.float32)] if kernel is with_scratch else ()
    args = operands(shape)
    got = call(kernel, shape, block, more=more, **NATIVE)(*args)
    np.testing.assert_allclose(got, call(kernel, shape, block, more=more, interpret=True)(*args), atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "uint16"])
def test_the_end_of_a_row_does_not_touch_the_next_one(dtype):
    """Rows that lie side by side, each written by a program of its own, of every length up to a few vectors."""

    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...].astype(jnp.float32) + 1).astype(o_ref.dtype)

    for columns in (*range(1, 36), 47, 49, 63, 65):
        x = jnp.asarray(np.arange(3 * columns).reshape(3, columns) % 7, dtype)
        row = pl.BlockSpec((1, columns), lambda i: (i, 0))
        out = pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(3,), in_specs=[row], out_specs=row,
            input_output_aliases={0: 0}, **NATIVE,
        )(x)  # fmt: skip
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(x, np.float32) + 1, f"{columns} columns")


@pytest.mark.parametrize("n", [1, 7, 16, 100, 127, 130])
@pytest.mark.parametrize("block", [(16, 32), (1, 128), (33, 5)])
def test_blocks_over_the_edge_are_copied_by_whole_loops(n, block):
    """In each dimension a block is whole or the last one: the copies are loops of fixed sizes, which run in vectors."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jnp.sum(jnp.where(jnp.isnan(x_ref[...]), 0, 1)).astype(jnp.float32)

    x = jnp.asarray(np.random.default_rng(n).standard_normal((n, n + 3)), jnp.float32)
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    grid = tuple(-(-size // b) for size, b in zip(x.shape, block))
    ragged = lambda **how: pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=grid, in_specs=[spec], out_specs=spec, **how
    )(x)
    np.testing.assert_allclose(ragged(**NATIVE), ragged(interpret=True), rtol=1e-6)
