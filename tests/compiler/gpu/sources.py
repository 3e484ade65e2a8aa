"""CUDA C++ for tests of the toolchain, written by hand: a pipelined matrix product for Hopper, and kernels that spill,
that overflow and that do nothing much."""

import pytest

from palladion.compiler.gpu import nvrtc, tools
from palladion.compiler.gpu.generated import Generated

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.available(), reason="compiling CUDA C++ needs NVRTC: pip install 'palladion[gpu]'"
)
needs_nvdisasm = pytest.mark.skipif(
    not nvrtc.available() or tools.find_tool("nvdisasm") is None,
    reason="looking into machine code needs nvdisasm: pip install 'palladion[gpu]'",
)

SCALE = """
// scale.py:4 (kernel)
extern "C" __global__ void __launch_bounds__(128, 1) scale(float* a, const float* b, int n) {
  __shared__ float s[256];
  // scale.py:5 (kernel)
  s[threadIdx.x] = b[threadIdx.x];
  __syncthreads();
  // scale.py:6 (kernel)
  for (int j = 0; j < n; ++j) a[threadIdx.x] += s[(threadIdx.x + j) % 128];
}
"""


def spilling(n=300):
    """A kernel that keeps more values than there are registers."""
    body = "".join(f"  float x{i} = a[{i} * n];\n" for i in range(n))
    uses = "".join(f"  o[{i} * n + blockIdx.x] = x{(i * 7) % n};\n" for i in range(n))
    head = 'extern "C" __global__ void __launch_bounds__(128, 4) spill(const float* a, float* o, int n) {'
    return f"{head}\n{body}  __syncthreads();\n{uses}}}"


def matmul(stages=4, wgmmas=4):
    """One warpgroup that copies, one that multiplies 64x64 tiles: waits, wgmma, releases, round and round."""
    regs = ", ".join(f"%{i}" for i in range(32))
    outs = ", ".join(f'"+f"(c[{i}])' for i in range(32))
    product = (
        'asm volatile("{ wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {'
        + regs
        + '}, %32, %33, 1, 1, 1, 0, 0; }" : '
        + outs
        + ' : "l"(da + %d), "l"(db + %d));'
    )
    products = "\n".join("      " + product.replace("%d", str(2 * i)) for i in range(wgmmas))
    return f"""
typedef unsigned long long u64;
typedef unsigned int u32;
__device__ inline u32 at(const void* p) {{ return (u32)__cvta_generic_to_shared(p); }}
__device__ inline void wait(u64* bar, u32 parity) {{
  asm volatile("{{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L; }}"
    :: "r"(at(bar)), "r"(parity) : "memory");
}}
__device__ inline void arrive(u64* bar) {{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(bar)) : "memory");
}}
struct __align__(128) Map {{ char bytes[128]; }};
// matmul.py:10 (kernel)
extern "C" __global__ void __launch_bounds__(256, 1) matmul(const __grid_constant__ Map a, float* out, int steps) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  u64* full = (u64*)smem; u64* empty = full + {stages};
  if (threadIdx.x == 0) {{
    for (int i = 0; i < {stages}; ++i) {{
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(full + i)) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" :: "r"(at(empty + i)) : "memory");
    }}
  }}
  __syncthreads();
  if (threadIdx.x >= 128) {{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // matmul.py:14 (produce)
    if (threadIdx.x == 128) for (int k = 0; k < steps; ++k) {{
      int s = k % {stages};
      if (k >= {stages}) wait(empty + s, (k / {stages} + 1) & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16384;" :: "r"(at(full + s)) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                   " [%0], [%1, {{%2, %3}}], [%4];"
        :: "r"(at(smem + 1024 + s * 16384)), "l"(&a), "r"(0), "r"(k), "r"(at(full + s)) : "memory");
    }}
  }} else {{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float c[32];
    for (int i = 0; i < 32; ++i) c[i] = 0;
    // matmul.py:20 (multiply)
    for (int k = 0; k < steps; ++k) {{
      int s = k % {stages};
      wait(full + s, (k / {stages}) & 1);
      u64 da = 0x4000004000010000ull | (at(smem + 1024 + s * 16384) >> 4), db = da + 512;
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{products}
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      arrive(empty + s);
    }}
    // matmul.py:27 (kernel)
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = c[i];
  }}
}}
"""


def generated(source=SCALE, name="scale", arch="sm_90a", **changes):
    """Source as the code generator would hand it over."""
    own = dict(threads=128, cluster=(1, 1, 1), grid=(4, 1, 1), smem_bytes=0, static_smem_bytes=0, tmem_columns=0,
               barriers=0, params=(), layouts=("b: float32[256] in SMEM", "a: float32[128] in GMEM"))  # fmt: skip
    return Generated(name=name, source=source, arch=arch, **{**own, **changes})
