"""The triton package's compiler in a child process (`worker.py`): Triton IR becomes PTX and machine code, with no GPU.

Triton skips its first passes (inlining, combining a product with the sum it goes into, unrolling) for a source that is
IR already; they are run here. It keeps what it compiled in its own cache on disk (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
from triton import knobs  # pyright: ignore[reportMissingImports]
from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler.compiler import make_backend  # pyright: ignore[reportMissingImports]

STAGES = ("ttgir", "llir", "ptx")


def compile(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one module, or disassemble machine code.

    Arguments: job: `module` (Triton IR as text), `sm` (90), `num_warps`, `num_stages`, `variables` (Triton's of the
      environment, which may have changed since this process began); or `cubin`.
    Returns: `code` (text by stage), `cubin`, `registers`, `spill_bytes`, `shared_bytes`, `tensor_memory` (columns),
      `warps`, `seconds`; or `sass`.
    Raises: what Triton raises.
    """
    if "variables" in job:
        for name in [k for k in os.environ if k.startswith("TRITON_")]:
            del os.environ[name]
        os.environ.update(job["variables"])
    with tempfile.TemporaryDirectory(prefix="palladion-triton-") as folder:
        if "cubin" in job:
            return {"sass": _tool(knobs.nvidia.nvdisasm, "-c", Path(folder), job["cubin"])}
        return _compile(Path(folder), job["module"], job["sm"], job["num_warps"], job["num_stages"])


def _compile(folder: Path, text: str, sm: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    start = time.perf_counter()
    target = GPUTarget("cuda", sm, 32)
    backend: Any = make_backend(target)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    source = folder / "kernel.ttir"  # the suffix says what stage it is
    source.write_text(text)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(source), context)
    module.context = context
    backend.make_ttir(module, {}, backend.parse_options(dict(options)), sm)
    first = str(module)
    source.write_text(first)
    kernel = triton.compile(str(source), target=target, options=options)
    cubin, metadata = bytes(kernel.asm["cubin"]), kernel.metadata
    usage = resources(_tool(knobs.nvidia.cuobjdump, "-res-usage", folder, cubin))
    return {
        "code": {"ttir": first, **{stage: str(kernel.asm[stage]) for stage in STAGES}},
        "cubin": cubin,
        "registers": usage["REG"],
        "spill_bytes": max(usage["STACK"] + usage["LOCAL"] - _own_stack(str(kernel.asm["ptx"])), 0),
        "shared_bytes": usage["SHARED"] + int(metadata.shared),  # the machine code tells of the static part only
        "tensor_memory": int(getattr(metadata, "tmem_size", 0) or 0),
        "warps": int(metadata.num_warps),
        "seconds": time.perf_counter() - start,
    }


def _own_stack(ptx: str) -> int:
    """Bytes of local memory that the code asks for itself, for the arguments of prints; the rest are spills."""
    return sum(int(n) for n in re.findall(r"\.local .*__local_depot\d+\[(\d+)\]", ptx))


def resources(text: str) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL, as cuobjdump lists them: registers of a thread, and bytes."""
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return {"REG": 0, "STACK": 0, "SHARED": 0, "LOCAL": 0} | found


def _tool(tool: Any, option: str, folder: Path, cubin: bytes) -> str:
    """What one of CUDA's tools, which come with triton, says of machine code."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool.path, option, str(file)], capture_output=True, text=True, check=True).stdout
