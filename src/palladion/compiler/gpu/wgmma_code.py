"""The C++ of Hopper's matrix instructions: one device function for each shape and types that a kernel uses.

Source: PTX ISA, wgmma.mma_async, mma.sync; facts file, sections 4.1 and 9.1.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import operands

_TYPES = {
    "float32": "tf32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
}
_SUMS = {"float32": ("f32", "float", "f"), "float16": ("f16", "u32", "r"), "int32": ("s32", "int", "r")}
_DEPTHS = {"tf32": 8, "bf16": 16, "f16": 16, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}

GROUPS = r"""
// --- wgmma ---
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
// What is read of an accumulator after this, is read after the waits before it.
template <int n> __device__ __forceinline__ void wgmma_settled(float (&acc)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
template <class T, int n> __device__ __forceinline__ void wgmma_settled(T (&acc)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(acc[i])::"memory");
}"""


def product_function(
    unit: Any, n: int, dtypes: tuple[str, str, str], registers: int, left: bool, a_mn_major: bool, b_mn_major: bool
) -> str:
    """The name of a function that issues one wgmma.

    Arguments:
      unit: the unit. n: columns. dtypes: of A, B and the accumulator.
      registers: of the accumulator. left: whether A is in registers.
      a_mn_major, b_mn_major: whether an operand of 16 bits lies with K outermost.
    """
    a, b = _TYPES[dtypes[0]], _TYPES[dtypes[1]]
    sums, c, letter = _SUMS[dtypes[2]]
    depth = _DEPTHS[a]
    name = f"wgmma_64x{n}x{depth}_{sums}_{a}_{b}{'_regs' if left else ''}{'_at' if a_mn_major else ''}"
    name += "_bt" if b_mn_major else ""
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(registers))
    listed = ", ".join(f"%{i}" for i in range(registers))
    at = registers
    if left:
        given, operand = "const u32* a, u32 b_low, u32 b_high", f"{{%{at}, %{at + 1}, %{at + 2}, %{at + 3}}}"
        inputs = [f'"r"(a[{i}])' for i in range(4)] + ['"l"(matrix(b_low, b_high))']
    else:
        given, operand = "u32 a_low, u32 a_high, u32 b_low, u32 b_high", f"%{at}"
        inputs = ['"l"(matrix(a_low, a_high))', '"l"(matrix(b_low, b_high))']
    scales = ["1"] if sums == "s32" else ["1", "1", "1"]  # add to D; A and B as they are
    if depth == 16:
        scales += [str(int(b_mn_major))] if left else [str(int(a_mn_major)), str(int(b_mn_major))]
    form = f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sums}.{a}.{b}"
    end = f"%{at + len(inputs) - 1}, {', '.join(scales)};"
    operands.declare(unit)
    return unit.function(
        name,
        f"__device__ __forceinline__ void {name}({c}* d, {given}) {{\n"
        f'  asm volatile("{form} "\n      "{{{listed}}}, "\n      "{operand}, {end}"\n'
        f"      : {outs}\n      : {', '.join(inputs)});\n}}",
    )


def mma_function(unit: Any, dtypes: tuple[str, ...]) -> str:
    """The name of a function that multiplies 16 x 8 elements by 32 bytes of K, in a warp.

    Arguments:
      unit: the unit. dtypes: of A, B and the accumulator.
    """
    a, b = _TYPES[dtypes[0]], _TYPES[dtypes[1]]
    sums, c, letter = _SUMS[dtypes[2]]
    depth = _DEPTHS[a]
    name = f"mma_16x8x{depth}_{sums}_{a}_{b}"
    count = 2 if sums == "f16" else 4
    listed = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    operands = ", ".join([f'"r"(a[{i}])' for i in range(4)] + ['"r"(b[0])', '"r"(b[1])'])
    lists = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, {{%{count + 4}, %{count + 5}}}"
    return unit.function(
        name,
        f"__device__ __forceinline__ void {name}({c}* d, const u32* a, const u32* b) {{\n"
        f'  asm("mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{a}.{b}.{sums} {{{listed}}}, {lists}, {{{listed}}};"\n'
        f"      : {outs} : {operands});\n}}",
    )
