"""What came of a call for Hopper or Blackwell: registers, spills, shared memory, occupancy, the main loop's make-up.

Every number is of the machine code: ptxas's own words (resources.py) and the disassembled cubin (loops.py). No GPU is
needed. A kernel that spills, or that no GPU can launch, is a refusal (build.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from palladion.compiler.gpu import dumps, loops, places, resources, sass, tools
from palladion.compiler.gpu.build import Built, build
from palladion.compiler.reports import CompiledCall, Fact, Remark
from palladion.errors import count_of

_SHOWN = 4  # kinds of instructions of the main loop that the table names


def compile_call(
    params: dict[str, Any], target: str = "gpu:sm_90a", mesh: Mapping[str, int] | None = None
) -> CompiledCall:
    """Compile a call, from the parameters of its `pallas_call` equation.

    Arguments: params: of the equation; target: `gpu:sm_90a` and the like; mesh: axes of the devices around the call.
    Raises: why it does not compile, as `build` does.
    """
    arch = target.partition(":")[2]
    built = build(params, arch, mesh)
    binary = built.binary
    stages = {
        "jaxpr": lambda: str(params["jaxpr"]),
        "layouts": lambda: dumps.layouts_of(built.generated),
        "cuda": lambda: built.generated.source,
        "ptx": lambda: binary.ptx,
        "ptxas": lambda: binary.log,
        "sass": lambda: sass.disassemble(binary.cubin, False),
        "sass_ctrl": lambda: dumps.control_codes(binary),
    }
    facts = (*facts_of(built), *_machine_code(built))
    return CompiledCall(target, params["name"], facts=facts, remarks=tuple(_warnings(built)), _stages=stages)


def facts_of(built: Built) -> tuple[Fact, ...]:
    """The numbers of a compiled call that need no disassembler."""
    g, r = built.generated, built.resources
    held = resources.occupancy(r.registers, g.threads, built.smem_bytes, g.tmem_columns)
    size, count = math.prod(g.cluster), math.prod(g.grid)
    _, sms = resources.CHIPS[g.arch]
    spilled = f"{r.spill_store_bytes:,} B stored, {r.spill_load_bytes:,} B loaded a thread" if r.spills else "none"
    portable = " (not portable)" if size > resources.PORTABLE_CLUSTER else ""
    return (
        Fact("registers", "registers", r.registers, f"{r.registers} a thread"),
        Fact("spill_bytes", "spills", r.spill_store_bytes + r.spill_load_bytes, spilled),
        *([Fact("stack_bytes", "stack", r.stack_bytes, f"{r.stack_bytes:,} B a thread")] if r.stack_bytes else []),
        Fact("shared_bytes", "shared memory", built.smem_bytes,
             f"{_bytes(built.smem_bytes)} of {_bytes(resources.SHARED_CTA)}"),
        Fact("static_shared_bytes", "of it static", r.static_smem_bytes, _bytes(r.static_smem_bytes)),
        *([Fact("tensor_memory_columns", "tensor memory", g.tmem_columns, f"{g.tmem_columns} columns")]
          if g.tmem_columns else []),
        Fact("barriers", "mbarriers", g.barriers, f"{g.barriers}"),
        Fact("named_barriers", "named barriers", r.named_barriers, f"{r.named_barriers} of 16"),
        Fact("threads", "threads", g.threads, f"{g.threads} a block"),
        *([Fact("cluster", "cluster", size, f"{_times(g.cluster)} blocks{portable}")] if size > 1 else []),
        Fact("occupancy", "occupancy", held.ctas,
             f"{count_of(held.ctas, 'block')} an SM, {held.share}% ({held.reason})"),
        Fact("programs", "programs", count, f"{count_of(count, 'block')}, of {held.ctas * sms:,} at a time"),
        Fact("ptx_bytes", "PTX", len(built.binary.ptx), _bytes(len(built.binary.ptx))),
        Fact("code_bytes", "code", r.code_bytes, _bytes(r.code_bytes)),
        Fact("lower_seconds", "lowering", built.seconds, f"{1e3 * built.seconds:.0f} ms"),
        Fact("nvrtc_seconds", "NVRTC", built.binary.seconds,
             f"{1e3 * built.binary.seconds:.0f} ms{' (from the cache)' if built.binary.from_disk else ''}"),
        Fact("warnings", "warnings", list(built.resources.warnings), f"{len(built.resources.warnings) or 'none'}"),
    )  # fmt: skip


def _warnings(built: Built) -> list[Remark]:
    """What NVRTC and ptxas warn of, each with the user's line where it names one of the PTX."""
    found = []
    for text in built.resources.warnings:
        match = re.search(r"\bline (\d+)", text)
        line = places.cuda_line(built.binary.ptx, int(match[1])) if match else None
        where = places.user_line(built.binary.source, line)
        found.append(Remark("warning", None, None, False, "ptxas", text, (where,) if where else ()))
    return found


def _machine_code(built: Built) -> list[Fact]:
    """The numbers that need the disassembler; none where it is not installed."""
    if tools.find_tool("nvdisasm") is None:
        return []
    code = sass.instructions(sass.disassemble(built.binary.cubin))[built.generated.name]
    facts = []
    if moved := loops.reallocations(code):
        text = ", ".join(map(str, dict.fromkeys(moved)))
        facts.append(Fact("reallocated_registers", "reallocated to", list(moved), f"{text} a thread"))
    loop = loops.main_loop(code)
    if loop is not None:
        where = places.user_line(built.binary.source, loop.line)
        value = {
            "instructions": len(loop.own),
            "tensor": loop.tensor,
            "mix": dict(loop.mix),
            "where": where,
        }
        at = f" of {where.partition(' (')[0]}" if where else ""
        kinds = sorted(loop.kinds.items(), key=lambda kind: (kind[0] != "tensor", -kind[1]))
        most = ", ".join(f"{n} {kind}" for kind, n in kinds[:_SHOWN])
        rest = sum(n for _, n in kinds[_SHOWN:])
        facts += [
            Fact("main_loop", "main loop", value, f"{count_of(len(loop.own), 'instruction')}{at}"),
            Fact("main_loop_kinds", "made up of", dict(kinds), most + (f", {rest} others" if rest else "")),
        ]
    return facts


def _times(sizes: tuple[int, ...]) -> str:
    return "×".join(f"{n:,}" for n in sizes)


def _bytes(n: int) -> str:
    return f"{n:,} B" if n < 10 << 10 else f"{n / 1024:,.1f} KiB"
