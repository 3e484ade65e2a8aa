# ruff: noqa: E501
"""CUDA kernels with inline PTX for the tensor-core tests, and how to compile and launch them on the emulator.

Operands come as byte images of shared memory, made by the test (`swizzled`), so that one kernel serves every
layout.
"""

from __future__ import annotations

import functools

import numpy as np

from palladion.emulator.driver import EmulatedDriver

PRELUDE = r"""
typedef unsigned int u32; typedef unsigned long long u64;
static __device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
static __device__ void load_image(unsigned char* sm, const uint4* image, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) ((uint4*)sm)[i] = image[i];
}
static __device__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
static __device__ void wait_parity(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again; }"
               :: "r"(bar), "r"(parity) : "memory");
}
"""


@functools.cache
def compiled(source: str, arch: str) -> str:
    """PTX of CUDA source (with the prelude) by NVRTC."""
    from cuda.bindings import nvrtc

    text = (PRELUDE + source).encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], [])
    options = [
        f"--gpu-architecture={arch.replace('sm_', 'compute_')}".encode(),
        b"-default-device",
        b"--std=c++17",
        b"-lineinfo",
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    out = b" " * size
    nvrtc.nvrtcGetPTX(program, out)
    return out.rstrip(b"\0").decode()


def launch(
    source: str,
    name: str,
    arguments: list,
    *,
    arch: str,
    block: int = 128,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 0,
    order="lazy",
    ptx: str | None = None,
) -> list[np.ndarray]:
    """Runs a kernel. Arguments: arrays (copied to the device, returned after the run) and NumPy scalars."""
    driver = EmulatedDriver(arch=arch, order=order)
    function = driver.function(driver.load_module(ptx or compiled(source, arch)), name)
    packed, arrays = [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            data = np.ascontiguousarray(argument)
            address = driver.alloc(data.nbytes)
            driver.copy_in(address, data)
            arrays.append((address, data))
            packed.append(np.uint64(address).tobytes())
        else:
            packed.append(argument.tobytes())
    driver.launch(function, (grid, 1, 1), (block, 1, 1), packed, cluster=(cluster, 1, 1), smem=smem)
    return [driver.copy_out(a, x.nbytes).view(x.dtype).reshape(x.shape) for a, x in arrays]


def swizzled(image: np.ndarray, base: int, tile: np.ndarray, span: int) -> int:
    """Puts a tile into an image of shared memory as a TMA of panels `span` bytes wide would; returns the panel pitch.

    `tile` is 2-D, contiguous along its last axis; `span` 32, 64 or 128; 0: column panels of 16 bytes, no swizzle.
    """
    raw = np.ascontiguousarray(tile).view(np.uint8)
    rows, width = raw.shape
    wide = span or 16
    lines = np.arange(rows)[:, None]
    for panel in range(-(-width // wide)):
        part = raw[:, panel * wide : panel * wide + wide]
        linear = base + panel * rows * wide + lines * wide + np.arange(part.shape[1])[None, :]
        phase = (linear >> 7) & {0: 0, 32: 1, 64: 3, 128: 7}[span]
        image[linear ^ (phase << 4)] = part
    return rows * wide


def descriptor(start: int, leading: int, stride: int, span: int, blackwell: bool = False) -> int:
    """A shared-memory matrix descriptor, from the bit table."""
    code = {0: 0, 128: 2, 64: 4, 32: 6}[span]
    value = (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | code << 61
    return value | (1 << 46 if blackwell else 0)


MMA = r"""
extern "C" __global__ void matmul(const unsigned short* a, const unsigned short* b, float* out, int K) {
  // one warp a 16 x 8 tile: a is (16 warps, K), b is (K, 8)
  __shared__ __align__(16) unsigned short sa[4][16 * 16], sb[4][16 * 8];
  int w = threadIdx.x / 32, l = threadIdx.x % 32;
  float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
  for (int k = 0; k < K; k += 16) {
    for (int i = l; i < 256; i += 32) sa[w][i] = a[(16 * w + i / 16) * K + k + i % 16];
    for (int i = l; i < 128; i += 32) sb[w][i] = b[(k + i / 8) * 8 + i % 8];
    __syncwarp();
    u32 a0, a1, a2, a3, b0, b1;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a0), "=r"(a1), "=r"(a2), "=r"(a3)
      : "r"(shared_address(&sa[w][(l % 16) * 16 + (l / 16) * 8])) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1)
      : "r"(shared_address(&sb[w][(l % 16) * 8])) : "memory");
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    __syncwarp();
  }
  float* o = out + 16 * 8 * w;
  int g = l / 4, q = l % 4;
  o[g * 8 + 2 * q] = d0; o[g * 8 + 2 * q + 1] = d1; o[(g + 8) * 8 + 2 * q] = d2; o[(g + 8) * 8 + 2 * q + 1] = d3;
}
extern "C" __global__ void turn(const uint4* in, uint4* out, u32* moved) {
  // stmatrix of what ldmatrix.trans read: the four 8 x 8 tiles transposed; movmatrix of the first does the same
  __shared__ uint4 tile[32], other[32];
  int l = threadIdx.x;
  tile[l] = in[l];
  __syncwarp();
  u32 r0, r1, r2, r3, s, m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
    : "r"(shared_address(&tile[l])) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
    :: "r"(shared_address(&other[l])), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(s) : "r"(shared_address(&tile[l % 8])) : "memory");
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(m) : "r"(s));
  __syncwarp();
  out[l] = other[l];
  moved[2 * l] = r0; moved[2 * l + 1] = m;
}
"""


def wgmma_kernel(
    n: int,
    k: int,
    d: str,
    a: str,
    b: str,
    transposes: tuple[int, ...] = (),
    registers: bool = False,
    fence: str = "wgmma.fence.sync.aligned;",
    wait: str = "wgmma.wait_group.sync.aligned 0;",
    proxy: str = "fence_async();",
) -> str:
    """A kernel of one warpgroup: steps along K over an image, D's registers to `out[thread][register]`."""
    count = n // 4 if d == "f16" else n // 2
    kind, letter = ("float", "f") if d == "f32" else ("u32", "r")
    listed = ",".join(f"%{i}" for i in range(count))
    outs = ",".join(f'"+{letter}"(d[{i}])' for i in range(count))
    left = "{" + ",".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    at = count + (4 if registers else 1)
    scales = ", 1, 1" if a not in ("s8", "u8") else ""
    flags = "".join(f", {t}" for t in (transposes[1:] if registers else transposes))
    sources = ",".join(f'"r"(ar[4 * step + {i}])' for i in range(4)) if registers else '"l"(da)'
    tail = ".and.popc" if a == "b1" else ""
    return rf"""
extern "C" __global__ void __launch_bounds__(128) kernel(const uint4* image, int count, {kind}* out, u64 da, u64 db,
    u64 stepa, u64 stepb, int steps, const u32* fragments) {{
  extern __shared__ __align__(1024) unsigned char sm[];
  load_image(sm, image, count);
  {proxy}
  __syncthreads();
  u32 base = shared_address(sm) >> 4;
  da += base; db += base;
  {kind} d[{count}];
  for (int i = 0; i < {count}; i++) d[i] = 1;
  u32 ar[16];
  for (int i = 0; i < 16; i++) ar[i] = fragments[threadIdx.x * 16 + i];
  asm volatile("{fence}" ::: "memory");
  #pragma unroll
  for (int step = 0; step < 4; step++) if (step < steps) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{a}.{b}{tail} {{{listed}}}, {left}, %{at}, p{scales}{flags}; }}"
      : {outs} : {sources}, "l"(db), "r"(1));
    da += stepa; db += stepb;
  }}
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("{wait}" ::: "memory");
  for (int i = 0; i < {count}; i++) out[threadIdx.x * {count} + i] = d[i];
}}
"""


def tcgen05_kernel(
    kind: str,
    group: int = 1,
    form: str = "ss",
    columns: int = 256,
    before: str = "",
    wait_ld: str = "tcgen05.wait::ld.sync.aligned;",
    commit_wait: str = "wait_parity(bar, 0);",
    proxy: str = "fence_async();",
    free: bool = True,
    issuers: str = "threadIdx.x == 0",
    again: str = "",
) -> str:
    """A kernel of one CTA (or a pair): mma steps over an image, D's 128 lanes x `columns` cells to `out`.

    `form`: "ss", "ts" (A from TMEM columns 256.., given as words[lane][8 * steps]) or "scaled" (scales at
    columns 256 and 288, copied by `before`).
    """
    left = "[%1]" if form == "ts" else "%1"
    qualifier = {"mxf4nvf4": ".block_scale.block16", "mxf4": ".block_scale", "mxf8f6f4": ".block_scale"}.get(kind, "")
    scales = "[%5], [%6], " if form == "scaled" else ""
    a_operand = '"r"(t + 256 + 8 * step)' if form == "ts" else '"l"(da)'
    stores = (
        "for (int c = 0; c < 8 * steps; c++) { u32 v = words[threadIdx.x * 8 * steps + c];\n"
        'asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" :: "r"(t + 256 + c + (threadIdx.x / 32 << 21)), "r"(v) : "memory"); }\n'
        'asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");'
        if form == "ts"
        else ""
    )
    g = f"cta_group::{group}"
    pair = group == 2
    sync = (
        'asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");'
        if pair
        else "__syncthreads();"
    )
    commit = (
        f"tcgen05.commit.{g}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
        if pair
        else f"tcgen05.commit.{g}.mbarrier::arrive::one.shared::cluster.b64 [%0];"
    )
    return rf"""
extern "C" __global__ void __launch_bounds__(128) kernel(const uint4* image, int count, u32* out, u64 da, u64 db,
    u64 stepa, u64 stepb, int steps, u32 id, const u32* words) {{
  extern __shared__ __align__(1024) unsigned char sm[];
  __shared__ u64 barrier; __shared__ u32 where;
  u32 bar = shared_address(&barrier), rank = 0;
  {'asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));' if pair else ""}
  if (threadIdx.x < 32)
    asm volatile("tcgen05.alloc.{g}.sync.aligned.shared::cta.b32 [%0], 512;" :: "r"(shared_address(&where)) : "memory");
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }}
  load_image(sm, image + rank * count, count);
  {proxy}
  __syncthreads();
  u32 t = where;
  {stores}
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  {sync}
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 base = shared_address(sm) >> 4;
  da += base; db += base;
  if ({issuers} && rank == 0) {{
    {before}
    for (int step = 0; step < steps; step++, da += stepa, db += stepb)
      asm volatile("{{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.{g}.kind::{kind}{qualifier} [%0], {left}, %2, %3, {scales}p; }}"
        :: "r"(t), {a_operand}, "l"(db), "r"(id), "r"(step), "r"(t + 256), "r"(t + 288) : "memory");
    asm volatile("{commit}" :: "r"(bar), "h"((unsigned short)3) : "memory");
  }}
  {commit_wait}
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 row = threadIdx.x + 128 * rank;
  for (int c = 0; c < {columns}; c += 8) {{
    u32 v[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%0,%1,%2,%3,%4,%5,%6,%7}}, [%8];"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
      : "r"(t + c + (threadIdx.x / 32 << 21)) : "memory");
    asm volatile("{wait_ld}" ::: "memory");
    for (int i = 0; i < 8; i++) out[row * {columns} + c + i] = v[i];
  }}
  {again}
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  {sync}
  if (threadIdx.x < 32 && {int(free)})
    asm volatile("tcgen05.dealloc.{g}.sync.aligned.b32 %0, 512;" :: "r"(t) : "memory");
}}
"""


MOVES = {"32x32b": (1, 32), "16x64b": (1, 16), "16x128b": (2, 16), "16x256b": (4, 16)}


def moves_kernel(shape: str, repeats: int, load_pack: str = "", store_unpack: str = "") -> str:
    """Stores registers with one shape, loads all 128 lanes x 64 columns with 32x32b."""
    count = MOVES[shape][0] * repeats
    listed = ",".join(f"%{i + 1}" for i in range(count))
    sources = ", ".join(f'"r"(v[{i}])' for i in range(count))
    loads = ",".join(f"%{i}" for i in range(count))
    sinks = ", ".join(f'"=r"(w[{i}])' for i in range(count))
    return rf"""
extern "C" __global__ void __launch_bounds__(128) moves(const u32* in, u32* out, u32* back) {{
  __shared__ u32 where;
  if (threadIdx.x < 32)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;" :: "r"(shared_address(&where)) : "memory");
  __syncthreads();
  u32 t = where + (threadIdx.x / 32 << 21), v[{count}], w[{count}];
  for (int c = 0; c < 64; c++)
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {{%1}};" :: "r"(t + c), "r"(0) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  for (int i = 0; i < {count}; i++) v[i] = in[threadIdx.x * {count} + i];
  asm volatile("tcgen05.st.sync.aligned.{shape}.x{repeats}{store_unpack}.b32 [%0], {{{listed}}};" :: "r"(t), {sources} : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  asm volatile("tcgen05.ld.sync.aligned.{shape}.x{repeats}{load_pack}.b32 {{{loads}}}, [%{count}];" : {sinks} : "r"(t) : "memory");
  for (int c = 0; c < 64; c++) {{
    u32 x;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%0}}, [%1];" : "=r"(x) : "r"(t + c) : "memory");
    out[threadIdx.x * 64 + c] = x;
  }}
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  for (int i = 0; i < {count}; i++) back[threadIdx.x * {count} + i] = w[i];
  __syncthreads();
  if (threadIdx.x < 32) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" :: "r"(where) : "memory");
}}
"""


BYTES = r"""
extern "C" __global__ void bytes(const uint4* in, u32* loaded, uint4* stored, u32* narrow) {
  // two 16 x 16 tiles of bytes, and eight padded rows of 4-bit codes
  __shared__ uint4 tile[32], other[32];
  int l = threadIdx.x;
  tile[l] = in[l];
  __syncwarp();
  u32 r0, r1, r2, r3, n;
  asm volatile("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%0,%1,%2,%3}, [%4];" : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
    : "r"(shared_address(&tile[l])) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%0}, [%1];" : "=r"(n) : "r"(shared_address(&tile[l % 8])) : "memory");
  asm volatile("stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%0], {%1,%2,%3,%4};"
    :: "r"(shared_address(&other[l])), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
  __syncwarp();
  stored[l] = other[l];
  loaded[4 * l] = r0; loaded[4 * l + 1] = r1; loaded[4 * l + 2] = r2; loaded[4 * l + 3] = r3;
  narrow[l] = n;
}
"""
