"""What native compilation of a call came to: code size, arena, vectors, threads, and why not more.

The call is compiled afresh, without the cache and without being loaded: the times are true, and the lines in the
remarks are those of this call (the cache knows nothing of lines).
"""

from __future__ import annotations

import time
from typing import Any

import llvmlite.binding as llvm

from palladion import locations
from palladion.compiler.cpu import boundary, cache, dumps, loopnotes, runtime, target
from palladion.compiler.cpu.compile import make_unit
from palladion.compiler.cpu.unit import Unit
from palladion.compiler.reports import CompiledCall, Fact, Remark


def compile_call(params: dict[str, Any], target_name: str = "cpu") -> CompiledCall:
    """Compile a call, from the parameters of its `pallas_call` equation.

    Raises: UnsupportedPrimitive, TypeError, UnsupportedHost: why it has no native code.
    """
    start = time.perf_counter()
    if boundary.has_parts(params["jaxpr"]):
        from palladion.compiler.cpu.lower.parts import split_params

        params = split_params(params)
    unit = make_unit(params)
    module, description = unit.build()
    text = str(module)
    lowered = time.perf_counter()
    code = cache.compile_module(text)
    done = time.perf_counter()
    sizes = section_sizes(code)
    host = target.host()
    threads = description.workers
    facts = (
        Fact("code_bytes", "code", sizes["code"], _bytes(sizes["code"])),
        Fact("constant_bytes", "constants", sizes["data"], _bytes(sizes["data"])),
        Fact("arena_bytes", "arena", unit.arena_bytes, f"{_bytes(unit.arena_bytes)} a thread"),
        Fact("vector_bits", "vectors", 8 * host.vector_bytes, f"{8 * host.vector_bytes} bits ({host.LANES_F32} x f32)"),
        Fact("threads", "threads", threads, f"{threads}{_why_so_few(unit, description)}"),
        Fact("lower_seconds", "lowering", lowered - start, f"{1e3 * (lowered - start):.0f} ms"),
        Fact("llvm_seconds", "LLVM", done - lowered, f"{1e3 * (done - lowered):.0f} ms"),
    )
    stages = {
        "jaxpr": lambda: str(unit.jaxpr),
        "nests": lambda: dumps.nests(unit),
        "llvm": lambda: text,
        "asm": lambda: cache.assembly(text),
    }
    return CompiledCall(target_name, unit.name, facts=facts, remarks=(*_axes(unit), *_loops(unit)), _stages=stages)


def _why_so_few(unit: Unit, description: runtime.KernelDescription) -> str:
    if description.workers > 1 or unit.order.groups == 1 or runtime.cpu_count() == 1 or unit.num_threads == 1:
        return ""
    return " (too little work for more)"


def section_sizes(code: bytes) -> dict[str, int]:
    """Bytes of machine code and of constant data in an object file."""
    sizes = {"code": 0, "data": 0}
    for section in llvm.ObjectFileRef.from_data(code).sections():
        if section.is_text():
            sizes["code"] += section.size()
        elif (section.name() or b"").startswith((b".rodata", b".data")):
            sizes["data"] += section.size()
    return sizes


def _bytes(n: int) -> str:
    return f"{n:,} B" if n < 10 << 10 else f"{n / 1024:,.1f} KiB"


def _axes(unit: Unit) -> list[Remark]:
    sizes = unit.gm.grid
    return [
        Remark("axis", n, a, axis.parallel, axis.kind, axis.why, (axis.where,) if axis.where else ())
        for a, (n, axis) in enumerate(zip(sizes, unit.order.axes))
    ]


def _loops(unit: Unit) -> list[Remark]:
    result: dict[Remark, None] = {}  # loops that are alike are told of once
    for s in unit.products():
        sizes = "×".join(f"{n:,}" for n in ((s.batch,) if s.batch > 1 else ()) + (s.m, s.n, s.k))
        where = tuple(line for eqn in s.where if (line := locations.location_of(eqn)))
        result[Remark("product", s.batch * s.m * s.n * s.k, None, True, sizes, "", where)] = None
    for note in unit.notes:
        if note.reason == "outer":
            continue
        where = dict.fromkeys(line for eqn in note.eqns if (line := locations.location_of(eqn)))
        if note.reason is not None:
            kind, why = note.reason, loopnotes.REASONS[note.reason]
        elif note.by_element:
            kind, why = "element-access", f"but {note.by_element} of its accesses are not contiguous"
        else:
            kind, why = "contiguous", ""
        result[Remark(note.kind, note.extent, None, note.reason is None, kind, why, tuple(where))] = None
    return list(result)
