"""Copies from global to shared memory: of one block, of several together, of rows by an index array.

A barrier is told how many bytes will come when the copy starts, as one arrival. What the TMA engine cannot copy the
threads copy themselves (`thread_copies`). Blocks that copy together each bring a share for all of them, and the
barrier of each expects all bytes; where only the first is told (Blackwell's pairs), it expects what lands in both.

Source: PTX ISA, "cp.async.bulk.tensor"; facts file, section 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion.compiler.gpu import access, clusters, plans, rules_barriers, thread_copies, tma, tma_code
from palladion.compiler.gpu.axes import Term
from palladion.compiler.gpu.fragments import default_layout, replicated
from palladion.compiler.gpu.issue import issue_in, leader, planned, ready, under
from palladion.compiler.gpu.unit import Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import View
from palladion.language.gpu.partition import CopyPartition


def copy_in(
    unit: Unit, source: View, buffer: View, barrier: Any, happens: str | None = None, axes: Any = None,
    mode: Any = None, fills: bool = True,
) -> None:  # fmt: skip
    """Start a copy to shared memory.

    Arguments:
      source, buffer: views of the same shape. barrier: a `rules_barriers.One`, or None.
      happens: C++ of a condition. axes: cluster axes along which blocks copy together. mode: a `CopyPartition`.
      fills: whether what lies outside the array is filled with zeros; otherwise nothing does.
    """
    if barrier is None:
        _copy_by_threads_async(unit, source, buffer, happens)
        return
    if mode is not None and unit.arch != "sm_100a":
        raise unit.refuse("Leader-tracked copies need Blackwell (sm_100a).", "use collective_axes alone on Hopper")
    partners = clusters.along(unit, axes) if axes else None
    if partners is not None and partners.count == 1:
        partners = None
    if source.gathers:
        _gather(unit, source, buffer, barrier, happens, partners)
        return
    if mode is not None and partners is not None:
        _leader_tracked(unit, source, buffer, barrier, happens, partners, mode)
        return
    if partners is not None:
        _collective(unit, source, buffer, barrier, happens, partners)
        return
    plan = planned(source, buffer)
    if plan is None:
        _by_threads(unit, source, buffer, barrier, happens, fills)
        return
    ready(unit, buffer)
    with leader(unit, happens):
        unit.line(f"barrier_expect({barrier.address}, {source.size * source.itemsize});")
        issue_in(unit, plan, buffer.folded(), source, barrier.address)


def _by_threads(unit: Unit, source: View, buffer: View, barrier: Any, happens: str | None, fills: bool) -> None:
    """A copy that the threads make, then the arrival."""
    unit.sync()

    def copy() -> None:
        thread_copies.copy_in(unit, source, buffer.folded(), source.ref.base, fills)
        unit.line("commit_shared();")
        unit.sync()
        with unit.one_thread():
            rules_barriers.arrive(unit, barrier)

    under(unit, happens, copy)


# --- of several blocks ----------------------------------------------------------------------------------------------
def shares(source: View, buffer: View, partners: clusters.Partners) -> tuple[View, View] | None:
    """The part of a copy that this block brings for all of them; None: it cannot be divided."""
    for d, axis in enumerate(source.axes):
        if axis.n % partners.count:
            continue
        size = axis.n // partners.count
        mine = part(source, d, size, partners.number), part(buffer, d, size, partners.number)
        if planned(*mine) is not None:
            return mine
    return None


def part(view: View, d: int, size: int, number: Scalar) -> View:
    """What lies from `number * size` on along an axis of a view, `size` of it."""
    axis = view.axes[d]
    text = number.text if number.text.isidentifier() or number.text.isdigit() else f"({number.text})"
    start = () if text == "0" else (Term(text, size * axis.step),)
    moved = dataclasses.replace(axis, n=size, terms=(*axis.terms, *start))
    return dataclasses.replace(view, axes=(*view.axes[:d], moved, *view.axes[d + 1 :]))


def _collective(
    unit: Unit, source: View, buffer: View, barrier: Any, happens: str | None, partners: clusters.Partners
) -> None:
    """Each block brings its share for all; the barrier of each expects all bytes."""
    mine = shares(source, buffer, partners)
    whole = None if mine is not None else planned(source, buffer)
    if mine is None and whole is None:
        _by_threads(unit, source, buffer, barrier, happens, True)  # every block brings all of it for itself
        return
    ready(unit, buffer)
    with leader(unit, happens):
        unit.line(f"barrier_expect({barrier.address}, {source.size * source.itemsize});")
        if mine is not None:
            plan = planned(*mine)
            assert plan is not None
            issue_in(unit, plan, mine[1].folded(), mine[0], barrier.address, partners.mask())
        else:
            assert whole is not None
            with unit.block(f"if ({partners.number.text} == 0)"):
                issue_in(unit, whole, buffer.folded(), source, barrier.address, partners.mask())


def _leader_tracked(
    unit: Unit, source: View, buffer: View, barrier: Any, happens: str | None, partners: clusters.Partners, mode: Any
) -> None:
    """Two blocks copy, and the barrier of the first is told of all bytes that land in both."""
    if partners.offsets != (0, 1):
        raise unit.refuse(
            "A leader-tracked copy is for pairs of neighbouring blocks of a cluster.",
            "collective_axes names the last axis of the cluster, of size 2",
        )
    if isinstance(mode, CopyPartition.PARTITIONED):
        axis = mode.axis % len(source.axes)
        mine = part(source, axis, source.axes[axis].n // 2, partners.number), buffer
        mask, landed = None, source.size * source.itemsize
    else:
        found = shares(source, buffer, partners)
        mine = (source, buffer) if found is None else found
        mask, landed = partners.mask(), 2 * source.size * source.itemsize
    plan = planned(*mine)
    if plan is None:
        raise unit.refuse(
            f"The TMA engine cannot copy {source.ref.label} here, as a leader-tracked copy must be made.",
            "rows and starts that are multiples of 16 bytes",
        )
    ready(unit, buffer)
    first = f"in_block({barrier.address}, {partners.ranks()[0]})"
    with leader(unit, happens):
        with unit.block(f"if ({partners.number.text} == 0)"):
            unit.line(f"barrier_expect({barrier.address}, {landed});")
        issue_in(unit, plan, mine[1].folded(), mine[0], first, mask, pair=True)


# --- rows by an index array -----------------------------------------------------------------------------------------
def _gather(
    unit: Unit, source: View, buffer: View, barrier: Any, happens: str | None, partners: clusters.Partners | None
) -> None:
    plan = _gather_plan(unit, source, buffer) if partners is None else None
    rows = source.gathers[0].value
    if unit.arch != "sm_100a":
        raise unit.refuse(
            f"A copy gathers rows of {source.ref.label}, which needs the TMA engine of Blackwell (sm_100a).",
            "on Hopper read them, x_ref[indices], or start a copy for each row",
        )
    if plan is None:
        _gather_by_threads(unit, source, buffer, barrier, happens)
        return
    rows = unit.fragment(rows, replicated(rows.shape))
    if rows.pick is not None:
        rows = unit.fill(unit.registers(rows.dtype, rows.layout, "rows"), rows.at_text)
    tensor_map, column, panels = plan
    name = unit.param(f"{source.ref.base}_rows_map", tensor_map)
    function, folded = tma_code.gather_in(unit), buffer.folded()
    ready(unit, buffer)
    with leader(unit, happens):
        unit.line(f"barrier_expect({barrier.address}, {source.size * source.itemsize});")
        start = plans.total(folded.ref.base, plans.terms_of(folded), folded.offset)
        count = rows.shape[0] // 4
        unit.line("#pragma unroll")
        with unit.block(f"for (int k = 0; k < {count}; ++k)"):
            for at, panel_column in panels:
                place = folded.axes[0].text("k * 4")
                to = plans.total(None, [start, place], at)
                listed = ", ".join(f"(int){rows.name}[k * 4 + {j}]" for j in range(4))
                col = plans.total(None, list(map(str, column[1])), column[0] + panel_column)
                unit.line(f"{function}(shared_address({to}), {name}, {barrier.address}, {col}, {listed});")


def _gather_plan(unit: Unit, source: View, buffer: View) -> Any:
    """A tensor map of single rows, the first column, and (place in the buffer, column) of each panel; None: none."""
    (gather,) = source.gathers
    rows, buffer = gather.value, buffer.folded()
    wide = len(source.root) == 2 and len(source.axes) == 2 and not source.fixed and gather.axes == (0,)
    if unit.arch != "sm_100a" or not wide or rows.shape[0] % 4 or source.floating:
        return None
    (n, row_digits), (width, column_digits) = source.root
    column, es = source.axes[1], source.itemsize
    if buffer.axes[0].terms or buffer.axes[1].terms or column.step != 1 or column_digits != ((width, es),):
        return None
    digits = buffer.axes[1].digits
    panel = digits[-1][0] if digits and digits[-1][1] == es else 0
    down = buffer.axes[0].digits
    four = bool(down) and down[-1][0] % 4 == 0 and down[-1][1] == panel * es
    strides = row_digits[0][1] if row_digits else 0
    if not panel or panel > tma.MOST_BOX or panel * es % tma.CHUNK or strides % tma.CHUNK or not four:
        return None
    if any(t.divisor % tma.ALIGNED for t in buffer.terms) or (4 * panel * es) % tma.ALIGNED:
        return None
    tensor_map = tma.TensorMap(
        source.ref.operand, tma.dtype_of(source.dtype), source.origin, (width, n), (strides,), (panel, 1), (1, 1),
        buffer.ref.swizzle,
    )  # fmt: skip
    places = buffer.axes[1].places()
    panels = [(int(places[k]), k) for k in range(0, column.n, panel)]
    return tensor_map, (column.first, column.terms), panels


def _gather_by_threads(unit: Unit, source: View, buffer: View, barrier: Any, happens: str | None) -> None:
    """Through registers."""
    unit.sync()

    def copy() -> None:
        layout = default_layout(source.shape, source.dtype)
        access.store(unit, buffer, access.load_unordered(unit, source.folded(), layout, "rows", inside=True))
        unit.line("commit_shared();")
        unit.sync()
        with unit.one_thread():
            rules_barriers.arrive(unit, barrier)

    under(unit, happens, copy)


# --- without a barrier ----------------------------------------------------------------------------------------------
def _copy_by_threads_async(unit: Unit, source: View, buffer: View, happens: str | None) -> None:
    """A copy that the threads start (cp.async), waited for by count."""
    source, buffer = source.folded(), buffer.folded()
    unit.sync()

    def copy() -> None:
        plain = source.windows is None and not source.gathers and unit.warps == 4
        layout = default_layout(source.shape, source.dtype)
        if plain and not layout.padded:
            here, there = access.plan(unit, source, layout), access.plan(unit, buffer, layout)
            size = here.width * source.itemsize
            if here.width == there.width and size in (4, 8, 16) and here.order == there.order:
                function = _async_function(unit)
                access.each_vector(
                    unit, here, lambda i: f"{function}<{size}>(shared_address({there.address(i)}), {here.address(i)});"
                )
                return
        thread_copies.copy_in(unit, source, buffer, source.ref.base, False)

    under(unit, happens, copy)
    unit.line('asm volatile("cp.async.commit_group;" ::: "memory");')


def _async_function(unit: Unit) -> str:
    return unit.function(
        "copy_async",
        """// A few bytes from global to shared memory, when they come.
template <int size> __device__ __forceinline__ void copy_async(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(size) : "memory");
}
""",
    )
