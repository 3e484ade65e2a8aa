"""The C++ of Blackwell's tensor core instructions: device functions of a few lines around one instruction each.

Source: PTX ISA, tcgen05.mma, tcgen05.ld, tcgen05.st, tcgen05.cp, tcgen05.commit; facts file, sections 8.3, 8.9 to 8.11.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import operands

WAITS = r"""
// --- tensor memory ---
__device__ __forceinline__ void tmem_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
// What is read of these registers after this, is read after the waits before it.
template <int n> __device__ __forceinline__ void tmem_settled(u32 (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}"""


def move_function(unit: Any, what: str, shape: str, times: int, registers: int) -> str:
    """The name of a function that loads or stores a part of tensor memory.

    Arguments:
      unit: the unit. what: "ld" or "st". shape: "32x32b", "16x256b" …; times: its `.xN`. registers: of a thread.
    """
    unit.function("tmem", WAITS)
    name = f"tmem_{what}_{shape}_x{times}"
    form = f"tcgen05.{what}.sync.aligned.{shape}.x{times}.b32"
    if what == "ld":
        listed = ", ".join(f"%{i}" for i in range(registers))
        outs = ", ".join(f'"=r"(x[{i}])' for i in range(registers))
        text = f'asm volatile("{form} {{{listed}}}, [%{registers}];" : {outs} : "r"(at));'
        given = "u32* x, u32 at"
    else:
        listed = ", ".join(f"%{i + 1}" for i in range(registers))
        values = ", ".join(f'"r"(x[{i}])' for i in range(registers))
        text = f'asm volatile("{form} [%0], {{{listed}}};" ::"r"(at), {values});'
        given = "u32 at, const u32* x"
    return unit.function(name, f"__device__ __forceinline__ void {name}({given}) {{\n  {text}\n}}")


def product_function(
    unit: Any, group: int, kind: str, a_in_tmem: bool, scale_vector: str = "", sparse: bool = False
) -> str:
    """The name of a function that issues one product.

    Arguments:
      unit: the unit. group: of blocks, 1 or 2. kind: of operands, as PTX calls it. a_in_tmem: where A is.
      scale_vector: how many scales block-scaled operands have for an instruction ("1X"), which then takes their places.
      sparse: whether A is; the instruction then takes the place of its metadata.
    """
    operands.declare(unit)
    name = f"tcgen05_mma_{kind}_{scale_vector}_{group}".replace("__", "_")
    name += ("_tmem" if a_in_tmem else "") + ("_sparse" if sparse else "")
    form = f"tcgen05.mma{'.sp' if sparse else ''}.cta_group::{group}.kind::{kind}"
    form += f".block_scale.scale_vec::{scale_vector}" if scale_vector else ""
    a = ("u32 a", '"r"(a)', "[%1]") if a_in_tmem else ("u32 a_low, u32 a_high", '"l"(matrix(a_low, a_high))', "%1")
    more = (["metadata"] if sparse else []) + (["a_scale", "b_scale"] if scale_vector else [])
    given = "".join(f", u32 {x}" for x in more)
    values = "".join(f', "r"({x})' for x in more)
    metadata = ", [%5]" if sparse else ""
    scales = f", [%{5 + sparse}], [%{6 + sparse}]" if scale_vector else ""
    return unit.function(
        name,
        f"__device__ __forceinline__ void {name}(u32 d, {a[0]}, u32 b_low, u32 b_high, u32 id, bool add{given}) {{\n"
        f'  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.u32 add, %4, 0;\\n"\n'
        f'      "{form} [%0], {a[2]}, %2{metadata}, %3{scales}, add;\\n}}"\n'
        f'      ::"r"(d), {a[1]}, "l"(matrix(b_low, b_high)), "r"(id), "r"((u32)add){values} : "memory");\n}}',
    )


def commit_function(unit: Any, group: int, multicast: bool) -> str:
    """The name of a function that lets a barrier (or that of several blocks) know of what was issued before."""
    name = f"tcgen05_commit_{group}{'_multicast' if multicast else ''}"
    form = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    if multicast:
        body = f'asm volatile("{form}.multicast::cluster.b64 [%0], %1;" ::"r"(bar), "h"(blocks) : "memory");'
        given = "u32 bar, u16 blocks"
    else:
        body, given = f'asm volatile("{form}.b64 [%0];" ::"r"(bar) : "memory");', "u32 bar"
    return unit.function(name, f"__device__ __forceinline__ void {name}({given}) {{\n  {body}\n}}")


def copy_function(unit: Any, group: int, shape: str) -> str:
    """The name of a function that copies a part of shared memory to tensor memory."""
    operands.declare(unit)
    name = f"tcgen05_copy_{shape.split('.')[0]}_{group}"
    form = f"tcgen05.cp.cta_group::{group}.{shape}"
    return unit.function(
        name,
        f"__device__ __forceinline__ void {name}(u32 to, u32 low, u32 high) {{\n"
        f'  asm volatile("{form} [%0], %1;" ::"r"(to), "l"(matrix(low, high)) : "memory");\n}}',
    )
