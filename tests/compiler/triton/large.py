"""Kernels of real size, as one writes them for Triton: attention, LayerNorm, blocked products. Only to be compiled.

`LARGE` maps a name to a function that gives (call, shapes of its operands).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import palladion as pl
from palladion import triton as pltriton

LARGE: dict[str, Callable[..., tuple[Any, ...]]] = {}


def sds(shape: tuple[int, ...], dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def large(build: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    LARGE[build.__name__] = build
    return build


def flash_attention(heads, length, depth, rows, columns, causal, **options):
    """Softmax(q k^T) v with running maximum and sum; keys go by in a loop whose length depends on the program."""

    def body(q_ref, k_ref, v_ref, o_ref):
        first = pl.program_id(1) * rows
        q = q_ref[...]
        where = first + jnp.arange(rows)

        def step(j, carry):
            m, l, acc = carry
            at = pl.ds(j * columns, columns)
            s = pltriton.dot(q, k_ref[at, :], trans_b=True) * (depth**-0.5 * 1.4426950408889634)
            if causal:
                s = jnp.where(where[:, None] >= j * columns + jnp.arange(columns)[None, :], s, -1e30)
            new = jnp.maximum(m, s.max(1))
            p = jnp.exp2(s - new[:, None])
            scale = jnp.exp2(m - new)
            acc = acc * scale[:, None] + pltriton.dot(p.astype(v_ref.dtype), v_ref[at, :])
            return new, l * scale + p.sum(1), acc

        start = jnp.full(rows, -1e30), jnp.zeros(rows), jnp.zeros((rows, depth))
        last = (first + rows + columns - 1) // columns if causal else length // columns
        _, l, acc = lax.fori_loop(0, last, step, start)
        o_ref[...] = (acc / l[:, None]).astype(o_ref.dtype)

    whole = pl.BlockSpec((None, length, depth), lambda h, i: (h, 0, 0))
    block = pl.BlockSpec((None, rows, depth), lambda h, i: (h, i, 0))
    return pl.pallas_call(
        body, sds((heads, length, depth), "bfloat16"), grid=(heads, length // rows), in_specs=[block, whole, whole],
        out_specs=block, name="flash_attention", **options,
    )  # fmt: skip


@large
def attention():
    call = flash_attention(32, 2048, 64, 128, 64, False, compiler_params=pltriton.CompilerParams(8, 3))
    return call, [sds((32, 2048, 64), "bfloat16")] * 3


@large
def attention_causal():
    call = flash_attention(32, 2048, 64, 128, 64, True, compiler_params=pltriton.CompilerParams(8, 3))
    return call, [sds((32, 2048, 64), "bfloat16")] * 3


@large
def layer_norm():
    rows, columns = 4096, 4096

    def body(x_ref, w_ref, b_ref, o_ref):
        v = x_ref[...].astype(jnp.float32)
        mean = v.mean(-1, keepdims=True)
        centred = v - mean
        scale = lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        o_ref[...] = (centred * scale * w_ref[...][None, :] + b_ref[...][None, :]).astype(o_ref.dtype)

    row, weights = pl.BlockSpec((1, columns), lambda i: (i, 0)), pl.BlockSpec((columns,), lambda i: (0,))
    call = pl.pallas_call(
        body, sds((rows, columns), "bfloat16"), grid=(rows,), in_specs=[row, weights, weights], out_specs=row,
        name="layer_norm", compiler_params=pltriton.CompilerParams(num_warps=8),
    )  # fmt: skip
    return call, [sds((rows, columns), "bfloat16"), sds((columns,)), sds((columns,))]


def matmul(size, block, deep, warps, stages):
    """A blocked product of bfloat16 matrices, summed in float32; masks only where blocks hang over an edge."""

    def body(x_ref, y_ref, o_ref):
        def step(k, acc):
            at = pl.ds(k * deep, deep)
            if size % deep == 0:
                return acc + pltriton.dot(x_ref[:, at], y_ref[at, :])
            lanes = k * deep + jnp.arange(deep) < size
            p = pltriton.load(x_ref.at[:, at], mask=jnp.broadcast_to(lanes[None, :], (block, deep)), other=0.0)
            q = pltriton.load(y_ref.at[at, :], mask=jnp.broadcast_to(lanes[:, None], (deep, block)), other=0.0)
            return acc + pltriton.dot(p, q)

        acc = lax.fori_loop(0, -(-size // deep), step, jnp.zeros((block, block)))
        o_ref[...] = acc.astype(o_ref.dtype)

    n = -(-size // block)
    return pl.pallas_call(
        body, sds((size, size), "bfloat16"), grid=(n, n), name="matmul",
        in_specs=[pl.BlockSpec((block, size), lambda i, j: (i, 0)), pl.BlockSpec((size, block), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
    )  # fmt: skip


@large
def matmul_4096():
    return matmul(4096, 128, 64, 8, 3), [sds((4096, 4096), "bfloat16")] * 2


@large
def matmul_1000():
    return matmul(1000, 128, 64, 8, 3), [sds((1000, 1000), "bfloat16")] * 2


@large
def softmax_rows():
    def body(x_ref, o_ref):
        v = x_ref[...]
        e = jnp.exp(v - v.max(-1, keepdims=True))
        o_ref[...] = e / e.sum(-1, keepdims=True)

    row = pl.BlockSpec((1, 1024), lambda i: (i, 0))
    call = pl.pallas_call(body, sds((4096, 1024)), grid=(4096,), in_specs=[row], out_specs=row, name="softmax")
    return call, [sds((4096, 1024))]


@large
def add_ragged():
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    block = pl.BlockSpec((64, 128), lambda i, j: (i, j))
    call = pl.pallas_call(body, sds((1000, 1000)), grid=(16, 8), in_specs=[block] * 2, out_specs=block, name="add")
    return call, [sds((1000, 1000))] * 2
