"""Starting copies by the TMA engine: what all of them share.

One CUDA thread starts a copy for its Pallas thread, box by box; before a copy overwrites a buffer, all CUDA threads
must have done what comes before.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import hazards, plans, tma, tma_code
from palladion.compiler.gpu.unit import Unit
from palladion.compiler.gpu.views import View


def planned(source: View, buffer: View, aligned: bool = True) -> tma.Plan | None:
    """The boxes of a copy; None: the engine cannot make it. `aligned`: rely on what the kernel promises of tiles."""
    buffer = buffer.folded()
    return tma.plan(tma.promised(source, buffer) if aligned else source, buffer)


def leader(unit: Unit, happens: str | None = None) -> Any:
    """`with leader(unit, happens):` the one CUDA thread that starts asynchronous operations, if they happen."""
    unit.function("elected", _ELECTED)
    parts = ["warp == 0"] if unit.warps == 4 else []
    parts += [] if happens is None else [happens]
    return unit.block(f"if ({' && '.join([*parts, 'elected()'])})")


_ELECTED = r"""// Whether this is the lane of its warp that does what one lane does: always the same. Unlike a
// comparison of thread numbers it tells the assembler that no other lane comes along, so that no loop is made.
__device__ __forceinline__ bool elected() {
  u32 me;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(me)::"memory");
  return me;
}"""


def ready(unit: Unit, buffer: View) -> None:
    """Before a copy overwrites a buffer: all CUDA threads have done what comes before, if any may still read it."""
    facts = buffer.ref.facts
    if (facts.loads or facts.stores or facts.operands) and not hazards.met_just_now(unit.writer.lines):
        unit.sync()


def map_of(unit: Unit, plan: tma.Plan, source: View) -> str:
    """The C++ name of a copy's tensor map."""
    return unit.param(f"{source.ref.base}_map", plan.map)


def issue_in(
    unit: Unit, plan: tma.Plan, buffer: View, source: View, bar: str, mask: str | None = None, pair: bool = False
) -> None:
    """The instructions of a copy to shared memory; its barrier knows already how many bytes will come."""
    name = map_of(unit, plan, source)
    function = tma_code.copy_in(unit, len(plan.coordinates), multicast=mask is not None, leader=pair)
    more = "" if mask is None else f"{mask}, "
    with loops(unit, plan):
        at = place(plan, buffer)
        unit.line(f"{function}({at}, {name}, {bar}, {more}{', '.join(c.text() for c in plan.coordinates)});")


def place(plan: tma.Plan, buffer: View) -> str:
    """C++ of the address of a box in shared memory."""
    start = plans.total(None, plans.terms_of(buffer), buffer.offset + sum(int(a.places()[0]) for a in buffer.axes))
    moves = [f"k{k} * {stride}" for k, stride in enumerate(plan.strides)]
    parts = [p for p in (start, *moves) if p != "0"]
    return f"shared_address({' + '.join([buffer.ref.base, *parts])})"


class loops:
    """`with loops(unit, plan):` loops around the instruction of each box."""

    def __init__(self, unit: Unit, plan: tma.Plan) -> None:
        self.blocks = [unit.block(f"for (int k{k} = 0; k{k} < {n}; ++k{k})") for k, n in enumerate(plan.loops)]

    def __enter__(self) -> None:
        for block in self.blocks:
            block.__enter__()

    def __exit__(self, *what: Any) -> None:
        for block in reversed(self.blocks):
            block.__exit__(*what)


def under(unit: Unit, happens: str | None, body: Any) -> None:
    if happens is None:
        body()
        return
    with unit.block(f"if ({happens})"):
        body()
