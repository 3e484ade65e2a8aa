"""Atomics that C++ does not reach: vectors, halves, 16 and 128 bits, other CTAs' memory; what is returned, in order."""

import ml_dtypes
import numpy as np
import pytest

from emulator.running import apply, run

HEAD = ".version 8.5\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, registers: str = "") -> str:
    """A kernel with %rd1, the address of an array, and %r1, the thread."""
    return f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
  .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<20>; .reg .b16 %h<20>; .reg .pred %p<4>; .reg .f64 %d<4>;
  {registers}
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  {body}
  ret;
}}"""


def old_values(operation: str, kind: str, start, operands) -> tuple[np.ndarray, np.ndarray]:
    """All threads do an operation on one number: (what each got, what is left)."""
    size = np.asarray(start).dtype.itemsize * 8
    text = kernel(f"""
  mul.wide.u32 %rd3, %r1, {size // 8}; add.u64 %rd4, %rd2, %rd3;
  ld.global.b{size} %v, [%rd4];
  atom.global.{operation}.{kind} %v, [%rd1], %v;
  st.global.b{size} [%rd4], %v;""", f".reg .b{size} %v;")  # fmt: skip
    x, y = run(text, "k", 1, len(operands), [np.array([start]), np.asarray(operands, np.asarray(start).dtype)])
    return y, x[0]


def test_inc_and_dec_wrap():
    given = np.full(40, 6, "u4")
    old, left = old_values("inc", "u32", np.uint32(3), given)
    assert old.tolist() == [(3 + k) % 7 for k in range(40)] and left == (3 + 40) % 7
    old, left = old_values("dec", "u32", np.uint32(3), given)
    assert old.tolist() == [(3 - k) % 7 for k in range(40)] and left == (3 - 40) % 7
    old, left = old_values("dec", "u32", np.uint32(9), given[:2])  # above the bound: back to it
    assert old.tolist() == [9, 6] and left == 5


@pytest.mark.parametrize("kind, dtype", [("s32", "i4"), ("u32", "u4"), ("s64", "i8"), ("u64", "u8")])
@pytest.mark.parametrize("operation", ["min", "max"])
def test_minima_keep_signs(kind, dtype, operation):
    numbers = np.array([5, -1, 7, -(2**31), 2**31 - 1, 0], "i8").astype(dtype)
    old, left = old_values(operation, kind, numbers[0], numbers)
    running = [(np.minimum if operation == "min" else np.maximum).reduce(numbers[:k]) for k in range(1, 7)]
    assert old.tolist() == [numbers[0], *running[:-1]] and left == running[-1]


def test_the_order_of_lanes_and_floats():
    numbers = np.array([1e8, 1, -1e8, 1, 3], "f4")  # rounded after each
    old, left = old_values("add", "f32", np.float32(0.5), numbers)
    total, want = np.float32(0.5), []
    for n in numbers:
        want.append(total)
        total = np.float32(total + n)
    assert old.tolist() == want and left == total
    tiny = np.float32(1e-40)
    assert old_values("add", "f32", tiny, np.array([tiny]))[1] == 0, "global float32 additions flush"
    text = kernel("""
  .shared .align 4 .f32 cell;
  ld.global.f32 %f1, [%rd1]; st.shared.f32 [cell], %f1; atom.shared.add.f32 %f2, [cell], %f1; ld.shared.f32 %f3, [cell];
  st.global.f32 [%rd1], %f3;""")  # fmt: skip
    x, _ = run(text, "k", 1, 1, [np.array([tiny]), np.zeros(1, "f4")])
    assert x[0] == tiny + tiny, "those of shared memory do not"
    old, left = old_values("add", "f64", np.float64(0.1), np.array([0.2, 0.3]))
    assert old.tolist() == [0.1, 0.1 + 0.2] and left == 0.1 + 0.2 + 0.3


@pytest.mark.parametrize("kind, dtype", [("f16", "f2"), ("bf16", ml_dtypes.bfloat16)])
def test_halves(kind, dtype):
    numbers = np.random.default_rng(0).standard_normal(64).astype(dtype)
    text = kernel(f"""
  mul.wide.u32 %rd3, %r1, 4; add.u64 %rd4, %rd2, %rd3;
  ld.global.b32 %r2, [%rd4];
  atom.global.add.noftz.{kind}x2 %r3, [%rd1], %r2;
  red.global.add.noftz.{kind}x2 [%rd1], %r2;
  st.global.b32 [%rd4], %r3;""")  # fmt: skip
    x, y = run(text, "k", 1, 32, [np.zeros(2, dtype).view("u4"), numbers.view("u4")])
    total, want = np.zeros(2, dtype), []
    for pair in numbers.reshape(32, 2):
        want.append(total)
        total = (total.astype("f4") + pair.astype("f4")).astype(dtype)
    np.testing.assert_array_equal(y.view(dtype).reshape(32, 2).astype("f4"), np.array(want).astype("f4"))
    for pair in numbers.reshape(32, 2):
        total = (total.astype("f4") + pair.astype("f4")).astype(dtype)
    np.testing.assert_array_equal(x.view(dtype).astype("f4"), total.astype("f4"))


def test_vectors():
    text = kernel("""
  mul.wide.u32 %rd3, %r1, 16; add.u64 %rd4, %rd2, %rd3;
  ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd4];
  and.b32 %r2, %r1, 1; mul.wide.u32 %rd5, %r2, 16; add.u64 %rd6, %rd1, %rd5;
  atom.relaxed.gpu.global.v4.f32.add {%f5, %f6, %f7, %f8}, [%rd6], {%f1, %f2, %f3, %f4};
  red.relaxed.gpu.global.add.v2.f32 [%rd6+8], {%f1, %f2};
  st.global.v4.f32 [%rd4], {%f5, %f6, %f7, %f8};""")  # fmt: skip
    y = np.arange(64, dtype="f4").reshape(16, 4)
    x, got = run(text, "k", 1, 16, [np.zeros((2, 4), "f4"), y])
    sums = np.stack([y[0::2].cumsum(0), y[1::2].cumsum(0)])
    np.testing.assert_array_equal(got[2:], sums.transpose(1, 0, 2)[:-1].reshape(14, 4))
    want = sums[:, -1].copy()
    want[:, 2:] += np.stack([y[0::2, :2].sum(0), y[1::2, :2].sum(0)])
    np.testing.assert_array_equal(x, want)


def test_compare_and_swap_of_all_sizes():
    text = kernel("""
  cvt.u16.u32 %h1, %r1; add.u16 %h2, %h1, 1;
  atom.global.cas.b16 %h3, [%rd1], %h1, %h2;
  cvt.u64.u32 %rd3, %r1; mov.b64 %rd4, 7; mov.b128 %q1, {%rd3, %rd4}; add.u64 %rd5, %rd3, 1; mov.b128 %q2, {%rd5, %rd4};
  atom.global.cas.b128 %q3, [%rd1+16], %q1, %q2;
  mov.b128 {%rd6, %rd7}, %q3;
  atom.global.exch.b128 %q3, [%rd1+32], %q1;
  setp.eq.u32 %p1, %r1, 5;
  @%p1 atom.global.exch.b64 %rd8, [%rd1+48], %rd3;
  mul.wide.u32 %rd9, %r1, 8; add.u64 %rd10, %rd2, %rd9;
  st.global.u64 [%rd10], %rd6;""", ".reg .b128 %q<4>;")  # fmt: skip
    start = np.zeros(8, "u8")
    start[3] = 7
    x, y = run(text, "k", 1, 20, [start, np.zeros(20, "u8")])
    # each lane finds what the one before has left
    assert x[0] == 20 and x[2:4].tolist() == [20, 7] and y.tolist() == list(range(20))
    assert x[4:6].tolist() == [19, 7] and x[6] == 5


def test_memory_of_another_cta():
    source = """
extern "C" __global__ void __cluster_dims__(4, 1, 1) k(int* out) {
  __shared__ int cell;
  unsigned rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  cell = 0;
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  unsigned at = (unsigned)__cvta_generic_to_shared(&cell), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"((rank + 1) & 3));
  int old;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(there), "r"(rank + 1) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0) out[rank] = cell;
  if (threadIdx.x == 31) out[4 + rank] = old;
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}"""
    (out,) = run(source, "k", 4, 32, [np.zeros(8, "i4")], cluster=(4, 1, 1))
    assert out.tolist() == [32 * 4, 32, 64, 96, 31, 62, 93, 124]


def test_carries_cross_blocks():
    """add.cc, addc and madc, with a branch between them."""
    a = np.array([2**64 - 1, 5, 2**33, 2**32 - 1], "u8")
    body = """
  mov.b64 {%t0, %t1}, %a; mov.b64 {%t2, %t3}, %b;
  add.cc.u32 %t4, %t0, %t2;
  setp.eq.u32 %p, %t0, 12345;
  @%p bra AWAY;
  addc.u32 %t5, %t1, %t3;
  mov.b64 %d, {%t4, %t5};
AWAY:"""
    b = np.array([1, 7, 2**33 + 2**32 - 1, 1], "u8")
    np.testing.assert_array_equal(apply(body, a, b, out="u8"), a + b)
    body = """
  mov.b64 {%t0, %t1}, %a; mov.b64 {%t2, %t3}, %b;
  sub.cc.u32 %t4, %t0, %t2; subc.u32 %t5, %t1, %t3;
  mad.lo.cc.u32 %t4, %t0, %t2, %t4; madc.hi.u32 %t5, %t0, %t2, %t5;
  mov.b64 %d, {%t4, %t5};"""
    want = [(int(x) - int(y) + (int(x) % 2**32) * (int(y) % 2**32)) % 2**64 for x, y in zip(a, b)]
    assert apply(body, a, b, out="u8").tolist() == want
