"""What a compiled kernel takes of an SM: registers, spills, shared memory, barriers, code; and how many blocks fit.

`resources_of` reads what ptxas said (`--ptxas-options=-v`, which every compilation asks for) and the cubin's sections;
`usage_of_cubin` asks `cuobjdump -res-usage`, for cubins that come without a log. Limits and granularities: CUDA
programming guide, "Technical specifications per compute capability"; how registers are dealt out to the four parts of
an SM: CUDA's occupancy calculator. Both GPUs that this compiler knows have the same numbers.
"""

from __future__ import annotations

import dataclasses
import re
import struct

from palladion.compiler.gpu.tools import run_tool

THREADS, CTAS, REGISTERS = 2048, 32, 65536  # of an SM
CTA_THREADS = 1024
PARTS = 4  # of an SM, each with its own registers
REGISTER_PORTION = 256  # of a warp
SHARED_SM, SHARED_CTA, SHARED_RESERVED, SHARED_PORTION = 233472, 232448, 1024, 128  # bytes
TMEM_COLUMNS = 512
CLUSTER, PORTABLE_CLUSTER = 16, 8
CHIPS = {"sm_90a": ("H100", 132), "sm_100a": ("B200", 148)}  # name and SMs


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas made of one kernel.

    Attributes:
      registers: 32-bit registers of a thread, as launched.
      stack_bytes: local memory of a thread: arrays that are indexed at run time, and spills.
      spill_store_bytes, spill_load_bytes: of a thread, in the kernel and the functions that it calls: how much code
        writes registers to local memory for lack of room, and reads them back.
      static_smem_bytes: shared memory declared in the source; without what the system takes.
      named_barriers: the highest number of a `bar` in use, and one; 0 for none.
      code_bytes: of machine code.
      warnings: what NVRTC and ptxas warn of, one line each: a `setmaxnreg` that is ignored, wgmma made serial.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    named_barriers: int
    code_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> bool:
        """Whether registers are spilled."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_WARNING = re.compile(r"(?:warning\s*(?:#[\w-]+)?\s*:|\(C\d+\)|Potential Performance Loss)")


def resources_of(log: str, cubin: bytes, name: str) -> Resources:
    """What a kernel takes.

    Arguments: log: of its compilation. cubin: that came of it. name: of the `__global__` function.
    Raises: LookupError: the log says nothing of such a kernel.
    """
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if _ENTRY.search(line)]
    own = next((i for i in starts if _ENTRY.findall(lines[i]) == [name]), None)
    if own is None:
        raise LookupError(f"ptxas says nothing of a kernel {name}; it compiled {_ENTRY.findall(log) or 'none'}")
    end = next((i for i in starts if i > own), len(lines))
    part = "\n".join(lines[own:end])
    used = _USED.search(part)
    # The functions that it calls stand after it, each with its spills; the stack of all together on its own line.
    spills = [tuple(map(int, found)) for found in _SPILLS.findall(part)]
    total = re.search(r"(\d+) bytes cumulative stack size", part)
    barriers = re.search(r"used (\d+) barriers", part)
    shared = re.search(r"(\d+) bytes smem", part)
    return Resources(
        registers=int(used[1]) if used else 0,
        stack_bytes=int(total[1]) if total else max((s[0] for s in spills), default=0),
        spill_store_bytes=sum(s[1] for s in spills),
        spill_load_bytes=sum(s[2] for s in spills),
        static_smem_bytes=int(shared[1]) if shared else 0,
        named_barriers=int(barriers[1]) if barriers else 0,
        code_bytes=sections(cubin).get(f".text.{name}", 0),
        warnings=warnings_in(log),
    )


def warnings_in(log: str) -> tuple[str, ...]:
    """The warnings of a compilation, each once: `(C7508) Potential Performance Loss: …`, `k.cu(3): warning …`."""
    lines = (re.sub(r"^ptxas (?:info|warning)\s*:\s*", "", line.strip()) for line in log.splitlines()
             if _WARNING.search(line))  # fmt: skip
    return tuple(dict.fromkeys(lines))


def sections(cubin: bytes) -> dict[str, int]:
    """Names and sizes of the sections of an ELF file.

    Raises: ValueError: it is none.
    """
    if cubin[:6] != b"\x7fELF\x02\x01" or len(cubin) < 64:
        raise ValueError("not a 64-bit ELF file")
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + size * i) for i in range(count)]
    start = headers[names][4]
    return {cubin[(at := start + h[0]) : cubin.index(b"\0", at)].decode(): h[5] for h in headers}


def usage_of_cubin(cubin: bytes, name: str) -> dict[str, int]:
    """REG, STACK, SHARED (with what the system takes) and LOCAL of a kernel, as `cuobjdump` lists them.

    Raises: LookupError: there is no such kernel. TargetNotBuilt: cuobjdump is not installed.
    """
    text = run_tool("cuobjdump", ("-res-usage",), cubin)
    match = re.search(rf"^ *Function {re.escape(name)}:\n(.*)$", text, re.MULTILINE)
    if match is None:
        raise LookupError(f"the cubin has no kernel {name}")
    return {key: int(n) for key, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", match[1])}


# --- occupancy --------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many blocks an SM holds.

    Attributes:
      ctas: blocks at a time; 0: none fits.
      reason: what stops more: "threads", "registers", "shared memory", "blocks" or "tensor memory".
      warps: of those blocks. share: of the SM's threads, in percent.
    """

    ctas: int
    reason: str
    warps: int
    share: int


def occupancy(registers: int, threads: int, smem_bytes: int, tmem_columns: int = 0) -> Occupancy:
    """How many blocks of a kernel an SM of sm_90 or sm_100 holds at a time.

    Arguments:
      registers: of a thread as launched; `setmaxnreg` moves them between the warpgroups of a block.
      threads: of a block. smem_bytes: shared memory of a block, static and dynamic.
      tmem_columns: of tensor memory; blocks that find none wait for it.
    """
    warps = -(-threads // 32)
    portion = -(-max(registers, 1) * 32 // REGISTER_PORTION) * REGISTER_PORTION
    shared = -(-(smem_bytes + SHARED_RESERVED) // SHARED_PORTION) * SHARED_PORTION
    fit = {
        "threads": THREADS // (32 * warps) if threads <= CTA_THREADS else 0,
        "registers": REGISTERS // PARTS // portion * PARTS // warps,
        "shared memory": SHARED_SM // shared if smem_bytes <= SHARED_CTA else 0,
        "blocks": CTAS,
    }
    if tmem_columns:
        fit["tensor memory"] = TMEM_COLUMNS // tmem_columns
    reason = min(fit, key=lambda name: fit[name])
    ctas = fit[reason]
    return Occupancy(ctas, reason, ctas * warps, 100 * 32 * ctas * warps // THREADS)
