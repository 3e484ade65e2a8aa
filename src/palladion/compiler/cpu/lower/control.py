"""cond, while and scan: branches and loops whose carried values live in temporaries.

A value from outside is used inside through an isolated copy, so that what is computed within a branch or a round
stays there. Values outside that read a Ref which the branch or the body writes are computed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import convert
from palladion.compiler.cpu.lower.reduce import reduce_axes
from palladion.compiler.cpu.lower.refs import Ref
from palladion.compiler.cpu.lower.values import (
    RULES,
    Affine,
    Lazy,
    Lowering,
    as_index,
    clamp_index,
    derived,
    of_buffer,
    of_const,
    op,
)


def _settle(ctx: Lowering, eqn, operands: Sequence[Any], *, loop: bool) -> None:
    """Before a branch or loop: compute what its writes would disturb, and what each round would compute again."""
    written = jaxlink.written_vars(eqn)
    for var, value in zip(eqn.invars, operands):
        if isinstance(value, Ref) and var in written:
            ctx.before_write(value.buf)
    touched = {v.buf.memory for var, v in zip(eqn.invars, operands) if isinstance(v, Ref) and var in written}
    for value in operands:
        if isinstance(value, Lazy):
            if value.memories & touched:
                ctx.materialise(value, copy=True)
            elif loop:
                ctx.keep(value)


def _assign(ctx: Lowering, bufs: Sequence[ir.Buf], values: Sequence[Lazy]) -> None:
    """Store values in buffers that other values may still read: as if all at once."""
    for k, (buf, value) in enumerate(zip(bufs, values)):
        for later in values[k + 1 :]:
            if buf.memory in later.memories:
                ctx.materialise(later, copy=True)
        ctx.store(buf, buf.shape, lambda index: index, value)


def _temps(avals: Sequence[Any], name: str) -> list[ir.Buf]:
    return [ir.temp(a.shape, a.dtype, name) for a in avals]


@RULES.rule(lax.cond_p)
def _cond(ctx: Lowering, eqn, which: Lazy, *operands) -> list[Lazy]:
    branches = eqn.params["branches"]
    if isinstance(known := which.at(()), ir.Const):
        return ctx.run(branches[min(max(int(known.value), 0), len(branches) - 1)], operands)
    _settle(ctx, eqn, (which, *operands), loop=False)
    number = convert(ctx.scalar(which), np.int32)
    outs = _temps([v.aval for v in eqn.outvars], "chosen")
    blocks = []
    for jaxpr in branches:
        with ctx.nested() as block:
            _assign(ctx, outs, ctx.run(jaxpr, ctx.isolated(operands)))
        blocks.append(tuple(block))
    ctx.emit(ir.If(clamp_index(as_index(number), 0, len(branches) - 1), tuple(blocks)))
    return [of_buffer(b) for b in outs]


@RULES.rule(jaxlink.platform_index_p)
def _platform_index(ctx: Lowering, eqn) -> Lazy:
    """Which branch of a `lax.platform_dependent` is for this platform."""
    platforms = eqn.params["platforms"]
    fits = [k for k, names in enumerate(platforms) if names is not None and "cpu" in names]
    return of_const((*fits, *(k for k, names in enumerate(platforms) if names is None))[0], np.int32)


@RULES.rule(lax.while_p)
def _while(ctx: Lowering, eqn, *operands) -> list[Lazy]:
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    _settle(ctx, eqn, operands, loop=True)
    carry = _temps([v.aval for v in eqn.outvars], "carry")
    for buf, value in zip(carry, operands[m:]):
        ctx.fill(buf, value)
    each = eqn.params["cond_jaxpr"].outvars[0].aval.shape  # of conditions: vmap of a loop has one for each element
    go_on, going = ir.temp((), np.bool_, "go_on"), ir.temp(each, np.bool_, "going")
    with ctx.nested() as before:
        state = [of_buffer(b) for b in carry]
        (value,) = ctx.run(eqn.params["cond_jaxpr"], [*ctx.isolated(operands[:n]), *state])
        if each:
            ctx.fill(going, value)
            value = reduce_axes(ctx, "or", of_buffer(going), range(len(each)), np.bool_)
        ctx.fill(go_on, value)
    with ctx.nested() as body:
        state = [of_buffer(b) for b in carry]
        outs = ctx.run(eqn.params["body_jaxpr"], [*ctx.isolated(operands[n:m]), *state])
        if each:
            outs = [_where(of_buffer(going), new, of_buffer(old)) for new, old in zip(outs, carry)]
        _assign(ctx, carry, outs)
    ctx.emit(ir.While(tuple(before), ir.Load(go_on.dtype, go_on, ()), tuple(body)))
    return [of_buffer(b) for b in carry]


def _where(chosen: Lazy, new: Lazy, old: Lazy) -> Lazy:
    """The elements of a carried value that go on take their new value, the others keep what they have."""
    rank = len(chosen.shape)

    def at(index):
        return op("select", new.dtype, chosen.at(index[:rank]), new.at(index), old.at(index))

    return derived(new.shape, new.dtype, [chosen, new, old], at, 1)


@RULES.rule(lax.scan_p)
def _scan(ctx: Lowering, eqn, *operands) -> list[Lazy]:
    params, (n_consts, n_carry) = eqn.params, jaxlink.scan_counts(eqn)
    m, length = n_consts + n_carry, params["length"]
    _settle(ctx, eqn, operands, loop=True)
    avals = [v.aval for v in eqn.outvars]
    carry, ys = _temps(avals[:n_carry], "carry"), _temps(avals[n_carry:], "stacked")
    for buf, value in zip(carry, operands[n_consts:m]):
        ctx.fill(buf, value)
    if length:
        round_ = ir.new_var("round")
        with ctx.nested() as body:
            xs = [_row(x, round_) for x in operands[m:]]
            state = [of_buffer(b) for b in carry]
            outs = ctx.run(params["jaxpr"], [*ctx.isolated(operands[:n_consts]), *state, *xs])
            for buf, value in zip(ys, outs[n_carry:]):
                ctx.store(buf, value.shape, lambda index: (round_, *index), value)
            _assign(ctx, carry, outs[:n_carry])
        ctx.emit(ir.For(round_, length, tuple(body), ordered=True, reverse=params["reverse"], where=ctx.here))
    return [of_buffer(b) for b in (*carry, *ys)]


def _row(x: Lazy, i: ir.Expr) -> Lazy:
    """x[i]."""
    affine = None
    if x.affine is not None and x.affine.strides == x.affine.buf.strides:
        base = (ir.add(x.affine.base[0], i), *x.affine.base[1:])
        affine = Affine(x.affine.buf, base, x.affine.strides[1:])
    return derived(x.shape[1:], x.dtype, [x], lambda index: x.at((i, *index)), affine=affine)
