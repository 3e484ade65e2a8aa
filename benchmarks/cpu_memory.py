"""Peak memory of native calls beyond their operands and results, compilation included; jnp beside it.

    ./dev exec python benchmarks/cpu_memory.py [--only PATTERN]

Each call of benchmarks/cpu.py that has no loop runs once, compiled from nothing (an empty cache folder), in a process
of its own that has already made the operands and compiled a small kernel and a small jnp program. The system's mark of
the peak (VmHWM of /proc/self/status) is reset before and read after. Linux only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from cpu import rows  # this folder's; a script's folder is the first place that Python looks in
from cpu_kernels import one_block

MEGABYTE = 2**20


def status(field: str) -> int:
    """A size in bytes from /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


def growth(name: str, who: str) -> float:
    """Bytes at the peak of one call beyond those before it and the result's."""
    (row,) = (row for row in rows() if row.name == name)
    call = row.native if who == "native" else row.peers["jnp"]
    operands = jax.block_until_ready(row.operands())
    small = jnp.ones((8, 128))
    jax.block_until_ready((jax.jit(one_block((8, 128)))(small, small), jax.jit(jnp.add)(small, small)))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = jax.block_until_ready(jax.jit(call, donate_argnums=0 if row.donated else ())(*operands))
    return status("VmHWM") - before - (0 if row.donated else result.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "native|jnp"), help="one call, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(growth(*arguments.one))
        return
    worst = 0.0
    for row in rows():
        if row.repeats > 1 or not re.search(arguments.only, row.name):
            continue
        seen = {}
        for who in ("native", "jnp") if "jnp" in row.peers else ("native",):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", row.name, who]
                environment = os.environ | {"PALLADION_CACHE_DIR": folder}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seen[who] = float(done.stdout) / MEGABYTE
        worst = max(worst, seen["native"])
        print(f"{row.name:44s}" + "".join(f"  {who} {size:6.1f} MB" for who, size in seen.items()), flush=True)
    verdict = "met" if worst <= 64 else "MISSED"
    print(f"at most {worst:.1f} MB beyond operands and results; wanted: at most 64 MB: {verdict}")


if __name__ == "__main__":
    main()
