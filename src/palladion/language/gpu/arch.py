"""Which architecture a kernel needs: the operations that only Hopper or only Blackwell has.

Source: the facts file, sections 4 and 8 (wgmma is of sm_90a alone; tcgen05, gathers by TMA, launch control of sm_100a).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from palladion import jaxlink
from palladion.language.gpu import control, copies, mma, tcgen05
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.views import is_gather

BLACKWELL = {
    tcgen05.tcgen05_mma_p, tcgen05.async_load_tmem_p, tcgen05.async_store_tmem_p, tcgen05.tcgen05_commit_arrive_p,
    tcgen05.async_copy_smem_to_tmem_p, tcgen05.wait_load_tmem_p, tcgen05.commit_tmem_p, control.try_cluster_cancel_p,
    control.query_cluster_cancel_p,
}  # fmt: skip
HOPPER = {mma.wgmma_p}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner ones too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


def needs_blackwell(eqn: Any) -> str | None:
    """What of an equation only Blackwell has, in words; or None."""
    if eqn.primitive in BLACKWELL:
        return str(eqn.primitive)
    if eqn.primitive is copies.copy_gmem_to_smem_p:
        if eqn.params["leader_tracked"] is not None:
            return "copy_gmem_to_smem with leader_tracked"
        given = jax.tree.unflatten(eqn.params["tree"], [v.aval for v in eqn.invars])
        if given.barrier is not None and is_gather(given.src):
            return "copy_gmem_to_smem that gathers rows"
    return None


def arch_of(jaxpr: Any) -> str:
    """The architecture of a kernel for which none is asked: Blackwell if it has operations of it, else Hopper."""
    on_blackwell = any(needs_blackwell(e) for e in equations(jaxpr))
    return "sm_100a" if on_blackwell or any(_in_tmem(v) for v in jaxpr.invars) else "sm_90a"


def _in_tmem(var: Any) -> bool:
    return getattr(var.aval, "memory_space", None) is MemorySpace.TMEM
