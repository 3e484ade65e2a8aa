"""Matrix products: accumulated in output or scratch, masked at ragged edges, batched, grouped, quantised."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from .case import case, integers, normal, sds, uniform


def _mkn_specs(pl, bm, bk, bn):
    return (
        [pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
    )


@case(
    inputs=lambda rng: (normal(rng, 64, 96), normal(rng, 96, 128)),
    expect=lambda a, b: a @ b,
    rtol=1e-5,
    atol=2e-5,
    tags="block:int grid:3d grid:revisit control:when order prim:dot",
)
def matmul_accumulating_output(pl, pltpu, **options):
    def kernel(a_ref, b_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(a_ref[...], b_ref[...])

    in_specs, out_specs = _mkn_specs(pl, 16, 32, 64)
    return pl.pallas_call(kernel, sds((64, 128)), grid=(4, 2, 3), in_specs=in_specs, out_specs=out_specs, **options)


@case(
    inputs=lambda rng: (normal(rng, 32, 64, dtype=jnp.bfloat16), normal(rng, 64, 48, dtype=jnp.bfloat16)),
    expect=lambda a, b: a @ b,
    rtol=8e-3,
    atol=2e-3,
    out="bfloat16",
    tags="block:int grid:3d grid:revisit scratch control:when order prim:dot dtype:bfloat16",
)
def matmul_bf16_scratch(pl, pltpu, **options):
    """bf16 in and out, accumulated in float32 scratch, rounded once at the end."""

    def kernel(a_ref, b_ref, o_ref, acc_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    in_specs, out_specs = _mkn_specs(pl, 16, 16, 16)
    return pl.pallas_call(
        kernel,
        sds((32, 48), jnp.bfloat16),
        grid=(2, 3, 4),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((16, 16), jnp.float32)],
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 37, 53), normal(rng, 53, 41)),
    expect=lambda a, b: a @ b,
    rtol=1e-5,
    atol=2e-5,
    tags="block:int grid:3d grid:ragged grid:revisit control:when order prim:dot",
)
def matmul_ragged(pl, pltpu, **options):
    """M, N and K all ragged: K is masked in both operands, M and N take care of themselves."""

    def kernel(a_ref, b_ref, o_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        ka = k * 16 + lax.broadcasted_iota(jnp.int32, (16, 16), 1)
        kb = k * 16 + lax.broadcasted_iota(jnp.int32, (16, 16), 0)
        a = jnp.where(ka < 53, a_ref[...], 0.0)
        b = jnp.where(kb < 53, b_ref[...], 0.0)
        o_ref[...] += jnp.dot(a, b)

    in_specs, out_specs = _mkn_specs(pl, 16, 16, 16)
    return pl.pallas_call(kernel, sds((37, 41)), grid=(3, 3, 4), in_specs=in_specs, out_specs=out_specs, **options)


@case(
    inputs=lambda rng: (normal(rng, 32, 48), normal(rng, 48, 40), normal(rng, 40)),
    expect=lambda a, b, c: np.maximum(a @ b + c, 0),
    rtol=1e-5,
    atol=2e-5,
    tags="block:int grid:2d grid:constant prim:dot control:fori index:ds",
)
def matmul_loop_inside(pl, pltpu, **options):
    """No reduction axis in the grid: a loop over K inside the kernel; bias and relu as an epilogue."""

    def kernel(a_ref, b_ref, c_ref, o_ref):
        def body(k, acc):
            return acc + a_ref[:, pl.ds(k * 16, 16)] @ b_ref[pl.ds(k * 16, 16), :]

        acc = lax.fori_loop(0, 3, body, jnp.zeros((16, 20), jnp.float32))
        o_ref[...] = jnp.maximum(acc + c_ref[...], 0.0)

    return pl.pallas_call(
        kernel,
        sds((32, 40)),
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec((16, 48), lambda i, j: (i, 0)),
            pl.BlockSpec((48, 20), lambda i, j: (0, j)),
            pl.BlockSpec((20,), lambda i, j: (j,)),
        ],
        out_specs=pl.BlockSpec((16, 20), lambda i, j: (i, j)),
        **options,
    )


@case(
    inputs=lambda rng: (integers(rng, 24, 16, dtype="float32"), integers(rng, 40, 16, dtype="float32")),
    expect=lambda a, b: (a @ b.T, a.T @ a, b @ np.arange(16.0), np.outer(a[0], b[0])),
    tags="prim:dot grid:absent",
)
def dot_general_forms(pl, pltpu, **options):
    """A transposed right side, a transposed left side, matrix by vector, an outer product."""

    def kernel(a_ref, b_ref, abt_ref, ata_ref, v_ref, outer_ref):
        a, b = a_ref[...], b_ref[...]
        abt_ref[...] = lax.dot_general(a, b, (((1,), (1,)), ((), ())))
        ata_ref[...] = lax.dot_general(a, a, (((0,), (0,)), ((), ())))
        v_ref[...] = b @ jnp.arange(16, dtype=jnp.float32)
        outer_ref[...] = jnp.outer(a[0], b[0])

    return pl.pallas_call(kernel, (sds((24, 40)), sds((16, 16)), sds((40,)), sds((16, 16))), **options)


@case(
    inputs=lambda rng: (integers(rng, 3, 8, 16, dtype="float32"), integers(rng, 3, 16, 12, dtype="float32")),
    expect=lambda a, b: (a @ b, np.einsum("bik,bkj->ijb", a, b), np.einsum("bik,bkj->ij", a, b)),
    tags="prim:dot prim:shape grid:absent",
)
def batched_dot(pl, pltpu, **options):
    def kernel(a_ref, b_ref, o_ref, turned_ref, total_ref):
        a, b = a_ref[...], b_ref[...]
        o_ref[...] = a @ b
        turned_ref[...] = jnp.einsum("bik,bkj->ijb", a, b)
        total_ref[...] = jnp.einsum("bik,bkj->ij", a, b)

    return pl.pallas_call(kernel, (sds((3, 8, 12)), sds((8, 12, 3)), sds((8, 12))), **options)


@case(
    inputs=lambda rng: (normal(rng, 3, 16, 8), normal(rng, 3, 8, 24)),
    expect=lambda a, b: a @ b,
    rtol=1e-5,
    atol=1e-5,
    tags="block:none block:squeezed grid:3d prim:dot",
)
def batch_in_the_grid(pl, pltpu, **options):
    """The batch dimension is squeezed out of the blocks."""

    def kernel(a_ref, b_ref, o_ref):
        assert a_ref.shape == (8, 8) and b_ref.shape == (8, 12) and o_ref.shape == (8, 12)
        o_ref[...] = a_ref[...] @ b_ref[...]

    return pl.pallas_call(
        kernel,
        sds((3, 16, 24)),
        grid=(3, 2, 2),
        in_specs=[
            pl.BlockSpec((None, 8, 8), lambda n, i, j: (n, i, 0)),
            pl.BlockSpec((pl.squeezed, 8, 12), lambda n, i, j: (n, 0, j)),
        ],
        out_specs=pl.BlockSpec((None, 8, 12), lambda n, i, j: (n, i, j)),
        **options,
    )


@case(
    inputs=lambda rng: (
        integers(rng, 16, 64, low=-128, high=128, dtype="int8"),
        integers(rng, 64, 24, low=-128, high=128, dtype="int8"),
    ),
    expect=lambda a, b: a.astype("int32") @ b.astype("int32"),
    tags="prim:dot dtype:int8 dtype:int32 grid:3d grid:revisit control:when order block:int",
)
def matmul_int8(pl, pltpu, **options):
    def kernel(a_ref, b_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.int32)

    in_specs, out_specs = _mkn_specs(pl, 8, 32, 12)
    return pl.pallas_call(
        kernel, sds((16, 24), "int32"), grid=(2, 2, 2), in_specs=in_specs, out_specs=out_specs, **options
    )


@case(
    inputs=lambda rng: (
        integers(rng, 16, 32, low=-127, high=128, dtype="int8"),
        integers(rng, 32, 24, low=-127, high=128, dtype="int8"),
        uniform(rng, 16, 1, low=0.01, high=0.1),
        uniform(rng, 1, 24, low=0.01, high=0.1),
    ),
    expect=lambda a, b, sa, sb: (a.astype("float64") @ b.astype("float64")) * sa * sb,
    rtol=1e-5,
    tags="prim:dot dtype:int8 block:int grid:2d",
)
def matmul_quantised(pl, pltpu, **options):
    """int8 operands with a scale for each row and each column, dequantised in the block."""

    def kernel(a_ref, b_ref, sa_ref, sb_ref, o_ref):
        product = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.int32)
        o_ref[...] = product.astype(jnp.float32) * sa_ref[...] * sb_ref[...]

    return pl.pallas_call(
        kernel,
        sds((16, 24)),
        grid=(2, 3),
        in_specs=[
            pl.BlockSpec((8, 32), lambda i, j: (i, 0)),
            pl.BlockSpec((32, 8), lambda i, j: (0, j)),
            pl.BlockSpec((8, 1), lambda i, j: (i, 0)),
            pl.BlockSpec((1, 8), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
        **options,
    )


@case(
    inputs=lambda rng: (
        normal(rng, 16, 32, dtype=ml_dtypes.float8_e4m3fn),
        normal(rng, 32, 16, dtype=ml_dtypes.float8_e5m2),
    ),
    expect=lambda a, b: a @ b,
    rtol=1e-5,
    atol=1e-5,
    tags="prim:dot dtype:float8_e4m3fn dtype:float8_e5m2 grid:absent",
)
def matmul_f8(pl, pltpu, **options):
    def kernel(a_ref, b_ref, o_ref):
        a, b = a_ref[...].astype(jnp.bfloat16), b_ref[...].astype(jnp.bfloat16)
        o_ref[...] = jnp.dot(a, b, preferred_element_type=jnp.float32)

    return pl.pallas_call(kernel, sds((16, 16)), **options)


@case(
    inputs=lambda rng: (
        np.array([0, 2, 2, 1, 0], "int32"),
        normal(rng, 40, 16),
        normal(rng, 3, 16, 24),
    ),
    expect=lambda g, x, w: np.concatenate([x[8 * i : 8 * i + 8] @ w[g[i]] for i in range(5)]),
    rtol=1e-5,
    atol=1e-5,
    tags="prefetch block:none grid:2d prim:dot",
)
def matmul_grouped(pl, pltpu, **options):
    """Mixture of experts: a prefetched table says which expert's weights a row block multiplies."""

    def kernel(g_ref, x_ref, w_ref, o_ref):
        del g_ref
        o_ref[...] = x_ref[...] @ w_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(5, 2),
        in_specs=[
            pl.BlockSpec((8, 16), lambda i, j, g: (i, 0)),
            pl.BlockSpec((None, 16, 12), lambda i, j, g: (g[i], 0, j)),
        ],
        out_specs=pl.BlockSpec((8, 12), lambda i, j, g: (i, j)),
    )
    return pl.pallas_call(kernel, sds((40, 24)), grid_spec=grid_spec, **options)
