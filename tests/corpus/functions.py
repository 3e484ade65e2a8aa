"""Functions of functions inside a kernel: jit, vmap, map, grad, functions with their own derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import case, integers, normal, sds, uniform
from .control import row_call


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"),),
    expect=lambda x: x * 2 + np.repeat([0, 1, 2], 2)[:, None] + 1,
    tags="control:jit block:int grid:1d",
)
def jit_with_refs(pl, pltpu, **options):
    """Jitted functions in a kernel: one closes over Refs, one takes a Ref, both read the program id."""

    @jax.jit
    def add_id(value):
        return value + pl.program_id(0).astype(jnp.float32)

    @jax.jit
    def increment(ref):
        ref[...] += 1

    def kernel(x_ref, o_ref):
        @jax.jit
        def double():
            o_ref[...] = add_id(x_ref[...] * 2)

        double()
        increment(o_ref)

    return row_call(pl, kernel, (6, 4), 2, options)


@functools.partial(jax.jit, static_argnums=0)
def _jitted_helper(pl, x):
    return x * (pl.program_id(0) + 1).astype(jnp.float32) + jnp.float32(pl.num_programs(0))


@case(
    inputs=lambda rng: (integers(rng, 12, 4, dtype="float32"),),
    expect=lambda x: (
        x * np.repeat(np.arange(1, 4), 4)[:, None] + 3,
        x * np.repeat(np.arange(1, 7), 2)[:, None] + 6,
    ),
    tags="control:jit block:int grid:1d",
)
def jit_helper_in_two_grids(pl, pltpu, **options):
    """One jitted helper that reads id and count of programs, in two kernels of different grids."""

    def kernel(x_ref, o_ref):
        o_ref[...] = _jitted_helper(pl, x_ref[...])

    first, second = row_call(pl, kernel, (12, 4), 4, options), row_call(pl, kernel, (12, 4), 2, options)
    return lambda x: (first(x), second(x))


@jax.custom_jvp
def _safe_sqrt(x):
    return jnp.sqrt(jnp.maximum(x, 0.0))


@_safe_sqrt.defjvp
def _safe_sqrt_jvp(primals, tangents):
    y = _safe_sqrt(primals[0])
    return y, tangents[0] / jnp.maximum(y, 1e-6)


@jax.custom_vjp
def _scaled(x, s):
    return x * s


_scaled.defvjp(lambda x, s: (_scaled(x, s), (x, s)), lambda saved, g: (g * saved[1], jnp.sum(g * saved[0])))


@case(
    inputs=lambda rng: (normal(rng, 6, 4), uniform(rng, 6, 4)),
    expect=lambda x, y: np.sqrt(np.maximum(x, 0)) * 3 + np.tanh(y) + 2 * y,
    rtol=2e-6,
    atol=1e-6,
    tags="control:custom control:jit block:int grid:1d prim:math",
)
def custom_derivatives_inside(pl, pltpu, **options):
    """Functions with custom_jvp and custom_vjp, jax.checkpoint, and jax.grad of a function of values."""

    def kernel(x_ref, y_ref, o_ref):
        y = y_ref[...]
        value = _scaled(_safe_sqrt(x_ref[...]), 3.0)
        slope = jax.grad(lambda v: jnp.sum(v * v))(y)
        o_ref[...] = value + jax.checkpoint(jnp.tanh)(y) + slope

    return row_call(pl, kernel, (6, 4), 2, options, n_in=2)


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"), integers(rng, 4, dtype="float32")),
    expect=lambda x, w: (x @ w, np.cumsum(x, 1), x[[4, 2, 0]] * 2),
    tags="control:vmap index:dynamic grid:absent prim:dot",
)
def vmap_inside(pl, pltpu, **options):
    """vmap of functions of values, and of one that reads a Ref at a batched index."""

    def kernel(x_ref, w_ref, dot_ref, sum_ref, rows_ref):
        x, w = x_ref[...], w_ref[...]
        dot_ref[...] = jax.vmap(lambda row: jnp.dot(row, w))(x)
        sum_ref[...] = jax.vmap(jnp.cumsum)(x)
        rows_ref[...] = jax.vmap(lambda i: x_ref[i] * 2)(4 - jnp.arange(3) * 2)

    return pl.pallas_call(kernel, (sds((6,)), sds((6, 4)), sds((3, 4))), **options)


@case(
    inputs=lambda rng: (integers(rng, 5, 6, dtype="float32"),),
    expect=lambda x: (x[:, ::2] * 3, np.maximum.reduce(x, 0), x.sum()),
    tags="control:scan control:fori grid:absent prim:reduce",
)
def map_and_reduce(pl, pltpu, **options):
    """lax.map over rows, lax.reduce with a given function, a tree of values carried by fori_loop."""

    def kernel(x_ref, map_ref, max_ref, sum_ref):
        x = x_ref[...]
        map_ref[...] = lax.map(lambda row: row[::2] * 3, x)
        max_ref[...] = lax.reduce(x, -jnp.float32(jnp.inf), lax.max, (0,))

        def body(i, state):
            return {"n": state["n"] + 1, "sum": state["sum"] + jnp.sum(x_ref[state["n"]])}

        sum_ref[...] = lax.fori_loop(0, 5, body, {"n": 0, "sum": jnp.float32(0)})["sum"]

    return pl.pallas_call(kernel, (sds((5, 3)), sds((6,)), sds(())), **options)


@case(
    inputs=lambda rng: (integers(rng, 4, 3, dtype="float32"),),
    expect=lambda x: x + 1,
    tags="print block:int grid:1d control:when",
)
def checks_that_hold(pl, pltpu, **options):
    """debug_check of something true, a delay, and a named scope change nothing."""

    def kernel(x_ref, o_ref):
        pl.debug_check(pl.program_id(0) < 2, "the grid has two programs")
        pl.delay(10)
        with jax.named_scope("body"):
            o_ref[...] = x_ref[...] + 1

    return row_call(pl, kernel, (4, 3), 2, options)
