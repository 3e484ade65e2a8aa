"""Kernels as people write them: attention, stencils, convolutions, gathers, random bits."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from .case import case, integers, normal, sds


def _attention(q, k, v, causal):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return scipy.special.softmax(scores, axis=-1) @ v


@case(
    inputs=lambda rng: tuple(normal(rng, 2, 64, 16) for _ in range(3)),
    expect=lambda q, k, v: _attention(q, k, v, False),
    rtol=1e-5,
    atol=1e-5,
    tags="block:none grid:3d grid:revisit scratch control:when order prim:dot prim:math prim:reduce",
)
def flash_attention(pl, pltpu, **options):
    """Keys along the last grid axis; running maximum, sum and accumulator in scratch."""

    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        j = pl.program_id(2)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        s = jnp.dot(q_ref[...], k_ref[...].T) * 0.25
        m_new = jnp.maximum(m_ref[...], jnp.max(s, axis=-1, keepdims=True))
        p = jnp.exp(s - m_new)
        rescale = jnp.exp(m_ref[...] - m_new)
        l_ref[...] = rescale * l_ref[...] + jnp.sum(p, axis=-1, keepdims=True)
        acc_ref[...] = rescale * acc_ref[...] + jnp.dot(p, v_ref[...])
        m_ref[...] = m_new

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...] / l_ref[...]

    query = pl.BlockSpec((None, 16, 16), lambda h, i, j: (h, i, 0))
    keys = pl.BlockSpec((None, 32, 16), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        kernel,
        sds((2, 64, 16)),
        grid=(2, 4, 2),
        in_specs=[query, keys, keys],
        out_specs=query,
        scratch_shapes=[pltpu.VMEM(s, jnp.float32) for s in ((16, 1), (16, 1), (16, 16))],
        **options,
    )


@case(
    inputs=lambda rng: tuple(normal(rng, 2, 64, 16) for _ in range(3)),
    expect=lambda q, k, v: _attention(q, k, v, True),
    rtol=1e-5,
    atol=1e-5,
    tags="block:squeezed grid:2d control:fori index:ds prim:dot prim:math prim:reduce",
)
def causal_attention(pl, pltpu, **options):
    """A loop over key blocks inside the kernel, whose length depends on the program: a dynamic bound."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        i = pl.program_id(1)
        q = q_ref[...] * 0.25
        rows = i * 16 + lax.broadcasted_iota(jnp.int32, (16, 16), 0)

        def body(j, carry):
            m, l, acc = carry
            s = q @ k_ref[pl.ds(j * 16, 16), :].T
            columns = j * 16 + lax.broadcasted_iota(jnp.int32, (16, 16), 1)
            s = jnp.where(columns <= rows, s, -1e30)
            m_new = jnp.maximum(m, jnp.max(s, axis=1))
            p = jnp.exp(s - m_new[:, None])
            rescale = jnp.exp(m - m_new)
            l = rescale * l + jnp.sum(p, axis=1)
            return m_new, l, rescale[:, None] * acc + p @ v_ref[pl.ds(j * 16, 16), :]

        start = (jnp.full((16,), -1e30), jnp.zeros((16,)), jnp.zeros((16, 16)))
        _, l, acc = lax.fori_loop(0, i + 1, body, start)
        o_ref[...] = acc / l[:, None]

    query = pl.BlockSpec((pl.squeezed, 16, 16), lambda h, i: (h, i, 0))
    whole = pl.BlockSpec((pl.squeezed, 64, 16), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel, sds((2, 64, 16)), grid=(2, 4), in_specs=[query, whole, whole], out_specs=query, **options
    )


def _decode(q, k):
    return scipy.special.softmax(k @ q) @ k if len(k) else np.zeros(16)


@case(
    inputs=lambda rng: (
        np.array([5, 0, 12], "int32"),
        normal(rng, 3, 16),
        normal(rng, 3, 12, 16),
    ),
    expect=lambda n, q, k: np.stack([_decode(q[b], k[b, : n[b]]) for b in range(3)]),
    rtol=1e-5,
    atol=1e-5,
    tags="prefetch block:none grid:1d control:fori control:cond prim:dot index:dynamic",
)
def decode_attention(pl, pltpu, **options):
    """One query against a cache of a length read from prefetched scalars; a length of zero gives zeros."""

    def kernel(n_ref, q_ref, k_ref, o_ref):
        n = n_ref[pl.program_id(0)]
        scores = k_ref[...] @ q_ref[...]
        scores = jnp.where(jnp.arange(12) < n, scores, -1e30)
        p = jnp.where(jnp.arange(12) < n, jnp.exp(scores - jnp.max(scores)), 0.0)
        value = lax.cond(n > 0, lambda: (p @ k_ref[...]) / jnp.sum(p), lambda: jnp.zeros((16,)))
        o_ref[...] = value

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(3,),
        in_specs=[
            pl.BlockSpec((None, 16), lambda b, n: (b, 0)),
            pl.BlockSpec((None, 12, 16), lambda b, n: (b, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, 16), lambda b, n: (b, 0)),
    )
    return pl.pallas_call(kernel, sds((3, 16)), grid_spec=grid_spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 24, 40),),
    expect=lambda x: x.T,
    tags="block:int grid:2d grid:permuted prim:shape",
)
def transpose_blocks(pl, pltpu, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T

    return pl.pallas_call(
        kernel,
        sds((40, 24)),
        grid=(3, 5),
        in_specs=[pl.BlockSpec((8, 8), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 8), lambda i, j: (j, i)),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 7, low=0, high=11), normal(rng, 11, 20)),
    expect=lambda i, t: t[i],
    tags="prefetch block:none grid:1d",
)
def gather_rows_by_prefetch(pl, pltpu, **options):
    def kernel(i_ref, row_ref, o_ref):
        del i_ref
        o_ref[...] = row_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(7,),
        in_specs=[pl.BlockSpec((None, 20), lambda n, i: (i[n], 0))],
        out_specs=pl.BlockSpec((None, 20), lambda n, i: (n, 0)),
    )
    return pl.pallas_call(kernel, sds((7, 20)), grid_spec=grid_spec, **options)


@case(
    inputs=lambda rng: (integers(rng, 10, low=0, high=13), normal(rng, 13, 8)),
    expect=lambda i, t: t[i] * 2,
    tags="block:int block:whole grid:1d control:fori index:dynamic",
)
def embedding_lookup(pl, pltpu, **options):
    """Rows of a table in one block, at indices read in a loop."""

    def kernel(i_ref, t_ref, o_ref):
        def body(n, _):
            o_ref[n, :] = t_ref[i_ref[n], :] * 2

        lax.fori_loop(0, 5, body, None)

    return pl.pallas_call(
        kernel,
        sds((10, 8)),
        grid=(2,),
        in_specs=[pl.BlockSpec((5,), lambda n: (n,)), pl.BlockSpec((13, 8), lambda n: (0, 0))],
        out_specs=pl.BlockSpec((5, 8), lambda n: (n, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 68, dtype="float32"), integers(rng, 5, dtype="float32")),
    expect=lambda x, w: np.correlate(x, w, "valid"),
    tags="block:int block:element grid:1d index:ds control:fori",
)
def conv1d_shifted(pl, pltpu, **options):
    """Overlapping element windows; the taps are shifted slices of the window."""

    def kernel(x_ref, w_ref, o_ref):
        def body(t, acc):
            return acc + w_ref[t] * x_ref[pl.ds(t, 16)]

        o_ref[...] = lax.fori_loop(0, 5, body, jnp.zeros((16,), jnp.float32))

    return pl.pallas_call(
        kernel,
        sds((64,)),
        grid=(4,),
        in_specs=[pl.BlockSpec((pl.Element(20),), lambda i: (i * 16,)), pl.BlockSpec((5,), lambda i: (0,))],
        out_specs=pl.BlockSpec((16,), lambda i: (i,)),
        **options,
    )


@case(
    inputs=lambda rng: (
        integers(rng, 1, 2, 9, 9, dtype="float32"),
        integers(rng, 3, 2, 3, 3, dtype="float32"),
        integers(rng, 9, dtype="float32"),
    ),
    expect=lambda x, w, v: (
        np.einsum("ncijkl,ockl->noij", np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3)), w),
        np.convolve(v, v[:4], "same"),
    ),
    tags="prim:conv grid:absent",
)
def convolutions(pl, pltpu, **options):
    """lax.conv and jnp.convolve inside a kernel."""

    def kernel(x_ref, w_ref, v_ref, o_ref, c_ref):
        o_ref[...] = lax.conv(x_ref[...], w_ref[...], (1, 1), "VALID")
        c_ref[...] = jnp.convolve(v_ref[...], v_ref[0:4], mode="same")

    return pl.pallas_call(kernel, (sds((1, 3, 7, 7)), sds((9,))), **options)


def _laplacian(x):
    p = np.pad(x, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * x


@case(
    inputs=lambda rng: (integers(rng, 24, 32, dtype="float32"),),
    expect=_laplacian,
    tags="block:element block:padding grid:2d",
)
def stencil_with_halo(pl, pltpu, **options):
    """Five points, with a halo of one around every tile; the array's border is padding, masked to zero."""

    def kernel(x_ref, o_ref):
        rows = pl.program_id(0) * 8 - 1 + lax.broadcasted_iota(jnp.int32, (10, 18), 0)
        columns = pl.program_id(1) * 16 - 1 + lax.broadcasted_iota(jnp.int32, (10, 18), 1)
        inside = (rows >= 0) & (rows < 24) & (columns >= 0) & (columns < 32)
        x = jnp.where(inside, x_ref[...], 0.0)
        o_ref[...] = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]

    return pl.pallas_call(
        kernel,
        sds((24, 32)),
        grid=(3, 2),
        in_specs=[
            pl.BlockSpec((pl.Element(10, (1, 1)), pl.Element(18, (1, 1))), lambda i, j: (i * 8, j * 16)),
        ],
        out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
        **options,
    )


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(k0, k1, x0, x1):
    """Threefry-2x32, 20 rounds, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    keys = (k0, k1, np.uint32(k0 ^ k1 ^ np.uint32(0x1BD11BDA)))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))
            x1 = x1 ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _random_bits(key):
    """What jax.random.bits gives, partitionable threefry: the two halves of counter (0, i), xored."""
    blocks = []
    for program in range(2):
        one = np.array([1], "uint32")
        f0, f1 = _threefry(key[0], key[1], 0 * one, np.uint32(program) * one)  # fold_in
        a, b = _threefry(f0[0], f1[0], np.zeros(32, "uint32"), np.arange(32, dtype="uint32"))
        blocks.append((a ^ b).reshape(4, 8))
    return np.concatenate(blocks)


@case(
    inputs=lambda rng: (integers(rng, 2, low=0, high=2**32, dtype="uint32"),),
    expect=_random_bits,
    tags="prim:random dtype:uint32 grid:1d grid:constant",
)
def random_bits(pl, pltpu, **options):
    """jax.random inside a kernel, folded with the program id: bits equal to threefry in NumPy."""

    def kernel(key_ref, o_ref):
        key = jax.random.wrap_key_data(key_ref[...], impl="threefry2x32")
        key = jax.random.fold_in(key, pl.program_id(0))
        o_ref[...] = jax.random.bits(key, (4, 8))

    return pl.pallas_call(
        kernel,
        sds((8, 8), "uint32"),
        grid=(2,),
        in_specs=[pl.BlockSpec((2,), lambda i: (0,))],
        out_specs=pl.BlockSpec((4, 8), lambda i: (i, 0)),
        **options,
    )
