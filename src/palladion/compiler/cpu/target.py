"""The machine that kernels are compiled for: this one.

    host().triple, host().cpu, host().features      what LLVM says of it
    host().LANES_F32, or LANES_F32                  f32 lanes of a vector register: 16, 8 or 4
    host().lanes(2)                                 lanes for elements of two bytes
    target_machine()                                an LLVM code generator for it

Kernels are compiled in the process that runs them, so "which CPU" has one answer; it is part of the key of every
cached object (cache.py), as a home folder may be shared by different machines.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import llvmlite.binding as llvm

CODEGEN_OPT = 2  # no passes before it; 0 is half as fast at run time, 3 no faster than 2


class UnsupportedHost(RuntimeError):
    """This machine has no native CPU compiler here."""


@dataclasses.dataclass(frozen=True)
class Host:
    """What LLVM knows of this machine.

    triple: such as "x86_64-unknown-linux-gnu"; cpu: such as "znver4"; features: LLVM's feature string; data_layout: of
    modules; arch: "x86_64" or "aarch64"; vector_bytes: of the widest vector register that kernels use; fma: fused
    multiply-add is one instruction; registers: number of vector registers.
    """

    triple: str
    cpu: str
    features: str
    data_layout: str
    arch: str
    vector_bytes: int
    fma: bool
    registers: int

    @property
    def LANES_F32(self) -> int:
        """f32 lanes of one vector register."""
        return self.vector_bytes // 4

    def lanes(self, element_bytes: int) -> int:
        """Lanes of one vector register for elements of that size."""
        return max(1, self.vector_bytes // element_bytes)

    def has(self, feature: str) -> bool:
        """Whether the CPU has an LLVM feature, such as "avx512bf16"."""
        return f"+{feature}" in self.features.split(",")


@functools.cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def refusal(platform: str, arch: str) -> str | None:
    """Why kernels cannot be compiled natively on such a machine, in one sentence; None if they can.

    Arguments: platform: as `sys.platform`; arch: the first part of LLVM's triple.
    """
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        return "the native CPU compiler needs a 64-bit little-endian machine; use interpret=True here"
    if platform != "linux":  # macOS has no unnamed semaphores, Windows another calling convention
        return f"the native CPU compiler runs on Linux only, and this is {platform}; use interpret=True here"
    if arch not in ("x86_64", "aarch64"):
        return f"the native CPU compiler knows x86-64 and aarch64, not {arch}; use interpret=True here"
    return None


@functools.cache
def host() -> Host:
    """This machine.

    Raises: UnsupportedHost: kernels cannot be compiled for it; the message says why and what to do.
    """
    triple = llvm.get_process_triple()
    arch = triple.split("-")[0].replace("arm64", "aarch64")
    reason = refusal(sys.platform, arch)
    if reason:
        raise UnsupportedHost(reason)
    features = llvm.get_host_cpu_features()
    wide = arch == "x86_64" and all(features.get(f) for f in ("avx512f", "avx512bw", "avx512dq", "avx512vl"))
    avx2 = arch == "x86_64" and bool(features.get("avx2"))
    flat, cpu = features.flatten(), llvm.get_host_cpu_name()
    return Host(
        triple=triple,
        cpu=cpu,
        features=flat,
        data_layout=str(_machine(cpu, flat).target_data),
        arch=arch,
        vector_bytes=64 if wide else 32 if avx2 else 16,
        fma=arch == "aarch64" or bool(features.get("fma")),
        registers=32 if wide or arch == "aarch64" else 16,
    )


def _machine(cpu: str, features: str) -> Any:
    return _target().create_target_machine(cpu=cpu, features=features, opt=CODEGEN_OPT, reloc="pic", codemodel="small")


def target_machine() -> Any:
    """A new LLVM code generator for the host. One serves one thread at a time."""
    return _machine(host().cpu, host().features)


def __getattr__(name: str) -> Any:
    # Read when asked for, so that importing this file never fails on a machine that cannot compile.
    if name == "LANES_F32":
        return host().LANES_F32
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
