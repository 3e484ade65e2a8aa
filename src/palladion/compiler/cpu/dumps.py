"""PALLADION_DUMP=DIR: every stage of every kernel that is compiled, as files.

    NAME-HASH.jaxpr.txt         the kernel
    NAME-HASH.nests.txt         its loop nests: as lowered, and after each pass
    NAME-HASH.ll, NAME-HASH.s   LLVM IR and assembly

HASH is of the IR, so kernels of one name do not overwrite each other, and several processes may write at once: a file
appears under its name whole.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import threading
from typing import TYPE_CHECKING, Any

from palladion.compiler.cpu import cache
from palladion.errors import explain

if TYPE_CHECKING:
    from palladion.compiler.cpu.unit import Unit


def folder() -> pathlib.Path | None:
    """The folder that PALLADION_DUMP names; None where it is not set."""
    name = os.environ.get("PALLADION_DUMP")
    return pathlib.Path(name).expanduser() if name else None


def nests(unit: Unit) -> str:
    """The loop nests of a kernel after each pass: of its version inside the arrays, then of the one over their edge."""
    from palladion.compiler.cpu import ir

    parts = [f"# head: where the windows are\n{ir.render(unit.program.head)}"]
    for which, version in (("inner", unit.program.inner), ("edge", unit.program.edge)):
        if version is not None:
            parts += [f"# {which}, {stage}\n{ir.render(block)}" for stage, block in version.stages]
    return "\n".join(parts)


def write(path: pathlib.Path, unit: Unit, module: Any) -> None:
    """Write each stage of a kernel.

    Raises: ValueError: the folder cannot be made or written to.
    """
    text = str(module)
    stem = f"{unit.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    stages = {
        "jaxpr.txt": str(unit.jaxpr),
        "nests.txt": nests(unit),
        "ll": text,
        "s": cache.assembly(module),
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        for suffix, content in stages.items():
            _put(path / f"{stem}.{suffix}", content)
    except OSError as error:
        raise ValueError(
            explain(
                f"PALLADION_DUMP={path}: the stages of {unit.name} cannot be written there ({error.strerror}).",
                hint="name a folder that you may write to, or unset PALLADION_DUMP",
            )
        ) from None


def _put(path: pathlib.Path, content: str) -> None:
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
