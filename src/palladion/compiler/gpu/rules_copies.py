"""Asynchronous copies between global and shared memory, and the fences and waits that go with them.

One CUDA thread starts a copy for its Pallas thread: it arrives on the barrier and tells it how many bytes will come.
What the TMA engine cannot copy the threads copy themselves (`thread_copies`).

Source: PTX ISA, "cp.async.bulk.tensor", "fence.proxy.async"; facts file, sections 2 and 5.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import access, clusters, memory, rules_barriers, thread_copies, tma_code
from palladion.compiler.gpu.copies_in import copy_in as copy_in
from palladion.compiler.gpu.copies_in import part
from palladion.compiler.gpu.issue import leader, loops, map_of, place, under
from palladion.compiler.gpu.issue import planned as planned
from palladion.compiler.gpu.rules_atomics import update
from palladion.compiler.gpu.rules_refs import _as_array, base_of
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.views import Index, View
from palladion.language.gpu import copies
from palladion.language.gpu.params import OOBFillMode
from palladion.language.gpu.views import PeerMemRef


# --- global to shared memory ----------------------------------------------------------------------------------------
@RULES.rule(copies.copy_gmem_to_smem_p)
def _copy_in(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    source, buffer = memory.view_of(unit, given.src), memory.view_of(unit, given.dst)
    happens, axes, mode = memory.predicate(given.predicate), eqn.params["collective_axes"], eqn.params["leader_tracked"]
    base_of(unit, source)  # refuses other devices
    barrier = None if given.barrier is None else rules_barriers.one_of(unit, given.barrier)
    fills = eqn.params["oob_mode"] is not OOBFillMode.PROMISE_IN_BOUNDS and barrier is not None
    copy_in(unit, source, buffer, barrier, happens, axes, mode, fills)
    return []


@RULES.rule(copies.wait_gmem_to_smem_p)
def _wait_in(unit: Unit, eqn: Any) -> list[Any]:
    unit.line(f'asm volatile("cp.async.wait_group {eqn.params["n"]};" ::: "memory");')
    unit.sync()
    return []


# --- shared to global memory ----------------------------------------------------------------------------------------
@RULES.rule(copies.copy_smem_to_gmem_p)
def _copy_out(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    buffer, goal = memory.view_of(unit, given.src), memory.view_of(unit, given.dst)
    if any(isinstance(w, PeerMemRef) for w in goal.where) or goal.where:
        base_of(unit, goal)
    op, commits = eqn.params["reduction_op"], eqn.params["commit_group"]
    copy_out(unit, buffer, goal, memory.predicate(given.predicate), op, commits)
    return []


def copy_out(
    unit: Unit, buffer: View, goal: View, happens: str | None = None, op: str | None = None, commits: bool = True
) -> None:
    """Start a copy to global memory.

    Arguments:
      buffer, goal: views of the same shape. happens: C++ of a condition. op: how it combines with what is there.
      commits: whether it closes a group.
    """
    plan = planned(goal, buffer) if _reduces(op, goal.dtype) else None
    if plan is None:
        unit.sync()
        under(unit, happens, lambda: thread_copies.copy_out(unit, buffer.folded(), goal, goal.ref.base, op))
        unit.sync()
        if commits:
            with leader(unit):
                unit.line("commit_copies();")
        return
    name = map_of(unit, plan, goal)
    function = tma_code.copy_out(unit, len(plan.coordinates), op)
    folded = buffer.folded()

    def issue() -> None:
        with loops(unit, plan):
            places = ", ".join(c.text() for c in plan.coordinates)
            unit.line(f"{function}({name}, {place(plan, folded)}, {places});")

    with leader(unit):
        under(unit, happens, issue)
        if commits:
            unit.line("commit_copies();")


_REDUCED = {
    "add": ("uint32", "int32", "uint64", "float32", "float16", "bfloat16"),
    "min": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "max": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "inc": ("uint32",),
    "dec": ("uint32",),
}


def _reduces(op: str | None, dtype: Any) -> bool:
    """Whether the engine can combine this way."""
    bitwise = ("uint32", "int32", "uint64", "int64")
    return op is None or str(dtype) in _REDUCED.get(op, bitwise)


@RULES.rule(copies.commit_group_p)
def _commit_group(unit: Unit, eqn: Any) -> list[Any]:
    with leader(unit):
        unit.line("commit_copies();")
    return []


@RULES.rule(copies.wait_smem_to_gmem_p)
def _wait_out(unit: Unit, eqn: Any) -> list[Any]:
    how = "wait_copies_read" if eqn.params["wait_read_only"] else "wait_copies"
    unit.line(f"{how}<{eqn.params['n']}>();")
    unit.sync()
    return []


@RULES.rule(copies.commit_smem_p)
def _commit_smem(unit: Unit, eqn: Any) -> list[Any]:
    unit.line("commit_shared();" if not memory.usage(unit).mixes else "commit_memory();")
    unit.sync()
    return []


# --- others ---------------------------------------------------------------------------------------------------------
@RULES.rule(copies.async_prefetch_p)
def _prefetch(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    source, happens = memory.view_of(unit, given.ref), memory.predicate(given.predicate)
    base_of(unit, source)
    axes = eqn.params["collective_axes"]
    partners = clusters.along(unit, axes) if axes else None
    if partners is not None and partners.count > 1:
        d = next((d for d, a in enumerate(source.axes) if a.n % partners.count == 0), None)
        if d is not None:
            source = part(source, d, source.axes[d].n // partners.count, partners.number)
    plan = planned(source, _stand_in(source), aligned=False)
    if plan is None:
        return []  # nothing depends on a prefetch
    name, function = map_of(unit, plan, source), tma_code.prefetch(unit, len(plan.coordinates))
    with leader(unit, happens), loops(unit, plan):
        unit.line(f"{function}({name}, {', '.join(c.text() for c in plan.coordinates)});")
    return []


def _stand_in(source: View) -> View:
    """A row-major buffer of a view's shape, which a prefetch does without."""
    from palladion.compiler.gpu import smem

    axes, _ = smem.stored_axes(source.shape, source.itemsize, ())
    ref = memory.Ref(source.ref.aval, "a prefetch", "smem", axes, at=0)
    return View(ref, source.dtype, axes)


@RULES.rule(copies.async_store_smem_p)
def _async_store(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    view, barrier = memory.view_of(unit, given.ref), rules_barriers.one_of(unit, given.barrier)
    rank = clusters.rank_of(unit, {eqn.params["cluster_dim"]: given.cluster_idx})
    there = unit.name("there")
    unit.line(f"char* const {there} = in_block({view.ref.base}, {rank});")
    value, op = given.value.value if isinstance(given.value, Index) else given.value, eqn.params["atomic"]
    if op is None:
        if view.shape:
            value = access.as_registers(unit, view, _as_array(value, view))
            access.store_unordered(unit, view.folded(), value, there)
        else:
            access.store_scalar(unit, view, value, there)
    else:
        update(unit, view, value, op, there)
    unit.sync()
    with unit.one_thread():
        unit.line(f"barrier_arrive_in_cluster(in_block({barrier.address}, {rank}));")
    return []
