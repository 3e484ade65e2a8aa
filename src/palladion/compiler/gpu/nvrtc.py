"""CUDA C++ to PTX and cubin by NVRTC, in a child process: with no GPU, and without danger to the user's process.

    binary = compile_source(source, "sm_90a", "softmax")      # Binary(ptx, cubin, log, seconds)

One call of NVRTC gives both, so that the PTX is the one the machine code was assembled from. The log holds what ptxas
says of each kernel (registers, spills), which `resources.py` reads. What NVRTC refuses comes back as `NvrtcError`, with
the line of CUDA and the user's own, by the comments `// user.py:12` that the code generator writes.

Options and messages: NVRTC's documentation, "Supported Compile Options"; ptxas's line numbers are of the PTX and lead
to the CUDA by its `.loc` directives (PTX ISA, "Debugging Directives").
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palladion.compiler import child
from palladion.compiler.gpu import places
from palladion.errors import TargetNotBuilt, explain

SECONDS = 120  # that a kernel may take; those of real size take less than two
_WORKER = Path(child.__file__).with_name("worker_nvrtc.py")
_FOLDER = "/palladion/"  # an absolute name, or NVRTC puts the working folder into the line tables


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled translation unit.

    Attributes:
      ptx: as text. cubin: the machine code, an ELF file.
      log: all that NVRTC and ptxas said: warnings, registers and spills of each kernel.
      seconds: that NVRTC took, also when the cache on disk had the result.
      arch, name, source, options: what it was compiled from.
      from_disk: whether the cache had it.
    """

    ptx: str
    cubin: bytes
    log: str
    seconds: float
    arch: str = ""
    name: str = ""
    source: str = dataclasses.field(default="", repr=False)
    options: tuple[str, ...] = ()
    from_disk: bool = False


class NvrtcError(RuntimeError):
    """NVRTC refused a source.

    Attributes:
      reason: its first error, one line. line: of the CUDA source, from 1, or None.
      where: the user's line, or None. log: all that it said. source: what it was given.
    """

    def __init__(
        self, message: str, *, reason: str, line: int | None, where: str | None, log: str, source: str
    ) -> None:
        super().__init__(message)
        self.reason, self.line, self.where, self.log, self.source = reason, line, where, log, source


def available() -> bool:
    """Whether the package that calls NVRTC is installed."""
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ImportError:  # no `cuda` at all
        return False


def _missing() -> TargetNotBuilt:
    message = "Compiling CUDA C++ needs NVRTC and cuda-bindings, which are not installed."
    return TargetNotBuilt(explain(message, hint="pip install 'palladion[gpu]'"))


def require() -> None:
    """Raises: TargetNotBuilt: cuda-bindings is missing; the message says how to get it."""
    if not available():
        raise _missing()


def default_options(arch: str) -> tuple[str, ...]:
    """The options that every kernel is compiled with. Names that generated code does not use (177, 550) are no news."""
    plain = ("-default-device", "--std=c++17", "-lineinfo", "--ptxas-options=-v", "--diag-suppress=177,550")
    return (f"--gpu-architecture={arch}", *plain)


@functools.cache
def version() -> str:
    """NVRTC's version; of the wheel, else its own word, which starts it."""
    try:
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        require()
        return _ask({})["version"]


def compile_source(source: str, arch: str, name: str, *, options: Sequence[str] = ()) -> Binary:
    """Compile a translation unit, always afresh (`cache.py` remembers). Threads may call it at once.

    Arguments:
      source: CUDA C++; `#include` finds only NVRTC's own headers.
      arch: "sm_90a", "sm_100a"; NVRTC knows more.
      name: of the kernel, for messages and line tables.
      options: further ones, such as "--maxrregcount=128".

    Raises:
      NvrtcError: NVRTC or ptxas refuses it; the message has the line of CUDA and the user's.
      TargetNotBuilt: NVRTC is not installed. CompilerFailure: it crashed, or took too long or too much memory.
    """
    require()
    every = (*default_options(arch), *options)
    if "\0" in source or any("\0" in o for o in every):
        raise ValueError("CUDA C++ cannot hold a NUL character.")
    file = _FOLDER + re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) + ".cu"
    text = source.encode(errors="backslashreplace").decode()  # odd file names in comments
    reply = _ask({"source": text, "name": file, "options": every})
    if not reply["ok"]:
        raise _refusal(reply["log"], reply["ptx"], source, arch, name)
    return Binary(reply["ptx"], reply["cubin"], reply["log"], reply["seconds"], arch, name, source, tuple(options))


def _ask(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return child.run(_WORKER, job, name="NVRTC", seconds=SECONDS)
    except child.CompilerError as error:
        if error.kind in ("ModuleNotFoundError", "ImportError", "DynamicLibNotFoundError"):
            raise _missing() from error
        raise


# --- what NVRTC and ptxas complain of ---------------------------------------------------------------------------------
# `/palladion/softmax.cu(8): error: identifier "c" is undefined`
_CUDA = re.compile(r"^(?P<file>[^\n(]*)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<what>.*)$", re.MULTILINE)
# `ptxas application ptx input, line 108; error   : Arguments mismatch for instruction 'bar'`; some have no line
_PTXAS = re.compile(r"^ptxas[^\n;:]*?(?:, line (?P<line>\d+); )?(?:error|fatal)\s*: (?P<what>.*)$", re.MULTILINE)
# `nvrtc: error: unrecognized option --frobnicate found`
_NVRTC = re.compile(r"^nvrtc[^\n:]*: error: (?P<what>.*)$", re.MULTILINE)


def _refusal(log: str, ptx: str, source: str, arch: str, name: str) -> NvrtcError:
    """The exception for a log with an error in it."""
    line, ptx_line = None, None
    if match := _CUDA.search(log):
        what = match["what"]
        line = int(match["line"]) if match["file"].startswith(_FOLDER) else None
    elif match := _PTXAS.search(log):
        what = f"ptxas: {match['what']}"
        if match["line"]:
            ptx_line = _line(ptx, int(match["line"]))
            line = places.cuda_line(ptx, int(match["line"]))
    elif match := _NVRTC.search(log):
        what = match["what"]
    else:
        what = (log.strip().splitlines() or ["it does not say why"])[0]
    where = places.user_line(source, line)
    message = explain(
        f"NVRTC does not compile {name} for {arch}: {what.strip()}",
        where=where,
        **{f"line {line} of the CUDA": line and _line(source, line), "the PTX": ptx_line},
        hint="where the kernel has plgpu.inline_ptx, look there; else a mistake of Palladion's code generator. "
        "MOSAIC_GPU_DUMP_TO=FOLDER keeps the CUDA",
    )
    return NvrtcError(message, reason=what.strip(), line=line, where=where, log=log, source=source)


def _line(text: str, number: int) -> str | None:
    lines = text.splitlines()
    return lines[number - 1].strip() if 0 < number <= len(lines) else None
