"""The instructions of the TMA engine as device functions, made when a kernel first needs them.

Source: PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "cp.async.bulk.prefetch.tensor".
"""

from __future__ import annotations

from typing import Any


def _coordinates(rank: int) -> tuple[str, str, str]:
    """Parameters, operands and their places for coordinates that follow three operands."""
    names = [f"c{d}" for d in range(rank)]
    return (
        ", ".join(f"int {n}" for n in names),
        ", ".join(f'"r"({n})' for n in names),
        "{" + ", ".join(f"%{3 + d}" for d in range(rank)) + "}",
    )


def copy_in(unit: Any, rank: int, *, multicast: bool = False, leader: bool = False) -> str:
    """The name of a function (to, map, bar, [mask,] coordinates…): global to shared memory, arriving on a barrier.

    Arguments:
      multicast: to the blocks of a mask. leader: tells the barrier of the first block of a pair (Blackwell).
    """
    given, operands, places = _coordinates(rank)
    name = f"copy_in_{rank}d" + ("_to_all" if multicast else "") + ("_of_pair" if leader else "")
    group = ".cta_group::2" if leader else ""
    cast = ".multicast::cluster" if multicast else ""
    mask = f", %{3 + rank}" if multicast else ""
    mask_operand = ', "h"(mask)' if multicast else ""
    given = f"u16 mask, {given}" if multicast else given
    return unit.function(
        name,
        f"""// A box of {rank} dimensions from global to shared memory.
__device__ __forceinline__ void {name}(u32 to, const TensorMap& map, u32 bar, {given}) {{
  asm volatile(
      "cp.async.bulk.tensor.{rank}d{group}.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast} "
      "[%0], [%1, {places}], [%2]{mask};"
      ::"r"(to), "l"(&map), "r"(bar), {operands}{mask_operand} : "memory");
}}
""",
    )


def gather_in(unit: Any) -> str:
    """The name of a function (to, map, bar, column, row0, row1, row2, row3): four rows (Blackwell)."""
    return unit.function(
        "gather_in",
        """// Four rows of a matrix from global to shared memory.
__device__ __forceinline__ void gather_in(
    u32 to, const TensorMap& map, u32 bar, int c, int r0, int r1, int r2, int r3) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(to), "l"(&map), "r"(bar), "r"(c), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
""",
    )


def copy_out(unit: Any, rank: int, reduction: str | None = None) -> str:
    """The name of a function (map, from, coordinates…): shared to global memory, or combined with what is there."""
    names = [f"c{d}" for d in range(rank)]
    given = ", ".join(f"int {n}" for n in names)
    operands = ", ".join(f'"r"({n})' for n in names)
    places = "{" + ", ".join(f"%{2 + d}" for d in range(rank)) + "}"
    name = f"copy_out_{rank}d" if reduction is None else f"{reduction}_out_{rank}d"
    what = "cp.async.bulk" if reduction is None else "cp.reduce.async.bulk"
    op = "" if reduction is None else f".{reduction}"
    return unit.function(
        name,
        f"""// A box of {rank} dimensions from shared to global memory.
__device__ __forceinline__ void {name}(const TensorMap& map, u32 from, {given}) {{
  asm volatile("{what}.tensor.{rank}d.global.shared::cta{op}.tile.bulk_group [%0, {places}], [%1];"
               ::"l"(&map), "r"(from), {operands} : "memory");
}}
""",
    )


def prefetch(unit: Any, rank: int) -> str:
    """The name of a function (map, coordinates…): global memory to the L2 cache."""
    names = [f"c{d}" for d in range(rank)]
    given = ", ".join(f"int {n}" for n in names)
    operands = ", ".join(f'"r"({n})' for n in names)
    places = "{" + ", ".join(f"%{1 + d}" for d in range(rank)) + "}"
    name = f"prefetch_{rank}d"
    return unit.function(
        name,
        f"""// A box of {rank} dimensions of global memory to the L2 cache.
__device__ __forceinline__ void {name}(const TensorMap& map, {given}) {{
  asm volatile("cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%0, {places}];"
               ::"l"(&map), {operands} : "memory");
}}
""",
    )
