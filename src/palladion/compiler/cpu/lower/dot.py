"""Matrix products and convolutions.

`dot_general` becomes batched matrix products on strided views where its operands already lie in memory that way, and
on copies otherwise. Narrow floats are accumulated in f32, small integers in int32. `o_ref[...] += dot(…)`, the heart
of a blocked product, accumulates straight into the Ref.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import convert, is_narrow_float, scalar_op
from palladion.compiler.cpu.lower.reduce import reduce_axes
from palladion.compiler.cpu.lower.refs import Ref
from palladion.compiler.cpu.lower.shapes import transpose
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering, derived, of_buffer, set_patterns

_INPUTS = tuple(map(jnp.dtype, (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, jnp.int32)))


def _accumulator(a: Any, b: Any, out: Any) -> Any:
    """The dtype in which products of `a` and `b` are summed."""
    if any(jnp.issubdtype(t, jnp.floating) for t in (a, b)):
        return jnp.dtype(jnp.float64) if jnp.float64 in (a, b, out) else jnp.dtype(jnp.float32)
    return jnp.dtype(out) if jnp.dtype(out).itemsize > 4 else jnp.dtype(jnp.int32)


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The one stride of several dimensions taken together in row-major order, if there is one."""
    dims = [(n, s) for n, s in zip(shape, strides) if n != 1]
    if not dims:
        return 0
    for (_, outer), (n, inner) in itertools.pairwise(dims):
        if outer != n * inner:
            return None
    return dims[-1][1]


def _view(ctx: Lowering, x: Lazy, groups: list[list[int]], dtype: Any) -> ir.View:
    """`x` as matrices: each group of dimensions becomes one, in place if its memory allows."""
    if x.affine is not None and x.dtype in _INPUTS:
        parts = [[(x.shape[d], x.affine.strides[d]) for d in g] for g in groups]
        strides = [_merged(tuple(n for n, _ in p), tuple(s for _, s in p)) for p in parts]
        if None not in strides:
            return ir.View(x.affine.buf, x.affine.base, tuple(s or 0 for s in strides))
    ordered = transpose(x, [d for g in groups for d in g])
    if x.dtype not in _INPUTS:
        wide = dtype
        ordered = derived(ordered.shape, wide, [ordered], lambda index, v=ordered: convert(v.at(index), wide), 1)
    buf = ctx.materialise(ordered, "packed", copy=True)
    sizes = [math.prod(x.shape[d] for d in g) for g in groups]
    return ir.View(buf, tuple(ir.index(0) for _ in buf.shape), ir.row_major(sizes))


def _groups(eqn, a: Lazy, b: Lazy):
    (a_contract, b_contract), (a_batch, b_batch) = eqn.params["dimension_numbers"]
    a_free = [d for d in range(len(a.shape)) if d not in (*a_contract, *a_batch)]
    b_free = [d for d in range(len(b.shape)) if d not in (*b_contract, *b_batch)]
    return [list(a_batch), a_free, list(a_contract)], [list(b_batch), list(b_contract), b_free]


def product(ctx: Lowering, eqn, a: Lazy, b: Lazy, out: ir.View, accumulate: bool) -> None:
    """Emit out (+)= a . b."""
    a_groups, b_groups = _groups(eqn, a, b)
    acc = out.buf.dtype
    sizes = [math.prod(a.shape[d] for d in g) for g in a_groups]
    n = math.prod(b.shape[d] for d in b_groups[2])
    a_view, b_view = _view(ctx, a, a_groups, acc), _view(ctx, b, b_groups, acc)
    ctx.emit(ir.MatMul(out, a_view, b_view, sizes[0], sizes[1], n, sizes[2], accumulate, (eqn,)))


@RULES.rule(lax.dot_general_p)
def _dot_general(ctx: Lowering, eqn, a: Lazy, b: Lazy) -> Lazy:
    dtype, shape = eqn.outvars[0].aval.dtype, eqn.outvars[0].aval.shape
    acc = _accumulator(a.dtype, b.dtype, dtype)
    a_groups, b_groups = _groups(eqn, a, b)
    if acc.itemsize > 4 and jnp.issubdtype(acc, jnp.integer):
        return _slow_product(ctx, a, b, a_groups, b_groups, shape, acc)
    out = ir.temp(shape, acc, "dot")
    batch, m, n = (math.prod(x.shape[d] for d in g) for x, g in ((a, a_groups[0]), (a, a_groups[1]), (b, b_groups[2])))
    view = ir.View(out, tuple(ir.index(0) for _ in shape), ir.row_major((batch, m, n)))
    product(ctx, eqn, a, b, view, accumulate=False)
    result = of_buffer(out)
    if acc == dtype:
        return result
    return derived(shape, dtype, [result], lambda index: convert(result.at(index), dtype), 1)


def _slow_product(ctx: Lowering, a: Lazy, b: Lazy, a_groups, b_groups, shape, acc) -> Lazy:
    """64-bit integers: a sum of products, element by element."""
    for x in (a, b):
        ctx.keep(x)
    left, right = (transpose(x, [d for g in gs for d in g]) for x, gs in ((a, a_groups), (b, b_groups)))
    n_batch, n_free, n_k = (len(g) for g in a_groups)
    full = (*shape, *left.shape[n_batch + n_free :])

    def at(index):
        batch, rest = index[:n_batch], index[n_batch:]
        free_a, free_b, k = rest[:n_free], rest[n_free : len(rest) - n_k], rest[len(rest) - n_k :]
        terms = (left.at((*batch, *free_a, *k)), right.at((*batch, *k, *free_b)))
        return scalar_op("mul", acc, *(convert(t, acc) for t in terms))

    products = derived(full, acc, [left, right], at, 1)
    return reduce_axes(ctx, "add", products, range(len(shape), len(full)), acc)


# --- accumulation into a Ref ----------------------------------------------------------------------------------------
def accumulations(jaxpr: Any) -> dict[int, tuple[int, int, int]]:
    """Where `ref[...] += dot(…)` stands: swap number -> numbers of its get, dot and add equations.

    The four equations must belong to each other alone, on the whole Ref, with no other use of the Ref between.
    """
    made_by = {v: k for k, e in enumerate(jaxpr.eqns) for v in e.outvars}
    uses: dict[Any, int] = {}
    for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars):
        for a in atoms:
            if not isinstance(a, jaxlink.Literal):
                uses[a] = uses.get(a, 0) + 1
    found = {}
    for k, swap in enumerate(jaxpr.eqns):
        if swap.primitive is not jaxlink.swap_p or len(swap.invars) != 2 or isinstance(swap.invars[1], jaxlink.Literal):
            continue
        ref, value = swap.invars
        add_k = made_by.get(value)
        if (
            (not isinstance(swap.outvars[0], jaxlink.DropVar) and uses.get(swap.outvars[0], 0))
            or add_k is None
            or jaxpr.eqns[add_k].primitive is not lax.add_p
        ):
            continue
        add = jaxpr.eqns[add_k]
        parts = {}
        for a in add.invars:
            if not isinstance(a, jaxlink.Literal) and a in made_by and uses[a] == 1:
                parts[jaxpr.eqns[made_by[a]].primitive] = made_by[a]
        get_k, dot_k = parts.get(jaxlink.get_p), parts.get(lax.dot_general_p)
        if get_k is None or dot_k is None or uses[value] != 1:
            continue
        get, dot = jaxpr.eqns[get_k], jaxpr.eqns[dot_k]
        plain = len(get.invars) == 1 and get.invars[0] is ref
        dtype = dot.outvars[0].aval.dtype
        left, right = (v.aval.dtype for v in dot.invars)
        fits = _accumulator(left, right, dtype) == dtype == ref.aval.dtype
        between = [e for j, e in enumerate(jaxpr.eqns[get_k + 1 : k], get_k + 1) if j not in (dot_k, add_k)]
        quiet = not any(v is ref for e in between for v in e.invars) and not any(map(jaxlink.written_vars, between))
        if plain and fits and quiet and not is_narrow_float(dtype):
            found[k] = (get_k, dot_k, add_k)
    return found


def accumulate(ctx: Lowering, eqn, ref: Ref, a: Lazy, b: Lazy) -> None:
    """ref[...] += dot(a, b)."""
    buf = ref.buf
    a_groups, _ = _groups(eqn, a, b)
    shape = buf.shape
    n_batch, n_m = len(a_groups[0]), len(a_groups[1])
    cuts = (shape[:n_batch], shape[n_batch : n_batch + n_m], shape[n_batch + n_m :])
    at = 0
    strides = []
    for part in cuts:
        strides.append(_merged(part, buf.strides[at : at + len(part)]))
        at += len(part)
    for x in (a, b):
        if buf.memory in x.memories:
            ctx.materialise(x, copy=True)
    ctx.before_write(buf)
    if None in strides or (jnp.issubdtype(buf.dtype, jnp.integer) and buf.dtype != jnp.int32):
        whole = of_buffer(buf)
        value = _dot_general(ctx, eqn, a, b)
        total = derived(
            shape,
            buf.dtype,
            [whole, value],
            lambda index: scalar_op("add", buf.dtype, whole.at(index), value.at(index)),
            1,
        )
        ctx.store(buf, shape, lambda index: index, total)
        return
    view = ir.View(buf, tuple(ir.index(0) for _ in shape), tuple(s or 0 for s in strides))
    product(ctx, eqn, a, b, view, accumulate=True)


set_patterns(accumulations, accumulate)


# --- convolution ----------------------------------------------------------------------------------------------------
@RULES.rule(lax.conv_general_dilated_p)
def _conv(ctx: Lowering, eqn, x: Lazy, kernel: Lazy) -> Lazy:
    """A direct sum over the window and the input features."""
    p, out = eqn.params, eqn.outvars[0].aval
    dn, groups = p["dimension_numbers"], p["feature_group_count"]
    if p["batch_group_count"] != 1 or jnp.issubdtype(out.dtype, jnp.complexfloating):
        raise RULES.unsupported(eqn)
    for v in (x, kernel):
        ctx.keep(v)
    n_space = len(p["window_strides"])
    features = kernel.shape[dn.rhs_spec[1]]
    per_group = out.shape[dn.out_spec[1]] // groups
    window = [kernel.shape[d] for d in dn.rhs_spec[2:]]
    full = (*out.shape, *window, features)
    acc = _accumulator(x.dtype, kernel.dtype, out.dtype)

    def at(index):
        place, taps, feature = index[: n_space + 2], index[n_space + 2 : -1], index[-1]
        channel = place[dn.out_spec[1]]
        lhs: list[Any] = [None] * (n_space + 2)
        rhs: list[Any] = [None] * (n_space + 2)
        lhs[dn.lhs_spec[0]] = place[dn.out_spec[0]]
        group = ir.Op(ir.INDEX, "div", (channel, ir.index(per_group))) if groups > 1 else ir.index(0)
        lhs[dn.lhs_spec[1]] = ir.add(ir.mul(group, features), feature)
        rhs[dn.rhs_spec[0]], rhs[dn.rhs_spec[1]] = channel, feature
        inside: ir.Expr = ir.Const(np.dtype(np.bool_), True)

        def both(a, b):
            return ir.Op(np.dtype(np.bool_), "and", (a, b))

        for d in range(n_space):
            size, step = x.shape[dn.lhs_spec[2 + d]], p["lhs_dilation"][d]
            position = ir.add(ir.mul(place[dn.out_spec[2 + d]], p["window_strides"][d]), -p["padding"][d][0])
            position = ir.add(position, ir.mul(taps[d], p["rhs_dilation"][d]))
            for name, bound in (("ge", 0), ("lt", (size - 1) * step + 1)):
                inside = both(inside, ir.Op(np.dtype(np.bool_), name, (position, ir.index(bound))))
            position = ir.Op(ir.INDEX, "clamp", (ir.index(0), position, ir.index(max((size - 1) * step, 0))))
            if step > 1:
                rest = ir.Op(ir.INDEX, "rem", (position, ir.index(step)))
                inside = both(inside, ir.Op(np.dtype(np.bool_), "eq", (rest, ir.index(0))))
                position = ir.Op(ir.INDEX, "div", (position, ir.index(step)))
            lhs[dn.lhs_spec[2 + d]], rhs[dn.rhs_spec[2 + d]] = position, taps[d]
        value = scalar_op("mul", acc, convert(x.at(tuple(lhs)), acc), convert(kernel.at(tuple(rhs)), acc))
        return ir.Op(acc, "select", (inside, value, ir.Const(acc, 0)))

    products = derived(full, acc, [x, kernel], at, 4)
    total = reduce_axes(ctx, "add", products, range(n_space + 2, len(full)), acc)
    return derived(out.shape, out.dtype, [total], lambda index: convert(total.at(index), out.dtype), 1)
