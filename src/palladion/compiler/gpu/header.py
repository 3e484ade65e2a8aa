"""The device functions that generated kernels use: one small header of our own, put before every kernel.

Numbers narrower than 32 bits are structs that hold their bits; arithmetic happens in `float` and is rounded back, as
the hardware's own conversions do it. What waits, copies or multiplies is inline PTX (the PTX ISA names each).
"""
# ruff: noqa: E501 (C++ in strings)

PRELUDE = r"""
typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;

struct bf16 {
  u16 bits;
  bf16() = default;
  __device__ __forceinline__ bf16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { return __uint_as_float((u32)bits << 16); }
};
struct f16 {
  u16 bits;
  f16() = default;
  __device__ __forceinline__ f16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
};
struct e4m3 {
  u8 bits;
  e4m3() = default;
  __device__ __forceinline__ e4m3(float x) {
    // The instruction knows no overflow; JAX's type has NaN there: from 464 on, half-way from the largest number.
    u16 two; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    bits = fabsf(x) > 464.0f ? (u8)(two | 0x7f) : (u8)two;
  }
  __device__ __forceinline__ operator float() const {
    u32 two; float x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((u16)bits));
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)two)); return x;
  }
};
struct e5m2 {
  u8 bits;
  e5m2() = default;
  __device__ __forceinline__ e5m2(float x) {
    u16 two; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    bits = fabsf(x) >= 61440.0f ? (u8)((two & 0x80) | 0x7c) : (u8)two;
  }
  __device__ __forceinline__ operator float() const {
    u32 two; float x;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(two) : "h"((u16)bits));
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)two)); return x;
  }
};

template <class to, class from> __device__ __forceinline__ to bit_cast(from x) {
  static_assert(sizeof(to) == sizeof(from), "a bitcast keeps the size");
  to y; memcpy(&y, &x, sizeof(to)); return y;
}
__device__ __forceinline__ float maximum(float x, float y) { float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
__device__ __forceinline__ float minimum(float x, float y) { float z; asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
__device__ __forceinline__ double maximum(double x, double y) { return x != x ? x : y != y ? y : x > y ? x : y; }
__device__ __forceinline__ double minimum(double x, double y) { return x != x ? x : y != y ? y : x < y ? x : y; }

__device__ __forceinline__ float quotient(float x, float y) { float z; asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
// Integer division as XLA defines it: by zero it gives -1 and the dividend, and nothing overflows.
template <class T> __device__ __forceinline__ T divide(T x, T y) {
  if (y == T(0)) return (T)-1;
  if constexpr (T(-1) < T(0)) { if (y == T(-1)) return (T)(0ull - (u64)x); }
  return (T)(x / y);
}
template <class T> __device__ __forceinline__ T remainder_of(T x, T y) {
  if (y == T(0)) return x;
  if constexpr (T(-1) < T(0)) { if (y == T(-1)) return T(0); }
  return (T)(x % y);
}
// x to the power n > 0, by squaring.
template <int n, class T> __device__ __forceinline__ T power(T x) {
  if constexpr (n == 1) return x;
  else { const T half = power<n / 2>(x); return n % 2 ? (T)(half * half * x) : (T)(half * half); }
}
// A floating-point number without its fraction; what is too large becomes the largest integer, NaN becomes 0.
template <class T, class F> __device__ __forceinline__ T whole(F x) {
  if constexpr (sizeof(T) == 8 || sizeof(F) == 8) { if (x != x) return T(0); }
  if constexpr (sizeof(T) >= 4) return (T)x;
  else if constexpr (T(-1) < T(0)) {
    constexpr int most = (1 << (8 * sizeof(T) - 1)) - 1;
    return (T)max(min((int)x, most), -most - 1);
  } else return (T)min((u32)x, (1u << (8 * sizeof(T))) - 1);
}

template <class T> __device__ __forceinline__ T shuffle_xor(T x, int mask) {
  if constexpr (sizeof(T) == 8) {
    return bit_cast<T>(__shfl_xor_sync(~0u, bit_cast<u64>(x), mask));
  } else if constexpr (sizeof(T) == 4) {
    return bit_cast<T>(__shfl_xor_sync(~0u, bit_cast<u32>(x), mask));
  } else if constexpr (sizeof(T) == 2) {
    return bit_cast<T>((u16)__shfl_xor_sync(~0u, (u32)bit_cast<u16>(x), mask));
  } else {
    return bit_cast<T>((u8)__shfl_xor_sync(~0u, (u32)bit_cast<u8>(x), mask));
  }
}

template <int... table> __device__ __forceinline__ constexpr int pick(int i) {
  constexpr int all[] = {table...};
  return all[i];
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void sync_warpgroup(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }
"""
