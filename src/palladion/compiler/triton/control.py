"""Rules: branches, loops and calls of functions.

Refs are pointers, so stores need no help. Cells (Refs in registers) that a branch or a round may write are carried
like values. `lax.fori_loop` becomes `scf.for`, which is what Triton pipelines, with bounds known at run time too; other
`while` loops become `scf.while`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import cast
from palladion.compiler.triton.lowering import RULES, Cell, Lowering, dtype_of, type_of
from palladion.compiler.triton.reductions import reduce_axes
from palladion.compiler.triton.refs import Ref
from palladion.compiler.triton.shapes import gathered
from palladion.language.triton.ops import APPROX_TANH


# --- calls ------------------------------------------------------------------------------------------------------------
@RULES.rule(jaxlink.jit_p)
def _jit(ctx: Lowering, eqn, *args) -> list[Any]:
    if eqn.params["name"] == APPROX_TANH and str(dtype_of(eqn.invars[0])) == "float32":
        (x,) = args
        return list(tt.ElementwiseInlineAsmOp([x.type], "tanh.approx.f32 $0, $1;", "=r,r", True, 1, [x]).results)
    return ctx.run(eqn.params["jaxpr"], args)


RULES.rule(jaxlink.remat_p)(lambda ctx, eqn, *args: ctx.run(eqn.params["jaxpr"], args))
RULES.rule(jaxlink.custom_jvp_call_p, jaxlink.custom_vjp_call_p)(
    lambda ctx, eqn, *args: ctx.run(eqn.params["call_jaxpr"], args)
)


@RULES.rule(jaxlink.platform_index_p)
def _platform_index(ctx: Lowering, eqn) -> Any:
    """Which branch of a `lax.platform_dependent` is for CUDA."""
    platforms = eqn.params["platforms"]
    fits = [k for k, names in enumerate(platforms) if names is not None and "cuda" in names]
    return emit.const((*fits, *(k for k, names in enumerate(platforms) if names is None))[0], jnp.int32)


# --- Cells and barriers across control flow ---------------------------------------------------------------------------
def _written_cells(eqn: Any, operands: Sequence[Any]) -> list[Cell]:
    written = jaxlink.written_vars(eqn)
    found = [v for var, v in zip(eqn.invars, operands) if isinstance(v, Cell) and var in written]
    return list({id(c): c for c in found}.values())


def _before_loop(ctx: Lowering, eqn: Any, operands: Sequence[Any]) -> None:
    """A round comes after another one: what a round reads or stores, the next must wait for."""
    written, touched = jaxlink.written_vars(eqn), jaxlink.written_vars(eqn) | jaxlink.read_vars(eqn)
    stored = {v.memory for var, v in zip(eqn.invars, operands) if isinstance(v, Ref) and var in written}
    for var, v in zip(eqn.invars, operands):
        if isinstance(v, Ref) and var in touched and v.memory in stored:
            ctx.pending[v.memory] = "written"


def _merged(states: Sequence[dict[Any, str]]) -> dict[Any, str]:
    result: dict[Any, str] = {}
    for state in states:
        for memory, done in state.items():
            result[memory] = done if result.get(memory) != "written" else "written"
    return result


def _placeholder(cell: Cell) -> Any:
    return emit.const(0, cell.dtype, cell.block) if cell.value is None else cell.value


# --- branches ---------------------------------------------------------------------------------------------------------
@RULES.rule(lax.cond_p)
def _cond(ctx: Lowering, eqn, which, *operands) -> list[Any]:
    branches = eqn.params["branches"]
    index = eqn.invars[0]
    if isinstance(index, jaxlink.Literal) or _is_constant(which):
        number = int(index.val) if isinstance(index, jaxlink.Literal) else _constant(which)
        return ctx.run(branches[min(max(number, 0), len(branches) - 1)], operands)
    which = cast(which, dtype_of(index), jnp.int32)
    return _switch(ctx, eqn, which, list(range(len(branches))), operands)


def _is_constant(v: Any) -> bool:
    return not isinstance(v.owner, ir.Block) and v.owner.name == "arith.constant"


def _constant(v: Any) -> int:
    return int(ir.IntegerAttr(v.owner.attributes["value"]).value)


def _switch(ctx: Lowering, eqn: Any, which: Any, numbers: list[int], operands: Sequence[Any]) -> list[Any]:
    """Nested ifs: the first half of the branches, or the rest."""
    if len(numbers) == 1:
        return ctx.run(eqn.params["branches"][numbers[0]], operands)
    half = len(numbers) // 2
    last = emit.full((), numbers[half], emit.scalar_type(which))
    condition = arith.cmpi(arith.CmpIPredicate.slt, which, last)
    cells = _written_cells(eqn, (which, *operands))
    before = [c.value for c in cells]
    kinds = [type_of(v.aval) for v in eqn.outvars]
    kinds += [emit.typed(c.block, emit.element_type(c.dtype)) for c in cells]
    op: Any = scf.IfOp(condition, kinds, has_else=True)
    after: list[list[Any]] = []
    states = []
    start = dict(ctx.pending)
    for block, part in ((op.then_block, numbers[:half]), (op.else_block, numbers[half:])):
        ctx.pending = dict(start)
        for c, value in zip(cells, before):
            c.value = value
        with ir.InsertionPoint(block):
            outs = _switch(ctx, eqn, which, part, operands)
            after.append([c.value for c in cells])
            scf.YieldOp([*outs, *(_placeholder(c) for c in cells)])
        states.append(ctx.pending)
    ctx.pending = _merged(states)
    n = len(eqn.outvars)
    for k, c in enumerate(cells):
        c.value = op.results[n + k] if all(values[k] is not None for values in after) else None
    return list(op.results)[:n]


# --- loops ------------------------------------------------------------------------------------------------------------
Body = Callable[[Any, list[Any]], list[Any]]  # (round, carry) -> carry


def _for(ctx: Lowering, eqn: Any, operands: Sequence[Any], bounds: Any, init: list[Any], body: Body, runs: bool) -> Any:
    """`scf.for` from bounds[0] to bounds[1]; `runs`: whether there is at least one round for certain."""
    cells = _written_cells(eqn, operands)
    before = [c.value for c in cells]
    _before_loop(ctx, eqn, operands)
    lower, upper = bounds
    start = dict(ctx.pending)
    op = scf.ForOp(lower, upper, emit.like(lower, 1), [*init, *(_placeholder(c) for c in cells)])
    with ir.InsertionPoint(op.body):
        inner = list(op.inner_iter_args)
        for c, value, old in zip(cells, inner[len(init) :], before):
            c.value = None if old is None else value
        outs = body(op.induction_variable, inner[: len(init)])
        filled = [c.value is not None for c in cells]
        scf.YieldOp([*outs, *(_placeholder(c) for c in cells)])
    ctx.pending = _merged([start, ctx.pending])
    results = list(op.results)
    for c, value, old, full in zip(cells, results[len(init) :], before, filled):
        c.value = value if full and (old is not None or runs) else None
    return results[: len(init)]


@RULES.rule(lax.scan_p)
def _scan(ctx: Lowering, eqn, *operands) -> list[Any]:
    params, (n_consts, n_carry) = eqn.params, jaxlink.scan_counts(eqn)
    jaxpr, m, length = params["jaxpr"], n_consts + n_carry, params["length"]
    consts, init, xs = list(operands[:n_consts]), list(operands[n_consts:m]), list(operands[m:])
    stacked = [v.aval for v in eqn.outvars[n_carry:]]
    if length == 0:
        return [*init, *(emit.const(0, a.dtype, a.shape) for a in stacked)]
    counter = _counter(jaxpr, n_consts, n_carry) if not params["reverse"] else None
    lower = emit.const(0, jnp.int32)
    ys = [emit.const(0, a.dtype, a.shape) for a in stacked]

    def body(i: Any, carry: list[Any]) -> list[Any]:
        state, made = carry[:n_carry], carry[n_carry:]
        if counter is not None:
            first = init[counter]
            at = cast(i, jnp.int32, jaxpr.invars[n_consts + counter].aval.dtype)
            state[counter] = at if _is_zero(first) else arith.addi(at, first)
        at = arith.subi(emit.like(i, length - 1), i) if params["reverse"] else i
        outs = ctx.run(jaxpr, [*consts, *state, *(_row(x, at) for x in xs)])
        made = [_with_row(y, at, row) for y, row in zip(made, outs[n_carry:])]
        return [*outs[:n_carry], *made]

    upper = emit.const(length, jnp.int32)
    results = _for(ctx, eqn, operands, (lower, upper), [*init, *ys], body, True)
    return results


def _is_zero(v: Any) -> bool:
    return _is_constant(v) and isinstance(v.type, ir.IntegerType) and _constant(v) == 0


def _counter(jaxpr: Any, n_consts: int, n_carry: int) -> int | None:
    """The carry that grows by one each round (that of `fori_loop`), or None."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for k in range(n_carry):
        v, out = jaxpr.invars[n_consts + k], jaxpr.outvars[k]
        eqn = None if isinstance(out, jaxlink.Literal) else made.get(out)
        if eqn is not None and _adds_one(eqn, v):
            return k
    return None


def _adds_one(eqn: Any, v: Any) -> bool:
    if eqn.primitive is not lax.add_p or v.aval.shape != () or not jnp.issubdtype(v.aval.dtype, jnp.integer):
        return False
    a, b = eqn.invars
    return a is v and isinstance(b, jaxlink.Literal) and int(b.val) == 1


def _row(x: Any, i: Any) -> Any:
    """x[i]: the row of a block at a run-time index."""
    return emit.reshape(gathered(x, 0, emit.broadcast(i, (1,))), emit.shape_of(x)[1:])


def _with_row(y: Any, i: Any, row: Any) -> Any:
    """`y` with row i replaced."""
    shape = emit.shape_of(y)
    here = arith.cmpi(arith.CmpIPredicate.eq, *emit.spread(emit.arange(shape[0], 0, len(shape)), i))
    row = emit.broadcast(emit.reshape(row, (1, *shape[1:])), shape)
    return emit.select(emit.broadcast(here, shape), row, y)


@RULES.rule(lax.while_p)
def _while(ctx: Lowering, eqn, *operands) -> list[Any]:
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    conditions, consts, init = list(operands[:n]), list(operands[n:m]), list(operands[m:])
    counted = _counted(eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"], n, m - n)
    if counted is not None:
        return _counted_loop(ctx, eqn, operands, counted, consts, init)
    cells = _written_cells(eqn, operands)
    before = [c.value for c in cells]
    _before_loop(ctx, eqn, operands)
    start = dict(ctx.pending)
    values = [*init, *(_placeholder(c) for c in cells)]
    kinds = [v.type for v in values]
    op = scf.WhileOp(kinds, values)
    body_jaxpr, cond_jaxpr = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    each = cond_jaxpr.outvars[0].aval.shape  # of conditions: vmap of a loop has one for each element
    with ir.InsertionPoint(op.before.blocks.append(*kinds)) as point:
        state = list(point.block.arguments)
        _enter(cells, before, state[len(init) :])
        (going,) = ctx.run(cond_jaxpr, [*conditions, *state[: len(init)]])
        go_on = reduce_axes(going, np.bool_, range(len(each)), lambda _, a, b: arith.ori(a, b)) if each else going
        scf.ConditionOp(go_on, state)
    with ir.InsertionPoint(op.after.blocks.append(*kinds)) as point:
        state = list(point.block.arguments)
        _enter(cells, before, state[len(init) :])
        outs = ctx.run(body_jaxpr, [*consts, *state[: len(init)]])
        if each:
            (going,) = ctx.run(cond_jaxpr, [*conditions, *state[: len(init)]])
            outs = [_where(going, new, old) for new, old in zip(outs, state)]
        scf.YieldOp([*outs, *(_placeholder(c) for c in cells)])
    ctx.pending = _merged([start, ctx.pending])
    results = list(op.results)
    for c, value, old in zip(cells, results[len(init) :], before):
        c.value = value if old is not None else None
    return results[: len(init)]


def _enter(cells: Sequence[Cell], before: Sequence[Any], values: Sequence[Any]) -> None:
    for c, old, value in zip(cells, before, values):
        c.value = None if old is None else value


def _where(going: Any, new: Any, old: Any) -> Any:
    """The elements of a carried value that go on take their new value, the others keep what they have."""
    shape = emit.shape_of(new)
    for d in range(len(emit.shape_of(going)), len(shape)):
        going = tt.expand_dims(going, d)
    return arith.select(emit.broadcast(going, shape), new, old)


def _counted(cond: Any, body: Any, n_cond: int, n_body: int) -> tuple[int, int, bool] | None:
    """Of a loop `while i < upper: i += 1`: which carry is i, and which (or which constant) is upper."""
    if len(cond.eqns) != 1 or cond.eqns[0].primitive is not lax.lt_p or cond.outvars[0] is not cond.eqns[0].outvars[0]:
        return None
    a, b = cond.eqns[0].invars
    if isinstance(a, jaxlink.Literal) or a not in cond.invars[n_cond:] or a.aval.shape != ():
        return None
    i = cond.invars[n_cond:].index(a)
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    out = body.outvars[i]
    eqn = None if isinstance(out, jaxlink.Literal) else made.get(out)
    if eqn is None or not _adds_one(eqn, body.invars[n_body + i]) or not emit.is_signed(a.aval.dtype):
        return None
    if emit.bits_of(a.aval.dtype) < 32:
        return None
    if isinstance(b, jaxlink.Literal):
        return i, int(b.val), False
    if b in cond.invars[n_cond:]:
        k = cond.invars[n_cond:].index(b)
        return (i, k, True) if body.outvars[k] is body.invars[n_body + k] else None
    return i, -1 - cond.invars.index(b), True


def _counted_loop(ctx: Lowering, eqn: Any, operands: Sequence[Any], counted: Any, consts: Any, init: Any) -> Any:
    i, bound, run_time = counted
    dtype = eqn.params["body_jaxpr"].invars[len(consts) + i].aval.dtype
    lower = init[i]
    if not run_time:
        upper = emit.const(bound, dtype)
    else:
        upper = init[bound] if bound >= 0 else operands[-1 - bound]

    def body(at: Any, carry: list[Any]) -> list[Any]:
        carry[i] = at
        outs = ctx.run(eqn.params["body_jaxpr"], [*consts, *carry])
        return outs

    return _for(ctx, eqn, operands, (lower, upper), list(init), body, False)
