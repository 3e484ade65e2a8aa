"""What a kernel asks of a chip, found before it runs: which architecture, how much SMEM, how large clusters."""

from __future__ import annotations

import math
from typing import Any

from palladion import jaxlink
from palladion.errors import explain
from palladion.language import ops
from palladion.language.dtypes import SemaphoreDType
from palladion.language.gpu.arch import HOPPER, equations, needs_blackwell
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.refs import BarrierDType
from palladion.simulator.code import location
from palladion.simulator.gpu.chip import CHIPS
from palladion.simulator.gpu.memory import BARRIER_BYTES, smem_bytes
from palladion.simulator.gpu.unions import bytes_of


def check(jaxpr: Any, arch: str, params: Any) -> None:
    """Refuse what the architecture does not have.

    Raises:
      NotImplementedError: an operation of the other architecture. ValueError: a cluster or block that is too large.
    """
    chip = CHIPS[arch]
    for eqn in equations(jaxpr):
        hopper = str(eqn.primitive) if eqn.primitive in HOPPER else None
        if (what := hopper if arch == "sm_100a" else needs_blackwell(eqn)) is not None:
            other = "Hopper (sm_90a)" if arch == "sm_100a" else "Blackwell (sm_100a)"
            raise NotImplementedError(
                explain(
                    f"{what} is an operation of {other}, and the kernel runs on {chip.name} ({arch}).",
                    where=location(eqn),
                    hint="on Blackwell products are plgpu.tcgen05_mma"
                    if arch == "sm_100a"
                    else 'plgpu.InterpretGPUParams(arch="sm_100a"); palladion check --target gpu:b200',
                )
            )
    mesh = params.get("mesh")
    if mesh is None:
        return
    size = 1
    for n in mesh.cluster:
        size *= n
    if size > chip.max_cluster:
        raise ValueError(
            explain(
                f"The cluster of {params['name']} has {size} blocks, and {chip.name} has clusters of at most "
                f"{chip.max_cluster}.",
                hint="a smaller cluster; more than 8 blocks are not portable",
            )
        )
    if 128 * (mesh.num_threads or 1) > chip.max_threads:
        raise ValueError(
            explain(
                f"A block of {params['name']} has {mesh.num_threads} threads, and a block can have "
                f"{chip.max_threads // 128} (1,024 CUDA threads).",
                hint="num_threads of at most 8",
            )
        )


def smem_of(jaxpr: Any) -> int:
    """Bytes of SMEM that a block takes, scopes included."""
    first = bytes_of([v.aval for v in jaxpr.invars], _bytes)
    return first + _scopes(jaxpr)


def _scopes(jaxpr: Any) -> int:
    most = 0
    for eqn in jaxpr.eqns:
        inner = [getattr(j, "jaxpr", j) for j in jaxlink.jaxprs_in_params(eqn.params)]
        size = max(map(_scopes, inner), default=0)
        if eqn.primitive is ops.run_scoped_p:
            scoped = eqn.params["jaxpr"].invars
            size += bytes_of([v.aval for v in scoped[len(scoped) - eqn.params["num_scoped"] :]], _bytes)
        most = max(most, size)
    return most


def _bytes(aval: Any) -> int:
    if getattr(aval, "memory_space", None) is not MemorySpace.SMEM:
        return 0
    if isinstance(aval.dtype, BarrierDType):
        return BARRIER_BYTES * math.prod(aval.shape)
    return 0 if isinstance(aval.dtype, SemaphoreDType) else smem_bytes(aval.shape, aval.dtype)


def last_scope(jaxpr: Any) -> Any:
    """The `run_scoped` that a kernel ends with, or None: its barriers live as long as the kernel."""
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is ops.run_scoped_p:
            return eqn
        if eqn.effects:
            return None
    return None
