"""Arrays in the scratch of a Pallas thread in shared memory, where any thread can reach any element.

What depends on indices known only at run time, and what goes along a dimension element by element (sorting, windows,
running sums), is done there: the operands are spilled, each thread makes its elements of the result from them.

    keys, values = spilled(unit, (x, eqn.invars[0]), (y, eqn.invars[1]))    # C++ pointers
    with each_element(unit, layout) as i: ...                               # one of the thread's registers

The scratch holds one operation's operands at a time: whoever spills first waits until all threads are done with what
was there before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from palladion.compiler.gpu import moves
from palladion.compiler.gpu.fragments import Fragments
from palladion.compiler.gpu.values import Fragment, Scalar, Splat


def itemsize(value: Any) -> int:
    """Bytes of an element of a value."""
    return max(value.kind.bits // 8, 1)


def registers_of(unit: Any, value: Any, var: Any) -> Fragment:
    """A value as registers, numbers as well."""
    if isinstance(value, Scalar):
        value = Splat(value.text, value.dtype, (), value.value)
    return unit.settled(value, var)


def spilled(unit: Any, *operands: tuple[Any, Any], room: int = 0) -> list[str]:
    """Put arrays into the scratch, row-major, one after the other.

    Arguments:
      unit: the unit.
      *operands: (value, its variable in the jaxpr).
      room: further bytes behind them; see `behind`.

    Returns: C++ of pointers to their elements. All threads may read them until the next use of the scratch.
    """
    held = [registers_of(unit, value, var) for value, var in operands]  # first: moves use the scratch, too
    return spilled_registers(unit, *held, room=room)


def spilled_registers(unit: Any, *held: Fragment, room: int = 0) -> list[str]:
    """`spilled`, of what is in registers."""
    pointers, at = [], 0
    places = []
    for value in held:
        places.append(at)
        at += -(-max(value.layout.size, 1) * itemsize(value) // 16) * 16
    scratch = moves.place_in_exchange(unit, at + room, fixed=True)
    for value, place in zip(held, places):
        address = scratch if place == 0 else f"({scratch} + {place})"
        if value.layout.size:
            moves.store_flat(unit, value, address)
        pointers.append(f"(({value.kind.c}*){address})")
    unit.sync()
    moves.in_use(unit, scratch, at + room)
    return pointers


def behind(*held: Any) -> int:
    """Where, in bytes, the room begins that `spilled` leaves behind these operands."""
    return sum(-(-max(math.prod(x.shape), 1) * itemsize(x) // 16) * 16 for x in held)


# --- coordinates ----------------------------------------------------------------------------------------------------
def coordinate(layout: Fragments, d: int, i: str) -> str:
    """C++ for the index along dimension d of the element in register i; padding counts as the last element."""
    if not layout.flat:
        parts = [p for p in (layout.thread_index(d), layout.register_index(d, i)) if p != "0"]
        return f"({' + '.join(parts)})" if parts else "0"
    number = f"min({moves.flat_text(layout, i)}, {max(layout.size - 1, 0)})"
    below = max(math.prod(layout.shape[d + 1 :]), 1)
    text = number if below == 1 else f"{number} / {below}"
    return f"({text})" if d == 0 else f"({text} % {max(layout.shape[d], 1)})"


def coordinates(layout: Fragments, strides: Sequence[int]) -> Callable[[str], str]:
    """C++ for the sum of strides times the indices of register i; padding counts as the last element."""

    def text(i: str) -> str:
        parts = []
        for d, stride in enumerate(strides):
            at = coordinate(layout, d, i) if stride and layout.shape[d] > 1 else "0"
            if at != "0":
                parts.append(at if stride == 1 else f"{at} * {stride}")
        return " + ".join(parts) or "0"

    return text


def strides_of(shape: Sequence[int]) -> list[int]:
    """Elements of a step along each dimension of a row-major array."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


@contextlib.contextmanager
def each_element(unit: Any, layout: Fragments) -> Iterator[str]:
    """`with each_element(unit, layout) as i:` writes a loop around the code for register i."""
    if layout.count > 1:
        unit.line("#pragma unroll")
    with unit.block(f"for (int i = 0; i < {layout.count}; ++i)" if layout.count > 1 else ""):
        yield "i" if layout.count > 1 else "0"


def read_back(unit: Any, pointer: str, dtype: Any, layout: Fragments) -> Fragment:
    """An array in the scratch, row-major, as registers; all threads have met before."""
    result = unit.registers(dtype, layout)
    if not layout.size:
        return result
    moves.in_use(unit, "exchange", moves.exchange_size(unit))
    index = coordinates(layout, strides_of(layout.shape))
    if layout.flat:
        index = lambda i: f"min({moves.flat_text(layout, i)}, {layout.size - 1})"
    return unit.fill(result, lambda i: f"{pointer}[{index(i)}]")
