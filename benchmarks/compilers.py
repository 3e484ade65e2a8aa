"""Lowering for TPU against JAX's own Pallas, kernel by kernel, and compile times of libtpu and Triton.

    ./dev exec python benchmarks/compilers.py                                 # lowering, and compile times for tpu:v5e
    ./dev exec python benchmarks/compilers.py --targets tpu:v6e triton:sm_90  # these compile times
    ./dev exec python benchmarks/compilers.py --targets                       # lowering alone
    ./dev exec python benchmarks/compilers.py --json lowering.json            # the numbers into a file, too

The tutorial's cells (../shared/conformance/tutorial_cells.py) run twice in one process, on Palladion and on JAX's own
Pallas, and what each `pallas_call` was given is kept. Then every kernel is traced afresh and lowered,
`jit(f).trace(…).lower(lowering_platforms=("tpu",))`, by both in turns; only `lower` is timed. The module around the
kernel, which JAX makes, takes about 0.4 ms of it. Shown are medians over the rounds; below a ratio of 1 Palladion is
faster. Kernels that only one of them lowers are listed with the reason, and count for neither.

Compile times are those of the vendor's compiler alone, in its child process, with the program lowered before; the first
kernel of a target is compiled once beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # or its cache on disk answers

import jax
from jax.experimental import pallas as peer
from jax.experimental.pallas import tpu as _peer_tpu  # noqa: F401 - registers its lowering rules

import palladion as pl
from palladion.compiler import entry

CELLS = Path(__file__).resolve().parents[2] / "shared" / "conformance" / "tutorial_cells.py"
PER_CELL = 6  # calls of a cell that are measured; some make the same one in a loop


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel call of a cell.

    Attributes:
      name: of the kernel.
      call: what `pallas_call` returned, without `interpret`.
      operands: shapes and dtypes.
    """

    name: str
    call: Callable
    operands: tuple[Any, ...]


# --- the kernels of the tutorial --------------------------------------------------------------------------------------
def tutorial(language: Any) -> dict[tuple[int, int], Kernel]:
    """What the cells hand to an implementation's `pallas_call`, by the cell's line and the number of the call in it."""
    found: dict[tuple[int, int], Kernel] = {}
    cell = {"line": 0, "made": 0}
    original = language.pallas_call

    def recording(kernel: Callable, *args: Any, interpret: Any = None, **options: Any) -> Callable:
        key = cell["line"], cell["made"]
        cell["made"] += 1
        running = original(kernel, *args, interpret=interpret or True, **options)

        def run(*operands: Any) -> Any:
            if key not in found and key[1] < PER_CELL:
                avals = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.asarray(x).dtype), operands
                )
                name = getattr(getattr(kernel, "func", kernel), "__name__", "kernel")
                found[key] = Kernel(name, original(kernel, *args, **options), avals)
            return running(*operands)

        return run

    namespace: dict[str, Any] = {"__name__": "tutorial"}
    language.pallas_call = recording
    try:
        for part in re.split(r"(?m)^# %% line ", CELLS.read_text())[1:]:
            line, _, source = part.partition("\n")
            if language is pl:
                source = source.replace("from jax.experimental import pallas as", "import palladion as")
                source = source.replace("from jax.experimental.pallas import", "from palladion import")
            cell["line"], cell["made"] = int(line), 0
            with contextlib.suppress(Exception):  # cells for machines that are not here
                exec(compile(source, f"line {line}", "exec"), namespace)
    finally:
        language.pallas_call = original
    return found


# --- measuring --------------------------------------------------------------------------------------------------------
def lowering_seconds(kernel: Kernel) -> float:
    """One lowering of a fresh trace."""
    traced = jax.jit(lambda *operands: kernel.call(*operands)).trace(*kernel.operands)
    start = time.perf_counter()
    traced.lower(lowering_platforms=("tpu",))
    return time.perf_counter() - start


def refusal(kernel: Kernel) -> str | None:
    """Why a kernel does not lower, in one line; None if it does."""
    try:
        lowering_seconds(kernel)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:110]}"


def compare(rounds: int) -> list[dict[str, Any]]:
    """A row for each kernel: seconds of both, or why it is not compared."""
    with contextlib.redirect_stdout(io.StringIO()):
        ours, theirs = tutorial(pl), tutorial(peer)
    rows = []
    for key in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[key], theirs[key]
        row: dict[str, Any] = {"cell": key[0], "kernel": mine.name, "ours": refusal(mine), "peer": refusal(other)}
        if row["ours"] is None and row["peer"] is None:
            turns = [(lowering_seconds(mine), lowering_seconds(other)) for _ in range(rounds)]
            row["ours"], row["peer"] = (statistics.median(turn) for turn in zip(*turns))
        rows.append({**row, "call": mine})
    return rows


def compile_seconds(kernel: Kernel, target: str) -> float | None:
    """What the vendor's compiler takes; None where it refuses the kernel."""
    (call,) = pl.compile(kernel.call, *kernel.operands, target=target).calls
    name = {"tpu": "libtpu_seconds", "triton": "triton_seconds", "cpu": "llvm_seconds"}[target.partition(":")[0]]
    return call.fact(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lowering for TPU, and the vendors' compilers.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--targets", nargs="*", default=["tpu:v5e"], choices=entry.TARGETS, metavar="TARGET")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if not CELLS.exists():
        sys.exit(f"the tutorial's cells are not at {CELLS}")
    warnings.simplefilter("ignore")  # kernels with a mistake to show
    rows = compare(given.rounds)
    compared = [row for row in rows if isinstance(row["ours"], float) and isinstance(row["peer"], float)]
    for target in given.targets:
        compile_seconds(compared[0]["call"], target)
        for row in compared:
            row[target] = compile_seconds(row["call"], target)
    print(
        f"{'cell':>5} {'kernel':32} {'ours':>8} {'peer':>8} {'ratio':>6}" + "".join(f" {t:>13}" for t in given.targets)
    )
    for row in compared:
        times = [f"{1e3 * row[t]:10.0f} ms" if row[t] is not None else f"{'refused':>13}" for t in given.targets]
        print(
            f"{row['cell']:5} {row['kernel'][:32]:32} {1e3 * row['ours']:5.1f} ms {1e3 * row['peer']:5.1f} ms "
            f"{row['ours'] / row['peer']:6.2f} {' '.join(times)}".rstrip()
        )
    ratios = sorted(row["ours"] / row["peer"] for row in compared)
    print(
        f"{len(ratios)} kernels: median ratio {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
    for row in rows:
        if row not in compared:
            outcome = "; ".join(f"{who}: {row[who] or 'lowers'}" for who in ("ours", "peer"))
            print(f"{row['cell']:5} {row['kernel'][:32]:32} {outcome}")
    if given.json:
        for row in rows:
            del row["call"]
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
