"""Clusters, distributed shared memory, launch control and register pools in kernels that NVRTC compiled."""
# ruff: noqa: E501 (one PTX instruction a line)

import numpy as np
import pytest

from emulator.asynchronous import Device, fault

MULTICAST = r"""
KERNEL(64) multicast(const __grid_constant__ Map m, u8* out, int bytes, u32 mask) {
  extern __shared__ __align__(1024) u8 tile[];
  __shared__ u64 full;
  u32 mine = mask >> rank() & 1;
  if (threadIdx.x == 0) { init(&full, 1); PUBLISH; expect(&full, mine ? bytes : 0); }
  cluster_sync();
  if (threadIdx.x == 0 && rank() == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      :: "r"(at(tile)), "l"(&m), "r"(0), "r"(8 * (int)(blockIdx.x / size())), "r"(at(&full)), "h"((u16)mask) : "memory");
  wait(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[blockIdx.x * bytes + i] = mine ? tile[i] : 255;
  LAST;
}
"""


def multicast(device, cluster, mask, publish="publish()", last="cluster_sync()"):
    x = np.random.default_rng(0).integers(0, 255, (16, 128)).astype(np.uint8)
    m = device.map(x, device.array("x", x), (128, 8))
    device.array("out", np.zeros((2, cluster, 1024), np.uint8))
    source = MULTICAST.replace("PUBLISH", publish).replace("LAST", last)
    device.run(source, "multicast", 2 * cluster, 64, m, "out", 1024, mask, cluster=(cluster, 1, 1), smem=1024)
    return x.reshape(2, 1, 1024), device.get("out")


@pytest.mark.parametrize("order", ["lazy", "eager", 1])
@pytest.mark.parametrize("cluster, mask", [(2, 3), (4, 15), (4, 10)])
def test_multicast(order, cluster, mask):
    x, out = multicast(Device(order=order), cluster, mask)
    chosen = np.array([mask >> r & 1 for r in range(cluster)], bool)[:, None]
    assert np.array_equal(out, np.where(chosen, x, 255))


def test_multicast_to_a_cta_that_is_not_there():
    fault(lambda: multicast(Device(), 2, 7), "out-of-bounds", "names CTAs that are not among the 2")


def test_remote_barrier_needs_its_initialisation_published():
    # The arrive of the cluster barrier releases, unless it says .relaxed.
    multicast(Device(), 2, 3, publish="")
    relaxed = MULTICAST.replace("cluster_sync();\n  if", "RELAXED;\n  if")
    assert relaxed != MULTICAST
    call = 'asm volatile("barrier.cluster.arrive.relaxed.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory")'
    device = Device()
    x = np.zeros((16, 128), np.uint8)
    m = device.map(x, device.array("x", x), (128, 8))
    device.array("out", np.zeros((2, 2, 1024), np.uint8))
    source = relaxed.replace("RELAXED", call).replace("PUBLISH", "").replace("LAST", "cluster_sync()")
    launch = lambda s: device.run(s, "multicast", 4, 64, m, "out", 1024, 3, cluster=(2, 1, 1), smem=1024)
    fault(lambda: launch(source), "missing-fence", "fence.mbarrier_init.release.cluster")


EXCHANGE = r"""
KERNEL(64) exchange(const float* in, float* out) {
  __shared__ float mine[64], got[64];
  u32 next = (rank() + 1) % size(), before = (rank() + size() - 1) % size();
  mine[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  cluster_sync();
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(mapa(at(&mine[threadIdx.x]), next)) : "memory");
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(mapa(at(&got[threadIdx.x]), before)), "f"(v * 2) : "memory");
  cluster_sync();
  out[blockIdx.x * 64 + threadIdx.x] = mine[threadIdx.x] + got[threadIdx.x];
}
KERNEL(64) generic(const u32* in, u32* out) {
  __shared__ u32 count;
  if (threadIdx.x == 0) count = 0;
  cluster_sync();
  u64 there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&count), "r"(0));
  u32 owner;
  asm volatile("getctarank.u64 %0, %1;" : "=r"(owner) : "l"(there));
  atomicAdd((u32*)there, in[threadIdx.x] + owner);
  u32 mine;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(mine) : "r"(at(&count)));
  cluster_sync();
  out[blockIdx.x * 64 + threadIdx.x] = rank() == 0 ? count : mine;
}
KERNEL(32) places(u32* out) {
  u32 x, y, a, b, c, d;
  asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x));
  asm volatile("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(y));
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(a));
  asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(b));
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(c));
  asm volatile("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(d));
  if (threadIdx.x == 0)
    out[blockIdx.y * gridDim.x + blockIdx.x] = x | y << 4 | rank() << 8 | a << 12 | b << 16 | c << 20 | d << 24 | size() << 28;
}
"""


@pytest.mark.parametrize("cluster", [2, 4])
def test_distributed_shared_memory(cluster):
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    device = Device()
    device.array("x", x)
    device.array("out", np.zeros_like(x))
    device.run(EXCHANGE, "exchange", 8, 64, "x", "out", cluster=(cluster, 1, 1))
    groups = x.reshape(-1, cluster, 64)
    # CTA r reads r + 1 and puts twice that into r - 1: what r gets is twice what r + 2 had.
    assert np.array_equal(device.get("out"), (groups + 2 * np.roll(groups, -2, 1)).reshape(8, 64))


def test_generic_addresses_of_another_cta():
    x = np.arange(64, dtype=np.uint32)
    device = Device()
    device.array("x", x)
    device.array("out", np.zeros((4, 64), np.uint32))
    device.run(EXCHANGE, "generic", 4, 64, "x", "out", cluster=(4, 1, 1))
    out = device.get("out")
    assert (out[0] == 4 * x.sum()).all()
    assert (out[1:] == np.arange(1, 4)[:, None]).all()


def test_places_in_a_cluster():
    device = Device()
    device.array("out", np.zeros((4, 6), np.uint32))
    device.run(EXCHANGE, "places", (6, 4), 32, "out", cluster=(3, 2, 1))
    out = device.get("out")
    for by in range(4):
        for bx in range(6):
            x, y = bx % 3, by % 2
            want = x | y << 4 | (x + 3 * y) << 8 | (bx // 3) << 12 | (by // 2) << 16 | 2 << 20 | 2 << 24 | 6 << 28
            assert out[by, bx] == want


REMOTE = r"""
KERNEL(32) remote(const float* in, float* out, u32* counts) {
  __shared__ __align__(16) float got[128];
  __shared__ u32 count[2];
  __shared__ u64 full, free_;
  u32 peer = rank() ^ 1;
  if (threadIdx.x < 2) count[threadIdx.x] = 0;
  if (threadIdx.x == 0) { init(&full, 1); init(&free_, 32); publish(); expect(&full, 512 + 32 * 4); }
  cluster_sync();
  const float* v = in + blockIdx.x * 128 + threadIdx.x * 4;
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
    :: "r"(mapa(at(&got[threadIdx.x * 4]), peer)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(mapa(at(&full), peer)) : "memory");
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
    :: "r"(mapa(at(&count[0]), peer)), "r"(threadIdx.x), "r"(mapa(at(&full), peer)) : "memory");
  wait(&full, 0);
  for (int k = 0; k < 4; ++k) out[blockIdx.x * 128 + threadIdx.x + 32 * k] = got[threadIdx.x + 32 * k];
  if (threadIdx.x == 0) counts[blockIdx.x] = count[0];
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(mapa(at(&free_), peer)) : "memory");
  wait(&free_, 0);
  cluster_sync();
}
KERNEL(32) push(const float* in, float* out) {
  __shared__ __align__(128) float mine[128];
  __shared__ __align__(128) float got[128];
  __shared__ u64 full;
  u32 peer = rank() ^ 1;
  for (int k = 0; k < 4; ++k) { mine[threadIdx.x + 32 * k] = in[blockIdx.x * 128 + threadIdx.x + 32 * k]; }
  fence_async();
  if (threadIdx.x == 0) { init(&full, 1); publish(); expect(&full, 512); }
  cluster_sync();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(mapa(at(got), peer)), "r"(at(mine)), "r"(512), "r"(mapa(at(&full), BARRIER)) : "memory");
  wait(&full, 0);
  for (int k = 0; k < 4; ++k) out[blockIdx.x * 128 + threadIdx.x + 32 * k] = got[threadIdx.x + 32 * k];
  cluster_sync();
}
"""


@pytest.mark.parametrize("order", ["lazy", "eager", 2])
@pytest.mark.parametrize("name", ["remote", "push"])
def test_asynchronous_stores_into_the_peer(order, name):
    x = np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)
    device = Device(order=order)
    device.array("x", x)
    device.array("out", np.zeros_like(x))
    device.array("counts", np.zeros(4, np.uint32))
    more = ("counts",) if name == "remote" else ()
    device.run(REMOTE.replace("BARRIER", "peer"), name, 4, 32, "x", "out", *more, cluster=(2, 1, 1))
    assert np.array_equal(device.get("out"), x[[1, 0, 3, 2]])
    if more:
        assert (device.get("counts") == 31 * 16).all()


def test_barrier_of_the_wrong_cta():
    device = Device()
    device.array("x", np.zeros((4, 128), np.float32))
    device.array("out", np.zeros((4, 128), np.float32))
    call = lambda: device.run(REMOTE.replace("BARRIER", "rank()"), "push", 4, 32, "x", "out", cluster=(2, 1, 1))
    fault(call, "barrier-remote", "both must be in one CTA")


BARRIER = r"""
KERNEL(64) barrier(int which) {
  __shared__ u64 b;
  if (threadIdx.x == 0) init(&b, 1);
  if (which == 0) asm volatile("barrier.cluster.wait;" ::: "memory");
  if (which == 1) asm volatile("barrier.cluster.arrive;\nbarrier.cluster.arrive;" ::: "memory");
  if (which == 2 && (threadIdx.x > 0 || rank() == 0)) cluster_sync();
  if (which == 3 && (threadIdx.x < 32 || rank() == 0)) {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  } else if (which == 3) __nanosleep(10);
  if (which == 3) asm volatile("bar.sync 0;" ::: "memory");
  if (which == 4) mapa(at(&b), 2);
  if (which == 5 && rank() == 1) { cluster_sync(); arrive(&b); }
  if (which == 5 && rank() == 0) cluster_sync();
  if (which == 6) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(mapa(at(&b), rank() ^ 1)) : "memory");
}
"""


@pytest.mark.parametrize(
    "which, kind, text",
    [
        (0, "collective-mismatch", "without a barrier.cluster.arrive before"),
        (1, "barrier-arrivals", "again without a barrier.cluster.wait"),
        (3, "deadlock", "32 threads of CTA 1 (first: thread 32)"),
        (4, "out-of-bounds", "rank 2 in a cluster of 2"),
        (6, "barrier-remote", "of CTA"),
    ],
)
def test_misuses_of_a_cluster(which, kind, text):
    fault(lambda: Device().run(BARRIER, "barrier", 2, 64, which, cluster=(2, 1, 1)), kind, text)


def test_exited_threads_do_not_count_at_the_cluster_barrier():
    Device().run(BARRIER.replace("threadIdx.x > 0 ||", "threadIdx.x > 31 ||"), "barrier", 2, 64, 2, cluster=(2, 1, 1))
    Device().run(BARRIER, "barrier", 2, 64, 5, cluster=(2, 1, 1))


CANCEL = r"""
KERNEL(64) steal(u32* out) {
  __shared__ __align__(16) u32 answer[4];
  __shared__ u64 full;
  if (threadIdx.x == 0) { init(&full, 1); publish(); }
  cluster_sync();
  u32 x = blockIdx.x, y = blockIdx.y, phase = 0;
  while (true) {
    if (threadIdx.x == 0) atomicAdd(&out[(y * gridDim.x + x)], 1 + (blockIdx.x + blockIdx.y > 0 ? 0 : 0));
    __syncthreads();
    if (threadIdx.x == 0) expect(&full, 16);
    cluster_sync();
    if (threadIdx.x == 0 && rank() == 0)
      asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%0], [%1];"
        :: "r"(at(answer)), "r"(at(&full)) : "memory");
    WAIT;
    phase ^= 1;
    u32 got, fx, fy;
    asm volatile("{.reg .pred p;\n.reg .b128 r;\nld.shared.b128 r, [%3];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\nselp.u32 %0, 1, 0, p;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, _, _}, r;}"
      : "=r"(got), "=r"(fx), "=r"(fy) : "r"(at(answer)) : "memory");
    fence_async();
    if (!got) break;
    x = fx + rank(); y = fy;
    cluster_sync();
  }
  cluster_sync();
}
"""


@pytest.mark.parametrize("order", ["lazy", "eager", 4])
def test_every_tile_is_done_once_with_launch_control(order):
    device = Device("sm_100a", order=order, resident=2)
    device.array("out", np.zeros((3, 10), np.uint32))
    device.run(CANCEL.replace("WAIT", "wait(&full, phase)"), "steal", (10, 3), 64, "out", cluster=(2, 1, 1))
    assert (device.get("out") == 1).all()


def test_answer_read_before_the_wait():
    device = Device("sm_100a", resident=2)
    device.array("out", np.zeros((3, 10), np.uint32))
    call = lambda: device.run(CANCEL.replace("WAIT", ""), "steal", (10, 3), 64, "out", cluster=(2, 1, 1))
    fault(call, "launch-control", "are no answer")


REGISTERS = r"""
extern "C" __global__ void __launch_bounds__(384, 1) pool(u32* out, int which) {
  if (threadIdx.x < 128) { asm volatile("setmaxnreg.dec.sync.aligned.u32 LESS;"); }
  else { asm volatile("setmaxnreg.inc.sync.aligned.u32 MORE;"); }
  out[threadIdx.x] = threadIdx.x;
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}
"""


def registers(less, more):
    device = Device()
    device.array("out", np.zeros(384, np.uint32))
    source = REGISTERS.replace("LESS", str(less)).replace("MORE", str(more))
    device.run(source, "pool", 1, 384, "out", 0)
    return device.get("out")


def test_register_pool():
    assert np.array_equal(registers(40, 232), np.arange(384))
    assert np.array_equal(registers(24, 240), np.arange(384))
    fault(lambda: registers(40, 240), "deadlock", "are free in the CTA's pool")
    fault(lambda: registers(24, 160), "register-pool", "has 168")
