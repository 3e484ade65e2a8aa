"""Faults of the emulated machine, with their place; scheduling, launches and memory of the driver."""

import numpy as np
import pytest

from emulator import samples
from emulator.running import ptx_of, run
from palladion.emulator.driver import EmulatedDriver
from palladion.emulator.faults import EmulationFault, UnknownInstruction


def fault(name, args, block=64, source=samples.FAULTS, **options):
    with pytest.raises(EmulationFault) as caught:
        run(source, name, 1, block, args, **options)
    return caught.value


def test_out_of_bounds():
    found = fault("past_the_end", [np.zeros(64, "f4"), np.int32(3)])
    assert found.kind == "out-of-bounds"
    assert "writes 4 bytes at global address" in str(found) and "thread 61 (warp 1, lane 29)" in str(found)
    assert "st.global" in str(found) and "sample.cu:2" in str(found) and "kernel past_the_end" in str(found)
    assert "4 bytes past the end of the allocation of 256 bytes" in str(found)
    found = fault("null_pointer", [np.zeros(64, "f4")])
    assert found.kind == "out-of-bounds" and "thread 3 " in str(found) and "null pointer" in str(found)
    found = fault("shared_past", [np.zeros(64, "f4"), np.int32(1)])
    assert found.kind == "out-of-bounds" and "thread 63 " in str(found) and "reads 4 bytes at shared" in str(found)


def test_freed_memory_is_not_there():
    driver = EmulatedDriver()
    function = driver.function(driver.load_module(ptx_of(samples.FAULTS)), "past_the_end")
    keep, gone = driver.alloc(256), driver.alloc(256)
    driver.free(gone)
    driver.launch(function, (1, 1, 1), (64, 1, 1), [np.uint64(keep).tobytes(), np.int32(0).tobytes()])
    assert (driver.copy_out(keep, 256).view("f4") == 1).all()
    with pytest.raises(EmulationFault, match="out-of-bounds"):
        driver.launch(function, (1, 1, 1), (64, 1, 1), [np.uint64(gone).tobytes(), np.int32(0).tobytes()])
    with pytest.raises(ValueError, match="not the address of an allocation"):
        driver.free(gone)


def test_misaligned():
    found = fault("crooked", [np.zeros(64, "i4")])
    assert found.kind == "misaligned" and "thread 9 " in str(found) and "not a multiple of 4" in str(found)


def test_deadlock_at_a_barrier():
    found = fault("half_meet", [np.zeros(64, "f4")])
    assert found.kind == "deadlock"
    assert "CTA (0, 0, 0), warp 0" in str(found) and "32 of 64 threads" in str(found) and "bar.sync" in str(found)
    assert "sample.cu:" in str(found)


def test_lanes_that_never_meet():
    found = fault("warp_split", [np.zeros(64, "i4")], block=32, limit=20_000)
    assert found.kind == "deadlock"


def test_traps_and_assertions():
    found = fault("traps", [np.arange(64, dtype="i4")])
    assert found.kind == "trap" and "thread 3 " in str(found)
    found = fault("checked", [np.int32(2)], source=samples.FUNCTIONS)
    assert found.kind == "assert" and found.message == "mine.cu:12: checked: Assertion `n > 3` failed."
    assert "thread 5 " in str(found)
    run(samples.FUNCTIONS, "checked", 1, 64, [np.int32(4)])


def test_reads_of_what_nobody_wrote_are_findings_when_asked_for():
    driver = EmulatedDriver(detect_uninitialized=True)
    function = driver.function(driver.load_module(ptx_of(samples.FAULTS)), "unwritten")
    x = driver.alloc(256)
    driver.launch(function, (1, 1, 1), (64, 1, 1), [np.uint64(x).tobytes()])
    assert [f.kind for f in driver.findings] == ["uninitialized-read"] and "thread 32 " in str(driver.findings[0])
    assert (driver.copy_out(x, 128).view("f4") == 1).all()
    found = fault("unwritten", [np.zeros(64, "f4")], detect_uninitialized=True, strict=True)
    assert found.kind == "uninitialized-read"
    run(samples.FAULTS, "unwritten", 1, 64, [np.zeros(64, "f4")])


PTX = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x, .param .u32 n) {
  .reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .pred %p;
  ld.param.u64 %rd0, [x];
  ld.param.u32 %r0, [n];
  setp.eq.u32 %p, %r0, 0;
  @%p bra DONE;
  frobnicate.sync.u32 %r1, %r0;
DONE:
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd1, %r2, 4;
  add.u64 %rd2, %rd0, %rd1;
  st.global.u32 [%rd2], %r2;
  ret;
}
"""


def test_an_unknown_instruction_matters_only_when_it_is_reached():
    (x,) = run(PTX, "k", 1, 32, [np.zeros(32, "i4"), np.int32(0)])
    np.testing.assert_array_equal(x, np.arange(32))
    with pytest.raises(UnknownInstruction, match=r"PTX line 10: frobnicate.sync.u32 %r1, %r0;"):
        run(PTX, "k", 1, 32, [np.zeros(32, "i4"), np.int32(1)])


def test_the_users_line_is_found_from_the_comments_of_the_source():
    source = samples.FAULTS.replace("\nextern", "\n// user.py:12 (kernel)\nextern", 1)
    found = fault("past_the_end", [np.zeros(64, "f4"), np.int32(3)], source=source)
    assert "user.py" not in str(found)
    with pytest.raises(EmulationFault, match=r"sample.cu:3 from user.py:12 \(kernel\)"):
        run(ptx_of(source), "past_the_end", 1, 64, [np.zeros(64, "f4"), np.int32(3)], source=source)


def test_a_launch_is_checked():
    driver = EmulatedDriver()
    module = driver.load_module(PTX.replace("n) {", "n) .reqntid 32 {"))
    with pytest.raises(ValueError, match="no kernel 'other'; it has k"):
        driver.function(module, "other")
    function = driver.function(module, "k")
    x = np.uint64(driver.alloc(128)).tobytes()
    for wrong, message in [
        (dict(block=(64, 1, 1)), r"compiled for blocks of \(32,\), not \(64, 1, 1\)"),
        (dict(block=(2048, 1, 1)), "1 to 1024 threads"),
        (dict(args=[x]), "2 parameters, and 1 are given"),
        (dict(args=[x, x]), "4 bytes, and 8 are given"),
        (dict(grid=(3, 1, 1), cluster=(2, 1, 1)), "no whole number of clusters"),
        (dict(smem=1 << 20), "at most 232448 bytes"),
    ]:
        right = dict(grid=(1, 1, 1), block=(32, 1, 1), args=[x, np.int32(0).tobytes()])
        with pytest.raises(ValueError, match=message):
            driver.launch(function, **{**right, **wrong})
    with pytest.raises(ValueError, match="order of asynchronous operations"):
        EmulatedDriver(order="late")


def test_special_registers_of_a_grid():
    source = """
extern "C" __global__ void k(int* out) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int n = blockDim.x * blockDim.y * blockDim.z, lane, warp;
  asm volatile("mov.u32 %0, %%laneid; mov.u32 %1, %%warpid;" : "=r"(lane), "=r"(warp));
  out[block * n + thread] = 10000 * block + 100 * thread + (lane == thread % 32) + 2 * (warp == thread / 32);
}"""
    (out,) = run(source, "k", (2, 3, 2), (5, 4, 3), [np.zeros((12, 60), "i4")])
    block, thread = np.mgrid[:12, :60]
    np.testing.assert_array_equal(out, 10000 * block + 100 * thread + 3)


def test_more_clusters_than_run_at_once():
    source = 'extern "C" __global__ void k(int* out) { if (threadIdx.x == 0) out[blockIdx.x] = blockIdx.x + 1; }'
    (out,) = run(source, "k", 40, 32, [np.zeros(40, "i4")], resident=3)
    np.testing.assert_array_equal(out, np.arange(40) + 1)


@pytest.mark.parametrize("order", ["lazy", "eager", 1, 2])
def test_the_order_of_asynchronous_work_does_not_matter_to_a_right_program(order):
    x = np.arange(1024, dtype="f4")
    _, out = run(samples.COPIES, "staged", 1, 64, [x, np.zeros(1024, "f4"), np.int32(4)], order=order)
    np.testing.assert_array_equal(out.reshape(4, 256), 2 * x.reshape(4, 256)[:, ::-1])


def test_a_missing_wait_shows_in_lazy_order():
    source = samples.COPIES.replace("cp.async.wait_group 1;", "").replace("cp.async.wait_group 0;", "")
    x = np.arange(1024, dtype="f4")
    right = 2 * x.reshape(4, 256)[:, ::-1]
    _, out = run(source, "staged", 1, 64, [x, np.zeros(1024, "f4"), np.int32(4)], order="eager")
    np.testing.assert_array_equal(out.reshape(4, 256), right)
    _, out = run(source, "staged", 1, 64, [x, np.zeros(1024, "f4"), np.int32(4)])
    assert (out.reshape(4, 256) != right).any()
