"""What the code generator hands to the toolchain and to the launch: CUDA C++, and all that one must know to run it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of an operand's array.

    Attributes:
      operand: its number among the arrays of the call: prefetched scalars, inputs, outputs, then what the launch
        allocates (`Generated.workspaces`).
    """

    operand: int


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter: a 128-byte tensor map of an operand's array, as `cuTensorMapEncodeTiled` makes it.

    Attributes:
      operand: as of `Pointer`.
      dtype: of the elements ("float16"; sub-byte and 8-bit floats as the unsigned integers as wide).
      offset: of the first element, in bytes.
      dims: sizes in elements, innermost first. strides: in bytes, of dimensions 1 and up.
      box: sizes in elements, innermost first. element_strides: the same.
      swizzle: 0, 32, 64 or 128 bytes. fill: "zeros" or "nan".
    """

    operand: int
    dtype: str
    offset: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    fill: str = "zeros"


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Device memory that the launch allocates for a call.

    Attributes: name: for messages. size: in bytes. zeroed: whether it must be zero at the start (semaphores).
    """

    name: str
    size: int
    zeroed: bool


@dataclasses.dataclass(frozen=True)
class Generated:
    """A kernel call as CUDA C++.

    Attributes:
      name: of the `__global__` function. source: the whole translation unit. arch: "sm_90a" or "sm_100a".
      threads: CUDA threads a block. cluster, grid: blocks along x, y, z; the grid counts blocks, not clusters.
      smem_bytes: dynamic shared memory. static_smem_bytes: what is declared in the source.
      tmem_columns: allocated at once. barriers: how many mbarriers.
      params: `Pointer`s and `TensorMap`s, in the order of the function's parameters.
      workspaces: memory that the launch allocates.
      max_registers: limit for the assembler, or None.
      layouts: lines on how arrays and buffers lie, for people.
    """

    name: str
    source: str
    arch: str
    threads: int
    cluster: tuple[int, int, int]
    grid: tuple[int, int, int]
    smem_bytes: int
    static_smem_bytes: int
    tmem_columns: int
    barriers: int
    params: tuple[Any, ...]
    workspaces: tuple[Workspace, ...] = ()
    max_registers: int | None = None
    layouts: tuple[str, ...] = ()
