"""mbarriers: the counts by themselves, and through kernels that NVRTC compiled."""
# ruff: noqa: E501 (one PTX instruction a line)

import numpy as np
import pytest

from emulator.asynchronous import Device, fault
from palladion.emulator.barrier import LIMIT, Barrier, BarrierError


def test_phase_ends_when_both_counts_are_zero():
    b = Barrier(1024, 2)
    assert not b.arrive()
    b.expect(64)
    assert not b.arrive()
    assert not b.complete(32)
    assert b.complete(32)
    assert (b.phase, b.pending, b.tx) == (1, 2, 0)
    assert b.parity_done(0) and not b.parity_done(1)


def test_fresh_barrier_has_the_odd_phase_behind_it():
    b = Barrier(0, 1)
    assert b.parity_done(1) and not b.parity_done(0)


def test_bytes_may_land_before_they_are_expected():
    b = Barrier(0, 1)
    assert not b.complete(16)
    b.expect(16)
    assert b.arrive()


def test_drop_lowers_later_phases_only():
    b = Barrier(0, 3)
    assert not b.arrive(1, drop=True)
    assert b.arrive(2)
    assert b.expected == b.pending == 2


def test_tokens_name_their_phase():
    b = Barrier(0, 2)
    first = b.token
    b.arrive()
    assert b.token & 0xFFFFF == 1 and not b.token_done(first)
    b.arrive()
    assert b.token_done(first) and not b.token_done(b.token)


@pytest.mark.parametrize(
    "misuse, text",
    [
        (lambda b: b.arrive(3), "more arrivals than the phase expects"),
        (lambda b: b.arrive(0), "an arrival count of 0"),
        (lambda b: b.arrive(2, may_complete=False), "noComplete of 2 would end the phase"),
        (lambda b: b.expect(LIMIT + 1), "pass the limit of 1048575"),
        (lambda b: (b.complete(16), b.arrive(2)), "16 bytes more than expected"),
        (lambda b: Barrier(0, 0), "a count of 0"),
    ],
)
def test_misuse(misuse, text):
    with pytest.raises(BarrierError, match=text):
        misuse(Barrier(0, 2))


# A ring of 3 stages: warp 0 loads tiles of 16 rows by 32 floats, warps 1 to 4 add one to each and store them.
RING = r"""
KERNEL(160) ring(const __grid_constant__ Map from, const __grid_constant__ Map to, int tiles) {
  __shared__ __align__(1024) float stage[3][512];
  __shared__ u64 full[3], empty[3];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) { init(&full[s], 1); init(&empty[s], 128); }
    publish();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0)
      for (int i = 0; i < tiles; ++i) {
        int s = i % 3, phase = (i / 3) & 1;
        wait(&empty[s], phase ^ 1);
        expect(&full[s], BYTES);
        load2(stage[s], &from, 0, 16 * i, &full[s]);
      }
  } else {
    int t = threadIdx.x - 32;
    for (int i = 0; i < tiles; ++i) {
      int s = i % 3, phase = (i / 3) & 1;
      wait(&full[s], phase);
      for (int k = t; k < 512; k += 128) stage[s][k] += 1.0f;
      FENCE;
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (t == 0) { store2(&to, 0, 16 * i, stage[s]); commit(); wait_read(); }
      asm volatile("bar.sync 1, 128;" ::: "memory");
      ARRIVE;
    }
    if (t == 0) wait_stores();
  }
}
"""


def ring(device, bytes_expected="2048", fence="fence_async()", arrive="arrive(&empty[s])", source=RING):
    source = source.replace("BYTES", bytes_expected).replace("FENCE", fence).replace("ARRIVE", arrive)
    x = np.random.default_rng(0).standard_normal((16 * 7 - 5, 32)).astype(np.float32)
    a, b = device.array("from", x), device.array("to", np.zeros_like(x))
    device.run(source, "ring", 1, 160, device.map(x, a, (32, 16)), device.map(x, b, (32, 16)), 7)
    return x, device.get("to")


@pytest.mark.parametrize("order", ["lazy", "eager", 1, 2])
def test_producer_and_consumer_ring(order):
    x, got = ring(Device(order=order))
    assert np.array_equal(got, x + 1)


def test_too_many_bytes_expected_is_a_deadlock_that_says_so():
    found = fault(lambda: ring(Device(), bytes_expected="2064"), "deadlock", "16 bytes still expected")
    assert "mbarrier" in str(found)


def test_too_few_bytes_expected():
    fault(lambda: ring(Device(), bytes_expected="2032"), "barrier-bytes", "more than expected")


def test_store_without_a_proxy_fence():
    found = fault(lambda: ring(Device(), fence=""), "missing-fence", "fence.proxy.async")
    assert found.place.line > 0 and found.place.source


@pytest.mark.parametrize("order", ["lazy", "eager"])
def test_stage_refilled_before_its_store_was_waited_for(order):
    source = RING.replace("commit(); wait_read(); }", "commit(); }")
    fault(lambda: ring(Device(order=order), source=source), "missing-wait", "may still read")


def test_missing_arrivals_are_a_deadlock():
    fault(lambda: ring(Device(), arrive="if (t < 127) arrive(&empty[s])"), "deadlock", "1 of 128 arrivals pending")


def test_a_copy_that_nobody_expected():
    """The phase ends with the first of two copies, and the consumers go on before the second has landed."""
    once = "load2(stage[s], &from, 0, 16 * i, &full[s]);"
    found = fault(lambda: ring(Device(), source=RING.replace(once, once + once)), "barrier-bytes", "phase 0 ended")
    assert "fewer than the copies move" in str(found)


def test_an_arrival_more_than_the_phase_expects():
    source = RING.replace("&full[s]);\n      }", "&full[s]);\n        if (i == 2) arrive(&full[s]);\n      }")
    assert source != RING
    fault(lambda: ring(Device(), source=source), "barrier-arrivals", "more arrivals than the phase expects")


TOKENS = r"""
KERNEL(64) tokens(u32* out) {
  __shared__ u64 b;
  if (threadIdx.x == 0) init(&b, 65);
  __syncthreads();
  u64 state, early;
  asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 1;" : "=l"(early) : "r"(at(&b)) : "memory");
  __syncthreads();
  u32 pending, before, after;
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(early));
  asm volatile("{.reg .pred p;\nmbarrier.test_wait.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
    : "=r"(before) : "r"(at(&b)), "l"(early) : "memory");
  __syncthreads();
  if (threadIdx.x == 7) asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(&b)) : "memory");
  do {
    asm volatile("{.reg .pred p;\nmbarrier.test_wait.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
      : "=r"(after) : "r"(at(&b)), "l"(early) : "memory");
  } while (!after);
  arrive(&b);
  wait(&b, 1);
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(&b)) : "memory");
  out[threadIdx.x] = pending | before << 16 | after << 24;
}
"""


def test_tokens_noComplete_and_drop():
    device = Device()
    device.array("out", np.zeros(64, np.uint32))
    device.run(TOKENS, "tokens", 1, 64, "out")
    out = device.get("out")
    assert sorted((out & 0xFFFF).tolist()) == list(range(2, 66))
    assert (out >> 16 == 0x100).all()


MISUSES = r"""
KERNEL(32) misuse(u32* out, int which) {
  __shared__ __align__(16) u64 b[4];
  if (threadIdx.x == 0) {
    if (which != 0) init(&b[0], 1);
    if (which == 0) arrive(&b[0]);
    if (which == 1) arrive((u64*)((u8*)b + 4));
    if (which == 2) init(&b[0], 1);
    if (which == 3) { *(volatile u64*)&b[0] = 5; arrive(&b[0]); }
    if (which == 4) arrive(&b[1]);
    if (which == 5) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(b)), "r"(1 << 20) : "memory");
    if (which == 6) init(&b[1], 0);
    if (which == 7) { asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(b)) : "memory"); wait(&b[0], 0); }
    if (which == 8) { asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%0], 8;" :: "r"(at(b)) : "memory"); arrive(b); }
    if (which == 9) { asm volatile("mbarrier.arrive.noComplete.shared.b64 _, [%0], 1;" :: "r"(at(b)) : "memory"); }
    if (which == 10) { wait(&b[0], 0); }
  }
  out[threadIdx.x] = which;
}
"""


@pytest.mark.parametrize(
    "which, kind, text",
    [
        (0, "barrier-uninitialized", "no mbarrier was initialised"),
        (1, "misaligned", "multiple of 8"),
        (2, "barrier-reinitialized", "mbarrier.inval comes before"),
        (3, "barrier-overwritten", "were overwritten"),
        (4, "barrier-uninitialized", "initialised there: 0x400"),
        (5, "barrier-bytes", "limit of 1048575"),
        (6, "barrier-arrivals", "count of 0"),
        (7, "barrier-uninitialized", "initialised there: none"),
        (8, "barrier-bytes", "8 bytes more than expected"),
        (9, "barrier-arrivals", "noComplete"),
        (10, "deadlock", "1 of 1 arrivals pending"),
    ],
)
def test_misuses_in_kernels(which, kind, text):
    device = Device()
    device.array("out", np.zeros(32, np.uint32))
    fault(lambda: device.run(MISUSES, "misuse", 1, 32, "out", which), kind, text)
