"""Random kernels: native code agrees with the reference interpreter, and nothing crashes.

A program is drawn as data: array and block shapes (ragged, squeezed, element-indexed), a dtype, whether a result is
written in place of an operand, and a few steps. A step makes a block from earlier ones: an operation, then a way for
the result to go (a value, through scratch, a branch, a loop that carries it, a loop over rows of a Ref …). Numbers are
small integers, so that most arithmetic is exact in every dtype.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

NATIVE = dict(compiler_params=plcpu.CompilerParams())


@dataclasses.dataclass(frozen=True)
class Program:
    rows: int
    cols: int
    block: tuple[int, int]
    batch: int  # 0: no squeezed dimension in front
    element: tuple[int, int] | None  # padding of the first dimension of x, which is then indexed by elements
    dtype: str
    alias: bool
    accumulate: bool
    steps: tuple[tuple[str, int, int, str], ...]
    seed: int


def _rows_of(y, n):
    """Row numbers in range, made from values."""
    return jnp.abs(jnp.nan_to_num(y[:, 0].astype(jnp.float32))).astype(jnp.int32) % n


OPERATIONS = {
    "neg": lambda x, y: -x,
    "abs": lambda x, y: jnp.abs(x),
    "double": lambda x, y: x + x,
    "transpose twice": lambda x, y: (x.T + 1).T,
    "cumsum rows": lambda x, y: jnp.cumsum(x, axis=0),
    "cumsum columns": lambda x, y: lax.cumsum(x, axis=1, reverse=True),
    "cummax": lambda x, y: lax.cummax(x, axis=x.shape[0] % 2),
    "reverse": lambda x, y: x[::-1, :],
    "flip halves": lambda x, y: jnp.concatenate([x[x.shape[0] // 2 :], x[: x.shape[0] // 2]], axis=0),
    "roll": lambda x, y: jnp.roll(x, 1, axis=1),
    "pad and cut": lambda x, y: jnp.pad(x, ((1, 2), (0, 1)), constant_values=3)[1:-2, :-1],
    "sort rows": lambda x, y: jnp.sort(x, axis=1),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": lambda x, y: jnp.maximum(x, y),
    "min": lambda x, y: jnp.minimum(x, y),
    "where": lambda x, y: jnp.where(x < y, x, y),
    "row max": lambda x, y: jnp.maximum(x, jnp.max(y, axis=1, keepdims=True)),
    "column min": lambda x, y: jnp.minimum(x, jnp.min(y, axis=0, keepdims=True)),
    "row sum": lambda x, y: x + jnp.sum(y, axis=1, keepdims=True, dtype=y.dtype),
    "column sum": lambda x, y: x + jnp.sum(y, axis=0, dtype=y.dtype),
    "whole sum": lambda x, y: x - jnp.sum(y, dtype=y.dtype),
    "argmax": lambda x, y: x + jnp.argmax(y, axis=1, keepdims=True).astype(x.dtype),
    "gather rows": lambda x, y: jnp.take(x, _rows_of(y, x.shape[0]), axis=0),
    "gather fill": lambda x, y: jnp.take(x, _rows_of(y, 9), axis=0, mode="fill", fill_value=2),
    "scatter add": lambda x, y: x.at[_rows_of(y, x.shape[0])].add(y),
    "take along": lambda x, y: jnp.take_along_axis(x, jnp.argsort(y, axis=0), axis=0),
    "dot": lambda x, y: (_dot(_dot(x, y.T), x)).astype(x.dtype),
    "matvec": lambda x, y: x + _dot(x, y[0])[:, None].astype(x.dtype),
    "convert": lambda x, y: x.astype(jnp.int32).astype(jnp.float32).astype(x.dtype),
    "double vmap": lambda x, y: jax.vmap(lambda r, s: r + jnp.max(s))(x, y),
}


def _dot(x, y):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)
    return jnp.dot(x.astype(jnp.int8), y.astype(jnp.int8), preferred_element_type=jnp.int32).astype(x.dtype)


WAYS = ["value", "scratch", "branch", "fori", "fori of rows", "while", "scan", "dynamic rows", "each row", "strided"]
# XLA reorders or refuses these on narrow types; bf16 keeps more precision inside XLA's fusions than the type has.
_SUMS = {"cumsum rows", "cumsum columns", "row sum", "column sum", "whole sum"}
_EXCLUDED = {
    "int4": _SUMS | {"argmax", "sort rows", "take along", "cummax", "abs", "gather fill"},
    "bfloat16": {"where", "sort rows", "argmax", "take along", "gather rows", "gather fill", "scatter add", "dot"}
    | {"convert"},
    "bool": _SUMS
    | {"neg", "sub", "abs", "double", "transpose twice", "sort rows", "pad and cut", "argmax", "cummax"}
    | {"gather fill", "scatter add", "dot", "matvec", "convert"},
}


def go(way, value, o_ref, s_ref, n):
    """A value by one of the ways: the same value, but for what a branch or a loop adds to it."""
    one = jnp.ones((), value.dtype)
    plus = (lambda v: v | one) if value.dtype == bool else (lambda v: v + one)
    if way == "scratch":
        s_ref[...] = value
        return s_ref[...]
    if way == "branch":
        return lax.cond(pl.program_id(0) == 0, plus, lambda v: v, value)
    if way == "fori":
        return lax.fori_loop(0, 3, lambda i, v: jnp.where(i < 2, plus(v), v), value)
    if way == "fori of rows":

        def row(i, total):
            s_ref[i] = value[i] if total is None else plus(s_ref[i])
            return jnp.maximum(total, s_ref[i])

        s_ref[...] = value
        top = lax.fori_loop(0, n, row, value[0])
        return jnp.maximum(s_ref[...], top)
    if way == "while":
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, plus(c[1])), (0, value))[1]
    if way == "scan":
        last, rows = lax.scan(lambda c, r: (jnp.minimum(c, r), jnp.maximum(c, r)), value[0], value)
        return jnp.minimum(rows, last)
    if way == "dynamic rows":
        s_ref[...] = value

        def swap(i, _):
            j = (i * 3 + pl.program_id(0)) % n
            a, b = s_ref[pl.ds(i, 1)], s_ref[pl.ds(j, 1)]
            s_ref[pl.ds(i, 1)] = b
            s_ref[pl.ds(j, 1)] = a

        lax.fori_loop(0, n, swap, None)
        return s_ref[...]
    if way == "each row":
        return jax.vmap(lambda r: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, plus(c[1])), (0, r))[1])(
            value
        )
    if way == "strided":
        s_ref[...] = value
        s_ref[::2] = plus(value[::2])
        return s_ref[...]
    return value


@st.composite
def programs(draw):
    rows, cols = draw(st.integers(1, 20)), draw(st.integers(1, 40))
    block = draw(st.integers(1, rows + 2)), draw(st.integers(1, cols + 3))
    dtype = draw(st.sampled_from(["float32", "float32", "int32", "int8", "bfloat16", "bool", "int4"]))
    names = [n for n in OPERATIONS if n not in _EXCLUDED.get(dtype, ())]
    step = st.tuples(st.sampled_from(names), st.integers(0, 6), st.integers(0, 6), st.sampled_from(WAYS))
    element = draw(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 2))))
    alias = draw(st.booleans())
    return Program(
        rows=rows,
        cols=cols,
        block=block,
        batch=draw(st.sampled_from([0, 0, 2])),
        element=None if alias else element,
        dtype=dtype,
        alias=alias,
        accumulate=draw(st.booleans()),
        steps=tuple(draw(st.lists(step, min_size=1, max_size=5))),
        seed=draw(st.integers(0, 2**31)),
    )


def call_of(p: Program, **how):
    """The program's kernel call."""

    def kernel(x_ref, y_ref, o_ref, s_ref, total_ref):
        values = [x_ref[...], y_ref[...]]
        for name, a, b, way in p.steps:
            value = OPERATIONS[name](values[a % len(values)], values[b % len(values)])
            values.append(go(way, value, o_ref, s_ref, p.block[0]))

        @pl.when(pl.program_id(0) + pl.program_id(1) == 0)
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        o_ref[...] = values[-1]
        if p.accumulate:  # in program order, through scratch that stays
            total_ref[...] = jnp.maximum(total_ref[...], values[-1])
            o_ref[...] = jnp.maximum(o_ref[...], total_ref[...])

    grid = (-(-p.rows // p.block[0]), -(-p.cols // p.block[1]))
    shape, block, at = (p.rows, p.cols), p.block, lambda i, j: (i, j)
    x_block, x_at = block, at
    if p.element is not None:
        x_block, x_at = (pl.Element(p.block[0], p.element), p.block[1]), lambda i, j: (i * p.block[0], j)
    if p.batch:
        grid, shape = (*grid, p.batch), (p.batch, *shape)
        squeeze = lambda blocks, f: ((None, *blocks), lambda i, j, k: (k, *f(i, j)))
        (x_block, x_at), (block, at) = squeeze(x_block, x_at), squeeze(block, at)
    spec = pl.BlockSpec(block, at)
    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(shape, p.dtype), grid=grid, in_specs=[pl.BlockSpec(x_block, x_at), spec],
        out_specs=spec, scratch_shapes=[pltpu.VMEM(p.block, p.dtype)] * 2,
        input_output_aliases={0: 0} if p.alias else {}, **how,
    ), shape  # fmt: skip


def fuzz(p: Program):
    native, shape = call_of(p, **NATIVE)
    reference, _ = call_of(p, interpret=True)
    data = np.random.default_rng(p.seed)
    low, high = (0, 2) if p.dtype == "bool" else (-4, 5)
    x, y = (jnp.asarray(data.integers(low, high, shape), jnp.int32).astype(p.dtype) for _ in range(2))
    got, want = (np.asarray(call(x, y)) for call in (native, reference))
    if not jnp.issubdtype(got.dtype, jnp.floating):
        np.testing.assert_array_equal(got, want)
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    size = np.max(np.abs(want), where=np.isfinite(want), initial=1)
    tolerance = 2e-5 if p.dtype == "float32" else 4e-2
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * size)


SETTINGS = dict(
    deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, derandomize=True, database=None
)


@settings(max_examples=200, **SETTINGS)
@given(programs())
def test_random_kernels_agree_with_the_reference(program):
    fuzz(program)


@pytest.mark.slow
@settings(max_examples=2000, **SETTINGS)
@given(programs())
def test_two_thousand_random_kernels_agree_with_the_reference(program):
    fuzz(program)
