"""Calls, conditions and loops.

A loop's carried values are C++ variables; which layout a carried array has, is found by compiling the body once for
trial where the loop begins with a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.gpu import moves, unrolling
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.rules_shapes import joined
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat


def _call(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    return unit.run(eqn.params[jaxlink.CALLED[eqn.primitive]], values)


for _primitive in jaxlink.CALLED:
    RULES.rule(_primitive)(_call)


# --- places that several pieces of code assign to --------------------------------------------------------------------
def _like(unit: Unit, value: Any, wanted: str, start: bool) -> Any:
    """A variable (or registers) of a value's type and layout, with its value if `start`; Refs stay what they are."""
    if isinstance(value, Scalar):
        return unit.variable(value.dtype, value.text if start else None, wanted)
    if isinstance(value, Fragment):
        target = unit.registers(value.dtype, value.layout, wanted)
        return unit.fill(target, value.at_text) if start else target
    return value


def _assign(unit: Unit, target: Any, value: Any) -> None:
    if isinstance(target, Scalar):
        if target.text != value.text:
            unit.line(f"{target.text} = {value.text};")
    elif isinstance(target, Fragment):
        value = unit.fragment(value, target.layout)
        if (value.name, value.pick) != (target.name, target.pick):
            unit.fill(target, value.at_text)


def _assign_all(unit: Unit, targets: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign as if at once: values that another target's assignment would change are copied first."""
    names = {t.text if isinstance(t, Scalar) else t.name for t in targets if isinstance(t, (Scalar, Fragment))}
    ready = []
    for target, value in zip(targets, values):
        if isinstance(value, Rearranged):
            value = unit.fragment(value, target.layout)
        own = target.text if isinstance(target, Scalar) else getattr(target, "name", None)
        if isinstance(value, Scalar) and value.text in names and value.text != own:
            value = unit.scalar(value.dtype, value.text, "next")
        elif isinstance(value, Fragment) and value.name in names and (value.name != own or value.pick is not None):
            value = unit.fill(unit.registers(value.dtype, value.layout, "next"), value.at_text)
        ready.append(value)
    for target, value in zip(targets, ready):
        _assign(unit, target, value)


def _placed(unit: Unit, value: Any, var: Any) -> Any:
    """An array without a layout as registers, in the variable's; other values as they are."""
    return unit.settled(value, var) if isinstance(value, (Splat, Rearranged)) else value


# --- conditions ------------------------------------------------------------------------------------------------------
@RULES.rule(lax.cond_p)
def _cond(unit: Unit, eqn: Any, which: Scalar, *operands: Any) -> list[Any]:
    branches = eqn.params["branches"]
    last = len(branches) - 1
    if which.value is not None:
        return unit.run(branches[min(max(int(which.value), 0), last)], operands)
    targets: list[Any] = []
    if eqn.outvars:
        with unit.trial():
            tried = [unit.run(branch, operands) for branch in branches]
        for k, var in enumerate(eqn.outvars):
            found = next((r[k] for r in tried if isinstance(r[k], Fragment)), None)
            if found is None and any(isinstance(r[k], Rearranged) for r in tried):
                one = next(r[k] for r in tried if isinstance(r[k], Rearranged))
                targets.append(unit.registers(one.dtype, unit.free_layout(var, [one])))
                continue
            if found is not None:
                targets.append(unit.registers(found.dtype, found.layout))
            elif var.aval.shape:
                targets.append(unit.registers(var.aval.dtype, unit.layout_for(var)))
            else:
                targets.append(unit.variable(var.aval.dtype, None))
    empty = [not b.eqns for b in branches]
    if last == 1 and not eqn.outvars and all(empty):
        return []
    if last == 1 and not eqn.outvars and empty[0]:
        with unit.block(f"if ({which.text})"):
            unit.run(branches[1], operands)
        return []
    for k, branch in enumerate(branches):
        if last == 0:
            head = ""
        elif k == 0:
            head = f"if ({which.text} == 0)" if last > 1 or which.kind.family != "bool" else f"if (!{which.text})"
            head = f"if ({which.text} <= 0)" if which.kind.family == "int" else head
        else:
            head = "else" if k == last else f"else if ({which.text} == {k})"
        with unit.block(head):
            results = unit.run(branch, operands)
            for target, value in zip(targets, results):
                _assign(unit, target, value)
    return targets


# --- loops -----------------------------------------------------------------------------------------------------------
def _carried(
    unit: Unit, variables: Sequence[Any], init: Sequence[Any], body: Any, wanted: Sequence[str] = ()
) -> list[Any]:
    """Variables for what a loop carries: the arrays among them in the layout that the body gives them."""
    placed = list(init)
    if any(isinstance(x, (Splat, Rearranged)) for x in init):
        with unit.trial():
            after = body([_placed(unit, x, v) for x, v in zip(init, variables)])
        for k, (x, out) in enumerate(zip(init, after)):
            if isinstance(x, (Splat, Rearranged)):
                placed[k] = (
                    unit.fragment(x, out.layout) if isinstance(out, Fragment) else _placed(unit, x, variables[k])
                )
    names = wanted or ["carry"] * len(placed)
    return [_like(unit, x, name, start=True) for x, name in zip(placed, names)]


@RULES.rule(lax.while_p)
def _while(unit: Unit, eqn: Any, *operands: Any) -> list[Any]:
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if cond.jaxpr.outvars[0].aval.shape if hasattr(cond, "jaxpr") else cond.outvars[0].aval.shape:
        raise unit.refuse("A batched while loop has a condition for each element.", "use a fori_loop with a mask")
    tests, given = operands[:n], operands[n:m]
    carry = _carried(unit, eqn.outvars, operands[m:], lambda c: unit.run(body, [*given, *c]))
    with unit.block("while (true)"):
        (go,) = unit.run(cond, [*tests, *carry])
        unit.line(f"if (!{go.text}) break;")
        _assign_all(unit, carry, unit.run(body, [*given, *carry]))
    return carry


@RULES.rule(lax.scan_p)
def _scan(unit: Unit, eqn: Any, *operands: Any) -> list[Any]:
    n_consts, n_carry = jaxlink.scan_counts(eqn)
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    consts, init, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
    if xs or len(eqn.outvars) > n_carry:
        return _unrolled(unit, eqn, consts, init, xs)
    inner = body.jaxpr if hasattr(body, "jaxpr") and not hasattr(body, "eqns") else body
    counter = _counter(inner, n_consts, n_carry, init)
    variables = list(eqn.outvars)
    rest = [k for k in range(n_carry) if k != counter]

    def step(carry: Sequence[Any], count: Any) -> list[Any]:
        full = list(carry)
        if counter is not None:
            full.insert(counter, count)
        outs = unit.run(body, [*consts, *full])
        return [outs[k] for k in rest]

    count = Scalar("step", np.dtype(np.int32))
    if counter is not None:
        count = Scalar("step", init[counter].dtype)
    names = _argument_names(inner, n_consts)
    wanted = [names[k] or "carry" for k in rest]
    carry = _carried(unit, [variables[k] for k in rest], [init[k] for k in rest], lambda c: step(c, count), wanted)
    name = unit.name(names[counter] if counter is not None and names[counter] else "step")
    unit.line(f"#pragma unroll {unrolling.times(inner, length, eqn.params.get('unroll', 1))}")
    first, end, c = "0", str(length), kind(count.dtype).c
    if counter is not None:
        start = init[counter]
        first = start.text
        end = f"{first} + {length}" if start.value is None else str(int(start.value) + length)
    with unit.block(f"for ({c} {name} = {first}; {name} < {end}; ++{name})"):
        _assign_all(unit, carry, step(carry, Scalar(name, count.dtype)))
    out = list(carry)
    if counter is not None:
        out.insert(counter, Scalar(end if end.isdigit() else f"({end})", count.dtype))
    return out


def _argument_names(body: Any, first: int) -> list[str]:
    """What the user calls the arguments of a loop's body, from number `first` on; "" where nothing tells."""
    count = len(body.invars) - first
    names = [str(n).split("[")[0] for n in getattr(body.debug_info, "arg_names", None) or ()]
    names = [n if n.isidentifier() and n != "_" else "" for n in names]
    return [""] * count if len(names) < count else names[len(names) - count :]


def _counter(body: Any, n_consts: int, n_carry: int, init: Sequence[Any]) -> int | None:
    """Which carried value only counts, one at a time: the index of a fori_loop."""
    for k in range(n_carry):
        var, out = body.invars[n_consts + k], body.outvars[k]
        if not isinstance(init[k], Scalar) or init[k].kind.family not in ("int", "uint"):
            continue
        for eqn in body.eqns:
            if out in eqn.outvars and eqn.primitive is lax.add_p and eqn.invars[0] is var:
                step = eqn.invars[1]
                if isinstance(step, jaxlink.Literal) and step.val == 1:
                    return k
    return None


def _unrolled(unit: Unit, eqn: Any, consts: Any, init: Any, xs: Any) -> list[Any]:
    """A scan over arrays: each step works on a part of them that only its own number tells, so that it is unrolled."""
    n_carry, length = len(init), eqn.params["length"]
    if length > 64:
        raise unit.refuse(
            f"A scan over arrays of {length} steps is not compiled.", "use lax.fori_loop over Refs: x_ref[i]"
        )
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)
    carry, results = list(init), {}
    for k in order:
        outs = unit.run(eqn.params["jaxpr"], [*consts, *carry, *[_row(unit, x, k) for x in xs]])
        carry = outs[:n_carry]
        results[k] = outs[n_carry:]
    stacked = [
        _stacked(unit, var, [results[k][j] for k in range(length)]) for j, var in enumerate(eqn.outvars[n_carry:])
    ]
    return [*carry, *stacked]


def _row(unit: Unit, x: Any, k: int) -> Any:
    shape = x.shape[1:]
    if isinstance(x, Splat):
        return Splat(x.text, x.dtype, shape, x.value) if shape else Scalar(x.text, x.dtype, x.value)
    size = int(np.prod(shape, dtype=np.int64))
    if not shape:
        return moves.element(unit, unit.settled(x), k)
    base, source = moves.as_rearranged(x)
    return Rearranged(base, shape, source[k * size : (k + 1) * size])


def _stacked(unit: Unit, var: Any, rows: Sequence[Any]) -> Any:
    return joined(unit, var, rows)
