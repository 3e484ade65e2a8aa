"""Cluster launch control: taking over the work of a cluster that has not started (Blackwell).

The hardware's answer has 16 bytes, in shared memory, and counts as bytes that arrive on a barrier. The block that it
names is the first of the cluster that will not start; its number in the grid says where the kernel's axes would be.

Source: PTX ISA, "clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel"; facts file, section 7.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from palladion.compiler.gpu import access, clusters, memory, rules_barriers
from palladion.compiler.gpu.rules_copies import leader
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.language.gpu import control

_REQUEST = r"""// Ask for the work of a cluster that has not started; the answer comes to {who}.
__device__ __forceinline__ void {name}(u32 result, u32 bar) {{
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{cast}.b128 [%0], [%1];"
               ::"r"(result), "r"(bar) : "memory");
}}
"""
_ANSWER = r"""// Whether a request was granted, and the first block of that cluster.
__device__ __forceinline__ bool cluster_taken(u32 result, int& block) {
  u32 taken, x;
  asm volatile(
      "{\n.reg .pred p;\n.reg .b128 answer;\n"
      "ld.shared.b128 answer, [%2];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "mov.u32 %1, 0;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer;\n}"
      : "=r"(taken), "=r"(x) : "r"(result) : "memory");
  block = (int)x;
  return taken;
}
"""


@RULES.rule(control.try_cluster_cancel_p)
def _try_cancel(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    _blackwell_only(unit)
    given = memory.arguments(unit, eqn, values)
    barrier = rules_barriers.one_of(unit, given.barrier)
    result = access.element(unit, memory.view_of(unit, given.result))
    axes, total = eqn.params["collective_axes"], clusters.size(unit)
    partners = clusters.along(unit, axes) if axes else None
    collective = partners is not None and partners.count > 1
    if partners is not None and collective and partners.count != total:
        raise unit.refuse(
            "A request for another cluster is made by some of a cluster's blocks.",
            "collective_axes names all axes of the cluster",
        )
    name = "request_cluster_for_all" if collective else "request_cluster"
    text = _REQUEST.format(
        name=name,
        cast=".multicast::cluster::all" if collective else "",
        who="all blocks of this one" if collective else "this block",
    )
    unit.function(name, text)
    unit.line("commit_shared();  // the answer overwrites what threads have read")
    unit.sync()
    with leader(unit):
        unit.line(f"barrier_expect({barrier.address}, 16);")
        first = f"if ({partners.number.text} == 0) " if partners is not None and collective else ""
        unit.line(f"{first}{name}(shared_address({result}), {barrier.address});")
    return []


@RULES.rule(control.query_cluster_cancel_p)
def _query_cancel(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    _blackwell_only(unit)
    given = memory.arguments(unit, eqn, values)
    result = access.element(unit, memory.view_of(unit, given.result))
    unit.function("cluster_taken", _ANSWER)
    block = unit.variable(np.int32, None, "block")
    taken = unit.scalar(bool, f"cluster_taken(shared_address({result}), {block.text})", "taken")
    size, mesh = clusters.size(unit), unit.mesh
    flat = block.text if size == 1 else f"({block.text} / {size})"
    places = dict(zip(mesh.grid_names, range(len(mesh.grid_names))))
    outs = []
    for name in eqn.params["grid_names"]:
        k = places[name]
        below = math.prod(mesh.grid[k + 1 :])
        text = flat if below == 1 else f"{flat} / {below}"
        outs.append(unit.scalar(np.int32, text if k == 0 else f"{text} % {mesh.grid[k]}", str(name)))
    return [*outs, taken]


def _blackwell_only(unit: Unit) -> None:
    if unit.arch != "sm_100a":
        name = unit.eqn.primitive.name
        raise unit.refuse(f"plgpu.{name} needs Blackwell (sm_100a).", "a persistent kernel: plgpu.nd_loop")
