# ruff: noqa: E501
"""A whole Hopper matmul as people write it: TMA producer, two wgmma consumers, ring of stages with full and empty barriers."""

import numpy as np
import pytest

from palladion.emulator.driver import EmulatedDriver
from palladion.emulator.faults import EmulationFault
from tests.emulator.tensor_kernels import compiled

STAGES, TILE_M, TILE_N, TILE_K = 3, 128, 128, 64
STAGE = (TILE_M + TILE_N) * TILE_K * 2

D_REGISTERS = ",".join(f"%{i}" for i in range(64))
D_OPERANDS = ",".join(f'"+f"(d[{i}])' for i in range(64))


def kernel(
    release: str = "if (step > 0 && threadIdx.x % 128 == 0) arrive(empty + 8 * ((step - 1) % 3));", wait: int = 1
) -> str:
    """`release`: how a consumer gives a stage back; `wait`: how many groups of products stay in flight then."""
    return rf"""
struct alignas(64) Map {{ u64 words[16]; }};
static __device__ void arrive(u32 bar) {{ asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }}
static __device__ u64 describe(u32 at) {{ return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }}
extern "C" __global__ void __launch_bounds__(384, 1) matmul(const __grid_constant__ Map ma, const __grid_constant__ Map mb,
    float* out, int n, int steps) {{
  extern __shared__ __align__(1024) unsigned char sm[];
  __shared__ u64 barriers[6];
  u32 full = shared_address(barriers), empty = full + 24, tiles = shared_address(sm);
  int row = blockIdx.y * {TILE_M}, column = blockIdx.x * {TILE_N};
  if (threadIdx.x == 0) {{
    for (int i = 0; i < {STAGES}; i++) {{
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * i) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" :: "r"(empty + 8 * i) : "memory");
    }}
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }}
  __syncthreads();
  if (threadIdx.x < 128) {{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) for (int step = 0; step < steps; step++) {{
      int s = step % {STAGES};
      u32 bar = full + 8 * s, at = tiles + s * {STAGE};
      wait_parity(empty + 8 * s, step / {STAGES} & 1 ^ 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], {STAGE};" :: "r"(bar) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {{%2, %3}}], [%4];"
        :: "r"(at), "l"(&ma), "r"(step * {TILE_K}), "r"(row), "r"(bar) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {{%2, %3}}], [%4];"
        :: "r"(at + {TILE_M * TILE_K * 2}), "l"(&mb), "r"(step * {TILE_K}), "r"(column), "r"(bar) : "memory");
    }}
    return;
  }}
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  int group = threadIdx.x / 128 - 1;
  float d[64];
  for (int i = 0; i < 64; i++) d[i] = 0;
  for (int step = 0; step < steps; step++) {{
    int s = step % {STAGES};
    u32 at = tiles + s * {STAGE};
    wait_parity(full + 8 * s, step / {STAGES} & 1);
    u64 da = describe(at + group * 64 * {TILE_K} * 2), db = describe(at + {TILE_M * TILE_K * 2});
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int k = 0; k < 4; k++)
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {{{D_REGISTERS}}}, %64, %65, 1, 1, 1, 0, 0;"
        : {D_OPERANDS} : "l"(da + 2 * k), "l"(db + 2 * k));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned {wait};" ::: "memory");
    {release}
  }}
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  int t = threadIdx.x % 128, r = row + 64 * group + t / 32 * 16 + t % 32 / 4, c = column + t % 4 * 2;
  for (int i = 0; i < 64; i += 2)
    *(float2*)(out + (r + 8 * (i / 2 % 2)) * n + c + 8 * (i / 4)) = make_float2(d[i], d[i + 1]);
}}
"""


def run(m, n, k, order="lazy", source=None):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    driver = EmulatedDriver(arch="sm_90a", order=order)
    function = driver.function(driver.load_module(compiled(source or kernel(), "sm_90a")), "matmul")
    maps = []
    for value in (a, b):
        at = driver.alloc(value.nbytes)
        driver.copy_in(at, value)
        maps.append(driver.encode_tensor_map(6, 2, at, [k, len(value)], [2 * k], [TILE_K, 128], [1, 1], 0, 3, 0, 0))
    out = driver.alloc(4 * m * n)
    arguments = [*maps, np.uint64(out).tobytes(), np.int32(n).tobytes(), np.int32(k // TILE_K).tobytes()]
    driver.launch(function, (n // TILE_N, m // TILE_M, 1), (384, 1, 1), arguments, smem=STAGES * STAGE)
    got = driver.copy_out(out, 4 * m * n).view(np.float32).reshape(m, n)
    return got, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("order", ["lazy", "eager", 1])
def test_matmul(order):
    got, want = run(256, 256, 256, order)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_a_stage_given_back_too_early_shows():
    """Consumers arrive on `empty` with products in flight: in some order of events the refill comes first."""
    early = kernel(release="if (threadIdx.x % 128 == 0) arrive(empty + 8 * s);")

    def shows(order):
        try:
            got, want = run(128, 128, 512, order, early)
        except EmulationFault as fault:
            return fault.kind == "wgmma-in-flight"
        return not np.allclose(got, want, rtol=1e-3, atol=1e-3)

    assert any(shows(seed) for seed in range(1, 7))


PAIR = r"""
struct alignas(64) Map { u64 words[16]; };
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1) pair(const __grid_constant__ Map ma,
    const __grid_constant__ Map mb, float* out, int steps) {
  // two CTAs, one 256 x 128 tile: each loads 128 rows of A and 64 of B a step, CTA 0 multiplies for both
  extern __shared__ __align__(1024) unsigned char sm[];
  __shared__ u64 barriers[5]; __shared__ u32 where;
  u32 full = shared_address(barriers), done = full + 32, rank, tiles = shared_address(sm);
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x < 32)
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 128;" :: "r"(shared_address(&where)) : "memory");
  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 t = where;
  if (threadIdx.x == 0) {
    for (int s = 0; s < steps; s++) {
      u32 bar = (full + 8 * s) & 0xfeffffff, at = tiles + s * 24576;
      if (rank == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 49152;" :: "r"(full + 8 * s) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%2, %3}], [%4];"
        :: "r"(at), "l"(&ma), "r"(64 * s), "r"(128 * rank), "r"(bar) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%2, %3}], [%4];"
        :: "r"(at + 16384), "l"(&mb), "r"(64 * s), "r"(64 * rank), "r"(bar) : "memory");
    }
    if (rank == 0) {
      for (int s = 0; s < steps; s++) {
        wait_parity(full + 8 * s, 0);
        u32 at = tiles + s * 24576;
        u64 high = 1ull << 16 | 64ull << 32 | 1ull << 46 | 1ull << 62;
        for (int k = 0; k < 4; k++)
          asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p; }"
            :: "r"(t), "l"(high | (at >> 4 & 0x3fff) + 2 * k), "l"(high | (at + 16384 >> 4 & 0x3fff) + 2 * k),
               "r"(1u << 4 | 16u << 17 | 16u << 24), "r"(s + k) : "memory");
      }
      asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
        :: "r"(done), "h"((unsigned short)3) : "memory");
    }
  }
  wait_parity(done, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  for (int c = 0; c < 128; c += 4) {
    float4 v;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(t + c + (threadIdx.x / 32 << 21)) : "memory");
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    *(float4*)(out + (128 * rank + threadIdx.x) * 128 + c) = v;
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x < 32) asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 128;" :: "r"(t) : "memory");
}
"""


@pytest.mark.parametrize("order", ["lazy", "eager", 1])
def test_a_pair_of_ctas(order):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((256, 256)).astype(np.float16), rng.standard_normal((128, 256)).astype(np.float16)
    driver = EmulatedDriver(arch="sm_100a", order=order)
    function = driver.function(driver.load_module(compiled(PAIR, "sm_100a")), "pair")
    maps = []
    for value, rows in ((a, 128), (b, 64)):
        at = driver.alloc(value.nbytes)
        driver.copy_in(at, value)
        maps.append(driver.encode_tensor_map(6, 2, at, [256, len(value)], [512], [64, rows], [1, 1], 0, 3, 0, 0))
    out = driver.alloc(4 * 256 * 128)
    arguments = [*maps, np.uint64(out).tobytes(), np.int32(4).tobytes()]
    driver.launch(function, (2, 1, 1), (128, 1, 1), arguments, cluster=(2, 1, 1), smem=4 * 24576)
    got = driver.copy_out(out, 4 * 256 * 128).view(np.float32).reshape(256, 128)
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-3, atol=1e-3)
