"""The SMEM and TMEM of a block as addresses: what fits, and what memory a new buffer takes over.

Buffers of a kernel live for its whole time, those of `run_scoped` for their scope; a scope's memory is used again by
the next one. A buffer that takes over memory inherits who read and wrote it last, so that a TMA copy into it is
checked against ordinary accesses of the scope before, which it may overtake without a fence.

The real compiler places buffers otherwise than this allocator, which puts each scope above those around it. What is
over budget here is over budget there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from palladion.language.dtypes import element_bits
from palladion.simulator.gpu.history import Buffer

SMEM_ALIGNMENT, BARRIER_BYTES = 1024, 8
SHOWN = 4  # buffers that a message names


@dataclasses.dataclass
class _Ghost:
    """A buffer that is no more: where it lay, and the stamps of the last accesses to it."""

    start: int
    end: int
    stamps: set[int]


class SharedMemory:
    """The memories of one block. Attributes: smem, tmem: bytes and columns in use."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.smem = self.tmem = 0
        self._taken: list[tuple[int, int, str]] = []  # of SMEM: where it begins, how much, by what
        self._ghosts: list[_Ghost] = []

    def take_smem(self, size: int, label: str, where: str | None) -> int:
        """Take bytes of SMEM; where they begin.

        Raises:
          KernelFinding: "smem-overflow".
        """
        machine, start = self.block.machine, self.smem
        self._taken = [*(t for t in self._taken if t[0] < start), (start, size, label)]
        self.smem += size
        machine.most_smem = max(machine.most_smem, self.smem)
        limit = machine.chip.smem_bytes
        if self.smem > limit:
            machine.found(
                "smem-overflow",
                f"SMEM overflow: {label} brings the block to {self.smem:,} bytes, and a block can have {limit:,}"
                f"{self._largest()}.",
                where=where,
                when=self.block.name,
                operand=label,
                hint="fewer or smaller buffers: lower max_concurrent_steps, or smaller tiles",
            )
        return start

    def _largest(self) -> str:
        """What takes most of SMEM."""
        largest = sorted(self._taken, key=lambda t: -t[1])[:SHOWN]
        return " (" + ", ".join(f"{size:,} for {label}" for _, size, label in largest) + ")"

    def take_tmem(self, columns: int, label: str, where: str | None) -> int:
        """Take columns of TMEM.

        Raises:
          KernelFinding: "tmem-overflow".
        """
        machine, start = self.block.machine, self.tmem
        self.tmem += columns
        machine.most_tmem = max(machine.most_tmem, self.tmem)
        limit = machine.chip.tmem_columns
        if self.tmem > limit:
            machine.found(
                "tmem-overflow",
                f"TMEM overflow: {label} brings the block to {self.tmem} columns, and there are {limit}"
                + ("." if limit else f": {machine.chip.name} ({machine.chip.arch}) has no tensor memory."),
                where=where,
                when=self.block.name,
                operand=label,
                hint="a column is 32 bits wide: pack 16-bit operands, use fewer accumulators"
                if limit
                else 'TMEM is for Blackwell: InterpretGPUParams(arch="sm_100a")',
            )
        return start

    def marks(self) -> tuple[int, int]:
        """How much is in use, to be given back to `release`."""
        return self.smem, self.tmem

    def release(self, marks: tuple[int, int], buffers: list[tuple[Buffer, int]]) -> None:
        """A scope ends: free its memory, remembering who accessed it. `buffers`: those in SMEM, and where they lie."""
        for buffer, start in buffers:
            if buffer.writes is None:
                continue
            end = start + smem_bytes(buffer.data.shape, buffer.data.dtype)
            self._ghosts.append(_Ghost(start, end, buffer.stamps()))
        self.smem, self.tmem = marks

    def haunt(self, buffer: Buffer, start: int) -> None:
        """Let a new buffer in SMEM inherit the accesses to what lay there before."""
        if buffer.writes is None or not self._ghosts:
            return
        end = start + smem_bytes(buffer.data.shape, buffer.data.dtype)
        for ghost in self._ghosts:
            if ghost.start < end and start < ghost.end:
                for stamp in ghost.stamps:
                    buffer.note_earlier(int(stamp))
        self._ghosts = [g for g in self._ghosts if not (start <= g.start and g.end <= end)]


@functools.lru_cache(4096)
def smem_bytes(shape: Any, dtype: Any) -> int:
    """Bytes of SMEM that a buffer takes, aligned as TMA and tensor cores want it."""
    size = math.prod(shape) * element_bits(dtype) // 8
    aligned = SMEM_ALIGNMENT if size >= SMEM_ALIGNMENT else 128
    return -(-size // aligned) * aligned


@functools.lru_cache(4096)
def tmem_columns(shape: Any, dtype: Any, packed: bool | None) -> int:
    """Columns of TMEM that a buffer takes."""
    *batch, _, columns = shape
    bits = 8 if jnp.dtype(dtype) == jnp.bool_ else element_bits(dtype)
    width = columns * bits // 32 if packed else columns
    return math.prod(batch) * max(width, 1)
