"""Running CUDA and PTX on the emulator with NumPy arrays as arguments."""

import functools

import numpy as np
import pytest

from palladion.emulator.driver import EmulatedDriver


@functools.cache
def ptx_of(source: str, arch: str = "sm_90a") -> str:
    """PTX that NVRTC makes of CUDA C++; the test is skipped where NVRTC is missing."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA samples need NVRTC: the extra `gpu`.")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"sample.cu", 0, [], [])
    options = [f"--gpu-architecture={arch.replace('sm', 'compute')}", "-default-device", "-lineinfo", "--std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    if int(failed):
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0 ").decode()


def run(text: str, name: str, grid, block, args, smem: int = 0, cluster=(1, 1, 1), **options):
    """Launch a kernel of a PTX text (or of CUDA, if it has no `.version`).

    Arguments:
      args: arrays, which are copied in and come back; NumPy scalars and bytes.
      **options: of the driver.

    Returns: the arrays as they are after the run, in a list.
    """
    if ".version" not in text:
        text = ptx_of(text)
    driver = EmulatedDriver(**options)
    function = driver.function(driver.load_module(text), name)
    packed, arrays = [], []
    for arg in args:
        if isinstance(arg, np.ndarray):
            address = driver.alloc(arg.nbytes)
            driver.copy_in(address, arg)
            arrays.append((address, arg))
            packed.append(np.uint64(address).tobytes())
        else:
            packed.append(arg if isinstance(arg, bytes) else arg.tobytes())
    shape = [(x, 1, 1) if isinstance(x, int) else x for x in (grid, block)]
    driver.launch(function, *shape, packed, cluster=cluster, smem=smem)
    return [driver.copy_out(a, x.nbytes).view(x.dtype).reshape(x.shape) for a, x in arrays]


_REGISTER = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_LOAD = {1: "b32", 2: "b16", 4: "b32", 8: "b64"}


@functools.cache
def _wrapped(body: str, sizes: tuple[int, ...], out: int) -> str:
    """A kernel that applies PTX to elements: operands in %a, %b, …, the result in %d."""
    letters = "abcdefgh"[: len(sizes)]
    count = len(sizes)
    lines = [".version 8.5", ".target sm_90a", ".address_size 64", ".visible .entry apply("]
    lines.append(", ".join(f".param .u64 p{k}" for k in range(count + 1)) + ", .param .u32 n) {")
    lines += [".reg .b32 %r<8>;", ".reg .b64 %rd<20>;", ".reg .pred %done, %p, %q;"]
    lines += [f".reg .{_LOAD[s]} %{x};" for x, s in zip(letters, sizes)]
    lines += [f".reg .{_LOAD[out]} %d;", ".reg .b32 %t<8>;", ".reg .f32 %f<8>;", ".reg .b16 %h<8>;", ".reg .b64 %w<8>;"]
    lines += ["mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;", "mad.lo.u32 %r0, %r1, %r2, %r0;"]
    lines += ["ld.param.u32 %r3, [n]; setp.ge.u32 %done, %r0, %r3; @%done exit;", "cvt.u64.u32 %rd0, %r0;"]
    for k, (x, s) in enumerate(zip(letters, sizes)):
        load = "u8" if s == 1 else _REGISTER[s]
        lines.append(f"ld.param.u64 %rd1, [p{k}]; mad.lo.u64 %rd1, %rd0, {s}, %rd1; ld.global.{load} %{x}, [%rd1];")
    lines.append(body)
    lines.append(f"ld.param.u64 %rd1, [p{count}]; mad.lo.u64 %rd1, %rd0, {out}, %rd1;")
    lines.append(f"st.global.{'u8' if out == 1 else _REGISTER[out]} [%rd1], %d; exit; }}")
    return "\n".join(lines)


def apply(body: str, *operands, out) -> np.ndarray:
    """PTX applied to arrays: operands are the registers %a, %b, %c, …, the result is %d.

    Arguments:
      body: instructions; %p and %q are predicates, %t0… b32, %f0… f32, %h0… b16, %w0… b64 registers to use.
      out: dtype of the result.
    """
    arrays = np.broadcast_arrays(*(np.asarray(x) for x in operands))
    n, out = arrays[0].size, np.dtype(out)
    text = _wrapped(body, tuple(x.itemsize for x in arrays), out.itemsize)
    block = min(1024, -(-n // 32) * 32)
    given = [np.ascontiguousarray(x).view(f"u{x.itemsize}").reshape(-1) for x in arrays]
    result = np.zeros(n, f"u{out.itemsize}")
    return run(text, "apply", -(-n // block), block, [*given, result, np.uint32(n)])[-1].view(out)
