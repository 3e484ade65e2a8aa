"""Rarer forms of copies: gather and scatter, maps made on the device, masked and ragged bulk copies, pairs of CTAs."""

# ruff: noqa: E501 (one PTX instruction a line)

import numpy as np
import pytest

from emulator.asynchronous import Device, fault
from palladion.emulator.proxies import UnfencedWrites

GATHER = r"""
KERNEL(32) rows(const __grid_constant__ Map from, const __grid_constant__ Map to, int c, int a, int b, int d, int e) {
  __shared__ __align__(128) u8 tile[512];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    init(&full, 1); publish(); expect(&full, 512);
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5,%6}], [%7];"
      :: "r"(at(tile)), "l"(&from), "r"(c), "r"(a), "r"(b), "r"(d), "r"(e), "r"(at(&full)) : "memory");
    wait(&full, 0);
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%0, {%1,%2,%3,%4,%5}], [%6];"
      :: "l"(&to), "r"(0), "r"(3), "r"(0), "r"(5), "r"(1), "r"(at(tile)) : "memory");
    commit(); wait_stores();
  }
}
"""


def test_gather_and_scatter_of_four_rows():
    x = np.random.default_rng(3).standard_normal((20, 64)).astype(np.float32)
    y = np.zeros((6, 32), np.float32)
    device = Device("sm_100a")
    maps = [device.map(v, device.array(n, v), (32, 1), 3) for n, v in (("x", x), ("y", y))]
    device.run(GATHER, "rows", 1, 32, *maps, 16, 7, 19, 7, 25)
    want = y.copy()
    want[3], want[0], want[5] = x[7, 16:48], x[19, 16:48], x[7, 16:48]
    assert np.array_equal(device.get("y"), want)


MADE = r"""
KERNEL(32) made(u8* map, const float* in, float* out, int columns, int rows) {
  __shared__ __align__(128) u64 blob[16];
  __shared__ __align__(128) float tile[256];
  __shared__ u64 full;
  if (threadIdx.x < 16) blob[threadIdx.x] = 0;
  __syncwarp();
  if (threadIdx.x == 0) {
    u32 b = at(blob);
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" :: "r"(b), "l"(in) : "memory");
    asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 1;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 0, 32;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 1, 8;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" :: "r"(b), "r"(columns) : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" :: "r"(b), "r"(rows) : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" :: "r"(b), "l"((u64)columns * 4) : "memory");
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 0, 1;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 1, 1;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 7;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 0;" :: "r"(b) : "memory");
    asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" :: "r"(b) : "memory");
  }
  __syncwarp();
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
    :: "l"(__cvta_generic_to_global(map)), "r"(at(blob)) : "memory");
  ACQUIRE;
  if (threadIdx.x == 0) { init(&full, 1); publish(); expect(&full, 1024); load2(tile, (const Map*)map, 4, 2, &full); }
  __syncwarp();
  wait(&full, 0);
  for (int i = threadIdx.x; i < 256; i += 32) out[i] = tile[i];
}
"""


def made(acquire):
    x = np.random.default_rng(4).standard_normal((7, 40)).astype(np.float32)
    device = Device()
    device.array("map", np.zeros(256, np.uint8))
    device.array("x", x)
    device.array("out", np.zeros((8, 32), np.float32))
    device.run(MADE.replace("ACQUIRE", acquire), "made", 1, 32, "map", "x", "out", 40, 7)
    return x, device.get("out")


def test_tensor_map_made_on_the_device():
    acquire = 'asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory")'
    x, out = made(acquire)
    want = np.zeros((8, 32), np.float32)
    want[:5] = x[2:, 4:36]
    assert np.array_equal(out, want)
    fault(lambda: made(""), "missing-fence", "fence.proxy.tensormap::generic.acquire")


REST = r"""
KERNEL(64) rest(const u8* in, u8* masked, u8* ragged, u32* sums, u32* reduced) {
  __shared__ __align__(128) u8 buffer[256];
  __shared__ __align__(128) u32 counts[16];
  __shared__ u64 full, done;
  u32 peer = rank() ^ 1, t = threadIdx.x;
  asm volatile("st.bulk.weak.shared::cta [%0], 256, 0;" :: "r"(at(buffer)) : "memory");
  if (t < 16) counts[t] = t;
  if (t == 0) { init(&full, 1); init(&done, 1); publish(); expect(&full, 64); expect(&done, 64); }
  fence_async();
  cluster_sync();
  if (t == 0)  // 64 bytes, of which 3 at the left and 5 at the right lie outside the array
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.ignore_oob [%0], [%1], 64, 3, 5, [%2];"
      :: "r"(at(buffer)), "l"(__cvta_generic_to_global(in)), "r"(at(&full)) : "memory");
  wait(&full, 0);
  ragged[blockIdx.x * 64 + t] = buffer[t];
  buffer[t] = t + 1;
  fence_async();
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%0], [%1], 64, %2;"
      :: "l"(__cvta_generic_to_global(masked + blockIdx.x * 64)), "r"(at(buffer)), "h"((u16)0x8003) : "memory");
    commit(); wait_stores();
    asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%0], [%1], 64, [%2];"
      :: "r"(mapa(at(counts), peer)), "r"(at(buffer)), "r"(mapa(at(&done), peer)) : "memory");
    asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" :: "l"(sums), "r"(7) : "memory");
  }
  wait(&done, 0);
  if (t < 16) reduced[blockIdx.x * 16 + t] = counts[t];
  cluster_sync();
}
KERNEL(32) pairs(const __grid_constant__ Map m, u8* out) {
  __shared__ __align__(128) u8 tile[1024];
  __shared__ u64 full;
  if (threadIdx.x == 0) { init(&full, 1); publish(); expect(&full, rank() & 1 ? 0 : 2048); }
  cluster_sync();
  if (threadIdx.x == 0 && rank() == 0)
    asm volatile("cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {0, 8}], [%2], %3;"
      :: "r"(at(tile)), "l"(&m), "r"(at(&full) & 0xFEFFFFFF), "h"((u16)15) : "memory");
  if (!(rank() & 1)) wait(&full, 0);
  cluster_sync();
  for (int i = threadIdx.x; i < 1024; i += 32) out[rank() * 1024 + i] = tile[i];
}
"""


@pytest.mark.parametrize("order", ["lazy", "eager"])
def test_rarer_forms(order):
    x = np.random.default_rng(5).integers(1, 255, 64).astype(np.uint8)
    device = Device("sm_100a", order=order)
    device.array("in", x)
    device.array("masked", np.zeros((2, 4, 16), np.uint8))
    device.array("ragged", np.zeros((2, 64), np.uint8))
    device.array("sums", np.zeros(1, np.uint32))
    device.array("reduced", np.zeros((2, 16), np.uint32))
    device.run(REST, "rest", 2, 64, "in", "masked", "ragged", "sums", "reduced", cluster=(2, 1, 1))
    ragged = np.concatenate([np.zeros(3, np.uint8), x[3:59], np.zeros(5, np.uint8)])
    assert np.array_equal(device.get("ragged"), [ragged, ragged])
    values = np.arange(1, 65, dtype=np.uint8).reshape(4, 16)
    want = np.zeros((4, 16), np.uint8)
    want[:, [0, 1, 15]] = values[:, [0, 1, 15]]
    assert np.array_equal(device.get("masked"), [want, want])
    assert device.get("sums")[0] == 14
    total = np.arange(16, dtype=np.uint32) + values.reshape(-1).view(np.uint32)
    assert np.array_equal(device.get("reduced"), [total, total])


@pytest.mark.parametrize("order", ["lazy", "eager", 6])
def test_pairs_of_ctas_signal_the_even_one(order):
    x = np.random.default_rng(6).integers(0, 255, (16, 128)).astype(np.uint8)
    device = Device("sm_100a", order=order)
    m = device.map(x, device.array("x", x), (128, 8))
    device.array("out", np.zeros((4, 8, 128), np.uint8))
    device.run(REST, "pairs", 4, 32, m, "out", cluster=(4, 1, 1))
    assert np.array_equal(device.get("out"), np.broadcast_to(x[8:], (4, 8, 128)))


def test_unfenced_words():
    """A store is settled by its writer's fence, or by anybody's after a barrier; not by another thread's alone."""
    account, a = UnfencedWrites(4096), np.arange(1024, 1152, 4)
    account.wrote(a, 4, np.arange(32))
    assert account.unfenced(a) == (1024, 0)
    account.fenced(np.arange(16))
    assert account.unfenced(a) == (1024 + 64, 16)
    account.fenced(np.array([100]))
    assert account.unfenced(a) == (1024 + 64, 16)
    account.passed_on(np.arange(16, 24))
    account.fenced(np.array([100]))
    assert account.unfenced(a) == (1024 + 96, 24)
    account.overwritten(np.arange(1024, 1152))
    assert account.unfenced(a) is None
    account.wrote(np.array([2048]), 16, np.array([3]))
    assert account.unfenced(np.array([2060])) == (2060, 3)
    assert account.unfenced(np.array([2064])) is None
