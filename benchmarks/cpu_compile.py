"""Compile time of the tutorial's kernels as native CPU code.

    ./dev exec python benchmarks/cpu_compile.py        # needs ../shared/conformance/tutorial_cells.py

The tutorial's cells run in the reference interpreter, and each kernel call that they trace is compiled natively:
`cold` in a process that has compiled another kernel before, with an empty cache folder; `disk` in a fresh process that
finds its code in that folder. Times are Palladion's own (from the traced kernel to a loaded function). `XLA` is what
compiling the program round one call costs on top: lowering of jit, and XLA. Tracing is in none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
CELLS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "conformance" / "tutorial_cells.py"


# --- compile time ---------------------------------------------------------------------------------------------------
def tutorial_calls():
    """The distinct kernel calls of the tutorial, as parameters of `pallas_call`."""
    import palladion.dropin

    palladion.dropin.install()
    from palladion.language.primitive import observing
    from palladion.report.calls import Recorder

    recorder, namespace = Recorder(), {"__name__": "tutorial"}
    with observing(recorder), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in re.split(r"(?m)^# %% line ", CELLS.read_text())[1:]:
            line, _, source = part.partition("\n")
            with contextlib.suppress(Exception):  # cells for machines that are not here
                exec(compile(source, f"line {line}", "exec"), namespace)
    return [call for call in recorder.calls if call.jaxpr is not None]


def measure(folder: str, warm: bool) -> None:
    """In a child: compile every kernel once, and print the times."""
    import palladion as pl

    calls = tutorial_calls()
    pl.config.state("cache_dir").set(folder)
    start = time.perf_counter()
    from palladion.compiler.cpu import compile as native
    from palladion.compiler.cpu import runtime

    imported = time.perf_counter() - start
    if warm:
        warm_up()
    rows = []
    for call in calls:
        start = time.perf_counter()
        try:
            native.compile_call(native._Key(call.params))
            refused = None
        except (NotImplementedError, TypeError) as error:
            refused = str(error).splitlines()[0]
        own = time.perf_counter() - start
        xla = None if refused or not warm else xla_time(call.params)
        rows.append((f"{call.name} {call.kernel_at}", own, xla, refused))
    print(json.dumps({"rows": rows, "import": imported, "kernels": len(runtime._kernels)}))


def warm_up() -> None:
    import jax

    import palladion as pl
    from palladion import cpu as plcpu

    def kernel(x_ref, o_ref):
        o_ref[...] = jax.numpy.sin(x_ref[...])

    shape = jax.ShapeDtypeStruct((8, 16), "float32")
    jax.jit(pl.pallas_call(kernel, shape, compiler_params=plcpu.CompilerParams())).lower(shape).compile()


def xla_time(params) -> float:
    import jax

    import palladion as pl
    from palladion.language.primitive import pallas_call_p

    gm = params["grid_mapping"]
    sizes = [jax.ShapeDtypeStruct((), "int32")] * gm.num_dynamic
    arrays = [m.array for m in (*gm.prefetch_mappings, *gm.inputs)]
    start = time.perf_counter()
    with pl.config.state("cpu")("native"):
        given = {**params, "interpret": False}
        jax.jit(lambda *args: pallas_call_p.bind(*args, **given)).lower(*sizes, *arrays).compile()
    return time.perf_counter() - start


def child(*arguments: str) -> dict:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compile_times() -> None:
    if not CELLS.exists():
        sys.exit(f"the tutorial's cells are not at {CELLS}")
    with tempfile.TemporaryDirectory() as folder:
        cold, disk = child("--measure", folder, "--warm"), child("--measure", folder)
    print(f"{'kernel':40s} {'cold':>8s} {'disk':>8s} {'XLA':>8s}   ms")
    for (name, own, xla, refused), (_, again, _, _) in zip(cold["rows"], disk["rows"], strict=True):
        if refused:
            print(f"{name:40s} {refused}")
        else:
            print(f"{name:40s} {1e3 * own:8.1f} {1e3 * again:8.1f} {1e3 * xla:8.1f}")
    columns = [[1e3 * row[k] for row in data["rows"] if not row[3]] for data, k in ((cold, 1), (disk, 1), (cold, 2))]
    print(f"{'median':40s} " + " ".join(f"{statistics.median(c):8.1f}" for c in columns))
    print(f"{'largest':40s} " + " ".join(f"{max(c):8.1f}" for c in columns))
    imports = f"{1e3 * cold['import']:.0f} and {1e3 * disk['import']:.0f}"
    print(f"{len(columns[0])} kernels; importing the compiler, once a process: {imports} ms (both from warm files)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.warm)
    else:
        compile_times()


if __name__ == "__main__":
    main()
