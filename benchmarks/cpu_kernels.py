"""The kernels that benchmarks/cpu.py measures, as a user would write them, and the same work in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())


def _shape(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- matrix products ------------------------------------------------------------------------------------------------
def matmul(n, bm, bn, bk):
    """f32 product of n cubed that accumulates in its output block over the last grid axis (tutorial 4.1)."""

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        _shape((n, n)),
        grid=(n // bm, n // bn, n // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        **NATIVE,
    )


def matmul_bf16(n, bm, bn, bk):
    """bf16 product with its sum in f32 scratch, rounded once at the end (tutorial 4.1')."""

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        _shape((n, n), jnp.bfloat16),
        grid=(n // bm, n // bn, n // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        **NATIVE,
    )


# --- element by element ---------------------------------------------------------------------------------------------
def elementwise(f, shape, block, operands, donated=False):
    """f of blocks of equally shaped f32 arrays; donated: the result takes the first one's place."""

    def kernel(*refs):
        *inputs, o_ref = refs
        o_ref[...] = f(*(ref[...] for ref in inputs))

    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        _shape(shape),
        grid=(shape[0] // block[0], shape[1] // block[1]),
        in_specs=[spec] * operands,
        out_specs=spec,
        input_output_aliases={0: 0} if donated else {},
        **NATIVE,
    )


def copy(shape, block):
    """The second array copied into the first one's memory."""

    def kernel(o_in_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        _shape(shape),
        grid=(shape[0] // block[0], shape[1] // block[1]),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY), spec],
        out_specs=spec,
        input_output_aliases={0: 0},
        **NATIVE,
    )


def exp_chain(x, y):
    return jnp.exp(x + y) * x


def one_block(shape):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(kernel, _shape(shape), **NATIVE)


# --- rows -----------------------------------------------------------------------------------------------------------
def softmax(x):
    """Over rows, computed in f32 whatever the dtype."""
    y = x.astype(jnp.float32)
    e = jnp.exp(y - jnp.max(y, axis=-1, keepdims=True))
    return (e / jnp.sum(e, axis=-1, keepdims=True)).astype(x.dtype)


def layer_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def row_sum(x):
    return jnp.sum(x, axis=-1)


def logsumexp(x):
    return jax.nn.logsumexp(x, axis=-1)


def over_rows(f, shape, rows, dtype=jnp.float32, donated=False):
    """f of blocks of whole rows; f keeps their shape, or gives a number for each row."""

    def kernel(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    reduces = jax.eval_shape(f, _shape(shape, dtype)).ndim == 1
    block = pl.BlockSpec((rows, shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        _shape(shape[:1] if reduces else shape, dtype),
        grid=(shape[0] // rows,),
        in_specs=[block],
        out_specs=pl.BlockSpec((rows,), lambda i: (i,)) if reduces else block,
        input_output_aliases={0: 0} if donated else {},
        **NATIVE,
    )


def online_logsumexp(shape, rows, columns):
    """In one pass over blocks of columns: the maximum so far, and the sum relative to it, in scratch."""

    def kernel(x_ref, o_ref, m_ref, l_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)

        x = x_ref[...]
        m = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
        l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + jnp.exp(x - m).sum(axis=1, keepdims=True)
        m_ref[...] = m

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = m_ref[...] + jnp.log(l_ref[...])

    return pl.pallas_call(
        kernel,
        _shape((shape[0], 1)),
        grid=(shape[0] // rows, shape[1] // columns),
        in_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((rows, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)] * 2,
        **NATIVE,
    )
