"""Arrays made of other arrays' elements: reshapes, transposes, broadcasts, slices, concatenations, gathers.

What is known when the kernel is compiled is a table of numbers (NumPy does the operation on the elements' numbers), and
becomes code only where the array meets a layout. What depends on run-time indices goes through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.compiler.gpu import moves
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.fragments import NOTHING
from palladion.compiler.gpu.spill import coordinates, read_back, registers_of, spilled, spilled_registers, strides_of
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat
from palladion.language import ops
from palladion.rules import present


def remade(unit: Unit, value: Any, shape: Sequence[int], function: Callable[[np.ndarray], np.ndarray]) -> Any:
    """The array that `function`, a rearrangement, makes of a value."""
    shape = tuple(shape)
    if isinstance(value, (Scalar, Splat)):
        return Splat(value.text, value.dtype, shape, value.value) if shape else Scalar(value.text, value.dtype)
    base, source = moves.as_rearranged(value)
    new = np.asarray(function(source.reshape(value.shape))).reshape(-1)
    if not shape:
        return moves.element(unit, base, int(new[0]))
    return Rearranged(base, shape, new)


def _rule(function: Callable[[Any, np.ndarray], np.ndarray]) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any, *_: Any) -> Any:
        return remade(unit, x, eqn.outvars[0].aval.shape, lambda a: function(eqn, a))

    return rule


def _broadcast(eqn: Any, a: np.ndarray) -> np.ndarray:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    placed = np.ones(len(shape), int)
    placed[list(dims)] = a.shape
    return np.broadcast_to(a.reshape(placed), shape)


def _slice(eqn: Any, a: np.ndarray) -> np.ndarray:
    p = eqn.params
    steps = p["strides"] or [1] * a.ndim
    return a[tuple(slice(s, e, t) for s, e, t in zip(p["start_indices"], p["limit_indices"], steps))]


def _as_shape(eqn: Any, a: np.ndarray) -> np.ndarray:
    return a.reshape(eqn.outvars[0].aval.shape)


for _primitive, _function in {
    lax.broadcast_in_dim_p: _broadcast,
    lax.reshape_p: _as_shape,
    lax.squeeze_p: _as_shape,
    lax.transpose_p: lambda eqn, a: a.transpose(eqn.params["permutation"]),
    lax.slice_p: _slice,
    lax.rev_p: lambda eqn, a: np.flip(a, eqn.params["dimensions"]),
    jaxlink.ref_broadcast_to_p: lambda eqn, a: np.broadcast_to(a, eqn.outvars[0].aval.shape),
}.items():
    RULES.rule(_primitive)(_rule(_function))


@RULES.rule(lax.split_p)
def _split(unit: Unit, eqn: Any, x: Any) -> list[Any]:
    ends = np.cumsum(eqn.params["sizes"])[:-1]
    return [
        remade(unit, x, v.aval.shape, lambda a, k=k: np.split(a, ends, eqn.params["axis"])[k])
        for k, v in enumerate(eqn.outvars)
    ]


@RULES.rule(lax.iota_p)
def _iota(unit: Unit, eqn: Any) -> Any:
    aval = eqn.outvars[0].aval
    shape, dim, of = tuple(aval.shape), eqn.params["dimension"], kind(aval.dtype)
    layout = unit.layout_for(eqn.outvars[0], None)
    result = unit.registers(aval.dtype, layout)
    if layout.flat:
        below = max(math.prod(shape[dim + 1 :]), 1)
        return unit.fill(result, lambda i: f"{of.c}(({moves.flat_text(layout, i)}) / {below} % {max(shape[dim], 1)})")
    return unit.fill(result, lambda i: f"{of.c}({layout.thread_index(dim)} + {layout.register_index(dim, i)})")


for _primitive in present("tile_p"):
    RULES.rule(_primitive)(_rule(lambda eqn, a: np.tile(a, eqn.params["reps"])))


@RULES.rule(*present("unstack_p"))
def _unstack(unit: Unit, eqn: Any, x: Any) -> list[Any]:
    axis = eqn.params["axis"]
    return [remade(unit, x, v.aval.shape, lambda a, k=k: np.take(a, k, axis)) for k, v in enumerate(eqn.outvars)]


# --- several operands ------------------------------------------------------------------------------------------------
def merged(unit: Unit, var: Any, parts: Sequence[tuple[Any, np.ndarray]]) -> Any:
    """An array that takes each element from one of several.

    Arguments:
      var: of the result.
      parts: arrays (or numbers), and for each element of the result which of theirs it is, or NOTHING; later ones win.
    """
    aval = var.aval
    given = [x for x, _ in parts if isinstance(x, Fragment)]
    layout = next((x.layout for x in given if x.layout.shape == tuple(aval.shape)), None) or unit.layout_for(var)
    result = unit.registers(aval.dtype, layout)
    numbers = np.where(layout.table == NOTHING, 0, layout.table)
    for x, source in parts:
        source = np.asarray(source, np.int64).reshape(-1)
        chosen = source[numbers] != NOTHING if source.size else np.zeros(layout.table.shape, bool)
        chosen &= layout.table != NOTHING
        if not chosen.any():
            continue
        if isinstance(x, (Scalar, Splat)):
            value = lambda i, x=x: x.text
        else:
            base, own = moves.as_rearranged(x)
            moved = moves.rearranged(unit, base, layout, np.where(source == NOTHING, NOTHING, own[source]))
            value = moved.at_text
        _where(unit, result, chosen | (layout.table == NOTHING), chosen, value)
    return result


def _where(unit: Unit, result: Fragment, loose: np.ndarray, chosen: np.ndarray, value: Callable[[str], str]) -> None:
    """Assign where `chosen`; where only `loose`, it does not matter."""
    count = result.layout.count
    if loose.all():
        unit.fill(result, value)
        return
    if (loose.all(0) | ~chosen.any(0)).all():  # whole registers
        for i in range(count):
            if loose[:, i].all():
                unit.line(f"{result.name}[{i}] = {value(str(i))};")
        return
    by_warp = chosen.reshape(4, 32, count)
    bits = [sum(int(by_warp[w, k, i]) << k for k in range(32)) for i in range(count) for w in range(4)]
    table = moves.constant_table(unit, np.array(bits, np.uint64), "u32", lambda b: f"{int(b)}u")
    unit.line("#pragma unroll")
    unit.line(f"for (int i = 0; i < {count}; ++i)")
    unit.line(f"  if ({table}[i * 4 + warp] >> lane & 1) {result.name}[i] = {value('i')};")


def joined(unit: Unit, var: Any, rows: Sequence[Any]) -> Any:
    """Arrays (or numbers) one after the other along a new first dimension."""
    size = math.prod(var.aval.shape[1:])
    parts = []
    for k, row in enumerate(rows):
        source = np.full((len(rows), size), NOTHING)
        source[k] = np.arange(size)
        parts.append((row, source))
    return merged(unit, var, parts)


@RULES.rule(lax.concatenate_p)
def _concatenate(unit: Unit, eqn: Any, *arrays: Any) -> Any:
    aval, axis, at, parts = eqn.outvars[0].aval, eqn.params["dimension"], 0, []
    for v, x in zip(eqn.invars, arrays):
        source = np.full(aval.shape, NOTHING)
        window = [slice(None)] * len(aval.shape)
        window[axis] = slice(at, at + v.aval.shape[axis])
        source[tuple(window)] = np.arange(math.prod(v.aval.shape)).reshape(v.aval.shape)
        at += v.aval.shape[axis]
        parts.append((x, source))
    return merged(unit, eqn.outvars[0], parts)


@RULES.rule(*present("stack_p"))
def _stack(unit: Unit, eqn: Any, *arrays: Any) -> Any:
    aval, axis, parts = eqn.outvars[0].aval, eqn.params["axis"], []
    for k, (v, x) in enumerate(zip(eqn.invars, arrays)):
        source = np.full(aval.shape, NOTHING)
        source[(slice(None),) * axis + (k,)] = np.arange(math.prod(v.aval.shape)).reshape(v.aval.shape)
        parts.append((x, source))
    return merged(unit, eqn.outvars[0], parts)


@RULES.rule(lax.pad_p)
def _pad(unit: Unit, eqn: Any, x: Any, padding: Any) -> Any:
    aval, given = eqn.outvars[0].aval, eqn.invars[0].aval
    source = np.full(aval.shape, NOTHING)
    numbers = np.arange(math.prod(given.shape)).reshape(given.shape)
    into, of = [], []
    for n, out, (low, _, inner) in zip(given.shape, aval.shape, eqn.params["padding_config"]):
        places = low + np.arange(n) * (inner + 1)
        inside = (places >= 0) & (places < out)
        into.append(places[inside])
        of.append(np.arange(n)[inside])
    if all(len(p) for p in into) or not into:
        source[np.ix_(*into)] = numbers[np.ix_(*of)] if into else numbers
    return merged(unit, eqn.outvars[0], [(padding, np.zeros(aval.shape, int)), (x, source)])


# --- run-time indices: through shared memory -------------------------------------------------------------------------
def _start(unit: Unit, index: Any, size: int, window: int) -> str:
    """A start that stays inside, as XLA clamps it."""
    if isinstance(index, Scalar) and index.value is not None:
        return str(min(max(int(index.value), 0), size - window))
    return f"min(max((int){index.text}, 0), {size - window})"


@RULES.rule(lax.dynamic_slice_p)
def _dynamic_slice(unit: Unit, eqn: Any, x: Any, *starts: Any) -> Any:
    before, aval = eqn.invars[0].aval, eqn.outvars[0].aval
    if isinstance(x, Scalar):
        return x
    if isinstance(x, Splat) or 0 in aval.shape:
        return Splat(getattr(x, "text", "0"), x.dtype, tuple(aval.shape))
    first = [_start(unit, s, n, w) for s, n, w in zip(starts, before.shape, aval.shape)]
    strides = strides_of(before.shape)
    offset = unit.scalar(np.int32, " + ".join(f"{f} * {s}" for f, s in zip(first, strides)) or "0", "start")
    (pointer,) = spilled(unit, (x, eqn.invars[0]))
    layout = unit.layout_for(eqn.outvars[0])
    result = unit.registers(aval.dtype, layout)
    index = coordinates(layout, strides)
    return unit.fill(result, lambda i: f"{pointer}[{offset.text} + {index(i)}]")


@RULES.rule(lax.dynamic_update_slice_p)
def _dynamic_update_slice(unit: Unit, eqn: Any, x: Any, update: Any, *starts: Any) -> Any:
    before, part = eqn.invars[0].aval, eqn.invars[1].aval
    first = [_start(unit, s, n, w) for s, n, w in zip(starts, before.shape, part.shape)]
    strides = strides_of(before.shape)
    offset = unit.scalar(np.int32, " + ".join(f"{f} * {s}" for f, s in zip(first, strides)) or "0", "start")
    if 0 in part.shape or 0 in before.shape:
        return x
    x, update = registers_of(unit, x, eqn.outvars[0]), registers_of(unit, update, eqn.invars[1])
    (pointer,) = spilled_registers(unit, x)
    index = coordinates(update.layout, strides)
    guard = moves.guard_text(update.layout)("i") if update.layout.padded else "true"
    unit.line("#pragma unroll")
    unit.line(
        f"for (int i = 0; i < {update.layout.count}; ++i) if ({guard}) "
        f"{pointer}[{offset.text} + {index('i')}] = {update.at('i')};"
    )
    unit.sync()
    return read_back(unit, pointer, x.dtype, x.layout)


RULES.rule(ops.multiple_of_p)(lambda unit, eqn, x: x)
