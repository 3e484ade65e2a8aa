"""What Triton made of a call: registers, spills, shared memory against the chip's limit, occupancy, sizes of the code.

Triton compiles a kernel that asks for more shared memory than a program can have; it fails when it is launched. Here
that is a refusal.
"""

from __future__ import annotations

import math
import time
from typing import Any

from palladion.compiler.reports import CompiledCall, Fact, Remark
from palladion.compiler.triton import compile as compiler
from palladion.compiler.triton.chips import Chip, chip_of, occupancy
from palladion.compiler.triton.module import Kernel, lower_call
from palladion.compiler.triton.races import shared_outputs
from palladion.compiler.triton.sequence import plan
from palladion.errors import explain


class SharedMemoryOverflow(ValueError):
    """A kernel needs more shared memory than a program can have."""


def compile_call(params: dict[str, Any], target: str = "triton:sm_90") -> CompiledCall:
    """Compile a call, from the parameters of its `pallas_call` equation.

    Arguments: params: of the equation; target: `triton:sm_90` and the like.
    Raises: UnsupportedPrimitive, ValueError, TypeError, NotImplementedError, TritonError: why it does not compile.
    """
    chip = chip_of(target)
    compiler.require()
    start = time.perf_counter()
    kernel = lower_call(params, chip.sm)
    lowered = time.perf_counter() - start
    done = compiler.compile_ttir(kernel.text, chip.sm, kernel.num_warps, kernel.num_stages)
    check_shared(kernel, chip, done)
    stages = {
        "jaxpr": lambda: str(params["jaxpr"]),
        "lowered": lambda: kernel.plain,
        **{stage: (lambda stage=stage: done.code[stage]) for stage in compiler.STAGES if stage in done.code},
        "sass": lambda: compiler.disassemble(done.cubin),
    }
    facts = facts_of(kernel, chip, done, lowered)
    return CompiledCall(target, params["name"], facts=facts, remarks=remarks_of(params), _stages=stages)


def check_shared(kernel: Kernel, chip: Chip, done: compiler.Compiled) -> None:
    """Raises: SharedMemoryOverflow: the kernel compiles, but no program can have that much."""
    if done.shared_bytes > chip.shared_block:
        raise SharedMemoryOverflow(
            explain(
                f"{kernel.name} needs {_bytes(done.shared_bytes)} of shared memory; a program on sm_{chip.sm} has "
                f"{_bytes(chip.shared_block)}.",
                hint=f"fewer stages (num_stages={kernel.num_stages} now) or smaller blocks",
            )
        )


def facts_of(kernel: Kernel, chip: Chip, done: compiler.Compiled, lowered: float) -> tuple[Fact, ...]:
    """The numbers of a compiled kernel."""
    programs, reason = occupancy(chip, done.registers, done.shared_bytes, done.warps)
    warps = programs * done.warps
    share = 100 * 32 * warps // chip.threads
    spills = f"{done.spill_bytes} B a thread" if done.spill_bytes else "none"
    grid = "×".join("?" if n is None else f"{n:,}" for n in kernel.grid)
    count = None if None in kernel.grid else math.prod(n or 1 for n in kernel.grid)
    tensor = (Fact("tensor_memory_columns", "tensor memory", done.tensor_memory, f"{done.tensor_memory} columns"),)
    return (
        Fact("registers", "registers", done.registers, f"{done.registers} a thread"),
        Fact("spill_bytes", "spills", done.spill_bytes, spills),
        Fact("shared_bytes", "shared memory", done.shared_bytes,
             f"{_bytes(done.shared_bytes)} of {_bytes(chip.shared_block)}"),
        *(tensor if done.tensor_memory else ()),
        Fact("occupancy", "occupancy", programs, f"{programs} programs an SM, {share}% of its threads ({reason})"),
        Fact("num_warps", "warps", done.warps, f"{done.warps} a program"),
        Fact("num_stages", "stages", kernel.num_stages, f"{kernel.num_stages}"),
        Fact("programs", "programs", count, grid),
        Fact("ptx_bytes", "PTX", len(done.code["ptx"]), _bytes(len(done.code["ptx"]))),
        Fact("code_bytes", "code", len(done.cubin), _bytes(len(done.cubin))),
        Fact("lower_seconds", "lowering", lowered, f"{1e3 * lowered:.0f} ms"),
        Fact("triton_seconds", "Triton", done.seconds, f"{1e3 * done.seconds:.0f} ms"),
    )  # fmt: skip


def remarks_of(params: dict[str, Any]) -> tuple[Remark, ...]:
    """Grid axes: which became loops inside each program; along which several programs store in one block."""
    gm = params["grid_mapping"]
    shared = {found.axis: found for found in shared_outputs(params)}
    loops = {found.axis: found for found in plan(params).axes}
    remarks = []
    for axis, n in enumerate(gm.grid):
        if axis in loops:
            found = loops[axis]
            why = f"{found.label} is carried along it, so it is a loop inside each program"
            remarks.append(Remark("axis", n, axis, False, "carried", why, (found.where,) if found.where else ()))
        elif axis in shared:
            found = shared[axis]
            why = f"its programs all store in the same block of {found.label}, and any of them may be the last"
            remarks.append(Remark("axis", n, axis, False, "same-block", why, (found.where,) if found.where else ()))
        else:
            remarks.append(Remark("axis", n, axis, True, "parallel", ""))
    return tuple(remarks)


def _bytes(n: int) -> str:
    return f"{n:,} B" if n < 10 << 10 else f"{n / 1024:,.1f} KiB"
