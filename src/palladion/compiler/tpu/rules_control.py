"""Conditions and loops, as `scf`. What is carried is a value each; masks are carried as `i32`, scalars of 16
bits as float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from palladion import jaxlink
from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import constant
from palladion.compiler.tpu.emit import RULES, Emitter
from palladion.compiler.tpu.kinds import Refusal, i32, is_bool, is_float, value_type
from palladion.compiler.tpu.rules_elementwise import widened
from palladion.compiler.tpu.rules_shapes import UNROLLED, pieces


def _packed(values: Sequence[ir.Value]) -> list[ir.Value]:
    return [build.as_words(x) if build.is_mask(x) else _wide(x) for x in values]


def _wide(x: ir.Value) -> ir.Value:
    if not _is_narrow(x.type):
        return x
    return arith.extf(ir.F32Type.get(), x)


def _is_narrow(kind: ir.Type) -> bool:
    """Whether it is a scalar float of fewer than 32 bits, which Mosaic carries nowhere."""
    return isinstance(kind, ir.FloatType) and not isinstance(kind, ir.F32Type)


def _unpacked(values: Sequence[ir.Value], avals: Sequence[Any]) -> list[ir.Value]:
    return [build.as_mask(x) if is_bool(a.dtype) else _narrow(x, a) for x, a in zip(values, avals)]


def _narrow(x: Any, aval: Any) -> Any:
    if aval.shape or not is_float(aval.dtype) or x.type == (kind := value_type(aval)):
        return x
    return arith.truncf(kind, x)


def _carried_type(aval: Any) -> ir.Type:
    kind = value_type(aval)
    if not is_bool(aval.dtype):
        return ir.F32Type.get() if _is_narrow(kind) else kind
    return ir.VectorType.get(kind.shape, i32()) if isinstance(kind, ir.VectorType) else i32()


# --- conditions -------------------------------------------------------------------------------------------------------
@RULES.rule(lax.cond_p)
def _cond(ev: Emitter, eqn, which, *args):
    branches, avals = eqn.params["branches"], [v.aval for v in eqn.outvars]
    atom = eqn.invars[0]
    if isinstance(atom, jaxlink.Literal):
        return ev.run(branches[min(max(int(atom.val), 0), len(branches) - 1)], args)
    if build.is_mask(which):
        which = build.as_words(which)
    which = widened(which, atom.aval.dtype) if not is_bool(atom.aval.dtype) else which
    return _unpacked(_branch(ev, which, branches, args, [_carried_type(a) for a in avals], 0), avals)


def _branch(ev: Emitter, which: ir.Value, branches: Sequence[Any], args: Any, kinds: list[ir.Type], n: int) -> list:
    """Branches n and up: the last one takes everything above it, as `lax.switch` clamps."""
    if n == len(branches) - 1:
        return _packed(ev.run(branches[n], args))
    compare = arith.CmpIPredicate.ne if n == 0 and len(branches) == 2 else arith.CmpIPredicate.sgt
    choice: Any = scf.IfOp(arith.cmpi(compare, which, constant(n)), kinds, has_else=True)
    with ir.InsertionPoint(choice.then_block):
        scf.YieldOp(_branch(ev, which, branches, args, kinds, n + 1))
    with ir.InsertionPoint(choice.else_block):
        scf.YieldOp(_packed(ev.run(branches[n], args)))
    return list(choice.results)


@RULES.rule(jaxlink.platform_index_p)
def _platform_index(ev: Emitter, eqn):
    platforms = eqn.params["platforms"]
    found = next((i for i, names in enumerate(platforms) if names is None or "tpu" in names), None)
    if found is None:
        raise Refusal("lax.platform_dependent has no branch for TPU.", "give it tpu=… or default=…")
    return constant(found)


# --- loops ------------------------------------------------------------------------------------------------------------
def loop(lower: Any, upper: Any, step: int, init: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]) -> list:
    """`scf.for` over `i32`: `body(i, *carry)` gives the next carry."""
    as_value = [build.as_i32(x) for x in (lower, upper, step)]
    op: Any = scf.ForOp(as_value[0], as_value[1], as_value[2], list(init))
    with ir.InsertionPoint(op.body):
        scf.YieldOp(list(body(op.induction_variable, *op.inner_iter_args)))
    return list(op.results)


@RULES.rule(lax.scan_p)
def _scan(ev: Emitter, eqn, *operands):
    params, (n_consts, n_carry) = eqn.params, jaxlink.scan_counts(eqn)
    consts, carry, xs = operands[:n_consts], operands[n_consts:][:n_carry], operands[n_consts + n_carry :]
    jaxpr, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    unroll = int(params["unroll"]) if params["unroll"] else 1
    if xs or len(jaxpr.outvars) > n_carry or unroll >= length:
        return _unrolled_scan(ev, eqn, consts, list(carry), xs)
    avals = [v.aval for v in jaxpr.outvars[:n_carry]]

    def rounds(count):
        def body(_, *packed):
            values = _unpacked(packed, avals)
            for _ in range(count):
                values = ev.run(jaxpr, [*consts, *values])
            return _packed(values)

        return body

    values = _packed(carry)
    if whole := length // unroll:
        values = loop(0, whole, 1, values, rounds(unroll))
    del reverse  # without xs and ys, rounds have no order of their own
    values = _unpacked(values, avals)
    for _ in range(length % unroll):
        values = ev.run(jaxpr, [*consts, *values])
    return values


def _unrolled_scan(ev: Emitter, eqn, consts, carry, xs) -> list[ir.Value]:
    """Rounds one after the other; what is scanned over is cut into its rows, what comes out is joined."""
    jaxpr, length, n = eqn.params["jaxpr"], eqn.params["length"], len(carry)
    if length > UNROLLED:
        raise Refusal(
            f"a scan over the rows of values, of {length} rounds, is more than is unrolled.",
            "loop with lax.fori_loop and read the Ref in each round: x_ref[pl.ds(i, 1)]",
        )
    rows = [pieces(x, 0, [1] * length) for x in xs]
    shapes = [tuple(v.aval.shape) for v in jaxpr.invars[len(consts) + n :]]
    results: list[list[ir.Value]] = [[] for _ in eqn.outvars[n:]]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)
    for i in order:
        here = [build.reshape(row[i], shape) for row, shape in zip(rows, shapes)]
        outs = ev.run(jaxpr, [*consts, *carry, *here])
        carry = outs[:n]
        for result, y in zip(results, outs[n:]):
            result.append(build.reshape(y, (1, *build.shape_of(y))))
    joined = [r[::-1] if eqn.params["reverse"] else r for r in results]
    return [*carry, *[build.concatenate(r, 0) for r in joined]]


@RULES.rule(lax.while_p)
def _while(ev: Emitter, eqn, *operands):
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    cond_jaxpr, body_jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if cond_jaxpr.outvars[0].aval.shape:
        raise ev.refuse(eqn, "a while loop with one condition for each element (vmap of a loop)")
    avals = [v.aval for v in eqn.outvars]
    if (counted := _counted(cond_jaxpr, body_jaxpr, n, m - n)) is not None:
        return _for(ev, counted, operands, n, m, cond_jaxpr, body_jaxpr, avals)
    kinds, places = [_carried_type(a) for a in avals], [ir.Location.unknown()] * len(avals)
    op = scf.WhileOp(kinds, _packed(operands[m:]))
    before = ir.Block.create_at_start(op.before, kinds, places)
    after = ir.Block.create_at_start(op.after, kinds, places)
    with ir.InsertionPoint(before):
        (go_on,) = ev.run(cond_jaxpr, [*operands[:n], *_unpacked(before.arguments, avals)])
        scf.ConditionOp(go_on, list(before.arguments))
    with ir.InsertionPoint(after):
        outs = ev.run(body_jaxpr, [*operands[n:m], *_unpacked(after.arguments, avals)])
        scf.YieldOp(_packed(outs))
    return _unpacked(op.results, avals)


def _counted(cond_jaxpr: Any, body_jaxpr: Any, n_cond: int, n_body: int) -> tuple[int, Any] | None:
    """For a loop as `fori_loop` makes it: which carry counts up by one, and what it is compared with (a carry's
    number, or a constant operand of the condition as `("const", number)`, or a literal)."""
    if len(cond_jaxpr.eqns) != 1 or cond_jaxpr.eqns[0].primitive is not lax.lt_p:
        return None
    test = cond_jaxpr.eqns[0]
    if test.outvars[0] is not cond_jaxpr.outvars[0] or isinstance(test.invars[0], jaxlink.Literal):
        return None
    carries = list(cond_jaxpr.invars[n_cond:])
    if test.invars[0] not in carries or str(test.invars[0].aval.dtype) != "int32":
        return None
    counter = carries.index(test.invars[0])
    bound = test.invars[1]
    if not isinstance(bound, jaxlink.Literal):
        if bound in carries:
            k = carries.index(bound)
            if body_jaxpr.outvars[k] is not body_jaxpr.invars[n_body + k]:
                return None
            bound = ("carry", k)
        else:
            bound = ("const", list(cond_jaxpr.invars).index(bound))
    step = next((e for e in body_jaxpr.eqns if e.outvars[0] is body_jaxpr.outvars[counter]), None)
    if step is None or step.primitive is not lax.add_p or step.invars[0] is not body_jaxpr.invars[n_body + counter]:
        return None
    if not isinstance(step.invars[1], jaxlink.Literal) or int(step.invars[1].val) != 1:
        return None
    return counter, bound


def _for(ev: Emitter, counted: Any, operands: Any, n: int, m: int, cond_jaxpr, body_jaxpr, avals) -> list[ir.Value]:
    counter, bound = counted
    init = list(operands[m:])
    if isinstance(bound, jaxlink.Literal):
        upper = constant(int(bound.val))
    else:
        upper = operands[bound[1]] if bound[0] == "const" else init[bound[1]]
    rest = [k for k in range(len(init)) if k != counter]
    some = [avals[k] for k in rest]

    def body(i, *packed):
        values = dict(zip(rest, _unpacked(packed, some)))
        outs = ev.run(body_jaxpr, [*operands[n:m], *[i if k == counter else values[k] for k in range(len(init))]])
        return _packed([outs[k] for k in rest])

    lower = init[counter]
    results = loop(lower, upper, 1, _packed([init[k] for k in rest]), body)
    found = dict(zip(rest, _unpacked(results, some)))
    found[counter] = arith.maxsi(lower, upper)
    return [found[k] for k in range(len(init))]
