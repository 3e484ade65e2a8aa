"""A kernel call, all the way to machine code: CUDA C++, NVRTC with its cache, dumps, and the limits of the hardware.

    built = build(params, "sm_90a")
    built.binary.cubin, built.generated.params      # for the launch
    built.resources.registers                       # for the report

ptxas compiles kernels that no GPU can launch or that nobody should want: those are errors here.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from palladion import config
from palladion.compiler.gpu import cache, dumps, resources
from palladion.compiler.gpu.generate import generate
from palladion.compiler.gpu.generated import Generated
from palladion.compiler.gpu.nvrtc import Binary
from palladion.compiler.gpu.resources import Resources
from palladion.errors import explain


class RegisterSpill(ValueError):
    """A kernel needs more registers than a thread can have, and `palladion.config.allow_spills` is off."""


class LimitExceeded(ValueError):
    """A kernel compiles, but no GPU of its architecture can launch it."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled kernel call.

    Attributes:
      generated: CUDA C++, and what the launch must know. binary: PTX and cubin.
      resources: what the kernel takes. seconds: that the code generator took.
    """

    generated: Generated
    binary: Binary
    resources: Resources
    seconds: float

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.generated.smem_bytes + self.resources.static_smem_bytes


def build(params: dict[str, Any], arch: str, mesh: Mapping[str, int] | None = None) -> Built:
    """Compile a call to machine code, or find it in the cache.

    Arguments: as of `generate`.
    Raises:
      RegisterSpill, LimitExceeded: it compiles, but should not be launched, or cannot.
      What `generate` raises; NvrtcError, CompilerFailure, TargetNotBuilt: of NVRTC.
      ValueError: MOSAIC_GPU_DUMP_TO names no folder that can be written to.
    """
    start = time.perf_counter()
    generated = generate(params, arch, mesh)
    seconds = time.perf_counter() - start
    jaxpr = str(params["jaxpr"])
    dumps.front(generated, jaxpr)
    check_size(generated, generated.smem_bytes)  # rather than after minutes of NVRTC
    binary = compile_generated(generated)
    dumps.back(generated, jaxpr, binary)
    built = Built(generated, binary, resources.resources_of(binary.log, binary.cubin, generated.name), seconds)
    check_limits(built)
    check_spills(built)
    return built


def compile_generated(generated: Generated) -> Binary:
    """PTX and cubin of generated code, from the cache if it has them."""
    limit = () if generated.max_registers is None else (f"--maxrregcount={generated.max_registers}",)
    return cache.compile_source(generated.source, generated.arch, generated.name, options=limit)


def check_spills(built: Built) -> None:
    """Raises: RegisterSpill: the kernel spills, and that is not allowed."""
    found, name = built.resources, built.generated.name
    if found.spills and not config.get("allow_spills"):
        raise RegisterSpill(
            explain(
                f"{name} spills registers on {built.generated.arch}: a thread has {found.registers}, and its code "
                f"stores {found.spill_store_bytes:,} B and loads {found.spill_load_bytes:,} B of them in memory.",
                hint="smaller tiles, more warpgroups for one tile, or fewer arrays alive at a time; "
                "palladion.config.allow_spills = True (PALLADION_ALLOW_SPILLS=1) compiles it as it is",
            )
        )


def check_size(g: Generated, smem_bytes: int) -> None:
    """Raises: LimitExceeded: more shared memory (`smem_bytes`), tensor memory, threads or blocks than there can be."""
    size = math.prod(g.cluster)
    problems = (
        (
            smem_bytes > resources.SHARED_CTA,
            f"{smem_bytes:,} B of shared memory; a block can have {resources.SHARED_CTA:,} B",
            "smaller tiles, or fewer steps in flight (max_concurrent_steps)",
        ),
        (
            g.tmem_columns > resources.TMEM_COLUMNS,
            f"{g.tmem_columns} columns of tensor memory; an SM has {resources.TMEM_COLUMNS}",
            "smaller accumulators",
        ),
        (
            g.threads > resources.CTA_THREADS,
            f"{g.threads:,} CUDA threads a block; it can have {resources.CTA_THREADS:,}, 8 Pallas threads",
            "fewer Pallas threads (num_threads)",
        ),
        (
            size > resources.CLUSTER,
            f"clusters of {size} blocks; they have {resources.CLUSTER} at most",
            "a smaller cluster",
        ),
        (
            any(n % c for n, c in zip(g.grid, g.cluster)),
            f"a grid of {_times(g.grid)} blocks in clusters of {_times(g.cluster)}, which do not divide it",
            "a grid that is a multiple of the cluster",
        ),
    )
    for wrong, what, fix in problems:
        if wrong:
            raise LimitExceeded(explain(f"{g.name} needs {what}.", hint=fix))


def check_limits(built: Built) -> None:
    """Raises: LimitExceeded: as `check_size`, or more registers than an SM has."""
    g, registers = built.generated, built.resources.registers
    check_size(g, built.smem_bytes)
    if resources.occupancy(registers, g.threads, built.smem_bytes, g.tmem_columns).ctas == 0:
        what = f"{registers} registers for each of {g.threads:,} threads; an SM has {resources.REGISTERS:,}"
        hint = "fewer Pallas threads (num_threads), or smaller tiles"
        raise LimitExceeded(explain(f"{g.name} needs {what}.", hint=hint))


def _times(sizes: tuple[int, ...]) -> str:
    return "×".join(f"{n:,}" for n in sizes)
