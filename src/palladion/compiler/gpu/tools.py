"""CUDA's command line tools for machine code, from their wheels: nvdisasm and cuobjdump. Neither needs a GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from palladion.errors import TargetNotBuilt, explain

SECONDS = 120  # that a tool may take


@functools.cache
def find_tool(name: str) -> str | None:
    """The path of a tool: from its wheel (`nvidia/cu13/bin`), else from PATH; None if it is nowhere."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        for path in sorted(Path(folder).glob(f"cu*/bin/{name}"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which(name)


def run_tool(name: str, options: Sequence[str], cubin: bytes) -> str:
    """What a tool prints of machine code.

    Raises: TargetNotBuilt: it is not installed. RuntimeError: it refuses the file, or does not end.
    """
    path = find_tool(name)
    if path is None:
        message = f"Looking into machine code needs {name}, which is not installed."
        raise TargetNotBuilt(explain(message, hint="pip install 'palladion[gpu]'"))
    with tempfile.TemporaryDirectory(prefix="palladion-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        try:
            done = subprocess.run(
                [path, *options, str(file)], capture_output=True, text=True, errors="replace", timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} was ended after {SECONDS} s without a result.") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it does not say why"]
        raise RuntimeError(f"{name} cannot read the machine code: {said[-1].replace(str(file), 'it')}")
    return done.stdout
