"""Sums over windows, convolutions, and reductions by a function of the user's: each thread makes whole results.

Right for every shape and dtype, without tensor cores, and slow; operands lie in the scratch in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from palladion.compiler.gpu.dtypes import constant, kind
from palladion.compiler.gpu.fragments import default_layout
from palladion.compiler.gpu.rules_casts import cast_text
from palladion.compiler.gpu.rules_elementwise import add, mul
from palladion.compiler.gpu.rules_reduce import REDUCTIONS, held, narrowed
from palladion.compiler.gpu.spill import coordinate, coordinates, each_element, spilled, strides_of
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar, Splat


# --- reductions by a function -----------------------------------------------------------------------------------------
@RULES.rule(lax.reduce_p)
def _reduce(unit: Unit, eqn: Any, *operands: Any) -> list[Any]:
    n = len(operands) // 2
    given, axes = eqn.invars[0].aval, eqn.params["dimensions"]
    kept = [d for d in range(given.ndim) if d not in axes]
    strides = strides_of(given.shape)

    def visit(base: str, step: Callable[[Sequence[str]], None], pointers: Sequence[str]) -> None:
        places, depth = [base], 0
        for d in axes:
            unit.line(f"for (int k{d} = 0; k{d} < {given.shape[d]}; ++k{d}) {{")
            unit.writer.depth += 1
            depth += 1
            places.append(f"k{d} * {strides[d]}")
        step([f"{p}[{' + '.join(places)}]" for p in pointers])
        for _ in range(depth):
            unit.writer.depth -= 1
            unit.line("}")

    return _by_function(unit, eqn, operands[:n], operands[n:], [strides[d] for d in kept], visit)


def _by_function(
    unit: Unit, eqn: Any, arrays: Sequence[Any], starts: Sequence[Any], strides: Sequence[int], visit: Callable
) -> list[Any]:
    """Results made by `eqn`'s jaxpr, from the elements that `visit` goes through.

    Arguments:
      strides: of the first element of each result, in the operand, along the dimensions of the result.
      visit: `visit(base, step, pointers)` writes a loop around `step(elements)`.
    """
    avals = [v.aval for v in eqn.outvars]
    if 0 in avals[0].shape or any(0 in v.aval.shape for v in eqn.invars[: len(arrays)]):
        return [Splat(x.text, x.dtype, tuple(a.shape)) if a.shape else x for x, a in zip(starts, avals)]
    pointers = spilled(unit, *zip(arrays, eqn.invars))
    layout = default_layout(tuple(avals[0].shape), avals[0].dtype, 1)
    results = [unit.registers(a.dtype, layout) for a in avals]
    consts = [unit.constant(c, c.dtype) for c in eqn.params.get("consts", ())]
    with each_element(unit, layout) as i:
        sums = [unit.variable(a.dtype, x.text, "total") for x, a in zip(starts, avals)]
        base = unit.name("base")
        unit.line(f"const int {base} = {coordinates(layout, strides)(i)};")

        def step(elements: Sequence[str]) -> None:
            new = [Scalar(e, a.dtype) for e, a in zip(elements, avals)]
            outs = unit.run(eqn.params["jaxpr"], [*consts, *sums, *new])
            ready = [unit.scalar(x.dtype, x.text, "next") for x in outs]
            for total, x in zip(sums, ready):
                unit.line(f"{total.text} = {x.text};")

        visit(base, step, pointers)
        for result, total in zip(results, sums):
            unit.line(f"{result.at_text(i)} = {total.text};")
    return [unit.scalar(r.dtype, r.at(0)) if not a.shape else r for r, a in zip(results, avals)]


# --- windows ---------------------------------------------------------------------------------------------------------
class _Window:
    """Loops over the elements of a window.

    Attributes:
      at: C++ of the place of the present one in the operand. inside: whether it is one of the operand's.
    """

    def __init__(self, unit: Unit, eqn: Any, shape: Sequence[int], index: Callable[[int], str]) -> None:
        p, parts, tests = eqn.params, [], []
        strides = strides_of(shape)
        self.unit = unit
        self.depth = len(shape)
        for d, n in enumerate(shape):
            k, place = unit.name("k"), unit.name("place")
            unit.line(f"for (int {k} = 0; {k} < {p['window_dimensions'][d]}; ++{k}) {{")
            unit.writer.depth += 1
            text = f"{index(d)} * {p['window_strides'][d]} - {p['padding'][d][0]} + {k} * {p['window_dilation'][d]}"
            gap = p["base_dilation"][d]
            if gap > 1:
                wide = unit.name("wide")
                unit.line(f"const int {wide} = {text};")
                tests += [f"{wide} >= 0", f"{wide} % {gap} == 0"]
                text = f"{wide} / {gap}"
            unit.line(f"const int {place} = {text};")
            tests += [f"{place} >= 0", f"{place} < {n}"]
            parts.append(f"{place} * {strides[d]}")
        self.at = " + ".join(parts) or "0"
        self.inside = " && ".join(tests) or "true"

    def close(self) -> None:
        """End the loops."""
        for _ in range(self.depth):
            self.unit.writer.depth -= 1
            self.unit.line("}")


def _windowed(primitive: Any) -> Callable:
    combine, identity = REDUCTIONS[primitive]

    def rule(unit: Unit, eqn: Any, x: Any) -> Any:
        aval, given = eqn.outvars[0].aval, eqn.invars[0].aval
        wide = held(aval.dtype)
        start = constant(identity(wide), wide)
        if 0 in given.shape or 0 in aval.shape:
            return Splat(constant(identity(aval.dtype), aval.dtype), aval.dtype, tuple(aval.shape))
        (pointer,) = spilled(unit, (x, eqn.invars[0]))
        layout = default_layout(tuple(aval.shape), wide, 1)
        result = unit.registers(wide, layout)
        with each_element(unit, layout) as i:
            total = unit.variable(wide, start, "total")
            window = _Window(unit, eqn, given.shape, lambda d: coordinate(layout, d, i))
            element = cast_text(given.dtype, wide, f"{pointer}[{window.at}]")
            unit.line(f"if ({window.inside}) {total.text} = {combine(kind(wide), total.text, element)};")
            window.close()
            unit.line(f"{result.at_text(i)} = {total.text};")
        return narrowed(unit, result, wide, aval)

    return rule


for _primitive, _reduction in {
    lax.reduce_window_sum_p: lax.reduce_sum_p,
    lax.reduce_window_max_p: lax.reduce_max_p,
    lax.reduce_window_min_p: lax.reduce_min_p,
}.items():
    RULES.rule(_primitive)(_windowed(_reduction))


@RULES.rule(lax.reduce_window_p)
def _reduce_window(unit: Unit, eqn: Any, *operands: Any) -> list[Any]:
    n, given = len(operands) // 2, eqn.invars[0].aval
    layout = default_layout(tuple(eqn.outvars[0].aval.shape), eqn.outvars[0].aval.dtype, 1)

    def visit(base: str, step: Callable[[Sequence[str]], None], pointers: Sequence[str]) -> None:
        window = _Window(unit, eqn, given.shape, lambda d: coordinate(layout, d, "i" if layout.count > 1 else "0"))
        inits = [Scalar(x.text, x.dtype) for x in operands[n:]]  # what lies around the operand
        step([f"({window.inside} ? {p}[{window.at}] : {x.text})" for p, x in zip(pointers, inits)])
        window.close()

    return _by_function(unit, eqn, operands[:n], operands[n:], [0] * given.ndim, visit)


# --- convolutions -----------------------------------------------------------------------------------------------------
@RULES.rule(lax.conv_general_dilated_p)
def _conv(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
    p, (a, b), aval = eqn.params, [v.aval for v in eqn.invars], eqn.outvars[0].aval
    if 0 in a.shape or 0 in b.shape or 0 in aval.shape:
        return Splat(constant(0, aval.dtype), aval.dtype, tuple(aval.shape))
    numbers, wide = p["dimension_numbers"], held(aval.dtype)
    (batch, feature, *space), (out_feature, in_feature, *window) = numbers.lhs_spec, numbers.rhs_spec
    to_batch, to_feature, *to_space = numbers.out_spec
    groups, batches = p["feature_group_count"], p["batch_group_count"]
    features, outputs = b.shape[in_feature], b.shape[out_feature]
    sx, sy = strides_of(a.shape), strides_of(b.shape)
    first, second = spilled(unit, (x, eqn.invars[0]), (y, eqn.invars[1]))
    layout = unit.layout_for(eqn.outvars[0], 1)
    result = unit.registers(wide, layout)
    of = kind(wide)
    with each_element(unit, layout) as i:
        at = lambda d: coordinate(layout, d, i)
        total = unit.variable(wide, constant(0, wide), "total")
        out = at(to_feature)
        group = f"{out} / {outputs // groups} * {features}"
        row = at(to_batch)
        if batches > 1:
            row = f"({out} / {outputs // batches} * {a.shape[batch] // batches} + {row})"
        places = [f"{row} * {sx[batch]}"]
        taps = [f"{out} * {sy[out_feature]}"]
        opened = 0
        for d, k, o, stride, (low, _), gap, step in zip(
            space, window, to_space, p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"]
        ):
            tap, wider, place = unit.name("k"), unit.name("wide"), unit.name("place")
            unit.line(f"for (int {tap} = 0; {tap} < {b.shape[k]}; ++{tap}) {{")
            unit.writer.depth += 1
            opened += 1
            unit.line(f"const int {wider} = {at(o)} * {stride} - {low} + {tap} * {step}, {place} = {wider} / {gap};")
            unit.line(f"if ({wider} < 0 || {wider} % {gap} || {place} >= {a.shape[d]}) continue;")
            places.append(f"{place} * {sx[d]}")
            taps.append(f"{tap} * {sy[k]}")
        f = unit.name("f")
        inner = f"{f}" if groups == 1 else f"({group} + {f})"
        q = f"{first}[{' + '.join([*places, f'{inner} * {sx[feature]}'])}]"
        r = f"{second}[{' + '.join([*taps, f'{f} * {sy[in_feature]}'])}]"
        product = mul(of, cast_text(a.dtype, wide, q), cast_text(b.dtype, wide, r))
        unit.line(f"for (int {f} = 0; {f} < {features}; ++{f}) {total.text} = {add(of, total.text, product)};")
        for _ in range(opened):
            unit.writer.depth -= 1
            unit.line("}")
        unit.line(f"{result.at_text(i)} = {total.text};")
    return narrowed(unit, result, wide, aval)
