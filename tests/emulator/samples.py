# ruff: noqa: E501 (CUDA)
"""CUDA programs for the emulator, in the style of the usual samples."""

REDUCE = """
__inline__ __device__ float warp_sum(float v) {
  for (int d = 16; d > 0; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
  return v;
}
extern "C" __global__ void reduce(const float* x, float* out, int n) {
  __shared__ float part[32];
  float v = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
    v = warp_sum(v);
    if (threadIdx.x == 0) atomicAdd(out, v);
  }
}
extern "C" __global__ void tree(const int* x, int* out) {
  extern __shared__ int buf[];
  int t = threadIdx.x;
  buf[t] = x[blockIdx.x * blockDim.x + t];
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s >>= 1) {
    if (t < s) buf[t] = max(buf[t], buf[t + s]);
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = buf[0];
}
"""

SHUFFLES = """
extern "C" __global__ void shuffles(const int* x, int* out) {
  int t = threadIdx.x, v = x[t], n = blockDim.x;
  out[t] = __shfl_sync(0xffffffffu, v, (t * 7 + 3) & 31);
  out[n + t] = __shfl_up_sync(0xffffffffu, v, 3, 16);
  out[2 * n + t] = __shfl_down_sync(0xffffffffu, v, 5, 8);
  out[3 * n + t] = __shfl_xor_sync(0xffffffffu, v, 9);
  out[4 * n + t] = __shfl_sync(0xffffffffu, v, 2, 4);
}
extern "C" __global__ void scan(const int* x, int* out) {
  int lane = threadIdx.x & 31, v = x[threadIdx.x];
  for (int d = 1; d < 32; d *= 2) { int u = __shfl_up_sync(0xffffffffu, v, d); if (lane >= d) v += u; }
  out[threadIdx.x] = v;
}
extern "C" __global__ void votes(const int* x, unsigned* out) {
  int t = threadIdx.x, n = blockDim.x, v = x[t];
  out[t] = __ballot_sync(0xffffffffu, v > 0);
  out[n + t] = __any_sync(0xffffffffu, v > 90) | __all_sync(0xffffffffu, v > -95) << 1;
  out[2 * n + t] = __match_any_sync(0xffffffffu, v & 7);
  int all; out[3 * n + t] = __match_all_sync(0xffffffffu, t / 32, &all) + all;
  out[4 * n + t] = __reduce_add_sync(0xffffffffu, (unsigned)v);
  out[5 * n + t] = (unsigned)__reduce_min_sync(0xffffffffu, v);
  out[6 * n + t] = __reduce_xor_sync(0xffffffffu, (unsigned)v);
  if (v & 1) out[7 * n + t] = __activemask(); else out[7 * n + t] = ~__activemask();
  if (t % 3 == 0) out[8 * n + t] = __ballot_sync(0x49249249u << (t / 32 ? (t / 32 == 1 ? 1 : 2) : 0) | (t / 32 == 1 ? 0 : t / 32 == 2 ? 1u : 0), v > 0);
}
extern "C" __global__ void elect(unsigned* out) {
  unsigned chosen, lane;
  asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(lane), "=r"(chosen));
  unsigned other;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(other));
  out[threadIdx.x] = lane * 4 + chosen * 2 + other;
}
"""

ATOMICS = """
extern "C" __global__ void histogram(const unsigned* x, unsigned* bins, int n) {
  __shared__ unsigned local[64];
  if (threadIdx.x < 64) local[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[x[i] & 63], 1u);
  __syncthreads();
  if (threadIdx.x < 64) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}
extern "C" __global__ void all(int* s, unsigned* u, unsigned long long* w, float* f, double* d, int* order) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&s[0], t); atomicSub(&s[1], t); atomicMin(&s[2], -t); atomicMax(&s[3], t * 3); atomicExch(&s[4], 77);
  atomicAnd(&u[0], ~(1u << (t & 31))); atomicOr(&u[1], 1u << (t & 31)); atomicXor(&u[2], t * 2654435761u);
  atomicInc(&u[3], 10); atomicDec(&u[4], 10); atomicMax(&u[5], 0x80000000u + t);
  atomicAdd(&w[0], 1ull << 33); atomicMax(&w[1], (unsigned long long)t << 40); atomicCAS(&w[2], 5ull, 6ull);
  atomicAdd(&f[0], 0.5f * t); atomicAdd(&d[0], 0.25 * t);
  order[t] = atomicAdd(&s[5], 1);
}
extern "C" __global__ void spin_lock(int* lock, int* count) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      *(volatile int*)count = *(volatile int*)count + 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
extern "C" __global__ void last_block(const float* x, float* part, unsigned* ticket, float* out) {
  __shared__ bool last;
  atomicAdd(&part[blockIdx.x], x[blockIdx.x * blockDim.x + threadIdx.x]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(ticket, gridDim.x) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x == 0) { float s = 0; for (int i = 0; i < gridDim.x; i++) s += part[i]; *out = s; }
}
extern "C" __global__ void grid_barrier(unsigned* count, int* x, int* out) {
  int b = blockIdx.x, n = gridDim.x;
  if (threadIdx.x == 0) {
    x[b] = b * b;
    __threadfence();
    atomicAdd(count, 1u);
    while (*(volatile unsigned*)count < n) { }
    __threadfence();
    out[b] = x[(b + 1) % n];
  }
}
"""

DIVERGENCE = """
extern "C" __global__ void nested(const int* x, int* out) {
  int t = threadIdx.x + blockIdx.x * blockDim.x, v = x[t], r = 0;
  if (v & 1) { if (v & 2) r = v * 3; else if (v & 4) r = v - 100; else r = -v; }
  else { switch ((v >> 1) & 7) { case 0: r = 1; break; case 1: r = 22; case 2: r += 333; break; case 3: r = v; break;
                                 case 5: r = v / 3; break; case 6: r = v % 5; break; default: r = -7; } }
  out[t] = r + 1000;
}
extern "C" __global__ void loops(const int* x, int* out) {
  int t = threadIdx.x + blockIdx.x * blockDim.x, v = x[t], r = 0;
  for (int i = 0; i < v; i++) {
    if (i % 3 == 1) continue;
    if (r > 500) break;
    for (int j = i; j < v; j += 5) r += j ^ t;
  }
  int steps = 0;
  unsigned c = v + 1;
  while (c != 1) { c = c & 1 ? 3 * c + 1 : c >> 1; steps++; }
  out[t] = r * 1000 + steps;
}
extern "C" __global__ void early(const float* x, float* out, int n) {
  int t = threadIdx.x + blockIdx.x * blockDim.x;
  if (t >= n) return;
  if (x[t] < 0) { out[t] = -1; return; }
  float s = sqrtf(x[t]);
  if (s > 2.f) return;
  out[t] = s;
}
extern "C" __global__ void meet(const int* x, int* out) {
  __shared__ int buf[128];
  int t = threadIdx.x, r = 0;
  for (int round = 0; round < 4; round++) {
    if (x[t] & 1 << round) for (int k = 0; k < (t & 7); k++) r += k * round;
    buf[t] = r;
    __syncthreads();
    r += buf[(t + 32 * round + 1) & 127];
    __syncthreads();
  }
  __syncwarp();
  out[t] = r + __shfl_xor_sync(0xffffffffu, r, 1);
}
extern "C" __global__ void handshake(int* out) {
  __shared__ volatile int flag[2];
  if (threadIdx.x == 0) { flag[0] = 0; flag[1] = 0; }
  __syncthreads();
  if (threadIdx.x == 33) { while (flag[0] == 0) { } out[0] = flag[0]; flag[1] = 5; }
  if (threadIdx.x == 1) { flag[0] = 4; while (flag[1] == 0) { } out[1] = flag[1]; }
}
extern "C" __global__ void inside_a_warp(int* out) {
  __shared__ volatile int flag;
  flag = 0;
  __syncwarp();
  if (threadIdx.x == 0) { while (flag == 0) { } out[0] = flag; }
  else if (threadIdx.x == 7) { flag = 9; }
}
"""

FUNCTIONS = """
__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
struct Pair { int a; double b; float c[3]; };
__device__ __noinline__ Pair change(Pair p, int k) { p.a += k; p.b *= 2; p.c[k % 3] = k; return p; }
__device__ int square(int x) { return x * x; }
__device__ int twice(int x) { return 2 * x; }
__device__ int (*const table[2])(int) = {square, twice};
__constant__ float weights[4] = {1.f, 2.f, 3.f, -4.5f};
__device__ int counter = 7;
__device__ const char* const names[2] = {"even", "odd"};
extern "C" __global__ void functions(int* out, double* sums, Pair start, int which) {
  int t = threadIdx.x;
  out[t] = fib(t % 11);
  Pair p = change(start, t);
  p = change(p, t + 1);
  sums[t] = p.a + p.b + p.c[0] + p.c[1] * 10 + p.c[2] * 100;
  out[64 + t] = table[which](t);
}
extern "C" __global__ void locals(const int* x, int* out) {
  int heap[16], t = threadIdx.x;
  for (int i = 0; i < 16; i++) heap[i] = x[t * 16 + i];
  for (int i = 1; i < 16; i++) { int v = heap[i], j = i; while (j > 0 && heap[j - 1] > v) { heap[j] = heap[j - 1]; j--; } heap[j] = v; }
  for (int i = 0; i < 16; i++) out[t * 16 + i] = heap[i];
}
extern "C" __global__ void constants(float* out) {
  int t = threadIdx.x;
  out[t] = weights[t & 3];
  if (t == 0) atomicAdd(&counter, 3);
  __syncthreads();
  out[32 + t] = counter;
}
extern "C" __global__ void hello(int n) {
  int t = threadIdx.x;
  if (t < n) printf("%d %s %5.2f|%-4u|%c %lld %x %%\\n", t, names[t & 1], t * 0.5, 7u, 'a' + t, 1ll << (40 + t), 255);
}
extern "C" __global__ void checked(int n) { if (threadIdx.x == 5 && !(n > 3)) __assertfail("n > 3", "mine.cu", 12, "checked", 1); }
"""

ARITHMETIC = """
typedef unsigned long long u64; typedef long long s64; typedef unsigned int u32;
extern "C" __global__ void wide(const s64* a, const s64* b, s64* out, int n) {
  int t = threadIdx.x + blockIdx.x * blockDim.x;
  if (t >= n) return;
  s64 x = a[t], y = b[t]; u64 ux = x, uy = y;
  s64* o = out + 16 * t;
  o[0] = x * y; o[1] = y ? x / y : 0; o[2] = y ? x % y : 0; o[3] = uy ? ux / uy : 0; o[4] = uy ? ux % uy : 0;
  o[5] = __mul64hi(x, y); o[6] = __umul64hi(ux, uy); o[7] = x << (y & 63); o[8] = x >> (y & 63); o[9] = ux >> (y & 63);
  o[10] = __popcll(x) + 100 * __clzll(x) + 10000 * __ffsll(x); o[11] = __brevll(x); o[12] = x < y ? x : y;
  o[13] = (s64)(double)x; o[14] = (s64)((float)x); o[15] = ux > uy;
}
extern "C" __global__ void narrow(const int* a, const int* b, int* out, int n) {
  int t = threadIdx.x + blockIdx.x * blockDim.x;
  if (t >= n) return;
  int x = a[t], y = b[t]; u32 ux = x, uy = y;
  int* o = out + 20 * t;
  o[0] = y ? x / y : 0; o[1] = y ? x % y : 0; o[2] = uy ? ux / uy : 0; o[3] = uy ? ux % uy : 0; o[4] = __mulhi(x, y);
  o[5] = __umulhi(ux, uy); o[6] = x / 7 + x % 10; o[7] = ux / 7u + ux % 1000u; o[8] = __byte_perm(x, y, 0x5b26);
  o[9] = __funnelshift_l(x, y, x & 63); o[10] = __funnelshift_rc(x, y, y & 63); o[11] = __clz(x) + 100 * __popc(y) + 10000 * __ffs(x);
  o[12] = __brev(x); o[13] = __sad(x, y, 5); o[14] = __usad(ux, uy, 5u); o[15] = __mul24(x, y); o[16] = __umul24(ux, uy);
  o[17] = __dp4a(x, y, 100); o[18] = __dp4a(ux, uy, 100u); o[19] = (short)x * (short)y + (signed char)x;
}
extern "C" __global__ void floats(const float* a, const float* b, float* out, int n) {
  int t = threadIdx.x + blockIdx.x * blockDim.x;
  if (t >= n) return;
  float x = a[t], y = b[t];
  float* o = out + 20 * t;
  o[0] = __fmaf_rn(x, y, 1.5f); o[1] = x / y; o[2] = sqrtf(fabsf(x)); o[3] = __frcp_rn(y); o[4] = fminf(x, y); o[5] = fmaxf(x, y);
  o[6] = floorf(x) + ceilf(y); o[7] = rintf(x); o[8] = truncf(x); o[9] = copysignf(x, y); o[10] = (float)(int)x; o[11] = __saturatef(x);
  o[12] = expf(x * 0.1f); o[13] = logf(fabsf(x) + 1.f); o[14] = sinf(x); o[15] = tanhf(x); o[16] = __fadd_rz(x, y); o[17] = __fmul_ru(x, y);
  o[18] = fmodf(x, y); o[19] = __fdividef(x, y);
}
extern "C" __global__ void doubles(const double* a, const double* b, double* out, int n) {
  int t = threadIdx.x + blockIdx.x * blockDim.x;
  if (t >= n) return;
  double x = a[t], y = b[t];
  double* o = out + 8 * t;
  o[0] = fma(x, y, -0.75); o[1] = x / y; o[2] = sqrt(fabs(x)); o[3] = exp(x * 0.25); o[4] = log(fabs(x) + 1); o[5] = rint(x);
  o[6] = (double)(float)x; o[7] = pow(fabs(x), 1.25);
}
"""

COPIES = """
typedef unsigned int u32;
extern "C" __global__ void staged(const float* x, float* out, int n) {
  __shared__ __align__(16) float buf[2][256];
  int t = threadIdx.x;
  auto fetch = [&](int k) {
    u32 to = (u32)__cvta_generic_to_shared(&buf[k & 1][4 * t]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + 256 * k + 4 * t) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  fetch(0);
  for (int k = 0; k < n; k++) {
    if (k + 1 < n) { fetch(k + 1); asm volatile("cp.async.wait_group 1;" ::: "memory"); }
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    for (int i = t; i < 256; i += 64) out[256 * k + i] = buf[k & 1][255 - i] * 2;
    __syncthreads();
  }
}
extern "C" __global__ void tile(const unsigned short* a, const unsigned short* b, float* d) {
  __shared__ __align__(128) unsigned short sa[16 * 16], sb[16 * 8];
  int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) sa[i] = a[i];
  for (int i = t; i < 128; i += 32) sb[i] = b[i];
  __syncwarp();
  u32 ra[4], rb[2]; float c[4] = {0, 0, 0, 0};
  u32 pa = (u32)__cvta_generic_to_shared(&sa[(t % 16) * 16 + t / 16 * 8]), pb = (u32)__cvta_generic_to_shared(&sb[(t % 16) * 8]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(pb));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  int g = t / 4, q = t % 4;
  d[g * 8 + 2 * q] = c[0]; d[g * 8 + 2 * q + 1] = c[1]; d[(g + 8) * 8 + 2 * q] = c[2]; d[(g + 8) * 8 + 2 * q + 1] = c[3];
}
"""

FAULTS = """
extern "C" __global__ void past_the_end(float* x, int n) { x[threadIdx.x + n] = 1; }
extern "C" __global__ void null_pointer(float* x) { if (threadIdx.x == 3) *(volatile float*)0 = x[0]; }
extern "C" __global__ void crooked(char* x) { *(volatile int*)(x + 4 * threadIdx.x + (threadIdx.x == 9 ? 2 : 0)) = 1; }
extern "C" __global__ void shared_past(float* x, int n) {
  __shared__ float buf[64];
  buf[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = buf[threadIdx.x + n];
}
extern "C" __global__ void half_meet(float* x) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  x[threadIdx.x] = 1;
}
extern "C" __global__ void warp_split(int* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, 3);
  else while (*(volatile int*)x != 99) { }
}
extern "C" __global__ void traps(int* x) { if (x[threadIdx.x] == 3) __trap(); }
extern "C" __global__ void unwritten(float* x) { __shared__ float buf[64]; if (threadIdx.x < 32) buf[threadIdx.x] = 1; __syncthreads(); x[threadIdx.x] = buf[threadIdx.x]; }
"""

BARRIERS = """
extern "C" __global__ void ring(int* out, int rounds) {
  __shared__ int slot;
  int warp = threadIdx.x / 32;
  if (warp == 0) {
    for (int i = 0; i < rounds; i++) {
      asm volatile("bar.sync 2, 64;" ::: "memory");
      if (threadIdx.x == 0) slot = i * i;
      asm volatile("bar.arrive 1, 64;" ::: "memory");
    }
  } else {
    for (int i = 0; i < rounds; i++) {
      asm volatile("bar.arrive 2, 64;" ::: "memory");
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (threadIdx.x == 32) out[i] = slot;
    }
  }
}
extern "C" __global__ void two_rings(int* out) {
  __shared__ int sums[2];
  int half = threadIdx.x / 64, t = threadIdx.x % 64;
  if (t == 0) sums[half] = 0;
  asm volatile("bar.sync %0, 64;" :: "r"(half + 1) : "memory");
  atomicAdd(&sums[half], t + 1000 * half);
  asm volatile("bar.sync %0, %1;" :: "r"(half + 1), "r"(64) : "memory");
  out[threadIdx.x] = sums[half];
}
extern "C" __global__ void counted(const int* x, int* out) {
  int t = threadIdx.x;
  out[t] = __syncthreads_count(x[t] > 0);
  out[blockDim.x + t] = __syncthreads_and(x[t] > -100) * 2 + __syncthreads_or(x[t] > 49);
}
extern "C" __global__ void some_left(int* out) {
  __shared__ int buf[64];
  if (threadIdx.x >= 64) return;
  buf[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = buf[63 - threadIdx.x];
}
"""
