"""Bulk and tensor copies in kernels that NVRTC compiled, against NumPy; the swizzles by the facts file's table."""
# ruff: noqa: E501 (one PTX instruction a line)

import numpy as np
import pytest

from emulator.asynchronous import Device, fault
from palladion.emulator.tensor_map import TensorMapError

COPIES = r"""
KERNEL(128) load_dump(const __grid_constant__ Map m, u8* out, int c0, int c1, int bytes, int at_byte) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 full;
  u8* tile = shared + at_byte;
  if (threadIdx.x == 0) { init(&full, 1); publish(); }
  __syncthreads();
  if (threadIdx.x == 0) { expect(&full, bytes); load2(tile, &m, c0, c1, &full); }
  wait(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = tile[i];
}
KERNEL(128) store_dump(const __grid_constant__ Map m, const u8* in, int c0, int c1, int bytes) {
  extern __shared__ __align__(1024) u8 tile[];
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = in[i];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) { store2(&m, c0, c1, tile); commit(); wait_stores(); }
}
KERNEL(32) copy_tiles(const __grid_constant__ Map from, const __grid_constant__ Map to, int bytes, int w, int h) {
  extern __shared__ __align__(1024) u8 tile[];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    init(&full, 1); publish();
    expect(&full, bytes); load2(tile, &from, blockIdx.x * w, blockIdx.y * h, &full);
    wait(&full, 0);
    store2(&to, blockIdx.x * w, blockIdx.y * h, tile); commit(); wait_stores();
  }
}
"""

# Chunk stored at each position of a 128-byte line (facts file 3.2).
LINES = {
    0: ["01234567"],
    1: ["01234567", "10325476"],
    2: ["01234567", "10325476", "23016745", "32107654"],
    3: "01234567 10325476 23016745 32107654 45670123 54761032 67452301 76543210".split(),
}


def stored(dense: np.ndarray, mode: int) -> np.ndarray:
    """The bytes of a dense tile as a swizzle leaves them in shared memory (tile at a multiple of 1024)."""
    out = np.zeros_like(dense)
    for line in range(-(-len(dense) // 128)):
        for position, chunk in enumerate(LINES[mode][line % len(LINES[mode])]):
            source = line * 128 + 16 * int(chunk)
            out[line * 128 + 16 * position :][:16] = dense[source : source + 16]
    return out


def box_of(x: np.ndarray, row: int, column: int, rows: int, columns: int) -> np.ndarray:
    """A box of an array, zeros outside."""
    out = np.zeros((rows, columns), x.dtype)
    for i in range(rows):
        for j in range(columns):
            if 0 <= row + i < x.shape[0] and 0 <= column + j < x.shape[1]:
                out[i, j] = x[row + i, column + j]
    return out


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("corner", [(0, 0), (-3, -8), (27, 40)])
def test_load_of_ragged_tiles_in_every_swizzle(dtype, mode, corner):
    rng = np.random.default_rng(1)
    x = rng.integers(1, 100, (40, 112)).astype(dtype)
    columns = {0: 128, 1: 32, 2: 64, 3: 128}[mode] // x.itemsize
    device = Device()
    m = device.map(x, device.array("x", x), (columns, 24), mode)
    n = 24 * columns * x.itemsize
    device.array("out", np.zeros(n, np.uint8))
    row, column = corner
    device.run(COPIES, "load_dump", 1, 128, m, "out", column, row, n, 0, smem=4096)
    dense = box_of(x, row, column, 24, columns).reshape(-1).view(np.uint8)
    assert np.array_equal(device.get("out"), stored(dense, mode))


def test_swizzle_is_of_the_address_not_of_the_offset():
    x = np.arange(16 * 128, dtype=np.uint32).astype(np.uint8).reshape(16, 128)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 8), 3)
    device.array("out", np.zeros(1024, np.uint8))
    device.run(COPIES, "load_dump", 1, 128, m, "out", 0, 0, 1024, 3 * 128, smem=4096)
    whole = np.zeros(2048, np.uint8)
    whole[3 * 128 :][:1024] = x[:8].reshape(-1)
    assert np.array_equal(device.get("out"), stored(whole, 3)[3 * 128 :][:1024])


@pytest.mark.parametrize("order", ["lazy", "eager", 5])
def test_fill_and_element_strides(order):
    x = np.arange(20 * 24, dtype=np.float32).reshape(20, 24)
    device = Device(order=order)
    m = device.map(x, device.array("x", x), (8, 7), steps=(1, 3), fill=1)
    device.array("out", np.zeros((3, 8), np.float32))
    device.run(COPIES, "load_dump", 1, 128, m, "out", 20, 14, 96, 0, smem=1024)
    got = device.get("out")
    assert np.array_equal(got[:2, :4], x[[14, 17], 20:24])
    assert np.isnan(got[:, 4:]).all() and np.isnan(got[2]).all()


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_store_leaves_out_what_is_outside(mode):
    columns = {0: 64, 1: 16, 2: 32, 3: 64}[mode]
    rng = np.random.default_rng(2)
    x = rng.integers(1, 1000, (20, 72)).astype(np.float16)
    dense = rng.integers(1, 1000, (16, columns)).astype(np.float16)
    device = Device()
    m = device.map(x, device.array("x", x), (columns, 16), mode)
    device.array("in", stored(dense.reshape(-1).view(np.uint8), mode))
    device.run(COPIES, "store_dump", 1, 128, m, "in", 48, 9, dense.nbytes, smem=4096)
    want = x.copy()
    height, width = 11, min(columns, 24)
    want[9:, 48 : 48 + width] = dense[:height, :width]
    assert np.array_equal(device.get("x"), want)


@pytest.mark.parametrize("mode, dtype", [(0, "float32"), (1, "uint8"), (2, "float16"), (3, "float32"), (3, "bfloat16")])
def test_tiled_copy_of_a_ragged_array(mode, dtype):
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x = np.random.default_rng(3).integers(0, 100, (37, 160)).astype(dtype)
    x = np.ascontiguousarray(x)
    columns, rows = {0: 32, 1: 32, 2: 64, 3: 128}[mode] // x.itemsize, 16
    device = Device()
    a, b = device.array("x", x), device.array("y", np.zeros_like(x))
    maps = [device.map(x, p, (columns, rows), mode, dims=(x.shape[1] - 3, x.shape[0])) for p in (a, b)]
    grid = (-(-x.shape[1] // columns), -(-x.shape[0] // rows))
    device.run(COPIES, "copy_tiles", grid, 32, *maps, rows * columns * x.itemsize, columns, rows, smem=4096)
    want = x.copy()
    want[:, -3:] = 0
    assert np.array_equal(device.get("y").view(np.uint8), want.view(np.uint8))


RANKS = r"""
KERNEL(32) swap5(const __grid_constant__ Map from, const __grid_constant__ Map to, int a, int b, int c, int d, int e) {
  __shared__ __align__(128) u8 tile[1024];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    init(&full, 1); publish(); expect(&full, 512);
    asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5,%6}], [%7];"
      :: "r"(at(tile)), "l"(&from), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(at(&full)) : "memory");
    wait(&full, 0);
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1,%2,%3}], [%4];"
      :: "l"(&to), "r"(0), "r"(0), "r"(0), "r"(at(tile)) : "memory");
    commit(); wait_stores();
  }
}
KERNEL(32) line(const __grid_constant__ Map from, float* out, u64 policy) {
  __shared__ __align__(128) float tile[64];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    init(&full, 1); publish(); expect(&full, 256);
    asm volatile("prefetch.tensormap [%0];" :: "l"(&from) : "memory");
    asm volatile("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];" :: "l"(&from), "r"(40) : "memory");
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2}], [%3], %4;"
      :: "r"(at(tile)), "l"(&from), "r"(40), "r"(at(&full)), "l"(policy) : "memory");
  }
  __syncwarp();
  wait(&full, 0);
  out[threadIdx.x] = tile[threadIdx.x]; out[threadIdx.x + 32] = tile[threadIdx.x + 32];
}
"""


def test_five_dimensions_and_one():
    x = np.random.default_rng(4).standard_normal((3, 4, 3, 5, 8)).astype(np.float32)
    device = Device()
    y = np.zeros((4, 4, 8), np.float32)
    maps = [
        device.map(x, device.array("x", x), (8, 2, 2, 2, 2)),
        device.map(y, device.array("y", y), (8, 4, 4)),
    ]
    device.run(RANKS, "swap5", 1, 32, *maps, 0, 4, 1, 2, 1)
    want = np.zeros((2, 2, 2, 2, 8), np.float32)
    want[:, :, :, :1] = x[1:3, 2:4, 1:3, 4:5]
    assert np.array_equal(device.get("y"), want.reshape(4, 4, 8))
    line = np.arange(100, dtype=np.float32)
    m = device.map(line, device.array("line", line), (64,))
    device.array("out", np.zeros(64, np.float32))
    device.run(RANKS, "line", 1, 32, m, "out", np.uint64(0x12F0000000000000))
    assert np.array_equal(device.get("out"), np.concatenate([line[40:], np.zeros(4, np.float32)]))


REDUCE = r"""
KERNEL(32) reduce(const __grid_constant__ Map m, const u8* in) {
  __shared__ __align__(128) u8 tile[1024];
  for (int i = threadIdx.x; i < 1024; i += 32) tile[i] = in[i];
  fence_async();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.OP.bulk_group [%0, {%1, %2}], [%3];"
      :: "l"(&m), "r"(0), "r"(4), "r"(at(tile)) : "memory");
    commit(); wait_stores();
  }
}
"""


@pytest.mark.parametrize(
    "name, dtype, function",
    [
        ("add", "float32", np.add),
        ("add", "float16", np.add),
        ("min", "int32", np.minimum),
        ("max", "uint64", np.maximum),
    ]
    + [("xor", "uint32", np.bitwise_xor)],
)
def test_reducing_store(name, dtype, function):
    rng = np.random.default_rng(5)
    size = np.dtype(dtype).itemsize
    x = rng.integers(0, 1000, (9, 128 // size)).astype(dtype)
    tile = rng.integers(0, 1000, (8, 128 // size)).astype(dtype)
    if np.dtype(dtype).kind == "i":
        x, tile = x - 500, tile - 500
    device = Device()
    m = device.map(x, device.array("x", x), (128 // size, 8))
    device.array("in", tile.reshape(-1).view(np.uint8))
    device.run(REDUCE.replace("OP", name), "reduce", 2, 32, m, "in")
    want = x.copy()
    for _ in range(2):
        want[4:] = function(want[4:], tile[:5])
    assert np.array_equal(device.get("x"), want)


LINEAR = r"""
KERNEL(64) linear(const u8* in, u8* out, float* sums, int bytes) {
  extern __shared__ __align__(128) u8 buffer[];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    init(&full, 1); publish(); expect(&full, bytes);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(__cvta_generic_to_global(in)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(at(buffer)), "l"(__cvta_generic_to_global(in)), "r"(bytes), "r"(at(&full)) : "memory");
  }
  __syncthreads();
  wait(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += 64) buffer[i] += 1;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
      :: "l"(__cvta_generic_to_global(out)), "r"(at(buffer)), "r"(bytes) : "memory");
    commit();
    wait_read();
  }
  __syncthreads();
  float* f = (float*)buffer;
  f[threadIdx.x] = (float)threadIdx.x;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
      :: "l"(__cvta_generic_to_global(sums)), "r"(at(buffer)), "r"(256) : "memory");
    commit(); wait_stores();
  }
}
"""


@pytest.mark.parametrize("order", ["lazy", "eager", 3])
def test_linear_copies(order):
    x = np.random.default_rng(6).integers(0, 256, 1040).astype(np.uint8)
    device = Device(order=order)
    device.array("x", x)
    device.array("y", np.zeros_like(x))
    device.array("sums", np.ones(64, np.float32))
    device.run(LINEAR, "linear", 3, 64, "x", "y", "sums", 1040, smem=1040)
    assert np.array_equal(device.get("y"), x + np.uint8(1))
    assert np.array_equal(device.get("sums"), 1 + 3 * np.arange(64, dtype=np.float32))


PIPELINE = r"""
KERNEL(64) pipeline(const float* in, float* out, int steps, int total) {
  __shared__ __align__(16) float buffer[4][256];
  auto fetch = [&](int i) {
    int first = i * 256 + threadIdx.x * 4, left = (total - first) * 4;
    int bytes = left < 0 ? 0 : left > 16 ? 16 : left;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at(&buffer[i & 3][threadIdx.x * 4])),
      "l"(__cvta_generic_to_global(bytes ? in + first : in)), "r"(bytes) : "memory");
  };
  for (int i = 0; i < 3; ++i) { if (i < steps) fetch(i); asm volatile("cp.async.commit_group;" ::: "memory"); }
  float sum = 0;
  for (int i = 0; i < steps; ++i) {
    asm volatile("cp.async.wait_group WAIT;" ::: "memory");
    __syncthreads();
    for (int k = 0; k < 4; ++k) sum += buffer[i & 3][threadIdx.x + 64 * k];
    if (i + 3 < steps) fetch(i + 3);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  out[threadIdx.x] = sum;
}
KERNEL(64) arriving(const float* in, float* out) {
  __shared__ __align__(16) float buffer[128];
  __shared__ u64 b;
  if (threadIdx.x == 0) init(&b, 64);
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&buffer[threadIdx.x])), "l"(__cvta_generic_to_global(in + threadIdx.x)) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&buffer[64 + threadIdx.x])), "l"(__cvta_generic_to_global(in + 64 + threadIdx.x)) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at(&b)) : "memory");
  wait(&b, 0);
  out[threadIdx.x] = buffer[63 - threadIdx.x] + buffer[127 - threadIdx.x];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&buffer[threadIdx.x])), "l"(__cvta_generic_to_global(in + 64 + threadIdx.x)) : "memory");
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" :: "r"(at(&b)) : "memory");
  arrive(&b);
  wait(&b, 1);
  out[64 + threadIdx.x] = buffer[63 - threadIdx.x];
}
"""


def run_pipeline(device, left_in_flight):
    x = np.random.default_rng(7).integers(0, 100, 256 * 5 - 37).astype(np.float32)
    device.array("x", x)
    device.array("out", np.zeros(64, np.float32))
    device.run(PIPELINE.replace("WAIT", str(left_in_flight)), "pipeline", 1, 64, "x", "out", 5, len(x))
    padded = np.concatenate([x, np.zeros(37, np.float32)])
    return device.get("out"), padded.reshape(-1, 64).sum(0)


@pytest.mark.parametrize("order", ["lazy", "eager", 3])
def test_cp_async_pipeline(order):
    got, want = run_pipeline(Device(order=order), 2)
    assert np.array_equal(got, want)


def test_cp_async_waiting_for_too_few_groups_shows_in_the_values():
    got, want = run_pipeline(Device(), 3)
    assert not np.array_equal(got, want)


def test_cp_async_arrives_on_an_mbarrier():
    x = np.arange(128, dtype=np.float32)
    device = Device()
    device.array("x", x)
    device.array("out", np.zeros(128, np.float32))
    device.run(PIPELINE, "arriving", 1, 64, "x", "out")
    assert np.array_equal(device.get("out"), np.concatenate([x[63::-1] + x[:63:-1], x[:63:-1]]))


# ------------------------------------------------------------------------------------------------ misuses


def load(device, m, c0=0, c1=0, n=1024, at_byte=0):
    device.array("out", np.zeros(n, np.uint8))
    device.run(COPIES, "load_dump", 1, 128, m, "out", c0, c1, n, at_byte, smem=4096)


def test_destination_must_be_a_multiple_of_128():
    x = np.zeros((16, 128), np.uint8)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 8))
    fault(lambda: load(device, m, at_byte=64), "misaligned", "not a multiple of 128 bytes")


def test_box_must_fit_shared_memory():
    x = np.zeros((64, 128), np.uint8)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 64))
    fault(lambda: load(device, m, n=8192), "out-of-bounds", "pass the end of the CTA's shared memory")


def test_rank_of_the_map():
    x = np.zeros((4, 4, 128), np.uint8)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 4, 2))
    fault(lambda: load(device, m), "illegal-shape", "2 coordinates|2-d copy with a tensor map of rank 3".split("|")[1])


def test_not_a_tensor_map():
    fault(lambda: load(Device(), b"\x07" * 128), "illegal-shape", "are not a tensor map")


def test_wrong_box_is_a_wrong_number_of_bytes():
    x = np.zeros((16, 128), np.uint8)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 4))
    fault(lambda: load(device, m), "deadlock", "512 bytes still expected")


def test_store_at_a_negative_coordinate():
    x = np.zeros((16, 128), np.uint8)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 8))
    device.array("in", np.zeros(1024, np.uint8))
    call = lambda: device.run(COPIES, "store_dump", 1, 128, m, "in", 0, -1, 1024, smem=4096)
    fault(call, "out-of-bounds", "must not be negative")


@pytest.mark.parametrize("order", ["lazy", "eager"])
def test_store_without_a_fence(order):
    x = np.zeros((16, 128), np.uint8)
    device = Device(order=order)
    m = device.map(x, device.array("x", x), (128, 8))
    device.array("in", np.zeros(1024, np.uint8))
    source = COPIES.replace("  fence_async();\n", "")
    call = lambda: device.run(source, "store_dump", 1, 128, m, "in", 0, 0, 1024, smem=4096)
    fault(call, "missing-fence", "fence.proxy.async has followed")


def test_exit_before_the_store_has_read():
    x = np.zeros((16, 128), np.uint8)
    device = Device()
    m = device.map(x, device.array("x", x), (128, 8))
    device.array("in", np.zeros(1024, np.uint8))
    source = COPIES.replace("commit(); wait_stores();", "commit();")
    call = lambda: device.run(source, "store_dump", 1, 128, m, "in", 0, 0, 1024, smem=4096)
    fault(call, "missing-wait", "may still read its shared memory")


@pytest.mark.parametrize("order", ["lazy", "eager"])
def test_source_overwritten_before_the_store_was_waited_for(order):
    device = Device(order=order)
    for name in "xy":
        device.array(name, np.zeros(1024, np.uint8))
    device.array("sums", np.zeros(64, np.float32))
    source = LINEAR.replace("    wait_read();\n", "")
    call = lambda: device.run(source, "linear", 1, 64, "x", "y", "sums", 1024, smem=1024)
    fault(call, "missing-wait", "an ordinary store writes shared byte")


def test_size_of_a_linear_copy():
    device = Device()
    for name in "xy":
        device.array(name, np.zeros(1024, np.uint8))
    device.array("sums", np.zeros(64, np.float32))
    call = lambda: device.run(LINEAR, "linear", 1, 64, "x", "y", "sums", 1000, smem=1024)
    fault(call, "misaligned", "size 0x3e8 is not a multiple of 16")


def test_the_driver_refuses_a_bad_map():
    x = np.zeros((16, 100), np.uint8)
    with pytest.raises(TensorMapError, match="multiple of 16 and below"):
        Device().map(x, 1 << 41, (32, 8))
