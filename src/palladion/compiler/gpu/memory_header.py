"""The device functions for memory that generated kernels use: vectors, swizzles, barriers, copies, fences.

Each is a few lines around one or two instructions. Functions with `memory` among what they change keep the compiler
from moving ordinary accesses over them.

Source: PTX ISA, the instructions named; facts file, sections 1 to 7.
"""

HEADER = r"""
// --- memory ---
struct alignas(64) TensorMap { u64 words[16]; };
template <class T, int n> struct alignas(sizeof(T) * n) Vector { T at[n]; };
template <int n, class T> __device__ __forceinline__ void load(T* x, const char* from) {
  const Vector<T, n> v = *(const Vector<T, n>*)from;
  for (int j = 0; j < n; ++j) x[j] = v.at[j];
}
template <int n, class T> __device__ __forceinline__ void store(char* to, const T* x) {
  Vector<T, n> v;
  for (int j = 0; j < n; ++j) v.at[j] = x[j];
  *(Vector<T, n>*)to = v;
}
// Where the hardware puts the byte `at` of memory that is swizzled in rows of `width` bytes.
template <int width> __device__ __forceinline__ constexpr int swizzle(int at) {
  return at ^ ((at >> 7 & (width / 16 - 1)) << 4);
}
// The same byte of shared memory in another block of the cluster.
__device__ __forceinline__ char* in_block(const char* p, u32 rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return (char*)there;
}
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// --- barriers ---
__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_arrive_in_cluster(u32 bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_wait_in_cluster(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ bool barrier_test(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// --- asynchronous copies ---
__device__ __forceinline__ void commit_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void commit_memory() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int n> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory");
}
template <int n> __device__ __forceinline__ void wait_copies_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}
"""
