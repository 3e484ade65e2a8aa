"""Where the registers of an array lie in memory: the vectors of a load or store, and their addresses in C++.

Where each register's element lies is known as a table, made of the layout and the view. From it come the vectors (the
longest runs, up to 16 bytes, that lie in the registers of each thread), and the address: a part that the thread gives
and one that the number of the vector gives. Where the table does not fall apart that way, each register's address is
computed from its indices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.compiler.gpu import moves, smem
from palladion.compiler.gpu.axes import Axis
from palladion.compiler.gpu.fragments import NOTHING, Fragments
from palladion.compiler.gpu.values import Fragment, Scalar, Splat, index_formula
from palladion.compiler.gpu.views import View

WIDEST = 16  # bytes of a vector
WIDEST_SINGLE = 1  # for accesses of single elements


@dataclasses.dataclass(frozen=True)
class Vectors:
    """How the registers of an array are read or written.

    Attributes:
      width: registers of a vector. order: the registers, those of one vector after another.
      address: from the C++ number of a vector to that of its address.
      guard: the same for whether it holds elements; None: all do.
      rows: the same for the numbers that index arrays gave, and how many there are.
    """

    width: int
    order: tuple[int, ...]
    address: Callable[[str], str]
    guard: Callable[[str], str] | None = None
    rows: tuple[tuple[Callable[[str], str], int], ...] = ()

    @property
    def count(self) -> int:
        return len(self.order) // self.width

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))


def element(unit: Any, view: View, base: str | None = None) -> str:
    """C++ for the address of the first element of a view, a `char*`."""
    view = view.folded()
    parts = [added(axis, "0") for axis in view.axes if axis.terms]
    start = view.offset + sum(int(a.places()[0]) for a in view.axes if not a.terms and a.n)
    for gather in view.gathers:
        one = gather.value
        text = one.text if isinstance(one, (Scalar, Splat)) else one.at(0)
        parts.append(_axis_of(gather).text(text))
    start_of = base or view.ref.base
    if not view.ref.swizzle:
        return total(start_of, [*terms_of(view), *parts], start)
    if not parts and all(t.divisor % pattern(view) == 0 for t in view.terms):
        return total(start_of, terms_of(view), int(smem.swizzled(np.array(start), view.ref.swizzle)))
    whole = total(None, [*terms_of(view), *parts], start)
    return f"{start_of} + swizzle<{view.ref.swizzle}>({whole})"


def pattern(view: View) -> int:
    """Bytes after which the swizzle of a view's buffer repeats."""
    return view.ref.swizzle * 8 or 1


# --- plans ----------------------------------------------------------------------------------------------------------
def plan(unit: Any, view: View, layout: Fragments, base: str | None = None, widest: int = WIDEST) -> Vectors:
    """How to access the elements of a (folded) view from registers of a layout; writes what comes before the loop.

    Arguments:
      base: C++ of the buffer's address, if another one than the Ref's. widest: bytes of a vector.
    """
    start_of = base or view.ref.base
    guard = moves.guard_text(layout) if layout.padded else None
    places = None if any(a.terms for a in view.axes) else _places(view, layout)
    if places is not None:
        by_thread, by_register = places[:, 0], places[0] - places[0, 0]
        if (places != by_thread[:, None] + by_register).any():
            places = None
    if places is None:
        return _by_index(unit, view, layout, start_of, guard, widest)
    divisor = math.gcd(_alignment(view), *(t.divisor for t in view.terms), *np.unique(by_thread).tolist())
    width, order = _grouped(view, layout, by_register, divisor, widest)
    starts = by_register[list(order[::width])]
    extra, rows = _gathered(unit, view, layout, width)
    address = addresses(unit, view, by_thread, starts, start_of, extra)
    grouped_guard = None if guard is None else lambda i: guard(times(i, width))
    return Vectors(width, order, address, grouped_guard, rows)


def addresses(
    unit: Any, view: View, by_thread: np.ndarray, starts: np.ndarray, start_of: str, extra: Any = lambda i: []
) -> Callable[[str], str]:
    """C++ for the addresses of vectors; writes what comes before.

    Arguments:
      view: the folded view, whose run-time terms are added. by_thread: (128,), the place of each thread's first vector.
      starts: how far from there its others are. start_of: C++ of the buffer's address. extra: C++ that vector i adds.
    """
    thread, terms, offset = thread_text(unit, by_thread), terms_of(view), int(by_thread[0])
    width = view.ref.swizzle

    def index(picks: np.ndarray, i: str) -> str:
        return str(picks[int(i)]) if i.isdigit() else index_formula(tuple(map(int, picks)), i)

    if not width:
        at = _named(unit, total(start_of, [*terms, thread], offset), starts)
        return lambda i: total(at, [index(starts, i), *extra(i)], 0)
    if all(t.divisor % pattern(view) == 0 for t in view.terms) and not view.gathers:
        low, high = starts & 127, starts & ~127
        final = smem.swizzled(by_thread[:, None] + starts, width)
        if (final == (smem.swizzled(by_thread, width)[:, None] ^ low) + high).all():
            here, name = total(start_of, terms, 0), unit.name("at")
            unit.line(f"const int {name} = swizzle<{width}>({total(None, [thread], offset)});")
            if not low.any():
                return lambda i: total(here, [name, index(high, i)], 0)
            return lambda i: total(here, [f"({name} ^ ({index(low, i)}))", index(high, i)], 0)
    return lambda i: (
        f"{start_of} + swizzle<{width}>({total(None, [*terms, thread, index(starts, i), *extra(i)], offset)})"
    )


def _named(unit: Any, at: str, starts: np.ndarray) -> str:
    """A variable for the thread's address, where several vectors use it."""
    if len(starts) == 1:
        return at
    name = unit.name("at")
    unit.line(f"char* const {name} = {at};")
    return name


def _places(view: View, layout: Fragments) -> np.ndarray | None:
    """(128, registers): the constant part of each register's place; None: padding keeps it from being a sum."""
    if not layout.padded:
        return view.table().reshape(-1)[layout.table]
    flat = view.table().reshape(-1)
    step = view.itemsize
    if not layout.flat or not flat.size or (flat != flat[0] + np.arange(flat.size) * step).any():
        return None
    return flat[0] + virtual(layout) * step


def virtual(layout: Fragments) -> np.ndarray:
    """(128, registers) of a flat layout: element numbers, going on where the array has ended."""
    whole = dataclasses.replace(layout, shape=(layout.count * 128,))
    return whole.table


def _alignment(view: View) -> int:
    """What divides the address of the buffer."""
    ref = view.ref
    if not ref.in_smem:
        return ref.aligned
    return smem.alignment(ref.swizzle, ref.size)


def _grouped(
    view: View, layout: Fragments, by_register: np.ndarray, divisor: int, widest: int
) -> tuple[int, tuple[int, ...]]:
    """The widest vectors: registers of one, and all registers in the order of vectors."""
    n, step = len(by_register), view.itemsize
    natural = np.arange(n)
    sources = gather_sources(view)
    for order in (natural, np.argsort(by_register, kind="stable")):
        width = max(widest // step, 1)
        while width > 1:
            if n % width == 0 and divisor % (width * step) == 0:
                groups = by_register[order].reshape(-1, width)
                together = (groups == groups[:, :1] + np.arange(width) * step).all()
                aligned = (groups[:, 0] % (width * step) == 0).all()
                if together and aligned and _same_validity(layout, order, width) and (
                    not sources or (order is natural and _same_rows(layout, sources, width))
                ):  # fmt: skip
                    return width, tuple(map(int, order))
            width //= 2
        if sources:
            break
    return 1, tuple(map(int, natural))


def _same_validity(layout: Fragments, order: np.ndarray, width: int) -> bool:
    if not layout.padded:
        return True
    valid = (layout.table[:, order] != NOTHING).reshape(128, -1, width)
    return bool((valid == valid[:, :, :1]).all())


def gather_sources(view: View) -> list[np.ndarray]:
    """For each gather: which element of its index array each element of the view takes."""
    found = []
    for gather in view.gathers:
        shape = tuple(gather.value.shape)
        order = np.argsort(gather.axes)
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose(order)
        full = [1] * len(view.shape)
        for k in order:
            full[gather.axes[k]] = shape[k]
        found.append(np.broadcast_to(numbers.reshape(full), view.shape).reshape(-1))
    return found


def _same_rows(layout: Fragments, sources: list[np.ndarray], width: int) -> bool:
    for source in sources:
        rows = np.where(layout.table == NOTHING, NOTHING, source[layout.table]).reshape(128, -1, width)
        if (rows != rows[:, :, :1]).any():
            return False
    return True


def _axis_of(gather: Any) -> Axis:
    return Axis(1, gather.digits, gather.extent)


def _gathered(unit: Any, view: View, layout: Fragments, width: int) -> tuple[Callable[[str], list[str]], Any]:
    """C++ for what index arrays add to the address of a vector, and `Vectors.rows`."""
    parts: list[Callable[[str], str]] = []
    numbers: list[tuple[Callable[[str], str], int]] = []
    for gather, source in zip(view.gathers, gather_sources(view)):
        axis = _axis_of(gather)
        if isinstance(gather.value, (Splat, Scalar)):
            text = gather.value.text
            parts.append(lambda i, text=text, axis=axis: axis.text(text))
            numbers.append((lambda i, text=text: text, gather.extent))
            continue
        array, own = moves.as_rearranged(gather.value)
        rows = moves.rearranged(unit, array, layout, own[source])
        if rows.pick is not None and width > 1:
            rows = unit.fill(unit.registers(rows.dtype, layout, "rows"), rows.at_text)
        big = gather.digits and gather.digits[0][1] * gather.digits[0][0] >= 2**31
        cast = "(i64)" if big else "(int)"

        def number(i: str, rows: Fragment = rows, cast: str = cast) -> str:
            at = rows.at(int(i) * width) if i.isdigit() else rows.at(i) if width == 1 else f"{rows.name}[{i} * {width}]"
            return f"{cast}{at}"

        parts.append(lambda i, number=number, axis=axis: axis.text(number(i)))
        numbers.append((number, gather.extent))
    return lambda i: [p(i) for p in parts], tuple(numbers)


def _by_index(unit: Any, view: View, layout: Fragments, start_of: str, guard: Any, widest: int) -> Vectors:
    """Each register's address from its indices."""
    places = None if layout.padded else view.table().reshape(-1)[layout.table]
    width = 1 if places is None or widest == WIDEST_SINGLE else _width_by_index(view, layout, places)
    extra, rows = _gathered(unit, view, layout, width)

    def address(i: str) -> str:
        register = times(i, width)
        parts = [added(axis, index) for axis, index in zip(view.axes, indices_text(layout, view.shape, register))]
        parts = [*terms_of(view), *(p for p in parts if p != "0"), *extra(i)]
        if not view.ref.swizzle:
            return total(start_of, parts, view.offset)
        return f"{start_of} + swizzle<{view.ref.swizzle}>({total(None, parts, view.offset)})"

    for k, axis in enumerate(view.axes):
        if axis.coords is not None:
            raise unit.refuse(
                f"Index {k} of a view is a constant array whose elements do not lie in order.",
                "use a run-time index array, or slices",
            )
    grouped = None if guard is None else lambda i: guard(times(i, width))
    return Vectors(width, tuple(range(layout.count)), address, grouped, rows)


def _width_by_index(view: View, layout: Fragments, places: np.ndarray) -> int:
    """Registers of a vector where starts are known at run time only."""
    step = view.itemsize
    width = max(WIDEST // step, 1)
    indices = np.unravel_index(layout.table, view.shape) if view.shape else ()
    sources = gather_sources(view)
    while width > 1:
        if layout.count % width == 0:
            groups = places.reshape(128, -1, width)
            good = (groups == groups[:, :, :1] + np.arange(width) * step).all()
            good = good and (groups[:, :, 0] % (width * step) == 0).all() and _same_rows(layout, sources, width)
            good = good and all(t.divisor % (width * step) == 0 for t in view.terms)
            good = good and _alignment(view) % (width * step) == 0
            for axis, index in zip(view.axes, indices):
                moving = index.reshape(128, -1, width)
                if axis.terms and (moving != moving[:, :, :1]).any():
                    low = axis.digits[-1][0]
                    good = good and low % width == 0 and axis.first % width == 0 and axis.step == 1
                    good = good and all(t.divisor % width == 0 for t in axis.terms)
                elif axis.terms:
                    good = good and all(stride % (width * step) == 0 for _, stride in axis.digits)
            if good:
                return width
        width //= 2
    return 1


def indices_text(layout: Fragments, shape: tuple[int, ...], register: str) -> list[str]:
    """C++ for the index along each dimension of the element in a register (its number in C++)."""
    register = register if register.isidentifier() or register.isdigit() else f"({register})"
    if not layout.flat:
        return [total(None, [layout.thread_index(d), layout.register_index(d, register)], 0) for d in range(len(shape))]
    number = moves.flat_text(layout, register)
    found = []
    for d, n in enumerate(shape):
        below = math.prod(shape[d + 1 :])
        text = f"({number})" if below == 1 else f"({number}) / {below}"
        found.append(text if d == 0 else f"{text} % {n}")
    return found


def added(axis: Axis, index: str) -> str:
    """C++ for what an index along an axis adds."""
    if not axis.digits:
        return "0"
    stepped = index if axis.step == 1 or index == "0" else f"({index}) * {axis.step}"
    coordinate = total(None, [*map(str, axis.terms), stepped], axis.first)
    if len(axis.digits) == 1:
        stride = axis.digits[0][1]
        return "0" if coordinate == "0" else coordinate if stride == 1 else f"({coordinate}) * {stride}"
    return "0" if coordinate == "0" else axis.text(coordinate)


def thread_text(unit: Any, by_thread: np.ndarray) -> str:
    """C++ for a function of the thread's number, less its value for thread 0."""
    text = index_formula(tuple((by_thread - by_thread[0]).tolist()), "t")
    if "pick<" in text:
        return f"{moves.constant_table(unit, by_thread - by_thread[0], 'int')}[t]"
    return text


# --- text -----------------------------------------------------------------------------------------------------------
def total(base: str | None, parts: list[str], constant: int) -> str:
    """`base + a + b + 16`, without zeros."""
    found = [] if base is None else [base]
    found += [p for p in parts if p != "0"]
    if constant or not found:
        found.append(str(constant))
    return " + ".join(found)


def terms_of(view: View) -> list[str]:
    """The run-time terms; in 64 bits where the buffer is that large."""
    return [f"(i64){t}" if view.ref.size >= 2**31 else str(t) for t in view.terms]


def times(i: str, n: int) -> str:
    if i.isdigit():
        return str(int(i) * n)
    return i if n == 1 else f"{i} * {n}"
