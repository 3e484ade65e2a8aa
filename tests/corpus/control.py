"""Control flow inside a kernel, with Refs closed over and program ids at any depth."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import case, integers, sds


def _rows(pl, rows, columns):
    return pl.BlockSpec((rows, columns), lambda i: (i, 0))


def row_call(pl, kernel, shape, block, options, n_in=1, **more):
    """A call over row blocks of `block` rows, one kind of spec for all operands and the one result."""
    spec = _rows(pl, block, shape[1])
    grid = (pl.cdiv(shape[0], block),)
    return pl.pallas_call(kernel, sds(shape), grid=grid, in_specs=[spec] * n_in, out_specs=spec, **options, **more)


@case(
    inputs=lambda rng: (integers(rng, 8, 4, dtype="float32"),),
    expect=lambda x: x * np.repeat([1, 2, 6, 2], 2)[:, None] + 100,
    tags="control:when control:nested index:rmw block:int grid:1d",
)
def when_conditions(pl, pltpu, **options):
    """pl.when on Python bools, on program ids, nested, with program ids read inside."""

    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = x_ref[...]

        @pl.when(i > 0)
        def _():
            o_ref[...] *= 2

            @pl.when(pl.program_id(0) == 2)
            def _():
                o_ref[...] = o_ref[...] * (pl.program_id(0) + 1).astype(jnp.float32)

        @pl.when(False)
        def _():
            o_ref[...] = jnp.full_like(o_ref, jnp.nan)

        @pl.when(True)
        def _():
            o_ref[...] += 100

    return row_call(pl, kernel, (8, 4), 2, options)


@case(
    inputs=lambda rng: (np.array([[1], [-2], [3], [0]], "float32"),),
    expect=lambda x: np.where(x > 0, x * 2, 7 - x),
    tags="control:when index:int block:int grid:1d",
)
def when_on_data(pl, pltpu, **options):
    """pl.when on a value read from the block."""

    def kernel(x_ref, o_ref):
        x = x_ref[0, 0]

        @pl.when(x > 0)
        def _():
            o_ref[...] = x_ref[...] * 2

        @pl.when(jnp.logical_not(x > 0))
        def _():
            o_ref[...] = 7 - x_ref[...]

    return row_call(pl, kernel, (4, 1), 1, options)


@case(
    inputs=lambda rng: (integers(rng, 8, 4, dtype="float32"),),
    expect=lambda x: np.concatenate([x[:2] + 0, -x[2:4], x[4:6] + 2, -x[6:]]) + np.repeat([10, 0, 10, 0], 2)[:, None],
    tags="control:cond block:int grid:1d",
)
def cond_with_refs(pl, pltpu, **options):
    """Branches that read one Ref, write another, and give a value; the program id is read inside."""

    def kernel(x_ref, o_ref):
        def even():
            o_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.float32)
            return 10.0

        def odd():
            o_ref[...] = -x_ref[...]
            return 0.0

        offset = lax.cond(pl.program_id(0) % 2 == 0, even, odd)
        o_ref[...] += offset

    return row_call(pl, kernel, (8, 4), 2, options)


def _switched(x):
    b = x.reshape(6, 2, 4)
    return np.concatenate([b[0] + 1, b[1] * 2, -b[2], -b[3], 5 - b[4], -b[5]])


@case(
    inputs=lambda rng: (integers(rng, 12, 4, dtype="float32"),),
    expect=_switched,
    tags="control:switch block:int grid:1d",
)
def switch_on_program(pl, pltpu, **options):
    """Three branches; an index past the last takes the last."""

    def kernel(x_ref, o_ref):
        def put(value):
            o_ref[...] = value

        i = pl.program_id(0)
        branches = (lambda: put(x_ref[...] + 1), lambda: put(x_ref[...] * 2), lambda: put(-x_ref[...]))
        lax.switch(i, branches)

        @pl.when(i == 4)
        def _():
            o_ref[...] = lax.switch(i - 4, (lambda x: x + 5, lambda x: x), o_ref[...])

    return row_call(pl, kernel, (12, 4), 2, options)


@case(
    inputs=lambda rng: (integers(rng, 6, 5, dtype="float32"),),
    expect=lambda x: np.cumsum(x, 0),
    tags="control:fori index:dynamic index:int grid:absent",
)
def fori_rows(pl, pltpu, **options):
    """A loop with static bounds that carries a row and stores each state; unrolled as well."""

    def kernel(x_ref, o_ref):
        def body(i, acc):
            acc = acc + x_ref[i]
            o_ref[i] = acc
            return acc

        half = lax.fori_loop(0, 3, body, jnp.zeros((5,), jnp.float32))
        lax.fori_loop(3, 6, body, half, unroll=True)

    return pl.pallas_call(kernel, sds((6, 5)), **options)


@case(
    inputs=lambda rng: (integers(rng, 4, 8, dtype="float32"), np.array([0, 3, 8, 5], "int32")),
    expect=lambda x, n: np.stack([x[i, : n[i]].sum() * (i + 1) for i in range(4)])[:, None],
    tags="control:fori index:dynamic block:int block:smem grid:1d",
)
def fori_dynamic_bounds(pl, pltpu, **options):
    """Trip counts read from a Ref, zero among them; the program id is read in the body."""

    def kernel(x_ref, n_ref, o_ref):
        n = n_ref[pl.program_id(0)]

        def body(k, acc):
            return acc + x_ref[0, k] * (pl.program_id(0) + 1).astype(jnp.float32)

        o_ref[0, 0] = lax.fori_loop(0, n, body, jnp.float32(0))

    return pl.pallas_call(
        kernel,
        sds((4, 1)),
        grid=(4,),
        in_specs=[pl.BlockSpec((1, 8), lambda i: (i, 0)), pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=pl.BlockSpec((1, 1), lambda i: (i, 0)),
        **options,
    )


@case(
    inputs=lambda rng: (np.array([3, 10, 7, 1], "int32"),),
    expect=lambda x: np.array([[12, 10, 14, 8], [2, 0, 1, 3]], "int32"),
    tags="control:while index:int index:dynamic dtype:int32 grid:absent",
)
def while_condition_reads_written_ref(pl, pltpu, **options):
    """The condition reads what the body writes: double until at least 8, counting."""

    def kernel(x_ref, o_ref):
        def outer(k, _):
            o_ref[0, k] = x_ref[k]
            o_ref[1, k] = 0

            def body(n):
                o_ref[0, k] *= 2
                o_ref[1, k] += 1
                return n + 1

            lax.while_loop(lambda n: (o_ref[0, k] < 8) & (n < 50), body, 0)

        lax.fori_loop(0, 4, outer, None)

    return pl.pallas_call(kernel, sds((2, 4), "int32"), **options)


@case(
    inputs=lambda rng: (integers(rng, 3, 16, low=0, high=5), integers(rng, 3, 1, low=0, high=7)),
    expect=lambda x, y: np.array([[next((k for k in range(16) if x[i, k] == y[i, 0]), 16)] for i in range(3)], "int32"),
    tags="control:while index:dynamic dtype:int32 block:int grid:1d",
)
def while_search(pl, pltpu, **options):
    """A condition that reads a Ref at a carried index."""

    def kernel(x_ref, y_ref, o_ref):
        wanted = y_ref[0, 0]

        def going(k):
            return (k < 16) & (x_ref[0, jnp.minimum(k, 15)] != wanted)

        o_ref[0, 0] = lax.while_loop(going, lambda k: k + 1, 0)

    one = pl.BlockSpec((1, 1), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, sds((3, 1), "int32"), grid=(3,), in_specs=[_rows(pl, 1, 16), one], out_specs=one, **options
    )


@case(
    inputs=lambda rng: (integers(rng, 24, low=1, high=500), integers(rng, 24, low=1, high=500)),
    expect=lambda x, y: np.gcd(x, y),
    tags="control:while dtype:int32 block:int grid:1d",
)
def while_on_arrays(pl, pltpu, **options):
    """Euclid on a whole block at once: the loop runs until every lane is done."""

    def kernel(x_ref, y_ref, o_ref):
        def step(state):
            a, b = state
            safe = jnp.where(b == 0, 1, b)
            return jnp.where(b == 0, a, b), jnp.where(b == 0, 0, a % safe)

        a, _ = lax.while_loop(lambda state: jnp.any(state[1] != 0), step, (x_ref[...], y_ref[...]))
        o_ref[...] = a

    spec = pl.BlockSpec((8,), lambda i: (i,))
    return pl.pallas_call(kernel, sds((24,), "int32"), grid=(3,), in_specs=[spec, spec], out_specs=spec, **options)


def _scanned(x):
    forward = np.cumsum(x, 0)
    backward = np.cumsum(x[::-1], 0)[::-1]
    return forward[-1], forward, backward, np.repeat(np.arange(6.0), 4).reshape(6, 4) + x


@case(
    inputs=lambda rng: (integers(rng, 6, 4, dtype="float32"),),
    expect=_scanned,
    tags="control:scan index:dynamic grid:absent",
)
def scan_carried_and_stacked(pl, pltpu, **options):
    """Carried and stacked arrays, a reversed scan, and Refs read and written in the body."""

    def kernel(x_ref, last_ref, forward_ref, backward_ref, direct_ref):
        def step(carry, xs):
            i, x = xs
            direct_ref[i] = x_ref[i] + i.astype(jnp.float32)
            return carry + x, carry + x

        zero = jnp.zeros((4,), jnp.float32)
        last_ref[...], forward_ref[...] = lax.scan(step, zero, (jnp.arange(6), x_ref[...]))
        _, backward_ref[...] = lax.scan(lambda c, x: (c + x, c + x), zero, x_ref[...], reverse=True)

    return pl.pallas_call(kernel, (sds((4,)), sds((6, 4)), sds((6, 4)), sds((6, 4))), **options)


@case(
    inputs=lambda rng: (integers(rng, 9, 4, dtype="float32"),),
    expect=lambda x: (x * 2, np.where(np.arange(9)[:, None] % 2 == 1, x, 0), np.array([36], "int32")),
    tags="control:loop index:dynamic grid:absent",
)
def loop_decorator(pl, pltpu, **options):
    """pl.loop: plain, with a step, with a carry, with dynamic bounds."""

    def kernel(x_ref, o_ref, odd_ref, sum_ref):
        odd_ref[...] = jnp.zeros_like(odd_ref)

        @pl.loop(0, 9)
        def _(i):
            o_ref[i] = x_ref[i] * 2

        @pl.loop(1, 9, step=2)
        def _(i):
            odd_ref[i] = x_ref[i]

        @pl.loop(0, 9, init_carry=jnp.int32(0))
        def total(i, carry):
            return carry + i

        sum_ref[0] = jnp.asarray(total, jnp.int32)

    return pl.pallas_call(kernel, (sds((9, 4)), sds((9, 4)), sds((1,), "int32")), **options)


def _nested(x):
    out = np.zeros_like(x)
    for p in range(3):
        block, result = x[2 * p : 2 * p + 2], out[2 * p : 2 * p + 2]
        for r in range(2):
            for c in range(p + 2):
                if (r + c) % 2 == 0:
                    result[r, c] = block[r, c] + p
                else:
                    n, v = 0, block[r, c]
                    while n < c and v < 50:
                        v, n = v * 2, n + 1
                    result[r, c] = v
    return out


@case(
    inputs=lambda rng: (integers(rng, 6, 4, low=1, high=9, dtype="float32"),),
    expect=_nested,
    tags="control:nested control:fori control:cond control:while control:loop index:dynamic block:int",
)
def nested_control(pl, pltpu, **options):
    """A while in a cond in a fori in a loop, all on Refs, with bounds from the program id."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        @pl.loop(0, 2)
        def _(r):
            def column(c, _):
                def direct():
                    o_ref[r, c] = x_ref[r, c] + pl.program_id(0).astype(jnp.float32)

                def doubled():
                    o_ref[r, c] = x_ref[r, c]

                    def body(n):
                        o_ref[r, c] = o_ref[r, c] * 2
                        return n + 1

                    lax.while_loop(lambda n: (n < c) & (o_ref[r, c] < 50), body, 0)

                lax.cond((r + c) % 2 == 0, direct, doubled)

            lax.fori_loop(0, pl.program_id(0) + 2, column, None)

    return row_call(pl, kernel, (6, 4), 2, options)
