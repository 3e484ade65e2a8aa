"""For the tests of asynchronous copies and barriers: a small header of inline PTX, and a device to launch on."""
# ruff: noqa: E501 (one PTX instruction a line)

import functools

import numpy as np
import pytest

from palladion.emulator.driver import EmulatedDriver
from palladion.emulator.faults import EmulationFault

HEADER = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
struct alignas(64) Map { u64 words[16]; };
#define INLINE __device__ __forceinline__
INLINE u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE void init(u64* b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
INLINE void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void expect(u64* b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
INLINE void arrive(u64* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
INLINE void wait(u64* b, u32 parity) {
  asm volatile("{\n.reg .pred p;\nLOOP:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra LOOP;\n"
    "DONE:\n}" :: "r"(at(b)), "r"(parity) : "memory"); }
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
INLINE u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE u32 size() { u32 r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
INLINE u32 mapa(u32 a, u32 r) {
  u32 x; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(r)); return x; }
INLINE void load2(void* to, const Map* m, int c0, int c1, u64* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
    :: "r"(at(to)), "l"(m), "r"(c0), "r"(c1), "r"(at(b)) : "memory"); }
INLINE void store2(const Map* m, int c0, int c1, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
    :: "l"(m), "r"(c0), "r"(c1), "r"(at(from)) : "memory"); }
INLINE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
INLINE void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
"""


@functools.cache
def ptx_of(source: str, arch: str = "sm_90a") -> str:
    """PTX that NVRTC makes of the header and a source."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram((HEADER + source).encode(), b"test.cu", 0, [], [])
    options = [f"--gpu-architecture={arch.replace('sm', 'compute')}".encode(), b"-default-device", b"-lineinfo"]
    options.append(b"--std=c++17")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(failed):
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0 ").decode()


class Device:
    """An emulated device with arrays: `run` launches a kernel of a source and gives the arrays back."""

    def __init__(self, arch: str = "sm_90a", **options):
        self.arch = arch
        self.driver = EmulatedDriver(arch=arch, **options)
        self.arrays = {}

    def array(self, name: str, values: np.ndarray) -> int:
        """Put an array on the device; its address."""
        address = self.driver.alloc(values.nbytes)
        self.driver.copy_in(address, np.ascontiguousarray(values))
        self.arrays[name] = (address, values.dtype, values.shape)
        return address

    def get(self, name: str) -> np.ndarray:
        """Take an array back."""
        address, dtype, shape = self.arrays[name]
        return self.driver.copy_out(address, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

    def map(self, values: np.ndarray, address: int, box, swizzle=0, dims=None, steps=None, fill=0, dtype=None) -> bytes:
        """A tensor map of a C-contiguous array (dimensions given outermost first); box innermost first."""
        shape = values.shape[::-1]
        strides = np.cumprod([values.itemsize, *shape[:-1]])[1:].tolist()
        rank = len(shape)
        return self.driver.encode_tensor_map(
            dtype or values.dtype.name,
            rank,
            address,
            dims or shape,
            strides,
            box,
            steps or (1,) * rank,
            0,
            swizzle,
            0,
            fill,
        )

    def run(self, source: str, name: str, grid, block, *arguments, cluster=(1, 1, 1), smem=0) -> None:
        """Launch; arguments: bytes, NumPy scalars, ints (4 bytes) or names of arrays."""
        module = self.driver.load_module(ptx_of(source, self.arch))
        packed = []
        for a in arguments:
            if isinstance(a, str):
                a = np.uint64(self.arrays[a][0])
            elif isinstance(a, int):
                a = np.int32(a)
            packed.append(a if isinstance(a, bytes) else a.tobytes())
        three = [(*g, 1, 1)[:3] if isinstance(g, tuple) else (g, 1, 1) for g in (grid, block)]
        self.driver.launch(self.driver.function(module, name), *three, packed, cluster=cluster, smem=smem)


def fault(call, kind: str, text: str) -> EmulationFault:
    """The fault that a call ends with, checked to be of a kind and to say something."""
    with pytest.raises(EmulationFault) as caught:
        call()
    assert caught.value.kind == kind, str(caught.value)
    assert text in str(caught.value), str(caught.value)
    return caught.value
