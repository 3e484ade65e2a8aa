"""The form of a call: nested operands and results, specs as prefixes, grid specs, printing, helpers."""

import jax
import numpy as np
from jax import lax

from .case import case, integers, normal, sds


@case(
    inputs=lambda rng: (
        {"w": normal(rng, 8, 4), "b": (normal(rng, 4), [normal(rng, 8, 4)])},
        normal(rng, 8, 4),
    ),
    expect=lambda p, x: {"sum": p["w"] + x, "parts": (x - p["b"][1][0], [p["b"][0] * 2])},
    tags="tree block:int grid:1d grid:constant",
)
def nested_operands(pl, pltpu, **options):
    """Operands, results and specs as dicts and tuples; the kernel sees the same nesting of Refs."""

    def kernel(p, x_ref, o):
        o["sum"][...] = p["w"][...] + x_ref[...]
        o["parts"][0][...] = x_ref[...] - p["b"][1][0][...]
        o["parts"][1][0][...] = p["b"][0][...] * 2

    row, vector = pl.BlockSpec((2, 4), lambda i: (i, 0)), pl.BlockSpec((4,), lambda i: (0,))
    return pl.pallas_call(
        kernel,
        {"sum": sds((8, 4)), "parts": (sds((8, 4)), [sds((4,))])},
        grid=(4,),
        in_specs=[{"w": row, "b": (vector, [row])}, row],
        out_specs={"sum": row, "parts": (row, [vector])},
        **options,
    )


@case(
    inputs=lambda rng: (
        {"a": normal(rng, 6, 4), "b": (normal(rng, 6, 4), normal(rng, 6, 4))},
        normal(rng, 6, 4),
    ),
    expect=lambda p, x: (p["a"] + x, {"u": p["b"][0] + p["b"][1]}),
    tags="tree block:int grid:1d",
)
def specs_as_prefixes(pl, pltpu, **options):
    """One spec for a whole subtree of operands, and one for all results."""

    def kernel(p, x_ref, first_ref, rest):
        first_ref[...] = p["a"][...] + x_ref[...]
        rest["u"][...] = p["b"][0][...] + p["b"][1][...]

    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (sds((6, 4)), {"u": sds((6, 4))}),
        grid=(3,),
        in_specs=[spec, spec],
        out_specs=spec,
        **options,
    )


@case(
    inputs=lambda rng: (normal(rng, 4, 4),),
    expect=lambda x: (x + 1, x - 1),
    tags="tree block:int grid:1d",
)
def result_list_is_a_tuple(pl, pltpu, **options):
    """An out_shape that is a list gives a tuple, as in JAX's Pallas."""

    def kernel(x_ref, a_ref, b_ref):
        a_ref[...] = x_ref[...] + 1
        b_ref[...] = x_ref[...] - 1

    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, [sds((4, 4)), sds((4, 4))], grid=(2,), in_specs=[spec], out_specs=[spec, spec], **options
    )


@case(
    inputs=lambda rng: (normal(rng, 8, 4), normal(rng, 8, 4)),
    expect=lambda x, y: x + x,
    tags="block:int grid:1d",
)
def same_and_unused_operands(pl, pltpu, **options):
    """One array as two operands, and an operand that the kernel never reads."""

    def kernel(x_ref, again_ref, unused_ref, o_ref):
        o_ref[...] = x_ref[...] + again_ref[...]

    spec = pl.BlockSpec((4, 4), lambda i: (i, 0))
    call = pl.pallas_call(kernel, sds((8, 4)), grid=(2,), in_specs=[spec, spec, spec], out_specs=spec, **options)
    return lambda x, y: call(x, x, y)


@case(
    inputs=lambda rng: (normal(rng, 8, 16),),
    expect=lambda x: x * 2 + 1,
    rtol=1e-6,
    tags="block:int grid:1d",
)
def grid_spec_object(pl, pltpu, **options):
    """pl.GridSpec; chained calls, the second on the first's result."""
    spec = pl.BlockSpec((4, 16), lambda i: (i, 0))
    grid_spec = pl.GridSpec(grid=(2,), in_specs=[spec], out_specs=spec)

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def increment(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    calls = [pl.pallas_call(k, sds((8, 16)), grid_spec=grid_spec, **options) for k in (double, increment)]
    return lambda x: calls[1](calls[0](x))


@case(
    inputs=lambda rng: (normal(rng, 8, 4),),
    expect=lambda x: x * 2,
    tags="alias block:int grid:1d",
)
def memory_from_empty(pl, pltpu, **options):
    """Arrays of pl.empty and pl.empty_like given for the result, and one in a kernel; all is overwritten."""

    def kernel(x_ref, spare_ref, o_ref):
        o_ref[...] = pl.empty((2, 4), x_ref.dtype)
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        sds((8, 4)),
        grid=(4,),
        in_specs=[spec, spec],
        out_specs=spec,
        input_output_aliases={1: 0},
        **options,
    )

    def twice(x):
        half = call(x, pl.empty((8, 4), x.dtype))
        return call(half / 2, pl.empty_like(half))

    return twice


@case(
    inputs=lambda rng: (normal(rng, 8, 6),),
    expect=lambda x: x + 1,
    tags="print block:int grid:2d control:when",
)
def printing(pl, pltpu, **options):
    """debug_print and jax.debug.print change nothing."""

    def kernel(x_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        pl.debug_print("program {} {}: {}", i, j, x_ref[0, 0])

        @pl.when(i == j)
        def _():
            jax.debug.print("diagonal {i}", i=i)

        o_ref[...] = x_ref[...] + 1

    spec = pl.BlockSpec((4, 3), lambda i, j: (i, j))
    return pl.pallas_call(kernel, sds((8, 6)), grid=(2, 2), in_specs=[spec], out_specs=spec, **options)


@case(
    inputs=lambda rng: (integers(rng, 8, low=0, high=100),),
    expect=lambda x: np.stack([x * 8 % 5 + 2, -(-x // 7), -(-x // 8) * 8, np.full(8, 16)]).astype("int32"),
    tags="dtype:int32 block:whole grid:absent",
)
def helpers(pl, pltpu, **options):
    """multiple_of, cdiv, align_to, next_power_of_2, strides_from_shape on traced and static numbers."""
    assert pl.next_power_of_2(9) == 16 and pl.cdiv(9, 4) == 3 and pl.align_to(9, 4) == 12
    assert tuple(pl.strides_from_shape((2, 3, 4))) == (12, 4, 1)

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[0] = pl.multiple_of(x * 8, 8) % 5 + 2
        o_ref[1] = pl.cdiv(x, 7)
        o_ref[2] = pl.align_to(x, 8)
        o_ref[3] = lax.full_like(x, pl.next_power_of_2(9))

    return pl.pallas_call(kernel, sds((4, 8), "int32"), **options)
