"""Lowering for TPU and for Triton against JAX's own Pallas, kernel by kernel, and compile times of libtpu and Triton.

    ./dev exec python benchmarks/compilers.py                                 # lowering, and compile times for tpu:v5e
    ./dev exec python benchmarks/compilers.py --targets tpu:v6e triton:sm_90  # these compile times
    ./dev exec python benchmarks/compilers.py --targets                       # lowering alone
    ./dev exec python benchmarks/compilers.py --json lowering.json            # the numbers into a file, too

The tutorial's cells (../shared/conformance/tutorial_cells.py) run twice in one process, on Palladion and on JAX's own
Pallas, and what each `pallas_call` was given is kept. Then every kernel is lowered by both in turns,
`jit(f).trace(…).lower(lowering_platforms=("tpu",))`, or `("cuda",)` with Triton's compiler parameters; only `lower` is
timed. In a first lowering the kernel is a new function that nobody has traced, so that no cache can know it; in a
repeated one it is the kernel of before, under a new `jit`. The process is warm: it has lowered other kernels. The time
has the module around the kernel in it, which JAX makes: about 0.5 ms. Shown are medians over the rounds; below a ratio
of 1 Palladion is faster. Kernels that only one of them lowers are listed with the reason, and count for neither.

Compile times are those of the vendor's compiler alone, in its child process, with the program lowered before; the first
kernel of a target is compiled once beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import re
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # or its cache on disk answers

import jax
from jax.experimental import pallas as peer
from jax.experimental.pallas import tpu as _peer_tpu  # noqa: F401 - registers its lowering rules
from jax.experimental.pallas import triton as peer_triton

import palladion as pl
from palladion import triton as own_triton
from palladion.compiler import entry
from palladion.compiler.tpu import context, windows

CELLS = Path(__file__).resolve().parents[2] / "shared" / "conformance" / "tutorial_cells.py"
PER_CELL = 6  # calls of a cell that are measured; some make the same one in a loop
PLATFORMS = {"tpu": "tpu", "triton": "cuda"}  # of JAX
TRITON = {pl: own_triton, peer: peer_triton}
CHIPS = {
    target: jax.sharding.AbstractMesh(
        (), (), abstract_device=jax.sharding.AbstractDevice(kind, cores, platform=platform)
    )
    for target, kind, cores, platform in (
        ("tpu", "TPU v5 lite", 1, "tpu"),
        ("triton", "NVIDIA H100 80GB HBM3", None, "gpu"),
    )
}  # that JAX's Pallas must be told of
COPIES = itertools.count()
TIMES = ("first", "again")
OURS: dict[tuple[int, int], Any] = {}  # the kernels, by implementation
THEIRS: dict[tuple[int, int], Any] = {}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel call of a cell.

    Attributes:
      name: of the kernel.
      make: `make(target)` makes the call, without `interpret`, of a new kernel function; target "tpu" or "triton".
      operands: shapes and dtypes.
    """

    name: str
    make: Callable[[str], Callable]
    operands: tuple[Any, ...]


def anew(kernel: Any) -> Any:
    """A function that does what `kernel` does, and that nobody has seen."""
    if isinstance(kernel, functools.partial):
        return functools.partial(anew(kernel.func), *kernel.args, **kernel.keywords)
    if not isinstance(kernel, types.FunctionType):
        sys.exit(f"a kernel of the tutorial is {kernel!r}, which is not copied here")
    code = kernel.__code__
    code = code.replace(co_consts=(*code.co_consts, f"copy {next(COPIES)}"))  # caches may compare code, too
    made = types.FunctionType(code, kernel.__globals__, kernel.__name__, kernel.__defaults__, kernel.__closure__)
    made.__kwdefaults__, made.__qualname__ = kernel.__kwdefaults__, kernel.__qualname__
    return made


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

        def make(target: str) -> Callable:
            given = options if target == "tpu" else {**options, "compiler_params": TRITON[language].CompilerParams()}
            return original(anew(kernel), *args, **given)

        def run(*operands: Any) -> Any:
            if key not in found and key[1] < PER_CELL:
                avals = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.asarray(x).dtype), operands
                )
                name = getattr(getattr(kernel, "func", kernel), "__name__", "kernel")
                found[key] = Kernel(name, make, avals)
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
def lowering_seconds(call: Callable, operands: tuple[Any, ...], target: str) -> float:
    """One lowering of a fresh trace."""
    with jax.sharding.use_abstract_mesh(CHIPS[target]):
        traced = jax.jit(lambda *given: call(*given)).trace(*operands)
        start = time.perf_counter()
        traced.lower(lowering_platforms=(PLATFORMS[target],))
        return time.perf_counter() - start


def refusal(kernel: Kernel, target: str) -> str | None:
    """Why a kernel does not lower, in one line; None if it does."""
    try:
        lowering_seconds(kernel.make(target), kernel.operands, target)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:110]}"


def turn(kernel: Kernel, target: str) -> tuple[float, float]:
    """Seconds of a first lowering and of a repeated one."""
    call = kernel.make(target)
    context.forget()
    windows.needs_clamp.cache_clear()
    first, again = (lowering_seconds(call, kernel.operands, target) for _ in TIMES)
    return first, again


def compare(rounds: int, target: str) -> list[dict[str, Any]]:
    """A row for each kernel: under "ours" and "peer", seconds by "first" and "again", or why it is not compared."""
    rows = []
    for key in sorted(OURS.keys() & THEIRS.keys()):
        both = {"ours": OURS[key], "peer": THEIRS[key]}
        row: dict[str, Any] = {"cell": key[0], "kernel": OURS[key].name, "target": target}
        row |= {who: refusal(kernel, target) for who, kernel in both.items()}
        if row["ours"] is None and row["peer"] is None:
            turns = [[turn(kernel, target) for kernel in both.values()] for _ in range(rounds)]
            for who, times in zip(both, zip(*turns)):
                row[who] = {when: statistics.median(seconds) for when, seconds in zip(TIMES, zip(*times))}
        rows.append({**row, "of": OURS[key]})
    return rows


def compile_seconds(kernel: Kernel, target: str) -> float | None:
    """What the vendor's compiler takes; None where it refuses the kernel."""
    (call,) = pl.compile(kernel.make(target.partition(":")[0]), *kernel.operands, target=target).calls
    name = {"tpu": "libtpu_seconds", "triton": "triton_seconds", "cpu": "llvm_seconds"}[target.partition(":")[0]]
    return call.fact(name)


def show(target: str, rows: list[dict[str, Any]], chips: list[str]) -> None:
    """Print the rows of a target; compile for `chips`, too."""
    compared = [row for row in rows if isinstance(row["ours"], dict) and isinstance(row["peer"], dict)]
    print(f"Lowering for {target}: first, and again\n{'cell':>5} {'kernel':28}", end="")
    print(f"{'ours':>9} {'peer':>8} {'ratio':>6}" * 2 + "".join(f" {chip:>13}" for chip in chips))
    for number, row in enumerate(compared):
        line = f"{row['cell']:5} {row['kernel'][:28]:28}"
        for when in TIMES:
            ours, other = row["ours"][when], row["peer"][when]
            line += f" {1e3 * ours:5.2f} ms {1e3 * other:5.2f} ms {ours / other:5.2f}"
        for chip in chips:
            if number == 0:
                compile_seconds(row["of"], chip)
            row[chip] = compile_seconds(row["of"], chip)
            line += f" {1e3 * row[chip]:10.0f} ms" if row[chip] is not None else f" {'refused':>13}"
        print(line)
    for when in TIMES:
        ratios = sorted(row["ours"][when] / row["peer"][when] for row in compared)
        middle = statistics.median(ratios)
        print(
            f"{target}, {when}: {len(ratios)} kernels, median ratio {middle:.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )
    for row in rows:
        if row not in compared:
            outcome = "; ".join(f"{who}: {row[who] or 'lowers'}" for who in ("ours", "peer"))
            print(f"{row['cell']:5} {row['kernel'][:32]:32} {outcome}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Lowering for TPU, and the vendors' compilers.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--targets", nargs="*", default=["tpu:v5e"], choices=entry.TARGETS, metavar="TARGET")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if not CELLS.exists():
        sys.exit(f"the tutorial's cells are not at {CELLS}")
    warnings.simplefilter("ignore")  # kernels with a mistake to show
    with contextlib.redirect_stdout(io.StringIO()):
        OURS.update(tutorial(pl))
        THEIRS.update(tutorial(peer))
    rows = []
    for target in PLATFORMS:
        found = compare(given.rounds, target)
        show(target, found, [t for t in given.targets if t.partition(":")[0] == target])
        rows += found
    if given.json:
        for row in rows:
            del row["of"]
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
