"""Reductions, and what else goes along a dimension: argmax, cumulative sums, sorting, small products.

A reduction takes three steps, each left out where it has nothing to do: over a thread's own registers, over the lanes
of a warp (by shuffles), over the warps (through shared memory). All threads end with the same result, which can be
broadcast again for free. Layouts that do not know dimensions (flat ones) go through shared memory, a result a thread.

Floats narrower than 32 bits are added up in float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.compiler.gpu import moves
from palladion.compiler.gpu.dtypes import Kind, constant, kind
from palladion.compiler.gpu.fragments import Digit, Fragments, default_layout
from palladion.compiler.gpu.rules_casts import cast_text
from palladion.compiler.gpu.rules_elementwise import add, bitwise, maximum, minimum, mul
from palladion.compiler.gpu.spill import coordinates, each_element, read_back, spilled, spilled_registers, strides_of
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment, Scalar, Splat
from palladion.rules import present

Combine = Callable[[Kind, str, str], str]


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if jnp.finfo(dtype).dtype != jnp.float8_e4m3fn else -448.0
    return False if dtype == np.bool_ else np.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf
    return True if dtype == np.bool_ else np.iinfo(dtype).max


# How two are combined, and what does not change a result.
REDUCTIONS: dict[Any, tuple[Combine, Callable[[Any], Any]]] = {
    lax.reduce_sum_p: (add, lambda dtype: 0),
    lax.reduce_prod_p: (mul, lambda dtype: 1),
    lax.reduce_max_p: (maximum, _lowest),
    lax.reduce_min_p: (minimum, _highest),
    lax.reduce_and_p: (bitwise("&"), lambda dtype: True if dtype == np.bool_ else -1),
    lax.reduce_or_p: (bitwise("|"), lambda dtype: False if dtype == np.bool_ else 0),
    lax.reduce_xor_p: (bitwise("^"), lambda dtype: False if dtype == np.bool_ else 0),
}


def held(dtype: Any) -> Any:
    """The dtype in which a reduction of a dtype is computed."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _reduction(primitive: Any) -> Callable:
    combine, identity = REDUCTIONS[primitive]

    def rule(unit: Unit, eqn: Any, x: Any) -> Any:
        aval, axes = eqn.outvars[0].aval, tuple(eqn.params["axes"])
        wide = held(aval.dtype)
        if not axes:
            return x
        start = constant(np.asarray(identity(wide)).astype(wide) if wide != np.bool_ else identity(wide), wide)
        if 0 in eqn.invars[0].aval.shape:
            text = constant(identity(aval.dtype), aval.dtype)
            return Splat(text, aval.dtype, tuple(aval.shape)) if aval.shape else Scalar(text, aval.dtype)
        x = unit.settled(x, eqn.invars[0])
        found = reduced(unit, x, axes, wide, combine, start, tuple(aval.shape))
        return narrowed(unit, found, wide, aval)

    return rule


for _primitive in REDUCTIONS:
    RULES.rule(_primitive)(_reduction(_primitive))


def narrowed(unit: Unit, found: Fragment, wide: Any, aval: Any) -> Any:
    """A result in its own dtype; one number as a scalar."""
    if not aval.shape:
        return unit.scalar(aval.dtype, cast_text(wide, aval.dtype, found.at(0)))
    if wide == aval.dtype:
        return found
    result = unit.registers(aval.dtype, found.layout)
    return unit.fill(result, lambda i: cast_text(wide, aval.dtype, found.at_text(i)))


def reduced(
    unit: Unit, x: Fragment, axes: Sequence[int], wide: Any, combine: Combine, start: str, shape: tuple[int, ...]
) -> Fragment:
    """An array reduced along axes, of dtype `wide`; every thread holds the results of its rows (or all of them)."""
    layout = x.layout
    of = kind(wide)
    if layout.flat and len(axes) == len(layout.shape):
        target, bits = Fragments((), (Digit(1, None),), (Digit(128, None),)), list(range(7))
        pick = [0] * layout.count
    else:
        target = layout.without(axes)
        if target is None:
            return _row_by_row(unit, x, axes, wide, combine, start, shape)
        bits = _thread_bits(layout, axes)
        pick = _places(layout, axes)
    result = unit.registers(wide, target)
    unit.fill(result, lambda i: start)
    unit.line("#pragma unroll")
    at = Fragment(result.name, result.dtype, target, tuple(pick)).at("i")
    value = cast_text(x.dtype, wide, x.at("i"))
    guard = f"if ({moves.guard_text(layout)('i')}) " if layout.padded else ""
    unit.line(f"for (int i = 0; i < {layout.count}; ++i) {guard}{at} = {combine(of, at, value)};")
    for bit in [b for b in bits if b < 5]:  # `combine` may use its operands twice, or not at all
        unit.line("#pragma unroll")
        with unit.block(f"for (int i = 0; i < {target.count}; ++i)"):
            other = unit.name("other")
            unit.line(f"const {of.c} {other} = shuffle_xor({result.name}[i], {1 << bit});")
            unit.line(f"{result.name}[i] = {combine(of, f'{result.name}[i]', other)};")
    across = [b - 5 for b in bits if b >= 5]
    if across:
        _across_warps(unit, result, across, combine)
    return result


def _places(layout: Fragments, axes: Sequence[int]) -> list[int]:
    """For each register, which register of the result it goes into."""
    found = []
    for i in range(layout.count):
        place, weight, rest = 0, 1, i
        for digit in reversed(layout.registers):
            value, rest = rest % digit.size, rest // digit.size
            if digit.dim is not None and digit.dim not in axes:
                place += value * weight
                weight *= digit.size
        found.append(place)
    return found


def _thread_bits(layout: Fragments, axes: Sequence[int]) -> list[int]:
    """Bits of the thread's number along which elements of one result lie, lowest first."""
    bits, low = [], 0
    for digit in reversed(layout.threads):
        n = digit.size.bit_length() - 1
        if digit.dim in axes:
            bits += range(low, low + n)
        low += n
    return bits


def _across_warps(unit: Unit, result: Fragment, bits: Sequence[int], combine: Combine) -> None:
    """Combine the partial results of warps whose numbers differ in these bits, in the same order everywhere."""
    if unit.warps != 4:
        raise unit.refuse("An array cannot be reduced in code of a single warp.", "reduce it in the whole thread")
    count, of = max(result.layout.count, 1), result.kind
    size = max(of.bits // 8, 1)
    scratch = moves.place_in_exchange(unit, count * 128 * size)
    pointer = f"(({of.c}*){scratch})"
    unit.line("#pragma unroll")
    unit.line(f"for (int i = 0; i < {count}; ++i) {pointer}[i * 128 + t] = {result.at('i')};")
    unit.sync()
    moves.in_use(unit, scratch, count * 128 * size)
    if list(bits) == [0, 1]:
        first, steps = "lane", [32, 64, 96]
    else:
        mask = 32 << bits[0]
        first, steps = f"(t & ~{mask})", [mask]
    unit.line("#pragma unroll")
    with unit.block(f"for (int i = 0; i < {count}; ++i)"):
        text = f"{pointer}[i * 128 + {first}]"
        unit.line(f"{result.at('i')} = {text};")
        for step in steps:
            unit.line(f"{result.at('i')} = {combine(of, result.at('i'), f'{pointer}[i * 128 + {first} + {step}]')};")


def _row_by_row(
    unit: Unit, x: Fragment, axes: Sequence[int], wide: Any, combine: Combine, start: str, shape: tuple[int, ...]
) -> Fragment:
    """Through shared memory: each thread makes whole results."""
    of, given = kind(wide), x.layout.shape
    strides = strides_of(given)
    kept = [d for d in range(len(given)) if d not in axes]
    (pointer,) = spilled_registers(unit, x)
    layout = default_layout(shape, wide, 1)
    result = unit.registers(wide, layout)
    index = coordinates(layout, [strides[d] for d in kept])
    with each_element(unit, layout) as i:
        base, total = unit.name("base"), unit.name("total")
        unit.line(f"{of.c} {total} = {start};")
        unit.line(f"const int {base} = {index(i)};")
        offset, depth = [base], 0
        for d in axes:
            unit.line("  " * depth + f"for (int k{d} = 0; k{d} < {given[d]}; ++k{d})")
            offset.append(f"k{d} * {strides[d]}")
            depth += 1
        element = cast_text(x.dtype, wide, f"{pointer}[{' + '.join(offset)}]")
        unit.line("  " * depth + f"{total} = {combine(of, total, element)};")
        unit.line(f"{result.at_text(i)} = {total};")
    return result


# --- argmax and argmin -----------------------------------------------------------------------------------------------
def _first_of(sign: str) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any) -> Any:
        (axis,), aval = eqn.params["axes"], eqn.outvars[0].aval
        given = eqn.invars[0].aval
        of = kind(given.dtype)
        wide = "float" if of.family == "float" and of.bits < 32 else of.c
        strides = strides_of(given.shape)
        kept = [s for d, s in enumerate(strides) if d != axis]
        (pointer,) = spilled(unit, (x, eqn.invars[0]))
        layout = default_layout(tuple(aval.shape), aval.dtype, 1)
        result = unit.registers(aval.dtype, layout)
        index = coordinates(layout, kept)
        with each_element(unit, layout) as i:
            base = unit.name("base")
            unit.line(f"const int {base} = {index(i)};")
            best, at, other = (unit.name(n) for n in ("best", "at", "other"))
            unit.line(f"{wide} {best} = {pointer}[{base}];")
            unit.line(f"int {at} = 0;")
            with unit.block(f"for (int k = 1; k < {given.shape[axis]}; ++k)"):
                unit.line(f"const {wide} {other} = {pointer}[{base} + k * {strides[axis]}];")
                better = f"{other} {sign} {best}"
                if of.family == "float":  # a NaN is better than all numbers
                    better = f"{better} || ({other} != {other} && {best} == {best})"
                unit.line(f"if ({better}) {{ {best} = {other}; {at} = k; }}")
            unit.line(f"{result.at_text(i)} = {at};")
        if not aval.shape:
            return unit.scalar(aval.dtype, result.at(0))
        return result

    return rule


RULES.rule(lax.argmax_p)(_first_of(">"))
RULES.rule(lax.argmin_p)(_first_of("<"))


# --- along a dimension, one after the other --------------------------------------------------------------------------
def _running(combine: Combine) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any) -> Any:
        aval, axis, back = eqn.outvars[0].aval, eqn.params["axis"], eqn.params["reverse"]
        of, wide = kind(aval.dtype), kind(held(aval.dtype))
        x = unit.settled(x, eqn.invars[0])
        shape = tuple(aval.shape)
        stride, n = math.prod(shape[axis + 1 :]), shape[axis]
        lines = math.prod(shape) // max(n, 1)
        (pointer,) = spilled_registers(unit, x)
        line, at, total = (unit.name(n) for n in ("line", "at", "total"))
        with unit.block(f"for (int {line} = t; {line} < {lines}; {line} += 128)"):
            unit.line(f"{of.c}* {at} = {pointer} + {line} / {stride} * {stride * n} + {line} % {stride};")
            first = n - 1 if back else 0
            unit.line(f"{wide.c} {total} = {at}[{first * stride}];")
            with unit.block(f"for (int k = 1; k < {n}; ++k)"):
                place = f"({n - 1} - k) * {stride}" if back else f"k * {stride}"
                value = cast_text(aval.dtype, held(aval.dtype), f"{at}[{place}]")
                unit.line(f"{total} = {combine(wide, total, value)};")
                unit.line(f"{at}[{place}] = {of.c}({total});")
        unit.sync()
        return read_back(unit, pointer, aval.dtype, x.layout)

    return rule


LOG_ADD_EXP = r"""
template <class T> __device__ __forceinline__ T log_add_exp(T x, T y) {
  const T top = maximum(x, y);
  return x == y ? x + (T)0.693147180559945309 : top == top ? top + log1p(exp(minimum(x, y) - top)) : top;
}
"""


def _log_add_exp(of: Kind, x: str, y: str) -> str:
    return f"log_add_exp({x}, {y})"


@RULES.rule(*present("cumlogsumexp_p"))
def _cumlogsumexp(unit: Unit, eqn: Any, x: Any) -> Any:
    unit.function("log_add_exp", LOG_ADD_EXP)
    return _running(_log_add_exp)(unit, eqn, x)


for _primitive, _combine in {
    lax.cumsum_p: add, lax.cumprod_p: mul, lax.cummax_p: maximum, lax.cummin_p: minimum,
}.items():  # fmt: skip
    RULES.rule(_primitive)(_running(_combine))


# --- products without tensor cores -----------------------------------------------------------------------------------
@RULES.rule(lax.dot_general_p)
def _dot_general(unit: Unit, eqn: Any, x: Any, y: Any) -> Any:
    """Each thread makes whole sums from operands in shared memory: right for every dtype and shape, and slow."""
    (cx, cy), (bx, by) = eqn.params["dimension_numbers"]
    a, b, aval = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    wide = held(aval.dtype)
    of = kind(wide)
    fx = [d for d in range(a.ndim) if d not in (*cx, *bx)]
    fy = [d for d in range(b.ndim) if d not in (*cy, *by)]
    sx, sy = strides_of(a.shape), strides_of(b.shape)
    if 0 in aval.shape or 0 in a.shape or 0 in b.shape:
        return Splat(constant(0, aval.dtype), aval.dtype, tuple(aval.shape))
    first, second = spilled(unit, (x, eqn.invars[0]), (y, eqn.invars[1]))
    layout = unit.layout_for(eqn.outvars[0])
    result = unit.registers(wide, layout)
    at_x = coordinates(layout, [sx[d] for d in bx] + [sx[d] for d in fx] + [0] * len(fy))
    at_y = coordinates(layout, [sy[d] for d in by] + [0] * len(fx) + [sy[d] for d in fy])
    with each_element(unit, layout) as i:
        row, column, total = (unit.name(n) for n in ("row", "column", "total"))
        unit.line(f"const int {row} = {at_x(i)}, {column} = {at_y(i)};")
        unit.line(f"{of.c} {total} = 0;")
        ox, oy = [row], [column]
        for k, (dx, dy) in enumerate(zip(cx, cy)):
            unit.line(f"for (int k{k} = 0; k{k} < {a.shape[dx]}; ++k{k})")
            ox.append(f"k{k} * {sx[dx]}")
            oy.append(f"k{k} * {sy[dy]}")
        p = cast_text(a.dtype, wide, f"{first}[{' + '.join(ox)}]")
        q = cast_text(b.dtype, wide, f"{second}[{' + '.join(oy)}]")
        unit.line(f"  {total} = {add(of, total, mul(of, p, q))};")
        unit.line(f"{result.at_text(i)} = {total};")
    return narrowed(unit, result, wide, aval)
