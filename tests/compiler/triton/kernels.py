"""Kernels for the Triton compiler, of sizes that are powers of two: what the corpus has in others, and `pltriton`.

`KERNELS` maps a name to a function that builds the call and draws its operands; the meaning of each is what the
reference interpreter makes of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import tpu as pltpu
from palladion import triton as pltriton

KERNELS: dict[str, Callable[..., tuple[Any, ...]]] = {}


def sds(shape: tuple[int, ...], dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def ints(*shape: int, low: int = -50, high: int = 50, dtype: Any = "int32", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def kernel(build: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`build(**options)` gives (call, operands)."""
    KERNELS[build.__name__] = build
    return build


def on_values(name: str, function: Callable[..., Any], *operands: np.ndarray) -> None:
    """A kernel that applies a function to whole operands."""

    def build(**options):
        out = jax.eval_shape(function, *operands)
        leaves = jax.tree.leaves(out)

        def body(*refs):
            results = jax.tree.leaves(function(*(r[...] for r in refs[: len(operands)])))
            for r, value in zip(refs[len(operands) :], results):
                r[...] = value

        shapes = tuple(sds(s.shape, s.dtype) for s in leaves)
        return pl.pallas_call(body, shapes, name=name, **options), operands

    KERNELS[name] = build


x, y = draw(8, 16), draw(8, 16, seed=2)
n, m = ints(8, 16), ints(8, 16, seed=3)

# --- elements that move
on_values("slices", lambda v: (v[:4], v[2:6, ::2], v[7:, 4:12], v[3, 1]), x)
on_values("joined", lambda v, w: (jnp.concatenate([v, w], 1), jnp.concatenate([v[:4], w[:2], v[:2]], 0)), x, y)
on_values("padded", lambda v: (jnp.pad(v[:4, :8], ((3, 1), (0, 8)), constant_values=2.5),
                               lax.pad(v[:2, :4], 7.0, ((1, 1, 0), (1, 0, 1)))), x)  # fmt: skip
on_values("turned", lambda v: (v[::-1], v.T, jnp.flip(v, 1), jnp.roll(v, 8, 1), jnp.tile(v, (2, 1))), x)
on_values("reshaped", lambda v: (v.reshape(2, 4, 16).transpose(2, 0, 1), v.reshape(128), v.reshape(16, 8)), x)
on_values("stacked", lambda v, w: (jnp.stack([v, w]), jnp.stack([v, w], 2), jnp.repeat(v, 2, 0)), x, y)
on_values("taken", lambda v, i: (jnp.take_along_axis(v, i % 16, 1), jnp.take(v, i[0] % 8, 0, mode="clip")), x, n)
on_values("split_up", lambda v: tuple(jnp.split(v, 4, 1)), x)
on_values("masks_moved", lambda v: ((v > 0)[::-1], jnp.concatenate([v > 0, v < 1])), x)
on_values(
    "dynamic_parts",
    lambda v, i: (
        lax.dynamic_slice(v, (i[0, 0] % 4, 2), (4, 8)),
        lax.dynamic_update_slice(v, -v[:4, :8], (i[1, 1] % 3, i[2, 2])),
    ),
    x,
    ints(8, 16, low=0, high=9),
)

# --- reductions
on_values("reduced", lambda v: (v.sum(), v.max(0), v.min(1), v.prod(1), v.mean((0, 1)), jnp.any(v > 2), v.var(1)), x)
on_values("reduced_ints", lambda v: (v.sum(0), v.max(), jnp.all(v > -60, 1), jnp.bitwise_xor.reduce(v, 0)), n)
on_values("places", lambda v, i: (v.argmax(1), v.argmin(0), i.argmax(0), jnp.argmax(jnp.zeros((4, 4)), 1)), x, n)
on_values(
    "running",
    lambda v, i: (jnp.cumsum(v, 1), jnp.cumprod(v, 0), lax.cummax(i, 1, reverse=True), lax.cummin(v, 0)),
    x,
    n,
)
on_values("running_log", lambda v: (lax.cumlogsumexp(v, 1), lax.cumlogsumexp(v, 0, reverse=True)), x)
on_values("sorted_up", lambda v, i: (jnp.sort(v, 1), jnp.sort(i, 0), jnp.argsort(v, 1)), x, n)
on_values("sorted_pairs", lambda v, i: lax.sort((i % 5, v), dimension=1, num_keys=1, is_stable=True), x, n)

# --- arithmetic
on_values("functions", lambda v: (jnp.exp(v), jnp.log1p(v * v), jnp.tanh(v), lax.erf(v), lax.rsqrt(v * v + 1), v**3,
                                  jax.nn.sigmoid(v), jnp.floor(v), jnp.round(v), jnp.expm1(v), lax.erf_inv(v / 9),
                                  jnp.sin(v)), x)  # fmt: skip
on_values(
    "functions_of_two",
    lambda v, w: (jnp.arctan2(v, w), jnp.abs(v) ** w, jnp.fmod(v, w), v / w, jnp.nextafter(v, w)),
    x,
    y,
)
on_values("integers", lambda i, j: (i // j, i % j, lax.rem(i, j), i & j, i ^ j, ~i, i << (j & 31), i >> (j & 31),
                                    lax.clz(i), lax.population_count(i), jnp.abs(i), jnp.sign(i)),
          n, m | 1)  # fmt: skip
on_values("unsigned", lambda i, j: (i // j, i % j, i >> 3, i > j, jnp.maximum(i, j), i.astype(jnp.float32)),
          ints(8, 16, low=0, high=2**32, dtype="uint32"), ints(8, 16, low=1, high=9, dtype="uint32"))  # fmt: skip
on_values("conversions", lambda v, i: (v.astype(jnp.bfloat16), v.astype(jnp.int32), v.astype(jnp.float16), v > 0,
                                       i.astype(jnp.int8), i.astype(jnp.float32), v.astype(jnp.float8_e5m2)),
          x, n)  # fmt: skip
on_values("bits", lambda v: (lax.bitcast_convert_type(v, jnp.int32), jnp.isfinite(v), jnp.isnan(v), jnp.sign(v)), x)
on_values(
    "chosen", lambda v, w, i: (jnp.where(v > w, v, w), lax.select_n(i % 3, v, w, -v), jnp.clip(v, -1, 0.5)), x, y, n
)
on_values("narrow", lambda v, w: (v + w, v * w, v / w, jnp.maximum(v, w), jnp.exp(v), v < w, v.sum(1)),
          x.astype("bfloat16"), y.astype("bfloat16"))  # fmt: skip
on_values("narrow_ints", lambda i, j: (i + j, i * j, jnp.minimum(i, j), i > j, lax.clz(i), lax.population_count(j)),
          n.astype("int8"), m.astype("int8"))  # fmt: skip

# --- products
a, b = draw(32, 16), draw(16, 64, seed=5)
on_values("products", lambda p, q: (p @ q, jnp.dot(p, q, precision="highest"), q.T @ p.T, p[:, 0] @ p, q @ q[0]), a, b)
on_values("products_of_batches", lambda p, q: (jnp.einsum("bij,bkj->bik", p, q), jnp.einsum("bij,bij->bi", p, q)),
          draw(4, 16, 32), draw(4, 16, 32, seed=6))  # fmt: skip
on_values("products_small", lambda p, q: (p[:4, :4] @ q[:4, :8], jnp.outer(p[0], q[0])), a, b)
on_values("products_narrow", lambda p, q: (jnp.dot(p, q, preferred_element_type=jnp.float32), p @ q,
                                           pltriton.dot(p, q), pltriton.dot(q, p, trans_a=True, trans_b=True)),
          a.astype("bfloat16"), b.astype("bfloat16"))  # fmt: skip
on_values("products_int8", lambda p, q: jnp.dot(p, q, preferred_element_type=jnp.int32),
          ints(16, 32, dtype="int8"), ints(32, 16, dtype="int8", seed=9))  # fmt: skip
on_values("products_int32", lambda p, q: p @ q, ints(8, 16), ints(16, 8, seed=9))
on_values("approximate_tanh", pltriton.approx_tanh, x)


# --- control flow
@kernel
def loops(**options):
    def body(x_ref, n_ref, o_ref, p_ref, q_ref):
        o_ref[...] = lax.fori_loop(0, n_ref[0], lambda i, c: c + x_ref[i] * i, jnp.zeros(16))
        total, rows = lax.scan(lambda c, row: (c + row, c * 2), jnp.ones(16), x_ref[...])
        p_ref[...] = rows + total
        _, back = lax.scan(lambda c, row: (c + row.sum(), row - c), 0.0, x_ref[...], reverse=True)
        i, v = lax.while_loop(lambda s: s[1].max() < 100, lambda s: (s[0] + 1, s[1] * 2), (0, jnp.abs(x_ref[0]) + 1))
        q_ref[...] = back + v * i

    shapes = (sds((16,)), sds((8, 16)), sds((8, 16)))
    return pl.pallas_call(body, shapes, **options), (x, np.array([5, 2], "int32"))


@kernel
def branches(**options):
    def body(x_ref, o_ref):
        i = pl.program_id(0)
        v = x_ref[...]
        o_ref[...] = lax.switch(i, [lambda v: v + 1, lambda v: v * 2, lambda v: -v, lambda v: v**2], v)

        @pl.when(i % 2 == 1)
        def _():
            o_ref[0, :] = jnp.zeros(16)

    spec = pl.BlockSpec((2, 16), lambda i: (i, 0))
    return pl.pallas_call(body, sds((8, 16)), grid=(4,), in_specs=[spec], out_specs=spec, **options), (x,)


@kernel
def registers(**options):
    """Scratch and scoped buffers live in registers: whole, by rows, by parts, across loops and branches."""

    def body(x_ref, o_ref, acc_ref, odd_ref):
        acc_ref[...] = jnp.zeros_like(acc_ref)
        odd_ref[...] = jnp.ones_like(odd_ref)

        @pl.loop(0, 8)
        def _(i):
            acc_ref[i % 4, :] = acc_ref[i % 4, :] + x_ref[i]

            @pl.when(i % 2 == 1)
            def _():
                odd_ref[4:8] = odd_ref[4:8] * 2 + i

        def scoped(t_ref):
            t_ref[...] = acc_ref[...] * 2
            t_ref[1:3, pl.ds(4, 8)] = jnp.zeros((2, 8))
            t_ref[0:2, :] = t_ref[::2, :]
            return t_ref[...] + odd_ref[0]

        o_ref[...] = pl.run_scoped(scoped, pltpu.VMEM((4, 16), jnp.float32)) + odd_ref[...]

    scratch = [pltpu.VMEM((4, 16), jnp.float32), pltpu.VMEM((16,), jnp.float32)]
    return pl.pallas_call(body, sds((4, 16)), scratch_shapes=scratch, **options), (x,)


@kernel
def written_and_read(**options):
    """An output that the program reads back, turned round: threads must meet in between."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        v = o_ref[...]
        o_ref[...] = v.T
        for _ in range(2):
            o_ref[pl.ds(0, 8), :] = o_ref[pl.ds(8, 8), :] + 1

    return pl.pallas_call(body, sds((16, 16)), **options), (draw(16, 16),)


@kernel
def views(**options):
    def body(x_ref, o_ref, p_ref, q_ref):
        o_ref[...] = x_ref.at[2:6].at[pl.ds(1, 2)][...]
        p_ref[...] = x_ref.T.at[4:8][...]
        q_ref[...] = x_ref.reshape(4, 32).at[1:3][...]
        o_ref.at[0, 0:4].set(x_ref.reshape(128)[pl.ds(60, 4)])

    return pl.pallas_call(body, (sds((2, 16)), sds((4, 8)), sds((2, 32))), **options), (x,)


@kernel
def index_arrays(**options):
    def body(x_ref, i_ref, o_ref, p_ref):
        i = i_ref[...]
        o_ref[...] = x_ref[i % 8, :]
        p_ref[...] = x_ref[i % 8, i % 16]
        p_ref[i] = -p_ref[i]

    at = np.array([3, 1, 0, 2], "int32")
    return pl.pallas_call(body, (sds((4, 16)), sds((4,))), **options), (x, at)


# --- pltriton
@kernel
def masked(**options):
    def body(x_ref, o_ref, p_ref):
        lanes = pl.program_id(0) * 16 + jnp.arange(16)
        v = pltriton.load(x_ref.at[pl.ds(pl.program_id(0) * 16, 16)], mask=lanes < 37, other=-1.0)
        w = pltriton.load(x_ref.at[lanes], mask=lanes < 37, other=0.0, eviction_policy="evict_first")
        pltriton.store(o_ref.at[pl.ds(pl.program_id(0) * 16, 16)], v + w, mask=lanes < 37)
        pltriton.store(p_ref.at[lanes], jnp.exp(v), mask=(lanes < 37) & (lanes % 2 == 0), eviction_policy="evict_last")
        pltriton.store(p_ref.at[lanes], v, mask=(lanes < 37) & (lanes % 2 == 1))

    whole = pl.BlockSpec((37,), lambda i: (0,))
    call = pl.pallas_call(
        body, (sds((37,)), sds((37,))), grid=(3,), in_specs=[whole], out_specs=(whole, whole), **options
    )
    return call, (draw(37),)


@kernel
def atomics(**options):
    """Every program updates the same elements; what is left does not depend on their order."""

    def body(x_ref, n_ref, f_ref, i_ref, j_ref, k_ref, l_ref):
        v, i = x_ref[...], n_ref[...]
        here = jnp.arange(16) % 4
        pltriton.atomic_add(f_ref, here, jnp.round(v * 8))
        pltriton.atomic_max(f_ref, here + 4, v)
        pltriton.atomic_min(f_ref, here + 8, v)
        pltriton.atomic_add(i_ref, here, i)
        pltriton.atomic_max(i_ref, here + 4, i)
        pltriton.atomic_min(i_ref, here + 8, i, mask=here < 2)
        pltriton.atomic_and(j_ref, here, i)
        pltriton.atomic_or(j_ref, here + 4, i)
        pltriton.atomic_xor(j_ref, here + 8, i)
        pltriton.atomic_xchg(k_ref, pl.program_id(0), i[0])
        pltriton.atomic_cas(l_ref.at[pl.program_id(0)], 3, 4)

    row = pl.BlockSpec((None, 16), lambda p: (p, 0))
    whole = [pl.BlockSpec((16,), lambda p: (0,))] * 5
    start = [np.zeros(16, "float32"), *(np.zeros(16, "int32"),) * 3, np.full(16, 3, "int32")]
    types = tuple(sds(s.shape, s.dtype) for s in start)

    def with_start(x_ref, n_ref, *refs):
        body(x_ref, n_ref, *refs[5:])

    call = pl.pallas_call(
        with_start, types, grid=(8,), in_specs=[row, row, *whole], out_specs=tuple(whole),
        input_output_aliases={2 + k: k for k in range(5)}, **options,
    )  # fmt: skip
    return call, (x, n, *start)


@kernel
def hints(**options):
    def body(x_ref, o_ref):
        i = pltriton.max_contiguous(pl.multiple_of(jnp.arange(16), 16), 16)
        pltriton.debug_barrier()
        o_ref[...] = pltriton.load(x_ref.at[0, i], cache_modifier=".ca") + pltriton.load(x_ref.at[1], volatile=True)

    return pl.pallas_call(body, sds((16,)), **options), (x,)


# --- kernels as people write them
@kernel
def softmax_rows(**options):
    def body(x_ref, o_ref):
        v = x_ref[...]
        e = jnp.exp(v - v.max(-1, keepdims=True))
        o_ref[...] = e / e.sum(-1, keepdims=True)

    row = pl.BlockSpec((1, 64), lambda i: (i, 0))
    return pl.pallas_call(body, sds((12, 64)), grid=(12,), in_specs=[row], out_specs=row, **options), (draw(12, 64),)


@kernel
def ragged_everywhere(**options):
    """Blocks that hang over both edges of arrays whose sizes are odd."""

    def body(x_ref, o_ref, s_ref):
        o_ref[...] = x_ref[...] * 2
        rows = pl.program_id(0) * 8 + lax.broadcasted_iota(jnp.int32, (8, 16), 0)
        columns = pl.program_id(1) * 16 + lax.broadcasted_iota(jnp.int32, (8, 16), 1)
        s_ref[0, 0] = jnp.where((rows < 19) & (columns < 37), x_ref[...], 0).sum()

    block = pl.BlockSpec((8, 16), lambda i, j: (i, j))
    one = pl.BlockSpec((1, 1), lambda i, j: (i, j))
    call = pl.pallas_call(
        body, (sds((19, 37)), sds((3, 3))), grid=(3, 3), in_specs=[block], out_specs=(block, one), **options
    )
    return call, (draw(19, 37),)


@kernel
def matmul_ragged_k(**options):
    def body(x_ref, y_ref, o_ref):
        def step(k, acc):
            lanes = k * 16 + jnp.arange(16)
            p = pltriton.load(x_ref.at[:, pl.ds(k * 16, 16)], mask=(lanes < 40)[None, :], other=0.0)
            q = pltriton.load(y_ref.at[pl.ds(k * 16, 16), :], mask=(lanes < 40)[:, None], other=0.0)
            return acc + pltriton.dot(p, q)

        o_ref[...] = lax.fori_loop(0, 3, step, jnp.zeros((16, 16)))

    call = pl.pallas_call(
        body, sds((24, 20)), grid=(2, 2),
        in_specs=[pl.BlockSpec((16, 40), lambda i, j: (i, 0)), pl.BlockSpec((40, 16), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)), **options,
    )  # fmt: skip
    return call, (draw(24, 40), draw(40, 20, seed=4))


@kernel
def four_axes(**options):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1000 * pl.program_id(0) + 10 * pl.program_id(3)

    spec = pl.BlockSpec((None, None, None, 8), lambda i, j, k, l: (i, j, k, l))
    x = draw(2, 3, 2, 24)
    return pl.pallas_call(body, sds(x.shape), grid=(2, 3, 2, 3), in_specs=[spec], out_specs=spec, **options), (x,)
