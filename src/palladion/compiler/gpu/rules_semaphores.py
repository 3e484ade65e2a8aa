"""Semaphores: 32-bit counters in global memory, zero when the call begins.

A signal comes after everything that the Pallas thread has done; a wait is made by one of its CUDA threads, and all go
on together. Between the two stand a release and an acquire of the whole system, and a fence towards asynchronous
copies, which may be what wrote the data, or will read it.

Source: PTX ISA, "red", "ld.acquire", "atom.cas", memory consistency model.
"""

from __future__ import annotations

from typing import Any

import jax

from palladion.compiler.gpu import memory, plans
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import View
from palladion.language import semaphores
from palladion.language.gpu.semaphores import semaphore_signal_multicast_p

HEADER = r"""// Semaphores: counters in global memory.
__device__ __forceinline__ void semaphore_signal(char* sem, int n) {
  asm volatile("fence.proxy.async;\nred.release.sys.global.add.u32 [%0], %1;" ::"l"(sem), "r"(n) : "memory");
}
__device__ __forceinline__ int semaphore_read(const char* sem) {
  int n;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(n) : "l"(sem) : "memory");
  return n;
}
// Wait until it is at least n.
__device__ __forceinline__ void semaphore_await(const char* sem, int n) {
  while (semaphore_read(sem) < n) __nanosleep(20);
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Wait until it is at least n, and take n off it.
__device__ __forceinline__ void semaphore_take(char* sem, int n) {
  while (true) {
    const int found = semaphore_read(sem);
    if (found < n) {
      __nanosleep(20);
      continue;
    }
    int seen;
    asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(seen) : "l"(sem), "r"(found), "r"(found - n) : "memory");
    if (seen == found) break;
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}
"""


def _counter(unit: Unit, ref_view: Any) -> str:
    """C++ of the address of one semaphore."""
    unit.tables.more["communicates"] = True
    unit.function("semaphores", HEADER)
    view: View = memory.view_of(unit, ref_view)
    return _address(view.folded())


def _address(view: View) -> str:
    start = view.offset + sum(int(a.places()[0]) for a in view.axes)
    return plans.total(view.ref.base, list(map(str, view.terms)), start)


def _here(unit: Unit, device_id: Any, device_id_type: Any = None) -> None:
    """Refuse another device; that of a mesh of one device is this one."""
    if device_id is None:
        return
    sizes = unit.tables.more.get("devices", {})
    if all(n == 1 for n in sizes.values()) and sizes:
        return
    leaves = jax.tree.leaves(device_id, is_leaf=lambda x: hasattr(x, "value"))
    if not sizes and all(getattr(x.value, "value", None) == 0 for x in leaves):
        return
    raise unit.refuse(
        "The kernel signals another device; the compiler builds kernels for one device so far.",
        "interpret=plgpu.InterpretGPUParams() runs it on simulated devices",
    )


@RULES.rule(semaphores.semaphore_signal_p)
def _signal(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    _here(unit, given.device_id)
    _raise(unit, given.sem, given.value.value)
    return []


def _raise(unit: Unit, sem: Any, amount: Scalar) -> None:
    address = _counter(unit, sem)
    unit.sync()
    with unit.one_thread():
        unit.line(f"semaphore_signal({address}, {amount.text});")


@RULES.rule(semaphore_signal_multicast_p)
def _multicast(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    sizes = unit.tables.more.get("devices", {})
    if any(sizes.get(a, 2) != 1 for a in eqn.params["collective_axes"]):
        raise unit.refuse(
            "The kernel signals all devices of a mesh; the compiler builds kernels for one device so far.",
            "interpret=plgpu.InterpretGPUParams() runs it on simulated devices",
        )
    _raise(unit, given.sem, given.value.value)
    return []


@RULES.rule(semaphores.semaphore_wait_p)
def _wait(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given = memory.arguments(unit, eqn, values)
    address = _counter(unit, given.sem)
    how = "semaphore_take" if given.decrement else "semaphore_await"
    with unit.one_thread():
        unit.line(f"{how}({address}, {given.value.value.text});")
    unit.sync()
    return []


@RULES.rule(semaphores.semaphore_read_p)
def _read(unit: Unit, eqn: Any, *values: Any) -> Scalar:
    (ref_view,) = jax.tree.unflatten(eqn.params["tree"], memory.operands_of(unit, eqn, values))
    address = _counter(unit, ref_view)
    return told_by_one(unit, eqn.outvars[0].aval.dtype, f"semaphore_read({address})")


def told_by_one(unit: Unit, dtype: Any, text: str) -> Scalar:
    """A scalar that one CUDA thread finds and tells the others, so that all have the same."""
    if unit.warps == 1:
        return unit.scalar(dtype, f"__shfl_sync(0xffffffffu, {text}, 0)")
    at = unit.tables.more.get("told")
    if at is None:
        at = unit.tables.more["told"] = unit.shared(16 * unit.num_threads, 16)
    place = f"(volatile int*)(smem + {at}{'' if unit.num_threads == 1 else ' + wg * 16'})"
    unit.sync()
    with unit.one_thread():
        unit.line(f"*{place} = {text};")
    unit.sync()
    return unit.scalar(dtype, f"*{place}")
