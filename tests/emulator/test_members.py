"""Exchanges by some lanes of a warp (member masks), and barriers that threads come to one by one."""

import numpy as np
import pytest

from emulator.running import run
from palladion.emulator.faults import EmulationFault

MEMBERS = r"""
extern "C" __global__ void apart(int* out) {
  int t = threadIdx.x, v = t;
  if ((t & 31) < 16) {
    v = __shfl_xor_sync(0x0000ffff, v, 1);
    for (int i = 0; i < t % 5; i++) v += i;
    v = __shfl_xor_sync(0x0000ffff, v, 2);
  } else {
    v = __shfl_down_sync(0xffff0000u, v, 1, 16);
    v += __ballot_sync(0xffff0000u, t & 1);
  }
  out[t] = v;
  unsigned mask = (t & 1) ? 0xaaaaaaaau : 0x55555555u;
  out[64 + t] = __reduce_add_sync(mask, (unsigned)t);
  out[128 + t] = __match_any_sync(mask, t / 4);
  out[192 + t] = __any_sync(mask, t == 3 || t == 40) + 2 * __all_sync(mask, t & 1);
}
extern "C" __global__ void late(int* out) {
  __shared__ int cell[32];
  int t = threadIdx.x;
  if (t & 1) { for (int i = 0; i < t; i++) cell[t] = i; }
  else cell[t] = -t;
  __syncwarp(0xffffffffu);
  out[t] = cell[t ^ 1];
}
extern "C" __global__ void stranger(int* out) { if (threadIdx.x < 4) out[threadIdx.x] = __ballot_sync(0x7u, 1); }
extern "C" __global__ void missing(int* out) {
  if (threadIdx.x == 0) out[0] = __shfl_sync(0x3u, 1, 0);
  else __syncthreads();
}
"""


def test_lanes_in_different_branches_exchange_apart():
    (out,) = run(MEMBERS, "apart", 1, 64, [np.zeros(256, "i4")])
    t = np.arange(64)
    low = t ^ 1
    low = (low + np.array([sum(range(k % 5)) for k in t]))[t ^ 2]
    high = np.where(t & 15 == 15, t, t + 1) + np.int64(0xAAAA0000)
    np.testing.assert_array_equal(out[:64], np.where(t & 31 < 16, low, high).astype("u4").view("i4"))
    same = (t[:, None] & 33) == (t & 33)  # the same warp, and the same parity
    np.testing.assert_array_equal(out[64:128], (same * t).sum(1))
    bits = (same & (t[:, None] // 4 == t // 4)) @ (1 << (t & 31).astype("u8"))
    np.testing.assert_array_equal(out[128:192].view("u4"), bits)
    np.testing.assert_array_equal(out[192:], np.isin(t & 33, [1, 32]) + 2 * (t & 1))


def test_a_warp_meets_after_a_loop():
    (out,) = run(MEMBERS, "late", 1, 32, [np.zeros(32, "i4")])
    t = np.arange(32)
    np.testing.assert_array_equal(out, np.where(t & 1, -(t - 1), t))


def test_members_that_are_not_there():
    with pytest.raises(EmulationFault, match="a lane executes it that its member mask does not name") as caught:
        run(MEMBERS, "stranger", 1, 32, [np.zeros(4, "i4")])
    assert caught.value.kind == "collective-mismatch" and "thread 3 " in str(caught.value)
    with pytest.raises(EmulationFault, match="shfl: waits for the other lanes that its member mask names") as caught:
        run(MEMBERS, "missing", 1, 32, [np.zeros(4, "i4")])
    assert caught.value.kind == "deadlock"


BARRIERS = r"""
extern "C" __global__ void one_by_one(int* out) {
  __shared__ int cell[64];
  int t = threadIdx.x;
  cell[t] = 2 * t;
  if (t & 1) asm volatile("barrier.sync 1;" ::: "memory");
  else { cell[t] = 3 * t; asm volatile("barrier.sync 1;" ::: "memory"); }
  out[t] = cell[(t + 1) & 63];
}
extern "C" __global__ void disagree(int* out) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  else asm volatile("bar.sync 1, 96;" ::: "memory");
}
extern "C" __global__ void crowd(int* out) { asm volatile("bar.arrive 2, 64;" ::: "memory"); }
extern "C" __global__ void odd(int n) { asm volatile("bar.sync 1, %0;" :: "r"(n) : "memory"); }
extern "C" __global__ void number(int n) { asm volatile("bar.sync %0, 64;" :: "r"(n) : "memory"); }
"""


def test_threads_of_a_warp_come_to_a_barrier_one_by_one():
    (out,) = run(BARRIERS, "one_by_one", 1, 64, [np.zeros(64, "i4")])
    t = (np.arange(64) + 1) & 63
    np.testing.assert_array_equal(out, np.where(t & 1, 2 * t, 3 * t))


@pytest.mark.parametrize(
    "name, arg, threads, kind, message",
    [
        (
            "disagree",
            np.zeros(1, "i4"),
            96,
            "barrier-arrivals",
            "waits for (64|96) threads, and a thread arrives that says",
        ),
        ("crowd", np.zeros(1, "i4"), 128, None, None),
        ("odd", np.int32(40), 64, "barrier-arrivals", "40 threads, which is no number of whole warps"),
        ("number", np.int32(16), 64, "out-of-bounds", "There is no barrier 16: a CTA has 16"),
        ("number", np.int32(3), 32, "deadlock", "waits at barrier 3, where 32 of 64 threads are"),
    ],
)
def test_wrong_use_of_barriers(name, arg, threads, kind, message):
    if kind is None:  # warps by two, in two phases
        run(BARRIERS, name, 1, threads, [arg])
        return
    with pytest.raises(EmulationFault, match=message) as caught:
        run(BARRIERS, name, 1, threads, [arg])
    assert caught.value.kind == kind
