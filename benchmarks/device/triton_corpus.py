"""Runs the Triton corpus on a GPU and compares every result. It has not been run yet: no machine of ours had a GPU.

    python benchmarks/device/triton_corpus.py                    all three steps, where there is a GPU
    python benchmarks/device/triton_corpus.py build DIR --sm 90  needs palladion and triton, no GPU
    python benchmarks/device/triton_corpus.py run DIR            needs a GPU, its driver and NumPy, nothing else
    python benchmarks/device/triton_corpus.py check DIR          needs palladion; prints what differs

`build` compiles the kernel calls of the corpus (`tests/corpus`) and of the compiler's own tests
(`tests/compiler/triton/kernels.py`), and writes machine code, operands and expected results to a folder. What is
expected is the corpus's own NumPy result, in float64, where a case is one kernel call; elsewhere that of the reference
interpreter, which the tests hold to it. `run` launches each kernel through the CUDA driver. Tolerances are the cases'
own, but products of float32 are made in TF32 on tensor cores, so that those get 2e-3.
"""

import argparse
import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TF32 = 2e-3


# --- build ------------------------------------------------------------------------------------------------------------
def build(folder: Path, sm: int, names: list[str]) -> None:
    """Compile the corpus and write it to a folder."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    import corpus
    from compiler.triton.kernels import KERNELS
    from compiler.triton.table import NOT_THE_VALUES, REFUSED

    folder.mkdir(parents=True, exist_ok=True)
    manifest: list[dict[str, Any]] = []
    for name, case in corpus.CASES.items():
        if name in REFUSED or name in NOT_THE_VALUES or (names and name not in names):
            continue
        with corpus.scope(case):
            args = corpus.arguments(case)
            record = Recorder(folder, manifest, name, sm, case.rtol, case.atol)
            record.make(case.make(), args, corpus.expected(case, args))
    for name, make in KERNELS.items():
        if not names or name in names:
            call, operands = make()
            Recorder(folder, manifest, name, sm, 3e-6, 1e-5).make(call, operands, None)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(f"{len(manifest)} kernel calls for sm_{sm} in {folder}")


class Recorder:
    """Compiles the kernel calls of a function and keeps what they take and should give."""

    def __init__(self, folder: Path, manifest: list, name: str, sm: int, rtol: float, atol: float) -> None:
        self.folder, self.manifest, self.name, self.sm = folder, manifest, name, sm
        self.rtol, self.atol = rtol, atol
        self.made: list[tuple[dict[str, Any], list[np.ndarray]]] = []

    def make(self, function: Any, args: Any, numpy_result: Any) -> None:
        """Run the function with the reference in place of the kernels, and write the calls it makes."""
        import jax

        from compiler.triton.running import evaluate_with

        result = jax.tree.leaves(evaluate_with(self.call, function, *args))
        if len(self.made) == 1 and numpy_result is not None:
            entry, outs = self.made[0]
            if [id(x) for x in result] == [id(x) for x in outs]:
                self._save(entry, "expected", [np.asarray(x) for x in jax.tree.leaves(numpy_result)])
        self.manifest += [entry for entry, _ in self.made]

    def call(self, params: dict[str, Any], operands: list[Any]) -> list[np.ndarray]:
        from compiler.triton.running import grid_of
        from palladion.compiler.triton import compile as compiler
        from palladion.compiler.triton.module import lower_call
        from palladion.language.primitive import pallas_call_p

        gm = params["grid_mapping"]
        kernel = lower_call(params, self.sm)
        done = compiler.compile_ttir(kernel.text, self.sm, kernel.num_warps, kernel.num_stages)
        outs = [np.asarray(x) for x in pallas_call_p.bind(*operands, **{**params, "interpret": True})]
        entry = {
            "name": self.name,
            "id": f"{len(self.manifest) + len(self.made):04d}",
            "kernel": kernel.name,
            "grid": grid_of(kernel, [int(n) for n in operands[: gm.num_dynamic]]),
            "threads": 32 * done.warps,
            "shared": done.shared_bytes,
            "inputs": len(operands) - gm.num_dynamic,
            "aliases": {out: k for k, out in dict(params["input_output_aliases"]).items()},
            "outputs": [{"shape": list(x.shape), "dtype": x.dtype.name} for x in outs],
            "rtol": max(self.rtol, TF32) if "inputPrecision = tf32" in kernel.plain else self.rtol,
            "atol": max(self.atol, TF32) if "inputPrecision = tf32" in kernel.plain else self.atol,
        }
        (self.folder / f"{entry['id']}.cubin").write_bytes(done.cubin)
        self._save(entry, "inputs", [np.asarray(x) for x in operands[gm.num_dynamic :]])
        self._save(entry, "expected", outs)
        self.made.append((entry, outs))
        return outs

    def _save(self, entry: dict[str, Any], what: str, arrays: list[np.ndarray]) -> None:
        wide = [x.astype(np.float64) if x.dtype.kind not in "biu" else x for x in arrays]
        raw = [np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8) for x in arrays]
        np.savez(self.folder / f"{entry['id']}.{what}.npz", *(raw if what == "inputs" else wide))


# --- run --------------------------------------------------------------------------------------------------------------
class Driver:
    """The few functions of the CUDA driver that a launch needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, function: str, *args: Any) -> None:
        code = getattr(self.cuda, function)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'?').decode()} ({code})")

    def array(self, data: np.ndarray) -> ctypes.c_uint64:
        """A copy of an array in device memory."""
        place = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(max(data.nbytes, 1)))
        self("cuMemcpyHtoD_v2", place, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.nbytes))
        return place

    def launch(self, entry: dict[str, Any], cubin: bytes, places: list[ctypes.c_uint64]) -> None:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), cubin)
        self("cuModuleGetFunction", ctypes.byref(function), module, entry["kernel"].encode())
        if entry["shared"] > 48 << 10:
            self("cuFuncSetAttribute", function, 8, entry["shared"])  # the most dynamic shared memory
        # Triton adds two pointers, to memory that only some kernels ask for.
        arguments = [*places, ctypes.c_uint64(0), ctypes.c_uint64(0)]
        packed = (ctypes.c_void_p * len(arguments))(*(ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in arguments))
        size = (*entry["grid"], entry["threads"], 1, 1, entry["shared"])
        if 0 not in entry["grid"]:
            self("cuLaunchKernel", function, *map(ctypes.c_uint, size), None, packed, None)
        self("cuCtxSynchronize")
        self("cuModuleUnload", module)


ITEMSIZE = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def run(folder: Path) -> None:
    """Launch every kernel of a folder; results go back into it as bytes."""
    driver = Driver()
    failed = 0
    entries = json.loads((folder / "manifest.json").read_text())
    for entry in entries:
        stored = np.load(folder / f"{entry['id']}.inputs.npz")
        inputs = [stored[f"arr_{k}"] for k in range(entry["inputs"])]
        places = [driver.array(x) for x in inputs]
        outs = []
        for k, out in enumerate(entry["outputs"]):
            size = ITEMSIZE.get(out["dtype"]) or np.dtype(out["dtype"]).itemsize
            alias = entry["aliases"].get(str(k))
            data = np.zeros(int(np.prod(out["shape"])) * size, np.uint8) if alias is None else inputs[alias].copy()
            place = driver.array(data) if alias is None else places[alias]
            places.append(place)
            outs.append((place, data))
        try:
            driver.launch(entry, (folder / f"{entry['id']}.cubin").read_bytes(), places)
            for place, data in outs:
                driver("cuMemcpyDtoH_v2", data.ctypes.data_as(ctypes.c_void_p), place, ctypes.c_size_t(data.nbytes))
        except RuntimeError as error:
            failed += 1
            print(f"{entry['name']}: {error}", flush=True)
            break  # after a fault the context is lost
        np.savez(folder / f"{entry['id']}.results.npz", *(data for _, data in outs))
        for place in {p.value: p for p in places}.values():
            driver("cuMemFree_v2", place)
    print(f"{len(entries)} kernel calls launched" if not failed else "stopped at the first failure")


# --- check ------------------------------------------------------------------------------------------------------------
def check(folder: Path) -> int:
    """Compare results with what is expected; how many differ."""
    import ml_dtypes  # noqa: F401 - gives NumPy its narrow floats

    wrong = missing = 0
    for entry in json.loads((folder / "manifest.json").read_text()):
        file = folder / f"{entry['id']}.results.npz"
        if not file.exists():
            missing += 1
            continue
        results, expected = np.load(file), np.load(folder / f"{entry['id']}.expected.npz")
        for k, out in enumerate(entry["outputs"]):
            got = results[f"arr_{k}"].view(np.dtype(out["dtype"])).reshape(out["shape"]).astype(np.float64)
            want = expected[f"arr_{k}"].astype(np.float64).reshape(out["shape"])
            narrow = {"bfloat16": 1e-2, "float16": 2e-3, "float8_e4m3fn": 0.13, "float8_e5m2": 0.26}.get(
                out["dtype"], 0
            )
            rtol = max(entry["rtol"], narrow, 1e-5 if "float32" in out["dtype"] else 0)
            close = np.isclose(got, want, rtol=rtol, atol=max(entry["atol"], rtol * 1e-2), equal_nan=True)
            if not close.all():
                wrong += 1
                at = tuple(np.argwhere(~close)[0])
                print(f"{entry['name']} result {k}: {(~close).sum()} of {close.size} differ; at {list(map(int, at))} "
                      f"got {got[at]!r}, expected {want[at]!r}")  # fmt: skip
    print(f"{wrong} results differ, {missing} kernel calls have none")
    return wrong + missing


def capability() -> int:
    """Of the first GPU."""
    driver = Driver()
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver("cuDeviceGetAttribute", ctypes.byref(major), 75, 0)
    driver("cuDeviceGetAttribute", ctypes.byref(minor), 76, 0)
    return 10 * major.value + minor.value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", nargs="?", choices=("build", "run", "check"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--sm", type=int, help="compute capability; default: of the GPU that is here")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    given = parser.parse_args()
    if given.step is None:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder), given.sm or capability(), given.only)
            run(Path(folder))
            return check(Path(folder))
    if given.folder is None:
        parser.error("name a folder")
    if given.step == "build":
        build(given.folder, given.sm or capability(), given.only)
    elif given.step == "run":
        run(given.folder)
    else:
        return check(given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(min(main(), 1))
