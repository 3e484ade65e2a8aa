"""Barriers: mbarriers in shared memory.

Those of the whole kernel, of its scopes too, are initialised once, before the kernel's body: between scopes a barrier
is at rest, since each of its completions has been waited for. The parity that a thread waits for next is a bit of a
register; it flips with each wait.

A Pallas thread's arrival is one arrival, by one of its CUDA threads after all have come; a wait is made by all of them.
A cluster barrier counts the arrivals of all its blocks, each of which arrives at all of them.

Source: PTX ISA, "mbarrier"; facts file, section 1.
"""

from __future__ import annotations

import math
from typing import Any

from palladion.compiler.gpu import clusters, memory, smem
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import View
from palladion.language.gpu.barriers import barrier_arrive_p, barrier_test_p, barrier_wait_p
from palladion.language.gpu.views import ClusterRef

_INITS = "barrier inits"
_BITS = 64  # of a variable with parities


# --- making them ----------------------------------------------------------------------------------------------------
def make(unit: Unit, aval: Any, private: bool = False) -> memory.Barriers:
    """A group of barriers.

    Arguments:
      aval: their type. private: whether each Pallas thread of the block gets its own.
    """
    partners, arrivals = None, aval.dtype.num_arrivals
    if aval.dtype.collective_axes is not None:
        partners = _partners(unit, aval.dtype)
        arrivals *= partners.count
    return group(unit, memory.name_of(aval), aval, arrivals, partners, private)


def group(
    unit: Unit, wanted: str, aval: Any, arrivals: int, partners: Any = None, private: bool = False
) -> memory.Barriers:
    """Barriers of any use.

    Arguments:
      wanted: their name. aval: an abstract Ref of the shape of the group. arrivals: that complete one.
    """
    count = math.prod(aval.shape)
    if count > _BITS:
        raise unit.refuse(
            f"{aval.label} has {count} barriers; the compiler keeps at most {_BITS} in one array.",
            "use several arrays of barriers",
        )
    copies = unit.num_threads if private else 1
    at = smem.barriers(unit, 8 * count * copies)
    name = unit.name(wanted)
    mine = f" + wg * {8 * count}" if copies > 1 else ""
    tables = unit.tables
    tables.prologue.append(f"const u32 {name} = shared_address(smem + {at}{mine});")
    phase = unit.name(f"{wanted}_phase")
    tables.prologue.append(f"{'u32' if count <= 32 else 'u64'} {phase} = 0;")
    tables.barriers.append((name, count * copies, arrivals))
    tables.more[_INITS] = (*tables.more.get(_INITS, ()), (at, count * copies, arrivals))
    return memory.Barriers(aval, aval.label, name, phase, partners)


def _partners(unit: Unit, dtype: Any) -> clusters.Partners:
    """The blocks that share a cluster barrier: those that differ from this one along one of its axes only."""
    axes = dtype.collective_axes
    if len(axes) == 1:
        return clusters.along(unit, axes[0])
    own = clusters.along(unit, [n for a in axes for n in a])
    return clusters.along_each(unit, axes, own)


def finish(unit: Unit) -> None:
    """Initialise all barriers, and let blocks of a cluster begin and end together."""
    tables, cluster = unit.tables, clusters.size(unit)
    inits = tables.more.get(_INITS, ())
    lines = []
    if inits:
        lines.append("if (threadIdx.x == 0) {")
        for at, count, arrivals in inits:
            address = f"shared_address(smem + {at}"
            if count == 1:
                lines.append(f"  barrier_init({address}), {arrivals});")
            else:
                lines.append(f"  for (int i = 0; i < {count}; ++i) barrier_init({address} + 8 * i), {arrivals});")
        lines += ["  barriers_are_ready();", "}"]
        lines.append("sync_cluster();" if cluster > 1 else "__syncthreads();")
    elif cluster > 1:
        lines.append("sync_cluster();")
    tables.prologue += lines
    if cluster > 1:
        tables.epilogue.append("sync_cluster();  // others may still reach into this block's memory")


# --- one of them ----------------------------------------------------------------------------------------------------
class One:
    """One barrier of a group. Attributes: address: C++, a u32. bit: C++ of its number. group. where: another block."""

    def __init__(self, unit: Unit, view: View) -> None:
        self.group: memory.Barriers = view.ref
        view = view.folded()
        start = view.offset + sum(int(a.places()[0]) for a in view.axes)
        parts = [*map(str, view.terms), *([str(start)] if start or not view.terms else [])]
        self.bit = " + ".join(parts)
        offset = "" if self.bit == "0" else f" + {8 * start}" if not view.terms else f" + 8 * {self._shift}"
        self.address = f"{self.group.address}{offset}"
        self.where = next((w for w in view.where if isinstance(w, ClusterRef)), None)

    @property
    def parity(self) -> str:
        """C++ of the parity to wait for next."""
        return f"{self.group.phase} & 1" if self.bit == "0" else f"{self.group.phase} >> {self._shift} & 1"

    @property
    def _shift(self) -> str:
        return self.bit if self.bit.isdigit() or self.bit.isidentifier() else f"({self.bit})"

    @property
    def flip(self) -> str:
        """C++ that says that it was waited for."""
        one = "1ull" if math.prod(self.group.shape) > 32 else "1u"
        return f"{self.group.phase} ^= {one}" + (";" if self.bit == "0" else f" << {self._shift};")


def one_of(unit: Unit, ref_view: Any) -> One:
    """The barrier among the arguments of an operation."""
    return One(unit, memory.view_of(unit, ref_view))


# --- operations -----------------------------------------------------------------------------------------------------
@RULES.rule(barrier_arrive_p)
def _arrive(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    barrier, happens = one_of(unit, given.barrier), memory.predicate(given.predicate)
    if barrier.group.dtype.orders_tensor_core and unit.arch == "sm_100a":
        unit.line('asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");')
    unit.sync()
    with unit.one_thread() if happens is None else unit.block(f"if ({_leader(unit)} && {happens})"):
        arrive(unit, barrier)
    return []


def _leader(unit: Unit) -> str:
    return "t == 0" if unit.warps == 4 else "lane == 0"


def arrive(unit: Unit, barrier: One) -> None:
    """One arrival by the running CUDA thread, in every block that counts it."""
    partners = barrier.group.partners
    if barrier.where is not None:
        rank = clusters.rank_of(unit, barrier.where.block_id)
        unit.line(f"barrier_arrive_in_cluster(in_block({barrier.address}, {rank}));")
    elif partners is None:
        unit.line(f"barrier_arrive({barrier.address});")
    else:
        ranks = partners.ranks()[:1] if barrier.group.dtype.leader_tracked else partners.ranks()
        for rank in ranks:
            unit.line(f"barrier_arrive_in_cluster(in_block({barrier.address}, {rank}));")


@RULES.rule(barrier_wait_p)
def _wait(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    wait(unit, one_of(unit, given.barrier))
    return []


def wait(unit: Unit, barrier: One) -> None:
    """Wait for the next completion."""
    how = "barrier_wait_in_cluster" if clusters.size(unit) > 1 else "barrier_wait"
    unit.line(f"{how}({barrier.address}, {barrier.parity});")
    unit.line(barrier.flip)
    if barrier.group.dtype.orders_tensor_core and unit.arch == "sm_100a":
        unit.line('asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");')


@RULES.rule(barrier_test_p)
def _test(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    barrier = one_of(unit, given.barrier)
    done = unit.scalar(bool, f"barrier_test({barrier.address}, {barrier.parity})", "done")
    return [agreed(unit, done)]


def agreed(unit: Unit, mine: Scalar) -> Scalar:
    """Whether all CUDA threads of the Pallas thread (or warp) find that something holds: the same answer for all."""
    if unit.warps == 1:
        return unit.scalar(bool, f"__all_sync(0xffffffffu, {mine.text})", "all")
    unit.function("all_of_warpgroup", _ALL)
    return unit.scalar(bool, f"all_of_warpgroup({mine.text}, wg)", "all")


_ALL = r"""// Whether `mine` holds in all threads of a warpgroup, which meet here.
__device__ __forceinline__ bool all_of_warpgroup(bool mine, int wg) {
  u32 all;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.and.aligned.pred q, %2, 128, p;\n"
      "selp.u32 %0, 1, 0, q;\n}" : "=r"(all) : "r"((u32)mine), "r"(wg + 1) : "memory");
  return all;
}
"""
