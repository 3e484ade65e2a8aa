"""NVRTC in a child process (`worker.py`): CUDA C++ becomes PTX and machine code, with no GPU and no driver.

NVRTC would work inside the user's process as well. But it has no limit of its own: a kernel unrolled to sixteen
thousand statements took it 105 s and 4.7 GB, and what its assembler thinks of odd inline PTX is not ours to promise.
"""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]


def compile(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one translation unit, or tell the version.

    Arguments: job: `source`, `name` (of the file, for messages and line tables), `options`; or nothing.
    Returns: `ok`, `log`, `ptx` (that of a program which the assembler refused, too), `cubin`, `seconds`; or `version`.
    Raises: RuntimeError: NVRTC itself fails; cuda-pathfinder's exceptions: there is no NVRTC.
    """
    if "source" not in job:
        major, minor = _checked(nvrtc.nvrtcVersion())
        return {"version": f"{major}.{minor}"}
    (program,) = _checked(nvrtc.nvrtcCreateProgram(job["source"].encode(), job["name"].encode(), 0, None, None))
    try:
        options = [option.encode() for option in job["options"]]
        start = time.perf_counter()
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        seconds = time.perf_counter() - start
        ok = result == nvrtc.nvrtcResult.NVRTC_SUCCESS
        return {
            "ok": ok,
            "log": _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog),
            "ptx": _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
            "cubin": _data(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if ok else b"",
            "seconds": seconds,
        }
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(reply: tuple[Any, ...]) -> tuple[Any, ...]:
    result, *values = reply
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result)[1].decode()}")
    return tuple(values)


def _data(program: Any, size: Any, get: Any) -> bytes:
    (n,) = _checked(size(program))
    data = b" " * n
    _checked(get(program, data))
    return data


def _text(program: Any, size: Any, get: Any) -> str:
    return _data(program, size, get).rstrip(b"\0 ").decode(errors="replace")
