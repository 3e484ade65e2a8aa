"""MOSAIC_GPU_DUMP_*: each stage of every Mosaic GPU kernel that is compiled, on standard output or as files.

    MOSAIC_GPU_DUMP_PTXAS          what NVRTC and ptxas say
    MOSAIC_GPU_DUMP_PTX            PTX
    MOSAIC_GPU_DUMP_SASS           machine code, as nvdisasm lists it
    MOSAIC_GPU_DUMP_SASS_CTRL      machine code with control codes, as maxas writes them (sass.py)
    MOSAIC_GPU_DUMP_MLIR_PASSES    in place of MLIR: jaxpr, layouts, CUDA C++
    MOSAIC_GPU_DUMP_TO=FOLDER      all of these, as files NAME-HASH.jaxpr.txt, .layouts.txt, .cu, .ptxas.txt, .ptx,
                                   .sass, .sass_ctrl
    MOSAIC_GPU_DUMP_LLVM, MOSAIC_GPU_LLVM_DEBUG_ONLY    there is no LLVM IR here, which is said once

HASH is of the jaxpr, the CUDA C++ and the architecture: kernels of one name do not overwrite each other, and the same
kernel compiled again has the same names. A file appears under its name whole. None of it needs a GPU. The jaxpr, the
layouts and the CUDA come before NVRTC is asked: they are there when it refuses.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable

from palladion import config
from palladion.compiler.gpu import sass
from palladion.compiler.gpu.generated import Generated
from palladion.compiler.gpu.nvrtc import Binary
from palladion.errors import PalladionWarning, explain

# Stages by the variable that prints them: (title, suffix of the file).
_FRONT = "MOSAIC_GPU_DUMP_MLIR_PASSES"
_BACK = {
    "MOSAIC_GPU_DUMP_PTXAS": ("ptxas", "ptxas.txt"),
    "MOSAIC_GPU_DUMP_PTX": ("PTX", "ptx"),
    "MOSAIC_GPU_DUMP_SASS": ("SASS", "sass"),
    "MOSAIC_GPU_DUMP_SASS_CTRL": ("SASS with control codes", "sass_ctrl"),
}
_ABSENT = {
    _FRONT: "has no MLIR passes: a jaxpr becomes CUDA C++. What is printed is the jaxpr, the layouts and the CUDA",
    "MOSAIC_GPU_DUMP_LLVM": "has no LLVM IR: it writes CUDA C++, and NVRTC shows nothing before its PTX",
    "MOSAIC_GPU_LLVM_DEBUG_ONLY": "has no LLVM of its own, whose debug output could be chosen: it writes CUDA C++",
}
_said: set[str] = set()


def front(generated: Generated, jaxpr: str) -> None:
    """Dump what there is before NVRTC, as far as it is asked for.

    Arguments: generated: the kernel. jaxpr: its text.
    Raises: ValueError: MOSAIC_GPU_DUMP_TO names no folder that can be written to.
    """
    for name, what in _ABSENT.items():
        asked = config.variable(name) if name == "MOSAIC_GPU_LLVM_DEBUG_ONLY" else config.switch(name)
        if asked and name not in _said:
            _said.add(name)
            others = "MOSAIC_GPU_DUMP_PTX and MOSAIC_GPU_DUMP_SASS show what comes after"
            warnings.warn(f"{name}: this compiler {what}. {others}.", PalladionWarning, stacklevel=2)
    layouts = layouts_of(generated)
    stages = {
        "jaxpr": ("jaxpr.txt", lambda: jaxpr),
        "layouts": ("layouts.txt", lambda: layouts),
        "CUDA": ("cu", lambda: generated.source),
    }
    printed = config.switch(_FRONT)
    _dump(generated, jaxpr, {title: (suffix, printed, make) for title, (suffix, make) in stages.items()})


def back(generated: Generated, jaxpr: str, binary: Binary) -> None:
    """Dump what came of NVRTC, as far as it is asked for; arguments and exceptions as of `front`."""
    make: dict[str, Callable[[], str]] = {
        "ptxas": lambda: binary.log,
        "PTX": lambda: binary.ptx,
        "SASS": lambda: sass.disassemble(binary.cubin, False),
        "SASS with control codes": lambda: control_codes(binary),
    }
    stages = {title: (suffix, config.switch(name), make[title]) for name, (title, suffix) in _BACK.items()}
    _dump(generated, jaxpr, stages)


def layouts_of(generated: Generated) -> str:
    """How arrays and buffers of a kernel lie, as text."""
    return "\n".join(generated.layouts) or f"{generated.name} has neither arrays nor buffers"


def control_codes(binary: Binary) -> str:
    """The machine code of all kernels of a binary with control codes."""
    found = sass.instructions(sass.disassemble(binary.cubin))
    head = "// wait mask : read barrier : write barrier : yield : stall"
    return "\n".join([head, *(sass.control_listing(code) for code in found.values())])


def stem(generated: Generated, jaxpr: str) -> str:
    """The name that all files of a kernel begin with."""
    text = "\0".join((generated.arch, jaxpr, generated.source))
    return f"{generated.name}-{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


def _dump(generated: Generated, jaxpr: str, stages: dict[str, tuple[str, bool, Callable[[], str]]]) -> None:
    """Print and write stages: {title: (suffix, whether it is printed, its text)}."""
    folder = config.variable("MOSAIC_GPU_DUMP_TO")
    for title, (suffix, printed, make) in stages.items():
        if not printed and folder is None:
            continue
        text = make().rstrip("\n") + "\n"
        if printed:
            print(f"// ---- {generated.name}, {generated.arch}: {title}\n{text}", flush=True, file=sys.stdout)
        if folder is not None:
            _put(folder, f"{stem(generated, jaxpr)}.{suffix}", text)


def _put(folder: str, name: str, text: str) -> None:
    place = pathlib.Path(folder).expanduser()
    if not place.is_dir():
        raise ValueError(
            explain(
                f"MOSAIC_GPU_DUMP_TO={folder}: there is no such folder.",
                hint="make it first, or unset MOSAIC_GPU_DUMP_TO",
            )
        )
    temporary = place / f".{os.getpid()}-{threading.get_ident()}-{name}"
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, place / name)
    except OSError as error:
        raise ValueError(
            explain(
                f"MOSAIC_GPU_DUMP_TO={folder}: {name} cannot be written there ({error.strerror}).",
                hint="name a folder that you may write to, or unset MOSAIC_GPU_DUMP_TO",
            )
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
