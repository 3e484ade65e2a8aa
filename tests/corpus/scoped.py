"""Memory that a kernel allocates itself: run_scoped, nested and in loops; and run_state outside kernels."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import case, integers, normal, sds


@case(
    inputs=lambda rng: (integers(rng, 8, 4, dtype="float32"),),
    expect=lambda x: x * 2 + 1,
    tags="control:scoped block:int block:vmem grid:1d",
)
def scoped_temporary(pl, pltpu, **options):
    """Positional and keyword allocations; the Refs of the kernel are closed over."""

    def kernel(x_ref, o_ref):
        def body(tmp_ref, *, one_ref):
            tmp_ref[...] = x_ref[...] * 2
            one_ref[0] = 1.0
            o_ref[...] = tmp_ref[...] + one_ref[0]

        pl.run_scoped(body, pltpu.VMEM((2, 4), jnp.float32), one_ref=pltpu.SMEM((1,), jnp.float32))

    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds((8, 4)), grid=(4,), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"),),
    expect=lambda x: (x.sum(0) * 3, np.full((2, 4), np.nan)),
    tags="control:scoped control:nested control:fori uninit grid:absent",
)
def scoped_value(pl, pltpu, **options):
    """run_scoped gives back what its function gives; fresh memory reads NaN."""

    def kernel(x_ref, o_ref, fresh_ref):
        def total(acc_ref):
            acc_ref[...] = jnp.zeros_like(acc_ref)

            def row(i, _):
                acc_ref[...] += x_ref[i]

            lax.fori_loop(0, 6, row, None)
            return acc_ref[...] * 3

        o_ref[...] = pl.run_scoped(total, pltpu.VMEM((4,), jnp.float32))
        fresh_ref[...] = pl.run_scoped(lambda ref: ref[...], pltpu.VMEM((2, 4), jnp.float32))

    return pl.pallas_call(kernel, (sds((4,)), sds((2, 4))), **options)


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"),),
    expect=lambda x: x[::-1] + np.where(np.arange(6)[:, None] < 3, x, 0),
    tags="control:scoped control:nested control:fori control:when index:dynamic block:int grid:1d",
)
def scoped_nested_in_loop(pl, pltpu, **options):
    """A scope in a loop in a scope; the inner one sees the outer one's memory and the program id."""

    def kernel(x_ref, o_ref):
        def outer(copy_ref):
            copy_ref[...] = x_ref[...]

            def row(i, _):
                def inner(row_ref):
                    row_ref[...] = copy_ref[5 - i]

                    @pl.when(i < (pl.program_id(0) + 1) * 3)
                    def _():
                        row_ref[...] += copy_ref[i]

                    o_ref[i] = row_ref[...]

                pl.run_scoped(inner, pltpu.VMEM((4,), jnp.float32))

            lax.fori_loop(0, 6, row, None)

        pl.run_scoped(outer, pltpu.VMEM((6, 4), jnp.float32))

    spec = pl.BlockSpec((6, 4), lambda i: (0, 0))
    return pl.pallas_call(kernel, sds((6, 4)), grid=(1,), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"),),
    expect=lambda x: np.where(np.arange(6)[:, None] < 2, x, 3 * x),
    tags="control:scoped control:cond control:when block:int grid:1d",
)
def scoped_in_branches(pl, pltpu, **options):
    """Scopes inside a cond's branch and inside a when."""

    def kernel(x_ref, o_ref):
        def tripled():
            def body(tmp_ref):
                tmp_ref[...] = x_ref[...] * 2
                return tmp_ref[...] + x_ref[...]

            return pl.run_scoped(body, pltpu.VMEM((2, 4), jnp.float32))

        o_ref[...] = lax.cond(pl.program_id(0) > 0, tripled, lambda: x_ref[...])

        @pl.when(pl.program_id(0) == 1)
        def _():
            @pl.with_scoped(pltpu.VMEM((2, 4), jnp.float32))
            def _(tmp_ref):
                tmp_ref[...] = o_ref[...]
                o_ref[...] = tmp_ref[...]

    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds((6, 4)), grid=(3,), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (normal(rng, 8, 4), normal(rng, 8, 4)),
    expect=lambda x, y: (x + y, y, np.where(np.arange(8)[:, None] == 0, 1, x + y)),
    tags="control:state block:int grid:1d index:int",
)
def state_outside(pl, pltpu, **options):
    """run_state around a kernel call: Refs are read, handed to the call as values, and written."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((4, 4), lambda i: (i, 0))
    add = pl.pallas_call(kernel, sds((8, 4)), grid=(2,), in_specs=[spec, spec], out_specs=spec, **options)

    def body(refs):
        x_ref, y_ref, z_ref = refs
        x_ref[...] = add(x_ref[...], y_ref[...])
        z_ref[...] = x_ref[...]
        z_ref[0] = jnp.ones((4,), jnp.float32)

    return lambda x, y: pl.run_state(body)((jnp.asarray(x), jnp.asarray(y), jnp.zeros((8, 4), jnp.float32)))
