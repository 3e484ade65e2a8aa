"""The fuser computes what the unfused program computes: every operation, ragged blocks, run-time block choices.

`copied` is a kernel that copies its one operand block by block, so that what is tested is the fusion around it; each
test compares with the same function run by jax.numpy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import fuser
from palladion import tpu as pltpu

RNG = np.random.default_rng(7)


def arr(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def block_of(block, rank):
    return pl.BlockSpec(block, lambda *ids_and_scalars: ids_and_scalars[:rank])


def copy_kernel(x_fusion, out_fusion, *, block):
    """Copy an array of any rank in blocks, on a grid that covers it."""
    rank, kind = len(x_fusion.shape), jax.ShapeDtypeStruct(x_fusion.shape, x_fusion.dtype)
    grid = tuple(pl.cdiv(n, 1 if b is None else b) for n, b in zip(x_fusion.shape, block, strict=True))
    out_fusion = out_fusion or (lambda x: x)
    x_fn, x_values, x_scalars = fuser.get_fusion_values(x_fusion)
    z_fn, z_values, z_scalars = fuser.get_fusion_values(out_fusion, kind)
    spec = block_of(block, rank)
    handler = fuser.make_scalar_prefetch_handler
    options = dict(grid_len=rank)
    x_kernel, (x_specs,), _ = fuser.pull_block_spec(x_fn, spec, scalar_prefetch_handler=handler(0), **options)(x_values)
    z_kernel, z_specs, _, out_type, out_specs = fuser.push_pull_block_spec(
        z_fn, spec, scalar_prefetch_handler=handler(1), **options
    )(z_values, kind)

    def kernel(x_scalars, z_scalars, x_refs, z_refs, *o_refs):
        ids, scalars = tuple(pl.program_id(d) for d in range(rank)), (x_scalars, z_scalars)
        x, z = jax.tree.map(lambda ref: ref[...], (x_refs, z_refs))
        outs = z_kernel(ids, scalars, z, x_kernel(ids, scalars, x))
        for o_ref, out in zip(o_refs, jax.tree.leaves(outs), strict=True):
            o_ref[...] = out

    grid_spec = pltpu.PrefetchScalarGridSpec(2, grid, [x_specs, z_specs], out_specs)
    call = pl.pallas_call(kernel, out_type, grid_spec=grid_spec, interpret=True)
    return call(x_scalars, z_scalars, x_values, z_values)


def copied(block):
    return fuser.fusible(functools.partial(copy_kernel, block=block))


def agrees(got, want, tolerance=1e-6):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), tolerance, tolerance)


def check_input(f, args, block, tolerance=1e-6):
    """`f` fused into the input of the copy."""
    agrees(jax.jit(fuser.fuse(lambda *args: copied(block)(f(*args))))(*args), jax.jit(f)(*args), tolerance)


def check_output(f, x, args, block, tolerance=1e-6):
    """`f` fused into the output of the copy of `x`."""
    agrees(jax.jit(fuser.fuse(lambda x, *args: f(copied(block)(x), *args)))(x, *args), jax.jit(f)(x, *args), tolerance)


X, Y, ROW, COLUMN, SQUARE = arr(64, 256), arr(64, 256), arr(256), arr(64, 1), arr(64, 64)
W, SMALL, BITS = arr(4, 64, 256), arr(6, 8, 16), jnp.asarray(RNG.integers(0, 99, (64, 256)), jnp.int32)

INPUTS = {
    "arithmetic": (lambda x, y: x * y + 2 * x - y / 3, (X, Y)),
    "functions": (lambda x: jnp.exp(jnp.sin(x)) + jnp.tanh(x) ** 3 + jnp.sqrt(jnp.abs(x)), (X,)),
    "bias": (lambda x, b: x + b, (X, ROW)),
    "column": (lambda x, c: x * c, (X, COLUMN)),
    "outer": (lambda b, c: b + c, (ROW, COLUMN)),
    "scalar": (lambda x, s: x * s + 1, (X, jnp.float32(3))),
    "where": (lambda x, y, c: jnp.where(c > 0, x, y), (X, Y, COLUMN)),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), (X,)),
    "cast": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (X,)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "integers": (lambda b: (b << 2) ^ (b % 7) | (b & 3), (BITS,)),
    "gelu": (jax.nn.gelu, (X,)),
    "silu": (jax.nn.silu, (X,)),
    "jit": (lambda x: jax.jit(lambda x: jax.nn.relu(x) * 2)(x), (X,)),
    "transpose": (lambda x: x.T, (arr(256, 64),)),
    "permute": (lambda x: x.transpose(2, 0, 1)[5], (arr(64, 256, 8),)),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0) * jnp.arange(256.0), (X,)),
    "tril": (jnp.tril, (X,)),
    "full": (lambda x: jnp.full_like(x, 3.0) + x, (X,)),
    "index": (lambda w: w[2], (W,)),
    "aligned slice": (lambda w: w[1, :, :], (W,)),
    "slice between blocks": (lambda x: x[3:67, 5:261], (arr(70, 270),)),
    "slice of a slice": (lambda x: x[8:][:64, 64:320], (arr(80, 320),)),
    "expand and squeeze": (lambda x: x[:, None, :][None][0, :, 0], (X,)),
    "merge": (lambda x: x.reshape(64, 256), (arr(8, 8, 256),)),
    "merge columns": (lambda x: x.reshape(64, 256), (arr(64, 2, 128),)),
    "merge with ones": (lambda x: x.reshape(64, 256), (arr(1, 64, 1, 256, 1),)),
    "split": (lambda x: x.reshape(64, 256), (arr(64, 256).reshape(64, 256, 1),)),
    "sum": (lambda x: x.sum(-1), (arr(64, 256, 8),)),
    "sum first": (lambda x: x.sum(0), (arr(8, 64, 256),)),
    "mean and max": (lambda x: x.mean(0) + x.max(0) - x.min(0), (arr(8, 64, 256),)),
    "argmax": (lambda x: jnp.argmax(x, 0), (arr(8, 64, 256),)),
    "all": (lambda x: (x > -2).all(0), (arr(8, 64, 256),)),
    "sum of everything": (lambda x, y: x * y.sum(), (X, arr(8, 8))),
    "concatenate rows": (lambda x, y: jnp.concatenate([x, y], 0), (arr(32, 256), arr(32, 256))),
    "concatenate columns": (lambda x, y: jnp.concatenate([x, y], 1), (arr(64, 128), arr(64, 128))),
    "stack": (lambda x, y: jnp.stack([x, y], 1).reshape(64, 256), (arr(64, 128), arr(64, 128))),
    "tile": (lambda x: jnp.tile(x, (1, 2)), (arr(64, 128),)),
    "tile one": (lambda x: jnp.tile(x, (64, 1)), (arr(1, 256),)),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=1), (arr(64, 128),)),
    "flip": (lambda x: x[::-1, ::-1], (X,)),
    "split first": (lambda x: jnp.split(x, 2, axis=0)[1], (arr(128, 256),)),
    "matmul": (lambda x, y: x @ y, (arr(64, 8), arr(8, 256))),
    "batched matmul": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y)[1], (arr(3, 64, 8), arr(3, 8, 256))),
    "reused": (lambda x: (lambda y: y * jnp.sin(y) + y)(jnp.cos(x)), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_input_fusions(name):
    f, args = INPUTS[name]
    check_input(f, args, (16, 128), 1e-5)


RAGGED = {
    "elementwise": (lambda x, b: jax.nn.relu(x) + b, (arr(50, 90), arr(90))),
    "transpose": (lambda x: x.T * 2, (arr(90, 50),)),
    "iota": (lambda x: x + jnp.arange(90) - jnp.arange(50)[:, None], (arr(50, 90),)),
    "slice": (lambda x: x[7:57, 32:122], (arr(60, 130),)),
    "sum": (lambda x: x.sum(2), (arr(50, 90, 5),)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 0), (arr(32, 90), arr(18, 90))),
    "merge": (lambda x: x.reshape(50, 90), (arr(50, 90, 1),)),
    "tile": (lambda x: jnp.tile(x, (50, 1)), (arr(1, 90),)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_input_fusions_with_blocks_that_do_not_divide_the_array(name):
    check_input(*RAGGED[name], (16, 32), 1e-5)


WHOLE_ROWS = {
    "softmax": lambda x: jax.nn.softmax(x, axis=1),
    "layer norm": lambda x: (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "sort": lambda x: jnp.sort(x, 1),
    "split": lambda x: (lambda a, b: jnp.concatenate([a * jax.nn.silu(b), b], 1))(*jnp.split(x, 2, 1)),
    "normalise": lambda x: x / jnp.sum(x * x, 1, keepdims=True),
}


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_operations_that_need_whole_rows(name):
    check_input(WHOLE_ROWS[name], (X,), (16, 256), 1e-5)


@pytest.mark.parametrize("name", ["softmax", "layer norm", "cumsum", "sort", "normalise"])
def test_operations_that_need_whole_rows_after_the_kernel(name):
    check_output(WHOLE_ROWS[name], X, (), (16, 256), 1e-5)


OUTPUTS = {
    "bias and activation": (lambda z, b: jax.nn.gelu(z + b), (ROW,)),
    "residual": (lambda z, y: z * 0.5 + y, (Y,)),
    "column": (lambda z, c: z * c, (COLUMN,)),
    "cast": (lambda z: z.astype(jnp.bfloat16), ()),
    "transpose": (lambda z, y: z.T + y.T, (Y,)),
    "two results": (lambda z: (z + 1, z * 2), ()),
    "results in two arrangements": (lambda z: {"a": z.T, "b": z}, ()),
    "expand": (lambda z: z[:, None, :] * 2, ()),
    "broadcast": (lambda z: jnp.broadcast_to(z, (3, 64, 256)), ()),
    "split columns": (lambda z: z.reshape(64, 2, 128), ()),
    "split rows": (lambda z: z.reshape(4, 16, 256), ()),
    "where": (lambda z, y: jnp.where(z > y, z, y), (Y,)),
    "side slice": (lambda z, w: z + w[3], (W,)),
    "side sum": (lambda z, w: z + w.sum(0), (W,)),
    "mask": (lambda z: jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) < 100, z, 0), ()),
    "flip": (lambda z: z[::-1], ()),
    "scalar": (lambda z, s: z * s, (jnp.float32(2),)),
    "result beside the kernel": (lambda z, y: (z * 2, y + 1), (Y,)),
    "as it is, twice": (lambda z: (z, z), ()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_fusions(name):
    f, args = OUTPUTS[name]
    check_output(f, X, args, (16, 128), 1e-5)


def test_an_output_fusion_reduces_over_whole_dimensions():
    check_output(lambda z: z.sum(0), X, (), (64, 128), 1e-5)
    check_output(lambda z: (z.max(1), z.sum(1, keepdims=True)), X, (), (16, 256), 1e-5)


def test_an_output_fusion_multiplies_by_a_matrix():
    check_output(lambda z, w: z @ w, X, (arr(256, 8),), (16, 256), 1e-4)


def test_squeezed_block_dimensions():
    check_input(lambda x, y: jnp.swapaxes(x, 0, 1) + y, (arr(8, 6, 16), SMALL), (None, 4, 16))
    check_input(lambda x: x * jnp.arange(6.0)[:, None, None], (SMALL,), (None, 8, 16))
    check_output(lambda z, y: jnp.swapaxes(z, 0, 1) * y[1], SMALL, (arr(2, 8, 6, 16),), (None, 4, 16))


# --- blocks that depend on run-time scalars ---------------------------------------------------------------------------
@pytest.mark.parametrize("index", [0, 3, -1, 7])
def test_an_index_known_at_run_time(index):
    check_input(lambda w, i: w[i], (W, jnp.int32(index)), (16, 128))


@pytest.mark.parametrize("start", [0, 16, 5, 31, 1000, -3])
def test_a_slice_that_starts_anywhere(start):
    f = lambda x, i: lax.dynamic_slice(x, (i, i * 2), (32, 256))
    check_input(f, (arr(64, 300), jnp.int32(start)), (16, 128))


def test_a_slice_that_starts_at_a_multiple_of_the_block_keeps_plain_blocks():
    scalar = jnp.int32(1)

    def pulled(i):
        fn, values, scalars = fuser.get_fusion_values(lambda: lax.dynamic_slice(W[0], (i * 0, i * 128), (64, 128)))
        options = dict(grid_len=2, scalar_prefetch_handler=fuser.make_scalar_prefetch_handler(0))
        return fuser.pull_block_spec(fn, block_of((16, 128), 2), **options)(values)[1][0][0].block_shape, len(scalars)

    shapes = []
    jax.jit(lambda i: shapes.append(pulled(i)))(scalar)
    assert shapes == [((None, 16, 128), 1)]
    check_input(lambda w, i: lax.dynamic_slice(w[0], (i * 0, i * 128), (64, 128)), (W, scalar), (16, 128))


def test_scalars_for_blocks_before_and_after_the_kernel():
    f = lambda w, v, i, j: copied((16, 128))(w[i] * 2) + v[j] * j
    args = (W, arr(5, 64, 256), jnp.int32(2), jnp.int32(4))
    agrees(jax.jit(fuser.fuse(f))(*args), W[2] * 2 + args[1][4] * 4)


def test_two_slices_with_scalars_of_their_own():
    check_input(lambda w, v, i, j: w[i] - v[j], (W, arr(5, 64, 256), jnp.int32(1), jnp.int32(4)), (16, 128))


def test_vmap_over_a_fused_function():
    fused = fuser.fuse(lambda x, b: jax.nn.relu(copied((4, 8))(x * 2) + b))
    x, b = arr(3, 8, 16), arr(3, 16)
    agrees(jax.vmap(fused)(x, b), jax.nn.relu(x * 2 + b[:, None]))
