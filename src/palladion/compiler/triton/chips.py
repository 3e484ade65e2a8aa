"""What the report needs to know of the GPUs that Triton compiles for: limits of shared memory, registers and threads.

Source: the CUDA C++ programming guide, table "Technical specifications per compute capability".
"""

from __future__ import annotations

import dataclasses

from palladion.errors import mistake


@dataclasses.dataclass(frozen=True)
class Chip:
    """One compute capability.

    Attributes:
      sm: as a number (90).
      shared_block: bytes of shared memory that one program may have.
      shared_sm: bytes of an SM, shared by the programs that run there; each takes `RESERVED` more than it asks for.
      registers: 32-bit registers of an SM.
      threads, blocks: that an SM runs at a time, at most.
    """

    sm: int
    shared_block: int
    shared_sm: int
    threads: int
    blocks: int
    registers: int = 65536


RESERVED = 1024  # bytes of shared memory that the system takes of each block
_KIB = 1024
CHIPS = {
    c.sm: c
    for c in (
        Chip(80, 163 * _KIB, 164 * _KIB, 2048, 32),
        Chip(86, 99 * _KIB, 100 * _KIB, 1536, 16),
        Chip(89, 99 * _KIB, 100 * _KIB, 1536, 24),
        Chip(90, 227 * _KIB, 228 * _KIB, 2048, 32),
        Chip(100, 227 * _KIB, 228 * _KIB, 2048, 32),
        Chip(120, 99 * _KIB, 100 * _KIB, 1536, 24),
    )
}


def chip_of(target: str) -> Chip:
    """The chip of a target: `triton:sm_90`.

    Raises: ValueError: there is no such chip; the message lists those that there are.
    """
    family, _, name = target.partition(":")
    number = name.removeprefix("sm_").removesuffix("a")
    if family != "triton" or not number.isdigit() or int(number) not in CHIPS:
        known = ", ".join(f"triton:sm_{sm}" for sm in CHIPS)
        raise mistake(ValueError, f"There is no compile target {target!r}.", hint=f"for Triton: {known}")
    return CHIPS[int(number)]


def occupancy(chip: Chip, registers: int, shared: int, warps: int) -> tuple[int, str]:
    """How many programs an SM runs at a time, and what stops it from running more.

    Registers go to warps in portions of 256, which is 8 for each thread.
    """
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    limits = {
        "threads": chip.threads // (32 * warps),
        "registers": chip.registers // (per_warp * warps),
        "shared memory": chip.shared_sm // (shared + RESERVED),
        "blocks": chip.blocks,
    }
    reason = min(limits, key=lambda name: limits[name])
    return limits[reason], reason
