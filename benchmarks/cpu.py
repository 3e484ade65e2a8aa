"""Native CPU code against jnp under jit, NumPy's OpenBLAS and PyTorch where it is installed: one process, in turns.

    ./dev exec python benchmarks/cpu.py                             # everything, on all cores; several minutes
    ./dev exec python benchmarks/cpu.py --threads 1 --only softmax  # the process on one core; names that match
    ./dev exec python benchmarks/cpu.py --json two.json             # results also into a file, row by row
    ./dev exec python benchmarks/cpu.py --markdown two.json one.json     # no measurement: the files as one table

A round gives each contender a turn of several calls, of which the median counts. A ratio is the peer's time by ours in
the same round, above 1 when Palladion is faster; shown is the median over the rounds, for the best peer. Every
contender's values are compared with ours beforehand. How the result is stored:

    fresh      into new memory. Of 64 MiB, more than half of the time is the operating system's first touch of the pages
    donated    under jit with donate_argnums=0; the kernel has input_output_aliases, jnp's program is XLA's choice
    loop       x = f(x) in a jitted fori_loop, time an iteration; the kernel aliases its result to its operand

`--threads N` ties the process to N CPUs before JAX starts, so that XLA's pool and OpenBLAS have N threads. OpenBLAS
chooses its own kernel. Its threads spin for 0.1 s after a call; a contender's turn in such a row begins 0.25 s later.
A turn during which another process had a CPU is taken again, up to four times. Linux only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of native CPU code.")
    parser.add_argument("--threads", type=int, help="tie the process to so many CPUs (default: leave it)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose name has this regular expression")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to a file")
    parser.add_argument("--markdown", type=Path, nargs="+", metavar="FILE", help="print files of results as a table")
    return parser.parse_args()


if __name__ == "__main__":  # before JAX and NumPy start their threads
    ARGUMENTS = _arguments()
    for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(_name, None)
    if ARGUMENTS.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGUMENTS.threads])
        for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ[_name] = str(ARGUMENTS.threads)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import cpu_kernels as kernels
from flash_attention import NATIVE as ATTENTION_NATIVE
from flash_attention import attention, flash_attention, operands

try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:
    torch = None
THREADS = len(os.sched_getaffinity(0))
LOOP = 8  # iterations of a fori_loop


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: what is computed, and how its result is stored.
      native, peers: functions of the operands; jitted here, except peers whose name begins with numpy or torch.
      operands: makes the operands.
      target: the ratio to the best peer that is wanted; None where none is set.
      torch_target: the same for PyTorch, where it is another.
      donated: under jit with donate_argnums=0.
      repeats: the calls are loops of so many iterations; times are an iteration's.
      moved: bytes read and written by our call, for its bandwidth.
      slower_by: in place of a ratio, microseconds that our call may take longer.
      tolerance: largest difference from the peers, relative to their largest value.
    """

    name: str
    native: Callable
    peers: dict[str, Callable]
    operands: Callable[[], tuple]
    target: float | None = None
    donated: bool = False
    repeats: int = 1
    moved: int = 0
    slower_by: float | None = None
    tolerance: float = 1e-5
    torch_target: float | None = None


def randn(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def looped(f: Callable) -> Callable:
    """x = f(x, …), LOOP times, in one program."""
    return lambda x, *rest: jax.lax.fori_loop(0, LOOP, lambda _, x: f(x, *rest), x)


# --- the rows -------------------------------------------------------------------------------------------------------
def matrix_rows() -> Iterator[Row]:
    for n, block in ((512, (64, 512, 512)), (1024, (1024, 1024, 512)), (2048, (512, 512, 512))):
        peers: dict[str, Callable] = {"jnp": jnp.dot, "numpy": np.dot}
        if torch is not None:
            peers["torch"] = lambda x, y: torch.mm(torch.from_numpy(x), torch.from_numpy(y)).numpy()
        make = lambda n=n: (randn(n, n), randn(n, n, seed=1))
        yield Row(f"matmul f32 {n}³", kernels.matmul(n, *block), peers, make, target=0.95)
    make = lambda: (randn(1024, 1024, dtype=jnp.bfloat16), randn(1024, 1024, dtype=jnp.bfloat16, seed=1))
    native = kernels.matmul_bf16(1024, 1024, 512, 512)
    yield Row("matmul bf16 1024³", native, {"jnp": jnp.dot}, make, target=1.3, tolerance=1e-2)


def copy_in_threads(out: np.ndarray, x: np.ndarray, pool=ThreadPoolExecutor(THREADS)) -> np.ndarray:
    """x into out, a part a thread (np.copyto lets go of the GIL)."""
    cuts = [len(x) * k // THREADS for k in range(THREADS + 1)]
    list(pool.map(lambda a, b: np.copyto(out[a:b], x[a:b]), cuts, cuts[1:]))
    return out


def add_rows() -> Iterator[Row]:
    shape = (4096, 4096)
    nbytes = 4 * shape[0] * shape[1]
    make = lambda: (randn(*shape), randn(*shape, seed=1))
    for block in ((64, 128), (256, 256), (256, 4096)):
        for donated in (False, True):
            yield Row(
                f"add 4096², {block[0]}×{block[1]} blocks, {'donated' if donated else 'fresh'}",
                kernels.elementwise(jnp.add, shape, block, 2, donated),
                {"jnp": jnp.add},
                make,
                target=1.0,
                donated=donated,
                moved=3 * nbytes,
            )
    native = kernels.copy(shape, (256, 4096))
    yield Row("copy 64 MiB, donated", native, {"numpy": copy_in_threads}, make, donated=True, moved=2 * nbytes)
    native = kernels.elementwise(lambda x: x, shape, (256, 4096), 1)
    peers = {"jnp": lambda x: jnp.copy(x), "numpy": np.copy}
    yield Row("copy 64 MiB, fresh", native, peers, lambda: (randn(*shape),), moved=2 * nbytes)
    native = kernels.elementwise(jnp.add, (1024, 1024), (128, 128), 2)
    make = lambda: (randn(1024, 1024), randn(1024, 1024, seed=1))
    yield Row("add 1024², 64 programs", native, {"jnp": jnp.add}, make, target=1 / 1.2)
    make = lambda: (randn(8, 128), randn(8, 128, seed=1))
    yield Row("add 8×128, one block (call overhead)", kernels.one_block((8, 128)), {"jnp": jnp.add}, make, slower_by=5)


def ways(name: str, make_native: Callable, peers: dict, make: Callable, targets: dict, **more: Any) -> Iterator[Row]:
    """The rows of one computation: fresh, donated and in a loop."""
    for how in ("fresh", "donated", "loop"):
        native = make_native(donated=how != "fresh")
        calls = {k: looped(f) if how == "loop" else f for k, f in peers.items()}
        yield Row(
            f"{name}, {how}",
            looped(native) if how == "loop" else native,
            calls,
            make,
            target=targets.get(how),
            donated=how != "fresh",
            repeats=LOOP if how == "loop" else 1,
            **more,
        )


def row_rows() -> Iterator[Row]:
    shape = (4096, 4096)
    wanted = {"fresh": 1.0, "donated": 3.0, "loop": 1.8}
    for name, f, jnp_f in (
        ("softmax f32", kernels.softmax, jax.nn.softmax),
        ("softmax bf16", kernels.softmax, jax.nn.softmax),
        ("LayerNorm", kernels.layer_norm, kernels.layer_norm),
        ("RMSNorm", kernels.rms_norm, kernels.rms_norm),
    ):
        dtype = jnp.bfloat16 if "bf16" in name else jnp.float32
        peers = {"jnp": jnp_f} | ({"jnp in f32": f} if "bf16" in name else {})
        make_native = lambda donated, f=f, d=dtype: kernels.over_rows(f, shape, 16, d, donated)
        make = lambda d=dtype: (randn(*shape, dtype=d),)
        more = {"tolerance": 2e-2} if "bf16" in name else {}
        yield from ways(f"{name} 4096²", make_native, peers, make, wanted, **more)
    make = lambda: (randn(*shape),)
    summed = kernels.over_rows(kernels.row_sum, shape, 16)
    yield Row("row sum 4096²", summed, {"jnp": kernels.row_sum}, make, target=1.0)
    online = kernels.online_logsumexp(shape, 64, 1024)
    peers = {"jnp": lambda x: kernels.logsumexp(x)[:, None]}
    yield Row("online logsumexp 4096²", online, peers, make, target=1.0)
    gelu = lambda donated: kernels.elementwise(jax.nn.gelu, shape, (64, 4096), 1, donated)
    yield from ways("gelu 4096²", gelu, {"jnp": jax.nn.gelu}, make, {})
    make = lambda: (-abs(randn(*shape)), 0.1 * randn(*shape, seed=1) - 1)  # stays in range when it is repeated
    chain = lambda donated: kernels.elementwise(kernels.exp_chain, shape, (64, 4096), 2, donated)
    yield from ways("exp(x + y) x 4096²", chain, {"jnp": kernels.exp_chain}, make, {})


def attention_rows() -> Iterator[Row]:
    for head in (64, 128):
        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                peers: dict[str, Callable] = {"jnp": lambda q, k, v, c=causal: attention(q, k, v, causal=c)}
                if torch is not None:
                    peers["torch"] = lambda q, k, v, c=causal: torch.nn.functional.scaled_dot_product_attention(
                        *map(torch.utils.dlpack.from_dlpack, (q, k, v)), is_causal=c
                    )
                yield Row(
                    f"flash attention {dtype} head {head}{', causal' if causal else ''}",
                    lambda q, k, v, c=causal: flash_attention(q, k, v, causal=c, **ATTENTION_NATIVE),
                    peers,
                    lambda head=head, dtype=dtype: tuple(operands(1, 8, 2048, head, dtype)),
                    target=1.5,
                    torch_target=1.0,
                    tolerance=5e-2 if dtype == "bfloat16" else 1e-4,
                )


def rows() -> Iterator[Row]:
    yield from matrix_rows()
    yield from add_rows()
    yield from row_rows()
    yield from attention_rows()


# --- measuring ------------------------------------------------------------------------------------------------------
def taken_by_others() -> float:
    """Seconds that other processes, or the host, have had our CPUs so far (the system counts in ticks of 10 ms)."""
    ours = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    busy = 0
    for name, *fields in (text.split() for text in Path("/proc/stat").read_text().splitlines()):
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            busy += user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Compare the values, then take turns; times in seconds."""
    operands = row.operands()
    calls = {"native": row.native, **row.peers}
    outside = {name for name in calls if name.startswith(("numpy", "torch"))}
    jit = lambda f: jax.jit(f, donate_argnums=0 if row.donated else ())
    calls = {name: f if name in outside else jit(f) for name, f in calls.items()}

    def given(name: str) -> tuple:
        if not row.donated and not name.startswith("numpy"):
            return operands
        if name.startswith("numpy"):
            return tuple(np.array(x) if row.donated else np.asarray(x) for x in operands)
        return (jax.block_until_ready(operands[0] + 0), *operands[1:])

    def timed(name: str) -> tuple[float, Any]:
        args = given(name)
        start = time.perf_counter()
        result = jax.block_until_ready(calls[name](*args))
        return time.perf_counter() - start, result

    first, ours = timed("native")
    ours = np.asarray(ours, np.float64)
    for name in row.peers:
        theirs = np.asarray(timed(name)[1], np.float64)
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert error <= row.tolerance, f"{row.name}: {error:.1e} from {name}"
    del ours, theirs

    def turn(name: str, count: int) -> float:
        """A turn that other processes did not disturb, if one can be had."""
        for _ in range(5):
            if outside:
                time.sleep(0.25)
            start, before = time.perf_counter(), taken_by_others()
            seconds = calls_in_a_row(name, count)
            if taken_by_others() - before <= 0.02 + 0.05 * (time.perf_counter() - start):
                break
        return seconds

    def calls_in_a_row(name: str, count: int) -> float:
        if row.donated or count <= 8:
            return statistics.median([timed(name)[0] for _ in range(count + 1)][1:])
        args, call = given(name), calls[name]
        batches = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(count // 5):
                jax.block_until_ready(call(*args))
            batches.append((time.perf_counter() - start) / (count // 5))
        return statistics.median(batches)

    count = max(3, min(1000, int(0.05 / timed("native")[0])))
    seen = [{name: turn(name, count) / row.repeats for name in calls} for _ in range(rounds)]
    ratios = {name: statistics.median(r[name] / r["native"] for r in seen) for name in row.peers}
    targets = {name: (name == "torch" and row.torch_target) or row.target or 1.0 for name in row.peers}
    best = min(ratios, key=lambda name: ratios[name] / targets[name])
    behind = statistics.median(r["native"] - min(r[name] for name in row.peers) for r in seen)
    met = None
    if row.target is not None:
        met = round(ratios[best], 2) >= round(targets[best], 2)
    elif row.slower_by is not None:
        met = 1e6 * behind <= row.slower_by
    return {
        "name": row.name,
        "threads": THREADS,
        "seconds": statistics.median(r["native"] for r in seen),
        "ratios": ratios,
        "best": best,
        "target": None if row.target is None else targets[best],
        "slower_by": row.slower_by,
        "behind": behind,
        "met": met,
        "bandwidth": row.moved / statistics.median(r["native"] for r in seen) if row.moved else None,
        "first_call": first,
    }


# --- showing --------------------------------------------------------------------------------------------------------
def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


def wanted(result: dict[str, Any]) -> str:
    if result["slower_by"] is not None:
        return f"at most {result['slower_by']:g} µs slower"
    return "" if result["target"] is None else f"{result['target']:.2f}x"


def got(result: dict[str, Any]) -> str:
    """The ratio to the best peer, and how much bandwidth that was."""
    text = f"{result['ratios'][result['best']]:.2f}x"
    if len(result["ratios"]) > 1:
        text += f" {result['best']}"
    if result["slower_by"] is not None:
        text = f"{1e6 * result['behind']:+.1f} µs"
    if result["bandwidth"]:
        text += f", {result['bandwidth'] / 1e9:.0f} GB/s"
    return f"**{text}**" if result["met"] is False else text


def line(result: dict[str, Any]) -> str:
    verdict = {None: "", True: "met", False: "MISSED"}[result["met"]]
    peers = ", ".join(f"{n} {r:.2f}x" for n, r in result["ratios"].items())
    text = got(result).strip("*")
    return (
        f"{result['name']:44s} {duration(result['seconds']):>9s}  {text:24s} wanted {wanted(result) or '-':8s} "
        f"{verdict:6s} ({peers}; first call {result['first_call']:.2f} s)"
    )


def markdown(files: list[Path]) -> str:
    """The results of several files, one column a number of threads; missed targets in bold."""
    found: dict[str, dict[int, dict]] = {}
    for file in files:
        for result in json.loads(file.read_text()).values():
            found.setdefault(result["name"], {})[result["threads"]] = result
    counts = sorted({n for results in found.values() for n in results}, reverse=True)
    names = [row.name for row in rows() if row.name in found]
    plural = lambda n: f"{n} thread{'s' * (n > 1)}"
    head = ["work", *(f"{what}{plural(n)}" for n in counts for what in ("time, ", "")), "wanted"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in names:
        cells = [name]
        for n in counts:
            result = found[name].get(n)
            cells += [duration(result["seconds"]), got(result)] if result else ["", ""]
        lines.append("| " + " | ".join([*cells, wanted(next(iter(found[name].values())))]) + " |")
    return "\n".join(lines)


def main() -> None:
    if ARGUMENTS.markdown:
        print(markdown(ARGUMENTS.markdown))
        return
    print(f"{THREADS} threads; torch {'absent' if torch is None else torch.__version__}")
    for row in rows():
        if not re.search(ARGUMENTS.only, row.name):
            continue
        result = measure(row, ARGUMENTS.rounds)
        print(line(result), flush=True)
        if ARGUMENTS.json:
            stored = json.loads(ARGUMENTS.json.read_text()) if ARGUMENTS.json.exists() else {}
            stored[row.name] = result
            ARGUMENTS.json.write_text(json.dumps(stored, indent=1))


if __name__ == "__main__":
    main()
