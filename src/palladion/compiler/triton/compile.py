"""Triton IR to PTX and cubin, by the triton package's own compiler, in a child process: it may end its process.

`compile_ttir` is a function of text and options. What Triton refuses comes back as `TritonError`, with the user's line
where Triton names it; a compiler that ends its process, hangs or takes too much memory, as child.py says.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from pathlib import Path

from palladion.compiler import child
from palladion.errors import TargetNotBuilt, explain

STAGES = ("ttir", "ttgir", "llir", "ptx")
_WORKER = Path(child.__file__).with_name("worker_triton.py")
# Unset, Triton warns; with it, products and sums contract to fused instructions, as users of Triton are used to.
_ENVIRONMENT = {"TRITON_DEFAULT_FP_FUSION": "1"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What Triton made of a kernel.

    Attributes:
      code: of each stage: "ttir", "ttgir", "llir", "ptx".
      cubin: the machine code, an ELF file.
      registers: 32-bit registers of a thread; spill_bytes: what each thread keeps in local memory instead.
      shared_bytes: shared memory of a program, static and dynamic.
      tensor_memory: columns of tensor memory (sm_100).
      warps: of a program; more than were asked for where Triton specialises warps.
      seconds: that it took; close to 0 when Triton's cache on disk had it.
    """

    code: dict[str, str]
    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_memory: int
    warps: int
    seconds: float


class TritonError(RuntimeError):
    """Triton did not compile a kernel; the message is its own.

    Attributes:
      output: all that it printed.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def available() -> bool:
    """Whether the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


def require() -> None:
    """Raises: TargetNotBuilt: the triton package is missing; the message says how to get it."""
    if not available():
        raise TargetNotBuilt(
            explain(
                "Compiling for NVIDIA GPUs by Triton needs the triton package, which is not installed.",
                hint="pip install 'palladion[triton]'",
            )
        )


def compile_ttir(text: str, sm: int, num_warps: int, num_stages: int) -> Compiled:
    """Compile a module.

    Arguments:
      text: Triton IR.
      sm: compute capability (90).
      num_warps, num_stages: as in `pltriton.CompilerParams`.

    Raises: TritonError: what Triton says; CompilerFailure: it ended its process or did not come back.
    """
    require()
    job = {"module": text, "sm": sm, "num_warps": num_warps, "num_stages": num_stages}
    try:
        reply = child.run(_WORKER, job, name="Triton", env=_ENVIRONMENT)
    except child.CompilerError as error:
        raise TritonError(_reason(error), error.output) from error
    return Compiled(**{f.name: reply[f.name] for f in dataclasses.fields(Compiled)})


@functools.lru_cache(16)
def disassemble(cubin: bytes) -> str:
    """The machine code (SASS) of a cubin, by the tool that comes with triton."""
    require()
    return child.run(_WORKER, {"cubin": cubin}, name="Triton", env=_ENVIRONMENT)["sass"]


# What MLIR prints: `file.py:12:8: error: …`, or `loc("file.py":12:8): error: …`.
_LOCATION = re.compile(r'^(?:loc\()?"?(?P<file>[^"\n]*?)"?:(?P<line>\d+):\d+\)?: error: (?P<what>.*)$', re.MULTILINE)


def _reason(error: child.CompilerError) -> str:
    """The first error that MLIR or ptxas printed, with the user's line if MLIR names it; else the exception's text."""
    match = _LOCATION.search(error.output)
    if match is not None:
        file = match["file"]
        relative = os.path.relpath(file) if os.path.isabs(file) else file
        place = f"{file if relative.startswith('..') else relative}:{match['line']}"
        return explain(f"Triton: {match['what']}", where=None if file.endswith(".ttir") else place)
    ptxas = re.search(r"^ptxas.*? error\s*: (.*)$", f"{error.output}\n{error}", re.MULTILINE)
    lines = str(error).strip().splitlines()
    return f"Triton: {ptxas[1] if ptxas else lines[0] if lines else error.kind}"
