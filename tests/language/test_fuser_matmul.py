"""The public guide's program: a blocked matrix product with fused inputs and outputs, against jax.numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import fuser
from palladion import tpu as pltpu

RNG = np.random.default_rng(3)


def arr(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def matmul_kernel(x_fusion, y_fusion, out_fusion, *, block=(32, 32, 32)):
    bm, bn, bk = block
    (m, k), (_, n) = x_fusion.shape, y_fusion.shape
    z_type = jax.ShapeDtypeStruct((m, n), jnp.promote_types(x_fusion.dtype, y_fusion.dtype))
    x_fn, x_values, x_scalars = fuser.get_fusion_values(x_fusion)
    y_fn, y_values, y_scalars = fuser.get_fusion_values(y_fusion)
    z_fn, z_values, z_scalars = fuser.get_fusion_values(out_fusion or (lambda z: z), z_type)
    handlers = [fuser.make_scalar_prefetch_handler(i) for i in range(3)]
    x_spec = pl.BlockSpec((bm, bk), lambda i, j, k, *_: (i, k))
    y_spec = pl.BlockSpec((bk, bn), lambda i, j, k, *_: (k, j))
    z_spec = pl.BlockSpec((bm, bn), lambda i, j, k, *_: (i, j))
    pull = functools.partial(fuser.pull_block_spec, grid_len=3)
    x_block, (x_specs,), _ = pull(x_fn, x_spec, scalar_prefetch_handler=handlers[0])(x_values)
    y_block, (y_specs,), _ = pull(y_fn, y_spec, scalar_prefetch_handler=handlers[1])(y_values)
    no_specs = jax.tree.map(lambda _: pl.no_block_spec, z_values)
    out_specs = fuser.push_block_spec(z_fn, no_specs, z_spec)(z_values, z_type)
    out_type = jax.eval_shape(z_fn, z_values, z_type)
    z_block, (z_specs, _), _ = pull(z_fn, out_specs, scalar_prefetch_handler=handlers[2])(z_values, z_type)
    steps = pl.cdiv(k, bk)

    def kernel(x_scalars, y_scalars, z_scalars, x_refs, y_refs, z_refs, *refs):
        *o_refs, acc_ref = refs
        ids, scalars = tuple(pl.program_id(a) for a in range(3)), (x_scalars, y_scalars, z_scalars)

        @pl.when(ids[2] == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        x = x_block(ids, scalars, jax.tree.map(lambda ref: ref[...], x_refs))
        y = y_block(ids, scalars, jax.tree.map(lambda ref: ref[...], y_refs))
        inside = lambda axis: lax.broadcasted_iota(jnp.int32, (bm, bk) if axis else (bk, bn), axis) + ids[2] * bk < k
        x, y = jnp.where(inside(1), x, 0), jnp.where(inside(0), y, 0)
        acc_ref[...] += jnp.dot(x, y, preferred_element_type=jnp.float32, precision="highest")

        @pl.when(ids[2] == steps - 1)
        def _():
            outs = z_block(ids, scalars, jax.tree.map(lambda ref: ref[...], z_refs), acc_ref[...].astype(z_type.dtype))
            for o_ref, out in zip(o_refs, jax.tree.leaves(outs), strict=True):
                o_ref[...] = out

    return pl.pallas_call(
        kernel,
        out_type,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            3,
            (pl.cdiv(m, bm), pl.cdiv(n, bn), steps),
            [x_specs, y_specs, z_specs],
            out_specs,
            [pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        interpret=True,
    )(x_scalars, y_scalars, z_scalars, x_values, y_values, z_values)


X, Y, BIAS, RESIDUAL = arr(64, 96), arr(96, 128), arr(128), arr(64, 128)
WEIGHTS = arr(4, 96, 128)

PROGRAMS = {
    "alone": (lambda mm, x, y: mm(x, y), (X, Y)),
    "activation and bias": (lambda mm, x, y, b: jax.nn.relu(mm(x * 2, jnp.exp(y)) + b), (X, Y, BIAS)),
    "residual": (lambda mm, x, y, r: mm(jax.nn.silu(x), y) * 0.5 + r, (X, Y, RESIDUAL)),
    "transposed operands": (lambda mm, x, y: mm(x.T, y.T), (arr(96, 64), arr(128, 96))),
    "transposed result": (lambda mm, x, y: mm(x, y).T, (X, Y)),
    "expert chosen at run time": (lambda mm, x, w, i: mm(x, w[i]), (X, WEIGHTS, jnp.int32(3))),
    "columns chosen at run time": (
        lambda mm, x, w, i: mm(x, lax.dynamic_slice(w, (0, i * 128), (96, 128))),
        (X, arr(96, 256), jnp.int32(1)),
    ),
    "unaligned columns": (lambda mm, x, w: mm(x, w[:, 17:145]), (X, arr(96, 256))),
    "dequantised": (lambda mm, x, q, s: mm(x, q.astype(jnp.float32) * s), (X, (Y * 9).astype(jnp.int8), arr(1, 128))),
    "two results": (lambda mm, x, y: (lambda z: (z, jax.nn.gelu(z)))(mm(x, y)), (X, Y)),
    "ragged": (lambda mm, x, y, b: jnp.tanh(mm(x * 2, y) + b), (arr(50, 70), arr(70, 90), arr(90))),
    "ragged and transposed": (lambda mm, x, y: mm(x.T + 1, y).T, (arr(70, 50), arr(70, 90))),
    "all at once": (
        lambda mm, x, w, b, r, i: (lambda z: {"z": z, "t": z.T.astype(jnp.bfloat16)})(
            jax.nn.gelu(mm(x.T * 2, w[i].T) + b) + r[i]
        ),
        (arr(96, 64), arr(4, 128, 96), BIAS, arr(4, 64, 128), jnp.int32(2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fused_matmul(name):
    program, args = PROGRAMS[name]
    mm = fuser.fusible(matmul_kernel)
    got = jax.jit(fuser.fuse(functools.partial(program, mm)))(*args)
    want = program(functools.partial(jnp.dot, precision="highest"), *args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        tolerance = 1e-4 if g.dtype == jnp.float32 else 3e-2
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), tolerance, tolerance)


def test_a_norm_of_rows_fuses_when_the_blocks_hold_whole_rows():
    mm = fuser.fusible(functools.partial(matmul_kernel, block=(32, 32, 96)))
    program = lambda mm, x, y: mm(x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6), y)
    got = fuser.fuse(functools.partial(program, mm))(X, Y)
    np.testing.assert_allclose(got, program(functools.partial(jnp.dot, precision="highest"), X, Y), 1e-4, 1e-4)


def test_a_norm_of_rows_is_refused_when_they_do_not():
    mm = fuser.fusible(matmul_kernel)
    fused = fuser.fuse(lambda x, y: mm(x / jnp.sum(x, 1, keepdims=True), y))
    with pytest.raises(ValueError, match=r"^The fusion needs two different blocks of one value, f32\[64,96\]\."):
        fused(X, Y)


def test_nothing_but_the_kernel_is_left_of_the_program():
    mm = fuser.fusible(matmul_kernel)
    fused = fuser.fuse(lambda x, y, b: jax.nn.relu(mm(x * 2, y) + b))
    (call,) = jax.make_jaxpr(fused)(X, Y, BIAS).eqns
    assert call.primitive is pl.pallas_call_p
