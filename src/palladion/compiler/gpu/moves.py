"""Arrays that change places: to another layout, or rearranged as a whole (transposes, slices, broadcasts).

All of them are one thing: a table says, for each element of the result, which element of the operand it is. Where every
thread holds what it needs, in the same register as all others, nothing is emitted: the result is the same C++ array,
its registers picked in another order. Otherwise the array goes through shared memory.

Not optimal: shuffles would do for many rearrangements within a warp; scratch in shared memory is not shared by moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.compiler.gpu import hazards
from palladion.compiler.gpu.dtypes import constant, kind
from palladion.compiler.gpu.fragments import NOTHING, Fragments, default_layout, local_map, replicated
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat


def to_layout(unit: Any, value: Fragment, layout: Fragments) -> Fragment:
    """The same array in another layout."""
    if value.layout == layout:
        return value
    return rearranged(unit, value, layout, np.arange(layout.size))


def _needed(layout: Fragments, source: np.ndarray) -> np.ndarray:
    """(128, count): which of the base's elements each register of a result in `layout` holds."""
    if not source.size:
        return np.full_like(layout.table, NOTHING)
    return np.where(layout.table == NOTHING, NOTHING, source[layout.table])


def as_rearranged(value: Fragment | Rearranged) -> tuple[Fragment, np.ndarray]:
    """An array as (base, source)."""
    if isinstance(value, Rearranged):
        return value.base, value.source
    return value, np.arange(value.layout.size)


def broadcast(value: Any, shape: tuple[int, ...]) -> Any:
    """An operand whose dimensions of size 1 are those of the other operands, as JAX's own broadcast takes them."""
    if isinstance(value, Scalar) or tuple(value.shape) == shape:
        return value
    if isinstance(value, Splat):
        return Splat(value.text, value.dtype, shape, value.value)
    base, source = as_rearranged(value)
    return Rearranged(base, shape, np.broadcast_to(source.reshape(value.shape), shape).reshape(-1))


def is_local(value: Rearranged, layout: Fragments) -> bool:
    """Whether every thread has what it needs of an array in a layout."""
    return local_map(value.base.layout, _needed(layout, value.source)) is not None


def same_order(value: Rearranged) -> Fragments | None:
    """The base's layout for an array that is the base with dimensions of size 1 put in or left out; None: it is not."""
    base, shape = value.base.layout, tuple(value.shape)
    if value.source.size != base.size or (value.source != np.arange(base.size)).any():
        return None
    if base.flat:
        return dataclasses.replace(base, shape=shape)
    own = [d for d, n in enumerate(shape) if n > 1]
    dims = [d for d, n in enumerate(base.shape) if n > 1]
    if not shape or [shape[d] for d in own] != [base.shape[d] for d in dims]:
        return None
    places = dict(zip(dims, own))
    return base.renumbered(shape, [places.get(d, 0) for d in range(len(base.shape))])


def usual_layout(value: Rearranged) -> Fragments:
    """A layout for an array that has none: the base's, if it fits and nothing has to move, or the strided one."""
    base = value.base.layout
    if (found := same_order(value)) is not None:
        return found
    if base.shape == tuple(value.shape) and is_local(value, base):
        return base
    return default_layout(tuple(value.shape), value.dtype)


def rearranged(unit: Any, value: Fragment, layout: Fragments, source: np.ndarray) -> Fragment:
    """An array made of another's elements.

    Arguments:
      unit: the unit.
      value: the other array.
      layout: of the result.
      source: for each element of the result, in row-major order, the row-major number of the operand's element, or
        NOTHING where any value will do.
    """
    source = np.asarray(source, np.int64).reshape(-1)
    found = local_map(value.layout, _needed(layout, source))
    if found is not None:
        pick = tuple(found if value.pick is None else (value.pick[r] for r in found))
        whole = pick == tuple(range(len(pick))) and layout.count == value.layout.count and value.pick is None
        return Fragment(value.name, value.dtype, layout, None if whole else pick)
    return _through_memory(unit, value, layout, source)


def _through_memory(unit: Any, value: Fragment, layout: Fragments, source: np.ndarray) -> Fragment:
    """Store an array in shared memory, row-major, and read what each thread needs."""
    if unit.warps != 4:
        raise unit.refuse(
            "An array cannot be rearranged in code of a single warp.", "arrays belong to the whole Pallas thread"
        )
    of = kind(value.dtype)
    size = max(of.bits // 8, 1)
    nbytes = value.layout.size * size
    scratch = place_in_exchange(unit, nbytes)
    store_flat(unit, value, scratch)
    unit.sync()
    in_use(unit, scratch, nbytes)
    result = unit.registers(value.dtype, layout)
    if not layout.size or not value.layout.size:
        return result
    index = _index_text(unit, layout, source)
    return unit.fill(result, lambda i: f"*({of.c}*)({scratch} + ({index(i)}) * {size})")


def element(unit: Any, value: Fragment, number: int) -> Scalar:
    """One element of an array as a scalar that all threads have."""
    one = rearranged(unit, value, replicated(()), np.array([number]))
    return Scalar(one.at(0), one.dtype)


def exchange_buffer(unit: Any, size: int) -> str:
    """C++ for the address (`char*`) of the thread's scratch of at least `size` bytes for moves and reductions."""
    key = "exchange"
    unit.tables.more[key] = max(unit.tables.more.get(key, 0), -(-size // 16) * 16)
    return "exchange"  # declared by `generate`, which places it when all sizes are known


def exchange_size(unit: Any) -> int:
    """Bytes of scratch so far."""
    return unit.tables.more.get("exchange", 0)


_USES = "exchange uses"
_SPARE = 16384  # bytes of scratch that may be spent so that fewer threads have to meet


def place_in_exchange(unit: Any, size: int, fixed: bool = False) -> str:
    """C++ for the address of scratch that nobody reads any more; the threads meet if need be.

    Arguments: size: in bytes. fixed: whether it has to be the beginning of the scratch.
    """
    start = hazards.last_meeting(unit.writer.lines)
    uses = unit.tables.more.get(_USES, ())
    since = [(a, b) for line, a, b in uses if start is None or line >= start]
    if start is None:  # the loop may have used the scratch in its last round
        at, meet = 0, True
    else:
        free = [a for a in sorted({0, *(-(-b // 16) * 16 for _, b in since)})
                if all(a + size <= x or y <= a for x, y in since)]  # fmt: skip
        fits = [a for a in free if a == 0 or (not fixed and a + size <= _SPARE)]
        at, meet = (fits[0], False) if fits else (0, bool(since))
    if meet:
        unit.sync()
    exchange_buffer(unit, at + size)
    return "exchange" if at == 0 else f"(exchange + {at})"


def in_use(unit: Any, address: str, size: int) -> None:
    """Note that scratch is read from here on, until the threads have met again."""
    at = int(address.strip("()").partition(" + ")[2] or 0)
    unit.tables.more[_USES] = (*unit.tables.more.get(_USES, ()), (len(unit.writer.lines), at, at + size))


def store_flat(unit: Any, value: Fragment, address: str) -> None:
    """Store an array at an address, row-major."""
    size = max(kind(value.dtype).bits // 8, 1)
    index = lambda i: flat_text(value.layout, i)
    c = value.kind.c
    i = "i" if value.layout.count > 1 else "0"
    body = f"*({c}*)({address} + ({index(i)}) * {size}) = {value.at_text(i)};"
    if value.layout.padded:
        body = f"if ({guard_text(value.layout)(i)}) {body}"
    if value.layout.count > 1:
        unit.line("#pragma unroll")
        body = f"for (int i = 0; i < {value.layout.count}; ++i) {body}"
    unit.line(body)


def guard_text(layout: Fragments) -> Callable[[str], str]:
    """C++ for whether register i holds an element (flat layouts with padding)."""
    return lambda i: f"{flat_text(layout, i)} < {layout.size}"


def flat_text(layout: Fragments, i: str) -> str:
    """C++ for the row-major number of the element in register i of thread t."""
    if layout.flat:
        dims, strides = [0], [1]
    else:
        dims = list(range(len(layout.shape)))
        strides = [math.prod(layout.shape[d + 1 :]) for d in dims]
    parts = []
    for d, stride in zip(dims, strides):
        for part in (layout.thread_index(d), layout.register_index(d, i)):
            if part != "0":
                parts.append(part if stride == 1 else f"({part}) * {stride}")
    return " + ".join(parts) or "0"


def _index_text(unit: Any, layout: Fragments, source: np.ndarray) -> Callable[[str], str]:
    """C++ for the operand's element that register i needs: affine in the result's coordinates, or a table."""
    bound = f"min({{0}}, {layout.size - 1})" if layout.padded and layout.size else "{0}"
    if source.size == 0 or (source == np.arange(source.size)).all():
        return lambda i: bound.format(flat_text(layout, i))
    shape = layout.shape
    if not layout.flat and shape and not (source == NOTHING).any():
        grid = source.reshape(shape)
        origin = int(grid.flat[0])
        strides = [int(grid[(0,) * d + (1,) + (0,) * (len(shape) - d - 1)]) - origin if n > 1 else 0
                   for d, n in enumerate(shape)]  # fmt: skip
        indices = np.indices(shape).reshape(len(shape), -1)
        if (np.tensordot(np.array(strides), indices, 1) + origin == source).all():

            def affine(i: str) -> str:
                parts = [str(origin)] if origin else []
                for d, stride in enumerate(strides):
                    for part in (layout.thread_index(d), layout.register_index(d, i)):
                        if part != "0" and stride:
                            parts.append(part if stride == 1 else f"({part}) * ({stride})")
                return " + ".join(parts) or "0"

            return affine
    table = constant_table(unit, np.where(source == NOTHING, 0, source), "int")
    return lambda i: f"{table}[{bound.format(flat_text(layout, i))}]"


def constant_table(unit: Any, numbers: np.ndarray, c: str, text: Callable[[Any], str] = str) -> str:
    """The name of a constant array in the generated source."""
    body = ", ".join(text(x) for x in np.asarray(numbers).reshape(-1))
    key = ("table", c, body)
    if key not in unit.tables.more:
        name = unit.writer.name("table")
        unit.tables.more[key] = name
        unit.function(name, f"__device__ const {c} {name}[] = {{{body}}};")
    return unit.tables.more[key]


def table_constant(unit: Any, value: np.ndarray, dtype: Any) -> Any:
    """An array constant: its numbers lie in the source, each thread reads its own."""
    layout = default_layout(value.shape, dtype)
    of = kind(dtype)
    held = of.c if of.family != "float" or of.bits >= 32 else "float"
    spelled = dtype if held == of.c else "float32"
    if of.family == "float" and not np.isfinite(value.astype(np.float64)).all():  # these have no literals
        numbers = value.astype(np.float64 if held == "double" else np.float32)
        held, spelled = ("u64", "uint64") if held == "double" else ("u32", "uint32")
        table = constant_table(unit, numbers.view(spelled), held, lambda x: constant(x, spelled))
        read = lambda at: f"bit_cast<{'double' if held == 'u64' else 'float'}>({table}[{at}])"
    else:
        numbers = value if held == of.c else value.astype(np.float32)
        table = constant_table(unit, numbers, held, lambda x: constant(x, spelled))
        read = lambda at: f"{table}[{at}]"
    result = unit.registers(dtype, layout, "constant")
    bound = f"min({{0}}, {layout.size - 1})" if layout.padded else "{0}"
    if not layout.size:
        return result
    return unit.fill(result, lambda i: f"{of.c}({read(bound.format(flat_text(layout, i)))})")
